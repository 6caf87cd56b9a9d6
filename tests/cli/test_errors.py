"""Errors that no other test provokes: mistakes in Python, on the command line and in files.

`provoked.py` checks that every error is reached and reads well, so the tests here match only a few
words of each sentence."""

import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import fedbilevel as fb
from fedbilevel.algorithms.adasimfbo import AdaSimFBO
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.cli.main import cli
from fedbilevel.engines import distributed
from fedbilevel.errors import CheckpointError, FedBilevelError, NonFiniteError, ProblemError, ReportError, SettingError
from fedbilevel.federation.algorithm import Cohort, PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.federation.schedule import Schedule
from fedbilevel.peers.local import Local
from fedbilevel.peers.roster import assemble, keygen
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.report import write_report
from fedbilevel.runs.callbacks import EarlyStopping
from fedbilevel.runs.record import FORMAT, Record
from fedbilevel.runs.solve import solve
from fedbilevel.settings import made
from fedbilevel.sites import policy
from fedbilevel.studies import experiment
from fedbilevel.studies.compare import compare
from fedbilevel.studies.kinds import influence, personalisation
from fedbilevel.tasks.quadratic import Quadratic
from support import provoked
from support.sites.loopback import Loopback

# ---- in Python -----------------------------------------------------------------------------------


def losses(**changes):
    lower = lambda x, y, batch: (batch["weight"] * (batch["a"] @ y["y"] - x["x"]) ** 2).sum() + (y["y"] ** 2).sum()
    upper = lambda x, y, batch: (batch["weight"] * (batch["a"] @ y["y"] - 1) ** 2).sum()
    return Problem(
        **{"upper": upper, "lower": lower, "x0": {"x": torch.zeros(())}, "y0": {"y": torch.zeros(3)}, **changes}
    )


def two(**changes):
    one = lambda seed: {
        role: {"a": torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)), **changes}
        for role in ("train", "val")
    }
    return [one(0), one(1)]


PRIVATE = Scopes(upper="private")
PROBLEMS = {
    "scopes of another kind": (
        {"scopes": ("global", "private")},
        r"scopes is \('global', 'private'\), expected Scopes\(",
    ),
    "a loss that is none": ({"upper": None}, r"upper is None, expected a function of \(x, y, batch\)"),
    "features that are none": ({"features": 3}, r"features is 3, expected a function of \(x, batch\)"),
    "statistics without roles": (
        {"statistics": [len]},
        "expected a function of (x, y, batch) for each role".replace("(", r"\(").replace(")", r"\)"),
    ),
    "complex numbers": (
        {"x0": {"x": torch.zeros(2, dtype=torch.complex64)}},
        "x0 must be a dict of named tensors .* got an entry 'x' of type torch.complex64",
    ),
    "a list": ({"y0": [1.0]}, "y0 must be a dict of named tensors .* got list"),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_problem_that_is_none(what):
    changes, sentence = PROBLEMS[what]
    with pytest.raises(ProblemError, match=sentence):
        losses(**changes)


def raising(*_given):
    raise RuntimeError("no\n\nsuch luck." + " More." * 100)


AT_THE_START = {
    "x0 that fails": (
        losses(x0=lambda sizes: {"x": torch.zeros(sizes["tst"])}, scopes=PRIVATE),
        r"x0\(\) failed for a client .*'train': 4.*: KeyError: 'tst'",
    ),
    "x0 of nothing": (
        losses(x0=lambda sizes: {}, scopes=PRIVATE),
        r"what x0\(\) returns must be a dict .* got an empty dict",
    ),
    "x0 of numbers": (losses(x0=lambda sizes: {"x": 1.0}, scopes=PRIVATE), "got an entry 'x' of type float"),
    "statistics of nobody": (
        losses(statistics={"tset": raising}),
        "statistics for the role 'tset', expected a role of the clients: train, val",
    ),
    "statistics that fail": (
        losses(statistics={"val": raising}),
        r"the statistics of 'val' failed on a batch of shapes .*: RuntimeError: no such luck\.$",
    ),
    "statistics that are none": (
        losses(statistics={"val": lambda x, y, batch: None}),
        "the statistics of 'val' returned NoneType, expected a dict of tensors",
    ),
    "statistics with two axes": (
        losses(statistics={"val": lambda x, y, batch: {"r": batch["a"]}}),
        r"returned 'r' as a tensor of shape \(4, 3\) on 4 samples, expected .* shape \(4,\), or a scalar",
    ),
    "statistics that are numbers": (
        losses(statistics={"val": lambda x, y, batch: {"r": 1.0}}),
        "returned 'r' as float on 4 samples, expected a tensor",
    ),
    "statistics that count padding": (
        losses(statistics={"val": lambda x, y, batch: {"n": torch.tensor(float(len(batch["a"])))}}),
        r"gave 'n' = 4 on a batch and 8 on the same batch with padded samples of weight 0: return one value per sample",
    ),
    "the same statistic twice": (
        losses(statistics=dict.fromkeys(("train", "val"), lambda x, y, batch: {"r": batch["a"].sum(1)})),
        "two roles have a statistic named 'r'",
    ),
    "metrics that fail": (losses(metrics=lambda sums: sums["hits"]), r"metrics\(\) failed: KeyError: 'hits'"),
    "metrics that are none": (
        losses(metrics=lambda sums: None),
        r"metrics\(\) returned None, expected a dict of numbers",
    ),
    "metrics that are tensors": (
        losses(metrics=lambda sums: {"a": torch.ones(2)}),
        r"expected a dict of numbers: use float\(\.\.\.\)",
    ),
    "across that fails": (losses(across=raising), r"across\(\) failed: RuntimeError: no such luck"),
    "diagnostics that fail": (losses(diagnostics=raising), r"diagnostics\(\) failed: RuntimeError: no such luck"),
    "a whole number as a loss": (
        losses(upper=lambda x, y, batch: torch.tensor(1)),
        r"and type torch.int64 on 4 samples, expected a tensor of floats",
    ),
    "a loss that fails": (
        losses(lower=raising),
        r"lower\(\) failed on a batch of the first client of shapes .*: RuntimeError: no such luck",
    ),
}


@pytest.mark.parametrize("what", AT_THE_START)
def test_the_users_own_functions_are_named_when_they_fail(what):
    problem, sentence = AT_THE_START[what]
    with pytest.raises(ProblemError, match=sentence):
        solve(problem, two(), "fedbio", residuals=False, num_iterations=1)


def test_modules_that_are_none():
    with pytest.raises(ProblemError, match=r"y_module is of type dict, expected a torch\.nn\.Module"):
        Problem.from_modules(torch.nn.Linear(2, 2), {}, upper=raising, lower=raising)


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        (None, "clients must be a sequence with one dict per client"),
        ([3], "clients must be a sequence with one dict per client"),
        ("hosp", r"clients is 'hosp', expected a list.*list\(fb\.read_folders\('hosp'\)\.values\(\)\).*read_clients"),
        ([{"train": 3}], r"'train' of client 0 is of type int, expected a dict \{field: array\}, a table, or a list"),
        ({"train": {"a": [1.0]}}, r"clients is the dict of a single client with the roles 'train'.*: give \[client\]"),
        ({"north": {"train": {}}}, r"clients is a dict with the names 'north'.*: give list\(clients.values\(\)\)"),
        (
            [{"train": {"a": ["x"]}, "val": {"a": ["y"]}}],
            r"client 0 has train/a that is no array of numbers \(can't convert .*str_\): give one row",
        ),
        (
            two(z=torch.ones(4, 2).to_sparse()),
            "client 0 has train/z as torch.float32 in the layout torch.sparse_coo: give dense rows of real numbers",
        ),
        (two(z=np.ones((4, 2), complex)), "client 0 has train/z as torch.complex128"),
        ([*two(), {0: {}, "val": {}}], r"client 2 has the roles \['0', 'val'\], client 0 has \['train', 'val'\]"),
    ],
)
def test_clients_that_are_none(clients, sentence):
    with pytest.raises(ProblemError, match=sentence):
        solve(losses(), clients, "fedbio", residuals=False, num_iterations=1)


