"""Noise of client-level differential privacy, in the ring of integers.

Each client adds its part of the noise to its weighted integers. The noise of a sum over at least
`members` clients has the standard deviation `noise` times the most that one client can change the
sum: its weight times the norm `clip`, and the rounding to integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedbilevel.aggregation import ring
from fedbilevel.aggregation.layer import At, Fixed, Way
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import SettingError
from fedbilevel.privacy.noise import Words, addressed_words, ring_noise, ring_sigma, system_words
from fedbilevel.problem.draws import Stream

Source = Callable[[At, int], Words]  # words for the noise of a client in a call


class Noisy:
    """A ring with noise and without masks, or with neither."""

    def __init__(self, noise: float | None, source: Source) -> None:
        self._noise, self._source = noise, source

    def noised(self, integers: Tensor, ids: Tensor, way: Way, fixed: Fixed) -> Tensor:
        if self._noise is None:
            return integers
        if way.settings.clip is None:
            raise SettingError(
                f"the rows {way.at.name!r} of phase {way.at.phase!r} are not clipped, so noise would not hide them: "
                f"give aggregation.sequences.{way.at.name}.clip, or leave out aggregation.noise."
            )
        scale = 2.0 ** (fixed.bits - 1) / way.bound
        sigma = fixed.largest * ring_sigma(way.settings.clip, self._noise, scale, way.width, members=fixed.members)
        drawn = [ring_noise(integers.shape[1:], sigma, self._source(way.at, client)) for client in ids.tolist()]
        return integers + torch.stack(drawn).to(integers.device) if drawn else integers

    def masked(self, integers: Tensor, ids: Tensor, at: At) -> Tensor:
        return integers

    def unmasked(self, total: Tensor, at: At) -> Tensor:
        return total


def addressed(stream: Stream) -> Source:
    """Return the source of a simulation: noise that a seed repeats, which is no secret."""
    return lambda at, client: addressed_words(
        stream, f"noise.{at.phase}.{at.name}", client, iteration=at.iteration, call=at.call
    )


def secret(at: At, client: int) -> Words:
    """Return random words of the operating system, the source of a site."""
    return system_words


def ring_of(settings: Aggregation, source: Source) -> Noisy | None:
    """Return the ring of a run, or None if its rows need not be integers."""
    return Noisy(settings.noise, source) if settings.secure or settings.noise is not None else None


def bits_of(settings: Aggregation, size: int, largest: int) -> int:
    """Return the bits of an entry, for cohorts of `size` clients with weights up to `largest`."""
    return ring.bits_for(size * largest, settings.fixed_point, (settings.noise or 0.0) * largest * math.sqrt(size))
