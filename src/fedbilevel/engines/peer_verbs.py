"""Common parts of the engines of peers without a server, which implement `Peers`.

The parts are the verbs, the rows that may leave a peer, and averages by steps of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines import neighbours
from fedbilevel.engines.engine import resent
from fedbilevel.engines.neighbours import NeighbourLayer
from fedbilevel.engines.roster import Hosting
from fedbilevel.errors import CheckpointError, NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm, debiased
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.federation.mixing import Mixing
from fedbilevel.federation.network import AnyNetwork, Links
from fedbilevel.privacy.accountant import Accountant

Exchange = Callable[[Tensor, Mapping[str, Tensor]], Tensor]  # of the rows of some sequences, side by side
WEIGHT = 8  # bytes of a Push-Sum weight: always float64
COUNT = 8  # bytes of the number of a running sum


def check_verbs(algorithm: PeerAlgorithm, network: AnyNetwork, links: Links, averaging: Averaging) -> None:
    """Raise if the network does not offer the verbs that the algorithm uses."""
    name, verbs = algorithm.name(), algorithm.verbs()
    if "mix" in verbs:
        averaging.check(network, links)
    if network.upper is not None:
        check_verbs(algorithm, network.upper, network.upper.between(links.num_peers), averaging)
        if averaging.weights == "kept":
            raise SettingError(
                "the weights of Push-Sum are kept between averages, but x has a network of its own, on which they "
                "differ: use weights 'reset', or one network."
            )
    if "push" in verbs and network.faulty:
        raise SettingError(
            f"{name} pushes without running sums, so a lost message would be lost for good: use a network "
            "without faults, or settings that average instead."
        )
    if "gossip" in verbs and (network.faulty or not links.doubly_stochastic):
        raise SettingError(
            f"{name} needs an undirected network without faults, whose shares sum to one at the receiver too: "
            "use exchange='push' elsewhere."
        )


class Peering(Hosting):
    """The rows of the peers in this process, and steps of the network between all peers.

    An engine defines one step (`_exchange`), and `exact` and `robust` averages. Steps are counted
    through the whole run, so that a resumed run continues with the same network.
    """

    account: Accountant | None = None  # peers have no account of privacy
    layer: NeighbourLayer | None = None
    algorithm: Algorithm
    network: AnyNetwork
    links: Links
    upper_links: Links | None = None  # of the sequences of the space of x, if they have their own network
    averaging: Averaging
    kept_names: set[str]
    unequal: bool  # whether the peers have unequal weights
    weights: Tensor
    push_weights: Tensor  # of Push-Sum, where averages keep them
    iteration = call = time = upper_time = 0
    _are_finite: Callable[[Tensor], bool] = staticmethod(lambda sums: bool(torch.isfinite(sums).all()))

    def _exchange(
        self, rows: Tensor, weights: Tensor, *, sends_weights: bool, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take one step of the network and charge it.

        into: memory for the result, in rows that are no longer needed.
        """
        raise NotImplementedError

    def _exact(self, rows: Tensor) -> Tensor:
        """Return the exact average, as if every peer sent its row to every other peer."""
        raise NotImplementedError

    def _robust(self, rows: Tensor) -> Tensor:
        """Return a robust average by running sums."""
        raise NotImplementedError

    def _running(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step of the network through running sums of the whole run."""
        raise NotImplementedError

    def _until_agreed(self, advance: Callable[[], None], values: Callable[[], Tensor], rows: Tensor) -> None:
        """Take the steps of one average."""
        raise NotImplementedError

    def _numbers(self) -> list[int]:
        """Return the numbers of the peers of this process in the network."""
        raise NotImplementedError

    def _spread(self, sent: Tensor, mixing: Mixing, parts: Sequence[neighbours.Part]) -> Tensor:
        """Take one step of the network, charge it, and return the messages of all peers by number.

        Messages that no peer of this process receives may be zero.
        """
        raise NotImplementedError

    def _stored(self, rows: Tensor, *, upper: bool) -> Tensor:
        """Return rows for a checkpoint."""
        raise NotImplementedError

    def _restored(self, stored: Tensor, *, upper: bool) -> Tensor:
        raise NotImplementedError

    # ---- verbs ----------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Clients:
        return Clients(self.host, self.host.data.positions, self.iteration, self.call)

    def travels(self, name: str) -> bool:
        return name not in self.kept_names

    def initial(self) -> tuple[Tensor, Tensor]:
        return self.place("x", self.host.x0), self.place("y", self.host.y0)

    def zeros(self, name: str) -> Tensor:
        return torch.zeros(len(self.host), self.host.width(name), dtype=self.host.dtype, device=self.host.device)

    def steps(self, num: int) -> list[Step]:
        self.call += 1
        return self.clients.steps(num)

    def push(self, weights: Tensor, /, **rows: Tensor) -> tuple[Tensor, ...]:
        groups = self._groups({name: value for name, value in rows.items() if self.travels(name)})
        if len(groups) > 1:
            raise SettingError(
                f"{self.algorithm.name()} pushes x and y with the same weights, but x has a network of its own: use "
                "one network, or exchange='gossip'."
            )
        together = self._travelling(rows)
        if together is None:
            return (weights, *rows.values())
        with self._paying_for("push", rows), self._on_network_of(*groups[0]):
            together, weights = self._exchange(together, weights, sends_weights=True)
        return (weights, *self._apart(together, rows))

    def running_push(self, weights: Tensor, /, **rows: Tensor) -> tuple[Tensor, ...]:
        together = self._travelling(rows)
        if together is None:
            return (weights, *rows.values())
        with self._paying_for("push", rows):
            together, weights = self._running(together, weights)
        return (weights, *self._apart(together, rows))

    def gossip(self, **rows: Tensor) -> Any:
        return self._by_network(
            "gossip", rows, lambda together, _part: self._exchange(together, self.weights, sends_weights=False)[0]
        )

    def mix(self, **rows: Tensor) -> Any:
        average = self._layered if self.layer is not None else lambda together, _part: self._averaged(together)
        return self._by_network("mix", rows, average)

    def _by_network(self, verb: str, rows: Mapping[str, Tensor], exchange: Exchange) -> Any:
        """Return the rows after an exchange on each network that carries some of them."""
        new: dict[str, Tensor] = {}
        for names in self._groups(rows):
            part = {name: rows[name] for name in names}
            together = self._travelling(part)
            if together is not None:
                with self._paying_for(verb, part), self._on_network_of(*names):
                    together = exchange(together, part)
            new.update(zip(part, self._apart(together, part), strict=True))
        return _one(tuple(new[name] for name in rows))

    def _groups(self, names: Iterable[str]) -> list[list[str]]:
        """Return the names by the network that carries them."""
        if self.upper_links is None:
            return [list(names)]
        both = [[name for name in names if self._is_upper(name) == upper] for upper in (False, True)]
        return [some for some in both if some] or [[]]

    def _is_upper(self, name: str) -> bool:
        return self.algorithm.space(name) == "upper"

    @contextmanager
    def _on_network_of(self, *names: str) -> Iterator[None]:
        """Take steps on the network of these sequences, which counts its own steps."""
        if self.upper_links is None or not any(map(self._is_upper, names)):
            yield
            return
        lower = self.links, self.time
        self.links, self.time = self.upper_links, self.upper_time
        try:
            yield
        finally:
            self.upper_time, (self.links, self.time) = self.time, lower

    def _paying_for(self, verb: str, rows: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Charge an exchange under the verb and the names of the rows that are sent."""
        return self.host.ledger.during(f"{verb} {', '.join(name for name in rows if self.travels(name))}")

    # ---- averaging ------------------------------------------------------------------------------------------------

    def _averaged(self, rows: Tensor) -> Tensor:
        kind = self.averaging.kind
        counts = self.unequal  # equal weights need not be sent, and stay one under gossip
        if kind == "exact":
            return self._exact(rows)
        if kind == "robust":
            return self._robust(rows)
        self.time += -self.time % (self.links.cycle or 1)  # steps that average exactly do so from their first one on
        kept, divides = kind == "push_sum" and self.averaging.weights == "kept", counts or kind == "push_sum"
        z, w = rows * self.weights.to(rows.dtype), self.push_weights if kept else self.weights
        spare: Tensor | None = None

        def advance() -> None:
            nonlocal z, w, spare
            (z, w), spare = (
                self._exchange(z, w, sends_weights=divides, into=spare),
                z,
            )  # two matrices in turn: no other object holds them

        value = lambda: debiased(z, w) if divides else z
        self._until_agreed(advance, value, rows)
        if kept:
            self.push_weights = w
        return value()

    def _layered(self, together: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Return an average by steps of gossip in which the layer treats the rows."""
        assert self.layer is not None
        layer, widths = self.layer, {name: value.shape[1] for name, value in rows.items() if self.travels(name)}
        x, numbers, mixing = together, self._numbers(), self.links.mixing(0)  # the same in every step
        near = neighbours.near_of(numbers, mixing, together.device)
        copies = together.new_zeros(len(mixing.adjacency), together.shape[1])

        def advance() -> None:
            nonlocal x, copies
            parts = layer.parts(widths, self.iteration, self.time)
            sent = neighbours.message(parts, x, copies[numbers])
            copies = neighbours.heard(parts, copies, self._spread(sent, mixing, parts))
            x = neighbours.moved(parts, x, copies, near)

        self._until_agreed(advance, lambda: x, together)
        return x

    # ---- what the run loop uses -----------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        if algorithm is not None:
            self.adopt(algorithm)
        self.iteration, self.call = iteration, 0
        self.host.scratch.clear()

    def adopt(self, algorithm: Algorithm) -> None:
        self.algorithm = self.host.algorithm = algorithm

    def collect(self, value: Tensor) -> Tensor:
        return value

    def place(self, name: str, value: Tensor) -> Tensor:
        return value.expand(len(self.host), -1) if value.ndim == 1 else value

    def client_of(self, row: int) -> int:
        """Return the number of the client of a row of the state."""
        return int(self.host.ids[row])

    def identity(self) -> dict[str, Any]:
        layer = {} if self.layer is None else {"aggregation": self.layer.settings.asdict()}
        return {**self.of_data(), "network": self.network.describe(), "averaging": self.averaging.asdict(), **layer}

    # ---- checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {"push_weights": self._stored(self.push_weights.cpu(), upper=False)}
        plain: dict[str, Any] = {"time": {"value": self.time}}
        if self.upper_links is not None:
            plain["upper_time"] = {"value": self.upper_time}
        for name, value in state._asdict().items():
            if isinstance(value, Tensor):
                tensors[f"state.{name}"] = self._stored(value, upper=name in self.algorithm.upper_space)
            else:
                plain[f"state.{name}"] = {"value": value}
        tensors.update({f"ledger.{name}": value for name, value in self.bill().state_dict().items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        device = self.host.device
        self.push_weights, self.time = (
            self._restored(tensors["push_weights"], upper=False).to(device),
            plain["time"]["value"],
        )
        self.upper_time = plain.get("upper_time", {"value": 0})["value"]
        self.host.ledger.load_state_dict(
            {name.removeprefix("ledger."): value for name, value in tensors.items() if name.startswith("ledger.")}
        )
        values: dict[str, Any] = {
            name.removeprefix("state."): entry["value"] for name, entry in plain.items() if name.startswith("state.")
        }
        for name, stored in tensors.items():
            if name.startswith("state."):
                name = name.removeprefix("state.")
                values[name] = self._restored(stored, upper=name in self.algorithm.upper_space).to(device)
        if set(values) != set(state_type._fields):
            raise CheckpointError(
                f"the checkpoint holds {', '.join(values)}, the algorithm needs "
                f"{', '.join(state_type._fields)}: resume with the version that wrote it."
            )
        return state_type(**values)

    def go_back(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        now = resent(tensors, self.bill())
        return self.load_state_dict(self.roster.group.told_tensors(lambda: now), plain, state_type)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _travelling(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        """Return the rows that may leave their peer, side by side, or None if there are none.

        The rows are checked to be finite.
        """
        sums = torch.stack(
            [value.sum() for value in rows.values()]
        )  # one pass in the good case; rows are looked at only when something is wrong
        for name, value in () if self._are_finite(sums) else rows.items():
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


def _one(values: tuple[Tensor, ...]) -> Any:
    return values if len(values) > 1 else values[0]
