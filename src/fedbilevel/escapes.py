"""Text of other parties, with visible escapes in place of control characters."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    r"""Replace every character that Unicode calls not printable by a visible escape.

    These are control characters, marks of the writing direction, line separators, lone surrogates,
    and blanks and characters without a shape.

    lines: keep line ends and tabs, for texts of several lines that no other party wrote.

    >>> print(printable("done\x1b[2J\nError: none"))
    done\x1b[2J\nError: none
    """
    kept = "\n\t" if lines else ""
    return "".join(
        character if character.isprintable() or character in kept else character.encode("unicode_escape").decode()
        for character in text
    )
