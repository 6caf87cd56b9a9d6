"""Engine of one peer in its own process, with one row; implements `Peers`.

Steps of the network are synchronous: the peer waits for a row from every sender of that step and
sums the rows by the same product as a simulation, so the numbers are the same. Averages of kind
`robust` are asynchronous: every peer pushes running sums at its own times and stops when all peers
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.aggregation.validity import check_peers
from fedbilevel.engines import neighbours
from fedbilevel.engines.engine import Regrouped
from fedbilevel.engines.neighbours import NeighbourLayer
from fedbilevel.engines.peer_verbs import COUNT, WEIGHT, Peering, check_verbs
from fedbilevel.engines.ranks import Group
from fedbilevel.engines.roster import digest
from fedbilevel.errors import NetworkError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import TOLERANCE, Averaging, Message, RunningSums
from fedbilevel.federation.host import Host
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.mixing import Mixing
from fedbilevel.federation.network import AnyNetwork, Links
from fedbilevel.oracle.population import figures
from fedbilevel.oracle.portions import total
from fedbilevel.peers.formation import Formation
from fedbilevel.peers.office import Office
from fedbilevel.peers.settling import Settling, Sketcher, all_settled

OnCrash = Literal["reclaim", "absorb", "restart"]
_FEW = 64  # with fewer peers the whole product of a step is computed, as in a simulation


class Peer(Peering):
    """One peer of a run between peers.

    host: host of this client only, with its number.
    formation: group that the peer starts with.
    on_crash: effect of losing a peer during a robust average, if the office continues after losses
        (otherwise the outer iteration restarts). "reclaim": the average excludes the lost peer.
        "absorb": the others average their present values, which contain a part of the lost peer's
        value. "restart": the average restarts.
    interval: longest time in seconds between two pushes of a robust average.
    aggregation: robust rule and compression of the rows that peers send in `mix`.
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
        aggregation: Aggregation | None = None,
    ) -> None:
        self.host, self.office, self.problem = host, office, host.problem
        self.me = int(host.ids[0])
        self.algorithm, self.seed, self.scopes = algorithm, host.stream.seed, host.problem.scopes
        self.num_clients, self.ledger = host.num_clients, host.ledger
        self.network, self.on_crash, self.interval = network, on_crash, interval
        self.averaging = averaging or Averaging(kind="robust" if network.faulty else "push_sum")
        self.kept_names = algorithm.kept_names(self.scopes)
        self.changed, self.run = formation.changed, formation.run
        self.members_by_averaging: list[list[int]] = []  # of this outer iteration
        self._meet(formation)
        check_verbs(algorithm, network, self.links, self.averaging)
        if aggregation is not None:
            check_peers(aggregation, algorithm, self.averaging, self.links, unequal=self.unequal)
            self.layer = NeighbourLayer(aggregation, host.stream)
        self.wakes = self._steps = 0  # wakes of robust averages in the whole run; exchanges of rows with these members
        self._sketcher = Sketcher(self.seed)
        self.ledger.charge_edges(torch.zeros(self.num_clients, self.num_clients), 0, 0)

    def _meet(self, formation: Formation) -> None:
        """Build the network between the members, and set their weights."""
        self.members = torch.tensor(formation.members)
        self.rank = formation.members.index(self.me)
        self.links = between(self.network, formation.members, self.num_clients)  # numbers members by rank
        _ = self.links.connected_within
        share = torch.tensor(formation.weights, dtype=torch.float64)
        self.shares, self.unequal = share, bool((share != share[0]).any())
        self.weights = self.push_weights = (share / share.mean())[self.rank].view(1, 1).to(self.host.device)

    # ---- synchronous steps -----------------------------------------------------------------------

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
        others = torch.ones(len(self.members), dtype=torch.bool).index_fill(0, torch.tensor([self.rank]), False)
        self._charge(others, rows.shape[1] + self.unequal, rows.shape[1] * rows.element_size() + self.unequal * WEIGHT)
        # A clone, because a row may be sent again after its owner has changed it.
        messages, _ = self._swapped(rows.clone(), 1.0, others, others)
        return (total(messages, self.shares) / float(self.shares.sum())).to(rows.dtype)[None].to(rows.device)

    def _numbers(self) -> list[int]:
        return [self.rank]

    def _spread(self, sent: Tensor, mixing: Mixing, parts: Sequence[neighbours.Part]) -> Tensor:
        self.time += 1
        self._charge(mixing.sent[self.rank], *neighbours.cost(parts, self.host.dtype))
        is_valid = lambda row: (
            sent.dtype != torch.uint8 or neighbours.is_valid(parts, torch.from_numpy(row.copy()), self.host.dtype)
        )
        # A clone, because a row may be sent again after its owner has changed it.
        senders = mixing.adjacency[:, self.rank]
        return self._swapped(sent.clone(), 1.0, mixing.sent[self.rank], senders, is_valid)[0].to(sent.device)

    def _swapped(
        self,
        message: Tensor,
        weight: float,
        receivers: Tensor,
        senders: Tensor,
        is_valid: Callable[[np.ndarray], bool] = lambda row: True,
    ) -> tuple[Tensor, Tensor]:
        """Send a row, and return (m, d) messages and (m, 1) weights by rank, zero for non-senders."""
        step, self._steps = self._steps, self._steps + 1
        mine = message[0].cpu().numpy()
        others = senders.index_fill(0, torch.tensor([self.rank]), False)
        self.office.exchange.send_row(step, mine, weight, self.members[receivers].tolist())
        arrived = self.office.exchange.rows(step, self.members[others].tolist(), mine, is_valid)
        messages = torch.zeros(len(self.members), len(mine), dtype=message.dtype)
        weights = torch.zeros(len(self.members), 1, dtype=torch.float64)
        messages[self.rank], weights[self.rank] = message[0].cpu(), weight
        for place in others.nonzero()[:, 0].tolist():
            row, its_weight = arrived[int(self.members[place])]
            messages[place], weights[place] = torch.from_numpy(row.astype(mine.dtype)), its_weight
        return messages, weights

    def _charge(self, receivers: Tensor, floats: int, num_bytes: int) -> None:
        """Charge this peer for its own messages."""
        sent = torch.zeros(self.num_clients, self.num_clients, dtype=torch.bool)
        sent[self.me, self.members[receivers]] = True
        self.ledger.charge_edges(sent, floats, num_bytes)
        self.ledger.count_round()

    def _until_agreed(self, advance: Callable[[], None], values: Callable[[], Tensor], rows: Tensor) -> None:
        for _ in range(self.averaging.steps(self.links)):
            advance()

    # ---- robust averages -------------------------------------------------------------------------

    def _robust(self, rows: Tensor) -> Tensor:
        exchange, weight, width = self.office.exchange, float(self.weights), rows.shape[1] + 1
        row, limit = rows[0].double().cpu() * weight, self.averaging.tolerance or TOLERANCE[rows.dtype]
        size = float(torch.linalg.vector_norm(rows[0].double()))
        sums, watch, members = RunningSums(self.me, row, weight), Settling(self.num_clients), self.members.tolist()
        for _ in range(self.averaging.max_steps):
            if self.office.agreement.regrouped():
                over = self._without_lost()
                if over:  # `members`, as they were before the loss, have averaged
                    break
                lost, members = set(members) - set(self.members.tolist()), self.members.tolist()
                sums = self._sums_after(lost, sums, row)
                watch = Settling(self.num_clients)
            # The scale of `limit` is the largest row of all peers, which this peer learns from their statuses.
            size = max([size, *(float(status.sketch[-1]) for status in exchange.statuses().values())])
            own = watch.look(sums, self._sketcher.sketch(sums.value, size), limit)
            self._wake(sums, width)
            exchange.send_status(self.wakes, own)
            if all_settled({**exchange.statuses(), self.me: own}, members, limit) or exchange.overtaken():
                break
            exchange.wait_for_news(self.interval, max(1, (len(self.members) - 1) // 2))
            for sender, number, running in exchange.new_sums(width):
                sums.receive(Message(sender, self.me, number, torch.from_numpy(running.astype(np.float64))))
        else:
            raise NetworkError(
                f"after {self.averaging.max_steps} wakes the peers do not agree up to {limit:.1e}: "
                "raise the tolerance or max_steps, or check the network."
            )
        self.members_by_averaging.append(members)
        exchange.next_averaging()
        return sums.value.to(rows.dtype)[None].to(rows.device)

    def _wake(self, sums: RunningSums, width: int) -> None:
        """Send the running sums to the receivers chosen for this push."""
        receivers = self.links.adjacency(self.wakes)[self.rank].index_fill(0, torch.tensor([self.rank]), False)
        self.wakes += 1
        for message in sums.wake(self.members[receivers].tolist()):
            self.office.exchange.send_sums(message.receiver, message.number, message.total.numpy())
        self._charge(receivers, width, width * WEIGHT + COUNT)

    def _sums_after(self, lost: set[int], sums: RunningSums, row: Tensor) -> RunningSums:
        """Apply `on_crash` to the running sums."""
        if self.on_crash == "reclaim":
            for peer in lost:
                sums.reclaim(peer)
        elif lost:  # new sums in the new epoch, because the old ones contain mass sent to the lost peers
            weight = float(self.weights)
            return RunningSums(self.me, row if self.on_crash == "restart" else sums.value * weight, weight)
        return sums

    def _without_lost(self) -> bool:
        """Continue with the remaining members, and return whether the average was already over."""
        if not self.office.agreement.continues:
            raise Regrouped
        over = self.office.agreement.reform()
        assert self.office.agreement.formed is not None
        weight = self.weights
        self._meet(self.office.agreement.formed)
        self.weights = self.push_weights = weight  # masses at other peers were scaled by the initial weights
        return over

    # ---- calls by the run loop -------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Any = None) -> None:
        """Wait until all members have stored the previous outer iteration, then admit new peers."""
        super().begin(iteration, algorithm)
        self.members_by_averaging = []
        if iteration == 0:
            return
        self._wait_for_all(iteration - 1)
        if self.office.agreement.newcomers():
            raise Regrouped

    def _wait_for_all(self, finished: int) -> None:
        self.office.exchange.announce(finished)

        def stop() -> bool:
            if self.office.agreement.regrouped():
                self._without_lost()
            return False

        self.office.exchange.wait_until_finished(finished, stop)

    def measure(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Measure this peer at its own point; `peer collect` adds the numbers in `seen` over peers."""
        names, table = self.host.looked_at(x, y)
        return {
            **figures(self.problem, names, table),
            "members": len(self.members),
            "seen": dict(zip(names, table[0].tolist(), strict=True)),
        }

    def finish(self, state: Any) -> None:
        """Wait until all members have finished.

        A peer that was lost earlier may make the others go back by one outer iteration.
        """
        self.office.exchange.announce(self.iteration)

        def stop() -> bool:
            if self.office.membership.left:  # a peer leaves only after it has seen that all have finished
                return True
            if self.office.agreement.regrouped():
                self._without_lost()
            return False

        self.office.exchange.wait_until_finished(self.iteration, stop)

    def trees(self, value: Tensor, *, upper: bool) -> Any:
        [tree] = self.host.trees(value, upper=upper)
        return tree

    def bill(self) -> Ledger:
        return self.host.ledger

    def fingerprint(self) -> str:
        return digest(self.host.data, 0).hex()

    def of_data(self) -> dict[str, Any]:
        return {**super().of_data(), "peer": self.me}

    # ---- checkpoint ------------------------------------------------------------------------------

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
        self.time, self.push_weights = 0, weights  # a new group has a new network
        algorithm: Any = self.algorithm
        return algorithm.regrouped(self, state)

    def go_back(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> None:
        """Return None, because the other peers do not go back."""

    def _stored(self, rows: Tensor, *, upper: bool) -> Tensor:
        return rows

    def _restored(self, stored: Tensor, *, upper: bool) -> Tensor:
        return stored


def between(network: AnyNetwork, members: tuple[int, ...], num_peers: int) -> Links:
    """Return the network between the members.

    It has the same kind as `network`, or is the subgraph of a network from a file.
    """
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
