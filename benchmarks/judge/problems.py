"""The problems of benchmark_bilevel and its measures: the value function, and the squared norm of its gradient.

quadratics  per sample 1/2 (a y)^2 + 1/2 (b x)^2 + (c x)(e y) + l y + m x at both levels, with the spectra of that
            benchmark: curvature in y and x from mu to 1, cross terms from mu to 0.1. Its generator is JAX's, so
            the draws differ.
logistic    one penalty exp(x_k) per weight, learned from validation samples, on LIBSVM's a9a: the benchmark's own
            ijcnn1 is not on a package registry. `digits` is the same on the embedded digits, odd against even.

Measures are in float64 over all samples: y*(x) and the linear system are solved by factorisation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.data.sets.a9a import a9a
from fedbilevel.data.sets.digits import digits
from fedbilevel.problem.problem import Problem

Fields = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]  # (x, y, samples) -> one loss per sample


@dataclass(frozen=True)
class Judged:
    """A problem for one client: losses per sample, samples of both levels, and the start.

    curvature: the Hessian of the lower loss in y over all samples.
    """

    upper: Loss
    lower: Loss
    curvature: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
    train: Fields
    val: Fields
    x0: Tensor
    y0: Tensor

    def problem(self) -> Problem:
        """Return the problem for the library."""
        return Problem(
            upper=lambda x, y, batch: self.upper(x["x"], y["y"], batch),
            lower=lambda x, y, batch: self.lower(x["x"], y["y"], batch),
            x0={"x": self.x0},
            y0={"y": self.y0},
        )

    def client(self) -> Any:
        """Return the samples as the library takes them."""
        return {role: {name: one.numpy() for name, one in some.items()} for role, some in self.roles().items()}

    def roles(self) -> dict[str, Fields]:
        return {"train": self.train, "val": self.val}

    def measures(self, x: Tensor) -> dict[str, float]:
        """Return the value function and the squared norm of its gradient at x."""
        x = x.detach().double()
        train, val = ({name: one.double() for name, one in some.items()} for some in (self.train, self.val))
        f, g = (lambda x, y: self.upper(x, y, val).mean()), (lambda x, y: self.lower(x, y, train).mean())
        hessian = lambda y: self.curvature(x, y, train)
        y = _newton(lambda y: g(x, y), hessian, self.y0.double())
        fx, fy = torch.func.grad(f, argnums=(0, 1))(x, y)
        u = torch.linalg.solve(hessian(y), fy)
        indirect = torch.func.vjp(lambda x: torch.func.grad(g, argnums=1)(x, y), x)[1](u)[0]
        return {"value": float(f(x, y)), "gradient": float(((fx - indirect) ** 2).sum())}


def _newton(g: Callable[[Tensor], Tensor], hessian: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Minimise a strongly convex function by Newton's method with backtracking."""
    for _ in range(100):
        slope = torch.func.grad(g)(y)
        if float(torch.linalg.vector_norm(slope)) < 1e-11:
            break
        d, t, now = -torch.linalg.solve(hessian(y), slope), 1.0, g(y)
        while float(g(y + t * d)) > float(now + 1e-4 * t * (slope @ d)) + 1e-14 and t > 1e-8:
            t /= 2
        y = y + t * d
    return y


def _quadratic(x: Tensor, y: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    return 0.5 * (s["a"] @ y) ** 2 + 0.5 * (s["b"] @ x) ** 2 + (s["c"] @ x) * (s["e"] @ y) + s["l"] @ y + s["m"] @ x


def _of_quadratic(x: Tensor, y: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    return s["a"].T @ s["a"] / len(s["a"])


def _samples(num: int, d_y: int, d_x: int, draw: np.random.Generator, mu: float = 0.1, cross: float = 0.1) -> Fields:
    """Draw the samples of one level; means of a a', b b' and c e' have the spectra of the benchmark."""
    turn = lambda d: np.linalg.qr(draw.normal(size=(d, d)))[0]
    u_y, u_x, u, v = turn(d_y), turn(d_x), turn(d_x), turn(d_y)
    root_y, root_x = np.logspace(np.log10(mu) / 2, 0, d_y), np.r_[0, np.logspace(np.log10(mu) / 2, 0, d_x - 1)]
    common, small = draw.normal(size=(num, d_y)), min(d_x, d_y)
    scaled = common[:, :small] * np.logspace(np.log10(mu), np.log10(cross), small)
    made = {
        "a": draw.normal(size=(num, d_y)) @ (u_y * root_y @ u_y.T),
        "b": draw.normal(size=(num, d_x)) @ (u_x * root_x @ u_x.T),
        "c": scaled @ u[:, :small].T,
        "e": common @ v.T,
        "l": draw.normal(size=(num, d_y)),
        "m": draw.normal(size=(num, d_x)),
    }
    return {name: torch.tensor(rows, dtype=torch.float32) for name, rows in made.items()}


@functools.cache
def quadratics(num_train: int = 32_768, num_val: int = 1024, d_y: int = 100, d_x: int = 10) -> Judged:
    draw = np.random.default_rng(2442)
    train, val = (_samples(num, d_y, d_x, draw) for num in (num_train, num_val))
    return Judged(_quadratic, _quadratic, _of_quadratic, train, val, -2 * torch.ones(d_x), torch.zeros(d_y))


def _log_loss(x: Tensor, y: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    return torch.nn.functional.softplus(-s["sign"] * (s["z"] @ y))


def _penalised(x: Tensor, y: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    return _log_loss(x, y, s) + 0.5 * (x.exp() * y**2).sum()


def _of_penalised(x: Tensor, y: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    p = torch.sigmoid(s["z"] @ y)
    return s["z"].T @ ((p * (1 - p))[:, None] * s["z"]) / len(p) + x.exp().diag()


def _logistic(parts: Any) -> Judged:
    fields = lambda z, label: {
        "z": torch.as_tensor(np.ascontiguousarray(z), dtype=torch.float32),
        "sign": torch.as_tensor(2.0 * np.asarray(label) - 1, dtype=torch.float32),
    }
    train, val = (fields(*part) for part in parts)
    draw, d = torch.Generator().manual_seed(2442), train["z"].shape[1]
    y0 = torch.randn(d, generator=draw)
    return Judged(_log_loss, _penalised, _of_penalised, train, val, torch.rand(d, generator=draw).log(), y0)


@functools.cache
def logistic_a9a() -> Judged:
    z, label, z_test, label_test = a9a()
    return _logistic([(z, label), (z_test, label_test)])


@functools.cache
def logistic_digits() -> Judged:
    z, label = digits()
    z, odd = np.asarray(z).reshape(len(label), -1), np.asarray(label) % 2
    order = np.random.default_rng(0).permutation(len(odd))
    half = len(odd) // 2
    return _logistic([(z[some], odd[some]) for some in (order[:half], order[half:])])


PROBLEMS: dict[str, Callable[[], Judged]] = {
    "quadratics": quadratics,
    "logistic-a9a": logistic_a9a,
    "logistic-digits": logistic_digits,
}
