"""Robust means against their dense definitions, in float64 and with unequal weights."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedbilevel.aggregation.robust import CLIPPINGS, mixed, robust_mean
from fedbilevel.aggregation.settings import Choice
from fedbilevel.errors import FedBilevelError

WEIGHTS = torch.tensor([1, 4, 2, 3, 1, 5, 4])


@pytest.fixture
def rows():
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def repeated(rows, weights):
    """Each row as often as its weight says: then every client has the weight one."""
    return rows.repeat_interleave(weights, 0).numpy()


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_trimmed_mean_is_the_mean_without_the_ends(rows, cut):
    among = np.sort(repeated(rows, WEIGHTS), axis=0)  # 20 rows
    found = robust_mean(Choice("trimmed", cut / 20), rows, WEIGHTS)
    assert np.abs(found.numpy() - among[cut:-cut].mean(0)).max() < 1e-14


def test_a_trimmed_mean_with_equal_weights_is_the_textbook_mean(rows):
    found = robust_mean(Choice("trimmed", 2 / 7), rows, torch.ones(7, dtype=torch.int64))
    assert np.abs(found.numpy() - np.sort(rows.numpy(), axis=0)[2:-2].mean(0)).max() < 1e-14


@pytest.mark.parametrize("weights", [WEIGHTS, torch.ones(7, dtype=torch.int64), torch.tensor([1, 1, 1, 1, 1, 1, 10])])
def test_a_median_is_that_of_the_repeated_rows(rows, weights):
    found = robust_mean(Choice("median"), rows, weights)
    assert np.abs(found.numpy() - np.median(repeated(rows, weights), axis=0)).max() < 1e-14


def scores(rows, num_attackers):
    """The definition of Krum, over all subsets of neighbours."""
    num = len(rows)
    found = []
    for i in range(num):
        others = [float(((rows[i] - rows[j]) ** 2).sum()) for j in range(num) if j != i]
        found.append(min(sum(some) for some in itertools.combinations(others, num - num_attackers - 2)))
    return np.array(found)


@pytest.mark.parametrize("num_attackers", [1, 2])
def test_krum_chooses_the_row_with_the_least_score(rows, num_attackers):
    best = scores(rows, num_attackers).argsort()
    assert torch.equal(robust_mean(Choice("krum", num_attackers), rows, WEIGHTS), rows[best[0]])
    some = best[: 7 - num_attackers].copy()
    expected = (rows[some] * WEIGHTS[some, None]).sum(0) / WEIGHTS[some].sum()
    found = robust_mean(Choice("multikrum", num_attackers), rows, WEIGHTS)
    assert float((found - expected).abs().max()) < 1e-14


def test_krum_needs_enough_rows(rows):
    with pytest.raises(FedBilevelError, match=r"7 clients answered, and krum against 3 attackers needs 9"):
        robust_mean(Choice("krum", 3), rows, WEIGHTS)


def test_the_geometric_median_minimises_the_weighted_distances(rows):
    shares = (WEIGHTS.double() / WEIGHTS.sum()).numpy()
    distance = lambda point: float((shares * np.linalg.norm(rows.numpy() - point, axis=1)).sum())
    found = robust_mean(Choice("geometric"), rows, WEIGHTS)
    best = minimize(distance, rows.mean(0).numpy(), method="BFGS", options={"gtol": 1e-10})
    assert distance(found.numpy()) <= best.fun + 1e-12
    away = rows - found
    assert float((torch.tensor(shares)[:, None] * away / away.norm(dim=1, keepdim=True)).sum(0).norm()) < 1e-8


def test_the_geometric_median_of_equal_rows_is_that_row(rows):
    same = rows[:1].expand(4, -1)
    assert torch.equal(robust_mean(Choice("geometric"), same, WEIGHTS[:4]), rows[0])


def test_centred_clipping_takes_the_steps_of_its_definition(rows):
    shares = (WEIGHTS.double() / WEIGHTS.sum()).numpy()
    centre = np.median(repeated(rows, WEIGHTS), axis=0)
    for _ in range(CLIPPINGS):
        steps = [share * (row - centre) * min(1, 0.5 / np.linalg.norm(row - centre))
                 for share, row in zip(shares, rows.numpy(), strict=True)]  # fmt: skip
        centre = centre + sum(steps)
    found = robust_mean(Choice("centred", 0.5), rows, WEIGHTS)
    assert np.abs(found.numpy() - centre).max() < 1e-13


def test_centred_clipping_with_a_large_radius_is_the_mean(rows):
    found = robust_mean(Choice("centred", 1e6), rows, WEIGHTS)
    assert float((found - (rows * WEIGHTS[:, None]).sum(0) / 20).abs().max()) < 1e-13


def test_mixing_averages_the_nearest_rows(rows):
    shares = WEIGHTS.double() / WEIGHTS.sum()
    found = mixed(rows, shares, 2 / 7)
    for i in range(7):
        far = [float(((rows[i] - rows[j]) ** 2).sum()) for j in range(7)]
        near = sorted(range(7), key=lambda j: far[j])[:5]
        expected = sum(float(WEIGHTS[j]) * rows[j] for j in near) / sum(float(WEIGHTS[j]) for j in near)
        assert float((found[i] - expected).abs().max()) < 1e-14


@pytest.mark.parametrize("kind", ["median", "geometric"])
def test_mixing_finds_the_mean_of_honest_clients_that_differ(rows, kind):
    """Two groups of honest clients: the median alone takes one group for the other's attackers."""
    rows[:3] += 20.0
    rows[6] = -100.0
    weights, honest = torch.ones(7, dtype=torch.int64), rows[:6].mean(0)
    alone, both = (robust_mean(Choice(kind), rows, weights, outside) for outside in (None, 1 / 7))
    assert float((both - honest).norm()) < 1e-6
    assert float((alone - honest).norm()) > 5.0


RULES = [Choice("trimmed", 0.3), Choice("median"), Choice("krum", 2), Choice("multikrum", 2), Choice("centred", 1.0),
         Choice("geometric")]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_two_of_seven_attackers_cannot_move_a_robust_mean_far(rows, rule):
    honest, attacked = rows.clone(), rows.clone()
    attacked[:2] = 1e6
    weights = torch.ones(7, dtype=torch.int64)
    found = robust_mean(rule, attacked, weights)
    assert float((found - honest[2:].mean(0)).norm()) < 4 * float(honest[2:].std(0).norm())
    assert float((attacked.mean(0) - honest[2:].mean(0)).norm()) > 1e5
