"""The file of used nonces at a site.

Two sums of the same rows over different members differ by single rows. A site therefore answers
each nonce once. The nonces of a run increase, because a turn begins with the time of its attempt,
so the file holds only the highest nonce and the highest key epoch of each run.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.errors import PolicyError
from fedbilevel.runs.record import write_whole
from fedbilevel.secure.terms import Nonce


class Nonces:
    """Highest nonces and epochs by run, shared by all processes of a site."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def use(self, run: str, nonce: Nonce) -> None:
        """Write a nonce to the disk, or refuse it if it is not higher than all before it."""
        self._raise_to(run, "nonce", [list(nonce.turn), nonce.iteration, nonce.call])

    def begin(self, run: str, epoch: int) -> None:
        """Write a key epoch to the disk, or refuse it if it is not higher than all before it."""
        self._raise_to(run, "epoch", epoch)

    def _raise_to(self, run: str, what: str, value: Any) -> None:
        with _locked(self.path.with_name(self.path.name + ".lock")):
            known = self._read()
            last = known.setdefault(run, {}).get(what)
            if last is not None and value <= last:
                raise PolicyError(
                    f"the {what} {value} of the secure sum is not above {last}, which this site used before: "
                    "continue the run with a new turn and a new epoch."
                )
            known[run][what] = value
            write_whole(self.path, json.dumps(known).encode())

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_bytes())
            if all(_is_valid(run) for run in found.values()):
                return found
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # a damaged file does not count as an empty one
        raise PolicyError(f"{self.path} holds the used nonces of this site and cannot be read: put back a copy of it.")


def _is_valid(run: dict[str, Any]) -> bool:
    turn, iteration, call = run.get("nonce", [[0], 0, 0])
    return all(type(one) is int for one in (*turn, iteration, call, run.get("epoch", 0)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    if not path.parent.is_dir():
        raise PolicyError(f"the used nonces cannot be kept in {path.parent}, expected a folder: make it.")
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
