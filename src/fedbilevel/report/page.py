"""The page as one file. What it needs is inside it, and its Content-Security-Policy forbids the browser to ask for anything else.

Scripts are allowed by their hashes alone, so that nothing that a record says can become one; the content is data and never markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedbilevel.errors import ReportError
from fedbilevel.report import page_data

_OPEN = re.compile(r"\{\{(\w+)\}\}")


def write_report(
    paths: Sequence[Path | str] | Path | str,
    out: Path | str | None = None,
    *,
    target: page_data.Goal = None,
    title: str | None = None,
) -> Path:
    """One self-contained page of these records. out: where (default: report.html in the first folder). target: e.g. "test_accuracy=0.94"."""
    places = [paths] if isinstance(paths, Path | str) else list(paths)
    page = whole(page_data.read(places, target=target, title=title))
    first = Path(places[0])
    place = Path(out) if out is not None else (first if first.is_dir() else first.parent) / "report.html"
    if place.is_dir():
        raise ReportError(
            f"{place} is a folder: name the file that the page is to be written to, e.g. {place / 'report.html'}."
        )
    if place.suffix.lower() not in (".html", ".htm"):
        raise ReportError(
            f"the page is to be written to {place}, expected a name that ends in .html, so that nothing of a record is written over."
        )
    beside = place.with_name(place.name + ".part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page, encoding="utf-8", newline="\n")
        os.replace(beside, place)
    except OSError as error:
        raise ReportError(
            f"{place} cannot be written ({error.strerror}): make room or name another file with --out."
        ) from error
    return place


def whole(data: Mapping[str, Any], *, live: bool = False) -> str:
    """live: it may ask the server that it came from for newer content, and nobody else."""
    script, plotly = file_of("page.js"), _plotly()
    parts = {
        "title": html.escape(str(data["title"])),
        "policy": policy(live=live),
        "style": file_of("page.css"),
        "plotly": plotly,
        "script": script,
        "data": as_data(data),
        "live": "yes" if live else "no",
    }
    return filled("page.html", parts)


def filled(name: str, parts: Mapping[str, str]) -> str:
    """A template with its places {{part}} filled in."""
    return _OPEN.sub(lambda found: parts[found[1]], file_of(name))


def as_data(data: Mapping[str, Any]) -> str:
    """JSON that no HTML parser can take for the end of a script, nor for the beginning of anything."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(*, live: bool = False) -> str:
    """What a browser may do with the page. Styles are free because plotly sets them on what it draws; a style can ask for nothing here either."""
    asks = "'self'" if live else "'none'"
    return policy_of([_plotly(), file_of("page.js")], "'unsafe-inline'", f"img-src data: blob:; connect-src {asks}")


def policy_of(scripts: Sequence[str], styles: str, rest: str) -> str:
    """A policy that allows these scripts, by their hashes, and nothing that is not named."""
    allowed = " ".join(map(hash_of, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {styles}; {rest}; base-uri 'none'; form-action 'none'"


def hash_of(text: str) -> str:
    """As a Content-Security-Policy names a script or a style."""
    return f"'sha256-{_digest(text)}'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def file_of(name: str) -> str:
    return (files("fedbilevel.report") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _plotly() -> str:
    """plotly.js as the Python package brings it: no network."""
    from plotly.offline import get_plotlyjs  # long to import

    text: str = get_plotlyjs().replace("\r\n", "\n")
    return text
