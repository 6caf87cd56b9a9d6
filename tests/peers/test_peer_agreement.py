"""Start of a group, and refusals to start."""

import time

import pytest

from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.peers.formation import Formation, mark
from fedbilevel.peers.transport import Faults
from fedbilevel.peers.wire import Version
from support.peers.offices import ALL, BEAT, TIME, about, until


@pytest.mark.parametrize("num_peers", [2, 4])
def test_all_peers_start_with_the_same_formation(team, num_peers):
    weights = [1.0 + peer for peer in range(num_peers)]
    t = team(num_peers)
    formation = t.form(*range(num_peers), **{f"p{peer}": about(weight=weight) for peer, weight in enumerate(weights)})
    assert formation == Formation(tuple(range(num_peers)), tuple(weights), 1, -1, False, formation.run)
    assert formation.run != 0
    views = {tuple(office.membership.view) for office in t.offices.values()}
    assert len(views) == 1
    assert all(office.outbox.epoch == 1 and not office.agreement.regrouped() for office in t.offices.values())


def test_new_run_waits_for_a_late_peer(team):
    t = team(3, opened=False)
    t.open(0, 1)
    t.forming(0, 1)
    until(lambda: all(t.offices[0].membership.view[:2]) and all(t.offices[1].membership.view[:2]))
    ticked = t.offices[0].membership._last_tick
    until(lambda: t.offices[0].membership._last_tick > ticked)
    assert not t.results  # two of three are a quorum, but a new run needs all
    t.open(2)
    t.forming(2)
    assert len(set(t.done(0, 1, 2))) == 1
    assert t.results[0].members == (0, 1, 2)


@pytest.mark.parametrize("seed", [1, 2])
def test_group_forms_despite_loss_doubling_and_delay(team, seed):
    t = team(3, Faults(loss=0.4, doubled=0.3, delay=0.2, seed=seed), suspect=5.0)
    formation = t.form(0, 1, 2)
    assert formation == Formation((0, 1, 2), (1.0,) * 3, 1, -1, False, formation.run)
    assert all(t.gone(by=peer) == [] for peer in range(3))


def test_group_resumes_from_the_newest_common_state(team):
    t = team(2)
    both = mark((0, 1))
    formation = t.form(0, 1, p0=about(Version(7, both), Version(6, both)), p1=about(Version(6, both), Version(5, both)))
    assert (formation.iteration, formation.changed) == (6, False)
    assert all(office.outbox.finished == 6 for office in t.offices.values())


def test_epoch_exceeds_the_highest_epoch_of_any_peer(team):
    t = team(2)
    t.offices[1].outbox.epoch = 41
    assert t.form(0, 1).epoch == 42
    t.forming(0)  # with the same peers: p0 takes a new incarnation, which p1 sees
    until(t.offices[1].agreement.regrouped)
    t.forming(1)
    one, two = t.done(0, 1)
    assert one == two
    assert one.epoch == 43


@pytest.mark.parametrize(("part", "sentence"), [
    ("plan", "has another plan: give all peers the same file."),
    ("roster", "has another roster: give all peers the same file."),
    ("start", "has another version of fedbilevel, data of another form, or another start of x and y: compare them."),
])  # fmt: skip
def test_peer_with_another_plan_roster_or_start_is_refused(team, part, sentence):
    t = team(2)
    t.forming(0, 1, p1=about(**{part: b"x" * 16}))
    first, second = t.done(0, 1)
    assert isinstance(first, PlanError)
    assert isinstance(second, PlanError)
    assert (str(first), str(second)) == (f"p1 {sentence}", f"p0 {sentence}")


def test_restarted_peer_with_the_right_plan_is_accepted(team):
    """While p0 is busy, p1 comes with another plan, ends, and restarts with the right plan."""
    t = team(2, opened=False)
    t.open(0, 1)
    t.forming(1, p1=about(plan=b"x" * 16))
    until(lambda: 1 in t.offices[0].agreement._readies)
    t.offices[1].leave(finished=False)
    until(lambda: not t.offices[0].membership.alive(1))
    t.open(1)
    until(lambda: t.offices[0].membership.alive(1))
    t.form(0, 1)


def test_newcomer_with_another_plan_does_not_end_a_started_run(team):
    t = team(3)
    t.form(0, 1, 2)
    t.offices[2].leave(finished=False)
    until(lambda: t.offices[0].agreement.regrouped() and t.offices[1].agreement.regrouped())
    t.open(2)
    stored = {f"p{peer}": about(Version(1, ALL), Version(0, ALL)) for peer in range(2)}
    t.begin(2, lambda: leaving(t.offices[2], about(plan=b"x" * 16)))
    until(lambda: t.offices[0].membership.alive(2) and 2 in t.offices[0].agreement._readies)
    t.forming(0, 1, **stored)
    one, two, refused = t.done(0, 1, 2)
    assert str(refused).endswith("has another plan: give all peers the same file.")
    assert one == two
    assert one.members == (0, 1)


