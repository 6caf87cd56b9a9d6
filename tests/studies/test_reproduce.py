"""Experiment files: merging, running, resuming, printing beside the paper's figures, and tuning."""

import functools
import json
import math
import statistics
import tomllib

import pytest
import torch
from click.testing import CliRunner

from fedbilevel import plots
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.cli import main
from fedbilevel.errors import ExperimentError, FedBilevelError, SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.report import tables
from fedbilevel.runs.solve import solve
from fedbilevel.studies import experiment, extension, pictures, provenance, reproduce, row_searches, tune
from fedbilevel.studies.experiment import Job
from fedbilevel.studies.kinds import optimise
from fedbilevel.tasks.quadratic import Quadratic

pytestmark = pytest.mark.slow

SMALL = """
# a remark that must survive
title = "Distance to the solution"
source = "nowhere"
study = "optimise"
repetitions = 3

[figures]
rounds_to_target = "rounds"
upper_loss = "loss, %"

[plot]
x = "rounds"
y = "upper_loss"

[settings]
num_iterations = 12
measure_every = 1
target = "distance=0.5"
task = {name = "quadratic", num_clients = 4}
options = {dtype = "float64", batch_size = 2, fraction = 0.5}

[panels.one]
[panels.two]
title = "a private x"
settings.task = {upper = "private"}

[rows.fedbio]
title = "FedBiO"
settings.algorithm = {name = "fedbio", lr_lower = 0.1, num_local_steps = 2}
in.two.algorithm = {lr_lower = 0.2}
paper.one = {rounds_to_target = 7, upper_loss = 0.5}

[rows.aggitd]
only = ["one"]
settings.algorithm = {name = "fbo_aggitd"}  # with its defaults

[quick]
repetitions = 1
panels = ["one"]
settings.num_iterations = 3

[tune]
maximise = "upper_loss"
repetitions = 2
ranges = {"algorithm.lr_lower" = [0.1, 0.3]}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "experiments" / "small" / "experiment.toml"
    path.parent.mkdir(parents=True)
    text = SMALL.replace('target = "distance=0.5"', f'target = "upper_loss={target()}"')
    path.write_text(text)
    return path


@functools.cache
def target():
    """Between the first and the last loss of FedBiO, so that it is reached on the way."""
    rows = solve(*Quadratic(num_clients=4).build(), "fedbio", residuals=False, num_iterations=12).rows
    return round((rows[0]["upper_loss"] + rows[-1]["upper_loss"]) / 2, 3)


def test_settings_are_merged_from_the_general_to_the_particular(small):
    one = experiment.read(small)
    assert one.settings("one", "fedbio")["algorithm"] == {"name": "fedbio", "lr_lower": 0.1, "num_local_steps": 2}
    two = one.settings("two", "fedbio")
    assert two["algorithm"]["lr_lower"] == 0.2
    assert two["task"] == {"name": "quadratic", "num_clients": 4, "upper": "private"}
    assert one.settings("two", "fedbio", quick=True)["num_iterations"] == 3
    assert one.places() == [("one", "fedbio"), ("one", "aggitd"), ("two", "fedbio")]
    assert one.places(quick=True) == [("one", "fedbio"), ("one", "aggitd")]
    assert [job.key for job in one.jobs(rows=["fedbio"], repetitions=2)] == [
        "one--fedbio--0",
        "two--fedbio--0",
        "one--fedbio--1",
        "two--fedbio--1",
    ]
    assert len(one.jobs(quick=True)) == 2


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("repetitions = 3", "repetition = 3", "Did you mean 'repetitions'"),
        ("[rows.fedbio]", "[rows.fedbio]\nsetting = 1", "Did you mean 'settings'"),
        ("in.two.algorithm", "in.twoo.algorithm", "Did you mean 'two'"),
        ("paper.one = {rounds_to_target", "paper.one = {rounds_to_targit", "Did you mean 'rounds_to_target'"),
        ('only = ["one"]', 'only = ["ones"]', "Did you mean 'one'"),
        ('panels = ["one"]', 'panels = ["none"]', "There is no entry in quick.panels"),
        ('title = "Distance to the solution"', "", "has no 'title'"),
        ("[figures]", "[figures", "cannot be read as TOML"),
        ("repetitions = 3", 'repetitions = "3"', "repetitions is '3', expected a whole number, at least 1"),
        ("repetitions = 3", "repetitions = -3", "repetitions is -3, expected a whole number"),
        ("[panels.one]", '[panels."../one"]', "'../one' is not a valid name"),
        ("[panels.one]", "[panels.one--two]", "'one--two' is not a valid name"),
        ('rounds_to_target = "rounds"', "rounds_to_target = 3", "figures.rounds_to_target is 3, expected text"),
        ('only = ["one"]', "only = 1", "rows.aggitd.only is 1, expected a list of names"),
        ("paper.one = {rounds_to_target = 7", 'paper.one = {rounds_to_target = "7"', "expected a number"),
        ('y = "upper_loss"', "", "expected x and y"),
        ('y = "upper_loss"', 'y = "upper_loss"\nlog = ["z"]', "log with 'x', 'y' or both"),
        ("[quick]", 'extends = "small"\n[quick]', "There is no entry in rows.aggitd"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(small, old, new, named):
    small.write_text(small.read_text().replace(old, new, 1))
    with pytest.raises(FedBilevelError, match=named):
        experiment.read(small)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"algorithm": {"name": "fedbio", "lr_lowr": 1.0}},
            "no setting of FedBiO named 'lr_lowr'. Did you mean 'lr_lower'",
        ),
        ({"algorithm": {"name": "fedbia"}}, "Did you mean 'fedbio'"),
        ({"task": {"name": "quadratic", "dims": 3}}, "no setting of Quadratic named 'dims'"),
        ({"task": {}}, "expected .name = ..., and its settings"),
        ({"options": {"fractoin": 0.1}}, "Did you mean 'fraction'"),
        ({"options": {"dtype": "half"}}, "dtype is 'half'"),
        ({"num_itertions": 3}, "Did you mean 'num_iterations'"),
        ({"num_iterations": "3"}, "num_iterations is '3', expected a whole number"),
        ({"options": {"fraction": "0.1"}}, "fraction is '0.1', expected a number"),
        ({"options": {"device": "cuda"}}, "--device cuda"),
        ({"target": 0.9}, "target is 0.9, expected text"),
        ({"target": "loss=1"}, "no metric named 'loss'"),
    ],
)
def test_what_is_wrong_in_a_row_is_named(tmp_path, change, named):
    row = {"task": {"name": "quadratic"}, "algorithm": {"name": "fedbio"}, "num_iterations": 1, **change}
    with pytest.raises(FedBilevelError, match=named):
        optimise.run(row, repetition=0, folder=tmp_path / "r", device="cpu", say=print)
    with pytest.raises(ExperimentError, match="needs num_iterations or num_rounds to end"):
        optimise.run(
            {"task": {"name": "quadratic"}, "algorithm": {"name": "fedbio"}},
            repetition=0,
            folder=tmp_path / "r",
            device="cpu",
            say=print,
        )


def test_a_row_is_the_run_that_its_settings_say(small, tmp_path):
    job = experiment.read(small).jobs(rows=["fedbio"], panels=["one"])[1]
    got = optimise.run(job.settings, repetition=job.repetition, folder=tmp_path / "r", device="cpu", say=lambda _: None)
    task = Quadratic(num_clients=4).repeated(1)
    options = {"seed": 1, "batch_size": 2, "cohort": Cohort(0.5), "measure_every": 1, "dtype": torch.float64}
    rows = solve(
        *task.build(), FedBiO(lr_lower=0.1, num_local_steps=2), residuals=False, num_iterations=12, **options
    ).rows
    assert [point["upper_loss"] for point in got.curve] == [row["upper_loss"] for row in rows]
    assert got.figures["upper_loss"] == rows[-1]["upper_loss"]
    assert got.figures["rounds"] == rows[-1]["rounds"] == 12
    assert got.figures["megabytes"] == rows[-1]["megabytes"]


def test_the_target_is_the_first_measurement_beyond_it_and_may_end_the_run(small, tmp_path):
    settings = experiment.read(small).settings("one", "fedbio")
    go = lambda folder, **change: optimise.run(
        {**settings, **change}, repetition=0, folder=tmp_path / folder, device="cpu", say=lambda _: None
    )
    whole = go("whole")
    value = float(settings["target"].partition("=")[2])
    first = next(point for point in whole.curve if point["upper_loss"] <= value)
    assert 0 < first["rounds"] < 12
    assert whole.figures["rounds_to_target"] == first["rounds"]
    assert go("short", stop_at_target=True).figures["rounds"] == first["rounds"]
    assert go("bounded", num_rounds=5).figures["rounds"] == 5
    never = go("never", target="upper_loss=-1e9")
    assert "rounds_to_target" not in never.figures
    assert never.figures["upper_loss"] == whole.figures["upper_loss"]


def test_a_run_that_explodes_is_an_outcome_without_figures(tmp_path):
    row = {
        "task": {"name": "quadratic"},
        "algorithm": {"name": "fedbio", "lr_lower": 1e6},
        "num_iterations": 50,
        "measure_every": 1,
        "target": "upper_loss=0",
    }
    got = optimise.run(row, repetition=0, folder=tmp_path / "r", device="cpu", say=lambda _: None)
    assert got.figures["diverged"] == 1.0
    assert "upper_loss" not in got.figures
    assert got.figures["rounds"] == got.curve[-1]["rounds"]  # what it cost is counted
    assert got.curve[0]["rounds"] == 0


def test_what_is_done_is_not_run_again_and_what_changed_is(small, tmp_path, monkeypatch):
    ran = []
    real = optimise.run
    monkeypatch.setattr(optimise, "run", lambda row, **options: (ran.append(row["algorithm"]), real(row, **options))[1])
    one, folder = experiment.read(small), tmp_path / "out"
    found = reproduce.reproduce(one.jobs(), folder)
    assert len(ran) == len(found) == 9
    again = reproduce.reproduce(one.jobs(), folder)
    assert len(ran) == 9
    assert [content for _, content in again] == [content for _, content in found]
    small.write_text(
        small.read_text().replace("in.two.algorithm = {lr_lower = 0.2}", "in.two.algorithm = {lr_lower = 0.3}")
    )
    reproduce.reproduce(experiment.read(small).jobs(), folder)
    assert ran[9:] == [{"name": "fedbio", "lr_lower": 0.3, "num_local_steps": 2}] * 3
    assert not [path for path in folder.iterdir() if path.is_dir()]  # checkpoints go when results are there


def test_a_job_that_was_cut_short_after_its_last_measurement_is_not_run_further(tmp_path):
    row = {
        "task": {"name": "quadratic"},
        "algorithm": {"name": "fbo_aggitd"},
        "num_rounds": 20,
        "measure_every": 1,
        "target": "upper_loss=0",
        "checkpoint_every": 1,
    }
    go = lambda: optimise.run(row, repetition=0, folder=tmp_path / "r", device="cpu", say=lambda _: None)
    first = go()
    assert first.figures["rounds"] == 26
    assert go() == first


def test_the_side_of_a_target_is_that_of_the_start_though_nobody_watched_it(small, tmp_path):
    settings = experiment.read(small).settings("one", "fedbio")
    row = {
        **settings,
        "measure_every": 10,
        "stop_at_target": True,
        "num_iterations": 60,
    }  # past the target at the first measurement after the start
    assert (
        optimise.run(row, repetition=0, folder=tmp_path / "r", device="cpu", say=lambda _: None).figures["rounds"] == 10
    )


def test_a_misspelt_target_is_found_at_the_first_measurement(tmp_path):
    seen = []
    row = {
        "task": {"name": "quadratic"},
        "algorithm": {"name": "fedbio"},
        "num_iterations": 50,
        "measure_every": 1,
        "target": "los=1",
        "stop_at_target": True,
    }
    with pytest.raises(SettingError, match="no metric named 'los'"):
        optimise.run(row, repetition=0, folder=tmp_path / "r", device="cpu", say=seen.append)
    assert len(seen) == 0


def test_a_row_named_twice_counts_once(small, tmp_path):
    one = experiment.read(small)
    assert one.places(rows=["fedbio", "fedbio"], panels=["one"]) == [("one", "fedbio")]
    jobs = one.jobs(rows=["fedbio"], panels=["one"], repetitions=1)
    assert len(reproduce.reproduce(jobs * 2, tmp_path / "out")) == 1
    with pytest.raises(ExperimentError, match="has none of the rows aggitd in two"):
        one.places(rows=["aggitd"], panels=["two"])


def test_quick_changes_of_an_algorithm_hold_for_rows_that_have_the_setting(small):
    small.write_text(
        small.read_text().replace(
            "settings.num_iterations = 3", "settings = {num_iterations = 3, algorithm = {num_local_steps = 1}}"
        )
    )
    one = experiment.read(small)
    assert one.settings("one", "fedbio", quick=True)["algorithm"]["num_local_steps"] == 1
    assert one.settings("one", "aggitd", quick=True)["algorithm"] == {"name": "fbo_aggitd"}


def test_an_interrupted_job_goes_on_from_its_checkpoint(small, tmp_path, monkeypatch):
    job = experiment.read(small).jobs(rows=["fedbio"], panels=["one"])[0]
    job = Job(job.panel, job.row, job.repetition, job.study, {**job.settings, "checkpoint_every": 1})
    reproduce.reproduce([job], tmp_path / "whole")

    def stop(text):
        if "iteration 7," in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce([job], tmp_path / "cut", say=stop)
    assert (tmp_path / "cut" / job.key / "checkpoint.safetensors").exists()
    seen = []
    reproduce.reproduce([job], tmp_path / "cut", say=seen.append)
    assert any("iteration 7," in text for text in seen)
    assert not any("iteration 6," in text for text in seen)
    whole, cut = (json.loads((tmp_path / name / f"{job.key}.json").read_text()) for name in ("whole", "cut"))
    timeless = lambda content: [
        {name: value for name, value in point.items() if name != "seconds"} for point in content["curve"]
    ]
    assert timeless(whole) == timeless(cut)


def test_several_processes_give_the_same_results_and_name_what_fails(small, tmp_path):
    jobs = experiment.read(small).jobs(rows=["fedbio"], repetitions=1)
    one, two = (reproduce.reproduce(jobs, tmp_path / str(number), processes=number) for number in (1, 2))
    for (_, alone), (_, together) in zip(one, two, strict=True):
        assert {**alone["figures"], "seconds": 0, "seconds_to_target": 0} == {
            **together["figures"],
            "seconds": 0,
            "seconds_to_target": 0,
        }
    bad = [
        Job("one", name, 0, "optimise", {**jobs[0].settings, "algorithm": {"name": name}})
        for name in ("fedbia", "fedbib")
    ]
    with pytest.raises(ExperimentError, match=r"one--fedbi.--0: There is no algorithm named 'fedbi.'"):
        reproduce.reproduce(bad, tmp_path / "bad", processes=2)


def test_a_damaged_result_is_refused_by_name_and_an_unknown_study_before_anything_runs(small, tmp_path):
    jobs = experiment.read(small).jobs(rows=["fedbio"], panels=["one"], repetitions=1)
    (tmp_path / f"{jobs[0].key}.json").write_text('{"figures": {')
    with pytest.raises(ExperimentError, match=f"{jobs[0].key}.json does not hold a result"):
        reproduce.reproduce(jobs, tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean 'optimise'"):
        reproduce.reproduce([Job("one", "r", 0, "optimize", {})], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_means_are_over_the_repetitions_that_have_the_figure():
    jobs = [Job("p", "r", number, "optimise", {}) for number in range(3)]
    contents = [{"figures": {"a": 1.0, "b": 2.0}}, {"figures": {"a": 4.0, "b": math.nan}}, {"figures": {"a": 7.0}}]
    figures = reproduce.summary(list(zip(jobs, contents, strict=True)))["p", "r"]
    assert figures == {"a": (4.0, 3.0, 3), "b": (2.0, 0.0, 1), "repetitions": (1.0, 0.0, 3)}


def test_ours_stand_beside_theirs_with_the_difference(small):
    one = experiment.read(small)
    three = {"repetitions": reproduce.Figure(1.0, 0.0, 3)}
    figures = {
        "rounds_to_target": reproduce.Figure(9.0, 1.0, 2),
        "upper_loss": reproduce.Figure(0.625, 0.01, 3),
        **three,
    }
    exploded = {"diverged": reproduce.Figure(1.0, 0.0, 3), **three}
    table = tables.reproduction(
        one, {("one", "fedbio"): figures, ("one", "aggitd"): exploded, ("two", "fedbio"): figures}
    )
    assert [part.title for part in table] == ["Distance to the solution: one", "Distance to the solution: a private x"]
    cells = [list(column.cells) for column in table[0].columns]
    assert cells == [
        ["FedBiO", "aggitd"],
        ["9 +-1 [2 of 3] (7; +2)", "diverged"],
        ["62.50 +-1.00 (50.00; +12.5)", "diverged"],
    ]
    assert list(table[1].columns[1].cells) == ["9 +-1 [2 of 3]"]


def test_a_result_is_written_into_the_file_and_nothing_else_changes(small, tmp_path):
    before, one = small.read_text(), experiment.read(small)
    found = reproduce.reproduce(one.jobs(), tmp_path / "out")
    reproduce.record(one, found)
    text = small.read_text()
    assert text.startswith(before.rstrip("\n"))
    entry = tomllib.loads(text)["result"]["one"]["fedbio"]
    seconds = [content["seconds"] for job, content in found if (job.panel, job.row) == ("one", "fedbio")]
    assert entry["seconds"] == pytest.approx(sum(seconds), rel=1e-5)
    losses = [content["figures"]["upper_loss"] for job, content in found if (job.panel, job.row) == ("one", "fedbio")]
    loss = entry["figures"]["upper_loss"]
    assert entry["repetitions"] == loss["runs"] == 3
    assert loss["mean"] == pytest.approx(statistics.fmean(losses), rel=1e-5)
    assert loss["deviation"] == pytest.approx(statistics.stdev(losses), rel=1e-5)
    assert entry["commit"] == provenance.commit()
    assert entry["machine"] == provenance.machine("cpu")
    with pytest.raises(ExperimentError, match="holds 3 repetitions of fedbio in one, these are 1"):
        reproduce.record(experiment.read(small), found[:1])
    assert small.read_text() == text
    curves = json.loads((small.parent / "curves.json").read_text())
    assert [point["rounds"] for point in curves["two"]["fedbio"][0]] == list(range(13))
    assert set(curves["two"]["fedbio"][0][0]) == {"rounds", "upper_loss"}
    small.write_text(
        small.read_text().replace("lr_lower = 0.2", "lr_lower = 0.25")
    )  # one row again: the others keep their results
    again = experiment.read(small)
    reproduce.record(again, reproduce.reproduce(again.jobs(panels=["two"]), tmp_path / "out"))
    new = tomllib.loads(small.read_text())["result"]
    assert new["one"]["fedbio"] == entry
    assert (
        new["two"]["fedbio"]["figures"]["upper_loss"]
        != tomllib.loads(text)["result"]["two"]["fedbio"]["figures"]["upper_loss"]
    )


def test_further_repetitions_extend_a_record_as_if_all_had_run_at_once(small, tmp_path):
    small.write_text(small.read_text() + '\n[verdict]\nrows = ["fedbio"]\nfigure = "upper_loss"\n')
    whole, one = small.read_text(), experiment.read(small)
    jobs = one.jobs(panels=["one"], repetitions=5)
    found = reproduce.reproduce(jobs, tmp_path / "out")
    reproduce.record(one, found)
    at_once = tomllib.loads(small.read_text())["result"]["one"]
    lines = json.loads((small.parent / "curves.json").read_text())
    (small.parent / "curves.json").unlink()
    small.write_text(whole)
    for first, last in ((0, 2), (2, 3), (3, 5)):
        now = experiment.read(small)
        assert {job.repetition for job in extension.unrecorded(now, jobs)} == set(range(first, 5))
        reproduce.record(now, [(job, content) for job, content in found if first <= job.repetition < last])
    extended = tomllib.loads(small.read_text())["result"]["one"]
    for row, entry in at_once.items():
        assert extended[row]["repetitions"] == 5
        assert extended[row]["values"] == entry["values"]
        assert extended[row]["seconds"] == pytest.approx(entry["seconds"], rel=1e-4)
        for name, figure in entry["figures"].items():
            assert extended[row]["figures"][name] == pytest.approx(figure, rel=1e-4, abs=1e-6)  # six digits
    assert json.loads((small.parent / "curves.json").read_text()) == lines
    with pytest.raises(ExperimentError, match="holds 5 repetitions of fedbio in one, and these are the repetitions 4"):
        reproduce.record(experiment.read(small), [pair for pair in found if pair[0].repetition == 4])


def test_extended_values_keep_the_numbers_of_repetitions_that_failed():
    figure = {"mean": 2.0, "deviation": 0.0, "runs": 1}
    entry = {"settings": "a", "commit": "b", "machine": "c, 2 cores", "time": "d", "seconds": 1.0}
    entry["figures"] = {"f": figure}
    before = {**entry, "repetitions": 2, "values": [2.0], "repeated": [1]}
    now = {**entry, "repetitions": 3, "values": [4.0, 6.0], "repeated": [0, 2]}
    now["commit"] = "a, b"
    now["figures"] = {"f": {"mean": 5.0, "deviation": math.sqrt(2), "runs": 2}}
    found = extension.joined(before, now)
    assert (found["values"], found["repeated"], found["repetitions"]) == ([2.0, 4.0, 6.0], [1, 2, 4], 5)
    assert (found["commit"], found["machine"]) == ("a, b", "c, 2 cores")
    assert extension.joined(before, {**now, "machine": "d"})["machine"] == "c, 2 cores, d"
    assert found["figures"]["f"] == pytest.approx({"mean": 4.0, "deviation": 2.0, "runs": 3})


def test_rows_of_one_title_have_a_line_each_and_rows_without_the_axes_have_none(small, tmp_path, monkeypatch):
    small.write_text(
        small.read_text()
        .replace('title = "FedBiO"', 'title = "same"')
        .replace("[rows.aggitd]", '[rows.aggitd]\ntitle = "same"')
    )
    drawn = {}
    monkeypatch.setattr(plots, "lines", lambda curves, path, **_: drawn.update(curves))
    line = [{"rounds": 1.0, "upper_loss": 2.0}]
    one = experiment.read(small)
    assert pictures.draw_panel(one, "one", {"fedbio": [line], "aggitd": [line, [{"rounds": 1.0}]]}, tmp_path / "p.png")
    assert drawn == {"fedbio": [line], "aggitd": [line, []]}
    assert not pictures.draw_panel(one, "one", {"fedbio": [[{"terms": 1.0}]]}, tmp_path / "p.png")


def test_lines_are_thinned_but_keep_their_ends():
    curve = [{"rounds": float(number)} for number in range(1000)]
    thin = reproduce._thinned(curve)
    assert len(thin) == 60
    assert (thin[0], thin[-1]) == (curve[0], curve[-1])
    assert reproduce._thinned(curve[:60]) == curve[:60]


def test_an_experiment_may_extend_another_and_borrow_rows(small):
    beside = small.parent.parent / "other" / "experiment.toml"
    beside.parent.mkdir()
    beside.write_text(
        'title = "T"\nsource = "S"\nextends = "small"\n'
        'select = {panels = ["two", "three"], rows = ["fedbio", "aggitd", "mine"]}\n'
        "settings.num_iterations = 5\n[panels.three]\n[rows.fedbio]\nsettings.algorithm.lr_upper = 0.5\n"
        '[rows.mine]\nfrom.three = "small.one.aggitd"\nsettings.algorithm.lr_upper = 0.25\n'
    )
    other, one = experiment.read(beside), experiment.read(small)
    assert other.places() == [
        ("two", "fedbio"),
        ("two", "aggitd"),
        ("two", "mine"),
        ("three", "fedbio"),
        ("three", "aggitd"),
        ("three", "mine"),
    ]
    assert other.settings("two", "fedbio")["algorithm"] == {
        "name": "fedbio",
        "lr_lower": 0.2,
        "num_local_steps": 2,
        "lr_upper": 0.5,
    }
    assert other.settings("two", "fedbio")["num_iterations"] == 5
    borrowed = other.settings("three", "mine")
    assert borrowed == {**one.settings("one", "aggitd"), "algorithm": {"name": "fbo_aggitd", "lr_upper": 0.25}}
    assert other.paper("two", "fedbio") == {}
    assert other.content["figures"] == one.content["figures"]
    for old, new, named in (
        ("small.one.aggitd", "small.one", "expected EXPERIMENT.PANEL.ROW"),
        ("small.one.aggitd", "small.two.aggitd", "no row of small named 'two.aggitd'"),
        ('"mine"]', '"mime"]', "Did you mean 'mine'"),
        ("{panels =", "{panel =", "Did you mean 'panels'"),
        ('extends = "small"', 'extends = "big"', "cannot be read"),
    ):
        (beside.parent / "bad.toml").write_text(beside.read_text().replace(old, new))
        with pytest.raises(FedBilevelError, match=named):
            experiment.read(beside.parent / "bad.toml").settings("three", "mine")


def test_steps_that_were_found_hold_in_an_extension_unless_it_says_otherwise(small, tmp_path):
    tune.write(experiment.read(small), tune.tune(experiment.read(small), tmp_path / "t", panel="two", row="fedbio"))
    found = experiment.read(small).settings("two", "fedbio")["algorithm"]["lr_lower"]
    beside = small.parent.parent / "other" / "experiment.toml"
    beside.parent.mkdir()
    beside.write_text('title = "T"\nsource = "S"\nextends = "small"\n')
    assert experiment.read(beside).settings("two", "fedbio")["algorithm"]["lr_lower"] == found
    assert experiment.read(beside).settings("one", "fedbio")["algorithm"]["lr_lower"] == 0.1
    beside.write_text(beside.read_text() + "[rows.fedbio.in.two.algorithm]\nlr_lower = 0.77\n")
    assert experiment.read(beside).settings("two", "fedbio")["algorithm"]["lr_lower"] == 0.77
    beside.write_text('title = "T"\nsource = "S"\nextends = "other"\n')
    with pytest.raises(ExperimentError, match="extends itself"):
        experiment.read(beside)


def test_a_file_in_a_form_that_cannot_be_added_to_is_left_alone(small, tmp_path):
    small.write_text("tuned = {}\n" + small.read_text())
    before, one = small.read_text(), experiment.read(small)
    with pytest.raises((ExperimentError, SettingError), match="form that cannot be added to"):
        tune.write(one, tune.tune(one, tmp_path / "t", panel="two", row="fedbio"))
    assert small.read_text() == before


def test_a_row_with_a_study_of_its_own_takes_only_the_task_from_what_is_common(small):
    small.write_text(small.read_text() + '\n[rows.reference]\nstudy = "confident_learning"\nsettings.keep = "clean"\n')
    job = experiment.read(small).jobs(rows=["reference"], panels=["two"], quick=True)[0]
    assert job.study == "confident_learning"
    assert job.settings == {"task": {"name": "quadratic", "num_clients": 4, "upper": "private"}, "keep": "clean"}


def test_recorded_results_are_printed_as_a_table(small, tmp_path):
    one = experiment.read(small)
    assert "|" not in tables.recorded(one)
    reproduce.record(one, reproduce.reproduce(one.jobs(panels=["one"]), tmp_path / "out"))
    text = tables.recorded(experiment.read(small))
    entry = tomllib.loads(small.read_text())["result"]["one"]["fedbio"]
    loss = entry["figures"]["upper_loss"]
    assert (
        f"{100 * loss['mean']:.2f} +-{100 * loss['deviation']:.2f} (50.00; {100 * (loss['mean'] - 0.5):+.4g})" in text
    )
    assert "a private x" not in text
    assert f"Run at {entry['commit']} on {entry['machine']}, {entry['time'][:10]}." in text


# ---- tuning --------------------------------------------------------------------------------------


def test_a_grid_is_tried_on_other_data_and_the_best_is_written_into_the_file(small, tmp_path):
    one = experiment.read(small)
    chosen = tune.tune(one, tmp_path / "tune", panel="two", row="fedbio")
    assert [trial.values for trial in chosen.trials] == [{"algorithm.lr_lower": 0.1}, {"algorithm.lr_lower": 0.3}]
    means = {}
    for lr in (0.1, 0.3):
        settings = experiment.merged(one.settings("two", "fedbio"), {"algorithm": {"lr_lower": lr}})
        losses = [
            optimise.run(
                settings, repetition=r, folder=tmp_path / f"{lr}-{r}", device="cpu", say=lambda _: None
            ).figures["upper_loss"]
            for r in (100, 101)
        ]
        means[lr] = statistics.fmean(losses)
    assert [trial.figures["upper_loss"] for trial in chosen.trials] == pytest.approx(list(means.values()), rel=1e-12)
    best = max(means, key=means.__getitem__)  # maximise: of a loss only to see that the direction is obeyed
    assert chosen.best.values == {"algorithm.lr_lower": best}
    assert chosen.rounds == 2 * 2 * 12
    tune.write(one, chosen)
    assert "# a remark that must survive" in small.read_text()
    new = experiment.read(small)
    assert new.settings("two", "fedbio")["algorithm"]["lr_lower"] == best
    assert new.settings("one", "fedbio") == one.settings("one", "fedbio")
    about = new.content["tuned"]["two"]["fedbio"]
    assert (about["figure"], about["trials"], about["rounds"]) == ("upper_loss", 2, 48)
    assert about["reached"] == pytest.approx(means[best])


def test_one_search_may_hold_for_all_panels(small, tmp_path):
    small.write_text(small.read_text().replace("[tune]", '[tune]\npanel = "one"'))
    assert invoke("tune", small, "--out", tmp_path / "t").exit_code == 0
    new = experiment.read(small)
    assert list(new.content["tuned"]) == ["one"]
    assert list(new.content["tuned"]["one"]) == ["fedbio"]
    chosen = new.content["tuned"]["one"]["fedbio"]["settings"]["algorithm"]["lr_lower"]
    assert {new.settings(panel, "fedbio")["algorithm"]["lr_lower"] for panel in ("one", "two")} == {chosen}
    small.write_text(small.read_text().replace('panel = "one"', 'panel = "ones"'))
    with pytest.raises(UnknownNameError, match="Did you mean 'one'"):
        tune.tune(experiment.read(small), tmp_path / "t", panel="one", row="fedbio")


def test_the_ledgers_budget_ends_the_search(small, tmp_path):
    small.write_text(small.read_text().replace("repetitions = 2\n", "repetitions = 2\nmax_rounds = 20\n"))
    assert len(tune.tune(experiment.read(small), tmp_path / "tune", panel="one", row="fedbio").trials) == 1


def test_trials_without_the_figure_are_ranked_by_how_far_they_got():
    plan, figure = (
        {"minimise": "rounds_to_target", "otherwise": "accuracy"},
        lambda value, runs=2: reproduce.Figure(value, 0.0, runs),
    )
    ordered = [
        {"rounds_to_target": figure(5.0), "accuracy": figure(0.2)},
        {"rounds_to_target": figure(9.0), "accuracy": figure(0.9)},
        {"rounds_to_target": figure(3.0, 1), "accuracy": figure(0.8)},
        {"accuracy": figure(0.8)},
        {"accuracy": figure(0.1)},
        {"diverged": figure(1.0)},
    ]
    scores = [tune._score(plan, figures, 2) for figures in ordered]
    large = [{"rounds_to_target": figure(5.0), "accuracy": figure(30.0)}, {"accuracy": figure(1e6)}]
    assert tune._score(plan, large[0], 2) < tune._score(plan, large[1], 2)
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_ranges_are_searched_by_optuna_the_same_way_twice(small, tmp_path):
    pytest.importorskip("optuna")
    ranges = (
        'trials = 4\nranges = {"algorithm.lr_lower" = {low = 0.01, high = 1.0}, "algorithm.num_local_steps" = [1, 2]}'
    )
    small.write_text(
        small.read_text()
        .replace('ranges = {"algorithm.lr_lower" = [0.1, 0.3]}', ranges)
        .replace("repetitions = 2", "repetitions = 1")
    )
    one = experiment.read(small)
    first, second = (tune.tune(one, tmp_path / name, panel="one", row="fedbio") for name in ("a", "b"))
    assert [trial.values for trial in first.trials] == [trial.values for trial in second.trials]
    assert len({trial.values["algorithm.lr_lower"] for trial in first.trials}) == 4
    assert all(0.01 <= trial.values["algorithm.lr_lower"] <= 1 for trial in first.trials)
    assert (
        tune.ranges_of(one, "one", "aggitd") == {}
    )  # what a row does not have is not searched, unless its own ranges name it


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('maximise = "upper_loss"', "", "needs either minimise = FIGURE or maximise = FIGURE"),
        ("repetitions = 2", "repetitons = 2", "Did you mean 'repetitions'"),
        ("[tune]", "[tune]\nrows.fedbo = {}", "Did you mean 'fedbio'"),
        ('"algorithm.lr_lower" = [0.1, 0.3]', '"algorithm.lr_lowr" = [0.1, 0.3]', "Did you mean 'algorithm.lr_lower'"),
        ('maximise = "upper_loss"', 'maximise = "uper_loss"', "Did you mean 'upper_loss'"),
        ('"algorithm.lr_lower" = [0.1, 0.3]', '"algorithm.lr_lower" = {low = 2, high = 1}', "expected low <= high"),
        ('"algorithm.lr_lower" = [0.1, 0.3]', '"algorithm.lr_lower" = 0.1', "expected a list of values"),
        ("repetitions = 2", "repetitions = 0", "tune.repetitions is 0, expected a whole number, at least 1"),
        ('ranges = {"algorithm.lr_lower" = [0.1, 0.3]}', "", "declares no ranges for the row 'fedbio'"),
        ('"algorithm.lr_lower" = [0.1, 0.3]', '"algorithm.lr_lower" = {lo = 1, high = 2}', "Did you mean 'low'"),
    ],
)
def test_what_is_wrong_in_a_search_is_named(small, tmp_path, old, new, named):
    small.write_text(small.read_text().replace(old, new, 1))
    with pytest.raises(FedBilevelError, match=named):
        tune.tune(experiment.read(small), tmp_path / "t", panel="one", row="fedbio")


def test_without_optuna_a_range_says_what_to_install(small, tmp_path, monkeypatch):
    monkeypatch.setattr(row_searches, "find_spec", lambda name: None)
    small.write_text(small.read_text().replace("[0.1, 0.3]", "{low = 0.1, high = 0.3}"))
    with pytest.raises(SettingError, match=r"pip install 'fedbilevel\[tune\]'"):
        tune.tune(experiment.read(small), tmp_path / "t", panel="one", row="fedbio")


# ---- the commands --------------------------------------------------------------------------------


def invoke(*words):
    return CliRunner().invoke(main.cli, [str(word) for word in words])


def test_the_command_runs_prints_draws_records_and_tunes(small, tmp_path):
    result = invoke("reproduce", small, "--quick", "--out", tmp_path / "q")
    assert result.exit_code == 0, result.output
    assert "FedBiO" in result.output
    assert "Do not compare its figures with the paper's" in result.output
    assert "(7;" in result.output or "not reached (7)" in result.output
    assert plots.available()
    assert (tmp_path / "q" / "one.png").read_bytes().startswith(b"\x89PNG")
    assert "result" not in tomllib.loads(small.read_text())
    assert isinstance(invoke("reproduce", small, "--quick", "--record").exception, SettingError)
    assert invoke("tune", small, "--rows", "fedbio", "--panels", "one", "--out", tmp_path / "t").exit_code == 0
    assert experiment.read(small).content["tuned"]["one"]["fedbio"]["trials"] == 2
    result = invoke("reproduce", small, "--out", tmp_path / "r", "--record", "--panels", "two")
    assert result.exit_code == 0, result.output
    assert list(tomllib.loads(small.read_text())["result"]) == ["two"]


def test_experiments_are_listed_and_misspelt_ones_suggested():
    result = invoke("reproduce")
    assert result.exit_code == 0
    assert "aggitd-table2" in result.output
    assert "Did you mean 'aggitd-table2'" in str(invoke("reproduce", "aggitd-tabel2").exception)
