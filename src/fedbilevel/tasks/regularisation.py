"""Regularisation: tune the weight decay of every feature of a shared model on private data.

y is a logistic model: a weight and a bias, which is regularised like the weight. x_i = lambda_i has
one entry for each entry of y:

    g_i(lambda_i, y) = BCE(y; train_i) + 1/2 y' diag(r(lambda_i)) y + l2/2 |y|^2
    f_i(y)           = BCE(y; val_i)

`parametrisation`: `exp` is r = exp(lambda), always positive; the curvature of the lower level grows
with it, so the step of y must still suit the largest r. `softplus` is r = log(1 + exp(lambda)),
which grows no faster than lambda, and `sigmoid` is r = most * sigmoid(lambda), which stays below
`most`: single penalties cannot become arbitrarily stiff. `linear` is r = lambda from 0 as the paper
prints it. Nothing keeps it positive: once the mean of r(lambda_i) + l2 is negative in one entry, g
is unbounded below and y* is a local minimum at best. Use `linear` to compare hypergradients at a
point rather than to optimise.

The hypergradient block of client i is -J_i u = -diag(r'(lambda_i)) (y * u): it depends on the
client through its lambda_i alone. Clients with equal lambda therefore have equal blocks, whatever
their data, and under `linear` (r' = 1) blocks are equal everywhere. Only the mean of r(lambda_i)
matters to y. An error measured at equal lambda cannot tell an estimate of a client's own block from
one of the average; for that use distinct lambda_i under `exp`, or the task data_cleaning.

Data: `mixture` as in the paper (3 clients, 100 training and 100 validation samples each; see
data/mixture.py). Of the training part of `a9a`, every client gets its own samples at random
(i.i.d., without replacement), and likewise test samples of the test part. `w8a` has no test part,
so a random quarter of it becomes the test part. In `adult`, the clients are the most common work
classes (private, self-employed, local government, ...), and each has people of its own class.
`num_noise` adds columns of standard normal numbers, which say nothing about the label. With many of
them, one L2 penalty for all features is either too small for noise or too large for the others: the
reason to learn one penalty per feature.

Rivals: `l2` is one penalty 1/n, the default of common libraries, and `l2_grid` chooses one penalty
by validation samples; `l1_grid` does so for the sum of absolute weights, smoothed within 0.01, and
`screened` for one penalty on the features whose |t| (tasks/association.py) is above a cut. All
train on training and validation samples together and do not penalise the bias.

Reference: Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed
Networks", eq. (11) and appendix A.1. Differences from it: l2 keeps the lower level strongly convex
(0: as in the paper), and r = exp(lambda) is the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedbilevel.data.partition import iid
from fedbilevel.data.sets.a9a import a9a
from fedbilevel.data.sets.adult import adult
from fedbilevel.data.sets.mixture import mixture
from fedbilevel.data.sets.w8a import w8a
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.association import associations
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.task import Built, Shapes, Task

Clients = list[dict[str, dict[str, np.ndarray]]]
_USUAL = 0.01  # weight decay at the start of softplus and sigmoid
_GRID = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
_ROUND = 0.01  # |w| is smooth within this distance of zero
_CUTS = (2.0, 3.0, 4.0)  # of |t|, for the rival that drops features
_DROPPED = 10.0  # weight decay of a feature that the rival dropped, where a bilevel run starts there
_PAIRS = {f"{cut:g}, {weight:g}": (cut, weight) for cut in _CUTS for weight in (0.001, 0.003, 0.01, 0.03)}


@dataclass(frozen=True, kw_only=True)
class Regularisation(Task):
    data: Literal["mixture", "a9a", "w8a", "adult"] = setting(
        "mixture", "synthetic mixture of linear rules; or census data (a9a, adult) or web pages (w8a) on disk"
    )
    num_clients: int = setting(3, "clients; of adult, its most common work classes, at most 9", symbol="n", least=1)
    num_train: int = setting(100, "training samples per client", least=1)
    num_val: int = setting(100, "validation samples per client", least=1)
    num_test: int = setting(1000, "test samples per client", least=1)
    num_noise: int = setting(0, "columns of noise that are added to the features", least=0)
    parametrisation: Literal["exp", "softplus", "sigmoid", "linear"] = setting(
        "exp",
        "weight decay r = exp(lambda), softplus(lambda), most * sigmoid(lambda), or lambda, which may be negative",
    )
    most: float = setting(10.0, "bound of the weight decay under sigmoid", above=0)
    start: float | None = setting(
        None, "initial lambda of every feature (by default -2 for exp, 0 for linear, and r = 0.01 for the others)"
    )
    upper: Literal["private", "shared"] = setting("private", "one lambda per client, or one for all")
    l2: float = setting(0.001, "weight of the squared norm of y in the lower level; 0 as in the paper", least=0)
    dirichlet: float = setting(
        0.4,
        "concentration of the clients' proportions in the mixture; small: clients differ more",
        symbol="alpha",
        above=0,
    )
    label_noise: float = setting(0.1, "standard deviation of the noise inside the labels of the mixture", least=0)
    bug_compatible: bool = setting(
        False, "labels of the mixture as the published generator makes them, many of them 0 by mistake"
    )
    data_seed: int = setting(0, "seed of the data or of the split", least=0)
    data_dir: str = setting(
        "", "folder with libsvm/a9a.npz, libsvm/w8a.npz or adult (by default the usual places are searched)"
    )

    # The curvature of the lower level is about 0.4 on the mixture and 2 on a9a at the start, and grows with exp(lambda)
    # during a run.
    suggested = {
        "*": {"lr_lower": 0.5, "lr_system": 0.5, "lr_upper": 10.0, "num_local_steps": 1},
        "fednest": {"lr_upper": 50.0, "num_lower_rounds": 3, "num_terms": 10},
        "fbo_aggitd": {"lr_upper": 50.0, "num_lower_rounds": 5},
        "adafbio": {"lr_upper": 0.1},
        "local_bsgvrm": {"lr_upper": 3.0},
    }
    suggested_iterations = {"*": 400, "fednest": 100, "fbo_aggitd": 100}
    avoid = (
        "only accuracy counts: one L2 penalty on screened features is as good or better on the recorded data; "
        "or nearly all features matter: try one L2 penalty first, because a run of it sends less"
    )
    classes = True
    headline = ("upper_loss", "test_accuracy", "test_loss")
    needs = {role: {"input": "one row of numbers per sample", "label": "0 or 1"} for role in ("train", "val")}
    measures = {"test": {"input": "as in train", "label": "0 or 1: for test_accuracy and test_loss"}}

    def build(self) -> Built:
        rng = np.random.default_rng(self.data_seed)
        made = {"mixture": self._mixture, "adult": self._work_classes}.get(self.data, self._at_random)
        clients = self._with_noise(made(rng))
        return Built(self.problem(Shapes.of(clients[0], num_classes=2)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        if shapes.classes() != 2:
            raise ProblemError(
                f"regularisation tells two classes apart, but num_classes is {shapes.num_classes}: give labels 0 and "
                "1 and num_classes 2."
            )
        shapes.sample("label", "train", "val", "test", kinds=("int", "float"), ndim=0)
        (dim,) = shapes.sample("input", "train", "val", "test", ndim=1)
        tested = shapes.has("test", "input", "label")
        return Problem(
            upper=lambda x, y, batch: _losses(y, batch),
            lower=self._lower,
            x0={"lambda": torch.full((dim + 1,), self._start())},
            y0={"weight": torch.zeros(dim), "bias": torch.zeros(1)},
            scopes=Scopes(upper=self.upper),
            statistics={"test": _tested} if tested else {},
            metrics=_metrics if tested else lambda sums: {},
            name="regularisation",
        )

    def _start(self) -> float:
        usual = {
            "exp": -2.0,
            "linear": 0.0,
            "softplus": math.log(math.expm1(_USUAL)),
            "sigmoid": -math.log(max(1.0, self.most / _USUAL - 1)),
        }
        return float(self.start) if self.start is not None else usual[self.parametrisation]

    def decay(self, x: Any) -> Tensor:
        """Return the learned weight decay r of every entry of y, without l2."""
        value: Tensor = x["lambda"]
        if self.parametrisation == "exp":
            return value.exp()
        if self.parametrisation == "sigmoid":
            return self.most * torch.sigmoid(value)
        return softplus(value) if self.parametrisation == "softplus" else value

    def _value(self, r: Tensor) -> Tensor:
        """Return the numbers of which `decay` is r."""
        if self.parametrisation == "exp":
            return r.log()
        if self.parametrisation == "sigmoid":
            return torch.logit(r.clamp(max=0.95 * self.most) / self.most)
        return r.expm1().log() if self.parametrisation == "softplus" else r

    def _lower(self, x: Any, y: Any, batch: Any) -> Tensor:
        return _losses(y, batch) + 0.5 * ((self.decay(x) + self.l2) * torch.cat([y["weight"], y["bias"]]) ** 2).sum()

    def rivals(self) -> dict[str, Rival]:
        built = self.build()
        pooled = with_validation(built.clients)
        every = sum(len(client["train"]["label"]) for client in pooled)

        def grid(way: Callable[[float], Callable[[Any], Tensor]], title: str, power: int) -> Rival:
            return Rival(
                f"{title}, {len(_GRID)} values by validation samples",
                {f"{weight:g}": _plain(built.problem, way(weight), built.clients) for weight in _GRID},
                lambda label: _plain(built.problem, way(float(label)), pooled),
                lambda label, run: {"x0": {"lambda": self._matched(float(label), run.y, power)}, "y0": run.y},
            )

        strength = associations(built.clients).abs()

        def screened(label: str, clients: Sequence[Holdings], strength: Tensor) -> Way:
            cut, weight = _PAIRS[label]
            return _plain(built.problem, _ridge(weight), clients, strength > cut)

        def cut_start(label: str, run: Any) -> dict[str, Any]:
            cut, weight = _PAIRS[label]
            matched = self._matched(weight, run.y, 2)
            matched[:-1][strength <= cut] = self._value(torch.tensor(_DROPPED))
            return {"x0": {"lambda": matched}, "y0": run.y}

        return {
            "l2": Rival("one L2 penalty 1/n", {"1/n": _plain(built.problem, _ridge(1 / every), pooled)}),
            "l2_grid": grid(_ridge, "one L2 penalty", 2),
            "l1_grid": grid(_lasso, "one L1 penalty", 1),
            "screened": Rival(
                f"features above a cut, one L2 penalty, {len(_PAIRS)} pairs by validation samples",
                {label: screened(label, built.clients, strength) for label in _PAIRS},
                lambda label: screened(label, pooled, associations(pooled).abs()),
                cut_start,
            ),
        }

    def graded(self, scores: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> dict[str, float]:
        loss = -float(scores[np.arange(len(labels)), labels].mean())
        return {**super().graded(scores, labels, owners), "test_loss": loss}

    def _matched(self, weight: float, y: Any, power: int) -> Tensor:
        """Return lambda whose weight decay has the same gradient at y as the L2 or L1 penalty.

        weight |w| has the gradient of r w^2 / 2 with r = weight / |w|. The bias has hardly any decay.
        """
        size = (y["weight"] ** 2 + _ROUND**2).sqrt()
        r = torch.cat([weight * size ** (power - 2), torch.full_like(y["bias"], 0.1 * min(_GRID))])
        return self._value((r - self.l2).clamp(min=0.1 * min(_GRID)))

    def _with_noise(self, clients: Clients) -> Clients:
        if not self.num_noise:
            return clients
        rng = np.random.default_rng([self.data_seed, 1])  # of its own, so that samples do not depend on num_noise
        for client in clients:
            for fields in client.values():
                noise = rng.standard_normal((len(fields["label"]), self.num_noise))
                fields["input"] = np.hstack([fields["input"], noise.astype(fields["input"].dtype)])
        return clients

    def _mixture(self, rng: np.random.Generator) -> Clients:
        drawn = mixture(
            self.num_clients,
            {"train": self.num_train, "val": self.num_val, "test": self.num_test},
            rng,
            concentration=self.dirichlet,
            noise=self.label_noise,
            bug_compatible=self.bug_compatible,
        )
        return [
            {role: {"input": samples.x, "label": samples.label} for role, samples in client.items()}
            for client in drawn.clients
        ]

    def _at_random(self, rng: np.random.Generator) -> Clients:
        if self.data == "a9a":
            train_x, train_y, test_x, test_y = a9a(self.data_dir or None)
        else:
            x, y = w8a(self.data_dir or None)
            order, num_test = rng.permutation(len(y)), len(y) // 4
            train_x, train_y = x[order[num_test:]], y[order[num_test:]]
            test_x, test_y = x[order[:num_test]], y[order[:num_test]]
        own, testing = (
            self._parts(len(train_y), self.num_train + self.num_val, rng),
            self._parts(len(test_y), self.num_test, rng),
        )
        pairs = zip(own, testing, strict=True)
        return [self._roles((train_x, train_y), mine, (test_x, test_y), test) for mine, test in pairs]

    def _work_classes(self, rng: np.random.Generator) -> Clients:
        found = adult(self.data_dir or None)
        columns = [i for i, name in enumerate(found.names) if name.startswith("workclass=")]
        counts = found.train_x[:, columns].sum(0)
        clients = []
        for column in np.array(columns)[np.argsort(-counts, kind="stable")][: self.num_clients]:
            mine, test = (rng.permutation(np.flatnonzero(x[:, column])) for x in (found.train_x, found.test_x))
            if len(mine) < self.num_train + self.num_val or len(test) < 1 or len(columns) < self.num_clients:
                raise ProblemError(
                    f"{found.names[column]} is one of {len(columns)} work classes and has {len(mine)} people for "
                    f"training and validation, but {self.num_clients} clients with {self.num_train + self.num_val} "
                    "samples each were requested: use fewer clients or fewer samples per client."
                )
            clients.append(
                self._roles((found.train_x, found.train_y), mine, (found.test_x, found.test_y), test[: self.num_test])
            )
        return clients

    def _roles(
        self,
        known: tuple[np.ndarray, np.ndarray],
        mine: np.ndarray,
        held_out: tuple[np.ndarray, np.ndarray],
        test: np.ndarray,
    ) -> dict[str, dict[str, np.ndarray]]:
        places = {"train": mine[: self.num_train], "val": mine[self.num_train :][: self.num_val]}
        return {
            **{role: {"input": known[0][own], "label": known[1][own]} for role, own in places.items()},
            "test": {"input": held_out[0][test], "label": held_out[1][test]},
        }

    def _parts(self, num_samples: int, num_each: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return `num_each` samples for every client, in random order for further splits."""
        if self.num_clients * num_each > num_samples:
            raise ProblemError(
                f"{self.num_clients} clients with {num_each} samples each need {self.num_clients * num_each}, "
                f"{self.data} has {num_samples}: "
                "use fewer clients or fewer samples per client."
            )
        order = rng.permutation(num_samples)[: self.num_clients * num_each]
        return [order[part] for part in iid(len(order), self.num_clients, rng)]


