"""The account of privacy as a file, which outlives checkpoints.

    privacy.json    counts of releases by run, noise and rate

The file is not part of a checkpoint: resuming from an old checkpoint does not restore an old account.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedbilevel.errors import CheckpointError
from fedbilevel.privacy.accountant import Accountant, Budget, Method, State
from fedbilevel.runs.record import write_whole

FILE = "privacy.json"


def account_in(folder: Path, budget: Budget, *, method: Method = "rdp", run: str = "run") -> Accountant:
    """Return the account of a folder with all that was spent there. The file is on the disk before a
    release is allowed."""
    path = folder / FILE

    def keep(state: State) -> None:
        write_whole(path, json.dumps(state).encode())

    accountant = Accountant(budget, method=method, run=run, keep=keep)
    try:
        accountant.merge(json.loads(path.read_bytes()))
    except FileNotFoundError:
        pass  # nothing was spent yet
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} holds the account of privacy and cannot be read: put back a copy.") from error
    return accountant
