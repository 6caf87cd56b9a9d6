"""The layer on every engine: the simulator's trajectory, bit for bit, and its ledger."""

import pytest

from support.sites.loopback import Loopback, differences, simulated

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.slow]
LAYERS = {
    "sum": {},
    "clip": {"clip": 0.5, "fixed_point": 40},
    "int8": {"clip": 2.0, "compress": "int8"},
    "topk": {"compress": "topk:0.3", "sequences": {"x": {"compress": "none"}}},
    "randk": {"compress": "randk:0.5"},
    "powersgd": {"compress": "powersgd:1"},
    "trimmed": {"robust": "trimmed:0.3"},
    "median": {"robust": "median", "compress": "int8"},
    "geometric": {"robust": "geometric"},
}


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr("fedbilevel.sites.exchange._APART", (0.0, 0.0))
    monkeypatch.setattr("fedbilevel.sites.serve._BETWEEN", 0.0)
    yield
    Loopback.close_all()


def plan_of(federation, layer, algorithm="fedbio", **more):
    options = {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop", **more, "aggregation": layer}
    task = {"name": "quadratic", "num_clients": sum(federation.clients.values()) or len(federation.names)}
    task["client_weights"] = "by_samples"
    return federation.plan({"name": algorithm}, task, options=options)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("hosts", [(), (2, 1)], ids=["one", "several"])
def test_sites_have_the_trajectory_and_the_ledger_of_the_simulator(tmp_path, layer, hosts):
    federation = Loopback(tmp_path / "sites", hosts=hosts)
    plan = plan_of(federation, LAYERS[layer], dtype="float32" if hosts else "float64", fraction=0.67)
    assert federation.serve(plan) == "finished"
    tensors = federation.record.load()[0]
    assert {*differences(tensors, simulated(plan, tmp_path / "one")[1]).values()} == {0.0}
