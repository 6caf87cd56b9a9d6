"""Self-tuned against closed forms; its cost, its resumption, and its wait for y."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_simfbo import SCOPES, SMALL, scopes

import fedbilevel as fb
from fedbilevel.algorithms._pacing import Pace
from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.clients import HELD
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.regularisation import Regularisation
from support.numeric.yardstick import check_continues, drive, relative


@pytest.mark.slow
@scopes
def test_reaches_the_closed_form_solution(lower: str, upper: str) -> None:
    task = Quadratic(**SMALL, cross=0.3, lower=lower, upper=upper)  # type: ignore[arg-type]
    closed = task.closed_form()
    fed, state = drive(SelfTuned(holdout=0), task.build(), 800)
    x = closed.solution()
    assert relative(fed.collect(state.x), x) < 1e-8
    assert relative(fed.collect(state.y), closed.lower_solution(x)) < 1e-8
    assert relative(fed.collect(state.u), closed.system_solution(x)) < 1e-8


@scopes
def test_resume_is_bit_identical(lower: str, upper: str) -> None:
    """With minibatches and a cohort, so that clients join late."""
    task = Quadratic(num_clients=4, dim_upper=2, dim_lower=3, lower=lower, upper=upper)  # type: ignore[arg-type]
    check_continues(SelfTuned(num_local_steps=2), task.build())


@pytest.mark.parametrize("num_candidates", [1, 3, 4])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_ledger(lower: str, upper: str, num_candidates: int) -> None:
    num, dx, dy = 16, 2, 3
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()  # type: ignore[arg-type]
    fed, state = drive(SelfTuned(num_candidates=num_candidates), built, num)
    fits = num_candidates == 4 and lower == "global"
    differs = num_candidates > 1 and lower == "global"  # the slow candidate takes differences over r u
    num_candidates = 4 if fits else min(num_candidates, 3)  # with a local lower level, no candidate fits
    vectors, numbers = 8 + 2, 3  # rays in 1..6, 9 and 10, diagonals in 8 and 16; u'Hu in 7, 11 and 15
    up, down = num * (1 + 2 * 6), 0  # the held-out loss, and its changes by six refits with their squares
    if upper == "shared":
        up, down = up + num * dx, down + num * dx
        shared = dx
    else:
        up, shared = up + 4 * num, 0  # figures for the next length
    if lower == "global":
        up += num * 2 * dy + vectors * dy + numbers
        down += num * 2 * dy + vectors * dy
    else:
        up += 2 * num  # lags
    up, down = num_candidates * up, num_candidates * down
    up += (num_candidates - 1) * num  # squared differences from the slow candidate
    up -= numbers if differs else 0  # its u'Hu
    up -= num * (dx if upper == "shared" else 4) if fits else 0  # x is that of the slow candidate
    down -= (num - 1) * dx if fits and upper == "shared" else 0
    if lower == "global":
        up, shared = up + 2 * dy + 1, shared + 2 * dy  # before the first outer iteration; y0 and the first ray
    down -= (num_candidates - 1) * shared  # candidates share their start
    columns, steps = fed.ledger.columns, num_candidates * (num if lower == "global" else 5 * num)
    assert fed.ledger.rounds == num + (lower == "global")
    assert columns["floats_up"].tolist() == [up] * 3
    assert columns["floats_down"].tolist() == [down] * 3
    assert Pace(*state.numbers[3]).blend == 0.0  # otherwise, it costs more of f_y
    assert (Pace(*state.numbers[1]).blend > 0.0) == differs
    later = num - 1 if differs else 0  # its first outer iteration has r = 0
    products = num_candidates * (8 + 2 * 2 + numbers) - (numbers if differs else 0)
    slopes = 2 * 7 + 3 * 2 if differs else 0  # of f, for its rays in 2..6, 9 and 10, and its diagonals
    counts = {"gy": steps + later, "fx": steps, "fy": steps + slopes, "jvp": steps - later, "gx": 2 * later}
    counts["hvp"] = 17 + steps - later + products
    for name, count in counts.items():
        assert columns[name].tolist() == [count] * 3


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_the_slow_candidate_takes_the_directions_of_the_penalty_method(upper: str) -> None:
    """y minimises g + r f and y + r u minimises g, with x at its start; h is then a difference over r u."""
    built = Quadratic(**SMALL, upper=upper, num_samples=10).build()  # type: ignore[arg-type]
    fed, state = drive(SelfTuned(pace=1e-15), built, 400)
    r = Pace(*state.numbers[1]).blend
    assert r > 0
    y, x = state.z_y_slow, fed.collect(state.z_x_slow).reshape(-1, 2)
    vals, trains = samples(fed, "val"), [whole(client["train"]) for client in built.clients]

    def slopes(f_weight: float, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean derivatives of g + f_weight f by every client's x and by y."""
        rows, at = x.expand(3, 2).clone().requires_grad_(), at.clone().requires_grad_()
        trees = [(fed.host.layout_x.unravel(row), fed.host.layout_y.unravel(at)) for row in rows]
        total = sum(built.problem.lower(*tree, own) for tree, own in zip(trees, trains, strict=True))
        total = total + f_weight * sum(built.problem.upper(*tree, own) for tree, own in zip(trees, vals, strict=True))
        return torch.autograd.grad(total, (rows, at))

    (near, at_y), (far, at_z), (_, start) = slopes(r, y), slopes(0.0, y + r * state.u_slow), slopes(0.0, 0 * y)
    assert float(at_y.norm()) < 1e-6 * float(start.norm())
    assert float(at_z.norm()) < 1e-6 * float(start.norm())
    h = (near - far) / r
    found = fed.collect(state.m_x_slow).reshape(-1, 2)
    torch.testing.assert_close(found, h if upper == "private" else h.mean(0, keepdim=True), rtol=1e-4, atol=1e-6)


