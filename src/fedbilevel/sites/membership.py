"""A site's part in the secure sums of a run: its member, and the terms that follow from the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.aggregation.groups import LEAST, drawn
from fedbilevel.errors import PolicyError, WireError
from fedbilevel.problem.draws import Stream
from fedbilevel.sites.plan import SitePlan

if TYPE_CHECKING:
    from fedbilevel.secure import Terms
    from fedbilevel.secure.messages import Identity, PartyOf

NONCES = "nonces.json"
_SLOTS = 16  # calls of the key epoch of a cohort, which rarely meets again


class Papers(NamedTuple):
    """What a site needs to prove its name to others.

    identity: signs with the site's key.
    party_of: reads a certificate of the federation.
    """

    identity: Identity
    party_of: PartyOf


class Membership:
    """Answers the stages of a secure sum, and masks rows."""

    def __init__(self, plan: SitePlan, name: str, folder: Path, papers: Papers | None, floor: int) -> None:
        from fedbilevel.secure import Member, Nonces  # needs an extra

        self._plan, self._size = plan, plan.keywords()["aggregation"].groups
        if self._size is not None and floor > LEAST:
            raise PolicyError(
                f"the plan has groups whose sums are seen if {LEAST} members are left, below this site's floor of "
                f"{floor}: lower min_members, or leave out aggregation.groups."
            )
        if papers is None:
            raise PolicyError(
                "secure sums need the certificates of a federation's kits, and this site has none: run it from its kit."
            )
        self._member = Member(
            terms_of(plan),
            name,
            papers.identity,
            papers.party_of,
            Nonces(folder / NONCES),
            floor=floor,
            partners=plan.sites,
        )

    def answer(self, stage: Any, message: Any) -> dict[str, Any]:
        """Answer a message of the server, other than the call for rows."""
        member = self._member
        stages = {"keys": member.keys, "share": member.share, "confirm": member.confirm, "unmask": member.unmask}
        if stage == "receive":
            member.receive(message)
            return {}
        if not isinstance(stage, str) or stage not in stages:
            raise WireError(f"a message has the stage {stage!r:.40} of a secure sum, which this site does not know.")
        return stages[stage](message)

    def masked(
        self, call: Any, rows: Mapping[str, Tensor], iteration: int | None = None
    ) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
        """Return the masked sums of this site's rows, (1, length) each.

        iteration: the outer iteration of a phase, whose sums may be those of groups.
        """
        if not rows:
            return {}, {}
        groups = None if iteration is None or self._size is None else groups_of(self._plan, self._size, iteration)
        message, sums = self._member.mask(call, {name: row.sum(0) for name, row in rows.items()}, groups)
        return message, {name: [row[None]] for name, row in sums.items()}


def terms_of(plan: SitePlan) -> Terms:
    """Return the terms of a plan's secure sums, which the server and every site read from the plan."""
    from fedbilevel.secure import Terms  # needs an extra

    everyone = plan.built_algorithm().needs_everyone
    quorum = len(plan.sites) if everyone else plan.quorum
    if plan.cohort_size == plan.num_clients:
        return Terms(plan.name, quorum)
    # each site has one client, and a cohort has an epoch of its own, which is short
    return Terms(plan.name, max(2, quorum * plan.cohort_size // plan.num_clients), slots=_SLOTS)


def groups_of(plan: SitePlan, size: int, iteration: int) -> dict[str, int]:
    """Return the group of each site, which has one client, from the plan alone."""
    everyone = torch.arange(plan.num_clients)
    groups = drawn(Stream(plan.keywords()["seed"]), everyone, plan.num_clients, size, iteration)
    return dict(zip(plan.sites, groups.tolist(), strict=True))


def fewest_clients(plan: SitePlan) -> int:
    """Return the fewest clients that a quorum of sites has, whose noise is in every sum."""
    quorum = len(plan.sites) if plan.built_algorithm().needs_everyone else plan.quorum
    return sum(sorted(len(plan.numbers(site)) for site in plan.sites)[:quorum])
