"""The account of epsilon over all sequences, rounds, measurements and resumes.

The account only grows. It counts releases by run, noise and rate, and is stored before a release
happens. A run that resumes from an old checkpoint keeps what was spent after the checkpoint, and
pays again for the rounds that it repeats. opacus computes epsilon from the counts.

Several sequences of one round see the same clients or samples. Each is clipped and noised by
itself, with multipliers z_1, ..., z_k. Scaled by its noise, the round is one Gaussian vector, and
one row moves it by at most sqrt(sum z_i^-2). It is therefore one release with the multiplier
(sum z_i^-2)^(-1/2), which is z / sqrt(k) if all are equal. Counting k releases would be wrong for
sampled rows, because the k sums share one sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from fedbilevel.errors import BudgetError, CheckpointError, NonFiniteError, SettingError

Method = Literal["rdp", "prv"]
NEEDS = "differential privacy needs opacus, which is not installed: pip install 'fedbilevel[privacy]'."
_SLOW = 500.0  # epsilon from which the PRV accountant takes minutes
_MOST = 10**9  # releases of one kind

Key = tuple[float, float]  # noise multiplier, rate
Counts = dict[Key, int]
State = dict[str, list[list[float]]]  # by run: [noise, rate, count]


@dataclass(frozen=True)
class Budget:
    """The most privacy that may be spent: (epsilon, delta)."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise SettingError(f"epsilon of the privacy budget is {self.epsilon}, expected a positive number.")
        if not 0 < self.delta < 1:
            raise SettingError(f"delta of the privacy budget is {self.delta}, expected a number between 0 and 1.")


class Release(NamedTuple):
    """Noisy sums of the same kind.

    noise: noise multiplier.
    rate: probability with which each row takes part, drawn independently of other rows. Give 1 for
        any other way of sampling: batches and cohorts of a fixed size have no smaller epsilon here.
    times: number of such sums.
    """

    noise: float
    rate: float = 1.0
    times: int = 1

    def check(self) -> None:
        """Raise unless all numbers are usable. No noise and unknown noise are no privacy."""
        if not (math.isfinite(self.noise) and self.noise > 0):
            raise NonFiniteError(f"the noise multiplier of a release is {self.noise}, expected a positive number.")
        if not 0 < self.rate <= 1:
            raise NonFiniteError(f"the rate of a release is {self.rate}, expected more than 0 and at most 1.")
        if not (type(self.times) is int and 0 < self.times <= _MOST):
            raise NonFiniteError(f"the number of times of a release is {self.times}, expected a positive integer.")


def joint(noises: Iterable[float], rate: float = 1.0, times: int = 1) -> Release:
    """Return several sums of the same rows as one release."""
    each = [Release(noise, rate, times) for noise in noises]
    for one in each:
        one.check()
    return Release(1 / math.sqrt(sum(one.noise**-2 for one in each)), rate, times)


