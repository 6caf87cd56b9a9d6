"""Secure sums over cohorts of the sites: the simulator's trajectory, lost sites, refusals."""

import pytest

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.sites.plan import plan_of
from support.sites.loopback import differences, simulated
from support.sites.private import federation_of, plan_for

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.slow]


def cohort_plan(federation, layer, algorithm="fedbio", fraction=0.6, **more):
    plan = plan_for(federation, layer, algorithm, **more)
    return {**plan, "options": {**plan["options"], "fraction": fraction}}


@pytest.mark.parametrize(
    ("layer", "algorithm"),
    [
        ({"secure": True}, "fedbio"),
        ({"secure": True, "clip": 1.0, "compress": "randk:0.5"}, "fedbio"),
        ({"secure": True}, "fbo_aggitd"),  # several cohorts in an outer iteration
    ],
    ids=str,
)
def test_sites_have_the_trajectory_the_ledger_and_the_figures_of_the_simulator(tmp_path, layer, algorithm):
    federation, members = federation_of(tmp_path, 6), []

    def watched(name, head):
        if head["kind"] == "secure" and head["stage"] == "receive":
            members.append(tuple(head["message"]["members"]))

    plan = cohort_plan(federation, layer, algorithm)
    assert federation.serve(plan, watched) == "finished"
    result, wanted = simulated(plan, tmp_path / "one")
    assert {*differences(federation.record.load()[0], wanted).values()} == {0.0}
    rows = federation.record.rows()
    assert [row["upper_loss"] for row in rows] == [row["upper_loss"] for row in result.rows]
    assert {len(one) for one in members} == {4, 6}  # masks of a cohort, and of all sites for a measurement
    assert len({one for one in members if len(one) == 4}) > 1


@pytest.mark.parametrize("stage", ["keys", "rows", "unmask"])
def test_a_site_of_a_cohort_may_be_lost(tmp_path, stage):
    """Of a cohort of five, four suffice: a site that is lost before its row is not in the mean."""
    lost = []

    def fault(name, head):
        now = "rows" if head["kind"] == "phase" else head.get("stage")
        fault.iteration = max(fault.iteration, head.get("iteration") or 0)
        due = fault.iteration >= 2 or (stage == "keys" and fault.iteration == 1 and fault.rows >= 5)
        fault.rows += now == "rows"
        if now == stage and due and not lost and fault.iteration <= 2:
            lost.append((name, fault.iteration))
            return "silent"
        return None

    fault.iteration = fault.rows = 0
    federation = federation_of(tmp_path, 7)
    plan = cohort_plan(federation, {"secure": True}, fraction=0.7, quorum=6, measure_every=10)
    assert federation.serve(plan, fault) == "finished"
    [(name, _)] = lost
    number = int(name.removeprefix("site-"))
    drops = lambda iteration, call: {number} if iteration == 2 and stage != "unmask" else ()
    wanted = simulated(plan, tmp_path / "one", drops=drops)[1]
    apart = differences(federation.record.load()[0], wanted)
    assert {far for label, far in apart.items() if label.startswith("state.")} == {0.0}


def test_below_the_quorum_of_a_cohort_the_round_fails(tmp_path):
    federation = federation_of(tmp_path, 6)
    plan = cohort_plan(federation, {"secure": True}, patience=1e-9)
    asked = []

    def fault(name, head):
        if head["kind"] == "phase" and head["iteration"] == 2:
            asked.append(name)
            return "silent" if name == asked[0] else None
        return None

    with pytest.raises(QuorumError, match="3 of the 4 sites that are needed answered"):
        federation.serve(plan, fault)


def test_refusals_of_plans_and_sites(tmp_path):
    federation = federation_of(tmp_path, 6)
    with pytest.raises(PlanError, match="a quorum of 2, below this site's floor of 3: raise the quorum"):
        federation.serve(cohort_plan(federation, {"secure": True}, quorum=4))
    grouped = {"secure": True, "robust": "median", "groups": 3}
    with pytest.raises(PlanError, match="groups needs all clients in every round between sites: leave out fraction"):
        plan_of(cohort_plan(federation, grouped))
    drawn = cohort_plan(federation, {"secure": True})
    with pytest.raises(PlanError, match="needs cohorts without replacement between sites, because a cohort could be"):
        plan_of({**drawn, "options": {**drawn["options"], "replacement": True}})
    several = federation_of(tmp_path / "several", hosts=(2, 1, 1))
    with pytest.raises(PlanError, match="a cohort under secure sums needs one client per site, and site-0 hosts"):
        plan_of(cohort_plan(several, {"secure": True}))
