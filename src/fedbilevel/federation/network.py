"""Networks of peers without a server: the receivers of every peer at every step.

A network is a pure function of (seed, step). `adjacency(step)[i, j]` is True if i sends to j; every
peer sends to itself. `mixing` computes the effect of one exchange on the rows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.errors import NetworkError
from fedbilevel.federation.base_graph import base_graph
from fedbilevel.federation.mixing import Mixing, fastest_mixing, metropolis
from fedbilevel.problem.draws import Stream
from fedbilevel.settings import Settings, setting

Kind = Literal[
    "complete", "ring", "torus", "exponential", "base", "erdos_renyi", "random_undirected", "random_directed", "file"
]
DIRECTED = ("exponential", "random_directed")
STATIC = ("complete", "ring", "torus", "erdos_renyi")
_WINDOW = 100  # steps within which a changing network must connect all peers
_AHEAD = 16  # steps of a random network drawn at once
_MOST_DRAWN = 2**18  # and edges, at most


@dataclass(frozen=True, kw_only=True)
class Network(Settings):
    """Network that a name and a few numbers describe; `given` makes other networks.

    >>> import fedbilevel as fb
    >>> links = fb.Network(kind="ring").between(4)
    >>> links.adjacency(0).int().tolist()  # row i: the receivers of peer i
    [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]
    """

    kind: Kind = setting("complete", "which peers can send to which")
    degree: int = setting(
        1,
        "base: most receivers of a peer at one step; the steps repeat, and one cycle is an exact average",
        symbol="k",
        least=1,
    )
    probability: float = setting(0.4, "erdos_renyi: of an edge, drawn once", above=0, most=1)
    lowest: float = setting(
        0.4,
        "random_*: every edge has its own probability, uniform between this and the highest, and is drawn "
        "anew at every step",
        symbol="rho",
        least=0,
        most=1,
    )
    highest: float = setting(0.8, "random_*: the upper end of the probabilities", symbol="rho", least=0, most=1)
    shares: Literal["auto", "out_degree", "metropolis", "fastest"] = setting(
        "auto",
        "how a row is divided among receivers; auto: by out-degree where the network is directed, else Metropolis",
    )
    loss: float = setting(0.0, "share of messages that are lost (robust averaging only)", least=0, most=0.99)
    max_delay: int = setting(
        0, "messages arrive up to so many steps late, in any order (robust averaging only)", least=0
    )
    activity: float = setting(1.0, "share of peers that are awake at a step (robust averaging only)", above=0, most=1)
    file: str = setting(
        "", 'kind file: JSON {"num_peers": 3, "directed": true, "steps": [[[0, 1], [1, 2]], ...]}, repeated for ever'
    )
    seed: int = setting(0, "seed of the network", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest > self.highest:
            raise NetworkError(
                f"the lowest probability of an edge is {self.lowest}, above the highest, {self.highest}: swap them."
            )
        if (self.kind == "file") != bool(self.file):
            raise NetworkError(
                "kind='file' needs the name of a file, and a file needs kind='file': give both or neither."
            )
        if self.kind == "base" and self.shares != "auto":
            raise NetworkError(
                f"shares are {self.shares!r}, but a network of kind 'base' averages exactly only with its own: "
                "use shares 'auto'."
            )

    @property
    def faulty(self) -> bool:
        return self.loss > 0 or self.max_delay > 0 or self.activity < 1

    def between(self, num_peers: int) -> Links:
        if self.kind == "file":
            return _read(Path(self.file), num_peers, self.shares)
        if self.kind == "base":
            return Cycle(base_graph(num_peers, self.degree))
        links = Links(num_peers, self._adjacency(num_peers), directed=self.kind in DIRECTED, shares=self.shares)
        links.period = (
            1 if self.kind in STATIC else max(1, (num_peers - 1).bit_length()) if self.kind == "exponential" else None
        )
        return links

    def describe(self) -> dict[str, Any]:
        """Return the settings, with a checksum of the file."""
        return {**self.asdict(), **({"content": zlib.crc32(Path(self.file).read_bytes())} if self.file else {})}

    def _adjacency(self, n: int) -> Callable[[int], Tensor]:
        if self.kind == "exponential":  # one receiver at a time, 1, 2, 4, ... places ahead
            hops, places = max(1, (n - 1).bit_length()), torch.arange(n)
            return lambda step: torch.zeros(n, n, dtype=torch.bool).index_put_(
                (places, (places + 2 ** (step % hops)) % n), torch.tensor(True)
            )
        if self.kind.startswith("random"):
            chances = self.lowest + (self.highest - self.lowest) * self._uniform("network/chances", range(1), n)[:, 0]
            drawn: dict[int, Tensor] = {}
            last = -2

            def at(step: int) -> Tensor:
                nonlocal last
                if step not in drawn:  # consecutive steps: prefetch several
                    steps = range(step, step + (max(1, min(_AHEAD, _MOST_DRAWN // n**2)) if step == last + 1 else 1))
                    edges = self._uniform("network/edges", steps, n) < chances[:, None]
                    drawn.clear()
                    drawn.update(zip(steps, edges.unbind(1), strict=True))
                last = step
                return drawn[step] if self.kind == "random_directed" else drawn[step].triu(1) | drawn[step].triu(1).T

            return at
        import networkx as nx  # imported here, because sites of a federation do not need it

        if self.kind == "torus":
            side = max(k for k in range(1, int(n**0.5) + 1) if n % k == 0)
            graph: Any = nx.convert_node_labels_to_integers(
                nx.grid_2d_graph(side, n // side, periodic=True), ordering="sorted"
            )
        elif self.kind == "erdos_renyi":  # drawn from the addressed stream, so that every peer draws the same one
            graph = nx.from_numpy_array(
                (self._uniform("network/fixed", range(1), n)[:, 0] < self.probability).triu(1).numpy()
            )
        else:
            graph = nx.complete_graph(n) if self.kind == "complete" else nx.cycle_graph(n)
        fixed = torch.from_numpy(nx.to_numpy_array(graph, nodelist=range(n)) > 0)
        return lambda _step: fixed

    def _uniform(self, purpose: str, steps: range, n: int) -> Tensor:
        """Return (n, len(steps), n) numbers in [0, 1); row i is drawn for peer i."""
        return Stream(self.seed).first_bits(purpose, torch.arange(n), iterations=steps, width=n).double() / 2**32


class GivenNetwork:
    """Network that the user describes as a function of the step."""

    faulty, loss, max_delay, activity, seed = False, 0.0, 0, 1.0, 0

    def __init__(
        self, num_peers: int, out: Callable[[int], Any], *, directed: bool = True, shares: str = "auto"
    ) -> None:
        self.num_peers, self.out, self.directed, self.shares = num_peers, out, directed, shares

    def between(self, num_peers: int) -> Links:
        if num_peers != self.num_peers:
            raise NetworkError(
                f"the network is made for {self.num_peers} peers, there are {num_peers} clients: give one "
                "made for as many."
            )
        return Links(num_peers, self.out, directed=self.directed, shares=self.shares)

    def describe(self) -> dict[str, Any]:
        first = [self.between(self.num_peers).adjacency(step).nonzero().tolist() for step in range(2)]
        return {"kind": "given", "directed": self.directed, "shares": self.shares, "first_steps": first}


AnyNetwork = Network | GivenNetwork


def given(num_peers: int, out: Callable[[int], Any], *, directed: bool = True, shares: str = "auto") -> GivenNetwork:
    """Make a network from a function of the step.

    out: function of the step alone that returns an (n, n) matrix; entry (i, j) is True if i sends
        to j.
    """
    return GivenNetwork(num_peers, out, directed=directed, shares=shares)


class Links:
    """Network between a known number of peers."""

    period: int | None = None  # steps after which it repeats, if it does
    cycle: int | None = None  # steps that average exactly if they begin at a multiple of this number

    def __init__(self, num_peers: int, out: Callable[[int], Any], *, directed: bool, shares: str) -> None:
        self.num_peers, self.directed = num_peers, directed
        self.shares = ("out_degree" if directed else "metropolis") if shares == "auto" else shares
        if self.shares not in ("out_degree", "metropolis", "fastest"):
            raise NetworkError(f"there are no shares named {shares!r}: use auto, out_degree, metropolis or fastest.")
        if directed and self.shares != "out_degree":
            raise NetworkError(
                f"{self.shares} shares need an undirected network, this one is directed: use out_degree."
            )
        self._out = out
        self._kept: dict[int, Mixing] = {}

    @property
    def doubly_stochastic(self) -> bool:
        return self.shares != "out_degree"

    def adjacency(self, step: int) -> Tensor:
        """Return the (n, n) flags of the links, with self-loops."""
        links = torch.as_tensor(self._out(step)).bool()
        if links.shape != (self.num_peers, self.num_peers):
            raise NetworkError(
                f"the network gave a matrix of shape {tuple(links.shape)} at step {step}, expected "
                f"{(self.num_peers, self.num_peers)}."
            )
        if not self.directed and not torch.equal(links, links.T):
            raise NetworkError(
                f"the network is said to be undirected but is not symmetric at step {step}: say that it is "
                "directed, or fix it."
            )
        return links | torch.eye(self.num_peers, dtype=torch.bool)

    def mixing(self, step: int) -> Mixing:
        if self.period is None:
            return self._made(step)
        place = step % self.period
        if place not in self._kept:
            self._kept[place] = self._made(place)
        return self._kept[place]

    def _made(self, step: int) -> Mixing:
        adjacency = self.adjacency(step)
        links = adjacency.double()
        if self.shares == "out_degree":
            return Mixing(adjacency, links.T, 1 / links.sum(1))
        return Mixing(
            adjacency,
            fastest_mixing(adjacency) if self.shares == "fastest" else metropolis(adjacency),
            torch.ones(len(links), dtype=torch.float64),
        )

    @cached_property
    def connected_within(self) -> int:
        """Number of steps after which every peer can reach every other peer.

        A network that does not repeat is checked a second time at later steps, so that a network
        with links only at the start does not pass.
        """
        first = self._connects(0)
        if self.period is None:
            self._connects(_WINDOW)
        return first

    def _connects(self, start: int) -> int:
        """Return the number of steps from `start` until all peers are connected.

        If some peers are never connected, the error names them.
        """
        import networkx as nx

        links = torch.zeros(self.num_peers, self.num_peers, dtype=torch.bool)
        window = self.period or _WINDOW
        for step in range(window):
            links |= self.adjacency(start + step)
            graph = nx.from_numpy_array(links.numpy(), create_using=nx.DiGraph)
            if nx.is_strongly_connected(graph):
                return step + 1
        parts = sorted(nx.strongly_connected_components(graph), key=lambda part: (-len(part), min(part)))
        lost = sorted(set().union(*parts[1:]))
        names = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
        raise NetworkError(
            f"the network never connects: over {window} "
            f"step{'s' if window > 1 else ''}{f' from step {start}' if start else ''}, "
            f"client{'s' if len(lost) > 1 else ''} {names} cannot both reach the others and be reached by "
            "them; add edges, or raise the probabilities."
        )


class Cycle(Links):
    """Network whose steps repeat the given doubly stochastic matrices, which average exactly."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.period = self.cycle = len(matrices)
        super().__init__(
            len(matrices[0]), lambda step: matrices[step % len(matrices)] > 0, directed=False, shares="metropolis"
        )
        self.shares, self._matrices = "base", matrices

    def _made(self, step: int) -> Mixing:
        return Mixing(self.adjacency(step), self._matrices[step], torch.ones(self.num_peers, dtype=torch.float64))


