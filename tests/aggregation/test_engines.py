"""The layer on every engine: the simulator's trajectory, bit for bit, and its ledger."""

import json

import pytest
import torch

from fedbilevel import discovery
from fedbilevel.errors import FedBilevelError, QuorumError, SettingError
from fedbilevel.sites.plan import plan_of as site_plan
from fedbilevel.sites.policy import read_settings
from fedbilevel.sites.preview import preview
from support.sites.loopback import Loopback, differences, simulated

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.slow]
LAYERS = {
    "sum": {},
    "clip": {"clip": 0.5, "fixed_point": 40},
    "int8": {"clip": 2.0, "compress": "int8"},
    "topk": {"compress": "topk:0.3", "sequences": {"x": {"compress": "none"}}},
    "randk": {"compress": "randk:0.5"},
    "powersgd": {"compress": "powersgd:1"},
    "trimmed": {"robust": "trimmed:0.3"},
    "median": {"robust": "median", "compress": "int8"},
    "geometric": {"robust": "geometric"},
}


def plan_of(federation, layer, algorithm="fedbio", **more):
    options = {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop", **more, "aggregation": layer}
    task = {"name": "quadratic", "num_clients": sum(federation.clients.values()) or len(federation.names)}
    task["client_weights"] = "by_samples"
    return federation.plan({"name": algorithm}, task, options=options)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("hosts", [(), (2, 1)], ids=["one", "several"])
def test_sites_have_the_trajectory_and_the_ledger_of_the_simulator(tmp_path, layer, hosts):
    federation = Loopback(tmp_path / "sites", hosts=hosts)
    plan = plan_of(federation, LAYERS[layer], dtype="float32" if hosts else "float64", fraction=0.67)
    assert federation.serve(plan) == "finished"
    tensors = federation.record.load()[0]
    assert {*differences(tensors, simulated(plan, tmp_path / "one")[1]).values()} == {0.0}


SERVER = sorted(name for name, kind in discovery.algorithms().items() if not hasattr(kind, "uses"))


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize("name", SERVER)
def test_every_algorithm_runs_through_the_layer_at_sites(tmp_path, name):
    federation = Loopback(tmp_path / "sites")
    task = {"name": "quadratic", "num_clients": 3}
    refused = discovery.algorithm(name).refuses
    task |= {"lower": "local"} if "global" in refused else {}
    task |= {"upper": "private"} if "shared" in refused else {}
    plan = plan_of(federation, {"clip": 1.0, "compress": "topk:0.5"}, name)
    plan |= {"task": {**task, "client_weights": "by_samples"}, "num_iterations": 2}
    assert federation.serve(plan) == "finished"
    tensors = federation.record.load()[0]
    assert {*differences(tensors, simulated(plan, tmp_path / "one")[1]).values()} == {0.0}


def test_a_site_that_is_lost_and_returns_goes_on_with_what_it_had_left(tmp_path):
    """Its answer of outer iteration 3 is lost: what it had left then is that of iteration 2."""

    def lost(name, head):
        return "deaf" if name == "site-1" and head.get("iteration") == 3 and head["kind"] == "phase" else None

    federation = Loopback(tmp_path / "sites")
    plan = {**plan_of(federation, {"compress": "topk:0.3"}), "num_iterations": 5, "quorum": 2}
    assert federation.serve(plan, lost) == "finished"
    drops = lambda iteration, call: {1} if iteration == 3 else ()
    tensors = federation.record.load()[0]
    wanted = simulated(plan, tmp_path / "one", drops=drops)[1]
    apart = differences(tensors, wanted)
    assert {name: far for name, far in apart.items() if name.startswith("state.")} == dict.fromkeys(
        ("state.x", "state.y", "state.u"), 0.0
    )


def test_a_run_between_sites_resumes_with_what_they_had_left(tmp_path):
    federation = Loopback(tmp_path / "sites")
    plan = {**plan_of(federation, {"compress": "topk:0.3", "clip": 1.0}), "num_iterations": 5}
    silent = lambda name, head: "silent" if head.get("iteration") == 4 else None
    with pytest.raises(QuorumError):
        federation.serve({**plan, "patience": 1e-9}, silent)
    for name in federation.names:
        federation.restart(name)
    assert federation.serve(plan) == "finished"
    tensors = federation.record.load()[0]
    apart = differences(tensors, simulated(plan, tmp_path / "one")[1])
    assert {far for name, far in apart.items() if name.startswith("state.")} == {0.0}


def test_rows_leave_a_site_in_their_short_form(tmp_path):
    federation = Loopback(tmp_path / "sites")
    plan = plan_of(federation, {"clip": 2.0, "compress": "int8"})
    assert federation.serve(plan) == "finished"
    sent = [one for line in federation.left("site-0") if line["kind"] == "phase" for one in line["arrays"]]
    assert {one["dtype"] for one in sent} == {"int8", "float64"}
    assert all(one["shape"] == [1, 1] for one in sent if one["dtype"] == "float64")


def test_an_operator_sees_the_bytes_that_would_leave(tmp_path):
    """Eight bytes for the largest entry of x, y and u, and one for each of their 16 entries."""
    federation = Loopback(tmp_path / "sites", 5)
    plan = federation.plan({"name": "fedbio"}, num_iterations=4)
    plan["options"] = {**plan["options"], "aggregation": {"compress": "int8", "robust": "krum:1"}}
    found = preview(site_plan(plan), "site-0", read_settings(tmp_path / "sites" / "site-0"))
    assert found["total_bytes"] == 4 * (3 * 8 + 16)


def changed(how):
    """A fault: site-1 changes its first answer to a phase."""

    def fault(name, head):
        return how if name == "site-1" and head["kind"] == "phase" and head.get("iteration") == 2 else None

    return fault


def wrong_form(header, arrays):
    header["results"]["y"] = {"form": "rows", "width": 6}
    return header, arrays


def no_form(header, arrays):
    header["results"]["y"] = "rows"
    return header, arrays


def wrong_width(header, arrays):
    header["results"]["y"] = {"form": "int8", "width": 7}
    return header, arrays


def wrong_type(header, arrays):
    return header, [array.to(torch.int32) if array.dtype == torch.int8 else array for array in arrays]


def too_large(header, arrays):
    return header, [array * 1e9 if array.is_floating_point() else array for array in arrays]


def too_long(header, arrays):
    return header, [torch.ones_like(array) for array in arrays]


def outside(header, arrays):
    return header, [array + 100 if array.dtype == torch.int32 else array for array in arrays]


@pytest.mark.parametrize(
    ("layer", "how", "text"),
    [
        ({"compress": "int8"}, wrong_form, "in the form 'rows', expected int8"),
        ({"compress": "int8"}, no_form, "in a form that was not requested"),
        ({"compress": "int8"}, wrong_width, "with 7 entries, expected 6"),
        ({"compress": "int8"}, wrong_type, "with arrays of other lengths or types than int8 has"),
        ({"compress": "int8"}, too_large, "with an entry above the agreed bound"),
        ({"compress": "topk:0.5"}, outside, "with entries outside its length"),
        ({"clip": 0.9}, too_long, "with a norm above the agreed 0.9"),
    ],
)
def test_answers_that_break_the_agreement_are_left_out(tmp_path, layer, how, text):
    federation = Loopback(tmp_path / "sites")
    plan = {**plan_of(federation, layer), "quorum": 2}
    assert federation.serve(plan, changed(how)) == "finished"
    said = json.dumps([line["missing"] for line in federation.diary()])
    assert text in said


def test_a_row_that_does_not_fit_is_refused_by_the_site(tmp_path):
    federation = Loopback(tmp_path / "sites")
    with pytest.raises(FedBilevelError, match=r"above 9\.53674e-07, the bound of a row that was agreed before"):
        federation.serve(plan_of(federation, {"bound": 9e-7}))


def test_a_plan_with_settings_that_exclude_each_other_is_refused(tmp_path):
    federation = Loopback(tmp_path / "sites")
    with pytest.raises(SettingError, match="a robust mean with an algorithm that reads single rows"):
        federation.serve(plan_of(federation, {"robust": "median"}, "clustered_fl"))
