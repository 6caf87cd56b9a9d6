"""The server's side of secure sums between sites: key epochs, and the sum of one call.

A site that does not answer the call, or answers wrongly, is not in the sum. A site that answered and
is lost later stays in the sum: the others restore its mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedbilevel.errors import PolicyError, WireError

if TYPE_CHECKING:
    from fedbilevel.secure import Terms
    from fedbilevel.secure.messages import PartyOf
    from fedbilevel.secure.terms import Groups

# stage and messages by site -> answers by site
Ask = Callable[[str, Mapping[str, Any]], dict[str, Any]]


class SecureSums:
    """Secure sums of one run.

    ask: sends the messages of a stage to sites, and returns the answers; other sites are left out.
    refuse: leaves out a site whose answer cannot be used, with the reason.
    cohorts: whether calls concern cohorts. Then every other cohort begins an epoch of its own, so that
        masks and quorum are those of the cohort.
    """

    def __init__(
        self, terms: Terms, party_of: PartyOf, ask: Ask, refuse: Callable[[str, str], None], *, cohorts: bool = False
    ) -> None:
        from fedbilevel.secure import Tally  # needs an extra

        self._cohorts = cohorts
        self._tally, self._ask, self._refuse = Tally(terms, party_of), ask, refuse
        self.lost: set[str] = set()  # sites that were left out since the epoch began, and may have lost their keys

    def call(self, here: Sequence[str], iteration: int, call: int, groups: Groups | None = None) -> dict[str, Any]:
        """Return the message that asks for masked rows, after a new epoch if that is needed."""
        from fedbilevel.secure import Nonce

        tally, known = self._tally, {*self._tally.members}
        if tally.is_exhausted or not {*here} <= known or self.lost & {*here} or (self._cohorts and known != {*here}):
            self._begin(here)
        return tally.call(Nonce((tally.epoch, tally.slot), iteration, call), groups=groups)

    def _begin(self, here: Sequence[str]) -> None:
        """Let the sites agree on keys, and share the seeds of their masks."""
        tally = self._tally
        self.lost.clear()
        begin = tally.begin(max(tally.epoch + 1, time.time_ns() // 10**6))
        self._each("keys", dict.fromkeys(here, begin), tally.take_keys)
        roster = tally.roster()
        self._each("share", {one["name"]: roster for one in roster["keys"]}, tally.take_shares)
        self._each("receive", tally.handout(), lambda name, message: None)

    def total(self, rows: Mapping[str, tuple[Any, Mapping[str, Tensor]]]) -> tuple[list[str], dict[str, Tensor]]:
        """Return the names of the sites in the sum, and the sums by name, with a row for each group.

        rows: message and masked rows of each site that answered, all of the same form.
        """
        tally = self._tally
        tally.expect({name: row.numel() for name, row in next(iter(rows.values()))[1].items()})
        for site, (message, own) in rows.items():
            self._try(site, partial(tally.take_rows, site, message, own))
        listed = tally.survivors()
        self._each("confirm", dict.fromkeys(listed["survivors"], listed), tally.take_confirmation)
        opening = tally.opening()
        self._each("unmask", dict.fromkeys(opening["signatures"], opening), tally.take_unmask)
        return tally.total()

    def _each(self, stage: str, messages: Mapping[str, Any], take: Callable[[str, Any], None]) -> None:
        for site, answer in self._ask(stage, messages).items():
            self._try(site, partial(take, site, answer))

    def _try(self, site: str, take: Callable[[], None]) -> None:
        try:
            take()
        except (WireError, PolicyError) as error:
            self._refuse(site, str(error))
