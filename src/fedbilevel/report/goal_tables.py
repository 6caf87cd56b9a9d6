"""Goals of experiments as a Markdown table: met, not met or open, with the closest record."""

from __future__ import annotations

from collections.abc import Sequence

from fedbilevel.studies.experiment import Experiment
from fedbilevel.studies.goals import Goal, goals


def table(experiments: Sequence[Experiment]) -> str:
    """Return the goals of all experiments that have some, or nothing."""
    lines = [_line(one, goal) for one in experiments for goal in goals(one)]
    if not lines:
        return ""
    opening = [
        "## Goals",
        "",
        "A goal is open where a record is missing or has too few repetitions. "
        "The case is the record that is farthest beyond the bound, or nearest to it. "
        "Where rows are paired, it is the plain way to which our row loses most or gains least, with the verdict, "
        "the difference and its 95 % interval; the repetitions are the fewest that two rows have in common.",
        "",
        "| experiment | goal | verdict | case | repetitions |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*opening, *lines, ""])


def _line(experiment: Experiment, goal: Goal) -> str:
    case = goal.closest
    scale = 100 if experiment.figures[goal.figure].endswith(", %") else 1
    shown = lambda value: f"{scale * value:.4g}"
    parts = []
    if case is not None:
        place = "all runs" if case.panel == "all" else f"{case.panel}, {case.row}"
        found = f"{place}: {shown(case.value)} (bound {shown(case.bound)})"
        if case.verdict is not None:
            found = f"{place} against {case.against}: {case.verdict.shown(scale)}"
        parts.append(found)
    failed = sum(not one.is_met for one in goal.cases)
    kind = "pairs" if case is not None and case.verdict is not None else "records"
    parts += [f"{failed} of {len(goal.cases)} {kind}"] if failed > 1 else []
    lacking = f"{'; '.join(goal.missing[:3])}{' ...' * (len(goal.missing) > 3)}"
    parts += [f"too few records of {lacking}"] if goal.missing else []
    parts += ["nothing recorded"] if not parts else []
    least = min((one.repetitions for one in goal.cases), default=0)
    return f"| {experiment.name} | {goal.title} | {goal.word} | {'; '.join(parts)} | {least} |"
