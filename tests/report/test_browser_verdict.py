"""The page in a browser: the best run, tasks kept apart, explanations, exports and box plots."""

import csv
import json
import statistics
import struct

import pytest

from fedbilevel.columns import TERMS
from fedbilevel.report import write_report
from support.browser.pages import NEEDS_BROWSER, cells, traces
from support.browser.records import HOSTILE, rows_of, write_comparison, write_run

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]
VERDICT = "document.getElementById('verdict').textContent"


def runs(folder, values, metric="test_accuracy", **more):
    """One run per value of the last measurement: {algorithm: [values by seed]}."""
    for name, finals in values.items():
        for seed, value in enumerate(finals):
            rows = rows_of(0, **{metric: lambda i, value=value: value * (i + 1) / 6})
            write_run(folder / f"{name}-{seed}", name, seed, rows=rows, whole=False, **more)
    return folder


def verdict(opened, tmp_path, values, metric="test_accuracy"):
    page = opened(write_report(runs(tmp_path / "runs", values, metric), tmp_path / "page.html"))
    page.choose("metric", metric)
    return page, page.run(VERDICT)


def test_a_difference_beyond_the_spread_names_the_best_run(opened, tmp_path):
    page, said = verdict(opened, tmp_path, {"fedavg": [0.70, 0.71, 0.72], "fedbio": [0.80, 0.82, 0.81]})
    assert said == (
        "Best final test accuracy: fedbio with 0.8100 ± 0.010 (3 seeds), 0.10 (14 %) above fedavg with 0.7100 ± 0.010 "
        "(3 seeds). The difference exceeds the spread: the ranges mean ± standard deviation do not overlap."
    )
    assert float(page.run("document.getElementById('verdict').dataset.gap")) == pytest.approx(0.1)


def test_a_difference_within_the_spread_is_said_to_show_nothing(opened, tmp_path):
    _, said = verdict(opened, tmp_path, {"fedavg": [0.70, 0.80], "fedbio": [0.72, 0.82]})
    assert "fedbio with 0.7700 ± 0.071 (2 seeds), 0.020 (2.7 %) above fedavg" in said
    assert said.endswith("overlap, so these seeds do not show which is better.")


def test_a_falling_figure_is_best_where_it_is_lowest(opened, tmp_path):
    _, said = verdict(opened, tmp_path, {"a": [2.0], "b": [1.0], "c": [3.0]}, "upper_loss")
    assert said.startswith(
        "Best final upper loss: b with 1 (1 run), 1 (50 %) below a with 2 (1 run). Each has one seed"
    )


def test_one_seed_against_several_leaves_its_spread_unknown(opened, tmp_path):
    _, said = verdict(opened, tmp_path, {"a": [0.5, 0.6], "b": [0.9]})
    assert said.endswith("b has one seed, so its spread is unknown.")


@pytest.mark.slow
def test_equal_runs_and_single_runs_and_unknown_directions_name_no_best(opened, tmp_path):
    _, said = verdict(opened, tmp_path / "equal", {"a": [0.5], "b": [0.5]})
    assert said == "Equal in final test accuracy: a and b, 0.5000 (1 run)."
    _, said = verdict(opened, tmp_path / "one", {"a": [0.5, 0.7]})
    assert said == "a: final test accuracy 0.6000 ± 0.14 (2 seeds)."
    _, said = verdict(opened, tmp_path / "unknown", {"a": [5.0], "b": [7.0]}, "flagged")
    assert said == "No direction of flagged is known to be better. Highest: b, 7 (1 run). Lowest: a, 5 (1 run)."


def test_unequal_costs_and_lost_runs_are_named_beside_the_best(opened, reports, tmp_path):
    write_run(tmp_path / "runs" / "short", "short", rows=rows_of(0)[:3], whole=False)
    write_run(tmp_path / "runs" / "long", "long", whole=False)
    said = opened(write_report(tmp_path / "runs", tmp_path / "costs.html")).run(VERDICT)
    assert said.startswith("Best latest test accuracy: long")  # the short run has not reached its planned end
    assert said.endswith("They took 35 and 14 rounds.")
    assert "fedavg (1 of 3 diverged)" in opened("comparison").run(VERDICT)


def test_the_sentence_is_that_of_the_final_table(opened, reports):
    page = opened("comparison")
    page.choose("metric", "test_accuracy")
    finals = {row[0].split("\u00a0")[-1]: row[2] for row in cells(page, "#finals-table")}
    gap = abs(finals["fedbio"] - finals["fedavg (1 of 3 diverged)"])
    assert float(page.run("document.getElementById('verdict').dataset.gap")) == pytest.approx(gap)


