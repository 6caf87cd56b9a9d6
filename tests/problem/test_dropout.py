"""Dropout with addressed masks: their shares, who shares them, and equal runs in every way of evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.problem.dropout import Masks

uniform = lambda n, seed=0: torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)).mul(2**24).floor() / 2**24


def mask(draw: Tensor, *shape: int, p: float = 0.3, calls: int = 1, kind: Any = functional.dropout) -> Tensor:
    """The mask of the last of several calls."""
    with Masks(draw):
        for _ in range(calls):
            found = kind(torch.ones(len(draw), *shape, dtype=torch.float64), p)
    return found


def test_entries_are_dropped_with_their_probability_and_the_others_scaled():
    found = mask(uniform(50), 40, 30)
    assert set(found.unique().tolist()) == {0.0, 1 / 0.7}
    assert float((found == 0).double().mean()) == pytest.approx(0.3, abs=4 * (0.21 / 60000) ** 0.5)
    assert float((found[:, :-1] * found[:, 1:] == 0).double().mean()) == pytest.approx(0.51, abs=0.01)  # independent
    assert not bool(mask(uniform(3), 5, p=1.0).any())
    assert torch.equal(mask(uniform(3), 5, p=0.0), torch.ones(3, 5, dtype=torch.float64))


def test_a_mask_depends_on_the_numbers_of_its_sample_and_on_the_call():
    draw = uniform(6)
    found = mask(draw, 64)
    assert torch.equal(found, mask(draw, 64))
    assert torch.equal(found[:4], mask(draw[:4], 64))  # padding changes nothing
    apart = [mask(draw, 64, calls=2), mask(uniform(6, 1), 64), found.roll(1, 0)]
    apart += [mask(draw + torch.tensor([0.0, 2.0**-24]), 64), mask(draw + torch.tensor([2.0**-24, 0.0]), 64)]
    for other in apart:
        assert float((found != other).double().mean()) == pytest.approx(0.42, abs=0.12)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(functional.dropout1d, (7, 4)), (functional.dropout2d, (7, 4, 2)), (functional.dropout3d, (7, 1, 2, 2))],
)
def test_whole_channels_are_dropped(kind, shape):
    found = mask(uniform(40), *shape, kind=kind).flatten(2)
    assert bool((found == found[..., :1]).all())
    assert float((found == 0).double().mean()) == pytest.approx(0.3, abs=0.11)


def test_nothing_is_dropped_without_numbers_or_in_eval_mode():
    ones = torch.ones(3, 4)
    with Masks(None):
        assert functional.dropout(ones, 0.5) is ones
    with Masks(uniform(3)):
        assert functional.dropout(ones, 0.5, training=False) is ones
        assert torch.dropout(ones, 0.5, False) is ones
        assert not torch.equal(torch.dropout(ones, 0.5, train=True), ones)


def test_an_input_without_samples_first_is_refused():
    with Masks(uniform(3)), pytest.raises(ProblemError, match=r"shape \(5, 3\) for 3 samples, expected one row per sa"):
        functional.dropout(torch.ones(5, 3))


def test_attention_drops_weights():
    draw, (q, k, v) = uniform(3), torch.randn(3, 3, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    with Masks(draw):
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    weights = (q @ k.mT / 2).softmax(-1) * mask(draw, 2, 5, 5).float()
    torch.testing.assert_close(found, weights @ v)


@pytest.mark.parametrize("weights", [False, True])
def test_modules_of_attention_drop_weights(weights):
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    a = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    call = lambda: layer(a, a, a, need_weights=weights)[0]
    with Masks(uniform(3)):
        one = call()
    with Masks(uniform(3)):
        assert torch.equal(one, call())
    with Masks(uniform(3, 5)):
        assert not torch.allclose(one, call())
    with Masks(uniform(3)[:2]):
        two = layer(a[:2], a[:2], a[:2], need_weights=weights)[0]
    torch.testing.assert_close(one[:2], two)
    with Masks(None):
        silent = call()
    torch.testing.assert_close(silent, layer.eval()(a, a, a, need_weights=weights)[0])


# ---- problems --------------------------------------------------------------------------------------------------------


def clients(*sizes: int) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    fields = lambda n: {"a": torch.randn(n, 3, 4, generator=draw), "b": torch.randn(n, generator=draw)}
    return [{"train": fields(n), "val": fields(n)} for n in sizes]


class Reader(nn.Module):
    def __init__(self, attention: bool, p: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=p, batch_first=True)
        self.first = layer if attention else nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(p))
        self.last = nn.Linear(4, 1)

    def forward(self, a: Tensor) -> Tensor:
        return self.last(self.first(a).mean(1))[:, 0]


def problem_of(module: nn.Module, **more: Any) -> fb.Problem:
    upper = lambda x, net, batch: (net(batch["a"]) - batch["b"]) ** 2
    lower = lambda x, net, batch: (
        upper(x, net, batch) * x["s"].exp() + 0.1 * sum((leaf**2).sum() for leaf in net.parameters.values())
    )
    return fb.Problem.from_modules(y_module=module, x0={"s": torch.tensor(0.0)}, upper=upper, lower=lower, **more)


def test_gradients_are_those_of_the_masks_of_their_samples():
    module = Reader(attention=False).double()
    problem = problem_of(module)
    population = Population(problem, clients(4, 6), dtype=torch.float64)
    assert problem.draws == {"train": 2}
    batch = population.data.batch(torch.arange(2), "train")
    draw = torch.stack([uniform(6, seed).double() for seed in (3, 4)])
    rows = population.oracle.lower_grad(population.x0, population.y0, batch.drawn(draw))
    linear, last = module.first[0], module.last
    for i, n in enumerate((4, 6)):
        fields = batch.row(i)
        hidden = torch.tanh(linear(fields["a"])) * mask(draw[i][: len(fields["a"])], 3, 4)
        loss = ((last(hidden.mean(1))[:, 0] - fields["b"]) ** 2)[:n].mean()
        loss = loss + 0.1 * sum((leaf**2).sum() for leaf in module.parameters())
        expected = torch.cat([leaf.flatten() for leaf in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(rows[i], expected, rtol=1e-10, atol=1e-12)


def run(problem: fb.Problem, algorithm: str, **more: Any) -> Any:
    options = {"num_iterations": 4, "dtype": torch.float64, "batch_size": 3, "lr_upper": 0.1, "lr_lower": 0.05}
    return fb.solve(problem, clients(4, 7, 5), algorithm, **{**options, **more})


@pytest.mark.filterwarnings("ignore:the fused kernels of attention")
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("algorithm", ["penalty", "fedbio"])
def test_runs_agree_in_every_way_of_evaluation_and_after_a_resume(tmp_path, algorithm, attention):
    problem = problem_of(Reader(attention))
    whole = run(problem, algorithm, strategy="loop")
    for other in ({"strategy": "vmap"}, {"strategy": "loop", "chunk_size": 1}):
        assert torch.allclose(run(problem, algorithm, **other).x["s"], whole.x["s"], rtol=1e-10)
    silent = run(problem_of(Reader(attention).eval()), algorithm, strategy="loop")
    assert not torch.allclose(silent.y["last.weight"], whole.y["last.weight"], rtol=1e-3)
    assert silent.rows[0]["lower_loss"] == pytest.approx(whole.rows[0]["lower_loss"], rel=1e-12)  # no mask is measured
    run(problem, algorithm, strategy="loop", num_iterations=2, record=tmp_path / "r")
    resumed = run(problem, algorithm, strategy="loop", record=tmp_path / "r", resume=True)
    assert torch.equal(resumed.x["s"], whole.x["s"])


def test_masks_are_not_multiplied_by_the_weight_of_the_penalty():
    """Both points start at y and see the same masks, so lam times their difference stays bounded."""
    problem = problem_of(Reader(attention=False))
    far = [run(problem, "penalty", penalty=lam, num_iterations=2).x["s"] for lam in (1e3, 1e6)]
    assert torch.allclose(far[0], far[1], rtol=1e-2)


def test_own_numbers_of_a_loss_stay_its_own():
    seen = []

    def lower(x, net, batch):
        seen.append(batch["draw"].shape[1] if "draw" in batch else 0)
        return x["s"] * (net(batch["a"]) - batch["b"]) ** 2

    problem = fb.Problem.from_modules(
        y_module=Reader(attention=False), x0={"s": torch.tensor(1.0)}, draws={"train": 3, "val": 1},
        upper=lambda x, net, batch: (net(batch["a"]) - batch["b"]) ** 2, lower=lower,
    )  # fmt: skip
    assert problem.draws == {"train": 5, "val": 1}
    run(problem, "penalty", num_iterations=1)
    assert set(seen) == {0, 3}


def test_features_of_a_module_with_dropout_are_refused():
    with pytest.raises(ProblemError, match="dropout in training mode was given with features"):
        problem_of(Reader(attention=False), features=lambda x, batch: batch["a"])
