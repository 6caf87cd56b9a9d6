"""FedCorr and FedNoRo between sites have the labels of the simulator, and send no samples."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from support.sites.loopback import Loopback, simulated


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "fedcorr", "num_passes": 3, "num_warm_rounds": 2, "num_tune_rounds": 2, "confidence": 0.1},
        {"name": "fednoro", "num_warm_rounds": 2, "num_fit_rounds": 8},
    ],
    ids=lambda some: some["name"],
)
def test_sites_have_the_labels_of_the_simulator(tmp_path, settings):
    federation = Loopback(tmp_path, 3)
    task = {"name": "data_cleaning", "num_clients": 3, "num_clean": 12, "test_share": 0.8, "learn": "labels"}
    task |= {"noise": 0.0, "noise_most": 0.9, "partition": "dirichlet"}
    whole = {"num_passes": 1, "num_fit_rounds": 2} | settings
    length = whole["num_passes"] + whole["num_fit_rounds"] + 1
    plan = federation.plan({"num_fit_rounds": 2} | settings, task, num_classes=10, num_iterations=length)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, _ = federation.record.load()
    for name in ("y", "models", "weights"):
        assert torch.equal(found[f"state.{name}"], wanted[f"state.{name}"]), name
    changed = 0
    for i, name in enumerate(federation.names):
        own = load_file(tmp_path / name / "runs" / "trial" / "solution.safetensors")["x.logit"]
        assert torch.equal(own, result.x[i]["logit"])
        changed += int((own.view(-1, 10).max(1).values > -1).sum())  # log q of a label that is not the given one
        sent = [array for line in federation.left(name) for array in line.get("arrays", ())]
        assert all(len(own) not in array["shape"] for array in sent)
    assert changed > 0
