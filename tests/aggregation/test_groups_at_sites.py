"""Robust means of masked groups between sites: the simulator's trajectory, and sites that are lost."""

import json

import pytest
import torch

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from fedbilevel.aggregation.groups import drawn
from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.problem.draws import Stream
from support.sites.loopback import TRIAL, differences, simulated
from support.sites.private import federation_of, plan_for

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.slow]
SECURE = {"secure": True, "robust": "trimmed:0.3", "groups": 3}


@pytest.mark.parametrize(
    ("layer", "algorithm"),
    [
        (SECURE, "fedbio"),
        ({**SECURE, "compress": "randk:0.5", "sequences": {"x": {"robust": "none"}}}, "fedbio"),
        ({**SECURE, "secure": False, "compress": "topk:0.3"}, "fedbio"),
        ({**SECURE, "robust": "median"}, "fbo_aggitd"),  # several calls in an outer iteration
    ],
    ids=str,
)
def test_sites_have_the_trajectory_and_the_ledger_of_the_simulator(tmp_path, layer, algorithm):
    federation = federation_of(tmp_path, 10)
    plan = plan_for(federation, layer, algorithm)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "one")
    assert {*differences(federation.record.load()[0], wanted).values()} == {0.0}
    rows = federation.record.rows()
    assert [row["upper_loss"] for row in rows] == [row["upper_loss"] for row in result.rows]


def lost(names, iteration):
    """A fault: these sites do not answer the phases of one outer iteration."""
    return lambda name, head: (
        "deaf" if name in names and head["kind"] == "phase" and head.get("iteration") == iteration else None
    )


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_lost_site_leaves_its_group_smaller_or_out(tmp_path, num_lost, secure):
    """13 sites are four groups, one of them of four: without one site it has three, without two it
    is left out. The simulator without these clients has the same state."""
    groups = drawn(Stream(5), torch.arange(13), 13, 3, 2)
    largest = (groups == groups.bincount().argmax()).nonzero()[:, 0].tolist()
    assert len(largest) == 4
    federation = federation_of(tmp_path, 13)
    plan = plan_for(federation, {**SECURE, "secure": secure}, quorum=8)
    gone = largest[:num_lost]
    assert federation.serve(plan, lost([f"site-{site}" for site in gone], 2)) == "finished"
    drops = lambda iteration, call: gone if iteration == 2 else ()
    wanted = simulated(plan, tmp_path / "one", drops=drops)[1]
    apart = differences(federation.record.load()[0], wanted)
    assert {far for name, far in apart.items() if name.startswith("state.")} == {0.0}
    assert apart["ledger.floats_up"] == 0.0


@pytest.mark.parametrize(("secure", "text"), [(True, "2 groups have 3 members that"), (False, "2 groups of outer")])
def test_the_round_fails_with_fewer_than_three_groups(tmp_path, secure, text):
    federation = federation_of(tmp_path, 9)
    plan = plan_for(federation, {**SECURE, "secure": secure}, quorum=6, patience=1e-9)
    with pytest.raises(QuorumError, match=text):
        federation.serve(plan, lost(["site-4"], 2))
    assert [line["iteration"] for line in federation.diary() if "iteration" in line][-1] < 2


def test_refusals_of_plans_and_sites(tmp_path):
    several = federation_of(tmp_path / "several", hosts=(3, 3, 3))
    with pytest.raises(PlanError, match="a group under secure sums needs one client per site, and site-0 hosts"):
        several.serve(plan_for(several, SECURE))
    high = federation_of(tmp_path / "high", 9)
    (tmp_path / "high" / "sites" / "site-4" / "site.toml").write_text(TRIAL + "min_members = 4\n")
    high.restart("site-4")
    with pytest.raises(PlanError, match="sums are seen if 3 members are left, below this site's floor of 4"):
        high.serve(plan_for(high, SECURE))


def test_no_masked_row_of_a_site_is_in_the_clear(tmp_path, monkeypatch):
    from fedbilevel.aggregation.sealing import Noisy
    from fedbilevel.sites import wire

    rows, masked, seen = [], Noisy.masked, []
    keep = lambda integers: rows.append(integers.clone()) or integers
    monkeypatch.setattr(Noisy, "masked", lambda ring, integers, ids, at: keep(masked(ring, integers, ids, at)))

    def overheard(name, head):
        seen.append(json.dumps(head).encode())
        return lambda header, arrays: seen.append(wire.pack(header, arrays)) or (header, arrays)

    federation = federation_of(tmp_path, 9)
    assert federation.serve(plan_for(federation, SECURE), overheard) == "finished"
    transcript = b"".join(seen)
    assert len(rows) == 9 * 4 * 3
    assert not any(row.sum(0).numpy().tobytes() in transcript for row in rows)
