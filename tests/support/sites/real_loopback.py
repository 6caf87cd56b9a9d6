"""A real federation on loopback for tests. No process of it is left afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.sites.flare import job, kits
from fedbilevel.sites.flare.local import Loopback
from support.sites.loopback import TRIAL
from support.sites.reaper import processes_of, reaped

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(kits.__file__).parents[3])])}


@contextmanager
def federation_of(folder: Path, sites: Sequence[str], **options: Any) -> Iterator[Loopback]:
    with reaped(folder):
        with Loopback(folder, sites, environment=HERE, **options) as running:
            for site in sites:
                (running.kits[site] / job.SITE / "site.toml").write_text(TRIAL)
            yield running
        assert processes_of(folder) == []
