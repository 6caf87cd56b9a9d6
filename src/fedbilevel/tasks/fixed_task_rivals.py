"""Plain ways to few-shot classification with fixed tasks: one network, trained by FedAdam, and a head made from it.

    prototypes   queries go to the nearest mean of a support
    anil         a head with a learned start takes gradient steps on the support, and the loss of the
                 queries is differentiated through them
    classifier   the network classifies all characters of all clients, and a new head is the ridge
                 regression on the support

These are the ways of tasks/few_shot_rivals.py, on the backbone and on the fixed tasks of the task
few_shot: a sample is one task, its support before its queries. The network is y, and x is a
constant. Held-out episodes of the validation part choose among the ways of a rival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks import episodes
from fedbilevel.tasks.episodes import Features
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.rival import Rival, Way

Score = Callable[[Any, Any, Features], Tensor]  # (x, y, features of episodes) -> scores of the queries
Loss = Callable[[Any, Any, Any], Tensor]

_LENGTHS = (0.003, 0.01, 0.03)  # server_lr of FedAdam
_ADAM = {"num_local_steps": 1, "lr_lower": 1.0, "server_damping": 1e-5, "batch_size": 4}  # tasks of a client in a step
_NUM_STEPS = 5  # gradient steps of a head
# x of every rival, for features of length 1: a factor of scores, the length of a step, the penalty of the ridge
_CONSTANTS = {
    "prototypes": {"factor": 16.0},
    "anil": {"step": 4.0},
    "classifier": {"factor": 8.0, "penalty": 1.0},
}
_ROLES = {"train": "query", "held_out": "validation", "test": "test"}


class Backbone:
    """The network of the task, whose features have at most the given root mean square length."""

    def __init__(
        self, features: Callable[[Any, Any], Tensor], weights: Mapping[str, Tensor], num_shots: int, length: float
    ):
        self._features, self.weights, self._num_shots, self._length = features, dict(weights), num_shots, length
        self.width = len(next(reversed([leaf for name, leaf in weights.items() if name.endswith("weight")])))

    def of(self, y: Any, image: Tensor) -> Tensor:
        return self._features(y, {"image": image}) / self._length

    def episodes(self, y: Any, image: Tensor) -> Features:
        z = self.of(y, image)
        return Features(z[:, : self._num_shots], z[:, self._num_shots :])


def as_episodes(clients: Sequence[Holdings]) -> list[dict[str, Any]]:
    """Return clients with one training sample per task; held-out episodes validate."""

    def joined(client: Holdings, name: str) -> np.ndarray:
        return np.concatenate([np.asarray(client[role][name]) for role in ("train", "val")]).swapaxes(0, 1)

    return [
        {**client, "train": {name: joined(client, name) for name in client["train"]}, "val": client["held_out"]}
        for client in clients
    ]


def fixed_task_rivals(backbone: Backbone, clients: Sequence[Holdings], metrics: Any, seed: int) -> dict[str, Rival]:
    """Return the rivals, each tuned by three trials on the held-out episodes of the validation part.

    A bilevel run can begin at ProtoNet's network.
    """
    own = as_episodes(clients)
    known = np.unique(np.concatenate([client["train"]["character"].ravel() for client in own]))
    for client in own:
        client["train"]["label"] = np.searchsorted(known, client["train"]["character"])
    head = lambda num, scale=1.0: uniform(
        {"head": (num, backbone.width)}, torch.Generator().manual_seed(seed), scale=scale
    )

    def rival(name: str, title: str, score: Score, more: Mapping[str, Tensor], lower: Loss | None = None) -> Rival:
        scores = lambda x, y, batch: score(x, y, backbone.episodes(y, batch["image"]))
        upper = lambda x, y, batch: episodes.loss(scores(x, y, batch))
        counts = {
            role: lambda x, y, batch, part=part: episodes.counted(part, scores(x, y, batch))
            for role, part in _ROLES.items()
        }
        x0 = {key: torch.tensor(value) for key, value in _CONSTANTS[name].items()}
        problem = Problem(
            upper=upper, lower=lower or upper, x0=x0, y0={**backbone.weights, **more}, statistics=counts,
            metrics=metrics, name="few_shot",
        )  # fmt: skip
        ways = {f"server_lr {num:g}": Way(problem, own, "fedadam", {**_ADAM, "server_lr": num}) for num in _LENGTHS}
        return Rival(title, MappingProxyType(ways))

    def classified(x: Any, y: Any, batch: Any) -> Tensor:
        """Return the mean loss of all images of a task, of which the network says the character."""
        z = backbone.of(y, batch["image"]).flatten(1, 2) * backbone.width**0.5
        logits = z @ y["head.weight"].mT + y["head.bias"]
        return cross_entropy(logits.mT, batch["label"].flatten(1), reduction="none").mean(1)

    prototypes = rival(
        "prototypes", "ProtoNet: nearest mean of the support, trained on the tasks",
        lambda x, y, z: x["factor"] * episodes.prototypes(z), {},
    )  # fmt: skip
    begun = lambda label, run: {"x0": {name: leaf.detach().cpu().clone() for name, leaf in run.y.items()}}
    return {
        "prototypes": prototypes._replace(start=begun),
        "anil": rival(
            "anil", "ANIL: gradient steps of a head on the support, trained through them",
            lambda x, y, z: episodes.adapted(z, y["head.weight"], y["head.bias"], x["step"], _NUM_STEPS),
            head(np.shape(own[0]["train"]["image"])[2], 0.1),
        ),
        "classifier": rival(
            "classifier", "classifier of all characters, then ridge regression",
            lambda x, y, z: x["factor"] * episodes.ridge(z, x["penalty"]), head(len(known)), classified,
        ),
    }  # fmt: skip
