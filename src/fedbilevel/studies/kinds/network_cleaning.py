"""Cleaning with networks: wrong labels by class probabilities out of fold, and a network trained again.

Row: {"task": {"name": "data_cleaning", ...its settings}, "training": {...settings of the networks},
"final": {...other settings of the last networks}, "method": ...}. The networks are those of
cleaning/fold_networks.py. Methods:

    as_given    no label is flagged; labels are ranked by their own probability out of fold
    only_right  wrong labels are removed first, which needs the truth
    cleanlab    cleanlab flags labels by the probabilities out of fold, pooled; a network is trained
                on the other labels
    cleanlab_again  the same in two passes, at the cost of refined: networks of the folds are trained again
                without the flagged labels, and cleanlab reads the mean probabilities of both passes
    refined     networks are trained out of fold again, in a way that the setting `again` names;
                `confident`, or label_em by the setting `flag_by`, flags labels on the mean
                probabilities of both passes

The second networks of the folds of `refined` are trained, by the setting `again`:

    posteriors  on the posteriors that label_em makes from the first probabilities
    unflagged   without the labels that `flag_by` flags by the first probabilities

The last network of `refined` is trained, by the setting `last`:

    pruned      on the labels that are not flagged
    corrected   on all samples; a flagged label is replaced by its posterior of label_em
    soft        on the posteriors of all samples
    distilled   on the means of the posteriors and of the probabilities out of fold of both passes, which
                do not read a sample's own label
    chosen      on the labels that are not flagged, unless the guard prefers `corrected`
                (cleaning/last_network.py)

The answer of a row is, by the setting `answer`, its last network, or the mean of the probabilities of
`together`: of its last network and of its networks of folds, in their last pass. The latter exist anyway.

The two answers `cleaned`, of the method, and `plain`, of the labels as given, are compared on clean
samples that no training has read: every second one of each client. The rule is that of detectors. With
`last = "chosen"`, the same samples have also chosen the last network, so t, evidence and gain favour
`cleaned`; test accuracies do not.

Figures: f1, precision, recall, average_precision and flags of wrong labels, as in the study cleaning;
cleaned, plain: test accuracy of both answers; alone: of the last network of the method; t, evidence,
gain, accepted: of the guard; harmed: 1 if an accepted answer loses more than 0.3 points of test accuracy;
test_accuracy: of the answer that the guard chose; rounds, megabytes: of all networks and detectors of the
method.

Rows of one panel and repetition share networks: those in one process while it runs, and others through the
folder `networks` beside the results, in which an interrupted row also finds what it has trained. A row waits for
networks that another process is training.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbilevel.cleaning.clean import clean_labels
from fedbilevel.cleaning.fold_networks import FoldNetworks, Network, Training, rows_of, train_folds, train_network
from fedbilevel.cleaning.last_network import USUAL, Train, chosen, guarded, trained, without
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.cleaning.parts import Parts
from fedbilevel.cleaning.truth import compared
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import make_folder
from fedbilevel.settings import Settings, made, setting
from fedbilevel.studies import given
from fedbilevel.studies.kinds.cleaning import GUARD, average_precision, harmed
from fedbilevel.studies.outcome import RowOutcome

_shared: dict[str, Any] = {}  # networks of the last panel and repetition
_FREE = {"rounds": 0.0, "megabytes": 0.0}


@dataclass(frozen=True, kw_only=True)
class NetworkRow(Settings):
    method: Literal["as_given", "only_right", "cleanlab", "cleanlab_again", "refined"] = setting(
        "refined", "how labels are cleaned"
    )
    answer: Literal["last", "together"] = setting("last", "networks that answer: the last one, or also those of folds")
    last: Literal["pruned", "corrected", "soft", "distilled", "chosen"] = setting(
        "pruned", "targets of the last network of refined"
    )
    flag_by: Literal["confident", "label_em"] = setting("confident", "detector whose flags refined uses")
    transition: Literal["shared", "own"] = setting("shared", "matrix T of label_em, as there")
    again: Literal["posteriors", "unflagged"] = setting("posteriors", "what the second networks of folds learn from")

    @property
    def key(self) -> str:
        """Return what flags and posteriors depend on."""
        return f"{self.flag_by}, {self.transition}, {self.again}"


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    tables = ("task", "training", "final")
    settings = made(NetworkRow, {name: value for name, value in row.items() if name not in tables})
    begun = time.perf_counter()
    work = Work(row, repetition, folder.parent / "networks", device, say)
    found = getattr(work, settings.method)(settings)
    figures = work.figures(found, settings.answer)
    say(f"{settings.method}: {figures} {time.perf_counter() - begun:.1f} s")
    return RowOutcome(figures, [])


class Outcome(NamedTuple):
    """What a method found.

    chance: P(wrong) of every sample, or another ranking.
    cost: of everything before the last network.
    beside: networks of folds that may answer together with the last network.
    """

    flags: np.ndarray
    chance: np.ndarray
    last: Network
    cost: Mapping[str, float]
    beside: FoldNetworks | None = None


class Work:
    """Data and networks of one panel and repetition, each made when it is first asked for."""

    def __init__(
        self, row: Mapping[str, Any], repetition: int, folder: Path, device: str, say: Callable[[str], None]
    ) -> None:
        tables = [row["task"], row.get("training", {}), row.get("final", {})]
        self.key, self.say = json.dumps([*tables, repetition, device], sort_keys=True), say
        if _shared.get("key") != self.key:
            _shared.clear()
            _shared["key"] = self.key
        self.parts = Parts(record=folder / hashlib.sha256(self.key.encode()).hexdigest()[:16], resume=True)
        self.training = made(Training, tables[1])
        self.final = made(Training, {**tables[1], **tables[2]})
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

    def _trained(self, name: str, make: Callable[[], Any]) -> Any:
        """Return networks, for which another process that asks for them waits: two cannot write one record."""

        def alone() -> Any:
            lock = self.parts.folder(f"{name}, lock")
            assert lock is not None
            make_folder(lock.parent)
            with open(lock, "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                return make()

        return self._once(name, alone)

    def folds(self, name: str, **targets: Any) -> FoldNetworks:
        """Return networks of folds; targets: targets or flags of their training, when it is asked for first."""
        parts = self.parts.within(f"folds {name}{_digest(targets)}")
        make = lambda: train_folds(self.train, self.num_classes, self.training, parts=parts, **targets, **self.where)
        return self._trained(f"folds {name}", make)

    def network(self, name: str, make: Callable[[Train], Network]) -> Network:
        """Return a last network.

        make: maps a function that trains the network of this name to the network.
        """
        return self._trained(f"network {name}", lambda: make(partial(self._fit, name)))

    def _fit(self, name: str, train: Any, targets: Any = None) -> Network:
        learned = {"label": [own["label"] for own in train], **({} if targets is None else {"targets": targets})}
        return train_network(
            train, self.num_classes, self.final, targets=targets, parts=self.parts,
            name=f"last network, {name}{_digest(learned)}", **self.where,
        )  # fmt: skip

    def out_of_fold(self, folds: FoldNetworks) -> np.ndarray:
        return np.concatenate([folds.unseen(own["image"]) for own in self.train])

    def plain(self) -> Network:
        return self.network("as given", lambda fit: fit(self.train))

    # ---- methods --------------------------------------------------------------------------------------------------

    def as_given(self, settings: NetworkRow) -> Outcome:
        folds, none = self.folds("given"), np.zeros(len(self.label), bool)
        cost = folds.cost if settings.answer == "together" else _FREE
        return Outcome(none, 1 - self._own(self.out_of_fold(folds)), self.plain(), cost, folds)

    def only_right(self, _settings: NetworkRow) -> Outcome:
        wrong = self.wrong.astype(bool)
        return Outcome(wrong, self.wrong.astype(float), self._pruned("right", wrong), _FREE)

    def cleanlab(self, _settings: NetworkRow) -> Outcome:
        folds = self.folds("given")
        flags, chance = self._issues(folds)
        return Outcome(flags, chance, self._pruned("cleanlab", flags), folds.cost, folds)

    def cleanlab_again(self, _settings: NetworkRow) -> Outcome:
        parts = self._by_client(self._issues(self.folds("given"))[0])
        both = self.folds("given") + self.folds("without cleanlab's flags", flags=parts)
        flags, chance = self._issues(both)
        return Outcome(flags, chance, self._pruned("cleanlab again", flags), both.cost, both)

    def refined(self, settings: NetworkRow) -> Outcome:
        own = {"transition": settings.transition}
        flag_by = {"label_em": own, "confident": {}}[settings.flag_by]
        if settings.again == "unflagged":
            first = self._detected("given", self.folds("given"), settings.flag_by, flag_by)
            name, both = f"without the flags of {settings.key}", f"both, {settings.key}"
            second = self.folds(name, flags=first.flags)
        else:
            first = self._detected("given", self.folds("given"), "label_em", own)
            both = f"both, {settings.transition}"
            second = self.folds(f"refined {settings.transition}", targets=first.posteriors)
        again = self.folds("given") + second
        soft = self._detected(both, again, "label_em", own)
        found = soft if settings.flag_by == "label_em" else self._detected(both, again, "confident", flag_by)
        detected = {id(one): one for one in (first, found, soft)}.values()
        parts = (again.cost, *(one.result.rows[-1] for one in detected))
        cost = {name: sum(float(part[name]) for part in parts) for name in ("rounds", "megabytes")}
        train = lambda name: self.network(
            f"{name}, {settings.key}", lambda fit: self._last(name, found.flags, soft.posteriors, again, fit)
        )
        if settings.last == "chosen":
            candidates = [(name, train(name)) for name in USUAL]
            answers = [(name, self._answer(one, again, settings.answer)) for name, one in candidates]
            plain = self._answer(self.plain(), self.folds("given"), settings.answer)
            choice = chosen(plain, answers, self.clean(), LabelEM())
            self.say(f"the guard chose {choice.name}")
            network = dict(candidates).get(choice.name, candidates[0][1])
            for _, other in candidates:
                if other is not network:
                    cost = {name: cost[name] + other.cost[name] for name in cost}
        else:
            network = train(settings.last)
        return Outcome(np.concatenate(found.flags), np.concatenate(found.wrong), network, cost, again)

    def _issues(self, folds: FoldNetworks) -> tuple[np.ndarray, np.ndarray]:
        """Return cleanlab's flags, and the ranking by the probability of the given label."""
        from fedbilevel.studies.kinds import confident_learning  # needs optional packages

        p = self.out_of_fold(folds)
        return confident_learning.label_issues(self.label, p), 1 - self._own(p)

    def _pruned(self, name: str, flags: np.ndarray) -> Network:
        return self.network(name, lambda fit: fit(without(self.train, self._by_client(flags))))

    def _answer(self, last: Network, beside: FoldNetworks | None, answer: str) -> Network | FoldNetworks:
        return last if answer == "last" or beside is None else beside.together(last, -1)

    def _last(self, name: str, flags: Any, posteriors: Any, folds: FoldNetworks, fit: Train) -> Network:
        if name != "distilled":
            return trained(name, self.train, flags, posteriors, fit)
        means = [(own + folds.unseen(part["image"])) / 2 for part, own in zip(self.train, posteriors, strict=True)]
        return fit(self.train, means)

    def _detected(self, name: str, folds: FoldNetworks, detector: str, own: Mapping[str, Any]) -> Cleaning:
        return self._once(f"{detector} {dict(own)} on {name}", lambda: self._detect(folds, detector, own))

    def _detect(self, folds: FoldNetworks, detector: str, own: Mapping[str, Any]) -> Cleaning:
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
            num_classes=self.num_classes, **self.where, **own,
        )  # fmt: skip

    def _by_client(self, flags: np.ndarray) -> list[np.ndarray]:
        return np.split(flags, np.cumsum([len(own["label"]) for own in self.train])[:-1])

    def _own(self, p: np.ndarray) -> np.ndarray:
        return np.asarray(p[np.arange(len(p)), self.label])

    def clean(self) -> dict[str, np.ndarray]:
        """Return the clean samples that only the guard reads, to choose a last network and to compare answers."""
        return {name: np.concatenate([one["val"][name][1::2] for one in self.clients]) for name in ("image", "label")}

    # ---- figures --------------------------------------------------------------------------------------------------

    def figures(self, found: Outcome, answer: str = "last") -> dict[str, float]:
        wrong, guard = self.wrong.astype(bool), self.clean()
        both = (
            self._answer(found.last, found.beside, answer),
            self._answer(self.plain(), self.folds("given") if answer == "together" else None, answer),
        )
        test = {name: np.concatenate([one["test"][name] for one in self.clients]) for name in ("image", "label")}
        after, before = (one.probabilities(guard["image"]) for one in both)
        checked = guarded(after, before, guard["label"], LabelEM())
        accepted = checked["verdict"] == "accepted"
        cleaned, plain, alone = (
            float((one.probabilities(test["image"]).argmax(1) == test["label"]).mean()) for one in (*both, found.last)
        )
        truth = compared([found.flags], [wrong], ["all"])
        return {
            **{name: getattr(truth, name) for name in ("f1", "precision", "recall")},
            "average_precision": average_precision(found.chance, wrong),
            "flags": float(found.flags.mean()),
            "test_accuracy": cleaned if accepted else plain,
            "cleaned": cleaned,
            "plain": plain,
            "alone": alone,
            **{name: float(checked[name]) for name in GUARD if name in checked},
            "accepted": float(accepted),
            "harmed": harmed(accepted, cleaned, plain),
            **{name: found.cost[name] + found.last.cost[name] for name in ("rounds", "megabytes")},
        }


def _digest(learned: Mapping[str, Any]) -> str:
    """Return what tells networks apart that are trained on other targets, after a change of a detector for example."""
    if not learned:
        return ""
    found = hashlib.sha256()
    for name, own in sorted(learned.items()):
        found.update(name.encode())
        for values in own:
            found.update(np.ascontiguousarray(values).tobytes())
    return f", {found.hexdigest()[:8]}"
