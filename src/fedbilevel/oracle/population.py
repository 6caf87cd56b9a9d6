"""A problem with the data of the clients hosted in this process.

It holds their layouts, initial points, weights and oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.oracle.oracle import Oracle, Strategy
from fedbilevel.oracle.portions import Portion, per_sample_statistics, size, squares, total
from fedbilevel.oracle.precision import Precision, check_precision
from fedbilevel.oracle.trial import Few, settle
from fedbilevel.problem.client_data import Batch, ClientData, Holdings
from fedbilevel.problem.independence import independent
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Problem, with_features
from fedbilevel.problem.validation import away, check_kind, check_losses, check_statistics, own_figures, reads_index

# one vector, one row per client, or a function from positions to their rows
Points = Tensor | Callable[[Tensor], Tensor]
Added = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # sums over the clients hosted here -> those over all
_LOOK = 2**27  # bytes of samples and rows that a measurement copies at once


class Population:
    def __init__(
        self,
        problem: Problem,
        clients: Sequence[Holdings],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        strategy: Strategy = "auto",
        chunk_size: int | None = None,
        precision: Precision = "full",
        second: bool = True,
    ) -> None:
        """Prepare the data and the oracle of a problem.

        precision: precision of the run's derivatives; measurements are always in full.
        second: whether second derivatives are used, so that they are tried before a run.
        """
        if dtype not in (torch.float32, torch.float64):
            raise SettingError(f"dtype is {dtype!r}, expected torch.float32 or torch.float64.")
        check_precision(precision, dtype)
        check_kind(problem)
        self.problem, self.precision = problem, precision
        self.data = ClientData(clients, dtype=dtype, device=device)
        self.dtype, self.device = self.data.dtype, self.data.device
        self.x_sizes: Tensor | None = None  # lengths of private rows without their padding
        self.layout_x, self.x0 = self._initial_x()
        self.layout_y = Layout(problem.y0)
        self.y0 = self.layout_y.ravel(problem.y0).detach().to(device=device, dtype=dtype)
        start = self._own_x(0), self.y0
        self.per_sample = check_losses(problem, self.data, self.layout_x, self.layout_y, *start)
        self.independent = independent(problem, self.data, self.layout_x, self.layout_y, *start, self.per_sample)
        check_statistics(problem, self.data, self.layout_x, self.layout_y, self._own_x, self.y0)
        make = partial(self._oracle, precision=precision)
        self.oracle, self.second = make(strategy, chunk_size), second
        self.limit: int | None = None  # samples that a measurement evaluates at once
        self._watcher: Oracle | None = None
        settle(self.oracle, make, self._few(), second=second)

    def __len__(self) -> int:
        return self.data.num_clients

    def _oracle(self, strategy: Strategy, chunk_size: int | None = None, precision: Precision = "full") -> Oracle:
        return Oracle(
            self.problem,
            self.layout_x,
            self.layout_y,
            per_sample=self.per_sample,
            independent=self.independent,
            strategy=strategy,
            chunk_size=chunk_size,
            precision=precision,
        )

    def _few(self) -> Few:
        """Return two samples of the first two clients in each role; a sample may occur twice."""

        def few(role: str) -> tuple[Tensor, Batch]:
            two = self.data.positions[self.data.sizes[role] > 0][:2]
            index = torch.zeros(len(two), 2, dtype=torch.int64, device=self.device)
            return self.x0 if self.x0.ndim == 1 else self.x0[two], self.data.batch(two, role, index)

        tried = {role: function for role, function in self.problem.statistics.items() if self.data.sizes[role].any()}
        statistics = [(role, function, *few(role)) for role, function in tried.items()]
        x, train = few("train")
        return Few(x, self.y0, train, few("val")[1], statistics)

    def _own_x(self, position: int) -> Tensor:
        """Return the initial x of one client without padding."""
        return self.x0 if self.x_sizes is None else self.x0[position, : int(self.x_sizes[position])]

    def reads_index(self) -> bool:
        """Return whether the upper loss reads the numbers of its samples."""
        return reads_index(self.problem, self.data, self.layout_x, self.layout_y, self._own_x(0), self.y0)

    def _initial_x(self) -> tuple[Layout, Tensor]:
        """Return x0 as a shared vector, or as private rows padded with zeros to equal length."""
        private = self.problem.scopes.upper == "private"
        trees = [
            self.problem.initial_x({role: int(sizes[i]) for role, sizes in self.data.sizes.items()})
            for i in range(self.data.num_clients if private else 1)
        ]
        for i, tree in enumerate(trees):
            if set(tree) != set(trees[0]):
                raise ProblemError(
                    f"client {i}: expected tensors named {', '.join(trees[0])}, got {', '.join(tree)}: x0 needs the "
                    "same names for all clients."
                )
        # a tensor whose shape depends on the client's size is ragged, also where all clients here are equal
        probe = (
            self.problem.initial_x({role: int(sizes[0]) + 1 for role, sizes in self.data.sizes.items()})
            if private
            else trees[0]
        )
        ragged = [
            name for name, leaf in trees[0].items() if any(tree[name].shape != leaf.shape for tree in (*trees, probe))
        ]
        if len(ragged) > 1 or any(tree[name].ndim != 1 for tree in trees for name in ragged):
            raise ProblemError(
                f"x0 differs in shape between clients in {', '.join(ragged)}: only one tensor may, and it must have "
                "one dimension."
            )
        layout = Layout(trees[0], ragged[0] if ragged else None)
        flat = [layout.ravel(tree).detach().to(device=self.device, dtype=self.dtype) for tree in trees]
        if not private:
            return layout, flat[0]
        self.x_sizes = torch.tensor([len(row) for row in flat])
        return layout, torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)

    def weights(self, positions: Tensor) -> Tensor:
        """Return the clients' weights in means.

        The weights are whole numbers, so that a weighted sum of float32 rows is exact in float64
        and does not depend on the order of clients.
        """
        return (
            self.data.sizes["train"][positions]
            if self.problem.client_weights == "by_samples"
            else torch.ones(len(positions), dtype=torch.int64)
        )

    def average(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean, from a float64 sum that is divided once."""
        return (total(rows, weights) / float(weights.sum())).to(rows.dtype)

    def unpad(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Join private rows of x of the clients at `positions` to one flat tensor without padding."""
        if self.x_sizes is None:
            return rows
        return torch.cat(
            [rows.new_zeros(0), *(row[:size] for row, size in zip(rows, self.x_sizes[positions].tolist(), strict=True))]
        )

    def pad(self, stored: Tensor, positions: Tensor) -> Tensor:
        if self.x_sizes is None:
            return stored
        rows = torch.zeros(len(positions), self.x0.shape[1], dtype=stored.dtype, device=stored.device)
        for row, values in zip(rows, stored.split(self.x_sizes[positions].tolist()), strict=True):
            row[: len(values)] = values
        return rows

    # ---- measurements -----------------------------------------------------------------------------------------------

    def measure(self, x: Points, y: Points, join: Callable[[Tensor], Tensor] = lambda own: own) -> dict[str, float]:
        """Return the losses and the problem's metrics over all data of all clients hosted here.

        join: function of an engine of several processes that turns a table with one row per client
            hosted here into the table of all clients.
        """
        names, table = self.looked_at(x, y)
        return figures(self.problem, names, join(table))

    def looked_at(self, x: Points, y: Points) -> tuple[list[str], Tensor]:
        """Return the names and the float64 table of a measurement, with one row per client here."""
        problem = self.problem
        with torch.no_grad():
            losses = [
                self._everyone(loss, x, y, role, is_mean=True)
                for loss, role in ((problem.upper, "val"), (problem.lower, "train"))
            ]
            found: dict[str, Tensor] = {}
            for role, statistics in problem.statistics.items():
                some = self._everyone(statistics, x, y, role, is_mean=False)
                twice = found.keys() & some.keys()
                if twice:
                    raise ProblemError(f"two roles have a statistic named {min(twice)!r}: give each its own name.")
                found.update(some)
        columns = [*losses, self.weights(self.data.positions).double(), *found.values()]
        return ["upper", "lower", "weight", *found], torch.stack(columns, dim=1)

    def _everyone(self, function: Callable[..., Any], x: Points, y: Points, role: str, *, is_mean: bool) -> Any:
        """Return `function` of every client on all its data, as float64 on the CPU.

        A few clients are evaluated at a time, so that there is never a copy of all data.

        is_mean: whether the function is a mean over samples; otherwise it holds sums.
        """
        parts = []
        for part in self._split(x, y, _LOOK // self._bytes_of_client(role, x, y)):
            ask = lambda batch, part=part: self.oracle.evaluate(function, part.x, part.y, batch)
            values = part.mean(role, ask) if is_mean else part.sums(role, ask, divides=self._divides(function, role))
            parts.append(tree_map(lambda leaf: leaf.double().cpu(), values))
        return tree_map(lambda *leaves: torch.cat(leaves), *parts)

    def _divides(self, function: Callable[..., Any], role: str) -> bool:
        """Return whether statistics may be added over minibatches."""
        has = self.data.positions[self.data.sizes[role] > 0]
        if self.limit is None or not len(has):
            return False
        batch = self.data.batch(has[:1], role, torch.zeros(1, 2, dtype=torch.int64, device=self.device))
        x, y = self.layout_x.unravel(self._own_x(int(has[0]))), self.layout_y.unravel(self.y0)
        return per_sample_statistics(function, x, y, with_features(self.problem, x, batch.row(0)))

    def _bytes_of_client(self, role: str, x: Points, y: Points) -> int:
        """Return the largest number of bytes that a measurement of one client copies."""
        sample = sum(value[:1].numel() * value.element_size() for value in self.data.fields[role].values())
        row = (
            sum(start.shape[-1] for start, value in ((self.x0, x), (self.y0, y)) if not isinstance(value, Tensor))
            * self.y0.element_size()
        )
        return max(1, int(self.data.sizes[role].max()) * sample + row)

    @property
    def watcher(self) -> Oracle:
        """Separate oracle for measurements, so that measuring does not perturb the run."""
        if self._watcher is None:
            self._watcher = self._another()
        return self._watcher

    def separate_oracle(self) -> Oracle:
        """Return an oracle for a few evaluations, which leaves no trace in the run's own oracles."""
        made = self._another()
        made.long = float("inf")
        return made

    def _another(self) -> Oracle:
        made = self._oracle("loop" if self.oracle.strategy == "loop" else "auto")
        made.plain_kernels = self.oracle.plain_kernels
        return made

    def portions(self, x: Points, y: Points) -> Iterator[Portion]:
        """Yield all clients at their own points, as many at a time as a measurement may copy."""
        most = (
            max(self._bytes_of_client(role, x, y) for role in ("train", "val"))
            + self.y0.shape[-1] * self.y0.element_size()
        )
        yield from self._split(x, y, _LOOK // most)

    def _split(self, x: Points, y: Points, num: int) -> Iterator[Portion]:
        """Yield portions of at most `num` clients, or of one client if samples are limited."""
        several = self.limit is None and not any(map(self.data.is_cut, self.data.fields))
        for some in self.data.positions.split(max(1, num) if several else 1):
            yield Portion(self.data, some, _rows(x, some), _rows(y, some), self.weights(some), self.limit)

    def sum_of_weights(self, added: Added) -> Tensor:
        [number] = added([self.weights(self.data.positions).double().sum()[None].to(self.device)])
        return number

    def residuals(self, x: Points, y: Points, u: Points | None, added: Added = lambda own: own) -> dict[str, float]:
        """Return the residuals of y and u over all data, with every client at its own point.

        The residuals are |mean g_y| and |mean (H u - f_y)| / |mean f_y|. For a local lower level
        they are root mean squares over clients.

        added: function of an engine of several processes that adds sums over the processes.
        """
        oracle, local = self.watcher, self.problem.scopes.lower == "local"
        sums: dict[str, Tensor] = {}
        for part in self.portions(x, y):
            with torch.no_grad():
                found = {"lower": part.mean("train", partial(oracle.lower_grad, part.x, part.y))}
                if u is not None:
                    right = part.mean("val", partial(oracle.upper_grad_y, part.x, part.y))
                    product = partial(oracle.hessian_product, part.x, part.y, _rows(u, part.positions))
                    found |= {"right": right, "system": part.mean("train", product) - right}
            for name, rows in found.items():
                sums[name] = sums.get(name, 0) + total(squares(rows) if local else rows, part.weights)
        number = self.sum_of_weights(added)
        sizes = {
            name: size(one, number, of_squares=local)
            for name, one in zip(sums, added(list(sums.values())), strict=True)
        }
        return {
            "lower_gradient": sizes["lower"],
            **({"residual": sizes["system"] / (sizes["right"] or 1.0)} if u is not None else {}),
        }

    def losses_away(self) -> list[float]:
        """Return both losses of the first client at a fixed point near the start.

        These losses distinguish two problems with the same shapes and data.
        """
        first = torch.tensor([0])
        x, y = away(self.x0 if self.x0.ndim == 1 else self.x0[:1]), away(self.y0)
        part = Portion(self.data, first, x, y, self.weights(first), self.limit)
        with torch.no_grad():
            both = ((self.problem.upper, "val"), (self.problem.lower, "train"))
            return [float(part.mean(role, partial(self.oracle.evaluate, loss, x, y))) for loss, role in both]

    def trees(self, value: Tensor, *, upper: bool) -> Any:
        """Return a dict of tensors, or one dict per client if `value` has rows, without padding."""
        layout = self.layout_x if upper else self.layout_y
        if value.ndim == 1:
            return layout.unravel(value)
        sizes = self.x_sizes.tolist() if upper and self.x_sizes is not None else [value.shape[1]] * len(value)
        return [layout.unravel(row[:size]) for row, size in zip(value, sizes, strict=True)]


def figures(
    problem: Problem, names: Sequence[str], table: Tensor, clients: Tensor | None = None, *, across: bool = True
) -> dict[str, float]:
    """Return losses and metrics from a table of `looked_at` with one row per client.

    clients: that table, if `table` holds one row with means of the losses and sums of the rest.
    across: include figures that compare single clients.
    """
    upper, lower, weights, *statistics = table.unbind(1)
    found = dict(zip(names[3:], statistics, strict=True))
    single = found if clients is None else dict(zip(names[3:], clients.unbind(1)[3:], strict=True))
    losses = {
        label: float((weights * values).sum() / weights.sum())
        for label, values in (("upper_loss", upper), ("lower_loss", lower))
    }
    metrics = own_figures("metrics", problem.metrics, {name: float(value.sum()) for name, value in found.items()})
    return {
        **losses,
        **metrics,
        **(own_figures("across", problem.across, single) if problem.across is not None and across else {}),
    }


def _rows(value: Points, positions: Tensor) -> Tensor:
    """Return a vector unchanged, or a view of the rows of consecutive clients."""
    if not isinstance(value, Tensor):
        return value(positions)
    return value if value.ndim == 1 else value.narrow(0, int(positions[0]), len(positions))
