"""Rows that come from one guarded run: computed once, and the same as those of runs of their own."""

from __future__ import annotations

import os

import pytest

import fedbilevel as fb
from fedbilevel.studies import together
from fedbilevel.studies.rivals import run_rival

TASK = fb.tasks.Regularisation(num_train=10, num_val=8, num_test=30, parametrisation="sigmoid")


def test_rows_are_computed_once_and_equal_those_of_single_runs(tmp_path, monkeypatch):
    names, place = ["l2", "l2_grid"], together.address(TASK, num_rounds=5)
    rows = together.choices(TASK, tmp_path, place, rivals=names, num_rounds=5, seed=2)
    found = fb.guarded(TASK, num_rounds=5, rivals=names, seed=2)
    plain = fb.guarded(TASK, num_rounds=5, rivals=names, seed=2, bilevel=False)
    assert rows["guarded"]["test_loss"] == found.figures["test_loss"]
    assert rows["blended"]["test_loss"] == plain.figures["test_loss"]
    assert rows["started"]["test_loss"] == found.contenders["bilevel"].figures["test_loss"]
    alone = run_rival(TASK.rivals()["l2_grid"], num_rounds=5, seed=2)
    assert (rows["l2_grid"]["test_loss"], rows["l2_grid"]["rounds"]) == (alone.figures["test_loss"], 40)
    # l2 has no start, and bilevel runs and refits on all samples and in two folds
    assert rows["started"]["rounds"] == rows["guarded"]["rounds"] - 5 * 3
    monkeypatch.setattr(together, "guarded", None)  # not called again
    assert together.choices(TASK, tmp_path, place, rivals=names[::-1], num_rounds=5, seed=2) == rows
    assert together.known(tmp_path, place) == rows
    for others in (["l1_grid"], ["l2"]):  # the choice among fewer rivals is another one
        with pytest.raises(TypeError):
            together.choices(TASK, tmp_path, place, rivals=others, num_rounds=5, seed=2)


def test_a_run_whose_rival_failed_is_kept_too(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"l2": {"figure": 1.0}, "guarded": {"figure": 1.0}}  # l2_grid failed

    for _ in range(2):
        assert together.kept(tmp_path, "place", ["l2", "l2_grid"], compute)["l2"] == {"figure": 1.0}
    assert len(calls) == 1


def test_processes_with_other_rivals_may_write_at_once(tmp_path, monkeypatch):
    """The other process ends while this one has written half of its rows, or just after it."""
    sync, replace = os.fsync, os.replace
    calls = []

    def other(rows):
        calls.append(rows)
        own = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: own + 1)
            patch.setattr(os, "fsync", sync)
            patch.setattr(os, "replace", replace)
            together.kept(tmp_path, "place", ["l1"], lambda: rows)

    def synced(handle):
        other({"l1": {"figure": 1.0}})
        sync(handle)

    def replaced(*paths):
        replace(*paths)
        other({"l1": {"figure": 2.0}})

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    rows = {"l2": {"figure": 3.0}}
    assert together.kept(tmp_path, "place", ["l2"], lambda: rows) == rows
    assert len(calls) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["place.json"]


def test_another_task_or_option_has_another_address():
    first = together.address(TASK, num_rounds=5)
    assert first == together.address(TASK, num_rounds=5)
    assert len({first, together.address(TASK.repeated(1), num_rounds=5), together.address(TASK, num_rounds=6)}) == 3
