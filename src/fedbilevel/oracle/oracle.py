"""Derivatives of k clients at once, on flat rows.

x, y and v are `(d,)` where all clients share a point and `(k, d)` where each has its own; every result has one row per client.
How the k clients are evaluated is decided here and nowhere else. H v and J v come from one vector-Jacobian product of the lower gradient: with
G = grad_y g, the pullback of v is (d<G,v>/dx, d<G,v>/dy) = (J v, H v).

Ways of evaluating, all with the same numbers up to rounding:

    vmap     all clients in one pass, or as many at a time as the memory budget allows
    loop     one client after the other: less memory, and faster where a client keeps the machine busy by itself (convolutions on a CPU)
    pooled   one derivative of the clients' weighted mean loss, where only the mean at a shared point is asked for

`auto` takes vmap, or pooled where it may, and measures the others once per derivative and shapes where a call is long enough to be worth it; what it
chose is kept in `choices`, and with the checkpoint, so that a resumed run on as many processes goes on as it began. A derivative that is asked for
again and again is traced (`tracing`), which changes no number. `compiled` is `auto` whose traces are compiled by torch.compile: half the time of
small derivatives, for some seconds at the start of a run, a compiler, and another rounding.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.oracle.compiler import postpone
from fedbilevel.oracle.tracing import compiled, traced
from fedbilevel.problem.client_data import Batch
from fedbilevel.problem.contraction import contracted, mean, weighted
from fedbilevel.problem.problem import Fields, Layout, Loss, Problem, with_features

postpone()

Strategy = Literal["auto", "vmap", "loop", "compiled"]
FlatLoss = Callable[[Tensor, Tensor, Fields], Tensor]
Build = Callable[
    [FlatLoss, FlatLoss], Callable[..., Any]
]  # the two losses -> a derivative, a function of vectors and then of fields
BUDGET = (
    2**31
)  # bytes of points, samples and intermediate values evaluated at once under "auto"; on a GPU an eighth of its memory
_KEPT = (
    2**24
)  # bytes of samples whose way through the features is kept for going back: what lies on that way may be many times larger
_OFTEN_ENOUGH = 16  # calls after which it is compiled under "compiled": shapes that hardly ever come are not worth it
_SHAPES = 4  # of one derivative that are measured; later ones are evaluated like the last of them
_LONG = 0.02  # seconds of a call from which other ways of evaluating are measured
_OFTEN = {
    "cpu": 64,
    "cuda": 2,
}  # calls after which a derivative is traced: as long as tracing takes; on a GPU calls are captured, and should be short


def one_row(value: Tensor) -> Tensor:
    """The vector behind rows that are views of it; what is no such rows, as it is."""
    return value[0] if value.ndim == 2 and len(value) > 0 and value.stride(0) == 0 else value


class Oracle:
    def __init__(
        self,
        problem: Problem,
        layout_x: Layout,
        layout_y: Layout,
        *,
        per_sample: Collection[str] = (),
        strategy: Strategy = "auto",
        chunk_size: int | None = None,
    ) -> None:
        """per_sample: which of the losses `upper` and `lower` return one value per sample, as `check_losses` found."""
        if strategy not in get_args(Strategy):
            raise SettingError(
                f"strategy is {strategy!r}, expected {', '.join(map(repr, get_args(Strategy)[:-1]))} or {get_args(Strategy)[-1]!r}."
            )
        if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
            raise SettingError(f"chunk_size is {chunk_size!r}, expected at least 1 client, or None for all at once.")
        self.problem, self.layout_x, self.layout_y = problem, layout_x, layout_y
        self.per_sample = per_sample
        self.compiles = strategy == "compiled"  # which is auto in everything else
        if self.compiles:
            _try_compiler()
        self.strategy, self.chunk_size = "auto" if self.compiles else strategy, chunk_size
        self.choices: dict[str, str] = {}  # what measuring chose, by derivative and shapes
        self.long, self.often = _LONG, dict.fromkeys(_OFTEN, 2) if self.compiles else dict(_OFTEN)
        self._plans: dict[Any, _Plan] = {}
        self._features = _FeatureCache(self)
        self._frozen = self._compiles_now = False

    # ---- what an algorithm may ask for; `shares`: only the mean weighted by them is wanted, so rows may all be that mean -------------------

    def lower_grad(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        """grad_y g_i."""
        return self._map("gy", _lower_grad, (x, y), (self._features.attach(x, batch),), shares)

    def lower_grad_x(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        """grad_x g_i, which only first-order methods need."""
        return self._map("gx", _lower_grad_x, (x, y), (batch,), shares)

    def upper_grad_x(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        known = self._features.pulled(x, batch) if self._pools(len(batch), (x, y), shares) else None
        if known is None:
            return self._map("fx", _upper_grad_x, (x, y), (batch,), shares)
        return known.join(self._map("fx by features", _upper_by_features, (x, y), (known.batch,), shares), shares)

    def upper_grad_y(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        return self._map("fy", _upper_grad_y, (x, y), (self._features.attach(x, batch),), shares)

    def upper_grads(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """grad_x f_i and grad_y f_i."""
        return self._map("fx fy", _upper_grads, (x, y), (batch,), shares)

    def second_order(
        self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """J_i v and H_i v."""
        return self._map("jv hv", _pull_both, (x, y, v), (batch,), shares)

    def jacobian_product(
        self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: Tensor | None = None
    ) -> Tensor:
        """J_i v = d/dx <grad_y g_i, v>."""
        known = self._features.pulled(x, batch) if self._pools(len(batch), (x, y, v), shares) else None
        if known is None:
            return self._map("jv", _pull_x, (x, y, v), (batch,), shares)
        return known.join(self._map("jv by features", _pull_by_features, (x, y, v), (known.batch,), shares), shares)

    def hessian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        """H_i v = d/dy <grad_y g_i, v>."""
        return self._map("hv", _pull_y, (x, y, v), (self._features.attach(x, batch),), shares)

    def directions(
        self, x: Tensor, y: Tensor, u: Tensor, *, gy: Batch, fx: Batch, fy: Batch, ju: Batch, hu: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(f_x - J u, g_y, H u - f_y) in one pass; a batch that stands for several derivatives is evaluated once for all of them."""
        alike = (fx is fy, ju is hu, gy is ju)
        return self._map(f"directions {alike}", _all_three(*alike), (x, y, u), (gy, fx, fy, ju, hu))

    def evaluate(self, function: Callable[[Any, Any, Fields], Any], x: Tensor, y: Tensor, batch: Batch) -> Any:
        """`function(x, y, batch)` on the user's structure, per client: losses and statistics, no derivative."""
        flat = self._flat(function)
        return self._map(function, lambda _upper, _lower: flat, (x, y), (batch,))

    @contextmanager
    def alone(self, buys: Collection[str], *, frozen: bool) -> Iterator[Mapping[str, int]]:
        """Within, features are computed anew: of the roles in `buys` at once for all samples. Gives the samples asked for, by role. `frozen`: nothing may be
        measured, traced or kept, because what is computed exists only when a captured phase is replayed."""
        before = self._features, self._frozen, self._compiles_now
        self._features, self._frozen, self._compiles_now = (
            _FeatureCache(self, buys, keeps_backs=False),
            frozen,
            self.compiles and not frozen,
        )
        try:
            yield self._features.asked
        finally:
            self._features, self._frozen, self._compiles_now = before

    # ---- one client, or all clients' mean ----------------------------------------------------------------------------

    def _flat(self, loss: Loss, *, padded: bool = True) -> FlatLoss:
        """padded: whether batches may hold padding, which costs a mask."""
        contract = self._contraction(loss, padded=padded)

        def flat(x: Tensor, y: Tensor, fields: Fields) -> Tensor:
            tree = self.layout_x.unravel(x)
            value = loss(tree, self.layout_y.unravel(y), with_features(self.problem, tree, fields))
            return value if contract is None else contract(value, fields["weight"])

        return flat

    def _contraction(self, function: Callable[..., Any], *, padded: bool) -> Callable[[Any, Tensor], Any] | None:
        """How values per sample become one: the form of the two losses is known, that of other functions shows in what they return."""
        forms = [label in self.per_sample for label in ("upper", "lower") if function is getattr(self.problem, label)]
        if not forms:
            return contracted
        if not forms[0]:
            return None
        return weighted if padded else mean

    def _pooled(self, loss: Loss, *, padded: bool) -> FlatLoss:
        """The weighted mean over clients: one product with a shared matrix for all of them, forwards and backwards."""
        each = vmap(self._flat(loss, padded=padded), in_dims=(None, None, 0))

        def pooled(x: Tensor, y: Tensor, fields: Fields) -> Tensor:
            rest = {name: value for name, value in fields.items() if name != _SHARES}
            return (fields[_SHARES] * each(x, y, rest)).sum()

        return pooled

    # ---- k clients -----------------------------------------------------------------------------------------------

    def _map(
        self, kind: Any, build: Build, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None = None
    ) -> Any:
        k = len(batches[0])
        for v in vectors:
            if v.ndim == 2 and len(v) != k:
                raise ValueError(f"{len(v)} rows for {k} clients.")
        vectors = [one_row(v) for v in vectors]  # a matrix product per cohort, not per client
        if k == 0:
            return self._nothing(build, vectors, batches)
        chunk = self._chunk(k, vectors, batches)
        pooled = self._pools(k, vectors, shares) and chunk is None
        shares = shares if pooled else None  # nothing else reads them
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
        key = (
            name if isinstance(kind, str) else id(kind),
            pooled,
            vectors[0].device.type,
            *(tuple(v.shape) for v in vectors),
            *((b.role, tuple(b.fields["index"].shape), b.size, "features" in b.fields) for b in batches),
        )
        plan = self._plans.get(key)
        if self._frozen and (plan is None or not plan.settled):
            raise RuntimeError(f"{kind} has not been evaluated at these shapes before")
        if plan is None:
            way, padded = "pooled" if pooled else self._usual(k), any(batch.size is None for batch in batches)
            plan = _Plan(self, (name, *key[1:]), build, way, chunk, is_derivative=isinstance(kind, str), padded=padded)
            if isinstance(kind, str) or any(
                kind is known for known in (self.problem.upper, self.problem.lower, *self.problem.statistics.values())
            ):
                self._plans[key] = plan  # of other functions the address may come again for another one
        return plan(vectors, batches, shares)

    def _pools(self, k: int, vectors: Sequence[Tensor], shares: Tensor | None) -> bool:
        """Whether one derivative of the mean may stand for those of all clients: they are at one point, and only the mean is wanted."""
        alike = all(one_row(v).ndim == 1 for v in vectors)
        return shares is not None and k > 1 and self.strategy == "auto" and self.chunk_size is None and alike

    def _usual(self, k: int) -> str:
        return "loop" if self.strategy == "loop" or (self.strategy == "auto" and k == 1) else "vmap"

    def _chunk(self, k: int, vectors: Sequence[Tensor], batches: Sequence[Batch]) -> int | None:
        """As many clients at once as keep points, samples and a few intermediate copies of them within the budget."""
        if self.chunk_size is not None or self.strategy == "vmap":
            return self.chunk_size
        points = sum(v.shape[-1] * v.element_size() for v in vectors)
        samples = sum(batch.fields.sample_bytes() * batch.fields["index"].shape[1] for batch in batches)
        device = vectors[0].device
        budget = BUDGET if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory // 8
        fits = max(1, budget // (8 * (points + samples)))
        return None if fits >= k else fits

    def settle(self, batch: Batch, x: Tensor, y: Tensor) -> None:
        """Try vmap once on a few samples: a loss that branches on values or calls .item() cannot be batched."""
        if self.strategy == "loop" or len(batch) < 2:
            return
        try:
            xs, ys = x.expand(len(batch), -1), y.expand(len(batch), -1)  # points of their own, as after local steps
            vmap(_pull_both(self._flat(self.problem.upper), self._flat(self.problem.lower)))(
                xs, ys, ys, dict(batch.fields)
            )
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0].split(". ", 1)[0].rstrip(".")
            if self.strategy == "vmap":
                raise ProblemError(
                    f"the lower loss cannot be evaluated for several clients at once ({reason}): use strategy='loop'."
                ) from error
            self.strategy = "loop"
            text = f"the lower loss cannot be evaluated for several clients at once ({reason}), so clients are evaluated one by one, which is slower"
            warnings.warn(text, stacklevel=2)

    def _nothing(self, build: Build, vectors: Sequence[Tensor], batches: Sequence[Batch]) -> Any:
        """A process none of whose clients is in the cohort: the shapes of one client, zero rows."""
        one = [v if v.ndim == 1 else v.new_zeros(v.shape[1]) for v in vectors]
        first = [batch.data.look(batch.data.positions[:1], batch.role).row(0) for batch in batches]
        function = build(self._flat(self.problem.upper), self._flat(self.problem.lower))
        return tree_map(lambda leaf: leaf.new_zeros((0, *leaf.shape)), function(*one, *first))


