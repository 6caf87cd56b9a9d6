"""A pytest plugin: a test provokes every error that a user can cause, and its message is one sentence.

The plugin finds the places that construct such errors in the source of the package. Every process
of the tests notes the places that it reaches. After the whole suite, a place that no test reached
fails the run. A message with a fault fails every run in which it was made.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

from fedbilevel import errors

# (file of the package, part of the source of the error) -> why no test can provoke it
UNPROVOKED: dict[tuple[str, str], str] = {}
REMEDY = (
    "Provoke each of these as a user would, by a line in a table of tests/cli/test_errors.py or a test of the module. "
    "If no test can, name it with the reason in UNPROVOKED of tests/support/provoked.py; "
    "remove an error that no user can provoke."
)
LONGEST = 400
FOLDER = "FEDBILEVEL_PROVOKED"  # environment variable: the folder of the notes of all processes of a run
NOTED = "FEDBILEVEL_NOTED"  # a folder that keeps the notes for a later part of the suite
ALL_NOTED = "FEDBILEVEL_ALL_NOTED"  # set in the last part: every error must be noted
PACKAGE, TESTS = Path(errors.__file__).parent, Path(__file__).parents[1]
KINDS = {
    *(
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.FedBilevelError)
    ),
    *(
        name
        for name, kind in vars(click.exceptions).items()
        if isinstance(kind, type) and issubclass(kind, click.ClickException)
    ),
    "error",  # calls whose kind is an argument
}
CONSTRUCTORS = {errors.__file__, click.exceptions.__file__}  # frames of constructors are skipped


class Place(NamedTuple):
    file: str
    lines: range
    source: str


def places() -> list[Place]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and _name(node.func) in KINDS:
                where = range(node.lineno, node.end_lineno + 1)
                found.append(
                    Place(
                        path.relative_to(PACKAGE).as_posix(),
                        where,
                        " ".join(lines[number - 1].strip() for number in where),
                    )
                )
    return sorted(found, key=lambda place: (place.file, place.lines.start))


def _name(function: ast.expr) -> str:
    """The name of the called function; of attributes, only those of click."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "click":
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def faults(message: str, kind: str = "SettingError") -> list[str]:
    """Reasons why a message is not one helpful sentence."""
    plain = re.sub(r"\([^()]*\)|'[^']*'|(/[^\s/,:;]+){3,}|e\.g\. ", "", message)  # without quoted text and paths
    plain, hint, _ = re.sub(r"\. (Did you mean |Known: )", r"\n\1", plain).partition(
        "\n"
    )  # the hint for an unknown name
    helps = (
        hint or kind in ("WireError", "RankLostError") or re.search(r": \S|; \S|expected|must|need|give ", message)
    )  # no user types messages on the wire, and the loop adds advice
    rules = {
        "is empty": message.strip(),
        "has a line break": "\n" not in message,
        "begins or ends with a blank, or has several in a row": message == " ".join(message.split()),
        f"is longer than {LONGEST} characters": len(plain) <= LONGEST,
        "is more than one sentence": not re.search(r"[.?!] [A-Z]", plain),
        "does not begin with a word, a name or a number": re.match(r"[\w'\"/.\[{<$~-]", message),
        "does not end with one full stop": re.search(r"[^\s.:;,!?][.?]$", message),
        "has an empty bracket, or None for a reason": not re.search(r" \(\)[:;]|\(None\)", message),
        "shows where an object lies": not re.search(r"at 0x[0-9a-f]{6}", message),
        "does not say what was expected or what to do": helps,
    }
    return [rule for rule, kept in rules.items() if not kept]


