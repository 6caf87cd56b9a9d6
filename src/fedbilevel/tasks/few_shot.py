"""Few-shot classification: learn one backbone on which a linear head learns from a few images.

x is the backbone, shared by all. Every client has `num_tasks` tasks, and y_i holds a linear head
for each of them; heads stay at their client. A task is to distinguish N characters, with K images
of each for training (the support) and Q others for validation (the queries):

    g_i(x, y_i) = sum_t CE(x, y_it; support_it) + l2/2 |y_i|^2
    f_i(x, y_i) = mean_t CE(x, y_it; queries_it)

With a sum over t every head solves its own problem, whose curvature does not depend on the number
of other tasks.

One sample of a client is one image of each character of all its tasks: K samples for training, Q
for validation. So a minibatch draws images, and every task is in it. If samples were tasks, the
minibatches of f_y, H v and J v, which are independent, would seldom share a head: the indirect part
of the hypergradient would be mostly noise, and H would be num_tasks/batch_size times as large on
the heads that were drawn.

The backbone has 3 x 3 convolutions with stride two, each followed by a normalisation, a shift and
an activation, and then the mean over positions. Images of 28 x 28 have four convolutions, images of
8 x 8 have two. `norm=sample` normalises a channel over the N images of a task in one sample, one
image of each character. `norm=image` normalises each image alone, over all channels and positions.
No statistics are kept, and minibatches remain means over samples. The last layer has no shift. No
layer has a scale, because the next layer or the head can learn it. So the mean squared length of
features over a sample is at most 16, and the curvature of the lower level is at most l2 + 17/2 for
every x. With a shift in the last layer, long steps of x made y diverge.

Characters come from alphabets, and an alphabet belongs to one client, to validation or to testing.
A character turned by 90, 180 or 270 degrees is another character. Held-out episodes with characters
for validation and for testing are dealt to the clients for measurements only: the lower level is
solved for a new head on the support, and this head answers the queries.

    omniglot  50 alphabets: 33 for clients, 5 for validation, 12 for testing; 11 clients with three
              alphabets each
    digits    40 digits, rotated or not, at random in 20 alphabets of two: 12 for clients, 3 for
              validation, 5 for testing; 4 clients with three alphabets each

Setting of Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, section 5.2 and appendix B.2, with the network of Finn,
Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017, for
Omniglot. Differences: the squared norm, without which a head that separates its few images has no
minimiser; batch norm is over one sample, not over all images of the batch; no scales and no last
shift; the owners of the alphabets are drawn by `data_seed`, and the number of tasks of a client is
a setting, because the paper gives neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.alphabets import dealt
from fedbilevel.tasks.findings import Finding, accuracies
from fedbilevel.tasks.fixed_task_rivals import Backbone, fixed_task_rivals
from fedbilevel.tasks.hyper_representation import ACTIVATIONS
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.rival import Rival, Way
from fedbilevel.tasks.task import Built, Shapes, Task

_LENGTH = 4.0  # the largest root mean square norm of features over the images of a sample


class _Size(NamedTuple):
    """The backbone for images of one size."""

    num_layers: int
    num_filters: int


_SIZES = {8: _Size(2, 16), 28: _Size(4, 64)}
_ACCELERATED = {
    "lr_upper": 10.0,
    "lr_lower": 4.0,
    "delta": 2.0,
    "offset": 1e4,
    "momentum_upper": 100.0,
    "momentum_lower": 100.0,
}


@dataclass(frozen=True, kw_only=True)
class FewShot(Task):
    data: Literal["digits", "omniglot"] = setting(
        "digits", "characters; Omniglot is read from omniglot/omniglot_28x28.npz"
    )
    data_dir: str | None = setting(
        None, "folder of that file's folder; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    num_clients: int | None = setting(
        None, "clients; None: as many as the alphabets allow, 11 on Omniglot and 4 on digits", symbol="M", least=1
    )
    alphabets_per_client: int = setting(3, "alphabets of a client, which no other client has", least=1)
    num_tasks: int = setting(20, "tasks of a client, each with a head of its own", symbol="N_m", least=1)
    num_ways: int = setting(5, "characters of a task", symbol="N", least=2)
    num_shots: int = setting(1, "images of a character for training", symbol="K", least=1)
    num_queries: int = setting(15, "images of a character for validation", least=1)
    num_held_out: int = setting(
        8, "held-out episodes per client from the alphabets for validation, and as many for testing", least=1
    )
    num_adaptation_steps: int = setting(
        100, "accelerated gradient steps that find the head of a held-out episode", least=1
    )
    num_filters: int | None = setting(None, "filters of every convolution; None: 64, or 16 on digits", least=1)
    norm: Literal["sample", "image"] = setting(
        "sample", "a channel over the images of a task in one sample, or an image by itself"
    )
    activation: Literal["relu", "gelu"] = setting(
        "relu", "activation after convolutions: relu as in the paper, or the smooth gelu"
    )
    l2: float = setting(0.01, "weight of the squared norm of y in the lower level", above=0)
    data_seed: int = setting(0, "seed of alphabets, tasks and initial weights", least=0)

    # The paper's values, but for the steps of x and y of the accelerated methods, which are ten times the paper's: they
    # are multiplied by a, which is 0.093 with the paper's delta and offset, and so are about as long as those of the
    # other methods. With the paper's, learning was much slower.
    suggested = {
        "*": {"lr_upper": 1.0, "lr_lower": 0.4, "lr_system": 0.5},
        "fedbioacc_local": _ACCELERATED,
        "distbioacc": _ACCELERATED,
    }
    suggested_iterations = {"*": 40, "distbio": 200, "distbioacc": 200}
    judge = ("held_out", "validation_right", "validation_answers")
    avoid = (
        "a metric is enough for the tasks, or episodes can be drawn anew (few_shot_episodes): on the digits of "
        "`worth`, ProtoNet has 71.0 % and `self_tuned` has 67.4 %"
    )
    headline = ("validation_accuracy", "test_accuracy", "query_accuracy")
    needs = {
        role: {"image": "one image of every character of every task, (num_tasks, num_ways, pixels)"}
        for role in ("train", "val")
    }
    measures = {
        "held_out": {
            "image": (
                "one episode, num_shots images of every character and then its queries, "
                "(images, num_ways, pixels): for validation_accuracy"
            )
        },
        "test": {"image": "likewise, of other characters: for test_accuracy"},
    }

    def build(self) -> Built:
        rng = np.random.default_rng([self.data_seed, 0])
        found = dealt(
            self.data, self.data_dir, rng, num_clients=self.num_clients, per_client=self.alphabets_per_client,
            num_ways=self.num_ways, num_shots=self.num_shots, num_queries=self.num_queries,
        )  # fmt: skip
        clients: list[Holdings] = []
        for members in found.own:
            image, character = found.alphabets.episodes(members, self.num_tasks, self.num_ways, found.each, rng)
            sample, which = image.swapaxes(0, 1), np.broadcast_to(character, (found.each, *character.shape))
            held = found.held_episodes(self.num_held_out, self.num_ways, rng)
            clients.append(
                {
                    "train": {"image": sample[: self.num_shots], "character": which[: self.num_shots]},
                    "val": {"image": sample[self.num_shots :], "character": which[self.num_shots :]},
                    **{role: {"image": looks, "character": names} for role, (looks, names) in held.items()},
                }
            )
        return Built(self.problem(Shapes.of(clients[0])), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        num_tasks, num_ways, num_pixels = shapes.sample("image", "train", "val", ndim=3)
        if (num_tasks, num_ways) != (self.num_tasks, self.num_ways):
            raise ProblemError(
                f"samples of train/image have {num_tasks} tasks of {num_ways} characters, the settings say "
                f"{self.num_tasks} of {self.num_ways}: "
                "set num_tasks and num_ways as in the data."
            )
        side = math.isqrt(num_pixels)
        if side not in _SIZES or num_pixels != side * side:
            raise ProblemError(f"images have {num_pixels} pixels, expected 64 or 784 (8 x 8 or 28 x 28).")
        held = {
            role: name for role, name in (("held_out", "validation"), ("test", "test")) if shapes.has(role, "image")
        }
        for role in held:
            num_images, *rest = shapes.sample("image", role, ndim=3)
            if num_images <= self.num_shots or rest != [num_ways, num_pixels]:
                raise ProblemError(
                    f"samples of {role}/image have the shape {(num_images, *rest)}, expected more than num_shots "
                    f"({self.num_shots}) images, and then "
                    f"({num_ways}, {num_pixels}) as in train."
                )
        num_layers, num_filters = _SIZES[side].num_layers, self.num_filters or _SIZES[side].num_filters
        layers = {f"conv{i}": (num_filters, 1 if i == 1 else num_filters, 3, 3) for i in range(1, num_layers + 1)}
        weights = uniform(layers, torch.Generator().manual_seed(self.data_seed))
        heads = (self.num_tasks, self.num_ways)
        return Problem(
            upper=lambda x, y, batch: _losses(y, batch).mean(1),
            lower=lambda x, y, batch: (
                _losses(y, batch).sum(1) + 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())
            ),
            x0={name: leaf for name, leaf in weights.items() if name != f"conv{num_layers}.bias"},
            y0={"head.weight": torch.zeros(*heads, num_filters), "head.bias": torch.zeros(heads)},
            scopes=Scopes(lower="local"),
            features=self._features(side, num_layers),
            statistics={"val": _own, **{role: self._adapted(name) for role, name in held.items()}},
            metrics=_metrics,
            name="few_shot",
        )

    def rivals(self) -> Mapping[str, Rival]:
        """Return ProtoNet, ANIL, and a classifier of all characters whose features get new heads."""
        built = self.build()
        (num_pixels,) = built.clients[0]["train"]["image"].shape[3:]
        side = math.isqrt(num_pixels)
        assert isinstance(built.problem.x0, Mapping)
        features = self._features(side, _SIZES[side].num_layers)
        backbone = Backbone(features, built.problem.x0, self.num_shots, _LENGTH)
        return fixed_task_rivals(backbone, built.clients, _metrics, self.data_seed)

    def refits(self, problem: Problem, clients: Any, x: Any) -> Mapping[str, Way]:
        """Return none: held-out episodes judge the backbone, and each finds a head of its own."""
        return {}

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        """Return the accuracy of the clients' own heads on their own queries."""
        return accuracies(
            problem, clients, result, role="val", right="query_right", of="query_answers", name="query_accuracy"
        )

    def _features(self, side: int, num_layers: int) -> Callable[[Any, Any], Tensor]:
        """Return the function (x, batch) -> features.

        It maps images (samples, ..., ways, pixels) to features (samples, ..., ways, filters).
        """
        activation = ACTIVATIONS[self.activation]

        def features(x: Any, batch: Any) -> Tensor:
            image = batch["image"]
            z = image.reshape(-1, 1, side, side)
            for i in range(1, num_layers + 1):
                z = conv2d(z, x[f"conv{i}.weight"], stride=2, padding=1)
                z = self._normalised(z)
                z = activation(z if i == num_layers else z + x[f"conv{i}.bias"][:, None, None])
            return (_LENGTH * z.shape[1] ** -0.5 * z.mean((2, 3))).reshape(*image.shape[:-1], -1)

        return features

    def _normalised(self, z: Tensor) -> Tensor:
        """Normalise z (images, channels, height, width).

        The images of a sample are adjacent in z.
        """
        together = z if self.norm == "image" else z.reshape(-1, self.num_ways, *z.shape[1:])
        axes = (1, 2, 3) if self.norm == "image" else (1, 3, 4)
        centred = together - together.mean(axes, keepdim=True)
        return (centred * (centred.square().mean(axes, keepdim=True) + 1e-5).rsqrt()).reshape(z.shape)

    def _adapted(self, name: str) -> Callable[[Any, Any, Any], dict[str, Tensor]]:
        """Count right answers to the queries of held-out episodes, each by its own head."""

        def adapted(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
            # the last weight of a head is its bias
            features = torch.cat([batch["features"], torch.ones_like(batch["features"][..., :1])], -1)
            head = self._head(features[:, : self.num_shots].flatten(1, 2))
            return _counted(name, torch.einsum("rqnd,rcd->rqnc", features[:, self.num_shots :], head))

        return adapted

    def _head(self, support: Tensor) -> Tensor:
        """Return the minimisers of the lower level for supports (episodes, shots * ways, d).

        The method is accelerated gradient descent with the longest safe step: the curvature is at
        most l2 plus half the mean squared length of a feature.
        """
        num = support.shape[1]
        truth = torch.eye(self.num_ways, dtype=support.dtype, device=support.device).repeat(self.num_shots, 1)
        step = 1 / (self.l2 + 0.5 * support.square().sum((1, 2), keepdim=True) / num)
        head = ahead = support.new_zeros(()).expand(len(support), self.num_ways, support.shape[2])
        root = (self.l2 * step).sqrt()
        for _ in range(self.num_adaptation_steps):
            wrong = torch.einsum("rnd,rcd->rnc", support, ahead).softmax(-1) - truth
            new = ahead - step * (torch.einsum("rnc,rnd->rcd", wrong, support) / num + self.l2 * ahead)
            head, ahead = new, new + (1 - root) / (1 + root) * (new - head)
        return head


def _logits(y: Any, batch: Any) -> Tensor:
    """Return logits (samples, tasks, images, characters) of a client's own tasks.

    Image n shows character n.
    """
    return torch.einsum("rtnd,tcd->rtnc", batch["features"], y["head.weight"]) + y["head.bias"][:, None]


def _losses(y: Any, batch: Any) -> Tensor:
    """Return losses (samples, tasks), which depend on x through the features only."""
    return -_logits(y, batch).log_softmax(-1).diagonal(dim1=-2, dim2=-1).mean(-1)


def _counted(name: str, logits: Tensor) -> dict[str, Tensor]:
    """Count the right answers and all answers of every sample."""
    right = (logits.argmax(-1) == torch.arange(logits.shape[-1], device=logits.device)).flatten(1)
    return {f"{name}_right": right.sum(1), f"{name}_answers": torch.ones_like(right).sum(1)}


def _own(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    """Count right answers of the clients' own heads to their own queries."""
    return _counted("query", _logits(y, batch))


def _metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients."""
    return {
        f"{name}_accuracy": sums[f"{name}_right"] / sums[f"{name}_answers"]
        for name in ("validation", "test", "query")
        if f"{name}_answers" in sums
    }
