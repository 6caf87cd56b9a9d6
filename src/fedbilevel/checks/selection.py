"""A part of the clients and of their samples, so that a check of a large problem is short."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedbilevel.problem.client_data import ClientData, Holdings

MOST_CLIENTS, MOST_SAMPLES = 32, 256  # clients, and samples of each in every role


def selected(data: ClientData, clients: Sequence[Holdings], seed: int) -> tuple[Sequence[Holdings], str]:
    """Return the clients, or a random part of a large number of clients and samples.

    The second value says what was selected; it is empty if all data are used.
    """
    largest = max(int(sizes.max()) for sizes in data.sizes.values())
    if len(clients) <= MOST_CLIENTS and largest <= MOST_SAMPLES:
        return clients, ""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(clients), generator=draw)[:MOST_CLIENTS].sort().values
    return [
        {role: _samples(data, role, int(position), draw) for role in data.fields} for position in chosen
    ], f"on {len(chosen)} of {len(clients)} clients and at most {MOST_SAMPLES} samples of each in a role"


def _samples(data: ClientData, role: str, position: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    size, start = int(data.sizes[role][position]), int(data.offsets[role][position])
    places = start + torch.randperm(size, generator=draw)[:MOST_SAMPLES].sort().values
    return {name: values[places.to(values.device)] for name, values in data.fields[role].items()}
