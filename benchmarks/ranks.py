"""Seconds per outer iteration on several ranks of this host, with one thread each.

`python benchmarks/ranks.py 1 2` compares one and two ranks. Under torchrun, the file runs the task
itself and rank 0 prints the number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

WORK = {
    "task": "data_cleaning",
    "task_settings": {"num_clients": 8, "model": "mlp", "num_hidden": 300, "num_train": 140},
    "algorithm": "fedbio",
    "settings": {"num_local_steps": 5},
    "num_iterations": 8,
    "batch_size": 256,
}
WARM_UP = 2  # outer iterations that are not counted


def measure(ranks: int, **work: Any) -> float:
    """The median over outer iterations without start and measurements. work: changes of WORK."""
    call = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        __file__,
        json.dumps({**WORK, **work}),
    ]
    done = subprocess.run(
        call,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _rank(work: dict[str, Any]) -> None:
    import torch

    from fedbilevel import discovery, solve

    torch.set_num_threads(1)
    task = discovery.task(work["task"])(**work["task_settings"])
    algorithm = discovery.algorithm(work["algorithm"])
    settings = {
        name: value
        for name, value in {**task.suggestions(algorithm.name()), **work["settings"]}.items()
        if name in algorithm.__dataclass_fields__
    }
    times: list[float] = []
    solve(
        *task.build(),
        algorithm(**settings),
        residuals=False,
        num_iterations=work["num_iterations"],
        measure_every=10**6,
        batch_size=work["batch_size"],
        engine="distributed",
        callbacks=[lambda _now: times.append(time.perf_counter())],
    )
    if os.environ["RANK"] == "0":
        gaps = [
            after - before for before, after in zip(times[WARM_UP - 1 : -2], times[WARM_UP:-1], strict=True)
        ]  # the last one is measured
        print(median(gaps))


if __name__ == "__main__":
    if "RANK" in os.environ:
        _rank(json.loads(sys.argv[1]))
    else:
        found = {ranks: measure(ranks) for ranks in map(int, sys.argv[1:] or ["1", "2"])}
        alone = next(iter(found.values()))
        for ranks, seconds in found.items():
            print(f"{ranks} ranks: {seconds:.3f} s per outer iteration, {alone / seconds:.2f} times as fast")
