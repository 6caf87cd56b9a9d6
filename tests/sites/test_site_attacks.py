"""Attacks of a dishonest server on an honest site, each with what the site does about it."""

import json

import pytest
import torch

import fedbilevel
from fedbilevel.errors import WireError
from fedbilevel.sites import chain, operator, verification, wire
from fedbilevel.sites import preview as preview_module
from fedbilevel.sites.consent import Submitted
from fedbilevel.sites.plan import plan_digest, plan_of
from fedbilevel.sites.site import Site

FREE = 'loader = "simulated"\nauto_approve = true\n[policy]\nmin_batch = 1\n'
ASKING = FREE.replace("auto_approve = true\n", "")
PLAN = {
    "name": "trial",
    "sites": ["site-0", "site-1"],
    "num_iterations": 7,
    "algorithm": {"name": "fedbio"},
    "task": {"name": "quadratic", "num_clients": 2, "upper": "private"},
    "options": {"dtype": "float64", "strategy": "loop"},
}
KEPT = {"x": {"kept": "x"}, "y": {"array": 0}, "u": {"array": 1}}


class Attacker:
    """A server job that says what it likes to a site with a private x."""

    def __init__(self, folder, settings=FREE, **plan):
        folder.mkdir(exist_ok=True)
        (folder / "site.toml").write_text(settings)
        self.folder, self.turn = folder, 0
        self.plan = plan_of({**PLAN, **plan}).asdict()
        self.digest = plan_digest(self.plan)
        self.site = Site("site-1", folder, Submitted(self.digest, "lead@example.org", "job"))

    def say(self, kind, arrays=(), **header):
        self.turn += 1
        message = wire.pack({"kind": kind, "run": "trial", "turn": [1, 0, self.turn], **header}, arrays)
        return wire.unpack(self.site.handle(message))

    def join(self):
        return self.say("join", plan=self.plan, version=fedbilevel.__version__)[0]

    def phase(self, iteration=1, call=1, values=KEPT, **more):
        vectors = [torch.ones(6, dtype=torch.float64)] * 2
        asked = {
            "phase": "local_steps",
            "iteration": iteration,
            "call": call,
            "values": values,
            "new": [0, 1],
            "live": [0, 1],
        }
        return self.say("phase", vectors, **{**asked, **more})[0]

    def measure(self, iteration, **more):
        vectors, values = [torch.ones(6, dtype=torch.float64)], {"x": {"kept": "x"}, "y": {"array": 0}}
        return self.say(
            "measure", vectors, **{"iteration": iteration, "values": values, "new": [0], "live": [0], **more}
        )[0]

    def lines(self):
        return list(verification.lines(self.folder))


@pytest.fixture
def attacker(tmp_path):
    made = Attacker(tmp_path / "site")
    assert "error" not in made.join()
    yield made
    made.site.close()


# ---- points --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"array": 2}, {"value": 800.0}, {"value": 1}, {"kept": 3}, "x"])
@pytest.mark.parametrize("kind", ["phase", "measure"])
def test_attack_a_private_x_that_the_server_chooses_is_refused(attacker, kind, value):
    """With x = -800 for all samples but one, a gradient would be that of a single sample."""
    arrays = [torch.ones(6, dtype=torch.float64)] * 2 + [torch.full((4,), -800.0, dtype=torch.float64)]
    values = {**KEPT, "x": value} if kind == "phase" else {"x": value, "y": {"array": 0}}
    header = {"phase": "local_steps", "iteration": 1, "call": 1, "values": values, "new": [0, 1, 2], "live": [0, 1, 2]}
    answer, sent = attacker.say(kind, arrays, **header)
    assert answer == {"error": "a message brings a value of x, which stays at this site: it may only be named as kept."}
    assert sent == []
    assert not any(chain.is_round(line) for line in attacker.lines())


def test_attack_a_refusal_does_not_tell_how_long_a_private_x_is(attacker):
    answer = attacker.phase(values={**KEPT, "x": {"array": 0}})
    assert not any(letter.isdigit() for letter in answer["error"])


# ---- order ---------------------------------------------------------------------------------------


def test_a_site_follows_iterations_and_calls_in_order_with_gaps(attacker):
    for iteration, call in ((0, 1), (1, 2), (1, 5), (4, 1), (7, 3)):
        assert "error" not in attacker.phase(iteration, call), (iteration, call)
    assert "error" not in attacker.measure(7)


