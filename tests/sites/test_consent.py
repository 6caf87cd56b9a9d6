"""A plan runs at a site after its operator has approved it; the operator may pause the site or
leave the run."""

import json

import pytest
import torch

import fedbilevel
from fedbilevel.sites import operator, verification, wire
from fedbilevel.sites.consent import PAUSED, Submitted
from fedbilevel.sites.plan import plan_digest, plan_of
from fedbilevel.sites.site import Site

ASKING = 'loader = "simulated"\n[policy]\nmin_batch = 1\n'
PLAN = plan_of(
    {
        "name": "trial",
        "sites": ["site-0", "site-1"],
        "num_iterations": 7,
        "task": {"name": "quadratic", "num_clients": 2, "upper": "private"},
        "algorithm": {"name": "fedbio"},
        "options": {"dtype": "float64", "strategy": "loop"},
    }
).asdict()
DIGEST = plan_digest(PLAN)


class Caller:
    def __init__(self, folder, settings=ASKING, submitted=None):
        folder.mkdir(exist_ok=True)
        (folder / "site.toml").write_text(settings)
        self.folder, self.site, self.step = folder, Site("site-1", folder, submitted), 0

    def say(self, kind, arrays=(), **header):
        self.step += 1
        return wire.unpack(
            self.site.handle(wire.pack({"kind": kind, "run": "trial", "turn": [1, 0, self.step], **header}, arrays))
        )[0]

    def join(self, plan=PLAN):
        return self.say("join", plan=plan, version=fedbilevel.__version__)

    def phase(self):
        arrays = [torch.ones(6, dtype=torch.float64)] * 2
        values = {"x": {"kept": "x"}, "y": {"array": 0}, "u": {"array": 1}}
        asked = {
            "phase": "local_steps",
            "iteration": 1,
            "call": 1,
            "values": values,
            "new": [0, 1],
            "live": [0, 1],
            "place": {"x": "start"},
        }
        return self.say("phase", arrays, **asked)

    def ping(self):
        return wire.unpack(self.site.handle(wire.pack({"kind": "ping"})))[0]

    def status(self):
        return json.loads((self.folder / "status.json").read_text())


@pytest.fixture
def caller(tmp_path):
    made = Caller(tmp_path / "site")
    yield made
    made.site.close()


def test_a_new_plan_waits_for_the_operator_and_nothing_leaves_meanwhile(caller):
    for answer in (caller.join(), caller.join()):
        assert answer == {
            "error": f"the plan is not approved there yet: `fedbilevel federation approve {DIGEST[:12]}`.",
            "wait": True,
        }
    assert caller.ping() == {
        "busy": False,
        "wait": f"the plan is not approved there yet: `fedbilevel federation approve {DIGEST[:12]}`.",
    }
    assert "takes no part" in caller.phase()["error"]
    assert caller.status()["state"] == "waiting for approval"
    assert not any(line["arrays"] for line in verification.lines(caller.folder))
    operator.approve(caller.folder, DIGEST[:8], "me")
    assert caller.ping() == {"busy": False}
    assert "error" not in caller.join()
    assert "error" not in caller.phase()
    assert (caller.status()["state"], caller.status()["run"], caller.status()["answers"]) == ("idle", "trial", 2)


def test_the_preview_counts_how_much_would_leave_and_how_often(caller):
    caller.join()
    [request] = operator.pending(caller.folder)
    assert (request["digest"], request["run"], request["plan"]) == (DIGEST, "trial", PLAN)
    assert request["leaves"] == {
        "rounds_per_iteration": 1,
        "floats_per_iteration": 12,
        "total_rounds": 7,
        "total_bytes": 7 * 12 * 8,
        "by_phase": {"local_steps": 12},
        "stays_here": ["x"],
    }


def test_data_that_cannot_be_read_leave_the_preview_empty(tmp_path):
    caller = Caller(tmp_path / "site", 'data = "/nowhere"\n[policy]\nmin_batch = 1\n')
    assert caller.join()["wait"] is True
    assert operator.pending(caller.folder)[0]["leaves"] == {}
    caller.site.close()


def test_a_refused_plan_and_a_run_that_was_left_get_no_answer(caller):
    caller.join()
    operator.refuse(caller.folder, DIGEST, "me")
    assert "its operator has refused the plan" in caller.join()["error"]
    operator.approve(caller.folder, DIGEST, "me")
    assert "error" not in caller.join()
    operator.leave(caller.folder, "trial", "me")
    assert "its operator has left the run" in caller.phase()["error"]
    assert caller.status()["state"] == "left"
    assert "wait" not in caller.join()


