"""Logs read back with the tools they are made for: they equal the record, however the run ended.

A resumed run logs no row twice."""

from __future__ import annotations

import ast
import builtins
import errno
import functools
import io
import json
import os
import re
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel.cli.main import cli
from fedbilevel.errors import FedBilevelError, LogError, NonFiniteError, UnknownNameError
from fedbilevel.runs import logs
from fedbilevel.tasks.quadratic import Quadratic

TASK = Quadratic(num_clients=3, heterogeneity=2.0)
NAMES = list(logs.LOGS)


@pytest.fixture(autouse=True)
def _at_home(monkeypatch, tmp_path):
    """No server of the machine's own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


def go(folder, log, *, num_iterations=6, lr_upper=0.05, **options):
    problem, clients = TASK.build()
    algorithm = fb.discovery.algorithm("fedbio")(lr_upper=lr_upper, lr_lower=0.2, lr_system=0.2)
    before = [] if log is None else [log]
    given = {"measure_every": 2, "checkpoint_every": 4, "record": folder, "dtype": torch.float64, **options}
    return fb.solve(
        problem,
        clients,
        algorithm,
        residuals=False,
        num_iterations=num_iterations,
        callbacks=[*before, *given.pop("callbacks", ())],
        **given,
    )


def in_jsonl(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def in_tensorboard(folder):
    """Step by step, what TensorBoard's own reader finds."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    rows: dict[int, dict] = {}
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            assert tag not in rows.setdefault(event.step, {}), "a point is there twice"
            rows[event.step][tag] = event.value
    return [{"iteration": step, **rows[step]} for step in sorted(rows)]


def mlflow_run(folder):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fedbilevel").experiment_id])
    return client, run


def in_mlflow(folder):
    client, run = mlflow_run(folder)
    rows: dict[int, dict] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert name not in rows.setdefault(metric.step, {}), "a point is there twice"
            rows[metric.step][name] = metric.value
    return [{"iteration": step, **rows[step]} for step in sorted(rows)]


READERS = {"jsonl": in_jsonl, "tensorboard": in_tensorboard, "mlflow": in_mlflow}


def made(name, folder):
    if name != "jsonl":
        pytest.importorskip(name)
    if name == "mlflow" and not (folder / "mlflow").exists():
        (folder / "mlflow").mkdir()
        (folder / "mlflow" / "mlflow.db").write_bytes(_empty_tables())
    return logs.make(name, folder)


@functools.cache
def _empty_tables():
    """MLflow needs seconds to make a new database: once for all of these tests."""
    with tempfile.TemporaryDirectory() as folder:
        log, row = (
            logs.MLflow(Path(folder) / "new", experiment="another"),
            {"iteration": 0, "seconds": 0.1, "rounds": 0},
        )
        log.begin({}, [row])
        log.end([row], "finished")
        return (Path(folder) / "new" / "mlflow.db").read_bytes()


def check(name, folder, rows):
    found = READERS[name](folder)
    assert [row["iteration"] for row in found] == [row["iteration"] for row in rows]
    for one, other in zip(found, rows, strict=True):
        expected = {key: float(value) for key, value in other.items()}
        if name == "tensorboard":  # keeps 32 bits
            expected = {key: float(np.float32(value)) for key, value in expected.items()}
        assert {key: float(value) for key, value in one.items()} == expected


# ---- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_measurement_is_there_as_in_the_record(name, tmp_path):
    result = go(tmp_path / "run", made(name, tmp_path))
    assert [row["iteration"] for row in result.rows] == [0, 2, 4, 6]
    check(name, tmp_path, result.rows)


