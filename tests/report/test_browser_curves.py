"""Curves in a headless Chromium are those of the record."""

import itertools
import json
import statistics

import pytest

from fedbilevel.report import write_report
from support.browser.pages import AXES, NEEDS_BROWSER, against, traces
from support.browser.records import (
    FINDINGS,
    rows_of,
    write_run,
)

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]


@pytest.mark.slow
def test_the_curves_are_those_of_the_record_against_every_axis(opened):
    page = opened("runs")
    alone, two = rows_of(5), (rows_of(0), rows_of(1))
    page.choose("metric", "test_accuracy")
    for axis in AXES:
        page.press(f"#axis input[value={axis}]")
        [fedavg] = traces(page, "curves-plot", curve=0, part="mean")
        assert (fedavg["x"], fedavg["y"]) == (against(alone, axis), [row["test_accuracy"] for row in alone])
        assert page.run("document.querySelector('#curves-plot').layout.xaxis.title.text") == {
            "iteration": "outer iterations",
            "rounds": "communication rounds",
            "calls": "oracle calls",
        }.get(axis, axis)
    page.press("#axis input[value=iteration]")  # where both seeds were measured at the same places
    for metric in ("test_accuracy", "f1", "upper_loss"):
        page.choose("metric", metric)
        parts = {part: traces(page, "curves-plot", curve=1, part=part)[0]["y"] for part in ("mean", "low", "high")}
        pairs = list(zip(*([row[metric] for row in rows] for rows in two), strict=True))
        assert parts["mean"] == pytest.approx([statistics.fmean(pair) for pair in pairs], rel=1e-14)
        assert parts["low"] == [min(pair) for pair in pairs]
        assert parts["high"] == [max(pair) for pair in pairs]
        assert page.run("document.querySelector('.card:nth-child(2) .big').dataset.value") == repr(
            statistics.fmean(pairs[-1])
        )
    names = [trace["name"] for trace in traces(page, "curves-plot", part="mean")]
    assert names == ["fedavg", "fedbio"]


def test_seeds_that_were_measured_elsewhere_are_interpolated_as_far_as_all_go(opened):
    page = opened("runs")
    page.press("#axis input[value=seconds]")
    page.choose("metric", "test_accuracy")
    one, other = ([(row["seconds"], row["test_accuracy"]) for row in rows_of(seed)] for seed in (0, 1))
    end = min(one[-1][0], other[-1][0])
    grid = sorted({at for at, _ in one + other if at <= end})

    def value(line, at):
        for (x0, y0), (x1, y1) in itertools.pairwise(line):
            if x0 <= at <= x1:
                return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
        raise AssertionError(at)

    [mean], [low], [high] = (traces(page, "curves-plot", curve=1, part=part) for part in ("mean", "low", "high"))
    assert mean["x"] == grid
    assert len(grid) > len(one)
    for at, middle, least, most in zip(grid, mean["y"], low["y"], high["y"], strict=True):
        both = value(one, at), value(other, at)
        assert (middle, least, most) == (
            pytest.approx(statistics.fmean(both)),
            pytest.approx(min(both)),
            pytest.approx(max(both)),
        )


def test_the_logarithmic_switch_and_the_diagnostics(opened):
    page = opened("runs")
    page.press("#axis input[value=rounds]")
    kind = "document.getElementById('{}').layout.yaxis.type"
    assert page.run(kind.format("curves-plot")) == "linear"
    page.choose("log", True)
    assert page.run(kind.format("curves-plot")) == "log"
    page.press("#axis input[value=calls]")
    assert page.run(kind.format("curves-plot")) == "log"  # the other switch changes nothing
    page.choose("log", False)
    assert page.run(kind.format("curves-plot")) == "linear"
    for name in ("residual", "lower_gradient"):
        assert page.run(kind.format(f"diagnostics-{name}")) == "log"
        [fedavg] = traces(page, f"diagnostics-{name}", curve=0, part="mean")
        assert (fedavg["x"], fedavg["y"]) == (against(rows_of(5), "calls"), [row[name] for row in rows_of(5)])


