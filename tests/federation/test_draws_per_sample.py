"""Random numbers per sample: their address, their range, and that two evaluations of a batch share them."""

from __future__ import annotations

import pytest
import torch

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.client_data import ClientData


def clients_of(*sizes):
    rng = torch.Generator().manual_seed(1)
    roles = lambda n: {
        role: {"a": torch.randn(n, 2, generator=rng), "b": torch.randn(n, generator=rng)} for role in ("train", "val")
    }
    return [roles(n) for n in sizes]


def problem_of(loss, **more):
    lower = lambda x, y, batch: loss(x, y, batch) + x["s"].exp() * (y["w"] ** 2).sum()
    return fb.Problem(
        upper=lambda x, y, batch: (batch["a"] @ y["w"] - batch["b"]) ** 2,
        lower=lower, x0={"s": torch.tensor(-2.0)}, y0={"w": torch.zeros(2)}, **more,
    )  # fmt: skip


def shifted(x, y, batch):
    a = batch["a"] + (batch["draw"] - 0.5 if "draw" in batch else 0.0)
    return (a @ y["w"] - batch["b"]) ** 2


def run(problem, clients, algorithm="fedbio", **more):
    steps = {"lr_upper": 0.1, "lr_lower": 0.1}
    return fb.solve(problem, clients, algorithm, **{"num_iterations": 6, "dtype": torch.float64, **steps, **more})


def test_numbers_are_uniform_and_differ_between_samples_steps_and_iterations():
    numbers = []

    def loss(x, y, batch):
        if "draw" in batch:
            numbers.append(batch["draw"].detach().clone())
        return shifted(x, y, batch)

    fb.solve(
        problem_of(loss, draws={"train": 2}), clients_of(400), "fedavg", num_iterations=5, num_local_steps=2,
        lr_lower=0.1, strategy="loop",
    )  # fmt: skip
    values = torch.stack([one for one in numbers if len(one) == 400])
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert float(values.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(values.var()) == pytest.approx(1 / 12, abs=0.01)
    steps = {tuple(one[0].tolist()) for one in values}
    assert len(steps) == 10  # five outer iterations of two steps
    assert len(values[0].unique()) > 790  # 800 numbers of 24 bits


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("algorithm", ["fedbio", "fedbioacc", "fbo_aggitd", "penalty"])
def test_a_run_is_the_same_for_every_strategy_and_after_a_resume(tmp_path, algorithm, batch_size):
    problem, clients = problem_of(shifted, draws={"train": 2}), clients_of(4, 7, 5)
    more = {"batch_size": batch_size, "cohort": Cohort(0.7)}
    whole = run(problem, clients, algorithm, strategy="loop", **more)
    other = run(problem, clients, algorithm, strategy="vmap", **more)
    plain = run(problem_of(shifted), clients, algorithm, strategy="loop", **more)
    assert torch.allclose(whole.y["w"], other.y["w"], rtol=1e-12, atol=1e-14)  # padding changes no draw
    assert not torch.allclose(whole.y["w"], plain.y["w"], rtol=1e-3)
    run(problem, clients, algorithm, strategy="loop", num_iterations=3, record=tmp_path / "r", **more)
    resumed = run(problem, clients, algorithm, strategy="loop", record=tmp_path / "r", resume=True, **more)
    assert torch.equal(resumed.y["w"], whole.y["w"])
    assert torch.equal(resumed.x["s"], whole.x["s"])


def test_draws_of_all_samples_share_one_copy_of_the_data():
    data = ClientData(clients_of(4, 7, 5))
    whole = data.batch(data.positions, "train")
    one, two = (whole.drawn(torch.rand(3, 7, 2)) for _ in range(2))
    assert one.fields["a"] is two.fields["a"]
    assert not torch.equal(one.fields["draw"], two.fields["draw"])
    assert "draw" not in whole.fields


def test_measurements_draw_nothing():
    problem, clients = problem_of(shifted, draws={"train": 2}), clients_of(4, 7)
    result = run(problem, clients, num_iterations=1)
    plain = run(problem_of(shifted), clients, num_iterations=1)
    assert result.rows[0]["lower_loss"] == plain.rows[0]["lower_loss"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"draws": {"train": 0}}, "expected a number of random numbers per sample for each role"),
        ({"draws": 3}, "expected a number of random numbers per sample for each role"),
        ({"draws": {"train": 1}, "features": lambda x, batch: batch["a"]}, "compute the features inside the losses"),
    ],
)
def test_draws_that_make_no_sense_are_refused(more, sentence):
    with pytest.raises(ProblemError, match=sentence):
        problem_of(shifted, **more)


def test_a_loss_that_fails_with_draws_is_refused_before_the_run():
    def broken(x, y, batch):
        return shifted(x, y, batch) if "draw" not in batch else batch["draw"][:, 5]

    with pytest.raises(ProblemError, match="failed on a batch of the first client with 2 draws per sample"):
        run(problem_of(broken, draws={"train": 2}), clients_of(4))
