"""Which training instances help and which harm: what removing any one of them does to the validation loss summed over clients.

With one mask entry per training sample (tasks/influence.py, or any problem whose private x_i weights the samples of client i from ones), the change
of F(x) = sum_k f_k(y*(x)) when x_ij goes from 1 to 0 is to first order minus the derivative of F by x_ij. The private block f_x,i - J_i u of the
library's hypergradient is that derivative (n times the block of the mean form), so one solution of (mean H) u = mean f_y serves all instances of
all clients. It comes from HGP on any network, from a server algorithm that has an `estimate`, or from a solver of hypergradient.py.

`study` also removes the instances of the largest |prediction| one by one, trains again and compares. Where training is gradient push, all retrainings
run side by side in one simulation: every removal is an island, a copy of the clients with one mask entry at zero, and no message passes between islands.

Reference: Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed Networks", section 5.2, appendix A.2, Table 4.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel import discovery, plots
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP, Schedule, gradient_push
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import CheckpointError, ScopeError, SettingError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm, ServerAlgorithm, debiased
from fedbilevel.federation.averaging import Averaging, spread
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.network import AnyNetwork, Network, given
from fedbilevel.oracle.hypergradient import SOLVERS, hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.settings import Settings, setting
from fedbilevel.tasks.findings import images
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.task import Built

PAPER = {
    ("logistic", "mixture"): (0.99, 1.00),
    ("cnn", "digits"): (0.53, 1.00),
    ("cnn", "mnist"): (0.53, 1.00),
}  # R2 and F1 of Table 4, full batch
ESTIMATES = (
    "lr_system",
    "num_terms",
    "minibatches",
    "num_curvature_products",
)  # the settings of HGP that its estimate uses
_PEERS = 1000  # in one simulation of islands: networks between peers are matrices
_COPIES = 2**30  # bytes of copied data in one simulation of islands

Place = tuple[int, int]  # client, sample


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """newton: y*(x) to machine precision, for convex lower levels. push: a fixed number of steps of gradient push on the network, from the initial point."""

    kind: Literal["newton", "push"] = setting(
        "newton", "how the model is trained, and trained again without an instance"
    )
    lr: float = setting(0.1, "push: step of y", symbol="gamma", above=0)
    num_steps: int = setting(1000, "push: steps of y", symbol="T", least=1)
    schedule: Schedule = setting(
        "milestones", "push: the step falls tenfold at 5/6 and at 11/12 of the steps, or not at all"
    )


# ---- prediction ------------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """changes: per client, what removing each of its samples is predicted to add to sum_k f_k.

    residual: |mean(H u - f_y)| / |mean f_y| over all data for the u behind the prediction; None where u is not seen. disagreement: how far the peers' u are
    from their mean, relative to it. cost: the ledger of the estimate, summed over clients.
    """

    changes: list[Tensor]
    residual: float | None
    disagreement: float | None
    cost: dict[str, int]


def influences(
    problem: Problem,
    clients: Sequence[Holdings],
    y: Tensor,
    *,
    method: str | Algorithm = "cg",
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    seed: int = 0,
    batch_size: BatchSize = None,
    **options: Any,
) -> Estimate:
    """At the trained y, one vector or one row per client.

    method: a solver of hypergradient.py, HGP with its settings, or a server algorithm that has an `estimate`, or the name of one.
    network, averaging, batch_size: for HGP; a server algorithm takes batch_size. options: dtype, device, strategy, chunk_size.
    """
    _check(problem)
    method = resolved(method)
    common: dict[str, Any] = {"seed": seed, "batch_size": batch_size, **options}
    with torch.no_grad():
        if isinstance(method, HGP):
            return _by_peers(
                dataclasses.replace(method, lower_solver="mix"),
                problem,
                clients,
                y,
                network=network,
                averaging=averaging,
                **common,
            )
        y = y if y.ndim == 1 else y.double().mean(0).to(y.dtype)
        if isinstance(method, ServerAlgorithm):
            return _by_server(method, problem, clients, y, **common)
        population = Population(problem, clients, **options)
        solved = hypergradient(population, population.x0, y, method=method)  # type: ignore[arg-type]
        n = len(population)
        cost = {"rounds": solved.num_products + 1, "fy": n, "fx": n, "hvp": n * solved.num_products, "jvp": n}
        return Estimate(_changes(population, solved.value), solved.residual, None, cost)


def resolved(method: str | Algorithm) -> str | Algorithm:
    """The name of a solver as it is, that of an algorithm as the algorithm with its defaults."""
    found = method if not isinstance(method, str) or method in SOLVERS else discovery.algorithm(method)()
    if isinstance(found, Algorithm) and not hasattr(found, "estimate"):
        known = [*SOLVERS, *(name for name, kind in discovery.algorithms().items() if hasattr(kind, "estimate"))]
        raise SettingError(
            f"{found.name()} has no estimate of the hypergradient at a point, which a prediction needs: use one of {', '.join(known)}."
        )
    if isinstance(found, PeerAlgorithm) and not isinstance(found, HGP):
        raise SettingError(
            f"{found.name()} runs between peers but is not HGP, whose averages of u a prediction adds up: use hgp."
        )
    return found


class _Watched(PeerSimulation):
    """Adds up the averages of u. HGP never needs the sum, but eta times it is the u that its estimate stands for, and shows what that is worth."""

    total: Tensor | None = None

    def mix(self, **rows: Tensor) -> Any:
        mixed = super().mix(**rows)
        if "u" in rows:
            self.total = mixed if self.total is None else self.total + mixed
        return mixed


def _by_peers(method: HGP, problem: Problem, clients: Sequence[Holdings], y: Tensor, **options: Any) -> Estimate:
    options["network"] = options["network"] if options["network"] is not None else Network()
    peers: Any = _Watched(method, problem, clients, **options)
    y = peers.place("y", y)
    rows, _ = method.estimate(peers, peers.host.x0, y)
    cost = peers.ledger.totals()
    u = method.lr_system * peers.total
    middle = u.double().mean(0).to(u.dtype)
    disagreement = spread(u, torch.linalg.vector_norm(middle))
    return Estimate(_changes(peers.host, rows), residual(peers.host, peers.host.x0, y, middle), disagreement, cost)


class _Undrawn(Simulation):
    """An estimate that draws how many terms of a series it takes is right on average only, which is no prediction for a single instance."""

    def draw(self, purpose: str, high: int) -> int:
        raise SettingError(
            f"{self.algorithm.name()} draws at random which part of a series it takes, so one estimate predicts no single instance: use hgp, fbo_aggitd with "
            "estimator='sum', or a solver such as cg."
        )


def _by_server(method: Any, problem: Problem, clients: Sequence[Holdings], y: Tensor, **options: Any) -> Estimate:
    fed = _Undrawn(method, problem, clients, **options)
    rows, _ = method.estimate(fed, fed.place("x", fed.host.x0), fed.place("y", y))
    return Estimate(_changes(fed.host, fed.collect(rows)), None, None, fed.ledger.totals())


def residual(population: Population, x: Tensor, y: Tensor, u: Tensor) -> float:
    """|mean(H u - f_y)| / |mean f_y| over all data."""
    everyone = torch.arange(len(population))
    weights, oracle, data = population.weights(everyone), population.oracle, population.data
    fy = population.average(oracle.upper_grad_y(x, y, data.batch(everyone, "val")), weights)
    hu = population.average(oracle.hessian_product(x, y, u, data.batch(everyone, "train")), weights)
    return float(torch.linalg.vector_norm(hu - fy) / torch.linalg.vector_norm(fy))


def _changes(population: Population, rows: Tensor) -> list[Tensor]:
    assert population.x_sizes is not None
    return [-row[:size].double().cpu() for row, size in zip(rows, population.x_sizes.tolist(), strict=True)]


def _check(problem: Problem) -> None:
    if problem.scopes.upper != "private" or problem.scopes.lower != "global" or problem.client_weights != "equal":
        raise ScopeError(
            f"influences need a private mask per client, one shared model and clients that count the same; this problem has a {problem.scopes.upper} x, a "
            f"{problem.scopes.lower} y and client_weights {problem.client_weights!r}: see tasks/influence.py."
        )


# ---- training, and training again ------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """For every removal (None: of nobody): y with one row per client, and sum_k f_k there."""

    y: Tensor  # (removals, n, d_y)
    loss: Tensor  # (removals,) float64


def train(
    built: Built,
    training: Training,
    removals: Sequence[Place | None] = (None,),
    *,
    start: Tensor | None = None,
    network: AnyNetwork | None = None,
    seed: int = 0,
    batch_size: BatchSize = None,
    **options: Any,
) -> Trained:
    """Train on x = 1 without one instance, for each of `removals`. start: where Newton's method begins; gradient push always begins at the initial point."""
    _check(built.problem)
    with torch.no_grad():
        if training.kind == "push":
            return _pushed(
                built, training, removals, network if network is not None else Network(), seed, batch_size, options
            )
        population = Population(built.problem, built.clients, **options)
        val = population.data.batch(torch.arange(len(population)), "val")
        ys, losses = [], []
        for place in removals:
            x = _masked(population.x0, [place])
            y = lower_solution(population, x, start)
            ys.append(y.expand(len(population), -1))
            losses.append(population.oracle.evaluate(built.problem.upper, x, y, val).double().sum().cpu())
        return Trained(torch.stack(ys), torch.stack(losses))


