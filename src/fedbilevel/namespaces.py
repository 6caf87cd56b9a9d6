"""Access to the class of each module as an attribute of its package: `fb.tasks.DataCleaning`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any


def class_in(package: str, path: Iterable[str], name: str) -> Any:
    """Import the class `name` from the module of the same name in lower case.

    The name of the module may have underscores between words.
    """
    for module in pkgutil.iter_modules(path):
        if module.name.replace("_", "") == name.lower() and module.name != name:
            found = vars(importlib.import_module(f"{package}.{module.name}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def classes_in(package: str, path: Iterable[str]) -> list[str]:
    """Return the names of all classes that `class_in` finds."""
    found = []
    for module in pkgutil.iter_modules(path):
        for name in vars(importlib.import_module(f"{package}.{module.name}")):
            if name[0].isupper() and name.lower() == module.name.replace("_", ""):
                found.append(name)
    return found
