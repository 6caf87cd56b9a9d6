"""Processes are killed and frozen, and sites fail. The run continues by itself, every outer
iteration counts once, and the failing party is named."""

import json
import re
import signal
import threading
import time

import pytest
from safetensors.torch import load_file

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from fedbilevel.runs.record import Record
from fedbilevel.sites.flare import follow, job, jobs
from fedbilevel.sites.plan import plan_of
from support.sites.loopback import Loopback, differences, simulated
from support.sites.real_loopback import federation_of

SITES = ["site-0", "site-1", "site-2"]
PACE = 0.8  # seconds for a phase at a site while there are faults to come; the deadline is 2
pytestmark = [pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"), pytest.mark.wait, pytest.mark.slow]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(tmp_path_factory.mktemp("faults"), SITES, allow=["support.sites.flare_standins."]) as running:
        yield running


def plan(name, sites, num_iterations, quorum):
    """Memory and a private x at the sites, one call in an outer iteration."""
    return plan_of(
        {
            "name": name,
            "sites": sites,
            "num_iterations": num_iterations,
            "measure_every": 1000,
            "quorum": quorum,
            "deadline": 2.0,
            "patience": 10.0,
            "task": {"name": "quadratic", "num_clients": len(sites), "upper": "private"},
            "algorithm": {"name": "adafbio", "num_local_steps": 2, "num_terms": 2},
            "options": {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop"},
        }
    ).asdict()


class Story:
    """Causes faults one after the other from an outer iteration on. Each follows once the one
    before was named in a notice and all sites take part again. Until the last one the sites answer
    slowly, so that a short run does not end before, on a fast machine or a slow one."""

    def __init__(self, federation, sites, begin, moods=None):
        self.federation, self.sites, self.begin, self.happened, self.notices = federation, sites, begin, [], []
        self.faults = {}  # by name: what happens, and words of the notice by which it is known
        self._told = 0  # notices when the last fault happened
        soon = {str(iteration): 0.0 for iteration in range(begin)}
        self._moods = {
            federation.kits[site] / job.SITE / "moods.json": {**soon, **(moods or {}).get(site, {})} for site in sites
        }
        self._set_pace(PACE)

    def _set_pace(self, seconds):
        for place, moods in self._moods.items():
            whole = place.with_suffix(".new")
            whole.write_text(json.dumps({**moods, "pace": seconds}))
            whole.replace(place)  # a site reads it for every message

    def since(self, words):
        return any(words in text for text in self.notices[self._told :])

    def say(self, line):
        if line["iteration"] < self.begin or len(line["sites"]) < len(self.sites) or line["missing"]:
            return
        if self.happened and not self.since(self.faults[self.happened[-1]][1]):
            return
        due = [name for name in self.faults if name not in self.happened]
        if due:
            self.happened.append(due[0])
            self._told = len(self.notices)
            threading.Thread(target=self.faults[due[0]][0]).start()
        else:
            self._set_pace(0.0)

    def kill(self, name, which):
        return lambda: self.federation.kill(name, which)

    def freeze(self, name):
        """Wait until the run reports that it waits for the site: longer than the deadline, shorter
        than its patience."""

        def frozen():
            self.federation.kill(name, "job", number=signal.SIGSTOP)
            end = time.monotonic() + 8.0
            while time.monotonic() < end and not self.since("no answer within"):
                time.sleep(0.1)
            self.federation.kill(name, "job", number=signal.SIGCONT)

        return frozen


def diary(federation, name):
    return [
        json.loads(line)
        for line in (federation.kits["server"] / job.RUNS / name / "sites.jsonl").read_text().splitlines()
    ]


def test_where_all_sites_are_needed_killed_and_frozen_processes_change_nothing(federation, tmp_path):
    """The job process of a site is killed, a site is frozen, and the server is killed with its job.
    The run ends like the simulator."""
    ours = plan("all", SITES[1:], 32, 2)
    story = Story(federation, SITES[1:], 3)
    story.faults = {
        "job of a site killed": (story.kill("site-2", "job"), "starting another job"),
        "site frozen": (story.freeze("site-1"), "no answer within"),
        "server killed": (story.kill("server", "all"), "server was started anew"),
    }
    assert (
        federation.watch(
            ours, story.say, notice=story.notices.append, client="support.sites.flare_standins.MoodyClient"
        )
        == "finished"
    )
    assert story.happened == list(story.faults)
    assert [line["iteration"] for line in diary(federation, "all")] == list(range(1, 33))
    assert all(set(line["sites"]) == set(SITES[1:]) and line["missing"] == {} for line in diary(federation, "all"))
    found, _ = Record(federation.kits["server"] / job.RUNS / "all").load()
    result, wanted = simulated(ours, tmp_path / "simulated")
    far = differences(found, wanted)
    assert {part for part, value in far.items() if value} <= {
        "ledger.bytes_down",
        "ledger.floats_down",
    }  # arrays were sent again
    assert far["state.y"] == 0.0
    for number, site in enumerate(SITES[1:]):
        own = load_file(federation.kits[site] / job.SITE / "runs" / "all" / "solution.safetensors")
        assert own["x.x"].tolist() == result.x[number]["x"].tolist()
    told = " | ".join(story.notices)
    assert "site-2" in told
    assert "starting another job" in told
    assert re.search(r"site-1 \([^()]*: no answer within", told), (
        told
    )  # frozen: named while the run waits for it, whatever it was asked for
    assert "server was started anew" in told


def test_with_a_quorum_the_run_continues_without_failed_sites_and_all_return(federation, tmp_path):
    """A site raises, one answers NaN, one is slow, one is killed with all its processes, and so is
    the server's job process."""
    ours = plan("quorum", SITES, 60, 2)
    story = Story(federation, SITES, 12, {"site-0": {"5": "raise"}, "site-1": {"8": "nan"}, "site-2": {"11": 3.0}})
    story.faults = {
        "site killed": (story.kill("site-1", "all"), "site-1 is connected but not part of the job"),
        "job of the server killed": (story.kill("server", "job"), "starting another job"),
    }
    assert (
        federation.watch(
            ours,
            story.say,
            notice=story.notices.append,
            check_every=1.0,
            client="support.sites.flare_standins.MoodyClient",
        )
        == "finished"
    )
    assert story.happened == list(story.faults)
    lines = diary(federation, "quorum")
    assert [line["iteration"] for line in lines] == list(range(1, 61))
    assert "it failed with ValueError; its own log says more" in lines[4]["missing"]["site-0"]
    assert "site-1 (" not in json.dumps(lines[4])
    assert "it sent a value of" in lines[7]["missing"]["site-1"]
    assert "that is not finite" in lines[7]["missing"]["site-1"]
    assert "no answer within 2" in lines[10]["missing"]["site-2"]
    assert "patient" not in json.dumps([lines, story.notices])  # what the site said when it raised
    missing = {site for line in lines[story.begin :] for site in line["missing"]}
    assert "site-1" in missing
    assert set(lines[-1]["sites"]) == set(SITES)  # everybody is back
    assert any("site-1 is connected but not part of the job" in text for text in story.notices)

    # the same sites missing in the same outer iterations, in one process without any engine: the same bits
    replayed = Loopback(tmp_path)
    absent = {line["iteration"]: set(SITES) - set(line["sites"]) for line in lines}
    unsaved = {
        (site, int(found[1]))
        for line in lines
        for site, why in line["missing"].items()
        if (found := re.match(r"saving after outer iteration (\d+)", why))
    }

    def fault(name, header):
        if header["kind"] == "phase" and name in absent.get(header["iteration"], ()):
            return "silent"
        return "silent" if header["kind"] == "commit" and (name, header["version"]) in unsaved else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbilevel.sites.exchange._APART", (0.0, 0.0))
        replayed.serve({**ours, "name": "trial"}, fault)
    Loopback.close_all()
    found, _ = Record(federation.kits["server"] / job.RUNS / "quorum").load()
    far = differences(found, replayed.record.load()[0])
    assert far["state.y"] == 0.0
    assert {value for part, value in far.items() if part.startswith("state.")} == {0.0}


def test_a_server_that_is_suspended_names_no_site_and_changes_nothing(federation, tmp_path):
    """Its job process is stopped for longer than the deadline while the sites answer. No site is
    left out, and the run ends like the simulator."""
    ours = plan("suspended", SITES, 24, 2)
    story = Story(federation, SITES, 3)

    def suspend():
        """Again where the answers won the race against the deadline after it."""
        for _ in range(5):
            federation.kill("server", "job", number=signal.SIGSTOP)
            time.sleep(ours["deadline"] + 2.0)  # the suspension itself
            federation.kill("server", "job", number=signal.SIGCONT)
            end = time.monotonic() + 5.0
            while time.monotonic() < end and not story.since("the server was suspended for"):
                time.sleep(0.1)
            if story.since("the server was suspended for"):
                return

    story.faults = {"server suspended": (suspend, "the server was suspended for")}
    assert (
        federation.watch(
            ours, story.say, notice=story.notices.append, client="support.sites.flare_standins.MoodyClient"
        )
        == "finished"
    )
    assert any("the server was suspended for" in text for text in story.notices)
    lines = diary(federation, "suspended")
    assert [line["iteration"] for line in lines] == list(range(1, 25))
    assert all(set(line["sites"]) == set(SITES) and line["missing"] == {} and line["flagged"] == {} for line in lines)
    assert not any(site in text for text in story.notices for site in SITES)
    found, _ = Record(federation.kits["server"] / job.RUNS / "suspended").load()
    far = differences(found, simulated(ours, tmp_path / "simulated")[1])
    assert {part for part, value in far.items() if value} <= {"ledger.bytes_down", "ledger.floats_down"}


def test_status_knows_all_runs_and_a_finished_one_is_not_run_again(federation):
    found = jobs.status(federation.lead)
    assert {name: run["outcome"] for name, run in found["runs"].items()} == {
        "all": "finished",
        "quorum": "finished",
        "suspended": "finished",
    }
    assert set(found["sites"]) == set(SITES)
    assert follow.resume(federation.lead, "all", print) == "finished"
