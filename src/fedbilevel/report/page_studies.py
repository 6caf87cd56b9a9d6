"""Studies on the report page: influence of instances, and personalisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbilevel.report.record_files import are_findings, damaged, read_json, read_optional, table

_LISTED = 20  # instances in each list: the most harmful and the most helpful
_INSTANCE = ("client", "sample", "label", "wrong", "prediction", "actual")
_INFLUENCE = (
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
_OUTCOME = (
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


def influence(folder: Path) -> dict[str, Any]:
    """Return the most harmful and most helpful instances, and all instances that were removed."""
    place = folder / "influence.json"
    content = read_json(place)
    try:
        every = [{name: one[name] for name in _INSTANCE} for one in content["ranked"]]
        harmful = sorted((one for one in every if one["prediction"] < 0), key=lambda one: one["prediction"])[:_LISTED]
        helpful = sorted((one for one in every if one["prediction"] > 0), key=lambda one: -one["prediction"])[:_LISTED]
        removed = [one for one in every if one["actual"] is not None]
    except (KeyError, TypeError) as error:
        raise damaged(place, f"ranked instances; {error!r:.60}") from error
    about = {name: content[name] for name in ("task", "method", "settings", "versions") if name in content}
    return {
        "kind": "influence",
        "name": folder.name,
        "path": str(folder),
        **{name: content.get(name) for name in _INFLUENCE},
        "task": table(content.get("task")),
        "num_instances": len(every),
        "harmful": harmful,
        "helpful": helpful,
        "removed": removed,
        "findings": read_optional(folder / "findings.json", list, are_findings, "a list of findings"),
        "config": {"kind": "influence.json", "text": json.dumps(about, indent=2, sort_keys=True)},
        "versions": table(content.get("versions")),
    }


def personalisation(folder: Path) -> dict[str, Any]:
    """Return the outcomes of every method on every network."""
    place = folder / "personalisation.json"
    content = read_json(place)
    outcomes = content.get("outcomes")
    if (
        not isinstance(outcomes, list)
        or not outcomes
        or not all(isinstance(one, dict) and all(name in one for name in _OUTCOME) for one in outcomes)
    ):
        raise damaged(place, "outcomes by method and network")
    about = {name: value for name, value in content.items() if name != "outcomes"}
    return {
        "kind": "personalisation",
        "name": folder.name,
        "path": str(folder),
        "task": table(content.get("task")),
        "plan": table(content.get("plan")),
        "outcomes": outcomes,
        "config": {"kind": "personalisation.json", "text": json.dumps(about, indent=2, sort_keys=True)},
        "versions": table(content.get("versions")),
    }
