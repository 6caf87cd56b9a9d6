"""Secure sums are exact, survive drop-outs at every stage, and show the server nothing else."""

import base64
import json

import numpy as np
import pytest
import torch

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from fedbilevel.errors import PolicyError, QuorumError, WireError
from fedbilevel.secure import Nonce, Nonces, streams, usual_quorum
from fedbilevel.secure.masks import pair_seed
from fedbilevel.secure.messages import Call
from fedbilevel.sites import wire
from support.secure import STAGES, Group, plain_sum

SETUP = STAGES[:3]


def check(group, found, rows, names):
    survivors, sums = found
    assert survivors == sorted(names)
    expected = plain_sum(rows, survivors)
    assert sums.keys() == expected.keys()
    assert all(torch.equal(sums[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num", [2, 3, 4, 7, 10, 17, 30, 31, 40])
def test_the_sum_is_exact(tmp_path, num):
    group = Group(tmp_path, num, usual_quorum(num), slots=2)
    group.agree()
    for seed in range(2):
        rows = group.rows(20, seed)
        check(group, group.total(rows), rows, group.names)
    assert group.tally.is_exhausted
    assert (len(group.tally._roster.graph["site000"]) < num - 1) == (num > 30)


@pytest.mark.parametrize("quorum", [4, 5, 6, 7])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_drops", [1, 2, 3])
def test_drops_at_every_stage_leave_the_sum_of_the_rows_that_were_sent(tmp_path, stage, quorum, num_drops):
    group = Group(tmp_path, 7, quorum)
    drops = dict.fromkeys(group.names[2 : 2 + num_drops], stage)
    rows = group.rows()

    def run():
        group.agree(drops=drops if stage in SETUP else None)
        return group.total(rows, drops)

    if 7 - num_drops < quorum:
        with pytest.raises(QuorumError, match=f"{7 - num_drops} members .* at least {quorum}"):
            run()
        return
    late = ("confirm", "unmask")  # after the rows
    check(group, run(), rows, [name for name in group.names if name not in drops or stage in late])


def test_drops_at_all_stages_of_one_epoch_and_the_calls_after_them(tmp_path):
    group = Group(tmp_path, 16, 9, slots=4)
    drops = {group.names[2 * place]: stage for place, stage in enumerate(STAGES)}
    group.agree(drops=drops)
    rows = group.rows(seed=1)
    sent = [name for name in group.names if drops.get(name, "unmask") in ("confirm", "unmask")]
    check(group, group.total(rows, drops), rows, sent)
    back = {name: stage for name, stage in drops.items() if stage in SETUP}
    for _ in range(2):  # members that dropped out of a call take part in the next one, with keys of another slot
        rows = group.rows(seed=2)
        check(group, group.total(rows, back), rows, [name for name in group.names if name not in back])
    group.agree(epoch=2)
    check(group, group.total(rows), rows, group.names)


@pytest.mark.parametrize("stage", STAGES)
def test_drops_in_a_sparse_graph(tmp_path, stage):
    group = Group(tmp_path, 40, 27, slots=1)
    drops = dict.fromkeys(group.names[::6], stage)
    rows = group.rows(5)
    group.agree(drops=drops if stage in SETUP else None)
    sent = [name for name in group.names if name not in drops or stage in ("confirm", "unmask")]
    check(group, group.total(rows, drops), rows, sent)


def test_a_late_row_is_refused_and_stays_masked(tmp_path):
    group = Group(tmp_path, 5, 3)
    group.agree()
    rows, late = group.rows(), group.names[1]
    call = group.tally.call(group.nonce(), {"y": 100, "u": 33})
    answers = {name: group.members[name].mask(call, rows[name]) for name in group.names}
    for name in group.names:
        if name != late:
            group.tally.take_rows(name, *answers[name])
    listed = group.tally.survivors()
    with pytest.raises(WireError, match="rows of site001 do not belong to this stage"):
        group.tally.take_rows(late, *answers[late])
    for name in listed["survivors"]:
        group.tally.take_confirmation(name, group.members[name].confirm(listed))
    with pytest.raises(PolicyError, match="lacks this site"):
        group.members[late].confirm(listed)
    opening = group.tally.opening()
    unmasked = {name: group.members[name].unmask(opening) for name in listed["survivors"]}
    for name, answer in unmasked.items():
        group.tally.take_unmask(name, answer)
    assert all(late in answer["pairs"] and late not in answer["selves"] for answer in unmasked.values())
    masks = group.tally._call._pair_masks(late)  # all that the server can restore of the late row
    words = answers[late][1]["y"].numpy().copy()
    for seed, sign in masks:
        key = streams.derived(seed, "mask", *group.tally._call.call.parts(), "y")
        streams.add_mask(words, key, sign)  # the opposite sign of what the neighbours added
    assert not np.any(words == rows[late]["y"].numpy())
    check(group, group.tally.total(), rows, [name for name in group.names if name != late])


# ---- the server's transcript -----------------------------------------------------------------------------------------


def uniform(words):
    """Whether 64-bit words look random: chi-square of their bytes within eight deviations."""
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    mean = counts.sum() / 256
    return abs(((counts - mean) ** 2 / mean).sum() - 255) < 8 * np.sqrt(2 * 255)


def test_a_transcript_of_the_server_holds_no_unmasked_row(tmp_path):
    group = Group(tmp_path, 5, 3)
    group.agree()
    length = 20_000
    rows = {name: {"y": torch.full((length,), 1000 + place)} for place, name in enumerate(group.names)}
    drops = {"site001": "rows", "site003": "unmask"}
    check(group, group.total(rows, drops), rows, [name for name in group.names if name != "site001"])
    transcript = b"".join(group.seen)
    for row in rows.values():
        assert row["y"].numpy()[:2].tobytes() not in transcript
    masked = [wire.unpack(message)[1][0].numpy() for message in group.seen if len(message) > 8 * length]
    assert len(masked) == 4
    assert all(uniform(words) for words in masked)
    plain = rows["site000"]["y"].numpy()
    assert not uniform(plain)
    # a curious server subtracts each member's own mask, which it learns: the pairwise masks remain
    headers = [json.loads(header_of(message)) for message in group.seen]
    seeds = [base64.b64decode(header["own"]) for header in headers if "own" in header]
    call = Call(1, 0, Nonce((7, 0, 1), 3, 1))
    assert len(seeds) == 3
    for words in masked:
        for seed in seeds:
            rest = words.copy()
            streams.add_mask(rest, streams.derived(seed, "mask", *call.parts(), "y"), -1)
            assert uniform(rest)
    everything = transcript + b"".join(words.tobytes() for words in masked)
    secrets = [seed for member in group.members.values() for both in member._epoch._seeds.values() for seed in both]
    assert len(secrets) == 5 * 2 * 2 + 2  # of slots to come, and of the slot that site001 did not use
    for seed in secrets:
        assert seed not in everything
        assert base64.b64encode(seed) not in everything


# ---- nonces ----------------------------------------------------------------------------------------------------------


def test_no_mask_is_used_twice_across_calls_epochs_and_restarts(tmp_path, monkeypatch):
    used, plain = [], streams.add_mask
    monkeypatch.setattr(
        streams, "add_mask", lambda words, key, sign: (used.append((key, sign)), plain(words, key, sign))
    )
    group = Group(tmp_path, 4, 3, slots=2)
    for epoch in (1, 2, 3):
        group.agree(epoch)
        for _ in range(2):
            rows = group.rows(6)
            check(group, group.total(rows, {"site003": "rows"}), rows, group.names[:3])
        group.members = {name: group.member(name) for name in group.names}  # all processes start anew
    # per call and name: 3 own masks and 9 pairwise masks at the members, 3 and 3 at the server;
    # a pair of survivors uses its key with both signs
    keys = {key for key, _ in used}
    assert len(used) == 3 * 2 * 2 * (3 + 9 + 3 + 3)
    assert len(keys) == 3 * 2 * 2 * (3 + 3 + 3)
    assert len({*used}) == 2 * len(keys)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_nonce_is_answered_once_also_after_a_restart(tmp_path, restarted):
    group = Group(tmp_path, 3, 3, slots=4)
    group.agree()
    rows, nonce = group.rows(), group.nonce()
    group.total(rows, nonce=nonce)
    if restarted:
        group.members = {name: group.member(name) for name in group.names}
        with pytest.raises(PolicyError, match="has no keys of epoch 1"):
            group.total(rows)
        with pytest.raises(PolicyError, match="the epoch 1 of the secure sum is not above 1"):
            group.agree(1)
        group.agree(2)
    with pytest.raises(PolicyError, match=r"not above .* which this site used before"):
        group.total(rows, nonce=nonce)
    with pytest.raises(PolicyError, match="not above"):
        group.total(rows, nonce=nonce._replace(turn=(7, 0, 0), call=9))
    later = nonce._replace(turn=(8, 0, 0), iteration=0)  # a resumed run goes back in iterations, not in turns
    check(group, group.total(rows, nonce=later), rows, group.names)


def test_a_nonce_is_on_the_disk_before_its_row_exists(tmp_path, monkeypatch):
    group = Group(tmp_path, 3, 3)
    group.agree()
    rows, nonce = group.rows(), group.nonce()

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(streams, "add_mask", dies)
        with pytest.raises(KeyboardInterrupt):
            group.total(rows, nonce=nonce)
    with pytest.raises(PolicyError, match="not above"):
        group.member("site000")._nonces.use("run", nonce)
    group.member("site000")._nonces.use("another run", nonce)


def test_no_row_without_a_place_for_its_nonce(tmp_path):
    nonces = Nonces(tmp_path / "none" / "nonces.json")
    with pytest.raises(PolicyError, match="cannot be kept in"):
        nonces.use("run", Nonce((1,), 0, 0))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"run": 1}', '{"run": {"nonce": [["x"], 0, 0]}}', '{"run": {"nonce": 3}}']
)
def test_a_damaged_file_of_nonces_stops_the_site(tmp_path, content):
    (tmp_path / "nonces.json").write_text(content)
    with pytest.raises(PolicyError, match="cannot be read: put back a copy"):
        Nonces(tmp_path / "nonces.json").use("run", Nonce((1,), 0, 0))


def test_a_drop_opens_no_other_call_of_the_same_member(tmp_path):
    """The server keeps all rows and, after a drop in the second call, tries the restored seed on the first call."""
    group = Group(tmp_path, 4, 3)
    group.agree()
    rows, victim = group.rows(), "site001"
    first, used = len(group.seen), group.members[victim]._epoch._seeds[0][1]
    check(group, group.total(rows), rows, group.names)
    [masked] = [arrays["y"] for arrays in map(arrays_of, group.seen[first:]) if "y" in arrays][1:2]  # of site001
    own = [json.loads(header_of(message)) for message in group.seen[first:] if b'"own"' in message][1]["own"]
    roster, before = group.tally._roster, Call(1, 0, Nonce((7, 0, 1), 3, 1))
    real, tally = group.tally.total, group.tally
    found = {}

    def total():
        call = tally._call
        public = roster.keys[victim].masking_at(1)
        is_right = lambda seed: streams.private_key(seed).public_key().public_bytes_raw() == public
        found["seed"] = call._restored(victim, is_right)
        return real()

    tally.total = total
    check(group, group.total(rows, {victim: "rows"}), rows, [name for name in group.names if name != victim])

    def opened(seed):
        words, private = masked.numpy().copy(), streams.private_key(seed)
        streams.add_mask(words, streams.derived(base64.b64decode(own), "mask", *before.parts(), "y"), -1)
        for other in roster.graph[victim]:
            pair = pair_seed(roster, before, private, victim, other)
            key = streams.derived(pair, "mask", *before.parts(), "y")
            streams.add_mask(words, key, -1 if victim < other else 1)
        return words == rows[victim]["y"].numpy()

    assert np.all(opened(used))  # the seed of the first call, which nobody restored
    assert not np.any(opened(found["seed"]))
    published = {roster.keys[name].masking_at(slot) for name in group.names for slot in range(3)}
    assert len(published) == 4 * 3


def header_of(message):
    return message[17 : 17 + int.from_bytes(message[13:17], "little")]


def arrays_of(message):
    header, arrays = wire.unpack(message)
    return dict(zip(header["names"], arrays, strict=True))
