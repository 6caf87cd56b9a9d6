"""Few-shot classification on resampled episodes, beside its plain rivals.

    python -m benchmarks.few_shot_episodes --ways 5 20 --device cuda [--rivals prototypes anil classifier]
    python -m benchmarks.few_shot_episodes --small

Published accuracies of 1-shot classification on Omniglot, with characters held out as by
`split="characters"`: MAML 98.7 % with 5 ways and 95.8 % with 20 (Finn, Abbeel, Levine, ICML 2017),
ProtoNet 98.8 % and 96.0 % (Snell et al., NeurIPS 2017). All runs have the same network, the same
number of steps and test episodes, and steps of Adam that fall linearly. Of several ways of a rival,
the lowest loss on validation episodes chooses one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedbilevel as fb
from fedbilevel.tasks.few_shot_episodes import FewShotEpisodes

PUBLISHED = {5: {"MAML": 0.987, "ProtoNet": 0.988}, 20: {"MAML": 0.958, "ProtoNet": 0.96}}


def rows(task: FewShotEpisodes, num_iterations: int, rivals: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Return a row for the bilevel run, and one for each rival."""
    length = {"num_iterations": num_iterations, "schedule": fb.Schedule(end=num_iterations)}
    run: dict[str, Any] = {**length, "measure_every": max(1, num_iterations // 4), "residuals": False, **options}

    def solved(label: str, problem: Any, clients: Any, algorithm: str, **settings: Any) -> dict[str, Any]:
        start = time.perf_counter()
        result = fb.solve(problem, clients, algorithm, **run, **settings)
        last = {name: result.final[name] for name in ("validation_accuracy", "test_accuracy", "upper_loss")}
        curve = [round(row["test_accuracy"], 4) for row in result.rows]
        row = {"way": label, **last, "curve": curve, "seconds": round(time.perf_counter() - start, 1)}
        print(json.dumps(row), flush=True)
        return row

    built = task.build()
    settings = {**task.suggestions("adasimfbo"), "lr_upper": 0.03}
    found = [solved("bilevel: adasimfbo, ridge heads", built.problem, built.clients, "adasimfbo", **settings)]
    plain = task.rivals() if rivals else {}
    for name in rivals:
        tried = [
            solved(f"{name}, {label}", way.problem, way.clients, way.algorithm, **way.settings)
            for label, way in plain[name].ways.items()
        ]
        found.append({**min(tried, key=lambda row: row["upper_loss"]), "way": f"{name}: {plain[name].title}"})
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_shot_episodes", description=__doc__)
    parser.add_argument("--ways", type=int, nargs="+", default=[5])
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--rivals", nargs="*", default=["prototypes"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--episodes", type=int, default=1, help="episodes of a client in a step")
    parser.add_argument("--strategy", default="auto", help="vmap: without pooling and CUDA graphs")
    parser.add_argument("--data-seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="digits, in seconds: shows that everything runs")
    parser.add_argument("--out", type=Path, default=None, help="file for the rows, as JSON")
    given = parser.parse_args(words)
    tables = {}
    for num_ways in [3] if given.small else given.ways:
        if given.small:
            task = FewShotEpisodes(num_filters=4, num_held_out=4, data_seed=given.data_seed)
        else:
            task = FewShotEpisodes(
                data="omniglot", split="characters", num_ways=num_ways, training_ways=max(20, num_ways),
                num_queries=4, num_episodes=given.episodes, num_held_out=60 if num_ways == 5 else 30,
                data_seed=given.data_seed,
            )  # fmt: skip
        options = {"device": given.device, "strategy": given.strategy}
        found = rows(task, 8 if given.small else given.iterations, given.rivals, **options)
        tables[f"{num_ways}-way {task.num_shots}-shot"] = found
        print(f"\n{num_ways}-way {task.num_shots}-shot, {task.data}")
        for row in found:
            print(f"  {100 * row['test_accuracy']:6.2f} %  {row['way']}  ({row['seconds']} s)")
        for name, value in ({} if given.small else PUBLISHED.get(num_ways, {})).items():
            print(f"  {100 * value:6.2f} %  {name}, published")
    if given.out is not None:
        given.out.write_text(json.dumps(tables, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
