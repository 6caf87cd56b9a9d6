"""A server waits for operators without using up its patience, and does not count time in which its
own process was suspended."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from fedbilevel.cli.federation import line
from fedbilevel.errors import FedBilevelError, PlanError, QuorumError
from fedbilevel.sites import serve as serving
from fedbilevel.sites.mailbox import Answer, _read
from fedbilevel.sites.pulse import Pulse
from support.sites.loopback import Loopback, differences, simulated

pytestmark = [
    pytest.mark.usefixtures("short_waits"),
    pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"),
]
ADAFBIO = {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}
PRIVATE = {"name": "quadratic", "num_clients": 3, "upper": "private"}
REASON = "the plan 4f1a is new: approve it with fedbilevel federation approve 4f1a"


def in_bits(federation, plan, folder):
    """What the run left is what the simulator leaves, but for arrays that were sent again."""
    far = differences(federation.record.load()[0], simulated(plan, folder)[1])
    return {part for part, value in far.items() if value} <= {"ledger.bytes_down", "ledger.floats_down"}


def waiting(said):
    return [progress["waiting"] for progress in said if "waiting" in progress]


# ---- operators -----------------------------------------------------------------------------------


class Operated:
    """Sites that wait for their operators: they answer like a site without approval, or a paused
    site, until `pings` pings were sent."""

    def __init__(self, pings, who=("site-1",), since=None, busy=False):
        self.left, self.who, self.since, self.busy, self.joins = pings, who, since, busy, 0

    def __call__(self, name, header):
        if self.since is not None and header.get("iteration") == self.since and header["kind"] == "phase":
            self.since = None
        self.joins += header["kind"] == "join"
        if name not in self.who or self.left <= 0 or self.since is not None:
            return None
        if header["kind"] == "ping":
            self.left -= 1
            return lambda *_: ({"busy": self.busy, "wait": REASON}, [])
        return lambda *_: ({"error": REASON, "wait": True}, [])


@pytest.mark.slow
def test_a_new_run_waits_for_operators_without_using_up_its_patience(tmp_path):
    federation, said, operators = Loopback(tmp_path), [], Operated(200)
    plan = federation.plan(ADAFBIO, PRIVATE, quorum=2, patience=1e-6)
    assert federation.serve(plan, operators, said.append) == "finished"
    assert operators.left == 0
    assert operators.joins == 6  # asked to join twice, not with every question
    assert (
        waiting(said) == [f"waiting for the operator of site-1: {REASON}."] * 2
    )  # when it does not join, and when it is asked again
    assert in_bits(federation, plan, tmp_path / "simulated")


def test_the_reason_for_waiting_is_reported_whenever_it_changes(tmp_path):
    federation, said, reasons = (
        Loopback(tmp_path),
        [],
        itertools.chain(["one", "one", "two", "two"], itertools.repeat(None)),
    )

    def fault(name, header):
        if name != "site-1" or header["kind"] not in ("ping", "join"):
            return None
        if header["kind"] == "join":
            return None if fault.over else (lambda *_: ({"error": REASON, "wait": True}, []))
        reason = next(reasons)
        fault.over = reason is None
        return None if fault.over else lambda *_: ({"busy": True, "wait": reason}, [])

    fault.over = False
    assert federation.serve(federation.plan(ADAFBIO, PRIVATE), fault, said.append) == "finished"
    assert waiting(said)[1:] == ["waiting for the operator of site-1: one.", "waiting for the operator of site-1: two."]


def test_operators_that_never_decide_end_the_run_with_a_sentence(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan(ADAFBIO, PRIVATE, approval_wait=0.01)
    with pytest.raises(
        FedBilevelError,
        match=r"waiting for the operator of site-1, site-2: .*, for longer than the 0.01 s of approval_wait",
    ) as caught:
        federation.serve(plan, Operated(10**9, ("site-1", "site-2")))
    assert not isinstance(caught.value, QuorumError)
    assert federation.serve(plan) == "finished"


def test_a_stop_is_obeyed_while_the_run_waits_for_operators(tmp_path):
    federation, operators = Loopback(tmp_path), Operated(10**9)

    def say(line):
        federation.transport.stopped = "waiting for the operator" in line.get("waiting", "")

    assert federation.serve(federation.plan(ADAFBIO, PRIVATE), operators, say) == "stopped"


@pytest.mark.parametrize("busy", [True, False])
def test_a_site_that_pauses_is_left_out_while_there_is_a_quorum(tmp_path, busy):
    federation, said = Loopback(tmp_path), []
    plan = federation.plan(ADAFBIO, PRIVATE, quorum=2, num_iterations=5)
    assert federation.serve(plan, Operated(2, since=2, busy=busy), said.append) == "finished"
    assert [set(line["missing"]) for line in federation.diary()] == [set(), {"site-1"}, {"site-1"}, {"site-1"}, set()]
    assert REASON in federation.diary()[1]["missing"]["site-1"]
    assert waiting(said) == []


def test_a_site_that_pauses_is_waited_for_where_it_is_needed(tmp_path):
    federation, said = Loopback(tmp_path), []
    plan = federation.plan(ADAFBIO, PRIVATE, quorum=3, patience=1e-6)
    assert federation.serve(plan, Operated(50, since=2), said.append) == "finished"
    assert [line["missing"] for line in federation.diary()] == [{}] * 4
    assert waiting(said)[-1] == f"waiting for the operator of site-1: {REASON}."
    assert in_bits(federation, plan, tmp_path / "simulated")


def test_a_refusal_does_not_count_as_waiting(tmp_path):
    federation = Loopback(tmp_path)
    refused = lambda name, header: (
        (lambda *_: ({"error": "the operator refused", "wait": False}, [])) if name == "site-1" else None
    )
    with pytest.raises(PlanError, match="site-1 does not join the run trial: the operator refused"):
        federation.serve(federation.plan(ADAFBIO, PRIVATE), refused)


# ---- suspended -----------------------------------------------------------------------------------


class Asleep(Pulse):
    """A process that was suspended for as long as a test says."""

    seconds = 0.0

    def lost(self):
        return type(self).seconds


@pytest.fixture
def asleep(monkeypatch):
    monkeypatch.setattr(serving, "Pulse", Asleep)
    monkeypatch.setattr(Asleep, "seconds", 0.0)
    return Asleep


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["join", "phase", "measure", "commit", "load"])
@pytest.mark.parametrize("how", ["silent", "deaf"])
def test_a_suspended_server_blames_no_site_and_repeats_the_outer_iteration(tmp_path, asleep, kind, how):
    """Whatever it had asked, and whether or not the sites had carried it out."""
    federation, said, slept = Loopback(tmp_path), [], []
    plan = federation.plan(ADAFBIO, PRIVATE, quorum=2, patience=1e-6, measure_every=1)

    def fault(name, header):
        at = header.get("iteration", header.get("version")) or 0
        if header["kind"] == kind and len(slept) < 3 and (at == 2 or kind in ("join", "load")):
            if not slept:
                asleep.seconds += 61.0  # the deadline is 60
            slept.append(name)
            return how
        return None

    assert federation.serve(plan, fault, said.append) == "finished"
    assert slept == federation.names
    assert [line["missing"] for line in federation.diary()] == [{}] * 4
    assert [line["iteration"] for line in federation.diary()] == [1, 2, 3, 4]
    assert waiting(said) == [
        "the server was suspended for 61.0 s while it waited for answers; the outer iteration is done again."
    ]
    assert in_bits(federation, plan, tmp_path / "simulated")


def test_a_site_that_used_up_its_deadline_is_missing_even_if_the_server_was_suspended_briefly(tmp_path, asleep):
    federation = Loopback(tmp_path)
    plan = federation.plan(ADAFBIO, PRIVATE, quorum=2)
    exchange = federation.serve.__globals__["Faulty"].exchange

    def late(self, messages, *, deadline):
        replies, failures = exchange(self, messages, deadline=deadline)
        asleep.seconds += 5.0 if failures else 0.0
        return replies, {name: failure._replace(seconds=deadline + 5.5) for name, failure in failures.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.sites.loopback.Faulty.exchange", late)
        silent = lambda name, header: (
            "silent" if name == "site-1" and header["kind"] == "phase" and header["iteration"] == 2 else None
        )
        assert federation.serve(plan, silent) == "finished"
    assert [set(line["missing"]) for line in federation.diary()] == [set(), {"site-1"}, set(), set()]


def test_suspended_time_does_not_count_as_patience(tmp_path, asleep):
    federation, pings = Loopback(tmp_path), itertools.count(1)
    plan = federation.plan(ADAFBIO, PRIVATE, quorum=3, patience=30.0)
    missed = []

    def fault(name, header):
        if header["kind"] == "ping" and name == "site-1" and next(pings) <= 3:
            asleep.seconds += 1000.0
            return "silent"
        if name == "site-1" and header.get("iteration") == 2 and not missed:
            missed.append(name)
            return "silent"
        return None

    assert federation.serve(plan, fault) == "finished"
    assert next(pings) > 3


def test_a_pulse_tells_how_long_its_process_was_stopped():
    """A process is stopped and continued. It reports the time that passed meanwhile, and little
    before."""
    code = (
        "import sys, time\nfrom fedbilevel.sites.pulse import Pulse\n"
        "with Pulse() as pulse:\n    print('ready', flush=True)\n    sys.stdin.readline()\n"
        "    print(pulse.lost(), flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        began = time.monotonic()
        child.stdin.write("now\n")
        child.stdin.flush()
        while time.monotonic() - began < 2.5:
            time.sleep(0.1)
        os.kill(child.pid, signal.SIGCONT)
        lost = float(child.stdout.readline())
        assert 2.0 < lost < time.monotonic() - began + 1.0


def test_the_mailbox_escapes_a_sites_reason_for_waiting():
    answer = _read({"busy": False, "wait": "a\nlong\t" + "x" * 1000}, [], 0.1)
    assert isinstance(answer, Answer)
    assert len(answer.header["wait"]) <= 501
    assert answer.header["wait"].startswith("a long x")


def test_callers_that_a_site_refused_are_reported_by_name(tmp_path):
    federation, said = Loopback(tmp_path), []

    def fault(name, header):
        if name == "site-1" and header.get("iteration") == 2 and header["kind"] == "phase":
            return lambda answer, arrays: ({**answer, "strangers": {"west": 3, "a\nb": 1}}, arrays)
        if name == "site-2" and header.get("iteration") == 2 and header["kind"] == "phase":
            return lambda answer, arrays: ({**answer, "strangers": {"west": -3}}, arrays)  # no count
        return None

    federation.serve(federation.plan(ADAFBIO, PRIVATE), fault, said.append)
    assert [entry["strangers"] for entry in federation.diary()] == [{}, {"site-1": {"west": 3, "a\\nb": 1}}, {}, {}]
    assert "site-1 refused 3 calls of west" in line(said[1])
