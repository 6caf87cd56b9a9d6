"""FedNest, FBO-AggITD and FedBiO written by hand for one network: a hidden layer x, a head y, cross-entropy.

These are complete programs of an engineer who needs one algorithm on one task. Derivatives are written
out, with residuals (probabilities minus labels) in closed form. Features are computed once per x and
cohort. The two gradients of a local SVRG step share their gather, their labels cancel, and the
probabilities at the start of the steps are gathered, not computed. Cohorts and minibatches are those of
the library. Biases are the last row of a matrix, and samples have a last entry of one.

On a GPU an engineer records the outer iteration as a graph: `Graphed` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.problems import CLASSES, L2
from benchmarks.published import Call
from fedbilevel.tasks.task import Built

Cohort = Sequence[int] | Tensor  # positions of clients; a graph reads them from a tensor


class Complete:
    """The server and its clients, which have equally many samples.

    `fednest` and `fbo_aggitd` run one outer iteration from (x, y), which are matrices, and `fedbio`
    one from (x, y, u).
    """

    def __init__(
        self, built: Built, algorithm: Any, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.algorithm = algorithm
        self.images: dict[str, Tensor] = {}  # by role: (clients, samples, pixels + 1)
        self.labels: dict[str, Tensor] = {}  # by role: (clients, samples, classes), zeros and ones
        for role in ("train", "val"):
            images = torch.stack([torch.as_tensor(client[role]["image"]) for client in built.clients])
            labels = torch.stack([torch.as_tensor(client[role]["label"]) for client in built.clients])
            self.images[role] = _with_one(images.flatten(2).to(device, dtype))
            self.labels[role] = torch.nn.functional.one_hot(labels.long(), CLASSES).to(device, dtype)
        joined = lambda weight, bias: torch.cat([weight.T, bias[None]]).to(device, dtype)
        self.x, self.y = joined(*built.problem.initial_x({}).values()), joined(*built.problem.y0.values())
        self._known: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}

    # ---- all samples of a cohort, at one point --------------------------------------------------------------------

    def _all(self, role: str, positions: Cohort, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, features and labels of a cohort, kept while x stands still."""
        key = role, id(positions) if isinstance(positions, Tensor) else tuple(positions)
        if key not in self._known:
            chosen = _as_tensor(positions, x)
            images, labels = (held[role].index_select(0, chosen).flatten(0, 1) for held in (self.images, self.labels))
            self._known[key] = images, _with_one((images @ x).relu_()), labels
        return self._known[key]

    def _upper_y(self, positions: Cohort, x: Tensor, y: Tensor) -> Tensor:
        _, features, labels = self._all("val", positions, x)
        return features.T @ ((features @ y).softmax(1) - labels) / len(features)

    def _hessian(self, positions: Cohort, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        _, features, _ = self._all("train", positions, x)
        return features.T @ _along((features @ y).softmax(1), features @ v) / len(features) + L2 * v

    def _hypergradient(self, positions: Cohort, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        images, features, labels = self._all("val", positions, x)
        direct = images.T @ _back((features @ y).softmax(1) - labels, y, features) / len(features)
        images, features, labels = self._all("train", positions, x)
        found = (features @ y).softmax(1)
        back = _back(found - labels, p, features) + _back(_along(found, features @ p), y, features)
        return direct - images.T @ back / len(features)

    # ---- local steps ----------------------------------------------------------------------------------------------

    def _lower_round(self, call: Call, x: Tensor, start: Tensor, q: Tensor | None = None) -> Tensor:
        """Local SVRG steps on y around q, by default around the gradient of the same cohort."""
        assert call.indices is not None
        _, features, labels = self._all("train", call.positions, x)
        found = (features @ start).softmax(1)
        if q is None:
            q = features.T @ (found - labels) / len(features) + L2 * start
        k, num, b = call.indices.shape
        lr, size = self.algorithm.lr_lower / num, self.images["train"].shape[1]
        places = (
            (call.indices + torch.arange(k, device=x.device).view(-1, 1, 1) * size).transpose(0, 1).reshape(num, -1)
        )
        fixed = lr * (q - L2 * start)
        y = (start - lr * q).expand(k, -1, -1)  # in the first step the two gradients are at one point
        for place in places[1:]:
            some, before = features.index_select(0, place).view(k, b, -1), found.index_select(0, place).view(k, b, -1)
            change = torch.bmm(some, y).softmax(2).sub_(before)
            y = torch.baddbmm(y * (1 - lr * L2) - fixed, some.mT, change, alpha=-lr / b)
        return y.mean(0)

    def _upper_round(self, call: Call, start: Tensor, y: Tensor, h: Tensor) -> Tensor:
        assert call.indices is not None
        k, num, b = call.indices.shape
        lr, x = self.algorithm.lr_upper / num, start - self.algorithm.lr_upper / num * h
        if num == 1:
            return x
        x, rows = x.expand(k, -1, -1), _as_tensor(call.positions, x)[:, None]
        for step in range(1, num):
            images, labels = (held["val"][rows, call.indices[:, step]] for held in (self.images, self.labels))
            gradients = []
            for at in (x, start.expand_as(x)):
                features = _with_one(torch.bmm(images, at).relu_())
                gradients.append(torch.bmm(images.mT, _back((features @ y).softmax(2) - labels, y, features)) / b)
            x = x - lr * (h + gradients[0] - gradients[1])
        return x.mean(0)

    def _directions(
        self, images: Tensor, labels: Tensor, x: Tensor, y: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return f_x - J u, g_y and H u - f_y of every client.

        images, labels: five minibatches side by side, for f_x, J u, H u, f_y and g_y.
        """
        b = images.shape[1] // 5
        features = _with_one(torch.bmm(images, x).relu_())
        found = torch.bmm(features, y).softmax(2)
        residuals, pairs = found - labels, slice(b, 3 * b)  # of J u and H u
        along = _along(found[:, pairs], torch.bmm(features[:, pairs], u))
        of_x, of_ju = residuals[:, :b], residuals[:, b : 2 * b]
        direct = _back(of_x, y, features[:, :b])
        implicit = _back(of_ju, u, features[:, b : 2 * b]) + _back(along[:, :b], y, features[:, b : 2 * b])
        dx = torch.bmm(images[:, : 2 * b].mT, torch.cat([direct, implicit.neg_()], 1)).div_(b)
        dy = torch.bmm(features[:, 4 * b :].mT, residuals[:, 4 * b :]).div_(b).add_(y, alpha=L2)
        both = torch.cat([along[:, b:], residuals[:, 3 * b : 4 * b].neg()], 1)
        du = torch.bmm(features[:, 2 * b : 4 * b].mT, both).div_(b).add_(u, alpha=L2)
        return dx, dy, du

    # ---- the server -----------------------------------------------------------------------------------------------

    def fednest(self, calls: Sequence[Call], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second, start, *factors, hyper, steps = calls
        lam = self.algorithm.lr_system
        self._known = {}
        assert first.positions is second.positions or first.positions == second.positions
        y = self._lower_round(second, x, y)
        p = lam * self.algorithm.num_terms * self._upper_y(start.positions, x, y)
        for factor in factors:
            p = p - lam * self._hessian(factor.positions, x, y, p)
        return self._upper_round(steps, x, y, self._hypergradient(hyper.positions, x, y, p)), y

    def fbo_aggitd(self, calls: Sequence[Call], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        *inner, hyper, steps = calls
        lam, num = self.algorithm.lr_system, self.algorithm.num_lower_rounds
        self._known = {}
        z = None
        for t in range(num + 1):
            positions = inner[2 * t].positions
            r = lam * self._upper_y(positions, x, y)
            z = r if z is None else z - lam * self._hessian(positions, x, y, z) + r
            if t < num:
                y = self._lower_round(inner[2 * t + 1], x, y)
        assert z is not None
        return self._upper_round(steps, x, y, self._hypergradient(hyper.positions, x, y, z)), y

    def fedbio(self, calls: Sequence[Call], x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (call,) = calls
        settings = self.algorithm
        assert call.indices is not None  # by minibatch: (k, steps, b) in the order of the paper
        g_y, f_x, f_y, j_u, h_u = call.indices
        rows = _as_tensor(call.positions, x)[:, None]
        x, y, u = (one.expand(len(call.positions), -1, -1) for one in (x, y, u))
        for step in range(g_y.shape[1]):
            drawn = [("val", f_x), ("train", j_u), ("train", h_u), ("val", f_y), ("train", g_y)]
            images, labels = (
                torch.cat([held[role][rows, index[:, step]] for role, index in drawn], 1)
                for held in (self.images, self.labels)
            )
            dx, dy, du = self._directions(images, labels, x, y, u)
            x, y, u = x - settings.lr_upper * dx, y - settings.lr_lower * dy, u - settings.lr_system * du
        return x.mean(0), y.mean(0), u.mean(0)


class _Fixed(NamedTuple):
    """A phase that reads its draws from tensors that stay where they are."""

    positions: Tensor
    indices: Tensor | None


Recorded = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[tuple[Tensor, ...], Callable[[], Any]]]


def on_cuda(function: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], Any]]:
    """Return the results of a function as a CUDA graph, and the replay that computes them again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries prepare themselves before a graph is recorded
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph.replay


class Graphed:
    """The same programs, of which an outer iteration is recorded once and replayed.

    Cohorts, minibatches and the state are copied into tensors that the graph reads. All outer iterations
    must have as many phases, and the same ones of them must have equal cohorts.

    recorded: function that records, by default as a CUDA graph.
    """

    def __init__(self, *given: Any, recorded: Recorded = on_cuda, **options: Any) -> None:
        self.program, self.recorded = Complete(*given, **options), recorded
        self.x, self.y = self.program.x, self.program.y
        self._reads: list[Tensor] = []
        self._form: list[int] = []

    def fednest(self, calls: Sequence[Call], *state: Tensor) -> tuple[Tensor, ...]:
        return self._replayed(self.program.fednest, calls, state)

    def fbo_aggitd(self, calls: Sequence[Call], *state: Tensor) -> tuple[Tensor, ...]:
        return self._replayed(self.program.fbo_aggitd, calls, state)

    def fedbio(self, calls: Sequence[Call], *state: Tensor) -> tuple[Tensor, ...]:
        return self._replayed(self.program.fedbio, calls, state)

    def _replayed(
        self, step: Callable[..., tuple[Tensor, ...]], calls: Sequence[Call], state: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        cohorts = list(dict.fromkeys(tuple(call.positions) for call in calls))
        form = [cohorts.index(tuple(call.positions)) for call in calls]
        given = [torch.tensor(one, device=self.x.device) for one in cohorts]
        given += [*state, *(call.indices for call in calls if call.indices is not None)]
        if not self._reads:
            self._form, self._reads = form, [one.clone() for one in given]
            start, rest = len(cohorts), iter(self._reads[len(cohorts) + len(state) :])
            fixed = [
                _Fixed(self._reads[place], None if call.indices is None else next(rest))
                for call, place in zip(calls, form, strict=True)
            ]
            at = self._reads[start : start + len(state)]
            self._results, self._replay = self.recorded(lambda: step(fixed, *at))
        assert form == self._form
        for one, other in zip(self._reads, given, strict=True):
            one.copy_(other)
        self._replay()
        return tuple(one.clone() for one in self._results)


def _as_tensor(positions: Cohort, like: Tensor) -> Tensor:
    return positions if isinstance(positions, Tensor) else torch.tensor(tuple(positions), device=like.device)


def as_vector(matrix: Tensor) -> Tensor:
    """Return x or y as the library's vector: weights, then biases."""
    return torch.cat([matrix[:-1].T.reshape(-1), matrix[-1]])


def _with_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)


def _along(found: Tensor, change: Tensor) -> Tensor:
    """Return the derivative of probabilities along a change of the scores."""
    return found * (change - (found * change).sum(-1, keepdim=True))


def _back(residuals: Tensor, y: Tensor, features: Tensor) -> Tensor:
    """Return residuals of the scores as residuals of the hidden layer before its ReLU."""
    return (residuals @ y[..., :-1, :].mT) * (features[..., :-1] > 0)