class Accountant:
    """Counts releases, computes epsilon, and refuses what would exceed the budget.

    method: `rdp` (Renyi, fast, an upper bound) or `prv` (numerical, tighter, seconds per figure).
    run: name of the run whose releases are counted. Epsilon covers all runs of the account.
    keep: stores the account. `spend` calls it before it returns, and releases nothing if it raises.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        method: Method = "rdp",
        run: str = "run",
        keep: Callable[[State], None] = lambda state: None,
    ) -> None:
        if method not in get_args(Method):
            raise SettingError(f"the accountant is {method!r}, expected 'rdp' or 'prv'.")
        _opacus()  # before the run, not at its first release
        self.budget, self.method, self._run, self.keep = budget, method, run, keep
        self._runs: dict[str, Counts] = {}

    def spend(self, releases: Sequence[Release]) -> float:
        """Count releases that are about to happen, and return epsilon with them."""
        after = self._with(releases)
        epsilon = self._epsilon(after)
        if epsilon > self.budget.epsilon:
            raise BudgetError(
                f"a release would raise epsilon from {self.epsilon():.4g} to {epsilon:.4g}, above the budget of "
                f"{self.budget.epsilon:.4g} at delta {self.budget.delta:.1g}: nothing is released; stop here, or "
                "agree on a larger budget."
            )
        self.keep(_state(after))
        self._runs = after
        return epsilon

    def epsilon(self) -> float:
        """Return epsilon of everything that was spent."""
        return self._epsilon(self._runs)

    def forecast(self, rounds: int, releases: Sequence[Release]) -> float:
        """Return epsilon after further rounds, each with these releases. Nothing is spent."""
        return self._epsilon(self._with(releases, rounds))

    def rounds_left(self, releases: Sequence[Release], most: int = 10**6) -> int:
        """Return how many rounds with these releases fit into the budget, at most `most`."""
        fits = lambda rounds: rounds == 0 or self.forecast(rounds, releases) <= self.budget.epsilon
        low, high = 0, 1
        while high < most and fits(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def state_dict(self) -> State:
        """Return the counts by run, as values for JSON."""
        return _state(self._runs)

    def merge(self, state: Any) -> None:
        """Add a stored account. Of two counts of the same releases the higher one stays, so an old
        checkpoint never lowers the account."""
        for run, counts in _read(state).items():
            known = self._runs.setdefault(run, {})
            for key, count in counts.items():
                known[key] = max(count, known.get(key, 0))

    def _with(self, releases: Sequence[Release], rounds: int = 1) -> dict[str, Counts]:
        counts = dict(self._runs.get(self._run, {}))
        for release in releases:
            release.check()
            key = (float(release.noise), float(release.rate))
            counts[key] = counts.get(key, 0) + release.times * rounds
        return {**self._runs, self._run: counts}

    def _epsilon(self, runs: Mapping[str, Counts]) -> float:
        total: Counts = {}
        for counts in runs.values():
            for key, count in counts.items():
                total[key] = total.get(key, 0) + count
        history = [(*key, count) for key, count in sorted(total.items()) if count]
        found = _figure("rdp", history, self.budget.delta)
        if self.method == "rdp" or not history:
            return found
        if found > _SLOW:
            raise SettingError(
                f"epsilon is about {found:.4g}, above {_SLOW:.0f}, where 'prv' takes minutes: use 'rdp'."
            )
        return min(found, _figure("prv", history, self.budget.delta))  # both are upper bounds


def _figure(method: Method, history: list[tuple[float, float, int]], delta: float) -> float:
    """Ask opacus."""
    if not history:
        return 0.0
    accountants = _opacus()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the order is the last of its range, or log(0): bounds stay valid
        if method == "rdp":
            orders = accountants.RDPAccountant.DEFAULT_ALPHAS
            total = sum(count * _divergences(noise, rate) for noise, rate, count in history)
            found = float(accountants.analysis.rdp.get_privacy_spent(orders=orders, rdp=total, delta=delta)[0])
        else:
            accountant = accountants.PRVAccountant()
            accountant.history = history
            found = float(accountant.get_epsilon(delta))
    if not math.isfinite(found):
        raise NonFiniteError(f"epsilon of the releases is {found}, expected a finite number: use more noise.")
    return max(found, 0.0)


@lru_cache(maxsize=1024)
def _divergences(noise: float, rate: float) -> Any:
    """Return the Renyi divergences of one release, by order. Those of several releases add up."""
    accountants = _opacus()
    orders = accountants.RDPAccountant.DEFAULT_ALPHAS
    return accountants.analysis.rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


def _opacus() -> Any:
    try:
        from opacus import accountants
    except ImportError:
        raise SettingError(NEEDS) from None
    return accountants


def _state(runs: Mapping[str, Counts]) -> State:
    return {run: [[*key, count] for key, count in sorted(counts.items())] for run, counts in sorted(runs.items())}


def _read(state: Any) -> dict[str, Counts]:
    """Read a stored account. A damaged account is no empty account."""
    try:
        found = {str(run): {(noise, rate): count for noise, rate, count in rows} for run, rows in state.items()}
        for run in found.values():
            for (noise, rate), count in run.items():
                Release(noise, rate, count).check()
    except (AttributeError, TypeError, ValueError, NonFiniteError):
        raise CheckpointError(
            "the stored account of privacy cannot be read: put back a copy, or start with other data."
        ) from None
    return found
