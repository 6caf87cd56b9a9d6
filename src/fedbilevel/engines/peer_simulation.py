"""Engine of peers without a server, with one row per peer; implements `Peers`.

All peers are in this process or divided among the processes of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.aggregation.validity import check_peers
from fedbilevel.engines import neighbours
from fedbilevel.engines.cuda_graphs import Captures
from fedbilevel.engines.neighbours import NeighbourLayer
from fedbilevel.engines.peer_graphs import PeerIterations
from fedbilevel.engines.peer_verbs import COUNT, WEIGHT, Peering, check_verbs
from fedbilevel.engines.ranks import Group
from fedbilevel.engines.roster import hosted
from fedbilevel.engines.running_pushes import RunningPushes
from fedbilevel.errors import NetworkError, SettingError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Averaging, RunningSums, robust_steps, spread, waiting
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.mixing import Mixing
from fedbilevel.federation.network import AnyNetwork, Network
from fedbilevel.oracle.portions import total
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes

_FEW = 64  # peers up to which a process computes the whole product of a step, although it needs only some of its rows


class PeerSimulation(Peering):
    """The n peers and the network between them.

    In a group of several processes, each process hosts some of the peers, and values have rows for
    those peers. Every process knows the whole network.

    averaging: operator of the verb `mix`; the default is ten steps of Push-Sum, or the robust kind
        if the network loses or delays messages.
    ids: numbers of the peers, if they are not given in order.
    aggregation: robust rule and compression of the rows that peers send in `mix`.
    options: dtype, device, strategy and chunk_size of the population.
    """

    def __init__(
        self,
        algorithm: PeerAlgorithm,
        problem: Problem,
        clients: Sequence[Holdings],
        *,
        network: AnyNetwork = Network(),
        averaging: Averaging | None = None,
        seed: int = 0,
        batch_size: BatchSize = None,
        ids: Sequence[int] | None = None,
        check_connected: bool = True,
        aggregation: Aggregation | None = None,
        group: Group = Group(),
        **options: Any,
    ) -> None:
        self.host, self.roster = hosted(
            group, algorithm, problem, clients, ids, seed=seed, batch_size=batch_size, **options
        )
        self.group = group
        in_order = torch.equal(self.roster.place_of, torch.arange(self.host.num_clients))
        self._order = (
            None if in_order else (self.roster.place_of.to(self.host.device), self.host.ids.to(self.host.device))
        )
        self.algorithm = algorithm
        self.problem, self.scopes, self.seed = problem, problem.scopes, seed
        self.num_clients, self.ledger = self.host.num_clients, self.host.ledger
        self.network, self.links = network, network.between(self.num_clients)
        self.upper_links = None if network.upper is None else network.upper.between(self.num_clients)
        self.averaging = (
            averaging if averaging is not None else Averaging(kind="robust" if network.faulty else "push_sum")
        )
        check_verbs(algorithm, network, self.links, self.averaging)
        if "mix" in algorithm.verbs() and self.averaging.kind == "robust" and group.size > 1:
            raise SettingError(
                "robust averaging follows single messages, which only the engine 'simulation' does: use "
                "that, or a network without faults and averaging "
                "'push_sum'."
            )
        if "running_push" in algorithm.verbs() and group.size > 1:
            raise SettingError(
                f"{algorithm.name()} follows single messages, which only the engine 'simulation' does: use it, or sgp."
            )
        self._pushes: RunningPushes | None = None
        if check_connected:
            _ = [links.connected_within for links in (self.links, self.upper_links) if links is not None]
        self.kept_names = algorithm.kept_names(problem.scopes)
        share = self.roster.weights.double()
        self._mine = slice(self.roster.first, self.roster.first + len(self.host))  # places of those hosted here
        self.weights = (share / share.mean())[self._mine, None].to(self.host.device)
        self.push_weights = self.weights
        self.unequal = bool((self.roster.weights != self.roster.weights[0]).any())
        if aggregation is not None:
            for links in filter(None, (self.links, self.upper_links)):
                check_peers(aggregation, algorithm, self.averaging, links, unequal=self.unequal)
            self.layer = NeighbourLayer(aggregation, self.host.stream)
        self.ledger.charge_edges(
            torch.zeros(self.num_clients, self.num_clients), 0, 0
        )  # so that a bill without messages says so
        if self.host.device.type == "cuda" and self.host.oracle.strategy == "auto":
            self.host.captures = Captures(self.host)  # which holds the reason why nothing is captured
        self.graphs = None if self.host.captures is None else PeerIterations(self)

    # ---- averaging ------------------------------------------------------------------------------------------------

    def _exact(self, rows: Tensor) -> Tensor:
        everybody = ~torch.eye(self.num_clients, dtype=torch.bool)
        self.ledger.charge_edges(
            everybody, rows.shape[1] + self.unequal, rows.shape[1] * rows.element_size() + self.unequal * WEIGHT
        )
        self.ledger.count_round()
        weights = self.roster.weights
        [summed] = self.group.sum([total(rows, weights[self._mine])])
        return (summed / float(weights.sum())).to(rows.dtype).expand_as(rows)

    def _robust(self, rows: Tensor) -> Tensor:
        places = self.roster.place_of.to(rows.device)
        by_number, weights = rows[places], self.weights[places, 0].tolist()
        peers = [
            RunningSums(i, row * weight, weight) for i, (row, weight) in enumerate(zip(by_number, weights, strict=True))
        ]
        floats = rows.shape[1] + 1

        def charge(sent: Tensor) -> None:
            self.ledger.charge_edges(sent, floats, floats * WEIGHT + COUNT)
            self.ledger.count_round()
            self.time += 1

        values = lambda: torch.stack([peer.value for peer in peers])
        self._until_agreed(
            robust_steps(peers, self.network, self.links, self.time, charge),
            lambda: torch.cat([values(), waiting(peers)]),
            rows,
        )
        return values()[self.host.ids.to(rows.device)].to(rows.dtype)

    def _running(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self._pushes is None:
            self._pushes = self._pushes_of(rows.shape[1])
        number, place = self._order or (slice(None), slice(None))
        rows, weights = self._pushes.push(rows[number], weights[number], self.time)
        self.time += 1
        return rows[place], weights[place]

    def _pushes_of(self, width: int) -> RunningPushes:
        def charge(sent: Tensor) -> None:
            self.ledger.charge_edges(sent, width + 1, (width + 1) * WEIGHT + COUNT)
            self.ledger.count_round()

        return RunningPushes(self.network, self.links, width, charge)

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, plain = super().state_dict(state)
        if self._pushes is not None:
            sums, plain["running"] = self._pushes.state_dict()
            tensors.update({f"running.{name}": value for name, value in sums.items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        self._pushes = None
        if "running" in plain:
            sums = {name: tensors[f"running.{name}"] for name in ("sent", "got", "due")}
            self._pushes = self._pushes_of(sums["sent"].shape[1] - 1)
            self._pushes.load_state_dict(sums, plain["running"])
        return super().load_state_dict(tensors, plain, state_type)

    def _until_agreed(self, advance: Callable[[], None], values: Callable[[], Tensor], rows: Tensor) -> None:
        """Take a fixed number of steps, or stop as soon as all peers agree."""
        tolerance = self.averaging.limit(rows.dtype)
        if tolerance is None:
            for _ in range(self.averaging.steps(self.links)):
                advance()
            return
        scale = (
            self._everyone(torch.linalg.vector_norm(rows, dim=1, keepdim=True)).max().double()
        )  # values may be wider than rows
        for _ in range(self.averaging.max_steps):
            advance()
            apart = spread(self._everyone(values()), scale)
            if apart <= tolerance:
                return
        raise NetworkError(
            f"after {self.averaging.max_steps} steps the peers agree up to {apart:.1e} only, asked for "
            f"{tolerance:.1e}: "
            "raise the tolerance (float32 reaches about 1e-6), or max_steps."
        )

    def _everyone(self, rows: Tensor) -> Tensor:
        return self.roster.rows(rows)

    # ---- what the run loop uses -----------------------------------------------------------------------------------

    def measure(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """Measure every peer at its own point.

        `disagreement` is the largest relative distance of a peer's y from the mean.
        """
        figures, diagnostics = self.host.measure(x, y, self.roster.rows), self.problem.diagnostics
        if self.scopes.lower == "global":
            y = self._everyone(y)
            figures["disagreement"] = spread(y, torch.linalg.vector_norm(y.mean(0)))
        if diagnostics is not None and self.scopes == Scopes():  # of a shared x and a global y, as with a server
            x = self._everyone(x)
            middle = [
                layout.unravel(rows.double().mean(0).to(rows.dtype))
                for layout, rows in ((self.host.layout_x, x), (self.host.layout_y, y))
            ]
            figures.update(diagnostics(*middle))
        return figures

    def trees(self, value: Tensor, *, upper: bool) -> Any:
        return self.roster.trees(value, upper=upper)

    def _stored(self, rows: Tensor, *, upper: bool) -> Tensor:
        """Return rows in the order of peer numbers, with private rows unpadded."""
        return self.roster.stored(rows, upper=upper)

    def _restored(self, stored: Tensor, *, upper: bool) -> Tensor:
        return self.roster.restored(stored, upper=upper)[1]

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _exchange(
        self, rows: Tensor, weights: Tensor, *, sends_weights: bool, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take one step of the network, with peers by number instead of the order in memory."""
        mixing = self.links.mixing(self.time)
        self.time += 1
        floats, size = rows.shape[1], rows.shape[1] * rows.element_size()
        self.ledger.charge_edges(mixing.sent, floats + sends_weights, size + sends_weights * WEIGHT)
        self.ledger.count_round()
        if self.group.size == 1:
            if self._order is None:
                return mixing(rows, into=into), mixing(weights)
            number, place = self._order
            return mixing(rows[number])[place], mixing(weights[number])[place]
        rows, weights = self._received(mixing.adjacency, rows, weights)
        numbers = self.host.ids.to(rows.device)
        if self.num_clients < _FEW:  # the product of all of them: the same one as of a single process, bit for bit
            return mixing(rows)[numbers], mixing(weights)[numbers]
        return mixing(rows, numbers), mixing(weights, numbers)

    def _numbers(self) -> list[int]:
        return self.host.ids.tolist()

    def _spread(self, sent: Tensor, mixing: Mixing, parts: Sequence[neighbours.Part]) -> Tensor:
        self.time += 1
        self.ledger.charge_edges(mixing.sent, *neighbours.cost(parts, self.host.dtype))
        self.ledger.count_round()
        return self._everyone(sent)[self.roster.place_of.to(sent.device)]

    def _received(self, adjacency: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and weights of all peers by number.

        Rows that no peer of this process needs are zero. A row is sent once to each process that
        needs it.
        """
        width = rows.shape[1] * rows.element_size()
        numbers = self.roster.ids.split(self.roster.counts)  # by process
        mine = numbers[self.group.rank]
        packed = torch.cat([rows.contiguous().view(torch.uint8), weights.contiguous().view(torch.uint8)], dim=1)
        needs = lambda there, sources: sources[adjacency[sources][:, there].any(1)]
        place = torch.empty(self.num_clients, dtype=torch.int64).index_copy_(0, mine, torch.arange(len(mine)))
        out = [packed[place[needs(there, mine)].to(rows.device)].reshape(-1) for there in numbers]
        sources = [needs(mine, there) for there in numbers]
        got = self.group.swapped(out, [len(some) * packed.shape[1] for some in sources])
        all_rows, all_weights = rows.new_zeros(self.num_clients, rows.shape[1]), weights.new_zeros(self.num_clients, 1)
        for some, content in zip(sources, got, strict=True):
            content = content.view(len(some), packed.shape[1])
            where = some.to(rows.device)
            all_rows[where] = content[:, :width].contiguous().view(rows.dtype)
            all_weights[where] = content[:, width:].contiguous().view(weights.dtype)
        return all_rows, all_weights
