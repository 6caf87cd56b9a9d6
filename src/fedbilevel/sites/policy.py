"""What a site says about itself, in a file of its own that never travels: where its data lie, and what it allows.

    data = "/data/cleaning"           # a folder, for the loader; the environment variable FEDBILEVEL_SITE_DATA overrides it
    loader = "folder"                 # train.npz, val.npz ...; or "package.module:function", installed here, called with the path
                                  # or "simulated": the task's own data of this client, to learn and to test
    device = "cpu"
    [policy]
    min_samples = 10                  # fewer training samples than this, and the site takes no part
    tasks = ["data_cleaning"]         # nothing: all that are installed here
    algorithms = ["fedbio"]           # likewise
    max_rounds = 10000                # answers with arrays or figures that one run may have from this site

Nothing in it is a default of the server's, and no message changes it.
"""

from __future__ import annotations

import importlib
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.data.clients import Holdings
from fedbilevel.data.folders import read_folder
from fedbilevel.errors import DataError, PlanError, PolicyError, UnknownNameError
from fedbilevel.settings import check_plain
from fedbilevel.sites.plan import Plan

FILE = "site.toml"
TEMPLATE = """\
# What this site decides by itself. Nothing in here ever leaves it.

data = ""                             # a folder with train.npz, val.npz ...; `fedbilevel federation start-site KIT --data PATH` sets it too
loader = "folder"                     # or "package.module:function", installed here, which is called with the path
device = "cpu"

[policy]                              # what a run must keep to, or this site takes no part
min_samples = 1                       # training samples that this site must have
# tasks = ["data_cleaning"]           # the only ones that are allowed; without this line: all that are installed here
# algorithms = ["fedbio"]             # likewise
# max_rounds = 10000                  # answers with arrays or figures that one run may have from this site
"""
DATA = "FEDBILEVEL_SITE_DATA"
_KINDS = {"data": "text", "loader": "text", "device": "text", "policy": "table"}
_POLICY = {"min_samples": "whole", "tasks": "names", "algorithms": "names", "max_rounds": "whole"}


@dataclass(frozen=True)
class SiteSettings:
    data: str = ""
    loader: str = "folder"
    device: str = "cpu"
    policy: dict[str, Any] = field(default_factory=dict)

    def check_plan(self, plan: Plan) -> None:
        """Before any data are read."""
        for part, asked in (("tasks", plan.task["name"]), ("algorithms", plan.algorithm["name"])):
            if part in self.policy and asked not in self.policy[part]:
                raise PolicyError(f"this site's policy does not allow {asked}: it allows the {part} {', '.join(self.policy[part]) or 'none'}.")

    def check_samples(self, num_samples: int) -> None:
        least = self.policy.get("min_samples", 1)
        if num_samples < least:
            raise PolicyError(f"this site has fewer than the {least} training samples that its policy asks for: lower min_samples there, or go on without it.")

    def check_rounds(self, num_rounds: int) -> None:
        """num_rounds: with the one that is asked for."""
        most = self.policy.get("max_rounds")
        if most is not None and num_rounds > most:
            raise PolicyError(f"this site's policy allows {most} rounds in one run, and they have been used up: raise max_rounds there, or go on without it.")

    def holdings(self, plan: Plan, number: int) -> Holdings:
        """This client's data. number: which client of a simulated task it is."""
        if self.loader == "simulated":
            clients = plan.built_task().build().clients
            if number >= len(clients):
                raise PlanError(f"the simulated task has {len(clients)} clients, this site is number {number}: raise num_clients of the task in the plan.")
            return clients[number]
        place = os.environ.get(DATA) or self.data
        if not place:
            raise PlanError(f"this site does not say where its data lie: set data in its {FILE}, or start it with --data.")
        if self.loader == "folder":
            return read_folder(Path(place), num_classes=plan.num_classes)
        return _function(self.loader)(place)


def read_settings(folder: Path) -> SiteSettings:
    place = folder / FILE
    try:
        content = tomllib.loads(place.read_text()) if place.exists() else {}
    except OSError as error:
        raise PlanError(f"{FILE} of this site cannot be read ({error.strerror}): put a file there, or nothing.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{FILE} of this site is not readable as TOML: {error}.") from error
    for kinds, table, what in ((_KINDS, content, f"entry of {FILE}"), (_POLICY, content.get("policy", {}), f"entry of the policy in {FILE}")):
        for name, value in table.items() if isinstance(table, dict) else ():
            if name not in kinds:
                raise UnknownNameError(what, name, kinds)
            check_plain(f"{name} in {FILE}", value, kinds[name], PlanError)
    return SiteSettings(**content)


def check_data(settings: SiteSettings, place: Path) -> None:
    """When a site is started: that there is something to read, so that nobody finds out in the middle of a run."""
    if settings.loader == "folder" and (not place.is_dir() or not any(path.stem == "train" for path in place.iterdir())):
        raise DataError(f"there is no train file in {place}: a site's folder holds train.npz and val.npz (or .csv, or .safetensors).")


def _function(name: str) -> Callable[[str], Holdings]:
    """A loader that the site has installed and named itself."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"loader in {FILE} is {name!r} ({error}), expected 'folder', 'simulated' or an installed package.module:function.") from error
    if not callable(found):
        raise PlanError(f"loader in {FILE} is {name!r}, which is not a function: name one as package.module:function.")
    return found
