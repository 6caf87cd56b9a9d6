"""Detectors of wrong labels, one module each: `fb.detectors.LabelEM()`.

A detector is an algorithm with a server. Unlike the algorithms, which solve any problem by its
derivatives, it reads samples and labels, so it runs only on the task data_cleaning with
learn="labels".
"""

from __future__ import annotations

from typing import Any

from fedbilevel.namespaces import class_in, classes_in


def __getattr__(name: str) -> Any:
    return class_in(__name__, __path__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *classes_in(__name__, __path__)})
