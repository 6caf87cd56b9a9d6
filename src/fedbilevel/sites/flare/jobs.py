"""Runs and their jobs, as the lead handles them: submitting a run, reading its state, and stopping
it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import tempfile
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session

from fedbilevel.errors import FedBilevelError, SettingError, UnknownNameError
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.runs.runfile import NAME
from fedbilevel.sites.flare.configuration import CLIENT, SERVER, configurations, packed, sealed
from fedbilevel.sites.flare.connection import TROUBLE, session
from fedbilevel.sites.flare.job import PROGRESS, RUNS, STOP
from fedbilevel.sites.flare.transport import ASKED


class RunEntry:
    """The lead's own file about a run, in the lead's kit. The file is needed because FLARE lists a
    job that died with its server as running forever."""

    def __init__(self, kit: Path, run: str) -> None:
        if not NAME.fullmatch(run):
            raise SettingError(f"{run!r} is not the name of a run: use letters, digits, - and _.")
        self.path = kit / RUNS / f"{run}.json"

    def read(self) -> dict[str, Any]:
        if not self.path.is_file():
            known = sorted(path.stem for path in self.path.parent.glob("*.json"))
            raise (
                UnknownNameError("run", self.path.stem, known)
                if known
                else SettingError(f"no run was submitted with {self.path.parent.parent} so far: submit one first.")
            )
        return json.loads(self.path.read_text())

    def write(self, *, job: str | None = None, **changes: Any) -> None:
        """Change values; the lock keeps those that `stop` or another follower writes at the same time.

        job: id to add to the jobs of the run.
        """
        make_folder(self.path.parent)
        with open(self.path.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = {**(json.loads(self.path.read_text()) if self.path.is_file() else {"jobs": []}), **changes}
            if job is not None:
                content["jobs"] = [*content["jobs"], job]
            write_whole(self.path, json.dumps(content, indent=1).encode(), shared=True)


def job_folder(
    folder: Path, plan: dict[str, Any], *, seal: str, needed: int = 0, server: str = SERVER, client: str = CLIENT
) -> Path:
    """Write the folder of a job and return its path.

    needed: number of sites that must be connected before the job begins; 0 stands for the quorum.
    """
    place, sites = folder / plan["name"], list(plan["sites"])
    meta = {
        "name": plan["name"], "resource_spec": {}, "min_clients": needed or quorum(plan),
        "deploy_map": {"at_server": ["server"], "at_site": sites},
    }  # fmt: skip
    for name, content in {"meta.json": meta, **configurations(plan, seal, server=server, client=client)}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(content))
    return place


def quorum(plan: dict[str, Any]) -> int:
    return int(plan.get("quorum") or len(plan["sites"]))


def sites_needed(kit: Path, plan: dict[str, Any]) -> int:
    """Return the number of sites that a job needs: a quorum for a run that has begun, all sites for
    a new run."""
    entry = RunEntry(kit, plan["name"])
    return quorum(plan) if entry.path.is_file() and entry.read().get("begun") else len(plan["sites"])


def check_free(kit: Path, plan: dict[str, Any]) -> None:
    """Raise if the run is already running or finished."""
    with session(kit) as opened:
        if active_job(opened, kit, plan["name"]):
            ways = "`fedbilevel federation resume` follows it, `stop` ends it"
            raise SettingError(f"the run {plan['name']!r} is running already: {ways}.")
    entry = RunEntry(kit, plan["name"])
    before = entry.read() if entry.path.is_file() else {}
    if before.get("outcome") == "finished" and before["plan"].get("num_iterations", 0) >= plan.get("num_iterations", 0):
        raise SettingError(
            f"the run {plan['name']!r} is finished: give the new one another name, or this one more outer iterations."
        )


def submit(kit: Path, plan: dict[str, Any], *, server: str = SERVER, client: str = CLIENT) -> str:
    """Submit a run to the server and return the id of its job.

    server, client: names of the classes that run the job; they must be installed and allowed there.
    """
    check_free(kit, plan)
    with session(kit) as opened:
        return submit_job(opened, kit, plan, server, client)


def submit_job(opened: Session, kit: Path, plan: dict[str, Any], server: str, client: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        seal = sealed(kit, packed(plan))
        job = opened.submit_job(
            str(job_folder(Path(folder), plan, seal=seal, needed=sites_needed(kit, plan), server=server, client=client))
        )
    RunEntry(kit, plan["name"]).write(job=job, plan=plan, server=server, client=client, outcome="running")
    return job


def active_job(opened: Session, kit: Path, run: str) -> str | None:
    """Return the id of the run's job that the server runs or has queued, or None if there is no
    such job."""
    entry = RunEntry(kit, run)
    jobs = entry.read()["jobs"] if entry.path.is_file() else []
    if not jobs:
        return None
    with contextlib.suppress(api_spec.JobNotFound):
        running = {job.job_id for job in opened.get_system_info().job_info}
        status = str(opened.get_job_status(jobs[-1]))
        if jobs[-1] in running or (not status.startswith("FINISHED") and status != "RUNNING"):
            return str(jobs[-1])
    return None


def progress_of(opened: Session, run: str) -> dict[str, Any]:
    """Read the last progress that a job of the run wrote, or {} before the first progress."""
    text = opened.cat_target("server", file=f"{RUNS}/{run}/{PROGRESS}")
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # FLARE answers with a sentence where there is no such file
        return {}


def status(kit: Path) -> dict[str, Any]:
    """Return the connected sites, and every run submitted with this kit with its last progress."""
    with session(kit) as opened:
        info = opened.get_system_info()
        runs = {}
        for path in sorted((kit / RUNS).glob("*.json")):
            entry, progress = json.loads(path.read_text()), progress_of(opened, path.stem)
            is_last = bool(entry["jobs"]) and progress.get("job") == entry["jobs"][-1]
            outcome = progress.get("outcome") if is_last and progress.get("outcome") != "running" else None
            active = active_job(opened, kit, path.stem)
            runs[path.stem] = {
                "outcome": outcome or ("running" if active else "interrupted"),
                "jobs": len(entry["jobs"]),
                "sites": progress.get("sites", []),
                "latest": (progress.get("latest") or [None])[-1],
            }
        return {"sites": {client.name: client.last_connect_time for client in info.client_info}, "runs": runs}


def stop(kit: Path, run: str) -> None:
    """Ask a run to stop after its current outer iteration."""
    RunEntry(kit, run).read()
    with session(kit) as opened:
        job = active_job(opened, kit, run)
        if job is None:
            if RunEntry(kit, run).read().get("outcome") == "running":  # a follower waits for sites
                RunEntry(kit, run).write(stop=True)
                return
            raise SettingError(
                f"the run {run!r} is not running, so there is nothing to stop: see fedbilevel federation status."
            )
        try:
            opened.do_app_command(job, STOP, {"why": ASKED})
        except TROUBLE as error:  # it has not begun yet, or has just ended
            outcome = progress_of(opened, run).get("outcome", "running")
            if outcome != "running":
                raise SettingError(f"the run {run!r} is not running: it is {outcome}.") from None
            raise FedBilevelError(
                f"the run {run!r} could not be asked to stop ({error}): try again in a few seconds."
            ) from None
