"""Curves of every algorithm on the standard task and on data cleaning.

`python -m website.curves` writes curves.json. The standard task is `quadratic`: five clients that
differ, full batches, float64, a solution in closed form. Step sizes are those that the task
suggests; none is tuned. An algorithm runs with a shared x and a global lower level unless it
refuses that, and with a local lower level if it refuses or warns. For algorithms that do not use
the upper loss, the curve shows the lower loss. If x descends the lower loss, too, the task is
`hyper_representation` with own heads, because that loss of the quadratic has no minimum in x.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedbilevel
from fedbilevel import discovery
from fedbilevel.engines import simulate
from fedbilevel.errors import ScopeError, ScopeWarning
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.problem.problem import Scopes
from fedbilevel.settings import made
from fedbilevel.tasks.task import Task

PLACE = Path(__file__).with_name("curves.json")
COMMAND = "python -m website.curves"
MOST_ITERATIONS = 400
MOST_ROUNDS = {
    False: 4000,
    True: 20_000,
}  # with a server, between peers, whose rounds are single steps of an average: a curve ends at the first of both
PEERS = {"network": {"kind": "ring"}, "averaging": {"kind": "push_sum", "num_steps": 10}}
SHORTER = {"hgp": {"num_terms": 40}}  # than the task suggests: enough for ten steps of an average
ALSO: dict[str, dict[str, Any]] = {  # a second curve, with a setting that changes what it is exact for
    "adafbio": {"hypergradient": "shared-u"},
    **{name: {"u": "local"} for name in ("fedbio_local", "fedbioacc_local", "distbio", "distbioacc")},
}
COSTS = ("iteration", "rounds", "megabytes", "floats_up", "floats_down", "gy", "gx", "fx", "fy", "hvp", "jvp")
KEPT = (*COSTS, "distance", "lower_loss", "upper_loss", "test_accuracy", "f1")


class Case(NamedTuple):
    """One curve: everything that makes it, as plain values."""

    task: str
    task_settings: dict[str, Any]
    algorithm: str
    settings: dict[str, Any]
    options: dict[str, Any]
    dtype: str
    iterations: int

    def command(self) -> str:
        """Flags of the same run on the command line, except defaults."""
        words = [f"fedbilevel run {self.task} --algorithm {self.algorithm}"]
        words += [_flag(name, value) for name, value in self.task_settings.items()]
        words += [
            _flag(name, value)
            for name, value in self.settings.items()
            if task_named(self.task).suggestions(self.algorithm).get(name) != value
        ]
        for prefix, values in self.options.items():
            words += [_flag(prefix if name == "kind" else f"{prefix}_{name}", value) for name, value in values.items()]
        words += [
            f"--num-iterations {self.iterations}",
            *([f"--dtype {self.dtype}"] if self.dtype != "float32" else []),
        ]
        return " ".join(words)


@functools.cache
def algorithms() -> dict[str, type[Algorithm]]:
    """Names of the algorithms of this package, without those of other installed packages."""
    return {
        name: kind
        for name, kind in sorted(discovery.algorithms().items())
        if kind.__module__.startswith(f"{fedbilevel.__name__}.")
    }


@functools.cache
def task_named(name: str) -> type[Task]:
    return discovery.task(name)


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return f"--{flag} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{flag}"


def scopes_of(kind: type[Algorithm], **settings: Any) -> dict[Scopes, str]:
    """The refusal or warning of the algorithm for every combination of scopes; empty if there is none."""
    found = {}
    for scopes in (Scopes(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = kind(**settings).check_scopes(scopes)
            found[scopes] = "".join(str(one) for one in said)
        except ScopeError as error:
            found[scopes] = f"refused: {error}"
    return found


def cases(name: str) -> Iterator[Case]:
    """The curves of one algorithm."""
    kind = algorithms()[name]
    peers = issubclass(kind, PeerAlgorithm)
    if kind.one_level:
        yield _case(kind, "hyper_representation", {"lower": "local"}, {}, peers, "float32", 100)
        return
    for more in ({}, ALSO[name]) if name in ALSO else ({},):
        said = scopes_of(kind, **more)
        whole = said[Scopes()]
        for lower in ("global",) if not whole else ("local",) if whole.startswith("refused") else ("global", "local"):
            if not said[Scopes(lower=lower)].startswith("refused"):  # type: ignore[arg-type]
                task = {} if lower == "global" else {"lower": lower}
                yield _case(
                    kind, "quadratic", task, {**SHORTER.get(name, {}), **more}, peers, "float64", MOST_ITERATIONS
                )
    private = scopes_of(kind)[Scopes(upper="private")]
    if whole.startswith("refused") and scopes_of(kind)[Scopes("local", "shared")].startswith(
        "refused"
    ):  # a private x alone: mixtures
        yield _case(kind, "personalisation", {"personalise": "mixture", "num_clients": 10}, {}, peers, "float32", 40)
    elif not private.startswith("refused"):
        suggested = task_named("data_cleaning").iterations(name)
        yield _case(kind, "data_cleaning", {}, {}, peers, "float32", min(suggested, 40 if name == "hgp" else 200))


def _case(
    kind: type[Algorithm],
    task: str,
    task_settings: dict[str, Any],
    more: dict[str, Any],
    peers: bool,
    dtype: str,
    iterations: int,
) -> Case:
    known = {spec.name for spec in dataclasses.fields(kind)}
    suggested = {
        setting: value for setting, value in task_named(task).suggestions(kind.name()).items() if setting in known
    }
    return Case(task, task_settings, kind.name(), {**suggested, **more}, PEERS if peers else {}, dtype, iterations)


def measured(case: Case) -> Iterator[dict[str, float]]:
    """Yield the rows of a curve, at iterations that grow by a tenth.

    A shorter run yields the first rows of a longer run.
    """
    task: Any = made(task_named(case.task), case.task_settings)
    algorithm = made(algorithms()[case.algorithm], case.settings)
    built = task.build()
    where = (
        {"network": made(Network, case.options["network"]), "averaging": made(Averaging, case.options["averaging"])}
        if case.options
        else {}
    )
    fed: Any = simulate(algorithm, built.problem, built.clients, dtype=getattr(torch, case.dtype), **where)
    fed.begin(0)
    state = algorithm.init(fed)
    yield _row(task, fed, state, 0)
    due = 1
    for iteration in range(1, case.iterations + 1):
        fed.begin(iteration)
        with torch.no_grad():
            state = algorithm.round(fed, state)
        over = fed.ledger.rounds >= MOST_ROUNDS[bool(case.options)]
        if iteration == due or iteration == case.iterations or over:
            yield _row(task, fed, state, iteration)
            due = max(iteration + 1, round(1.1 * iteration))
        if over:
            return


def _row(task: Task, fed: Any, state: Any, iteration: int) -> dict[str, float]:
    row = {
        "iteration": iteration,
        "megabytes": fed.ledger.megabytes,
        **fed.bill().totals(),
        **fed.measure(state.x, state.y),
    }
    if task.name() == "quadratic":
        x = fed.trees(state.x, upper=True)
        point = np.mean([tree["x"].double().numpy() for tree in (x if isinstance(x, list) else [x])], axis=0)
        row["distance"] = float(np.linalg.norm(point - task.closed_form().solution()))  # type: ignore[attr-defined]
    return {
        name: float(row[name]) if isinstance(row[name], float | Tensor) else row[name] for name in KEPT if name in row
    }


@functools.cache
def recorded() -> dict[str, Any]:
    return json.loads(PLACE.read_text())


@functools.cache
def found(name: str) -> list[tuple[Case, list[dict[str, Any]]]]:
    """The recorded curves of an algorithm: what made each, and its rows."""
    mine = recorded()["curves"].get(name)
    if not mine:
        raise LookupError(
            f"there is no recorded curve of {name}: run python -m website.curves {name}, which adds it to {PLACE.name}."
        )
    return [
        (
            Case(**{key: one[key] for key in Case._fields}),
            [dict(zip(one["columns"], row, strict=True)) for row in one["rows"]],
        )
        for one in mine
    ]


def clients_of(case: Case) -> int:
    return int(
        {**{spec.name: spec.default for spec in dataclasses.fields(task_named(case.task))}, **case.task_settings}[
            "num_clients"
        ]
    )


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ScopeWarning)
    curves: dict[str, Any] = {}
    for name in sys.argv[1:] or algorithms():
        curves[name] = []
        for case in cases(name):
            start = time.perf_counter()
            rows = list(measured(case))
            columns = list(rows[0])
            curves[name].append(
                {**case._asdict(), "columns": columns, "rows": [[row[column] for column in columns] for row in rows]}
            )
            print(
                f"{name:<16} {case.task:<16} {len(rows):>3} rows, {rows[-1]['rounds']:>6} rounds, "
                f"{time.perf_counter() - start:6.1f} s",
                flush=True,
            )
    if sys.argv[1:]:  # the others stay as they are
        curves = {**recorded()["curves"], **curves}
    lines = json.dumps(
        {"version": fedbilevel.__version__, "command": COMMAND, "curves": dict(sorted(curves.items()))}, indent=0
    )
    PLACE.write_text(_folded(lines) + "\n")


def _folded(text: str) -> str:
    """One row of figures per line, which keeps differences readable."""
    out, depth = [], 0
    for line in text.split("\n"):
        inside = depth >= 1
        depth += (line.endswith("[") and ":" not in line) - (line in ("]", "],") and depth > 0)
        out.append(line + ("" if depth >= 1 else "\n") if inside or depth >= 1 else line + "\n")
    return "".join(out).rstrip("\n")


if __name__ == "__main__":
    main()
