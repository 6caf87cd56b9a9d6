"""The account of privacy as a file, which outlives checkpoints.

    privacy.json    counts of releases by run, noise and rate

The file is not part of a checkpoint: resuming from an old checkpoint does not restore an old account.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.engines.ranks import Group
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.privacy.accountant import Accountant, Budget, Method, Release, State, joint
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.pace import Pace
from fedbilevel.runs.record import write_whole

FILE = "privacy.json"


def account_in(folder: Path, budget: Budget, *, method: Method = "rdp", run: str = "run") -> Accountant:
    """Return the account of a folder with all that was spent there. The file is on the disk before a
    release is allowed."""
    accountant = Accountant(budget, method=method, run=run)
    attach(accountant, folder)
    return accountant


def attach(accountant: Accountant, folder: Path | None, group: Group = Group()) -> None:
    """Add what was spent in a folder to an account, and keep the account there from now on.

    group: all ranks have the same account, and the first one writes it.
    """
    if folder is None:
        return
    path = folder / FILE

    def read() -> State:
        try:
            found = json.loads(path.read_bytes())
            Accountant(accountant.budget).merge(found)  # raises for a damaged account
        except FileNotFoundError:
            return {}  # nothing was spent yet
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} holds the account of privacy and cannot be read: put back a copy."
            ) from error
        return found

    accountant.merge(group.told(read))
    if group.rank == 0:
        accountant.keep = lambda state: write_whole(path, json.dumps(state).encode())


class _Counting(Simulation):
    """A simulation that counts the sequences in each mean."""

    def _means(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        self.seen = [*getattr(self, "seen", []), len(sent)]
        return super()._means(sent, places, times)


def sums_of(
    algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], **options: Any
) -> tuple[list[int], list[int]]:
    """Return the numbers of sequences in the means before the first outer iteration, and in it.

    Two clients are enough, because the number of means does not depend on the number of clients.
    """
    few = clients[:2]
    per_client = {key: value[: len(few)] for key, value in algorithm.asdict().items() if isinstance(value, tuple)}
    algorithm = dataclasses.replace(algorithm, **per_client)
    fed = _Counting(algorithm, problem, few, **options)
    fed.seen = []
    with torch.no_grad():
        fed.begin(0)
        state = algorithm.init(fed)
        start, fed.seen = fed.seen, []
        fed.begin(1, algorithm)
        algorithm.round(fed, state)
    return [num for num in start if num], [num for num in fed.seen if num]


class Planned(NamedTuple):
    """Releases and rounds of a run before its first outer iteration, and in each outer iteration."""

    start: list[Release]
    each: list[Release]
    start_rounds: int
    rounds: int

    def left(self, pace: Pace, done: int = 0) -> int:
        """Return the outer iterations of a run that are to come.

        done: outer iterations that are done already.
        """
        left = pace.num_iterations - done
        if pace.num_rounds is not None and self.rounds:
            left = min(left, -(-(pace.num_rounds - self.start_rounds) // self.rounds) - done)
        return max(left, 0)

    def whole(self, left: int, done: int = 0) -> list[Release]:
        """Return the releases of this number of outer iterations, and of the start if nothing is done."""
        each = [one._replace(times=one.times * left) for one in self.each if left > 0]
        return each if done else [*self.start, *each]


class _Noted(Accountant):
    """An account that notes releases and allows all."""

    def spend(self, releases: Sequence[Release]) -> float:
        self.noted = [*getattr(self, "noted", []), *releases]
        return 0.0


def planned(
    settings: Aggregation, algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], **options: Any
) -> Planned:
    """Return what a run with noise releases, from its first outer iteration with two clients.

    Numbers of local steps that differ between clients count as the largest.
    """
    if settings.level == "client":
        assert settings.noise is not None
        noise, sums = settings.noise, sums_of(algorithm, problem, clients, **options)
        start, each = ([joint([noise] * num) for num in some] for some in sums)
        return Planned(start, each, len(start), len(each))
    few = clients[:2]
    per_client = {
        key: (max(value),) * len(few) for key, value in algorithm.asdict().items() if isinstance(value, tuple)
    }
    algorithm = dataclasses.replace(algorithm, **per_client)
    plain = dataclasses.replace(settings, secure=False, compress=None, robust=None, outside=None, sequences=None)
    fed = Simulation(algorithm, problem, few, **{**options, "aggregation": plain})
    assert fed.account is not None
    fed.account = noted = _Noted(fed.account.budget)
    with torch.no_grad():
        fed.begin(0)
        state = algorithm.init(fed)
        before, noted.noted = getattr(noted, "noted", []), []
        rounds = fed.bill().totals()["rounds"]
        fed.begin(1, algorithm)
        algorithm.round(fed, state)
    return Planned(before, noted.noted, rounds, fed.bill().totals()["rounds"] - rounds)


def forecast(account: Accountant, plan: Planned, pace: Pace, done: int = 0) -> str:
    """Return the sentence about epsilon at the end of a run.

    done: outer iterations that are done already.
    """
    left, budget = plan.left(pace, done), account.budget
    end = account.forecast(1, plan.whole(left, done))
    text = f"privacy: epsilon will be about {end:.4g} at delta {budget.delta:.1g}"
    if end <= budget.epsilon:
        return f"{text} after {left} outer iterations, within the budget of {budget.epsilon:.4g}."
    fits = account.rounds_left(plan.each, left)
    return f"{text}, and the run will stop at its budget of {budget.epsilon:.4g} after about {fits} outer iterations."
