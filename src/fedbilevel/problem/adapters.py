"""Low-rank adapters: train a small part of a network and share the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedbilevel.errors import ProblemError


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, draw: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        start = torch.randn(rank, base.in_features, generator=draw) * base.in_features**-0.5
        self.down = nn.Parameter(start.to(base.weight))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, a: Tensor) -> Tensor:
        added: Tensor = self.base(a) + self.scale * (a @ self.down.mT) @ self.up.mT
        return added

    @property
    def weight(self) -> Tensor:
        """The sum of both parts, for layers that read weights instead of calling the layer."""
        return self.base.weight + self.scale * self.up @ self.down

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


def lora(
    module: nn.Module,
    rank: int,
    *,
    scale: float = 1.0,
    seed: int = 0,
    where: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """Return a copy of a module in which only low-rank adapters of its linear layers are trained.

    rank: rank of the adapters.
    scale: factor of the adapters.
    seed: seed of the initial values; the copy computes what the module computes until it is trained.
    where: whether the linear layer with this name gets an adapter.

    All other parameters are frozen: a problem shares them between clients and levels, holds them
    once and sends none of them. Trained values fit into the copy: `copy.load_state_dict(result.y,
    strict=False)`.

    Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

    >>> import torch
    >>> import fedbilevel as fb
    >>> net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    >>> adapted = fb.lora(net, 2, where=lambda name: name == "0")
    >>> {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    {'0.down': (2, 100), '0.up': (50, 2)}
    """
    if type(rank) is not int or rank < 1:
        raise ProblemError(f"rank is {rank!r}, expected a whole number, at least 1.")
    made = copy.deepcopy(module).requires_grad_(False)
    # a subclass may be read by its owner in other ways than by a call
    layers = {name: layer for name, layer in made.named_modules() if type(layer) is nn.Linear and where(name)}
    if not layers or "" in layers:
        raise ProblemError(
            f"{type(module).__name__} has no linear layer inside that `where` accepts: give a module that holds "
            "torch.nn.Linear layers."
        )
    draw = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, LowRank(layer, rank, scale, draw))
    return made
