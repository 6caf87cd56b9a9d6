"""Downloads of data files from their publishers, on request only.

Only files with a known SHA-256 sum are listed. A file is written beside its place and moved there
after its sum was checked, so that a partial file never has the final name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

from fedbilevel.data.locations import find_one_of, folders
from fedbilevel.errors import DataError, UnknownNameError

Progress = Callable[[str, int, int | None], None]  # name of the file, bytes so far, bytes in all if known
CHUNK = 1 << 16
SECONDS = 30  # timeout without a byte


class File(NamedTuple):
    name: str  # relative to a data folder
    url: str
    sha256: str


def _mnist(name: str, sha256: str) -> File:
    return File(f"mnist/{name}", f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}", sha256)


KNOWN: dict[str, tuple[File, ...]] = {
    "mnist": (
        _mnist("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        _mnist("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        _mnist("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        _mnist("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "shakespeare": (
        File(
            "shakespeare/tinyshakespeare.txt",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
}


def ensure(name: str, data_dir: str | Path | None = None, progress: Progress | None = None) -> list[Path]:
    """Return the files of a set from the first folder that holds all of them, packed or unpacked.

    Without such a folder, download the missing files into the first folder of the search.
    """
    if name not in KNOWN:
        raise UnknownNameError("set of data that can be fetched", name, KNOWN)
    files = KNOWN[name]
    try:
        return find_one_of(
            [file.name for file in files], [file.name.removesuffix(".gz") for file in files], data_dir=data_dir
        )
    except DataError:
        folder = folders(data_dir)[0]
    missing = [file for file in files if not (folder / file.name).is_file()]
    for i, file in enumerate(missing):
        download(file, folder, progress, [other.name for other in missing[i:]])
    return [folder / file.name for file in files]


def download(file: File, folder: Path, progress: Progress | None = None, wanted: Sequence[str] = ()) -> Path:
    """Download one file into `folder`.

    wanted: names of all missing files, for the error message.
    """
    place = folder / file.name
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            found = _write(file, part, progress)
            if found == file.sha256:
                os.replace(part, place)
        finally:  # also after an interrupt
            part.unlink(missing_ok=True)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # the error is also an open response
        names = ", ".join(wanted or [file.name])
        raise DataError(
            f"{file.url} could not be fetched ({error or type(error).__name__}): try again, or put {names} under "
            f"{folder} by hand."
        ) from error
    if found != file.sha256:
        raise DataError(
            f"{file.url} has the SHA-256 sum {found}, expected {file.sha256}: it was damaged or replaced, and "
            "nothing was kept; try again later."
        )
    return place


def _write(file: File, part: Path, progress: Progress | None) -> str:
    """Write the file and return its SHA-256 sum."""
    sums, done = hashlib.sha256(), 0
    with urlopen(file.url, timeout=SECONDS) as response, part.open("wb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        while chunk := response.read(CHUNK):
            out.write(chunk)
            sums.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(file.name, done, total)
    if total is not None and done != total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
    return sums.hexdigest()
