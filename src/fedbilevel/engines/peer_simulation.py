"""Peers without a server, one row each, all in this process or divided among those of a group. Implements `Peers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbilevel.averaging import Averaging, RunningSums, robust_steps, spread, waiting
from fedbilevel.clients import BatchSize, Clients, Step
from fedbilevel.data.clients import Holdings
from fedbilevel.engines.group import Group, Hosting, hosted
from fedbilevel.errors import CheckpointError, NetworkError, NonFiniteError, SettingError
from fedbilevel.federation import Algorithm, PeerAlgorithm, debiased
from fedbilevel.network import AnyNetwork, Network
from fedbilevel.population import total
from fedbilevel.problem import Problem, Scopes

_WEIGHT = 8  # bytes of a Push-Sum weight: always float64
_COUNT = 8  # bytes of the number of a running sum
_FEW = 64  # peers up to which a process computes the whole product of a step, although it needs only some of its rows


class PeerSimulation(Hosting):
    """n peers and the network between them. The steps of the network are counted through the whole run, so that it is the same after a resume.

    With a group of several processes every one hosts some of the peers, and values have rows for those. Who sends to whom is known everywhere.

    averaging: the operator behind `mix`; by default ten steps of Push-Sum, or the robust kind where the network loses or delays messages.
    ids: the peers' numbers when they are not given in order. options: dtype, device, strategy and chunk_size of the population.
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
        group: Group = Group(),
        **options: Any,
    ) -> None:
        self.host, self.roster = hosted(group, algorithm, problem, clients, ids, seed=seed, batch_size=batch_size, **options)
        self.group = group
        in_order = torch.equal(self.roster.place_of, torch.arange(self.host.num_clients))
        self._order = None if in_order else (self.roster.place_of.to(self.host.device), self.host.ids.to(self.host.device))
        self.algorithm: Algorithm = algorithm
        self.problem, self.scopes, self.seed = problem, problem.scopes, seed
        self.num_clients, self.ledger = self.host.num_clients, self.host.ledger
        self.network, self.links = network, network.between(self.num_clients)
        self.averaging = averaging if averaging is not None else Averaging(kind="robust" if network.faulty else "push_sum")
        self._check_verbs(algorithm.verbs())
        if check_connected:
            _ = self.links.connected_within
        self.kept_names = algorithm.kept_names(problem.scopes)
        share = self.roster.weights.double()
        self._mine = slice(self.roster.first, self.roster.first + len(self.host))  # places of those hosted here
        self.weights = (share / share.mean())[self._mine, None].to(self.host.device)
        self.push_weights = self.weights  # of Push-Sum, where averages keep them
        self.iteration = self.call = self.time = 0
        self.ledger.charge_edges(torch.zeros(self.num_clients, self.num_clients), 0, 0)  # so that a bill without messages says so

    def _check_verbs(self, verbs: Sequence[str]) -> None:
        name = self.algorithm.name()
        if "mix" in verbs:
            self.averaging.check(self.network, self.links)
            if self.averaging.kind == "robust" and self.group.size > 1:
                raise SettingError(
                    "robust averaging follows single messages, which only the engine 'simulation' does: use that, or a network without faults and averaging "
                    "'push_sum'."
                )
        if "push" in verbs and self.network.faulty:
            raise SettingError(
                f"{name} pushes without running sums, so a lost message would be lost for good: use a network without faults, or settings that average instead."
            )
        if "gossip" in verbs and (self.network.faulty or not self.links.doubly_stochastic):
            raise SettingError(
                f"{name} needs an undirected network without faults, whose shares sum to one at the receiver too: use exchange='push' elsewhere."
            )

    # ---- verbs ---------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Clients:
        return Clients(self.host, self.host.data.positions, self.iteration, self.call)

    def travels(self, name: str) -> bool:
        return name not in self.kept_names

    def initial(self) -> tuple[Tensor, Tensor]:
        return tuple(v.expand(len(self.host), -1) if v.ndim == 1 else v for v in (self.host.x0, self.host.y0))  # type: ignore[return-value]

    def zeros(self, name: str) -> Tensor:
        return torch.zeros(len(self.host), self.host.width(name), dtype=self.host.dtype, device=self.host.device)

    def steps(self, num: int) -> list[Step]:
        self.call += 1
        return self.clients.steps(num)

    def push(self, weights: Tensor, /, **rows: Tensor) -> tuple[Tensor, ...]:
        together = self._travelling(rows)
        if together is None:
            return (weights, *rows.values())
        together, weights = self._exchange(together, weights, sends_weights=True)
        return (weights, *self._apart(together, rows))

    def gossip(self, **rows: Tensor) -> Any:
        together = self._travelling(rows)
        if together is not None:
            together, _ = self._exchange(together, self.weights, sends_weights=False)
        return _one(self._apart(together, rows))

    def mix(self, **rows: Tensor) -> Any:
        together = self._travelling(rows)
        return _one(self._apart(None if together is None else self._averaged(together), rows))

    # ---- averaging -------------------------------------------------------------------------------------------------

    def _averaged(self, rows: Tensor) -> Tensor:
        kind = self.averaging.kind
        counts = bool((self.roster.weights != self.roster.weights[0]).any())  # equal weights need not be sent, and stay one under gossip
        if kind == "exact":
            everybody = ~torch.eye(self.num_clients, dtype=torch.bool)
            self.ledger.charge_edges(everybody, rows.shape[1] + counts, rows.shape[1] * rows.element_size() + counts * _WEIGHT)
            self.ledger.rounds += 1
            weights = self.roster.weights
            [summed] = self.group.sum([total(rows, weights[self._mine])])
            return (summed / float(weights.sum())).to(rows.dtype).expand_as(rows)
        if kind == "robust":
            return self._robust(rows)
        kept = kind == "push_sum" and self.averaging.weights == "kept"
        z, w = rows * self.weights.to(rows.dtype), self.push_weights if kept else self.weights
        spare: Tensor | None = None

        def advance() -> None:
            nonlocal z, w, spare
            (z, w), spare = self._exchange(z, w, sends_weights=counts or kind == "push_sum", into=spare), z  # two matrices in turn: nobody else has seen them

        self._until_agreed(advance, lambda: debiased(z, w), rows)
        if kept:
            self.push_weights = w
        return debiased(z, w)

    def _robust(self, rows: Tensor) -> Tensor:
        places = self.roster.place_of.to(rows.device)
        by_number, weights = rows[places], self.weights[places, 0].tolist()
        peers = [RunningSums(i, row * weight, weight) for i, (row, weight) in enumerate(zip(by_number, weights, strict=True))]
        floats = rows.shape[1] + 1

        def charge(sent: Tensor) -> None:
            self.ledger.charge_edges(sent, floats, floats * _WEIGHT + _COUNT)
            self.ledger.rounds += 1
            self.time += 1

        values = lambda: torch.stack([peer.value for peer in peers])
        self._until_agreed(robust_steps(peers, self.network, self.links, self.time, charge), lambda: torch.cat([values(), waiting(peers)]), rows)
        return values()[self.host.ids.to(rows.device)].to(rows.dtype)

    def _until_agreed(self, advance: Callable[[], None], values: Callable[[], Tensor], rows: Tensor) -> None:
        """A fixed number of steps, or until all agree: all peers are looked at, so it stops as soon as they do."""
        tolerance = self.averaging.tolerance
        if tolerance is None:
            for _ in range(self.averaging.num_steps):
                advance()
            return
        scale = self._everyone(torch.linalg.vector_norm(rows, dim=1, keepdim=True)).max().double()  # values may be wider than rows
        for _ in range(self.averaging.max_steps):
            advance()
            apart = spread(self._everyone(values()), scale)
            if apart <= tolerance:
                return
        raise NetworkError(
            f"after {self.averaging.max_steps} steps the peers agree up to {apart:.1e} only, asked for {tolerance:.1e}: "
            "raise the tolerance (float32 reaches about 1e-6), or max_steps."
        )

    def _everyone(self, rows: Tensor) -> Tensor:
        return self.roster.rows(rows)

    # ---- what the run loop uses --------------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        if algorithm is not None:
            self.algorithm = self.host.algorithm = algorithm
        self.iteration, self.call = iteration, 0
        self.host.scratch.clear()

    def measure(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """Every peer at its own point; `disagreement` is the largest relative distance of a peer's y from the mean."""
        figures, diagnostics = self.host.measure(x, y, self.roster.rows), self.problem.diagnostics
        if self.scopes.lower == "global":
            y = self._everyone(y)
            figures["disagreement"] = spread(y, torch.linalg.vector_norm(y.mean(0)))
        if diagnostics is not None and self.scopes == Scopes():  # of a shared x and a global y, as with a server
            x = self._everyone(x)
            middle = [layout.unravel(rows.double().mean(0).to(rows.dtype)) for layout, rows in ((self.host.layout_x, x), (self.host.layout_y, y))]
            figures.update(diagnostics(*middle))
        return figures

    def collect(self, value: Tensor) -> Tensor:
        return value

    def place(self, name: str, value: Tensor) -> Tensor:
        return value.expand(len(self.host), -1) if value.ndim == 1 else value

    def trees(self, value: Tensor, *, upper: bool) -> Any:
        return self.roster.trees(value, upper=upper)

    def client_of(self, row: int) -> int:
        """Whose row it is, in a matrix of the state."""
        return int(self.host.ids[row])

    def identity(self) -> dict[str, Any]:
        return {**self.of_data(), "network": self.network.describe(), "averaging": self.averaging.asdict()}

    # ---- checkpoint ----------------------------------------------------------------------------------------------------

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Rows in the order of peer numbers, private ones without their padding."""
        tensors: dict[str, Tensor] = {"push_weights": self.roster.stored(self.push_weights.cpu(), upper=False)}
        plain: dict[str, Any] = {"time": {"value": self.time}}
        for name, value in state._asdict().items():
            if isinstance(value, Tensor):
                tensors[f"state.{name}"] = self.roster.stored(value, upper=name in self.algorithm.upper_space)
            else:
                plain[f"state.{name}"] = {"value": value}
        tensors.update({f"ledger.{name}": value for name, value in self.roster.bill().state_dict().items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        device = self.host.device
        self.push_weights, self.time = self.roster.restored(tensors["push_weights"], upper=False)[1].to(device), plain["time"]["value"]
        self.ledger.load_state_dict({name.removeprefix("ledger."): value for name, value in tensors.items() if name.startswith("ledger.")})
        values: dict[str, Any] = {name.removeprefix("state."): entry["value"] for name, entry in plain.items() if name.startswith("state.")}
        for name, stored in tensors.items():
            if name.startswith("state."):
                name = name.removeprefix("state.")
                values[name] = self.roster.restored(stored, upper=name in self.algorithm.upper_space)[1].to(device)
        if set(values) != set(state_type._fields):
            raise CheckpointError(
                f"the checkpoint holds {', '.join(values)}, the algorithm needs {', '.join(state_type._fields)}: resume with the version that wrote it."
            )
        return state_type(**values)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _travelling(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        """What may leave its peer, side by side."""
        sums = torch.stack([value.sum() for value in rows.values()])  # one pass in the good case; rows are looked at only when something is wrong
        for name, value in () if bool(torch.isfinite(sums).all()) else rows.items():
            bad = ~torch.isfinite(value).all(1)
            if bool(bad.any()):
                peer = int(self.host.ids[bad.cpu()][0])
                raise NonFiniteError(
                    f"client {peer} has a value of {name!r} that is not finite in outer iteration {self.iteration}: "
                    "the steps are too long (lower the step sizes) or the data of that client are extreme."
                )
        parts = [value for name, value in rows.items() if self.travels(name)]
        return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _apart(self, together: Tensor | None, rows: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if together is None:
            return tuple(rows.values())
        widths = [value.shape[1] for name, value in rows.items() if self.travels(name)]
        parts = iter(together.split(widths, dim=1))
        return tuple(next(parts) if self.travels(name) else value for name, value in rows.items())

    def _exchange(self, rows: Tensor, weights: Tensor, *, sends_weights: bool, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One step of the network, paid for. It knows peers by number; the order in memory is the host's. `into`: rows that nobody needs any more."""
        mixing = self.links.mixing(self.time)
        self.time += 1
        floats, size = rows.shape[1], rows.shape[1] * rows.element_size()
        self.ledger.charge_edges(mixing.sent, floats + sends_weights, size + sends_weights * _WEIGHT)
        self.ledger.rounds += 1
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

    def _received(self, adjacency: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and weights of all peers by number, those that nobody here receives left at zero. A row goes once to a process where somebody needs it."""
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


def _one(values: tuple[Tensor, ...]) -> Any:
    return values if len(values) > 1 else values[0]
