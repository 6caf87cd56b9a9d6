"""Curves of the report page: which runs form a curve, and which curves may share a chart.

Runs that differ in seeds only form one curve, named by the settings that distinguish it from other
curves. Curves of the same task with the same task settings form one group; the page never draws two
groups in one chart unless the reader chooses to.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.report.page_runs import PROBLEM, short

_MOST_NAMED = 4  # settings in the name of a curve
_PLACES = ("task.data_dir",)  # where a machine keeps its data does not change the task


def curves_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group runs into curves by traits, in the order of the runs.

    The entry `group` of a curve is the number of its task in `groups_of`.
    """
    members: dict[tuple[str, int], list[int]] = {}
    known: Counter[str] = Counter()
    for number, run in enumerate(runs):
        traits = json.dumps(run["traits"], sort_keys=True, default=str)
        # a repetition with the same seeds is a curve of its own, not another seed
        seeds = json.dumps([traits, run["seed"], run["data_seed"]], default=str)
        members.setdefault((traits, known[seeds]), []).append(number)
        known[seeds] += 1
    firsts = [runs[some[0]] for some in members.values()]
    keys = list(dict.fromkeys(_task_key(run) for run in runs))
    groups = [keys.index(_task_key(first)) for first in firsts]
    # names among the curves of one task need no settings of the task
    within = {
        group: iter(_names([run for run, own in zip(firsts, groups, strict=True) if own == group])) for group in groups
    }
    return [
        {"name": name, "short": next(within[group]), "algorithm": first["algorithm"], "runs": some, "group": group}
        for name, first, some, group in zip(_names(firsts), firsts, members.values(), groups, strict=True)
    ]


def groups_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Name every task once, with the settings that distinguish it from other tasks of that name."""
    by_task: dict[str, dict[str, Any]] = {}
    for run in runs:
        by_task.setdefault(_task_key(run), run)
    firsts = list(by_task.values())
    found = []
    for run in firsts:
        alike = [other["traits"] for other in firsts if other["task"] == run["task"]]
        own = run["traits"]
        differing = [name for name in _differing(alike) if _is_of_task(name) and name in own]
        by_name = len(differing) <= _MOST_NAMED and not {*differing} & {*PROBLEM, "losses"}
        said = [f"{name.removeprefix('task.')} {short(own[name])}" for name in differing] if by_name else [run["name"]]
        found.append(f"{own['task']} ({', '.join(said)})" if len(alike) > 1 and said else str(own["task"]))
    return [
        {"name": name if found.count(name) == 1 else f"{name} [{run['path']}]", "task": run["task"]}
        for name, run in zip(found, firsts, strict=True)
    ]


def _is_of_task(name: str) -> bool:
    return name not in _PLACES and (name == "task" or name.startswith("task.") or name in (*PROBLEM, "losses"))


def _task_key(run: Mapping[str, Any]) -> str:
    """Return a key of the task.

    The key has the name and the settings of the task, or else data, shapes and losses of the
    problem.
    """
    return json.dumps(
        {name: value for name, value in run["traits"].items() if _is_of_task(name)}, sort_keys=True, default=str
    )


def _differing(traits: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for one in traits for name in one)
    return [name for name in names if len({short(one.get(name)) for one in traits}) > 1]


def _names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Name each curve by algorithm, by task if there are several, and by differing settings."""
    several = len({run["traits"]["task"] for run in runs}) > 1
    names = []
    for run in runs:
        own = run["traits"]
        kind = lambda traits: (traits["algorithm"], traits["task"])
        differing = _differing([other["traits"] for other in runs if kind(other["traits"]) == kind(own)])
        by_name = len(differing) <= _MOST_NAMED and not {*differing} & {*PROBLEM, "losses"}
        said = [f"{name} {short(own[name])}" for name in differing if name in own] if by_name else [run["name"]]
        start = f"{own['task']}, {own['algorithm']}" if several else str(own["algorithm"])
        names.append(f"{start} ({', '.join(said)})" if said else start)
    return [
        name if names.count(name) == 1 else f"{name} [{run['path']}]" for name, run in zip(names, runs, strict=True)
    ]
