"""Versions of a site's memory and private values on its disk: the last two that the server may
return to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from fedbilevel.engines.server import below
from fedbilevel.errors import WireError
from fedbilevel.runs.record import read_tensors, write_whole

_VERSION = re.compile(r"version-(\d+)\.safetensors")


class Versions:
    """Reads and writes the versions of one run.

    run: the name of the run.
    data: digest of the site's data that the versions belong to.
    """

    def __init__(self, folder: Path, run: str, data: str, device: torch.device) -> None:
        self._folder, self._run, self._data, self._device = folder, run, data, device
        self.base: int | None = None  # the version that the server would go back to

    def stored(self) -> list[int]:
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := _VERSION.fullmatch(path.name)))

    def packed(self, stores: Mapping[str, Any]) -> bytes:
        """Return the content of a version as bytes.

        stores: each `Store` by its label.
        """
        tensors = {}
        for label, store in stores.items():
            for name, has in store.written.items():  # of a cohort, only some clients have written
                tensors[f"{label}-written.{name}"] = has.clone()
                tensors[f"{label}.{name}"] = store.own(name, has.nonzero()[:, 0]).cpu().contiguous().clone()
        return save(tensors, {"data": self._data, "run": self._run})

    def write(self, version: int, content: bytes) -> None:
        """Write a version, and delete earlier versions except the last one that the server relied
        on."""
        write_whole(self._place(version), content)
        for old in self.stored():
            if old not in (version, self.base):
                self._place(old).unlink()
        self.base = version

    def read(self, version: Any, stores: Mapping[str, Any]) -> None:
        """Fill the empty stores from a version."""
        if type(version) is not int or version not in self.stored():
            have = ", ".join(map(str, self.stored())) or "none"
            raise WireError(f"this site has no version {version} of the run (it has {have}): start a new run.")
        try:
            labels, tensors = read_tensors(self._place(version))
        except (SafetensorError, OSError) as error:
            raise WireError(f"version {version} of the run at this site is damaged: start a new run.") from error
        if labels.get("data") != self._data:
            raise WireError(
                "the data of this site are not those that the run began with: restore them, or start a new run."
            )
        for label, store in stores.items():
            for name in below(tensors, f"{label}."):
                rows = tensors[f"{label}.{name}"].to(self._device)
                store.write(name, tensors[f"{label}-written.{name}"].nonzero()[:, 0], rows)

    def _place(self, version: int) -> Path:
        return self._folder / f"version-{version}.safetensors"
