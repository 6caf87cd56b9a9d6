"""Classification: the network and losses in plain numpy, splits, weights of clients, and FedAvg with epochs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.classification import Classification
from fedbilevel.tasks.task import Sample, Shapes


def logits(y: dict[str, np.ndarray], image: np.ndarray) -> np.ndarray:
    z = image.reshape(-1, 1, 8, 8).astype(float)
    for name, kernel in (("conv1", 3), ("conv2", 2)):
        windows = np.lib.stride_tricks.sliding_window_view(z, (kernel, kernel), axis=(2, 3))
        z = np.einsum("nchwij,kcij->nkhw", windows, y[f"{name}.weight"]) + y[f"{name}.bias"][:, None, None]
        side = z.shape[-1] // 2 * 2
        z = np.maximum(z, 0)[..., :side, :side].reshape(*z.shape[:2], side // 2, 2, side // 2, 2).max((3, 5))
    z = z.reshape(len(z), -1)
    for name in ("hidden1", "hidden2"):
        z = np.maximum(z @ y[f"{name}.weight"].T + y[f"{name}.bias"], 0)
    return z @ y["out.weight"].T + y["out.bias"]


def test_losses_and_accuracy_are_those_of_plain_numpy_with_clients_by_their_samples():
    built = Classification(num_clients=3, share=0.2, weight_decay=0.05).build()
    population = Population(*built, dtype=torch.float64)
    y = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(population.y0).items()}
    sums = {"train": 0.0, "val": 0.0}
    right = num = 0
    weights = np.array([len(client["train"]["label"]) for client in built.clients])
    assert len(set(weights.tolist())) == 3
    for client, weight in zip(built.clients, weights / weights.sum(), strict=True):
        for role in sums:
            scores, label = logits(y, client[role]["image"]), client[role]["label"]
            losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(label)), label]
            sums[role] += weight * losses.mean()
        right += int((logits(y, client["test"]["image"]).argmax(1) == client["test"]["label"]).sum())
        num += len(client["test"]["label"])
    figures = population.measure(population.x0, population.y0)
    norm = sum((leaf**2).sum() for leaf in y.values())
    assert figures["upper_loss"] == pytest.approx(sums["val"], rel=1e-9)
    assert figures["lower_loss"] == pytest.approx(sums["train"] + 0.025 * norm, rel=1e-6)
    assert figures["test_accuracy"] == right / num


def test_every_training_image_has_one_client_and_small_parts_validate():
    for split in ("dirichlet", "shards", "iid"):
        clients = Classification(num_clients=5, split=split, val_share=0.1).build().clients
        total = sum(len(client[role]["label"]) for client in clients for role in ("train", "val"))
        assert total == 1797 - round(0.25 * 1797)
        assert all(len(client["val"]["label"]) >= 1 for client in clients)
        kinds = [len(np.unique(client["train"]["label"])) for client in clients]
        assert (max(kinds) <= 4) == (split == "shards")
    counts = [len(c["train"]["label"]) for c in Classification(num_clients=40, alpha=0.05).build().clients]
    assert min(counts) >= 9  # ten, of which one validates


def test_fedavg_with_epochs_and_momentum_learns_the_digits():
    built = Classification(num_clients=4, model="linear").build()
    result = fb.solve(
        *built, "fedavg", num_rounds=8, lr_lower=0.1, momentum=0.9, num_local_epochs=2, batch_size=32,
        sampling="epochs", measure_every=8,
    )  # fmt: skip
    assert result.rows[-1]["test_accuracy"] > 0.9


def test_images_of_other_sizes_need_the_linear_model():
    role = {"image": Sample((100,), "float32"), "label": Sample((), "int64")}
    shapes = Shapes({"train": role, "val": role}, 10)
    with pytest.raises(
        ProblemError, match=r"^images have 100 numbers, expected 64 or 784 \(8 x 8 or 28 x 28\) for the"
    ):
        Classification().problem(shapes)
    assert Classification(model="linear").problem(shapes).y0["out.weight"].shape == (10, 100)
