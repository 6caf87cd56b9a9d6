import dataclasses
import re
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.clustered_fl import ClusteredFL
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.checks.differences import difference
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import phase
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from fedbilevel.verdict import Check, Report
from support.numeric.yardstick import brief


@pytest.mark.parametrize("name", sorted(discovery.algorithms()))
def test_every_discovered_algorithm_passes_check_algorithm(name):
    report = fb.check_algorithm(brief(discovery.algorithm(name)), show=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", sorted(discovery.algorithms()))
def test_every_algorithm_file_states_reference_deviations_and_cost(name):
    module = __import__(f"fedbilevel.algorithms.{name}", fromlist=["x"])
    for heading in ("Reference:", "Deviations:", "Cost"):
        assert heading in module.__doc__, f"{name} lacks {heading}"


SMALL = {  # few samples, and a lower level with one solution
    "adapters": {
        "num_clients": 2,
        "num_symbols": 3,
        "num_common": 2,
        "num_own": 1,
        "rank": 1,
        "own_rank": 1,
        "width": 4,
        "context": 3,
        "num_train": 3,
        "num_val": 3,
        "num_test": 3,
        "num_pretraining": 5,
        "l2": 1.0,
    },
    "classification": {"num_clients": 2, "share": 0.05, "model": "linear", "weight_decay": 0.1},
    "data_cleaning": {"num_clients": 3, "num_clean": 4, "test_share": 0.8},
    "few_shot": {
        "num_tasks": 2,
        "num_ways": 3,
        "num_shots": 2,
        "num_queries": 2,
        "num_held_out": 1,
        "num_filters": 3,
        "activation": "gelu",
        "l2": 1.0,
    },
    "few_shot_episodes": {"num_clients": 2, "num_episodes": 1, "num_queries": 2, "num_held_out": 1, "num_filters": 3},
    "hyper_representation": {"num_clients": 3, "share": 0.05, "num_hidden": 4, "activation": "gelu"},
    "imbalance": {"num_clients": 3, "share": 0.2, "num_val": 2, "imbalance_ratio": 4.0},
    "mixing": {"num_clients": 2, "num_train": 4, "num_val": 6, "num_test": 3, "num_hidden": 3, "l2": 1.0},
    "personalisation": {"num_clients": 3, "share": 0.02, "model": "linear", "l2": 1.0},
    "representation": {"num_clients": 3, "share": 0.2, "num_hidden": 3, "l2": 1.0},
}


@pytest.mark.parametrize("name", sorted(discovery.tasks()))
def test_every_task_passes_the_checks_of_problems_and_hypergradients(name):
    built = discovery.task(name)(**SMALL.get(name, {})).build()
    assert fb.check_problem(*built, show=False).ok
    assert fb.check_hypergradient(*built, estimators=["cg"], show=False).ok


@pytest.mark.parametrize("lower", ["global", "local"])
@pytest.mark.parametrize("upper", ["shared", "private"])
def test_check_hypergradient_passes_the_solvers_in_every_scope(lower, upper, capsys):
    report = fb.check_hypergradient(*Quadratic(bend=0.5, lower=lower, upper=upper).build())
    assert report.ok
    assert "Verdict: all 5 checks passed." in capsys.readouterr().out


def test_check_hypergradient_finds_a_wrong_estimator():
    built = Quadratic().build()

    def without_the_indirect_part(population: Any, x: Any, y: Any) -> Any:
        everyone = torch.arange(len(population))
        return population.oracle.upper_grad_x(x, y, population.data.batch(everyone, "val")).mean(0)

    report = fb.check_hypergradient(*built, estimators=[without_the_indirect_part, "cg"], show=False)
    assert {check.name: check.ok for check in report.checks} == {
        "finite differences": True,
        "without_the_indirect_part": False,
        "cg": True,
    }
    wrong_shape = fb.check_hypergradient(*built, estimators=[lambda population, x, y: torch.zeros(2)], show=False)
    assert "expected (4,)" in str(wrong_shape)


# Networks with kinks; a strong l2 makes y*(x) cheap.
KINKED = {
    "mlp": HyperRepresentation(num_clients=2, share=0.03, num_hidden=4, l2=0.5),
    "cnn": HyperRepresentation(num_clients=2, share=0.03, num_hidden=4, l2=0.5, model="cnn"),
}


def stretched(built: Built, factor: float) -> Built:
    """The same losses with the same values, whose derivatives by x are too long by the factor."""
    longer = lambda function: (
        lambda x, y, batch: function(
            {name: leaf.detach() + factor * (leaf - leaf.detach()) for name, leaf in x.items()}, y, batch
        )
    )
    problem = built.problem
    if problem.features is not None:
        features = longer(lambda x, _, batch: problem.features(x, batch))
        return Built(dataclasses.replace(problem, features=lambda x, batch: features(x, None, batch)), built.clients)
    return Built(dataclasses.replace(problem, upper=longer(problem.upper), lower=longer(problem.lower)), built.clients)


@pytest.mark.parametrize("name", ["quadratic", *KINKED])
def test_check_hypergradient_detects_a_relative_error_of_1e_4_despite_kinks(name):
    built = KINKED[name].build() if name in KINKED else Quadratic(bend=0.5).build()
    right = fb.check_hypergradient(*built, estimators=[], num_directions=1, show=False)
    assert right.ok, str(right)
    wrong = fb.check_hypergradient(*stretched(built, 1.0001), estimators=[], num_directions=1, show=False)
    assert not wrong.ok
    assert re.search(
        r"relative error 1\.0e-04 .*; differences of steps 1e-0\d and 1e-0\d agree up to \d\.\de-(0[6-9]|1\d)$",
        wrong.checks[0].text,
    )


def added(term: Any) -> Built:
    built = Quadratic().build()
    return Built(
        dataclasses.replace(built.problem, upper=lambda x, y, batch: built.problem.upper(x, y, batch) + term(x["x"])),
        built.clients,
    )


def test_check_hypergradient_shortens_steps_below_a_kink_and_reports_a_function_too_rough_for_any_step():
    start = Quadratic().build().problem.x0["x"]
    kinked = added(lambda x: (x - start.to(x) - 3e-6 * torch.arange(1, len(x) + 1)).abs().sum())
    report = fb.check_hypergradient(*kinked, estimators=[], num_directions=1, show=False)
    assert report.ok, str(report)
    assert "differences of steps 1e-06 and 1e-07" in str(report)
    rough = fb.check_hypergradient(
        *added(lambda x: 1e-3 * (1e9 * x).sin().sum()), estimators=[], num_directions=1, show=False
    )
    assert not rough.ok
    assert "too little to tell right from wrong" in str(rough)


def test_difference_chooses_its_step_without_the_expected_value():
    along = lambda t: (torch.tensor([t], dtype=torch.float64) - 3e-6).abs()
    for seen in (-0.3, -0.5, -1.0):  # a step of 1e-5 sees -0.3, the slope is -1
        value, trust = difference(along, torch.tensor([seen], dtype=torch.float64), 1e-4, 1e-5)
        assert value.tolist() == pytest.approx([-1.0], rel=1e-9)
        assert trust.startswith("; differences of steps 1e-06 and 1e-07 agree up to")
    first_step = torch.tensor([-0.03], dtype=torch.float64)  # only agreement with the first step ends the search
    assert difference(along, first_step, 1e-4, 1e-5)[1] == ""


@pytest.mark.parametrize("name", KINKED)
def test_check_problem_passes_networks_with_kinks_and_detects_a_wrong_gradient(name):
    built = KINKED[name].build()
    report = fb.check_problem(*built, show=False)
    assert report.ok, str(report)
    wrong = fb.check_problem(*stretched(built, 1.0001), show=False)
    assert {check.name for check in wrong.checks if not check.ok} == {"grad_x upper", "J v"}, str(wrong)


def test_check_hypergradient_takes_algorithms():
    built = Quadratic().build()
    good, short = (
        FBOAggITD(num_lower_rounds=60, lr_system=0.2, lr_lower=0.2),
        FBOAggITD(num_lower_rounds=1, lr_system=0.2, lr_lower=0.2),
    )
    assert fb.check_hypergradient(*built, estimators=[good], show=False).ok
    assert not fb.check_hypergradient(*built, estimators=[short], show=False).ok
    with pytest.raises(SettingError, match="fedbio has no estimate of its own"):
        fb.check_hypergradient(*built, estimators=["fedbio"], show=False)


def test_check_problem_finds_a_detached_loss_and_a_mean_over_padding():
    built = Quadratic().build()
    cut = dataclasses.replace(
        built.problem, upper=lambda x, y, batch: built.problem.upper({"x": x["x"].detach()}, y, batch)
    )
    assert [check.name for check in fb.check_problem(cut, built.clients, show=False).checks if not check.ok] == [
        "grad_x upper"
    ]
    cleaning = DataCleaning(num_clients=3, num_clean=4, test_share=0.8).build()
    padded = dataclasses.replace(
        cleaning.problem, lower=lambda x, y, batch: cleaning.problem.lower(x, y, batch) + x["logit"].mean()
    )
    assert "padding of x" in [
        check.name for check in fb.check_problem(padded, cleaning.clients, show=False).checks if not check.ok
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaky(FedBiO):
    """Keeps a counter outside its state, so that a checkpoint misses it."""

    seen = []

    @phase
    def local_steps(self, clients, x, y, u):
        self.seen.append(1)
        result = FedBiO.local_steps(self, clients, x, y, u)
        return {**result, "y": result["y"] + len(self.seen)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(FedBiO):
    """Treats the first row in memory differently: the order of clients matters."""

    @phase
    def local_steps(self, clients, x, y, u):
        result = FedBiO.local_steps(self, clients, x, y, u)
        return {**result, "x": result["x"] * (1 + 0.1 * (torch.arange(len(clients)) == 0))[:, None]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging(FedBiO):
    """Sends a private or local variable under another name."""

    upper_space = ()
    lower_space = ("u",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Careless(FedBiO):
    """Declares that it needs every client, but continues without them."""

    needs_everyone = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(ClusteredFL):
    """Needs every client, but does not declare it."""

    needs_everyone = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sociable(FedBiO):
    """Refuses to run with one client, but does not declare that it needs every client."""

    @phase
    def local_steps(self, clients, x, y, u):
        if len(clients) == 1:
            raise SettingError("one client is too few.")
        return FedBiO.local_steps(self, clients, x, y, u)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fussy(FedBiO):
    refuses = {"shared": "for a reason of this test", "private": "for a reason of this test"}


def test_check_algorithm_detects_a_wrong_needs_everyone():
    failed = lambda algorithm: [
        check.name for check in fb.check_algorithm(algorithm, show=False).checks if not check.ok
    ]
    assert failed(Careless()) == ["a client that drops"]
    assert failed(Sociable()) == ["cohort of one"]
    assert {"deterministic", "cohort of one", "a client that drops"} <= {*failed(Silent())}


def test_algorithm_that_refuses_every_scope_cannot_be_checked():
    with pytest.raises(SettingError, match="refuses every combination of scopes"):
        fb.check_algorithm(Fussy())


@pytest.mark.slow
def test_check_algorithm_detects_hidden_state_row_order_and_leaked_variables():
    failed = lambda algorithm: {
        check.name for check in fb.check_algorithm(algorithm, show=False).checks if not check.ok
    }
    assert {"deterministic", "checkpoint and resume"} <= failed(Leaky())
    assert "order of clients" in failed(Counting())
    assert {"global lower, private upper", "local lower, shared upper"} & failed(Averaging())


def test_report_in_a_notebook_escapes_names_and_shows_failures():
    report = Report("Problem <b>", [Check("a", True, "fine"), Check("b", False, "1 < 2")])
    page = report._repr_html_()
    assert "Problem &lt;b&gt;: 1 of 2 checks failed." in page
    assert "<tr><td>b</td><td>FAIL</td><td>1 &lt; 2</td></tr>" in page
