"""Problems whose solution means nothing: what `solve` and `check_problem` say about them."""

import dataclasses
import re
import warnings

import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.engines import simulate
from fedbilevel.errors import ProblemError, ProblemWarning
from fedbilevel.oracle.dependence import dependence_faults
from fedbilevel.oracle.population import Population
from fedbilevel.problem.data_faults import data_faults
from fedbilevel.runs.faults import warn_of_faults
from fedbilevel.tasks.quadratic import Quadratic
from test_checks import SMALL


def fit(y, batch):
    return (batch["a"] @ y["w"] - batch["b"]) ** 2


def decay(x, y, batch):
    return fit(y, batch) + x["s"].exp() * (y["w"] ** 2).sum()


def problem(upper, lower, y=(0.0, 0.0)) -> fb.Problem:
    return fb.Problem(upper=upper, lower=lower, x0={"s": torch.tensor(0.0)}, y0={"w": torch.tensor(y)})


def clients(num=3, **more):
    draw = torch.Generator().manual_seed(0)
    samples = lambda n: {"a": torch.randn(n, 2, generator=draw), "b": torch.randn(n, generator=draw)}
    roles = lambda i: {role: samples(7 + i) for role in ("train", "val")}
    return [
        {
            role: {**fields, **{name: make(role, len(fields["b"])) for name, make in more.items()}}
            for role, fields in one
        }
        for one in (roles(i).items() for i in range(num))
    ]


