"""Collected records of peers equal the record of a simulation, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from fedbilevel.columns import figures_of
from fedbilevel.errors import CheckpointError, FedBilevelError, PlanError
from fedbilevel.federation.ledger import EDGES
from fedbilevel.peers.collect import Collected, collect, is_mask
from fedbilevel.peers.plan import plan_of
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.report import tables
from fedbilevel.runs.record import Record, read_tensors
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.studies.influence.predict import influences
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Shapes
from support.numeric.yardstick import relative
from support.peers.threads import Threads

OWN = {"seconds", "num_peers"}  # columns that differ from those of a simulation


class Both(NamedTuple):
    """The same run between peers and in a simulation."""

    folders: list[Path]
    collected: Collected
    result: Result
    problem: Problem
    clients: list[Holdings]

    @property
    def simulated(self) -> Record:
        assert self.result.path is not None
        return Record(self.result.path)


def both(folder: Path, clients: list[Holdings], plan: dict[str, Any]) -> Both:
    plan = {**plan, "name": "trial", "options": {"strategy": "loop", **plan["options"]}}
    threads = Threads(folder, plan, clients)
    threads.run()
    folders = [folder / name for name in threads.names]
    collected = collect([folders[-1], *folders[:-1]], folder / "all")  # the order of folders does not matter
    ours = threads.plan
    problem = ours.built_task().problem(Shapes.of(clients[0], ours.num_classes))
    result = solve(
        problem,
        clients,
        ours.built_algorithm(),
        residuals=False,
        num_iterations=ours.num_iterations,
        measure_every=ours.measure_every,
        record=folder / "simulated",
        **ours.keywords(),
    )
    return Both(folders, collected, result, problem, clients)


@pytest.fixture(scope="module")
def quadratic(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Clients with different weights, and a network whose edges change at every step."""
    task = {"num_clients": 4, "dim_upper": 2, "dim_lower": 3, "client_weights": "by_samples"}
    plan = {
        "num_iterations": 3,
        "measure_every": 2,
        "task": {"name": "quadratic", **task},
        "algorithm": {"name": "hgp", "num_terms": 3, "num_lower_steps": 2},
        "options": {
            "seed": 5,
            "batch_size": 3,
            "dtype": "float64",
            "network": {"kind": "random_directed", "seed": 1},
            "averaging": {"num_steps": 3},
        },
    }
    return both(tmp_path_factory.mktemp("quadratic"), list(Quadratic(**task).build().clients), plan)


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A run in float32, with figures that need every client separately."""
    task = {"num_clients": 4, "share": 0.1, "model": "linear", "least": 8}
    plan = {
        "num_iterations": 2, "measure_every": 1, "num_classes": 10, "task": {"name": "personalisation", **task},
        "algorithm": {"name": "hgp", "num_terms": 3, "num_lower_steps": 3, "lr_system": 0.01},
        "options": {"network": {"kind": "ring"}, "averaging": {"num_steps": 2, "weights": "kept"}},
    }  # fmt: skip
    return both(tmp_path_factory.mktemp("personal"), list(Personalisation(**task).build().clients), plan)


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """One estimate, at peers with different numbers of samples."""
    task = {"num_train": 12, "num_val": 9, "l2": 0.1}
    clients = list(Influence(**task).build().clients)
    for number, kept in ((0, 7), (2, 10)):
        clients[number]["train"] = {name: values[:kept] for name, values in clients[number]["train"].items()}
    plan = {
        "num_iterations": 1, "num_classes": 2, "task": {"name": "influence", **task},
        "algorithm": {"name": "hgp", "num_terms": 100, "num_lower_steps": 60, "optimiser": "none"},
        "options": {"dtype": "float64", "network": {"kind": "complete"}, "averaging": {"num_steps": 2}},
    }  # fmt: skip
    return both(tmp_path_factory.mktemp("masks"), clients, plan)


RUNS = ("quadratic", "personal", "masks")


@pytest.fixture(params=RUNS)
def each(request: pytest.FixtureRequest) -> Both:
    found: Both = request.getfixturevalue(request.param)
    return found


# ---- equality with a simulation ------------------------------------------------------------------


@pytest.mark.slow
def test_collected_measurements_equal_those_of_a_simulation(each: Both) -> None:
    rows, theirs = each.collected.rows, each.result.rows
    assert Record(each.collected.path).rows() == rows
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in theirs]
    for row, other in zip(rows, theirs, strict=True):
        assert row.keys() - OWN - {"disagreement"} == other.keys() - OWN - {"disagreement"}
        assert {name: row[name] for name in row.keys() - OWN} == {name: other[name] for name in row.keys() - OWN}
    assert rows[-1]["disagreement"] == theirs[-1]["disagreement"]
    assert all("disagreement" not in row for row in rows[:-1])
    assert [row["num_peers"] for row in rows] == [len(each.clients)] * len(rows)
    slowest = [max(Record(folder).rows()[k]["seconds"] for folder in each.folders) for k in range(len(rows))]
    assert [row["seconds"] for row in rows] == slowest


def test_figures_differ_between_peers(personal: Both) -> None:
    """Otherwise the test above would prove little."""
    row = personal.collected.rows[-1]
    alone = [Record(folder).rows()[-1] for folder in personal.folders]
    assert row["test_accuracy_bottom_decile"] < row["test_accuracy"] < max(one["test_accuracy"] for one in alone)
    assert len({one["upper_loss"] for one in alone}) == len(alone)


def test_upper_loss_of_a_quadratic_equals_the_formula(quadratic: Both) -> None:
    _, solution = read_tensors(quadratic.collected.path / "solution.safetensors")
    losses, sizes = [], []
    for number, client in enumerate(quadratic.clients):
        x, y = (solution[f"{name}.client{number}.{name}"].numpy() for name in "xy")
        val, away = client["val"], y - client["val"]["t"]
        each_sample = (
            0.5 * np.einsum("si,sij,sj->s", away, val["D"], away)
            + 0.5 * np.einsum("i,sij,j->s", x, val["R"], x)
            - val["r"] @ x
        )
        losses.append(each_sample.mean())
        sizes.append(len(client["train"]["c"]))
    assert quadratic.collected.rows[-1]["upper_loss"] == pytest.approx(np.average(losses, weights=sizes), rel=1e-12)
    assert abs(np.mean(losses) / np.average(losses, weights=sizes) - 1) > 1e-3  # the weights differ


def test_solution_and_hypergradient_equal_those_of_a_simulation(each: Both) -> None:
    _, ours = read_tensors(each.collected.path / "solution.safetensors")
    _, theirs = read_tensors(each.simulated.path / "solution.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    _, estimate = read_tensors(each.collected.path / "hypergradient.safetensors")
    (leaf,) = {name.split(".", 2)[2] for name in estimate}
    for number, row in enumerate(each.result.state.h):
        found = estimate[f"h.client{number}.{leaf}"]
        assert torch.equal(found, row[: len(found)])
        assert bool((row[len(found) :] == 0).all())
        _, own = read_tensors(each.folders[number] / "hypergradient.safetensors")
        assert torch.equal(own[leaf], found)


def test_ledger_equals_that_of_a_simulation(each: Both) -> None:
    stored = json.loads((each.collected.path / "ledger.json").read_text())
    assert stored["totals"] == each.result.ledger == each.collected.ledger.totals()
    tensors, _ = each.simulated.load()
    assert stored["edges"] == {name: tensors[f"ledger.edges-{name}"].tolist() for name in EDGES}
    for name, column in each.collected.ledger.columns.items():
        assert torch.equal(column, tensors[f"ledger.{name}"])


def test_ledger_of_a_directed_network_is_not_symmetric(quadratic: Both) -> None:
    messages = torch.tensor(json.loads((quadratic.collected.path / "ledger.json").read_text())["edges"]["messages"])
    assert len(set(messages.flatten().tolist())) > 3
    assert not torch.equal(messages, messages.T)


def test_identity_equals_that_of_a_simulation(each: Both) -> None:
    config, theirs = Record(each.collected.path).read_config(), each.simulated.read_config()
    assert config["identity"] == {name: value for name, value in theirs["identity"].items() if name != "losses"}
    assert (config["engine"], config["peers"], config["missing"]) == ("peers", config["collected"], [])
    assert plan_of(config["plan"], len(each.clients)) == each.collected.plan
    assert config["versions"] == theirs["versions"] == config["versions_of_peers"]["p1"]
    assert "peer" not in config


# ---- influences ----------------------------------------------------------------------------------


def test_influences_equal_minus_the_hypergradient(masks: Both) -> None:
    listed = json.loads((masks.collected.path / "influences.json").read_text())
    assert listed == [one._asdict() for one in masks.collected.removals or ()]
    assert [one["change"] for one in listed] == sorted(one["change"] for one in listed)
    sizes = [len(client["train"]["label"]) for client in masks.clients]
    assert sizes == [7, 12, 10]
    changes = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    for one in listed:
        assert one["peer"] == f"p{one['client']}"
        changes[one["client"]][one["sample"]] = one["change"]
    assert len(listed) == sum(sizes)
    assert all(
        torch.equal(change, -row[: len(change)]) for change, row in zip(changes, masks.result.state.h, strict=True)
    )
    exact = influences(masks.problem, masks.clients, masks.result.state.y, method="exact", dtype=torch.float64)
    assert all(relative(change, target) < 1e-3 for change, target in zip(changes, exact.changes, strict=True))


def per_sample(role: str, value: float) -> Callable[[Any], dict[str, torch.Tensor]]:
    return lambda sizes: {"mask": torch.full((sizes[role],), value)}


@pytest.mark.parametrize(
    "change",
    [
        {"x0": per_sample("train", 0.0)},
        {"x0": per_sample("val", 1.0)},
        {"x0": lambda sizes: {"mask": torch.ones(4)}},
        {"x0": lambda sizes: {"mask": torch.ones(sizes["train"]), "more": torch.ones(1)}},
        {"x0": {"mask": torch.ones(5)}, "scopes": Scopes()},
        {"scopes": Scopes(lower="local", upper="private")},
        {"client_weights": "by_samples"},
    ],
)
def test_problem_without_a_mask_of_ones_has_no_influences(masks: Both, change: dict[str, Any]) -> None:
    """A mask has one entry per training sample, all ones; y is global and weights are equal."""
    assert is_mask(masks.problem, ("train", "val"))
    assert not is_mask(dataclasses.replace(masks.problem, **change), ("train", "val"))


def test_harmful_and_helpful_samples_are_sorted_by_change(masks: Both) -> None:
    changes = [one.change for one in masks.collected.removals or ()]
    assert changes[0] < 0 < changes[-1]
    assert [one.change for one in masks.collected.harmful(3)] == changes[:3]
    assert [one.change for one in masks.collected.helpful(3)] == changes[:-4:-1]
    assert {one.change for one in masks.collected.harmful(100)} == {change for change in changes if change < 0}
    assert {one.change for one in masks.collected.helpful(100)} == {change for change in changes if change > 0}


def test_collection_without_a_mask_has_no_influences(quadratic: Both, personal: Both) -> None:
    for some in (quadratic, personal):
        assert some.collected.removals is None
        assert not (some.collected.path / "influences.json").exists()
        assert some.collected.harmful(3) == some.collected.helpful(3) == []


# ---- records that were changed -------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Both], list[Path]]:
    def copy(some: Both) -> list[Path]:
        return [shutil.copytree(folder, tmp_path / folder.name) for folder in some.folders]

    return copy


Copied = Callable[[Both], list[Path]]


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = Record(folder).read_config()
    change(config)
    Record(folder).write_config(config)


def change_rows(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    rows = Record(folder).rows()
    for row in rows:
        change(row)
    Record(folder).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_checkpoint(folder: Path, **changes: Any) -> None:
    tensors, about = Record(folder).load()
    iteration = changes.pop("iteration", about["iteration"])
    Record(folder).save(
        {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}},
        {**about, "iteration": iteration},
    )


def test_collection_of_some_peers_names_the_missing_ones(quadratic: Both, copied: Copied, tmp_path: Path) -> None:
    _, one, _, three = copied(quadratic)
    some = collect([three, one], tmp_path / "some")
    assert (some.peers, some.missing, some.behind) == (("p1", "p3"), ("p0", "p2"), {})
    config = Record(some.path).read_config()
    assert (config["collected"], config["missing"]) == (["p1", "p3"], ["p0", "p2"])
    assert config["identity"]["data"] != Record(quadratic.collected.path).read_config()["identity"]["data"]
    seen = [Record(folder).rows()[-1]["seen"] for folder in (one, three)]
    weights, values = [row["weight"] for row in seen], [row["upper"] for row in seen]
    assert some.rows[-1]["upper_loss"] == pytest.approx(np.average(values, weights=weights), rel=1e-14)
    assert some.rows[-1]["num_peers"] == 2
    assert {name.split(".")[1] for name in read_tensors(some.path / "solution.safetensors")[1]} == {
        "client1",
        "client3",
    }
    assert some.ledger.columns["gy"].tolist() == [0, 6, 0, 6]
    assert some.ledger.edges["messages"][[0, 2]].sum() == 0 < some.ledger.edges["messages"][[1, 3]].sum()


def test_record_that_ends_earlier_prevents_a_solution(quadratic: Both, copied: Copied, tmp_path: Path) -> None:
    """Measurements after its last checkpoint belong to an outer iteration that was to be repeated."""
    folders = copied(quadratic)
    change_checkpoint(folders[3], iteration=2, ledger__rounds=torch.tensor(1), ledger__gy=torch.tensor([0, 0, 0, 4]))
    some = collect(folders, tmp_path / "all")
    assert some.behind == {"p3": 2}
    assert [row["iteration"] for row in some.rows] == [0, 2]
    assert "disagreement" not in some.rows[-1]
    assert {path.name for path in some.path.iterdir()} == {"config.json", "metrics.jsonl", "ledger.json"}
    assert some.ledger.rounds == quadratic.result.ledger["rounds"]
    assert some.ledger.totals()["gy"] == quadratic.result.ledger["gy"] - 2


def test_last_measurement_may_be_older_than_the_solution(quadratic: Both, copied: Copied, tmp_path: Path) -> None:
    folders = copied(quadratic)
    for folder in folders:
        Record(folder).cut_after(2)
    some = collect(folders, tmp_path / "all")
    assert [row["iteration"] for row in some.rows] == [0, 2]
    assert "disagreement" not in some.rows[-1]
    assert (some.path / "solution.safetensors").read_bytes() == (
        quadratic.collected.path / "solution.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("elsewhere", [(1,), (0, 1, 2, 3)])
def test_measurements_of_different_groups_are_skipped(
    quadratic: Both, copied: Copied, tmp_path: Path, elsewhere: tuple[int, ...]
) -> None:
    folders = copied(quadratic)
    for number in elsewhere:
        change_rows(folders[number], lambda row: row.update(members=3) if row["iteration"] == 2 else None)
    assert [row["iteration"] for row in collect(folders, tmp_path / "all").rows] == [0, 3]
    assert [row["iteration"] for row in collect(folders[1:], tmp_path / "three").rows] == (
        [0, 3] if elsewhere == (1,) else [0, 2, 3]
    )


def test_solution_file_of_a_peer_is_ignored(masks: Both, copied: Copied, tmp_path: Path) -> None:
    folders = copied(masks)
    for name in ("solution.safetensors", "hypergradient.safetensors"):
        shutil.copy(folders[0] / name, folders[1] / name)
        os.remove(folders[2] / name)
    some = collect(folders, tmp_path / "all")
    for name in ("solution.safetensors", "hypergradient.safetensors", "influences.json"):
        assert (some.path / name).read_bytes() == (masks.collected.path / name).read_bytes()


@pytest.mark.parametrize(("iteration", "moved", "there"), [(1, True, True), (2, False, True), (2, True, False)])
def test_influences_need_a_mask_of_ones_at_the_estimate(
    masks: Both, copied: Copied, tmp_path: Path, iteration: int, moved: bool, there: bool
) -> None:
    """The first estimate is always at a mask of ones; later ones only if x has not moved."""
    folders = copied(masks)
    for folder in folders:
        change_checkpoint(folder, iteration=iteration)
    if moved:
        change_checkpoint(folders[1], state__x=Record(folders[1]).load()[0]["state.x"] - 0.1)
    some = collect(folders, tmp_path / "all")
    assert (some.removals is not None) == (some.path / "influences.json").exists() == there
    assert (some.path / "hypergradient.safetensors").exists()


def test_peer_without_an_estimate_prevents_a_hypergradient(masks: Both, copied: Copied, tmp_path: Path) -> None:
    folders = copied(masks)
    change_checkpoint(folders[0], state__h=torch.zeros_like(Record(folders[0]).load()[0]["state.h"]))
    some = collect(folders, tmp_path / "all")
    assert some.removals is None
    assert {path.name for path in some.path.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "ledger.json",
        "solution.safetensors",
    }


def test_figures_that_one_peer_lacks_are_omitted(personal: Both, copied: Copied, tmp_path: Path) -> None:
    folders = copied(personal)
    change_config(folders[2], lambda config: config["shapes"]["fields"].pop("test"))
    change_rows(folders[2], lambda row: [row["seen"].pop(name) for name in ("test_right", "test_samples")])
    rows = collect(folders, tmp_path / "all").rows
    assert rows == [
        {name: value for name, value in row.items() if not name.startswith("test_")} for row in personal.collected.rows
    ]
    assert "stop_accuracy" in rows[-1]


# ---- refusals ------------------------------------------------------------------------------------


def _other_plan(folders: list[Path]) -> list[Path]:
    change_config(folders[1], lambda config: config["plan"].update(num_iterations=30))
    return folders


def _other_seed(folders: list[Path]) -> list[Path]:
    change_config(folders[1], lambda config: config["identity"].update(seed=6))
    return folders


def _other_peers(folders: list[Path]) -> list[Path]:
    change_config(folders[1], lambda config: config.update(peers=["p0", "p1", "p2", "q3"]))
    return folders


def _twice(folders: list[Path]) -> list[Path]:
    return [*folders, shutil.copytree(folders[1], folders[1].with_name("again"))]


def _simulated(folders: list[Path]) -> list[Path]:
    change_config(folders[1], lambda config: config.update(engine="simulation"))
    return folders


def _collected(folders: list[Path]) -> list[Path]:
    collect(folders, folders[0].with_name("before"))
    return [folders[0], folders[0].with_name("before")]


def _nameless(folders: list[Path]) -> list[Path]:
    change_config(folders[1], lambda config: config.pop("peer"))
    return folders


def _misnamed(folders: list[Path]) -> list[Path]:
    change_config(folders[1], lambda config: config.update(peer="p2"))
    return folders


def _no_checkpoint(folders: list[Path]) -> list[Path]:
    Record(folders[1]).checkpoint.unlink()
    return folders


def _never_together(folders: list[Path]) -> list[Path]:
    Record(folders[0]).cut_after(0)
    change_rows(folders[1], lambda row: row.update(iteration=max(2, row["iteration"])))
    return folders


def _unseen(folders: list[Path]) -> list[Path]:
    change_rows(folders[1], lambda row: row["seen"].pop("upper"))
    return folders


def _other_bill(folders: list[Path]) -> list[Path]:
    change_checkpoint(folders[1], ledger__gy=torch.zeros(3, dtype=torch.int64))
    return folders


def _other_state(folders: list[Path]) -> list[Path]:
    change_checkpoint(folders[1], state__more=torch.zeros(1, 3))
    return folders


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda folders: [], PlanError, "there are no records to collect"),
        (lambda folders: [*folders, folders[0].with_name("nowhere")], CheckpointError, "there is no run in .*nowhere"),
        (_simulated, CheckpointError, "p1 holds a run of the engine 'simulation', not the record of one peer"),
        (_collected, CheckpointError, "before is itself a collected record of several peers"),
        (_nameless, CheckpointError, "p1/config.json does not say whose record it is"),
        (_misnamed, CheckpointError, "p1/config.json does not say whose record it is"),
        (_no_checkpoint, CheckpointError, "there is no checkpoint in .*p1"),
        (_other_plan, PlanError, "p1 is of another run than .*p0: its plan's num_iterations is 30, there 3;"),
        (_other_seed, PlanError, "p1 is of another run than .*p0: its seed is 6, there 5;"),
        (_other_peers, PlanError, "its list of peers is .*'q3'.*, there .*'p3'"),
        (_twice, PlanError, "p1 and .*again are both records of the peer p1"),
        (
            _never_together,
            CheckpointError,
            r"no outer iteration that all these peers have measured together \(p0 0 to 0, p1 2 to 3",
        ),
        (_unseen, CheckpointError, r"measurements of outer iteration 0 do not fit together \(KeyError\('upper'\)\)"),
        (_other_bill, CheckpointError, "the ledger in .*p1/checkpoint.safetensors is not one between 4 peers"),
        (_other_state, CheckpointError, "p1 holds .*, more, .*, the algorithm has x, z, w"),
    ],
)
def test_refused_collection_writes_nothing(
    quadratic: Both,
    copied: Copied,
    tmp_path: Path,
    change: Callable[[list[Path]], list[Path]],
    kind: type[FedBilevelError],
    says: str,
) -> None:
    folders = change(copied(quadratic))
    with pytest.raises(kind, match=says) as caught:
        collect(folders, tmp_path / "all")
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "all").exists()


def test_folder_of_a_run_is_not_overwritten(quadratic: Both, copied: Copied, tmp_path: Path) -> None:
    folders = copied(quadratic)
    before = {path.name: path.read_bytes() for path in folders[0].iterdir()}
    for out in (folders[0], quadratic.collected.path):
        with pytest.raises(CheckpointError, match=f"{out} already holds a run: name another folder"):
            collect(folders, out)
    assert {path.name: path.read_bytes() for path in folders[0].iterdir()} == before


# ---- use of the collected record -----------------------------------------------------------------


def test_collected_record_fits_the_result_table(each: Both) -> None:
    last = Record(each.collected.path).rows()[-1]
    assert {name for name in figures_of(last) if not isinstance(last[name], float)} == set()
    headline = each.collected.plan.built_task().headline
    screen = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    screen.print(tables.outcomes("trial", {"hgp": last}, headline))
    screen.file.close()
    text = screen.export_text()
    assert f" {last['rounds']} " in text
    assert tables.figure(last["upper_loss"]) in text or "upper_loss" not in headline


def test_collected_record_cannot_be_resumed(quadratic: Both) -> None:
    ours = quadratic.collected.plan
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint in .*all: give the folder of a run that wrote one"
    ):
        solve(
            quadratic.problem,
            quadratic.clients,
            ours.built_algorithm(),
            residuals=False,
            record=quadratic.collected.path,
            resume=True,
            num_iterations=5,
            **ours.keywords(),
        )
