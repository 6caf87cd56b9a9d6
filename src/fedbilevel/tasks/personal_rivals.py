"""Plain ways to personalise a classifier: one network, tuned copies, own heads, own statistics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.networks import NETWORKS
from fedbilevel.tasks.rival import Rival, Way
from fedbilevel.tasks.task import Shapes

if TYPE_CHECKING:
    from fedbilevel.tasks.personalisation import Personalisation

STEPS = (0.03, 0.1, 0.3)  # of FedAvg: a factor of three around the step that suits most of these networks


def joined(clients: Sequence[Holdings]) -> list[Holdings]:
    """Return clients that train on their training and validation samples together."""
    both = lambda one, name: np.concatenate([one["train"][name], one["val"][name]])
    return [{**one, "train": {name: both(one, name) for name in one["train"]}} for one in clients]


def standardised(clients: Sequence[Holdings]) -> list[Holdings]:
    """Return clients that subtract the mean of their own training inputs and divide by their deviation."""
    found = []
    for one in clients:
        pixels = np.asarray(one["train"]["image"], np.float64)
        mean, spread = pixels.mean(), pixels.std() or 1.0
        scaled = lambda image, mean=mean, spread=spread: ((image - mean) / spread).astype(np.float32)
        found.append({role: {**own, "image": scaled(own["image"])} for role, own in one.items()})
    return found


def with_prior(clients: Sequence[Holdings], num_classes: int) -> list[Holdings]:
    """Return clients whose samples carry the logarithms of the client's own class frequencies.

    Every class counts one sample more than there are, so that no logarithm is infinite.
    """
    found = []
    for one in clients:
        counts = np.bincount(one["train"]["label"], minlength=num_classes) + 1.0
        prior = np.log(counts / counts.sum()).astype(np.float32)
        found.append({role: {**own, "prior": np.tile(prior, (len(own["label"]), 1))} for role, own in one.items()})
    return found


def tuned(
    title: str,
    problem: Problem,
    clients: Sequence[Holdings],
    algorithm: str,
    settings: Sequence[Mapping[str, Any]],
    refitted: Sequence[Holdings] | None,
) -> Rival:
    """Return a rival with one way per settings, and a refit on `refitted` if it is given."""
    named = {", ".join(f"{name} {value}" for name, value in own.items()): own for own in settings}
    ways = {label: Way(problem, clients, algorithm, MappingProxyType(dict(own))) for label, own in named.items()}
    again = lambda label: ways[label]._replace(clients=refitted)
    return Rival(title, MappingProxyType(ways), again if refitted is not None else None)


def personal_rivals(task: Personalisation) -> Mapping[str, Rival]:
    """Return the plain ways of the task `personalisation`."""
    plain = dataclasses.replace(task, personalise="none", lower="global")
    built = plain.build()
    shared, clients = built.problem, built.clients
    num_pixels, num_classes = clients[0]["train"]["image"].shape[1], shared.y0["out.bias"].shape[0]
    side, network = math.isqrt(num_pixels), NETWORKS[task.model]
    kinds: dict[str, Callable[[Sequence[Holdings]], Sequence[Holdings]]] = {
        "given": lambda some: some,
        "standardised": standardised,
        "prior": functools.partial(with_prior, num_classes=num_classes),
        "both": lambda some: with_prior(standardised(some), num_classes),
    }
    # own statistics are those of all samples that a run trains on
    data = {name: (of(clients), of(joined(clients)) if task.val_share else None) for name, of in kinds.items()}
    measured = tuple(shared.statistics)
    adjusted = plain.classified(
        lambda x, y, batch: network(y, batch["image"], side) + batch["prior"],
        shared.x0, shared.y0, shared.scopes, measured,
    )  # fmt: skip
    alone = dataclasses.replace(shared, scopes=Scopes(lower="local", upper="private"))
    steps = [{"lr_lower": lr, "num_local_steps": 5} for lr in STEPS]
    body = [{**own, "lr_upper": own["lr_lower"]} for own in steps]
    again = data["given"][1]
    found = {
        "fedavg": tuned("FedAvg, one network without a personal part", shared, clients, "fedavg", steps, again),
        "fedadam": tuned(
            "FedAdam, one network without a personal part", shared, clients, "fedadam",
            [{"lr_lower": 0.1, "server_lr": lr, "num_local_steps": 5} for lr in (0.003, 0.01, 0.03)], again,
        ),
        "fine_tuned": tuned(
            "FedAvg, then every client tunes its own copy", shared, clients, "fedavg_plus",
            [{**own, "num_tuning_steps": num} for own in steps for num in (5, 30)], again,
        ),
        "ditto": tuned(
            "Ditto, personal networks near a common one", shared, clients, "ditto",
            [{**own, "prox_weight": weight} for own in steps for weight in (0.1, 1.0)], again,
        ),
        "standardised": tuned("FedAvg on inputs that each client standardises", shared, data["standardised"][0],
                              "fedavg", steps, data["standardised"][1]),
        "prior": tuned("FedAvg with each client's own label prior", adjusted, data["prior"][0], "fedavg", steps,
                       data["prior"][1]),
        "prior_standardised": tuned("FedAvg with own label prior and standardised inputs", adjusted, data["both"][0],
                                    "fedavg", steps, data["both"][1]),
        "local": tuned("every client alone", alone, clients, "fedavg", steps, again),
    }  # fmt: skip
    if task.model != "linear":
        heads = dataclasses.replace(task, personalise="head").problem(Shapes.of(clients[0], num_classes))
        found["fedbabu"] = tuned("FedBABU, a body under a fixed head, tuned last layer", heads, clients, "fedbabu",
                                 [{**own, "num_tuning_steps": 30} for own in body], again)  # fmt: skip
        found["fedrep"] = tuned("FedRep, own last layer", heads, clients, "fedrep", body, again)
    return MappingProxyType(found)
