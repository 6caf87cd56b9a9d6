"""Small drawings as SVG text.

The theme of the page sets the colours, so one file serves light and dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

_NAMES = ("ink", "faint", "soft", "blue", "orange", "green", "red", "grey")
LIGHT = dict(
    zip(_NAMES, ("#1f2328", "#c9ced6", "#f2f4f8", "#2458c6", "#b8560c", "#1a7f4b", "#c2303c", "#6a737d"), strict=True)
)
DARK = dict(
    zip(_NAMES, ("#e6e9ef", "#4a5160", "#2a2e38", "#82aaff", "#ffb36b", "#6fd39b", "#ff8a91", "#9aa4b2"), strict=True)
)
Point = tuple[float, float]


def variables(colours: dict[str, str]) -> str:
    return ";".join(f"--fb-{name}:{value}" for name, value in colours.items())


def _style() -> str:
    """Colours for a picture that is its own document. Inside a page, the page sets them."""
    paints = "".join(
        f".fb .{name}{{stroke:var(--fb-{name})}}.fb .{name}-fill,.fb text.{name}{{fill:var(--fb-{name})}}"
        for name in LIGHT
    )
    letters = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;stroke:none"
    plain = f".fb text[class]{{{letters}}}.fb text.mono[class]{{font-family:ui-monospace,Menlo,Consolas,monospace}}"
    alone = f"svg:root{{{variables(LIGHT)}}}@media(prefers-color-scheme:dark){{svg:root{{{variables(DARK)}}}}}"
    return f"<style>{alone}{paints}{plain}</style>"


def number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if value else "0"


def _indexed(line: str, size: float) -> str:
    low = f'<tspan dy="{number(0.25 * size)}" font-size="{number(0.72 * size)}">'
    back = f'</tspan><tspan dy="{number(-0.25 * size)}">\u200b</tspan>'
    return re.sub(r"_\{(.+?)\}", lambda found: low + found[1] + back, escape(line))


class Picture:
    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def line(
        self,
        points: Sequence[Point],
        colour: str = "ink",
        *,
        width: float = 1.5,
        dashed: bool = False,
        opacity: float = 1,
    ) -> None:
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        more = (' stroke-dasharray="5 4"' if dashed else "") + (f' opacity="{opacity}"' if opacity < 1 else "")
        self.parts.append(
            f'<polyline class="{colour}" points="{path}" fill="none" stroke-width="{number(width)}" '
            f'stroke-linejoin="round"{more}/>'
        )

    def arrow(
        self,
        start: Point,
        end: Point,
        colour: str = "ink",
        *,
        width: float = 1.6,
        dashed: bool = False,
        head: float = 8,
    ) -> None:
        (x0, y0), (x1, y1) = start, end
        angle = math.atan2(y1 - y0, x1 - x0)
        neck = (x1 - 0.8 * head * math.cos(angle), y1 - 0.8 * head * math.sin(angle))
        self.line([start, neck], colour, width=width, dashed=dashed)
        corners = [
            end,
            *((x1 - head * math.cos(angle + side), y1 - head * math.sin(angle + side)) for side in (0.42, -0.42)),
        ]
        self.parts.append(
            f'<polygon class="{colour}-fill" points="{" ".join(f"{number(x)},{number(y)}" for x, y in corners)}"/>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str = "ink",
        *,
        fill: str = "soft",
        dashed: bool = False,
        round: float = 7,
    ) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        paint = f"{colour} {fill}-fill" if fill else colour
        none = "" if fill else ' fill="none"'
        where = (
            f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" rx="{number(round)}"'
        )
        self.parts.append(f'<rect class="{paint}" {where} stroke-width="1.4"{dashes}{none}/>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.parts.append(
            f'<rect class="{colour}-fill" x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}" rx="1.5"/>'
        )

    def dot(self, x: float, y: float, radius: float = 4, colour: str = "ink", *, open: bool = False) -> None:
        paint = f"{colour} soft-fill" if open else f"{colour}-fill"
        self.parts.append(
            f'<circle class="{paint}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" stroke-width="1.6"/>'
        )

    def ellipse(self, centre: Point, radii: Point, degrees: float, colour: str = "faint") -> None:
        (x, y), (a, b) = centre, radii
        turn = f'transform="rotate({number(degrees)} {number(x)} {number(y)})"'
        self.parts.append(
            f'<ellipse class="{colour}" cx="{number(x)}" cy="{number(y)}" rx="{number(a)}" ry="{number(b)}" '
            f'fill="none" stroke-width="1.1" {turn}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "ink",
        *,
        size: float = 14,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        turn: float = 0,
    ) -> None:
        """Several lines with \\n between. The first line stands at y. f_{i} has an index."""
        more = (' font-weight="600"' if bold else "") + (
            f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
        )
        for place, line in enumerate(words.split("\n")):
            self.parts.append(
                f'<text class="{colour}{" mono" if mono else ""}" x="{number(x)}" '
                f'y="{number(y + 1.35 * size * place)}" font-size="{number(size)}" '
                f'text-anchor="{anchor}"{more}>{_indexed(line, size)}</text>'
            )

    def svg(self) -> str:
        width, height = number(self.width), number(self.height)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fb" role="img" {size}><title>{escape(self.title)}</title>'
        )
        return head + _style() + "".join(self.parts) + "</svg>"
