"""Means of a server through the layer: weights, bits, groups of clients and what an engine adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from torch import Tensor

from fedbilevel.aggregation.groups import drawn, is_whole
from fedbilevel.aggregation.layer import Encoded, Fixed, Layer
from fedbilevel.aggregation.sealing import bits_of
from fedbilevel.engines import layered
from fedbilevel.federation.algorithm import Cohort, Sparse
from fedbilevel.federation.sampling import Sampler
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.once import Once

# by name, one row per client that answered; None: not sent, or kept at the client
Answers = dict[str, "Tensor | Sparse | Encoded | None"]


class LayeredMeans:
    """The part of a server that knows the layer. Its places and numbers are those of `Server`."""

    layer: Layer | None
    stream: Stream
    cohort: Cohort
    ids: Tensor
    num_clients: int
    iteration: int
    _positions: Tensor
    _sampler: Sampler
    _counts_of: Once[Tensor]

    # ---- what an engine says --------------------------------------------------------------------------------------

    def _added(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return sums over all processes."""
        return parts

    def _mine(self, places: Tensor, values: Tensor) -> Tensor:
        """Return the values of clients in this process, from one value per place."""
        return values

    def _answered(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the rows of all clients that answered, from the rows of this process."""
        return rows

    def _groups_of_rows(self, places: Tensor, groups: Tensor) -> Tensor:
        """Return the group of each row of this process, from the group of each place."""
        return self._mine(places, groups)

    # ---- what a server uses ---------------------------------------------------------------------------------------

    def _counts(self, places: Tensor, times: Tensor) -> Tensor:
        """Return the weights in the cohort's mean of members, each drawn `times` times."""
        alike = self._sampler.counts(times)
        return self._counts_of(times, self._sampler.member_weights, self.ids, places) if alike is None else alike

    def _layered_means(self, sent: Mapping[str, Encoded], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        """Return means through the layer; rows are those of the clients in this process."""
        assert self.layer is not None
        weights, order, groups = self._counts(places, times), self.ids[places].argsort(), self._groups(places)
        engine = SimpleNamespace(add=self._added, rows=lambda rows: self._answered(rows, places)[order.to(rows.device)])
        split = None if groups is None else layered.Split(groups[order], self._groups_of_rows(places, groups))
        return layered.means(self.layer, sent, self._mine(places, weights), weights[order], self.bits, engine, split)

    def _groups(self, places: Tensor) -> Tensor | None:
        """Return the group of each client at `places`, if a rule compares groups."""
        size = None if self.layer is None else self.layer.settings.groups
        if size is None:
            return None
        cohort = self.ids[self._positions]
        return drawn(self.stream, cohort, self.num_clients, size, self.iteration)[self.ids[places]]

    def _whole_groups(self, answers: Answers, places: Tensor, times: Tensor) -> tuple[Answers, Tensor, Tensor]:
        """Leave out groups of which too few clients answered."""
        groups = self._groups(places)
        stay = None if groups is None else is_whole(groups, self.iteration)
        if stay is None or bool(stay.all()):
            return answers, places, times
        return layered.only(answers, self._mine(places, stay)), places[stay], times[stay]

    @property
    def largest_weight(self) -> int:
        return int(self._sampler.member_weights.max())

    @property
    def bits(self) -> int:
        """Bits of an entry, by which no sum of a cohort overflows."""
        assert self.layer is not None
        return bits_of(self.layer.settings, self.cohort.size(self.num_clients), self.largest_weight)

    def _fixed(self, places: Tensor, times: Tensor) -> Fixed:
        """Return what the clients of this process at `places` need to make integers."""
        return Fixed(self._mine(places, self._counts(places, times)), self.bits, self.largest_weight, len(places))