CALLS = {
    "no problem": ({"problem": None}, "problem is of type NoneType, expected a Problem"),
    "no list of callbacks": (
        {"callbacks": print},
        "callbacks is <built-in function print>, expected a list of functions",
    ),
    "a callback that is none": ({"callbacks": [3]}, r"callbacks is \[3\], expected a list of functions"),
    "a description that is none": ({"describe": "x"}, "describe is 'x', expected a dict"),
    "a record without a name": ({"record": ""}, "record is '', expected the name of a folder"),
    "a record that is no name": ({"record": 3}, "record is 3, expected the name of a folder"),
    "a misspelt option": ({"stratgy": "loop"}, r"no option of solve\(\) .* named 'stratgy'. Did you mean 'strategy'"),
    "drops that are no function": ({"drops": 0.5}, "drops is 0.5, expected a function"),
    "no device": ({"device": None}, "device is None, expected cpu, cuda or cuda:N"),
    "a seed that is text": ({"seed": "1"}, "seed is '1', expected a whole number"),
    "half a seed": ({"seed": 1.5}, "seed is 1.5, expected a whole number"),
    "a cohort of text": ({"cohort": Cohort("half")}, "the cohort's fraction is 'half', expected a value above 0"),
    "a cohort redrawn at will": (
        {"cohort": Cohort(0.5, redraw="daily")},
        "the cohort's redraw is 'daily', expected 'per_factor' or 'per_iteration'",
    ),
    "a schedule of text": (
        {"schedule": Schedule("fast")},
        "the schedule's power is 'fast', expected a value between 0",
    ),
    "a schedule that ends before it begins": (
        {"schedule": Schedule(end=-1)},
        "the schedule's end is -1, expected a number of outer iterations, or 0",
    ),
    "a schedule that begins nowhere": (
        {"schedule": Schedule(0.5, math.nan)},
        "the schedule's offset is nan, expected a finite number",
    ),
    "text for a number": ({"measure_every": "often"}, "measure_every is 'often', expected a whole number, at least 1"),
    "no number": ({"checkpoint_every": None}, "checkpoint_every is None, expected a whole number, at least 1"),
    "growth that is text": ({"measure_growth": "slow"}, "measure_growth is 'slow', expected a share"),
    "text for a chunk": ({"chunk_size": "big"}, "chunk_size is 'big', expected at least 1 client"),
    "text for a batch": ({"batch_size": "big"}, "batch_size is 'big', expected at least 1 sample"),
    "an engine that is none": ({"engine": "steam"}, "engine is 'steam', expected 'simulation' or 'distributed'"),
    "a network that is a word": (
        {"algorithm": "hgp", "network": "ring"},
        "network is 'ring' and averaging None, expected e.g. Network",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_arguments_of_run(what):
    given, sentence = CALLS[what]
    with pytest.raises(FedBilevelError, match=sentence):
        solve(**{"algorithm": "fedbio", "problem": losses(), "clients": two(), "num_iterations": 1, **given})


FEDBIO = {"fedbio": FedBiO()}
COMPARISONS = {
    "a name for a task": (
        {"task": "quadratic"},
        "task is 'quadratic', expected a task with its settings, e.g. Quadratic",
    ),
    "a kind of task": ({"task": Quadratic}, r"task is <class .*Quadratic'>, expected a task with its settings"),
    "a list of algorithms": (
        {"algorithms": [FedBiO()]},
        r"algorithms is \[FedBiO\(.*, expected a list of names, or a dict of algorithms with their settings by name",
    ),
    "numbers for names": (
        {"algorithms": {1: FedBiO()}},
        r"algorithms is {1: FedBiO\(.*, expected a list of names, or a dict of algorithms",
    ),
    "names for algorithms": (
        {"algorithms": {"fedbio": "fedbio"}},
        "the algorithm 'fedbio' is 'fedbio', expected an algorithm with its settings, e.g.",
    ),
    "a kind of algorithm": (
        {"algorithms": {"fedbio": FedBiO}},
        "the algorithm 'fedbio' is <class .*FedBiO'>, expected an algorithm with its settings",
    ),
    "no algorithms": ({"algorithms": {}}, "there are no algorithms to compare: name at least one"),
    "half a repetition": ({"repetitions": 1.5}, "repetitions is 1.5, expected a whole number, at least 1"),
    "true for a repetition": ({"repetitions": True}, "repetitions is True, expected a whole number, at least 1"),
    "no rounds": ({"num_rounds": 0}, "num_rounds is 0, expected a whole number, at least 1"),
    "a seed that is text": ({"seed": "1"}, r"seed is '1', expected a whole number\.$"),
    "text for iterations": (
        {"num_iterations": "5"},
        "num_iterations is '5', expected a whole number, at least 0, or a dict of such by algorithm",
    ),
    "iterations below zero": (
        {"num_iterations": {"fedbio": -1}},
        "num_iterations of 'fedbio' is -1, expected a whole number, at least 0",
    ),
    "iterations of another": (
        {"num_iterations": {"fedavg": 5}},
        "num_iterations has no entry for 'fedbio': give one number for all, or one for each of fedbio",
    ),
    "a target without a value": ({"target": "upper_loss"}, "the target is 'upper_loss', expected METRIC=VALUE"),
    "a number for a target": (
        {"target": 3},
        "target is 3, expected METRIC=VALUE, e.g. 'test_accuracy=0.94', or a Target",
    ),
    "a record that is no name": ({"record": 3}, "record is 3, expected the name of a folder"),
    "a record without a name": ({"record": ""}, "record is '', expected the name of a folder"),
    "progress that is no function": (
        {"progress": True},
        r"progress is True, expected a function of \(name, repetition, Progress\)",
    ),
}


@pytest.mark.parametrize("what", COMPARISONS)
def test_arguments_of_compare(what, tmp_path):
    given, sentence = COMPARISONS[what]
    with pytest.raises(SettingError, match=sentence):
        compare(**{"task": Quadratic(), "algorithms": FEDBIO, "num_iterations": 1, "record": tmp_path / "c", **given})
    assert not (tmp_path / "c").exists()


LOOKS = {
    "check_problem": fb.check_problem,
    "check_hypergradient": fb.check_hypergradient,
    "suggest_steps": fb.suggest_steps,
    "curvature": fb.curvature,
    "projection_radius": fb.projection_radius,
    "run": lambda *given: fb.solve(*given, "fedbio", residuals=False, num_iterations=1),
    "solve": lambda *given: fb.solve(*given, "hgp", num_iterations=1),
}


@pytest.mark.parametrize("what", LOOKS)
def test_what_is_no_problem(what):
    for given, kind in ((3, "int"), (None, "NoneType")):
        with pytest.raises(
            ProblemError, match=rf"problem is of type {kind}, expected a Problem, e\.g\. Problem\(upper="
        ):
            LOOKS[what](given, two())


@pytest.mark.parametrize("target", [3, ("f1",), ("f1", "high"), ["f1", 0.9], "f1", "f1=", "=0.9", "f1=high", "f1=nan"])
def test_a_target_of_a_page_that_is_none(tmp_path, target):
    with pytest.raises(
        ReportError, match=r"target is .*, expected METRIC=VALUE, e\.g\. 'test_accuracy=0\.94', or a pair of both"
    ):
        write_report(tmp_path, target=target)


def test_settings_that_are_no_table_and_patience_that_is_none():
    with pytest.raises(SettingError, match=r"the settings of Network are \[1\], expected a table"):
        made(Network, [1])
    with pytest.raises(SettingError, match="the patience of early stopping is 0, expected at least 1"):
        EarlyStopping("upper_loss", patience=0)


def test_steps_that_are_too_long_for_the_server(tmp_path):
    """What the clients send is finite, and what the server makes of it is not."""
    with pytest.raises(
        NonFiniteError,
        match=(
            r"the server's '.' is not finite after outer iteration \d: .*; "
            r"the last good checkpoint, of outer iteration \d, is"
        ),
    ):
        solve(
            *Quadratic().build(),
            AdaSimFBO(server_lr_upper=1e60),
            residuals=False,
            num_iterations=3,
            record=tmp_path / "r",
            recover=False,
        )


def test_ranks_that_cannot_be(monkeypatch):
    with pytest.raises(SettingError, match="timeout is 'soon', expected seconds above 0"):
        distributed.join(timeout="soon")
    with pytest.raises(SettingError, match="needs processes that torchrun started"):
        distributed.join()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "no port"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=r"the ranks did not find each other \(.*no port.*\): start all of them"):
        distributed.join()
    monkeypatch.setattr(distributed.dist, "is_available", lambda: False)
    with pytest.raises(SettingError, match=r"built without torch\.distributed"):
        distributed.join()


def test_estimates_and_averages_that_need_something_else():
    class Other(PeerAlgorithm):
        def estimate(self):
            """Anything."""

    from fedbilevel.studies.influence.predict import resolved

    with pytest.raises(SettingError, match="runs between peers but is not HGP, whose averages"):
        resolved(Other())


# ---- on the command line -------------------------------------------------------------------------


def said(*words):
    """What the command line says, in a sentence."""
    result = CliRunner().invoke(cli, [str(word) for word in words])
    if isinstance(result.exception, FedBilevelError):
        return str(result.exception)
    assert result.exit_code == 2, (result.output, result.exception)
    return result.output.splitlines()[-1]


ENTRIES = {
    "task": "quadratic", "task_settings": {}, "options": {}, "identity": {"algorithm": "fedbio", "settings": {}},
    "run": {"num_iterations": 1, "measure_every": 1, "checkpoint_every": 1},
}  # fmt: skip
RECORDS = {
    "of a federation": (
        {"engine": "federation"},
        "is the server's part of a run between sites: resume it by fedbilevel federation resume",
    ),
    "of a peer": ({"engine": "peers"}, "belongs to one of several peers and cannot be resumed alone: start"),
    "of collected peers": (
        {"engine": "peers", "collected": []},
        "was collected from several peers and cannot be resumed",
    ),
    "from Python": (
        {"task": "quadratic"},
        "was not started on the command line (KeyError('task_settings')): resume it from Python",
    ),
    "with another plan": ({**ENTRIES, "run": 3}, "was not started on the command line (TypeError("),
    "with a task that is a number": ({**ENTRIES, "task": 3}, "There is no task named 3. Known: "),
    "with a setting of another version": (
        {**ENTRIES, "task_settings": {"dim_upperr": 3}},
        "the recorded setting 'dim_upperr' is unknown to this version",
    ),
    "without a checkpoint": (ENTRIES, "there is no checkpoint in"),
    "that is a list": ([], "config.json does not hold a configuration"),
    "that is cut off": ("{", "config.json is not readable as JSON (Expecting property name"),
    "that is binary": (bytes(range(128, 256)), "config.json is not readable as JSON ('utf-8' codec can't decode"),
    "that is a folder": (None, "config.json cannot be read (Is a directory): restore it"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_cannot_be_gone_on_with(tmp_path, what):
    content, sentence = RECORDS[what]
    place = tmp_path / "config.json"
    if content is None:
        place.mkdir()
    else:
        place.write_bytes(
            content
            if isinstance(content, bytes)
            else (content if isinstance(content, str) else json.dumps(content)).encode()
        )
    assert sentence in said("resume", tmp_path)
    assert "there is no run in" in said("resume", place if content is not None else tmp_path / "nowhere")


def test_files_of_a_record_that_are_not_what_they_should_be(tmp_path):
    whole = ["run", "quadratic", "-a", "fedbio", "--num-iterations", 1, "--out", tmp_path / "r"]
    assert CliRunner().invoke(cli, [str(word) for word in whole]).exit_code == 0
    assert "already holds a run: resume it" in said(*whole)
    book = Record(tmp_path / "r")
    book.metrics.unlink()
    book.metrics.mkdir()
    assert "metrics.jsonl cannot be read (Is a directory): restore it from a copy or remove it" in said(
        "resume", book.path, "--num-iterations", 2
    )
    with pytest.raises(
        CheckpointError, match=r"metrics\.jsonl cannot be written \(Is a directory\): make room and resume"
    ):
        book.add({"iteration": 2})
    save_file({"x": torch.zeros(1)}, book.checkpoint, {"format": "fedbilevel-checkpoint-0"})
    assert f"was written in format 'fedbilevel-checkpoint-0', expected {FORMAT!r}" in said("resume", book.path)
    book.checkpoint.write_bytes(b"junk" * 9)
    assert "is damaged or not a checkpoint (" in said("resume", book.path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "run quadratic -a fedbio --device cuda",
            "device is 'cuda' but this torch sees no CUDA device: use --device cpu",
        ),
        ("run quadratic -a fedbio --timeout -3", "timeout is -3.0, expected seconds above 0, at most 1e+09"),
        ("run quadratic -a fedbio --timeout inf", "timeout is inf, expected seconds above 0"),
        (
            "run quadratic -a fedbio --batch-size 0",
            "batch_size is 0, expected a whole number of samples, at least 1 (in a file also 'all', or a table",
        ),
        ("influence --num-listed -2", "Invalid value for '--num-listed': -2 is not in the range x>=0."),
        (
            "compare quadratic --algorithms fedbio --measure-every 0 --out c",
            "measure_every is 0, expected a whole number, at least 1",
        ),
        (
            "compare quadratic --algorithms fedbio --repetitions 0",
            "repetitions is 0, expected a whole number, at least 1",
        ),
        ("compare quadratic --algorithms , --out c", "there are no algorithms to compare: name at least one"),
        (
            "compare quadratic --algorithms fedbio --set lr_upper=1",
            "--set got 'lr_upper=1', expected NAME.SETTING=VALUE",
        ),
        (
            "compare quadratic --algorithms fedbio --set hgp.lr=1",
            "There is no algorithm in this comparison named 'hgp'. Known: averaging, fedbio,",
        ),
        ("compare quadratic --algorithms fedbio --out .", "already holds a comparison: name another folder"),
        ("reproduce hgp-table2 --panels none", "There is no panel of hgp-table2 named 'none'"),
        ("tune tuned.toml --panels two", "[tune] searches in the panel 'one' alone, for all panels: omit --panels"),
        ("tune bare.toml", "declares no ranges: add [tune.ranges]"),
        ("tune bare.toml --num-trials 3", "--num-trials has no meaning for the experiment bare.toml: omit it"),
        ("tune quadratic --rows a --algorithms fedbio", "--rows has no meaning for the task quadratic: omit it"),
        ("tune quadratic", "there are no algorithms to tune on quadratic: name some, e.g. --algorithms fedbio"),
        ("rnu quadratic", "There is no command named 'rnu'. Did you mean 'run'?"),
        ("tune quadratik", "There is no task or experiment named 'quadratik'. Did you mean 'quadratic'?"),
        (
            "tune quadratic --algorithms fedbio --range simfbo.lr_upper=1:2",
            "--range got 'simfbo.lr_upper=1:2', expected SETTING=LOW:HIGH or NAME.SETTING=LOW:HIGH with a NAME among",
        ),
    ],
)
def test_commands(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "comparison.json").write_text("{}")
    (tmp_path / "bare.toml").write_text(EXPERIMENT + '[tune]\nminimise = "upper_loss"\n')
    (tmp_path / "tuned.toml").write_text(
        EXPERIMENT + '[tune]\npanel = "one"\nminimise = "upper_loss"\nranges = {"algorithm.lr_lower" = [0.1]}\n'
    )
    assert sentence in said(*words.split())


EXPERIMENT = """
title = "Loss"
source = "nowhere"
study = "optimise"
repetitions = 1
figures = {upper_loss = "loss"}
[settings]
num_iterations = 1
task = {name = "quadratic", num_clients = 2}
[panels.one]
[panels.two]
[rows.fedbio]
settings.algorithm = {name = "fedbio", lr_lower = 0.1}
"""


def test_without_experiments(monkeypatch):
    monkeypatch.setattr(experiment, "folders", lambda: [])
    for words in (["reproduce"], ["reproduce", "hgp-table2"]):
        assert (
            said(*words) == "no experiments were found: run this in a checkout, or give the path of an experiment.toml."
        )


def test_files_of_an_experiment_that_cannot_be_written_to(tmp_path, monkeypatch):
    path = tmp_path / "mine" / "experiment.toml"
    path.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    path.write_text(EXPERIMENT + '[plot]\nx = "rounds"\ny = "upper_loss"\n')
    (path.parent / "curves.json").write_text("[1")
    assert "curves.json does not hold curves (Expecting" in said(
        "reproduce", path, "--record", "--out", tmp_path / "out"
    )
    document = {"title": "Another"}
    with pytest.raises(FedBilevelError, match=r"has \[result\] in a form that cannot be added to"):
        experiment.write(experiment.read(path), "result", document)


def test_rows_of_studies_that_lack_something(tmp_path):
    with pytest.raises(FedBilevelError, match="a row of this study needs 'method', it has 'task'"):
        personalisation.run({"task": {}}, repetition=0, folder=tmp_path, device="cpu", say=print)
    with pytest.raises(SettingError, match="dtype is 'half', expected float32 or float64"):
        influence.run({"dtype": "half"}, repetition=0, folder=tmp_path, device="cpu", say=print)


# ---- between sites -------------------------------------------------------------------------------


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbilevel.sites.exchange._APART", (0.0, 0.0))
    monkeypatch.setattr("fedbilevel.sites.serve._BETWEEN", 0.0)
    yield Loopback(tmp_path)
    Loopback.close_all()


CRAFTED = {
    "measure": {
        "without names": (
            lambda header, arrays: ({**header, "names": 3}, arrays),
            "its measurement lacks names or changed",
        ),
        "of two rows": (
            lambda header, arrays: (header, [torch.cat([array, array]) for array in arrays]),
            "its measurement is not a row of figures",
        ),
        "of nothing": (
            lambda header, arrays: (header, [array * 0 for array in arrays]),
            "its measurement has an invalid weight",
        ),
    },
    "phase": {
        "of another form": (
            lambda header, arrays: ({**header, "results": {**header["results"], "x": "gift"}}, arrays),
            "its answer has x in a form that was not requested",
        )
    },
}


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, cases in CRAFTED.items() for what in cases])
def test_answers_of_sites(sites, kind, what):
    craft, sentence = CRAFTED[kind][what]
    plan = sites.plan({"name": "fedbio"}, quorum=2, num_iterations=2, measure_every=1)
    sites.serve(
        plan,
        lambda name, header: (
            craft if name == "site-0" and header["kind"] == kind and header["iteration"] == 1 else None
        ),
    )
    assert sentence in " ".join(str(line["missing"]) for line in sites.diary())


