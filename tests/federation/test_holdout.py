"""Validation samples that only choose the best state."""

import dataclasses

import pytest
import torch

from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.federation.clients import HELD
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive


def parts(built, **settings):
    return drive(SelfTuned(**settings), built, 0)[0].host.parts


def test_every_sample_is_fitted_or_held_out():
    built = Quadratic(num_clients=3, num_samples=10).build()
    found = parts(built, holdout=0.3)
    assert found[HELD].sizes[HELD].tolist() == [3, 3, 4]
    for i, client in enumerate(built.clients):
        rows = [found[role].batch(torch.tensor([i]), role).row(0, ["r"])["r"] for role in ("val", HELD)]
        together = torch.cat(rows).sort(0)[0]
        torch.testing.assert_close(together, torch.from_numpy(client["val"]["r"]).sort(0)[0], rtol=0, atol=0)


@pytest.mark.parametrize("num", [1, 2])
def test_a_client_with_one_or_two_samples_uses_them_for_both(num):
    built = Quadratic(num_clients=1, num_samples=num).build()
    found = parts(built)
    assert found["val"].sizes["val"].tolist() == found[HELD].sizes[HELD].tolist() == [num]
    _, state = drive(SelfTuned(), built, 12)
    assert bool(torch.isfinite(state.x).all())


def test_nothing_is_held_out_without_a_share_or_without_learning_x():
    built = Quadratic().build()
    assert parts(built, holdout=0) == parts(built, learn_x=False) == {}


@pytest.mark.parametrize("read", [lambda batch: batch["index"], lambda batch: batch.get("index")])
def test_nothing_is_held_out_where_the_upper_loss_reads_numbers_of_samples(read):
    plain = Quadratic().build()
    upper = lambda x, y, batch: plain.problem.upper(x, y, batch) + 0 * read(batch).sum()
    built = plain._replace(problem=dataclasses.replace(plain.problem, upper=upper))
    found = parts(built)
    assert list(found) == [HELD]
    assert found[HELD].sizes[HELD].tolist() == [4, 5, 6, 7, 8]
    assert drive(SelfTuned(), built, 2)[0].ledger.rounds == 3
