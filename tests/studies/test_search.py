"""fb.tune: ranges, budgets, the journal, pruning and divergence."""

import concurrent.futures
import dataclasses
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.cli import main
from fedbilevel.errors import CheckpointError, FedBilevelError
from fedbilevel.studies import ranges, search, trial_runs
from fedbilevel.tasks.quadratic import Quadratic
from support.stops import ctrl_c

pytest.importorskip("optuna")

TASK = Quadratic(num_clients=2)
FEW = {"num_rounds": 20, "dtype": torch.float64}
# far apart, so that every algorithm has a good and a bad trial
STEPS = {"lr_upper": (1e-3, 0.1), "lr_lower": [0.1, 0.2], "lr_system": [0.1]}


def settings(found, name="fedbio"):
    return [(trial.settings, trial.value, trial.outcome, trial.rounds) for trial in found.searches[name].trials]


def plain(curvature):
    """A problem whose lower loss is curvature/2 (y - x)^2, and whose upper loss is 1/2 (y - 1)^2."""
    return fb.Problem(
        upper=lambda x, y, batch: 0.5 * ((y["y"] - batch["a"]) ** 2).sum(-1),
        lower=lambda x, y, batch: 0.5 * curvature * ((y["y"] - x["x"]) ** 2 * batch["a"]).sum(-1),
        x0={"x": torch.zeros(1)},
        y0={"y": torch.zeros(1)},
    )


CLIENTS = [{"train": {"a": torch.ones(2, 1)}, "val": {"a": torch.ones(2, 1)}}] * 2


# ---- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [1e-3, 4.0, 1e3])
def test_scales_follow_the_curvature_and_the_hypergradient(curvature):
    # u -> f_y / curvature = -1 / curvature at y = x = 0, so the hypergradient is -1, and the scale of x is 1
    found = ranges.measured(plain(curvature), CLIENTS, {})
    assert found.lower == pytest.approx(1 / curvature, rel=0.06)  # a 16-norm over two clients, and two digits
    assert found.upper == pytest.approx(1.0, rel=0.2)  # y and u approach their solutions during the measurement
    assert found.around("lr_lower") == pytest.approx((0.01 * found.lower, 10 * found.lower))
    assert found.around("lr_upper") == pytest.approx((0.003 * found.upper, 30 * found.upper))
    assert found.around("lr_upper", 3000.0)[1] == 3000.0


def test_ctrl_c_leaves_no_scales(monkeypatch):
    ctrl_c(monkeypatch, FedBiO)
    with pytest.raises(KeyboardInterrupt):
        ranges.measured(plain(1.0), CLIENTS, {})


def test_steps_are_absolute_where_a_scale_cannot_be_measured():
    flat = dataclasses.replace(plain(1.0), lower=lambda x, y, batch: (y["y"] * x["x"] * batch["a"]).sum(-1))
    assert ranges.measured(flat, CLIENTS, {})[:2] == (1.0, 1.0)


def test_ranges_of_one_algorithm_replace_those_of_all():
    given = {"fedbio": {"lr_upper": (1, 2)}, "lr_upper": (3, 4), "num_local_steps": (1, 8), "lr_system": [0.5]}
    found = ranges.given_ranges(given, {"fedbio": FedBiO(), "fedavg": FedAvg()})
    assert found == {
        "fedbio": {"lr_upper": (1.0, 2.0), "num_local_steps": (1, 8), "lr_system": [0.5]},
        "fedavg": {"num_local_steps": (1, 8)},
    }
    assert all(isinstance(end, float) for end in found["fedbio"]["lr_upper"])


# ---- the search ----------------------------------------------------------------------------------


def test_the_best_step_lies_in_its_band():
    # x stays in place (a fixed tiny step), and y goes to x0 = 1 by (1 - 4 lr)^t: the best lr is near 1/4
    problem = dataclasses.replace(plain(4.0), x0={"x": torch.ones(1)})
    found = fb.tune(
        problem, {"fedbio": FedBiO(num_local_steps=1)}, clients=CLIENTS, num_trials=20, num_rounds=3,
        ranges={"lr_upper": [1e-9]}, dtype=torch.float64,
    )  # fmt: skip
    best = found.algorithms["fedbio"]
    assert isinstance(best, FedBiO)
    assert 0.15 < best.lr_lower < 0.35
    assert found.searches["fedbio"].best.value < 0.01 < max(value for _, value, *_ in settings(found))


