"""One outer iteration of hyper-representation in FedNest's published setting.

It is compared with a loop over clients and with the matrix products in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from benchmarks.clock import Row, Setup, compare, rows_of
from benchmarks.complete import Complete, as_vector
from benchmarks.floors import Floor, Network
from benchmarks.problems import CLASSES, Images, mnist
from benchmarks.published import Call, KeepingLoop, Loop, calls_of, flat
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort

TITLE = "One outer iteration in FedNest's published setting"
ABOUT = """Hyper-representation on shards of MNIST: 100 clients of 480 training and 120 validation images, a tenth of
them in a cohort, network 784-200-10, five local epochs of batch 64 on y (38 steps), one step on x, quantities outside
local steps on all of a client's samples. FedNest: T = 1, N = 5, iterations in which two of the factors are drawn, the
mean; FBO-AggITD: N = 5. Against a loop over clients with `torch.autograd` (`benchmarks/published.py`) that is given
the same cohorts and minibatches: one cohort for the whole iteration, about as in the published code, which draws one
for each level, or a new one for every factor of the series, which is the library's default (not on CUDA). A second
loop keeps the features of samples while x stands still. `by hand, complete` is a program for this one network with
derivatives written out and no loop over clients (`benchmarks/complete.py`). `library` is what users get by default,
and `compiled` the strategy of that name. `differs` is how far the loop's x or that of the program by hand is from the
library's at the end, relative to its norm, whichever is larger. The floor is that of the whole iteration: features
once per x and cohort, then the products and gathers of every gradient and product that the algorithm asks for; pairs
of gradients that cancel in a first local step count nothing. Aims: the loop takes at least 6 times as long as the
library on two cores, the library at most 3 times as long as the floor (5 on CUDA). Goal: the library takes at most
1.3 times as long as the program by hand (1.5 on CUDA)."""

STEPS: dict[str, Any] = {"lr_lower": 0.33, "lr_upper": 0.5, "lr_system": 0.0035, "num_upper_steps": 1}
MEAN_FACTORS = 2
WARM_ON_CUDA = (
    6  # there phases are captured, and compiled, at their third occurrence; the loop takes seconds per iteration
)
BY_HAND = "by hand, complete"
HEADINGS = {"times_ours": "x by hand"}
WARM = 20  # iterations before timing, so that tracing, compilation and capture are done, as in a long run


class Case:
    """One algorithm on one set of clients."""

    def __init__(self, setup: Setup, name: str, images: Images, redraw: str = "per_factor", **options: Any) -> None:
        self.setup, self.name, self.images, self.redraw = setup, name, images, redraw
        tau, self.batch = (3, 4) if setup.small else (38, 64)
        self.algorithm: Any = (
            FedNest(num_lower_rounds=1, num_terms=5, num_local_steps=tau, **STEPS)
            if name == "fednest"
            else FBOAggITD(num_lower_rounds=2 if setup.small else 5, num_local_steps=tau, **STEPS)
        )
        sizes = {"train": self.batch, "val": self.batch, "outside": None}
        self.cohort = Cohort(0.5 if setup.small else 0.1, redraw=redraw)
        self.options = {
            "batch_size": sizes,
            "cohort": self.cohort,
            "sampling": "epochs",
            "device": setup.device,
            **options,
        }

    def simulation(self, strategy: str = "auto") -> Simulation:
        return Simulation(self.algorithm, *self.images.built, **{**self.options, "strategy": strategy})

    def iterations(self, num: int) -> list[int]:
        """Outer iterations that cost the same: FedNest draws how many factors there are."""
        if self.name != "fednest":
            return list(range(1, num + 1))
        fed, found = self.simulation(), []
        for iteration in count(1):
            fed.begin(iteration)
            if fed.draw("N'", self.algorithm.num_terms) == MEAN_FACTORS:
                found.append(iteration)
            if len(found) == num:
                break
        return found

    def plans(self, iterations: list[int]) -> dict[int, list[Call]]:
        return calls_of(self.simulation(), self.algorithm, iterations, self.batch)

    def ours(self, iterations: list[int], strategy: str = "auto") -> tuple[Callable[[], None], list[Any]]:
        """A call that takes the next outer iteration, and where its state is found."""
        fed = self.simulation(strategy)
        fed.host.oracle.often = dict.fromkeys(
            fed.host.oracle.often, 2
        )  # traced early, so that the loop need not go through sixty iterations with it
        state, following = [self.algorithm.init(fed)], iter(iterations)

        def advance() -> None:
            fed.begin(next(following))
            state[0] = self.algorithm.round(fed, state[0])

        return advance, state

    def loop(
        self, plans: dict[int, list[Call]], kind: Callable[..., Any] = Loop, **options: Any
    ) -> tuple[Callable[[], None], list[Any]]:
        """A call of a program of this kind, which is given the draws of the library, and its state."""
        loop = kind(self.images.built, self.algorithm, device=self.setup.device, **options)
        state, following = [(loop.x, loop.y)], iter(plans.values())
        step = loop.fednest if self.name == "fednest" else loop.fbo_aggitd

        def advance() -> None:
            with torch.set_grad_enabled(kind is not Complete):
                state[0] = step(next(following), *state[0])

        return advance, state

    def floor(self) -> Floor:
        """The products of an iteration, in its order; images of a cohort lie side by side."""
        floor = Floor(self.setup)
        pixels, hidden = self.images.shape
        network = Network(floor, pixels, hidden, CLASSES)
        clients = self.images.built.clients
        k = self.cohort.size(len(clients))
        train, val = (floor.full(k * len(clients[0][role]["label"]), pixels) for role in ("train", "val"))
        algorithm: Any = self.algorithm
        known: dict[int, torch.Tensor] = {}

        def features_of(images: torch.Tensor) -> torch.Tensor:
            """Draw a new cohort, or keep the current one."""
            if self.redraw == "per_factor" or id(images) not in known:
                known[id(images)] = network.features(images)
            return known[id(images)]

        if self.name == "fednest":
            features = features_of(train)
            network.lower_gradient(features)
            self._local_steps(network, features, k)
            network.lower_gradient(features_of(val))
            for _ in range(MEAN_FACTORS):
                network.hessian_product(features_of(train))
        else:
            for t in range(algorithm.num_lower_rounds + 1):
                features, last = features_of(train), t == algorithm.num_lower_rounds
                if not last:
                    network.lower_gradient(features)
                if t > 0:
                    network.hessian_product(features, scored=not last)  # the same samples as the gradient's
                network.lower_gradient(features_of(val))
                if not last:
                    self._local_steps(network, features, k)
        network.upper_gradient(features_of(val), val)
        network.jacobian_product(features_of(train), train)
        return floor

    def _local_steps(self, network: Network, features: torch.Tensor, k: int) -> None:
        floor, b, hidden = network.floor, self.batch, network.hidden
        index = torch.randint(len(features), (k * b,), device=self.setup.device)
        heads = floor.full(k, hidden, network.classes)
        for _ in range(self.algorithm.num_local_steps - 1):
            some = floor.gather(features, index).view(k, b, hidden)
            network.lower_gradient_each(some, heads)
            network.lower_gradient_each(some, network.head.expand(k, -1, -1))


def rows(setup: Setup) -> list[Row]:
    images = mnist(setup, 100)
    found: list[Row] = []
    warm = 3 if setup.small else WARM_ON_CUDA if setup.cuda else WARM
    redraws = ("per_iteration",) if setup.cuda else ("per_iteration", "per_factor")
    for name, redraw in itertools.product(("fednest", "fbo_aggitd"), redraws):
        case = Case(setup, name, images, redraw)
        iterations = case.iterations(setup.rounds + warm)
        ours, state = case.ours(iterations)
        compiled = (
            {} if setup.small else {"library, compiled": case.ours(iterations, "compiled")[0]}
        )  # compiling takes seconds
        plans = case.plans(iterations)
        (loop, other), (keeping, _), (by_hand, last) = (
            case.loop(plans, kind) for kind in (Loop, KeepingLoop, Complete)
        )
        contestants: dict[str, Callable[[], Any]] = {
            "library": ours,
            **compiled,
            BY_HAND: by_hand,
            "autograd loop, features kept": keeping,
            "autograd loop": loop,
            "floor": case.floor(),
        }
        timings = compare(contestants, setup, repeats=1, warm=warm)
        x, x_loop, x_hand = state[0].x, flat(other[0][0]), as_vector(last[0][0])
        differs = max(
            float(torch.linalg.vector_norm(x - one) / torch.linalg.vector_norm(one)) for one in (x_loop, x_hand)
        )
        found += rows_of(
            f"{name}, cohort {redraw.replace('_', ' ')}",
            timings,
            ours=BY_HAND,
            differs=differs,
            images=images.source,
        )
    return found
