"""Detectors by a hypergradient, against dense algebra, finite differences and plain retraining."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import log_softmax, softmax
from scipy.stats import ttest_rel

from fedbilevel.detectors import shared_weights
from fedbilevel.detectors.from_posterior import FromPosterior
from fedbilevel.detectors.influence import Influence
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.detectors.sample_weights import SampleWeights
from fedbilevel.detectors.shared_weights import SharedWeights
from fedbilevel.federation.algorithm import Kept
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.task import Built
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.yardstick import check_continues, drive
from support.sites.loopback import Loopback, simulated

EXACT = {"residual": 1e-13, "num_lower_rounds": 3000, "num_system_rounds": 200}
EYE = np.eye(CLASSES)


class Dense(ByHand):
    """The lower level on pooled samples, solved by Newton steps with the whole Hessian."""

    def __init__(self, built: Built, l2: float) -> None:
        super().__init__(built, LabelEM())
        self.l2, self.given = l2, EYE[self.label]

    def hessian(self, W, T, S):
        p, mass = softmax(self.z @ W, axis=1), T.sum(1)
        inner = p[:, :, None] * EYE - p[:, :, None] * p[:, None]
        H = np.einsum("j,ja,jb,jkl->akbl", mass, self.z, self.z, inner, optimize=True) / S
        return H.reshape(W.size, W.size) + self.l2 * np.eye(W.size)

    def fit(self, T, S=None):
        S, W = T.sum() if S is None else S, np.zeros((self.z.shape[1], CLASSES))
        for _ in range(12):
            p = softmax(self.z @ W, axis=1)
            slope = self.z.T @ (T.sum(1, keepdims=True) * p - T) / S + self.l2 * W
            W = W - np.linalg.solve(self.hessian(W, T, S), slope.ravel()).reshape(W.shape)
        assert np.abs(slope).max() < 1e-12
        return W

    def loss(self, T, S=None, half=None):
        own = np.ones(len(self.yc), bool) if half is None else self.half == half
        logs = log_softmax(self.zc[own] @ self.fit(T, S), axis=1)
        return -logs[range(own.sum()), self.yc[own]].mean()


def rows(fed, kept):
    return fed.host.unpad(fed.collect(kept), torch.arange(fed.num_clients)).view(-1, CLASSES).numpy()


# ---- influence -----------------------------------------------------------------------------------------------------


def test_influences_are_those_of_the_explicit_inverse_and_of_retraining_with_another_weight():
    built, detector = small(), Influence(lower_l2=0.2, **EXACT)
    fed, state = drive(detector, built, 1)
    dense = Dense(built, 0.2)
    W = dense.fit(dense.given)
    slope = dense.zc.T @ (softmax(dense.zc @ W, axis=1) - EYE[dense.yc]) / len(dense.yc)
    u = np.linalg.inv(dense.hessian(W, dense.given, len(dense.z))) @ slope.ravel()
    each = [
        np.outer(z, p - t).ravel() for z, p, t in zip(dense.z, softmax(dense.z @ W, axis=1), dense.given, strict=True)
    ]
    found = rows(fed, state.score)
    np.testing.assert_allclose(found, np.repeat(-(np.array(each) @ u)[:, None], CLASSES, 1), rtol=1e-7, atol=1e-9)
    num, far = len(dense.z), 1e-3
    for j in (0, 17, 31, 60, 100):
        weights = np.ones(num)
        losses = []
        for weights[j] in (1 + far, 1 - far):
            losses.append(dense.loss(weights[:, None] * dense.given, S=num))
        assert found[j, 0] == pytest.approx(num * (losses[0] - losses[1]) / (2 * far), rel=1e-4, abs=1e-7)


def test_harmful_labels_are_flagged_and_ranked_by_their_influence():
    built, detector = small(), Influence(lower_l2=0.2)
    fed, state = drive(detector, built, 1)
    own = rows(fed, state.score)[:, 0]
    label = np.concatenate([client["train"]["label"] for client in built.clients])
    wrong = 1 - posteriors(fed, state, built)[range(len(label)), label]
    assert 0 < (own > 0).sum() < len(own)
    np.testing.assert_allclose(np.log(wrong / (1 - wrong)), 8 * np.arcsinh(own / np.sqrt((own**2).mean())), atol=1e-4)
    assert wrong.mean() == pytest.approx((own > 0).mean(), abs=0.05)
    assert drive(detector, built, 2)[1].found["cut"] is None  # x holds no probabilities


@pytest.mark.parametrize("kind", [Influence, SampleWeights, SharedWeights])
def test_without_clean_samples_no_label_is_doubted(kind):
    built = small()
    none = [{**one["val"], "trusted": np.zeros(len(one["val"]["label"]), bool)} for one in built.clients]
    clients = [{**one, "val": val} for one, val in zip(built.clients, none, strict=True)]
    fed, state = drive(kind(), Built(built.problem, clients), kind().num_detections())
    label = np.concatenate([client["train"]["label"] for client in built.clients])
    assert (posteriors(fed, state, built)[range(len(label)), label] > 0.99).all()


def test_the_cost_of_influence_is_that_of_its_docstring():
    built, detector = small(), Influence(num_lower_rounds=7, num_system_rounds=3, residual=1e-15, num_fit_rounds=2)
    fed, _ = drive(detector, built, 0)
    before = fed.bill().totals()
    fed, _ = drive(detector, built, 1)
    after = fed.bill().totals()
    cd = 5 * CLASSES
    assert after["rounds"] - before["rounds"] == 7 + 3 + 2
    assert after["floats_up"] - before["floats_up"] == 3 * (7 * (cd + 1) + 3 * cd + 2 * cd + 4 + 1)


def test_the_losses_of_both_halves_have_systems_of_their_own():
    built, detector = small(), Influence(lower_l2=0.2, **EXACT)
    fed, state = drive(detector, built, 0)
    target = fed.mean(detector.given_targets, x=state.x).target
    fit = detector.trained(fed, state, target)
    found = detector.adjoint(fed, state, target, fit, halves=True)
    dense = Dense(built, 0.2)
    H, W = dense.hessian(fit.model.numpy(), dense.given, len(dense.z)), fit.model.numpy()
    for half, u in enumerate(found.u):
        own = dense.half == half
        gap = softmax(dense.zc[own] @ W, axis=1) - EYE[dense.yc[own]]
        np.testing.assert_allclose(H @ u.numpy().ravel(), (dense.zc[own].T @ gap / own.sum()).ravel(), atol=1e-9)
        assert float(found.loss[half]) == pytest.approx(dense.loss(dense.given, half=half))
        assert 3 * float(found.counts[half]) == pytest.approx(own.sum())


# ---- weights -------------------------------------------------------------------------------------------------------


def test_the_hypergradient_of_the_shared_function_is_that_of_finite_differences():
    built, detector = small(), SharedWeights(lower_l2=0.05, **EXACT)
    fed, state = drive(detector, built, 0)
    state = detector.scored(fed, state)
    draw = torch.Generator().manual_seed(1)
    theta = torch.randn(4 * 16 + 33, generator=draw, dtype=torch.float64)
    found = detector.hypergradient(fed, state, theta)
    dense = Dense(built, 0.05)
    score, label = torch.tensor(rows(fed, state.score)), torch.tensor(dense.label)

    def loss(theta):
        w = shared_weights.weight(theta, shared_weights.described(score, label, state.heat)).numpy()
        assert w.std() > 0.05
        return dense.loss(w[:, None] * dense.given)

    assert found.loss == pytest.approx(loss(theta), rel=1e-9)
    for k in (0, 1, 9, 40, 63, 70, 85, 96):
        far = torch.zeros_like(theta)
        far[k] = 1e-4
        wanted = (loss(theta + far) - loss(theta - far)) / 2e-4
        assert float(found.theta[k]) == pytest.approx(wanted, rel=1e-5, abs=1e-9)


def test_the_shared_function_has_209_numbers_for_ten_classes_and_starts_at_plain_training():
    theta = shared_weights.initial(torch.zeros(100))
    assert len(theta) == 209
    inputs = torch.randn(7, 11, dtype=torch.float64)
    assert torch.equal(shared_weights.weight(theta, inputs), torch.full((7,), 0.5, dtype=torch.float64))
    assert theta[: 11 * 16].std() > 0.4


def test_weights_of_the_shared_function_are_relative_to_those_of_clean_samples():
    built, detector = small(), SharedWeights(ridge=0.02)
    fed, state = drive(detector, built, 0)
    state = detector.scored(fed, state)
    theta = torch.randn(97, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weigh = lambda S, label: shared_weights.weight(
        theta, shared_weights.described(torch.tensor(np.array(S)), torch.tensor(label), state.heat)
    ).numpy()
    hand = ByHand(built, LabelEM(ridge=0.02))
    gram, sums = hand.gram + 0.02 * len(hand.z) * np.eye(5), hand.z.T @ EYE[hand.label] + hand.B
    pairs = list(zip(hand.zc, hand.yc, strict=True))
    S = [z @ np.linalg.solve(gram - np.outer(z, z), sums - np.outer(z, EYE[y])) for z, y in pairs]
    found = fed.mean(
        detector.clean_weights, theta=theta, heat=state.heat, inverse=state.inverse, weights=state.weights,
        centre=state.centre, scale=state.scale,
    ).sums  # fmt: skip
    assert (3 * found).tolist() == pytest.approx([weigh(S, hand.yc).sum(), len(S)])
    x = fed.mean(detector.as_labels, theta=theta, score=state.score, heat=state.heat, typical=0.3).x
    own = [hand.refit_without(j, EYE[hand.label]) for j in range(len(hand.z))]
    w = weigh(own, hand.label) / 0.3
    assert 0 < (w < 1).sum() < len(w)
    q = posteriors(fed, state._replace(x=x), built)
    np.testing.assert_allclose(q[range(len(w)), hand.label], np.minimum(w, 1), atol=2e-6)


def test_the_shared_function_learns_to_doubt_wrong_labels():
    built = small()
    fed, state = drive(SharedWeights(lower_l2=0.05), built, 30)
    label, wrong = (np.concatenate([client["train"][name] for client in built.clients]) for name in ("label", "wrong"))
    q = posteriors(fed, state, built)[range(len(label)), label]
    assert q[wrong].mean() < q[~wrong].mean() - 0.3
    assert drive(SharedWeights(num_upper_steps=1), built, 2)[1].found["cut"] is None


def test_the_first_step_of_sample_weights_is_along_finite_differences():
    built, detector = small(), SampleWeights(lower_l2=0.05, num_steps=1, step=0.7, **EXACT)
    fed, state = drive(detector, built, 1)
    dense = Dense(built, 0.05)
    v, far = np.zeros(len(dense.z)), 1e-3
    slope = np.zeros_like(v)
    for j in range(len(v)):
        losses = []
        for v[j] in (far, -far):
            losses.append(dense.loss(dense.given / (1 + np.exp(-v[:, None]))))
        v[j] = 0
        slope[j] = (losses[0] - losses[1]) / (2 * far)
    wanted = -0.7 * slope / np.sqrt((slope**2).mean())
    np.testing.assert_allclose(rows(fed, state.score)[:, 0], wanted, rtol=1e-3, atol=1e-4)
    q = posteriors(fed, state, built)[range(len(v)), dense.label]
    np.testing.assert_allclose(q, 1 / (1 + np.exp(-wanted)), atol=1e-3)


# ---- posteriors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
def test_a_proposed_step_of_posteriors_is_along_finite_differences_for_a_half(half):
    built, detector = small(), FromPosterior(lower_l2=0.05, num_passes=2, ridge=0.02, **EXACT)
    em = LabelEM(num_passes=2, ridge=0.02)
    fed, state = drive(detector, built, 1)
    fed.begin(2)
    state = super(FromPosterior, detector).detect(fed, state)
    assert np.allclose(posteriors(fed, state, built), posteriors(*drive(em, built, 2), built))
    score = fed.mean(detector.logits, x=state.x).score
    s = rows(fed, score).copy()
    fit = detector.trained(fed, state, fed.mean(detector.as_targets, score=score).target)
    moved = rows(fed, detector.proposed(fed, state, score, fit, half, 0.3)) - s
    dense = Dense(built, 0.05)
    np.testing.assert_allclose(fit.model.numpy(), dense.fit(softmax(s, axis=1)), atol=1e-9)
    assert (moved**2).sum() == pytest.approx(0.09 * len(s))
    draw, far = np.random.default_rng(2), 1e-4
    size = None
    for _ in range(5):
        way = draw.standard_normal(s.shape)
        ends = [dense.loss(softmax(s + sign * far * way, axis=1), half=half) for sign in (1, -1)]
        ratio = (ends[0] - ends[1]) / (2 * far) / (moved * way).sum()
        size = ratio if size is None else size
        assert ratio < 0
        assert ratio == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("half", [0, 1])
def test_clean_samples_agree_by_a_paired_test(half):
    built, detector = small(), FromPosterior(lower_l2=0.05, num_passes=1, **EXACT)
    fed, state = drive(detector, built, 0)
    dense = Dense(built, 0.05)
    truth = np.concatenate([(c["train"]["label"] - c["train"]["wrong"]) % CLASSES for c in built.clients])
    fits = [detector.trained(fed, state, fed.mean(detector.given_targets, x=state.x).target)]
    fits.append(fits[0]._replace(model=torch.tensor(dense.fit(EYE[truth] * 0.5 + dense.given))))
    own = dense.half == half
    logs = [log_softmax(dense.zc[own] @ fit.model.numpy(), axis=1)[range(own.sum()), dense.yc[own]] for fit in fits]
    t = ttest_rel(logs[1], logs[0]).statistic
    for asked, wanted in ((t - 0.01, True), (t + 0.01, False)):
        judge = FromPosterior(lower_l2=0.05, num_passes=1, least_t=asked)
        fed, state = drive(judge, built, 0)
        assert judge.agreed(fed, state, *fits, half) == wanted


def test_without_an_accepted_step_the_posteriors_are_those_of_label_em():
    built = small()
    refused = FromPosterior(num_passes=2, ridge=0.02, least_t=1e9, num_upper_steps=3)
    em = LabelEM(num_passes=2, ridge=0.02)
    wanted = posteriors(*drive(em, built, 4), built)
    np.testing.assert_array_equal(posteriors(*drive(refused, built, 4), built), wanted)
    taken = FromPosterior(num_passes=2, ridge=0.02, least_t=-1e9, num_upper_steps=3)
    fed, state = drive(taken, built, 4)
    assert np.abs(posteriors(fed, state, built) - wanted).max() > 0.05
    assert not bool(state.weights.any())  # no cut at a false-discovery rate


# ---- all of them ---------------------------------------------------------------------------------------------------

BRIEF = {
    "influence": Influence(num_lower_rounds=5, num_system_rounds=3, num_fit_rounds=3),
    "sample_weights": SampleWeights(num_lower_rounds=5, num_system_rounds=3, num_steps=2, num_fit_rounds=3),
    "shared_weights": SharedWeights(num_lower_rounds=5, num_system_rounds=3, num_upper_steps=4, num_fit_rounds=3),
    "from_posterior": FromPosterior(
        num_lower_rounds=5,
        num_system_rounds=3,
        num_upper_steps=2,
        num_passes=1,
        num_refinements=2,
        num_fold_rounds=3,
        num_fit_rounds=2,
        least_t=-9.0,
    ),
}


@pytest.mark.parametrize("name", BRIEF)
def test_a_resumed_run_is_the_same_bit_for_bit(name):
    check_continues(BRIEF[name], small())


@pytest.mark.parametrize("name", BRIEF)
def test_the_order_of_clients_changes_nothing(name):
    built, detector = small(), BRIEF[name]
    order = [2, 0, 1]
    clients = [placed(built.clients[old], old, new) for new, old in enumerate(order)]
    detector = dataclasses.replace(detector, num_refinements=0) if name == "from_posterior" else detector  # addressed
    num = detector.num_detections()
    fed, state = drive(detector, built, num)
    other, permuted = drive(detector, Built(built.problem, clients), num)
    sizes = [len(client["train"]["label"]) for client in built.clients]
    parts = np.split(posteriors(fed, state, built), np.cumsum(sizes)[:-1])
    wanted = np.concatenate([parts[old] for old in order])
    assert wanted.std() > 0.1
    np.testing.assert_allclose(posteriors(other, permuted, Built(built.problem, clients)), wanted, atol=1e-9)
    assert isinstance(state.x, Kept)
    assert isinstance(state.score, Kept)


def placed(client, old, new):
    """The client under another number, whose draw holds out the same clean samples."""
    num = len(client["val"]["label"])
    used, held = Stream(0).divided("held", old, num, 0.5)
    now_used, now_held = Stream(0).divided("held", new, num, 0.5)
    place = torch.empty(num, dtype=torch.long)
    place[now_used], place[now_held] = used, held
    return {**client, "val": {name: values[place.numpy()] for name, values in client["val"].items()}}


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("name", BRIEF)
def test_sites_have_the_posteriors_of_the_simulator_and_send_sums_only(tmp_path, name):
    federation = Loopback(tmp_path, 3)
    task = {"name": "data_cleaning", "num_clients": 3, "num_clean": 12, "test_share": 0.8, "learn": "labels"}
    task |= {"noise": 0.2, "noise_most": 0.6, "partition": "dirichlet"}
    often = {"num_lower_rounds": 3, "num_system_rounds": 2, "num_fit_rounds": 2}
    many = {"sample_weights": "num_steps", "shared_weights": "num_upper_steps", "from_posterior": "num_upper_steps"}
    own = {many[name]: 2} if name in many else {}
    own |= {"num_passes": 1, "num_refinements": 1, "least_t": -9.0} if name == "from_posterior" else {}
    plan = federation.plan({"name": name, **often, **own}, task, num_classes=10, num_iterations=5)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, _ = federation.record.load()
    for field in ("y", "models", "weights", "centre"):
        assert torch.equal(found[f"state.{field}"], wanted[f"state.{field}"]), field
    for i, site in enumerate(federation.names):
        own_x = load_file(tmp_path / site / "runs" / "trial" / "solution.safetensors")["x.logit"]
        assert torch.equal(own_x, result.x[i]["logit"])
        assert bool(own_x.any())
        sent = [array for line in federation.left(site) for array in line.get("arrays", ())]
        assert not {array["name"] for array in sent} & {"x", "score", "target", "pull", "trial", "leverage"}
        num = len(own_x) // 10
        assert all({num, len(own_x)}.isdisjoint(array["shape"]) for array in sent)
