"""Text of other parties, in letters that a terminal and a reader of a log take for text only."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    r"""Replace what Unicode calls not printable by a visible escape: control characters, reversals
    of the writing direction, line separators, halves of pairs, and blanks and letters without a
    shape.

    lines: keep line ends and tabs, for texts of several lines that nobody else had a part in.

    >>> print(printable("done\x1b[2J\nError: none"))
    done\x1b[2J\nError: none
    """
    kept = "\n\t" if lines else ""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode()
        for letter in text
    )
