"""Peers that fall silent, leave, halt or restart, as the others see them."""

import numpy as np
import pytest

from fedbilevel.engines.engine import Regrouped
from fedbilevel.peers.formation import mark
from fedbilevel.peers.wire import Version
from support.peers.offices import SUSPECT, about, until


def test_only_the_silent_peer_is_declared_gone(team):
    """p0 waits for a row of p1, and p1 for a row of p2, which is gone: p1 sends beats but no rows."""
    t = team(3)
    t.form(0, 1, 2)
    row = np.ones(3)
    t.begin(0, lambda: t.offices[0].exchange.rows(0, [1], row))
    t.begin(1, lambda: t.offices[1].exchange.rows(0, [2], row))
    t.network.gone.add(2)
    for raised in t.done(0, 1):
        assert isinstance(raised, Regrouped)
    until(lambda: not t.offices[0].membership.alive(2) and not t.offices[1].membership.alive(2))
    assert t.gone(by=0) == t.gone(by=1) == ["p2"]
    both = mark((0, 1, 2))
    stored = {f"p{peer}": about(Version(1, both), Version(0, both)) for peer in range(2)}
    formation = t.form(0, 1, **stored)
    assert (formation.members, formation.epoch, formation.iteration, formation.changed) == ((0, 1), 2, 1, True)
    assert t.gone(by=0) == t.gone(by=1) == ["p2"]


def test_peer_that_halts_briefly_is_not_gone(team):
    t = team(2, suspect=1.2)
    t.form(0, 1)
    t.network.halted.add(1)
    until(lambda: t.offices[0].transport.quiet(1) > 0.5)
    t.network.halted.discard(1)
    until(lambda: t.offices[0].transport.quiet(1) < 0.2 and t.offices[1].transport.quiet(0) < 0.2)
    ticked = t.offices[0].membership._last_tick
    until(lambda: t.offices[0].membership._last_tick > ticked and t.offices[1].membership._last_tick > ticked)
    assert t.gone(by=0) == t.gone(by=1) == []
    assert not t.offices[0].agreement.regrouped()
    assert not t.offices[1].agreement.regrouped()


@pytest.mark.parametrize("continues", [False, True])
def test_peer_that_halts_too_long_rejoins(team, continues):
    t = team(3, continues=continues)
    t.form(0, 1, 2)
    before = t.offices[2].membership.view[2]
    t.network.halted.add(2)
    until(lambda: not t.offices[0].membership.alive(2) and not t.offices[1].membership.alive(2))
    t.network.halted.discard(2)
    until(
        lambda: all(
            office.membership.view[2] == t.offices[2].outbox.incarnation > before for office in t.offices.values()
        )
    )
    assert "this peer rejoins as a new process." in t.lines[2]
    assert any("p2 is back" in line for line in t.lines[0])
    assert t.gone(by=2) == []  # it read waiting messages before it suspected a peer
    assert t.offices[2].agreement.regrouped()  # the others may have continued without it
    formation = t.form(0, 1, 2)
    assert (formation.members, formation.epoch) == ((0, 1, 2), 2)


def test_peer_that_leaves_unfinished_is_gone_at_once(team):
    t = team(2, suspect=60.0)
    t.form(0, 1)
    t.offices[1].leave(finished=False)
    until(lambda: not t.offices[0].membership.alive(1))
    assert t.offices[0].agreement.regrouped()
    assert t.offices[0].membership.left == set()


def test_silent_peer_that_has_finished_is_not_gone(team):
    t = team(2, suspect=0.3)
    t.form(0, 1)
    t.offices[1].leave(finished=True)
    until(lambda: 1 in t.offices[0].membership.left)
    until(lambda: t.offices[0].transport.quiet(1) > 0.3 + 0.2)
    assert t.gone(by=0) == []
    assert not t.offices[0].agreement.regrouped()


def test_lost_bye_is_repeated(team):
    t = team(2, suspect=60.0)
    t.form(0, 1)
    lost = []

    def lose(sender, receiver, message):
        hit = message.kind == "bye" and len(lost) < 3
        lost.extend([message] * hit)
        return hit

    t.network.lost = lose
    t.begin(1, lambda: t.offices[1].leave(finished=True))
    until(lambda: 1 in t.offices[0].membership.left)
    assert len(lost) == 3
    t.begin(0, lambda: t.offices[0].leave(finished=True))
    t.done(0, 1)


def test_last_peer_leaves_without_waiting(team):
    """Both know that the other has left. A wait for the next beat would exceed the limit of `done`."""
    t = team(2, beat=60.0)
    t.form(0, 1)
    for peer in (1, 0):
        t.begin(peer, lambda peer=peer: t.offices[peer].leave(finished=True))
    t.done(0, 1)


def test_peer_known_only_from_a_view_is_not_gone_at_once(team):
    """p1 learns of p2 from the view of p0 long after its start, before the first message of p2."""
    t = team(3, opened=False, suspect=SUSPECT)
    t.network.cut = {(2, 1)}
    t.open(0, 1)
    until(lambda: t.offices[1].transport.quiet(2) > SUSPECT + 0.1)
    t.open(2)
    until(lambda: t.offices[1].membership.alive(2))
    ticked = t.offices[1].membership._last_tick
    until(lambda: t.offices[1].membership._last_tick > ticked + 0.1)
    t.network.cut.clear()
    until(lambda: t.offices[1].transport.quiet(2) < 0.2)
    assert t.gone(by=1) == []


def test_restarted_peer_with_an_earlier_clock_is_present_again(team):
    t = team(2)
    t.form(0, 1)
    late = t.offices[1].membership.view[1]
    t.network.gone.add(1)
    until(t.offices[0].agreement.regrouped)
    t.open(1)
    with t.offices[1]._changed:
        t.offices[1].outbox.incarnation = t.offices[1].membership.view[1] = late - 100_000
    until(
        lambda: (
            t.offices[1].membership.view[1] > late
            and t.offices[0].membership.view[1] == t.offices[1].membership.view[1]
        )
    )
    assert t.form(0, 1).epoch == 2
