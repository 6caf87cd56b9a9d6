"""What an operator sees of a site: facts from its folder, in words, and one line per change."""

import ast
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.sites import audit, chain, operator, status, summary, telling, verification, view
from fedbilevel.sites.view import Follower, look
from support.sites.operator_kits import ONE, SERVER, TWO, ask, log_answers, log_refusal, make_kit, write_status

ME = os.getpid()
PARENT = {ME: "parent"}
ODD = {"iteration": "x", "norms": 3, "pid": "y", "max_rounds": -1, "run": 5, "last_error": 1}


def row(rows, heading):
    return dict(rows)[heading]


# ---- facts ---------------------------------------------------------------------------------------


def test_a_site_before_its_first_run_has_nothing_to_show_and_nothing_fails(kit, folder):
    now = look(folder)
    assert (now.name, now.server, now.state, now.run) == ("north", SERVER, "idle", "")
    assert (now.running, now.connected) == (None, None)
    rows = telling.rows(now, kit)
    assert row(rows, "Run") == ["no run yet"]
    assert row(rows, "What left") == ["in all: 0 lines in the log, 0 of them phases and measurements, 0.0 kB"]
    assert row(rows, telling.WAITING) == ["nothing"]
    assert row(rows, "Last refusals") == ["none"]


def test_a_site_at_work_shows_run_progress_what_left_and_its_budget(kit, folder):
    log_answers(folder)
    log_refusal(folder, "not you", caller="west")
    ask(folder)
    write_status(folder, last_error={"time": 17.0, "text": "y is not finite."})
    now = look(folder, PARENT)
    assert (now.state, now.iterations, now.job_alive, now.head.rounds) == ("computing", (4, 10), True, 3)
    rows = telling.rows(now, kit)
    assert row(rows, "Run")[0].startswith("cleaning: computing, outer iteration 4 of 10, lower_steps (")
    assert row(rows, "What left") == [
        "cleaning: 31 answers, 0.3 MB",
        "norms of the last arrays: y 2.51, x 0.334",
        "in all: 4 lines in the log, 3 of them phases and measurements, 1.5 MB",
    ]
    assert row(rows, "Budget") == ["28 of 10000 rounds"]
    assert f"{ONE[:12]}  cleaning, sent by lead@north.example" in row(rows, telling.WAITING)[0]
    assert row(rows, "Last refusals")[0].endswith("west was refused: not you")
    assert row(rows, "Last error")[0].endswith("y is not finite.")
    assert json.loads(json.dumps(now.asdict()))["head"]["rounds"] == 3


