"""Clients of a simulation that are slow or do not answer."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.problem.draws import SERVER, Stream
from fedbilevel.settings import kinds

if TYPE_CHECKING:
    from fedbilevel.federation.algorithm import Algorithm


class Stragglers(NamedTuple):
    """Unequal work and failures of clients, for simulations with a server.

    slow: share of the clients, drawn once per run, that do only a part of the local steps.
    work: that part; a slow client takes at least one step.
    dropout: probability that a client does not answer in an outer iteration. If all clients of a
        cohort would drop out, one of them answers.

    All draws are addressed, so a run is the same on every engine and after a resume.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> unequal = fb.Stragglers(slow=0.4, work=0.2, dropout=0.3)
    >>> result = fb.solve(*Quadratic().build(), "fedbio", num_rounds=4, num_local_steps=5, stragglers=unequal)
    >>> result.ledger["rounds"]
    4
    """

    slow: float = 0.0
    work: float = 0.2
    dropout: float = 0.0

    def checked(self) -> Stragglers:
        for name, value, most in (("slow", self.slow, 1.0), ("dropout", self.dropout, 0.99)):
            if not isinstance(value, int | float) or not 0 <= value <= most:
                raise SettingError(f"stragglers.{name} is {value!r}, expected a share from 0 to {most:g}.")
        if not isinstance(self.work, int | float) or not 0 < self.work <= 1:
            raise SettingError(f"stragglers.work is {self.work!r}, expected a share above 0 and at most 1.")
        return self

    def slowed(self, algorithm: Algorithm, num_clients: int, seed: int) -> Algorithm:
        """Return the algorithm with fewer local steps for slow clients."""
        num_slow = round(self.slow * num_clients)
        if not num_slow:
            return algorithm
        hint = typing.get_type_hints(type(algorithm)).get("num_local_steps", int)
        if not any(typing.get_origin(kind) is tuple for kind in kinds(hint)):
            raise SettingError(
                f"{algorithm.name()} has no numbers of local steps by client, which slow clients need: leave "
                "stragglers.slow out, or use an algorithm that has them, such as fedavg, fedbio or simfbo."
            )
        if (epochs := getattr(algorithm, "num_local_epochs", None)) is not None:
            raise SettingError(
                f"num_local_epochs is {epochs}, and slow clients take a part of num_local_steps: give num_local_steps "
                "instead."
            )
        given = algorithm.num_local_steps  # type: ignore[attr-defined]
        num = given if isinstance(given, int) else max(given)
        slow = set(Stream(seed).order("slow clients", SERVER, num_clients, iteration=0, first=num_slow).tolist())
        steps = tuple(max(1, round(self.work * num)) if i in slow else num for i in range(num_clients))
        if given not in (num, steps):  # the record of a run has the numbers that were drawn
            raise SettingError(
                f"num_local_steps is {given!r}, one number per client, and stragglers.slow is {self.slow:g}: give one "
                "of them only."
            )
        return dataclasses.replace(algorithm, num_local_steps=steps)  # type: ignore[call-arg]

    def absent(self, stream: Stream, ids: Tensor, iteration: int) -> list[int]:
        """Return which of these clients do not answer in an outer iteration, at most all but one."""
        if not self.dropout:
            return []
        words = stream.bits("dropout", ids, iteration=iteration, call=0, steps=range(1), width=1)[:, 0, 0]
        gone = words.double() * 2.0**-32 < self.dropout
        if bool(gone.all()):
            gone &= ids != ids[words.argmax()]
        return [int(number) for number in ids[gone.to(torch.bool)]]
