"""Runs that diverge go back to their best state with halved steps, or end as failed."""

import dataclasses
import json
import math
import re
import warnings

import pytest
import torch

from fedbilevel import Cohort, solve
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.errors import NonFiniteError, RecoveryWarning
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.record import Record
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.quadratic import Quadratic

TOO_LONG = FedBiO(lr_upper=0.1, lr_lower=1.5, lr_system=0.3)  # half of lr_lower is stable
QUIET = pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")


@pytest.fixture(scope="module")
def quadratic():
    return Quadratic().build()


@pytest.fixture(scope="module")
def cleaning():
    return DataCleaning(num_clients=4, num_clean=5).build()


def flat(result):
    trees = [tree for value in (result.x, result.y) for tree in (value if isinstance(value, list) else [value])]
    return torch.cat([leaf.reshape(-1) for tree in trees for leaf in tree.values()])


def untimed(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@QUIET
def test_diverging_run_goes_back_with_halved_steps_and_reaches_the_solution_of_stable_steps(quadratic):
    options = {"num_iterations": 100, "measure_every": 2, "dtype": torch.float64}
    with pytest.warns(
        RecoveryWarning, match=r"went back to its state of outer iteration \d+ and halved its step sizes"
    ):
        result = solve(*quadratic, TOO_LONG, **options)
    assert result.ending.state == "finished"
    assert result.ending.why.startswith("went back to its best state")
    assert "finished: went back" in repr(result)
    halvings = round(math.log2(1 / float(result.ending.why.rsplit(" ", 1)[1])))
    stable = solve(*quadratic, TOO_LONG.scaled(0.5**halvings), **options)
    assert result.rows[-1]["upper_loss"] == pytest.approx(stable.rows[-1]["upper_loss"], rel=0.05)
    assert result.ledger["rounds"] == 100  # rounds before the return were spent
    worst = max(row["upper_loss"] for row in result.rows)
    assert worst > 10 * result.rows[0]["upper_loss"]  # the measurements show the divergence


@QUIET
def test_going_back_restores_the_best_state_with_all_that_clients_keep(cleaning):
    """With steps of zero after the return, the state stays that of the best measurement."""
    method = FedBiOAcc(lr_upper=10.0, lr_lower=2.0, lr_system=0.5)
    seen = []

    class Noted(FedBiOAcc):
        @classmethod
        def name(cls):
            return "fedbioacc"

        def round(self, fed, state):
            before = fed.state_dict(state)
            seen.append((fed.iteration, self.lr_lower, before))
            return super().round(fed, state)

    noted = Noted(**{**method.asdict(), "lr_lower": 40.0})
    with pytest.warns(RecoveryWarning, match="outer iteration"):
        result = solve(*cleaning, noted, num_iterations=60, measure_every=1, batch_size=8, cohort=Cohort(0.5))
    steps = [step for _, step, _ in seen]
    turn = next(i for i, step in enumerate(steps) if step != steps[0])
    best = min(result.rows[: turn + 1], key=lambda row: row["upper_loss"])["iteration"]
    then, now = seen[best][2], seen[turn][2]  # before the iteration after the best, and after the return
    names = [name for name in then[0] if name.startswith(("state.", "kept", "memory"))]
    assert any(name.startswith("kept.") for name in names)
    assert then[1] == now[1]
    assert all(torch.equal(then[0][name], now[0][name]) for name in names)
    assert int(now[0]["ledger.rounds"]) > int(then[0]["ledger.rounds"])


@QUIET
@pytest.mark.parametrize("stop", [3, 8, 11, 20, 33])
@pytest.mark.parametrize("noise", [{}, {"batch_size": 2, "cohort": Cohort(0.5), "schedule": Schedule(power=0.1)}])
def test_resumed_run_is_bit_identical_before_at_and_after_a_return(tmp_path, quadratic, stop, noise):
    options = {"measure_every": 2, "checkpoint_every": 5, **noise}
    whole = solve(*quadratic, TOO_LONG, num_iterations=40, record=tmp_path / "whole", **options)
    assert "went back" in whole.ending.why
    halt = lambda now: now.iteration == stop
    solve(*quadratic, TOO_LONG, num_iterations=40, record=tmp_path / "half", callbacks=[halt], **options)
    again = solve(*quadratic, TOO_LONG, num_iterations=40, record=tmp_path / "half", resume=True, **options)
    assert torch.equal(flat(whole), flat(again))
    assert whole.ledger == again.ledger
    assert whole.ending == again.ending
    due = lambda rows: [row for row in untimed(rows) if row["iteration"] % 2 == 0]
    assert due(whole.rows) == due(again.rows)
    ours, theirs = (Record(tmp_path / name).load() for name in ("whole", "half"))
    assert ours[1]["recovery"] == theirs[1]["recovery"]
    assert all(torch.equal(value, theirs[0][name]) for name, value in ours[0].items())


@QUIET
@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_run_whose_steps_stay_too_long_fails_with_its_best_state_and_one_sentence(tmp_path, factor):
    built = Imbalance().build()
    method = FedBiO(lr_upper=0.5 * factor, lr_lower=1.0, lr_system=1.0)
    result = solve(*built, method, num_iterations=200, record=tmp_path / "run")
    assert result.ending.state == "failed"
    assert result.ending.why.endswith(": use shorter steps.")
    assert str(result.ending).startswith("failed: ")
    end = json.loads((tmp_path / "run" / "end.json").read_text())
    assert (end["stopped"], end["why"]) == ("failed", result.ending.why)
    best = min(row["upper_loss"] for row in result.rows)
    at_end = solve(*built, FedAvg(lr_lower=1e-9), num_iterations=0).rows[0]["upper_loss"]
    assert best <= at_end  # the first measurement is one of them
    assert "failed" in result._repr_html_()


@QUIET
@pytest.mark.parametrize("lr", [0.7, 1.0, 1.5, 2.0, 3.0])
def test_no_run_with_too_long_steps_finishes_with_a_huge_loss(quadratic, lr):
    result = solve(*quadratic, FedBiO(lr_upper=lr, lr_lower=lr, lr_system=lr), num_iterations=60)
    first = result.rows[0]["upper_loss"]
    assert result.ending.state == "failed" or result.rows[-1]["upper_loss"] < 12 * first


@QUIET
def test_non_finite_value_is_answered_by_going_back(quadratic):
    method = FedBiO(lr_upper=0.1, lr_lower=3.0, lr_system=0.3)
    options = {"num_iterations": 120, "measure_every": 50}  # non-finite before a measurement could warn
    with pytest.raises(NonFiniteError):
        solve(*quadratic, method, recover=False, **options)
    with pytest.warns(RecoveryWarning, match="that is not finite in phase 'local_steps' of outer iteration"):
        result = solve(*quadratic, method, **options)
    assert bool(torch.isfinite(flat(result)).all())


@QUIET
@pytest.mark.parametrize("lr", [1e3, 1e300])
def test_value_that_stays_non_finite_from_the_start_fails_the_run_at_its_start(quadratic, lr):
    with pytest.warns(RecoveryWarning, match="3 of 3 times"):
        result = solve(*quadratic, FedBiO(lr_lower=lr), num_iterations=50, measure_every=25)
    assert result.ending.state == "failed"
    assert re.fullmatch(
        r"client \d returned a value of '.' that is not finite in phase 'local_steps' of outer iteration \d+; "
        r"the result is the best state, of outer iteration 0 after 3 returns to it with halved steps: "
        r"use shorter steps\.",
        result.ending.why,
    )
    assert torch.equal(flat(result), flat(solve(*quadratic, FedBiO(), num_iterations=0)))
    assert result.final["upper_loss"] == result.rows[0]["upper_loss"]
    with pytest.raises(NonFiniteError, match="client"):
        solve(*quadratic, FedBiO(lr_lower=lr), num_iterations=50, recover=False)


@QUIET
def test_diverging_peers_in_one_process_go_back(quadratic):
    method = SGP(lr_lower=1.5, num_lower_steps=5)
    with pytest.warns(RecoveryWarning, match="went back"):
        result = solve(*quadratic, method, num_iterations=60, measure_every=2)
    assert result.rows[-1]["lower_loss"] < 10 * abs(result.rows[0]["upper_loss"])


@QUIET
def test_failed_run_shows_the_figures_of_the_state_that_it_returns_and_all_costs(quadratic):
    method = FedBiO(lr_upper=50.0, lr_lower=50.0, lr_system=50.0)
    with pytest.warns(RecoveryWarning, match="the run failed"):
        result = solve(*quadratic, method, num_iterations=60, measure_every=1)
    assert result.ending.state == "failed"
    assert result.rows[-1]["upper_loss"] > 1e3
    again = solve(dataclasses.replace(quadratic.problem, x0=result.x, y0=result.y), quadratic.clients, num_iterations=0)
    assert result.final["upper_loss"] == pytest.approx(again.rows[0]["upper_loss"])
    assert result.final["rounds"] == result.ledger["rounds"]
    assert f"upper_loss {result.final['upper_loss']:.4g}" in repr(result)
    assert "best state" in result._repr_html_()
    assert "last measurement" not in result._repr_html_()
    fine = solve(*quadratic, FedBiO(), num_iterations=3)
    assert fine.final == fine.rows[-1]


def test_without_recovery_a_diverged_run_still_ends_as_failed(quadratic):
    with pytest.warns(RecoveryWarning, match="the run failed: upper_loss"):
        result = solve(*quadratic, TOO_LONG, num_iterations=8, recover=False)
    assert result.ending.state == "failed"


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_noisy_run_with_stable_steps_never_goes_back(seed, batch):
    options = {"batch_size": batch, "cohort": Cohort(0.4), "seed": seed, "num_iterations": 80, "measure_every": 1}
    for built, method in (
        (Quadratic(data_seed=seed).build(), FedBiO(lr_upper=0.05, lr_lower=0.1, lr_system=0.1)),
        (Imbalance(data_seed=seed).build(), FedBiO(lr_upper=0.2, lr_lower=0.5, lr_system=0.5)),
    ):
        result = solve(*built, method, **options)
        assert str(result.ending) == "finished"


def test_run_without_a_length_ends_when_its_figures_no_longer_change(tmp_path, quadratic):
    method = FedBiO(lr_upper=0.1, lr_lower=0.3, lr_system=0.3)
    result = solve(*quadratic, method, dtype=torch.float64, record=tmp_path / "run")
    assert str(result.ending) == "converged"
    assert result.ledger["rounds"] < 500
    assert json.loads((tmp_path / "run" / "end.json").read_text())["stopped"] == "converged"
    longer = solve(*quadratic, method, dtype=torch.float64, num_rounds=500)
    assert longer.ledger["rounds"] == 500  # a given length is kept
    assert result.rows[-1]["upper_loss"] == pytest.approx(longer.rows[-1]["upper_loss"], rel=1e-2)


def test_run_without_a_length_has_at_most_500_rounds(quadratic):
    result = solve(*quadratic, FedBiO(lr_upper=1e-3, lr_lower=0.1, lr_system=0.1), batch_size=1)
    assert (result.ending.state, result.ledger["rounds"]) == ("finished", 500)


def test_run_that_hardly_moves_says_so(quadratic):
    method = FedBiO(lr_upper=1e-9, lr_lower=1e-9, lr_system=1e-9)
    with pytest.warns(RecoveryWarning, match="the figures hardly changed since the start"):
        assert solve(*quadratic, method).ending.state == "failed"
    with pytest.warns(RecoveryWarning, match="the figures hardly changed since the start: use longer steps"):
        assert solve(*quadratic, method, num_iterations=40).ending.state == "finished"


def test_x_that_did_not_move_is_reported_unless_the_algorithm_leaves_it_fixed(quadratic):
    with pytest.warns(RecoveryWarning, match=r"x moved by .* in 30 outer iterations: use a longer lr_upper"):
        solve(*quadratic, FedBiO(lr_upper=1e-12, lr_lower=0.1, lr_system=0.1), num_iterations=30)
    assert str(solve(*quadratic, FedAvg(), num_iterations=30).ending) == "finished"


def test_self_tuned_run_says_that_its_x_stands_still_without_naming_a_step_it_does_not_have(quadratic):
    options = {"num_iterations": 30, "pace": 1e-12}
    with pytest.warns(RecoveryWarning) as told:
        solve(*quadratic, "self_tuned", **options)
    [text] = [str(one.message) for one in told if issubclass(one.category, RecoveryWarning)]
    assert re.fullmatch(
        r"self_tuned: x moved by .* in 30 outer iterations: use more rounds, unless the start is a solution\.", text
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoveryWarning)
        solve(*quadratic, "self_tuned", learn_x=False, **options)


class Overflowing(SelfTuned):
    """An algorithm without step settings whose arithmetic at the server leaves the range of a float."""

    @classmethod
    def name(cls):
        return "self_tuned"

    def round(self, fed, state):
        if fed.iteration > 20:
            math.exp(1e6)
        return super().round(fed, state)


@QUIET
def test_number_at_the_server_that_overflows_fails_the_run_with_advice_that_fits_the_algorithm(cleaning):
    with pytest.warns(RecoveryWarning, match="3 of 3 times"):
        result = solve(*cleaning, Overflowing(), num_iterations=60)
    assert result.ending.state == "failed"
    assert result.ending.why.startswith("a number at the server is out of range in outer iteration 24; the result is")
    assert result.ending.why.endswith(": look for the cause with fb.check_problem.")
    with pytest.raises(NonFiniteError, match="out of range in outer iteration 21: the upper loss may have no lower"):
        solve(*cleaning, Overflowing(), num_iterations=60, recover=False)
