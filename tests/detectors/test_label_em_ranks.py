"""Label EM with two processes has the posteriors of one process, also after a checkpoint."""

from __future__ import annotations

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

SCRIPT = """
import sys
import numpy as np
import torch
import fedbilevel as fb
from support.numeric.labels import small
found = fb.clean_labels(
    small().clients, engine="distributed", record=sys.argv[1], dtype=torch.float64, transition="own", features="given"
)
if torch.distributed.get_rank() == 0:
    np.savez(sys.argv[2], *found.posteriors, weight=found.model["weight"], l2=[*found.found["l2"].values()])
"""


def test_two_ranks_have_the_posteriors_of_one_process(tmp_path):
    root = Path(fedbilevel.__file__).parents[1]
    paths = f"{root}:{Path(__file__).parents[1]}"
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(tmp_path / name) for name in ("script.py", "record", "found.npz")]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    alone = fb.clean_labels(small().clients, dtype=torch.float64, transition="own", features="given")
    with np.load(tmp_path / "found.npz") as found:
        for i, wanted in enumerate(alone.posteriors):
            np.testing.assert_allclose(found[f"arr_{i}"], wanted, atol=1e-10)
        np.testing.assert_allclose(found["weight"], alone.model["weight"], atol=1e-10)
        assert found["l2"].tolist() == [*alone.found["l2"].values()]
