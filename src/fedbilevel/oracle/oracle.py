"""Derivatives of k clients at once, on flat rows.

x, y and v are `(d,)` if all clients share a point and `(k, d)` if each client has its own; every
result has one row per client. `evaluation` describes the ways of evaluating k clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.oracle import derivatives
from fedbilevel.oracle.compiler import postpone
from fedbilevel.oracle.derivatives import Build
from fedbilevel.oracle.evaluation import BUDGET, Evaluation, Plan
from fedbilevel.oracle.features import FeatureCache
from fedbilevel.oracle.plain_kernels import needed
from fedbilevel.oracle.precision import Precision
from fedbilevel.oracle.torch_errors import lacks_derivative, plainly
from fedbilevel.problem.client_data import Batch
from fedbilevel.problem.layout import Layout, one_row
from fedbilevel.problem.problem import Fields, Problem

postpone()

Strategy = Literal["auto", "vmap", "loop", "compiled"]


class Oracle(Evaluation):
    """Derivatives that an algorithm needs.

    shares: weights of the clients, if only the weighted mean is needed; every row may then hold
        that mean.
    """

    def __init__(
        self,
        problem: Problem,
        layout_x: Layout,
        layout_y: Layout,
        *,
        per_sample: Collection[str] = (),
        independent: Collection[str] = (),
        strategy: Strategy = "auto",
        chunk_size: int | None = None,
        precision: Precision = "full",
    ) -> None:
        if strategy not in get_args(Strategy):
            *others, last = map(repr, get_args(Strategy))
            raise SettingError(f"strategy is {strategy!r}, expected {', '.join(others)} or {last}.")
        if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
            raise SettingError(f"chunk_size is {chunk_size!r}, expected at least 1 client, or None for all at once.")
        compiles = strategy == "compiled"  # in everything else the same as auto
        super().__init__(
            problem,
            layout_x,
            layout_y,
            per_sample=per_sample,
            independent=independent,
            strategy="auto" if compiles else strategy,
            chunk_size=chunk_size,
            compiles=compiles,
            precision=precision,
        )
        self._plans: dict[Any, Plan] = {}
        self._counted: dict[Any, int] = {}  # bytes of one client's evaluation, by derivative and shapes
        self.adapts = True  # whether an error may change the kernels
        self._features = FeatureCache(self)

    def lower_grad(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        """Return grad_y g_i."""
        return self._map("gy", derivatives.lower_grad, (x, y), (self._features.attach(x, batch),), shares)

    def lower_grad_x(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        """Return grad_x g_i, for first-order methods."""
        return self._map("gx", derivatives.lower_grad_x, (x, y), (batch,), shares)

    def upper_grad_x(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        known = self._features.pulled(x, batch) if self._pools(len(batch), (x, y), shares) else None
        if known is None:
            return self._map("fx", derivatives.upper_grad_x, (x, y), (batch,), shares)
        return known.join(
            self._map("fx by features", derivatives.upper_by_features, (x, y), (known.batch,), shares), shares
        )

    def upper_grad_y(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        return self._map("fy", derivatives.upper_grad_y, (x, y), (self._features.attach(x, batch),), shares)

    def upper_grads(self, x: Tensor, y: Tensor, batch: Batch, *, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return grad_x f_i and grad_y f_i."""
        return self._map("fx fy", derivatives.upper_grads, (x, y), (batch,), shares)

    def second_order(
        self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return J_i v and H_i v."""
        return self._map("jv hv", derivatives.pull_both, (x, y, v), (batch,), shares)

    def jacobian_product(
        self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: Tensor | None = None
    ) -> Tensor:
        """Return J_i v = d/dx <grad_y g_i, v>."""
        known = self._features.pulled(x, batch) if self._pools(len(batch), (x, y, v), shares) else None
        if known is None:
            return self._map("jv", derivatives.pull_x, (x, y, v), (batch,), shares)
        return known.join(
            self._map("jv by features", derivatives.pull_by_features, (x, y, v), (known.batch,), shares), shares
        )

    def hessian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: Tensor | None = None) -> Tensor:
        """Return H_i v = d/dy <grad_y g_i, v>."""
        return self._map("hv", derivatives.pull_y, (x, y, v), (self._features.attach(x, batch),), shares)

    def directions(
        self,
        x: Tensor,
        y: Tensor,
        u: Tensor,
        *,
        gy: Batch,
        fx: Batch,
        fy: Batch,
        ju: Batch,
        hu: Batch,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (f_x - J u, g_y, H u - f_y) in one pass.

        Derivatives with the same batch share one evaluation.
        """
        alike = (fx is fy, ju is hu, gy is ju)
        build, batches = derivatives.all_directions(*alike), (gy, fx, fy, ju, hu)
        alone = derivatives.ALONE_DIRECTIONS[alike]
        return self._map(f"directions {alike}", build, (x, y, u), batches, shares, alone=alone)

    def evaluate(self, function: Callable[[Any, Any, Fields], Any], x: Tensor, y: Tensor, batch: Batch) -> Any:
        """Return `function(x, y, batch)` of every client, such as losses and statistics.

        The function receives dicts of tensors.
        """
        flat, fast = self.flat(function), self.flat(function, fast=True)
        build, alone = (lambda _upper, _lower: flat), (lambda _upper, _lower: fast)
        return self._map(function, build, (x, y), (batch,), alone=alone)

    @contextmanager
    def alone(self, buys: Collection[str], *, frozen: bool, keeps_backs: bool = False) -> Iterator[Mapping[str, int]]:
        """Compute features anew within this context, and yield the requested sample counts by role.

        buys: roles whose features are computed at once for all samples.
        frozen: whether to measure, trace and keep nothing, because the values exist only when a
            captured phase is replayed.
        keeps_backs: whether backward passes of features are kept, as usual.
        """
        before = self._features, self.frozen, self.compiles_now
        self._features, self.frozen, self.compiles_now = (
            FeatureCache(self, buys, keeps_backs=keeps_backs),
            frozen,
            self.compiles and not frozen,
        )
        try:
            yield self._features.asked
        finally:
            self._features, self.frozen, self.compiles_now = before

    def _map(
        self,
        kind: Any,
        build: Build,
        vectors: Sequence[Tensor],
        batches: Sequence[Batch],
        shares: Tensor | None = None,
        *,
        alone: Build | None = None,
    ) -> Any:
        if self.tick is not None:
            self.tick()
        k = len(batches[0])
        for v in vectors:
            if v.ndim == 2 and v.shape[0] != k:
                raise ValueError(f"{len(v)} rows for {k} clients.")
        vectors = [one_row(v) for v in vectors]  # one matrix product per cohort instead of one per client
        if k == 0:
            return self._no_rows(build, vectors, batches)
        pools = self._pools(k, vectors, shares)
        key = (
            kind if isinstance(kind, str) else id(kind),
            pools,
            vectors[0].device.type,
            *(v.shape for v in vectors),
            *(batch.form for batch in batches),
        )
        plan = self._plans.get(key)
        if self.frozen and (plan is None or not plan.settled):
            raise RuntimeError(f"{kind} has not been evaluated at these shapes before")
        try:
            if plan is None:
                plan = self._plan(kind, pools, key, build, alone, vectors, batches)
            return plan(vectors, batches, shares if plan.pooled else None)  # no other way reads them
        except RuntimeError as error:
            if not lacks_derivative(error):
                raise
            if self.adapts and self.takes_plain_kernels([error]):
                return self._map(kind, build, vectors, batches, shares, alone=alone)
            raise ProblemError(
                f"the derivative {_name(kind)!r} of a loss cannot be computed ({plainly(error)}): write that operation "
                "of the loss in other operations, or use an algorithm without second derivatives, such as 'penalty'."
            ) from error

    def _plan(
        self,
        kind: Any,
        pools: bool,
        key: Any,
        build: Build,
        alone: Build | None,
        vectors: Sequence[Tensor],
        batches: Sequence[Batch],
    ) -> Plan:
        """Return a new plan, which is kept unless the id of its function may be reused."""
        k, padded = len(batches[0]), any(batch.size is None for batch in batches)
        alone, is_derivative = alone or derivatives.ALONE.get(build), isinstance(kind, str)
        shapes = [tuple(v.shape) for v in vectors]
        known = (self.problem.upper, self.problem.lower, *self.problem.statistics.values())
        stays = is_derivative or any(kind is one for one in known)

        def planned(chunk: int | None) -> Plan:
            pooled = pools and chunk is None
            label = (_name(kind), pooled, vectors[0].device.type, *shapes, *(batch.form for batch in batches))
            way, form = "pooled" if pooled else self._usual(k), {"is_derivative": is_derivative, "padded": padded}
            return Plan(self, label, build, alone, way, chunk, pooled=pooled, **form)

        plan = planned(self._chunk(k, vectors, batches))
        if stays and self._is_counted(k, plan):
            widths = (shape[-1] for shape in shapes)
            one = (key[0], *widths, *((batch.form[0], *batch.form[1][1:], *batch.form[3:]) for batch in batches))
            if one not in self._counted:
                self._counted[one] = plan.bytes_of_one(vectors, batches)
            fits = self._budget(vectors[0].device) // max(1, self._counted[one])
            if fits < (plan.chunk or k):
                plan = planned(max(1, fits))
        if stays:
            self._plans[key] = plan
        return plan

    def _is_counted(self, k: int, plan: Plan) -> bool:
        """Return whether several clients share the memory of one evaluation, as many as fit."""
        return self.counts and k > 1 and self.strategy == "auto" and self.chunk_size is None and plan.way != "loop"

    def takes_plain_kernels(self, errors: Iterable[Exception | str]) -> bool:
        """Use plain kernels that may avoid the errors, and return whether there are any new ones."""
        more = needed(errors) - self.plain_kernels
        self.plain_kernels |= more
        if more:
            self._plans.clear()
            self._counted.clear()  # plain attention holds more
        return bool(more)

    def takes_full_precision(self, errors: Iterable[Exception]) -> bool:
        """Evaluate plain kernels in full if torch cannot mix precisions in them; return whether that is new."""
        mixes = any("expected scalar type" in str(error) for error in errors)
        if not mixes or self.precision == "full" or self.plain_in_full or not self.plain_kernels:
            return False
        self.plain_in_full = True
        self._plans.clear()
        return True

    def _pools(self, k: int, vectors: Sequence[Tensor], shares: Tensor | None) -> bool:
        """Return whether one derivative of the mean is enough.

        It is enough if all clients are at one point and only the mean is needed.
        """
        if shares is None or k <= 1 or self.strategy != "auto" or self.chunk_size is not None:
            return False
        return all(v.ndim == 1 or one_row(v).ndim == 1 for v in vectors)

    def _usual(self, k: int) -> str:
        return "loop" if self.strategy == "loop" or (self.strategy == "auto" and k == 1) else "vmap"

    def _chunk(self, k: int, vectors: Sequence[Tensor], batches: Sequence[Batch]) -> int | None:
        """Return the number of clients that can be evaluated at once within the memory budget.

        The memory holds their points, samples and a few copies; intermediate values are counted later.
        """
        if self.chunk_size is not None or self.strategy == "vmap":
            return self.chunk_size
        points = sum(v.shape[-1] * v.element_size() for v in vectors)
        samples = sum(batch.fields.sample_bytes() * batch.fields["index"].shape[1] for batch in batches)
        fits = max(1, self._budget(vectors[0].device) // (8 * (points + samples)))
        return None if fits >= k else fits

    @staticmethod
    def _budget(device: torch.device) -> int:
        """Return the bytes that one evaluation may use; those of the device, and not those that are free."""
        return BUDGET if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory // 8

    def _no_rows(self, build: Build, vectors: Sequence[Tensor], batches: Sequence[Batch]) -> Any:
        """Return results without rows, for a process without a client in the cohort."""
        one = [v if v.ndim == 1 else v.new_zeros(v.shape[1]) for v in vectors]
        first = [batch.data.look(batch.data.positions[:1], batch.role).row(0) for batch in batches]
        function = build(self.flat(self.problem.upper), self.flat(self.problem.lower))
        return tree_map(lambda leaf: leaf.new_zeros((0, *leaf.shape)), function(*one, *first))


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
