"""What records say, as one plain structure: numbers as they were written, and nothing computed but who belongs together.

A folder may hold a run (config.json, metrics.jsonl, and where they are there ledger.json, clients.json, findings.json, end.json, run.toml), a comparison
(comparison.json), a study of influence (influence.json), one of personalisation (personalisation.json), or folders of these.

Runs that differ in nothing but seeds are one curve, whose name says what tells it from the others. JSON knows no NaN and no infinity: they are words here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedbilevel._version import __version__
from fedbilevel.columns import DIAGNOSTICS, falls, figures_of, metric_and_value
from fedbilevel.errors import ReportError

ENDS = ("finished", "callback", "interrupted", "failed")  # ways in which a run ends that was not killed
RESUMED = ("simulation", "distributed")  # engines whose runs the command `fedbilevel resume` goes on with
STUDIES = {"comparison.json": "comparison", "influence.json": "influence", "personalisation.json": "personalisation"}
SEEDS = ("seed", "data_seed")
OF_A_PROBLEM = (
    "data",
    "x",
    "y",
    "scopes",
    "client_weights",
)  # what tells problems apart that no task made, besides their losses
_WRITTEN = ("config.json", "metrics.jsonl", "ledger.json")  # at the start, at every measurement, at every checkpoint
_LISTED = 20  # instances of a study of influence that are listed of either kind
_MOST_NAMED = 4  # settings in the name of a curve
_USUALLY = (
    ("test_accuracy",),
    ("accuracy",),
    ("f1",),
)  # what people look at first, where a record does not say; losses come last


Goal = tuple[str, float] | str | None  # a metric and the value to reach, or both as METRIC=VALUE


def read(
    paths: Sequence[Path | str], *, target: Goal = None, title: str | None = None, partial: bool = False
) -> dict[str, Any]:
    """Everything the page shows. partial: a run without a measurement is no error, as one may come."""
    target = _pair(target)
    if not paths:
        raise ReportError("there is nothing to report: name the folder of at least one run.")
    runs: list[dict[str, Any]] = []
    studies: list[dict[str, Any]] = []
    over: bool | None = True
    goal = None
    for path in dict.fromkeys(Path(path) for path in paths):
        folder = _folder_of(path)
        found = _records(folder)
        over = over if found == [folder] else None
        for place in found:
            alone = len(found) == 1 and len(paths) == 1
            if (place / "config.json").exists():
                one = _run(place, partial=partial or len(found) > 1)
                if (
                    partial or one["columns"] or one["state"] == "failed"
                ):  # of several runs, those that have not begun to measure are left out
                    runs.append(one)
                over = False if one["state"] == "going" else over
            if (place / "comparison.json").exists():
                theirs, wanted = _comparison(place, alone)
                runs, goal, over = [*runs, *theirs], goal or wanted, None
            for name, reader in (("influence.json", _influence), ("personalisation.json", _personalisation)):
                if (place / name).exists():
                    studies.append(reader(place))
                    over = None if name == "personalisation.json" else over
    if not runs and not studies:
        raise ReportError(f"none of the runs in {paths[0]} has a measurement yet: wait for the first one.")
    metrics = figures_of(dict.fromkeys(name for run in runs for name in run["columns"]))
    goal = {"metric": target[0], "value": target[1]} if target is not None else goal
    if target is not None and target[0] not in metrics:
        if any(target[0] in run["empty"] for run in runs):
            raise ReportError(
                f"the metric {target[0]!r} was never determined in these records: every measurement of it is empty; name another one, or none."
            )
        known = f"name one of {', '.join(metrics)}" if metrics else "leave the target out, as they have none at all"
        raise ReportError(f"there is no metric named {target[0]!r} in these records: {known}.")
    curves = _curves(runs)
    return plain(
        {
            "title": title or _title(runs, studies),
            "made": {"fedbilevel": __version__, "time": datetime.now(UTC).isoformat(timespec="seconds")},
            "over": over,
            "curves": curves,
            "runs": [
                {name: value for name, value in run.items() if name not in ("told", "clients", "empty")} for run in runs
            ],
            "metrics": _ordered(
                [name for name in metrics if name not in DIAGNOSTICS],
                [name for run in runs for name in run["headline"]],
            ),
            "diagnostics": [name for name in DIAGNOSTICS if name in metrics],
            "falls": [name for name in metrics if falls(name)],
            "target": goal,
            "partitions": _partitions(runs),
            "studies": studies,
        }
    )


def plain(value: Any) -> Any:
    """What JSON can hold everywhere: numbers that are none become words, which JavaScript's Number() reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


