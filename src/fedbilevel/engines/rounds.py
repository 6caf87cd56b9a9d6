"""One outer iteration of an engine, and why it ran without CUDA graphs."""

from __future__ import annotations

from typing import Any


def refusals(fed: Any) -> dict[str, str]:
    """Return why phases, or whole outer iterations, run without CUDA graphs; nothing without a GPU."""
    captures = getattr(getattr(fed, "host", None), "captures", None)
    return {} if captures is None else dict(captures.refused)


def one_round(fed: Any, algorithm: Any, state: Any) -> Any:
    """Run one outer iteration, as a CUDA graph if the engine has graphs of outer iterations."""
    graphs = getattr(fed, "graphs", None)
    return algorithm.round(fed, state) if graphs is None else graphs.round(algorithm, state)
