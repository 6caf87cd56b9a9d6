"""Texts that come with every Python: topics of its manual, and source code of some modules.

Source: the standard library of the Python that runs, under the PSF licence. Nothing is downloaded,
and texts differ between versions of Python.
"""

from __future__ import annotations

import string
from importlib import import_module
from importlib.util import find_spec

from fedbilevel.errors import DataError

CHARACTERS = "".join(sorted(string.printable))  # the same in every version
MODULES = (  # code and tables
    "argparse",
    "ast",
    "calendar",
    "encodings.cp1252",
    "encodings.koi8_r",
    "html.entities",
    "inspect",
    "mimetypes",
    "stringprep",
    "subprocess",
    "tarfile",
    "typing",
)


def topics() -> dict[str, str]:
    """Return topic -> text, a line for every paragraph, without rules such as "----".

    A paragraph that several topics have stays in the first of them alone.
    """
    try:
        found: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            f"this Python has no topics of its manual ({error}): install the whole standard library."
        ) from error
    seen: set[str] = set()
    texts = {}
    for name, text in found.items():
        own = [one for one in dict.fromkeys(map(_flowing, text.split("\n\n"))) if one and one not in seen]
        seen.update(own)
        texts[name] = _printable("".join(f"{one}\n" for one in own))
    return {name: text for name, text in texts.items() if text}


def module(name: str) -> str:
    """Return the source code of a module, which is not executed."""
    try:
        read = getattr(getattr(find_spec(name), "loader", None), "get_source", None)
        text = read(name) if read else None
    except ImportError:
        text = None
    if not text:
        raise DataError(f"this Python has no source code of {name}: install the whole standard library.")
    return _printable(text)


def _flowing(paragraph: str) -> str:
    """Return the words of a paragraph, with one space between them."""
    lines = (line.strip() for line in paragraph.split("\n"))
    return " ".join(" ".join(line for line in lines if len(set(line)) > 1).split())


def _printable(text: str) -> str:
    known = set(CHARACTERS)
    return "".join(one if one in known else "?" for one in text)