# ---- files -----------------------------------------------------------------------------------------------------------------


def _folder_of(path: Path) -> Path:
    if path.is_file():  # commands print the file of a study
        if path.name in ("config.json", "metrics.jsonl", *STUDIES):
            return path.parent
        raise ReportError(f"{path} is not the file of a record: give the folder that a command printed at its end.")
    if not path.is_dir():
        raise ReportError(f"there is no folder {path}: give the folder that a command printed at its end.")
    return path


def _records(folder: Path) -> list[Path]:
    """The folder itself, or those in it that hold records."""
    known = ("config.json", *STUDIES)
    if any((folder / name).exists() for name in known):
        return [folder]
    found = sorted(
        place for place in folder.iterdir() if place.is_dir() and any((place / name).exists() for name in known)
    )
    if not found:
        raise ReportError(
            f"{folder} holds no record ({', '.join(known)}), nor does any folder in it: give the folder that a command printed at its end."
        )
    return found


def _json(place: Path, kind: type[Any] = dict) -> Any:
    try:
        content = json.loads(place.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(
            f"{place} is not readable as JSON ({error}): restore it from a copy, or leave this record out."
        ) from error
    except OSError as error:
        raise ReportError(
            f"{place} cannot be read ({error.strerror}): check who may read it, or leave this record out."
        ) from error
    if not isinstance(content, kind):
        raise _damaged(place, f"a {'table' if kind is dict else 'list'}")
    return content


def _damaged(place: Path, expected: str) -> ReportError:
    return ReportError(
        f"{place} does not hold what its name says (expected {expected}): restore it from a copy, or leave this record out."
    )


def _optional(place: Path, kind: type[Any], fits: Callable[[Any], bool], expected: str) -> Any:
    """Records of older versions lack some files; one that is there has to be whole."""
    if not place.exists():
        return None
    content = _json(place, kind)
    try:
        whole = fits(content)
    except (AttributeError, KeyError, TypeError):
        whole = False
    if not whole:
        raise _damaged(place, expected)
    return content


def _rows(place: Path) -> list[dict[str, Any]]:
    """All measurements. One that is being written at this moment, or was cut off by a crash, is not there yet."""
    try:
        lines = place.read_bytes().split(b"\n") if place.exists() else [b""]
    except OSError as error:
        raise ReportError(
            f"{place} cannot be read ({error.strerror}): check who may read it, or leave this record out."
        ) from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            if not _is_number(row["iteration"]):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ReportError(
                f"line {number} of {place} is not a measurement: restore the file from a copy, or leave this record out."
            ) from None
        rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By name instead of by measurement; what a measurement lacks is nothing."""
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(_is_number(row.get(name)) for row in rows)
    ]
    return {name: [row[name] if _is_number(row.get(name)) else None for row in rows] for name in names}


def _empty(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Figures that were measured and never determined."""
    return [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if all(row.get(name) is None for row in rows)
    ]


# ---- runs ------------------------------------------------------------------------------------------------------------------


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _run(folder: Path, *, partial: bool) -> dict[str, Any]:
    config, rows = _json(folder / "config.json"), _rows(folder / "metrics.jsonl")
    end = _optional(folder / "end.json", dict, _is_end, f"stopped, which is one of {', '.join(ENDS)}, and iteration")
    if not rows and not partial and (end or {}).get("stopped") != "failed":  # why one failed is worth a page
        raise ReportError(
            f"the run in {folder} has no measurement yet: wait for the first one, or look at it with fedbilevel watch {folder}."
        )
    identity, plan, length = _table(config.get("identity")), _table(config.get("plan")), _table(config.get("run"))
    toml = folder / "run.toml"
    try:
        text = toml.read_text(errors="replace") if toml.exists() else json.dumps(config, indent=2, sort_keys=True)
    except OSError as error:
        raise ReportError(
            f"{toml} cannot be read ({error.strerror}): check who may read it, or leave this record out."
        ) from error
    told = _told(config, identity, plan)
    names = (
        config.get("peers") or plan.get("sites") or []
    )  # all of a run, also those whose records were missing when it was collected
    headline = config.get("headline")
    return {
        "name": folder.name or str(folder),
        "path": str(folder),
        "task": told["task"],
        "algorithm": told["algorithm"],
        "engine": str(config.get("engine", "simulation")),
        "peer": config.get("peer") if isinstance(config.get("peer"), str) and "collected" not in config else None,
        "seed": identity.get("seed"),
        "data_seed": _table(config.get("task_settings") or plan.get("task")).get("data_seed"),
        "num_clients": identity.get("num_clients"),
        "client_names": [str(name) for name in names] if isinstance(names, list) else [],
        "planned": {"iteration": length.get("num_iterations"), "rounds": length.get("num_rounds")},
        "state": _state(folder, rows, length, end),
        "end": {"iteration": end["iteration"], "why": end.get("why")} if end is not None else None,
        "resumable": isinstance(config.get("task"), str) and config.get("engine", "simulation") in RESUMED,
        "written": max((place.stat().st_mtime for name in _WRITTEN if (place := folder / name).exists()), default=None),
        "headline": [name for name in headline if isinstance(name, str)] if isinstance(headline, list) else [],
        "columns": _columns(rows),
        "empty": _empty(rows),
        "ledger": _ledger(folder / "ledger.json"),
        "findings": _optional(folder / "findings.json", list, _are_findings, "a list of findings, each with a kind"),
        "config": {"kind": "run.toml" if toml.exists() else "config.json", "text": text},
        "versions": _table(config.get("versions")),
        "told": told,
        "clients": _optional(folder / "clients.json", dict, _is_partition, "sizes by role, one number per client"),
    }


def _is_end(content: Mapping[str, Any]) -> bool:
    return content["stopped"] in ENDS and _is_number(content["iteration"]) and isinstance(content.get("why", ""), str)


def _state(
    folder: Path, rows: Sequence[Mapping[str, Any]], length: Mapping[str, Any], end: Mapping[str, Any] | None
) -> str:
    """finished: as far as planned. stopped: it ended before, and may be gone on with. failed: by an error. going: it may be running, or was killed.

    end.json says which; runs of older versions have none, and one that was killed neither.
    """
    if end is not None and end["stopped"] in ("finished", "failed"):
        return str(end["stopped"])
    limits = {"iteration": length.get("num_iterations"), "rounds": length.get("num_rounds")}  # whichever comes first
    if rows and any(
        _is_number(limit) and _is_number(rows[-1].get(name)) and rows[-1][name] >= limit
        for name, limit in limits.items()
    ):
        return "finished"
    if end is not None:
        return "stopped"
    if (folder / "metrics.jsonl").exists() and (
        folder / "solution.safetensors"
    ).exists():  # written at the end; older than the metrics where it was resumed
        written = (folder / "solution.safetensors").stat().st_mtime_ns >= (folder / "metrics.jsonl").stat().st_mtime_ns
        return "stopped" if written else "going"
    return "going"


def _told(config: Mapping[str, Any], identity: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """All that may tell a run from another but seeds, by short names."""
    task, algorithm = _table(plan.get("task")), _table(plan.get("algorithm"))
    settings = _table(config.get("task_settings")) or {name: value for name, value in task.items() if name != "name"}
    own = {
        name: value
        for name, value in identity.items()
        if name in ("batch_size", "dtype", "sampling", "schedule", "cohort", "network", "averaging")
    }
    options = _table(config.get("options")) or _table(plan.get("options")) or own
    losses = [_short(float(f"{value:.4g}")) if _is_number(value) else value for value in identity.get("losses") or []]
    data = {} if settings else {**{name: identity.get(name) for name in OF_A_PROBLEM}, "losses": losses}
    told = {
        "task": str(config.get("task") or task.get("name") or identity.get("problem") or "problem"),
        "algorithm": str(identity.get("algorithm") or algorithm.get("name") or "run"),
        **_flat(
            _table(identity.get("settings")) or {name: value for name, value in algorithm.items() if name != "name"}
        ),
        **_flat(settings, "task."),
        **_flat(options),
        **data,
        "iterations": _table(config.get("run")).get("num_iterations"),
        "rounds": _table(config.get("run")).get("num_rounds"),
        "engine": config.get("engine", "simulation"),
        "ranks": config.get("ranks", 1),
        "peer": config.get("peer"),
        "version": _table(config.get("versions")).get("fedbilevel"),
    }
    return {name: value for name, value in told.items() if name.removeprefix("task.") not in SEEDS}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _pair(target: Goal) -> tuple[str, float] | None:
    """What is given as text is written as on the command line."""
    if target is None or (
        isinstance(target, tuple) and len(target) >= 2 and isinstance(target[0], str) and _is_number(target[1])
    ):
        return target
    try:
        return metric_and_value(target if isinstance(target, str) else "")
    except ValueError:
        raise ReportError(
            f"target is {target!r:.80}, expected METRIC=VALUE, e.g. 'test_accuracy=0.94', or a pair of both."
        ) from None


def _comparison(folder: Path, alone: bool) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    place = folder / "comparison.json"
    content = _json(place)
    settings, runs = _table(content.get("task_settings")), []
    if not isinstance(content.get("runs"), list) or not content["runs"]:
        raise _damaged(place, "runs with their rows")
    about = {name: value for name, value in content.items() if name not in ("runs", "outcomes")}
    about["algorithms"] = {
        str(one["algorithm"]): one["settings"]
        for one in content["runs"]
        if isinstance(one, dict) and {"algorithm", "settings"} <= {*one}
    }
    text = json.dumps(about, indent=2, sort_keys=True)
    for one in content["runs"]:
        try:
            name, r, rows, own = str(one["algorithm"]), int(one["repetition"]), list(one["rows"]), dict(one["settings"])
            if not all(_is_number(row["iteration"]) for row in rows):
                raise TypeError
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise _damaged(place, "runs with algorithm, repetition, settings and rows") from None
        told = {
            "task": str(content.get("task", "problem")),
            "algorithm": name,
            **_flat(own),
            **_flat(settings, "task."),
            **_flat(_table(content.get("options"))),
            "record": "comparison",
            "version": _table(content.get("versions")).get("fedbilevel"),
        }
        first: dict[str, Any] = {"seed": content.get("seed"), "data_seed": settings.get("data_seed")}
        seeds = {label: value + r if _is_number(value) else None for label, value in first.items()}
        runs.append(
            {
                "name": f"{name}, repetition {r}" if alone else f"{folder.name}, {name}, repetition {r}",
                "path": str(folder),
                "task": told["task"],
                "algorithm": name,
                "engine": "simulation",
                "peer": None,
                **seeds,
                "num_clients": settings.get("num_clients"),
                "client_names": [],
                "planned": {"iteration": None, "rounds": None},
                "state": "finished" if one.get("diverged") is None else "diverged",
                "end": None if one.get("diverged") is None else {"iteration": None, "why": str(one["diverged"])},
                "resumable": False,
                "headline": [],
                "columns": _columns(rows),
                "empty": _empty(rows),
                "ledger": None,
                "findings": None,
                "config": {"kind": "comparison.json", "text": text},
                "versions": _table(content.get("versions")),
                "told": {key: value for key, value in told.items() if key.removeprefix("task.") not in SEEDS},
                "clients": None,
            }
        )
    target = _table(content.get("target"))
    wanted = isinstance(target.get("metric"), str) and _is_number(target.get("value"))
    return runs, {name: target[name] for name in ("metric", "value")} if wanted else None


def _curves(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs by what tells them apart, in the order in which they come."""
    groups: dict[tuple[str, int], list[int]] = {}
    known: Counter[str] = Counter()
    for number, run in enumerate(runs):
        told = json.dumps(run["told"], sort_keys=True, default=str)
        seeds = json.dumps(
            [told, run["seed"], run["data_seed"]], default=str
        )  # the same run once more is a curve of its own, not another seed
        groups.setdefault((told, known[seeds]), []).append(number)
        known[seeds] += 1
    members = list(groups.values())
    names = _names([runs[some[0]] for some in members])
    return [
        {"name": name, "algorithm": runs[some[0]]["algorithm"], "runs": some}
        for name, some in zip(names, members, strict=True)
    ]


def _names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Of one run of each curve: the algorithm, the task where there are several, and settings in which it differs from others of the same algorithm."""
    several = len({run["told"]["task"] for run in runs}) > 1
    names = []
    for run in runs:
        told = run["told"]
        alike = [
            other["told"]
            for other in runs
            if (other["told"]["algorithm"], other["told"]["task"]) == (told["algorithm"], told["task"])
        ]
        differing = [
            name
            for name in dict.fromkeys(name for other in alike for name in other)
            if len({_short(other.get(name)) for other in alike}) > 1
        ]
        by_name = len(differing) <= _MOST_NAMED and not {*differing} & {*OF_A_PROBLEM, "losses"}
        said = [f"{name} {_short(told[name])}" for name in differing if name in told] if by_name else [run["name"]]
        start = f"{told['task']}, {told['algorithm']}" if several else str(told["algorithm"])
        names.append(f"{start} ({', '.join(said)})" if said else start)
    return [
        name if names.count(name) == 1 else f"{name} [{run['path']}]" for name, run in zip(names, runs, strict=True)
    ]


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _ordered(metrics: Sequence[str], headline: Sequence[str]) -> list[str]:
    """What the task shows first, else what most people look at first; the others as they come."""
    usual = lambda name: next(
        (i for i, words in enumerate(_USUALLY) if any(word in name for word in words)), len(_USUALLY)
    )
    later = lambda name: len(headline) + (len(_USUALLY) + 1 if "loss" in name else usual(name))
    return sorted(metrics, key=lambda name: headline.index(name) if name in headline else later(name))


def _title(runs: Sequence[Mapping[str, Any]], studies: Sequence[Mapping[str, Any]]) -> str:
    """Tasks, and the algorithms that ran on them."""
    tasks = list(dict.fromkeys(str(run["task"]).replace("_", " ") for run in runs))
    kinds = list(
        dict.fromkeys(
            {"influence": "influence of instances", "personalisation": "personalisation"}[study["kind"]]
            for study in studies
        )
    )
    title = " and ".join([*tasks, *(kind for kind in kinds if kind not in tasks)])
    return title[:1].upper() + title[1:]


# ---- what lies beside a run ------------------------------------------------------------------------------------------------


def _ledger(place: Path) -> dict[str, Any] | None:
    return _optional(place, dict, _is_ledger, "phases, each with its costs")


def _is_ledger(content: Mapping[str, Any]) -> bool:
    """Records that were collected from peers by older versions have edges and no phases."""
    phases, clients, edges = (content.get(name, {}) for name in ("phases", "clients", "edges"))
    return (
        all(_is_number(value) for phase in phases.values() for value in phase.values())
        and all(_is_number(value) for column in clients.values() for value in column)
        and all(_is_number(value) for table in edges.values() for row in table for value in row)
        and bool(phases or clients or edges)
    )


def _is_partition(content: Mapping[str, Any]) -> bool:
    sizes, labels = content["sizes"], content.get("labels", {})
    return all(_is_number(size) for role in sizes.values() for size in role) and all(
        isinstance(role["values"], list)
        and len(role["values"]) == len(role["counts"])
        and all(_is_number(count) for row in role["counts"] for count in row)
        for role in labels.values()
    )


def _are_findings(content: Sequence[Any]) -> bool:
    """Whether each has what its kind asks for (`tasks.findings`); a kind that is not known is not drawn."""
    return all(
        isinstance(one["kind"], str) and isinstance(one["title"], str) and _FITS.get(one["kind"], lambda _: True)(one)
        for one in content
    )


_FITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "histogram": lambda one: (
        all(map(_is_number, one["edges"]))
        and all(
            len(group["counts"]) == len(one["edges"]) - 1
            and isinstance(group["name"], str)
            and all(map(_is_number, group["counts"]))
            for group in one["groups"]
        )
    ),
    "images": lambda one: (
        len(one["shape"]) in (2, 3)
        and all(map(_is_number, one["shape"]))
        and all(isinstance(item["pixels"], str) and isinstance(item["facts"], dict) for item in one["items"])
    ),
    "ranking": lambda one: (
        all(isinstance(name, str) for name in one["columns"])
        and all(isinstance(row, list) and len(row) == len(one["columns"]) for row in one["rows"])
    ),
    "by_client": lambda one: all(
        value is None or _is_number(value) for some in one["values"].values() for value in some
    ),
}


def _partitions(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Who has what, once for all the runs that were on the same data."""
    found: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        if run["clients"] is not None:
            found.setdefault(json.dumps(run["clients"], sort_keys=True), {"clients": run["clients"], "runs": []})[
                "runs"
            ].append(number)
    return list(found.values())


# ---- studies ---------------------------------------------------------------------------------------------------------------


def _influence(folder: Path) -> dict[str, Any]:
    """The instances that harm and help most, and all that were really removed."""
    place = folder / "influence.json"
    content = _json(place)
    try:
        ranked = content["ranked"]
        fields = ("client", "sample", "label", "wrong", "prediction", "actual")
        every = [{name: one[name] for name in fields} for one in ranked]
        harmful = sorted((one for one in every if one["prediction"] < 0), key=lambda one: one["prediction"])[:_LISTED]
        helpful = sorted((one for one in every if one["prediction"] > 0), key=lambda one: -one["prediction"])[:_LISTED]
        removed = [one for one in every if one["actual"] is not None]
        figures = {
            name: content.get(name)
            for name in (
                "method",
                "scores",
                "num_removed",
                "loss",
                "lower_gradient",
                "val_accuracy",
                "residual",
                "disagreement",
                "noise",
                "cost",
                "seconds",
            )
        }
        about = {name: content[name] for name in ("task", "method", "settings", "versions") if name in content}
    except (KeyError, TypeError) as error:
        raise _damaged(place, f"ranked instances; {error!r:.60}") from error
    return {
        "kind": "influence",
        "name": folder.name,
        "path": str(folder),
        **figures,
        "task": _table(content.get("task")),
        "num_instances": len(every),
        "harmful": harmful,
        "helpful": helpful,
        "removed": removed,
        "findings": _optional(folder / "findings.json", list, _are_findings, "a list of findings"),
        "config": {"kind": "influence.json", "text": json.dumps(about, indent=2, sort_keys=True)},
        "versions": _table(content.get("versions")),
    }


def _personalisation(folder: Path) -> dict[str, Any]:
    place = folder / "personalisation.json"
    content = _json(place)
    needed = (
        "network",
        "method",
        "repetition",
        "test_accuracy",
        "bottom_decile",
        "validation_accuracy",
        "rounds",
        "megabytes",
        "seconds",
    )
    outcomes = content.get("outcomes")
    if (
        not isinstance(outcomes, list)
        or not outcomes
        or not all(isinstance(one, dict) and all(name in one for name in needed) for one in outcomes)
    ):
        raise _damaged(place, "outcomes by method and network")
    about = {name: value for name, value in content.items() if name != "outcomes"}
    return {
        "kind": "personalisation",
        "name": folder.name,
        "path": str(folder),
        "task": _table(content.get("task")),
        "plan": _table(content.get("plan")),
        "outcomes": outcomes,
        "config": {"kind": "personalisation.json", "text": json.dumps(about, indent=2, sort_keys=True)},
        "versions": _table(content.get("versions")),
    }
