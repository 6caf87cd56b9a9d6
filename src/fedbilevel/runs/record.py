"""The record of a run on disk; reading its files executes no code.

    config.json               resolved settings, seed, versions, and the identity for a resume
    metrics.jsonl             one line per measurement: outer iteration, ledger, seconds, metrics
                              (null: not finite)
    checkpoint.safetensors    the state that the next outer iteration depends on
    ledger.json               the cost up to the checkpoint: in total, by phase, by client and,
                              between peers, by sender and receiver
    clients.json              numbers of samples and labels of each client (omitted if unknown)
    run.toml                  the run as a file for `fedbilevel run --config` (command line only)
    baseline.json             the comparison with y trained at a fixed x, if requested
    findings.json             the task's findings at the end (command line only)
    cleaning.json             the verdict on cleaned labels, its sentences, noise rate and transition
                              matrix, if labels were cleaned
    end.json                  how the run ended (finished, converged, callback, interrupted, budget or
                              failed), after which outer iteration, and why; missing if the process
                              was killed
    privacy.json              the account of privacy, of a run with noise; a resume never rolls it back
    solution.safetensors      x and y by their own names (written at the end)

Each file is written under a temporary name and then renamed, so a crash leaves the old file intact.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedbilevel.errors import CheckpointError

FORMAT = "fedbilevel-checkpoint-1"


def write_whole(path: Path, content: bytes, *, shared: bool = False) -> None:
    """Write a file atomically: after a crash it has the old or the new content, never a mixture.

    shared: whether several processes may write this file at once; the last one wins.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.part" if shared else f"{path.name}.part")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}): make room or name another folder."
        ) from error


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON has neither."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line_of(row: Mapping[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def row_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a line of metrics.jsonl to a measurement: null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in content.items()}


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the labels and tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()  # the file is not a mapping
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


def shorten(path: Path, iteration: int) -> None:
    """Remove incomplete lines and lines after `iteration` from a file of JSON lines.

    A resumed run repeats the later outer iterations and writes their lines again.
    """
    if path.exists():
        kept = [
            line
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n") and json.loads(line)["iteration"] <= iteration
        ]
        write_whole(path, "".join(kept).encode())


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the folder {path} cannot be made ({error.strerror}): name another one.") from error


