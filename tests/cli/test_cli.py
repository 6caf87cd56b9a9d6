import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from rich.console import Console

from fedbilevel import discovery
from fedbilevel.cli import terminal
from fedbilevel.cli.main import cli, main
from fedbilevel.cli.run import run_command
from fedbilevel.runs.record import Record

CALL = "import torch; torch.set_num_threads(1); from fedbilevel.cli.main import main; main()"


def call(*args, cwd):
    """Run a command in this process, because starting a process takes longer than the command.

    `test_ctrl_c_...` starts a real process."""
    said, complained = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        redirect_stdout(said),
        redirect_stderr(complained),
    ):
        warnings.simplefilter("default")
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["fedbilevel", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
    return SimpleNamespace(returncode=end.value.code, stdout=said.getvalue(), stderr=complained.getvalue())


def test_run_resume_and_the_record(tmp_path):
    flags = [
        "quadratic",
        "--algorithm",
        "fbo_aggitd",
        "--estimator",
        "sampled",
        "--num-local-steps",
        "1,2,3",
        "--num-clients",
        "3",
        "--batch-size",
        "2",
        "--fraction",
        "0.7",
    ]
    whole = call("run", *flags, "--num-iterations", 6, "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert "Saved in whole" in whole.stdout
    call("run", *flags, "--num-iterations", 3, "--out", "half", cwd=tmp_path)
    again = call("resume", "half", "--num-iterations", 6, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    last = lambda name: {
        key: value
        for key, value in json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]).items()
        if key != "seconds"
    }
    assert last("whole") == last("half")
    assert (tmp_path / "whole" / "solution.safetensors").read_bytes() == (
        tmp_path / "half" / "solution.safetensors"
    ).read_bytes()
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["identity"]["settings"]["num_local_steps"] == [1, 2, 3]
    assert config["task_settings"]["num_clients"] == 3
    assert {"torch", "numpy", "python", "fedbilevel"} <= set(config["versions"])


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["run", "quadratik", "-a", "fedbio"], "There is no task named 'quadratik'. Did you mean 'quadratic'?"),
        (["run", "quadratic", "-a", "fedbi"], "There is no algorithm named 'fedbi'. Did you mean 'fedbio'?"),
        (["run", "quadratic", "-a", "zzz"], "Known: "),
        (["run", "quadratic", "-a", "fedbio", "--lr-uper", "1"], "--lr-upper"),
        (["run", "quadratic", "-a", "fedbio", "--lr-upper", "-1"], "lr_upper is -1.0, expected a value greater than 0"),
        (["run", "quadratic", "-a", "fedbio", "--num-local-steps", "a,b"], "neither a whole number nor several"),
        (["run", "quadratic", "-a", "fedbio", "--lr-upper", "fast"], "'fast' is not a number: give e.g. 0.1, or auto"),
        (
            ["run", "quadratic", "-a", "fedbio", "--num-local-steps", "1,2", "--num-iterations", "1"],
            "2 numbers of local steps for 5 clients",
        ),
        (["run", "quadratic", "-a", "fedbio", "--num-iterations", "-5"], "num_iterations is -5"),
        (["run", "quadratic", "-a", "fedbio", "--device", "tpu9"], "device is 'tpu9'"),
        (["run", "data_cleaning", "-a", "fedavg", "--noise", "1.5"], "noise is 1.5, expected a value at most 1"),
        (["run", "data_cleaning", "-a", "fedavg", "--num-clean", "500"], "500 were requested"),
        (["resume", "nowhere"], "there is no run in nowhere"),
        (["compare", "quadratic", "--algorithms", "fedbio", "--target", "distance"], "expected METRIC=VALUE"),
        (
            ["compare", "quadratic", "--algorithms", "fedbio", "--target", "distanz=1", "--num-iterations", "1"],
            "there is no metric named 'distanz'",
        ),
        (["compare", "quadratic", "--algorithms", "fedbio", "--set", "fedbio.lr_uper=1"], "Did you mean 'lr_upper'?"),
        (
            ["compare", "quadratic", "--algorithms", "fedbio", "--set", "fedbio.lr_upper=abc"],
            "--set got 'fedbio.lr_upper=abc'",
        ),
        (["compare", "quadratic", "--algorithms", "--target", "distance=1"], "there are no algorithms to compare"),
        (["compare", "quadratic", "--algorithms", "fedbio", "--out", "/proc/nowhere/cmp"], "cannot be made"),
        (["run", "quadratic", "-a", "fedbio", "--seed", "-1"], "seed must lie between"),
        (["run", "quadratic", "-a", "fedbio", "--device", "meta"], "device is 'meta'"),
        (["run", "quadratic", "-a", "fedbio", "--out", "/proc"], "cannot be written"),
        (
            ["run", "quadratic", "-a", "hgp", "--network", "random_directed", "--averaging", "gossip"],
            "gossip needs shares that sum to one at the receiver too",
        ),
        (
            ["run", "quadratic", "-a", "hgp", "--network-loss", "0.1", "--averaging", "push_sum"],
            "never recovers what a lost message carried: use averaging 'robust'",
        ),
        (
            ["run", "quadratic", "-a", "sgp", "--network-loss", "0.1", "--averaging", "robust"],
            "sgp pushes without running sums",
        ),
        (["run", "quadratic", "-a", "hgp", "--network", "file"], "kind='file' needs the name of a file"),
        (
            ["run", "quadratic", "-a", "hgp", "--network", "file", "--network-file", "none.json"],
            "none.json cannot be read",
        ),
        (["run", "quadratic", "-a", "hgp", "--network", "star"], "'star' is not one of"),
        (["run", "quadratic", "-a", "hgp", "--network-loss", "1.5"], "loss is 1.5, expected a value at most 0.99"),
        (
            [
                "run",
                "quadratic",
                "-a",
                "hgp",
                "--network",
                "random_directed",
                "--network-highest",
                "0",
                "--network-lowest",
                "0",
            ],
            "the network never connects",
        ),
        (
            ["run", "quadratic", "-a", "hgp", "--averaging-num-steps", "0"],
            "num_steps is 0, expected a value at least 1",
        ),
        (
            ["run", "quadratic", "-a", "hgp", "--fraction", "0.5"],
            "hgp runs between peers without a server and does not use cohort",
        ),
        (["run", "quadratic", "-a", "fedbio", "--network", "ring"], "No such option"),
        (["run", "quadratic", "--lr-uper", "1"], "No such option"),
        (
            ["run", "quadratic", "--lr-upper", "1"],
            "self_tuned, which auto chose, has no setting --lr-upper: leave it out, or name an algorithm that has it, "
            "e.g. --algorithm fedbio.",
        ),
    ],
)
def test_user_errors_get_one_sentence_and_no_traceback(tmp_path, monkeypatch, capsys, args, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedbilevel", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err
    assert not any((tmp_path / "runs").rglob("checkpoint*")) or "clients" in sentence


PEERS = [
    "quadratic",
    "-a",
    "hgp",
    "--num-clients",
    "3",
    "--num-terms",
    "2",
    "--num-lower-steps",
    "3",
    "--lr-system",
    "0.05",
    "--batch-size",
    "2",
]


def invoke(*args):
    """In this process, which saves the start of another."""
    result = CliRunner().invoke(cli, list(map(str, args)), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_a_run_between_peers_is_recorded_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        *PEERS,
        "--network",
        "random_directed",
        "--network-seed",
        4,
        "--averaging-num-steps",
        3,
        "--averaging-weights",
        "kept",
        "--optimiser",
        "adam",
    ]
    invoke("run", *flags, "--num-iterations", 4, "--out", "whole")
    invoke("run", *flags, "--num-iterations", 2, "--out", "half")
    invoke("resume", "half", "--num-iterations", 4)
    last = lambda name: {
        key: value
        for key, value in json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]).items()
        if key != "seconds"
    }
    assert last("whole") == last("half")
    assert last("whole")["rounds"] == 4 * (3 + 2 * 3 + 3)
    assert last("whole")["messages"] > 0
    assert (tmp_path / "whole" / "solution.safetensors").read_bytes() == (
        tmp_path / "half" / "solution.safetensors"
    ).read_bytes()
    identity = json.loads((tmp_path / "half" / "config.json").read_text())["identity"]
    assert (identity["network"]["kind"], identity["network"]["seed"], identity["averaging"]["weights"]) == (
        "random_directed",
        4,
        "kept",
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"num_peers": 3, "steps": [[[0, 1], [1, 2], [2, 7]]]},
            "step 0: the edge [2, 7] names the unknown peer 7; peers are numbered from 0 to 2",
        ),
        ({"num_peers": 4, "steps": [[[0, 1]]]}, "is for 4 peers, there are 3 clients"),
        ({"num_peers": 3, "steps": [[[0, 1], [1, 0]]]}, "the network never connects"),
        ({"peers": 3}, "is not of the form"),
    ],
)
def test_a_bad_network_file_gets_one_sentence(tmp_path, monkeypatch, capsys, content, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.json").write_text(json.dumps(content))
    monkeypatch.setattr(
        sys,
        "argv",
        ["fedbilevel", "run", *PEERS, "--network", "file", "--network-file", "net.json", "--num-iterations", "1"],
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err
    assert not any(tmp_path.rglob("checkpoint*"))


def test_a_network_file_is_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.json").write_text(
        json.dumps({"num_peers": 3, "directed": True, "steps": [[[0, 1], [1, 2]], [[2, 0]]]})
    )
    flags = [
        "quadratic",
        "-a",
        "sgp",
        "--num-clients",
        3,
        "--num-lower-steps",
        5,
        "--network",
        "file",
        "--network-file",
        "net.json",
    ]
    invoke("run", *flags, "--num-iterations", 2, "--out", "run")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["messages"] == 5 * 2 + 5 * 1


def test_an_existing_folder_is_kept(tmp_path):
    assert (
        call("run", "quadratic", "-a", "fedavg", "--num-iterations", 1, "--out", "here", cwd=tmp_path).returncode == 0
    )
    before = {place.name: place.read_bytes() for place in (tmp_path / "here").iterdir()}
    again = call("run", "quadratic", "-a", "fedavg", "--num-iterations", 2, "--out", "here", cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert before == {place.name: place.read_bytes() for place in (tmp_path / "here").iterdir()}


def test_ctrl_c_says_how_to_go_on_and_that_works(tmp_path):
    args = ["run", "quadratic", "-a", "fedbio", "--num-iterations", "100000", "--measure-every", "1", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, *args], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "To resume: fedbilevel resume run" in out
    assert "Traceback" not in err
    done = json.loads(metrics.read_text().splitlines()[-1])["iteration"]
    again = call("resume", "run", "--num-iterations", done + 1, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("name", sorted(discovery.algorithms()))
def test_every_setting_of_every_algorithm_is_a_flag_with_its_symbol(name):
    text = CliRunner().invoke(cli, ["run", "quadratic", "--algorithm", name, "--help"], terminal_width=300).output
    for field in dataclasses.fields(discovery.algorithm(name)):
        assert f"--{field.name.replace('_', '-')}" in text
        if field.metadata.get("symbol"):
            assert f"[{field.metadata['symbol']}]" in text


def test_no_flag_means_two_things():
    """One command line sets a task and an algorithm, so their settings must not share a name."""
    run_flags = {param.name for param in run_command.params}
    names = lambda kinds: {field.name for kind in kinds.values() for field in dataclasses.fields(kind)}
    tasks, algorithms = names(discovery.tasks()), names(discovery.algorithms())
    assert not tasks & algorithms
    assert not (tasks | algorithms) & run_flags


def test_list_names_everything():
    text = CliRunner().invoke(cli, ["list"]).output
    assert all(name in text for name in (*discovery.algorithms(), *discovery.tasks()))


def test_check_prints_a_verdict_and_its_exit_code_follows(tmp_path):
    good = call("check", "quadratic", "--bend", "0.5", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("Verdict: all") == 2
    bad = call("check", "quadratic", "--algorithm", "fednest", "--num-terms", "2", cwd=tmp_path)
    assert bad.returncode == 1
    assert "FAIL  fednest" in bad.stdout


def test_compare_reports_cost_to_target_and_saves_one_record(tmp_path):
    args = [
        "compare",
        "quadratic",
        "--algorithms",
        "fedbio",
        "fedavg",
        "--target",
        "distance=1.0",
        "--num-iterations",
        40,
        "--repetitions",
        2,
    ]
    args += ["--set", "task.num_clients=3", "--set", "fedbio.lr_upper=0.04", "--num-rounds", 30, "--out", "cmp"]
    result = call(*args, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    saved = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    by_name = {outcome["name"]: outcome for outcome in saved["outcomes"]}
    assert (by_name["fedbio"]["num_reached"], by_name["fedavg"]["num_reached"]) == (2, 0)
    assert saved["task_settings"]["num_clients"] == 3
    for one in saved["runs"]:
        assert one["rows"][-1]["rounds"] == 30
    fedbio = [one["rows"] for one in saved["runs"] if one["algorithm"] == "fedbio"]
    firsts = [next(row for row in rows if row["distance"] <= 1.0)["rounds"] for rows in fedbio]
    assert by_name["fedbio"]["to_target"]["rounds"][0] == sum(firsts) / 2
    assert fedbio[0][0]["distance"] != fedbio[1][0]["distance"]  # repetitions differ in their data


def test_a_comparison_survives_a_run_that_diverges_and_is_never_overwritten(tmp_path):
    args = [
        "compare",
        "quadratic",
        "--algorithms",
        "fedbio",
        "fedavg",
        "--num-iterations",
        20,
        "--repetitions",
        1,
        "--set",
        "fedbio.lr_lower=1e9",
        "--out",
        "cmp",
    ]
    result = call(*args, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "fedbio (1 diverged)" in result.stdout
    saved = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    assert [(one["algorithm"], one["diverged"] is None) for one in saved["runs"]] == [
        ("fedbio", False),
        ("fedavg", True),
    ]
    again = call(*args, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a comparison" in again.stderr


def test_the_task_may_stand_after_the_flags(tmp_path):
    result = call(
        "run",
        "--algorithm",
        "fedavg",
        "quadratic",
        "--lr-lower",
        "0.1",
        "--num-iterations",
        1,
        "--out",
        "r",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


def test_compare_and_influence_average_robustly_where_messages_are_lost(tmp_path):
    """As run does: what the user did not choose follows the network."""
    runner = CliRunner()
    lossy = [
        "--set",
        "network.loss=0.1",
        "--set",
        "hgp.lower_solver=mix",
        "--set",
        "hgp.num_terms=2",
        "--set",
        "averaging.num_steps=2",
    ]
    compared = [
        "compare",
        "quadratic",
        "--algorithms",
        "hgp",
        "--num-iterations",
        "1",
        "--repetitions",
        "1",
        *lossy,
        "--out",
        str(tmp_path / "c"),
    ]
    result = runner.invoke(cli, compared)
    assert result.exit_code == 0, result.exception
    small = [
        "--num-removed",
        "0",
        "--num-terms",
        "2",
        "--averaging-num-steps",
        "2",
        "--num-train",
        "5",
        "--num-val",
        "5",
        "--no-pictures",
    ]
    result = runner.invoke(cli, ["influence", "--network-loss", "0.1", *small, "--out", str(tmp_path / "i")])
    assert result.exit_code == 0, result.exception
    assert json.loads((tmp_path / "i" / "influence.json").read_text())["settings"]["averaging"]["kind"] == "robust"


def test_check_offers_no_network_because_it_would_use_none():
    result = CliRunner().invoke(cli, ["check", "quadratic", "-a", "hgp", "--network", "ring"])
    assert result.exit_code == 2
    assert "No such option '--network'" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_what_a_shell_reads(shell):
    said = CliRunner().invoke(cli, ["completion", shell])
    assert said.exit_code == 0
    assert "_FEDBILEVEL_COMPLETE" in said.output


def test_tasks_algorithms_commands_and_flags_are_completed():
    suggested = lambda args, begun: [
        item.value for item in ShellComplete(cli, {}, "fedbilevel", "_FEDBILEVEL_COMPLETE").get_completions(args, begun)
    ]
    assert suggested([], "comp") == ["compare", "completion"]
    assert suggested(["run"], "quad") == ["quadratic"]
    assert suggested(["run", "quadratic", "--algorithm"], "fedbioacc") == ["fedbioacc", "fedbioacc_local"]
    assert suggested(["run", "quadratic", "--algorithm", "fedbio"], "--lr-u") == ["--lr-upper"]


def test_progress_on_a_terminal_shows_what_people_care_about(tmp_path, monkeypatch):
    """Rounds, megabytes, figures, residual and the time that is left, in one line."""
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=screen, force_terminal=True, width=200))
    result = CliRunner().invoke(
        cli, ["run", "quadratic", "-a", "fedbio", "--num-rounds", "8", "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.exception
    rows = Record(tmp_path / "run").rows()
    seen = screen.getvalue()
    for part in (
        "8, 8 rounds, 0.0 MB",
        f"distance {rows[-1]['distance']:.4g}",
        f"residual {rows[-1]['residual']:.4g}",
        "ETA",
    ):
        assert part in seen, part
