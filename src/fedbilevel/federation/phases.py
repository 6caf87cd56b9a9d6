"""Marks of the methods that run at clients: phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

PhaseT = TypeVar("PhaseT", bound=Callable[..., Any])


def phase(method: PhaseT) -> PhaseT:
    """Mark `method(self, clients, **values) -> {name: rows or None}` as a phase for clients."""
    method.__is_phase__ = True  # type: ignore[attr-defined]
    return method


def linear_phase(method: PhaseT) -> PhaseT:
    """Mark a phase that stores nothing and is linear in the derivatives that it uses.

    The mean of its results is then the same with every client's derivative or with their mean,
    which is cheaper if all clients use one point.
    """
    method.__is_linear__ = True  # type: ignore[attr-defined]
    return phase(method)
