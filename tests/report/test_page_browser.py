"""The page in a headless Chromium: it opens without a complaint and without a request, its switches work, and its numbers are those of the record."""

import contextlib
import itertools
import json
import math
import os
import statistics
import threading
import time

import pytest
from test_page import hostile

from fedbilevel.report import write_report
from fedbilevel.report.watch import Live, Watch
from fedbilevel.studies.compare import Target, costs
from support.browser import browser
from support.browser.records import (
    CLIENTS,
    FINDINGS,
    HOSTILE,
    phases_of,
    rows_of,
    write_comparison,
    write_influence,
    write_personalisation,
    write_run,
)

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
COSTS = ("rounds", "megabytes", "gradients", "products", "seconds")
AXES = ("iteration", "rounds", "megabytes", "calls", "seconds")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    made = browser.Browser(PROGRAM, tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two seeds of fedbio, whose seconds differ, and one of fedavg, in one page; and a page of each study."""
    place = tmp_path_factory.mktemp("records")
    for name, seed in (("fedbio", 0), ("fedbio", 1), ("fedavg", 5)):
        write_run(place / "runs" / f"{name}-{seed}", name, seed)
    write_comparison(place / "comparison")
    write_influence(place / "influence")
    write_personalisation(place / "personalisation")
    return {
        folder.name: write_report(folder, place / f"{folder.name}.html")
        for folder in sorted(place.iterdir())
        if folder.is_dir()
    }


@pytest.fixture(scope="module")
def tabs(chromium):
    """Opening takes a second or two, so tests share tabs, and every test sets the switches that it needs."""
    return {}


@pytest.fixture
def opened(chromium, reports, tabs):
    """Opens a page once; after every test nothing may have gone wrong in it, and nothing been asked for."""
    used = []

    def look(name, scheme="light"):
        place = reports[name] if isinstance(name, str) else name
        if (place, scheme) not in tabs:
            tabs[place, scheme] = chromium.page(scheme=scheme).open(place.as_uri())
        tabs[place, scheme].send("Page.bringToFront")  # a tab that nobody sees is not laid out anew
        used.append((tabs[place, scheme], place.as_uri()))
        return used[-1][0]

    yield look
    for page, address in used:
        page.run("new Promise(done => setTimeout(done, 20))")
        assert page.complaints == []
        assert page.requests == [address]


def traces(page, plot, **meta):
    """What a plot shows: the traces with these marks."""
    got = page.run(
        f"document.getElementById('{plot}').data.map(t => ({{x: Array.from(t.x), y: Array.from(t.y), meta: t.meta, type: t.type, name: t.name}}))"
    )
    return [one for one in got if all(one["meta"].get(key) == value for key, value in meta.items())]


def cells(page, selector):
    """Rows of a table: the exact value of every cell that has one, else its text."""
    rows = f"[...document.querySelectorAll({json.dumps(selector + ' tbody tr')})].map(r => [...r.children])"
    return page.run(
        f"{rows}.map(r => r.map(c => c.dataset.value === undefined ? c.textContent : Number(c.dataset.value)))"
    )


def against(rows, axis):
    return [
        sum(row[name] for name in ("gy", "gx", "fx", "fy", "hvp", "jvp")) if axis == "calls" else row[axis]
        for row in rows
    ]


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


def spread(values):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


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
        "[...document.querySelectorAll('#target-table tbody tr:first-child td[data-deviation]')].map(c => Number(c.dataset.deviation))"
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
    """A run with figures that are empty, infinite, still, or begin on the side where they should end."""
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
            assert (f"{sum(there)} of {many} runs reach this value, and no value is reached by every run" in note) == (not all(there))
    page = pages[1]
    page.choose("target-metric", "still")
    assert page.run("document.getElementById('target-value').value") == "7.5113"
    page.choose("target-metric", "test_accuracy")
    page.choose("target-value", "0.4")
    assert page.run("document.getElementById('target-note').hidden")


def test_a_figure_that_was_never_measured_has_no_target(opened, tmp_path):
    """A run of no iterations, whose figures do not move, and one where a figure is infinite all along."""
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
        "[...document.querySelectorAll('.card .why')].map(e => [e.textContent, e.closest('.card').querySelector('h3').textContent])"
    ) == [["Diverged: too long", "fedavg (1 of 3 diverged)"]]


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
            f"[...document.querySelectorAll('#{plot} .ytick text')].map(t => [t.getBoundingClientRect().top, t.getBoundingClientRect().bottom])"
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


def wide(folder):
    """Runs with more figures than a window is wide."""
    figures = {
        f"{one}_{other}": (lambda i: 0.1 * i)
        for one in ("macro", "balanced", "fairness", "personal")
        for other in ("accuracy", "precision", "recall")
    }
    for seed in (0, 1):
        write_run(folder / f"{seed}", "adasimfbo", seed, rows=rows_of(seed, **figures), whole=False)
    return folder


def test_a_table_that_goes_on_behind_its_edge_is_shaded_there(opened, tmp_path):
    page = opened(write_report(wide(tmp_path / "runs"), tmp_path / "wide.html"))
    page.size(1200, 900)
    box = "document.getElementById('finals-table')"
    assert page.run(f"{box}.scrollWidth > {box}.clientWidth")

    def shades():
        """How far the colours at the edges are from the one in the middle, on a line below the words."""
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        place = page.run(
            f"(() => {{ const r = {box}.getBoundingClientRect(); return [r.left + scrollX, r.bottom + scrollY - 4, r.width]; }})()"
        )
        clip = {**dict(zip(("x", "y", "width"), place, strict=True)), "height": 1, "scale": 1}
        picture = page.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        draw = "const g = c.getContext('2d', {willReadFrequently: true}); g.drawImage(i, 0, 0);"
        made = f"const i = new Image(); i.src = 'data:image/png;base64,{picture}'; await i.decode(); const c = document.createElement('canvas');"
        at = "[5, i.width >> 1, i.width - 6].map(x => [...g.getImageData(x, 0, 1, 1).data])"
        left, middle, right = page.run(
            f"(async () => {{ {made} c.width = i.width; c.height = 1; {draw} return {at}; }})()"
        )
        return [sum(abs(a - b) for a, b in zip(edge, middle, strict=True)) for edge in (left, right)]

    for _ in ("light", "dark"):
        left, right = shades()
        assert (left < 6, right > 60) == (True, True), (left, right)
        page.run(f"{box}.scrollLeft = {box}.scrollWidth")
        left, right = shades()
        assert (left > 60, right < 6) == (True, True), (left, right)
        page.run(f"{box}.scrollLeft = 0")
        page.press("#theme")
    page.size(1100, 900)


def test_paper_holds_whole_tables_and_whole_words(opened, tmp_path):
    page = opened(write_report(wide(tmp_path / "runs"), tmp_path / "wide.html"))
    page.size(688, 1000)  # as wide as a sheet between its margins
    page.send("Emulation.setEmulatedMedia", media="print", features=[])
    heads = "[...document.querySelectorAll('#finals-table thead th')].map(e => e.textContent)"
    before = page.run(heads)
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert (
        page.run(
            "[...document.querySelectorAll('table')].filter(t => t.offsetParent).map(t => t.offsetWidth).filter(w => w > 688)"
        )
        == []
    )
    assert [name for name in page.run(heads) if name not in ("curve", "runs")] == before[2:]
    assert page.run("document.querySelectorAll('#finals-table table').length") > 1
    rows = "(() => { const r = document.createRange(); return [...document.querySelectorAll('tbody th')].map(e => (r.selectNodeContents(e), [e.textContent, "
    heights = page.run(rows + "new Set([...r.getClientRects()].map(c => Math.round(c.bottom / 6))).size])); })()")
    assert {lines for text, lines in heights if text.endswith("adasimfbo")} == {1}
    page.run("window.dispatchEvent(new Event('afterprint'))")
    assert page.run(heads) == before
    page.send("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "light"}])
    page.size(1100, 900)


def test_the_hypergradient_is_explained(opened, tmp_path):
    rows = rows_of(0, hypergradient=lambda i: None if i == 2 else 1.0 / (i + 1))
    page = opened(write_report(write_run(tmp_path / "run", rows=rows, whole=False), tmp_path / "page.html"))
    note = page.run("document.getElementById('diagnostics-note').textContent")
    assert "y is solved to y*(x)" in note
    assert "Zero where x is stationary." in note
    assert "not strongly convex" in note
    [line] = traces(page, "diagnostics-hypergradient", part="mean")
    assert line["x"] == [row["rounds"] for row in rows if row["iteration"] != 10]


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
        "Object.fromEntries([...document.querySelectorAll('td[data-value]')].map(c => [c.dataset.value, c.textContent.split(' ±')[0]]))"
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
        "[...document.querySelectorAll('#findings .plot')].map(d => d.data.map(t => [t.name, Array.from(t.x), Array.from(t.y)]))"
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


def test_hostile_words_stay_words(opened, tmp_path):
    page = opened(write_report(hostile(tmp_path), tmp_path / "hostile.html"))
    assert page.run("document.title") == page.run("document.getElementById('title').textContent") == HOSTILE
    assert page.run("document.querySelectorAll('main img, main b, main a, main script').length") == 0
    page.choose("metric", HOSTILE)
    assert page.run("document.querySelector('.card h3').textContent") == HOSTILE
    assert HOSTILE in page.run("document.querySelector('#curves-plot .ytitle').textContent")  # as it is, not as markup
    assert HOSTILE in page.run("document.querySelector('#ledger-plot').textContent")
    assert page.run("document.querySelector('#configurations pre').textContent") == HOSTILE
    page.run("document.title = 'mine'")
    assert page.run("new Promise(done => setTimeout(() => done(document.title), 100))") == "mine"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_reader_and_the_switch(opened, scheme):
    page = opened("runs", scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('curves-plot').layout.font.color"
    colours = {"light": ("rgb(255, 255, 255)", "#16191d"), "dark": ("rgb(20, 23, 27)", "#e9ecef")}
    other = "dark" if scheme == "light" else "light"
    assert (page.run(ground), page.run(ink)) == colours[scheme]
    assert page.run("document.getElementById('theme-name').textContent").lower() == other
    page.press("#theme")
    assert (page.run(ground), page.run(ink)) == colours[other]
    page.press("#theme")
    assert (page.run(ground), page.run(ink)) == colours[scheme]


@pytest.mark.parametrize("name", ["runs", "comparison", "influence", "personalisation"])
def test_a_phone_needs_no_scrolling_sideways(opened, name):
    page = opened(name)
    page.size(380, 800)
    page.until(
        "[...document.querySelectorAll('.main-svg')].every(e => e.getBoundingClientRect().right < 381)"
    )  # plots follow a moment later
    assert page.run("[document.documentElement.scrollWidth, document.body.scrollWidth].every(w => w <= 380)")
    beyond = "e.getBoundingClientRect().right > 381 && !e.closest('.box, pre, svg')"
    assert (
        page.run(
            f"[...document.querySelectorAll('main *')].filter(e => {beyond}).map(e => e.tagName + '.' + e.className)"
        )
        == []
    )
    assert page.run(
        "[...document.querySelectorAll('.box')].some(b => b.scrollWidth > b.clientWidth)"
    )  # tables do, within their box
    page.size(1100, 900)


def test_the_page_prints(opened):
    page = opened("runs", "dark")
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("[...document.querySelectorAll('.controls, button')].every(e => e.offsetParent === null)")
    assert page.run("getComputedStyle(document.querySelector('#curves-plot .xtick text')).fill") == "rgb(34, 34, 34)"
    pdf = page.printed()
    assert pdf[:5] == b"%PDF-"
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/") + pdf.count(b"/Type/Page/") >= 2
    page.until(
        "[...document.querySelectorAll('.js-plotly-plot')].every(d => d.offsetParent === null || d.layout.autosize)"
    )  # as wide as the window again


def test_everything_has_a_name_for_those_who_cannot_see_it(opened):
    page = opened("runs")
    assert page.run("document.querySelectorAll('h1').length") == 1
    assert (
        page.run("[...document.querySelectorAll('table')].filter(t => !t.caption || !t.caption.textContent).length")
        == 0
    )
    assert page.run("[...document.querySelectorAll('select, input')].filter(e => !e.closest('label')).length") == 0
    assert (
        page.run(
            "[...document.querySelectorAll('[role=img]')].filter(e => e.offsetParent !== null && !e.getAttribute('aria-label')).map(e => e.id)"
        )
        == []
    )
    assert page.run("[...document.querySelectorAll('thead th:not([scope]), tbody th:not([scope])')].length") == 0


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
        "document.getElementById('partition').hidden && document.getElementById('ledger').hidden && document.getElementById('studies').hidden"
    )
    missing = set(range(10)) - {trace["meta"]["curve"] for trace in traces(page, "diagnostics-residual", part="mean")}
    assert missing == {3}  # a method that has no such figure has no line
    assert (
        page.run("document.querySelectorAll('#findings-list .finding').length") == 2
    )  # the run that has most to show comes first


@contextlib.contextmanager
def serving(folder):
    with Watch(Live([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_watch_redraws_and_keeps_the_switches(chromium, tmp_path):
    folder = write_run(tmp_path / "run", iterations=35, rows=rows_of(0))
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        assert "outer iteration 25 of 35" in page.run("document.getElementById('status').textContent")
        page.press("#axis input[value=calls]")
        page.choose("metric", "f1")
        page.choose("log", True)
        page.choose("target-value", "0.25")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows_of(0, 8)[6:]))
        page.until("document.getElementById('status').textContent === 'The run has finished.'", 10)
        [line] = traces(page, "curves-plot", part="mean")
        assert (line["x"], line["y"]) == (against(rows_of(0, 8), "calls"), [row["f1"] for row in rows_of(0, 8)])
        values = "[...document.querySelectorAll('#axis input:checked, #metric, #target-value')].map(e => e.value)"
        assert page.run(f"[...{values}, document.getElementById('log').checked]") == ["f1", "calls", "0.25", True]
        assert page.complaints == []
        assert set(page.requests) == {server.address, f"{server.address}data.json"}
        page.close()


def test_watch_shows_a_run_before_its_first_measurement_and_says_when_it_is_gone(chromium, tmp_path):
    folder = write_run(tmp_path / "run", rows=[], whole=False)
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        assert "No measurement yet" in page.run("document.getElementById('status').textContent")
        assert page.complaints == []
    page.until(
        "document.getElementById('status').textContent.startsWith('The connection to fedbilevel watch is lost')", 10
    )
    page.close()


def test_watch_says_since_when_nothing_new_has_come(chromium, tmp_path):
    folder = write_run(tmp_path / "run", iterations=35, rows=rows_of(0))
    for name in ("config.json", "metrics.jsonl", "ledger.json"):
        os.utime(folder / name, (time.time() - 605,) * 2)
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        text = "document.getElementById('status').textContent"
        assert (
            f" Nothing new for 10 min: it computes, or its process has ended (then: fedbilevel resume {folder})."
            in page.run(text)
        )
        os.utime(folder / "ledger.json")  # another checkpoint
        page.until(f"!{text}.includes('Nothing new')", 10)
        assert "outer iteration 25 of 35" in page.run(text)
        assert page.complaints == []
        page.close()


def test_watch_judges_every_run_by_itself_and_advises_what_can_be_done(chromium, tmp_path):
    for name, config in {"alive": {}, "dead": {}, "site": {"engine": "federation"}, "python": {"task": None}}.items():
        folder = write_run(tmp_path / "runs" / name, name, iterations=35, whole=False)
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, **config}))
        if name != "alive":
            for file in ("config.json", "metrics.jsonl"):
                os.utime(folder / file, (time.time() - 305,) * 2)
    with serving(tmp_path / "runs") as server:
        page = chromium.page().open(server.address)
        said = page.run("document.getElementById('status').textContent")
        assert said.count("Nothing new") == 3
        assert "from alive" not in said
        heads = page.run("[...document.querySelectorAll('.card h3')].map(e => e.textContent)")
        names = {name: next(head for head in heads if name in head) for name in ("dead", "site", "python")}
        end = "for 5 min: it computes, or its process has ended"
        assert f"Nothing new from {names['dead']} {end} (then: fedbilevel resume {tmp_path / 'runs' / 'dead'})." in said
        for name in ("site", "python"):
            assert f"Nothing new from {names[name]} {end}." in said
        assert page.complaints == []
        page.close()


def test_watch_shows_that_a_run_failed(chromium, tmp_path):
    folder = write_run(tmp_path / "run", iterations=35)
    with serving(folder) as server:
        page = chromium.page().open(server.address)
        assert (
            page.run("document.querySelector('.card .of').textContent") == "last test accuracy"
        )  # there may be a later one
        (folder / "end.json").write_text(
            json.dumps({"stopped": "failed", "iteration": 28, "why": "a step was too long."})
        )
        page.until(
            "document.getElementById('status').textContent === 'Failed after outer iteration 28 of 35: a step was too long.'",
            10,
        )
        assert page.complaints == []
        page.close()


def test_the_browser_itself_forbids_every_request(chromium, tabs, reports):
    page = tabs.pop((reports["comparison"], "light"), None) or chromium.page().open(
        reports["comparison"].as_uri()
    )  # the last to use that tab
    assert page.run("fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')") == "refused"
    image = "const i = new Image(); i.onload = () => done('asked'); i.onerror = () => done('refused'); i.src = 'http://127.0.0.1:9/a.png';"
    assert page.run(f"new Promise(done => {{ {image} }})") == "refused"
    page.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.owned = true'; document.body.append(s); })()"
    )
    assert page.run("window.owned") is None
    said = [
        entry["entry"]["text"]
        for entry in page.complaints
        if "Content Security Policy" in entry.get("entry", {}).get("text", "")
    ]
    for directive in ("connect-src", "img-src", "script-src"):
        assert any(f'directive: "{directive}' in one or f"directive '{directive}" in one for one in said), said
    page.close()