JOINING = {
    "a folder that is not its own": ('loader = "os:sep"', "loader in site.toml is 'os:sep', which is not a function"),
    "a loader that is not installed": (
        'loader = "nobody:load"',
        r"is 'nobody:load' \(No module named 'nobody'\), expected .* package\.module:function",
    ),
    "a policy": (
        '[policy]\ntasks = ["imbalance"]\n',
        "site-0 does not join the run trial: this site's policy does not allow quadratic",
    ),
    "another point": (None, "site-0 and site-1 do not have the same initial point"),
    "one site too many": (
        "",
        "the simulated task has 2 clients, this site hosts number 2: raise num_clients of the task in the plan",
    ),
}


@pytest.mark.parametrize("what", JOINING)
def test_sites_that_cannot_join(sites, tmp_path, monkeypatch, caplog, what):
    """What is a site's own affair is in its log, and nowhere else."""
    text, sentence = JOINING[what]
    monkeypatch.setenv(policy.DATA, str(tmp_path))
    if text:
        for name in sites.names:
            (tmp_path / name / "site.toml").write_text(
                f"auto_approve = true\n{text}\n"
                + ("min_batch = 1\n" if "[policy]" in text else "[policy]\nmin_batch = 1\n")
            )
            sites.restart(name)
    plan = sites.plan({"name": "fedbio"}, {"name": "quadratic", "num_clients": 2 if text == "" else 3})
    other = lambda header, arrays: ({**header, "start": "elsewhere"}, arrays)
    with pytest.raises(FedBilevelError) as caught:
        sites.serve(
            plan, lambda name, header: other if text is None and name == "site-1" and header["kind"] == "join" else None
        )
    assert re.search(sentence, f"{caught.value}{caplog.text}")


