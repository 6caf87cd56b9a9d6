"""The engine of a run between sites: a server without data sends messages to sites, which host the
clients.

A run between sites differs from a simulation only in how the clients are reached. A mean is taken
over the sites that answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.layer import Layer
from fedbilevel.aggregation.sealing import ring_of, secret
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.engines.engine import resent
from fedbilevel.engines.layered import identity_of, layered_figures
from fedbilevel.engines.layered_means import Answers
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation.algorithm import Algorithm, Cohort, Kept, Value
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.ledger import Ledger
from fedbilevel.oracle.population import figures
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.problem import Problem
from fedbilevel.sites.answers import Figures, PhaseReader, form_of, read_figures, read_nothing, sent_rows, stacked
from fedbilevel.sites.cleaned import handed
from fedbilevel.sites.exchange import Member, Places
from fedbilevel.sites.mailbox import Answer, Mailbox
from fedbilevel.sites.private_server import MakesSums, PrivateServer


class Sites(PrivateServer):
    """Implements `Federation` and `Engine` for clients at sites. Places are places of clients.

    layouts: names and shapes of x and y.
    quorum: number of sites, among all sites, that must answer.
    deadline: seconds that a site has for an answer.
    plan: the plan that a returning site joins with.
    welcome: function that checks the introduction of a returning site.
    exclude_outliers: whether flagged answers are left out of the mean.
    sums: makes the secure sums of the run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        members: Sequence[Member],
        mailbox: Mailbox,
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
        aggregation: Aggregation | None = None,
        sums: MakesSums | None = None,
        **_: Any,
    ) -> None:
        weights = torch.tensor([weight for member in members for weight in member.weights])
        super().__init__(
            algorithm, problem, members, mailbox, quorum=quorum, deadline=deadline, plan=plan, welcome=welcome,
            dtype=dtype, sums=sums, seed=seed, cohort=cohort, ids=torch.arange(len(weights)), weights=weights,
            ledger=Ledger(len(weights)), stream=Stream(seed),
            layer=None
            if aggregation is None
            else Layer(aggregation, algorithm, Stream(seed), ring_of(aggregation, secret)),
        )  # fmt: skip
        self.layouts, self.exclude_outliers = dict(layouts), exclude_outliers
        self.batch_size, self.sampling = batch_size, sampling
        self.settings = algorithm  # before a schedule scales its steps
        self.ways: dict[str, Any] = {}
        self._clean: dict[str, float] | None = None  # last measurement without flagged sites, if any was flagged
        self.without_solution: list[str] = []  # sites that could not write their private part of the solution
        self._read_phase = PhaseReader(algorithm, self.kept_names, dtype, self._spaces(), self.layer)

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def initial(self) -> tuple[Any, Any]:
        return self.start("x"), self.start("y")

    def start(self, name: str) -> Any:
        return self._placed(name, "start", lambda: self.x0 if name in self.algorithm.upper_space else self.y0)

    def zeros(self, name: str) -> Any:
        return self._placed(name, "zeros", lambda: torch.zeros(self.width(name), dtype=self.dtype))

    def width(self, name: str) -> int:
        space = self.algorithm.space(name)
        if space is not None:
            return self.algorithm.lengths.get(name, len(self.x0 if space == "upper" else self.y0))
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
        sites: Places = self._by_site(places.tolist())
        self._check_quorum(len(sites), asked, f"call {self.call} ({phase}) of outer iteration {self.iteration}")
        head = {"kind": "phase", "phase": phase, "iteration": self.iteration, "call": self.call}
        head["scaled"] = self._scaled()
        self._read_phase.expect(phase, self.iteration, self.call, broadcast)
        known = self._spend(self._released.get(phase))
        own = self._own_weights(sites, self._counts(places, times))
        more, sites = self._secure_call(sites, asked, what)
        head |= more
        answers = self._exchange(head, broadcast, sites, what, self._read_phase, asked, own=own)
        self._leave_out_odd_ones(answers, form_of, asked, what)
        first = next(iter(answers.values()))[1]
        self._released[phase] = self._of_answers(answers)
        if not known:
            self._spend(self._released[phase])
        if self.layer is None or self.layer.ring is None:  # integers with noise or masks have no usual norm
            self._leave_out_outliers(phase, broadcast, answers, asked, what)
        for site, (answer, _) in answers.items():
            for column, numbers in answer.header["calls"].items():
                self.ledger.charge(column, torch.tensor(sites[site]), torch.tensor(numbers))
            if answer.header["changed"]:
                self.changed.add(site)
        rows = {name: stacked([rows[name] for _, rows in answers.values()]) for name in first}
        there = self._unmasked(answers, rows)
        stay = torch.tensor([self.site_of[place] in there for place in places.tolist()])
        return rows, places[stay], times[stay]

    def _scaled(self) -> dict[str, float]:
        """Return the step sizes that a schedule has changed."""
        before, now = self.settings.asdict(), self.algorithm.asdict()
        return {name: value for name, value in now.items() if value != before[name]}

    def _leave_out_outliers(
        self,
        phase: str,
        broadcast: Mapping[str, Value],
        answers: dict[int, tuple[Answer, Answers]],
        asked: int,
        what: str,
    ) -> None:
        """Flag answers whose norm is far above the others', and leave them out if the run excludes
        outliers.

        With two answers it is unknown which of them is wrong. The comparison is between sites, each
        with its longest row, because the clients of a site are one party.
        """
        flags = self.suspects.watch.compare(phase, self.iteration, sent_rows(answers), broadcast)
        for site, flag in flags.items():
            name = self.names[site]
            self.suspects.flag(name, flag)
            if self.exclude_outliers and flag.alone and flag.sure and self.suspects.is_only(name):
                del answers[site]
                self._refuse(site, f"{flag}, so it was left out.", what)
            elif flag.alone:
                self.suspects.averaged(name, flag)
        self._check_quorum(len(answers), asked, what)

    def _means(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        means = super()._means(sent, places, times)
        for name, mean in means.items():
            if not bool(torch.isfinite(mean).all()):  # although every answer is finite
                raise self._diverged(f"the mean of the sites' {name!r} overflows")
        return means

    def _absent(self) -> Iterable[int]:
        return self._places(self.missing)

    def _nobody(self) -> FedBilevelError:
        needed = self._needed(len(self._by_site(self._positions.tolist())))
        return self._too_few(0, needed, f"call {self.call} of outer iteration {self.iteration}")

    def _by_client(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        if len(places) < self.num_clients:
            num = len(self._by_site(places.tolist()))
            raise self._too_few(num, len(self.names), f"outer iteration {self.iteration}")
        return super()._by_client(sent, places, times)

    # ---- what the run loop uses ----------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """Begin an outer iteration. Missing sites may return now, at the last version that they
        agreed on with the server."""
        super().begin(iteration, algorithm)
        self.seconds = {}
        self.suspects.begin(iteration)
        self.readmit()

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Return losses and metrics over the sites that answer, and the number of these sites. A
        measurement is not charged to the ledger."""
        here, when = self._here(), f"the measurement after outer iteration {self.iteration}"
        num_sites = len(self.names)
        self._check_quorum(len(here), num_sites, when)
        if self.account is not None:  # figures would leave without noise
            return {"num_sites": float(len(here))}
        head: dict[str, Any] = {"kind": "measure", "iteration": self.iteration}
        values = {"x": x, "y": y}
        if self.sums is not None:
            return self._measured_securely(self.sums, head, values, self._whole(here), when)
        found = self._exchange(head, values, self._whole(here), when, read_figures, num_sites, charged=False)
        self._leave_out_odd_ones(found, lambda read: tuple(read[0]), num_sites, when)
        names = next(iter(found.values()))[1][0]
        flagged = self._check_losses(found, when)
        self.changed |= {site for site, (answer, _) in found.items() if answer.header["changed"]}
        tables = {site: rows for site, (_, (_, rows)) in found.items()}
        clean = {site: rows for site, rows in tables.items() if site not in flagged}
        self._clean = (self._figures(names, clean) if clean else {}) if flagged else None
        return {**self._figures(names, tables), "num_sites": float(len(found))}

    def _figures(self, names: Sequence[str], tables: Mapping[int, Tensor]) -> dict[str, float]:
        table = torch.cat(list(tables.values()))
        table[:, 2] = self.weights_by_place[self._places(tables)].double()  # capped weights, not what a site claims
        if self.layer is None:
            return figures(self.problem, names, table)
        return layered_figures(self.problem, names, table, self.layer.settings)

    def judged(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the last measurement without flagged sites, whose losses may be false. It is empty
        if all sites are flagged, as two sites are that differ."""
        if self.account is not None:
            return {}
        return row if self._clean is None else {**row, **self._clean} if self._clean else {}

    def _check_losses(self, found: dict[int, tuple[Answer, Figures]], when: str) -> set[int]:
        """Leave out measurements that are not finite, and return the sites whose losses are far
        above the others'. If most measurements are not finite, the model has diverged, so all of
        them stay."""
        odd = [site for site, (_, (_, table)) in found.items() if not bool(torch.isfinite(table).all())]
        if 2 * len(odd) > len(found):
            return set()
        for site in odd:
            del found[site]
            self._refuse(site, "it measured a value that is not finite, while others did not: look at its data.", when)
        self._check_quorum(len(found), len(self.names), when)
        tables = {site: table for site, (_, (_, table)) in found.items()}
        flags = self.suspects.watch.losses(self.iteration, tables)
        for site, flag in flags.items():
            self.suspects.flag(self.names[site], flag)
        return set(flags)

    def trees(self, value: Any, *, upper: bool) -> Any:
        """Return x or y in the user's structure, or None if it never left the sites. Each site
        writes its private part itself."""
        if isinstance(value, Kept):
            return None
        layout = self.layout_x if upper else self.layout_y
        return layout.unravel(value) if value.ndim == 1 else [layout.unravel(row) for row in value]

    def bill(self) -> Ledger:
        return self.ledger

    def check(self) -> None:
        """Do nothing, because sites check what they send and the server checks what arrives."""

    def stop_asked(self) -> bool:
        return self.mailbox.transport.stop_asked()

    def identity(self) -> dict[str, Any]:
        several = {"hosted": [len(places) for places in self.hosts]} if self.num_clients > len(self.names) else {}
        layer = identity_of(self.layer)
        return {**self.layouts, "sites": self.names, **several, "cohort": self.cohort._asdict(), **layer}

    def commit(self) -> None:
        """Ask sites with changes to write them to disk, before the server writes a checkpoint that
        relies on them."""
        version = self.iteration
        sites = self._whole([site for site in sorted(self.changed) if site not in self.missing])
        head, what = {"kind": "commit", "version": version}, f"saving after outer iteration {version}"
        done = self._exchange(head, {}, sites, what, read_nothing, len(sites))
        for site in done:
            self.versions[site] = version
        self.changed -= done.keys()

    def finish(self, state: Any) -> None:
        """Ask the sites to write the private parts of the solution, and what follows from them."""
        kept = {part: value.name if isinstance(value := getattr(state, part), Kept) else None for part in ("x", "y")}
        head, sites = {"kind": "finish", "iteration": self.iteration, **kept}, self._whole(self._here())
        given = handed(self.settings, state)
        done = self._exchange(head, given, sites, "the end of the run", read_nothing, charged=False)
        if any(kept.values()):
            self.without_solution = [name for site, name in enumerate(self.names) if site not in done]

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the server's state, with the number of the version that each site would load but
        not its content."""
        tensors, plain = super().state_dict(state)
        tensors["sites.version"] = torch.tensor([-1 if version is None else version for version in self.versions])
        tensors["sites.weight"] = self.weights_by_place
        tensors.update({f"ledger.{name}": value for name, value in self.ledger.state_dict().items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        self.versions = [None if version < 0 else version for version in tensors["sites.version"].tolist()]
        self._set_weights(tensors["sites.weight"].clone())  # some sites may not have joined yet
        state = super().load_state_dict(tensors, plain, state_type)
        for place in range(self.num_clients):
            self._held.forget(place)  # processes at the sites are new
        self.back_to_versions(self._here())
        return state

    def go_back(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        """Return to an earlier state of the server, or return None if a site keeps values of its
        own, which have no earlier version."""
        if self.kept_names or self.changed or any(version is not None for version in self.versions):
            return None
        return super().load_state_dict(resent(tensors, self.ledger), plain, state_type)
