"""Recovery of a run that goes wrong: return to its best state with halved steps, a few times."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines.engine import Engine
from fedbilevel.errors import NonFiniteError, RecoveryWarning
from fedbilevel.runs.health import SHORT, Health

ATTEMPTS = 3
UNCHANGED = "the figures hardly changed since the start"
_PREFIX = "best."  # tensors of the best state in a checkpoint
_MOVED = 1e-3  # relative change of x below which it counts as not moved
_TINY = 1e-6  # the same for an x that starts at zero and has no scale


class Recovery:
    """The best state of a run, the factor of its step sizes, and the returns to that state so far.

    The state of the algorithm and all values that clients keep go back; the number of the outer
    iteration and the ledger do not, because those rounds were spent.

    acts: return to the best state; otherwise only judge the measurements.
    shorter, longer: advice on step sizes; an algorithm that measures its own has none to change.
    """

    def __init__(self, fed: Engine, *, acts: bool) -> None:
        self.fed, self.acts, self.health = fed, acts, Health()
        self.factor, self.times, self.iteration = 1.0, 0, 0
        self._best: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None
        self._is_now = False  # the best state is the current one
        has_steps = any(name.startswith("lr_") for name in fed.algorithm.asdict())
        self.shorter = "use shorter steps" if has_steps else "look for the cause with fb.check_problem"
        self.longer = f"use {'longer steps' if has_steps else 'more rounds'}, unless the start is a solution"

    def add(self, row: Mapping[str, Any], state: Any) -> str:
        """Include a measurement and keep the state if it is the best; return what went wrong."""
        y = _vector(state.y)
        wrong = self.health.add(row, None if y is None else float(y.norm()))
        if self.acts and not wrong and self.health.improved:
            self._keep(state)
            self.iteration = row["iteration"]
        return wrong

    def begin(self) -> None:
        """Note that an outer iteration changes the state."""
        self._is_now = False

    def attempt(self, why: str, state_type: Any) -> Any:
        """Return the best state for a run that continues with halved steps, or None."""
        state = self.best(state_type) if self.times < ATTEMPTS else None
        if state is not None:
            self.times += 1
            self.factor /= 2
            self.health.again()
            self._tell(
                f"{why}: the run went back to its state of outer iteration {self.iteration} and halved its "
                f"step sizes ({self.times} of {ATTEMPTS} times)."
            )
        return state

    def best(self, state_type: Any) -> Any:
        """Restore the best state and return it, or None if clients keep values out of reach."""
        if self._best is None:
            return None
        state = self.fed.go_back(*self._best, state_type)
        self._is_now = state is not None
        return state

    def failed(self, why: str, advice: str) -> str:
        """Return the reason of a failure as a sentence, and warn with it."""
        halved = f" after {self.times} returns to it with halved steps" if self.times else ""
        kept = f"; the result is the best state, of outer iteration {self.iteration}{halved}" if self._is_now else ""
        sentence = f"{why.removesuffix('.')}{kept}: {advice}."
        self._tell(f"the run failed: {sentence}")
        return sentence

    def note(self) -> str:
        """Return a remark on a run that did not fail, or ""."""
        if not self.times:
            return ""
        times = "once" if self.times == 1 else f"{self.times} times"
        return f"went back to its best state {times}, steps scaled by {self.factor:g}"

    def check_moved(self, x: Any, iterations: int) -> None:
        """Warn if nothing changed, or if x is where it began although the algorithm learns it."""
        if iterations < SHORT:
            return
        if self.health.is_still() and self.health.is_stalled():
            self._tell(f"{UNCHANGED}: {self.longer}.")
            return
        x0 = self.fed.problem.x0
        algorithm = self.fed.algorithm
        if callable(x0) or x is None or not algorithm.learns_x:
            return
        trees = [x] if isinstance(x, Mapping) else x
        moved = max(_norm({name: tree[name].cpu() - x0[name].cpu() for name in x0}) for tree in trees)
        scale = _norm(x0)
        if moved <= (_MOVED * scale if scale else _TINY * sum(leaf.numel() for leaf in x0.values()) ** 0.5):
            far = f"{moved / scale:.2g} of its norm" if scale else f"a distance of {moved:.2g}"
            advice = "use a longer lr_upper or more rounds" if hasattr(algorithm, "lr_upper") else self.longer
            self._tell(f"x moved by {far} in {iterations} outer iterations: {advice}.")

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the best state, unless it is the current one, and plain values."""
        plain: dict[str, Any] = {
            "health": self.health.asdict(),
            "factor": self.factor,
            "times": self.times,
            "iteration": self.iteration,
            "is_now": self._is_now,
        }
        if self._best is None or self._is_now:
            return {}, plain
        return {f"{_PREFIX}{name}": value for name, value in self._best[0].items()}, {**plain, "best": self._best[1]}

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state: Any) -> None:
        """Restore the values that `state_dict` returned.

        state: restored state of the run.
        """
        self.health = Health(**plain["health"])
        self.factor, self.times, self.iteration = plain["factor"], plain["times"], plain["iteration"]
        if plain["is_now"]:
            self._keep(state)
        elif "best" in plain:
            best = {name.removeprefix(_PREFIX): value for name, value in tensors.items() if name.startswith(_PREFIX)}
            self._best = (best, plain["best"])

    def _keep(self, state: Any) -> None:
        tensors, plain = self.fed.state_dict(state)
        self._best = {name: value for name, value in tensors.items() if not name.startswith("ledger.")}, plain
        self._is_now = True

    def _tell(self, text: str) -> None:
        if self.fed.group.rank == 0:
            warnings.warn(RecoveryWarning(f"{self.fed.algorithm.name()}: {text}"), stacklevel=4)


def out_of_range(iteration: int) -> NonFiniteError:
    """Return the error for a Python number that left its range; tensors become infinite instead."""
    return NonFiniteError(
        f"a number at the server is out of range in outer iteration {iteration}: the upper loss may have no lower "
        "bound, or the steps are too long."
    )


def check_finite(fed: Engine, state: Any, iteration: int) -> None:
    """Raise an error that names the owner of a value that is not finite."""
    for name, value in state._asdict().items():
        if not isinstance(value, Tensor) or math.isfinite(value.sum(dtype=torch.float64).item()):
            continue  # a sum is not finite if an entry is not
        if not bool(torch.isfinite(value).all()):
            whose = "the server's"
            if value.ndim > 1:
                whose = f"client {fed.client_of(int((~torch.isfinite(value)).any(1).nonzero()[0]))}'s"
            raise NonFiniteError(
                f"{whose} {name!r} is not finite after outer iteration {iteration}: the steps are too long; "
                "lower the step sizes."
            )


def _vector(value: Any) -> Tensor | None:
    """Return a vector at the server; values at clients are out of sight."""
    return value if isinstance(value, Tensor) and value.ndim == 1 else None


def _norm(tree: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(leaf.double().norm()) ** 2 for leaf in tree.values()))
