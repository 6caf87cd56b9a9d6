"""The report page as one file, whose Content-Security-Policy forbids every request of the browser.

Scripts are allowed by their hashes only, so no text of a record can become a script. Content is
embedded as data, never as markup.
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

# parts of the script, in the order in which they are joined: page_NAME.js
SCRIPTS = (
    *("words", "terms", "runs", "drawing", "export", "tasks", "figures", "clients", "ledger", "findings", "studies"),
    *("live", "start"),
)
_OPEN = re.compile(r"\{\{(\w+)\}\}")


def write_report(
    records: Sequence[page_data.Source] | page_data.Source,
    path: Path | str | None = None,
    *,
    target: page_data.Goal = None,
    title: str | None = None,
) -> Path:
    """Write one self-contained HTML page of these records and return its path.

    records: a `Result`, the folder of a run, comparison or study, a folder of such folders, or a
        list of these. For a `Result` with a record, the page shows the record.
    path: the file to write; by default report.html in the first record's folder.
    target: a metric and the value to reach, e.g. "test_accuracy=0.94".

    >>> import tempfile
    >>> import fedbilevel as fb
    >>> result = fb.solve(*fb.tasks.Quadratic().build(), "fedbio", num_rounds=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fb.write_report(result, f"{folder}/page.html").name
    'page.html'
    """
    sources = _listed(records)
    for source in sources:
        if not isinstance(source, Path | str) and not hasattr(source, "rows"):
            raise ReportError(
                f"a record is of type {type(source).__name__}, expected a Result, the folder of a record, or a list."
            )
    page = whole(page_data.read(sources, target=target, title=title))
    place = Path(path) if path is not None else _beside(sources[0])
    if place.is_dir():
        raise ReportError(f"{place} is a folder: name the file of the page, e.g. {place / 'report.html'}.")
    if place.suffix.lower() not in (".html", ".htm"):
        raise ReportError(
            f"the page would be written to {place}, expected a name that ends in .html, "
            "so that no file of a record is overwritten."
        )
    part = place.with_name(place.name + ".part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(page, encoding="utf-8", newline="\n")
        os.replace(part, place)
    except OSError as error:
        raise ReportError(
            f"{place} cannot be written ({error.strerror}): make room or name another file with --out."
        ) from error
    return place


def _listed(records: Any) -> list[page_data.Source]:
    """Return a list of sources: a text is one source, any other sequence holds several."""
    is_one = isinstance(records, Path | str) or not isinstance(records, Sequence)
    return [records] if is_one else list(records)


def _beside(source: page_data.Source) -> Path:
    """Return report.html in the folder of a record."""
    folder = Path(source) if isinstance(source, Path | str) else source.path
    if folder is None:
        raise ReportError("the first result has no record, so the page has no folder: give the path of the page.")
    return (folder if folder.is_dir() else folder.parent) / "report.html"


def whole(data: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the whole page.

    live: allow the page to request newer content from its own server, and from no other.
    """
    parts = {
        "title": html.escape(str(data["title"])),
        "policy": policy(live=live),
        "style": file_of("page.css"),
        "plotly": _plotly(),
        "script": script(),
        "data": as_data(data),
        "live": "yes" if live else "no",
    }
    return filled("page.html", parts)


def filled(name: str, parts: Mapping[str, str]) -> str:
    """Replace every {{part}} of a template by its text."""
    return _OPEN.sub(lambda found: parts[found[1]], file_of(name))


def as_data(data: Mapping[str, Any]) -> str:
    """Return JSON in which no HTML parser finds a tag or the end of a script."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(*, live: bool = False) -> str:
    """Return the Content-Security-Policy.

    Inline styles are allowed, because plotly sets them; they can load nothing.
    """
    asks = "'self'" if live else "'none'"
    return policy_of([_plotly(), script()], "'unsafe-inline'", f"img-src data: blob:; connect-src {asks}")


def policy_of(scripts: Sequence[str], styles: str, rest: str) -> str:
    """Return a policy that allows these scripts and styles by their hashes, and the given rest."""
    allowed = " ".join(map(hash_of, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {styles}; {rest}; base-uri 'none'; form-action 'none'"


def hash_of(text: str) -> str:
    """Return the hash by which a Content-Security-Policy names a script or a style."""
    return f"'sha256-{_digest(text)}'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def file_of(name: str) -> str:
    return (files("fedbilevel.report") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def script() -> str:
    """Join the parts of the script into one function, so that they share names but export none."""
    return '"use strict";\n(() => {\n' + "\n".join(file_of(f"page_{name}.js") for name in SCRIPTS) + "})();\n"


@cache
def _plotly() -> str:
    """Return plotly.js from the Python package, without network access."""
    from plotly.offline import get_plotlyjs  # slow import

    text: str = get_plotlyjs().replace("\r\n", "\n")
    return text
