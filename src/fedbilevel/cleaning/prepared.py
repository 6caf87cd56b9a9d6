"""Data of clients in the form that detectors read: rows of features, labels and clean samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel.cleaning.fold_networks import FoldNetworks, Training, rows_of, train_folds
from fedbilevel.cleaning.network import train_network
from fedbilevel.cleaning.parts import ALONE, Parts
from fedbilevel.data.random_features import RandomConvolutions
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.holdings import check_clients, fields_of
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import whole_number
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.task import Shapes

Named = Literal["auto", "given", "convolutional", "trained", "out_of_fold", "refined"]
Features = Named | Callable[[Tensor], Tensor]
MOST_FEATURES = 4096  # a client sends half of the square of their number once
_AT_ONCE = 512


class Prepared(NamedTuple):
    """The problem of a detector and its clients.

    rows: the function that turns images into the rows that the classifier reads.
    """

    task: DataCleaning
    problem: Problem
    clients: list[dict[str, dict[str, np.ndarray]]]
    num_classes: int
    rows: Callable[[Any], np.ndarray]
    network: Any = None  # that trained the features; its `cost` has rounds and megabytes


def prepared(
    clients: Sequence[Holdings],
    features: Features,
    num_classes: int | None,
    *,
    training: Training = Training(),
    first: tuple[FoldNetworks, Sequence[np.ndarray]] | None = None,
    parts: Parts = ALONE,
    **where: Any,
) -> Prepared:
    """Return clients with rows of features, and with marks of the samples in `val` that are clean.

    training: how networks of folds are trained.
    first: for features="refined", the networks of the first pass, and the flags of labels to leave out.
    parts: shows and keeps the training of networks.
    where: seed, device, dtype and engine of a run that trains features.

    A client without clean samples gets one training sample in `val`, marked as not trusted, because
    every client of a run needs that role.
    """
    check_clients(clients)
    given = [checked(client, i) for i, client in enumerate(clients)]
    found = number_of_classes(given, num_classes)
    network: Any = None
    if isinstance(features, str) and features == "trained":
        network = train_network(given, found, parts=parts, **where)
    elif isinstance(features, str) and features in ("out_of_fold", "refined"):
        own = [client["train"] for client in given]
        network = train_folds(own, found, training, flags=None if first is None else first[1], parts=parts, **where)
        network = network if first is None else first[0] + network
    rows = _rows_of(features if network is None else network, given[0]["train"]["image"])
    own_rows = rows if not isinstance(network, FoldNetworks) else lambda some: rows_of(network.unseen(some))
    changed = [
        {role: {**part, "image": (own_rows if role == "train" else rows)(part["image"])} for role, part in one.items()}
        for one in given
    ]
    dims = {part["image"].shape[1] for one in changed for part in one.values()}
    if len(dims) > 1 or max(dims) > MOST_FEATURES:
        raise ProblemError(
            f"samples have {', '.join(map(str, sorted(dims)))} features, expected one number of at most "
            f"{MOST_FEATURES} for all clients: use images of one size, or a module with fewer outputs."
        )
    whole = _alike(changed)
    task = DataCleaning(learn="labels", num_clients=len(whole))
    return Prepared(task, task.problem(Shapes.of(whole[0], found)), whole, found, rows, network)


def checked(client: Holdings, number: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the images and labels of a client as arrays."""
    roles = {}
    for role in ("train", "val", "test"):
        if role not in client:
            continue
        fields = {
            name: _array(value) for name, value in fields_of(client[role], f"{role!r} of client {number}").items()
        }
        if not {"image", "label"} <= {*fields} or len(fields["image"]) != len(fields["label"]):
            raise ProblemError(
                f"client {number} has the fields {', '.join(map(str, fields)) or 'nothing'} in {role!r}, expected "
                "image and label with one row per sample: rename the fields."
            )
        if fields["label"].ndim != 1 or fields["label"].dtype.kind not in "iu":
            raise ProblemError(
                f"client {number} has labels of type {fields['label'].dtype} in {role!r}, expected one whole number "
                "per sample: number the classes from 0."
            )
        if len(fields["label"]):
            keep = ("image", "label", *(("wrong",) if role == "train" and "wrong" in fields else ()))
            roles[role] = {name: fields[name] for name in keep}
            roles[role]["label"] = fields["label"].astype(np.int64)
    if "train" not in roles:
        raise ProblemError(f"client {number} has no training samples: give it at least one, or leave that client out.")
    return roles


