"""`fedbilevel clean` under torchrun: the ranks clean together, and one of them prints and writes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedbilevel

pytestmark = [pytest.mark.wait, pytest.mark.slow]

SMALL = [
    "clean",
    "--noise",
    "0.2",
    "--num-clients",
    "3",
    "--test-share",
    "0.5",
    "--num-clean",
    "20",
    "--num-listed",
    "2",
]
RANKS = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def cleaned(folder, *more, ranks=()):
    words = [sys.executable, "-m", *ranks, "fedbilevel", *SMALL, *more, "--out", str(folder)]
    source = str(Path(fedbilevel.__file__).parents[1])
    return subprocess.run(
        words, env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def files(folder):
    return sorted(str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file())


def test_two_ranks_clean_as_one_process_and_only_the_first_writes(tmp_path):
    one, two = (cleaned(tmp_path / name, ranks=ranks) for name, ranks in (("one", ()), ("two", RANKS)))
    assert (one.returncode, two.returncode) == (0, 0), two.stderr[-2000:]
    assert two.stdout.count("Saved in") == two.stdout.count("labels are flagged as wrong") == 1
    assert two.stdout.count("label_em: outer iteration") == 1
    assert files(tmp_path / "two") == files(tmp_path / "one")
    for i in range(3):
        texts = ((tmp_path / name / "suspects" / f"client-{i}.csv").read_text() for name in ("one", "two"))
        tables = [{row["sample"]: row for row in csv.DictReader(text.splitlines())} for text in texts]
        assert tables[0].keys() == tables[1].keys()
        found, wanted = ([float(table[sample]["probability"]) for sample in tables[0]] for table in tables)
        np.testing.assert_allclose(found, wanted, atol=1e-3)
        assert sum(table["flagged"] == "1" for table in tables[1].values()) > 10


def test_one_engine_for_all_clients_under_torchrun_is_refused(tmp_path):
    done = cleaned(tmp_path / "run", "--engine", "simulation", ranks=RANKS)
    assert done.returncode != 0
    assert done.stderr.count("torchrun started several processes") == 1
    assert not (tmp_path / "run").exists()


def test_last_networks_under_torchrun_are_refused_before_anything_is_trained(tmp_path):
    done = cleaned(tmp_path / "run", "--features", "out_of_fold", "--retrain", ranks=RANKS)
    assert done.returncode != 0
    assert done.stderr.count("retrain is True and engine is 'distributed', expected 'simulation'") == 1
    assert not (tmp_path / "run").exists()
