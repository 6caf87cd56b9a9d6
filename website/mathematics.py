r"""Equations on pages as MathML, which browsers draw without a script or a font from elsewhere.

Pages in docs/ write LaTeX between dollars; `pymdownx.arithmatex` marks it. Docstrings use the plain
notation of notation.py; `sentence` marks expressions in a sentence, and `lines` sets indented lines
as a table. `rendered` draws whatever is marked. A line without an expression stays text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence

from latex2mathml.converter import convert

from website.notation import latex, pieces


def mathml(formula: str, *, alternative: str, display: bool = False, block: bool = False) -> str:
    """MathML of LaTeX, with the written form for readers that cannot draw it."""
    drawn = convert(formula, display="block" if block else "inline")
    drawn = re.sub(r"<mo>([a-z]+|&#x02026;)</mo>", r"<mi>\1</mi>", drawn)  # no extra blanks around names and dots
    drawn = drawn.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')
    drawn = drawn.replace("<mo>&#x0002F;</mo>", '<mo lspace="0" rspace="0">&#x0002F;</mo>')
    style = ' displaystyle="true"' if display else ""
    return drawn.replace("<math ", f'<math alttext="{html.escape(alternative)}"{style} ', 1)


def marked(plain: str, *, display: bool = False) -> str:
    """An expression for a page of Markdown. `rendered` draws it when Markdown is done."""
    kind = "plain-display" if display else "plain"
    return f'<span class="{kind}">{escaped(plain)}</span>'


def escaped(text: str) -> str:
    """Text in which nothing is markup, neither for Markdown nor for HTML."""
    return re.sub(r"([\\*_\[\]<>|#&$^{}~])", lambda found: f"&#{ord(found[1])};", text)


def sentence(text: str, *, display: bool = False, shown: Callable[[str], bool] = bool) -> str:
    """A sentence as Markdown, in which nothing else is markup.

    Text between backticks and names such as `num_steps` are code. Expressions are marked where
    `shown` admits them.
    """
    out = []
    for part in re.split(r"(`[^`]+`)", text):
        if part.startswith("`"):
            out.append(_code(part[1:-1]))
        else:
            for said, kind in pieces(part):
                out.append(marked(said, display=display) if kind and shown(said) else _words(said))
    return "".join(out)


def _words(text: str) -> str:
    parts = re.split(r"(?<!\w)([a-z]+(?:_[a-z]+)+)(?!\w)", text)
    return "".join(_code(part) if place % 2 else escaped(part) for place, part in enumerate(parts))


def _code(text: str) -> str:
    return f"<code>{escaped(text)}</code>"


def lines(block: Sequence[str]) -> str:
    """Indented lines as a table whose columns begin where two lines or more have a column."""
    split = [[(part.start(), part[0]) for part in re.finditer(r"\S+(?: \S+)*", line)] for line in block]
    starts = [start for row in split for start, _ in row]
    columns = sorted({start for start in starts if starts.count(start) > 1} | {min(starts)})
    rows = "".join(_row(row, columns) for row in split)
    return f'<div class="equations"><table class="equations">{rows}</table></div>'


def _row(parts: Sequence[tuple[int, str]], columns: Sequence[int]) -> str:
    """The parts of a line, each with its start, as cells; a part that begins in no column follows the part before."""
    cells: list[tuple[int, str]] = []
    for start, part in parts:
        said = sentence(part, display=True)
        if start in columns or not cells:
            cells.append((max(place for place, column in enumerate(columns) if column <= start), said))
        else:
            cells[-1] = (cells[-1][0], f"{cells[-1][1]}&emsp;{said}")
    ends = [*(place for place, _ in cells[1:]), len(columns)]
    blank = f'<td colspan="{cells[0][0]}"></td>' if cells[0][0] else ""
    drawn = (f'<td colspan="{end - place}">{said}</td>' for (place, said), end in zip(cells, ends, strict=True))
    return f"<tr>{blank}{''.join(drawn)}</tr>"


def rendered(page: str) -> str:
    """A page of HTML with every marked expression drawn."""

    def plain(found: re.Match[str]) -> str:
        said = html.unescape(found[2])
        return mathml(latex(said, display=bool(found[1])), alternative=said, display=bool(found[1]))

    def dollars(found: re.Match[str]) -> str:
        said = html.unescape(found[3]).strip()
        return mathml(said, alternative=said, block=found[1] == "div")

    page = re.sub(r'<span class="plain(-display)?">(.*?)</span>', plain, page)
    return re.sub(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', dollars, page, flags=re.DOTALL)
