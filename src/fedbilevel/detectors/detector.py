"""The common part of detectors: sums of the data, two classifiers, and the guard.

A detector sets x, the posterior of every training label, in its own way (`detect`). Then two linear
classifiers are trained by sums only (`_classifiers`): `cleaned` on the labels of x, `plain` on the
labels as they are given. The guard compares them on clean samples that no other step has read: the
answer y is `cleaned` if the guard accepts it, and otherwise `plain`, also where there are too few such
samples or none of some class.

The guard accepts `cleaned` if all of three hold, with t the mean of paired differences in standard
errors, and e the standard error of the difference in right answers:

    t of the log-likelihood >= reject_below
    right answers: not fewer by more than e
    at most half of the flags are false, by a 95 % bound from the held samples; or t of the calibrated
        log-likelihood >= accept_above, and right answers exclude a loss of 0.3 points
        (difference - 1.645 e >= -0.003) unless the samples are too few for that in any case

Calibrated scores are multiplied by a temperature of their classifier, which maximises its likelihood
of the held samples. Both classifiers have one, so the advantage of choosing it cancels.

Symbols: z is a standardised row of features with a one at its end, C the number of classes, n_i and
m_i the numbers of training samples and of clean samples that the client i uses, n = sum n_i. All
sums over samples are sums at the client, and only their means over clients travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbilevel.detectors import _rows, _state
from fedbilevel.detectors._classifiers import NAMES, Classifiers
from fedbilevel.detectors._decisions import (
    NUM_BINS,
    TEMPERATURES,
    basis,
    discovery_cut,
    judged,
    most_false,
    temperature,
)
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import HELD, Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels

PRIOR = 0.1  # samples that count in every entry of T


@dataclass(frozen=True, kw_only=True)
class Detector(Classifiers):
    ridge: float = setting(0.001, "weight of the squared norm in the scores, per sample", symbol="lam", above=0)
    reject_below: float = setting(
        -2.0,
        "the guard rejects the cleaned classifier if its t is below this value, or if it is right less often by more "
        "than a standard error",
    )
    accept_above: float = setting(
        2.0,
        "standard errors by which the calibrated likelihood of an accepted classifier is higher, at least, unless "
        "most of its flags are surely wrong labels",
    )
    least_clean: int = setting(20, "clean samples without which they decide nothing", least=2)
    rate: float = setting(0.05, "target of the false-discovery rate", above=0, most=0.5)

    upper_space: ClassVar[tuple[str, ...]] = ("x", "score", "leverage")
    statistics: ClassVar[tuple[str, ...]] = (
        "centre",
        "scale",
        "inverse",
        "weights",
        "loose",
        "transition",
        "ahead",
        "models",
        "heats",
    )
    needs_everyone = True
    reads_samples = True
    learns_x = minimises = False
    refuses = {
        "shared": "x holds the labels of each client's samples, which stay there: use data_cleaning with learn=labels",
        "local": "one classifier is trained by all clients: use a global lower level",
    }
    estimates_transition: ClassVar[bool] = False  # whether `detect` estimates T; otherwise it follows from x
    num_passes: ClassVar[int] = 0  # outer iterations of `detect`; a detector may have a setting of this name

    State = _state.State

    def held_share(self) -> float:
        return 0.5

    def num_iterations(self) -> int:
        """Return the number of outer iterations of a whole run: detection, training, guard."""
        return self.num_detections() + self.num_fit_rounds + 1

    def num_detections(self) -> int:
        """Return the number of outer iterations of `detect`."""
        return self.num_passes

    def detect(self, fed: Federation, state: Any) -> Any:
        """Return the state with another x; runs in the first `num_detections()` outer iterations."""
        return state

    # ---- sums of the data -----------------------------------------------------------------------------------------

    def init(self, fed: Federation) -> _state.State:
        if bool((fed.weights != fed.weights[0]).any()):
            raise SettingError(
                f"{self.name()} adds up the samples of all clients, but the problem weights clients by their samples: "
                "use client_weights='equal'."
            )
        x, y = fed.initial()
        moments = fed.mean(self.moments, x=x)
        dim, num = moments.first.shape[0], moments.counts[0]
        num_classes = round(math.sqrt(moments.labels.shape[0]))
        if len(y) != (dim + 1) * num_classes:
            raise ProblemError(
                f"y has {len(y)} entries, but a linear classifier of {dim} features and {num_classes} classes has "
                f"{(dim + 1) * num_classes}: use a linear model."
            )
        centre = moments.first / num
        variance = (moments.second / num - centre**2).clamp(min=0)
        scale = (variance + 0.01 * variance.mean()).sqrt().clamp(min=1e-12)  # features that hardly vary stay small
        sums = fed.mean(self.products, centre=centre, scale=scale, num_classes=num_classes)
        zeros = y.new_zeros(2 * self.num_pairs() * len(y))
        start = 0.5 * torch.eye(num_classes, dtype=y.dtype, device=y.device) + 0.5 / num_classes
        return _state.State(
            x, y, fed.zeros("score"), fed.zeros("leverage"), centre, scale, sums.gram, sums.clean, sums.given,
            moments.counts, y.new_zeros(0), torch.zeros_like(y), start.flatten(), 1.0, y.new_zeros(0), zeros, zeros,
            [0] * self.num_pairs(), {},
        )  # fmt: skip

    @phase
    def moments(self, clients: Clients, x: Tensor) -> dict[str, Tensor]:
        """Return sums and squares of the features, and numbers of samples and of clean samples."""
        first, second, counts, labels = [], [], [], []
        for fields, clean, own in zip(
            clients.samples("train"), clients.samples("val"), clients.unpadded(clients.rows(x)), strict=True
        ):
            num = len(next(iter(fields.values())))
            num_classes = len(own) // num
            if not {"image", "label"} <= {*fields} or len(own) != num_classes * num or num_classes < 2:
                raise ProblemError(
                    f"x has {len(own)} entries for {num} training samples with the fields {', '.join(fields)}, "
                    f"but {self.name()} needs an image, a label and one entry of x per sample and class: use the task "
                    "data_cleaning with learn='labels'."
                )
            rows = _rows.inputs(fields)
            first.append(rows.sum(0))
            second.append(rows.square().sum(0))
            num_clean = len(_rows.trusted(clean)["label"])
            counts.append(rows.new_tensor([len(rows), num_clean, num_clean > 0]))
            labels.append(rows.new_zeros(num_classes**2))  # tells the server the number of classes
        return {
            "first": torch.stack(first), "second": torch.stack(second), "counts": torch.stack(counts),
            "labels": torch.stack(labels),
        }  # fmt: skip

    @phase
    def products(self, clients: Clients, centre: Tensor, scale: Tensor, num_classes: int) -> dict[str, Tensor]:
        """Return sum z z' over training and clean samples, and sum z e' over each of them."""
        gram, clean, given = [], [], []
        for train, val in zip(clients.samples("train"), clients.samples("val"), strict=True):
            z, label = _rows.standardised(train, centre, scale), train["label"]
            checked = _rows.trusted(val)
            zc = _rows.standardised(checked, centre, scale)
            gram.append(_rows.packed(z.T @ z + zc.T @ zc))
            clean.append((zc.T @ _rows.given(checked["label"], num_classes, z)).flatten())
            given.append((z.T @ _rows.given(label, num_classes, z)).flatten())
        return {"gram": torch.stack(gram), "clean": torch.stack(clean), "given": torch.stack(given)}

    # ---- outer iterations -----------------------------------------------------------------------------------------

    def round(self, fed: Federation, state: _state.State) -> _state.State:
        step, first = fed.iteration, self.num_detections()
        if step <= first:
            return self.detect(fed, state)
        if step <= first + self.num_fit_rounds:
            state = state if state.found else self._estimated(fed, state)
            return self.stepped(fed, state, step - first)
        return self._guarded(fed, state) if step == self.num_iterations() else state

    # ---- estimates and the guard ----------------------------------------------------------------------------------

    def _estimated(self, fed: Federation, state: _state.State) -> _state.State:
        """Return the state with the estimated noise rate, T, and the cut at the target of the
        false-discovery rate."""
        sums = fed.mean(
            self.odds, x=state.x, weights=state.weights, transition=state.transition, heat=state.heat,
            centre=state.centre, scale=state.scale,
        )  # fmt: skip
        seen, unseen = (part.double() * fed.num_clients for part in (sums.seen, sums.unseen))
        wrong, num = float(sums.wrong) * fed.num_clients, float(seen.sum())
        scored = bool(state.weights.any())
        cut = discovery_cut(seen, unseen, num - wrong, self.rate) if scored else None
        false = most_false(seen, unseen, num - wrong) if scored else 1.0
        sizes = {"num_labels": round(num), "num_flagged": round(float(seen[NUM_BINS // 2 :].sum()))}
        found = {"noise": wrong / num, "num_unseen": float(unseen.sum()), "cut": cut, "most_false": false, **sizes}
        if self.estimates_transition:
            return state._replace(found=found)
        side = round(math.sqrt(len(state.transition)))
        counts = sums.counts.double().view(side, side) * fed.num_clients + PRIOR
        return state._replace(found=found, transition=_rows.rows_normed(counts).flatten().to(state.y.dtype))

    @phase
    def odds(
        self,
        clients: Clients,
        x: Tensor,
        weights: Tensor,
        transition: Tensor,
        heat: float,
        centre: Tensor,
        scale: Tensor,
    ) -> dict[str, Tensor]:
        """Return numbers of samples by log-odds of a wrong label, and the expected wrong labels.

        seen: training samples. unseen: clean samples that no other phase reads, whose label is right.
        counts: expected samples by true class and given label, unless detection has estimated T.
        """
        seen, unseen, wrong, counts = [], [], [], []
        for client, train, held, own, matrix in zip(
            clients.ids.tolist(), clients.samples("train"), self._unread(clients), clients.unpadded(x),
            self.own(clients, transition), strict=True,
        ):  # fmt: skip
            q = soft_labels.posterior(own, train["label"])
            right = q.gather(1, train["label"].long()[:, None])
            score = self.unseen_scores(clients, client, _rows.standardised(held, centre, scale), weights)
            log_q = _rows.log_posterior(score, heat, matrix, held["label"])
            safe = log_q.exp().gather(1, held["label"].long()[:, None])
            seen.append(_rows.binned(right, NUM_BINS))
            unseen.append(_rows.binned(safe, NUM_BINS))
            wrong.append((1 - right).sum()[None])
            counts.append(_rows.counted(q.log(), train["label"]).flatten())
        more = {} if self.estimates_transition else {"counts": torch.stack(counts)}
        return {"seen": torch.stack(seen), "unseen": torch.stack(unseen), "wrong": torch.stack(wrong), **more}

    def unseen_scores(self, clients: Clients, client: int, z: Tensor, weights: Tensor) -> Tensor:
        """Return scores of samples that were not used, spread as those of training samples are."""
        return z @ weights.view(z.shape[1], -1)

    def own(self, clients: Clients, transition: Tensor) -> list[Tensor]:
        """Return the transition matrix of every client; here, all clients have the same matrix."""
        return [transition.view(round(math.sqrt(len(transition))), -1) for _ in range(len(clients))]

    def _guarded(self, fed: Federation, state: _state.State) -> _state.State:
        """Compare both classifiers on clean samples that neither has seen, and choose one."""
        fits = fed.mean(self.calibration, models=state.models, **state.units).fits.double().view(2, -1)
        heats = state.models.new_tensor([temperature(own.tolist()) for own in fits])
        found = fed.mean(self.paired, models=state.models, heats=heats, **state.units)
        figures = judged(*(found.sums.double() * fed.num_clients).tolist())
        unseen = int((found.classes * fed.num_clients < 0.5).sum())  # classes that the guard cannot speak for
        unchecked = figures["num_guard"] < self.least_clean or unseen > 0
        by = "" if unchecked else basis({**state.found, **figures}, self.reject_below, self.accept_above)
        verdict = "unchecked" if unchecked else "accepted" if by else "rejected"
        l2 = dict(zip(NAMES, self.strengths(state)[0], strict=True))
        whole = {
            **state.found,
            **figures,
            "unseen": unseen,
            "verdict": verdict,
            "basis": by,
            "targets": self.labels_of(state),
        }
        return state._replace(found={**whole, "l2": l2}, y=self.classifier(state, 0 if verdict == "accepted" else 1))

    @phase
    def calibration(self, clients: Clients, models: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return log-likelihoods of the held samples, by classifier and temperature."""
        rows = []
        for scores, label in self._held_scores(clients, models, centre, scale):
            rows.append(torch.stack([_logs(b * score, label).sum() for score in scores for b in TEMPERATURES]))
        return {"fits": torch.stack(rows)}

    @phase
    def paired(
        self, clients: Clients, models: Tensor, heats: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return number, sums and squares of differences in log-likelihood and in right answers.

        heats: temperatures of both classifiers, for the differences in calibrated log-likelihood.
        """
        rows, classes = [], []
        for scores, label in self._held_scores(clients, models, centre, scale):
            right = [(score.argmax(1) == label).to(score.dtype) for score in scores]
            better, gain = _logs(scores[0], label) - _logs(scores[1], label), right[0] - right[1]
            fair = _logs(heats[0] * scores[0], label) - _logs(heats[1] * scores[1], label)
            parts = (torch.ones_like(gain), better, better**2, gain, gain**2, right[1], fair, fair**2)
            rows.append(torch.stack([part.sum() for part in parts]))
            classes.append(_rows.given(label, scores[0].shape[1], scores[0]).sum(0))
        return {"sums": torch.stack(rows), "classes": torch.stack(classes)}

    def _held_scores(
        self, clients: Clients, models: Tensor, centre: Tensor, scale: Tensor
    ) -> list[tuple[list[Tensor], Tensor]]:
        """Return the scores of both classifiers and the labels of the held samples of every client."""
        found = []
        for held in self._unread(clients):
            z = _rows.standardised(held, centre, scale)
            found.append(([z @ model for model in models.view(2, z.shape[1], -1)], held["label"].long()))
        return found

    def _unread(self, clients: Clients) -> list[dict[str, Tensor]]:
        """Return the clean samples of every client that only the guard reads.

        A client with one clean sample uses it for detection, and has none for the guard.
        """
        alone = (clients.host.data.sizes["val"][clients.positions] < 2).tolist()
        held = [_rows.trusted(fields) for fields in clients.samples(HELD)]
        return [
            {name: values[:0] for name, values in fields.items()} if one else fields
            for one, fields in zip(alone, held, strict=True)
        ]


def _logs(score: Tensor, label: Tensor) -> Tensor:
    """Return the log-likelihood of every sample."""
    return score.log_softmax(1).gather(1, label[:, None])[:, 0]
