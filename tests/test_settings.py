"""Every wrong setting is refused with its field, its value and what was expected."""

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.errors import SettingError
from fedbilevel.settings import Settings, kinds, setting


@dataclass(frozen=True, kw_only=True)
class Sample(Settings):
    lr: float = setting(0.1, "step of x", symbol="eta", above=0)
    share: float = setting(0.5, "share of something", least=0, most=1)
    num: int = setting(3, "how many", least=1)
    steps: int | tuple[int, ...] = setting(5, "local steps", least=1)
    radius: float | None = setting(None, "radius of the ball", above=0)
    kind: Literal["plain", "robust"] = setting("plain", "which")
    fast: bool = setting(False, "whether to hurry")
    label: str = setting("run", "a name")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 1e-300), ("lr", 2), ("share", 0), ("share", 1.0), ("num", 1), ("steps", 1), ("steps", (1, 2, 7)),
        ("radius", None), ("radius", 3),
        ("kind", "robust"), ("fast", True), ("label", ""),
    ],
)  # fmt: skip
def test_values_inside_their_range_are_kept_as_given(field, value):
    assert Sample(**{field: value}).asdict() == {**Sample().asdict(), field: value}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("lr", 0, "lr is 0, expected a value greater than 0: step of x."),
        ("lr", -0.5, "lr is -0.5, expected a value greater than 0: step of x."),
        ("lr", float("nan"), "lr is nan, expected a finite number."),
        ("lr", "fast", "lr is 'fast', expected a number."),
        ("lr", None, "lr is None, expected a number."),
        ("lr", True, "lr is True, expected a number."),
        ("share", -0.1, "share is -0.1, expected a value at least 0: share of something."),
        ("share", 1.5, "share is 1.5, expected a value at most 1: share of something."),
        ("num", 0, "num is 0, expected a value at least 1: how many."),
        ("num", 2.0, "num is 2.0, expected a whole number."),
        ("num", True, "num is True, expected a whole number."),
        ("steps", (2, 0, 1), "steps is 0, expected a value at least 1: local steps."),
        ("steps", (), "steps is (), expected a whole number or one whole number per client."),
        ("steps", (1, 2.5), "steps is (1, 2.5), expected a whole number or one whole number per client."),
        ("steps", (1, True), "steps is (1, True), expected a whole number or one whole number per client."),
        ("steps", [1, 2], "steps is [1, 2], expected a whole number or one whole number per client."),
        ("radius", 0.0, "radius is 0.0, expected a value greater than 0: radius of the ball."),
        ("radius", "wide", "radius is 'wide', expected a number or None."),
        ("kind", "simple", "kind is 'simple', expected 'plain' or 'robust'."),
        ("kind", None, "kind is None, expected 'plain' or 'robust'."),
        ("fast", 1, "fast is 1, expected true or false."),
        ("fast", "yes", "fast is 'yes', expected true or false."),
        ("label", 3, "label is 3, expected a word."),
    ],
)
def test_an_error_names_the_field_the_value_and_what_was_expected(field, value, says):
    with pytest.raises(SettingError) as error:
        Sample(**{field: value})
    assert str(error.value) == f"Sample: {says}"


@given(st.floats(allow_nan=False), st.integers(-5, 5))
def test_a_setting_is_accepted_exactly_when_every_bound_holds(share, num):
    good = 0 <= share <= 1 and num >= 1
    try:
        Sample(share=share, num=num)
    except SettingError:
        assert not good
    else:
        assert good


def test_a_subclass_checks_its_own_fields_and_those_it_inherits():
    @dataclass(frozen=True, kw_only=True)
    class More(Sample):
        num_terms: int = setting(5, "terms", least=1)

    with pytest.raises(SettingError, match="More: num_terms is 0"):
        More(num_terms=0)
    with pytest.raises(SettingError, match="More: lr is -1"):
        More(lr=-1)


def test_settings_cannot_be_changed_once_made():
    with pytest.raises(AttributeError):
        Sample().lr = -1.0


def test_kinds_lists_the_alternatives_of_a_type():
    assert kinds(float | None) == (float, type(None))
    assert kinds(int) == (int,)
    assert kinds(int | tuple[int, ...]) == (int, tuple[int, ...])
