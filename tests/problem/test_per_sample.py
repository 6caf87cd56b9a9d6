"""Losses and statistics with one value per sample: the library reduces them without the padding."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.errors import ProblemError
from fedbilevel.oracle import evaluation
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import RESERVED
from fedbilevel.problem.contraction import contracted, counted, weighted
from fedbilevel.problem.problem import Problem, Scopes

DIM, SIZES, CLASSES = 3, (4, 9, 1, 6), 3
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
WAYS = {
    "vmap": {"strategy": "vmap"},
    "loop": {"strategy": "loop"},
    "chunks": {"strategy": "vmap", "chunk_size": 2},
    "auto": {},
    "traced": {"often": {"cpu": 1}},
    "measured": {"long": 0.0},
}


def clients(sizes=SIZES, tested=(3, 200, 52, 1)):
    """Ragged and heterogeneous: client i has its own regression and its own scale."""
    rng = np.random.default_rng(5)
    made = []
    for i, n in enumerate(sizes):
        truth = rng.standard_normal(DIM)
        roles = {"train": n, "val": 2 + 3 * i, "test": tested[i]}
        made.append({})
        for role, num in roles.items():
            a = rng.standard_normal((num, DIM)) * (1 + i)
            made[i][role] = {"a": a, "b": a @ truth + rng.standard_normal(num), "label": rng.integers(0, CLASSES, num)}
    return made


def residuals(x, y, batch):
    seen = batch["features"] if "features" in batch else batch["a"] @ x["basis"]
    return (seen @ y["w"] - batch["b"]) ** 2


def penalty(x, y):
    return (torch.exp(x["decay"]) * y["w"] ** 2).sum()


FORMS = {
    "per sample": {"upper": residuals, "lower": lambda x, y, batch: residuals(x, y, batch) + penalty(x, y)},
    "scalar": {
        "upper": lambda x, y, batch: (batch["weight"] * residuals(x, y, batch)).sum(),
        "lower": lambda x, y, batch: (batch["weight"] * residuals(x, y, batch)).sum() + penalty(x, y),
    },
}


def problem(form, *, cached=False, **changes):
    rng = torch.Generator().manual_seed(1)
    x0 = {
        "basis": torch.randn(DIM, DIM, generator=rng, dtype=torch.float64) / 2,
        "decay": torch.zeros(DIM, dtype=torch.float64),
    }
    features = {"features": lambda x, batch: batch["a"] @ x["basis"]} if cached else {}
    return Problem(**{**FORMS[form], "x0": x0, "y0": {"w": torch.zeros(DIM)}, **features, **changes})


def population(form, *, cached=False, often=None, long=None, data=None, **options):
    made = Population(
        problem(form, cached=cached), clients() if data is None else data, **{"dtype": torch.float64, **options}
    )
    made.oracle.often = often or made.oracle.often
    made.oracle.long = math.inf if long is None else long  # without it a loaded machine changes no choice
    return made


def point(met, *, shared):
    rng = torch.Generator().manual_seed(2)
    dims = (met.x0.shape[-1], len(met.y0), len(met.y0))
    return tuple(
        torch.randn((d,) if shared else (len(met), d), generator=rng, dtype=torch.float64).to(met.dtype) for d in dims
    )


def everything(met, x, y, v, train, val, shares=None):
    oracle = met.oracle
    once = oracle.directions(x, y, v, gy=train, fx=val, fy=val, ju=train, hu=train)
    return [
        oracle.evaluate(met.problem.upper, x, y, val),
        oracle.evaluate(met.problem.lower, x, y, train),
        oracle.lower_grad(x, y, train, shares=shares),
        oracle.lower_grad_x(x, y, train, shares=shares),
        oracle.upper_grad_x(x, y, val, shares=shares),
        oracle.upper_grad_y(x, y, val, shares=shares),
        *oracle.upper_grads(x, y, val, shares=shares),
        *oracle.second_order(x, y, v, train, shares=shares),
        oracle.jacobian_product(x, y, v, train, shares=shares),
        oracle.hessian_product(x, y, v, train, shares=shares),
        *once,
    ]


def batches(met, *, minibatch):
    every = torch.arange(len(met))
    if not minibatch:
        return met.data.batch(every, "train"), met.data.batch(every, "val")
    draw = np.random.default_rng(3)
    index = {role: [draw.integers(0, size, 2) for size in met.data.sizes[role].tolist()] for role in ("train", "val")}
    return tuple(met.data.batch(every, role, torch.as_tensor(np.stack(index[role]))) for role in ("train", "val"))


# ---- both forms are one problem --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True], ids=["", "features"])
@pytest.mark.parametrize(
    ("shared", "minibatch"), [(False, False), (True, True)], ids=["own points, all samples", "one point, minibatch"]
)
@pytest.mark.parametrize("way", WAYS)
def test_both_forms_have_the_same_losses_and_derivatives(way, shared, minibatch, cached):
    found = []
    for form in FORMS:
        met = population(form, cached=cached, **WAYS[way])
        assert met.per_sample == ({"upper", "lower"} if form == "per sample" else set())
        assert met.oracle.strategy == ("loop" if way == "loop" else "vmap" if way in ("vmap", "chunks") else "auto")
        given = (*point(met, shared=shared), *batches(met, minibatch=minibatch))
        with torch.no_grad():
            rounds = [everything(met, *given) for _ in range(3)]  # evaluated, then traced, then from kept features
        found.append(rounds)
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("cached", [False, True], ids=["", "features"])
def test_both_forms_have_the_same_pooled_means(cached):
    found = []
    for form in FORMS:
        met = population(form, cached=cached)
        shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        with torch.no_grad():
            found.append(
                [
                    part
                    for _ in range(3)
                    for part in everything(met, *point(met, shared=True), *batches(met, minibatch=False), shares)
                ]
            )
        assert any(key[1] is True for key in met.oracle._plans)  # the mean was asked for, and pooled
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling derivatives needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_both_forms_are_the_same_compiled(monkeypatch):
    monkeypatch.setattr(evaluation, "_OFTEN_ENOUGH", 3)
    found = []
    for form in FORMS:
        met = population(form, strategy="compiled")
        x, y, v = point(met, shared=False)
        for _ in range(4):
            product = met.oracle.second_order(x, y, v, batches(met, minibatch=False)[0])
        assert next(iter(met.oracle._plans.values())).trace.compiled
        found.append(product)
    torch.testing.assert_close(*found, **CLOSE)


def test_the_derivatives_are_those_of_the_closed_form():
    """g_i = mean (a B w - b)^2 + sum exp(decay) w^2 by hand, for n_i = 4, 9, 1 and 6 samples."""
    met = population("per sample")
    x, y, v = point(met, shared=True)
    train, val = batches(met, minibatch=False)
    basis, decay = x[: DIM * DIM].view(DIM, DIM), x[DIM * DIM :]
    gy, (jv, hv) = met.oracle.lower_grad(x, y, train), met.oracle.second_order(x, y, v, train)
    losses = met.oracle.evaluate(met.problem.lower, x, y, train)
    fy = met.oracle.upper_grad_y(x, y, val)
    for i, client in enumerate(clients()):
        a, b = (torch.as_tensor(client["train"][name]) for name in ("a", "b"))
        z, r = a @ basis, a @ basis @ y - b
        torch.testing.assert_close(losses[i], r.square().mean() + (decay.exp() * y**2).sum(), **CLOSE)
        torch.testing.assert_close(gy[i], 2 * z.T @ r / len(b) + 2 * decay.exp() * y, **CLOSE)
        torch.testing.assert_close(hv[i], 2 * z.T @ (z @ v) / len(b) + 2 * decay.exp() * v, **CLOSE)
        by_basis = 2 * (torch.outer(a.T @ r, v) + torch.outer(a.T @ (z @ v), y)) / len(b)
        torch.testing.assert_close(jv[i], torch.cat([by_basis.flatten(), 2 * decay.exp() * y * v]), **CLOSE)
        a, b = (torch.as_tensor(client["val"][name]) for name in ("a", "b"))
        torch.testing.assert_close(fy[i], 2 * (a @ basis).T @ (a @ basis @ y - b) / len(b), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_keep_their_type(dtype):
    met = population("per sample", dtype=dtype)
    assert all(
        part.dtype == dtype for part in everything(met, *point(met, shared=True), *batches(met, minibatch=False))
    )


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"strategy": "loop"}, {"cohort": fb.Cohort(0.5)}], ids=str)
@pytest.mark.parametrize("method", [FedBiO, SimFBO])
def test_both_forms_run_alike(method, options):
    ends = []
    for form in FORMS:
        short = method(num_local_steps=2, lr_lower=5e-4, lr_system=5e-4, lr_upper=5e-4)
        ends.append(
            fb.solve(problem(form), clients(), algorithm=short, num_iterations=5, dtype=torch.float64, **options)
        )
    assert not torch.allclose(ends[0].x["basis"], problem("scalar").x0["basis"])
    for name in ends[0].x:
        torch.testing.assert_close(ends[0].x[name], ends[1].x[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ends[0].y["w"], ends[1].y["w"], rtol=1e-9, atol=1e-12)


def test_a_private_x_and_a_local_y_have_both_forms():
    found = []
    for weigh in (lambda values, batch: values, lambda values, batch: (batch["weight"] * values).sum()):
        fit = lambda x, y, batch, weigh=weigh: weigh((batch["a"] @ y["w"] - batch["b"]) ** 2, batch)
        trust = lambda x, y, batch, weigh=weigh: weigh(
            x["t"][batch["index"]].sigmoid() * (batch["a"] @ y["w"] - batch["b"]) ** 2 + (y["w"] ** 2).sum(), batch
        )
        made = Problem(
            upper=fit,
            lower=trust,
            x0=lambda sizes: {"t": torch.zeros(sizes["train"])},
            y0={"w": torch.zeros(DIM)},
            scopes=Scopes("local", "private"),
        )
        met = Population(made, clients(), dtype=torch.float64)
        assert fb.check_problem(made, clients(), show=False).ok
        found.append(everything(met, *point(met, shared=False), *batches(met, minibatch=False)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_the_form_is_known_although_the_first_client_has_one_sample_and_the_loss_squeezes():
    """(n, 1).squeeze() has no axis left where n = 1."""
    squeezed = lambda x, y, batch: ((batch["a"] @ y["w"] - batch["b"]) ** 2)[:, None].squeeze() + (y["w"] ** 2).sum()
    data = clients(sizes=(1, 5, 1, 2))
    found = []
    for strategy in ("vmap", "loop"):
        met = Population(problem("scalar", lower=squeezed), data, dtype=torch.float64, strategy=strategy)
        assert met.per_sample == {"lower"}
        found.append(met.oracle.lower_grad(*point(met, shared=True)[:2], batches(met, minibatch=False)[0]))
    torch.testing.assert_close(*found, **CLOSE)
    assert bool(torch.isfinite(found[0]).all())


def test_only_one_of_the_losses_may_be_per_sample():
    mixed = dataclasses.replace(problem("scalar"), upper=FORMS["per sample"]["upper"])
    assert Population(mixed, clients()).per_sample == {"upper"}
    assert fb.check_problem(mixed, clients(), show=False).ok


def test_the_page_about_batches_names_every_reserved_field():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "batch.md").read_text()
    reserved = next(line for line in page.splitlines() if "reserved" in line)
    assert [name for name in RESERVED if f"`{name}`" not in reserved or f"| `{name}` |" not in page] == []
    assert reserved.count("`") == 2 * len(RESERVED)


# ---- padding ---------------------------------------------------------------------------------------------------------


def test_padding_with_a_loss_that_is_not_finite_adds_neither_value_nor_gradient():
    weight = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    noise = torch.tensor([0.0, 0.0, torch.inf, torch.nan], dtype=torch.float64)
    y = torch.tensor(3.0, dtype=torch.float64)
    loss = lambda y: weighted(y**2 + noise, weight)
    assert float(loss(y)) == 9.0
    assert float(torch.func.grad(loss)(y)) == 6.0
    assert float(torch.func.grad(torch.func.grad(loss))(y)) == 2.0
    rows = torch.func.vmap(torch.func.grad(lambda y, noise: weighted(y**2 + noise, weight)), in_dims=(None, 0))(
        y, torch.stack([noise, 0 * weight])
    )
    assert rows.tolist() == [6.0, 6.0]


def test_padding_repeats_a_sample_of_its_client_so_that_its_gradient_is_finite():
    """sqrt has an infinite slope at 0, and no sample of a client is 0 but by another client's data."""
    data = [
        {role: {"a": np.full((n, 1), float(scale))} for role in ("train", "val")}
        for n, scale in ((2, 1.0), (5, 4.0), (1, 9.0))
    ]
    root = lambda x, y, batch: (batch["a"][:, 0] * y["w"][0]).sqrt() + y["w"][0] ** 2 + x["x"] ** 2
    made = Problem(upper=root, lower=root, x0={"x": torch.tensor(0.5)}, y0={"w": torch.ones(1)})
    for strategy in ("vmap", "loop"):
        met = Population(made, data, dtype=torch.float64, strategy=strategy)
        assert (batches(met, minibatch=False)[0].fields["weight"] == 0).any()
        gradient = met.oracle.lower_grad(met.x0, met.y0, batches(met, minibatch=False)[0])
        torch.testing.assert_close(gradient[:, 0], torch.tensor([2.5, 3.0, 3.5], dtype=torch.float64), **CLOSE)


