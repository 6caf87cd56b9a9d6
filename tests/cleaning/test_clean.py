"""Cleaning as a user calls it: suspects, the verdict, files, caveats and refusals."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.cleaning.client_labels import transition_finding
from fedbilevel.cleaning.judgement import caveats
from fedbilevel.data.sets.digits import digits
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.errors import DataError, ProblemError, SettingError, UnknownNameError
from fedbilevel.report.record_files import are_findings
from support.stops import ctrl_c


def samples(rng, num, *, shape=(5,), apart=4.0, classes=3):
    label = rng.integers(0, classes, num)
    centre = apart * np.eye(classes, int(np.prod(shape)))[label].reshape(num, *shape)
    return {"image": rng.normal(size=(num, *shape)) + centre, "label": label}


def noisy(num_clients=4, num_wrong=10, num_val=20, **how):
    """Clients whose first labels are wrong."""
    rng = np.random.default_rng(0)
    clients = [{"train": samples(rng, 100, **how), "val": samples(rng, num_val, **how)} for _ in range(num_clients)]
    for client in clients:
        train = client["train"]
        train["wrong"] = np.arange(100) < num_wrong
        train["label"] = np.where(train["wrong"], (train["label"] + 1) % 3, train["label"])
    return clients


def test_wrong_labels_are_found_and_their_true_labels_suggested(tmp_path):
    clients = noisy(num_val=60)
    found = fb.clean_labels(clients, record=tmp_path, names=["a", "b", "c", "d"], class_names=["cat", "dog", "emu"])
    assert found.verdict == "accepted"
    for flags in found.flags:
        assert flags[:10].all()
        assert flags[10:].sum() <= 1
    for one in found.suspects():
        if one.sample < 10:
            at = clients["abcd".index(one.client)]["train"]["label"][one.sample]
            names = ("cat", "dog", "emu")
            assert (one.label, one.suggested) == (names[at], names[(at - 1) % 3])
    assert [one.probability for one in found.suspects()] == sorted(
        (s.probability for s in found.suspects()), reverse=True
    )
    assert len(found.suspects(3)) == 3
    assert found.noise["a"] == pytest.approx(0.1, abs=0.03)
    assert found.transition.sum(1) == pytest.approx(np.ones(3))
    assert found.client_transition(0).sum(1) == pytest.approx(np.ones(3))
    assert found.result.rows[-1]["recall"] == found.truth.recall == 1
    assert found.truth.noise == dict.fromkeys("abcd", 0.1)
    assert found.tested is None
    assert "accepted" in repr(found)
    low, high = found.interval
    assert low < found.gain < high
    fresh = samples(np.random.default_rng(9), 200)
    assert (found.predict(fresh["image"]) == fresh["label"]).mean() > 0.95
    kept = found.kept(clients)
    assert not np.concatenate([client["train"]["wrong"] for client in kept]).any()
    for client, other, flags in zip(clients, found.corrected(clients), found.flags, strict=True):
        given, train = client["train"]["label"], other["train"]["label"]
        assert (train[:10] == (given[:10] - 1) % 3).all()  # the labels before they were made wrong
        assert (train == given)[~flags].all()
        assert train.dtype == given.dtype
    findings = json.loads((tmp_path / "findings.json").read_text())
    assert [one["kind"] for one in findings] == ["by_client", "matrix", "histogram"]  # five numbers are no picture
    assert are_findings(findings)
    assert (findings[1]["names"], findings[1]["values"]) == (["cat", "dog", "emu"], found.transition.tolist())
    written = json.loads((tmp_path / "cleaning.json").read_text())
    assert written["sentences"] == found.sentences
    assert written["transition"] == found.transition.tolist()
    assert written["noise"] == pytest.approx(np.mean([*found.noise.values()]))  # clients of one size


def test_a_cleaning_says_what_its_classifier_learned_from():
    """Logistic regressions win against so strong a ridge."""
    clients, settings = noisy(num_val=60), {"num_fit_rounds": 2, "ridge": 5.0}
    assert fb.clean_labels(clients, **settings).targets == "soft"
    assert fb.clean_labels(clients, **settings, num_refinements=0).targets == "kept"
    assert fb.clean_labels(clients, **settings, targets="weighted").targets == "weighted"


def test_the_transition_matrix_follows_from_the_labels_of_any_detector():
    clients = noisy(num_val=60)
    for detector, most in (("confident", 0.08), ("label_em", 0.03)):  # x of confident holds no probabilities
        found = fb.clean_labels(clients, detector=detector)
        right = np.concatenate([np.arange(100) >= 10 for _ in clients])
        given = np.concatenate([client["train"]["label"] for client in clients])
        true = np.where(right, given, (given - 1) % 3)
        counts = np.eye(3)[true].T @ np.eye(3)[given]
        assert found.transition == pytest.approx(counts / counts.sum(1, keepdims=True), abs=most), detector
        assert found.found["num_flagged"] == len(found.suspects())
        assert found.found["num_labels"] == 400


def test_of_many_classes_the_page_shows_the_most_frequent_mistakes():
    transition = np.eye(20) * 0.8 + 0.2 / 20
    transition[3, 5], transition[7, 2] = 0.4, 0.3
    shown = transition_finding(transition, [f"class {i}" for i in range(20)])
    assert (shown["kind"], len(shown["rows"])) == ("ranking", 12)
    assert shown["rows"][:2] == [["class 3", "class 5", 0.4], ["class 7", "class 2", 0.3]]
    assert are_findings([shown])


def test_a_client_gets_a_file_of_its_own_with_every_sample(tmp_path):
    files = [[f"{i}.png" for i in range(100)]] * 4
    found = fb.clean_labels(noisy(), files=files)
    written = found.write_csv(tmp_path / "suspects")
    assert [place.name for place in written] == [f"client-{i}.csv" for i in range(4)]
    rows = list(csv.DictReader(written[1].read_text().splitlines()))
    assert len(rows) == 100
    assert {int(row["sample"]) for row in rows[:10]} == set(range(10))
    assert all(row["file"] == f"{row['sample']}.png" for row in rows)
    assert [float(row["probability"]) for row in rows] == sorted((float(r["probability"]) for r in rows), reverse=True)
    assert sum(int(row["flagged"]) for row in rows) == found.flags[1].sum()
    own = json.loads((tmp_path / "suspects" / "client-1.json").read_text())
    assert (own["noise"], own["verdict"], own["num_labels"]) == (found.noise["client-1"], found.verdict, 100)
    assert own["transition"] == found.client_transition(1).tolist()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="name another folder"):
        found.write_csv(tmp_path / "file" / "inside")


def test_both_classifiers_are_tested_also_where_the_truth_is_unknown():
    rng = np.random.default_rng(5)
    clients = noisy(num_wrong=30)
    for client in clients[:2]:
        del client["train"]["wrong"]
        client["test"] = samples(rng, 100)
    found = fb.clean_labels(clients)
    assert found.truth is None
    assert found.tested.num == 200
    image, label = (np.concatenate([client["test"][name] for client in clients[:2]]) for name in ("image", "label"))
    assert found.tested.cleaned == pytest.approx((found.predict(image) == label).mean())
    assert found.tested.sentence in found.sentences


def test_a_cleaning_that_hurts_is_rejected():
    """Classes overlap and labels are right: own_loss drops the hard samples, and what is left makes a
    classifier that is too sure of itself."""
    rng = np.random.default_rng(1)
    clients = [{"train": samples(rng, 300, apart=1.0), "val": samples(rng, 200, apart=1.0)} for _ in range(3)]
    found = fb.clean_labels(clients, detector="own_loss")
    assert found.found["t"] < -2
    assert found.verdict == "rejected"
    assert "the cleaning is rejected" in found.sentence
    plain = found.result.state.models.view(2, 6, 3)[1]
    state = found.result.state
    z = torch.cat([(torch.eye(5) - state.centre) / state.scale, torch.ones(5, 1)], 1)
    y = found.model
    assert torch.allclose(torch.eye(5) @ y["weight"] + y["bias"], z @ plain, atol=1e-4)


def test_clients_without_clean_samples_take_part_and_nothing_is_promised_without_any():
    clients = noisy()
    some = [clients[0], *({"train": client["train"]} for client in clients[1:])]
    found = fb.clean_labels(some)
    assert found.verdict == "unchecked"  # 10 held-out samples
    assert any("Only 1 of 4 clients have clean samples" in text for text in found.caveats)
    none = [{"train": client["train"]} for client in clients]
    found = fb.clean_labels(none)
    assert found.verdict == "unchecked"
    assert found.found["num_guard"] == 0
    assert "nothing is promised" in found.sentence
    assert any("There are no clean samples" in text for text in found.caveats)
    assert all(flags[:10].all() for flags in found.flags)  # little noise is found all the same
    empty = [{**client, "val": {name: values[:0] for name, values in client["val"].items()}} for client in clients]
    again = fb.clean_labels(empty)
    assert all(np.array_equal(a, b) for a, b in zip(again.posteriors, found.posteriors, strict=True))


def test_a_class_without_clean_samples_is_named():
    clients = noisy(num_val=60)
    for client in clients:
        seen = client["val"]["label"] != 2
        client["val"] = {name: values[seen] for name, values in client["val"].items()}
    found = fb.clean_labels(clients, class_names=["cat", "dog", "emu"])
    assert any("No clean sample shows emu" in text for text in found.caveats)
    assert all(flags[:10].all() for flags in found.flags)


def test_caveats_speak_of_what_is_missing_only():
    full = {
        "num_clients": 4, "share": 1.0, "cut": {"log_odds": 1.0}, "by_rate": True, "rate": 0.05,
        "verdict": "unchecked", "wrong": 0.5, "num_train": 30, "num_features": 20,
        "detector": "label_em",
    }  # fmt: skip
    assert caveats(num_clean=[3, 4], class_names=["a", "b"], **full) == []
    assert len(caveats(num_clean=[0, 4], class_names=["a", "b"], **full)) == 1
    assert "these classes" in caveats(num_clean=[0, 0, 4], class_names=["a", "b", "c"], **full)[0]
    two = {"num_clean": [3, 4], "class_names": ["a", "b"]}
    assert "60% of the labels are estimated to be wrong" in caveats(**two, **{**full, "wrong": 0.6})[0]
    assert caveats(**two, **{**full, "wrong": 0.6, "verdict": "rejected"}) == []
    for verdict, num in (("unchecked", 1), ("rejected", 1), ("accepted", 0)):
        assert len(caveats(**two, **{**full, "num_train": 29, "verdict": verdict})) == num
        assert caveats(**two, **{**full, "num_train": 29, "verdict": verdict, "detector": "own_loss"}) == []


def test_few_samples_of_many_features_have_both_caveats():
    images, labels = digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))[:300]
    label, wrong = labels[order], rng.random(300) < 0.15
    label = np.where(wrong, (label + rng.integers(1, 10, 300)) % 10, label)
    found = fb.clean_labels([{"train": {"image": images[order].reshape(-1, 8, 8), "label": label}}])
    assert sum(flags.sum() for flags in found.flags) > 150  # 15 % are wrong
    assert "of the labels are estimated to be wrong, and nothing checks this" in found.caveats[0]
    assert "There are only 300 training samples for 432 features" in found.caveats[1]
    found = fb.clean_labels(
        [{"train": {"image": images[order].reshape(-1, 8, 8), "label": label}}], detector="confident"
    )
    assert not any("training samples" in text for text in found.caveats)


@pytest.mark.parametrize(
    ("num_val", "lacking", "said"),
    [
        (0, None, "No held-out clean sample can check the result, so nothing is promised"),
        (10, None, "Only 5 held-out clean samples can check the result, so nothing"),
        (2, None, "Only 1 held-out clean sample, with 1 of the 3 classes, can check the result"),
        (40, 2, "Only 20 held-out clean samples, with 2 of the 3 classes, can check the result"),
    ],
)
def test_the_sentence_says_what_can_check_the_result(num_val, lacking, said):
    clients = noisy(num_val=0)
    some = samples(np.random.default_rng(1), 200)
    keep = np.flatnonzero(some["label"] != lacking)[:num_val]
    clients[0]["val"] = {name: values[keep] for name, values in some.items()}
    assert said in fb.clean_labels(clients).sentence


def test_a_stopped_cleaning_does_not_speak_of_clean_samples():
    found = fb.clean_labels(noisy(num_val=60), callbacks=[lambda progress: progress.iteration == 3])
    assert "The run was stopped before the result was checked, so nothing is promised" in found.sentence


def test_flags_at_a_rate_need_enough_held_out_samples():
    few = fb.clean_labels(noisy(), flag="rate", rate=0.1)
    assert sum(flags.sum() for flags in few.flags) == 0
    assert any("so nothing is flagged" in text for text in few.caveats)
    clients = noisy(num_val=400, num_wrong=30)
    found = fb.clean_labels(clients, flag="rate", rate=0.1)
    flags, wrong = (np.concatenate(part) for part in (found.flags, [client["train"]["wrong"] for client in clients]))
    assert flags.sum() == found.found["cut"]["flags"]
    assert flags[wrong].mean() > 0.9
    assert (flags & ~wrong).sum() <= 0.1 * flags.sum()


def test_the_bound_of_the_guard_is_said_of_the_labels_that_it_counts():
    clients = noisy(num_val=400, num_wrong=30)
    half, rate = (fb.clean_labels(clients, flag=flag) for flag in ("half", "rate"))
    assert half.found["basis"] == rate.found["basis"] == "flags"
    most = f"{half.found['most_false']:.0%}"
    end = ", with a probability of 95 %, which decided."
    counted = f"Of the labels that are more likely wrong than right, at most {most} are right"
    assert half.sentence.endswith(f". At most {most} of the flags are false{end}")
    assert rate.sentence.endswith(f". {counted}{end}")


def test_images_get_random_features_and_a_module_may_replace_them():
    clients = noisy(shape=(8, 8), apart=8.0)
    found = fb.clean_labels(clients)
    assert found.model["weight"].shape == (48 * 9, 3)
    flat = torch.nn.Flatten()
    by_module = fb.clean_labels(clients, features=lambda images: flat(images)[:, :10].float())
    assert by_module.model["weight"].shape == (10, 3)
    assert all(flags[:10].all() for flags in by_module.flags)
    given = fb.clean_labels(clients, features="given")
    assert given.model["weight"].shape == (64, 3)


def test_a_resumed_cleaning_has_the_same_posteriors(tmp_path):
    clients = noisy()
    whole = fb.clean_labels(clients, record=tmp_path / "whole")
    stop = lambda progress: progress.iteration == 3
    fb.clean_labels(clients, record=tmp_path / "cut", callbacks=[stop])
    resumed = fb.clean_labels(clients, record=tmp_path / "cut", resume=True)
    assert all(np.array_equal(a, b) for a, b in zip(whole.posteriors, resumed.posteriors, strict=True))
    assert resumed.verdict == whole.verdict


def test_the_transitions_of_a_stopped_cleaning_follow_from_its_posteriors():
    clients = noisy()
    found = fb.clean_labels(clients, detector="confident", callbacks=[lambda progress: True])
    given = np.eye(len(found.class_names))[np.concatenate([client["train"]["label"] for client in clients])]
    counts = np.concatenate(found.posteriors).T @ given + 0.1
    np.testing.assert_allclose(found.transition, counts / counts.sum(1, keepdims=True))


def test_a_stopped_cleaning_is_unchecked():
    found = fb.clean_labels(noisy(), callbacks=[lambda progress: progress.iteration == 3])
    assert (found.verdict, found.targets) == ("unchecked", None)


def one(**changes):
    clients = noisy()
    clients[1] = {**clients[1], **changes}
    return clients


@pytest.mark.parametrize(
    ("clients", "settings", "error", "text"),
    [
        (one(train={"image": np.zeros((3, 5)), "kind": np.zeros(3, int)}), {}, ProblemError, "rename the fields"),
        (one(train={"image": np.zeros((3, 5)), "label": np.zeros(3)}), {}, ProblemError, "number the classes from 0"),
        (one(val={"image": np.zeros((3, 5)), "label": np.full(3, -1)}), {}, ProblemError, "has the label -1 in 'val'"),
        (one(train={"image": np.zeros((0, 5)), "label": np.zeros(0, int)}), {}, ProblemError, "no training samples"),
        (one(val={"image": np.zeros((3, 6)), "label": np.zeros(3, int)}), {}, ProblemError, "have 5, 6 features"),
        (noisy(), {"num_classes": 1}, ProblemError, "num_classes is 1, expected at least two"),
        (noisy(), {"num_classes": 2}, ProblemError, "has the label 2 in 'train', .* for 2 classes"),
        (noisy(), {"features": "best"}, SettingError, "a module that maps images"),
        (noisy(), {"features": lambda images: 3}, ProblemError, "the module returned int"),
        (noisy(), {"features": "convolutional"}, ProblemError, "square images of at least 6 x 6"),
        (noisy(), {"flag": "all"}, SettingError, "'half' or 'rate'"),
        (noisy(), {"detector": "label_me"}, UnknownNameError, "Did you mean 'label_em'"),
        (noisy(), {"detector": LabelEM(), "ridge": 0.1}, SettingError, "has its settings already"),
        (noisy(), {"names": ["a"]}, SettingError, "4 names, one for each client"),
        (noisy(), {"names": ["a", "b", "a", "c"]}, SettingError, "names has 'a' more than once, expected another name"),
        (noisy(), {"names": 4}, SettingError, "names is 4, expected 4 names"),
        (noisy(), {"class_names": "abc"}, SettingError, "3 names, one for each class"),
        ([], {}, ProblemError, "no clients"),
        ("hosp", {}, ProblemError, "clients is 'hosp', expected a list with one dict per client: read files"),
    ],
)  # fmt: skip
def test_refusals(clients, settings, error, text):
    with pytest.raises(error, match=text):
        fb.clean_labels(clients, **settings)


def test_ctrl_c_leaves_a_checkpoint_and_no_cleaning(tmp_path, monkeypatch):
    clients = noisy()
    with monkeypatch.context() as patch:
        ctrl_c(patch, LabelEM)
        with pytest.raises(KeyboardInterrupt):
            fb.clean_labels(clients, record=tmp_path)
    resumed, whole = fb.clean_labels(clients, record=tmp_path, resume=True), fb.clean_labels(clients)
    assert all(np.array_equal(a, b) for a, b in zip(whole.posteriors, resumed.posteriors, strict=True))


def counted_from_one(clients):
    return [{role: {**part, "label": part["label"] + 1} for role, part in client.items()} for client in clients]


def test_labels_start_at_0_unless_names_say_that_class_0_has_no_samples():
    with pytest.raises(ProblemError, match="labels are from 1 to 3, expected labels that start at 0: subtract 1"):
        fb.clean_labels(counted_from_one(noisy()))
    found = fb.clean_labels(counted_from_one(noisy()), class_names=["ant", "cat", "dog", "emu"])
    assert found.caveats[0].startswith("No clean sample shows ant")


@pytest.mark.parametrize("how", [{"num_classes": 3}, {"class_names": ["cat", "dog", "emu"]}])
def test_a_label_out_of_range_is_named_with_its_client_and_role(how):
    clients = noisy()
    clients[2]["val"]["label"][5] = 3
    with pytest.raises(ProblemError, match="client 2 has the label 3 in 'val', expected whole numbers from 0 to 2"):
        fb.clean_labels(clients, **how)
