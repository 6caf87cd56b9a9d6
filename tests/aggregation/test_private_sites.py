"""Secure sums and noise between sites: the simulator's trajectory, no row in the clear, drops."""

import json
import math

import pytest
import torch

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")
pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from fedbilevel.aggregation.sealing import addressed
from fedbilevel.errors import FedBilevelError, PlanError, QuorumError
from fedbilevel.privacy import Accountant, Budget, joint
from fedbilevel.problem.draws import Stream
from fedbilevel.sites import wire
from fedbilevel.sites.plan import plan_of
from fedbilevel.sites.policy import read_settings
from fedbilevel.sites.preview import preview
from fedbilevel.sites.telling import plan_rows
from support.sites.loopback import Loopback, differences, simulated
from support.sites.private import federation_of, plan_for

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.slow]
PRIVATE = {"clip": 1.0, "noise": 2.0, "epsilon": 1000.0}


@pytest.mark.parametrize(
    ("layer", "algorithm", "hosts"),
    [
        ({"secure": True}, "fedbio", ()),
        ({"secure": True, "compress": "randk:0.5"}, "fedbio", (2, 1, 1)),
        ({"secure": True, "clip": 1.0}, "fbo_aggitd", ()),  # several calls in an outer iteration
        ({"secure": True}, "self_tuned", ()),
    ],
    ids=str,
)
def test_secure_sums_have_the_trajectory_and_the_figures_of_the_simulator(tmp_path, layer, algorithm, hosts):
    federation = federation_of(tmp_path, hosts=hosts)
    plan = plan_for(federation, layer, algorithm)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "one")
    assert {*differences(federation.record.load()[0], wanted).values()} == {0.0}
    rows = federation.record.rows()
    assert [row["upper_loss"] for row in rows] == [row["upper_loss"] for row in result.rows]
    plain = {**plan, "options": {**plan["options"], "aggregation": {**layer, "secure": False}}}
    tensors = simulated(plain, tmp_path / "plain")[1]
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted if name.startswith("state."))


class Overheard:
    """A fault that changes nothing, and keeps the bytes that pass the server."""

    def __init__(self):
        self.bytes = []

    def __call__(self, name, head):
        self.bytes.append(json.dumps(head).encode())
        return lambda header, arrays: self.bytes.append(wire.pack(header, arrays)) or (header, arrays)


@pytest.mark.parametrize("secure", [True, False])
def test_the_server_receives_no_row_and_no_figure_of_a_site_in_the_clear(tmp_path, monkeypatch, secure):
    """Without masks the same search finds all of them, with noise as the only protection."""
    from fedbilevel.aggregation.sealing import Noisy
    from fedbilevel.sites import session

    rows, masked, whole = [], Noisy.masked, session.figure_integers
    keep = lambda integers: rows.append(integers.clone()) or integers
    monkeypatch.setattr(Noisy, "masked", lambda ring, integers, ids, at: keep(masked(ring, integers, ids, at)))
    monkeypatch.setattr(session, "figure_integers", lambda table: keep(whole(table)))
    federation, overheard = federation_of(tmp_path), Overheard()
    plan = plan_for(federation, {"secure": True} if secure else PRIVATE)
    assert federation.serve(plan, overheard) == "finished"
    transcript = b"".join(overheard.bytes)
    found = [row.sum(0).numpy().tobytes() in transcript for row in rows]
    assert len(found) == 3 * (4 * 3 + (3 if secure else 0))  # x, y and u in 4 calls, and measurements
    assert {*found} == {not secure}