# ---- tasks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """Two tasks, of which the first has two settings: three groups."""
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"a{seed}", "fedbio", seed)
    write_run(tmp_path / "runs" / "b", "fedavg")
    other = write_run(tmp_path / "runs" / "c", "fedbio", whole=False)
    config = json.loads((other / "config.json").read_text())
    config["task_settings"]["noise"] = 0.2
    (other / "config.json").write_text(json.dumps(config))
    own = rows_of(3, balanced=lambda i: 0.1 * i)
    write_run(tmp_path / "runs" / "d", "fedbio", 3, task="imbalance", rows=own, whole=False)
    return write_report(tmp_path / "runs", tmp_path / "mixed.html")


def test_runs_of_different_tasks_share_no_chart_unless_chosen(opened, mixed):
    page = opened(mixed)
    names = page.run("[...document.getElementById('task').options].map(o => o.textContent)")
    assert names == ["data cleaning (noise 0.4)", "data cleaning (noise 0.2)", "imbalance", "all tasks together"]
    note = "document.getElementById('tasks-note').textContent"
    drawn = lambda: [trace["name"] for trace in traces(page, "curves-plot", part="mean")]
    assert drawn() == ["fedbio", "fedavg"]
    assert "runs of 3 tasks" in page.run(note)
    assert "data cleaning (noise 0.4), 3 runs of 5" in page.run(note)
    for chosen, expected in (("1", rows_of(0)), ("2", rows_of(3))):
        page.choose("task", chosen)
        [line] = traces(page, "curves-plot", part="mean")
        assert (line["name"], line["y"]) == ("fedbio", [row["test_accuracy"] for row in expected])
        assert len(cells(page, "#finals-table")) == 1
    assert "balanced" in page.run("[...document.getElementById('metric').options].map(o => o.value)")
    page.choose("task", "0")
    assert "balanced" not in page.run("[...document.getElementById('metric').options].map(o => o.value)")


def test_tasks_that_are_mixed_by_choice_are_said_to_be(opened, mixed):
    page = opened(mixed)
    page.choose("task", "all")
    assert len(traces(page, "curves-plot", part="mean")) == 4
    assert page.run(VERDICT).startswith("Runs of different tasks are shown together, so none is called the best")
    assert "not comparable" in page.run("document.getElementById('curves-note').textContent")
    assert "not comparable" in page.run("document.getElementById('tasks-note').textContent")
    page.choose("task", "0")


def test_pages_of_one_task_have_no_choice(opened):
    assert opened("runs").run("document.getElementById('tasks').hidden")


# ---- explanations ---------------------------------------------------------------------------------------------------

TIP = "(() => { const t = document.getElementById('tip'); return t.hidden ? null : t.textContent; })()"


def test_terms_are_explained_under_the_mouse(opened):
    page = opened("runs")
    over = "document.querySelector({}).dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))"
    for selector, term in (
        ("#costs-table thead th:nth-child(6) .term", "products"),
        ("#curves .under .term:last-of-type", "rounds"),
        ("#curves-plot .xtitle", "rounds"),
        ("#curves-plot .ytitle", "test_accuracy"),
        ("#finals-table thead th:last-child .term", "lower_gradient"),
    ):
        page.choose("metric", "test_accuracy")
        page.press("#axis input[value=rounds]")
        page.run(over.format(json.dumps(selector)))
        assert page.run(TIP) == TERMS[term], selector
        page.run(over.format("'h1'"))
        assert page.run(TIP) is None


def test_terms_are_explained_by_the_keyboard_and_closed_by_escape(opened):
    page = opened("runs")
    page.send("Emulation.setFocusEmulationEnabled", enabled=True)
    page.run("document.querySelector('#verdict .term').focus()")
    assert page.run(TIP) == TERMS["test_accuracy"]
    assert page.run("document.activeElement.getAttribute('aria-describedby')") == "tip"
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape")
    assert page.run(TIP) is None
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert page.run("document.activeElement.matches('.card .term')")
    assert page.run(TIP) == TERMS["f1"]
    page.run("document.activeElement.blur()")
    assert page.run(TIP) is None


