import pytest

from fedbilevel.peers import transport as transport_module
from support.peers.offices import TIME, Team


@pytest.fixture
def team(monkeypatch):
    """Factory of teams. All their threads end with the test."""
    monkeypatch.setattr(transport_module, "TICK", 0.05)
    teams = []

    def make(*args, opened=True, **options):
        teams.append(Team(*args, **options))
        if opened:
            teams[-1].open(*range(args[0]))
        return teams[-1]

    yield make
    for one in teams:
        for office in one.offices.values():
            office.agreement.quorum, office.agreement.continues = 10**6, False
            office.transport.close()
        carrier = one.network._thread
        if carrier is not None:
            carrier.join(TIME)
            assert not carrier.is_alive()
