"""The study of cleaning: figures of a detector whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.studies.kinds import cleaning

TASK = {"name": "data_cleaning", "num_clients": 4, "noise": 0.2, "test_share": 0.4, "data_seed": 3}


def go(tmp_path, **row):
    whole = {"task": TASK, "detector": {"name": "label_em", "num_fit_rounds": 5}, "features": "given", **row}
    return cleaning.run(whole, repetition=1, folder=tmp_path, device="cpu", say=lambda text: None).figures


def test_figures_of_a_detector(tmp_path):
    found = go(tmp_path)
    assert found["f1"] == pytest.approx(2 / (1 / found["precision"] + 1 / found["recall"]))
    assert found["average_precision"] > 0.8
    assert found["test_accuracy"] == found["cleaned" if found["accepted"] else "plain"]
    assert found["cleaned"] > found["plain"] > 0.5
    assert found["rounds"] > 10


def test_right_labels_alone_have_nothing_to_flag(tmp_path):
    found = go(tmp_path, detector={"name": "as_given", "num_fit_rounds": 5}, only_right=True)
    assert found["recall"] == found["average_precision"] == 0
    assert found["cleaned"] == found["plain"] > go(tmp_path)["plain"]


def test_a_linear_classifier_of_the_inputs_learns_from_the_cleaned_labels(tmp_path):
    task = {**TASK, "noise": 0.6}
    found = {how: go(tmp_path, task=task, linear=how, features="convolutional") for how in ("kept", "corrected")}
    none = go(tmp_path, task=task, linear="kept", detector={"name": "as_given", "num_fit_rounds": 5})
    assert "linear" not in go(tmp_path)
    assert found["kept"]["f1"] == found["corrected"]["f1"]
    assert found["kept"]["linear"] != found["corrected"]["linear"]
    assert min(found["kept"]["linear"], found["corrected"]["linear"]) > none["linear"] > 0.5


def test_average_precision_by_hand():
    chance, wrong = np.array([0.9, 0.8, 0.7, 0.1]), np.array([True, False, True, False])
    assert cleaning.average_precision(chance, wrong) == pytest.approx((1 / 1 + 2 / 3) / 2)


def test_refusals(tmp_path):
    with pytest.raises(SettingError, match="the detector is None"):
        go(tmp_path, detector=None)
    with pytest.raises(SettingError, match="expected one of as_given, confident, "):
        go(tmp_path, detector={"name": "fedbio"})
    with pytest.raises(ProblemError, match="does not mark wrong labels"):
        go(tmp_path, task={"name": "quadratic"})
