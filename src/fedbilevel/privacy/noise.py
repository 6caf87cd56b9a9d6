"""Discrete Gaussian noise for rows of 64-bit integers.

The sampler is that of Canonne, Kamath and Steinke (2020): a discrete Laplace number, accepted with a
probability that makes it Gaussian. Uniform integers are exact. Probabilities of acceptance are
rounded to 53 bits, so the distribution of one number has a statistical distance below 2^-48 from the
discrete Gaussian. For a row of a million numbers this adds less than 2^-28 to delta.

The noise of a sum is the sum of the noise of its members, which is not exactly discrete Gaussian. By
Kairouz, Liu and Steinke (2021), the difference for n members with the deviation s each is below
10 n exp(-pi^2 s^2) in epsilon per entry: with s = 4 below 10^-60. `ring_noise` refuses less than 4.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.problem.draws import Stream

LEAST, MOST = 4.0, 2.0**50  # standard deviations in units of the ring
Words = Callable[[int], np.ndarray]  # that many uniform 64-bit words
_SPARE = 2.7  # candidates per number: 0.63 of them are Laplace numbers, of which 0.63 or more are accepted
_ONE_IN_E = np.uint64(math.exp(-1) * 2**64)


def system_words(num: int) -> np.ndarray:
    """Return random words of the operating system, for real sites."""
    return np.frombuffer(os.urandom(8 * num), np.uint64)


def addressed_words(stream: Stream, purpose: str, client: int, *, iteration: int, call: int) -> Words:
    """Return a source of words with an address, for the simulator: each address gives its own words
    in every process and after every resume. They are no secret."""
    step = 0

    def words(num: int) -> np.ndarray:
        nonlocal step
        found = stream.bits(
            purpose,
            torch.tensor([client]),
            iteration=iteration,
            call=call,
            steps=range(step, step + 1),
            width=2 * num,
        )
        step += 1
        halves = found.reshape(num, 2).numpy().astype(np.uint64)
        return halves[:, 0] << np.uint64(32) | halves[:, 1]

    return words


def ring_sigma(clip: float, noise: float, scale: float, length: int, *, members: int = 1) -> float:
    """Return the standard deviation of each member's noise, in units of the ring.

    Rounding to integers can lengthen a row by sqrt(length) / 2, which counts as sensitivity.

    clip: most norm of a row.
    noise: noise multiplier of the sum.
    scale: units of the ring per unit of the row.
    length: number of entries of the row.
    members: fewest members whose noise is in the sum, that is the quorum. Noise of members that
        drop out is then never missed.
    """
    sigma = noise * (clip * scale + math.sqrt(length) / 2) / math.sqrt(members)
    _check(sigma)
    return sigma


def ring_noise(shape: Sequence[int], sigma: float, source: Words) -> Tensor:
    """Return discrete Gaussian noise as 64-bit integers.

    sigma: standard deviation in units of the ring, from 4 up.
    source: `system_words` at real sites, or `addressed_words` in a simulation.
    """
    _check(sigma)
    num = math.prod(shape)
    parts: list[np.ndarray] = []
    missing = num
    while missing:
        accepted = _accepted(int(_SPARE * missing) + 16, sigma, source)[:missing]
        parts.append(accepted)
        missing -= len(accepted)
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])).view(*shape)


def _check(sigma: float) -> None:
    if not LEAST <= sigma <= MOST:
        raise SettingError(
            f"the noise has a standard deviation of {sigma:.3g} units of the ring, expected {LEAST:.0f} to 2^50: "
            "change the scale of the fixed point, or the noise."
        )


def _accepted(num: int, sigma: float, source: Words) -> np.ndarray:
    """Draw candidates and return the Gaussian ones.

    The scale of the Laplace numbers only decides how many are accepted, 0.63 or more. It is a power
    of two near sigma, so that bits of one word give a uniform number and a sign.
    """
    scale = round(math.log2(sigma))
    words = source(num)
    low = (words & np.uint64(2**scale - 1)).astype(np.int64)
    keep = _happens(np.exp(-low / 2**scale), source)
    low, negative = low[keep], words[keep] >> np.uint64(63) == 1
    size = low + (_geometric(len(low), source) << scale)
    chance = np.exp(-((size - sigma**2 / 2**scale) ** 2) / (2 * sigma**2))
    keep = _happens(chance, source) & ~(negative & (size == 0))  # 0 has one sign only
    return np.where(negative, -size, size)[keep]


def _happens(chance: np.ndarray, source: Words) -> np.ndarray:
    """Draw events with these probabilities."""
    uniform = (source(len(chance)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform < chance


def _geometric(num: int, source: Words) -> np.ndarray:
    """Return numbers of events with the probability 1/e before the first failure."""
    found, going = np.zeros(num, np.int64), np.arange(num)
    while len(going):
        going = going[source(len(going)) < _ONE_IN_E]
        found[going] += 1
    return found
