"""`clean_labels`: find wrong labels across clients, check the result and report it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedbilevel import discovery
from fedbilevel.cleaning import judgement
from fedbilevel.cleaning.client_labels import HALF, estimates_of, posterior, transition_of
from fedbilevel.cleaning.client_labels import wrong as wrong_of
from fedbilevel.cleaning.findings import findings
from fedbilevel.cleaning.fold_networks import FoldNetworks, Training
from fedbilevel.cleaning.last_network import retrained
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.cleaning.parts import Parts
from fedbilevel.cleaning.prepared import Features, Prepared, checked, prepared
from fedbilevel.cleaning.truth import Classifier, of_clients, tested
from fedbilevel.detectors._scored import Scored
from fedbilevel.detectors.confident import Confident
from fedbilevel.detectors.detector import PRIOR, Detector
from fedbilevel.engines import group_of
from fedbilevel.engines.ranks import EngineName
from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.endings import whole
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.settings import made, names_for
from fedbilevel.tasks.findings import accuracies


def clean_labels(
    clients: Sequence[Holdings],
    *,
    detector: Detector | str = "label_em",
    features: Features = "auto",
    training: Mapping[str, Any] | None = None,
    retrain: bool = False,
    num_classes: int | None = None,
    flag: Literal["half", "rate"] = "half",
    names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    files: Sequence[Sequence[str]] | None = None,
    record: Path | str | None = None,
    resume: bool = False,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: Callable[[str], Callback] | None = None,
    describe: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    engine: EngineName = "simulation",
    **settings: Any,
) -> Cleaning:
    """Find wrong labels of all clients, train a classifier without them, and check its worth.

    Only sums and models travel between the clients and the server. Half of the clean samples are
    held out: on them, the classifier of the cleaned labels is compared with the classifier of the
    given labels. It is accepted only on evidence: more right answers, flags of which at most half are
    false, or a higher calibrated log-likelihood (`detectors/detector.py` has the rule).

    clients: one dict per client. `train` has `image` and `label`; `val` has the samples whose labels
        were checked, and may be absent at some clients; `test` is optional.
    detector: a name (`fedbilevel list` shows all), with its settings as further keywords, or an
        instance.
    features: "given" uses rows as they are; "convolutional" computes random convolutional features
        of square images; "auto" does so for images with rows and columns; "trained" first trains a
        small convolutional network by FedAvg on the given labels, in 100 more rounds, and uses its
        last hidden layer; "out_of_fold" trains one residual network per fold of the samples, and
        uses the class probabilities of the network that has not seen the sample; "refined" does so
        twice, the second time without the labels that confident learning flags by the first networks,
        and uses the mean of both; a module that maps images to rows, for example a pretrained network
        without its last layer, is best.
    training: how networks of folds are trained: settings of `cleaning.fold_networks.Training`, such as
        {"width": 32, "num_rounds": 400}.
    retrain: with networks of folds, train last networks on the labels as given, without the flagged
        samples, and with posteriors for them; the guard chooses (`cleaning.last_network`), and
        `predict` uses its choice, as a mean with the networks of folds.
    num_classes: number of classes; None: one per name in class_names, or the largest label plus one.
    flag: "half" flags labels that are wrong with a probability above one half; "rate" flags at a
        false-discovery rate (setting `rate`), with a 95 % bound from held-out clean samples.
    names, class_names, files: names of the clients, of the classes, and of the samples of every
        client, for tables and files.
    progress: function that gets the name of every part of the work before it begins, such as the
        training of a network, and returns a callback for it.
    record, resume, callbacks, describe, seed, device, dtype, engine: as in `solve`; callbacks are those
        of the detector. With a record, networks are kept too, so that resume does not train them again.

    Ctrl-C finishes the outer iteration, saves a checkpoint in the record, and raises KeyboardInterrupt.

    >>> import numpy as np
    >>> import fedbilevel as fb
    >>> rng = np.random.default_rng(0)
    >>> def samples(num):
    ...     label = rng.integers(0, 3, num)
    ...     return {"image": rng.normal(size=(num, 5)) + 4 * np.eye(3, 5)[label], "label": label}
    >>> clients = [{"train": samples(100), "val": samples(60)} for _ in range(4)]
    >>> for client in clients:
    ...     client["train"]["label"][:10] = (client["train"]["label"][:10] + 1) % 3
    >>> found = fb.clean_labels(clients)
    >>> found.verdict, len(found.suspects()), sum(int(flags[:10].sum()) for flags in found.flags)
    ('accepted', 40, 40)
    """
    chosen = _detector(detector, settings)
    if flag not in ("half", "rate"):
        raise SettingError(f"flag is {flag!r}, expected 'half' or 'rate'.")
    if retrain and features not in ("out_of_fold", "refined"):
        raise SettingError(
            f"retrain is True and features is {features!r:.80}, expected 'out_of_fold' or 'refined': other features "
            "have no network of their own."
        )
    if retrain and engine != "simulation":
        raise SettingError(
            f"retrain is True and engine is {engine!r:.80}, expected 'simulation': the guard of last networks needs "
            "the clean samples of all clients in one place."
        )
    where: dict[str, Any] = {"seed": seed, "device": device, "dtype": dtype, "engine": engine}
    how = made(Training, training or {})
    if num_classes is None and isinstance(class_names, Sequence) and not isinstance(class_names, str):
        num_classes = len(class_names)
    parts = Parts(progress, None if record is None else Path(record), resume)
    if resume and record is not None and not parts.begun:
        Record(record).load()  # raises unless the detector has begun
    if record is not None and not resume and engine == "simulation":  # before a network is trained for nothing
        Record(record).refuse_begun(parts.begun)
    ready, spent = _ready(clients, features, num_classes, how, parts, where)
    if isinstance(ready.network, FoldNetworks) and isinstance(chosen, Scored):
        chosen = replace(chosen, reads="probabilities")
    labelled = _names("class_names", class_names, ready.num_classes, "class")
    named = _names("names", names, len(ready.clients), "client")
    about = {"flag": flag, **({} if names is None else {"names": named})}
    followed = [*callbacks, *([] if progress is None else [progress(chosen.name())])]
    result = whole(
        solve(
            ready.problem, ready.clients, chosen, **_length(chosen), record=record,
            resume=resume and not parts.alone, callbacks=followed,
            describe={**(describe or {}), "cleaning": about}, **where,
        )
    )  # fmt: skip
    cleaning = _outcome(chosen, ready, result, spent, flag, named, labelled, files)
    if retrain and "verdict" in result.state.found:  # a run that a callback stopped has no posteriors yet
        last = retrained(
            [checked(one, i) for i, one in enumerate(clients)],
            cleaning.flags,
            cleaning.posteriors,
            how,
            chosen,
            ready.network,
            parts=parts,
            **where,
        )
        cleaning = replace(cleaning, last=last)
    if result.path is not None and group_of(engine, device).rank == 0:
        _write(Record(result.path), cleaning, ready, clients)
    return cleaning


def _ready(
    clients: Sequence[Holdings],
    features: Features,
    num_classes: int | None,
    training: Training,
    parts: Parts,
    where: dict[str, Any],
) -> tuple[Prepared, dict[str, float]]:
    """Return what the detector reads, and the cost of making it."""
    again = isinstance(features, str) and features == "refined"
    one = parts.within("first pass") if again else parts
    ready = prepared(clients, "out_of_fold" if again else features, num_classes, training=training, parts=one, **where)
    paid = []
    if again:
        finder = Confident(reads="probabilities", num_fit_rounds=1)  # its own classifiers are not used
        found = one.solve(finder.name(), ready.problem, ready.clients, finder, **_length(finder), **where)
        flags = [own >= HALF for own in _wrong(_posteriors(found, ready), ready)]
        first, two = (ready.network, flags), parts.within("second pass")
        ready = prepared(clients, features, num_classes, training=training, first=first, parts=two, **where)
        paid.append(found.rows[-1])
    if ready.network is not None:
        paid.append(ready.network.cost)
    return ready, {name: sum(float(part[name]) for part in paid) for name in ("rounds", "megabytes") if paid}


def _length(detector: Detector) -> dict[str, Any]:
    """Return the options of a whole run of a detector."""
    num = detector.num_iterations()
    return {"num_iterations": num, "measure_every": num, "residuals": False}


def _posteriors(result: Result, ready: Prepared) -> list[np.ndarray]:
    return [
        posterior(tree["logit"], client["train"]["label"]) for tree, client in zip(result.x, ready.clients, strict=True)
    ]


def _wrong(posteriors: Sequence[np.ndarray], ready: Prepared) -> list[np.ndarray]:
    return [wrong_of(q, client["train"]["label"]) for q, client in zip(posteriors, ready.clients, strict=True)]


def _write(record: Record, cleaning: Cleaning, ready: Prepared, clients: Sequence[Holdings]) -> None:
    served = accuracies(ready.problem, ready.clients, cleaning.result, role="test", right="right", of="tested")
    record.write_findings([*findings(cleaning, _shown(ready, clients)), *served])
    noise = float(np.concatenate(cleaning.wrong).mean())
    estimates = estimates_of(noise, cleaning.transition, cleaning.class_names)
    record.write_cleaning({"verdict": cleaning.verdict, "sentences": cleaning.sentences, **estimates})


def _outcome(
    chosen: Detector,
    ready: Prepared,
    result: Result,
    spent: Mapping[str, float],
    flag: str,
    names: list[str],
    class_names: list[str],
    files: Sequence[Sequence[str]] | None,
) -> Cleaning:
    state, found = result.state, judgement.whole(result.state.found)
    is_whole = "verdict" in result.state.found
    if spent:
        found["network"] = spent
    labels = [client["train"]["label"] for client in ready.clients]
    posteriors = _posteriors(result, ready)
    wrong = _wrong(posteriors, ready)
    cut = found.get("cut")
    least = HALF if flag == "half" else 2.0 if cut is None else float(1 / (1 + np.exp(-cut["log_odds"])))
    notes = judgement.caveats_of(
        chosen, state, found, num_clients=len(ready.clients), class_names=class_names, by_rate=flag == "rate",
        wrong=float(np.concatenate(wrong).mean()),
    )  # fmt: skip
    transition = state.transition.double().view(ready.num_classes, -1).cpu().numpy()
    if not (is_whole or chosen.estimates_transition):  # a start value, until the run estimates it
        transition = transition_of(np.concatenate(posteriors), np.concatenate(labels), PRIOR)
    flags, both = [own >= least for own in wrong], _classifiers(chosen, state, ready.num_classes)
    return Cleaning(
        names, class_names, labels, posteriors, flags, transition, found, notes, result, ready.rows, files, both,
        of_clients(ready.clients, flags, names), tested(ready.clients, both) if is_whole else None, flag=flag,
    )  # fmt: skip


def _classifiers(chosen: Detector, state: Any, num_classes: int) -> dict[str, Classifier]:
    found: dict[str, Classifier] = {}
    for number, name in enumerate(("cleaned", "plain")):
        flat = chosen.classifier(state, number).detach().double().cpu().numpy()
        weight, [bias] = np.split(flat.reshape(-1, num_classes), [-1])
        found[name] = {"weight": weight, "bias": bias}
    return found


def _detector(given: Any, settings: dict[str, Any]) -> Detector:
    if isinstance(given, str):
        known = discovery.detectors()
        if given not in known:
            raise UnknownNameError("detector", given, known)
        return made(known[given], settings)
    if not isinstance(given, Detector) or settings:
        raise SettingError(
            f"detector is {given!r:.80} with the settings {', '.join(settings) or 'none'}, expected a name such as "
            "'label_em' with its settings, or a detector that has its settings already."
        )
    return given


def _names(what: str, given: Sequence[str] | None, num: int, kind: str) -> list[str]:
    if given is None:
        return [str(i) if kind == "class" else f"client-{i}" for i in range(num)]
    return names_for(what, given, num, kind, distinct=kind == "client")  # files of clients carry their names


def _shown(ready: Prepared, clients: Sequence[Holdings]) -> list[dict[str, Any]]:
    """Return the prepared clients with the images as they were given, for pictures."""
    flat = lambda client: np.asarray(client["train"]["image"]).reshape(len(client["train"]["label"]), -1)
    return [
        {**own, "train": {**own["train"], "image": flat(given)}}
        for own, given in zip(ready.clients, clients, strict=True)
    ]
