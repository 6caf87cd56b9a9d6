"""Label EM: posteriors of the true labels from sums only.

Use it when labels of the training samples are wrong and the clients have some clean samples, at
least one of every class among all of them. The posteriors stay at their clients. It costs 90 to 160
rounds, in one of which each client sends D (D + 1) / 2 floats for D features.

Every sample has a true class k with probability p_k(z), and the given label l with probability
T[k, l]. The classes are scored by a ridge regression on the posteriors q themselves, without the
sample that is scored:

    A = (sum z z' + lam n)^-1,   h_j = z_j' A z_j,   W = A (sum z_j q_j' + B_c)
    S_j = (z_j' W - h_j q_j) / (1 - h_j)                               exact leave-one-out scores
    q_jk proportional to softmax(b S_j)_k T[k, label_j]                E step
    T = rownorm(N + prior),   N_kl = sum of q_jk over labels l,        M step
    b = argmax of sum_j log softmax(b S_j)_y over clean samples,       each scored without itself

B_c = sum z e_y' over the clean samples. One outer iteration is a new W, then E and M steps until T
settles. The first scores are those of the clean samples alone, with T = I/2 + 1/2C: column c of W is
(n_c / m_c) A B_c, for n_c given labels and m_c clean samples of the class c. For a class without
clean samples, they are those of the given labels. E and M steps at these scores
come before the first q, because where most labels are wrong that T is far off. The clean samples
choose b, from 13 values, because the noisy labels cannot tell a weak classifier from noise: a larger
b with more noise in T fits them as well. With fewer than `least_clean` clean samples,
b = argmax of sum_j log sum_k softmax(b S_j)_k T[k, label_j] over the training samples in every step.
With reads="probabilities", S_j are logarithms of class probabilities by networks that have not seen
the sample; they stay, nothing refines them, and b is a temperature.
With transition="own", client i has T_i = rownorm(N_i + pull T), which never travels, for clients that
differ in their noise.

The last `num_refinements` outer iterations replace the ridge regression by logistic regressions, one
for each of K folds, which score the samples of the fold that they have not seen (`_folds`). They learn
from the given labels weighted by q_j,label, the probability that the label is right, if at least ten
labels per feature are expected to be right (sum_k N_kk >= 10 d) and at least a quarter of all labels to
be wrong, and otherwise from q. Few labels teach less than q does. But where many labels are wrong, a
classifier that learns from q repeats the errors of q.
They are better classifiers, but have no exact leave-one-out scores. The clean samples choose b here
too, from 41 values, and whether such scores replace those before; with fewer than `least_clean` clean
samples, they never do.

Afterwards both classifiers of `Detector` are trained and the guard decides. With targets="auto", the
cleaned classifier learns from the posteriors if they were refined.

Reference: Dawid and Skene, "Maximum likelihood estimation of observer error-rates using the EM
algorithm", Applied Statistics 1979, for q and T. The scores are own work.

Deviations: (1) The classifier of the first outer iterations is a ridge regression with a softmax of
heat b, not a fitted likelihood, because its leave-one-out scores are exact and need sums only. (2)
The prior of T adds `prior` samples to every entry; one whole sample would be noise by itself.

Bias: errors of the classifier that depend on the class are counted as noise in T, so EM flags too
many labels where features are weak. The guard and the cut at a false-discovery rate exist for this
reason.

Cost of a whole run: at most 3 + num_steps + num_passes (2 + num_steps) + num_refinements
(num_fold_rounds + 1 + num_steps) rounds of detection, in which a client sends D (D + 1) / 2 + O(C D)
floats once, C D + 13 per outer iteration with a ridge regression, K (C D + 1) per fold round and
C^2 + 13 per step; then the training of `as_given`, and three rounds for estimates and the guard. No
derivative is evaluated; a phase reads all of a client's samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._folds import CLOSED, Folds
from fedbilevel.detectors._state import State
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels

HEATS = tuple(2.0 ** (i / 2) for i in range(13))  # 1 to 64
PER_FEATURE = 10.0  # right labels, from which on given labels teach the folds better than posteriors
WRONG = 0.25  # share of wrong labels, below which both targets led to the same accuracy in trials
OF_LOGS = 4.0  # scores that are logarithms of probabilities need smaller factors


@dataclass(frozen=True, kw_only=True)
class LabelEM(Folds):
    statistics = (*Detector.statistics, "copies")
    estimates_transition = True
    num_passes: int = setting(8, "outer iterations with new scores", least=1)  # type: ignore[misc]
    num_refinements: int = setting(2, "outer iterations with scores of logistic classifiers, after these", least=0)
    num_steps: int = setting(20, "E and M steps per outer iteration, at most", least=1)
    tolerance: float = setting(0.002, "change of the entries of T at which these steps end", above=0)
    prior: float = setting(0.1, "samples that the prior adds to every entry of T", above=0)
    transition: Literal["shared", "own"] = setting(
        "shared", "one matrix T for all clients, or one for each client, which never travels"
    )
    pull: float = setting(50.0, "samples with which the shared T counts in a client's own T", above=0)

    @property
    def heats(self) -> tuple[float, ...]:
        """Return the values of b."""
        return HEATS if self.reads == "features" else tuple(heat / OF_LOGS for heat in HEATS)

    def num_detections(self) -> int:
        return self.num_passes + self.num_refinements

    def labels_of(self, state: State) -> str:
        refined = len(state.weights) > len(state.y)
        return "soft" if refined and self.targets == "auto" else super().labels_of(state)

    def fold_targets(self, state: State) -> str:
        """Return what the classifiers of the folds learn from, by the expected numbers of right and of all labels."""
        right, every = state.learned[1:].tolist()
        return "weighted" if PER_FEATURE * len(state.centre) <= right <= (1 - WRONG) * every else "soft"

    def init(self, fed: Federation) -> State:
        state = super().init(fed)
        if self.reads == "probabilities":
            return self._stepped(fed, self._heated(fed, self.read(fed, state), state.y.new_zeros(0)))
        clean, given = (part.double().view(len(state.centre) + 1, -1) for part in (state.clean, state.given))
        loose = (clean[-1] < 0.5 / fed.num_clients).to(state.y.dtype)  # the last row counts samples by class
        scaled = clean * (given[-1] / clean[-1].clamp(min=0.5 / fed.num_clients))
        state = self.first(fed, state, torch.where(loose.bool(), given, scaled), loose)
        copies = torch.where(loose.bool(), torch.zeros_like(clean[-1]), given[-1] / clean[-1].clamp(min=1e-9))
        return self._stepped(fed, self._heated(fed, state, copies.to(state.y.dtype)))

    def _heated(self, fed: Federation, state: State, copies: Tensor) -> State:
        """Return the state with the b that the clean samples choose, if there are enough of them."""
        if float(state.counts[1]) * fed.num_clients < self.least_clean:
            return state._replace(learned=_learned(state, CLOSED))
        fit = fed.mean(
            self.clean_fit, inverse=state.inverse, weights=state.weights, copies=copies, centre=state.centre,
            scale=state.scale,
        ).fit  # fmt: skip
        return state._replace(heat=self.heats[int(fit.argmax())], learned=_learned(state, float(fit.max())))

    def _stepped(self, fed: Federation, state: State) -> State:
        """Take E and M steps at the present scores until T hardly changes."""
        few = float(state.counts[1]) * fed.num_clients < self.least_clean
        for _ in range(self.num_steps):
            step = fed.mean(self.expected, score=state.score, transition=state.transition, heat=state.heat)
            counts = fed.num_clients * step.counts.double().view(round(math.sqrt(len(state.transition))), -1)
            transition = _rows.rows_normed(counts + self.prior).flatten().to(state.y.dtype)
            heat, change = (
                self.heats[int(step.fit.argmax())] if few else state.heat,
                float((transition - state.transition).abs().max()),
            )
            settled = change < self.tolerance and heat == state.heat
            learned = torch.stack([state.learned[0], counts.trace(), counts.sum()])
            state = state._replace(transition=transition, heat=heat, learned=learned)
            if settled:
                break
        return state

    def detect(self, fed: Federation, state: State) -> State:
        if fed.iteration <= self.num_passes:
            if self.reads == "features":
                state = self._stepped(fed, self._by_ridge(fed, state))
            if fed.iteration < self.num_passes:
                return state
        else:
            if self.reads == "probabilities" or float(state.learned[0]) == CLOSED:
                return state
            state = self.by_folds(fed, state, self.fold_targets(state))
            if float(state.learned[0]) == CLOSED:
                return state  # the present posteriors stay
            state = self._stepped(fed, state)
        last = fed.mean(
            self.labels, score=state.score, transition=state.transition, heat=state.heat, last=True, **state.units
        )
        return state._replace(x=last.x)

    def _by_ridge(self, fed: Federation, state: State) -> State:
        """Return the state with W of the present posteriors, its leave-one-out scores and b."""
        labels = fed.mean(
            self.labels, score=state.score, transition=state.transition, heat=state.heat, last=False, **state.units
        )
        inverse = self.inverse(fed, state)
        sums = (labels.sums + state.clean).double().view(len(inverse), -1)
        weights = (fed.num_clients * inverse @ sums).flatten().to(state.y.dtype)
        scores = fed.mean(self.scores, x=labels.x, leverage=state.leverage, weights=weights, **state.units)
        state = state._replace(x=labels.x, score=scores.score, weights=weights)
        return self._heated(fed, state, weights.new_ones(sums.shape[1]))

    @phase
    def clean_fit(
        self, clients: Clients, inverse: Tensor, weights: Tensor, copies: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return the log-likelihood of the clean samples at every b, each scored without itself.

        copies: by class, how often a clean sample is counted in W.
        """
        rows = []
        for score, label in self.clean_scores(clients, inverse, weights, copies, centre, scale):
            own = label.long()[:, None]
            rows.append(torch.stack([(b * score).log_softmax(1).gather(1, own).sum() for b in self.heats]))
        return {"fit": torch.stack(rows)}

    @phase
    def expected(self, clients: Clients, score: Tensor, transition: Tensor, heat: float) -> dict[str, Tensor]:
        """Return N and the log-likelihood at every b; renew the client's own T."""
        counts, fit = [], []
        heats = torch.tensor(self.heats)
        matrices = self.own(clients, transition)
        for train, own, matrix in zip(clients.samples("train"), clients.unpadded(score), matrices, strict=True):
            scores, label = own.view(len(train["label"]), -1), train["label"]
            counts.append(_rows.counted(_rows.log_posterior(scores, heat, matrix, label), label).flatten())
            fit.append(_rows.likelihoods(scores, heats, matrix, label))
        found = torch.stack(counts)
        if self.transition == "own":
            pulled = found + self.pull * transition
            normed = torch.stack([_rows.rows_normed(row.view(matrices[0].shape)).flatten() for row in pulled])
            clients.memory.write(transition=normed)
        return {"counts": found, "fit": torch.stack(fit)}

    @phase
    def labels(
        self,
        clients: Clients,
        score: Tensor,
        transition: Tensor,
        heat: float,
        centre: Tensor,
        scale: Tensor,
        last: bool,
    ) -> dict[str, Tensor | None]:
        """Keep the posteriors as x, and return sum z q', which is not needed at the end."""
        x, sums = [], []
        matrices = self.own(clients, transition)
        for train, own, matrix in zip(clients.samples("train"), clients.unpadded(score), matrices, strict=True):
            label = train["label"]
            log_q = _rows.log_posterior(own.view(len(label), -1), heat, matrix, label)
            x.append(soft_labels.as_x(log_q, label))
            if not last:
                z = _rows.standardised(train, centre, scale)
                sums.append((z.T @ soft_labels.posterior(x[-1], label)).flatten())
        return {"x": clients.padded(x), "sums": torch.stack(sums) if sums else None}

    @phase
    def scores(
        self, clients: Clients, x: Tensor, leverage: Tensor, weights: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Keep the leave-one-out scores of W."""
        score = []
        for train, own, h in zip(
            clients.samples("train"), clients.unpadded(x), clients.unpadded(leverage), strict=True
        ):
            z, q = _rows.standardised(train, centre, scale), soft_labels.posterior(own, train["label"])
            score.append(_rows.leave_one_out(z, weights.view(z.shape[1], -1), h.view(q.shape), q).flatten())
        return {"score": clients.padded(score)}

    def unseen_scores(self, clients: Clients, client: int, z: Tensor, weights: Tensor) -> Tensor:
        if len(weights) == len(clients.host.y0):
            return super().unseen_scores(clients, client, z, weights)
        return self.out_of_fold(z, weights, self.folds(clients, "held", client, len(z)))

    def own(self, clients: Clients, transition: Tensor) -> list[Tensor]:
        """Return the matrix T of every client."""
        rows = clients.rows(transition)
        if self.transition == "own":
            rows = clients.memory.read("transition", default=rows)
        side = round(len(transition) ** 0.5)
        return [row.view(side, side) for row in rows]


def _learned(state: State, fit: float) -> Tensor:
    """Return the clean samples' log-likelihood, and places for the expected numbers of right and of all labels."""
    return state.y.new_tensor([fit, 0.0, 0.0], dtype=torch.float64)
