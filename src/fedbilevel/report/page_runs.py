"""Runs of the report page, from a record folder, a comparison or a Result in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedbilevel.errors import ReportError
from fedbilevel.report.record_files import (
    ENDS,
    are_findings,
    columns_of,
    damaged,
    empty_columns,
    is_baseline,
    is_cleaning,
    is_end,
    is_ledger,
    is_number,
    is_partition,
    read_bytes,
    read_json,
    read_optional,
    read_rows,
    table,
)

SEEDS = ("seed", "data_seed")
UNRECORDED = "task not recorded"  # the task of a Result without a record
PROBLEM = ("data", "x", "y", "scopes", "client_weights")  # besides the losses, these identify a problem without a task
_OPTIONS = ("batch_size", "dtype", "sampling", "schedule", "cohort", "network", "averaging")
_RESUMED = ("simulation", "distributed")  # engines of runs that `fedbilevel resume` can resume
_STATES = {"finished": "finished", "converged": "finished", "failed": "failed"}
_WRITTEN = ("config.json", "metrics.jsonl", "ledger.json")  # at the start, at every measurement, at every checkpoint


class Finished(Protocol):
    """The fields of a `Result` that the page shows.

    They are declared here, because the page must not import torch.
    """

    @property
    def rows(self) -> list[dict[str, Any]]: ...
    @property
    def ledger(self) -> Any: ...
    @property
    def iteration(self) -> int: ...
    @property
    def ending(self) -> tuple[str, str]: ...
    @property
    def baseline(self) -> Any: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def name(self) -> str: ...


def run_of_folder(folder: Path, *, partial: bool) -> dict[str, Any]:
    """Read the record of a run.

    partial: accept a run without a measurement.
    """
    config, rows = read_json(folder / "config.json"), read_rows(folder / "metrics.jsonl")
    end = read_optional(folder / "end.json", dict, is_end, f"stopped, which is one of {', '.join(ENDS)}, and iteration")
    if not rows and not partial and (end or {}).get("stopped") != "failed":  # the reason of a failure is worth a page
        raise ReportError(
            f"the run in {folder} has no measurement yet: "
            f"wait for the first one, or look at it with fedbilevel watch {folder}."
        )
    identity, plan, length = table(config.get("identity")), table(config.get("plan")), table(config.get("run"))
    traits = _traits(config, identity, plan)
    # includes peers whose records were missing at collection
    names = config.get("peers") or plan.get("sites") or table(config.get("cleaning")).get("names") or []
    headline = config.get("headline")
    return {
        "name": folder.name or str(folder),
        "path": str(folder),
        "task": traits["task"],
        "algorithm": traits["algorithm"],
        "engine": str(config.get("engine", "simulation")),
        "peer": config.get("peer") if isinstance(config.get("peer"), str) and "collected" not in config else None,
        "seed": identity.get("seed"),
        "data_seed": table(config.get("task_settings") or plan.get("task")).get("data_seed"),
        "num_clients": identity.get("num_clients"),
        "client_names": [str(name) for name in names] if isinstance(names, list) else [],
        "planned": {"iteration": length.get("num_iterations"), "rounds": length.get("num_rounds")},
        "state": _state(folder, rows, length, end),
        "end": {"iteration": end["iteration"], "why": end.get("why")} if end is not None else None,
        "notes": _notes(end or {}, read_optional(folder / "baseline.json", dict, is_baseline, "a sentence")),
        "cleaning": read_optional(folder / "cleaning.json", dict, is_cleaning, "sentences"),
        "resumable": isinstance(config.get("task"), str) and config.get("engine", "simulation") in _RESUMED,
        "written": max((place.stat().st_mtime for name in _WRITTEN if (place := folder / name).exists()), default=None),
        "headline": [name for name in headline if isinstance(name, str)] if isinstance(headline, list) else [],
        "columns": columns_of(rows),
        "empty": empty_columns(rows),
        "ledger": read_optional(folder / "ledger.json", dict, is_ledger, "phases, each with its costs"),
        "findings": read_optional(folder / "findings.json", list, are_findings, "a list of findings, each with a kind"),
        "config": _configuration(folder, config),
        "versions": table(config.get("versions")),
        "traits": traits,
        "clients": read_optional(folder / "clients.json", dict, is_partition, "sizes by role, one number per client"),
    }


def _configuration(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of run.toml, or of config.json for older records without run.toml."""
    toml = folder / "run.toml"
    if toml.exists():
        return {"kind": "run.toml", "text": read_bytes(toml).decode(errors="replace")}
    return {"kind": "config.json", "text": json.dumps(config, indent=2, sort_keys=True)}