def _read(path: Path, num_peers: int, shares: str) -> Links:
    try:
        content = json.loads(path.read_text())
        size, steps, directed = content["num_peers"], content["steps"], content.get("directed", True)
        if (
            not isinstance(size, int)
            or not isinstance(directed, bool)
            or not isinstance(steps, list)
            or not all(isinstance(edges, list) for edges in steps)
        ):
            raise TypeError(
                "num_peers must be a whole number, directed true or false and steps a list of lists of edges"
            )
    except OSError as error:
        raise NetworkError(f"the network file {path} cannot be read ({error.strerror}): check its name.") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        form = '{"num_peers": 3, "directed": true, "steps": [[[0, 1], [1, 2]], [[2, 0]]]}'
        raise NetworkError(
            f"the network file {path} is not of the form {form}: {type(error).__name__} {error}."
        ) from error
    if size != num_peers:
        raise NetworkError(
            f"the network file {path} is for {size} peers, there are {num_peers} clients: write one for as many."
        )
    if not steps:
        raise NetworkError(f"the network file {path} has no steps: give at least one list of edges.")
    matrices = [_matrix(edges, num_peers, directed, f"{path}, step {number}") for number, edges in enumerate(steps)]
    links = Links(num_peers, lambda step: matrices[step % len(matrices)], directed=directed, shares=shares)
    links.period = len(matrices)
    return links


def _matrix(edges: Sequence[Any], n: int, directed: bool, where: str) -> Tensor:
    matrix = torch.zeros(n, n, dtype=torch.bool)
    for edge in edges:
        if (
            not isinstance(edge, list)
            or len(edge) != 2
            or not all(isinstance(end, int) and not isinstance(end, bool) for end in edge)
        ):
            raise NetworkError(f"{where}: {edge!r} is no edge, expected [sender, receiver].")
        for end in edge:
            if not 0 <= end < n:
                raise NetworkError(
                    f"{where}: the edge {edge} names the unknown peer {end}; peers are numbered from 0 to {n - 1}."
                )
        matrix[edge[0], edge[1]] = True
        if not directed:
            matrix[edge[1], edge[0]] = True
    return matrix
