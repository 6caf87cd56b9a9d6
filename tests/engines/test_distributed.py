"""Several processes against one: the same trajectory, the same charges and the same files.

All processes end when one of them fails, dies or freezes.

The ranks themselves are in `support.ranks`, whose worlds are started once for all tests.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fedbilevel
from fedbilevel.cli.main import cli
from fedbilevel.engines import distributed, group_of, simulate
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import RankLostError, SettingError
from fedbilevel.federation.network import Network
from fedbilevel.runs.endings import interrupts
from fedbilevel.runs.record import Record
from fedbilevel.tasks.quadratic import Quadratic
from support import ranks as rank_cases
from support.ranks import CASES, CLOSE, EXACT, NUM, RESUMED, compared, go

SIZES = (1, 2, 4)
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    "PYTHONPATH": f"{Path(fedbilevel.__file__).parents[1]}:{Path(__file__).parents[1]}",
    "OMP_NUM_THREADS": "1",
}
pytestmark = [pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"), pytest.mark.wait, pytest.mark.slow]


def end_group(process):
    """End a process that leads a group, and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Run every case in one process, and begin the runs that several processes resume."""
    folder = tmp_path_factory.mktemp("simulated")
    for name in CASES:
        go(name, EXACT, 3, record=folder / f"{name}-exact")
        go(name, CLOSE, 3, record=folder / f"{name}-close")
    for name in RESUMED:
        go(name, EXACT, 2, record=folder / f"{name}-begun")
        go(name, EXACT, 4, record=folder / f"{name}-whole")
    return folder


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, simulated):
    folder = tmp_path_factory.mktemp("worlds")
    for size in SIZES:
        for name in RESUMED:
            place = folder / str(size) / f"{name}-begun"
            place.mkdir(parents=True)
            for file in (simulated / place.name).iterdir():
                (place / file.name).write_bytes(file.read_bytes())
    sizes = ", ".join(repr(str(size)) for size in SIZES)
    call = f"from support import ranks; ranks.start({str(folder)!r}, {sizes}, 'frozen')"
    process = subprocess.Popen(
        [sys.executable, "-c", call], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        complaints = process.communicate(timeout=900)[1]
    finally:
        end_group(process)  # with the ranks that it forked, also a frozen one
    assert process.returncode == 0, complaints
    errors = [path.read_text() for path in sorted(folder.glob("*/*.error"))]
    assert not errors, errors[0]
    return folder


def seen(worlds, size):
    return [json.loads((worlds / str(size) / f"rank{rank}.json").read_text()) for rank in range(size)]


def untimed(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def compare(ours, theirs, *, exact):
    """Two records: state, what clients hold, who holds what, ledger, network time, figures."""
    (tensors, about), (wanted, wanted_about) = Record(ours).load(), Record(theirs).load()
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        if exact or not value.is_floating_point():
            assert torch.equal(tensors[name], value), name
        else:
            torch.testing.assert_close(tensors[name], value, rtol=1e-12, atol=1e-12, msg=name)
    assert about["state"] == wanted_about["state"]
    assert (ours / "clients.json").read_bytes() == (theirs / "clients.json").read_bytes()
    assert json.loads((ours / "ledger.json").read_text()) == json.loads((theirs / "ledger.json").read_text())
    assert {**about["identity"], "losses": 0} == {**wanted_about["identity"], "losses": 0}
    figures, expected = untimed(Record(ours).rows()), untimed(Record(theirs).rows())
    assert [row["iteration"] for row in figures] == [row["iteration"] for row in expected]
    for row, wanted_row in zip(figures, expected, strict=True):
        # sums of squares, which are not exact; a system that is solved up to 1e-6
        near = {"lower_gradient": 1e-12, "residual": 1e-12, "hypergradient": 1e-6}
        looked = {
            name: pytest.approx(wanted_row[name], rel=far, abs=1e-12)
            for name, far in near.items()
            if name in wanted_row
        }
        rest = {
            name: pytest.approx(value, rel=1e-9, abs=1e-12)
            for name, value in wanted_row.items()
            if name != "hypergradient" and not exact
        }
        assert row == {**wanted_row, **looked, **rest}


@pytest.mark.parametrize("size", SIZES)
def test_ranks_keep_the_contract_of_an_engine(worlds, size):
    for one in seen(worlds, size):
        assert one["contract"] == [""] * 4


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in dict.fromkeys(case for case, *_ in compared(size))]
)
def test_several_processes_follow_the_simulator(worlds, simulated, name, size):
    """A float32 loop over clients agrees bit for bit; batched float64 clients agree up to rounding.

    Four ranks hold 1, 2, 2 and 2 of the 7 clients."""
    labels = [label for case, label, _ in compared(size) if case == name]
    assert labels[0] == "exact"
    for label in labels:
        compare(worlds / str(size) / f"{name}-{label}", simulated / f"{name}-{label}", exact=label == "exact")
    same = (worlds / str(size) / f"{name}-exact" / "solution.safetensors").read_bytes() == (
        simulated / f"{name}-exact" / "solution.safetensors"
    ).read_bytes()
    assert same


def test_the_cases_move_and_leave_some_ranks_without_a_client_of_the_cohort(simulated):
    for name in CASES:
        tensors, _ = Record(simulated / f"{name}-exact").load()
        assert any(
            bool(value.any()) for key, value in tensors.items() if key.startswith(("state.", "kept.", "memory."))
        ), name
    answers = Record(simulated / "fednest-exact").load()[0]["ledger.floats_up"]
    assert len(set(answers.tolist())) > 1


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_return_the_same_solution_and_bill(worlds, simulated, size):
    first, *others = seen(worlds, size)
    for other in others:
        assert other["solution"] == first["solution"]
        assert other["ledger"] == first["ledger"]
    for name, ledger in first["ledger"].items():
        last = Record(simulated / name).rows()[-1]
        assert ledger == {key: last[key] for key in ledger}


@pytest.mark.parametrize("size", SIZES)
def test_only_rank_0_writes(worlds, size):
    assert not list((worlds / str(size)).glob("nowhere*"))
    config = Record(worlds / str(size) / "hgp-exact").read_config()
    assert (config["engine"], config["ranks"]) == ("distributed", size)
    assert Record(worlds / str(size) / "fedbio-exact").read_config()["engine"] == "distributed"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_may_change_engine_and_number_of_ranks_on_the_way(worlds, simulated, tmp_path, name, size):
    """Two iterations here and two there, and three there and one here: as four here."""
    compare_last = lambda place: all(
        torch.equal(value, Record(simulated / f"{name}-whole").load()[0][key])
        for key, value in Record(place).load()[0].items()
    )
    assert compare_last(worlds / str(size) / f"{name}-begun")
    for file in (worlds / str(size) / f"{name}-exact").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    go(name, EXACT, 4, record=tmp_path, resume=True)
    assert compare_last(tmp_path)
    assert Record(tmp_path).read_config()["engine"] == "simulation"


@pytest.mark.parametrize("size", SIZES)
def test_what_fails_at_one_rank_fails_at_all_with_the_same_words(worlds, tmp_path, size):
    first, *others = [one["failures"] for one in seen(worlds, size)]
    alone = {
        "nan": rank_cases.spoilt("nan", record=tmp_path / "nan"),
        "nans": rank_cases.spoilt("nans"),  # at several ranks at once
        "interrupt": rank_cases.spoilt("interrupt"),
        "callback": rank_cases.spoilt("", callbacks=[lambda now: now.iteration == 3]),
    }
    assert alone["nan"][0] == "NonFiniteError"
    assert alone["nan"][1].startswith("client 5 returned")
    assert "of outer iteration 1, is in" in alone["nan"][1]
    assert first["nan"] == [alone["nan"][0], alone["nan"][1].replace(str(tmp_path), str(worlds / str(size)))]
    assert first["nans"] == alone["nans"]
    assert alone["nans"][1].startswith("client 1 returned")
    assert first["interrupt"] == alone["interrupt"] == ["interrupted", "2"]
    assert first["callback"] == alone["callback"] == ["callback", "3"]
    assert first["unwritable"][0] == "CheckpointError"
    for other in others:
        assert {key: other[key] for key in (*alone, "unwritable", "few", "robust", "elsewhere", "timeout")} == {
            key: first[key] for key in (*alone, "unwritable", "few", "robust", "elsewhere", "timeout")
        }
    for name, iteration in (("interrupt", 2), ("callback", 3), ("nan", 1)):
        assert Record(worlds / str(size) / name).load()[1]["iteration"] == iteration
    # what is nobody's fault but a bug's: the rank where it happened raises it, the others say where
    where = next(rank for rank, one in enumerate(seen(worlds, size)) if 5 in one["counted"]["hosted"])
    for name, at in (("bug", where), ("callback_bug", 0)):
        for rank, one in enumerate([first, *others]):
            kind, text = one[name]
            assert kind == ("KeyError" if rank == at else "FedBilevelError")
            assert rank == at or text.startswith(f"rank {at} failed with KeyError")


def test_what_cannot_be_done_is_said_in_one_sentence(worlds):
    failures = seen(worlds, 4)[0]["failures"]
    assert failures["few"] == [
        "SettingError",
        "there are 4 ranks for 3 clients, and every rank hosts at least one: start 3 ranks or fewer.",
    ]
    assert failures["robust"][1].startswith("robust averaging follows single messages")
    assert "attackers know the rows of all clients: leave it out, or run all clients" in failures["attack"][1]
    assert "the ranks were not given the same run" in failures["elsewhere"][1]
    assert failures["timeout"] == ["SettingError", "timeout is 0, expected seconds above 0, at most 1e+09."]
    assert [one["failures"]["data"] for one in seen(worlds, 4)] == 4 * [failures["data"]]
    assert failures["data"][1].startswith("client 1 has no 'train' samples")
    assert "hosts the clients from 5 on" in failures["data"][1]
    assert seen(worlds, 1)[0]["failures"]["elsewhere"] == ["finished", "1"]
    assert seen(worlds, 1)[0]["failures"]["robust"] == ["finished", "1"]


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_its_own_clients_and_talks_once_per_round(worlds, size):
    found = [one["counted"] for one in seen(worlds, size)]
    assert [number for one in found for number in one["hosted"]] == list(range(NUM))
    assert all(len(one["hosted"]) in (NUM // size, -(-NUM // size)) for one in found)
    assert [one["samples"] for one in found] == [sum(4 + i for i in one["hosted"]) for one in found]
    assert size == 1 or all(one["asked"] == one["hosted"] for one in found)
    for one in found:
        assert set(one["rows"]) <= {len(one["hosted"])}
        assert one["sums"] == one["rounds"] > 0
    # eight peers on a ring, one step: a row of six floats and a weight goes to a neighbour that lives elsewhere
    row = 6 * 4 + 8
    if size == 1:  # nothing is exchanged
        assert found[0]["passed"] == []
    if size == 2:
        assert [one["passed"] for one in found] == [[[4 * row, 2 * row]], [[2 * row, 4 * row]]]
    if size == 4:
        for rank, one in enumerate(found):
            assert one["passed"] == [[{0: 2 * row, 2: 0}.get((other - rank) % 4, row) for other in range(4)]]


def test_a_frozen_rank_is_given_up_after_the_timeout_and_the_checkpoint_is_good(worlds, tmp_path):
    status = json.loads((worlds / "status.json").read_text())
    assert status["frozen"] == [0, 0, -signal.SIGKILL]
    (text, speaks, later, _), (again, repeats, *_) = (
        json.loads((worlds / "frozen" / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )
    place = worlds / "frozen" / "run"
    assert text == (
        "rank 2 of 3 no longer answers (no word within 1.5 s) in outer iteration 2; "
        f"the last checkpoint, of outer iteration 1, is in {place}: "
        "resume with the same call and resume=True."
    )
    assert later == "a rank of 3 was lost before, so the others can exchange nothing any more: start all of them again."
    assert again == text
    assert (speaks, repeats) == (True, False)
    assert rank_cases.spoilt("freeze", record=place, resume=True, strategy="loop") == ["finished", "4"]
    rank_cases.spoilt("freeze", record=tmp_path / "whole", strategy="loop")
    assert (place / "solution.safetensors").read_bytes() == (tmp_path / "whole" / "solution.safetensors").read_bytes()


# ---- the command line, under torchrun ------------------------------------------------------------


def torchrun(*args, cwd, **options):
    call = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "fedbilevel",
        *map(str, args),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(call, cwd=cwd, env=ENVIRONMENT, start_new_session=True, **pipes, **options)


def ranks_of(process):
    """Process ids by rank, of what torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {int(child): Path(f"/proc/{child}/environ").read_text().split("\0") for child in children}
    return {
        int(entry[5:]): child
        for child, environment in environments.items()
        for entry in environment
        if entry.startswith("RANK=")
    }


