"""Influence: the effect of one client's training sample on the validation loss of all clients.

x_i holds one entry per training sample of client i, the mask of its loss, and starts at ones; y is
a model that all share:

    g_i(x_i, y) = 1/n_i sum_j x_ij loss_j(y) + l2/2 |y|^2
    f_i(y)      = mean validation loss of client i

Removing instance j of client i sets x_ij to zero; the factor 1/n_i stays. To first order this
changes sum_k f_k by minus the derivative by x_ij, so one hypergradient at x = 1 predicts all
removals at once (see studies/influence.py, which compares with real retraining).

Data: `mixture` as in the paper (3 clients, 100 training and 100 validation samples each; see
data/mixture.py), the embedded `digits`, or `mnist` from disk, of which a share is used. Images are
spread over clients label by label with Dirichlet proportions. Models: `logistic` is binary logistic
regression on the mixture and softmax regression on images, both strongly convex with l2; `cnn` is
the network of the paper's Table 3 on mnist (conv 20, 5 x 5; ReLU; pool; the same again; linear 320
to 10) and a smaller one on the 8 x 8 digits, neither of them convex.

Reference: Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed
Networks", eq. (12), section 5.2 and appendix A.2. Differences from it: l2 = 0.01, where the paper
prints none for the mixture (0: as there) and 0.001 for the network. A stronger l2 makes y*(x) less
bent and the first-order prediction better. MNIST instead of the digits of EMNIST; no clusters of
input normalisation; no test part, which is not used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, max_pool2d, softplus

from fedbilevel.data.corruption import flip_labels
from fedbilevel.data.partition import dirichlet
from fedbilevel.data.sets import idx
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.mixture import mixture
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, accuracies, images, ranking
from fedbilevel.tasks.task import Built, Shapes, Task

Clients = list[dict[str, dict[str, np.ndarray]]]
NUM_CLASSES = 10
_RANKED = 30  # instances that are listed of either kind


class Layer(NamedTuple):
    """A convolution without padding, followed by ReLU and, optionally, 2 x 2 max pooling."""

    channels: int
    kernel: int
    pooled: bool


_SIDES = {"digits": 8, "mnist": 28}
LAYERS = {"digits": (Layer(8, 3, True), Layer(16, 2, False)), "mnist": (Layer(20, 5, True), Layer(20, 5, True))}


@dataclass(frozen=True, kw_only=True)
class Influence(Task):
    data: Literal["mixture", "digits", "mnist"] = setting(
        "mixture", "synthetic mixture of linear rules, embedded digits, or MNIST from disk"
    )
    model: Literal["logistic", "cnn"] = setting(
        "logistic", "linear and convex, or a small convolutional network (images only)"
    )
    num_clients: int = setting(3, "clients", symbol="n", least=1)
    num_train: int = setting(100, "mixture: training samples per client", least=1)
    num_val: int = setting(100, "mixture: validation samples per client", least=1)
    share: float | None = setting(
        None, "share of the images that is used (by default all of digits, 0.01 of mnist)", above=0, most=1
    )
    val_share: float = setting(0.25, "images: share of a client's samples that validates", above=0, most=0.9)
    dirichlet: float = setting(
        0.4,
        "concentration of the clients' proportions of rules or labels; small: clients differ more",
        symbol="alpha",
        above=0,
    )
    label_noise: float = setting(0.1, "standard deviation of the noise inside the labels of the mixture", least=0)
    wrong: float = setting(0.0, "share of training labels that are made wrong on purpose", least=0, most=1)
    l2: float = setting(0.01, "weight of the squared norm of y in the lower level", least=0)
    bug_compatible: bool = setting(
        False, "labels of the mixture as the published generator makes them, many of them 0 by mistake"
    )
    data_seed: int = setting(0, "seed of the data, the split and the initial network", least=0)
    data_dir: str = setting("", "folder with mnist/*-ubyte.gz (by default the usual places are searched)")

    # For the mixture, where the curvature of a client's lower level is about 0.2.
    suggested = {"*": {"lr_lower": 1.0, "lr_system": 1.0, "lr_upper": 1.0, "num_local_steps": 1}}
    avoid = "only a few samples are in question, so that training again without each is affordable"
    headline = ("upper_loss", "lower_loss", "val_accuracy")
    needs = {
        role: {
            "input": "one row of numbers per sample for the mixture, one image (side, side) otherwise",
            "label": "its class from 0",
        }
        for role in ("train", "val")
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data == "mixture" and self.model == "cnn":
            raise SettingError(
                "Influence: model is 'cnn', which needs images, but data is 'mixture': use data='digits' or "
                "'mnist', or model='logistic'."
            )

    def suggests(self, name: str) -> dict[str, Any]:
        """Return settings for one prediction at a trained model, by the data and the model.

        `suggestions` holds the settings for runs that change x. A series has as many terms as HGP.
        """
        name = "hgp" if name == "series" else name
        return {
            **self.suggestions(name),
            **_PREDICTION.get(name, {}),
            **_BY_MODEL.get((self.data, self.model), {}).get(name, {}),
        }

    def build(self) -> Built:
        rng = np.random.default_rng(self.data_seed)
        clients = self._mixture(rng) if self.data == "mixture" else self._images(rng)
        for client, mine in zip(clients, self._flipped(clients, rng), strict=True):
            client["train"].update(mine)
        return Built(self.problem(Shapes.of(clients[0], self._num_classes())), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        if shapes.classes() != self._num_classes():
            raise ProblemError(
                f"influence on {self.data} has {self._num_classes()} classes, but num_classes is "
                f"{shapes.num_classes}: choose other data."
            )
        shapes.sample("label", "train", "val", kinds=("int",), ndim=0)
        shape = shapes.sample("input", "train", "val", ndim=1 if self.data == "mixture" else 2)
        if self.data != "mixture" and shape != (_SIDES[self.data],) * 2:
            raise ProblemError(
                f"influence on {self.data} has images of shape {(_SIDES[self.data],) * 2}, but samples of "
                f"train/input are of shape {shape}: choose other data."
            )
        return Problem(
            upper=lambda x, y, batch: self._losses(y, batch),
            lower=self._lower,
            x0=lambda sizes: {"mask": torch.ones(sizes["train"])},
            y0=self._start(shape),
            scopes=Scopes(upper="private"),
            statistics={"val": self._right},
            metrics=lambda sums: {"val_accuracy": sums["right"] / sums["seen"]},
            name="influence",
        )

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        """Return the instances with the smallest masks (harmful) and the largest ones (helpful)."""
        served = accuracies(problem, clients, result, role="val", right="right", of="seen", name="val_accuracy")
        if result.x is None:
            return served
        every = [
            (float(mask), i, j)
            for i, tree in enumerate(result.x)
            for j, mask in enumerate(tree["mask"].detach().double().cpu().tolist())
        ]
        found: list[Finding | None] = []
        for kind, sign, does in (
            ("harmful", 1, "lowered, so that less of its loss counts"),
            ("helpful", -1, "raised, so that more of its loss counts"),
        ):
            some = sorted((one for one in every if sign * one[0] < sign), key=lambda one: (sign * one[0], *one[1:]))[
                :_RANKED
            ]
            if not some:
                continue
            own = [clients[i]["train"] for _, i, _ in some]
            marked = all("wrong" in fields for fields in own)
            facts = [
                {"client": i, "sample": j, "label": int(fields["label"][j]), "mask": mask}
                | ({"wrong": bool(fields["wrong"][j])} if marked else {})
                for (mask, i, j), fields in zip(some, own, strict=True)
            ]
            title, about = f"Most {kind} instances", f"From one, where all begin, their masks were {does}."
            found.append(ranking(title, about, list(facts[0]), [list(one.values()) for one in facts]))
            if self.data != "mixture":
                looks = np.stack([np.asarray(fields["input"])[j] for (_, _, j), fields in zip(some, own, strict=True)])
                found.append(images(f"How the most {kind} look", about, looks, facts))
        return [*(one for one in found if one is not None), *served]

    def _num_classes(self) -> int:
        return 2 if self.data == "mixture" else NUM_CLASSES

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _lower(self, x: Any, y: Any, batch: Any) -> Tensor:
        masked = x["mask"][batch["index"]] * self._losses(y, batch)
        return masked + 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())

    def _losses(self, y: Any, batch: Any) -> Tensor:
        scores = self._scores(y, batch["input"])
        if self.data == "mixture":  # -log sigmoid(s) = softplus(s) - s without overflow
            return softplus(scores) - batch["label"] * scores
        return cross_entropy(scores, batch["label"], reduction="none")

    def _scores(self, y: Any, inputs: Tensor) -> Tensor:
        if self.model == "cnn":
            inputs = inputs[:, None]
            for i, layer in enumerate(LAYERS[self.data]):
                inputs = conv2d(inputs, y[f"conv{i}.weight"], y[f"conv{i}.bias"]).relu()
                inputs = max_pool2d(inputs, 2) if layer.pooled else inputs
        return inputs.flatten(1) @ y["weight"] + y["bias"]

    def _right(self, x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        scores = self._scores(y, batch["input"])
        right = ((scores > 0).long() if self.data == "mixture" else scores.argmax(-1)) == batch["label"]
        return {"right": right, "seen": torch.ones_like(right)}

    def _start(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return zeros for a convex model, and random weights for a network.

        The weights are uniform on +-1/sqrt(inputs of a unit).
        """
        if self.data == "mixture":
            return {"weight": torch.zeros(*shape), "bias": torch.zeros(1)}
        if self.model == "logistic":
            return {"weight": torch.zeros(shape[0] * shape[1], NUM_CLASSES), "bias": torch.zeros(NUM_CLASSES)}
        draw, side, depth = torch.Generator().manual_seed(self.data_seed), shape[0], 1
        start: dict[str, Tensor] = {}

        def layer(prefix: str, num_inputs: int, weight: tuple[int, ...], num_outputs: int) -> None:
            for name, size in (("weight", weight), ("bias", (num_outputs,))):
                start[prefix + name] = (2 * torch.rand(size, generator=draw) - 1) / num_inputs**0.5

        for i, (channels, kernel, pooled) in enumerate(LAYERS[self.data]):
            layer(f"conv{i}.", depth * kernel**2, (channels, depth, kernel, kernel), channels)
            side, depth = (side - kernel + 1) // (2 if pooled else 1), channels
        layer("", depth * side**2, (depth * side**2, NUM_CLASSES), NUM_CLASSES)
        return start

    # ---- data --------------------------------------------------------------------------------------------------------

    def _mixture(self, rng: np.random.Generator) -> Clients:
        drawn = mixture(
            self.num_clients,
            {"train": self.num_train, "val": self.num_val},
            rng,
            concentration=self.dirichlet,
            noise=self.label_noise,
            bug_compatible=self.bug_compatible,
        )
        return [
            {role: {"input": samples.x, "label": samples.label} for role, samples in client.items()}
            for client in drawn.clients
        ]

    def _images(self, rng: np.random.Generator) -> Clients:
        if self.data == "digits":
            images, labels = digits()
        else:
            images, labels = idx.images(idx.folder_of("mnist", self.data_dir or None), "train", emnist=False)
            images = (images / 255.0).astype(np.float32)
        share = self.share if self.share is not None else 1.0 if self.data == "digits" else 0.01
        some = rng.permutation(len(labels))[: max(1, round(share * len(labels)))]
        images, labels = images[some].reshape(len(some), -1), labels[some]
        side = round(images.shape[1] ** 0.5)
        clients = []
        for mine in map(rng.permutation, dirichlet(labels, self.num_clients, self.dirichlet, rng, least=4)):
            num_val = max(1, round(self.val_share * len(mine)))
            roles = {"train": mine[num_val:], "val": mine[:num_val]}
            clients.append(
                {
                    role: {"input": images[own].reshape(-1, side, side), "label": labels[own]}
                    for role, own in roles.items()
                }
            )
        return clients

    def _flipped(self, clients: Clients, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
        flip = lambda labels: flip_labels(labels, self.wrong, self._num_classes(), rng)
        return [dict(zip(("label", "wrong"), flip(one["train"]["label"]), strict=True)) for one in clients]


# The paper's M and S. Its eta = 1 is the suggestion for every algorithm above.
_PREDICTION: Mapping[str, Mapping[str, Any]] = {
    "hgp": {"num_terms": 500},
    "fbo_aggitd": {"num_lower_rounds": 500},
    "network": {"kind": "random_directed"},
    "averaging": {"num_steps": 100},
    "training": {"kind": "newton", "lr": 1.0, "num_steps": 5000},
}
# Softmax regression on images is stiffer than the mixture. Networks are trained by a fixed number of steps; M eta is of
# the order of their number times their length, because a series of M terms looks back as far as so much training.
# Longer steps train digits faster and to where the curvature is at the edge of what the step allows; there a removal
# sends training elsewhere and nothing predicts it. For MNIST M, S, eta and the number of steps are the paper's.
_BY_MODEL: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]] = {
    ("digits", "logistic"): {"hgp": {"lr_system": 0.2, "num_terms": 2000}, "averaging": {"num_steps": 20}},
    ("digits", "cnn"): {
        "hgp": {"lr_system": 0.02, "num_terms": 2000},
        "averaging": {"num_steps": 20},
        "training": {"kind": "push", "lr": 0.03, "num_steps": 3000},
    },
    ("mnist", "logistic"): {"hgp": {"lr_system": 0.02, "num_terms": 5000}, "averaging": {"num_steps": 20}},
    ("mnist", "cnn"): {
        "hgp": {"lr_system": 0.05, "num_terms": 1000},
        "training": {"kind": "push", "lr": 0.1, "num_steps": 5000},
    },
}
