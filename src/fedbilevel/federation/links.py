"""Links between a known number of peers: edges and mixing matrices of every step, and file networks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbilevel.errors import NetworkError
from fedbilevel.federation.mixing import Mixing, fastest_mixing, metropolis

_WINDOW = 100  # steps within which a changing network must connect all peers


class Links:
    """Network between a known number of peers."""

    period: int | None = None  # steps after which it repeats, if it does
    cycle: int | None = None  # steps that average exactly if they begin at a multiple of this number
    # a function of the peers (n,) and of steps (b,), both on a device, that draws the links (b, n, n) there
    there: Callable[[Tensor, Tensor], Tensor] | None = None

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

    def shares_there(self, edges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return links, shares at receivers and shares at senders of several steps, where the edges are."""
        n = self.num_peers
        links = edges | torch.eye(n, dtype=torch.bool, device=edges.device)
        if self.shares == "out_degree":
            wide = links.double()
            return links, wide.mT, wide.sum(2).reciprocal()[:, :, None]
        return links, metropolis(links), None

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


def read(path: Path, num_peers: int, shares: str) -> Links:
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
