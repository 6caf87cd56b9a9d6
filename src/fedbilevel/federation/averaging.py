"""Averages between peers without a server: the operators of the verb `mix`, and robust Push-Sum.

Robust Push-Sum keeps, for every edge, the sum of everything that was pushed along it. A message
carries that sum and a number; the receiver adds the part that it has not received before. The mass
of a lost message stays on the edge until the next message that arrives delivers it. Late, duplicate
and reordered messages do no harm.

Reference: Hadjicostis, Vaidya, Dominguez-Garcia, "Robust distributed average consensus via exchange
of running sums", IEEE TAC 2016; with delays and asynchrony: Spiridonoff, Olshevsky, Paschalidis,
"Robust asynchronous stochastic gradient-push", JMLR 2020. In these papers a node has one running
sum for all its fixed receivers; receivers that change from step to step need one sum per edge, as
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.federation.network import AnyNetwork, Links
from fedbilevel.problem.draws import Stream
from fedbilevel.settings import Settings, setting

Kind = Literal["push_sum", "gossip", "exact", "robust"]
STEPS = 10  # of an average without num_steps and tolerance, on a network that does not average exactly
TOLERANCE = {torch.float32: 1e-7, torch.float64: 1e-12}  # of a robust average, relative to the largest row
_LEAST = 1e-6  # the least weight that a split may leave; weights are one on average


@dataclass(frozen=True, kw_only=True)
class Averaging(Settings):
    """Operator of the verb `mix`.

    exact: the mean itself, as if every peer sent its row to every other peer.
    gossip: doubly stochastic steps, for undirected networks.
    push_sum: column-stochastic steps of rows and weights, for any network that connects all peers.
    robust: Push-Sum with running sums, for networks that lose or delay messages.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> where = {"network": fb.Network(kind="ring"), "averaging": fb.Averaging(num_steps=5)}
    >>> settings = {"num_terms": 3, "num_lower_steps": 2, "lr_system": 0.1}
    >>> result = fb.solve(*Quadratic().build(), "hgp", num_iterations=1, **settings, **where)
    >>> list(result.ledger.phases)
    ['local', 'push y', 'mix u', 'mix v, x']
    """

    kind: Kind = setting("push_sum", "the operator behind an average")
    num_steps: int | None = setting(
        None,
        "steps of one averaging (None: 10, on a base network one cycle, and a robust one until all peers agree)",
        symbol="S",
        least=1,
    )
    tolerance: float | None = setting(
        None,
        "instead of a fixed number of steps: until all peers agree up to this, relative to the largest row",
        above=0,
    )
    max_steps: int = setting(10_000, "with a tolerance: an error after so many steps", least=1)
    weights: Literal["reset", "kept"] = setting(
        "reset", "Push-Sum weights start at one for every average, or where the last one left them"
    )

    def steps(self, links: Links) -> int:
        """Return the number of steps of an average without a limit on the disagreement."""
        return (links.cycle or STEPS) if self.num_steps is None else self.num_steps

    def limit(self, dtype: torch.dtype) -> float | None:
        """Return the disagreement at which an average ends, relative to the largest row.

        The result is None if a number of steps ends the average. A robust average without either
        setting ends by disagreement, as between real peers, which cannot count steps together.
        """
        is_open = self.kind == "robust" and self.num_steps is None and self.tolerance is None
        return TOLERANCE[dtype] if is_open else self.tolerance

    def check(self, network: AnyNetwork, links: Links) -> None:
        if network.faulty and self.kind != "robust":
            raise SettingError(
                f"the network loses or delays messages, and {self.kind} averaging never recovers what a lost "
                "message carried: use averaging 'robust'."
            )
        if self.kind == "gossip" and not links.doubly_stochastic:
            raise SettingError(
                "gossip needs shares that sum to one at the receiver too, which those by out-degree do not: "
                "use averaging 'push_sum', or metropolis "
                "shares on an undirected network."
            )


class Message(NamedTuple):
    sender: int
    receiver: int
    number: int
    total: Tensor  # the running sum of this edge: (d + 1,) with the weight last


class RunningSums:
    """One peer of robust Push-Sum.

    The mass is the row and its weight in one float64 vector; `mass[:-1] / mass[-1]` tends to the
    average.
    """

    def __init__(self, number: int, row: Tensor, weight: float = 1.0) -> None:
        self.number = number
        self.mass = torch.cat([row.double(), row.new_tensor([weight], dtype=torch.float64)])
        self.sent: dict[int, tuple[int, Tensor]] = {}  # by receiver: messages so far, running sum
        self.got: dict[int, tuple[int, Tensor]] = {}  # by sender: number of the newest message, its running sum

    @property
    def value(self) -> Tensor:
        return self.mass[:-1] / self.mass[-1]

    def wake(self, receivers: Iterable[int]) -> list[Message]:
        """Divide the mass between this peer and the receivers, and return their messages.

        If nearly all messages are lost, mass leaves this peer and none arrives. The remaining mass
        must stay above the rounding of the running sums, whose differences are added to it. So a
        small mass is not divided, and the message repeats the sum, which still delivers the mass on
        the edge.

        receivers: numbers of other peers.
        """
        receivers = list(receivers)
        splits = float(self.mass[-1]) >= _LEAST * (len(receivers) + 1)
        self.mass = self.mass / (len(receivers) + 1) if splits else self.mass
        messages = []
        for receiver in receivers:
            count, total = self.sent.get(receiver, (0, torch.zeros_like(self.mass)))
            self.sent[receiver] = (count + 1, total + self.mass if splits else total)
            messages.append(Message(self.number, receiver, *self.sent[receiver]))
        return messages

    def reclaim(self, peer: int) -> None:
        """Undo all exchanges with a lost peer.

        This peer takes back everything that it pushed to the lost peer, and gives back everything
        that it received. When all remaining peers have done so, their masses sum to those at the
        start. The weight may be near zero or negative until a few messages have passed.
        """
        for book, sign in ((self.sent, 1), (self.got, -1)):
            if peer in book:
                self.mass = self.mass + sign * book.pop(peer)[1]

    def receive(self, message: Message) -> bool:
        """Add a message if it is newer than all others of its sender; return whether it is."""
        count, total = self.got.get(message.sender, (0, torch.zeros_like(self.mass)))
        if message.number <= count:
            return False
        self.mass = self.mass + (message.total - total)
        self.got[message.sender] = (message.number, message.total)
        return True


def parked(peers: Sequence[RunningSums]) -> Tensor:
    """Return the mass that was sent and has not arrived, summed over all edges.

    The sum of this mass and the mass of all peers never changes.
    """
    rest = torch.zeros_like(peers[0].mass)
    for peer in peers:
        for receiver, (_, total) in peer.sent.items():
            rest = rest + total
            if peer.number in peers[receiver].got:
                rest = rest - peers[receiver].got[peer.number][1]
    return rest


def waiting(peers: Sequence[RunningSums]) -> Tensor:
    """Return the value of the mass on the edges: one row, or no row if there is no such mass.

    Peers may agree with each other while this row differs. The average lies between all these rows,
    so it is reached only when this row agrees too.
    """
    rest = parked(peers)
    scale = max(float(peer.mass[-1]) for peer in peers)
    return (rest[:-1] / rest[-1])[None] if float(rest[-1]) > 1e-12 * scale else rest.new_zeros(0, len(rest) - 1)


def spread(rows: Tensor, scale: Tensor) -> float:
    """Return the largest distance of a peer from the middle, relative to `scale`."""
    return float(
        torch.linalg.vector_norm(rows - rows.mean(0), dim=1).max() / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    )


def robust_steps(
    peers: Sequence[RunningSums],
    network: AnyNetwork,
    links: Links,
    start: int,
    charge: Callable[[Tensor], None],
    late: dict[int, list[Message]] | None = None,
) -> Callable[[], None]:
    """Return a function that takes one step with faults.

    In a step, some peers push along the links of that step; messages are lost, late or reordered.
    Faults are drawn per (seed, step, edge).

    charge: function that receives the (n, n) matrix of messages sent, including lost messages.
    late: messages under way by the step of their arrival; None: there are none.
    """
    n, stream = len(peers), Stream(network.seed)
    due: dict[int, list[Message]] = {} if late is None else late
    step = start

    def draw(purpose: str, width: int) -> Tensor:
        return stream.bits(purpose, torch.arange(n), iteration=step, call=0, steps=range(1), width=width)[:, 0]

    def advance() -> None:
        nonlocal step
        links_now = links.adjacency(step) & ~torch.eye(n, dtype=torch.bool)
        awake = draw("network/awake", 1).double() < network.activity * 2**32
        links_now &= awake
        arrives = draw("network/loss", n).double() >= network.loss * 2**32
        delays = (draw("network/delay", n) * (network.max_delay + 1)) >> 32
        charge(links_now)
        for i in awake[:, 0].nonzero()[:, 0].tolist():
            for message in peers[i].wake(links_now[i].nonzero()[:, 0].tolist()):
                if bool(arrives[i, message.receiver]):
                    due.setdefault(step + int(delays[i, message.receiver]), []).append(message)
        for message in due.pop(step, []):
            peers[message.receiver].receive(message)
        step += 1

    return advance
