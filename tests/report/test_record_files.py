"""Damaged records: each is named in one sentence that says what to do."""

import json
import re

import pytest

from fedbilevel.errors import ReportError
from fedbilevel.report import page_data, write_report
from support.browser.records import (
    reopened,
    rows_of,
    write_comparison,
    write_influence,
    write_personalisation,
    write_run,
)


def test_a_damaged_line_among_others_is_named_and_not_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:2], lines[2][:40] + "\n", *lines[3:]]))
    with pytest.raises(ReportError, match=r"line 3 of .*metrics\.jsonl is not a measurement"):
        page_data.read([folder])


DAMAGE = {
    "config.json": ["{", "[]"],
    "metrics.jsonl": ["", "{}\n", "no\n", '{"iteration": "one"}\n', "[1]\n"],
    "ledger.json": [
        "{",
        "[]",
        "{}",
        '{"phases": {"a": {"rounds": "many"}}}',
        '{"phases": [1]}',
        '{"edges": {"bytes": [1]}}',
    ],
    "clients.json": [
        "{",
        "{}",
        '{"sizes": {"train": ["few"]}}',
        '{"sizes": {}, "labels": {"train": {"values": [1, 2], "counts": [[1]]}}}',
    ],
    "findings.json": ["{", "{}", "[1]", '[{"kind": "ranking"}]'],
    "end.json": [
        "{",
        "[]",
        "{}",
        '{"stopped": "somehow", "iteration": 3}',
        '{"stopped": ["failed"], "iteration": 3}',
        '{"stopped": "failed"}',
        '{"stopped": "failed", "iteration": "3"}',
        '{"stopped": "failed", "iteration": 3, "why": 5}',
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_record_is_named_in_one_sentence(tmp_path, name, text):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(ReportError) as caught:
        page_data.read([folder])
    said = str(caught.value)
    assert str(folder) in said
    assert said.endswith(".")
    assert ": " in said  # how to mend it


@pytest.mark.parametrize(
    ("write", "name", "texts"),
    [
        (
            write_comparison,
            "comparison.json",
            ["{", "{}", '{"runs": []}', '{"runs": [{"algorithm": "a"}]}', '{"runs": [1]}'],
        ),
        (write_influence, "influence.json", ["{", "{}", '{"ranked": [{}]}', '{"ranked": 3}']),
        (
            write_personalisation,
            "personalisation.json",
            ["{", "{}", '{"outcomes": [1]}', '{"outcomes": [{"method": "local"}]}'],
        ),
    ],
)
def test_a_damaged_study_is_named_in_one_sentence(tmp_path, write, name, texts):
    folder = write(tmp_path / "study")
    for text in texts:
        (folder / name).write_text(text)
        with pytest.raises(ReportError, match=re.escape(str(folder / name)) + r".*restore it from a copy"):
            page_data.read([folder])


def test_what_is_no_record_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ReportError, match=r"there is no folder .*none: give the folder"):
        page_data.read([tmp_path / "none"])
    with pytest.raises(ReportError, match="holds no record"):
        page_data.read([tmp_path])
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ReportError, match="is not the file of a record"):
        page_data.read([tmp_path / "notes.txt"])
    with pytest.raises(ReportError, match="there is nothing to report"):
        page_data.read([])
    folder = write_run(tmp_path / "run")
    with pytest.raises(
        ReportError, match="no metric named 'speed' in these records: name one of upper_loss, test_accuracy"
    ):
        page_data.read([folder], target=("speed", 1.0))
    never = write_run(tmp_path / "never", rows=rows_of(0, hypergradient=lambda i: None))
    with pytest.raises(ReportError, match="the metric 'hypergradient' was never determined in these records"):
        page_data.read([never], target=("hypergradient", 0.01))
    write_run(tmp_path / "some" / "a", rows=rows_of(0, hypergradient=lambda i: None))
    write_run(tmp_path / "some" / "b", rows=rows_of(0, hypergradient=lambda i: 1.0 if i else None))
    assert page_data.read([tmp_path / "some"], target=("hypergradient", 0.01))["target"] == {
        "metric": "hypergradient",
        "value": 0.01,
    }
    with pytest.raises(ReportError, match="is a folder: name the file"):
        write_report(folder, tmp_path)
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(folder, tmp_path / "notes.txt" / "page.html")


