"""Step sizes of "auto" against the settings that a task suggests, at equal rounds.

    python -m benchmarks.auto_steps [TASK ...] [--algorithms fedbio,penalty] [--out FILE]

Each row has the first headline figure of the task, with the suggested settings and with every step
size "auto". The rounds of the measurement count.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.errors import FedBilevelError

TASKS = ["quadratic", "imbalance", "regularisation", "data_cleaning", "hyper_representation", "few_shot"]
ALGORITHMS = "fedbio,fedbioacc,simfbo,adasimfbo,penalty,fbo_aggitd,fednest"


def row(task: str, built: Any, algorithm: str) -> str:
    kind, method = discovery.task(task), discovery.algorithm(algorithm)
    specs = dataclasses.fields(method)
    suggested = {k: v for k, v in kind.suggestions(algorithm).items() if k in {spec.name for spec in specs}}
    auto = {spec.name: "auto" for spec in specs if spec.metadata.get("step")}
    plain = _solved(built, algorithm, {"num_iterations": kind.iterations(algorithm)}, suggested)
    if isinstance(plain, str):
        length = {"num_iterations": kind.iterations(algorithm)}
    else:
        length = {"num_rounds": plain.ledger["rounds"]}
    found = _solved(built, algorithm, length, {**suggested, **auto})
    steps = "" if isinstance(found, str) else ", ".join(f"{name[3:]} {step:.3g}" for name, step in found.steps.items())
    given = ", ".join(f"{name[3:]} {suggested[name]:g}" for name in auto if name in suggested)
    figures = [one if isinstance(one, str) else _figure(kind, one) for one in (plain, found)]
    return f"| {task} | {algorithm} | {' | '.join(figures)} | {given} | {steps} |"


def _solved(built: Any, algorithm: str, length: dict[str, Any], settings: dict[str, Any]) -> Any:
    try:
        return fb.solve(
            built.problem, built.clients, algorithm, **length, **settings, residuals=False, measure_every=10**6
        )
    except FedBilevelError as error:
        return type(error).__name__


def _figure(kind: Any, result: Any) -> str:
    last = result.rows[-1]
    name = next(name for name in (*kind.headline, "upper_loss") if name in last)
    return f"{name} {last[name]:.4g} (upper loss {last['upper_loss']:.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--algorithms", default=ALGORITHMS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/auto_steps.md"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "| task | algorithm | suggested | auto | suggested steps | measured steps |",
        "|---|---|---|---|---|---|",
    ]
    for task in given.tasks:
        built = discovery.task(task)().build()
        for algorithm in given.algorithms.split(","):
            lines.append(row(task, built, algorithm))
            print(lines[-1], flush=True)
            given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
