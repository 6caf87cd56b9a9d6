"""Client-level differential privacy in a run: the noise of a mean, the account, the budget."""

import json
import math

import pytest
import torch

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from opacus.accountants import RDPAccountant

import fedbilevel as fb
from fedbilevel.aggregation.layer import At, Fixed, Layer
from fedbilevel.aggregation.ring import bits_for
from fedbilevel.aggregation.sealing import Noisy, addressed, bits_of
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import BudgetError, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.stragglers import Stragglers
from fedbilevel.problem.draws import Stream
from fedbilevel.runs.privacy_account import sums_of
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=5, client_weights="by_samples").build()
PRIVATE = fb.Aggregation(clip=1.0, noise=2.0, epsilon=1000.0)
OPTIONS = {"dtype": torch.float64, "strategy": "loop"}


def epsilon_of(noise, times, delta=1e-5):
    """The accountant's own figure."""
    account = RDPAccountant()
    account.history = [(noise, 1.0, times)]
    return account.get_epsilon(delta)


@pytest.mark.parametrize("drops", [None, lambda iteration, call: {1, 3}], ids=["all", "dropped"])
def test_the_noise_of_a_mean_has_the_stated_variance(drops):
    """Whoever answers: noise times clip times the largest weight, divided by the sum of weights."""
    means = []
    for noise in (1e-4, 2.0):  # the first is as good as none
        fed = Simulation(FedBiO(), *BUILT, **OPTIONS, drops=drops,
                         aggregation=fb.Aggregation(clip=0.5, noise=noise, epsilon=1e12, delta=0.1))  # fmt: skip
        fed.begin(0)
        state, found = FedBiO().init(fed), []
        for iteration in range(1, 301):
            fed.begin(iteration)
            new = fed.mean(FedBiO().local_steps, x=state.x, y=state.y, u=state.u)
            found.append(torch.cat([new.x, new.y, new.u]))
        means.append(torch.stack(found))
    weights = fed.weights if drops is None else fed.weights[[0, 2, 4]]
    stated = 2.0 * 0.5 * float(fed.weights.max()) / float(weights.sum())
    apart = means[1] - means[0]
    assert float(apart.std()) == pytest.approx(stated, rel=0.05)
    assert abs(float(apart.mean())) < 4 * stated / math.sqrt(apart.numel())
    assert float(apart.std(0).max() / apart.std(0).min()) < 1.4  # also of x, whose rows are shorter


def test_noise_stays_in_the_room_that_the_bits_leave():
    """40 standard deviations of the sum and the largest sum of rows are below 2^63."""
    for noise, size, largest in ((0.01, 3, 1), (2.0, 5, 40), (50.0, 1000, 2**20)):
        settings = fb.Aggregation(clip=1.0, noise=noise, epsilon=1.0)
        bits = bits_of(settings, size, largest)
        entry = 2.0 ** (bits - 1)
        deviation = noise * largest * (entry + 0.5 * 1000) * math.sqrt(size)  # one member's noise would suffice
        assert size * largest * entry + 40 * deviation < 2.0**63
        assert deviation < 2.0**50
    with pytest.raises(SettingError, match="give smaller weights, or less noise"):
        bits_for(2**20, noise=2.0**50)


def test_epsilon_is_that_of_the_events_that_happened(tmp_path, capsys):
    """One mean of x, y and u in every outer iteration: noise 2 / sqrt(3)."""
    result = fb.solve(*BUILT, "fedbio", num_iterations=6, measure_every=2, aggregation=PRIVATE, record=tmp_path / "run")
    by_hand = [epsilon_of(2 / math.sqrt(3), num) if num else 0.0 for num in (0, 2, 4, 6)]
    assert [row["epsilon"] for row in result.rows] == pytest.approx(by_hand, rel=1e-9)
    assert [row["iteration"] for row in result.rows] == [0, 2, 4, 6]
    [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("privacy:")]
    assert f"epsilon will be about {by_hand[-1]:.4g} at delta 1e-05 after 6 outer iterations" in line
    stored = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert stored == {"run": [[pytest.approx(2 / math.sqrt(3)), 1.0, 6]]}
    assert "epsilon" not in repr(result)  # a cost, not a figure


