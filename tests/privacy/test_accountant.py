"""The account of epsilon: the figure of opacus for what happened, never lowered, and a hard stop at the budget."""

import builtins
import json
import math
import sys
import warnings

import pytest

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from opacus.accountants import PRVAccountant, RDPAccountant

from fedbilevel.errors import BudgetError, CheckpointError, NonFiniteError, SettingError
from fedbilevel.privacy import Accountant, Budget, Release, joint

WIDE = Budget(1e6, 1e-5)


def own_figure(events, delta=1e-5, kind=RDPAccountant):
    """What opacus says, told one event after the other."""
    accountant = kind()
    for noise, rate in events:
        accountant.step(noise_multiplier=noise, sample_rate=rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # log(0) within opacus
        return accountant.get_epsilon(delta)


def test_epsilon_is_the_accountants_own_for_the_events_that_happened():
    accountant, events = Accountant(WIDE), []
    assert accountant.epsilon() == 0
    for turn in range(12):  # rounds of two kinds and a measurement now and then
        now = [Release(1.5, 0.2), Release(3.0)] + [Release(8.0, 1.0, 2)] * (turn % 3 == 0)
        accountant.spend(now)
        events += [(one.noise, one.rate) for one in now for _ in range(one.times)]
    assert len(events) == 12 * 2 + 4 * 2
    assert accountant.epsilon() == pytest.approx(own_figure(sorted(events)), rel=1e-12)
    assert accountant.epsilon() == pytest.approx(own_figure(events), rel=1e-9)
    tighter = Accountant(WIDE, method="prv")
    tighter.merge(accountant.state_dict())
    assert tighter.epsilon() == pytest.approx(own_figure(sorted(events), kind=PRVAccountant), rel=1e-12)
    assert tighter.epsilon() < accountant.epsilon()


@pytest.mark.parametrize(
    ("count", "rate", "prv", "rdp"), [(140, 1, 42, 44.3), (140, 0.1, 2.8, 3.06), (1400, 0.1, 10.1, 10.9)]
)
def test_the_figures_that_users_are_told(count, rate, prv, rdp):
    """Noise 2.0, delta 1e-5. The shorter figures are those of the PRV accountant."""
    releases = [Release(2.0, rate, count)]
    assert Accountant(WIDE, method="prv").forecast(1, releases) == pytest.approx(prv, rel=0.01)
    assert Accountant(WIDE).forecast(1, releases) == pytest.approx(rdp, rel=0.01)


def test_the_figure_of_many_releases_of_all_clients():
    assert Accountant(WIDE).forecast(1400, [Release(2.0)]) == pytest.approx(263.5, rel=0.01)  # 254 by PRV, in 6 s


def test_epsilon_of_one_gaussian_release_is_above_the_exact_one():
    """The exact delta of a Gaussian release at epsilon, by Balle and Wang (2018)."""
    normal = lambda z: math.erfc(-z / math.sqrt(2)) / 2
    for noise in (0.8, 2.0, 10.0):
        for method in ("rdp", "prv"):
            epsilon = Accountant(WIDE, method=method).forecast(1, [Release(noise)])
            delta = normal(0.5 / noise - epsilon * noise) - math.exp(epsilon) * normal(-0.5 / noise - epsilon * noise)
            assert delta <= 1e-5 * 1.001
            assert epsilon < 1.3 * math.sqrt(2 * math.log(1.25e5)) / noise


# ---- several sequences in one round ----------------------------------------------------------------------------------


def test_sequences_of_one_round_are_one_release():
    assert joint([2.0]) == Release(2.0)
    assert joint([2.0] * 4, 0.1, 7) == Release(pytest.approx(1.0), 0.1, 7)
    assert joint([3.0, 4.0]).noise == pytest.approx(12 / 5)
    # all clients: one joint release costs what the separate ones cost together
    assert Accountant(WIDE).forecast(50, [joint([2.0] * 3)]) == pytest.approx(
        Accountant(WIDE).forecast(50, [Release(2.0, 1.0, 3)]), rel=1e-9
    )
    # sampled clients: the sequences share the sample, so counting them one by one claims too little
    assert Accountant(WIDE).forecast(50, [joint([2.0] * 3, 0.1)]) > 1.01 * Accountant(WIDE).forecast(
        50, [Release(2.0, 0.1, 3)]
    )


def test_a_joint_release_has_the_renyi_divergence_of_its_gaussian_vectors():
    """Order 2, all clients: the divergence of N(0, S) and N(m, S) is m' S^-1 m."""
    noises, order = [1.3, 2.0, 5.0], 2
    shift = sum((1 / noise) ** 2 for noise in noises)  # each sequence moves by its sensitivity of 1
    assert order / 2 / joint(noises).noise ** 2 == pytest.approx(order / 2 * shift)


# ---- budget ----------------------------------------------------------------------------------------------------------


def test_a_run_stops_at_its_budget_and_releases_nothing_more():
    kept = []
    accountant = Accountant(Budget(3.0, 1e-5), keep=kept.append)
    release = [Release(4.0, 0.5)]
    left = accountant.rounds_left(release)
    assert accountant.forecast(left, release) <= 3.0 < accountant.forecast(left + 1, release)
    for done in range(left):
        assert accountant.rounds_left(release) == left - done
        accountant.spend(release)
    assert len(kept) == left > 5
    before = accountant.epsilon(), accountant.state_dict()
    with pytest.raises(BudgetError, match=r"from \S+ to 3.0\d*, above the budget of 3 .* nothing is released"):
        accountant.spend(release)
    assert (accountant.epsilon(), accountant.state_dict()) == before
    assert len(kept) == left
    assert accountant.rounds_left(release) == 0
    accountant.spend([Release(1000.0, 0.01)])  # a release that fits is not refused
    assert Accountant(WIDE).rounds_left([Release(1e4)], most=100) == 100


def test_a_release_that_cannot_be_stored_does_not_happen():
    def full(state):
        raise OSError("the disk is full")

    accountant = Accountant(WIDE, keep=full)
    with pytest.raises(OSError, match="full"):
        accountant.spend([Release(1.0)])
    assert accountant.epsilon() == 0


def test_an_old_checkpoint_does_not_lower_the_account():
    stored = []
    first = Accountant(WIDE, keep=lambda state: stored.append(json.dumps(state)), run="cleaning")
    first.spend([Release(2.0)] * 3)
    checkpoint = json.loads(stored[-1])
    first.spend([Release(2.0)] * 4)
    first.spend([Release(1.0, 0.5)])
    resumed = Accountant(WIDE, run="cleaning")
    resumed.merge(json.loads(stored[-1]))
    resumed.merge(checkpoint)
    assert resumed.epsilon() == first.epsilon() > 0
    resumed.spend([Release(2.0)] * 4)  # the rounds after the checkpoint happen again, and are paid again
    assert resumed.epsilon() == pytest.approx(own_figure([(1.0, 0.5)] + [(2.0, 1.0)] * 11), rel=1e-9)
    other = Accountant(WIDE, run="another")
    other.merge(resumed.state_dict())
    other.spend([Release(2.0)])
    assert other.epsilon() == pytest.approx(own_figure([(1.0, 0.5)] + [(2.0, 1.0)] * 12), rel=1e-9)
    assert {*other.state_dict()} == {"cleaning", "another"}


# ---- fails closed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "release",
    [
        Release(0.0),
        Release(-1.0),
        Release(math.nan),
        Release(math.inf),
        Release(1.0, 0.0),
        Release(1.0, 1.5),
        Release(1.0, math.nan),
        Release(1.0, 1.0, 0),
        Release(1.0, 1.0, -3),
        Release(1.0, 1.0, 2.5),
    ],
)
def test_numbers_that_are_no_privacy_are_refused(release):
    accountant = Accountant(WIDE)
    with pytest.raises(NonFiniteError, match="of a release is"):
        accountant.spend([Release(1.0), release])
    assert accountant.state_dict() == {}