def refuse(says, **changes):
    with pytest.raises(ProblemError) as error:
        Population(problem("per sample", **changes), clients(), dtype=torch.float64)
    assert says in str(error.value)


@pytest.mark.parametrize("label", ["lower", "upper"])
def test_a_loss_of_a_sample_that_depends_on_padding_is_refused(label):
    centred = lambda x, y, batch: (batch["a"] @ y["w"] - (batch["a"] @ y["w"]).mean() - batch["b"]) ** 2
    refuse(f"{label}() returns one value per sample, and the mean over real samples was", **{label: centred})


def test_a_loss_of_a_sample_may_depend_on_a_weighted_mean_over_the_batch():
    centred = lambda x, y, batch: (
        (batch["a"] @ y["w"] - (batch["weight"] * (batch["a"] @ y["w"])).sum() - batch["b"]) ** 2 + penalty(x, y)
    )
    assert fb.check_problem(problem("per sample", lower=centred), clients(), show=False).ok


@pytest.mark.parametrize("label", ["lower", "upper"])
def test_a_loss_that_is_weighted_and_not_summed_is_refused(label):
    twice = lambda x, y, batch: batch["weight"] * residuals(x, y, batch) + penalty(x, y)
    refuse(
        "return the loss of each sample by itself, without batch['weight'], which the library multiplies with",
        **{label: twice},
    )


