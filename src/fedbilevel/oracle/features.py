"""Features of samples, kept while x does not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedbilevel.oracle.evaluation import BUDGET, Evaluation
from fedbilevel.problem.client_data import Batch
from fedbilevel.problem.layout import one_row

_KEPT = 2**24  # bytes of samples whose backward pass is kept: the tensors inside it may be many times larger


class Pulled(NamedTuple):
    """Batch of all samples with its features, and their backward pass to x.

    The backward pass needs no new forward pass.
    """

    batch: Batch
    back: Callable[[Tensor], Any]

    def join(self, parts: tuple[Tensor, Tensor], shares: Tensor | None) -> Tensor:
        """Return the mean derivative by x in every row.

        parts: derivatives by x alone and by the features.
        """
        direct, through = parts
        assert shares is not None
        if through.ndim > self.batch.fields["features"].ndim:  # pooled: every row holds the mean
            direct, through = direct[0], through[0]
        else:  # one row per client, where memory or measured time excluded pooling
            direct, through = shares @ direct, through * shares.view(-1, *(1 for _ in through.shape[1:]))
        return (direct + self.back(through.flatten(0, 1))[0]).expand(len(shares), -1)


class FeatureCache:
    """Cache of features while x does not change.

    Features are computed batch by batch until as many samples have been computed as the cohort
    holds. Then the features of all samples are computed once, and batches are gathered from them.
    At worst this doubles the cost of features.
    """

    def __init__(self, evaluation: Evaluation, buys: Collection[str] = (), *, keeps_backs: bool = True) -> None:
        self.evaluation, self.buys, self.keeps_backs = evaluation, buys, keeps_backs
        self.asked: Counter[str] = Counter()  # samples, by role
        self.x: Tensor | None = None
        self.version = -1
        self.paid: dict[str, tuple[Tensor, int]] = {}  # by role: positions of the clients, number of samples
        # by role: positions of the clients, features of all their samples, offset of each client
        self.kept: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.last: tuple[Batch, Batch] | None = None  # two gradients on one batch gather its features once
        # by role: backward passes, where the features of all samples were computed in one pass
        self.backs: dict[str, Callable[[Tensor], Any]] = {}

    def attach(self, x: Tensor, batch: Batch) -> Batch:
        if self.evaluation.problem.features is None or len(batch) == 0 or "features" in batch.fields:
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
            same = who is batch.positions or torch.equal(who, batch.positions)
            paid = num + (paid if same else 0)  # another cohort starts from zero
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

    def pulled(self, x: Tensor, batch: Batch) -> Pulled | None:
        """Return all samples of a cohort if their backward pass at this x is known, or None."""
        known = (
            x is self.x
            and x._version == self.version
            and batch.role in self.backs
            and batch.size == int(batch.data.sizes[batch.role][batch.positions[0]])
        )
        if not known or not torch.equal(self.kept[batch.role][0], batch.positions) or batch is not batch.whole():
            return None
        return Pulled(self.attach(x, batch), self.backs[batch.role])

    def _compute(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the features of all samples, client after client, and the offset of each client.

        batch: batch that names the clients and the role.
        """
        evaluation, features = self.evaluation, self.evaluation.problem.features
        assert features is not None
        of = lambda vector, fields: features(evaluation.layout_x.unravel(vector), fields)
        sizes = batch.data.num_samples(batch.positions, batch.role)
        begin = (sizes.cumsum(0) - sizes)[:, None]
        shared = one_row(x) if one_row(x).ndim == 1 else None
        if evaluation.strategy == "loop":
            whole = batch.whole()
            return torch.cat([of(x if x.ndim == 1 else x[i], whole.row(i)) for i in range(len(batch))]), begin
        at_once = max(1, BUDGET // 8 // batch.fields.sample_bytes())
        if shared is not None and batch.data.equal(batch.positions, batch.role):
            return self._of_equal_clients(of, shared, batch, at_once), begin
        if shared is not None and not batch.data.elsewhere:
            parts = batch.data.samples(batch.positions, batch.role, at_once)
            return torch.cat([of(shared, part) for part in parts]), begin
        in_dims = (0, 0) if shared is None else (None, 0)
        padded = vmap(of, in_dims=in_dims, chunk_size=evaluation.chunk_size)(
            x if shared is None else shared, dict(batch.whole().fields)
        )
        return padded.flatten(0, 1), torch.arange(len(batch), device=x.device)[:, None] * padded.shape[1]

    def _of_equal_clients(self, of: Callable[..., Tensor], x: Tensor, batch: Batch, at_once: int) -> Tensor:
        """Compute features at one x of clients with equally many samples, joined to one row."""
        row = {name: value.flatten(0, 1).split(at_once) for name, value in batch.whole().fields.items()}
        size = len(batch) * batch.data.sizes[batch.role][batch.positions[0]] * batch.fields.sample_bytes()
        if self.keeps_backs and size <= _KEPT:
            whole = lambda vector: of(vector, {name: value for name, (value,) in row.items()})
            computed, self.backs[batch.role], *_ = vjp(whole, x)
            return computed
        return torch.cat([of(x, dict(zip(row, part, strict=True))) for part in zip(*row.values(), strict=True)])
