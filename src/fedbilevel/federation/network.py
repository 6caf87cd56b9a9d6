"""Who can send to whom, at every step, and what one exchange does to the rows of peers without a server.

A network is a pure function of (seed, step). `adjacency(step)[i, j]` says that i sends to j; everybody sends to itself. One exchange makes

    new_i = sum_j receive[i, j] * (send[j] * row_j)

With shares by out-degree every sender divides by the number of its receivers: columns sum to one, the sum over peers is kept, and Push-Sum
divides out what it does to the weights. Metropolis and fastest-mixing shares are symmetric: rows sum to one too, and plain gossip averages.
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
from fedbilevel.problem.draws import Stream
from fedbilevel.settings import Settings, setting

Kind = Literal[
    "complete", "ring", "torus", "exponential", "erdos_renyi", "random_undirected", "random_directed", "file"
]
DIRECTED = ("exponential", "random_directed")
STATIC = ("complete", "ring", "torus", "erdos_renyi")
_WINDOW = 100  # steps within which a network that changes must connect everybody
_AHEAD = 16  # steps of a random network drawn at once
_CELLS = 2**18  # entries that one product works on: in float64, what the cache of a core holds
_CELLS_ELSEWHERE = 2**24  # on a GPU, where a call costs more


@dataclass(frozen=True, kw_only=True)
class Network(Settings):
    """The networks that a name and a few numbers describe; `given` makes the others.

    >>> import fedbilevel as fb
    >>> links = fb.Network(kind="ring").between(4)
    >>> links.adjacency(0).int().tolist()  # who sends to whom, and keeps a share
    [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]
    """

    kind: Kind = setting("complete", "who can send to whom")
    probability: float = setting(0.4, "erdos_renyi: of an edge, drawn once", above=0, most=1)
    lowest: float = setting(
        0.4,
        "random_*: every edge has its own probability, uniform between this and the highest, and is drawn anew at every step",
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

    @property
    def faulty(self) -> bool:
        return self.loss > 0 or self.max_delay > 0 or self.activity < 1

    def between(self, num_peers: int) -> Links:
        if self.kind == "file":
            return _read(Path(self.file), num_peers, self.shares)
        links = Links(num_peers, self._adjacency(num_peers), directed=self.kind in DIRECTED, shares=self.shares)
        links.period = (
            1 if self.kind in STATIC else max(1, (num_peers - 1).bit_length()) if self.kind == "exponential" else None
        )
        return links

    def describe(self) -> dict[str, Any]:
        """With what the file says, not only its name."""
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
                if step not in drawn:  # a second step in a row promises more: a draw costs little more for several
                    steps = range(step, step + (max(1, min(_AHEAD, _CELLS // n**2)) if step == last + 1 else 1))
                    edges = self._uniform("network/edges", steps, n) < chances[:, None]
                    drawn.clear()
                    drawn.update(zip(steps, edges.unbind(1), strict=True))
                last = step
                return drawn[step] if self.kind == "random_directed" else drawn[step].triu(1) | drawn[step].triu(1).T

            return at
        import networkx as nx  # only where there are peers: a site of a federation imports it for nothing

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
        """(n, len(steps), n) in [0, 1): row i is addressed to peer i."""
        return Stream(self.seed).first_bits(purpose, torch.arange(n), iterations=steps, width=n).double() / 2**32


class GivenNetwork:
    """A network that the user describes as a function of the step."""

    faulty, loss, max_delay, activity, seed = False, 0.0, 0, 1.0, 0

    def __init__(
        self, num_peers: int, out: Callable[[int], Any], *, directed: bool = True, shares: str = "auto"
    ) -> None:
        self.num_peers, self.out, self.directed, self.shares = num_peers, out, directed, shares

    def between(self, num_peers: int) -> Links:
        if num_peers != self.num_peers:
            raise NetworkError(
                f"the network is made for {self.num_peers} peers, there are {num_peers} clients: give one made for as many."
            )
        return Links(num_peers, self.out, directed=self.directed, shares=self.shares)

    def describe(self) -> dict[str, Any]:
        first = [self.between(self.num_peers).adjacency(step).nonzero().tolist() for step in range(2)]
        return {"kind": "given", "directed": self.directed, "shares": self.shares, "first_steps": first}


AnyNetwork = Network | GivenNetwork


def given(num_peers: int, out: Callable[[int], Any], *, directed: bool = True, shares: str = "auto") -> GivenNetwork:
    """`out(step)` gives an (n, n) matrix whose entry (i, j) says that i sends to j. It must depend on the step alone."""
    return GivenNetwork(num_peers, out, directed=directed, shares=shares)


class Mixing:
    """One exchange between peers: new_i = sum_j receive[i, j] (send[j] row_j), each message rounded to the type of the rows, sums in float64 in the
    order of the senders, rounded once.

    Columns are taken a few at a time, as many as the cache holds in float64: a row then comes from memory once, however many peers it goes to.
    """

    def __init__(self, adjacency: Tensor, receive: Tensor, send: Tensor) -> None:
        self.adjacency, self.send = adjacency, send
        sparse = len(receive) >= 64 and int((receive != 0).sum()) * 16 < receive.numel()
        self._receive = receive.to_sparse() if sparse else receive
        self._partner = _partners(self._receive) if sparse else None
        halves = bool(
            (torch.frexp(send).mantissa == 0.5).all()
        )  # division by a power of two, one included, is exact in any type
        self._factor = None if bool((send == 1).all()) else send[:, None].float() if halves else send[:, None]
        self._on: dict[torch.device, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    @cached_property
    def sent(self) -> Tensor:
        """(n, n) bool: the messages between different peers."""
        return self.adjacency & ~torch.eye(len(self.adjacency), dtype=torch.bool)

    @property
    def matrix(self) -> Tensor:
        """float64 (n, n): new rows = matrix @ rows."""
        return (self._receive.to_dense() if self._receive.is_sparse else self._receive) * self.send

    def __call__(self, rows: Tensor, receivers: Tensor | None = None, *, into: Tensor | None = None) -> Tensor:
        """One row per peer; with `receivers`, only what these receive. `into`: where to write, not `rows` themselves; a new matrix otherwise, whose
        pages cost more than the sums."""
        return self._product(rows, receivers, into, divides=True)

    def message(self, row: Tensor, sender: int) -> Tensor:
        """What `sender` sends of its row."""
        return (row.double() * float(self.send[sender])).to(row.dtype)

    def received(self, messages: Tensor, receivers: Tensor | None = None) -> Tensor:
        """What a call makes of messages, one row per sender; those that nobody asked for receives may be left at zero."""
        return self._product(messages, receivers, None, divides=False)

    def _product(self, rows: Tensor, receivers: Tensor | None, into: Tensor | None, *, divides: bool) -> Tensor:
        if rows.device not in self._on:
            self._on[rows.device] = (
                self._receive.to(rows.device),
                _moved(self._factor, rows.device),
                _moved(self._partner, rows.device),
            )
        receive, factor, partner = self._on[rows.device]
        num = len(rows)
        if receivers is not None:
            receivers, num = receivers.to(rows.device), len(receivers)
            receive, partner = receive.index_select(0, receivers), None if partner is None else partner[receivers]
        new = torch.empty(num, rows.shape[1], dtype=rows.dtype, device=rows.device) if into is None else into
        width = max(1, min(rows.shape[1], (_CELLS if rows.device.type == "cpu" else _CELLS_ELSEWHERE) // len(rows)))
        sizes = ((len(rows), torch.float64), (num, torch.float64), (len(rows), rows.dtype), (num, rows.dtype))
        room = [torch.empty(size * width, dtype=dtype, device=rows.device) for size, dtype in sizes]
        for part, place in zip(rows.split(width, dim=1), new.split(width, dim=1), strict=True):
            shapes = (part.shape, place.shape, part.shape, place.shape)
            wide, total, narrow, other = (
                memory[: shape.numel()].view(shape) for memory, shape in zip(room, shapes, strict=True)
            )
            if factor is None or not divides:
                messages = part
            elif factor.dtype == rows.dtype or factor.dtype == torch.float32:
                messages = torch.mul(part, factor, out=narrow)
            else:
                messages = narrow.copy_(wide.copy_(part).mul_(factor))
            if partner is None:
                place.copy_(
                    torch.mm(receive, messages if rows.dtype == torch.float64 else wide.copy_(messages), out=total)
                )
            else:  # two float32 added in float64 and rounded are their float32 sum: 53 bits are at least twice 24 and two more
                own = messages if receivers is None else messages.index_select(0, receivers)
                torch.add(own, torch.index_select(messages, 0, partner, out=other), out=place)
        return new


def _partners(receive: Tensor) -> Tensor | None:
    """(n,): whose message each peer adds to its own, where that is all that it does."""
    receive = receive.coalesce()
    receivers, senders = receive.indices()
    own, other = (receivers == senders).nonzero()[:, 0], (receivers != senders).nonzero()[:, 0]
    everybody = torch.arange(len(receive))
    ones = bool((receive.values() == 1).all())
    return (
        senders[other]
        if ones and torch.equal(receivers[own], everybody) and torch.equal(receivers[other], everybody)
        else None
    )


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


class Links:
    """A network between a known number of peers."""

    period: int | None = None  # steps after which it repeats, if it does

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
        """(n, n) bool with self-loops."""
        links = torch.as_tensor(self._out(step)).bool()
        if links.shape != (self.num_peers, self.num_peers):
            raise NetworkError(
                f"the network gave a matrix of shape {tuple(links.shape)} at step {step}, expected {(self.num_peers, self.num_peers)}."
            )
        if not self.directed and not torch.equal(links, links.T):
            raise NetworkError(
                f"the network is said to be undirected but is not symmetric at step {step}: say that it is directed, or mend it."
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
        """Steps after which the links so far, put together, let every peer reach every other. One that does not repeat is looked at once more later on, so that
        links at the start alone do not pass."""
        first = self._connects(0)
        if self.period is None:
            self._connects(_WINDOW)
        return first

    def _connects(self, start: int) -> int:
        """Steps from `start` until all are connected; an error that names who cannot be."""
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
            f"the network never connects: over {window} step{'s' if window > 1 else ''}{f' from step {start}' if start else ''}, "
            f"client{'s' if len(lost) > 1 else ''} {names} cannot both reach the others and be reached by them; add edges, or raise the probabilities."
        )


def metropolis(adjacency: Tensor) -> Tensor:
    """Symmetric shares 1 / (1 + the larger degree) of the two ends; what is left stays."""
    links = adjacency.double().fill_diagonal_(0)
    degrees = links.sum(1)
    shares = links / (1 + torch.maximum(degrees[:, None], degrees[None, :]))
    return shares + torch.diag(1 - shares.sum(1))


def fastest_mixing(adjacency: Tensor, *, num_steps: int = 400) -> Tensor:
    """Symmetric non-negative shares whose second largest |eigenvalue| is as small as projected subgradient steps make it, from Metropolis ones.

    Boyd, Diaconis, Xiao, "Fastest mixing Markov chain on a graph", SIAM Review 2004: the optimum is a semidefinite programme; their subgradient
    method is enough here, because any iterate is a valid matrix and the best one seen is kept. Where the links leave islands, each mixes by itself.
    """
    import networkx as nx

    n = len(adjacency)
    islands = list(nx.connected_components(nx.from_numpy_array(adjacency.numpy())))
    if (
        len(islands) > 1
    ):  # a step of a random network: the second eigenvalue is 1 whatever the shares, and its slope is zero
        matrix = torch.zeros(n, n, dtype=torch.float64)
        for island in islands:
            block = torch.meshgrid(2 * [torch.tensor(sorted(island))], indexing="ij")
            matrix[block] = fastest_mixing(adjacency[block], num_steps=num_steps)
        return matrix
    heads, tails = adjacency.triu(1).nonzero(as_tuple=True)
    best = metropolis(adjacency)
    if (
        len(heads) == 0 or len(heads) == n * (n - 1) // 2
    ):  # nothing to choose; complete: Metropolis is 1/n everywhere, which mixes at once
        return best
    load = lambda edges: torch.zeros(n, dtype=torch.float64).index_add_(0, heads, edges).index_add_(0, tails, edges)
    edges, least = best[heads, tails], float("inf")
    degrees = load(torch.ones_like(edges))
    for k in range(1, num_steps + 1):
        off = torch.zeros(n, n, dtype=torch.float64).index_put_((heads, tails), edges)
        matrix = off + off.T + torch.diag(1 - off.sum(0) - off.sum(1))
        values, vectors = torch.linalg.eigh(
            matrix - 1 / n
        )  # the constant vector, which every matrix keeps, is out of the way
        if float(values.abs().max()) < least:
            least, best = float(values.abs().max()), matrix
        near = (
            torch.softmax(2 * k * values.abs(), 0) * values.sign()
        )  # several eigenvalues tie at the optimum: one at a time, the steps would swing
        slope = -((vectors[heads] - vectors[tails]) ** 2) @ near
        length = 0.3 / k**0.5 * edges.mean() * len(edges) ** 0.5
        edges = (edges - length * slope / torch.linalg.vector_norm(slope).clamp(min=1e-300)).clamp(min=0)
        for _ in range(
            10
        ):  # nobody may give away more than it has: take what is over from its edges alike, which is close to a projection
            over = (load(edges) - 1).clamp(min=0) / degrees
            if not bool(over.any()):
                break
            edges = (edges - torch.maximum(over[heads], over[tails])).clamp(min=0)
        total = load(edges).clamp(min=1)
        edges = edges / torch.maximum(total[heads], total[tails])
    return best


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
