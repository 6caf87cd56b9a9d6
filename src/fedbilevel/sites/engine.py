"""A server without data: its clients are sites that are asked by messages. The same server as in a simulation, but for how clients are asked.

A site that does not answer in time, or answers with an error, is left out for the rest of the outer iteration: means are those of the sites that did
answer. Before the next one it is asked whether it is there, and if so goes back to the last version that both agreed on: an outer iteration that a site
did not finish leaves no trace there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.columns import CALLS
from fedbilevel.engines.server import Answers, Server
from fedbilevel.errors import FedBilevelError, NonFiniteError, QuorumError, WireError
from fedbilevel.federation.algorithm import Algorithm, Cohort, Kept, Sparse, Value
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.ledger import Ledger
from fedbilevel.oracle.population import figures
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Problem
from fedbilevel.sites.mailbox import ROOM, Answer, Desk, Message
from fedbilevel.sites.outliers import Flag, Watch
from fedbilevel.sites.transport import Failure

_PROBE = 2.0  # seconds that a site has to say that it is there
_APART = (1.0, 60.0)  # seconds between two such questions to a site that does not answer: at first, and at most
_KEPT = torch.empty(0, 0)  # stands for rows that stayed at the sites


class Member(NamedTuple):
    """A site as the server knows it."""

    name: str
    weights: Sequence[int]  # of each client that it hosts
    missing: str | None = None  # why it takes no part yet


class Sites(Server):
    """Implements `Federation`. Places are those of clients; numbers of sites are their places among the members. A site hosts clients whose places follow
    each other: it is asked by one message for all of them, is missing with all of them, and has one version of what they keep.

    layouts: names and shapes of x and y. quorum: how many sites must answer, of all. deadline: seconds for an answer. plan, welcome: what a site is told
    that comes back, perhaps as a new process, and who looks at its introduction. exclude_outliers: whether a flagged answer is left out of the mean.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        members: Sequence[Member],
        desk: Desk,
        *,
        layouts: Mapping[str, Any],
        quorum: int = 1,
        deadline: float = 60.0,
        exclude_outliers: bool = False,
        plan: Mapping[str, Any],
        welcome: Callable[[str, Mapping[str, Any]], None],
        seed: int = 0,
        cohort: Cohort = Cohort(),
        batch_size: BatchSize = None,
        sampling: str = "replacement",
        dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        counts = [len(member.weights) for member in members]
        n, ends = sum(counts), list(itertools.accumulate(counts))
        weights = torch.tensor([weight for member in members for weight in member.weights])
        super().__init__(
            algorithm,
            problem,
            seed=seed,
            cohort=cohort,
            ids=torch.arange(n),
            weights=weights,
            ledger=Ledger(n),
            stream=Stream(seed),
        )
        self.names, self.desk = [member.name for member in members], desk
        self.hosts = [
            range(end - count, end) for end, count in zip(ends, counts, strict=True)
        ]  # places of the clients of each site
        self.site_of = [site for site, count in enumerate(counts) for _ in range(count)]  # by place
        self.plan, self.welcome = plan, welcome
        self.layouts, self.quorum, self.deadline = (
            dict(layouts),
            len(members) if algorithm.needs_everyone else quorum,
            deadline,
        )
        self.exclude_outliers = exclude_outliers
        self.batch_size, self.sampling, self.dtype = batch_size, sampling, dtype
        self.layout_y = Layout(problem.y0)
        self.y0 = self.layout_y.ravel(problem.y0).detach().to(dtype)
        if problem.scopes.upper == "shared":
            self.layout_x = Layout(problem.initial_x({}))
            self.x0 = self.layout_x.ravel(problem.initial_x({})).detach().to(dtype)
        self.settings = algorithm  # before a schedule scales its steps
        self.missing = {
            site: member.missing for site, member in enumerate(members) if member.missing is not None
        }  # why, by site
        self.versions: list[int | None] = [None] * len(members)  # of what each site has on disk, and would go back to
        self.changed: set[int] = set()  # sites that have something newer
        self.ways: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}  # what each site took for the phases of this outer iteration
        self.lost: dict[str, str] = {}  # who was left out since somebody asked, and why
        self.flags: dict[
            str, str
        ] = {}  # sites whose answers were far from the others' since somebody asked, and how far
        self.watch = Watch()
        self._suspects: dict[
            str, Flag
        ] = {}  # the first such answer of each site that went into a mean, until it answered well for a whole outer iteration
        self.without_solution: list[str] = []
        self._pending: list[dict[str, str]] = [{} for _ in members]  # values that sites still have to place
        self._asked = {
            site: (-_APART[1], _APART[0]) for site in range(len(members))
        }  # when a missing site was last asked, and how long to leave it in peace
        self._at_fault: set[int] = set()  # of the missing, those that answered with an error

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def initial(self) -> tuple[Any, Any]:
        return self.start("x"), self.start("y")

    def start(self, name: str) -> Any:
        return self._placed(name, "start", lambda: self.x0 if name in self.algorithm.upper_space else self.y0)

    def zeros(self, name: str) -> Any:
        return self._placed(name, "zeros", lambda: torch.zeros(self.width(name), dtype=self.dtype))

    def width(self, name: str) -> int:
        if name in self.algorithm.upper_space:
            return len(self.x0)
        if name in self.algorithm.lower_space:
            return len(self.y0)
        raise KeyError(f"{self.algorithm.name()} declares {name!r} neither in upper_space nor in lower_space.")

    def _placed(self, name: str, how: str, value: Callable[[], Tensor]) -> Any:
        if name not in self.kept_names:
            return value()
        for site in self._here():
            self._pending[site][name] = how
        return self._keep(name, torch.tensor(self._places(self._here()), dtype=torch.int64))

    def _ask(
        self, phase: str, broadcast: Mapping[str, Value], places: Tensor, times: Tensor, means: bool
    ) -> tuple[Answers, Tensor, Tensor]:
        asked, what = len(self._by_site(self._positions.tolist())), f"{phase} of outer iteration {self.iteration}"
        self._check_quorum(
            len(self._by_site(places.tolist())),
            asked,
            f"call {self.call} ({phase}) of outer iteration {self.iteration}",
        )
        head = {
            "kind": "phase",
            "phase": phase,
            "iteration": self.iteration,
            "call": self.call,
            "scaled": self._scaled(),
        }
        answers = self._exchange(head, broadcast, self._by_site(places.tolist()), what, self._rows, asked)
        self._leave_out_odd_ones(
            answers, lambda rows: tuple((name, _form(row)) for name, row in sorted(rows.items())), asked, what
        )
        self._look_for_outliers(phase, broadcast, answers, asked, what)
        for site, (answer, _) in answers.items():
            for column, numbers in answer.header["calls"].items():
                self.ledger.charge(
                    column,
                    torch.tensor([place for place in places.tolist() if self.site_of[place] == site]),
                    torch.tensor(numbers),
                )
            if answer.header["changed"]:
                self.changed.add(site)
        stay = torch.tensor([self.site_of[place] in answers for place in places.tolist()])
        first = next(iter(answers.values()))[1]
        return (
            {name: _stacked([rows[name] for _, rows in answers.values()]) for name in first},
            places[stay],
            times[stay],
        )

    def _leave_out_odd_ones(
        self, answers: dict[int, tuple[Answer, Any]], form: Callable[[Any], Any], asked: int, what: str
    ) -> None:
        """Sites whose answers have other names or lengths than most: another version of the algorithm, or worse."""
        forms = {site: form(read) for site, (_, read) in answers.items()}
        [(usual, _)] = Counter(forms.values()).most_common(1)
        for site in [site for site, one in forms.items() if one != usual]:
            del answers[site]
            self._drop(
                site,
                Failure(
                    False,
                    "its answer has not the form of the others': install the same version of fedbilevel at all sites.",
                    0.0,
                ),
                what,
            )
        self._check_quorum(len(answers), asked, what)

    def _look_for_outliers(
        self,
        phase: str,
        broadcast: Mapping[str, Value],
        answers: dict[int, tuple[Answer, Answers]],
        asked: int,
        what: str,
    ) -> None:
        """Flag answers whose norm is far above the others', and leave them out where the run says so. Two answers do not tell which one is odd. Sites are
        compared, each by its longest row: the clients of one site are one party."""
        names = next(iter(answers.values()))[1]
        sent = {
            name: {site: _dense(rows[name]) for site, (_, rows) in answers.items()}
            for name, row in names.items()
            if row is not None and row is not _KEPT
        }
        for site, flag in self.watch.compare(phase, self.iteration, sent, broadcast).items():
            self._flag(site, flag)
            if self.exclude_outliers and flag.alone and flag.sure and not self._suspects.keys() - {self.names[site]}:
                del answers[site]
                self._drop(site, Failure(False, f"{flag}, so it was left out.", 0.0), what)
            elif flag.alone:
                self._suspects.setdefault(self.names[site], flag)
        self._check_quorum(len(answers), asked, what)

    def _flag(self, site: int, flag: Flag) -> None:
        self.flags.setdefault(self.names[site], str(flag))
        self.watch.remember(self.names[site], flag.iteration)

    def who_was_flagged(self) -> dict[str, str]:
        """Since somebody last asked."""
        found, self.flags = dict(sorted(self.flags.items())), {}
        return found

    def _blame(self) -> str:
        """The first site whose answer was far from the others' and went into a mean: what others refuse then is its doing. Empty: there is none."""
        if not self._suspects:
            return ""
        site, flag = min(self._suspects.items(), key=lambda entry: entry[1].iteration)
        return f"{flag.of(site)}: look at that site, then start the run anew without it or with exclude_outliers = true{self.watch.history(self.iteration)}."

    def _means(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        means = super()._means(sent, places, times)
        for name, mean in means.items():
            if not bool(torch.isfinite(mean).all()):  # although every answer is
                raise NonFiniteError(
                    self._blame()
                    or f"the mean of the sites' {name!r} overflows in outer iteration {self.iteration}: the steps are too long; lower the step sizes"
                    f"{self.watch.history(self.iteration)}."
                )
        return means

    def _rows(self, answer: Answer, num: int) -> Answers:
        """What a site sent for `num` clients, looked at before anybody uses it."""
        results, calls = answer.header.get("results"), answer.header.get("calls")
        if (
            not isinstance(results, dict)
            or not isinstance(calls, dict)
            or not isinstance(answer.header.get("changed"), bool)
        ):
            raise WireError("its answer does not say what it is.")
        if not all(name in CALLS and are_counts(numbers, num, least=0) for name, numbers in calls.items()):
            raise WireError("its answer does not say what it computed.")
        rows: Answers = {}
        for name, kind in results.items():
            if kind is None or kind == "kept":
                if kind == "kept" and name not in self.kept_names:
                    raise WireError(f"it kept {name}, which should have been sent.")
                rows[name] = None if kind is None else _KEPT
                continue
            arrays = answer.arrays.get(name, [])
            if kind == "rows" and len(arrays) == 1 and name not in self.kept_names:
                rows[name] = _finite(name, arrays[0], self.dtype, num, self._expected(name))
            elif (
                isinstance(kind, dict)
                and isinstance(kind.get("sparse"), int)
                and len(arrays) == 2
                and name not in self.kept_names
            ):
                places, values = arrays[0].long(), _finite(name, arrays[1], self.dtype, num)
                known = self._expected(name)
                widths = (
                    [known]
                    if known is not None
                    else [len(self.y0), *([len(self.x0)] if self.problem.scopes.upper == "shared" else [])]
                )
                if kind["sparse"] not in widths:
                    raise WireError(
                        f"its sparse {name} has {kind['sparse']} entries, expected {' or '.join(map(str, widths))}."
                    )
                if places.shape != values.shape or (
                    places.numel() and not 0 <= int(places.min()) <= int(places.max()) < kind["sparse"]
                ):
                    raise WireError(f"its sparse {name} has entries that lie nowhere.")
                rows[name] = Sparse(
                    torch.zeros(num, kind["sparse"], dtype=self.dtype).scatter_(1, places, values), places.shape[1]
                )
            else:
                raise WireError(f"its answer has {name} in a form that was not asked for.")
        return rows

    def _expected(self, name: str) -> int | None:
        """How long a row of that name is, where the algorithm says so."""
        declared = name in (*self.algorithm.upper_space, *self.algorithm.lower_space)
        return self.algorithm.lengths.get(name, self.width(name)) if declared else None

    def _absent(self) -> Iterable[int]:
        return self._places(self.missing)

    def _nobody(self) -> FedBilevelError:
        return self._too_few(
            0,
            self._needed(len(self._by_site(self._positions.tolist()))),
            f"call {self.call} of outer iteration {self.iteration}",
        )

    def _by_client(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        if len(places) < self.num_clients:
            raise self._too_few(
                len(self._by_site(places.tolist())), len(self.names), f"outer iteration {self.iteration}"
            )
        return super()._by_client(sent, places, times)

    # ---- what the run loop uses --------------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """Sites that were missing may come back here, at the version that was last agreed on."""
        super().begin(iteration, algorithm)
        self.seconds = {}
        self._suspects = {site: flag for site, flag in self._suspects.items() if self.watch.last(site) >= iteration - 1}
        self.readmit()

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Losses and metrics over the sites that answer, and how many those were. Not charged, as in a simulation."""
        here, when = self._here(), f"the measurement after outer iteration {self.iteration}"
        self._check_quorum(len(here), len(self.names), when)
        head = {"kind": "measure", "iteration": self.iteration}
        looks = self._exchange(head, {"x": x, "y": y}, self._whole(here), when, _look, len(self.names), charged=False)
        self._leave_out_odd_ones(looks, lambda look: tuple(look[0]), len(self.names), when)
        names = next(iter(looks.values()))[1][0]
        self._look_at_losses(looks, when)
        self.changed |= {site for site, (answer, _) in looks.items() if answer.header["changed"]}
        table = torch.cat([rows for _, (_, rows) in looks.values()])
        table[:, 2] = self.weights_by_place[self._places(looks)].double()  # which may be capped, not what a site says
        return {**figures(self.problem, names, table), "num_sites": float(len(looks))}

    def _look_at_losses(self, looks: dict[int, tuple[Answer, tuple[list[str], Tensor]]], when: str) -> None:
        """Leave out measurements that are not finite, unless they are most of them: then it is the model that has diverged. Flag losses far out."""
        odd = [site for site, (_, (_, table)) in looks.items() if not bool(torch.isfinite(table).all())]
        if 2 * len(odd) > len(looks):
            return
        for site in odd:
            del looks[site]
            self._drop(
                site,
                Failure(False, "it measured a value that is not finite, while others did not: look at its data.", 0.0),
                when,
            )
        self._check_quorum(len(looks), len(self.names), when)
        for site, flag in self.watch.losses(
            self.iteration, {site: table for site, (_, (_, table)) in looks.items()}
        ).items():
            self._flag(site, flag)

    def trees(self, value: Any, *, upper: bool) -> Any:
        """Nothing, for what never left the sites: each has written its own part."""
        if isinstance(value, Kept):
            return None
        layout = self.layout_x if upper else self.layout_y
        return layout.unravel(value) if value.ndim == 1 else [layout.unravel(row) for row in value]

    def bill(self) -> Ledger:
        return self.ledger

    def check(self) -> None:
        """Sites look at what they send, and the server at what arrives."""

    def stop_asked(self) -> bool:
        return self.desk.transport.stop_asked()

    def identity(self) -> dict[str, Any]:
        several = {"hosted": [len(places) for places in self.hosts]} if self.num_clients > len(self.names) else {}
        return {**self.layouts, "sites": self.names, **several, "cohort": self.cohort._asdict()}

    def commit(self) -> None:
        """Sites that have something new write it to disk, before the server writes that it counts on it."""
        version = self.iteration
        sites = self._whole([site for site in sorted(self.changed) if site not in self.missing])
        done = self._exchange(
            {"kind": "commit", "version": version},
            {},
            sites,
            f"saving after outer iteration {version}",
            _nothing,
            len(sites),
        )
        for site in done:
            self.versions[site] = version
        self.changed -= done.keys()

    def finish(self, state: Any) -> None:
        """Sites write private parts of the solution."""
        kept = {part: value.name if isinstance(value := getattr(state, part), Kept) else None for part in ("x", "y")}
        done = self._exchange({"kind": "finish", **kept}, {}, self._whole(self._here()), "the end of the run", _nothing)
        if any(kept.values()):
            self.without_solution = [name for site, name in enumerate(self.names) if site not in done]

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """With the version that each site would go back to, and nothing of what is in it."""
        tensors, plain = super().state_dict(state)
        tensors["sites.version"] = torch.tensor([-1 if version is None else version for version in self.versions])
        tensors["sites.weight"] = self.weights_by_place
        tensors.update({f"ledger.{name}": value for name, value in self.ledger.state_dict().items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        self.versions = [None if version < 0 else version for version in tensors["sites.version"].tolist()]
        self.weights_by_place = self.weights = tensors["sites.weight"].clone()  # some sites may not have joined yet
        state = super().load_state_dict(tensors, plain, state_type)
        for place in range(self.num_clients):
            self._held.forget(place)  # processes at the sites are new
        self.back_to_versions(self._here())
        return state

    # ---- who is there --------------------------------------------------------------------------------------------------

    def back_to_versions(self, sites: Sequence[int]) -> None:
        """Each of these sites goes to the version that was last agreed on with it."""
        for version in dict.fromkeys(self.versions[site] for site in sites):
            some = [site for site in sites if self.versions[site] == version]
            done = self._exchange(
                {"kind": "load", "version": version},
                {},
                self._whole(some),
                f"going back to version {version}",
                _nothing,
            )
            self.changed -= done.keys()

    def readmit(self) -> None:
        """Ask those that are missing whether they are there, less and less often; whoever is begins from its last version."""
        now = time.monotonic()
        due = [
            site
            for site in self.missing
            if self.names[site] in self.desk.reachable and now - self._asked[site][0] >= self._asked[site][1]
        ]
        if not due:
            return
        answers, _ = self.desk.exchange({self.names[site]: Message({"kind": "ping"}) for site in due}, deadline=_PROBE)
        back = [site for site in due if self.names[site] in answers and is_free(answers[self.names[site]])]
        for site in due:
            self._asked[site] = (
                time.monotonic(),
                _APART[0] if site in back else min(2 * self._asked[site][1], _APART[1]),
            )
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

    def _drop(self, site: int, failure: Failure, what: str) -> None:
        """What a site held is gone: it will begin from its last version."""
        reason = failure.reason if not failure.silent else f"no answer within {failure.seconds:.3g} s"
        self.missing[site] = f"{what}: {reason}"
        self.lost[self.names[site]] = self.missing[site]
        self._asked[site] = (
            time.monotonic() if failure.silent else -_APART[1],
            _APART[0],
        )  # who answers at all is asked again soon
        for place in self.hosts[site]:
            self._held.forget(place)
        self._pending[site] = {}
        self.changed.discard(site)
        (self._at_fault.discard if failure.silent or failure.wait else self._at_fault.add)(site)

    def who_was_missing(self) -> dict[str, str]:
        """Since somebody last asked: also those that failed when the last outer iteration was being saved, and are back."""
        found, self.lost = {self.names[site]: why for site, why in sorted(self.missing.items())} | self.lost, {}
        return found

    def _here(self) -> list[int]:
        return [site for site in range(len(self.names)) if site not in self.missing]

    def _by_site(self, places: Iterable[int]) -> dict[int, list[int]]:
        """Places of clients, by the site that hosts them."""
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(self.site_of[place], []).append(place)
        return found

    def _whole(self, sites: Iterable[int]) -> dict[int, list[int]]:
        return {site: list(self.hosts[site]) for site in sites}

    def _places(self, sites: Iterable[int]) -> list[int]:
        return [place for site in sites for place in self.hosts[site]]

    def _needed(self, asked: int) -> int:
        """Number of sites that must answer, of those that are asked: the same share as of all, rounded down. All of them
        before the first outer iteration: the state of a site then is what it goes back to later."""
        return asked if self.iteration == 0 else max(min(1, asked), self.quorum * asked // len(self.names))

    def _check_quorum(self, num: int, asked: int, when: str) -> None:
        if num < self._needed(asked):
            raise self._too_few(num, self._needed(asked), when)

    def _too_few(self, num: int, needed: int, when: str) -> FedBilevelError:
        """To be tried again when a site that was silent speaks. Where all that are missing answered with an error, it would end the same way, and where
        they refused what another site's answer led to, that site is named."""
        if self._at_fault & self.missing.keys() and (blame := self._blame()):
            return FedBilevelError(blame)
        named = "; ".join(f"{self.names[site]} ({why})" for site, why in sorted(self.missing.items()))
        text = f"{num} of the {needed} sites that are needed answered in {when}; missing: {named}{self.watch.history(self.iteration)}."
        return FedBilevelError(text) if self._at_fault >= self.missing.keys() else QuorumError(text)

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _exchange(
        self,
        head: Mapping[str, Any],
        broadcast: Mapping[str, Value],
        sites: Mapping[int, Sequence[int]],
        what: str,
        read: Callable[[Answer, int], Any],
        asked: int = 0,
        *,
        charged: bool = True,
    ) -> dict[int, tuple[Answer, Any]]:
        """Ask these sites, each about its clients at these places; who does not answer properly is missing from now on. Answers by site, each with what
        `read` makes of it and of the number of clients.

        asked: of so many a quorum must answer. charged: arrays that a site lacks are paid for, and it goes on holding them.
        """
        if not sites:
            return {}
        messages = self._messages(head, broadcast, sites, charged)
        longest = {self.names[site]: self._longest(len(places)) for site, places in sites.items()}
        answers, failures = self.desk.exchange(messages, deadline=self.deadline, longest=longest)
        good: dict[int, tuple[Answer, Any]] = {}
        for site, places in sites.items():
            name = self.names[site]
            if name in answers:
                try:
                    good[site] = (answers[name], read(answers[name], len(places)))
                except (WireError, NonFiniteError) as error:
                    failures[name] = Failure(False, str(error), answers[name].seconds)
                else:
                    if head["kind"] in ("phase", "measure"):  # those place what they are told to
                        self._pending[site] = {}
                    if head["kind"] == "phase":
                        self.seconds[name] = self.seconds.get(name, 0.0) + answers[name].seconds
            if name in failures:
                self._drop(site, failures[name], what)
        self._check_quorum(len(good), asked, what)
        return good

    def _longest(self, num: int) -> int:
        """Bytes that no answer for `num` clients exceeds: every sequence once as values and places, four more, counts, and a megabyte of words."""
        widths = [
            len(self.y0),
            *([len(self.x0)] if self.problem.scopes.upper == "shared" else []),
            *self.algorithm.lengths.values(),
        ]
        sequences = len(self.algorithm.upper_space) + len(self.algorithm.lower_space) + 4
        return ROOM + (1024 + 16 * max(widths) * sequences) * num

    def _messages(
        self, head: Mapping[str, Any], broadcast: Mapping[str, Value], sites: Mapping[int, Sequence[int]], charged: bool
    ) -> dict[str, Message]:
        """Every client pays for the arrays that it lacks; they travel once to a site, and of a matrix all rows of its clients."""
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
                    brings[site].append(
                        (number, value if value.ndim == 1 else value[self.hosts[site].start : self.hosts[site].stop])
                    )
                if charged:
                    self._lacking(value, torch.tensor([place for places in sites.values() for place in places]))
            elif isinstance(value, float) and not math.isfinite(value):
                raise NonFiniteError(
                    self._blame()
                    or f"the server's {name!r} is not finite in outer iteration {self.iteration}: the steps are too long; lower the step sizes"
                    f"{self.watch.history(self.iteration)}."
                )
            else:
                values[name] = {"value": value}
        messages = {}
        for site, places in sites.items():
            live = sorted({number for place in self.hosts[site] for number in self._held.at(place)})
            new = {"new": [number for number, _ in brings[site]], "live": live, "place": dict(self._pending[site])}
            some = {"clients": list(places)} if len(places) < len(self.hosts[site]) else {}  # otherwise all of them
            messages[self.names[site]] = Message(
                {**head, "values": values, **new, **some}, [array for _, array in brings[site]]
            )
        return messages

    def _scaled(self) -> dict[str, float]:
        """Step sizes that a schedule has changed."""
        before, now = self.settings.asdict(), self.algorithm.asdict()
        return {name: value for name, value in now.items() if value != before[name]}


def is_free(answer: Answer) -> bool:
    """Whether a site that was asked if it is there can begin at once."""
    return answer.header.get("busy") is False and "wait" not in answer.header


def _nothing(_answer: Answer, _num: int) -> None:
    """There is nothing to read in it."""


def _look(answer: Answer, num: int) -> tuple[list[str], Tensor]:
    names, tables = answer.header.get("names"), answer.arrays.get("figures", [])
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or not isinstance(answer.header.get("changed"), bool)
    ):
        raise WireError("its measurement does not say what it is.")
    if (
        len(tables) != 1
        or tables[0].shape != (num, len(names))
        or tables[0].dtype != torch.float64
        or names[:3] != ["upper", "lower", "weight"]
    ):
        raise WireError("its measurement is not a row of figures for each client.")
    if not bool(((tables[0][:, 2] > 0) & (tables[0][:, 2] < 2**40)).all()):
        raise WireError("its measurement has no weight.")
    return names, tables[0]


def are_counts(numbers: Any, num: int, least: int) -> bool:
    """Whether these are `num` whole numbers that can be counted with."""
    return (
        isinstance(numbers, list)
        and len(numbers) == num
        and all(type(number) is int and least <= number < 2**40 for number in numbers)
    )


def _form(row: Any) -> Any:
    return type(row), row.num_kept if isinstance(row, Sparse) else None if row is None else row.shape[1:]


def _dense(rows: Any) -> Tensor:
    return rows.rows if isinstance(rows, Sparse) else rows


def _finite(name: str, rows: Tensor, dtype: torch.dtype, num: int, width: int | None = None) -> Tensor:
    if rows.ndim != 2 or len(rows) != num or rows.dtype != dtype or rows.shape[1] != (width or rows.shape[1]):
        raise WireError(
            f"it sent {name} as {rows.dtype} of shape {tuple(rows.shape)}, expected {num} rows of {dtype}{f' of length {width}' if width else ''}."
        )
    if not bool(torch.isfinite(rows).all()):
        raise NonFiniteError(
            f"it sent a value of {name!r} that is not finite: its steps are too long, or its data are extreme."
        )
    return rows


def _stacked(rows: list[Any]) -> Any:
    if rows[0] is None or rows[0] is _KEPT:
        return rows[0]
    if isinstance(rows[0], Sparse):
        return Sparse(torch.cat([row.rows for row in rows]), rows[0].num_kept)
    return torch.cat(rows)