def test_a_direction_joins_several_minibatches() -> None:
    built = Quadratic(**SMALL, num_samples=10).build()
    paid = [
        drive(SelfTuned(num_local_steps=num, num_candidates=1, holdout=0), built, 1, batch_size=2)[0]
        .ledger.columns["samples"]
        .tolist()
        for num in (1, 3)
    ]
    per_direction = 2 * 2 * 2  # two more batches of two samples, of train and of val
    assert [more - few for few, more in zip(*paid, strict=True)] == [per_direction] * 3


def test_a_client_that_joins_late_pays_for_its_own_preparation() -> None:
    built = Quadratic(**SMALL, lower="local").build()
    drops = lambda iteration, call: {1} if iteration < 3 else ()
    fed, state = drive(SelfTuned(num_local_steps=1, num_candidates=1), built, 5, drops=drops)
    assert fed.ledger.columns["hvp"].tolist() == [17 + 10, 17 + 6, 17 + 10]  # a step and a ray per outer iteration
    assert bool((fed.collect(state.diagonal) > 0).all())
    assert bool((fed.collect(state.controls)[:, 0] > 0).all())


@scopes
def test_without_learning_x_only_y_is_trained_and_sent(lower: str, upper: str) -> None:
    task = Quadratic(**SMALL, lower=lower, upper=upper)  # type: ignore[arg-type]
    fed, state = drive(SelfTuned(learn_x=False, holdout=0), task.build(), 150)
    x = fed.collect(state.x)
    assert float(x.abs().max()) == 0.0
    assert relative(fed.collect(state.y), task.closed_form().lower_solution(x.numpy())) < 1e-6
    assert int(fed.ledger.columns["fy"].sum()) == 0


