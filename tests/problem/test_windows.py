"""Windows into long arrays: the rows of plain slices, read from files only where a batch asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.problem import windows as module
from fedbilevel.problem.client_data import ClientData
from fedbilevel.problem.windows import Windows


def some(seed: int, num: int, dtype: type = np.uint8):
    """Return windows of 4 tokens in two arrays, and the same rows as a tensor."""
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(0, 250, size).astype(dtype) for size in (30, 50)]
    array = draw.integers(0, 2, num)
    start = np.array([draw.integers(0, len(tokens[i]) - 3) for i in array])
    rows = np.stack([tokens[i][at : at + 4] for i, at in zip(array, start, strict=True)])
    return Windows(tokens, array, start, 4), torch.from_numpy(rows.astype(np.int64))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_are_those_of_plain_slices(kept, dtype, monkeypatch):
    if not kept:
        monkeypatch.setattr(module, "KEPT", 0)
    (one, first), (two, second) = some(0, 7, dtype), some(1, 5, dtype)
    both, rows = Windows.joined([one, two]).to("cpu"), torch.cat([first, second])
    assert both.shape == rows.shape
    assert (both._kept is not None) == kept
    for picked in (torch.tensor([11, 0, 0, 6]), slice(2, 9), slice(None)):
        assert torch.equal(both[picked], rows[picked])


@pytest.mark.parametrize("kept", [True, False])
def test_batches_of_windows_are_batches_of_the_same_rows(kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(module, "KEPT", 0)
    made = [some(seed, num) for seed, num in ((0, 6), (1, 9))]
    cut, plain = (
        ClientData([{role: {"text": pair[which]} for role in ("train", "val")} for pair in made]) for which in (0, 1)
    )
    index = torch.tensor([[5, 0, 3], [8, 8, 1]])
    both = [data.batch(data.positions, "train", index).fields["text"] for data in (cut, plain)]
    assert torch.equal(*both)
    whole = [data.batch(data.positions, "val").row(1)["text"] for data in (cut, plain)]
    assert torch.equal(*whole)
    assert cut.is_cut("train")
    assert not plain.is_cut("train")


def test_of_a_file_larger_than_memory_only_windows_are_read(tmp_path, monkeypatch):
    """A sparse file of 64 GB has five tokens that are not zero."""
    monkeypatch.setattr(module, "KEPT", 2**10)
    path, far = tmp_path / "tokens", 2**36 - 5
    with open(path, "wb") as file:
        file.seek(far)
        file.write(bytes([1, 2, 3, 4, 5]))
    rows = Windows([np.memmap(path, np.uint8, "r")], [0, 0], [far - 1, 7], 5).to("cpu")
    assert rows[:].tolist() == [[0, 1, 2, 3, 4], [0] * 5]


def test_a_window_that_leaves_its_array_is_refused():
    with pytest.raises(ProblemError, match="a window of 4 tokens ends after its array"):
        Windows([np.zeros(5, np.uint8)], [0], [2], 4)


def problem():
    loss = lambda x, y, batch: ((batch["text"].to(y["w"].dtype) - y["w"]) ** 2).mean(1)
    return fb.Problem(
        upper=loss,
        lower=lambda x, y, batch: loss(x, y, batch) + (x["p"] * y["w"]).sum(),
        x0={"p": torch.zeros(4)},
        y0={"w": torch.zeros(4)},
    )


@pytest.mark.filterwarnings("ignore:'train' and 'val' hold the same")
def test_a_run_on_windows_is_the_run_on_the_same_rows_and_measures_evenly_spread_ones():
    made = [some(seed, num) for seed, num in ((0, 600), (1, 600))]
    clients = [[{role: {"text": pair[which]} for role in ("train", "val")} for pair in made] for which in (0, 1)]
    settings = {"num_rounds": 3, "batch_size": 4, "dtype": torch.float64, "residuals": False}
    ours, theirs = (fb.solve(problem(), own, "fedbio", **settings) for own in clients)
    assert torch.equal(ours.y["w"], theirs.y["w"])
    population = Population(problem(), clients[0], dtype=torch.float64)
    y = torch.arange(4.0, dtype=torch.float64)
    picked = torch.arange(256) * 600 // 256
    expected = [((rows[picked].double() - y) ** 2).mean() for _, rows in made]
    assert population.measure(population.x0, y)["upper_loss"] == pytest.approx(float(torch.stack(expected).mean()))


@pytest.mark.filterwarnings("ignore:'train' and 'val' hold the same")
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_windows_are_announced_before_they_are_read_and_change_nothing(dtype, tmp_path, monkeypatch):
    """Every window that a batch reads lies within announced bytes of its file, also in a slice of a file."""
    np.random.default_rng(0).integers(0, 250, 60_000).astype(dtype).tofile(tmp_path / "tokens")
    whole = np.memmap(tmp_path / "tokens", dtype, "r")
    draw, announced, read = np.random.default_rng(1), [], []

    def client(part: np.ndarray) -> dict:
        start = draw.integers(0, len(part) - 3, 500)
        return {role: {"text": Windows([part], np.zeros(500, int), start, 4)} for role in ("train", "val")}

    clients = [client(whole[:20_000]), client(whole[25_001:])]
    settings = {"num_rounds": 2, "batch_size": 3, "residuals": False, "num_local_steps": 4, "measure_every": 9}
    expected = fb.solve(problem(), clients, "fedbio", **settings)
    monkeypatch.setattr(module, "KEPT", 0)
    monkeypatch.setattr(module, "_read_ahead", lambda mapped, *span: announced.append(span))
    plain = Windows.index_select

    def watched(self: Windows, dim: int, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) == 6:  # a batch of both clients, and not a measurement
            read.extend((self.tokens[self.array[row]], self.start[row], len(announced)) for row in rows.tolist())
        return plain(self, dim, rows)

    monkeypatch.setattr(Windows, "index_select", watched)
    found = fb.solve(problem(), clients, "fedbio", **settings)
    assert torch.equal(found.y["w"], expected.y["w"])
    size, base = np.dtype(dtype).itemsize, whole.ctypes.data
    assert len(read) >= 2 * 2 * 4 * 3  # clients, rounds, steps and samples
    for tokens, start, before in read:
        first = tokens.ctypes.data + int(start) * size - base
        assert any(at <= first and first + 4 * size <= at + length for at, length in announced[:before])
    monkeypatch.undo()
    for at, length in announced:  # the system takes them as they are
        module._read_ahead(whole._mmap, at, length)
    assert module._place(np.zeros(3, np.uint8)) == (None, 0)
