"""Derivatives in low precision: near those in float32, with rows, sums and measurements in float32."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_trial import clients, reading
from torch.nn.functional import scaled_dot_product_attention as fused

import fedbilevel as fb
from fedbilevel.errors import SettingError
from fedbilevel.oracle.plain_kernels import WrittenAttention
from fedbilevel.oracle.population import Population
from fedbilevel.problem.attention import attention
from fedbilevel.runs.options import keywords
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from support.numeric.yardstick import relative

EPS = 2.0**-8  # rounding of bfloat16
ROUNDING = {"bf16": EPS, "fp16": 2.0**-11}
SMALL = HyperRepresentation(num_clients=3)


def derivatives(population: Population) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, y = population.x0, population.y0 + 0.05 * torch.randn(population.y0.shape, generator=draw)
    v = torch.randn(y.shape, generator=draw)
    train, val = (population.data.batch(population.data.positions, role) for role in ("train", "val"))
    oracle = population.oracle
    with torch.no_grad():
        fx, fy = oracle.upper_grads(x, y, val)
        jv, hv = oracle.second_order(x, y, v, train)
        gy, gx = oracle.lower_grad(x, y, train), oracle.lower_grad_x(x, y, train)
        loss = oracle.evaluate(population.problem.lower, x, y, train)
    return {"fx": fx, "fy": fy, "jv": jv, "hv": hv, "gy": gy, "gx": gx, "loss": loss}


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_derivatives_are_near_those_of_float32_and_values_equal(strategy, precision):
    problem, data = SMALL.build()
    full, low = (derivatives(Population(problem, data, strategy=strategy, precision=p)) for p in ("full", precision))
    assert {value.dtype for value in low.values()} == {torch.float32}
    second = ("jv", "hv")
    for name in ("fx", "fy", "gy", *(second if precision == "bf16" else ())):
        assert 0 < relative(low[name], full[name]) < 4 * ROUNDING[precision], name
    for name in ("gx", "loss", *(second if precision == "fp16" else ())):
        assert torch.equal(low[name], full[name]), name


def test_a_loss_is_summed_in_float32():
    """Entries of 1 + 2^-9 are 1 in bfloat16; the sum of the loss must not round again."""
    seen = []

    def lower(x, y, batch):
        product = batch["a"] @ y["w"]
        seen.append(product.dtype)
        return product * x["s"]

    problem = fb.Problem(
        upper=lambda x, y, batch: (batch["a"] @ y["w"]) ** 2,
        lower=lower,
        x0={"s": torch.tensor(1.0)},
        y0={"w": torch.ones(2)},
    )
    rows = torch.rand(257, 2, generator=torch.Generator().manual_seed(1))
    population = Population(problem, [{"train": {"a": rows}, "val": {"a": rows}}], precision="bf16")
    seen.clear()
    batch = population.data.batch(population.data.positions, "train")
    gradient = population.oracle.lower_grad(population.x0, population.y0, batch)
    assert set(seen) == {torch.bfloat16}
    exact = rows.bfloat16().double().mean(0)
    assert relative(gradient[0], exact) < EPS
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_small_derivatives_do_not_vanish_in_float16(strategy):
    """g = c (a y)^2 / 2 with c = 2e-7: the derivative by a product is below the numbers of float16, as c / 2."""
    lower = lambda x, y, batch: x["s"] * 0.5 * 2e-7 * (batch["a"] @ y["w"]) ** 2
    problem = fb.Problem(upper=lower, lower=lower, x0={"s": torch.tensor(1.0)}, y0={"w": torch.ones(1)})
    data = [{role: {"a": torch.full((2, 1), a)} for role in ("train", "val")} for a in (1.0, 3.0)]
    population = Population(problem, data, precision="fp16", strategy=strategy)
    batch = population.data.batch(population.data.positions, "train")
    gradient = population.oracle.lower_grad(population.x0, population.y0, batch)
    expected = torch.tensor([[2e-7], [18e-7]])
    assert float(torch.tensor(1e-7).half()) != pytest.approx(1e-7, rel=0.1)
    assert ((gradient - expected).abs() < 4 * ROUNDING["fp16"] * expected).all()


def test_a_derivative_beyond_float16_is_not_finite_at_its_client_alone():
    lower = lambda x, y, batch: x["s"] * batch["c"] * (batch["a"] @ y["w"]) ** 2
    problem = fb.Problem(upper=lower, lower=lower, x0={"s": torch.tensor(1.0)}, y0={"w": torch.ones(2)})
    samples = lambda c: {"a": torch.ones(2, 2), "c": torch.full((2,), c)}
    data = [{role: samples(c) for role in ("train", "val")} for c in (1.0, 1e3)]
    for precision, finite in (("fp16", [True, False]), ("bf16", [True, True])):
        population = Population(problem, data, precision=precision)
        batch = population.data.batch(population.data.positions, "train")
        gradient = population.oracle.lower_grad(population.x0, population.y0, batch)
        assert gradient.isfinite().all(1).tolist() == finite


@pytest.mark.parametrize("algorithm", ["penalty", "fedbio"])
@pytest.mark.filterwarnings("ignore:the fused kernels of attention")
@pytest.mark.filterwarnings("ignore:torch cannot compute the derivatives of a loss in low precision")
@pytest.mark.parametrize("low", ROUNDING)
@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_a_small_transformer_runs_in_low_precision(algorithm, strategy, low):
    """Where torch cannot mix precisions, as in layer norms of several clients on a CPU, all is in full."""
    runs = [
        fb.solve(
            reading("Transformer"), clients(), algorithm, num_iterations=10, precision=precision, strategy=strategy
        )
        for precision in ("full", low)
    ]
    full, other = (run.x["trust"] for run in runs)
    assert other.dtype == torch.float32
    assert relative(other, full) < 4 * ROUNDING[low]
    assert torch.equal(other, full) is (strategy == "vmap")
    assert runs[1].final["upper_loss"] == pytest.approx(runs[0].final["upper_loss"], rel=1e-3)


def test_plain_attention_of_several_clients_is_in_low_precision():
    """The weights of layer norms do not matter here: they would need float32 on a CPU."""
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))

    def loss(x, y, batch):
        mixed = batch["a"] @ y["w"]
        return x["s"] * (fused(mixed, mixed, mixed, is_causal=True) ** 2).sum((1, 2))

    problem = fb.Problem(upper=loss, lower=loss, x0={"s": torch.tensor(1.0)}, y0={"w": weight})
    rows = torch.randn(3, 5, 6, 4, generator=torch.Generator().manual_seed(3))
    data = [{"train": {"a": one}, "val": {"a": one}} for one in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full, low = (Population(problem, data, precision=name, strategy="vmap") for name in ("full", "bf16"))
    assert low.oracle.plain_kernels == {"attention"}
    assert not low.oracle.plain_in_full
    exact, found = derivatives(full), derivatives(low)
    for name in ("gy", "fx", "fy", "jv", "hv"):
        assert 1e-4 < relative(found[name], exact[name]) < 16 * EPS, name
    low.oracle.often = {"cpu": 1}
    traced = derivatives(low)
    assert all(plan.trace is not None for plan in low.oracle._plans.values() if plan.name in ("gy", "jv hv"))
    assert all(torch.equal(traced[name], value) for name, value in found.items())


def test_derivatives_that_torch_does_not_have_in_low_precision_are_in_full_with_a_warning():
    def loss(x, y, batch):
        mixed = batch["a"] @ y["w"]
        return x["s"] * (torch.nn.functional.layer_norm(mixed, (4,), y["w"][0], y["w"][1]) ** 3).sum((1, 2))

    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    problem = fb.Problem(upper=loss, lower=loss, x0={"s": torch.tensor(1.0)}, y0={"w": weight})
    rows = torch.randn(3, 5, 6, 4, generator=torch.Generator().manual_seed(3))
    data = [{"train": {"a": one}, "val": {"a": one}} for one in rows]
    with pytest.warns(UserWarning, match="cannot compute the derivatives of a loss in low precision"):
        low = Population(problem, data, precision="bf16", strategy="vmap")
    full = Population(problem, data, strategy="vmap")
    for name, value in derivatives(full).items():
        assert torch.equal(value, derivatives(low)[name])


SHAPES = [
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": torch.arange(30).view(5, 6) % 4 > 0},
    {"attn_mask": torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)},
    {"enable_gqa": True},
]


@pytest.mark.parametrize("given", SHAPES, ids=lambda given: next(iter(given)))
def test_attention_in_plain_operations_is_that_of_torch(given):
    draw = torch.Generator().manual_seed(1)
    normal = lambda heads, length: torch.randn(2, heads, length, 4, generator=draw, dtype=torch.float64)
    query, key, value = normal(4, 5), *(normal(2 if "enable_gqa" in given else 4, 6) for _ in range(2))
    torch.testing.assert_close(attention(query, key, value, **given), fused(query, key, value, **given))
    with WrittenAttention():
        assert torch.equal(fused(query, key, value, **given), attention(query, key, value, **given))


def test_a_resumed_run_keeps_its_precision(tmp_path):
    problem, data = SMALL.build()
    options = {"algorithm": "penalty", "checkpoint_every": 1, "batch_size": 8}
    whole = fb.solve(problem, data, **options, num_iterations=4, precision="bf16")
    fb.solve(problem, data, **options, num_iterations=2, precision="bf16", record=tmp_path)
    resumed = fb.solve(problem, data, **options, num_iterations=4, precision="bf16", record=tmp_path, resume=True)
    for name, leaf in whole.x.items():
        assert torch.equal(leaf, resumed.x[name])
    with pytest.raises(fb.FedBilevelError, match="precision"):
        fb.solve(problem, data, **options, num_iterations=6, record=tmp_path, resume=True)


def test_unknown_and_senseless_precisions_are_refused():
    problem, data = SMALL.build()
    with pytest.raises(SettingError, match=r"precision is 'int8', expected 'full', 'bf16' or 'fp16'\."):
        Population(problem, data, precision="int8")
    with pytest.raises(SettingError, match=r"precision is 'bf16' and dtype is torch.float64, expected torch.float32"):
        Population(problem, data, precision="bf16", dtype=torch.float64)


def test_a_precision_in_a_run_file_reaches_the_run():
    assert keywords({"precision": "bf16"})["precision"] == "bf16"
    assert keywords({})["precision"] == "full"
