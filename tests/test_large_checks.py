"""Checks of large and of non-convex problems: part of the data, a limit of time, damping."""

import io
import sys

import pytest
import torch

import fedbilevel as fb
from fedbilevel.checks import clock, damping, selection
from fedbilevel.checks.damping import damped
from fedbilevel.errors import ConvexityError
from fedbilevel.oracle.hypergradient import lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.verdict import Check, Report


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(selection, "MOST_CLIENTS", 3)
    monkeypatch.setattr(selection, "MOST_SAMPLES", 4)


PART = "on 3 of 5 clients and at most 4 samples of each in a role"


def test_large_problems_are_checked_on_a_random_part_that_the_report_names(small):
    built = Quadratic().build()
    reports = [fb.check_hypergradient(*built, seed=seed, show=False) for seed in (0, 0, 1)]
    assert all(report.ok and report.title.endswith(PART) for report in reports)
    assert reports[0].title == reports[1].title != reports[2].title  # |value| is that of the selected data
    assert fb.check_problem(*built, show=False).title == f"Problem 'quadratic', {PART}"
    assert fb.check_hypergradient(*built, estimators=["fbo_aggitd"], show=False).checks[0].ok


def test_selected_samples_are_the_clients_own(small):
    built = Quadratic().build()
    data = Population(*built, dtype=torch.float64).data
    part, said = selection.selected(data, built.clients, 0)
    assert said == PART
    assert len(part) == 3
    own = [{tuple(row.tolist()) for row in data.batch(torch.tensor([i]), "train").row(0)["c"]} for i in range(5)]
    for one in part:
        rows = {tuple(row.tolist()) for row in one["train"]["c"]}
        assert len(one["train"]["c"]) == len(one["val"]["t"]) == 4
        assert any(rows <= them for them in own)


def test_a_given_point_is_checked_on_all_clients(small):
    built = Quadratic(upper="private").build()
    report = fb.check_hypergradient(*built, x=torch.ones(5, 4), estimators=["cg"], show=False)
    assert report.ok
    assert PART not in report.title


class Counted:
    """Time that passes by one second per reading."""

    def __init__(self) -> None:
        self.now = self.wall = 0.0

    def monotonic(self) -> float:
        self.wall += 1
        return self.wall

    def thread_time(self) -> float:
        self.now += 1
        return self.now


def test_checks_after_the_limit_of_time_are_not_reported_as_passed(monkeypatch):
    built = Quadratic().build()

    def limited(seconds: float | None, *estimators: str) -> tuple[Report, float]:
        monkeypatch.setattr(clock, "time", counted := Counted())
        return fb.check_hypergradient(*built, estimators=estimators, seconds=seconds, show=False), counted.now

    never, _ = limited(3, "cg", "neumann")
    assert [check.ok for check in never.checks] == [None, None, None]
    assert not never.ok
    assert "not checked within 3 seconds: give more seconds, or seconds=None for no limit" in str(never)
    assert "ok" not in {check.result for check in never.checks}
    whole, spent = limited(None, "cg")
    assert whole.ok
    for estimator in ("fixed_point", "fbo_aggitd"):
        some, _ = limited(spent, "cg", estimator)
        assert [check.ok for check in some.checks] == [True, True, None]
        assert not some.ok
        assert some.verdict == "2 of 3 checks passed, 1 not checked"


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    built = Quadratic().build()
    for is_terminal in (True, False):
        shown = io.StringIO()
        shown.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(clock, "time", Counted())
        fb.check_hypergradient(*built, estimators=["cg"], seconds=None, show=False)
        if is_terminal:
            assert "check_hypergradient: solution of the lower level, " in shown.getvalue()
            assert ": finite differences, " in shown.getvalue()
            assert shown.getvalue().endswith("\r\x1b[K")
        else:
            assert shown.getvalue() == ""


def test_verdicts_count_failures_and_checks_that_were_not_done():
    verdict = lambda *results: Report("title", [Check(str(i), ok, "text") for i, ok in enumerate(results)]).verdict
    assert verdict(True, None, None) == "1 of 3 checks passed, 2 not checked"
    assert verdict(True, False, None) == "1 of 3 checks failed, 1 not checked"
    assert verdict(None) == "the check was not done"
    assert "<td>--</td>" in Report("title", [Check("a", None, "late")])._repr_html_()


def saddle() -> tuple[fb.Problem, list]:
    """A lower level with two minima and a maximum at its start."""
    draw = torch.Generator().manual_seed(0)
    samples = lambda: {"a": torch.randn(6, 2, generator=draw, dtype=torch.float64)}
    well = lambda x, y, batch: ((y["w"] ** 2 - 1) ** 2).sum() + (batch["a"] @ (y["w"] * x["s"]))
    problem = fb.Problem(
        upper=lambda x, y, batch: ((y["w"] - batch["a"]) ** 2).sum(1) + x["s"].sum() ** 2,
        lower=well,
        x0={"s": torch.tensor([0.5, -0.5])},
        y0={"w": torch.tensor([0.1, -0.1])},
        name="wells",
    )
    return problem, [{"train": samples(), "val": samples()} for _ in range(3)]


def test_a_lower_level_that_is_not_convex_is_checked_with_damping():
    report = fb.check_hypergradient(*saddle(), show=False)
    assert report.ok, str(report)
    assert "the lower level is not convex: " in report.title
    assert "|y - y0|^2 is added to its loss" in report.title
    wrong = lambda population, x, y: 0 * x
    assert not fb.check_hypergradient(*saddle(), estimators=[wrong], show=False).ok


def test_a_lower_level_that_no_damping_makes_convex_is_reported(monkeypatch):
    monkeypatch.setattr(damping, "_DAMPINGS", (1e-3,))
    report = fb.check_hypergradient(*saddle(), show=False)
    assert [check.ok for check in report.checks] == [None] * 5
    assert "not checked, because the lower level has curvature" in str(report)
    with pytest.raises(ConvexityError, match="add a regulariser to the lower loss"):
        lower_solution(Population(*saddle(), dtype=torch.float64), torch.tensor([0.5, -0.5], dtype=torch.float64))


def test_a_damped_problem_adds_a_quadratic_around_the_start():
    problem, clients = saddle()
    batch = {"a": clients[0]["train"]["a"].float()}
    y = {"w": torch.tensor([2.1, -0.1])}
    change = damped(problem, 3.0).lower(problem.x0, y, batch) - problem.lower(problem.x0, y, batch)
    assert change.tolist() == pytest.approx([6.0] * 6, rel=1e-5)


def test_large_systems_need_no_dense_matrix(monkeypatch):
    monkeypatch.setattr(damping, "_DENSE", 3)
    assert fb.check_hypergradient(*Quadratic().build(), show=False).ok
