"""HGP-PL between peers at the paper's size, against the paper's wall time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Row, Setup, Timing, compare, seconds_of
from benchmarks.floors import Floor
from benchmarks.paths import products_of_cnn
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import UnknownNameError
from fedbilevel.federation.algorithm import debiased
from fedbilevel.federation.averaging import Averaging
from fedbilevel.studies.personalisation import METHODS, NETWORKS, PersonalisationPlan
from fedbilevel.tasks.personalisation import Personalisation

TITLE = "HGP-PL at the paper's size"
ABOUT = """Personalisation of Terashita and Hara, section 5.3: 100 clients, the convolutional network of Table 5,
batch 128, five outer steps of 600 steps of gradient push, M = 10 averages of S = 10 steps of Push-Sum. The paper
uses a tenth of EMNIST by class (81,000 images of 62 classes), which is not available here: all of MNIST takes its
place (70,000 images, 10 classes). The floor of a step of gradient push is the products of the gradient and of the
exchange in float32; that of an average those of S exchanges. The total holds a measurement per outer step, and its
ratio is to the paper's time. The paper's times (Table 8, one V100): complete 1 h 59 min, erdos_renyi 2 h 33 min,
random_undirected 12 h 56 min, random_directed 14 h 22 min."""

PAPER = {"complete": 7140.0, "erdos_renyi": 9180.0, "random_undirected": 46560.0, "random_directed": 51720.0}
_SAFE: dict[str, Any] = {"lr_lower": 0.03, "lr_system": 0.01}  # of a network on images of 28 x 28


def skipped(setup: Setup) -> str | None:
    return (
        None
        if setup.cuda or setup.small
        else "Skipped: this size needs a GPU (`--device cuda`), or `--small` to see that it runs."
    )


def rows(setup: Setup) -> list[Row]:
    for name in setup.networks:
        if name not in NETWORKS:
            raise UnknownNameError("personalisation network", name, NETWORKS)
    plan = PersonalisationPlan(num_lower_steps=600, **_SAFE)
    task: Any = Personalisation(data="mnist", model="cnn", **METHODS["hgp_pl"].task)
    batch = 128
    if setup.small:
        plan, batch = PersonalisationPlan(num_outer=2, num_lower_steps=4, num_terms=2, num_pushes=2, **_SAFE), 4
        task = Personalisation(num_clients=4, share=0.1, model="cnn", width=0.25, **METHODS["hgp_pl"].task)
    built = task.build()
    found: list[Row] = []
    for name in setup.networks:
        found += _on(setup, name, plan, built, batch)
    return found


def _on(setup: Setup, name: str, plan: PersonalisationPlan, built: Any, batch: int) -> list[Row]:
    short = setup.steps is not None and setup.steps < plan.num_lower_steps
    timed = setup.steps if short and setup.steps else plan.num_lower_steps
    whole: Any = METHODS["hgp_pl"].algorithm(plan)
    algorithm = dataclasses.replace(whole, num_lower_steps=timed)
    averaging = Averaging(num_steps=plan.num_pushes, weights="kept")
    fed = PeerSimulation(
        algorithm, *built, network=NETWORKS[name], averaging=averaging, batch_size=batch, device=setup.device
    )
    running = _Running(setup, fed, algorithm)
    dataclasses.replace(whole, num_lower_steps=2).lower_steps(fed, *running.point)  # to warm up
    for iteration in range(1, 1 + (1 if short else plan.num_outer)):
        running.advance(iteration, plan.lr_upper)
    lower, hyper, rest = (Timing.of(values) for values in running.seconds.values())
    step = lower.median / timed
    total = (
        plan.num_outer * (step * plan.num_lower_steps + hyper.median + rest.median)
        if short
        else sum(map(sum, running.seconds.values()))
    )
    z = running.point[1]
    n, dim = z.shape
    mean = compare({"average": lambda: fed.mix(u=z), "exchange": _exchange(setup, n, dim)}, setup, rounds=5)
    side = 8 if setup.small else 28
    gradient = compare(
        {"products": products_of_cnn(setup, n, batch, side, (4, 8, 16) if setup.small else (32, 64, 2048))},
        setup,
        rounds=5,
    )["products"].median
    exchange = mean["exchange"].median
    paper = {} if setup.small else {"paper_seconds": PAPER[name], "ratio": total / PAPER[name]}
    label = f"total of {plan.num_outer} outer steps"

    def row(what: str, timing: Timing, floor: float | None = None) -> Row:
        against = {} if floor is None else {"floor_seconds": floor, "ratio": timing.median / floor}
        return {"name": name, "what": what, "seconds": timing.median, "spread": timing.spread, **against}

    return [
        row("step of gradient push", Timing(step, lower.spread), gradient + exchange),
        row(f"average, S = {plan.num_pushes}", mean["average"], plan.num_pushes * exchange),
        row(f"hypergradient, M = {plan.num_terms}", hyper),
        row("measurement", rest),
        {**row(label + (f", extrapolated from {timed} lower steps" if short else ""), Timing(total, 0.0)), **paper},
    ]  # fmt: skip


class _Running:
    """An outer step in parts, each with its time; what a step of x costs is nothing beside them."""

    def __init__(self, setup: Setup, fed: PeerSimulation, algorithm: Any) -> None:
        self.setup, self.fed, self.algorithm = setup, fed, algorithm
        self.seconds: dict[str, list[float]] = {"lower": [], "hypergradient": [], "measurement": []}
        fed.begin(0)
        state = algorithm.init(fed)
        self.point: tuple[Tensor, Tensor, Tensor] = (state.x, state.z, state.w)

    def advance(self, iteration: int, lr: float) -> None:
        fed, algorithm, (x, z, w) = self.fed, self.algorithm, self.point
        fed.begin(iteration)
        z, w = self._timed("lower", lambda: algorithm.lower_steps(fed, *self.point))
        y = debiased(z, w)
        h, _ = self._timed("hypergradient", lambda: algorithm.blocks(fed, x, y))
        self._timed("measurement", lambda: fed.measure(x, y))
        self.point = (x - lr * h.sign(), z, w)  # as far as Adam's first step; lambda stays at its client

    def _timed(self, part: str, call: Callable[[], Any]) -> Any:
        result: list[Any] = []
        self.seconds[part].append(seconds_of(lambda: result.append(call()), self.setup))
        return result[0]


def _exchange(setup: Setup, n: int, dim: int) -> Floor:
    floor = Floor(setup, torch.float32)
    floor.mm(floor.full(n, n), floor.full(n, dim))
    return floor
