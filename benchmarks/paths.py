"""Each hot path by itself, against plain ways of writing it and against its products."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy, linear

from benchmarks.clock import Row, Setup, compare, rows_of
from benchmarks.floors import Floor, Network, limits
from benchmarks.problems import CLASSES, L2, Images, mnist
from benchmarks.published import Loop
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import DataError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, linear_phase
from fedbilevel.federation.clients import Clients
from fedbilevel.oracle.population import Population
from fedbilevel.settings import setting
from fedbilevel.tasks.personalisation import Personalisation

TITLE = "Hot paths"
ABOUT = """10 clients, 64 samples each, network 784-200-10, x the hidden layer and y the head. `library`: as users
get it; `plain vmap`: `torch.func` on the same losses without features or flat rows; `autograd loop`: one client
after the other. Gradients of the lower level include fetching the batch by index. With features cached, x stands
still and only the batch changes. The floor of a draw is `torch.randint` of as many numbers, that of an average the
sum of the rows in their own type. CNN: the lower gradient of the personalisation task's network (width 1, 28 x 28)
with weights of its own for every client, by strategy."""

MANY = 24  # different points and batches, so that no cache of an earlier call helps


@dataclass(frozen=True, kw_only=True)
class Probe(ServerAlgorithm):
    """Phases with one request each."""

    num_local_steps: int = setting(38, "steps whose minibatches are drawn", least=1)

    upper_space = ("x", "h")

    class State(NamedTuple):
        x: Any
        y: Any

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    @linear_phase
    def upper_mean(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"h": clients.upper_grad_x(x, y, clients.batch("train", "h"))}


class Plain:
    """The same losses on dicts, mapped over clients only by `torch.func`."""

    def __init__(self, x: dict[str, Tensor], y: dict[str, Tensor], k: int) -> None:
        self.x, self.y, self.ys = x, y, {name: leaf.expand(k, *leaf.shape).contiguous() for name, leaf in y.items()}

    @staticmethod
    def upper(x: Any, y: Any, image: Tensor, label: Tensor) -> Tensor:
        inner = linear(image, x["hidden.weight"], x["hidden.bias"]).relu()
        return cross_entropy(linear(inner, y["head.weight"], y["head.bias"]), label)

    @classmethod
    def lower(cls, x: Any, y: Any, image: Tensor, label: Tensor) -> Tensor:
        return cls.upper(x, y, image, label) + 0.5 * L2 * sum((leaf**2).sum() for leaf in y.values())

    def lower_gradient(self, image: Tensor, label: Tensor) -> Any:
        return vmap(grad(self.lower, argnums=1), in_dims=(None, 0, 0, 0))(self.x, self.ys, image, label)

    def upper_gradient(self, image: Tensor, label: Tensor) -> Any:
        return vmap(grad(self.upper), in_dims=(None, None, 0, 0))(self.x, self.y, image, label)

    def upper_mean(self, image: Tensor, label: Tensor) -> Any:
        return {name: leaf.mean(0) for name, leaf in self.upper_gradient(image, label).items()}

    def hessian_product(self, image: Tensor, label: Tensor) -> Any:
        return vmap(grad(self._along, argnums=1), in_dims=(None, None, 0, 0))(self.x, self.y, image, label)

    def jacobian_product(self, image: Tensor, label: Tensor) -> Any:
        return vmap(grad(self._along), in_dims=(None, None, 0, 0))(self.x, self.y, image, label)

    def _along(self, x: Any, y: Any, image: Tensor, label: Tensor) -> Any:
        """The lower gradient along v; the head serves as v."""
        gradient = grad(self.lower, argnums=1)(x, y, image, label)
        return sum((gradient[name] * leaf).sum() for name, leaf in self.y.items())


class Bench:
    def __init__(self, setup: Setup, images: Images) -> None:
        self.setup, self.images = setup, images
        self.b, self.tau = (4, 3) if setup.small else (64, 38)
        self.probe = Probe(num_local_steps=self.tau)
        self.fed = Simulation(self.probe, *images.built, batch_size=self.b, device=setup.device)
        self.population = Population(*images.built, device=setup.device)
        for oracle in (self.fed.host.oracle, self.population.oracle):
            oracle.often = dict.fromkeys(oracle.often, 2)  # traced early, as in a long run
        self.k = len(images.built.clients)
        self.positions = torch.arange(self.k)
        self.x, self.y = self.population.x0, self.population.y0
        self.ys = self.y.expand(self.k, -1).contiguous()
        draw = torch.Generator().manual_seed(0)
        least = int(self.population.data.sizes["train"].min())
        self.indices = [torch.randint(least, (self.k, self.b), generator=draw).to(setup.device) for _ in range(MANY)]
        self.points = itertools.cycle([self.x.clone() for _ in range(MANY)])
        self.plain = Plain(self.population.layout_x.unravel(self.x), self.population.layout_y.unravel(self.y), self.k)
        self.loop = Loop(images.built, self.probe, device=setup.device)
        self.stacked = tuple(torch.stack([client["train"][n][:least] for client in self.loop.data]) for n in (0, 1))

    def next_batch(self) -> Callable[[], Any]:
        following = itertools.cycle(self.indices)
        return lambda: self.population.data.batch(self.positions, "train", next(following))

    def plainly(self, call: Callable[[Tensor, Tensor], Any]) -> Callable[[], Any]:
        rows, following = torch.arange(self.k, device=self.setup.device)[:, None], itertools.cycle(self.indices)

        def fetch_and_call() -> Any:
            index = next(following)
            return call(*(part[rows, index] for part in self.stacked))

        return fetch_and_call

    def looped(self, call: Callable[[Any], Any]) -> Callable[[], Any]:
        following = itertools.cycle(self.indices)

        def each() -> Any:
            index = next(following)
            return [call(self.loop.batch(i, "train", own)) for i, own in enumerate(index)]

        return each

    def floor(self) -> tuple[Floor, Network, Tensor, Tensor]:
        """A floor with its network, all images, and the indices of a batch."""
        floor = Floor(self.setup)
        pixels, hidden = self.images.shape
        images = floor.full(self.stacked[0].shape[0] * self.stacked[0].shape[1], pixels)
        return (
            floor,
            Network(floor, pixels, hidden, CLASSES),
            images,
            torch.randint(len(images), (self.k * self.b,), device=self.setup.device),
        )

    # ---- cases -------------------------------------------------------------------------------------------------------

    def lower_gradient(self) -> dict[str, Callable[[], Any]]:
        floor, network, images, index = self.floor()
        some = floor.gather(images, index)
        network.lower_gradient_each(
            network.features(some).view(self.k, self.b, -1), floor.full(self.k, network.hidden, CLASSES)
        )
        batch, x, y = self.next_batch(), self.loop.x, self.loop.y
        return {
            "library": lambda: self.population.oracle.lower_grad(next(self.points), self.ys, batch()),
            "plain vmap": self.plainly(self.plain.lower_gradient),
            "autograd loop": self.looped(lambda one: self.loop.lower_gradient(x, y, one)),
            "floor": floor,
        }

    def lower_gradient_cached(self) -> dict[str, Callable[[], Any]]:
        floor, network, images, index = self.floor()
        features = floor.full(len(images), network.hidden)
        network.lower_gradient_each(
            floor.gather(features, index).view(self.k, self.b, -1), floor.full(self.k, network.hidden, CLASSES)
        )
        batch, here = self.next_batch(), self.x.clone()
        gradient = lambda: self.population.oracle.lower_grad(here, self.ys, batch())
        for _ in range(-(-self.stacked[0].shape[1] // self.b) + 1):  # until the cache holds every sample
            gradient()
        return {**self.lower_gradient(), "library": gradient, "floor": floor}

    def upper_gradient(self) -> dict[str, Callable[[], Any]]:
        floor, network, images, index = self.floor()
        some = floor.gather(images, index)
        network.upper_gradient(network.features(some).view(self.k, self.b, -1), some.view(self.k, self.b, -1))
        batch, x, y = self.next_batch(), self.loop.x, self.loop.y
        return {
            "library": lambda: self.population.oracle.upper_grad_x(next(self.points), self.y, batch()),
            "plain vmap": self.plainly(self.plain.upper_gradient),
            "autograd loop": self.looped(lambda one: self.loop.upper_gradient_x(x, y, one)),
            "floor": floor,
        }

    def upper_mean(self) -> dict[str, Callable[[], Any]]:
        floor, network, images, index = self.floor()
        some = floor.gather(images, index)
        network.upper_gradient(network.features(some), some)
        x, y = self.loop.x, self.loop.y
        each = self.looped(lambda one: self.loop.upper_gradient_x(x, y, one))
        return {
            "library": lambda: self.fed.mean(self.probe.upper_mean, x=next(self.points), y=self.y).h,
            "plain vmap": self.plainly(self.plain.upper_mean),
            "autograd loop": lambda: [torch.stack(leaves).mean(0) for leaves in zip(*each(), strict=True)],
            "floor": floor,
        }

    def hessian_product(self) -> dict[str, Callable[[], Any]]:
        floor, network, images, index = self.floor()
        features = network.features(floor.gather(images, index)).view(self.k, self.b, -1)
        floor.mm(features, network.head.expand(self.k, -1, -1))
        floor.mm(features.mT, floor.mm(features, network.vector.expand(self.k, -1, -1)))
        batch, x, y = self.next_batch(), self.loop.x, self.loop.y
        return {
            "library": lambda: self.population.oracle.hessian_product(next(self.points), self.y, self.y, batch()),
            "plain vmap": self.plainly(self.plain.hessian_product),
            "autograd loop": self.looped(lambda one: self.loop.product(x, y, y, one, by_x=False)),
            "floor": floor,
        }

    def jacobian_product(self) -> dict[str, Callable[[], Any]]:
        floor, network, images, index = self.floor()
        some = floor.gather(images, index)
        network.jacobian_product(network.features(some).view(self.k, self.b, -1), some.view(self.k, self.b, -1))
        batch, x, y = self.next_batch(), self.loop.x, self.loop.y
        return {
            "library": lambda: self.population.oracle.jacobian_product(next(self.points), self.y, self.y, batch()),
            "plain vmap": self.plainly(self.plain.jacobian_product),
            "autograd loop": self.looped(lambda one: self.loop.product(x, y, y, one, by_x=True)),
            "floor": floor,
        }

    def draw(self, sampling: Any) -> dict[str, Callable[[], Any]]:
        fed = Simulation(self.probe, *self.images.built, batch_size=self.b, device=self.setup.device, sampling=sampling)
        out = torch.empty(self.k, self.tau, self.b, dtype=torch.int64, device=self.setup.device)
        calls, floor = itertools.count(1), Floor(self.setup)
        floor.also(lambda: torch.randint(1000, out.shape, out=out))

        def one() -> Any:  # a new call each time, as in a run
            clients = Clients(fed.host, self.positions, 1 + next(calls), 1)
            return clients.sample_indices("train", "zeta", range(self.tau), self.b)

        return {"library": one, "floor": floor}

    def average(self) -> dict[str, Callable[[], Any]]:
        given = self.x.expand(self.k, -1).contiguous()
        weights, out, floor = self.population.weights(self.positions), torch.empty_like(self.x), Floor(self.setup)
        floor.also(lambda: torch.sum(given, 0, out=out))
        return {"library": lambda: self.population.average(given, weights), "floor": floor}


def rows(setup: Setup) -> list[Row]:
    images = mnist(setup, 10, share=0.1)
    bench, found = Bench(setup, images), limits(setup)
    cases = {
        "lower gradient": bench.lower_gradient,
        "lower gradient, features cached": bench.lower_gradient_cached,
        "upper gradient, per client": bench.upper_gradient,
        "upper gradient, mean of a cohort": bench.upper_mean,
        "H v": bench.hessian_product,
        "J v": bench.jacobian_product,
        "draw of a phase's minibatches": lambda: bench.draw("replacement"),
        "draw of a phase's minibatches, epochs": lambda: bench.draw("epochs"),
        "average of x": bench.average,
    }
    for name, case in cases.items():
        found += rows_of(name, compare(case(), setup), ours="library", images=images.source)
    return found + convolutions(setup)


# ---- a network with weights of its own for every client ------------------------------------------------------------


def convolutions(setup: Setup) -> list[Row]:
    """Strategies of the oracle on the personalisation task's CNN."""
    k, b = (2, 4) if setup.small else (100, 128) if setup.cuda else (10, 128)
    options: dict[str, Any] = {"num_clients": k, "model": "cnn", "least": 8}
    try:
        if setup.small:
            raise DataError("the small version looks at digits")
        task, side, sizes = Personalisation(data="mnist", share=min(1.0, 0.0035 * k), **options), 28, (32, 64, 2048)
        built = task.build()
    except DataError:
        width = 0.25 if setup.small else 1.0
        task, side, sizes = (
            Personalisation(data="digits", width=width, **options),
            8,
            (4, 8, 16) if setup.small else (16, 32, 64),
        )
        built = task.build()
    contestants: dict[str, Callable[[], Any]] = {"floor": products_of_cnn(setup, k, b, side, sizes)}
    draw = torch.Generator().manual_seed(0)
    for strategy in ("auto", "vmap", "loop"):
        population = Population(*built, device=setup.device, strategy=strategy)
        high = population.data.sizes["train"]
        index = (torch.rand(k, b, generator=draw) * high[:, None]).long().to(setup.device)
        batch, ys = population.data.batch(torch.arange(k), "train", index), population.y0.expand(k, -1).contiguous()
        contestants[strategy] = lambda oracle=population.oracle, x=population.x0, ys=ys, batch=batch: oracle.lower_grad(
            x, ys, batch
        )  # type: ignore[misc]
    name = f"CNN of {side} x {side}, lower gradient, {k} clients of {b} samples"
    return rows_of(name, compare(contestants, setup, rounds=5), ours="auto", images=task.data)


def products_of_cnn(setup: Setup, k: int, b: int, side: int, sizes: tuple[int, int, int]) -> Floor:
    """Convolutions as products with unfolded images.

    Forward, back to the weights and, except in the first layer, back to the inputs.
    """
    floor = Floor(setup)
    first, second, hidden = sizes
    one, two = (5, 5) if side == 28 else (3, 2)
    inner = (side - one + 1) // 2
    outer = inner - two + 1
    layers = [
        (b * (side - one + 1) ** 2, one * one, first),
        (b * outer**2, first * two * two, second),
        (b, second * (outer // 2) ** 2, hidden),
        (b, hidden, CLASSES),
    ]
    for number, (samples, inputs, outputs) in enumerate(layers):
        values, weights = floor.full(k, samples, inputs), floor.full(k, inputs, outputs)
        back = floor.mm(values, weights)
        floor.mm(values.mT, back)
        if number:
            floor.mm(back, weights.mT)
    return floor
