"""Labels distributed over clients by a Dirichlet distribution.

No sample is lost, every client has enough samples, and the proportions are those drawn.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.data.partition import dirichlet
from fedbilevel.errors import ProblemError


@given(
    st.integers(1, 200),
    st.integers(1, 12),
    st.floats(0.01, 100),
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_every_sample_goes_to_one_client_and_nobody_has_too_few(
    num_samples, num_clients, alpha, least, num_labels, seed
):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_labels, num_samples)
    if num_samples < least * num_clients:
        with pytest.raises(
            ProblemError, match=f"{num_samples} samples cannot give {num_clients} clients at least {least} each"
        ):
            dirichlet(labels, num_clients, alpha, rng, least)
        return
    parts = dirichlet(labels, num_clients, alpha, rng, least)
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_samples))
    assert min(map(len, parts)) >= least


def test_counts_per_label_follow_the_proportions_drawn_for_it():
    labels = np.repeat([0, 1, 2], [500, 300, 40])
    parts = dirichlet(labels, 7, 0.4, np.random.default_rng(3), least=0)
    rng = np.random.default_rng(3)
    for label, num in ((0, 500), (1, 300), (2, 40)):
        rng.permutation(num)
        expected = num * rng.dirichlet(np.full(7, 0.4))
        counts = np.array([(labels[part] == label).sum() for part in parts])
        assert np.abs(counts - expected).max() <= 1  # both ends of a part are rounded


def test_a_small_alpha_gathers_a_label_at_few_clients_and_a_large_one_spreads_it():
    """For a Dirichlet distribution over n clients the expected sum of squared shares is known.

    Its mean over labels is (1 + alpha) / (1 + n alpha).
    """
    labels = np.tile(np.arange(200), 300)
    for alpha in (0.1, 0.4, 5.0):
        parts = dirichlet(labels, 10, alpha, np.random.default_rng(0), least=0)
        shares = np.stack([np.bincount(labels[part], minlength=200) / 300 for part in parts])
        assert (shares**2).sum(0).mean() == pytest.approx((1 + alpha) / (1 + 10 * alpha), rel=0.08)


def test_which_samples_of_a_label_a_client_gets_is_random():
    first = dirichlet(np.zeros(1000, int), 2, 50.0, np.random.default_rng(0))[0]
    assert 400 < first.mean() < 600  # without shuffling, the first client would have the first half
    again, other = (dirichlet(np.zeros(1000, int), 2, 50.0, np.random.default_rng(seed))[0] for seed in (0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_what_is_missing_comes_from_whoever_has_most():
    labels = np.tile(np.arange(10), 18)
    free, filled = (dirichlet(labels, 40, 0.05, np.random.default_rng(5), least) for least in (0, 3))
    before, after = (np.array([len(part) for part in parts]) for parts in (free, filled))
    assert (before < 3).sum() > 5
    assert (after[before < 3] == 3).all()
    given_up = before > after
    assert after[given_up].max() - after[given_up].min() <= 1  # the largest are levelled down together
    assert before[~given_up].max() <= after[given_up].max() + 1
