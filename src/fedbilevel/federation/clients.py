"""Clients of a cohort as a phase uses them, with their samples and derivatives.

Values have one row per client hosted in this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.federation.steps import Step as Step
from fedbilevel.federation.steps import StepSchedule
from fedbilevel.federation.store import StoreView
from fedbilevel.problem.client_data import Batch
from fedbilevel.problem.draws import Address
from fedbilevel.problem.layout import one_row

if TYPE_CHECKING:
    from fedbilevel.federation.host import Host

BatchSize = int | None | Mapping[str, int | None]
Sampling = Literal["replacement", "epochs"]
HELD = "held"  # the role of validation samples that an algorithm does not learn from
OUTSIDE = "outside"  # the key, in a mapping of batch sizes, for batches outside local steps


class Bill:
    """Charges that are equal for all clients of a phase, counted here and charged once."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()  # evaluations of all samples of a role, where clients have unequal numbers

    def add(self, batch: Batch, columns: Sequence[str]) -> None:
        for column in columns:
            self.calls[column] += 1
        if batch.size is None:
            self.whole[batch.role] += 1
        else:
            self.calls["samples"] += batch.size

    def pay(self, host: Host, positions: Tensor) -> None:
        ids = host.numbers(positions)
        if self.calls:
            host.ledger.charge_all(ids, self.calls)
        for role, number in self.whole.items():
            host.ledger.charge_each("samples", ids, host.sizes_at(role, positions), number)


