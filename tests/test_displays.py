"""Notebook displays: escaped HTML that says what the object says."""

from html.parser import HTMLParser

import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.federation.ledger import Ledger, Totals
from fedbilevel.runs.result import Ending, Result
from fedbilevel.tasks.quadratic import Quadratic
from support.browser.records import HOSTILE


class Page(HTMLParser):
    """The tags, and the text of every cell by row."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.titles, self.text, self.inside = [], [], [], "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.rows[-1][-1] += data


ALLOWED = {"div", "strong", "table", "caption", "thead", "tbody", "tr", "th", "td", "p", "span"}


def shown(one):
    page = Page(one._repr_html_())
    assert {*page.tags} <= ALLOWED
    return page


@pytest.fixture(scope="module")
def solved():
    problem, clients = Quadratic().build()
    return problem, fb.solve(problem, clients, "fedbio", num_rounds=3)


def test_a_problem_shows_its_variables_with_scopes_and_shapes(solved):
    page = shown(solved[0])
    assert ["x", "shared", "one x for all clients", "x", "4"] in page.rows
    assert ["y", "global", "one y for all clients", "y", "6"] in page.rows


def test_a_private_x_made_from_sizes_is_shown_without_a_shape():
    problem, _ = discovery.task("data_cleaning")(num_clients=2).build()
    assert any(row[:3] == ["x", "private", "an x of each client"] for row in shown(problem).rows)


def test_a_result_shows_its_last_figures_and_its_costs(solved):
    result = solved[1]
    page = shown(result)
    loss = next(row for row in page.rows if row[0] == "upper_loss")
    assert [float(value) for value in loss[1:]] == [
        pytest.approx(result.rows[i]["upper_loss"], rel=1e-5) for i in (0, -1)
    ]
    assert next(row for row in page.rows if row[0] == "rounds")[1] == "3"
    assert "No record." in page.text


def test_a_result_without_measurements_has_a_display():
    assert "0 outer iterations" in shown(Result({}, {}, [], Totals({"rounds": 0}), 0, Ending("interrupted"))).text


def test_a_ledger_shows_every_cost_by_phase():
    ledger = Ledger(2)
    with ledger.during("lower"):
        ledger.count_round()
        ledger.charge("gy", torch.arange(2), 5)
    ledger.charge("hvp", torch.arange(1), 3)
    page = shown(ledger)
    assert ["cost", "total", "lower", "local"] in page.rows or ["cost", "total", "local", "lower"] in page.rows
    assert sorted(next(row for row in page.rows if row[0] == "gy")[1:]) == ["0", "10", "10"]
    assert sorted(next(row for row in page.rows if row[0] == "hvp")[1:]) == ["0", "3", "3"]
    assert any("Hessian" in title for title in page.titles)  # costs are explained on hover


@pytest.mark.parametrize("name", sorted(discovery.algorithms()))
def test_every_algorithm_shows_its_settings_scopes_and_cost(name):
    algorithm = discovery.algorithm(name)()
    page = shown(algorithm)
    for field, value in algorithm.asdict().items():
        assert next(row for row in page.rows if row[0] == field)[2] == repr(value)
    assert [row[0] for row in page.rows if row[0] in ("global", "local", "shared", "private")] == [
        "global",
        "local",
        "shared",
        "private",
    ]
    assert "Cost per outer iteration: " in page.text


def test_symbols_and_refusals_are_those_of_the_algorithm():
    page = shown(discovery.algorithm("fedbio")(lr_upper=0.25))
    assert next(row for row in page.rows if row[0] == "lr_upper") == ["lr_upper", "eta", "0.25", "step of x"]
    refusing = shown(discovery.algorithm("fedbio_local")())
    assert next(row for row in refusing.rows if row[0] == "global")[2].startswith("refused: ")


def test_hostile_names_are_escaped_in_every_display():
    problem = fb.Problem(
        upper=lambda x, y, batch: y[HOSTILE].sum(),
        lower=lambda x, y, batch: y[HOSTILE].sum(),
        x0={HOSTILE: torch.zeros(2)},
        y0={HOSTILE: torch.zeros(3)},
        statistics={HOSTILE: lambda x, y, batch: {}},
        name=HOSTILE,
    )
    totals = Totals({"rounds": 1, "bytes_up": 1, "bytes_down": 1, "gy": 2}, {HOSTILE: {"gy": 2}})
    result = Result({}, {}, [{HOSTILE: 1.0, "iteration": 0}], totals, 1, Ending(HOSTILE, HOSTILE), name=HOSTILE)
    for one in (problem, totals, result):
        text = one._repr_html_()
        assert HOSTILE in shown(one).text
        assert "<img" not in text
        assert "<b>" not in text
        assert "</script>" not in text