def named(prefix: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of x or y by name, for one tree or one tree per client."""
    if value is None:  # it never left the sites
        return {}
    if isinstance(value, Mapping):
        return {f"{prefix}.{name}": leaf for name, leaf in value.items()}
    return {f"{prefix}.client{i}.{name}": leaf for i, tree in enumerate(value) for name, leaf in tree.items()}


class Record:
    """The folder of one run.

    keeps_before: keep the second-to-last checkpoint too, because peers may have to return to it.
    """

    def __init__(self, path: Path | str, *, keeps_before: bool = False) -> None:
        self.path, self.keeps_before = Path(path), keeps_before

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def before(self) -> Path:
        return self.path / "checkpoint-before.safetensors"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def end(self) -> Path:
        return self.path / "end.json"

    def write_end(self, stopped: str, iteration: int, why: str = "") -> None:
        write_whole(
            self.end,
            (json.dumps({"stopped": stopped, "iteration": iteration, **({"why": why} if why else {})}) + "\n").encode(),
        )

    def refuse_begun(self, begun: bool = False) -> None:
        """Raise if the folder holds a run.

        begun: whether it holds a part of one.
        """
        if begun or self.checkpoint.exists():
            raise CheckpointError(f"{self.path} already holds a run: resume it, or name another folder.")

    def start(self, config: Mapping[str, Any]) -> None:
        self.refuse_begun()
        make_folder(self.path)
        self.write_config(config)
        self.end.unlink(missing_ok=True)
        write_whole(self.metrics, b"")

    def write_config(self, config: Mapping[str, Any]) -> None:
        write_whole(self.path / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())

    def write_ledger(self, content: Mapping[str, Any]) -> None:
        write_whole(self.path / "ledger.json", (json.dumps(content) + "\n").encode())

    def write_clients(self, content: Mapping[str, Any]) -> None:
        write_whole(self.path / "clients.json", (json.dumps(content) + "\n").encode())

    def write_findings(self, content: Sequence[Mapping[str, Any]]) -> None:
        try:
            text = json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the run is saved, but the findings of its task cannot be written as JSON ({error}): "
                "use plain, finite numbers."
            ) from error
        write_whole(self.path / "findings.json", f"{text}\n".encode())

    def write_baseline(self, content: Mapping[str, Any]) -> None:
        write_whole(self.path / "baseline.json", (json.dumps(finite(content), allow_nan=False) + "\n").encode())

    def write_cleaning(self, content: Mapping[str, Any]) -> None:
        write_whole(self.path / "cleaning.json", (json.dumps(content) + "\n").encode())

    def write_run_file(self, text: str) -> None:
        write_whole(self.path / "run.toml", text.encode())

    def read_config(self) -> dict[str, Any]:
        place = self.path / "config.json"
        try:
            config = json.loads(place.read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"there is no run in {self.path} (no config.json): give the folder that a run printed at its end."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{place} cannot be read ({error.strerror}): restore it from a copy or start a new run."
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{place} is not readable as JSON ({error}): restore it from a copy or start a new run."
            ) from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{place} does not hold a configuration: restore it from a copy or start a new run.")
        return config

    def add(self, row: dict[str, Any]) -> None:
        try:
            with open(self.metrics, "a") as file:
                file.write(line_of(row))
        except OSError as error:
            raise CheckpointError(
                f"{self.metrics} cannot be written ({error.strerror}): make room and resume."
            ) from error

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        dense = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        if self.keeps_before and self.checkpoint.exists():
            self._keep(self.checkpoint, self.before)
        write_whole(self.checkpoint, save(dense, {"format": FORMAT, "about": json.dumps(about, sort_keys=True)}))

    def go_back(self) -> None:
        """Replace the checkpoint by the one before it."""
        self._keep(self.before, self.checkpoint)

    def _keep(self, there: Path, here: Path) -> None:
        """Link `here` to the file `there` atomically; later saves do not change `here`."""
        beside = here.with_name(here.name + ".part")
        beside.unlink(missing_ok=True)
        os.link(there, beside)
        os.replace(beside, here)

    def save_solution(self, tensors: Mapping[str, Tensor]) -> None:
        write_whole(
            self.path / "solution.safetensors",
            save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}),
        )

    def load(self, place: Path | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a checkpoint without changing any file.

        place: file of the checkpoint; by default the last checkpoint.
        """
        place = place or self.checkpoint
        if not place.exists():
            raise CheckpointError(f"there is no checkpoint in {self.path}: give the folder of a run that wrote one.")
        try:
            labels, tensors = read_tensors(place)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{place} is damaged or not a checkpoint ({error}): restore it from a copy or start a new run."
            ) from error
        if labels.get("format") != FORMAT:
            raise CheckpointError(
                f"{place} was written in format {labels.get('format')!r}, expected {FORMAT!r}: "
                "resume with the version that wrote it."
            )
        about: dict[str, Any] = json.loads(labels["about"])
        return tensors, about

    def rows(self) -> list[dict[str, Any]]:
        """Return all measurements so far."""
        try:
            return read_rows(self.metrics)
        except OSError as error:
            raise CheckpointError(
                f"{self.metrics} cannot be read ({error.strerror}): restore it from a copy or remove it."
            ) from error

    def cut_after(self, iteration: int) -> list[dict[str, Any]]:
        """Remove all measurements after `iteration` from disk, and return the remaining ones.

        A resumed run repeats the later outer iterations.
        """
        rows = [row for row in self.rows() if row["iteration"] <= iteration]
        if not rows and iteration > 0:
            raise CheckpointError(
                f"{self.metrics} has no measurement up to outer iteration {iteration}: "
                "restore it from a copy, or start a new run."
            )
        self.end.unlink(missing_ok=True)
        write_whole(self.metrics, "".join(map(line_of, rows)).encode())
        return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the measurements in a file, one per line; return no rows if the file does not exist.

    An incomplete last line after a crash is skipped, because a resumed run measures it again.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            row = json.loads(line)
            if type(row["iteration"]) is not int:
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(
                f"line {number} of {path} is not a measurement: restore the file from a copy, or remove that line."
            ) from None
        rows.append(row_of(row))
    return rows
