"""Attacks of one site on the server, in one process: the site is named, and its statements do not
count for more than they should."""

import re

import pytest
import torch

from fedbilevel.cli.federation import line
from fedbilevel.errors import FedBilevelError, PlanError, RecoveryWarning
from fedbilevel.sites.outliers import OutlierWatch
from support.sites.loopback import Loopback

pytestmark = pytest.mark.usefixtures("short_waits")


def at(kind, change, who="site-1"):
    """A site that changes the header and the arrays of its answers to messages of one kind."""
    return lambda name, header: change if name == who and header["kind"] == kind else None


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "counted"), [(2, [4, 40]), (3, [4, 50, 6])])
def test_attack_by_a_false_weight_is_cut_by_what_the_others_say_and_told(tmp_path, num, counted):
    federation, said = Loopback(tmp_path, num), []
    ours = federation.plan(
        {"name": "fedavg"}, {"name": "quadratic", "num_clients": num, "client_weights": "by_samples"}
    )
    lie = at("join", lambda header, arrays: ({**header, "weights": [399]}, arrays))
    assert federation.serve(ours, lie, said.append) == "finished"
    assert federation.record.load()[0]["sites.weight"].tolist() == counted
    stated = {"site-0": [4], "site-1": [399], "site-2": [6]}
    assert said[0]["weights"] == {name: stated[name] for name in federation.names}
    assert set(said[0]["capped"]) == {"site-1"}
    assert "weight of site-0 4, weight of site-1 399" in line(said[0])
    assert not any("weights" in later or later["capped"] for later in said[1:])


def test_equal_weights_are_not_reported(tmp_path):
    federation, said = Loopback(tmp_path), []
    federation.serve(federation.plan({"name": "fedavg"}), say=said.append)
    assert not any("weights" in one for one in said)


# ---- outliers ------------------------------------------------------------------------------------

CLEANING = {"name": "data_cleaning", "num_clients": 3}


def cleaning(federation, **more):
    return federation.plan(
        {"name": "fbo_aggitd"},
        CLEANING,
        num_classes=10,
        measure_every=100,
        options={"seed": 1, "dtype": "float32"},
        **more,
    )


def pushing(header, arrays):
    """The lower variable grows within the limit on norms, and everything that could reveal the site
    is small."""
    names, out = [name for name, count in header["order"].items() for _ in range(count)], []
    for name, array in zip(names, arrays, strict=True):
        if name == "y":
            push = torch.zeros_like(array)
            push[0, 640:], push[0, 640], push[0, 642] = -1.0, 6.0, -6.0
            array = array + (2.5 * array.norm() + 0.05) * push / push.norm()
        out.append(array * 1e-3 if name in ("z", "q") else array)
    return header, out


@pytest.mark.slow
def test_attack_on_an_honest_site_by_small_answers_does_not_have_it_left_out(tmp_path):
    federation = Loopback(tmp_path)
    with (
        pytest.warns(RecoveryWarning, match="the run failed: upper_loss rose to"),
        pytest.raises(FedBilevelError, match="site-1"),
    ):
        federation.serve(cleaning(federation, num_iterations=8, exclude_outliers=True), at("phase", pushing))
    diary = federation.diary()
    assert all(line["missing"] == {} for line in diary)
    assert all("site-1" in line["flagged"] for line in diary[1:])
    assert "has a change of y of norm" in diary[1]["flagged"]["site-1"]


@pytest.mark.slow
def test_attack_by_a_slow_drift_is_laid_to_the_site_that_drifts(tmp_path):
    federation = Loopback(tmp_path)
    more = at("phase", lambda header, arrays: (header, [4 * array for array in arrays]))
    with pytest.raises(
        FedBilevelError, match=r"^the answer of site-1 to lower_steps in outer iteration 1 has a change of y of norm"
    ) as caught:
        federation.serve(
            cleaning(federation, num_iterations=40),
            lambda name, header: more(name, header) if header.get("phase") == "lower_steps" else None,
        )
    assert re.search(r"; site-1 was flagged in (\d+) of \1 outer iterations, last in \1\.$", str(caught.value))
    assert not any(honest in str(caught.value) for honest in ("site-0", "site-2", "step sizes"))


def test_flags_before_a_resumption_are_remembered(tmp_path):
    federation = Loopback(tmp_path)
    ours = federation.plan({"name": "fedbio"}, quorum=3)
    odd = at("phase", lambda header, arrays: (header, [-10 * array for array in arrays]))
    federation.serve(
        {**ours, "num_iterations": 2}, lambda name, header: odd(name, header) if header.get("iteration") == 1 else None
    )
    with pytest.raises(
        FedBilevelError, match=r"missing: site-2 .*; site-1 was flagged in 1 of 4 outer iterations, last in 1\.$"
    ):
        federation.serve(
            ours, lambda name, header: "nan" if name == "site-2" and header.get("iteration") == 4 else None
        )


