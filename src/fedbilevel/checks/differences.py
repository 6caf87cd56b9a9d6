"""Finite differences, and comparison of values with a tolerance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedbilevel.oracle.population import Population
from fedbilevel.verdict import Check


def compare(name: str, value: Tensor, target: Tensor, tolerance: float, against: str, note: str = "") -> Check:
    """Check that the relative error of `value` is at most `tolerance`."""
    if value.shape != target.shape:
        return Check(name, False, f"has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    error = relative(value, target)
    return Check(name, error <= tolerance, f"relative error {error:.1e} against {against}{note}")


def relative(value: Tensor, target: Tensor) -> float:
    """Return |value - target| / |target|, without the division if the target is zero."""
    size, error = float(torch.linalg.vector_norm(target)), float(torch.linalg.vector_norm(value - target))
    return error / size if size > 0 else error


def difference(along: Callable[[float], Tensor], expected: Tensor, step: float, tolerance: float) -> tuple[Tensor, str]:
    """Return the derivative of `along` at 0 by central differences, and a note on its accuracy.

    Long steps cross kinks (ReLU, maxima); short steps lose digits. If the first step does not give
    the expected value, steps shrink until two consecutive differences agree. If none agree, the
    closest pair is used. This choice of the step ignores the expected value, so it cannot hide a
    wrong value.
    """
    before = best = (along(step) - along(-step)) / (2 * step)
    if relative(before, expected) <= tolerance:
        return best, ""
    least, chosen = float("inf"), step
    for k in range(1, 5):
        t = step / 10**k
        now = (along(t) - along(-t)) / (2 * t)
        apart = relative(before, now)
        if apart < least:
            best, least, chosen = now, apart, t
        if apart <= tolerance / 10:
            break
        before = now
    note = f"; differences of steps {10 * chosen:.0e} and {chosen:.0e} agree up to {least:.1e}"
    return best, note if least <= tolerance else f"{note} only, too little to tell right from wrong"


def inside(population: Population) -> Tensor:
    """Return 1 for entries of x that exist, and 0 for padding."""
    if population.x_sizes is None:
        return torch.ones_like(population.x0)
    return (torch.arange(population.x0.shape[1]) < population.x_sizes[:, None]).double()
