"""Recording of outer iterations, one or several in a row, on tensors that a replay can change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.arenas import Arena, Setting, Traced, distinct, shown, unchanged
from fedbilevel.engines.cuda_graphs import with_steps
from fedbilevel.engines.launches import Graph, Launches
from fedbilevel.engines.partly_paid import PartlyPaid
from fedbilevel.problem.layout import one_row

LONG = 2**31  # work of an outer iteration that needs no longer graph and no compiler
_COMPILED = 2**20  # calls of phases and derivatives of a run, of which compiled ones save the time to compile
_LARGE = 2**31  # bytes of rows from which computing takes longer than launching, and a graph would double the memory


class OuterCapture(Launches):
    """Recorded outer iterations of one engine; a subclass knows how its engine is traced.

    exact: whether a replay has the bits of the usual computation.
    steady: whether all cohorts of the run are the same.
    length: number of outer iterations of the whole run, if it is known.
    num_rounds: rounds that end it earlier, or None.
    """

    exact = False
    steady = False
    length = 0
    num_rounds: int | None = None

    def _expected(self, rounds: int) -> int:
        """Return the number of outer iterations of the whole run; 0: it is not known.

        rounds: of one outer iteration.
        """
        most = -(-self.num_rounds // rounds) if self.num_rounds and rounds else self.length
        return min(self.length, most)

    def _cost(self, script: Any) -> tuple[int, int]:
        """Return the rounds of recorded outer iterations, and their calls of phases and derivatives."""
        raise NotImplementedError

    def _trace(
        self, movers: Sequence[Any], given: Mapping[str, Any], fields: Sequence[str], setting: Setting
    ) -> Traced:
        """Run outer iterations on tensors that a replay can change.

        movers: algorithm of each outer iteration.
        given: the state and the tensors of the engine.
        fields: names of the state.
        """
        raise NotImplementedError

    def _positions(self, walk: Any, place: int) -> Tensor:
        """Return the positions of a cohort."""
        raise NotImplementedError

    def _rows(self) -> int:
        """Return how many rows a value of the state becomes at the clients."""
        return 1

    def _stores(self) -> tuple[Any, ...]:
        return self.host.memory, self.host.kept

    def _restore(self, copies: Sequence[Any]) -> None:
        for store, copied in zip(self._stores(), copies, strict=True):
            store.restore(copied)

    def _capture(self, state: Any, walk: Any, moving: bool) -> Graph:
        """Record outer iterations; this changes nothing but tensors of their own.

        moving: whether step sizes become tensors.
        """
        host, given = self.host, {**state._asdict(), **self._extras()}
        if sum(value.numel() * value.element_size() for value in distinct(given)) * self._rows() > _LARGE:
            raise NotCapturable("its rows are so large that launching does not count")
        if host.at_once is not None:
            raise NotCapturable("only some clients work at a time")
        ints, floats = Arena(torch.int64, host.device), Arena(torch.float64, host.device)
        inputs = [one_row(value).clone() for value in distinct(given)]
        values = shown(given, inputs)
        copies = [store.copied() for store in self._stores()]

        def run(buys: Mapping[int, Sequence[str]], *, frozen: bool) -> tuple[Traced, Mapping[int, Any]]:
            ints.begin()
            floats.begin()
            setting = Setting(walk, ints, floats, buys, frozen, self.exact, self.steady)
            movers = walk.algorithms
            if moving:
                movers = [self._mover(number, setting) for number in range(len(movers))]
            with torch.no_grad(), self._without_captures():
                return self._trace(movers, values, state._fields, setting), setting.asked

        try:
            first, asked = run({}, frozen=False)
            rounds, work = (one // len(walk.algorithms) for one in self._cost(first.script))  # of one outer iteration
            if _COMPILED <= self._expected(rounds) * work < LONG:
                host.oracle.compile_from_now(host.device)
            buys = {place: self._bought(walk, place, wanted) for place, wanted in asked.items()}
            ints.pack()
            floats.pack()
            self._rehearse(partial(run, buys), len(walk.algorithms))
            kept: list[Traced] = []  # the first one: a recorder without graphs runs it again

            def last() -> dict[str, Tensor]:
                traced, _ = run(buys, frozen=True)
                kept[:] = kept or [traced]
                return traced.results

            results, replay = self._recorded(last, (ints, floats), lambda: [*inputs, *kept[0].fixed.values()])
            kept[0].results = results
            same = {name: place for name, value in kept[0].state.items() if isinstance(value, Tensor)
                    for place, buffer in enumerate(inputs) if unchanged(value, buffer)}  # fmt: skip
            partly, span = PartlyPaid(host, kept[0].partly), len(walk.algorithms)
            return Graph(kept[0], inputs, ints, floats, replay, partly, same, span)
        finally:
            self._restore(copies)

    def _rehearse(self, run: Callable[..., Any], num: int) -> None:
        """Run outer iterations until they can be recorded.

        num: number of outer iterations in a row; each one alone has been recorded before.
        """
        for _ in range(2 if num == 1 else 0):  # until every derivative is measured, traced and, if asked for, compiled
            run(frozen=False)
        with cuda_graphs.without_waits(self.host.device):
            run(frozen=True)

    def _recorded(
        self,
        function: Callable[[], dict[str, Tensor]],
        arenas: Sequence[Arena],
        others: Callable[[], Sequence[Tensor]],
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return the results of a function, and a replay that recomputes them in place.

        arenas: numbers that change between replays.
        others: returns the other tensors that change.
        """
        return cuda_graphs.recorded(function, self.host.device)

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
