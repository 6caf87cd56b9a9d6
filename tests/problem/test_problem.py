"""Named tensors as flat vectors, and errors for invalid problems before anything runs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Problem, Scopes, with_features

DIM = 3


def clients(num=3, sizes=(4, 2, 6)):
    """Ragged and heterogeneous: each client has its own regression."""
    rng = np.random.default_rng(3)
    made = []
    for i in range(num):
        truth = rng.standard_normal(DIM)
        roles = {}
        for role, n in (("train", sizes[i]), ("val", 2 + i)):
            a = rng.standard_normal((n, DIM)) + i
            roles[role] = {"a": a, "b": a @ truth + 0.1 * rng.standard_normal(n)}
        made.append(roles)
    return made


def ridge(x, y, batch):
    """Lower: least squares with a weight per coordinate."""
    return (batch["weight"] * (batch["a"] @ y["y"] - batch["b"]) ** 2).sum() + (torch.exp(x["x"]) * y["y"] ** 2).sum()


def fit(x, y, batch):
    return (batch["weight"] * (batch["a"] @ y["y"] - batch["b"]) ** 2).sum()


def problem(**changes):
    return Problem(
        **{"upper": fit, "lower": ridge, "x0": {"x": torch.zeros(DIM)}, "y0": {"y": torch.zeros(DIM)}, **changes}
    )


def refuse(says, /, *, data=None, **changes):
    with pytest.raises(ProblemError) as error:
        Population(problem(**changes), clients() if data is None else data, dtype=torch.float64)
    assert says in str(error.value)


def test_the_good_problem_is_accepted():
    population = Population(problem(), clients(), dtype=torch.float64)
    assert population.x0.shape == population.y0.shape == (DIM,)


# ---- layouts ---------------------------------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes, st.booleans(), st.integers(0, 5))
def test_ravel_and_unravel_are_inverse(shapes, with_ragged, length):
    rng = np.random.default_rng(0)
    tree = {f"t{i}": torch.as_tensor(rng.standard_normal(shape)) for i, shape in enumerate(shapes)}
    if with_ragged:
        tree = {"long": torch.as_tensor(rng.standard_normal(length)), **tree}  # first in the dict, last in the vector
    layout = Layout(tree, "long" if with_ragged else None)
    vector = layout.ravel(tree)
    assert vector.shape == (sum(leaf.numel() for leaf in tree.values()),)
    back = layout.unravel(vector)
    assert set(back) == set(tree)
    assert all(torch.equal(back[name], tree[name]) for name in tree)
    if with_ragged:
        assert torch.equal(vector[layout.num_fixed :], tree["long"])


def test_unravel_gives_views():
    layout = Layout({"a": torch.zeros(2, 2), "b": torch.zeros(3)})
    vector = torch.arange(7.0)
    tree = layout.unravel(vector)
    tree["a"][1, 0] = 50.0
    tree["b"] -= 1
    assert vector.tolist() == [0, 1, 50, 3, 3, 4, 5]
    assert layout.describe() == {"a": [2, 2], "b": [3]}


def test_padding_belongs_to_the_ragged_leaf():
    layout = Layout({"long": torch.zeros(2), "scale": torch.zeros(1)}, "long")
    tree = layout.unravel(torch.tensor([9.0, 1.0, 2.0, 0.0, 0.0]))
    assert tree["scale"].tolist() == [9.0]
    assert tree["long"].tolist() == [1.0, 2.0, 0.0, 0.0]
    assert layout.describe() == {"scale": [1], "long": "ragged"}


def test_ravel_refuses_other_names():
    layout = Layout({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ProblemError, match="expected tensors named a, b, got a, c"):
        layout.ravel({"a": torch.zeros(2), "c": torch.zeros(3)})


# ---- what is wrong with the problem itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scopes": Scopes(lower="locals")}, "scopes.lower is 'locals', expected 'global' or 'local'"),
        ({"scopes": Scopes(upper="global")}, "scopes.upper is 'global', expected 'shared' or 'private'"),
        ({"client_weights": "by_size"}, "client_weights is 'by_size', expected 'equal' or 'by_samples'"),
        (
            {"x0": lambda sizes: {"x": torch.zeros(DIM)}},
            "x0 is a function of the client's sizes, which only a private x can be",
        ),
        ({"x0": {}}, "x0 must be a dict of named tensors with at least one entry, got an empty dict"),
        ({"x0": torch.zeros(3)}, "x0 must be a dict of named tensors with at least one entry, got Tensor"),
        ({"x0": {"x": [0.0, 0.0]}}, "x0 must be a dict of named tensors"),
        ({"y0": {"y": np.zeros(3)}}, "y0 must be a dict of named tensors"),
        ({"y0": {}}, "y0 must be a dict of named tensors"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused_when_made(changes, says):
    with pytest.raises(ProblemError) as error:
        problem(**changes)
    assert says in str(error.value)


def test_y0_cannot_be_a_function():
    with pytest.raises(ProblemError, match="y0 must be a dict of named tensors"):
        problem(y0=lambda sizes: {"y": torch.zeros(DIM)})


# ---- what is wrong with the losses -----------------------------------------------------------------------------------


def test_a_lower_loss_that_ignores_y_is_refused():
    refuse(
        "lower() does not depend on y['y'], so y*(x) is not determined",
        lower=lambda x, y, batch: (batch["weight"] * batch["b"]).sum() * x["x"].sum(),
    )
    refuse("lower() does not depend on y['y']", lower=lambda x, y, batch: (batch["weight"] * batch["b"]).sum())


def test_a_lower_loss_that_ignores_one_leaf_of_y_names_that_leaf():
    refuse("lower() does not depend on y['bias']", y0={"y": torch.zeros(DIM), "bias": torch.zeros(1)})


def test_an_upper_loss_may_ignore_x_or_a_leaf_of_y():
    Population(problem(upper=lambda x, y, batch: (y["y"] ** 2).sum()), clients())
    Population(problem(upper=lambda x, y, batch: (x["x"] ** 2).sum()), clients())


@pytest.mark.parametrize("label", ["lower", "upper"])
def test_a_loss_must_return_one_real_number_or_one_per_sample(label):
    n = {"lower": 4, "upper": 2}[label]
    error = lambda y, batch: batch["a"] @ y["y"] - batch["b"]
    wrong = {
        f"a tensor of shape ({n}, 1) and type torch.float64": lambda x, y, batch: (error(y, batch) ** 2)[:, None],
        f"a tensor of shape ({n + 1},) and type torch.float64": lambda x, y, batch: torch.cat(
            [error(y, batch) ** 2, (y["y"] ** 2).sum()[None]]
        ),
        f"a tensor of shape ({n},) and type torch.int64": lambda x, y, batch: error(y, batch).to(torch.int64),
        "a tensor of shape () and type torch.int64": lambda x, y, batch: ridge(x, y, batch).to(torch.int64),
        "float": lambda x, y, batch: ridge(x, y, batch).item(),
        "NoneType": lambda x, y, batch: None,
    }
    for got, loss in wrong.items():
        refuse(
            f"{label}() returned {got} on {n} samples, expected a tensor of floats with one value per sample, shape "
            f"({n},), or a scalar",
            **{label: loss},
        )


@pytest.mark.parametrize("label", ["lower", "upper"])
def test_a_mean_over_samples_instead_of_the_weights_is_refused(label):
    def mean(x, y, batch):
        return ((batch["a"] @ y["y"] - batch["b"]) ** 2).mean() + (torch.exp(x["x"]) * y["y"] ** 2).sum()

    refuse(f"{label}() gave", **{label: mean})
    refuse("with two padded samples of weight 0: write (batch['weight'] * loss_per_sample).sum()", **{label: mean})
    refuse(
        "with two padded samples of weight 0",
        **{label: lambda x, y, batch: ((batch["a"] @ y["y"] - batch["b"]) ** 2).sum() + (y["y"] ** 2).sum()},
    )


def test_a_mean_over_samples_is_refused_also_when_the_first_client_has_one_sample():
    def mean(x, y, batch):
        return ((batch["a"] @ y["y"] - batch["b"]) ** 2).mean() + (torch.exp(x["x"]) * y["y"] ** 2).sum()

    refuse("with two padded samples of weight 0", lower=mean, data=clients(sizes=(1, 5, 3)))


@pytest.mark.parametrize("label", ["lower", "upper"])
def test_a_loss_that_draws_random_numbers_is_refused(label):
    refuse(f"{label}() gave", **{label: lambda x, y, batch: ridge(x, y, batch) * (1 + torch.rand(()))})
    refuse(
        "for the same input: a loss must not draw random numbers",
        **{label: lambda x, y, batch: ridge(x, y, batch) + torch.randn(()) * y["y"].sum() + torch.rand(())},
    )


def test_a_loss_that_fails_is_named_with_its_reason_and_the_shapes():
    refuse("KeyError: 'image'", lower=lambda x, y, batch: batch["image"].sum())
    refuse(
        "on a batch of the first client of shapes {'index': (4,), 'weight': (4,), 'a': (4, 3), 'b': (4,)}",
        lower=lambda x, y, batch: (batch["a"] @ torch.zeros(5)).sum(),
    )
    refuse("upper() failed on a batch of the first client of shapes {'index'", upper=lambda x, y: y["y"].sum())


def test_a_loss_that_is_not_finite_at_the_start_is_refused():
    refuse(
        "lower() is inf at the initial point on the first client",
        lower=lambda x, y, batch: ridge(x, y, batch) + 1 / (y["y"] ** 2).sum(),
    )
    refuse("upper() is nan at the initial point", upper=lambda x, y, batch: torch.log(y["y"].sum() - 1))


def test_a_problem_can_be_met_with_data_where_gradients_are_switched_off():
    with torch.no_grad():
        population = Population(problem(), clients())
    assert population.y0.shape == (DIM,)


# ---- noise inside a plain function -----------------------------------------------------------------------------------

NOISY = {
    "dropout": lambda a: functional.dropout(a, 0.3),
    "dropout by position": lambda a: functional.dropout(a, 0.3, True),
    "dropout of torch": lambda a: torch.dropout(a, 0.3, True),
    "dropout1d": lambda a: functional.dropout1d(a[None], 0.3)[0],
    "alpha dropout": lambda a: functional.alpha_dropout(a, 0.3, training=True),
    "feature alpha dropout": lambda a: functional.feature_alpha_dropout(a, 0.3, training=True),
    "a dropout module": nn.Dropout(0.3),
}


@pytest.mark.parametrize("label", ["lower", "upper"])
@pytest.mark.parametrize("noise", NOISY.values(), ids=NOISY)
def test_dropout_inside_a_plain_function_is_refused(label, noise):
    refuse(
        f"{label}() uses dropout in training mode",
        **{label: lambda x, y, batch: ridge(x, y, {**batch, "a": noise(batch["a"])})},
    )


@pytest.mark.parametrize(
    "noise",
    [lambda a: functional.batch_norm(a, None, None, training=True), nn.BatchNorm1d(DIM, affine=False).double()],
    ids=["function", "module"],
)
def test_batch_norm_inside_a_plain_function_is_refused(noise):
    refuse(
        "lower() uses batch norm in training mode",
        lower=lambda x, y, batch: ridge(x, y, {**batch, "a": noise(batch["a"])}),
    )
    refuse(
        "use GroupNorm or LayerNorm, or put a module that tracks",
        upper=lambda x, y, batch: fit(x, y, {**batch, "a": noise(batch["a"])}),
    )


QUIET = {
    "dropout that is off": lambda a: functional.dropout(a, 0.3, training=False),
    "dropout of nothing": lambda a: functional.dropout(a, 0.0),
    "a dropout module in eval mode": nn.Dropout(0.3).eval(),
    "batch norm with fixed statistics": lambda a: functional.batch_norm(
        a, a.new_full((DIM,), 0.5), a.new_full((DIM,), 2.0), training=False
    ),
    "a batch norm module in eval mode": nn.BatchNorm1d(DIM, affine=False).double().eval(),
    "layer norm": lambda a: functional.layer_norm(a, (DIM,)),
}


@pytest.mark.parametrize("quiet", QUIET.values(), ids=QUIET)
def test_layers_that_treat_each_sample_alone_are_allowed(quiet):
    def lower(x, y, batch):
        return ridge(x, y, {**batch, "a": quiet(batch["a"])})

    population = Population(problem(lower=lower), clients(), dtype=torch.float64)
    batch = population.data.batch(torch.arange(3), "train")
    rows = population.oracle.lower_grad(population.x0, population.y0 + 1, batch)
    for i in range(3):
        y = torch.ones(DIM, dtype=torch.float64, requires_grad=True)
        (expected,) = torch.autograd.grad(lower({"x": population.x0}, {"y": y}, batch.row(i)), y)
        torch.testing.assert_close(rows[i], expected, rtol=1e-12, atol=1e-12)


def test_features_enter_a_batch_once():
    calls = []

    def features(x, batch):
        calls.append(1)
        return batch["a"] * x["x"]

    plain, rich = problem(), problem(features=features)
    fields, x = {"a": torch.ones(2, DIM)}, {"x": torch.arange(3.0)}
    assert with_features(plain, x, fields) is fields
    once = with_features(rich, x, fields)
    assert torch.equal(once["features"], torch.arange(3.0).expand(2, 3))
    assert with_features(rich, x, once) is once
    assert len(calls) == 1


def test_a_mean_over_padding_is_found_also_where_every_sample_has_the_same_loss():
    """At y = 0 the cross-entropy of every sample is log C."""
    data = [
        {role: {"a": torch.randn(3 + i, 2), "t": torch.arange(3 + i) % 3} for role in ("train", "val")}
        for i in range(3)
    ]
    loss = lambda x, y, batch: (
        nn.functional.cross_entropy(batch["a"] @ y["w"], batch["t"]) + (x["x"] ** 2 + y["w"] ** 2).sum()
    )
    bad = Problem(upper=loss, lower=loss, x0={"x": torch.zeros(1)}, y0={"w": torch.zeros(2, 3)})
    with pytest.raises(ProblemError, match="with two padded samples of weight 0"):
        Population(bad, data)


def test_a_loss_that_is_defined_only_near_the_start_is_not_refused_for_it():
    safe = problem(lower=lambda x, y, batch: ridge(x, y, batch) + torch.log(0.05 + y["y"]).sum())
    Population(safe, clients(), dtype=torch.float64)
