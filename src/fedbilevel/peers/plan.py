"""Plan of a run between peers: a file without paths or code that is the same at all peers.

name = "influence"        # also names the folder at every peer
num_iterations = 1        # omit it for the suggestion of the task
measure_every = 5         # outer iterations between measurements
num_classes = 10          # if labels are classes: a peer may lack some
quorum = 3                # smallest number of peers that continues the run; default: more than half
suspect = 10.0            # seconds of silence after which a peer is gone
join_deadline = 300.0     # seconds to wait for the others at the start
on_change = "restart"     # when a peer joins or is lost: "restart" the outer iteration, or
                          # "continue" it (robust averages only)
on_crash = "reclaim"      # with "continue", effect of a lost peer on a robust average: "reclaim",
                          # "absorb" or "restart"
[task]                    # name and settings; settings of the data are ignored
[algorithm]               # name and settings of an algorithm between peers
[options]                 # seed, batch_size, dtype ..., as in a run in one process
[options.network]         # which peer sends to which; loss: share of messages dropped on purpose
[options.averaging]       # kind: push_sum, gossip, exact or robust
[options.aggregation]     # robust and compress of rows that peers send in averages of kind gossip
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fedbilevel import discovery
from fedbilevel.aggregation.validity import check_peers
from fedbilevel.engines.peer_verbs import check_verbs
from fedbilevel.errors import PlanError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.peers.engine import OnCrash
from fedbilevel.runs.options import keywords
from fedbilevel.runs.runfile import check_options, check_seconds, parts_of, read_toml, used, without_name
from fedbilevel.settings import made
from fedbilevel.tasks.task import Task


@dataclass(frozen=True)
class PeerPlan:
    """Checked plan; `task` and `algorithm` contain a name and the settings."""

    name: str
    num_iterations: int
    task: dict[str, Any]
    algorithm: dict[str, Any]
    options: dict[str, Any]
    measure_every: int | None = None
    num_classes: int | None = None
    quorum: int = 1
    suspect: float = 10.0
    join_deadline: float = 300.0
    on_change: str = "restart"
    on_crash: OnCrash = "reclaim"

    def asdict(self) -> dict[str, Any]:
        return dict(vars(self))

    def digest(self) -> bytes:
        return hashlib.blake2b(json.dumps(self.asdict(), sort_keys=True).encode(), digest_size=16).digest()

    def built_task(self) -> Task:
        return made(discovery.task(self.task["name"]), without_name(self.task))

    def built_algorithm(self) -> PeerAlgorithm:
        algorithm = made(discovery.algorithm(self.algorithm["name"]), without_name(self.algorithm))
        if not isinstance(algorithm, PeerAlgorithm):
            known = ", ".join(name for name, kind in discovery.algorithms().items() if issubclass(kind, PeerAlgorithm))
            raise PlanError(f"{algorithm.name()} has a server, and peers have none: choose one of {known}.")
        if algorithm.auto_names():
            raise PlanError(
                f"{algorithm.auto_names()[0]} of the plan is 'auto', but peers cannot measure one step for all: give a "
                "number, e.g. one that fb.suggest_steps finds for a part of the data."
            )
        return algorithm

    def keywords(self) -> dict[str, Any]:
        return {"network": Network(), "averaging": None, **keywords(self.options)}


def plan_of(content: Mapping[str, Any], num_peers: int) -> PeerPlan:
    """Check a plan, fill in its defaults, and return it."""
    parts = parts_of(content, "peers")
    given = {name: value for name in ("on_change", "on_crash") if (value := content.get(name)) is not None}
    seconds: dict[str, Any] = {
        name: float(value) for name in ("suspect", "join_deadline") if (value := content.get(name)) is not None
    }
    quorum = content.get("quorum")
    plan = PeerPlan(**parts, **given, **seconds, quorum=num_peers // 2 + 1 if quorum is None else quorum)
    _check(plan, num_peers)
    return plan


def read_plan(path: Path, num_peers: int) -> PeerPlan:
    return plan_of(used(read_toml(path), "peers", str(path)), num_peers)


def _check(plan: PeerPlan, num_peers: int) -> None:
    if plan.quorum > num_peers:
        raise PlanError(f"the quorum is {plan.quorum}, but there are {num_peers} peers: lower it.")
    check_seconds(plan, ("suspect", "join_deadline"))
    for name, choices in (("on_change", ("restart", "continue")), ("on_crash", get_args(OnCrash))):
        if getattr(plan, name) not in choices:
            raise PlanError(
                f"{name} of the plan is {getattr(plan, name)!r}, expected {' or '.join(map(repr, choices))}."
            )
    options, verbs = plan.keywords(), plan.built_algorithm().verbs()
    check_options(options)
    network = options["network"]
    averaging = options["averaging"] or Averaging(kind="robust" if network.faulty else "push_sum")
    if network.max_delay or network.activity < 1:
        raise PlanError(
            "the network of the plan delays messages or lets peers sleep, which only a simulation can do: "
            "remove max_delay and activity."
        )
    if "running_push" in verbs:
        raise PlanError(
            f"{plan.algorithm['name']} keeps running sums of every edge, which only a simulation does: use sgp, or hgp "
            "with robust averages."
        )
    if network.upper is not None:
        raise PlanError("the plan gives x a network of its own, which only a simulation can do: remove upper_kind.")
    if network.kind == "file":
        raise PlanError("the network of the plan is a file, and nothing in a plan may be a path: use another kind.")
    given = plan.options.get("averaging", {})
    if averaging.kind == "robust" and "num_steps" in given:
        raise PlanError(
            "a robust average between peers ends when all agree, not after a number of steps: "
            "give a tolerance instead of num_steps, or neither."
        )
    if averaging.kind != "robust" and averaging.tolerance is not None:
        raise PlanError(
            f"with {averaging.kind} averages no peer detects whether all agree: "
            "give num_steps instead of a tolerance, or use kind 'robust'."
        )
    if plan.on_change == "continue" and (averaging.kind != "robust" or set(verbs) != {"mix"}):
        raise PlanError(
            f"on_change is 'continue', but {plan.algorithm['name']} with these settings exchanges rows step by step, "
            "and a peer that leaves breaks the exchange: use 'restart', or only robust averages."
        )
    check_verbs(plan.built_algorithm(), network, network.between(num_peers), averaging)
    if options.get("aggregation") is not None:
        check_peers(options["aggregation"], plan.built_algorithm(), averaging, network.between(num_peers))
