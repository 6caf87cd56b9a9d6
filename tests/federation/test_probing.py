"""Step sizes of "auto" against closed forms, under scaling, in every scope, and after a resumption."""

import dataclasses

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ProblemWarning, ScopeError, SettingError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.auto_steps import measured
from fedbilevel.federation.probing import SAFE, SAFE_UPPER
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.runs.record import Record
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import fewer, start_at

AUTO = {"lr_upper": "auto", "lr_lower": "auto", "lr_system": "auto"}


def found(built, **options):
    fed = Simulation(FedBiO(), *built, dtype=torch.float64, **options)
    fed.begin(0)
    with torch.no_grad():
        return measured(fed.algorithm, fed, upper=True)


def test_steps_of_a_quadratic_follow_its_eigenvalues():
    """Twenty-four identical clients differ from their mean by the factor of the 32-norm alone."""
    task = Quadratic(num_clients=24, heterogeneity=0.0, noise=0.0, num_samples=1)
    closed, n = task.closed_form(), 24
    largest = np.linalg.eigvalsh(closed._mean(closed.stacked["A"]))[-1]
    one = found(task.build())
    assert one.lower == pytest.approx(SAFE / (largest * n ** (1 / 32)), rel=1e-2)
    assert one.averaged == pytest.approx(SAFE / largest, rel=1e-2)
    h = closed.hypergradient(np.zeros(4))
    change = closed.hypergradient(1e-3 * h) - h
    bent = np.linalg.norm(change) / np.linalg.norm(1e-3 * h)
    rms = np.sqrt((h**2).mean())
    assert one.h == pytest.approx(rms, rel=1e-2)
    assert one.upper == pytest.approx(min(SAFE_UPPER / bent, 0.1 / rms), rel=2e-2)


def test_the_client_of_the_largest_curvature_sets_the_local_step():
    task = Quadratic(heterogeneity=1.0)
    ends = [np.linalg.eigvalsh(A)[-1] for A in task.closed_form().stacked["A"]]
    wanted = np.linalg.norm(ends, 32)
    assert found(task.build()).curvature == pytest.approx(wanted, rel=1e-2)


def scaled(built, upper=1.0, lower=1.0):
    problem = built.problem
    return (
        dataclasses.replace(
            problem,
            upper=lambda x, y, batch: upper * problem.upper(x, y, batch),
            lower=lambda x, y, batch: lower * problem.lower(x, y, batch),
            diagnostics=None,
        ),
        built.clients,
    )


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("scopes", [Scopes(), Scopes(lower="local", upper="private")], ids="-".join)
def test_steps_scale_with_the_losses(factor, scopes):
    built = Quadratic(**scopes._asdict()).build()
    plain = found(built)
    upper, lower = found(scaled(built, upper=factor)), found(scaled(built, lower=factor))
    assert upper.upper == pytest.approx(plain.upper / factor, rel=1e-6)
    assert upper.lower == pytest.approx(plain.lower, rel=1e-6)
    assert lower.lower == pytest.approx(plain.lower / factor, rel=1e-6)
    assert lower.averaged == pytest.approx(plain.averaged / factor, rel=1e-6)
    assert lower.upper == pytest.approx(plain.upper, rel=1e-6)


def regression(x_scale=1.0, feature_scale=1.0):
    """Penalties of a linear regression, whose unknown x is x_scale times the logarithm of a penalty."""
    generator = torch.Generator().manual_seed(1)
    clients = []
    for _ in range(3):
        a = torch.randn(12, 3, dtype=torch.float64, generator=generator)
        b = a @ torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
        b = b + torch.randn(12, dtype=torch.float64, generator=generator)
        one = {"a": feature_scale * a, "b": b}
        clients.append({"train": {k: v[:8] for k, v in one.items()}, "val": {k: v[8:] for k, v in one.items()}})
    penalty = lambda x: (x["x"] / x_scale).exp() * feature_scale**2
    error = lambda y, batch: (batch["a"] @ y["w"] - batch["b"]) ** 2
    problem = Problem(
        upper=lambda x, y, batch: error(y, batch),
        lower=lambda x, y, batch: error(y, batch) + (penalty(x) * y["w"] ** 2).sum(),
        x0={"x": torch.full((3,), -2.0 * x_scale)},
        y0={"w": torch.zeros(3)},
    )
    return problem, clients


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_steps_scale_with_x_and_with_features(factor):
    plain = found(regression())
    x, features = found(regression(x_scale=factor)), found(regression(feature_scale=factor))
    assert x.upper == pytest.approx(plain.upper * factor**2, rel=1e-6)
    assert x.lower == pytest.approx(plain.lower, rel=1e-6)
    assert features.lower == pytest.approx(plain.lower / factor**2, rel=1e-6)
    assert features.upper == pytest.approx(plain.upper, rel=1e-6)


def fits(kind, scopes):
    try:
        kind().check_scopes(scopes)
    except ScopeError:
        return False
    return True


