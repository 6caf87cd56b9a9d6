"""Contests: all rivals of a task and a bilevel run beside them, on the same samples.

The bilevel run starts at the best rival that says where x and y could start (`Rival.start`). Then y is
trained once more with the learned x, as the task or the start says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbilevel.columns import figures_of
from fedbilevel.errors import NonFiniteError, ProblemWarning, RecoveryWarning, SettingError, UnknownNameError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.endings import whole
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.studies.rivals import RivalOutcome, run_rival
from fedbilevel.tasks.rival import Rival, Way
from fedbilevel.tasks.task import Task

COSTS = ("rounds", "megabytes", "seconds")
BILEVEL = "bilevel"  # a refit has a longer name

Costs = dict[str, dict[str, float]]  # rounds, megabytes, seconds and CPU seconds by contender


class Contender(NamedTuple):
    """A possible answer, trained on all samples.

    clients: as the run saw them; a rival may change inputs or add fields.
    losses: upper losses of validation samples, each from a run that did not see the sample, with
        classes at the best temperature; or, where the task has a judge, the share of wrong answers
        of every client.
    factor: the temperature, as a factor of log-probabilities.
    """

    problem: Problem
    clients: Sequence[Holdings]
    result: Result
    figures: Mapping[str, float]
    losses: np.ndarray = np.empty(0)
    factor: float = 1.0

    @property
    def held_loss(self) -> float:
        return float(self.losses.mean())


class Tuned(NamedTuple):
    """What the runs on all samples chose: the rivals and their labels, and the rival to start from.

    bilevel: whether there is a bilevel run.
    learn: whether it learns x; False: only y is trained, which shows what learning x adds to its start.
    refits: names of the refits of the bilevel run, also of those that failed.
    """

    names: Sequence[str] | None = None
    labels: Mapping[str, str] = MappingProxyType({})
    first: str | None = None
    bilevel: bool = True
    learn: bool = True
    refits: Sequence[str] = ()


def contest(task: Task, options: Mapping[str, Any], paid: Costs, tuned: Tuned) -> tuple[dict[str, Contender], Tuned]:
    """Run the rivals of a task, then the bilevel run and its refit, and add their costs to `paid`."""
    plans = _plans(task, tuned)
    rivals: dict[str, RivalOutcome] = {}
    refits: Sequence[str] = ()
    for name, rival in plans.items():
        begun = time.process_time()
        may_start = rival.start is not None and tuned.first in (None, name)
        rivals[name] = run_rival(rival, always=tuned.bilevel and may_start, **options)
        _pay(paid, name, rivals[name].costs, begun)
    good = {name: one for name, one in rivals.items() if one.result is not None and one.failed is None}
    if not good:
        raise SettingError(f"the task {task.name()} has no rival that ends well: use solve() instead.")
    found = {
        name: Contender(one.way.problem, one.way.clients, one.result, one.figures)
        for name, one in good.items()
        if one.result is not None
    }
    starts = [name for name, one in good.items() if plans[name].start is not None and one.tried]
    first = tuned.first or min(starts, key=lambda name: min(good[name].tried.values()), default=None)
    if tuned.bilevel:
        fields: dict[str, Any] = {}
        if first in found and (start := plans[first].start) is not None:
            # a network that has learned validation samples by heart would leave nothing to judge by them
            fields = start(good[first].chosen, good[first].unseen or found[first].result)
        begun, runs = time.process_time(), _bilevel(task, fields, options, {} if tuned.learn else {"learn_x": False})
        refits, ended = [name for name in runs if name != BILEVEL], {name: one for name, one in runs.items() if one}
        costs = {cost: sum(float(one.final[cost]) for _, _, one in ended.values()) for cost in COSTS}
        _pay(paid, BILEVEL, costs, begun)
        found |= {
            name: Contender(own, some, one, _figures(one))
            for name, (own, some, one) in ended.items()
            if one.stopped != "failed"
        }
    labels = {name: one.chosen for name, one in good.items()}
    return found, Tuned(list(good), labels, first, tuned.bilevel, tuned.learn, refits)


def unlearned(task: Task, options: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, float]:
    """Return figures and costs of a bilevel run whose x stays where it starts.

    The figures are those of its last refit; only a task without refits has those of the run itself.
    """
    if task.automatic != "self_tuned":
        raise SettingError(f"the task {task.name()} runs {task.automatic}, which cannot hold x: leave this row out.")
    paid: Costs = {}
    found, done = contest(task, options, paid, Tuned(names, learn=False))
    last = (done.refits or [BILEVEL])[-1]
    if last not in found:
        raise SettingError(f"the run of {task.name()} that holds x failed: use more rounds, or leave this row out.")
    costs = {name: sum(own[name] for own in paid.values()) for name in (*COSTS, "cpu_seconds")}
    return {**found[last].figures, **costs}


def _plans(task: Task, tuned: Tuned) -> dict[str, Rival]:
    """Return the rivals that take part, each with its chosen way alone if it is known."""
    plans = dict(task.rivals())
    for name in tuned.names or ():
        if name not in plans:
            raise UnknownNameError(f"rival of {task.name()}", name, plans)
    return {
        name: rival._replace(ways={label: rival.ways[label]}) if (label := tuned.labels.get(name)) else rival
        for name, rival in plans.items()
        if tuned.names is None or name in tuned.names
    }


def _pay(paid: Costs, name: str, costs: Mapping[str, float], begun: float) -> None:
    own = paid.setdefault(name, dict.fromkeys((*COSTS, "cpu_seconds"), 0.0))
    for cost in COSTS:
        own[cost] += float(costs[cost])
    own["cpu_seconds"] += time.process_time() - begun


def _bilevel(
    task: Task, fields: dict[str, Any], options: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, tuple[Problem, Sequence[Holdings], Result] | None]:
    """Return the bilevel run and its refits, each with its problem and clients, failed runs included.

    A bilevel run whose values are not finite from its start on has no result, and is left out; such a
    refit is None.

    fields: those of a start (`Rival.start`).
    more: settings of the algorithm.
    """
    problem, clients = task.build()
    clients, own = fields.pop("clients", clients), fields.pop("refits", None)
    settings = {**task.suggestions(task.automatic), **fields.pop("settings", {}), **more}
    problem = dataclasses.replace(problem, **fields)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecoveryWarning)  # held-out samples judge the answer
            answer = whole(solve(problem, clients, task.automatic, **options, **settings))
    except NonFiniteError:
        return {}  # the rivals still have an answer
    runs: dict[str, tuple[Problem, Sequence[Holdings], Result] | None] = {BILEVEL: (problem, clients, answer)}
    if answer.stopped == "failed":
        return runs
    for label, way in _refits(task, own, problem, clients, answer.x).items():
        runs[f"{BILEVEL}, {label}"] = None
        with contextlib.suppress(NonFiniteError):  # the run without a refit still has an answer
            runs[f"{BILEVEL}, {label}"] = way.problem, way.clients, _refitted(way, options)
    return runs


def _refits(
    task: Task, own: Callable[..., Mapping[str, Way]] | None, problem: Problem, clients: Sequence[Holdings], x: Any
) -> Mapping[str, Way]:
    if own is not None:
        return own(problem, clients, x)
    common = _common(x)
    return {} if common is None else task.refits(problem, clients, common)


def _refitted(way: Way, options: Mapping[str, Any]) -> Result:
    """Train y once more, with x as it was learned."""
    with warnings.catch_warnings():  # validation samples are among the training samples on purpose
        warnings.simplefilter("ignore", ProblemWarning)
        warnings.simplefilter("ignore", RecoveryWarning)  # held-out samples judge the answer
        return whole(solve(way.problem, way.clients, way.algorithm, **options, **way.settings))


def _common(x: Any) -> dict[str, Any] | None:
    """Return the x of all clients, or None if private blocks differ."""
    first, *others = [x] if isinstance(x, Mapping) else x
    alike = lambda one, leaf: one.shape == leaf.shape and torch.allclose(one, leaf)
    same = all(alike(one[name], leaf) for one in others for name, leaf in first.items())
    return {name: leaf.detach().cpu().clone() for name, leaf in first.items()} if same else None


def _figures(result: Result) -> dict[str, float]:
    return {name: float(result.final[name]) for name in figures_of(result.final)}
