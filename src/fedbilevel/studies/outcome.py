"""What one run of a study gives."""

from __future__ import annotations

from typing import NamedTuple


class RowOutcome(NamedTuple):
    """`figures` are the results of one repetition; `curve` holds the points of a line, each with the same names."""

    figures: dict[str, float]
    curve: list[dict[str, float]]
