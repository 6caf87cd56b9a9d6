"""Who is there, who is gone, and when a group begins: offices of several peers over a network in memory."""

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from fedbilevel.engines.engine import Regrouped
from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.peers import exchange as exchange_module
from fedbilevel.peers import transport as transport_module
from fedbilevel.peers.exchange import AveragingStatus
from fedbilevel.peers.formation import Formation, agreed, mark
from fedbilevel.peers.office import Office
from fedbilevel.peers.transport import Faults, MemoryNetwork
from fedbilevel.peers.wire import SKETCH, Introduction, PeerMessage, Version, pack, unpack

SUSPECT, BEAT, TIME = 0.6, 0.05, 8.0


def until(condition, seconds=TIME, what="what was waited for"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.01)


def about(*versions, weight=1.0, **parts):
    """An introduction of one with these stored states, or with none."""
    newest, before, *_ = (*versions, Version(), Version())
    return replace(Introduction(weight, b"p" * 16, b"r" * 16, b"s" * 16, 0, 0, (newest, before)), **parts)


class Post(MemoryNetwork):
    """With links that can be cut, messages that can be kept back, and a count of what was sent."""

    def __init__(self, num_peers, faults=None):
        super().__init__(num_peers, faults)
        self.cut = set()  # of sender and receiver
        self.lost = lambda sender, receiver, message: False
        self.sent = Counter()

    def post(self, sender, receiver, head, body, delays):
        message = unpack(head, body, num_peers=self.num_peers)
        self.sent[message.kind] += 1
        if (sender, receiver) not in self.cut and not self.lost(sender, receiver, message):
            super().post(sender, receiver, head, body, delays)


class Team:
    """Offices of peers, and threads for what waits. `lines` by peer: what it said."""

    def __init__(self, num_peers, faults=None, *, quorum=None, **options):
        self.names = [f"p{peer}" for peer in range(num_peers)]
        self.network, self.lines = Post(num_peers, faults), {peer: [] for peer in range(num_peers)}
        self.options = {
            "quorum": num_peers // 2 + 1 if quorum is None else quorum,
            "suspect": SUSPECT,
            "beat": BEAT,
            **options,
        }
        self.offices, self.results, self.threads = {}, {}, []

    def open(self, *peers, **options):
        for peer in peers:
            self.offices[peer] = Office(
                self.network.transport(peer),
                peer,
                self.names,
                "run",
                say=self.lines[peer].append,
                **{**self.options, **options},
            )
            self.offices[peer].open()

    def begin(self, peer, work):
        """In a thread of its own; what it gives or raises will be in `results`."""

        def keep():
            try:
                self.results[peer] = work()
            except (PlanError, QuorumError, Regrouped) as error:
                self.results[peer] = error

        self.results.pop(peer, None)
        thread = threading.Thread(target=keep, daemon=True)
        self.threads.append(thread)
        thread.start()

    def forming(self, *peers, deadline=TIME, **introductions):
        for peer in peers:
            mine = introductions.get(f"p{peer}", about())
            self.begin(peer, lambda peer=peer, mine=mine: self.offices[peer].form(mine, deadline=deadline))

    def done(self, *peers):
        until(
            lambda: all(peer in self.results for peer in peers),
            what=f"the end of {peers}: {self.results} {self.lines}; the last",
        )
        return [self.results[peer] for peer in peers]

    def form(self, *peers, **options):
        """All begin, and with the same."""
        self.forming(*peers, **options)
        formations = self.done(*peers)
        assert all(isinstance(one, Formation) for one in formations), formations
        assert len(set(formations)) == 1, formations
        return formations[0]

    def gone(self, by):
        return sorted({line.split()[0] for line in self.lines[by] if " is gone" in line})


@pytest.fixture
def team(monkeypatch):
    """Makes teams all of whose threads end with the test."""
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


# ---- from where to go on ---------------------------------------------------------------------------------------------------


def test_a_mark_is_of_the_members_and_their_order():
    marks = [mark(members) for members in ((0,), (1,), (0, 1), (1, 0), (0, 1, 2), ())]
    assert len(set(marks)) == len(marks)
    assert mark([0, 1, 2]) == mark((0, 1, 2))
    assert all(0 <= one < 2**64 for one in marks)
    assert all(marks)  # 0 stands for none


ALL, TWO = mark((0, 1, 2)), mark((0, 1))


