"""The benchmark of not tuning: searches continue from their files, and the table counts what it says."""

from __future__ import annotations

import json
import math

import pytest

import fedbilevel as fb
from benchmarks.untuned import __main__ as command
from benchmarks.untuned import table
from benchmarks.untuned.new_user import PROBLEMS
from benchmarks.untuned.pairs import PAIRS, Pair
from benchmarks.untuned.search import NUM_WHOLE, RANGES, Scales, _median_rule, best, run, search, settings_of, suggested
from fedbilevel import discovery
from fedbilevel.errors import DataError
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.quadratic import Quadratic

TINY = Pair(Quadratic(num_clients=2, bend=0.5), "upper_loss", 8, "tiny", maximise=False)
STEPS = {"lr_upper": 0.05, "lr_lower": 0.1, "lr_system": 0.1, "num_local_steps": 1}


def test_there_are_enough_pairs_of_all_kinds():
    tasks = {pair.task.name() for pair in PAIRS.values()}
    without = {
        "adapters",  # has rivals of its own, and minutes per search
        "influence",  # predicts removals and has nothing to optimise
        "classification",  # has one level but for a weight decay
        "few_shot_episodes",  # solves its heads in closed form
        "representation",  # has own heads, as representation-digits-local
    }
    assert tasks == set(discovery.tasks()) - without
    with_files = [name for name, pair in PAIRS.items() if getattr(pair.task, "data", None) == "fashion"]
    assert len(PAIRS) - len(with_files) >= 14


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair.task.name() != "few_shot"])
def test_every_pair_measures_its_figure(name):
    pair = PAIRS[name]
    if (why := pair.missing()) is not None:
        pytest.skip(why)
    given = {"lr_upper": 1e-6, "lr_lower": 1e-6, "lr_system": 1e-6, "num_local_steps": 1}
    built = pair.task.repeated(1).build()
    row = fb.solve(*built, "fedbio", num_rounds=1, residuals=False, strategy="vmap", **pair.options, **given).rows[-1]
    assert math.isfinite(row[pair.figure])
    assert pair.centre > 0


@pytest.mark.parametrize("algorithm", RANGES)
def test_searched_values_are_settings_of_the_algorithm_and_begin_near_the_suggestions(algorithm):
    of = Scales(upper=10.0, curvature=4.0)
    pair = PAIRS["regularisation-mixture"]
    ranges = RANGES[algorithm](of)
    values = suggested(pair, algorithm, ranges)
    settings = settings_of(algorithm, values, of)
    chosen = discovery.algorithm(algorithm)(**settings)
    if algorithm == "adasimfbo":
        assert chosen.lr_lower * chosen.server_lr_lower == pytest.approx(values["gamma_lower"])
    elif algorithm == "fbo_aggitd":
        assert (chosen.lr_upper, chosen.lr_lower) == (50.0, 0.5)
    else:
        assert (chosen.lr_upper, chosen.lr_lower) == (10.0, 0.5)
    for name, kind in ranges.items():
        assert kind._contains(kind.to_internal_repr(values[name]))


def test_a_run_that_diverges_has_the_figure_of_its_start():
    sound = run(TINY, "fedbio", STEPS, 3)
    lost = run(TINY, "fedbio", {**STEPS, "lr_lower": 50.0}, 3)
    closed = run(PAIRS["quadratic"], "fedbio", {**STEPS, "lr_lower": 50.0}, 3)
    assert closed.diverged
    assert math.isfinite(closed.figure)
    assert not sound.diverged
    assert sound.rounds == 8
    assert lost.diverged
    start = Population(*TINY.task.repeated(3).build())
    assert lost.figure == pytest.approx(start.measure(start.x0, start.y0)["upper_loss"])
    assert lost.figure > sound.figure


