"""What a page says about records: every number as it was written, who is one curve with whom, and nothing of a record that becomes code or markup."""

import ast
import base64
import hashlib
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
import webbrowser
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedbilevel.report
from fedbilevel.cli.main import cli
from fedbilevel.columns import falls
from fedbilevel.errors import ReportError, SettingError
from fedbilevel.report import page as writing
from fedbilevel.report import page_data, write_report
from fedbilevel.report.watch import Live, Watch, _ending
from fedbilevel.studies.compare import Target
from support.browser.records import (
    CLIENTS,
    FINDINGS,
    HOSTILE,
    config_of,
    phases_of,
    rows_of,
    write_comparison,
    write_influence,
    write_personalisation,
    write_run,
)


def reopened(folder, name, change):
    """A JSON file of a record, changed."""
    place = folder / name
    value = json.loads(place.read_text())
    place.write_text(json.dumps(change(value)))


# ---- what records say ----------------------------------------------------------------------------------------------------------


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


def test_a_damaged_line_among_others_is_named_and_not_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:2], lines[2][:40] + "\n", *lines[3:]]))
    with pytest.raises(ReportError, match=r"line 3 of .*metrics\.jsonl is not a measurement"):
        page_data.read([folder])


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


# ---- who is one curve with whom --------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_seeds_alone_are_one_curve(tmp_path):
    for name, seed in (("fedbio", 0), ("fedavg", 0), ("fedbio", 1), ("fedbio", 2)):
        write_run(tmp_path / "runs" / f"{name}-{seed}", name, seed)
    found = page_data.read([tmp_path / "runs"])
    assert [(curve["name"], [found["runs"][i]["seed"] for i in curve["runs"]]) for curve in found["curves"]] == [
        ("fedavg", [0]),
        ("fedbio", [0, 1, 2]),
    ]
    assert found["partitions"] == [{"clients": CLIENTS, "runs": [0, 1, 2, 3]}]
    assert found["over"] is None  # more may come into the folder


def test_the_name_of_a_curve_says_what_tells_it_from_others(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, lr_upper=3.0)
    write_run(tmp_path / "c", seed=0, lr_upper=3.0, iterations=50)
    write_run(tmp_path / "d", "fedavg")
    names = lambda *folders: [
        curve["name"] for curve in page_data.read([tmp_path / folder for folder in folders])["curves"]
    ]
    assert names("a", "b", "d") == ["fedbio (lr_upper 30)", "fedbio (lr_upper 3)", "fedavg"]
    assert names("b", "c") == ["fedbio (iterations 25)", "fedbio (iterations 50)"]
    write_run(tmp_path / "e", task="imbalance")
    assert names("a", "e") == ["data_cleaning, fedbio", "imbalance, fedbio"]
    write_run(tmp_path / "f", lr_upper=1.5, lr_lower=2.5, iterations=7, one=1, two=2)
    assert names("a", "f") == ["fedbio (a)", "fedbio (f)"]  # too much to say


def test_the_same_run_twice_is_one_run(tmp_path):
    folder = write_run(tmp_path / "run")
    assert len(page_data.read([folder, folder])["runs"]) == 1


def test_a_comparison_is_its_runs_and_its_target(tmp_path):
    found = page_data.read([write_comparison(tmp_path / "c") / "comparison.json"])  # the file, as the command prints it
    assert [(curve["name"], len(curve["runs"])) for curve in found["curves"]] == [("fedbio", 3), ("fedavg", 3)]
    assert [(run["algorithm"], run["seed"], run["data_seed"], run["state"]) for run in found["runs"]] == [
        ("fedbio", 9, 4, "finished"),
        ("fedavg", 9, 4, "finished"),
        ("fedbio", 10, 5, "finished"),
        ("fedavg", 10, 5, "finished"),
        ("fedbio", 11, 6, "finished"),
        ("fedavg", 11, 6, "diverged"),
    ]
    assert found["runs"][3]["columns"]["f1"] == [row["f1"] for row in rows_of(11)]
    assert found["target"] == {"metric": "test_accuracy", "value": 0.6}
    for target in (("f1", 0.3), "f1=0.3", Target("f1", 0.3)):
        assert page_data.read([tmp_path / "c"], target=target)["target"] == {"metric": "f1", "value": 0.3}
        page = write_report(tmp_path / "c", tmp_path / "page.html", target=target)
        assert '"target":{"metric":"f1","value":0.3}' in page.read_text()
    assert [run["end"] for run in found["runs"]] == [None] * 5 + [{"iteration": None, "why": "too long"}]


