"""One run of a method on a pair, and the search for settings of the rivals.

Steps are searched on a logarithmic scale: those of y and u from 0.03 / L to 3 / L, where L is the
largest curvature of the lower level at the start, and those of x within a factor of 100 around the
step that the task suggests. The first trial has the settings that the task suggests. Trials use
another data split and other draws than the reported runs.
"""

from __future__ import annotations

import json
import math
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import optuna

import fedbilevel as fb
from benchmarks.untuned.pairs import Pair
from fedbilevel import discovery
from fedbilevel.errors import NonFiniteError
from fedbilevel.oracle.population import Population
from fedbilevel.runs.result import Progress

TUNING_SEED = 100  # reported runs have other seeds
NUM_WHOLE = 10  # trials of a search that are never pruned
DIVERGED = 10.0  # a run diverged if its upper loss ends above this multiple of its start

Settings = dict[str, Any]
Distributions = dict[str, optuna.distributions.BaseDistribution]


class Outcome(NamedTuple):
    """The end of one run; a run that diverged has the figure of its start.

    halfway: the figure at the first measurement after half of the rounds.
    pruned: whether the run was ended there.
    seconds: processor time of the run, without the time to read the data.
    """

    figure: float
    upper_loss: float
    diverged: bool
    halfway: float | None
    pruned: bool
    rounds: int
    megabytes: float
    seconds: float


def run(
    pair: Pair,
    algorithm: str,
    settings: Mapping[str, Any],
    seed: int,
    *,
    hopeless: Callable[[float], bool] = lambda halfway: False,
) -> Outcome:
    """Run one method for the rounds of the pair, with data and draws of this seed.

    hopeless: whether a run with this figure after half of its rounds ends there.
    """
    (problem, clients), began = pair.task.repeated(seed).build(), time.process_time()
    everyone = Population(problem, clients, strategy="vmap")
    start = everyone.measure(everyone.x0, everyone.y0)
    if problem.diagnostics is not None and not callable(problem.x0):  # diagnostics are of a shared x
        start |= problem.diagnostics(problem.x0, problem.y0)
    rows: list[Mapping[str, Any]] = [{"rounds": 0, "megabytes": 0.0, **start}]  # callbacks do not see the start

    halfway: list[float] = []
    pruned = False

    def watch(now: Progress) -> bool:
        nonlocal pruned
        if now.row is None:
            return False
        rows.append(now.row)
        if not halfway and 2 * now.rounds >= pair.num_rounds > now.rounds:
            halfway.append(float(now.row[pair.figure]))
            pruned = hopeless(halfway[0])
        return pruned or not _sound(rows)

    failed = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about steps, which the search varies on purpose
        try:
            result = fb.solve(
                problem,
                clients,
                algorithm,
                num_rounds=pair.num_rounds,
                seed=seed,
                residuals=False,
                callbacks=[watch],
                strategy="vmap",  # a strategy chosen by time would differ between runs
                **{**pair.options, **FORMS.get(algorithm, {}), **settings},
            )
            rows[1:], failed = result.rows[1:], result.stopped == "failed"
        except NonFiniteError:
            failed = True
    failed = failed or not _sound(rows)
    shown = rows[0] if failed else rows[-1]
    return Outcome(
        float(shown[pair.figure]),
        float(shown["upper_loss"]),
        failed,
        halfway[0] if halfway else None,
        pruned and not failed,
        int(rows[-1]["rounds"]),
        float(rows[-1]["megabytes"]),
        time.process_time() - began,
    )


def _sound(rows: list[Mapping[str, Any]]) -> bool:
    """Return whether the upper loss is finite and not far above its start."""
    first, last = (float(row["upper_loss"]) for row in (rows[0], rows[-1]))
    return math.isfinite(last) and last <= max(DIVERGED * abs(first), first + 1)


# ---- what is searched ------------------------------------------------------------------------------------------------


def _log(low: float, high: float) -> optuna.distributions.FloatDistribution:
    return optuna.distributions.FloatDistribution(low, high, log=True)


def _one_of(*values: int) -> optuna.distributions.CategoricalDistribution:
    return optuna.distributions.CategoricalDistribution(values)


class Scales(NamedTuple):
    """The step of x around which the search lies, and the largest curvature of the lower level."""

    upper: float
    curvature: float

    def steps(self, *names: str) -> Distributions:
        inverse = 1 / self.curvature
        known = {"lr_upper": _log(self.upper / 100, self.upper * 100)}
        return {name: known.get(name, _log(0.03 * inverse, 3 * inverse)) for name in names}


def scales(pair: Pair) -> Scales:
    problem, clients = pair.task.repeated(TUNING_SEED).build()
    return Scales(pair.centre, fb.curvature(problem, clients, num_products=10).largest)


def _adam(of: Scales) -> Distributions:
    """Return lengths of Adam's steps per entry; local steps matter only with five of them."""
    gammas = {name: _log(1e-4, 1.0) for name in ("gamma_upper", "gamma_lower", "gamma_system")}
    return {**gammas, "server_damping": _log(1e-8, 0.1), "num_local_steps": _one_of(1, 5)}