@pytest.mark.parametrize("label", ["lower", "upper"])
def test_a_loss_that_divides_by_the_weight_of_padding_is_refused(label):
    divided = lambda x, y, batch: (
        residuals(x, y, batch) * batch["weight"].clamp(min=0.1) / batch["weight"].clamp(min=0.1) / (batch["weight"] > 0)
    )
    refuse(f"{label}() has a gradient that is not finite on padded samples", **{label: divided})


def test_a_mean_is_refused_with_the_same_sentence_as_before():
    refuse(
        "with two padded samples of weight 0: write (batch['weight'] * loss_per_sample).sum()",
        lower=lambda x, y, batch: residuals(x, y, batch).mean(),
    )


# ---- statistics ------------------------------------------------------------------------------------------------------


def answers(x, y, batch):
    """Right answers of a classifier and the number of samples, sample by sample."""
    right = (batch["a"] @ y["w"][:, None] * torch.arange(CLASSES)).argmax(1) == batch["label"]
    return {"right": right, "n": torch.ones_like(batch["label"]), "loss": functional.relu(batch["b"])}


def masked(x, y, batch):
    real = batch["weight"] > 0
    return {name: (value * real).sum() for name, value in answers(x, y, batch).items()}


def unmasked(x, y, batch):
    return {name: value.sum() for name, value in answers(x, y, batch).items()}


