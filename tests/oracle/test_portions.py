"""Measurements of large models, minibatch by minibatch: the same figures, and no larger batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.oracle import portions

STEPS = {"lr_upper": 0.05, "lr_lower": 0.1, "lr_system": 0.1}
SIZES = [(9, 5, 7), (4, 8, 0), (13, 3, 2)]


def clients() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(2)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    some = lambda n: {"a": normal(n, 3), "b": normal(n, 1)}
    return [dict(zip(("train", "val", "test"), map(some, sizes), strict=True)) for sizes in SIZES]


def counting(seen: list[int], *, form: str, scopes: fb.Scopes = fb.Scopes(), scalar: bool = False) -> fb.Problem:
    """A ridge regression that notes the number of samples that it gets."""

    def error(y: Any, batch: Any) -> Tensor:
        seen.append(len(batch["weight"]))
        return (batch["a"] @ y["w"] - batch["b"][:, 0]) ** 2

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        decay = (x["log"].exp() * y["w"] ** 2).sum()
        if form == "per sample":
            return error(y, batch) + decay
        return (batch["weight"] * error(y, batch)).sum() + decay

    def statistics(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        found = error(y, batch)
        if scalar:
            return {"error": torch.where(batch["weight"] > 0, found, 0.0).sum(), "clients": found.new_ones(())}
        return {"error": found, "number": torch.ones_like(found)}

    x0 = {"log": torch.full((3,), -1.0, dtype=torch.float64)}
    return fb.Problem(
        upper=lambda x, y, batch: error(y, batch),
        lower=lower,
        x0=(lambda sizes: x0) if scopes.upper == "private" else x0,
        y0={"w": torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)},
        scopes=scopes,
        statistics={"test": statistics},
        metrics=lambda sums: {"test_error": sums["error"] / sums.get("number", sums.get("clients", 1.0))},
    )


def run(problem: fb.Problem, **options: Any) -> fb.Result:
    return fb.solve(
        problem, clients(), "fedbio", num_iterations=3, measure_every=1, batch_size=2, strategy="loop",
        dtype=torch.float64, stationarity=True, **{**STEPS, **options},
    )  # fmt: skip


@pytest.mark.parametrize("form", ["per sample", "own sum"])
@pytest.mark.parametrize("scopes", [fb.Scopes(), fb.Scopes("local", "private")])
def test_figures_of_minibatches_are_those_of_all_samples(form, scopes, monkeypatch):
    whole = run(counting([], form=form, scopes=scopes))
    monkeypatch.setattr(portions, "LARGE", 0)
    apart = run(counting([], form=form, scopes=scopes))
    assert len(whole.rows) == 4
    for one, other in zip(whole.rows, apart.rows, strict=True):
        figures = {"upper_loss", "lower_loss", "test_error", "lower_gradient", "residual", "hypergradient"} & set(one)
        assert len(figures) == 6, sorted(one)
        assert {name: other[name] for name in figures} == pytest.approx({name: one[name] for name in figures}, rel=1e-9)


def test_a_measurement_never_sees_more_samples_than_a_step(monkeypatch, tmp_path):
    def largest(folder: str) -> int:
        seen: list[int] = []
        run(counting(seen, form="per sample"), record=tmp_path / folder, callbacks=[lambda now: seen.append(0)])
        return max(seen[seen.index(0) :])  # checks before the first outer iteration try a few padded samples

    assert largest("whole") == 13
    monkeypatch.setattr(portions, "LARGE", 0)
    assert largest("apart") == 2


def test_scalar_statistics_are_measured_at_once(monkeypatch):
    """The number of clients must not become the number of minibatches."""
    whole = run(counting([], form="per sample", scalar=True)).rows[-1]["test_error"]
    monkeypatch.setattr(portions, "LARGE", 0)
    assert run(counting([], form="per sample", scalar=True)).rows[-1]["test_error"] == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("batch_size", "limit"), [(None, None), (3, 3), ({"train": 3, "val": 5}, 5), ({"train": 3}, None)]
)
def test_only_a_run_with_minibatches_of_both_levels_measures_minibatches(batch_size, limit, monkeypatch):
    from fedbilevel.algorithms.fedbio import FedBiO
    from fedbilevel.federation.host import Host

    problem = counting([], form="per sample")
    assert Host(FedBiO(), problem, clients(), batch_size=batch_size).limit is None  # a small model
    monkeypatch.setattr(portions, "LARGE", 0)
    assert Host(FedBiO(), problem, clients(), batch_size=batch_size).limit == limit
