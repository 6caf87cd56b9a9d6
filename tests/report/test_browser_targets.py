"""Costs to a target in a headless Chromium are those of `compare`."""

import itertools
import json

import pytest

from fedbilevel.report import write_report
from fedbilevel.studies.comparison import Target, costs
from support.browser.pages import COSTS, NEEDS_BROWSER, cells, spread
from support.browser.records import (
    rows_of,
    write_run,
)

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]


def test_costs_to_a_target_are_those_of_compare(opened, reports):
    page = opened("comparison")
    whole = json.loads((reports["comparison"].parent / "comparison" / "comparison.json").read_text())["runs"]

    def check(metric, value):
        target = Target(metric, value)
        for row, name in zip(cells(page, "#target-table"), ("fedbio", "fedavg"), strict=True):
            mine = [one["rows"] for one in whole if one["algorithm"] == name and one["diverged"] is None]
            firsts = [costs(first) for first in (target.reached(rows) for rows in mine) if first is not None]
            assert row[1] == len(firsts)
            if not firsts:
                assert row[2:] == ["not reached"]
            else:
                assert row[2:] == pytest.approx([spread([first[cost] for first in firsts])[0] for cost in COSTS])

    assert page.run("document.getElementById('target-value').value") == "0.6"
    check("test_accuracy", 0.6)
    counts = set()
    for value in ("0.82", "0.75", "0.1", "7"):
        page.choose("target-value", value)
        check("test_accuracy", float(value))
        counts |= {row[1] for row in cells(page, "#target-table")}
    assert counts >= {0, 2, 3} | {1}  # of three, and of the two that did not diverge
    page.choose("target-metric", "upper_loss")  # from above
    page.choose("target-value", "0.43")
    check("upper_loss", 0.43)
    deviations = page.run(
        "[...document.querySelectorAll('#target-table tbody tr:first-child td[data-deviation]')].map(c "
        "=> Number(c.dataset.deviation))"
    )
    target = Target("upper_loss", 0.43)
    firsts = [
        costs(target.reached(one["rows"]))
        for one in whole
        if one["algorithm"] == "fedbio" and target.reached(one["rows"])
    ]
    assert deviations == pytest.approx([spread([first[cost] for first in firsts])[1] for cost in COSTS])
    assert "1 of 3 diverged" in page.run("document.querySelector('#target-table tbody tr:last-child th').textContent")


def test_without_a_target_every_run_reaches_the_value_that_is_shown(opened):
    page = opened("runs")
    page.choose("metric", "test_accuracy")
    least = min(rows_of(seed)[-1]["test_accuracy"] for seed in (0, 1, 5))
    assert least * 0.999 < float(page.run("document.getElementById('target-value').value")) <= least
    assert [row[1] for row in cells(page, "#target-table")] == [1, 2]
    page.choose("metric", "upper_loss")
    most = max(rows_of(seed)[-1]["upper_loss"] for seed in (0, 1, 5))
    assert most <= float(page.run("document.getElementById('target-value').value")) < most * 1.001
    assert [row[1] for row in cells(page, "#target-table")] == [1, 2]


ODD = {
    "a_loss": [0.5, 0.7, 0.9, 0.2, 0.1, 0.05],  # begins below 0.6, which does not mean that it is to rise
    "residual": [0.001, 3.0, 2.0, 0.5, 0.1, 0.2],
    "score": [None, float("nan"), 0.3, float("inf"), 0.5, 0.9],  # its side is that of 0.3, and infinity is not there
    "misses": [float("-inf"), 9.0, 4.0, None, 2.0, 2.5],
    "still": [7.5113] * 6,
    "late": [None, None, None, None, None, 1.0],
}


def odd(folder, *, scale=1.0):
    """A run with figures that are empty, infinite, still, or begin on the side where they should
    end.
    """
    figures = {
        name: (lambda i, values=values: values[i] if values[i] is None else scale * values[i])
        for name, values in ODD.items()
    }
    return write_run(folder, f"odd{scale:g}", rows=rows_of(0, **figures), whole=False)


