"""Bookkeeping of a captured outer iteration of a server: its charges, and the arrays that clients hold.

A recorded outer iteration always costs the same up to two facts: which clients are in its cohorts,
and which of them already hold an array. So all sums are made once, when the outer iteration is
recorded. A replay finds the clients that lack an array by a few operations on flags of all arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedbilevel.federation.algorithm import Kept
from fedbilevel.federation.clients import Bill
from fedbilevel.federation.standing import Each, Standing

_FEW = 10_000  # clients of whom it is remembered what they lacked
_CELLS = 2**20  # flags of all arrays and clients; with more of them only clients of the cohorts are looked at


@dataclass
class Call:
    """Bookkeeping of one call of a phase.

    offset: number of recorded outer iterations before its own.
    """

    phase: str
    cohort: int
    offset: int = 0
    down: list[tuple[int, int, int]] = field(default_factory=list)  # array, floats, bytes of a float
    up: list[tuple[int, int]] = field(default_factory=list)  # floats, bytes of a float
    kept: list[str] = field(default_factory=list)
    bill: Bill = field(default_factory=Bill)


class _Sent(NamedTuple):
    """One array that is sent to a cohort."""

    cohort: int
    phase: int
    floats: int
    num_bytes: int


class _Sending(NamedTuple):
    """Messages of one replay.

    paid: sums over clients, by phase.
    once: column, clients and the amount of each client.
    some: places of the clients in `held`.
    held: by array, flags of the clients that hold it afterwards.
    """

    paid: list[tuple[str, Mapping[str, int]]]
    once: list[tuple[str, Any, np.ndarray]]
    some: Any
    held: np.ndarray


class _Groups(NamedTuple):
    """What depends on the cohorts alone, kept while they are the same.

    sent: messages, by the clients that held an array of the state before.
    """

    cohorts: list[Tensor]
    places: list[np.ndarray]
    ids: list[np.ndarray]
    paid: list[tuple[str, Mapping[str, int]]]
    sent: dict[bytes | None, _Sending]


class Book:
    """Costs of one recorded outer iteration.

    calls: its calls in order.
    arrays: numbers of its arrays by the id of their tensor; those of the state come first.
    num_given: number of arrays of the state.
    sizes: number of clients of each cohort.
    """

    def __init__(
        self, fed: Any, calls: Sequence[Call], arrays: Mapping[int, int], num_given: int, sizes: Sequence[int]
    ) -> None:
        self._fed, self._arrays, self._calls = fed, arrays, calls
        self._phases = list(dict.fromkeys(call.phase for call in calls))
        self._paid: dict[str, Counter[str]] = {phase: Counter() for phase in self._phases}
        self.rounds = sum(bool(call.up) for call in calls)
        self.work = len(calls) + sum(sum(call.bill.calls.values()) for call in calls)
        self.keeps = [(name, call.cohort, call.offset) for call in calls for name in call.kept]
        amounts: list[Counter[str]] = [Counter() for _ in sizes]
        whole: Counter[tuple[str, int, str]] = Counter()  # by phase, cohort and role: evaluations of all samples

        def charge(phase: str, cohort: int, column: str, amount: int) -> None:
            amounts[cohort][column] += amount
            self._paid[phase][column] += amount * sizes[cohort]

        for call in calls:
            self._paid[call.phase]["rounds"] += bool(call.up)
            for column, amount in call.bill.calls.items():
                charge(call.phase, call.cohort, column, amount)
            for role, times in call.bill.whole.items():
                whole[call.phase, call.cohort, role] += times
            for floats, size in call.up:
                charge(call.phase, call.cohort, "floats_up", floats)
                charge(call.phase, call.cohort, "bytes_up", floats * size)
        self._sent: dict[int, list[_Sent]] = {}
        for array, sent in self._messages().items():
            if array >= num_given and len(sent) == 1:  # a new array, sent to one cohort: everybody in it lacks it
                (one,) = sent
                charge(self._phases[one.phase], one.cohort, "floats_down", one.floats)
                charge(self._phases[one.phase], one.cohort, "bytes_down", one.num_bytes)
            else:
                self._sent[array] = sent
        self._place = {array: row for row, array in enumerate(self._sent)}
        self._only = {array: sent[0].cohort for array, sent in self._messages().items() if array not in self._sent}
        self._whole = [(phase, cohort, self._samples_of(role), times) for (phase, cohort, role), times in whole.items()]
        each = [Each(cohort, "samples", own, times) for _, cohort, own, times in self._whole]
        self._standing = Standing([dict(one) for one in amounts], each)
        self._make_table(len(sizes))
        self._last: _Groups | None = None

    def _messages(self) -> dict[int, list[_Sent]]:
        """Return by array to which cohorts it is sent first, in order; a cohort needs an array once."""
        found: dict[int, dict[int, _Sent]] = {}
        for call in self._calls:
            for array, floats, size in call.down:
                one = _Sent(call.cohort, self._phases.index(call.phase), floats, floats * size)
                found.setdefault(array, {}).setdefault(call.cohort, one)
        return {array: list(sent.values()) for array, sent in found.items()}

    def _samples_of(self, role: str) -> np.ndarray:
        """Return the numbers of samples by client."""
        host = self._fed.host
        own = np.zeros(self._fed.num_clients, dtype=np.int64)
        own[host.ids.numpy()] = host.data_of(role).sizes[role].numpy()
        return own

    def _make_table(self, num_cohorts: int) -> None:
        """Lay out the messages as matrices, array by array; an empty place is a cohort of nobody."""
        most = max((len(sent) for sent in self._sent.values()), default=0)
        empty = _Sent(num_cohorts, 0, 0, 0)
        rows = [sent + [empty] * (most - len(sent)) for sent in self._sent.values()]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), most, len(_Sent._fields))
        self._cohorts, self._phase_of, floats, num_bytes = (table[:, :, part] for part in range(len(_Sent._fields)))
        self._each = {"floats_down": floats, "bytes_down": num_bytes}
        self._num_cohorts = num_cohorts

    # ---- a replay -------------------------------------------------------------------------------------------------

    def keep(self, walk: Any) -> dict[str, Kept]:
        """Return what a replay keeps at clients."""
        return {
            name: self._fed._keep(name, walk.cohorts[cohort].places, walk.iteration + offset)
            for name, cohort, offset in self.keeps
        }

    def pay(self, walk: Any, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Charge a replay.

        inputs: arrays of the old state by number.
        outputs: arrays of the new state by the id of the recorded tensor.
        """
        fed, ledger = self._fed, self._fed.ledger
        if self._last is None or any(
            one.places is not other for one, other in zip(walk.cohorts, self._last.cohorts, strict=True)
        ):
            self._last = self._groups([members.places for members in walk.cohorts])
        groups = self._last
        ledger.charge_standing(self._standing, groups.ids)
        ledger.rounds += self.rounds
        for phase, paid in groups.paid:
            ledger.add(phase, paid)
        self._send(groups, inputs, outputs)
        fed.call += len(self._calls)
        if self._calls:
            fed.num_answers = len(groups.places[self._calls[-1].cohort])

    def _groups(self, cohorts: list[Tensor]) -> _Groups:
        """Return what depends on the cohorts alone."""
        places, numbers = [one.numpy() for one in cohorts], self._fed.ids.numpy()
        ids = [numbers[one] for one in places]
        paid = {phase: Counter(own) for phase, own in self._paid.items()}
        for phase, cohort, own, times in self._whole:
            paid[phase]["samples"] += int(own[ids[cohort]].sum()) * times
        return _Groups(cohorts, places, ids, list(paid.items()), {})

    def _send(self, groups: _Groups, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Charge arrays to the clients that lack them, and note that these clients hold them."""
        fed, ledger = self._fed, self._fed.ledger
        masks = {number: fed._held.mask(value).numpy() for number, value in inputs.items()}
        key = b"".join(mask.tobytes() for mask in masks.values()) if fed.num_clients <= _FEW else None
        sending = groups.sent.get(key)
        if sending is None:
            sending = self._sending(groups, masks)
            if key is not None:
                groups.sent[key] = sending
        for phase, paid in sending.paid:
            ledger.add(phase, paid)
        for column, clients, amounts in sending.once:
            ledger.charge_once(column, clients, amounts)
        for array, mask in masks.items():
            if array in self._place:
                mask[sending.some] = sending.held[self._place[array]]
        for number, value in outputs.items():
            array = self._arrays.get(number, -1)
            if array in masks:
                fed._held.mask(value).numpy()[:] = masks[array]
            elif array in self._place:
                fed._held.mask(value).numpy()[sending.some] = sending.held[self._place[array]]
            elif array in self._only:
                fed._held.mask(value).numpy()[groups.places[self._only[array]]] = True

    def _sending(self, groups: _Groups, masks: Mapping[int, np.ndarray]) -> _Sending:
        """Return what the messages cost, and which clients hold which array afterwards.

        masks: by array of the state, the clients that hold it before.
        """
        fed, places = self._fed, groups.places
        few = fed.num_clients * self._cohorts.size > _CELLS
        some: Any = np.unique(np.concatenate(places)) if few else slice(None)
        if not self._sent:
            return _Sending([], [], some, np.zeros((0, 0), dtype=bool))
        spots = [np.searchsorted(some, one) for one in places] if few else places
        members = np.zeros((self._num_cohorts + 1, len(some) if few else fed.num_clients), dtype=bool)
        for row, one in zip(members, spots, strict=False):
            row[one] = True
        asked = members[self._cohorts]  # by array, message and client
        held = np.zeros((len(asked), asked.shape[1] + 1, asked.shape[2]), dtype=bool)
        for array, row in self._place.items():
            if array in masks:
                held[row, 0] = masks[array][some]
        held[:, 1:] = asked
        np.logical_or.accumulate(held, axis=1, out=held)
        asked &= ~held[:, :-1]
        times = np.count_nonzero(asked, axis=2)
        num = slice(None) if fed._in_order and not few else fed.ids.numpy()[some]
        sums = {phase: dict[str, int]() for phase in self._phases}
        once = []
        for column, each in self._each.items():
            paid = np.bincount(self._phase_of.ravel(), (times * each).ravel()).tolist()
            for phase, amount in zip(self._phases, paid, strict=False):
                sums[phase][column] = int(amount)
            if (times * each).any():
                once.append((column, num, (asked * each[:, :, None]).sum((0, 1))))
        return _Sending([(phase, paid) for phase, paid in sums.items() if any(paid.values())], once, some, held[:, -1])
