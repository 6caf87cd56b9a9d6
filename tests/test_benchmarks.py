"""The benchmarks run, compare equal work and count the right products. No test asserts a time."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    federation,
    footprint,
    goals,
    growth,
    paths,
    peers,
    problems,
    push_sum,
    ranks_section,
    results,
    soak,
    sockets,
    streaming,
    tiny,
)
from benchmarks.clock import Setup, Timing, compare, rows_of
from benchmarks.complete import Complete, Graphed, as_vector
from benchmarks.floors import Floor
from benchmarks.iteration import Case
from benchmarks.published import KeepingLoop, Loop, flat
from fedbilevel.errors import ExperimentError

SMALL = Setup(threads=1, small=True, rounds=2)
pytestmark = pytest.mark.usefixtures("same_threads")


@pytest.mark.slow
def test_the_whole_command_in_its_smallest_version(tmp_path, capsys):
    assert command.main(["--small", "--threads", "1", "--save", "--folder", str(tmp_path / "results")]) == 0
    printed = capsys.readouterr().out
    saved = json.loads((tmp_path / "results" / "cpu-small.json").read_text())
    assert tuple(saved) == command.SECTIONS
    for name, section in saved.items():
        assert section["title"] in printed
        assert section["where"]["threads"] == 1
        assert {"machine", "versions", "commit", "time", "small"} <= set(section["where"])
        if "skipped" in section:
            assert name in ("busy", "ranks", "federation", "peers", "secure_mean")
            continue
        assert section["rows"], name
        for row in section["rows"]:
            assert row["name"]
            assert row["what"]
            assert row["y_rows" if name == "rows_of_y" else "seconds"] > 0
            for key in ("ratio", "times_ours", "memory_ratio", "memory_mb", "megabytes", "rounds"):
                assert math.isfinite(row.get(key, 1.0)), (name, row)
                assert row.get(key, 1.0) > 0, (name, row)
            if "ratio" in row:
                assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert name == "rows_of_y" or any("ratio" in row for row in section["rows"]), name
    assert (tmp_path / "results" / saved["growth"]["picture"]).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "RESULTS.md").read_text() == results.page(tmp_path / "results")
    assert all(row["differs"] < 1e-4 for row in saved["iteration"]["rows"])
    again = results.save("cpu-small", {"push_sum": {**saved["push_sum"], "title": "other"}}, tmp_path / "results")
    kept = json.loads(again.read_text())
    assert kept["push_sum"]["title"] == "other"
    assert kept["paths"] == saved["paths"], "a section that was not run must stay"


def test_the_page_of_results_is_what_the_files_hold():
    assert (results.FOLDER.parent / "RESULTS.md").read_text() == results.page()


@pytest.mark.parametrize("kind", [Loop, KeepingLoop, Complete])
@pytest.mark.parametrize("name", ["fednest", "fbo_aggitd"])
def test_programs_that_are_given_the_draws_go_where_the_library_goes(name, kind):
    case = Case(SMALL, name, problems.mnist(SMALL, 4), dtype=torch.float64)
    case.algorithm = dataclasses.replace(case.algorithm, num_upper_steps=3, lr_lower=0.9, lr_upper=2.0, lr_system=0.4)
    iterations = case.iterations(3)
    plans = case.plans(iterations)
    assert {len(call.positions) for plan in plans.values() for call in plan} == {2}  # a cohort
    assert len({tuple(call.positions) for plan in plans.values() for call in plan}) > 1  # drawn anew
    ours, state = case.ours(iterations)
    loop, other = case.loop(plans, kind, dtype=torch.float64)
    vector = as_vector if kind is Complete else flat
    start = [vector(part) for part in other[0]]
    for _ in iterations:
        ours()
        loop()
    for mine, theirs, first in zip(state[0], other[0], start, strict=True):
        moved, apart = (
            float(torch.linalg.vector_norm(v) / torch.linalg.vector_norm(first))
            for v in (mine - first, mine - vector(theirs))
        )
        assert moved > 0.05
        assert apart < 1e-9


def test_fedbio_by_hand_goes_where_the_library_goes():
    case = Case(SMALL, "fedbio", problems.mnist(SMALL, 4), "per_iteration", dtype=torch.float64)
    case.algorithm = dataclasses.replace(case.algorithm, lr_lower=0.5, lr_upper=0.5, lr_system=0.3)
    iterations = case.iterations(3)
    ours, states = case.ours(iterations)
    by_hand, others = case.loop(case.plans(iterations), Complete, dtype=torch.float64)
    for _ in iterations:
        ours()
        by_hand()
    for mine, theirs, first in zip(states[0][:3], others[0], others[-1], strict=True):
        moved = torch.linalg.vector_norm(as_vector(theirs - first))
        assert float(moved) > 0.01
        assert float(torch.linalg.vector_norm(mine - as_vector(theirs)) / moved) < 1e-9


@pytest.mark.parametrize("name", ["fednest", "fbo_aggitd", "fedbio"])
def test_programs_by_hand_can_be_replayed(name):
    case = Case(SMALL, name, problems.mnist(SMALL, 4), "per_iteration", dtype=torch.float64)
    plans = case.plans(case.iterations(3))
    assert len({tuple(calls[0].positions) for calls in plans.values()}) > 1

    def again(function):
        """A stand-in for a graph: it computes from the same tensors into the same tensors."""
        results = function()
        return results, lambda: [old.copy_(new) for old, new in zip(results, function(), strict=True)]

    plain, expected = case.loop(plans, Complete, dtype=torch.float64)
    graphed, found = case.loop(plans, Graphed, dtype=torch.float64, recorded=again)
    for _ in plans:
        plain()
        graphed()
    assert len(found) == len(expected) == 4
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][0], found[1][0])


def test_streamed_data_give_the_numbers_of_data_in_memory():
    mapped, held = streaming.rows(SMALL)
    assert (mapped["what"], held["what"]) == (streaming.MAPPED, streaming.HELD)
    assert mapped["differs"] < 1e-5  # float32; derivatives may be computed in other ways


def test_goals_take_the_worst_and_the_median_of_all_rows():
    rows = [{"name": name, "what": "", "ratio": ratio} for name, ratio in (("a", 2.0), ("b", 5.0), ("c", None))]
    found = {goal.text: goal.found({"busy-cuda": {"busy": {"rows": rows}}}) for goal in goals.GOALS}
    assert found["measured algorithms on CUDA, wall time / GPU time: worst"] == 5.0
    assert found["the same: median"] == 3.5
    assert sum(value is not None for value in found.values()) == 2


@pytest.mark.parametrize("name", ["fedbio", "fbo_aggitd"])
def test_programs_for_a_tiny_problem_go_where_the_library_goes(name):
    case = tiny.Case(SMALL, name, torch.float64)
    programs = [case.torch_by_hand(), case.numpy_by_hand(), case.engine()]
    num = case.warm + case.num + 1
    for advance, _ in programs:
        for _ in range(num):
            advance()
    solved = case.solved()[1]
    assert solved.iteration == num
    for part in ("x", "y"):
        wanted = solved.x["x"] if part == "x" else solved.y["y"]
        assert float(torch.linalg.vector_norm(wanted)) > 0.01
        for _, state in programs:
            torch.testing.assert_close(torch.as_tensor(getattr(state[0], part)), wanted, rtol=1e-12, atol=1e-14)


def test_iterations_of_fednest_that_are_timed_draw_the_mean_number_of_factors():
    case = Case(SMALL, "fednest", problems.mnist(SMALL, 4))
    for plan in case.plans(case.iterations(3)).values():
        assert [call.name for call in plan].count("system_factor") == 2


@pytest.mark.parametrize(
    "case", ["lower_gradient", "lower_gradient_cached", "upper_gradient", "hessian_product", "jacobian_product"]
)
def test_contestants_of_a_path_compute_the_same(case):
    bench = paths.Bench(SMALL, problems.mnist(SMALL, 4))
    contestants = getattr(bench, case)()
    plain = contestants["plain vmap"]()
    plain = torch.cat([leaf.flatten(1) for leaf in plain.values()], 1)
    looped = torch.stack([flat(each) for each in contestants["autograd loop"]()])
    assert torch.linalg.vector_norm(plain) > 0.1
    torch.testing.assert_close(looped, plain, rtol=1e-4, atol=1e-6)
    bench.indices = bench.indices[:1]  # the same batch in every call
    torch.testing.assert_close(getattr(bench, case)()["library"](), plain, rtol=1e-4, atol=1e-6)


def test_a_mean_of_upper_gradients_goes_through_a_round_of_the_engine():
    bench = paths.Bench(SMALL, problems.mnist(SMALL, 4))
    found = bench.upper_mean()["library"]()
    assert found.shape == bench.x.shape
    assert bench.fed.ledger.rounds == 1


def test_the_floor_of_an_iteration_counts_its_products():
    """4 clients of which 2 participate, 12 + 6 samples, 20 pixels, 8 hidden units, 10 classes.

    3 local steps with batches of 4; the first step cancels.
    """
    train, val, pixels, hidden, classes, k, b = 24, 12, 20, 8, 10, 2, 4
    features = lambda n: 2 * n * pixels * hidden
    head = lambda n: 2 * n * hidden * classes  # one product with the head, forwards or back
    lower = 2 * head(train)
    steps = 2 * 2 * 2 * head(k * b)  # two steps of two gradients of two products
    last = features(val) + 2 * head(val) + features(val) + features(train) + 4 * head(train) + features(train)
    fednest = (
        features(train) + lower + steps + features(val) + 2 * head(val) + 2 * (features(train) + 3 * head(train)) + last
    )
    rounds = (
        3 * (features(train) + features(val) + 2 * head(val)) + 2 * (lower + steps) + 2 * head(train) + 3 * head(train)
    )
    images = problems.mnist(SMALL, 4)
    floors = {name: Case(SMALL, name, images).floor() for name in ("fednest", "fbo_aggitd")}
    assert floors["fednest"].operations == fednest
    assert floors["fbo_aggitd"].operations == rounds + last
    assert floors["fednest"].gathered == 2 * k * b * hidden
    assert floors["fbo_aggitd"].gathered == 4 * k * b * hidden


def test_a_floor_does_its_products_and_gathers():
    floor = Floor(SMALL, torch.float64)
    a, b, index = floor.full(3, 3), floor.full(3, 3), torch.tensor([2, 0])
    once = floor.mm(a, b)
    twice = floor.mm(once, b)
    rows = floor.gather(a, index)
    stacked = floor.mm(floor.full(2, 3, 4), floor.full(2, 4, 5))
    floor()
    torch.testing.assert_close(once, a @ b)
    torch.testing.assert_close(twice, a @ b @ b)  # not into the memory of its operand
    assert torch.equal(rows, a[index])
    assert stacked.shape == (2, 3, 5)
    assert (floor.operations, floor.gathered) == (2 * 27 * 2 + 2 * 2 * 3 * 5 * 4, 6)


def test_contestants_take_turns():
    calls = []
    found = compare({name: lambda name=name: calls.append(name) for name in "abc"}, SMALL, repeats=1)
    assert calls == [*"abc", *"abcabc"]  # once to warm up
    calls.clear()
    compare({name: lambda name=name: calls.append(name) for name in "ab"}, SMALL, repeats=2, warm=3)
    assert calls == [*"aaabbb", *"aabb" * 2]
    assert set(found) == {*"abc"}
    assert all(timing.median > 0 for timing in found.values())


def test_ratios_are_of_medians():
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, pytest.approx(2 / 3))
    rows = rows_of(
        "path",
        {"library": Timing(2.0, 0.1), "loop": Timing(6.0, 0.2), "floor": Timing(0.5, 0.3)},
        ours="library",
        more=1,
    )
    assert [(row["what"], row["ratio"], row["times_ours"], row["floor_seconds"], row["more"]) for row in rows] == [
        ("library", 4.0, 1.0, 0.5, 1),
        ("loop", 12.0, 3.0, 0.5, 1),
    ]


def test_bytes_that_push_sum_must_move():
    """A copy of 8 rows moves 16 rows; a ring reads 16 and writes 8, the exponential network 8 and 8."""
    floors = {
        row["name"]: row["floor_seconds"] / row["seconds"]
        for row in push_sum.rows(SMALL)
        if row["what"] == "copy of all rows"
    }
    assert floors == {"exponential, 8 peers": pytest.approx(16 / 16), "ring, 8 peers": pytest.approx(24 / 16)}


def test_memory_is_that_of_the_run_alone():
    asked = {
        "clients": 3,
        "cohort": 2,
        "hidden": 4,
        "steps": 1,
        "device": "cpu",
        "threads": 1,
        "rounds": 2,
        "small": True,
    }
    found = growth.in_a_process({**asked, "hidden": 50_000})  # 850,000 numbers in x; each of two clients has a copy
    assert found["data_mb"] == pytest.approx(3 * 6 * (16 * 4 + 8) / 1e6)
    assert 2 * 0.85 * 4 < found["memory_mb"] < 300  # a process with torch has more before the run
    assert found["seconds"] > 0


def test_ranks_are_skipped_with_a_sentence_where_there_is_no_such_engine(monkeypatch):
    monkeypatch.setattr(ranks_section, "find_spec", lambda name: None)
    assert "distributed" in (ranks_section.skipped(SMALL) or "")


def test_ranks_take_turns_and_are_compared_with_a_perfect_division(monkeypatch):
    calls = []
    took = {1: 8.0, 2: 5.0}
    monkeypatch.setitem(
        sys.modules, "benchmarks.ranks", SimpleNamespace(measure=lambda ranks: calls.append(ranks) or took[ranks])
    )
    rows = ranks_section.rows(SMALL)
    assert calls == [1, 2, 1, 2]
    assert [(row["what"], row["seconds"], row["floor_seconds"], row["ratio"]) for row in rows] == [
        ("1 rank", 8.0, 8.0, 1.0),
        ("2 ranks", 5.0, 4.0, 1.25),
    ]


# ---- federations: summaries of figures, without a federation -------------------------------------------------------


def test_a_federation_is_skipped_with_a_sentence(monkeypatch):
    monkeypatch.setattr(federation, "find_spec", lambda name: object())
    assert federation.skipped(Setup()) is None
    assert "small version" in (federation.skipped(SMALL) or "")
    assert "GPU" in (federation.skipped(Setup(device="cuda")) or "")
    monkeypatch.setattr(federation, "find_spec", lambda name: None)
    assert "pip install 'fedbilevel[federation]'" in (federation.skipped(Setup()) or "")


def test_message_rounds_are_compared_with_the_floor_and_shown_beside_the_aim():
    seconds = {"flare": [0.1 * k for k in range(1, 12)], "tls": [0.02, 0.04, 0.06], "tcp": [0.001, 0.01, 0.5]}
    part = {"floats": 160_000, "seconds": seconds, "load_before": 1.5, "load_after": 2.5}
    flare, tls = federation.message_rows(5, "160k", part)
    assert flare["seconds"] == pytest.approx(0.6)
    assert (flare["p10"], flare["p90"], flare["max"], flare["rounds"]) == (
        pytest.approx(0.2),
        pytest.approx(1.0),
        pytest.approx(1.1),
        11,
    )
    assert (flare["floor_seconds"], flare["ratio"], flare["aim"]) == (0.01, pytest.approx(60.0), 0.5)
    assert (tls["seconds"], tls["ratio"], "aim" in tls) == (0.04, pytest.approx(4.0), False)
    assert (flare["load_before"], flare["load_after"]) == (1.5, 2.5)
    assert federation.message_rows(2, "160k", part)[0]["aim"] == 0.2
    assert "aim" not in federation.message_rows(2, "2k", part)[0]


def test_an_outer_iteration_lasts_from_one_last_answer_to_the_next():
    line = lambda iteration, time, run="mine", kind="phase": {
        "run": run,
        "kind": kind,
        "iteration": iteration,
        "time": time,
    }
    left = [
        line(1, 10.0),
        line(1, 11.0),
        line(2, 11.5),
        line(2, 13.0),
        line(2, 13.5, kind="measure"),
        line(3, 14.0),
        line(9, 15.0, run="other"),
    ]
    assert federation.gaps(left, "mine") == [2.0, 1.0]
    assert federation.second_half([1.0, 2.0, 3.0, 4.0, 5.0]) == [3.0, 4.0, 5.0]
    assert federation.slowest([{"sites": {"a": 1.0, "b": 2.0}}, {"sites": {}}, {"sites": {"a": 3.0, "b": 0.5}}]) == [
        2.0,
        3.0,
    ]


def test_an_outer_iteration_of_a_federation_is_compared_with_the_simulators():
    real, simulated = federation.iteration_rows(
        3, [4.0, 6.0, 5.0], [3.0], [2.0], [2.0, 4.0, 1.0], {"load_before": 0.5, "load_after": 1.5}
    )
    assert (real["seconds"], real["floor_seconds"], real["ratio"]) == (5.0, 2.0, 2.5)
    assert (real["slowest_answer"], real["at_the_slowest_site"], real["load_after"]) == (3.0, 2.0, 1.5)
    assert (simulated["seconds"], simulated["ratio"]) == (2.0, 1.0)
    load = {"load_before": 0.5, "load_after": 1.5}
    _, secure, _ = federation.iteration_rows(3, [4.0, 6.0, 5.0], [3.0], [2.0], [2.0, 2.0], load, [7.0, 8.0, 9.0])
    assert (secure["what"], secure["seconds"], secure["ratio"]) == ("outer iteration, FLARE, secure sums", 8.0, 4.0)


def test_sites_of_the_real_run_have_the_simulators_data_and_their_own_work_is_timed(tmp_path):
    real = federation.real_run(tmp_path / "data", "small", 2, 3)
    diary = federation._in_one_process(real, tmp_path / "here")
    assert [(line["iteration"], line["rounds"], line["missing"]) for line in diary] == [
        (1, 1, {}),
        (2, 2, {}),
        (3, 3, {}),
    ]  # one round in each
    assert all(set(line["sites"]) == {"site-1", "site-2"} and min(line["sites"].values()) > 0 for line in diary)
    simulated = federation._simulated(real, tmp_path / "simulated")
    assert len(simulated) == 1  # neither the first outer iteration nor the measured one
    last = lambda place: json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])["upper_loss"]
    assert last(tmp_path / "here" / "record") == pytest.approx(last(tmp_path / "simulated"), rel=1e-5)


def test_the_floor_of_a_message_round_goes_to_every_process_and_back():
    messages = [b"one", bytes(range(256)) * 4096]
    with sockets.Echoes([None, None]) as echoes:
        lines = sockets.Lines([ports["tcp"] for ports in echoes.ports])
        for message in messages:
            assert [bytes(found) for found in lines.exchange(message)] == [message] * 2
        lines.close()
    assert len({ports["tcp"] for ports in echoes.ports}) == 2
    assert all(process.returncode is not None for process in echoes._processes)


def look(number, rss, logs, lists, rest, **more):
    return {
        "round": number,
        "memory": {"site-1, job": {"rss": rss, **more}},
        "disk": {"site-1": {"logs": logs, "lists": lists, "rest": rest}},
    }


def test_growth_of_memory_and_disk_is_from_the_first_look_to_the_last():
    looks = [
        look(100, 300.0, 1.0, 2.0, 3.0, pss=200.0),
        look(200, 450.0, 1.1, 3.0, 3.0, pss=0.0),
        look(300, 400.0, 1.2, 4.0, 3.0, pss=0.0),
    ]
    looks += [look(500, 420.0, 1.4, 5.0, 2.5, pss=230.0)]
    (memory,), (disk,) = soak.memory_rows(looks), soak.disk_rows(looks)
    assert (memory["rss_first"], memory["rss_last"], memory["rss_growth"], memory["rss_most"]) == (
        300.0,
        420.0,
        120.0,
        450.0,
    )
    assert (memory["pss_growth"], memory["late"], memory["ceiling"]) == (30.0, pytest.approx(20.0 / 200 * 1000), 250.0)
    assert (disk["first"], disk["last"], disk["per_thousand"]) == (
        6.0,
        pytest.approx(8.9),
        pytest.approx(2.9 / 400 * 1000),
    )
    assert (disk["growth"], disk["logs"], disk["lists"], disk["rest"]) == tuple(
        map(pytest.approx, (2.9, 0.4, 3.0, -0.5))
    )
    assert soak.above([memory]) == []
    assert soak.above([{**memory, "rss_growth": 250.0}]) == ["site-1, job"]
    (alone,) = soak.memory_rows([look(100, 300.0, 0, 0, 0)])
    assert (alone["rss_growth"], alone["late"], "pss_growth" in alone) == (0.0, None, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        (
            {"diary": [{"iteration": 1, "missing": {}}, {"iteration": 2, "missing": {"b": "it did not answer."}}]},
            "outer iteration 2 was without b",
        ),
        ({"diary": [{"iteration": 1, "missing": {}}]}, "1 outer iterations, 1 of them different, where 2"),
        ({"diary": [{"iteration": 1, "missing": {}}] * 2}, "2 outer iterations, 1 of them different, where 2"),
        ({"left": {"a": [{"kind": "error", "text": "too late"}]}}, "a answered with an error: too late"),
        ({"notices": ["the server answers again."]}, "the server answers again."),
        ({"jobs": 2}, "2 jobs"),
        ({"replaced": ["b, parent"]}, "b, parent was replaced"),
    ],
)
def test_every_kind_of_failure_of_a_soak_is_counted(changes, said):
    fine = {
        "diary": [{"iteration": 1, "missing": {}}, {"iteration": 2, "missing": {}}],
        "left": {"a": [{"kind": "phase"}]},
        "notices": [],
        "jobs": 1,
    }
    found = soak.failures_in(**{**fine, "num_iterations": 2, "replaced": [], **changes})
    assert len(found) == (0 if said is None else 1)
    assert said is None or said in found[0]


def test_the_size_of_a_kit_is_told_by_what_grows(tmp_path):
    for name, size in {
        "log.txt": 1000,
        "job/log.txt.1": 20,
        "audit.log": 300,
        "site/left.jsonl": 5000,
        "site/runs/one/version-1.safetensors": 70_000,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert soak.disk_of(tmp_path) == {
        "logs": pytest.approx(0.00132),
        "lists": pytest.approx(0.005),
        "rest": pytest.approx(0.07),
    }


def test_looks_are_taken_at_every_hundred_rounds_and_name_every_process(tmp_path):
    pytest.importorskip("psutil", reason="psutil comes with NVIDIA FLARE: pip install 'fedbilevel[federation]'")
    mine = os.getpid()
    fed = SimpleNamespace(
        sites=["a"],
        kits={"server": tmp_path, "a": tmp_path},
        pids=lambda name: {"parent": [mine], "job": [mine] if name == "a" else []},
    )
    said = []
    watch = soak.Watch(fed, 100, said.append)
    for rounds in (1, 99, 103, 150, 199, 200, 201, 450, 460):
        watch({"rounds": rounds})
    assert [one["round"] for one in watch.looks] == [103, 200, 450]
    assert [set(one["memory"]) for one in watch.looks] == [{"server, parent", "a, parent", "a, job"}] * 3
    assert watch.looks[0]["memory"]["a, job"]["rss"] > 10
    assert len(said) == 3
    assert watch.replaced() == []
    watch.pids["a, job"] = 2**22 + 1  # above the largest process id
    watch({"rounds": 500})
    assert len(watch.looks) == 3
    assert watch.replaced() == ["a, job"]


# ---- peers ---------------------------------------------------------------------------------------------------------


def test_peers_are_skipped_with_a_sentence(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    assert peers.skipped(SMALL) is None
    assert "GPU" in (peers.skipped(Setup(device="cuda")) or "")
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert "pip install 'fedbilevel[peers]'" in (peers.skipped(SMALL) or "")


def test_costs_of_peers_are_for_a_byte_of_the_engines_ledger():
    spent = lambda cpu, wire, ledger: {"cpu": cpu, "wire": wire, "ledger": ledger}
    first, last = [spent(1, 10, 5), spent(2, 0, 0)], [spent(4, 40, 15), spent(3, 50, 30)]
    assert peers.spent_between(first, last) == {"cpu": 4, "wire": 80, "ledger": 40}
    assert peers.lasted([{"begin": 3.0, "end": 9.0}, {"begin": 4.0, "end": 11.0}]) == 8.0
    used = {"engine": [spent(4, 80, 40)] * 2, "office": [spent(2, 88, 0)] * 2, "floor": [spent(1, 40, 0)] * 2}
    assert peers.costs("engine", used) == {
        "wire": 2.0,
        "cpu_per_gb": pytest.approx(1e8),
        "floor_cpu_per_gb": pytest.approx(2.5e7),
    }
    assert peers.costs("office", used)["wire"] == pytest.approx(2.2)
    assert peers.costs("simulator", used) == {}
    used["engine"] = [spent(4, math.nan, 40)]
    assert "wire" not in peers.costs("engine", used), "a system that does not say"


def test_the_floor_between_peers_brings_the_rows_of_its_senders_in_order(tmp_path):
    pytest.importorskip("zmq", reason="peers need pyzmq: pip install 'fedbilevel[peers]'")
    from benchmarks.peer_steps import Bare
    from fedbilevel.peers.local import free_ports
    from fedbilevel.peers.roster import assemble, keygen, read_secret

    ports = free_ports(2)
    publics = [
        keygen(tmp_path / f"p{peer}.key", name=f"p{peer}", address=f"127.0.0.1:{port}")
        for peer, port in enumerate(ports)
    ]
    roster = assemble(publics, tmp_path / "roster.toml")
    one, other = (Bare(roster, peer, read_secret(tmp_path / f"p{peer}.key"), ports) for peer in range(2))
    rows = torch.arange(6.0).reshape(2, 3)
    for row in rows:
        one.exchange(row.numpy(), [1], [])
    for row in rows:
        [found] = other.exchange(-row.numpy(), [0], [0])
        assert torch.equal(torch.frombuffer(bytearray(found), dtype=torch.float32), row)
    assert [len(one.exchange(rows[0].numpy(), [], [1])) for _ in rows] == [1, 1]
    one._arrived[1].extend(
        [SimpleNamespace(buffer="next"), SimpleNamespace(buffer="last")]
    )  # from a sender that is ahead
    assert [one.exchange(rows[0].numpy(), [], [1]) for _ in rows] == [["next"], ["last"]]
    one.close()
    other.close()


def test_a_value_is_known_by_whose_mean_it_is():
    pytest.importorskip("zmq", reason="peers need pyzmq: pip install 'fedbilevel[peers]'")
    from benchmarks.peer_chaos import nearest
    from benchmarks.peer_steps import row_of

    rows = [row_of(peer, 50, 7).double() for peer in range(4)]
    group, error = nearest((rows[0] + 3 * rows[2] + 4 * rows[3]) / 8, 4, 7)  # a peer counts as one more than its number
    assert (group, error < 1e-12) == ([0, 2, 3], True)
    assert nearest((rows[0] + rows[2] + rows[3]) / 3, 4, 7)[1] > 1e-2
    assert not torch.equal(row_of(1, 50, 7), row_of(1, 50, 8))


def value(iteration, group, error=1e-8):
    return {"iteration": iteration, "group": group, "members": group, "error": error}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        (
            {"values": [[value(1, [0]), value(1, [0, 1]), value(2, [0, 1])], [value(1, [0, 1]), value(2, [0, 1])]]},
            None,
        ),  # an outer iteration began again
        ({"records": [[0, 1, 2], [0, 2]]}, None),  # a peer that was absent
        ({"records": [[0, 2], [0, 1, 2]]}, "p0, which was always there, lacks or repeats outer iterations [1]"),
        ({"records": [[0, 1, 2], [0, 1]]}, "p1 does not grow to outer iteration 2"),
        ({"records": [[0, 1, 2], [0, 1, 1, 2]]}, "p1 does not grow to outer iteration 2"),
        ({"records": [[0, 1, 2], []]}, "p1 does not grow to outer iteration 2"),
        (
            {"values": [[value(1, [0], 1e-3), value(2, [0, 1])], [value(2, [0, 1])]]},
            "1 values of p0 are not the mean of any group",
        ),
        (
            {"values": [[value(1, [0]), value(2, [0, 1])], [value(1, [0, 1]), value(2, [0, 1])]]},
            None,
        ),  # p0 does not count p1 in
        ({"values": [[value(2, [0, 1])], [value(2, [1])]]}, "last average of p1 is that of [1]"),
        (
            {
                "values": [
                    [value(1, [0, 1]), value(2, [0, 1, 2])],
                    [value(1, [0, 1, 2]), value(2, [0, 1, 2])],
                    [value(2, [0, 1, 2])],
                ]
            },
            "p0 has the mean of [0, 1]",
        ),
    ],
)
def test_every_kind_of_failure_of_a_soak_of_peers_is_counted(changes, said):
    pytest.importorskip("zmq", reason="peers need pyzmq: pip install 'fedbilevel[peers]'")
    from benchmarks.peer_soak import failures_in

    fine = {
        "values": [[value(1, [0, 1]), value(2, [0, 1])]] * 2,
        "records": [[0, 1, 2], [0, 1, 2]],
        "spared": 0,
        "num_iterations": 2,
    }
    found = failures_in(**{**fine, **changes})
    assert len(found) == (0 if said is None else 1), found
    assert said is None or said in found[0]


def test_memory_of_peers_is_of_processes_that_lived_long_enough(tmp_path):
    pytest.importorskip("zmq", reason="peers need pyzmq: pip install 'fedbilevel[peers]'")
    from benchmarks.peer_chaos import resident
    from benchmarks.peer_soak import memory_rows, peer_row

    [row] = memory_rows(
        {(0, 11): [(100.0, 50.0), (110.0, 90.0), (120.0, 60.0)], (1, 12): [(100.0, 50.0), (109.0, 51.0)]}
    )
    assert (row["name"], row["growth"], row["per_minute"], row["lived"]) == ("p0, process 11", 10.0, 30.0, 20.0)
    assert (resident(os.getpid()) or 0) > 10
    assert resident(2**22 + 1) is None
    (tmp_path / "run0").mkdir()
    (tmp_path / "p0.log").write_text(
        "1.0 4 of 4 peers begin at the start: a.\n2.0 p1 is gone\n3.0 3 of 4 peers begin after outer iteration 1: a.\n"
    )
    diary = [
        (1, {"outdated": 2}),
        (2, {"outdated": 5}),
        (2, {}),
        (3, {"outdated": 1, "key": 2}),
        (4, {"outdated": 1, "key": 2}),
    ]  # a new process after the second
    (tmp_path / "run0" / "peers.jsonl").write_text(
        "".join(json.dumps({"iteration": number, "refused": refused}) + "\n" for number, refused in diary)
    )
    row = peer_row(
        tmp_path,
        0,
        [value(1, [0], 0.5), {**value(2, [0]), "members": [0, 1]}],
        [{"peer": 0, "kind": "kill"}, {"peer": 1, "kind": "stop"}],
    )
    assert (row["formations"], row["iterations"], row["repeated"], row["other_members"], row["error"]) == (
        2,
        4,
        1,
        1,
        0.5,
    )
    assert (row["kills"], row["stops"], row["refused"]) == (1, 0, "key 2, outdated 6")


@pytest.mark.parametrize(
    ("words", "said"), [(["--rounds", "3"], "at least 5"), (["--only", "nothing"], "invalid choice")]
)
def test_wrong_options_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        command.main(words)
    assert said in capsys.readouterr().err


# ---- footprint -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("python -m nvflare.lighter.provision -p project.yml", "provision"),
        ("python -u -m nvflare.private.fed.app.server.server_train -m kits/server --set org=server", "server, parent"),
        ("python -m nvflare.private.fed.app.server.runner_process -m kits/server -n 1", "server, job"),
        ("python -u -m nvflare.private.fed.app.client.client_train -m kits/site-1 --set uid=site-1", "site-1, parent"),
        (
            "python -m nvflare.private.fed.app.client.worker_process -m kits/site-2 -c site-2 --set uid=site-2",
            "site-2, job",
        ),
        ("cat progress.json", "other"),
    ],
)
def test_a_process_of_a_federation_is_known_by_its_command_line(line, role):
    assert footprint.role_of(line.split()) == role


def test_the_footprint_lists_the_command_first_and_leaves_out_what_lives_for_a_moment():
    entry = lambda name, seconds: {
        "name": name,
        "seconds": seconds,
        "cpu": 1.0,
        "rss": 2.0,
        "pss": 1.5,
        "modules": ["os", "sympy"],
    }
    found = footprint.rows_of(
        [entry("site-1, job", 9.0), entry("other", 0.2), entry("the command", 20.0), entry("server, job", 9.0)]
    )
    assert [row["name"] for row in found] == ["the command", "server, job", "site-1, job"]
    assert [row.get("aim") for row in found] == [None, None, footprint.JOB_AIM]
    assert found[0] == {
        "name": "the command",
        "seconds": 20.0,
        "cpu": 1.0,
        "rss": 2.0,
        "pss": 1.5,
        "modules": 2,
        "heavy": "sympy",
    }


def test_processes_below_a_command_are_watched_with_what_they_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(footprint.NOTES)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), footprint.MODULES: str(tmp_path)}
    command = subprocess.Popen([sys.executable, "-c", "import colorsys; input()"], env=variables, stdin=subprocess.PIPE)
    try:
        note = tmp_path / f"{command.pid}.json"
        end = time.monotonic() + 60
        while not note.exists() or "colorsys" not in note.read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        watch = footprint.Watch(command.pid, tmp_path)
        watch.look()
    finally:
        command.communicate(b"\n")
    found = watch.found[command.pid]
    assert found["name"] == "the command"
    assert "colorsys" in found["modules"]
    assert found["rss"] >= found["pss"] > 1
    watch.look()  # the process has ended
    assert set(watch.found) == {command.pid}


def test_few_shot_episodes_compares_the_task_with_its_rivals(tmp_path, capsys):
    from benchmarks import few_shot_episodes

    out = tmp_path / "rows.json"
    assert few_shot_episodes.main(["--small", "--rivals", "prototypes", "--out", str(out)]) == 0
    (rows,) = json.loads(out.read_text()).values()
    assert [row["way"].split(":")[0] for row in rows] == ["bilevel", "prototypes"]
    tried = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")][1:]
    assert rows[1]["upper_loss"] == min(row["upper_loss"] for row in tried)
    assert len(tried) == 2


def test_jobs_of_worth_resume_and_keep_results_at_the_time_limit(tmp_path, capsys):
    from benchmarks import worth_jobs

    one = worth_jobs.read("worth")
    jobs = one.jobs(quick=True, panels=["imbalance-digits"], rows=["self-tuned", "plain", "guarded"])
    assert [(job.repetition, job.row) for job in worth_jobs.ordered(jobs)] == [
        (r, row) for r in (0, 1) for row in ("guarded", "self-tuned", "plain")
    ]
    plain = [job for job in jobs if job.row == "plain"]
    broken = dataclasses.replace(plain[0], row="broken", settings={**plain[0].settings, "figure": "nothing"})
    found = worth_jobs.run([*plain, broken], tmp_path, processes=2, limit=300)
    assert {one.key: bool(one.error) for one in found} == {plain[0].key: False, plain[1].key: False, broken.key: True}
    assert worth_jobs.run(plain, tmp_path, processes=1, limit=300) == []  # all are done
    assert worth_jobs.run(jobs, tmp_path, processes=1, limit=0.0) == []
    assert "the time is up: 4 jobs are left" in capsys.readouterr().out


def test_a_list_of_jobs_runs_equal_settings_once_and_keeps_its_order(tmp_path, monkeypatch):
    from benchmarks import worth_jobs

    text = (
        "fedbioacc-figure1 rho04 fedbio,commfedbio 9\nadafbio-comparison cleaning fednest,fedbio 9  # one is shared\n"
    )
    places = worth_jobs.listed(text, tmp_path)
    assert [(place.folder.name, place.job.row) for place in places][::9] == [
        ("fedbioacc-figure1", "fedbio"),
        ("fedbioacc-figure1", "commfedbio"),
        ("adafbio-comparison", "fednest"),
        ("adafbio-comparison", "fedbio"),
    ]
    groups = worth_jobs.equal(places)
    assert [len(group) for group in groups] == [2, 1] * 9 + [1] * 9
    assert {group[0].job.repetition == place.job.repetition for group in groups for place in group} == {True}

    def result(jobs, folder, *, device):
        folder.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            content = {"panel": job.panel, "row": job.row, "study": job.study, "settings": job.settings}
            whole = {**content, "figures": {"test_accuracy": 0.5}, "curve": []}
            (folder / f"{job.key}.json").write_text(json.dumps(whole))

    monkeypatch.setattr(worth_jobs, "reproduce", result)
    assert not worth_jobs.share(groups[0])
    assert worth_jobs.perform((groups[0], "cpu")).error == ""
    other = json.loads((tmp_path / "adafbio-comparison" / "cleaning--fedbio--0.json").read_text())
    assert (other["panel"], other["row"], other["figures"]) == ("cleaning", "fedbio", {"test_accuracy": 0.5})
    assert worth_jobs.share(groups[0])
    assert [bool(worth_jobs.results([place.job], place.folder)) for place in groups[0]] == [True, True]
    with pytest.raises(ExperimentError, match="is not EXPERIMENT PANELS ROWS REPETITIONS"):
        worth_jobs.listed("aggitd-table2 shards", tmp_path)


def test_a_list_leaves_out_what_the_experiment_records(tmp_path, monkeypatch):
    from benchmarks import worth_jobs

    one = worth_jobs.read("aggitd-figure4")
    job = one.jobs(panels=["iid"], rows=["aggitd-tau1"], repetitions=1)[0]
    entry = {"settings": job.digest, "repetitions": 3, "figures": {"indirect_share": {"mean": 0.1}}}
    content = {**one.content, "result": {"iid": {"aggitd-tau1": entry}}, "tuned": {}}
    monkeypatch.setattr(worth_jobs, "read", lambda name: dataclasses.replace(one, content=content))
    rows = lambda text: [place.job.row for place in worth_jobs.listed(text, tmp_path)]
    assert rows("aggitd-figure4 iid aggitd-tau1 3") == []
    assert len(rows("aggitd-figure4 iid aggitd-tau1 4")) == 4
    figures = entry.pop("figures")
    assert len(rows("aggitd-figure4 iid aggitd-tau1 3")) == 3  # recorded before the share was measured
    entry.update(settings="other", figures=figures)
    assert len(rows("aggitd-figure4 iid aggitd-tau1 3")) == 3
    trials = worth_jobs.listed("aggitd-figure4 - aggitd-tau1 tune", tmp_path)
    assert len(trials) == one.content["tune"]["trials"] * one.content["tune"]["repetitions"] == 20
    assert {place.folder.name for place in trials} == {"tune-aggitd-figure4"}
    content["tuned"] = {"shards": {"aggitd-tau1": {"trials": 9, "settings": {}}}}
    assert len(rows("aggitd-figure4 - aggitd-tau1 tune")) == 20
    content["tuned"]["shards"]["aggitd-tau1"]["trials"] = 10
    assert rows("aggitd-figure4 - aggitd-tau1 tune") == []


def test_rows_that_share_networks_run_one_after_the_other():
    from benchmarks import worth_jobs

    jobs = worth_jobs.read("cleaning-cifar10n").jobs(
        panels=["worst", "random1"], rows=["cleanlab", "pruned"], repetitions=2
    )
    waits = {job.key: worth_jobs.leader(job, jobs) for job in jobs}
    for panel in ("worst", "random1"):
        for r in (0, 1):
            assert waits[f"{panel}--cleanlab--{r}"] is None
            assert waits[f"{panel}--pruned--{r}"] == f"{panel}--cleanlab--{r}"


def test_rows_of_worth_wait_for_the_run_that_computes_them():
    from benchmarks import worth_jobs

    jobs = worth_jobs.read("worth").jobs(panels=["personalisation-digits", "influence-digits"], repetitions=2)
    waits = {job.key: worth_jobs.leader(job, jobs) for job in jobs}
    for r in (0, 1):
        first = f"personalisation-digits--guarded--{r}"
        expected = dict.fromkeys(("guarded", "self-tuned", "fine-tuned"), None)
        expected |= dict.fromkeys(("blended", "started", "own-head", "ditto", "fedrep"), first)
        assert {row: waits[f"personalisation-digits--{row}--{r}"] for row in expected} == expected
        assert waits[f"influence-digits--own-loss--{r}"] == f"influence-digits--self-tuned--{r}"
    order = [job.panel for job in worth_jobs.ordered(jobs, ["personalisation-digits", "influence-digits"])]
    assert order == sorted(order, reverse=True)  # all repetitions of a panel before the next