def test_a_paused_site_waits_and_resumes_where_it_was(caller):
    caller.join()
    operator.approve(caller.folder, DIGEST, "me")
    caller.join()
    operator.pause(caller.folder)
    assert caller.phase() == {"error": PAUSED, "wait": True}
    assert caller.ping() == {"busy": True, "wait": PAUSED}
    assert caller.status()["state"] == "paused"
    operator.unpause(caller.folder)
    assert "error" not in caller.phase()


def test_automatic_approval_counts_while_the_site_sets_it_and_never_overrules_a_person(tmp_path):
    caller = Caller(tmp_path / "site", f"auto_approve = true\n{ASKING}")
    assert "error" not in caller.join()
    operator.leave(caller.folder, "trial", "me")
    assert "has left the run" in caller.join()["error"]
    (caller.folder / operator.APPROVALS).unlink()
    assert "error" not in caller.join()
    (caller.folder / "site.toml").write_text(ASKING)
    assert caller.join()["wait"] is True
    assert [one["digest"] for one in operator.pending(caller.folder)] == [DIGEST]
    caller.site.close()


def test_a_site_that_is_bound_to_a_plan_answers_to_no_other(tmp_path):
    caller = Caller(tmp_path / "site", f"auto_approve = true\n{ASKING}", Submitted(DIGEST, "lead@example.org", "job-1"))
    greedy = {**PLAN, "options": {**PLAN["options"], "batch_size": 1}}
    wanted = (
        f"the message has the plan {plan_digest(greedy)[:12]}, but the plan {DIGEST[:12]} was submitted for this job"
    )
    assert wanted in caller.join(greedy)["error"]
    assert "the message has the plan none" in caller.join(None)["error"]
    assert "error" not in caller.join()
    assert operator.requests(caller.folder)[0]["who"] == "lead@example.org"
    caller.site.close()


def test_another_version_of_the_server_is_refused(caller):
    answer = caller.say("join", plan=PLAN, version="0.0.1")
    assert f"this site has fedbilevel {fedbilevel.__version__}, the server '0.0.1'" in answer["error"]


def test_refused_callers_are_written_down_and_reported_once(caller):
    for _ in range(5):
        assert caller.site.refuse_caller("west", "no") == "no"
    caller.join()
    operator.approve(caller.folder, DIGEST, "me")
    assert caller.join()["strangers"] == {"west": 5}
    assert "strangers" not in caller.phase()
    report = verification.verify(caller.folder)
    assert (report.ok, report.callers) == (
        True,
        {"west": 4},
    )  # lines for 1, 2 and 4 calls: repeated calls cannot fill the disk


def test_attack_by_calls_under_ever_new_names_is_counted_under_one(caller):
    for number in range(500):
        caller.site.refuse_caller(f"name-{number}", "no")
    caller.join()
    operator.approve(caller.folder, DIGEST, "me")
    told = caller.join()["strangers"]
    assert (len(told), told["others"], sum(told.values())) == (51, 450, 500)


def test_an_answer_that_takes_too_long_is_stopped_at_the_next_derivative(caller, monkeypatch):
    caller.join()
    operator.approve(caller.folder, DIGEST, "me")
    (caller.folder / "site.toml").write_text(f"{ASKING}max_answer_seconds = 1e-9\n")
    caller.join()
    assert "the line 'max_answer_seconds' of its policy" in caller.phase()["error"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")]
)
def test_a_site_without_memory_names_the_line_of_its_policy(caller, monkeypatch, error):
    caller.join()
    operator.approve(caller.folder, DIGEST, "me")
    caller.join()

    def fails(*_args, **_more):
        raise error

    monkeypatch.setattr(caller.site._session.host, "run_phase", fails)
    assert "raise the line 'max_memory_megabytes' of its policy" in caller.phase()["error"]


def test_a_schedule_may_only_shorten_a_step(caller):
    caller.join()
    operator.approve(caller.folder, DIGEST, "me")
    caller.join()
    answer = caller.say("phase", phase="local_steps", iteration=1, call=1, scaled={"lr_lower": 1e6})
    assert "sets lr_lower to 1e+06, but a schedule may only shorten the plan's step" in answer["error"]
