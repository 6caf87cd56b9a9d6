"""The plain alternative to learning x, and a comparison with it on data that no run used.

The plain run trains y with x fixed at x0, for as many rounds as the run. Both solutions are judged
by the problem's metrics of roles other than train and val or, without such roles, by the upper loss
on a quarter of the validation samples, which neither run sees. Samples are resampled within their
client, and those of clients with few samples together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.columns import falls, rises
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import REQUIRED, ClientData, Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.holdings import check_clients, fields_of, same_samples
from fedbilevel.problem.problem import Problem, with_features

HELD_OUT = "held_out"  # role of validation samples that no run sees
_SHARE = 0.25  # of the validation samples of each client
_REPLICATES = 1000
_SMALL = 10  # rows of a client below which it is resampled together with other small clients
_CELLS = 10**7  # entries of a matrix of bootstrap counts that are held at once


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Figures of a run and of the plain run on data that neither used.

    difference, low, high: the change by learning x and its 95 % bootstrap interval; in points for
        shares such as an accuracy, in per cent of the plain figure for losses, else in the figure's
        own unit.
    costs: total costs of the plain run, which the ledger of the run does not include.
    """

    figure: str
    learned: float
    fixed: float
    difference: float
    low: float
    high: float
    unit: str
    costs: Mapping[str, int]

    @property
    def helped(self) -> bool:
        """Return whether the whole interval is on the better side of zero."""
        return self.high < 0 if falls(self.figure) else self.low > 0

    @property
    def sentence(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        change = f"{self.difference:+.2g}{unit}"
        if self.helped:
            return f"learning x changed {self.figure} by {change} ({self.low:.2g} to {self.high:.2g})"
        said = "made it worse" if self.low > 0 or self.high < 0 else "is not shown to help"
        return (
            f"learning x {said}: {self.figure} {self.learned:.4g} with it, {self.fixed:.4g} without "
            f"(difference {change}, {self.low:.2g} to {self.high:.2g})"
        )

    def asdict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "costs": dict(self.costs), "sentence": self.sentence}


def plain_run() -> Algorithm:
    """Return the algorithm of the plain run: y is trained at x0 with measured steps."""
    return discovery.algorithm("self_tuned")(**{"learn_x": False})


def unseen_roles(problem: Problem) -> list[str]:
    """Return the roles with statistics that no algorithm uses."""
    return [role for role in problem.statistics if role not in REQUIRED]


def with_unseen(
    problem: Problem, clients: Sequence[Holdings], seed: int, ids: Sequence[int] | None = None
) -> Sequence[Holdings]:
    """Return clients with data that no run uses: a part of `val`, if there are no such data yet."""
    check_clients(clients)
    if unseen_roles(problem):
        return clients
    stream = Stream(seed)
    numbers = dict(enumerate(range(len(clients)) if ids is None else ids))
    apart = [_apart(client, stream, i, numbers.get(i, i)) for i, client in enumerate(clients)]
    if not any(len(value) for client in apart for value in client[HELD_OUT].values()):
        raise SettingError(
            "baseline=True needs data that the run does not use, but the problem has no statistics of a role such as "
            "'test' and no client has two samples in 'val': add test data, or leave baseline out."
        )
    return apart


def check_unseen(population: Population) -> None:
    """Raise if the samples that were held out cannot be missed, because they have numbers."""
    if not unseen_roles(population.problem) and population.reads_index():
        raise SettingError(
            "baseline=True holds a quarter of the samples in 'val' out of the run, but upper() reads batch['index'], "
            "so that every sample counts: add test data with statistics, or leave baseline out."
        )


def _apart(client: Holdings, stream: Stream, place: int, number: int) -> Holdings:
    """Move a part of the validation samples of one client to the held-out role.

    Where training and validation samples are the same, training misses them too.
    """
    fields = fields_of(client.get("val", {}), f"'val' of client {place}")
    size = min((len(value) for value in fields.values()), default=0)
    kept, out = stream.divided(HELD_OUT, number, size, _SHARE, least=1)
    part = lambda rows: {name: _taken(value, rows) for name, value in fields.items()}
    roles = ("train", "val") if same_samples(client.get("train", {}), fields) else ("val",)
    return {**client, **dict.fromkeys(roles, part(kept)), HELD_OUT: part(out)}


def _taken(value: Any, rows: Tensor) -> Any:
    return value[rows.to(value.device)] if isinstance(value, Tensor) else np.asarray(value)[rows.numpy()]


class Point(NamedTuple):
    """A solution: dicts of tensors, or one dict per client."""

    x: Any
    y: Any


def compared(
    problem: Problem,
    clients: Sequence[Holdings],
    learned: Point,
    fixed: Point,
    costs: Mapping[str, int],
    *,
    seed: int,
    dtype: torch.dtype,
) -> Baseline:
    """Compare two solutions on the data that no run used, with a paired bootstrap."""
    evaluation = _Evaluation(problem, clients, dtype)
    tables = [evaluation.table(point) for point in (learned, fixed)]
    figures = [evaluation.figures(table.sum(0), point) for table, point in zip(tables, (learned, fixed), strict=True)]
    replicates = _resampled(tables, evaluation.groups, np.random.default_rng([seed, 20]))
    samples = [
        [evaluation.figures(sums, point) for sums in some]
        for some, point in zip(replicates, (learned, fixed), strict=True)
    ]
    name = _chosen(figures[0], samples[0])
    change, unit = _change(name, figures[1][name])
    differences = [change(one[name], other[name]) for one, other in zip(*samples, strict=True)]
    low, high = np.nanpercentile(differences, [2.5, 97.5]).tolist()
    if sum(evaluation.groups) == 1:  # one row has no spread
        low, high = -math.inf, math.inf
    with_x, without = figures[0][name], figures[1][name]
    return Baseline(name, with_x, without, change(with_x, without), low, high, unit, dict(costs))


