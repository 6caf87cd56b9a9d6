"""Rows with few repetitions are listed with what one repetition takes."""

from __future__ import annotations

import dataclasses

from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.report import seed_tables as seeds
from fedbilevel.studies.experiment import read


def experiment(**repetitions):
    one = read("aggitd-table2")
    rows = {
        row: {"settings": "", "repetitions": number, "seconds": 30.0, "machine": "m", "commit": "c", "figures": {}}
        for row, number in repetitions.items()
    }
    return dataclasses.replace(one, content={**one.content, "result": {"shards": rows}})


def test_rows_are_listed_with_the_seconds_of_one_repetition():
    one = experiment(fedbio=2, penalty=1, simfbo=3)
    assert seeds.few(one) == {"shards": {"fedbio": (2, 15.0), "penalty": (1, 30.0)}}
    assert "| aggitd-table2 | shards | fedbio (2, 15 s), penalty (1, 30 s) | m |" in seeds.table([one])


def test_nothing_is_said_where_every_row_has_enough():
    assert seeds.table([experiment(simfbo=3)]) == ""


def test_the_command_prints_the_list():
    printed = CliRunner().invoke(cli, ["reproduce", "fedbioacc-figure4", "--results"])
    assert printed.exit_code == 0
    listed = seeds.table([read("fedbioacc-figure4")])
    assert printed.output.endswith(listed + "\n") if listed else "fewer than three" not in printed.output