def test_budgets_of_all_algorithms_are_equal_and_trials_use_unreported_data():
    found = fb.tune(TASK, ["fedbio", "fbo_aggitd"], num_trials=3, repetitions=2, ranges=STEPS, prune=False, **FEW)
    assert {name: len(one.trials) for name, one in found.searches.items()} == {"fedbio": 3, "fbo_aggitd": 3}
    assert {trial.rounds for trial in found.searches["fedbio"].trials} == {2 * 20}
    per_iteration = 13  # of FBO-AggITD with five lower rounds: a run ends at the first iteration past 20 rounds
    assert {trial.rounds for trial in found.searches["fbo_aggitd"].trials} == {2 * 2 * per_iteration}
    assert found.rounds == 3 * 2 * (20 + 26)
    first = found.searches["fedbio"].trials[0]
    losses = [
        row["upper_loss"]
        for r in (100, 101)
        for row in fb.solve(*TASK.repeated(r).build(), FedBiO(num_local_steps=1, **first.settings), seed=r, **FEW).rows
        if row["rounds"] > 15
    ]
    assert len(losses) == 10
    assert first.value == pytest.approx(sum(losses) / 10, rel=1e-12)
    compared = fb.compare(TASK, found.algorithms, repetitions=1, **FEW)
    assert [one.name for one in compared.outcomes] == ["fedbio", "fbo_aggitd"]
    assert len(found.table) == 6
    assert "6 trials, 276 rounds in all" in repr(found)


def test_the_first_trial_is_what_the_task_suggests():
    found = fb.tune(TASK, "fedbio", num_trials=1, **FEW)
    assert settings(found)[0][0] == {"lr_upper": 0.05, "lr_lower": 0.2, "lr_system": 0.2}
    assert found.scales.rounds == 41
    assert found.algorithms["fedbio"].num_local_steps == 1


def test_a_rising_metric_is_maximised():
    task = fb.tasks.Imbalance(num_clients=2)
    with pytest.warns(UserWarning, match="'balanced_test_accuracy'.* is optimistic"):
        found = fb.tune(task, "fedavg", metric="balanced_test_accuracy", num_trials=3, num_rounds=5, prune=False)
    assert found.searches["fedavg"].best.value == max(value for _, value, *_ in settings(found, "fedavg"))


def test_a_diverged_trial_is_the_worst_and_not_an_error():
    found = fb.tune(TASK, "fedbio", num_trials=6, num_rounds=400, ranges={"lr_upper": [0.05], "lr_lower": [0.2, 50.0]})
    values = {trial.settings["lr_lower"]: (trial.outcome, trial.value) for trial in found.searches["fedbio"].trials}
    assert values[50.0] == ("diverged", math.inf)
    assert found.searches["fedbio"].count("diverged") >= 1
    assert found.algorithms["fedbio"].lr_lower == 0.2


def test_a_step_that_the_algorithm_refuses_counts_as_diverged():
    given = {"lr_upper": [0.05], "lr_lower": [0.1], "lr_system": [5.0]}
    network, averaging = fb.Network(kind="ring"), fb.Averaging(num_steps=5)
    found = fb.tune(TASK, "hgp", num_trials=1, ranges=given, network=network, averaging=averaging, **FEW)
    assert [one.outcome for one in found.searches["hgp"].trials] == ["diverged"]


def test_an_algorithm_whose_trials_all_diverge_is_left_out():
    found = fb.tune(TASK, "fedbio", num_trials=2, num_rounds=400, ranges={"lr_lower": [50.0]})
    assert found.algorithms == {}
    assert "fedbio: every trial diverged" in repr(found)


