"""Fixtures of the tests of detectors."""

import pytest

from support.sites.loopback import Loopback


@pytest.fixture
def short_waits(monkeypatch):
    """The server pings a missing site before every outer iteration, without sleeping."""
    monkeypatch.setattr("fedbilevel.sites.exchange._APART", (0.0, 0.0))
    monkeypatch.setattr("fedbilevel.sites.serve._BETWEEN", 0.0)
    yield
    Loopback.close_all()
