"""Docstrings as Markdown for the API pages: examples become code, parameter lines become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


def fenced(docstring: str) -> str:
    """Turn paragraphs that begin with >>> into blocks of code, because Markdown would read quotations."""
    return re.sub(r"(?m)^>>> (?:.+\n?)+", lambda found: "```pycon\n" + found[0].rstrip("\n") + "\n```\n", docstring)


def itemised(docstring: str) -> str:
    """Make a list of lines that begin with `name:` or `one, other:`. Another sentence ends the list."""
    item = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): ")
    lines = docstring.split("\n")
    if sum(bool(item.match(line)) for line in lines) < 2:
        return docstring
    out: list[str] = []
    inside = False
    for line in lines:
        if item.match(line):
            out += [] if inside else [""]
            names = ", ".join(f"`{name}`" for name in item.match(line)[1].split(", "))  # type: ignore[index]
            line, inside = f"- {names}: {line[item.match(line).end() :]}", True  # type: ignore[union-attr]
        elif inside and (not line.strip() or (line[0].isupper() and out[-1].endswith("."))):
            out, inside = [*out, ""], False
        out.append(line)
    return "\n".join(out)


class Readable(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(itemised(obj.docstring.value))
