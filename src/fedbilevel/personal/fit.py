"""`personalise`: a shared network, own heads near its last layer, and a choice between both."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.cleaning.prepared import checked, number_of_classes
from fedbilevel.data.partition import split_validation
from fedbilevel.errors import ProblemError, ProblemWarning, RecoveryWarning
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.personal.outcome import Personalised, Scale, surely
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.holdings import check_clients
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.runs.endings import whole
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.settings import names_for, whole_number
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.networks import split_off
from fedbilevel.tasks.rival import with_validation
from fedbilevel.tasks.task import Shapes

_START, _ROUNDS = -3.0, 30  # of the logarithm of the strength, which one number learns quickly
_FEWEST = 20
_NEWTON = 60  # iterations of L-BFGS on a head


class _Split(NamedTuple):
    """Samples of one client: a judge sees neither level, and decides between the models."""

    train: dict[str, np.ndarray]
    val: dict[str, np.ndarray]
    judge: dict[str, np.ndarray]


def personalise(
    clients: Sequence[Holdings],
    *,
    model: Literal["mlp", "cnn"] = "mlp",
    num_hidden: int | None = 64,
    l2: float = 0.01,
    num_classes: int | None = None,
    num_rounds: int = 100,
    cohort: float = 1.0,
    batch_size: int | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Personalised:
    """Train one classifier for all clients and one for each, and keep the better kind.

    First FedAvg trains a network of all clients. Then every client has a last layer of its own, near
    that of the network, which it fits to its training samples:

        g_i(s, y_i) = CE(y_i; train_i) + exp(s)/2 |y_i - y|^2        f_i(y_i) = CE(y_i; val_i)

    The upper level learns s, which is how far clients may differ, on samples that the heads have not
    seen. s is one number, so this costs next to nothing. At last every client fits its head to all
    its samples, without a message. Samples that no step has seen decide whether the own heads are
    used: unless they raise the likelihood by two standard errors, `predict` uses the shared network. All messages
    together are at most three times those of `num_rounds` rounds of FedAvg.

    clients: one dict per client. `train` has `image`, one row or array of numbers per sample, and
        `label`, whole numbers from 0; `val` is taken from `train` if it is absent or the same; `test`
        is optional, and only measured.
    model: "mlp" has one hidden layer; "cnn" has two convolutions, for images of 8 x 8, 28 x 28 or
        3 x 32 x 32.
    num_hidden: units of the hidden layer; None: the size that suits the model.
    l2: weight of the squared norm of the last layer of the shared network.
    num_classes: number of classes; None: the largest label plus one.
    num_rounds: rounds of FedAvg, at least 20.
    cohort: share of the clients that take part in a round.
    batch_size: samples per minibatch; None: all samples of a client.
    names: names of the clients, for tables.

    >>> import fedbilevel as fb
    >>> task = fb.tasks.Personalisation(num_clients=6, share=0.3, shift="labels")
    >>> found = fb.personalise(task.build().clients, num_rounds=40)
    >>> found.chosen
    'own'
    """
    num_rounds = whole_number("num_rounds", num_rounds, _FEWEST)
    check_clients(clients)
    named = [str(i) for i in range(len(clients))]
    if names is not None:
        named = names_for("names", names, len(clients), "client", distinct=True)
    given = [checked(client, i) for i, client in enumerate(clients)]
    num = number_of_classes(given, num_classes)
    splits, tests, scale = _prepared(given, seed)
    network = HyperRepresentation(model=model, num_hidden=num_hidden, l2=l2, lower="local", data_seed=seed)
    known: list[Holdings] = [{"train": split.train, "val": split.val} for split in splits]
    own = network.problem(Shapes.of(known[0], num))
    options = {
        "seed": seed, "batch_size": batch_size, "cohort": Cohort(cohort), "device": device, "residuals": False,
        "recover": True,
    }  # fmt: skip
    # the plain network is as strong as it can be: it also sees the samples of the upper level
    plain = _shared(network, own, with_validation(known), num_rounds, options)
    shared = {name: leaf.detach().cpu() for name, leaf in plain.y.items()}
    body, head = split_off(shared, "head")
    score = network.score(splits[0].train["image"].shape[1])
    rows = [[_rows(network, body, part) for part in split] for split in splits]
    learned = _learned(head, rows, options)
    strength = float(learned.x["log_strength"].exp())
    heads = [_head(head, strength, some[:2]) for some in rows]
    gains = [_likelihoods(own, some[2]) - _likelihoods(head, some[2]) for own, some in zip(heads, rows, strict=True)]
    every = np.concatenate(gains)
    gain, error = float(every.mean()), float(every.std(ddof=1) / np.sqrt(len(every))) if len(every) > 1 else np.inf
    if surely(gain, error):  # the judge's samples have decided, and heads may use them
        heads = [_head(head, strength, some) for some in rows]
    scale_floats = len(clients) * 2 * (2 * scale.mean.size + 1)  # sums up, and the scale down
    return Personalised(
        names=named, score=score, scale=scale, body=body, heads=heads, shared=shared, strength=strength,
        gain=gain, error=error,
        judged=[split.judge for split in splits], tested=tests,
        megabytes=plain.final["megabytes"] + learned.final["megabytes"] + 4e-6 * scale_floats, runs=(plain, learned),
    )  # fmt: skip


def _shared(
    network: HyperRepresentation, own: Problem, clients: Sequence[Holdings], num_rounds: int, options: Mapping[str, Any]
) -> Result:
    """Train the whole network by FedAvg."""
    score = network.score(clients[0]["train"]["image"].shape[1])
    assert isinstance(own.x0, Mapping)
    problem = network.classified(
        lambda x, y, batch: score(y, batch), {"unused": torch.zeros(1)}, {**own.x0, **own.y0}, Scopes(), (), None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProblemWarning)
        return whole(solve(problem, clients, FedAvg(lr_lower="auto"), num_iterations=num_rounds, **options))


def _rows(
    network: HyperRepresentation, body: Mapping[str, Tensor], part: Mapping[str, np.ndarray]
) -> dict[str, Tensor]:
    """Return what the hidden layers make of samples."""
    image = torch.as_tensor(part["image"])
    with torch.no_grad():
        return {
            "row": network.features(image.shape[1])(body, {"image": image}),
            "label": torch.as_tensor(part["label"]),
        }


def _entropies(head: Mapping[str, Tensor], part: Any) -> Tensor:
    logits = linear(part["row"], head["head.weight"], head["head.bias"])
    return cross_entropy(logits, part["label"], reduction="none")


def _distance(head: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([((leaf - centre[name].to(leaf)) ** 2).sum() for name, leaf in head.items()]).sum()


def strengths(centre: Mapping[str, Tensor]) -> Problem:
    """Return the problem of heads near a common head, whose upper variable is the strength of the pull."""
    return Problem(
        upper=lambda x, y, batch: _entropies(y, batch),
        lower=lambda x, y, batch: _entropies(y, batch) + 0.5 * x["log_strength"].exp() * _distance(y, centre),
        x0={"log_strength": torch.tensor(_START)},
        y0=dict(centre),
        scopes=Scopes(lower="local"),
        name="own_heads",
    )


def _learned(centre: Mapping[str, Tensor], rows: list[list[dict[str, Tensor]]], options: Mapping[str, Any]) -> Result:
    clients: list[Holdings] = [{"train": train, "val": val} for train, val, _ in rows]
    with warnings.catch_warnings():
        # clients of a few labels, and a strength that is right from the start, are expected here
        warnings.simplefilter("ignore", ProblemWarning)
        warnings.simplefilter("ignore", RecoveryWarning)
        return whole(solve(strengths(centre), clients, SelfTuned(), num_rounds=_ROUNDS, **options))


def _head(centre: Mapping[str, Tensor], strength: float, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Fit a head to all given samples of its client, by L-BFGS."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in ("row", "label")}
    head = {name: leaf.clone().requires_grad_() for name, leaf in centre.items()}
    descent = torch.optim.LBFGS(head.values(), max_iter=_NEWTON, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        descent.zero_grad()
        loss = _entropies(head, whole).mean() + 0.5 * strength * _distance(head, centre)
        loss.backward()
        return loss

    descent.step(closure)
    return {name: leaf.detach() for name, leaf in head.items()}


def _likelihoods(head: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(-_entropies(head, part).numpy(), np.float64)


def _prepared(
    clients: Sequence[Mapping[str, Mapping[str, np.ndarray]]], seed: int
) -> tuple[list[_Split], list[dict[str, np.ndarray] | None], Scale]:
    """Return the samples of each client in three parts, its test samples, and the scale of inputs."""
    raw = [{role: {**part, "image": _flat(part["image"])} for role, part in one.items()} for one in clients]
    splits = [_split(one, i, seed) for i, one in enumerate(raw)]
    scale = Scale.of([split.train["image"] for split in splits], by_column=clients[0]["train"]["image"].ndim == 2)
    scaled = lambda part: {**part, "image": scale(part["image"])}
    tests = [scaled(one["test"]) if "test" in one else None for one in raw]
    return [_Split(*map(scaled, split)) for split in splits], tests, scale


def _split(client: dict[str, dict[str, np.ndarray]], number: int, seed: int) -> _Split:
    """Divide the samples of one client by draws of its own."""
    rng = np.random.default_rng([seed, 5, number])
    some = lambda part, places: {name: part[name][places] for name in ("image", "label")}
    cut = lambda part: [some(part, own) for own in split_validation(np.arange(len(part["label"])), 0.4, rng)]
    train, val = client["train"], client.get("val")
    if val is not None and np.array_equal(val["image"], train["image"]):
        val = None  # the same samples count once
    if len(train["label"]) + (0 if val is None else len(val["label"])) < 8:
        raise ProblemError(f"client {number} has fewer than 8 samples: leave it out, or give it more samples.")
    if val is None:
        train, val = cut(train)
    return _Split(some(train, slice(None)), *cut(val))


def _flat(images: np.ndarray) -> np.ndarray:
    return np.asarray(images, np.float32).reshape(len(images), -1)