# ---- derivatives of two losses on flat vectors ----------------------------------------------------------------------


def _lower_grad(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return grad(lower, argnums=1)


def _lower_grad_x(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return grad(lower, argnums=0)


def _upper_grad_x(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    return grad(upper, argnums=0)


def _upper_grad_y(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    return grad(upper, argnums=1)


def _upper_grads(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    return grad(upper, argnums=(0, 1))


def _product(gradient: Callable[..., Tensor], v: Tensor, *points: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The derivatives of gradient(*points) . v by the points, and gradient(*points). `vjp` does the same, and imports sympy to compare two shapes."""

    def dotted(*at: Tensor) -> tuple[Tensor, Tensor]:
        value = gradient(*at)
        return torch.dot(value, v), value

    derivatives, value = grad(dotted, argnums=tuple(range(len(points))), has_aux=True)(*points)
    return derivatives, value


def _pull_both(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    def pull_both(x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> tuple[Tensor, Tensor]:
        (jv, hv), _ = _product(lambda x, y: grad(lower, argnums=1)(x, y, fields), v, x, y)
        return jv, hv

    return pull_both


def _pull_x(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return lambda x, y, v, fields: _product(lambda x: grad(lower, argnums=1)(x, y, fields), v, x)[0][0]


def _pull_y(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return lambda x, y, v, fields: _product(lambda y: grad(lower, argnums=1)(x, y, fields), v, y)[0][0]


def _upper_by_features(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    """By x beside its features, and by these."""
    return lambda x, y, fields: grad(lambda x, features: upper(x, y, {**fields, "features": features}), argnums=(0, 1))(
        x, fields["features"]
    )


def _pull_by_features(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    def pull(x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> tuple[Tensor, Tensor]:
        gradient = lambda x, features: grad(lower, argnums=1)(x, y, {**fields, "features": features})
        (direct, through), _ = _product(gradient, v, x, fields["features"])
        return direct, through

    return pull


def _all_three(one_upper: bool, one_second: bool, one_lower: bool) -> Build:
    def build(upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
        def all_three(x: Tensor, y: Tensor, u: Tensor, *fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
            b_gy, b_fx, b_fy, b_ju, b_hu = fields
            if one_upper:
                d_fx, d_fy = grad(upper, argnums=(0, 1))(x, y, b_fx)
            else:
                d_fx, d_fy = grad(upper, argnums=0)(x, y, b_fx), grad(upper, argnums=1)(x, y, b_fy)
            if one_second:
                (d_ju, d_hu), value = _product(lambda x, y: grad(lower, argnums=1)(x, y, b_ju), u, x, y)
            else:
                value, d_ju, d_hu = None, _pull_x(upper, lower)(x, y, u, b_ju), _pull_y(upper, lower)(x, y, u, b_hu)
            d_gy = value if one_lower and value is not None else grad(lower, argnums=1)(x, y, b_gy)
            return d_fx - d_ju, d_gy, d_hu - d_fy

        return all_three

    return build


# ---- how one derivative is evaluated ----------------------------------------------------------------------------------

_SHARES = "shares of the clients"  # travels with the fields of a pooled evaluation; no field of a user is called that


class _Plan:
    """One derivative at given shapes: how the clients are evaluated, and its trace."""

    def __init__(
        self,
        oracle: Oracle,
        key: tuple[Any, ...],
        build: Build,
        way: str,
        chunk: int | None,
        *,
        is_derivative: bool,
        padded: bool,
    ) -> None:
        problem = oracle.problem
        self.oracle, self.chunk, self.calls = oracle, chunk, 0
        self.each = build(*(oracle._flat(loss, padded=padded) for loss in (problem.upper, problem.lower)))
        self.mean = build(*(oracle._pooled(loss, padded=padded) for loss in (problem.upper, problem.lower)))
        self.name, self.label = key[0], repr(key)
        self.way = oracle.choices.get(self.label, way) if oracle.strategy == "auto" else way
        self.is_derivative = is_derivative  # what only measurements ask for is not worth compiling
        self.settled = oracle.strategy != "auto" or self.label in oracle.choices
        self.trace: _Trace | None = None
        self.untraceable = ""  # why

    def __call__(self, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None) -> Any:
        self.calls += 1
        if not self.settled:
            return self._settle(vectors, batches, shares)
        if self.way == "loop" and any(batch.data.elsewhere and batch.size is None for batch in batches):
            raise RuntimeError(
                "clients of unequal sizes are evaluated one by one, and a replay would cut them all as when it was captured"
            )
        if (
            self.trace is None
            and self.calls >= self.oracle.often.get(vectors[0].device.type, 64)
            and self._is_worth_tracing()
        ):
            try:
                self.trace = _Trace(lambda *given: self._evaluate(self.way, *given), vectors, batches, shares)
            except RuntimeError as error:  # it looks at values, which a trace does not have
                self.untraceable = str(error).split("\n", 1)[0]
        if self.trace is None:
            return self._evaluate(self.way, vectors, [dict(batch.fields) for batch in batches], shares, batches)
        if not self.trace.compiled and (
            self.oracle._compiles_now or (self.calls >= _OFTEN_ENOUGH and self.oracle.compiles and self.is_derivative)
        ):
            self.trace.compile()
        result = self.trace(vectors, batches, shares)
        if self.calls.bit_count() == 1 and not self.oracle._frozen:  # ever more rarely: at calls 128, 256, 512, ...
            self._compare(
                result, self._evaluate(self.way, vectors, [dict(batch.fields) for batch in batches], shares, batches)
            )
        return result

    def _compare(self, traced: Any, fresh: Any) -> None:
        for one, other in zip(tree_flatten(traced)[0], tree_flatten(fresh)[0], strict=True):
            scale = float(other.detach().abs().max()) if other.numel() else 0.0
            if not torch.allclose(one, other, rtol=1e-2, atol=1e-3 * scale, equal_nan=True):
                raise ProblemError(
                    f"{self.name} was other than before at the same point: a loss may read nothing that changes during a run but its arguments; "
                    "give it as data or as part of x or y, or use strategy='loop'."
                )

    def _is_worth_tracing(self) -> bool:
        """Not what takes long by itself, and so was measured; not one client by itself, whose loss may do as it likes."""
        simple = self.way != "loop" and self.chunk is None and not self.untraceable
        return simple and not self.oracle._frozen and self.label not in self.oracle.choices

    def _settle(self, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None) -> Any:
        """The first call, and other ways beside it where it is long. The first call of a process always is: only the second one counts."""
        self.settled, usual, device = True, self.way, vectors[0].device
        fields = [dict(batch.fields) for batch in batches]
        evaluate = lambda way: self._evaluate(way, vectors, fields, shares, batches)
        result, seconds = _timed(evaluate, usual, device)
        if seconds < self.oracle.long or len(batches[0]) == 1 or _timed(evaluate, usual, device)[1] < self.oracle.long:
            return result
        known = [
            way
            for label, way in self.oracle.choices.items()
            if label.startswith(repr((self.name, usual == "pooled"))[:-1])
        ]
        if len(known) >= _SHAPES:  # cohorts of unequal clients come in ever new shapes
            self.way = self.oracle.choices[self.label] = known[-1]
            return result
        seconds = min(_timed(evaluate, usual, device)[1] for _ in range(2))
        for other in ("loop", "vmap"):
            if other != usual:
                evaluate(other)
                again = min(_timed(evaluate, other, device)[1] for _ in range(2))
                if again < 0.8 * seconds:  # a little faster is not worth another rounding
                    self.way, seconds = other, again
        self.oracle.choices[self.label] = self.way
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
            rows = [
                self.each(*(v if v.ndim == 1 else v[i] for v in vectors), *(batch.row(i) for batch in batches))
                for i in range(len(batches[0]))
            ]
            return tree_map(lambda *leaves: torch.stack(leaves), *rows)
        if way == "pooled":
            assert shares is not None
            return tree_map(
                lambda mean: mean.expand(len(shares), *mean.shape),
                self.mean(*vectors, *({**some, _SHARES: shares} for some in fields)),
            )
        in_dims = (*(None if v.ndim == 1 else 0 for v in vectors), *(0 for _ in fields))
        return vmap(self.each, in_dims=in_dims, chunk_size=self.chunk)(*vectors, *fields)


class _Trace:
    """A derivative as a list of operations, with the fields that they read."""

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
        self.run, used = traced(
            flat,
            [
                *vectors,
                *(() if shares is None else (shares,)),
                *(batches[place].fields[name] for place, name in self.takes),
            ],
        )
        self.form, self.used, self.compiled = form[0], used[-len(self.takes) :], False

    def compile(self) -> None:
        self.run, self.compiled = compiled(self.run), True

    def __call__(self, vectors: Sequence[Tensor], batches: Sequence[Batch], shares: Tensor | None) -> Any:
        fields = (
            batches[place].fields[name] if used else None
            for (place, name), used in zip(self.takes, self.used, strict=True)
        )
        return tree_unflatten(list(self.run(*vectors, *(() if shares is None else (shares,)), *fields)), self.form)


def _try_compiler() -> None:
    """Before a run, not in the middle of it."""
    try:
        compiled(lambda one: (one + 1,))(torch.zeros(2))
    except Exception as error:  # a compiler may fail in any way; name it, keep the cause
        reason = str(error).split("\n", 1)[0]
        raise SettingError(
            f"strategy 'compiled' needs a compiler that works ({type(error).__name__}: {reason}): use strategy='auto'."
        ) from error


def _timed(evaluate: Callable[[str], Any], way: str, device: torch.device) -> tuple[Any, float]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = evaluate(way)
    wait()
    return result, time.perf_counter() - start


# ---- what the lower level sees of x ---------------------------------------------------------------------------------


class _Pulled(NamedTuple):
    """A batch of all samples with its features, and the way back from them to x: their forward pass need not be done again."""

    batch: Batch
    back: Callable[[Tensor], Any]

    def join(self, parts: tuple[Tensor, Tensor], shares: Tensor | None) -> Tensor:
        """The mean derivative by x, in every row, from that beside the features and that by the features."""
        direct, through = parts
        assert shares is not None
        if (
            through.ndim > self.batch.fields["features"].ndim
        ):  # pooled: every row holds the mean, and what it is by all features
            direct, through = direct[0], through[0]
        else:  # every client's own, where memory or measuring was against pooling
            direct, through = shares @ direct, through * shares.view(-1, *(1 for _ in through.shape[1:]))
        return (direct + self.back(through.flatten(0, 1))[0]).expand(len(shares), -1)


class _FeatureCache:
    """Features, kept while x stands still.

    They are computed batch by batch until as many samples have been paid for as the cohort holds; then all of them are computed once and batches
    are gathered from there. At worst this doubles the cost of features, whatever comes later.
    """

    def __init__(self, oracle: Oracle, buys: Collection[str] = (), *, keeps_backs: bool = True) -> None:
        self.oracle, self.buys, self.keeps_backs = oracle, buys, keeps_backs
        self.asked: Counter[str] = Counter()  # samples, by role
        self.x: Tensor | None = None
        self.version = -1
        self.paid: dict[str, tuple[Tensor, int]] = {}  # by role: for whom, and how many samples
        self.kept: dict[
            str, tuple[Tensor, Tensor, Tensor]
        ] = {}  # by role: whose, the features of all their samples, where each client's begin
        self.last: tuple[Batch, Batch] | None = None  # two gradients on one batch gather its features once
        self.backs: dict[
            str, Callable[[Tensor], Any]
        ] = {}  # by role, where the features of all samples were computed in one pass

    def attach(self, x: Tensor, batch: Batch) -> Batch:
        if self.oracle.problem.features is None or len(batch) == 0 or "features" in batch.fields:
            return batch
        if x is not self.x or x._version != self.version:
            self.x, self.version, self.paid, self.kept, self.last, self.backs = x, x._version, {}, {}, None, {}
        if self.last is not None and self.last[0] is batch:
            return self.last[1]
        num = batch.fields["index"].numel()
        self.asked[batch.role] += num
        kept = self.kept.get(batch.role)
        if kept is None or not (kept[0] is batch.positions or torch.equal(kept[0], batch.positions)):
            who, paid = self.paid.get(batch.role, (batch.positions, 0))
            paid = num + (
                paid if who is batch.positions or torch.equal(who, batch.positions) else 0
            )  # another cohort begins anew
            self.paid[batch.role] = (batch.positions, paid)
            if batch.role not in self.buys and paid < int(batch.data.sizes[batch.role][batch.positions].sum()):
                return batch
            self.backs.pop(batch.role, None)
            kept = (batch.positions, *self._compute(x, batch))
            self.kept[batch.role] = kept
        _, features, begin = kept
        places = (begin + batch.fields["index"]).reshape(-1)
        gathered = features.index_select(0, places).view(*batch.fields["index"].shape, *features.shape[1:])
        found = replace(batch, fields=batch.fields.plus(features=gathered))
        self.last = (batch, found)
        return found

    def pulled(self, x: Tensor, batch: Batch) -> _Pulled | None:
        """For all samples of a cohort whose features at this x are known, and how they came about."""
        known = (
            x is self.x
            and x._version == self.version
            and batch.role in self.backs
            and batch.size == int(batch.data.sizes[batch.role][batch.positions[0]])
        )
        if not known or not torch.equal(self.kept[batch.role][0], batch.positions) or batch is not batch.whole():
            return None
        return _Pulled(self.attach(x, batch), self.backs[batch.role])

    def _compute(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features of all samples of these clients and this role, one after the other, and where each client's begin."""
        oracle, features = self.oracle, self.oracle.problem.features
        assert features is not None
        of = lambda vector, fields: features(oracle.layout_x.unravel(vector), fields)
        sizes = batch.data.num_samples(batch.positions, batch.role)
        begin = (sizes.cumsum(0) - sizes)[:, None]
        shared = one_row(x) if one_row(x).ndim == 1 else None
        if oracle.strategy == "loop":
            whole = batch.whole()
            return torch.cat([of(x if x.ndim == 1 else x[i], whole.row(i)) for i in range(len(batch))]), begin
        at_once = max(1, BUDGET // 8 // batch.fields.sample_bytes())
        if shared is not None and batch.data.equal(
            batch.positions, batch.role
        ):  # no client differs from another here: their samples stand in one long row
            row = {name: value.flatten(0, 1).split(at_once) for name, value in batch.whole().fields.items()}
            if (
                self.keeps_backs
                and len(batch) * batch.data.sizes[batch.role][batch.positions[0]] * batch.fields.sample_bytes() <= _KEPT
            ):
                computed, self.backs[batch.role], *_ = vjp(
                    lambda vector: of(vector, {name: value for name, (value,) in row.items()}), shared
                )
                return computed, begin
            return torch.cat(
                [of(shared, dict(zip(row, part, strict=True))) for part in zip(*row.values(), strict=True)]
            ), begin
        if shared is not None and not batch.data.elsewhere:
            return torch.cat(
                [of(shared, part) for part in batch.data.samples(batch.positions, batch.role, at_once)]
            ), begin
        in_dims = (0, 0) if shared is None else (None, 0)
        padded = vmap(of, in_dims=in_dims, chunk_size=oracle.chunk_size)(
            x if shared is None else shared, dict(batch.whole().fields)
        )
        return padded.flatten(0, 1), torch.arange(len(batch), device=x.device)[:, None] * padded.shape[1]
