"""Example-level privacy between sites: the simulator's trajectory, and each site's own account."""

import json
import math

import pytest
import torch

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")
pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from fedbilevel.aggregation.sealing import addressed
from fedbilevel.errors import BudgetError, FedBilevelError, QuorumError
from fedbilevel.privacy import Accountant, Budget, joint
from fedbilevel.problem.draws import Stream
from fedbilevel.sites.plan import plan_of
from fedbilevel.sites.policy import read_settings
from fedbilevel.sites.preview import preview
from support.sites.loopback import TRIAL, differences, simulated
from support.sites.private import federation_of

pytestmark = pytest.mark.usefixtures("short_waits")
PRIVATE = {"level": "example", "clip": 1.0, "noise": 2.0, "epsilon": 1000.0, "rate": 0.5}


def plan_for(federation, layer=PRIVATE, algorithm="fedbio", *, scopes=(), settings=(), **more):
    number = sum(federation.clients.values()) or len(federation.names)
    task = {"name": "quadratic", "num_clients": number, "client_weights": "by_samples", **dict(scopes)}
    options = {"seed": 5, "dtype": "float64", "strategy": "loop", "aggregation": layer}
    more = {"quorum": len(federation.names), "num_iterations": 2, **more}
    return federation.plan({"name": algorithm, **dict(settings)}, task, options=options, **more)


def stored(federation, name="site-0", run="trial"):
    return json.loads((federation.folder / name / "runs" / run / "privacy.json").read_text())["run"]


@pytest.mark.parametrize(
    ("algorithm", "more", "scopes", "hosts"),
    [
        ("fedbio", {}, {}, (2, 1, 1)),
        ("fedbio", {"secure": True, "rate": 1.0}, {}, ()),
        ("fedbio", {}, {"upper": "private", "lower": "local"}, ()),
        ("penalty", {"compress": "int8"}, {}, ()),
    ],
    ids=["hosts", "secure", "kept", "compressed"],
)
def test_sites_have_the_trajectory_and_epsilon_of_the_simulator(tmp_path, monkeypatch, algorithm, more, scopes, hosts):
    """For the same random words, which sites otherwise take from their operating system."""
    monkeypatch.setattr("fedbilevel.sites.session.secret", addressed(Stream(5)))
    federation = federation_of(tmp_path, hosts=hosts)
    plan = plan_for(federation, {**PRIVATE, **more}, algorithm, scopes=scopes, settings={"num_local_steps": 2})
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "one")
    assert {*differences(federation.record.load()[0], wanted).values()} == {0.0}
    rows = federation.record.rows()
    assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in result.rows]
    assert rows[-1]["epsilon"] > 0
    assert not any("upper_loss" in row for row in rows)
    counts = json.loads((federation.record.path / "privacy.json").read_text())["run"]
    assert all(stored(federation, name) == counts for name in federation.names)


def test_noise_and_coins_of_sites_are_no_one_elses(tmp_path):
    """Two runs of the same plan differ, because words come from the operating system."""
    found = []
    for one in "ab":
        federation = federation_of(tmp_path / one)
        assert federation.serve(plan_for(federation)) == "finished"
        found.append(federation.record.load()[0]["state.x"])
    assert not torch.equal(*found)


def test_a_site_stops_at_the_budget_of_the_plan_and_answers_nothing_after_it(tmp_path):
    per_round = [joint([2.0] * 2, 0.5, 4), joint([2.0], 0.5, 2)]
    budget = Accountant(Budget(1000.0, 1e-5)).forecast(3, per_round) + 1e-6
    federation, settings = federation_of(tmp_path), {"num_local_steps": 2}
    plan = plan_for(federation, {**PRIVATE, "epsilon": budget}, settings=settings, num_iterations=6)
    assert federation.serve(plan) == "stopped"
    assert federation.record.rows()[-1]["epsilon"] == pytest.approx(budget, abs=2e-6)
    assert stored(federation) == [[pytest.approx(math.sqrt(2)), 0.5, 12], [2.0, 0.5, 6]]
    federation.restart("site-0")  # a site that forgets nothing, and a server that forgets its account
    (federation.record.path / "privacy.json").unlink()
    with pytest.raises(FedBilevelError, match="nothing is released"):
        federation.serve(plan)
    spending = federation.sites["site-0"]._session.spending
    with pytest.raises(BudgetError, match="an earlier answer was not allowed: a release would raise epsilon"):
        spending.check()
    spending.loaded()
    spending.check()


def test_an_operator_sees_epsilon_and_a_plan_with_batches_is_refused(tmp_path):
    federation = federation_of(tmp_path)
    plan = plan_for(federation, settings={"num_local_steps": [1, 2, 2]}, num_iterations=4)
    leaves = preview(plan_of(plan), "site-0", read_settings(tmp_path / "sites" / "site-0"))
    per_round = [joint([2.0] * 2, 0.5, 4), joint([2.0], 0.5, 2)]  # of the site with the most steps
    wanted = Accountant(Budget(1000.0, 1e-5)).forecast(4, per_round)
    assert f"about {wanted:.4g} at delta 1e-05 after 4 outer iterations" in leaves["privacy"]
    wrong = {**plan, "options": {**plan["options"], "batch_size": 3}}
    with pytest.raises(FedBilevelError, match="each example takes part by a coin"):
        federation.serve(wrong)


def test_an_answer_without_the_number_of_derivatives_is_refused(tmp_path):
    def short(header, arrays):
        header["derived"] = header["derived"][:1]
        return header, arrays

    fault = lambda name, head: short if name == "site-1" and head["kind"] == "phase" else None
    federation = federation_of(tmp_path)
    assert federation.serve(plan_for(federation, quorum=2), fault) == "finished"
    assert "does not say how many noisy derivatives it has used" in json.dumps(
        [one["missing"] for one in federation.diary()]
    )


def test_a_policy_counts_the_examples_behind_a_derivative(tmp_path):
    federation = federation_of(tmp_path, 1, settings=TRIAL.replace("min_batch = 1", "min_batch = 3"))
    assert federation.serve(plan_for(federation, {**PRIVATE, "rate": 1.0}, num_iterations=1)) == "finished"
    with pytest.raises(QuorumError, match="fewer train samples than the 3 that the line 'min_batch'"):
        federation.serve(plan_for(federation, {**PRIVATE, "rate": 0.1}, name="other"))