def test_a_search_continues_from_its_file_and_a_diverged_trial_is_never_the_best(tmp_path):
    place = tmp_path / "tune.json"
    search(TINY, "tiny", "fedbio", place, num_trials=2, deadline=math.inf)
    first = json.loads(place.read_text())["trials"]
    search(TINY, "tiny", "fedbio", place, num_trials=4, deadline=math.inf)
    trials = json.loads(place.read_text())["trials"]
    assert trials[:2] == first
    assert len(trials) == 4
    assert trials[0]["values"]["lr_upper"] == pytest.approx(TINY.centre)
    search(TINY, "tiny", "fedbio", place, num_trials=9, deadline=0.0)
    assert json.loads(place.read_text())["trials"] == trials
    content = json.loads(place.read_text())
    content["trials"] = [
        {"settings": {"lr_lower": 1}, "figure": -math.inf, "diverged": True, "pruned": False},
        {"settings": {"lr_lower": 2}, "figure": 7.0, "diverged": False, "pruned": False},
        {"settings": {"lr_lower": 3}, "figure": 5.0, "diverged": False, "pruned": False},
        {"settings": {"lr_lower": 4}, "figure": 3.0, "diverged": False, "pruned": True},
    ]
    place.write_text(json.dumps(content))
    assert best(TINY, place) == {"lr_lower": 3}


def test_a_run_ends_halfway_if_it_is_hopeless_there():
    whole = run(TINY, "fedbio", STEPS, 3, hopeless=lambda halfway: halfway > 1e9)
    assert (whole.rounds, whole.pruned, whole.diverged) == (8, False, False)
    assert whole.figure < whole.halfway
    cut = run(TINY, "fedbio", STEPS, 3, hopeless=lambda halfway: halfway == whole.halfway)
    assert (cut.rounds, cut.pruned, cut.diverged) == (4, True, False)
    assert cut.figure == whole.halfway


@pytest.mark.parametrize(("maximise", "worse"), [(True, 0.4), (False, 0.6)])
def test_only_late_trials_below_the_median_are_hopeless(maximise, worse):
    pair = Pair(Quadratic(), "test_accuracy", 9, "about it", maximise=maximise)
    trials = [{"halfway": value, "diverged": False} for value in (0.1, 0.5, 0.9)] + [
        {"halfway": None, "diverged": True}
    ] * NUM_WHOLE
    rule = _median_rule(pair, trials)
    assert rule(worse)
    assert not rule(0.5)
    assert not rule(1 - worse)
    assert not _median_rule(pair, trials[:4])(worse)


def test_the_table_compares_with_the_best_rival_and_counts_runs_that_diverged(tmp_path):
    accurate = Pair(Quadratic(), "test_accuracy", 9, "about it")
    lossy = Pair(Quadratic(), "test_loss", 9, "about it", maximise=False)
    figures = {
        ("a", "ours"): (0.80, 0.90), ("a", "one"): (0.86, 0.86), ("a", "two"): (0.5, 0.6),
        ("b", "ours"): (1.1, 1.1), ("b", "one"): (1.0, 1.0), ("b", "two"): (2.0, 2.0),
    }  # fmt: skip
    for (name, algorithm), values in figures.items():
        for seed, value in enumerate(values):
            lost = (name, algorithm, seed) == ("b", "ours", 1)
            content = {"figure": value, "diverged": lost, "rounds": 9, "megabytes": 1.0, "seconds": 1.0}
            table.final_place(tmp_path, name, algorithm, seed).write_text(json.dumps(content))
    found = table.collect({"a": accurate, "b": lossy}, "ours", ["one", "two"], range(2), tmp_path)
    assert (found["a"]["best_rival"], found["b"]["best_rival"]) == ("one", "one")
    assert found["a"]["gain"] == pytest.approx(-0.01 / 0.86)
    assert found["b"]["gain"] == pytest.approx(-0.1)
    assert table.summary(found, "ours") == {"pairs": 2, "within": 1, "best": 0, "diverged": 1, "runs": 4}
    text = table.markdown(found, "ours", ["one", "two"], {"c": "there is no file"})
    assert "within 2% of the best tuned rival on 1 of 2 pairs" in text
    assert "1.1000 ± 0.0000, 1 diverged" in text
    assert "`c` was skipped: there is no file" in text


