"""Features of a network that the clients train on noisy labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.cleaning import network
from fedbilevel.cleaning.network import hidden, train_network
from fedbilevel.cli.main import cli
from fedbilevel.errors import ProblemError
from fedbilevel.studies.kinds import cleaning
from support.stops import ctrl_c

WHERE = {"device": "cpu", "dtype": torch.float32, "engine": "simulation"}


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(network, "_TRAINING", {**network._TRAINING, "num_iterations": 8})


def stripes(rng, num):
    """Images of 8 x 8 with horizontal, vertical or no stripes at a random shift and sign."""
    label = rng.integers(0, 3, num)
    wave = np.stack([np.roll(np.tile([1.0, 1.0, -1.0, -1.0], 2), s) for s in rng.integers(0, 4, num)])
    image = np.where((label == 0)[:, None, None], wave[:, None, :], wave[:, :, None]) * (label != 2)[:, None, None]
    return {"image": image + 0.3 * rng.normal(size=(num, 8, 8)), "label": label}


def striped(num_clients=3):
    rng = np.random.default_rng(0)
    clients = [{"train": stripes(rng, 80), "val": stripes(rng, 20)} for _ in range(num_clients)]
    for client in clients:
        train = client["train"]
        train["label"] = np.where(np.arange(80) < 12, (train["label"] + 1) % 3, train["label"])
    return clients


def test_a_network_finds_labels_that_no_linear_model_of_pixels_can_judge():
    clients = striped()
    found = fb.clean_labels(clients, features="trained")
    assert found.model["weight"].shape == (64, 3)
    flags = np.concatenate(found.flags)
    wrong = np.tile(np.arange(80) < 12, 3)
    assert flags[wrong].mean() > 0.6
    assert flags[~wrong].mean() < 0.05
    fresh = stripes(np.random.default_rng(5), 200)
    assert (found.predict(fresh["image"]) == fresh["label"]).mean() > 0.9
    plain = fb.clean_labels(clients, features="given")
    assert (plain.predict(fresh["image"]) == fresh["label"]).mean() < 0.6
    assert found.found["network"]["rounds"] == 100
    assert "network" not in plain.found


@pytest.mark.usefixtures("brief")
def test_the_network_is_that_of_its_seed_and_of_the_training_samples_alone():
    clients = striped()
    first = train_network(clients, 3, seed=0, **WHERE)
    other = [{**client, "val": stripes(np.random.default_rng(9), 7)} for client in clients]
    again = train_network(other, 3, seed=0, **WHERE)
    assert all(torch.equal(first.y[name], again.y[name]) for name in first.y)
    assert not torch.equal(first.y["hidden.weight"], train_network(clients, 3, seed=1, **WHERE).y["hidden.weight"])
    assert first.cost["rounds"] == 8


@pytest.mark.parametrize(
    ("side", "channels", "num_layers", "left"), [(6, 1, 1, 3), (8, 1, 2, 2), (28, 1, 3, 3), (32, 3, 4, 2)]
)
def test_the_hidden_layer_is_that_of_torch_modules(side, channels, num_layers, left):
    y = network._initial(side, channels, 5, seed=0)
    layers = []
    for number in range(num_layers):
        weight = y[f"{number}.weight"]
        conv = nn.Conv2d(weight.shape[1], len(weight), 3, padding=1)
        conv.load_state_dict({"weight": weight, "bias": y[f"{number}.bias"]})
        layers += [conv, nn.ReLU(), nn.MaxPool2d(2)]
    last = nn.Linear(len(y[f"{num_layers - 1}.weight"]) * left**2, 64)
    last.load_state_dict({"weight": y["hidden.weight"], "bias": y["hidden.bias"]})
    module = nn.Sequential(nn.LayerNorm((channels, side, side), 1e-6, False), *layers, nn.Flatten(), last, nn.ReLU())
    images = 40 + 9 * torch.randn(4, channels, side, side, generator=torch.Generator().manual_seed(1))
    wanted = module(images).detach()
    assert wanted.std() > 0
    assert torch.allclose(hidden(y, images.flatten(1), side, channels), wanted, rtol=1e-4, atol=1e-5)
    assert f"{num_layers}.weight" not in y


def test_rows_that_are_no_images_are_refused():
    rows = {"image": np.zeros((4, 5)), "label": np.array([0, 1, 0, 1])}
    with pytest.raises(ProblemError, match="square images of at least 6 x 6"):
        fb.clean_labels([{"train": rows, "val": rows}], features="trained")


@pytest.mark.usefixtures("brief")
def test_the_command_and_the_study_train_features_as_well(tmp_path):
    words = ["--num-clients", "3", "--noise", "0.2", "--test-share", "0.5", "--num-clean", "20"]
    words += ["--features", "trained", "--out", str(tmp_path / "run")]
    found = CliRunner().invoke(cli, ["clean", *words], catch_exceptions=False)
    assert found.exit_code == 0
    assert "labels are flagged as wrong" in found.output
    task = {"name": "data_cleaning", "num_clients": 3, "noise": 0.2, "test_share": 0.8}
    row = {"task": task, "detector": {"name": "as_given", "num_fit_rounds": 2}}
    both = {}
    for features in ("given", "trained"):
        go = cleaning.run(
            {**row, "features": features}, repetition=0, folder=tmp_path, device="cpu", say=lambda text: None
        )
        both[features] = go.figures
    assert both["trained"]["rounds"] == both["given"]["rounds"] + 8
    assert both["trained"]["megabytes"] > 0.2


def test_ctrl_c_in_the_training_of_features_leaves_no_network(brief, monkeypatch):
    ctrl_c(monkeypatch, FedAvg)
    with pytest.raises(KeyboardInterrupt):
        train_network([{"train": stripes(np.random.default_rng(0), 20)}], 3, seed=0, **WHERE)
