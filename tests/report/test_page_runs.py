"""Content of the page: every number of a run as it was recorded, and the state of the run."""

import json
import os

from fedbilevel.report import page_data, write_report
from support.browser.records import (
    CLIENTS,
    FINDINGS,
    config_of,
    phases_of,
    reopened,
    rows_of,
    write_comparison,
    write_run,
)


def test_every_number_of_a_run_is_there_as_it_was_written(tmp_path):
    rows = rows_of(3, disagreement=lambda i: 1 / (i + 3))
    found = page_data.read([write_run(tmp_path / "run", seed=3, rows=rows)])
    [run] = found["runs"]
    assert run["columns"] == {name: [row[name] for row in rows] for name in rows[0]}
    assert run["ledger"]["phases"] == phases_of(rows[-1])
    assert run["ledger"]["clients"]["bytes_up"] == [rows[-1]["bytes_up"], 0, 1]
    assert run["findings"] == FINDINGS
    assert found["partitions"] == [{"clients": CLIENTS, "runs": [0]}]
    assert run["config"] == {"kind": "run.toml", "text": (tmp_path / "run" / "run.toml").read_text()}
    assert (run["seed"], run["data_seed"], run["num_clients"], run["algorithm"], run["task"]) == (
        3,
        3,
        3,
        "fedbio",
        "data_cleaning",
    )
    assert found["metrics"] == ["test_accuracy", "f1", "disagreement", "upper_loss"]
    assert found["diagnostics"] == ["residual", "lower_gradient"]
    assert found["title"] == "Data cleaning"


def test_a_record_without_the_newer_files_still_has_a_page(tmp_path):
    found = page_data.read([write_run(tmp_path / "old", whole=False)])
    [run] = found["runs"]
    assert (run["ledger"], run["findings"], found["partitions"]) == (None, None, [])
    assert run["config"]["kind"] == "config.json"
    assert json.loads(run["config"]["text"]) == config_of()
    assert write_report(tmp_path / "old") == tmp_path / "old" / "report.html"


def test_what_a_task_shows_first_comes_first(tmp_path):
    folder = write_run(tmp_path / "run")
    reopened(folder, "config.json", lambda config: {**config, "headline": ["upper_loss", "f1"]})
    assert page_data.read([folder])["metrics"] == ["upper_loss", "f1", "test_accuracy"]


def test_numbers_that_are_none_are_words_and_missing_ones_nothing(tmp_path):
    rows = rows_of(0, 3)
    rows[0]["f1"], rows[1]["f1"], rows[1]["test_accuracy"] = float("nan"), float("-inf"), float("inf")
    del rows[2]["f1"]
    found = page_data.read([write_run(tmp_path / "run", rows=rows, whole=False)])
    assert found["runs"][0]["columns"]["f1"] == ["NaN", "-Infinity", None]
    assert found["runs"][0]["columns"]["test_accuracy"][1] == "Infinity"
    json.dumps(found, allow_nan=False)


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 30, "sec')
    assert page_data.read([folder])["runs"][0]["columns"]["iteration"] == [0, 5, 10, 15, 20, 25]


def test_runs_between_sites_and_of_peers_are_read(tmp_path):
    plan = {
        "name": "trial",
        "sites": ["north", "south"],
        "task": {"name": "influence", "l2": 0.1},
        "algorithm": {"name": "hgp", "num_terms": 3},
        "options": {"seed": 4},
    }
    folder = write_run(tmp_path / "server", whole=False)
    config = {
        "engine": "federation",
        "plan": plan,
        "identity": {"algorithm": "fedbio", "seed": 4, "num_clients": 2},
        "run": {"num_iterations": 25},
        "ranks": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{**row, "members": 2, "seen": {"upper": 1.0}} for row in rows_of(0)]
    peer = write_run(tmp_path / "peer", rows=rows, whole=False)
    (peer / "config.json").write_text(
        json.dumps(
            {**config, "engine": "peers", "plan": {**plan, "sites": None}, "peers": ["ada", "bob"], "peer": "bob"}
        )
    )
    both = write_run(tmp_path / "collected", rows=[{**row, "num_peers": 2} for row in rows_of(0)], whole=False)
    found = {"peers": ["ada", "bob", "eve"], "collected": ["ada", "bob"], "missing": ["eve"]}
    (both / "config.json").write_text(json.dumps({**config, "engine": "peers", **found}))
    (both / "ledger.json").write_text(
        json.dumps({"totals": {"rounds": 3}, "edges": {"bytes": [[0, 5, 1], [7, 0, 2], [0, 0, 0]]}})
    )
    server, one, collected = page_data.read([folder, peer, both])["runs"]
    assert (server["engine"], server["task"], server["client_names"]) == ("federation", "influence", ["north", "south"])
    assert (one["peer"], one["client_names"]) == ("bob", ["ada", "bob"])
    assert "seen" not in one["columns"]
    assert collected["ledger"]["edges"]["bytes"] == [[0, 5, 1], [7, 0, 2], [0, 0, 0]]
    assert (collected["peer"], collected["client_names"]) == (
        None,
        ["ada", "bob", "eve"],
    )  # also the one whose record was missing: edges count it
    assert page_data.read([peer])["metrics"] == ["test_accuracy", "f1", "upper_loss"]  # not how many peers there were
    write_report([folder, peer, both], tmp_path / "page.html")


