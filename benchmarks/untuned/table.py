"""The table of the benchmark, from the files of its runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.untuned.pairs import Pair
from benchmarks.untuned.search import best

WITHIN = 0.02  # of the best rival
Results = dict[str, dict[str, Any]]


def collect(
    pairs: Mapping[str, Pair],
    ours: str,
    rivals: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    recorded: Results | None = None,
) -> Results:
    """Return figures by pair and method, for all runs that are done.

    recorded: an earlier table, which holds rivals whose runs are not in the folder.
    """
    found: Results = {}
    for name, pair in pairs.items():
        methods: dict[str, Any] = {}
        for algorithm in (ours, *rivals):
            places = [place for seed in seeds if (place := final_place(folder, name, algorithm, seed)).exists()]
            runs = [json.loads(place.read_text()) for place in places]
            if not runs:
                known = (recorded or {}).get(name, {}).get("methods", {})
                if algorithm != ours and len(known.get(algorithm, {}).get("values", ())) == len(seeds):
                    methods[algorithm] = known[algorithm]
                continue
            values = [one["figure"] for one in runs]
            methods[algorithm] = {
                "mean": fmean(values),
                "deviation": stdev(values) if len(values) > 1 else 0.0,
                "runs": len(runs),
                "diverged": sum(one["diverged"] for one in runs),
                "rounds": fmean(one["rounds"] for one in runs),
                "megabytes": fmean(one["megabytes"] for one in runs),
                "seconds": fmean(one["seconds"] for one in runs),
                "values": values,
            }
            trials = tune_place(folder, name, algorithm)
            if algorithm != ours and trials.exists():
                methods[algorithm] |= {
                    "settings": best(pair, trials),
                    "trials": len(json.loads(trials.read_text())["trials"]),
                }
        if methods:
            found[name] = {"figure": pair.figure, "maximise": pair.maximise, "num_rounds": pair.num_rounds}
            found[name] |= {"about": pair.about, "methods": methods, **_verdict(pair, methods, ours)}
    return found


def _verdict(pair: Pair, methods: Mapping[str, Any], ours: str) -> dict[str, Any]:
    """Return the best rival, and by how much ours is better than it, relative to it."""
    means = {name: one["mean"] for name, one in methods.items() if name != ours and math.isfinite(one["mean"])}
    if not means or ours not in methods:
        return {}
    rival = (max if pair.maximise else min)(means, key=means.__getitem__)
    gain = (methods[ours]["mean"] - means[rival]) * (1 if pair.maximise else -1) / abs(means[rival])
    return {"best_rival": rival, "gain": gain}


def summary(results: Results, ours: str) -> dict[str, Any]:
    gains = [one["gain"] for one in results.values() if "gain" in one]
    return {
        "pairs": len(gains),
        "within": sum(gain >= -WITHIN for gain in gains),
        "best": sum(gain > 0 for gain in gains),
        "diverged": sum(one["methods"][ours]["diverged"] for one in results.values() if ours in one["methods"]),
        "runs": sum(one["methods"][ours]["runs"] for one in results.values() if ours in one["methods"]),
    }


def markdown(results: Results, ours: str, rivals: Sequence[str], skipped: Mapping[str, str]) -> str:
    counts = summary(results, ours)
    lines = [
        f"`{ours}` without any setting is within {WITHIN:.0%} of the best tuned rival on {counts['within']} of "
        f"{counts['pairs']} pairs and the best of all on {counts['best']}; "
        f"{counts['diverged']} of its {counts['runs']} runs diverged.",
        "",
        f"| pair | figure | rounds | {' | '.join((ours, *rivals))} | best rival | difference |",
        f"|---|---|---|{'---|' * (len(rivals) + 3)}",
    ]
    for name, one in results.items():
        cells = [_cell(one["methods"].get(algorithm)) for algorithm in (ours, *rivals)]
        gain = f"{one['gain']:+.1%}" if "gain" in one else ""
        figure = one["figure"].replace("_", " ") + ("" if one["maximise"] else " (lower is better)")
        lines.append(
            f"| {name} | {figure} | {one['num_rounds']} | {' | '.join(cells)} | {one.get('best_rival', '')} | {gain} |"
        )
    lines += ["", *(f"- `{name}`: {one['about']}" for name, one in results.items())]
    lines += [f"- `{name}` was skipped: {why}" for name, why in skipped.items()]
    return "\n".join(lines) + "\n"


def _cell(method: Mapping[str, Any] | None) -> str:
    if method is None:
        return ""
    lost = f", {method['diverged']} diverged" if method["diverged"] else ""
    return f"{method['mean']:.4f} ± {method['deviation']:.4f}{lost}"


def tune_place(folder: Path, name: str, algorithm: str) -> Path:
    return folder / f"{name}.{algorithm}.tune.json"


def final_place(folder: Path, name: str, algorithm: str, seed: int) -> Path:
    return folder / f"{name}.{algorithm}.{seed}.json"
