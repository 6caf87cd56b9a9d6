"""Rows, finished outer iterations, and sums of robust averages between offices."""

import time

import numpy as np
import pytest

from fedbilevel.engines.engine import Regrouped
from fedbilevel.errors import PlanError
from fedbilevel.peers import exchange as exchange_module
from fedbilevel.peers.exchange import AveragingStatus
from fedbilevel.peers.wire import SKETCH, PeerMessage, Version, pack
from support.peers.offices import ALL, BEAT, about, until

# ---- rows ---------------------------------------------------------------------------------------


def test_lost_row_is_requested_again(team):
    t = team(2)
    t.form(0, 1)
    lost = []

    def lose(sender, receiver, message):
        first = message.kind == "data" and message.step == 1 and not lost
        lost.extend([message] * first)
        return first

    t.network.lost = lose
    one, two = t.offices[0], t.offices[1]
    for step in range(3):
        one.exchange.send_row(step, np.full(4, step, np.float32), 0.5 + step, [1])
    for step in range(3):
        [(sender, (row, weight))] = two.exchange.rows(step, [0], np.zeros(4, np.float32)).items()
        assert (sender, row.tolist(), weight) == (0, [step] * 4, 0.5 + step)
    assert len(lost) == 1
    assert t.network.sent["want"] == 1
    assert two.exchange._rows == {}


def test_row_that_was_not_sent_is_not_requested(team):
    t = team(2)
    t.form(0, 1)
    t.begin(1, lambda: t.offices[1].exchange.rows(0, [0], np.zeros(2)))
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > 0.7)
    assert t.network.sent["want"] == 0
    t.offices[0].exchange.send_row(0, np.ones(2), 1.0, [1])
    [rows] = t.done(1)
    assert rows[0][0].tolist() == [1, 1]


def test_row_of_a_later_epoch_is_kept_until_it_starts(team):
    """p0 starts and sends a row before p1 has received its ready."""
    t = team(2)
    until(t.same_views)
    held = []
    t.network.lost = lambda sender, receiver, message: (sender, message.kind) == (0, "ready") and not held
    t.forming(0, 1)
    t.done(0)
    t.offices[0].exchange.send_row(0, np.ones(2), 1.0, [1])
    until(lambda: (1, 0) in t.offices[1].exchange._rows)
    assert 1 not in t.results
    held.append(True)
    t.done(1)
    assert t.offices[1].exchange.rows(0, [0], np.zeros(2))[0][0].tolist() == [1, 1]


def test_request_for_a_dropped_row_starts_a_new_group(team, monkeypatch):
    monkeypatch.setattr(exchange_module, "_HISTORY", 2)
    t = team(2)
    t.form(0, 1)
    t.network.lost = lambda sender, receiver, message: message.kind == "data"
    for step in range(4):
        t.offices[0].exchange.send_row(step, np.ones(2), 1.0, [1])
    before = t.offices[0].outbox.incarnation
    t.begin(1, lambda: t.offices[1].exchange.rows(0, [0], np.zeros(2)))
    [raised] = t.done(1)
    assert isinstance(raised, Regrouped)
    renewed = t.offices[0].outbox.incarnation
    assert renewed > before
    want = PeerMessage("want", t.offices[0].outbox.run, t.offices[0].membership.view[1], epoch=1, step=0)
    t.offices[0]._take(1, *pack(want))  # a second request does not renew it again
    assert t.offices[0].outbox.incarnation == renewed
    t.network.lost = lambda sender, receiver, message: False
    assert t.form(0, 1).epoch == 2
    t.offices[0].exchange.send_row(0, np.ones(2), 1.0, [1])
    assert t.offices[1].exchange.rows(0, [0], np.zeros(2))[0][0].tolist() == [1, 1]


def test_history_of_sent_rows_is_bounded(team, monkeypatch):
    t = team(2)
    t.form(0, 1)
    monkeypatch.setattr(exchange_module, "_HISTORY_BYTES", 1000)
    for step in range(20):
        t.offices[0].exchange.send_row(step, np.ones(25), 1.0, [])
    assert list(t.offices[0].exchange._history) == [(1, step) for step in range(15, 20)]
    assert t.offices[0].exchange._history_bytes == 5 * 200


@pytest.mark.parametrize("row", [np.ones(4, np.float32), np.ones(3)])
def test_row_of_another_shape_bans_only_its_sender(team, row):
    t = team(3)
    t.form(0, 1, 2)
    like = np.zeros(3, np.float32)
    t.offices[2].exchange.send_row(0, like, 1.0, [0])
    until(lambda: 2 in t.offices[0].exchange._rows.get((1, 0), {}))
    t.offices[1].exchange.send_row(0, row, 1.0, [0])
    t.begin(0, lambda: t.offices[0].exchange.rows(0, [1, 2], like))
    [raised] = t.done(0)
    assert isinstance(raised, Regrouped)
    assert t.offices[0].membership.banned == {1}
    assert t.offices[0].refusals.counts["misfit"] == 1
    assert t.offices[0].membership.alive(2)
    assert any(
        f"a message of p1 was refused: it sends {row.size} entries of {row.dtype}" in line for line in t.lines[0]
    )
    refused = t.offices[0].refusals.counts["banned"]
    until(lambda: t.offices[0].refusals.counts["banned"] > refused)
    until(lambda: t.offices[1].agreement.regrouped() and t.offices[2].agreement.regrouped())
    stored = {f"p{peer}": about(Version(1, ALL), Version(0, ALL)) for peer in range(3)}
    t.forming(0, 1, 2, **stored)
    one, banned, two = t.done(0, 1, 2)
    assert one == two
    assert one.members == (0, 2)
    assert str(banned).startswith(
        "another peer has banned this peer because its data do not fit: compare versions and data"
    )
    t.open(1)  # a later process is banned too
    t.forming(1)
    assert isinstance(t.done(1)[0], PlanError)
    assert not t.offices[0].agreement.regrouped()