def test_the_configuration_of_a_comparison_has_the_settings_of_its_algorithms_once(tmp_path):
    folder = write_comparison(tmp_path / "c")
    own = {"fedbio": {"lr_upper": 0.125, "nested": {"num_terms": 3}}, "fedavg": {"lr": 2.5}}
    runs = lambda old: [{**run, "settings": own[run["algorithm"]]} for run in old["runs"]]
    reopened(folder, "comparison.json", lambda old: {**old, "runs": runs(old), "max_rounds": 70})
    [text] = {run["config"]["text"] for run in page_data.read([folder])["runs"]}
    shown = json.loads(text)
    assert shown["algorithms"] == own
    assert (shown["max_rounds"], shown["seed"], shown["task_settings"]["noise"]) == (70, 9, 0.4)
    assert "rows" not in text


def test_which_figures_fall_is_known_by_their_names(tmp_path):
    names = (
        "hypergradient",
        "residual",
        "lower_gradient",
        "upper_loss",
        "loss",
        "test_loss",
        "loss_rate",
        "test_accuracy",
        "f1",
        "residuals",
        "errors",
    )
    assert all(map(falls, ("error", "hypergradient_norm", "distance")))
    assert [falls(name) for name in names] == [True] * 6 + [False] * 5
    found = page_data.read([write_run(tmp_path / "run", rows=rows_of(0, loss_rate=lambda i: i))])
    assert sorted(found["falls"]) == ["lower_gradient", "residual", "upper_loss"]


def test_a_study_of_influence_lists_who_harms_and_helps_most(tmp_path):
    [study] = page_data.read([write_influence(tmp_path / "i")])["studies"]
    written = json.loads((tmp_path / "i" / "influence.json").read_text())
    assert [one["sample"] for one in study["harmful"][:3]] == [1, 3, 5]
    assert [one["sample"] for one in study["helpful"][:3]] == [0, 2, 4]
    assert len(study["harmful"]) == len(study["helpful"]) == 20
    assert study["removed"] == written["ranked"][:8]
    assert study["harmful"][0] == written["ranked"][1]
    assert (study["num_instances"], study["scores"], study["cost"]) == (50, written["scores"], written["cost"])


def test_a_study_of_personalisation_is_its_outcomes(tmp_path):
    folder = write_personalisation(tmp_path / "p")
    [study] = page_data.read([folder])["studies"]
    assert study["outcomes"] == json.loads((folder / "personalisation.json").read_text())["outcomes"]
    assert page_data.read([write_personalisation(tmp_path / "old", accuracies=False)])["studies"][0]["outcomes"]


# ---- what no page can be made of ---------------------------------------------------------------------------------------------------

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


# ---- the file --------------------------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def elements(page):
    parser = Elements()
    parser.feed(page)
    return parser