def number_of_classes(clients: Sequence[Mapping[str, Mapping[str, np.ndarray]]], num_classes: int | None) -> int:
    """Return `num_classes`, by default the largest label plus one; raise for labels outside the classes."""
    labels = [part["label"] for client in clients for part in client.values()]
    low, high = min(int(some.min()) for some in labels), max(int(some.max()) for some in labels)
    found = high + 1 if num_classes is None else whole_number("num_classes", num_classes)
    if found < 2:
        raise ProblemError(
            f"labels are from {low} to {high} and num_classes is {num_classes}, expected at least two classes: give "
            "samples of another class."
        )
    for i, client in enumerate(clients):
        for role, part in client.items():
            outside = part["label"][(part["label"] < 0) | (part["label"] >= found)]
            if len(outside):
                raise ProblemError(
                    f"client {i} has the label {outside[0]} in {role!r}, expected whole numbers from 0 to "
                    f"{found - 1} for {found} classes: number the classes from 0, or give more classes."
                )
    if num_classes is None and low:
        raise ProblemError(
            f"labels are from {low} to {high}, expected labels that start at 0: subtract {low}, or say how many "
            "classes there are (num_classes) if class 0 has no samples."
        )
    return found


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _alike(clients: Sequence[Mapping[str, dict[str, np.ndarray]]]) -> list[dict[str, dict[str, np.ndarray]]]:
    """Return clients that all have the same roles and fields, as a run demands."""
    tested = any("test" in client for client in clients)
    marked = all("wrong" in client["train"] for client in clients)
    found = []
    for client in clients:
        train = {name: values for name, values in client["train"].items() if marked or name != "wrong"}
        val = client.get("val", {name: train[name][:1] for name in ("image", "label")})
        nothing = {name: values[:0] for name, values in val.items()}
        clean = {**val, "trusted": np.full(len(val["label"]), "val" in client)}
        found.append({"train": train, "val": clean, **({"test": client.get("test", nothing)} if tested else {})})
    return found


def _rows_of(features: Any, images: np.ndarray) -> Callable[[Any], np.ndarray]:
    """Return the function from images to rows."""
    if isinstance(features, FoldNetworks):
        return lambda some: rows_of(features.probabilities(_array(some)))
    if callable(features):
        return lambda some: _by_module(features, _array(some))
    if features not in ("auto", "given", "convolutional"):
        raise SettingError(
            f"features is {features!r:.80}, expected 'auto', 'given', 'convolutional', 'trained', 'out_of_fold', "
            "'refined' or a module that maps images to rows."
        )
    flat = lambda some: _array(some).reshape(len(some), -1).astype(np.float32)
    if features == "given" or (features == "auto" and images.ndim < 3):
        return flat
    random = RandomConvolutions.of(int(np.prod(images.shape[1:])))
    return lambda some: random(torch.as_tensor(flat(some))).numpy()


def _by_module(module: Callable[[Tensor], Tensor], images: np.ndarray) -> np.ndarray:
    parts = []
    with torch.no_grad():
        for some in torch.as_tensor(images).split(_AT_ONCE):
            out = module(some)
            if not isinstance(out, Tensor) or len(out) != len(some):
                raise ProblemError(
                    f"the module returned {type(out).__name__} for {len(some)} images, expected a tensor with one row "
                    "per image: check what it returns."
                )
            parts.append(out.reshape(len(some), -1).float().cpu())
    return torch.cat(parts).numpy()
