"""Derivatives in low precision, with rows, losses and sums in float32.

`bf16` evaluates a loss within torch's autocast: matrix products and convolutions read and write
bfloat16, and torch keeps operations that need it in float32 (softmax, norms, losses). Everything
outside of the user's function is float32:

    x, y, u and all other rows, and the derivatives by them
    the sum of a loss over its samples, and every mean over clients
    losses and statistics that are measured, residuals and stationarity
    g_x of differences (penalty): its rounding would be multiplied by lam
    losses with plain attention that torch cannot differentiate in bfloat16 (layer norms of several
        clients at once on a CPU), except gradients of one client at a time

Plain attention is written in operations that have all derivatives in bfloat16 (`plain_kernels`).

The type float16 is missing, because its derivatives underflow without a scale of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedbilevel.errors import SettingError

Precision = Literal["full", "bf16"]


def check_precision(precision: str, dtype: torch.dtype) -> None:
    if precision not in get_args(Precision):
        raise SettingError(f"precision is {precision!r}, expected {' or '.join(map(repr, get_args(Precision)))}.")
    if precision != "full" and dtype != torch.float32:
        raise SettingError(f"precision is {precision!r} and dtype is {dtype}, expected torch.float32: leave dtype out.")


def lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss of flat vectors that is evaluated in bfloat16 and returns float32."""

    def within(x: Tensor, *given: Any) -> Any:
        # a cache of cast weights would mix levels of torch.func
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return function(x, *given).to(x.dtype)

    return within
