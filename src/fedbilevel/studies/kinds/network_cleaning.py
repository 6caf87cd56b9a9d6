"""Cleaning with networks: wrong labels by class probabilities out of fold, and a network trained again.

Row: {"task": {"name": "data_cleaning", ...its settings}, "training": {...settings of the networks},
"method": ...}. The networks are those of cleaning/fold_networks.py. Methods:

    as_given    no label is flagged; labels are ranked by their own probability out of fold
    only_right  wrong labels are removed first, which needs the truth
    cleanlab    cleanlab flags labels by the probabilities out of fold, pooled; a network is trained
                on the other labels
    refined     label_em turns these probabilities into posteriors; networks are trained on the
                posteriors, out of fold again; `confident` flags labels on the mean probabilities of
                both passes

The last network of `refined` is trained, by the setting `last`:

    pruned      on the labels that are not flagged
    corrected   on all samples; a flagged label is replaced by its posterior of label_em
    soft        on the posteriors of all samples
    distilled   on the means of the posteriors and of the probabilities out of fold of both passes, which
                do not read a sample's own label

The two networks `cleaned`, of the method, and `plain`, of the labels as given, are compared on clean
samples that no other step has read: every second one of each client.

Figures: f1, precision, recall, average_precision and flags of wrong labels, as in the study cleaning;
cleaned, plain: test accuracy of both networks; t, accepted: of the guard; test_accuracy: of the network
that the guard chose; rounds, megabytes: of all networks and detectors of the method.

Rows of one panel and repetition share networks if they run in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbilevel.cleaning.clean import clean_labels
from fedbilevel.cleaning.fold_networks import FoldNetworks, Network, Training, rows_of, train_folds, train_network
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.cleaning.truth import compared
from fedbilevel.detectors._decisions import is_worse, judged
from fedbilevel.runs.options import torch_device
from fedbilevel.settings import Settings, made, setting
from fedbilevel.studies import given
from fedbilevel.studies.kinds.cleaning import average_precision
from fedbilevel.studies.outcome import RowOutcome

REJECT_BELOW = -2.0  # as the guard of detectors
_shared: dict[str, Any] = {}  # networks of the last panel and repetition


@dataclass(frozen=True, kw_only=True)
class NetworkRow(Settings):
    method: Literal["as_given", "only_right", "cleanlab", "refined"] = setting("refined", "how labels are cleaned")
    last: Literal["pruned", "corrected", "soft", "distilled"] = setting(
        "corrected", "targets of the last network of refined"
    )


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    settings = made(NetworkRow, {name: value for name, value in row.items() if name not in ("task", "training")})
    begun = time.perf_counter()
    work = Work(row, repetition, device)
    flags, chance, cleaned, cost = (
        work.refined(settings.last) if settings.method == "refined" else getattr(work, settings.method)()
    )
    figures = work.figures(flags, chance, cleaned, cost)
    say(f"{settings.method}: {figures} {time.perf_counter() - begun:.1f} s")
    return RowOutcome(figures, [])


class Work:
    """Data and networks of one panel and repetition, each made when it is first asked for."""

    def __init__(self, row: Mapping[str, Any], repetition: int, device: str) -> None:
        self.key = json.dumps([row["task"], row.get("training", {}), repetition, device], sort_keys=True)
        if _shared.get("key") != self.key:
            _shared.clear()
            _shared["key"] = self.key
        self.training = made(Training, row.get("training", {}))
        self.where: dict[str, Any] = {"seed": repetition, "device": torch_device(device)}
        self.clients: Any = self._once(
            "clients", lambda: given.task(row["task"]).repeated(repetition).build().clients
        )  # fmt: skip
        self.train = [client["train"] for client in self.clients]
        every = (client[role]["label"] for client in self.clients for role in ("train", "val", "test"))
        self.num_classes = 1 + max(int(label.max()) for label in every)
        self.label, self.wrong = (np.concatenate([own[name] for own in self.train]) for name in ("label", "wrong"))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in _shared:
            _shared[name] = make()
        return _shared[name]

    def folds(self, name: str, targets: Any = None) -> FoldNetworks:
        make = lambda: train_folds(self.train, self.num_classes, self.training, targets=targets, **self.where)
        return self._once(f"folds {name}", make)

    def network(self, name: str, train: Any, targets: Any = None) -> Network:
        make = lambda: train_network(train, self.num_classes, self.training, targets=targets, **self.where)
        return self._once(f"network {name}", make)

    def out_of_fold(self, folds: FoldNetworks) -> np.ndarray:
        return np.concatenate([folds.unseen(own["image"]) for own in self.train])

    def plain(self) -> Network:
        return self.network("as given", self.train)

    # ---- methods: flags, P(wrong) or a ranking, the network, and the cost before it -----------------------------

    def as_given(self) -> tuple[np.ndarray, np.ndarray, Network, dict[str, float]]:
        chance = 1 - self._own(self.out_of_fold(self.folds("given")))
        return np.zeros(len(self.label), bool), chance, self.plain(), {"rounds": 0.0, "megabytes": 0.0}

    def only_right(self) -> tuple[np.ndarray, np.ndarray, Network, dict[str, float]]:
        network = self.network("right", self._kept(self.wrong.astype(bool)))
        return self.wrong.astype(bool), self.wrong.astype(float), network, {"rounds": 0.0, "megabytes": 0.0}

    def cleanlab(self) -> tuple[np.ndarray, np.ndarray, Network, dict[str, float]]:
        from fedbilevel.studies.kinds import confident_learning  # needs optional packages

        p = self.out_of_fold(self.folds("given"))
        flags = confident_learning.label_issues(self.label, p)
        return flags, 1 - self._own(p), self.network("cleanlab", self._kept(flags)), self.folds("given").cost

    def refined(self, last: str) -> tuple[np.ndarray, np.ndarray, Network, dict[str, float]]:
        first = self._detected("given", self.folds("given"), "label_em")
        again = self.folds("given") + self.folds("refined", first.posteriors)
        found, soft = (self._detected("both", again, name) for name in ("confident", "label_em"))
        parts = (again.cost, *(one.result.rows[-1] for one in (first, found, soft)))
        cost = {name: sum(float(part[name]) for part in parts) for name in ("rounds", "megabytes")}
        flags = np.concatenate(found.flags)
        if last == "pruned":
            network = self.network("pruned", self._kept(flags))
        elif last == "soft":
            network = self.network("soft", self.train, soft.posteriors)
        elif last == "distilled":
            means = [
                (posterior + again.unseen(own["image"])) / 2
                for own, posterior in zip(self.train, soft.posteriors, strict=True)
            ]
            network = self.network("distilled", self.train, means)
        else:
            corrected = [
                np.where(flagged[:, None], posterior, np.eye(self.num_classes)[own["label"]])
                for own, flagged, posterior in zip(self.train, found.flags, soft.posteriors, strict=True)
            ]
            network = self.network("corrected", self.train, corrected)
        return flags, np.concatenate(found.wrong), network, cost

    def _detected(self, name: str, folds: FoldNetworks, detector: str) -> Cleaning:
        return self._once(f"{detector} on {name}", lambda: self._detect(folds, detector))

    def _detect(self, folds: FoldNetworks, detector: str) -> Cleaning:
        """Run a detector on the probabilities of networks, without the clean samples of the guard.

        Its own linear classifiers are not used, so they get one round.
        """
        rows = lambda part: {**part, "image": rows_of(folds.probabilities(part["image"]))}
        clients = [
            {
                "train": {**client["train"], "image": rows_of(folds.unseen(client["train"]["image"]))},
                "val": rows({name: values[::2] for name, values in client["val"].items()}),
            }
            for client in self.clients
        ]
        return clean_labels(
            clients, detector=detector, reads="probabilities", num_fit_rounds=1, features="given",
            num_classes=self.num_classes, seed=self.where["seed"],
        )  # fmt: skip

    def _kept(self, flags: np.ndarray) -> list[dict[str, np.ndarray]]:
        parts = np.split(flags, np.cumsum([len(own["label"]) for own in self.train])[:-1])
        return [
            {name: own[name][~flagged] for name in ("image", "label")}
            for own, flagged in zip(self.train, parts, strict=True)
        ]

    def _own(self, p: np.ndarray) -> np.ndarray:
        return np.asarray(p[np.arange(len(p)), self.label])

    # ---- figures --------------------------------------------------------------------------------------------------

    def figures(
        self, flags: np.ndarray, chance: np.ndarray, cleaned: Network, cost: Mapping[str, float]
    ) -> dict[str, float]:
        plain, wrong = self.plain(), self.wrong.astype(bool)
        guard = {name: np.concatenate([one["val"][name][1::2] for one in self.clients]) for name in ("image", "label")}
        test = {name: np.concatenate([one["test"][name] for one in self.clients]) for name in ("image", "label")}
        place = np.arange(len(guard["label"])), guard["label"]
        both = [one.probabilities(guard["image"]) for one in (cleaned, plain)]
        better = np.log(both[0][place] + 1e-12) - np.log(both[1][place] + 1e-12)
        right = [one.argmax(1) == guard["label"] for one in both]
        gain = right[0].astype(float) - right[1]
        sums = (len(gain), better.sum(), (better**2).sum(), gain.sum(), (gain**2).sum(), right[1].sum())
        found = judged(*map(float, sums))
        accepted = not is_worse(found, REJECT_BELOW)
        scores = [
            float((one.probabilities(test["image"]).argmax(1) == test["label"]).mean()) for one in (cleaned, plain)
        ]
        truth = compared([flags], [wrong], ["all"])
        return {
            **{name: getattr(truth, name) for name in ("f1", "precision", "recall")},
            "average_precision": average_precision(chance, wrong),
            "flags": float(flags.mean()),
            "test_accuracy": scores[0 if accepted else 1],
            "cleaned": scores[0],
            "plain": scores[1],
            "t": found["t"],
            "accepted": float(accepted),
            **{name: cost[name] + cleaned.cost[name] for name in ("rounds", "megabytes")},
        }
