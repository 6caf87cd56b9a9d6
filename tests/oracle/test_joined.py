"""Losses whose values need no other samples: all clients' samples are one batch where only the mean is needed."""

import numpy as np
import pytest
import torch
from torch.nn.functional import group_norm
from torch.utils._python_dispatch import TorchDispatchMode

from fedbilevel.oracle.population import Population
from fedbilevel.problem.problem import Problem

SIZES = ((3, 2), (5, 1), (4, 3))  # unequal, so that batches have padding


def clients(sizes=SIZES):
    rng = np.random.default_rng(3)
    draw = lambda i, n: {"a": rng.standard_normal((n, 4)) + i, "b": rng.standard_normal(n)}
    return [{"train": draw(i, train), "val": draw(i, val)} for i, (train, val) in enumerate(sizes)]


def alone(x, y, batch):
    """Every sample has its own norms."""
    rows = group_norm(batch["a"] * x["scale"], 2)
    return (torch.tanh(rows) @ y["w"] - batch["b"]) ** 2 + 0.1 * (y["w"] ** 2).sum()


def normed(x, y, batch):
    """Samples are centred by the weighted mean of their batch, which padding does not change."""
    middle = (batch["weight"][:, None] * batch["a"]).sum(0)
    return ((batch["a"] - middle) * x["scale"] @ y["w"] - batch["b"]) ** 2 + 0.1 * (y["w"] ** 2).sum()


def summed(x, y, batch):
    return (batch["weight"] * alone(x, y, batch)).sum()


def met(loss, given=None, **options):
    start = {"x0": {"scale": torch.linspace(0.5, 1.5, 4)}, "y0": {"w": torch.linspace(-1, 1, 4)}}
    return Population(Problem(upper=loss, lower=loss, **start), given or clients(), dtype=torch.float64, **options)


@pytest.mark.parametrize(
    ("loss", "found"), [(alone, {"upper", "lower"}), (normed, set()), (summed, set())], ids=["alone", "normed", "sum"]
)
def test_losses_that_need_no_other_samples_are_found(loss, found):
    assert met(loss).independent == found


def test_one_client_has_no_company():
    assert met(alone, clients(SIZES[:1])).independent == set()


def test_a_loss_that_fails_on_single_samples_is_not_joined():
    def pairs(x, y, batch):
        assert len(batch["b"]) > 1
        return alone(x, y, batch)

    assert met(pairs, clients(((3, 2), (5, 2), (4, 3)))).independent == set()


def test_a_loss_with_pairs_that_the_trial_does_not_see_is_not_joined():
    """The first samples of all clients have no positive sample among them."""

    def ranking(x, y, batch):
        score, positive = batch["a"] @ (x["scale"] * y["w"]), batch["positive"] > 0
        other = batch["weight"] * ~positive
        return positive * (score - score[:, None] + 1).clamp(min=0).square() @ other + 0.1 * (y["w"] ** 2).sum()

    given = clients(((5, 4), (6, 5), (5, 4)))
    for client in given:
        for part in client.values():
            part["positive"] = np.arange(len(part["b"])) > 2
    assert met(ranking, given).independent == set()
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    rows = derivatives(met(ranking, given, strategy="loop"), None)
    for name, got in derivatives(met(ranking, given), shares).items():
        torch.testing.assert_close(got[0], shares @ rows[name], rtol=1e-12, atol=1e-13, msg=name)


def test_a_loss_that_mixes_samples_in_the_order_of_their_draws_is_not_joined():
    def mixed(x, y, batch):
        rows = batch["a"]
        if "draw" in batch:
            rows = 0.7 * rows + 0.3 * rows[batch["draw"][:, 0].argsort()]
        return alone(x, y, {"a": rows, "b": batch["b"]})

    start = {"x0": {"scale": torch.ones(4)}, "y0": {"w": torch.ones(4)}}
    problem = Problem(upper=alone, lower=mixed, **start, draws={"train": 1})
    assert Population(problem, clients(), dtype=torch.float64).independent == {"upper"}


def derivatives(population, shares):
    oracle, x, y = population.oracle, population.x0, population.y0
    train, val = (population.data.batch(population.data.positions, role) for role in ("train", "val"))
    v = torch.linspace(1, 2, 4, dtype=torch.float64)
    given = {} if shares is None else {"shares": shares}
    return {
        "gy": oracle.lower_grad(x, y, train, **given),
        "gx": oracle.lower_grad_x(x, y, train, **given),
        "fx": oracle.upper_grad_x(x, y, val, **given),
        "fy": oracle.upper_grad_y(x, y, val, **given),
        "jv": oracle.jacobian_product(x, y, v, train, **given),
        "hv": oracle.hessian_product(x, y, v, train, **given),
    }


@pytest.mark.parametrize("loss", [alone, normed, summed])
@pytest.mark.parametrize("often", [10**9, 1], ids=["plain", "traced"])
def test_means_of_one_batch_are_the_weighted_means_of_a_loop_with_padding(loss, often):
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    rows, population = derivatives(met(loss, strategy="loop"), None), met(loss)
    population.oracle.often = {"cpu": often}
    derivatives(population, shares)  # the first calls are never traced
    for name, got in derivatives(population, shares).items():
        torch.testing.assert_close(got[0], shares @ rows[name], rtol=1e-12, atol=1e-13, msg=name)
    pooled = [plan for plan in population.oracle._plans.values() if plan.way == "pooled"]
    assert pooled
    assert all((plan.trace is not None) == (often == 1) for plan in pooled)


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_mean_of_independent_losses_takes_the_kernels_of_one_batch():
    seen = []

    def watched(x, y, batch):
        seen.append(len(batch["b"]))
        return alone(x, y, batch)

    population = met(watched, clients(((4, 2), (4, 2), (4, 2))))
    x, y, val = population.x0, population.y0, population.data.batch(population.data.positions, "val")
    shares = torch.full((3,), 1 / 3, dtype=torch.float64)
    population.oracle.upper_grad_x(x, y, val, shares=shares)  # the first call also counts memory
    population.oracle.upper_grad_x(x, y, val)
    seen.clear()
    with _Count() as joined:
        population.oracle.upper_grad_x(x, y, val, shares=shares)
    assert seen == [6]
    assert joined.names.count("native_group_norm_backward") == 1  # no derivative of this kernel is needed
    seen.clear()
    with _Count() as each:
        population.oracle.upper_grad_x(x, y, val)
    assert seen == [2]
    assert len(joined.names) < len(each.names)


def test_draws_reach_the_samples_that_they_belong_to():
    def drawn(x, y, batch):
        factor = batch["draw"][:, 0] if "draw" in batch else 1.0
        return factor * alone(x, y, batch)

    found = []
    for strategy in ("auto", "loop"):
        problem = Problem(
            upper=alone, lower=drawn, x0={"scale": torch.ones(4)}, y0={"w": torch.ones(4)}, draws={"train": 1}
        )
        population = Population(problem, clients(), dtype=torch.float64, strategy=strategy)
        batch = population.data.batch(population.data.positions, "train")
        draw = torch.linspace(0, 1, batch.fields["weight"].numel(), dtype=torch.float64)
        batch = batch.drawn(draw.view(*batch.fields["weight"].shape, 1))
        shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
        rows = population.oracle.lower_grad(population.x0, population.y0, batch, shares=shares)
        found.append(rows[0] if strategy == "auto" else shares @ rows)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-13)