def test_with_x_fixed_all_validation_samples_choose_the_state() -> None:
    """On its way from 0 to 5, y passes the smallest upper loss at 2."""
    problem = fb.Problem(
        upper=lambda x, y, batch: (y["y"] - 2) ** 2 + 0 * x["x"] * batch["a"],
        lower=lambda x, y, batch: (y["y"] - 5) ** 2 + 0 * x["x"] * batch["a"],
        x0={"x": torch.tensor(0.0)},
        y0={"y": torch.tensor(0.0)},
    )
    clients = [{role: {"a": torch.zeros(4)} for role in ("train", "val")} for _ in range(2)]
    run = lambda **settings: fb.solve(problem, clients, "self_tuned", num_rounds=60, learn_x=False, **settings)
    last, best = (run(**settings).rows[-1]["upper_loss"] for settings in ({"holdout": 0.0}, {}))
    assert last == pytest.approx(9.0, rel=1e-3)
    assert best < 0.9 * last


def test_with_x_fixed_no_sample_is_held_out_and_eager_does_not_run() -> None:
    fed, state = drive(SelfTuned(learn_x=False), Quadratic(**SMALL, num_samples=6).build(), 14)
    assert HELD not in fed.host.parts
    assert int(fed.ledger.columns["fy"].sum()) == 0
    assert not torch.equal(state.z_y, state.z_y_slow)
    assert float(state.z_y_eager.abs().max()) == 0.0


def whole(fields) -> dict[str, torch.Tensor]:
    """All samples of a client as one batch."""
    tensors = {name: torch.as_tensor(value) for name, value in fields.items()}
    num = len(next(iter(tensors.values())))
    return {**tensors, "weight": torch.full((num,), 1 / num, dtype=torch.float64)}


def samples(fed, role: str) -> list[dict[str, torch.Tensor]]:
    """The samples of every client after the split of the validation samples."""
    part = fed.host.parts[role]
    return [whole(part.batch(torch.tensor([i]), role).row(0, "DtRr")) for i in range(fed.num_clients)]


def held_losses(fed, problem, x, y) -> np.ndarray:
    trees = fed.host.layout_x.unravel(x), fed.host.layout_y.unravel(y)
    return np.array([float(problem.upper(*trees, own)) for own in samples(fed, HELD)])


@pytest.mark.parametrize("num", [3, 2])
def test_the_doubt_is_the_standard_error_of_differences_over_clients_that_answered(num: int) -> None:
    built = Quadratic(**SMALL, num_samples=10).build()
    drops = lambda iteration, call: {2} if num == 2 else ()
    fed, state = drive(SelfTuned(), built, 3, drops=drops)
    steady, slow = (
        held_losses(fed, built.problem, getattr(state, "z_x" + e), getattr(state, "z_y" + e)) for e in ("", "_slow")
    )
    _, after = drive(SelfTuned(), built, 4, drops=drops)
    error = (steady - slow)[:num].std(ddof=1) / np.sqrt(num)
    before, now = Pace(*state.numbers[0]).doubt, Pace(*after.numbers[0]).doubt
    assert error > 0
    assert now == pytest.approx(0.7 * before + 0.3 * error, rel=1e-9)


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_the_fit_minimises_the_weighted_sum_at_the_x_of_slow(upper: str) -> None:
    """x stays at its start, and the weight of f is set in every outer iteration."""
    weight, built = 0.7, Quadratic(**SMALL, upper=upper, num_samples=10).build()  # type: ignore[arg-type]
    algorithm = SelfTuned(pace=1e-15)
    fed, state = drive(algorithm, built, 2)
    for iteration in range(3, 150):
        numbers = [*state.numbers[:3], [*Pace(*state.numbers[3])._replace(blend=weight, lost=False)]]
        fed.begin(iteration)
        state = algorithm.round(fed, state._replace(numbers=numbers))
    assert torch.equal(fed.collect(state.z_x_fit), fed.collect(state.z_x_slow))
    y, x = state.z_y_fit.clone().requires_grad_(), fed.collect(state.z_x_fit).reshape(-1, 2)
    at = lambda i: (fed.host.layout_x.unravel(x[i % len(x)]), fed.host.layout_y.unravel(y))
    total = sum(built.problem.lower(*at(i), whole(client["train"])) for i, client in enumerate(built.clients))
    total = total + weight * sum(built.problem.upper(*at(i), own) for i, own in enumerate(samples(fed, "val")))
    (slope,) = torch.autograd.grad(total, y)
    assert float(slope.norm()) < 1e-6 * float(total.detach())


