"""The mixture of two Gaussians, against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbilevel.detectors._mixture import upper_part


@pytest.mark.parametrize(("dim", "apart"), [(1, 6.0), (1, 2.5), (3, 2.0)])
def test_responsibilities_are_those_of_scikit_learn(dim, apart):
    mixture = pytest.importorskip("sklearn.mixture")
    rng = np.random.default_rng(5)
    upper = rng.random(400) < 0.3
    rows = rng.standard_normal((400, dim)) * np.where(upper, 1.7, 0.6)[:, None] + apart * upper[:, None]
    ends = rows[np.argsort(rows.sum(1))[[0, -1]]]
    fit = mixture.GaussianMixture(2, covariance_type="diag", means_init=ends, tol=1e-12, max_iter=2000, reg_covar=1e-9)
    wanted = fit.fit(rows).predict_proba(rows)[:, np.argmax(fit.means_.sum(1))]
    found = upper_part(torch.tensor(rows)).numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    unsure = ((found > 0.05) & (found < 0.95)).mean()
    assert unsure > 0.05 or (dim, apart) != (1, 2.5)  # the parts overlap
    assert ((found > 0.5) == upper).mean() > 0.9


def test_the_upper_part_has_the_larger_mean_whatever_the_order_and_unit():
    values = torch.tensor([5.0, 0.1, 0.2, 5.3, 0.15, 5.1, 0.12])
    wanted = [1, 0, 0, 1, 0, 1, 0]
    assert upper_part(values).round().tolist() == wanted
    assert upper_part(1e-6 * values).round().tolist() == wanted
    assert upper_part(values - 100).round().tolist() == wanted
    assert upper_part(values.flip(0)).round().tolist() == wanted[::-1]


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0, 2.0], [0.0, 0.0]], ids=str)
def test_equal_values_have_no_upper_part(values):
    assert upper_part(torch.tensor(values)).tolist() == [0.0] * len(values)
