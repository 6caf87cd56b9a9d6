"""A study of influence: train, predict every removal, and retrain without some instances."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbilevel import plots
from fedbilevel.errors import CheckpointError, SettingError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import AnyNetwork, Network
from fedbilevel.oracle.hypergradient import SOLVERS
from fedbilevel.oracle.population import Population
from fedbilevel.runs.record import make_folder
from fedbilevel.studies.influence.fit import default_method
from fedbilevel.studies.influence.plain import NAMES, plain_scores
from fedbilevel.studies.influence.predict import Estimate, influences, kind_of, resolved
from fedbilevel.studies.influence.record import save
from fedbilevel.studies.influence.result import Instance, Study, scores
from fedbilevel.studies.influence.retrain import Retrained, Training, retrain, train
from fedbilevel.studies.influence.series import Series
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.task import Built


@dataclasses.dataclass(frozen=True)
class _Settings:
    """All settings of a study, including those that the task suggests."""

    method: str | Algorithm | Series
    training: Training
    network: AnyNetwork
    averaging: Averaging

    def shown(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the parts that the study used, for the record."""
        method, between_peers = self.method, isinstance(self.method, PeerAlgorithm)
        return {
            "training": self.training.asdict(),
            **({"method": method.asdict()} if isinstance(method, Algorithm | Series) else {}),
            **({"network": self.network.describe()} if between_peers or self.training.kind == "push" else {}),
            **({"averaging": self.averaging.asdict()} if between_peers else {}),
            "options": {name: str(value) for name, value in options.items()},
        }


def study(
    task: Influence,
    *,
    method: str | Algorithm | Series | None = None,
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
    """Train, predict every removal from one hypergradient, and remove the largest predictions.

    The task suggests omitted settings (`task.suggests`). By default, the method is conjugate
    gradients with a server, or a series for networks (series.py); it is HGP if a network of peers or
    averaging is given.

    record: a new folder for influence.json and, with `draw`, for pictures.
    options: seed, batch_size, device, strategy and chunk_size of training, prediction and
        retraining.
    """
    if num_removed < 0:
        raise SettingError(f"num_removed is {num_removed}, expected at least 0.")
    if draw:
        plots.check()
    _open(record)
    if method is None:
        method = default_method(network=network, averaging=averaging, convex=task.model == "logistic")
    settings = _completed(task, method, training, network, averaging)
    drawn: dict[str, Any] = {name: options.pop(name) for name in ("seed", "batch_size") if name in options}
    computing = {"dtype": dtype, **options}
    common = {**drawn, **computing}
    between: dict[str, Any] = {"network": settings.network} if settings.training.kind == "push" else {}
    built, clock, seconds = task.build(), time.perf_counter(), {}

    def lap(name: str) -> None:
        nonlocal clock
        clock, seconds[name] = time.perf_counter(), time.perf_counter() - clock

    progress("training")
    base = train(built, settings.training, **between, **common)
    lap("training")
    progress("predicting every removal")
    given: dict[str, Any] = {"method": settings.method, "network": settings.network, "averaging": settings.averaging}
    found = influences(built.problem, built.clients, base.y[0], **given, **common)
    lap("prediction")
    order = _order(found)
    places = [(i, j) for _, i, j in order[:num_removed]]
    progress(f"training again without each of {len(places)} instances")
    again = retrain(built, settings.training, base, places, at_once=at_once, **between, **common)
    lap("retraining")
    accuracy, gradient = _figures(built, base.y[0], computing)
    about = {"loss": float(base.loss[0]), "lower_gradient": gradient, "val_accuracy": accuracy, "seconds": seconds}
    y = base.y[0].double().mean(0).to(base.y.dtype)
    plain = plain_scores(Population(built.problem, built.clients, **computing), y)
    result = _result(task, settings.method, built, order, found, plain, again, settings=settings.shown(common), **about)
    if record is not None:
        save(result, built, record, draw=draw)
    return result


def _open(record: Path | None) -> None:
    if record is None:
        return
    if (record / "influence.json").exists():
        raise CheckpointError(f"{record} already holds a study of influence: name another folder.")
    make_folder(record)


def _completed(
    task: Influence,
    method: str | Algorithm | Series,
    training: Training | None,
    network: AnyNetwork | None,
    averaging: Averaging | None,
) -> _Settings:
    if isinstance(method, str) and method not in SOLVERS:
        method = _suggested(kind_of(method), task, method)
    method = resolved(method)
    training = training if training is not None else _suggested(Training, task, "training")
    network = network if network is not None else _suggested(Network, task, "network")
    if averaging is None:
        averaging = _suggested(Averaging, task, "averaging")
        averaging = dataclasses.replace(averaging, kind="robust") if network.faulty else averaging
    return _Settings(method, training, network, averaging)


def _suggested(kind: type[Any], task: Influence, name: str) -> Any:
    known = {spec.name for spec in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in task.suggests(name).items() if key in known})


def _order(found: Estimate) -> list[tuple[float, int, int]]:
    """Return prediction, client and sample of every instance, the largest |prediction| first."""
    every = [(float(value), i, j) for i, row in enumerate(found.changes) for j, value in enumerate(row)]
    return sorted(every, key=lambda one: (-abs(one[0]), *one[1:]))


def _result(
    task: Influence,
    method: str | Algorithm | Series,
    built: Built,
    order: list[tuple[float, int, int]],
    found: Estimate,
    plain: Mapping[str, list[Tensor]],
    again: Retrained,
    **more: Any,
) -> Study:
    actual = again.changes.tolist()
    labels = [client["train"] for client in built.clients]
    ranked = []
    for k, (value, i, j) in enumerate(order):
        label, wrong = int(labels[i]["label"][j]), bool(labels[i]["wrong"][j])
        beside = (float(plain[name][i][j]) for name in NAMES)
        ranked.append(Instance(i, j, label, wrong, value, actual[k] if k < len(actual) else None, *beside))
    return Study(
        task=task.asdict(),
        method=method if isinstance(method, str) else method.name(),
        scores=scores([one.prediction for one in ranked[: len(actual)]], actual) if actual else None,
        ranked=ranked,
        num_removed=len(actual),
        residual=found.residual,
        disagreement=found.disagreement,
        noise=again.noise if actual else None,
        cost=found.cost,
        **more,
    )


def _figures(built: Built, y: Tensor, options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the validation accuracy, and |mean g_y|."""
    population = Population(built.problem, built.clients, **options)
    everyone = torch.arange(len(population))
    with torch.no_grad():
        rows = population.oracle.lower_grad(population.x0, y, population.data.batch(everyone, "train"))
        gradient = population.average(rows, population.weights(everyone))
    return population.measure(population.x0, y)["val_accuracy"], float(torch.linalg.vector_norm(gradient))
