"""FedEM on mixtures of Gaussians, where every responsibility can be written down."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedem import FedEM
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Cohort, Kept
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.by_hand import states
from support.numeric.yardstick import check_continues, drive, relative

CENTRES = np.array([[-2.0, 0.5], [2.5, 1.0], [0.0, -3.0]])
SHARES = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2], [0.34, 0.33, 0.33]])
LOG_PI0 = np.log([0.5, 0.3, 0.2])
Y0 = np.array([[-1.0, 0.0], [1.0, 0.2], [0.3, -1.0]])


def mixture(
    *,
    softmax: bool = False,
    lower: Any = "global",
    client_weights: Any = "equal",
    sizes: tuple[int, ...] = (40, 55, 70, 60),
) -> Built:
    """Unit Gaussians around y_m; clients draw from the same ones in their own proportions."""
    rng = np.random.default_rng(5)

    def draw(i: int, num: int) -> dict[str, np.ndarray]:
        return {"s": CENTRES[rng.choice(3, size=num, p=SHARES[i])] + rng.standard_normal((num, 2))}

    def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:
        log_pi = x["log_pi"].log_softmax(0) if softmax else x["log_pi"]
        log_p = -0.5 * ((batch["s"][:, None] - y["centre"]) ** 2).sum(2) - np.log(2 * np.pi)
        return -(batch["weight"] * (log_pi + log_p).logsumexp(1)).sum()

    x0 = {"log_pi": torch.tensor(LOG_PI0)}
    problem = Problem(
        upper=loss,
        lower=loss,
        x0=lambda sizes: x0,
        y0={"centre": torch.tensor(Y0)},
        scopes=Scopes(lower, "private"),
        client_weights=client_weights,
        name="mixture",
    )
    return Built(problem, [{"train": draw(i, num), "val": draw(i, 5)} for i, num in enumerate(sizes)])


def responsibilities(samples: np.ndarray, log_pi: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """(samples, components)."""
    joint = np.exp(log_pi) * np.exp(-0.5 * ((samples[:, None] - centres) ** 2).sum(2))
    return joint / joint.sum(1, keepdims=True)


@pytest.mark.parametrize("lower", ["global", "local"])
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_agrees_with_em_by_hand(weights: Any, lower: Any) -> None:
    """pi is the mean responsibility; centre m moves along the mean of q_m (s - centre_m).

    The step on a centre uses the new pi and the current q."""
    built, lr, counts = mixture(client_weights=weights, lower=lower), 0.3, (2, 3, 1, 2)
    data = [client["train"]["s"] for client in built.clients]
    share = (
        np.array([len(s) for s in data]) / sum(len(s) for s in data) if weights == "by_samples" else np.full(4, 0.25)
    )
    log_pi, centres = [LOG_PI0] * 4, [Y0] * 4
    for k, (fed, state) in enumerate(states(FedEM(lr_lower=lr, num_local_steps=counts), built, 4)):
        if k > 0:
            for i in range(4):
                log_pi[i] = np.log(responsibilities(data[i], log_pi[i], centres[i]).mean(0))
                for _ in range(counts[i]):
                    q = responsibilities(data[i], log_pi[i], centres[i])
                    centres[i] = centres[i] + lr * (q[:, :, None] * (data[i][:, None] - centres[i])).mean(0)
            centres = centres if lower == "local" else [np.tensordot(share, np.stack(centres), axes=1)] * 4
        np.testing.assert_allclose(fed.collect(state.x).exp(), np.exp(log_pi), rtol=1e-12)
        np.testing.assert_allclose(
            fed.collect(state.y).expand(4, -1), np.stack(centres).reshape(4, -1), rtol=1e-12, atol=1e-13
        )
        assert isinstance(state.x, Kept)


def test_the_proportions_come_from_all_samples_even_with_minibatches() -> None:
    built = mixture()
    fed, state = drive(FedEM(num_local_steps=2), built, 1, batch_size=3)
    expected = [responsibilities(client["train"]["s"], LOG_PI0, Y0).mean(0) for client in built.clients]
    np.testing.assert_allclose(fed.collect(state.x).exp(), expected, rtol=1e-12)
    assert fed.ledger.columns["samples"].tolist() == [size + 2 * 3 for size in (40, 55, 70, 60)]


def test_a_loss_that_takes_the_softmax_of_x_gives_the_same_run() -> None:
    plain, state = drive(FedEM(num_local_steps=2), mixture(), 5)
    other, same = drive(FedEM(num_local_steps=2), mixture(softmax=True), 5)
    np.testing.assert_allclose(other.collect(same.x), plain.collect(state.x), rtol=1e-12)
    np.testing.assert_allclose(same.y, state.y, rtol=1e-12)


def test_the_loss_never_rises_and_the_mixture_is_found() -> None:
    """One local step with all samples is an EM step of pi, then a descent step of y.

    The descent step is at most one over the curvature, and the curvature is at most one."""
    losses = []
    for fed, state in states(FedEM(lr_lower=0.9, num_local_steps=1), mixture(sizes=(150, 150, 150, 150)), 80):
        losses.append(fed.measure(state.x, state.y)["lower_loss"])
        np.testing.assert_allclose(fed.collect(state.x).exp().sum(1), 1, rtol=1e-12)
    losses = losses[1:]  # the first pi is not normalised by a step
    assert np.all(np.diff(losses) <= 1e-14)
    assert losses[0] - losses[-1] > 0.2
    assert (
        np.abs(state.y.reshape(3, 2).numpy() - CENTRES).max() < 0.3
    )  # some 150 samples per component: three standard errors
    assert np.abs(fed.collect(state.x).exp().numpy() - SHARES).max() < 0.13


def test_no_component_is_lost_for_good() -> None:
    built = mixture()
    far = dataclasses.replace(built.problem, y0={"centre": torch.tensor([[0.0, 0.0], [40.0, 0.0], [0.0, -40.0]])})
    fed, state = drive(FedEM(least_share=1e-4), Built(far, built.clients), 2)
    share = fed.collect(state.x).exp()
    np.testing.assert_allclose(share[:, 1:], 1e-4 / (1 + 2e-4), rtol=1e-9)
    np.testing.assert_allclose(share.sum(1), 1, rtol=1e-14)


def test_on_a_loss_that_is_no_mixture_x_stays_finite_and_normalised() -> None:
    fed, state = drive(FedEM(), Quadratic(upper="private").build(), 5)
    share = fed.collect(state.x).exp()
    assert bool(torch.isfinite(fed.collect(state.x)).all())
    assert float(share.min()) < 1e-6  # the floor was needed
    np.testing.assert_allclose(share.sum(1), 1, rtol=1e-12)


def test_ledger() -> None:
    times, counts = torch.zeros(4, dtype=torch.int64), torch.tensor([2, 1, 3, 2])
    for k, (fed, _) in enumerate(
        states(FedEM(num_local_steps=(2, 1, 3, 2)), mixture(), 4, cohort=Cohort(0.5), batch_size=3)
    ):
        ledger = fed.ledger.columns
        times += ledger["gx"] > times
        assert int(times.sum()) == 2 * k
        assert fed.ledger.rounds == k
        assert torch.equal(ledger["floats_up"], 6 * times)
        assert torch.equal(ledger["floats_down"], 6 * times)  # x never travels
        assert torch.equal(ledger["gx"], times)
        assert torch.equal(ledger["gy"], counts * times)
        assert torch.equal(ledger["samples"], (torch.tensor([40, 55, 70, 60]) + 3 * counts) * times)
        assert all(int(ledger[name].sum()) == 0 for name in ("fx", "fy", "hvp", "jvp"))


@pytest.mark.parametrize("lower", ["global", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(lower: Any) -> None:
    check_continues(FedEM(num_local_steps=(2, 1, 3, 2)), mixture(lower=lower))


def test_who_is_not_in_the_cohort_keeps_its_proportions() -> None:
    fed, state = drive(FedEM(), mixture(), 1, cohort=Cohort(0.5))
    there = fed.ledger.columns["gx"] == 1
    start = torch.tensor(LOG_PI0).expand(4, -1)
    assert int(there.sum()) == 2
    assert torch.equal((fed.collect(state.x) != start).any(1), there)
    assert relative(state.y, Y0.ravel()) > 1e-2


def test_a_shared_x_is_refused() -> None:
    with pytest.raises(ScopeError, match="proportions in which each client mixes"):
        FedEM().check_scopes(Scopes())