def _chosen(figures: Mapping[str, float], samples: Sequence[Mapping[str, float]]) -> str:
    """Return the figure to compare: the first that rises or falls, and one of the test data first.

    A figure that no replicate changes does not depend on the unseen data.
    """
    if not figures:
        raise SettingError(
            "baseline=True compares metrics, but the problem's metrics() returned none for its statistics: return a "
            "figure such as test_accuracy, or leave baseline out."
        )
    moved = [name for name in figures if any(one[name] != figures[name] for one in samples)] or list(figures)
    ranked = sorted(moved, key=lambda name: (not rises(name), not falls(name), "test" not in name))
    return ranked[0]


def _change(name: str, fixed: float) -> tuple[Callable[[float, float], float], str]:
    """Return the function that measures a change of a figure, and its unit."""
    if rises(name):
        return lambda one, other: 100 * (one - other), "points"
    if falls(name) and fixed != 0:
        return lambda one, other: 100 * (one - other) / abs(other) if other else math.nan, "%"
    return lambda one, other: one - other, ""


class _Evaluation:
    """Statistics of single samples on the data that no run used."""

    def __init__(self, problem: Problem, clients: Sequence[Holdings], dtype: torch.dtype) -> None:
        self.problem, self.dtype = problem, dtype
        self.data = ClientData(clients, dtype=dtype)
        self.roles = unseen_roles(problem) or [HELD_OUT]
        sizes = self.data.sizes["train"].double()
        weights = sizes if problem.client_weights == "by_samples" else torch.ones_like(sizes)
        if self.roles == [HELD_OUT]:
            weights = weights * (self.data.sizes[HELD_OUT] > 0)
        self.weights = (weights / weights.sum()).tolist()
        self.groups: list[int] = []  # numbers of rows that are resampled together, in the order of a table
        self.names: list[str] = []
        self._seen: dict[int, dict[str, float]] = {}

    def table(self, point: Point) -> np.ndarray[Any, Any]:
        """Return a table with one row per sample, or per client without values per sample."""
        rows, sizes = [], []
        for role in self.roles:
            found = (self._of_client(role, i, point) for i in range(self.data.num_clients))
            parts = [part for part in found if part]
            self.names = [*dict.fromkeys([*self.names, *(name for part in parts for name in part)])]
            length = lambda part: len(next(iter(part.values())))
            parts.sort(key=lambda part: length(part) < _SMALL)  # small clients last; a group of one has no spread
            large = [length(part) for part in parts if length(part) >= _SMALL]
            small = sum(map(length, parts)) - sum(large)
            sizes += [*large, *([small] if small else [])]
            rows += parts
        self.groups = sizes
        return np.concatenate(
            [
                np.stack([part.get(name, np.zeros(len(next(iter(part.values()))))) for name in self.names], axis=1)
                for part in rows
            ]
        )

    def figures(self, sums: np.ndarray[Any, Any], point: Point) -> dict[str, float]:
        found = dict(zip(self.names, sums.tolist(), strict=True))
        if self.roles == [HELD_OUT]:
            return {"held_out_loss": found["loss"]}
        return dict(self.problem.metrics({**self._of_seen(point), **found}))

    @torch.no_grad()
    def _of_client(self, role: str, i: int, point: Point) -> dict[str, Any]:
        """Return the statistics of one client, one value per sample or one in all."""
        if not int(self.data.sizes[role][i]):
            return {}
        fields: Mapping[str, Any] = self.data.look(self.data.positions[i : i + 1], role).row(0)
        x, y = (value[i] if isinstance(value, list) else value for value in point)
        x, y = ({name: leaf.cpu().to(self.dtype) for name, leaf in tree.items()} for tree in (x, y))
        fields = with_features(self.problem, x, fields)
        if role == HELD_OUT:
            loss = self.problem.upper(x, y, fields)
            each = loss * fields["weight"] if loss.ndim else loss
            return {"loss": self.weights[i] * np.atleast_1d(each.double().numpy())}
        found = self.problem.statistics[role](x, y, fields)
        if any(value.ndim == 0 for value in found.values()):  # sums of the client, so that clients are resampled
            found = {name: value.sum() for name, value in found.items()}
        return {name: np.atleast_1d(value.double().numpy()) for name, value in found.items()}

    def _of_seen(self, point: Point) -> dict[str, float]:
        """Return the sums of statistics of roles that the run uses, which `metrics` may need."""
        if id(point) not in self._seen:
            sums: dict[str, float] = {}
            for role in (role for role in self.problem.statistics if role in REQUIRED):
                for i in range(self.data.num_clients):
                    for name, value in self._of_client(role, i, point).items():
                        sums[name] = sums.get(name, 0.0) + float(value.sum())
            self._seen[id(point)] = sums
        return self._seen[id(point)]


def _resampled(
    tables: Sequence[np.ndarray[Any, Any]], groups: Sequence[int], draw: np.random.Generator
) -> list[np.ndarray[Any, Any]]:
    """Return bootstrap sums of each table; both tables use the same samples.

    Rows are drawn with replacement within their group.
    """
    sums = [np.zeros((_REPLICATES, table.shape[1])) for table in tables]
    start = 0
    for size in groups:
        at_once = max(1, _CELLS // max(1, size))
        for first in range(0, _REPLICATES, at_once):
            num = min(at_once, _REPLICATES - first)
            counts = draw.multinomial(size, np.full(size, 1 / size), size=num).astype(np.float64)
            for total, table in zip(sums, tables, strict=True):
                total[first : first + num] += counts @ table[start : start + size]
        start += size
    return sums
