"""The leaderboard shows the records: every cell, its links, its order in a browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import tomllib

import pytest

from fedbilevel.studies import budgets
from fedbilevel.studies.experiment import known, read
from fedbilevel.studies.verdicts import half_width
from support.browser import browser
from support.browser.pages import NEEDS_BROWSER
from website import leaderboard

COLUMNS = list(leaderboard.HEADINGS)


@pytest.fixture(scope="module")
def page():
    return leaderboard.page()


def lines(page):
    """Return the cells of every line of the page as pairs (text, number), and the links of the line."""
    found = []
    for line in re.findall(r"<tr>(<td.*?)</tr>", page):
        cells = re.findall(r'<td(?: data-value="([^"]*)")?>(.*?)</td>', line)
        texts = [
            (html.unescape(re.sub(r"<[^>]*>", "", text)), float(value) if value else None) for value, text in cells
        ]
        found.append((dict(zip(COLUMNS, texts, strict=True)), set(re.findall(r'href="([^"]*)"', line))))
    return found


def test_every_recorded_row_has_a_line_with_the_recorded_numbers(page):
    shown = {next(iter(links)).removeprefix("runs/"): cells for cells, links in lines(page)}
    num = 0
    for path in known().values():
        records = tomllib.loads(path.read_text()).get("result", {})  # without the code that the page uses
        for panel, rows in records.items():
            for row, record in rows.items():
                cells = shown[f"{path.parent.name}.html#{panel}--{row}"]
                num += 1
                assert cells["repetitions"] == (str(record["repetitions"]), record["repetitions"])
                figures = record["figures"]
                for cost in ("rounds", "megabytes"):
                    expected = figures.get(cost)
                    assert cells[f"all_{cost}"][1] == (None if expected is None else expected["mean"])
                    if f"{cost}_to_target" in figures and not cells["target"][0].endswith("from curves"):
                        assert cells[cost][1] == figures[f"{cost}_to_target"]["mean"]
                if "gradients_to_target" in figures:
                    both = figures["gradients_to_target"]["mean"] + figures["products_to_target"]["mean"]
                    assert cells["calls"][1] == pytest.approx(both)
                if "test_accuracy" in figures and cells["figure"][0] == "final accuracy, %":
                    one = figures["test_accuracy"]
                    assert cells["final"][1] == one["mean"]
                    half = half_width(one["deviation"], one["runs"])
                    assert (f" ± {100 * half:.2g}" in cells["final"][0]) == (one["runs"] > 1)
    assert num == len(shown) == len(lines(page)) > 600


def test_every_number_links_to_its_settings_on_a_page_that_has_them(page):
    pages = leaderboard.pages()
    for cells, links in lines(page):
        [link] = links
        name, place = re.fullmatch(r"runs/([^#]+)\.html#(.+)", link).groups()
        text = pages[f"results/runs/{name}.md"]
        assert f'<a id="{place}"></a>' in text
        panel, row = place.split("--")
        assert f"--panels {panel} --rows {row} --repetitions {cells['repetitions'][0]}`" in text


def test_settings_on_a_page_are_those_of_the_row():
    one = read("aggitd-table2")
    text = leaderboard.run_page(one)
    after = text.split('<a id="shards--adasimfbo"></a>', 1)[1]
    block = re.search(r"```toml\n(.*?)```", after, re.DOTALL)[1]
    assert tomllib.loads(block) == {"study": "optimise", **one.settings("shards", "adasimfbo")}


def test_tuning_comes_from_the_search_or_says_that_there_was_none():
    table = read("aggitd-table2")
    entry = table.content["tuned"]["shards"]["aggitd-tau5"]
    budget = f"{entry['trials']} trials, {entry['rounds']} rounds"
    assert budgets.tuning(table, "shards", "aggitd-tau5") == budget
    assert budgets.tuning(table, "iid", "aggitd-tau5") == budget  # one search for both panels
    assert "100 trials" in budgets.tuning(table, "shards", "adasimfbo")
    assert budgets.tuning(read("aggitd-figure2"), "shards", "aggitd-tau5") == budget  # extends the table
    assert budgets.tuning(read("adafbio-comparison"), "representation", "fedbio") == budgets.tuning(
        table, "shards", "fedbio"
    )
    assert budgets.tuning(read("fedbioacc-figure1"), "rho04", "fedbio") == budgets.UNTUNED


def test_a_target_from_curves_is_what_three_quarters_of_the_rows_reach():
    line = lambda *values: [{"rounds": 10 * i, "a": value} for i, value in enumerate(values)]
    lines = {"p": [line(0.1, 0.9)], "q": [line(0.1, 0.7)], "r": [line(0.2, 0.5, 0.8)], "s": [line(0.1, 0.3)]}
    assert leaderboard.common_target(lines, "a") == 0.7
    assert leaderboard.first_at(lines["r"][0], "a", 0.7) == 20
    assert leaderboard.first_at(lines["s"][0], "a", 0.7) is None


def test_a_single_repetition_has_no_interval_and_a_diverged_row_no_value():
    one = read("aggitd-table2")
    entry = one.content["result"]["shards"]["fedbio"]
    accuracy = {"mean": 0.9, "deviation": 0.01, "runs": 3}
    records = {
        "fedbio": {**entry, "repetitions": 3, "figures": {"test_accuracy": accuracy}},
        "penalty": {**entry, "figures": {"test_accuracy": {"mean": 0.9, "deviation": 0.0, "runs": 1}}},
        "lfednest": {**entry, "figures": {"diverged": {"mean": 1.0, "deviation": 0.0, "runs": 1}}},
    }
    changed = dataclasses.replace(one, content={**one.content, "result": {"shards": records}})
    found = {entry.row: entry.cells["final"].text for entry in leaderboard.entries([changed])}
    assert found == {"fedbio": "90 ± 2.5", "penalty": "90", "lfednest": "diverged"}  # 4.303 * 0.01 / sqrt(3)


@pytest.mark.wait
@NEEDS_BROWSER
def test_headings_sort_and_the_task_filters_from_a_file(page, tmp_path):
    (tmp_path / "board.html").write_text("<meta charset=utf-8>" + page.split("---", 2)[2])
    order = json.dumps([leaderboard.HEADINGS[name] for name in COLUMNS].index("its value"))
    seen = (
        "[...document.querySelectorAll('#board tbody tr')].filter(r => !r.hidden)"
        f".map(r => [r.cells[0].textContent, r.cells[3].dataset.value, r.cells[{order}].dataset.value])"
    )
    program = browser.Browser(browser.find(), tmp_path / "profile")
    try:
        sheet = program.page()
        sheet.open((tmp_path / "board.html").as_uri())
        first = sheet.run(seen)
        assert {one[0] for one in first} == {leaderboard.FIRST}
        rounds = [float(one[1]) for one in first if one[1] is not None]
        assert rounds == sorted(rounds)
        assert len(rounds) > 10
        sheet.run(f"document.querySelectorAll('#board th button')[{order}].click()")
        sheet.run(f"document.querySelectorAll('#board th button')[{order}].click()")
        finals = [float(one[2]) for one in sheet.run(seen) if one[2] is not None]
        assert finals == sorted(finals, reverse=True)
        assert len(finals) > 10
        sheet.run(
            "(() => { const s = document.getElementById('board-task'); s.value = ''; "
            "s.dispatchEvent(new Event('change')); })()"
        )
        assert len(sheet.run(seen)) == len(lines(page))
        assert not sheet.complaints
    finally:
        program.close()
