"""Plain ways to train and personalise a classifier, and figures by client that they share.

They are rivals of the tasks `personalisation` and `representation`; those of one network for all are
also rivals of `hyper_representation` and `classification`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.shared_heads import shared_heads

Score = Callable[[Any, Any, Any], Tensor]  # (x, y, batch) -> logits (samples, classes)

_STEPS = (0.1, 0.3, 1.0, 3.0)  # of rivals with a second setting of two values
_BODY = (  # steps of FedBABU, whose body under a fixed head diverges with long ones, and numbers of tuning steps
    (0.01, 50), (0.03, 50), (0.1, 50), (0.3, 50), (1.0, 50), (3.0, 50), (0.3, 10), (1.0, 10),
)  # fmt: skip
_FINE = (0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
_MORE = (0.0, 0.03)  # added to the l2 of own heads
_PENALTY = "penalty of "  # a layer: log of the weight by which its own parts are small
_NEAR = 0.1  # this weight at the start of a bilevel run


def answers(score: Score, role: str) -> Callable[[Any, Any, Any], dict[str, Tensor]]:
    def answers(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        right = score(x, y, batch).argmax(-1) == batch["label"]
        return {f"{role}_right": right, f"{role}_samples": torch.ones_like(right)}

    return answers


def across_clients(found: Any) -> dict[str, float]:
    accuracy = found["test_right"] / found["test_samples"]
    return {
        "test_accuracy_bottom_decile": float(torch.quantile(accuracy, 0.1)),
        "test_accuracy_mean_client": float(accuracy.mean()),
    }


def graded_clients(scores: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> dict[str, float]:
    """Return figures over clients of log-probabilities (samples, classes) of test samples."""
    right = scores.argmax(1) == labels
    counts = {"test_right": np.bincount(owners, weights=right), "test_samples": np.bincount(owners)}
    return across_clients({name: torch.as_tensor(value).double() for name, value in counts.items()})


def standardised(clients: Sequence[Holdings]) -> list[Holdings]:
    """Return clients that subtract the mean of their own training inputs and divide by their deviation."""
    found: list[Holdings] = []
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
    found: list[Holdings] = []
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
    if refitted is None:
        return Rival(title, MappingProxyType(ways))
    return Rival(title, MappingProxyType(ways), lambda label: ways[label]._replace(clients=refitted))


def own_heads(
    shared: Problem,
    heads: Problem,
    clients: Sequence[Holdings],
    settings: Sequence[Mapping[str, Any]],
    refitted: Sequence[Holdings] | None,
) -> Rival:
    """Return FedAvg on the whole network, after which every client fits its own head to the minimum.

    Both runs are on the same samples.
    """
    assert isinstance(heads.x0, Mapping)
    body, head = list(heads.x0), list(heads.y0)

    def way(own: Mapping[str, Any], more: float, clients: Sequence[Holdings]) -> Way:
        fit = lambda run: Way(
            dataclasses.replace(_stiffer(heads, more), x0=_some(run.y, body), y0=_some(run.y, head)), clients
        )
        return Way(shared, clients, "fedavg", MappingProxyType(dict(own)), fit)

    plans = {f"lr_lower {own['lr_lower']}, l2 {more:+g}": (own, more) for own in settings for more in _MORE}
    return Rival(
        "FedAvg, then an exact head of every client's own",
        MappingProxyType({label: way(*plan, clients) for label, plan in plans.items()}),
        None if refitted is None else lambda label: way(*plans[label], refitted),
    )


def near_shared(
    plain: Problem, clients: Sequence[Holdings], own: Sequence[str], network: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return where a bilevel run begins at one network of all clients.

    x is the whole network and, for every layer in `own`, the logarithm of a penalty; y_i is what client
    i adds to these layers l:

        g_i(x, y_i) = CE(x + y_i; train_i) + sum_l exp(p_l)/2 |y_il|^2        f_i(x, y_i) = CE(x + y_i; val_i)

    At y_i = 0 this is the shared network, so that validation samples decide how far clients leave it,
    layer by layer. Fine-tuning and Ditto have one number for this.

    plain: the whole network is y.
    """
    whole = lambda x, y: {name: x[name] + y[name] if name in y else x[name] for name in network}
    upper = lambda x, y, batch: plain.upper({}, whole(x, y), batch)
    penalties = {_PENALTY + name: torch.tensor(math.log(_NEAR)) for name in own}
    return {
        "x0": {name: leaf.detach().cpu().clone() for name, leaf in network.items()} | penalties,
        "y0": {name: torch.zeros_like(network[name], device="cpu") for name in own},
        "upper": upper,
        "lower": lambda x, y, batch: (
            upper(x, y, batch) + 0.5 * sum(x[_PENALTY + name].exp() * (leaf**2).sum() for name, leaf in y.items())
        ),
        "features": None,
        "statistics": {
            role: lambda x, y, batch, count=count: count({}, whole(x, y), batch)
            for role, count in plain.statistics.items()
        },
        "clients": clients,
    }


