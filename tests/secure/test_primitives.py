"""Graphs, masks and shares of secure sums."""

import itertools
import random
from math import comb

import numpy as np
import pytest

pytest.importorskip("Crypto", reason="PyCryptodome is not installed: pip install 'fedbilevel[secure]'")

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedbilevel.secure import streams, usual_quorum
from fedbilevel.secure.graph import graph, is_connected, threshold, usual_degree


@pytest.mark.parametrize(("num", "degree"), [(2, None), (30, None), (31, None), (40, None), (12, 4), (12, 5), (9, 20)])
def test_every_member_has_the_same_number_of_neighbours_and_is_their_neighbour(num, degree):
    names = [f"s{i}" for i in range(num)]
    found = graph(names, b"seed", degree)
    expected = {None: num - 1 if num <= 30 else usual_degree(num), 4: 4, 5: 6, 20: num - 1}[degree]
    assert {len(near) for near in found.values()} == {expected}
    assert all(name in found[other] and name != other for name in names for other in found[name])
    assert is_connected(found, names)
    assert found == graph(names[::-1], b"seed", degree)
    assert (found == graph(names, b"other", degree)) == (expected == num - 1)


@pytest.mark.parametrize("num", [31, 40, 64, 100, 300])
def test_the_usual_degree_by_simulation_and_by_counting(num):
    degree = usual_degree(num)
    needed, bad = degree // 2 + 1, -(-num // 5)
    leaks = sum(comb(bad, k) * comb(num - 1 - bad, degree - k) for k in range(needed, degree + 1)) / comb(
        num - 1, degree
    )
    assert num * leaks < 2**-40
    assert degree < num - 1
    names, draw = [f"s{i}" for i in range(num)], random.Random(0)
    for trial in range(20):
        found = graph(names, bytes([trial]), None)
        left = {*draw.sample(names, num - bad)}
        assert is_connected(found, left)
        assert min(len(left.intersection(near)) for near in found.values()) >= threshold(degree, num, usual_quorum(num))


def test_a_smaller_degree_than_the_usual_one_would_not_do():
    num = 300
    degree = usual_degree(num) - 2
    needed, bad = degree // 2 + 1, 60
    count = lambda least: sum(comb(bad, k) * comb(num - 1 - bad, degree - k) for k in range(least, degree + 1))
    assert num * count(needed) * 2**40 > comb(num - 1, degree) or num * count(degree - needed + 1) * 2**20 > comb(
        num - 1, degree
    )


def test_parts_of_a_graph_that_fall_apart_are_found():
    ring = {str(i): (str((i - 1) % 6), str((i + 1) % 6)) for i in range(6)}
    assert is_connected(ring, ["0", "1", "2"])
    assert not is_connected(ring, ["0", "1", "3"])
    assert is_connected(ring, [])


@pytest.mark.parametrize("length", [0, 1, 7, 2**16, 2**16 + 1, 200_003])
def test_a_mask_is_the_key_stream_of_aes(length):
    words, key = np.arange(length), bytes(range(32))
    masked = words.copy()
    streams.add_mask(masked, key, 1)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    assert np.array_equal(masked, words + np.frombuffer(stream, "<i8"))
    streams.add_mask(masked, key, -1)
    assert np.array_equal(masked, words)


def test_any_shares_restore_a_seed_and_fewer_tell_nothing():
    seed = streams.new_seed()
    shares = [*enumerate(streams.split(seed, 3, 5), start=1)]
    for some in itertools.combinations(shares, 3):
        assert streams.restored(some, 3, lambda found: found == seed) == seed
    assert streams.restored(shares[:2], 3, lambda found: True) is None
    assert streams.restored(shares[:2], 2, lambda found: found == seed) is None
    assert streams.split(seed, 1, 1) == [seed]  # two members: each holds the seed of the other


def test_secrets_of_different_purposes_differ():
    seed = bytes(16)
    found = [
        streams.derived(seed, *parts) for parts in (("a",), ("a", ""), ("", "a"), ("a", "b"), ("ab",), (b"a", "c"))
    ]
    found += [streams.commitment(seed), streams.private_key(seed).private_bytes_raw()]
    assert len({*found}) == len(found)


def test_a_sealed_message_opens_with_its_key_and_context_only():
    key, other = bytes(32), bytes([1] * 32)
    sealed = streams.seal(key, b"shares", b"north to south")
    assert len(sealed) == len(b"shares") + streams.SEALED
    assert streams.unseal(key, sealed, b"north to south") == b"shares"
    assert streams.unseal(other, sealed, b"north to south") is None
    assert streams.unseal(key, sealed, b"south to north") is None
    assert streams.seal(key, b"shares", b"") != streams.seal(key, b"shares", b"")