def test_a_job_whose_process_is_gone_is_interrupted(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_status(folder, pid=ended.pid)
    assert look(folder).state == "interrupted"
    assert look(folder, PARENT).state == "interrupted"
    write_status(folder, pid=ended.pid, state="finished")
    assert look(folder).state == "finished"


def test_a_job_between_two_messages_waits_for_the_server(kit, folder):
    write_status(folder, state="idle", iteration=None, phase="commit")
    now = look(folder)
    assert (now.state, now.is_at_work) == ("waiting for the server", True)
    assert row(telling.rows(now, kit), "Run")[0].startswith("cleaning: waiting for the server (")


def test_a_wait_for_the_operator_is_no_error(kit, folder):
    write_status(folder, state="waiting for approval", last_error={"time": 1.0, "text": "not approved yet."})
    assert "Last error" not in dict(telling.rows(look(folder), kit))


def test_a_site_that_is_not_running_says_how_to_start_it(folder):
    now = look(folder, {})
    assert (now.running, now.connected) == (False, False)
    assert "start it with start-site" in telling.connection(now)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_is_an_open_socket_of_the_parent_to_the_servers_port(tmp_path, family, host):
    with socket.socket(family) as server, socket.socket(family) as client:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        server.listen()
        port = server.getsockname()[1]
        folder = make_kit(tmp_path / "kit", f"localhost:{port}") / "site"
        assert look(folder, PARENT).connected is False
        assert "NOT connected" in telling.connection(look(folder, PARENT))
        client.connect((host, port))
        now = look(folder, PARENT)
        assert now.connected is True
        assert f"running as process {ME}, connected to the server at localhost:{port}" in telling.connection(now)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:  # has no socket
            assert look(folder, {other.pid: "parent"}).connected is False
            other.communicate(b"\n")


def test_an_unknown_connection_state_is_reported_as_unknown(tmp_path, folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    now = look(folder, {ended.pid: "parent"})
    assert (now.running, now.connected) == (True, None)
    assert "is unknown on this machine" in telling.connection(now)
    elsewhere = make_kit(tmp_path / "other", "nowhere") / "site"
    assert look(elsewhere, PARENT).connected is None


def test_a_damaged_file_is_named_and_counts_as_a_pause(kit, folder):
    for name in (operator.CONTROL, operator.APPROVALS, view.STATUS):
        (folder / name).write_text("{")
    now = look(folder)
    assert (now.paused, now.requests, now.status, len(now.problems)) == (True, [], {}, 3)
    assert len(row(telling.rows(now, kit), "Cannot be read")) == 3


@pytest.mark.parametrize("content", [[], ODD])
def test_a_status_with_values_of_wrong_types_is_reported(kit, folder, content):
    (folder / view.STATUS).write_text(json.dumps(content))
    rows = telling.rows(look(folder), kit)
    assert row(rows, "Budget") == ["0 rounds; the limit is max_rounds in site.toml"]
    assert "status.json cannot be read" in row(rows, "Cannot be read")[0]


@pytest.mark.parametrize("value", [10**400, -1, 1e999, "x", [1], {"a": 1}, True])
@pytest.mark.parametrize("name", [*view._KINDS])
def test_any_damaged_part_of_a_status_is_left_out_and_the_rest_is_shown(kit, folder, name, value):
    log_answers(folder)
    write_status(folder, **{name: value})
    now = look(folder)
    rows = telling.rows(now, kit)
    assert row(rows, "What left")[-1].startswith("in all: 3 lines")
    if now.problems:
        assert now.problems == [f"{folder / view.STATUS} cannot be read in part: {name} is not as this site writes it."]
        assert row(rows, "Cannot be read") == now.problems
    else:
        assert now.status[name] == value
    assert bool(now.problems) or value in (-1, 1e999, "x", {"a": 1})


@pytest.mark.parametrize("moment", ["x", 10**400, 1e300, [1]])
def test_an_invalid_time_is_shown_as_no_time(kit, folder, moment):
    assert telling.clock(moment) == "(no time)"
    log_refusal(folder, time=moment)
    assert row(telling.rows(look(folder), kit), "Last refusals")[0].startswith("(no time)")


@pytest.mark.parametrize("changes", [{"n": 10**400}, {"bytes": 10**400}, {"rounds": -1}, {"rounds": "x"}])
def test_totals_of_a_damaged_head_are_not_shown(kit, folder, changes):
    log_answers(folder)
    head = json.loads((folder / chain.HEAD).read_text())
    (folder / chain.HEAD).write_text(json.dumps({**head, **changes}))
    assert row(telling.rows(look(folder), kit), "What left") == [
        "in all: 0 lines in the log, 0 of them phases and measurements, 0.0 kB"
    ]


def test_a_kit_without_readable_settings_goes_by_its_folder(kit, folder):
    (kit / "startup" / "fed_client.json").write_text("{")
    assert (look(folder).name, look(folder).server) == ("kit", "")


def test_only_the_last_refusals_are_read_however_long_the_log(folder, monkeypatch):
    monkeypatch.setattr(view, "TAIL", 1000)
    for number in range(20):
        log_refusal(folder, f"no {number}")
    texts = [one["text"] for one in look(folder).refusals]
    assert 1 < len(texts) <= view.REFUSALS
    assert texts == [f"no {number}" for number in range(20)][-len(texts) :]


def test_text_of_other_parties_has_no_control_characters(kit, folder):
    hostile = "x\x1b[2J\n\u202ey"
    ask(folder, who=hostile, run=hostile, task={"name": hostile, hostile: hostile})
    log_refusal(folder, hostile, caller=hostile)
    write_status(folder, run=hostile, phase=hostile, norms={hostile: 1.0}, last_error={"time": 1.0, "text": hostile})
    now = look(folder)
    rows = [*telling.rows(now, kit), *telling.plan_rows(now.pending[0])]
    lines = [line for _, found in rows for line in found]
    follower = Follower(kit)
    follower.lines(look(kit))
    assert all(line.isprintable() for line in [*lines, *follower.lines(now)])


def test_a_plan_without_a_preview_is_shown_as_not_counted(folder):
    operator.ask(folder, ONE, "lead", "cleaning", {"num_iterations": 3, "deadline": 60.0}, {})
    rows = telling.plan_rows(operator.pending(folder)[0])
    assert row(rows, "Leaves")[0].startswith("not counted: ")
    assert row(rows, "Length") == ["3 outer iterations, measured about 20 times"]
    assert row(rows, "Otherwise") == ["deadline = 60.0"]


@pytest.mark.parametrize(
    "module", [audit, chain, operator, status, summary, telling, verification, view], ids=lambda module: module.__name__
)
def test_modules_that_read_a_sites_folder_import_neither_torch_nor_flare(module):
    tree = ast.parse(Path(module.__file__).read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
    ours = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    rooms = ("chain", "operator", "status", "summary", "view")
    free = {"sites", *(f"sites.{name}" for name in rooms), "errors", "escapes"}
    assert ours <= {f"fedbilevel.{name}" for name in free}


# ---- one line per change -------------------------------------------------------------------------


@pytest.fixture
def said(kit, folder):
    follower = Follower(kit)
    follower.lines(look(folder))
    return lambda: follower.lines(look(folder))


def test_nothing_is_reported_while_nothing_changes(said, folder):
    assert said() == []
    write_status(folder)
    assert len(said()) == 1
    write_status(folder, iteration=5, answers=40)
    assert said() == []


def test_a_waiting_plan_is_reported_once_with_the_command_that_approves_it(kit, folder, said):
    ask(folder)
    command = f"fedbilevel federation approve {ONE[:12]} --kit {kit}"
    assert said() == [f"cleaning, sent by lead@north.example, waits for your approval: {command}"]
    assert said() == []
    operator.approve(folder, ONE, "ada")
    assert said() == ["cleaning: approved by ada"]
    assert Follower(kit).lines(look(folder)) == []


def test_a_plan_that_waited_before_the_start_is_reported_at_the_start(kit, folder):
    ask(folder)
    [line] = Follower(kit).lines(look(folder))
    assert line.startswith("cleaning, sent by lead@north.example, waits for your approval")


def test_an_automatic_approval_is_reported(folder, said):
    ask(folder)
    operator.approve(folder, ONE, "site", how="auto")
    assert said() == ["cleaning: approved by auto_approve of this site's settings"]


def test_beginning_and_end_of_a_run_are_reported(folder, said):
    ask(folder)
    operator.approve(folder, ONE, "ada")
    said()
    write_status(folder, state="idle", iteration=None, rounds_run=0)
    assert said() == ["cleaning: begins, submitted by lead@north.example, 10 outer iterations"]
    write_status(folder, iteration=None, phase="finish", state="finished", answers=73, bytes=612_000)
    assert said() == ["cleaning: finished after 73 answers, 0.6 MB"]
    assert said() == []


def test_a_run_that_ends_between_two_views_is_reported(folder, said):
    write_status(folder, iteration=10, state="finished", answers=1, bytes=900)
    assert said() == ["cleaning: resumes with outer iteration 10 of 10", "cleaning: finished after 1 answer, 0.9 kB"]


def test_another_job_resumes_a_run(folder, said, monkeypatch):
    write_status(folder, job="job-1", iteration=1)
    assert said() == ["cleaning: begins, 10 outer iterations"]
    write_status(folder, job="job-1", iteration=4)
    said()
    monkeypatch.setattr(view, "_is_there", lambda pid: False)
    write_status(folder, job="job-1", iteration=None, phase="commit")
    [line] = said()
    monkeypatch.undo()
    why = "not finished (stopped, or a fault)"
    assert line == f"cleaning: ended at outer iteration 4 of 10, {why}, after 31 answers, 0.3 MB"
    write_status(folder, job="job-2", iteration=5)
    assert said() == ["cleaning: resumes with outer iteration 5 of 10"]
    write_status(folder, job="job-3", state="idle", iteration=None)
    assert said() == ["cleaning: resumes"]


def test_a_run_that_ended_before_the_start_is_not_reported(kit, folder):
    write_status(folder, state="finished")
    assert Follower(kit).lines(look(folder)) == []


def test_a_run_that_only_waits_has_not_begun(folder, said):
    write_status(folder, state="waiting for approval")
    assert said() == []


def test_leaving_a_run_is_reported(folder, said):
    ask(folder)
    write_status(folder)
    said()
    operator.leave(folder, "cleaning", "ada")
    write_status(folder, state="left")
    assert said() == ["cleaning: left by ada", "cleaning: left after 31 answers, 0.3 MB"]


def test_a_pause_and_its_end_are_reported(folder, said):
    operator.pause(folder)
    assert said() == ["paused: this site answers nothing until `federation unpause`"]
    operator.unpause(folder)
    assert said() == ["answers again after a pause"]


def test_refusals_are_reported_and_many_at_once_are_counted(folder, said):
    log_refusal(folder, "this site's policy does not allow it.", run="cleaning")
    assert said() == ["cleaning: refused: this site's policy does not allow it."]
    for _ in range(3):
        log_refusal(folder, "not you.", caller="west", times=4)
    assert said() == ["west was refused 4 times: not you. (and 2 more before it)"]


# ---- the command ---------------------------------------------------------------------------------


def test_watch_without_a_terminal_shows_it_once(kit, folder):
    write_status(folder)
    ask(folder, TWO, run="oth\x1ber")
    done = CliRunner().invoke(cli, ["federation", "watch", "--kit", str(kit)])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].startswith("north, 2")
    assert lines[1] == "Connection          the site is not running: start it with start-site"
    assert lines[2].startswith("Run                 cleaning: interrupted, outer iteration 4 of 10 (")
    assert any("oth\\x1ber, sent by lead@north.example" in line for line in lines)


def test_watch_needs_no_flare(kit, monkeypatch):
    monkeypatch.setitem(sys.modules, "fedbilevel.sites.flare", None)
    done = CliRunner().invoke(cli, ["federation", "watch", "--kit", str(kit), "--once"])
    assert "unknown: the processes of this machine were not checked" in done.output


def test_watch_on_a_terminal_is_drawn_until_ctrl_c(kit, folder, monkeypatch):
    from rich.console import Console

    from fedbilevel.cli import operator as operator_cli

    write_status(folder, run="[red]cleaning[/red]")
    drawn = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(operator_cli, "console", drawn)
    waits = iter([None])

    def wait(_):
        if next(waits, "ended") == "ended":
            raise KeyboardInterrupt

    monkeypatch.setattr(operator_cli.time, "sleep", wait)
    done = CliRunner().invoke(cli, ["federation", "watch", "--kit", str(kit)])
    assert done.exit_code == 0
    text = drawn.export_text()
    assert text.count("Ctrl-C ends this") == 2
    assert "[red]cleaning[/red]: interrupted, outer iteration 4 of 10" in text


@pytest.mark.parametrize("opens", [[], ["--open"]])
def test_watch_as_a_page_says_its_address_and_opens_it_when_asked(kit, monkeypatch, opens):
    from fedbilevel.report import operating

    shown, opened = [], []

    def serve(page, begun):
        with page:
            shown.append(page.look().name)
            begun(page.address)

    monkeypatch.setattr(operating, "serve", serve)

    def open_(place):
        path = Path(url2pathname(urlsplit(place).path))
        opened.append((place, path.read_text(), stat.S_IMODE(path.stat().st_mode)))

    monkeypatch.setattr("webbrowser.open", open_)
    done = CliRunner().invoke(cli, ["federation", "watch", "--kit", str(kit), "--page", *opens])
    assert (done.exit_code, shown) == (0, ["north"])
    address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", done.output)[0]
    if opens:
        [(place, content, mode)] = opened
        assert (place.startswith(f"file://{kit.resolve()}/open-"), mode) == (True, 0o600)
        assert f'content="0; url={address}"' in content
        token = address.rpartition("=")[2]
        assert token not in place  # all users of a machine can read a browser's command line
    assert len(opened) == len(opens)
    assert list(kit.glob("open-*")) == []


class Standin:
    """A supervised site without a process. Each wait is a moment in which something happens."""

    def __init__(self, kit, *, environment, say):
        self.kit, self.name = kit, "north"

    def start(self):
        folder = self.kit / "site"
        self.moments = iter([
            lambda: ask(folder),
            lambda: operator.approve(folder, ONE, "ada"),
            lambda: write_status(folder, iteration=1),
            lambda: write_status(folder, iteration=10, state="finished", answers=73, bytes=612_000),
        ])  # fmt: skip

    def wait(self, seconds):
        moment = next(self.moments, None)
        if moment is not None:
            moment()
        return moment is None

    def stop(self):
        pass


def test_start_site_says_what_happens_at_the_site(kit, monkeypatch):
    from fedbilevel.sites.flare import processes

    script = "exec python3 -u -m nvflare.private.fed.app.client.client_train -m $WORKSPACE --set uid=north\n"
    (kit / "startup" / "sub_start.sh").write_text(script)
    monkeypatch.setattr(processes, "Supervised", Standin)
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(cli, ["federation", "start-site", str(kit)])
    finally:
        signal.signal(signal.SIGTERM, before)
    command = f"fedbilevel federation approve {ONE[:12]} --kit {kit}"
    assert done.output.splitlines() == [
        f"north runs; its log is {kit / 'log.txt'}. Ctrl-C stops it.",
        f"cleaning, sent by lead@north.example, waits for your approval: {command}",
        "cleaning: approved by ada",
        "cleaning: begins, submitted by lead@north.example, 10 outer iterations",
        "cleaning: finished after 73 answers, 0.6 MB",
        "north stopped.",
    ]