def test_a_target_is_reached_from_the_side_that_compare_says(opened, tmp_path):
    page = opened(write_report(odd(tmp_path / "run"), tmp_path / "odd.html"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    firsts, places = {"score": 0.3, "misses": 9.0}, set()
    for metric in ("a_loss", "residual", "score", "misses"):
        page.choose("target-metric", metric)
        for value in (0.6, 0.4, 0.0005, 2.25, 5.0):
            page.choose("target-value", str(value))
            first = Target(metric, value).reached(rows)
            [row] = cells(page, "#target-table")
            assert row[1:] == (
                [0, "not reached"] if first is None else [1, *(pytest.approx(costs(first)[cost]) for cost in COSTS)]
            ), (metric, value)
            places.add(first and first["iteration"])
            caption = page.run("document.querySelector('#target-table caption').textContent")
            said = "above" if metric in firsts and firsts[metric] < value else "below"
            assert caption.endswith(f"is at or {said} {value:g}"), caption
    assert places >= {None, 0, 10, 15, 20, 25}
    assert Target("score", 0.4).reached(rows)["iteration"] == 20  # not where it was infinite
    assert Target("a_loss", 0.6).reached(rows)["iteration"] == 0
    assert Target("late", 1.0).reached(rows)["iteration"] == 25


def test_curves_that_come_from_different_sides_are_said_to(opened, tmp_path):
    for scale in (1.0, 10.0):
        odd(tmp_path / "runs" / f"{scale:g}", scale=scale)
    page = opened(write_report(tmp_path / "runs", tmp_path / "sides.html"))
    page.choose("target-metric", "misses")
    page.choose("target-value", "20")
    assert page.run("document.querySelector('#target-table caption').textContent").endswith("misses is at or beyond 20")


@pytest.mark.slow
def test_a_value_that_nobody_named_is_reached_as_the_page_says(opened, tmp_path):
    for scale in (1.0, 2.0):
        odd(tmp_path / "runs" / f"{scale:g}", scale=scale)
    both = [
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("1", "2")
    ]
    pages = {
        1: opened(write_report(tmp_path / "runs" / "1", tmp_path / "one.html")),
        2: opened(write_report(tmp_path / "runs", tmp_path / "two.html")),
    }
    every = {
        (1, "still"),
        (1, "late"),
        *itertools.product(
            (1, 2), ("a_loss", "residual", "score", "misses", "test_accuracy", "upper_loss", "lower_gradient")
        ),
    }
    for many, page in pages.items():
        for metric in (
            "still",
            "late",
            "a_loss",
            "residual",
            "score",
            "misses",
            "test_accuracy",
            "upper_loss",
            "lower_gradient",
        ):
            page.choose("target-metric", metric)
            value = float(page.run("document.getElementById('target-value').value"))
            there = [Target(metric, value).reached(rows) is not None for rows in both[:many]]
            assert [row[1] for row in cells(page, "#target-table")] == there
            note = page.run("document.getElementById('target-note').textContent")
            assert note.startswith("No target was given: ")
            assert all(there) == ((many, metric) in every), (metric, value)
            assert ("every run reaches this value." in note) == all(there)
            assert (f"{sum(there)} of {many} runs reach this value, and no value is reached by every run" in note) == (
                not all(there)
            )
    page = pages[1]
    page.choose("target-metric", "still")
    assert page.run("document.getElementById('target-value').value") == "7.5113"
    page.choose("target-metric", "test_accuracy")
    page.choose("target-value", "0.4")
    assert page.run("document.getElementById('target-note').hidden")


def test_a_figure_that_was_never_measured_has_no_target(opened, tmp_path):
    """A run of no iterations, whose figures do not move, and one where a figure is infinite all
    along.
    """
    rows = rows_of(0, 1, endless=lambda i: float("inf"), upper_loss=lambda i: 7.5113)
    page = opened(
        write_report(write_run(tmp_path / "run", rows=rows, whole=False, iterations=0), tmp_path / "page.html")
    )
    page.choose("target-metric", "upper_loss")
    assert page.run(
        "[document.getElementById('target-value').value, document.getElementById('target-note').textContent]"
    ) == ["7.512", "No target was given: every run reaches this value. Type another value."]
    assert cells(page, "#target-table")[0][1] == 1
    page.choose("target-metric", "test_accuracy")
    assert cells(page, "#target-table")[0][1] == 1
    page.choose("target-metric", "endless")
    assert page.run("document.getElementById('target-table').textContent") == "Type the value to reach."
    assert page.run("document.getElementById('target-note').hidden")
