"""Pushes through running sums in a simulation: edges keep what was lost until a message arrives.

In contrast to a robust average, the sums belong to the whole run: every push of an algorithm goes
on where the last push left them, and messages may arrive during a later push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.federation.averaging import Message, RunningSums, parked, robust_steps
from fedbilevel.federation.network import AnyNetwork, Links


class RunningPushes:
    """Running sums of all edges, and the messages under way.

    charge: function that receives the (n, n) matrix of messages sent in a step.
    """

    def __init__(self, network: AnyNetwork, links: Links, width: int, charge: Callable[[Tensor], None]) -> None:
        self.network, self.links, self.charge = network, links, charge
        nothing = torch.zeros(width, dtype=torch.float64)
        self.peers = [RunningSums(number, nothing) for number in range(links.num_peers)]
        self.due: dict[int, list[Message]] = {}

    def push(self, rows: Tensor, weights: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return rows and weights, by peer number, after one step of the network."""
        mass = torch.cat([rows.double(), weights.double()], dim=1).cpu()
        for peer, own in zip(self.peers, mass, strict=True):
            peer.mass = own
        robust_steps(self.peers, self.network, self.links, step, self.charge, self.due)()
        mass = torch.stack([peer.mass for peer in self.peers])
        return mass[:, :-1].to(rows), mass[:, -1:].to(weights)

    def on_edges(self) -> Tensor:
        """Return the mass that was sent and has not arrived: (d + 1,)."""
        return parked(self.peers)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the sums as tensors, and the address of each as plain numbers."""
        tensors: dict[str, Tensor] = {}
        addresses: dict[str, Any] = {}
        for name in ("sent", "got"):
            entries = [
                (peer.number, other, count, total)
                for peer in self.peers
                for other, (count, total) in sorted(getattr(peer, name).items())
            ]
            addresses[name] = [list(entry[:3]) for entry in entries]
            tensors[name] = self._stacked([entry[3] for entry in entries])
        late = [(step, *message) for step in sorted(self.due) for message in self.due[step]]
        addresses["due"] = [list(entry[:4]) for entry in late]
        tensors["due"] = self._stacked([entry[4] for entry in late])
        return tensors, addresses

    def load_state_dict(self, tensors: Mapping[str, Tensor], addresses: Mapping[str, Any]) -> None:
        for name in ("sent", "got"):
            for (number, other, count), total in zip(addresses[name], tensors[name], strict=True):
                getattr(self.peers[number], name)[other] = (count, total.clone())
        self.due.clear()
        for (step, sender, receiver, number), total in zip(addresses["due"], tensors["due"], strict=True):
            self.due.setdefault(step, []).append(Message(sender, receiver, number, total.clone()))

    def _stacked(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) if rows else torch.zeros(0, len(self.peers[0].mass), dtype=torch.float64)