@pytest.mark.parametrize(
    ("iteration", "call", "says"),
    [
        (3, 2, "about call 2 of outer iteration 3, expected a call after 2"),
        (3, 1, "about call 1 of outer iteration 3, expected a call after 2"),
        (2, 9, "about outer iteration 2, expected 3 to 7"),
        (8, 1, "about outer iteration 8, expected 3 to 7"),
        (-1, 1, "about outer iteration -1, expected 3 to 7"),
        (10**30, 1, "about outer iteration 10000000000000000000, expected 3 to 7"),
    ],
)
def test_attack_a_call_again_or_an_earlier_iteration_is_refused(attacker, iteration, call, says):
    """Two answers about the same batch at points that the server chooses are equations about
    samples."""
    attacker.phase(3, 2)
    assert says in attacker.phase(iteration, call)["error"]
    assert "error" not in attacker.phase(3, 3)


def test_attack_a_third_measurement_of_an_outer_iteration_is_refused(attacker):
    assert ["error" in attacker.measure(2) for _ in range(3)] == [False, False, True]
    assert "expected 2 to 7" in attacker.measure(1)["error"]
    assert "outer iteration 'now', expected a whole number" in attacker.measure("now")["error"]
    assert ["error" in attacker.measure(3) for _ in range(3)] == [False, False, True]


def test_attack_a_private_x_set_back_to_its_start_is_refused(attacker):
    """Set back each time, x would be steered anew through every other value of a message."""
    start = {"x": "start"}
    assert "asks to place 'y' as 'start', expected a kept name" in attacker.phase(place={"y": "start"})["error"]
    assert "error" not in attacker.phase(1, 1, place=start)
    for answer in (
        attacker.phase(1, 2, place=start),
        attacker.phase(2, 1, place=start),
        attacker.measure(2, place=start),
    ):
        assert "asks to place 'x' again, but start values are placed only before outer iteration 1" in answer["error"]
    attacker.say("commit", version=1)
    attacker.say("load", version=1)
    assert "asks to place 'x' again" in attacker.phase(2, 1, place=start)["error"]
    attacker.say("load", version=None)  # as when a run is begun again: it counts as a repeat
    assert "error" not in attacker.phase(1, 1, place=start)


def test_attack_going_back_again_and_again_is_bounded_also_by_new_processes(tmp_path):
    again = []
    for _ in range(3):  # processes
        attacker = Attacker(tmp_path / "site", f"{FREE}max_repeats = 4\n")
        attacker.join()
        for _ in range(3):
            attacker.say("load", version=None)
            again.append(attacker.phase(1, 1, place={"x": "start"}).get("error", ""))
        attacker.site.close()
    assert again[:5] == [""] * 5
    assert all(
        "to repeat 4 outer iterations of a plan, and they are used up: raise its line 'max_repeats'" in text
        for text in again[5:]
    )
    assert json.loads((tmp_path / "site" / "runs" / "trial" / "order.json").read_text())["repeats"] == 4


def test_a_version_is_followed_by_later_iterations_and_only_those_done_before_are_repeats(attacker):
    for version in (1, 2):
        attacker.phase(version, 1)
        attacker.say("commit", version=version)
    attacker.phase(3, 1)
    attacker.say("load", version=1)
    assert "outer iteration 1, expected 2 to 7" in attacker.phase(1, 1)["error"]
    assert ["error" in attacker.phase(iteration, 1) for iteration in (3, 4)] == [False, False]
    assert json.loads((attacker.folder / "runs" / "trial" / "order.json").read_text())["repeats"] == 1


def test_another_plan_of_the_same_name_is_counted_anew(attacker):
    attacker.phase(5, 1)
    attacker.site.close()
    other = Attacker(attacker.folder, f"{FREE}max_repeats = 1\n", num_iterations=6)
    other.join()
    assert ["error" in other.phase(iteration, 1) for iteration in (1, 2, 3)] == [False] * 3
    other.site.close()


# ---- limits --------------------------------------------------------------------------------------