STAGES = ("keys", "share", "receive", "rows", "confirm", "unmask")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["silent", "killed"])
def test_a_site_may_be_lost_at_every_stage(tmp_path, stage, how):
    """Site 1 is lost once: before its row it is not in the mean, after its row it is."""
    lost = []

    def fault(name, head):
        now = "rows" if head["kind"] == "phase" else head.get("stage")
        due = head.get("iteration", 0) >= 2 if now == "rows" else fault.iteration >= 2
        fault.iteration = max(fault.iteration, head.get("iteration") or 0)
        if name == "site-1" and now == stage and due and not lost:
            lost.append(fault.iteration)
            return how
        return None

    fault.iteration = 2 if stage in STAGES[:3] else 0
    federation = federation_of(tmp_path, 4)
    plan = plan_for(federation, {"secure": True}, quorum=3, num_iterations=5)
    if stage in STAGES[:3]:  # before the first outer iteration all sites must answer: the server tries again
        assert federation.serve({**plan, "patience": 5.0}, fault) == "finished"
        wanted = simulated(plan, tmp_path / "one")[1]
    else:
        assert federation.serve(plan, fault) == "finished"
        drops = lambda iteration, call: {1} if iteration == 2 and stage == "rows" else ()
        wanted = simulated(plan, tmp_path / "one", drops=drops)[1]
    assert len(lost) == 1
    apart = differences(federation.record.load()[0], wanted)
    assert {far for name, far in apart.items() if name.startswith("state.")} == {0.0}


def test_below_the_quorum_the_round_fails(tmp_path):
    federation = federation_of(tmp_path, 4)
    plan = plan_for(federation, {"secure": True}, quorum=3, patience=1e-9)
    gone = lambda name, head: "silent" if name in ("site-1", "site-2") and head.get("stage") == "unmask" else None
    with pytest.raises(QuorumError, match="2 members helped to unmask, expected at least 3"):
        federation.serve(plan, gone)


def test_refusals_of_plans_and_sites(tmp_path):
    federation = federation_of(tmp_path)
    with pytest.raises(PlanError, match="a quorum of 2, below this site's floor of 3: raise the quorum"):
        federation.serve(plan_for(federation, {"secure": True}, quorum=2))
    with pytest.raises(PlanError, match="the quorum is 1 of 3 sites, and secure sums need more than half"):
        federation.serve(plan_for(federation, {"secure": True}, quorum=1))
    plan = plan_for(federation, PRIVATE)
    with pytest.raises(PlanError, match="noise needs all clients in every round between sites"):
        plan_of({**plan, "options": {**plan["options"], "fraction": 0.5}})
    federation.party_of = None
    with pytest.raises(PlanError, match="secure sums need the certificates of a federation's kits: run the plan"):
        federation.serve(plan_for(federation, {"secure": True}))
    bare = Loopback(tmp_path / "bare", party_of=lambda certificate: None)
    with pytest.raises(PlanError, match="kits, and this site has none"):
        bare.serve(plan_for(bare, {"secure": True}))


@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_sites_is_that_of_the_simulator_for_the_same_random_words(tmp_path, monkeypatch, secure):
    monkeypatch.setattr("fedbilevel.sites.session.secret", addressed(Stream(5)))
    federation = federation_of(tmp_path, hosts=(2, 1, 1))
    plan = plan_for(federation, {**PRIVATE, "secure": secure})
    said = []
    assert federation.serve(plan, say=said.append) == "finished"
    result, wanted = simulated(plan, tmp_path / "one")
    assert {*differences(federation.record.load()[0], wanted).values()} == {0.0}
    rows = federation.record.rows()
    assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in result.rows]
    assert said[-1]["epsilon"] == result.final["epsilon"]
    assert not any("upper_loss" in row for row in rows)  # figures would leave without noise
    own = json.loads((tmp_path / "sites" / "site-0" / "runs" / "trial" / "privacy.json").read_text())
    assert own == {"run": [[pytest.approx(2 / math.sqrt(3)), 1.0, 4]]}


def test_noise_of_a_quorum_hides_a_sum_even_if_other_sites_are_lost(tmp_path, monkeypatch):
    """Each of 4 sites adds the noise of one of 2: the sum over any 2 has all of the noise."""
    sigmas = []
    from fedbilevel.aggregation import sealing

    monkeypatch.setattr(
        sealing, "ring_noise", lambda shape, sigma, source: sigmas.append(sigma) or torch.zeros(shape, dtype=torch.long)
    )
    for quorum in (4, 2):
        federation = federation_of(tmp_path / str(quorum), 4)
        assert federation.serve(plan_for(federation, PRIVATE, quorum=quorum)) == "finished"
    many, few = sigmas[0], sigmas[-1]
    assert few / many == pytest.approx(math.sqrt(4 / 2))


