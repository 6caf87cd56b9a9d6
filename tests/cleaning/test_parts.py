"""The parts of a cleaning: each is shown by its name, and a resumed cleaning does not train it again."""

from __future__ import annotations

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.cleaning.parts import ALONE, Parts
from fedbilevel.errors import CheckpointError
from fedbilevel.report import page_data
from tests.cleaning.test_fold_networks import striped

HOW = {"training": {"num_folds": 2, "width": 4, "num_rounds": 3, "batch_size": 8}, "num_fit_rounds": 3}
OUT_OF_FOLD = ["network 1 of 2", "network 2 of 2", "label_em"]
LAST = [f"last network, {name}" for name in ("as_given", "corrected", "distilled", "pruned", "soft")]


class Seen:
    """Remembers the parts that begin and their outer iterations; may fail in one of them."""

    def __init__(self, fails=""):
        self.names, self.taken, self.fails = [], [], fails

    def __call__(self, name):
        self.names.append(name)

        def follow(now):
            self.taken.append((name, now.iteration))
            if name == self.fails:
                raise RuntimeError("a power cut")

        return follow


def test_every_part_is_shown_before_it_begins():
    seen = Seen()
    fb.clean_labels(striped(), features="refined", retrain=True, progress=seen, **HOW)
    networks = OUT_OF_FOLD[:2]
    first, second = ([f"{which} pass, {name}" for name in (*networks, "confident")] for which in ("first", "second"))
    assert seen.names[:6] == [*first, *second[:2], "label_em"]
    last = seen.names[6:]
    assert last[0] == "last network, as_given"
    assert len(last) > 1
    assert {*last} <= {*LAST}
    assert [taken for taken in seen.taken if taken[0] == first[1]] == [(first[1], i) for i in (1, 2, 3)]


@pytest.mark.parametrize("fails", ["network 2 of 2", "label_em", "last network, as_given"])
def test_a_resumed_cleaning_trains_only_what_is_not_there(tmp_path, fails):
    options = {"features": "out_of_fold", "retrain": True, **HOW}
    with pytest.raises(RuntimeError, match="a power cut"):
        fb.clean_labels(striped(), record=tmp_path, progress=Seen(fails), **options)
    seen, whole = Seen(), Seen()
    resumed = fb.clean_labels(striped(), record=tmp_path, progress=seen, resume=True, **options)
    wanted = fb.clean_labels(striped(), progress=whole, **options)
    assert seen.names == whole.names
    before = whole.names[: whole.names.index(fails)]
    assert not {name for name, _ in seen.taken} & {*before}
    assert {name for name, _ in seen.taken} == {*whole.names} - {*before}
    for one, other in zip(resumed.posteriors, wanted.posteriors, strict=True):
        np.testing.assert_array_equal(one, other)
    images = striped()[0]["val"]["image"]
    np.testing.assert_array_equal(resumed.last.network.probabilities(images), wanted.last.network.probabilities(images))
    assert resumed.found["network"] == wanted.found["network"]


def test_the_page_of_a_cleaning_shows_the_detector_alone(tmp_path):
    fb.clean_labels(striped(), features="trained", record=tmp_path, num_fit_rounds=3)
    assert (tmp_path / "parts" / "network" / "checkpoint.safetensors").exists()
    assert [run["algorithm"] for run in page_data.read([tmp_path])["runs"]] == ["label_em"]


def test_an_empty_folder_cannot_be_resumed_and_a_full_one_not_begun_again(tmp_path):
    seen = Seen()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        fb.clean_labels(striped(), features="out_of_fold", record=tmp_path, resume=True, progress=seen, **HOW)
    fb.clean_labels(striped(), features="out_of_fold", record=tmp_path, **HOW)
    with pytest.raises(CheckpointError, match="already holds a run"):
        fb.clean_labels(striped(), features="out_of_fold", record=tmp_path, progress=seen, **HOW)
    assert seen.taken == []


def test_a_cleaning_that_ended_in_its_first_network_is_named_by_its_own_folder(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        fb.clean_labels(striped(), features="out_of_fold", record=tmp_path, progress=Seen(OUT_OF_FOLD[1]), **HOW)
    seen = Seen()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} already holds a run: resume it"):
        fb.clean_labels(striped(), features="out_of_fold", record=tmp_path, progress=seen, **HOW)
    assert seen.names == []


def test_parts_without_a_record_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not ALONE.begun
    assert not Parts(record=tmp_path).alone
    fb.clean_labels(striped(), features="out_of_fold", **HOW)
    assert [*tmp_path.iterdir()] == []
