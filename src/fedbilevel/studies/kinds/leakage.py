"""What a curious server reconstructs from the first messages of one algorithm (studies/leaks.py).

    task        data_cleaning with a linear model, or hyper_representation with an MLP; repetition r
                uses its `repeated(r)`
    algorithm   {name, settings}, with numbers as step sizes
    batch       samples that a client uses of each role, "all" for all that it has
    aggregation settings of the layer
    guess       true: no message; every class equally often, and of each true label the mean of its
                public images, which is what labels alone would tell
    num_starts, num_steps    of the search for images
    num_victims clients whose rows are inverted; under secure sums there is one sum

Figures: psnr, the mean over images of both roles; by role also recovered, the share of images with at
least 20 dB, and labels, the share of labels found. The messages of fedavg hold no validation samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.privacy.inversion import Inverted, labels_found, psnr
from fedbilevel.problem.client_data import Holdings
from fedbilevel.settings import made
from fedbilevel.studies import given
from fedbilevel.studies.leaks import ROLES, Server, watch
from fedbilevel.studies.outcome import RowOutcome

KNOWN = {
    "task": "table",
    "algorithm": "table",
    "batch": "size",
    "aggregation": "table",
    "guess": "flag",
    "num_starts": "whole",
    "num_steps": "whole",
    "num_victims": "whole",
}
CLEAR = 20.0  # decibels from which an image counts as recovered


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("task", "algorithm", "batch"))
    task, algorithm = given.task(row["task"]).repeated(repetition), given.algorithm(row["algorithm"])
    built, rng = task.build(), np.random.default_rng([repetition, 23])
    clients = [_some(client, row["batch"], rng) for client in built.clients]
    settings = made(Aggregation, row.get("aggregation", {}))
    seen = watch(algorithm, built.problem, clients, seed=repetition, aggregation=settings)
    public, classes = _truth(clients, "test")
    server = Server(seen, built.problem, task.l2, public.mean(0), torch.Generator().manual_seed(repetition))
    search = {"num_starts": row.get("num_starts", 2), "num_steps": row.get("num_steps", 100)}
    figures: dict[str, list[float]] = {}
    for victim in range(1 if settings.secure else row.get("num_victims", 2)):
        for role in ROLES:
            if not any(name in seen.derivatives for name in ROLES[role]):
                continue
            say(f"client {victim}, {role}")
            images, labels = _truth(clients if settings.secure else [clients[victim]], role)
            if row.get("guess", False):
                found = _guess(public, classes, labels)
            else:
                found = server.read(role, victim, len(labels), scaled=settings.clip is not None, **search)
            values = psnr(found.images, images)
            figures.setdefault("psnr", []).extend(values.tolist())
            figures.setdefault(f"recovered_{role}", []).extend((values >= CLEAR).double().tolist())
            figures.setdefault(f"labels_{role}", []).append(labels_found(found.labels, labels))
            figures.setdefault(f"residual_{role}", []).append(found.residual)
    means = {name: fmean(some) for name, some in figures.items()}
    return RowOutcome(means, [means])


def _some(client: Holdings, batch: int | str, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return a client with a few random samples of the roles that it trains with."""
    found = {}
    for role, fields in client.items():
        num = len(next(iter(fields.values())))
        some = rng.permutation(num)[: num if batch == "all" or role == "test" else int(batch)]
        found[role] = {name: np.asarray(value)[some] for name, value in fields.items()}
    return found


def _truth(clients: Sequence[Mapping[str, Any]], role: str) -> tuple[Tensor, Tensor]:
    images, labels = (np.concatenate([client[role][name] for client in clients]) for name in ("image", "label"))
    return torch.as_tensor(images).double(), torch.as_tensor(labels)


def _guess(public: Tensor, classes: Tensor, labels: Tensor) -> Inverted:
    images = torch.stack([public[classes == label].mean(0) for label in labels.tolist()])
    return Inverted(images, torch.arange(len(labels)) % (int(classes.max()) + 1), 1.0)
