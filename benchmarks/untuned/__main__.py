"""Run the benchmark of not tuning: `python -m benchmarks.untuned`.

Stages: `tune` searches settings of every rival on every pair, `final` runs all methods with the
reported seeds, `table` writes the table; by default all three. Results of every search and run are
in files, and a repeated command continues from them. The order is pair by pair, so that an
interrupted command leaves complete pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.untuned import table
from benchmarks.untuned.jobs import Plan, work
from benchmarks.untuned.pairs import PAIRS
from benchmarks.untuned.search import RANGES, write
from fedbilevel.errors import UnknownNameError

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "untuned"
STAGES = ("tune", "final", "table")
FIRST_SEED = 30  # smaller seeds served the development of self_tuned


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned", description=__doc__)
    parser.add_argument("--pairs", help="names of pairs with commas between them; by default all")
    parser.add_argument("--stage", choices=STAGES, help="one stage; by default all three")
    parser.add_argument("--ours", default="self_tuned", help="the algorithm that runs without settings")
    parser.add_argument("--rivals", default=",".join(RANGES), help="algorithms that are tuned")
    parser.add_argument("--seeds", type=int, default=5, help="number of reported seeds")
    parser.add_argument("--trials", type=int, default=30, help="trials of a search")
    parser.add_argument("--jobs", type=int, default=1, help="processes, with one thread each")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no trial and no run after this time")
    parser.add_argument("--again", action="store_true", help="repeat the runs without settings that are done")
    parser.add_argument("--folder", type=Path, default=Path("runs/untuned"), help="files of searches and runs")
    parser.add_argument("--save", type=Path, default=RESULTS, help="folder of the table")
    given = parser.parse_args(arguments)
    names = given.pairs.split(",") if given.pairs else list(PAIRS)
    rivals = [name for name in given.rivals.split(",") if name]
    for what, known, asked in (("pair", PAIRS, names), ("rival", RANGES, rivals)):
        for name in asked:
            if name not in known:
                sys.exit(str(UnknownNameError(what, name, known)))
    if given.ours in rivals:
        sys.exit(f"{given.ours} is the method without settings and cannot be a rival: leave it out of --rivals.")
    skipped = {name: why for name in names if (why := PAIRS[name].missing()) is not None}
    for name, why in skipped.items():
        print(f"{name} is skipped: {why}")
    plan = Plan(
        [name for name in names if name not in skipped],
        given.ours,
        rivals,
        range(FIRST_SEED, FIRST_SEED + given.seeds),
        [given.stage] if given.stage else STAGES,
        given.trials,
        time.time() + 60 * given.minutes,
        given.folder,
    )
    if given.again:
        for name in plan.pairs:
            for seed in plan.seeds:
                table.final_place(plan.folder, name, plan.ours, seed).unlink(missing_ok=True)
    num_failed = work(plan, given.jobs, lambda line: print(line, flush=True))
    if "table" in plan.stages:
        _write_table(plan, given.save, skipped)
    if num_failed:
        sys.exit(f"{num_failed} jobs failed: see the lines above.")


def _write_table(plan: Plan, place: Path, skipped: dict[str, str]) -> None:
    pairs = {name: PAIRS[name] for name in plan.pairs}
    before = json.loads((place / "results.json").read_text())["pairs"] if (place / "results.json").exists() else {}
    results = table.collect(pairs, plan.ours, plan.rivals, plan.seeds, plan.folder, before)
    content = {"ours": plan.ours, "summary": table.summary(results, plan.ours), "skipped": skipped, "pairs": results}
    write(place / "results.json", content)
    text = table.markdown(results, plan.ours, plan.rivals, skipped)
    (place / "RESULTS.md").write_text(f"# Without tuning\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