METRICS = lambda sums: {"n": sums["n"], "accuracy": sums["right"] / sums["n"], "mean": sums["loss"] / sums["n"]}


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_statistics_per_sample_count_real_samples_only(strategy):
    """Four ragged clients with 256 test samples, padded to 200 each: a count without a mask gives 800."""
    data = clients()
    y = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
    by_hand = {
        name: sum(
            float(answers(None, {"w": y}, {k: torch.as_tensor(v) for k, v in one["test"].items()})[name].sum())
            for one in data
        )
        for name in ("right", "n", "loss")
    }
    for statistics in (answers, masked):
        made = problem("per sample", statistics={"test": statistics}, metrics=METRICS)
        met = Population(made, data, dtype=torch.float64, strategy=strategy)
        found = met.measure(met.x0, y)
        assert found["n"] == by_hand["n"] == 256
        assert found["accuracy"] == by_hand["right"] / 256
        assert found["mean"] == pytest.approx(by_hand["loss"] / 256, rel=1e-12)


def test_statistics_that_count_padding_are_refused():
    made = problem("per sample", statistics={"test": unmasked}, metrics=METRICS)
    with pytest.raises(
        ProblemError,
        match=r"the statistics of 'test' gave '\w+' = .* with padded samples of weight 0: return one value per sample",
    ):
        fb.check_problem(made, clients())


