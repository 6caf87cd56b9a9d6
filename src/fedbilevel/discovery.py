"""Discovery of algorithms and tasks by module name, in fedbilevel and other installed packages.

Another package offers its classes as entry points:

    [project.entry-points."fedbilevel.tasks"]
    sepsis = "hospital.sepsis:Sepsis"

`Sepsis` derives from `Task` and is in a module `sepsis`, so that its name() is the name of the
entry point. Algorithms are in the group "fedbilevel.algorithms". Classes of fedbilevel cannot be
replaced.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

import fedbilevel.algorithms
import fedbilevel.detectors
import fedbilevel.tasks
from fedbilevel.detectors.detector import Detector
from fedbilevel.errors import PluginError, UnknownNameError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.tasks.task import Task

T = TypeVar("T", bound=type)


def _found(package: ModuleType, kind: type[Any]) -> dict[str, type[Any]]:
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            if (
                isinstance(value, type)
                and issubclass(value, kind)
                and value.__module__ == f"{package.__name__}.{module.name}"
                and value is not kind
            ):
                found[module.name] = value
    return found


def algorithms() -> dict[str, type[Algorithm]]:
    return _all(fedbilevel.algorithms, Algorithm)


def tasks() -> dict[str, type[Task]]:
    return _all(fedbilevel.tasks, Task)


def own_tasks() -> list[str]:
    """Return the names of fedbilevel's tasks, which no other package can use."""
    return list(_found(fedbilevel.tasks, Task))


def detectors() -> dict[str, type[Detector]]:
    """Return detectors of wrong labels: algorithms that need samples with labels."""
    found = _found(fedbilevel.detectors, Detector)
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def algorithm(name: str) -> type[Algorithm]:
    """Return an algorithm or a detector by name."""
    found = detectors().get(name)
    if found is not None:
        return found
    return _named("algorithm", name, fedbilevel.algorithms, Algorithm)


def task(name: str) -> type[Task]:
    return _named("task", name, fedbilevel.tasks, Task)


def _all(package: ModuleType, kind: type[Any]) -> dict[str, type[Any]]:
    """Return all usable classes; an unusable class raises only when it is requested by name."""
    known = _found(package, kind)
    usable = {}
    for name in {entry.name for entry in _offered(package)}.difference(known):
        try:
            usable[name] = _loaded(name, _offered(package), known, kind)
        except PluginError:
            continue
    return {**known, **dict(sorted(usable.items()))}


def _named(what: str, name: str, package: ModuleType, kind: type[Any]) -> type[Any]:
    known, offered = _found(package, kind), _offered(package)
    if any(entry.name == name for entry in offered):
        return _loaded(name, offered, known, kind)
    if name not in known:
        raise UnknownNameError(what, name, _all(package, kind))
    return known[name]


def _offered(package: ModuleType) -> Iterable[EntryPoint]:
    return _installed(package.__name__, tuple(sys.path))


@functools.cache
def _installed(group: str, _path: tuple[str, ...]) -> Iterable[EntryPoint]:
    """Read the entry points once per path, because searching all installed packages is slow."""
    return entry_points(group=group)


def _loaded(name: str, offered: Iterable[EntryPoint], known: Iterable[str], kind: type[Any]) -> type[Any]:
    """Load the class of an entry point; raise if its name or type is wrong."""
    same = {entry.value: entry for entry in offered if entry.name == name}
    entry, *others = same.values()
    where = f"{_package(entry)} offers {entry.value} as {name!r}"
    if name in known:
        raise PluginError(
            f"{where}, which is a name of fedbilevel's own: rename that entry point, or uninstall its package."
        )
    if others:
        raise PluginError(
            f"{where}, and {_package(others[0])} offers {others[0].value} under the same name: uninstall one of them."
        )
    try:
        value: Any = entry.load()
    except Exception as error:  # another package's code may raise anything; name it, keep the cause
        raise PluginError(
            f"{where}, which cannot be imported ({type(error).__name__}: {error}): fix or uninstall that package."
        ) from error
    derived = isinstance(value, type) and issubclass(value, kind)
    if not derived:
        raise PluginError(f"{where}, which is no class derived from {kind.__name__}: fix that entry point.")
    if value.name() != name:
        raise PluginError(
            f"{where}, but its name() is {value.name()!r}: name the module or the entry point after the other, or "
            "define name()."
        )
    return value


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else "a package"
