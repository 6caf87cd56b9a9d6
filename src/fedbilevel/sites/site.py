"""A site: one client with its own data, memory and disk. It answers messages about phases that its own installed version knows, and nothing else.

Below its folder:  site.toml                     its settings and policy, never sent
                   left.jsonl                    one line for everything that left but answers to "are you there", never shortened
                   log.txt                       what went wrong here, in full
                   runs/NAME/version-K           memory and private values after outer iteration K, the last two
                   runs/NAME/solution            private parts of the solution

An answer carries the turn it was asked in. A message of an earlier turn than the last one answered is refused: it comes from before a deadline that
the server has given up on, and carrying it out now would spoil what has been agreed since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import inspect
import json
import logging
import math
import re
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

import fedbilevel
from fedbilevel.clients import Host
from fedbilevel.engines.group import digest
from fedbilevel.errors import NonFiniteError, PlanError, PolicyError, ProblemError, SettingError, UnknownNameError, WireError
from fedbilevel.escapes import printable
from fedbilevel.federation import Sparse
from fedbilevel.figures import CALLS
from fedbilevel.options import torch_device
from fedbilevel.record import make_folder, read_tensors, write_whole
from fedbilevel.sites import wire
from fedbilevel.sites.plan import Plan, plan_of
from fedbilevel.sites.policy import SiteSettings, read_settings
from fedbilevel.tasks.task import Shapes

ONLY = torch.tensor([0])  # a site hosts one client
LEFT, LOG = "left.jsonl", "log.txt"
SAYABLE = (WireError, PolicyError, NonFiniteError)  # whose texts hold nothing of this site but names and shapes
_WAIT = 30.0  # seconds for a job process of before to let go of the run's folder
_VERSION = re.compile(r"version-(\d+)\.safetensors")
log = logging.getLogger(__name__)


class Site:
    def __init__(self, name: str, folder: Path | str) -> None:
        self.name, self.folder = name, Path(folder)
        self._lock = threading.Lock()
        self._joined: _Joined | None = None
        self._turn: list[int] = []

    def handle(self, message: bytes) -> bytes:
        """Always an answer: what was asked for, or one sentence that says why not. What else is known of a failure, paths and values among it, stays in
        this site's own log."""
        try:
            header, arrays = wire.unpack(message)
            if header.get("kind") == "ping":  # must get through while a phase is computed
                return wire.pack({"busy": self._lock.locked()})
            with self._lock:
                return self._answer(header, arrays)
        except SAYABLE as error:
            return self._refusal(str(error))
        except Exception as error:  # noqa: BLE001 - a loss or a loader may raise anything; it is written down
            self._note(traceback.format_exc())
            return self._refusal(f"it failed with {type(error).__name__}; its own log says more.")

    def _note(self, text: str) -> None:
        """For the people of this site."""
        text = printable(text, lines=True)
        log.error("a message could not be answered:\n%s", text)
        with contextlib.suppress(OSError), open(self.folder / LOG, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")

    def _refusal(self, reason: str) -> bytes:
        message = wire.pack({"error": reason})
        try:
            _write_down(
                self.folder / LEFT,
                {"run": self._joined.plan.name if self._joined else None, "kind": "error", "text": reason, "bytes": len(message), "arrays": []},
            )
        except OSError:
            return wire.pack({"error": "it cannot write down what leaves it, so nothing does."})
        return message

    def _answer(self, header: Mapping[str, Any], arrays: list[Tensor]) -> bytes:
        kind, turn = header.get("kind"), header.get("turn")
        if not isinstance(turn, list) or len(turn) != 3 or not all(type(part) is int for part in turn):
            raise WireError(f"a message says that its turn is {turn!r:.40}, expected three whole numbers.")
        if turn <= self._turn:
            raise WireError(f"the message of turn {turn} came after that of turn {self._turn} was answered, so it is too late for it.")
        self._turn = turn
        if kind == "join":
            before, self._joined = self._joined, None
            self._joined = _Joined.again(before, self.name, self.folder, read_settings(self.folder), header)
            return self._joined.introduce()
        joined = self._joined
        if joined is None or joined.plan.name != header.get("run"):
            raise WireError(f"this site takes no part in the run {header.get('run')!r:.80}: it must be asked to join first.")
        answers = {"phase": joined.phase, "measure": joined.measure, "commit": joined.commit, "load": joined.load, "finish": joined.finish}
        if kind not in answers:
            raise WireError(f"this site does not know what to do with a message of kind {kind!r:.40}; it has fedbilevel {fedbilevel.__version__}.")
        return answers[kind](header, arrays)

    def close(self) -> None:
        if self._joined is not None:
            self._joined.leave()


class _Joined:
    """A run that the site takes part in."""

    @classmethod
    def again(cls, before: _Joined | None, name: str, folder: Path, settings: SiteSettings, header: Mapping[str, Any]) -> _Joined:
        """The same as before where it is the same run: data are read once, however often a server begins anew."""
        try:
            plan = plan_of(header.get("plan", {}))
        except (PlanError, SettingError, UnknownNameError) as error:  # about what the server sent; what else is installed here is not said
            raise WireError(str(error).partition(" Known:")[0]) from error
        finally:
            if before is not None:
                before.leave()
        if name not in plan.sites:
            raise PolicyError(f"this site is not among those of the plan ({', '.join(plan.sites)}): name it there.")
        settings.check_plan(plan)
        if before is None or (before.plan, before.settings) != (plan, settings):
            return cls(name, folder, settings, plan)
        before.own = _taken(before.folder / "lock")
        return before

    def __init__(self, name: str, folder: Path, settings: SiteSettings, plan: Plan) -> None:
        self.plan, self.name, self.settings = plan, name, settings
        self.number = self.plan.sites.index(name)
        self.log, self.folder = folder / LEFT, folder / "runs" / self.plan.name
        make_folder(self.folder)
        self.own = _taken(self.folder / "lock")
        try:
            self._prepare(settings)
        except BaseException:
            self.leave()
            raise

    def _prepare(self, settings: SiteSettings) -> None:
        holdings = settings.holdings(self.plan, self.number)
        self.shapes = Shapes.of(holdings, self.plan.num_classes)
        self.algorithm = self.plan.built_algorithm()
        options = {name: value for name, value in self.plan.keywords().items() if name not in ("cohort", "schedule", "device")}
        device = torch_device(settings.device)
        try:
            problem = self.plan.built_task().problem(self.shapes)
        except ProblemError as error:  # about names and shapes, of which the server is told anyway
            raise WireError(str(error)) from error
        try:
            self.host = Host(self.algorithm, problem, [holdings], ids=[self.number], num_clients=len(self.plan.sites), device=device, **options)
        except SettingError as error:  # about options of the plan
            raise WireError(str(error)) from error
        settings.check_samples(int(self.host.data.sizes["train"][0]))
        self.kept_names = self.algorithm.kept_names(self.host.problem.scopes)
        self.data = digest(self.host.data, 0).hex()  # stays here
        self.rounds = _rounds_so_far(self.log, self.plan.name)
        self.arrays: dict[int, Tensor] = {}
        self.iteration = -1
        self.base: int | None = None  # the version that the server would go back to
        self._saved = self._changes()
        one = self.host.data.batch(ONLY, "train", torch.zeros(1, 1, dtype=torch.int64, device=self.host.device))
        self.host.oracle.lower_grad(self.host.x0, self.host.y0, one)  # the first derivative in a process takes seconds, which no deadline should see

    def leave(self) -> None:
        self.own.close()

    # ---- answers -----------------------------------------------------------------------------------------------------

    def introduce(self) -> bytes:
        """What the server must know of a client before it begins: nothing about single samples, and their number only where it weighs."""
        host = self.host
        shared = [host.y0, *([host.x0] if host.x_sizes is None else [])]
        start = hashlib.blake2b(b"".join(vector.cpu().numpy().tobytes() for vector in shared), digest_size=16).hexdigest()
        layouts = {"x": host.layout_x.describe(), "y": host.layout_y.describe()}
        about = {"weight": int(host.weights(ONLY)[0]), "shapes": self.shapes.asdict(), "layouts": layouts, "start": start, "stored": self._stored()}
        return self._reply("join", {**about, "version": fedbilevel.__version__}, {})

    def phase(self, header: Mapping[str, Any], arrays: list[Tensor]) -> bytes:
        phase, iteration, call = (header.get(part) for part in ("phase", "iteration", "call"))
        method = getattr(self.algorithm, phase, None) if isinstance(phase, str) else None
        if not isinstance(phase, str) or not getattr(method, "__is_phase__", False):
            raise WireError(f"{self.algorithm.name()} of fedbilevel {fedbilevel.__version__} at this site has no phase named {phase!r:.40}.")
        if not isinstance(iteration, int) or not isinstance(call, int):
            raise WireError("a message about a phase does not say in which outer iteration and call.")
        self._begin(iteration, header.get("scaled") or {})
        values = self._values(header, arrays)
        wanted = {name: parameter for name, parameter in inspect.signature(method).parameters.items() if name != "clients"}  # type: ignore[arg-type]
        rest = {name for name, parameter in wanted.items() if parameter.kind is parameter.VAR_KEYWORD}  # takes any further name
        lacking = [name for name, parameter in wanted.items() if parameter.default is parameter.empty and name not in values and name not in rest]
        if lacking or not (rest or values.keys() <= wanted.keys()):
            raise WireError(f"phase {phase} of this site takes {', '.join(wanted)}, but the message has {', '.join(values) or 'nothing'}.")
        answers = self.host.run_phase(phase, values, ONLY, iteration, call)
        results: dict[str, Any] = {}
        sent: dict[str, list[Tensor]] = {}
        for name, value in answers.items():
            if value is None:
                results[name] = None
            elif name in self.kept_names:
                self.host.kept.write(name, ONLY, value.rows if isinstance(value, Sparse) else value)
                results[name] = "kept"
            elif isinstance(value, Sparse):
                places = value.rows[0].abs().topk(value.num_kept).indices.sort().values  # all that are not zero, and zeros that were counted
                results[name] = {"sparse": value.rows.shape[1]}
                sent[name] = [places.to(torch.int32), value.rows[0, places]]
            else:
                results[name], sent[name] = "rows", [value]
        self._count_round(bool(sent))
        head = {"results": results, "calls": self._calls(), "changed": self._changes() != self._saved}
        return self._reply("phase", head, sent, phase=phase, iteration=iteration, call=call)

    def measure(self, header: Mapping[str, Any], arrays: list[Tensor]) -> bytes:
        values = self._values(header, arrays)
        if values.keys() != {"x", "y"}:
            raise WireError("a message that asks for a measurement does not have x and y.")
        names, table = self.host.looked_at(values["x"], values["y"])
        self._count_round(True)
        return self._reply("measure", {"names": names, "changed": self._changes() != self._saved}, {"figures": [table]}, iteration=header.get("iteration"))

    def commit(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> bytes:
        """Memory and private values are on disk before the server writes that it counts on them. What it counted on before stays beside them."""
        version = header.get("version")
        if type(version) is not int or version < 0:
            raise WireError(f"a message asks to save version {version!r:.40}, expected a whole number.")
        stores = (("memory", self.host.memory), ("kept", self.host.kept))
        tensors = {f"{label}.{name}": store.own(name, ONLY).cpu().contiguous().clone() for label, store in stores for name in store.written}
        write_whole(self._place(version), save(tensors, {"data": self.data, "run": self.plan.name}))
        for old in self._stored():
            if old not in (version, self.base):
                self._place(old).unlink()
        self.base, self._saved = version, self._changes()
        return self._reply("commit", {}, {}, iteration=version)

    def load(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> bytes:
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
                raise WireError("the data of this site are not those that the run began with: restore them, or start a new run.")
            for name, row in tensors.items():
                label, _, key = name.partition(".")
                (self.host.memory if label == "memory" else self.host.kept).write(key, ONLY, row.to(self.host.device))
        self.base, self._saved = version, self._changes()
        self._calls()
        return self._reply("load", {}, {})

    def finish(self, header: Mapping[str, Any], _arrays: list[Tensor]) -> bytes:
        """Private parts of the solution, for this site alone."""
        names = {part: header.get(part) for part in ("x", "y")}
        found = {part: name for part, name in names.items() if isinstance(name, str) and name in self.host.kept.written}
        trees = {part: self.host.trees(self.host.kept.own(name, ONLY), upper=part == "x")[0] for part, name in found.items()}
        if trees:
            tensors = {f"{part}.{name}": leaf.cpu().contiguous().clone() for part, tree in trees.items() for name, leaf in tree.items()}
            write_whole(self.folder / "solution.safetensors", save(tensors))
        return self._reply("finish", {}, {})

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _begin(self, iteration: int, scaled: Mapping[str, Any]) -> None:
        if iteration != self.iteration:
            self.host.scratch.clear()
            self.iteration = iteration
        wrong = [name for name, value in scaled.items() if name not in self.algorithm.decays or not _finite(value)]
        if wrong:
            raise WireError(f"a message changes {wrong[0]!r:.40}, but a schedule may only scale {', '.join(self.algorithm.decays)}.")
        self.host.algorithm = dataclasses.replace(self.algorithm, **scaled) if scaled else self.algorithm

    def _values(self, header: Mapping[str, Any], arrays: list[Tensor]) -> dict[str, Any]:
        """Values of a message by name. Arrays that the server has let go are let go here."""
        for name, how in (header.get("place") or {}).items():
            self._place_value(name, how)
        numbers, live, values = header.get("new", []), header.get("live", []), header.get("values", {})
        if not isinstance(numbers, list) or len(numbers) != len(arrays) or not isinstance(live, list) or not isinstance(values, dict):
            raise WireError("a message does not say which arrays it brings.")
        self.arrays = {number: self.arrays[number] for number in live if number in self.arrays}
        self.arrays.update({number: array.to(self.host.device) for number, array in zip(numbers, arrays, strict=True)})
        found = {name: self._value(name, entry, measuring=header["kind"] == "measure") for name, entry in values.items()}
        if not {*numbers} <= {entry.get("array") for entry in values.values()}:
            self.arrays.clear()
            raise WireError("a message brings arrays that it does not use.")
        return found

    def _value(self, name: str, entry: Any, measuring: bool) -> Any:
        """What is kept here may only stand for what is kept here, or a phase would send it away under another name; a measurement sends figures."""
        match entry:
            case {"array": number}:
                if number not in self.arrays:
                    raise WireError(f"a message refers to array {number!r:.40} for {name}, which this site does not hold.")
                return self._checked(name, self.arrays[number])
            case {"kept": str(kept)}:
                if kept not in self.kept_names or not (measuring or name in self.kept_names):
                    raise WireError(f"a message gives {kept!r:.40} as {name}, but not both are kept at this site.")
                return self.host.kept.read(kept, ONLY, torch.zeros(1, self.host.width(kept), dtype=self.host.dtype, device=self.host.device))
            case {"value": None | bool() | int() | str() as plain}:
                return plain
            case {"value": float(number)} if math.isfinite(number):
                return number
        raise WireError(f"a message gives {name} as {entry!r:.80}, expected an array, a kept value or a finite number.")

    def _checked(self, name: str, array: Tensor) -> Tensor:
        try:
            width = self.algorithm.lengths.get(name, self.host.width(name))
        except KeyError:
            raise WireError(f"a message brings an array named {name}, which {self.algorithm.name()} does not declare.") from None
        if array.dtype != self.host.dtype or array.shape not in ((width,), (1, width)):
            raise WireError(f"{name} arrived as {array.dtype} of shape {tuple(array.shape)}, expected {self.host.dtype} of length {width}.")
        if not bool(torch.isfinite(array).all()):
            raise WireError(f"{name} arrived with a value that is not finite.")
        return array

    def _place_value(self, name: str, how: Any) -> None:
        if name not in self.kept_names or how not in ("start", "zeros"):
            raise WireError(f"a message asks to place {name!r:.40} as {how!r:.40}, expected a kept name, at its start or at zero.")
        rows = self.host.x0 if name in self.algorithm.upper_space else self.host.y0
        self.host.kept.write(name, ONLY, (rows if rows.ndim == 2 else rows[None]).clone() if how == "start" else rows.new_zeros(1, self.host.width(name)))

    def _calls(self) -> dict[str, int]:
        """Derivatives and samples since the last answer."""
        columns = self.host.ledger.columns
        found = {name: int(columns[name][self.number]) for name in CALLS}
        for name in CALLS:
            columns[name].zero_()
        return {name: number for name, number in found.items() if number}

    def _count_round(self, is_one: bool) -> None:
        self.rounds += is_one
        self.settings.check_rounds(self.rounds)

    def _changes(self) -> tuple[int, int]:
        return self.host.memory.changes, self.host.kept.changes

    def _place(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

    def _stored(self) -> list[int]:
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := _VERSION.fullmatch(path.name)))

    def _reply(self, kind: str, header: dict[str, Any], sent: Mapping[str, list[Tensor]], **when: Any) -> bytes:
        """Everything leaves through here, and is written down first."""
        order = {name: len(arrays) for name, arrays in sent.items()}
        message = wire.pack({**header, "order": order}, [array for arrays in sent.values() for array in arrays])
        what = [
            {"name": name, "shape": list(array.shape), "dtype": str(array.dtype).removeprefix("torch."), "norm": float(array.double().norm())}
            for name, arrays in sent.items()
            for array in arrays
        ]
        _write_down(self.log, {"run": self.plan.name, "kind": kind, **when, "bytes": len(message), "arrays": what})
        return message


def _write_down(path: Path, line: dict[str, Any]) -> None:
    """Everything that leaves. A site that cannot write it down lets nothing out."""
    with open(path, "ab+") as file:
        torn = file.tell() > 0 and (file.seek(-1, 2), file.read(1))[1] != b"\n"  # the disk was full, or the power went
        file.write((b"\n" if torn else b"") + json.dumps({"time": round(time.time(), 3), **line}).encode() + b"\n")


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
                raise WireError("another process of this site still works on this run: stop it, or wait for its end.") from None
            time.sleep(0.2)


def _rounds_so_far(path: Path, run: str) -> int:
    """From the log of what left, which no rollback shortens."""
    if not path.exists():
        return 0
    rounds = 0
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # torn: nothing left then
            continue
        rounds += line["run"] == run and bool(line.get("arrays"))
    return rounds
