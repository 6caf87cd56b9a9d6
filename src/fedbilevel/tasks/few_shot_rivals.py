"""Plain ways to few-shot classification: one network, trained by FedAdam, and a head made from it.

    prototypes   queries go to the nearest mean of a support; trained on episodes (Snell, Swersky,
                 Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017)
    anil         a head with a learned start takes five gradient steps on the support, and the loss of
                 the queries is differentiated through them (Raghu, Raghu, Bengio, Vinyals, "Rapid
                 learning or feature reuse? Towards understanding the effectiveness of MAML", ICLR 2020)
    classifier   the network classifies all characters of all clients, and a new head is the ridge
                 regression on the support

The network is y, and x is a constant. Validation samples are held-out episodes, which choose among
the ways of a rival.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks import episodes
from fedbilevel.tasks.episodes import Draw, Features, Network
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.rival import Rival, Way
from fedbilevel.tasks.task import Shapes

if TYPE_CHECKING:
    from fedbilevel.tasks.few_shot_episodes import FewShotEpisodes

Scores = Callable[[Any, Any, Tensor], Tensor]  # (x, y, images of episodes) -> scores

ADAM = {
    "num_local_steps": 1, "lr_lower": 1.0, "server_lr": 0.002, "server_momentum": 0.9, "server_decay": 0.99,
    "server_damping": 1e-5,
}  # fmt: skip
_NUM_STEPS = 5  # gradient steps of a head
_CHARACTERS = 64  # characters in a step of the classifier


def few_shot_rivals(task: FewShotEpisodes, clients: Sequence[Holdings]) -> dict[str, Rival]:
    own = [{**client, "train": client["val"], "val": client["held_out"]} for client in clients]
    num_images, num_pixels = np.shape(clients[0]["train"]["image"])[1:]
    network, each = Network.of(num_pixels, task.num_filters), task.num_shots + task.num_queries
    shapes, start = Shapes.of(own[0]), network.initial(task.data_seed)
    features = lambda y, images: Features.of(network, y, images, task.num_shots)

    def episodic(scores: Scores, x0: dict[str, Tensor], y0: dict[str, Tensor], num_ways: int, name: str) -> Way:
        draw = Draw(task.num_episodes, num_ways, each, num_images)
        problem = Problem(
            upper=lambda x, y, batch: episodes.loss(scores(x, y, batch["image"])),
            lower=lambda x, y, batch: episodes.loss(scores(x, y, draw.images(batch))).mean(),
            x0=x0, y0=y0, draws={"train": draw.numbers}, **measured(task, shapes, scores), name=name,
        )  # fmt: skip
        return Way(problem, own, "fedadam", ADAM)

    fewest = min(len(client["train"]["image"]) for client in own)
    near = lambda x, y, images: x["factor"] * episodes.prototypes(features(y, images))
    width = {"factor": torch.tensor(float(network.width))}
    protonet = {
        f"{num} characters": episodic(near, width, start, num, "prototypes")
        for num in sorted({task.num_ways, min(4 * task.num_ways, fewest)})
    }
    head = uniform({"head": (task.num_ways, network.width)}, torch.Generator().manual_seed(task.data_seed), scale=0.1)
    steps = lambda x, y, images: episodes.adapted(
        features(y, images), y["head.weight"], y["head.bias"], x["step"], _NUM_STEPS
    )
    anil = {
        f"step {step:g}": episodic(steps, {"step": torch.tensor(step)}, {**start, **head}, task.num_ways, "anil")
        for step in (2.0, 10.0)
    }
    return {
        "prototypes": Rival(
            "ProtoNet: nearest mean of the support, trained on episodes",
            protonet,
            start=lambda label, run: _started(task, clients, run.y, int(label.split()[0])),
        ),
        "anil": Rival("ANIL: gradient steps of a head on the support, trained through them", anil),
        "classifier": Rival("classifier of all characters, then ridge regression", _classifiers(task, own, network)),
    }


def _started(task: FewShotEpisodes, clients: Sequence[Holdings], y: Mapping[str, Tensor], num: int) -> dict[str, Any]:
    """Return where a bilevel run begins: at ProtoNet's network, with episodes of as many characters."""
    like = dataclasses.replace(task, training_ways=num).problem(Shapes.of(clients[0]))
    network = {name: leaf.detach().cpu().clone() for name, leaf in y.items()}
    x0 = {**network, "penalty": torch.tensor(0.0)}
    return {"x0": x0, "upper": like.upper, "lower": like.lower, "draws": like.draws}