def test_mlflow_holds_the_settings_and_how_the_run_ended(tmp_path):
    go(
        None, made("mlflow", tmp_path), seed=3, describe={"task": "quadratic", "task_settings": TASK.asdict()}
    )  # also without a record
    _, run = mlflow_run(tmp_path)
    params = run.data.params
    expected = {
        "algorithm": "fedbio",
        "settings.lr_upper": "0.05",
        "seed": "3",
        "num_clients": "3",
        "num_iterations": "6",
        "task": "quadratic",
    }
    assert expected.items() <= params.items()
    assert params["task_settings.heterogeneity"] == "2.0"
    assert "data" not in params
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "fedbio on quadratic"
    assert run.data.tags["version.torch"] == torch.__version__
    assert [place.name for place in tmp_path.iterdir()] == ["mlflow"]  # nothing beside, such as ./mlruns


def test_tensorboard_shows_the_configuration(tmp_path):
    go(tmp_path / "run", made("tensorboard", tmp_path))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = read.Tensors("config/text_summary")
    config = json.loads(text.tensor_proto.string_val[0].decode())
    assert config == json.loads((tmp_path / "run" / "config.json").read_text())


def test_names_of_figures_that_mlflow_does_not_take_are_changed(tmp_path):
    log = made("mlflow", tmp_path)
    row = {"iteration": 0, "seconds": 0.1, "rounds": 0, "top@1": 0.5, "note": "text", "nothing": None}
    log.begin({}, [row])
    log.end([row], "finished")
    assert in_mlflow(tmp_path) == [{"iteration": 0, "seconds": 0.1, "rounds": 0.0, "top_1": 0.5}]


def test_many_settings_and_figures_are_more_than_one_batch(tmp_path):
    log = made("mlflow", tmp_path)
    row = {"iteration": 0, "seconds": 0.1, "rounds": 0, **{f"figure{k}": float(k) for k in range(1100)}}
    log.begin({"identity": {f"setting{k}": k for k in range(150)}}, [row])
    log.end([row], "finished")
    _, run = mlflow_run(tmp_path)
    assert run.data.metrics["figure1099"] == 1099.0
    assert len(run.data.metrics) == 1102
    assert run.data.params["setting149"] == "149"


# ---- how a run ends ------------------------------------------------------------------------------


class StopAt:
    def __init__(self, iteration, act=lambda: True):
        self.iteration, self.act = iteration, act

    def __call__(self, now):
        return self.act() if now.iteration == self.iteration else None


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_a_callback_stops_is_there_to_its_last_measurement(name, tmp_path):
    result = go(tmp_path / "run", made(name, tmp_path), callbacks=[StopAt(3)])
    assert [row["iteration"] for row in result.rows] == [0, 2, 3]
    check(name, tmp_path, result.rows)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", NAMES)
def test_after_ctrl_c_a_resumed_run_goes_on_in_its_log_and_doubles_nothing(name, tmp_path, capsys):
    """Ctrl-C in outer iteration 3, which is finished and has a checkpoint but no measurement."""
    first = go(tmp_path / "run", made(name, tmp_path), callbacks=[StopAt(3, ctrl_c)])
    assert first.stopped == "interrupted"
    check(name, tmp_path, first.rows)
    if name == "mlflow":
        assert mlflow_run(tmp_path)[1].info.status == "KILLED"
    second = go(tmp_path / "run", made(name, tmp_path), resume=True, num_iterations=8)
    assert [row["iteration"] for row in second.rows] == [0, 2, 4, 6, 8]
    check(name, tmp_path, second.rows)
    if name == "mlflow":
        assert mlflow_run(tmp_path)[1].info.status == "FINISHED"


