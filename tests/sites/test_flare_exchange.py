"""A real federation over loopback: refused parties (without our certificate, with another
authority's, without TLS; with code in the job, or with a class that a site does not list), and the
transport's contract."""

import json
import shutil
import signal
import socket
import ssl
import statistics
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

import psutil
from nvflare.fuel.flare_api.api_spec import AuthorizationError, InternalError

from fedbilevel.errors import FedBilevelError, SettingError, UnknownNameError
from fedbilevel.sites.flare import configuration, connection, follow, jobs, kits, processes
from fedbilevel.sites.flare.local import LEAD
from support.sites.driven import Driver, contents, until
from support.sites.real_loopback import HERE, federation_of

pytestmark = [pytest.mark.wait, pytest.mark.slow]

SITES = ["site-1", "site-2"]
DRIVEN = {"server": "support.sites.flare_standins.Driven", "client": "support.sites.flare_standins.ToldClient"}
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the first words of a gRPC client


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(tmp_path_factory.mktemp("exchange"), SITES, allow=list(DRIVEN.values())) as running:
        yield running


# ---- refused parties ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(federation):
    """Kits for the same names and the same port, signed by somebody else."""
    other = federation.folder / "foreign"
    other.mkdir()
    toml = shutil.copy(federation.folder / "federation.toml", other)
    with Path(toml).open("a") as lines:
        lines.write('\n[[site]]\nname = "site-9"\norg = "other"\n')
    return kits.provision(Path(toml), other / "kits")


def first_words(federation, kit, *, tls=True):
    """What the server answers to a client with this kit's certificate, or with none."""
    port = kits.read(federation.folder / "federation.toml").port
    with socket.create_connection(("localhost", port), timeout=10) as connection:
        try:
            if tls:
                context = ssl.create_default_context(cafile=federation.kits["site-1"] / "startup" / "rootCA.pem")
                context.set_alpn_protocols(["h2"])
                if kit is not None:
                    context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
                with context.wrap_socket(connection, server_hostname="localhost") as secured:
                    secured.sendall(HELLO)
                    return secured.recv(9)
            connection.sendall(HELLO)
            return connection.recv(9)
        except (ssl.SSLError, ConnectionError):
            return b""


def test_a_valid_certificate_is_accepted(federation):
    assert first_words(federation, federation.kits["site-1"])[3:4] == b"\x04"  # settings of HTTP/2


def test_a_client_without_certificate_without_tls_or_of_another_authority_hears_nothing(federation, foreign):
    assert first_words(federation, None) == b""
    assert first_words(federation, foreign["site-1"]) == b""
    assert first_words(federation, None, tls=False) == b""


@pytest.fixture(scope="module")
def refused(federation, tmp_path_factory):
    """Two jobs that the site does not run, submitted together, so that other tests do not wait for
    their ends one by one."""
    folder = tmp_path_factory.mktemp("refused")
    sealed = lambda plan: {"plan": plan, "seal": configuration.sealed(federation.lead, configuration.packed(plan))}
    code = jobs.job_folder(folder, **sealed({"name": "code", "sites": ["site-1"]}))
    (code / "at_site" / "custom").mkdir()
    (code / "at_site" / "custom" / "ours.py").write_text("import os\n")
    other = jobs.job_folder(
        folder,
        **sealed({"name": "other-class", "sites": ["site-1"]}),
        client="support.sites.flare_standins.MoodyClient",
    )
    with connection.session(federation.lead) as opened:
        return {one.name: opened.submit_job(str(one)) for one in (code, other)}


def ended(federation, submitted):
    with connection.session(federation.lead) as opened:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            status = opened.get_job_status(submitted)
            if status.startswith("FINISHED"):
                return status, " ".join(map(str, opened.get_job_meta(submitted).get("job_deploy_detail") or []))
            time.sleep(0.1)
    raise AssertionError("the job did not end")


def test_all_ports_are_on_loopback(federation):
    for name in ("server", *SITES):
        for pid in processes.running(federation.kits[name]):
            listening = [
                one.laddr.ip for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN
            ]
            assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
            assert listening or name != "server"


def test_a_site_and_a_lead_of_another_authority_are_never_connected(federation, foreign, refused):
    intruder = processes.Supervised(foreign["site-9"], environment=HERE)
    intruder.start()
    try:
        with pytest.raises(FedBilevelError, match="cannot be reached"), connection.session(foreign[LEAD], timeout=2.0):
            pass
        log = foreign["site-9"] / "log.txt"
        until(
            lambda: log.exists() and log.read_text().count("finished connection") >= 2, 20
        )  # it was turned away, tried again and was turned away again
        assert intruder.pid is not None
        assert set(jobs.status(federation.lead)["sites"]) == set(SITES)
    finally:
        intruder.stop()