@pytest.mark.parametrize(("versions", "expected"), [
    ([(), (), ()], (-1, False)),  # a new run
    ([((7, ALL), (6, ALL))] * 3, (7, False)),
    ([((7, ALL), (6, ALL)), ((6, ALL), (5, ALL)), ((7, ALL), (6, ALL))], (6, False)),  # one had not stored the last
    ([((7, ALL), (6, ALL)), ((3, ALL), (2, ALL)), ((7, ALL), (6, ALL))], (7, True)),  # one was not there at the end
    ([((7, ALL), (6, ALL)), (), ((7, ALL), (6, ALL))], (7, True)),  # one has nothing
    ([((7, TWO), (6, ALL)), ((7, TWO), (6, ALL)), ((7, ALL), (6, ALL))], (7, True)),  # the same iteration, made by others
    ([((7, TWO), (6, ALL)), ((7, TWO), (6, ALL)), ((6, ALL), (5, ALL))], (6, False)),  # all have what all made
    ([((7, TWO), (6, TWO)), ((7, TWO), (6, TWO)), ((6, ALL), (5, ALL))], (6, True)),
    ([((7, TWO), (6, TWO)), ((7, TWO), (6, TWO)), ((2, ALL), (1, ALL))], (7, True)),  # two went on without one
    ([((0, ALL),), ((0, ALL),), ()], (-1, False)),  # one was lost before it stored anything
    ([((1, ALL), (0, ALL)), ((0, ALL),), ((1, ALL), (0, ALL))], (0, False)),
    ([((6, ALL),), ((6, ALL),), ((5, ALL), (4, ALL))], (6, True)),  # two have gone back to 6 just now and cannot go back again
    ([((6, TWO), (3, ALL)), ((6, TWO), (5, TWO)), ((5, ALL), (4, ALL))], (6, True)),  # one has come just now
])  # fmt: skip
def test_from_where_to_go_on(versions, expected):
    introductions = {peer: about(*(Version(*one) for one in stored)) for peer, stored in enumerate(versions)}
    assert agreed(introductions) == expected
    backwards = dict(reversed(introductions.items()))
    assert agreed(backwards) == expected


def test_whoever_goes_back_has_what_it_goes_back_to():
    """Over all ways in which three peers can hold states up to 4: nobody is asked for a state between the ones that it has."""
    stored = [(newest, before) for newest in range(-1, 5) for before in range(-1, max(newest, 0))]
    for one in stored:
        for two in stored:
            for three in stored:
                held = [one, two, three]
                iteration, _ = agreed(
                    {
                        peer: about(Version(newest, ALL), Version(before, ALL))
                        for peer, (newest, before) in enumerate(held)
                    }
                )
                most = max(newest for newest, _ in held)
                assert most - 1 <= iteration <= most
                assert all(newest <= iteration or before == iteration for newest, before in held), (held, iteration)


# ---- beginning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_peers", [2, 4])
def test_all_begin_with_the_same(team, num_peers):
    weights = [1.0 + peer for peer in range(num_peers)]
    t = team(num_peers)
    formation = t.form(*range(num_peers), **{f"p{peer}": about(weight=weight) for peer, weight in enumerate(weights)})
    assert formation == Formation(tuple(range(num_peers)), tuple(weights), 1, -1, False, formation.run)
    assert formation.run != 0
    views = {tuple(office.membership.view) for office in t.offices.values()}
    assert len(views) == 1
    assert all(office.outbox.epoch == 1 and not office.agreement.regrouped() for office in t.offices.values())


def test_one_that_comes_late_is_waited_for(team):
    t = team(3, opened=False)
    t.open(0, 1)
    t.forming(0, 1)
    until(lambda: all(t.offices[0].membership.view[:2]) and all(t.offices[1].membership.view[:2]))
    ticked = t.offices[0].membership._last_tick
    until(lambda: t.offices[0].membership._last_tick > ticked)
    assert not t.results  # two of three are a quorum, and a new run needs all
    t.open(2)
    t.forming(2)
    assert len(set(t.done(0, 1, 2))) == 1
    assert t.results[0].members == (0, 1, 2)


@pytest.mark.parametrize("seed", [1, 2])
def test_loss_doubling_and_delay_do_not_prevent_it(team, seed):
    t = team(3, Faults(loss=0.4, doubled=0.3, delay=0.2, seed=seed), suspect=5.0)
    formation = t.form(0, 1, 2)
    assert formation == Formation((0, 1, 2), (1.0,) * 3, 1, -1, False, formation.run)
    assert all(t.gone(by=peer) == [] for peer in range(3))