def test_a_run_belongs_to_its_sites_and_its_numbers_are_finite(sites, monkeypatch):
    plan = sites.plan({"name": "penalty"}, num_iterations=1)
    assert sites.serve(plan) == "finished"
    with pytest.raises(
        FedBilevelError,
        match="the run trial began with the sites site-0, site-1, site-2: use another name for a run with others",
    ):
        sites.serve({**plan, "sites": sites.names[:2]})
    monkeypatch.setattr("fedbilevel.algorithms.penalty.Penalty.weight", lambda self, t: math.inf)
    with pytest.raises(NonFiniteError, match="the server's 'lam' is not finite in outer iteration 2"):
        sites.serve({**plan, "num_iterations": 2})


def test_what_a_site_reads_of_its_own(tmp_path):
    (tmp_path / "site.toml").mkdir()
    with pytest.raises(FedBilevelError, match=r"site\.toml of this site cannot be read \(Is a directory\)"):
        policy.read_settings(tmp_path)
    with pytest.raises(
        FedBilevelError, match=r"there is no train file in .*: a site's folder holds train\.npz and val\.npz"
    ):
        policy.check_data(policy.SiteSettings(), tmp_path)


# ---- between organisations -----------------------------------------------------------------------


class Answers:
    """A FLARE server as the lead sees it, with one job and no sites.

    A call returns the value of its name in `given`, or raises it if it is an exception."""

    def __init__(self, **given):
        self.given = given

    def __getattr__(self, name):
        def answer(*_words, **_more):
            found = self.given.get(name)
            if isinstance(found, Exception):
                raise found
            return found

        return answer


