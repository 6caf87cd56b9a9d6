"""Reads pages: from a file, or drawn in a browser."""

import json
import statistics
from html.parser import HTMLParser

import pytest

from support.browser import browser

NEEDS_BROWSER = pytest.mark.skipif(browser.find() is None, reason="no Chromium is installed")
COSTS = ("rounds", "megabytes", "gradients", "products", "seconds")
AXES = ("iteration", "rounds", "megabytes", "calls", "seconds")


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def elements(page):
    parser = Elements()
    parser.feed(page)
    return parser


def traces(page, plot, **meta):
    """What a plot shows: the traces with these marks."""
    got = page.run(
        f"document.getElementById('{plot}').data.map(t => ({{x: Array.from(t.x), y: Array.from(t.y), "
        f"meta: t.meta, type: t.type, name: t.name}}))"
    )
    return [one for one in got if all(one["meta"].get(key) == value for key, value in meta.items())]


def cells(page, selector):
    """Rows of a table: the exact value of every cell that has one, else its text."""
    rows = f"[...document.querySelectorAll({json.dumps(selector + ' tbody tr')})].map(r => [...r.children])"
    return page.run(
        f"{rows}.map(r => r.map(c => c.dataset.value === undefined ? c.textContent : Number(c.dataset.value)))"
    )


def against(rows, axis):
    return [
        sum(row[name] for name in ("gy", "gx", "fx", "fy", "hvp", "jvp")) if axis == "calls" else row[axis]
        for row in rows
    ]


def spread(values):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