def test_a_group_goes_on_from_what_all_have(team):
    t = team(2)
    both = mark((0, 1))
    formation = t.form(0, 1, p0=about(Version(7, both), Version(6, both)), p1=about(Version(6, both), Version(5, both)))
    assert (formation.iteration, formation.changed) == (6, False)
    assert all(office.outbox.finished == 6 for office in t.offices.values())


def test_epochs_grow_and_the_highest_counts(team):
    t = team(2)
    t.offices[1].outbox.epoch = 41
    assert t.form(0, 1).epoch == 42
    t.forming(0)  # the same peers once more: it takes another incarnation, which the other sees
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
def test_what_differs_is_refused(team, part, sentence):
    t = team(2)
    t.forming(0, 1, p1=about(**{part: b"x" * 16}))
    first, second = t.done(0, 1)
    assert isinstance(first, PlanError)
    assert isinstance(second, PlanError)
    assert (str(first), str(second)) == (f"p1 {sentence}", f"p0 {sentence}")


def test_what_an_earlier_process_said_is_not_held_against_a_later_one(team):
    """p1 came with another plan while p0 was busy, ended, and was started again with the right one."""
    t = team(2, opened=False)
    t.open(0, 1)
    t.forming(1, p1=about(plan=b"x" * 16))
    until(lambda: 1 in t.offices[0].agreement._readies)
    t.offices[1].leave(finished=False)
    until(lambda: not t.offices[0].membership.alive(1))
    t.open(1)
    until(lambda: t.offices[0].membership.alive(1))
    t.form(0, 1)


def test_one_that_comes_with_another_plan_does_not_end_the_run_of_the_others(team):
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
    """As `opened` does."""
    try:
        return office.form(introduction, deadline=TIME)
    except PlanError:
        office.leave(finished=False)
        raise


def test_two_groups_of_different_plans_say_so_after_the_deadline(team):
    t = team(2, quorum=1)
    t.form(0, 1)
    with t.offices[0]._changed:
        t.offices[0].membership.renew(t.offices[0].outbox.incarnation)
    until(t.offices[1].agreement.regrouped)
    t.forming(0, 1, deadline=0.6, p1=about(plan=b"x" * 16))
    errors = t.done(0, 1)
    assert [type(error) for error in errors] == [PlanError, PlanError]


def test_a_missing_peer_at_a_new_run_is_named(team):
    t = team(3, opened=False)
    t.open(0, 1)
    t.forming(0, 1, deadline=0.5)
    for error in t.done(0, 1):
        assert isinstance(error, QuorumError)
        assert (
            str(error)
            == "2 peers are present after 0.5 s, all 3 are needed; missing: p2: start them, then restart this peer."
        )


def test_a_run_that_goes_on_does_without(team):
    t = team(3, opened=False)
    t.open(0, 1)
    stored = {f"p{peer}": about(Version(4, ALL), Version(3, ALL)) for peer in range(2)}
    formation = t.form(0, 1, deadline=0.4, **stored)
    assert formation.members == (0, 1)
    assert (formation.iteration, formation.changed) == (4, True)  # it was three who made it


def test_too_few_to_go_on(team):
    t = team(3, opened=False)
    t.open(0)
    t.forming(0, deadline=0.3, p0=about(Version(4, ALL)))
    [error] = t.done(0)
    assert (
        str(error)
        == "1 peer is present after 0.3 s, 2 of 3 are needed; missing: p1, p2: start them, then restart this peer."
    )


def test_readies_are_not_answered_without_end(team):
    t = team(3)
    t.form(0, 1, 2)
    settled = lambda: (
        len({tuple(office.membership.view) for office in t.offices.values()}) == 1
        and len(t.offices[0].agreement._readies) == 2
    )
    until(settled)
    begun = time.monotonic()
    t.offices[0].transport.send(
        1, *t.offices[0].agreement._sent_ready[1]
    )  # as one that has not heard that p1 was ready
    until(lambda: time.monotonic() - begun > 6 * BEAT)
    before, begun = t.network.sent["ready"], time.monotonic()
    ticked = t.offices[2]._last_beat
    until(lambda: t.offices[2]._last_beat > ticked + 0.3)
    spent = time.monotonic() - begun
    assert t.network.sent["ready"] - before <= 2 * (spent / BEAT + 1)  # one each way and beat between the two at most
    assert t.network.sent.total() < 3000


# ---- who is gone -----------------------------------------------------------------------------------------------------------