def test_a_trial_behind_the_others_is_pruned_and_counted():
    # the loss falls faster the longer the step of x is
    found = fb.tune(
        plain(4.0), {"fedbio": FedBiO(num_local_steps=1)}, clients=CLIENTS, num_trials=16, num_rounds=60,
        ranges={"lr_upper": (1e-5, 0.1), "lr_lower": [0.2], "lr_system": [0.2]}, dtype=torch.float64,
    )  # fmt: skip
    one = found.searches["fedbio"]
    assert len(one.trials) == 16
    pruned = [trial for trial in one.trials if trial.outcome == "pruned"]
    complete = [trial for trial in one.trials if trial.outcome == "complete"]
    assert pruned
    assert len(pruned) + len(complete) == 16
    for trial in pruned:
        before = sorted(other.settings["lr_upper"] for other in complete if other.number < trial.number)
        assert len(before) >= 5
        assert sum(other > trial.settings["lr_upper"] for other in before) >= 0.75 * len(before)
        assert 20 <= trial.rounds < 60
    assert one.rounds == sum(trial.rounds for trial in one.trials) < 16 * 60
    assert one.best.settings["lr_upper"] == max(trial.settings["lr_upper"] for trial in complete)


def test_short_runs_report_every_round_once():
    found = fb.tune(TASK, "fedbio", num_trials=1, ranges=STEPS, num_rounds=7)  # fewer rounds than points of a curve
    assert settings(found)[0][2:] == ("complete", 7)


def test_a_run_that_swings_is_judged_by_its_last_quarter():
    rows = [
        {"rounds": 10 * number, "upper_loss": loss} for number, loss in enumerate([9, 9, 9, 9, 9, 9, 9, 9, 5, 7, 0])
    ]
    plan = trial_runs.SearchPlan([], "upper_loss", 100, 1, True, 0, print, {}, {}, {})
    assert trial_runs.TrialRuns(plan, None)._settled(rows) == 4.0
    assert trial_runs.TrialRuns(plan, None)._settled(rows[:3]) == 9.0


# ---- the journal ---------------------------------------------------------------------------------


def test_a_resumed_search_has_the_same_trials_and_repeats_none(tmp_path, monkeypatch):
    whole = fb.tune(TASK, "fedbio", num_trials=12, ranges=STEPS, **FEW)
    fb.tune(TASK, "fedbio", num_trials=4, ranges=STEPS, storage=tmp_path / "s", **FEW)
    ran, solve = [], trial_runs.solve
    monkeypatch.setattr(trial_runs, "solve", lambda *given, **more: ran.append(1) or solve(*given, **more))
    resumed = fb.tune(TASK, "fedbio", num_trials=12, ranges=STEPS, storage=tmp_path / "s", **FEW)
    assert len(ran) == 8
    assert settings(resumed) == settings(whole)
    again = fb.tune(TASK, "fedbio", num_trials=12, ranges=STEPS, storage=tmp_path / "s", **FEW)
    assert len(ran) == 8
    assert repr(again) == repr(resumed)


def test_a_resumed_search_measures_no_scales_again(tmp_path, monkeypatch):
    first = fb.tune(TASK, "fedbio", num_trials=1, storage=tmp_path, **FEW)
    monkeypatch.setattr(search, "measured", None)
    second = fb.tune(TASK, "fedbio", num_trials=2, storage=tmp_path, **FEW)
    assert second.searches["fedbio"].ranges == first.searches["fedbio"].ranges
    assert second.scales is None
    assert settings(second)[:1] == settings(first)


