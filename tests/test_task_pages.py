"""Pages of tasks: tables, costs and warnings come from the recorded experiment."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks.few_shot_episodes import PUBLISHED
from fedbilevel import discovery
from fedbilevel.studies.experiment import read
from fedbilevel.studies.verdicts import verdict
from website import task_pages, worth_table


def recorded(values: dict[str, list[float]], panel: str = "imbalance-digits"):
    """Return the experiment with these records alone."""
    one = read("worth")
    rows = {
        row: {
            "settings": "", "repetitions": len(some), "commit": "c", "machine": "m", "time": "2026-01-01",
            "values": some,
            "figures": {
                name: {"mean": mean, "deviation": 0.0, "runs": len(some)}
                for name, mean in (("figure", sum(some) / len(some)), ("megabytes", 10.0 * len(row)))
            },
        }
        for row, some in values.items()
    }  # fmt: skip
    return dataclasses.replace(one, content={**one.content, "result": {panel: rows}})


def test_a_page_has_the_recorded_table_and_the_best_plain_way_with_its_costs():
    values = {"self-tuned": [0.90, 0.91], "plain": [0.80, 0.82], "class-balanced": [0.93, 0.95]}
    page = task_pages.page("imbalance", recorded(values))
    assert "| class-balanced weights | 0.94 +-0 |" in page
    assert page.count(task_pages.NOT_RUN) == 1  # the panel of MNIST
    word = verdict(values["self-tuned"], values["class-balanced"], lower_is_better=False).shown()
    assert word.startswith("ties") or word.startswith("loses")
    assert (
        f"the best plain way, class-balanced weights has 0.94 (140 MB); ours, self_tuned has 0.905 (100 MB): it {word}."
        in page
    )


def test_of_a_loss_the_lowest_is_the_best():
    values = {"self-tuned": [1.5], "uniform": [1.4], "target": [1.9]}
    page = task_pages.page("mixing", recorded(values, "mixing-chains"))
    assert "the best plain way, sources alike has 1.4" in page


@pytest.mark.parametrize("name", task_pages.names())
def test_every_page_says_when_not_to_use_the_task(name):
    kind = discovery.task(name)
    assert kind.avoid
    page = task_pages.page(name)
    assert f"Do not use this when {kind.avoid}." in page
    assert f"]({name}.md)" in task_pages.index()


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("hyper_representation", {"fedadam": "FedAdam", "self-tuned": "`self_tuned`"}),
        ("few_shot", {"prototypes": "ProtoNet", "self-tuned": "`self_tuned`"}),
        ("classification", {"fedadam": "FedAdam", "self-tuned": "`self_tuned`"}),
    ],
)
def test_numbers_in_the_warning_of_a_task_are_those_of_its_record(name, rows):
    [panel] = task_pages.panels(task_pages.worth())[name]
    record = task_pages.worth().content["result"][panel]
    shown = [f"{said} has {100 * record[row]['figures']['figure']['mean']:.1f} %" for row, said in rows.items()]
    avoid = discovery.task(name).avoid
    assert all(one in avoid for one in shown), (shown, avoid)
    assert len(re.findall(r"\d+\.\d %", avoid)) == len(rows)
    assert {len(record[row]["values"]) for row in rows} == {5}


def test_accuracies_of_few_shot_episodes_are_those_of_the_record():
    root = Path(__file__).parents[1]
    record = json.loads((root / "experiments" / "worth" / "few-shot-episodes-cuda.json").read_text())
    five, twenty = (100 * record[f"{ways}-way 1-shot"][0]["test_accuracy"] for ways in (5, 20))
    page = (root / "docs" / "how-to" / "personalise.md").read_text()
    assert f"reaches {five:.2f} % of 5 classes and {twenty:.2f} % of 20" in page
    for ways, reached in ((5, five), (20, twenty)):
        assert reached > 100 * PUBLISHED[ways]["MAML"]
        assert f"{100 * PUBLISHED[ways]['MAML']:.1f} %" in page


def test_the_table_of_worth_pairs_our_answer_with_the_plain_way_that_comes_closest():
    values = {
        "guarded": [0.90, 0.92, 0.94], "self-tuned": [0.99, 0.99, 0.99],
        "plain": [0.80, 0.81, 0.85], "class-balanced": [0.89, 0.90],
    }  # fmt: skip
    one = recorded(values)
    digests = {job.row: job.digest for job in one.jobs(panels=["imbalance-digits"], repetitions=1)}
    for row, entry in one.content["result"]["imbalance-digits"].items():
        entry["settings"] = digests[row]
    lines = worth_table.table(one).splitlines()
    close, far = (verdict([0.90, 0.92, 0.94][: len(some)], some, lower_is_better=False)
                  for some in (values["class-balanced"], values["plain"]))  # fmt: skip
    assert (close.word, far.word) == ("ties", "wins")
    assert len(lines) == 3
    assert lines[2].endswith(
        f"| 0.91 (guarded) | 0.895 (class-balanced weights) | {close.shown()}; of 2 plain ways, "
        "it beats 1, ties with 1 | 2 |"
    )
    page = f"before\n{worth_table.MARKER}\nafter"
    assert worth_table.filled(page) == f"before\n{worth_table.table()}\nafter"
    one.content["result"]["imbalance-digits"]["class-balanced"]["settings"] = "changed since"
    assert "| 0.82 (cross-entropy) |" in worth_table.table(one)


def test_of_a_loss_the_closest_plain_way_is_the_lowest():
    one = recorded({"guarded": [1.0, 1.1], "uniform": [1.4, 1.5], "target": [1.9, 2.0]}, "mixing-chains")
    digests = {job.row: job.digest for job in one.jobs(panels=["mixing-chains"], repetitions=1)}
    for row, entry in one.content["result"]["mixing-chains"].items():
        entry["settings"] = digests[row]
    assert "| 1.05 (guarded) | 1.45 (sources alike) |" in worth_table.table(one)
