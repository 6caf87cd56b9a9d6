"""Where the data of a site are: a folder of one client, or an installed function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from fedbilevel.errors import PlanError
from fedbilevel.problem.client_data import Holdings


def is_one_client(place: Path) -> bool:
    """Check whether a folder holds the files of a single client. A missing or empty folder counts
    as one client, so that reading it raises the proper error."""
    inside = list(place.iterdir()) if place.is_dir() else []
    return any(path.is_file() and path.stem == "train" for path in inside) or not any(path.is_dir() for path in inside)


def loader_of(name: str, file: str) -> Callable[[str], Holdings | list[Holdings]]:
    """Import the installed loader that a site's settings name.

    file: name of the settings, for errors.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"loader in {file} is {name!r} ({error}), expected 'folder', 'simulated' or an installed "
            "package.module:function."
        ) from error
    if not callable(found):
        raise PlanError(f"loader in {file} is {name!r}, which is not a function: name one as package.module:function.")
    return found
