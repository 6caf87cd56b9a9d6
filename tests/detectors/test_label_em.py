"""Label EM on small data of clients that differ, against plain numpy on the pooled samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import log_softmax
from scipy.stats import chi2

from fedbilevel import discovery
from fedbilevel.detectors import _rows
from fedbilevel.detectors._decisions import (
    TEMPERATURES,
    basis,
    discovery_cut,
    judged,
    most_false,
    temperature,
    upper_bound,
)
from fedbilevel.detectors.detector import Detector
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.errors import ProblemError, ScopeError, SettingError
from fedbilevel.federation.algorithm import Kept
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.yardstick import check_continues, drive
from support.sites.loopback import Loopback, simulated


@pytest.mark.parametrize("least_clean", [2, 99], ids=["b-by-clean-samples", "b-by-training-samples"])
@pytest.mark.parametrize("transition", ["shared", "own"])
def test_posteriors_transitions_and_heat_are_those_of_plain_numpy_with_explicit_refits(transition, least_clean):
    built = small()
    em = LabelEM(
        transition=transition, ridge=0.02, pull=7.0, num_passes=4, num_refinements=0, num_steps=7,
        least_clean=least_clean,
    )  # fmt: skip
    fed, state = drive(em, built, em.num_passes)
    hand = ByHand(built, em)
    wanted = hand.passes()
    assert 5 < hand.taken < 5 * 7  # some steps ended early
    np.testing.assert_allclose(posteriors(fed, state, built), wanted, atol=1e-9)
    np.testing.assert_allclose(state.transition.view(3, 3), hand.T, atol=1e-10)
    assert state.heat == hand.heat
    np.testing.assert_allclose(state.weights.view(5, 3), hand.W, atol=1e-10)
    assert not np.allclose(wanted.argmax(1), hand.label)  # some labels are doubted
    if transition == "own":
        np.testing.assert_allclose(fed.host.memory.rows["transition"].view(3, 3, 3), hand.own, atol=1e-10)
        assert not np.allclose(hand.own[0], hand.own[1], atol=0.02)


@pytest.mark.parametrize("missing", [(1,), (0, 1, 2)], ids=str)
def test_the_first_scores_of_classes_without_clean_samples_are_those_of_the_given_labels(missing):
    built = small()
    unknown = [{**one["val"], "trusted": ~np.isin(one["val"]["label"], missing)} for one in built.clients]
    clients = [{**one, "val": val} for one, val in zip(built.clients, unknown, strict=True)]
    em = LabelEM(ridge=0.02)
    fed, state = drive(em, Built(built.problem, clients), 0)
    hand = ByHand(built, em)
    keep = ~np.isin(hand.yc, missing)
    zc, yc, given, n = hand.zc[keep], hand.yc[keep], np.eye(CLASSES)[hand.label], len(hand.z)
    gram = hand.z.T @ hand.z + zc.T @ zc + em.ridge * n * np.eye(5)
    rest = lambda j: gram - np.outer(hand.z[j], hand.z[j])
    sums = lambda j: hand.z.T @ given - np.outer(hand.z[j], given[j])
    wanted = np.stack([hand.z[j] @ np.linalg.solve(rest(j), sums(j)) for j in range(n)])
    known = [c for c in range(CLASSES) if c not in missing]
    if known:
        for c in known:
            sums = zc[yc == c].sum(0) * (hand.label == c).sum() / (yc == c).sum()
            wanted[:, c] = hand.z @ np.linalg.solve(gram, sums)
    rows = fed.host.unpad(fed.collect(state.score), torch.arange(3)).view(-1, CLASSES)
    np.testing.assert_allclose(rows, wanted, atol=1e-10)
    assert state.counts.tolist() == pytest.approx([n / 3, len(zc) / 3, 0 if not known else 1])


def losses(hand: ByHand, model: torch.Tensor, target: np.ndarray, mass: np.ndarray, l2: float) -> torch.Tensor:
    z, zc = torch.tensor(hand.z), torch.tensor(hand.zc)
    each = -(torch.tensor(target) * (z @ model).log_softmax(1)).sum(1) * torch.tensor(mass)
    clean = -(torch.eye(CLASSES, dtype=torch.float64)[hand.yc] * (zc @ model).log_softmax(1)).sum(1)
    return (each.sum() + clean.sum()) / (mass.sum() + len(zc)) + 0.5 * l2 * (model**2).sum()


@pytest.mark.parametrize("targets", ["kept", "soft", "weighted"])
def test_both_classifiers_are_the_minimisers_of_their_losses(targets):
    built, em = small(), LabelEM(ridge=0.02, l2=0.05, num_fit_rounds=400, targets=targets, num_refinements=0)
    _, state = drive(em, built, em.num_detections() + em.num_fit_rounds)
    hand = ByHand(built, em)
    q, given = hand.passes(), np.eye(CLASSES)[hand.label]
    right = (q * given).sum(1)
    assert 0 < (right >= 0.5).sum() < len(right)
    cleaned = {"kept": (given, (right >= 0.5).astype(float)), "soft": (q, np.ones(len(q))), "weighted": (given, right)}
    cases = (cleaned[targets], (given, np.ones(len(q))))
    for model, (target, mass) in zip(state.models.view(2, 5, CLASSES), cases, strict=True):
        model = model.clone().requires_grad_()
        losses(hand, model, target, mass, em.l2).backward()
        assert float(model.grad.norm()) < 1e-9
    image = torch.tensor(np.concatenate([client["test"]["image"] for client in built.clients]))
    weight, bias = state.y[: 4 * CLASSES].view(4, CLASSES), state.y[4 * CLASSES :]
    z = torch.cat([(image - state.centre) / state.scale, torch.ones(len(image), 1)], dim=1)
    assert torch.allclose(image @ weight + bias, z @ state.models.view(2, 5, CLASSES)[0], atol=1e-10)


def test_the_guard_pairs_both_classifiers_on_clean_samples_that_nothing_else_has_read():
    built, em = small(), LabelEM(ridge=0.02, num_fit_rounds=5, least_clean=9)
    _, state = drive(em, built, em.num_iterations())
    hand = ByHand(built, em)
    models = state.models.view(2, 5, CLASSES).numpy()
    logs = [log_softmax(hand.zh @ model, axis=1)[range(len(hand.yh)), hand.yh] for model in models]
    better = logs[0] - logs[1]
    t = better.mean() / (better.std(ddof=1) / np.sqrt(len(better)))
    assert state.found["num_guard"] == len(hand.yh) == 9  # 4 or 5 of 9, 2 of 4, 3 of 6
    assert state.found["t"] == pytest.approx(t, rel=1e-9)
    right = [(hand.zh @ model).argmax(1) == hand.yh for model in models]
    assert state.found["gain"] == pytest.approx(float(right[0].mean() - right[1].mean()), abs=1e-12)
    fair = []
    for model in models:
        each = [log_softmax(b * hand.zh @ model, axis=1)[range(9), hand.yh] for b in TEMPERATURES]
        fair.append(max(each, key=np.sum))
    gain = fair[0] - fair[1]
    evidence = gain.mean() / (gain.std(ddof=1) / 3)
    assert state.found["evidence"] == pytest.approx(evidence, rel=1e-9)
    assert 1.645 * state.found["gain_error"] > 0.003  # too few to exclude a loss by right answers
    assert state.found["most_false"] > 0.5  # and by flags
    assert state.found["verdict"] == ("accepted" if t >= -2 and evidence >= 2 else "rejected")
    few = drive(LabelEM(ridge=0.02, num_fit_rounds=5, least_clean=10), built, em.num_iterations())[1]
    assert few.found["verdict"] == "unchecked"
    assert torch.equal(few.y, em.classifier(few, 1))


def test_the_guard_decides_nothing_for_a_class_that_it_does_not_see():
    built = small()
    seen = [one["val"]["label"] != 1 for one in built.clients]
    vals = [{k: v[own] for k, v in one["val"].items()} for one, own in zip(built.clients, seen, strict=True)]
    clients = [{**one, "val": val} for one, val in zip(built.clients, vals, strict=True)]
    em = LabelEM(ridge=0.02, num_fit_rounds=1, least_clean=2)
    _, state = drive(em, Built(built.problem, clients), em.num_iterations())
    assert (state.found["verdict"], state.found["unseen"]) == ("unchecked", 1)


def test_a_rejected_classifier_is_replaced_by_the_plain_one():
    built, em = small(), LabelEM(ridge=0.02, num_fit_rounds=5, reject_below=1e9, least_clean=2)
    _, state = drive(em, built, em.num_iterations())
    assert state.found["verdict"] == "rejected"
    plain = em.classifier(state, 1)
    assert torch.equal(state.y, plain)
    assert drive(em, built, em.num_iterations() + 2)[1].y.equal(state.y)  # later outer iterations change nothing


def test_a_client_with_one_clean_sample_has_none_for_the_guard():
    built = small()
    one = {name: values[:1] for name, values in built.clients[0]["val"].items()}
    clients = [{**built.clients[0], "val": one}, *built.clients[1:]]
    em = LabelEM(ridge=0.02, num_fit_rounds=1)
    _, state = drive(em, Built(built.problem, clients), em.num_iterations())
    assert state.found["num_guard"] == state.found["num_unseen"] == 5  # 2 of 4 and 3 of 6


def test_the_cut_is_the_lowest_one_at_which_few_flags_are_false():
    rng = np.random.default_rng(1)
    seen, unseen = rng.integers(0, 9, 200), np.zeros(200)
    unseen[:60] = rng.integers(0, 7, 60)
    found = discovery_cut(torch.tensor(seen).double(), torch.tensor(unseen), 500.0, 0.1)
    bound = lambda count: float(upper_bound(torch.tensor(float(count), dtype=torch.float64)))
    false = [500 * min(1, bound(unseen[i:].sum()) / unseen.sum()) for i in range(200)]
    first = next(i for i in range(200) if false[i] <= 0.1 * seen[i:].sum())
    wanted = {"log_odds": -16 + 32 * first / 200, "flags": seen[first:].sum(), "false": false[first]}
    assert found == pytest.approx(wanted)
    assert first > 0
    assert discovery_cut(torch.tensor(seen).double(), torch.tensor(unseen) * 0, 500.0, 0.1) is None


@pytest.mark.parametrize("means", [(-4.0, 4.0), (-1.0, 3.0)])  # a cut in all draws, and in most
def test_few_draws_have_more_false_flags_than_the_rate(means):
    rng, num_right, num_wrong, draws = np.random.default_rng(0), 1200, 800, 400
    binned = lambda odds: torch.tensor(np.histogram(odds, 200, (-16, 16))[0]).double()
    over = 0
    for _ in range(draws):
        right, unseen = rng.normal(means[0], 2, num_right), rng.normal(means[0], 2, 300)
        both = binned(np.concatenate([right, rng.normal(means[1], 2, num_wrong)]))
        cut = discovery_cut(both, binned(unseen), float(num_right), 0.05)
        if cut is not None:
            over += int((right >= cut["log_odds"]).sum()) > 0.05 * cut["flags"]
    assert 0 < over / draws <= 0.06  # 5 %, and one standard error


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_a_count_is_below_its_bound_in_95_of_100_draws(count):
    """The mean at which so few events have a probability of 5 %."""
    assert float(upper_bound(torch.tensor(float(count)))) == pytest.approx(chi2.ppf(0.95, 2 * count + 2) / 2, rel=0.01)


def test_without_two_samples_the_guard_knows_nothing():
    assert judged(1, 0.3, 0.09, 0, 0, 1)["t"] == 0
    assert judged(4, 2.0, 1.0, 0, 0, 1)["t"] == 0  # equal differences: no spread to compare with
    assert judged(2, 1.0, 1.0, 1, 1, 1)["t"] == pytest.approx(1.0)
    assert judged(1, 0.3, 0.09, 0, 0, 1, 0.2, 0.04)["evidence"] == 0
    assert judged(2, 0, 0, 0, 0, 1, 1.0, 1.0)["evidence"] == pytest.approx(1.0)


def test_the_guard_accepts_evidence_only():
    figures = {"t": 3.0, "gain": 0.01, "gain_error": 0.02, "evidence": 2.1, "num_guard": 200}
    ruled = lambda **other: basis({**figures, **other}, -2.0, 2.0)
    assert ruled() == "likelihood"
    assert ruled(evidence=1.9) == ""  # not worse, but not surely better
    sure = 2.1 * figures["gain_error"]  # right more often by two standard errors
    assert ruled(gain=sure) == "answers"
    assert ruled(evidence=1.9, gain=sure) == ""  # right answers alone are no evidence
    assert ruled(evidence=9.0, gain=-0.03) == ruled(evidence=9.0, t=-2.1) == ""


def test_the_guard_excludes_a_loss_where_it_has_samples_enough():
    """The bound is gain - 1.645 errors >= -0.003."""
    many = {"t": 3.0, "gain_error": 0.001, "evidence": 1.1, "num_guard": 5000}
    assert basis({**many, "gain": -0.0013}, -2.0, 1.0) == ""  # lower by more than an error
    assert basis({**many, "gain": 0.0}, -2.0, 1.0) == "answers"
    assert basis({**many, "gain": 0.0, "evidence": 0.9}, -2.0, 1.0) == ""
    fewer = {"t": 3.0, "gain_error": 0.0018, "evidence": 9.0, "num_guard": 1000}  # enough: 1.645 * 1.5 / 1000 < 0.003
    assert basis({**fewer, "gain": -0.0001}, -2.0, 1.0) == ""  # the bound is -0.00306
    assert basis({**fewer, "gain": 0.0001}, -2.0, 1.0) == "answers"
    spread = {**fewer, "gain": -0.001, "gain_error": 0.0032}  # many samples whose answers differ are not too few
    assert basis(spread, -2.0, 1.0) == ""
    assert basis({**spread, "num_guard": 800}, -2.0, 1.0) == "likelihood"


def test_flags_that_are_surely_wrong_labels_are_evidence():
    few = {"t": 0.0, "gain": 0.0, "gain_error": 0.02, "evidence": 0.0, "num_guard": 200}
    ruled = lambda **other: basis({**few, **other}, -2.0, 1.0)
    assert ruled() == ruled(most_false=0.51) == ""
    assert ruled(most_false=0.5) == "flags"
    assert ruled(most_false=0.1, gain=-0.03) == ruled(most_false=0.1, t=-2.1) == ""  # answers speak against it


def test_the_share_of_false_flags_is_bounded_by_samples_with_right_labels():
    """Of 50 right labels, 2 are above one half; 400 of 500 training labels are right, and 100 are flagged."""
    seen, unseen = torch.zeros(200).double(), torch.zeros(200).double()
    seen[10], seen[150], unseen[10], unseen[120] = 400, 100, 48, 2
    bound = chi2.ppf(0.95, 2 * 2 + 2) / 2 / 50  # of the share of right labels that are flagged
    assert most_false(seen, unseen, 400.0) == pytest.approx(400 * bound / 100, rel=0.01)
    assert most_false(seen, unseen, 4000.0) == 1.0
    assert most_false(seen * 0, unseen, 400.0) == most_false(seen, unseen * 0, 400.0) == 1.0


def test_without_samples_the_temperature_is_one():
    assert temperature([0.0] * len(TEMPERATURES)) == 1.0
    assert temperature([float(b == 2.0) for b in TEMPERATURES]) == 2.0


@pytest.mark.parametrize("place", [1, 77, 198])
def test_odds_are_counted_between_the_edges_of_their_bin(place):
    low, high = _rows.edge(place, 200), _rows.edge(place + 1, 200)
    right = 1 - torch.sigmoid(torch.tensor([low + 1e-6, (low + high) / 2, high - 1e-6], dtype=torch.float64))
    assert _rows.binned(right, 200)[place] == 3


def test_a_packed_matrix_is_itself():
    matrix = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_rows.unpacked(_rows.packed(matrix + matrix.T)), matrix + matrix.T)
    assert len(_rows.packed(matrix)) == 28


# ---- on engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transition", ["shared", "own"])
def test_a_resumed_run_is_the_same_bit_for_bit(transition):
    em = LabelEM(ridge=0.02, num_passes=3, num_steps=2, num_fit_rounds=1, transition=transition)  # five in all
    check_continues(em, small())


@pytest.mark.parametrize(("l2", "num_many"), [(0.001, 0), (None, 3)], ids=["fixed", "chosen"])
def test_the_cost_is_that_of_the_docstring(l2, num_many):
    built, em = small(), LabelEM(num_passes=3, num_steps=2, num_fit_rounds=7, tolerance=1e-12, least_clean=5, l2=l2)
    fed, state = drive(em, built, em.num_iterations())
    bill = fed.bill().totals()
    # clean samples accept the scores of the first refinement alone, so no steps follow the second
    detection, d, c = 3 + 2 + 3 * (2 + 2) + (20 + 1 + 2) + (20 + 1), 5, CLASSES
    choice = num_many > 0
    assert bill["rounds"] == detection + 1 + 7 + choice + 2  # estimates, training, choice and guard
    once = 2 * (d - 1) + 3 + c**2 + d * (d + 1) // 2 + 2 * c * d
    refinement = 2 * (20 * 5 * (c * d + 1) + 41)
    training = 7 * (2 * c * d + 2) + num_many * 6 * c * d + 8 * choice
    assert bill["floats_up"] == 3 * (
        once + (2 + 4 * 2) * (c**2 + 13) + 3 * c * d + 4 * 13 + refinement + (2 * 200 + 1) + training + 8 + c + 2 * 33
    )
    assert all(isinstance(value, Kept) for value in (state.x, state.score, state.leverage))


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("transition", ["shared", "own"])
def test_sites_have_the_posteriors_of_the_simulator_and_send_sums_only(tmp_path, transition):
    federation = Loopback(tmp_path, 3)
    task = {"name": "data_cleaning", "num_clients": 3, "num_clean": 12, "test_share": 0.8, "learn": "labels"}
    task |= {"noise": 0.2, "noise_most": 0.6, "partition": "dirichlet"}
    settings = {"name": "label_em", "transition": transition, "num_passes": 2, "num_fit_rounds": 2}
    plan = federation.plan(settings, task, num_classes=10, num_iterations=5)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, _ = federation.record.load()
    for name in ("y", "transition", "models", "weights", "centre"):
        assert torch.equal(found[f"state.{name}"], wanted[f"state.{name}"]), name
    sums = {
        "classes",
        "first",
        "second",
        "counts",
        "labels",
        "gram",
        "clean",
        "given",
        "fit",
        "sums",
        "slope",
        "weight",
        "losses",
        "fits",
    }
    for i, name in enumerate(federation.names):
        own = load_file(tmp_path / name / "runs" / "trial" / "solution.safetensors")
        assert torch.equal(own["x.logit"], result.x[i]["logit"])
        assert bool(own["x.logit"].any())
        sent = [array for line in federation.left(name) for array in line.get("arrays", ())]
        assert {array["name"] for array in sent} <= sums | {"seen", "unseen", "wrong", "classes", "figures"}
        assert all(len(own["x.logit"]) not in array["shape"] for array in sent)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_detectors_are_found_by_name_but_are_no_algorithms_for_every_problem():
    assert discovery.algorithm("label_em") is LabelEM
    assert "label_em" in discovery.detectors()
    assert "label_em" not in discovery.algorithms()
    assert Detector not in discovery.detectors().values()


def test_problems_without_labels_are_refused():
    with pytest.raises(ScopeError, match="learn=labels"):
        LabelEM().check_scopes(Scopes())
    with pytest.raises(ProblemError, match="use the task data_cleaning with learn='labels'"):
        drive(LabelEM(), DataCleaning(num_clients=3, test_share=0.8).build(), 0)
    with pytest.raises(ProblemError, match="use the task data_cleaning with learn='labels'"):
        drive(LabelEM(), Quadratic(num_clients=3, upper="private").build(), 0)
    with pytest.raises(ProblemError, match="use a linear model"):
        drive(LabelEM(), small(model="mlp"), 0)
    built = small()
    weighted = dataclasses.replace(built.problem, client_weights="by_samples")
    with pytest.raises(SettingError, match="use client_weights='equal'"):
        drive(LabelEM(), Built(weighted, built.clients), 0)