def test_attack_answers_that_stay_and_failures_use_up_rounds(tmp_path, monkeypatch):
    """Whether a computation is finite is an answer, too."""
    attacker = Attacker(tmp_path / "site", f"{FREE}max_rounds = 3\n")
    attacker.join()
    host = attacker.site._session.host
    ran = []

    def stays(*_args, **_more):
        ran.append(1)
        if len(ran) == 2:
            raise RuntimeError
        return {"x": torch.zeros(1, 4, dtype=torch.float64)}

    monkeypatch.setattr(host, "run_phase", stays)
    answers = [attacker.phase(1, call) for call in (1, 2, 3, 4)]
    assert answers[0]["results"] == {"x": "kept"}
    assert "it failed with RuntimeError" in answers[1]["error"]
    assert "and they are used up: raise its line 'max_rounds'" in answers[3]["error"]
    assert len(ran) == attacker.site.audit.rounds == 3
    report = verification.verify(attacker.folder)
    assert (report.ok, report.runs["trial"].rounds) == (True, 3)
    attacker.site.close()


def test_rounds_of_an_older_log_count(tmp_path):
    assert [chain.is_round(line) for line in ({"arrays": [{}]}, {"arrays": []}, {"round": True, "arrays": []}, {})] == [
        True,
        False,
        True,
        False,
    ]


def test_attack_a_refusal_quotes_little_of_a_long_message(attacker, monkeypatch):
    values = {f"name{number}": {"value": 1} for number in range(5000)}
    answer, _ = attacker.say("phase", phase="local_steps", iteration=1, call=1, values=values)
    assert "takes x, y, u, m_y, s_y, t_y, but the message has name0, name1" in answer["error"]
    assert len(answer["error"]) < 200

    def quotes(header, arrays):
        raise WireError(f"a message of kind {header['kind']} is not known.")

    monkeypatch.setattr(attacker.site, "_answer", quotes)
    answer, _ = attacker.say("x" * 10**6)
    assert len(answer["error"]) == len(attacker.lines()[-1]["text"]) == 500


def test_attack_repeated_refusals_are_merged_in_the_log(attacker):
    before = len(attacker.lines())
    noise = [attacker.site.handle(b"noise") for _ in range(100)]
    found = attacker.lines()[before:]
    assert [line.get("times", 1) for line in found] == [1, 1, 2, 4, 8, 16, 32]
    assert sum(line["bytes"] for line in found) == 64 * len(noise[0])
    for number in range(1200):  # each of them another: what is remembered has an end
        attacker.say(f"kind{number}")
    assert len(attacker.site._refusals) <= 1000
    assert verification.verify(attacker.folder).ok


def test_attack_a_full_folder_is_written_to_no_more_and_answers_nothing(attacker):
    assert "error" not in attacker.phase(1, 1)
    (attacker.folder / "runs" / "full").write_bytes(bytes(2 * 10**6))
    (attacker.folder / "site.toml").write_text(f"{FREE}max_disk_megabytes = 1\n")
    for number in range(20):
        last = attacker.phase(2, number + 1)
    size = lambda: sum(path.stat().st_size for path in attacker.folder.rglob("*") if path.is_file())
    assert "the line 'max_disk_megabytes' of its policy allows 1" in last["error"]
    before = size()
    for number in range(20):
        assert wire.unpack(attacker.site.handle(f"noise {number}".encode()))[0] == last
    attacker.site.refuse_caller("west", "no")
    attacker.site.note("an error")
    assert size() == before
    (attacker.folder / "runs" / "full").unlink()
    assert "error" not in attacker.phase(3, 1)


def test_a_site_whose_settings_broke_meanwhile_keeps_the_default_limit_of_its_disk(attacker):
    (attacker.folder / "site.toml").write_text("[policy")
    assert ["error" in attacker.phase(1, call) for call in range(1, 20)] == [False] * 19


def test_attack_a_plan_with_thousands_of_clients_is_refused_before_anything_is_computed(tmp_path):
    attacker = Attacker(tmp_path / "site", ASKING, clients={"site-0": 2000})
    says = "does not allow num_clients = 2001: its line 'num_clients' in [policy.settings] allows 0 to 1000"
    assert says in attacker.join()["error"]
    attacker.site.close()


