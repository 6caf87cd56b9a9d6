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
their launch: in a long run, several in a row are recorded as one graph.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.arenas import distinct, form, off, reason
from fedbilevel.engines.cuda_graphs import without_steps
from fedbilevel.engines.launches import Graph, Launched
from fedbilevel.engines.outer_capture import OuterCapture
from fedbilevel.errors import FedBilevelError

OUTER = "outer iteration"  # the name of a whole outer iteration in `Captures.refused`
_PATIENCE = 60  # outer iterations without a replay after which the engine captures phases instead
_FAILURES = (NotCapturable, RuntimeError, TypeError, ValueError, AttributeError, LookupError, FedBilevelError)
_MOST = 32  # recorded outer iterations that are kept
_WORK = 2048  # calls of phases and derivatives in one graph of several outer iterations at most
_KNOWN = 1024  # settings with step sizes that are remembered
_SPAN = 32  # outer iterations in one graph at most
_PAYS = 8  # a graph of several is recorded after so many times as many replays, which have all been alike
_LAUNCH = 6  # calls that are recorded in the time that a launch takes

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


class Iterations(OuterCapture):
    """Outer iterations of one engine, replayed where possible.

    A subclass knows its engine: what an outer iteration depends on (`_walk`), how it is traced, and
    its bookkeeping.
    """

    times = 3  # occurrences after which an outer iteration is recorded
    near = 1.0  # how far the first replay may be off, in units of what rounding explains

    def __init__(self, fed: Any) -> None:
        self.fed, self.host, self.captures = fed, fed.host, fed.host.captures
        self.replayed = self.usual = 0
        self._times: Counter[Any] = Counter()
        self._kept: dict[Any, Graph] = {}
        self._count = itertools.count()
        self._settings: dict[Any, int] = {}  # numbers of algorithms
        self._forms: dict[Any, int] = {}  # the same without step sizes, with the form of the state
        self._last_kind: tuple[Any, Any, int, int] | None = None  # the last algorithm and form, and their numbers
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

    def _observed(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run the outer iteration as usual, and learn what `_walk` needs."""
        raise NotImplementedError

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
                graph, walk = self._several(found, state, at, more, rounds)
            if graph is None or graph.on_trial:
                state = self._landed(launched) if launched else state
                if launched and fed.iteration < now:  # an earlier one went wrong
                    return state
                return self._slowly(algorithm, state, found, graph, walk)
            launched.append(self._launch(graph, state, walk, len(launched)))
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
            whole, basic = self._kind(algorithm, state)
        except TypeError as error:
            self.captures.refused[OUTER] = f"its settings or state cannot be compared ({error})"
            return None
        walked = self._walk(basic) if self.fed.iteration > 1 else None  # the first may be unlike the others
        if walked is None:
            return _Found(basic)
        walk, facts = walked
        walk.algorithms = [algorithm]
        keys = (whole, basic, facts), (basic, facts)
        graph = self._kept.get(keys[0]) or self._kept.get(keys[1])
        if graph is not None and graph.traced.moved():
            self._kept = {one: kept for one, kept in self._kept.items() if kept is not graph}  # its rows have moved
            graph = None
        return _Found(basic, walk, keys, graph)

    def _kind(self, algorithm: Any, state: Any) -> tuple[int, int]:
        """Return numbers of what an outer iteration depends on: with its step sizes, and without them.

        The second one depends on the form of the state as well. Numbers are compared faster than settings.
        """
        now = form({**state._asdict(), **self._extras()})
        last = self._last_kind
        if last is None or last[0] is not algorithm or last[1] != now:
            if len(self._settings) > _KNOWN:  # a schedule has new step sizes in every outer iteration
                used = {key[0] for key in self._kept if len(key) == 3}
                self._settings = {one: number for one, number in self._settings.items() if number in used}
            whole = self._settings.setdefault(algorithm, next(self._count))
            last = algorithm, now, whole, self._forms.setdefault((without_steps(algorithm), now), next(self._count))
            self._last_kind = last
        return last[2:]

    def _several(self, found: Any, state: Any, at: At, more: More, rounds: int) -> tuple[Graph | None, Any]:
        """Return the graph of this outer iteration and the next ones; the last of them has then begun.

        It is the graph of this one alone where they must be launched one by one, and None if recording them has
        moved rows that this graph reads.

        rounds: number of rounds so far.
        """
        graph, fed, span = found.graph, self.fed, 1
        cost, work = self._cost(graph.traced.script)
        first, moving = fed.iteration, found.keys[0] not in self._kept
        goes_on = lambda i: more(first + i, rounds + i * cost, rounds + (i + 1) * cost)
        longer = lambda: 2 * span in graph.longer or self._pays(span, cost, work)
        while not graph.is_alone and longer() and all(goes_on(i) for i in range(span - 1, 2 * span - 1)):
            span *= 2
        if span == 1:
            return graph, found.walk
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
            if span not in graph.longer or graph.longer[span].traced.moved():
                graph.longer[span] = self._capture(state, walk, moving)
                if graph.longer[span].traced.moved():  # recording has put them elsewhere
                    raise NotCapturable("rows that clients keep do not stay in place")
        except _FAILURES:
            graph.is_alone = True
            fed.begin(first, walks[0].algorithms[0])
            return None if graph.traced.moved() else graph, found.walk
        return graph.longer[span], walk

    def _pays(self, span: int, rounds: int, work: int) -> bool:
        """Return whether a graph of twice as many outer iterations saves more launches than its recording costs.

        It is rehearsed and recorded, and each outer iteration that is left saves 1 / (2 * span) of a launch. In a run
        of unknown length, as many outer iterations are expected as have been replayed.

        rounds, work: of one outer iteration.
        """
        num = self._expected(rounds)
        left = num - self.fed.iteration if num else self.replayed
        return (
            2 * span <= min(_SPAN, self.replayed // _PAYS)
            and 2 * span * work <= _WORK
            and 2 * (2 * span) * work <= _LAUNCH * left / (2 * span)
        )

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
        moving = self._times[key] < self.times <= self._times[open_key] - self.times
        if (self._times[key] >= self.times or moving) and len(self._kept) < _MOST:
            try:  # the first replay is one of the next outer iterations
                self._kept[open_key if moving else key] = self._capture(state, found.walk, moving)
            except _FAILURES as error:
                return self._refuse(reason(error), algorithm, state)
        return self._plainly(algorithm, state, found.basic)

    def _plainly(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run as usual, without captured phases: their memory is better used for whole outer iterations."""
        self.usual += 1
        if self.usual > max(_PATIENCE, 3 * self.times) + self.replayed:  # a schedule is recorded after 2 * times
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
        try:
            self._replay(graph, given, walk)
        except _FAILURES as error:
            self._restore(copies)
            if self.fed.iteration != first:
                self.fed.begin(first, walk.algorithms[0])
            return self._refuse(reason(error), walk.algorithms[0], state)
        got, _ = self._outputs(graph, given)
        rows = [{name: shelf.rows.clone() for name, shelf in store.copied().items()} for store in self._stores()]
        places = [{name: store.slots(name, torch.arange(store.num_rows)) for name in some}
                  for store, some in zip(self._stores(), rows, strict=True)]  # fmt: skip
        self._restore(copies)
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
            found.graph.is_alone = worst > self.near or self._kind(walk.algorithms[-1], state)[1] != found.basic
        elif worst > self.near:
            self.captures.refused[OUTER] = f"a replay differed {worst:.3g} times as much as rounding explains"
            self._kept.clear()
        return state
