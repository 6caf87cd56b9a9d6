"""Derivatives of the two losses of one client, on flat vectors.

Each function takes the upper and the lower loss and returns a function of vectors and fields.
H v and J v come from one vector-Jacobian product of the lower gradient: with G = grad_y g, the
pullback of v is (d<G,v>/dx, d<G,v>/dy) = (J v, H v).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from fedbilevel.problem.problem import Fields

FlatLoss = Callable[[Tensor, Tensor, Fields], Tensor]
Build = Callable[[FlatLoss, FlatLoss], Callable[..., Any]]


def lower_grad(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return grad(lower, argnums=1)


def lower_grad_x(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return grad(lower, argnums=0)


def upper_grad_x(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    return grad(upper, argnums=0)


def upper_grad_y(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    return grad(upper, argnums=1)


def upper_grads(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    return grad(upper, argnums=(0, 1))


def _alone(number: int, *argnums: int) -> Build:
    """Return gradients of one client by `torch.autograd.grad`, with the numbers of `torch.func.grad`.

    `torch.func.grad` keeps the graph of the gradient, and knows neither checkpoints nor hooks.

    number: 0 for the upper loss, 1 for the lower.
    argnums: 0 for the gradient by x, 1 by y.
    """

    def build(*losses: FlatLoss) -> Callable[..., Any]:
        def gradients(x: Tensor, y: Tensor, fields: Fields) -> Any:
            points = [x.detach(), y.detach()]
            wanted = [points[argnum].requires_grad_() for argnum in argnums]
            with torch.enable_grad():
                value = losses[number](points[0], points[1], fields)
            if value.requires_grad:
                found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
            else:
                found = tuple(torch.zeros_like(point) for point in wanted)
            return found if len(found) > 1 else found[0]

        return gradients

    return build


def _product(gradient: Callable[..., Tensor], v: Tensor, *points: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the derivatives of gradient(*points) . v by the points, and gradient(*points).

    `vjp` computes the same values, but imports sympy to compare two shapes.
    """

    def dotted(*at: Tensor) -> tuple[Tensor, Tensor]:
        value = gradient(*at)
        return torch.dot(value, v), value

    derivatives, value = grad(dotted, argnums=tuple(range(len(points))), has_aux=True)(*points)
    return derivatives, value


