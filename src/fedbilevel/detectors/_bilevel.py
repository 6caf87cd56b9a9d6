"""Detectors that learn from the derivative of the clean loss by the targets of training samples.

Every training sample has a target T_j of C numbers: w_j e_label for a weight, q_j for a posterior.

    W(T)  = argmin of sum_j sum_k T_jk CE(W; z_j, k) / S + lam_W/2 |W|^2,   S = sum of all T_jk
    F(T)  = mean of CE(W(T); z, y) over the clean samples that are not held for the guard
    H u   = grad F,   H the Hessian of the first line at W(T)
    dF/dT_jk = (a_jk - a_j' p_j - lam_W <u, W>) / S,   a_j = z_j' u,   p_j = softmax(z_j' W)

The division by S renormalises weights: a common factor changes nothing. Clients send sums of
z (sum_k T_jk p_j - T_j)', of z (p - e_y)' over clean samples, and of products with H. The derivatives
stay at their clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._descent import bound_of, bounded_step, conjugate
from fedbilevel.detectors._state import State
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting

LOWER_L2 = "weight of the squared norm of the classifier of the targets"


class Fit(NamedTuple):
    model: Tensor  # W(T), (d + 1, C) in float64
    mass: Tensor  # S, mean over clients


class Adjoint(NamedTuple):
    u: Tensor  # (k, d + 1, C), for k = 1 loss or for the losses of k = 2 halves of the clean samples
    loss: Tensor  # (k,)
    counts: Tensor  # (k,) clean samples, mean over clients


@dataclass(frozen=True, kw_only=True)
class Bilevel(Detector):
    lower_l2: float = setting(0.001, LOWER_L2, symbol="lam_W", above=0)
    num_lower_rounds: int = setting(40, "rounds that train the classifier of the targets, at most", least=1)
    num_system_rounds: int = setting(15, "rounds that solve H u = grad F, at most", least=1)
    residual: float = setting(1e-2, "relative residual at which either of both ends", above=0)

    upper_space = (*Detector.upper_space, "target", "pull", "trial")
    statistics = (*Detector.statistics, "model", "direction", "adjoint")

    def trained(self, fed: Federation, state: State, target: Variable, start: Fit | None = None) -> Fit:
        """Return W(T) by steps on a bound of its loss, from zero or from another fit."""
        gram = _rows.unpacked(state.gram.double())
        last = now = state.given.double().view(len(gram), -1) * 0 if start is None else start.model
        small = self.residual * float(state.given.double().norm() / state.counts[0])
        age, mass = 0, now.new_ones(())
        for _ in range(self.num_lower_rounds):
            found = fed.mean(self.lower_slope, model=self.sent(state, now), target=target, **state.units)
            mass = found.mass.double()
            slope = found.slope.double().view(now.shape) / mass + self.lower_l2 * now
            last, now, age = bounded_step(bound_of(gram, mass, self.lower_l2), slope, now, last, age)
            if float(slope.norm()) <= small:
                break
        return Fit(last, mass)

    def adjoint(self, fed: Federation, state: State, target: Variable, fit: Fit, *, halves: bool = False) -> Adjoint:
        """Return u and F, or those of the losses of both halves of the clean samples."""
        model = self.sent(state, fit.model)
        clean = fed.mean(self.clean_slopes, model=model, **state.units)
        counts, losses = clean.counts.double(), clean.losses.double()
        slopes = clean.slopes.double().view(2, *fit.model.shape)
        if not halves:
            counts, losses, slopes = (part.sum(0, keepdim=True) for part in (counts, losses, slopes))
        counts = counts.clamp(min=1e-12)

        def product(direction: Tensor) -> Tensor:
            sent = self.sent(state, direction)
            found = fed.mean(self.curved, model=model, direction=sent, target=target, **state.units)
            return found.curved.double().view(direction.shape) / fit.mass + self.lower_l2 * direction

        bound = bound_of(_rows.unpacked(state.gram.double()), fit.mass, self.lower_l2)
        right = slopes / counts[:, None, None]
        u = conjugate(product, right, bound, self.num_system_rounds, self.residual)
        return Adjoint(u, losses / counts, counts)

    def pulls(self, fed: Federation, state: State, fit: Fit, u: Tensor, *, renormalised: bool = True) -> Variable:
        """Return S dF/dT, which stays at the clients, for one u (d + 1, C).

        renormalised: whether S is the sum of T; otherwise it is a constant.
        """
        shift = self.lower_l2 * float((u * fit.model).sum()) if renormalised else 0.0
        model, adjoint = (self.sent(state, part) for part in (fit.model, u))
        return fed.mean(self.target_slopes, model=model, adjoint=adjoint, shift=shift, **state.units).pull

    def sent(self, state: State, matrix: Tensor) -> Tensor:
        return matrix.flatten().to(state.y.dtype)

    # ---- at the clients -------------------------------------------------------------------------------------------

    @phase
    def given_targets(self, clients: Clients, x: Tensor) -> dict[str, Tensor]:
        """Keep e_label as targets."""
        rows = [
            _rows.given(train["label"], len(own) // len(train["label"]), own).flatten()
            for train, own in zip(clients.samples("train"), clients.unpadded(x), strict=True)
        ]
        return {"target": clients.padded(rows)}

    @phase
    def moved(self, clients: Clients, score: Tensor, pull: Tensor, step: float) -> dict[str, Tensor]:
        """Keep scores after a step against their derivatives, beside the scores themselves."""
        return {"trial": score - step * pull}

    @phase
    def adopted(self, clients: Clients, trial: Tensor) -> dict[str, Tensor]:
        """Keep scores of a step that was taken."""
        return {"score": trial}

    @phase
    def lower_slope(
        self, clients: Clients, model: Tensor, target: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return sum z (m p - T)' with m = sum_k T_k, and the sum of all T."""
        slope, mass = [], []
        for z, p, own in self._predicted(clients, model, target, centre, scale):
            slope.append((z.T @ (own.sum(1, keepdim=True) * p - own)).flatten())
            mass.append(own.sum()[None])
        return {"slope": torch.stack(slope), "mass": torch.stack(mass)}

    @phase
    def curved(
        self, clients: Clients, model: Tensor, direction: Tensor, target: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return sum z m ((diag p - p p') U' z)' for every direction U."""
        rows = []
        for z, p, own in self._predicted(clients, model, target, centre, scale):
            ways = z @ direction.view(-1, z.shape[1], p.shape[1])
            images = own.sum(1, keepdim=True) * p * (ways - (ways * p).sum(2, keepdim=True))
            rows.append((z.T @ images).flatten())
        return {"curved": torch.stack(rows)}

    @phase
    def clean_slopes(self, clients: Clients, model: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return sum z (p - e_y)', loss and number of clean samples, by halves."""
        slopes, losses, counts = [], [], []
        for val in clients.samples("val"):
            checked = _rows.trusted(val)
            z, half = _rows.standardised(checked, centre, scale), halves(checked["label"])
            logs = (z @ model.view(z.shape[1], -1)).log_softmax(1)
            given = _rows.given(checked["label"], logs.shape[1], z)
            gap, loss = logs.exp() - given, -(given * logs).sum(1)
            slopes.append(torch.cat([(z[own].T @ gap[own]).flatten() for own in half]))
            losses.append(torch.stack([loss[own].sum() for own in half]))
            counts.append(torch.stack([own.sum() for own in half]).to(z.dtype))
        return {"slopes": torch.stack(slopes), "losses": torch.stack(losses), "counts": torch.stack(counts)}

    @phase
    def target_slopes(
        self, clients: Clients, model: Tensor, adjoint: Tensor, shift: float, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Keep a_k - a' p - shift for every training sample and class."""
        rows = []
        for train in clients.samples("train"):
            z = _rows.standardised(train, centre, scale)
            p, a = (z @ model.view(z.shape[1], -1)).softmax(1), z @ adjoint.view(z.shape[1], -1)
            rows.append((a - (a * p).sum(1, keepdim=True) - shift).flatten())
        return {"pull": clients.padded(rows)}

    def _predicted(
        self, clients: Clients, model: Tensor, target: Tensor, centre: Tensor, scale: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return rows z, probabilities p and targets of the training samples of every client."""
        found = []
        for train, own in zip(clients.samples("train"), clients.unpadded(target), strict=True):
            z = _rows.standardised(train, centre, scale)
            found.append((z, (z @ model.view(z.shape[1], -1)).softmax(1), own.view(len(z), -1)))
        return found


def halves(label: Tensor) -> tuple[Tensor, Tensor]:
    """Return marks of every second clean sample of a client, and of the others."""
    second = torch.arange(len(label), device=label.device) % 2 == 1
    return ~second, second
