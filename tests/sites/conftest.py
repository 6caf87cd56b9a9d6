"""Fixtures of several tests of sites."""

import pytest

from support.sites.loopback import Loopback
from support.sites.operator_kits import make_kit


@pytest.fixture
def kit(tmp_path):
    """A site's kit without FLARE, for its operator's commands and page."""
    return make_kit(tmp_path / "kit")


@pytest.fixture
def folder(kit):
    """The site's own folder in its kit."""
    return kit / "site"


@pytest.fixture
def short_waits(monkeypatch):
    """The server pings a missing site before every outer iteration, and does not sleep between
    pings."""
    monkeypatch.setattr("fedbilevel.sites.exchange._APART", (0.0, 0.0))
    monkeypatch.setattr("fedbilevel.sites.serve._BETWEEN", 0.0)
    yield
    Loopback.close_all()