def _stiffer(heads: Problem, more: float) -> Problem:
    """Return the problem with `more` added to the weight of the squared norm of y."""
    lower = lambda x, y, batch: heads.lower(x, y, batch) + 0.5 * more * sum((leaf**2).sum() for leaf in y.values())
    return dataclasses.replace(heads, lower=lower) if more else heads


def _some(values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: values[name].detach().cpu().clone() for name in names}


def whole_network(
    what: str, shared: Problem, clients: Sequence[Holdings], refitted: Sequence[Holdings] | None
) -> dict[str, Rival]:
    """Return FedAvg and FedAdam on a network that is y, each tuned by eight trials on validation samples."""
    adam = [
        {"lr_lower": lr, "server_lr": length, "num_local_steps": 5}
        for lr in (0.03, 0.3)
        for length in (0.003, 0.01, 0.03, 0.1)
    ]
    return {
        "fedavg": tuned(f"FedAvg, {what}", shared, clients, "fedavg", _fine(), refitted),
        "fedadam": tuned(f"FedAdam, {what}", shared, clients, "fedadam", adam, refitted),
    }


def _fine() -> list[dict[str, Any]]:
    return [{"lr_lower": lr, "num_local_steps": 5} for lr in _FINE]


def network_rivals(
    shared: Problem,
    adjusted: Problem,
    heads: Problem | None,
    clients: Sequence[Holdings],
    num_classes: int,
    *,
    refit: bool,
) -> Mapping[str, Rival]:
    """Return plain ways to train a network of all clients, with or without parts of their own.

    Each is tuned by eight trials on validation samples.

    shared: the whole network is y and global. adjusted: the same, with `prior` added to the logits.
    heads: the last layer is y and local, all other layers are x; None if there are no other layers.
    refit: whether the chosen run is repeated on training and validation samples.
    """
    kinds: dict[str, Callable[[Sequence[Holdings]], Sequence[Holdings]]] = {
        "standardised": standardised,
        "prior": functools.partial(with_prior, num_classes=num_classes),
        "both": lambda some: with_prior(standardised(some), num_classes),
    }
    # own statistics are those of all samples that a run trains on
    again = with_validation(clients) if refit else None
    data = {name: (of(clients), of(again) if again else None) for name, of in kinds.items()}
    alone = dataclasses.replace(shared, scopes=Scopes(lower="local", upper=shared.scopes.upper))
    plain = [{"lr_lower": lr, "num_local_steps": 5} for lr in _STEPS]
    fine = _fine()
    also = lambda name, *values: [{**own, name: value} for own in plain for value in values]
    found = {
        **whole_network("one network without a personal part", shared, clients, again),
        "fine_tuned": tuned(
            "FedAvg, then every client tunes its own copy", shared, clients, "fedavg_plus",
            also("num_tuning_steps", 5, 30), again,
        ),
        "ditto": tuned(
            "Ditto, personal networks near a common one", shared, clients, "ditto", also("prox_weight", 0.1, 1.0),
            again,
        ),
        "standardised": tuned(
            "FedAvg on inputs that each client standardises", shared, data["standardised"][0], "fedavg", fine,
            data["standardised"][1],
        ),
        "prior": tuned(
            "FedAvg with each client's own label prior", adjusted, data["prior"][0], "fedavg", fine, data["prior"][1]
        ),
        "prior_standardised": tuned(
            "FedAvg with own label prior and standardised inputs", adjusted, data["both"][0], "fedavg", fine,
            data["both"][1],
        ),
        "local": tuned("every client alone", alone, clients, "fedavg", fine, again),
    }  # fmt: skip
    if heads is not None:
        both = [{**own, "lr_upper": lr} for own in plain for lr in (own["lr_lower"], 0.3 * own["lr_lower"])]
        longer = [{"lr_lower": lr, "num_local_steps": 5, "num_tuning_steps": num, "lr_upper": lr} for lr, num in _BODY]
        found["fedrep"] = tuned("FedRep, own last layer", heads, clients, "fedrep", both, again)
        found["fedbabu"] = tuned("FedBABU, last layer tuned at the end", heads, clients, "fedbabu", longer, again)
        found["own_head"] = own_heads(shared, heads, clients, plain, again)
        begun = lambda label, run: shared_heads(shared, clients, run.x, run.y)
        starts = {
            "own_head": begun,
            "fedrep": begun,
            "prior_standardised": lambda label, run: near_shared(adjusted, data["both"][0], list(heads.y0), run.y),
        }
        found |= {name: found[name]._replace(start=start) for name, start in starts.items()}
    return MappingProxyType(found)
