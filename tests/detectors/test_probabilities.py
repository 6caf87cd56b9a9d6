"""Detectors that read class probabilities of networks: label EM and confident learning in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from fedbilevel.detectors._scored import LEAST
from fedbilevel.detectors.confident import MARGINS, Confident
from fedbilevel.detectors.label_em import HEATS, OF_LOGS, LabelEM
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.task import Built, Shapes
from support.numeric.labels import CENTRES, CLASSES, normed, posteriors, small
from support.numeric.yardstick import check_continues, drive


def with_probabilities() -> Built:
    """The small clients with rows of class probabilities and their logarithms instead of images."""
    clients = []
    for client in small().clients:
        roles = {}
        for role, part in client.items():
            p = softmax(0.4 * part["image"] @ CENTRES.T, axis=1)
            roles[role] = {**part, "image": np.concatenate([p, np.log(p)], axis=1)}
        clients.append(roles)
    return Built(DataCleaning(learn="labels").problem(Shapes.of(clients[0], CLASSES)), clients)


def floored_logs(rows):
    return np.log(np.maximum(rows[:, :CLASSES], LEAST))


def joined(built, name):
    return np.concatenate([client["train"][name] for client in built.clients])


def test_posteriors_are_those_of_em_on_the_given_probabilities():
    built = with_probabilities()
    em = LabelEM(reads="probabilities", num_passes=2, num_steps=30, tolerance=1e-9, least_clean=2)
    fed, state = drive(em, built, em.num_passes)
    S, label = floored_logs(joined(built, "image")), joined(built, "label")
    used = []
    for i, client in enumerate(built.clients):
        order = Stream(0).order("held", i, len(client["val"]["label"]), iteration=0).numpy()
        kept = np.sort(order[round(0.5 * len(order)) :])
        used.append((floored_logs(client["val"]["image"][kept]), client["val"]["label"][kept]))
    clean, truth = (np.concatenate(part) for part in zip(*used, strict=True))
    fits = [log_softmax(b / OF_LOGS * clean, axis=1)[range(len(truth)), truth].sum() for b in HEATS]
    heat = HEATS[int(np.argmax(fits))] / OF_LOGS
    T = np.full((CLASSES, CLASSES), 0.5 / CLASSES) + 0.5 * np.eye(CLASSES)
    for _ in range(30):
        q = softmax(log_softmax(heat * S, axis=1) + np.log(T[:, label].T), axis=1)
        T = normed(np.stack([[q[label == c, k].sum() for c in range(CLASSES)] for k in range(CLASSES)]) + em.prior)
    q = softmax(log_softmax(heat * S, axis=1) + np.log(T[:, label].T), axis=1)
    assert state.heat == heat
    np.testing.assert_allclose(state.transition.view(CLASSES, -1).numpy(), T, atol=1e-7)
    np.testing.assert_allclose(posteriors(fed, state, built), q, atol=1e-6)
    assert np.abs(q - softmax(S, axis=1)).max() > 0.1


def test_flags_are_those_of_confident_learning_on_the_given_probabilities():
    built = with_probabilities()
    detector = Confident(reads="probabilities")
    fed, state = drive(detector, built, 1)
    p, label = joined(built, "image")[:, :CLASSES], joined(built, "label")
    least = np.array([p[label == c, c].mean() for c in range(CLASSES)])
    sure = p >= least
    guess = np.where(sure, p, 0).argmax(1)
    joint = np.zeros((CLASSES, CLASSES))
    np.add.at(joint, (label[sure.any(1)], guess[sure.any(1)]), 1)
    asked = joint / joint.sum(1, keepdims=True) * np.bincount(label)[:, None]
    bins = np.clip(((p - p[range(len(p)), label][:, None] + 1) / 2 * MARGINS).astype(int), 0, MARGINS - 1)
    wanted = np.zeros(len(p), bool)
    for given in range(CLASSES):
        for c in set(range(CLASSES)) - {given}:
            rows = np.flatnonzero(label == given)
            cut = next(b for b in range(MARGINS + 1) if (bins[rows, c] >= b).sum() <= asked[given, c] + 1e-9)
            wanted[rows] |= bins[rows, c] >= cut
    q = posteriors(fed, state, built)
    assert 0 < wanted.sum() < len(wanted)
    assert (q[range(len(q)), label] < 0.5).tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", [LabelEM, Confident])
def test_a_run_on_probabilities_resumes_and_trains_classifiers(kind):
    detector = kind(reads="probabilities", num_fit_rounds=3)
    check_continues(detector, with_probabilities())
    _, state = drive(detector, with_probabilities(), detector.num_iterations())
    assert torch.isfinite(state.y).all()
    assert "verdict" in state.found