def test_the_state_of_a_run_is_that_of_its_files(tmp_path):
    folder = write_run(tmp_path / "run", whole=False)
    state = lambda: (page_data.read([folder])["runs"][0]["state"], page_data.read([folder])["over"])
    assert state() == ("finished", True)
    reopened(folder, "config.json", lambda config: {**config, "run": {"num_iterations": 40}})
    assert state() == ("going", False)
    (folder / "solution.safetensors").write_bytes(b"")  # ended before what was planned
    assert state() == ("stopped", True)
    os.utime(folder / "solution.safetensors", ns=(1, 1))  # gone on with: there are newer measurements
    assert state() == ("going", False)
    reopened(folder, "config.json", lambda config: {**config, "run": {"num_iterations": 40, "num_rounds": 35}})
    assert state() == ("finished", True)  # by rounds


def test_how_a_run_ended_is_what_its_record_says(tmp_path):
    folder = write_run(tmp_path / "run", iterations=400)
    state = lambda: (page_data.read([folder])["runs"][0]["state"], page_data.read([folder])["over"])
    assert state() == ("going", False)
    for stopped, said in (
        ("finished", "finished"),
        ("callback", "stopped"),
        ("interrupted", "stopped"),
        ("failed", "failed"),
    ):
        (folder / "end.json").write_text(json.dumps({"stopped": stopped, "iteration": 26}))
        assert state() == (said, True)
    assert page_data.read([folder])["runs"][0]["end"] == {"iteration": 26, "why": None}
    (folder / "end.json").write_text(json.dumps({"stopped": "failed", "iteration": 48, "why": "too long a step."}))
    assert page_data.read([folder])["runs"][0]["end"] == {"iteration": 48, "why": "too long a step."}
    reopened(folder, "config.json", lambda config: {**config, "run": {"num_iterations": 25}})  # as far as planned
    assert state() == ("failed", True)
    for stopped in ("callback", "interrupted"):
        (folder / "end.json").write_text(json.dumps({"stopped": stopped, "iteration": 25}))
        assert state() == ("finished", True)
    (folder / "end.json").unlink()
    (folder / "solution.safetensors").write_bytes(b"")
    reopened(folder, "config.json", lambda config: {**config, "run": {"num_iterations": 400}})
    assert state() == ("stopped", True)  # as records of older versions


def test_a_run_that_failed_before_its_first_measurement_has_a_page_that_says_why(tmp_path):
    folder = write_run(
        tmp_path / "run",
        rows=[],
        whole=False,
        end={"stopped": "failed", "iteration": 0, "why": "the loss is not finite."},
    )
    write_run(tmp_path / "begun", rows=[], whole=False)
    [run] = page_data.read([folder])["runs"]
    assert (run["state"], run["end"]["why"], run["columns"]) == ("failed", "the loss is not finite.", {})
    assert [run["name"] for run in page_data.read([tmp_path])["runs"]] == [
        "run"
    ]  # of several, one that has not begun to measure is left out
    write_report(folder)


def test_only_runs_of_the_command_line_can_be_resumed_by_it(tmp_path):
    folder = write_run(tmp_path / "run")
    may = lambda change: (
        reopened(folder, "config.json", lambda config: {**config, **change})
        or page_data.read([folder])["runs"][0]["resumable"]
    )
    assert may({}) is True
    assert may({"engine": "distributed"}) is True
    assert may({"engine": "federation"}) is False
    assert may({"engine": "peers"}) is False
    assert may({"engine": "simulation"}) is True
    assert may({"task": None}) is False
    assert {run["resumable"] for run in page_data.read([write_comparison(tmp_path / "c")])["runs"]} == {False}