def _masked(x: Tensor, removals: Sequence[Place | None]) -> Tensor:
    """The rows of all islands, one after the other, each without its instance."""
    n = len(x) // len(removals)
    x = x.clone()
    for island, place in enumerate(removals):
        if place is not None:
            x[island * n + place[0], place[1]] = 0
    return x


class _AsOnTheMainland(Stream):
    """A client of an island draws what the client that it copies draws, so that retraining sees the same minibatches."""

    def __init__(self, seed: int, num_clients: int) -> None:
        super().__init__(seed)
        self.num_clients = num_clients

    def bits(self, purpose: str, ids: Tensor, **address: Any) -> Tensor:
        return super().bits(purpose, ids % self.num_clients, **address)


def _pushed(
    built: Built,
    training: Training,
    removals: Sequence[Place | None],
    network: AnyNetwork,
    seed: int,
    batch_size: BatchSize,
    options: Mapping[str, Any],
) -> Trained:
    n, num = len(built.clients), len(removals)
    links = network.between(n)
    if links.shares == "fastest" and num > 1:
        raise SettingError(
            "fastest-mixing shares of islands are not those of one island, so retraining would differ from training: use metropolis shares."
        )
    if network.faulty:
        raise SettingError(
            "training by gradient push loses what a lost message carries: use a network without loss and delay, or training 'newton'."
        )
    _ = links.connected_within
    same = torch.eye(num, dtype=torch.bool)
    islands = given(
        n * num, lambda step: torch.kron(same, links.adjacency(step)), directed=links.directed, shares=links.shares
    )
    sgp = SGP(lr_lower=training.lr, num_lower_steps=training.num_steps, lower_schedule=training.schedule)
    peers: Any = PeerSimulation(
        sgp,
        built.problem,
        list(built.clients) * num,
        network=islands,
        check_connected=False,
        seed=seed,
        batch_size=batch_size,
        **options,
    )
    peers.links.period = links.period
    peers.host.stream = _AsOnTheMainland(seed, n)
    x = _masked(peers.host.x0, removals)
    _, y = peers.initial()
    z, w = gradient_push(
        peers, x, y, peers.weights, lr=training.lr, num_steps=training.num_steps, schedule=training.schedule
    )
    y = debiased(z, w)
    val = peers.host.data.batch(peers.host.data.positions, "val")
    losses = peers.host.oracle.evaluate(built.problem.upper, x, y, val).double().cpu()
    return Trained(y.view(num, n, -1), losses.view(num, n).sum(1))