upper = lambda x, y, batch: fit(y, batch)
FAULTS = {
    "lower ignores x, upper uses it": (
        problem(lambda x, y, batch: fit(y, batch) + x["s"] ** 2, lambda x, y, batch: fit(y, batch)),
        r"y\*\(x\) does not depend on x, because lower\(\) has no term that holds both x and y",
    ),
    "lower adds a term of x": (
        problem(lambda x, y, batch: fit(y, batch) + x["s"] ** 2, lambda x, y, batch: fit(y, batch) + x["s"].exp()),
        r"y\*\(x\) does not depend on x",
    ),
    "upper ignores y": (
        problem(lambda x, y, batch: (x["s"] - batch["b"]) ** 2, decay),
        r"upper\(\) does not depend on y, so the lower level has no effect on x",
    ),
    "lower ignores y": (
        problem(lambda x, y, batch: fit(y, batch) + x["s"] ** 2, lambda x, y, batch: 0 * decay(x, y, batch)),
        r"lower\(\) does not change with y, so y stays at its initial value",
    ),
}
FATAL = {
    "x is not used at all": (
        problem(upper, lambda x, y, batch: fit(y, batch)),
        r"neither y\*\(x\) nor upper\(\) depends on x, so x cannot be learned: use x in the lower loss",
    ),
    "upper uses neither x nor y": (
        problem(lambda x, y, batch: batch["b"] ** 2, decay),
        r"upper\(\) depends on neither x nor y, so there is nothing to learn",
    ),
    "lower ignores y and upper ignores x": (
        problem(upper, lambda x, y, batch: 0 * decay(x, y, batch)),
        r"lower\(\) does not change with y",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_solve_warns_and_check_problem_fails_if_the_levels_are_independent(name):
    meaningless, sentence = FAULTS[name]
    with pytest.warns(ProblemWarning, match=sentence):
        fb.solve(meaningless, clients(), "fedbio", num_iterations=1)
    report = fb.check_problem(meaningless, clients(), show=False)
    [levels] = [check for check in report.checks if check.name == "levels"]
    assert not levels.ok
    assert levels.text in str(report)


@pytest.mark.parametrize("name", FATAL)
def test_solve_raises_if_x_cannot_be_learned(name):
    meaningless, sentence = FATAL[name]
    with pytest.raises(ProblemError, match=sentence):
        fb.solve(meaningless, clients(), "fedbio", num_iterations=1)
    assert not fb.check_problem(meaningless, clients(), show=False).ok


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavg_plus"])
def test_an_algorithm_that_keeps_x_accepts_an_unused_x(name):
    meaningless, _ = FATAL["x is not used at all"]
    assert fb.solve(meaningless, clients(), name, num_iterations=1).rows[-1]["iteration"] == 1


def test_algorithms_without_an_upper_step_are_those_that_keep_x():
    keeps = {name for name, kind in discovery.algorithms().items() if not kind.learns_x}
    steps = {name for name, kind in discovery.algorithms().items() if hasattr(kind, "lr_upper")}
    others = {"clustered_fl", "ditto", "fedadam", "fedavg", "fedavg_plus", "fedem", "fedprox", "pfedme"}
    assert keeps == others | {"sgp", "rasgp"}
    assert not keeps & steps


def test_an_algorithm_that_trains_x_on_the_lower_loss_needs_no_upper_loss():
    meaningless, sentence = FATAL["upper uses neither x nor y"]
    local = dataclasses.replace(meaningless, scopes=fb.Scopes(lower="local"))
    with pytest.raises(ProblemError, match=sentence):
        fb.solve(local, clients(), "fedbio_local", num_iterations=1)
    assert fb.solve(local, clients(), "fedrep", num_iterations=1).rows[-1]["iteration"] == 1


def test_derivatives_that_are_zero_at_the_start_alone_are_no_fault():
    dead = lambda x, y, batch: fit(y, batch) + x["s"].exp() * (y["w"].relu() ** 2).sum()
    still = problem(lambda x, y, batch: (y["w"] ** 2).sum() + 0 * batch["b"], dead)
    assert dependence_faults(Population(still, clients())) == []


def test_a_dependence_that_few_samples_show_is_no_fault():
    rare = lambda role, n: torch.arange(n) == n - 2  # not among the samples of the first test
    many = [
        {role: {name: value.repeat_interleave(10, 0) for name, value in fields.items()} for role, fields in one.items()}
        for one in clients()
    ]
    for one in many:
        for fields in one.values():
            fields["rare"] = rare("", len(fields["b"]))
    seen = problem(upper, lambda x, y, batch: fit(y, batch) + batch["rare"] * x["s"] * y["w"].sum())
    assert dependence_faults(Population(seen, many)) == []


def test_a_loss_that_is_not_finite_on_a_later_client_is_named():
    some = clients()
    some[2]["val"]["b"] = some[2]["val"]["b"].abs() + 1e30  # its square is infinite in float32
    with pytest.raises(ProblemError, match=r"upper\(\) is inf at the initial point on client 2: check its data"):
        fb.solve(problem(upper, decay), some, "fedbio", num_iterations=1)


def test_a_constant_integer_field_is_a_warning():
    constant = clients(label=lambda role, n: torch.full((n,), 3) if role == "val" else torch.arange(n) % 2)
    with pytest.warns(ProblemWarning, match="the field 'label' is 3 in all 24 samples of 'val': if it is a label"):
        fb.solve(problem(upper, decay), constant, "fedbio", num_iterations=1)
    assert data_faults(problem(upper, decay), Population(problem(upper, decay), clients(1)).data) == []
    report = fb.check_problem(problem(upper, decay), constant, show=False)
    assert [check.name for check in report.checks if not check.ok] == ["data"]


def test_validation_on_the_training_samples_is_a_warning():
    same = [{"train": one["train"], "val": one["train"]} for one in clients()]
    with pytest.warns(ProblemWarning, match="'train' and 'val' hold the same 24 samples, so x overfits them"):
        fb.solve(problem(upper, decay), same, "fedavg", num_iterations=1)
    assert "hold the same 24 samples" in str(fb.check_problem(problem(upper, decay), same, show=False))


@pytest.mark.parametrize("name", sorted(discovery.tasks()))
def test_no_task_is_meaningless(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_faults(Population(*discovery.task(name)(**SMALL.get(name, {})).build()), learns_x=True)


def test_the_test_of_the_levels_leaves_the_oracle_and_the_random_numbers_alone():
    built = Quadratic().build()
    fed = simulate(discovery.algorithm("fedbio")(), *built)
    before = torch.get_rng_state(), dict(fed.host.oracle.choices), fed.ledger.totals(), dict(fed.host.oracle._plans)
    warn_of_faults(fed.host, learns_x=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (fed.host.oracle.choices, fed.ledger.totals(), fed.host.oracle._plans) == before[1:]


def entropy(x, y, batch):
    return torch.nn.functional.cross_entropy(batch["a"] @ y["w"], batch["label"], reduction="none") + 0 * x["s"]


@pytest.mark.parametrize("place", [(0, "train", 0), (0, "train", 6), (2, "train", 0), (1, "val", 7)])
def test_a_label_that_a_loss_cannot_use_is_named_with_its_client(place):
    client, role, sample = place
    some = clients(label=lambda role, num: torch.arange(num) % 3)
    some[client][role]["label"][sample] = 3
    lower = lambda x, y, batch: entropy(x, y, batch) + x["s"].exp() * (y["w"] ** 2).sum()
    classes = fb.Problem(upper=entropy, lower=lower, x0={"s": torch.tensor(0.0)}, y0={"w": torch.zeros(2, 3)})
    for one in some:
        for fields in one.values():
            fields["note"] = fields["a"].to(torch.bfloat16)[:, 0]  # a type that numpy has not, and no index
    said = rf"cannot use 3 as an index \(.*\), which may be a value of 'label' \(client {client} in '{role}'\): number"
    with pytest.raises(ProblemError, match=said):
        fb.solve(classes, some, num_rounds=5)


def test_every_field_that_may_hold_a_value_outside_is_named():
    """Labels up to 5 are right here; the kind is not, and another client has it."""
    some = clients(label=lambda role, num: torch.arange(num) % 6, kind=lambda role, num: torch.arange(num) % 5)
    some[2]["val"]["kind"][0] = 5
    table = lambda x, y, batch: fit(y, batch) + torch.zeros(5)[batch["kind"]] + torch.zeros(6)[batch["label"]]
    labels = "'label' (client 0 in 'train', client 0 in 'val', client 1 in 'train' and 3 more)"
    with pytest.raises(ProblemError, match=re.escape(f"{labels} or 'kind' (client 2 in 'val'): number classes from 0")):
        fb.solve(problem(table, decay), some, num_rounds=5)


def test_errors_of_callbacks_are_not_explained_by_the_data():
    some = clients(label=lambda role, num: torch.arange(num) % 6)
    fail = lambda now: bool(torch.zeros(3)[torch.tensor([5])])
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        fb.solve(problem(upper, decay), some, num_rounds=5, callbacks=[fail])


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_an_index_that_a_run_reaches_later_is_explained(level):
    """At y = 0, which the check before a run sees, all indices are zero; fedavg only measures the upper loss."""
    some = clients(label=lambda role, num: torch.arange(num) % 6)
    late = lambda x, y, batch: fit(y, batch) + torch.zeros(5)[batch["label"] * (y["w"] != 0).any()]
    with pytest.raises(ProblemError, match="which may be a value of 'label'"):
        fb.solve(dataclasses.replace(problem(upper, decay), **{level: late}), some, "fedavg", num_iterations=2)


def test_an_error_of_a_loss_that_no_field_explains_stays_as_it_is():
    wrong = lambda x, y, batch: decay(x, y, batch) + torch.arange(3.0)[batch["index"] * 0 + 99]
    with pytest.raises(ProblemError, match="failed on a batch of the first client"):
        fb.solve(problem(wrong, decay), clients(label=lambda role, num: torch.arange(num) % 3), num_rounds=5)
