"""HTML displays of problems, results, ledgers and algorithms for notebooks.

Every text is escaped, because names of problems, variables and columns may come from files. The
HTML has no script and loads nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedbilevel.columns import COLUMNS, TERMS, figures_of

_COSTS = ("rounds", "messages", *COLUMNS)
_SCOPES = {
    "global": "one y for all clients",
    "local": "a y of each client",
    "shared": "one x for all clients",
    "private": "an x of each client",
}


def problem(one: Any) -> str:
    """Show the variables of a Problem with owners and shapes, and the figures that it measures."""
    x = [("x", "", "made for the sizes of each client")] if callable(one.x0) else _variables("x", one.x0)
    owners = {"x": one.scopes.upper, "y": one.scopes.lower}
    rows = [
        (level, owners[level], _SCOPES[owners[level]], name, shape)
        for level, name, shape in (*x, *_variables("y", one.y0))
    ]
    roles = ", ".join(map(str, one.statistics)) or "none"
    measured = f"Statistics of: {roles}. Client weights: {one.client_weights}."
    heads = ("variable", "scope", "meaning", "tensor", "shape")
    variables = _table("min over x of f(x, y*(x)), y*(x) = argmin over y of g(x, y)", heads, rows)
    return _block(f"Problem {one.name}", variables, measured)


def result(one: Any) -> str:
    """Show the first and last value of every figure of a Result, and its costs."""
    first, last = (one.rows[0], one.final) if one.rows else ({}, {})
    rows = [(_term(name), _number(first.get(name)), _number(last.get(name))) for name in figures_of(last)]
    title = f"{one.name or 'run'}: {one.iteration} outer iterations, {one.ending}"
    seconds = f"Time: {_number(last['seconds'])} s. " if "seconds" in last else ""
    where = f"Record: {one.path}" if one.path is not None else "No record."
    second = "last measurement" if one.returned is None else "best state"
    figures = _table("Figures", ("figure", "first measurement", second), rows)
    gain = "" if one.baseline is None else f"{one.baseline.sentence[:1].upper()}{one.baseline.sentence[1:]}. "
    return _block(title, figures + _costs(one.ledger, one.ledger.phases), gain + seconds + where)


def ledger(totals: Mapping[str, int], phases: Mapping[str, Mapping[str, int]]) -> str:
    """Show costs summed over clients, in total and by phase."""
    sent = (totals.get("bytes_up", 0) + totals.get("bytes_down", 0)) / 1e6
    return _block(f"Ledger: {totals.get('rounds', 0)} rounds, {sent:.3g} MB", _costs(totals, phases))


def algorithm(one: Any, warnings: Mapping[str, str]) -> str:
    """Show the settings of an algorithm with their symbols, its scopes and its cost."""
    text = inspect.getdoc(inspect.getmodule(type(one))) or ""
    settings = [
        (spec.name, spec.metadata.get("symbol", ""), repr(getattr(one, spec.name)), spec.metadata.get("help", ""))
        for spec in dataclasses.fields(one)
    ]
    scopes = [
        (scope, meaning, f"refused: {one.refuses[scope]}" if scope in one.refuses else warnings.get(scope, "supported"))
        for scope, meaning in _SCOPES.items()
    ]
    cost = re.search(r"^Cost per outer iteration:.*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return _block(
        f"{one.name()}: {text.partition(chr(10))[0]}" if text else one.name(),
        _table("Settings", ("setting", "symbol", "value", "meaning"), settings)
        + _table("Scopes", ("scope", "meaning", "here"), scopes),
        " ".join(cost[0].split()) if cost else "",
    )


def ranking(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Show rows of a ranking, such as features or sources, and a remark."""
    return _block(title, _table("", heads, rows), note)


def _variables(level: str, tree: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(level, str(name), " x ".join(map(str, leaf.shape)) or "scalar") for name, leaf in tree.items()]


def _costs(totals: Mapping[str, int], phases: Mapping[str, Mapping[str, int]]) -> str:
    """Show one row per nonzero cost: in total, and in every phase."""
    names = [name for name in _COSTS if totals.get(name)]
    rows = [(_term(name), str(totals[name]), *(str(phase.get(name, 0)) for phase in phases.values())) for name in names]
    return _table("Costs, summed over clients", ("cost", "total", *phases), rows)


class _Html(str):
    """Text that is already HTML and needs no escapes."""


def _term(name: str) -> str:
    """Return the name of a column, with a tooltip if the column is known."""
    if name not in TERMS:
        return name
    return _Html(f'<span title="{escape(TERMS[name])}">{escape(name)}</span>')


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "-"


def _cell(kind: str, text: str) -> str:
    return f'<{kind} style="text-align:left">{text if isinstance(text, _Html) else escape(text)}</{kind}>'


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["".join(_cell("th", head) for head in heads), *("".join(_cell("td", one) for one in row) for row in rows)]
    head, *body = (f"<tr>{line}</tr>" for line in lines)
    top = f'<caption style="text-align:left">{escape(caption)}</caption><thead>{head}</thead>'
    return f"<table>{top}<tbody>{''.join(body)}</tbody></table>"


def _block(title: str, tables: str, note: str = "") -> str:
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<div><strong>{escape(title)}</strong>{tables}{below}</div>"
