"""Attacks of a dishonest server on an honest site, each with what the site does about it."""

import json

import pytest
import torch

import fedbilevel
from fedbilevel.sites import audit, wire
from fedbilevel.sites.plan import plan_digest, plan_of
from fedbilevel.sites.site import Site, Submitted

FREE = 'loader = "simulated"\nauto_approve = true\n[policy]\nmin_batch = 1\n'
ASKING = FREE.replace("auto_approve = true\n", "")
PLAN = {
    "name": "trial", "sites": ["site-0", "site-1"], "num_iterations": 7, "algorithm": {"name": "fedbio"},
    "task": {"name": "quadratic", "num_clients": 2, "upper": "private"}, "options": {"dtype": "float64", "strategy": "loop"},
}  # fmt: skip
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
        asked = {"phase": "local_steps", "iteration": iteration, "call": call, "values": values, "new": [0, 1], "live": [0, 1]}
        return self.say("phase", vectors, **{**asked, **more})[0]

    def measure(self, iteration, **more):
        vectors, values = [torch.ones(6, dtype=torch.float64)], {"x": {"kept": "x"}, "y": {"array": 0}}
        return self.say("measure", vectors, **{"iteration": iteration, "values": values, "new": [0], "live": [0], **more})[0]

    def lines(self):
        return list(audit.lines(self.folder))


@pytest.fixture
def attacker(tmp_path):
    made = Attacker(tmp_path / "site")
    assert "error" not in made.join()
    yield made
    made.site.close()


# ---- points --------------------------------------------------------------------------------------------------------


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
    assert not any(audit.is_round(line) for line in attacker.lines())


def test_attack_a_refusal_does_not_tell_how_long_a_private_x_is(attacker):
    answer = attacker.phase(values={**KEPT, "x": {"array": 0}})
    assert not any(letter.isdigit() for letter in answer["error"])


# ---- order ---------------------------------------------------------------------------------------------------------


def test_a_site_follows_iterations_and_calls_in_order_with_gaps(attacker):
    for iteration, call in ((0, 1), (1, 2), (1, 5), (4, 1), (7, 3)):
        assert "error" not in attacker.phase(iteration, call), (iteration, call)
    assert "error" not in attacker.measure(7)


@pytest.mark.parametrize(
    ("iteration", "call", "says"),
    [
        (3, 2, "about call 2 of outer iteration 3, expected one after call 2"),
        (3, 1, "about call 1 of outer iteration 3, expected one after call 2"),
        (2, 9, "about outer iteration 2, expected 3 to 7"),
        (8, 1, "about outer iteration 8, expected 3 to 7"),
        (-1, 1, "about outer iteration -1, expected 3 to 7"),
        (10**30, 1, "about outer iteration 10000000000000000000, expected 3 to 7"),
    ],
)
def test_attack_a_call_again_or_an_earlier_iteration_is_refused(attacker, iteration, call, says):
    """Two answers about the same batch at points that the server chooses are equations about samples."""
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
    for answer in (attacker.phase(1, 2, place=start), attacker.phase(2, 1, place=start), attacker.measure(2, place=start)):
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
    assert all("to do 4 outer iterations of a plan again, and they are used up: raise its line 'max_repeats'" in text for text in again[5:])
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
