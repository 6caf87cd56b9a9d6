"""The lead's files about runs: changes of two processes at once are both kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from fedbilevel.sites.flare import jobs


@pytest.mark.parametrize("change", [{"stop": True}, {"job": "second"}])
def test_a_change_that_comes_between_reading_and_writing_is_kept(
    tmp_path: Path, monkeypatch: Any, change: dict[str, Any]
) -> None:
    entry, write = jobs.RunEntry(tmp_path, "r"), jobs.write_whole
    entry.write(plan={"name": "r"}, outcome="running", stop=False)
    other = threading.Thread(target=lambda: jobs.RunEntry(tmp_path, "r").write(**change))

    def interrupted(*given: Any, **options: Any) -> None:
        monkeypatch.setattr(jobs, "write_whole", write)
        other.start()
        other.join(0.3)  # as long as it would need without a lock
        write(*given, **options)

    monkeypatch.setattr(jobs, "write_whole", interrupted)
    entry.write(job="first", begun=True)
    other.join()
    found = entry.read()
    assert found["begun"]
    assert found["outcome"] == "running"
    assert found["stop"] is change.get("stop", False)
    assert found["jobs"] == ["first", *([change["job"]] if "job" in change else [])]
