"""The configuration of a job: the classes that run it, the plan, and the lead's signature of the
plan."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from fedbilevel.errors import PolicyError
from fedbilevel.sites.flare.identity import LEAD, Party, Signer, root_of

SERVER, CLIENT = "fedbilevel.sites.flare.job.Server", "fedbilevel.sites.flare.job.Client"
# seconds between a job process's requests for tasks; the start of a job waits for four, and FLARE's default is 2
TASK_INTERVAL = 0.2
PLAN = "plan"  # the purpose of the lead's signature


def packed(plan: dict[str, Any]) -> str:
    """Encode a plan as an argument in a job's configuration. The text has no braces, because FLARE
    would replace names in them."""
    return base64.urlsafe_b64encode(json.dumps(plan).encode()).decode()


def unpacked(plan: str) -> dict[str, Any]:
    return json.loads(base64.urlsafe_b64decode(plan))


def sealed(kit: Path, plan: str) -> str:
    """Sign a packed plan as the lead, and return the signature with the lead's certificate."""
    lead = Signer(kit)
    return ".".join(base64.urlsafe_b64encode(part).decode() for part in (lead.certificate, lead.sign(PLAN, plan)))


def lead_of(kit: Path, plan: str, seal: str) -> str:
    """Return the name of the lead that signed a packed plan."""
    parts = seal.split(".")
    if len(parts) != 2:
        raise PolicyError(
            "the job brings no plan that a lead has signed: submit it with `fedbilevel federation submit`."
        )
    certificate, signature = (base64.urlsafe_b64decode(part) for part in parts)
    lead = Party(certificate, root_of(kit))
    if lead.role != LEAD or not lead.signed(signature, PLAN, plan):
        raise PolicyError(
            "the plan of the job is not signed by a lead of this federation: submit it with a lead's kit."
        )
    return lead.name


def configurations(plan: dict[str, Any], seal: str, *, server: str = SERVER, client: str = CLIENT) -> dict[str, Any]:
    """Return the configuration files of a job at the server and at its sites, by path. They name
    installed classes and hold no code.

    seal: the lead's signature of the plan.
    server, client: names of the classes that run the job at the server and at a site.
    """
    controller = {"server_obj_id": "_server", "collab_obj_ids": [], "props": {}, "sync_task_timeout": 120}
    executor: dict[str, Any] = {"client_obj_id": "_client", "collab_obj_ids": [], "props": {}}
    executor["max_inbound_call_threads"] = 2  # the second thread answers pings while a phase runs
    return {
        "at_server/config/config_fed_server.json": {
            "format_version": 2,
            "server": {"task_request_interval": TASK_INTERVAL},
            "workflows": [
                {"id": "controller", "path": "nvflare.collab.runtime.controller.CollabController", "args": controller}
            ],
            "components": [{"id": "_server", "path": server, "args": {"plan": packed(plan), "seal": seal}}],
            "task_data_filters": [],
            "task_result_filters": [],
        },
        "at_site/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [
                {
                    "tasks": ["*"],
                    "executor": {"path": "nvflare.collab.runtime.executor.CollabExecutor", "args": executor},
                }
            ],
            "components": [{"id": "_client", "path": client, "args": {"plan": packed(plan), "seal": seal}}],
            "task_data_filters": [],
            "task_result_filters": [],
        },
    }