def test_a_run_without_a_measurement_may_be_watched_but_not_reported(tmp_path):
    folder = write_run(tmp_path / "run", rows=[], whole=False)
    with pytest.raises(ReportError, match=r"no measurement yet: wait .* fedbilevel watch"):
        page_data.read([folder])
    found = page_data.read([folder], partial=True)
    assert (found["runs"][0]["columns"], found["runs"][0]["state"], found["metrics"]) == ({}, "going", [])


WRONG_FINDINGS = {
    "no items": {"kind": "images", "title": "x"},
    "no shape": {"kind": "images", "title": "x", "shape": "wide", "items": []},
    "counts": {"kind": "histogram", "title": "x", "edges": [0, 1, 2], "groups": [{"name": "a", "counts": [1]}]},
    "rows": {"kind": "ranking", "title": "x", "columns": ["a", "b"], "rows": [[1]]},
    "values": {"kind": "by_client", "title": "x", "values": {"a": ["high"]}},
    "square": {"kind": "matrix", "title": "x", "rows": "a", "columns": "b", "names": ["c", "d"], "values": [[1, 0]]},
    "no title": {"kind": "ranking", "columns": [], "rows": []},
    "no table": "images",
}


@pytest.mark.parametrize("case", sorted(WRONG_FINDINGS))
def test_findings_that_no_page_could_draw_are_named(tmp_path, case):
    run = write_run(tmp_path / "run")
    (run / "findings.json").write_text(json.dumps([WRONG_FINDINGS[case]]))
    with pytest.raises(ReportError, match=r"findings\.json does not hold what its name says"):
        page_data.read([run])


def test_a_finding_of_a_kind_that_is_not_known_is_left_out_and_not_an_error(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "findings.json").write_text(json.dumps([{"kind": "hologram", "title": "x"}]))
    assert page_data.read([run])["runs"][0]["findings"] == [{"kind": "hologram", "title": "x"}]


def test_odd_files_of_a_record_are_named_in_one_sentence(tmp_path):
    run = write_run(tmp_path / "run")
    reopened(run, "config.json", lambda config: {**config, "task": ["<b>"]})
    assert page_data.read([run])["runs"][0]["task"] == "['<b>']"
    (run / "metrics.jsonl").write_text('{"iteration": ' + "[" * 100_000 + "\n")
    with pytest.raises(ReportError, match=r"line 1 of .* is not a measurement"):
        page_data.read([run])
    (run / "config.json").write_text("[" * 100_000)
    with pytest.raises(ReportError, match=r"config\.json is not readable as JSON"):
        page_data.read([run])
    other = write_run(tmp_path / "other")
    (other / "run.toml").unlink()
    (other / "run.toml").mkdir()
    with pytest.raises(ReportError, match=r"run\.toml cannot be read \(Is a directory\)"):
        page_data.read([other])
    compared = write_comparison(tmp_path / "compared")
    text = (compared / "comparison.json").read_text()
    (compared / "comparison.json").write_text(re.sub(r'"repetition": \d+', '"repetition": 1e400', text))
    with pytest.raises(ReportError, match="runs with algorithm, repetition, settings and rows"):
        page_data.read([compared])


def test_folders_without_a_measurement_and_files_that_cannot_be_read(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / name, rows=[], whole=False)
    with pytest.raises(ReportError, match=r"none of the runs in .* has a measurement yet"):
        page_data.read([tmp_path / "runs"])
    for file in ("metrics.jsonl", "ledger.json"):
        run = write_run(tmp_path / f"no {file}")
        (run / file).unlink()
        (run / file).mkdir()
        with pytest.raises(ReportError, match=rf"{file} cannot be read \(Is a directory\)"):
            page_data.read([run])
