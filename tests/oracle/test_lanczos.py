"""Extreme eigenvalues against dense algebra."""

import pytest
import torch

from fedbilevel.oracle.lanczos import lanczos


@pytest.mark.parametrize("size", [1, 2, 6, 40])
def test_lanczos_finds_both_ends_of_definite_and_indefinite_matrices(size):
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(3, size, size, dtype=torch.float64, generator=generator)
    matrices = torch.stack([root[0] @ root[0].T, root[1] + root[1].T, torch.eye(size, dtype=torch.float64)])
    low, high = lanczos(lambda v: (matrices @ v[:, :, None])[:, :, 0], root[:, 0], 40)
    values = torch.linalg.eigvalsh(matrices)
    assert torch.allclose(high, values[:, -1], rtol=1e-2)
    assert torch.allclose(low, values[:, 0], rtol=1e-2, atol=1e-2 * float(values.max()))
