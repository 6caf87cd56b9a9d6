"""Mixtures of texts, of which half are corrupted: weights, and the loss of a model trained on them.

data      "shakespeare": the plays as one text, rolled by a random number of characters and cut into
          four clean sources of different lengths, four that are then corrupted (characters in random
          order, words backwards, other letters, one line over and over), a target and a test text; or
          "chains": random Markov chains of which half the sources follow the target's, for tests
method    "learned" (by default); "uniform" and "proportional" weights; "clean", the hand-chosen half
          by length; "target", the target text alone; "uncut", the bilevel weights from which "learned"
          cuts sources; "doge" and "doremi" (studies/doge.py, studies/doremi.py)
corrupted false: the four other sources stay as clean as the first ones
model     settings of TextMixing (studies/texts.py)
options   precision and strategy (runs/options.py); batch sizes are settings of the model
seed      of the first repetition

Every model is trained from scratch with the same number of tokens, and the weights of "doge" and
"doremi" may be learned with more than those of "learned".

Figures: test_loss; bad_weight, the total weight of the four other sources; tokens of the last training;
search_tokens, those of everything before it (of "learned", with the model that is trained on the prior
mixture for the choice); of "learned" also chosen, 1 if held-out target text prefers it to the prior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.locations import find
from fedbilevel.data.sets.shakespeare import FILE
from fedbilevel.data.tokens import Texts
from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.runs.options import keywords
from fedbilevel.settings import made
from fedbilevel.studies import doge, doremi, given
from fedbilevel.studies.mixed_texts import choose
from fedbilevel.studies.outcome import RowOutcome
from fedbilevel.studies.texts import TextMixing, TextStudy
from fedbilevel.studies.trials import among
from fedbilevel.tasks.mixing import chain, corrupted, walk

KNOWN = {
    "data": "text", "method": "text", "model": "table", "options": "table", "seed": "whole", "clients": "whole",
    "corrupted": "flag",
}  # fmt: skip
METHODS = ("learned", "uncut", "uniform", "proportional", "clean", "target", "doge", "doremi")
DATA = ("shakespeare", "chains")
OPTIONS = ("precision", "strategy")
GOOD = {"clean a": 0.054, "clean b": 0.09, "clean c": 0.135, "clean d": 0.18}  # shares of all text
BAD = {"shuffled": 0.108, "words backwards": 0.108, "other letters": 0.108, "repeated line": 0.108}
TARGET, TEST = 0.036, 0.072
_SHORT = 20_000  # characters of the chains


def texts(data: str, seed: int, num_clients: int = 4, *, junk: bool = True) -> Texts:
    """Return sources, target and test text, each divided among the clients.

    junk: whether half of the sources are corrupted.
    """
    rng = np.random.default_rng([seed, 7])
    shares = {**GOOD, **BAD, "target": TARGET, "test": TEST}
    if data == "shakespeare":
        (place,) = find(FILE)
        whole = place.read_text(encoding="utf-8")
        first = int(rng.integers(len(whole)))
        whole, ends = whole[first:] + whole[:first], (np.cumsum(list(shares.values())) * len(whole)).astype(int)
        parts = dict(zip(shares, (whole[a:b] for a, b in zip([0, *ends], ends, strict=False)), strict=True))
        if junk:
            parts |= {name: corrupted(parts[name], name, "".join(sorted(set(whole))), rng) for name in BAD}
    elif data == "chains":
        good = chain(rng)
        bad = {name: chain(rng) if junk else good for name in BAD}
        parts = {name: walk(bad.get(name, good), int(share * _SHORT), rng) for name, share in shares.items()}
    else:
        raise UnknownNameError("data", data, DATA)
    tokens = {name: np.frombuffer(text.encode(), np.uint8) for name, text in parts.items()}
    part = lambda name, i: [np.array_split(tokens[name], num_clients)[i]]
    every = range(num_clients)
    return Texts(
        [{name: part(name, i) for name in (*GOOD, *BAD)} for i in every],
        [part("target", i) for i in every],
        [part("test", i) for i in every],
    )


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("data",))
    method, seed = row.get("method", "learned"), row.get("seed", 0) + repetition
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    for name in row.get("options", {}):
        if name not in OPTIONS:
            raise ExperimentError(
                f"options has {name!r:.80}, expected {' and '.join(OPTIONS)} alone: leave it out, or give it in the "
                "row or its model."
            )
    options = keywords({**row.get("options", {}), "device": device})
    options = {name: options[name] for name in ("device", *OPTIONS)}
    settings = made(TextMixing, row.get("model", {}))
    own = texts(row["data"], seed, row.get("clients", 4), junk=row.get("corrupted", True))
    study = TextStudy(own, settings, seed, options)
    say(f"{method}, seed {seed}")
    figures, tested, searched = {}, study.texts.test, 0.0
    if method == "learned":
        found = choose(study)
        weights: Mapping[str, float] = found.weights
        searched = found.search_rounds + settings.num_train
        figures = {"test_loss": found.test_losses["learned"], "chosen": float(found.answer == "learned")}
    elif method == "target":
        weights = {}
        alone = Texts([{"target": own} for own in study.texts.target], study.texts.target, tested)
        figures["test_loss"] = float(study.losses(study.train({"target": 1.0}, alone), tested).mean())
    else:
        weights, searched = _weights(study, method)
        figures["test_loss"] = float(study.losses(study.train(weights), tested).mean())
    if weights:
        figures["bad_weight"] = sum(weights[name] for name in BAD)
    figures["tokens"] = float(settings.num_train * study.tokens_of_round())
    figures["search_tokens"] = float(searched * study.tokens_of_round())
    return RowOutcome(figures, [{f"weight of {name}": weight for name, weight in weights.items()}])


def _weights(study: TextStudy, method: str) -> tuple[dict[str, float], float]:
    """Return weights, and the rounds before they are known, in gradients on the tokens of a round."""
    warm = study.settings.num_warm
    if method == "uncut":
        return study.weights(study.learn()), warm + study.learning_rounds()
    if method == "doge":
        return doge.doge(study, study.warm()), warm + 2 * doge.rounds_of(study)
    if method == "doremi":
        return doremi.doremi(study, doremi.reference(study)), warm + doremi.rounds_of(study) * 4 / 3
    if method == "clean":
        return among(study.prior("proportional"), GOOD), 0.0
    return study.prior("proportional" if method == "proportional" else "uniform"), 0.0
