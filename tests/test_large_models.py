"""The benchmark of large models compares equal work, and every way to fail is a row."""

import dataclasses
import json
import math
import os
import time

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import gpt, large_models
from benchmarks.clock import Setup
from benchmarks.gpt import BILLION, BYTES, SIZES, SOURCES, TINY
from benchmarks.large_models import HAND, METHODS, TURN, WAYS, Case, Contestant
from fedbilevel.errors import ProblemError
from fedbilevel.tasks import gpt as model

SMALL = Setup(threads=1, small=True, rounds=2)
pytestmark = pytest.mark.usefixtures("same_threads")


def moved(case, way, dtype):
    """x and y after three outer iterations of two local steps, and their starts."""
    made = gpt.built(case.size, case.clients)
    contestant = Contestant(case, way, made, dtype=dtype, num_local_steps=2)
    start = [contestant.x().clone(), contestant.y().clone()]
    for _ in range(3):
        contestant.advance()
    return (contestant.x(), contestant.y()), start


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("precision", "dtype", "apart"),
    [
        ("float32", torch.float64, (1e-9, 1e-9)),
        ("float32", torch.float32, (1e-3, 1e-4)),
        ("bf16", torch.float32, (0.05, 0.02)),
    ],
)
def test_the_loop_by_hand_goes_where_the_library_goes(method, precision, dtype, apart, monkeypatch):
    plain = Case.algorithm
    long = {"lr_upper": 5.0, "lr_lower": 0.5, **({"lr_system": 0.5} if method == "fedbio" else {})}
    longer = lambda self, num: dataclasses.replace(plain(self, num), **long)
    monkeypatch.setattr(Case, "algorithm", longer)
    case = Case(TINY, 3, method, precision)
    theirs, start = moved(case, HAND, dtype)
    assert all(torch.linalg.vector_norm(a - b) > 1e-2 for a, b in zip(theirs, start, strict=True))
    for way in WAYS[1:]:
        for mine, other, first, most in zip(moved(case, way, dtype)[0], theirs, start, apart, strict=True):
            assert torch.linalg.vector_norm(mine - other) < most * torch.linalg.vector_norm(other - first)


def test_both_ways_of_attention_are_causal_and_equal():
    draw = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 2, 5, 4, generator=draw, dtype=torch.float64)
    fused, plain = model.causal(q, k, v), model.plain_causal(q, k, v)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(plain[..., 0, :], v[..., 0, :])
    y = {name: leaf.double() for name, leaf in model.weights(TINY).items()}
    text = torch.as_tensor(gpt.text(TINY, 0, 0, 0))
    torch.testing.assert_close(model.entropy(y, text, TINY), model.entropy(y, text, TINY, model.plain_causal))


def test_sizes_have_the_parameters_of_their_names():
    units = {"M": 1e6, "B": 1e9}
    for size in (*SIZES, BILLION):
        assert large_models.num_weights(size) == pytest.approx(float(size.name[:-1]) * units[size.name[-1]], rel=0.03)
    for size in (TINY, SIZES[-1]):
        assert large_models.num_weights(size) == sum(leaf.numel() for leaf in model.weights(size).values())


def test_text_depends_on_its_address_alone():
    size = TINY._replace(samples=50, context=40)
    text = gpt.text(size, 1, 2, 0)
    assert text.shape == (50, 41)
    assert (text == gpt.text(size, 1, 2, 0)).all()
    for other in (
        gpt.text(size, 0, 2, 0),
        gpt.text(size, 1, 3, 0),
        gpt.text(size, 1, 2, 1),
        gpt.text(size, 1, 2, 0, 1),
    ):
        assert (text != other).mean() > 0.9
    pairs = {}
    for before, after in zip(text[:, :-1].flat, text[:, 1:].flat, strict=True):
        pairs.setdefault(before, []).append(after)
    usual = sum(max(map(after.count, after)) for after in pairs.values()) / sum(map(len, pairs.values()))
    assert 0.65 < usual < 0.9  # 0.7, and more by chance
    client = gpt.built(TINY, 2).clients[1]
    assert set(client["train"]["source"]) == set(range(SOURCES))
    assert client["val"]["text"].max() < BYTES


def test_the_section_saves_after_every_row(tmp_path, monkeypatch):
    found, whole = [], large_models.rows

    def watched(setup):
        for row in whole(setup):
            yield row
            found.append(len(json.loads((tmp_path / "results" / "cpu-small.json").read_text())["large_models"]["rows"]))

    monkeypatch.setattr(large_models, "rows", watched)
    words = ["--small", "--threads", "1", "--only", "large_models", "--save", "--folder", str(tmp_path / "results")]
    assert command.main(words) == 0
    rows = json.loads((tmp_path / "results" / "cpu-small.json").read_text())["large_models"]["rows"]
    assert found == list(range(1, len(rows) + 1))
    assert len(rows) == len(METHODS) * 2 * len(WAYS)
    for row in rows:
        assert row["seconds"] > 0
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["tf32"] == "off"
        assert "x" not in row
        if row["what"] != HAND:
            assert row["plain_kernels"] == (
                "" if "penalty" in row["name"] and "auto" not in row["what"] else "attention"
            )
            assert row["differs"] < (0.5 if "bf16" in row["name"] else 1e-2)


