"""`python -m benchmarks`: run all sections or the named ones, print ratios, save them on request."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.clock import Setup
from fedbilevel.errors import FedBilevelError

SECTIONS = (
    "paths",
    "iteration",
    "tiny",
    "streaming",
    "startup",
    "rows_of_y",
    "algorithms",
    "busy",
    "growth",
    "push_sum",
    "ranks",
    "federation",
    "peers",
    "secure_mean",
    "hgp_paper",
    "large_models",
)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How fast the library is, as ratios to stated floors; see benchmarks/README.md.",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="threads of the processor (default 2)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=SECTIONS,
        metavar="SECTION",
        help=f"some of {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--small", action="store_true", help="a version that takes seconds and only shows that everything runs"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds in which the contestants take turns, at least 5 (default 7)"
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="hgp_paper: time this number of lower steps and extrapolate"
    )
    parser.add_argument(
        "--networks", nargs="+", default=["random_directed"], metavar="NETWORK", help="hgp_paper: which networks"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="WORD",
        help="large_models: only cases whose name has all of these words, such as 100M or bf16; growth: only these "
        "panels, such as clients",
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="streaming: size of the file (default 2)")
    parser.add_argument(
        "--save",
        nargs="?",
        const="",
        default=None,
        metavar="NAME",
        help="write results/NAME.json (default: cpu or cuda) and RESULTS.md",
    )
    parser.add_argument(
        "--folder", type=Path, default=results.FOLDER, help="where results are saved (default benchmarks/results)"
    )
    given = parser.parse_args(words)
    if given.rounds < 5:
        parser.error(f"--rounds is {given.rounds}, expected at least 5: medians of fewer rounds are unreliable.")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given.device):
        parser.error(f"--device is {given.device!r}, expected cpu, cuda or cuda:N.")
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --device cpu.")
    return given


def section(name: str, setup: Setup, keep: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
    """The figures of a section, with the circumstances in which they were measured.

    keep: called after every row of a section that yields its rows one by one.
    """
    where = results.circumstances(setup)
    try:
        module = importlib.import_module("benchmarks.ranks_section" if name == "ranks" else f"benchmarks.{name}")
        content = {
            "title": module.TITLE,
            "about": module.ABOUT,
            "where": where,
            "headings": getattr(module, "HEADINGS", {}),
        }
        why = module.skipped(setup) if hasattr(module, "skipped") else None
        if why:
            return {**content, "skipped": why}
        rows = module.rows(setup)
        if not isinstance(rows, Iterator):
            return {**content, "rows": rows}
        content["rows"] = []
        for row in rows:
            content["rows"].append(row)
            keep(content)
        return content
    except FedBilevelError as error:
        raise SystemExit(f"{name}: {error}") from error


def _keep(section: str, name: str, folder: Path, found: dict[str, Any]) -> None:
    row = found["rows"][-1]
    print(f"{row['name']}, {row['what']}: {row.get('note') or format(row['seconds'], '.3g') + ' s'}", flush=True)
    results.save(name, {section: found}, folder)


def main(words: Sequence[str] | None = None) -> int:
    given = _arguments(words)
    torch.set_num_threads(given.threads)
    rounds = 2 if given.small else given.rounds
    setup = Setup(
        device=given.device,
        threads=given.threads,
        small=given.small,
        rounds=rounds,
        steps=given.steps,
        networks=tuple(given.networks),
        cases=tuple(given.cases),
        gigabytes=given.gigabytes,
    )
    kind = torch.device(given.device).type + ("-small" if given.small else "")
    name = given.save or kind
    for one in given.only:
        found = section(one, setup, *([] if given.save is None else [partial(_keep, one, name, given.folder)]))
        body = found.get("skipped") or results.table(found["rows"], found.get("headings", {}))
        print(f"\n{found['title']} ({one})\n{found['about']}\n\n{body}", flush=True)
        if given.save is not None:
            if one == "growth" and "rows" in found and not given.cases:
                from benchmarks.growth import draw

                found["picture"] = draw(found["rows"], given.folder / f"growth-{name}.png")
            results.save(name, {one: found}, given.folder)  # after every section, so that an interruption loses one
    return 0


if __name__ == "__main__":
    sys.exit(main())
