"""The series of influence: the sum of HGP's terms, also where the curvature is negative."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.errors import ConvexityError, SettingError
from fedbilevel.oracle.hypergradient import solve_cg
from fedbilevel.oracle.population import Population
from fedbilevel.studies.influence.predict import influences
from fedbilevel.studies.influence.retrain import Training
from fedbilevel.studies.influence.series import Series
from fedbilevel.studies.influence.study import study
from fedbilevel.tasks.influence import Influence


def matrix(values) -> np.ndarray:
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((len(values),) * 2))
    return q @ np.diag(values) @ q.T


def summed(h: np.ndarray, b: np.ndarray, eta: float, num: int) -> np.ndarray:
    """The series, term by term."""
    total, term = np.zeros_like(b), b
    for _ in range(num):
        total, term = total + eta * term, term - eta * (h @ term)
    return total


def solved(h: np.ndarray, b: np.ndarray, **how) -> tuple[np.ndarray, int]:
    h = torch.as_tensor(h)
    u, num = Series(**how).solve(lambda v: h @ v, torch.as_tensor(b))
    return u.numpy(), num


@pytest.mark.parametrize("num_terms", [1, 2, 7, 400])
def test_in_the_whole_space_it_is_the_sum_of_its_terms_also_along_negative_and_flat_directions(num_terms):
    h = matrix([-0.05, 0.0, 1e-12, 0.3, 2.0, 9.0])
    b = np.random.default_rng(1).standard_normal(6)
    u, num = solved(h, b, lr_system=0.1, num_terms=num_terms, num_products=50)
    assert num <= 6
    np.testing.assert_allclose(u, summed(h, b, 0.1, num_terms), rtol=1e-8)


def test_many_terms_solve_the_system_where_the_curvature_is_positive():
    h, b = matrix([0.5, 1.0, 3.0]), np.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(solved(h, b, lr_system=0.5, num_terms=1000)[0], np.linalg.solve(h, b), rtol=1e-9)


def test_a_complete_space_ends_the_products_and_nothing_to_solve_gives_nothing():
    h = matrix([1.0, 1.0, 1.0, 2.0, 2.0])
    b = np.arange(5.0)
    u, num = solved(h, b, lr_system=0.3, num_terms=9)
    assert num == 2
    np.testing.assert_allclose(u, summed(h, b, 0.3, 9), rtol=1e-9)
    assert not solved(h, np.zeros(5), lr_system=0.3, num_terms=9)[0].any()


def test_a_step_that_is_too_long_is_refused():
    with pytest.raises(SettingError, match=r"^lr_system is 0\.5, but the largest curvature is 9, .*at most 0\.11"):
        solved(matrix([1.0, 9.0]), np.ones(2), lr_system=0.5)


def test_single_precision_keeps_flat_directions():
    h = torch.diag(torch.tensor([1e-7, 1e-5, 1.0]))
    u, _ = Series().solve(lambda v: h @ v, torch.ones(3))
    wanted = summed(h.double().numpy(), np.ones(3), 0.02, 2000)
    np.testing.assert_allclose(u.numpy(), wanted, rtol=1e-3)


def test_a_series_that_overflows_is_refused():
    with pytest.raises(SettingError, match=r"num_terms is 2000, but the most negative curvature is -40, .*fewer terms"):
        solved(matrix([-40.0, 1.0]), np.ones(2))


def test_few_products_give_the_predictions_of_hundreds_of_terms_for_a_network_on_which_cg_fails():
    problem, clients = Influence(data="digits", model="cnn", share=0.03).build()
    population = Population(problem, clients, dtype=torch.float64)
    x, y, everyone = population.x0, population.y0, torch.arange(len(population))
    train, val = (population.data.batch(everyone, role) for role in ("train", "val"))
    mean = lambda rows: population.average(rows, population.weights(everyone))
    with torch.no_grad():
        fx, fy = population.oracle.upper_grads(x, y, val)
        product = lambda v: mean(population.oracle.hessian_product(x, y, v, train))
        with pytest.raises(ConvexityError):
            solve_cg(lambda v: product(v[0])[None], mean(fy)[None])
        total, term = 0, mean(fy)
        for _ in range(300):
            total, term = total + 0.02 * term, term - 0.02 * product(term)
        exact = -(fx - population.oracle.jacobian_product(x, y, total, train))
    method = Series(lr_system=0.02, num_terms=300, num_products=30)
    found = influences(problem, clients, y, method=method, dtype=torch.float64)
    for own, row in zip(found.changes, exact, strict=True):
        np.testing.assert_allclose(own, row[: len(own)], rtol=1e-4, atol=1e-6 * float(exact.abs().max()))
    assert found.cost["rounds"] == 32
    assert found.cost["hvp"] == 31 * len(clients)
    assert 0 < found.residual < 10


def test_it_is_the_default_for_networks_with_a_server(tmp_path):
    task = Influence(data="digits", model="cnn", share=0.03)
    training = Training(kind="push", lr=0.03, num_steps=5)
    found = study(task, training=training, num_removed=1, dtype=torch.float32, at_once=1)
    assert found.method == "series"
    assert found.settings["method"] == {"lr_system": 0.02, "num_terms": 2000, "num_products": 40}
    words = ["influence", "--data", "digits", "--model", "cnn", "--share", "0.03", "--training-num-steps", "3"]
    rest = ["--num-products", "5", "--num-terms", "9", "--num-removed", "1", "--no-pictures", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli, [*words, *rest], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    said = json.loads((tmp_path / "influence.json").read_text())
    assert said["method"] == "series"
    assert said["settings"]["method"] == {"lr_system": 0.02, "num_terms": 9, "num_products": 5}
    assert said["cost"]["rounds"] == 7
