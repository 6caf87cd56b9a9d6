"""Ranges of a search: given by the user, or around a scale that is measured on the problem.

A step of y or u has the scale 1/L, where L is the largest curvature of a client's lower loss. The
step of x has the scale |x| / |hypergradient|, at which one step changes x by about its own size.
Both are independent of the units of the losses.
"""

from __future__ import annotations

import dataclasses
import math
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.errors import FedBilevelError, RecoveryWarning, SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.endings import whole
from fedbilevel.runs.solve import solve
from fedbilevel.runs.step_sizes import curvature
from fedbilevel.settings import kinds

Range = tuple[float, float] | list[Any]  # ends on a logarithmic scale, or the values to try

# default ends of the range of a step, relative to its scale; a shorter step of y does not converge in any useful time
UPPER, LOWER = (3e-3, 3e1), (1e-2, 1e1)
_WARM_UP = 30  # rounds in which y and u approach their solutions, so that the direction of x is meaningful
_TINY = 1e-6  # step of x during this warm-up: x stays in place, and its displacement shows the direction


class Scales(NamedTuple):
    """Scales of the steps, and the rounds that their measurement took.

    A scale is 1 if it cannot be measured.
    """

    upper: float
    lower: float
    rounds: int

    def around(self, step: str, start: Any = None) -> Range:
        """Return the default range of a step, extended to the value to start with."""
        scale, (low, high) = (self.upper, UPPER) if step == "lr_upper" else (self.lower, LOWER)
        known = [float(start)] if isinstance(start, int | float) else []
        return min([low * scale, *known]), max([high * scale, *known])


def measured(problem: Problem, clients: Sequence[Holdings], options: Mapping[str, Any]) -> Scales:
    """Measure the scales in float64.

    options: keywords of `solve`, of which those about batches and computing apply here, too.
    """
    try:
        found = curvature(problem, clients, num_products=10)
    except (FedBilevelError, RuntimeError):  # torch raises RuntimeError where a derivative is missing
        return Scales(1.0, 1.0, 0)
    if not 0 < found.largest < math.inf:
        return Scales(1.0, 1.0, found.ledger["rounds"])
    lower = 1 / found.largest
    wanted = ("batch_size", "sampling", "device", "strategy", "chunk_size")
    given = {name: options[name] for name in wanted if name in options}
    still = FedBiO(lr_upper=_TINY, lr_lower=lower / 2, lr_system=lower / 2, num_local_steps=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecoveryWarning)  # x hardly moves on purpose
            start, end = (
                _flat(
                    whole(
                        solve(
                            problem, clients, still, num_iterations=number, measure_every=_WARM_UP, residuals=False,
                            recover=False, dtype=torch.float64, **given,
                        )
                    ).x
                )
                for number in (0, _WARM_UP)
            )  # fmt: skip
    except (FedBilevelError, RuntimeError):
        return Scales(1.0, _short(lower), found.ledger["rounds"])
    size = max(1.0, float(start.square().mean().sqrt())) * math.sqrt(len(start))
    direction = float(torch.linalg.vector_norm(end - start)) / (_TINY * _WARM_UP)
    upper = size / direction if direction > 0 else 1.0
    return Scales(_short(upper), _short(lower), found.ledger["rounds"] + _WARM_UP)


def _short(scale: float) -> float:
    """Round to two digits, so that machines with different rounding search the same ranges."""
    return float(f"{scale:.2g}")


def _flat(x: Any) -> Tensor:
    trees = x if isinstance(x, list) else [x]
    return torch.cat([leaf.detach().double().cpu().flatten() for tree in trees for leaf in tree.values()])


def steps_of(kind: type[Algorithm]) -> list[str]:
    """Return the step sizes of an algorithm.

    Multiples of other steps, such as server_lr_upper, are not among them.
    """
    return [spec.name for spec in dataclasses.fields(kind) if spec.name.startswith("lr_")]


def given_ranges(ranges: Any, algorithms: Mapping[str, Algorithm]) -> dict[str, dict[str, Range]]:
    """Return the user's ranges by algorithm and setting, checked.

    ranges: {setting: range} for every algorithm with that setting, or {algorithm: {setting:
        range}}; the ranges of one algorithm replace those of all.
    """
    if not isinstance(ranges, Mapping | None):
        raise SettingError(f"ranges is {ranges!r:.80}, expected a dict, e.g. {{'lr_upper': (0.001, 10)}}, or None.")
    found: dict[str, dict[str, Range]] = {name: {} for name in algorithms}
    hints = {name: typing.get_type_hints(type(one)) for name, one in algorithms.items()}
    fields = {name: [spec.name for spec in dataclasses.fields(type(one))] for name, one in algorithms.items()}
    for key, value in sorted((ranges or {}).items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping):
            if key not in algorithms:
                raise UnknownNameError("algorithm in this search", key, algorithms)
            for setting, one in value.items():
                if setting not in fields[key]:
                    raise UnknownNameError(f"setting of {key}", setting, fields[key])
                found[key][setting] = _checked(setting, one, hints[key][setting])
            continue
        having = [name for name in algorithms if key in fields[name]]
        if not having:
            raise UnknownNameError(
                "setting of these algorithms", key, {name for own in fields.values() for name in own}
            )
        for name in having:
            found[name][key] = _checked(key, value, hints[name][key])
    return found


def _checked(setting: str, value: Any, hint: Any) -> Range:
    if isinstance(value, list) and value:
        return value
    ends = list(value) if isinstance(value, tuple) else []
    number = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not number or not 0 < ends[0] < ends[1] < math.inf:
        raise SettingError(
            f"the range of {setting} is {value!r:.80}, expected (low, high) with 0 < low < high, "
            "or a list of the values to try."
        )
    whole = float not in kinds(hint)
    if whole and (int not in kinds(hint) or not all(isinstance(end, int) for end in ends)):
        raise SettingError(
            f"the range of {setting} is {value!r:.80}, but that setting is not a decimal number: "
            "give whole numbers, or a list of the values to try."
        )
    return (ends[0], ends[1]) if whole else (float(ends[0]), float(ends[1]))
