"""Every derivative of every strategy against derivatives taken client by client.

The reference uses no code of the library. Finite differences are a second reference.
"""

import dataclasses
import math
import shutil
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.oracle import evaluation
from fedbilevel.oracle.population import Population
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built

STRATEGIES = {
    "vmap": {"strategy": "vmap"},
    "loop": {"strategy": "loop"},
    "chunks": {"strategy": "vmap", "chunk_size": 2},
    "auto": {"strategy": "auto"},
    "auto in chunks": {"strategy": "auto", "chunk_size": 2},
    "traced": {"often": {"cpu": 1}},
    "measured": {"long": 0.0},
}
KINDS = {name: STRATEGIES[name] for name in ("vmap", "loop", "chunks", "traced")}  # auto is one of these
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def quadratic():
    return Quadratic(num_clients=3, dim_upper=3, dim_lower=4, num_samples=2, bend=0.5).build()


def cleaning():
    """Three clients with 5, 9 and 13 noisy training images and 1, 2 and 3 clean ones."""
    built = DataCleaning(num_clients=3, num_clean=3, test_share=0.9, l2=0.1).build()
    keep = [{"train": 5 + 4 * i, "val": 1 + i, "test": 2} for i in range(3)]
    return Built(
        built.problem,
        [
            {r: {f: v[: sizes[r]] for f, v in fs.items()} for r, fs in c.items()}
            for c, sizes in zip(built.clients, keep, strict=True)
        ],
    )


def encode(net, batch):
    return net(batch["image"])


def represent(net, head, batch, features):
    fit = cross_entropy(head(features), batch["label"], reduction="none")
    return (batch["weight"] * fit).sum() + 0.05 * sum((p**2).sum() for p in head.parameters.values())


def images():
    rng = np.random.default_rng(1)
    return [
        {
            role: {"image": rng.standard_normal((n, 5)) + i, "label": rng.integers(0, 3, n)}
            for role, n in (("train", 3 + 2 * i), ("val", 2 + i))
        }
        for i in range(3)
    ]


def representation(*, cached, calls=None):
    """Hyper-representation through modules: the encoder is x, the head is y.

    With `cached` the losses read batch["features"].
    """
    torch.manual_seed(4)
    net, head = nn.Sequential(nn.Linear(5, 4), nn.Tanh()).double(), nn.Linear(4, 3).double()

    def features(net, batch):
        if calls is not None:
            calls.append(len(batch["label"]))
        return encode(net, batch)

    if cached:
        loss = lambda net, head, batch: represent(net, head, batch, batch["features"])
        return Built(Problem.from_modules(net, head, upper=loss, lower=loss, features=features), images())
    loss = lambda net, head, batch: represent(net, head, batch, encode(net, batch))
    return Built(Problem.from_modules(net, head, upper=loss, lower=loss), images())


def representation_in_dicts(*, cached):
    """The same on plain dicts, with an x whose leaf `tilt` enters the lower loss beside the features."""

    def encoded(x, batch):
        return torch.tanh(batch["image"] @ x["w"])

    def loss(x, y, batch):
        seen = batch["features"] if cached else encoded(x, batch)
        fit = cross_entropy(seen @ y["head"] + x["tilt"], batch["label"], reduction="none")
        return (batch["weight"] * fit).sum() + 0.05 * (y["head"] ** 2).sum()

    rng = np.random.default_rng(2)
    x0 = {"w": torch.as_tensor(rng.standard_normal((5, 4)) / 2), "tilt": torch.as_tensor(rng.standard_normal(3))}
    y0 = {"head": torch.as_tensor(rng.standard_normal((4, 3)))}
    return Built(Problem(upper=loss, lower=loss, x0=x0, y0=y0, features=encoded if cached else None), images())


def meet(built, *, often=None, long=None, **options):
    """A population whose oracle traces from call `often` on and times calls of >= `long` seconds.

    Without `long` nothing is measured, so that a loaded machine changes no choice.
    """
    population = Population(built.problem, built.clients, **{"dtype": torch.float64, **options})
    population.oracle.often = often or population.oracle.often
    population.oracle.long = math.inf if long is None else long
    return population


def point(population, seed=0, *, shared_x=False, shared_y=False, shared_v=False):
    """A random point away from the initial one; padding of a private x stays zero."""
    rng = torch.Generator().manual_seed(seed)
    dims = (population.x0.shape[-1], len(population.y0), len(population.y0))
    x, y, v = (
        torch.randn((dim,) if shared else (len(population), dim), generator=rng, dtype=torch.float64).to(
            population.dtype
        )
        for dim, shared in zip(dims, (shared_x, shared_y, shared_v), strict=True)
    )
    if population.x_sizes is not None:
        x = torch.where(torch.arange(dims[0]) < population.x_sizes[:, None], x, torch.zeros((), dtype=x.dtype))
    return x, y, v


def whole(population, role):
    return population.data.batch(torch.arange(len(population)), role)


def mini(population, role, seed, width=3):
    """Samples drawn with replacement, so that some come twice."""
    rng = np.random.default_rng(seed)
    index = [rng.integers(0, size, width) for size in population.data.sizes[role].tolist()]
    return population.data.batch(torch.arange(len(population)), role, torch.as_tensor(np.stack(index)))


