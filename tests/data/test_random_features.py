"""Random convolutional features against loops in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbilevel.data.random_features import RandomConvolutions
from fedbilevel.errors import ProblemError


@pytest.mark.parametrize(
    ("pixels", "side", "channels", "num"), [(784, 28, 1, 1200), (64, 8, 1, 432), (3072, 32, 3, 1728)]
)
def test_features_are_pooled_responses_of_the_filters(pixels, side, channels, num):
    random = RandomConvolutions.of(pixels, seed=3)
    assert (random.side, random.channels, random.num_features) == (side, channels, num)
    images = np.random.default_rng(0).random((2, pixels))
    found = random(torch.tensor(images))
    assert found.shape == (2, num)
    filters, thresholds = (part.numpy() for part in random.filters())
    assert np.linalg.norm(filters.reshape(48, -1), axis=1) == pytest.approx(np.ones(48))
    assert filters.reshape(48, -1).mean(1) == pytest.approx(np.zeros(48), abs=1e-12)
    k, s, image = random.kernel, random.stride, images[1].reshape(channels, side, side)
    wide = (side - k) // s + 1
    f, row, column = 17, 1, wide // 2 - 1
    square = [
        max(0.0, (image[:, s * i : s * i + k, s * j : s * j + k] * filters[f]).sum() - thresholds[f])
        for i in (2 * row, 2 * row + 1)
        for j in (2 * column, 2 * column + 1)
    ]
    assert float(found.view(2, 48, wide // 2, wide // 2)[1, f, row, column]) == pytest.approx(10 * np.mean(square))


def test_the_filters_depend_on_the_seed_only():
    torch.manual_seed(1)
    first = RandomConvolutions(28).filters()[0]
    torch.manual_seed(2)
    assert torch.equal(RandomConvolutions(28).filters()[0], first)
    assert not torch.equal(RandomConvolutions(28, seed=1).filters()[0], first)
    assert RandomConvolutions(28)(torch.zeros(0, 784)).shape == (0, 1200)


def test_samples_that_are_no_square_images_are_refused():
    for pixels in (25, 50, 785):
        with pytest.raises(ProblemError, match="square images"):
            RandomConvolutions.of(pixels)
