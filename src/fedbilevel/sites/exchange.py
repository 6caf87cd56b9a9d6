"""Exchanges of the server with its sites: messages, answers, missing sites and the quorum.

A site that does not answer in time, or answers with an error, is left out for the rest of the outer
iteration. Before the next outer iteration the server pings the site. If the site answers the ping,
it joins again and loads the last version that server and site agreed on. An outer iteration that a
site did not finish therefore leaves no trace there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.engines.server import Server
from fedbilevel.errors import FedBilevelError, NonFiniteError, QuorumError, WireError
from fedbilevel.federation.algorithm import Algorithm, Kept, Value
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Problem
from fedbilevel.sites.answers import is_free, read_nothing
from fedbilevel.sites.mailbox import ROOM, Answer, Mailbox, SiteMessage
from fedbilevel.sites.suspects import Suspects
from fedbilevel.sites.transport import Failure

_PROBE = 2.0  # seconds that a site has to answer a ping
_APART = (1.0, 60.0)  # seconds between two pings to a site that does not answer: at first, and at most
Places = Mapping[int, Sequence[int]]  # places of clients, by site


class Member(NamedTuple):
    """A site as the server knows it."""

    name: str
    weights: Sequence[int]  # of each client that it hosts
    missing: str | None = None  # why it takes no part yet


class SiteServer(Server):
    """A server that reaches its clients through sites, with one ledger row for each client.

    Sites are numbered by their position among the members. A site hosts clients at consecutive
    places. One message to the site covers all its clients. A missing site is missing with all its
    clients. The site stores one version of the values that its clients keep.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        members: Sequence[Member],
        mailbox: Mailbox,
        *,
        quorum: int,
        deadline: float,
        plan: Mapping[str, Any],
        welcome: Callable[[str, Mapping[str, Any]], None],
        dtype: torch.dtype,
        **server: Any,
    ) -> None:
        super().__init__(algorithm, problem, **server)
        counts = [len(member.weights) for member in members]
        ends = itertools.accumulate(counts)
        self.names, self.mailbox = [member.name for member in members], mailbox
        self.hosts = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]  # places, by site
        self.site_of = [site for site, count in enumerate(counts) for _ in range(count)]  # by place
        self.plan, self.welcome = plan, welcome
        self.quorum, self.deadline = len(members) if algorithm.needs_everyone else quorum, deadline
        self.dtype = dtype
        self.layout_y = Layout(problem.y0)
        self.y0 = self.layout_y.ravel(problem.y0).detach().to(dtype)
        if problem.scopes.upper == "shared":
            self.layout_x = Layout(problem.initial_x({}))
            self.x0 = self.layout_x.ravel(problem.initial_x({})).detach().to(dtype)
        # why a site is missing, by site
        self.missing = {site: member.missing for site, member in enumerate(members) if member.missing is not None}
        self.versions: list[int | None] = [None] * len(members)  # version on each site's disk, which it can load
        self.changed: set[int] = set()  # sites with something newer than their version
        self.seconds: dict[str, float] = {}  # by site, for the phases of this outer iteration
        self.suspects = Suspects()
        self._lost: dict[str, str] = {}  # sites left out since `who_was_missing`, and why
        self._pending: list[dict[str, str]] = [{} for _ in members]  # values that sites still have to place
        # when a missing site was last pinged, and how long to wait before the next ping
        self._asked = {site: (-_APART[1], _APART[0]) for site in range(len(members))}
        self._at_fault: set[int] = set()  # missing sites that answered with an error

    # ---- exchanges -----------------------------------------------------------------------------------------------

    def _exchange(
        self,
        head: Mapping[str, Any],
        broadcast: Mapping[str, Value],
        sites: Places,
        what: str,
        read: Callable[[Answer, int], Any],
        asked: int = 0,
        *,
        charged: bool = True,
        own: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> dict[int, tuple[Answer, Any]]:
        """Send a message to each site and return the valid answers by site.

        Each answer comes with the result of `read(answer, number of clients)`. A site without a
        valid answer counts as missing from now on.

        sites: for each site, the places of the clients that the message is about.
        asked: number of sites of which a quorum must answer.
        charged: whether clients pay for the arrays that they lack, and hold these arrays
            afterwards.
        own: further entries of each site's message.
        """
        if not sites:
            return {}
        messages = self._messages(head, broadcast, sites, charged)
        if own is not None:
            messages = {
                self.names[site]: message._replace(header={**message.header, **own[site]})
                for site in sites
                if (message := messages[self.names[site]])
            }
        longest = {self.names[site]: self._longest(len(places)) for site, places in sites.items()}
        answers, failures = self.mailbox.exchange(messages, deadline=self.deadline, longest=longest)
        good: dict[int, tuple[Answer, Any]] = {}
        for site, places in sites.items():
            name = self.names[site]
            if name in answers:
                try:
                    good[site] = (answers[name], read(answers[name], len(places)))
                except (WireError, NonFiniteError) as error:
                    failures[name] = Failure(False, str(error), answers[name].seconds)
                else:
                    if head["kind"] in ("phase", "measure"):  # these messages place pending values
                        self._pending[site] = {}
                    if head["kind"] == "phase":
                        self.seconds[name] = self.seconds.get(name, 0.0) + answers[name].seconds
            if name in failures:
                self._drop(site, failures[name], what)
        self._check_quorum(len(good), asked, what)
        return good

    def _longest(self, num: int) -> int:
        """Return an upper bound on the bytes of an answer for `num` clients.

        The bound allows every sequence once as values and places, four more sequences, counts, and
        a megabyte of text.
        """
        widths = [*self._spaces().values(), *self.algorithm.lengths.values()]
        sequences = len(self.algorithm.upper_space) + len(self.algorithm.lower_space) + 4
        return ROOM + (1024 + 16 * max(widths) * sequences) * num

    def _spaces(self) -> dict[str, int]:
        """Return the length of y, that of x if it is shared, and those of rows that the algorithm declares."""
        shared = {"x": len(self.x0)} if self.problem.scopes.upper == "shared" else {}
        return {"y": len(self.y0), **shared, **self.algorithm.row_lengths(self.problem.y0)}

    def _messages(
        self, head: Mapping[str, Any], broadcast: Mapping[str, Value], sites: Places, charged: bool
    ) -> dict[str, SiteMessage]:
        """Build the message for each site. Every client pays for the arrays that it lacks, but an
        array travels to a site only once. Of a matrix, a site receives the rows of all its
        clients."""
        values: dict[str, Any] = {}
        brings: dict[int, list[tuple[int, Tensor]]] = {site: [] for site in sites}
        for name, value in broadcast.items():
            if isinstance(value, Kept):
                self._check_kept(value)
                values[name] = {"kept": value.name}
            elif isinstance(value, Tensor):
                number = self._held.number(value)
                values[name] = {"array": number}
                held = self._held.mask(value)
                for site in [site for site in sites if not bool(held[list(self.hosts[site])].any())]:
                    own = value if value.ndim == 1 else value[self.hosts[site].start : self.hosts[site].stop]
                    brings[site].append((number, own))
                if charged:
                    self._lacking(value, torch.tensor([place for places in sites.values() for place in places]))
            elif isinstance(value, float) and not math.isfinite(value):
                raise self._diverged(f"the server's {name!r} is not finite")
            else:
                values[name] = {"value": value}
        messages = {}
        for site, places in sites.items():
            live = sorted({number for place in self.hosts[site] for number in self._held.at(place)})
            new = {"new": [number for number, _ in brings[site]], "live": live, "place": dict(self._pending[site])}
            some = {"clients": list(places)} if len(places) < len(self.hosts[site]) else {}  # otherwise all of them
            header = {**head, "values": values, **new, **some}
            messages[self.names[site]] = SiteMessage(header, [array for _, array in brings[site]])
        return messages

    def _diverged(self, what: str) -> NonFiniteError:
        """Build an error that names the suspect site, or the step sizes if no site is suspect."""
        history = self.suspects.watch.history(self.iteration)
        steps = f"{what} in outer iteration {self.iteration}: the steps are too long; lower the step sizes{history}."
        return NonFiniteError(self.suspects.blame(self.iteration) or steps)

    # ---- missing sites -------------------------------------------------------------------------------------------

    def readmit(self) -> None:
        """Ping missing sites at growing intervals. A site that answers joins again and loads its
        last version."""
        now = time.monotonic()
        due = [
            site
            for site in self.missing
            if self.names[site] in self.mailbox.reachable and now - self._asked[site][0] >= self._asked[site][1]
        ]
        if not due:
            return
        pings = {self.names[site]: SiteMessage({"kind": "ping"}) for site in due}
        answers, _ = self.mailbox.exchange(pings, deadline=_PROBE)
        back = [site for site in due if self.names[site] in answers and is_free(answers[self.names[site]])]
        for site in due:
            pause = _APART[0] if site in back else min(2 * self._asked[site][1], _APART[1])
            self._asked[site] = (time.monotonic(), pause)
        for site in back:
            del self.missing[site]
        join = {"kind": "join", "plan": self.plan, "version": __version__}
        joined = self._exchange(join, {}, self._whole(back), "joining again", lambda answer, _: answer.header)
        for site, (_, about) in joined.items():
            try:
                self.welcome(self.names[site], about)
            except FedBilevelError as error:
                self._drop(site, Failure(False, str(error), 0.0), "joining again")
        self.back_to_versions([site for site in back if site not in self.missing])

    def back_to_versions(self, sites: Sequence[int]) -> None:
        """Ask each of these sites to load the last version that it agreed on with the server."""
        for version in dict.fromkeys(self.versions[site] for site in sites):
            some = self._whole([site for site in sites if self.versions[site] == version])
            head, what = {"kind": "load", "version": version}, f"going back to version {version}"
            self.changed -= self._exchange(head, {}, some, what, read_nothing).keys()

    def _drop(self, site: int, failure: Failure, what: str) -> None:
        """Leave a site out. The values that it held are lost, because it will resume from its last
        version."""
        reason = failure.reason if not failure.silent else f"no answer within {failure.seconds:.3g} s"
        self.missing[site] = f"{what}: {reason}"
        self._lost[self.names[site]] = self.missing[site]
        # a site that answered at all is pinged again soon
        self._asked[site] = (time.monotonic() if failure.silent else -_APART[1], _APART[0])
        for place in self.hosts[site]:
            self._held.forget(place)
        self._pending[site] = {}
        self.changed.discard(site)
        (self._at_fault.discard if failure.silent or failure.wait else self._at_fault.add)(site)

    def _refuse(self, site: int, reason: str, what: str) -> None:
        """Leave out a site whose answer cannot be used."""
        self._drop(site, Failure(False, reason, 0.0), what)

    def who_was_missing(self) -> dict[str, str]:
        """Return every site that was missing at any time since the last call, with the reason, even
        if the site has returned."""
        found, self._lost = {self.names[site]: why for site, why in sorted(self.missing.items())} | self._lost, {}
        return found

    def _here(self) -> list[int]:
        return [site for site in range(len(self.names)) if site not in self.missing]

    def _by_site(self, places: Iterable[int]) -> dict[int, list[int]]:
        """Group places of clients by the site that hosts them."""
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(self.site_of[place], []).append(place)
        return found

    def _whole(self, sites: Iterable[int]) -> dict[int, list[int]]:
        """Map each of these sites to the places of all its clients."""
        return {site: list(self.hosts[site]) for site in sites}

    def _places(self, sites: Iterable[int]) -> list[int]:
        return [place for site in sites for place in self.hosts[site]]

    # ---- the quorum ----------------------------------------------------------------------------------------------

    def _needed(self, asked: int) -> int:
        """Return how many of the asked sites must answer: the quorum's share, rounded down. Before
        the first outer iteration all of them must answer, because a resumed run may return to that
        state of every site."""
        return asked if self.iteration == 0 else max(min(1, asked), self.quorum * asked // len(self.names))

    def _check_quorum(self, num: int, asked: int, when: str) -> None:
        if num < self._needed(asked):
            raise self._too_few(num, self._needed(asked), when)

    def _too_few(self, num: int, needed: int, when: str) -> FedBilevelError:
        """Build the error for too few answers.

        The error is a QuorumError, which leads to another attempt, if a silent site may still
        answer. It is another error if all missing sites answered with errors, because another
        attempt would fail in the same way. The message names a suspect site, if there is one.
        """
        if self._at_fault & self.missing.keys() and (blame := self.suspects.blame(self.iteration)):
            return FedBilevelError(blame)
        named = "; ".join(f"{self.names[site]} ({why})" for site, why in sorted(self.missing.items()))
        history = self.suspects.watch.history(self.iteration)
        text = f"{num} of the {needed} sites that are needed answered in {when}; missing: {named}{history}."
        return FedBilevelError(text) if self._at_fault >= self.missing.keys() else QuorumError(text)
