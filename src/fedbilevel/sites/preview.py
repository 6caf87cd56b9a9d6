"""A preview of a run for the site's operator: how much would leave the site, and how often."""

from __future__ import annotations

from typing import Any

from fedbilevel.data.clients import Holdings
from fedbilevel.errors import FedBilevelError
from fedbilevel.loop import run
from fedbilevel.sites.plan import Plan
from fedbilevel.sites.policy import SiteSettings
from fedbilevel.tasks.task import Shapes

_SAMPLES = 32  # samples of each role: the costs of a round do not depend on their number


def preview(plan: Plan, name: str, settings: SiteSettings) -> dict[str, Any]:
    """Run the plan's first outer iteration in this process, on a few of this site's own samples as every client's data,
    and count what the clients of this site send. Empty where the plan or the data do not allow it: joining then says why."""
    try:
        holdings = settings.holdings(plan, name)[0]
        shapes = Shapes.of(holdings, plan.num_classes)
        few = _few(holdings)
        options = {key: value for key, value in plan.keywords().items() if key != "device"}
        problem, algorithm = plan.built_task().problem(shapes), plan.built_algorithm()
        result = run(algorithm, problem, [few] * plan.num_clients, num_iterations=1, measure_every=1, residuals=False, **options)
    except (FedBilevelError, OSError):
        return {}
    rounds, share = result.ledger["rounds"], lambda paid: paid // plan.num_clients * len(plan.numbers(name))
    return {
        "rounds_per_iteration": rounds,
        "floats_per_iteration": share(result.ledger["floats_up"]),
        "total_rounds": rounds * plan.num_iterations,
        "total_bytes": share(result.ledger["bytes_up"]) * plan.num_iterations,
        "by_phase": {phase: share(paid["floats_up"]) for phase, paid in result.ledger.phases.items()},
        "stays_here": [part for part, kept in (("x", problem.scopes.upper == "private"), ("y", problem.scopes.lower == "local")) if kept],
    }


def _few(holdings: Holdings) -> Holdings:
    return {role: {field: rows[:_SAMPLES] for field, rows in fields.items()} for role, fields in holdings.items()}
