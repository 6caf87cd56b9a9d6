"""Derivatives in low precision, with rows, losses and sums in float32.

`bf16` and `fp16` evaluate a loss within torch's autocast: matrix products and convolutions read and
write bfloat16 or float16, and torch keeps operations that need it in float32 (softmax, norms,
losses). Everything outside of the user's function is float32:

    x, y, u and all other rows, and the derivatives by them
    the sum of a loss over its samples, and every mean over clients
    losses and statistics that are measured, residuals and stationarity
    g_x of differences (penalty): its rounding would be multiplied by lam
    losses with plain attention that torch cannot differentiate in low precision (layer norms of
        several clients at once on a CPU), except gradients of one client at a time

Plain attention is written in operations that have all derivatives in low precision (`plain_kernels`).

With `fp16`, products with second derivatives of g are in float32: those of a layer norm overflow float16.
The smallest float16 is 6e-8, and the largest 65504. So with `fp16` a loss is multiplied by 2^12 before
it is differentiated, and the derivative, which is linear in the loss, is divided by 2^12 in float32.
The factor is fixed: a factor that follows overflows would depend on the history of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedbilevel.errors import SettingError

Precision = Literal["full", "bf16", "fp16"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FACTORS = {"fp16": 2.0**12}  # a power of two rounds nothing


def check_precision(precision: str, dtype: torch.dtype) -> None:
    if precision not in get_args(Precision):
        raise SettingError(f"precision is {precision!r}, expected {_known()}.")
    if precision != "full" and dtype != torch.float32:
        raise SettingError(f"precision is {precision!r} and dtype is {dtype}, expected torch.float32: leave dtype out.")


def _known() -> str:
    *first, last = map(repr, get_args(Precision))
    return f"{', '.join(first)} or {last}"


def lowered(function: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """Return a loss of flat vectors that is evaluated in low precision and returns float32."""

    def within(x: Tensor, *given: Any) -> Any:
        # a cache of cast weights would mix levels of torch.func
        with torch.autocast(x.device.type, TYPES[precision], cache_enabled=False):
            return function(x, *given).to(x.dtype)

    return within


def scaled(build: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """Return the same derivative of losses, evaluated at losses that are multiplied by a factor."""
    factor = FACTORS.get(precision)
    if factor is None:
        return build

    def built(*losses: Callable[..., Any]) -> Callable[..., Any]:
        times = lambda loss: lambda *given: factor * loss(*given)
        derivative = build(*map(times, losses))
        return lambda *given: tree_map(lambda leaf: leaf / factor, derivative(*given))

    return built