SCOPES = [Scopes(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]
STEPS = {
    name: kind
    for name, kind in discovery.algorithms().items()
    if any(spec.metadata.get("step") for spec in dataclasses.fields(kind))
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize("name", STEPS)
def test_every_algorithm_measures_its_steps_and_stays_stable(name):
    kind = STEPS[name]
    steps = {spec.name: "auto" for spec in dataclasses.fields(kind) if spec.metadata.get("step")}
    for scopes in filter(lambda scopes: fits(kind, scopes), SCOPES):
        task = Quadratic(**scopes._asdict(), num_clients=3)
        # a head of zeros gives the body of fedbabu no gradient
        built = start_at(task, np.ones(4), np.ones(6)) if kind.one_level else task.build()
        options = {"dtype": torch.float64, "residuals": False, "measure_every": 30, "num_iterations": 30}
        result = fb.solve(*built, name, **fewer(kind), **steps, **options)
        first, last = result.rows[0], result.rows[-1]
        assert result.steps.keys() == steps.keys()
        assert all(step > 0 for step in result.steps.values())
        assert last["lower_loss"] < abs(first["lower_loss"]) + 20
        if "lr_upper" in steps and not kind.one_level:
            assert last["upper_loss"] < first["upper_loss"]


@pytest.mark.parametrize("case", ["whole", "noisy", "private", "local"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, case):
    task = Quadratic(upper="private" if case == "private" else "shared", lower="local" if case == "local" else "global")
    options = {"dtype": torch.float64, "strategy": "loop", **AUTO}
    if case == "noisy":
        options |= {"batch_size": 2, "cohort": fb.Cohort(0.6)}
    whole = fb.solve(*task.build(), "fedbioacc", num_iterations=6, record=tmp_path / "whole", **options)
    fb.solve(*task.build(), "fedbioacc", num_iterations=3, record=tmp_path / "parts", **options)
    resumed = fb.solve(*task.build(), "fedbioacc", num_iterations=6, record=tmp_path / "parts", resume=True, **options)
    assert resumed.steps == whole.steps
    tensors, others = Record(tmp_path / "whole").load()[0], Record(tmp_path / "parts").load()[0]
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_the_record_has_the_word_and_the_value_and_the_ledger_counts_the_rounds(tmp_path):
    result = fb.solve(*Quadratic().build(), "fedbio", num_iterations=2, record=tmp_path / "r", lr_upper="auto")
    config = Record(tmp_path / "r").read_config()
    assert config["identity"]["settings"]["lr_upper"] == "auto"
    assert config["identity"]["settings"]["lr_lower"] == 0.1
    assert config["steps"] == result.steps
    assert list(result.steps) == ["lr_upper"]
    assert result.ledger["rounds"] == 2 + 4 + 5 + 6 + 3  # steps, curvatures, warm-up, mean Hessian, two points
    assert fb.solve(*Quadratic().build(), "fedbio", num_iterations=2).steps == {}


def test_given_steps_stay_and_methods_without_x_take_fewer_rounds():
    built = Quadratic().build()
    result = fb.solve(*built, FedAvg(lr_lower="auto"), num_iterations=2)
    assert result.ledger["rounds"] == 2 + 4 + 5 + 6
    assert result.ledger["jvp"] == result.ledger["fy"] == 0


def test_minibatches_and_cohorts_give_shorter_steps_of_the_same_order():
    built = Quadratic(num_samples=8, noise=0.9).build()
    whole, noisy = found(built), found(built, batch_size=2, cohort=fb.Cohort(0.6))
    assert whole.lower / 4 < noisy.lower < whole.lower
    assert whole.upper / 10 < noisy.upper < 10 * whole.upper


def test_a_flat_lower_level_and_a_hypergradient_of_zero_are_named():
    problem, clients = Quadratic().build()
    flat = dataclasses.replace(problem, lower=lambda x, y, batch: batch["c"] @ y["y"], diagnostics=None)
    with (
        pytest.warns(ProblemWarning, match="no term that holds both x and y"),
        pytest.raises(SettingError, match=r"the Hessian of the lower loss is zero at the start: .*give numbers"),
    ):
        fb.solve(flat, clients, "fedbio", num_iterations=1, **AUTO)
    level = lambda x, y, batch: x["x"].square().sum() * y["y"].sum()  # both gradients are zero at x = 0
    blind = dataclasses.replace(problem, upper=level, diagnostics=None)
    with pytest.raises(SettingError, match=r"it is zero at the start, .*give a number"):
        fb.solve(blind, clients, "fedbio", num_iterations=1, **AUTO)


def test_a_problem_that_overflows_near_its_start_is_named():
    problem, clients = Quadratic().build()
    wall = lambda y: (1e4 * (y["y"] - 0.05).clamp(min=0)).exp().sum()
    steep = dataclasses.replace(
        problem, lower=lambda x, y, batch: problem.lower(x, y, batch) + wall(y), diagnostics=None
    )
    with pytest.raises(SettingError, match=r"cannot be measured, because the problem is not finite near its start"):
        fb.solve(steep, clients, "fedbio", num_iterations=1, **AUTO)


def test_peers_in_a_simulation_measure_as_with_a_server():
    built = Quadratic().build()
    result = fb.solve(*built, "sparkle", num_iterations=2, dtype=torch.float64, **AUTO)
    assert issubclass(discovery.algorithm("sparkle"), PeerAlgorithm)
    assert result.steps["lr_lower"] == pytest.approx(found(built).lower / 2, rel=1e-6)
