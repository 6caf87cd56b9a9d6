"""The outcome of `personalise`: two classifiers for every client, their figures, and a choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel import displays, plots
from fedbilevel.errors import SettingError
from fedbilevel.runs.result import Result

_SHOWN = 30  # clients in a notebook


class Scale(NamedTuple):
    """Mean and deviation of inputs over the training samples of all clients."""

    mean: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, images: Sequence[np.ndarray], *, by_column: bool) -> Scale:
        """Return the scale from sums of every client: by column, or one for all pixels of images."""
        axis = 0 if by_column else None
        num = sum(len(one) if by_column else one.size for one in images)
        mean = sum(np.sum(one, axis=axis, dtype=np.float64) for one in images) / num
        square = sum(np.sum((one - mean) ** 2, axis=axis, dtype=np.float64) for one in images) / num
        spread = np.sqrt(square)
        return cls(np.asarray(mean, np.float32), np.asarray(np.where(spread > 0, spread, 1), np.float32))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return np.asarray((images - self.mean) / self.spread, np.float32)


def surely(gain: float, error: float) -> bool:
    """Return whether a gain is above two standard errors."""
    return gain > 2 * error


@dataclass(frozen=True, repr=False)
class Personalised:
    """The outcome of `personalise`.

    chosen: "own" if own heads raise the likelihood of samples that no step has seen by two standard
        errors, else "shared".
    gain, error: the mean gain in log-likelihood of own heads on those samples, and its standard error.
    strength: learned weight of the squared distance between own heads and the shared head.
    shared, body, heads: the network of FedAvg, its hidden layers, and the head of every client, which
        belongs to its client.
    megabytes: all messages of both runs.
    runs: the results of FedAvg and of `self_tuned`.

    >>> import fedbilevel as fb
    >>> clients = fb.tasks.Personalisation(num_clients=6, share=0.3, shift="labels").build().clients
    >>> found = fb.personalise(clients, num_rounds=30)
    >>> found.predict(0, clients[0]["test"]["image"]).shape == clients[0]["test"]["label"].shape
    True
    >>> list(found.table()[0])
    ['client', 'samples', 'shared', 'own']
    """

    names: Sequence[str]
    score: Callable[[Any, Any], Tensor]
    scale: Scale
    body: Mapping[str, Tensor]
    heads: Sequence[Mapping[str, Tensor]]
    shared: Mapping[str, Tensor]
    strength: float
    gain: float
    error: float
    judged: Sequence[Mapping[str, np.ndarray]]
    tested: Sequence[Mapping[str, np.ndarray] | None]
    megabytes: float
    runs: tuple[Result, Result]

    @property
    def chosen(self) -> str:
        return "own" if surely(self.gain, self.error) else "shared"

    def predict(self, client: int | str, images: Any, *, model: str | None = None) -> np.ndarray:
        """Return the classes of images of one client, in the form in which they were given.

        client: number or name of the client.
        model: "own" or "shared"; None: the chosen one.
        """
        if model not in (None, "own", "shared"):
            raise SettingError(f"model is {model!r}, expected 'own' or 'shared'.")
        rows = np.asarray(images, np.float32)
        return self._answers(self._number(client), self.scale(rows.reshape(len(rows), -1)), model or self.chosen)

    def table(self) -> list[dict[str, Any]]:
        """Return, for every client, the accuracies of the shared network and of its own.

        The samples are the client's test samples. A client without test samples is measured on the
        samples that decided, if its own head has not seen them since, and otherwise not at all.
        """
        rows = []
        for i, name in enumerate(self.names):
            part = self.tested[i] or (self.judged[i] if self.chosen == "shared" else None)
            accuracy = {
                model: None if part is None else float((self._answers(i, part["image"], model) == part["label"]).mean())
                for model in ("shared", "own")
            }
            rows.append({"client": name, "samples": 0 if part is None else len(part["label"]), **accuracy})
        return rows

    def plot(self, path: Path | str | None = None) -> Any:
        """Draw the accuracy of every client's own model against that of the shared network.

        path: a file for the matplotlib figure; None: it is only returned.
        """
        rows = [row for row in self.table() if row["own"] is not None]
        if not rows:
            raise SettingError("no client has test samples, so there is no accuracy to draw: give the role test.")
        return plots.points({"clients": [rows]}, path, x="shared", y="own", title=self.sentence)

    @property
    def sentence(self) -> str:
        """Return what was chosen and why, in one sentence."""
        what = "own heads are used" if self.chosen == "own" else "the shared network is used"
        return (
            f"{what}: on samples that no step has seen, own heads change the log-likelihood by {self.gain:+.3f} "
            f"(standard error {self.error:.3f})."
        )

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        return f"<models of {len(self.names)} clients; {self.sentence[:-1]}>"

    def _repr_html_(self) -> str:
        show = lambda share: "-" if share is None else f"{share:.1%}"
        rows = [
            [str(row["client"]), str(row["samples"]), show(row["shared"]), show(row["own"])] for row in self.table()
        ]
        note = f"{self.sentence[:1].upper()}{self.sentence[1:]}"
        if len(rows) > _SHOWN:
            note += f" The first {_SHOWN} clients are shown."
        heads = ("client", "samples", "accuracy, shared", "accuracy, own")
        return displays.ranking(f"Models of {len(rows)} clients", heads, rows[:_SHOWN], note)

    def _number(self, client: int | str) -> int:
        names = list(self.names)
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, int) and 0 <= client < len(names):
            return client
        raise SettingError(f"the client is {client!r}, expected a number below {len(names)} or one of the names.")

    def _answers(self, i: int, rows: np.ndarray, model: str) -> np.ndarray:
        weights = {**self.body, **self.heads[i]} if model == "own" else self.shared
        with torch.no_grad():
            return np.asarray(self.score(weights, {"image": torch.as_tensor(rows)}).argmax(-1).numpy())
