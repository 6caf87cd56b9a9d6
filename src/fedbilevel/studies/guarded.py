"""Guarded answers: a bilevel run beside the task's rivals, and a choice between them by samples apart.

First all runs see all samples: the rivals, each tuned by validation samples, and the bilevel run. It
starts at the best rival that says where x and y could start (`Rival.start`), so that it begins at the
plain practice, as that rival was trained on training samples alone. Then y is trained once more with
the learned x, as the task says (`Task.refits`): by default on training and validation samples together,
where validation samples can serve for training.

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

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedbilevel.errors import SettingError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.holdings import fields_of, same_samples
from fedbilevel.problem.problem import Problem, with_features
from fedbilevel.runs.result import Result
from fedbilevel.settings import whole_number
from fedbilevel.studies import blend as blends
from fedbilevel.studies.blend import Scores
from fedbilevel.studies.contest import BILEVEL, COSTS, Contender, Costs, Tuned, contest
from fedbilevel.studies.gaps import Gap
from fedbilevel.tasks.findings import counted
from fedbilevel.tasks.task import Built, Task

_APART = "apart"
_BLEND = "blend"


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
    spent: rounds, megabytes, seconds and CPU seconds of all runs by contender; those of refits are
        bilevel's.
    tuning: the same of the runs on all samples alone.
    plain: the answer without a bilevel run; None where there is none.
    weights: weights of the blend by name; empty without a blend.
    figures: those of the answer.
    """

    answer: str
    single: str
    rival: str
    contenders: Mapping[str, Contender]
    difference: float
    error: float
    spent: Mapping[str, Mapping[str, float]]
    tuning: Mapping[str, Mapping[str, float]]
    weights: Mapping[str, float]
    figures: Mapping[str, float]
    plain: Guarded | None = None

    @property
    def costs(self) -> dict[str, float]:
        """Return rounds, megabytes and seconds of all runs together."""
        return {name: sum(one[name] for one in self.spent.values()) for name in COSTS}

    @property
    def result(self) -> Result:
        """Return the result of the best single answer."""
        return self.contenders[self.single].result

    @property
    def share(self) -> float:
        """Return the weight of bilevel in the answer."""
        return self.weights.get(BILEVEL, 0.0) if self.weights else float(self.answer == BILEVEL)

    @property
    def sentence(self) -> str:
        parts = ", ".join(f"{weight:.0%} {name}" for name, weight in self.weights.items())
        best, bilevel = self.contenders[self.rival], self.contenders.get(BILEVEL)
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
    num_folds: int | None = None,
    rivals: Sequence[str] | None = None,
    blend: bool = True,
    bilevel: bool = True,
    seed: int = 0,
    **options: Any,
) -> Guarded:
    """Run self_tuned and the rivals of a task, and choose by validation samples that runs did not see.

    A task may name another algorithm (`Task.automatic`), or a figure that chooses (`Task.judge`).

    num_folds: parts of the validation samples; everything runs once without each, and once with all.
        None: the task's own number (`Task.num_folds`).
    rivals: names of the task's rivals that take part; None: all.
    blend: whether the answer may be a blend of several classifiers.
    bilevel: whether a bilevel run takes part; False: the answer is that of the rivals alone.
    options: further keywords of `solve`.

    >>> import fedbilevel as fb
    >>> task = fb.tasks.Regularisation(num_noise=20, parametrisation="sigmoid")
    >>> found = fb.guarded(task, num_rounds=20, num_folds=2)
    >>> sorted(found.contenders), found.answer
    (['bilevel', 'l1_grid', 'l2', 'l2_grid', 'screened'], 'screened')
    """
    if not isinstance(task, Task):
        raise SettingError(f"task is {task!r:.80}, expected a task with its settings, e.g. Regularisation().")
    num_folds = whole_number("num_folds", task.num_folds if num_folds is None else num_folds, 2)
    built, options = task.build(), {"residuals": False, **options, "num_rounds": num_rounds, "seed": seed}
    paid: Costs = {}
    if task.judge:
        whole, _ = contest(task.with_built(built), options, paid, Tuned(rivals, bilevel=bilevel))
        judged = {name: one._replace(losses=_wrong(one, built.clients, task.judge)) for name, one in whole.items()}
        return _answer(judged, (paid, paid), task, 0)
    folds = [_divided(client, Stream(seed), i, num_folds) for i, client in enumerate(built.clients)]
    if not any(len(next(iter(apart.values()))) for own in folds for _, apart in own):
        raise SettingError("no client has two validation samples, so that none can be left out: give more.")
    whole, tuned = contest(task.with_built(built), options, paid, Tuned(rivals, bilevel=bilevel))
    tuning = copy.deepcopy(paid)
    num_classes = blends.num_classes(built.clients) if task.classes else 0
    losses: dict[str, list[np.ndarray]] = {}
    scores: dict[str, list[Scores]] = {}
    for k in range(num_folds):
        # samples left out travel as a role that no run reads, so that rivals change their inputs too
        kept = [{**own[k][0], _APART: own[k][1]} for own in folds]
        found, _ = contest(task.with_built(Built(built.problem, kept)), options, paid, tuned)
        for name, one in found.items():
            if num_classes:
                scores.setdefault(name, []).append(_scored(one, _APART, num_classes))
            else:
                losses.setdefault(name, []).append(_losses(one, task.judged(one.problem)))
    final = {name: whole[name]._replace(losses=np.concatenate(parts))
             for name, parts in losses.items() if len(parts) == num_folds and name in whole}  # fmt: skip
    for name, some in scores.items():
        held = Scores.joined(some)
        if len(some) == num_folds and name in whole and np.isfinite(held.scores).all():  # a run may have failed
            factor = blends.factor_of(held)
            final[name] = whole[name]._replace(losses=held.tempered(factor).losses, factor=factor)
    return _answer(final, (paid, tuning), task, num_classes if blend else 0)


