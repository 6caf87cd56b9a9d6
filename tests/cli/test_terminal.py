"""Nothing that another party wrote is a command to a terminal, or a line of its own there."""

import io
import sys
import warnings
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_cli import call
from test_errors import lead, progress  # noqa: F401 - `lead` is a fixture

from fedbilevel.cli import terminal
from fedbilevel.cli.federation import line
from fedbilevel.escapes import printable
from fedbilevel.peers.collect import Removal
from fedbilevel.report import tables
from fedbilevel.sites import wire
from fedbilevel.sites.mailbox import Mailbox, SiteMessage
from fedbilevel.sites.site import Site
from fedbilevel.sites.transport import Failure, InProcess

EVIL = "\x1b]0;pwned\x07\x1b[31m"
SHOWN = r"\x1b]0;pwned\x07\x1b[31m"
OBEYED = [
    chr(code)
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        0x2028,
        0x2029,
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        0x200E,
        0xD800,
    )
]


@pytest.mark.parametrize("letter", OBEYED, ids=lambda letter: f"{ord(letter):04x}")
def test_a_letter_that_terminals_obey_becomes_a_visible_escape(letter):
    shown = printable(f"a{letter}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown[1:-1].encode().decode("unicode_escape") == letter


def test_text_in_any_writing_stays_as_it_is():
    for text in ("Straße, naïve café 7 %", "東京の病院", "مستشفى", r"C:\x1b is a folder", "[red]no markup[/] :smile:"):
        assert printable(text) == text
        assert printable(printable(text)) == text


def test_lines_of_our_own_stay_lines_and_others_become_escapes():
    assert printable("one\n\ttwo\r\x1b", lines=True) == "one\n\ttwo\\r\\x1b"
    assert printable("one\n\ttwo") == r"one\n\ttwo"


@pytest.mark.parametrize("tty", [False, True])
def test_what_is_said_holds_no_foreign_command(monkeypatch, tty):
    screen, other = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=screen, force_terminal=tty, width=300))
    monkeypatch.setattr(terminal, "complaints", Console(file=other, force_terminal=tty, width=300))
    terminal.say(f"one\ntwo {EVIL} :smile: [red]x[/]")
    terminal.say_line(f"three\nfour {EVIL}")
    terminal.complain(f"five\nsix {EVIL}")
    assert screen.getvalue() == f"one\ntwo {SHOWN} :smile: [red]x[/]\nthree\\nfour {SHOWN}\n"
    assert other.getvalue() == f"five\\nsix {SHOWN}\n"


@pytest.mark.parametrize("tty", [False, True])
def test_the_name_and_the_figures_of_a_bar_hold_no_foreign_command(monkeypatch, tty):
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=screen, force_terminal=tty, width=300))
    with terminal.Bar(f"[red]{EVIL}{{x}}", [f"loss{EVIL}"]) as show:
        show(
            SimpleNamespace(
                iteration=1,
                num_iterations=2,
                num_rounds=None,
                rounds=3,
                megabytes=0.1,
                row={f"loss{EVIL}": 0.5},
                share=0.5,
            )
        )
    assert "pwned\x07" not in screen.getvalue()
    for part in (f"[red]{SHOWN}{{x}}", f"loss{SHOWN} 0.5"):
        assert part in screen.getvalue()


def test_the_name_of_a_peer_in_a_table_is_text():
    screen = io.StringIO()
    Console(file=screen, width=200).print(tables.removals("Most harmful", [Removal(0, f"[red]north{EVIL}", 7, -0.5)]))
    assert f"[red]north{SHOWN}" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_the_reason_of_a_site_reaches_logs_and_diaries_as_text():
    """Of a refusal in a message, and of one that the transport brings."""

    class Refused(InProcess):
        def exchange(self, messages, *, deadline):
            replies, _ = super().exchange({"north": messages["north"]}, deadline=deadline)
            return replies, {"south": Failure(False, f"no{EVIL}\nway.", 0.0)}

    mailbox = Mailbox(
        Refused({"north": lambda _: wire.pack({"error": f"not{EVIL}\ntoday"}), "south": lambda _: b""}), "r"
    )
    _, failures = mailbox.exchange({"north": SiteMessage({}), "south": SiteMessage({})}, deadline=1.0)
    assert failures["north"].reason == f"not{SHOWN} today."
    assert failures["south"].reason == f"no{SHOWN}\\nway."


def test_a_traceback_in_the_log_of_a_site_is_text(tmp_path, monkeypatch):
    site = Site("north", tmp_path)

    def fail(header, _arrays):
        raise RuntimeError(f"no {header['kind']}")

    monkeypatch.setattr(site, "_answer", fail)
    site.handle(wire.pack({"kind": EVIL}))
    log = (tmp_path / "log.txt").read_text()
    assert log.rstrip().endswith(f"\nRuntimeError: no {SHOWN}")
    assert "\x1b" not in log


def test_a_line_of_progress_is_one_line():
    shown = line(
        {
            "iteration": 3,
            "figures": {f"loss{EVIL}": 0.5},
            "sites": {"north\n": 0.1},
            "missing": {"south": f"no{EVIL}\nFinished."},
        }
    )
    assert shown == rf"outer iteration 3, loss{SHOWN} 0.5, north\n 0.10 s, without south (no{SHOWN}\nFinished.)"


def test_followers_and_errors_of_the_command_line_show_refusals_as_text(
    lead,  # noqa: F811 - a fixture
    tmp_path,
    monkeypatch,
):
    """The server forwards a site's refusal unchanged to a lead that follows the run."""
    refusal = f"south does not join: {EVIL}\nFinished."
    shown = f"south does not join: {SHOWN}\\nFinished."
    latest = [{"iteration": 1, "missing": {"south": refusal}}]
    told = {"why": refusal, "waiting": refusal, "count": 1, "latest": latest}
    texts = [progress(outcome=outcome, **told) for outcome in ("running", "running", "failed")]
    lead.server.cat_target = lambda *_, **__: texts.pop(0) if len(texts) > 1 else texts[0]
    followed = call("federation", "resume", "r", "--kit", lead.kit, cwd=tmp_path)
    assert followed.returncode == 2
    assert followed.stderr == f"Error: {shown}\n"
    assert followed.stdout == f"outer iteration 1, without south ({shown})\n{shown}\n"
    monkeypatch.setattr(
        "fedbilevel.sites.flare.certificates.notices", lambda _kit: []
    )  # this lead's kit has no certificate
    asked = call("federation", "status", "--kit", lead.kit, cwd=tmp_path)
    assert asked.returncode == 0
    assert f"r: failed, outer iteration 1, without south ({shown})" in asked.stdout.splitlines()


def test_warnings_of_the_command_line_are_text(tmp_path, monkeypatch):
    monkeypatch.setattr(
        terminal,
        "new_folder",
        lambda name: warnings.warn(f"{name}{EVIL}\nError: none", stacklevel=1) or tmp_path / "run",
    )
    done = call("run", "quadratic", "-a", "fedbio", "--num-iterations", "1", cwd=tmp_path)
    assert done.returncode == 0
    assert rf"{SHOWN}\nError: none" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_traceback_of_the_command_line_is_text(monkeypatch, tmp_path, capsys):
    call("list", cwd=tmp_path)  # `main` sets the hook
    try:
        raise RuntimeError(f"a fault{EVIL}")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.endswith(f"RuntimeError: a fault{SHOWN}\n")
    assert "\x1b" not in said
