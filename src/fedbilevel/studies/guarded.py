"""Never worse than the plain way: a bilevel run beside the task's rivals, and a choice by samples apart.

A part of every client's validation samples stays out of all runs. The rivals run first. Where the
best of them says where x and y could start (`Rival.start`), the bilevel run starts there, so that it
begins at the plain practice. Then y is trained once more with the learned x on training and
validation samples together. The samples that were left out choose the best rival and the better of
both bilevel answers, by their mean upper loss. The answer is the rival, unless the bilevel answer is
better by more than one standard error of the paired difference. Test samples have no influence.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbilevel.columns import figures_of
from fedbilevel.errors import ProblemWarning, SettingError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.holdings import fields_of
from fedbilevel.problem.problem import Problem, with_features
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.studies.rivals import RivalOutcome, run_rival
from fedbilevel.tasks.rival import PLAIN, with_validation
from fedbilevel.tasks.task import Built, Task

_COSTS = ("rounds", "megabytes", "seconds")


class Contender(NamedTuple):
    """A possible answer: figures, and upper losses of the samples that no run saw."""

    problem: Problem
    result: Result
    figures: Mapping[str, float]
    losses: np.ndarray

    @property
    def held_loss(self) -> float:
        return float(self.losses.mean())


@dataclasses.dataclass(frozen=True, repr=False)
class Guarded:
    """The answer of `guarded`, with the figures of both sides.

    answer: "bilevel", or the name of a rival.
    contenders: the best rival under its name, and `bilevel`.
    rivals: outcomes of all rivals.
    difference: mean loss of bilevel minus that of the best rival, on samples that no run saw.
    error: standard error of the difference, over samples.
    costs: rounds, megabytes and seconds of all runs.
    """

    answer: str
    contenders: Mapping[str, Contender]
    rivals: Mapping[str, RivalOutcome]
    difference: float
    error: float
    costs: Mapping[str, float]

    @property
    def result(self) -> Result:
        return self.contenders[self.answer].result

    @property
    def figures(self) -> dict[str, float]:
        return dict(self.contenders[self.answer].figures)

    @property
    def sentence(self) -> str:
        rival = next(name for name in self.contenders if name != "bilevel")
        losses = {name: one.held_loss for name, one in self.contenders.items()}
        return (
            f"the answer is {self.answer}: on {len(self.contenders[rival].losses)} samples that no run saw, the upper "
            f"loss is {losses['bilevel']:.4g} with bilevel and {losses[rival]:.4g} with {rival} "
            f"(difference {self.difference:+.2g}, standard error {self.error:.2g})"
        )

    def __repr__(self) -> str:
        return f"<{self.sentence}>"


def guarded(task: Task, *, num_rounds: int, seed: int = 0, share: float = 0.25, **options: Any) -> Guarded:
    """Run self_tuned and the rivals of a task, and choose by validation samples that no run saw.

    share: of every client's validation samples that are left out, at least one.
    options: further keywords of `solve`.

    >>> import fedbilevel as fb
    >>> task = fb.tasks.Regularisation(num_noise=20, parametrisation="sigmoid")
    >>> found = fb.guarded(task, num_rounds=60)
    >>> sorted(found.contenders), found.answer in found.contenders
    (['bilevel', 'l1_grid'], True)
    """
    if not isinstance(task, Task):
        raise SettingError(f"task is {task!r:.80}, expected a task with its settings, e.g. Regularisation().")
    built, options = task.build(), {"residuals": False, **options, "num_rounds": num_rounds, "seed": seed}
    parts = [_divided(client, Stream(seed), i, share) for i, client in enumerate(built.clients)]
    kept, apart = [one for one, _ in parts], [other for _, other in parts]
    if not all(len(next(iter(one.values()))) for one in apart):
        raise SettingError("a client has fewer than two validation samples, so that none can be left out: give more.")
    plans = task.with_built(Built(built.problem, kept)).rivals()
    rivals = {name: run_rival(rival, **options) for name, rival in plans.items()}
    plain = {
        name: Contender(one.way.problem, one.result, one.figures, _losses(one.way.problem, one.result, apart))
        for name, one in rivals.items()
        if one.result is not None and one.failed is None
    }
    if not plain:
        raise SettingError(f"the task {task.name()} has no rival that ends well: use solve() instead.")
    best = min(plain, key=lambda name: plain[name].held_loss)
    start, problem = plans[best].start, built.problem
    if start is not None:
        problem = dataclasses.replace(problem, **start(rivals[best].chosen, plain[best].result.y))
    runs = [solve(problem, kept, "self_tuned", **options)]
    if (x := _common(runs[0].x)) is not None and isinstance(runs[0].y, Mapping) and _alike(kept):
        runs.append(_refitted(dataclasses.replace(problem, x0=x), kept, options))
    found = [Contender(problem, one, _figures(one), _losses(problem, one, apart)) for one in runs]
    bilevel = min(found, key=lambda one: one.held_loss)
    gaps = bilevel.losses - plain[best].losses
    error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else float("inf")
    paid = [*(one.costs for one in rivals.values()), *(one.final for one in runs)]
    return Guarded(
        "bilevel" if gaps.mean() < -error else best,
        {best: plain[best], "bilevel": bilevel},
        rivals,
        float(gaps.mean()),
        error,
        {name: float(sum(one[name] for one in paid)) for name in _COSTS},
    )


def _refitted(problem: Problem, clients: Sequence[Holdings], options: Mapping[str, Any]) -> Result:
    """Train y once more, with x as it was learned, on training and validation samples together."""
    with warnings.catch_warnings():  # validation samples are among the training samples on purpose
        warnings.simplefilter("ignore", ProblemWarning)
        return solve(problem, with_validation(clients), "self_tuned", **options, **PLAIN)


def _common(x: Any) -> dict[str, Any] | None:
    """Return the x of all clients, or None if private blocks differ."""
    first, *others = [x] if isinstance(x, Mapping) else x
    same = all(torch.allclose(one[name], leaf) for one in others for name, leaf in first.items())
    return {name: leaf.detach().cpu().clone() for name, leaf in first.items()} if same else None


def _alike(clients: Sequence[Holdings]) -> bool:
    """Return whether validation samples have every field that training needs."""
    return all(set(client["train"]) <= set(client["val"]) for client in clients)


def _figures(result: Result) -> dict[str, float]:
    return {name: float(result.final[name]) for name in figures_of(result.final)}


def _divided(client: Holdings, stream: Stream, number: int, share: float) -> tuple[Holdings, Mapping[str, np.ndarray]]:
    """Return a client without a part of its validation samples, and this part."""
    fields = {name: np.asarray(value) for name, value in fields_of(client["val"], f"'val' of client {number}").items()}
    size = len(next(iter(fields.values())))
    kept, out = (rows.numpy() for rows in stream.divided("guarded", number, size, share, least=1))
    return {**client, "val": {name: value[kept] for name, value in fields.items()}}, {
        name: value[out] for name, value in fields.items()
    }


@torch.no_grad()
def _losses(problem: Problem, result: Result, apart: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Return the upper losses of samples that no run saw, all clients after one another."""
    found = []
    for i, fields in enumerate(apart):
        x, y = (value if isinstance(value, Mapping) else value[i] for value in (result.x, result.y))
        size = len(next(iter(fields.values())))
        dtype = next(iter(y.values())).dtype
        batch = {name: torch.as_tensor(value) for name, value in fields.items()}
        batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        batch |= {"weight": torch.full((size,), 1 / size, dtype=dtype), "index": torch.arange(size)}
        x, y = ({name: leaf.detach().cpu() for name, leaf in tree.items()} for tree in (x, y))
        losses = problem.upper(x, y, with_features(problem, x, batch))
        found.append(np.atleast_1d(losses.double().numpy()))
    return np.concatenate(found)
