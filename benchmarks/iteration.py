"""One outer iteration of hyper-representation in FedNest's published setting.

It is compared with a loop over clients and with the matrix products in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from benchmarks.clock import Row, Setup, compare, rows_of
from benchmarks.complete import Complete, Graphed, as_vector
from benchmarks.floors import Floor, Network
from benchmarks.problems import CLASSES, Images, mnist
from benchmarks.published import Call, KeepingLoop, Loop, calls_of, flat
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines.rounds import expect, one_round
from fedbilevel.engines.server_graphs import ServerIterations
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort

TITLE = "One outer iteration in FedNest's published setting"
ABOUT = """Hyper-representation on shards of MNIST: 100 clients of 480 training and 120 validation images, a tenth of
them in a cohort, network 784-200-10, five local epochs of batch 64 on y (38 steps), one step on x, quantities outside
local steps on all of a client's samples. FedNest: T = 1, N = 5, iterations in which two of the factors are drawn, the
mean; FBO-AggITD: N = 5. FedBiO: five local steps, each with five minibatches of 64, without a loop. Against a loop
over clients with `torch.autograd` (`benchmarks/published.py`) that is given the same cohorts and minibatches: one
cohort for the whole iteration, about as in the published code, which draws one for each level, or a new one for every
factor of the series, which is the library's default (not on CUDA). A second loop keeps the features of samples while
x stands still. Both loops take seconds per outer iteration on CUDA and are left out there. `by hand, complete` is a
program for this one network with derivatives written out and no loop over clients (`benchmarks/complete.py`); on CUDA
it records an outer iteration as one graph.
`library` is what users get by default, on CUDA in a run of 50,000 outer iterations, which compiles its derivatives;
`short run` is the same without the compiler, and `compiled` the strategy of that name. `differs` is how far the
loop's x or that of the program by hand is from the library's at the end, relative to its norm, whichever is larger.
The floor is that of the whole iteration: features once per x and cohort, then the products and gathers of every
gradient and product that the algorithm asks for; pairs of gradients that cancel in a first local step count nothing.
Aims: the loop takes at least 6 times as long as the library on two cores, the library at most 3 times as long as the
floor (5 on CUDA). Goal: the library takes at most 1.3 times as long as the program by hand (1.5 on CUDA)."""

STEPS: dict[str, Any] = {"lr_lower": 0.33, "lr_upper": 0.5, "lr_system": 0.0035, "num_upper_steps": 1}
MEAN_FACTORS = 2
FEDBIO: dict[str, Any] = {"lr_lower": 0.1, "lr_upper": 0.1, "lr_system": 0.1, "num_local_steps": 5}
LENGTH = 50_000  # outer iterations of the run on CUDA
WARM_ON_CUDA = 10  # there outer iterations are replayed from the sixth on
LOOPS = ("autograd loop", "autograd loop, features kept")
WARM_LOOPS = 2  # a loop has nothing to learn, and takes seconds per iteration
BY_HAND = "by hand, complete"
BY_GRAPH = "by hand, one graph"  # the same program on CUDA
HEADINGS = {"times_ours": "x by hand"}
WARM = 20  # iterations before timing, so that tracing, compilation and capture are done, as in a long run


class Case:
    """One algorithm on one set of clients."""

    def __init__(self, setup: Setup, name: str, images: Images, redraw: str = "per_factor", **options: Any) -> None:
        self.setup, self.name, self.images, self.redraw = setup, name, images, redraw
        tau, self.batch = (3, 4) if setup.small else (38, 64)
        many = 2 if setup.small else 5
        makes: dict[str, Callable[[], Any]] = {
            "fednest": lambda: FedNest(num_lower_rounds=1, num_terms=5, num_local_steps=tau, **STEPS),
            "fbo_aggitd": lambda: FBOAggITD(num_lower_rounds=many, num_local_steps=tau, **STEPS),
            "fedbio": lambda: FedBiO(**FEDBIO),
        }
        self.algorithm: Any = makes[name]()
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

    def ours(
        self, iterations: list[int], strategy: str = "auto", length: int = 0
    ) -> tuple[Callable[[], None], list[Any]]:
        """A call that takes the next outer iteration, and where its states are found, the newest first.

        length: outer iterations that the run is said to have.
        """
        fed = self.simulation(strategy)
        expect(fed, length)
        fed.host.oracle.often = dict.fromkeys(
            fed.host.oracle.often, 2
        )  # traced early, so that the loop need not go through sixty iterations with it
        if fed.graphs is not None:
            fed.graphs.times = ServerIterations.times  # the same for whole outer iterations
        state, following = [self.algorithm.init(fed)], iter(iterations)

        def advance() -> None:
            fed.begin(next(following))
            state.insert(0, one_round(fed, self.algorithm, state[0]))

        return advance, state

    def loop(
        self, plans: dict[int, list[Call]], kind: Callable[..., Any] = Loop, **options: Any
    ) -> tuple[Callable[[], None], list[Any]]:
        """A call of a program of this kind, which is given the draws of the library, and its states."""
        loop = kind(self.images.built, self.algorithm, device=self.setup.device, **options)
        start = (loop.x, loop.y, torch.zeros_like(loop.y)) if self.name == "fedbio" else (loop.x, loop.y)
        state, following, step = [start], iter(plans.values()), getattr(loop, self.name)

        def advance() -> None:
            with torch.set_grad_enabled(kind not in (Complete, Graphed)):
                state.insert(0, step(next(following), *state[0]))

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

        if self.name == "fedbio":
            self._fedbio_steps(network, k)
            return floor
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

    def _fedbio_steps(self, network: Network, k: int) -> None:
        """Products of FedBiO with a network per client: five minibatches, of which two are differentiated twice."""
        floor, b, hidden, clients = network.floor, self.batch, network.hidden, self.images.built.clients
        images = floor.full(len(clients) * len(clients[0]["train"]["label"]), network.pixels)
        index = torch.randint(len(images), (k * 5 * b,), device=self.setup.device)
        inner, heads, vectors = (
            floor.full(k, rows, columns)
            for rows, columns in ((network.pixels, hidden), (hidden, network.classes), (hidden, network.classes))
        )
        for _ in range(self.algorithm.num_local_steps):
            some = floor.gather(images, index).view(k, 5 * b, network.pixels)
            features = floor.mm(some, inner)
            scores, along = floor.mm(features, heads), floor.mm(features[:, : 2 * b], vectors)
            floor.mm(scores[:, : 2 * b], heads.mT)  # back to the features of f_x and J u,
            back = floor.mm(along[:, :b], heads.mT)  # and along the change of the scores
            floor.mm(some[:, : 2 * b].mT, torch.cat([back, back], 1))
            floor.mm(features[:, : 3 * b].mT, scores[:, : 3 * b])

    def _local_steps(self, network: Network, features: torch.Tensor, k: int) -> None:
        floor, b, hidden = network.floor, self.batch, network.hidden
        index = torch.randint(len(features), (k * b,), device=self.setup.device)
        heads = floor.full(k, hidden, network.classes)
        for _ in range(self.algorithm.num_local_steps - 1):
            some = floor.gather(features, index).view(k, b, hidden)
            network.lower_gradient_each(some, heads)
            network.lower_gradient_each(some, network.head.expand(k, -1, -1))


def rows(setup: Setup) -> Iterator[Row]:
    images = mnist(setup, 100)
    for name, redraw in itertools.product(("fbo_aggitd", "fednest", "fedbio"), ("per_iteration", "per_factor")):
        if redraw == "per_iteration" or not (setup.cuda or name == "fedbio"):
            yield from _rows(setup, Case(setup, name, images, redraw))


def _rows(setup: Setup, case: Case) -> list[Row]:
    warm = 3 if setup.small else WARM_ON_CUDA if setup.cuda else WARM
    iterations = case.iterations(setup.rounds + warm)
    ours, states = case.ours(iterations, length=LENGTH if setup.cuda else 0)
    contestants: dict[str, Callable[[], Any]] = {"library": ours}
    if setup.cuda:
        contestants["library, short run"] = case.ours(iterations)[0]
    elif not setup.small:  # compiling takes seconds
        contestants["library, compiled"] = case.ours(iterations, "compiled")[0]
    plans = case.plans(iterations)
    programs: dict[str, list[Any]] = {}
    reference, kind = (BY_GRAPH, Graphed) if setup.cuda else (BY_HAND, Complete)
    contestants[reference], programs[reference] = case.loop(plans, kind)
    if case.name != "fedbio" and not setup.cuda:
        for what, loop in zip(LOOPS, (Loop, KeepingLoop), strict=True):
            contestants[what], programs[what] = case.loop(plans, loop)
    contestants["floor"] = case.floor()
    times = {what: WARM_LOOPS if what in LOOPS else warm for what in contestants}
    timings = compare(contestants, setup, repeats=1, warm=times)
    differs = 0.0
    for what, theirs in programs.items():
        x = as_vector(theirs[0][0]) if what == reference else flat(theirs[0][0])
        mine = states[-len(theirs)].x  # after as many outer iterations
        differs = max(differs, float(torch.linalg.vector_norm(x - mine) / torch.linalg.vector_norm(x)))
    name = f"{case.name}, cohort {case.redraw.replace('_', ' ')}"
    return rows_of(name, timings, ours=reference, differs=differs, images=case.images.source)
