"""Tables and sentences in a terminal, made from the rows of a record without tensors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedbilevel.escapes import printable
from fedbilevel.peers.collect import Removal
from fedbilevel.studies.budgets import NO_SEARCH
from fedbilevel.studies.budgets import tuning as tuning_of
from fedbilevel.studies.comparison import Comparison, Spread
from fedbilevel.studies.experiment import Experiment
from fedbilevel.studies.influence.result import PAPER, Instance, Study
from fedbilevel.studies.reproduce import Figure
from fedbilevel.studies.tune import Chosen
from fedbilevel.studies.tuned import Tuned, listed
from fedbilevel.studies.verdicts import Verdict, judges, recorded_values, verdicts


def outcomes(title: str, rows: Mapping[str, Mapping[str, Any]], headline: Sequence[str]) -> Table:
    """Show figures and costs of each method, summed over clients.

    The column grads counts first derivatives, the column products counts H v and J v.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("method")
    for name in (*headline, "rounds", "MB", "grads", "products", "s"):
        table.add_column(name.replace("_", " "), justify="right")
    for label, row in rows.items():
        table.add_row(
            label, *(figure(row.get(name)) for name in headline), str(row["rounds"]), f"{row['megabytes']:.1f}",
            str(row["gy"] + row["gx"] + row["fx"] + row["fy"]), str(row["hvp"] + row["jvp"]), f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table


def comparison(result: Comparison, headline: Sequence[str]) -> Table:
    """Show each algorithm's cost of reaching the target, and its final figures.

    Values are mean +- standard deviation over repetitions.
    """
    goal = result.target
    finals = [goal.metric, *(name for name in headline if name != goal.metric)] if goal is not None else list(headline)
    what = (
        f"{result.task}: cost to reach {goal.metric} = {goal.value:g}, and final figures"
        if goal is not None
        else f"{result.task}: cost and final figures"
    )
    table = Table(title=what, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("algorithm")
    for name in (
        *(["reached"] if goal is not None else []),
        "rounds",
        "MB",
        "grads",
        "products",
        "s",
        *(f"final {name.replace('_', ' ')}" for name in finals[:2]),
    ):
        table.add_column(name, justify="right")
    for one in result.outcomes:
        paid = one.to_target if goal is not None else one.total
        cells = [
            spread(paid.get(name), digits)
            for name, digits in (("rounds", 0), ("megabytes", 1), ("gradients", 0), ("products", 0), ("seconds", 1))
        ]
        label = f"{one.name} ({one.num_diverged} diverged)" if one.num_diverged else one.name
        table.add_row(
            label,
            *([f"{one.num_reached}/{one.num_runs}"] if goal is not None else []),
            *cells,
            *(spread(one.final.get(name), 4) for name in finals[:2]),
        )
    return table


def spread(value: Spread | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + (f" +-{value.deviation:.{digits}f}" if value.deviation else "")


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


def influence(result: Study, num_listed: int) -> list[Table | str]:
    """Show scores beside the paper's, costs, and the most harmful and helpful samples."""
    data, model = result.task["data"], result.task["model"]
    table = Table(
        title=f"Influence of instances: {data}, {model}, {result.method}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("", "removals", "R2", "F1", "Pearson"):
        table.add_column(name, justify="right" if name else "left")
    if result.scores is not None:
        table.add_row("here", str(result.num_removed), *(_score(value, 4) for value in result.scores))
    if (model, data) in PAPER:
        kind = "synthetic data" if data == "mixture" else "EMNIST digits"
        table.add_row(
            f"Terashita and Hara, Table 4 ({kind}, full batch)",
            "50",
            *(_score(value, 2) for value in PAPER[model, data]),
            "-",
        )
    worth = [
        f"total validation loss {result.loss:.4g}, validation accuracy {result.val_accuracy:.1%}, "
        f"|grad g| {result.lower_gradient:.1e}"
    ]
    worth += [f"residual of u {result.residual:.1e}"] if result.residual is not None else []
    worth += [f"peers' u differ by {result.disagreement:.1e}"] if result.disagreement is not None else []
    worth += [f"changes below {result.noise:.1e} are noise of training"] if result.noise else []
    if result.scores is not None:
        ranks = result.rank_correlations().items()
        shown = ", ".join(f"{name.replace('_', ' ')} {_score(value, 3)}" for name, value in ranks)
        worth.append(f"rank correlation with the actual changes: {shown}")
    paid = ", ".join(f"{name} {amount}" for name, amount in result.cost.items() if amount)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    lists = [
        instances(f"Most {kind}: removal {does} the total validation loss", some(num_listed))
        for kind, does, some in (("harmful", "lowers", result.harmful), ("helpful", "raises", result.helpful))
    ]
    return [
        table,
        "; ".join(worth) + ".",
        f"Cost of the prediction, summed over clients: {paid}. Time: {spent}.",
        *lists,
    ]


def instances(title: str, rows: Sequence[Instance]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("client", "sample", "label", "predicted change", "gradient product", "trajectory", "own loss",
                 "actual change"):  # fmt: skip
        table.add_column(name, justify="right")
    for one in rows:
        table.add_row(
            str(one.client), str(one.sample), f"{one.label}{' (wrong)' if one.wrong else ''}", f"{one.prediction:+.3e}",
            f"{one.gradient_product:+.2e}", f"{one.trajectory:+.2e}", f"{one.own_loss:.3g}",
            "not tried" if one.actual is None else f"{one.actual:+.3e}",
        )  # fmt: skip
    return table


def reproduction(
    experiment: Experiment,
    means: Mapping[tuple[str, str], Mapping[str, Any]],
    judged: Mapping[tuple[str, str, str], Verdict] = MappingProxyType({}),
) -> list[Table]:
    """Make a table per panel: our mean +- deviation (the paper's value; the difference)."""
    tables = []
    for panel in dict.fromkeys(panel for panel, _ in means):
        table = Table(
            title=f"{experiment.title}: {experiment.panel_title(panel)}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("")
        for heading in experiment.figures.values():
            table.add_column(heading, justify="right")
        chosen = _judges(experiment, panel, judged)
        for one in chosen:
            table.add_column(_against(experiment, one))
        for (place, row), figures in means.items():
            if place == panel:
                theirs = experiment.paper(panel, row)
                cells = [
                    _beside(figures, theirs.get(name), name, heading) for name, heading in experiment.figures.items()
                ]
                table.add_row(experiment.row_title(row), *cells, *_words(judged, panel, row, chosen))
        tables.append(table)
    return tables


def recorded(experiment: Experiment) -> str:
    """Return the recorded results as Markdown tables, one per panel.

    An entry is our value (the paper's value; the difference).
    """
    result = experiment.content.get("result", {})
    lines = [
        f"## {experiment.name}: {experiment.title}",
        "",
        f"{experiment.content['source']}. `fedbilevel reproduce {experiment.name}`",
        "",
    ]
    for panel in experiment.content["panels"]:
        rows = {row: result[panel][row] for row in experiment.content["rows"] if row in result.get(panel, {})}
        if not rows:
            continue
        lines += [f"**{experiment.panel_title(panel)}**", "", *panel_table(experiment, panel)]
        if (experiment.path.parent / f"{panel}.png").exists():
            lines += ["", f"![{experiment.panel_title(panel)}]({experiment.name}/{panel}.png)"]
        places = {(entry["commit"], entry["machine"], entry["time"][:10]) for entry in rows.values()}
        lines += [
            "",
            "Run at " + "; ".join(f"{commit} on {machine}, {day}" for commit, machine, day in sorted(places)) + ".",
            "",
        ]
    return "\n".join(lines)


def panel_table(experiment: Experiment, panel: str) -> list[str]:
    """Return the lines of the Markdown table of a panel's recorded results."""
    result = experiment.content.get("result", {}).get(panel, {})
    rows = {row: result[row] for row in experiment.content["rows"] if row in result}
    found = verdicts(experiment, recorded_values(experiment))
    chosen = _judges(experiment, panel, found)
    budgets = {row: tuning_of(experiment, panel, row) for row in rows}
    searched = not {*budgets.values()} <= {*NO_SEARCH}
    headings = [*experiment.figures.values(), *(_against(experiment, one) for one in chosen), "repetitions"]
    headings += ["tuning"] * searched
    lines = ["| | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    for row, entry in rows.items():
        own = {**entry["figures"], "repetitions": {"mean": 1.0, "deviation": 0.0, "runs": entry["repetitions"]}}
        figures, theirs = {name: Figure(**value) for name, value in own.items()}, experiment.paper(panel, row)
        cells = [_beside(figures, theirs.get(name), name, heading) for name, heading in experiment.figures.items()]
        words = [*_words(found, panel, row, chosen), str(entry["repetitions"]), *[budgets[row]] * searched]
        lines.append("| " + " | ".join([experiment.row_title(row), *cells, *words]) + " |")
    return lines


def _judges(experiment: Experiment, panel: str, judged: Mapping[tuple[str, str, str], Verdict]) -> list[str]:
    """Return the rows with verdicts in this panel."""
    return [one for one in judges(experiment) if any((place, by) == (panel, one) for place, _, by in judged)]


def _words(judged: Mapping[tuple[str, str, str], Verdict], panel: str, row: str, chosen: Sequence[str]) -> list[str]:
    return [judged[panel, row, one].shown() if (panel, row, one) in judged else "-" for one in chosen]


def _against(experiment: Experiment, chosen: str) -> str:
    """Return the heading of the verdicts on a row."""
    return f"{experiment.row_title(chosen)} against this row"


def tuning(chosen: Chosen, experiment: Experiment, num_listed: int = 5) -> Table:
    """Show the best trials, with the chosen trial first."""
    title = f"{experiment.name}, {chosen.panel}, {chosen.row}: {len(chosen.trials)} trials, {chosen.rounds} rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(chosen.best.values)
    for name in (*names, *experiment.figures.values()):
        table.add_column(name.removeprefix("algorithm."), justify="right")
    for trial in sorted(chosen.trials, key=lambda trial: trial.score)[:num_listed]:
        figures = (figure(trial.figures.get(name)) for name in experiment.figures)
        table.add_row(*(str(trial.values[name]) for name in names), *figures)
    return table


def search(found: Tuned, task: str) -> Table:
    """Show the best trial of each algorithm, and the budget of its search."""
    title = f"{task}: {found.metric} after {found.num_rounds} rounds, best trials"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("algorithm")
    for name in (found.metric.replace("_", " "), "trials", "pruned", "diverged", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("settings")
    for name, one in found.searches.items():
        counts = (len(one.trials), one.count("pruned"), one.count("diverged"), one.rounds)
        best = one.best
        table.add_row(
            name,
            figure(best.value if best is not None else None),
            *map(str, counts),
            listed(best.settings) if best is not None else "every trial diverged",
        )
    return table


def _beside(figures: Mapping[str, Any], paper: float | None, name: str, heading: str) -> str:
    scale, ours = 100 if heading.endswith(", %") else 1, figures.get(name)
    show = lambda value: (
        f"{value * scale:.2f}" if scale == 100 else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    )
    if ours is None:  # a cost that was never paid, or a figure that this row does not have
        missing = "diverged" if "diverged" in figures else "not reached" if name.endswith("_to_target") else "-"
        return missing + (f" ({show(paper)})" if paper is not None else "")
    most = figures["repetitions"].runs
    text = (
        show(ours.mean)
        + (f" +-{show(ours.deviation)}" if ours.runs > 1 else "")
        + (f" [{ours.runs} of {most}]" if ours.runs < most else "")
    )
    return text if paper is None else f"{text} ({show(paper)}; {(ours.mean - paper) * scale:+.4g})"


def _score(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def personalisation(outcomes: Sequence[Any], paper: Mapping[str, Mapping[str, tuple[float, float]]]) -> Table:
    """Show mean / bottom-decile test accuracy in per cent, with a line per method.

    Every network has a column. Values are means over repetitions, with the paper's values below.
    """
    networks = list(dict.fromkeys(one.network for one in outcomes))
    table = Table(
        title=(
            "Test accuracy in %: over all test samples / of the client at the bottom decile (below: the paper, EMNIST)"
        ),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("method")
    for network in networks:
        table.add_column(network, justify="right")
    table.add_column("s", justify="right")
    for name in dict.fromkeys(one.method for one in outcomes):
        cells = []
        for network in networks:
            mine = [one for one in outcomes if (one.method, one.network) == (name, network)]
            figures = (
                [
                    100 * statistics.fmean(getattr(one, figure) for one in mine)
                    for figure in ("test_accuracy", "bottom_decile")
                ]
                if mine
                else []
            )
            theirs = paper.get(name, {}).get(network)
            cells.append(
                ("{:.1f} / {:.1f}".format(*figures) + (f"\n({theirs[0]} / {theirs[1]})" if theirs else ""))
                if mine
                else "-"
            )
        table.add_row(name, *cells, f"{sum(one.seconds for one in outcomes if one.method == name):.0f}")
    return table


def removals(title: str, rows: Sequence[Removal]) -> Table:
    """List training samples of peers with the predicted change of the loss by each removal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("peer", "sample", "predicted change"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for one in rows:
        table.add_row(Text(printable(one.peer)), str(one.sample), f"{one.change:+.3e}")
    return table
