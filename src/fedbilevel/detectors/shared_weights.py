"""Weights by a shared function of a sample's loss and label, learned by the hypergradient.

Use it when you compare ways to weight samples by few clean ones: in the experiment `cleaning-bilevel`,
label_em has a higher F1 under all four kinds of noise. It learns 209 numbers for ten classes instead
of one per sample, so it overfits the clean samples less than `sample_weights` does.

    l_j = -log softmax(b S_j)_label / log C      loss without the sample itself, S and b of `own_loss`
    w_j = sigmoid(theta(l_j, label_j)),          theta a network with 16 hidden units (tanh)
    theta <- Adam step along dF/dtheta = sum_j dF/dw_j dw_j/dtheta

with F and its derivative of `_bilevel`. The last layer starts at zero, where the renormalised weights
are all one: plain training. x has q[label] = min(1, w_j / m), with m the mean weight that the function
gives to the clean samples, each scored without itself; so a label is flagged if its weight is below
half of that of a typical clean sample. The cleaned classifier of `Detector` is trained softly, with
the weights q[label].

Reference: Shu, Xie, Yi, Zhao, Zhou, Xu, Meng, "Meta-Weight-Net: Learning an Explicit Mapping For
Sample Weighting", NeurIPS 2019.

Deviations: (1) The classifier is linear and solved before every step, and the hypergradient is that
of its solution, not of one step. (2) The loss is that of a ridge regression without the sample, and
the label is an input. (3) Weights are renormalised over all samples of all clients, not by batch.

Bias: a function of loss and label cannot tell a hard sample from a wrong label.

A step is one outer iteration, so a run can be resumed between steps.

Cost of a whole run: the rounds of `own_loss`, then num_upper_steps times at most num_lower_rounds +
num_system_rounds + 1 rounds of C D floats and one round of 16 C + 49 floats, and the rounds of
`as_given`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from fedbilevel.detectors import _rows
from fedbilevel.detectors._bilevel import Bilevel, Fit
from fedbilevel.detectors._classifiers import TARGETS
from fedbilevel.detectors._state import State
from fedbilevel.detectors.own_loss import OwnLoss
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.problem.draws import SERVER, Stream
from fedbilevel.settings import setting

HIDDEN = 16


class Slope(NamedTuple):
    theta: Tensor  # dF/dtheta
    loss: float  # F
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class SharedWeights(Bilevel, OwnLoss):
    targets: Literal["auto", "kept", "soft", "weighted"] = setting("weighted", TARGETS)
    num_upper_steps: int = setting(30, "steps of the function", least=1)
    lr_function: float = setting(0.1, "step of Adam for the function", above=0)

    statistics = (*Bilevel.statistics, "theta")

    def num_detections(self) -> int:
        return self.num_upper_steps

    def detect(self, fed: Federation, state: State) -> State:
        """Take one step of the function; the last one sets x."""
        step = fed.iteration
        state = self.scored(fed, state) if step == 1 else state
        theta, first, second, start = self._gone_on(state)
        slope = self.hypergradient(fed, state, theta, start)
        first, second = 0.9 * first + 0.1 * slope.theta, 0.99 * second + 0.01 * slope.theta**2
        size = (second / (1 - 0.99**step)).sqrt() + 1e-12
        theta = theta - self.lr_function * first / (1 - 0.9**step) / size
        parts = (theta, first, second, slope.fit.mass[None], slope.fit.model)
        state = state._replace(learned=torch.cat([part.double().flatten() for part in parts]))
        return state if step < self.num_upper_steps else self._weighted(fed, state, theta)

    def _gone_on(self, state: State) -> tuple[Tensor, Tensor, Tensor, Fit | None]:
        """Return theta, both moments of Adam, and the classifier to start from."""
        theta = initial(state.transition.double()).to(state.y.dtype)
        if not len(state.learned):
            return theta, torch.zeros_like(theta), torch.zeros_like(theta), None
        num = len(theta)
        *parts, mass, model = state.learned.split([num, num, num, 1, len(state.learned) - 3 * num - 1])
        theta, first, second = (part.to(state.y.dtype) for part in parts)
        return theta, first, second, Fit(model.view(len(state.centre) + 1, -1), mass[0])

    def _weighted(self, fed: Federation, state: State, theta: Tensor) -> State:
        """Return the state with the weights of the function as x."""
        clean = fed.mean(
            self.clean_weights,
            theta=theta,
            heat=state.heat,
            inverse=state.inverse,
            weights=state.weights,
            **state.units,
        )
        typical = float(clean.sums[0] / clean.sums[1].clamp(min=1e-12)) or 0.5
        x = fed.mean(self.as_labels, theta=theta, score=state.score, heat=state.heat, typical=typical).x
        return state._replace(x=x, weights=torch.zeros_like(state.weights))

    def hypergradient(self, fed: Federation, state: State, theta: Tensor, start: Fit | None = None) -> Slope:
        """Return dF/dtheta and F at theta; start: a classifier to start from."""
        now = {"theta": theta, "score": state.score, "heat": state.heat}
        target = fed.mean(self.weighed, **now).target
        fit = self.trained(fed, state, target, start)
        found = self.adjoint(fed, state, target, fit)
        pull = self.pulls(fed, state, fit, found.u[0])
        slope = fed.mean(self.function_slope, pull=pull, **now).function / fit.mass.to(theta.dtype)
        return Slope(slope, float(found.loss), fit)

    @phase
    def weighed(self, clients: Clients, theta: Tensor, score: Tensor, heat: float) -> dict[str, Tensor]:
        """Keep w e_label as targets."""
        rows = []
        for inputs in self._inputs(clients, score, heat):
            rows.append((weight(theta, inputs)[:, None] * inputs[:, 1:]).flatten())
        return {"target": clients.padded(rows)}

    @phase
    def function_slope(
        self, clients: Clients, theta: Tensor, score: Tensor, heat: float, pull: Tensor
    ) -> dict[str, Tensor]:
        """Return sum_j S dF/dw_j dw_j/dtheta."""
        rows = []
        for inputs, own in zip(self._inputs(clients, score, heat), clients.unpadded(pull), strict=True):
            slope = (own.view(len(inputs), -1) * inputs[:, 1:]).sum(1)
            rows.append(vjp(lambda one, inputs=inputs: weight(one, inputs), theta)[1](slope)[0])
        return {"function": torch.stack(rows)}

    @phase
    def clean_weights(
        self, clients: Clients, theta: Tensor, heat: float, inverse: Tensor, weights: Tensor, centre: Tensor,
        scale: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the sum of the weights of the clean samples, and their number."""
        rows = []
        for score, label in self.clean_scores(clients, inverse, weights, None, centre, scale):
            w = weight(theta, described(score, label, heat))
            rows.append(torch.stack([w.sum(), torch.ones_like(w).sum()]))
        return {"sums": torch.stack(rows)}

    @phase
    def as_labels(self, clients: Clients, theta: Tensor, score: Tensor, heat: float, typical: float) -> dict[str, Any]:
        """Keep x with q[label] = w / typical, at most one."""
        rows = []
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True):
            label = train["label"]
            scores = own.view(len(label), -1)
            w = weight(theta, described(scores, label, heat))[:, None] / typical
            p = (heat * scores).softmax(1)
            rows.append(_rows.x_with_right(p, label, w.clamp(1e-6, 1 - 1e-6)))
        return {"x": clients.padded(rows)}

    def _inputs(self, clients: Clients, score: Tensor, heat: float) -> list[Tensor]:
        """Return the inputs of the function for the training samples of every client."""
        return [
            described(own.view(len(train["label"]), -1), train["label"], heat)
            for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True)
        ]


def described(score: Tensor, label: Tensor, heat: float) -> Tensor:
    """Return (n, 1 + C): the loss in units of that of a guess, and e_label."""
    given = _rows.given(label, score.shape[1], score)
    loss = -((heat * score).log_softmax(1) * given).sum(1, keepdim=True) / math.log(score.shape[1])
    return torch.cat([loss, given], dim=1)


def weight(theta: Tensor, inputs: Tensor) -> Tensor:
    """Return w (n,) in (0, 1)."""
    num = inputs.shape[1]
    into, bias, out, last = theta.split([num * HIDDEN, HIDDEN, HIDDEN, 1])
    return ((inputs @ into.view(num, HIDDEN) + bias).tanh() @ out + last).sigmoid()


def initial(transition: Tensor) -> Tensor:
    """Return theta for C classes, with random numbers in the first layer and zeros in the last one."""
    num = 1 + round(math.sqrt(len(transition)))
    words = Stream(0).bits(
        "shared weights", torch.tensor([SERVER]), iteration=0, call=0, steps=range(1), width=num * HIDDEN
    )
    into = (words.flatten().double() / 2**31 - 1).to(transition.device)  # uniform on [-1, 1)
    return torch.cat([into, into.new_zeros(2 * HIDDEN + 1)])
