"""The personalisation study: every method on every network, early stopping, and resuming."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

import fedbilevel.studies.personalisation as study
from fedbilevel.algorithms.fedprox import FedProx
from fedbilevel.cli.main import cli
from fedbilevel.errors import CheckpointError, RecoveryWarning, SettingError, UnknownNameError
from fedbilevel.report import tables
from fedbilevel.runs.callbacks import EarlyStopping
from fedbilevel.runs.result import Progress
from fedbilevel.studies.personalisation import METHODS, NETWORKS, PAPER, PersonalisationPlan, personalise
from fedbilevel.tasks.personalisation import Personalisation
from support.stops import ctrl_c

TASK = Personalisation(num_clients=6, share=0.1, model="linear")
PLAN = PersonalisationPlan(num_outer=3, num_lower_steps=4, num_local_steps=2, num_terms=2, num_pushes=3, repetitions=1)


def test_every_method_runs_where_it_can(tmp_path):
    outcomes = personalise(TASK, PLAN, methods=list(METHODS), record=tmp_path / "all")
    between_peers = ("local", "sgp", "hgp_pl", "hgp_mtl")
    expected = {
        (network, name) for name in METHODS for network in (NETWORKS if name in between_peers else ["complete"])
    }
    assert {(one.network, one.method) for one in outcomes} == expected
    assert len(outcomes) == len(expected)
    by = {(one.network, one.method): one for one in outcomes}
    assert by["erdos_renyi", "sgp"].rounds == 3 * 4  # one exchange per lower step
    assert by["random_directed", "hgp_pl"].rounds == 3 * (4 + 2 * 3)  # and M averages of S steps
    assert by["complete", "fedprox"].rounds == 3 * 2  # as many local steps in all
    assert by["random_directed", "local"].rounds == 0
    assert by["random_directed", "sgp"].test_accuracy != by["complete", "local"].test_accuracy
    # the ensemble sends three networks where the mask sends one
    assert by["complete", "hgp_mtl"].megabytes > 2.5 * by["complete", "hgp_pl"].megabytes


def test_the_best_validation_accuracy_is_what_is_reported(tmp_path, monkeypatch):
    seen = {}
    true_run = study.solve

    def watched(algorithm, *args, **options):
        result = true_run(algorithm, *args, **options)
        seen["rows"] = result.rows[1:]
        return result

    monkeypatch.setattr(study, "solve", watched)
    plan = PersonalisationPlan(
        num_outer=4, num_lower_steps=3, lr_lower=2.0, repetitions=1
    )  # steps long enough for the accuracy to go up and down
    with pytest.warns(RecoveryWarning, match="sgp: the run failed: upper_loss rose"):
        [one] = personalise(TASK, plan, methods=["sgp"], networks=["random_directed"])
    accuracies = [row["stop_accuracy"] for row in seen["rows"]]
    best = accuracies.index(max(accuracies))
    assert accuracies[-1] < max(accuracies)
    assert (one.iteration, one.validation_accuracy) == (seen["rows"][best]["iteration"], max(accuracies))
    assert one.test_accuracy == seen["rows"][best]["test_accuracy"]
    assert one.bottom_decile == seen["rows"][best]["test_accuracy_bottom_decile"]
    assert one.curve[1:] == tuple(enumerate(accuracies, 1))


def test_a_record_is_gone_on_with(tmp_path, monkeypatch):
    first = personalise(TASK, PLAN, methods=["local", "sgp"], networks=["complete"], record=tmp_path / "r")
    started = []
    true_run = study.solve
    monkeypatch.setattr(
        study,
        "solve",
        lambda *given, **options: started.append(given[2].name()) or true_run(*given, **options),
    )
    both = personalise(
        TASK, PLAN, methods=["local", "sgp", "hgp_pl"], networks=["complete", "random_directed"], record=tmp_path / "r"
    )
    assert started == ["sgp", "hgp", "hgp"]  # local does not depend on the network
    assert [one for one in both if one in first] == first
    with pytest.raises(SettingError, match="other settings of plan"):
        personalise(TASK, PersonalisationPlan(num_outer=4), methods=["sgp"], record=tmp_path / "r")
    (tmp_path / "r" / "personalisation.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        personalise(TASK, PLAN, methods=["sgp"], record=tmp_path / "r")


def test_repetitions_differ_in_data_and_draws_and_are_averaged_in_the_table():
    outcomes = personalise(
        TASK, dataclasses.replace(PLAN, repetitions=2), methods=["sgp"], networks=["random_directed"]
    )
    assert [one.repetition for one in outcomes] == [0, 1]
    [again] = personalise(
        dataclasses.replace(TASK, data_seed=1), PLAN, methods=["sgp"], networks=["random_directed"], seed=1
    )
    assert again.test_accuracy == outcomes[1].test_accuracy
    assert outcomes[0].test_accuracy != outcomes[1].test_accuracy
    table = tables.personalisation(outcomes, PAPER)
    assert next(iter(table.columns[1].cells)).startswith(
        f"{50 * (outcomes[0].test_accuracy + outcomes[1].test_accuracy):.1f} / "
    )


def test_unknown_names_are_named():
    with pytest.raises(UnknownNameError, match=r"personalisation method named 'hgp-pl'\. Did you mean 'hgp_pl'"):
        personalise(TASK, PLAN, methods=["hgp-pl"])
    with pytest.raises(UnknownNameError, match="personalisation network named 'star'"):
        personalise(TASK, PLAN, methods=["sgp"], networks=["star"])


def test_methods_and_networks_that_do_not_go_together_are_an_error():
    for methods, networks in ((["fedprox"], ["random_directed"]), ([], ["complete"]), (["sgp"], [])):
        with pytest.raises(SettingError, match="none of these methods runs on these networks"):
            personalise(TASK, PLAN, methods=methods, networks=networks)


def test_the_paper_is_quoted_for_methods_and_networks_that_exist():
    assert set(PAPER) <= set(METHODS)
    assert all(set(row) <= set(NETWORKS) for row in PAPER.values())


def test_the_command_prints_a_table_and_saves_it(tmp_path):
    flags = (
        "--num-clients 6 --share 0.1 --model linear --num-outer 2 --num-lower-steps 3 --repetitions 1 "
        "--methods local,sgp --networks complete,random_directed"
    )
    result = CliRunner().invoke(
        cli, ["personalise", *flags.split(), "--out", str(tmp_path / "p")], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "p" / "personalisation.json").read_text())
    one = next(one for one in saved["outcomes"] if (one["method"], one["network"]) == ("sgp", "random_directed"))
    assert f"{100 * one['test_accuracy']:.1f} / {100 * one['bottom_decile']:.1f}" in result.output
    assert "(80.1 / 72.4)" in result.output
    assert saved["task"]["num_clients"] == 6


def test_early_stopping_waits_and_keeps_the_first_of_equals():
    stop = EarlyStopping("a", patience=2)
    asked = [
        stop(Progress(i, 9, 0, 0.0, None if a is None else {"iteration": i, "a": a}))
        for i, a in enumerate([1, 3, None, 3, 2, 5])
    ]
    assert asked == [False, False, False, False, True, False]
    assert stop.best == {"iteration": 5, "a": 5}
    other = EarlyStopping("a", patience=3)
    for i, a in enumerate([2, 3, 3]):
        other(Progress(i, 9, 0, 0.0, {"iteration": i, "a": a}))
    assert other.best["iteration"] == 1
    with pytest.raises(SettingError, match="watches 'b', which this run does not measure"):
        EarlyStopping("b", patience=1)(Progress(1, 1, 0, 0.0, {"a": 1}))


def test_ctrl_c_keeps_finished_methods_alone(tmp_path, monkeypatch):
    words = ["personalise", "--methods", "local,fedprox", "--num-clients", "6", "--share", "0.1", "--num-outer", "2"]
    words += ["--networks", "complete", "--repetitions", "1", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        ctrl_c(patch, FedProx)
        done = CliRunner().invoke(cli, words)
    assert done.exit_code == 130
    assert f"Stopped. The same command with --out {tmp_path / 'run'} leaves out what is finished." in done.output
    kept = json.loads((tmp_path / "run" / "personalisation.json").read_text())["outcomes"]
    assert [one["method"] for one in kept] == ["local"]
