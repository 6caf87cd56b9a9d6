"""A small run to try out a federation: any number of hospitals with noisy labels, which keep their
images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.folders import write_folder
from fedbilevel.problem.client_data import Holdings
from fedbilevel.sites.plan import plan_of
from fedbilevel.tasks.data_cleaning import DataCleaning


def prepare(folder: Path, sites: Sequence[str]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return a plan, and write a folder of data for every site. Each site has clean images of only
    some of the ten digits."""
    parts = DataCleaning(num_clients=max(10, len(sites))).build().clients  # a client for each digit
    clients = [_together(parts[i :: len(sites)]) for i in range(len(sites))]
    data = {site: folder / site for site in sites}
    for site, client in zip(sites, clients, strict=True):
        if not data[site].exists():
            write_folder(data[site], client)
    plan = {
        "name": "trial",
        "sites": list(sites),
        "num_iterations": 20,
        "measure_every": 5,
        "num_classes": 10,
        "deadline": 30.0,
        "task": {"name": "data_cleaning"},
        "algorithm": {"name": "fbo_aggitd", "num_lower_rounds": 3},
        "options": {"seed": 1, "batch_size": 64},
    }
    return plan_of(plan).asdict(), data


def _together(parts: Sequence[Holdings]) -> Holdings:
    return {
        role: {name: np.concatenate([part[role][name] for part in parts]) for name in fields}
        for role, fields in parts[0].items()
    }
