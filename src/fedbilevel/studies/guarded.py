"""Never worse than the plain way: a bilevel run beside the task's rivals, and a choice by samples apart.

First all runs see all samples: the rivals, each tuned by validation samples, and the bilevel run. It
starts at the best rival that says where x and y could start (`Rival.start`), so that it begins at the
plain practice. Then y is trained once more with the learned x, as the task says (`Task.refits`): by
default on training and validation samples together, where validation samples can serve for training.

Then the validation samples of every client are divided into folds, and everything is repeated without
one fold at a time. Rivals keep the settings by which they were tuned, so their tuning has seen the
fold, which favours them. The samples of the fold judge all answers by their upper loss; where the
task has classes (`Task.graded`), by their cross-entropy at the best temperature (studies/blend.py).

Over all folds, they choose the best rival, and whether y is refitted. The best single answer is the
rival, unless the bilevel answer is better by more than one standard error of the paired difference.
Where the task has classes, the answer is a blend of the rivals and the bilevel answer, if the samples
prefer it to the best single answer, and unless `blend` is False. Test samples have no influence.
Where a task has samples that no run learns from (`Task.judge`), there are no folds: the right answers of
every client to these samples choose.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbilevel.columns import figures_of
from fedbilevel.errors import NonFiniteError, ProblemWarning, SettingError, UnknownNameError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.holdings import fields_of
from fedbilevel.problem.problem import Problem, with_features
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.settings import whole_number
from fedbilevel.studies import blend as blends
from fedbilevel.studies.blend import Scores
from fedbilevel.studies.gaps import Gap
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.findings import counted
from fedbilevel.tasks.rival import Way
from fedbilevel.tasks.task import Built, Task

_COSTS = ("rounds", "megabytes", "seconds")
_APART = "apart"
_BILEVEL = "bilevel"  # a refit has a longer name
_BLEND = "blend"


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


@dataclasses.dataclass(frozen=True, repr=False)
class Guarded:
    """The answer of `guarded`, with the figures of both sides.

    answer: "bilevel", the name of a rival, or "blend", the weighted mean of all their probabilities.
    single: the answer of a single run, "bilevel" or the name of a rival.
    rival: the name of the best rival.
    contenders: all rivals under their names, and `bilevel`.
    difference: mean loss of bilevel minus that of the best rival, on samples that their runs did not
        see.
    error: standard error of the difference, over samples.
    costs: rounds, megabytes and seconds of all runs.
    weights: weights of the blend by name; empty without a blend.
    figures: those of the answer.
    """

    answer: str
    single: str
    rival: str
    contenders: Mapping[str, Contender]
    difference: float
    error: float
    costs: Mapping[str, float]
    weights: Mapping[str, float]
    figures: Mapping[str, float]

    @property
    def result(self) -> Result:
        """Return the result of the best single answer."""
        return self.contenders[self.single].result

    @property
    def share(self) -> float:
        """Return the weight of bilevel in the answer."""
        return self.weights.get(_BILEVEL, 0.0) if self.weights else float(self.answer == _BILEVEL)

    @property
    def sentence(self) -> str:
        parts = ", ".join(f"{weight:.0%} {name}" for name, weight in self.weights.items())
        best, bilevel = self.contenders[self.rival], self.contenders.get(_BILEVEL)
        said = "" if bilevel is None else f"{bilevel.held_loss:.4g} with bilevel and "
        compared = f" (difference {self.difference:+.2g}, standard error {self.error:.2g})" if bilevel else ""
        return (
            f"the answer is {self.answer}{f' ({parts})' if parts else ''}: on held-out samples ({len(best.losses)} "
            f"values), the mean loss is {said}{best.held_loss:.4g} with {self.rival}{compared}"
        )

    def __repr__(self) -> str:
        return f"<{self.sentence}>"


def guarded(
    task: Task,
    *,
    num_rounds: int,
    num_folds: int = 4,
    rivals: Sequence[str] | None = None,
    blend: bool = True,
    bilevel: bool = True,
    seed: int = 0,
    **options: Any,
) -> Guarded:
    """Run self_tuned and the rivals of a task, and choose by validation samples that runs did not see.

    A task may name another algorithm (`Task.automatic`), or a figure that chooses (`Task.judge`).

    num_folds: parts of the validation samples; everything runs once without each, and once with all.
    rivals: names of the task's rivals that take part; None: all.
    blend: whether the answer may be a blend of several classifiers.
    bilevel: whether a bilevel run takes part; False: the answer is that of the rivals alone.
    options: further keywords of `solve`.

    >>> import fedbilevel as fb
    >>> task = fb.tasks.Regularisation(num_noise=20, parametrisation="sigmoid")
    >>> found = fb.guarded(task, num_rounds=20, num_folds=2)
    >>> sorted(found.contenders), found.answer
    (['bilevel', 'l1_grid', 'l2', 'l2_grid'], 'l1_grid')
    """
    if not isinstance(task, Task):
        raise SettingError(f"task is {task!r:.80}, expected a task with its settings, e.g. Regularisation().")
    num_folds = whole_number("num_folds", num_folds, 2)
    built, options = task.build(), {"residuals": False, **options, "num_rounds": num_rounds, "seed": seed}
    paid = dict.fromkeys(_COSTS, 0.0)
    if task.judge:
        whole, _ = _contest(task.with_built(built), options, paid, _Tuned(rivals, bilevel=bilevel))
        judged = {name: one._replace(losses=_wrong(one, built.clients, task.judge)) for name, one in whole.items()}
        return _chosen(judged, paid)
    folds = [_divided(client, Stream(seed), i, num_folds) for i, client in enumerate(built.clients)]
    if not any(len(next(iter(apart.values()))) for own in folds for _, apart in own):
        raise SettingError("no client has two validation samples, so that none can be left out: give more.")
    whole, tuned = _contest(task.with_built(built), options, paid, _Tuned(rivals, bilevel=bilevel))
    num_classes = blends.num_classes(built.clients) if task.classes else 0
    losses: dict[str, list[np.ndarray]] = {}
    scores: dict[str, list[Scores]] = {}
    for k in range(num_folds):
        # samples left out travel as a role that no run reads, so that rivals change their inputs too
        kept = [{**own[k][0], _APART: own[k][1]} for own in folds]
        found, _ = _contest(task.with_built(Built(built.problem, kept)), options, paid, tuned)
        for name, one in found.items():
            if num_classes:
                scores.setdefault(name, []).append(_scored(one, _APART, num_classes))
            else:
                losses.setdefault(name, []).append(_losses(one))
    final = {name: whole[name]._replace(losses=np.concatenate(parts))
             for name, parts in losses.items() if len(parts) == num_folds and name in whole}  # fmt: skip
    for name, some in scores.items():
        held = Scores.joined(some)
        if len(some) == num_folds and name in whole and np.isfinite(held.scores).all():  # a run may have failed
            factor = blends.factor_of(held)
            final[name] = whole[name]._replace(losses=held.tempered(factor).losses, factor=factor)
    best = _chosen(final, paid)
    return _blended(best, task, num_classes) if blend and num_classes else best


def _chosen(final: Mapping[str, Contender], paid: Mapping[str, float]) -> Guarded:
    """Choose the rival, the refit and the single answer by losses of samples that no run saw."""
    plain = [name for name in final if not name.startswith(_BILEVEL)]
    if not plain:
        raise SettingError("every rival failed in some fold, so there is nothing to compare with: use solve() instead.")
    best = min(plain, key=lambda name: final[name].held_loss)
    contenders, answer, difference, error = {name: final[name] for name in plain}, best, 0.0, 0.0
    if learned := [one for name, one in final.items() if name not in plain]:
        contenders[_BILEVEL] = min(learned, key=lambda one: one.held_loss)
        difference, error = Gap.of(contenders[_BILEVEL].losses, final[best].losses)
        answer = _BILEVEL if difference < -error else best
    return Guarded(answer, answer, best, contenders, difference, error, paid, {}, contenders[answer].figures)


def _blended(found: Guarded, task: Task, num_classes: int) -> Guarded:
    """Return the blend of all contenders, with weights by samples that no run saw, if they speak for it."""
    contenders = found.contenders
    if not all("label" in client.get("test", {}) for one in contenders.values() for client in one.clients):
        return found
    losses = np.stack([one.losses for one in contenders.values()])
    if not blends.held_loss(losses) < contenders[found.single].held_loss:
        return found
    weights = blends.weights_of(losses).tolist()
    members = [_scored(one, "test", num_classes).tempered(one.factor) for one in contenders.values()]
    shares = dict(zip(contenders, weights, strict=True))
    figures = task.graded(*blends.blended(members, weights))
    return dataclasses.replace(found, answer=_BLEND, weights=shares, figures=figures)


class _Tuned(NamedTuple):
    """What the runs on all samples chose: the rivals and their labels, and the rival to start from.

    bilevel: whether there is a bilevel run.
    """

    names: Sequence[str] | None = None
    labels: Mapping[str, str] = MappingProxyType({})
    first: str | None = None
    bilevel: bool = True


def _contest(
    task: Task, options: Mapping[str, Any], paid: dict[str, float], tuned: _Tuned
) -> tuple[dict[str, Contender], _Tuned]:
    """Run the rivals of a task, then the bilevel run and its refit, and add their costs to `paid`."""
    (problem, clients), plans = task.build(), dict(task.rivals())
    for name in tuned.names or ():
        if name not in plans:
            raise UnknownNameError(f"rival of {task.name()}", name, plans)
    plans = {
        name: rival._replace(ways={label: rival.ways[label]}) if (label := tuned.labels.get(name)) else rival
        for name, rival in plans.items()
        if tuned.names is None or name in tuned.names
    }
    rivals = {name: run_rival(rival, always=name == tuned.first, **options) for name, rival in plans.items()}
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
    if first in found and (start := plans[first].start) is not None:
        # a network that has learned validation samples by heart would leave nothing to judge by them
        fields = start(good[first].chosen, good[first].unseen or found[first].result)
        clients = fields.pop("clients", clients)
        problem = dataclasses.replace(problem, **fields)
    runs = _bilevel(task, problem, clients, options) if tuned.bilevel else {}
    for costs in (*(one.costs for one in rivals.values()), *(one.final for _, _, one in runs.values())):
        for name in _COSTS:
            paid[name] += float(costs[name])
    found |= {name: Contender(own, some, one, _figures(one)) for name, (own, some, one) in runs.items()}
    return found, _Tuned(list(good), {name: one.chosen for name, one in good.items()}, first, tuned.bilevel)


def _bilevel(
    task: Task, problem: Problem, clients: Sequence[Holdings], options: Mapping[str, Any]
) -> dict[str, tuple[Problem, Sequence[Holdings], Result]]:
    """Return the bilevel run and its refits, each with its problem and clients."""
    try:
        answer = solve(problem, clients, task.automatic, **options, **task.suggestions(task.automatic))
    except NonFiniteError:
        return {}  # the rivals still have an answer
    if answer.stopped == "failed":
        return {}
    runs = {_BILEVEL: (problem, clients, answer)}
    x = _common(answer.x)
    for label, way in task.refits(problem, clients, x).items() if x is not None else ():
        runs[f"{_BILEVEL}, {label}"] = way.problem, way.clients, _refitted(way, options)
    return runs


def _refitted(way: Way, options: Mapping[str, Any]) -> Result:
    """Train y once more, with x as it was learned."""
    with warnings.catch_warnings():  # validation samples are among the training samples on purpose
        warnings.simplefilter("ignore", ProblemWarning)
        return solve(way.problem, way.clients, way.algorithm, **options, **way.settings)


def _common(x: Any) -> dict[str, Any] | None:
    """Return the x of all clients, or None if private blocks differ."""
    first, *others = [x] if isinstance(x, Mapping) else x
    same = all(torch.allclose(one[name], leaf) for one in others for name, leaf in first.items())
    return {name: leaf.detach().cpu().clone() for name, leaf in first.items()} if same else None


def _figures(result: Result) -> dict[str, float]:
    return {name: float(result.final[name]) for name in figures_of(result.final)}


def _divided(
    client: Holdings, stream: Stream, number: int, num_folds: int
) -> list[tuple[Holdings, Mapping[str, np.ndarray]]]:
    """Return, for every fold, the client without these validation samples, and the samples.

    A single validation sample stays in all folds.
    """
    fields = {name: np.asarray(value) for name, value in fields_of(client["val"], f"'val' of client {number}").items()}
    size = len(next(iter(fields.values())))
    order = stream.order("guarded", number, size, iteration=0).numpy()
    found: list[tuple[Holdings, Mapping[str, np.ndarray]]] = []
    for k in range(num_folds):
        out = np.sort(order[k::num_folds]) if size > 1 else order[:0]
        kept = np.setdiff1d(np.arange(size), out)
        found.append(
            (
                {**client, "val": {name: value[kept] for name, value in fields.items()}},
                {name: value[out] for name, value in fields.items()},
            )
        )
    return found


def _wrong(one: Contender, clients: Sequence[Holdings], judge: tuple[str, str, str]) -> np.ndarray:
    """Return the share of wrong answers of every client, in a role that no run learns from."""
    role, right, answers = judge
    return np.array([1 - sums[right] / sums[answers] for sums in counted(one.problem, clients, one.result, role)])


def _scored(one: Contender, role: str, num_classes: int) -> Scores:
    return blends.scored(one.problem, one.result, one.clients, role, num_classes)


@torch.no_grad()
def _losses(one: Contender) -> np.ndarray:
    """Return the upper losses of samples that no run saw, all clients after one another."""
    found = [np.empty(0)]
    for i, client in enumerate(one.clients):
        if not len(next(iter(client[_APART].values()))):
            continue
        x, y, batch = blends.placed(one.result, i, client[_APART])
        losses = one.problem.upper(x, y, with_features(one.problem, x, batch))
        found.append(np.atleast_1d(losses.double().numpy()))
    return np.concatenate(found)
