"""Fixed point: exact scales, sums without overflow, and figures with two integers."""

import pytest
import torch

from fedbilevel.aggregation import ring
from fedbilevel.errors import SettingError


@pytest.mark.parametrize(("value", "power"), [(1.0, 1.0), (1.1, 2.0), (0.3, 0.5), (0.5, 0.5), (3e5, 2.0**19)])
def test_a_bound_is_the_least_power_of_two(value, power):
    assert ring.power_of_two(value) == power


@pytest.mark.parametrize("whole", [1, 7, 1000, 2**20, 2**40])
def test_no_sum_overflows(whole):
    bits = ring.bits_for(whole)
    largest = ring.weighted(ring.fixed(torch.full((1, 1), 2.0), 2.0, bits), torch.tensor([whole]))
    assert int(largest) == whole * 2 ** (bits - 1) < 2**63  # Python's integers do not wrap


def test_bits_that_could_overflow_are_refused():
    assert ring.bits_for(1000, 54) == 54
    with pytest.raises(
        SettingError, match=r"fixed_point is 54 bits, and a sum over weights of 1048576 in all has room"
    ):
        ring.bits_for(2**20, 54)
    with pytest.raises(SettingError, match=r"the weights of a cohort sum to 2305843009213693952"):
        ring.bits_for(2**61)


@pytest.mark.parametrize("bits", [16, 32, 50])
def test_the_mean_of_integers_is_the_weighted_mean_up_to_half_a_step(bits):
    rows = torch.rand(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 8 - 4
    weights = torch.arange(1, 10)
    total = ring.summed(ring.weighted(ring.fixed(rows, 4.0, bits), weights))
    found = ring.decoded(total, 45, 4.0, bits)
    expected = (rows * weights[:, None]).sum(0) / 45
    assert float((found - expected).abs().max()) <= 4.0 / 2**bits
    order = torch.randperm(9)
    assert torch.equal(total, ring.summed(ring.weighted(ring.fixed(rows[order], 4.0, bits), weights[order])))


def test_masks_that_cancel_leave_the_sum():
    integers, mask = torch.tensor([[5], [-3], [7]]), 2**63 - 2
    masked = integers + torch.tensor([[mask], [-mask], [0]])
    assert int(masked[0]) < 0  # it wrapped
    assert int(ring.summed(masked)) == 9


def test_figures_of_two_integers_are_exact_to_the_last_bits():
    values = torch.tensor([[1e-9, 0.3, 123456.789, -1e9], [2.5, 1 / 3, 1e-4, 12.0]], dtype=torch.float64)
    found = ring.figures_of(ring.summed(ring.limbs(values)))
    assert float(((found - values.sum(0)).abs() / values.sum(0).abs().clamp(min=1)).max()) < 1e-15


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e12])
def test_figures_that_do_not_fit_are_left_to_another_sum(bad):
    assert ring.limbs(torch.tensor([[1.0, bad]], dtype=torch.float64)) is None
