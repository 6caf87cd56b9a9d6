"""The outcome of cleaning: suspects, noise rates, the guard's verdict, and sentences about them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.cleaning import shown
from fedbilevel.cleaning.last_network import Choice
from fedbilevel.cleaning.truth import Classifier, Tested, Truth, classes
from fedbilevel.errors import DataError
from fedbilevel.runs.result import Result

COLUMNS = ("file", "sample", "label", "suggested", "probability", "flagged")
FEW_CLIENTS = 0.5  # share of clients with clean samples below which a sentence warns
PER_FEATURE = 1.5  # training samples per feature; with fewer, label_em flags many right labels of the digits


class Suspect(NamedTuple):
    """A training sample whose label may be wrong.

    probability: that the given label is wrong.
    """

    client: str
    sample: int
    label: str
    suggested: str
    probability: float
    file: str = ""


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
    def wrong(self) -> list[np.ndarray]:
        """Probabilities that each given label is wrong, one array per client."""
        return [1 - q[np.arange(len(q)), label] for q, label in zip(self.posteriors, self.labels, strict=True)]

    @property
    def noise(self) -> dict[str, float]:
        return {name: float(own.mean()) for name, own in zip(self.names, self.wrong, strict=True)}

    @property
    def gain(self) -> float:
        return float(self.found["gain"])

    @property
    def interval(self) -> tuple[float, float]:
        half = 1.96 * self.found["gain_error"]
        return self.gain - half, self.gain + half

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
        every = [self.suspect(i, int(j)) for i, flags in enumerate(self.flags) for j in np.flatnonzero(flags)]
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

    def client_transition(self, number: int) -> np.ndarray:
        """Return the transition matrix of one client, from its own posteriors."""
        q, label = self.posteriors[number], self.labels[number]
        counts = q.T @ np.eye(q.shape[1])[label] + self.transition
        return np.asarray(counts / counts.sum(1, keepdims=True))

    def write_csv(self, folder: Path | str) -> list[Path]:
        """Write one file per client with all its training samples, which belongs to that client."""
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{place} cannot be made ({error.strerror}): name another folder.") from error
        written = []
        for i, name in enumerate(self.names):
            order = np.argsort(-self.wrong[i], kind="stable")
            written.append(place / f"{name}.csv")
            with written[-1].open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                for j in order.tolist():
                    one = self.suspect(i, j)
                    writer.writerow(
                        [one.file, j, one.label, one.suggested, f"{one.probability:.6f}", int(self.flags[i][j])]
                    )
        return written

    @property
    def sentence(self) -> str:
        """Return what was found and what it is worth, in two sentences at most."""
        num, flagged = sum(map(len, self.labels)), sum(int(flags.sum()) for flags in self.flags)
        first = f"{flagged:,} of {num:,} labels are flagged as wrong"
        if self.verdict == "unchecked":
            return (
                f"{first}. {self._unchecked}, so nothing is promised and the model is the one of the given labels: "
                "look at the suspects before you act on them."
            )
        low, high = (100 * value for value in self.interval)
        measured = (
            f"on {self.found['num_guard']:.0f} held-out clean samples, the model trained on cleaned labels is right "
            f"{100 * self.gain:+.1f} points more often (95 % interval {low:+.1f} to {high:+.1f}, t of the calibrated "
            f"log-likelihood {self.found['evidence']:.1f})"
        )
        if self.verdict == "rejected":
            return (
                f"{first}, but the cleaning is rejected: {measured}, which is no sure gain, so the model is the one of "
                "the given labels."
            )
        most = f"{self.found.get('most_false', 1.0):.0%}"
        bound = f"At most {most} of the flags are false"
        if self.flag == "rate":  # the guard counts other labels than those at the rate
            bound = f"Of the labels that are more likely wrong than right, at most {most} are right"
        why = {
            "likelihood": " So few samples cannot exclude a loss of 0.3 points, so the log-likelihood decided.",
            "flags": f" {bound}, with a probability of 95 %, which decided.",
        }
        return f"{first}, and the cleaning is accepted: {measured}.{why.get(self.found.get('basis', ''), '')}"

    @property
    def _unchecked(self) -> str:
        """Return why nothing checks the result."""
        num, classes = round(self.found["num_guard"]), len(self.class_names)
        samples = f"{num} held-out clean sample{'' if num == 1 else 's'}"
        if self.result.ending.state == "stopped":
            return "The run was stopped before the result was checked"
        if not num:
            return "No held-out clean sample can check the result"
        shown = f", with {classes - unseen} of the {classes} classes," if (unseen := self.found.get("unseen")) else ""
        return f"Only {samples}{shown} can check the result"

    @property
    def sentences(self) -> list[str]:
        """Return the sentence, what is known of the truth, and what cannot be guaranteed."""
        known = [one.sentence for one in (self.truth, self.tested, self.last) if one is not None]
        return [self.sentence, *known, *self.caveats]

    def suspect(self, client: int, sample: int) -> Suspect:
        """Return what is known of one training sample, flagged or not."""
        q, label = self.posteriors[client][sample], int(self.labels[client][sample])
        return Suspect(
            self.names[client], sample, self.class_names[label], self.class_names[int(q.argmax())],
            float(1 - q[label]), self.files[client][sample] if self.files is not None else "",
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Cleaning of {len(self.names)} clients: {self.sentence}>"

    def _repr_html_(self) -> str:
        return shown.html(self)


def caveats(
    *, num_clean: Sequence[float], num_clients: int, share: float, cut: Mapping[str, float] | None, by_rate: bool,
    rate: float, class_names: Sequence[str], verdict: str, wrong: float, num_train: int, num_features: int,
    detector: str,
) -> list[str]:  # fmt: skip
    """Return what cannot be guaranteed with these samples.

    num_clean: clean samples per class that detection uses. share: of clients with clean samples.
    wrong: estimated share of wrong labels. num_train: training samples of all clients.
    detector: the name of the detector; label_em alone is known to fail with few samples.
    """
    found = []
    if verdict == "unchecked" and wrong > 0.5:
        found.append(
            f"{wrong:.0%} of the labels are estimated to be wrong, and nothing checks this: if most labels are right, "
            "the estimate has failed and the suspects mean nothing."
        )
    if detector == "label_em" and verdict != "accepted" and num_train < PER_FEATURE * num_features:
        found.append(
            f"There are only {num_train:,} training samples for {num_features:,} features, fewer than {PER_FEATURE} "
            "per feature, so most flags can be false: give more samples or fewer features, or compare with the "
            "detector confident."
        )
    lacking = [name for name, num in zip(class_names, num_clean, strict=True) if num < 0.5]
    if len(lacking) == len(class_names):
        found.append(
            "There are no clean samples: where most labels are wrong, the posteriors can be wrong as well without any "
            "sign of it."
        )
    elif lacking:
        whose = "this class" if len(lacking) == 1 else "these classes"
        found.append(
            f"No clean sample shows {', '.join(lacking[:10])}: labels of {whose} are judged by the given labels alone, "
            "and the check does not see them."
        )
    if not lacking and share < FEW_CLIENTS:
        found.append(
            f"Only {math.floor(share * num_clients + 0.5)} of {num_clients} clients have clean samples: the check "
            "speaks for data like theirs."
        )
    if by_rate and cut is None:
        found.append(
            f"No cut can promise a false-discovery rate of {rate:.0%} with so few held-out clean samples, so nothing "
            "is flagged: give more clean samples, or flag above one half."
        )
    return found
