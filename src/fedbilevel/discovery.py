"""Finds algorithms and tasks: one module each, whose name is the name users type."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any, TypeVar

import fedbilevel.algorithms
import fedbilevel.tasks
from fedbilevel.errors import UnknownNameError
from fedbilevel.federation import Algorithm
from fedbilevel.tasks.task import Task

T = TypeVar("T", bound=type)


def _found(package: ModuleType, kind: type[Any]) -> dict[str, type[Any]]:
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, kind) and value.__module__ == f"{package.__name__}.{module.name}" and value is not kind:
                found[module.name] = value
    return found


def algorithms() -> dict[str, type[Algorithm]]:
    return _found(fedbilevel.algorithms, Algorithm)


def tasks() -> dict[str, type[Task]]:
    return _found(fedbilevel.tasks, Task)


def algorithm(name: str) -> type[Algorithm]:
    return _named("algorithm", name, algorithms())


def task(name: str) -> type[Task]:
    return _named("task", name, tasks())


def _named(kind: str, name: str, known: dict[str, type[Any]]) -> type[Any]:
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return known[name]
