"""A problem met with its clients: private rows with padding, weights, and averages."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.errors import ProblemError
from fedbilevel.oracle import population as module
from fedbilevel.oracle.population import Population
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.quadratic import Quadratic

DIM = 3
SIZES = (5, 2, 7, 1)
PRIVATE = Scopes(upper="private")


def clients(sizes=SIZES):
    """Each client has its own regression; the one at place i is the same whoever else is there."""
    made = []
    for i, num in enumerate(sizes):
        rng = np.random.default_rng(10 + num)
        made.append(
            {
                role: {"a": rng.standard_normal((n, DIM)) + i, "b": rng.standard_normal(n)}
                for role, n in (("train", num), ("val", 2 + i))
            }
        )
    return made


def weighted(x, y, batch):
    """A private weight per sample in a ragged first leaf, and a private scale in a fixed leaf."""
    losses = (batch["a"] @ y["y"] - batch["b"]) ** 2
    return (batch["weight"] * torch.sigmoid(x["logit"][batch["index"]]) * losses).sum() + torch.exp(
        x["scale"]
    ).sum() * (y["y"] ** 2).sum()


def fit(x, y, batch):
    return (batch["weight"] * (batch["a"] @ y["y"] - batch["b"]) ** 2).sum() + (x["scale"] ** 2).sum()


def cleaning(x0=None, **options):
    start = x0 or (
        lambda sizes: {"logit": torch.arange(1.0, sizes["train"] + 1), "scale": torch.tensor([-2.0, sizes["val"]])}
    )
    return Problem(upper=fit, lower=weighted, x0=start, y0={"y": torch.zeros(DIM)}, scopes=PRIVATE, **options)


def test_a_shared_x_is_one_vector_in_the_working_type():
    built = Quadratic(num_clients=3).build()
    for dtype in (torch.float32, torch.float64):
        population = Population(built.problem, built.clients, dtype=dtype)
        assert len(population) == 3
        assert (population.x0.shape, population.x0.dtype) == ((4,), dtype)
        assert (population.y0.shape, population.y0.dtype) == ((6,), dtype)
        assert population.x_sizes is None


def test_a_private_x_is_one_row_per_client_padded_with_zeros():
    population = Population(cleaning(), clients(), dtype=torch.float64)
    assert population.x_sizes.tolist() == [2 + num for num in SIZES]
    assert population.x0.shape == (4, 2 + max(SIZES))
    for i, num in enumerate(SIZES):
        row = population.layout_x.unravel(population.x0[i])
        assert row["scale"].tolist() == [-2.0, 2.0 + i]
        assert row["logit"].tolist() == [*range(1, num + 1), *[0] * (max(SIZES) - num)]


def test_a_private_x_may_be_the_same_block_for_all():
    population = Population(Quadratic(upper="private").build().problem, Quadratic().clients())
    assert population.x0.shape == (5, 4)
    assert population.x_sizes.tolist() == [4] * 5


def test_the_initial_point_is_a_copy_without_a_graph():
    start = torch.nn.Parameter(torch.ones(4))
    made = Quadratic().build()
    problem = Problem(
        upper=made.problem.upper,
        lower=made.problem.lower,
        x0={"x": start},
        y0={"y": torch.nn.Parameter(torch.zeros(6))},
    )
    population = Population(problem, made.clients)
    assert not population.x0.requires_grad
    assert not population.y0.requires_grad
    population.x0.detach().zero_()
    assert start.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("x0", "says"),
    [
        (
            lambda s: {"logit": torch.zeros(s["train"]), "other": torch.zeros(s["val"])},
            "x0 differs in shape between clients in logit, other",
        ),
        (
            lambda s: {"logit": torch.zeros(s["train"], 2)},
            "x0 differs in shape between clients in logit: only one tensor may, and it must have one dimension",
        ),
        (
            lambda s: {"logit" if s["train"] > 2 else "logits": torch.zeros(3)},
            "expected tensors named logit, got logits",
        ),
        (lambda s: torch.zeros(s["train"]), "x0"),
    ],
    ids=["two ragged leaves", "ragged matrix", "other names", "no dict"],
)
def test_private_blocks_that_do_not_fit_together_are_refused(x0, says):
    with pytest.raises(ProblemError) as error:
        Population(cleaning(x0), clients())
    assert says in str(error.value)


def point(population, seed=0):
    """Random rows: x without touching the padding, y of its own for every client."""
    rng = torch.Generator().manual_seed(seed)
    inside = torch.arange(population.x0.shape[1]) < population.x_sizes[:, None]
    x = torch.where(inside, torch.randn(population.x0.shape, generator=rng, dtype=torch.float64), torch.zeros(()))
    return (
        x,
        torch.randn(len(population), DIM, generator=rng, dtype=torch.float64),
        torch.randn(len(population), DIM, generator=rng, dtype=torch.float64),
    )


def derivatives(population, x, y, v):
    everyone = torch.arange(len(population))
    train, val = population.data.batch(everyone, "train"), population.data.batch(everyone, "val")
    oracle = population.oracle
    return {
        "gy": oracle.lower_grad(x, y, train),
        "gx": oracle.lower_grad_x(x, y, train),
        "fx": oracle.upper_grad_x(x, y, val),
        "fy": oracle.upper_grad_y(x, y, val),
        "jv": oracle.jacobian_product(x, y, v, train),
        "hv": oracle.hessian_product(x, y, v, train),
    }


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_padding_has_exactly_zero_gradient(strategy):
    population = Population(cleaning(), clients(), dtype=torch.float64, strategy=strategy)
    x, y, v = point(population)
    got = derivatives(population, x, y, v)
    for i, size in enumerate(population.x_sizes.tolist()):
        for name in ("gx", "fx", "jv"):
            assert bool((got[name][i, size:] == 0).all())
        assert bool((got["gx"][i, :size] != 0).all())
        assert bool((got["jv"][i, :size] != 0).all())


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_a_client_has_the_same_values_with_wider_padding_and_alone(strategy):
    narrow = Population(cleaning(), clients(), dtype=torch.float64, strategy=strategy)
    wide = Population(cleaning(), [*clients(), *clients((19,))], dtype=torch.float64, strategy=strategy)
    x, y, v = point(narrow)
    far = torch.zeros(5, wide.x0.shape[1], dtype=torch.float64)
    far[:4, : x.shape[1]] = x
    here, there = derivatives(narrow, x, y, v), derivatives(wide, far, torch.cat([y, y[:1]]), torch.cat([v, v[:1]]))
    for name, rows in here.items():
        padded = torch.nn.functional.pad(rows, (0, there[name].shape[1] - rows.shape[1]))
        torch.testing.assert_close(
            there[name][:4], padded, rtol=0 if strategy == "loop" else 1e-12, atol=0 if strategy == "loop" else 1e-13
        )
    for i in range(4):
        alone = Population(cleaning(), clients()[i : i + 1], dtype=torch.float64, strategy=strategy)
        own = alone.layout_x.ravel(narrow.layout_x.unravel(x[i, : int(narrow.x_sizes[i])]))
        for name, rows in derivatives(alone, own[None], y[i : i + 1], v[i : i + 1]).items():
            together, single = here[name][i], rows[0]
            if name in ("gx", "fx", "jv"):
                together, single = (
                    narrow.layout_x.unravel(together[: narrow.x_sizes[i]]),
                    alone.layout_x.unravel(single),
                )
            else:
                together, single = {"y": together}, {"y": single}
            for leaf in together:
                torch.testing.assert_close(single[leaf], together[leaf], rtol=1e-12, atol=1e-13)


def test_a_private_row_is_laid_out_the_same_alone_and_with_others():
    together = Population(cleaning(), clients(), dtype=torch.float64)
    for i in range(4):
        alone = Population(cleaning(), clients()[i : i + 1], dtype=torch.float64)
        scale = together.layout_x.unravel(together.x0[i])["scale"]
        assert torch.equal(alone.layout_x.unravel(alone.x0[0])["scale"], scale)
        assert torch.equal(alone.x0[0], together.x0[i, : int(together.x_sizes[i])])


@pytest.mark.parametrize("sizes", [SIZES, (3, 3)], ids=["ragged", "equal"])
def test_unpad_stores_private_rows_without_padding_and_pad_brings_it_back(sizes):
    population = Population(cleaning(), clients(sizes), dtype=torch.float64)
    x, _, _ = point(population)
    everyone = torch.arange(len(population))
    stored = population.unpad(x, everyone)
    assert stored.numel() == sum(sizes) + 2 * len(sizes)
    assert torch.equal(population.pad(stored, everyone), x)


def test_a_shared_x_has_no_padding_to_remove():
    built = Quadratic(num_clients=3).build()
    population = Population(built.problem, built.clients)
    rows = torch.ones(3, 4)
    assert torch.equal(population.pad(population.unpad(rows, torch.arange(3)), torch.arange(3)), rows)


def test_clients_count_the_same_or_by_their_training_samples():
    some = torch.tensor([2, 0])
    assert Population(cleaning(), clients()).weights(some).tolist() == [1, 1]
    assert Population(cleaning(client_weights="by_samples"), clients()).weights(some).tolist() == [7, 5]


@given(st.integers(1, 8), st.integers(0, 999))
def test_an_average_is_the_weighted_mean_and_leaves_no_trace_of_the_order(num, seed):
    population = Population(cleaning(), clients())
    rng = np.random.default_rng(seed)
    rows = torch.as_tensor(rng.standard_normal((num, 9)) * 10.0 ** rng.integers(-6, 6, (num, 1)), dtype=torch.float32)
    weights, order = torch.as_tensor(rng.integers(1, 50, num)), torch.as_tensor(rng.permutation(num))
    for shares in (weights, torch.ones(num, dtype=torch.int64)):
        got = population.average(rows, shares)
        assert got.dtype == torch.float32
        expected = np.average(rows.double().numpy(), axis=0, weights=shares.numpy())
        torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)
        assert torch.equal(population.average(rows[order], shares[order]), got)


def test_a_client_twice_counts_as_one_of_double_weight():
    population = Population(cleaning(), clients())
    rows = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    twice = population.average(rows[[0, 1, 1, 2]], torch.ones(4, dtype=torch.int64))
    torch.testing.assert_close(population.average(rows, torch.tensor([1, 2, 1])), twice, rtol=1e-14, atol=0)


def measurable(**options):
    """Statistics of a role that one client lacks, and a figure that needs every client's own."""
    count = lambda x, y, batch: {
        "right": ((batch["weight"] > 0) & (batch["a"] @ y["y"] > batch["b"])).sum(),
        "seen": (batch["weight"] > 0).sum(),
    }
    return cleaning(
        statistics={"test": count},
        metrics=lambda sums: {"accuracy": sums["right"] / sums["seen"]},
        across=lambda found: {f"right_{i}": float(value) for i, value in enumerate(found["right"])},
        **options,
    )


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
@pytest.mark.parametrize("budget", [1, 200, 400, 900])
def test_measuring_a_few_clients_at_a_time_is_measuring_all(monkeypatch, budget, weights):
    sizes = (5, 2, 7, 1, 3, 3)
    holdings = [
        {**client, "test": {name: value[: i % 3] for name, value in client["val"].items()}}
        for i, client in enumerate(clients(sizes))
    ]
    population = Population(measurable(client_weights=weights), holdings, dtype=torch.float64)
    x, y = point(population)[0], torch.randn(6, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    asked, real = [], population.data.look
    monkeypatch.setattr(
        population.data, "look", lambda positions, role: asked.append(positions.tolist()) or real(positions, role)
    )
    whole = population.measure(x, y)
    assert asked == [list(range(6))] * 3
    by_hand = [
        population.oracle.evaluate(fit, x[i : i + 1], y[i], population.data.batch(torch.tensor([i]), "val"))
        for i in range(6)
    ]
    share = population.weights(torch.arange(6)).double()
    assert whole["upper_loss"] == pytest.approx(float((torch.cat(by_hand) * share).sum() / share.sum()), rel=1e-12)
    monkeypatch.setattr(module, "_LOOK", budget)
    for points in ((x, y), (lambda some: x[some], y), (x, lambda some: y[some])):
        asked.clear()
        assert population.measure(*points) == pytest.approx(whole, rel=1e-12)
        assert len(asked) > 3
        assert len(asked[0]) < 6
        assert [i for some in asked for i in some] == [*range(6)] * 3


def test_look_keeps_the_cached_batch_and_copies_nothing_for_adjacent_equal_clients():
    population = Population(cleaning(), clients((4, 4, 4, 2)), dtype=torch.float64)
    data = population.data
    kept = data.batch(torch.tensor([1, 3]), "train")
    population.measure(population.x0, population.y0)
    assert data.batch(torch.tensor([1, 3]), "train") is kept
    assert set(data._whole) == {"train"}
    assert data.look(torch.tensor([1, 3]), "train") is kept
    for run, shared in ((torch.tensor([1, 2]), True), (torch.tensor([2, 3]), False), (torch.tensor([0, 2]), False)):
        looked, whole = data.look(run, "train"), data.batch(run, "train")
        assert (looked.fields["a"].data_ptr() == data.fields["train"]["a"][4:].data_ptr()) == shared
        assert looked.fields.keys() == whole.fields.keys()
        assert all(torch.equal(value, whole.fields[name]) for name, value in looked.fields.items())
        assert torch.equal(looked.counts, whole.counts)


def test_rows_of_a_few_clients_are_padded_as_wide_as_those_of_all():
    population = Population(cleaning(), clients(), dtype=torch.float64)
    few = torch.tensor([3, 1])
    assert torch.equal(population.pad(population.unpad(population.x0[few], few), few), population.x0[few])


@pytest.mark.parametrize("lower", ["global", "local"])
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
@pytest.mark.parametrize("at_once", [1, 2**27])
def test_residuals_are_those_of_dense_algebra(lower, weights, at_once, monkeypatch):
    """Every client at its own point, a few at a time, with any weights; the run's oracle is unchanged."""
    monkeypatch.setattr(module, "_LOOK", at_once)
    task = Quadratic(num_clients=3, lower=lower, client_weights=weights, cross=0.3)
    built = task.build()
    population = Population(built.problem, built.clients, dtype=torch.float64)
    rng = np.random.default_rng(0)
    x, y, u = (rng.standard_normal((3, d)) for d in (4, 6, 6))
    share = (
        np.array([len(one["train"]["A"]) for one in built.clients], float) if weights == "by_samples" else np.ones(3)
    )
    share /= share.sum()
    g, right, system = [], [], []
    for i, one in enumerate(built.clients):
        train, val = (
            {name: np.asarray(value).mean(0) for name, value in one[role].items()} for role in ("train", "val")
        )
        g.append(train["A"] @ y[i] - train["B"] @ x[i] - train["c"])
        right.append(
            np.mean(
                [np.asarray(D) @ (y[i] - np.asarray(t)) for D, t in zip(one["val"]["D"], one["val"]["t"], strict=True)],
                0,
            )
            + 0.3 * val["E"] @ x[i]
        )
        system.append(train["A"] @ u[i] - right[-1])
    size = lambda rows: (
        np.sqrt((share * (np.array(rows) ** 2).sum(1)).sum())
        if lower == "local"
        else np.linalg.norm(share @ np.array(rows))
    )
    found = population.residuals(*(torch.tensor(value) for value in (x, y, u)))
    assert found["lower_gradient"] == pytest.approx(size(g), rel=1e-12)
    assert found["residual"] == pytest.approx(size(system) / size(right), rel=1e-12)
    assert population.residuals(torch.tensor(x), torch.tensor(y), None) == {
        "lower_gradient": pytest.approx(size(g), rel=1e-12)
    }
    assert not population.oracle._plans
