"""Compressors: what the arrays stand for, their bytes, and rows that do not depend on each other."""

import pytest
import torch

from fedbilevel.aggregation.compression import Compressor
from fedbilevel.aggregation.settings import COMPRESSORS, Choice
from fedbilevel.problem.draws import Stream

CHOICES = [Choice("int8"), Choice("topk", 0.25), Choice("randk", 0.25), Choice("powersgd", 2)]
WIDTH = 50


def compressor(choice, width=WIDTH, call=3):
    return Compressor(choice, width, Stream(4), "u", 2, call)


def random_rows(num=4, width=WIDTH):
    return torch.randn(num, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_all_compressors_are_here():
    assert {choice.kind for choice in CHOICES} == {*COMPRESSORS}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.kind)
class TestEvery:
    def test_never_lengthens_what_is_left(self, choice):
        one, rows = compressor(choice), random_rows()
        left = rows - one.unpack(one.pack(rows))
        assert bool((left.norm(dim=1) < rows.norm(dim=1)).all())

    def test_a_row_does_not_depend_on_the_others(self, choice):
        one, rows = compressor(choice), random_rows()
        alone = torch.cat([one.unpack(one.pack(row[None])) for row in rows])
        assert torch.equal(one.unpack(one.pack(rows)), alone)

    def test_the_lengths_are_those_of_the_arrays(self, choice):
        one = compressor(choice)
        assert one.lengths == tuple(array.shape[1] for array in one.pack(random_rows()))

    def test_no_client_is_no_row(self, choice):
        one = compressor(choice)
        assert one.unpack(one.pack(random_rows()[:0])).shape == (0, WIDTH)

    def test_zero_stays_zero(self, choice):
        one, rows = compressor(choice), torch.zeros(2, WIDTH)
        assert torch.equal(one.unpack(one.pack(rows)), rows)


def test_int8_is_within_half_a_level_of_every_entry():
    one, rows = compressor(CHOICES[0]), random_rows()
    level = rows.abs().amax(1, keepdim=True) / 127
    assert bool(((one.unpack(one.pack(rows)) - rows).abs() <= level / 2 * (1 + 1e-12)).all())


def test_topk_sends_the_largest_entries_exactly():
    one, rows = compressor(CHOICES[1]), random_rows()
    expected = rows * (rows.abs() >= rows.abs().sort(dim=1).values[:, -12, None])  # round(0.25 * 50) = 12
    assert torch.equal(one.unpack(one.pack(rows)), expected)


def test_randk_draws_the_same_places_for_all_clients_and_others_in_every_call():
    rows = torch.ones(3, WIDTH)
    found = [compressor(CHOICES[2], call=call) for call in (1, 2)]
    first, second = (one.unpack(one.pack(rows)) for one in found)
    assert torch.equal(first[0], first[2])
    assert int(first[0].sum()) == 12
    assert not torch.equal(first, second)


def test_randk_sends_every_entry_equally_often():
    rows, counts = torch.ones(1, 8), torch.zeros(8)
    for call in range(400):
        one = compressor(Choice("randk", 0.25), 8, call)
        counts += one.unpack(one.pack(rows))[0]
    assert bool(((counts - 100).abs() < 5 * (400 * 0.25 * 0.75) ** 0.5).all())


def test_powersgd_is_exact_for_matrices_of_its_rank_and_a_projection_for_others():
    left, right = torch.randn(8, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    low = (left @ right.T).reshape(1, -1)[:, :56]
    one = compressor(Choice("powersgd", 2), 56)
    assert float((one.unpack(one.pack(low)) - low).abs().max()) < 1e-12
    rows = random_rows(1, 56)
    sent = one.unpack(one.pack(rows))
    assert abs(float((sent * (rows - sent)).sum())) < 1e-12