INFO = SimpleNamespace(
    job_info=[SimpleNamespace(job_id="j")], client_info=[], server_info=SimpleNamespace(start_time=0)
)
PLAN = {"name": "r", "sites": ["a"], "num_iterations": 1}


@pytest.fixture
def lead(tmp_path, monkeypatch):
    """A kit of a lead with one run, and what its server answers."""
    connection = pytest.importorskip("fedbilevel.sites.flare.connection")
    from fedbilevel.sites.flare import follow, jobs

    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text("{}")
    jobs.RunEntry(tmp_path, "r").write(plan=PLAN, jobs=["j"], outcome="finished", server="s", client="c")
    server = Answers(
        get_system_info=INFO,
        get_job_status="RUNNING",
        cat_target="no such file",
        get_connected_client_list=[SimpleNamespace(name="a")],
    )
    monkeypatch.setattr(connection, "_opened", lambda kit, timeout=0: server)
    return SimpleNamespace(server=server, jobs=jobs, follow=follow, kit=tmp_path, answers=server.given)


def progress(**more):
    return json.dumps({"job": "j", **more})


def gone():
    """The job that was running is not any more."""
    return {
        "get_system_info": SimpleNamespace(**{**vars(INFO), "job_info": []}),
        "get_job_status": "FINISHED:COMPLETED",
    }


