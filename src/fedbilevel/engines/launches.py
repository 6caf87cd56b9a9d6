"""Replays of recorded outer iterations that are launched before the first one is finished.

A replay is paid for when its values are known to be finite. From the first one that is not, the
outer iterations are undone and run as usual, which names the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.arenas import Arena, Flags, Traced, distinct
from fedbilevel.engines.partly_paid import PartlyPaid
from fedbilevel.problem.layout import one_row

IN_FLIGHT = 16  # replays that are launched before the first one is looked at
SAVED = 2**28  # bytes of clients' rows that are saved, and of new states, for all of them together


@dataclass
class Graph:
    """One recorded outer iteration, or several in a row.

    same: values of the new state that are inputs, by the place of the input.
    span: number of outer iterations.
    longer: graphs of this outer iteration and the next ones, by their number.
    is_alone: whether such graphs are of no use.
    """

    traced: Traced
    inputs: list[Tensor]
    ints: Arena
    floats: Arena
    replay: Callable[[], None]
    partly: PartlyPaid
    same: dict[str, int]
    span: int = 1
    on_trial: bool = True
    longer: dict[int, Graph] = field(default_factory=dict)
    is_alone: bool = False

    @property
    def saved_bytes(self) -> int:
        results = (self.traced.results[label] for _, _, label in self.traced.saved)
        return sum(rows.numel() * rows.element_size() for rows in results)


@dataclass
class Launched:
    """A replay that the device may not have finished.

    given: arrays of the state and of the engine.
    saved: memory, places, and rows before they were written.
    iteration: the first of its outer iterations.
    """

    graph: Graph
    state: Any
    given: list[Tensor]
    walk: Any
    before: Any
    new: Any
    outputs: dict[int, Tensor]
    flags: Flags
    told: dict[str, Flags]
    saved: list[tuple[Tensor, Tensor, Tensor]]
    iteration: int

    @property
    def new_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self.outputs.values())


class Launches:
    """Launched outer iterations of one engine; a subclass knows its engine."""

    fed: Any
    host: Any
    captures: Any
    replayed: int

    # ---- what an engine says --------------------------------------------------------------------------------------

    def _rewind(self) -> None:
        """Begin the outer iteration again."""
        raise NotImplementedError

    def _keep(self, script: Any, walk: Any) -> Any:
        """Note what the next outer iterations must know of launched ones; return what `_finished` needs."""

    def _book(self, script: Any, walk: Any, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Repeat the bookkeeping of recorded outer iterations."""
        raise NotImplementedError

    def _told(self, graph: Graph) -> dict[str, Flags]:
        """Return copies of results that `_settle` needs."""
        return {}

    def _settle(self, script: Any, told: Mapping[str, Flags]) -> None:
        """Add to the bookkeeping what only the replay knows."""

    def _payers(self, walk: Any, where: Any) -> tuple[str, Tensor]:
        """Return the phase and the positions of the clients of a charge."""
        raise NotImplementedError

    def _finished(self, value: Any, kept: Any) -> Any:
        """Return a value of the new state that is no tensor."""
        return value

    def _extras(self) -> dict[str, Tensor]:
        """Return tensors of the engine that belong to the state."""
        return {}

    def _adopt(self, extras: Mapping[str, Tensor]) -> None:
        """Take over new tensors of the engine."""

    def _before(self, graph: Graph) -> Any:
        """Return what `_back` needs to begin this outer iteration again."""

    def _back(self, before: Any) -> None:
        """Return to the values of `_before`."""

    # ---- replays --------------------------------------------------------------------------------------------------

    @contextmanager
    def _without_captures(self) -> Iterator[None]:
        self.host.captures = None
        try:
            yield
        finally:
            # the first message of a run may show that only some clients fit, who then work without captures
            self.host.captures = self.captures if self.host.at_once is None else None

    def _has_room(self, launched: list[Launched]) -> bool:
        """Return whether one more replay may be launched."""
        num, last = len(launched), launched[-1]
        return num < IN_FLIGHT and (num + 1) * max(last.graph.saved_bytes, last.new_bytes) <= SAVED

    def _replay(self, graph: Graph, given: list[Tensor], walk: Any, slot: int = 0) -> None:
        graph.ints.fill(walk, slot)
        graph.floats.fill(walk, slot)
        if given:
            torch._foreach_copy_(graph.inputs, [one_row(value) for value in given])
        graph.replay()

    def _launch(self, graph: Graph, state: Any, walk: Any, slot: int) -> Launched:
        """Start a replay.

        slot: number of replays that may still be running.
        """
        before, given = self._before(graph), distinct({**state._asdict(), **self._extras()})
        self._replay(graph, given, walk, slot)
        results = graph.traced.results
        saved = [(rows, places.clone(), results[label].clone()) for rows, places, label in graph.traced.saved]
        values, outputs = self._outputs(graph, given)
        kept = self._keep(graph.traced.script, walk)
        new = type(state)(**{name: self._finished(values[name], kept) for name in state._fields})
        self._adopt({name: value for name, value in values.items() if name not in state._fields})
        flags, told = Flags(results["flags"]), self._told(graph)
        return Launched(graph, state, given, walk, before, new, outputs, flags, told, saved, walk.iteration)

    def _landed(self, launched: list[Launched]) -> Any:
        """Pay for replays, and return the state after the last one or after the first that went wrong."""
        for number, one in enumerate(launched):
            traced, walk = one.graph.traced, one.walk
            flags = one.flags.read()
            if not bool(flags[0]):
                return self._run_again(launched[number:])
            self._book(traced.script, walk, dict(enumerate(one.given)), one.outputs)  # while the device computes
            one.graph.partly.pay(flags[1:], partial(self._payers, walk))
            self._settle(traced.script, one.told)
            self.replayed += one.graph.span
        return launched[-1].new

    def _run_again(self, launched: list[Launched]) -> Any:
        """Undo replays, and run the first outer iteration of the first one as usual."""
        for one in reversed(launched):
            for rows, places, old in reversed(one.saved):
                rows.index_copy_(0, places, old)
            self._back(one.before)
        first = launched[0]
        algorithm = first.walk.algorithms[0]
        if self.fed.iteration != first.iteration:
            self.fed.begin(first.iteration, algorithm)
        self._rewind()
        with self._without_captures():
            return algorithm.round(self.fed, first.state)

    def _outputs(self, graph: Graph, given: list[Tensor]) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """Return copies of the new values by name and by number, because the next replay overwrites them."""
        traced, copies = graph.traced, dict[int, Tensor]()
        new: dict[str, Any] = {}
        for name, value in traced.state.items():
            if not isinstance(value, Tensor):
                new[name] = value
                continue
            if name in graph.same:
                new[name] = given[graph.same[name]]
                continue
            if id(value) not in copies:
                copies[id(value)] = cuda_graphs.copied(traced.results[f"state.{name}"])
            new[name] = copies[id(value)]
        return new, copies