def leaving(office, introduction):
    """Leave after an error, like `opened`."""
    try:
        return office.form(introduction, deadline=TIME)
    except PlanError:
        office.leave(finished=False)
        raise


def test_started_peers_with_different_plans_raise_after_the_deadline(team):
    t = team(2, quorum=1)
    t.form(0, 1)
    with t.offices[0]._changed:
        t.offices[0].membership.renew(t.offices[0].outbox.incarnation)
    until(t.offices[1].agreement.regrouped)
    t.forming(0, 1, deadline=0.6, p1=about(plan=b"x" * 16))
    errors = t.done(0, 1)
    assert [type(error) for error in errors] == [PlanError, PlanError]


def test_missing_peer_of_a_new_run_is_named(team):
    t = team(3, opened=False)
    t.open(0, 1)
    t.forming(0, 1, deadline=0.5)
    for error in t.done(0, 1):
        assert isinstance(error, QuorumError)
        assert (
            str(error)
            == "2 peers are present after 0.5 s, all 3 are needed; missing: p2: start them, then restart this peer."
        )


def test_resumed_run_starts_without_a_missing_peer(team):
    t = team(3, opened=False)
    t.open(0, 1)
    stored = {f"p{peer}": about(Version(4, ALL), Version(3, ALL)) for peer in range(2)}
    formation = t.form(0, 1, deadline=0.4, **stored)
    assert formation.members == (0, 1)
    assert (formation.iteration, formation.changed) == (4, True)  # three peers produced it


def test_resumed_run_below_the_quorum_raises(team):
    t = team(3, opened=False)
    t.open(0)
    t.forming(0, deadline=0.3, p0=about(Version(4, ALL)))
    [error] = t.done(0)
    assert (
        str(error)
        == "1 peer is present after 0.3 s, 2 of 3 are needed; missing: p1, p2: start them, then restart this peer."
    )


def test_two_started_peers_do_not_repeat_ready_forever(team):
    t = team(3)
    t.form(0, 1, 2)
    until(lambda: t.same_views() and len(t.offices[0].agreement._readies) == 2)
    begun = time.monotonic()
    t.offices[0].transport.send(1, *t.offices[0].agreement._sent_ready[1])  # as if it had missed p1's ready
    until(lambda: time.monotonic() - begun > 6 * BEAT)
    before, begun = t.network.sent["ready"], time.monotonic()
    ticked = t.offices[2]._last_beat
    until(lambda: t.offices[2]._last_beat > ticked + 0.3)
    spent = time.monotonic() - begun
    assert t.network.sent["ready"] - before <= 2 * (spent / BEAT + 1)  # at most one each way per beat
    assert t.network.sent.total() < 3000


def test_forming_group_does_not_wait_for_a_finished_peer(team):
    """p0 has lost p2 and forms a new group; p1 has finished, says bye and never says ready."""
    t = team(3, quorum=2)
    t.form(0, 1, 2)
    t.offices[2].leave(finished=False)
    until(t.offices[0].agreement.regrouped)
    t.forming(0, deadline=0.5, p0=about(Version(4, ALL), Version(3, ALL)))
    until(lambda: t.offices[0].agreement._about is not None)
    t.offices[1].leave(finished=True)
    [error] = t.done(0)
    assert isinstance(error, QuorumError)
    assert "missing: p1, p2" in str(error)


def test_only_the_majority_of_a_split_network_continues(team):
    t = team(3, quorum=2)
    t.form(0, 1, 2)
    t.network.cut = {(0, 2), (1, 2), (2, 0), (2, 1)}
    until(lambda: all(office.agreement.regrouped() for office in t.offices.values()))
    stored = {f"p{peer}": about(Version(2, ALL), Version(1, ALL)) for peer in range(3)}
    t.forming(0, 1, 2, deadline=0.7, **stored)
    one, two, alone = t.done(0, 1, 2)
    assert one == two
    assert one.members == (0, 1)
    assert isinstance(alone, QuorumError)
    assert (
        str(alone)
        == "1 peer is present after 0.7 s, 2 of 3 are needed; missing: p0, p1: start them, then restart this peer."
    )


def test_peer_that_is_never_ready_raises_after_two_deadlines(team):
    t = team(2)
    until(lambda: t.offices[0].membership.alive(1))
    t.forming(0, deadline=0.4)
    [error] = t.done(0)
    assert isinstance(error, QuorumError)
    assert (
        str(error)
        == "p1 sends beats but was not ready within 0.8 s: read its log, and check that all peers reach each other."
    )