def site_a():
    return {"get_system_info": SimpleNamespace(**{**vars(INFO), "client_info": [SimpleNamespace(name="a")]})}


LEADS = {
    "a run that is no name": (
        lambda lead, kit: lead.jobs.stop(kit, "../x"),
        {},
        "'../x' is not the name of a run: use letters, digits, - and _",
    ),
    "a run that is over": (lambda lead, kit: lead.jobs.stop(kit, "r"), gone(), "the run 'r' is not running"),
    "a run that has just ended": (
        lambda lead, kit: lead.jobs.stop(kit, "r"),
        {"do_app_command": TimeoutError(), "cat_target": progress(outcome="stopped")},
        "'r' is not running: it is stopped",
    ),
    "a run that has not begun": (
        lambda lead, kit: lead.jobs.stop(kit, "r"),
        {"do_app_command": TimeoutError("no app")},
        r"'r' could not be asked to stop \(no app\): try again in a few seconds",
    ),
    "a run that is finished": (
        lambda lead, kit: lead.jobs.check_free(kit, PLAN),
        gone(),
        "the run 'r' is finished: give the new one another name",
    ),
    "a run that failed": (
        lambda lead, kit: lead.follow.watch(kit, PLAN, print, job="j"),
        {"cat_target": progress(outcome="failed", why="no data: add some.")},
        "^no data: add some.$",
    ),
    "a run that always fails": (
        lambda lead, kit: lead.follow.watch(kit, PLAN, print, job="j", max_restarts=0),
        {**gone(), "cat_target": progress(outcome="interrupted", why="the server was stopped")},
        "the run 'r' was given up after it had been started 1 times: the server was stopped",
    ),
    "a site that does not connect": (
        lambda lead, kit: lead.follow.watch(kit, PLAN, print, start_timeout=0.2, poll=0.01),
        {"get_connected_client_list": []},
        "^a did not connect within 0 s: start it there, or leave it out of `sites`.$",
    ),
    "a job that no site starts": (
        lambda lead, kit: lead.follow.watch(kit, PLAN, print, job="j", start_timeout=0.2, poll=0.01),
        {"get_client_job_status": [{"client_name": "a", "status": "no_jobs"}], "abort_job": None, **site_a()},
        r"^the run 'r' did not start within 0 s \(a started no process for it\): see log.txt in the kits there",
    ),
}


