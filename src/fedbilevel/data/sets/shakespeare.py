"""Plays of Shakespeare by role, for predicting the next character.

A role is a natural client, because each role has its own style.

In the text, a speech is a line "ROLE:" at the start or after an empty line, followed by all lines
up to the next empty line. Roles have their printed names: a misprint ("LADY  CAPULET") is a
separate role, and "First Citizen" of two plays is one role.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbilevel.data.locations import find
from fedbilevel.errors import DataError

FILE = "shakespeare/tinyshakespeare.txt"


def shakespeare(data_dir: str | Path | None = None) -> dict[str, str]:
    """Read role -> text, in order of first appearance, from `shakespeare/tinyshakespeare.txt`."""
    (place,) = find(FILE, data_dir=data_dir)
    try:
        return roles(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read as text ({error}): get the file anew.") from error
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def roles(text: str) -> dict[str, str]:
    """Return the joined speeches of each role, with their line ends; skip roles without text."""
    speeches: dict[str, list[str]] = {}
    role, fresh = None, True
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            fresh = True
        elif fresh and line.endswith(":"):
            role, fresh = line[:-1], False
        elif role is None or fresh:
            raise DataError(
                f"line {number} is {line[:40]!r}, expected the name of a role with a colon after it: every speech "
                "needs one."
            )
        else:
            speeches.setdefault(role, []).append(f"{line}\n")
    return {role: "".join(lines) for role, lines in speeches.items()}


def vocabulary(texts: dict[str, str]) -> str:
    """Return the sorted characters of all texts; the position of a character is its number."""
    return "".join(sorted(set().union(*texts.values())))


def samples(text: str, characters: str, length: int, step: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return contexts (n, length) and the next character of each context (n,).

    Characters are int64 positions in `characters`. A new context starts every `step` characters,
    and may span two speeches of a role. A text of at most `length` characters has no context.
    """
    if length < 1 or step < 1:
        raise DataError(f"length is {length} and step is {step}, expected both to be at least 1.")
    unknown = sorted(set(text) - set(characters))
    if unknown:
        raise DataError(
            f"the text has the character {unknown[0]!r}, which is not in the vocabulary: make the vocabulary from "
            "all texts."
        )
    number = {character: i for i, character in enumerate(characters)}
    codes = np.array([number[character] for character in text], dtype=np.int64)
    if len(codes) <= length:
        return np.zeros((0, length), np.int64), np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, length + 1)[::step].copy()
    return windows[:, :-1], windows[:, -1]
