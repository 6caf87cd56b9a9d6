"""Health and metrics of a server and a site: asked for over HTTP, read by the parser of Prometheus."""

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

import psutil
from prometheus_client.parser import text_string_to_metric_families
from test_certificates import age

from fedbilevel.errors import SettingError
from fedbilevel.sites.audit import AuditLog
from fedbilevel.sites.chain import HEAD
from fedbilevel.sites.flare import certificates, job, kits, metrics, processes
from fedbilevel.sites.flare.local import free_port
from fedbilevel.sites.status import STATUS
from support.sites.real_loopback import HERE
from support.sites.reaper import reaped

pytestmark = pytest.mark.wait

REFUSED = "Ask under this machine's address, or under the name that --metrics-host gives.\n"


def parsed(text):
    """Samples by name and labels."""
    assert text.endswith("\n")
    families, samples = list(text_string_to_metric_families(text)), {}
    assert len({family.name for family in families}) == len(families)  # samples of a family stand together
    for family in families:
        assert family.type in ("gauge", "counter")
        assert family.documentation
        for one in family.samples:
            key = (one.name.removeprefix("fedbilevel_"), frozenset(one.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = one.value
    return samples


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    kits.init(folder / "federation.toml", sites=["north"], port=free_port())
    return kits.provision(folder / "federation.toml", folder / "kits")


@pytest.fixture
def made(once, tmp_path):
    shutil.copytree(once["server"].parent, tmp_path / "kits")
    return {name: tmp_path / "kits" / name for name in once}


@pytest.fixture
def asked(made):
    """The endpoint of a kit whose process is not started."""
    opened = []

    def ask(name, path):
        opened.append(metrics.Endpoint(processes.Supervised(made[name])))
        return get(opened[-1].url + path)

    yield ask
    for endpoint in opened:
        endpoint.close()


def value(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


def test_metrics_of_a_server_list_its_runs_with_escaped_names(made, asked):
    latest = {
        "iteration": 7, "num_iterations": 20, "rounds": 49, "megabytes": 1.5, "sites": {"north": 0.25},
        "missing": {'so"u\\t\nh': "late"}, "figures": {"test_accuracy": 0.75, "f1": None},
    }  # fmt: skip
    for run, content in {
        "cleaning": json.dumps({"outcome": "running", "waiting": "for south", "latest": [{}, latest]}),
        "new": json.dumps({"outcome": "finished", "waiting": "", "latest": []}),
        "junk": "{",
    }.items():
        (made["server"] / job.RUNS / run).mkdir(parents=True)
        (made["server"] / job.RUNS / run / job.PROGRESS).write_text(content)
    status, kind, text = asked("server", "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples = parsed(text)
    assert value(samples, "run_iteration", run="cleaning") == 7
    assert value(samples, "run_iterations", run="cleaning") == 20
    assert value(samples, "run_rounds", run="cleaning") == 49
    assert value(samples, "run_bytes", run="cleaning") == 1.5e6
    assert value(samples, "run_figure", run="cleaning", figure="test_accuracy") == 0.75
    assert not any(("figure", "f1") in labels for _, labels in samples)
    assert value(samples, "run_site_seconds", run="cleaning", site="north") == 0.25
    assert value(samples, "run_site_missing", run="cleaning", site='so"u\\t\nh') == 1
    is_running = [value(samples, "run_outcome", run=run, outcome="running") for run in ("cleaning", "new", "junk")]
    assert is_running == [1, 0, 0]
    assert value(samples, "run_outcome", run="new", outcome="finished") == 1
    assert [value(samples, "run_waits", run=run) for run in ("cleaning", "new")] == [1, 0]
    assert (value(samples, "up"), value(samples, "starts_total")) == (0, 0)
    assert 300 * 86400 < value(samples, "certificate_remaining_seconds") < 400 * 86400


def test_metrics_of_a_site_show_its_state_and_what_left(made, asked):
    before = parsed(asked("north", "/metrics")[2])
    assert value(before, "site_state", state="idle") == 1
    status = {
        "time": 1000.5, "state": "waiting for approval", "iteration": 3, "num_iterations": None, "answers": 12,
        "bytes": 4096, "rounds_run": 5, "max_rounds": 10000,
        "norms": {"p": 1.25, "q": float("nan")}, "last_error": {"time": 900.0, "text": "x"},
    }  # fmt: skip
    (made["north"] / job.SITE / STATUS).write_text(json.dumps(status))
    samples = parsed(asked("north", "/metrics")[2])
    assert {state for state in metrics.STATES if value(samples, "site_state", state=state)} == {"waiting for approval"}
    names = ("answers", "bytes", "rounds_run", "max_rounds", "iteration")
    found = {name: value(samples, f"site_{name}") for name in names}
    assert found == {name: status[name] for name in found}
    assert ("site_iterations", frozenset()) not in samples
    log = AuditLog(made["north"] / job.SITE, size=1)  # each line in a file of its own
    log.append({"run": "a", "bytes": 100, "arrays": [{"name": "p"}]})
    log.append({"run": "b", "bytes": 10, "arrays": []})
    after = parsed(asked("north", "/metrics")[2])
    totals = {name: value(after, f"site_left_{name}_total") for name in ("answers", "rounds", "bytes")}
    assert totals == {"answers": 2, "rounds": 1, "bytes": 110}
    assert ("site_left_bytes_total", frozenset()) not in samples
    assert value(samples, "site_norm", array="p") == 1.25
    assert value(samples, "site_last_error_timestamp_seconds") == 900
    assert value(samples, "site_status_timestamp_seconds") == 1000.5
    assert asked("north", "/other") == (404, metrics.TEXT, "there are /healthz and /metrics\n")
    assert asked("north", "/healthz") == (503, metrics.TEXT, "north does not run\n")


def test_numbers_that_no_float_holds_are_left_out_and_the_rest_is_there(made, asked):
    huge = 10**400
    status = {"time": huge, "answers": 12, "iteration": huge, "bytes": -huge, "num_iterations": float("inf")}
    content = json.dumps({**status, "norms": {"p": huge, "q": 1.5}, "last_error": {"time": huge}})
    (made["north"] / job.SITE / STATUS).write_text(content)
    head = {"n": huge, "chain": "0" * 64, "rounds": 3, "bytes": huge, "size": 0, "files": 0}
    (made["north"] / job.SITE / HEAD).write_text(json.dumps(head))
    code, _, text = asked("north", "/metrics")
    samples = parsed(text)
    site = {(name, *labels) for name, labels in samples if name.startswith("site_") and name != "site_state"}
    assert (code, value(samples, "site_norm", array="q"), value(samples, "site_answers")) == (200, 1.5, 12)
    assert site == {("site_norm", ("array", "q")), ("site_answers",)}


@pytest.mark.parametrize("latest", [{"a": 1}, 3, [3], [{"megabytes": 10**400, "rounds": 10**400, "sites": 5}]])
def test_progress_of_a_run_that_is_damaged_is_left_out(made, asked, latest):
    (made["server"] / job.RUNS / "odd").mkdir(parents=True)
    (made["server"] / job.RUNS / "odd" / job.PROGRESS).write_text(json.dumps({"latest": latest}))
    code, _, text = asked("server", "/metrics")
    assert (code, value(parsed(text), "run_waits", run="odd")) == (200, 0)
    assert {name for name, labels in parsed(text) if ("run", "odd") in labels} == {"run_waits", "run_outcome"}


def test_foreign_names_in_the_host_header_are_refused(made):
    endpoint = metrics.Endpoint(processes.Supervised(made["north"]))
    try:
        for path in ("/metrics", "/healthz", "/other"):
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1", "127.0.0.2"):
                code, _, text = get(endpoint.url + path, Host=host)
                assert (code, text) == (403, REFUSED), host
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9400", "[::1]:9400"):
            assert get(endpoint.url + "/metrics", Host=host)[0] == 200, host
    finally:
        endpoint.close()


@pytest.mark.parametrize("given", ["0.0.0.0", "127.0.0.2"])
def test_the_address_that_a_client_connects_to_is_a_name_of_the_endpoint(made, given):
    endpoint = metrics.Endpoint(processes.Supervised(made["north"]), host=given)
    try:
        url = endpoint.url.replace("0.0.0.0", "127.0.0.2") + "/metrics"
        assert get(url)[0] == 200
        assert get(url, Host="127.0.0.3")[0] == 403
        assert get(url, Host=given)[0] == 200
    finally:
        endpoint.close()


def test_every_family_is_announced_with_its_kind():
    samples = [metrics.Sample(name, 1.0) for name in metrics.FAMILIES]
    assert {name for name, _ in parsed(metrics.text(samples))} == set(metrics.FAMILIES)


def test_the_page_names_every_family():
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    part = page[page.index("**Health and metrics.**") : page.index("**Services.**")]
    assert set(metrics.FAMILIES) <= set(re.findall(r"`(\w+)(?:\{\w+\})?`", part))


def test_a_port_that_is_taken_is_named(made):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingError, match=r"metrics cannot be served at \S+:\d+ \(Address already in use\)"):
            metrics.Endpoint(processes.Supervised(made["north"]), port=taken.getsockname()[1])


def test_a_certificate_that_ended_meanwhile_is_not_healthy(made, monkeypatch):
    supervised = processes.Supervised(made["north"])
    monkeypatch.setattr(processes.Supervised, "pid", 1)
    assert metrics.fault(supervised) == ""
    age(made["north"], datetime.now(UTC) - timedelta(days=1))
    assert "client.crt ended on" in metrics.fault(supervised)
    certificates.own(made["north"]).unlink()
    assert "holds no certificate in startup" in metrics.fault(supervised)
    assert {one.name for one in metrics.of_process(supervised)} == {"up", "starts_total"}


def test_a_client_that_disconnects_prints_nothing(made, capfd):
    """Reset while the answer is on its way."""
    endpoint = metrics.Endpoint(processes.Supervised(made["north"]))
    host, port = endpoint.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert get(endpoint.url + "/healthz")[0] == 503
    endpoint.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_start_site_serves_both_while_it_runs_and_counts_restarts(made, tmp_path):
    """A real process; there is no server, which a site waits for."""
    said = tmp_path / "said.txt"
    words = ["federation", "start-site", str(made["north"]), "--metrics-port", "0"]
    with said.open("wb") as file:
        command, environment = [sys.executable, "-m", "fedbilevel", *words], {**os.environ, **HERE}
        started = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    with reaped(made["north"]):
        try:
            until(lambda: "/metrics" in said.read_text(), said)
            url = re.search(r"serves (\S+)/metrics", said.read_text())[1]
            until(lambda: get(url + "/healthz") == (200, metrics.TEXT, "ok\n"), said)
            first = parsed(get(url + "/metrics")[2])
            assert (value(first, "up"), value(first, "starts_total")) == (1, 1)
            for pid in processes.running(made["north"]):
                psutil.Process(pid).kill()
            until(lambda: value(parsed(get(url + "/metrics")[2]), "starts_total") == 2, said)
            listening = [
                one for one in psutil.Process(started.pid).net_connections() if one.status == psutil.CONN_LISTEN
            ]
            assert {one.laddr.ip for one in listening} == {"127.0.0.1"}
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(60)
        assert started.returncode == 0, said.read_text()
        assert processes.running(made["north"]) == {}


def until(condition, said, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.1)