def test_the_command_tunes_runs_and_writes_the_table_and_repeats_nothing(tmp_path, capsys):
    given = ["--pairs", "quadratic", "--ours", "simfbo", "--rivals", "fedbio", "--trials", "2", "--seeds", "1"]
    given += ["--folder", str(tmp_path / "runs"), "--save", str(tmp_path / "out")]
    command.main([*given, "--minutes", "0"])
    assert "3 jobs are left: repeat the command to continue." in capsys.readouterr().out
    command.main(given)
    said = capsys.readouterr().out
    assert "quadratic, fedbio, search: done" in said
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["summary"]["pairs"] == 1
    assert content["pairs"]["quadratic"]["methods"]["fedbio"]["trials"] == 2
    assert (tmp_path / "out" / "RESULTS.md").read_text().startswith("# Without tuning\n")
    command.main([*given, "--stage", "final"])
    assert "done" not in capsys.readouterr().out


def test_a_job_that_fails_is_named_and_ends_the_command_with_an_error(tmp_path, capsys):
    given = ["--pairs", "quadratic", "--ours", "no_such_algorithm", "--rivals", "", "--seeds", "1"]
    with pytest.raises(SystemExit, match="1 jobs failed"):
        command.main([*given, "--stage", "final", "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert f"quadratic, no_such_algorithm, seed {command.FIRST_SEED}: Traceback" in said
    assert "There is no algorithm named 'no_such_algorithm'" in said


def test_pairs_without_data_are_skipped_and_named(alone, capsys):
    given = ["--stage", "table", "--folder", str(alone / "runs"), "--save", str(alone / "out")]
    (alone / "out").mkdir()
    command.main(["--pairs", "mixing-shakespeare", *given])
    assert "mixing-shakespeare is skipped: there is no shakespeare/tinyshakespeare.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--pairs", "imbalance-digit"], "imbalance-digit"),
        (["--rivals", "fedbo"], "fedbo"),
        (["--ours", "fedbio"], "fedbio is the method without settings and cannot be a rival"),
    ],
)
def test_unknown_names_end_the_command(given, says):
    with pytest.raises(SystemExit, match=says):
        command.main(given)


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_of_a_new_user_pass_the_checks_and_run(name):
    try:
        built = PROBLEMS[name]()
    except DataError as missing:
        pytest.skip(str(missing))
    few = [{role: {key: v[:12] for key, v in own.items()} for role, own in client.items()} for client in built.clients]
    assert fb.check_problem(built.problem, few, show=False).ok
    given = {"lr_upper": 0.01, "lr_lower": 0.01, "lr_system": 0.01}
    result = fb.solve(built.problem, few, "fedbio", num_rounds=2, residuals=False, **given)
    assert 0 <= result.rows[-1]["test_accuracy"] <= 1


def test_the_table_keeps_recorded_rivals_whose_runs_are_elsewhere(tmp_path):
    one = {"figure": 2.0, "diverged": False, "rounds": 8, "megabytes": 1.0, "seconds": 1.0}
    for seed in (1, 2):
        table.final_place(tmp_path, "tiny", "self_tuned", seed).write_text(json.dumps(one))
    old = {"mean": 3.0, "deviation": 0.0, "diverged": 0, "values": [3.0, 3.0]}
    short = {**old, "values": [1.0]}  # of fewer seeds
    recorded = {"tiny": {"methods": {"fedbio": old, "penalty": short, "self_tuned": old}}}
    found = table.collect({"tiny": TINY}, "self_tuned", ["fedbio", "penalty"], [1, 2], tmp_path, recorded)["tiny"]
    assert {name: method["mean"] for name, method in found["methods"].items()} == {"self_tuned": 2.0, "fedbio": 3.0}
    assert (found["best_rival"], found["gain"]) == ("fedbio", pytest.approx(1 / 3))