def stored(folder):
    """Read the outer iteration of a checkpoint that may be replaced at any moment.

    safetensors opens a file twice, and could then read two different checkpoints."""
    content = (folder / "checkpoint.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["about"])["iteration"]


def test_a_killed_rank_ends_the_run_with_one_message_and_a_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    flags = [
        "quadratic",
        "-a",
        "fedbioacc",
        "--num-clients",
        3,
        "--batch-size",
        2,
        "--fraction",
        0.7,
        "--strategy",
        "loop",
        "--checkpoint-every",
        2,
    ]
    flags += ["--measure-every", 50_000]
    monkeypatch.chdir(tmp_path)
    command("run", *flags, "--num-iterations", 2, "--out", "run")
    process, ranks = torchrun("resume", "run", "--num-iterations", 100_000, cwd=tmp_path), {}
    try:
        limit = time.monotonic() + 600
        while stored(Path("run")) < 6:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < limit
            time.sleep(0.1)
        ranks = ranks_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        _, complaints = process.communicate(timeout=300)
    finally:
        end_group(process)
        for left in ranks.values():  # torchrun may start ranks in sessions of their own
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    messages = [line for line in complaints.splitlines() if line.startswith("Error: ")]
    assert len(messages) == 1, complaints
    message = messages[0]
    reached = Record("run").load()[1]["iteration"]
    assert message.startswith("Error: rank 1 of 2 no longer answers (the connection is closed) in outer iteration ")
    assert message.endswith(
        f"; the last checkpoint, of outer iteration {reached}, is in run: "
        "resume with torchrun --nproc-per-node 2 -m fedbilevel resume run."
    )
    assert "fedbilevel/engines" not in complaints  # no traceback of ours; torchrun has one of its own
    assert "fedbilevel/cli" not in complaints
    assert Record("run").read_config()["ranks"] == 2
    command("resume", "run", "--num-iterations", reached + 3)
    command("run", *flags, "--num-iterations", reached + 3, "--out", "whole")
    assert Path("run/solution.safetensors").read_bytes() == Path("whole/solution.safetensors").read_bytes()


def test_a_request_to_end_that_comes_late_does_not_cut_off_what_is_lost():
    class Two(Group):
        size = 2

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RankLostError), interrupts(Two()):
            raise RankLostError("rank 1 of 2 no longer answers.")
        os.kill(os.getpid(), signal.SIGTERM)  # by default it would end this process
        signal.signal(signal.SIGTERM, before)
        with interrupts(Two()) as interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupted()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def command(*args):
    done = CliRunner().invoke(cli, [*map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_rank_0_speaks_for_all(worlds, tmp_path):
    first, other = [one["command"] for one in seen(worlds, 2)]
    assert {name: text for name, (_, text) in other.items()} == dict.fromkeys(first, "")
    assert {name: code for name, (code, _) in other.items()} == {name: code for name, (code, _) in first.items()}
    place = worlds / "2" / "command"
    assert first["run"][0] == first["resume"][0] == 0
    assert f"Saved in {place}" in first["run"][1]
    assert "outer iteration 3/3" in first["resume"][1]
    assert first["misspelt"] == [2, "Error: There is no task named 'quadratik'. Did you mean 'quadratic'?\n"]
    assert first["unknown"][0] == 2
    assert "--colour" in first["unknown"][1]
    assert first["again"] == [2, f"Error: {place} already holds a run: resume it, or name another folder.\n"]
    config = Record(place).read_config()
    assert (config["engine"], config["ranks"], config["task"]) == ("distributed", 2, "quadratic")
    assert (place / "log.jsonl").read_bytes() == (
        place / "metrics.jsonl"
    ).read_bytes()  # once, though every rank was asked to write it
    command(
        "run",
        "quadratic",
        "-a",
        "fedbio",
        "--num-clients",
        3,
        "--strategy",
        "loop",
        "--num-iterations",
        3,
        "--out",
        tmp_path / "alone",
    )
    assert (place / "solution.safetensors").read_bytes() == (tmp_path / "alone" / "solution.safetensors").read_bytes()


def test_without_torchrun_it_says_what_to_type(monkeypatch, tmp_path):
    for name in distributed.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SettingError, match=r"type torchrun --nproc-per-node 2 -m fedbilevel run \.\.\. --engine distributed"
    ):
        group_of("distributed")
    with pytest.raises(SettingError, match="engine is 'cluster', expected 'simulation' or 'distributed'"):
        group_of("cluster")  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="torchrun started several processes, and the engine 'simulation' needs one"):
        CliRunner().invoke(
            cli,
            ["run", "quadratic", "-a", "fedbio", "--engine", "simulation", "--out", str(tmp_path / "r")],
            catch_exceptions=False,
        )


