"""The protocol of an engine: the members that the loop over outer iterations uses in a simulation,
at ranks, at a server of sites and at a peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbilevel.engines.ranks import Group
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.ledger import Ledger
from fedbilevel.problem.problem import Problem


class Regrouped(Exception):
    """The group of peers has changed. This is not an error: the outer iteration begins again with
    the new group."""


class Engine(Protocol):
    """An engine, as the loop sees it. The verbs, which algorithms use, are in
    `federation.algorithm`."""

    problem: Problem
    algorithm: Algorithm
    num_clients: int
    seed: int
    ledger: Ledger
    group: Group

    @property
    def sampling(self) -> str:
        """How batches are drawn: with replacement, or by epochs."""

    @property
    def batch_size(self) -> BatchSize:
        """Samples of a batch; None: all of a client's."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of x and y."""

    @property
    def ways(self) -> dict[str, Any]:
        """How each derivative is computed, where that was chosen by measurement. Checkpoints keep
        it."""

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """Begin an outer iteration, with the algorithm whose steps a schedule has scaled. 0: before
        the first."""

    def check(self) -> None:
        """Raise if something that was computed since `begin` is not finite."""

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Losses and metrics over all clients. Not charged."""

    def commit(self) -> None:
        """Let every participant save its own state, before the loop saves a checkpoint that counts
        on it."""

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next outer iteration depends on: tensors, and plain values."""

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        """Restore what `state_dict` returned; returns the algorithm's state."""

    def bill(self) -> Ledger:
        """The ledger of all participants."""

    def identity(self) -> dict[str, Any]:
        """Facts that a checkpoint must share with the run that reads it."""

    def client_of(self, row: int) -> int:
        """The number of the client whose row it is, in a matrix of the state."""

    def stop_asked(self) -> bool:
        """Whether the run should end after this outer iteration."""

    def finish(self, state: Any) -> None:
        """Let every participant write its private part of the solution."""

    def trees(self, value: Any, *, upper: bool) -> Any:
        """x or y in the user's structure; None where it never left the clients."""