def test_candidates_share_their_start_and_differ_later() -> None:
    built = Quadratic(**SMALL).build()
    _, state = drive(SelfTuned(), built, 14)
    assert not torch.equal(state.z_y, state.z_y_slow)
    assert not torch.equal(state.z_x, state.z_x_eager)
    _, alone = drive(SelfTuned(num_candidates=1), built, 14)
    assert torch.equal(alone.z_x, state.z_x)  # other candidates change nothing
    assert float(alone.z_x_eager.abs().max()) == 0.0


@scopes
def test_the_answer_is_the_candidate_that_is_best_on_held_out_samples(lower: str, upper: str) -> None:
    built = Quadratic(**SMALL, lower=lower, upper=upper, num_samples=20).build()  # type: ignore[arg-type]
    ends = {num: drive(SelfTuned(refit=False), built, num) for num in (4, 5, 40, 41)}
    num = 40 if ends[40][1].answer >= 0 else 4  # -1: the answer stays
    (fed, state), (fed_after, after) = ends[num], ends[num + 1]  # clients adopt an answer one round later
    assert state.answer >= 0
    ending = ["", "_slow", "_eager"][state.answer]
    for name, kept in (("x", upper == "private"), ("y", lower == "local")):
        found = fed_after.collect(getattr(after, name)) if kept else getattr(state, name)
        assert torch.equal(found, fed.collect(getattr(state, f"a_{name}{ending}")))


@scopes
def test_a_refit_moves_y_along_u(lower: str, upper: str) -> None:
    """Clients hold the same validation samples, so that a refit lowers the held-out loss surely."""
    built = Quadratic(**SMALL, lower=lower, upper=upper, num_samples=10).build()  # type: ignore[arg-type]
    same = built._replace(clients=[{**client, "val": built.clients[0]["val"]} for client in built.clients])
    fed, state = drive(SelfTuned(num_candidates=1), same, 40)
    fed_after, after = drive(SelfTuned(num_candidates=1), same, 41)
    u, y = fed.collect(state.u), fed.collect(state.a_y)
    answer = fed_after.collect(after.y) if lower == "local" else state.y
    moved, u = (answer - y).reshape(-1, 3), u.reshape(-1, 3)
    assert float(moved.norm()) > 0
    torch.testing.assert_close(torch.cosine_similarity(moved, -u), torch.ones(len(u), dtype=u.dtype))
    upper_loss = lambda one, at: float(one.measure(state.x if upper == "shared" else after.x, at)["upper_loss"])
    if lower == "global" and upper == "shared":
        assert upper_loss(fed, answer) < upper_loss(fed, y)


@scopes
def test_a_lost_candidate_is_neither_sent_nor_computed(lower: str, upper: str) -> None:
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()  # type: ignore[arg-type]
    fed, state = drive(SelfTuned(), built, 12)
    lost = Pace(*state.numbers[2])._replace(lost=True)
    numbers = [*state.numbers[:2], [*lost], [*lost]]
    before = fed.ledger.columns["fy"].tolist()
    fed.iteration += 1
    after = SelfTuned().round(fed, state._replace(numbers=numbers, answer=0))
    paid = [new - old for new, old in zip(fed.ledger.columns["fy"].tolist(), before, strict=True)]
    assert paid == [2 * (5 if lower == "local" else 1)] * 3
    assert after.numbers[2] == [*lost]


def test_a_start_with_a_lower_loss_than_all_solutions_is_not_the_answer() -> None:
    """The upper loss is smallest at y0, which does not solve the lower level for any good x."""
    problem = fb.Problem(
        upper=lambda x, y, batch: y["y"] ** 2 + 0.1 * (x["x"] - 3) ** 2 + 0 * batch["a"],
        lower=lambda x, y, batch: (y["y"] - x["x"] - 5) ** 2 + 0 * batch["a"],
        x0={"x": torch.tensor(0.0)},
        y0={"y": torch.tensor(0.0)},
    )
    clients = [{role: {"a": torch.zeros(4)} for role in ("train", "val")} for _ in range(2)]
    result = fb.solve(problem, clients, num_rounds=200, residuals=False, refit=False)
    assert float(result.x["x"]) == pytest.approx(-47 / 11, rel=0.05)
    assert float(result.y["y"]) == pytest.approx(5 - 47 / 11, rel=0.2)