@pytest.mark.parametrize("what", LEADS)
def test_what_the_lead_asks_for(lead, what):
    ask, answers, sentence = LEADS[what]
    lead.answers.update(answers)
    with pytest.raises(FedBilevelError, match=sentence):
        ask(lead, lead.kit)


WAITING = {
    "for an approval": {"cat_target": progress(waiting="a has to approve the plan")},
    "behind other runs": {
        "get_job_status": "SUBMITTED",
        "get_system_info": SimpleNamespace(
            **{**vars(INFO), "job_info": [SimpleNamespace(job_id=str(number)) for number in range(4)]}
        ),
    },
    "for a server that is away": {"get_system_info": ConnectionError("away")},
}


@pytest.mark.parametrize("what", WAITING)
def test_the_time_for_the_start_does_not_run_while_a_run_waits(lead, what):
    """A run that looked late a moment ago would be given up here."""
    lead.answers.update(WAITING[what])
    follow = lead.follow.Follow(lead.kit, PLAN, print, job="j", start_timeout=0.2, poll=0.15)
    for _ in range(3):
        assert follow.step() is None


def test_a_run_that_was_given_up_is_not_running(lead):
    lead.answers["get_connected_client_list"] = []
    with pytest.raises(FedBilevelError, match="did not connect"):
        lead.follow.watch(lead.kit, PLAN, print, start_timeout=0.0, poll=0.01)
    lead.answers.update(gone())
    with pytest.raises(FedBilevelError, match="the run 'r' is not running"):
        lead.jobs.stop(lead.kit, "r")


@pytest.mark.parametrize("ask", ["status", "watch"])
def test_a_server_that_refuses(lead, ask):
    from nvflare.fuel.flare_api.api_spec import AuthorizationError

    lead.answers["get_system_info"] = AuthorizationError("not allowed")
    with pytest.raises(FedBilevelError, match="the server refused: not allowed"):
        lead.jobs.status(lead.kit) if ask == "status" else lead.follow.watch(lead.kit, PLAN, print, job="j")


