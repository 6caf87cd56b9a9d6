"""Fixtures of several tests of sites."""

import pytest

from support.sites.operator_kits import make_kit


@pytest.fixture
def kit(tmp_path):
    """A site's kit without FLARE, for its operator's commands and page."""
    return make_kit(tmp_path / "kit")


@pytest.fixture
def folder(kit):
    """The site's own folder in its kit."""
    return kit / "site"
