"""Fixed point in the ring of 64-bit integers, whose sums do not depend on the order.

An entry v of a row is the integer round(v / step) with step = bound / 2^(bits - 1). A row counts
with its whole weight, so a sum stays below 2^63 if the sum of all weights is below 2^(64 - bits).
Noise takes room like a weight of 80 standard deviations, which it exceeds with a probability below
exp(-800). All are known before anything is sent, so no sum can overflow. Bounds are powers of two, so that
the division is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbilevel.errors import SettingError

MOST_BITS = 54  # integers up to 2^53 are exact as float64
LEAST_BITS = 8
_TAIL = 80  # 40 standard deviations, of which rounding to integers may double the size
_NOISE_BITS = 49  # standard deviations stay below 2^50
_HIGH, _LOW, _LARGEST = 2.0**-8, 2.0**-50, 2.0**34  # steps and range of figures, which have two integers each


def bits_for(whole: int, asked: int | None = None, noise: float = 0.0) -> int:
    """Return the bits of an entry if the weights sum to at most `whole`.

    asked: number of bits from the settings, which is refused if a sum could overflow.
    noise: standard deviation of the noise in a sum, relative to the largest entry.
    """
    most = min(MOST_BITS, 64 - (whole + math.ceil(_TAIL * noise)).bit_length())
    if noise:
        most = min(most, _NOISE_BITS - math.ceil(math.log2(noise)))
    if most < LEAST_BITS:
        less = "give smaller weights, or less noise" if noise else "give smaller weights"
        raise SettingError(f"the weights of a cohort sum to {whole}, expected less than 2**56 in all: {less}.")
    if asked is not None and asked > most:
        raise SettingError(
            f"aggregation.fixed_point is {asked} bits, and a sum over weights of {whole} in all has room for {most}: "
            f"lower it to {most}, or leave it out."
        )
    return asked or most


def power_of_two(value: float) -> float:
    """Return the least power of two that is at least `value`."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def fixed(rows: Tensor, bound: float, bits: int) -> Tensor:
    """Return rows as integers; entries are at most `bound`, a power of two."""
    return (rows.double() * (2.0 ** (bits - 1) / bound)).round().to(torch.int64)


def weighted(integers: Tensor, weights: Tensor) -> Tensor:
    """Return rows times their whole weights."""
    return integers * weights.to(integers.device, torch.int64)[:, None]


def summed(integers: Tensor) -> Tensor:
    """Return the sum of rows, which wraps at 2^64 as masks do."""
    return integers.sum(0, dtype=torch.int64)


def decoded(total: Tensor, whole: int, bound: float, bits: int) -> Tensor:
    """Return the mean in float64, from a sum of weighted integers."""
    return total.double() / whole * (bound / 2.0 ** (bits - 1))


def limbs(values: Tensor) -> Tensor | None:
    """Return every figure as two integers, (k, 2c), or None if a figure does not fit.

    The figures of a measurement have no common scale. Two integers hold figures up to 2^34 with an
    error of 2^-51, for up to 2^20 clients.
    """
    if not bool((values.abs() <= _LARGEST).all()):  # also NaN
        return None
    high = (values / _HIGH).round()
    low = ((values - high * _HIGH) / _LOW).round()
    return torch.cat([high, low], dim=1).to(torch.int64)


def figures_of(total: Tensor) -> Tensor:
    """Return float64 sums of figures, from sums of their two integers."""
    high, low = total.double().chunk(2)
    return high * _HIGH + low * _LOW
