"""Data for methods that tell noisy clients from clean ones."""

from __future__ import annotations

from typing import Any

import numpy as np


def some_noisy_clients(dim: int = 5, num_clients: int = 6) -> tuple[list[dict[str, Any]], set[int]]:
    """Return clients with other shares of three classes; two of them have 45 % wrong labels."""
    rng = np.random.default_rng(2)
    noisy, clients = {1, 4}, []
    for i in range(num_clients):
        share = rng.dirichlet([5.0, 5.0, 5.0])
        client = {}
        for role, num in (("train", 150 + 10 * i), ("val", 20)):
            label = rng.choice(3, num, p=share if role == "train" else None)
            client[role] = {"image": rng.normal(size=(num, dim)) + 4 * np.eye(3, dim)[label], "label": label}
        train = client["train"]
        train["wrong"] = rng.random(len(train["label"])) < (0.45 if i in noisy else 0.0)
        train["label"] = np.where(
            train["wrong"], (train["label"] + rng.integers(1, 3, len(train["label"]))) % 3, train["label"]
        )
        clients.append(client)
    return clients, noisy
