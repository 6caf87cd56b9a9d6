"""Outer iterations of a server as CUDA graphs: cohorts, means, memory and the bookkeeping of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines.arenas import Setting, Traced
from fedbilevel.engines.cuda_graphs import rooms_of
from fedbilevel.engines.outer_graphs import Iterations
from fedbilevel.engines.server_trace import Later, TracedServer


class Members(NamedTuple):
    """One cohort of an outer iteration."""

    places: Tensor
    positions: Tensor
    weights: Tensor


@dataclass
class Walk:
    """What a replay depends on."""

    iteration: int
    draws: tuple[int, ...]  # of the server, in order
    cohorts: list[Members]
    rooms: tuple[Any, ...]  # for the samples of a client
    algorithms: list[Any] = field(default_factory=list)  # one for each outer iteration


class _Observed:
    """A federation that notes the server's draws and the number of new cohorts."""

    def __init__(self, fed: Any) -> None:
        self._fed, self.asks = fed, list[tuple[int, str, int, int]]()

    def draw(self, purpose: str, high: int) -> int:
        value = self._fed.draw(purpose, high)
        self.asks.append((self._fed.call, purpose, high, value))
        return int(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fed, name)


class ServerIterations(Iterations):
    def __init__(self, fed: Any) -> None:
        super().__init__(fed)
        self._asks: dict[Any, tuple[int, str, int] | None] = {}  # by kind and earlier draws: the next draw
        self._redraws: dict[Any, int] = {}  # by kind and draws: new cohorts
        self._all_rooms: tuple[Any, ...] | None = None

    def _excluded(self) -> str:
        fed = self.fed
        reasons = {
            "its rows pass through a layer of aggregation": fed.layer is not None,
            "some clients send wrong rows": fed.attack is not None,
            "its clients are in several processes": fed.group.size > 1,
            "a test drops answers": fed.drops is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _rows(self) -> int:
        return len(self.fed._positions)

    def _positions(self, walk: Walk, place: int) -> Tensor:
        return walk.cohorts[place].positions

    def _walk(self, basic: Any) -> tuple[Walk, Any] | None:
        fed, draws = self.fed, tuple[int, ...]()
        while (basic, draws) in self._asks and (ask := self._asks[basic, draws]) is not None:
            fed.call, purpose, high = ask
            draws += (fed.draw(purpose, high),)
        fed.call = 0
        if (basic, draws) not in self._redraws:
            return None
        cohorts = [self._members()]
        for _ in range(self._redraws[basic, draws]):
            fed._draw_cohort()
            cohorts.append(self._members())
        rooms = self._rooms_of(cohorts)
        facts = [(one.places.shape[0], self.fed._are_ones(one.weights)) for one in cohorts]
        return Walk(fed.iteration, draws, cohorts, rooms), (draws, rooms, *facts)

    def _rooms_of(self, cohorts: list[Members]) -> tuple[Any, ...]:
        """Return room for the samples of all cohorts, which is the same for all of them if all clients are alike."""
        if self._all_rooms is not None:
            return self._all_rooms
        found = rooms_of(self.host, torch.cat([one.positions for one in cohorts]))
        held = (self.host.data, *self.host.parts.values())
        if all(data.alike(role) for data in held for role in data.sizes):
            self._all_rooms = found
        return found

    def _members(self) -> Members:
        places, times = self.fed._present(())
        return Members(places, self.fed.roster.here(places), self.fed._counts(places, times))

    def _rewind(self) -> None:
        self.fed.call = self.fed._draws = 0
        self.fed._draw_cohort()

    def _observed(self, algorithm: Any, state: Any, basic: Any) -> Any:
        seen = _Observed(self.fed)
        new = algorithm.round(seen, state)
        draws: tuple[int, ...] = ()
        for *ask, value in seen.asks:
            self._asks[basic, draws] = tuple(ask)  # type: ignore[assignment]
            draws += (value,)
        self._asks[basic, draws], self._redraws[basic, draws] = None, self.fed._draws - 1
        return new

    def _joined(self, walks: Sequence[Walk]) -> Walk | None:
        if any(walk.draws for walk in walks):
            return None  # the same draws hardly ever follow each other again
        cohorts = [cohort for walk in walks for cohort in walk.cohorts]
        algorithms = [algorithm for walk in walks for algorithm in walk.algorithms]
        return Walk(walks[0].iteration, (), cohorts, walks[0].rooms, algorithms)

    def _trace(self, movers: Sequence[Any], given: Mapping[str, Any], fields: Any, setting: Setting) -> Traced:
        with TracedServer(self.fed, setting, given) as server:
            state = type_of(movers[0], fields, given)
            for number, algorithm in enumerate(movers):
                if number:
                    server.begin(number)
                state = algorithm.round(server, state)
        return server.traced(state)

    def _before(self, graph: Any) -> Any:
        fed, traced = self.fed, graph.traced
        marks = [store.marks() for store in self._stores()] if traced.fixed else []
        kept = {name: when.clone() for name, when in fed._kept_in.items()} if traced.script.keeps else {}
        return marks, dict(fed._versions), kept

    def _back(self, before: Any) -> None:
        marks, versions, kept = before
        for store, own in zip(self._stores(), marks, strict=False):
            store.unmark(own)
        self.fed._versions = versions
        self.fed._kept_in.update(kept)

    def _keep(self, script: Any, walk: Walk) -> Any:
        return script.keep(walk)

    def _book(self, script: Any, walk: Walk, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        script.pay(walk, inputs, outputs)

    def _cost(self, script: Any) -> tuple[int, int]:
        return script.rounds, script.work

    def _finished(self, value: Any, kept: Any) -> Any:
        return kept[value.name] if isinstance(value, Later) else value

    def _payers(self, walk: Walk, where: tuple[str, int]) -> tuple[str, Tensor]:
        return where[0], walk.cohorts[where[1]].positions


def type_of(algorithm: Any, fields: Any, given: Mapping[str, Any]) -> Any:
    """Return the state of an algorithm with the given values."""
    return algorithm.State(**{name: given[name] for name in fields})