def test_only_the_one_that_is_gone_is_named(team):
    """p0 waits for a row of p1, which waits for one of p2, which is gone: p1 is silent about rows, and alive."""
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


def test_one_that_halts_for_a_moment_is_not_gone(team):
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
def test_one_that_halts_for_long_joins_anew(team, continues):
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
    assert t.gone(by=2) == []  # what waited for it was read before it suspected anybody
    assert t.offices[2].agreement.regrouped()  # it knows that the others may have gone on without it
    formation = t.form(0, 1, 2)
    assert (formation.members, formation.epoch) == ((0, 1, 2), 2)


def test_one_that_leaves_as_gone_is_noticed_at_once(team):
    t = team(2, suspect=60.0)
    t.form(0, 1)
    t.offices[1].leave(finished=False)
    until(lambda: not t.offices[0].membership.alive(1))
    assert t.offices[0].agreement.regrouped()
    assert t.offices[0].membership.left == set()


def test_one_that_has_finished_is_not_gone(team):
    t = team(2, suspect=0.3)
    t.form(0, 1)
    t.offices[1].leave(finished=True)
    until(lambda: 1 in t.offices[0].membership.left)
    until(lambda: t.offices[0].transport.quiet(1) > 0.3 + 0.2)
    assert t.gone(by=0) == []
    assert not t.offices[0].agreement.regrouped()


def test_a_lost_goodbye_is_said_again(team):
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


def test_who_is_alone_goes_at_once(team):
    t = team(2, beat=2.0)
    t.form(0, 1)
    begun = time.monotonic()
    for peer in (1, 0):
        t.begin(peer, lambda peer=peer: t.offices[peer].leave(finished=True))
    t.done(0, 1)
    assert time.monotonic() - begun < 2.0  # both have heard each other: neither waits for a beat


def test_one_that_finishes_while_others_form_is_not_waited_for(team):
    """p0 lost p2 and forms again; p1 has seen that all were through, says goodbye and never says ready."""
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


def test_the_opened_block_says_how_it_ended(team):
    t = team(3, opened=False)
    t.open(0)
    for peer, how in ((1, None), (2, ValueError)):
        office = Office(t.network.transport(peer), peer, t.names, "run", quorum=2, suspect=60.0, beat=BEAT)
        with pytest.raises(ValueError, match="stop") if how else nothing(), office.opened():
            until(lambda peer=peer: t.offices[0].membership.alive(peer))
            if how:
                raise how("stop")
    until(lambda: t.offices[0].membership.left == {1} and not t.offices[0].membership.alive(2))
    assert t.offices[0].membership.alive(1)


@contextmanager
def nothing():
    yield


def test_the_smaller_part_of_a_broken_network_ends_and_the_larger_goes_on(team):
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


def test_one_that_lives_but_is_never_ready_is_not_waited_for_longer_than_twice(team):
    t = team(2)
    until(lambda: t.offices[0].membership.alive(1))
    t.forming(0, deadline=0.4)
    [error] = t.done(0)
    assert isinstance(error, QuorumError)
    assert (
        str(error)
        == "p1 sends beats but was not ready within 0.8 s: read its log, and check that all peers reach each other."
    )


def test_one_known_by_hearsay_is_given_time(team):
    """p1 hears of p2 from p0 long after it began to listen, and p2's own messages come later still."""
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


def test_a_process_started_again_with_an_earlier_clock_is_there_again(team):
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


# ---- rows ------------------------------------------------------------------------------------------------------------------


def test_rows_are_told_apart_by_step_and_lost_ones_are_asked_for_again(team):
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


def test_a_row_that_was_not_sent_yet_is_not_asked_for(team):
    t = team(2)
    t.form(0, 1)
    t.begin(1, lambda: t.offices[1].exchange.rows(0, [0], np.zeros(2)))
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > 0.7)
    assert t.network.sent["want"] == 0
    t.offices[0].exchange.send_row(0, np.ones(2), 1.0, [1])
    [rows] = t.done(1)
    assert rows[0][0].tolist() == [1, 1]


def test_rows_of_a_fast_peer_wait_for_the_epoch(team):
    """p0 begins and sends before p1 has heard that p0 is ready."""
    t = team(2)
    until(
        lambda: (
            all(office.membership.view == t.offices[0].membership.view for office in t.offices.values())
            and all(t.offices[0].membership.view)
        )
    )
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


