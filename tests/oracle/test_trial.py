"""Losses that cannot be evaluated for several clients at once, or have no second derivative."""

import dataclasses
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle import derivatives
from fedbilevel.oracle.population import Population

STEPS = {"lr_upper": 0.1, "lr_lower": 0.1, "lr_system": 0.1}


def clients(num: int = 3) -> list[dict[str, dict[str, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(0)
    samples = lambda n: {"a": torch.randn(n, 4, 3, generator=draw, dtype=torch.float64), "label": torch.arange(n) % 2}
    return [{"train": samples(4 + i), "val": samples(3 + i)} for i in range(num)]


class Reader(nn.Module):
    """A network that reads sequences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "Transformer":
            self.enter, self.body = nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        elif kind == "Attention":
            self.enter, self.body = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        else:
            self.body = getattr(nn, kind)(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        if self.kind == "Transformer":
            return self.head(self.body(self.enter(a)).mean(1))
        if self.kind == "Attention":
            entered = self.enter(a)
            return self.head(self.body(entered, entered, entered, need_weights=False)[0].mean(1))
        return self.head(self.body(a)[0][:, -1])


def reading(kind: str) -> fb.Problem:
    torch.manual_seed(0)

    def upper(x, net, batch):
        return cross_entropy(net(batch["a"]), batch["label"], reduction="none")

    def lower(x, net, batch):
        decay = sum((leaf**2).sum() for leaf in net.parameters.values())
        return x["trust"].sigmoid()[batch["label"]] * upper(x, net, batch) + 0.3 * decay

    return fb.Problem.from_modules(y_module=Reader(kind), x0={"trust": torch.zeros(2)}, upper=upper, lower=lower)


def squared(y, batch):
    return (batch["a"].mean(1) @ y["w"] - batch["label"]) ** 2


def plain(lower, upper=lambda x, y, batch: squared(y, batch), **more) -> fb.Problem:
    return fb.Problem(
        upper=upper,
        lower=lambda x, y, batch: lower(y, batch) + x["s"].exp() * (y["w"] ** 2).sum(),
        x0={"s": torch.tensor(-1.0)},
        y0={"w": torch.tensor([0.3, -0.2, 0.1])},
        **more,
    )


def selected(y, batch):
    chosen = (batch["weight"] * squared(y, batch))[batch["label"] == 1]
    return chosen.sum()


branching = lambda y, batch: squared(y, batch) * (2.0 if y["w"].sum() > 0 else 1.0)
written = lambda y, batch: torch.zeros(len(batch["label"]), dtype=y["w"].dtype).add_(squared(y, batch))

BATCHLESS = {  # problem, its function that cannot be batched, and the reason
    "GRU": (reading("GRU"), r"lower\(\)", "torch has no batching rule for gru"),
    "LSTM": (reading("LSTM"), r"lower\(\)", "torch has no batching rule for lstm"),
    "RNN": (reading("RNN"), r"lower\(\)", "torch has no batching rule for rnn_tanh"),
    "branch": (plain(branching), r"lower\(\)", r"it branches on values or calls \.item\(\)"),
    "item": (
        plain(lambda y, batch: squared(y, batch) + 0 * y["w"].sum().item()),
        r"lower\(\)",
        r"it branches on values or calls \.item\(\)",
    ),
    "mask": (plain(selected), r"lower\(\)", "a shape in it depends on values"),
    "in place": (plain(written), r"lower\(\)", "RuntimeError: output with shape .*"),
    "upper": (
        plain(squared, upper=lambda x, y, batch: branching(y, batch)),
        r"upper\(\)",
        r"it branches on values or calls \.item\(\)",
    ),
    "statistics": (
        plain(
            squared, statistics={"val": lambda x, y, batch: {"s": squared(y, batch).sum() * float(y["w"].sum() > 9)}}
        ),
        "the statistics of 'val'",
        r"it branches on values or calls \.item\(\)",
    ),
}


@pytest.mark.parametrize("name", BATCHLESS)
@pytest.mark.parametrize("strategy", ["auto", "compiled"])
def test_functions_that_cannot_be_batched_run_client_by_client_with_one_warning(name, strategy, monkeypatch):
    monkeypatch.setattr("fedbilevel.oracle.evaluation._try_compiler", lambda: None)
    problem, function, reason = BATCHLESS[name]
    options = {"num_iterations": 3, "dtype": torch.float64, **STEPS}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fb.solve(problem, clients(), "fedbio", strategy=strategy, **options)
    expected = fb.solve(problem, clients(), "fedbio", strategy="loop", **options)
    assert found.rows[-1]["upper_loss"] == pytest.approx(expected.rows[-1]["upper_loss"], rel=1e-12)
    assert len(told) == 1
    sentence = (
        rf"{function} cannot be evaluated for several clients at once \({reason}\), so 3 clients are evaluated one "
        r"after another: a step takes about 3 times as long as that of one client"
    )
    assert re.fullmatch(sentence, str(told[0].message)), told[0].message


@pytest.mark.parametrize("name", BATCHLESS)
def test_strategy_vmap_refuses_functions_that_cannot_be_batched(name):
    problem, function, reason = BATCHLESS[name]
    with pytest.raises(ProblemError, match=rf"^{function} cannot be .* \({reason}\): use strategy='loop'\.$"):
        Population(problem, clients(), strategy="vmap")


@pytest.mark.filterwarnings("ignore:.*cannot be evaluated for several clients")
def test_recurrent_networks_pass_the_checks_of_problems_and_hypergradients():
    problem = reading("GRU")
    assert fb.check_problem(problem, clients(2), show=False).ok
    report = fb.check_hypergradient(problem, clients(2), estimators=["cg", "fedmbo"], num_directions=1, show=False)
    assert [check.ok for check in report.checks][:2] == [True, True], str(report)
    assert fb.curvature(problem, clients(2), num_products=3).largest > 0


@pytest.mark.filterwarnings("ignore:the fused kernels of attention")
@pytest.mark.parametrize("kind", ["Transformer", "Attention"])
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_attention_uses_a_kernel_that_has_second_derivatives(kind, strategy):
    problem = reading(kind)
    found = fb.solve(
        problem, clients(), "fedbio", num_iterations=2, dtype=torch.float64, strategy=strategy, residuals=True, **STEPS
    )
    assert found.rows[-1]["residual"] > 0
    assert fb.check_problem(problem, clients(), show=False).ok


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_plain_attention_is_announced_once_and_only_where_second_derivatives_are_used(strategy):
    options = {"num_iterations": 2, "strategy": strategy, "dtype": torch.float64, "baseline": True}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fb.solve(reading("Attention"), clients(), "fedbio", **options)
    assert [str(one.message).split(",")[0] for one in told] == [
        "the fused kernels of attention have no second derivative"
    ]
    first = fb.solve(reading("Attention"), clients(), "penalty", **options)  # a warning would be an error
    plain = fb.solve(reading("Attention"), clients(), "penalty", **{**options, "strategy": "loop"})
    assert first.rows[-1]["upper_loss"] == pytest.approx(plain.rows[-1]["upper_loss"], rel=1e-9)


def test_gradients_of_one_client_use_fused_attention_and_products_the_plain_one():
    seen = []
    real = nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append(torch._fused_sdp_choice(*args[:3]))
        return real(*args, **kwargs)

    torch.manual_seed(0)
    weights = {name: torch.randn(4, 4) for name in "qkv"}

    def upper(x, y, batch):
        q, k, v = (batch["a"] @ y[name][None, :3] for name in "qkv")
        return watched(q[:, None], k[:, None], v[:, None]).square().mean((1, 2, 3))

    lower = lambda x, y, batch: upper(x, y, batch) * x["s"].exp() + sum((one**2).sum() for one in y.values())
    problem = fb.Problem(upper=upper, lower=lower, x0={"s": torch.tensor(0.0)}, y0=weights)
    math = int(torch.nn.attention.SDPBackend.MATH.value)
    with pytest.warns(UserWarning, match="fused kernels of attention"):
        population = Population(problem, clients(), strategy="loop")
    batch = population.data.batch(population.data.positions, "train")
    with torch.no_grad():
        seen.clear()
        population.oracle.lower_grad(population.x0, population.y0, batch)
        assert seen
        assert math not in seen
        seen.clear()
        population.oracle.hessian_product(population.x0, population.y0, population.y0, batch)
        assert set(seen) == {math}


def test_products_for_a_measurement_of_a_first_order_run_find_plain_attention_when_asked():
    """Such a run tries no products at its start."""
    options = {"num_iterations": 1, "dtype": torch.float64, "stationarity": True, "strategy": "loop"}
    found = fb.solve(reading("Attention"), clients(), "penalty", **options)
    assert 0 < found.rows[-1]["hypergradient"] < 1


def test_a_checkpoint_saves_memory_in_gradients_and_changes_nothing():
    """A recomputed layer is evaluated twice in a gradient, with the same numbers."""
    calls = []

    def layer(a, w):
        calls.append(1)
        return torch.tanh(a @ w)

    def problem(recomputed: bool) -> fb.Problem:
        def upper(x, y, batch):
            through = partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
            return (through(batch["a"].mean(1), y["w"]).sum(1) - batch["label"]) ** 2

        lower = lambda x, y, batch: upper(x, y, batch) * x["s"].exp() + (y["w"] ** 2).sum()
        return fb.Problem(
            upper=upper, lower=lower, x0={"s": torch.tensor(0.0)}, y0={"w": torch.linspace(-1, 1, 9).view(3, 3)}
        )

    options = {"num_iterations": 3, "dtype": torch.float64}
    plain = fb.solve(problem(False), clients(), "penalty", strategy="loop", **options)
    before = len(calls)
    with pytest.warns(UserWarning, match="it uses a checkpoint, which only gradients of one client at a time can"):
        saved = fb.solve(problem(True), clients(), "penalty", **options)
    assert torch.equal(plain.y["w"], saved.y["w"])
    assert len(calls) - before > 1.5 * before
    with pytest.raises(ProblemError, match=r"the second derivatives of .* uses a checkpoint"):
        fb.solve(problem(True), clients(), "fedbio", **options)


def test_derivatives_of_one_client_have_the_numbers_of_torch_func():
    generator = torch.Generator().manual_seed(5)
    no_second = plain(distances)
    for problem in (reading("Transformer"), reading("GRU"), plain(squared), no_second):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            population = Population(problem, clients(1), strategy="loop", second=problem.lower is not no_second.lower)
        oracle, data = population.oracle, population.data
        losses = [oracle.flat(loss) for loss in (problem.upper, problem.lower)]
        draw = lambda one: one + 0.1 * torch.randn(one.shape, generator=generator)
        x, y, v = draw(population.x0), draw(population.y0), draw(population.y0)
        fields = data.batch(data.positions, "train").row(0)
        given = {build: (x, y, fields) for build in derivatives.ALONE}
        given |= {build: (x, y, v, fields) for build in (derivatives.pull_both, derivatives.pull_x, derivatives.pull_y)}
        ways = [(build, alone, given[build]) for build, alone in derivatives.ALONE.items()]
        ways += [
            (derivatives.all_directions(*flags), alone, (x, y, v, *[fields] * 5))
            for flags, alone in derivatives.ALONE_DIRECTIONS.items()
        ]
        for build, alone, values in ways:
            second = alone in derivatives.ALONE_SECOND
            if second and problem is no_second:
                continue
            found, expected = (tree_leaves(way(*losses)(*values)) for way in (alone, build))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-7) if second else torch.equal(one, other)


def test_a_loss_without_x_has_a_gradient_of_zero_by_x():
    population = Population(plain(squared), clients(2), strategy="loop")
    batch = population.data.batch(population.data.positions, "val")
    fx, fy = population.oracle.upper_grads(population.x0, population.y0, batch)
    assert torch.equal(fx, torch.zeros(2, 1))
    assert bool(fy.any())
    constant = dataclasses.replace(plain(squared), upper=lambda x, y, batch: 0.0 * batch["label"].float())
    flat = population.oracle.flat(constant.upper)
    fx, fy = derivatives.ALONE[derivatives.upper_grads](flat, flat)(population.x0, population.y0, batch.row(0))
    assert not bool(fx.any() or fy.any())


def test_products_are_zero_where_the_lower_gradient_does_not_depend_on_a_point():
    population = Population(plain(squared), clients(1), strategy="loop")
    x, y = population.x0, population.y0
    fields = population.data.batch(population.data.positions, "val").row(0)
    for lower in (lambda x, y, fields: y.sum(), lambda x, y, fields: x.sum(), lambda x, y, fields: torch.tensor(1.0)):
        for flags, alone in derivatives.ALONE_DIRECTIONS.items():
            expected = derivatives.all_directions(*flags)(lower, lower)(x, y, y, *[fields] * 5)
            found = alone(lower, lower)(x, y, y, *[fields] * 5)
            assert all(map(torch.equal, found, expected))


def test_one_client_needs_no_batching():
    found = fb.solve(plain(branching), clients(1), "fedbio", num_iterations=1)
    assert found.rows[-1]["iteration"] == 1


distances = lambda y, batch: torch.cdist(batch["a"].mean(1), y["w"][None]).sum(1)


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_missing_second_derivatives_are_an_error_only_where_they_are_used(strategy):
    problem = plain(distances)
    options = {"num_iterations": 2, "strategy": strategy}
    found = fb.solve(problem, clients(), "penalty", **options)
    assert found.rows[-1]["iteration"] == 2
    with pytest.raises(ProblemError, match=r"torch has no derivative of _cdist_backward\): .* such as 'penalty'"):
        fb.solve(problem, clients(), "fedbio", **options)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_a_loss_outside_of_torch_is_refused(strategy):
    outside = lambda y, batch: squared(y, batch) * float(y["w"].detach().numpy().max() < 9)
    with pytest.raises(
        ProblemError, match=r"the second derivatives of lower\(\) cannot be computed .* without \.numpy\(\)"
    ):
        Population(plain(outside), clients(), strategy=strategy)
