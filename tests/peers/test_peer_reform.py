"""Reforming of a group in the middle of an averaging, after the loss of a member."""

import pytest

from fedbilevel.engines.engine import Regrouped
from fedbilevel.peers.formation import Formation
from support.peers.offices import about, until


def reforms(t, *peers):
    for peer in peers:
        t.begin(peer, t.offices[peer].agreement.reform)
    return t.done(*peers)


def test_averaging_continues_after_a_loss(team):
    t = team(4, continues=True, quorum=2)
    t.form(0, 1, 2, 3, **{f"p{peer}": about(weight=1.0 + peer) for peer in range(4)})
    t.offices[1].exchange.next_averaging()
    t.network.gone.add(3)
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in range(3)))
    assert reforms(t, 0, 1, 2) == [True, False, True]  # p1 had finished the first averaging
    formed = [t.offices[peer].agreement.formed for peer in range(3)]
    assert formed[0] == formed[1] == formed[2] == Formation((0, 1, 2), (1.0, 2.0, 3.0), 2, -1, False, formed[0].run)
    assert not any(t.offices[peer].agreement.regrouped() for peer in range(3))
    assert all(t.gone(by=peer) == ["p3"] for peer in range(3))


def test_group_reforms_despite_a_lost_ready(team):
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    lost = []

    def lose(sender, receiver, message):
        hit = (sender, message.kind, bool(message.averaging)) == (0, "ready", True) and len(lost) < 2
        lost.extend([message] * hit)
        return hit

    t.network.lost = lose
    t.network.gone.add(2)
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in range(2)))
    assert reforms(t, 0, 1) == [False, False]
    assert lost
    assert t.offices[0].agreement.formed == t.offices[1].agreement.formed


def test_reform_below_the_quorum_raises_regrouped(team):
    t = team(3, continues=True, quorum=3)
    t.form(0, 1, 2)
    t.offices[2].leave(finished=False)
    until(t.offices[0].agreement.regrouped)
    with pytest.raises(Regrouped):
        t.offices[0].agreement.reform()


def test_newcomer_waits_until_a_member_starts_a_new_group(team):
    """p2 restarts and waits; p0 starts a new group, which calls p1 back."""
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    t.network.gone.add(2)
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in range(2)))
    reforms(t, 0, 1)
    t.open(2)
    t.forming(2)
    until(lambda: t.offices[0].agreement.newcomers() and t.offices[1].agreement.newcomers())
    assert not t.offices[0].agreement.regrouped()
    assert not t.offices[1].agreement.regrouped()
    t.forming(0)
    until(t.offices[1].agreement.regrouped)
    with pytest.raises(Regrouped):
        t.offices[1].agreement.reform()
    t.forming(1)
    one, two, three = t.done(0, 1, 2)
    assert one == two == three
    assert (one.members, one.epoch) == ((0, 1, 2), 3)


def test_member_that_starts_a_new_group_with_the_same_view_calls_others_back(team):
    """p1 continues an averaging, is called back, and says ready with the same view."""
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    t.offices[0]._take(1, *t.ready(1, t.offices[1].membership.view))  # the ready of the start, repeated
    assert not t.offices[0].agreement.called_back()
    t.network.gone.add(2)
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in range(2)))
    reforms(t, 0, 1)
    until(lambda: t.offices[0].membership.view == t.offices[1].membership.view)
    assert not t.offices[0].agreement.called_back()
    t.offices[0]._take(1, *t.ready(1, t.offices[1].membership.view))
    assert t.offices[0].agreement.called_back()
    with pytest.raises(Regrouped):
        t.offices[0].agreement.reform()


def test_member_that_starts_a_new_group_with_an_older_view_is_not_counted_as_remaining(team):
    t = team(4, continues=True, quorum=2)
    t.form(0, 1, 2, 3)
    zero, before = t.offices[0], t.offices[0].membership.view[1]
    with zero._changed:
        zero.membership.view[1] += 1001
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in (0, 2, 3)))
    assert reforms(t, 0, 2, 3) == [False] * 3
    t.network.gone.update((1, 2, 3))
    with zero._changed:
        zero.membership.view[3] += 1
        older = (zero.membership.view[0], before + 1, *zero.membership.view[2:])
        zero._take(2, *t.ready(2, older))
        assert not zero.agreement.called_back()  # p2 will learn the newer view and repeat its ready
        assert zero.agreement._reformed_now() is None
        zero._take(2, *t.ready(2, older, averaging=1))
        assert zero.agreement._reformed_now() is False


def test_member_that_restarts_at_once_is_a_newcomer(team):
    t = team(2, continues=True, quorum=1)
    t.form(0, 1)
    t.open(1)
    t.forming(1)
    until(t.offices[0].agreement.regrouped)
    assert t.offices[0].agreement.reform() is False
    assert t.offices[0].agreement.formed.members == (0,)
    assert t.offices[0].agreement.newcomers()
    t.forming(0)
    assert len(set(t.done(0, 1))) == 1
    assert t.results[0].members == (0, 1)


def test_group_reforms_when_only_some_know_that_a_lost_peer_is_back(team):
    """p2 agrees with the first ready of p0; p0 learns that p1 is back before p2 does."""
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    before = t.offices[0].membership.view[1]
    t.network.lost = lambda sender, receiver, message: (
        (sender, receiver) == (2, 0) or (receiver == 2 and message.view and message.view[1] > before + 1)
    )
    with t.offices[0]._changed:
        t.offices[0].membership.view[1] += 1
    t.begin(0, t.offices[0].agreement.reform)
    until(lambda: t.offices[0].membership.view[1] > before + 1)
    until(t.offices[2].agreement.regrouped)
    assert t.offices[2].agreement.reform() is False
    assert t.offices[2].membership.view[1] == before + 1
    t.network.lost = lambda *_: False
    assert t.done(0) == [False]
    assert t.offices[0].agreement.formed == t.offices[2].agreement.formed
    assert t.offices[0].agreement.formed.members == (0, 2)
    until(lambda: t.offices[2].membership.view == t.offices[0].membership.view)
    assert not t.offices[0].agreement.regrouped()
    assert not t.offices[2].agreement.regrouped()
    assert t.offices[2].agreement.newcomers()


def test_group_reforms_when_a_lost_peer_is_back_before_the_agreement(team):
    """p0 declares p1 gone and waits for p2, which does not know it yet; p1 comes back meanwhile."""
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    t.network.halted.add(2)
    with t.offices[0]._changed:
        t.offices[0].membership.view[1] += 1
    t.begin(0, t.offices[0].agreement.reform)
    until(t.offices[1].agreement.regrouped)  # it has learned that it was declared gone
    t.network.halted.discard(2)
    until(t.offices[2].agreement.regrouped)
    with pytest.raises(Regrouped):
        t.offices[1].agreement.reform()
    t.forming(1)
    assert t.offices[2].agreement.reform() is False
    assert t.done(0) == [False]
    assert t.offices[0].agreement.formed == t.offices[2].agreement.formed
    assert t.offices[0].agreement.formed.members == (0, 2)
    assert t.offices[0].agreement.newcomers()
    t.forming(0, 2)
    assert len(set(t.done(0, 1, 2))) == 1