def test_a_row_too_old_to_be_sent_again_leads_to_a_new_group(team, monkeypatch):
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
    t.offices[0]._take(
        1, *pack(PeerMessage("want", t.offices[0].outbox.run, t.offices[0].membership.view[1], epoch=1, step=0))
    )  # asked twice, it begins anew once
    assert t.offices[0].outbox.incarnation == renewed
    t.network.lost = lambda sender, receiver, message: False
    assert t.form(0, 1).epoch == 2
    t.offices[0].exchange.send_row(0, np.ones(2), 1.0, [1])
    assert t.offices[1].exchange.rows(0, [0], np.zeros(2))[0][0].tolist() == [1, 1]


def test_what_is_kept_to_be_sent_again_is_bounded(team, monkeypatch):
    t = team(2)
    t.form(0, 1)
    monkeypatch.setattr(exchange_module, "_HISTORY_BYTES", 1000)
    for step in range(20):
        t.offices[0].exchange.send_row(step, np.ones(25), 1.0, [])
    assert list(t.offices[0].exchange._history) == [(1, step) for step in range(15, 20)]
    assert t.offices[0].exchange._history_bytes == 5 * 200


@pytest.mark.parametrize("row", [np.ones(4, np.float32), np.ones(3)])
def test_a_row_that_does_not_fit_bans_its_sender_and_nobody_else(team, row):
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
    one, turned_away, two = t.done(0, 1, 2)
    assert one == two
    assert one.members == (0, 2)
    assert str(turned_away).startswith(
        "another peer has banned this peer because its data do not fit: compare versions and data"
    )
    t.open(1)  # nor a later process of it
    t.forming(1)
    assert isinstance(t.done(1)[0], PlanError)
    assert not t.offices[0].agreement.regrouped()


def test_rows_of_an_earlier_process_do_not_count(team):
    """p0 begins alone, as p1 has not heard all, sends a row of epoch 1, dies and comes back: epoch 1 then begins again."""
    t = team(2, quorum=1)
    until(
        lambda: (
            all(office.membership.view == t.offices[0].membership.view for office in t.offices.values())
            and all(t.offices[0].membership.view)
        )
    )
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


# ---- outer iterations ------------------------------------------------------------------------------------------------------


def test_nobody_goes_on_before_all_have_stored(team):
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


def test_waiting_for_all_can_be_stopped(team):
    t = team(2)
    t.form(0, 1)
    t.begin(0, lambda: t.offices[0].exchange.wait_until_finished(1, lambda: bool(t.offices[0].membership.left)))
    t.offices[1].leave(finished=True)
    t.done(0)


# ---- robust averages -------------------------------------------------------------------------------------------------------


def test_the_newest_sums_are_handed_out_once(team):
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


def test_statuses_are_of_this_averaging(team):
    t = team(2)
    t.form(0, 1)
    status = AveragingStatus(np.array([1, 2]), np.array([3, 4]), np.arange(SKETCH) / 3)
    t.offices[0].exchange.send_status(1, status)
    until(t.offices[1].exchange.statuses)
    got = t.offices[1].exchange.statuses()[0]
    assert [one.tolist() for one in got] == [one.tolist() for one in status]
    t.offices[1].exchange.next_averaging()
    assert t.offices[1].exchange.statuses() == {}


def test_sums_that_do_not_fit_ban_their_sender(team):
    t = team(3)
    t.form(0, 1, 2)
    t.offices[0].exchange.send_sums(1, 1, np.ones(3))
    t.offices[2].exchange.send_sums(1, 1, np.ones(2))
    until(lambda: len(t.offices[1].exchange._sums) == 2)
    assert [sums.sender for sums in t.offices[1].exchange.new_sums(2)] == [2]
    assert t.offices[1].membership.banned == {0}


def reforms(t, *peers):
    for peer in peers:
        t.begin(peer, t.offices[peer].agreement.reform)
    return t.done(*peers)


def test_an_averaging_survives_a_loss(team):
    t = team(4, continues=True, quorum=2)
    t.form(0, 1, 2, 3, **{f"p{peer}": about(weight=1.0 + peer) for peer in range(4)})
    t.offices[1].exchange.next_averaging()
    t.network.gone.add(3)
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in range(3)))
    assert reforms(t, 0, 1, 2) == [True, False, True]  # p1 was through with the first
    formed = [t.offices[peer].agreement.formed for peer in range(3)]
    assert formed[0] == formed[1] == formed[2] == Formation((0, 1, 2), (1.0, 2.0, 3.0), 2, -1, False, formed[0].run)
    assert not any(t.offices[peer].agreement.regrouped() for peer in range(3))
    assert all(t.gone(by=peer) == ["p3"] for peer in range(3))


