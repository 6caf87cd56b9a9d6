"""The table of the papers' figures and tables says what the records hold."""

from __future__ import annotations

import dataclasses
import re

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.errors import FedBilevelError
from fedbilevel.report import item_tables
from fedbilevel.studies.experiment import known, read

# every figure and table with results; those of theory, pseudocode and architectures are left out
PAPERS = {
    "AggITD": {"Figure": (1, 2, 3, 4, 5, 6, 7), "Table": (2,)},
    "FedBiOAcc": {"Figure": (1, 2, 3, 4, 5, 6)},
    "HGP": {"Figure": (1, 2, 3, 4), "Table": (2, 4, 8)},
}


def experiment(items, result, **others):
    one = read("aggitd-table2")
    return dataclasses.replace(one, content={**one.content, "items": items, "result": result, **others})


def entry(number, **figures):
    return {"repetitions": number, "figures": {name: {"mean": value} for name, value in figures.items()}}


ITEM = {"panels": ["iid", "shards"], "rows": ["fedbio", "penalty"]}


@pytest.mark.parametrize(
    ("item", "numbers", "said"),
    [
        ({}, (3, 3, 4, 3), "| P Figure 1 | reproduced | 3 to 4 |"),
        ({}, (3, 3, 3, 2), "| P Figure 1 | recorded with fewer than 3 repetitions | 2 to 3 |"),
        ({}, (3, 3, 3, None), "| P Figure 1 | partly recorded, 3 of 4 rows | 3 |"),
        ({}, (None,) * 4, "| P Figure 1 | not recorded | - |"),
        ({"repetitions": 10}, (3,) * 4, "| P Figure 1 | recorded with fewer than 10 repetitions | 3 |"),
        ({"differs": "other data"}, (3,) * 4, "| P Figure 1 | reproduced; other data | 3 |"),
        ({"rows": ["fedbio"]}, (3, None, 3, None), "| P Figure 1 | reproduced | 3 |"),
    ],
)
def test_the_state_follows_from_the_records(item, numbers, said):
    places = [(panel, row) for panel in ITEM["panels"] for row in ITEM["rows"]]
    result = {}
    for (panel, row), number in zip(places, numbers, strict=True):
        if number is not None:
            result.setdefault(panel, {})[row] = entry(number)
    assert said in item_tables.table([experiment({"P Figure 1": {**ITEM, **item}}, result)])


def test_diverged_rows_are_counted_and_items_of_several_experiments_need_all_parts():
    given = {"P Table 2": {"panels": ["iid"], "rows": ["fedbio"]}}
    good, bad = (experiment(given, {"iid": {"fedbio": one}}) for one in (entry(3), entry(3, diverged=1.0)))
    assert item_tables.state(item_tables.parts([good, bad])["P Table 2"]) == "recorded; 1 of 2 rows diverged"
    assert item_tables.state(item_tables.parts([good, experiment(given, {})])["P Table 2"]) == (
        "partly recorded, 1 of 2 rows"
    )


def test_items_that_cannot_be_had_are_named_with_the_reason_and_numbers_are_sorted():
    one = experiment({"P Figure 10": ITEM, "P Figure 2": ITEM}, {}, unobtainable={"P Figure 9": "no such data"})
    lines = item_tables.table([one]).splitlines()
    assert [re.findall(r"Figure (\d+)", line)[0] for line in lines if line.startswith("| P")] == ["2", "9", "10"]
    assert "| P Figure 9 | not obtainable: no such data | - | aggitd-table2 |" in lines
    assert item_tables.table([experiment({}, {})]) == ""


def test_every_figure_and_table_with_results_is_declared_by_some_experiment():
    every = [read(name) for name in known()]
    names = {name for one in every for key in ("items", "unobtainable") for name in one.content.get(key, {})}
    for paper, kinds in PAPERS.items():
        for kind, numbers in kinds.items():
            for number in numbers:
                assert any(re.match(rf"{paper} {kind} {number}(\D|$)", name) for name in names), (paper, kind, number)


def test_the_command_prints_the_table_first():
    printed = CliRunner().invoke(cli, ["reproduce", "fedbioacc-figure4", "--results"])
    assert printed.exit_code == 0
    assert printed.output.startswith(item_tables.table([read("fedbioacc-figure4")]))
    assert "| FedBiOAcc Figure 6 | not obtainable: the images of MiniImageNet were not available |" in printed.output


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ('items."P Figure 1" = {rows = ["fedbia"]}', "entry in items.P Figure 1.rows"),
        ('items."P Figure 1" = {panels = ["ones"]}', "entry in items.P Figure 1.panels"),
        ('items."P Figure 1" = {repetition = 3}', "Did you mean 'repetitions'"),
        ('items."P Figure 1" = {repetitions = 0}', "expected a whole number, at least 1"),
        ('unobtainable."P Figure 1" = 3', "expected text"),
    ],
)
def test_what_is_wrong_in_a_declaration_is_named(tmp_path, declared, named):
    path = tmp_path / "experiment.toml"
    path.write_text(
        f'title = "a"\nsource = "b"\nstudy = "optimise"\n{declared}\n[figures]\nrounds = "rounds"\n[panels.one]\n'
        "[rows.fedbio]\n"
    )
    with pytest.raises(FedBilevelError, match=named):
        read(path)
