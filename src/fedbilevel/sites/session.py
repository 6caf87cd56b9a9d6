"""A run that a site takes part in: its data, memory and private values, and the answers it computes."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import inspect
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.columns import CALLS
from fedbilevel.engines.roster import digest
from fedbilevel.engines.server import below
from fedbilevel.errors import ProblemError, SettingError, WireError
from fedbilevel.federation.algorithm import ServerAlgorithm, Sparse
from fedbilevel.federation.host import Host
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import make_folder, read_tensors, write_whole
from fedbilevel.sites.audit import AuditLog
from fedbilevel.sites.order import Order
from fedbilevel.sites.plan import Plan, plan_digest
from fedbilevel.sites.policy import SiteSettings
from fedbilevel.tasks.task import Shapes

Content = tuple[
    dict[str, Any], Mapping[str, list[Tensor]], dict[str, Any]
]  # header, arrays by name, and the line for the audit log
_WAIT = 30.0  # seconds for an earlier job process to let go of the run's folder
_VERSION = re.compile(r"version-(\d+)\.safetensors")


class Session:
    """A run that the site takes part in: it holds the data, memory and private values of the clients that the site hosts, one row each."""

    def __init__(self, name: str, folder: Path, settings: SiteSettings, plan: Plan, audit: AuditLog) -> None:
        self.plan, self.name, self.settings, self.policy, self.audit = plan, name, settings, settings.policy, audit
        self.numbers = list(self.plan.numbers(name))  # of the clients of this site among all
        self.all = torch.arange(len(self.numbers))  # their rows here
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
        options = {
            name: value for name, value in self.plan.keywords().items() if name not in ("cohort", "schedule", "device")
        }
        device = torch_device(settings.device)
        try:
            problem = self.plan.built_task().problem(self.shapes)
        except ProblemError as error:  # about names and shapes, of which the server is told anyway
            raise WireError(str(error)) from error
        try:
            self.host = Host(
                self.algorithm,
                problem,
                holdings,
                ids=self.numbers,
                num_clients=self.plan.num_clients,
                device=device,
                **options,
            )
        except SettingError as error:  # about options of the plan
            raise WireError(str(error)) from error
        self.policy.check_samples(
            {role: int(sizes.min()) for role, sizes in self.host.data.sizes.items()}
        )  # of the smallest client
        self.kept_names = self.algorithm.kept_names(self.host.problem.scopes)
        self.data = "".join(digest(self.host.data, row).hex() for row in self.all.tolist())  # stays here
        self.order = Order(self.folder, plan_digest(self.plan.asdict()), self.plan.num_iterations, self.policy)
        self.rounds = 0  # phases and measurements since this process joined
        self.ran = False  # whether the message that is answered now led to a computation
        self.computed: set[str] = set()  # kept names that a phase has written since a version was loaded
        self.arrays: dict[int, Tensor] = {}
        self.iteration = -1
        self.base: int | None = None  # the version that the server would go back to
        self._saved = self._changes()
        one = self.host.data.batch(
            self.all, "train", torch.zeros(len(self.all), 1, dtype=torch.int64, device=self.host.device)
        )
        self.host.oracle.lower_grad(
            self.host.x0, self.host.y0, one
        )  # the first derivative in a process takes seconds, which no deadline should see

    def enter(self) -> None:
        """Take the run's folder for this process alone."""
        self.own = _taken(self.folder / "lock")

    def leave(self) -> None:
        self.own.close()

    # ---- answers -----------------------------------------------------------------------------------------------------

    def introduce(self) -> Content:
        """What the server must know of a client before it begins: nothing about single samples, and their number only where it weighs."""
        host = self.host
        shared = [host.y0, *([host.x0] if host.x_sizes is None else [])]
        start = hashlib.blake2b(
            b"".join(vector.cpu().numpy().tobytes() for vector in shared), digest_size=16
        ).hexdigest()
        layouts = {"x": host.layout_x.describe(), "y": host.layout_y.describe()}
        about = {
            "weights": host.weights(self.all).tolist(),
            "shapes": self.shapes.asdict(),
            "layouts": layouts,
            "start": start,
            "stored": self._stored(),
        }
        return {**about, "version": __version__}, {}, {"kind": "join"}

    def phase(self, header: Mapping[str, Any], arrays: list[Tensor]) -> Content:
        phase, iteration, call = (header.get(part) for part in ("phase", "iteration", "call"))
        method = getattr(self.algorithm, phase, None) if isinstance(phase, str) else None
        if not isinstance(phase, str) or not getattr(method, "__is_phase__", False):
            raise WireError(
                f"{self.algorithm.name()} of fedbilevel {__version__} at this site has no phase named {phase!r:.40}."
            )
        if not isinstance(iteration, int) or not isinstance(call, int):
            raise WireError("a message about a phase does not say in which outer iteration and call.")
        self.order.check(iteration, call)
        scaled = self._scaled(header.get("scaled") or {})
        rows = self._asked(header.get("clients"))
        values = self._values(header, arrays, rows)
        parameters = inspect.signature(method).parameters  # type: ignore[arg-type]
        wanted = {name: parameter for name, parameter in parameters.items() if name != "clients"}
        rest = {
            name for name, parameter in wanted.items() if parameter.kind is parameter.VAR_KEYWORD
        }  # takes any further name
        lacking = [
            name
            for name, parameter in wanted.items()
            if parameter.default is parameter.empty and name not in values and name not in rest
        ]
        if lacking or not (rest or values.keys() <= wanted.keys()):
            raise WireError(
                f"phase {phase} of this site takes {', '.join(wanted)}, but the message has {', '.join(values) or 'nothing':.100}."
            )
        self._begin(header)
        if iteration != self.iteration:
            self.host.scratch.clear()
            self.iteration = iteration
        self.host.algorithm = scaled
        with self._within_time():
            answers = self.host.run_phase(phase, values, rows, iteration, call)
        results: dict[str, Any] = {}
        sent: dict[str, list[Tensor]] = {}
        for name, value in answers.items():
            if value is None:
                results[name] = None
            elif name in self.kept_names:
                self.host.kept.write(name, rows, value.rows if isinstance(value, Sparse) else value)
                self.computed.add(name)
                results[name] = "kept"
            elif isinstance(value, Sparse):
                places = (
                    value.rows.abs().topk(value.num_kept).indices.sort().values
                )  # all that are not zero, and zeros that were counted
                results[name] = {"sparse": value.rows.shape[1]}
                sent[name] = [places.to(torch.int32), value.rows.gather(1, places)]
            else:
                results[name], sent[name] = "rows", [value]
        head = {"results": results, "calls": self._calls(rows), "changed": self._changes() != self._saved}
        return head, sent, {"kind": "phase", "phase": phase, "iteration": iteration, "call": call, "round": True}

    def measure(self, header: Mapping[str, Any], arrays: list[Tensor]) -> Content:
        self.order.check(header.get("iteration"))
        values = self._values(header, arrays, self.all)
        if values.keys() != {"x", "y"}:
            raise WireError("a message that asks for a measurement does not have x and y.")
        self._begin(header)
        with self._within_time():
            names, table = self.host.looked_at(values["x"], values["y"])
        head = {"names": names, "changed": self._changes() != self._saved}
        return head, {"figures": [table]}, {"kind": "measure", "iteration": header["iteration"], "round": True}

    def commit(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> Content:
        """Memory and private values are on disk before the server writes that it counts on them. What it counted on before stays beside them."""
        version = header.get("version")
        if type(version) is not int or version < 0:
            raise WireError(f"a message asks to save version {version!r:.40}, expected a whole number.")
        stores = (("memory", self.host.memory), ("kept", self.host.kept))
        tensors = {}
        for label, store in stores:
            for name, has in store.written.items():  # of a cohort, some clients only
                tensors[f"{label}-written.{name}"] = has.clone()
                tensors[f"{label}.{name}"] = store.own(name, has.nonzero()[:, 0]).cpu().contiguous().clone()
        content = save(tensors, {"data": self.data, "run": self.plan.name})
        self.policy.check_disk(self.site_folder, len(content))
        write_whole(self._place(version), content)
        for old in self._stored():
            if old not in (version, self.base):
                self._place(old).unlink()
        self.base, self._saved = version, self._changes()
        return {}, {}, {"kind": "commit", "iteration": version}

    def load(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> Content:
        """Back to a version: what was done since, or was begun and given up, leaves no trace."""
        version = header.get("version")
        self.arrays.clear()
        for store in (self.host.memory, self.host.kept, self.host.scratch):
            store.clear()
        self.iteration = -1
        if version is not None:
            if type(version) is not int or version not in self._stored():
                have = ", ".join(map(str, self._stored())) or "none"
                raise WireError(f"this site has no version {version} of the run (it has {have}): start a new run.")
            try:
                labels, tensors = read_tensors(self._place(version))
            except (SafetensorError, OSError) as error:
                raise WireError(f"version {version} of the run at this site is damaged: start a new run.") from error
            if labels.get("data") != self.data:
                raise WireError(
                    "the data of this site are not those that the run began with: restore them, or start a new run."
                )
            for label, store in (("memory", self.host.memory), ("kept", self.host.kept)):
                for name in below(tensors, f"{label}."):
                    rows = tensors[f"{label}.{name}"].to(self.host.device)
                    store.write(name, tensors[f"{label}-written.{name}"].nonzero()[:, 0], rows)
        self.base, self._saved = version, self._changes()
        self.order.back_to(version)
        self.computed.clear()
        self._calls(self.all)
        return {}, {}, {"kind": "load"}

    def finish(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> Content:
        """Private parts of the solution, for this site alone."""
        names = {part: header.get(part) for part in ("x", "y")}
        found = {part: name for part, name in names.items() if isinstance(name, str) and name in self.host.kept.written}
        tensors: dict[str, Tensor] = {}
        for part, kept in found.items():
            trees = self.host.trees(self.host.kept.own(kept, self.all), upper=part == "x")
            for number, tree in zip(self.numbers, trees, strict=True):
                prefix = part if len(self.numbers) == 1 else f"{part}.client{number}"
                tensors |= {f"{prefix}.{name}": leaf.cpu().contiguous().clone() for name, leaf in tree.items()}
        if tensors:
            write_whole(self.folder / "solution.safetensors", save(tensors))
        return {}, {}, {"kind": "finish"}

    def named(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Phase and outer iteration of a message for the site's status, where they are such."""
        kind, phase, iteration = (header.get(part) for part in ("kind", "phase", "iteration"))
        known = isinstance(phase, str) and getattr(getattr(self.algorithm, phase, None), "__is_phase__", False)
        within = type(iteration) is int and 0 <= iteration <= self.plan.num_iterations
        return {"phase": phase if known else kind, **({"iteration": iteration} if within else {})}

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _begin(self, header: Mapping[str, Any]) -> None:
        """All is checked, and the next thing is a computation: it counts, whatever becomes of it."""
        self.policy.check_rounds(self.audit.rounds + 1)
        self.order.begin(header["iteration"], header.get("call") if header["kind"] == "phase" else None)
        self.rounds += 1
        self.ran = True

    def _scaled(self, scaled: Mapping[str, Any]) -> ServerAlgorithm:
        """The algorithm with the step sizes of a schedule."""
        wrong = [name for name, value in scaled.items() if name not in self.algorithm.decays or not _finite(value)]
        if wrong:
            raise WireError(
                f"a message changes {wrong[0]!r:.40}, but a schedule may only scale {', '.join(self.algorithm.decays)}."
            )
        longer = [
            name for name, value in scaled.items() if not 0 <= value <= (1 + 1e-9) * getattr(self.algorithm, name)
        ]
        if longer:
            raise WireError(
                f"a message sets {longer[0]} to {scaled[longer[0]]:.3g}, but a schedule may only shorten the plan's step."
            )
        return dataclasses.replace(self.algorithm, **scaled) if scaled else self.algorithm

    def _asked(self, clients: Any) -> Tensor:
        """Rows of the clients that a message is about: all of this site, unless it names some."""
        if clients is None:
            return self.all
        known = isinstance(clients, list) and all(type(number) is int and number in self.numbers for number in clients)
        if not known or not clients or clients != sorted({*clients}):
            raise WireError(
                f"a message is about the clients {clients!r:.80}, expected some of {self.numbers}, in order."
            )
        return torch.tensor([self.numbers.index(number) for number in clients])

    def _values(self, header: Mapping[str, Any], arrays: list[Tensor], rows: Tensor) -> dict[str, Any]:
        """Values of a message by name, for the clients of these rows. Arrays that the server has let go are let go here."""
        for name, how in (header.get("place") or {}).items():
            if name in self.computed or not self.order.at_start(header["iteration"]):
                raise WireError(
                    f"a message asks to place {name!r:.40} again, but start values are placed only before outer iteration 1."
                )
            self._place_value(name, how)
        numbers, live, values = header.get("new", []), header.get("live", []), header.get("values", {})
        if (
            not isinstance(numbers, list)
            or len(numbers) != len(arrays)
            or not isinstance(live, list)
            or not isinstance(values, dict)
        ):
            raise WireError("a message does not say which arrays it brings.")
        self.arrays = {number: self.arrays[number] for number in live if number in self.arrays}
        self.arrays.update({number: array.to(self.host.device) for number, array in zip(numbers, arrays, strict=True)})
        found = {
            name: self._value(name, entry, rows, measuring=header["kind"] == "measure")
            for name, entry in values.items()
        }
        if not {*numbers} <= {entry.get("array") for entry in values.values()}:
            self.arrays.clear()
            raise WireError("a message brings arrays that it does not use.")
        return found

    def _value(self, name: str, entry: Any, rows: Tensor, measuring: bool) -> Any:
        """What is kept here may only stand for what is kept here, or a phase would send it away under another name; a measurement sends figures."""
        if name in self.kept_names and not (
            isinstance(entry, dict) and (isinstance(entry.get("kept"), str) or entry == {"value": None})
        ):
            raise WireError(
                f"a message brings a value of {name}, which stays at this site: it may only be named as kept."
            )
        match entry:
            case {"array": number}:
                if number not in self.arrays:
                    raise WireError(
                        f"a message refers to array {number!r:.40} for {name:.40}, which this site does not hold."
                    )
                array = self._checked(name, self.arrays[number])
                return array if array.ndim == 1 else array[rows.to(array.device)]
            case {"kept": str(kept)}:
                if kept not in self.kept_names or not (measuring or name in self.kept_names):
                    raise WireError(f"a message gives {kept!r:.40} as {name:.40}, but not both are kept at this site.")
                zeros = torch.zeros(self.host.width(kept), dtype=self.host.dtype, device=self.host.device)
                return self.host.kept.read(kept, rows, zeros.expand(len(rows), -1))
            case {"value": None | bool() | int() | str() as plain}:
                return plain
            case {"value": float(number)} if math.isfinite(number):
                return number
        raise WireError(
            f"a message gives {name:.40} as {entry!r:.80}, expected an array, a kept value or a finite number."
        )

    def _checked(self, name: str, array: Tensor) -> Tensor:
        try:
            width = self.algorithm.lengths.get(name, self.host.width(name))
        except KeyError:
            raise WireError(
                f"a message brings an array named {name:.40}, which {self.algorithm.name()} does not declare."
            ) from None
        if array.dtype != self.host.dtype or array.shape not in ((width,), (len(self.all), width)):
            raise WireError(
                f"{name} arrived as {array.dtype} of shape {tuple(array.shape)}, expected {self.host.dtype} of length {width}."
            )
        if not bool(torch.isfinite(array).all()):
            raise WireError(f"{name} arrived with a value that is not finite.")
        return array

    def _place_value(self, name: str, how: Any) -> None:
        if name not in self.kept_names or how not in ("start", "zeros"):
            raise WireError(
                f"a message asks to place {name!r:.40} as {how!r:.40}, expected a kept name, at its start or at zero."
            )
        start = self.host.x0 if name in self.algorithm.upper_space else self.host.y0
        rows = start if how == "start" else start.new_zeros(self.host.width(name))
        self.host.kept.write(name, self.all, (rows if rows.ndim == 2 else rows.expand(len(self.all), -1)).clone())

    def _calls(self, rows: Tensor) -> dict[str, list[int]]:
        """Derivatives and samples of each client since the last answer."""
        columns = self.host.ledger.columns
        found = {name: columns[name][self.host.ids[rows]].tolist() for name in CALLS}
        for name in CALLS:
            columns[name].zero_()
        return {name: numbers for name, numbers in found.items() if any(numbers)}

    @contextlib.contextmanager
    def _within_time(self) -> Iterator[None]:
        """Stop at the next derivative, or at the end, once the time for one answer is used up."""
        start = time.monotonic()
        check = self.host.before_derivative = lambda: self.policy.check_seconds(time.monotonic() - start)
        try:
            yield
            check()
        finally:
            self.host.before_derivative = None

    def _changes(self) -> tuple[int, int]:
        return self.host.memory.changes, self.host.kept.changes

    def _place(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

    def _stored(self) -> list[int]:
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := _VERSION.fullmatch(path.name)))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _taken(path: Path) -> IO[str]:
    """The run's folder for this process alone: a job process of before may still be about to end."""
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
