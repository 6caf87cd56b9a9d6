"""The outcome of cleaning: suspects, noise rates, the guard's verdict, and sentences about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.cleaning import judgement, shown
from fedbilevel.cleaning.client_labels import ClientLabels, Suspect
from fedbilevel.cleaning.last_network import Choice
from fedbilevel.cleaning.truth import Classifier, Tested, Truth, classes
from fedbilevel.errors import DataError
from fedbilevel.runs.result import Result


@dataclass(frozen=True)
class Cleaning:
    """The outcome of `clean_labels`.

    noise: estimated share of wrong labels of every client.
    transition: T (C, C); T[k, l] estimates how often a sample of class k has the label l.
    posteriors: one matrix (n, C) per client, the probabilities of the true classes; these belong to
        their clients, and only a simulation has them all.
    verdict: "accepted", "rejected" or "unchecked", as the guard decided.
    gain, interval: gain in accuracy on held-out clean samples, and its 95 % interval.
    model: the classifier that the guard chose, as weights and biases.
    classifiers: both classifiers, `cleaned` and `plain`.
    targets: what `cleaned` learned from: "kept" labels, the posteriors ("soft"), or the given labels
        "weighted" by their posteriors; None for a run that was stopped before its end.
    truth, tested: precision and recall of the flags where wrong labels are marked, and accuracies of
        both classifiers where there are test samples.
    last: the network that the guard chose among those trained again, with retrain=True.
    flag: "half" or "rate", as given.

    >>> import fedbilevel as fb
    >>> clients = fb.tasks.DataCleaning(noise=0.2, num_clean=40).build().clients
    >>> found = fb.clean_labels(clients, features="convolutional")
    >>> found.verdict, len(found.suspects())
    ('accepted', 187)
    >>> sum(row["flagged"] for row in found.table())
    187
    """

    names: Sequence[str]
    class_names: Sequence[str]
    labels: Sequence[np.ndarray]
    posteriors: Sequence[np.ndarray]
    flags: Sequence[np.ndarray]
    transition: np.ndarray
    found: Mapping[str, Any]
    caveats: Sequence[str]
    result: Result
    rows: Callable[[Any], np.ndarray]
    files: Sequence[Sequence[str]] | None = None
    classifiers: Mapping[str, Classifier] = field(default_factory=dict)
    truth: Truth | None = None
    tested: Tested | None = None
    last: Choice | None = None
    flag: str = "half"

    @property
    def verdict(self) -> str:
        return str(self.found["verdict"])

    @property
    def targets(self) -> str | None:
        return self.found.get("targets")

    @property
    def wrong(self) -> list[np.ndarray]:
        """Probabilities that each given label is wrong, one array per client."""
        return [self.client(i).wrong for i in range(len(self.names))]

    @property
    def noise(self) -> dict[str, float]:
        return {name: float(own.mean()) for name, own in zip(self.names, self.wrong, strict=True)}

    @property
    def gain(self) -> float:
        return float(self.found["gain"])

    @property
    def interval(self) -> tuple[float, float]:
        return judgement.interval(self.found)

    @property
    def model(self) -> dict[str, Any]:
        return dict(self.result.y)

    def predict(self, images: Any) -> np.ndarray:
        """Return the classes of images, in the form in which they were given for cleaning."""
        if self.last is not None:
            return np.asarray(self.last.network.probabilities(images).argmax(1))
        y = {name: leaf.detach().double().cpu().numpy() for name, leaf in self.model.items()}
        return classes(y, self.rows(images))

    def suspects(self, most: int | None = None) -> list[Suspect]:
        """Return the flagged samples of all clients, the most suspicious ones first."""
        every = [one for i in range(len(self.names)) for one in self.client(i).suspects()]
        return sorted(every, key=lambda one: -one.probability)[:most]

    def table(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return one row per training sample, the most suspicious first; `pandas.DataFrame` reads it."""
        return shown.table(self, most)

    def plot(self, path: Path | str | None = None, *, most: int = 20) -> Any:
        """Draw `transition`, and `noise` of the clients with most of it, as a matplotlib figure.

        path: a file for the figure; None: it is only returned.
        """
        return shown.plot(self, path, most)

    def kept(self, clients: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the clients without their flagged training samples, to train any model."""
        return [
            {**client, "train": {name: np.asarray(values)[~flags] for name, values in client["train"].items()}}
            for client, flags in zip(clients, self.flags, strict=True)
        ]

    def corrected(self, clients: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the clients with the suggested label in place of every flagged one, to train any model."""
        found = []
        for client, flags, q in zip(clients, self.flags, self.posteriors, strict=True):
            train = {name: np.asarray(values) for name, values in client["train"].items()}
            label = np.where(flags, q.argmax(1), train["label"]).astype(train["label"].dtype)
            found.append({**client, "train": {**train, "label": label}})
        return found

    def client(self, number: int) -> ClientLabels:
        """Return the labels of one client, which belong to that client."""
        return ClientLabels(
            self.names[number], self.class_names, self.labels[number], self.posteriors[number], self.flags[number],
            self.transition, None if self.files is None else self.files[number],
        )  # fmt: skip

    def client_transition(self, number: int) -> np.ndarray:
        """Return the transition matrix of one client, from its own posteriors."""
        return self.client(number).transition

    def write_csv(self, folder: Path | str) -> list[Path]:
        """Write one file per client with all its training samples, and one with its noise rate and its
        transition matrix. Both belong to that client."""
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{place} cannot be made ({error.strerror}): name another folder.") from error
        for i, name in enumerate(self.names):
            self.client(i).write(place / f"{name}.csv", place / f"{name}.json", self.verdict)
        return [place / f"{name}.csv" for name in self.names]

    @property
    def sentence(self) -> str:
        """Return what was found and what it is worth, in two sentences at most."""
        return judgement.sentence(
            self.found, num_labels=sum(map(len, self.labels)), num_flagged=sum(int(own.sum()) for own in self.flags),
            num_classes=len(self.class_names), flag=self.flag, stopped=self.result.ending.state == "stopped",
        )  # fmt: skip

    @property
    def sentences(self) -> list[str]:
        """Return the sentence, what is known of the truth, and what cannot be guaranteed."""
        known = [one.sentence for one in (self.truth, self.tested, self.last) if one is not None]
        return [self.sentence, *known, *self.caveats]

    def __repr__(self) -> str:
        return f"<Cleaning of {len(self.names)} clients: {self.sentence}>"

    def _repr_html_(self) -> str:
        return shown.html(self)
