"""`fedbilevel check`: contracts of a task and an algorithm."""

from __future__ import annotations

import sys
from typing import Any

import click

from fedbilevel import discovery
from fedbilevel.checks import check_algorithm, check_hypergradient, check_problem
from fedbilevel.cli import terminal
from fedbilevel.cli.flags import TaskCommand, chosen
from fedbilevel.runs.choice import choose
from fedbilevel.runs.step_sizes import suggest_steps


@click.command("check", cls=TaskCommand)
@click.argument("task")
@click.option(
    "--algorithm",
    "-a",
    default=None,
    help="also check the contract of this algorithm, and its hypergradient estimate if it has one",
)
@click.option(
    "--steps",
    is_flag=True,
    help="also suggest step sizes for the algorithm (default: fedbio), from measured curvatures (slower)",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="time for the hypergradient; what is not done by then is reported as not checked",
)
def check_command(task: str, algorithm: str | None, steps: bool, seconds: float, **values: Any) -> None:
    """Check the hypergradient of a TASK in float64.

    Compares every estimator with the exact value and with finite differences.
    """
    kind = discovery.task(task)
    built = chosen(kind, values, {}).build()
    reports = [check_problem(built.problem, built.clients, show=False)]
    estimators: list[Any] = ["cg", "neumann", "fixed_point"]
    if algorithm is not None:
        algorithm = choose(algorithm, between_peers=False).name
        settings = chosen(discovery.algorithm(algorithm), values, kind.suggestions(algorithm))
        reports.append(check_algorithm(settings, show=False))
        estimators += [settings] if hasattr(settings, "estimate") else []
    reports.append(
        check_hypergradient(built.problem, built.clients, estimators=estimators, seconds=seconds, show=False)
    )
    for one in reports:
        terminal.say(str(one))
    if steps:
        method = settings if algorithm is not None else "fedbio"
        suggested = suggest_steps(built.problem, built.clients, method)
        found = ", ".join(f"{name} {value:.3g}" for name, value in suggested.items())
        terminal.say(f"Steps for {algorithm or 'fedbio'}, from the curvatures at the initial point: {found}.")
    sys.exit(0 if all(one.ok for one in reports) else 1)
