"""Settings of algorithms and tasks: dataclass fields with their range, their meaning and the
paper's symbol.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fedbilevel.errors import SettingError, UnknownNameError

S = TypeVar("S", bound="Settings")


def setting(
    default: Any,
    help: str,
    *,
    symbol: str = "",
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a dataclass field with a range, for a tuple the range of every entry.

    above: exclusive lower bound.
    least: inclusive lower bound.
    most: inclusive upper bound.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "symbol": symbol, "above": above, "least": least, "most": most}
    )


AUTO = "auto"

if TYPE_CHECKING:
    StepSize = Any  # algorithms multiply by a number: runs replace "auto" before the first outer iteration
else:
    StepSize = float | Literal["auto"]


def step_size(default: float, help: str, *, symbol: str = "") -> Any:
    """Return a dataclass field for a step size above 0, or "auto" for a step that the run measures."""
    field = setting(default, help, symbol=symbol, above=0)
    return dataclasses.field(default=default, metadata={**field.metadata, "step": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen dataclass that checks every field against its declared type and range."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            _check(type(self).__name__, spec, hints[spec.name], getattr(self, spec.name))

    def asdict(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}


def made(kind: type[S], values: Mapping[str, Any]) -> S:
    """Make settings from a file, in which tuples are lists; raise for an unknown name."""
    if not isinstance(values, Mapping):
        raise SettingError(f"the settings of {kind.__name__} are {values!r}, expected a table.")
    known = [spec.name for spec in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise UnknownNameError(f"setting of {kind.__name__}", name, known)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# kinds of values in files: in words, and as a test
PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text", lambda value: isinstance(value, str)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "table": ("a table", lambda value: isinstance(value, Mapping)),
    "count": (
        "a whole number, at least 0",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    ),
    "whole": ("a whole number, at least 1", lambda value: _whole(value)),
    "seed": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "number": ("a number", _number),
    "numbers": ("a list of numbers", lambda value: isinstance(value, list) and all(map(_number, value))),
    "names": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    "size": (
        "a whole number of samples, at least 1 (in a file also 'all', or a table of such by role)",
        lambda value: _size(value) or (isinstance(value, Mapping) and all(map(_size, value.values()))),
    ),
    "maybe": ("a whole number, at least 1, or None (omit it)", lambda value: value is None or _whole(value)),
}


def _size(value: Any) -> bool:
    return value is None or value == "all" or _whole(value)


def check_plain(where: str, value: Any, kind: str, error: type[Exception] = SettingError) -> None:
    words, fits = PLAIN[kind]
    if not fits(value):
        raise error(f"{where} is {value!r}, expected {words}.")


def whole_number(label: str, value: Any, least: int | None = None, other: str = "") -> int:
    """Return a whole number of any type, such as numpy's, as a plain int that a record can hold."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and value < least):
        raise SettingError(
            f"{label} is {value!r:.80}, expected a whole "
            f"number{f', at least {least}' if least is not None else ''}{other}."
        )
    return int(value)


def names_for(label: str, value: Any, num: int, kind: str, *, distinct: bool = False) -> list[str]:
    """Return names as a list, one for each of `num` clients or classes; raise for anything else."""
    words = not isinstance(value, str) and hasattr(value, "__len__") and all(isinstance(name, str) for name in value)
    if not words or len(value) != num:
        raise SettingError(f"{label} is {value!r:.80}, expected {num} names, one for each {kind}.")
    names = list(value)
    if distinct and len(set(names)) < num:
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingError(f"{label} has {twice!r:.80} more than once, expected another name for each {kind}.")
    return names


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type: `float | None` gives (float, NoneType)."""
    return (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )


def _check(owner: str, spec: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    if not any(_fits(kind, value) for kind in kinds(hint)):
        raise SettingError(f"{owner}: {spec.name} is {value!r}, expected {_words(hint)}.")
    meta = spec.metadata
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise SettingError(f"{owner}: {spec.name} is {number}, expected a finite number.")
        for bound, bad, text in (
            (meta.get("above"), operator.le, "greater than"),
            (meta.get("least"), operator.lt, "at least"),
            (meta.get("most"), operator.gt, "at most"),
        ):
            if bound is not None and bad(number, bound):
                raise SettingError(
                    f"{owner}: {spec.name} is {number}, expected a value {text} {bound}: {meta.get('help', '')}."
                )


def _fits(kind: Any, value: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        return (
            isinstance(value, tuple)
            and len(value) > 0
            and all(_fits(typing.get_args(kind)[0], entry) for entry in value)
        )
    if origin is dict:
        return isinstance(value, Mapping)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _words(hint: Any) -> str:
    words = []
    for kind in kinds(hint):
        if typing.get_origin(kind) is Literal:
            words += [repr(choice) for choice in typing.get_args(kind)]
        elif typing.get_origin(kind) is tuple:
            words.append("one whole number per client")
        elif typing.get_origin(kind) is dict:
            words.append("a table")
        else:
            words.append(
                {float: "a number", int: "a whole number", bool: "true or false", str: "a word", type(None): "None"}[
                    kind
                ]
            )
    return " or ".join(words)
