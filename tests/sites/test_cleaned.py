"""What a detector leaves between sites: each site has the files that the simulator writes for its client,
and the server has a verdict from sums."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.errors import WireError
from fedbilevel.sites.cleaned import labels_of
from fedbilevel.sites.plan import plan_of
from fedbilevel.sites.policy import read_settings
from fedbilevel.sites.preview import preview
from fedbilevel.sites.telling import plan_rows, rows
from fedbilevel.sites.view import Follower, look
from support.sites.loopback import Loopback

pytestmark = pytest.mark.usefixtures("short_waits")

TASK = {"name": "data_cleaning", "num_clients": 3, "num_clean": 40, "test_share": 0.5, "learn": "labels", "noise": 0.3}
EM = {"name": "label_em", "num_passes": 3, "num_refinements": 1, "num_fit_rounds": 5, "num_fold_rounds": 3}


def plan_in(federation, algorithm, **more):
    return federation.plan(algorithm, TASK, num_classes=10, num_iterations=None, measure_every=50, **more)


def of_simulator(plan, names, dtype=torch.float64):
    """The same cleaning by `clean_labels`."""
    ours = plan_of(plan)
    clients = ours.built_task().build().clients
    settings = {name: value for name, value in plan["algorithm"].items() if name != "name"}
    return fb.clean_labels(
        clients, detector=plan["algorithm"]["name"], features="given", num_classes=10, seed=5, dtype=dtype,
        names=names, **settings,
    )  # fmt: skip


def run_of(folder, name):
    return folder / name / "runs" / "trial"


@pytest.mark.parametrize(
    "algorithm",
    [EM, {**EM, "transition": "own"}, {"name": "confident", "num_fit_rounds": 5}],
    ids=["shared", "own", "confident"],
)
def test_sites_have_the_files_of_the_simulator_and_the_server_has_its_sentences(tmp_path, algorithm):
    federation, said = Loopback(tmp_path, 3), []
    plan = plan_in(federation, algorithm)
    assert federation.serve(plan, say=said.append) == "finished"
    wanted = of_simulator(plan, federation.names)
    wanted.write_csv(tmp_path / "simulated")
    for i, name in enumerate(federation.names):
        place, own = run_of(tmp_path, name), tmp_path / "simulated" / name
        found, simulated = (
            [*csv.reader(file.read_text().splitlines())] for file in (place / "suspects.csv", own.with_suffix(".csv"))
        )
        assert found == simulated
        assert sum(int(row[-1]) for row in found[1:]) == wanted.flags[i].sum() > 0
        mine, theirs = (json.loads(file.read_text()) for file in (place / "cleaning.json", own.with_suffix(".json")))
        assert mine["noise"] == theirs["noise"] == wanted.noise[name]
        np.testing.assert_allclose(mine["transition"], theirs["transition"], atol=1e-12)
        assert {**mine, "transition": 0} == {**theirs, "transition": 0}
    served = json.loads((federation.record.path / "cleaning.json").read_text())
    assert served["sentences"] == [wanted.sentence, *wanted.caveats]
    assert served["verdict"] == wanted.verdict == "unchecked"  # each site has clean samples of one class
    assert served["noise"] == pytest.approx(np.concatenate(wanted.wrong).mean(), abs=1e-9)
    np.testing.assert_allclose(served["transition"], wanted.transition, atol=1e-9)
    assert (served["num_labels"], served["num_flagged"]) == (sum(map(len, wanted.labels)), len(wanted.suspects()))
    [told] = [line["result"] for line in said if "result" in line]
    assert told == wanted.sentence


def test_nothing_about_single_samples_is_at_the_server_or_at_another_site(tmp_path):
    federation = Loopback(tmp_path, 3)
    assert federation.serve(plan_in(federation, EM)) == "finished"
    sizes = [
        len(load_file(run_of(tmp_path, name) / "solution.safetensors")["x.logit"]) // 10 for name in federation.names
    ]
    assert not [*(tmp_path / "server").rglob("*suspects*")]
    for file in federation.record.path.rglob("*.safetensors"):
        for tensor in load_file(file).values():
            assert not {*sizes, *(10 * size for size in sizes)} & {*tensor.shape}
    for file in federation.record.path.rglob("*.json"):
        assert not {*sizes} & {*lengths(json.loads(file.read_text()))}, file
    for name in federation.names:
        assert [*tmp_path.joinpath(name).rglob("suspects*")] == [run_of(tmp_path, name) / "suspects.csv"]
        [last] = [line for line in federation.left(name) if line["kind"] == "finish"]
        assert last["arrays"] == []
        assert last["bytes"] < 200
        for array in (one for line in federation.left(name) for one in line["arrays"]):
            assert not {*sizes, *(10 * size for size in sizes)} & {*array["shape"]}


def lengths(content):
    """Lengths of all lists in the content of a file."""
    inside = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return [*([len(content)] if isinstance(content, list) else []), *(n for one in inside for n in lengths(one))]


def test_the_operator_of_a_site_is_told_what_was_found(tmp_path):
    federation = Loopback(tmp_path, 3)
    plan, follower = plan_in(federation, EM), Follower(tmp_path / "site-0")
    follower.lines(look(tmp_path / "site-0"))
    assert federation.serve(plan) == "finished"
    own = json.loads((run_of(tmp_path, "site-0") / "cleaning.json").read_text())
    view = look(tmp_path / "site-0")
    said = follower.lines(view)[-1]
    assert said.startswith(f"trial: {own['num_flagged']} of {own['num_labels']} labels are flagged as wrong")
    assert f"{own['noise']:.1%} are estimated to be wrong" in said
    assert said.endswith("Nothing checked the cleaning of all sites. See suspects.csv in runs/trial.")
    assert dict(rows(view, tmp_path / "site-0"))["Labels"] == [said.removeprefix("trial: ")]


def test_the_preview_of_a_detector_counts_its_first_outer_iteration_alone(tmp_path):
    federation = Loopback(tmp_path, 3)
    plan = plan_of(plan_in(federation, EM))
    leaves = preview(plan, "site-0", read_settings(tmp_path / "site-0"))
    assert leaves["varies"] is True
    assert "total_rounds" not in leaves
    shown = dict(
        plan_rows({"plan": plan.asdict(), "run": "trial", "who": "x", "time": 0, "digest": "d", "leaves": leaves})
    )
    assert shown["Leaves"][0] == "in the first outer iteration, by phase:"
    gram = 65 * 66 // 2
    assert f"products: {gram + 2 * 650} numbers" in shown["Leaves"]
    assert not any("in all" in line for line in (*shown["How often"], *shown["How much"]))


def test_a_site_with_several_clients_writes_a_file_for_each(tmp_path):
    federation = Loopback(tmp_path, hosts=(4, 3, 3))
    plan = plan_in(federation, EM) | {"task": TASK | {"num_clients": 10, "num_clean": 20}}
    assert federation.serve(plan) == "finished"
    wanted = of_simulator(plan, [str(number) for number in range(10)])
    assert wanted.verdict == "accepted"
    wanted.write_csv(tmp_path / "simulated")
    for number in range(10):
        folder = run_of(tmp_path, f"site-{0 if number < 4 else 1 if number < 7 else 2}")
        for suffix, name in ((".csv", "suspects"), (".json", "cleaning")):
            found = folder / f"{name}.client{number}{suffix}"
            assert found.read_bytes() == (tmp_path / "simulated" / f"{number}{suffix}").read_bytes()
    served = json.loads((federation.record.path / "cleaning.json").read_text())
    assert served["sentences"] == [wanted.sentence]
    [said] = [row for heading, row in rows(look(tmp_path / "site-1"), tmp_path) if heading == "Labels"]
    assert "client 5: " in said[0]
    assert "The guard accepted the cleaning of all sites. See suspects.client4.csv, " in said[0]


def test_a_run_that_is_too_short_says_how_long_it_has_to_be(tmp_path):
    federation, said = Loopback(tmp_path, 3), []
    assert federation.serve({**plan_in(federation, EM), "num_iterations": 5}, say=said.append) == "finished"
    [told] = [line["result"] for line in said if "result" in line]
    assert told.startswith("label_em needs 10 outer iterations and the run has 5")
    assert not (run_of(tmp_path, "site-0") / "suspects.csv").exists()


def test_a_stopped_run_leaves_no_suspects_and_a_resumed_one_does(tmp_path):
    federation = Loopback(tmp_path, 3)
    plan = plan_in(federation, EM)

    def stop(line):
        federation.transport.stopped = line.get("iteration") == 4

    assert federation.serve(plan, say=stop) == "stopped"
    assert not (run_of(tmp_path, "site-0") / "suspects.csv").exists()
    assert not (federation.record.path / "cleaning.json").exists()
    assert federation.serve(plan) == "finished"
    assert (run_of(tmp_path, "site-0") / "suspects.csv").exists()
    assert (federation.record.path / "cleaning.json").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"verdict": "sure"},
        {"verdict": ["accepted"]},
        {"transition": torch.full((81,), 1 / 9)},
        {"transition": torch.full((100,), -0.1)},
        {"transition": torch.full((100,), 1e6)},
        {"transition": torch.full((100,), torch.nan)},
        {"transition": 1.0},
        {"more": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_last_message_that_is_no_outcome_of_a_detector_is_refused(changed):
    logit, label = torch.zeros(40), torch.tensor([0, 1, 2, 3])
    given = {"verdict": "accepted", "transition": torch.full((100,), 0.1)}
    whole = {"reached": lambda iteration: True}
    assert len(labels_of(LabelEM(), given, ["north"], [logit], [label], **whole)) == 1
    with pytest.raises(WireError, match="expected the transition matrix of 10 classes"):
        labels_of(LabelEM(), given | changed, ["north"], [logit], [label], **whole)
    with pytest.raises(WireError, match="the verdict of a detector"):
        labels_of(FedAvg(), given, ["north"], [logit], [label], **whole)


def test_a_verdict_before_the_guard_decides_is_refused():
    logit, label = torch.zeros(40), torch.tensor([0, 1, 2, 3])
    given = {"verdict": "accepted", "transition": torch.full((100,), 0.1)}
    last = LabelEM().num_iterations()
    found = labels_of(LabelEM(), given, ["north"], [logit], [label], reached=lambda iteration: iteration <= last)
    assert len(found) == 1
    with pytest.raises(WireError, match=f"expected none before outer iteration {last}"):
        labels_of(LabelEM(), given, ["north"], [logit], [label], reached=lambda iteration: iteration < last)
