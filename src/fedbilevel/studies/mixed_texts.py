"""From a folder of texts to weights of its sources, and the mixture that held-out text chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbilevel import displays, plots
from fedbilevel.data.tokens import Texts, read_texts
from fedbilevel.errors import SettingError
from fedbilevel.settings import made
from fedbilevel.studies.gaps import Gap
from fedbilevel.studies.texts import TextMixing, TextStudy, window_losses
from fedbilevel.studies.trials import cut
from fedbilevel.tasks import gpt


@dataclass(frozen=True, repr=False)
class MixedTexts:
    """Learned weights of sources of text, and the model of the mixture that held-out text chose.

    weights: learned weights, whether or not they were chosen; zero for sources that were cut.
    bilevel: the weights of the bilevel run, before sources were cut.
    alone: by source, how much a short training on it alone changed the loss on target text, and the
        standard error; junk raises it (studies/trials.py).
    prior: the weights at the start.
    sizes: tokens of every source.
    answer: "learned" or "prior".
    difference, error: loss on held-out target text after training on the learned mixture, minus that
        of the prior mixture, and its standard error over windows.
    test_losses: by mixture, the loss on the folder's text `test`; empty without one.
    y: weights of the model that was trained on the chosen mixture, which `loss` and `generate` use.
    shape: width, layers, heads and context of the model.
    """

    weights: Mapping[str, float]
    bilevel: Mapping[str, float]
    alone: Mapping[str, Gap]
    prior: Mapping[str, float]
    sizes: Mapping[str, int]
    answer: str
    difference: float
    error: float
    held_losses: Mapping[str, float]
    test_losses: Mapping[str, float]
    y: Mapping[str, Any]
    search_rounds: int  # gradients on a round's tokens, from the first one to the learned weights
    shape: gpt.Shape = gpt.Shape()

    @property
    def mixture(self) -> Mapping[str, float]:
        """Return the weights of the chosen mixture."""
        return self.weights if self.answer == "learned" else self.prior

    @property
    def sentence(self) -> str:
        held = self.held_losses
        return (
            f"the answer is the {self.answer} mixture: on held-out target text, the loss is {held['learned']:.4g} with "
            f"learned weights and {held['prior']:.4g} with the prior's (difference {self.difference:+.2g}, standard "
            f"error {self.error:.2g})"
        )

    def loss(self, text: str | bytes | np.ndarray) -> float:
        """Return the mean cross-entropy per token of a text, in nats; exp of it is the perplexity.

        Windows side by side are read, at most 2048 of them. What is left at the end is not read.
        """
        return float(window_losses(self.y, [[self._tokens(text)]], self.shape).mean())

    def generate(self, start: str, num: int = 100, *, seed: int = 0) -> str:
        """Return `start` with `num` more bytes that the model draws; bytes that are no text are replaced."""
        tokens = torch.as_tensor(self._tokens(start).astype(np.int64), device=self.y["head"].device)
        if not len(tokens) or len(self.y["head"]) > gpt.BYTES:
            raise SettingError(
                f"start is {start!r:.40} and the model knows {len(self.y['head'])} tokens, expected some text, and "
                "tokens that are bytes: give a first letter, and use y itself for other tokens."
            )
        found = gpt.sampled(self.y, tokens, num, self.shape, torch.Generator().manual_seed(seed))
        return bytes(found.tolist()).decode("utf-8", "replace")

    def _tokens(self, text: str | bytes | np.ndarray) -> np.ndarray:
        raw = text.encode() if isinstance(text, str) else text
        tokens = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.asarray(raw)
        most = len(self.y["head"])
        whole = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not whole or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < most):
            raise SettingError(
                f"the text is of shape {tokens.shape} and type {tokens.dtype}, expected a str, bytes, or one row of "
                f"tokens from 0 to {most - 1}: tokenise it as the sources were."
            )
        return tokens

    def plot(self, path: Path | str | None = None) -> Any:
        """Draw the learned weights as a matplotlib figure; short lines are the weights at the start.

        path: a file for the figure; None: it is only returned.
        """
        return plots.bars({row["source"]: row["weight"] for row in self.table()}, path, label="weight", mark=self.prior)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per source, the heaviest first; `pandas.DataFrame` reads it."""
        rows = [
            {
                "source": name,
                "weight": weight,
                "prior": self.prior[name],
                "bilevel": self.bilevel[name],
                "alone": self.alone[name].mean,
                "tokens": self.sizes[name],
            }
            for name, weight in self.weights.items()
        ]
        return sorted(rows, key=lambda row: (-float(row["weight"]), float(row["alone"])))

    def __repr__(self) -> str:
        return f"<weights of {len(self.weights)} sources of text; {self.sentence}>"

    def _repr_html_(self) -> str:
        rows = [
            [
                str(row["source"]),
                *(f"{row[name]:.3f}" for name in ("weight", "prior", "bilevel")),
                f"{row['alone']:+.3f}",
                str(row["tokens"]),
            ]
            for row in self.table()
        ]
        note = f"{self.sentence[:1].upper()}{self.sentence[1:]}."
        heads = ("source", "weight", "prior", "bilevel", "alone", "tokens")
        return displays.ranking(f"Weights of {len(rows)} sources of text", heads, rows, note)


def mix_texts(
    folder: Path | str, *, num_clients: int = 4, seed: int = 0, options: Mapping[str, Any] | None = None, **given: Any
) -> MixedTexts:
    """Learn weights of the sources in a folder (data/tokens.py says how it is laid out).

    num_clients: clients among which files are divided, where clients have no folders of their own.
    options: keywords of `solve`, such as device and precision.
    given: settings of `TextMixing`.
    """
    texts = read_texts(folder, num_clients=num_clients)
    return choose(TextStudy(texts, made(TextMixing, given), seed, options or {}))


def choose(study: TextStudy) -> MixedTexts:
    """Learn weights, cut sources that harm, train on both mixtures, and choose by held-out text."""
    y, prior = study.warm(), study.prior()
    bilevel = study.weights(study.learn(y))
    found = cut(study, y, bilevel)
    learned = found.weights
    models = {"learned": study.train(learned), "prior": study.train(prior)}
    held = {name: study.losses(y, study.held()) for name, y in models.items()}
    gap = Gap.of(held["learned"], held["prior"])
    answer = "learned" if gap.mean < -gap.error else "prior"
    tested = {name: float(study.losses(y, study.texts.test).mean()) for name, y in models.items() if _has_test(study)}
    means = {name: float(losses.mean()) for name, losses in held.items()}
    rounds = study.settings.num_warm + study.learning_rounds() + found.rounds
    return MixedTexts(
        learned, bilevel, found.alone, prior, study.texts.sizes(), answer, gap.mean, gap.error, means, tested,
        models[answer], rounds, study.settings.shape,
    )  # fmt: skip


def _has_test(study: TextStudy) -> bool:
    texts: Texts = study.texts
    return any(len(one) > study.settings.context for own in texts.test for one in own)
