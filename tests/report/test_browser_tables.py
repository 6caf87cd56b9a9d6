"""Tables, findings and studies in a headless Chromium are those of the record."""

import json
import math
import statistics

import pytest

from fedbilevel.report import write_report
from fedbilevel.studies.comparison import costs
from support.browser.pages import NEEDS_BROWSER, cells, traces
from support.browser.records import (
    CLIENTS,
    HOSTILE,
    phases_of,
    rows_of,
    write_run,
)

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]


@pytest.mark.slow
def test_a_run_that_failed_says_so_and_why(opened, tmp_path):
    end = {"stopped": "failed", "iteration": 48, "why": f"a step was too long {HOSTILE}"}
    write_run(tmp_path / "runs" / "a", "simfbo", iterations=400, end=end, whole=False)
    page = opened(write_report(tmp_path / "runs" / "a", tmp_path / "failed.html"))
    said = f"Failed after outer iteration 48 of 400: {end['why']}"
    status = "document.getElementById('status').textContent"
    assert page.run(status) == f"{said}."
    of = "[...document.querySelectorAll('.card .of')].map(e => e.textContent)"
    assert page.run(of) == ["last test accuracy"]
    assert page.run("[...document.querySelectorAll('.card .why')].map(e => e.textContent)") == [said]
    assert page.run("document.querySelectorAll('main img, main b').length") == 0
    page.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert page.run("document.getElementById('status').offsetParent !== null")  # also on paper
    write_run(
        tmp_path / "runs" / "b", "fedbio", iterations=400, end={"stopped": "finished", "iteration": 400}, whole=False
    )
    page = opened(write_report(tmp_path / "runs", tmp_path / "both.html"))
    assert page.run(status) == f"simfbo failed after outer iteration 48 of 400: {end['why']}."
    assert page.run(of) == ["last test accuracy", "final test accuracy"]
    assert page.run("document.querySelector('.card h3').textContent") == "simfbo (1 of 1 failed)"


def test_a_run_that_diverged_says_why(opened):
    page = opened("comparison")
    assert page.run("document.getElementById('status').textContent") == "fedavg, seed 11/6 diverged: too long."
    assert page.run(
        "[...document.querySelectorAll('.card .why')].map(e => [e.textContent, "
        "e.closest('.card').querySelector('h3').textContent])"
    ) == [["Diverged: too long", "fedavg (1 of 3 diverged)"]]


def test_the_tables_are_the_last_rows_and_the_ledger(opened):
    page = opened("runs")
    ends = {"fedavg": [rows_of(5)[-1]], "fedbio": [rows_of(0)[-1], rows_of(1)[-1]]}
    finals, paid = cells(page, "#finals-table"), cells(page, "#costs-table")
    for number, (name, rows) in enumerate(ends.items()):
        assert finals[number][0].endswith(name)
        expected = [
            statistics.fmean(row[metric] for row in rows)
            for metric in ("test_accuracy", "f1", "upper_loss", "residual", "lower_gradient")
        ]
        assert finals[number][1:] == pytest.approx([len(rows), *expected])
        bills = [{**costs(row), "calls": costs(row)["gradients"] + costs(row)["products"]} for row in rows]
        assert paid[number][2:] == pytest.approx([statistics.fmean(bill[cost] for bill in bills) for cost in bills[0]])
    lines = cells(page, "#ledger-table")
    phases = phases_of(rows_of(5)[-1])
    first = phases["lower_steps"]
    calls = first["gy"] + first["gx"] + first["fx"] + first["fy"], first["hvp"] + first["jvp"]
    assert lines[0][1:] == [
        "lower steps",
        first["rounds"],
        first["bytes_up"],
        first["bytes_down"],
        *calls,
        sum(calls),
        first["samples"],
    ]
    assert lines[2][1:3] == ["all phases", rows_of(5)[-1]["rounds"]]
    assert lines[5][3] == statistics.fmean(row["bytes_up"] for row in ends["fedbio"])
    for unit, parts in {
        "bytes": ("bytes_up", "bytes_down"),
        "rounds": ("rounds",),
        "calls": ("gy", "gx", "fx", "fy", "hvp", "jvp"),
    }.items():
        page.press(f"#ledger-unit input[value={unit}]")
        for phase in phases:
            [bars] = traces(page, "ledger-plot", phase=phase)
            expected = [
                statistics.fmean(sum(phases_of(row)[phase][name] for name in parts) for row in rows)
                for rows in ends.values()
            ]
            assert bars["x"] == expected
    page.choose("ledger-column", "hvp")
    assert traces(page, "ledger-clients-plot", column="hvp")[0]["y"] == [rows_of(5)[-1]["hvp"], 0, 1]