def _plain(
    problem: Problem, penalty: Callable[[Any], Tensor], clients: Sequence[Holdings], kept: Tensor | None = None
) -> Way:
    """Return a run with one penalty on the features that are kept; the weights of the others stay at zero."""

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        used = y if kept is None else {**y, "weight": kept.to(y["weight"]) * y["weight"]}
        return _losses(used, batch) + penalty(y["weight"])

    return Way(replace(problem, lower=lower, x0={"lambda": torch.zeros(1)}, scopes=Scopes()), clients)


def _ridge(weight: float) -> Callable[[Any], Tensor]:
    return lambda w: 0.5 * weight * (w**2).sum()


def _lasso(weight: float) -> Callable[[Any], Tensor]:
    return lambda w: weight * ((w**2 + _ROUND**2).sqrt() - _ROUND).sum()


def _scores(y: Any, batch: Any) -> Tensor:
    return batch["input"] @ y["weight"] + y["bias"]


def _losses(y: Any, batch: Any) -> Tensor:
    """Return the binary cross-entropy of each sample.

    -log sigmoid(s) is computed as softplus(s) - s, which does not overflow.
    """
    scores = _scores(y, batch)
    return softplus(scores) - batch["label"] * scores


def _tested(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    right = (_scores(y, batch) > 0) == (batch["label"] == 1)
    return {"right": right, "loss": _losses(y, batch), "tested": torch.ones_like(right)}


def _metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients."""
    return {"test_accuracy": sums["right"] / sums["tested"], "test_loss": sums["loss"] / sums["tested"]}
