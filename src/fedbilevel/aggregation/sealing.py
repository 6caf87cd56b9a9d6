"""Noise of differential privacy, in the ring of integers.

At the level of clients, each client adds its part of the noise to its weighted integers. The noise of
a sum over at least `members` clients has the standard deviation `noise` times the most that one
client can change the sum: its weight times the norm `clip`, and the rounding to integers. At the
level of examples, each derivative has noise, see `privacy.noisy_oracle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedbilevel.aggregation import ring
from fedbilevel.aggregation.layer import At, Fixed, Way
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import SettingError
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.host import Host
from fedbilevel.privacy.noise import Words, addressed_words, ring_noise, ring_sigma, system_words
from fedbilevel.privacy.noisy_oracle import KINDS, ExampleNoise, check_means
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
    noise = settings.of_rows().noise
    return Noisy(noise, source) if settings.secure or noise is not None else None


def bits_of(settings: Aggregation, size: int, largest: int) -> int:
    """Return the bits of an entry, for cohorts of `size` clients with weights up to `largest`."""
    noise = settings.of_rows().noise or 0.0
    return ring.bits_for(size * largest, settings.fixed_point, noise * largest * math.sqrt(size))


def hide_examples(settings: Aggregation | None, host: Host, source: Source) -> None:
    """Put noise into the derivatives of a host, if the settings ask for privacy of examples."""
    if settings is None or settings.level == "client":
        return
    assert settings.noise is not None
    assert settings.clip is not None
    check_batches(settings, host.batch_size)
    check_means(host)
    draws = lambda purpose, client, iteration, call: source(At("examples", purpose, iteration, call), client)
    clips = {kind: float((settings.clips or {}).get(kind, settings.clip)) for kind in KINDS}
    host.noise = ExampleNoise(clips, settings.noise, settings.rate, draws)


def check_batches(settings: Aggregation, size: BatchSize) -> None:
    """Raise if batches have a fixed size, in which an example may be twice and whose draws are known."""
    sizes = size.values() if isinstance(size, Mapping) else (size,)
    if settings.level == "example" and any(one is not None for one in sizes):
        raise SettingError(
            f"batch_size is {size!r}, and with aggregation.level = 'example' each example takes part by a coin: leave "
            "out batch_size, and set aggregation.rate."
        )