def test_every_call_of_an_outer_iteration_is_counted(capsys):
    """Calls with different numbers of sequences, some before the first outer iteration."""
    algorithm = CommFedBiO(num_kept=2)
    start, each = sums_of(algorithm, *BUILT)
    result = fb.solve(*BUILT, algorithm, num_iterations=3, aggregation=PRIVATE)
    account = RDPAccountant()
    account.history = [(2 / math.sqrt(num), 1.0, 1) for num in start + 3 * each]
    assert len(each) > 1
    assert result.final["epsilon"] == pytest.approx(account.get_epsilon(1e-5), rel=1e-9)
    assert f"about {result.final['epsilon']:.4g} " in capsys.readouterr().err


def test_a_resume_continues_the_account_and_pays_for_repeated_rounds(tmp_path, capsys):
    folder, more = tmp_path / "run", {"measure_every": 1, "checkpoint_every": 4, "aggregation": PRIVATE}

    def interrupt(progress):
        if progress.iteration == 6:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        fb.solve(*BUILT, "fedbio", num_iterations=8, record=folder, callbacks=[interrupt], **more)
    capsys.readouterr()
    result = fb.solve(*BUILT, "fedbio", num_iterations=8, record=folder, resume=True, **more)
    assert result.final["epsilon"] == pytest.approx(epsilon_of(2 / math.sqrt(3), 6 + 4), rel=1e-9)
    assert f"about {result.final['epsilon']:.4g} at delta 1e-05 after 4 outer" in capsys.readouterr().err
    whole = fb.solve(*BUILT, "fedbio", num_iterations=8, **more)  # noise has an address
    assert torch.equal(result.state.x, whole.state.x)


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_a_run_stops_at_its_budget_and_resumes_with_a_larger_one(tmp_path, capsys, upper):
    """Values that clients keep go back to the last complete outer iteration, too."""
    built = Quadratic(num_clients=5, upper=upper).build()
    [num] = sums_of(FedBiO(), *built)[1]
    budget = epsilon_of(2 / math.sqrt(num), 5) + 1e-6
    more = {"num_iterations": 9, "measure_every": 2, "record": tmp_path / "run"}
    result = fb.solve(*built, "fedbio", **more, aggregation=fb.Aggregation(clip=1.0, noise=2.0, epsilon=budget))
    assert (result.iteration, result.stopped, result.ending.state) == (5, "budget", "stopped")
    assert f"above the budget of {budget:.4g} at delta 1e-05: nothing is released" in result.ending.why
    assert str(result.ending).startswith("stopped by the privacy budget: a release would raise epsilon from")
    assert result.final["epsilon"] == pytest.approx(budget, abs=2e-6)
    assert json.loads((tmp_path / "run" / "end.json").read_text())["stopped"] == "budget"
    assert f"will stop at its budget of {budget:.4g} after about 5 outer iterations" in capsys.readouterr().err
    again = fb.solve(*built, "fedbio", **more, aggregation=PRIVATE, resume=True)
    whole = fb.solve(*built, "fedbio", **{**more, "record": None}, aggregation=PRIVATE)
    assert again.final["upper_loss"] == whole.final["upper_loss"]
    assert again.final["epsilon"] == whole.final["epsilon"]


def test_a_budget_that_allows_nothing_is_refused_at_once():
    result = fb.solve(*BUILT, "fedbio", num_iterations=3, aggregation=fb.Aggregation(clip=1.0, noise=0.1, epsilon=0.5))
    assert (result.iteration, result.stopped, result.final["epsilon"]) == (0, "budget", 0.0)