def test_one_rule_makes_all_numbers(opened):
    page = opened("runs")
    shown = page.run(
        "Object.fromEntries([...document.querySelectorAll('td[data-value]')].map(c => [c.dataset.value, "
        "c.textContent.split(' ±')[0]]))"
    )
    assert len(shown) > 50
    for exact, text in shown.items():
        value = float(exact)
        read = (
            float(text.replace("\u202f", "").replace("\u2212", "-")) if text not in ("\u2013", "\u221e") else math.nan
        )
        assert read == pytest.approx(value, rel=6e-3, nan_ok=True)
        if value.is_integer():
            assert read == value


def test_partition_findings_and_configuration_are_those_of_the_record(opened, reports):
    page = opened("runs")
    plot = page.run(
        "document.getElementById('partition-plot').data.map(t => ({part: t.meta.part, y: Array.from(t.y), z: t.z}))"
    )
    assert plot[0]["y"] == CLIENTS["sizes"]["train"]
    assert plot[1]["z"] == CLIENTS["labels"]["train"]["counts"]
    page.choose("partition-role", "val")
    plot = page.run("document.getElementById('partition-plot').data.map(t => Array.from(t.y))")
    assert plot == [CLIENTS["sizes"]["val"]]  # no labels there
    drawn = page.run(
        "[...document.querySelectorAll('#findings .plot')].map(d => d.data.map(t => [t.name, "
        "Array.from(t.x), Array.from(t.y)]))"
    )
    assert drawn[0] == [["clean (41)", [0.25, 0.75], [1, 40]], ["corrupted (25)", [0.25, 0.75], [23, 2]]]
    assert drawn[1][0][2] == [0.5, None, 0.75]
    data = "c.getContext('2d').getImageData(0, 0, 2, 2).data"
    pixels = (
        f"(() => {{ const c = document.querySelector('.pictures canvas'); return [c.width, c.height, ...{data}]; }})()"
    )
    assert page.run(pixels) == [2, 2, 0, 0, 0, 255, 64, 64, 64, 255, 128, 128, 128, 255, 255, 255, 255, 255]
    assert page.run("document.querySelector('.pictures li').innerText").split("\n") == [
        "client 1",
        "sample 17",
        "label 3",
        "weight 0.01235",
        "wrong",
    ]
    assert page.run(
        "[...document.querySelectorAll('.finding tbody tr td')].slice(0, 3).map(c => c.dataset.value ?? c.textContent)"
    ) == ["2", "-0.125", "yes"]
    texts = page.run("[...document.querySelectorAll('#configurations pre')].map(p => p.textContent)")
    assert texts == [
        (reports["runs"].parent / "runs" / name / "run.toml").read_text()
        for name in ("fedavg-5", "fedbio-0", "fedbio-1")
    ]
    page.press("#configurations button")
    page.until("document.querySelector('#configurations button').textContent === 'Copied'")
    page.choose("findings-run", "2")
    assert page.run("document.getElementById('findings-run').selectedOptions[0].textContent") == "fedbio, seed 1/1"


@pytest.mark.slow
def test_studies_show_what_they_recorded(opened, reports):
    page, place = opened("influence"), reports["influence"].parent
    study = json.loads((place / "influence" / "influence.json").read_text())
    points = traces(page, "removals-plot")[1:]
    assert sorted(
        zip([x for one in points for x in one["x"]], [y for one in points for y in one["y"]], strict=True)
    ) == sorted((one["actual"], one["prediction"]) for one in study["ranked"][:8])
    assert cells(page, "#instances-harmful")[0] == [
        "1",
        1,
        1,
        1,
        "no",
        study["ranked"][1]["prediction"],
        study["ranked"][1]["actual"],
    ]
    assert cells(page, "#instances-helpful")[4][5:] == [study["ranked"][8]["prediction"], "not tried"]
    assert page.run("document.querySelector('.card .big').dataset.value") == "0.97"
    page = opened("personalisation")
    outcomes = json.loads((place / "personalisation" / "personalisation.json").read_text())["outcomes"]
    mine = lambda name: [
        one[name] for one in outcomes if (one["method"], one["network"]) == ("hgp_pl", "random_directed")
    ]
    row = cells(page, "#personalisation-table")[3]
    assert row[1:3] == ["random directed", 2]
    figures = ("test_accuracy", "bottom_decile", "validation_accuracy", "rounds", "megabytes", "seconds")
    assert row[3:] == pytest.approx([statistics.fmean(mine(name)) for name in figures])
    [box] = traces(page, "accuracies-plot", network="complete")
    assert (box["x"], box["y"]) == (["local"] * 6 + ["hgp_pl"] * 6, [0.5, 0.75, 1.0] * 2 + [0.6, 0.75, 1.0] * 2)
