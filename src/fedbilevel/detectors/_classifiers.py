"""Training of the classifiers `cleaned` and `plain` by sums, and the choice of their l2.

Both are minimisers of

    (sum of losses of training and clean samples) / (sum of their weights) + l2/2 |W|^2

`plain` by the given labels, `cleaned` by the targets of x: the given labels of the samples that x
keeps, the posteriors, or the given labels weighted by their posteriors.

Without a number, each classifier has its own l2 of `L2_GRID`, by the same measurement. One tenth of
each client's training samples, the fold, is set aside; a client with fewer than ten has none. Both
classifiers are trained side by side for every l2 on the other samples, in the same rounds. The l2 of
a classifier is the one with the lowest loss of the fold, by the targets of this classifier; without
a fold, or with equal losses, it is the smallest. Training goes on with all samples from the chosen
classifiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._descent import bound_of, bounded_step
from fedbilevel.detectors._state import State
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels

NAMES = ("cleaned", "plain")
L2_GRID = (0.001, 0.01, 0.1, 1.0)
TARGETS = (
    "train the cleaned classifier on labels that are kept, on all posteriors, or on all given labels weighted by "
    "their posteriors; auto: the rule of the detector, or else kept labels, and posteriors if more than half of the "
    "labels are estimated to be wrong"
)
Part = Literal["all", "rest", "fold"]  # of a client's training samples


class Labelled(NamedTuple):
    """Training samples of one client, with what both classifiers learn from them."""

    z: Tensor
    target: Tensor  # (n, C), of the cleaned classifier
    keep: Tensor  # (n, 1), its weights of samples
    plain: Tensor  # (n, C), the given labels


@dataclass(frozen=True, kw_only=True)
class Classifiers(ServerAlgorithm):
    l2: float | None = setting(
        None, "weight of the squared norm of both classifiers; None: chosen for each of them on a fold", above=0
    )
    num_fit_rounds: int = setting(
        40, "rounds that train both classifiers; if l2 is None, the first half of them chooses it", least=1
    )
    targets: Literal["auto", "kept", "soft", "weighted"] = setting("auto", TARGETS)

    def num_choice_rounds(self) -> int:
        """Return how many of the rounds choose l2, if it is chosen."""
        return max(1, self.num_fit_rounds // 2)

    def num_pairs(self) -> int:
        """Return how often both classifiers are trained side by side in the first round."""
        return len(L2_GRID) if self.l2 is None else 1

    def stepped(self, fed: Federation, state: State, number: int) -> State:
        """Take one accelerated step of every classifier, each on a bound of its loss.

        number: of the training round, from 1 on.
        """
        found = self.summed(fed, state)
        l2 = state.y.new_tensor(self.strengths(state), dtype=torch.float64)[:, :, None, None]
        weight = found.weight.double().view(-1, 2, 1, 1)
        now, last = (pairs(state, part) for part in (state.ahead, state.models))
        slope = pairs(state, found.slope) / weight + l2 * now
        steepest = weight.new_tensor([self.steepest(), 1.0]).view(2, 1, 1)
        bound = bound_of(_rows.unpacked(state.gram.double()), weight / steepest, l2)
        steps = [bounded_step(*parts) for parts in zip(bound, slope, now, last, state.age, strict=True)]
        new, further, age = zip(*steps, strict=True)
        models, ahead = (torch.stack(parts).flatten().to(state.y.dtype) for parts in (new, further))
        state = state._replace(models=models, ahead=ahead, age=[*age], y=in_input_units(state, new[0][0]))
        return self._chosen(fed, state) if self.choosing(state) and number == self.num_choice_rounds() else state

    def choosing(self, state: State) -> bool:
        return self.l2 is None and "l2" not in state.found

    def strengths(self, state: State) -> list[list[float]]:
        """Return l2 of both classifiers, for every pair that is trained."""
        if self.choosing(state):
            return [[l2, l2] for l2 in L2_GRID]
        return [[self.l2, self.l2] if self.l2 is not None else [state.found["l2"][name] for name in NAMES]]

    def fixed_l2(self) -> float:
        """Return the l2 of classifiers that are trained for detection, before one is chosen."""
        return L2_GRID[0] if self.l2 is None else self.l2

    def _chosen(self, fed: Federation, state: State) -> State:
        """Return the state with the classifiers that have the lowest losses on the fold."""
        best = self.fold_losses(fed, state).double().view(-1, 2).argmin(0).tolist()
        models = state.models.view(len(L2_GRID), 2, -1)[best, [0, 1]].flatten()
        l2 = {name: L2_GRID[i] for name, i in zip(NAMES, best, strict=True)}
        state = state._replace(models=models, ahead=models, age=[0], found={**state.found, "l2": l2})
        return state._replace(y=self.classifier(state, 0))

    def classifier(self, state: State, number: int) -> Tensor:
        """Return the classifier 0, cleaned, or 1, plain, in the form of y."""
        return in_input_units(state, pairs(state, state.models)[0, number])

    def labels_of(self, state: State) -> str:
        """Return the targets of the cleaned classifier."""
        if self.targets != "auto":
            return self.targets
        return "soft" if state.found["noise"] > 0.5 else "kept"

    # ---- what a detector may change -------------------------------------------------------------------------------

    def summed(self, fed: Federation, state: State) -> Any:
        """Return the slopes of all classifiers and their weights, as means over clients."""
        part: Part = "rest" if self.choosing(state) else "all"
        targets = self.labels_of(state)
        return fed.mean(self.slopes, ahead=state.ahead, x=state.x, targets=targets, part=part, **state.units)

    def fold_losses(self, fed: Federation, state: State) -> Tensor:
        """Return the losses of all classifiers on the fold, as means over clients."""
        targets = self.labels_of(state)
        found = fed.mean(self.folded, models=state.models, x=state.x, targets=targets, **state.units)
        losses: Tensor = found.losses
        return losses

    def losses(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return the cleaned classifier's loss of every sample."""
        return -(target * scores.log_softmax(1)).sum(1)

    def gap(self, p: Tensor, target: Tensor) -> Tensor:
        """Return the gradient of these losses in the scores, from probabilities."""
        return p - target

    def steepest(self) -> float:
        """Return how much steeper these losses may be than cross-entropies."""
        return 1.0

    # ---- at the clients -------------------------------------------------------------------------------------------

    @phase
    def slopes(
        self, clients: Clients, ahead: Tensor, x: Tensor, centre: Tensor, scale: Tensor, targets: str, part: Part
    ) -> dict[str, Tensor]:
        """Return sum z (p - target)' for all classifiers, and the sums of both sample weights."""
        slopes, weights = [], []
        for (z, target, keep, plain), val in zip(
            labelled(clients, x, centre, scale, targets, part), clients.samples("val"), strict=True
        ):
            zc = _rows.standardised(_rows.trusted(val), centre, scale)
            checked = _rows.given(_rows.trusted(val)["label"], plain.shape[1], z)
            first, second = (scores(some, ahead, plain.shape[1]).softmax(2) for some in (z, zc))
            gaps, clean = [], []
            for i in range(0, first.shape[1], 2):
                gaps += [keep * self.gap(first[:, i], target), first[:, i + 1] - plain]
                clean += [self.gap(second[:, i], checked), second[:, i + 1] - checked]
            slope = torch.stack(gaps, 1).flatten(1).T @ z + torch.stack(clean, 1).flatten(1).T @ zc
            slopes.append(slope.view(len(gaps), -1, z.shape[1]).transpose(1, 2).flatten())
            weights.append(torch.stack([keep.sum(), keep.new_tensor(len(z))]) + len(zc))
        return {"slope": torch.stack(slopes), "weight": torch.stack(weights)}

    @phase
    def folded(
        self, clients: Clients, models: Tensor, x: Tensor, centre: Tensor, scale: Tensor, targets: str
    ) -> dict[str, Tensor]:
        """Return the sums of the losses of all classifiers on the fold."""
        rows = []
        for z, target, keep, plain in labelled(clients, x, centre, scale, targets, "fold"):
            every, sums = scores(z, models, plain.shape[1]), []
            for i in range(0, every.shape[1], 2):
                sums += [(keep[:, 0] * self.losses(every[:, i], target)).sum()]
                sums += [-(plain * every[:, i + 1].log_softmax(1)).sum()]
            rows.append(torch.stack(sums))
        return {"losses": torch.stack(rows)}