def test_the_lead_reads_no_files_at_a_site_and_cannot_end_it(federation):
    with connection.session(federation.lead) as opened:
        with pytest.raises((AuthorizationError, InternalError)):
            opened.ls_target("site-1")
        with pytest.raises((AuthorizationError, InternalError)):
            opened.cat_target("site-1", file="local/resources.json")
        assert json.loads(opened.cat_target("server", file="local/resources.json"))  # his own server he may read
    assert federation.pids("site-1")["parent"]


def test_a_job_with_code_in_it_is_refused_by_the_site(federation, refused):
    status, detail = ended(federation, refused["code"])
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "site-1" in detail
    assert (
        "runs the jobs of `fedbilevel federation submit` only: it holds config/config_fed_client.json, custom/ours.py"
        in detail
    )


def test_a_class_that_the_site_does_not_list_does_not_run_there(federation, refused):
    status, detail = ended(federation, refused["other-class"])
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "site-1" in detail
    assert "it names support.sites.flare_standins.MoodyClient" in detail


# ---- messages ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(federation):
    return Driver(federation, {"name": "driven", "sites": SITES}, **DRIVEN)


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
    answer = driver.exchange(
        {site: json.dumps({"do": "sleep", "seconds": 1.0, "for": site}).encode() for site in SITES}
    )
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


def test_the_same_run_is_not_submitted_twice_and_status_shows_it(driver):
    with pytest.raises(SettingError, match="'driven' is running already"):
        driver.federation.submit({"name": "driven", "sites": SITES}, **DRIVEN)
    found = jobs.status(driver.federation.lead)
    assert set(found["sites"]) == set(SITES)
    assert found["runs"]["driven"]["outcome"] == "running"
    assert found["runs"]["driven"]["latest"] == {"iteration": 0, "sites": SITES}


def test_a_second_follower_follows_the_existing_job(driver):
    before = jobs.RunEntry(driver.federation.lead, "driven").read()["jobs"]
    plan = {"name": "driven", "sites": SITES, "quorum": 2}
    following = follow.Follow(driver.federation.lead, plan, print, **DRIVEN)
    assert following.step() is None
    assert following.current.job == before[-1]
    assert jobs.RunEntry(driver.federation.lead, "driven").read()["jobs"] == before
    following.close()


def test_a_run_that_waits_for_a_site_can_be_stopped(driver):
    notices, outcomes = [], []
    plan = {"name": "waiting", "sites": [*SITES, "site-9"], "quorum": 2}
    follower = threading.Thread(
        target=lambda: outcomes.append(
            follow.watch(driver.federation.lead, plan, print, notice=notices.append, **DRIVEN)
        )
    )
    follower.start()
    until(lambda: notices)
    assert notices == [
        "waiting for sites: 3 are needed, site-9 is not connected."
    ]  # a run that has not begun needs all
    jobs.stop(driver.federation.lead, "waiting")
    follower.join(20)
    assert outcomes == ["stopped"]


def test_a_site_that_cannot_start_is_named_and_the_follower_does_not_wait_for_ever(driver):
    lead = driver.federation.lead
    absent = {"name": "absent", "sites": [*SITES, "site-9"], "quorum": 2}
    with pytest.raises(FedBilevelError, match=r"^site-9 did not connect within 1 s: start it there"):
        follow.watch(lead, absent, print, start_timeout=1.0, **DRIVEN)

    driver.federation.kill("site-1", "parent", number=signal.SIGSTOP)  # still connected, and starts nothing
    try:
        with pytest.raises(FedBilevelError, match=r"the run 'frozen' did not start within 4 s \(.*\): see log.txt"):
            follow.watch(lead, {"name": "frozen", "sites": SITES, "quorum": 2}, print, start_timeout=4.0, **DRIVEN)
    finally:
        driver.federation.kill("site-1", "parent", number=signal.SIGCONT)
    given_up = jobs.RunEntry(lead, "frozen").read()["jobs"][0]
    with connection.session(lead) as opened:
        until(lambda: str(opened.get_job_status(given_up)).startswith("FINISHED"))  # and does not begin unfollowed
    driver.federation.wait_for(SITES)


def test_logs_do_not_grow_with_messages(driver):
    size = lambda: sum(
        path.stat().st_size for site in ("server", *SITES) for path in driver.federation.kits[site].rglob("*.txt")
    )
    before = size()
    for _ in range(20):
        driver.exchange(dict.fromkeys(SITES, b"x"))
    assert (
        size() - before < 4000
    )  # a request for tasks may fall in between, some lines per message would be 60 times as many


def test_a_run_stops_when_it_is_asked_to_and_resuming_it_starts_another_job(driver, monkeypatch):
    jobs.stop(driver.federation.lead, "driven")
    until(lambda: jobs.status(driver.federation.lead)["runs"]["driven"]["outcome"] == "stopped", 20)
    with pytest.raises(UnknownNameError, match="Did you mean 'driven'"):
        jobs.stop(driver.federation.lead, "drivn")
    monkeypatch.setattr(follow, "watch", lambda _kit, _plan, _say, *, job, **_: job)
    assert follow.resume(driver.federation.lead, "driven", print) is None  # not the one that is still ending
