"""End of a robust average: sketches of the peers' values, and the test that all have settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbilevel.federation.averaging import RunningSums
from fedbilevel.peers.exchange import AveragingStatus
from fedbilevel.peers.wire import SKETCH
from fedbilevel.problem.draws import Stream

_TABLES, _BUCKETS = 7, (SKETCH - 1) // 7  # of a sketch


class Sketcher:
    """Short sketches of long rows, which are the same at all peers with the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._places: Tensor | None = None  # bucket of every entry, by table; the second half has the other sign

    def sketch(self, value: Tensor, size: float) -> np.ndarray:
        """Return SKETCH numbers, the last of which is `size`, the norm of the largest initial row.

        A short row is copied. A long row is summed, with random signs, into the buckets of several
        tables. The tables have different signs and buckets, so a difference rarely cancels in all
        of them. The norm of a difference is preserved up to about a third.
        """
        found = torch.zeros(SKETCH, dtype=torch.float64)
        found[-1] = size
        if len(value) < SKETCH:
            found[: len(value)] = value
        else:
            for table, places in enumerate(self._buckets(len(value))):
                sums = torch.bincount(places, value, 2 * _BUCKETS)
                found[table * _BUCKETS : (table + 1) * _BUCKETS] = (sums[:_BUCKETS] - sums[_BUCKETS:]) / _TABLES**0.5
        return torch.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0).numpy()

    def _buckets(self, width: int) -> Tensor:
        if self._places is None or self._places.shape[1] != width:
            words = Stream(self._seed).bits(
                "peers/sketch", torch.tensor([0]), iteration=0, call=0, steps=range(_TABLES), width=width
            )[0]
            self._places = ((words * (2 * _BUCKETS)) >> 32).to(torch.int32)
        return self._places


class Settling:
    """The moment at which this peer's value settled, as numbers of its messages to every peer."""

    def __init__(self, num_peers: int) -> None:
        self.num_peers = num_peers
        self.anchor: np.ndarray | None = None
        self.settled = np.zeros(num_peers, np.int64)

    def look(self, sums: RunningSums, sketch: np.ndarray, limit: float) -> AveragingStatus:
        """Update the status before this peer pushes its sums.

        If the value has moved, all earlier messages carried other values.
        """
        got, sent = (
            np.array([book.get(peer, (0,))[0] for peer in range(self.num_peers)], np.int64)
            for book in (sums.got, sums.sent)
        )
        bound = limit * max(float(sketch[-1]), 1e-300)
        still = self.anchor is not None and float(np.linalg.norm(sketch[:-1] - self.anchor[:-1])) <= bound
        has_value = float(sums.mass[-1]) > 0
        if not still or not has_value:
            self.anchor, self.settled = sketch, sent if has_value else sent + 2**31
        return AveragingStatus(got, self.settled, sketch)


def all_settled(statuses: Mapping[int, AveragingStatus], members: Sequence[int], limit: float) -> bool:
    """Return whether all values agree and every message sent before they agreed has arrived.

    Mass that is still in transit was then pushed with the common value and does not change it.
    """
    if any(peer not in statuses for peer in members):
        return False
    sketches = np.stack([statuses[peer].sketch for peer in members])
    values, scale = sketches[:, :-1], max(float(sketches[:, -1].max()), np.finfo(np.float64).tiny)
    if float(np.linalg.norm(values - values.mean(0), axis=1).max()) > limit * scale:
        return False
    return all(statuses[b].got[a] >= statuses[a].settled[b] for a in members for b in members if a != b)
