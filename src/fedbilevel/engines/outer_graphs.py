"""Whole outer iterations as CUDA graphs: one launch per outer iteration, or per several of them.

An outer iteration that occurs a third time with the same settings, shapes and draws of the server
is recorded. A replay reads its cohorts, weights, step sizes and number from two tensors, and finds
the memory of clients in rows that stay where they are. The engine repeats only its bookkeeping.

Nothing is trusted. The first replay, of a later outer iteration than the recorded one, runs beside
the usual computation, whose result is used. If both differ by more than rounding, or if recording
fails, whole outer iterations are refused: `Captures.refused` names the reason, and phases are
captured one by one.

Where the loop allows it, several replays are launched before the first one is finished, so that the
device does not wait for the processor (`launches`). Small outer iterations take less time than
their launch: after many replays, several in a row are recorded as one graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.arenas import Arena, Setting, Traced, distinct, form, off, reason, shown, unchanged
from fedbilevel.engines.cuda_graphs import with_steps, without_steps
from fedbilevel.engines.launches import Graph, Launched, Launches
from fedbilevel.engines.partly_paid import PartlyPaid
from fedbilevel.errors import FedBilevelError
from fedbilevel.problem.layout import one_row

OUTER = "outer iteration"  # the name of a whole outer iteration in `Captures.refused`
_TIMES = 3  # occurrences after which an outer iteration is recorded
_PATIENCE = 60  # outer iterations without a replay after which the engine captures phases instead
_FAILURES = (NotCapturable, RuntimeError, TypeError, ValueError, AttributeError, LookupError, FedBilevelError)
_MOST = 32  # recorded outer iterations that are kept
_LARGE = 2**31  # bytes of rows from which computing takes longer than launching, and a graph would double the memory
_WORK = 128  # calls of phases and derivatives that take a GPU longer than their launch
_SPAN = 32  # outer iterations in one graph at most
_PAYS = 8  # a graph of several is recorded after so many times as many replays, which it then saves

At = Callable[[int], Any]
More = Callable[[int, int, int], bool]


class _Found(NamedTuple):
    """An outer iteration as it is known before it runs.

    keys: what it is recorded under, with step sizes and without them.
    """

    basic: Any
    walk: Any = None
    keys: tuple[Any, Any] = (None, None)
    graph: Graph | None = None


class Iterations(Launches):
    """Outer iterations of one engine, replayed where possible.

    A subclass knows its engine: what an outer iteration depends on (`_walk`), how it is traced, and
    its bookkeeping.
    """

    def __init__(self, fed: Any) -> None:
        self.fed, self.host, self.captures = fed, fed.host, fed.host.captures
        self.replayed = self.usual = 0
        self._times: Counter[Any] = Counter()
        self._kept: dict[Any, Graph] = {}
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

    def _joined(self, walks: Sequence[Any]) -> Any:
        """Return what several outer iterations in a row depend on; None: they cannot be recorded together."""

    def _trace(self, movers: Sequence[Any], given: Mapping[str, Any], fields: Sequence[str], setting: Setting) -> Traced:
        """Run outer iterations on tensors that a replay can change.

        movers: algorithm of each outer iteration.
        given: the state and the tensors of the engine.
        fields: names of the state.
        """
        raise NotImplementedError

    def _observed(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run the outer iteration as usual, and learn what `_walk` needs."""
        raise NotImplementedError

    def _cost(self, script: Any) -> tuple[int, int]:
        """Return the rounds of recorded outer iterations, and their calls of phases and derivatives."""
        raise NotImplementedError

    def _positions(self, walk: Any, place: int) -> Tensor:
        """Return the positions of a cohort."""
        raise NotImplementedError

    def _rows(self) -> int:
        """Return how many rows a value of the state becomes at the clients."""
        return 1

    def _stores(self) -> tuple[Any, ...]:
        return self.host.memory, self.host.kept

    # ---- outer iterations -----------------------------------------------------------------------------------------

    def round(self, algorithm: Any, state: Any) -> Any:
        """Return the state after this outer iteration."""
        return self.rounds(lambda iteration: algorithm, state, lambda *_: False)

    def rounds(self, at: At, state: Any, more: More) -> Any:
        """Return the state after this outer iteration, and after the next ones while nobody needs the state.

        `fed.iteration` is then the last of them.

        at: algorithm with the step sizes of an outer iteration.
        more: function of an outer iteration and the rounds before and after it; False ends with it.
        """
        fed, launched = self.fed, list[Launched]()
        rounds, algorithm = fed.ledger.rounds, at(fed.iteration)
        while True:
            now, found = fed.iteration, self._look(algorithm, state)
            graph, walk = (None, None) if found is None else (found.graph, found.walk)
            if graph is not None and not graph.on_trial:
                graph, walk = self._several(found, state, at, more, rounds) or (graph, walk)
            if graph is None or graph.on_trial:
                state = self._landed(launched) if launched else state
                if launched and fed.iteration < now:  # an earlier one went wrong
                    return state
                return self._slowly(algorithm, state, found, graph, walk)
            launched.append(self._launch(graph, state, walk, len(launched)))
            self._times.update(found.keys)
            cost, _ = self._cost(graph.traced.script)
            state, rounds = launched[-1].new, rounds + cost
            if not self._has_room(launched) or not more(fed.iteration, rounds - cost // graph.span, rounds):
                return self._landed(launched)
            algorithm = at(fed.iteration + 1)
            fed.begin(fed.iteration + 1, algorithm)

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
        walk.algorithms = [algorithm]
        keys = (algorithm, basic, facts), (basic, facts)
        graph = self._kept.get(keys[0]) or self._kept.get(keys[1])
        if graph is not None and graph.traced.moved():
            self._kept = {one: kept for one, kept in self._kept.items() if kept is not graph}  # its rows have moved
            graph = None
        return _Found(basic, walk, keys, graph)

    def _several(self, found: Any, state: Any, at: At, more: More, rounds: int) -> tuple[Graph, Any] | None:
        """Return the graph of this outer iteration and the next ones; the last of them has then begun.

        None: they must be launched one by one.

        rounds: number of rounds so far.
        """
        graph, fed, span = found.graph, self.fed, 1
        cost, work = self._cost(graph.traced.script)
        while span < _SPAN and span * work < _WORK:
            span *= 2
        if graph.is_alone or span == 1 or self.replayed < _PAYS * span:
            return None
        first, moving = fed.iteration, found.keys[0] not in self._kept
        if not all(more(first + i, rounds + i * cost, rounds + (i + 1) * cost) for i in range(span - 1)):
            return None
        walks, facts = [found.walk], found.keys[1][1]
        for iteration in range(first + 1, first + span):
            algorithm = at(iteration)
            fed.begin(iteration, algorithm)
            walked = self._walk(found.basic)
            if walked is None or walked[1] != facts or not (moving or algorithm == walks[0].algorithms[0]):
                break
            walked[0].algorithms = [algorithm]
            walks.append(walked[0])
        walk = self._joined(walks) if len(walks) == span else None
        try:
            if walk is None:
                raise NotCapturable("the next outer iterations are unlike this one")
            if graph.longer is None or graph.longer.traced.moved():
                graph.longer = self._capture(state, walk, moving)
        except _FAILURES:
            graph.is_alone = True
            fed.begin(first, walks[0].algorithms[0])
            return None
        graph.is_alone = graph.longer.on_trial  # until it has been tried
        return graph.longer, walk

    def _slowly(self, algorithm: Any, state: Any, found: _Found | None, graph: Graph | None, walk: Any) -> Any:
        """Run an outer iteration without a graph or beside one, and record it if it is the third of its kind."""
        if found is None:
            return self._refuse(self.captures.refused[OUTER], algorithm, state)
        if found.walk is None:
            return self._plainly(algorithm, state, found.basic)
        key, open_key = found.keys
        self._times.update(found.keys)
        if graph is not None:
            return self._tried(graph, state, walk, found)
        moving = self._times[key] < _TIMES <= self._times[open_key] - _TIMES
        if (self._times[key] >= _TIMES or moving) and len(self._kept) < _MOST:
            try:  # the first replay is one of the next outer iterations
                self._kept[open_key if moving else key] = self._capture(state, found.walk, moving)
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

    def _tried(self, graph: Graph, state: Any, walk: Any, found: _Found) -> Any:
        """Run as usual and beside it the first replay; keep the graph if both agree."""
        before, first = {**state._asdict(), **self._extras()}, walk.iteration
        copies, given = [store.copied() for store in self._stores()], distinct(before)
        self._replay(graph, given, walk)
        got, _ = self._outputs(graph, given)
        rows = [{name: shelf.rows.clone() for name, shelf in store.copied().items()} for store in self._stores()]
        places = [{name: store.slots(name, torch.arange(store.num_rows)) for name in some}
                  for store, some in zip(self._stores(), rows, strict=True)]  # fmt: skip
        for store, copied in zip(self._stores(), copies, strict=True):
            store.restore(copied)
        for iteration, algorithm in enumerate(walk.algorithms, start=first):
            if self.fed.iteration != iteration:
                self.fed.begin(iteration, algorithm)
            state = self._plainly(algorithm, state, found.basic)
            if not all(bool(torch.isfinite(value).all()) for value in distinct(state._asdict())):
                return state  # which the caller names
        after = {**state._asdict(), **self._extras()}
        worst = max((off(got[name], after[name], before[name]) for name in got if isinstance(got[name], Tensor)),
                    default=0.0)  # fmt: skip
        for store, some, where in zip(self._stores(), rows, places, strict=True):
            for name, was in some.items():
                own = (where[name] >= 0).nonzero()[:, 0]
                if len(own):
                    mine = was[where[name][own].to(was.device)]
                    worst = max(worst, off(mine, store.own(name, own), torch.zeros_like(mine)))
        graph.on_trial = False
        if graph.span > 1:
            assert found.graph is not None
            found.graph.is_alone = worst > 1 or form(after) != found.basic[1]
        elif worst > 1:
            self.captures.refused[OUTER] = f"a replay differed {worst:.3g} times as much as rounding explains"
            self._kept.clear()
        return state

    # ---- recording ------------------------------------------------------------------------------------------------

    def _capture(self, state: Any, walk: Any, moving: bool) -> Graph:
        """Record outer iterations; this changes nothing but tensors of their own.

        moving: whether step sizes become tensors.
        """
        host, given = self.host, {**state._asdict(), **self._extras()}
        if sum(value.numel() * value.element_size() for value in distinct(given)) * self._rows() > _LARGE:
            raise NotCapturable("its rows are so large that launching does not count")
        ints, floats = Arena(torch.int64, host.device), Arena(torch.float64, host.device)
        inputs = [one_row(value).clone() for value in distinct(given)]
        values = shown(given, inputs)
        copies = [store.copied() for store in self._stores()]

        def run(buys: Mapping[int, Sequence[str]], *, frozen: bool) -> tuple[Traced, Mapping[int, Any]]:
            ints.begin()
            floats.begin()
            setting = Setting(walk, ints, floats, buys, frozen)
            movers = walk.algorithms
            if moving:
                movers = [self._mover(number, setting) for number in range(len(movers))]
            with torch.no_grad(), self._without_captures():
                return self._trace(movers, values, state._fields, setting), setting.asked

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
            partly, span = PartlyPaid(host, kept[0].partly), len(walk.algorithms)
            return Graph(kept[0], inputs, ints, floats, replay, partly, same, span)
        finally:
            for store, copied in zip(self._stores(), copies, strict=True):
                store.restore(copied)

    def _mover(self, number: int, setting: Setting) -> Any:
        """Return the algorithm of an outer iteration with step sizes that a replay reads."""
        method, steps = with_steps(setting.walk.algorithms[number].round, self.host.device)
        mover = method.__self__
        for name in steps:
            step = setting.floats.take(setting.walk, partial(_step, name, number))
            object.__setattr__(mover, name, step.view(()))  # settings are frozen
        return mover

    def _bought(self, walk: Any, place: int, asked: Mapping[str, int]) -> list[str]:
        """Return roles of which a cohort requests as many features as it has samples."""
        positions, data_of = self._positions(walk, place), self.host.data_of
        return [role for role, number in asked.items() if number >= int(data_of(role).sizes[role][positions].sum())]


def _step(name: str, number: int, walk: Any) -> Tensor:
    return torch.tensor([getattr(walk.algorithms[number], name)], dtype=torch.float64)
