"""What a site counts before an answer of a run with noise leaves it.

    runs/NAME/privacy.json    the account of a run, against the budget of its plan
    privacy.json              the account of the site over all runs, against `max_epsilon` of its policy

The account of the site is about one sample of it, against everybody, the server too. A release at the
level of examples counts as it is. At the level of clients, another sample moves the row of its client
by up to twice the norm of clipping, so the noise counts half. Without secure sums the server sees the
row itself, which has the noise of one of the `members` of a sum.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedbilevel.aggregation.layer import Layer
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.engines.layered import account_of, events
from fedbilevel.errors import BudgetError, PolicyError
from fedbilevel.privacy.accountant import Accountant, Budget, Release
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.pace import checked_pace
from fedbilevel.runs.privacy_account import attach, planned
from fedbilevel.sites.membership import fewest_clients
from fedbilevel.sites.plan import SitePlan
from fedbilevel.sites.policy import Policy

LOCK = "privacy.lock"
_SAMPLES = 32  # of each role, for the first outer iteration of a plan: releases do not depend on their number
_NOT_HERE = ("device", "schedule", "cohort", "aggregation")


class Spending:
    """The account of one run at a site and of the site itself, whatever the server counts.

    A phase may store values at the site before its releases are counted. If they do not fit into a
    budget, nothing computed from them may leave, so every later phase is refused until the site has
    loaded a version, which holds values that were counted.
    """

    def __init__(
        self, layer: Layer | None, run_folder: Path, site_folder: Path, plan: SitePlan, policy: Policy
    ) -> None:
        self._layer, self._folder, self._plan, self._refusal = layer, site_folder, plan, ""
        self.account = account_of(layer)
        self._site: Accountant | None = None
        if policy.max_epsilon is not None:
            if self.account is None:
                raise PolicyError(
                    "this site's policy has a line 'max_epsilon', and the plan has no noise: set aggregation.noise "
                    "in the plan, or run without this site."
                )
            self._site = Accountant(Budget(policy.max_epsilon, policy.max_delta), run=plan.name)
        if self.account is not None:
            attach(self.account, run_folder)

    def check_plan(self, problem: Problem, holdings: Holdings) -> None:
        """Raise if the whole plan does not fit into the account of the site.

        The plan ends at its own budget. What it has released before, as before a restart, is a part
        of it. Outer iterations that are repeated come on top, and are counted when they happen.
        """
        if self._site is None or self.account is None or self._layer is None:
            return
        plan, settings = self._plan, self._layer.settings
        options = {key: value for key, value in plan.keywords().items() if key not in _NOT_HERE}
        releases = planned(settings, plan.built_algorithm(), problem, [few(holdings)] * 2, **options)
        left = releases.left(checked_pace(plan.num_iterations, plan.num_rounds, plan.measure_every))
        left = Accountant(self.account.budget).rounds_left(releases.each, left)
        with self._shared():
            others = Accountant(self._site.budget, run=plan.name)
            spent = {run: counts for run, counts in self._site.state_dict().items() if run != plan.name}
        others.merge(spent)
        end = others.forecast(1, self._of_one_sample(releases.whole(left)))
        if end > others.budget.epsilon:
            raise PolicyError(
                f"this site's policy allows epsilon {others.budget.epsilon:g} over all runs, other runs have used "
                f"{others.epsilon():.4g}, and the plan would raise it to {end:.4g}: shorten the plan or add noise, or "
                "raise the line 'max_epsilon' there."
            )

    def check(self) -> None:
        """Raise if values of the site hold releases that were not counted."""
        if self._refusal:
            raise BudgetError(self._refusal)

    def spend(self, num_sums: int, derived: Mapping[int, int]) -> None:
        """Count the releases of a call, or raise so that nothing leaves.

        num_sums: sequences that leave.
        derived: noisy derivatives, by the number of their sums.
        """
        if self.account is None or self._layer is None:
            return
        found = events(self._layer.settings, num_sums, derived)
        if not found:
            return
        try:
            self.account.spend(found)
            if self._site is not None:
                with self._shared():
                    self._site.spend(self._of_one_sample(found))
        except BaseException as error:
            self._refusal = f"an earlier answer was not allowed: {str(error).removesuffix('.')}."
            raise

    def loaded(self) -> None:
        """Note that the values of the site are those of a version."""
        self._refusal = ""

    def figures(self) -> dict[str, float]:
        """Return epsilon of the site over all runs, and its limit, for the operator."""
        return {} if self._site is None else {
            "epsilon": self._site.epsilon(), "max_epsilon": self._site.budget.epsilon
        }  # fmt: skip

    def _of_one_sample(self, found: Sequence[Release]) -> list[Release]:
        """Return releases as they concern one sample of this site."""
        assert self._layer is not None
        less = weaker(self._layer.settings, fewest_clients(self._plan))
        return [one._replace(noise=one.noise / less) for one in found]

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Read the account of the site, which jobs of other runs may have written, and keep it locked."""
        assert self._site is not None
        with open(self._folder / LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            attach(self._site, self._folder)
            yield


def weaker(settings: Aggregation, members: int) -> float:
    """Return the factor by which the noise is smaller for one sample against the server.

    members: fewest clients whose noise is in a sum.
    """
    if settings.level == "example":
        return 1.0
    return 2.0 if settings.secure else 2.0 * math.sqrt(members)


def few(holdings: Holdings) -> Holdings:
    """Return a few samples of each role."""
    return {role: {field: rows[:_SAMPLES] for field, rows in fields.items()} for role, fields in holdings.items()}