THREE = ("lr_upper", "lr_lower", "lr_system")
FORMS: dict[str, Settings] = {"penalty": {"order": 1, "answer": "penalised"}}  # of the recorded searches
RANGES: dict[str, Callable[[Scales], Distributions]] = {
    "fedbio": lambda of: {**of.steps(*THREE), "num_local_steps": _one_of(1, 5)},
    "fedbioacc": lambda of: {**of.steps(*THREE), "num_local_steps": _one_of(1, 5), "momentum": _log(0.02, 0.5)},
    "adasimfbo": _adam,
    "fbo_aggitd": lambda of: {
        **of.steps(*THREE),
        "num_local_steps": _one_of(1, 5),
        "num_lower_rounds": _one_of(1, 3, 5),
    },
    "penalty": lambda of: {
        **of.steps("lr_upper", "lr_lower"),
        "num_local_steps": _one_of(1, 5),
        "penalty": _log(1.0, 300.0),
    },
}


def settings_of(algorithm: str, values: Mapping[str, Any], of: Scales) -> Settings:
    """Return the settings of the algorithm for searched values."""
    found = dict(values)
    if algorithm == "fedbioacc":
        weight = found.pop("momentum")
        return {**found, **{f"momentum_{level}": weight for level in ("upper", "lower", "system")}}
    if algorithm == "adasimfbo":
        local = {"upper": of.upper, "lower": 0.3 / of.curvature, "system": 0.3 / of.curvature}
        for level, step in local.items():
            found |= {f"lr_{level}": step, f"server_lr_{level}": found.pop(f"gamma_{level}") / step}
    return found


def suggested(pair: Pair, algorithm: str, ranges: Distributions) -> Settings:
    """Return searched values close to the settings that the task suggests, for the first trial."""
    own: Settings = {spec.name: spec.default for spec in fields(discovery.algorithm(algorithm))}
    own |= {"lr_upper": pair.centre} | pair.task.suggestions(algorithm)
    own |= {"momentum": own.get("momentum_upper")}
    own |= {f"gamma_{level}": own.get(f"lr_{level}", 1.0) * 0.1 for level in ("upper", "lower", "system")}
    chosen: Settings = {}
    for name, kind in ranges.items():
        if isinstance(kind, optuna.distributions.FloatDistribution):
            chosen[name] = min(max(float(own[name]), kind.low), kind.high)
        elif isinstance(kind, optuna.distributions.CategoricalDistribution):
            chosen[name] = own[name] if own[name] in kind.choices else kind.choices[0]
    return chosen


# ---- the search ------------------------------------------------------------------------------------------------------


def search(pair: Pair, name: str, algorithm: str, place: Path, *, num_trials: int, deadline: float) -> None:
    """Run trials until there are `num_trials` or the deadline has passed; trials are kept in a file.

    Later trials learn from earlier ones by a tree-structured Parzen estimator. Trials in the file
    are not repeated. A trial that diverged is worse than all others. From the eleventh trial on, a
    trial ends after half of its rounds if it is then worse than the median of earlier trials there.
    """
    kept = json.loads(place.read_text()) if place.exists() else {"trials": []}
    of = Scales(**kept["scales"]) if "scales" in kept else scales(pair)
    kept["scales"] = of._asdict()
    ranges = RANGES[algorithm](of)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    while len(kept["trials"]) < num_trials and time.time() < deadline:
        done = kept["trials"]
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=zlib.crc32(f"{name} {algorithm} {len(done)}".encode()))
        )
        if not done:
            study.enqueue_trial(suggested(pair, algorithm, ranges))
        for one in done:
            study.add_trial(
                optuna.trial.create_trial(params=one["values"], distributions=ranges, value=_score(pair, one, done))
            )
        values = study.ask(ranges).params
        settings = settings_of(algorithm, values, of)
        outcome = run(pair, algorithm, settings, TUNING_SEED, hopeless=_median_rule(pair, done))
        done.append({"values": values, "settings": settings, **outcome._asdict()})
        write(place, kept)


def best(pair: Pair, place: Path) -> Settings:
    """Return the settings of the best trial that ran for all rounds."""
    trials = json.loads(place.read_text())["trials"]
    found: Settings = min((one for one in trials if not one["pruned"]), key=lambda one: _score(pair, one, trials))[
        "settings"
    ]
    return found


def _median_rule(pair: Pair, trials: list[Mapping[str, Any]]) -> Callable[[float], bool]:
    sign = -1.0 if pair.maximise else 1.0
    others = [sign * one["halfway"] for one in trials if one["halfway"] is not None and not one["diverged"]]
    return lambda halfway: len(trials) >= NUM_WHOLE and bool(others) and sign * halfway > median(others)


def _score(pair: Pair, trial: Mapping[str, Any], trials: list[Mapping[str, Any]]) -> float:
    """Return a number of which lower is better: minus the figure, or the figure if it is a loss."""
    sign = -1.0 if pair.maximise else 1.0
    if not trial["diverged"]:
        return sign * float(trial["figure"])
    sound = [sign * float(one["figure"]) for one in trials if not one["diverged"]]
    return max(sound, default=0.0) + 1.0


def write(place: Path, content: Any) -> None:
    """Write JSON so that an interruption leaves the old file or the new one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(place)
