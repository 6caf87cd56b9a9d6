"""Heterogeneous quadratics with known closed forms: the reference of all tests.

    g_i(x, y) = 1/2 y'A_i y - y'(B_i x + c_i) + bend * sum log cosh(y + cross * mean x)
    f_i(x, y) = 1/2 (y - t_i)'D_i (y - t_i) + 1/2 x'R_i x - r_i'x + cross * x'B_i'y

Clients differ in every matrix, so the mean of local hypergradients is not the hypergradient of the
mean. Samples of one client differ too, so that minibatches are noisy. `cross > 0` makes f_x depend
on y and f_y on x (and, with bend, J on y), which shows a derivative of f taken at the wrong point.
`bend > 0` makes the lower level non-quadratic (its curvature then depends on y, which shows a
Hessian taken at the wrong point); the closed forms are for bend = 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.task import Built, Shapes, Task


@dataclass(frozen=True, kw_only=True)
class Quadratic(Task):
    num_clients: int = setting(5, "clients", least=1)
    dim_upper: int = setting(4, "length of x", symbol="d_x", least=1)
    dim_lower: int = setting(6, "length of y", symbol="d_y", least=1)
    heterogeneity: float = setting(1.0, "how much clients differ; 0: identical clients", least=0)
    noise: float = setting(0.3, "how much the samples of one client differ", least=0, most=0.9)
    num_samples: int = setting(4, "samples of the first client; each further client has one more", least=1)
    bend: float = setting(0.0, "weight of a non-quadratic convex term in the lower level", least=0)
    cross: float = setting(0.0, "weight of terms that couple x and y in the upper level", least=0)
    lower: Literal["global", "local"] = setting("global", "one y for all clients, or one each")
    upper: Literal["shared", "private"] = setting("shared", "one x for all clients, or one each")
    client_weights: Literal["equal", "by_samples"] = setting(
        "equal", "clients count equally in means, or in proportion to their training samples"
    )
    data_seed: int = setting(7, "seed of the data", least=0)

    suggested = {
        "*": {"lr_lower": 0.2, "lr_system": 0.2, "lr_upper": 0.05, "num_local_steps": 1},
        "hgp": {"lr_lower": 0.1, "lr_system": 0.1, "num_terms": 80},
        "newtonfbo": {"move_upper": 0.02, "averaging": 0.9},
        "sparkle": {"lr_lower": 0.12, "lr_system": 0.12, "lr_upper": 0.03},
    }
    suggested_iterations = {"*": 500}
    headline = ("hypergradient_norm", "distance", "upper_loss")
    needs = {
        "train": {"A": "matrix (d_y, d_y)", "B": "matrix (d_y, d_x)", "c": "vector (d_y,)"},
        "val": {
            "D": "matrix (d_y, d_y)",
            "t": "vector (d_y,)",
            "R": "matrix (d_x, d_x)",
            "r": "vector (d_x,); with cross also E (d_y, d_x)",
        },
    }

    def build(self) -> Built:
        clients = self.clients()
        problem = self.problem(Shapes.of(clients[0]))
        # the closed form is that of all clients together
        if self.upper == "shared" and self.lower == "global" and self.bend == 0:
            problem = dataclasses.replace(problem, diagnostics=self.closed_form().diagnostics())
        return Built(problem, clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        if self.cross and not shapes.has("val", "E"):
            raise ProblemError(
                "quadratic with cross above 0 needs val/E, a matrix (d_y, d_x), but there is none: add that field."
            )
        dx, dy = self.dim_upper, self.dim_lower
        sides = {
            "A": (dy, dy),
            "B": (dy, dx),
            "c": (dy,),
            "D": (dy, dy),
            "t": (dy,),
            "R": (dx, dx),
            "r": (dx,),
            **({"E": (dy, dx)} if self.cross else {}),
        }
        for name, shape in sides.items():
            if shapes.sample(name, "train", "val") != shape:
                raise ProblemError(
                    f"samples of {name} have the shape {shapes.sample(name, 'train', 'val')}, expected {shape} with "
                    f"dim_upper {dx} and dim_lower {dy}."
                )
        return Problem(
            upper=lambda x, y, batch: (
                _upper(x, y, batch)
                + (
                    self.cross * torch.einsum("s,sij,i,j->", batch["weight"], batch["E"], y["y"], x["x"])
                    if self.cross
                    else 0
                )
            ),
            lower=(
                lambda x, y, batch: (
                    _lower(x, y, batch) + self.bend * _log_cosh(y["y"] + self.cross * x["x"].mean()).sum()
                )
            )
            if self.bend
            else _lower,
            x0=(lambda sizes: {"x": torch.zeros(self.dim_upper)})
            if self.upper == "private"
            else {"x": torch.zeros(self.dim_upper)},
            y0={"y": torch.zeros(self.dim_lower)},
            scopes=Scopes(lower=self.lower, upper=self.upper),
            client_weights=self.client_weights,
            name="quadratic",
        )

    def clients(self) -> list[dict[str, dict[str, np.ndarray]]]:
        rng = np.random.default_rng(self.data_seed)
        dx, dy, het = self.dim_upper, self.dim_lower, self.heterogeneity

        def spd(size: int, scale: float) -> np.ndarray:
            root = rng.standard_normal((size, size)) / np.sqrt(size)
            return scale * root @ root.T

        A, B, c = np.eye(dy) + spd(dy, 0.5), rng.standard_normal((dy, dx)), rng.standard_normal(dy)
        D, t, R, r = (
            np.eye(dy) + spd(dy, 0.5),
            rng.standard_normal(dy),
            0.5 * np.eye(dx) + spd(dx, 0.5),
            rng.standard_normal(dx),
        )
        clients = []
        for i in range(self.num_clients):
            mine = {
                "A": A + het * spd(dy, 1.0),
                "B": B + het * rng.standard_normal((dy, dx)) / 2,
                "c": c + het * rng.standard_normal(dy),
                "D": D + het * spd(dy, 0.5),
                "t": t + het * rng.standard_normal(dy),
                "R": R + het * spd(dx, 0.5),
                "r": r + het * rng.standard_normal(dx),
            }
            num = self.num_samples + i
            # sums to zero, so that the mean over samples is the client's value
            spread = self.noise * np.linspace(-1, 1, num) if num > 1 else np.zeros(1)

            def samples(name: str, mine: dict[str, np.ndarray] = mine, spread: np.ndarray = spread) -> np.ndarray:
                return (1 + rng.permutation(spread).reshape(-1, *[1] * mine[name].ndim)) * mine[name]

            clients.append(
                {"train": {name: samples(name) for name in "ABc"}, "val": {name: samples(name) for name in "DtRr"}}
            )
            if self.cross:
                mine["E"] = mine["B"]
                clients[-1]["val"]["E"] = samples("E")
        return clients

    def closed_form(self) -> ClosedForm:
        means = [
            {name: value.mean(0) for role in client.values() for name, value in role.items()}
            for client in self.clients()
        ]
        # t enters f through D (y - t): its mean over samples must be taken of D t and t'D t
        for client, mean in zip(self.clients(), means, strict=True):
            d, t = client["val"]["D"], client["val"]["t"]
            mean["Dt"] = np.einsum("sij,sj->i", d, t) / len(t)
            mean["tDt"] = np.einsum("sij,si,sj->", d, t, t) / len(t)
        sizes = np.array([len(client["train"]["c"]) for client in self.clients()], float)
        share = sizes / sizes.sum() if self.client_weights == "by_samples" else np.full(len(means), 1 / len(means))
        stacked = {name: np.stack([mean[name] for mean in means]) for name in means[0]}
        stacked["E"] = self.cross * stacked.get("E", np.zeros_like(stacked["B"]))
        return ClosedForm(stacked, share, self.lower == "local", self.upper == "private")


class ClosedForm(NamedTuple):
    """Closed forms in plain numpy on the clients' matrices, without the library's derivatives."""

    stacked: dict[str, np.ndarray]  # name -> (n, ...)
    share: np.ndarray  # (n,) weights of the mean
    local: bool
    private: bool

    def _mean(self, rows: np.ndarray) -> np.ndarray:
        return np.tensordot(self.share, rows, axes=1)

    def lower_solution(self, x: np.ndarray) -> np.ndarray:
        """Return y*(x) as (d_y,), or as (n, d_y) for a local lower level.

        x: an array (d_x,) or (n, d_x).
        """
        s, xs = self.stacked, np.broadcast_to(x, (len(self.share), self.stacked["B"].shape[2]))
        right = np.einsum("nij,nj->ni", s["B"], xs) + s["c"]
        return (
            np.linalg.solve(s["A"], right[..., None])[..., 0]
            if self.local
            else np.linalg.solve(self._mean(s["A"]), self._mean(right))
        )

    def system_solution(self, x: np.ndarray) -> np.ndarray:
        """Return u*(x) in the shape of y*(x)."""
        s, y = self.stacked, self.lower_solution(x)
        xs = np.broadcast_to(x, (len(self.share), s["B"].shape[2]))
        fy = (
            np.einsum("nij,nj->ni", s["D"], np.broadcast_to(y, s["c"].shape))
            - s["Dt"]
            + np.einsum("nij,nj->ni", s["E"], xs)
        )
        return (
            np.linalg.solve(s["A"], fy[..., None])[..., 0]
            if self.local
            else np.linalg.solve(self._mean(s["A"]), self._mean(fy))
        )

    def hypergradient(self, x: np.ndarray) -> np.ndarray:
        """Return the hypergradient (d_x,), or the rows f_x,i - J_i u for a private x.

        J_i is -B_i'.
        """
        s, u = self.stacked, np.broadcast_to(self.system_solution(x), self.stacked["c"].shape)
        xs = np.broadcast_to(x, (len(self.share), s["B"].shape[2]))
        y = np.broadcast_to(self.lower_solution(x), s["c"].shape)
        blocks = (
            np.einsum("nij,nj->ni", s["R"], xs)
            - s["r"]
            + np.einsum("nij,ni->nj", s["B"], u)
            + np.einsum("nij,ni->nj", s["E"], y)
        )
        return blocks if self.private else self._mean(blocks)

    def objective(self, x: np.ndarray) -> float:
        """Return the upper loss at x and y*(x)."""
        s, ys = self.stacked, np.broadcast_to(self.lower_solution(x), self.stacked["c"].shape)
        xs = np.broadcast_to(x, (len(self.share), s["B"].shape[2]))
        product = lambda matrix, left, right: np.einsum("nij,ni,nj->n", matrix, left, right)
        of_y = 0.5 * product(s["D"], ys, ys) - (s["Dt"] * ys).sum(1) + 0.5 * s["tDt"]
        of_x = 0.5 * product(s["R"], xs, xs) - (s["r"] * xs).sum(1)
        return float(self._mean(of_y + of_x + product(s["E"], ys, xs)))

    def solution(self) -> np.ndarray:
        """Return x*, which solves a linear system because the hypergradient is affine in x."""
        shape = (len(self.share), self.stacked["B"].shape[2]) if self.private else (self.stacked["B"].shape[2],)
        size = int(np.prod(shape))
        constant = self.hypergradient(np.zeros(shape)).ravel()
        columns = [self.hypergradient(unit.reshape(shape)).ravel() - constant for unit in np.eye(size)]
        return np.linalg.solve(np.stack(columns, axis=1), -constant).reshape(shape)

    def diagnostics(self) -> Callable[[Any, Any], dict[str, float]]:
        """Return a function of x and y that measures x; it solves for x* once."""
        solution = functools.cache(self.solution)

        def measured(x: Any, y: Any) -> dict[str, float]:
            point = x["x"].double().cpu().numpy()
            return {
                "hypergradient_norm": float(np.linalg.norm(self.hypergradient(point))),
                "distance": float(np.linalg.norm(point - solution())),
                "exact_upper_loss": self.objective(point),
            }

        return measured


def _log_cosh(v: Tensor) -> Tensor:
    return v + torch.nn.functional.softplus(-2 * v) - math.log(2)  # no overflow for large v


def _lower(x: Any, y: Any, batch: Any) -> Tensor:
    # means over samples come first: they do not depend on x and y, so that repeated evaluations share them
    w, v = batch["weight"], y["y"]
    curved, mixed, linear = _mean(w, batch["A"]), _mean(w, batch["B"]), _mean(w, batch["c"])
    return v @ (0.5 * (curved @ v) - mixed @ x["x"] - linear)


def _upper(x: Any, y: Any, batch: Any) -> Tensor:
    w, v, z = batch["weight"], y["y"], x["x"]
    pulled = (batch["D"] @ batch["t"][..., None])[..., 0]  # D t, and D't where D is not symmetric
    pushed = (batch["t"][..., None, :] @ batch["D"])[..., 0, :]
    fixed = 0.5 * (w * (batch["t"] * pulled).sum(-1)).sum()
    of_y = v @ (0.5 * (_mean(w, batch["D"]) @ v) - 0.5 * _mean(w, pulled + pushed)) + fixed
    return of_y + z @ (0.5 * (_mean(w, batch["R"]) @ z) - _mean(w, batch["r"]))


def _mean(weight: Tensor, samples: Tensor) -> Tensor:
    """Return the mean over samples, of vectors or matrices."""
    return (weight @ samples.flatten(1)).view(samples.shape[1:])