class Retrained(NamedTuple):
    """changes: of sum_k f_k by each removal. noise: the largest difference between trainings without any removal, which changes below it cannot be told
    from: rounding differs with the number of islands."""

    changes: Tensor
    noise: float


def retrain(
    built: Built,
    training: Training,
    base: Trained,
    removals: Sequence[Place],
    *,
    at_once: int | None = None,
    **options: Any,
) -> Retrained:
    """Each removal against training without one in the same simulation. at_once: removals per simulation (default: what 1 GiB and 1000 peers hold)."""
    if training.kind == "newton":
        again = train(built, training, [None, *removals], start=base.y[0, 0], **options)
        return Retrained(again.loss[1:] - again.loss[0], float((again.loss[0] - base.loss[0]).abs()))
    changes, noise = [], 0.0
    for some in _chunks(removals, at_once or _fitting(built)):
        again = train(built, training, [None, *some], **options)
        changes.append(again.loss[1:] - again.loss[0])
        noise = max(noise, float((again.loss[0] - base.loss[0]).abs()))
    return Retrained(torch.cat(changes) if changes else torch.zeros(0, dtype=torch.float64), noise)


def _chunks(removals: Sequence[Place], size: int) -> Iterator[Sequence[Place]]:
    if size < 1:
        raise SettingError(f"at_once is {size}, expected at least 1 removal per simulation.")
    return (removals[i : i + size] for i in range(0, len(removals), size))


