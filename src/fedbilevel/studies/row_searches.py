"""Searches of the settings of a row: a grid, a Latin hypercube, or Optuna."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from fedbilevel import discovery
from fedbilevel.errors import SettingError


class Grid:
    """A search over all combinations of the values, in the order of the lists."""

    def __init__(self, ranges: Mapping[str, list[Any]]) -> None:
        self.left: Iterator[tuple[Any, ...]] = itertools.product(*ranges.values())
        self.names = list(ranges)

    def ask(self, number: int) -> list[dict[str, Any]]:
        return [dict(zip(self.names, values, strict=True)) for values in itertools.islice(self.left, number)]

    def tell(self, values: Mapping[str, Any], score: tuple[int, float, float]) -> None:
        """Ignore the score, because a grid does not depend on it."""


class Hypercube:
    """A search whose trials are independent of each other's results.

    The first trial has the row's own values. The others are a Latin hypercube: each setting has one
    value in each of as many equal parts of its range as there are trials. A draw depends on the
    seed, the name of the setting and the number of the trial only, so rows with the same settings
    get the same relative points, and trials may run in any order and in any number of processes.
    """

    def __init__(self, ranges: Mapping[str, Any], start: Mapping[str, Any], num_trials: int, seed: int) -> None:
        own = {name: start[name] for name in ranges if name in start}
        rest = num_trials - (len(own) == len(ranges))
        places = {name: _places(name, rest, seed) for name in ranges}
        drawn = [{name: _value(values, places[name][t]) for name, values in ranges.items()} for t in range(rest)]
        self.left: Iterator[dict[str, Any]] = iter([own, *drawn] if rest < num_trials else drawn)

    def ask(self, number: int) -> list[dict[str, Any]]:
        return list(itertools.islice(self.left, number))

    def tell(self, values: Mapping[str, Any], score: tuple[int, float, float]) -> None:
        """Ignore the score, because trials do not depend on it."""


class Optuna:
    """A search by a tree-structured Parzen estimator with a fixed seed.

    The same scores and the same number of processes give the same trials.
    """

    def __init__(self, ranges: Mapping[str, Any], num_trials: int, seed: int) -> None:
        if find_spec("optuna") is None:
            raise SettingError(
                "a search over ranges needs Optuna, which is not installed: "
                "pip install 'fedbilevel[tune]', or give lists of values."
            )
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(5, num_trials // 3))
        )
        self.space = {name: _distribution(optuna.distributions, name, values) for name, values in ranges.items()}
        self.left, self.open = num_trials, dict[str, list[Any]]()

    def ask(self, number: int) -> list[dict[str, Any]]:
        number = min(number, self.left)
        self.left -= number
        asked = []
        for _ in range(number):
            trial = self.study.ask(self.space)
            values = {
                name: float(f"{value:.3g}") if isinstance(value, float) else value
                for name, value in trial.params.items()
            }
            self.open.setdefault(json.dumps(values), []).append(trial)  # rounded values may repeat
            asked.append(values)
        return asked

    def tell(self, values: Mapping[str, Any], score: tuple[int, float, float]) -> None:
        missing, figure, other = score
        self.study.tell(
            self.open[json.dumps(values)].pop(), figure if not missing else 1e9 * missing + math.tanh(other)
        )


def _distribution(kinds: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return kinds.CategoricalDistribution(values)
    kind = kinds.IntDistribution if values.get("whole") else kinds.FloatDistribution
    return kind(values["low"], values["high"], log=not values.get("linear", False))


def _places(name: str, number: int, seed: int) -> list[float]:
    """Return one draw in each of `number` equal parts of [0, 1), in a random order."""
    draws = random.Random(f"{seed} {name}")
    return [(part + draws.random()) / number for part in draws.sample(range(number), number)]


def _value(values: Any, place: float) -> Any:
    if isinstance(values, list):
        return values[int(place * len(values))]
    low, high = values["low"], values["high"]
    found = low + place * (high - low) if values.get("linear") else low * (high / low) ** place
    return round(found) if values.get("whole") else float(f"{found:.3g}")


def own_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a row's algorithm by dotted name; what the row does not give has its default."""
    given = settings.get("algorithm", {})
    kind = discovery.algorithms().get(given.get("name", ""))
    defaults = {} if kind is None else {spec.name: spec.default for spec in dataclasses.fields(kind)}
    return {f"algorithm.{name}": value for name, value in {**defaults, **given}.items()}


def around(settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return ranges from 1/factor to factor times every step size of a row's algorithm."""
    return {
        name: {"low": value / factor, "high": value * factor}
        for name, value in own_values(settings).items()
        if name.startswith("algorithm.lr_") and isinstance(value, int | float)
    }
