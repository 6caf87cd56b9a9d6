"""The result of one run of a study."""

from __future__ import annotations

from typing import NamedTuple


class RowOutcome(NamedTuple):
    """The result of one repetition.

    curve: points of a line, all with the same names.
    """

    figures: dict[str, float]
    curve: list[dict[str, float]]
