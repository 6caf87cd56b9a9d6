"""Measured steps of x, y and u against dense algebra."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbilevel.algorithms._gaits import GAITS
from fedbilevel.algorithms._lower_pacing import (
    FADING,
    Controls,
    dot,
    equilibrated,
    first_metric,
    lags,
    lower_step,
    norm,
    random_signs,
    unit,
    with_curvature,
    with_damping,
    with_diagonal,
)
from fedbilevel.algorithms._pacing import REFITS, Pace, chosen, upper_step

AGREE, OPPOSE = [1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0]  # h'd, h'd of the last direction, h'h, d'd


def matrices(num: int = 2, size: int = 6, spread: float = 0.0) -> Tensor:
    """Positive definite matrices; the entries of y have units from 10^-spread to 10^spread."""
    draw = torch.Generator().manual_seed(3)
    root = torch.randn(num, size, size, dtype=torch.float64, generator=draw)
    units = torch.logspace(-spread, spread, size, dtype=torch.float64)
    return units[:, None] * (torch.eye(size, dtype=torch.float64) + root @ root.mT / size) * units


def times(h: Tensor) -> Any:
    return lambda v: (h @ v[:, :, None])[:, :, 0]


def in_metric(h: Tensor, d: Tensor) -> Tensor:
    """D^-1/2 H D^-1/2."""
    return h / d.sqrt()[:, :, None] / d.sqrt()[:, None, :]


def lower_rows(h: Tensor, d: Tensor, curvature: Tensor) -> dict[str, Tensor]:
    zero = torch.zeros_like(d)
    names = ("z_y", "u", "v_y", "v_u", "g_y", "g_u", "a_y", "a_u")
    rows = {name: zero for name in names}
    return {**rows, "diagonal": d, "ray": unit(torch.ones_like(d)), "controls": Controls.start(curvature)}


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def controls(rows: dict[str, Tensor]) -> Controls:
    return Controls.of(rows["controls"])


# ---- the metric and the curvature ----------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_diagonal_makes_rows_equally_long(spread: float) -> None:
    h = matrices(spread=spread)
    d = equilibrated(times(h), torch.ones(2, 6, dtype=torch.float64), 12, seed=0)
    lengths = in_metric(h, d).norm(dim=2)
    assert float((lengths.amax(1) / lengths.amin(1)).max()) < 3  # two products estimate each row
    if spread:
        assert float((h.norm(dim=2).amax(1) / h.norm(dim=2).amin(1)).min()) > 1e3


def test_diagonal_of_a_diagonal_matrix_is_exact() -> None:
    """For signs z, each (H z)_i^2 is then H_ii^2."""
    entries = torch.tensor([[1e-3, 2.0, 300.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
    found = equilibrated(times(torch.diag_embed(entries)), torch.ones_like(entries), 1, seed=4)
    torch.testing.assert_close(found, entries, rtol=1e-12, atol=0)


def test_diagonal_follows_the_units_of_y() -> None:
    """The estimate converges to the same metric up to the randomness of signs, in any units."""
    h, units = matrices(), torch.logspace(-3, 3, 6, dtype=torch.float64)
    start = torch.ones(2, 6, dtype=torch.float64)
    plain = equilibrated(times(h), start, 8, seed=0)
    scaled = equilibrated(times(units[:, None] * h * units), start * units**2, 8, seed=0)
    torch.testing.assert_close(scaled, plain * units**2, rtol=1e-10, atol=0)


def test_diagonal_stays_positive_where_the_lower_level_is_flat() -> None:
    d = equilibrated(lambda v: 0 * v, torch.ones(1, 3, dtype=torch.float64), 2, seed=0)
    assert bool((d > 0).all())
    h = torch.diag_embed(torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64))
    d = equilibrated(times(h), torch.ones(1, 3, dtype=torch.float64), 2, seed=0)
    assert bool((d > 0).all())
    assert bool(torch.isfinite(d).all())


def test_new_diagonal_is_joined_in_mean_squares() -> None:
    rows = {"diagonal": torch.tensor([[3.0, 1.0]])}
    assert with_diagonal(rows, torch.tensor([[4.0, 7.0]]))["diagonal"].tolist() == [
        pytest.approx([math.sqrt(12.5), 5.0])
    ]


def test_curvature_is_the_largest_eigenvalue_in_the_metric() -> None:
    h = matrices(spread=1.0)
    d = equilibrated(times(h), torch.ones(2, 6, dtype=torch.float64), 6, seed=0)
    rows = lower_rows(h, d, column(1e-6, 1e6))  # far below and far above
    for _ in range(200):
        rows = with_curvature(rows, times(h)(unit(rows["ray"])))
    top = torch.linalg.eigvalsh(in_metric(h, d))[:, -1:]
    torch.testing.assert_close(controls(rows).curvature, top, rtol=1e-6, atol=0)


def test_first_metric_is_that_of_the_matrix() -> None:
    h = matrices(spread=2.0)
    calls: list[Tensor] = []
    product = lambda v: calls.append(v) or times(h)(v)
    d, curvature, ray = first_metric(product, torch.ones(2, 6, dtype=torch.float64))
    values = torch.linalg.eigvalsh(in_metric(h, d))
    assert len(calls) == 17
    assert bool((curvature <= values[:, -1:] * (1 + 1e-12)).all())
    assert bool((curvature > 0.7 * values[:, -1:]).all())
    torch.testing.assert_close(ray.norm(dim=1), torch.ones(2, dtype=torch.float64))


def test_curvature_rises_at_once_and_falls_slowly() -> None:
    """One measurement on a small batch must not make steps long."""
    rows = lower_rows(torch.eye(2), torch.ones(2, 2, dtype=torch.float64), column(1.0, 1.0))
    ray = unit(rows["ray"])
    found = controls(with_curvature(rows, torch.stack([50.0 * ray[0], 1e-3 * ray[1]]))).curvature[:, 0].tolist()
    assert found[0] == pytest.approx(50.0)
    assert 0.5 < found[1] < 1.0


def test_damping_answers_negative_curvature_and_fades() -> None:
    rows = lower_rows(torch.eye(3), torch.full((2, 3), 2.0, dtype=torch.float64), column(4.0, 4.0))
    rows["u"] = torch.ones(2, 3, dtype=torch.float64)
    share = -1.5 / (4.0 * 2.0 * 3.0)  # u'Hu / (L u'Du)
    bent = with_damping(rows, column(-1.5, 1.5))
    assert controls(bent).damping[:, 0].tolist() == pytest.approx([-2 * share, 0.0])
    later = with_damping(bent, column(1.0, 1.0))
    assert 0 < float(controls(later).damping[0]) < -2 * share
    assert float(controls(later).damping[1]) == 0.0


def test_signs_are_common_to_all_rows_and_follow_the_seed() -> None:
    like = torch.zeros(3, 400, dtype=torch.float64)
    one, two, other = (random_signs(like, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(one[0], one[2])
    assert one.abs().unique().tolist() == [1.0]
    assert abs(float(one[0].mean())) < 0.2


def test_products_and_norms_are_those_of_every_row() -> None:
    a, b = np.arange(1.0, 7.0).reshape(2, 3), np.array([[1.0, -1.0, 2.0], [0.5, 0.0, 3.0]])
    d = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert dot(torch.tensor(a), torch.tensor(b))[:, 0].tolist() == (a * b).sum(1).tolist()
    assert norm(torch.tensor(a), torch.tensor(d))[:, 0].tolist() == pytest.approx(np.sqrt((a * a * d).sum(1)))
    assert torch.linalg.vector_norm(unit(torch.tensor(a)), dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert bool(torch.isfinite(unit(torch.zeros(1, 3))).all())


# ---- y and u -------------------------------------------------------------------------------------


def run_lower(h: Tensor, right: Tensor, d: Tensor, num: int, noise: float = 0.0) -> list[dict[str, Tensor]]:
    """Steps on 1/2 y'Hy - right'y and H u = right, at the exact curvature of the metric."""
    top = torch.linalg.eigvalsh(in_metric(h, d))[:, -1:]
    rows, draw, trace = lower_rows(h, d, top), torch.Generator().manual_seed(0), []
    for _ in range(num):
        error = noise * torch.randn(2, *right.shape, dtype=torch.float64, generator=draw)
        rows = lower_step(rows, times(h)(rows["z_y"]) - right + error[0], times(h)(rows["u"]) - 2 * right + error[1])
        trace.append(rows)
    return trace


def test_first_step_is_that_of_the_equations() -> None:
    h, d, right = matrices(), torch.full((2, 6), 3.0, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float64)
    (rows,) = run_lower(h, right, d, 1)
    top = torch.linalg.eigvalsh(in_metric(h, d))[:, -1:]
    torch.testing.assert_close(rows["z_y"], 0.9 / top * right / d, rtol=1e-12, atol=0)
    torch.testing.assert_close(rows["u"], 2 * 0.9 / top * right / d, rtol=1e-12, atol=0)
    assert torch.equal(rows["a_y"], rows["z_y"])
    assert controls(rows).steps.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_steps_on_a_quadratic_contract_to_its_solution(spread: float) -> None:
    h = matrices(spread=spread)
    d = equilibrated(times(h), torch.ones(2, 6, dtype=torch.float64), 8, seed=0)
    right = torch.linspace(1, 2, 6, dtype=torch.float64).expand(2, 6) * torch.logspace(-spread, spread, 6).double()
    trace = run_lower(h, right, d, 300)
    solution = torch.linalg.solve(h, right)
    for name, target in (("z_y", solution), ("u", 2 * solution)):
        torch.testing.assert_close(trace[-1][name], target, rtol=1e-8, atol=0)
    # the residual is a running mean of products, so its share falls far below one
    assert float(lags(trace[-1]["controls"]).max()) < 1e-6
    assert float(lags(trace[0]["controls"]).min()) == 1.0


def test_the_average_of_noisy_iterates_is_nearer_than_the_iterates() -> None:
    h, d, right = matrices(), torch.ones(2, 6, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float64)
    trace = run_lower(h, right, d, 1600, noise=1.0)
    solution = torch.linalg.solve(h, right)
    far = {name: sum(float((rows[name] - solution).norm()) for rows in trace[-400:]) for name in ("z_y", "a_y")}
    assert far["a_y"] < far["z_y"]


def test_noise_and_long_steps_shorten_steps_and_agreement_restores_them() -> None:
    one, d = torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    rows = lower_rows(torch.eye(4), d, column(1.0))
    for turn in range(40):
        rows = lower_step(rows, (-1) ** turn * one, None)
    short = float(controls(rows).safe)
    assert short < 0.2
    assert float(controls(rows).cos_y) == pytest.approx(-1.0, abs=1e-5)
    for _ in range(100):
        rows = lower_step(rows, one, None)
    assert float(controls(rows).safe) == 1.0
    assert float(controls(rows).cos_y) == pytest.approx(1.0, abs=1e-5)


def test_without_a_residual_of_u_only_y_moves() -> None:
    rows = lower_rows(torch.eye(4), torch.ones(1, 4, dtype=torch.float64), column(1.0))
    rows["u"] = torch.arange(4.0, dtype=torch.float64)[None]
    new = lower_step(rows, torch.ones(1, 4, dtype=torch.float64), None)
    assert torch.equal(new["u"], rows["u"])
    assert not torch.equal(new["z_y"], rows["z_y"])
    assert lags(new["controls"])[0].tolist() == [1.0, 0.0]


def test_u_stays_bounded_where_its_system_has_no_solution() -> None:
    """H = diag(1, 0): without a bound, the second entry of u grows in every step."""
    d, right = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    rows, h = (
        lower_rows(torch.eye(2), d, column(1.0)),
        torch.diag_embed(torch.tensor([[1.0, 0.0]], dtype=torch.float64)),
    )
    for _ in range(3000):
        rows = lower_step(rows, 0 * right, times(h)(rows["u"]) - right)
    assert float(rows["u"].norm()) <= float(controls(rows).bound) * (1 + 1e-12)
    assert float(controls(rows).bound) == pytest.approx(100 * math.sqrt(2))


def test_a_damped_system_has_a_solution_where_the_lower_level_is_concave() -> None:
    d, right = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    h = torch.diag_embed(torch.tensor([[1.0, -0.2]], dtype=torch.float64))
    rows = lower_rows(h, d, column(1.0))
    for step in range(600):
        if step % 4 == 3:
            rows = with_damping(rows, dot(rows["u"], times(h)(rows["u"])))
        rows = lower_step(rows, 0 * right, times(h)(rows["u"]) - right)
    assert float(rows["u"].norm()) < 0.9 * float(controls(rows).bound)


@pytest.mark.parametrize("learned", [True, False])
def test_an_entry_that_becomes_stiffer_does_not_explode(learned: bool) -> None:
    """x makes one entry 200 times as stiff; D was measured before, and the shortest steps are too long."""
    entries = torch.tensor([[1.0, 0.1, 3.0], [2.0, 0.5, 0.5]], dtype=torch.float64)
    right, rows = torch.ones_like(entries), lower_rows(entries, entries, torch.ones(2, 1, dtype=torch.float64))
    stiff = entries.clone()
    stiff[0, 1] *= 200
    for now in [entries] * 10 + [stiff] * 60:
        rows = lower_step(rows, now * rows["z_y"] - right, now * rows["u"] - 2 * right if learned else None)
    torch.testing.assert_close(rows["z_y"], right / stiff, rtol=1e-3, atol=0)
    if learned:
        torch.testing.assert_close(rows["u"], 2 * right / stiff, rtol=1e-3, atol=0)
    changed = rows["diagonal"] != entries
    assert changed.tolist() == [[False, True, False], [False, False, False]]
    assert float(rows["diagonal"][0, 1]) >= 0.5 * float(stiff[0, 1])


# ---- x -------------------------------------------------------------------------------------------


def test_directions_of_x_are_means_divided_by_the_largest_entries() -> None:
    h = np.array([[2.0, -0.5, 1e-9], [1.0, 0.25, 4e-9], [-1.0, 0.5, 1e-9]])
    zero = torch.zeros(1, 3, dtype=torch.float64)
    rows, m, s, z = dict.fromkeys(("z_x", "m_x", "s_x", "d_x", "a_x"), zero), 0.0, 0.0, 0.0
    before = np.zeros(3)
    for count, now in enumerate(h, start=1):
        rows, figures = upper_step(rows, torch.tensor(now)[None], 0.1, count, 0.0)
        m, s = (m + now) / 2, np.maximum(0.99 * s, now * now)
        d = m / (1 - 0.5**count) / np.sqrt(s)
        z = z - 0.1 * d
        torch.testing.assert_close(rows["z_x"][0], torch.tensor(z), rtol=1e-12, atol=0)
        assert figures[0].tolist() == pytest.approx([now @ d, now @ before, now @ now, before @ before], rel=1e-12)
        before = d
    assert float(rows["d_x"].abs().max()) <= 1.1


def test_an_entry_of_x_without_influence_stays() -> None:
    zero = torch.zeros(1, 2, dtype=torch.float64)
    rows, _ = upper_step(
        dict.fromkeys(("z_x", "m_x", "s_x", "d_x", "a_x"), zero), torch.tensor([[1.0, 0.0]]).double(), 0.1, 1, 0.0
    )
    assert float(rows["z_x"][0, 1]) == 0.0
    assert float(rows["z_x"][0, 0]) == pytest.approx(-0.1)


def test_the_average_is_the_last_iterate_where_directions_agree() -> None:
    h = torch.ones(1, 2, dtype=torch.float64)
    start = dict.fromkeys(("z_x", "m_x", "s_x", "d_x", "a_x"), torch.zeros(1, 2, dtype=torch.float64))
    agreed, _ = upper_step(start, h, 1.0, 50, 1.0)
    assert torch.equal(agreed["a_x"], agreed["z_x"])
    noisy, _ = upper_step(start, h, 1.0, 50, -0.3)
    assert 0 < float(noisy["a_x"][0, 0] / noisy["z_x"][0, 0]) < 0.5


# ---- the length of the step of x -----------------------------------------------------------------


def paced(held: list[float], lag: float = 0.01, figures: list[float] = AGREE, start: Pace | None = None) -> list[Pace]:
    """The paces after iterations with these held-out losses."""
    pace, trace = start or Pace(), []
    for loss in held:
        pace = pace.after(loss, [lag, lag / 2], figures)
        trace.append(pace)
    return trace


def test_x_waits_until_y_and_u_are_warmed_up() -> None:
    assert paced([1.0, 0.9], lag=0.9)[-1].step == 0.0
    waiting = paced([1.0] * 30, lag=0.9)
    began = next(i for i, pace in enumerate(waiting, start=1) if pace.moved)
    assert began == 10
    assert paced([1.0], lag=0.1)[0].moved == 1


def test_one_lag_alone_keeps_x_waiting() -> None:
    for two in ([0.9, 0.0], [0.0, 0.9]):
        assert Pace().after(1.0, two, AGREE).moved == 0


def test_length_grows_while_hypergradients_agree_and_falls_while_they_do_not() -> None:
    start = paced([10.0] + [5.0] * 5)[-1]._replace(length=1e-4, cosine=0.0)
    up = paced([5.0] * 8, start=start)
    assert all(a.length < b.length for a, b in pairwise(up))
    down = paced([5.0] * 8, figures=OPPOSE, start=start)
    assert all(a.length > b.length for a, b in pairwise(down))
    assert up[-1].cosine > 0 > down[-1].cosine


def test_a_step_never_promises_more_than_a_share_of_the_range_of_losses() -> None:
    """The promise of a step is its length times the fall of the loss per length."""
    trace = paced([10.0 - 0.1 * i for i in range(60)])
    for pace in trace[2:]:
        assert pace.length * pace.steepest <= 0.0501 * max(pace.high - pace.low, 0.01 * abs(pace.loss))
    assert trace[-1].length > 3 * trace[5].length


def test_brake_shortens_steps_while_y_and_u_lag() -> None:
    start = paced([10.0, 9.0, 8.0])[-1]
    steps = [start.after(7.0, [lag, 0.0], OPPOSE) for lag in (0.01, 0.3, 0.6)]
    assert steps[0].step == steps[0].length
    assert steps[0].step > steps[1].step > steps[2].step
    assert steps[1].length == steps[0].length


def test_only_states_near_the_best_held_out_loss_become_the_answer() -> None:
    trace = paced([10.0] + [10.0 - 0.2 * i for i in range(20)] + [6.0 + 0.2 * i for i in range(20)])
    assert all(chosen([pace]) == 0 for pace in trace[:20])
    assert all(chosen([pace]) == -1 for pace in trace[28:])


def test_noise_of_the_held_out_loss_does_not_stop_new_answers() -> None:
    draw = np.random.default_rng(0)
    trace = paced((5 + draw.standard_normal(200)).tolist())
    assert np.mean([chosen([pace]) == 0 for pace in trace[50:]]) > 0.1


def test_the_start_is_no_answer_once_y_is_warmed_up() -> None:
    """The held-out loss of the start is below all others, because y is at its start, too."""
    trace = paced([0.1, 1.0, 2.0], lag=0.9)
    assert all(chosen([pace]) == 0 for pace in trace)
    trace = paced([3.0 - 0.1 * i for i in range(25)], start=trace[-1])
    assert chosen([trace[-1]]) == 0
    assert trace[-1].best == trace[-1].loss > 0.1


def test_the_candidate_with_the_smallest_loss_is_the_answer() -> None:
    good, bad = paced([2.0, 1.0, 1.0, 1.0])[-1], paced([2.0, 1.5, 1.5, 1.5])[-1]
    assert (chosen([bad, good]), chosen([good, bad])) == (1, 0)
    assert chosen([bad, good._replace(best=None)]) == 0  # it is not warmed up
    worse = good._replace(loss=1.6)
    assert chosen([bad, worse]) == -1  # its own state was better before


def test_another_candidate_needs_two_standard_errors_of_the_difference() -> None:
    """Four clients whose losses differ by -0.1 to -0.5 from those of the safe candidate."""
    steady, safe, differences = paced([2.0, 1.0])[-1], paced([2.0, 1.3])[-1], np.array([-0.1, -0.5, -0.2, -0.4])
    error = differences.std(ddof=1) / 2
    found = Pace().compared(float(differences.mean()), float((differences**2).mean()), 4)
    assert found.doubt == pytest.approx(error)
    assert found._replace(age=1).compared(0.0, 0.0, 4).doubt == pytest.approx(0.7 * error)
    assert Pace().compared(-0.3, 0.09, 1).doubt == 0.0
    gain = safe.answer - steady.answer
    for share, place in ((0.45, 0), (0.55, 1)):
        doubted = steady._replace(doubt=share * gain, best=steady.loss + 2 * share * gain)
        assert chosen([doubted, safe]) == place


def test_f_gets_weight_in_the_lower_level_while_steps_along_u_surely_help() -> None:
    changes = [-0.1, -0.2, -0.35, -0.5, -0.6, -0.4]
    squares = [change**2 for change in changes]
    pace = paced([2.0, 1.0])[-1]._replace(moved=1, blend=1.0)
    assert pace.tried(changes, squares, 5, reach=10.0).blend == pytest.approx(1.0 + 0.2 * 10.0 * REFITS[3])
    assert pace.tried(changes, squares, 5).blend == 1.0
    assert pace.tried(changes, [1.0] * 6, 5, reach=10.0).blend == 1.0
    assert pace._replace(moved=0).tried(changes, squares, 5, reach=10.0).blend == 1.0


def test_a_candidate_far_above_its_range_is_lost_for_good() -> None:
    fine = paced([2.0, 1.0, 1.5, 2.5, 1.0])[-1]
    assert not fine.lost
    gone = paced([1e3, 1.0, 1.0], start=fine)
    assert all(pace.lost for pace in gone)
    assert chosen([fine, gone[-1]._replace(loss=-1.0)]) in (0, -1)


def test_a_refit_needs_two_standard_errors() -> None:
    zeros = [0.0] * (len(REFITS) - 1)
    pace, num = paced([2.0, 1.0])[-1], 5
    change, spread = -0.3, 0.2
    for z, place in ((1.9, 0), (2.1, 3)):
        square = change**2 + (num - 1) * ((abs(change) - 1.01 * pace.tolerance) / z) ** 2
        found = pace.tried([*zeros[:2], change, *zeros[3:]], [spread, spread, square, *[spread] * 3], num)
        assert found.refit == place
        assert found.answer == pytest.approx(pace.loss + (change if place else 0.0))


def test_the_shortest_refit_with_half_of_the_gain_is_taken() -> None:
    pace = paced([2.0, 1.0])[-1]
    changes = [-0.1, -0.2, -0.35, -0.5, -0.6, -0.4]
    assert pace.tried(changes, [change**2 for change in changes], 5).refit == 3
    assert pace.tried([-change for change in changes], [1.0] * 6, 5).refit == 0


def test_refits_are_running_means() -> None:
    num = len(REFITS) - 1
    pace = Pace().tried([-1.0] * num, [2.0] * num, 3).tried([0.0] * num, [0.0] * num, 3)
    assert pace.changes == pytest.approx([-0.7] * num)
    assert pace.errors == pytest.approx([0.7 * math.sqrt((2 - 1) / 2)] * num)


def test_the_slow_gait_is_slow_and_without_momentum() -> None:
    h, d, right = matrices(), torch.full((2, 6), 3.0, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float64)
    top = torch.linalg.eigvalsh(in_metric(h, d))[:, -1:]
    rows = lower_rows(h, d, top)
    y = u = torch.zeros_like(right)
    for _ in range(3):
        rows = lower_step(rows, times(h)(rows["z_y"]) - right, times(h)(rows["u"]) - right, GAITS["_slow"])
        y, u = y - 0.2 / top * (times(h)(y) - right) / d, u - 0.2 / top * (times(h)(u) - right) / d
    torch.testing.assert_close(rows["z_y"], y, rtol=1e-12, atol=0)
    torch.testing.assert_close(rows["u"], u, rtol=1e-12, atol=0)


def test_zero_residuals_give_no_direction_and_no_error() -> None:
    """At an exact solution in float32 all products underflow."""
    rows = lower_rows(torch.eye(3), torch.ones(1, 3), torch.ones(1, 1))
    rows = {name: value.float() for name, value in rows.items()}
    for _ in range(3):
        rows = lower_step(rows, torch.full((1, 3), 1e-25), torch.zeros(1, 3))
    assert all(bool(torch.isfinite(value).all()) for value in rows.values())


def test_the_bound_of_u_follows_a_residual_that_is_zero_at_first() -> None:
    rows = lower_rows(torch.eye(3), torch.ones(1, 3, dtype=torch.float64), column(1.0))
    for right in (0.0, 0.5, 1.0, 1.0, 1.0):
        rows = lower_step(rows, 0 * rows["u"], rows["u"] - right)
    assert float(rows["u"].norm()) == pytest.approx(math.sqrt(3), rel=0.2)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_units_of_the_upper_loss_and_of_x_change_no_decision(scale: float) -> None:
    losses = [3.0, 2.0, 1.5, 1.4, 1.3, 1.35, 1.2, 1.1]
    plain = paced(losses)
    scaled = paced([scale * loss for loss in losses], figures=[scale, scale, scale**2, 1.0])  # h in units of f
    for one, two in zip(plain, scaled, strict=True):
        assert (two.moved, chosen([two])) == (one.moved, chosen([one]))
        assert two.length == pytest.approx(one.length, rel=1e-9)


def test_hypergradients_too_small_for_a_cosine_leave_the_length_of_steps():
    pace = Pace(moved=2, length=5.0, cosine=0.4, loss=1.0, low=0.5, high=2.0, age=4, best=1.0)
    found = pace.after(0.9, [1.0, 0.6], [1e-24, 4e-24, 0.0, 8.6])
    assert found.cosine == FADING * 0.4
    assert math.isfinite(found.length)
