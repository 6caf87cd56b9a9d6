"""Secure sums between real processes: the kits' certificates sign the keys, and the trajectory is the
simulator's."""

import json
import time

import pytest
import torch

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")
pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from fedbilevel.runs.record import Record
from fedbilevel.sites.flare import job
from fedbilevel.sites.plan import plan_of
from support.sites.loopback import differences, simulated
from support.sites.real_loopback import federation_of

pytestmark = [pytest.mark.wait, pytest.mark.slow]
SITES = ["site-1", "site-2", "site-3"]
PLAN = {
    "name": "secure",
    "sites": SITES,
    "quorum": 3,
    "num_iterations": 3,
    "measure_every": 3,
    "task": {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"},
    "algorithm": {"name": "fedbio"},
    "options": {"seed": 3, "batch_size": 4, "dtype": "float64", "strategy": "loop", "aggregation": {"secure": True}},
}


FOUR = [*SITES, "site-4"]
COHORT = {
    **PLAN,
    "sites": FOUR,
    "quorum": 4,
    "task": {**PLAN["task"], "num_clients": 4},
    "options": {**PLAN["options"], "fraction": 0.75},
}


def finished(federation, plan):
    """Run a plan to its end, and return the folder of its record."""
    federation.submit(plan_of(plan).asdict())
    folder = federation.kits["server"] / job.RUNS / plan["name"]
    end, told = time.monotonic() + 240, {"outcome": "running"}
    while told["outcome"] == "running":
        assert time.monotonic() < end
        time.sleep(0.2)
        if (folder / job.PROGRESS).exists():
            told = json.loads((folder / job.PROGRESS).read_text())
    assert told["outcome"] == "finished", told
    return folder


def test_kits_run_noise_for_examples_with_the_account_of_the_simulator(tmp_path):
    """Noise is secret, so that the state differs; the releases do not."""
    pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")
    layer = {"level": "example", "clip": 1.0, "noise": 4.0, "rate": 0.5, "epsilon": 100.0, "secure": True}
    options = {"seed": 3, "dtype": "float64", "strategy": "loop", "aggregation": layer}
    plan = {**PLAN, "name": "noise", "options": options}
    with federation_of(tmp_path / "federation", SITES) as federation:
        place = federation.kits["site-1"] / job.SITE
        (place / "site.toml").write_text(f"{(place / 'site.toml').read_text()}max_epsilon = 50.0\n")
        folder = finished(federation, plan)
        result, wanted = simulated(plan, tmp_path / "one")
        rows = Record(folder).rows()
        assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in result.rows]
        assert not any("upper_loss" in row for row in rows)
        own = json.loads((place / "privacy.json").read_text())["noise"]
        assert own == json.loads((folder / "privacy.json").read_text())["run"]
        lines = map(json.loads, (place / "left.jsonl").read_text().splitlines())
        assert [line["epsilon"] for line in lines if line["kind"] == "phase"][-1] == result.final["epsilon"]
        assert not torch.equal(Record(folder).load()[0]["state.x"], wanted["state.x"])


@pytest.mark.parametrize("plan", [PLAN, COHORT], ids=["all", "cohort"])
def test_kits_run_secure_sums_with_the_trajectory_of_the_simulator(tmp_path, plan):
    with federation_of(tmp_path / "federation", plan["sites"]) as federation:
        folder = finished(federation, plan)
        result, wanted = simulated(plan, tmp_path / "one")
        assert {*differences(Record(folder).load()[0], wanted).values()} == {0.0}
        rows = Record(folder).rows()
        assert [row["upper_loss"] for row in rows] == [row["upper_loss"] for row in result.rows]
        left = (federation.kits["site-1"] / job.SITE / "left.jsonl").read_text().splitlines()
        stages = [line["stage"] for line in map(json.loads, left) if line["kind"] == "secure"]
        assert stages[:5] == ["keys", "share", "receive", "confirm", "unmask"]
