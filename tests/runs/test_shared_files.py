"""Files of records: whole, also where several processes write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedbilevel.runs.record import write_whole


def test_two_processes_may_write_one_file(tmp_path: Path, monkeypatch: Any) -> None:
    """The other process begins and ends while this one has written half of its work."""
    path, sync = tmp_path / "run.json", os.fsync

    def other(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        write_whole(path, b"theirs", shared=True)
        assert path.read_bytes() == b"theirs"
        sync(handle)

    monkeypatch.setattr(os, "fsync", other)
    write_whole(path, b"ours", shared=True)
    assert path.read_bytes() == b"ours"
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