def test_a_lost_ready_does_not_hold_up_those_who_are_left(team):
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


def test_too_few_are_left(team):
    t = team(3, continues=True, quorum=3)
    t.form(0, 1, 2)
    t.offices[2].leave(finished=False)
    until(t.offices[0].agreement.regrouped)
    with pytest.raises(Regrouped):
        t.offices[0].agreement.reform()


def test_who_comes_waits_and_then_calls_all_back(team):
    """p2 is lost and started again: the two go on, see that it waits, and when one begins anew the other is called back."""
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


def test_one_that_begins_anew_with_the_view_of_those_who_are_left_calls_them_back(team):
    """p1 said in the middle of an averaging that it goes on, was called back, and now says ready with the same view."""
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    anew = lambda: PeerMessage(
        "ready",
        t.offices[1].outbox.run,
        t.offices[1].outbox.incarnation,
        t.offices[1].outbox.epoch,
        view=tuple(t.offices[1].membership.view),
        introduction=about(),
    )
    t.offices[0]._take(1, *pack(anew()))  # what was said for the beginning, once more
    assert not t.offices[0].agreement.called_back()
    t.network.gone.add(2)
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in range(2)))
    reforms(t, 0, 1)
    until(lambda: t.offices[0].membership.view == t.offices[1].membership.view)
    assert not t.offices[0].agreement.called_back()
    t.offices[0]._take(1, *pack(anew()))
    assert t.offices[0].agreement.called_back()
    with pytest.raises(Regrouped):
        t.offices[0].agreement.reform()


def test_one_that_begins_anew_and_has_heard_less_is_not_taken_for_one_that_is_left(team):
    t = team(4, continues=True, quorum=2)
    t.form(0, 1, 2, 3)
    [zero, two], before = (t.offices[0], t.offices[2]), t.offices[0].membership.view[1]
    with zero._changed:
        zero.membership.view[1] += 1001
    until(lambda: all(t.offices[peer].agreement.regrouped() for peer in (0, 2, 3)))
    assert reforms(t, 0, 2, 3) == [False] * 3
    t.network.gone.update((1, 2, 3))
    with zero._changed:
        zero.membership.view[3] += 1
        less = (zero.membership.view[0], before + 1, *zero.membership.view[2:])
        zero._take(
            2,
            *pack(
                PeerMessage(
                    "ready", two.outbox.run, two.outbox.incarnation, two.outbox.epoch, view=less, introduction=about()
                )
            ),
        )
        assert not zero.agreement.called_back()  # not yet: it will hear of the others, and say so again
        assert zero.agreement._reformed_now() is None
        zero._take(
            2,
            *pack(
                PeerMessage(
                    "ready",
                    two.outbox.run,
                    two.outbox.incarnation,
                    two.outbox.epoch,
                    averaging=1,
                    view=less,
                    introduction=about(),
                )
            ),
        )
        assert zero.agreement._reformed_now() is False


def test_one_of_the_group_that_is_started_again_at_once_is_a_newcomer(team):
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


def test_waiting_for_news_ends_with_news_or_in_time(team):
    t = team(2, continues=True)
    t.form(0, 1)
    begun = time.monotonic()
    t.offices[1].exchange.wait_for_news(0.1, 1)
    assert time.monotonic() - begun >= 0.1
    t.begin(1, lambda: t.offices[1].exchange.wait_for_news(60.0, 1))
    t.offices[0].exchange.send_sums(1, 1, np.ones(2))
    t.done(1)


def test_those_who_are_left_agree_though_only_some_have_heard_that_one_is_back(team):
    """2 agrees with what 0 said first; 0 has heard of the new 1 before it hears of that."""
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


def test_one_of_the_group_that_is_back_before_the_others_have_agreed_does_not_hold_them_up(team):
    """0 thinks that 1 is gone and waits for 2, which has not heard of it; 1 comes back meanwhile. None of them may wait for another for ever."""
    t = team(3, continues=True, quorum=2)
    t.form(0, 1, 2)
    t.network.halted.add(2)
    with t.offices[0]._changed:
        t.offices[0].membership.view[1] += 1
    t.begin(0, t.offices[0].agreement.reform)
    until(t.offices[1].agreement.regrouped)  # it has heard that it is thought to be gone
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
