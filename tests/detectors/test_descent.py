"""Conjugate gradients and bounded steps of the server, on small dense systems."""

from __future__ import annotations

import torch

from fedbilevel.detectors._descent import bound_of, bounded_step, conjugate


def system():
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(40, 4, generator=draw, dtype=torch.float64)
    p = torch.randn(40, 3, generator=draw, dtype=torch.float64).softmax(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    hessian = torch.einsum("ja,jb,jkl->akbl", z, z, inner).reshape(12, 12) / 40 + 0.1 * torch.eye(12)
    right = torch.randn(2, 4, 3, generator=draw, dtype=torch.float64)
    return z, hessian, right


def test_conjugate_gradients_solve_two_systems_in_as_many_rounds_as_there_are_unknowns():
    z, hessian, right = system()
    rounds = []

    def product(ways):
        rounds.append(1)
        return (ways.flatten(1) @ hessian).view(ways.shape)

    bound = bound_of(z.T @ z, torch.tensor(40.0), 0.1)
    found = conjugate(product, right, bound, 12, 1e-15)
    wanted = torch.linalg.solve(hessian, right.flatten(1).T).T.view(right.shape)
    assert torch.allclose(found, wanted, atol=1e-10)
    assert len(rounds) == 12
    rounds.clear()
    rough = conjugate(product, right, bound, 12, 0.1)
    rest = right - (rough.flatten(1) @ hessian).view(right.shape)
    assert bool((rest.flatten(1).norm(dim=1) <= 0.1 * right.flatten(1).norm(dim=1)).all())
    assert 0 < len(rounds) < 6
    assert not bool(conjugate(product, right * 0, bound, 12, 0.1).any())


def test_the_bound_is_above_the_hessian():
    z, hessian, _ = system()
    bound = torch.kron(bound_of(z.T @ z, torch.tensor(40.0), 0.1), torch.eye(3))
    assert float(torch.linalg.eigvalsh(bound - hessian).min()) > -1e-12


def test_extrapolation_starts_anew_after_a_step_uphill():
    one = torch.eye(1, dtype=torch.float64)
    point = lambda value: torch.tensor([[value]], dtype=torch.float64)
    new, ahead, age = bounded_step(one, point(0.5), point(1.0), point(2.0), 3)  # goes on downhill
    assert (float(new), age, float(ahead)) == (0.5, 4, 0.5 - 4 / 7 * 1.5)
    new, ahead, age = bounded_step(one, point(0.5), point(1.0), point(0.0), 3)  # uphill from the last point
    assert (float(new), age, float(ahead)) == (0.5, 0, 0.5)
