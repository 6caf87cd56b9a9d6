"""A run that a site takes part in: its data, memory and private values, and the answers it
computes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.aggregation.layer import Encoded, Fixed, Layer
from fedbilevel.aggregation.sealing import bits_of, hide_examples, ring_of, secret
from fedbilevel.columns import CALLS
from fedbilevel.engines.layered import figure_integers
from fedbilevel.engines.roster import digest
from fedbilevel.errors import NonFiniteError, PolicyError, ProblemError, SettingError, WireError
from fedbilevel.federation.algorithm import Sparse
from fedbilevel.federation.host import Host
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.sites.answers import are_counts
from fedbilevel.sites.audit import AuditLog
from fedbilevel.sites.cleaned import labels_of, write_labels
from fedbilevel.sites.incoming import Incoming
from fedbilevel.sites.membership import Membership, Papers, fewest_clients
from fedbilevel.sites.order import Order
from fedbilevel.sites.plan import SitePlan, plan_digest
from fedbilevel.sites.policy import SiteSettings
from fedbilevel.sites.spending import Spending
from fedbilevel.sites.versions import Versions
from fedbilevel.tasks.task import Shapes

# header, arrays by name, and the line for the audit log
Content = tuple[dict[str, Any], Mapping[str, list[Tensor]], dict[str, Any]]
_WAIT = 30.0  # seconds for an earlier job process to release the run's folder


class Session:
    """Holds the data, memory and private values of the clients that the site hosts, with one row
    for each client."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: SiteSettings,
        plan: SitePlan,
        audit: AuditLog,
        papers: Papers | None = None,
    ) -> None:
        self.plan, self.name, self.settings, self.policy, self.audit = plan, name, settings, settings.policy, audit
        self.numbers = list(self.plan.numbers(name))  # of the clients of this site among all
        self.all = torch.arange(len(self.numbers))  # their rows here
        self._papers = papers
        self.site_folder, self.folder = folder, folder / "runs" / self.plan.name
        make_folder(self.folder)
        self.enter()
        try:
            self._prepare(settings)
        except BaseException:
            self.leave()
            raise

    def _prepare(self, settings: SiteSettings) -> None:
        holdings = settings.holdings(self.plan, self.name)
        self.shapes = Shapes.of(holdings[0], self.plan.num_classes)
        for number, own in zip(self.numbers, holdings, strict=True):
            misfit = self.shapes.misfit(Shapes.of(own, self.plan.num_classes))
            if misfit is not None:
                raise WireError(
                    f"the data of its client {number} do not look like those of its client {self.numbers[0]}: {misfit}."
                )
        self.algorithm = self.plan.built_algorithm()
        self.host = self._host(holdings, torch_device(settings.device))
        smallest = {role: int(sizes.min()) for role, sizes in self.host.data.sizes.items()}
        self.policy.check_samples(smallest, 1.0 if self.host.noise is None else self.host.noise.rate)
        data = "".join(digest(self.host.data, row).hex() for row in self.all.tolist())  # stays here
        self.versions = Versions(self.folder, self.plan.name, data, self.host.device)
        self.order = Order(self.folder, plan_digest(self.plan.asdict()), self.plan.num_iterations, self.policy)
        self.incoming = Incoming(self.algorithm, self.host, self.numbers, self.order, self.policy)
        self.rounds = 0  # phases and measurements since this process joined
        self.summary = ""  # what a detector found here, for the operator
        self.ran = False  # whether the current message led to a computation
        self.iteration = -1
        self._saved = self._changes()
        # the first derivative in a process takes seconds, which should not count against a deadline
        index = torch.zeros(len(self.all), 1, dtype=torch.int64, device=self.host.device)
        self.host.oracle.lower_grad(self.host.x0, self.host.y0, self.host.data.batch(self.all, "train", index))

    def _host(self, holdings: list[Holdings], device: torch.device) -> Host:
        elsewhere = ("cohort", "schedule", "device", "aggregation")  # the server's, and the site's own
        given = self.plan.keywords()
        options = {name: value for name, value in given.items() if name not in elsewhere}
        aggregation = given.get("aggregation")
        self.layer: Layer | None = None
        self.member: Membership | None = None
        if aggregation is not None:
            self.layer = Layer(aggregation, self.algorithm, Stream(options["seed"]), ring_of(aggregation, secret))
        self.spending = Spending(self.layer, self.folder, self.site_folder, self.plan, self.policy)
        if aggregation is not None and aggregation.secure:
            floor = self.policy.min_members
            self.member = Membership(self.plan, self.name, self.site_folder, self._papers, floor)
        try:
            problem = self.plan.built_task().problem(self.shapes)
        except ProblemError as error:  # about names and shapes, which the server knows anyway
            raise WireError(str(error)) from error
        try:
            num = self.plan.num_clients
            host = Host(self.algorithm, problem, holdings, ids=self.numbers, num_clients=num, device=device, **options)
            hide_examples(aggregation, host, secret)
            self.spending.check_plan(problem, holdings[0])
            return host
        except SettingError as error:  # about options of the plan
            raise WireError(str(error)) from error

    def enter(self) -> None:
        """Lock the run's folder for this process."""
        self.own = _locked(self.folder / "lock")

    def leave(self) -> None:
        self.own.close()

    # ---- answers -------------------------------------------------------------------------------------------------

    def introduce(self) -> Content:
        """Return the facts that the server needs before it begins. They say nothing about single
        samples, and give the number of samples only if it is a client's weight."""
        host = self.host
        shared = [host.y0, *([host.x0] if host.x_sizes is None else [])]
        content = b"".join(vector.cpu().numpy().tobytes() for vector in shared)
        about = {
            "weights": host.weights(self.all).tolist(),
            "shapes": self.shapes.asdict(),
            "layouts": {"x": host.layout_x.describe(), "y": host.layout_y.describe()},
            "start": hashlib.blake2b(content, digest_size=16).hexdigest(),
            "stored": self.versions.stored(),
        }
        return {**about, "version": __version__}, {}, {"kind": "join"}

    def phase(self, header: Mapping[str, Any], arrays: list[Tensor]) -> Content:
        phase, iteration, call = header.get("phase", ""), header.get("iteration"), header.get("call")
        method = self.incoming.phase(phase)
        if not isinstance(iteration, int) or not isinstance(call, int):
            raise WireError("a message about a phase does not say in which outer iteration and call.")
        self.order.check(iteration, call)
        scaled = self.incoming.scaled(phase, header.get("scaled") or {})
        rows = self.incoming.rows(header.get("clients"))
        values = self.incoming.values(header, arrays, rows)
        self.incoming.check_arguments(phase, method, values)
        fixed = self._fixed(header, len(rows))
        self.spending.check()
        self._begin(header)
        if iteration != self.iteration:
            self.host.scratch.clear()
            self.iteration = iteration
        self.host.algorithm = scaled
        with self._within_time():
            answers: Mapping[str, Any] = self.host.run_phase(phase, values, rows, iteration, call)
        head: dict[str, Any] = {}
        if self.layer:
            leaves = [name for name, one in answers.items() if one is not None and name not in self.incoming.kept_names]
            derived = {} if self.host.noise is None else self.host.noise.taken()
            self.spending.spend(len(leaves), derived)
            head |= {"derived": [*derived.values()]} if derived else {}
            answers = self.layer.encode(
                phase, answers, values, self.incoming.kept_names, self.host.feedback, rows, self.host.ids[rows],
                iteration=iteration, call=call, fixed=fixed,
            )  # fmt: skip
        results, sent = self._kept_or_sent(answers, rows)
        masked: dict[str, Any] = {}
        if self.member is not None:
            own = {name: one for name, [one] in sent.items()}
            masked, sent = self.member.masked(header.get("secure"), own, iteration)
        head |= {"secure": masked} if masked else {}
        head |= {"results": results, "calls": self._calls(rows), "changed": self._changes() != self._saved}
        return head, sent, {"kind": "phase", "phase": phase, "iteration": iteration, "call": call, "round": True,
                            **self.spending.figures()}  # fmt: skip

    def _kept_or_sent(self, answers: Mapping[str, Any], rows: Tensor) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
        """Store the results that stay here, and return the form of each result and the arrays to
        send."""
        results: dict[str, Any] = {}
        sent: dict[str, list[Tensor]] = {}
        for name, value in answers.items():
            if value is None:
                results[name] = None
            elif name in self.incoming.kept_names:
                self.host.kept.write(name, rows, value.rows if isinstance(value, Sparse) else value)
                self.incoming.computed.add(name)
                results[name] = "kept"
            elif isinstance(value, Encoded):
                results[name], sent[name] = {"form": value.kind, "width": value.way.width}, value.arrays
            elif isinstance(value, Sparse):
                # all entries that are not zero, and zeros that were counted
                places = value.rows.abs().topk(value.num_kept).indices.sort().values
                results[name] = {"sparse": value.rows.shape[1]}
                sent[name] = [places.to(torch.int32), value.rows.gather(1, places)]
            else:
                results[name], sent[name] = "rows", [value]
        return results, sent

    def measure(self, header: Mapping[str, Any], arrays: list[Tensor]) -> Content:
        self.order.check(header.get("iteration"))
        values = self.incoming.values(header, arrays, self.all)
        if values.keys() != {"x", "y"}:
            raise WireError("a message that asks for a measurement does not have x and y.")
        if self.spending.account is not None:
            raise PolicyError("a message asks for a measurement, and figures have no noise: leave it out.")
        fixed = self._fixed(header, len(self.all))
        self._begin(header)
        with self._within_time():
            names, table = self.host.looked_at(values["x"], values["y"])
        head = {"names": names, "changed": self._changes() != self._saved}
        sent = {"figures": [table]}
        if self.member is not None and fixed is not None:
            table[:, 2] = fixed.weights.double()
            integers = figure_integers(table)
            if integers is None:
                raise NonFiniteError("it measured a figure that is not finite or above 2**34: lower the step sizes.")
            head["secure"], sent = self.member.masked(header.get("secure"), {"figures": integers})
        return head, sent, {"kind": "measure", "iteration": header["iteration"], "round": True}

    def _fixed(self, header: Mapping[str, Any], num: int) -> Fixed | None:
        """Read the weights by which rows are multiplied, if rows leave as integers. All other numbers
        follow from the plan, so that the server cannot choose them."""
        if self.layer is None or self.layer.ring is None:
            return None
        largest: Any = header.get("largest")
        weights: Any = header.get("weights")
        if not are_counts([largest], 1, least=1) or not are_counts(weights, num, least=1) or max(weights) > largest:
            raise WireError("a message does not have the weights of this site's clients.")
        bits = bits_of(self.layer.settings, self.plan.cohort_size, largest)
        return Fixed(torch.tensor(weights), bits, largest, fewest_clients(self.plan))

    def secure(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> Content:
        """Answer a stage of a secure sum."""
        if self.member is None:
            raise WireError("a message is about a secure sum, which the plan does not have.")
        stage = header.get("stage")
        return {"answer": self.member.answer(stage, header.get("message"))}, {}, {"kind": "secure", "stage": stage}

    def commit(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> Content:
        """Write memory and private values to disk, before the server writes a checkpoint that
        relies on them. The version that the server relied on before stays on disk as well."""
        version = header.get("version")
        if type(version) is not int or version < 0:
            raise WireError(f"a message asks to save version {version!r:.40}, expected a whole number.")
        content = self.versions.packed(self._stores())
        self.policy.check_disk(self.site_folder, len(content))
        self.versions.write(version, content)
        self._saved = self._changes()
        return {}, {}, {"kind": "commit", "iteration": version}

    def load(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> Content:
        """Return to a version. Later computations leave no trace."""
        version = header.get("version")
        self.incoming.release()
        for store in (self.host.memory, self.host.kept, self.host.feedback, self.host.scratch):
            store.clear()
        self.iteration = -1
        if version is not None:
            self.versions.read(version, self._stores())
        self.versions.base, self._saved = version, self._changes()
        self.order.back_to(version)
        self.spending.loaded()
        self.incoming.computed.clear()
        self._calls(self.all)
        return {}, {}, {"kind": "load"}

    def finish(self, header: Mapping[str, Any], arrays: list[Tensor]) -> Content:
        """Write private parts of the solution, and what a detector found, for this site alone."""
        names = {part: header.get(part) for part in ("x", "y")}
        found = {part: name for part, name in names.items() if isinstance(name, str) and name in self.host.kept.written}
        given = self.incoming.values(header, arrays, self.all) if header.get("values") else {}
        tensors: dict[str, Tensor] = {}
        self.summary = ""
        trees_of = {
            part: self.host.trees(self.host.kept.own(kept, self.all), upper=part == "x") for part, kept in found.items()
        }
        for part, trees in trees_of.items():
            for number, tree in zip(self.numbers, trees, strict=True):
                prefix = part if len(self.numbers) == 1 else f"{part}.client{number}"
                tensors |= {f"{prefix}.{name}": leaf.cpu().contiguous().clone() for name, leaf in tree.items()}
        if tensors:
            write_whole(self.folder / "solution.safetensors", save(tensors))
        if given and "x" in trees_of:
            self.summary = self._cleaned(trees_of["x"], given)
        return {}, {}, {"kind": "finish"}

    def _cleaned(self, trees: list[dict[str, Tensor]], given: Mapping[str, Any]) -> str:
        """Write what a detector found about the labels of this site's clients, and return a sentence."""
        labels = [self.host.data.look(row[None], "train").row(0, ["label"])["label"] for row in self.all]
        clients = [self.name] if len(self.numbers) == 1 else [f"client {number}" for number in self.numbers]
        logits = [tree.get("logit", torch.empty(0)) for tree in trees]
        owned = labels_of(self.algorithm, given, clients, logits, labels, reached=self.order.reached)
        return write_labels(self.folder, owned, self.numbers, given["verdict"])

    def named(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the phase and outer iteration of a message for the site's status, if they are
        valid."""
        kind, phase, iteration = (header.get(part) for part in ("kind", "phase", "iteration"))
        known = isinstance(phase, str) and getattr(getattr(self.algorithm, phase, None), "__is_phase__", False)
        within = type(iteration) is int and 0 <= iteration <= self.plan.num_iterations
        return {"phase": phase if known else kind, **({"iteration": iteration} if within else {})}

    # ---- inside --------------------------------------------------------------------------------------------------
    def _begin(self, header: Mapping[str, Any]) -> None:
        """Count a computation whose checks have passed, before it runs."""
        self.policy.check_rounds(self.audit.rounds + 1)
        self.order.begin(header["iteration"], header.get("call") if header["kind"] == "phase" else None)
        self.rounds += 1
        self.ran = True

    def _calls(self, rows: Tensor) -> dict[str, list[int]]:
        """Return the number of derivatives and samples of each client since the last answer."""
        columns = self.host.ledger.columns
        found = {name: columns[name][self.host.ids[rows]].tolist() for name in CALLS}
        for name in CALLS:
            columns[name].zero_()
        return {name: numbers for name, numbers in found.items() if any(numbers)}

    @contextlib.contextmanager
    def _within_time(self) -> Iterator[None]:
        """Raise at the next derivative, or at the end, if the time for one answer is used up."""
        start = time.monotonic()
        check = self.host.before_derivative = lambda: self.policy.check_seconds(time.monotonic() - start)
        try:
            yield
            check()
        finally:
            self.host.before_derivative = None

    def _stores(self) -> dict[str, Any]:
        return {"memory": self.host.memory, "kept": self.host.kept, "feedback": self.host.feedback}

    def _changes(self) -> tuple[int, ...]:
        return tuple(store.changes for store in self._stores().values())


def _locked(path: Path) -> IO[str]:
    """Lock the run's folder for this process, and wait while an earlier job process ends."""
    file = open(path, "w")  # noqa: SIM115 - held as long as the run lasts
    until = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                raise WireError(
                    "another process of this site still works on this run: stop it, or wait for its end."
                ) from None
            time.sleep(0.2)
