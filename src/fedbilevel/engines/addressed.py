"""Clients of a captured phase or outer iteration, whose numbers and place in the run are tensors.

A replay changes these tensors and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fedbilevel.federation.clients import Bill, Clients
from fedbilevel.federation.steps import Step, StepSchedule
from fedbilevel.problem.client_data import Batch, ClientData
from fedbilevel.problem.draws import Address

if TYPE_CHECKING:
    from fedbilevel.federation.host import Host


MOST_KEYS = 2**24  # sorted at once for passes over unequal numbers of samples


class NotCapturable(Exception):
    """Signal that a phase or an outer iteration needs a value that a replay cannot change."""


def rooms(data: ClientData, positions: Tensor) -> dict[str, int]:
    """Return by role a number of samples that holds each of these clients.

    It is that of the largest client of all, halved while it is too large, so that few numbers fit
    all cohorts.
    """
    found = {}
    for role, sizes in data.sizes.items():
        found[role] = data.largest(role)
        most = found[role] if data.alike(role) else int(sizes[positions].max())
        while found[role] >= 2 * max(1, most):
            found[role] = -(-found[role] // 2)
    return found


class Partly(NamedTuple):
    """Charges of the clients whose flags the replay computes."""

    flags: Tensor  # (k,) on the device
    columns: Sequence[str]
    size: int | None  # samples of each client; None: all samples of the role
    role: str


class Whereabouts(NamedTuple):
    """Tensors from which a replay reads its clients and its place in the run."""

    here: Tensor  # (k,) positions
    ids: Tensor  # (k,) numbers
    iteration: Tensor  # one number, int64
    call: Address


class Addressed(Clients):
    """Clients at `where`; the given positions are those of the capture, of the same number and sizes.

    partly: list to which charges of some of the clients are added; None refuses them.
    memory, scratch: views of what clients keep; None refuses them.
    """

    def __init__(
        self,
        host: Host,
        positions: Tensor,
        where: Whereabouts,
        shares: Tensor | None,
        bill: Bill,
        *,
        partly: list[Partly] | None = None,
        memory: Any = None,
        scratch: Any = None,
    ) -> None:
        super().__init__(host, positions, 0, 0, shares, bill)
        self._where, self._ids_there = where, where.ids
        self._when = (where.iteration.view(1, 1, 1), where.call)
        self._partly, self._memory, self._scratch = partly, memory, scratch

    @property
    def ids(self) -> Tensor:
        return self._where.ids

    @property
    def iteration(self) -> Any:
        """Number of the outer iteration, in float64: powers of it need no conversion."""
        return self._where.iteration.view(()).double()

    @property
    def memory(self) -> Any:
        if self._memory is None:
            raise NotCapturable("it reads or writes memory")
        return self._memory

    @property
    def scratch(self) -> Any:
        if self._scratch is None:
            raise NotCapturable("it reads or writes scratch")
        return self._scratch

    def samples(self, role: str) -> NoReturn:
        raise NotCapturable("it reads samples of unequal numbers")

    def draw(self, purpose: str, high: int, *, step: int = 0) -> Tensor:
        iteration, call = self._when
        many = torch.full((len(self),), high, device=self.device)
        return self.host.stream.integers(
            purpose, self._where.ids, many, iteration=iteration, call=call, steps=range(step, step + 1), width=1
        )[:, 0, 0]

    def most(self, drawn: Tensor, high: int) -> int:
        return high - 1

    def sample_indices(self, role: str, purpose: str, steps: range, width: int) -> Tensor:
        data = self.host.data_of(role)
        if self.host.sampling != "epochs" or data.alike(role):
            return super().sample_indices(role, purpose, steps, width)
        several = data.sizes[role][data.sizes[role] > 1]
        bounds, (iteration, call) = (int(several.min()), data.room[role]), self._when
        if len(self) * bounds[1] * (len(steps) * width // bounds[0] + 2) > MOST_KEYS:
            raise NotCapturable("its clients take passes over very unequal numbers of samples")
        return self.host.stream.epochs_within(
            f"{role}/{purpose}", self._where.ids, data.num_samples(self.positions, role), bounds,
            iteration=iteration, call=call, steps=steps, width=width,
        )  # fmt: skip

    def steps(self, num: int | tuple[int, ...]) -> list[Step]:
        if not isinstance(num, tuple):
            return super().steps(num)
        if len(num) != self.num_clients:
            return super().steps(num)  # which raises
        table = self._constant(num)
        return self._unequal(table[self._where.ids], max(num))

    def passes(self, num: int, role: str) -> list[Step]:
        data, size = self.host.data_of(role), self.batch_size(role)
        if size is None:
            return super().steps(num)
        most = max(1, round(num * data.room[role] / size))
        if data.alike(role):
            return super().steps(most)
        own = data.num_samples(self.positions, role)
        return self._unequal((num * own.double() / size).round().long().clamp(min=1), most)

    def _unequal(self, taus: Tensor, most: int) -> list[Step]:
        """Return steps of which each client takes as many as the device says."""
        if self._partly is None:
            raise NotCapturable("its clients take unequal numbers of steps")
        schedule = StepSchedule(self, None, most).on_device(taus)
        return [Step(self, schedule, index) for index in range(most)]

    def _constant(self, numbers: Sequence[int]) -> Tensor:
        """Return numbers on the device, which a capture must not copy there."""
        kept: dict[Any, Tensor] = self.host.__dict__.setdefault("_constants", {})
        key = tuple(numbers)
        if key not in kept:
            kept[key] = torch.tensor(numbers, device=self.device)
        return kept[key]

    def _charge(self, batch: Batch, *columns: str) -> None:
        if batch.active is None:
            super()._charge(batch, *columns)
        elif self._partly is None:
            raise NotCapturable("its charges depend on draws")
        else:
            self._partly.append(Partly(batch.active, columns, batch.size, batch.role))
