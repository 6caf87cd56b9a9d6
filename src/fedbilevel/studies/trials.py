"""Which sources of text help: short trainings that begin at the same model.

y is the model that was trained with the prior's weights, and L(y) its loss on the target text that also
teaches x. All trainings are short, and all of them start at y:

1. On every source alone, with a tenth of the step, and the source is read once at most. A source helps
   if L falls below L(y) by more than two standard errors: training on it is then better than no
   training at all. A source that raises L harms, and is cut. In between, the bilevel run decides: it
   keeps a source at a quarter of its prior weight at least. With whole steps and several readings, a
   model soon knows a short clean source by heart, which raises L as junk does.
2. Sources that are left have the prior's weights. The bilevel weights among them replace these if
   they are better by more than two standard errors, and if no source would be repeated more than four
   times in the training from scratch: short trainings do not see what many repetitions do.

If no source helps, all are kept. Standard errors are those of paired differences over windows.

The limit of four repetitions is that of Muennighoff et al., "Scaling Data-Constrained Language
Models", NeurIPS 2023: until then, repeated text is almost as good as new text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.studies.gaps import Gap
from fedbilevel.studies.texts import TextStudy

LOWERED = 0.25  # of its prior weight: the bilevel run speaks against a source that has less
REPEATED = 4  # times that a source is read without harm
SHORT = 0.1  # of the usual step, in a training on a source alone
_LEAST = 10  # rounds of a trial, even if a source is short


class Cut(NamedTuple):
    """Weights of all sources, zero for those that are cut.

    alone: by source, how much training on it alone changed the loss.
    """

    weights: dict[str, float]
    alone: dict[str, Gap]
    rounds: int  # of all trials together


def among(weights: Mapping[str, float], kept: Collection[str]) -> dict[str, float]:
    """Return weights whose sum is one, and which are zero but for the sources that are kept."""
    total = sum(weight for name, weight in weights.items() if name in kept)  # in the order of all sources
    return {name: weight / total if name in kept else 0.0 for name, weight in weights.items()}


def num_rounds(study: TextStudy, name: str, readings: int = 1) -> int:
    """Return the rounds of a training on a source alone, which reads the source so many times at most."""
    whole = readings * study.texts.sizes()[name] // study.tokens_of_round()
    return min(study.settings.num_trial, max(_LEAST, whole))


def cut(study: TextStudy, y: Any, learned: Mapping[str, float]) -> Cut:
    """Return weights of the sources that help.

    y: a model that was trained with the prior's weights.
    learned: weights of the bilevel run.
    """
    prior, trial, spent = study.prior(), study.settings.num_trial, 0

    def judged(weights: Mapping[str, float], rounds: int, step: float = 1.0) -> np.ndarray:
        nonlocal spent
        spent += rounds
        return study.losses(study.train_on(y, weights, rounds, step), study.taught())

    start = study.losses(y, study.taught())
    alone = {name: Gap.of(judged(among(prior, {name}), num_rounds(study, name), SHORT), start) for name in prior}
    if not any(gap.better for gap in alone.values()):
        return Cut(prior, alone, spent)
    held = {name for name in prior if learned[name] >= LOWERED * prior[name]}
    kept = {name for name, gap in alone.items() if gap.better or (name in held and not gap.worse)}
    plain, graded = among(prior, kept), among(learned, kept)
    if _repetitions(study, graded) <= REPEATED and Gap.of(judged(graded, trial), judged(plain, trial)).better:
        return Cut(graded, alone, spent)
    return Cut(plain, alone, spent)


def _repetitions(study: TextStudy, weights: Mapping[str, float]) -> float:
    """Return how often the training from scratch reads the source that it repeats most."""
    tokens, sizes = study.settings.num_train * study.tokens_of_round(), study.texts.sizes()
    return max(tokens * weight / sizes[name] for name, weight in weights.items())
