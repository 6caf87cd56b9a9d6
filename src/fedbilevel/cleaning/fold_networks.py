"""Class probabilities of every sample by networks that were not trained on it.

The training samples of every client are split into folds, sample j into fold j mod `num_folds`. For
each fold, the clients train one network together (residual.py or resnet18.py, by FedAdam) on the
samples of the other folds. A training sample gets the class probabilities of the one network that has not seen it;
other images get the mean of all networks. The rows that detectors read are these probabilities and
their logarithms, so they can be compared across networks, which hidden units cannot.

Clean samples take no part in the training. Networks may be trained on soft targets, such as posteriors
of label_em, instead of the given labels.

With shift > 0 or mirror=True, every image is shifted, or mirrored or not, at random and anew in every
step (augment.py). With mirror=True, probabilities are means over an image and its mirror image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbilevel.cleaning.augment import NUM_DRAWS, moved
from fedbilevel.cleaning.parts import ALONE, Parts
from fedbilevel.cleaning.residual import Residual
from fedbilevel.cleaning.resnet18 import ResNet18
from fedbilevel.federation.schedule import Schedule
from fedbilevel.oracle.precision import Precision
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import Settings, setting

_AT_ONCE = 1000
_SHAPES: dict[str, type[Residual] | type[ResNet18]] = {"residual": Residual, "resnet18": ResNet18}
_LEAST = 1e-4  # probabilities below it have the same logarithm


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """How networks of folds are trained."""

    num_folds: int = setting(3, "networks, each trained without one part of the samples", least=2)
    network: Literal["residual", "resnet18"] = setting("residual", "eight layers with filters, or ResNet-18")
    width: int = setting(16, "filters of the first layer", least=1)
    num_rounds: int = setting(200, "rounds of each network", least=1)
    num_local_steps: int = setting(5, "local steps between rounds", least=1)
    batch_size: int = setting(32, "samples per step and client", least=1)
    lr_lower: float = setting(0.3, "local step", above=0)
    server_lr: float = setting(0.01, "the server's first step", above=0)
    server_damping: float = setting(0.0001, "added to the root of the server's second moment", above=0)
    shift: float = setting(0.0, "largest shift of an image in a step, as a share of its side", least=0, most=0.5)
    mirror: bool = setting(False, "half of the images are mirrored in a step, for photographs")
    weight_decay: float = setting(0.0, "weight of the squared norm of the network's weights, halved", least=0)
    standardise: bool = setting(False, "every filter is used with mean zero and unit norm, which speeds up training")
    precision: Precision = setting("full", "of derivatives, as in solve: full, or bf16 for speed on a GPU")


class Network(NamedTuple):
    """A network and the cost of its training.

    mirror: whether probabilities are means over an image and its mirror image.
    """

    shape: Residual | ResNet18
    y: Mapping[str, Tensor]
    cost: Mapping[str, float]
    mirror: bool = False

    def probabilities(self, images: Any) -> np.ndarray:
        """Return class probabilities (n, C) of images."""
        flat = torch.as_tensor(np.asarray(images, np.float32)).flatten(1)
        like = self.y["head.weight"]
        with torch.no_grad():
            parts = [self._chances(some.to(like)).cpu() for some in flat.split(_AT_ONCE)]
        return torch.cat(parts).double().numpy() if parts else np.zeros((0, self.shape.num_classes))

    def _chances(self, flat: Tensor) -> Tensor:
        scores = lambda images: self.shape.scores(self.y, images).softmax(1)
        found = scores(flat)
        return (found + scores(self.shape.images(flat).flip(3))) / 2 if self.mirror else found


class FoldNetworks(NamedTuple):
    """One network per fold, from one or several passes.

    passes: by pass, the networks without the folds 0, 1, ...; their probabilities are averaged.
    """

    passes: Sequence[Sequence[Network]]

    @property
    def cost(self) -> dict[str, float]:
        return {
            name: sum(one.cost[name] for members in self.passes for one in members) for name in ("rounds", "megabytes")
        }

    def probabilities(self, images: Any) -> np.ndarray:
        """Return the mean of all networks, for images that none of them was trained on."""
        return np.asarray(np.mean([one.probabilities(images) for members in self.passes for one in members], axis=0))

    def unseen(self, images: Any) -> np.ndarray:
        """Return class probabilities of the training images of one client, out of fold."""
        images = np.asarray(images)
        found = np.zeros((len(images), self.passes[0][0].shape.num_classes))
        for members in self.passes:
            for fold, one in enumerate(members):
                found[fold :: len(members)] += one.probabilities(images[fold :: len(members)]) / len(self.passes)
        return found

    def __add__(self, other: Any) -> FoldNetworks:
        """Return the networks of the passes of both."""
        return FoldNetworks([*self.passes, *other.passes])

    def together(self, last: Network, number: int) -> FoldNetworks:
        """Return the networks of one pass and a last network, whose mean is often better than the last one alone."""
        return FoldNetworks([[last, *self.passes[number]]])


def rows_of(probabilities: np.ndarray) -> np.ndarray:
    """Return the rows that detectors read."""
    floored = np.maximum(probabilities, _LEAST)
    return np.concatenate([probabilities, np.log(floored)], axis=1).astype(np.float32)


def train_folds(
    clients: Sequence[Mapping[str, np.ndarray]],
    num_classes: int,
    training: Training,
    *,
    targets: Sequence[np.ndarray] | None = None,
    flags: Sequence[np.ndarray] | None = None,
    seed: int,
    parts: Parts = ALONE,
    **where: Any,
) -> FoldNetworks:
    """Train one network per fold.

    clients: `image` and `label` of the training samples of every client.
    targets: class probabilities (n, C) of these samples to train on; None: the given labels.
    flags: marks of samples that no network is trained on; None: no sample is marked.
    parts: shows and keeps the training of every network.
    where: device, dtype and engine, as in `solve`.
    """
    members = []
    for fold in range(training.num_folds):
        rest = [np.arange(len(client["label"])) % training.num_folds != fold for client in clients]
        if flags is not None:
            rest = [kept(keep & ~own) for keep, own in zip(rest, flags, strict=True)]
        some = [
            {name: client[name][keep] for name in ("image", "label")}
            for client, keep in zip(clients, rest, strict=True)
        ]
        aims = None if targets is None else [own[keep] for own, keep in zip(targets, rest, strict=True)]
        name = f"network {fold + 1} of {training.num_folds}"
        members.append(
            train_network(some, num_classes, training, targets=aims, seed=seed, parts=parts, name=name, **where)
        )
    return FoldNetworks([members])


def kept(keep: np.ndarray) -> np.ndarray:
    """Return marks of samples to keep, with the first sample if there are none: a run needs samples of every client."""
    return keep if keep.any() else np.arange(len(keep)) == 0


def train_network(
    clients: Sequence[Mapping[str, np.ndarray]],
    num_classes: int,
    training: Training,
    *,
    targets: Sequence[np.ndarray] | None = None,
    seed: int,
    parts: Parts = ALONE,
    name: str = "network",
    **where: Any,
) -> Network:
    """Train one network on all samples; arguments as in `train_folds`.

    name: of this part.
    """
    shape = _SHAPES[training.network].of(
        int(np.prod(clients[0]["image"].shape[1:])), training.width, num_classes, training.standardise
    )
    held = []
    for i, client in enumerate(clients):
        aim = np.eye(num_classes)[client["label"]] if targets is None else targets[i]
        image = np.asarray(client["image"], np.float32)
        train = {"image": image.reshape(len(image), -1), "aim": aim.astype(np.float32)}
        # a run needs validation samples, which FedAdam does not learn from
        held.append({"train": train, "val": {name: values[:1] for name, values in train.items()}})

    def loss(x: Any, y: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        images = shape.images(batch["image"])
        if "draw" in batch:
            images = moved(images, batch["draw"], shift=training.shift, mirror=training.mirror)
        fit = cross_entropy(shape.scores(y, images), batch["aim"], reduction="none")
        if not training.weight_decay:
            return fit
        return fit + 0.5 * training.weight_decay * torch.stack([(leaf**2).sum() for leaf in y.values()]).sum()

    problem = Problem(
        upper=loss, lower=loss, x0={"none": torch.zeros(1)}, y0=shape.initial(seed), name="fold_network",
        draws={"train": NUM_DRAWS} if training.shift or training.mirror else {},
    )  # fmt: skip
    num = training.num_rounds
    # a batch size for "val" as well would make a measurement of a large network as slow as a hundred rounds
    sizes = {"train": training.batch_size, "val": None}
    result = parts.solve(
        name, problem, held, "fedadam", num_iterations=num, measure_every=num, residuals=False, seed=seed,
        schedule=Schedule(end=num), batch_size=sizes,
        num_local_steps=training.num_local_steps, lr_lower=training.lr_lower, server_lr=training.server_lr,
        server_damping=training.server_damping, precision=training.precision, **where,
    )  # fmt: skip
    cost = {paid: float(result.rows[-1][paid]) for paid in ("rounds", "megabytes")}
    return Network(shape, {name: leaf.detach() for name, leaf in result.y.items()}, cost, training.mirror)
