"""Flat plans: the operations of a function, replayed in memory that is allocated once."""

import pytest
import torch

from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.flat_plans import planned


def plan_of(function, *live):
    return planned(lambda: dict(enumerate(function())), lambda: live)


def replays(function, *live):
    """Return a plan that has been compared with the function on new numbers."""
    plan = plan_of(function, *live)
    for _ in range(3):
        for one in live:
            one.copy_(torch.randn(one.shape, dtype=torch.float64))
        expected = [value.clone() for value in function()]
        plan()
        assert all(map(torch.equal, plan.results.values(), expected))
    return plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replay_has_the_bits_of_the_function(dtype):
    x, matrix = torch.randn(5, 7, dtype=dtype), torch.randn(7, 7, dtype=dtype)

    def function():
        h = torch.tanh(x @ matrix).clamp(min=-0.5)
        return (h.t()[1:] * 0.3 - 1).softmax(0), h.double().sum(0) / 3, (h[:, None] - h).view(-1), x.expand(2, 5, 7)

    replays(function, x)


def test_constants_are_computed_once_and_equal_operations_are_merged():
    x, data = torch.randn(4), torch.randn(6, 4)
    plan = replays(lambda: ((data.t() @ data) @ x + (data.t() @ data) @ x,), x)
    assert len(plan) == 2  # a product with x, and the sum
    assert len(plan_of(lambda: (x * torch.ones_like(x),), x)) == 0
    assert len(plan_of(lambda: (x.exp(), x.sin())[:1], x)) == 1


def test_changes_in_place_are_repeated_in_their_order():
    x, rows = torch.randn(3), torch.zeros(2, 3)

    def function():
        before = rows.clone()
        rows[0] = x
        rows[1] += 2 * rows[0]
        counts = torch.zeros(3)
        counts.add_(x)
        return before, rows.clone(), counts

    plan = plan_of(function, x, rows)
    rows.fill_(1.0)
    x.fill_(3.0)
    plan()
    before, after, counts = plan.results.values()
    assert torch.equal(before, torch.ones(2, 3))
    assert torch.equal(after, torch.tensor([[3.0] * 3, [7.0] * 3]))
    assert torch.equal(rows, after)
    assert torch.equal(counts, x)


def test_derivatives_that_are_not_asked_for_are_left_out():
    images, scale = torch.randn(2, 1, 6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    filters = torch.randn(3, 1, 3, 3, dtype=torch.float64)
    grad = torch.func.grad

    def function():
        by_filters = grad(lambda some: torch.nn.functional.conv2d(images, some).tanh().sum())(filters)
        by_scale = grad(lambda some: torch.nn.functional.layer_norm(images, (6,), some).tanh().sum())(scale)
        return by_filters, by_scale

    replays(function, filters, scale)


def test_a_result_that_is_an_input_is_read():
    x, other = torch.randn(3), torch.randn(3)
    plan = plan_of(lambda: (x[1:], other * 2), x, other)
    assert plan.reads(x)
    assert plan.reads(other)
    assert not plan.reads(torch.randn(3))


def test_memory_is_used_again():
    x = torch.randn(1000)

    def function():
        value = x
        for _ in range(100):
            value = (value * 1.01).tanh()
        return (value,)

    plan = replays(function, x)
    assert len(plan) == 200
    assert plan.num_bytes <= 5 * 4000


def test_derivatives_of_many_clients():
    x, data = torch.randn(3, 4), torch.randn(3, 5, 4)
    grad = torch.func.vmap(torch.func.grad(lambda w, a: ((a @ w) ** 2).mean().log1p()))
    replays(lambda: (grad(x, data),), x)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, other: torch.rand_like(x), "random"),
        (lambda x, other: x * float(x.sum()), "reads values"),
        (lambda x, other: x[x > 0], "reads values"),
        (lambda x, other: other.add_(x), "not its own"),
    ],
)
def test_what_a_replay_cannot_repeat_is_refused(function, why):
    x, other = torch.randn(4), torch.zeros(4)
    with pytest.raises(NotCapturable, match=why):
        plan_of(lambda: (function(x, other),), x)


def test_results_that_an_operation_leaves_out_are_no_memory():
    image, kernel = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)

    def function():
        found = torch.nn.functional.conv2d(image, kernel).square().sum()
        return (torch.autograd.grad(found, kernel)[0],)  # the backward of a convolution returns no other gradient

    replays(function, image)
