"""Production settings of a kit: its processes run only installed classes, behind a guard, and its
logs stay in the kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbilevel.errors import SettingError
from fedbilevel.runs.record import write_whole
from fedbilevel.sites import policy
from fedbilevel.sites.flare.job import SITE

ALLOWED = [  # the only classes that a job may name; a prefix would also admit functions
    "fedbilevel.sites.flare.job.Server", "fedbilevel.sites.flare.job.Client",
    "nvflare.collab.runtime.controller.CollabController", "nvflare.collab.runtime.executor.CollabExecutor",
]  # fmt: skip
MAX_JOBS = 4  # jobs that a server runs at once; others wait
GUARD: dict[str, Any] = {"id": "guard", "path": "fedbilevel.sites.flare.guard.Guard", "args": {}}
VALIDATOR: dict[str, Any] = {"path": "fedbilevel.sites.flare.guard.Validator", "args": {}}
BEAT_TIMEOUT = 30  # seconds without a heartbeat after which the server drops a site; FLARE's default is 600


def write_settings(kit: Path, *, is_server: bool, allow: list[str]) -> None:
    """Write the settings in local/, which belongs to the organisation. The signed folder startup/
    stays unchanged."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": allow, "allow_log_streaming": False}
    parts = {part["id"]: part for part in resources["components"]}
    if is_server:
        resources["servers"][0] |= {"heart_beat_timeout": BEAT_TIMEOUT}
        parts["job_scheduler"]["args"] |= {
            "min_schedule_interval": 0.2,
            "max_schedule_interval": 10.0,
            "max_jobs": MAX_JOBS,
        }
    for name in ("site_log_streamer", "log_receiver"):  # a site's logs stay there
        parts.pop(name, None)
    resources["components"] = [GUARD, *parts.values()]
    resources["app_validator"] = VALIDATOR
    rights = {
        "submit_job": "any",
        "clone_job": "none",
        "manage_job": "any",
        "view": "any",
        "byoc": "none",
        "server-predeployed-flwr": "none",
    }
    of_server = ("download_job", "operate", "shell_commands", "app_command")  # no lead reads files at a site
    rights |= dict.fromkeys(of_server, "any" if is_server else "none")
    logs = json.loads((local / "log_config.json.default").read_text())
    logs["handlers"] = {name: logs["handlers"][name] for name in ("logFileHandler", "errorFileHandler")}
    logs["loggers"]["root"]["handlers"] = list(logs["handlers"])
    logs["loggers"] |= {"nvflare.collab": {"level": "WARNING"}}  # otherwise several lines for every message
    files = {
        "resources.json": resources,
        "authorization.json": {"format_version": "1.0", "permissions": {"lead": rights}},
        "log_config.json": logs,
    }
    for name, content in files.items():
        (local / name).write_text(json.dumps(content, indent=2))
    if not is_server:
        (kit / SITE).mkdir(exist_ok=True)
        (kit / SITE / policy.FILE).write_text(policy.TEMPLATE)


def check_guarded(kit: Path) -> None:
    """Raise if a kit has no guard, because its processes would obey FLARE's own commands."""
    resources = json.loads((kit / "local" / "resources.json").read_text())
    if GUARD not in resources.get("components", []) or resources.get("app_validator") != VALIDATOR:
        fix = "make it anew with `provision`"
        raise SettingError(f"the kit {kit} has no guard in local/resources.json, like older kits: {fix}.")


def settle(kit: Path, place: Path | None = None) -> None:
    """Configure a server to keep its jobs in its kit. FLARE's default is /tmp, which two servers on
    one machine would share and which a reboot empties.

    place: the kit's future path, if it differs from `kit`.
    """
    path = kit / "local" / "resources.json"
    if not (kit / "startup" / "fed_server.json").is_file() or not path.is_file():
        return
    resources, place = json.loads(path.read_text()), (place or kit).resolve()
    manager = next(part for part in resources["components"] if part["id"] == "job_manager")
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(place / "snapshots")
    manager["args"]["uri_root"] = str(place / "jobs")
    write_whole(path, json.dumps(resources, indent=2).encode())
