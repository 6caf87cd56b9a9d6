"""UCI Adult: 14 facts from the census of 1994 about 48,842 people.

The label says whether a person earns more than 50,000 dollars a year.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.data.locations import find_one_of
from fedbilevel.errors import DataError

CHOICES = (("adult/adult.data.gz", "adult/adult.test.gz"), ("adult/adult.data", "adult/adult.test"))
ATTRIBUTES = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)
NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
LABELS = ("<=50K", ">50K")


class Adult(NamedTuple):
    train_x: np.ndarray  # (n, d) float32
    train_y: np.ndarray  # (n,) int64: 1 earns more than 50K
    test_x: np.ndarray
    test_y: np.ndarray
    names: list[str]  # (d,) "age", "workclass=Private", ...


def adult(data_dir: str | Path | None = None) -> Adult:
    """Return the training and the test part as columns of numbers.

    Numeric attributes are standardised by the mean and the standard deviation of the training part.
    Every other attribute has one column of 0 and 1 for each of its values in the training part,
    including "?" (unknown). A value that occurs only in the test part is 0 in all these columns.
    """
    (train, train_y), (test, test_y) = (_rows(place) for place in find_one_of(*CHOICES, data_dir=data_dir))
    names: list[str] = []
    columns: list[tuple[np.ndarray, np.ndarray]] = []
    for attribute, ours, theirs in zip(ATTRIBUTES, zip(*train, strict=True), zip(*test, strict=True), strict=True):
        if attribute in NUMERIC:
            known, new = (np.array(values, np.float64) for values in (ours, theirs))
            scale = known.std() or 1.0  # a constant column stays 0
            names.append(attribute)
            columns.append(((known - known.mean()) / scale, (new - known.mean()) / scale))
        else:
            known, new = np.array(ours), np.array(theirs)
            for value in np.unique(known):
                names.append(f"{attribute}={value}")
                columns.append((known == value, new == value))
    train_x, test_x = (np.stack(part, axis=1).astype(np.float32) for part in zip(*columns, strict=True))
    return Adult(train_x, train_y, test_x, test_y, names)


def _rows(place: Path) -> tuple[list[list[str | float]], np.ndarray]:
    """Return the attributes and the label of every person.

    The test file starts with a comment line ("|1x3 ...") and ends its labels with dots.
    """
    try:
        content = place.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("ascii")
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{place} cannot be read ({error}): get the file anew.") from error
    rows: list[list[str | float]] = []
    labels = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("|"):
            continue
        *facts, label = (part.strip() for part in line.split(","))
        if len(facts) != len(ATTRIBUTES) or label.removesuffix(".") not in LABELS:
            raise DataError(
                f"line {number} of {place} has {len(facts)} facts and the label {label!r}, expected "
                f"{len(ATTRIBUTES)} and one of {LABELS}."
            )
        rows.append(
            [
                _number(fact, f"line {number} of {place}", name) if name in NUMERIC else fact
                for name, fact in zip(ATTRIBUTES, facts, strict=True)
            ]
        )
        labels.append(LABELS.index(label.removesuffix(".")))
    if not rows:
        raise DataError(f"{place} is empty, expected one person per line: get the file anew.")
    return rows, np.array(labels, np.int64)


def _number(text: str, where: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where} has {text!r} as {name}, expected a number.")
    return value
