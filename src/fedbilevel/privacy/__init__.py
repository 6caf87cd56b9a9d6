"""Differential privacy of what leaves the clients: clipping, noise and the account of epsilon.

A release is a sum of clipped rows with Gaussian noise. A row is one sample's derivative (privacy of
samples) or one client's row (privacy of clients). `noise` is the standard deviation of the noise of
the sum, divided by the most that one row can change the sum.
"""

from __future__ import annotations

from fedbilevel.privacy.accountant import Accountant, Budget, Release, joint
from fedbilevel.privacy.examples import per_example_clipped_sum
from fedbilevel.privacy.noise import addressed_words, ring_noise, ring_sigma, system_words

__all__ = [
    "Accountant",
    "Budget",
    "Release",
    "addressed_words",
    "joint",
    "per_example_clipped_sum",
    "ring_noise",
    "ring_sigma",
    "system_words",
]
