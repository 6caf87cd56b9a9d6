"""Error of Hyper-Gradient Push after m = 1, ..., M terms, against the exact hypergradient.

A row has one network, one number of push steps S and one batch size:

    task        {name, ...}     a private x and a lower level with one solution, e.g.
                                regularisation or influence
    training    {kind, ...}     as in studies/influence: newton (y*(x) to rounding) or push;
                                push has its own `batch_size`
    hgp         {lr_system, num_terms, minibatches, num_curvature_products}
    averaging   {num_steps, ...}, network {kind, ...}
    batch_size  training samples of each J u and H u (default: all); the validation gradient that
                starts the estimate uses all samples
    seed        of training, and of the minibatches of HGP in repetition 0

Training does not depend on the repetition, on S or on HGP's batch size. So all rows with the same
task, training and network measure the error at the same point. Repetition r adds r to the seeds of
minibatches and of the network. The error of a client is |v_i - truth_i|, where the truth is the
exact hypergradient at y*(x). `error` is the mean over clients, and `relative_error` is `error`
divided by the mean of |truth_i|.

If all clients have the same truth, the error cannot distinguish an estimate of each client's block
from an estimate of the average of all blocks. The figure `difference_between_clients` is the
relative error of that average. It is zero for regularisation at equal lambda, as in the paper, and
far from zero for influence, where x_i weights the samples of one client.

Reference: Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed
Networks", Figures 1 (a, b) and 2, appendix A.1. There the truth belongs to the trained model, here
to y*(x). So the error includes that of training, which `training_error` measures as the largest
|y_i - y*| / |y*|.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.algorithms.hgp import HGP
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import ScopeError, UnknownNameError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.runs.options import batch_size
from fedbilevel.settings import made
from fedbilevel.studies import given
from fedbilevel.studies.influence.predict import ESTIMATES
from fedbilevel.studies.influence.retrain import Training, train
from fedbilevel.studies.outcome import RowOutcome

KNOWN = {
    "task": "table",
    "training": "table",
    "hgp": "table",
    "averaging": "table",
    "network": "table",
    "batch_size": "size",
    "seed": "seed",
}
_POINTS = 50  # of a curve up to 1000 terms; about 40 remain, because small numbers of terms coincide


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN)
    trained_on = row.get("training", {}).get("batch_size")
    training = made(Training, {name: value for name, value in row.get("training", {}).items() if name != "batch_size"})
    for name in row.get("hgp", {}):
        if name not in ESTIMATES:
            raise UnknownNameError("setting of HGP's estimate", name, ESTIMATES)
    algorithm, averaging, network = (
        made(HGP, row.get("hgp", {})),
        made(Averaging, row.get("averaging", {})),
        made(Network, row.get("network", {})),
    )
    task = given.task(row.get("task", {}), "regularisation")
    built, seed, samples = task.build(), row.get("seed", 0), batch_size(row.get("batch_size"))
    if built.problem.scopes != ("global", "private"):
        raise ScopeError(
            f"the error of every client's own block needs a private x and one y for all, "
            f"{task.name()} has a {built.problem.scopes.upper} x and a "
            f"{built.problem.scopes.lower} y: use regularisation or influence."
        )
    options: dict[str, Any] = {"dtype": torch.float64, "device": device}
    algorithm = dataclasses.replace(algorithm, lower_solver="mix")  # allows any averaging; no lower step is taken
    peers: Any = PeerSimulation(
        algorithm,
        built.problem,
        built.clients,
        network=dataclasses.replace(network, seed=network.seed + repetition),
        averaging=averaging,
        seed=seed + repetition,
        batch_size={"train": samples} if isinstance(samples, int) else samples,
        **options,
    )
    x = peers.host.x0
    say("training")
    y = train(built, training, network=network, seed=seed, batch_size=trained_on, **options).y[0]
    solution = lower_solution(peers.host, x, y.mean(0))
    truth = hypergradient(peers.host, x, solution, method="exact")
    say(
        f"{algorithm.num_terms} terms, each after an average "
        + (f"of {averaging.steps(peers.links)} steps" if averaging.limit(y.dtype) is None else "until all agree")
    )
    size, curve, shown = float(_norms(truth.value).mean()), [], set(terms(algorithm.num_terms))
    with torch.no_grad():
        for m, (v, _) in enumerate(algorithm.partial_sums(peers, x, y), start=1):
            if m in shown:
                error = float(_norms(v - truth.value).mean())
                curve.append({"terms": float(m), "error": error, "relative_error": error / size})
    figures = {
        "error": curve[-1]["error"],
        "relative_error": curve[-1]["relative_error"],
        "truth": size,
        "difference_between_clients": float(_norms(truth.value - truth.value.mean(0)).mean()) / size,
        "training_error": float((_norms(y - solution) / torch.linalg.vector_norm(solution)).max()),
        "rounds": float(peers.ledger.rounds),
    }
    return RowOutcome(figures, curve)


def terms(num_terms: int) -> list[int]:
    """Return the numbers of terms of a curve, evenly spaced on a logarithmic axis."""
    return [int(m) for m in np.unique(np.rint(np.geomspace(1, num_terms, _POINTS)))]


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)