def test_x_waits_for_y() -> None:
    built = Quadratic(**SMALL).build()
    first = next(t for t in range(1, 12) if float(drive(SelfTuned(), built, t)[1].z_x.abs().max()) > 0)
    _, state = drive(SelfTuned(), built, first - 1)
    assert first > 2
    assert state.numbers[0][0] == 1  # the pace found y warmed up one outer iteration earlier


@pytest.mark.slow
def test_holdout_solves_the_problem_of_the_other_samples() -> None:
    task = Quadratic(**SMALL, num_samples=6)
    built = task.build()
    held, a = drive(SelfTuned(holdout=0.3), built, 400)
    fit = held.host.parts["val"]
    assert held.host.parts[HELD].sizes[HELD].tolist() == [2, 2, 2]
    rows = [fit.batch(torch.tensor([i]), "val").row(0, "DtRr") for i in range(3)]
    val = [{name: value.numpy() for name, value in own.items()} for own in rows]
    some = [{"train": client["train"], "val": own} for client, own in zip(built.clients, val, strict=True)]
    _, b = drive(SelfTuned(holdout=0), built._replace(clients=some), 400)
    assert relative(a.z_x, b.z_x) < 1e-3
    assert relative(b.z_x, task.closed_form().solution()) > 1e-2


def test_minibatches_and_cohorts_stay_near_the_solution() -> None:
    task = Quadratic(**SMALL)
    _, state = drive(SelfTuned(holdout=0), task.build(), 150, batch_size=2, cohort=Cohort(0.67))
    assert relative(state.x, task.closed_form().solution()) < 0.7


SCALED = {
    "imbalance": (Imbalance(num_clients=4), "balanced_test_accuracy"),
    "regularisation": (Regularisation(num_clients=4), "test_loss"),
    "cleaning": (DataCleaning(num_clients=4), "test_accuracy"),
    "representation": (HyperRepresentation(num_clients=4, num_hidden=16, lower="local", split="iid"), "test_accuracy"),
}


def scaled(problem: fb.Problem, what: str, by: float) -> fb.Problem:
    """The same problem in other units of f, g, x or y."""
    units = lambda tree, factor: {name: factor * value for name, value in tree.items()}
    if what in ("upper", "lower"):
        loss = getattr(problem, what)
        return replace(problem, **{what: lambda x, y, batch: by * loss(x, y, batch)})
    start = getattr(problem, f"{what}0")
    new = (lambda sizes: units(start(sizes), by)) if callable(start) else units(start, by)
    back = lambda x, y: (units(x, 1 / by), y) if what == "x" else (x, units(y, 1 / by))
    within = lambda function: lambda x, y, batch: function(*back(x, y), batch)
    features = problem.features
    if features is not None and what == "x":
        features = lambda x, batch: problem.features(units(x, 1 / by), batch)
    return replace(
        problem,
        upper=within(problem.upper),
        lower=within(problem.lower),
        features=features,
        statistics={role: within(function) for role, function in problem.statistics.items()},
        **{f"{what}0": new},
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["upper", "lower", "x", "y"])
@pytest.mark.parametrize("name", SCALED)
def test_units_change_a_figure_by_less_than_one_per_cent(name: str, what: str) -> None:
    task, figure = SCALED[name]
    problem, clients = task.build()
    last = lambda one: fb.solve(
        one, clients, "self_tuned", num_rounds=60, residuals=False, dtype=torch.float64, strategy="vmap"
    ).rows[-1][figure]
    plain = last(problem)
    for by in (1e-3, 1e3):
        assert last(scaled(problem, what, by)) == pytest.approx(plain, rel=0.01)