def test_four_sites_leave_out_an_answer_that_three_would_only_flag(tmp_path):
    logs = [1.0, 1.0, 1.0, 8.0]
    for num, sure in ((3, False), (4, True)):
        rows = {site: torch.full((1, 1), value) for site, value in enumerate(logs[-num:])}
        [(site, flag)] = OutlierWatch().compare("steps", 1, {"z": rows}, {}).items()
        assert (site, flag.sure) == (num - 1, sure)
    rows = {site: torch.full((1, 1), value) for site, value in enumerate(logs[1:])}
    assert OutlierWatch().compare("steps", 1, {"z": rows, "q": rows}, {})[2].sure  # two sequences at once


def test_answers_near_zero_are_not_flagged_after_larger_ones():
    watch, rows = OutlierWatch(), {site: torch.full((1, 2), value) for site, value in enumerate((1.0, 1.0, 50.0))}
    assert set(watch.compare("steps", 1, {"z": rows}, {})) == {2}
    assert watch.compare("steps", 2, {"z": {site: row * 1e-5 for site, row in rows.items()}}, {}) == {}
    assert set(watch.compare("steps", 3, {"z": {**rows, 2: rows[2] * 1e9}}, {})) == {2}


@pytest.mark.parametrize("factor", [1e6, -10.0, 1e38])
def test_attack_by_scaled_answers_to_three_sites_is_left_out(tmp_path, factor):
    federation = Loopback(tmp_path)
    task = {"name": "hyper_representation", "num_clients": 3, "num_hidden": 20}
    ours = federation.plan(
        {"name": "fedbio", "num_local_steps": 2},
        task,
        num_classes=10,
        exclude_outliers=True,
        quorum=2,
        num_iterations=3,
        options={"batch_size": 16},
    )
    scaled = at("phase", lambda header, arrays: (header, [array * factor for array in arrays]))
    assert (
        federation.serve(ours, lambda name, header: scaled(name, header) if header.get("iteration") == 2 else None)
        == "finished"
    )
    assert [set(one["missing"]) for one in federation.diary()] == [set(), {"site-1"}, set()]


# ---- measurements --------------------------------------------------------------------------------


def test_attack_by_a_measurement_that_is_not_finite_is_named_and_does_not_count(tmp_path):
    federation = Loopback(tmp_path)
    spoil = at(
        "measure",
        lambda header, arrays: (header, [torch.cat([arrays[0][:, :1] * float("nan"), arrays[0][:, 1:]], dim=1)]),
    )
    ours = federation.plan({"name": "fedavg"}, quorum=2)
    assert (
        federation.serve(ours, lambda name, header: spoil(name, header) if header.get("iteration") == 2 else None)
        == "finished"
    )
    assert "it measured a value that is not finite, while others did not" in federation.diary()[1]["missing"]["site-1"]
    assert all(torch.isfinite(torch.tensor(row["upper_loss"])) for row in federation.record.rows())


def test_measurements_of_a_diverged_model_are_reported_unchanged(tmp_path):
    federation = Loopback(tmp_path)
    spoil = lambda header, arrays: (header, [torch.cat([arrays[0][:, :1] * float("inf"), arrays[0][:, 1:]], dim=1)])
    ours = federation.plan({"name": "fedavg"})
    with (
        pytest.warns(RecoveryWarning, match="the run failed: upper_loss is not finite"),
        pytest.raises(FedBilevelError, match=r"^upper_loss is not finite: use shorter steps"),  # names no site
    ):
        federation.serve(ours, lambda name, header: spoil if header["kind"] == "measure" else None)
    assert all(one["missing"] == one["flagged"] == {} for one in federation.diary())
    assert not any(torch.isfinite(torch.tensor(row["upper_loss"])) for row in federation.record.rows())


boast = at(
    "measure",
    lambda header, arrays: (header, [torch.cat([torch.full_like(arrays[0][:, :2], 1e300), arrays[0][:, 2:]], dim=1)]),
)