def test_a_tip_stays_inside_a_narrow_window(opened):
    page = opened("runs")
    page.size(380, 800)
    page.run("document.querySelectorAll('#costs-table .term').forEach(t => t.scrollIntoView({inline: 'end'}))")
    place = page.run(
        "[...document.querySelectorAll('#costs-table .term')].map(t => { "
        "t.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})); "
        "const r = document.getElementById('tip').getBoundingClientRect(); return [r.left, r.right]; })"
    )
    assert all(left >= 0 and right <= 380 for left, right in place), place
    page.run("document.body.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
    page.size(1100, 900)


# ---- exports --------------------------------------------------------------------------------------------------------


def test_every_figure_and_every_table_has_its_buttons(opened):
    page = opened("runs")
    bars = "[...document.querySelectorAll({})].filter(e => e.offsetParent)"
    saves = ".every(e => [...e.nextElementSibling.querySelectorAll('.save')].map(b => b.textContent).join() === {})"
    for selector, kinds in (("'.js-plotly-plot'", "'PNG,SVG'"), ("'table'", "'CSV'")):
        assert page.run(f"{bars.format(selector)}.length") > 3
        assert page.run(bars.format(selector) + saves.format(kinds)), selector
    labels = page.run("[...document.querySelectorAll('.save')].map(b => b.getAttribute('aria-label'))")
    assert all(label.startswith("Save the ") for label in labels)


def test_figures_are_saved_as_png_and_svg(opened, downloads):
    page = opened("runs")
    page.choose("metric", "test_accuracy")
    page.press("#axis input[value=rounds]")
    saved = downloads(page)
    png = saved("#curves .under .save:first-child")
    assert (png.name, png.read_bytes()[:8]) == ("test-accuracy-by-communication-rounds.png", b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    seen = page.run("(() => { const d = document.getElementById('curves-plot'); return [d.clientWidth, 420]; })()")
    assert (width, height) == (2 * seen[0], 2 * seen[1])
    svg = saved("#curves .under .save:last-child").read_text()
    assert svg.startswith("<svg")
    assert ">communication rounds<" in svg
    assert ">fedavg<" in svg
    assert "<script" not in svg


def test_a_table_is_saved_as_csv_with_exact_values_and_deviations(opened, downloads):
    page = opened("runs")
    place = downloads(page)("#finals-table .save")
    assert place.name == "at-the-last-measurement-mean-standard-deviation-over-runs.csv"
    head, *body = csv.reader(place.read_text().splitlines())
    assert head[:4] == ["curve", "runs", "test accuracy", "test accuracy (standard deviation)"]
    two = [rows_of(seed)[-1]["test_accuracy"] for seed in (0, 1)]
    assert [row[0] for row in body] == ["fedavg", "fedbio"]
    assert body[1][1] == "2"
    assert [float(one) for one in body[1][2:4]] == pytest.approx([statistics.fmean(two), statistics.stdev(two)])
    assert body[0][2:4] == [repr(rows_of(5)[-1]["test_accuracy"]), ""]


def test_hostile_words_are_no_formulas_in_a_spreadsheet(opened, downloads, tmp_path):
    formula = '=HYPERLINK("http://127.0.0.1:9/","a,b")'
    for name, algorithm in (("a", formula), ("b", HOSTILE)):
        write_run(tmp_path / "runs" / name, algorithm, whole=False)
    page = opened(write_report(tmp_path / "runs", tmp_path / "formula.html"))
    assert page.run("document.querySelectorAll('main img, main b, main a').length") == 0
    assert HOSTILE in page.run(VERDICT)
    _, *body = csv.reader(downloads(page)("#costs-table .save").read_text().splitlines())
    assert [row[0] for row in body] == [f"'{formula}", HOSTILE]


def test_columns_named_as_parts_of_the_language_are_columns(opened, tmp_path):
    rows = rows_of(0, constructor=lambda i: float(i), toString=lambda i: 1.0)
    write_run(tmp_path / "runs" / "a", "a", rows=rows, whole=False)
    write_run(tmp_path / "runs" / "b", "b", whole=False)
    page = opened(write_report(tmp_path / "runs", tmp_path / "names.html"))
    page.choose("metric", "constructor")
    [line] = traces(page, "curves-plot", part="mean")
    assert line["y"] == [0, 1, 2, 3, 4, 5]


# ---- box plots ------------------------------------------------------------------------------------------------------


def test_three_seeds_have_a_box_and_fewer_have_dots(opened, tmp_path):
    values = {"a": [0.5, 0.6, 0.8], "b": [0.4, 0.45]}
    page = opened(write_report(runs(tmp_path / "runs", values), tmp_path / "page.html"))
    page.choose("metric", "test_accuracy")
    box, dots = traces(page, "seeds-plot")
    assert (box["type"], dots["type"]) == ("box", "scatter")
    assert [box["x"], dots["x"]] == [pytest.approx(values["a"]), pytest.approx(values["b"])]
    assert page.run("document.querySelectorAll('#seeds-plot .box').length") > 0
    page.choose("metric", "upper_loss")
    assert traces(page, "seeds-plot")[0]["x"] == [rows_of(0)[-1]["upper_loss"]] * 3


def test_a_diverged_seed_is_in_no_box(opened, tmp_path):
    page = opened(write_report(write_comparison(tmp_path / "c", repetitions=4), tmp_path / "page.html"))
    assert [len(trace["x"]) for trace in traces(page, "seeds-plot")] == [4, 3]


def test_two_seeds_have_no_section_of_their_own(opened):
    assert opened("runs").run("document.getElementById('seeds').hidden")
