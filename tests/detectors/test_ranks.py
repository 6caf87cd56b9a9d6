"""Detectors with two processes have the posteriors of one process, up to the rounding of sums by rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbilevel
import fedbilevel as fb
from support.numeric.labels import small

pytestmark = [pytest.mark.wait, pytest.mark.slow]

CASES = {
    "label_em": {
        "transition": "own",
        "num_fold_rounds": 100,
        "ridge": 2.0,
        "l2": 0.1,
        "num_folds": 3,
        "least_clean": 2,
    },
    "influence": {},
    "shared_weights": {"num_upper_steps": 3},
    "from_posterior": {"num_upper_steps": 3, "num_fold_rounds": 5, "least_t": -1e9},  # every step is accepted
    "sample_weights": {"num_steps": 3},
}
SCRIPT = """
import json
import sys
import numpy as np
import torch
import fedbilevel as fb
from support.numeric.labels import small
kept = {}
for name, settings in json.loads(sys.argv[3]).items():
    found = fb.clean_labels(
        small().clients, detector=name, engine="distributed", record=f"{sys.argv[1]}/{name}", dtype=torch.float64,
        features="given", **settings,
    )
    kept |= {f"{name}-{i}": q for i, q in enumerate(found.posteriors)}
    kept |= {f"{name}-weight": found.model["weight"], f"{name}-l2": [*found.found["l2"].values()]}
if torch.distributed.get_rank() == 0:
    np.savez(sys.argv[2], **kept)
"""


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(fedbilevel.__file__).parents[1]
    paths = f"{root}:{Path(__file__).parents[1]}"
    (folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [*(str(folder / name) for name in ("script.py", "record", "found.npz")), json.dumps(CASES)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=480, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "found.npz") as found:
        return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_posteriors_of_one_process(of_two_ranks, name):
    alone = fb.clean_labels(small().clients, detector=name, dtype=torch.float64, features="given", **CASES[name])
    for i, wanted in enumerate(alone.posteriors):
        np.testing.assert_allclose(of_two_ranks[f"{name}-{i}"], wanted, atol=1e-10)
    np.testing.assert_allclose(of_two_ranks[f"{name}-weight"], alone.model["weight"], atol=1e-10)
    assert of_two_ranks[f"{name}-l2"].tolist() == [*alone.found["l2"].values()]
    assert (
        max(np.abs(q - np.eye(3)[label]).max() for q, label in zip(alone.posteriors, alone.labels, strict=True)) > 0.1
    )