def test_no_picture_is_wider_than_its_place(opened):
    page = opened("runs")
    wide = "p => p.querySelector('.main-svg').getBoundingClientRect().width - p.clientWidth"
    widths = page.run(f"[...document.querySelectorAll('.js-plotly-plot')].filter(p => p.offsetParent).map({wide})")
    assert len(widths) > 3
    assert max(widths) <= 1


MOVES = {
    "forty decades": lambda i: 10.0 ** (-8 * i),
    "twelve decades": lambda i: 3.0 * 10.0 ** (-2.4 * i),
    "three decades": lambda i: 7.0 * 10.0 ** (-0.6 * i),
    "two decades": lambda i: 4.0 * 10.0 ** (-0.4 * i),
    "one decade": lambda i: 9.5 * 10.0 ** (-0.2 * i),
    "most of a decade": lambda i: 0.00091 - 0.00016 * i,
    "a factor of eight": lambda i: 7.9 - 1.37 * i,
    "a factor of two": lambda i: 0.9 - 0.09 * i,
    "a hundredth": lambda i: 5.0 - 0.01 * i,
    "large": lambda i: 3e9 + 4e8 * i,
    "nothing": lambda i: 0.25,
}


def test_a_logarithmic_axis_has_some_labels_that_do_not_overlap(opened, tmp_path):
    rows = rows_of(0, **MOVES, residual=MOVES["forty decades"], lower_gradient=MOVES["a factor of eight"])
    page = opened(write_report(write_run(tmp_path / "run", rows=rows, whole=False), tmp_path / "page.html"))

    def check(plot, case):
        labels = page.run(
            f"[...document.querySelectorAll('#{plot} .ytick text')].map(t => [t.getBoundingClientRect().top, "
            "t.getBoundingClientRect().bottom])"
        )
        assert 3 <= len(labels) <= 9, case
        assert all(one[1] <= other[0] + 1 for one, other in itertools.pairwise(sorted(labels))), (case, labels)

    page.choose("log", True)
    for width in (1100, 380):
        page.size(width, 900)
        page.until(
            f"[...document.querySelectorAll('.main-svg')].every(e => e.getBoundingClientRect().right < {width} + 1)"
        )
        check("diagnostics-residual", "forty decades")
        check("diagnostics-lower_gradient", "a factor of eight")
        for case in MOVES:
            page.choose("metric", case)
            check("curves-plot", case)


def test_the_hypergradient_is_explained(opened, tmp_path):
    rows = rows_of(0, hypergradient=lambda i: None if i == 2 else 1.0 / (i + 1))
    page = opened(write_report(write_run(tmp_path / "run", rows=rows, whole=False), tmp_path / "page.html"))
    note = page.run("document.getElementById('diagnostics-note').textContent")
    assert "y is solved to y*(x)" in note
    assert "Zero where x is stationary." in note
    assert "not strongly convex" in note
    [line] = traces(page, "diagnostics-hypergradient", part="mean")
    assert line["x"] == [row["rounds"] for row in rows if row["iteration"] != 10]


def test_more_than_eight_curves_are_told_apart_by_dashes(opened, tmp_path):
    for i in range(10):
        write_run(tmp_path / "runs" / f"r{i}", "fedbio", lr_upper=float(i + 1), whole=False)
    without = [{name: value for name, value in row.items() if name != "residual"} for row in rows_of(0)]
    (tmp_path / "runs" / "r3" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    (tmp_path / "runs" / "r1" / "findings.json").write_text(json.dumps(FINDINGS[2:3]))
    (tmp_path / "runs" / "r2" / "findings.json").write_text(json.dumps(FINDINGS[2:]))
    page = opened(write_report(tmp_path / "runs", tmp_path / "many.html"))
    looks = page.run("document.getElementById('curves-plot').data.map(t => t.line.color + t.line.dash)")
    assert len(set(looks)) == 10
    assert page.run(
        "document.getElementById('partition').hidden && document.getElementById('ledger').hidden && "
        "document.getElementById('studies').hidden"
    )
    missing = set(range(10)) - {trace["meta"]["curve"] for trace in traces(page, "diagnostics-residual", part="mean")}
    assert missing == {3}  # a method that has no such figure has no line
    assert (
        page.run("document.querySelectorAll('#findings-list .finding').length") == 2
    )  # the run that has most to show comes first
