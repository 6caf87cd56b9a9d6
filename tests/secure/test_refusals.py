"""What a member of a secure sum refuses: swapped keys, changed shares, replays, and a server that lies."""

import base64
import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import fedbilevel.secure
from fedbilevel.errors import PolicyError, QuorumError, SettingError, WireError
from fedbilevel.secure import Member, Nonces, Tally, Terms, streams
from fedbilevel.secure.epoch import Epoch
from fedbilevel.secure.messages import text
from support.secure import Card, Group, altered, plain_sum


@pytest.fixture
def group(tmp_path):
    return Group(tmp_path, 5, 3, floor=3)


def published(group, epoch=1):
    """The roster of an epoch."""
    begin = group.tally.begin(epoch)
    for name in group.names:
        group.tally.take_keys(name, group.members[name].keys(begin))
    return group.tally.roster()


def called(group, drops=()):
    """The list of survivors of a call whose rows were sent."""
    call = group.tally.call(group.nonce(), {"y": 4})
    for name in group.names:
        if name not in drops:
            group.tally.take_rows(name, *group.members[name].mask(call, {"y": torch.arange(4)}))
    return group.tally.survivors()


# ---- a server in the middle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["sealing", "signing", "masking", "commitments"])
def test_a_swapped_key_is_refused(group, part):
    roster = published(group)
    ours = Epoch(group.terms, "site001", 1).keys.message(group.terms, group.cards["site001"])  # any other keys
    entry = altered(roster["keys"][1], **{part: ours[part]})
    with pytest.raises(WireError, match="keys of site001 are not signed by its certificate"):
        group.members["site000"].share({**roster, "keys": [roster["keys"][0], entry, *roster["keys"][2:]]})
    group.tally.begin(1)
    with pytest.raises(WireError, match="not signed"):
        group.tally.take_keys("site001", entry)


@pytest.mark.parametrize("signer", ["another authority", "another site"])
def test_keys_that_somebody_else_signed_are_refused(group, signer):
    roster = published(group)
    card = Card("site001", Ed25519PrivateKey.generate()) if signer == "another authority" else group.cards["site002"]
    entry = Epoch(group.terms, "site001", 1).keys.message(group.terms, card)
    with pytest.raises((PolicyError, WireError), match="another authority" if "auth" in signer else "not signed"):
        group.members["site000"].share({**roster, "keys": [roster["keys"][0], entry, *roster["keys"][2:]]})


def test_the_keys_of_another_epoch_or_of_other_terms_are_refused(group):
    old, roster = published(group, 1), published(group, 2)
    with pytest.raises(WireError, match="keys of site001 are of epoch 1, expected epoch 2"):
        group.members["site000"].share({**roster, "keys": [roster["keys"][0], old["keys"][1], *roster["keys"][2:]]})
    for other in (Terms("run", 4, None, 3), Terms("other", 3, None, 3), Terms("run", 3, 4, 3)):
        entry = Epoch(other, "site001", 2).keys.message(other, group.cards["site001"])
        with pytest.raises(WireError, match="not signed by its certificate for these terms"):
            group.members["site000"].share({**roster, "keys": [roster["keys"][0], entry, *roster["keys"][2:]]})


def test_a_roster_without_the_member_or_with_a_member_twice_is_refused(group):
    roster = published(group)
    with pytest.raises(WireError, match="does not hold the keys of site000"):
        group.members["site000"].share({**roster, "keys": roster["keys"][1:]})
    with pytest.raises(WireError, match="appears twice"):
        group.members["site000"].share({**roster, "keys": [*roster["keys"], roster["keys"][0]]})


def test_members_with_different_rosters_do_not_read_each_others_shares(group):
    roster = published(group)
    less = {**roster, "keys": roster["keys"][:4]}
    sealed = group.members["site001"].share(less)["sealed"]["site000"]
    group.members["site000"].share(roster)
    shares = {
        name: group.members[name].share(roster)["sealed"]["site000"] for name in ("site002", "site003", "site004")
    }
    members = {"epoch": 1, "members": group.names, "sealed": {"site001": sealed, **shares}}
    with pytest.raises(WireError, match="shares from site001 were changed"):
        group.members["site000"].receive(members)


def test_a_key_that_gives_every_secret_the_same_value_is_refused():
    with pytest.raises(WireError, match="public key of the secure sum is not usable"):
        streams.agreed(streams.private_key(bytes(16)), bytes(32), "pair")


# ---- shares ----------------------------------------------------------------------------------------------------------