def test_rows_of_an_earlier_process_are_dropped(team):
    """p0 starts epoch 1 alone, sends a row, dies and restarts: then both start another epoch 1."""
    t = team(2, quorum=1)
    until(t.same_views)
    t.network.lost = lambda sender, receiver, message: (sender, message.kind) == (0, "ready")
    t.forming(0, 1)
    t.done(0)
    t.offices[0].exchange.announce(9)
    t.offices[0].exchange.send_row(0, np.zeros(2), 1.0, [1])
    until(lambda: (1, 0) in t.offices[1].exchange._rows and t.offices[1].exchange._progress[0][:2] == (1, 9))
    t.network.gone.add(0)
    t.network.lost = lambda sender, receiver, message: False
    t.open(0)
    t.forming(0)
    until(lambda: t.offices[1].agreement.formed is not None and t.offices[1].agreement.formed.members == (0, 1))
    assert t.done(0, 1)[0].epoch == 1
    assert t.offices[1].exchange._progress[0][1] < 9
    t.begin(1, lambda: t.offices[1].exchange.rows(0, [0], np.zeros(2)))
    t.offices[0].exchange.send_row(0, np.ones(2), 1.0, [1])
    [rows] = t.done(1)
    assert rows[0][0].tolist() == [1, 1]


# ---- outer iterations ---------------------------------------------------------------------------


def test_wait_ends_when_all_members_have_finished(team):
    t = team(3)
    t.form(0, 1, 2)
    for peer in (0, 1):
        t.offices[peer].exchange.announce(1)
    t.begin(0, lambda: t.offices[0].exchange.wait_until_finished(1, lambda: False))
    until(lambda: t.offices[0].exchange._progress.get(1, (0, 0))[1] == 1)
    beat = t.offices[2]._last_beat
    until(lambda: t.offices[2]._last_beat > beat + 2 * BEAT)
    assert 0 not in t.results
    t.offices[2].exchange.announce(1)
    t.done(0)


def test_wait_for_all_members_ends_when_stopped(team):
    t = team(2)
    t.form(0, 1)
    t.begin(0, lambda: t.offices[0].exchange.wait_until_finished(1, lambda: bool(t.offices[0].membership.left)))
    t.offices[1].leave(finished=True)
    t.done(0)


# ---- robust averages ----------------------------------------------------------------------------


def test_newest_sums_are_returned_once(team):
    t = team(2, continues=True)
    t.form(0, 1)
    for number in (1, 2, 3):
        t.offices[0].exchange.send_sums(1, number, np.full(2, float(number)))
    until(lambda: t.offices[1].exchange._sums and t.offices[1].exchange._sums[0].step == 3)
    [sums] = t.offices[1].exchange.new_sums(2)
    assert (sums.sender, sums.number, sums.total.tolist()) == (0, 3, [3.0, 3.0])
    assert t.offices[1].exchange.new_sums(2) == []
    t.offices[0].exchange.next_averaging()
    t.offices[0].exchange.send_sums(1, 1, np.ones(2))
    until(lambda: t.offices[1].exchange._sums)
    assert t.offices[1].exchange.overtaken()
    assert not t.offices[0].exchange.overtaken()
    assert t.offices[1].exchange.new_sums(2) == []  # not of this averaging
    t.offices[1].exchange.next_averaging()
    assert len(t.offices[1].exchange.new_sums(2)) == 1  # kept until then


def test_status_of_an_earlier_averaging_is_ignored(team):
    t = team(2)
    t.form(0, 1)
    status = AveragingStatus(np.array([1, 2]), np.array([3, 4]), np.arange(SKETCH) / 3)
    t.offices[0].exchange.send_status(1, status)
    until(t.offices[1].exchange.statuses)
    got = t.offices[1].exchange.statuses()[0]
    assert [one.tolist() for one in got] == [one.tolist() for one in status]
    t.offices[1].exchange.next_averaging()
    assert t.offices[1].exchange.statuses() == {}


def test_sums_of_another_length_ban_their_sender(team):
    t = team(3)
    t.form(0, 1, 2)
    t.offices[0].exchange.send_sums(1, 1, np.ones(3))
    t.offices[2].exchange.send_sums(1, 1, np.ones(2))
    until(lambda: len(t.offices[1].exchange._sums) == 2)
    assert [sums.sender for sums in t.offices[1].exchange.new_sums(2)] == [2]
    assert t.offices[1].membership.banned == {0}


def test_wait_for_news_ends_with_news_or_after_the_timeout(team):
    t = team(2, continues=True)
    t.form(0, 1)
    begun = time.monotonic()
    t.offices[1].exchange.wait_for_news(0.1, 1)
    assert time.monotonic() - begun >= 0.1
    t.begin(1, lambda: t.offices[1].exchange.wait_for_news(60.0, 1))
    t.offices[0].exchange.send_sums(1, 1, np.ones(2))
    t.done(1)