def unreached(known: list[Place], reached: set[tuple[str, int]]) -> list[str]:
    """A line for each place that no test reached, and for each wrong line of UNPROVOKED."""
    said, excused = [], set()
    for file, part in UNPROVOKED:
        matching = [place for place in known if place.file == file and part in place.source]
        excused.update(matching)
        if len(matching) != 1:
            said.append(
                f"UNPROVOKED has {file} with {part!r}, which is in the source of {len(matching)} errors, "
                "expected one: fix or remove that line."
            )
    for place in known:
        there = any((place.file, line) in reached for line in place.lines)
        if there and place in excused:
            said.append(f"{place.file}:{place.lines.start}: a test provokes this, so it should not be in UNPROVOKED.")
        elif not there and place not in excused:
            said.append(f"{place.file}:{place.lines.start}: no test provokes {place.source}")
    return [*said, REMEDY] if said else []


# ---- noting --------------------------------------------------------------------------------------------------------

_noted: set[tuple[str, int, str]] = set()


def _note(error: Exception, message: str) -> None:
    frame = sys._getframe(2)
    while frame.f_code.co_filename in CONSTRUCTORS and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if (
        not path.is_relative_to(PACKAGE)
        or (one := (path.relative_to(PACKAGE).as_posix(), frame.f_lineno, message)) in _noted
    ):
        return
    _noted.add(one)
    with open(
        Path(os.environ[FOLDER]) / "notes", "ab", buffering=0
    ) as file:  # whole lines, even if other processes write
        file.write(json.dumps([*one, type(error).__name__]).encode() + b"\n")


def listen() -> None:
    """Note the errors of this process and of its forks.

    A process that a test starts calls this itself.
    """
    if FOLDER not in os.environ or "__init__" in vars(errors.FedBilevelError):
        return
    made_by_click = click.ClickException.__init__

    def ours(self: errors.FedBilevelError, *given: object) -> None:
        super(errors.FedBilevelError, self).__init__(*given)
        _note(self, " ".join(map(str, given)))

    def clicks(self: click.ClickException, message: str) -> None:
        made_by_click(self, message)
        _note(self, message)

    errors.FedBilevelError.__init__ = ours  # type: ignore[method-assign]
    click.ClickException.__init__ = clicks  # type: ignore[method-assign]


# ---- what pytest calls ---------------------------------------------------------------------------------------------


def pytest_configure(config) -> None:
    if FOLDER not in os.environ:  # else this is a process of xdist, or a run within a test
        kept = os.environ.get(NOTED)
        if kept is not None:
            Path(kept).mkdir(parents=True, exist_ok=True)
        config.provoked = str(Path(kept).resolve()) if kept is not None else tempfile.mkdtemp(prefix="provoked")
        os.environ[FOLDER] = config.provoked
    listen()


def pytest_sessionfinish(session) -> None:
    if not hasattr(session.config, "provoked"):
        return
    path = Path(session.config.provoked) / "notes"
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    complaints = [
        f"{file}:{line}: {kind} {', '.join(wrong)}: {text!r}"
        for file, line, text, kind in sorted(notes)
        if (wrong := faults(text, kind))
    ]
    if _whole(session):
        complaints += unreached(places(), {(file, line) for file, line, *_ in notes})
    session.config.complaints = complaints
    if complaints:
        session.exitstatus = session.exitstatus or 1


def _whole(session) -> bool:
    """Whether all tests were requested, and all of them ran."""
    config = session.config
    through = session.exitstatus in (0, 1) and not session.shouldstop and not session.shouldfail
    if os.environ.get(ALL_NOTED):
        return through
    part = any(
        getattr(config.option, name, None)
        for name in ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "collectonly")
    )
    return through and not part and [config.invocation_params.dir / arg for arg in config.args] == [TESTS]


def pytest_terminal_summary(terminalreporter, config) -> None:
    if getattr(config, "complaints", None):
        terminalreporter.section("errors that a user can cause")
        for line in config.complaints:
            terminalreporter.line(line, red=True)


def pytest_unconfigure(config) -> None:
    if hasattr(config, "provoked"):
        if NOTED not in os.environ:
            shutil.rmtree(config.provoked)
        del os.environ[FOLDER]
