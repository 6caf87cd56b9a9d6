"""Search for data files in local folders, without any download."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedbilevel.errors import DataError

CHECKOUT = Path(__file__).resolve().parents[3]
SYSTEM = Path("/usr/share/datasets")  # packages of Debian, e.g. dataset-fashion-mnist


def folders(data_dir: str | Path | None = None) -> list[Path]:
    """Return the folders in the order of the search.

    The order is the caller's folder, $FEDBILEVEL_DATA, the user's cache, shared/data beside a
    checkout, and the folder of data packages of the system.
    """
    named = [place for place in (data_dir, os.environ.get("FEDBILEVEL_DATA")) if place]
    found = [*map(Path, named), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedbilevel"]
    shared = CHECKOUT.parent / "shared" / "data"
    if (CHECKOUT / "pyproject.toml").is_file() and shared.is_dir():  # an installed package has no checkout
        found.append(shared)
    if SYSTEM.is_dir():
        found.append(SYSTEM)
    return list(dict.fromkeys(place.expanduser() for place in found))


def find(*names: str, data_dir: str | Path | None = None) -> list[Path]:
    """Find each file in the first folder that has it.

    Names are relative to a data folder, e.g. `libsvm/a9a.npz`.
    """
    searched = folders(data_dir)
    found = {name: place for name in names for folder in reversed(searched) if (place := folder / name).is_file()}
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(_sentence(", ".join(missing), len(missing) == 1, searched))
    return [found[name] for name in names]


def find_one_of(*choices: Sequence[str], data_dir: str | Path | None = None) -> list[Path]:
    """Find the files of one choice, for data that exist in several forms.

    The search stops at the first folder that holds all files of a choice. If that folder holds
    several choices, the first choice is used.
    """
    searched = folders(data_dir)
    for folder in searched:
        for names in choices:
            places = [folder / name for name in names]
            if all(place.is_file() for place in places):
                return places
    raise DataError(
        _sentence(
            " or ".join(" with ".join(names) for names in choices), len(choices) == 1 == len(choices[0]), searched
        )
    )


def _sentence(what: str, one: bool, searched: Sequence[Path]) -> str:
    where = ", ".join(str(folder) if folder.is_dir() else f"{folder} (no such folder)" for folder in searched)
    them = "it" if one else "them"
    return (
        f"there is no {what} in {where}: put {them} under {searched[0]}, "
        "or under a folder named by data_dir or $FEDBILEVEL_DATA."
    )
