"""Philox against its published vectors, and draws that depend on their address alone."""

import math
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.errors import SettingError
from fedbilevel.problem import draws
from fedbilevel.problem.draws import MAX_STEPS, SERVER, Stream, philox

M32 = 0xFFFFFFFF


def philox_in_whole_numbers(key, counter):
    """Philox4x32-10 as printed in the paper, on Python integers, which never wrap."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words(key, counter):
    return tuple(int(word) for word in philox(key, tuple(torch.tensor([c]) for c in counter)))


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((M32, M32), (M32, M32, M32, M32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(key, counter, expected):
    assert words(key, counter) == expected


uint32 = st.integers(0, M32)


@given(st.tuples(uint32, uint32), st.tuples(uint32, uint32, uint32, uint32))
def test_philox_on_wrapping_tensors_equals_philox_on_whole_numbers(key, counter):
    assert words(key, counter) == philox_in_whole_numbers(key, counter)


def test_a_word_is_philox_of_its_address():
    seed, purpose, iteration, call = 11, "train/B_y", 5, 3
    ids, steps, width = torch.tensor([4, 0, SERVER]), range(2, 5), 7
    got = Stream(seed).bits(purpose, ids, iteration=iteration, call=call, steps=steps, width=width)
    for i, client in enumerate(ids.tolist()):
        for j, step in enumerate(steps):
            for place in range(width):
                counter = (place // 4, call << 16 | step, iteration, client)
                assert (
                    int(got[i, j, place])
                    == philox_in_whole_numbers((seed, zlib.crc32(purpose.encode())), counter)[place % 4]
                )


def test_words_that_stand_for_an_axis_are_those_of_the_whole_grid():
    counter = tuple(
        torch.randint(0, 2**32, shape, generator=torch.Generator().manual_seed(k))
        for k, shape in enumerate([(1, 1, 5), (1, 4, 1), (1, 1, 1), (3, 1, 1)])
    )
    whole = philox((7, 8), tuple(torch.broadcast_tensors(*counter)))
    for short, long in zip(philox((7, 8), counter), whole, strict=True):
        assert torch.equal(short, long)
    assert (
        int(whole[2][2, 3, 4])
        == philox_in_whole_numbers((7, 8), [int(torch.broadcast_tensors(*counter)[i][2, 3, 4]) for i in range(4)])[2]
    )


def test_several_outer_iterations_at_once_are_each_drawn_as_alone():
    ids = torch.tensor([4, 0, SERVER])
    for iterations in (range(7, 12), range(3, 4), range(M32, M32 + 1)):
        together = Stream(11).first_bits("network/edges", ids, iterations=iterations, width=6)
        alone = [
            Stream(11).bits("network/edges", ids, iteration=k, call=0, steps=range(1), width=6) for k in iterations
        ]
        assert torch.equal(together, torch.cat(alone, dim=1))
    for bad in (range(-1, 2), range(M32, M32 + 2)):
        with pytest.raises(SettingError, match="the outer iteration must lie between"):
            Stream(11).first_bits("network/edges", ids, iterations=bad, width=6)


def draw(ids, *, seed=3, purpose="B", iteration=2, call=1, steps=range(20), width=6):
    sizes = 10 + 3 * torch.tensor(ids)
    return Stream(seed).integers(
        purpose, torch.tensor(ids), sizes, iteration=iteration, call=call, steps=steps, width=width
    )


def test_a_client_draws_the_same_alone_with_others_and_in_any_order():
    together = draw([0, 1, 5, 9])
    assert torch.equal(draw([9, 5, 0, 1]), together[[3, 2, 0, 1]])
    for row, client in enumerate([0, 1, 5, 9]):
        assert torch.equal(draw([client])[0], together[row])


def test_steps_drawn_in_chunks_equal_steps_drawn_at_once():
    whole = draw([2, 7])
    assert torch.equal(
        torch.cat(
            [draw([2, 7], steps=range(0, 3)), draw([2, 7], steps=range(3, 4)), draw([2, 7], steps=range(4, 20))], dim=1
        ),
        whole,
    )


def test_a_narrower_batch_is_the_start_of_a_wider_one():
    assert torch.equal(draw([2, 7], width=5), draw([2, 7], width=19)[..., :5])


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"purpose": "C"}, {"iteration": 3}, {"call": 2}, {"steps": range(20, 40)}]
)
def test_every_part_of_the_address_matters(other):
    share_of_ties = (draw([1, 2]) == draw([1, 2], **other)).double().mean()
    assert share_of_ties < 0.25  # two unrelated draws from 13 or 16 values agree about one time in fourteen


def test_clients_of_one_size_draw_different_samples():
    rows = Stream(0).integers(
        "B", torch.tensor([0, 1]), torch.tensor([1000, 1000]), iteration=1, call=1, steps=range(4), width=32
    )
    assert (rows[0] == rows[1]).double().mean() < 0.05


def test_no_words_for_no_clients():
    assert Stream(0).bits(
        "B", torch.zeros(0, dtype=torch.int64), iteration=1, call=1, steps=range(3), width=5
    ).shape == (0, 3, 5)


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_integers_are_uniform_and_inside_each_clients_range():
    high = torch.tensor([7, 10, 1])
    drawn = Stream(5).integers("B", torch.tensor([0, 1, 2]), high, iteration=1, call=1, steps=range(100), width=100)
    assert int(drawn[2].max()) == 0
    assert (
        chi_square(torch.bincount(drawn[0].flatten(), minlength=7).double()) < 22.46
    )  # 99.9 % of chi-square with 6 degrees of freedom
    assert chi_square(torch.bincount(drawn[1].flatten(), minlength=10).double()) < 27.88  # 9 degrees
    assert drawn[0].max() == 6
    assert drawn[1].max() == 9


@pytest.mark.parametrize("apart", ["place", "step", "client"])
def test_neighbouring_draws_are_independent(apart):
    drawn = Stream(5).integers(
        "B", torch.arange(40), torch.full((40,), 4), iteration=1, call=1, steps=range(40), width=40
    )
    dim = {"client": 0, "step": 1, "place": 2}[apart]
    pairs = 4 * drawn.narrow(dim, 0, 39) + drawn.narrow(dim, 1, 39)
    assert chi_square(torch.bincount(pairs.flatten(), minlength=16).double()) < 37.70  # 15 degrees


# ---- passes without replacement --------------------------------------------------------------------------------------


def passes(ids, *, seed=3, purpose="B", iteration=2, call=1, steps=range(20), width=4):
    ids = torch.tensor(ids, dtype=torch.int64)
    return Stream(seed).epochs(purpose, ids, 5 + 3 * ids, iteration=iteration, call=call, steps=steps, width=width)


def test_every_pass_takes_each_sample_once_in_an_order_of_its_own():
    for client, row in zip([0, 2, 5], passes([0, 2, 5]), strict=True):
        size = 5 + 3 * client
        whole = row.flatten()[: 80 // size * size].view(-1, size)
        assert len(whole) >= 4
        assert all(sorted(one.tolist()) == list(range(size)) for one in whole)
        assert len({tuple(one.tolist()) for one in whole}) == len(whole)


def test_passes_do_not_depend_on_who_is_asked_together_or_on_chunks():
    together = passes([0, 1, 5, 9])
    assert torch.equal(passes([9, 0]), together[[3, 0]])
    for row, client in enumerate([0, 1, 5, 9]):
        assert torch.equal(passes([client])[0], together[row])
    chunks = [passes([0, 1, 5, 9], steps=range(*ends)) for ends in ((0, 3), (3, 4), (4, 20))]
    assert torch.equal(torch.cat(chunks, dim=1), together)


@pytest.mark.parametrize("other", [{"seed": 4}, {"purpose": "C"}, {"iteration": 3}, {"call": 2}])
def test_another_address_passes_in_another_order(other):
    assert (passes([9]) == passes([9], **other)).double().mean() < 0.25


def test_every_sample_is_as_likely_to_come_first():
    firsts = [
        int(Stream(7).epochs("B", torch.tensor([3]), torch.tensor([5]), iteration=i, call=1, steps=range(1), width=1))
        for i in range(1000)
    ]
    assert (
        chi_square(torch.bincount(torch.tensor(firsts), minlength=5).double()) < 18.47
    )  # 99.9 % of chi-square with 4 degrees of freedom


def test_no_passes_for_no_clients():
    assert passes([]).shape == (0, 20, 4)


@given(st.integers(1, 200), st.integers(0, M32), st.integers(0, 1000))
def test_order_is_a_permutation(num, client, iteration):
    assert Stream(1).order("cohort", client, num, iteration=iteration).sort().values.tolist() == list(range(num))


def test_order_sorts_the_63_bit_keys_of_its_address():
    num, client, iteration, call = 9, SERVER, 4, 2
    word = lambda place: philox_in_whole_numbers(
        (1, zlib.crc32(b"cohort")), (place // 4, call << 16, iteration, client)
    )[place % 4]
    keys = [(word(2 * i) >> 1) * 2**32 + word(2 * i + 1) for i in range(num)]
    assert Stream(1).order("cohort", client, num, iteration=iteration, call=call).tolist() == sorted(
        range(num), key=keys.__getitem__
    )


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 64), st.integers(0, 1000))
def test_the_first_of_an_order_are_its_beginning_even_where_keys_tie(num, first, different, iteration):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_keys", lambda words: words[..., 0] % different)
        whole, some = (Stream(1).order("cohort", SERVER, num, iteration=iteration, first=k) for k in (None, first))
    assert whole.sort().values.tolist() == list(range(num))
    assert torch.equal(some, whole[:first])


def test_all_orders_of_three_are_equally_likely():
    orders = [tuple(Stream(2).order("cohort", SERVER, 3, iteration=i).tolist()) for i in range(1200)]
    counts = torch.tensor([float(orders.count(o)) for o in sorted(set(orders))])
    assert len(counts) == math.factorial(3)
    assert chi_square(counts) < 20.52  # 5 degrees


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Stream(-1), "seed must lie between 0 and 2\\*\\*32 - 1, got -1"),
        (lambda: Stream(2**32), "seed must lie .* got 4294967296"),
        (lambda: draw([0], iteration=2**32), "outer iteration must lie"),
        (lambda: draw([0], steps=range(MAX_STEPS, MAX_STEPS + 1)), "at most 65536 steps"),
        (lambda: draw([0], call=MAX_STEPS), "step 20 of call 65536 was requested"),
    ],
)
def test_an_address_that_does_not_fit_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(("num", "share", "least", "size"), [
    (10, 0.25, 0, 2), (11, 0.25, 0, 3), (2, 0.25, 0, 0), (2, 0.25, 1, 1), (1, 0.9, 1, 0), (0, 0.5, 1, 0),
    (3, 0.9, 0, 2),
])  # fmt: skip
def test_division_leaves_every_number_in_one_part_and_one_number_in_the_first(num, share, least, size):
    main, part = Stream(1).divided("held", 4, num, share, least=least)
    assert len(part) == size
    assert sorted([*main.tolist(), *part.tolist()]) == list(range(num))
    assert main.tolist() == sorted(main.tolist())
    assert part.tolist() == sorted(part.tolist())
    if num == 11:
        assert any(not torch.equal(part, Stream(1).divided("held", client, num, share)[1]) for client in range(3))


@pytest.mark.parametrize("high", [1, 5, 2**31 - 1])
def test_one_number_is_the_first_of_many(high):
    stream, ids = Stream(2**31 + 7), torch.tensor([SERVER])
    for iteration, call in ((1, 0), (2**31, 1), (99, MAX_STEPS - 1)):
        many = stream.integers("N'", ids, torch.tensor([high]), iteration=iteration, call=call, steps=range(1), width=3)
        assert stream.integer("N'", SERVER, high, iteration=iteration, call=call) == int(many[0, 0, 0])


@pytest.mark.parametrize("num", [1, 5, 6, 7, 100])
def test_orders_of_many_addresses_are_those_of_each(num):
    stream, iterations, calls = Stream(3), range(7, 10), range(1, 5)
    for first in {1, num - 1, num} - {0}:
        found = stream.orders("cohort", SERVER, num, iterations=iterations, calls=calls, first=first)
        places = [(iteration, call) for iteration in iterations for call in calls]
        for row, (iteration, call) in zip(found, places, strict=True):
            expected = stream.order("cohort", SERVER, num, iteration=iteration, call=call, first=first)
            assert torch.equal(row, expected)