def derivatives(population, x, y, v, train, val):
    o = population.oracle
    fx, fy = o.upper_grads(x, y, val)
    jv, hv = o.second_order(x, y, v, train)
    return {
        "gy": o.lower_grad(x, y, train),
        "gx": o.lower_grad_x(x, y, train),
        "fx": o.upper_grad_x(x, y, val),
        "fy": o.upper_grad_y(x, y, val),
        "jv": o.jacobian_product(x, y, v, train),
        "hv": o.hessian_product(x, y, v, train),
        "fx of both": fx,
        "fy of both": fy,
        "jv of both": jv,
        "hv of both": hv,
    }


def raw_batch(client, role, index=None):
    """A batch made from the arrays as the user gave them."""
    fields = {name: torch.as_tensor(value) for name, value in client[role].items()}
    fields = {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}
    num = len(next(iter(fields.values())))
    index = torch.arange(num) if index is None else index
    return {
        "index": index,
        "weight": torch.full((len(index),), 1 / len(index), dtype=torch.float64),
        **{name: value[index] for name, value in fields.items()},
    }


def losses(built, population, i, index=None):
    """f_i and g_i as functions of flat vectors."""
    index = index or {}
    train, val = (
        raw_batch(built.clients[i], "train", index.get("train")),
        raw_batch(built.clients[i], "val", index.get("val")),
    )
    unravel_x, unravel_y = population.layout_x.unravel, population.layout_y.unravel
    features = built.problem.features

    def on(loss, batch):
        def flat(x, y):
            seen = batch if features is None else {**batch, "features": features(unravel_x(x), batch)}
            value = loss(unravel_x(x), unravel_y(y), seen)
            return (batch["weight"] * value).sum() if value.ndim else value  # one value per sample, or their sum

        return flat

    return on(built.problem.upper, val), on(built.problem.lower, train)


def row(vector, i):
    return vector if vector.ndim == 1 else vector[i]


def reference(built, population, x, y, v, index=None):
    """Each client alone, with plain reverse mode and full second derivatives."""
    rows = []
    for i in range(len(population)):
        f, g = losses(
            built, population, i, None if index is None else {role: places[i] for role, places in index.items()}
        )
        at = tuple(row(w, i).detach().clone().requires_grad_() for w in (x, y))
        fx, fy = torch.autograd.grad(f(*at), at, allow_unused=True, materialize_grads=True)
        gx, gy = torch.autograd.grad(g(*at), at, allow_unused=True, materialize_grads=True)
        (_, _), (g_yx, g_yy) = torch.autograd.functional.hessian(g, tuple(a.detach() for a in at), vectorize=True)
        rows.append({"gy": gy, "gx": gx, "fx": fx, "fy": fy, "jv": g_yx.T @ row(v, i), "hv": g_yy @ row(v, i)})
    return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


def assert_same(got, expected, **tolerance):
    for name, value in expected.items():
        for label in (name, f"{name} of both"):
            if label in got:
                torch.testing.assert_close(
                    got[label], value, **(tolerance or CLOSE), msg=lambda text, label=label: f"{label}: {text}"
                )