def test_an_interrupted_trial_is_repeated(tmp_path, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    fb.tune(TASK, "fedbio", num_trials=2, ranges=STEPS, storage=tmp_path, **FEW)
    with monkeypatch.context() as patch:
        patch.setattr(trial_runs, "solve", stop)
        with pytest.raises(KeyboardInterrupt):
            fb.tune(TASK, "fedbio", num_trials=3, ranges=STEPS, storage=tmp_path, **FEW)
    found = fb.tune(TASK, "fedbio", num_trials=3, ranges=STEPS, storage=tmp_path, **FEW)
    assert settings(found) == settings(fb.tune(TASK, "fedbio", num_trials=3, ranges=STEPS, **FEW))


def test_a_trial_of_a_killed_process_is_repeated(tmp_path):
    script = (
        "import os, fedbilevel as fb\nfrom fedbilevel.studies import trial_runs\n"
        "trial_runs.solve = lambda *given, **more: os._exit(9)\n"
        f"fb.tune(fb.tasks.Quadratic(num_clients=2), 'fedbio', num_trials=2, num_rounds=20, ranges={STEPS}, "
        f"storage={str(tmp_path)!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 9
    found = fb.tune(TASK, "fedbio", num_trials=2, num_rounds=20, ranges=STEPS, storage=tmp_path)
    assert _states(tmp_path) == ["FAIL", "COMPLETE", "COMPLETE"]
    assert settings(found)[0] == settings(fb.tune(TASK, "fedbio", num_trials=1, num_rounds=20, ranges=STEPS))[0]


def test_two_processes_share_one_journal(tmp_path):
    script = (
        "import fedbilevel as fb, torch\n"
        f"found = fb.tune(fb.tasks.Quadratic(num_clients=2), 'fedbio', num_trials=8, num_rounds=20, ranges={STEPS}, "
        f"storage={str(tmp_path)!r}, dtype=torch.float64, progress=print)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=240)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(said[0]) + len(said[1]) == 8
    assert set(_states(tmp_path)) <= {"COMPLETE", "PRUNED"}
    found = fb.tune(TASK, "fedbio", num_trials=8, ranges=STEPS, storage=tmp_path, **FEW)
    assert len({json.dumps(values) for values, *_ in settings(found)}) == 8
    assert list((tmp_path / "workers").iterdir()) == []


def test_jobs_run_at_the_same_time_with_an_equal_budget():
    said = []
    found = fb.tune(TASK, ["fedbio", "simfbo"], num_trials=3, ranges=STEPS, jobs=2, progress=said.append, **FEW)
    assert {name: len(one.trials) for name, one in found.searches.items()} == {"fedbio": 3, "simfbo": 3}
    assert len(said) == 6


def _states(folder: Path) -> list[str]:
    """States of the trials, read as optuna-dashboard does."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return [trial.state.name for trial in optuna.load_study(study_name="fedbio", storage=storage).trials]


def test_a_folder_with_another_search_is_refused(tmp_path):
    fb.tune(TASK, "fedbio", num_trials=1, ranges=STEPS, storage=tmp_path, **FEW)
    for change in ({"num_rounds": 10}, {"metric": "lower_loss"}, {"ranges": {**STEPS, "lr_upper": (1, 2)}}):
        with pytest.raises(CheckpointError, match=r"holds a search of fedbio with .*: name another folder"):
            fb.tune(TASK, "fedbio", **{"num_trials": 1, "ranges": STEPS, "storage": tmp_path, **FEW, **change})


# ---- the command ---------------------------------------------------------------------------------


def invoke(*words):
    return CliRunner().invoke(main.cli, [str(word) for word in words])


def test_the_command_prints_a_comparison_with_the_best_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "quadratic", "--algorithms", "fedbio", "simfbo", "--num-trials", 3, "--num-rounds", 20]
    words += ["--num-clients", 3, "--client-weights", "by_samples", "--fraction", 0.7, "--replacement"]
    words += ["--range", "lr_upper=0.001:0.1", "--range", "lr_lower=0.2", "--range", "lr_system=0.2"]
    words += ["--range", "fedbio.num_local_steps=1:3"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert [line.split(",")[0] for line in done.output.splitlines() if ": trial " in line] == [
        f"{name}: trial {number} of 3" for name in ("fedbio", "simfbo") for number in (1, 2, 3)
    ]
    assert "optuna-dashboard runs/tune-quadratic/journal.log" in done.output
    again = invoke(*words)
    assert ": trial " not in again.output
    [line] = [line for line in again.output.splitlines() if line.startswith("fedbilevel compare")]
    compared = invoke(*shlex.split(line)[1:], "--repetitions", 1, "--out", "compared")
    assert compared.exit_code == 0, compared.output
    content = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert content["task_settings"]["num_clients"] == 3
    assert content["task_settings"]["client_weights"] == "by_samples"
    assert "fraction=0.7, replacement=True" in content["options"]["cohort"]
    assert content["num_rounds"] == 20
    task = Quadratic(num_clients=3, client_weights="by_samples")
    given = {"fedbio": {"num_local_steps": (1, 3)}, "lr_upper": (0.001, 0.1), "lr_lower": [0.2], "lr_system": [0.2]}
    cohort = fb.Cohort(0.7, replacement=True)
    found = fb.tune(task, ["fedbio", "simfbo"], num_trials=3, num_rounds=20, ranges=given, cohort=cohort)
    assert {one["algorithm"]: one["settings"] for one in content["runs"]} == {
        name: one.asdict() for name, one in found.algorithms.items()
    }


def test_the_command_says_when_every_trial_diverged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--num-trials", 1, "--num-rounds", 400, "--range", "lr_lower=50"]
    done = invoke("tune", "quadratic", "--algorithms", "fedbio", *words)
    assert done.exit_code == 0, done.output
    assert "every trial diverged" in done.output
    assert "fedbilevel compare" not in done.output


def test_an_interrupted_command_says_how_to_resume(tmp_path, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial_runs, "solve", stop)
    done = invoke("tune", "quadratic", "--algorithms", "fedbio", "--range", "lr_lower=1", "--num-trials", 1)
    assert done.exit_code == 130
    assert "The same command resumes it" in done.output


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"task": 3}, "task is 3, expected a task"),
        ({"task": plain(1.0)}, "a problem needs its data"),
        ({"clients": CLIENTS}, "a task makes its own clients"),
        ({"algorithms": "fedbi"}, "Did you mean 'fedbio'"),
        ({"algorithms": []}, "no algorithms to tune"),
        ({"algorithms": {"fedbio": 3}}, "expected a name, a list of names, or a dict"),
        ({"metric": 3}, "metric is 3, expected the name"),
        ({"metric": "uper_loss"}, "no metric named 'uper_loss' in this run: use one of upper_loss"),
        ({"num_trials": 0}, "num_trials is 0"),
        ({"storage": 3}, "storage is 3, expected the name of a folder"),
        ({"record": "r"}, "record is an option of a single run"),
        ({"ranges": 3}, "ranges is 3, expected a dict"),
        ({"ranges": {"fedbi": {}}}, "no algorithm in this search named 'fedbi'"),
        ({"ranges": {"lr_uper": [1]}}, "no setting of these algorithms named 'lr_uper'"),
        ({"ranges": {"fedbio": {"lr_uper": [1]}}}, "no setting of fedbio named 'lr_uper'"),
        ({"ranges": {"lr_upper": (2, 1)}}, r"the range of lr_upper is \(2, 1\), expected \(low, high\)"),
        ({"ranges": {"num_local_steps": (1.5, 4)}}, "is not a decimal number: give whole numbers"),
        ({"batch_siz": 3}, "Did you mean 'batch_size'"),
    ],
)
def test_wrong_arguments_are_named(change, named):
    given = {"task": TASK, "algorithms": "fedbio", "num_trials": 1, "num_rounds": 2, "ranges": STEPS, **change}
    with pytest.raises(FedBilevelError, match=named):
        fb.tune(given.pop("task"), given.pop("algorithms"), **given)


def test_an_algorithm_without_step_sizes_needs_ranges(monkeypatch):
    monkeypatch.setattr(search, "steps_of", lambda kind: [])
    with pytest.raises(FedBilevelError, match="has no step size to search: give ranges"):
        fb.tune(TASK, "fedbio", num_trials=1)


def test_without_optuna_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    with pytest.raises(FedBilevelError, match=r"pip install 'fedbilevel\[tune\]'"):
        fb.tune(TASK, "fedbio")


def test_jobs_of_a_problem_are_refused():
    with pytest.raises(FedBilevelError, match="jobs needs a task"):
        fb.tune(plain(1.0), "fedbio", clients=CLIENTS, jobs=2)


def test_a_lost_process_is_reported(monkeypatch):
    class Broken:
        def __init__(self, *given):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *given):
            return None

        def submit(self, *given, **more):
            ended = concurrent.futures.Future()
            ended.set_exception(concurrent.futures.process.BrokenProcessPool())
            return ended

    monkeypatch.setattr(search, "ProcessPoolExecutor", Broken)
    with pytest.raises(FedBilevelError, match="ended without a message"):
        fb.tune(TASK, "fedbio", num_trials=1, ranges=STEPS, jobs=2, **FEW)