@pytest.mark.filterwarnings("error::fedbilevel.errors.RecoveryWarning")
@pytest.mark.parametrize(("num_sites", "when"), [(3, [2]), (3, [0, 2, 4]), (2, [2]), (2, [4])])
def test_attack_by_a_huge_measured_loss_is_flagged_and_does_not_make_the_run_go_back(tmp_path, num_sites, when):
    states = []
    for place, fault in (("attacked", boast), ("honest", lambda name, header: None)):
        federation = Loopback(tmp_path / place, num_sites)
        ours = federation.plan({"name": "fedavg"}, quorum=2)
        chosen = lambda name, header, fault=fault: fault(name, header) if header.get("iteration") in when else None
        assert federation.serve(ours, chosen) == "finished"
        states.append(federation.record.load())
        if place == "attacked":
            flagged = [one["flagged"] for one in federation.diary()]
            who = {"site-1"} if num_sites == 3 else {"site-0", "site-1"}
            # the first line of the diary includes the measurement before it
            assert [set(one) for one in flagged] == [
                who if {at, at - (at == 1)} & {*when} else set() for at in range(1, 5)
            ]
            assert "upper loss" in flagged[max(when) - 1]["site-1"]
            assert "1e+300" in flagged[max(when) - 1]["site-1"]
            assert all(one["missing"] == {} for one in federation.diary())
            assert any(row["upper_loss"] > 1e299 for row in federation.record.rows())  # told as it was measured
    (attacked, about), (honest, _) = states
    assert (about["recovery"]["times"], about["recovery"]["factor"]) == (0, 1.0)
    assert all(torch.equal(attacked[name], value) for name, value in honest.items() if name.startswith("state."))


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_run_is_judged_by_the_other_sites_while_one_measures_a_huge_loss(tmp_path):
    """The huge loss hides a divergence from the mean, not from the judgement."""
    found = []
    for place, fault in (("attacked", boast), ("honest", lambda name, header: None)):
        federation = Loopback(tmp_path / place)
        settings = {"name": "fedbio", "lr_upper": 0.1, "lr_lower": 1.5, "lr_system": 0.3}
        federation.serve(federation.plan(settings, num_iterations=20, measure_every=1), fault)
        found.append(federation.record.load()[1]["recovery"]["times"])
    assert min(found) > 0


# ---- introductions -------------------------------------------------------------------------------


def more_data(header, arrays):
    fields = header["shapes"]["fields"]
    return {
        **header,
        "shapes": {**header["shapes"], "fields": {**fields, "extra": {"q": [[10**12], "float32"]}}},
    }, arrays


@pytest.mark.parametrize(
    ("num", "sentence"),
    [(3, "^site-0 is not like the other sites of the run trial"), (2, "^site-0 and site-1 do not agree in the run")],
)
def test_attack_by_false_shapes_of_the_first_site_does_not_name_another(tmp_path, num, sentence):
    federation = Loopback(tmp_path, num)
    with pytest.raises(PlanError, match=sentence):
        federation.serve(federation.plan({"name": "fedavg"}), at("join", more_data, "site-0"))


def test_a_site_that_comes_back_with_other_data_is_named(tmp_path):
    federation = Loopback(tmp_path)

    def fault(name, header):
        if name == "site-1" and header["kind"] == "phase" and header["iteration"] == 2:
            return "silent"
        return (
            more_data
            if name == "site-1" and header["kind"] == "join" and federation.record.checkpoint.exists()
            else None
        )

    assert federation.serve(federation.plan({"name": "fedavg"}, quorum=2), fault) == "finished"
    assert "site-1 is not like the other sites of the run trial: " in federation.diary()[-1]["missing"]["site-1"]


def test_attack_by_malformed_shapes_is_named_in_few_words(tmp_path):
    federation = Loopback(tmp_path)
    long = at(
        "join",
        lambda header, arrays: (
            {**header, "shapes": {"fields": {"train": {"a" * 5000: [[-1], "x"]}}, "num_classes": None}},
            arrays,
        ),
    )
    with pytest.raises(PlanError, match=r"^site-1 did not describe its data properly: the fields are ") as caught:
        federation.serve(federation.plan({"name": "fedavg"}), long)
    assert len(str(caught.value)) < 400


# ---- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["phase", "measure"])
def test_attack_by_an_answer_that_is_too_long_is_refused_by_name(tmp_path, kind):
    federation = Loopback(tmp_path)
    long = at(kind, lambda header, arrays: ({**header, "padding": "x" * 2_000_000}, arrays))
    ours = federation.plan({"name": "fedavg"}, quorum=2)
    assert (
        federation.serve(ours, lambda name, header: long(name, header) if header.get("iteration") == 2 else None)
        == "finished"
    )
    assert re.search(
        r"its answer has 2\d{6} bytes, expected at most 1\d{6}", federation.diary()[1]["missing"]["site-1"]
    )
