"""One peer of many, in a process of its own, with its own row. Implements `Peers`; the others are reached through an office.

Steps of the network are synchronous: a row is awaited from everybody who sends to this peer at that step, and summed with the others by the same product as
in a simulation, so the numbers are the same. Averages of kind `robust` are not: every peer wakes by itself, pushes running sums, and ends when all agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbilevel.engines.engine import Regrouped
from fedbilevel.engines.peer_verbs import COUNT, WEIGHT, Peering, check_verbs
from fedbilevel.engines.ranks import Group
from fedbilevel.engines.roster import digest
from fedbilevel.errors import NetworkError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import TOLERANCE, Averaging, Message, RunningSums
from fedbilevel.federation.host import Host
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.network import AnyNetwork, Links
from fedbilevel.oracle.population import figures, total
from fedbilevel.peers.office import Formation, Office, Status
from fedbilevel.peers.wire import SKETCH
from fedbilevel.problem.draws import Stream

OnCrash = Literal["reclaim", "absorb", "restart"]
_TABLES, _BUCKETS = 7, (SKETCH - 1) // 7  # of a sketch
_FEW = 64  # peers up to which the whole product of a step is computed, as a simulation does


class Peer(Peering):
    """host: of this one client, with its number and that of all. formation: with whom it begins.

    on_crash: what a robust average makes of a peer that is lost in the middle of it. reclaim: as if it had never taken part. absorb: all go on from the values
    they have by then, in which some of the lost one's is. restart: the average begins again. It matters where the office goes on after a loss; otherwise the
    outer iteration begins again. interval: longest time between two wakes of a robust average, seconds.
    """

    group = Group()

    def __init__(
        self,
        algorithm: PeerAlgorithm,
        host: Host,
        office: Office,
        formation: Formation,
        *,
        network: AnyNetwork,
        averaging: Averaging | None,
        on_crash: OnCrash = "reclaim",
        interval: float = 0.05,
    ) -> None:
        self.host, self.office, self.problem = host, office, host.problem
        self.me = int(host.ids[0])
        self.algorithm, self.seed, self.scopes = algorithm, host.stream.seed, host.problem.scopes
        self.num_clients, self.ledger = host.num_clients, host.ledger
        self.network, self.on_crash, self.interval = network, on_crash, interval
        self.averaging = (
            averaging if averaging is not None else Averaging(kind="robust" if network.faulty else "push_sum")
        )
        self.kept_names = algorithm.kept_names(self.scopes)
        self.changed, self.run = formation.changed, formation.run
        self.members_by_averaging: list[list[int]] = []  # of this outer iteration
        self._meet(formation)
        check_verbs(algorithm, network, self.links, self.averaging)
        self.wakes = self._steps = 0  # wakes of robust averages in the whole run; exchanges of rows with these members
        self._places: Tensor | None = None  # buckets of sketches
        self.ledger.charge_edges(torch.zeros(self.num_clients, self.num_clients), 0, 0)

    def _meet(self, formation: Formation) -> None:
        """The network between these peers, and how much each of them counts."""
        self.members = torch.tensor(formation.members)
        self.rank = formation.members.index(self.me)
        self.links = between(
            self.network, formation.members, self.num_clients
        )  # which knows them by rank among the members
        _ = self.links.connected_within
        share = torch.tensor(formation.weights, dtype=torch.float64)
        self.shares, self.unequal = share, bool((share != share[0]).any())
        self.weights = self.push_weights = (share / share.mean())[self.rank].view(1, 1).to(self.host.device)

    # ---- synchronous steps -----------------------------------------------------------------------------------------------

    def _exchange(
        self, rows: Tensor, weights: Tensor, *, sends_weights: bool, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mixing = self.links.mixing(self.time)
        self.time += 1
        message, weight = mixing.message(rows, self.rank), mixing.message(weights, self.rank)
        self._charge(
            mixing.sent[self.rank],
            rows.shape[1] + sends_weights,
            rows.shape[1] * rows.element_size() + sends_weights * WEIGHT,
        )
        messages, all_weights = self._swapped(
            message, float(weight), mixing.sent[self.rank], mixing.adjacency[:, self.rank]
        )
        here = torch.tensor([self.rank])
        receive: Callable[[Tensor], Tensor] = lambda sent: (
            mixing.received(sent)[here] if len(sent) < _FEW else mixing.received(sent, here)
        )
        return receive(messages).to(rows.device), receive(all_weights).to(rows.device) if sends_weights else weights

    def _exact(self, rows: Tensor) -> Tensor:
        everybody = torch.ones(len(self.members), dtype=torch.bool).index_fill(0, torch.tensor([self.rank]), False)
        self._charge(
            everybody, rows.shape[1] + self.unequal, rows.shape[1] * rows.element_size() + self.unequal * WEIGHT
        )
        messages, _ = self._swapped(
            rows.clone(), 1.0, everybody, everybody
        )  # a row may have to be sent again when its owner has gone on
        return (total(messages, self.shares) / float(self.shares.sum())).to(rows.dtype)[None].to(rows.device)

    def _swapped(self, message: Tensor, weight: float, receivers: Tensor, senders: Tensor) -> tuple[Tensor, Tensor]:
        """(m, d) messages and (m, 1) weights by place, this peer's own among them, those of others who do not send left at zero."""
        step, self._steps = self._steps, self._steps + 1
        mine = message[0].cpu().numpy()
        others = senders.index_fill(0, torch.tensor([self.rank]), False)
        self.office.send_row(step, mine, weight, self.members[receivers].tolist())
        arrived = self.office.rows(step, self.members[others].tolist(), mine)
        messages, weights = (
            torch.zeros(len(self.members), len(mine), dtype=message.dtype),
            torch.zeros(len(self.members), 1, dtype=torch.float64),
        )
        messages[self.rank], weights[self.rank] = message[0].cpu(), weight
        for place in others.nonzero()[:, 0].tolist():
            row, its_weight = arrived[int(self.members[place])]
            messages[place], weights[place] = torch.from_numpy(row.astype(mine.dtype)), its_weight
        return messages, weights

    def _charge(self, receivers: Tensor, floats: int, num_bytes: int) -> None:
        """Everybody pays for what it sends itself."""
        sent = torch.zeros(self.num_clients, self.num_clients, dtype=torch.bool)
        sent[self.me, self.members[receivers]] = True
        self.ledger.charge_edges(sent, floats, num_bytes)
        self.ledger.count_round()

    def _until_agreed(self, advance: Callable[[], None], values: Callable[[], Tensor], rows: Tensor) -> None:
        for _ in range(self.averaging.steps):
            advance()

    # ---- robust averages -------------------------------------------------------------------------------------------------

    def _robust(self, rows: Tensor) -> Tensor:
        office, weight, width = self.office, float(self.weights), rows.shape[1] + 1
        row, limit = rows[0].double().cpu() * weight, self.averaging.tolerance or TOLERANCE[rows.dtype]
        size = float(torch.linalg.vector_norm(rows[0].double()))
        sums, watch, members = RunningSums(self.me, row, weight), _Settling(self.num_clients), self.members.tolist()
        for _ in range(self.averaging.max_steps):
            if office.regrouped():
                before = self.members.tolist()
                if self._without_lost():
                    members = before
                    break
                members = self.members.tolist()
                lost = set(before) - set(members)
                if self.on_crash == "reclaim":
                    for peer in lost:
                        sums.reclaim(peer)
                elif lost:  # new sums, of a new epoch: those of before hold what went to the lost one
                    sums = RunningSums(self.me, row if self.on_crash == "restart" else sums.value * weight, weight)
                watch = _Settling(self.num_clients)
            receivers = self.links.adjacency(self.wakes)[self.rank].index_fill(0, torch.tensor([self.rank]), False)
            self.wakes += 1
            size = max(
                [size, *(float(status.sketch[-1]) for status in office.statuses().values())]
            )  # what counts as still must not depend on one's own row
            own = watch.look(sums, self._sketch(sums.value, size), limit)
            for message in sums.wake(self.members[receivers].tolist()):
                office.send_sums(message.receiver, message.number, message.total.numpy())
            self._charge(receivers, width, width * WEIGHT + COUNT)
            office.send_status(self.wakes, own)
            if self._agreed({**office.statuses(), self.me: own}, limit) or office.overtaken():
                break
            office.wait_for_news(self.interval, max(1, (len(self.members) - 1) // 2))
            for sender, number, running in office.new_sums(width):
                sums.receive(Message(sender, self.me, number, torch.from_numpy(running.astype(np.float64))))
        else:
            raise NetworkError(
                f"after {self.averaging.max_steps} wakes the peers do not agree up to {limit:.1e}: raise the tolerance or max_steps, or look at the network."
            )
        self.members_by_averaging.append(members)
        office.next_averaging()
        return sums.value.to(rows.dtype)[None].to(rows.device)

    def _without_lost(self) -> bool:
        """Go on with those of the group who are left. True where the average was over before."""
        if not self.office.goes_on:
            raise Regrouped
        over = self.office.reform()
        assert self.office.formed is not None
        weight = self.weights
        self._meet(self.office.formed)
        self.weights = self.push_weights = weight  # masses in other hands count by what a weight was at the start
        return over

    def _agreed(self, statuses: Mapping[int, Status], limit: float) -> bool:
        """Whether all values are the same, and all that was pushed before they were has arrived. Mass that is still under way was then pushed with this value,
        and whatever moves from now on does not change it."""
        members = self.members.tolist()
        if any(peer not in statuses for peer in members):
            return False
        sketches = np.stack([statuses[peer].sketch for peer in members])
        values, scale = sketches[:, :-1], max(float(sketches[:, -1].max()), np.finfo(np.float64).tiny)
        if float(np.linalg.norm(values - values.mean(0), axis=1).max()) > limit * scale:
            return False
        return all(statuses[b].got[a] >= statuses[a].settled[b] for a in members for b in members if a != b)

    def _sketch(self, value: Tensor, size: float) -> np.ndarray:
        """A short row is itself. A long one is summed, with signs, into a few buckets, several times over with other signs and buckets, so that hardly any
        difference cancels everywhere; the length of a difference comes out right up to a third or so. The last number is the largest row at the start."""
        found = torch.zeros(SKETCH, dtype=torch.float64)
        found[-1] = size
        if len(value) < SKETCH:
            found[: len(value)] = value
        else:
            if self._places is None or self._places.shape[1] != len(value):
                words = Stream(self.seed).bits(
                    "peers/sketch", torch.tensor([0]), iteration=0, call=0, steps=range(_TABLES), width=len(value)
                )[0]
                self._places = ((words * (2 * _BUCKETS)) >> 32).to(
                    torch.int32
                )  # the second half of them stands for the other sign
            for table, places in enumerate(self._places):
                sums = torch.bincount(places, value, 2 * _BUCKETS)
                found[table * _BUCKETS : (table + 1) * _BUCKETS] = (sums[:_BUCKETS] - sums[_BUCKETS:]) / _TABLES**0.5
        return torch.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0).numpy()

    # ---- what the run loop uses --------------------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Any = None) -> None:
        """When everybody has stored the outer iteration before. Who came meanwhile is taken in first."""
        super().begin(iteration, algorithm)
        self.members_by_averaging = []
        if iteration == 0:
            return
        self._wait_for_all(iteration - 1)
        if self.office.newcomers():
            raise Regrouped

    def _wait_for_all(self, finished: int) -> None:
        self.office.announce(finished)

        def look() -> bool:
            if self.office.regrouped():
                self._without_lost()
            return False

        self.office.all_finished(finished, look)

    def measure(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Of this peer alone, at its own point; `seen` is what a look at all of them adds up."""
        names, table = self.host.looked_at(x, y)
        return {
            **figures(self.problem, names, table),
            "members": len(self.members),
            "seen": dict(zip(names, table[0].tolist(), strict=True)),
        }

    def finish(self, state: Any) -> None:
        """Nobody goes before all are through: until then one that is lost may send the others back to the outer iteration before."""
        self.office.announce(self.iteration)

        def look() -> bool:
            if self.office.left:  # who goes has seen that everybody is through
                return True
            if self.office.regrouped():
                self._without_lost()
            return False

        self.office.all_finished(self.iteration, look)

    def trees(self, value: Tensor, *, upper: bool) -> Any:
        [tree] = self.host.trees(value, upper=upper)
        return tree

    def bill(self) -> Ledger:
        return self.host.ledger

    def fingerprint(self) -> str:
        return digest(self.host.data, 0).hex()

    def of_data(self) -> dict[str, Any]:
        return {**super().of_data(), "peer": self.me}

    # ---- checkpoint ----------------------------------------------------------------------------------------------------------

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, plain = super().state_dict(state)
        return tensors, {
            **plain,
            "wakes": {"value": self.wakes},
            "members": {"value": self.members.tolist()},
            "run": {"value": self.run},
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        weights = self.push_weights
        state = super().load_state_dict(tensors, plain, state_type)
        self.wakes = plain["wakes"]["value"]
        if not self.changed:
            return state
        self.time, self.push_weights = 0, weights  # the network of a new group begins anew
        algorithm: Any = self.algorithm
        return algorithm.regrouped(self, state)

    def _stored(self, rows: Tensor, *, upper: bool) -> Tensor:
        return rows

    def _restored(self, stored: Tensor, *, upper: bool) -> Tensor:
        return stored


class _Settling:
    """Since when this peer's value stands still, told by how many messages it had sent to everybody then."""

    def __init__(self, num_peers: int) -> None:
        self.num_peers = num_peers
        self.anchor: np.ndarray | None = None
        self.settled = np.zeros(num_peers, np.int64)

    def look(self, sums: RunningSums, sketch: np.ndarray, limit: float) -> Status:
        """Before a wake: what was sent until now was pushed with other values, if this one has moved."""
        got, sent = (
            np.array([book.get(peer, (0,))[0] for peer in range(self.num_peers)], np.int64)
            for book in (sums.got, sums.sent)
        )
        still = self.anchor is not None and float(np.linalg.norm(sketch[:-1] - self.anchor[:-1])) <= limit * max(
            float(sketch[-1]), 1e-300
        )
        if not still or not float(sums.mass[-1]) > 0:
            self.anchor, self.settled = sketch, sent if float(sums.mass[-1]) > 0 else sent + 2**31
        return Status(got, self.settled, sketch)


def between(network: AnyNetwork, members: tuple[int, ...], num_peers: int) -> Links:
    """The network of all peers, or that of those who are left: one of its kind between so many, or where a file lists it, without those who are gone."""
    if len(members) == num_peers or getattr(network, "kind", "file") != "file":
        return network.between(len(members))
    whole, chosen = network.between(num_peers), torch.tensor(members)
    left = Links(
        len(members),
        lambda step: whole.adjacency(step)[chosen][:, chosen],
        directed=whole.directed,
        shares=whole.shares,
    )
    left.period = whole.period
    return left