def test_figures_do_not_guide_a_private_run():
    """A run that diverges without noise goes back; a private run must not look at its losses."""
    result = fb.solve(*BUILT, "fedbio", num_iterations=12, lr_upper=50.0, aggregation=PRIVATE)
    assert result.stopped == "finished"


def test_nothing_runs_without_opacus(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(SettingError, match="differential privacy needs opacus, which is not installed"):
        fb.solve(*BUILT, "fedbio", num_iterations=3, aggregation=PRIVATE)


@pytest.mark.parametrize(
    ("algorithm", "given", "text"),
    [
        ("fedbio", {"noise": 1.0, "epsilon": 1.0}, "without clip"),
        ("fedbio", {"noise": 1.0, "epsilon": 1.0, "clip": 1.0, "sequences": {"u": {"clip": "none"}}}, "without clip"),
        ("self_tuned", {"noise": 1.0, "epsilon": 1.0, "clip": 1.0}, "self_tuned measures '\\w+' without clipping"),
        (
            "fedbio",
            {"noise": 0.01, "epsilon": 1.0, "clip": 1.0, "fixed_point": 8},
            "deviation of .* units of the ring",
        ),
    ],
)
def test_rows_that_noise_would_not_hide_are_refused_before_a_run(algorithm, given, text):
    with pytest.raises(SettingError, match=text):
        fb.solve(*BUILT, algorithm, num_iterations=3, aggregation=fb.Aggregation(**given))


def test_other_refusals():
    with pytest.raises(SettingError, match="lr_upper is 'auto', and its measurement is not clipped"):
        fb.solve(*BUILT, "fedbio", lr_upper="auto", num_iterations=3, aggregation=PRIVATE)
    for given, missing in (({"noise": 1.0, "clip": 1.0}, "epsilon"), ({"epsilon": 1.0}, "noise")):
        with pytest.raises(SettingError, match=rf"is given without aggregation\.{missing}: give both, or neither"):
            fb.Aggregation(**given)
    with pytest.raises(SettingError, match="a cohort drawn with replacement"):
        fb.solve(*BUILT, "fedbio", num_rounds=2, cohort=Cohort(0.5, replacement=True), aggregation=PRIVATE)
    layer = Layer(PRIVATE, FedBiO(), Stream(0))
    bare = layer.way(At("probe_steps", "squares", 0, 1), 4, {}, torch.float64)  # a phase that is never clipped
    fixed = Fixed(torch.ones(1), 40, 1, 1)
    with pytest.raises(SettingError, match="rows 'squares' of phase 'probe_steps' are not clipped"):
        Noisy(1.0, addressed(Stream(0))).noised(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0]), bare, fixed)


@pytest.mark.parametrize("more", [{"cohort": Cohort(0.6)}, {"stragglers": Stragglers(dropout=0.3)}], ids=str)
def test_a_cohort_of_a_fixed_size_is_charged_like_all_clients(more):
    result = fb.solve(*BUILT, "fedbio", num_iterations=6, aggregation=PRIVATE, **more)
    assert result.final["epsilon"] == pytest.approx(epsilon_of(2 / math.sqrt(3), 6), rel=1e-9)


def test_the_order_of_clients_does_not_change_the_noise():
    problem, clients = BUILT
    ids = [3, 0, 4, 2, 1]
    one = fb.solve(*BUILT, "fedbio", num_iterations=3, aggregation=PRIVATE, **OPTIONS)
    other = fb.solve(
        problem, [clients[i] for i in ids], "fedbio", ids=ids, num_iterations=3, aggregation=PRIVATE, **OPTIONS
    )
    assert torch.equal(one.state.x, other.state.x)


def test_a_first_release_above_the_budget_raises_where_there_is_no_state_yet():
    fed = Simulation(FedBiO(), *BUILT, aggregation=fb.Aggregation(clip=1.0, noise=0.1, epsilon=0.5))
    fed.begin(1)
    state = FedBiO().init(fed)
    with pytest.raises(BudgetError, match="nothing is released"):
        FedBiO().round(fed, state)
    assert fed.account.epsilon() == 0.0
