"""Evaluation of one derivative for k clients: in one pass, one by one, or as one mean.

There are three ways of evaluation, with the same numbers up to rounding:

    vmap     all clients in one pass, or as many at a time as the memory budget allows
    loop     one client after the other: less memory, and faster if a single client keeps the
             machine busy (convolutions on a CPU); gradients use fused attention and checkpoints
    pooled   one derivative of the clients' weighted mean loss, if only the mean at a shared
             point is needed; of losses whose values need no other samples, all samples are one
             batch, so kernels are as large and as few as for one client

`auto` takes vmap, or pooled if possible. If a call is long, `auto` measures the other ways once per
derivative and shapes, on a CPU by processor time, which hardly depends on the load of the machine.
The choice is kept in `choices` and in the checkpoint, so that a resumed run on the same number of
processes uses the same way. A derivative that is needed often is traced (`tracing`), which changes
no number. `compiled` is `auto` with traces compiled by torch.compile: it halves the time of small
derivatives, but needs a compiler, takes some seconds at the start of a run, and rounds differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.oracle import derivatives
from fedbilevel.oracle.alive import Alive
from fedbilevel.oracle.derivatives import Build, FlatLoss
from fedbilevel.oracle.plain_kernels import plain
from fedbilevel.oracle.precision import Precision, lowered, scaled
from fedbilevel.oracle.replay import Replayed
from fedbilevel.oracle.tracing import compiled, traced
from fedbilevel.problem.client_data import Batch
from fedbilevel.problem.contraction import contracted, mean, weighted
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Fields, Loss, Problem, with_features

BUDGET = 2**31  # bytes of points, samples and intermediate values evaluated at once on a CPU
_OFTEN_ENOUGH = 16  # calls before a trace is compiled: rare shapes are not worth compiling
_SHAPES = 4  # shapes of one derivative that are measured; later ones take the last choice
_LONG = 0.02  # processor seconds of a call from which other ways of evaluating are measured
_OFTEN = {"cpu": 64, "cuda": 2}  # calls before tracing pays; captured calls on a GPU should be short from the start
_IN_FULL = ("gx",)  # derivatives of which algorithms multiply differences, see `precision`
_SECOND = ("jv", "hv", "directions")  # first words of derivatives with second derivatives of the lower loss
_SHARES = "shares of the clients"  # a field of a pooled evaluation; no field of a user has this name


class Evaluation:
    """The two losses on flat vectors, and the choices that all derivatives share."""

    def __init__(
        self,
        problem: Problem,
        layout_x: Layout,
        layout_y: Layout,
        *,
        per_sample: Collection[str],
        independent: Collection[str],
        strategy: str,
        chunk_size: int | None,
        compiles: bool,
        precision: Precision,
    ) -> None:
        """Prepare the evaluation of the derivatives of a problem.

        per_sample: losses (`upper`, `lower`) that return one value per sample, as `check_losses`
            found.
        independent: those of them whose values do not depend on the other samples of a batch.
        """
        self.problem, self.layout_x, self.layout_y = problem, layout_x, layout_y
        self.per_sample, self.independent = per_sample, independent
        self.strategy, self.chunk_size, self.compiles = strategy, chunk_size, compiles
        self.precision: Precision = precision  # of derivatives; values are in full
        if compiles:
            _try_compiler()
        self.choices: dict[str, str] = {}  # ways that were measured to be fastest, by derivative and shapes
        self.long, self.often = _LONG, dict.fromkeys(_OFTEN, 2) if compiles else dict(_OFTEN)
        self.frozen = self.compiles_now = False
        self.tick: Callable[[], None] | None = None  # called before every evaluation; it may raise
        self.plain_kernels: frozenset[str] = frozenset()  # layers whose fast kernel has no second derivative
        self.plain_in_full = False  # whether plain kernels are in full precision
        self.counts = True  # whether intermediate values are counted, so that they fit into memory
        self.strict = False  # whether only torch.func is used, which notices operations outside of torch

    def compile_from_now(self, device: torch.device) -> None:
        """Compile traces as the strategy `compiled` does, if there is a compiler for the device."""
        if not self.compiles:
            try:
                _try_compiler(device)
            except SettingError:
                return
            self.compiles, self.often = True, dict.fromkeys(_OFTEN, 2)

    def flat(self, loss: Loss, *, padded: bool = True, fast: bool = False, low: bool = False) -> FlatLoss:
        """Return a loss as a function of flat vectors.

        padded: whether batches may hold padding, which costs a mask.
        fast: whether to use fast kernels that have no second derivative.
        low: whether to evaluate the loss in low precision; the sum over samples is in full.
        """
        contract, values = self._contraction(loss, padded=padded), self._values(loss, low=low)

        def flat(x: Tensor, y: Tensor, fields: Fields) -> Tensor:
            value = values(x, y, fields)
            return value if contract is None else contract(value, fields["weight"])

        return plain(flat, () if fast else self.plain_kernels, low=low)

    def _values(self, loss: Loss, *, low: bool) -> FlatLoss:
        """Return a loss as a function of flat vectors, before its values per sample become one."""

        def valued(x: Tensor, y: Tensor, fields: Fields) -> Any:
            tree = self.layout_x.unravel(x)
            return loss(tree, self.layout_y.unravel(y), with_features(self.problem, tree, fields))

        return lowered(valued, self.precision) if low else valued

    def _labels(self, function: Callable[..., Any], labels: Collection[str]) -> list[bool]:
        """Return by loss that is this function whether it is among `labels`."""
        return [label in labels for label in ("upper", "lower") if function is getattr(self.problem, label)]

    def _contraction(self, function: Callable[..., Any], *, padded: bool) -> Callable[[Any, Tensor], Any] | None:
        """Return a function that reduces values per sample to one value.

        The form of the two losses is known; the form of other functions is read from their results.
        """
        forms = self._labels(function, self.per_sample)
        if not forms:
            return contracted
        if not forms[0]:
            return None
        return weighted if padded else mean

    def pooled(self, loss: Loss, *, padded: bool, low: bool, fast: bool = False) -> FlatLoss:
        """Return the weighted mean loss over clients.

        It multiplies with a shared matrix once for all clients.

        fast: as in `flat`, for an independent loss.
        """
        if all(self._labels(loss, self.independent)):
            return self._joined(loss, padded=padded, low=low, fast=fast)
        each = vmap(self.flat(loss, padded=padded, low=low), in_dims=(None, None, 0))

        def pooled(x: Tensor, y: Tensor, fields: Fields) -> Tensor:
            rest = {name: value for name, value in fields.items() if name != _SHARES}
            return (fields[_SHARES] * each(x, y, rest)).sum()

        return pooled

    def _joined(self, loss: Loss, *, padded: bool, low: bool, fast: bool) -> FlatLoss:
        """Return the weighted mean loss over clients from one batch of all their samples."""
        values = self._values(loss, low=low)

        def joined(x: Tensor, y: Tensor, fields: Fields) -> Tensor:
            weight = fields["weight"]  # (k, b), and no other field is per client
            rest = {name: value.flatten(0, 1) for name, value in fields.items() if name != _SHARES}
            found = values(x, y, rest).view_as(weight)
            found = torch.where(weight > 0, found, 0.0) if padded else found
            return ((weight * found).sum(1) * fields[_SHARES]).sum()

        return plain(joined, () if fast else self.plain_kernels, low=low)


class Plan:
    """One derivative at given shapes: the way its clients are evaluated, and its trace."""

    def __init__(
        self,
        evaluation: Evaluation,
        key: tuple[Any, ...],
        build: Build,
        alone: Build | None,
        way: str,
        chunk: int | None,
        *,
        is_derivative: bool,
        padded: bool,
        pooled: bool,
    ) -> None:
        losses = (evaluation.problem.upper, evaluation.problem.lower)
        self.evaluation, self.chunk, self.pooled, self.calls = evaluation, chunk, pooled, 0
        fast_low = evaluation.precision != "full" and is_derivative and key[0] not in _IN_FULL
        low = fast_low and not (evaluation.plain_in_full and evaluation.plain_kernels)
        below = low and not (evaluation.precision == "fp16" and key[0].split()[0] in _SECOND)
        form: Callable[[Build], Build] = lambda one: scaled(one, evaluation.precision) if fast_low else one
        lows = tuple(zip(losses, (low, below), strict=True))
        self.each = form(build)(*(evaluation.flat(loss, padded=padded, low=one) for loss, one in lows))
        self.alone = self.each  # for one client at a time
        second = alone in derivatives.ALONE_SECOND  # needs kernels with second derivatives of the lower loss
        if alone is not None and not (second and evaluation.strict):
            upper = evaluation.flat(losses[0], padded=padded, low=fast_low, fast=True)
            lower = evaluation.flat(losses[1], padded=padded, low=below if second else fast_low, fast=not second)
            self.alone = form(alone)(upper, lower)
        # all samples in one batch are like one client
        single = self.alone is not self.each and not second and len(evaluation.independent) == len(losses)
        shared = (evaluation.pooled(loss, padded=padded, low=one, fast=single) for loss, one in lows)
        self.mean = form(alone if single and alone is not None else build)(*shared)
        self.name, self.label = key[0], repr(key)
        self.way = evaluation.choices.get(self.label, way) if evaluation.strategy == "auto" else way
        self.is_derivative = is_derivative  # functions of measurements are not worth compiling
        self.settled = evaluation.strategy != "auto" or self.label in evaluation.choices
        self.trace: _Trace | None = None
        self.untraceable = ""  # the reason

    def __call__(self, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None) -> Any:
        self.calls += 1
        if not self.settled:
            return self._settle(vectors, batches, shares)
        if self.way == "loop" and any(batch.data.elsewhere and batch.size is None for batch in batches):
            raise RuntimeError(
                "clients of unequal sizes are evaluated one by one, and a replay would use the sizes of the capture"
            )
        if (
            self.trace is None
            and self.calls >= self.evaluation.often.get(vectors[0].device.type, 64)
            and self._is_worth_tracing()
        ):
            try:
                self.trace = _Trace(lambda *given: self._evaluate(self.way, *given), vectors, batches, shares)
            except RuntimeError as error:  # the loss branches on values, which a trace does not have
                self.untraceable = str(error).split("\n", 1)[0]
        if self.trace is None:
            return self._evaluate(self.way, vectors, [dict(batch.fields) for batch in batches], shares, batches)
        if not self.trace.compiled and (
            self.evaluation.compiles_now
            or (self.calls >= _OFTEN_ENOUGH and self.evaluation.compiles and self.is_derivative)
        ):
            self.trace.compile()
        result = self.trace(vectors, batches, shares, replays=not self.evaluation.frozen)
        if self.calls.bit_count() == 1 and not self.evaluation.frozen:  # at calls 128, 256, 512, ...
            self._compare(
                result, self._evaluate(self.way, vectors, [dict(batch.fields) for batch in batches], shares, batches)
            )
        return result

    def bytes_of_one(self, vectors: Sequence[Tensor], batches: Sequence[Batch]) -> int:
        """Return the bytes of results that exist at once while one client is evaluated as in vmap."""
        points = [v if v.ndim == 1 else v[:1] for v in vectors]
        fields = [{name: value[:1] for name, value in batch.fields.items()} for batch in batches]
        with Alive() as alive:
            self._evaluate("vmap", points, fields, None)
        return alive.peak

    def _compare(self, traced: Any, fresh: Any) -> None:
        for one, other in zip(tree_flatten(traced)[0], tree_flatten(fresh)[0], strict=True):
            scale = float(other.detach().abs().max()) if other.numel() else 0.0
            if math.isfinite(scale) and not torch.allclose(one, other, rtol=1e-2, atol=1e-3 * scale, equal_nan=True):
                raise ProblemError(
                    f"{self.name} was other than before at the same point: a loss may read nothing that changes "
                    "during a run but its arguments; give it as data or as part of x or y, or use strategy='loop'."
                )

    def _is_worth_tracing(self) -> bool:
        """Return whether to trace this derivative.

        Single clients, whose losses may branch on values, are not traced.
        """
        simple = self.way != "loop" and self.chunk is None and not self.untraceable
        return simple and not self.evaluation.frozen

    def _settle(self, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None) -> Any:
        """Evaluate for the first time, and measure other ways if a call is long.

        The first call of a process is always long, so only the second call counts.
        """
        choices, long = self.evaluation.choices, self.evaluation.long
        self.settled, usual, device = True, self.way, vectors[0].device
        fields = [dict(batch.fields) for batch in batches]
        evaluate = lambda way: self._evaluate(way, vectors, fields, shares, batches)
        result, seconds = _timed(evaluate, usual, device)
        if seconds < long or len(batches[0]) == 1 or _timed(evaluate, usual, device)[1] < long:
            return result
        start = repr((self.name, usual == "pooled"))[:-1]
        known = [way for label, way in choices.items() if label.startswith(start)]
        if len(known) >= _SHAPES:  # every cohort of unequal clients has its own shapes
            self.way = choices[self.label] = known[-1]
            return result
        seconds = min(_timed(evaluate, usual, device)[1] for _ in range(2))
        for other in ("loop", "vmap"):
            if other != usual:
                evaluate(other)
                again = min(_timed(evaluate, other, device)[1] for _ in range(2))
                if again < 0.8 * seconds:  # a small gain is not worth another rounding
                    self.way, seconds = other, again
        choices[self.label] = self.way
        return result

    def _evaluate(
        self,
        way: str,
        vectors: Sequence[Tensor],
        fields: Sequence[dict[str, Tensor]],
        shares: Tensor | None,
        batches: Sequence[Batch] = (),
    ) -> Any:
        if way == "loop":
            rows = (
                self.alone(*(v if v.ndim == 1 else v[i] for v in vectors), *(batch.row(i) for batch in batches))
                for i in range(len(batches[0]))
            )
            one = lambda row: tree_map(lambda leaf: leaf[None], row)
            return _collected(map(one, rows), len(batches[0]))
        if way == "pooled":
            assert shares is not None
            return tree_map(
                lambda mean: mean.expand(len(shares), *mean.shape),
                self.mean(*vectors, *({**some, _SHARES: shares} for some in fields)),
            )
        in_dims = (*(None if v.ndim == 1 else 0 for v in vectors), *(0 for _ in fields))
        together, num = vmap(self.each, in_dims=in_dims), len(next(iter(fields[0].values())))
        chunk = num if self.chunk is None else self.chunk
        if chunk >= num:
            return together(*vectors, *fields)

        def some(start: int) -> Any:
            part = slice(start, start + chunk)
            points = (v if v.ndim == 1 else v[part] for v in vectors)
            return together(*points, *({name: value[part] for name, value in one.items()} for one in fields))

        return _collected(map(some, range(0, num, chunk)), num)


def _collected(parts: Iterator[Any], num: int) -> Any:
    """Return `num` rows of results that come in parts; every part is dropped before the next one is made."""
    leaves, spec = tree_flatten(next(parts))
    if all(len(leaf) == num for leaf in leaves):
        return tree_unflatten(leaves, spec)
    whole, start = [leaf.new_empty((num, *leaf.shape[1:])) for leaf in leaves], 0
    while leaves:
        stop = start + len(leaves[0])
        for rows in whole:
            leaf = leaves.pop(0)
            if leaf.shape[1:] != rows.shape[1:]:
                raise RuntimeError(
                    f"clients have results of shapes {tuple(rows.shape[1:])} and {tuple(leaf.shape[1:])}"
                )
            rows[start:stop] = leaf
            del leaf
        start = stop
        leaves = spec.flatten_up_to(next(parts)) if start < num else []
    return tree_unflatten(whole, spec)


class _Trace:
    """A derivative as a list of operations, with the fields that the operations read."""

    def __init__(
        self, evaluate: Callable[..., Any], vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None
    ) -> None:
        names = [list(batch.fields) for batch in batches]
        form: list[Any] = []

        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            rest = iter(leaves)
            points = [next(rest) for _ in vectors]
            share = None if shares is None else next(rest)
            results, spec = tree_flatten(
                evaluate(points, [{name: next(rest) for name in some} for some in names], share)
            )
            form[:] = [spec]
            return tuple(results)

        self.takes = [(place, name) for place, some in enumerate(names) for name in some]
        own = () if shares is None else (shares,)
        fields = (batches[place].fields[name] for place, name in self.takes)
        self.run, used = traced(flat, [*vectors, *own, *fields])
        self.form, self.compiled = form[0], False
        self.reads = [take for take, is_used in zip(self.takes, used[-len(self.takes) :], strict=True) if is_used]
        self.absent = [place for place, is_used in enumerate(used[-len(self.takes) :]) if not is_used]
        self.replayed = Replayed(self.run, len(vectors)) if vectors[0].device.type == "cpu" else None

    def compile(self) -> None:
        self.run, self.compiled, self.replayed = compiled(self.run), True, None

    def __call__(
        self, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None, *, replays: bool
    ) -> Any:
        inputs: list[Any] = [batches[place].fields[name] for place, name in self.reads]
        for place in self.absent:
            inputs.insert(place, None)
        inputs[:0] = vectors if shares is None else (*vectors, shares)
        results = self.replayed(inputs) if replays and self.replayed is not None else None
        return tree_unflatten(list(self.run(*inputs)) if results is None else results, self.form)


def _try_compiler(device: torch.device | str = "cpu") -> None:
    """Raise before a run, not during the run, if there is no compiler."""
    try:
        compiled(lambda one: (one + 1,))(torch.zeros(2, device=device))
    except Exception as error:  # a compiler may fail in any way; name it, keep the cause
        reason = str(error).split("\n", 1)[0]
        raise SettingError(
            f"strategy 'compiled' needs a compiler that works ({type(error).__name__}: {reason}): use strategy='auto'."
        ) from error


def _timed(evaluate: Callable[[str], Any], way: str, device: torch.device) -> tuple[Any, float]:
    """Return a result and its seconds: processor time, or on a GPU the time until it is there."""
    if device.type != "cuda":
        start = time.process_time()
        return evaluate(way), time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = evaluate(way)
    torch.cuda.synchronize()
    return result, time.perf_counter() - start
