"""One exchange of rows between peers, and symmetric shares that make the exchange an average.

    new_i = sum_j receive[i, j] * (send[j] * row_j)

With shares by out-degree every sender divides by the number of its receivers: columns sum to one,
the sum over peers is kept, and Push-Sum divides out the effect on the weights. Metropolis and
fastest-mixing shares are symmetric: rows sum to one too, and plain gossip averages.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

_CELLS = 2**18  # entries that one product works on: in float64, what the cache of a core holds
_CELLS_ELSEWHERE = 2**24  # on a GPU, where a call costs more


class Mixing:
    """One exchange between peers: new_i = sum_j receive[i, j] (send[j] row_j).

    Each message is rounded to the type of the rows. Sums are computed in float64 in the order of
    the senders and rounded once. Columns are processed a few at a time, as many as fit in the cache
    in float64, so a row is read from memory once for any number of receivers.
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
        """Flags (n, n) of the messages between different peers."""
        return self.adjacency & ~torch.eye(len(self.adjacency), dtype=torch.bool)

    @property
    def matrix(self) -> Tensor:
        """Matrix (n, n) in float64 such that new rows = matrix @ rows."""
        return self.received_shares() * self.send

    def received_shares(self) -> Tensor:
        """Return the shares (n, n) of messages at their receivers, in float64."""
        return self._receive.to_dense() if self._receive.is_sparse else self._receive

    def place(self, receive: Tensor, send: Tensor | None) -> None:
        """Read the shares from these tensors on a device, where a captured exchange finds them.

        send: None divides nothing.
        """
        self._on = {receive.device: (receive, send, None)}

    def __call__(self, rows: Tensor, receivers: Tensor | None = None, *, into: Tensor | None = None) -> Tensor:
        """Return the new rows of all peers, or of `receivers`.

        into: memory for the result, other than `rows`; allocating a new matrix takes longer than
            the sums.
        """
        return self._product(rows, receivers, into, divides=True)

    def message(self, row: Tensor, sender: int) -> Tensor:
        """Return the message that `sender` computes from its row."""
        return (row.double() * float(self.send[sender])).to(row.dtype)

    def received(self, messages: Tensor, receivers: Tensor | None = None) -> Tensor:
        """Return the result of a call from messages, one row per sender.

        Messages that no requested receiver uses may be zero.
        """
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
            elif factor.dtype == rows.dtype or factor.dtype == torch.float32 or rows.is_cuda:
                messages = torch.mul(part, factor, out=narrow)  # on a GPU one kernel multiplies wide and rounds once
            else:
                messages = narrow.copy_(wide.copy_(part).mul_(factor))
            if partner is None:
                place.copy_(
                    torch.mm(receive, messages if rows.dtype == torch.float64 else wide.copy_(messages), out=total)
                )
            else:  # two float32 added in float64 and rounded are their float32 sum: 53 >= 2 * 24 + 2 bits
                own = messages if receivers is None else messages.index_select(0, receivers)
                torch.add(own, torch.index_select(messages, 0, partner, out=other), out=place)
        return new


def _partners(receive: Tensor) -> Tensor | None:
    """Return the (n,) senders whose messages peers add to their own rows, or None.

    The result is None unless every peer has exactly one such sender and all shares are one.
    """
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


def metropolis(adjacency: Tensor) -> Tensor:
    """Return symmetric shares 1 / (1 + the larger degree of the two ends), also of a stack of networks.

    The rest of the weight stays at the peer.
    """
    links = adjacency.double()
    links.diagonal(dim1=-2, dim2=-1).zero_()
    degrees = links.sum(-1)
    shares = links / (1 + torch.maximum(degrees[..., :, None], degrees[..., None, :]))
    return shares + torch.diag_embed(1 - shares.sum(-1))


def fastest_mixing(adjacency: Tensor, *, num_steps: int = 400) -> Tensor:
    """Return symmetric non-negative shares with a small second largest |eigenvalue|.

    The shares come from projected subgradient steps that start at Metropolis shares. Boyd,
    Diaconis, Xiao, "Fastest mixing Markov chain on a graph", SIAM Review 2004: the optimum is a
    semidefinite programme; their subgradient method is enough here, because any iterate is a valid
    matrix and the best iterate is kept. If the network has several components, each component mixes
    by itself.
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
        for _ in range(10):  # no peer may give away more than it has: reduce its edges alike, close to a projection
            over = (load(edges) - 1).clamp(min=0) / degrees
            if not bool(over.any()):
                break
            edges = (edges - torch.maximum(over[heads], over[tails])).clamp(min=0)
        total = load(edges).clamp(min=1)
        edges = edges / torch.maximum(total[heads], total[tails])
    return best
