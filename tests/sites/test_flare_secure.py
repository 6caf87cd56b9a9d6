"""Secure sums between real processes: the kits' certificates sign the keys, and the trajectory is the
simulator's."""

import json
import time

import pytest

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


@pytest.mark.parametrize("plan", [PLAN, COHORT], ids=["all", "cohort"])
def test_kits_run_secure_sums_with_the_trajectory_of_the_simulator(tmp_path, plan):
    with federation_of(tmp_path / "federation", plan["sites"]) as federation:
        federation.submit(plan_of(plan).asdict())
        folder = federation.kits["server"] / job.RUNS / "secure"
        end, told = time.monotonic() + 240, {"outcome": "running"}
        while told["outcome"] == "running":
            assert time.monotonic() < end
            time.sleep(0.2)
            if (folder / job.PROGRESS).exists():
                told = json.loads((folder / job.PROGRESS).read_text())
        assert told["outcome"] == "finished", told
        result, wanted = simulated(plan, tmp_path / "one")
        assert {*differences(Record(folder).load()[0], wanted).values()} == {0.0}
        rows = Record(folder).rows()
        assert [row["upper_loss"] for row in rows] == [row["upper_loss"] for row in result.rows]
        left = (federation.kits["site-1"] / job.SITE / "left.jsonl").read_text().splitlines()
        stages = [line["stage"] for line in map(json.loads, left) if line["kind"] == "secure"]
        assert stages[:5] == ["keys", "share", "receive", "confirm", "unmask"]