def labelled(clients: Clients, x: Tensor, centre: Tensor, scale: Tensor, targets: str, part: Part) -> list[Labelled]:
    """Return a part of the training samples of every client."""
    found = []
    for train, own, used in zip(clients.samples("train"), clients.unpadded(x), numbers(clients, part), strict=True):
        z, q = _rows.standardised(train, centre, scale), soft_labels.posterior(own, train["label"])
        plain = _rows.given(train["label"], q.shape[1], z)
        target, keep = learned_from(q, train["label"], targets)
        found.append(Labelled(z[used], target[used], keep[used], plain[used]))
    return found


def learned_from(q: Tensor, label: Tensor, targets: str) -> tuple[Tensor, Tensor]:
    """Return targets (n, C) and weights (n, 1) of samples with posteriors q."""
    plain = _rows.given(label, q.shape[1], q)
    right = (q * plain).sum(1, keepdim=True)
    keep = {"soft": torch.ones_like(right), "weighted": right, "kept": (right >= 0.5).to(q.dtype)}[targets]
    return q if targets == "soft" else plain, keep


def numbers(clients: Clients, part: Part) -> list[Any]:
    """Return the numbers of the training samples in a part, for every client.

    The fold is drawn by the seed and the client, so it is the same in every round and on every engine.
    """
    if part == "all":
        return [slice(None) for _ in range(len(clients))]
    found, sizes = [], clients.host.data.sizes["train"][clients.positions]
    for client, num in zip(clients.ids.tolist(), sizes.tolist(), strict=True):
        rest, fold = clients.host.stream.divided("fold", client, num, num // 10 / num)
        found.append((rest if part == "rest" else fold).to(clients.device))
    return found


def scores(z: Tensor, models: Tensor, num_classes: int) -> Tensor:
    """Return the scores (n, k, C) of k classifiers, by one product."""
    every = [*models.view(-1, z.shape[1], num_classes)]
    return (z @ torch.cat(every, dim=1)).view(len(z), len(every), num_classes)


def pairs(state: State, flat: Tensor) -> Tensor:
    """Return classifiers (k, 2, d + 1, C) in float64, k of each."""
    return flat.double().view(-1, 2, len(state.centre) + 1, len(state.y) // (len(state.centre) + 1))


def in_input_units(state: State, model: Tensor) -> Tensor:
    """Return a classifier of z as y, the weights and then the biases for unscaled features."""
    weight = model[:-1] / state.scale.double()[:, None]
    bias = model[-1] - state.centre.double() @ weight
    return torch.cat([weight.flatten(), bias]).to(state.y.dtype)
