"""Step sizes of "auto" between sites: those of the simulator, within the policy of every site."""

import pytest

from fedbilevel.errors import PlanError, WireError
from fedbilevel.federation.probing import PHASES
from fedbilevel.peers.plan import PeerPlan
from fedbilevel.problem.problem import Scopes
from fedbilevel.sites.incoming import Incoming
from fedbilevel.sites.plan import plan_of
from fedbilevel.sites.policy import Policy
from support.sites.loopback import TRIAL, Loopback, differences, simulated

pytestmark = pytest.mark.usefixtures("short_waits")
AUTO = {"name": "fednest", "lr_upper": "auto", "lr_lower": "auto", "lr_system": "auto", "num_local_steps": 2}


@pytest.mark.parametrize("scopes", [Scopes(), Scopes(lower="local", upper="private")], ids="-".join)
def test_sites_measure_the_steps_of_the_simulator_bit_for_bit(tmp_path, scopes):
    federation = Loopback(tmp_path)
    task = {"name": "quadratic", "num_clients": 3, **scopes._asdict()}
    plan = federation.plan(AUTO, task, num_iterations=2)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, about = federation.record.load()
    assert about["steps"] == result.steps
    assert result.steps.keys() == {"lr_upper", "lr_lower", "lr_system"}
    assert {part: far for part, far in differences(found, wanted).items() if far} == {}
    assert federation.record.read_config()["steps"] == result.steps


def test_a_measured_step_outside_the_policy_of_a_site_is_refused(tmp_path):
    federation = Loopback(tmp_path, settings=f"{TRIAL}[policy.settings]\nlr_lower = [0, 1e-6]\n")
    told = []
    with pytest.raises(Exception, match="does not allow lr_lower"):
        federation.serve(federation.plan(AUTO, num_iterations=1), say=told.append)


def incoming(**settings):
    plan = plan_of({"task": {"name": "quadratic"}, "algorithm": {"name": "fedbio", **settings}, "sites": ["a"]})
    made = object.__new__(Incoming)
    made.algorithm, made.policy = plan.built_algorithm(), Policy()
    made._auto = made.algorithm.auto_names()
    return made


def test_probes_are_for_plans_that_leave_a_step_open_and_other_phases_need_its_value():
    for phase in PHASES:
        assert incoming(lr_upper="auto").phase(phase)
        with pytest.raises(WireError, match=f"asks for {phase}, but the plan has no step size of 'auto'"):
            incoming(lr_upper=0.1).phase(phase)
    open_ = incoming(lr_upper="auto", lr_lower=0.1)
    assert open_.scaled("probe_steps", {}).lr_upper == "auto"
    assert open_.scaled("local_steps", {"lr_upper": 3.0, "lr_lower": 0.05}).lr_upper == 3.0
    with pytest.raises(WireError, match="does not say the step lr_upper, which the plan leaves to a measurement"):
        open_.scaled("local_steps", {})
    with pytest.raises(WireError, match="sets lr_lower to 3, but a schedule may only shorten"):
        open_.scaled("local_steps", {"lr_upper": 3.0, "lr_lower": 3.0})
    with pytest.raises(WireError, match="changes 'lr_upper', but a schedule may only scale"):
        open_.scaled("local_steps", {"lr_upper": float("nan")})


def test_peers_are_told_to_give_a_number():
    plan = PeerPlan("trial", 1, {"name": "quadratic"}, {"name": "sgp", "lr_lower": "auto"}, {})
    with pytest.raises(PlanError, match=r"lr_lower of the plan is 'auto', but peers cannot measure .* give a number"):
        plan.built_algorithm()