def _fitting(built: Built) -> int:
    size = sum(
        torch.as_tensor(value).nbytes for client in built.clients for role in client.values() for value in role.values()
    )
    return max(1, min(_COPIES // size, _PEERS // len(built.clients)) - 1)


# ---- scores ------------------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Of predicted against actual changes. f1: of finding those whose removal lowers the loss; None where there are none, predicted or actual."""

    r2: float | None
    f1: float | None
    pearson: float | None


def scores(predicted: Sequence[float], actual: Sequence[float]) -> Scores:
    """r2 = 1 - SS_res / SS_tot, not the squared correlation: a prediction that is twice too large is punished. None where it is not defined."""
    if len(predicted) != len(actual) or not len(actual):
        raise SettingError(
            f"{len(predicted)} predicted and {len(actual)} actual changes cannot be compared: give as many of both, at least one."
        )
    p, a = torch.tensor(predicted, dtype=torch.float64), torch.tensor(actual, dtype=torch.float64)
    total = float(((a - a.mean()) ** 2).sum())
    hits, either = int(((p < 0) & (a < 0)).sum()), int((p < 0).sum()) + int((a < 0).sum())
    both = math.sqrt(total * float(((p - p.mean()) ** 2).sum()))
    return Scores(
        1 - float(((a - p) ** 2).sum()) / total if total > 0 else None,
        2 * hits / either if either else None,
        float(((a - a.mean()) * (p - p.mean())).sum()) / both if both > 0 else None,
    )


# ---- the whole study ----------------------------------------------------------------------------------------------------------


class Instance(NamedTuple):
    client: int
    sample: int
    label: int
    wrong: bool  # its label was made wrong on purpose
    prediction: float  # what removing it is predicted to add to sum_k f_k
    actual: float | None  # what it did add, where that was tried


@dataclass(frozen=True)
class Study:
    """ranked: all instances, the largest |prediction| first; the first of them were really removed."""

    task: dict[str, Any]
    method: str
    settings: dict[str, Any]
    scores: Scores | None
    ranked: list[Instance]
    num_removed: int
    loss: float  # sum_k f_k of the trained model
    lower_gradient: float  # |mean g_y| of the trained model, which is zero at y*
    val_accuracy: float
    residual: float | None
    disagreement: float | None
    noise: float | None
    cost: dict[str, int]
    seconds: dict[str, float]

    def harmful(self, num: int) -> list[Instance]:
        """Removal lowers the loss: the most negative predictions first."""
        return sorted((one for one in self.ranked if one.prediction < 0), key=lambda one: one.prediction)[:num]

    def helpful(self, num: int) -> list[Instance]:
        return sorted((one for one in self.ranked if one.prediction > 0), key=lambda one: -one.prediction)[:num]

    @property
    def removed(self) -> list[Instance]:
        return self.ranked[: self.num_removed]


def study(
    task: Influence,
    *,
    method: str | Algorithm = "hgp",
    training: Training | None = None,
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    num_removed: int = 50,
    at_once: int | None = None,
    record: Path | None = None,
    draw: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Study:
    """Train, predict every removal from one hypergradient, and try those with the largest predictions.

    What is left out comes from the task: `task.suggests`. record: a new folder for influence.json and, with draw, for pictures. options: seed, batch_size,
    device, strategy, chunk_size; they hold for training, prediction and retraining alike.
    """
    if num_removed < 0:
        raise SettingError(f"num_removed is {num_removed}, expected at least 0.")
    if draw:
        plots.check()
    if record is not None:
        if (record / "influence.json").exists():
            raise CheckpointError(f"{record} already holds a study of influence: name another folder.")
        make_folder(record)
    if isinstance(method, str) and method not in SOLVERS:
        method = _suggested(discovery.algorithm(method), task, method)
    method = resolved(method)
    training = training if training is not None else _suggested(Training, task, "training")
    network = network if network is not None else _suggested(Network, task, "network")
    if averaging is None:
        averaging = _suggested(Averaging, task, "averaging")
        averaging = dataclasses.replace(averaging, kind="robust") if network.faulty else averaging
    options = {"dtype": dtype, **options}
    between: dict[str, Any] = {"network": network} if training.kind == "push" else {}
    minibatches: dict[str, Any] = {name: options.pop(name) for name in ("seed", "batch_size") if name in options}
    built, clock, seconds = task.build(), time.perf_counter(), {}

    def lap(name: str) -> None:
        nonlocal clock
        clock, seconds[name] = time.perf_counter(), time.perf_counter() - clock

    progress("training")
    base = train(built, training, **between, **minibatches, **options)
    lap("training")
    progress("predicting every removal")
    found = influences(
        built.problem,
        built.clients,
        base.y[0],
        method=method,
        network=network,
        averaging=averaging,
        **minibatches,
        **options,
    )
    lap("prediction")
    order = sorted(
        ((float(value), i, j) for i, row in enumerate(found.changes) for j, value in enumerate(row)),
        key=lambda one: (-abs(one[0]), *one[1:]),
    )
    places = [(i, j) for _, i, j in order[:num_removed]]
    progress(f"training again without each of {len(places)} instances")
    again = retrain(built, training, base, places, at_once=at_once, **between, **minibatches, **options)
    lap("retraining")
    actual = again.changes.tolist()
    labels = [client["train"] for client in built.clients]
    ranked = [
        Instance(
            i, j, int(labels[i]["label"][j]), bool(labels[i]["wrong"][j]), value, actual[k] if k < len(actual) else None
        )
        for k, (value, i, j) in enumerate(order)
    ]
    accuracy, gradient = _figures(built, base.y[0], options)
    shown: dict[str, Any] = {
        "training": training.asdict(),
        **({"method": method.asdict()} if isinstance(method, Algorithm) else {}),
        **({"network": network.describe()} if between or isinstance(method, PeerAlgorithm) else {}),
        **({"averaging": averaging.asdict()} if isinstance(method, PeerAlgorithm) else {}),
        "options": {name: str(value) for name, value in {**minibatches, **options}.items()},
    }
    result = Study(
        task=task.asdict(),
        method=method.name() if isinstance(method, Algorithm) else method,
        settings=shown,
        scores=scores([one.prediction for one in ranked[: len(actual)]], actual) if actual else None,
        ranked=ranked,
        num_removed=len(actual),
        loss=float(base.loss[0]),
        lower_gradient=gradient,
        val_accuracy=accuracy,
        residual=found.residual,
        disagreement=found.disagreement,
        noise=again.noise if actual else None,
        cost=found.cost,
        seconds=seconds,
    )
    if record is not None:
        save(result, built, record, draw=draw)
    return result


def _suggested(kind: type[Any], task: Influence, name: str) -> Any:
    known = {spec.name for spec in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in task.suggests(name).items() if key in known})


def _figures(built: Built, y: Tensor, options: Mapping[str, Any]) -> tuple[float, float]:
    """Validation accuracy, and |mean g_y|."""
    population = Population(built.problem, built.clients, **options)
    everyone = torch.arange(len(population))
    with torch.no_grad():
        gradient = population.average(
            population.oracle.lower_grad(population.x0, y, population.data.batch(everyone, "train")),
            population.weights(everyone),
        )
    return population.measure(population.x0, y)["val_accuracy"], float(torch.linalg.vector_norm(gradient))


def save(result: Study, built: Built, folder: Path, *, draw: bool) -> None:
    """influence.json, and pictures: the removals, and for image data the instances that harm and help most."""
    content = {
        **dataclasses.asdict(result),
        "scores": result.scores._asdict() if result.scores is not None else None,
        "ranked": [one._asdict() for one in result.ranked],
        "versions": versions(),
    }
    write_whole(folder / "influence.json", (json.dumps(content, indent=1) + "\n").encode())
    if result.task["data"] != "mixture":
        write_whole(folder / "findings.json", (json.dumps(_looks(result, built)) + "\n").encode())
    if not draw:
        return
    if result.scores is not None:
        pairs = [(one.prediction, one.actual) for one in result.removed if one.actual is not None]
        title = f"{result.task['data']}, {result.task['model']}, {result.method}"
        plots.scatter(pairs, folder / "removals.png", title=title, r2=result.scores.r2, f1=result.scores.f1)
    if result.task["data"] != "mixture":
        image = lambda one: torch.as_tensor(built.clients[one.client]["train"]["input"][one.sample]).numpy()
        rows = {
            "most harmful: removal lowers the loss": result.harmful(10),
            "most helpful: removal raises the loss": result.helpful(10),
        }
        plots.sheet(
            {title: [(image(one), _caption(one)) for one in some] for title, some in rows.items()},
            folder / "instances.png",
        )


def _looks(result: Study, built: Built) -> list[dict[str, Any]]:
    """The images of the instances that harm and help most, for a page."""
    found = []
    for kind, does, some in (("harmful", "lowers", result.harmful(12)), ("helpful", "raises", result.helpful(12))):
        if some:
            looks = np.stack([np.asarray(built.clients[one.client]["train"]["input"][one.sample]) for one in some])
            facts = [
                {
                    "client": one.client,
                    "sample": one.sample,
                    "label": one.label,
                    "predicted": one.prediction,
                    "wrong": one.wrong,
                }
                for one in some
            ]
            found.append(
                images(
                    f"How the most {kind} look",
                    f"Their removal {does} the validation loss summed over clients, by as much as is predicted here.",
                    looks,
                    facts,
                )
            )
    return [one for one in found if one is not None]


def _caption(one: Instance) -> str:
    return f"label {one.label}{' (wrong)' if one.wrong else ''}\nclient {one.client}, no. {one.sample}\npredicted {one.prediction:+.2g}"
