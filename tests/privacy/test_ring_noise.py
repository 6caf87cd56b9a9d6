"""Discrete Gaussian noise: its moments and its distribution, from fixed seeds."""

import math

import numpy as np
import pytest
import torch

from fedbilevel.errors import SettingError
from fedbilevel.privacy import addressed_words, ring_noise, ring_sigma, system_words
from fedbilevel.problem.draws import Stream


def addressed(seed=0, client=0, purpose="noise/y", iteration=3, call=1):
    return addressed_words(Stream(seed), purpose, client, iteration=iteration, call=call)


@pytest.mark.parametrize("sigma", [4.0, 4.7, 5.7, 30.0, 1e6, 1.4 * 2**30, 2.0**40])
def test_moments(sigma):
    num = 200_000
    drawn = ring_noise((num,), sigma, addressed()).double() / sigma
    mean, variance = float(drawn.mean()), float(drawn.var())
    third, fourth = float((drawn**3).mean()), float((drawn**4).mean())
    error = 4.5 / math.sqrt(num)  # deviations of the means of z, z^2, z^3 and z^4: 1, sqrt 2, sqrt 15, sqrt 96
    assert abs(mean) < error
    assert abs(variance - 1) < error * math.sqrt(2)
    assert abs(third) < error * math.sqrt(15)
    assert abs(fourth - 3) < error * math.sqrt(96)


@pytest.mark.parametrize("sigma", [4.0, 5.6, 5.7])
def test_the_distribution_is_the_discrete_gaussian(sigma):
    """Chi-square over single integers; a rounded or truncated Gaussian with this sigma would fail."""
    num, reach = 500_000, int(4 * sigma)
    drawn = ring_noise((num,), sigma, addressed(seed=1)).numpy()
    values = np.arange(-200, 201)
    mass = np.exp(-(values**2) / (2 * sigma**2))
    mass /= mass.sum()
    inner = abs(values) <= reach

    def chi_square(mass):
        expected = num * np.append(mass[inner], mass[~inner].sum())
        counts = np.bincount(np.clip(drawn, -reach - 1, reach + 1) + reach + 1, minlength=2 * reach + 3)
        counts = np.append(counts[1:-1], counts[0] + counts[-1])
        return ((counts - expected) ** 2 / expected).sum()

    degrees = 2 * reach + 1
    assert chi_square(mass) < degrees + 4 * math.sqrt(2 * degrees)
    floor = (
        np.array([math.erf((v + 1) / sigma / math.sqrt(2)) - math.erf(v / sigma / math.sqrt(2)) for v in values]) / 2
    )
    assert chi_square(floor) > degrees + 50 * math.sqrt(2 * degrees)  # what rounding down would give


def test_large_deviations_fill_all_low_bits():
    drawn = ring_noise((100_000,), 2.0**40, addressed(seed=2)).numpy()
    counts = np.bincount(drawn & 255, minlength=256)
    expected = len(drawn) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 4 * math.sqrt(2 * 255)


def test_draws_have_addresses():
    draw = lambda **address: ring_noise((50,), 10.0, addressed(**address))
    assert torch.equal(draw(), draw())
    others = [{"seed": 1}, {"client": 1}, {"purpose": "noise/u"}, {"iteration": 4}, {"call": 2}]
    assert not any(torch.equal(draw(), draw(**other)) for other in others)


def test_real_sites_draw_from_the_system():
    one, other = (ring_noise((40, 25), 1e5, system_words) for _ in range(2))
    assert one.shape == (40, 25)
    assert one.dtype == torch.int64
    assert not torch.equal(one, other)
    assert 0.8e5 < float(one.double().std()) < 1.2e5
    assert ring_noise((0,), 5.0, system_words).shape == (0,)


def test_the_noise_of_a_sum_has_the_deviation_that_the_account_counts():
    clip, noise, scale, length, quorum = 1.02, 1.5, 10.0, 400, 4
    row = torch.full((length,), 0.051, dtype=torch.float64)  # rounding doubles every entry
    sensitivity = clip * scale + math.sqrt(length) / 2
    assert float(torch.linalg.vector_norm(row)) == pytest.approx(clip)
    assert clip * scale < float(torch.linalg.vector_norm((row * scale).round())) <= sensitivity
    sigma = ring_sigma(clip, noise, scale, length, members=quorum)
    total = sum(ring_noise((20_000,), sigma, addressed(client=i)) for i in range(quorum)).double()
    assert float(total.std()) / sensitivity == pytest.approx(noise, rel=0.02)


@pytest.mark.parametrize("sigma", [0.0, 3.9, 2.0**51, math.nan, math.inf])
def test_deviations_that_the_ring_cannot_hold_are_refused(sigma):
    with pytest.raises(SettingError, match="units of the ring, expected 4 to"):
        ring_noise((3,), sigma, system_words)
