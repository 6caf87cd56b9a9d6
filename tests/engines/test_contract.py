"""The engine contract: every engine keeps it, and each broken clause fails its own check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.clustered_fl import ClusteredFL
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.engines import simulate
from fedbilevel.engines.contract import MEMBERS, check_engine
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.network import Network
from fedbilevel.federation.sampling import Sampler
from fedbilevel.problem.draws import Stream
from fedbilevel.runs.result import Ending
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.verdict import Report
from support.peers.threads import Threads
from support.sites.loopback import Loopback

NAMES = ["members", "type", "trajectory", "means", "bill", "measure", "checkpoint", "identity", "non-finite"]
OPTIONS = {"dtype": torch.float64, "strategy": "loop", "batch_size": 2, "seed": 3}
pytestmark = pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if not check.ok]


@pytest.mark.parametrize(
    ("algorithm", "settings", "options"),
    [
        (FedBiO(num_local_steps=2), {"client_weights": "by_samples"}, {}),
        (FedBiO(), {"client_weights": "by_samples"}, {"cohort": Cohort(0.4)}),
        (FedBiO(), {}, {"ids": (3, 0, 4, 1, 2)}),
        (AdaFBiO(num_local_steps=2, num_terms=2), {"upper": "private"}, {"sampling": "epochs"}),
        (ClusteredFL(), {}, {}),
        (SGP(num_lower_steps=2), {"client_weights": "by_samples"}, {"network": Network(kind="ring")}),
        (HGP(num_terms=2, num_lower_steps=2, lr_lower=0.05, lr_system=0.05), {}, {}),
    ],
    ids=["all clients", "cohort", "shuffled", "private", "gather", "push", "mix"],
)
def test_simulations_keep_the_contract(algorithm, settings, options):
    problem, clients = Quadratic(**settings).build()
    placed = [clients[i] for i in options.get("ids", range(len(clients)))]
    report = check_engine(simulate(algorithm, problem, placed, **OPTIONS, **options), clients, show=False)
    assert report.ok, report
    assert [check.name for check in report.checks] == NAMES


@pytest.mark.parametrize("fraction", [1.0, 0.67])
def test_sites_keep_the_contract(tmp_path, monkeypatch, fraction):
    """A real server and real sites exchange bytes in this process; the check replaces the loop."""
    reports = []

    def checked(_algorithm: Any, fed: Any, **_options: Any) -> Any:
        reports.append(check_engine(fed, clients, show=False))
        return SimpleNamespace(stopped="finished", ending=Ending())

    monkeypatch.setattr("fedbilevel.sites.serve.run_between", checked)
    federation = Loopback(tmp_path, hosts=(1, 2))
    task = {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"}
    clients = Quadratic(num_clients=3, client_weights="by_samples").build().clients
    options = {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop", "fraction": fraction}
    plan = federation.plan({"name": "fedbioacc", "num_local_steps": 2}, task, options=options)
    assert federation.serve(plan) == "finished"
    [report] = reports
    assert report.ok, report
    assert [check.name for check in report.checks] == NAMES


def test_resumed_server_of_sites_draws_cohorts_by_the_weights_of_its_checkpoint(tmp_path, monkeypatch):
    """A site that has not joined yet counts 1 until the checkpoint is read."""
    wanted = Sampler(Cohort(0.67), torch.tensor([4, 5, 6]))
    drawn = []

    def resumed(algorithm: Any, fed: Any, **_options: Any) -> Any:
        fed.begin(0)
        saved = fed.state_dict(algorithm.init(fed))
        fed._set_weights(torch.ones(3, dtype=torch.int64))
        fed.load_state_dict(*saved, algorithm.State)
        for iteration in range(1, 30):
            fed.begin(iteration)
            drawn.append((fed._positions.tolist(), wanted.draw(fed.stream, iteration, 1)[0].sort().values.tolist()))
        assert torch.equal(fed._counts(torch.arange(3), torch.ones(3)), wanted.member_weights.float())
        return SimpleNamespace(stopped="finished", ending=Ending())

    monkeypatch.setattr("fedbilevel.sites.serve.run_between", resumed)
    federation = Loopback(tmp_path)
    options = {"seed": 5, "batch_size": 3, "dtype": "float64", "fraction": 0.67}
    task = {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"}
    assert federation.serve(federation.plan({"name": "fedbio"}, task, options=options)) == "finished"
    assert len({tuple(ours) for ours, _ in drawn}) == 3
    assert all(ours == theirs for ours, theirs in drawn)


def test_peers_keep_the_contract(tmp_path, monkeypatch):
    """Three peers as threads; each checks its own engine at the same time."""
    reports = {}

    def checked(_algorithm: Any, fed: Any, **_options: Any) -> Any:
        reports[fed.me] = check_engine(fed, clients, show=False)
        return SimpleNamespace(stopped="finished", state=None)

    monkeypatch.setattr("fedbilevel.peers.participant.run_between", checked)
    settings = {"num_clients": 3, "dim_upper": 2, "dim_lower": 3, "client_weights": "by_samples"}
    clients = Quadratic(**settings).build().clients
    plan = {
        "name": "trial",
        "algorithm": {"name": "sgp", "num_lower_steps": 2},
        "task": {"name": "quadratic", **settings},
        "num_iterations": 3,
        "options": {"dtype": "float64", "strategy": "loop", "batch_size": 2, "seed": 3, "network": {"kind": "ring"}},
    }
    Threads(tmp_path, plan, clients).run()
    assert sorted(reports) == [0, 1, 2]
    for report in reports.values():
        assert report.ok, report


class TwiceTheMean(Simulation):
    def _means(self, *given: Any) -> Any:
        return {name: 2 * value for name, value in super()._means(*given).items()}


class OtherDraws(Simulation):
    def begin(self, iteration: int, algorithm: Any = None) -> None:
        super().begin(iteration, algorithm)
        self.host.stream = Stream(self.seed + 1)


class ForgetsMemory(Simulation):
    def load_state_dict(self, *given: Any) -> Any:
        state = super().load_state_dict(*given)
        self.host.memory.clear()
        return state


class PaysTwice(Simulation):
    def begin(self, iteration: int, algorithm: Any = None) -> None:
        super().begin(iteration, algorithm)
        self.ledger.count_round()


class MeasuresElsewhere(Simulation):
    def measure(self, x: Any, y: Any) -> dict[str, float]:
        return super().measure(x + 1, y)


class ChangesName(Simulation):
    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "iteration": self.iteration}


class SeesNothing(Simulation):
    """Replaces values that are not finite, so that nothing raises an error."""

    def _ask(self, *given: Any) -> Any:
        run, host = self.host.run_phase, self.host
        host.run_phase = lambda *args, **more: self._cleaned(run, *args, **more)  # type: ignore[method-assign]
        try:
            return super()._ask(*given)
        finally:
            del host.run_phase

    @staticmethod
    def _cleaned(run: Any, *args: Any, **more: Any) -> Any:
        try:
            return run(*args, **more)
        except Exception:  # noqa: BLE001 - whatever it was, this engine hides it
            values, positions = args[1], args[2]
            return {name: torch.zeros(len(positions), len(values[name])).double() for name in ("x", "y", "u")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "algorithm", "wrong"),
    [
        (TwiceTheMean, FedBiO(), ["trajectory", "means", "measure"]),
        (OtherDraws, FedBiO(), ["trajectory", "means", "measure"]),
        (ForgetsMemory, AdaFBiO(num_local_steps=2, num_terms=2), ["checkpoint"]),
        (PaysTwice, FedBiO(), ["bill"]),
        (MeasuresElsewhere, FedBiO(), ["measure"]),
        (ChangesName, FedBiO(), ["identity"]),
        (SeesNothing, FedBiO(), ["non-finite"]),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_engine_that_breaks_a_clause_fails_the_check_of_that_clause(kind, algorithm, wrong):
    problem, clients = Quadratic().build()
    report = check_engine(kind(algorithm, problem, clients, **OPTIONS), clients, show=False)
    assert failed(report) == wrong, report


def test_engine_without_a_member_fails_before_it_is_run(capsys):
    members = dict.fromkeys(set(MEMBERS) - {"commit", "bill"})
    report = check_engine(SimpleNamespace(**members), [])  # type: ignore[arg-type]
    assert failed(report) == ["members"]
    assert f"{len(MEMBERS) - 2} of {len(MEMBERS)}; not: bill, commit" in capsys.readouterr().out


def test_engine_in_float32_is_refused_with_the_reason():
    problem, clients = Quadratic().build()
    report = check_engine(Simulation(FedBiO(), problem, clients), clients, show=False)
    assert failed(report) == ["type"]
    assert "torch.float32, expected torch.float64" in str(report)
