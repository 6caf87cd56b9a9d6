"""Marks of groups, and the stored state from which a group resumes."""

import pytest

from fedbilevel.peers.formation import agreed, mark
from fedbilevel.peers.wire import Version
from support.peers.offices import ALL, TWO, about


def test_mark_depends_on_members_and_their_order():
    marks = [mark(members) for members in ((0,), (1,), (0, 1), (1, 0), (0, 1, 2), ())]
    assert len(set(marks)) == len(marks)
    assert mark([0, 1, 2]) == mark((0, 1, 2))
    assert all(0 <= one < 2**64 for one in marks)
    assert all(marks)  # 0 means no run


@pytest.mark.parametrize(("versions", "expected"), [
    ([(), (), ()], (-1, False)),  # a new run
    ([((7, ALL), (6, ALL))] * 3, (7, False)),
    ([((7, ALL), (6, ALL)), ((6, ALL), (5, ALL)), ((7, ALL), (6, ALL))], (6, False)),  # p1 has not stored the last one
    ([((7, ALL), (6, ALL)), ((3, ALL), (2, ALL)), ((7, ALL), (6, ALL))], (7, True)),  # p1 was absent at the end
    ([((7, ALL), (6, ALL)), (), ((7, ALL), (6, ALL))], (7, True)),  # p1 has no state
    ([((7, TWO), (6, ALL)), ((7, TWO), (6, ALL)), ((7, ALL), (6, ALL))], (7, True)),  # from another group
    ([((7, TWO), (6, ALL)), ((7, TWO), (6, ALL)), ((6, ALL), (5, ALL))], (6, False)),  # common state of all
    ([((7, TWO), (6, TWO)), ((7, TWO), (6, TWO)), ((6, ALL), (5, ALL))], (6, True)),
    ([((7, TWO), (6, TWO)), ((7, TWO), (6, TWO)), ((2, ALL), (1, ALL))], (7, True)),  # p2 was absent
    ([((0, ALL),), ((0, ALL),), ()], (-1, False)),  # p2 was lost before it stored a state
    ([((1, ALL), (0, ALL)), ((0, ALL),), ((1, ALL), (0, ALL))], (0, False)),
    ([((6, ALL),), ((6, ALL),), ((5, ALL), (4, ALL))], (6, True)),  # two cannot go back again
    ([((6, TWO), (3, ALL)), ((6, TWO), (5, TWO)), ((5, ALL), (4, ALL))], (6, True)),  # p0 has just joined
])  # fmt: skip
def test_iteration_to_resume_from(versions, expected):
    introductions = {peer: about(*(Version(*one) for one in stored)) for peer, stored in enumerate(versions)}
    assert agreed(introductions) == expected
    backwards = dict(reversed(introductions.items()))
    assert agreed(backwards) == expected


def test_peer_that_goes_back_has_the_agreed_state():
    """Enumerates all stored states of three peers up to outer iteration 4."""
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