@pytest.mark.parametrize("name", NAMES)
def test_what_was_measured_after_the_last_checkpoint_is_not_there_twice(name, tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        go(
            tmp_path / "run", made(name, tmp_path), num_iterations=12, callbacks=[StopAt(7, fail)]
        )  # checkpoint at 4, measured at 6
    before = READERS[name](tmp_path)
    assert [row["iteration"] for row in before] == [0, 2, 4, 6]
    if name == "mlflow":
        assert mlflow_run(tmp_path)[1].info.status == "FAILED"
    rows = go(tmp_path / "run", made(name, tmp_path), resume=True, num_iterations=12).rows
    if name == "mlflow":  # metrics of MLflow cannot be taken back: only the clock of that one measurement differs
        rows = [{**row, "seconds": before[3]["seconds"]} if row["iteration"] == 6 else row for row in rows]
    check(name, tmp_path, rows)


def fail():
    raise RuntimeError("power cut")


@pytest.mark.parametrize("name", NAMES)
def test_a_log_that_is_added_when_a_run_is_resumed_has_all_of_it(name, tmp_path):
    go(tmp_path / "run", None)
    rows = go(tmp_path / "run", made(name, tmp_path), resume=True, num_iterations=8).rows
    check(name, tmp_path, rows)


def test_second_ctrl_c_and_divergence_close_the_log(tmp_path):
    class Watched(logs.JsonLines):
        def _close(self, stopped):
            super()._close(stopped)
            how.append(stopped)

    how: list[str] = []

    def twice():
        ctrl_c()
        ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "a", Watched(tmp_path / "a.jsonl"), callbacks=[StopAt(3, twice)])
    with pytest.raises(NonFiniteError, match="too long"):
        go(tmp_path / "b", Watched(tmp_path / "b.jsonl"), lr_upper=1e200, num_iterations=9, recover=False)
    assert how == ["interrupted", "failed"]
    assert [json.loads(line)["iteration"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [0, 2]


def test_when_one_log_cannot_begin_those_before_it_end(tmp_path):
    (tmp_path / "taken").mkdir()
    heard = []

    class Heard:
        def begin(self, config, rows):
            heard.append(("begin", len(rows), config["identity"]["algorithm"]))

        def __call__(self, now):
            heard.append(now.iteration)

        def end(self, rows, stopped):
            heard.append(("end", len(rows), stopped))

    with pytest.raises(LogError, match="taken cannot be written"):
        go(None, Heard(), callbacks=[logs.JsonLines(tmp_path / "taken")])
    assert heard == [("begin", 1, "fedbio"), ("end", 1, "failed")]
    heard.clear()
    go(None, Heard(), num_iterations=2)
    assert heard == [("begin", 1, "fedbio"), 1, 2, ("end", 2, "finished")]


# ---- the command line ----------------------------------------------------------------------------


def test_logs_by_flags_go_on_when_the_run_is_resumed(tmp_path):
    for name in NAMES[1:]:
        pytest.importorskip(name)
    runner, folder = CliRunner(), tmp_path / "run"
    folder.mkdir()
    made("mlflow", folder)
    flags = [word for name in NAMES for word in ("--log", name)]
    first = runner.invoke(
        cli,
        ["run", "quadratic", "-a", "fedbio", "--num-iterations", "3", "--out", str(folder), *flags],
        catch_exceptions=False,
    )
    assert first.exit_code == 0, first.output
    again = runner.invoke(cli, ["resume", str(folder), "--num-iterations", "5"], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for name in NAMES:
        check(name, folder, rows)
    assert "mlflow.store" not in first.output  # what it has to say about its tables
    assert "Saved in" in again.output
    runner.invoke(cli, ["resume", str(folder), "--num-iterations", "6", "--log", "jsonl"], catch_exceptions=False)
    assert [len(READERS[name](folder)) for name in NAMES] == [7, 6, 6]  # that one alone


def test_an_unknown_log_is_refused():
    done = CliRunner().invoke(cli, ["run", "quadratic", "-a", "fedbio", "--log", "tensorbord"])
    assert done.exit_code == 2
    assert "'tensorbord' is not one of 'jsonl', 'tensorboard', 'mlflow'" in done.output
    with pytest.raises(UnknownNameError, match=r"no log named 'tensorbord'\. Did you mean 'tensorboard'"):
        logs.make("tensorbord", ".")


def test_what_logs_and_parquet_need_is_imported_only_by_those_who_use_it():
    for module in ("runs/logs.py", "data/folders.py"):
        top = ast.parse((Path(logs.__file__).parents[1] / module).read_text()).body
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names}.isdisjoint({"mlflow", "tensorboard", "pyarrow", "sqlalchemy"})
        assert "torch.utils.tensorboard" not in names


# ---- faults --------------------------------------------------------------------------------------


def refused(act, words):
    with pytest.raises(FedBilevelError) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert re.search(words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("name", "package"),
    [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("mlflow", "alembic")],
)
def test_a_package_that_is_missing_is_named_with_what_to_install(name, package, tmp_path, monkeypatch):
    made(name, tmp_path)
    real = builtins.__import__

    def missing(module, *rest, **more):
        if module == package:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(module, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused(
        lambda: logs.make(name, tmp_path),
        rf"the log '{name}' needs packages that are not installed \({package}\): pip install 'fedbilevel\[{name}\]'\.$",
    )
    if package in ("sqlalchemy", "alembic"):
        logs.MLflow(tmp_path, tracking_uri="http://127.0.0.1:9")  # a server has them itself


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_the_log_of_another_run_stays_as_it_is(name, tmp_path):
    rows = go(tmp_path / "one", made(name, tmp_path)).rows
    words = {
        "jsonl": r"^\S+log\.jsonl holds something else than measurements of this run: name another file",
        "tensorboard": r"^\S+tensorboard holds the log of another",
    }
    refused(lambda: go(tmp_path / "two", made(name, tmp_path)), words[name])
    check(name, tmp_path, rows)
    (tmp_path / "notes.txt").write_text("my notes\n")
    refused(
        lambda: go(tmp_path / "three", logs.JsonLines(tmp_path / "notes.txt")), r"^\S+notes\.txt holds something else"
    )
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"


def test_two_runs_in_one_mlflow_are_two_runs(tmp_path):
    made("mlflow", tmp_path)
    for k in (1, 2):
        go(None, logs.MLflow(tmp_path / "mlflow", name=f"run {k}"), num_iterations=2 * k)
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("fedbilevel").experiment_id])
    assert {run.info.run_name: run.data.params["num_iterations"] for run in runs} == {"run 1": "2", "run 2": "4"}


def test_places_that_cannot_be_written(tmp_path):
    for name in NAMES[1:]:
        pytest.importorskip(name)
    (tmp_path / "file").write_text("")
    refused(
        lambda: go(None, logs.JsonLines(tmp_path / "file" / "log.jsonl")),
        r"file/log\.jsonl cannot be written \(.+\): name another file",
    )
    refused(
        lambda: go(None, logs.TensorBoard(tmp_path / "file")), r"file cannot be written \(.+\): name another folder"
    )
    refused(
        lambda: go(None, logs.MLflow(tmp_path / "file" / "deeper")),
        r"MLflow at sqlite:\S+ cannot be written to \(.+\): name another place",
    )
    refused(
        lambda: go(None, logs.MLflow(tmp_path, tracking_uri=f"file://{tmp_path}/mlruns")),
        r"MLflow at file:\S+ cannot be written to \(The filesystem",
    )


def test_mlflow_goes_where_the_environment_says(tmp_path, monkeypatch):
    made("mlflow", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    assert logs.MLflow(tmp_path / "here").uri.endswith("elsewhere.db")
    assert logs.MLflow(tmp_path / "here", tracking_uri="sqlite:///given.db").uri == "sqlite:///given.db"
    assert not (tmp_path / "here").exists()


def test_the_records_own_file_is_no_log(tmp_path):
    folder = tmp_path / "record"
    with pytest.raises(LogError, match=r"metrics\.jsonl is the record's own file: name another one"):
        fb.solve(
            *Quadratic().build(),
            "fedbio",
            num_rounds=1,
            record=folder,
            callbacks=[logs.JsonLines(folder / "metrics.jsonl")],
        )
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


class Full(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_is_said(tmp_path, monkeypatch):
    log = logs.JsonLines(tmp_path / "log.jsonl")
    monkeypatch.setattr(log, "_open", lambda config, rows: setattr(log, "_file", Full()) or -1)
    with pytest.raises(
        LogError, match=r"log\.jsonl cannot be written \(No space left on device\): make room and resume"
    ):
        fb.solve(*Quadratic().build(), "fedbio", num_rounds=1, callbacks=[log])
