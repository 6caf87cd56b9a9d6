"""A plan of a run between sites: filled in, checked, and never with a path or an unknown word."""

import json

import pytest

from fedbilevel import discovery
from fedbilevel.errors import FedBilevelError, PlanError, UnknownNameError
from fedbilevel.sites.plan import plan_of, read_plan
from fedbilevel.tasks.quadratic import Quadratic

GOOD = {"name": "trial", "sites": ["a", "b", "c"], "task": {"name": "quadratic"}, "algorithm": {"name": "fedbio"}}


def test_omitted_keys_are_filled_in_from_the_task():
    plan = plan_of(GOOD)
    suggested = Quadratic.suggestions("fedbio")
    assert plan.num_iterations == Quadratic.iterations("fedbio")
    assert {name: plan.algorithm[name] for name in suggested} == suggested
    assert (plan.quorum, plan.deadline, plan.patience) == (2, 60.0, 30.0)
    assert plan_of({**GOOD, "algorithm": {"name": "fedbio", "lr_upper": 0.5}}).algorithm["lr_upper"] == 0.5


def test_a_plan_that_was_sent_is_the_same_plan():
    plan = plan_of(
        {**GOOD, "quorum": 3, "options": {"seed": 4, "batch_size": {"train": 3, "val": "all"}}, "num_classes": 4}
    )
    assert plan_of(json.loads(json.dumps(plan.asdict()))) == plan


@pytest.mark.parametrize("task", discovery.tasks())
def test_a_plan_of_any_task_can_be_sent(task):
    plan = plan_of({**GOOD, "task": {"name": task}})
    assert plan_of(json.loads(json.dumps(plan.asdict()))) == plan


def test_all_sites_of_the_federation_unless_some_are_named():
    assert plan_of({**GOOD, "sites": None}, ["x", "y"]).sites == ("x", "y")
    assert plan_of({**GOOD, "sites": ["y"]}, ["x", "y"]).sites == ("y",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quorun": 2}, "Did you mean 'quorum'"),
        ({"name": "a/b"}, "it becomes the name of a folder"),
        ({"name": ".."}, "it becomes the name of a folder"),
        ({"task": {"name": "quadratics"}}, "Did you mean 'quadratic'"),
        ({"task": {}}, "the table task of the plan has no name"),
        ({"task": {"name": "quadratic", "dim_uper": 3}}, "Did you mean 'dim_upper'"),
        ({"task": {"name": "data_cleaning", "data_dir": "/secret"}}, "each participant chooses where its data are"),
        ({"algorithm": {"name": "hgp"}}, "hgp runs between peers without a server"),
        ({"algorithm": {"name": "fedbio", "lr_upper": -1}}, "lr_upper is -1"),
        ({"algorithm": {"name": "clustered_fl"}, "options": {"fraction": 0.5}}, None),
        ({"options": {"device": "cuda"}}, "the plan sets device"),
        ({"options": {"fraction": 2.0}}, "fraction is 2.0"),
        ({"options": {"sed": 3}}, "Did you mean 'seed'"),
        ({"options": {"sampling": "epoch"}}, "sampling of the plan is 'epoch'"),
        ({"options": {"strategy": "fast"}}, "strategy of the plan is 'fast'"),
        ({"options": {"schedule_power": -1.0}}, "power"),
        (
            {"algorithm": {"name": "fedbio", "num_local_steps": [1, 2]}},
            "num_local_steps of the plan has 2 numbers for 3 clients",
        ),
        ({"sites": []}, "expected at least one, each once"),
        ({"sites": ["a", "a"]}, "expected at least one, each once"),
        ({"sites": ["a", "../b"]}, "a site is called '../b'"),
        ({"sites": ["a", "nobody"]}, "There is no site of this federation named 'nobody'"),
        ({"quorum": 4}, "the quorum is 4, but there are 3 sites"),
        ({"quorum": 0}, "quorum of the plan is 0"),
        ({"deadline": -1.0}, "deadline is -1.0, expected seconds above 0"),
        ({"patience": float("inf")}, "patience is inf"),
        ({"approval_wait": 0.0}, "approval_wait is 0.0, expected seconds above 0"),
        ({"max_weight": 0}, "max_weight of the plan is 0"),
        ({"exclude_outliers": 1}, "exclude_outliers of the plan is 1, expected true or false"),
        ({"clients": {"a": 0}}, "clients.a of the plan is 0, expected a whole number, at least 1"),
        ({"clients": {"bb": 2}}, "There is no site of this plan named 'bb'. Did you mean 'b'"),
        ({"num_iterations": 0}, "num_iterations of the plan is 0"),
    ],
)
def test_an_impossible_plan_is_refused_in_one_sentence(change, says):
    if says is None:
        assert plan_of({**GOOD, **change}).name == "trial"  # refused when the run begins, by the engine
        return
    with pytest.raises(FedBilevelError, match=says) as caught:
        plan_of({**GOOD, **change}, ["a", "b", "c"])
    assert isinstance(caught.value, PlanError | UnknownNameError | ValueError)
    assert "\n" not in str(caught.value)


def test_an_unreadable_plan_is_refused_and_a_good_one_is_read(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(PlanError, match="is not readable as TOML"):
        read_plan(tmp_path / "bad.toml")
    (tmp_path / "good.toml").write_text(
        'name = "trial"\nsites = ["a"]\n[task]\nname = "quadratic"\n[algorithm]\nname = "fedbio"\n'
    )
    assert read_plan(tmp_path / "good.toml").name == "trial"


def test_client_numbers_run_through_the_sites_in_the_order_of_the_plan():
    plan = plan_of({**GOOD, "sites": ["c", "a", "b"], "clients": {"a": 2, "b": 1}})
    assert plan.clients == {"a": 2}
    assert plan.num_clients == 4
    assert {site: list(plan.numbers(site)) for site in plan.sites} == {"c": [0], "a": [1, 2], "b": [3]}
    assert plan_of(json.loads(json.dumps(plan.asdict()))) == plan
    assert (
        plan_of(
            {**GOOD, "clients": {"b": 3}, "algorithm": {"name": "fedbio", "num_local_steps": [1, 2, 3, 4, 5]}}
        ).num_clients
        == 5
    )
