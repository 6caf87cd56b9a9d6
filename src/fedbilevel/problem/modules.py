"""Modules of torch inside a problem: calls with given parameters, and layers that are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedbilevel.errors import ProblemError
from fedbilevel.problem.layout import Tree


class BoundModule:
    """A module that is called with given parameters, available as `.parameters`."""

    def __init__(self, module: nn.Module, parameters: Tree, frozen: Frozen | None = None) -> None:
        self._module, self.parameters = module, parameters
        self._frozen = Frozen(module) if frozen is None else frozen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fixed = self._frozen.like(next(iter(self.parameters.values())), self.parameters)
        return torch.func.functional_call(self._module, {**fixed, **self.parameters}, args, kwargs)

    def with_parameters(self, values: Tree) -> BoundModule:
        """Return the same module, in which these values replace frozen parameters."""
        return BoundModule(self._module, {**self.parameters, **values}, self._frozen)


class Frozen:
    """Frozen tensors, with one copy on the device and in the type of a run.

    held: a module, whose parameters and buffers they are, or the tensors by name.
    """

    def __init__(self, held: nn.Module | Tree) -> None:
        self._held = held
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}  # by name: the original, its version, the copy

    def like(self, other: Tensor, trained: Collection[str]) -> dict[str, Tensor]:
        """Return all tensors that are not trained, on the device and in the type of another tensor."""
        found = {}
        for name, value in self._tensors():
            if name in trained:
                continue
            dtype = other.dtype if value.is_floating_point() else value.dtype
            kept = self._copies.get(name)
            if kept is None or kept[0] is not value or kept[1] != value._version or not _fits(kept[2], other, dtype):
                kept = (value, value._version, value.detach().to(other.device, dtype))
                if torch._C._functorch.peek_interpreter_stack() is None:  # copies inside a transform end with it
                    self._copies[name] = kept
            found[name] = kept[2]
        return found

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        if isinstance(self._held, nn.Module):
            return *self._held.named_parameters(), *self._held.named_buffers()
        return self._held.items()


def _fits(copy: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return copy.dtype == dtype and copy.device == other.device


def initial_parameters(label: str, module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the trainable parameters; raise for a module that a problem cannot use."""
    if not isinstance(module, nn.Module):
        raise ProblemError(
            f"{label} is of type {type(module).__name__}, expected a torch.nn.Module: "
            f"give a dict of tensors as {label[0]}0."
        )
    for name, layer in module.named_modules():
        _refuse_layer(layer, f"{label}.{name}" if name else label)
    found = {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}
    if not found:
        raise ProblemError(
            f"{label} has no parameters that require gradients, so there is nothing to optimise at that level: "
            "pass a module with parameters."
        )
    return found


_WHY = {
    "dropout": (
        "its random mask differs between the two evaluations that variance reduction and second derivatives must "
        "share; remove it or put the module in eval mode"
    ),
    "batch norm": (
        "its output for one sample depends on the other samples of the batch, so a client's gradient is not a mean "
        "over its samples and statistics of one client leak into the shared model; use GroupNorm or LayerNorm, or "
        "put a module that tracks running statistics in eval mode"
    ),
}


def _refuse(what: str, where: str) -> None:
    raise ProblemError(
        f"{where} uses {what} in training mode, which has no place inside a bilevel derivative: {_WHY[what]}."
    )


def _refuse_layer(layer: nn.Module, where: str) -> None:
    if layer.training and isinstance(layer, nn.modules.batchnorm._BatchNorm):
        _refuse("batch norm", where)
    kinds = (nn.AlphaDropout, nn.FeatureAlphaDropout)  # the masks of other kinds are those of `dropout`
    if layer.training and isinstance(layer, kinds) and layer.p > 0:
        _refuse("dropout", where)


class RefuseNoise(TorchFunctionMode):
    """A mode that raises for dropout and batch norm inside a plain function."""

    DROPOUT = (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
    )

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in self.DROPOUT
            and (kwargs.get("training", args[2] if len(args) > 2 else True))
            and (kwargs.get("p", args[1] if len(args) > 1 else 0.5)) > 0
        ):
            _refuse("dropout", self.where)
        if func is functional.batch_norm and kwargs.get("training", args[5] if len(args) > 5 else False):
            _refuse("batch norm", self.where)
        return func(*args, **kwargs)