def shared(group, epoch=1):
    """The roster, and what site000 receives."""
    roster = published(group, epoch)
    for name in group.names:
        group.tally.take_shares(name, group.members[name].share(roster))
    return roster, group.tally.handout()["site000"]


def test_changed_swapped_and_replayed_shares_are_refused(group):
    _, before = shared(group)
    roster, handout = shared(group, 2)
    sealed, me = handout["sealed"], group.members["site000"]
    content = bytearray(base64.b64decode(sealed["site002"]))
    content[40] ^= 1
    wrong = {
        "changed": {**sealed, "site002": text(bytes(content))},
        "swapped": {**sealed, "site002": sealed["site003"]},
        "replayed": {**sealed, "site002": before["sealed"]["site002"]},
    }
    for kind, table in wrong.items():
        with pytest.raises(WireError, match="shares from site002 were changed on their way"):
            me.receive({**handout, "sealed": table})
        assert me._epoch.members == [], kind
    with pytest.raises(PolicyError, match="has no keys of epoch 1"):
        me.receive(before)
    me.receive(handout)
    with pytest.raises(PolicyError, match="receives shares once"):
        me.receive(handout)
    with pytest.raises(PolicyError, match="shared once"):
        me.share(roster)


def test_a_handout_for_others_or_for_too_few_is_refused(group):
    _, handout = shared(group)
    me = group.members["site000"]
    less = {name: handout["sealed"][name] for name in ("site001",)}
    cases = {
        "without the member": {"members": group.names[1:]},
        "with a stranger": {"members": [*group.names, "stranger"]},
        "without shares of a member": {"sealed": less},
    }
    for changes in cases.values():
        with pytest.raises(WireError, match="not those of the member's neighbours"):
            me.receive(altered(handout, **changes))
    with pytest.raises(PolicyError, match="2 members shared their seeds, expected at least the quorum of 3"):
        me.receive(altered(handout, members=["site000", "site001"], sealed=less))
    with pytest.raises(PolicyError, match="has not received its shares"):
        me.mask(group.tally.call(group.nonce(), {"y": 4}), {"y": torch.arange(4)})


@pytest.mark.parametrize("num_wrong", [1, 3])
def test_wrong_shares_of_dishonest_members_are_noticed(group, num_wrong):
    group.agree()
    listed = called(group, drops=["site004"])
    for name in listed["survivors"]:
        group.tally.take_confirmation(name, group.members[name].confirm(listed))
    opening = group.tally.opening()
    for place, name in enumerate(listed["survivors"]):
        answer = group.members[name].unmask(opening)
        if place < num_wrong:
            answer["pairs"]["site004"] = text(bytes(16))
        group.tally.take_unmask(name, answer)
    if num_wrong == 1:  # three right shares of four are enough
        assert torch.equal(group.tally.total()[1]["y"], 4 * torch.arange(4))
    else:
        with pytest.raises(QuorumError, match="4 shares do not restore the seed of site004, expected 3"):
            group.tally.total()


# ---- thresholds and floors -------------------------------------------------------------------------------------------


def test_a_quorum_above_all_members_is_refused(tmp_path):
    group = Group(tmp_path, 5, 6)
    begin = group.tally.begin(1)
    messages = [group.members[name].keys(begin) for name in group.names]
    with pytest.raises(PolicyError, match="has 5 members, expected at least the quorum of 6: wait for more"):
        group.members["site000"].share({"epoch": 1, "keys": messages})


@pytest.mark.parametrize(("num", "quorum"), [(3, 2), (5, 3), (6, 4), (9, 5)])
def test_the_quorum_rises_to_more_than_half_of_the_members(tmp_path, num, quorum):
    """Terms with a quorum of 2: with one member fewer than the quorum, no site confirms."""
    group = Group(tmp_path, num, 2)
    group.agree()
    rows = group.rows()
    call = group.tally.call(group.nonce(), {"y": 100, "u": 33})
    for name in group.names:
        group.tally.take_rows(name, *group.members[name].mask(call, rows[name]))
    listed = group.tally.survivors()
    few = altered(listed, survivors=group.names[: quorum - 1])
    with pytest.raises(PolicyError, match=f"{quorum - 1} members survived, expected at least the quorum of {quorum}"):
        group.members["site000"].confirm(few)
    group.members["site000"].confirm(altered(listed, survivors=group.names[:quorum]))


def test_a_site_sets_its_own_floor(tmp_path):
    group = Group(tmp_path, 5, 3)
    with pytest.raises(PolicyError, match="quorum of 3, below this site's floor of 4"):
        group.member("site000", floor=4)
    with pytest.raises(SettingError, match="floor of the secure sum is 1, expected at least 2"):
        group.member("site000", floor=1)


