"""The personalisation experiment: every method on every network, with early stopping.

Methods between peers (`local`, `sgp`, `hgp_pl`, `hgp_mtl`) run on every network. Methods with a
server run on the complete network only. All methods use the same data and take the same number of
lower steps. In addition, FedAvg+ tunes local models and pFedMe solves local problems; the record
has the cost of each method. The reported measurement has the best validation accuracy, as in
Terashita and Hara, 2023, section 5.3 and Table 2.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.clustered_fl import ClusteredFL
from fedbilevel.algorithms.fedavg_plus import FedAvgPlus
from fedbilevel.algorithms.fedem import FedEM
from fedbilevel.algorithms.fedprox import FedProx
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.pfedme import PFedMe
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.errors import CheckpointError, SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.callbacks import EarlyStopping
from fedbilevel.runs.endings import whole
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.runs.result import Progress
from fedbilevel.runs.resume import versions
from fedbilevel.runs.solve import solve
from fedbilevel.settings import Settings, setting
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.task import Built

# Table 2 of the paper (EMNIST, 62 classes, 100 clients): mean / bottom-decile test accuracy in per cent
PAPER = {
    "local": {
        "complete": (74.7, 63.0),
        "erdos_renyi": (74.7, 63.0),
        "random_undirected": (73.4, 64.0),
        "random_directed": (73.4, 64.0),
    },
    "sgp": {
        "complete": (82.9, 74.5),
        "erdos_renyi": (83.8, 76.8),
        "random_undirected": (80.0, 71.8),
        "random_directed": (80.1, 72.4),
    },
    "hgp_pl": {
        "complete": (88.1, 82.6),
        "erdos_renyi": (88.0, 82.2),
        "random_undirected": (85.5, 79.6),
        "random_directed": (85.6, 79.6),
    },
    "hgp_mtl": {
        "complete": (84.0, 76.1),
        "erdos_renyi": (84.0, 76.3),
        "random_undirected": (82.6, 74.3),
        "random_directed": (81.8, 72.9),
    },
    "fedavg_plus": {"complete": (83.2, 74.3)},
    "clustered_fl": {"complete": (83.0, 74.6)},
    "pfedme": {"complete": (85.1, 79.0)},
    "fedprox": {"complete": (82.9, 74.5)},
    "fedem": {"complete": (84.0, 75.4), "erdos_renyi": (83.9, 75.7)},
}
NETWORKS = {  # the paper's FC, FixU, RandU, RandD
    "complete": Network(kind="complete"),
    "erdos_renyi": Network(kind="erdos_renyi", shares="fastest"),
    "random_undirected": Network(kind="random_undirected"),
    "random_directed": Network(kind="random_directed"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalisationPlan(Settings):
    """Settings that all methods share.

    The defaults suit the embedded digits on two cores. experiments/README.md has the settings for
    MNIST on a GPU.
    """

    num_outer: int = setting(5, "outer iterations, each measured once", least=1)
    num_lower_steps: int = setting(60, "lower steps per outer iteration, each with one push", least=1)
    lr_lower: float = setting(0.1, "step of y", above=0)
    lr_local: float = setting(0.1, "step of y where every client trains alone", above=0)
    lr_lower_several: float = setting(
        0.3, "step of y where three networks share the gradient (hgp_mtl, fedem)", above=0
    )
    lr_upper: float = setting(0.02, "Adam's step of lambda in hgp_pl", above=0)
    lr_upper_several: float = setting(0.1, "Adam's step of lambda in hgp_mtl", above=0)
    lr_system: float = setting(0.1, "step of u", symbol="eta", above=0)
    num_terms: int = setting(10, "averages of u", symbol="M", least=1)
    num_pushes: int = setting(10, "steps of one average", symbol="S", least=1)
    num_local_steps: int = setting(5, "local steps between rounds of the methods with a server", least=1)
    prox_weight: float = setting(0.01, "of FedProx", symbol="mu", least=0)
    repetitions: int = setting(5, "each with other data and other draws; figures are means over them", least=1)
    patience: int = setting(5, "measurements without a better validation accuracy after which a run stops", least=1)


class Method(NamedTuple):
    task: Mapping[str, Any]  # settings of the task that make the problem
    algorithm: Callable[[PersonalisationPlan], Algorithm]


def _pushed(plan: PersonalisationPlan, lr: float) -> SGP:
    return SGP(lr_lower=lr, num_lower_steps=plan.num_lower_steps, lower_schedule="milestones")


def _hgp(plan: PersonalisationPlan, lr_lower: float, lr_upper: float) -> HGP:
    """Return HGP as in section 5.3, with Adam and one sample for both products.

    Curvature is not checked, because these networks are not convex.
    """
    return HGP(
        lr_lower=lr_lower,
        lr_upper=lr_upper,
        lr_system=plan.lr_system,
        num_terms=plan.num_terms,
        num_lower_steps=plan.num_lower_steps,
        lower_schedule="milestones",
        minibatches="shared",
        optimiser="adam",
        num_curvature_products=0,
    )


_ONE = {"personalise": "none"}
METHODS = {
    "local": Method({**_ONE, "lower": "local"}, lambda plan: _pushed(plan, plan.lr_local)),
    "sgp": Method(_ONE, lambda plan: _pushed(plan, plan.lr_lower)),
    "hgp_pl": Method({"personalise": "mask"}, lambda plan: _hgp(plan, plan.lr_lower, plan.lr_upper)),
    "hgp_mtl": Method(
        {"personalise": "ensemble"}, lambda plan: _hgp(plan, plan.lr_lower_several, plan.lr_upper_several)
    ),
    "fedavg_plus": Method(_ONE, lambda plan: FedAvgPlus(lr_lower=plan.lr_lower, num_local_steps=plan.num_local_steps)),
    "fedprox": Method(
        _ONE,
        lambda plan: FedProx(
            lr_lower=plan.lr_lower, num_local_steps=plan.num_local_steps, prox_weight=plan.prox_weight
        ),
    ),
    "pfedme": Method(
        _ONE, lambda plan: PFedMe(lr_lower=plan.lr_lower, lr_model=1.0, num_local_steps=plan.num_local_steps)
    ),
    "clustered_fl": Method(
        _ONE,
        lambda plan: ClusteredFL(
            lr_lower=plan.lr_lower, num_local_steps=plan.num_local_steps, tolerance_unit="first", tolerance_max=0.5
        ),
    ),
    "fedem": Method(
        {"personalise": "mixture"},
        lambda plan: FedEM(lr_lower=plan.lr_lower_several, num_local_steps=plan.num_local_steps),
    ),
}


class MethodOutcome(NamedTuple):
    """The result of one method on one network.

    The result is the measurement with the best validation accuracy, and the cost of the whole run.
    """

    network: str
    method: str
    repetition: int
    iteration: int
    test_accuracy: float
    bottom_decile: float
    validation_accuracy: float
    rounds: int
    megabytes: float
    seconds: float
    accuracies: tuple[float, ...] = ()  # test accuracy of every client; empty in older records
    curve: tuple[tuple[int, float], ...] = ()  # outer step and validation accuracy of every measurement


class _Best:
    """A callback that keeps the clients' test accuracies at the best measurement.

    A measurement calls `across` with the values of all clients before callbacks receive its row.
    """

    def __init__(self, problem: Problem, stop: EarlyStopping) -> None:
        assert problem.across is not None  # the study's own data have a test part
        self.across, self.stop, self.now, self.accuracies = problem.across, stop, (), ()
        self.problem = dataclasses.replace(problem, across=self.look)

    def look(self, found: Mapping[str, Tensor]) -> dict[str, float]:
        self.now = tuple((found["test_right"] / found["test_samples"]).tolist())
        return self.across(found)

    def __call__(self, now: Progress) -> bool:
        stops = self.stop(now)
        if now.row is not None and self.stop.best is now.row:
            self.accuracies = self.now
        return stops


def personalise(
    task: Personalisation,
    plan: PersonalisationPlan,
    *,
    methods: Sequence[str] = ("local", "sgp", "hgp_pl"),
    networks: Sequence[str] = tuple(NETWORKS),
    record: Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[MethodOutcome]:
    """Run all `methods` on all `networks`.

    record: a folder for the record, which is written after every run; a record with the same
        settings is resumed, and its runs are not repeated.
    options: keywords of `solve`, e.g. batch_size and device.
    """
    for kind, names, known in (("method", methods, METHODS), ("network", networks, NETWORKS)):
        for name in names:
            if name not in known:
                raise UnknownNameError(f"personalisation {kind}", name, known)
    about = {
        "task": {name: value for name, value in task.asdict().items() if name not in ("personalise", "lower")},
        "plan": plan.asdict(),
        "seed": seed,
        "batch_size": options.get("batch_size"),
    }
    able = [
        name for name in methods if "complete" in networks or isinstance(METHODS[name].algorithm(plan), PeerAlgorithm)
    ]
    if not able or not networks:
        raise SettingError(
            "none of these methods runs on these networks: name at least one of both; "
            "methods with a server need the network complete."
        )
    done = _opened(record, about)
    for repetition, name in itertools.product(range(plan.repetitions), methods):
        method = METHODS[name]
        algorithm = method.algorithm(plan)
        built = dataclasses.replace(task.repeated(repetition), **method.task).build()
        for network in networks:
            mine = [one for one in done if (one.method, one.repetition) == (name, repetition)]
            if any(one.network == network for one in mine) or (
                not isinstance(algorithm, PeerAlgorithm) and network != "complete"
            ):
                continue
            if progress is not None:
                progress(f"{name} on {network}, repetition {repetition + 1} of {plan.repetitions}")
            if name == "local" and mine:  # a client that trains alone uses no network
                done.append(mine[0]._replace(network=network, seconds=0.0))
            else:
                done.append(_run((network, name, repetition), algorithm, built, plan, seed + repetition, options))
            if record is not None:
                content = {**about, "outcomes": [one._asdict() for one in done], "versions": versions()}
                write_whole(record / "personalisation.json", json.dumps(content, indent=1).encode())
    return done


def _run(
    label: tuple[str, str, int],
    algorithm: Algorithm,
    built: Built,
    plan: PersonalisationPlan,
    seed: int,
    options: Mapping[str, Any],
) -> MethodOutcome:
    stop = EarlyStopping("stop_accuracy", patience=plan.patience)
    # a round of local steps replaces as many lower steps
    every, where = max(1, plan.num_lower_steps // plan.num_local_steps), dict(options)
    if isinstance(algorithm, PeerAlgorithm):
        every = 1
        where |= {"network": NETWORKS[label[0]], "averaging": Averaging(num_steps=plan.num_pushes, weights="kept")}
    kept = _Best(built.problem, stop)
    result = solve(
        kept.problem,
        built.clients,
        algorithm,
        residuals=False,
        num_iterations=every * plan.num_outer,
        measure_every=every,
        seed=seed,
        callbacks=[kept],
        recover=False,  # reported figures are those of the given steps
        **where,
    )
    best, result = stop.best, whole(result)
    return MethodOutcome(
        *label, best["iteration"], best["test_accuracy"], best["test_accuracy_bottom_decile"], best["stop_accuracy"],
        result.ledger["rounds"], result.rows[-1]["megabytes"], result.rows[-1]["seconds"], kept.accuracies,
        tuple((row["iteration"] // every, row["stop_accuracy"]) for row in result.rows),
    )  # fmt: skip


def _opened(record: Path | None, about: Mapping[str, Any]) -> list[MethodOutcome]:
    if record is None:
        return []
    path = record / "personalisation.json"
    if not path.exists():
        make_folder(record)
        return []
    try:
        before = json.loads(path.read_text())
        outcomes = [
            MethodOutcome(
                **{
                    **one,
                    "accuracies": tuple(one.get("accuracies", ())),
                    "curve": tuple((step, accuracy) for step, accuracy in one.get("curve", ())),
                }
            )
            for one in before["outcomes"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): name another folder.") from error
    for name, value in about.items():
        if before.get(name) != json.loads(json.dumps(value)):
            raise SettingError(
                f"{record} holds an experiment with other settings of {name}: "
                "name another folder, or use the same settings."
            )
    return outcomes
