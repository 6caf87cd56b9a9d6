"""Whole outer iterations as CUDA graphs: one launch per outer iteration.

An outer iteration that occurs a third time with the same settings, shapes and draws of the server
is recorded. A replay reads its cohorts, weights, step sizes and number from two tensors, and finds
the memory of clients in rows that stay where they are. The engine repeats only its bookkeeping.

Nothing is trusted. The first replay, of a later outer iteration than the recorded one, runs beside
the usual computation, whose result is used. If both differ by more than rounding, or if recording
fails, whole outer iterations are refused: `Captures.refused` names the reason, and phases are
captured one by one.

Where the loop allows it, several outer iterations are launched before the first one is finished
(`rounds`), so that the device never waits for the processor. A replay is paid for when its values
are known to be finite; from the first one that is not, the outer iterations are undone and run as
usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.arenas import Arena, Flags, Setting, Traced, distinct, form, off, reason, shown, unchanged
from fedbilevel.engines.cuda_graphs import with_steps, without_steps
from fedbilevel.engines.partly_paid import PartlyPaid
from fedbilevel.errors import FedBilevelError
from fedbilevel.problem.layout import one_row

OUTER = "outer iteration"  # the name of a whole outer iteration in `Captures.refused`
_TIMES = 3  # occurrences after which an outer iteration is recorded
_PATIENCE = 60  # outer iterations without a replay after which the engine captures phases instead
_FAILURES = (NotCapturable, RuntimeError, TypeError, ValueError, AttributeError, LookupError, FedBilevelError)
_MOST = 32  # recorded outer iterations that are kept
_IN_FLIGHT = 16  # outer iterations that are launched before the first one is looked at
_SAVED = 2**28  # bytes of clients' rows that are saved for all of them together
_LARGE = 2**31  # bytes of rows from which computing takes longer than launching, and a graph would double the memory


More = Callable[[int, int, int], bool]


@dataclass
class _Graph:
    traced: Traced
    inputs: list[Tensor]
    ints: Arena
    floats: Arena
    replay: Callable[[], None]
    partly: PartlyPaid
    same: dict[str, int]  # values of the new state that are inputs, by the place of the input
    on_trial: bool = True

    @property
    def saved_bytes(self) -> int:
        results = (self.traced.results[label] for _, _, label in self.traced.saved)
        return sum(rows.numel() * rows.element_size() for rows in results)


class _Found(NamedTuple):
    """An outer iteration as it is known before it runs."""

    basic: Any
    walk: Any = None
    keys: tuple[Any, Any] = (None, None)  # with step sizes and without them
    graph: _Graph | None = None


@dataclass
class _Launched:
    """A replay that the device may not have finished."""

    graph: _Graph
    algorithm: Any
    state: Any
    given: list[Tensor]  # arrays of the state and of the engine
    walk: Any
    before: Any
    new: Any
    outputs: dict[int, Tensor]
    flags: Flags
    saved: list[tuple[Tensor, Tensor, Tensor]]  # memory, places, and rows before they were written
    iteration: int


class Iterations:
    """Outer iterations of one engine, replayed where possible.

    A subclass knows its engine: what an outer iteration depends on (`_walk`), how it is traced, and
    its bookkeeping.
    """

    def __init__(self, fed: Any) -> None:
        self.fed, self.host, self.captures = fed, fed.host, fed.host.captures
        self.replayed = self.usual = 0
        self._times: Counter[Any] = Counter()
        self._kept: dict[Any, _Graph] = {}
        self._settings: tuple[Any, tuple[Any, ...]] | None = None  # the last algorithm, and its settings without steps
        if why := self._excluded():
            self.captures.refused[OUTER] = why

    # ---- what an engine says --------------------------------------------------------------------------------------

    def _excluded(self) -> str:
        """Return why no outer iteration of this engine can be captured, or nothing."""
        raise NotImplementedError

    def _walk(self, basic: Any) -> tuple[Any, Any] | None:
        """Return what this outer iteration depends on, and the facts that shapes depend on.

        None: nothing is known yet about outer iterations of this kind.
        """
        raise NotImplementedError

    def _trace(self, algorithm: Any, given: Mapping[str, Any], fields: Sequence[str], setting: Setting) -> Traced:
        """Run the outer iteration on tensors that a replay can change.

        given: the state and the tensors of the engine.
        fields: names of the state.
        """
        raise NotImplementedError

    def _observed(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run the outer iteration as usual, and learn what `_walk` needs."""
        raise NotImplementedError

    def _rewind(self) -> None:
        """Begin the outer iteration again."""
        raise NotImplementedError

    def _keep(self, script: Any, walk: Any) -> Any:
        """Note what a launched outer iteration keeps at clients; return what `_finished` needs."""

    def _book(self, script: Any, walk: Any, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Repeat the bookkeeping of a recorded outer iteration."""
        raise NotImplementedError

    def _rounds(self, script: Any) -> int:
        """Return the rounds of a recorded outer iteration."""
        raise NotImplementedError

    def _settle(self, script: Any, results: Mapping[str, Tensor]) -> None:
        """Add to the bookkeeping what only the replay knows."""

    def _finished(self, value: Any, kept: Any) -> Any:
        """Return a value of the new state that is no tensor."""
        return value

    def _extras(self) -> dict[str, Tensor]:
        """Return tensors of the engine that belong to the state."""
        return {}

    def _adopt(self, extras: Mapping[str, Tensor]) -> None:
        """Take over new tensors of the engine."""

    def _stores(self) -> tuple[Any, ...]:
        return self.host.memory, self.host.kept

    def _before(self, graph: _Graph) -> Any:
        """Return what `_back` needs to begin this outer iteration again."""

    def _back(self, before: Any) -> None:
        """Return to the values of `_before`."""

    # ---- one outer iteration --------------------------------------------------------------------------------------

    def round(self, algorithm: Any, state: Any) -> Any:
        """Return the state after this outer iteration."""
        return self.rounds(lambda iteration: algorithm, state, lambda *_: False)

    def rounds(self, at: Callable[[int], Any], state: Any, more: More) -> Any:
        """Return the state after this outer iteration, and after the next ones while they may be run at once.

        `fed.iteration` is then the last of them.

        at: algorithm with the step sizes of an outer iteration.
        more: function of an outer iteration and the rounds before and after it; False ends with it.
        """
        fed, launched = self.fed, list[_Launched]()
        rounds, algorithm = fed.ledger.rounds, at(fed.iteration)
        while True:
            found = self._look(algorithm, state)
            if found is None or found.graph is None or found.graph.on_trial:
                now, state = fed.iteration, self._landed(launched) if launched else state
                return state if fed.iteration < now else self._slowly(algorithm, state, found)
            launched.append(self._launch(found.graph, algorithm, state, found.walk, len(launched)))
            self._times.update(found.keys)
            state, before, rounds = launched[-1].new, rounds, rounds + self._rounds(found.graph.traced.script)
            if not self._has_room(launched) or not more(fed.iteration, before, rounds):
                return self._landed(launched)
            algorithm = at(fed.iteration + 1)
            fed.begin(fed.iteration + 1, algorithm)

    def _has_room(self, launched: list[_Launched]) -> bool:
        """Return whether one more outer iteration may be launched."""
        return len(launched) < _IN_FLIGHT and (len(launched) + 1) * launched[-1].graph.saved_bytes <= _SAVED

    def _look(self, algorithm: Any, state: Any) -> _Found | None:
        """Return what is known about this outer iteration; None: it is refused."""
        if OUTER in self.captures.refused:
            return None
        try:
            if self._settings is None or self._settings[0] is not algorithm:
                self._settings = (algorithm, without_steps(algorithm))
            basic = (self._settings[1], form({**state._asdict(), **self._extras()}))
            hash(basic)
        except TypeError as error:
            self.captures.refused[OUTER] = f"its settings or state cannot be compared ({error})"
            return None
        walked = self._walk(basic) if self.fed.iteration > 1 else None  # the first may be unlike the others
        if walked is None:
            return _Found(basic)
        walk, facts = walked
        key, open_key = (algorithm, basic, facts), (basic, facts)
        graph = self._kept.get(key) or self._kept.get(open_key)
        if graph is not None and graph.traced.moved():
            self._kept = {one: kept for one, kept in self._kept.items() if kept is not graph}  # its rows have moved
            graph = None
        return _Found(basic, walk, (key, open_key), graph)

    def _slowly(self, algorithm: Any, state: Any, found: _Found | None) -> Any:
        """Run an outer iteration without a graph or beside one, and record it if it is the third of its kind."""
        if found is None:
            return self._refuse(self.captures.refused[OUTER], algorithm, state)
        if found.walk is None:
            return self._plainly(algorithm, state, found.basic)
        key, open_key = found.keys
        self._times.update(found.keys)
        if found.graph is not None:
            return self._tried(found.graph, algorithm, state, found.walk, found.basic)
        moving = self._times[key] < _TIMES <= self._times[open_key] - _TIMES
        if (self._times[key] >= _TIMES or moving) and len(self._kept) < _MOST:
            try:  # the first replay is one of the next outer iterations
                self._kept[open_key if moving else key] = self._capture(algorithm, state, found.walk, moving)
            except _FAILURES as error:
                return self._refuse(reason(error), algorithm, state)
        return self._plainly(algorithm, state, found.basic)

    def _plainly(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run as usual, without captured phases: their memory is better used for whole outer iterations."""
        self.usual += 1
        if self.usual > _PATIENCE + self.replayed:
            return self._refuse(
                f"of {self.usual + self.replayed} outer iterations, {self.usual} were unlike earlier ones",
                algorithm,
                state,
            )
        self._rewind()
        with self._without_captures():
            return self._observed(algorithm, state, basic)

    def _refuse(self, why: str, algorithm: Any, state: Any) -> Any:
        self.captures.refused[OUTER] = why
        self._kept.clear()
        self._rewind()
        return algorithm.round(self.fed, state)

    @contextmanager
    def _without_captures(self) -> Iterator[None]:
        self.host.captures = None
        try:
            yield
        finally:
            self.host.captures = self.captures

    def _replay(self, graph: _Graph, given: list[Tensor], walk: Any, slot: int = 0) -> None:
        graph.ints.fill(walk, slot)
        graph.floats.fill(walk, slot)
        if given:
            torch._foreach_copy_(graph.inputs, [one_row(value) for value in given])
        graph.replay()

    def _launch(self, graph: _Graph, algorithm: Any, state: Any, walk: Any, slot: int) -> _Launched:
        """Start a replay.

        slot: number of replays that may still be running.
        """
        walk.algorithm = algorithm
        before, given = self._before(graph), distinct({**state._asdict(), **self._extras()})
        self._replay(graph, given, walk, slot)
        results = graph.traced.results
        saved = [(rows, places.clone(), results[label].clone()) for rows, places, label in graph.traced.saved]
        values, outputs = self._outputs(graph, given)
        kept = self._keep(graph.traced.script, walk)
        new = type(state)(**{name: self._finished(values[name], kept) for name in state._fields})
        self._adopt({name: value for name, value in values.items() if name not in state._fields})
        flags, iteration = Flags(results["flags"]), self.fed.iteration
        return _Launched(graph, algorithm, state, given, walk, before, new, outputs, flags, saved, iteration)

    def _landed(self, launched: list[_Launched]) -> Any:
        """Pay for replays, and return the state after the last one or after the first that went wrong."""
        for number, one in enumerate(launched):
            graph, walk = one.graph, one.walk
            self._book(graph.traced.script, walk, dict(enumerate(one.given)), one.outputs)  # while the device computes
            flags = one.flags.read()
            graph.partly.pay(flags[1:], partial(self._payers, walk))
            self._settle(graph.traced.script, graph.traced.results)
            if not bool(flags[0]):
                return self._run_again(launched[number:])
            self.replayed += 1
        return launched[-1].new

    def _run_again(self, launched: list[_Launched]) -> Any:
        """Run an outer iteration with a non-finite value as usual, which names the client; undo later ones.

        The costs of the replay stay.
        """
        for one in reversed(launched):
            for rows, places, old in reversed(one.saved):
                rows.index_copy_(0, places, old)
            self._back(one.before)
        first, ledger = launched[0], self.host.ledger
        paid = ledger.state_dict()
        if self.fed.iteration != first.iteration:
            self.fed.begin(first.iteration, first.algorithm)
        self._rewind()
        try:
            with self._without_captures():
                return first.algorithm.round(self.fed, first.state)
        finally:
            ledger.load_state_dict(paid)

    def _tried(self, graph: _Graph, algorithm: Any, state: Any, walk: Any, basic: Any) -> Any:
        """Run as usual and beside it the first replay; keep the graph if both agree."""
        walk.algorithm, before = algorithm, {**state._asdict(), **self._extras()}
        copies, given = [store.copied() for store in self._stores()], distinct(before)
        self._replay(graph, given, walk)
        got, _ = self._outputs(graph, given)
        rows = [{name: shelf.rows.clone() for name, shelf in store.copied().items()} for store in self._stores()]
        places = [{name: store.slots(name, torch.arange(store.num_rows)) for name in some}
                  for store, some in zip(self._stores(), rows, strict=True)]  # fmt: skip
        for store, copied in zip(self._stores(), copies, strict=True):
            store.restore(copied)
        new = self._plainly(algorithm, state, basic)
        after = {**new._asdict(), **self._extras()}
        worst = max((off(got[name], after[name], before[name]) for name in got if isinstance(got[name], Tensor)),
                    default=0.0)  # fmt: skip
        for store, some, where in zip(self._stores(), rows, places, strict=True):
            for name, found in some.items():
                own = (where[name] >= 0).nonzero()[:, 0]
                if len(own):
                    mine = found[where[name][own].to(found.device)]
                    worst = max(worst, off(mine, store.own(name, own), torch.zeros_like(mine)))
        if worst > 1:
            self.captures.refused[OUTER] = f"a replay differed {worst:.3g} times as much as rounding explains"
            self._kept.clear()
        graph.on_trial = False
        return new

    def _outputs(self, graph: _Graph, given: list[Tensor]) -> tuple[dict[str, Any], dict[int, Tensor]]:
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

    def _payers(self, walk: Any, where: Any) -> tuple[str, Tensor]:
        """Return the phase and the positions of the clients of a charge."""
        raise NotImplementedError

    # ---- recording ------------------------------------------------------------------------------------------------

    def _capture(self, algorithm: Any, state: Any, walk: Any, moving: bool) -> _Graph:
        """Record the outer iteration; it changes nothing but tensors of its own.

        moving: whether step sizes become tensors.
        """
        host, given = self.host, {**state._asdict(), **self._extras()}
        if sum(value.numel() * value.element_size() for value in distinct(given)) * self._rows() > _LARGE:
            raise NotCapturable("its rows are so large that launching does not count")
        walk.algorithm = algorithm
        ints, floats = Arena(torch.int64, host.device), Arena(torch.float64, host.device)
        inputs = [one_row(value).clone() for value in distinct(given)]
        values = shown(given, inputs)
        copies = [store.copied() for store in self._stores()]

        def run(buys: Mapping[int, Sequence[str]], *, frozen: bool) -> tuple[Traced, Mapping[int, Any]]:
            ints.begin()
            floats.begin()
            mover, setting = algorithm, Setting(walk, ints, floats, buys, frozen)
            if moving:
                method, steps = with_steps(algorithm.round, host.device)
                mover = method.__self__
                for name in steps:
                    step = floats.take(walk, partial(_step, name))
                    object.__setattr__(mover, name, step.view(()))  # settings are frozen
            with torch.no_grad(), self._without_captures():
                return self._trace(mover, values, state._fields, setting), setting.asked

        try:
            _, asked = run({}, frozen=False)
            buys = {place: self._bought(walk, place, wanted) for place, wanted in asked.items()}
            ints.pack()
            floats.pack()
            for _ in range(2):  # so that every derivative has been measured, traced and, if asked for, compiled
                run(buys, frozen=False)
            with cuda_graphs.without_waits(host.device):
                run(buys, frozen=True)
            kept: list[Traced] = []  # the first one: a recorder without graphs runs it again

            def last() -> dict[str, Tensor]:
                traced, _ = run(buys, frozen=True)
                kept[:] = kept or [traced]
                return traced.results

            results, replay = cuda_graphs.recorded(last, host.device)
            kept[0].results = results
            same = {name: place for name, value in kept[0].state.items() if isinstance(value, Tensor)
                    for place, buffer in enumerate(inputs) if unchanged(value, buffer)}  # fmt: skip
            return _Graph(kept[0], inputs, ints, floats, replay, PartlyPaid(host, kept[0].partly), same)
        finally:
            for store, copied in zip(self._stores(), copies, strict=True):
                store.restore(copied)

    def _bought(self, walk: Any, place: int, asked: Mapping[str, int]) -> list[str]:
        """Return roles of which a cohort requests as many features as it has samples."""
        positions, data_of = self._positions(walk, place), self.host.data_of
        return [role for role, number in asked.items() if number >= int(data_of(role).sizes[role][positions].sum())]

    def _positions(self, walk: Any, place: int) -> Tensor:
        """Return the positions of a cohort."""
        raise NotImplementedError

    def _rows(self) -> int:
        """Return how many rows a value of the state becomes at the clients."""
        return 1


def _step(name: str, walk: Any) -> Tensor:
    return torch.tensor([getattr(walk.algorithm, name)], dtype=torch.float64)
