"""Data cleaning with learn=labels: losses and flags in plain numpy, features, and the form of x."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import fedbilevel as fb
from fedbilevel.data.random_features import RandomConvolutions
from fedbilevel.oracle.population import Population
from fedbilevel.tasks import soft_labels
from fedbilevel.tasks.data_cleaning import DataCleaning

SMALL = {"num_clients": 3, "test_share": 0.8, "num_clean": 10, "l2": 0.1}


@pytest.mark.parametrize("features", ["pixels", "convolutional"])
def test_losses_and_flags_are_those_of_plain_numpy(features):
    problem, clients = DataCleaning(learn="labels", features=features, **SMALL).build()
    population = Population(problem, clients, dtype=torch.float64)
    rng = np.random.default_rng(0)
    x = 4 * torch.tensor(rng.normal(size=population.x0.shape))
    y = 0.1 * torch.tensor(rng.normal(size=population.y0.shape))
    figures = population.measure(x, y)
    losses, tp, flagged = [], 0, 0
    for i, client in enumerate(clients):
        train, n = client["train"], len(client["train"]["label"])
        own = x[i, : 10 * n].numpy().reshape(n, 10)
        q = softmax(own + 8 * np.eye(10)[train["label"]], axis=1)
        rows = train["image"].astype(float)
        if features == "convolutional":
            rows = RandomConvolutions.of(64)(torch.tensor(rows)).numpy()
        weight, bias = y[:-10].view(-1, 10).numpy(), y[-10:].numpy()
        losses.append(-(q * log_softmax(rows @ weight + bias, axis=1)).sum(1).mean())
        flags = q[range(n), train["label"]] < 0.5
        tp, flagged = tp + (flags & train["wrong"]).sum(), flagged + flags.sum()
    assert figures["lower_loss"] == pytest.approx(np.mean(losses) + 0.05 * float((y**2).sum()), rel=1e-9)
    assert 0 < flagged < sum(len(client["train"]["label"]) for client in clients)
    assert figures["precision"] == pytest.approx(tp / flagged)


def test_zero_stands_for_the_given_labels_and_posteriors_survive_the_form_of_x():
    label = torch.tensor([2, 0, 1])
    assert soft_labels.posterior(torch.zeros(9), label).argmax(1).tolist() == [2, 0, 1]
    log_q = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(1)
    x = soft_labels.as_x(log_q, label)
    assert torch.allclose(soft_labels.posterior(x, label), log_q.exp())
    assert torch.isfinite(soft_labels.as_x(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]))).all()


def test_a_bilevel_algorithm_learns_labels():
    """One hypergradient raises the probability of the true label of most samples that are wrong."""
    built = DataCleaning(learn="labels", noise=0.2, **SMALL).build()
    result = fb.solve(
        *built, "fedbio", num_iterations=40, lr_lower=1.0, lr_system=0.3, lr_upper=30.0, num_local_steps=1
    )
    doubt = []
    for own, client in zip(result.x, built.clients, strict=True):
        label = torch.tensor(client["train"]["label"])
        doubt.append(1 - soft_labels.of_given(soft_labels.posterior(own["logit"], label), label))
    wrong = np.concatenate([client["train"]["wrong"] for client in built.clients])
    every = torch.cat(doubt).numpy()
    assert np.median(every[wrong]) > np.median(every[~wrong])
