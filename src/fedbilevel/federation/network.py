"""Networks of peers without a server: the receivers of every peer at every step.

A network is a pure function of (seed, step). `adjacency(step)[i, j]` is True if i sends to j; every
peer sends to itself. `mixing` computes the effect of one exchange on the rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.errors import NetworkError
from fedbilevel.federation.base_graph import base_graph
from fedbilevel.federation.links import Cycle as Cycle
from fedbilevel.federation.links import Links as Links
from fedbilevel.federation.links import read
from fedbilevel.problem.draws import Stream
from fedbilevel.settings import Settings, setting

Kind = Literal[
    "complete", "ring", "torus", "exponential", "base", "erdos_renyi", "random_undirected", "random_directed", "file"
]
UpperKind = Literal[
    "same", "complete", "ring", "torus", "exponential", "base", "erdos_renyi", "random_undirected", "random_directed"
]
DIRECTED = ("exponential", "random_directed")
STATIC = ("complete", "ring", "torus", "erdos_renyi")
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
    upper_kind: UpperKind = setting(
        "same", "network of x and the other sequences of its space, with the other settings of this network"
    )
    upper_degree: int | None = setting(None, "degree of that network (None: the same)", least=1)
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
        if "base" in (self.kind, self.upper_kind) and self.shares != "auto":
            raise NetworkError(
                f"shares are {self.shares!r}, but a network of kind 'base' averages exactly only with its own: "
                "use shares 'auto'."
            )

    @property
    def upper(self) -> Network | None:
        """Network of x, or None if all sequences share one network."""
        if self.upper_kind == "same":
            return None
        degree = self.degree if self.upper_degree is None else self.upper_degree
        return replace(self, kind=self.upper_kind, degree=degree, upper_kind="same", upper_degree=None, file="")

    @property
    def faulty(self) -> bool:
        return self.loss > 0 or self.max_delay > 0 or self.activity < 1

    def between(self, num_peers: int) -> Links:
        if self.kind == "file":
            return read(Path(self.file), num_peers, self.shares)
        if self.kind == "base":
            return Cycle(base_graph(num_peers, self.degree))
        links = Links(num_peers, self._adjacency(num_peers), directed=self.kind in DIRECTED, shares=self.shares)
        links.period = (
            1 if self.kind in STATIC else max(1, (num_peers - 1).bit_length()) if self.kind == "exponential" else None
        )
        if self.kind.startswith("random") and links.shares != "fastest":
            links.there = self._drawn_there(num_peers)
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
            chances = self._chances(n)
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

    def _chances(self, n: int) -> Tensor:
        """Return the probabilities (n, n) of the edges of a random network."""
        return self.lowest + (self.highest - self.lowest) * self._uniform("network/chances", range(1), n)[:, 0]

    def _drawn_there(self, n: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that draws the edges of several steps on a device, for captured outer iterations."""
        bounds = cache(lambda device: (self._chances(n) * 2**32).to(device))  # words below them are edges

        def draw(peers: Tensor, steps: Tensor) -> Tensor:
            stream, size = Stream(self.seed), range(1)
            words = [
                stream.bits("network/edges", peers, iteration=step.view(1, 1, 1), call=0, steps=size, width=n)[:, 0]
                for step in steps.split(1)
            ]
            edges = torch.stack(words) < bounds(peers.device)
            return edges if self.kind == "random_directed" else edges.triu(1) | edges.triu(1).mT

        return draw

    def _uniform(self, purpose: str, steps: range, n: int) -> Tensor:
        """Return (n, len(steps), n) numbers in [0, 1); row i is drawn for peer i."""
        return Stream(self.seed).first_bits(purpose, torch.arange(n), iterations=steps, width=n).double() / 2**32


class GivenNetwork:
    """Network that the user describes as a function of the step."""

    faulty, loss, max_delay, activity, seed = False, 0.0, 0, 1.0, 0
    upper = None

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