def test_attack_a_preview_computes_for_two_clients_and_not_for_long(tmp_path, monkeypatch):
    many = {
        "clients": {"site-0": 9},
        "algorithm": {"name": "fedbio", "num_local_steps": [2] * 10},
        "task": {**PLAN["task"], "num_clients": 10},
    }
    hosted, old = [], preview_module.Simulation.__init__

    def init(self, algorithm, problem, clients, **more):
        hosted.append(len(clients))
        old(self, algorithm, problem, clients, **more)

    monkeypatch.setattr(preview_module.Simulation, "__init__", init)
    attacker = Attacker(tmp_path / "site", ASKING, **many)
    assert attacker.join()["wait"] is True
    assert hosted == [2]
    [request] = operator.pending(attacker.folder)
    assert (request["leaves"]["floats_per_iteration"], request["leaves"]["total_bytes"]) == (12, 7 * 12 * 8)
    attacker.site.close()
    brief = Attacker(tmp_path / "brief", f"{ASKING}max_answer_seconds = 1e-9\n")
    assert brief.join()["wait"] is True
    assert operator.pending(brief.folder)[0]["leaves"] == {}
    brief.site.close()


def test_a_preview_counts_a_cohort_by_its_share(tmp_path):
    attacker = Attacker(tmp_path / "site", ASKING, clients={"site-0": 9}, options={**PLAN["options"], "fraction": 0.5},
                        task={**PLAN["task"], "num_clients": 10})  # fmt: skip
    attacker.join()
    assert operator.pending(attacker.folder)[0]["leaves"]["floats_per_iteration"] == 6
    attacker.site.close()


def test_attack_a_measurement_that_takes_too_long_is_stopped(tmp_path):
    attacker = Attacker(tmp_path / "site", f"{FREE}max_answer_seconds = 1e-9\n")
    attacker.join()
    assert "the line 'max_answer_seconds' of its policy" in attacker.measure(0, place={"x": "start"})["error"]
    assert attacker.site.audit.rounds == 1
    attacker.site.close()


def test_attack_a_message_with_very_many_arrays_is_refused(attacker):
    answer, _ = attacker.say("phase", [torch.zeros(0)] * 1001)
    assert "a message announces 1001 arrays, expected at most 1000" in answer["error"]


# ---- the operator --------------------------------------------------------------------------------


@pytest.mark.parametrize("decide", ["leave", "refuse"])
def test_attack_another_plan_of_a_run_that_was_left_is_not_approved_by_itself(tmp_path, decide):
    one = Attacker(tmp_path / "site")
    one.join()
    operator.leave(one.folder, "trial", "me") if decide == "leave" else operator.refuse(one.folder, one.digest, "me")
    one.site.close()
    other = Attacker(tmp_path / "site", deadline=61.0)
    assert other.join()["wait"] is True
    assert "wait" in wire.unpack(other.site.handle(wire.pack({"kind": "ping"})))[0]
    assert [request["digest"] for request in operator.pending(other.folder)] == [other.digest]
    operator.approve(other.folder, other.digest, "me")
    assert "error" not in other.join()
    other.site.close()


@pytest.mark.parametrize("decide", ["pause", "leave"])
def test_nothing_leaves_once_the_operator_has_decided_during_a_phase(attacker, monkeypatch, decide):
    host = attacker.site._session.host
    old = host.run_phase

    def meanwhile(*args, **more):
        operator.pause(attacker.folder) if decide == "pause" else operator.leave(attacker.folder, "trial", "me")
        return old(*args, **more)

    monkeypatch.setattr(host, "run_phase", meanwhile)
    answer = attacker.phase(1, 1)
    assert ("the site is paused" if decide == "pause" else "has left the run") in answer["error"]
    assert [line["arrays"] for line in attacker.lines() if chain.is_round(line)] == [[]]  # it counts, and nothing left


@pytest.mark.parametrize(
    "odd",
    [
        {"iteration": 10**400},
        {"iteration": [[1]]},
        {"phase": {"a": "\x1b[2J"}},
        {"phase": "\x1b]0;x\x07"},
        {"iteration": True},
    ],
)
def test_attack_a_header_of_odd_values_does_not_reach_the_status(attacker, odd):
    before = json.loads((attacker.folder / "status.json").read_text())
    assert "error" in attacker.phase(**odd)
    after = json.loads((attacker.folder / "status.json").read_text())
    assert after["iteration"] in (1, before["iteration"])
    assert after["iteration"] is not True
    assert after["phase"] in ("phase", "local_steps")
