"""Norm of the hypergradient during a run of any algorithm, computed by a separate oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.oracle.hypergradient import newton, solve_cg
from fedbilevel.oracle.population import Added, Points, Population
from fedbilevel.oracle.portions import Portion, size, squares, total

_TOLERANCE, _ROUGH = 1e-6, 1e-2  # requested residual of a system, and the largest that rounding may leave
_MOST_STEPS, _MOST_PRODUCTS = 15, 500  # Newton's steps, and products for each solve


def measured(population: Population, x: Points, y: Points, added: Added = lambda own: own) -> float:
    """Return |grad Phi(x)| over all data, with every client at its own x.

    Newton's method finds y*(x) from y, and the linear system is solved there, for a few clients at
    a time. For a private x the result is the root mean square over clients of f_x,i - J_i u. The
    result is NaN if the lower level is not strongly convex or is not solved within the limits.
    """
    number, private = population.sum_of_weights(added), population.problem.scopes.upper == "private"
    first = list(islice(population.portions(x, y), 2))
    # portions that do not fit into memory at once are made anew for every product
    again = lambda: first if len(first) == 1 else population.portions(x, y)
    views: Iterable[_View] = [_View(population, again, mean=lambda summed: added([summed])[0] / number)]
    if population.problem.scopes.lower == "local":
        one = lambda part: _View(population, lambda: [part])
        views = map(one, population.portions(x, y))
    with torch.no_grad():
        blocks = [
            total(squares(rows) if private else rows, part.weights) for view in views for part, rows in view.blocks()
        ]
    return size(added([torch.stack(blocks).sum(0)])[0], number, of_squares=private)


class _View:
    """One lower level and its clients: all clients, or a few clients with a lower level each.

    mean: function that turns a sum over the clients hosted here into the mean of all clients.
    """

    def __init__(
        self,
        population: Population,
        parts: Callable[[], Iterable[Portion]],
        mean: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.oracle, self.problem, self.dtype = population.watcher, population.problem, population.dtype
        self.parts, self.mean = parts, mean

    def lower(self, ask: Callable[[Portion], Tensor]) -> Tensor:
        """Return a (1, d) tensor for one lower level, or one row per client."""
        if self.mean is None:
            [rows] = map(ask, self.parts())
            return rows
        summed = torch.stack([total(ask(part), part.weights) for part in self.parts()]).sum(0)
        return self.mean(summed).to(self.dtype)[None]

    def spread(self, rows: Tensor) -> Tensor:
        return rows if self.mean is None else rows[0]

    def blocks(self) -> Iterator[tuple[Portion, Tensor]]:
        """Yield f_x,i - J_i u of the clients of every portion, NaN if y*(x) or u was not found."""
        oracle, spread = self.oracle, self.spread
        start = self.lower(lambda part: part.y.expand(len(part.weights), -1))
        value = lambda y: self.lower(
            lambda part: part.mean("train", partial(oracle.evaluate, self.problem.lower, part.x, spread(y)))[:, None]
        )[:, 0]
        gradient = lambda y: self.lower(lambda part: part.mean("train", partial(oracle.lower_grad, part.x, spread(y))))
        product = lambda y, v: self.lower(
            lambda part: part.mean("train", partial(oracle.hessian_product, part.x, spread(y), spread(v)))
        )
        limits = {"max_iterations": _MOST_STEPS, "max_products": _MOST_PRODUCTS}
        try:
            y, solved = newton(start, value, gradient, product, tolerance=_TOLERANCE**2, **limits)
            right = self.lower(lambda part: part.mean("val", partial(oracle.upper_grad_y, part.x, spread(y))))
            found = solve_cg(lambda v: product(y, v), right, tolerance=_TOLERANCE, max_products=_MOST_PRODUCTS)
            # the last product is that of the residual
            solved = solved and found.num_products <= _MOST_PRODUCTS and found.residual <= _ROUGH
        except ProblemError:
            solved = False
        for part in self.parts():
            if solved:
                direct = part.mean("val", partial(oracle.upper_grad_x, part.x, spread(y)))
                product_x = partial(oracle.jacobian_product, part.x, spread(y), spread(found.u))
                yield part, direct - part.mean("train", product_x)
            else:
                unknown = part.mean("val", partial(oracle.upper_grad_x, part.x, part.y))
                yield part, torch.full_like(unknown, torch.nan)