def test_an_epsilon_that_is_not_finite_is_refused(monkeypatch):
    accountant = Accountant(WIDE)
    monkeypatch.setattr("opacus.accountants.analysis.rdp.get_privacy_spent", lambda **given: (math.nan, 2))
    with pytest.raises(NonFiniteError, match="epsilon of the releases is nan"):
        accountant.spend([Release(1.0)])


@pytest.mark.parametrize("wrong", [(0, 1e-5), (math.nan, 1e-5), (math.inf, 1e-5), (1, 0), (1, 1), (1, math.nan)])
def test_a_budget_has_a_range(wrong):
    with pytest.raises(SettingError, match="of the privacy budget is"):
        Budget(*wrong)


def test_without_opacus_there_is_no_account(monkeypatch):
    real = builtins.__import__

    def without(name, *given):
        if name.startswith("opacus"):
            raise ImportError(name)
        return real(name, *given)

    monkeypatch.delitem(sys.modules, "opacus")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        SettingError, match=r"needs opacus, which is not installed: pip install 'fedbilevel\[privacy\]'"
    ):
        Accountant(WIDE)


def test_other_accountants_are_refused():
    with pytest.raises(SettingError, match="accountant is 'gdp', expected 'rdp' or 'prv'"):
        Accountant(WIDE, method="gdp")
    with pytest.raises(SettingError, match="where 'prv' takes minutes: use 'rdp'"):
        Accountant(WIDE, method="prv").forecast(10**5, [Release(1.0)])


@pytest.mark.parametrize(
    "state", [None, [], {"run": 3}, {"run": [[1.0, 1.0]]}, {"run": [[1.0, 1.0, -1]]}, {"r": [["a", 1, 1]]}]
)
def test_a_damaged_account_is_not_an_empty_one(state):
    with pytest.raises(CheckpointError, match="stored account of privacy cannot be read"):
        Accountant(WIDE).merge(state)
