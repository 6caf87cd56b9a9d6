"""Sites in this process for tests: real `Site` objects that exchange bytes with the real server,
over a transport that can fail in every way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedbilevel.columns import COLUMNS
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.sites import wire
from fedbilevel.sites.plan import plan_of
from fedbilevel.sites.serve import serve
from fedbilevel.sites.site import Site
from fedbilevel.sites.transport import Failure, InProcess, Reply

# settings of a site in tests: small batches, and no operator
TRIAL = 'loader = "simulated"\nauto_approve = true\n[policy]\nmin_batch = 1\n'
# site and header -> "silent", "late", "deaf", "nan", a function of an answer's header and arrays, or None
Fault = Callable[[str, dict[str, Any]], Any]


class Faulty(InProcess):
    """A transport with faults. silent: the message never arrives. deaf: it is carried out, and the
    answer is lost. late: it arrives after the next message that is no ping. nan: the answer holds
    NaN.
    killed: the site's process is a new one from here on."""

    def __init__(self, federation: Loopback, fault: Fault) -> None:
        super().__init__(
            {name: lambda message, name=name: federation.sites[name].handle(message) for name in federation.names}
        )
        self.federation, self.fault = federation, fault
        self.late: dict[str, list[bytes]] = {}
        self.answers_to_late: list[dict[str, Any]] = []
        self.stopped = False

    def stop_asked(self) -> bool:
        return self.stopped

    def exchange(
        self, messages: Mapping[str, bytes], *, deadline: float
    ) -> tuple[dict[str, Reply], dict[str, Failure]]:
        replies, failures = {}, {}
        for name in sorted(messages):
            how = self.fault(name, wire.unpack(messages[name])[0])
            if how in ("silent", "late"):
                if how == "late":
                    self.late.setdefault(name, []).append(messages[name])
                failures[name] = Failure(True, "no answer", deadline)
                continue
            if how == "killed":
                self.federation.restart(name)
                failures[name] = Failure(True, "no answer", deadline)
                continue
            reply = super().exchange({name: messages[name]}, deadline=deadline)[0][name]
            ping = wire.unpack(messages[name])[0]["kind"] == "ping"
            for message in () if ping else self.late.pop(name, []):
                self.answers_to_late.append(wire.unpack(self.federation.sites[name].handle(message))[0])
            if how == "deaf":
                failures[name] = Failure(True, "no answer", deadline)
            elif how == "nan" or callable(how):
                header, arrays = wire.unpack(reply.content)
                changed = how(header, arrays) if callable(how) else (header, [array * float("nan") for array in arrays])
                replies[name] = Reply(changed if isinstance(changed, bytes) else wire.pack(*changed), reply.seconds)
            else:
                replies[name] = reply
        return replies, failures


class Loopback:
    opened: ClassVar[list[Loopback]] = []

    def __init__(
        self,
        folder: Path,
        num_sites: int = 3,
        settings: str = TRIAL,
        *,
        hosts: Sequence[int] = (),
        papers: Callable[[str], Any] = lambda name: None,
        party_of: Any = None,
    ) -> None:
        """hosts: how many clients each site hosts, where that is not one. papers, party_of: for secure sums."""
        self.papers, self.party_of = papers, party_of
        self.folder, self.names = folder, [f"site-{i}" for i in range(len(hosts) or num_sites)]
        self.clients = dict(zip(self.names, hosts, strict=False))
        self.sites: dict[str, Site] = {}
        for name in self.names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "site.toml").write_text(settings)
            self.sites[name] = Site(name, folder / name, papers=papers(name))
        self.opened.append(self)

    @classmethod
    def close_all(cls) -> None:
        while cls.opened:
            for site in cls.opened.pop().sites.values():
                site.close()

    def restart(self, name: str) -> None:
        """Start a new process, with the disk of the old one."""
        self.sites[name].close()
        self.sites[name] = Site(name, self.folder / name, papers=self.papers(name))

    def plan(self, algorithm: Mapping[str, Any], task: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        number = sum(self.clients.values()) or len(self.names)
        plan = {
            "name": "trial",
            "sites": self.names,
            "task": task or {"name": "quadratic", "num_clients": number},
            "algorithm": dict(algorithm),
        }
        plan |= {"clients": self.clients} if self.clients else {}
        return {
            **plan,
            "num_iterations": 4,
            "measure_every": 2,
            "options": {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop"},
            **more,
        }

    def serve(
        self,
        plan: Mapping[str, Any],
        fault: Fault = lambda name, header: None,
        say: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> str:
        self.transport = Faulty(self, fault)
        return serve(plan, self.transport, self.folder / "server" / "trial", say, self.party_of)

    @property
    def record(self) -> Record:
        return Record(self.folder / "server" / "trial")

    def diary(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.record.path / "sites.jsonl").read_text().splitlines()]

    def left(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "left.jsonl").read_text().splitlines()]


def simulated(plan: Mapping[str, Any], folder: Path, **more: Any) -> tuple[Result, dict[str, torch.Tensor]]:
    """The same plan in the simulator: its result and its last checkpoint."""
    ours = plan_of(plan)
    built = ours.built_task().build()
    result = solve(
        *built,
        ours.built_algorithm(),
        residuals=False,
        num_iterations=ours.num_iterations,
        measure_every=ours.measure_every,
        record=folder,
        **{**ours.keywords(), **more},
    )
    return result, Record(folder).load()[0]


def _columns(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    whole = {name: value for name, value in tensors.items() if not name.startswith("ledger.phase-")}
    phases = {
        name.removeprefix("ledger.phase-"): value for name, value in tensors.items() if name.startswith("ledger.phase-")
    }
    for number, column in enumerate(("rounds", *COLUMNS)):
        whole[f"ledger.{column}"] = torch.cat(
            [whole[f"ledger.{column}"].reshape(-1), *(phases[name][number : number + 1] for name in sorted(phases))]
        )
    return whole


def differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Largest relative differences of a server's state and ledger, with the costs of every phase
    after those of every client."""
    found = {}
    one, other = _columns(one), _columns(other)
    for name, value in other.items():
        if name.startswith(("state.", "ledger.")):
            mine, theirs = one[name].double(), value.double()
            found[name] = (
                float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))
                if theirs.numel() and not torch.equal(mine, theirs)
                else 0.0
            )
    return found
