"""A rival for mixtures of texts: weights by the loss in excess of a reference model, on pooled texts.

The reference is trained on the target text. A proxy is trained from scratch, and the weights of the
sources play against it: they grow where its loss is above that of the reference,

    e_s = mean over windows of max(loss of the proxy - loss of the reference, 0)
    a <- a exp(eta e), divided by its sum;   a <- (1 - c) a + c prior

The answer is the mean of a over all rounds. Text that the reference cannot predict has no excess.

Reference: Xie et al., "DoReMi: Optimizing Data Mixtures Speeds Up Language Model Pretraining", NeurIPS
2023, with its eta = 1 and c = 0.001. Differences: there, the reference is trained on the prior mixture
and knows nothing of a target, and the excess of every token is clipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.data.tokens import Texts
from fedbilevel.studies.doge import budget
from fedbilevel.studies.texts import TextStudy

ETA, SMOOTHING = 1.0, 1e-3


def rounds_of(study: TextStudy) -> int:
    """Return the number of rounds whose work is that of the search of `choose`.

    A round has a gradient on sources, and a loss of the reference, a third of a gradient.
    """
    return max(1, budget(study) * 3 // 4)


def stepped(weights: Tensor, excess: Tensor, prior: Tensor) -> Tensor:
    """Return weights after a round in which the sources have this excess."""
    grown = torch.softmax(weights.log() + ETA * excess, 0)
    return (1 - SMOOTHING) * grown + SMOOTHING * prior


def reference(study: TextStudy) -> Any:
    """Return a model that was trained on the target text, for as many rounds as `TextStudy.warm`."""
    texts = Texts([{"target": own} for own in study.taught()], study.texts.target, (), study.texts.num_tokens)
    return study.train({"target": 1.0}, texts, study.settings.num_warm)


def doremi(study: TextStudy, target: Any) -> dict[str, float]:
    """Return weights of the sources.

    target: the reference.
    """
    s, names = study.settings, study.texts.names
    device = next(iter(target.values())).device
    held = lambda name: [one for own in study.texts.sources for one in own.get(name, ())]
    sources = [study.windows(held(name), s.num_windows, (i,)).to(device) for i, name in enumerate(names)]
    y = {name: leaf.to(device).clone().requires_grad_() for name, leaf in study.problem().y0.items()}
    adam, draw = torch.optim.Adam(list(y.values()), s.lr, (0.9, 0.99)), np.random.default_rng([study.seed, 5])
    each = max(1, len(study.texts.sources) * s.batch_size // len(names))
    prior = torch.tensor(list(study.prior().values()), device=device)
    weights, mean, rounds = prior, torch.zeros_like(prior), rounds_of(study)
    low = study.options.get("precision", "full") != "full"
    for t in range(1, rounds + 1):
        rows = torch.cat([own[torch.as_tensor(draw.integers(len(own), size=each))] for own in sources])
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            with torch.no_grad():
                theirs = study.entropy(target, rows).float()
            ours = study.entropy(y, rows).float()
        weights = stepped(weights, (ours.detach() - theirs).clamp(min=0).view(-1, each).mean(1), prior)
        adam.zero_grad()
        (weights @ ours.view(-1, each).mean(1)).backward()
        adam.step()
        mean += (weights - mean) / t
    return dict(zip(names, mean.double().tolist(), strict=True))
