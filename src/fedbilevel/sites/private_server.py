"""The server's side of noise and secure sums between sites: weights, the account, and masked answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.layer import Encoded
from fedbilevel.engines.layered import spend, summed_figures
from fedbilevel.engines.layered_means import Answers
from fedbilevel.privacy.noisy_oracle import PARTS
from fedbilevel.sites.answers import read_masked_figures, read_stage
from fedbilevel.sites.exchange import Places, SiteServer
from fedbilevel.sites.mailbox import Answer
from fedbilevel.sites.secure_sums import Ask, SecureSums
from fedbilevel.sites.transport import Failure

Released = tuple[int, dict[int, int]]
MakesSums = Callable[[Ask, Callable[[str, str], None]], SecureSums]


class PrivateServer(SiteServer):
    """A server whose sites add noise and masks, if the plan asks for them.

    sums: makes the secure sums of the run.
    """

    def __init__(self, *given: Any, sums: MakesSums | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.sums = None if sums is None else sums(self._ask_stage, self._refuse_in_sum)
        # by phase, the sequences that the sites sent in its last call, and the most noisy derivatives of a site
        self._released: dict[str, Released] = {}

    def _spend(self, released: Released | None) -> bool:
        """Count the releases of a call before it, or after its first answers if they are unknown.
        Every site counts them itself before it answers."""
        if released is not None and self.layer is not None:
            spend(self.account, self.layer.settings, *released)
        return released is not None

    def _of_answers(self, answers: Mapping[int, tuple[Answer, Answers]]) -> Released:
        """Return what a call has released, from its answers."""
        first = next(iter(answers.values()))[1]
        stated = [answer.header.get("derived", []) for answer, _ in answers.values()]
        derived = {parts: max(numbers) for parts, *numbers in zip(PARTS, *stated, strict=False)} if any(stated) else {}
        return sum(isinstance(one, Encoded) for one in first.values()), derived

    def _own_weights(self, sites: Places, weights: Tensor) -> dict[int, dict[str, Any]] | None:
        """Return the weights for each site, if rows leave sites as integers."""
        if self.layer is None or self.layer.ring is None:
            return None
        of = dict(zip([place for places in sites.values() for place in places], weights.tolist(), strict=True))
        largest = {"largest": self.largest_weight}
        return {site: {"weights": [of[place] for place in places], **largest} for site, places in sites.items()}

    def _secure_call(
        self, sites: Places, asked: int, what: str, *, by_groups: bool = True
    ) -> tuple[dict[str, Any], Places]:
        """Return the call of a secure sum for the header of a message, and the sites that have keys."""
        if self.sums is None:
            return {}, sites
        numbers = self._groups(torch.arange(self.num_clients)) if by_groups else None  # a site has one client then
        groups = None if numbers is None else dict(zip(self.names, numbers.tolist(), strict=True))
        call = self.sums.call([self.names[site] for site in sites], self.iteration, self.call, groups)
        sites = {site: places for site, places in sites.items() if site not in self.missing}
        self._check_quorum(len(sites), asked, what)
        return {"secure": call}, sites

    def _ask_stage(self, stage: str, messages: Mapping[str, Any]) -> dict[str, Any]:
        own = {self.names.index(name): {"message": message} for name, message in messages.items()}
        sites = self._whole(site for site in own if site not in self.missing)
        head, what = {"kind": "secure", "stage": stage}, f"the stage {stage} of a secure sum"
        return {
            self.names[site]: read
            for site, (_, read) in self._exchange(head, {}, sites, what, read_stage, own=own).items()
        }

    def _refuse_in_sum(self, name: str, reason: str) -> None:
        self._refuse(self.names.index(name), reason, "a secure sum")

    def _drop(self, site: int, failure: Failure, what: str) -> None:
        super()._drop(site, failure, what)
        if self.sums is not None:
            self.sums.lost.add(self.names[site])

    def _unmasked(self, answers: Mapping[int, tuple[Answer, Answers]], rows: Answers) -> set[int]:
        """Replace masked rows by their sums, and return the sites that are in the sums."""
        first = next(iter(answers.values()))[1]
        masked = {name: one for name, one in first.items() if isinstance(one, Encoded)}
        if self.sums is None or not masked:
            return {*answers}
        each = {
            self.names[site]: (answer.header.get("secure"), {name: _integers(read[name]) for name in masked})
            for site, (answer, read) in answers.items()
        }
        survivors, totals = self.sums.total(each)
        for name, total in totals.items():
            total = total.view(-1, total.shape[-1])
            rows[name] = masked[name]._replace(arrays=[total], rows=total)
        return {self.names.index(name) for name in survivors}

    def _groups_of_rows(self, places: Tensor, groups: Tensor) -> Tensor:
        return super()._groups_of_rows(places, groups) if self.sums is None else groups.unique()

    def _measured_securely(
        self, sums: SecureSums, head: dict[str, Any], values: Mapping[str, Any], sites: Places, when: str
    ) -> dict[str, float]:
        num = len(self.names)
        own = self._own_weights(sites, self.weights_by_place[self._places(sites)])
        more, sites = self._secure_call(sites, num, when, by_groups=False)
        head |= more
        found = self._exchange(head, values, sites, when, read_masked_figures, num, charged=False, own=own)
        self._leave_out_odd_ones(found, lambda read: tuple(read[0]), num, when)
        self.changed |= {site for site, (answer, _) in found.items() if answer.header["changed"]}
        names = next(iter(found.values()))[1][0]
        rows = {
            self.names[site]: (answer.header.get("secure"), {"figures": row})
            for site, (answer, (_, row)) in found.items()
        }
        survivors, totals = sums.total(rows)
        return {**summed_figures(self.problem, names, totals["figures"]), "num_sites": float(len(survivors))}

    def _leave_out_odd_ones(
        self, answers: dict[int, tuple[Answer, Any]], form: Callable[[Any], Any], asked: int, what: str
    ) -> None:
        """Leave out sites whose answers have other names or lengths than most answers. The reason
        is another version or an attack."""
        forms = {site: form(read) for site, (_, read) in answers.items()}
        [(usual, _)] = Counter(forms.values()).most_common(1)
        fix = "install the same version of fedbilevel at all sites"
        for site in [site for site, one in forms.items() if one != usual]:
            del answers[site]
            self._refuse(site, f"its answer has not the form of the others': {fix}.", what)
        self._check_quorum(len(answers), asked, what)


def _integers(one: Any) -> Tensor:
    assert isinstance(one, Encoded)
    return one.rows
