"""A real federation on loopback for tests; whoever leaves it finds no process of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from fedbilevel.sites.flare import job, kits
from fedbilevel.sites.flare.local import Loopback
from support.sites.loopback import TRIAL

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(kits.__file__).parents[3])])}


@contextmanager
def federation_of(folder: Path, sites: Sequence[str], **options: Any) -> Iterator[Loopback]:
    with Loopback(folder, sites, environment=HERE, **options) as running:
        for site in sites:
            (running.kits[site] / job.SITE / "site.toml").write_text(TRIAL)
        yield running
    assert [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in one.info["cmdline"] or [])
    ] == []