def test_statistics_are_tried_on_the_first_client_that_has_samples():
    data = clients(tested=(0, 7, 0, 3))
    with pytest.raises(ProblemError, match="with padded samples of weight 0"):
        Population(problem("per sample", statistics={"test": unmasked}, metrics=METRICS), data)
    met = Population(problem("per sample", statistics={"test": answers}, metrics=METRICS), data, dtype=torch.float64)
    assert met.measure(met.x0, met.y0)["n"] == 10


def test_statistics_that_are_not_defined_away_from_the_start_are_tried_there_alone():
    def near(x, y, batch):
        if bool((y["w"] != 0).any()):
            raise ValueError("only at the start")
        return answers(x, y, batch)

    with pytest.warns(UserWarning, match="the statistics of 'test' .* one after another"):
        Population(problem("per sample", statistics={"test": near}, metrics=METRICS), clients())


def test_a_role_without_samples_at_any_client_has_no_statistics():
    met = Population(problem("per sample", statistics={"test": answers}), clients(tested=(0, 0, 0, 0)))
    names, table = met.looked_at(met.x0, met.y0)
    assert table[:, [names.index("right"), names.index("n")]].abs().sum() == 0


def test_values_are_contracted_by_their_shape():
    weight = torch.tensor([0.5, 0.5, 0.0])
    sums = counted(
        {"n": torch.ones(3, dtype=torch.bool), "mean": torch.tensor(2.0), "bad": torch.tensor([1.0, 2.0, torch.nan])},
        weight,
    )
    assert {name: float(value) for name, value in sums.items()} == {"n": 2.0, "mean": 2.0, "bad": 3.0}
    assert float(contracted(torch.tensor(7.0), weight)) == 7.0
    assert float(contracted(torch.tensor([2.0, 4.0, torch.inf]), weight)) == 3.0
