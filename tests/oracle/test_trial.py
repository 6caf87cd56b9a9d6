"""Losses that cannot be evaluated for several clients at once, or have no second derivative."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population

STEPS = {"lr_upper": 0.1, "lr_lower": 0.1, "lr_system": 0.1}


def clients(num: int = 3) -> list[dict[str, dict[str, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(0)
    samples = lambda n: {"a": torch.randn(n, 4, 3, generator=draw, dtype=torch.float64), "label": torch.arange(n) % 2}
    return [{"train": samples(4 + i), "val": samples(3 + i)} for i in range(num)]


class Reader(nn.Module):
    """A network that reads sequences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "Transformer":
            self.enter, self.body = nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        elif kind == "Attention":
            self.enter, self.body = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        else:
            self.body = getattr(nn, kind)(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        if self.kind == "Transformer":
            return self.head(self.body(self.enter(a)).mean(1))
        if self.kind == "Attention":
            entered = self.enter(a)
            return self.head(self.body(entered, entered, entered, need_weights=False)[0].mean(1))
        return self.head(self.body(a)[0][:, -1])


def reading(kind: str) -> fb.Problem:
    torch.manual_seed(0)

    def upper(x, net, batch):
        return cross_entropy(net(batch["a"]), batch["label"], reduction="none")

    def lower(x, net, batch):
        decay = sum((leaf**2).sum() for leaf in net.parameters.values())
        return x["trust"].sigmoid()[batch["label"]] * upper(x, net, batch) + 0.3 * decay

    return fb.Problem.from_modules(y_module=Reader(kind), x0={"trust": torch.zeros(2)}, upper=upper, lower=lower)


def squared(y, batch):
    return (batch["a"].mean(1) @ y["w"] - batch["label"]) ** 2


def plain(lower, upper=lambda x, y, batch: squared(y, batch), **more) -> fb.Problem:
    return fb.Problem(
        upper=upper,
        lower=lambda x, y, batch: lower(y, batch) + x["s"].exp() * (y["w"] ** 2).sum(),
        x0={"s": torch.tensor(-1.0)},
        y0={"w": torch.tensor([0.3, -0.2, 0.1])},
        **more,
    )


def selected(y, batch):
    chosen = (batch["weight"] * squared(y, batch))[batch["label"] == 1]
    return chosen.sum()


branching = lambda y, batch: squared(y, batch) * (2.0 if y["w"].sum() > 0 else 1.0)
written = lambda y, batch: torch.zeros(len(batch["label"]), dtype=y["w"].dtype).add_(squared(y, batch))

BATCHLESS = {  # problem, its function that cannot be batched, and the reason
    "GRU": (reading("GRU"), r"lower\(\)", "torch has no batching rule for gru"),
    "LSTM": (reading("LSTM"), r"lower\(\)", "torch has no batching rule for lstm"),
    "RNN": (reading("RNN"), r"lower\(\)", "torch has no batching rule for rnn_tanh"),
    "branch": (plain(branching), r"lower\(\)", r"it branches on values or calls \.item\(\)"),
    "item": (
        plain(lambda y, batch: squared(y, batch) + 0 * y["w"].sum().item()),
        r"lower\(\)",
        r"it branches on values or calls \.item\(\)",
    ),
    "mask": (plain(selected), r"lower\(\)", "a shape in it depends on values"),
    "in place": (plain(written), r"lower\(\)", "RuntimeError: output with shape .*"),
    "upper": (
        plain(squared, upper=lambda x, y, batch: branching(y, batch)),
        r"upper\(\)",
        r"it branches on values or calls \.item\(\)",
    ),
    "statistics": (
        plain(
            squared, statistics={"val": lambda x, y, batch: {"s": squared(y, batch).sum() * float(y["w"].sum() > 9)}}
        ),
        "the statistics of 'val'",
        r"it branches on values or calls \.item\(\)",
    ),
}


@pytest.mark.parametrize("name", BATCHLESS)
@pytest.mark.parametrize("strategy", ["auto", "compiled"])
def test_functions_that_cannot_be_batched_run_client_by_client_with_one_warning(name, strategy, monkeypatch):
    monkeypatch.setattr("fedbilevel.oracle.evaluation._try_compiler", lambda: None)
    problem, function, reason = BATCHLESS[name]
    options = {"num_iterations": 3, "dtype": torch.float64, **STEPS}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fb.solve(problem, clients(), "fedbio", strategy=strategy, **options)
    expected = fb.solve(problem, clients(), "fedbio", strategy="loop", **options)
    assert found.rows[-1]["upper_loss"] == pytest.approx(expected.rows[-1]["upper_loss"], rel=1e-12)
    assert len(told) == 1
    sentence = (
        rf"{function} cannot be evaluated for several clients at once \({reason}\), so 3 clients are evaluated one "
        r"after another: a step takes about 3 times as long as that of one client"
    )
    assert re.fullmatch(sentence, str(told[0].message)), told[0].message


@pytest.mark.parametrize("name", BATCHLESS)
def test_strategy_vmap_refuses_functions_that_cannot_be_batched(name):
    problem, function, reason = BATCHLESS[name]
    with pytest.raises(ProblemError, match=rf"^{function} cannot be .* \({reason}\): use strategy='loop'\.$"):
        Population(problem, clients(), strategy="vmap")


@pytest.mark.filterwarnings("ignore:.*cannot be evaluated for several clients")
def test_recurrent_networks_pass_the_checks_of_problems_and_hypergradients():
    problem = reading("GRU")
    assert fb.check_problem(problem, clients(2), show=False).ok
    report = fb.check_hypergradient(problem, clients(2), estimators=["cg", "fedmbo"], num_directions=1, show=False)
    assert [check.ok for check in report.checks][:2] == [True, True], str(report)
    assert fb.curvature(problem, clients(2), num_products=3).largest > 0


@pytest.mark.parametrize("kind", ["Transformer", "Attention"])
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_attention_uses_a_kernel_that_has_second_derivatives(kind, strategy):
    problem = reading(kind)
    found = fb.solve(
        problem, clients(), "fedbio", num_iterations=2, dtype=torch.float64, strategy=strategy, residuals=True, **STEPS
    )
    assert found.rows[-1]["residual"] > 0
    assert fb.check_problem(problem, clients(), show=False).ok


def test_one_client_needs_no_batching():
    found = fb.solve(plain(branching), clients(1), "fedbio", num_iterations=1)
    assert found.rows[-1]["iteration"] == 1


distances = lambda y, batch: torch.cdist(batch["a"].mean(1), y["w"][None]).sum(1)


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_missing_second_derivatives_are_an_error_only_where_they_are_used(strategy):
    problem = plain(distances)
    options = {"num_iterations": 2, "strategy": strategy}
    found = fb.solve(problem, clients(), "penalty", **options)
    assert found.rows[-1]["iteration"] == 2
    with pytest.raises(ProblemError, match=r"torch has no derivative of _cdist_backward\): .* such as 'penalty'"):
        fb.solve(problem, clients(), "fedbio", **options)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_a_loss_outside_of_torch_is_refused(strategy):
    outside = lambda y, batch: squared(y, batch) * float(y["w"].detach().numpy().max() < 9)
    with pytest.raises(ProblemError, match=r"the gradient of lower\(\) cannot be computed .* without \.numpy\(\)"):
        Population(plain(outside), clients(), strategy=strategy)
