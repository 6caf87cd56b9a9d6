"""Local steps of the clients of a phase, and the samples of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbilevel.problem.client_data import Batch

if TYPE_CHECKING:
    from fedbilevel.federation.clients import Clients

_CHUNK, _CHUNK_THERE = 16, 128  # steps drawn at once, on the CPU and on a GPU: such a draw costs as much as one step


class Step:
    """One local step.

    With unequal numbers of steps some clients finish before others; `where` keeps their values.
    """

    def __init__(self, clients: Clients, schedule: StepSchedule, index: int) -> None:
        self._clients, self._schedule, self.index = clients, schedule, index
        self.count: Tensor = schedule.count  # (k, 1) local steps of each client in this phase
        self._batches: dict[tuple[str, str, int], Batch] = {}

    @property
    def active(self) -> Tensor | None:
        """Flags (k,) on the CPU of the clients that still take steps; None means all clients."""
        return None if self._schedule.equal else self._schedule.taus > self.index

    def batch(self, role: str, purpose: str, *, times: int = 1) -> Batch:
        """Return samples of `role` from the stream `purpose`.

        Repeated calls return the same object, so that two evaluations share their samples.

        times: number of batches to join into one.
        """
        size = self._clients.batch_size(role)
        alike = size is None and not self._clients.num_draws(role)  # all samples: one batch, whatever it is for
        key = (role, "", 1) if alike else (role, purpose, times)
        if key not in self._batches:
            self._batches[key] = self._schedule.batch(role, purpose, self.index, size, times, self.active)
        return self._batches[key]

    def draw(self, purpose: str, high: int) -> Tensor:
        return self._clients.draw(purpose, high, step=self.index)

    def where(self, new: Any, old: Any) -> Any:
        if self._schedule.equal:
            return new
        if isinstance(new, tuple):
            return tuple(self.where(a, b) for a, b in zip(new, old, strict=True))
        mask = (self._schedule.taus > self.index).to(new.device)[:, None]
        return torch.where(mask, new, old)


class StepSchedule:
    """Steps of one phase, with indices drawn for several steps at a time."""

    def __init__(self, clients: Clients, taus: Tensor | None, longest: int) -> None:
        """Prepare the steps of a phase.

        taus: steps of each client; None: `longest` steps of every client.
        """
        self.clients, self._taus = clients, taus
        self.num = (
            int(taus.max()) if taus is not None and len(taus) else longest
        )  # a process without a client of the cohort takes the same steps
        self.equal = taus is None or bool((taus == self.num).all())
        if self.equal or taus is None:
            self.count: Tensor = clients.host.full(len(clients), self.num)
        else:
            self.count = taus.to(clients.dtype).to(clients.device)[:, None]
        self._drawn: dict[tuple[str, str, int], tuple[int, Tensor]] = {}

    def on_device(self, taus: Tensor) -> StepSchedule:
        """Take as many steps of each client as a tensor on the device says, for captured outer iterations."""
        self._taus, self.equal, self.count = taus, False, taus.to(self.clients.dtype)[:, None]
        return self

    @property
    def taus(self) -> Tensor:
        """Steps of each client (k,), on the CPU outside captured outer iterations."""
        return torch.full((len(self.clients),), self.num) if self._taus is None else self._taus

    def batch(self, role: str, purpose: str, index: int, size: int | None, times: int, active: Tensor | None) -> Batch:
        batch = self._samples(role, purpose, index, size, times, active)
        num = self.clients.num_draws(role)
        return batch.drawn(self.clients.numbers(batch, purpose, index, num)) if num else batch

    def _samples(
        self, role: str, purpose: str, index: int, size: int | None, times: int, active: Tensor | None
    ) -> Batch:
        clients = self.clients
        data = clients.host.data_of(role)
        if size is None:
            return data.batch(clients.positions, role, None, active)
        chunk = _CHUNK if clients.device.type == "cpu" else _CHUNK_THERE
        start = index - index % chunk
        key = (role, purpose, times)
        if key not in self._drawn or self._drawn[key][0] != start:
            steps = range(start, min(start + chunk, max(self.num, index + 1)))
            drawn = clients.sample_indices(role, purpose, steps, size * times)
            data.announce(clients.positions, role, drawn)
            self._drawn[key] = (start, drawn)
        return data.batch(clients.positions, role, self._drawn[key][1][:, index - start], active)
