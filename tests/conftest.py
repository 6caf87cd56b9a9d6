"""Every test runs with one thread: two processes with two threads each on two cores crawl."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedbilevel.data import places

torch.set_num_threads(1)
settings.register_profile("project", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder, and no other place to look for data in."""
    monkeypatch.setenv("FEDBILEVEL_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(places, "CHECKOUT", tmp_path / "none")
    return tmp_path
