"""Decisions of a site's operator, as files in the site's folder. The site's job reads them at every
message.

    requests/DIGEST.json      a submitted plan: its sender, its content, and what would leave
    approvals.json            per digest: approved, refused or left, when and by whom
    control.json              whether the site is paused

A file that cannot be read is an error and never a permission.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fedbilevel.errors import PlanError, PolicyError, SettingError, UnknownNameError
from fedbilevel.escapes import printable

Request = dict[str, Any]  # the content of a file in requests/
Decision = Literal["approved", "refused", "left"]
REQUESTS, APPROVALS, CONTROL, LOCK = "requests", "approvals.json", "control.json", "operator.lock"
SHORTEST = 8  # characters of a digest that a person must type
SHOWN = 12  # characters of a digest that are shown
MOST = 100  # plans that may wait, so that a lead cannot fill the site's disk
_KEYS = {"digest", "time", "who", "run", "plan", "leaves"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_read: dict[Path, tuple[tuple[int, int, int], dict[str, Any]]] = {}  # content of a file by its stamp


def site_folder(kit: Path) -> Path:
    """Return the site's own folder in its startup kit."""
    if not (kit / "startup" / "fed_client.json").is_file():
        raise SettingError(f"{kit} is not the kit of a site: give the folder that start-site takes.")
    return kit / "site"


# ---- for the site's job --------------------------------------------------------------------------


def ask(folder: Path, digest: str, who: str, run: str, plan: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """File a request, unless it exists with its preview.

    who: name of the lead that submitted the plan.
    leaves: counts from `preview` of the data that would leave the site.
    """
    place = folder / REQUESTS / f"{_checked(digest)}.json"
    before = _table(place)
    if before and (before.get("leaves") or not leaves):  # an automatic approval has no preview
        return
    if len(pending(folder)) >= MOST:
        raise PolicyError(f"{MOST} plans wait for approval at this site: its operator must decide on them first.")
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = {"who": printable(who)[:200], "run": printable(run)[:200]}
    _write(place, {"digest": digest, "time": time.time(), **names, "plan": dict(plan), "leaves": dict(leaves)})


def decision(folder: Path, digest: str) -> Decision | None:
    """Return the operator's last decision about a plan, or None. The file is read again only if it
    has changed."""
    entry = _table(folder / APPROVALS).get(_checked(digest))
    return entry["decision"] if entry else None


def is_paused(folder: Path) -> bool:
    """Check whether the site is paused. The file is read again only if it has changed."""
    return _table(folder / CONTROL).get("paused", False) is not False


def withdraw_automatic(folder: Path) -> None:
    """Delete approvals by `auto_approve` after the site has unset it, so that the operator
    decides."""
    if not _table(folder / APPROVALS):
        return
    with _locked(folder):
        before = _table(folder / APPROVALS)
        kept = {digest: entry for digest, entry in before.items() if entry["how"] != "auto"}
        if kept != before:
            _write(folder / APPROVALS, kept)


# ---- for the operator ----------------------------------------------------------------------------


def requests(folder: Path) -> list[Request]:
    """List all plans that were ever submitted, oldest first. Each has the entries `decision`, `by`
    and `how`, which are None before a decision."""
    decided = _table(folder / APPROVALS)
    found = []
    for path in (folder / REQUESTS).glob("*.json"):
        one = _table(path)
        if not one.keys() >= _KEYS or one["digest"] != path.stem or not isinstance(one["time"], int | float):
            raise PlanError(f"{path} is not the request of a site's job: remove it.")
        entry = decided.get(path.stem, {})
        found.append({**one, **{name: entry.get(name) for name in ("decision", "by", "how")}})
    return sorted(found, key=lambda one: one["time"])


def pending(folder: Path) -> list[Request]:
    """List the plans that wait for a decision, oldest first."""
    return [one for one in requests(folder) if one["decision"] is None]


def request(folder: Path, digest: str) -> Request:
    """Find the plan with this digest, or the only plan whose digest begins with it."""
    known = {one["digest"]: one for one in requests(folder)}
    if not known:
        raise SettingError(f"no plan was submitted to this site yet: there is nothing to decide about {digest!r:.80}.")
    if len(digest) < SHORTEST:
        raise SettingError(f"the digest is given as {digest!r}, expected at least its first {SHORTEST} characters.")
    fitting = [name for name in known if name.startswith(digest.lower())]
    if not fitting:
        raise UnknownNameError("plan at this site", digest[:64], [name[:SHOWN] for name in known])
    if len(fitting) > 1:
        raise SettingError(
            f"{len(fitting)} plans have a digest that begins with {digest}: give more of its characters."
        )
    return known[fitting[0]]


def approve(folder: Path, digest: str, by: str, how: Literal["operator", "auto"] = "operator") -> Request:
    """Allow a plan to run, even if it was refused or left before, and return the request.

    digest: the digest of the plan, or its beginning.
    """
    return _decide(folder, [request(folder, digest)], "approved", by, how)[0]


def refuse(folder: Path, digest: str, by: str) -> Request:
    """Refuse a plan, which can still be approved later."""
    return _decide(folder, [request(folder, digest)], "refused", by)[0]


def leave(folder: Path, run: str, by: str) -> list[Request]:
    """Leave a run, with all its plans."""
    known = requests(folder)
    found = [one for one in known if one["run"] == run]
    if not known:
        raise SettingError(f"no run was submitted to this site yet: there is no run {run!r:.80} to leave.")
    if not found:
        raise UnknownNameError("run at this site", run, {one["run"] for one in known})
    return _decide(folder, found, "left", by)


def pause(folder: Path) -> None:
    """Pause the site, so that it answers nothing until `unpause`. Runs wait for the site or
    continue without it."""
    _write(folder / CONTROL, {"paused": True})


def unpause(folder: Path) -> None:
    _write(folder / CONTROL, {"paused": False})


# ---- inside --------------------------------------------------------------------------------------


def _decide(folder: Path, plans: list[Request], what: Decision, by: str, how: str = "operator") -> list[Request]:
    entry = {"time": time.time(), "by": printable(by)[:200], "how": how, "decision": what}
    with _locked(folder):
        _write(folder / APPROVALS, {**_table(folder / APPROVALS), **{one["digest"]: entry for one in plans}})
    return plans


def _checked(digest: str) -> str:
    """Return the digest if it is valid. The check protects a file name, because the digest becomes
    one."""
    if not _DIGEST.fullmatch(digest):
        raise PlanError(f"the digest of a plan is {digest!r:.80}, expected 64 hexadecimal digits.")
    return digest


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock, because the job and the operator may decide at the same time."""
    with open(folder / LOCK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _table(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or {} if the file does not exist."""
    try:
        about = path.stat()
        stamp = (about.st_ino, about.st_mtime_ns, about.st_size)
        if path not in _read or _read[path][0] != stamp:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it holds no table")
            _read[path] = (stamp, content)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read ({error}): restore it from a copy, or remove it.") from error
    return _read[path][1]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    from fedbilevel.runs.record import write_whole  # imports torch, which a reader does not need

    path.with_name(f"{path.name}.part").touch(0o600)  # readable by its owner only, from the first byte
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
