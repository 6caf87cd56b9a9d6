"""Confident learning on pooled data beside detectors: its flags, its figures, and `confident` against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbilevel.cleaning.clean import clean_labels
from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.confident import Confident
from fedbilevel.errors import FedBilevelError, SettingError, UnknownNameError
from fedbilevel.studies import pooled
from fedbilevel.studies.kinds import cleaning, confident_learning
from fedbilevel.tasks.data_cleaning import DataCleaning
from support.numeric.labels import CLASSES, posteriors, small
from support.numeric.rivals import some_noisy_clients
from support.numeric.yardstick import drive

needs_cleanlab = pytest.mark.skipif(
    confident_learning.find_spec("cleanlab") is None,
    reason="cleanlab is not installed: pip install 'fedbilevel[reference]'",
)
TASK = {"name": "data_cleaning", "num_clients": 4, "noise": 0.2, "test_share": 0.4, "data_seed": 3}


def go(tmp_path, **row):
    whole = {"task": TASK, "detector": {"name": "as_given", "num_fit_rounds": 5}, "features": "given", **row}
    return cleaning.run(whole, repetition=1, folder=tmp_path, device="cpu", say=lambda text: None).figures


@needs_cleanlab
def test_a_pooled_row_has_the_figures_of_a_detector_but_no_rounds(tmp_path):
    found = go(tmp_path, pooled={"l2": 0.03, "num_folds": 4})
    beside = go(tmp_path, detector={"name": "confident", "num_fit_rounds": 5})
    assert found.keys() == beside.keys() - {"rounds", "megabytes"}
    assert found["f1"] > 0.7
    assert found["cleaned"] > found["plain"]
    assert found["plain"] == pytest.approx(beside["plain"])  # one classifier for all rows


@needs_cleanlab
def test_flags_are_those_of_cleanlab_on_standardised_features_of_all_clients():
    clients, _ = some_noisy_clients()
    settings = pooled.Pooled(num_folds=3, l2=0.02)
    detector = pooled.flagging(settings, AsGiven(num_fit_rounds=3), clients, "given", 5, pytest.fail)
    found = clean_labels(clients, detector=detector, features="given", dtype=torch.float64)
    image, label = (np.concatenate([client["train"][name] for client in clients]) for name in ("image", "label"))
    image = image.astype(np.float32).astype(np.float64)
    variance = image.var(0)
    rows = (image - image.mean(0)) / np.sqrt(variance + 0.01 * variance.mean())
    fitted = lambda some, names: confident_learning.logistic(some, names, 0.02, 300, pytest.fail)
    p = confident_learning.out_of_sample(rows, label, 3, 5, fitted)
    wanted = confident_learning.label_issues(label, p)
    flags = np.concatenate(found.flags)
    assert np.array_equal(flags, wanted)
    assert 50 < flags.sum() < 200
    own = p[np.arange(len(label)), label]
    np.testing.assert_allclose(np.concatenate(found.wrong), 1 - np.where(wanted, own / 2, (1 + own) / 2), atol=1e-5)
    assert found.found["cut"] is None


@needs_cleanlab
@pytest.mark.parametrize("flip", ["uniform", "asymmetric"])
def test_confident_by_sums_flags_what_cleanlab_flags_on_the_same_probabilities(flip):
    """Cuts are rounded to bins, and cleanlab calibrates counts, so a few samples near a cut differ."""
    task = DataCleaning(
        num_clients=4, noise=0.2, flip=flip, partition="dirichlet", test_share=0.3, data_seed=3, learn="labels",
        features="convolutional",
    )  # fmt: skip
    built = task.build()
    fed, state = drive(Confident(), built, 1)
    label = np.concatenate([client["train"]["label"] for client in built.clients])
    wrong = np.concatenate([client["train"]["wrong"] for client in built.clients])
    score = fed.host.unpad(fed.collect(state.score), torch.arange(4)).view(len(label), -1)
    p = (state.heat * score).softmax(1).numpy()
    mine = posteriors(fed, state, built)[np.arange(len(label)), label] < 0.5
    theirs = confident_learning.label_issues(label, p)
    scored = lambda flags: 2 * (flags & wrong).sum() / (flags.sum() + wrong.sum())
    both = 2 * (mine & theirs).sum() / (mine.sum() + theirs.sum())
    assert both > 0.9
    assert abs(scored(mine) - scored(theirs)) < 0.05
    assert scored(mine) > 0.6


def test_given_labels_reach_their_clients():
    built = small()
    rows = [torch.randn(len(client["train"]["label"]) * CLASSES).double() for client in built.clients]
    fed, state = drive(pooled.with_labels(AsGiven(num_fit_rounds=2), rows), built, 1)
    kept = fed.host.unpad(fed.collect(state.x), torch.arange(3))
    assert torch.equal(kept, torch.cat(rows))


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="not by label_em: use as_given"):
        go(tmp_path, detector={"name": "label_em"}, pooled={})
    with pytest.raises(UnknownNameError, match="no setting of Pooled named 'folds'"):
        go(tmp_path, pooled={"folds": 3})
    monkeypatch.setattr(confident_learning, "find_spec", lambda name: None)
    with pytest.raises(FedBilevelError, match=r"needs the package cleanlab.*pip install 'fedbilevel\[reference\]'"):
        go(tmp_path, pooled={})
