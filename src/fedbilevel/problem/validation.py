"""Checks of a problem against its clients' data before a run: losses, statistics and figures."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.columns import BESIDE, COLUMNS, DIAGNOSTICS
from fedbilevel.errors import ProblemError, reason
from fedbilevel.problem.client_data import ClientData
from fedbilevel.problem.contraction import contracted, counted
from fedbilevel.problem.layout import Layout, Tree
from fedbilevel.problem.modules import RefuseNoise
from fedbilevel.problem.problem import Fields, Problem, Statistics, with_features

_ENOUGH = 32  # samples for a trial of statistics: among fewer, a count of right answers may be 0
_TAKEN = {*BESIDE, *COLUMNS, *DIAGNOSTICS, "upper_loss", "lower_loss", "num_sites"}  # columns of every measurement


def check_kind(problem: Any) -> None:
    """Raise unless `problem` is a Problem."""
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"problem is of type {type(problem).__name__}, expected a Problem, "
            "e.g. Problem(upper=..., lower=..., x0=..., y0=...)."
        )


@torch.enable_grad()
def check_losses(
    problem: Problem, data: ClientData, layout_x: Layout, layout_y: Layout, x: Tensor, y: Tensor
) -> set[str]:
    """Evaluate both losses on a few samples of the first client, and raise for an invalid loss.

    Returns which of the two (`upper`, `lower`) give one value per sample instead of a scalar.
    """
    per_sample = set()
    for label, role in (("lower", "train"), ("upper", "val")):
        xs, ys = x.clone().requires_grad_(), y.clone().requires_grad_()
        trial = _Trial(problem, label, *_samples(data, role, x.device))
        start = layout_x.unravel(xs), layout_y.unravel(ys)
        value = trial.at_start(*start)
        # a symmetry of the start may hide the effect of padding: at y = 0 all samples may have the same loss
        point = layout_x.unravel(away(xs)), layout_y.unravel(away(ys))
        if trial.padded_at(start, point, value, (xs, ys)):
            per_sample.add(label)
        if problem.draws.get(role):
            trial.with_draws(start, problem.draws[role])
        if label == "lower":
            _check_dependence(value, start[1])
    return per_sample


def reads_index(problem: Problem, data: ClientData, layout_x: Layout, layout_y: Layout, x: Tensor, y: Tensor) -> bool:
    """Return whether the upper loss reads the numbers of its samples."""

    tree = layout_x.unravel(x)
    fields = Watched(with_features(problem, tree, _samples(data, "val", x.device)[0]))
    with torch.no_grad():
        problem.upper(tree, layout_y.unravel(y), fields)
    return "index" in fields.read


class Watched(UserDict[str, Tensor]):
    """Fields of a batch that remember which of them were read."""

    def __init__(self, fields: Fields) -> None:
        self.read: set[str] = set()
        super().__init__(fields)

    def __getitem__(self, name: str) -> Tensor:  # `get` and `items` use it
        self.read.add(name)
        return super().__getitem__(name)


def _samples(data: ClientData, role: str, device: torch.device) -> tuple[Fields, Fields]:
    """Return samples of the first client, plain and padded with samples of the last client."""
    few = torch.arange(min(4, int(data.sizes[role][0])), device=device)
    fields = data.batch(data.positions[:1], role, few[None]).row(0)
    other = torch.zeros(1, 2, dtype=torch.int64, device=device)  # padding may hold any sample
    filler = data.batch(data.positions[-1:], role, other).row(0)
    padded = {name: torch.cat([value, filler[name]]) for name, value in fields.items()}
    padded["index"] = torch.cat([few, few[:1], few[:1]])
    padded["weight"] = torch.cat([fields["weight"], torch.zeros_like(filler["weight"])])
    return fields, padded


class _Trial(NamedTuple):
    """One of the two losses, and the samples for testing it."""

    problem: Problem
    label: str
    fields: Fields
    padded: Fields

    def at_start(self, x: Tree, y: Tree) -> Tensor:
        """Return the loss at the initial point; raise if it uses random numbers or noisy layers."""
        failed = f"{self.label}() failed on a batch of the first client"
        with RefuseNoise(f"{self.label}()"):
            value, _ = self._value(x, y, self.fields, failed)
        again, _ = self._value(x, y, self.fields, failed)
        if not torch.equal(value, again):
            raise ProblemError(
                f"{self.label}() gave {value:.6g} and then {again:.6g} for the same input: "
                "a loss must not draw random numbers; move them into the data."
            )
        return value

    def with_draws(self, start: tuple[Tree, Tree], num: int) -> None:
        """Evaluate the loss on a batch with random numbers, as in a run; raise if it fails."""
        weight = self.fields["weight"]
        drawn = {**self.fields, "draw": torch.full((len(weight), num), 0.5, dtype=weight.dtype, device=weight.device)}
        self._value(*start, drawn, f"{self.label}() failed on a batch of the first client with {num} draws per sample")

    def padded_at(
        self, start: tuple[Tree, Tree], point: tuple[Tree, Tree], at_start: Tensor, leaves: tuple[Tensor, Tensor]
    ) -> bool:
        """Return whether the loss gives one value per sample; raise if padding changes it."""
        label = self.label
        try:
            plain, _ = self._value(*point, self.fields, f"{label}() failed away from the initial point")
        except ProblemError:  # the loss is not defined there
            point, plain = start, at_start
        failed = f"{label}() failed on a batch of the first client padded with samples of the last"
        other, has_samples = self._value(*point, self.padded, failed)
        if has_samples:
            _check_padding(label, plain, other, leaves)
            self._check_doubled(*point, plain)
        elif not _near(plain, other):
            raise ProblemError(
                f"{label}() gave {plain:.6g} on a batch and {other:.6g} on the same batch with two padded samples of "
                "weight 0: write (batch['weight'] * loss_per_sample).sum() instead of a mean over samples, or return "
                "one value per sample (reduction='none')."
            )
        return has_samples

    def _check_doubled(self, x: Tree, y: Tree, plain: Tensor) -> None:
        """Raise if the values per sample are already multiplied by the weights."""
        twice = {name: torch.cat([value, value]) for name, value in self.fields.items()}
        twice["weight"] = twice["weight"] / 2
        failed = f"{self.label}() failed on a batch that holds every sample twice"
        doubled, _ = self._value(x, y, twice, failed)
        if not _near(plain, doubled):
            raise ProblemError(
                f"{self.label}() returns one value per sample, and their mean was {plain:.6g} on a batch and "
                f"{doubled:.6g} on a batch with every sample twice: return the loss of each sample by itself, "
                "without batch['weight'], which the library multiplies with."
            )

    def _value(self, x: Tree, y: Tree, fields: Fields, failed: str) -> tuple[Tensor, bool]:
        """Return the loss of a batch as a scalar, and whether the loss has one value per sample."""
        label = f"{self.label}()"
        try:
            value = getattr(self.problem, self.label)(x, y, with_features(self.problem, x, fields))
        except ProblemError:
            raise
        except Exception as error:  # the user's function may raise anything; name it, keep the cause
            shapes = {name: tuple(value.shape) for name, value in fields.items()}
            raise ProblemError(f"{failed} of shapes {shapes}: {reason(error)}.") from error
        shape = tuple(fields["weight"].shape)
        if not isinstance(value, Tensor) or tuple(value.shape) not in ((), shape) or not value.is_floating_point():
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
            raise ProblemError(
                f"{label} returned {got} on {shape[0]} samples, expected a tensor of floats with one value per "
                f"sample, shape {shape}, or a scalar: return the loss of each sample, e.g. with reduction='none'."
            )
        mean = contracted(value, fields["weight"])
        if not torch.isfinite(mean):
            raise ProblemError(
                f"{label} is {mean:.6g} at the initial point on the first client: "
                "check the data and the initial values."
            )
        return mean, value.ndim > 0


def _check_dependence(value: Tensor, y: Tree) -> None:
    """Raise if the lower loss does not depend on one of the tensors of y."""
    gradients: Any = [None] * len(y)
    if value.requires_grad:
        gradients = torch.autograd.grad(value, list(y.values()), allow_unused=True)
    unused = [name for name, gradient in zip(y, gradients, strict=True) if gradient is None]
    if unused:
        raise ProblemError(
            f"lower() does not depend on y[{unused[0]!r}], so y*(x) is not determined: "
            "use it in the lower loss or leave it out of y0."
        )


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _check_padding(label: str, plain: Tensor, padded: Tensor, at: tuple[Tensor, Tensor]) -> None:
    """Raise if padding changes the mean of the values per sample, or its gradient is infinite."""
    if not _near(plain, padded):
        raise ProblemError(
            f"{label}() returns one value per sample, and the mean over real samples was {plain:.6g} on a batch and "
            f"{padded:.6g} on the same batch with two padded samples: the loss of a sample may depend on other "
            "samples only through sums with batch['weight']."
        )
    if not padded.requires_grad:
        return
    gradients = lambda value: torch.autograd.grad(value, at, allow_unused=True, retain_graph=True)
    finite = [
        all(bool(torch.isfinite(part).all()) for part in gradients(value) if part is not None)
        for value in (plain, padded)
    ]
    if finite == [True, False]:
        raise ProblemError(
            f"{label}() has a gradient that is not finite on padded samples, whose batch['weight'] is 0: "
            "return the loss of each sample by itself, and divide by no weight."
        )


@torch.no_grad()
def check_statistics(
    problem: Problem, data: ClientData, layout_x: Layout, layout_y: Layout, own_x: Callable[[int], Tensor], y: Tensor
) -> None:
    """Evaluate the statistics of every role with and without padding, and raise if they differ.

    The samples are those of the first client that has samples in the role.
    """
    for role, statistics in problem.statistics.items():
        if role not in data.sizes:
            raise ProblemError(
                f"there are statistics for the role {role!r}, expected a role of the clients: {', '.join(data.sizes)}."
            )
        if not int(data.sizes[role].max()):
            continue
        first = int((data.sizes[role] > 0).nonzero()[0])
        some = torch.arange(min(_ENOUGH, int(data.sizes[role][first])), device=y.device)
        fields = data.batch(data.positions[first : first + 1], role, some[None]).row(0)
        padded = {name: torch.cat([value, value]) for name, value in fields.items()}
        padded["weight"] = torch.cat([fields["weight"], torch.zeros_like(fields["weight"])])
        x = own_x(first)
        for start_x, start_y in ((x, y), (away(x), away(y))):  # a symmetry of the start may hide what padding does
            point = layout_x.unravel(start_x), layout_y.unravel(start_y)
            try:
                plain = _count(problem, role, statistics, *point, fields)
            except ProblemError:
                if start_x is x:
                    raise
                continue  # they are not defined away from the start
            _compare_counts(role, plain, _count(problem, role, statistics, *point, padded))


def _compare_counts(role: str, plain: Mapping[str, Tensor], padded: Mapping[str, Tensor]) -> None:
    for name in (name for name in plain if name in padded):
        one, other = plain[name].double(), padded[name].double()
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ProblemError(
                f"the statistics of {role!r} gave {name!r} = {plain[name]:.6g} on a batch and {padded[name]:.6g} on "
                "the same batch with padded samples of weight 0: return one value per sample, which the library sums "
                "over real samples, or count only where batch['weight'] > 0."
            )


def _count(problem: Problem, role: str, statistics: Statistics, x: Tree, y: Tree, fields: Fields) -> dict[str, Tensor]:
    """Return the statistics of one batch, summed over its real samples."""
    try:
        found = statistics(x, y, with_features(problem, x, fields))
    except Exception as error:  # the user's function may raise anything; name it, keep the cause
        shapes = {name: tuple(value.shape) for name, value in fields.items()}
        raise ProblemError(
            f"the statistics of {role!r} failed on a batch of shapes {shapes}: {reason(error)}."
        ) from error
    if not isinstance(found, Mapping):
        raise ProblemError(
            f"the statistics of {role!r} returned {type(found).__name__}, expected a dict of tensors: "
            "one value per sample each, or a scalar."
        )
    shape = tuple(fields["weight"].shape)
    for name, value in found.items():
        if not isinstance(value, Tensor) or tuple(value.shape) not in ((), shape):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ProblemError(
                f"the statistics of {role!r} returned {name!r} as {got} on {shape[0]} samples, expected a tensor with "
                f"one value per sample, shape {shape}, or a scalar: sum over everything but the samples."
            )
    return counted(found, fields["weight"])


def own_figures(label: str, function: Callable[..., Any], *given: Any) -> dict[str, float]:
    """Call the user's `metrics`, `across` or `diagnostics`, and check the returned figures."""
    try:
        found = function(*given)
    except Exception as error:  # the user's function may raise anything; name it, keep the cause
        raise ProblemError(f"{label}() failed: {reason(error)}.") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, int | float) for value in found.values()):
        raise ProblemError(f"{label}() returned {found!r:.80}, expected a dict of numbers: use float(...) for tensors.")
    if twice := _TAKEN & set(found):
        raise ProblemError(
            f"{label}() gives a figure named {min(twice)!r}, which is the name of a column that every run has: "
            "choose another name."
        )
    return dict(found)


def away(vector: Tensor) -> Tensor:
    """Return a fixed point near `vector` that has none of its symmetries."""
    return vector + 0.1 * torch.arange(1, vector.shape[-1] + 1, dtype=vector.dtype, device=vector.device).cos()