def test_invented_members_do_not_count_for_a_site_that_names_its_partners(tmp_path):
    group = Group(tmp_path, 5, 3)
    group.members["site000"] = group.member("site000", floor=3, partners=["site001"])
    with pytest.raises(
        PolicyError, match="2 members of the secure sum count for site000, below this site's floor of 3"
    ):
        group.agree()
    group.members["site000"] = group.member("site000", floor=3, partners=["site001", "site002"])
    group.agree(2)
    with pytest.raises(PolicyError, match="2 members of the secure sum count for site000"):
        group.total(group.rows(), drops={"site002": "rows"})
    rows = group.rows()
    assert torch.equal(group.total(rows)[1]["y"], plain_sum(rows, group.names)["y"])


def test_a_site_does_not_confirm_fewer_survivors_than_the_quorum(group):
    group.agree()
    listed = called(group)
    with pytest.raises(PolicyError, match="2 members survived, expected at least the quorum of 3"):
        group.members["site000"].confirm({**listed, "survivors": ["site000", "site001"]})
    with pytest.raises(PolicyError, match="lacks this site or names strangers"):
        group.members["site000"].confirm({**listed, "survivors": [*group.names, "stranger"]})


def test_a_list_of_survivors_whose_graph_falls_apart_is_refused(tmp_path):
    group = Group(tmp_path, 12, 7, neighbours=2)
    group.agree()
    listed = called(group)
    ring = ["site000"]  # walk along the ring
    while len(ring) < 12:
        ring.append(next(name for name in group.tally._roster.graph[ring[-1]] if name not in ring))
    apart = sorted({*ring} - {ring[3], ring[8]})
    with pytest.raises(PolicyError, match="graph of the survivors falls apart"):
        group.members["site000"].confirm({**listed, "survivors": apart})
    one_gap = sorted({*ring} - {ring[3], ring[4]})
    assert group.members["site000"].confirm({**listed, "survivors": one_gap})["slot"] == 0


# ---- replays and lies ------------------------------------------------------------------------------------------------


def test_calls_confirmations_and_openings_are_answered_once(group):
    group.agree()
    listed = called(group)
    me, row = group.members["site000"], {"y": torch.arange(4)}
    replayed = {"epoch": 1, "slot": 0, "turn": [9], "iteration": 0, "call": 0}
    for slot in (0, 3):
        with pytest.raises(PolicyError, match=f"slot {slot} is used, skipped or not there, expected 1 to 2"):
            me.mask({**replayed, "slot": slot}, row)
    with pytest.raises(PolicyError, match="only a list of survivors that it confirmed"):
        me.unmask({"epoch": 1, "slot": 0, "signatures": {}})
    for name in group.names:
        group.tally.take_confirmation(name, group.members[name].confirm(listed))
    with pytest.raises(PolicyError, match="confirmed once"):
        me.confirm({**listed, "survivors": group.names[:4]})
    opening = group.tally.opening()
    me.unmask(opening)
    for again in (me.unmask, me.confirm):
        with pytest.raises(PolicyError, match="slot 0 is not open at site000"):
            again({**opening, **listed})
    with pytest.raises(PolicyError, match="has no keys of epoch 2"):
        me.mask({**replayed, "epoch": 2, "slot": 1}, row)


def test_skipped_slots_cannot_be_used_any_more(group):
    group.agree()
    me, call = group.members["site000"], {"epoch": 1, "slot": 1, "turn": [9], "iteration": 0, "call": 0}
    me.mask(call, {"y": torch.arange(4)})
    assert [*me._epoch._seeds] == [2]
    with pytest.raises(PolicyError, match="slot 0 is used, skipped"):
        me.mask({**call, "slot": 0, "turn": [10]}, {"y": torch.arange(4)})


def test_a_server_that_lies_about_a_drop_never_gets_both_halves(group):
    """The server tells some members that site000 survived, and others that it dropped out."""
    group.agree()
    listed = called(group)
    others = {**listed, "survivors": group.names[1:]}
    believe = {"site000": listed, "site001": listed, "site002": listed, "site003": others, "site004": others}
    signatures = {name: group.members[name].confirm(seen)["signature"] for name, seen in believe.items()}
    place = {"epoch": 1, "slot": 0}
    first = {name: signatures[name] for name in ("site000", "site001", "site002")}
    second = {name: signatures[name] for name in ("site003", "site004")}
    for wrong in (signatures, first):  # neither a mixture, nor those of the other list
        with pytest.raises(WireError, match="a survivor did not sign the list"):
            group.members["site003"].unmask({**place, "signatures": wrong})
    with pytest.raises(PolicyError, match="2 members confirmed the survivors, expected at least the quorum of 3"):
        group.members["site004"].unmask({**place, "signatures": second})
    for name in ("site001", "site002"):
        answer = group.members[name].unmask({**place, "signatures": first})
        assert "site000" in answer["selves"]
        assert answer["pairs"] == {}
    found = [name for name in ("site003", "site004") if group.members[name]._open.survivors == group.names]
    assert found == []


