"""A quadratic whose lower loss has a minimum in x and y together: a body and heads.

g_i(x, y) = 1/2 y'A_i y - y'(B_i x + c_i) + rho/2 |x|^2
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import small, start_at

RHO = 12.0


def bodies(x: Any, y: Any, **settings: Any) -> tuple[Quadratic, Built]:
    task = small(lower="local", **settings)
    problem, clients = start_at(task, x, y)
    plain = problem.lower
    lower = lambda x, y, batch: plain(x, y, batch) + 0.5 * RHO * (x["x"] ** 2).sum()
    return task, Built(dataclasses.replace(problem, lower=lower, diagnostics=None), clients)


def gx(b: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.mean([-B.T @ y for B in b["B"]], axis=0) + RHO * x