PROBLEMS = {
    "quadratic": quadratic,
    "cleaning": cleaning,
    "representation": lambda: representation(cached=False),
    "representation with features": lambda: representation(cached=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_all_derivatives_on_whole_batches_equal_those_taken_client_by_client(make):
    built = make()
    expected = None
    for options in STRATEGIES.values():
        population = meet(built, **options)
        at = point(population)
        expected = expected or reference(built, population, *at)
        for _ in range(
            1 + ("often" in options)
        ):  # the first call of a derivative finds out about it, the second is traced
            assert_same(derivatives(population, *at, whole(population, "train"), whole(population, "val")), expected)
        assert "often" not in options or any(plan.trace is not None for plan in population.oracle._plans.values())


@pytest.mark.slow
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_all_derivatives_on_minibatches_equal_those_taken_client_by_client(make):
    built = make()
    expected = None
    for options in STRATEGIES.values():
        population = meet(built, **options)
        at, train, val = point(population), mini(population, "train", 0), mini(population, "val", 1)
        expected = expected or reference(
            built, population, *at, {"train": train.fields["index"], "val": val.fields["index"]}
        )
        for _ in range(1 + ("often" in options)):
            assert_same(derivatives(population, *at, train, val), expected)


def slope(function, direction, h=1e-5):
    """Central difference, with the leading error removed by a second step."""
    coarse, fine = ((function(s * direction) - function(-s * direction)) / (2 * s) for s in (h, h / 2))
    return (4 * fine - coarse) / 3


def slopes(f, g, x, y, v, dx, dy):
    """Every derivative of one client along dx or dy, from values of the losses alone.

    <grad_y g, v> is itself a difference.
    """
    along_v = lambda x, y: slope(lambda t: g(x, y + t), v, h=1e-3)
    return {
        "gy": (slope(lambda t: g(x, y + t), dy), dy),
        "gx": (slope(lambda t: g(x + t, y), dx), dx),
        "fx": (slope(lambda t: f(x + t, y), dx), dx),
        "fy": (slope(lambda t: f(x, y + t), dy), dy),
        "jv": (slope(lambda t: along_v(x + t, y), dx, h=1e-3), dx),
        "hv": (slope(lambda t: along_v(x, y + t), dy, h=1e-3), dy),
    }


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_all_derivatives_equal_finite_differences(make):
    built = make()
    population = meet(built)
    x, y, v = point(population)
    got = derivatives(population, x, y, v, whole(population, "train"), whole(population, "val"))
    directions_x, directions_y, _ = point(population, seed=9)
    for i in range(len(population)):
        for name, (value, direction) in slopes(
            *losses(built, population, i), x[i], y[i], v[i], directions_x[i], directions_y[i]
        ).items():
            torch.testing.assert_close(
                got[name][i] @ direction, value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "make", [quadratic, lambda: representation(cached=True)], ids=["quadratic", "representation with features"]
)
def test_shared_vectors_equal_the_same_vector_in_every_row(options, make):
    population = meet(make(), **options)
    train, val = whole(population, "train"), mini(population, "val", 3)
    for shared in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        at = point(population, shared_x=shared[0], shared_y=shared[1], shared_v=shared[2])
        got = derivatives(population, *at, train, val)
        views = [w.expand(len(population), -1) if w.ndim == 1 else w for w in at]
        assert_same(derivatives(population, *views, train, val), got)
        assert_same(derivatives(population, *(w.clone() for w in views), train, val), got)
        assert all(len(value) == len(population) for value in got.values())


def test_a_shared_point_gives_rows_that_differ_because_clients_differ():
    population = meet(quadratic())
    at = point(population, shared_x=True, shared_y=True, shared_v=True)
    for name, rows in derivatives(population, *at, whole(population, "train"), whole(population, "val")).items():
        assert bool((rows[0] - rows[1]).abs().max() > 0.1), name


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clients_give_no_rows_of_the_right_width_and_type(options, make, dtype):
    population = meet(make(), dtype=dtype, **options)
    nobody = torch.zeros(0, dtype=torch.int64)
    dx, dy = population.x0.shape[-1], len(population.y0)
    widths = {"gy": dy, "gx": dx, "fx": dx, "fy": dy, "jv": dx, "hv": dy}
    shared = [population.y0.new_zeros(dim) for dim in (dx, dy, dy)]
    for index in (None, torch.zeros(0, 3, dtype=torch.int64)):
        train, val = (population.data.batch(nobody, role, index) for role in ("train", "val"))
        for at in (
            [w.new_zeros(0, len(w)) for w in shared],
            [w.expand(0, -1) for w in shared],
            *([] if population.x_sizes is not None else [shared]),
        ):
            got = derivatives(population, *at, train, val)
            for name, value in got.items():
                assert (tuple(value.shape), value.dtype) == ((0, widths[name.split()[0]]), dtype), name
            three = population.oracle.directions(*at, gy=train, fx=val, fy=val, ju=train, hu=train)
            assert [tuple(part.shape) for part in three] == [(0, dx), (0, dy), (0, dy)]


SHARING = {  # which of gy, fx, fy, ju, hu take the same batch object
    "five batches": (0, 1, 2, 3, 4),
    "one upper": (0, 1, 1, 3, 4),
    "one for second order": (0, 1, 2, 3, 3),
    "one upper, one lower": (0, 1, 1, 0, 0),
    "gradient shares with J only": (0, 1, 2, 0, 4),
    "gradient shares with H only": (0, 1, 2, 3, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_directions_equal_their_parts(options, make):
    population = meet(make(), **options)
    o, (x, y, u) = population.oracle, point(population)
    for sharing in SHARING.values():
        drawn = {}
        gy, fx, fy, ju, hu = (
            drawn.setdefault(s, mini(population, role, s))
            for s, role in zip(sharing, ("train", "val", "val", "train", "train"), strict=True)
        )
        got = o.directions(x, y, u, gy=gy, fx=fx, fy=fy, ju=ju, hu=hu)
        expected = (
            o.upper_grad_x(x, y, fx) - o.jacobian_product(x, y, u, ju),
            o.lower_grad(x, y, gy),
            o.hessian_product(x, y, u, hu) - o.upper_grad_y(x, y, fy),
        )
        torch.testing.assert_close(got, expected, **CLOSE)
    train, val = whole(population, "train"), whole(population, "val")
    got = o.directions(x, y, u, gy=train, fx=val, fy=val, ju=train, hu=train)
    parts = derivatives(population, x, y, u, train, val)
    torch.testing.assert_close(got, (parts["fx"] - parts["jv"], parts["gy"], parts["hv"] - parts["fy"]), **CLOSE)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_evaluate_gives_each_clients_own_loss(options):
    built = cleaning()
    population = meet(built, **options)
    x, y, _ = point(population)
    values = population.oracle.evaluate(built.problem.lower, x, y, whole(population, "train"))
    for i in range(3):
        torch.testing.assert_close(values[i], losses(built, population, i)[1](x[i], y[i]), **CLOSE)
    counted = population.oracle.evaluate(
        lambda x, y, batch: {"num": (batch["weight"] > 0).sum()}, x, y, whole(population, "train")
    )
    assert counted["num"].tolist() == [5, 9, 13]


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "make", [quadratic, lambda: representation_in_dicts(cached=True)], ids=["quadratic", "representation with features"]
)
def test_the_working_type_is_kept(options, make):
    single, double = meet(make(), dtype=torch.float32, **options), meet(make(), **options)
    exact = derivatives(double, *point(double), whole(double, "train"), mini(double, "val", 2))
    rough = derivatives(single, *point(single), whole(single, "train"), mini(single, "val", 2))
    for name, value in rough.items():
        assert (value.dtype, exact[name].dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64).expand(4, -1)],
    ids=["rows", "views"],
)
def test_rows_for_another_number_of_clients_are_refused(rows):
    population = meet(quadratic())
    with pytest.raises(ValueError, match="4 rows for 3 clients"):
        population.oracle.lower_grad(rows, population.y0, whole(population, "train"))


def test_unknown_strategies_and_empty_chunks_are_refused():
    with pytest.raises(SettingError, match="strategy is 'scan', expected 'auto', 'vmap', 'loop' or 'compiled'"):
        meet(quadratic(), strategy="scan")
    with pytest.raises(SettingError, match="chunk_size is 0, expected at least 1 client"):
        meet(quadratic(), chunk_size=0)


# ---- features --------------------------------------------------------------------------------------------------------

FORMS = {"modules": representation, "dicts": representation_in_dicts}


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shared_x", [True, False])
def test_features_never_change_a_derivative(options, form, shared_x):
    plain, rich = meet(form(cached=False), **options), meet(form(cached=True), **options)
    at = point(plain, shared_x=shared_x)
    for seed in range(4):  # the same x all along: the first minibatches rent, later ones read what was bought
        for width in (1, 3):
            got, expected = (
                derivatives(p, *at, mini(p, "train", seed, width), mini(p, "val", seed + 10, width))
                for p in (rich, plain)
            )
            assert_same(got, expected)
    got, expected = (derivatives(p, *at, whole(p, "train"), whole(p, "val")) for p in (rich, plain))
    assert_same(got, expected)
    u = at[2]
    three, parts = (
        p.oracle.directions(
            *at[:2],
            u,
            gy=mini(p, "train", 5),
            fx=mini(p, "val", 6),
            fy=mini(p, "val", 7),
            ju=mini(p, "train", 8),
            hu=mini(p, "train", 9),
        )
        for p in (rich, plain)
    )
    torch.testing.assert_close(three, parts, **CLOSE)


def test_features_are_computed_batch_by_batch_until_the_data_are_paid_for_and_then_not_again():
    calls = []
    population = meet(representation(cached=True, calls=calls), strategy="vmap")
    x, y, v = point(population, shared_x=True)
    calls.clear()
    spent = []
    for seed in range(8):  # 15 training samples, 3 in each of these
        population.oracle.lower_grad(x, y, mini(population, "train", seed, 1))
        spent.append(len(calls))
    assert spent == [1, 2, 3, 4, 5, 5, 5, 5]  # the fifth computes all features instead of its own
    population.oracle.hessian_product(x, y, v, mini(population, "train", 20))
    population.oracle.lower_grad(x, y + 1, whole(population, "train"))
    assert len(calls) == 5
    population.oracle.jacobian_product(x, y, v, mini(population, "train", 20))
    assert len(calls) == 6  # a derivative with respect to x goes through the features


def changed_in_place(x):
    with torch.no_grad():
        x.mul_(0.5).add_(0.3)
    return x


CHANGES = {
    "a new tensor": lambda x: x + 0.5,
    "in place": changed_in_place,
    "in place, one entry": lambda x: x.index_add_(-1, torch.tensor([0]), x[..., 1:2].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("shared_x", [True, False])
def test_features_are_computed_anew_when_x_changes(change, strategy, shared_x):
    rich, plain = (
        meet(representation(cached=True), strategy=strategy),
        meet(representation(cached=False), strategy=strategy),
    )
    x, y, v = point(rich, shared_x=shared_x)
    for _ in range(2):
        before = rich.oracle.lower_grad(x, y, whole(rich, "train")), rich.oracle.upper_grad_y(x, y, whole(rich, "val"))
        x = change(x)
        assert_same(*(derivatives(p, x, y, v, mini(p, "train", 1), mini(p, "val", 2)) for p in (rich, plain)))
        after = rich.oracle.lower_grad(x, y, whole(rich, "train")), rich.oracle.upper_grad_y(x, y, whole(rich, "val"))
        torch.testing.assert_close(
            after,
            (
                plain.oracle.lower_grad(x, y, whole(plain, "train")),
                plain.oracle.upper_grad_y(x, y, whole(plain, "val")),
            ),
            **CLOSE,
        )
        assert not torch.allclose(before[0], after[0])


def test_features_are_computed_anew_when_the_vector_behind_a_view_changes():
    rich, plain = meet(representation(cached=True)), meet(representation(cached=False))
    x, y, _ = point(rich, shared_x=True)
    rows = x.expand(3, -1)
    rich.oracle.lower_grad(rows, y, whole(rich, "train"))
    x.add_(1.0)
    torch.testing.assert_close(
        rich.oracle.lower_grad(rows, y, whole(rich, "train")),
        plain.oracle.lower_grad(x, y, whole(plain, "train")),
        **CLOSE,
    )


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_features_kept_for_one_cohort_are_not_used_for_another(options):
    rich, plain = meet(representation(cached=True), **options), meet(representation(cached=False), **options)
    x, y, _ = point(rich, shared_x=True, shared_y=True)
    for cohort in ([0, 1, 2], [1, 2], [0, 2], [2], [0, 1], [0, 1, 2]):
        who = torch.tensor(cohort)
        for index in (None, torch.zeros(len(cohort), 2, dtype=torch.int64) + torch.tensor([2, 1])):
            got, expected = (p.oracle.lower_grad(x, y, p.data.batch(who, "train", index)) for p in (rich, plain))
            torch.testing.assert_close(got, expected, **CLOSE)


def test_features_of_one_role_are_not_used_for_another():
    rich, plain = meet(representation(cached=True)), meet(representation(cached=False))
    x, y, _ = point(rich, shared_x=True)
    for role in ("train", "val", "train"):
        torch.testing.assert_close(
            rich.oracle.upper_grad_y(x, y, whole(rich, role)),
            plain.oracle.upper_grad_y(x, y, whole(plain, role)),
            **CLOSE,
        )


def test_a_loss_that_cannot_be_batched_is_evaluated_client_by_client_with_a_warning():
    built = Quadratic(num_clients=3).build()
    branching = dataclasses.replace(
        built.problem, lower=lambda x, y, batch: built.problem.lower(x, y, batch) * (1.0 if y["y"].sum() < 1e9 else 2.0)
    )
    with pytest.warns(UserWarning, match="3 clients are evaluated one after another"):
        slow = Population(branching, built.clients, dtype=torch.float64)
    whole = Population(built.problem, built.clients, dtype=torch.float64)
    batch = lambda population: population.data.batch(torch.arange(3), "train")
    torch.testing.assert_close(
        slow.oracle.lower_grad(slow.x0, slow.y0, batch(slow)), whole.oracle.lower_grad(whole.x0, whole.y0, batch(whole))
    )
    with pytest.raises(ProblemError, match="use strategy='loop'"):
        Population(branching, built.clients, strategy="vmap")


def test_auto_evaluates_in_chunks_within_the_memory_budget(monkeypatch):
    built = Quadratic(num_clients=5).build()
    population = Population(built.problem, built.clients, dtype=torch.float64)
    batch = population.data.batch(torch.arange(5), "train")
    v = torch.ones(6, dtype=torch.float64)
    whole = population.oracle.second_order(population.x0, population.y0, v, batch)
    assert population.oracle._chunk(5, [v], [batch]) is None
    monkeypatch.setattr(
        "fedbilevel.oracle.oracle.BUDGET",
        2 * 8 * (2 * 48 + 32 + sum(value.numel() // 5 * value.element_size() for value in batch.fields.values())),
    )
    tight = Population(built.problem, built.clients, dtype=torch.float64)
    at = (tight.x0, tight.y0, v)
    assert tight.oracle._chunk(5, at, [batch]) == 2
    torch.testing.assert_close(
        tight.oracle.second_order(*at, tight.data.batch(torch.arange(5), "train")), whole, rtol=1e-13, atol=1e-13
    )
    shares = torch.full((5,), 0.2, dtype=torch.float64)
    rows = tight.oracle.second_order(
        *at, tight.data.batch(torch.arange(5), "train"), shares=shares
    )  # pooled, all would be at once
    torch.testing.assert_close(rows, whole, rtol=1e-13, atol=1e-13)
    assert {plan.chunk for plan in tight.oracle._plans.values()} == {2}


# ---- ways of evaluating ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("often", [{"cpu": 10**9}, {"cpu": 1}], ids=["pooled", "pooled and traced"])
@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 9, 1)], ids=["alike", "weighted"])
@pytest.mark.parametrize("make", [name for name in PROBLEMS if name != "cleaning"])
def test_pooled_derivatives_are_the_weighted_means_of_those_of_a_loop(make, weights, often):
    built = PROBLEMS[make]()
    loop, auto = meet(built, strategy="loop"), meet(built, often=often)
    at = point(auto, shared_x=True, shared_y=True, shared_v=True)
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    for take in (whole, lambda population, role: mini(population, role, 5)):
        rows = derivatives(loop, *at, take(loop, "train"), take(loop, "val"))
        x, y, v, o = *at, auto.oracle
        train, val = take(auto, "train"), take(auto, "val")
        for _ in range(2):
            fx, fy = o.upper_grads(x, y, val, shares=shares)
            jv, hv = o.second_order(x, y, v, train, shares=shares)
            got = {
                "gy": o.lower_grad(x, y, train, shares=shares),
                "gx": o.lower_grad_x(x, y, train, shares=shares),
                "fx": o.upper_grad_x(x, y, val, shares=shares),
                "fy": o.upper_grad_y(x, y, val, shares=shares),
                "jv": o.jacobian_product(x, y, v, train, shares=shares),
                "hv": o.hessian_product(x, y, v, train, shares=shares),
                "fx of both": fx,
                "fy of both": fy,
                "jv of both": jv,
                "hv of both": hv,
            }
            for name, value in got.items():
                assert (value.stride(0), len(value)) == (0, 3), name  # one vector in every row
                torch.testing.assert_close(
                    value[0], shares @ rows[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
                )
    assert all((plan.trace is not None) == (often == {"cpu": 1}) for plan in auto.oracle._plans.values())


def test_rows_are_not_pooled_for_separate_points_or_other_strategies():
    population = meet(quadratic())
    shares, train = torch.full((3,), 1 / 3, dtype=torch.float64), whole(population, "train")
    x, y, _ = point(population, shared_x=True, shared_y=True)
    rows = population.oracle.lower_grad(x, y, train)
    assert bool((rows[0] - rows[1]).abs().max() > 0.1)
    own = population.oracle.lower_grad(
        x, y.expand(3, -1).clone(), train, shares=shares
    )  # points of their own, though equal
    assert_same({"gy": own}, {"gy": rows})
    for strategy in ("vmap", "loop"):
        other = meet(quadratic(), strategy=strategy)
        assert_same({"gy": other.oracle.lower_grad(x, y, whole(other, "train"), shares=shares)}, {"gy": rows})


def test_a_trace_computes_on_new_values_and_holds_for_its_shapes_only():
    population, plain = meet(cleaning(), often={"cpu": 1}), meet(cleaning(), often={"cpu": 10**9})
    for seed in range(3):
        at = point(population, seed)
        for take in (
            whole,
            lambda who, role, seed=seed: mini(who, role, seed),
            lambda who, role, seed=seed: mini(who, role, seed, width=4),
        ):
            assert_same(derivatives(population, *at, take(population, "train"), take(population, "val")),
                        derivatives(plain, *at, take(plain, "train"), take(plain, "val")))  # fmt: skip
    assert all(plan.trace is not None for plan in population.oracle._plans.values())
    assert all(plan.trace is None for plan in plain.oracle._plans.values())


def test_tracing_changes_no_bit_and_gathers_only_what_is_read():
    built = representation_in_dicts(cached=True)
    population, plain = (
        meet(built, often={"cpu": 1}, dtype=torch.float32),
        meet(built, often={"cpu": 10**9}, dtype=torch.float32),
    )
    x, y, v = point(population, shared_x=True)
    for who in (population, plain):  # so that features are bought
        who.oracle.lower_grad(x, y, whole(who, "train"))
    for seed in range(3):
        one, two = mini(population, "train", seed), mini(plain, "train", seed)
        assert torch.equal(population.oracle.lower_grad(x, y, one), plain.oracle.lower_grad(x, y, two))
        assert torch.equal(population.oracle.hessian_product(x, y, v, one), plain.oracle.hessian_product(x, y, v, two))
        taken = population.oracle._features.last[1].fields
        assert {"features", "label"} <= set(taken._ready)
        assert ("image" in taken._ready) == (seed < 2)


def test_the_faster_way_is_measured_once_and_remembered():
    built = representation(cached=False)
    population = meet(built, long=0.0)
    at, train = point(population), whole(population, "train")
    first = population.oracle.lower_grad(*at[:2], train)
    assert len(population.oracle.choices) == 1
    ((label, way),) = population.oracle.choices.items()
    assert "gy" in label
    assert way in ("vmap", "loop")
    assert_same({"gy": population.oracle.lower_grad(*at[:2], train)}, {"gy": first})
    for given in ("vmap", "loop"):
        again = meet(built, long=0.0)
        again.oracle.choices[label] = given
        assert_same({"gy": again.oracle.lower_grad(*at[:2], whole(again, "train"))}, {"gy": first})
        assert again.oracle.choices == {label: given}
        assert next(iter(again.oracle._plans.values())).way == given
    fixed = meet(built, strategy="vmap", long=0.0)
    fixed.oracle.lower_grad(*at[:2], whole(fixed, "train"))
    assert fixed.oracle.choices == {}


def test_short_calls_are_not_measured():
    population = meet(quadratic(), long=1e9)
    x, y, _ = point(population)
    population.oracle.lower_grad(x, y, whole(population, "train"))
    assert population.oracle.choices == {}


def test_a_call_that_waits_for_the_processor_is_not_long():
    """Sleep stands for a machine that computes something else."""
    problem, clients = quadratic()

    def waiting(x, y, batch):
        time.sleep(0.05)
        return problem.lower(x, y, batch)

    population = meet(Built(dataclasses.replace(problem, lower=waiting), clients), long=0.03)
    x, y, _ = point(population)
    before = time.perf_counter()
    population.oracle.lower_grad(x, y, whole(population, "train"))
    assert time.perf_counter() - before > 0.05
    assert population.oracle.choices == {}


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling derivatives needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_compiled_derivatives_are_the_same_up_to_rounding(monkeypatch):
    monkeypatch.setattr(evaluation, "_OFTEN_ENOUGH", 3)
    built = representation_in_dicts(cached=True)
    population, plain = meet(built, strategy="compiled"), meet(built)
    x, y, v = point(population)
    train, same = whole(population, "train"), whole(plain, "train")
    for _ in range(4):
        got = population.oracle.hessian_product(x, y, v, train)
    assert next(iter(population.oracle._plans.values())).trace.compiled
    assert_same({"hv": got}, {"hv": plain.oracle.hessian_product(x, y, v, same)})
    population.oracle.evaluate(built.problem.lower, x, y, train)
    assert [plan.trace is not None for plan in population.oracle._plans.values()] == [True, False]


def test_a_compiler_that_fails_is_named(monkeypatch):
    def broken(run):
        raise RuntimeError("no such file: cc\nand more")

    monkeypatch.setattr(evaluation, "compiled", broken)
    with pytest.raises(
        SettingError, match=r"needs a compiler that works \(RuntimeError: no such file: cc\): use strategy='auto'"
    ):
        meet(quadratic(), strategy="compiled")


@pytest.mark.parametrize("equal", [True, False])
def test_features_are_computed_in_parts_within_the_memory_budget(monkeypatch, equal):
    calls = []
    built = representation(cached=True, calls=calls)
    built = even(built) if equal else built
    population = meet(built)
    x, y, _ = point(population, shared_x=True)
    train = whole(population, "train")
    at_once = population.oracle.lower_grad(x, y, train)
    monkeypatch.setattr("fedbilevel.oracle.features.BUDGET", 8 * 2 * train.fields.sample_bytes())
    monkeypatch.setattr("fedbilevel.oracle.features._KEPT", 0)
    calls.clear()
    in_parts = meet(built, chunk_size=3)
    calls.clear()
    assert_same({"gy": in_parts.oracle.lower_grad(x, y, whole(in_parts, "train"))}, {"gy": at_once})
    assert max(calls) == 2


def even(built):
    """The first two samples of every client."""
    return built._replace(
        clients=[
            {role: {name: value[:2] for name, value in fields.items()} for role, fields in one.items()}
            for one in built.clients
        ]
    )


def after_first_derivatives(built, **options):
    """Take one derivative of each level at a shared point, so that features are known.

    Returns the loop's values of all derivatives too.
    """
    loop, auto = meet(built, strategy="loop"), meet(built, **options)
    x, y, v = point(auto, shared_x=True, shared_y=True, shared_v=True)
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    rows = derivatives(loop, x, y, v, whole(loop, "train"), whole(loop, "val"))
    auto.oracle.lower_grad(x, y, whole(auto, "train"), shares=shares)
    auto.oracle.upper_grad_y(x, y, whole(auto, "val"), shares=shares)
    return loop, auto, rows, shares, (x, y, v)


@pytest.mark.parametrize("often", [{"cpu": 10**9}, {"cpu": 1}], ids=["plain", "traced"])
def test_the_way_through_known_features_is_not_gone_again(often):
    """x enters through the features and, as `tilt`, beside them."""
    calls = []
    built = even(representation_in_dicts(cached=True))
    inner = built.problem.features
    built = built._replace(
        problem=dataclasses.replace(built.problem, features=lambda x, batch: calls.append(1) or inner(x, batch))
    )
    loop, auto, rows, shares, (x, y, v) = after_first_derivatives(built, often=often)
    o, train, val = auto.oracle, whole(auto, "train"), whole(auto, "val")
    calls.clear()
    for _ in range(2):
        torch.testing.assert_close(o.jacobian_product(x, y, v, train, shares=shares)[0], shares @ rows["jv"], **CLOSE)
        torch.testing.assert_close(o.upper_grad_x(x, y, val, shares=shares)[0], shares @ rows["fx"], **CLOSE)
    assert not calls
    other = x + 0.1  # another point, and another cohort: known features are of no use
    expected = derivatives(loop, other, y, v, whole(loop, "train"), whole(loop, "val"))
    torch.testing.assert_close(
        o.jacobian_product(other, y, v, train, shares=shares)[0], shares @ expected["jv"], **CLOSE
    )
    some = torch.tensor([0, 2])
    got = o.jacobian_product(x, y, v, auto.data.batch(some, "train"), shares=shares[some])
    torch.testing.assert_close(got[0], shares[some] @ rows["jv"][some], **CLOSE)
    x += 0.1  # changed in place
    torch.testing.assert_close(o.upper_grad_x(x, y, val, shares=shares)[0], shares @ expected["fx"], **CLOSE)


def test_a_derivative_may_be_asked_for_with_and_without_shares():
    for strategy in ("auto", "vmap"):
        population = meet(quadratic(), strategy=strategy, often={"cpu": 1})
        x, y, _ = point(population)  # points of their own: nothing is pooled
        shares, train = torch.full((3,), 1 / 3, dtype=torch.float64), whole(population, "train")
        one, two = (
            [population.oracle.lower_grad(x, y, train, shares=given) for _ in range(3)][-1] for given in (shares, None)
        )
        assert torch.equal(one, two)


def test_results_of_a_trace_share_no_memory():
    """The gradient of a sum is a constant, and H v of half a square is v itself."""
    built = quadratic()
    problem = dataclasses.replace(
        built.problem,
        upper=lambda x, y, batch: x["x"].sum() + 0 * batch["weight"].sum() * y["y"].sum(),
        lower=lambda x, y, batch: 0.5 * (y["y"] ** 2).sum() + (batch["weight"] * x["x"].sum()).sum(),
    )
    population = meet(built._replace(problem=problem), often={"cpu": 1})
    x, y, v = point(population)
    train, val = whole(population, "train"), whole(population, "val")
    for _ in range(4):
        fx, hv = population.oracle.upper_grad_x(x, y, val), population.oracle.hessian_product(x, y, v, train)
        torch.testing.assert_close((fx, hv), (torch.ones_like(x), v), **CLOSE)
        fx *= -3
        hv *= 5


def test_a_loss_that_reads_changing_state_is_refused():
    scale = [1.0]
    built = quadratic()
    lower = built.problem.lower
    population = meet(
        built._replace(
            problem=dataclasses.replace(built.problem, lower=lambda x, y, batch: scale[0] * lower(x, y, batch))
        )
    )
    x, y, _ = point(population)
    train = whole(population, "train")
    for _ in range(127):
        population.oracle.lower_grad(x, y, train)
    scale[0] = 2.0
    with pytest.raises(
        ProblemError, match="gy was other than before at the same point: a loss may read nothing that changes"
    ):
        population.oracle.lower_grad(x, y, train)


def test_an_upper_loss_that_branches_on_values_is_evaluated_without_a_trace():
    built = quadratic()
    upper = built.problem.upper
    looks = lambda x, y, batch: upper(x, y, batch) * (1.0 if float(x["x"].detach().sum()) > -1e9 else 2.0)
    with pytest.warns(UserWarning, match="evaluated one after another"):
        population = meet(built._replace(problem=dataclasses.replace(built.problem, upper=looks)), often={"cpu": 1})
    plain = meet(built)
    population.oracle.strategy = "auto"  # at a shared x the branch is the same for all clients
    x, y, _ = point(population, shared_x=True)
    for _ in range(3):
        got = population.oracle.upper_grad_y(x, y, whole(population, "val"))
    assert_same({"fy": got}, {"fy": plain.oracle.upper_grad_y(x, y, whole(plain, "val"))})
    assert next(iter(population.oracle._plans.values())).untraceable


def test_a_loss_need_not_be_hashable():
    @dataclasses.dataclass
    class Loss:
        inner: object

        def __call__(self, x, y, batch):
            return self.inner(x, y, batch)

    built = quadratic()
    losses = {"upper": Loss(built.problem.upper), "lower": Loss(built.problem.lower)}
    population, plain = meet(built._replace(problem=dataclasses.replace(built.problem, **losses))), meet(built)
    x, y, _ = point(population)
    assert population.measure(x, y) == plain.measure(x, y)


def test_choices_of_auto_do_not_bind_another_strategy():
    auto = meet(quadratic(), long=0.0)
    x, y, _ = point(auto)
    auto.oracle.lower_grad(x, y, whole(auto, "train"))
    loop = meet(quadratic(), strategy="loop")
    loop.oracle.choices.update(dict.fromkeys(auto.oracle.choices, "vmap"))
    loop.oracle.lower_grad(x, y, whole(loop, "train"))
    assert [plan.way for plan in loop.oracle._plans.values()] == ["loop"]


def test_only_a_few_shapes_of_a_derivative_are_measured():
    population = meet(quadratic(), long=0.0)
    x, y, _ = point(population)
    for width in range(1, 9):
        population.oracle.lower_grad(x, y, mini(population, "train", 0, width=width))
    ways = list(population.oracle.choices.values())
    assert len(ways) == 8
    assert set(ways[4:]) == {ways[3]}


@pytest.mark.parametrize("against", ["vmap", "loop", "memory"])
def test_the_way_back_through_features_is_the_means_even_where_nothing_is_pooled(against, monkeypatch):
    """Measuring, or the memory budget, may have every client evaluated by itself."""
    built = even(representation_in_dicts(cached=True))
    _, auto, rows, shares, (x, y, v) = after_first_derivatives(built)
    o, train, val = auto.oracle, whole(auto, "train"), whole(auto, "val")
    assert set(o._features.backs) == {"train", "val"}
    if against == "memory":
        monkeypatch.setattr("fedbilevel.oracle.oracle.BUDGET", 1)
    for _ in range(2):
        torch.testing.assert_close(o.jacobian_product(x, y, v, train, shares=shares)[0], shares @ rows["jv"], **CLOSE)
        torch.testing.assert_close(o.upper_grad_x(x, y, val, shares=shares)[0], shares @ rows["fx"], **CLOSE)
        for plan in o._plans.values() if against != "memory" else ():
            plan.way = against
    ways = {plan.name: (plan.way, plan.chunk) for plan in o._plans.values() if "by features" in plan.name}
    assert set(ways.values()) == {("vmap", 1) if against == "memory" else (against, None)}
