"""Outer iterations of peers as CUDA graphs: all peers take part, so only the place in the run changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines.addressed import Addressed, NotCapturable, Partly, Whereabouts
from fedbilevel.engines.arenas import Flags, Setting, Traced
from fedbilevel.engines.cuda_graphs import addressed, rooms_of
from fedbilevel.engines.launches import Graph
from fedbilevel.engines.outer_capture import LONG
from fedbilevel.engines.outer_graphs import Iterations
from fedbilevel.federation.clients import Bill
from fedbilevel.federation.ledger import LOCAL
from fedbilevel.federation.mixing import Mixing
from fedbilevel.problem.fused_draws import is_cheap

_WEIGHTS = "push_weights"
_DRAWN = "is_drawn"  # the mark of links that the device draws
_TOGETHER = 16  # steps of a network that are drawn together on a device


@dataclass
class Walk:
    """What a replay depends on."""

    iteration: int
    rooms: tuple[Any, ...]
    networks: tuple[Any, ...]  # links, and the number of their next step
    algorithms: list[Any] = field(default_factory=list)
    made: dict[tuple[int, int], Mixing] = field(default_factory=dict)

    def mixing(self, network: int, step: int) -> Mixing:
        """Return the exchange of a step, counted from the first one of this outer iteration."""
        if (network, step) not in self.made:
            links, time = self.networks[network]
            self.made[network, step] = links.mixing(time + step)
        return self.made[network, step]


class _Sent(NamedTuple):
    """Messages of a step of a network that never repeats, which each replay looks up."""

    network: int
    step: int


class _Script(NamedTuple):
    """Bookkeeping of an outer iteration.

    charges: phase, method of the ledger and arguments.
    messages: name of the result that counts them, phase, floats and bytes of each.
    time, upper_time: steps of the networks.
    call: number of the last call.
    rounds: rounds of communication.
    """

    charges: list[tuple[str, str, tuple[Any, ...]]]
    messages: list[tuple[str, str, int, int]]
    time: int
    upper_time: int
    call: int
    rounds: int


class _Links:
    """A network that never repeats: its matrices are numbers that a replay reads, or draws itself."""

    def __init__(self, links: Any, network: int, setting: Setting, peers: Tensor) -> None:
        self._links, self._network, self._setting, self._peers = links, network, setting, peers
        self._first = setting.walk.networks[network][1]
        self._blocks: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._is_there = links.there is not None and is_cheap(peers.device)
        if self._is_there:
            self._plain = setting.walk.mixing(network, 0)  # made by the first run, before anything is recorded
            self._time = setting.number(lambda walk: walk.networks[network][1])

    def mixing(self, step: int) -> Any:
        where = _Sent(self._network, step - self._first)
        if self._is_there:
            return self._mixing_there(where)
        walk, floats, n = self._setting.walk, self._setting.floats, self._links.num_peers
        mixing = copy(walk.mixing(*where))
        receive = floats.take(walk, lambda walk: walk.mixing(*where).received_shares().flatten()).view(n, n)
        send = floats.take(walk, lambda walk: walk.mixing(*where).send).view(n, 1)
        mixing.place(receive, send)
        mixing.__dict__["sent"] = where
        return mixing

    def _mixing_there(self, where: _Sent) -> Any:
        """Return an exchange whose links a replay draws; several steps are drawn together."""
        block, place = divmod(where.step, _TOGETHER)
        while len(self._blocks) <= block:
            steps = torch.arange(_TOGETHER, device=self._peers.device) + (self._time + len(self._blocks) * _TOGETHER)
            self._blocks.append(self._links.shares_there(self._links.there(self._peers, steps)))
        links, receive, send = self._blocks[block]
        mixing = copy(self._plain)
        mixing.place(receive[place], None if send is None else send[place])
        mixing.__dict__["sent"] = sent = links[place]
        setattr(sent, _DRAWN, True)
        return mixing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)


class _Notes:
    """A ledger that notes charges, to be repeated at every replay."""

    def __init__(self, ledger: Any) -> None:
        self._ledger, self._phase = ledger, LOCAL
        self.charges: list[tuple[str, str, tuple[Any, ...]]] = []  # phase, method, arguments

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def __getattr__(self, name: str) -> Any:
        if name not in ("charge", "charge_all", "charge_each", "charge_message", "charge_edges", "count_round"):
            raise NotCapturable(f"it uses {name!r} of the ledger")
        # a bill may grow after it is paid
        return lambda *given: self.charges.append(
            (self._phase, name, tuple(dict(one) if isinstance(one, Mapping) else one for one in given))
        )


class _Traced:
    """Mixin of an engine of peers whose place in the run is a tensor."""

    traced: Any  # of the trace: the number of the outer iteration, the clients on the device, and lists of findings

    @property
    def clients(self: Any) -> Addressed:
        trace, host = self.traced, self.host
        where = Whereabouts(trace["here"], trace["ids"], trace["number"], self.call)
        return Addressed(host, host.data.positions, where, None, trace["bill"], partly=trace["partly"])

    def _are_finite(self: Any, sums: Tensor) -> bool:
        self.traced["finite"].append(torch.isfinite(sums).all())
        return True


class PeerIterations(Iterations):
    def _excluded(self) -> str:
        fed, verbs = self.fed, self.fed.algorithm.verbs()
        mixes = "mix" in verbs
        reasons = {
            "its rows pass through a layer of aggregation": fed.layer is not None,
            "its peers are in several processes": fed.group.size > 1,
            "it follows single messages": "running_push" in verbs or (mixes and fed.averaging.kind == "robust"),
            "its averages end when peers agree": mixes and fed.averaging.limit(fed.dtype) is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _extras(self) -> dict[str, Tensor]:
        return {_WEIGHTS: self.fed.push_weights}

    def _adopt(self, extras: Mapping[str, Tensor]) -> None:
        self.fed.push_weights = extras[_WEIGHTS]

    def _positions(self, walk: Walk, place: int) -> Tensor:
        return self.host.data.positions

    def _walk(self, basic: Any) -> tuple[Walk, Any]:
        fed, rooms = self.fed, rooms_of(self.host, self.host.data.positions)
        networks = [(fed.links, fed.time), (fed.upper_links, fed.upper_time)]
        facts = tuple(None if links is None else time % (links.period or 1) for links, time in networks)
        return Walk(fed.iteration, rooms, tuple(networks)), facts

    def _cost(self, script: _Script) -> tuple[int, int]:
        return script.rounds, LONG

    def _before(self, graph: Any) -> Any:
        fed = self.fed
        return fed.time, fed.upper_time, fed.push_weights

    def _back(self, before: Any) -> None:
        self.fed.time, self.fed.upper_time, self.fed.push_weights = before

    def _rewind(self) -> None:
        self.fed.call = 0

    def _observed(self, algorithm: Any, state: Any, basic: Any) -> Any:
        return algorithm.round(self.fed, state)

    def _trace(self, movers: Sequence[Any], given: Mapping[str, Any], fields: Any, setting: Setting) -> Traced:
        fed, host, walk = self.fed, self.host, setting.walk
        peers = copy(fed)
        peers.__class__ = type("Traced", (_Traced, type(fed)), {})
        notes, positions = _Notes(host.ledger), host.data.positions
        here = setting.ints.take(walk, lambda walk: positions)
        trace = peers.traced = {
            "number": setting.number(lambda walk: walk.iteration),
            "here": here,
            "ids": setting.ints.take(walk, lambda walk: host.ids),
            "numbers": setting.ints.take(walk, lambda walk: torch.arange(host.num_clients)),
            "bill": Bill(),
            "partly": list[Partly](),
            "finite": [torch.ones((), dtype=torch.bool, device=host.device)],
        }
        peers.call, ((_, peers.time), (_, peers.upper_time)) = 0, walk.networks
        peers.iteration, peers.push_weights, peers.ledger = trace["number"].view(()).double(), given[_WEIGHTS], notes
        if fed.links.period is None:
            peers.links = _Links(fed.links, 0, setting, trace["numbers"])
        if fed.upper_links is not None and fed.upper_links.period is None:
            peers.upper_links = _Links(fed.upper_links, 1, setting, trace["numbers"])
        ledger, host.ledger = host.ledger, notes
        try:
            with (
                addressed(host, positions, here, walk.rooms),
                host.oracle.alone(setting.buys.get(0, ()), frozen=setting.frozen) as asked,
            ):
                setting.asked[0] = asked
                state = movers[0].round(peers, movers[0].State(**{name: given[name] for name in fields}))
            trace["bill"].pay(host, positions)
        finally:
            host.ledger = ledger
        values = {**state._asdict(), _WEIGHTS: peers.push_weights}
        results = {f"state.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        finite = torch.stack(trace["finite"]).all()
        results["flags"] = torch.cat([finite.view(1), *(one.flags for one in trace["partly"])])
        messages = _counted(notes, results)
        time, upper_time = (now - walk.networks[i][1] for i, now in enumerate((peers.time, peers.upper_time)))
        rounds = sum(given[0] if given else 1 for _, name, given in notes.charges if name == "count_round")
        script = _Script(notes.charges, messages, time, upper_time, peers.call, rounds)
        return Traced(values, script, results, [(LOCAL, one) for one in trace["partly"]])

    def _keep(self, script: _Script, walk: Walk) -> None:
        self.fed.time += script.time
        self.fed.upper_time += script.upper_time

    def _book(self, script: _Script, walk: Walk, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        for phase, name, given in script.charges:
            with self.host.ledger.during(phase):
                known = (walk.mixing(*one).sent if isinstance(one, _Sent) else one for one in given)
                getattr(self.host.ledger, name)(*known)
        self.fed.call = script.call

    def _told(self, graph: Graph) -> dict[str, Flags]:
        return {label: Flags(graph.traced.results[label]) for label, *_ in graph.traced.script.messages}

    def _settle(self, script: _Script, told: Mapping[str, Flags]) -> None:
        for label, phase, floats, num_bytes in script.messages:
            with self.host.ledger.during(phase):
                self.host.ledger.charge_edges(told[label].read(), floats, num_bytes)

    def _payers(self, walk: Walk, where: str) -> tuple[str, Tensor]:
        return where, self.host.data.positions


def _counted(notes: _Notes, results: dict[str, Tensor]) -> list[tuple[str, str, int, int]]:
    """Move messages whose links the device draws from the notes to results: how many there are on each edge.

    Notes that repeat are joined. Return the name of the result, the phase, floats and bytes of each
    kind of message.
    """
    drawn: dict[tuple[str, int, int], list[Tensor]] = {}
    rest: dict[Any, tuple[str, str, tuple[Any, ...], int]] = {}
    for number, (phase, name, given) in enumerate(notes.charges):
        if name == "charge_edges" and getattr(given[0], _DRAWN, False):
            drawn.setdefault((phase, *given[1:]), []).append(given[0])
            continue
        repeats = name == "count_round" or (name == "charge_edges" and isinstance(given[0], Tensor))
        key = (phase, name, *(id(one) if isinstance(one, Tensor) else one for one in given)) if repeats else number
        rest[key] = (phase, name, given, rest[key][3] + 1 if key in rest else 1)
    notes.charges = [
        (phase, name, (*given, times) if times > 1 else given) for phase, name, given, times in rest.values()
    ]
    messages = []
    for number, ((phase, floats, num_bytes), sent) in enumerate(drawn.items()):
        label = f"sent.{number}"
        times = torch.stack(sent).sum(0, dtype=torch.int64)
        results[label] = times - torch.diag(times.diagonal())  # no peer sends to itself
        messages.append((label, phase, floats, num_bytes))
    return messages
