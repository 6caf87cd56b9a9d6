"""How much each source of text should count for a language model that is judged on target text.

x holds one logit per source, y all weights of a GPT (tasks/gpt.py), and w = softmax(x):

    g(x, y) = sum_s w_s CE(y; source s)
    f(x, y) = CE(y; target) + kl * KL(w || prior)

1. y is trained with the prior's weights, because a model that knows nothing favours whatever is
   easiest to predict (`warm`).
2. Weights are learned by the first-order penalty method, with Adam for y and steps of x that cannot
   collapse the mixture (`learn`, studies/mixture.py).
3. Short trainings from the warm y tell which sources help, and the others are cut (studies/trials.py).
4. A model is trained from scratch on windows that are drawn by the weights that are left, and another
   one by the prior's, with equally many tokens (`train`). Held-out target text chooses between them.

Samples are windows that start anywhere in a text. Which windows a client may draw depends on the seed,
the client's number and the source alone, so that every engine draws the same ones.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softmax

from fedbilevel.data.tokens import Texts, Tokens, cut
from fedbilevel.errors import DataError, ProblemWarning, SettingError
from fedbilevel.federation.schedule import Schedule
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.problem.windows import Windows
from fedbilevel.runs.endings import whole
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.settings import Settings, setting
from fedbilevel.studies.mixture import Mixture
from fedbilevel.tasks import gpt
from fedbilevel.tasks.mixing import divergence

Prior = Literal["uniform", "proportional"]
_EVALUATED = 2048  # windows of held-out or test text, at most
_AT_ONCE = 64
_HELD = 0.5  # share of the target text by which mixtures are compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextMixing(Settings):
    """Settings of the model and of its training."""

    width: int = setting(64, "numbers per position of the model", least=1)
    layers: int = setting(2, "layers of the model", least=1)
    heads: int = setting(2, "heads of attention; they divide the width", least=1)
    context: int = setting(64, "tokens from which the next ones are predicted", least=1)
    batch_size: int = setting(16, "windows per client and step", least=1)
    lr: float = setting(0.002, "step of Adam", above=0)
    num_warm: int = setting(300, "rounds in which y is trained before x moves", least=1)
    num_rounds: int = setting(300, "rounds in which weights are learned", least=1)
    num_trial: int = setting(60, "rounds of a short training that tells whether a source helps", least=1)
    num_train: int = setting(1000, "rounds of a training from scratch", least=1)
    num_windows: int = setting(4096, "windows of every source that a client may draw", least=1)
    penalty: float = setting(10.0, "weight of the lower level in the penalty method", symbol="lam", above=0)
    kl: float = setting(0.02, "weight of the divergence from the prior's weights", least=0)
    radius: float = setting(0.2, "largest change of a logit in a round; it falls to zero", above=0)
    prior: Prior = setting("proportional", "weights at the start, and the other side of the choice")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise SettingError(f"heads is {self.heads}, expected a divisor of width, which is {self.width}.")

    @property
    def shape(self) -> gpt.Shape:
        return gpt.Shape(self.width, self.layers, self.heads, self.context)


@dataclasses.dataclass(frozen=True)
class TextStudy:
    """Texts, settings, and how to compute.

    texts: their target is cut in two: one half teaches weights, the other one compares mixtures.
    options: keywords of `solve`, such as device and precision.
    """

    texts: Texts
    settings: TextMixing
    seed: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def prior(self, kind: Prior | None = None) -> dict[str, float]:
        sizes = self.texts.sizes()
        each = sizes if (kind or self.settings.prior) == "proportional" else dict.fromkeys(sizes, 1)
        return {name: size / sum(each.values()) for name, size in each.items()}

    def taught(self) -> list[Tokens]:
        return [cut(own, _HELD)[0] for own in self.texts.target]

    def held(self) -> list[Tokens]:
        return [cut(own, _HELD)[1] for own in self.texts.target]

    # ---- the steps --------------------------------------------------------------------------------------------------

    def warm(self) -> Any:
        """Return y after training with the prior's weights."""
        return self._adam(self.problem(), self.clients(), self.settings.num_warm).y

    def learning_rounds(self) -> int:
        """Return the rounds of `learn` in gradients: each has four on sources and one on the target."""
        return 5 * self.settings.num_rounds

    def learn(self, y: Any | None = None) -> Result:
        """Return the run that learns the weights.

        y: where it starts; None: `warm`.
        """
        s, problem = self.settings, dataclasses.replace(self.problem(), y0=y or self.warm())
        method = Mixture(
            order=1, num_local_steps=1, lr_upper=1.0, lr_lower=s.lr, lower_optimiser="adam", adam_beta2=0.99,
            penalty=s.penalty, radius=s.radius, num_waiting=min(20, s.num_rounds // 4),
        )  # fmt: skip
        return self._solve(problem, self.clients(), method, s.num_rounds, schedule=Schedule(end=s.num_rounds))

    def weights(self, result: Result) -> dict[str, float]:
        return dict(zip(self.texts.names, softmax(result.x["logit"].double(), 0).tolist(), strict=True))

    def train(self, weights: Mapping[str, float], texts: Texts | None = None, num_rounds: int | None = None) -> Any:
        """Return y after training from scratch on windows that are drawn by these weights."""
        clients = self.drawn(weights, texts or self.texts)
        return self._adam(self._plain(), clients, num_rounds or self.settings.num_train).y

    def train_on(self, y: Any, weights: Mapping[str, float], num_rounds: int, step: float = 1.0) -> Any:
        """Return y after further training on windows that are drawn by these weights.

        step: share of the usual step.
        """
        problem, clients = dataclasses.replace(self._plain(), y0=y), self.drawn(weights, self.texts)
        return self._stage(problem, clients, num_rounds, step * self.settings.lr, Schedule(end=num_rounds)).y

    def tokens_of_round(self) -> int:
        return self.settings.batch_size * self.settings.context * len(self.texts.sources)

    def losses(self, y: Any, tokens: Sequence[Tokens]) -> np.ndarray:
        """Return the cross-entropy of every window of texts, side by side, at most 2048 of them."""
        return window_losses(y, tokens, self.settings.shape)

    # ---- problem and clients ----------------------------------------------------------------------------------------

    def entropy(self, y: Any, text: Tensor) -> Tensor:
        return gpt.entropy(y, text, self.settings.shape)

    def problem(self) -> Problem:
        device = self.options.get("device", "cpu")  # a loss that copies to a device cannot be captured there
        prior, kl = torch.tensor(list(self.prior().values()), device=device), self.settings.kl
        return Problem(
            upper=lambda x, y, batch: self.entropy(y, batch["text"]) + kl * divergence(x["logit"], prior),
            lower=lambda x, y, batch: (
                batch["factor"] * softmax(x["logit"], 0)[batch["source"]] * self.entropy(y, batch["text"])
            ),
            x0={"logit": prior.log()},
            y0=gpt.weights(self.settings.shape, self.seed, self.texts.num_tokens),
            name="mixing of texts",
        )

    def _plain(self) -> Problem:
        lower = lambda x, y, batch: batch["factor"] * self.entropy(y, batch["text"])
        return dataclasses.replace(self.problem(), lower=lower)

    def clients(self) -> list[Holdings]:
        """Return clients with equally many windows of each of their sources.

        A sample counts by `factor` times the weight of its source, so that the mean over clients is
        g, with the mean over its holders as the loss of a source.
        """
        names, num = self.texts.names, self.settings.num_windows
        found: list[Holdings] = []
        for i, own in enumerate(self.texts.sources):
            held = [name for name in names if name in own]
            text = Windows.joined([self.windows(own[name], num, (i, names.index(name))) for name in held])
            factor = [len(held) * self._share(name) for name in held]
            train = {
                "text": text,
                "source": np.repeat([names.index(name) for name in held], num),
                "factor": np.repeat(np.array(factor, dtype=np.float32), num),
            }
            found.append({"train": train, "val": self._target(i)})
        return found

    def drawn(self, weights: Mapping[str, float], texts: Texts) -> list[Holdings]:
        """Return clients whose windows are drawn by weights of the sources.

        Windows of a client without any of these sources do not count.
        """
        names, num = texts.names, self.settings.num_windows * len(texts.names)
        found: list[Holdings] = []
        for i, own in enumerate(texts.sources):
            held = [name for name in names if name in own]
            shares = np.array([weights[name] * self._share(name, texts) for name in held])
            among = shares / shares.sum() if shares.any() else np.full(len(held), 1 / len(held))
            counts = np.random.default_rng([self.seed, 2, i]).multinomial(num, among)
            parts = [
                self.windows(own[name], count, (i, names.index(name), 1))
                for name, count in zip(held, counts.tolist(), strict=True)
                if count
            ]
            factor = np.full(num, shares.sum(), dtype=np.float32)
            found.append({"train": {"text": Windows.joined(parts), "factor": factor}, "val": self._target(i)})
        return found

    def _share(self, name: str, texts: Texts | None = None) -> float:
        """Return the number of clients divided by the number of those that hold a source."""
        sources = (texts or self.texts).sources
        return len(sources) / sum(name in own for own in sources)

    def _target(self, i: int) -> dict[str, Windows]:
        return {"text": self.windows(self.taught()[i], self.settings.num_windows, (i, len(self.texts.names)))}

    def windows(self, tokens: Tokens, num: int, address: tuple[int, ...]) -> Windows:
        """Draw windows that begin anywhere in these texts."""
        length = self.settings.context + 1
        places = np.array([max(0, len(one) - length + 1) for one in tokens], dtype=np.int64)
        if not places.sum():
            raise DataError(f"a text has no window of {length} tokens: give more text, or a smaller context.")
        picked = np.random.default_rng([self.seed, 1, *address]).integers(places.sum(), size=num)
        array = np.searchsorted(places.cumsum(), picked, side="right")
        return Windows(tokens, array, picked - (places.cumsum() - places)[array], length)

    def _adam(self, problem: Problem, clients: Sequence[Holdings], num_rounds: int) -> Result:
        """Train y. A tenth of the rounds has a tenth of the step: long first steps spoil attention for long."""
        first = max(1, num_rounds // 10)
        start = self._stage(problem, clients, first, self.settings.lr / 10, Schedule())
        rest = dataclasses.replace(problem, y0=start.y)
        return self._stage(rest, clients, max(1, num_rounds - first), self.settings.lr, Schedule(end=num_rounds))

    def _stage(self, problem: Problem, clients: Any, num_rounds: int, lr: float, schedule: Schedule) -> Result:
        return self._solve(
            problem, clients, "fedadam", num_rounds, schedule=schedule, lr_lower=1.0, num_local_steps=1,
            server_lr=lr, server_decay=0.95, server_damping=1e-8,
        )  # fmt: skip

    def _solve(self, problem: Problem, clients: Any, method: Any, num_rounds: int, **more: Any) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ProblemWarning)
            warnings.filterwarnings("ignore", "the fused kernels of attention")
            result = solve(
                problem, clients, method, num_iterations=num_rounds, seed=self.seed, residuals=False,
                batch_size=self.settings.batch_size, measure_every=num_rounds,
                **{"device": torch_device("cpu"), **self.options, **more},
            )  # fmt: skip
        return whole(result)


def window_losses(y: Any, tokens: Sequence[Tokens], shape: gpt.Shape) -> np.ndarray:
    """Return the cross-entropy of every window of texts, side by side, at most 2048 of them."""
    length = shape.context + 1
    pieces = [one for own in tokens for one in own if len(one) >= length]
    starts = [np.arange(0, len(one) - length + 1, length) for one in pieces]
    array = np.repeat(np.arange(len(pieces)), [len(own) for own in starts])
    if not len(array):
        raise DataError(f"a text has no window of {length} tokens: give more text, or a smaller context.")
    picked = np.unique(np.linspace(0, len(array) - 1, min(len(array), _EVALUATED)).round().astype(int))
    device = next(iter(y.values())).device
    rows = Windows(pieces, array[picked], np.concatenate(starts)[picked], length).to(device)
    with torch.no_grad():
        parts = [gpt.entropy(y, rows[at : at + _AT_ONCE], shape) for at in range(0, len(rows), _AT_ONCE)]
    return torch.cat(parts).double().cpu().numpy()
