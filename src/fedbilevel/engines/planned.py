"""Whole outer iterations on a processor, replayed as flat plans with the bits of the usual computation.

`outer_graphs` says when an outer iteration is recorded and replayed; here is what differs without a
GPU. Draws are made outside a plan, by the code of the usual computation, and are inputs of the plan.
The cohort of a run in which everybody takes part is a constant. A replay must have the bits of the
usual computation; this is checked at replays 1, 2, 4, 8, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedbilevel.engines.addressed import Addressed, NotCapturable, Partly, Whereabouts
from fedbilevel.engines.arenas import Arena, Setting, Traced
from fedbilevel.engines.flat_plans import planned
from fedbilevel.engines.launches import Launched
from fedbilevel.engines.outer_capture import LONG
from fedbilevel.engines.server_graphs import Members, ServerIterations, Walk, type_of
from fedbilevel.engines.server_trace import TracedServer
from fedbilevel.federation.clients import Bill, Clients


class Refusals:
    """What takes the place of captured phases: without a GPU only whole outer iterations are replayed."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def run(self, *_: Any) -> None:
        return None

    def suspect(self) -> None:
        return None


class PlannedIterations(ServerIterations):
    times = 32  # recording costs about as much as these replays save
    near = 0.0
    exact = True

    def __init__(self, fed: Any) -> None:
        self.steady = fed._all_places is not None and not fed.stragglers.dropout
        self._last: Members | None = None
        super().__init__(fed)

    def _excluded(self) -> str:
        held = (self.host.data, *self.host.parts.values())
        alike = self.steady or all(data.alike(role) for data in held for role in data.sizes)
        by_cohort = self.fed.problem.features is not None and not alike
        other = "cohorts change, and features belong to clients with unequal numbers of samples" if by_cohort else ""
        return super()._excluded() or other

    def _members(self) -> Members:
        places, times = self.fed._present(())
        if self._last is None or self._last.places is not places:
            self._last = Members(places, self.fed.roster.here(places), self.fed._counts(places, times))
        return self._last

    def _rooms_of(self, cohorts: list[Members]) -> tuple[Any, ...]:
        """Return the numbers of samples to which the usual computation pads."""
        if self._all_rooms is None:
            held = (self.host.data, *self.host.parts.values())
            self._all_rooms = tuple(tuple((role, data.largest(role)) for role in data.sizes) for data in held)
        return self._all_rooms

    def _bought(self, walk: Any, place: int, asked: Mapping[str, int]) -> list[str]:
        return []  # features are computed when the usual computation computes them

    def _rehearse(self, run: Callable[..., Any], num: int) -> None:
        """Run nothing: the usual computation has met every derivative."""

    def _recorded(
        self,
        function: Callable[[], dict[str, Tensor]],
        arenas: Sequence[Arena],
        others: Callable[[], Sequence[Tensor]],
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        plan = planned(function, lambda: [*(one.memory for one in arenas), *others()])
        for arena in arenas:
            if not plan.reads(arena.memory):
                arena.drop()
        return plan.results, plan

    def _has_room(self, launched: Any) -> bool:
        return False  # a replay is finished when it is launched

    def _cost(self, script: Any) -> tuple[int, int]:
        return script.rounds, LONG

    def _launch(self, graph: Any, state: Any, walk: Any, slot: int) -> Launched:
        graph.on_trial = self.replayed.bit_count() == 1  # the next one is compared again
        return super()._launch(graph, state, walk, slot)

    def _trace(self, movers: Sequence[Any], given: Mapping[str, Any], fields: Any, setting: Setting) -> Traced:
        with PlannedServer(self.fed, setting, given) as server:
            state = movers[0].round(server, type_of(movers[0], fields, given))
        return server.traced(state)


class PlannedServer(TracedServer):
    """The federation of a recorded outer iteration, with draws as inputs."""

    def _open(self) -> None:
        if self.cohort == 0 or not self.setting.steady:  # features of a steady cohort stay, as usual
            super()._open()

    def _leave(self) -> None:
        if not self.setting.steady:
            super()._leave()

    def scratch_rows(self, value: Any) -> Any:
        """Return rows as the store of a cohort returns them: views of one vector become rows, and round alike."""
        if isinstance(value, tuple):
            return tuple(map(self.scratch_rows, value))
        return value if len(value) == len(self.host) else value.contiguous()

    def _clients(self, shares: Tensor | None, bill: Bill, partly: list[Partly]) -> Addressed:
        where = Whereabouts(*self._place.where, self._number, self._call)
        return Drawn(self, where, shares, bill, partly)


class Drawn(Addressed):
    """Clients whose draws are inputs of a plan."""

    def __init__(
        self, server: PlannedServer, where: Whereabouts, shares: Tensor | None, bill: Bill, partly: list[Partly]
    ) -> None:
        self._setting, self._cohort = server.setting, server.cohort
        positions = server.setting.walk.cohorts[server.cohort].positions
        kept: dict[str, Any] = {"memory": server.memory, "scratch": server.scratch}
        super().__init__(server.host, positions, where, shares, bill, partly=partly, **kept)

    def _drawn(self, draw: Callable[[Clients], Tensor], *shape: int) -> Tensor:
        """Return what these clients draw as usual."""
        host, cohort, call = self.host, self._cohort, int(self._where.call)

        def make(walk: Walk) -> Tensor:
            return draw(Clients(host, walk.cohorts[cohort].positions, walk.iteration, call)).reshape(-1)

        return self._setting.ints.take(self._setting.walk, make).view(len(self), *shape)

    def batch_size(self, role: str, *, outside: bool = False) -> int | None:
        size = super().batch_size(role, outside=outside)
        if size is None and not self.host.data_of(role).alike(role) and not self._setting.steady:
            raise NotCapturable("cohorts change, and it uses all samples of clients with unequal numbers of samples")
        return size

    def draw(self, purpose: str, high: int, *, step: int = 0) -> Tensor:
        return self._drawn(lambda clients: clients.draw(purpose, high, step=step))

    def sample_indices(self, role: str, purpose: str, steps: range, width: int) -> Tensor:
        return self._drawn(lambda clients: clients.sample_indices(role, purpose, steps, width), len(steps), width)

    def words(self, purpose: str, step: int, width: int) -> Tensor:
        return self._drawn(lambda clients: clients.words(purpose, step, width), 1, width)
