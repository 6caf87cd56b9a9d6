"""Outer iterations of an engine, and why they were not replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusals(fed: Any) -> dict[str, str]:
    """Return why whole outer iterations, or phases on a GPU, are not replayed."""
    captures = getattr(getattr(fed, "host", None), "captures", None)
    return {} if captures is None else dict(captures.refused)


def one_round(fed: Any, algorithm: Any, state: Any) -> Any:
    """Run one outer iteration, replayed if the engine replays outer iterations."""
    graphs = getattr(fed, "graphs", None)
    return algorithm.round(fed, state) if graphs is None else graphs.round(algorithm, state)


def several_rounds(
    fed: Any, at: Callable[[int], Any], state: Any, iteration: int, more: Callable[[int, int, int], bool]
) -> Any:
    """Run this outer iteration and, on an engine with CUDA graphs, the next ones before it is finished.

    `reached` returns the last of them.

    at: algorithm with the step sizes of an outer iteration.
    more: function of an outer iteration and the rounds before and after it; False: the caller must see its state.
    """
    graphs = getattr(fed, "graphs", None)
    return at(iteration).round(fed, state) if graphs is None else graphs.rounds(at, state, more)


def expect(fed: Any, num: int, num_rounds: int | None = None) -> None:
    """Tell an engine how long a run is, resumed or not, so that it can choose what takes time to prepare.

    num: its outer iterations.
    num_rounds: rounds that end it earlier, or None.
    """
    if getattr(fed, "graphs", None) is not None:
        fed.graphs.length, fed.graphs.num_rounds = num, num_rounds


def reached(fed: Any, iteration: int) -> int:
    """Return the outer iteration at which an engine is.

    iteration: the one that was begun.
    """
    return iteration if getattr(fed, "graphs", None) is None else int(fed.iteration)