def test_sites_that_never_come(lead):
    from fedbilevel.sites.flare.local import Loopback as Processes

    here = Processes(lead.kit, ["north"], patience=0.3)
    here.lead = lead.kit
    with pytest.raises(FedBilevelError, match=r"the sites north were not connected after 0 s: see log\.txt"):
        here.wait_for(["north"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ('init new.toml --name a"b', "'a\"b' cannot be a name: leave out quotes and line breaks"),
        ("init /proc/new.toml", "/proc/new.toml cannot be written (No such file or directory): name another place"),
        ("provision junk", "junk cannot be read as a federation.toml ('utf-8' codec can't decode"),
        (
            "provision two.toml --out junk",
            "the folder junk/authority cannot be made (Not a directory): name another place",
        ),
        ("provision two.toml --out full", "FLARE made no kits from two.toml ("),
    ],
)
def test_federations_that_cannot_be_set_up(tmp_path, monkeypatch, words, sentence):
    pytest.importorskip("nvflare")
    from fedbilevel.sites.flare import kits

    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk").write_bytes(bytes(range(128, 256)))
    kits.init(tmp_path / "two.toml", sites=["north"], name="two")
    (tmp_path / "full" / kits.AUTHORITY).mkdir(parents=True)
    (tmp_path / "full" / kits.AUTHORITY / "two").write_text("in the way")
    assert sentence in said("federation", *words.split())


def test_kits_that_cannot_be_started(tmp_path, monkeypatch):
    processes = pytest.importorskip("fedbilevel.sites.flare.processes")
    script = tmp_path / "startup" / "sub_start.sh"
    script.parent.mkdir()
    script.write_text("exec something")
    assert "holds no command that this version knows: make the kits again" in said("federation", "start-site", tmp_path)
    kits = processes.kits
    kits.init(tmp_path / "federation.toml", sites=["north"])
    north = kits.provision(tmp_path / "federation.toml", tmp_path / "kits")["north"]
    monkeypatch.setattr(processes, "running", lambda kit: {4711: "parent"})
    assert "is running already, as process 4711: stop that one first" in said("federation", "start-site", north)


# ---- between peers -------------------------------------------------------------------------------

PEERS = 'name = "t"\ntask = {name = "quadratic", num_clients = 1}\nalgorithm = {name = "sgp"}\n'


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--simulated", "give --key, or, where all addresses are of this machine alone, --name"),
        ("--key a.key.toml --name a --simulated", "give --key, or"),
        ("--name a", "give --data, or --simulated"),
        (
            "--name b --simulated",
            "the task has 1 clients, and b is number 1: raise num_clients of the task in the plan",
        ),
        (
            "--key other/a.key.toml --simulated",
            "roster.toml has another key for a than other/a.key.toml: put the roster together again",
        ),
    ],
)
def test_peers_that_cannot_take_part(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PEERS)
    (tmp_path / "other").mkdir()
    publics = [
        keygen(tmp_path / f"{name}.key.toml", name=name, address=f"127.0.0.1:{9000 + number}")
        for number, name in enumerate("ab")
    ]
    keygen(tmp_path / "other" / "a.key.toml", name="a", address="127.0.0.1:9000")
    assemble(publics, tmp_path / "roster.toml")
    assert sentence in said("peer", "run", "plan.toml", *words.split())


def test_peers_that_fail_as_processes(tmp_path):
    with Local(tmp_path, {"name": "t"}, Quadratic(num_clients=2).build().clients) as peers:
        (tmp_path / "peer-1.log").write_text("peer-1 begins\nError: the plan has no task: give one.\n")
        peers.processes["peer-1"] = subprocess.Popen(
            [sys.executable, "-c", "input(); raise SystemExit(2)"], stdin=subprocess.PIPE
        )
        with pytest.raises(FedBilevelError, match="peer-1 still run after 0 s: see the logs in"):
            peers.wait(0.0)
        peers.processes["peer-1"].communicate(b"\n")
        with pytest.raises(FedBilevelError, match=r"peer-1 ended with 2: Error: the plan has no task: give one\.$"):
            peers.wait(60.0)


# ---- the plugin itself ---------------------------------------------------------------------------


def test_what_is_no_sentence_is_noticed():
    for message in (
        "",
        "x",
        "a.\nb.",
        " a.",
        "a  b.",
        ": a.",
        "a..",
        "a:.",
        "the file (): mend it.",
        "no (None): mend it.",
        "a at 0x7f00aa.",
        "a" * 401 + ".",
    ):
        assert provoked.faults(message), message
    for message in (
        "lr is 0, expected a value above 0.",
        "There is no task named 'a'. Did you mean 'b'?",
        f"there is no {'/a' * 300}: name another.",
        "shape (), expected (3,).",
    ):
        assert not provoked.faults(message), message


def test_what_no_test_reaches_is_named(monkeypatch):
    places = provoked.places()
    assert len(places) > 500
    assert {place.source.partition("(")[0] for place in places} >= {
        "raise SettingError",
        "raise click.UsageError",
        "raise error",
    }
    everything = {(place.file, place.lines.stop - 1) for place in places}
    first, second = places[:2]
    monkeypatch.setattr(provoked, "UNPROVOKED", {})
    assert provoked.unreached(places, everything) == []
    [named, _] = provoked.unreached(places, everything - {(first.file, first.lines.stop - 1)})
    assert named == f"{first.file}:{first.lines.start}: no test provokes {first.source}"
    monkeypatch.setattr(
        provoked, "UNPROVOKED", {(first.file, first.source): "of no use", (second.file, "nothing like it"): "gone"}
    )
    said = provoked.unreached(places, everything)
    assert "is in the source of 0 errors" in said[0]
    assert said[1] == f"{first.file}:{first.lines.start}: a test provokes this, so it should not be in UNPROVOKED."
    assert provoked.unreached(places, everything - {(first.file, first.lines.stop - 1)}) == [said[0], said[-1]]
