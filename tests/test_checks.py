import dataclasses
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.clustered_fl import ClusteredFL
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.errors import SettingError
from fedbilevel.federation import phase
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic


@pytest.mark.parametrize("name", sorted(discovery.algorithms()))
def test_every_discovered_algorithm_keeps_the_contract(name):
    report = fb.check_algorithm(discovery.algorithm(name)(), show=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", sorted(discovery.algorithms()))
def test_every_algorithm_file_says_what_it_must(name):
    module = __import__(f"fedbilevel.algorithms.{name}", fromlist=["x"])
    for heading in ("Reference:", "Deviations:", "Cost"):
        assert heading in module.__doc__, f"{name} lacks {heading}"


SMALL = {  # few samples, and a lower level with one solution
    "data_cleaning": {"num_clients": 3, "num_clean": 4, "test_share": 0.8},
    "few_shot": {"num_tasks": 2, "num_ways": 3, "num_shots": 2, "num_queries": 2, "num_held_out": 1, "num_filters": 3, "activation": "gelu", "l2": 1.0},
    "hyper_representation": {"num_clients": 3, "share": 0.05, "num_hidden": 4, "activation": "gelu"},
    "imbalance": {"num_clients": 3, "share": 0.2, "num_val": 2, "imbalance_ratio": 4.0},
    "personalisation": {"num_clients": 3, "share": 0.02, "model": "linear", "l2": 1.0},
}


@pytest.mark.parametrize("name", sorted(discovery.tasks()))
def test_every_task_passes_the_checks_of_problems_and_hypergradients(name):
    built = discovery.task(name)(**SMALL.get(name, {})).build()
    assert fb.check_problem(*built, show=False).ok
    assert fb.check_hypergradient(*built, estimators=["cg"], show=False).ok


@pytest.mark.parametrize("lower", ["global", "local"])
@pytest.mark.parametrize("upper", ["shared", "private"])
def test_check_hypergradient_accepts_the_truth_in_every_scope(lower, upper, capsys):
    report = fb.check_hypergradient(*Quadratic(bend=0.5, lower=lower, upper=upper).build())
    assert report.ok
    assert "Verdict: all 5 checks passed." in capsys.readouterr().out


def test_check_hypergradient_finds_a_wrong_estimator():
    built = Quadratic().build()

    def without_the_indirect_part(population: Any, x: Any, y: Any) -> Any:
        everyone = torch.arange(len(population))
        return population.oracle.upper_grad_x(x, y, population.data.batch(everyone, "val")).mean(0)

    report = fb.check_hypergradient(*built, estimators=[without_the_indirect_part, "cg"], show=False)
    assert {check.name: check.ok for check in report.checks} == {"finite differences": True, "without_the_indirect_part": False, "cg": True}
    wrong_shape = fb.check_hypergradient(*built, estimators=[lambda population, x, y: torch.zeros(2)], show=False)
    assert "expected (4,)" in str(wrong_shape)


def test_check_hypergradient_takes_algorithms():
    built = Quadratic().build()
    good, short = FBOAggITD(num_lower_rounds=60, lr_system=0.2, lr_lower=0.2), FBOAggITD(num_lower_rounds=1, lr_system=0.2, lr_lower=0.2)
    assert fb.check_hypergradient(*built, estimators=[good], show=False).ok
    assert not fb.check_hypergradient(*built, estimators=[short], show=False).ok
    with pytest.raises(SettingError, match="fedbio has no estimate of its own"):
        fb.check_hypergradient(*built, estimators=["fedbio"], show=False)


def test_check_problem_finds_a_detached_loss_and_a_mean_over_padding():
    built = Quadratic().build()
    cut = dataclasses.replace(built.problem, upper=lambda x, y, batch: built.problem.upper({"x": x["x"].detach()}, y, batch))
    assert [check.name for check in fb.check_problem(cut, built.clients, show=False).checks if not check.ok] == ["grad_x upper"]
    cleaning = DataCleaning(num_clients=3, num_clean=4, test_share=0.8).build()
    padded = dataclasses.replace(cleaning.problem, lower=lambda x, y, batch: cleaning.problem.lower(x, y, batch) + x["logit"].mean())
    assert "padding of x" in [check.name for check in fb.check_problem(padded, cleaning.clients, show=False).checks if not check.ok]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaky(FedBiO):
    """Keeps something outside its state, so that a resume cannot see it."""

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
    """Sends a variable that its problem calls private or local under another name."""

    upper_space = ()
    lower_space = ("u",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Careless(FedBiO):
    """Says that it needs everyone, and goes on without."""

    needs_everyone = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(ClusteredFL):
    """Needs everyone, and does not say so."""

    needs_everyone = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sociable(FedBiO):
    """Refuses to run with one client, although it does not say that it needs everyone."""

    @phase
    def local_steps(self, clients, x, y, u):
        if len(clients) == 1:
            raise SettingError("one client is too few.")
        return FedBiO.local_steps(self, clients, x, y, u)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fussy(FedBiO):
    refuses = {"shared": "for no reason that anybody could name", "private": "for no reason that anybody could name"}


def test_check_algorithm_finds_who_needs_everyone_and_who_does_not_say_so():
    failed = lambda algorithm: [check.name for check in fb.check_algorithm(algorithm, show=False).checks if not check.ok]
    assert failed(Careless()) == ["a client that drops"]
    assert failed(Sociable()) == ["cohort of one"]
    assert {"deterministic", "cohort of one", "a client that drops"} <= {*failed(Silent())}


def test_an_algorithm_that_refuses_everything_cannot_be_checked():
    with pytest.raises(SettingError, match="refuses every combination of scopes"):
        fb.check_algorithm(Fussy())


def test_check_algorithm_finds_what_is_broken():
    failed = lambda algorithm: {check.name for check in fb.check_algorithm(algorithm, show=False).checks if not check.ok}
    assert {"deterministic", "checkpoint and resume"} <= failed(Leaky())
    assert "order of clients" in failed(Counting())
    assert {"global lower, private upper", "local lower, shared upper"} & failed(Averaging())
