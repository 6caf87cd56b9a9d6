"""Pictures of the pages: python -m website.pictures draws docs/pictures/*.svg from facts.json and curves.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from website import curves, facts, walks
from website.charts import Line, Scale, chart
from website.svg import Picture, Point

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def home() -> Picture:
    """Accuracy of bilevel label cleaning against rounds."""
    names = {
        "fedavg": "fedavg: labels as they are",
        "fedbio": "fedbio",
        "adasimfbo": "adasimfbo",
        "fbo_aggitd": "fbo_aggitd",
    }
    lines = []
    for name, label in names.items():
        rows = next(rows for case, rows in curves.found(name) if case.task == "data_cleaning")
        lines.append(
            Line(
                label,
                [(row["rounds"], row["test_accuracy"]) for row in rows if row["rounds"] >= 5],
                dashed=name == "fedavg",
            )
        )
    return chart(
        lines,
        title="Ten clients clean each other's labels",
        x="communication rounds",
        y="test accuracy",
        log="x",
        size=(680, 320),
    )


def levels() -> Picture:
    p = Picture(720, 300, "Two levels: x determines the training of y, and the trained y judges x")
    p.box(240, 16, 240, 62, "blue")
    p.text(360, 41, "upper level: x", "blue", anchor="middle", bold=True)
    p.text(360, 62, "min over x of mean f_{i}(x, y*(x))", size=13, anchor="middle")
    p.box(228, 220, 264, 62, "orange")
    p.text(360, 245, "lower level: y", "orange", anchor="middle", bold=True)
    p.text(360, 266, "y*(x) = argmin over y of mean g_{i}(x, y)", size=13, anchor="middle")
    p.arrow((292, 80), (292, 217), "blue")
    p.text(278, 128, "x: sample weights,\npenalties, a representation", "blue", size=13, anchor="end")
    p.text(278, 186, "determines the training", "grey", size=12, anchor="end")
    p.arrow((428, 217), (428, 80), "orange")
    p.text(442, 128, "y*(x): the trained model", "orange", size=13)
    p.text(442, 150, "is judged on clean data by f", "grey", size=12)
    p.text(442, 186, "∇Φ = f_{x} \u2212 J u   where   H u = f_{y}", size=13)
    p.text(442, 205, "the hypergradient: one linear system", "grey", size=12)
    return p


def heterogeneity() -> Picture:
    h = facts.recorded()["heterogeneity"]
    p = Picture(760, 360, "Averaged local hypergradients lead to another point; the error grows with heterogeneity")
    solution, wrong = np.array(h["solution"]), np.array(h["paths"]["lfednest"][-1])
    start = np.zeros(2)
    middle, half = (solution + start) / 2 + [0.12, 0], 0.86
    across, up = (
        Scale(middle[0] - half, middle[0] + half, 16, 356, False),
        Scale(middle[1] - half, middle[1] + half, 346, 40, False),
    )
    place: Callable[[Any], Point] = lambda point: (across(float(point[0])), up(float(point[1])))
    values, vectors = np.linalg.eigh(np.array(h["curvature"]))
    for level in (0.12, 0.3, 0.55, 0.85, 1.2):
        ring = [
            solution + vectors @ (level * np.array([math.cos(t), math.sin(t)]) / np.sqrt(values / values.min()))
            for t in np.linspace(0, 2 * math.pi, 121)
        ]
        for one, other in pairwise(ring):
            if all(abs(point - middle).max() <= half for point in (one, other)):
                p.line([place(one), place(other)], "faint", width=1.1)
    for local in h["local"]:
        p.arrow(place(start), place(0.16 * np.array(local)), "grey", width=1.1, head=6)
    for name, colour in (("lfednest", "red"), ("fedbio", "blue")):
        p.line([place(point) for point in h["paths"][name]], colour, width=2.2)
        for point in h["paths"][name][1:14]:
            p.dot(*place(point), 2, colour)
    p.dot(*place(start), 4, "ink")
    p.text(place(start)[0] + 8, place(start)[1] - 7, "start", size=13)
    p.dot(*place(solution), 5, "green")
    p.text(place(solution)[0] + 10, place(solution)[1] + 14, "x*, and fedbio", "green", size=13, bold=True)
    p.dot(*place(wrong), 4, "red", open=True)
    p.text(place(wrong)[0] + 9, place(wrong)[1] - 4, "lfednest ends here", "red", size=12)
    p.text(16, 20, "Paths of two runs", size=14, bold=True)
    p.text(20, 338, "grey arrows: each client's own hypergradient", "grey", size=12)
    left, right, top, bottom = 440.0, 744.0, 60.0, 300.0
    p.text(400, 20, "Distance from x* at the end", size=14, bold=True)
    x, y = Scale(0, max(h["levels"]), left, right, False), Scale(0, max(h["distance"]["lfednest"]), bottom, top, False)
    for tick in y.ticks():
        p.line([(left, y(tick)), (right, y(tick))], "faint", width=0.7)
        p.text(left - 7, y(tick) + 4, f"{tick:.1f}", "grey", size=12, anchor="end")
    for tick in x.ticks():
        p.text(x(tick), bottom + 18, f"{tick:.1f}", "grey", size=12, anchor="middle")
    for name, colour in (("lfednest", "red"), ("fedbio", "blue")):
        points = [(x(level), y(away)) for level, away in zip(h["levels"], h["distance"][name], strict=True)]
        p.line(points, colour, width=2.4)
        for point in points:
            p.dot(*point, 3, colour)
    p.text((left + right) / 2, bottom + 40, "heterogeneity of the clients", size=13, anchor="middle")
    p.text(left + 20, top + 14, "lfednest: local hypergradients", "red", size=13)
    p.text(left + 90, bottom - 10, "fedbio: one shared u", "blue", size=13)
    return p


def scopes() -> Picture:
    p = Picture(720, 332, "Four scopes: shared values and values that stay at a client")
    heads = (("x shared", 200), ("x private", 480))
    for words, x in heads:
        p.text(x + 110, 22, words, "blue", anchor="middle", bold=True)
    for row, (words, detail) in enumerate(
        (("y global", "one model,\ntrained by all"), ("y local", "every client\nhas its own"))
    ):
        top = 38 + 142 * row
        p.text(20, top + 50, words, "orange", bold=True)
        p.text(20, top + 72, detail, "grey", size=12)
        for column, (_, left) in enumerate(heads):
            p.box(left, top, 220, 124, "faint")
            p.box(left + 62, top + 10, 96, 34, "ink", fill="", dashed=True)
            inside = [name for name, there in (("x", column == 0), ("y", row == 0)) if there]
            p.text(left + 110, top + 32, "server" if not inside else " ", "grey", size=12, anchor="middle")
            for place, name in enumerate(inside):
                p.text(
                    left + (110 if len(inside) == 1 else 92 + 36 * place),
                    top + 33,
                    name,
                    "blue" if name == "x" else "orange",
                    size=16,
                    anchor="middle",
                    bold=True,
                )
            for client in range(3):
                middle = left + 40 + 70 * client
                p.dot(middle, top + 96, 21, "grey", open=True)
                if inside:
                    p.line([(middle, top + 74), (left + 110 + 18 * (client - 1), top + 45)], "faint", width=1.2)
                own = [name for name, there in (("x", column == 1), ("y", row == 1)) if there]
                for place, name in enumerate(own):
                    shift = 0 if len(own) == 1 else -8 + 16 * place
                    p.text(
                        middle + shift,
                        top + 99,
                        name,
                        "blue" if name == "x" else "orange",
                        size=14,
                        anchor="middle",
                        bold=True,
                    )
                    p.text(middle + shift + 5, top + 104, "123"[client], "blue" if name == "x" else "orange", size=9)
    p.text(455, 324, "Values at a client are never sent and never charged.", "grey", size=12, anchor="middle")
    return p


def rounds() -> Picture:
    p = Picture(720, 292, "One outer iteration: every mean is one communication round")
    p.text(16, 40, "server", bold=True)
    for i in range(4):
        p.text(16, 108 + 44 * i, f"client {i + 1}", size=13)
        p.line([(84, 104 + 44 * i), (704, 104 + 44 * i)], "faint", width=1)
    p.line([(84, 36), (704, 36)], "faint", width=1)
    phases = (
        ("fed.mean(self.local_steps, x, y, u)", 110, (0, 1, 3)),
        ("fed.mean(self.upper_steps, h)", 440, (0, 2, 3)),
    )
    for words, left, cohort in phases:
        p.text(left + 118, 20, words, size=12, anchor="middle", mono=True)
        p.dot(left, 36, 5, "blue")
        p.dot(left + 236, 36, 5, "orange")
        for i in range(4):
            y = 104 + 44 * i
            if i in cohort:
                p.arrow((left + 2, 40), (left + 52, y - 3), "blue", width=1.3, head=6)
                p.box(left + 56, y - 13, 118, 26, "ink", round=4)
                p.text(left + 115, y + 5, "phase", size=12, anchor="middle")
                p.arrow((left + 176, y - 3), (left + 233, 41), "orange", width=1.3, head=6)
            else:
                p.text(left + 115, y - 5, "not in the cohort", "grey", size=11, anchor="middle")
    p.text(393, 84, "fed.resample()", "grey", size=11, anchor="middle", mono=True)
    p.line([(393, 44), (393, 70)], "grey", width=1, dashed=True)
    p.text(16, 280, "broadcast down", "blue", size=13)
    p.text(130, 280, "averaged on the way up", "orange", size=13)
    p.text(300, 280, "one mean is one round; new cohorts only where permitted", "grey", size=12)
    return p


def push_sum() -> Picture:
    found = facts.recorded()["push_sum"]
    p = Picture(760, 320, "Push-Sum on a directed network: only rows divided by weights agree on the mean")
    steps = range(len(found["rows"]))
    high = 1.05 * max(max(row) for row in found["rows"])
    ratios = [
        [a / b for a, b in zip(row, weight, strict=True)]
        for row, weight in zip(found["rows"], found["weights"], strict=True)
    ]
    panels = ((54, "Rows alone never agree", found["rows"]), (432, "Rows divided by weights agree", ratios))
    for left, words, values in panels:
        x, y = Scale(0, len(steps) - 1, left, left + 310, False), Scale(0, high, 270, 40, False)
        p.text(left, 20, words, size=14, bold=True)
        for tick in y.ticks():
            p.line([(left, y(tick)), (left + 310, y(tick))], "faint", width=0.7)
            p.text(left - 7, y(tick) + 4, f"{tick:g}", "grey", size=12, anchor="end")
        for peer in range(len(values[0])):
            p.line(
                [(x(step), y(values[step][peer])) for step in steps],
                "blue" if left > 100 else "red",
                width=1.5,
                opacity=0.75,
            )
        p.line([(left, y(found["mean"])), (left + 310, y(found["mean"]))], "green", width=2, dashed=True)
        for tick in range(0, len(steps), 2):
            p.text(x(tick), 288, str(tick), "grey", size=12, anchor="middle")
        p.text(left + 155, 310, "steps", size=13, anchor="middle")
    p.text(700, 140, f"mean {found['mean']:g}", "green", size=13, anchor="middle")
    return p


def ledger() -> Picture:
    """Cost of one outer iteration per client of the standard task."""
    names = ("fedavg", "penalty", "fedbio", "fedbioacc", "commfedbio", "fednest", "fbo_aggitd")
    groups = (
        ("rounds", ("rounds",), "blue"),
        ("floats up and down", ("floats_up", "floats_down"), "orange"),
        ("gradients", ("gy", "gx", "fx", "fy"), "green"),
        ("products H v, J v", ("hvp", "jvp"), "red"),
    )
    p = Picture(760, 60 + 34 * len(names), "Cost of one outer iteration per client")
    each = {name: per_iteration(name) for name in names}
    for place, (words, columns, colour) in enumerate(groups):
        left, width = 110 + 164 * place, 104
        p.text(left, 24, words, size=13, bold=True)
        most = max(sum(cost[column] for column in columns) for cost in each.values())
        for row, (name, cost) in enumerate(each.items()):
            value, y = sum(cost[column] for column in columns), 42 + 34 * row
            if place == 0:
                p.text(100, y + 15, name, size=13, anchor="end", mono=True)
            p.bar(left, y, max(1.5, width * value / most), 20, colour)
            p.text(left + width * value / most + 6, y + 15, f"{value:.3g}", "grey", size=12)
    return p


def per_iteration(name: str) -> dict[str, float]:
    """Cost of one outer iteration per client, by column, in the first recorded curve; rounds are in total."""
    case, rows = curves.found(name)[0]
    num_clients = curves.clients_of(case)
    first, last = rows[0], rows[-1]
    share = {
        column: (last[column] - first[column]) / last["iteration"]
        for column in first
        if column not in ("iteration", "distance", "lower_loss", "upper_loss")
    }
    return {column: value / (1 if column == "rounds" else num_clients) for column, value in share.items()}


def records() -> Picture:
    p = Picture(720, 292, "Every draw has an address, so a resumed run has the same draws")
    p.box(16, 14, 300, 108, "blue")
    p.text(166, 38, "address of a draw", "blue", anchor="middle", bold=True)
    p.text(166, 62, "(seed, purpose, client,", size=13, anchor="middle", mono=True)
    p.text(166, 82, "outer iteration, call, place)", size=13, anchor="middle", mono=True)
    p.text(166, 108, "always the same number, in any order", "grey", size=12, anchor="middle")
    p.arrow((318, 68), (372, 68))
    p.box(376, 14, 328, 108, "orange")
    p.text(540, 38, "a record", "orange", anchor="middle", bold=True)
    p.text(
        392,
        62,
        "config.json: settings, versions\nmetrics.jsonl: one row per measurement\ncheckpoint.safetensors: for a resume",
        size=11.5,
        mono=True,
    )
    for label, y, stops in (("uninterrupted", 176, ()), ("stopped and resumed", 230, (0.42, 0.71))):
        p.text(16, y + 4, label, size=13)
        p.line([(170, y), (690, y)], "faint", width=1.2)
        for step in range(14):
            p.dot(180 + 38 * step, y, 5, "blue")
        for stop in stops:
            p.line([(170 + 520 * stop, y - 16), (170 + 520 * stop, y + 16)], "red", width=2)
    p.text(430, 272, "The same iterates, bit for bit.", "grey", size=12, anchor="middle")
    return p


ALL: dict[str, Callable[[], Picture]] = {
    "home": home,
    "levels": levels,
    "heterogeneity": heterogeneity,
    "scopes": scopes,
    "rounds": rounds,
    "push-sum": push_sum,
    "ledger": ledger,
    "records": records,
    "walks": walks.picture,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in ALL.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg() + "\n")


if __name__ == "__main__":
    main()
