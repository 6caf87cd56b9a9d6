"""What a curious server learns from the first messages of an algorithm, by inversion of gradients.

The server has the model that it sent, so that it computes derivatives from what came back. In the
first outer iteration u = 0 and z = y, and the messages hold, with n the local steps:

    fedavg       (y0 - y) / (n gamma) = g_y
    fedbio       (y0 - y) / (n gamma) = g_y, u / (n tau) = f_y, (x0 - x) / (n eta) = f_x
    adasimfbo    q_y / n = g_y, -q_u / n = f_y, q_x / n = f_x
    fbo_aggitd   q = g_y, z / lambda = f_y
    penalty      (|j| + lam) (y0 - y_j) / (n gamma) = j f_y + lam g_y for two j; (x0 - x) / (n eta) = f_x

They are exact for n = 1, and for fbo_aggitd always. A private x is not sent, and neither is f_x.
g_y is a mean over training samples, f_y and f_x are means over validation samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.aggregation import ring
from fedbilevel.aggregation.layer import Encoded
from fedbilevel.algorithms.penalty import DIFFERENCES
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import UnknownNameError
from fedbilevel.federation.algorithm import Algorithm, most_steps
from fedbilevel.privacy.inversion import Inverted, affine_input, invert, labels_from
from fedbilevel.problem.problem import Problem

ROLES = {"train": ("gy",), "val": ("fy", "fx")}  # derivatives that hold samples of a role


class Watched(Simulation):
    """A simulation that notes what its server sees: rows of clients, or under secure sums their mean.

    seen: the first rows of every sequence, with what the server sent added.
    """

    def _layered_means(self, sent: Mapping[str, Encoded], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        found = super()._layered_means(sent, places, times)
        seen: dict[str, Tensor] = self.__dict__.setdefault("seen", {})
        for name, one in sent.items():
            assert self.layer is not None
            if self.layer.settings.secure:
                seen.setdefault(name, found[name][None])
            elif one.kind != "ring":
                seen.setdefault(name, one.absolute())
            else:
                weights = self._counts(places, times).tolist()
                rows = [
                    ring.decoded(row, int(w), one.way.bound, self.bits)
                    for row, w in zip(one.rows, weights, strict=True)
                ]
                seen.setdefault(name, torch.stack(rows) + (0 if one.way.base is None else one.way.base))
        return found


class Seen(NamedTuple):
    """What the server knows after the first outer iteration.

    derivatives: by name, one row per client; a single row if the server sees sums only.
    """

    fed: Watched
    derivatives: dict[str, Tensor]


def watch(algorithm: Algorithm, problem: Problem, clients: Sequence[Any], **options: Any) -> Seen:
    """Run one outer iteration and return what the server sees."""
    if algorithm.name() not in _CARRIERS:
        raise UnknownNameError("algorithm with known messages", algorithm.name(), _CARRIERS)
    fed: Any = Watched(algorithm, problem, clients, **options)
    state = algorithm.init(fed)
    fed.begin(1)
    algorithm.round(fed, state)
    x0 = None if "x" in fed.kept_names else fed.host.x0
    rows = {name: value.double() for name, value in fed.seen.items()}
    return Seen(fed, _CARRIERS[algorithm.name()](algorithm, x0, fed.host.y0, rows))


def _fedavg(own: Any, x0: Tensor | None, y0: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"gy": (y0 - rows["y"]) / (own.lr_lower * most_steps(own.num_local_steps))}


def _fedbio(own: Any, x0: Tensor | None, y0: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    num = most_steps(own.num_local_steps)
    found = {"gy": (y0 - rows["y"]) / (own.lr_lower * num), "fy": rows["u"] / (own.lr_system * num)}
    return found if x0 is None else {**found, "fx": (x0 - rows["x"]) / (own.lr_upper * num)}


def _adasimfbo(own: Any, x0: Tensor | None, y0: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    num = most_steps(own.num_local_steps)
    found = {"gy": rows["q_y"] / num, "fy": -rows["q_u"] / num}
    return found if x0 is None else {**found, "fx": rows["q_x"] / num}


def _fbo_aggitd(own: Any, x0: Tensor | None, y0: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"gy": rows["q"], "fy": rows["z"] / own.lr_system}


def _penalty(own: Any, x0: Tensor | None, y0: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    num, lam = most_steps(own.num_local_steps), own.weight(0)
    points = zip(DIFFERENCES[own.order], own.points(rows["y"], [rows["d"]]), strict=False)  # two suffice
    (one, first), (two, second) = ((j, (abs(j) + lam) * (y0 - y) / (own.lr_lower * num)) for j, y in points)
    fy = (first - second) / (one - two)
    found = {"gy": (first - one * fy) / lam, "fy": fy}
    return found if x0 is None else {**found, "fx": (x0 - rows["x"]) / (own.lr_upper * num)}


_CARRIERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "fedavg": _fedavg,
    "fedbio": _fedbio,
    "adasimfbo": _adasimfbo,
    "fbo_aggitd": _fbo_aggitd,
    "penalty": _penalty,
}


class Server:
    """A curious server: its model, and the images that it expects without any message.

    l2: weight of the squared norm of y in the lower level, which is public.
    prior: mean image of public data.
    """

    def __init__(self, seen: Seen, problem: Problem, l2: float, prior: Tensor, generator: torch.Generator) -> None:
        host = seen.fed.host
        private = "x" in seen.fed.kept_names  # unknown to the server, but for its start
        start: Any = problem.x0
        x0 = start({"train": 1, "val": 1, "test": 1}) if private else host.layout_x.unravel(host.x0)
        self.x = {name: leaf.double().requires_grad_() for name, leaf in x0.items()}
        self.y = {name: leaf.double().requires_grad_() for name, leaf in host.layout_y.unravel(host.y0).items()}
        self.problem, self.l2, self.prior, self.generator = problem, l2, prior.double(), generator
        self.seen = seen

    def read(self, role: str, client: int, num: int, *, num_starts: int, num_steps: int, scaled: bool) -> Inverted:
        """Return `num` samples of a role from a client's derivatives."""
        names = [name for name in ROLES[role] if name in self.seen.derivatives]
        sent = [self.seen.derivatives[name][client] for name in names]
        labels = self._labels(role, sent[0], num, scaled)
        starts = [self._start(num) for _ in range(num_starts)]
        if num == 1:
            starts.append(self._closed(names, sent)[None].clamp(-1, 2))
        return invert(self._gradient(role, names), sent, starts, labels, num_steps=num_steps, scaled=scaled)

    def _start(self, num: int) -> Tensor:
        noise = torch.randn(num, len(self.prior), generator=self.generator, dtype=torch.float64)
        return self.prior + 0.1 * noise

    def _loss(self, role: str, images: Tensor, labels: Tensor) -> Tensor:
        batch: dict[str, Tensor] = {"image": images, "label": labels, "index": torch.zeros_like(labels)}
        if self.problem.features is not None:
            batch["features"] = self.problem.features(self.x, batch)
        one = self.problem.lower if role == "train" else self.problem.upper
        return one(self.x, self.y, batch).mean()

    def _gradient(self, role: str, names: Sequence[str]) -> Callable[[Tensor, Tensor], list[Tensor]]:
        leaves = [*self.y.values()] + ([*self.x.values()] if "fx" in names else [])

        def gradient(images: Tensor, labels: Tensor) -> list[Tensor]:
            parts = torch.autograd.grad(self._loss(role, images, labels), leaves, create_graph=True)
            flat = [torch.cat([part.reshape(-1) for part in parts[: len(self.y)]])]
            return flat + ([torch.cat([part.reshape(-1) for part in parts[len(self.y) :]])] if "fx" in names else [])

        return gradient

    def _labels(self, role: str, sent: Tensor, num: int, scaled: bool) -> Tensor:
        """Return labels from the biases of the last layer, at the prior's probabilities.

        At a class c, the derivative for one sample of label c is scale (p_c - 1): this gives the scale.
        """
        bias = [name for name in self.y if name.endswith("bias")][-1]
        image, known = self.prior[None], []
        for label in range(len(self.y[bias])):
            [part] = torch.autograd.grad(self._loss(role, image, torch.tensor([label])), [self.y[bias]])
            known.append(part - self._ridge(role) * self.y[bias].detach())
        table = torch.stack(known)  # scale (p - e_label), a row per label
        scale = float(table[0, 1] - table[1, 1]) if len(table) > 1 else 1.0
        expected = table[0] / scale + torch.nn.functional.one_hot(torch.tensor(0), len(table))
        own = self.seen.fed.host.layout_y.unravel(sent)[bias] - self._ridge(role) * self.y[bias].detach()
        return labels_from(own, expected, num, scale=None if scaled else scale)

    def _ridge(self, role: str) -> float:
        return self.l2 if role == "train" else 0.0

    def _closed(self, names: Sequence[str], sent: Sequence[Tensor]) -> Tensor:
        """Return the input of the layer that reads pixels, from one sample's derivatives, or else the prior."""
        host, num = self.seen.fed.host, len(self.prior)
        for name, row in zip(names, sent, strict=True):
            tree = (host.layout_x if name == "fx" else host.layout_y).unravel(row)
            for label in tree:
                bias = label.removesuffix("weight") + "bias"
                if label.endswith("weight") and bias in tree and num in tree[label].shape and tree[label].ndim == 2:
                    weights = tree[label] if tree[label].shape[1] == num else tree[label].T
                    return affine_input(weights, tree[bias])
        return self.prior
