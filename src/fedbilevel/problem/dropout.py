"""Dropout whose masks are drawn by address, for modules in training mode.

Two random numbers per sample (`Problem.draws`) are the key of a Philox stream, from which the masks
of all layers of a loss follow. So all evaluations of a batch see the same masks, in every way of
evaluation: both gradients of a difference, products with second derivatives, and a resumed run.
Without numbers, as in upper losses and measurements, nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedbilevel.errors import ProblemError
from fedbilevel.problem.attention import attention
from fedbilevel.problem.draws import philox

NUM_DRAWS = 2  # random numbers per sample
_WORD = 2**24  # a random number has so many values
_FUSED = functional.scaled_dot_product_attention
_CHANNELS: dict[Any, bool] = {  # by function: whether whole channels are dropped
    functional.dropout: False,
    torch.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
}
_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def drops(module: nn.Module | None) -> bool:
    """Return whether a module has dropout in training mode whose masks can be drawn by address."""
    layers = () if module is None else module.modules()
    return any(
        layer.training
        and (
            layer.p if isinstance(layer, _LAYERS) else layer.dropout if isinstance(layer, nn.MultiheadAttention) else 0
        )
        for layer in layers
    )


def masked(loss: Callable[..., Any], own: int | None) -> Callable[..., Any]:
    """Return a loss in which dropout uses addressed masks.

    own: number of random numbers per sample that the loss itself asked for; None: nothing is
        dropped, and the loss gets the batch as it is.
    """

    def within(x: Any, y: Any, batch: Any) -> Any:
        if own is None or "draw" not in batch:
            with Masks(None):
                return loss(x, y, batch)
        draw = batch["draw"]
        rest = {name: value for name, value in batch.items() if name != "draw"}
        with Masks(draw[:, own:]):
            return loss(x, y, {**rest, "draw": draw[:, :own]} if own else rest)

    return within


class Masks(TorchFunctionMode):
    """A mode in which every call of dropout has a mask of its own.

    draw: random numbers (n, 2) from 0 to 1 of the samples, or None to drop nothing.
    """

    def __init__(self, draw: Tensor | None) -> None:
        super().__init__()
        self.words = None if draw is None else (draw * _WORD).to(torch.int64)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CHANNELS:
            return self._dropped(_CHANNELS[func], *args, **kwargs)
        if func is _FUSED and (kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0:
            return attention(*args, **kwargs, drop=self._drop)
        if func is functional.multi_head_attention_forward:
            if self.words is None:
                return func(*args, **{**kwargs, "training": False})
            with self._inside():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropped(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool | None = None, inplace: bool = False,
        *, train: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the input after dropout; `torch.dropout` has other names of its arguments."""
        flags = [flag for flag in (training, train) if flag is not None]
        if not (flags[0] if flags else True):
            return input
        kept = tuple(input.shape[:2]) + (1,) * (input.ndim - 2) if channels else tuple(input.shape)
        return self._drop(input, p, kept)

    def _drop(self, input: Tensor, p: float, kept: tuple[int, ...] | None = None, groups: int = 1) -> Tensor:
        """Return the input with entries of probability p at zero, and the others divided by 1 - p.

        kept: shape of the mask.
        groups: number of rows of the input per sample.
        """
        if self.words is None or p == 0:
            return input
        shape = tuple(input.shape) if kept is None else kept
        if shape[0] != groups * len(self.words):
            raise ProblemError(
                f"dropout got an input of shape {tuple(input.shape)} for {len(self.words)} samples, expected one row "
                "per sample: call the module with samples first (batch_first=True)."
            )
        self.calls += 1
        size = torch.Size(shape).numel() // len(self.words)
        blocks = torch.arange(-(-size // 4), device=input.device)
        first, second = self.words[:, :, None].unbind(1)
        words = philox((0, self.calls), (blocks, torch.zeros_like(blocks), first, second))
        whole = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :size]
        mask = (whole >= int(p * 2**32)).reshape(shape)
        return input * (mask.to(input.dtype) / (1 - p) if p < 1 else torch.zeros_like(mask, dtype=input.dtype))

    @contextmanager
    def _inside(self) -> Any:
        """Put masks into torch's attention, whose own calls a mode does not see."""
        before = functional.dropout, functional.scaled_dot_product_attention

        def dropout(weights: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            groups = max(1, weights.shape[0] // len(self.words)) if self.words is not None else 1
            return self._drop(weights, p, groups=groups) if training else weights

        def fused(*args: Any, **kwargs: Any) -> Tensor:
            probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return attention(*args, **kwargs, drop=self._drop) if probability else _FUSED(*args, **kwargs)

        functional.dropout, functional.scaled_dot_product_attention = dropout, fused  # type: ignore[assignment]
        try:
            yield
        finally:
            functional.dropout, functional.scaled_dot_product_attention = before