def test_important_rows_come_first_and_words_choose_cases():
    cases = large_models.cases(Setup(device="cuda"))
    assert len(set(cases)) == len(cases) == 3 * 2 * 3 * 2 + 3
    assert [case.name for case in cases[:5]] == [
        "100M, 8 clients, penalty 2, bf16",
        "100M, 8 clients, fedbio, bf16",
        "1B, 8 clients, penalty 2, bf16",
        "1B, 8 clients, fedbio, bf16",
        "1B, 8 clients, penalty 1, bf16",
    ]
    assert {case.size.name for case in cases[5:14]} == {"100M", "10.9M", "0.9M"}
    pairs = large_models._in_order(Setup(device="cuda"))
    assert len(set(pairs)) == len(pairs) == 36 * len(WAYS) + 3 * (len(WAYS) - 1)
    assert all(pairs.index((case, HAND)) < pairs.index((case, TURN)) for case in cases)
    assert [way for case, way in pairs[:15]] == [HAND, TURN, "auto"] * 5
    assert [(case.method, way) for case, way in pairs[15:17]] == [("penalty 2", "loop"), ("fedbio", "loop")]
    some = large_models.cases(Setup(device="cuda", cases=("0.9M", "bf16")))
    assert {(case.size.name, case.precision) for case in some} == {("0.9M", "bf16")}
    assert len(some) == 6


def test_rows_beyond_the_time_are_named(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(large_models.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(large_models, "WHOLE_SECONDS", 460.0)
    limits = []

    def attempt(setup, case, way, seconds):
        limits.append(seconds)
        now[0] += 50.0
        return {"seconds": 2.0 if way == HAND else 3.0, "x": [3.0, 4.0] if way == HAND else [3.0, 4.5]}

    *rows, last = large_models.rows(Setup(device="cuda"), attempt)
    assert limits == [60.0] * 6 + [100.0] * 2 + [60.0, 10.0]
    assert last["name"] == "143 other rows"
    assert "100M, 8 clients" in last["note"]
    assert [(row["ratio"], row.get("differs")) for row in rows[:2]] == [(1.0, None), (1.5, pytest.approx(0.1))]
    assert [row["aim"] for row in rows if "aim" in row] == ["1.5, 4 rows", "1.5, 6 rows", "runs"]


def test_a_row_without_memory_says_what_was_asked_for(monkeypatch):
    lacking = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.25 GiB. GPU 0 has a total of 139 GiB.")

    def raises(*given):
        try:
            raise lacking
        except RuntimeError as error:
            raise ProblemError("a trial failed.") from error

    case = Case(TINY, 2, "fedbio", "float32")
    monkeypatch.setattr(large_models, "_timed", raises)
    found = large_models.measure(SMALL, case, "auto")
    assert found == {"note": "out of memory: Tried to allocate 3.25 GiB", "tf32": "off"}
    row = large_models.row_of(case, "auto", found, {"seconds": 1.0, "x": [1.0]})
    assert row["what"] == "library, auto"
    assert "ratio" not in row
    lost = large_models.row_of(case, "auto", {"seconds": 1.0, "x": [1.0]}, {"seconds": 1.0, "x": [math.nan]})
    assert lost["differs"] == "not finite"  # JSON has no such number
    assert large_models.asked_for(torch.OutOfMemoryError("nothing left\nmore")) == "nothing left"
    assert large_models.asked_for(ValueError("other")) is None


def test_a_process_returns_its_row_or_the_reason_why_not():
    case = Case(TINY, 2, "penalty 1", "float32")
    found = large_models.in_a_process(SMALL, case, HAND, 300.0)
    assert found["seconds"] > 0
    assert len(found["x"]) == SOURCES
    assert large_models.within(0.5, time.sleep, (600,)) == {"note": "no result within 0.5 s"}
    assert large_models.within(300.0, os._exit, (3,)) == {"note": "the process ended with 3"}
    assert large_models.within(300.0, int, ("many",))["note"].startswith("ValueError: invalid literal")


def test_tf32_is_off_during_a_measurement():
    flag = torch.backends.cuda.matmul
    before, flag.allow_tf32 = flag.allow_tf32, True
    with large_models.without_tf32():
        assert not flag.allow_tf32
    assert flag.allow_tf32
    flag.allow_tf32 = before


def test_large_models_are_skipped_on_a_cpu_with_a_sentence():
    assert "--device cuda" in (large_models.skipped(Setup()) or "")
    assert large_models.skipped(SMALL) is None
    said = large_models.skipped(Setup(device="cuda", cases=("9M", "bf16")))
    assert "9M, bf16; an example of a case is 100M, 8 clients, penalty 2, bf16" in (said or "")


def test_memory_is_in_rows_of_y_per_client(monkeypatch):
    case = Case(TINY, 3, "fedbio", "bf16")
    row = 4 * sum(leaf.numel() for leaf in model.weights(TINY).values())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 5 * row)
    assert large_models.memory(Setup(device="cuda"), case) == {"memory_gb": 15 * row / 1e9, "y_rows": 5.0}
    assert large_models.memory(SMALL, case) == {}
