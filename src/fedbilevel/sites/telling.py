"""Facts about a site in words, for its operator. The terminal and the page show the same rows.

Rows may quote other parties, so control characters are escaped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel.escapes import printable
from fedbilevel.sites.operator import SHOWN
from fedbilevel.sites.summary import count
from fedbilevel.sites.view import View, megabytes, plural, refusal

WAITING = "Waits for approval"
Rows = list[tuple[str, list[str]]]  # a heading, and lines


def clock(moment: Any) -> str:
    """Write a time as text, empty for None.

    moment: seconds since 1970, from a file that may be damaged.
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment is not None else ""
    except (TypeError, ValueError, OverflowError, OSError):
        return "(no time)"


def rows(view: View, kit: Path) -> Rows:
    """Return the overview of a site for its operator."""
    found: Rows = [
        ("Connection", [connection(view)]),
        ("Run", [run(view)]),
        *([("Labels", [str(summary)])] if (summary := view.status.get("summary")) else []),
        ("What left", left(view)),
        ("Budget", [budget(view)]),
        (WAITING, [waiting(one, kit) for one in view.pending] or ["nothing"]),
        ("Last refusals", [f"{clock(one.get('time'))}  {refusal(one)}" for one in view.refusals] or ["none"]),
    ]
    error = view.status.get("last_error")
    if isinstance(error, dict) and view.state not in ("waiting for approval", "paused"):  # these are no errors
        found.append(("Last error", [f"{clock(error.get('time'))}  {error.get('text', '')}"]))
    if view.problems:
        found.append(("Cannot be read", view.problems))
    return _printable(found)


def _printable(rows: Rows) -> Rows:
    return [(heading, [printable(line) for line in lines]) for heading, lines in rows]


def connection(view: View) -> str:
    if view.running is None:
        return "unknown: the processes of this machine were not checked"
    if not view.running:
        return "the site is not running: start it with start-site"
    server = {
        True: f"connected to the server at {view.server} (an open TCP connection; a server that hangs looks the same)",
        False: f"NOT connected to the server at {view.server}; it tries again by itself",
        None: f"its connection to the server at {view.server} is unknown on this machine",
    }[view.connected]
    return f"running as process {view.pid}, {server}"


def run(view: View) -> str:
    pause = "PAUSED by the operator; " if view.paused else ""
    if not view.run:
        return f"{pause}no run yet"
    iteration, num_iterations = view.iterations
    phase = view.status.get("phase")
    where = f", outer iteration {iteration} of {num_iterations}" if iteration is not None and num_iterations else ""
    doing = f", {phase}" if phase and view.state == "computing" else ""
    return f"{pause}{view.run}: {view.state}{where}{doing} ({clock(view.status.get('time'))})"


def left(view: View) -> list[str]:
    """Return counts, bytes and norms of what left the site. The values themselves are not
    stored."""
    lines, rounds = plural(view.head.n, "line"), view.head.rounds
    total = f"in all: {lines} in the log, {rounds} of them phases and measurements, {megabytes(view.head.bytes)}"
    if not view.run:
        return [total]
    answers, sent = count(view.status, "answers"), megabytes(count(view.status, "bytes"))
    norms = view.status.get("norms")
    pairs = norms.items() if isinstance(norms, dict) else ()
    shown = [f"{name} {value:.3g}" for name, value in pairs if isinstance(value, int | float)]
    last = [f"norms of the last arrays: {', '.join(shown)}"] if shown else []
    return [f"{view.run}: {plural(answers, 'answer')}, {sent}", *last, total]


def budget(view: View) -> str:
    used, most = max(view.head.rounds, count(view.status, "rounds_total")), count(view.status, "max_rounds")
    rounds = f"{used} of {most} rounds" if most else f"{plural(used, 'round')}; the limit is max_rounds in site.toml"
    spent, limit = view.status.get("epsilon"), view.status.get("max_epsilon")
    return rounds if spent is None or limit is None else f"{rounds}; epsilon {spent:.4g} of {limit:g} over all runs"


def waiting(request: Mapping[str, Any], kit: Path) -> str:
    digest = request["digest"][:SHOWN]
    what = f"{request['run']}, sent by {request['who']}, since {clock(request['time'])}"
    return f"{digest}  {what}: fedbilevel federation approve {digest} --kit {kit}"


def plan_rows(request: Mapping[str, Any]) -> Rows:
    """Return all parts of a plan for the operator's decision."""
    plan = request["plan"]
    parts = {"task", "algorithm", "options", "name", "sites", "num_iterations", "measure_every"}
    rest = {name: value for name, value in plan.items() if name not in parts and value is not None}
    measured = f"measured every {every}" if (every := plan.get("measure_every")) else "measured about 20 times"
    found: Rows = [
        ("Run", [str(request["run"])]),
        ("Sent by", [f"{request['who']}, {clock(request['time'])}"]),
        ("Digest", [request["digest"]]),
        ("Task", _settings(plan.get("task"))),
        ("Algorithm", _settings(plan.get("algorithm"))),
        ("Options", _settings(plan.get("options")) or ["none"]),
        ("Length", [f"{plan.get('num_iterations')} outer iterations, {measured}"]),
        ("Sites", [", ".join(map(str, plan.get("sites") or []))]),
        ("Otherwise", _settings(rest) or ["nothing"]),
        *_leaving(request["leaves"]),
    ]
    return _printable(found)


def _leaving(leaves: Mapping[str, Any]) -> Rows:
    """Return rows about what would leave, and how often, as `preview` counted it in one outer
    iteration."""
    if not leaves:
        return [("Leaves", ["not counted: the plan could not be tried here, or was approved automatically"])]
    phases, stays = leaves.get("by_phase"), leaves.get("stays_here")
    often, total = plural(count(leaves, "rounds_per_iteration"), "round"), count(leaves, "total_rounds")
    numbers, sent = count(leaves, "floats_per_iteration"), megabytes(count(leaves, "total_bytes"))
    sending = phases.items() if isinstance(phases, Mapping) else ()
    each = [f"{name}: {number} numbers" for name, number in sending if number]
    privacy = leaves.get("privacy")
    figures = "a row of figures at every measurement" if privacy is None else "no figures: they have no noise"
    when, times, much = (
        "in each outer iteration",
        f"{often} in each outer iteration, {total} in all",
        f", {sent} in all",
    )
    if leaves.get("varies"):  # a detector has other phases later, and ends some of them early
        when, times = (
            "in the first outer iteration",
            f"{often} in the first outer iteration, and later as many as needed",
        )
        much = ", and later sums of the same kinds and models"
    return [
        ("Leaves", [f"{when}, by phase:", *each]),
        *([("Privacy", [str(privacy).removeprefix("privacy: ")])] if privacy is not None else []),
        ("How often", [times, figures]),
        ("How much", [f"{numbers} numbers {when}{much}"]),
        ("Stays here", ["the data", *(f"{part} of the solution" for part in stays or [])]),
    ]


def _settings(table: Any) -> list[str]:
    """Return the name in a table, if there is one, then a line for each setting."""
    if not isinstance(table, Mapping):
        return []
    name = [str(table["name"])] if "name" in table else []
    return name + [f"{key} = {value}" for key, value in table.items() if key != "name"]