def pull_both(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    def pull(x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> tuple[Tensor, Tensor]:
        (jv, hv), _ = _product(lambda x, y: grad(lower, argnums=1)(x, y, fields), v, x, y)
        return jv, hv

    return pull


def pull_x(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return lambda x, y, v, fields: _product(lambda x: grad(lower, argnums=1)(x, y, fields), v, x)[0][0]


def pull_y(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    return lambda x, y, v, fields: _product(lambda y: grad(lower, argnums=1)(x, y, fields), v, y)[0][0]


def upper_by_features(upper: FlatLoss, _lower: FlatLoss) -> Callable[..., Any]:
    """Return the gradients by x with the features fixed, and by the features."""
    return lambda x, y, fields: grad(lambda x, features: upper(x, y, {**fields, "features": features}), argnums=(0, 1))(
        x, fields["features"]
    )


def pull_by_features(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
    """Return J v by x with the features fixed, and by the features."""

    def pull(x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> tuple[Tensor, Tensor]:
        gradient = lambda x, features: grad(lower, argnums=1)(x, y, {**fields, "features": features})
        (direct, through), _ = _product(gradient, v, x, fields["features"])
        return direct, through

    return pull


def all_directions(one_upper: bool, one_second: bool, one_lower: bool) -> Build:
    """Return (f_x - J u, g_y, H u - f_y).

    The flags say which derivatives share a batch: f_x with f_y, J u with H u, and g_y with J u.
    """

    def build(upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
        def directions(x: Tensor, y: Tensor, u: Tensor, *fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
            b_gy, b_fx, b_fy, b_ju, b_hu = fields
            if one_second:  # first, because its graph is the largest
                (d_ju, d_hu), value = _product(lambda x, y: grad(lower, argnums=1)(x, y, b_ju), u, x, y)
            else:
                value, d_ju, d_hu = None, pull_x(upper, lower)(x, y, u, b_ju), pull_y(upper, lower)(x, y, u, b_hu)
            d_gy = value if one_lower and value is not None else grad(lower, argnums=1)(x, y, b_gy)
            if one_upper:
                d_fx, d_fy = grad(upper, argnums=(0, 1))(x, y, b_fx)
            else:
                d_fx, d_fy = grad(upper, argnums=0)(x, y, b_fx), grad(upper, argnums=1)(x, y, b_fy)
            return d_fx - d_ju, d_gy, d_hu - d_fy

        return directions

    return build


# ---- the same derivatives, for one client at a time ------------------------------------------------------------------


def _pulled(lower: FlatLoss, x: Tensor, y: Tensor, v: Tensor, fields: Fields, argnums: tuple[int, ...]) -> Any:
    """Return the derivatives of grad_y g . v by x (0) and y (1), and grad_y g, from one graph.

    `torch.func.grad` would also keep a graph of the second derivatives.
    """
    points = [x.detach(), y.detach().requires_grad_()]
    wanted = [points[argnum].requires_grad_() for argnum in argnums]
    zeros = lambda: tuple(torch.zeros_like(point) for point in wanted)
    with torch.enable_grad():
        value = lower(points[0], points[1], fields)
        if not value.requires_grad:
            return zeros(), torch.zeros_like(y)
        (gradient,) = torch.autograd.grad(
            value, [points[1]], create_graph=True, allow_unused=True, materialize_grads=True
        )
        dotted = torch.dot(gradient, v)  # `grad_outputs` would import sympy to compare two shapes
    if not dotted.requires_grad:
        return zeros(), gradient.detach()
    return torch.autograd.grad(dotted, wanted, allow_unused=True, materialize_grads=True), gradient.detach()


def _pulled_alone(*argnums: int) -> Build:
    def build(_upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
        def pull(x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> Any:
            found, _ = _pulled(lower, x, y, v, fields, argnums)
            return found if len(found) > 1 else found[0]

        return pull

    return build


def _directions_alone(one_upper: bool, one_second: bool, one_lower: bool) -> Build:
    def build(upper: FlatLoss, lower: FlatLoss) -> Callable[..., Any]:
        losses = upper, lower

        def directions(x: Tensor, y: Tensor, u: Tensor, *fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
            b_gy, b_fx, b_fy, b_ju, b_hu = fields
            gradient = None
            if one_second:  # first, because its graph is the largest
                (d_ju, d_hu), gradient = _pulled(lower, x, y, u, b_ju, (0, 1))
            else:
                (d_ju,), _ = _pulled(lower, x, y, u, b_ju, (0,))
                (d_hu,), _ = _pulled(lower, x, y, u, b_hu, (1,))
            d_gy = gradient if one_lower and gradient is not None else _alone(1, 1)(*losses)(x, y, b_gy)
            del gradient
            if one_upper:
                d_fx, d_fy = _alone(0, 0, 1)(*losses)(x, y, b_fx)
            else:
                d_fx, d_fy = _alone(0, 0)(*losses)(x, y, b_fx), _alone(0, 1)(*losses)(x, y, b_fy)
            return d_fx - d_ju, d_gy, d_hu - d_fy

        return directions

    return build


ALONE: dict[Build, Build] = {
    lower_grad: _alone(1, 1),
    lower_grad_x: _alone(1, 0),
    upper_grad_x: _alone(0, 0),
    upper_grad_y: _alone(0, 1),
    upper_grads: _alone(0, 0, 1),
    pull_both: _pulled_alone(0, 1),
    pull_x: _pulled_alone(0),
    pull_y: _pulled_alone(1),
}
ALONE_DIRECTIONS = {flags: _directions_alone(*flags) for flags in itertools.product((False, True), repeat=3)}
# derivatives of the lower loss that need kernels with second derivatives
ALONE_SECOND = {*ALONE_DIRECTIONS.values(), *(ALONE[build] for build in (pull_both, pull_x, pull_y))}