def test_members_that_were_told_different_members_or_rows_do_not_unmask_together(tmp_path):
    """The server leaves site004 out of some handouts, or asks site000 for another row than the others."""
    group = Group(tmp_path, 5, 3)
    roster = published(group)
    for name in group.names:
        group.tally.take_shares(name, group.members[name].share(roster))
    for name, message in group.tally.handout().items():
        less = {one: sealed for one, sealed in message["sealed"].items() if one != "site004"}
        told = {**message, "members": group.names[:4], "sealed": less} if name == "site000" else message
        group.members[name].receive(told)
    listed = {**called(group, drops=["site004"])}
    signatures = {name: group.members[name].confirm(listed)["signature"] for name in listed["survivors"]}
    place = {"epoch": 1, "slot": 0, "signatures": signatures}
    for name in listed["survivors"]:
        with pytest.raises(WireError, match="a survivor did not sign the list"):
            group.members[name].unmask(place)

    group.agree(2)
    call = group.tally.call(group.nonce(), {"y": 4})
    for name in group.names:
        group.members[name].mask(call, {"y": torch.arange(3 if name == "site000" else 4)})
    listed = {"epoch": 2, "slot": 0, "survivors": group.names}
    signatures = {name: group.members[name].confirm(listed)["signature"] for name in group.names}
    with pytest.raises(WireError, match="a survivor did not sign the list"):
        group.members["site001"].unmask({"epoch": 2, "slot": 0, "signatures": signatures})


def test_halves_are_disjoint_for_every_member_and_call(group):
    group.agree()
    for drops in ([], ["site001"], ["site001", "site003"]):
        listed = called(group, drops)
        for name in listed["survivors"]:
            group.tally.take_confirmation(name, group.members[name].confirm(listed))
        opening = group.tally.opening()
        for name in listed["survivors"]:
            answer = group.members[name].unmask(opening)
            assert {*answer["pairs"]} == {*drops}
            assert {*answer["selves"]} == {*group.names} - {*drops, name}
            slot = listed["slot"]
            for content in group.members[name]._epoch._held.values():  # neither half is left
                assert not any(content[: 32 * (slot + 1)])
                assert all(any(content[32 * later : 32 * (later + 1)]) for later in range(slot + 1, 3))


# ---- the form of messages --------------------------------------------------------------------------------------------

JUNK = [
    None,
    -1,
    2**70,
    1.5,
    True,
    "",
    "x" * 10_000,
    "é",
    "=",
    [],
    ["a", "a"],
    [None],
    {},
    {"site001": "!"},
    {"": ""},
    [[]],
]


def attempts(message):
    """The message with every value replaced by everything, and without it."""
    for key in message:
        yield {other: value for other, value in message.items() if other != key}
        for junk in JUNK:
            if junk != message[key] or type(junk) is not type(message[key]):
                yield {**message, key: junk}
    yield from (None, [], "text", {})


def test_no_form_of_a_message_does_anything_but_raise_our_errors(group):
    """Each message is distorted. Its receiver refuses it, and the protocol goes on with the right message."""
    refused = 0

    def deliver(receive, message):
        nonlocal refused
        for wrong in attempts(message):
            with pytest.raises((WireError, PolicyError)):
                receive(wrong)
            refused += 1
        return receive(message)

    me, tally = group.members["site000"], group.tally
    begin = tally.begin(1)
    keys = {name: member.keys(begin) for name, member in group.members.items()}
    for name, message in keys.items():
        deliver(lambda wrong, name=name: tally.take_keys(name, wrong), message)
    roster = tally.roster()
    shares = {"site000": deliver(me.share, roster)}
    for name in group.names[1:]:
        shares[name] = group.members[name].share(roster)
    for name, message in shares.items():
        deliver(lambda wrong, name=name: tally.take_shares(name, wrong), message)
    for name, message in tally.handout().items():
        deliver(group.members[name].receive, message) if name == "site000" else group.members[name].receive(message)
    call, row = tally.call(group.nonce(), {"y": 4}), {"y": torch.arange(4)}
    for key, junk in [("epoch", JUNK), ("slot", JUNK), ("turn", [*JUNK, [1] * 9, [-1], ["1"]]), ("call", JUNK)]:
        for value in junk:
            with pytest.raises((WireError, PolicyError)):
                me.mask({**call, key: value}, row)
    for name in group.names:
        tally.take_rows(name, *group.members[name].mask(call, row))
    listed = tally.survivors()
    for name in group.names:
        confirmation = deliver(me.confirm, listed) if name == "site000" else group.members[name].confirm(listed)
        deliver(lambda wrong, name=name: tally.take_confirmation(name, wrong), confirmation)
    opening = tally.opening()
    for name in group.names:
        answer = deliver(me.unmask, opening) if name == "site000" else group.members[name].unmask(opening)
        deliver(lambda wrong, name=name: tally.take_unmask(name, wrong), answer)
    assert torch.equal(tally.total()[1]["y"], 5 * torch.arange(4))
    assert refused > 500


