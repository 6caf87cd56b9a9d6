"""Output of code on the pages and in the README: `python -m website.quotes` runs the code and rewrites the output.

A block of Python runs in its own namespace; the block of text right after it is its output. A block
of text right after a block of bash is the output of its commands; "..." stands for lines that are
left out. Pages that have their own tests, or whose code needs several processes, are skipped.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
ELSEWHERE = (
    "design.md",
    "distributed.md",
    "federation.md",
    "peers.md",
    "three-hospitals.md",
    "three-laptops.md",
    "tutorials/",
)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[\d.,]*\d")
GAP = "..."


class Quoted(NamedTuple):
    page: str
    language: str
    code: str
    text: str | None  # the quoted output, or None
    place: tuple[int, int]  # of that text in the page


def pages() -> dict[str, str]:
    found = [str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md"))]
    names = ["../README.md", *(name for name in found if not name.startswith(ELSEWHERE))]
    return {name: (DOCS / name).read_text() for name in names}


def quoted() -> Iterator[Quoted]:
    for name, text in pages().items():
        blocks = [*BLOCK.finditer(text)]
        for block, after in pairwise([*blocks, None]):
            assert block is not None
            said = after is not None and after[1] == "text" and text[block.end() : after.start()].isspace()
            output, place = (after[3], after.span(3)) if said and after else (None, (0, 0))
            if not block[2] and (block[1] == "python" or (block[1] == "bash" and output is not None)):
                yield Quoted(name, block[1], block[3], output, place)


def commands(text: str) -> list[str]:
    """Lines of bash blocks that call fedbilevel, without comments."""
    return [line for block in BLOCK.finditer(text) if block[1] == "bash" for line in _calls(block[3])]


def _calls(code: str) -> list[str]:
    lines = [line.partition("  #")[0].strip() for line in code.splitlines()]
    return [line for line in lines if line.startswith("fedbilevel ")]


def printed(one: Quoted) -> str:
    return _shown(one.code) if one.language == "bash" else _run(one.code)


def _shown(code: str) -> str:
    """Return what the commands of a block print in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        done = [
            subprocess.run(
                [sys.executable, "-m", "fedbilevel", *shlex.split(line)[1:]],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for line in _calls(code)
        ]
    return "".join(line.rstrip() + "\n" for one in done for line in one.stdout.splitlines())


def _run(code: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "page", "exec"), {"__name__": "__page__"})  # our own pages, as they are in the repository
    return out.getvalue()


def shortened(said: str, like: str) -> str:
    """Leave out the lines that the quoted text leaves out: those between lines of the same form."""
    form = lambda line: " ".join(NUMBER.sub("#", line).split())
    rest, kept = said.splitlines(), []
    for line in like.splitlines():
        if line != GAP:
            forms = [form(one) for one in rest]
            if form(line) not in forms:
                raise SystemExit(f"the output has no line like {line!r}: quote another one.")
            place = forms.index(form(line))
            kept.append(rest[place])
            rest = rest[place + 1 :]
        else:
            kept.append(GAP)
    return "".join(f"{line}\n" for line in kept)


def main() -> None:
    for one in sorted(quoted(), key=lambda one: -one.place[0]):  # from the end, so that places stay right
        if one.text is not None and (not sys.argv[1:] or one.page in sys.argv[1:]):
            path = DOCS / one.page
            text, said = path.read_text(), printed(one)
            said = shortened(said, one.text) if GAP in one.text.splitlines() else said
            path.write_text(text[: one.place[0]] + said + text[one.place[1] :])
            print(one.page)


if __name__ == "__main__":
    main()
