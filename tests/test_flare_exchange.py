"""The transport's contract against a real federation over loopback."""

import json
import signal
import statistics
import threading
import time

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")


from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.flare import control, job
from real_loopback import federation_of

SITES = ["site-1", "site-2"]
DRIVEN = {"server": "flare_standins.Driven", "client": "flare_standins.ToldClient"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(tmp_path_factory.mktemp("exchange"), SITES, allow=["flare_standins."]) as running:
        yield running


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Driver:
    def __init__(self, federation):
        self.federation, self.number = federation, 0
        self.folder = federation.kits["server"] / job.RUNS / "driven"
        federation.submit({"name": "driven", "sites": SITES}, **DRIVEN)
        until((self.folder / job.PROGRESS).exists)

    def exchange(self, messages, deadline=10.0):
        asked = {"messages": {site: message.hex() for site, message in messages.items()}, "deadline": deadline}
        unfinished = self.folder / "ask.new"
        unfinished.write_text(json.dumps(asked))
        unfinished.replace(self.folder / f"{self.number}.ask.json")
        answer = self.folder / f"{self.number}.answer.json"
        until(answer.exists, deadline + 20)
        self.number += 1
        return json.loads(answer.read_text())

    def tell(self, site, deadline=10.0, **told):
        return self.exchange({site: json.dumps(told).encode()}, deadline)


@pytest.fixture(scope="module")
def driver(federation):
    return Driver(federation)


def contents(answer):
    return {site: bytes.fromhex(reply["content"]) for site, reply in answer["replies"].items()}


def test_each_site_gets_its_own_bytes_and_answers_come_by_name(driver):
    messages = {"site-2": bytes(range(256)) * 10, "site-1": b""}
    answer = driver.exchange(messages)
    assert contents(answer) == messages
    assert answer["order"] == [SITES, []]
    assert all(reply["kind"] for reply in answer["replies"].values())


def test_a_site_is_made_once_with_its_own_folder(driver):
    who = json.dumps({"do": "who"}).encode()
    first, again = (contents(driver.exchange(dict.fromkeys(SITES, who))) for _ in range(2))
    assert first == again
    told = {site: json.loads(text) for site, text in first.items()}
    assert [told[site]["name"] for site in SITES] == SITES
    assert all(one["has_settings"] for one in told.values())
    assert len({one["pid"] for one in told.values()}) == len(SITES)


def test_sites_work_at_the_same_time_also_on_different_messages(driver):
    answer = driver.exchange({site: json.dumps({"do": "sleep", "seconds": 1.0, "for": site}).encode() for site in SITES})
    assert answer["order"] == [SITES, []]
    assert 1.0 <= answer["seconds"] < 1.9
    assert all(1.0 <= reply["seconds"] < 1.9 for reply in answer["replies"].values())


def test_a_refusal_is_an_answer_in_the_sites_words_and_an_error_says_nothing_of_its_data(driver):
    answer = driver.exchange({"site-1": b'{"do": "refuse"}', "site-2": b'{"do": "sleep", "seconds": 1.0}'})
    assert answer["order"] == [["site-2"], ["site-1"]]
    refused = answer["failures"]["site-1"]
    assert (refused["silent"], refused["reason"]) == (False, "site-1 takes no part in this.")
    assert refused["seconds"] < 1.0  # not those of the slowest
    failed = driver.exchange({"site-2": b'{"do": "fail"}'})["failures"]["site-2"]
    assert (failed["silent"], failed["reason"]) == (False, "the site failed with ValueError; its own log says more.")
    log = " ".join(path.read_text() for path in driver.federation.kits["site-2"].glob("*/log.txt"))
    assert "patient 4711 has no label" in log
    assert driver.exchange(dict.fromkeys(SITES, b"on"))["order"] == [SITES, []]


def test_a_site_that_is_not_in_the_job_is_named_and_the_others_answer(driver):
    answer = driver.exchange({"site-0": b"x", "site-2": b"x"})
    assert answer["order"] == [["site-2"], ["site-0"]]
    assert answer["failures"]["site-0"]["silent"] is True


def test_a_frozen_site_costs_the_deadline_and_is_back_when_it_thaws(driver):
    driver.federation.kill("site-2", "job", number=signal.SIGSTOP)
    try:
        answer = driver.exchange(dict.fromkeys(SITES, b"x"), deadline=1.0)
    finally:
        driver.federation.kill("site-2", "job", number=signal.SIGCONT)
    assert answer["order"] == [["site-1"], ["site-2"]]
    failure = answer["failures"]["site-2"]
    assert failure["silent"] is True
    assert "did not answer within" in failure["reason"]
    assert 0.9 <= failure["seconds"] <= answer["seconds"] < 3.0
    assert driver.exchange(dict.fromkeys(SITES, b"x"))["order"] == [SITES, []]


def test_a_ping_gets_through_while_a_phase_runs(driver):
    assert driver.tell("site-1", deadline=0.5, do="sleep", seconds=4.0)["failures"]["site-1"]["silent"] is True
    ping = driver.exchange({"site-1": b"ping"}, deadline=2.0)
    assert contents(ping) == {"site-1": b"ping"}
    assert ping["seconds"] < 2.0


def test_a_round_of_160k_floats_is_fast(driver):
    vector = bytes(640_000)
    seconds = [driver.exchange({"site-1": vector, "site-2": vector})["seconds"] for _ in range(9)]
    assert statistics.median(seconds) < 0.2


def test_the_same_run_is_not_submitted_twice_and_status_tells_of_it(driver):
    with pytest.raises(SettingError, match="'driven' is running already"):
        driver.federation.submit({"name": "driven", "sites": SITES}, **DRIVEN)
    found = control.status(driver.federation.lead)
    assert set(found["sites"]) == set(SITES)
    assert found["runs"]["driven"]["outcome"] == "running"
    assert found["runs"]["driven"]["latest"] == {"iteration": 0, "sites": SITES}


def test_a_second_follower_takes_the_job_that_is_there(driver):
    link = control.Link(driver.federation.lead, print)
    jobs = control.Entry(driver.federation.lead, "driven").read()["jobs"]
    plan = {"name": "driven", "sites": SITES, "quorum": 2}
    assert control._start(link, driver.federation.lead, plan, print, 1.0, **DRIVEN) == jobs[-1]
    assert control.Entry(driver.federation.lead, "driven").read()["jobs"] == jobs
    link.close()


def test_a_run_that_waits_for_a_site_can_be_stopped(driver):
    notices, outcomes = [], []
    plan = {"name": "waiting", "sites": [*SITES, "site-9"], "quorum": 2}
    follower = threading.Thread(target=lambda: outcomes.append(control.watch(driver.federation.lead, plan, print, notice=notices.append, **DRIVEN)))
    follower.start()
    until(lambda: notices)
    assert notices == ["waiting for sites: 3 are needed, site-9 is not connected."]  # a run that has not begun needs all
    control.stop(driver.federation.lead, "waiting")
    follower.join(20)
    assert outcomes == ["stopped"]


def test_logs_do_not_grow_with_messages(driver):
    size = lambda: sum(path.stat().st_size for site in ("server", *SITES) for path in driver.federation.kits[site].rglob("*.txt"))
    before = size()
    for _ in range(20):
        driver.exchange(dict.fromkeys(SITES, b"x"))
    assert size() - before < 4000  # a request for tasks may fall in between, some lines per message would be 60 times as many


def test_a_run_stops_when_it_is_asked_to_and_resuming_it_starts_another_job(driver, monkeypatch):
    control.stop(driver.federation.lead, "driven")
    until(lambda: control.status(driver.federation.lead)["runs"]["driven"]["outcome"] == "stopped", 20)
    with pytest.raises(UnknownNameError, match="Did you mean 'driven'"):
        control.stop(driver.federation.lead, "drivn")
    monkeypatch.setattr(control, "watch", lambda _kit, _plan, _say, *, job, **_: job)
    assert control.resume(driver.federation.lead, "driven", print) is None  # not the one that is still ending