class Clients:
    """The k >= 0 clients of the cohort.

    Vectors are `(d,)` if all clients share a vector and `(k, d)` if each client has its own.
    """

    def __init__(
        self,
        host: Host,
        positions: Tensor,
        iteration: int,
        call: int,
        shares: Tensor | None = None,
        bill: Bill | None = None,
    ) -> None:
        self.host, self.positions, self._num = host, positions, positions.shape[0]
        # (k,) summing to one, where only means weighted by them are needed: derivatives at a shared point may then be
        # the mean
        self.shares = shares
        self.bill = bill  # charges to be paid at the end of the phase; None: at once
        self._ids = host.numbers(positions)
        self.num_clients = host.num_clients
        self.dtype, self.device = host.dtype, host.device
        self._when: tuple[Address, Address] = (iteration, call)
        self._ids_there: Tensor | None = None  # on the device
        # derivatives, with noise if each of them is a release
        self.oracle: Any = host.oracle if host.noise is None else host.noise.at(host, positions, iteration, call)
        self._last: tuple[str, Tensor, Tensor, Batch, tuple[int, int], Tensor] | None = None

    @property
    def ids(self) -> Tensor:
        """Numbers of the clients."""
        return self._ids

    @property
    def iteration(self) -> int:
        """Number of the outer iteration."""
        return int(self._when[0])

    @property
    def memory(self) -> StoreView:
        """Values that these clients keep from one outer iteration to the next."""
        return StoreView(self.host.memory, self.positions)

    @property
    def scratch(self) -> StoreView:
        """Values that these clients keep until the outer iteration ends."""
        return StoreView(self.host.scratch, self.positions)

    def __len__(self) -> int:
        return self._num

    def rows(self, *vectors: Tensor) -> Any:
        """Return one row per client: views of a shared vector, or the rows themselves."""
        rows = tuple(v.expand(len(self), -1) if v.ndim == 1 else v for v in vectors)
        return rows if len(rows) > 1 else rows[0]

    def steps(self, num: int | tuple[int, ...]) -> list[Step]:
        """Return the local steps of the clients.

        num: number of steps of every client, or one number per client of the federation.
        """
        if isinstance(num, tuple) and len(num) != self.num_clients:
            raise SettingError(
                f"{len(num)} numbers of local steps for {self.num_clients} clients: give one number, or one per client."
            )
        taus = torch.tensor(num)[self._ids] if isinstance(num, tuple) else None
        schedule = StepSchedule(self, taus, max(num) if isinstance(num, tuple) else num)
        return [Step(self, schedule, index) for index in range(schedule.num)]

    def passes(self, num: int, role: str) -> list[Step]:
        """Return as many local steps of each client as make `num` passes over its samples of a role.

        A batch of all samples is one step per pass.
        """
        size, own = self.batch_size(role), self.host.data_of(role).sizes[role][self.positions]
        _ = self.ids  # numbers of steps depend on the clients, so a captured phase cannot have them
        taus = torch.full_like(own, num) if size is None else (num * own.double() / size).round().long().clamp(min=1)
        schedule = StepSchedule(self, taus, num)
        return [Step(self, schedule, index) for index in range(schedule.num)]

    def batch(self, role: str, purpose: str, *, times: int = 1) -> Batch:
        """Draw a batch outside the local steps, with the draw of the first step."""
        return StepSchedule(self, None, 1).batch(role, purpose, 0, self.batch_size(role, outside=True), times, None)

    def samples(self, role: str) -> list[dict[str, Tensor]]:
        """Return all samples of every client, each with its own number of rows.

        This is for methods that need sums over samples which are no derivatives. With features, the
        problem computes them once and the host keeps them. Every sample is charged.
        """
        if self.host.noise is not None:
            raise SettingError(
                f"{self.host.algorithm.name()} reads samples, which noise of the level 'example' does not cover: use "
                "an algorithm that needs derivatives only."
            )
        if self.bill is not None:
            self.bill.whole[role] += 1
        else:
            self.host.ledger.charge("samples", self._ids, self.host.data_of(role).sizes[role][self.positions])
        return [self.host.samples_of(role, position) for position in self.positions.tolist()]

    def unpadded(self, x: Tensor) -> list[Tensor]:
        """Return the private rows of x, each without padding."""
        sizes = self.host.x_sizes
        return list(x) if sizes is None else [row[:size] for row, size in zip(x, sizes[self.positions], strict=True)]

    def padded(self, rows: Sequence[Tensor]) -> Tensor:
        """Return private rows of x as one matrix with padding, the inverse of `unpadded`."""
        if self.host.x_sizes is None:
            return torch.stack(list(rows))
        return self.host.pad(torch.cat([self.host.x0.new_zeros(0), *rows]), self.positions)

    def draw(self, purpose: str, high: int, *, step: int = 0) -> Tensor:
        """Return (k,) integers in [0, high), each from its client's own stream."""
        many = torch.full((len(self),), high)
        iteration, call = self._when
        return self.host.stream.integers(
            purpose, self._ids, many, iteration=iteration, call=call, steps=range(step, step + 1), width=1
        )[:, 0, 0]

    def most(self, drawn: Tensor, high: int) -> int:
        """Return the largest of some drawn integers, or the largest possible one in a captured phase."""
        return max(drawn.tolist(), default=0)

    def batch_size(self, role: str, *, outside: bool = False) -> int | None:
        size = self.host.batch_size
        if size is None or isinstance(size, int):
            return size
        return size[OUTSIDE] if outside and OUTSIDE in size else size.get(role)

    def sample_indices(self, role: str, purpose: str, steps: range, width: int) -> Tensor:
        """Return (k, len(steps), width) sample numbers.

        They are drawn with replacement, or taken in an order that is drawn again for every pass.
        """
        data, stream, (iteration, call) = self.host.data_of(role), self.host.stream, self._when
        if self.host.sampling == "epochs":
            draw, sizes = stream.epochs, data.sizes[role][self.positions]
        else:
            draw, sizes = stream.integers, data.num_samples(self.positions, role)
        return draw(
            f"{role}/{purpose}", self._ids_here(), sizes, iteration=iteration, call=call, steps=steps, width=width
        )

    def num_draws(self, role: str) -> int:
        """Return how many random numbers the problem asks for each sample of this role."""
        return self.host.problem.draws.get(role, 0)

    def numbers(self, batch: Batch, purpose: str, step: int, num: int) -> Tensor:
        """Return random numbers (k, b, num) from 0 to 1 for the samples of a batch.

        The numbers of a sample depend on its place in the batch, not on the padding after it.
        """
        k, width = batch.fields["index"].shape
        words = self.words(f"{batch.role}/{purpose}/draw", step, width * num)
        return ((words >> 8).to(self.dtype) * 2.0**-24).view(k, width, num)  # 24 bits are exact in float32

    def words(self, purpose: str, step: int, width: int) -> Tensor:
        """Return random 32-bit words (k, 1, width)."""
        iteration, call = self._when
        return self.host.stream.bits(
            purpose, self._ids_here(), iteration=iteration, call=call, steps=range(step, step + 1), width=width
        )

    def _ids_here(self) -> Tensor:
        """Return the numbers of the clients on the device of the data."""
        if self._ids_there is None:
            self._ids_there = self._ids.to(self.device)
        return self._ids_there

    # ---- derivatives, each charged for the rows that use it -------------------------------------------------------

    def lower_grad(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "gy")
        return self._once("gy", x, y, batch, self.oracle.lower_grad)

    def lower_grad_x(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "gx")
        return self.oracle.lower_grad_x(x, y, batch, shares=self.shares)

    def upper_grad_x(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "fx")
        return self._once("fx", x, y, batch, self.oracle.upper_grad_x)

    def upper_grad_y(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "fy")
        return self.oracle.upper_grad_y(x, y, batch, shares=self.shares)

    def upper_grads(self, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        self._charge(batch, "fx", "fy")
        return self.oracle.upper_grads(x, y, batch, shares=self.shares)

    def upper_loss(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """Return the upper loss of every client, (k, 1); an evaluation is charged by its samples."""
        self._charge(batch)
        return self.oracle.evaluate(self.host.problem.upper, x, y, batch)[:, None]

    def jacobian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "jvp")
        return self.oracle.jacobian_product(x, y, v, batch, shares=self.shares)

    def hessian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "hvp")
        return self.oracle.hessian_product(x, y, v, batch, shares=self.shares)

    def second_order(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        self._charge(batch, "jvp", "hvp")
        return self.oracle.second_order(x, y, v, batch, shares=self.shares)

    def directions(
        self, x: Tensor, y: Tensor, u: Tensor, *, gy: Batch, fx: Batch, fy: Batch, ju: Batch, hu: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (f_x - J u, g_y, H u - f_y), in which derivatives may share batches."""
        by_batch: dict[int, tuple[Batch, list[str]]] = {}
        for batch, column in ((gy, "gy"), (fx, "fx"), (fy, "fy"), (ju, "jvp"), (hu, "hvp")):
            by_batch.setdefault(id(batch), (batch, []))[1].append(column)
        for batch, columns in by_batch.values():
            self._charge(batch, *columns)
        return self.oracle.directions(x, y, u, gy=gy, fx=fx, fy=fy, ju=ju, hu=hu, shares=self.shares)

    def _once(self, kind: str, x: Tensor, y: Tensor, batch: Batch, evaluate: Callable[..., Tensor]) -> Tensor:
        """Compute two equal gradients at the same point once.

        The first step of a variance-reduced phase needs both and, as in the papers, is charged for
        both.
        """
        if self.bill is None:
            return evaluate(x, y, batch, shares=self.shares)
        last, versions = self._last, (x._version, y._version)
        if (
            last is None
            or last[0] != kind
            or last[3] is not batch
            or last[4] != versions
            or not (_same(last[1], x) and _same(last[2], y))
        ):
            last = self._last = (kind, x, y, batch, versions, evaluate(x, y, batch, shares=self.shares))
        return last[5]

    def _charge(self, batch: Batch, *columns: str) -> None:
        if self.host.before_derivative is not None:
            self.host.before_derivative()
        if self.bill is not None and batch.active is None:
            self.bill.add(batch, columns)
            return
        pays = slice(None) if batch.active is None else batch.active
        ids = self._ids[pays]
        for column in columns:
            self.host.ledger.charge(column, ids)
        self.host.ledger.charge("samples", ids, batch.counts[pays])


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors are the same memory: one vector, as itself or as every row."""
    one, other = one_row(one), one_row(other)
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    )


def is_first(iteration: Any) -> bool:
    """Return whether this is the first outer iteration; a captured one, whose number is a tensor, never is."""
    return not isinstance(iteration, Tensor) and iteration <= 1


def smaller(bound: float, value: Any) -> Any:
    """Return the smaller of both; the value is a tensor in a captured outer iteration."""
    return value.clamp(max=bound) if isinstance(value, Tensor) else min(bound, value)
