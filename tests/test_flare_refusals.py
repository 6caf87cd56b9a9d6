"""Who gets nowhere: without our certificate, with another authority's, without TLS; with code in the job, or with a class that a site does not list."""

import json
import shutil
import socket
import ssl
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

import psutil
from nvflare.fuel.flare_api.api_spec import AuthorizationError

from fedbilevel.errors import FedBilevelError
from fedbilevel.flare import control, kits, processes
from fedbilevel.flare.local import LEAD
from real_loopback import HERE, federation_of

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the first words of a gRPC client


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(tmp_path_factory.mktemp("refusals"), ["site-1"]) as running:
        yield running


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


def test_our_certificate_is_let_in(federation):
    assert first_words(federation, federation.kits["site-1"])[3:4] == b"\x04"  # settings of HTTP/2


def test_a_client_without_certificate_without_tls_or_of_another_authority_hears_nothing(federation, foreign):
    assert first_words(federation, None) == b""
    assert first_words(federation, foreign["site-1"]) == b""
    assert first_words(federation, None, tls=False) == b""


def test_a_whole_site_of_another_authority_is_never_connected_and_its_lead_not_heard(federation, foreign):
    intruder = processes.Supervised(foreign["site-9"], environment=HERE)
    intruder.start()
    try:
        with pytest.raises(FedBilevelError, match="cannot be reached"), control.session(foreign[LEAD], timeout=2.0):
            pass
        end = time.monotonic() + 20
        log = foreign["site-9"] / "log.txt"
        while time.monotonic() < end and "cell" not in (log.read_text().lower() if log.exists() else ""):
            time.sleep(0.2)
        time.sleep(2.0)
        assert intruder.pid is not None  # it runs, and tries
        assert set(control.status(federation.lead)["sites"]) == {"site-1"}
    finally:
        intruder.stop()


def test_all_ports_are_on_loopback(federation):
    for name in ("server", "site-1"):
        for pid in processes.running(federation.kits[name]):
            listening = [one.laddr.ip for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN]
            assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
            assert listening or name != "server"


def test_the_lead_reads_no_files_at_a_site_and_cannot_end_it(federation):
    with control.session(federation.lead) as opened:
        with pytest.raises(AuthorizationError):
            opened.ls_target("site-1")
        with pytest.raises(AuthorizationError):
            opened.cat_target("site-1", file="local/resources.json")
        assert json.loads(opened.cat_target("server", file="local/resources.json"))  # his own server he may read
    assert federation.pids("site-1")["parent"]


def ended(federation, folder):
    with control.session(federation.lead) as opened:
        job, end = opened.submit_job(str(folder)), time.monotonic() + 60
        while time.monotonic() < end:
            status = opened.get_job_status(job)
            if status.startswith("FINISHED"):
                return status, " ".join(map(str, opened.get_job_meta(job).get("job_deploy_detail") or []))
            time.sleep(0.1)
    raise AssertionError("the job did not end")


def test_a_job_with_code_in_it_is_refused_by_the_site(federation, tmp_path):
    folder = control.job_folder(tmp_path, {"name": "code", "sites": ["site-1"]})
    (folder / "at_site" / "custom").mkdir()
    (folder / "at_site" / "custom" / "ours.py").write_text("import os\n")
    status, detail = ended(federation, folder)
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "site-1" in detail
    assert "BYOC not permitted" in detail


def test_a_class_that_the_site_does_not_list_does_not_run_there(federation, tmp_path):
    folder = control.job_folder(tmp_path, {"name": "other-class", "sites": ["site-1"]}, client="flare_standins.ToldClient")
    status, _ = ended(federation, folder)
    assert status.startswith("FINISHED:")
    assert status != "FINISHED:COMPLETED"
    logs = " ".join(path.read_text() for path in federation.kits["site-1"].glob("*/error_log.txt"))
    assert "'flare_standins.ToldClient' at config path 'components.#1' is not in allow_list" in logs
