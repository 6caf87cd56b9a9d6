"""One outer iteration of an engine, and why it was not replayed."""

from __future__ import annotations

from typing import Any


def refusals(fed: Any) -> dict[str, str]:
    """Return why whole outer iterations, or phases on a GPU, are not replayed."""
    captures = getattr(getattr(fed, "host", None), "captures", None)
    return {} if captures is None else dict(captures.refused)


def one_round(fed: Any, algorithm: Any, state: Any) -> Any:
    """Run one outer iteration, replayed if the engine replays outer iterations."""
    graphs = getattr(fed, "graphs", None)
    return algorithm.round(fed, state) if graphs is None else graphs.round(algorithm, state)
