"""Fixtures and settings of all tests.

Torch uses one thread, because several test processes share the cores.
"""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedbilevel.data import locations

pytest_plugins = ["support.provoked"]
torch.set_num_threads(1)
os.fsync = lambda _file: None  # no test can observe the effect of fsync
settings.register_profile(
    "project", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")


def pytest_collection_modifyitems(items):
    """Begin with the files that wait, so that the others compute beside them."""
    waiting = {item.path for item in items if item.get_closest_marker("wait")}
    items.sort(key=lambda item: item.path not in waiting)


def pytest_runtest_setup(item):
    """Restore the handler of Ctrl-C: a background shell ignores it, and a test may have replaced it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def short_waits(monkeypatch):
    """The server pings a missing site before every outer iteration, and does not sleep between
    pings."""
    from support.sites.loopback import Loopback  # only these tests need the sites

    monkeypatch.setattr("fedbilevel.sites.exchange._APART", (0.0, 0.0))
    monkeypatch.setattr("fedbilevel.sites.serve._BETWEEN", 0.0)
    yield
    Loopback.close_all()


@pytest.fixture
def same_threads():
    """Restore the number of threads, which a benchmark sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder that is the only place for data."""
    monkeypatch.setenv("FEDBILEVEL_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(locations, "CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(locations, "SYSTEM", tmp_path / "none")
    return tmp_path
