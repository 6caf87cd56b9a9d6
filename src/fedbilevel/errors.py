"""Errors that a user can act on.

Each message says what was given, what was expected and what to do, in one sentence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedBilevelError(Exception):
    """Something the user can mend. The command line prints the message and no traceback."""


class ProblemError(FedBilevelError, ValueError):
    """The losses, the scopes or the clients' data do not fit together."""


class SettingError(FedBilevelError, ValueError):
    """A setting is outside its range."""


class UnknownNameError(FedBilevelError, LookupError):
    """A name that nothing here answers to."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        close = difflib.get_close_matches(str(name).replace("-", "_").lower(), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
        super().__init__(f"There is no {kind} named {name!r}. {hint}")


class NonFiniteError(FedBilevelError, ArithmeticError):
    """A client returned NaN or infinity."""


class CheckpointError(FedBilevelError, ValueError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class RankLostError(FedBilevelError, ConnectionError):
    """A process of the run died or does not answer any more."""

    speaks = True  # one of those that are left says so to the user


class ScopeError(FedBilevelError, ValueError):
    """An algorithm was asked to solve a kind of problem it has no meaning for."""


class ScopeWarning(UserWarning):
    """An algorithm runs outside the problems it is exact for; the message names the bias."""


class NetworkError(FedBilevelError, ValueError):
    """A network that is not one, or that never connects its peers."""


class DataError(FedBilevelError, ValueError):
    """A data file that is missing, or that does not hold what its name says."""


class LogError(FedBilevelError, ValueError):
    """A log of a run that cannot be written, or that belongs to another run."""


class ExperimentError(FedBilevelError, ValueError):
    """An experiment file, or a result of one, that cannot be used."""


class WireError(FedBilevelError, ValueError):
    """A message that is not one, or that was refused."""


class PlanError(FedBilevelError, ValueError):
    """A plan of a run between sites or peers, or a site's own settings, that cannot be used."""


class PolicyError(FedBilevelError, PermissionError):
    """A site does not allow what it was asked for."""


class AwaitingOperatorError(PolicyError):
    """A site that answers when its operator lets it: the plan is not approved yet, or the site is
    paused.
    """


class QuorumError(FedBilevelError, ConnectionError):
    """Too few sites or peers are there."""


class SuspendedError(QuorumError):
    """The server itself was suspended, so that answers which did not arrive are not held against
    the sites.
    """


class RosterError(FedBilevelError, ValueError):
    """A roster of peers, or a key of one, that cannot be used."""


class PluginError(FedBilevelError, ImportError):
    """A task or an algorithm of another package that cannot be used."""


class ReportError(FedBilevelError, ValueError):
    """A record that no page can be made of."""


def reason(error: Exception) -> str:
    """Describe an exception of the user's own function, short and on one line."""
    text = " ".join(str(error).split()).split(". ", 1)[0]
    return f"{type(error).__name__}: {text if len(text) < 200 else text[:200] + ' ...'}".rstrip(".: ")
