"""One run on memory-mapped data, against the same run on data in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.clock import Row, Setup, compare, rows_of
from benchmarks.gpt import Size
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines import simulate
from fedbilevel.engines.rounds import one_round
from fedbilevel.problem import windows
from fedbilevel.problem.problem import Problem
from fedbilevel.problem.windows import Windows
from fedbilevel.tasks.gpt import BYTES, entropy, plain_causal, weights
from fedbilevel.tasks.task import Built

TITLE = "Data streamed from disk"
ABOUT = """FedBiO with 4 clients and 5 local steps on a small language model of bytes (width 32, one layer, context 64,
batches of 16). All tokens are in one file, and every client has a quarter of it. `memory-mapped`: each batch reads its
windows from the file, as the library does with text that is too long for the device. `in memory`: all tokens are one
tensor. Both draw the same windows and reach the same x and y. `--gigabytes` sets the size of the file, by default 2, or
a quarter of the free disk if that is less. The file was just written: unless it is larger than the memory of the
machine, the page cache of the system holds it, and the figure shows the cost of reading windows, not of the disk.
Goal: at most 1.3 times as long as in memory."""
HEADINGS = {"floor_seconds": "in memory, s", "ratio": "x in memory"}

MAPPED, HELD = "memory-mapped", "in memory"
SIZE = Size("streamed", 32, 1, 2, context=64, batch=16)
CLIENTS = 4
_BLOCK = 2**24  # bytes that are written at once


def rows(setup: Setup) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        wanted = 2**20 if setup.small else int(setup.gigabytes * 1e9)
        num = min(wanted, shutil.disk_usage(folder).free // 4) // CLIENTS * CLIENTS
        tokens = written(Path(folder) / "tokens", num)
        advances = {MAPPED: program(setup, tokens, held=False), HELD: program(setup, tokens, held=True)}
        timings = compare({what: advance for what, (advance, _) in advances.items()}, setup, repeats=1, warm=3)
        first, second = (state[0] for _, state in advances.values())
        norm = torch.linalg.vector_norm
        differs = max(float(norm(one - other) / norm(other)) for one, other in zip(first[:2], second[:2], strict=True))
        return rows_of("fedbio", {**timings, "floor": timings[HELD]}, gigabytes=num / 1e9, differs=differs)


def written(path: Path, num: int) -> np.ndarray:
    """Return a memory-mapped file of random bytes."""
    draw = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, num, _BLOCK):
            file.write(draw.bytes(min(_BLOCK, num - start)))
    return np.memmap(path, np.uint8, "r")


def program(setup: Setup, tokens: np.ndarray, *, held: bool) -> tuple[Callable[[], None], list[Any]]:
    """Return a call that takes the next outer iteration, and where its state is found."""
    algorithm = FedBiO(lr_upper=0.01, lr_lower=0.1, lr_system=0.01, minibatches="shared")
    with keeping(tokens.size if held else 0):
        fed: Any = simulate(algorithm, *built(tokens), batch_size=SIZE.batch, device=setup.device)
    fed.begin(0)
    state, number = [algorithm.init(fed)], [0]

    def advance() -> None:
        number[0] += 1
        fed.begin(number[0])
        with torch.no_grad():
            state[0] = one_round(fed, algorithm, state[0])
        fed.check()

    return advance, state


@contextmanager
def keeping(num: int) -> Iterator[None]:
    """Keep arrays of at most so many tokens on the device within this context."""
    before, windows.KEPT = windows.KEPT, num
    try:
        yield
    finally:
        windows.KEPT = before


def built(tokens: np.ndarray) -> Built:
    """Return clients that have a part of the tokens each, a tenth of it for validation."""

    def upper(x: Any, y: Any, batch: Any) -> torch.Tensor:
        return entropy(y, batch["text"], SIZE, plain_causal)

    def lower(x: Any, y: Any, batch: Any) -> torch.Tensor:
        return x["weight"][batch["text"][..., 0]].exp() * entropy(y, batch["text"], SIZE, plain_causal)

    problem = Problem(
        upper=upper, lower=lower, x0={"weight": torch.zeros(BYTES)}, y0=weights(SIZE, 0), name="streaming"
    )
    return Built(problem, [_client(tokens, client) for client in range(CLIENTS)])


def _client(tokens: np.ndarray, client: int) -> dict[str, dict[str, Windows]]:
    each, length = len(tokens) // CLIENTS, SIZE.context + 1
    starts = np.arange(client * each, (client + 1) * each - length, length)
    cut = len(starts) - len(starts) // 10
    part = lambda some: {"text": Windows([tokens], np.zeros_like(some), some, length)}
    return {"train": part(starts[:cut]), "val": part(starts[cut:])}
