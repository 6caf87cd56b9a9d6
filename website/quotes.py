"""Output of code on the pages: `python -m website.quotes` runs the code and rewrites the output.

A block of Python runs in its own namespace; the block of text right after it is its output. Blocks
of bash are commands. Pages that have their own tests, or whose code needs several processes, are
skipped.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
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


class Quoted(NamedTuple):
    page: str
    code: str
    text: str | None  # the quoted output, or None
    place: tuple[int, int]  # of that text in the page


def pages() -> dict[str, str]:
    found = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
    return {name: path.read_text() for name, path in found.items() if not name.startswith(ELSEWHERE)}


def quoted() -> Iterator[Quoted]:
    for name, text in pages().items():
        blocks = [*BLOCK.finditer(text)]
        for place, block in enumerate(blocks):
            if block[1] == "python" and not block[2]:
                after = blocks[place + 1] if place + 1 < len(blocks) else None
                said = after is not None and after[1] == "text" and text[block.end() : after.start()].isspace()
                yield Quoted(
                    name, block[3], after[3] if said and after else None, after.span(3) if said and after else (0, 0)
                )


def commands(text: str) -> list[str]:
    """Lines of bash blocks that call fedbilevel, without comments."""
    lines = [
        line.partition("  #")[0].strip()
        for block in BLOCK.finditer(text)
        if block[1] == "bash"
        for line in block[3].splitlines()
    ]
    return [line for line in lines if line.startswith("fedbilevel ")]


def printed(code: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "page", "exec"), {"__name__": "__page__"})  # our own pages, as they are in the repository
    return out.getvalue()


def main() -> None:
    for one in sorted(quoted(), key=lambda one: -one.place[0]):  # from the end, so that places stay right
        if one.text is not None and (not sys.argv[1:] or one.page in sys.argv[1:]):
            path = DOCS / one.page
            text = path.read_text()
            path.write_text(text[: one.place[0]] + printed(one.code) + text[one.place[1] :])
            print(one.page)


if __name__ == "__main__":
    main()
