"""Seconds, rounds and megabytes per outer iteration of every algorithm, on two tasks with digits."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.clock import Row, Setup, compare
from fedbilevel import discovery
from fedbilevel.engines import simulate
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.task import Built, Task

TITLE = "Every algorithm"
ABOUT = """One outer iteration on embedded digits with batches of 32, with the settings that the task suggests: on
hyper-representation 10 clients, on data cleaning 10. Algorithms between peers run on random networks that change at
every step. An algorithm that needs another scope gets it where the task has it (a local head), and is left out
where not. The ratio is to FedAvg on the same task; rounds and megabytes come from the ledger."""

BASE = "fedavg"
SMALL = ("fbo_aggitd", "fedavg", "fedbio_local", "fedem", "hgp", "sparkle")  # one of every kind
HEADINGS = {"floor_seconds": "FedAvg, s", "ratio": "x FedAvg"}


def rows(setup: Setup) -> list[Row]:
    n = 3 if setup.small else 10
    tasks: list[tuple[Task, list[Task]]] = [
        (HyperRepresentation(num_clients=n), [HyperRepresentation(num_clients=n, lower="local")]),
        (DataCleaning(num_clients=n), []),
    ]
    found = []
    for task, others in tasks:
        forms = [one.build() for one in (task, *others)]
        names = SMALL if setup.small else discovery.algorithms()
        running = {name: one for name in names if (one := _running(setup, name, task, forms)) is not None}
        timings = compare({name: one.advance for name, one in running.items()}, setup, repeats=1, warm=4)
        base = timings[BASE].median
        for name, one in running.items():
            timing, (num_rounds, megabytes) = timings[name], one.bill()
            found.append(
                {
                    "name": name,
                    "what": task.name() + one.scope,
                    "seconds": timing.median,
                    "spread": timing.spread,
                    "floor_seconds": base,
                    "ratio": timing.median / base,
                    "rounds": num_rounds,
                    "megabytes": megabytes,
                }
            )
    return found


class _Running:
    """One algorithm on one form of a task; `advance` takes the next outer iteration."""

    def __init__(self, setup: Setup, algorithm: Algorithm, built: Built, scope: str) -> None:
        self.algorithm, self.scope, self.iteration = algorithm, scope, 0
        options: dict[str, Any] = {"batch_size": 32, "device": setup.device}
        if isinstance(algorithm, PeerAlgorithm):
            options["network"] = Network(
                kind="random_undirected" if "gossip" in algorithm.verbs() else "random_directed"
            )
        self.fed = simulate(algorithm, *built, **options)
        self.fed.begin(0)
        self.state = algorithm.init(self.fed)
        self.before = (
            self.fed.ledger.rounds,
            self.fed.ledger.megabytes,
        )  # the cost of the start is not part of an iteration

    def advance(self) -> None:
        self.iteration += 1
        self.fed.begin(self.iteration)
        self.state = self.algorithm.round(self.fed, self.state)

    def bill(self) -> tuple[float, float]:
        """Rounds and megabytes per outer iteration."""
        ledger = self.fed.ledger
        return (ledger.rounds - self.before[0]) / self.iteration, (ledger.megabytes - self.before[1]) / self.iteration


def _running(setup: Setup, name: str, task: Task, forms: list[Built]) -> _Running | None:
    """Start the algorithm on the first form of the task whose scopes it can solve, or return None."""
    algorithm = suggested(name, task)
    for number, built in enumerate(forms):
        try:
            algorithm.check_scopes(built.problem.scopes)
        except ScopeError:
            continue
        return _Running(setup, algorithm, built, ", a head per client" if number else "")
    return None


def suggested(name: str, task: Task) -> Algorithm:
    """The algorithm with the settings that the task suggests."""
    kind = discovery.algorithm(name)
    known = {spec.name for spec in dataclasses.fields(kind)}
    given = {**task.suggestions(name), "num_curvature_products": 0}  # curvature is measured once in a run
    algorithm: Algorithm = kind(**{key: value for key, value in given.items() if key in known})
    return algorithm
