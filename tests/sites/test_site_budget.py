"""The account of a site over all its runs: refused plans, a stop whatever the server does, no way back."""

import json
import math

import pytest

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from opacus.accountants import RDPAccountant

from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import PlanError
from fedbilevel.privacy import Accountant
from fedbilevel.sites import telling
from fedbilevel.sites.policy import Policy
from fedbilevel.sites.spending import weaker
from fedbilevel.sites.view import look
from support.sites.loopback import TRIAL, Loopback

pytestmark = pytest.mark.usefixtures("short_waits")
EXAMPLE = {"level": "example", "clip": 1.0, "noise": 4.0, "epsilon": 1000.0, "rate": 0.5}
CLIENT = {"clip": 1.0, "noise": 4.0, "epsilon": 1000.0}


def limited(epsilon, text=TRIAL):
    return f"{text}max_epsilon = {epsilon}\nmax_delta = 1e-5\n"


def plan_for(federation, name="trial", layer=EXAMPLE, **more):
    options = {"seed": 5, "dtype": "float64", "strategy": "loop", "aggregation": layer}
    algorithm = {"name": "fedavg", "num_local_steps": 1}  # one derivative, and one sum, in an outer iteration
    return federation.plan(algorithm, name=name, options=options, **{"quorum": 1, "num_iterations": 4, **more})


def epsilon_of(*history):
    account = RDPAccountant()
    account.history = list(history)
    return account.get_epsilon(1e-5)


def account(federation, site="site-0"):
    return json.loads((federation.folder / site / "privacy.json").read_text())


def test_the_account_of_a_site_covers_all_its_runs_and_refuses_a_plan_before_its_first_answer(tmp_path):
    fits = epsilon_of((4.0, 0.5, 8)) + 1e-6
    federation = Loopback(tmp_path / "sites", settings=TRIAL)
    (tmp_path / "sites" / "site-0" / "site.toml").write_text(limited(fits))
    for name in ("one", "two"):
        assert federation.serve(plan_for(federation, name)) == "finished"
        federation.record.path.rename(tmp_path / name)
    assert account(federation) == {"one": [[4.0, 0.5, 4]], "two": [[4.0, 0.5, 4]]}
    assert not (federation.folder / "site-1" / "privacy.json").exists()
    before = (federation.folder / "site-0" / "left.jsonl").read_text()
    with pytest.raises(PlanError, match=r"other runs have used .*, and the plan would raise it to .*'max_epsilon'"):
        federation.serve(plan_for(federation, "three"))
    said = [json.loads(line) for line in (federation.folder / "site-0" / "left.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in said[len(before.splitlines()) :]} == {"error"}  # nothing was computed
    phases = [line["epsilon"] for line in said if line["kind"] == "phase"]
    assert phases == pytest.approx([epsilon_of((4.0, 0.5, num)) for num in range(1, 9)])
    view = look(federation.folder / "site-0")
    assert f"; epsilon {phases[-1]:.4g} of {fits:g} over all runs" in telling.budget(view)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_site_stops_answering_at_its_budget_although_the_server_goes_on(tmp_path, monkeypatch, restarts):
    """Repeated iterations are in no forecast. The other sites finish the run without it."""
    federation = Loopback(tmp_path / "sites")
    budget = epsilon_of((4.0, 0.5, 3)) + 1e-6
    monkeypatch.setattr("fedbilevel.sites.spending.Spending.check_plan", lambda *given: None)
    (tmp_path / "sites" / "site-0" / "site.toml").write_text(limited(budget))
    fault = lambda name, head: (
        "killed" if restarts and name == "site-0" and head.get("iteration") == 2 and head["kind"] == "phase" else None
    )
    assert federation.serve(plan_for(federation, num_iterations=6), fault) == "finished"
    [[noise, rate, times]] = account(federation)["trial"]
    assert (noise, rate, times) == (4.0, 0.5, 3)
    assert "above the budget of" in (federation.folder / "site-0" / "left.jsonl").read_text()
    assert Accountant(federation.sites["site-1"]._session.spending.account.budget).epsilon() == 0.0


def test_a_restart_a_resume_and_a_lost_run_folder_do_not_roll_the_account_back(tmp_path):
    federation = Loopback(tmp_path / "sites", 1, limited(1000.0))
    assert federation.serve(plan_for(federation, num_iterations=2)) == "finished"
    federation.restart("site-0")
    (federation.folder / "site-0" / "runs" / "trial" / "privacy.json").unlink()
    assert federation.serve(plan_for(federation, num_iterations=4)) == "finished"  # resumed after 2
    assert account(federation) == {"trial": [[4.0, 0.5, 4]]}
    (federation.folder / "site-0" / "privacy.json").write_text("{")
    federation.restart("site-0")
    with pytest.raises(Exception, match="CheckpointError; its own log says more"):
        federation.serve(plan_for(federation, num_iterations=6, patience=0.5))


@pytest.mark.parametrize(("quorum", "factor"), [(1, 2.0), (3, 2 * math.sqrt(3))])
def test_privacy_of_clients_counts_less_for_one_sample_against_the_server(tmp_path, quorum, factor):
    federation = Loopback(tmp_path / "sites", 3, limited(1e6))
    assert federation.serve(plan_for(federation, layer=CLIENT, quorum=quorum)) == "finished"
    assert account(federation) == {"trial": [[pytest.approx(4.0 / factor), 1.0, 4]]}
    assert weaker(Aggregation(clip=1.0, noise=1.0, epsilon=1.0, secure=True), 3) == 2.0


def test_a_plan_without_noise_and_a_wrong_limit_are_refused(tmp_path):
    federation = Loopback(tmp_path / "sites", 1, limited(5.0))
    with pytest.raises(Exception, match="'max_epsilon', and the plan has no noise"):
        federation.serve(plan_for(federation, layer={"clip": 1.0}))
    for wrong in ({"max_epsilon": 0.0}, {"max_epsilon": 1.0, "max_delta": 1.0}):
        with pytest.raises(PlanError, match="max_epsilon and max_delta of the policy"):
            Policy(**wrong)
