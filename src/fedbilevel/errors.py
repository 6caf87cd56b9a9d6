"""Errors that a user can act on.

Each message says what was given, what was expected and what to do, in one sentence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedBilevelError(Exception):
    """An error that the user can fix; the command line prints its message without a traceback."""


class ProblemError(FedBilevelError, ValueError):
    """The losses, the scopes or the clients' data do not fit together."""


class ConvexityError(ProblemError):
    """The lower level is not strongly convex at a point, so that y*(x) is not determined there."""


class SettingError(FedBilevelError, ValueError):
    """A setting is outside its range."""


class UnstableStepError(SettingError):
    """A step size is above the range in which the algorithm is stable on this problem."""


class UnknownNameError(FedBilevelError, LookupError):
    """A name of an algorithm, a task, a setting or another object is unknown."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        close = difflib.get_close_matches(str(name).replace("-", "_").lower(), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
        super().__init__(f"There is no {kind} named {name!r}. {hint}")


class NonFiniteError(FedBilevelError, ArithmeticError):
    """A client returned NaN or infinity."""


class RangeError(FedBilevelError, ArithmeticError):
    """A row does not fit the range that was agreed for it before."""


class CheckpointError(FedBilevelError, ValueError):
    """A checkpoint cannot be read, or belongs to another run."""


class RankLostError(FedBilevelError, ConnectionError):
    """A process of the run died or does not answer."""

    speaks = True  # one of the remaining processes reports it


class ScopeError(FedBilevelError, ValueError):
    """An algorithm is not defined for the scopes of a problem."""


class ScopeWarning(UserWarning):
    """An algorithm is biased for this kind of problem; the message names the bias."""


class ProblemWarning(UserWarning):
    """A problem can be solved, but its solution may be meaningless; the message says why."""


class IgnoredWarning(UserWarning):
    """A run file sets a key that has no meaning for this kind of run."""


class ResidualWarning(UserWarning):
    """A linear system was stopped before it was solved; the message has its residual."""


class RecoveryWarning(UserWarning):
    """A run went back to its best state, failed, or did not move x."""


class NetworkError(FedBilevelError, ValueError):
    """A network is invalid, or never connects its peers."""


class DataError(FedBilevelError, ValueError):
    """A data file is missing or invalid."""


class LogError(FedBilevelError, ValueError):
    """A log of a run cannot be written, or belongs to another run."""


class ExperimentError(FedBilevelError, ValueError):
    """An experiment file or a result of an experiment cannot be used."""


class WireError(FedBilevelError, ValueError):
    """A message is invalid, or was refused."""


class PlanError(FedBilevelError, ValueError):
    """A plan of a run between sites or peers, or the settings of a site, cannot be used."""


class PolicyError(FedBilevelError, PermissionError):
    """A site refuses a request by its policy."""


class BudgetError(PolicyError):
    """A release would exceed the privacy budget, so nothing is released."""


class AwaitingOperatorError(PolicyError):
    """A site waits for its operator: the plan is not approved yet, or the site is paused."""


class QuorumError(FedBilevelError, ConnectionError):
    """Too few sites or peers are present."""


class SuspendedError(QuorumError):
    """The server itself was suspended, so missing answers do not count against the sites."""


class RosterError(FedBilevelError, ValueError):
    """A roster of peers or a key cannot be used."""


class PluginError(FedBilevelError, ImportError):
    """A task or an algorithm of another package cannot be used."""


class ReportError(FedBilevelError, ValueError):
    """A record cannot be shown on a page."""


def reason(error: Exception) -> str:
    """Describe an exception of the user's own function briefly, on one line."""
    text = " ".join(str(error).split()).split(". ", 1)[0]
    return f"{type(error).__name__}: {text if len(text) < 200 else text[:200] + ' ...'}".rstrip(".: ")
