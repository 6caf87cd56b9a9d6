"""The page while a run continues: the server, its answers, and its end."""

import http.client
import json
import os
import signal
import threading
import time
import webbrowser

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.errors import ReportError
from fedbilevel.report import page_data
from fedbilevel.report.watch import Live, Watch, _ending
from support.browser.pages import elements
from support.browser.records import (
    rows_of,
    write_influence,
    write_run,
)


@pytest.fixture
def served(tmp_path):
    folder = write_run(tmp_path / "run", iterations=30)
    with Watch(Live([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield folder, server
        finally:
            server.shutdown()
            thread.join()


def asked(server, path="/", host=None, method="GET"):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_watch_serves_the_page_and_what_is_new(served):
    folder, server = served
    answer, page = asked(server)
    assert answer.status == 200
    assert 'data-live="yes"' in page
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    before = json.loads(asked(server, "/data.json")[1])
    assert (before["over"], before["runs"][0]["columns"]["iteration"][-1]) == (False, 25)
    assert before["runs"][0]["columns"] == json.loads(elements(page).scripts[0])["runs"][0]["columns"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**rows_of(0, 7)[-1]}) + "\n")
    after = json.loads(asked(server, "/data.json")[1])
    assert (after["over"], after["runs"][0]["columns"]["iteration"][-1]) == (True, 30)
    (folder / "ledger.json").write_text("{")  # somebody spoils a file: what was known stays
    assert json.loads(asked(server, "/data.json")[1])["runs"] == after["runs"]


def test_watch_notices_how_a_run_ended_and_that_it_was_resumed(served):
    folder, server = served
    now = lambda: (lambda found: (found["over"], found["runs"][0]["state"]))(json.loads(asked(server, "/data.json")[1]))
    assert now() == (False, "going")
    (folder / "end.json").write_text(json.dumps({"stopped": "failed", "iteration": 27, "why": "too long a step."}))
    assert now() == (True, "failed")
    (folder / "end.json").unlink()
    assert now() == (False, "going")


def test_the_terminal_says_how_a_run_ended(tmp_path):
    ending = lambda *folders: _ending(page_data.read(folders, partial=True))
    done = lambda name, stopped, **more: write_run(
        tmp_path / name, iterations=400, end={"stopped": stopped, "iteration": 48, **more}, lr_upper=len(name)
    )
    failed = done("failed", "failed", why="a step\x1b[2J was\ntoo long.")
    assert ending(failed) == "The run failed after outer iteration 48 of 400: a step\\x1b[2J was\\ntoo long."
    stopped = done("stopped", "interrupted")
    assert ending(stopped) == "The run was stopped after outer iteration 48 of 400."
    finished = done("finished", "finished")
    assert ending(finished) == "The run has finished."
    assert (
        ending(finished, stopped, failed)
        == f"The run in {failed} failed after outer iteration 48 of 400: a step\\x1b[2J was\\ntoo long."
    )
    assert ending(finished, stopped) == f"The run in {stopped} was stopped after outer iteration 48 of 400."
    old = write_run(tmp_path / "old", iterations=40)
    (old / "solution.safetensors").write_bytes(b"")
    assert ending(old) == "The run was stopped after outer iteration 25 of 40."
    none = write_run(tmp_path / "none", rows=[], whole=False, end={"stopped": "failed", "iteration": 0})
    assert ending(none) == "The run failed after outer iteration 0 of 25."
    assert ending(write_influence(tmp_path / "study")) == "The study has finished."


def test_watch_answers_its_own_name_and_its_own_paths_only(served):
    _, server = served
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"127.0.0.1:{port}.evil.example",
    ):
        answer, text = asked(server, "/data.json", host)
        assert (answer.status, "runs" in text) == (403, False)
    assert asked(server, "/data.json", f"localhost:{port}")[0].status == 200
    for path in ("/config.json", "/../config.json", "/data.json?x", "/run/metrics.jsonl", "/%2e%2e/"):
        assert asked(server, path)[0].status in (400, 404)
    assert asked(server, "/", method="POST")[0].status == 501


def test_a_port_that_is_taken_is_said_in_one_sentence(served):
    folder, server = served
    port = server.server_address[1]
    with pytest.raises(
        ReportError, match=rf"the port {port} is not available \(another program uses it\): name another one"
    ):
        Watch(Live([folder]), port)
    with pytest.raises(ReportError, match="expected a number from 1 to 65535"):
        Watch(Live([folder]), 70000)
    done = CliRunner().invoke(cli, ["watch", str(folder), "--port", str(port), "--no-open"])
    assert isinstance(done.exception, ReportError)


def test_watch_says_when_the_run_has_finished_and_ends_by_ctrl_c(tmp_path, monkeypatch):
    folder, opened = write_run(tmp_path / "run", iterations=30), []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    said = []

    def look():
        end = time.monotonic() + 20
        while not opened and time.monotonic() < end:
            time.sleep(0.02)
        connection = http.client.HTTPConnection(opened[0].split("/")[2], timeout=10)
        connection.request("GET", "/data.json")
        said.append(json.loads(connection.getresponse().read())["over"])
        connection.close()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(rows_of(0, 7)[-1]) + "\n")
        time.sleep(2.4)  # it looks every two seconds
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    thread = threading.Thread(target=look)
    thread.start()
    done = CliRunner().invoke(cli, ["watch", str(folder)], catch_exceptions=False)
    thread.join()
    assert (done.exit_code, said) == (0, [False])
    assert done.output.splitlines() == [
        f"{folder} is shown at {opened[0]} (Ctrl-C ends this).",
        "The run has finished.",
        f"No longer watching {folder}.",
    ]
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(opened[0].split("/")[2], timeout=5).connect()
