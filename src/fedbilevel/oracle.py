"""Derivatives of k clients at once, on flat rows.

x, y and v are `(d,)` where all clients share a point and `(k, d)` where each has its own; every result has one row per client.
How the k clients are evaluated (one vmap, chunks of it, or a plain loop) is decided here and nowhere else. H v and J v come
from one vector-Jacobian product of the lower gradient: with G = grad_y g, the pullback of v is (d<G,v>/dx, d<G,v>/dy) = (J v, H v).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from fedbilevel.data.clients import Batch
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.problem import Fields, Layout, Loss, Problem, with_features

Strategy = Literal["auto", "vmap", "loop"]  # auto: vmap, in chunks where memory asks for it, or a loop where the loss does
BUDGET = 2**31  # bytes of points, samples and intermediate values evaluated at once under "auto"


class Oracle:
    def __init__(self, problem: Problem, layout_x: Layout, layout_y: Layout, *, strategy: Strategy = "auto", chunk_size: int | None = None) -> None:
        if strategy not in ("auto", "vmap", "loop"):
            raise SettingError(f"strategy is {strategy!r}, expected 'auto', 'vmap' or 'loop'.")
        if chunk_size is not None and chunk_size < 1:
            raise SettingError(f"chunk_size is {chunk_size}, expected at least 1 client, or None for all at once.")
        self.problem, self.layout_x, self.layout_y = problem, layout_x, layout_y
        self.strategy, self.chunk_size = strategy, chunk_size
        self._features = _FeatureCache(self)

    # ---- what an algorithm may ask for ---------------------------------------------------------------------------

    def lower_grad(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """grad_y g_i."""
        return self._map(grad(self._loss(self.problem.lower), argnums=1), (x, y), (self._features.attach(x, batch),))

    def lower_grad_x(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """grad_x g_i, which only first-order methods need."""
        return self._map(grad(self._loss(self.problem.lower), argnums=0), (x, y), (batch,))

    def upper_grad_x(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return self._map(grad(self._loss(self.problem.upper), argnums=0), (x, y), (batch,))

    def upper_grad_y(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return self._map(grad(self._loss(self.problem.upper), argnums=1), (x, y), (self._features.attach(x, batch),))

    def upper_grads(self, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """grad_x f_i and grad_y f_i."""
        return self._map(grad(self._loss(self.problem.upper), argnums=(0, 1)), (x, y), (batch,))

    def second_order(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """J_i v and H_i v."""
        return self._map(self._pull_both, (x, y, v), (batch,))

    def jacobian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """J_i v = d/dx <grad_y g_i, v>."""
        return self._map(self._pull_x, (x, y, v), (batch,))

    def hessian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """H_i v = d/dy <grad_y g_i, v>."""
        return self._map(self._pull_y, (x, y, v), (self._features.attach(x, batch),))

    def directions(self, x: Tensor, y: Tensor, u: Tensor, *, gy: Batch, fx: Batch, fy: Batch, ju: Batch, hu: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(f_x - J u, g_y, H u - f_y) in one pass; a batch that stands for several derivatives is evaluated once for all of them."""
        one_upper, one_second, one_lower = fx is fy, ju is hu, gy is ju

        def all_three(x: Tensor, y: Tensor, u: Tensor, *fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
            b_gy, b_fx, b_fy, b_ju, b_hu = fields
            upper, lower = self._loss(self.problem.upper), self._loss(self.problem.lower)
            if one_upper:
                d_fx, d_fy = grad(upper, argnums=(0, 1))(x, y, b_fx)
            else:
                d_fx, d_fy = grad(upper, argnums=0)(x, y, b_fx), grad(upper, argnums=1)(x, y, b_fy)
            if one_second:
                value, pull, *_ = vjp(lambda x, y: grad(lower, argnums=1)(x, y, b_ju), x, y)
                d_ju, d_hu = pull(u)
            else:
                value, d_ju, d_hu = None, self._pull_x(x, y, u, b_ju), self._pull_y(x, y, u, b_hu)
            d_gy = value if one_lower and value is not None else grad(lower, argnums=1)(x, y, b_gy)
            return d_fx - d_ju, d_gy, d_hu - d_fy

        return self._map(all_three, (x, y, u), (gy, fx, fy, ju, hu))

    def evaluate(self, function: Callable[[Any, Any, Fields], Any], x: Tensor, y: Tensor, batch: Batch) -> Any:
        """`function(x, y, batch)` on the user's structure, per client: losses and statistics, no derivative."""
        return self._map(self._loss(function), (x, y), (batch,))

    # ---- one client ----------------------------------------------------------------------------------------------

    def _loss(self, loss: Loss) -> Callable[[Tensor, Tensor, Fields], Tensor]:
        def flat(x: Tensor, y: Tensor, fields: Fields) -> Tensor:
            tree = self.layout_x.unravel(x)
            return loss(tree, self.layout_y.unravel(y), with_features(self.problem, tree, fields))

        return flat

    def _pull_both(self, x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> tuple[Tensor, Tensor]:
        lower = grad(self._loss(self.problem.lower), argnums=1)
        _, pull, *_ = vjp(lambda x, y: lower(x, y, fields), x, y)
        jv, hv = pull(v)
        return jv, hv

    def _pull_x(self, x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> Tensor:
        lower = grad(self._loss(self.problem.lower), argnums=1)
        return vjp(lambda x: lower(x, y, fields), x)[1](v)[0]

    def _pull_y(self, x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> Tensor:
        lower = grad(self._loss(self.problem.lower), argnums=1)
        return vjp(lambda y: lower(x, y, fields), y)[1](v)[0]

    # ---- k clients -----------------------------------------------------------------------------------------------

    def _map(self, function: Callable[..., Any], vectors: Sequence[Tensor], batches: Sequence[Batch]) -> Any:
        k = len(batches[0])
        for v in vectors:
            if v.ndim == 2 and len(v) != k:
                raise ValueError(f"{len(v)} rows for {k} clients.")
        # rows that are views of one shared vector are passed as that vector: a matrix product per cohort, not per client
        vectors = [v[0] if v.ndim == 2 and k > 0 and v.stride(0) == 0 else v for v in vectors]
        if k == 0:
            return self._nothing(function, vectors, batches)
        if self.strategy == "loop" or (self.strategy == "auto" and k == 1):
            rows = [function(*(v if v.ndim == 1 else v[i] for v in vectors), *(batch.row(i) for batch in batches)) for i in range(k)]
            return torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *rows)
        in_dims = (*(None if v.ndim == 1 else 0 for v in vectors), *(0 for _ in batches))
        fields = tuple(batch.fields for batch in batches)
        return vmap(function, in_dims=in_dims, chunk_size=self._chunk(k, vectors, fields))(*vectors, *fields)

    def _chunk(self, k: int, vectors: Sequence[Tensor], batches: Sequence[Fields]) -> int | None:
        """As many clients at once as keep points, samples and a few intermediate copies of them within the budget."""
        if self.chunk_size is not None or self.strategy == "vmap":
            return self.chunk_size
        points = sum(v.shape[-1] * v.element_size() for v in vectors)
        samples = sum(value.numel() // k * value.element_size() for fields in batches for value in fields.values())
        fits = max(1, BUDGET // (8 * (points + samples)))
        return None if fits >= k else fits

    def settle(self, batch: Batch, x: Tensor, y: Tensor) -> None:
        """Try vmap once on a few samples: a loss that branches on values or calls .item() cannot be batched."""
        if self.strategy == "loop" or len(batch) < 2:
            return
        try:
            xs, ys = x.expand(len(batch), -1), y.expand(len(batch), -1)  # points of their own, as after local steps
            vmap(self._pull_both)(xs, ys, ys, batch.fields)
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0].rstrip(".")
            if self.strategy == "vmap":
                raise ProblemError(f"the lower loss cannot be evaluated for several clients at once ({reason}): use strategy='loop'.") from error
            self.strategy = "loop"
            text = f"the lower loss cannot be evaluated for several clients at once ({reason}), so clients are evaluated one by one, which is slower"
            warnings.warn(text, stacklevel=2)

    def _nothing(self, function: Callable[..., Any], vectors: Sequence[Tensor], batches: Sequence[Batch]) -> Any:
        """A process none of whose clients is in the cohort: the shapes of one client, zero rows."""
        one = [v if v.ndim == 1 else v.new_zeros(v.shape[1]) for v in vectors]
        first = [batch.data.batch(batch.data.positions[:1], batch.role).row(0) for batch in batches]
        return torch.utils._pytree.tree_map(lambda leaf: leaf.new_zeros((0, *leaf.shape)), function(*one, *first))


class _FeatureCache:
    """What the lower level sees of x, kept while x stands still.

    Features are computed batch by batch until as many samples have been paid for as the cohort holds; then all of them are
    computed once and batches are gathered from there. At worst this doubles the cost of features, whatever comes later.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.x: Tensor | None = None
        self.version = -1
        self.paid: dict[str, int] = {}
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}

    def attach(self, x: Tensor, batch: Batch) -> Batch:
        if self.oracle.problem.features is None or len(batch) == 0 or "features" in batch.fields:
            return batch
        if x is not self.x or x._version != self.version:
            self.x, self.version, self.paid, self.kept = x, x._version, {}, {}
        kept = self.kept.get(batch.role)
        if kept is None or not torch.equal(kept[0], batch.positions):
            self.paid[batch.role] = self.paid.get(batch.role, 0) + batch.fields["index"].numel()
            if self.paid[batch.role] < int(batch.data.sizes[batch.role][batch.positions].sum()):
                return batch
            kept = (batch.positions, self._compute(x, batch.whole()))
            self.kept[batch.role] = kept
        rows = torch.arange(len(batch), device=x.device)[:, None]
        features = kept[1][rows, batch.fields["index"]]
        return Batch(batch.role, {**batch.fields, "features": features}, batch.counts, batch.data, batch.positions, batch.active)

    def _compute(self, x: Tensor, batch: Batch) -> Tensor:
        features = self.oracle.problem.features
        assert features is not None
        oracle = self.oracle

        def one(x: Tensor, fields: Fields) -> Tensor:
            return features(oracle.layout_x.unravel(x), fields)

        if oracle.strategy == "loop":  # ragged rows of a loop: pad once computed
            rows = [one(x if x.ndim == 1 else x[i], batch.row(i)) for i in range(len(batch))]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        shared = x.ndim == 1 or x.stride(0) == 0
        return vmap(one, in_dims=(None if shared else 0, 0), chunk_size=oracle.chunk_size)(x if x.ndim == 1 or not shared else x[0], batch.fields)
