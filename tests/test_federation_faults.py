"""Processes that are really killed and frozen, and sites that fail: the run goes on by itself, every outer iteration counts once, the culprit is named."""

import json
import re
import signal
import threading
import time

import pytest
from safetensors.torch import load_file

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from fedbilevel.flare import control, job
from fedbilevel.record import Record
from fedbilevel.sites.plan import plan_of
from loopback import Loopback, differences, simulated
from real_loopback import federation_of

SITES = ["site-0", "site-1", "site-2"]
pytestmark = pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(tmp_path_factory.mktemp("faults"), SITES, allow=["flare_standins."]) as running:
        yield running


def plan(name, num_iterations, quorum):
    """Memory and a private x at the sites, one call in an outer iteration."""
    return plan_of({
        "name": name, "sites": SITES, "num_iterations": num_iterations, "measure_every": 1000, "quorum": quorum, "deadline": 2.0, "patience": 10.0,
        "task": {"name": "quadratic", "num_clients": 3, "upper": "private"}, "algorithm": {"name": "adafbio", "num_local_steps": 2, "num_terms": 2},
        "options": {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop"},
    }).asdict()  # fmt: skip


class Story:
    """Faults that happen when an outer iteration is heard of, each when the one before is mended."""

    def __init__(self, federation, faults):
        self.federation, self.faults, self.happened = federation, dict(faults), []
        self.heard, self.notices = [], []
        self.mended = lambda: None  # once all is over

    def say(self, line):
        self.heard.append(line["iteration"])
        due = [at for at in self.faults if at <= line["iteration"] and at not in self.happened]
        if len(line["sites"]) < len(SITES) or line["missing"]:
            return
        if due:
            self.happened.append(due[0])
            threading.Thread(target=self.faults[due[0]]).start()
        elif len(self.happened) == len(self.faults) and line["iteration"] > self.happened[-1] + 5:
            self.mended()

    def kill(self, name, which):
        return lambda: self.federation.kill(name, which)

    def freeze(self, name, seconds):
        def frozen():
            self.federation.kill(name, "job", number=signal.SIGSTOP)
            time.sleep(seconds)
            self.federation.kill(name, "job", number=signal.SIGCONT)

        return frozen


def diary(federation, name):
    return [json.loads(line) for line in (federation.kits["server"] / job.RUNS / name / "sites.jsonl").read_text().splitlines()]


def test_where_all_sites_are_needed_killed_and_frozen_processes_change_nothing(federation, tmp_path):
    """The job process of a site, a frozen site, the server with its job: the end is that of the simulator."""
    ours = plan("all", 150, 3)
    story = Story(federation, {})
    story.faults = {5: story.kill("site-2", "job"), 30: story.freeze("site-1", 4.0), 60: story.kill("server", "all")}
    assert federation.watch(ours, story.say, notice=story.notices.append) == "finished"
    assert story.happened == [5, 30, 60]
    assert [line["iteration"] for line in diary(federation, "all")] == list(range(1, 151))
    assert all(set(line["sites"]) == set(SITES) and line["missing"] == {} for line in diary(federation, "all"))
    found, _ = Record(federation.kits["server"] / job.RUNS / "all").load()
    result, wanted = simulated(ours, tmp_path / "simulated")
    far = differences(found, wanted)
    assert {part for part, value in far.items() if value} <= {"ledger.bytes_down", "ledger.floats_down"}  # arrays were sent again
    assert far["state.y"] == 0.0
    for number, site in enumerate(SITES):
        own = load_file(federation.kits[site] / job.SITE / "runs" / "all" / "solution.safetensors")
        assert own["x.x"].tolist() == result.x[number]["x"].tolist()
    told = " | ".join(story.notices)
    assert "site-2" in told
    assert "starting another job" in told
    assert "site-1 (local_steps of outer iteration" in told  # frozen: named while the run waits for it
    assert "server was started anew" in told


def test_where_a_quorum_is_enough_the_survivors_go_on_and_everybody_comes_back(federation, tmp_path):
    """A site that raises, one that answers NaN, one that is slow, one that is killed as a whole, and the server's job process."""
    ours = plan("quorum", 300, 2)
    story = Story(federation, {})
    story.faults = {20: story.kill("site-1", "all"), 70: story.kill("server", "job")}
    places = [federation.kits[site] / job.SITE / "moods.json" for site in SITES]
    for place, moods in zip(places, ({"5": "raise"}, {"8": "nan"}, {"11": 3.0}), strict=True):
        place.write_text(json.dumps({**moods, "pace": 0.1}))  # so that the run does not end before a site is back
    story.mended = lambda: [place.unlink(missing_ok=True) for place in places]
    assert federation.watch(ours, story.say, notice=story.notices.append, check_every=1.0, client="flare_standins.MoodyClient") == "finished"
    assert story.happened == [20, 70]
    lines = diary(federation, "quorum")
    assert [line["iteration"] for line in lines] == list(range(1, 301))
    assert "it failed with ValueError; its own log says more" in lines[4]["missing"]["site-0"]
    assert "site-1 (" not in json.dumps(lines[4])
    assert "it sent a value of" in lines[7]["missing"]["site-1"]
    assert "that is not finite" in lines[7]["missing"]["site-1"]
    assert "no answer within 2" in lines[10]["missing"]["site-2"]
    assert "patient" not in json.dumps([lines, story.notices])  # what the site said when it raised
    missing = {site for line in lines[19:] for site in line["missing"]}
    assert "site-1" in missing
    assert set(lines[-1]["sites"]) == set(SITES)  # everybody is back
    assert any("site-1 is connected but not part of the job" in text for text in story.notices)

    # the same sites missing in the same outer iterations, in one process without any engine: the same bits
    replayed = Loopback(tmp_path)
    absent = {line["iteration"]: set(SITES) - set(line["sites"]) for line in lines}
    unsaved = {
        (site, int(found[1])) for line in lines for site, why in line["missing"].items() if (found := re.match(r"saving after outer iteration (\d+)", why))
    }

    def fault(name, header):
        if header["kind"] == "phase" and name in absent.get(header["iteration"], ()):
            return "silent"
        return "silent" if header["kind"] == "commit" and (name, header["version"]) in unsaved else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbilevel.engines.sites._APART", (0.0, 0.0))
        replayed.serve({**ours, "name": "trial"}, fault)
    Loopback.close_all()
    found, _ = Record(federation.kits["server"] / job.RUNS / "quorum").load()
    far = differences(found, replayed.record.load()[0])
    assert far["state.y"] == 0.0
    assert {value for part, value in far.items() if part.startswith("state.")} == {0.0}


def test_status_knows_both_runs_and_a_finished_one_is_not_run_again(federation):
    found = control.status(federation.lead)
    assert {name: run["outcome"] for name, run in found["runs"].items()} == {"all": "finished", "quorum": "finished"}
    assert set(found["sites"]) == set(SITES)
    assert control.resume(federation.lead, "all", print) == "finished"