def _answer(final: Mapping[str, Contender], paid: tuple[Costs, Costs], task: Task, num_classes: int) -> Guarded:
    """Return the choice among all contenders, and that among the rivals alone.

    num_classes: 0 without a blend.
    """
    blended = lambda best: _blended(best, task, num_classes) if num_classes else best
    answer = blended(_chosen(final, paid))
    if BILEVEL not in paid[0]:
        return answer
    rivals = {name: one for name, one in final.items() if not name.startswith(BILEVEL)}
    spent, tuning = ({name: one for name, one in costs.items() if name != BILEVEL} for costs in paid)
    return dataclasses.replace(answer, plain=blended(_chosen(rivals, (spent, tuning))))


def _chosen(final: Mapping[str, Contender], paid: tuple[Costs, Costs]) -> Guarded:
    """Choose the rival, the refit and the single answer by losses of samples that no run saw."""
    plain = [name for name in final if not name.startswith(BILEVEL)]
    if not plain:
        raise SettingError("every rival failed in some fold, so there is nothing to compare with: use solve() instead.")
    best = min(plain, key=lambda name: final[name].held_loss)
    contenders, answer, difference, error = {name: final[name] for name in plain}, best, 0.0, 0.0
    if learned := [one for name, one in final.items() if name not in plain]:
        contenders[BILEVEL] = min(learned, key=lambda one: one.held_loss)
        difference, error = Gap.of(contenders[BILEVEL].losses, final[best].losses)
        answer = BILEVEL if difference < -error else best
    return Guarded(answer, answer, best, contenders, difference, error, *paid, {}, contenders[answer].figures)


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


def _divided(
    client: Holdings, stream: Stream, number: int, num_folds: int
) -> list[tuple[Holdings, Mapping[str, np.ndarray]]]:
    """Return, for every fold, the client without these validation samples, and the samples.

    Where training and validation samples are the same, training misses them too. A single validation
    sample stays in all folds.
    """
    fields = {name: np.asarray(value) for name, value in fields_of(client["val"], f"'val' of client {number}").items()}
    roles = ("train", "val") if same_samples(client["train"], client["val"]) else ("val",)
    size = len(next(iter(fields.values())))
    order = stream.order("guarded", number, size, iteration=0).numpy()
    found: list[tuple[Holdings, Mapping[str, np.ndarray]]] = []
    for k in range(num_folds):
        out = np.sort(order[k::num_folds]) if size > 1 else order[:0]
        kept = np.setdiff1d(np.arange(size), out)
        less = {name: value[kept] for name, value in fields.items()}
        apart = {name: value[out] for name, value in fields.items()}
        found.append(({**client, **dict.fromkeys(roles, less)}, apart))
    return found


def _wrong(one: Contender, clients: Sequence[Holdings], judge: tuple[str, str, str]) -> np.ndarray:
    """Return the share of wrong answers of every client, in a role that no run learns from."""
    role, right, answers = judge
    return np.array([1 - sums[right] / sums[answers] for sums in counted(one.problem, clients, one.result, role)])


def _scored(one: Contender, role: str, num_classes: int) -> Scores:
    return blends.scored(one.problem, one.result, one.clients, role, num_classes)


@torch.no_grad()
def _losses(one: Contender, judged: Problem) -> np.ndarray:
    """Return the upper losses of samples that no run saw, all clients after one another."""
    found = [np.empty(0)]
    for i, client in enumerate(one.clients):
        if not len(next(iter(client[_APART].values()))):
            continue
        x, y, batch = blends.placed(one.result, i, client[_APART])
        losses = judged.upper(x, y, with_features(judged, x, batch))
        found.append(np.atleast_1d(losses.double().numpy()))
    return np.concatenate(found)
