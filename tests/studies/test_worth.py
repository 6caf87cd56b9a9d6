"""Verdicts over paired repetitions, and the study that makes them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.cli import main
from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.report import tables
from fedbilevel.studies import experiment, reproduce, verdicts
from fedbilevel.studies.influence.plain import NAMES
from fedbilevel.studies.kinds import cleaning, worth
from fedbilevel.studies.rivals import run_rival
from fedbilevel.studies.together import CHOICES
from fedbilevel.tasks.rival import Rival
from support.stops import ctrl_c

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


@pytest.fixture
def run(tmp_path):
    return lambda **row: worth.run(row, repetition=1, folder=tmp_path / "job", device="cpu", say=lambda _: None)


def test_rows_are_the_runs_of_the_task(run):
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
    assert found["bilevel"] == guarded.share
    plain = fb.guarded(task, num_rounds=12, seed=1, bilevel=False)
    found = run(**common, method="blended").figures
    assert (found["figure"], found["bilevel"]) == (plain.figures["test_loss"], 0)
    with pytest.raises(
        UnknownNameError, match=r"no method of regularisation named 'l3'. Known: blended, guarded, l1_grid"
    ):
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
    assert place == ("imbalance-digits", "plain", "self-tuned")
    ours, theirs = (list(kept["imbalance-digits", row].values()) for row in ("self-tuned", "plain"))
    expected = verdicts.verdict(ours, theirs, lower_is_better=False)
    assert found == expected
    page = tables.recorded(one)
    assert f"| {found.shown()} | 2 |" in page
    assert "self_tuned against this row" in page


def test_rows_are_paired_by_repetition(tmp_path):
    """A run that failed has no figure, and the others keep their partners, in the record too."""
    path = tmp_path / "experiments" / "worth" / "experiment.toml"
    path.parent.mkdir(parents=True)
    path.write_text(FILE.read_text().split("[result")[0])
    one = experiment.read(path)
    jobs = one.jobs(panels=["imbalance-digits"], rows=["self-tuned", "plain"], repetitions=3)
    about = {"commit": "0", "machine": "m", "time": "t", "seconds": 1.0, "curve": []}

    def figures(job):
        failed = job.row == "plain" and job.repetition == 0
        return {"diverged": 1.0} if failed else {"figure": 0.1 * job.repetition + 0.01 * (job.row == "plain")}

    found = [(job, {"figures": figures(job), **about}) for job in jobs]
    reproduce.record(one, found)
    for values in (verdicts.values_of(one, found), verdicts.recorded_values(experiment.read(path))):
        assert list(values["imbalance-digits", "plain"]) == [1, 2]
        judged = verdicts.verdicts(one, values)["imbalance-digits", "plain", "self-tuned"]
        assert (judged.difference, judged.word) == (pytest.approx(-0.01), "loses")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('rows = ["self-tuned"', 'rows = ["selftuned"', "Did you mean 'self-tuned'"),
        ('rows = ["self-tuned", "started", "guarded"]\n', "", "expected rows and a figure"),
    ],
)
def test_a_wrong_verdict_is_named(tmp_path, old, new, named):
    path = tmp_path / "experiment.toml"
    path.write_text(FILE.read_text().replace(old, new, 1))
    with pytest.raises((ExperimentError, UnknownNameError), match=named):
        experiment.read(path)


def test_every_row_of_the_experiment_is_a_way_to_solve_its_task():
    one = experiment.read(FILE)
    rivals = {}
    for job in one.jobs(repetitions=1):
        worth.given.check(job.settings, worth.KNOWN, needs=("task", "figure", "num_rounds"))
        assert job.settings["task"]["data_seed"] >= 50  # choices saw 0 to 4
        task, method = worth.given.task(job.settings["task"]), job.settings.get("method", "self_tuned")
        if task.name() == "influence":
            known = {"self_tuned", *NAMES}
        elif task.name() == "data_cleaning":
            known = {"self_tuned", "cleanlab", *discovery.detectors()}
        else:
            assert job.settings["figure"] in task.headline
            if task.name() not in rivals:  # on the embedded data, which need no files
                small = {"num_clients": 4} if "num_clients" in task.asdict() else {}
                rivals[task.name()] = set(type(task)(**small).rivals())
            known = {"self_tuned", "unlearned", *CHOICES, *rivals[task.name()]}
        assert method in known, job.key


def test_every_goal_of_a_win_asks_for_two_sets_of_real_data():
    one = experiment.read(FILE)
    won = {name: goal["panels"] for name, goal in one.content["goals"].items() if goal["verdict"] == "wins"}
    assert {"mixing", "few-shot"} <= set(won)
    for name, panels in won.items():
        tasks = [worth.given.task(one.content["panels"][panel]["settings"]["task"]) for panel in panels]
        assert len({task.name() for task in tasks}) == 1
        assert len({task.data for task in tasks} - {"chains", "synthetic"}) >= 2, name


def test_panels_of_a_task_with_a_goal_have_the_same_rows():
    one = experiment.read(FILE)
    for name in ("mixing", "few-shot"):
        rows = [[row for _, row in one.places(panels=[panel])] for panel in one.content["goals"][name]["panels"]]
        assert all(some == rows[0] for some in rows), name


def test_self_tuned_from_the_plain_way_is_the_bilevel_answer_beside_its_start(run):
    task = fb.tasks.Regularisation(num_train=10, num_val=8, num_test=30).repeated(1)
    found = run(task=TASK, figure="test_loss", num_rounds=12, method="started").figures
    guarded = fb.guarded(task, num_rounds=12, seed=1, rivals=["l2_grid", "l1_grid", "screened"])
    assert found["figure"] == guarded.contenders["bilevel"].figures["test_loss"]
    assert found["rounds"] == guarded.costs["rounds"]


def test_a_start_without_a_bilevel_answer_has_diverged(run, monkeypatch):
    monkeypatch.setattr(worth, "choices", lambda *_, **__: {"guarded": {"test_loss": 1.0}})
    assert run(task=TASK, figure="test_loss", num_rounds=12, method="started").figures == {"diverged": 1.0}


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_a_rival_of_which_every_trial_fails_has_diverged(run, monkeypatch):
    """Such runs return to their start, whose figures are those of no method."""
    ways = fb.tasks.Regularisation.rivals

    def wild(task):
        way = next(iter(ways(task)["l2_grid"].ways.values()))
        settings = {"lr_lower": 1e6, "num_local_steps": 5}
        return {"wild": Rival("too long steps", {"one": way._replace(algorithm="fedavg", settings=settings)})}

    monkeypatch.setattr(fb.tasks.Regularisation, "rivals", wild)
    assert run(task=TASK, figure="test_loss", num_rounds=12, method="wild").figures == {"diverged": 1.0}


def test_a_task_names_the_algorithm_that_stands_for_self_tuned(run):
    small = {"num_episodes": 2, "num_queries": 2, "num_held_out": 3, "num_filters": 3}
    task = fb.tasks.FewShotEpisodes(**small).repeated(1)
    found = run(task={"name": "few_shot_episodes", **small}, figure="test_accuracy", num_rounds=3).figures
    settings = task.suggestions("adasimfbo")
    assert (
        found["figure"] == fb.solve(*task.build(), "adasimfbo", num_rounds=3, seed=1, **settings).final["test_accuracy"]
    )


def test_influence_is_judged_by_the_order_of_random_samples(run):
    task = {"name": "influence", "num_train": 12, "num_val": 20}
    common = {"task": task, "figure": "rank_correlation", "num_rounds": 1, "num_removed": 15}
    found = run(**common).figures
    own = fb.tasks.Influence(num_train=12, num_val=20).repeated(1)
    every = fb.influence(own, num_removed=36)
    actual = {(one.client, one.sample): (one.predicted, one.actual) for one in every.samples}
    places = sorted(actual)
    chosen = np.sort(np.random.default_rng([1, 7]).choice(36, 15, replace=False))
    predicted, changes = zip(*(actual[places[k]] for k in chosen), strict=True)
    assert found["figure"] == pytest.approx(stats.spearmanr(predicted, changes).statistic, abs=1e-6)
    assert found["rounds"] == every.cost["rounds"]
    product = run(**common, method="gradient_product").figures
    assert product["rounds"] == 1
    assert product["figure"] < found["figure"]
    with pytest.raises(UnknownNameError, match="no method of influence named 'hgp'"):
        run(**common, method="hgp")


def test_cleaning_is_judged_by_the_accuracy_that_a_user_gets(run):
    task = {"name": "data_cleaning", "num_clients": 3, "num_train": 60, "num_clean": 30, "noise": 0.3}
    common = {"task": task, "figure": "test_accuracy", "num_rounds": 1}
    by_study = lambda **row: (
        cleaning.run({"task": task, **row}, repetition=1, folder=Path(), device="cpu", say=lambda _: None).figures
    )
    ours, own = run(**common).figures, by_study(detector={"name": "label_em"})
    assert (ours["figure"], ours["f1"]) == (own["test_accuracy"], own["f1"])
    theirs, own = run(**common, method="own_loss").figures, by_study(detector={"name": "own_loss"})
    assert (theirs["figure"], theirs["rounds"]) == (own["cleaned"], own["rounds"])


def test_ctrl_c_leaves_no_row(run, monkeypatch):
    ctrl_c(monkeypatch, SelfTuned)
    with pytest.raises(KeyboardInterrupt):
        run(task=TASK, figure="test_loss", num_rounds=12)
