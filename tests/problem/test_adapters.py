"""Low-rank adapters: what is trained, what is shared, and the same numbers as dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.problem.adapters import LowRank
from fedbilevel.problem.modules import BoundModule, Frozen


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def clients() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    some = lambda n: {name: torch.randn(n, 4, generator=draw, dtype=torch.float64) for name in "ab"}
    return [{"train": some(6), "val": some(5)} for _ in range(3)]


def problem(module: nn.Module) -> fb.Problem:
    def error(x: Any, y: Any, batch: Any) -> Tensor:
        return (y(batch["a"])[:, 0] - batch["b"][:, 0]) ** 2

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        return error(x, y, batch) + x["log"].exp() * sum((leaf**2).sum() for leaf in y.parameters.values())

    return fb.Problem.from_modules(y_module=module, x0={"log": torch.tensor(-2.0)}, upper=error, lower=lower)


def test_a_copy_computes_what_the_module_computes_and_trains_thin_matrices_only():
    module = net()
    adapted, a = fb.lora(module, 2), torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(adapted(a), module(a))
    trained = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {"0.down": (2, 4), "0.up": (5, 2), "2.down": (2, 5), "2.up": (1, 2)}
    assert all(p.requires_grad for p in module.parameters())
    assert isinstance(module[0], nn.Linear)


def test_an_adapter_is_the_sum_of_a_matrix_and_a_product():
    layer = LowRank(nn.Linear(4, 3).double(), 2, 0.5, torch.Generator().manual_seed(0))
    nn.init.normal_(layer.up)
    a = torch.randn(6, 4, dtype=torch.float64)
    dense = layer.base.weight + 0.5 * layer.up @ layer.down
    torch.testing.assert_close(layer(a), a @ dense.T + layer.base.bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight, dense, rtol=0, atol=0)
    assert layer.bias is layer.base.bias


@pytest.mark.parametrize("algorithm", ["penalty", "fedbio"])
def test_a_run_sends_and_changes_the_adapters_only(algorithm):
    module = net()
    adapted = fb.lora(module, 2, where=lambda name: name == "0")
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    made = problem(adapted)
    runs = [
        fb.solve(made, clients(), algorithm, num_iterations=5, dtype=torch.float64, strategy=strategy)
        for strategy in ("loop", "vmap")
    ]
    assert set(runs[0].y) == {"0.down", "0.up"}
    num = 2 * 4 + 5 * 2
    assert runs[0].ledger["floats_up"] == 5 * 3 * (1 + 2 * num)  # x and two rows of the adapters
    assert bool(runs[0].y["0.up"].any())
    for name, leaf in runs[0].y.items():
        torch.testing.assert_close(leaf, runs[1].y[name], rtol=1e-9, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    adapted.load_state_dict(runs[0].y, strict=False)
    a = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(adapted(a), BoundModule(adapted, runs[0].y)(a))
    assert not torch.equal(adapted(a), module(a))


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.leave.weight = self.enter.weight

        def forward(self, token: Tensor) -> Tensor:
            return self.leave(self.enter(token))

    module, token = Tied(), torch.tensor([0, 3])
    assert set(
        fb.Problem.from_modules(
            y_module=module,
            x0={"s": torch.zeros(())},
            upper=lambda x, y, b: y(b["t"]).sum(1),
            lower=lambda x, y, b: y(b["t"]).sum(1),
        ).y0
    ) == {"enter.weight"}
    twice = BoundModule(module, {"enter.weight": 2 * module.enter.weight.detach()})
    torch.testing.assert_close(twice(token), 4 * module(token))
    adapted = fb.lora(module, 1)
    assert torch.equal(adapted(token), module(token))
    assert adapted.leave.base.weight is adapted.enter.weight


def test_frozen_parameters_are_held_once_and_follow_changes():
    module = net().requires_grad_(False)
    frozen, like = Frozen(module), torch.zeros(1, dtype=torch.float32)
    first, second = frozen.like(like, ()), frozen.like(like, ())
    assert all(first[name] is second[name] for name in first)
    assert {value.dtype for value in first.values()} == {torch.float32}
    with torch.no_grad():
        module[0].weight += 1
    third = frozen.like(like, ())
    assert third["0.weight"] is not first["0.weight"]
    assert third["2.weight"] is first["2.weight"]
    torch.testing.assert_close(third["0.weight"], first["0.weight"] + 1)
    assert frozen.like(like.double(), ())["0.bias"].dtype == torch.float64
    inside = []
    torch.func.grad(lambda a: inside.append(frozen.like(a, ())) or a.sum())(like)
    assert frozen._copies["0.bias"][2].dtype == torch.float64  # a copy made inside a transform is not kept


def test_a_shared_adapter_above_and_own_adapters_below_are_sums_of_products():
    """Gradients of both agree with a dense matrix, and own values of the frozen adapter have no effect."""
    module = net()
    shared = fb.lora(module, 2, where=lambda name: name == "0")
    both = fb.lora(shared, 1)
    trained = lambda one: {name: leaf.detach() for name, leaf in one.named_parameters() if leaf.requires_grad}
    error = lambda x, y, batch: (y.with_parameters(x)(batch["a"])[:, 0] - batch["b"][:, 0]) ** 2
    made = fb.Problem.from_modules(
        x0=trained(shared), y_module=both, upper=error, lower=error, scopes=fb.Scopes(lower="local")
    )
    assert set(made.x0) == {"0.down", "0.up"}
    assert set(made.y0) == {"0.base.down", "0.base.up", "2.down", "2.up"}
    draw = torch.Generator().manual_seed(3)
    x, y = (
        {
            name: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype).requires_grad_()
            for name, leaf in tree.items()
        }
        for tree in (made.x0, made.y0)
    )
    batch = clients()[1]["train"]
    first = module[0].weight + x["0.up"] @ x["0.down"] + y["0.base.up"] @ y["0.base.down"]
    last = module[2].weight + y["2.up"] @ y["2.down"]
    hidden = torch.tanh(batch["a"] @ first.T + module[0].bias)
    expected = (hidden @ last.T + module[2].bias)[:, 0] - batch["b"][:, 0]
    leaves = [*x.values(), *y.values()]
    ours = torch.autograd.grad(made.upper(x, y, batch).sum(), leaves)
    theirs = torch.autograd.grad((expected**2).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert fb.check_hypergradient(made, clients(), estimators=["cg"], num_directions=1, show=False).ok


def test_adapters_of_nothing_are_refused():
    with pytest.raises(ProblemError, match=r"rank is 0, expected a whole number, at least 1\."):
        fb.lora(net(), 0)
    with pytest.raises(ProblemError, match="Tanh has no linear layer inside"):
        fb.lora(nn.Tanh(), 1)
    with pytest.raises(ProblemError, match="Sequential has no linear layer inside that `where` accepts"):
        fb.lora(net(), 1, where=lambda name: False)
