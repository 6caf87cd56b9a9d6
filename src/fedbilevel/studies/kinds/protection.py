"""Accuracy under the protections of the aggregation layer: compression, robust means, noise.

    task, algorithm   as in the study optimise; repetition r uses the task's `repeated(r)`
    num_rounds        of every run
    options           of every run (runs/options.py)
    aggregation       the protection: settings of the layer
    attacks, shares   kinds of attacks and shares of attackers; every pair is one run
    epsilons          budgets at which a run has spent its noise in its last round; with aggregation.clip
    goal              {figure, least, bytes}: met if the figure is at least this, and bytes at most

Figures, beside costs of the protected run without an attack:

    clean             accuracy without protection and attack
    accuracy, gap     with the protection, and its difference to clean
    bytes             bytes that clients sent, as a share of those of clean
    KIND_20           accuracy if 20 % of the clients attack by this kind; mean_20 and worst_20 over kinds
    without_20        clean, but these clients do not exist, so that their samples are lost, too
    gap_20, beside_20 sign_flip_20 - clean, sign_flip_20 - without_20
    epsilon_10        accuracy at this budget
    met               1 if the goal is met, else 0

Runs return to their best state where they diverge, as `solve` does by default.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.aggregation.attacks import Attack
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import ExperimentError
from fedbilevel.privacy.accountant import Accountant, Budget, joint
from fedbilevel.runs.endings import whole
from fedbilevel.runs.options import keywords
from fedbilevel.runs.privacy_account import sums_of
from fedbilevel.runs.solve import solve
from fedbilevel.settings import made
from fedbilevel.studies import given
from fedbilevel.studies.outcome import RowOutcome
from fedbilevel.tasks.task import Built

KNOWN = {
    "task": "table",
    "algorithm": "table",
    "num_rounds": "whole",
    "options": "table",
    "aggregation": "table",
    "attacks": "names",
    "shares": "numbers",
    "epsilons": "numbers",
    "goal": "table",
}
_FIGURE = "test_accuracy"
_EVERY = 10  # outer iterations between measurements, by which a run that diverges is found
_MOST_NOISE = 1e4
_KNOWN_RUNS: dict[str, dict[str, float]] = {}  # figures of the runs of this process, by their settings


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("task", "algorithm", "num_rounds"))
    runs = _Runs(row, repetition, device)
    layer = made(Aggregation, row["aggregation"]) if "aggregation" in row else None
    clean = runs.once()
    figures = {"clean": clean[_FIGURE]}
    curve: list[dict[str, float]] = []
    if "epsilons" in row:
        if layer is None or layer.clip is None:
            raise ExperimentError("epsilons need a norm to which rows are clipped: give aggregation.clip.")
        for epsilon in row["epsilons"]:
            say(f"epsilon {epsilon:g}")
            noise = noise_for(epsilon, layer.delta, runs.releases())
            private = made(Aggregation, {**row["aggregation"], "noise": noise, "epsilon": 1.001 * epsilon})
            figures[f"epsilon_{epsilon:g}"] = runs.once(layer=private)[_FIGURE]
            curve.append({"epsilon": epsilon, "accuracy": figures[f"epsilon_{epsilon:g}"]})
    alone = clean if layer is None else runs.once(layer=layer)
    figures |= {"accuracy": alone[_FIGURE], "gap": alone[_FIGURE] - clean[_FIGURE]}
    figures |= {"bytes": alone["bytes_up"] / clean["bytes_up"], "rounds": alone["rounds"]}
    attacked, points = _attacked(row, runs, layer, figures, say)
    figures |= attacked
    curve += points or ([] if curve else [{"bytes": figures["bytes"], "accuracy": figures["accuracy"]}])
    if "goal" in row:
        figures["met"] = float(is_met(row["goal"], figures))
    return RowOutcome(figures, curve)


def _attacked(
    row: Mapping[str, Any], runs: _Runs, layer: Aggregation | None, figures: Mapping[str, float], say: Any
) -> tuple[dict[str, float], list[dict[str, float]]]:
    kinds, found = row.get("attacks", []), dict[str, float]()
    curve = [{"share": 0.0, "accuracy": figures["accuracy"]}] if kinds else []
    for share in row.get("shares", []) if kinds else []:
        label, own = f"{100 * share:g}", dict[str, float]()
        for kind in kinds:
            say(f"{kind} by {share:.0%}")
            own[kind] = runs.once(layer=layer, attack=made(Attack, {"kind": kind, "share": share}))[_FIGURE]
        found |= {f"{kind}_{label}": value for kind, value in own.items()}
        found |= {f"mean_{label}": sum(own.values()) / len(own), f"worst_{label}": min(own.values())}
        found[f"without_{label}"] = runs.once(lost=runs.attackers(share))[_FIGURE]
        if "sign_flip" in own:
            found[f"gap_{label}"] = own["sign_flip"] - figures["clean"]
            found[f"beside_{label}"] = own["sign_flip"] - found[f"without_{label}"]
        curve.append({"share": share, "accuracy": found[f"worst_{label}"]})
    return found, curve


def is_met(goal: Mapping[str, Any], figures: Mapping[str, float]) -> bool:
    """Return whether figures reach a goal: a figure from a least value on, with at most some bytes."""
    if goal.get("figure") not in figures:
        raise ExperimentError(f"the goal is {dict(goal)!r:.120}, expected a figure among {', '.join(figures)}.")
    return bool(figures[goal["figure"]] >= goal["least"] and figures["bytes"] <= goal.get("bytes", math.inf))


def noise_for(epsilon: float, delta: float, releases: Sequence[int]) -> float:
    """Return the least noise by which means of these numbers of sequences spend at most epsilon."""
    account = Accountant(Budget(epsilon, delta))
    spent = lambda noise: account.forecast(1, [joint([noise] * num, times=releases.count(num)) for num in {*releases}])
    low, high = 1e-2, _MOST_NOISE
    if spent(high) > epsilon:
        raise ExperimentError(f"{len(releases)} means spend more than epsilon {epsilon:g} with any noise: raise it.")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


class _Runs:
    """Runs of one row and repetition, on the same data."""

    def __init__(self, row: Mapping[str, Any], repetition: int, device: str) -> None:
        self.row, self.repetition = row, repetition
        self.built: Built = given.task(row["task"]).repeated(repetition).build()
        self.options = keywords({**row.get("options", {}), "device": device})
        self.options["seed"] += repetition

    def once(
        self, *, layer: Aggregation | None = None, attack: Attack | None = None, lost: Sequence[int] = ()
    ) -> dict[str, float]:
        """Return final figures; rows that need the same run share it.

        lost: clients that do not exist; their test samples are those of the first other client.
        """
        same = [self.row.get(name) for name in ("task", "algorithm", "num_rounds", "options")]
        ours = [None if one is None else one.asdict() for one in (layer, attack)]
        key = json.dumps([same, self.repetition, ours, list(lost)], sort_keys=True)
        if key not in _KNOWN_RUNS:
            _KNOWN_RUNS[key] = self._run(layer, attack, lost)
        return _KNOWN_RUNS[key]

    def _run(self, layer: Aggregation | None, attack: Attack | None, lost: Sequence[int]) -> dict[str, float]:
        options = {**self.options, "aggregation": layer, "attack": attack, "measure_every": _EVERY, "residuals": False}
        clients = _without(self.built.clients, lost)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run that returns to its best state warns
            result = solve(
                self.built.problem,
                clients,
                given.algorithm(self.row["algorithm"]),
                num_rounds=self.row["num_rounds"],
                **options,
            )
        return {_FIGURE: whole(result).final[_FIGURE], **{name: float(value) for name, value in result.ledger.items()}}

    def attackers(self, share: float) -> list[int]:
        return made(Attack, {"kind": "sign_flip", "share": share}).attackers(
            len(self.built.clients), self.options["seed"]
        )

    def releases(self) -> list[int]:
        """Return the number of sequences of every mean of a run."""
        algorithm, rounds = given.algorithm(self.row["algorithm"]), self.row["num_rounds"]
        start, each = sums_of(algorithm, self.built.problem, self.built.clients, dtype=self.options["dtype"])
        return start + each * -(-(rounds - len(start)) // len(each))


def _without(clients: Sequence[Any], lost: Sequence[int]) -> list[Any]:
    """Return the other clients, the first of which has the test samples of those that are lost."""
    kept = [{**client} for number, client in enumerate(clients) if number not in lost]
    if lost:
        parts = [kept[0]["test"], *(clients[number]["test"] for number in lost)]
        kept[0]["test"] = {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}
    return kept
