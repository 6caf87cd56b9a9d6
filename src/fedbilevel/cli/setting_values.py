"""Values of settings on the command line that click does not parse by itself."""

from __future__ import annotations

from typing import Any

import click

from fedbilevel.settings import AUTO


def whole_numbers(text: str) -> int | tuple[int, ...]:
    """Parse `3`, or `1,2,3` for one number per client."""
    try:
        numbers = tuple(int(part) for part in str(text).split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither a whole number nor several separated by commas: give e.g. 3, or 1,2,3."
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def number_or_auto(text: str) -> float | str:
    """Parse a step size: a number, or `auto` for a step that the run measures."""
    if text == AUTO:
        return AUTO
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number: give e.g. 0.1, or auto to measure it.") from None


def by_sequence(text: str) -> dict[str, dict[str, Any]]:
    """Parse `u.clip=5,y.compress=none`: settings by the name of a sequence."""
    found: dict[str, dict[str, Any]] = {}
    for part in text.split(","):
        where, equals, value = part.partition("=")
        name, dot, setting = where.strip().partition(".")
        if not (equals and dot and name and setting):
            raise click.BadParameter(f"{part!r} names no setting of a sequence: give e.g. u.clip=5,y.compress=none.")
        try:
            found.setdefault(name, {})[setting] = float(value)
        except ValueError:
            found.setdefault(name, {})[setting] = value
    return found


METAVARS: dict[Any, str] = {
    whole_numbers: "N|N,N,...",
    number_or_auto: "FLOAT|auto",
    by_sequence: "NAME.SETTING=VALUE,...",
}
