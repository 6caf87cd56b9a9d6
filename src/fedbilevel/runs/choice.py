"""The algorithm that `algorithm="auto"` stands for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

from fedbilevel import discovery
from fedbilevel.settings import AUTO


class Choice(NamedTuple):
    """The name of an algorithm, settings that differ from its defaults, and the reason, if any."""

    name: str
    settings: Mapping[str, str] = {}
    reason: str = ""

    def say(self) -> None:
        """Print a choice of "auto" in one line; a name that the user gave is not printed."""
        if self.reason:
            print(f"auto: {self.name}, because {self.reason}", file=sys.stderr)

    def other_owner(self, setting: str) -> str:
        """Return an algorithm with a setting that the choice of "auto" lacks, or an empty name."""
        owners = [name for name, kind in discovery.algorithms().items() if setting in kind.__dataclass_fields__]
        if not self.reason or self.name in owners or not owners:
            return ""
        return "fedbio" if "fedbio" in owners else owners[0]


def choose(name: str, *, between_peers: bool) -> Choice:
    """Replace "auto" by the name of an algorithm; return every other name as it is.

    between_peers: the run has a network or averages between peers, and no server.

    >>> choose("auto", between_peers=False).name
    'self_tuned'
    >>> choose("fedbio", between_peers=False).name
    'fedbio'
    """
    if name != AUTO:
        return Choice(name)
    if between_peers:
        steps = dict.fromkeys(("lr_upper", "lr_lower", "lr_system"), AUTO)
        return Choice("hgp", steps, "it runs on every network, and its steps are measured before the run")
    return Choice("self_tuned", {}, "its steps are measured during the run, and it supports all scopes")
