"""Generate one page per algorithm, and the table of all algorithms.

The sources are docstrings, settings, declarations and recorded curves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.problem.problem import Scopes
from fedbilevel.settings import kinds, made
from website import curves, mathematics
from website.charts import Line, chart
from website.pictures import per_iteration

PARTS = {"Reference": "Reference", "Deviations": "Deviations from the paper", "Bias": "Bias", "Cost": "Cost"}
SCOPES = {
    Scopes("global", "shared"): "y global, x shared",
    Scopes("global", "private"): "y global, x private",
    Scopes("local", "shared"): "y local, x shared",
    Scopes("local", "private"): "y local, x private",
}


class Text(NamedTuple):
    """A docstring, taken apart into paragraphs. Indented lines of a paragraph are equations."""

    title: str
    summary: str
    purpose: list[str]  # when to choose the algorithm, from "Use it"
    body: list[str]
    parts: dict[str, list[str]]


def read(docstring: str) -> Text:
    first, *paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    head = " ".join(first.split()).partition(":")[0]
    title = head.partition(" on the lower level")[0]
    purpose: list[str] = []
    body: list[str] = []
    parts: dict[str, list[str]] = {}
    current = body
    for paragraph in paragraphs:
        paragraph = "\n".join(line.rstrip() for line in paragraph.strip("\n").split("\n"))
        found = re.match(r"(Reference|Deviations|Bias|Cost)\b(?: per outer iteration)?:\s*", paragraph)
        if found:
            current = parts.setdefault(found[1], [])
            paragraph = _capital(paragraph[found.end() :])
        (purpose if paragraph.startswith("Use it ") else current).append(paragraph)
    title = title if title.startswith("p") else title[0].upper() + title[1:]
    return Text(title, " ".join(first.split()), purpose, body, parts)


@functools.cache
def text_of(name: str) -> Text:
    return read(inspect.getdoc(sys.modules[curves.algorithms()[name].__module__]) or "")


def prose(paragraph: str, *, equations_only: bool = False) -> str:
    """Plain words as Markdown, with expressions marked as mathematics.

    Text in backticks stays code. There is no other markup.

    `equations_only`: expressions without an equals sign stay words, as the initials of authors.
    """
    return mathematics.sentence(" ".join(paragraph.split()), shown=lambda said: "=" in said or not equations_only)


def rendered(paragraphs: Sequence[str], *, equations_only: bool = False) -> str:
    """Indented lines as equations, the rest as paragraphs, or as a list with (1), (2), ..."""
    out = []
    for paragraph in paragraphs:
        for indented, group in itertools.groupby(paragraph.split("\n"), lambda line: line.startswith("    ")):
            piece = [*group]
            out.append(
                mathematics.lines(piece) if indented else listed("\n".join(piece), equations_only=equations_only)
            )
    return "\n\n".join(out)


def listed(paragraph: str, *, equations_only: bool = False) -> str:
    """Make a numbered list of (1) ... (2) ..., if the numbers run from one without a gap."""
    words, pieces, number = " ".join(paragraph.split()), [], 1
    if not re.search(r"(?:^|\s)\(1\)\s", words):
        return prose(words, equations_only=equations_only)
    while found := re.search(rf"(?:^|\s)\({number}\)\s", words):
        pieces.append(words[: found.start()].strip())
        words, number = words[found.end() :], number + 1
    pieces.append(words.strip())
    opening, items = pieces[0], pieces[1:]
    return "\n".join(
        ([prose(opening), ""] if opening else [])
        + [f"{place}. {_sentence(prose(item))}" for place, item in enumerate(items, 1)]
    )


def _sentence(words: str) -> str:
    words = words.rstrip(";,")
    return _capital(words) + ("" if words.endswith((".", ":")) else ".")


SYMBOLS = {
    "alpha",
    "beta",
    "gamma",
    "eta",
    "theta",
    "kappa",
    "lambda",
    "lam",
    "mu",
    "nu",
    "om",
    "xi",
    "pi",
    "rho",
    "tau",
    "delta",
}


def _capital(words: str) -> str:
    """Capitalise the first word, unless it is a symbol such as k, mu or f_x,i."""
    first = re.match(r"(?:[a-z]{2,}|a)(?=[ ,.:;]|$)", words)
    return words[0].upper() + words[1:] if first and first[0] not in SYMBOLS else words


def linked(markdown: str, own: str) -> str:
    """Link names of other algorithms to their pages.

    Names in code, headings, equations, pictures and titles of papers are not linked.
    """
    titles = {text_of(name).title: name for name in curves.algorithms() if name != own}
    names = "|".join(sorted(map(re.escape, titles), key=len, reverse=True))
    skipped = r"```.*?```|`[^`\n]+`|\[[^\]]*\]\([^)]*\)|^#[^\n]*$|<div.*?</div>|<code>.*?</code>|\"[^\"\n]*\""
    pieces = re.split(f"({skipped})", markdown, flags=re.DOTALL | re.MULTILINE)
    pattern = re.compile(rf"(?<![\w-])({names})(?![\w+]|-\w)")
    return "".join(
        piece if place % 2 else pattern.sub(lambda found: f"[{found[1]}]({titles[found[1]]}.md)", piece)
        for place, piece in enumerate(pieces)
    )


# ---- settings, scopes, kind ----------------------------------------------------------------------


def settings_table(kind: type[Any]) -> str:
    hints = typing.get_type_hints(kind)
    rows = ["| setting | symbol | default | range | meaning |", "|---|---|---|---|---|"]
    for spec in dataclasses.fields(kind):
        symbol = prose(spec.metadata.get("symbol") or "")
        rows.append(
            f"| `{spec.name}` | {symbol} | `{_plain(spec.default)}` | {_range(spec, hints[spec.name])} "
            f"| {prose(spec.metadata.get('help', ''))} |"
        )
    return "\n".join(rows)


OF_A_PROBLEM = r"[dfg]_[xy]|[HJ] [uv]|[xyuv]|a"  # lengths, gradients, products, variables; and the article


def letters(kind: type[Any], text: Text) -> dict[str, str]:
    """Explanations of the symbols in the costs of an algorithm.

    They come from a setting that counts something or from the equations; "" if there is none.
    """
    above = " ".join(" ".join(text.body).split())
    found: dict[str, str] = {}
    hints = typing.get_type_hints(kind)
    counts = {
        spec.metadata["symbol"]: hints[spec.name]
        for spec in dataclasses.fields(kind)
        if {int, tuple[int, ...]} & {*kinds(hints[spec.name])}
    }
    for letter in _letters(" ".join(text.parts["Cost"])):
        whole = letter.removesuffix("_i")
        if letter in counts:
            found[letter] = "in the table of settings"
        elif tuple[int, ...] in kinds(counts.get(whole)):
            found[letter] = f"the value of client i for {whole} in the table of settings"
        elif re.search(rf"(?<![\w']){re.escape(letter)} uniform in ", above):
            found[letter] = "drawn as stated above"
        elif issubclass(kind, PeerAlgorithm) and letter in (averaging := _averaging()):
            found[letter] = averaging[letter]
        else:
            found[letter] = ""
    return found


def _key(explained: dict[str, str]) -> str:
    """A sentence that explains the symbols, grouped by explanation."""
    alike: dict[str, list[str]] = {"the lengths of x and y": ["d_x", "d_y"]}
    for letter, words in explained.items():
        alike.setdefault(words, []).append(letter)
    clauses = [
        f"{' and '.join(filter(None, (', '.join(some[:-1]), some[-1])))} {'are' if some[1:] else 'is'} {words}"
        for words, some in alike.items()
    ]
    return prose(f"Symbols: {'; '.join(clauses)}.")


def _letters(cost: str) -> list[str]:
    """Symbols in the costs: single characters, with a prime or an index, and Greek names."""
    words = re.sub(r"`[^`]*`|\"[^\"]*\"", " ", cost)
    words = re.sub(rf"(?<![\w'])(?:{OF_A_PROBLEM})(?![\w'])", " ", words)
    return list(
        dict.fromkeys(re.findall(rf"(?<![A-Za-z_'])(?:[A-Za-z]|{'|'.join(SYMBOLS)})(?:_\w+)?'?(?![A-Za-z_])", words))
    )


def _averaging() -> dict[str, str]:
    """Symbols of the averaging between peers, which is not a setting of an algorithm."""
    specs = dataclasses.fields(Averaging)
    return {
        spec.metadata["symbol"]: f"`{spec.name}` of the averaging: {spec.metadata['help']}"
        for spec in specs
        if spec.metadata["symbol"]
    }


def _plain(value: Any) -> str:
    return "None" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _range(spec: dataclasses.Field[Any], hint: Any) -> str:
    words = []
    for one in kinds(hint):
        if typing.get_origin(one) is Literal:
            words += [f"`{choice}`" for choice in typing.get_args(one)]
        elif typing.get_origin(one) is tuple:
            words.append("one per client")
        elif one is type(None):
            words.append("None")
        elif one is bool:
            words.append("true, false")
        else:
            words.append({float: "number", int: "whole number", str: "word"}[one])
    bounds = [
        f"{sign} {spec.metadata[key]:g}"
        for key, sign in (("above", ">"), ("least", "≥"), ("most", "≤"))
        if spec.metadata.get(key) is not None
    ]
    return ", ".join(words) + (", " + " and ".join(bounds) if bounds else "")


def scopes_table(name: str) -> str:
    rows = ["| scope | effect |", "|---|---|"]
    for scopes, said in curves.scopes_of(curves.algorithms()[name]).items():
        word = "runs" if not said else "**refused**" if said.startswith("refused") else "**warns**"
        reason = said.removeprefix("refused: ").partition(": ")[2] if said else ""
        rows.append(f"| {SCOPES[scopes]} | {word}{f': {prose(reason)}' if reason else ''} |")
    return "\n".join(rows)


class About(NamedTuple):
    """Facts about an algorithm that are declared, or counted in its recorded runs."""

    peers: bool
    uses_upper: bool
    second_order: bool
    everyone: bool
    state: str
    costs: tuple[str, ...]  # of one outer iteration: rounds; floats up, gradients and products of one client
    left: str  # of the distance to the solution, in every recorded run


@functools.cache
def about(name: str) -> About:
    kind = curves.algorithms()[name]
    runs = curves.found(name)
    each, last = per_iteration(name), runs[0][1][-1]
    uses_upper, on_standard = last["fx"] + last["fy"] > 0, runs[0][0].task == "quadratic"
    rows = {
        "d_x": [field for field in kind.State._fields if field in kind.upper_space],
        "d_y": [field for field in kind.State._fields if field in kind.lower_space],
    }
    optional = kind.State._field_defaults  # sequences that only some settings have
    rows = {length: [field for field in fields if field not in optional] for length, fields in rows.items()}
    state = " + ".join(
        f"{len(fields)} {length}" if len(fields) > 1 else length for length, fields in rows.items() if fields
    )
    keeps = ", more at clients" if "clients.memory" in inspect.getsource(sys.modules[kind.__module__]) else ""
    figures = (
        each["rounds"],
        each["floats_up"],
        sum(each[column] for column in ("gy", "gx", "fx", "fy")),
        each["hvp"] + each["jvp"],
    )
    costs = tuple(
        _figure(value) if on_standard or place != 1 else "" for place, value in enumerate(figures)
    )  # floats of another task are not comparable
    left = [
        f"{rows[-1]['distance']:.2g}&nbsp;after&nbsp;{rows[-1]['rounds']:,}{_own(case)}"
        for case, rows in runs
        if uses_upper and case.task == "quadratic"
    ]
    return About(
        issubclass(kind, PeerAlgorithm),
        uses_upper,
        last["hvp"] + last["jvp"] > 0,
        kind.needs_everyone,
        state + keeps,
        costs,
        "<br>".join(left),
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _own(case: curves.Case) -> str:
    """Settings in which a run differs from the first run of its algorithm."""
    first = curves.found(case.algorithm)[0][0]
    changed = [
        f"{key} {value}"
        for key, value in case.settings.items()
        if curves.ALSO.get(case.algorithm, {}).get(key) == value
    ]
    lower = (
        [f"{case.task_settings['lower']} y"]
        if case.task_settings.get("lower") != first.task_settings.get("lower")
        else []
    )
    return f" ({', '.join([*lower, *changed])})" if lower or changed else ""


# ---- curves --------------------------------------------------------------------------------------


def curve_section(name: str) -> str:
    found = curves.found(name)
    out = []
    for task, heading in (
        ("quadratic", "The standard task"),
        ("personalisation", "Personal mixtures"),
        ("hyper_representation", "Own heads"),
        ("data_cleaning", "Label cleaning"),
    ):
        mine = [(case, rows) for case, rows in found if case.task == task]
        if mine:
            out.append(f"### {heading}\n\n{_curve(name, task, mine)}")
    return "\n\n".join(out)


def _curve(name: str, task: str, mine: Sequence[tuple[curves.Case, list[dict[str, Any]]]]) -> str:
    knows = about(name)
    figure, words, log = _shown(task, knows)
    lines, table = (
        [],
        ["| run | rounds | megabytes | gradients | products | " + words + " at the end |", "|---|--:|--:|--:|--:|--:|"],
    )
    for case, rows in mine:
        label = _label(case)
        lines.append(Line(label, [(row["rounds"], row[figure]) for row in rows], dashed=False))
        last = rows[-1]
        costs = [
            last["rounds"],
            last["megabytes"],
            sum(last[column] for column in ("gy", "gx", "fx", "fy")),
            last["hvp"] + last["jvp"],
            last[figure],
        ]
        table.append(
            f"| {label} | "
            + " | ".join(f"{cost:,.0f}" if isinstance(cost, int) else f"{cost:.3g}" for cost in costs)
            + " |"
        )
    others, behind = [], ""
    if task == "data_cleaning" and name != "fedavg":
        floor = next(rows for case, rows in curves.found("fedavg") if case.task == task)
        lines.append(Line("fedavg, without weights", [(row["rounds"], row[figure]) for row in floor], dashed=True))
    elif task == "quadratic" and knows.uses_upper and not knows.peers:
        for other in curves.algorithms():
            theirs = about(other)
            if other != name and theirs.uses_upper and not theirs.peers:
                others += [
                    [(row["rounds"], row[figure]) for row in rows]
                    for case, rows in curves.found(other)
                    if case.task == task
                ]
        behind = " Grey lines are the other algorithms with a server, on the same task."
    elif task == "quadratic" and not knows.uses_upper:
        lines = lines[:1]
    picture = chart(
        lines,
        title=f"{name}: {words} against rounds",
        x="communication rounds",
        y=words,
        log=log,
        others=others,
        low=1e-12 if "y" in log else None,
    )
    commands = "\n".join(case.command() for case, _ in mine)
    return (
        f"{_story(task, name, knows)}{behind}\n\n{figure_of(picture.svg())}\n\n"
        + "\n".join(table)
        + f"\n\n```bash\n{commands}\n```"
    )


def _shown(task: str, knows: About) -> tuple[str, str, str]:
    """Column, words, and which axes are logarithmic."""
    if task == "data_cleaning":
        return "test_accuracy", "test accuracy", "x"
    return ("distance", "distance to the solution", "xy") if knows.uses_upper else ("lower_loss", "lower loss", "x")


def _label(case: curves.Case) -> str:
    task = curves.task_named(case.task)
    suggested = {**task.suggestions(case.algorithm), **curves.SHORTER.get(case.algorithm, {})}
    own = [f"{key} {value}" for key, value in case.settings.items() if suggested.get(key) != value]
    lower = (
        [f"{case.task_settings.get('lower', 'global')} lower level"]
        if case.task == "quadratic"
        else [case.task_settings.get("personalise", "embedded digits")]
    )
    return ", ".join([*lower, *own])


def _story(task: str, name: str, knows: About) -> str:
    network = f" {_between(task, name)}" if knows.peers else ""
    if task == "data_cleaning":
        single = (
            ""
            if knows.uses_upper
            else " The algorithm does not use the upper loss: x is constant, and every label counts the same."
        )
        return (
            f"Ten clients, digits, 40 % of the labels wrong, clean images of one class at each client.{single}{network}"
        )
    if task == "personalisation":
        return (
            "Ten clients, digits, three networks that every client mixes in its own proportions. "
            "The upper loss is not used."
        )
    if task == "hyper_representation":
        return (
            "Ten clients, digits, two shards of labels at each client, a shared hidden layer and own heads. "
            "The upper loss is not used."
        )
    if not knows.uses_upper:
        single = "The algorithm does not use the upper loss: x is constant, and only the lower loss decreases."
        return f"Five clients that differ, float64, whole batches. {single}{network}"
    return (
        "Five clients that differ, float64, whole batches, the steps that the task suggests. "
        f"The solution has a closed form.{network}"
    )


AMOUNTS = {
    "push": "every push counts as a round",
    "running_push": "every push counts as a round",
    "gossip": "every exchange with the neighbours counts as a round",
}


def _between(task: str, name: str) -> str:
    """The network of the recorded runs between peers, and the meaning of a round.

    The meaning depends on the verbs of the algorithm.
    """
    case = next(case for case, _ in curves.found(name) if case.task == task)
    algorithm, averaging = made(curves.algorithms()[name], case.settings), made(Averaging, case.options["averaging"])
    assert isinstance(algorithm, PeerAlgorithm)
    mixes = {
        "mix": f"an average is {averaging.num_steps} steps of {averaging.kind.replace('push_sum', 'Push-Sum')}, "
        "each of which counts as a round"
    }
    amounts = [words for verb, words in {**mixes, **AMOUNTS}.items() if verb in algorithm.verbs()]
    return f"The network is a {case.options['network']['kind']}; {'; '.join(amounts)}."


def figure_of(svg: str) -> str:
    return f'<div class="picture">{svg}</div>'


# ---- pages ---------------------------------------------------------------------------------------


def page(name: str) -> str:
    kind, text, knows = curves.algorithms()[name], text_of(name), about(name)
    where = "between peers, on a network" if knows.peers else "with a server"
    facts = [f"`{name}`", where, "two levels" if knows.uses_upper else "the lower level alone"]
    facts += ["second derivatives" if knows.second_order else "gradients only"] + (
        ["needs every client in every round"] if knows.everyone else []
    )
    first = curves.found(name)[0][0]
    minimal = f"fedbilevel run {first.task} --algorithm {name}" + "".join(
        f" --{key.replace('_', '-')} {value}" for key, value in first.task_settings.items()
    ) + (" --network ring" if knows.peers else "")  # fmt: skip
    parts = [
        f"# {text.title}",
        rendered(text.purpose),
        " · ".join(facts),
        f"## Method\n\n{prose(text.summary)}",
        rendered(text.body),
    ]
    for key, title in PARTS.items():
        if key in text.parts and key != "Cost":
            parts.append(f"## {title}\n\n{rendered(text.parts[key], equations_only=key == 'Reference')}")
    cost = f"{_key(letters(kind, text))}\n\n{rendered(text.parts['Cost'])}" if "Cost" in text.parts else ""
    parts += [f"## Cost of an outer iteration\n\n{cost}"] if cost else []
    parts += [f"## Scopes\n\n{scopes_table(name)}", f"## Settings\n\n{settings_table(kind)}"]
    module = kind.__module__
    python = f"from {module} import {kind.__name__}\n\nalgorithm = {kind.__name__}()  # settings by name"
    then = (
        "Then call `fb.solve(problem, clients, algorithm, num_rounds=...)`, "
        "or pass the name and the settings to `fb.solve`."
    )
    parts.append(f"## Run it\n\n```bash\n{minimal}\n```\n\n```python\n{python}\n```\n\n{then}")
    recorded = f"`{curves.recorded()['command']}` made the curves at version {curves.recorded()['version']}."
    every = (
        "Each command above repeats a recorded run; "
        "settings that it does not name have the value that the task suggests, or their default."
    )
    parts.append(f"## Curves\n\n{curve_section(name)}\n\n{recorded} {every}")
    return linked("\n\n".join(part for part in parts if part) + "\n", name)


def decision_table(folder: str = "algorithms/") -> str:
    """A table of all algorithms: declared scopes, and costs.

    The ledger counted the costs on the standard task.
    """
    out = []
    for heading, chosen in (
        ("Two levels, with a server", lambda one: one.uses_upper and not one.peers),
        ("Two levels, between peers", lambda one: one.uses_upper and one.peers),
        ("The lower level alone", lambda one: not one.uses_upper),
    ):
        names = [name for name in curves.algorithms() if chosen(about(name))]
        last = " distance left after rounds |" if chosen(about("fedbio")) or chosen(about("hgp")) else ""
        scopes = " | ".join(words.replace(" ", "&nbsp;").replace(",&nbsp;", "<br>") for words in SCOPES.values())
        rows = [
            f"| algorithm | {scopes} | rounds | floats up | gradients | products | state |{last}",
            "|---|:-:|:-:|:-:|:-:|--:|--:|--:|--:|---|" + ("---|" if last else ""),
        ]
        for name in names:
            said, knows = curves.scopes_of(curves.algorithms()[name]), about(name)
            cells = [
                *(_mark(said[scopes]) for scopes in SCOPES),
                *knows.costs,
                prose(knows.state),
                *([knows.left] if last else []),
            ]
            rows.append(f"| [`{name}`]({folder}{name}.md) | " + " | ".join(cells) + " |")
        out += [f"### {heading}", "\n".join(rows)] if names else []
    return "\n\n".join(out)


def _mark(said: str) -> str:
    return "yes" if not said else "no" if said.startswith("refused") else "biased"


def index() -> str:
    rows = ["| name | with | summary |", "|---|---|---|"]
    for name, kind in curves.algorithms().items():
        text = text_of(name)
        rows.append(
            f"| [`{name}`]({name}.md) | {'peers' if issubclass(kind, PeerAlgorithm) else 'server'} "
            f"| {prose(text.summary)} |"
        )
    opening = (
        "Every algorithm is one file with equations, references, costs and code. "
        "These pages are generated from the files, and the curves from recorded runs. "
        "See [Choosing an algorithm](../choosing.md) for recommendations."
    )
    return f"# Algorithms\n\n{opening}\n\n" + "\n".join(rows) + "\n"