def hostile(tmp_path):
    """A record whose every word is an attack."""
    folder = write_run(tmp_path / "run", HOSTILE)
    rows = [{**row, HOSTILE: 1.0} for row in rows_of(0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reopened(
        folder,
        "config.json",
        lambda config: {
            **config,
            "task": HOSTILE,
            "engine": "peers",
            "peers": [HOSTILE] * 3,
            "versions": {HOSTILE: HOSTILE},
        },
    )
    reopened(
        folder,
        "ledger.json",
        lambda bill: {**bill, "phases": {HOSTILE: bill["phases"]["lower_steps"]}, "edges": {"bytes": [[0, 1, 2]] * 3}},
    )
    reopened(
        folder,
        "clients.json",
        lambda who: {**who, "labels": {"train": {"values": [HOSTILE, "b"], "counts": [[1, 2, 3], [4, 5, 6]]}}},
    )
    reopened(
        folder,
        "findings.json",
        lambda some: [
            {
                **some[0],
                "title": HOSTILE,
                "about": HOSTILE,
                "x": HOSTILE,
                "groups": [{"name": HOSTILE, "counts": [1, 2]}],
            },
            {**some[1], "items": [{"pixels": "AECA/w==", "facts": {HOSTILE: HOSTILE, "label": HOSTILE}}]},
            {**some[2], "columns": [HOSTILE, "b", "c"], "rows": [[HOSTILE, 1, True]]},
            {**some[3], "values": {HOSTILE: [0.5, 0.6, 0.7]}},
            {"kind": HOSTILE, "title": HOSTILE},
        ],
    )
    (folder / "run.toml").write_text(HOSTILE)
    return folder


def test_no_word_of_a_record_becomes_markup_or_code(tmp_path):
    plain = elements(write_report(write_run(tmp_path / "tame"), tmp_path / "tame.html").read_text())
    page = write_report(hostile(tmp_path), title=HOSTILE).read_text()
    found = elements(page)
    assert [tag for tag, _ in found.found] == [tag for tag, _ in plain.found]
    assert len(found.scripts) == 3
    data = json.loads(found.scripts[0])
    assert data["title"] == data["runs"][0]["algorithm"] == HOSTILE
    assert data["runs"][0]["findings"][0]["groups"][0]["name"] == HOSTILE
    assert not re.search("[<>&]", found.scripts[0])


def test_the_page_may_run_its_own_scripts_and_ask_for_nothing(tmp_path):
    page = write_report(write_run(tmp_path / "run")).read_text()
    found = elements(page)
    (policy,) = [
        attributes["content"]
        for tag, attributes in found.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in found.scripts[1:]
    ]
    assert rules["script-src"].split() == hashes
    assert rules["img-src"] == "data: blob:"
    addresses = [
        value
        for _, attributes in found.found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data")
    ]
    assert addresses == ["data:,"]
    first = page.index("Content-Security-Policy")
    assert first < page.index("<style>") < page.index("<script")  # it holds from the start
    assert "connect-src 'self'" in writing.policy(live=True)


def test_the_parts_of_the_page_are_found_where_the_package_is():
    assert {path.name for path in Path(fedbilevel.report.__file__).parent.iterdir()} >= {
        "page.html",
        "page.css",
        *(f"page_{name}.js" for name in writing.SCRIPTS),
    }


@pytest.mark.parametrize(
    "path",
    sorted(path for path in Path(fedbilevel.report.__file__).parent.glob("*.py") if path.name != "tables.py"),
    ids=lambda path: path.name,
)
def test_pages_need_no_torch(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    ours = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    ours -= {"fedbilevel.report.watch", "fedbilevel.sites", "fedbilevel.sites.view"}  # by the page of a site's operator
    light = {"fedbilevel._version", "fedbilevel.errors", "fedbilevel.escapes", "fedbilevel.columns"}
    pages = {f"fedbilevel.report.{path.stem}" for path in Path(fedbilevel.report.__file__).parent.glob("*.py")}
    assert ours <= {*light, "fedbilevel.report", *pages, "plotly.offline"} - {"fedbilevel.report.tables"}


def test_the_command_prints_where_the_page_is(tmp_path):
    folder = write_run(tmp_path / "run")
    done = CliRunner().invoke(
        cli, ["report", str(folder), "--target", "f1=0.3", "--title", "My <run>"], catch_exceptions=False
    )
    assert (done.exit_code, done.output.strip()) == (0, str(folder / "report.html"))
    page = elements((folder / "report.html").read_text())
    assert json.loads(page.scripts[0])["target"] == {"metric": "f1", "value": 0.3}
    assert "<title>My &lt;run&gt;</title>" in (folder / "report.html").read_text()
    done = CliRunner().invoke(
        cli, ["report", str(folder), "--out", str(tmp_path / "new" / "page.html")], catch_exceptions=False
    )
    assert done.output.strip() == str(tmp_path / "new" / "page.html")
    assert isinstance(CliRunner().invoke(cli, ["report", str(tmp_path / "none")]).exception, ReportError)
    assert isinstance(CliRunner().invoke(cli, ["report", str(folder), "--target", "f1"]).exception, SettingError)


def test_a_run_from_the_command_line_has_a_whole_page(tmp_path):
    flags = ["run", "data_cleaning", "-a", "fedbio", "--num-clients", "3", "--iterations", "4", "--measure-every", "1"]
    assert CliRunner().invoke(cli, [*flags, "--out", str(tmp_path / "run")], catch_exceptions=False).exit_code == 0
    found = page_data.read([tmp_path / "run"])
    [run] = found["runs"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run["columns"]["test_accuracy"] == [row["test_accuracy"] for row in rows]
    assert found["diagnostics"] == ["residual", "lower_gradient"]
    assert run["config"]["kind"] == "run.toml"
    for name in ("rounds", "bytes_up", "gy", "hvp"):
        assert sum(phase[name] for phase in run["ledger"]["phases"].values()) == rows[-1][name]
    sizes = found["partitions"][0]["clients"]["sizes"]["train"]
    assert [
        sum(column) for column in zip(*found["partitions"][0]["clients"]["labels"]["train"]["counts"], strict=True)
    ] == sizes
    assert run["state"] == "finished"
    write_report(tmp_path / "run")


# ---- while a run goes on -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    folder = write_run(tmp_path / "run", iterations=30)
    with Watch(Live([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield folder, server
        finally:
            server.shutdown()
            thread.join()


def asked(server, path="/", host=None, method="GET"):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_watch_serves_the_page_and_what_is_new(served):
    folder, server = served
    answer, page = asked(server)
    assert answer.status == 200
    assert 'data-live="yes"' in page
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    before = json.loads(asked(server, "/data.json")[1])
    assert (before["over"], before["runs"][0]["columns"]["iteration"][-1]) == (False, 25)
    assert before["runs"][0]["columns"] == json.loads(elements(page).scripts[0])["runs"][0]["columns"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**rows_of(0, 7)[-1]}) + "\n")
    after = json.loads(asked(server, "/data.json")[1])
    assert (after["over"], after["runs"][0]["columns"]["iteration"][-1]) == (True, 30)
    (folder / "ledger.json").write_text("{")  # somebody spoils a file: what was known stays
    assert json.loads(asked(server, "/data.json")[1])["runs"] == after["runs"]


def test_watch_notices_how_a_run_ended_and_that_it_was_resumed(served):
    folder, server = served
    now = lambda: (lambda found: (found["over"], found["runs"][0]["state"]))(json.loads(asked(server, "/data.json")[1]))
    assert now() == (False, "going")
    (folder / "end.json").write_text(json.dumps({"stopped": "failed", "iteration": 27, "why": "too long a step."}))
    assert now() == (True, "failed")
    (folder / "end.json").unlink()
    assert now() == (False, "going")


def test_the_terminal_says_how_a_run_ended(tmp_path):
    ending = lambda *folders: _ending(page_data.read(folders, partial=True))
    done = lambda name, stopped, **more: write_run(
        tmp_path / name, iterations=400, end={"stopped": stopped, "iteration": 48, **more}, lr_upper=len(name)
    )
    failed = done("failed", "failed", why="a step\x1b[2J was\ntoo long.")
    assert ending(failed) == "The run failed after outer iteration 48 of 400: a step\\x1b[2J was\\ntoo long."
    stopped = done("stopped", "interrupted")
    assert ending(stopped) == "The run was stopped after outer iteration 48 of 400."
    finished = done("finished", "finished")
    assert ending(finished) == "The run has finished."
    assert (
        ending(finished, stopped, failed)
        == f"The run in {failed} failed after outer iteration 48 of 400: a step\\x1b[2J was\\ntoo long."
    )
    assert ending(finished, stopped) == f"The run in {stopped} was stopped after outer iteration 48 of 400."
    old = write_run(tmp_path / "old", iterations=40)
    (old / "solution.safetensors").write_bytes(b"")
    assert ending(old) == "The run was stopped after outer iteration 25 of 40."
    none = write_run(tmp_path / "none", rows=[], whole=False, end={"stopped": "failed", "iteration": 0})
    assert ending(none) == "The run failed after outer iteration 0 of 25."
    assert ending(write_influence(tmp_path / "study")) == "The study has finished."


def test_watch_answers_its_own_name_and_its_own_paths_only(served):
    _, server = served
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"127.0.0.1:{port}.evil.example",
    ):
        answer, text = asked(server, "/data.json", host)
        assert (answer.status, "runs" in text) == (403, False)
    assert asked(server, "/data.json", f"localhost:{port}")[0].status == 200
    for path in ("/config.json", "/../config.json", "/data.json?x", "/run/metrics.jsonl", "/%2e%2e/"):
        assert asked(server, path)[0].status in (400, 404)
    assert asked(server, "/", method="POST")[0].status == 501


def test_a_port_that_is_taken_is_said_in_one_sentence(served):
    folder, server = served
    port = server.server_address[1]
    with pytest.raises(ReportError, match=rf"the port {port} cannot be had \(somebody uses it\): name another one"):
        Watch(Live([folder]), port)
    with pytest.raises(ReportError, match="expected a number from 1 to 65535"):
        Watch(Live([folder]), 70000)
    done = CliRunner().invoke(cli, ["watch", str(folder), "--port", str(port), "--no-open"])
    assert isinstance(done.exception, ReportError)


def test_watch_says_when_the_run_has_finished_and_ends_by_ctrl_c(tmp_path, monkeypatch):
    folder, opened = write_run(tmp_path / "run", iterations=30), []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    said = []

    def look():
        end = time.monotonic() + 20
        while not opened and time.monotonic() < end:
            time.sleep(0.02)
        connection = http.client.HTTPConnection(opened[0].split("/")[2], timeout=10)
        connection.request("GET", "/data.json")
        said.append(json.loads(connection.getresponse().read())["over"])
        connection.close()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(rows_of(0, 7)[-1]) + "\n")
        time.sleep(2.4)  # it looks every two seconds
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    thread = threading.Thread(target=look)
    thread.start()
    done = CliRunner().invoke(cli, ["watch", str(folder)], catch_exceptions=False)
    thread.join()
    assert (done.exit_code, said) == (0, [False])
    assert done.output.splitlines() == [
        f"{folder} is shown at {opened[0]} (Ctrl-C ends this).",
        "The run has finished.",
        f"No longer watching {folder}.",
    ]
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(opened[0].split("/")[2], timeout=5).connect()


# ---- what a review found ---------------------------------------------------------------------------------------------------------


def test_a_page_is_never_written_over_a_file_of_a_record(tmp_path):
    run = write_run(tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ReportError, match=r"expected a name that ends in \.html"):
        write_report([run], run / "metrics.jsonl")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_problems_that_differ_and_the_same_run_once_more_are_curves_of_their_own(tmp_path):
    """Runs from Python have no task that would tell them apart: their losses, data and shapes do."""
    own = {
        "losses": [1.0, 2.0],
        "x": {"a": [2]},
        "y": {"w": [3]},
        "scopes": {"lower": "global", "upper": "shared"},
        "weights": "mean",
    }
    for name, change in {
        "one": {},
        "five": {"losses": [5.0, 2.0]},
        "wide": {"y": {"w": [4]}},
        "again": {},
        "other": {"seed": 7},
    }.items():
        folder = write_run(tmp_path / name)
        identity = lambda config, change=change: {**config["identity"], **own, **change}
        reopened(
            folder,
            "config.json",
            lambda config, identity=identity: {
                **{key: value for key, value in config.items() if key not in ("task", "task_settings", "options")},
                "identity": identity(config),
            },
        )
    found = page_data.read([tmp_path / name for name in ("one", "five", "wide", "again", "other")])
    assert [curve["runs"] for curve in found["curves"]] == [[0, 4], [1], [2], [3]]
    assert len({curve["name"] for curve in found["curves"]}) == 4


WRONG_FINDINGS = {
    "no items": {"kind": "images", "title": "x"},
    "no shape": {"kind": "images", "title": "x", "shape": "wide", "items": []},
    "counts": {"kind": "histogram", "title": "x", "edges": [0, 1, 2], "groups": [{"name": "a", "counts": [1]}]},
    "rows": {"kind": "ranking", "title": "x", "columns": ["a", "b"], "rows": [[1]]},
    "values": {"kind": "by_client", "title": "x", "values": {"a": ["high"]}},
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