def _classifiers(task: FewShotEpisodes, clients: Sequence[Holdings], network: Network) -> dict[str, Way]:
    known = np.unique(np.concatenate([client["train"]["character"] for client in clients]))
    own = [
        {**client, "train": {**client["train"], "label": np.searchsorted(known, client["train"]["character"])}}
        for client in clients
    ]
    num_images = np.shape(own[0]["train"]["image"])[1]
    head = uniform({"head": (len(known), network.width)}, torch.Generator().manual_seed(task.data_seed))

    def scores(x: Any, y: Any, images: Tensor) -> Tensor:
        return x["factor"] * episodes.ridge(Features.of(network, y, images, task.num_shots), x["penalty"])

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        """Classify one random image of some random characters."""
        real = batch["weight"] > 0
        draw = batch["draw"] if "draw" in batch else torch.zeros_like(batch["weight"])[:, None].expand(-1, 2)
        few = draw[:, 0].masked_fill(~real, 2.0).argsort(stable=True)[:_CHARACTERS]
        which = (draw[few, 1] * num_images).long()
        z = network.features(y, batch["image"][few, which]) * network.width**0.5
        errors = cross_entropy(z @ y["head.weight"].mT + y["head.bias"], batch["label"][few], reduction="none")
        share = real[few].to(errors.dtype)
        return (share * errors).sum() / share.sum()

    problem = Problem(
        upper=lambda x, y, batch: episodes.loss(scores(x, y, batch["image"])), lower=lower,
        x0={"factor": torch.tensor(8.0), "penalty": torch.tensor(1.0)},
        y0={**network.initial(task.data_seed), **head}, draws={"train": 2},
        **measured(task, Shapes.of(own[0]), scores), name="classifier",
    )  # fmt: skip
    local = {"num_local_steps": 5, "lr_lower": 0.1}
    return {"FedAvg": Way(problem, own, "fedavg", local), "FedAdam": Way(problem, own, "fedadam", ADAM)}


def measured(task: FewShotEpisodes, shapes: Shapes, scores: Scores) -> dict[str, Any]:
    """Return statistics and metrics: right answers to the queries of held-out episodes."""
    found = {"held_out": "validation", "test": "test"}
    held = {role: name for role, name in found.items() if shapes.has(role, "image")}
    for role in held:
        num_images, num_ways, num_pixels = shapes.sample("image", role, kinds=("int",), ndim=3)
        expected = shapes.fields["train"]["image"].shape[-1]
        if num_images <= task.num_shots or (num_ways, num_pixels) != (task.num_ways, expected):
            raise ProblemError(
                f"samples of {role}/image have the shape {(num_images, num_ways, num_pixels)}, expected more than "
                f"num_shots ({task.num_shots}) images, and then ({task.num_ways}, {expected})."
            )

    def counts(name: str) -> Callable[[Any, Any, Any], dict[str, Tensor]]:
        return lambda x, y, batch: episodes.counted(name, scores(x, y, batch["image"]))

    def metrics(sums: Mapping[str, float]) -> dict[str, float]:
        return {f"{name}_accuracy": sums[f"{name}_right"] / sums[f"{name}_answers"] for name in held.values()}

    return {"statistics": {role: counts(name) for role, name in held.items()}, "metrics": metrics}
