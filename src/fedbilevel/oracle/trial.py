"""Trial of a problem's functions on two samples of two clients, before a run.

torch cannot evaluate every function for several clients at once: it has no rule for recurrent
layers (GRU, LSTM), branches on values, `.item()` and shapes that depend on values. Such a problem
is evaluated client by client. Fast kernels of attention and recurrent layers have no second
derivative, and some have no batching rule; then the plain kernels of the same layers are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.oracle.oracle import Oracle
from fedbilevel.oracle.torch_errors import plainly
from fedbilevel.problem.client_data import Batch
from fedbilevel.problem.problem import Problem, Statistics

_SECOND = "the second derivatives of lower()"


class Few(NamedTuple):
    """A few samples of two clients, or of one, with their initial points.

    statistics: by role, the function, the clients' x and their samples.
    """

    x: Tensor
    y: Tensor
    train: Batch
    val: Batch
    statistics: Sequence[tuple[str, Statistics, Tensor, Batch]]


def settle(oracle: Oracle, make: Callable[..., Oracle], few: Few, *, second: bool = True) -> None:
    """Set the kernels and, if clients cannot be evaluated together, the strategy of an oracle.

    make: function of a strategy that makes another oracle of the same problem.
    second: whether second derivatives are used. If torch has none of some operation, this is no
        error here but where they are used.
    """
    together = oracle.strategy != "loop" and len(few.train) > 1
    for _ in range(4):  # each pass may find one more kernel
        slow: list[str] = []
        trial = make("vmap" if oracle.strategy == "vmap" else "auto")
        failed = _failures(trial, oracle, few, second, slow) if together else {}
        alone = _failures(make("loop"), oracle, few, second, []) if failed or not together else {}
        lost = _SECOND in failed or _SECOND in alone
        before, errors = oracle.plain_kernels, [*failed.values(), *alone.values()]
        if not oracle.takes_plain_kernels([*errors, *slow]):
            if not oracle.takes_full_precision(errors):
                break
            _say_full_precision()
        if lost and "attention" in oracle.plain_kernels - before and any("scaled_dot" in str(one) for one in errors):
            _say_plain_attention()
    for name, error in alone.items():
        if name != _SECOND or not isinstance(error, ProblemError):
            raise ProblemError(
                f"{name} cannot be computed ({plainly(error)}): use operations of torch only, without .numpy(), .data "
                "or changes of the batch."
            ) from error
    cured = {name: error for name, error in failed.items() if name not in alone}
    if not cured:
        return
    name, error = next(iter(cured.items()))
    told = f"{name} cannot be evaluated for several clients at once ({plainly(error)})"
    if oracle.strategy == "vmap":
        raise ProblemError(f"{told}: use strategy='loop'.") from error
    oracle.strategy, num = "loop", few.train.data.num_clients
    warnings.warn(
        f"{told}, so {num} clients are evaluated one after another: a step takes about {num} times as long as that of "
        "one client",
        stacklevel=3,
    )


def _say_plain_attention() -> None:
    warnings.warn(
        "the fused kernels of attention have no second derivative, so products with second derivatives use plain "
        "attention, which holds a weight for every pair of positions",
        stacklevel=4,
    )


def _say_full_precision() -> None:
    warnings.warn(
        "torch cannot compute the derivatives of a loss in low precision, so they are computed in float32, "
        "except gradients of one client at a time",
        stacklevel=4,
    )


def _failures(trial: Oracle, oracle: Oracle, few: Few, second: bool, slow: list[str]) -> dict[str, Exception]:
    """Return the exceptions of all functions that the trial oracle cannot evaluate.

    slow: gets torch's warnings of operations without a batching rule.
    """
    trial.plain_kernels, trial.plain_in_full = oracle.plain_kernels, oracle.plain_in_full
    trial.long, trial.adapts, trial.strict, trial.counts = float("inf"), False, True, False
    if _failure(lambda: _all(trial, few, second), slow) is None:
        return {}
    found = {name: _failure(probe, slow) for name, probe in _probes(trial, few) if second or name != _SECOND}
    return {name: error for name, error in found.items() if error is not None}


def _failure(probe: Callable[[], Any], slow: list[str]) -> Exception | None:
    try:
        with torch.no_grad(), _fallbacks(slow):
            probe()
    except torch.OutOfMemoryError as error:
        return error.with_traceback(None)  # its frames would hold the memory
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything; it is reported
        return error
    return None


def _all(oracle: Oracle, few: Few, second: bool) -> None:
    """Evaluate everything with few calls, because nearly all problems pass."""
    x, y, train, val, statistics = few
    xs, ys, shares = _points(few)
    for loss, batch in ((oracle.problem.lower, train), (oracle.problem.upper, val)):
        oracle.evaluate(loss, x, y, batch)
    for _, function, own_x, batch in statistics:
        _value(oracle, function, own_x, y, batch)
    oracle.upper_grads(x, y, val, shares=shares)
    if second:
        oracle.directions(xs, ys, ys, gy=train, fx=val, fy=val, ju=train, hu=train)
        oracle.second_order(x, y, y, train, shares=shares)
    else:
        oracle.upper_grads(xs, ys, val)
        oracle.lower_grad(xs, ys, train)
        oracle.lower_grad(x, y, train, shares=shares)


def _value(oracle: Oracle, function: Callable[..., Any], x: Tensor, y: Tensor, batch: Batch) -> None:
    """Evaluate a function at a point that the clients share, and at own points of the clients."""
    oracle.evaluate(function, x, y, batch)
    xs, ys = (one.expand(len(batch), -1).clone() for one in (x, y))
    oracle.evaluate(function, xs, ys, batch)


def _points(few: Few) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of x and y with one copy per client, and equal shares."""
    k = len(few.train)
    return few.x.expand(k, -1).clone(), few.y.expand(k, -1).clone(), few.y.new_full((k,), 1 / k)


def _probes(oracle: Oracle, few: Few) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each function of the problem, evaluated in all ways that a run may use.

    Clients share a point or each has its own, and a mean over clients may be enough.
    """
    problem: Problem = oracle.problem
    xs, ys, shares = _points(few)

    def derived(function: Callable[..., Any], batch: Batch) -> Callable[[], Any]:
        return lambda: [
            function(few.x, few.y, batch),
            function(xs, ys, batch),
            function(few.x, few.y, batch, shares=shares),
        ]

    yield "lower()", lambda: _value(oracle, problem.lower, few.x, few.y, few.train)
    yield "upper()", lambda: _value(oracle, problem.upper, few.x, few.y, few.val)
    for role, statistics, x, batch in few.statistics:
        yield f"the statistics of {role!r}", partial(_value, oracle, statistics, x, few.y, batch)
    yield "the gradient of lower()", derived(oracle.lower_grad, few.train)
    yield "the gradient of upper()", derived(oracle.upper_grads, few.val)
    second = lambda x, y, batch, **shares: oracle.second_order(x, y, y, batch, **shares)
    yield _SECOND, derived(second, few.train)


@contextmanager
def _fallbacks(slow: list[str]) -> Iterator[None]:
    """Record torch's warnings of slow vmaps instead of showing them, because a trial may reject vmap."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "There is a performance drop")
        yield
    slow += [str(one.message) for one in told]
