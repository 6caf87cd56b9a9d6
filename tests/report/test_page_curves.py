"""Content of the page: which runs form a curve, and comparisons and studies."""

import json
import re

import pytest

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.columns import COLUMNS, DIAGNOSTICS, TERMS, falls, rises
from fedbilevel.errors import ReportError
from fedbilevel.federation.ledger import Totals
from fedbilevel.report import page_data, write_report
from fedbilevel.runs.result import Result
from fedbilevel.studies.comparison import Target
from fedbilevel.tasks.quadratic import Quadratic
from support.browser.records import (
    CLIENTS,
    reopened,
    rows_of,
    write_comparison,
    write_influence,
    write_personalisation,
    write_run,
)


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


def test_problems_that_differ_and_the_same_run_once_more_are_curves_of_their_own(tmp_path):
    """Runs from Python have no task: their losses, data and shapes distinguish them."""
    own = {
        "losses": [1.0, 2.0],
        "x": {"a": [2]},
        "y": {"w": [3]},
        "scopes": {"lower": "global", "upper": "shared"},
        "client_weights": "equal",
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


def test_tasks_and_task_settings_are_groups_of_their_own(tmp_path):
    write_run(tmp_path / "z", "fedbio")
    write_run(tmp_path / "b", "fedavg", task="imbalance")
    write_run(tmp_path / "a", "simfbo")
    noisy = write_run(tmp_path / "n", "fedbio")
    reopened(noisy, "config.json", lambda old: {**old, "task_settings": {**old["task_settings"], "noise": 0.2}})
    found = page_data.read([tmp_path / name for name in ("z", "b", "a", "n")])
    assert [group["name"] for group in found["groups"]] == [
        "data_cleaning (noise 0.4)",
        "imbalance",
        "data_cleaning (noise 0.2)",
    ]
    assert [(curve["short"], curve["group"]) for curve in found["curves"]] == [
        ("fedbio", 0),
        ("fedavg", 1),
        ("simfbo", 0),
        ("fedbio", 2),
    ]


def test_seeds_and_places_of_data_do_not_make_another_task(tmp_path):
    for seed, place in ((0, "/here"), (1, "/there")):
        folder = write_run(tmp_path / f"run{seed}", seed=seed)
        moved = lambda old, place=place: {**old, "task_settings": {**old["task_settings"], "data_dir": place}}
        reopened(folder, "config.json", moved)
    assert len(page_data.read([tmp_path / "run0", tmp_path / "run1"])["groups"]) == 1
    write_comparison(tmp_path / "compared")
    assert [group["name"] for group in page_data.read([tmp_path / "compared"])["groups"]] == ["data_cleaning"]


def test_results_are_shown_by_their_record_or_from_memory(tmp_path):
    folder = write_run(tmp_path / "run")
    totals = Totals({"rounds": 35}, {"lower": {"rounds": 35, "gy": 3}})
    make = lambda path: Result({}, {}, rows_of(2), totals, 25, path=path, name="simfbo")
    page = write_report([make(folder), make(None), folder], tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    found = page_data.read([make(folder), make(None), make(None), folder])
    assert [(run["algorithm"], run["task"]) for run in found["runs"]] == [
        ("fedbio", "data_cleaning"),
        ("simfbo", "task not recorded"),
        ("simfbo", "task not recorded"),
    ]
    assert [curve["runs"] for curve in found["curves"]] == [[0], [1], [2]]  # nothing says that they are seeds
    assert found["runs"][1]["columns"]["f1"] == [row["f1"] for row in rows_of(2)]
    assert found["runs"][1]["ledger"]["phases"] == {"lower": {"rounds": 35, "gy": 3}}
    assert write_report(make(folder)) == folder / "report.html"
    with pytest.raises(ReportError, match="the first result has no record"):
        write_report(make(None))
    with pytest.raises(ReportError, match="a record is of type int, expected a Result"):
        write_report([folder, 3])


def test_a_solved_problem_has_a_report(tmp_path):
    result = fb.solve(*Quadratic().build(), "fedbio", num_rounds=2)
    found = page_data.read([result])
    assert found["runs"][0]["columns"]["rounds"] == [row["rounds"] for row in result.rows]
    assert write_report(result, tmp_path / "new" / "page.html").is_file()


def test_every_term_is_one_to_four_sentences_and_every_task_figure_is_explained():
    assert all(re.fullmatch(r"[A-Z|][^\n]*\.", text) and text.count(". ") <= 3 for text in TERMS.values())
    shown = {name for task in discovery.tasks().values() for name in task.headline}
    assert shown | {*DIAGNOSTICS, *COLUMNS, "rounds", "megabytes", "seconds", "iteration"} <= {*TERMS}


def test_which_figures_rise_is_known_by_their_words():
    assert all(map(rises, ("test_accuracy", "f1", "rarest_test_accuracy", "AUC", "val_recall")))
    assert not any(map(rises, ("upper_loss", "accuracy_loss", "flagged", "f1_distance", "disagreement")))
