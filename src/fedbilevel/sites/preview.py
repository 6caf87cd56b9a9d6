"""A preview of a run for the site's operator: how much would leave the site, and how often."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from fedbilevel.detectors.detector import Detector
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedBilevelError
from fedbilevel.privacy.accountant import Accountant, Budget
from fedbilevel.runs.pace import checked_pace
from fedbilevel.runs.privacy_account import forecast, planned
from fedbilevel.sites.plan import SitePlan
from fedbilevel.sites.policy import SiteSettings
from fedbilevel.sites.spending import few
from fedbilevel.tasks.task import Shapes

_CLIENTS = 2  # nor on the number of clients; the plan is not approved yet, so the preview stays small
_NOT_HERE = ("device", "schedule", "cohort")


def preview(plan: SitePlan, name: str, settings: SiteSettings) -> dict[str, Any]:
    """Run the plan's first outer iteration in this process, and count what the clients of this site
    would send.

    Every client has a few of this site's own samples as data. The result is {} if the plan or the
    data do not allow the preview, which joining reports, or if it takes longer than an answer may.
    """
    start = time.monotonic()
    try:
        holdings = settings.holdings(plan, name)[0]
        shapes = Shapes.of(holdings, plan.num_classes)
        num = min(_CLIENTS, plan.num_clients)
        options = {key: value for key, value in plan.keywords().items() if key not in _NOT_HERE}
        if (layer := options.get("aggregation")) is not None:  # a robust rule may need more clients, and sends nothing
            budget = None if layer.noise is None else 1e9  # nothing is released here
            options["aggregation"] = dataclasses.replace(layer, robust=None, groups=None, epsilon=budget)
        problem, algorithm = plan.built_task().problem(shapes), plan.built_algorithm()
        per_client = {key: value[:num] for key, value in algorithm.asdict().items() if isinstance(value, tuple)}
        algorithm = dataclasses.replace(algorithm, **per_client)
        algorithm.check_scopes(problem.scopes)
        fed = Simulation(algorithm, problem, [few(holdings)] * num, **options)
        fed.host.before_derivative = lambda: settings.policy.check_seconds(time.monotonic() - start)
        with torch.no_grad():
            fed.begin(0)
            state = algorithm.init(fed)
            fed.begin(1, algorithm)
            algorithm.round(fed, state)
    except (FedBilevelError, OSError):
        return {}
    private = {}
    if fed.account is not None and layer is not None and layer.noise is not None:
        rest = {key: value for key, value in options.items() if key != "aggregation"}
        releases = planned(layer, algorithm, problem, [few(holdings)] * num, **rest)
        account = Accountant(Budget(layer.epsilon, layer.delta))
        pace = checked_pace(plan.num_iterations, plan.num_rounds, plan.measure_every)
        private = {"privacy": forecast(account, releases, pace)}
    ledger = fed.bill().totals()
    asked = plan.keywords()["cohort"].size(plan.num_clients)  # of all clients, at a time
    rounds, share = ledger["rounds"], lambda paid: paid // num * asked // plan.num_clients * len(plan.numbers(name))
    totals = {
        "total_rounds": rounds * plan.num_iterations,
        "total_bytes": share(ledger["bytes_up"]) * plan.num_iterations,
    }
    return {
        "rounds_per_iteration": rounds,
        "floats_per_iteration": share(ledger["floats_up"]),
        **({"varies": True} if isinstance(algorithm, Detector) else totals),  # its outer iterations differ
        "by_phase": {phase: share(paid["floats_up"]) for phase, paid in ledger.phases.items()},
        "stays_here": [
            part
            for part, kept in (("x", problem.scopes.upper == "private"), ("y", problem.scopes.lower == "local"))
            if kept
        ],
        **private,
    }
