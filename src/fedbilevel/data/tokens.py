"""Sources of text in a folder, as memory-mapped tokens.

    FOLDER/target.txt             text of the kind that the model is for
    FOLDER/news.txt               a source: a file, or a folder of files
    FOLDER/forum/2024.txt ...

Sources and target are divided among clients by position. Or every client has a folder of its own:

    FOLDER/ann/target.txt, FOLDER/ann/news.txt, FOLDER/ben/target.txt, ...

A client may lack a source. `test`, beside a target, is text for figures only. The tokens of a file are
its bytes; a file with the ending .u16 holds tokens of two bytes each, little end first. No file is
copied: of a file that is larger than memory, only the windows are read that a batch needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.errors import DataError

TARGET, TEST = "target", "test"
WIDE = ".u16"
_AT_ONCE = 2**24  # tokens that are looked at together

Tokens = Sequence[np.ndarray]


class Texts(NamedTuple):
    """Tokens of every client: those of its sources by name, of the target, and of the test text."""

    sources: Sequence[Mapping[str, Tokens]]
    target: Sequence[Tokens]
    test: Sequence[Tokens]
    num_tokens: int = 256  # different tokens

    @property
    def names(self) -> list[str]:
        return sorted({name for own in self.sources for name in own})

    def sizes(self) -> dict[str, int]:
        """Return the number of tokens of every source at all clients."""
        return {name: sum(len(one) for own in self.sources for one in own.get(name, ())) for name in self.names}


def read_texts(path: Path | str, *, num_clients: int = 4) -> Texts:
    """Map the files of a folder.

    num_clients: clients among which the files are divided, where clients have no folders of their own.
    """
    if type(num_clients) is not int or num_clients < 1:
        raise DataError(f"num_clients is {num_clients!r}, expected a whole number, at least 1.")
    found = _entries(Path(path))
    if TARGET in found:
        mapped = {name: _mapped(place) for name, place in found.items()}
        own = [{name: _part(tokens, i, num_clients) for name, tokens in mapped.items()} for i in range(num_clients)]
    else:
        folders = [place for place in found.values() if place.is_dir()]
        own = [{name: _mapped(place) for name, place in _entries(folder).items()} for folder in folders]
        lacking = [folder.name for folder, held in zip(folders, own, strict=True) if TARGET not in held]
        if not own or lacking:
            where = f"{path}/{lacking[0]}" if lacking and len(lacking) < len(own) else str(path)
            raise DataError(f"{where} holds no {TARGET}.txt: add text of the kind that the model is for.")
    sources = [{name: one for name, one in held.items() if name not in (TARGET, TEST)} for held in own]
    texts = Texts(sources, [held[TARGET] for held in own], [held.get(TEST, []) for held in own])
    if len(texts.names) < 2:
        raise DataError(f"{path} holds {len(texts.names)} sources, expected at least two beside {TARGET}.txt.")
    wide = [one for held in own for tokens in held.values() for one in tokens if one.dtype != np.uint8]
    return texts._replace(num_tokens=max(256, 1 + max(map(_largest, wide), default=0)))


def cut(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """Cut every array in two; the second parts have the given share of the tokens."""
    ends = [len(one) - round(share * len(one)) for one in tokens]
    first, second = zip(*((one[:end], one[end:]) for one, end in zip(tokens, ends, strict=True)), strict=True)
    return first, second


def _entries(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: give a folder with one file of text per source, and {TARGET}.txt.")
    found: dict[str, Path] = {}
    for place in sorted(place for place in folder.iterdir() if not place.name.startswith(".")):
        if place.stem in found:
            raise DataError(f"{folder} holds {found[place.stem].name} and {place.name}: rename one of these sources.")
        found[place.stem] = place
    return found


def _mapped(place: Path) -> list[np.ndarray]:
    if place.is_dir():
        return [one for name in sorted(place.iterdir()) for one in _mapped(name)]
    dtype, size = (np.dtype("<u2") if place.suffix == WIDE else np.dtype(np.uint8)), place.stat().st_size
    if size % dtype.itemsize:
        raise DataError(f"{place} has {size} bytes, expected two for every token: write it again.")
    return [np.memmap(place, dtype, "r")] if size else []


def _part(tokens: Tokens, i: int, num: int) -> list[np.ndarray]:
    return [one[len(one) * i // num : len(one) * (i + 1) // num] for one in tokens]


def _largest(tokens: np.ndarray) -> int:
    """Return the largest token, from portions of a file."""
    return max((int(tokens[at : at + _AT_ONCE].max()) for at in range(0, len(tokens), _AT_ONCE)), default=0)