def _state(
    folder: Path, rows: Sequence[Mapping[str, Any]], length: Mapping[str, Any], end: Mapping[str, Any] | None
) -> str:
    """Return the state of a run.

    finished: the run has its planned length, or converged.
    stopped: the run ended earlier, and can be resumed.
    failed: an error ended the run.
    going: the run continues, or was killed.

    Killed runs and older records have no end.json; then other files determine the state.
    """
    if end is not None and end["stopped"] in ("finished", "converged", "failed"):
        return _STATES[end["stopped"]]
    limits = {"iteration": length.get("num_iterations"), "rounds": length.get("num_rounds")}  # whichever comes first
    if rows and any(
        is_number(limit) and is_number(rows[-1].get(name)) and rows[-1][name] >= limit for name, limit in limits.items()
    ):
        return "finished"
    if end is not None:
        return "stopped"
    metrics, solution = folder / "metrics.jsonl", folder / "solution.safetensors"
    if metrics.exists() and solution.exists():  # the solution is written at the end; a resumed run has newer metrics
        return "stopped" if solution.stat().st_mtime_ns >= metrics.stat().st_mtime_ns else "going"
    return "going"


def _notes(end: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[str]:
    """Return remarks on a run that did not fail: its convergence, its recovery, and its baseline."""
    how, why = end.get("stopped"), end.get("why", "")
    notes = [f"converged after outer iteration {end['iteration']}"] if how == "converged" else []
    notes += [why] if why and how != "failed" else []
    notes += [baseline["sentence"]] if baseline is not None else []
    return [f"{note[:1].upper()}{note[1:].removesuffix('.')}." for note in notes]


def _traits(config: Mapping[str, Any], identity: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values except seeds that can distinguish two runs, by short names."""
    task, algorithm = table(plan.get("task")), table(plan.get("algorithm"))
    settings = table(config.get("task_settings")) or {name: value for name, value in task.items() if name != "name"}
    own = {name: value for name, value in identity.items() if name in _OPTIONS}
    options = table(config.get("options")) or table(plan.get("options")) or own
    losses = [short(float(f"{value:.4g}")) if is_number(value) else value for value in identity.get("losses") or []]
    data = {} if settings else {**{name: identity.get(name) for name in PROBLEM}, "losses": losses}
    chosen = table(identity.get("settings")) or {name: value for name, value in algorithm.items() if name != "name"}
    traits = {
        "task": str(config.get("task") or task.get("name") or identity.get("problem") or "problem"),
        "algorithm": str(identity.get("algorithm") or algorithm.get("name") or "run"),
        **_flat(chosen),
        **_flat(settings, "task."),
        **_flat(options),
        **data,
        "iterations": table(config.get("run")).get("num_iterations"),
        "rounds": table(config.get("run")).get("num_rounds"),
        "engine": config.get("engine", "simulation"),
        "ranks": config.get("ranks", 1),
        "peer": config.get("peer"),
        "version": table(config.get("versions")).get("fedbilevel"),
    }
    return {name: value for name, value in traits.items() if name.removeprefix("task.") not in SEEDS}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


# ---- runs without a folder of their own -----------------------------------------------------------------------------

_NO_RECORD: dict[str, Any] = {
    "engine": "simulation",
    "peer": None,
    "client_names": [],
    "planned": {"iteration": None, "rounds": None},
    "resumable": False,
    "notes": [],
    "headline": [],
    "ledger": None,
    "findings": None,
    "cleaning": None,
    "clients": None,
}


def run_of_result(result: Finished, number: int) -> dict[str, Any]:
    """Return the content of a Result without a record.

    number: position of the Result among the given results.
    """
    name, (how, why) = result.name or "run", result.ending
    ledger = {"totals": dict(result.ledger), "phases": getattr(result.ledger, "phases", {})}
    text = f"{name}: a result in memory. Run it with a record to keep its settings."
    return {
        **_NO_RECORD,
        "name": f"{name}, result {number + 1}",
        "path": f"result {number + 1}",
        "task": UNRECORDED,
        "algorithm": name,
        "seed": None,
        "data_seed": None,
        "num_clients": None,
        "state": _STATES.get(how, "stopped"),
        "end": {"iteration": result.iteration, "why": why or None},
        "notes": _notes(
            {"stopped": how, "iteration": result.iteration, "why": why},
            None if result.baseline is None else {"sentence": result.baseline.sentence},
        ),
        "columns": columns_of(result.rows),
        "empty": empty_columns(result.rows),
        "ledger": ledger if is_ledger(ledger) else None,
        "config": {"kind": "result", "text": text},
        "versions": {},
        "traits": {"task": UNRECORDED, "algorithm": name, "result": number + 1},
    }


def runs_of_comparison(folder: Path, alone: bool) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the runs of a comparison and its target.

    alone: True if the comparison is the only source of the page.
    """
    place = folder / "comparison.json"
    content = read_json(place)
    settings = table(content.get("task_settings"))
    if not isinstance(content.get("runs"), list) or not content["runs"]:
        raise damaged(place, "runs with their rows")
    text = _about(content)
    runs = []
    for one in content["runs"]:
        try:
            name, r, rows, own = str(one["algorithm"]), int(one["repetition"]), list(one["rows"]), dict(one["settings"])
            if not all(is_number(row["iteration"]) for row in rows):
                raise TypeError
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise damaged(place, "runs with algorithm, repetition, settings and rows") from None
        traits = {
            "task": str(content.get("task", "problem")),
            "algorithm": name,
            **_flat(own),
            **_flat(settings, "task."),
            **_flat(table(content.get("options"))),
            "record": "comparison",
            "version": table(content.get("versions")).get("fedbilevel"),
        }
        first: dict[str, Any] = {"seed": content.get("seed"), "data_seed": settings.get("data_seed")}
        seeds = {label: value + r if is_number(value) else None for label, value in first.items()}
        diverged = one.get("diverged")
        run = {
            **_NO_RECORD,
            "name": f"{name}, repetition {r}" if alone else f"{folder.name}, {name}, repetition {r}",
            "path": str(folder),
            "task": traits["task"],
            "algorithm": name,
            **seeds,
            "num_clients": settings.get("num_clients"),
            "state": "finished" if diverged is None else "diverged",
            "end": None if diverged is None else {"iteration": None, "why": str(diverged)},
            "columns": columns_of(rows),
            "empty": empty_columns(rows),
            "config": {"kind": "comparison.json", "text": text},
            "versions": table(content.get("versions")),
            "traits": {key: value for key, value in traits.items() if key.removeprefix("task.") not in SEEDS},
        }
        runs.append(run)
    target = table(content.get("target"))
    wanted = isinstance(target.get("metric"), str) and is_number(target.get("value"))
    return runs, {name: target[name] for name in ("metric", "value")} if wanted else None


def _about(content: Mapping[str, Any]) -> str:
    """Return the options of a comparison, and the settings of each algorithm once."""
    about = {name: value for name, value in content.items() if name not in ("runs", "outcomes")}
    about["algorithms"] = {
        str(one["algorithm"]): one["settings"]
        for one in content["runs"]
        if isinstance(one, dict) and {"algorithm", "settings"} <= {*one}
    }
    return json.dumps(about, indent=2, sort_keys=True)
