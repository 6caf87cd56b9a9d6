"""The indirect part of the hypergradient that a method takes, against dense algebra of the quadratic task."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbilevel.errors import ExperimentError
from fedbilevel.oracle.population import Population
from fedbilevel.runs.solve import solve
from fedbilevel.studies import indirect
from fedbilevel.studies.experiment import Job
from fedbilevel.studies.given import algorithm
from fedbilevel.studies.kinds import optimise
from fedbilevel.tasks.quadratic import Quadratic

TASK = Quadratic(num_clients=3, dim_upper=3, dim_lower=4, cross=0.5)
RUN = {"dtype": torch.float64, "seed": 0}


def dense(x, y, p):
    """Return the three figures by numpy; p is (d,) or has a row per client."""
    form = TASK.closed_form()
    s, mean = form.stacked, form._mean
    rows = np.broadcast_to(p, s["c"].shape)
    direct = np.linalg.norm(mean(s["R"]) @ x - mean(s["r"]) + mean(s["E"]).T @ y)
    right = mean(s["D"]) @ y - mean(s["Dt"]) + mean(s["E"]) @ x
    through = lambda v: np.linalg.norm(mean(np.einsum("nij,ni->nj", s["B"], v)))
    solved = np.broadcast_to(np.linalg.solve(mean(s["A"]), right), s["c"].shape)
    left = mean(np.einsum("nij,nj->ni", s["A"], rows)) - right
    return through(rows) / direct, through(solved) / direct, np.linalg.norm(left) / np.linalg.norm(right)


def right_side(x, y):
    s, mean = TASK.closed_form().stacked, TASK.closed_form()._mean
    return mean(s["D"]) @ y - mean(s["Dt"]) + mean(s["E"]) @ x


def after(settings, num_iterations=7):
    built, chosen = TASK.build(), algorithm(settings)
    result = solve(built.problem, built.clients, chosen, num_iterations=num_iterations, **RUN)
    return indirect.measured(built, chosen, result, RUN), result


def test_a_method_that_carries_u_is_measured_at_its_u():
    found, result = after({"name": "fedbio", "num_local_steps": 2, "lr_lower": 0.05, "lr_system": 0.05})
    x, y, u = (getattr(result.state, name).numpy() for name in "xyu")
    assert [found[name] for name in indirect.FIGURES] == pytest.approx(dense(x, y, u), rel=1e-4)
    assert found["indirect_share"] > 0.01


def test_aggitd_is_measured_at_the_p_of_its_series():
    step = 0.03
    found, result = after({"name": "fbo_aggitd", "num_lower_rounds": 0, "lr_system": step})
    x, y = (getattr(result.state, name).numpy() for name in "xy")
    assert [found[name] for name in indirect.FIGURES] == pytest.approx(dense(x, y, step * right_side(x, y)), rel=1e-4)
    assert found["system_residual"] > 0.5  # one term does not solve the system


def test_many_terms_solve_the_system():
    found, _ = after({"name": "fbo_aggitd", "num_lower_rounds": 400, "lr_system": 0.1, "lr_lower": 0.1}, 2)
    assert found["system_residual"] < 1e-3
    assert found["indirect_share"] == pytest.approx(found["solved_share"], rel=1e-2)


def test_rows_of_clients_have_the_mean_of_their_products():
    built, draw = TASK.build(), np.random.default_rng(0)
    population = Population(built.problem, built.clients, dtype=torch.float64)
    x, y, rows = draw.normal(size=3), draw.normal(size=4), draw.normal(size=(3, 4))
    at = indirect.Multiplied(*map(torch.from_numpy, (np.tile(x, (3, 1)), y, rows)))
    found = indirect.shares(population, at)
    assert [found[name] for name in indirect.FIGURES] == pytest.approx(dense(x, y, rows), rel=1e-4)
    apart = at._replace(x=torch.from_numpy(draw.normal(size=(3, 3))))
    with pytest.raises(ExperimentError, match="points of their own"):
        indirect.shares(population, apart)


def test_a_method_without_products_has_no_figures():
    assert after({"name": "penalty"})[0] == {}


def test_other_scopes_are_refused():
    task, chosen = Quadratic(num_clients=3, lower="local"), algorithm({"name": "fedbio"})
    built = task.build()
    result = solve(built.problem, built.clients, chosen, num_iterations=1, **RUN)
    with pytest.raises(ExperimentError, match="a shared x and a global lower level"):
        indirect.measured(built, chosen, result, RUN)


def test_an_experiment_has_the_figures_and_its_digest_stays(tmp_path):
    plain = {
        "task": {"name": "quadratic", "num_clients": 3},
        "algorithm": {"name": "fbo_aggitd"},
        "num_rounds": 26,
    }
    row = {**plain, "indirect": True}
    go = lambda one: optimise.run(one, repetition=0, folder=tmp_path / "r", device="cpu", say=lambda _: None).figures
    found = go(row)
    assert set(indirect.FIGURES) <= found.keys()
    assert go(row) == pytest.approx({**found, "seconds": pytest.approx(found["seconds"], abs=60)})  # runs it again
    assert Job("p", "r", 0, "optimise", plain).digest == Job("p", "r", 0, "optimise", row).digest
