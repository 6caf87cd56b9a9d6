"""Logs of a run in addition to its record: callbacks of `solve`, selected by name with `--log`.

    jsonl         JsonLines     one line per measurement, as in metrics.jsonl of a record
    tensorboard   TensorBoard   one curve per metric
    mlflow        MLflow        settings as params and metrics as metrics, in an SQLite file or on
                                the server at MLFLOW_TRACKING_URI

A log has one entry per measurement, not per outer iteration. The step of an entry is the outer
iteration. Each entry is written before the run continues, so a crash loses no entry. A resumed run
continues its log without duplicate entries: the first measurement identifies the run of a log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.errors import LogError, UnknownNameError
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.record import finite, line_of, write_whole
from fedbilevel.runs.result import Progress

Row = Mapping[str, Any]


class _Log:
    """The common part of all logs, which tracks the last written entry.

    Subclasses implement the opening of a log, new entries and closing.
    """

    _last = -1  # outer iteration of the last entry

    def begin(self, config: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self._last = self._open(config, rows)
        self._add_new(rows)

    def __call__(self, now: Progress) -> None:
        if now.row is not None:
            self._add_new([now.row])

    def end(self, rows: Sequence[Row], stopped: str) -> None:
        try:
            self._add_new(rows)  # a run stopped by a callback is measured once more
        finally:
            self._close(stopped)

    def _add_new(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["iteration"] > self._last:
                self._add(row)
                self._last = row["iteration"]

    def _open(self, config: Mapping[str, Any], rows: Sequence[Row]) -> int:
        """Open the log, and return the outer iteration of its last entry, or -1 to write all."""
        raise NotImplementedError

    def _add(self, row: Row) -> None:
        raise NotImplementedError

    def _close(self, stopped: str) -> None:
        raise NotImplementedError


class JsonLines(_Log):
    """A log with one line of JSON per measurement in the file `path`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def _open(self, config: Mapping[str, Any], rows: Sequence[Row]) -> int:
        if self.path.name == "metrics.jsonl" and (self.path.parent / "config.json").exists():
            raise LogError(
                f"{self.path} is the record's own file: name another one, e.g. {self.path.with_name('log.jsonl')}."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            before = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            if before and not before.startswith(line_of(rows[0])):
                raise LogError(
                    f"{self.path} holds something else than measurements of this run: "
                    "name another file, or move it away."
                )
            write_whole(self.path, b"")  # a resumed run repeats the measurements after its checkpoint
            self._file = self.path.open("a", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"{self.path} cannot be written ({_brief(error)}): name another file.") from error
        return -1

    def _add(self, row: Row) -> None:
        try:
            self._file.write(line_of(row))
            self._file.flush()
        except OSError as error:
            raise LogError(f"{self.path} cannot be written ({_brief(error)}): make room and resume.") from error

    def _close(self, stopped: str) -> None:
        self._file.close()


class TensorBoard(_Log):
    """A log with one curve per metric in the folder `folder`.

    To view it: `tensorboard --logdir FOLDER`.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        with _needs("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._make: Callable[..., Any] = SummaryWriter

    def _open(self, config: Mapping[str, Any], rows: Sequence[Row]) -> int:
        mark, first = _mark(rows), rows[0]["iteration"]
        there = sorted(self.folder.glob("events.out.tfevents.*"))
        others = [place.name for place in there if not place.name.endswith(f".{mark}")]
        if others:
            raise LogError(
                f"{self.folder} holds the log of another run ({others[0]}): name another folder, or move it away."
            )
        self._began = time.time() - rows[-1]["seconds"]
        try:  # purge_step hides the entries of the earlier part of this run, which are written again
            self._writer = self._make(str(self.folder), purge_step=first if there else None, filename_suffix=f".{mark}")
        except OSError as error:
            raise LogError(f"{self.folder} cannot be written ({_brief(error)}): name another folder.") from error
        self._writer.add_text(
            "config",
            "".join(f"    {line}\n" for line in json.dumps(config, indent=2, sort_keys=True).splitlines()),
            first,
        )
        return -1

    def _add(self, row: Row) -> None:
        for name, value in _numbers(row):
            self._writer.add_scalar(name, value, row["iteration"], walltime=self._began + row["seconds"])
        self._writer.flush()

    def _close(self, stopped: str) -> None:
        self._writer.close()


class MLflow(_Log):
    """A log with settings as params, and metrics with the outer iteration as their step.

    The entries go to `tracking_uri`, else to the address in the environment variable
    MLFLOW_TRACKING_URI, else to mlflow.db in `folder`. They form a run named `name` in
    `experiment`. To view mlflow.db: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`. No
    artifacts are written.
    """

    STATUS = {
        **dict.fromkeys(("finished", "converged", "callback", "budget"), "FINISHED"),
        "interrupted": "KILLED",
        "failed": "FAILED",
    }

    def __init__(
        self,
        folder: Path | str,
        *,
        tracking_uri: str | None = None,
        experiment: str = "fedbilevel",
        name: str | None = None,
    ) -> None:
        self.folder, self.experiment, self.name = Path(folder).resolve(), experiment, name
        self.local = not (tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"))
        self.uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder / 'mlflow.db'}"
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # send no usage data
        with _needs("mlflow"):
            import mlflow

            if self.local:  # mlflow-skinny lacks both packages; only a local database needs them
                import alembic  # noqa: F401
                import sqlalchemy  # noqa: F401
            self._mlflow: Any = mlflow

    def _open(self, config: Mapping[str, Any], rows: Sequence[Row]) -> int:
        mark, choices = _mark(rows), dict(_flat(_params(config)))
        with self._asked():
            if self.local:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._client = self._mlflow.MlflowClient(tracking_uri=self.uri)
            found = self._client.get_experiment_by_name(self.experiment)
            place = (self.folder / "artifacts").as_uri() if self.local else None
            number = (
                found.experiment_id
                if found
                else self._client.create_experiment(self.experiment, artifact_location=place)
            )
            before = self._client.search_runs([number], f"tags.`fedbilevel.run` = '{mark}'", max_results=1)
            if before:
                self._run = before[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
                return max((entry.step for entry in self._client.get_metric_history(self._run, "rounds")), default=-1)
            tags = {
                "fedbilevel.run": mark,
                **{f"version.{name}": str(value) for name, value in config.get("versions", {}).items()},
            }
            name = (
                self.name
                or f"{choices.get('algorithm', 'run')} on {choices.get('task', choices.get('problem', 'problem'))}"
            )
            self._run = self._client.create_run(number, run_name=name, tags=tags).info.run_id
            params = [self._mlflow.entities.Param(name, str(value)[:500]) for name, value in choices.items()]
            for start in range(0, len(params), 100):  # MLflow's limit per request
                self._client.log_batch(self._run, params=params[start : start + 100])
        return -1

    def _add(self, row: Row) -> None:
        when, step = int(1000 * time.time()), row["iteration"]
        metrics = [
            self._mlflow.entities.Metric(re.sub(r"[^\w\-. :/]", "_", name), value, when, step)
            for name, value in _numbers(row)
        ]
        with self._asked():
            for start in range(0, len(metrics), 1000):
                self._client.log_batch(self._run, metrics=metrics[start : start + 1000])

    def _close(self, stopped: str) -> None:
        with self._asked():
            self._client.set_terminated(self._run, status=self.STATUS[stopped])

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Turn MLflow's errors into a LogError, and hide notices on tables and deprecations."""
        chatty = [
            logging.getLogger(name)
            for name in ("mlflow.store.db.utils", "alembic.runtime.migration", "alembic.runtime.plugins")
        ]
        before = [logger.level for logger in chatty]
        for logger in chatty:
            logger.setLevel(logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                yield
        except (self._mlflow.exceptions.MlflowException, OSError) as error:
            raise LogError(
                f"MLflow at {self.uri} cannot be written to ({_brief(error)}): "
                "name another place, or leave out this log."
            ) from error
        finally:
            for logger, level in zip(chatty, before, strict=True):
                logger.setLevel(level)


LOGS: dict[str, Callable[[Path], Callback]] = {
    "jsonl": lambda folder: JsonLines(folder / "log.jsonl"),
    "tensorboard": lambda folder: TensorBoard(folder / "tensorboard"),
    "mlflow": lambda folder: MLflow(folder / "mlflow"),
}


def make(name: str, folder: Path | str) -> Callback:
    """Make the log for `--log NAME` in the folder of a run."""
    if name not in LOGS:
        raise UnknownNameError("log", name, LOGS)
    return LOGS[name](Path(folder))


@contextmanager
def _needs(extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise LogError(
            f"the log {extra!r} needs packages that are not installed ({error.name or error}): "
            f"pip install 'fedbilevel[{extra}]'."
        ) from error


def _mark(rows: Sequence[Row]) -> str:
    """Return a hash that identifies a run by its first measurement.

    The duration in the measurement makes the hash unique.
    """
    return hashlib.sha256(json.dumps(finite(rows[0]), sort_keys=True).encode()).hexdigest()[:16]


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name != "iteration" and isinstance(value, int | float):
            yield name, float(value)


def _params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run: its plan, its task, and its identity without data hashes."""
    identity = {
        name: value for name, value in config.get("identity", {}).items() if name not in ("data", "losses", "x", "y")
    }
    return {
        **identity,
        **{name: value for name, value in config.get("run", {}).items() if name != "checkpoint_every"},
        **({"task": config["task"], "task_settings": config.get("task_settings", {})} if "task" in config else {}),
        "engine": config.get("engine"),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _brief(error: Exception) -> str:
    text = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
    return text.split(". ", 1)[0].rstrip(".")[:200] or type(error).__name__