def test_one_process_is_a_group_that_asks_nobody():
    group = Group()
    parts = [torch.arange(3.0, dtype=torch.float64)]
    assert group.sum(parts) is parts
    assert group.joined(parts[0], [3]) is parts[0]
    assert group.told(lambda: parts) is parts
    assert group.largest(2) == 2
    with group.together():
        group.meet()


@pytest.mark.parametrize("num", [10, 70])
def test_a_step_for_some_receivers_is_that_part_of_the_step_for_all(num):
    """Below and above the number of peers from which shares are kept as a sparse matrix."""
    for kind in ("ring", "random_directed"):
        mixing = Network(kind=kind).between(num).mixing(2)
        rows, some = torch.randn(num, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3, num - 1])
        torch.testing.assert_close(mixing(rows, some), mixing(rows)[some], rtol=1e-6, atol=1e-7)


def test_ids_of_any_order_give_the_same_fingerprint():
    built = Quadratic(num_clients=3).build()
    algorithm = CASES["fedbioacc"][0]
    marks = {
        simulate(algorithm, built.problem, [built.clients[i] for i in order], ids=order).roster.fingerprint()
        for order in ([0, 1, 2], [2, 0, 1])
    }
    assert len(marks) == 1
    other = Quadratic(num_clients=3, data_seed=8).build()
    assert simulate(algorithm, *other).roster.fingerprint() not in marks