def test_a_run_between_sites_stops_at_its_budget_and_a_site_keeps_its_own_account(tmp_path):
    federation, said = federation_of(tmp_path), []
    plan = plan_for(federation, {**PRIVATE, "epsilon": 5.5}, num_iterations=20)
    assert federation.serve(plan, say=said.append) == "stopped"
    assert "above the budget of 5.5 at delta 1e-05: nothing is released" in said[-1]["warning"]
    done = federation.record.rows()[-1]
    assert 0 < done["epsilon"] <= 5.5
    spent = federation.record.path / "privacy.json"
    assert spent.read_bytes() == (tmp_path / "sites" / "site-0" / "runs" / "trial" / "privacy.json").read_bytes()
    spent.unlink()  # a server that forgets its account
    with pytest.raises(FedBilevelError, match="nothing is released"):
        federation.serve({**plan, "num_iterations": 20})


def test_an_operator_sees_epsilon_before_the_approval(tmp_path):
    federation = federation_of(tmp_path)
    plan = plan_of(plan_for(federation, {**PRIVATE, "epsilon": 5.5}, num_iterations=4))
    leaves = preview(plan, "site-0", read_settings(tmp_path / "sites" / "site-0"))
    account = Accountant(Budget(5.5, 1e-5))
    assert f"about {account.forecast(4, [joint([2.0] * 3)]):.4g} at delta 1e-05, and the run will" in leaves["privacy"]
    request = {"plan": plan.asdict(), "run": "trial", "who": "lead", "time": 0.0, "digest": "d", "leaves": leaves}
    rows = dict(plan_rows(request))
    assert rows["Privacy"] == [leaves["privacy"].removeprefix("privacy: ")]
    assert "no figures: they have no noise" in rows["How often"]


def test_a_site_answers_no_measurement_of_a_run_with_noise_and_needs_weights(tmp_path):
    federation = federation_of(tmp_path)
    assert federation.serve({**plan_for(federation, PRIVATE), "num_iterations": 1}) == "finished"
    session = federation.sites["site-0"]._session
    head = {"kind": "measure", "iteration": 1, "values": {}, "new": [], "live": [], "place": {}}
    values = {"x": torch.zeros(4), "y": torch.zeros(6)}
    session.incoming.values = lambda *given: values
    with pytest.raises(FedBilevelError, match="figures have no noise"):
        session.measure(head, [])
    for wrong in ({}, {"weights": [3], "largest": 2}, {"weights": [1, 1], "largest": 2}):
        with pytest.raises(FedBilevelError, match="does not have the weights of this site's clients"):
            session._fixed({**head, **wrong}, 1)
    with pytest.raises(FedBilevelError, match="a secure sum, which the plan does not have"):
        session.secure({"stage": "keys"}, [])


def test_other_messages_of_a_secure_sum_are_refused(tmp_path):
    federation = federation_of(tmp_path)
    assert federation.serve({**plan_for(federation, {"secure": True}), "num_iterations": 1}) == "finished"
    session = federation.sites["site-0"]._session
    with pytest.raises(FedBilevelError, match="has the stage 'rows' of a secure sum, which this site does not know"):
        session.secure({"stage": "rows"}, [])
    session.host.looked_at = lambda x, y: (["upper", "lower", "weight"], torch.full((1, 3), math.inf).double())
    session.incoming.values = lambda *given: {"x": torch.zeros(4), "y": torch.zeros(6)}
    head = {"kind": "measure", "iteration": 1, "weights": [1], "largest": 1}
    with pytest.raises(FedBilevelError, match=r"not finite or above 2\*\*34: lower the step sizes"):
        session.measure(head, [])


def test_a_masked_measurement_of_another_form_is_left_out(tmp_path):
    def short(header, arrays):
        return header, [array[:, :-1] for array in arrays]

    fault = lambda name, head: short if name == "site-1" and head["kind"] == "measure" and head["iteration"] else None
    federation = federation_of(tmp_path, 4)
    assert federation.serve(plan_for(federation, {"secure": True}, quorum=3), fault) == "finished"
    assert "its measurement is not a masked row of figures" in json.dumps(
        [one["missing"] for one in federation.diary()]
    )
