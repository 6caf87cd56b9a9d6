"""Protocol of an engine: the members that the loop over outer iterations uses.

The loop uses the same members in a simulation, at ranks, at a server of sites and at a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbilevel.engines.ranks import Group
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.ledger import Ledger
from fedbilevel.privacy.accountant import Accountant
from fedbilevel.problem.problem import Problem


class Regrouped(Exception):
    """Signal that the group of peers has changed.

    This is not an error: the outer iteration restarts with the new group.
    """


class Engine(Protocol):
    """Engine as the loop uses it.

    The verbs, which algorithms use, are in `federation.algorithm`.
    """

    problem: Problem
    algorithm: Algorithm
    num_clients: int
    seed: int
    ledger: Ledger
    group: Group
    account: Accountant | None  # of privacy, if the run has noise

    @property
    def sampling(self) -> str:
        """Method of drawing batches: with replacement, or by epochs."""

    @property
    def batch_size(self) -> BatchSize:
        """Number of samples in a batch; None means all samples of a client."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of x and y."""

    @property
    def ways(self) -> dict[str, Any]:
        """Method of computing each derivative, if measurements chose it; checkpoints store it."""

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """Begin an outer iteration.

        iteration: number of the outer iteration; 0 is the time before the first.
        algorithm: algorithm with the step sizes that a schedule has scaled.
        """

    def adopt(self, algorithm: Algorithm) -> None:
        """Use the algorithm with other step sizes from now on."""

    def check(self) -> None:
        """Raise if a value that was computed since `begin` is not finite."""

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Return losses and metrics over all clients, without a charge."""

    def judged(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the last measurement without the values of suspect participants.

        An empty one means that the run must not be judged by this measurement.
        """

    def commit(self) -> None:
        """Let every participant save its own state, which the next checkpoint relies on."""

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain values with everything that the next outer iteration depends on."""

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        """Restore the values that `state_dict` returned, and return the algorithm's state."""

    def go_back(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        """Return to an earlier state of this run, with the ledger as it is now.

        Return the state, or None if participants keep values that cannot go back.

        tensors, plain: values that `state_dict` returned; costs may be missing.
        """

    def bill(self) -> Ledger:
        """Return the ledger of all participants."""

    def identity(self) -> dict[str, Any]:
        """Return facts that a checkpoint must share with the run that reads it."""

    def client_of(self, row: int) -> int:
        """Return the number of the client that a row of the state belongs to."""

    def stop_asked(self) -> bool:
        """Return whether the run should end after this outer iteration."""

    def finish(self, state: Any) -> None:
        """Let every participant write its private part of the solution."""

    def trees(self, value: Any, *, upper: bool) -> Any:
        """Return x or y in the user's structure, or None if it never left the clients."""


def resent(tensors: Mapping[str, Tensor], ledger: Ledger) -> dict[str, Tensor]:
    """Return an earlier state with the present costs, whose arrays clients must receive again."""
    held = {name: torch.zeros_like(value) for name, value in tensors.items() if name.startswith("held.")}
    return {**tensors, **held, **{f"ledger.{name}": value for name, value in ledger.state_dict().items()}}
