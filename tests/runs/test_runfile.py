"""Run files: a file repeats its run, flags override it, and a mistake in it gives one sentence."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fedbilevel import discovery
from fedbilevel.cli.main import cli
from fedbilevel.errors import FedBilevelError, IgnoredWarning, PlanError
from fedbilevel.peers import plan as peers
from fedbilevel.runs.options import keywords
from fedbilevel.runs.record import Record
from fedbilevel.runs.runfile import parts_of, read_run_file, written
from fedbilevel.sites import plan as sites

SMALL = ["--num-clients", "3", "--num-samples", "3"]


def invoke(*args):
    result = CliRunner().invoke(cli, [str(arg) for arg in args], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "flags",
    [
        [
            "quadratic",
            "-a",
            "fedbio",
            "--num-iterations",
            "3",
            "--batch-size",
            "2",
            "--fraction",
            "0.7",
            "--num-local-steps",
            "1,2,1",
            "--no-residuals",
        ],
        [
            "quadratic",
            "-a",
            "hgp",
            "--num-rounds",
            "12",
            "--network",
            "ring",
            "--averaging-num-steps",
            "2",
            "--num-terms",
            "2",
            "--num-lower-steps",
            "2",
        ],
        [
            "quadratic",
            "-a",
            "fbo_aggitd",
            "--num-iterations=2",
            "--dtype=float64",
            "--schedule-power=0.5",
            "--measure-every=1",
            "--lower=local",
            "--stationarity",
        ],
    ],
    ids=["server", "peers", "schedule"],
)
def test_the_file_of_a_record_does_the_run_again(tmp_path, flags):
    """Bit for bit, and writes the same file."""
    invoke("run", *flags, *SMALL, "--seed", 4, "--out", tmp_path / "first")
    invoke("run", "--config", tmp_path / "first" / "run.toml", "--out", tmp_path / "again")
    assert (tmp_path / "again" / "run.toml").read_bytes() == (tmp_path / "first" / "run.toml").read_bytes()
    assert (tmp_path / "again" / "solution.safetensors").read_bytes() == (
        tmp_path / "first" / "solution.safetensors"
    ).read_bytes()
    one, other = (Record(tmp_path / name).read_config() for name in ("first", "again"))
    assert one == other
    untimed = [[{**row, "seconds": 0} for row in Record(tmp_path / name).rows()] for name in ("first", "again")]
    assert untimed[0] == untimed[1]


def test_flags_come_before_the_file_which_comes_before_what_the_task_suggests(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'num_iterations = 4\nresiduals = false\n[task]\nname = "quadratic"\nnum_clients = 2\nnum_samples = 3\n'
        '[algorithm]\nname = "fedbio"\nlr_upper = 0.01\nlr_lower = 0.02\n[options]\nseed = 3\ndtype = "float64"\n'
    )
    invoke(
        "run",
        "--config",
        file,
        "--lr-upper",
        0.03,
        "--seed",
        0,
        "--num-clients",
        4,
        "--residuals",
        "--out",
        tmp_path / "run",
    )
    config = Record(tmp_path / "run").read_config()
    settings = config["identity"]["settings"]
    assert (settings["lr_upper"], settings["lr_lower"], settings["lr_system"]) == (
        0.03,
        0.02,
        discovery.task("quadratic").suggestions("fedbio")["lr_system"],
    )
    assert (config["identity"]["num_clients"], config["identity"]["seed"], config["identity"]["dtype"]) == (
        4,
        0,
        "float64",
    )
    assert (config["run"]["num_iterations"], config["run"]["residuals"]) == (4, True)
    invoke(
        "run", "--config", file, "-a", "fedavg", "--out", tmp_path / "other"
    )  # settings in the file are another algorithm's
    assert Record(tmp_path / "other").read_config()["identity"]["algorithm"] == "fedavg"
    assert (
        Record(tmp_path / "other").read_config()["identity"]["settings"]["lr_lower"]
        == discovery.task("quadratic").suggestions("fedavg")["lr_lower"]
    )


def test_a_run_that_ended_by_rounds_can_be_made_longer(tmp_path):
    """What is given for a resume is how long it is; what was planned before no longer counts."""
    plan = lambda: Record(tmp_path / "run").read_config()["run"]
    invoke("run", "quadratic", "-a", "fedbio", "--num-rounds", 4, *SMALL, "--log", "jsonl", "--out", tmp_path / "run")
    assert 'log = ["jsonl"]' in (tmp_path / "run" / "run.toml").read_text()
    invoke("resume", tmp_path / "run")
    assert (plan()["num_rounds"], "num_iterations" in (tmp_path / "run" / "run.toml").read_text()) == (4, False)
    invoke("resume", tmp_path / "run", "--num-rounds", 8)
    assert (plan()["num_rounds"], Record(tmp_path / "run").rows()[-1]["rounds"]) == (8, 8)
    invoke("resume", tmp_path / "run", "--num-iterations", 11)
    assert (plan()["num_rounds"], Record(tmp_path / "run").rows()[-1]["iteration"]) == (None, 11)
    with pytest.raises(FedBilevelError, match=r"num_rounds is 5, but the run in .* has already done 11"):
        invoke("resume", tmp_path / "run", "--num-rounds", 5)


def test_a_task_that_lies_here_but_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "run.toml").write_text('[task]\nname = "mine"\n')
    with pytest.raises(
        FedBilevelError, match=r"the task mine is not installed, but mine\.py is here: run pip install -e \."
    ):
        read_run_file(tmp_path / "run.toml")


def test_a_resumed_run_writes_what_it_has_become(tmp_path):
    invoke("run", "quadratic", "-a", "fedbio", "--num-iterations", 2, *SMALL, "--out", tmp_path / "run")
    invoke("resume", tmp_path / "run", "--num-iterations", 5)
    invoke("run", "--config", tmp_path / "run" / "run.toml", "--out", tmp_path / "again")
    assert (tmp_path / "again" / "solution.safetensors").read_bytes() == (
        tmp_path / "run" / "solution.safetensors"
    ).read_bytes()


PAIRS = [
    *((task, "fedbio") for task in sorted(discovery.tasks())),
    *(("quadratic", name) for name in sorted(discovery.algorithms())),
]


@pytest.mark.parametrize(("task", "name"), PAIRS)
def test_every_file_that_is_written_is_read_as_it_was_meant(tmp_path, name, task):
    one, other = discovery.task(task)(), discovery.algorithm(name)()
    (tmp_path / "run.toml").write_text(
        written(
            one,
            other,
            {"num_iterations": 3, "num_rounds": None, "checkpoint_every": 10, "residuals": True},
            {"seed": 2},
        )
    )
    read = read_run_file(tmp_path / "run.toml")
    assert type(one)(**read.task_settings) == one
    assert type(other)(**read.algorithm_settings) == other
    assert (read.plan, read.options) == ({"num_iterations": 3, "checkpoint_every": 10, "residuals": True}, {"seed": 2})


TASK = '[task]\nname = "quadratic"\n'
WRONG = {
    "misspelt": (TASK + "[algoritm]\n", "Did you mean 'algorithm'"),
    "half a number": ("num_iterations = 2.5\n" + TASK, "iterations of .* is 2.5, expected a whole number, at least 0"),
    "no such log": ('log = ["paper"]\n' + TASK + '[algorithm]\nname = "fedbio"\n', "There is no log named 'paper'"),
    "nameless": ("[task]\nnum_clients = 3\n", "the table task of .* has no name"),
    "no such task": ('[task]\nname = "quadratik"\n', "Did you mean 'quadratic'"),
    "no such algorithm": (TASK + '[algorithm]\nname = "fedbioo"\n', "Did you mean 'fedbio'"),
    "no such setting": (TASK + "num_client = 3\n", "Did you mean 'num_clients'"),
    "no such setting of the algorithm": (
        TASK + '[algorithm]\nname = "fedbio"\nlr_uper = 1.0\n',
        "Did you mean 'lr_upper'",
    ),
    "no such option": (TASK + "[options]\nsed = 1\n", "Did you mean 'seed'"),
    "out of range": (TASK + '[algorithm]\nname = "fedbio"\nlr_upper = -1.0\n', "lr_upper is -1.0, expected a value"),
    "wrong kind": ('num_iterations = "many"\n' + TASK, "iterations of .* is 'many', expected a whole number"),
    "no table": ('task = "quadratic"\n', "task of .* is 'quadratic', expected a table"),
    "network": (
        TASK + '[algorithm]\nname = "fedbio"\n[options.network]\nkind = "ring"\n',
        "is for algorithms between peers, and fedbio has a server",
    ),
    "sampling": (TASK + '[options]\nsampling = "sometimes"\n', "sampling .* is 'sometimes'"),
    "no TOML": ("[task\n", "is not readable as TOML"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_what_is_wrong_with_a_file_is_said(tmp_path, case):
    content, sentence = WRONG[case]
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises(FedBilevelError, match=sentence):
        invoke("run", "--config", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_and_a_run_that_is_not_named(tmp_path):
    with pytest.raises(FedBilevelError, match=r"run.toml cannot be read \(No such file or directory\)"):
        invoke("run", "--config", tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text('[algorithm]\nname = "fedbio"\n')
    with pytest.raises(FedBilevelError, match="there is no task"):
        invoke("run", "--config", tmp_path / "run.toml")
    invoke("run", "quadratic", "--config", tmp_path / "run.toml", "--num-iterations", 0, "--out", tmp_path / "none")
    invoke("run", "--config", tmp_path / "none" / "run.toml", "--out", tmp_path / "none again")
    with pytest.raises(FedBilevelError, match="there is no task"):
        invoke("run")


# ---- one dialect ---------------------------------------------------------------------------------


def test_a_file_of_a_record_is_a_plan_between_sites(tmp_path):
    invoke("run", "regularisation", "-a", "fedbio", "--num-rounds", 2, "--fraction", 0.5, "--out", tmp_path / "run")
    file = tmp_path / "run" / "run.toml"
    with pytest.warns(IgnoredWarning, match=r"does not use .*checkpoint_every, .* options.device of .*run.toml"):
        plan = sites.read_plan(file, ["north", "south"])
    alone = read_run_file(file)
    assert (plan.name, plan.num_rounds, plan.sites) == ("regularisation-fedbio", 2, ("north", "south"))
    assert plan.built_algorithm().asdict() == discovery.algorithm("fedbio")(**alone.algorithm_settings).asdict()
    assert plan.keywords() == {**keywords(alone.options), "device": plan.keywords()["device"]}


def test_a_plan_between_sites_runs_in_one_process(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text('name = "x"\nsites = ["a", "b"]\nquorum = 2\ndeadline = 5.0\nnum_iterations = 1\n' + TASK)
    with pytest.warns(IgnoredWarning, match="a run in one process does not use name, sites, quorum, deadline"):
        found = read_run_file(file)
    assert (found.task, found.plan) == ("quadratic", {"num_iterations": 1})


READERS = {
    "one process": read_run_file,
    "sites": lambda path: sites.read_plan(path, ["a", "b"]),
    "peers": lambda path: peers.read_plan(path, 3),
}


@pytest.mark.parametrize("place", READERS)
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("num_iteratons = 3", "no key in .* named 'num_iteratons'. Did you mean 'num_iterations'"),
        ('num_iterations = "3"', "num_iterations of .* is '3', expected a whole number"),
        ('quorum = "two"', "quorum of .* is 'two', expected a whole number"),
        ("[tusk]", "no key in .* named 'tusk'. Did you mean 'task'"),
    ],
)
def test_a_wrong_key_is_refused_alike_in_every_place(tmp_path, place, line, sentence):
    path = tmp_path / "run.toml"
    method = "hgp" if place == "peers" else "fedbio"
    path.write_text(f'{line}\n[task]\nname = "quadratic"\n[algorithm]\nname = "{method}"\n')
    with pytest.raises(FedBilevelError, match=sentence):
        READERS[place](path)


@pytest.mark.parametrize("place", ["sites", "peers"])
def test_a_message_may_not_contain_what_its_receiver_does_not_use(place):
    plan = {"task": {"name": "quadratic"}, "algorithm": {"name": "fedbio"}, "checkpoint_every": 3}
    with pytest.raises(PlanError, match=f"sets checkpoint_every, which a run between {place} does not use"):
        parts_of(plan, place)


@pytest.mark.parametrize("missing", ["task", "algorithm"])
def test_a_plan_without_a_task_or_an_algorithm_is_refused(missing):
    plan = {"task": {"name": "quadratic"}, "algorithm": {"name": "fedbio"}}
    with pytest.raises(PlanError, match=f"the plan has no {missing}: give one"):
        parts_of({**plan, missing: None}, "peers")


def test_a_step_of_auto_is_kept_as_a_word_by_flags_files_and_a_resumed_run(tmp_path):
    run = ["run", "quadratic", "-a", "fedbio", "--num-iterations", "1", "--lr-upper", "auto", "--lr-lower", "0.1"]
    assert CliRunner().invoke(cli, [*run, "--out", str(tmp_path / "one")]).exit_code == 0
    file = tmp_path / "one" / "run.toml"
    assert 'lr_upper = "auto"' in file.read_text()
    again = ["run", "--config", str(file), "--out", str(tmp_path / "two")]
    assert CliRunner().invoke(cli, again).exit_code == 0
    one, two = (Record(tmp_path / name).read_config() for name in ("one", "two"))
    assert one["steps"] == two["steps"]
    assert one["identity"]["settings"]["lr_upper"] == "auto"
    assert CliRunner().invoke(cli, ["resume", str(tmp_path / "one"), "--num-iterations", "2"]).exit_code == 0
    assert Record(tmp_path / "one").read_config()["steps"] == one["steps"]
