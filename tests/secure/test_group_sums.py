"""Secure sums of groups: one exact sum for each group, drop-outs, and what members refuse."""

import numpy as np
import pytest
import torch

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from fedbilevel.errors import PolicyError, QuorumError, WireError
from fedbilevel.secure import streams
from support.secure import Group, altered, plain_sum


class Grouped(Group):
    """A group of members with one partition for all calls."""

    def __init__(self, folder, num, quorum, size, **given):
        super().__init__(folder, num, quorum, **given)
        self.groups = {name: place * (num // size) // num for place, name in enumerate(self.names)}

    def opened(self, rows, drops=()):
        """One call up to the survivors."""
        sizes = {name: row.numel() for name, row in next(iter(rows.values())).items()}
        call = self.tally.call(self.nonce(), sizes, self.groups)
        for name in self.names:
            if name not in drops:
                self.tally.take_rows(name, *self.members[name].mask(call, rows[name], self.groups))
        return call

    def finished(self, late=()):
        listed = self.tally.survivors()
        for name in listed["survivors"]:
            self.tally.take_confirmation(name, self.members[name].confirm(listed))
        opening = self.tally.opening()
        for name in listed["survivors"]:
            if name not in late:
                self.tally.take_unmask(name, self.members[name].unmask(opening))
        return self.tally.total()


def check(group, found, rows, names):
    survivors, sums = found
    assert survivors == sorted(names)
    for place, number in enumerate(sorted({group.groups[name] for name in names})):
        expected = plain_sum(rows, [name for name in survivors if group.groups[name] == number])
        assert all(torch.equal(sums[key][place], expected[key]) for key in expected)


@pytest.mark.parametrize(("num", "size"), [(9, 3), (14, 4), (40, 3)])
def test_each_group_has_its_exact_sum(tmp_path, num, size):
    """Also above 30 members, where the graph of shares is sparse and that of masks is not."""
    group = Grouped(tmp_path, num, 2 * num // 3, size, slots=2)
    group.agree()
    for seed in range(2):
        rows = group.rows(20, seed)
        group.opened(rows)
        check(group, group.finished(), rows, group.names)


@pytest.mark.parametrize("num", [16, 48])
def test_drops_before_and_after_the_rows(tmp_path, num):
    """Groups of four: one drop leaves three members, two drops leave a group out."""
    group = Grouped(tmp_path, num, num // 2 + 1, 4)
    group.agree()
    rows = group.rows(20)
    lost = [group.names[0], group.names[4], group.names[5]]
    group.opened(rows, lost)
    there = [name for name in group.names if name not in lost and group.groups[name] != 1]
    check(group, group.finished(late=[group.names[1]]), rows, there)
    group.opened(rows)  # all of them are back, with keys of another slot
    check(group, group.finished(), rows, group.names)


def test_the_row_of_a_group_that_is_left_out_keeps_its_own_mask(tmp_path):
    """All that the server learns of two members of a small group: their pairwise masks, not their own."""
    group = Grouped(tmp_path, 12, 7, 3)
    group.agree()
    rows = group.rows(20)
    call = group.opened(rows, [group.names[0]])
    sum_of_group = group.tally._call._sums[0]["y"].numpy().copy()
    survivors, _ = group.finished()
    assert not {*group.names[:3]} & {*survivors}
    wrapped = plain_sum(rows, group.names[1:3])["y"].numpy()
    roster = group.tally._roster
    from fedbilevel.secure.masks import pair_seed
    from fedbilevel.secure.messages import read_call

    shares = [group.members[name]._epoch for name in group.names[3:]]
    assert all(not any(one._held[group.names[1]][: 32 * 1]) for one in shares)  # shares of the slot are forgotten
    words = sum_of_group.copy()
    dropped = group.members[group.names[0]]._epoch._seeds[0][1]
    for name in group.names[1:3]:
        seed = pair_seed(roster, read_call(call), streams.private_key(dropped), group.names[0], name)
        key = streams.derived(seed, "mask", *read_call(call).parts(), "y")
        streams.add_mask(words, key, 1 if group.names[0] < name else -1)
    assert not np.array_equal(words, wrapped)


def test_fewer_than_three_whole_groups_end_the_call(tmp_path):
    group = Grouped(tmp_path, 9, 5, 3)
    group.agree()
    group.opened(group.rows(20), [group.names[0]])
    with pytest.raises(QuorumError, match="2 groups have 3 members that sent rows, expected 3 groups"):
        group.tally.survivors()


def test_members_refuse_a_list_with_a_group_of_two(tmp_path):
    group = Grouped(tmp_path, 12, 7, 3)
    group.agree()
    group.opened(group.rows(20))
    listed = group.tally.survivors()
    fewer = altered(listed, survivors=group.names[1:])
    with pytest.raises(PolicyError, match="a group of the secure sum has 2 survivors, expected at least 3"):
        group.members[group.names[4]].confirm(fewer)


def test_members_with_other_groups_do_not_confirm_the_same(tmp_path):
    """A server that tells sites other groups gets no confirmation that it can use."""
    group = Grouped(tmp_path, 12, 7, 3)
    group.agree()
    rows = group.rows(20)
    call = group.tally.call(group.nonce(), {"y": 20, "u": 6}, group.groups)
    odd = {**group.groups, group.names[0]: 1, group.names[3]: 0}
    for name in group.names:
        own = odd if name == group.names[0] else group.groups
        group.tally.take_rows(name, *group.members[name].mask(call, rows[name], own))
    listed = group.tally.survivors()
    with pytest.raises(WireError, match="confirmation of site000 do not belong"):
        group.tally.take_confirmation(group.names[0], group.members[group.names[0]].confirm(listed))


def test_a_member_without_a_group_has_no_row(tmp_path):
    group = Grouped(tmp_path, 12, 7, 3)
    group.agree()
    rows = group.rows(20)
    call = group.tally.call(group.nonce(), {"y": 20, "u": 6}, {name: group.groups[name] for name in group.names[1:]})
    sent = group.members[group.names[0]].mask(call, rows[group.names[0]], group.groups)
    with pytest.raises(WireError, match="rows of site000 do not belong"):
        group.tally.take_rows(group.names[0], *sent)