def test_rows_of_another_form_are_refused(group):
    group.agree()
    call = group.tally.call(group.nonce(), {"y": 4})
    me = group.members["site000"]
    for rows in ({}, {"y": torch.zeros(4)}, {"y": torch.zeros(4, dtype=torch.int32)}):
        with pytest.raises(SettingError, match="masks rows of 64-bit integers"):
            me.mask(call, rows)
    header, right = me.mask(call, {"y": torch.arange(4)})
    wrong = [{}, {"y": right["y"][:3]}, {"z": right["y"]}, {**right, "z": right["y"]}, {"y": right["y"].float()}]
    for rows in wrong:
        with pytest.raises(WireError, match="rows of site000 do not belong"):
            group.tally.take_rows("site000", header, rows)
    with pytest.raises(WireError, match="belongs to another call"):
        group.tally.take_rows("site000", {**header, "slot": 2}, right)
    with pytest.raises(WireError, match="rows of stranger"):
        group.tally.take_rows("stranger", header, right)
    group.tally.take_rows("site000", header, right)
    with pytest.raises(WireError, match="rows of site000"):
        group.tally.take_rows("site000", header, right)


def test_the_server_asks_in_order(group):
    tally = Tally(group.terms, group.party_of)
    with pytest.raises(QuorumError, match="no members or no slots left"):
        tally.call(group.nonce(), {"y": 4})
    with pytest.raises(WireError, match="no call in progress"):
        tally.survivors()
    with pytest.raises(WireError, match="no roster yet"):
        tally.take_shares("site000", {"epoch": 0, "sealed": {}})
    with pytest.raises(QuorumError, match="0 members sent keys, expected at least 3"):
        tally.roster()


def test_without_its_packages_there_are_no_secure_sums(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "Crypto" else real(name))
    with pytest.raises(SettingError, match=r"which are not installed: pip install 'fedbilevel\[secure\]'"):
        importlib.reload(fedbilevel.secure)


@pytest.mark.parametrize(
    "wrong", [{"run": ""}, {"run": "r" * 201}, {"quorum": 1}, {"neighbours": 1}, {"slots": 0}, {"slots": 10**6}]
)
def test_terms_have_ranges(wrong):
    with pytest.raises(SettingError, match=r"a secure sum has .* expected"):
        Terms(**{"run": "run", "quorum": 3, **wrong})


# ---- the project's own certificates ----------------------------------------------------------------------------------


def test_members_sign_with_the_certificates_of_their_kits(tmp_path):
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")
    from fedbilevel.sites.flare import kits
    from fedbilevel.sites.flare.identity import Party, Signer, root_of

    names = ["east", "north", "west"]
    kits.init(tmp_path / "federation.toml", sites=names)
    made = kits.provision(tmp_path / "federation.toml", tmp_path / "kits")
    group = Group(tmp_path, 3, 3)
    group.names = names

    def party_of(name):
        return lambda certificate: Party(certificate, root_of(Path(made[name])))

    group.members = {
        name: Member(group.terms, name, Signer(made[name]), party_of(name), Nonces(tmp_path / f"{name}.json"), floor=3)
        for name in names
    }
    group.tally = Tally(group.terms, party_of("server"))
    group.agree()
    rows = group.rows()
    assert torch.equal(group.total(rows)[1]["y"], plain_sum(rows, names)["y"])
    begin = group.tally.begin(2)
    messages = [group.members[name].keys(begin) for name in names]
    ours = Epoch(group.terms, "north", 2).keys.message(group.terms, Signer(made["server"]))
    with pytest.raises(WireError, match="keys of north are not signed by its certificate"):
        group.members["east"].share({"epoch": 2, "keys": [messages[0], ours, messages[2]]})
