"""Verdicts over paired repetitions, and the study that makes them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner
from scipy import stats

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.report import tables
from fedbilevel.studies import experiment, reproduce, verdicts
from fedbilevel.studies.kinds import worth
from fedbilevel.studies.rivals import run_rival

FILE = Path(__file__).resolve().parents[2] / "experiments" / "worth" / "experiment.toml"
TASK = {"name": "regularisation", "num_train": 10, "num_val": 8, "num_test": 30}


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 60])
def test_the_quantile_is_that_of_scipy(freedom):
    assert verdicts._quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)


@pytest.mark.parametrize(("better", "word"), [(False, "wins"), (True, "loses")])
def test_a_verdict_is_the_paired_interval(better, word):
    """Differences are 0.010, 0.012, 0.008 and 0.011, although both rows spread by 0.3."""
    theirs = [0.5, 0.6, 0.7, 0.8]
    gaps = [0.010, 0.012, 0.008, 0.011]
    ours = [one + gap for one, gap in zip(theirs, gaps, strict=True)]
    found = verdicts.verdict(ours, theirs, lower_is_better=better)
    low, high = stats.t.interval(0.95, 3, statistics.fmean(gaps), statistics.stdev(gaps) / 2)
    assert found[:3] == pytest.approx((statistics.fmean(gaps), low, high))
    assert found.word == word
    assert verdicts.verdict(ours, [*theirs[1:], theirs[0]], lower_is_better=better).word == "ties"
    single = verdicts.verdict([1.0], [0.0], lower_is_better=better)
    assert (single.word, single.high, single.shown()) == ("ties", math.inf, "ties (+1)")


def run(**row):
    return worth.run(row, repetition=1, folder=Path(), device="cpu", say=lambda _: None)


def test_rows_are_the_runs_of_the_task():
    common = {"task": TASK, "figure": "test_loss", "num_rounds": 12}
    task = fb.tasks.Regularisation(num_train=10, num_val=8, num_test=30).repeated(1)
    alone = fb.solve(*task.build(), "self_tuned", num_rounds=12, seed=1, residuals=False)
    assert run(**common).figures["figure"] == alone.final["test_loss"]
    rival = run_rival(task.rivals()["l2_grid"], num_rounds=12, seed=1)
    found = run(**common, method="l2_grid").figures
    assert (found["figure"], found["rounds"]) == (rival.figures["test_loss"], 96)
    assert found["cpu_seconds"] > 0
    guarded = fb.guarded(task, num_rounds=12, seed=1)
    found = run(**common, method="guarded").figures
    assert found["figure"] == guarded.figures["test_loss"]
    assert found["bilevel"] == (guarded.answer == "bilevel")
    with pytest.raises(UnknownNameError, match=r"no method of regularisation named 'l3'. Known: guarded, l1_grid"):
        run(**common, method="l3")
    with pytest.raises(ExperimentError, match="regularisation does not measure 'f1': name one of"):
        run(**{**common, "figure": "f1"})


def test_verdicts_are_recorded_and_printed(tmp_path):
    text = FILE.read_text().split("[result")[0]
    path = tmp_path / "experiments" / "worth" / "experiment.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("num_rounds = 200", "num_rounds = 4"))
    command = ["reproduce", str(path), "--panels", "imbalance-digits", "--rows", "self-tuned,plain",
               "--repetitions", "2", "--out", str(tmp_path / "out")]  # fmt: skip
    done = CliRunner().invoke(main.cli, [*command, "--record"])
    assert done.exit_code == 0, done.output
    assert "against" in done.output
    one = experiment.read(path)
    jobs = one.jobs(panels=["imbalance-digits"], rows=["self-tuned", "plain"], repetitions=2)
    values = verdicts.values_of(one, reproduce.results(jobs, tmp_path / "out"))
    kept = verdicts.recorded_values(one)
    assert kept["imbalance-digits", "plain"] == pytest.approx(values["imbalance-digits", "plain"], rel=1e-5)
    [(place, found)] = verdicts.verdicts(one, kept).items()
    assert place == ("imbalance-digits", "plain")
    expected = verdicts.verdict(kept["imbalance-digits", "self-tuned"], kept[place], lower_is_better=False)
    assert found == expected
    page = tables.recorded(one)
    assert f"| {found.shown()} | 2 |" in page
    assert "self_tuned against this row" in page


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('row = "self-tuned"', 'row = "selftuned"', "Did you mean 'self-tuned'"),
        ('row = "self-tuned"\n', "", "expected a row and a figure"),
    ],
)
def test_a_wrong_verdict_is_named(tmp_path, old, new, named):
    path = tmp_path / "experiment.toml"
    path.write_text(FILE.read_text().replace(old, new, 1))
    with pytest.raises((ExperimentError, UnknownNameError), match=named):
        experiment.read(path)


def test_every_row_of_the_experiment_is_a_rival_of_its_task():
    one = experiment.read(FILE)
    for job in one.jobs(repetitions=1):
        worth.given.check(job.settings, worth.KNOWN, needs=("task", "figure", "num_rounds"))
        task = worth.given.task(job.settings["task"])
        assert job.settings["figure"] in task.headline
