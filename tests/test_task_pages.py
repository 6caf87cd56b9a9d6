"""Pages of tasks: tables, costs and warnings come from the recorded experiment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.few_shot_episodes import PUBLISHED
from fedbilevel import discovery
from fedbilevel.studies.experiment import read
from fedbilevel.studies.verdicts import verdict
from website import task_pages


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


def test_accuracies_of_few_shot_episodes_are_those_of_the_record():
    root = Path(__file__).parents[1]
    record = json.loads((root / "experiments" / "worth" / "few-shot-episodes-cuda.json").read_text())
    five, twenty = (100 * record[f"{ways}-way 1-shot"][0]["test_accuracy"] for ways in (5, 20))
    page = (root / "docs" / "how-to" / "personalise.md").read_text()
    assert f"reaches {five:.2f} % of 5 classes and {twenty:.2f} % of 20" in page
    for ways, reached in ((5, five), (20, twenty)):
        assert reached > 100 * PUBLISHED[ways]["MAML"]
        assert f"{100 * PUBLISHED[ways]['MAML']:.1f} %" in page
