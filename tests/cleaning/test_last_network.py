"""The guard's choice among last networks: its rule, its order, and what candidates learn from."""

from __future__ import annotations

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.cleaning import last_network
from fedbilevel.cleaning.last_network import chosen, guarded, trained, unread, without
from fedbilevel.cleaning.truth import classes
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.errors import SettingError
from tests.cleaning.test_fold_networks import striped, stripes


class Fixed:
    """A network with given class probabilities."""

    def __init__(self, p):
        self.p = p

    def probabilities(self, images):
        return self.p


def answers(label, share, seed, sure=0.9):
    """Class probabilities that are right for a share of the samples."""
    right = np.random.default_rng(seed).random(len(label)) < share
    said = np.where(right, label, (label + 1) % 2)
    return np.where(np.eye(2)[said] > 0, sure, 1 - sure)


LABEL = np.arange(400) % 2
CLEAN = {"image": np.zeros((400, 1)), "label": LABEL}
GUARD = LabelEM()


def test_the_figures_are_paired_differences():
    cleaned, plain = answers(LABEL, 0.9, 0), answers(LABEL, 0.7, 1)
    found = guarded(cleaned, plain, LABEL, GUARD)
    own = lambda p: p[np.arange(400), LABEL]
    gain = (own(cleaned) > 0.5).astype(float) - (own(plain) > 0.5)
    better = np.log(own(cleaned)) - np.log(own(plain))
    assert found["gain"] == pytest.approx(gain.mean())
    assert found["gain_error"] == pytest.approx(gain.std(ddof=1) / 20)
    assert found["t"] == pytest.approx(better.mean() / (better.std(ddof=1) / 20))
    assert (found["verdict"], found["basis"]) == ("accepted", "answers")


def test_probabilities_that_differ_by_a_temperature_are_no_evidence():
    """A network that is only less sure than another is calibrated to the same probabilities."""
    plain = answers(LABEL, 0.8, 1, sure=1 / (1 + np.exp(-4.0)))
    cooler = answers(LABEL, 0.8, 1, sure=1 / (1 + np.exp(-2.0)))
    found = guarded(cooler, plain, LABEL, GUARD)
    assert found["t"] > 3
    assert abs(found["evidence"]) < 1e-6
    assert (found["verdict"], found["basis"]) == ("rejected", "")


def test_few_samples_or_a_missing_class_decide_nothing():
    good, bad = answers(LABEL, 0.99, 0), answers(LABEL, 0.5, 1)
    assert guarded(good[:19], bad[:19], LABEL[:19], GUARD)["verdict"] == "unchecked"
    assert guarded(good[::2], bad[::2], LABEL[::2], GUARD)["verdict"] == "unchecked"
    assert guarded(good, bad, LABEL, GUARD)["verdict"] == "accepted"
    assert guarded(good, bad, LABEL, LabelEM(least_clean=401))["verdict"] == "unchecked"


def test_the_first_accepted_candidate_stays_unless_another_is_surely_right_more_often():
    plain = Fixed(answers(LABEL, 0.6, 0))
    pruned, alike, best = (Fixed(answers(LABEL, share, seed)) for share, seed in ((0.8, 1), (0.81, 2), (0.97, 3)))
    pick = lambda *some: chosen(plain, list(zip(last_network.CANDIDATES, some, strict=False)), CLEAN, GUARD)
    assert pick(plain).name == "as_given"
    assert pick(plain).network is plain
    assert pick(pruned, alike).name == "pruned"
    assert pick(pruned, alike, best).name == "soft"
    assert pick(plain, pruned).name == "corrected"
    assert {*pick(pruned, alike).figures} == {"pruned", "corrected"}


def test_candidates_learn_from_kept_labels_or_from_posteriors():
    clients = [{"image": np.arange(3.0)[:, None], "label": np.array([0, 1, 1])}]
    flags, posteriors = [np.array([False, True, False])], [np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])]
    go = lambda name: trained(name, clients, flags, posteriors, lambda some, targets: (some, targets))
    some, targets = go("pruned")
    assert (some[0]["image"].ravel().tolist(), some[0]["label"].tolist(), targets) == ([0, 2], [0, 1], None)
    assert go("corrected")[1][0].tolist() == [[1, 0], [0.8, 0.2], [0, 1]]
    assert go("soft")[1] is posteriors
    assert go("as_given")[1] is None
    all_flagged = without(clients, [np.ones(3, bool)])
    assert all_flagged[0]["label"].tolist() == [0]


def test_the_guard_of_networks_reads_the_samples_that_the_guard_of_detectors_reads():
    clients = striped()
    clients[1] = {"train": clients[1]["train"], "val": {k: v[:1] for k, v in clients[1]["val"].items()}}
    del clients[2]["val"]
    clients.append(striped()[0])
    found = fb.clean_labels(clients, features="given", seed=5, num_fit_rounds=5)
    held = unread(clients, 0.5, 5)
    right = classes(found.classifiers["plain"], found.rows(held["image"])) == held["label"]
    assert len(held["label"]) == found.found["num_guard"] == 20
    assert right.mean() == pytest.approx(found.found["plain_accuracy"])
    assert unread([{"train": clients[0]["train"]}], 0.5, 0)["image"].shape == (0, 8, 8)


def test_a_cleaning_trains_last_networks_and_predicts_by_the_choice():
    clients = striped(num=100)
    training = {"num_folds": 2, "width": 8, "num_rounds": 40, "batch_size": 16}
    found = fb.clean_labels(clients, features="out_of_fold", training=training, retrain=True)
    accepted = [name for name, own in found.last.figures.items() if own["verdict"] == "accepted"]
    assert [*found.last.figures] == ["pruned", "corrected"]
    assert found.last.name in (accepted or ["as_given"])
    assert found.last.figures["pruned"]["num_guard"] == 30
    assert found.last.sentence in found.sentences
    fresh = stripes(np.random.default_rng(5), 200)
    assert (found.predict(fresh["image"]) == fresh["label"]).mean() > 0.8
    wanted = found.last.network.probabilities(fresh["image"]).argmax(1)
    assert np.array_equal(found.predict(fresh["image"]), wanted)


def test_the_sentence_names_the_choice_and_its_gain():
    plain, pruned = Fixed(answers(LABEL, 0.6, 0)), Fixed(answers(LABEL, 0.9, 1))
    found = chosen(plain, [("pruned", pruned)], CLEAN, GUARD)
    assert "the guard chose pruned: on 400 held-out clean samples, it is right +" in found.sentence
    assert "none is surely better" in chosen(plain, [("pruned", plain)], CLEAN, GUARD).sentence


def test_what_cannot_be_trained_again_is_refused():
    with pytest.raises(SettingError, match="retrain is True and features is 'given'"):
        fb.clean_labels(striped(), features="given", retrain=True)
    with pytest.raises(SettingError, match="engine is 'distributed', expected 'simulation'"):
        fb.clean_labels(striped(), features="out_of_fold", retrain=True, engine="distributed")
