"""Predicted changes of the validation loss by each removal, from one hypergradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ScopeError, SettingError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.averaging import Averaging, spread
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.network import AnyNetwork, Network
from fedbilevel.oracle.hypergradient import SOLVERS, hypergradient
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.studies.influence.series import Series

ESTIMATES = ("lr_system", "num_terms", "minibatches", "num_curvature_products")  # settings of HGP's estimate


class Estimate(NamedTuple):
    """Predicted changes, with the accuracy and the cost of the prediction.

    changes: per client, the predicted change of sum_k f_k by removing each of its samples.
    residual: |mean(H u - f_y)| / |mean f_y| over all data, or None if u is not available.
    disagreement: distance of the peers' u from their mean, relative to the mean.
    cost: the ledger of the estimate, summed over clients.
    """

    changes: list[Tensor]
    residual: float | None
    disagreement: float | None
    cost: dict[str, int]


def influences(
    problem: Problem,
    clients: Sequence[Holdings],
    y: Tensor,
    *,
    method: str | Algorithm | Series = "cg",
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    seed: int = 0,
    batch_size: BatchSize = None,
    **options: Any,
) -> Estimate:
    """Predict the effect of every removal at the trained y.

    y: the trained model, one vector or one row per client.
    method: a solver of oracle/hypergradient.py, a `Series`, HGP with its settings, a server algorithm
        that has an `estimate`, or the name of one of these.
    network, averaging: network and averages of HGP.
    batch_size: samples per minibatch of HGP and server algorithms.
    options: dtype, device, strategy and chunk_size.
    """
    check_scopes(problem)
    method = resolved(method)
    common: dict[str, Any] = {"seed": seed, "batch_size": batch_size, **options}
    with torch.no_grad():
        if isinstance(method, HGP):
            mixing = dataclasses.replace(method, lower_solver="mix")
            return _by_peers(mixing, problem, clients, y, network=network, averaging=averaging, **common)
        y = y if y.ndim == 1 else y.double().mean(0).to(y.dtype)
        if isinstance(method, ServerAlgorithm):
            return _by_server(method, problem, clients, y, **common)
        population = Population(problem, clients, **options)
        if isinstance(method, Series):
            return _by_series(method, population, y)
        solved = hypergradient(population, population.x0, y, method=method)  # type: ignore[arg-type]
        n = len(population)
        cost = {"rounds": solved.num_products + 1, "fy": n, "fx": n, "hvp": n * solved.num_products, "jvp": n}
        return Estimate(_changes(population, solved.value), solved.residual, None, cost)


def kind_of(name: str) -> type[Algorithm] | type[Series]:
    """Return the class of an estimator that is no solver."""
    return Series if name == Series.name() else discovery.algorithm(name)


def resolved(method: str | Algorithm | Series) -> str | Algorithm | Series:
    """Return the name of a solver, a series, or an algorithm.

    The name of an algorithm gives the algorithm with its defaults.
    """
    found = method if not isinstance(method, str) or method in SOLVERS else kind_of(method)()
    if isinstance(found, Algorithm) and not hasattr(found, "estimate"):
        known = [
            *SOLVERS,
            Series.name(),
            *(name for name, kind in discovery.algorithms().items() if hasattr(kind, "estimate")),
        ]
        raise SettingError(
            f"{found.name()} has no estimate of the hypergradient at a point, which a prediction needs: "
            f"use one of {', '.join(known)}."
        )
    if isinstance(found, PeerAlgorithm) and not isinstance(found, HGP):
        raise SettingError(
            f"{found.name()} runs between peers but is not HGP, whose averages of u a prediction adds up: use hgp."
        )
    return found


class _SummingPeers(PeerSimulation):
    """A simulation of peers that sums the averages of u.

    HGP itself does not need the sum, but the solution u is eta times the sum.
    """

    total: Tensor | None = None

    def mix(self, **rows: Tensor) -> Any:
        mixed = super().mix(**rows)
        if "u" in rows:
            self.total = mixed if self.total is None else self.total + mixed
        return mixed


def _by_peers(method: HGP, problem: Problem, clients: Sequence[Holdings], y: Tensor, **options: Any) -> Estimate:
    options["network"] = options["network"] if options["network"] is not None else Network()
    peers: Any = _SummingPeers(method, problem, clients, **options)
    y = peers.place("y", y)
    rows, _ = method.estimate(peers, peers.host.x0, y)
    cost = peers.ledger.totals()
    u = method.lr_system * peers.total
    middle = u.double().mean(0).to(u.dtype)
    disagreement = spread(u, torch.linalg.vector_norm(middle))
    return Estimate(_changes(peers.host, rows), residual(peers.host, peers.host.x0, y, middle), disagreement, cost)


class _Undrawn(Simulation):
    """A simulation that refuses estimates with a random number of terms.

    Such estimates are unbiased, but a single one does not predict the effect of an instance.
    """

    def draw(self, purpose: str, high: int) -> int:
        raise SettingError(
            f"{self.algorithm.name()} draws at random which part of a series it takes, so one estimate predicts no "
            "single instance: use hgp, fbo_aggitd with estimator='sum', or a solver such as cg."
        )


def _by_server(method: Any, problem: Problem, clients: Sequence[Holdings], y: Tensor, **options: Any) -> Estimate:
    fed = _Undrawn(method, problem, clients, **options)
    rows, _ = method.estimate(fed, fed.place("x", fed.host.x0), fed.place("y", y))
    return Estimate(_changes(fed.host, fed.collect(rows)), None, None, fed.ledger.totals())


def _by_series(method: Series, population: Population, y: Tensor) -> Estimate:
    everyone, x, oracle, data = torch.arange(len(population)), population.x0, population.oracle, population.data
    weights, n = population.weights(everyone), len(population)
    train, val = (data.batch(everyone, role) for role in ("train", "val"))
    fx, fy = oracle.upper_grads(x, y, val)
    u, num = method.solve(
        lambda v: population.average(oracle.hessian_product(x, y, v, train), weights), population.average(fy, weights)
    )
    rows = fx - oracle.jacobian_product(x, y, u, train)
    cost = {"rounds": num + 2, "fy": n, "fx": n, "hvp": n * (num + 1), "jvp": n}  # with the residual
    return Estimate(_changes(population, rows), residual(population, x, y, u), None, cost)


def residual(population: Population, x: Tensor, y: Tensor, u: Tensor) -> float:
    """Return |mean(H u - f_y)| / |mean f_y| over all data."""
    everyone = torch.arange(len(population))
    weights, oracle, data = population.weights(everyone), population.oracle, population.data
    fy = population.average(oracle.upper_grad_y(x, y, data.batch(everyone, "val")), weights)
    hu = population.average(oracle.hessian_product(x, y, u, data.batch(everyone, "train")), weights)
    return float(torch.linalg.vector_norm(hu - fy) / torch.linalg.vector_norm(fy))


def _changes(population: Population, rows: Tensor) -> list[Tensor]:
    assert population.x_sizes is not None
    return [-row[:size].double().cpu() for row, size in zip(rows, population.x_sizes.tolist(), strict=True)]


def check_scopes(problem: Problem) -> None:
    if problem.scopes.upper != "private" or problem.scopes.lower != "global" or problem.client_weights != "equal":
        raise ScopeError(
            "influences need a private mask per client, one shared model and clients of equal weight; this problem "
            f"has a {problem.scopes.upper} x, a {problem.scopes.lower} y and "
            f"client_weights {problem.client_weights!r}: see tasks/influence.py."
        )
