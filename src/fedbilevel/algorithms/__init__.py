"""Algorithms, one module each: `fb.algorithms.FedBiO(lr_upper=0.1)`."""

from __future__ import annotations

from typing import Any

from fedbilevel.namespaces import class_in, classes_in


def __getattr__(name: str) -> Any:
    return class_in(__name__, __path__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *classes_in(__name__, __path__)})
