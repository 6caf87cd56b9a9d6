"""A rival for mixtures of texts: scores of one step instead of the hypergradient, on pooled texts.

The score of a source is the product of its gradient with that of the target: how much a plain step on
that source would lower the target's loss. Weights take the same mirror steps as in
studies/mixture.py, with the same divergence from the prior, and y follows by Adam.

Reference: Fan, Pagliardini, Jaggi, "DoGE: Domain Reweighting with Generalization Estimation", ICML
2024. Differences: the length of the steps of the weights, and y starts warm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.problem.windows import Windows
from fedbilevel.studies.mixture import Mixture
from fedbilevel.studies.texts import TextStudy
from fedbilevel.studies.trials import REPEATED, num_rounds
from fedbilevel.tasks.mixing import divergence


def budget(study: TextStudy) -> int:
    """Return how many gradients a rival may take: more than `choose` takes before its trainings from scratch.

    These are the rounds of `TextStudy.learn`, four readings of every source, and a trial per source and two
    more. Those of `TextStudy.warm` are not counted.
    """
    names = study.texts.names
    trials = sum(num_rounds(study, name, REPEATED) for name in names) + (len(names) + 2) * study.settings.num_trial
    return study.learning_rounds() + trials


def rounds_of(study: TextStudy) -> int:
    """Return the number of rounds, each with a gradient on sources and one on the target."""
    return budget(study) // 2


def doge(study: TextStudy, y: Any) -> dict[str, float]:
    """Return weights of the sources.

    y: where the model starts.
    """
    s, names, rounds = study.settings, study.texts.names, rounds_of(study)
    device = next(iter(y.values())).device
    held = lambda name: [one for own in study.texts.sources for one in own.get(name, ())]
    sources = [study.windows(held(name), s.num_windows, (i,)).to(device) for i, name in enumerate(names)]
    target = study.windows([one for own in study.taught() for one in own], s.num_windows, (len(names),)).to(device)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in y.values()]
    adam, draw = torch.optim.Adam(leaves, s.lr, (0.9, 0.99)), np.random.default_rng([study.seed, 4])
    num = len(study.texts.sources) * s.batch_size
    prior = torch.tensor(list(study.prior().values()), device=device)
    x, m, squares = prior.log(), torch.zeros_like(prior), 0.0
    low = study.options.get("precision", "full") != "full"

    def gradient(windows: Windows, number: int) -> list[Tensor]:
        rows = windows[torch.as_tensor(draw.integers(len(windows), size=number))]
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            loss = study.entropy(dict(zip(y, leaves, strict=True)), rows).mean()
        return list(torch.autograd.grad(loss, leaves))

    for t in range(1, rounds + 1):
        goal, total, weights = gradient(target, num), [torch.zeros_like(leaf) for leaf in leaves], torch.softmax(x, 0)
        scores = torch.zeros_like(x)
        for i, windows in enumerate(sources):
            own = gradient(windows, max(1, num // len(names)))
            scores[i] = sum((a * b).sum() for a, b in zip(own, goal, strict=True))
            total = [a + weights[i] * b for a, b in zip(total, own, strict=True)]
        pull = torch.func.grad(lambda logit: s.kl * divergence(logit, prior))(x)
        h = weights * ((weights * scores).sum() - scores) + pull
        step = Mixture(radius=s.radius * (1 - (t - 1) / rounds))
        x, m, squares = step.step(x, h, m, squares, t)
        for leaf, one in zip(leaves, total, strict=True):
            leaf.grad = one
        adam.step()
    return dict(zip(names, torch.softmax(x.double(), 0).tolist(), strict=True))
