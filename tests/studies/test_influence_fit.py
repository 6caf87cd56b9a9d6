"""fb.influence: predictions, plain scores and retraining against dense algebra on ridge regression."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.studies.influence.fit import default_method
from fedbilevel.studies.influence.plain import rank_correlation
from fedbilevel.tasks.influence import Influence

L2 = 0.1
SIZES = (14, 9, 20)


def clients_of(seed: int = 0) -> list[dict[str, dict[str, np.ndarray]]]:
    """Three clients of different sizes, whose inputs have different scales and some labels are wrong."""
    rng = np.random.default_rng(seed)
    truth, found = rng.standard_normal(4), []
    for i, size in enumerate(SIZES):
        roles = {}
        for role, n in (("train", size), ("val", 7 + i)):
            a = rng.standard_normal((n, 4)) * (1 + i) * np.array([3, 1, 0.5, 0.2])
            roles[role] = {"a": a, "b": a @ truth + 0.3 * rng.standard_normal(n)}
        roles["train"]["b"][:2] *= -1
        found.append(roles)
    return found


def loss(y, batch):
    return 0.5 * (batch["a"] @ y["w"] - batch["b"]) ** 2


def trained(clients, removed=None) -> np.ndarray:
    """The minimiser of the mean over clients of the masked mean loss; the factor 1/n_i stays."""
    h, c = L2 * np.eye(4), np.zeros(4)
    for i, client in enumerate(clients):
        a, b = client["train"]["a"], client["train"]["b"]
        mask = np.ones(len(b))
        if removed is not None and removed[0] == i:
            mask[removed[1]] = 0
        h += (a * mask[:, None]).T @ a / len(b) / len(clients)
        c += (a * mask[:, None]).T @ b / len(b) / len(clients)
    return np.linalg.solve(h, c)


def total(clients, w) -> float:
    return sum(0.5 * np.mean((client["val"]["a"] @ w - client["val"]["b"]) ** 2) for client in clients)


def expected(clients) -> dict[tuple[int, int], dict[str, float]]:
    """Predictions and plain scores by dense algebra, and actual changes by solving again."""
    w, n = trained(clients), len(clients)
    h = L2 * np.eye(4) + sum(c["train"]["a"].T @ c["train"]["a"] / len(c["train"]["b"]) for c in clients) / n
    slope = lambda role, w: [(c[role]["a"].T @ (c[role]["a"] @ w - c[role]["b"])) / len(c[role]["b"]) for c in clients]
    fy = lambda w: sum(slope("val", w)) / n
    u = np.linalg.solve(h, fy(w))
    path, now, step = [], np.zeros(4), 1 / np.linalg.eigvalsh(h).max()
    for number in range(1, 41):
        now = now - step * (sum(slope("train", now)) / n + L2 * now)
        path += [now] if number % 8 == 0 else []
    found = {}
    for i, client in enumerate(clients):
        for j, (a, b) in enumerate(zip(client["train"]["a"], client["train"]["b"], strict=True)):
            by = lambda w, v, a=a, b=b, m=len(client["train"]["b"]): float((a @ w - b) * (a @ v)) / m
            found[i, j] = {
                "predicted": by(w, u), "gradient_product": by(w, fy(w)),
                "trajectory": sum(by(at, fy(at)) for at in path), "own_loss": 0.5 * (a @ w - b) ** 2,
                "actual": total(clients, trained(clients, (i, j))) - total(clients, w),
            }  # fmt: skip
    return found


def fitted(clients, **more):
    return fb.influence(loss, clients, y0={"w": torch.zeros(4)}, l2=L2, **more)


def test_predictions_scores_and_retraining_are_those_of_dense_algebra():
    clients = clients_of()
    exact = expected(clients)
    found = fitted(clients, num_removed=sum(SIZES))
    assert len(found.samples) == sum(SIZES)
    np.testing.assert_allclose(found.y["w"].numpy(), trained(clients), rtol=1e-9)
    for one in found.samples:
        for name, value in exact[one.client, one.sample].items():
            assert getattr(one, name) == pytest.approx(value, rel=1e-6, abs=1e-12), name
    assert [one.predicted for one in found.samples] == sorted(one.predicted for one in found.samples)
    assert found.method == "cg"
    assert found.cost["rounds"] <= 8  # four unknowns, and the residual
    assert found.residual < 1e-8


def test_the_prediction_orders_removals_as_exact_retraining_and_better_than_plain_scores():
    clients = clients_of()
    exact = expected(clients)
    ranks = fitted(clients, num_removed=sum(SIZES)).rank_correlations()
    assert ranks["predicted"] > 0.98
    assert all(ranks["predicted"] > ranks[name] + 0.02 for name in ("gradient_product", "trajectory", "own_loss"))
    own = rank_correlation([-one["own_loss"] for one in exact.values()], [one["actual"] for one in exact.values()])
    assert ranks["own_loss"] == pytest.approx(own)


def test_ranks_of_ties_are_means_and_a_constant_has_no_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 25]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)  # ranks 0.5, 0.5, 2
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_a_given_model_is_used_as_it_is_and_peers_use_hgp():
    clients = clients_of()
    w = trained(clients)
    other = fitted(clients, y={"w": torch.tensor(w + 0.1)})
    exact, moved = fitted(clients, y={"w": torch.tensor(w)}), torch.tensor(w + 0.1)
    assert torch.equal(other.y["w"], moved)
    assert exact.samples[0].predicted == pytest.approx(fitted(clients).samples[0].predicted, rel=1e-8)
    assert other.samples[0].predicted != pytest.approx(exact.samples[0].predicted, rel=1e-3)
    step = 0.008
    peers = fitted(
        clients, network=fb.Network(kind="complete"), method=fb.algorithms.HGP(lr_system=step, num_terms=3000)
    )
    assert peers.method == "hgp"
    assert [(one.client, one.sample) for one in peers.harmful(5)] == [
        (one.client, one.sample) for one in exact.harmful(5)
    ]
    assert default_method(network=fb.Network()) == default_method(averaging=fb.Averaging()) == "hgp"
    assert (default_method(), default_method(convex=False)) == ("cg", "series")
    assert default_method(network=fb.Network(), convex=False) == "hgp"


def test_the_listing_has_both_ends_of_the_table_and_the_plot_compares_removals(tmp_path):
    found = fitted(clients_of(), num_removed=3)
    rows = found.table()
    assert [row["predicted"] for row in rows] == [one.predicted for one in found.samples]
    lines = found.listing(2).splitlines()
    assert (lines[0], lines[4]) == ("most harmful", "most helpful")
    assert lines[1].split() == ["client", "sample", "predicted", "gradient", "trajectory", "own", "loss", "actual"]
    for line, one in zip(lines[2:4] + lines[6:8], found.harmful(2) + found.helpful(2), strict=True):
        assert line.split()[:3] == [str(one.client), str(one.sample), f"{one.predicted:+.3g}"]
    assert found.helpful(1)[0].predicted == max(one.predicted for one in found.samples)
    [axes] = found.plot(tmp_path / "removals.png").axes
    assert (tmp_path / "removals.png").stat().st_size > 1000
    assert len(axes.collections[-1].get_offsets()) == 3
    with pytest.raises(SettingError, match=r"^no sample was removed, so there are no actual changes: give influence "):
        fitted(clients_of()).rank_correlations()


def test_without_removals_the_plot_shows_how_predictions_are_distributed_and_both_ends(tmp_path):
    found = fitted(clients_of())
    figure = found.plot(tmp_path / "predictions.png", most=2)
    assert (tmp_path / "predictions.png").stat().st_size > 1000
    left, right = figure.axes
    assert sum(bar.get_height() for bar in left.patches) == sum(SIZES)
    ends = [*found.harmful(2), *reversed(found.helpful(2))]
    assert [bar.get_width() for bar in right.patches] == [one.predicted for one in ends]
    names = [text.get_text() for text in right.get_yticklabels()]
    assert names == [f"client {one.client}, no. {one.sample}" for one in ends]


def test_a_notebook_shows_both_ends_and_what_was_not_tried():
    html = fitted(clients_of(), num_removed=1)._repr_html_()
    found = fitted(clients_of())
    assert f"Influence by cg: {sum(one.predicted < 0 for one in found.samples)} of 43 samples harm" in html
    assert html.count("not tried") == 19  # of ten harmful and ten helpful samples, one was removed
    for one in (*found.harmful(10), *found.helpful(10)):
        assert f">{one.predicted:+.3g}<" in html


def test_a_task_needs_no_clients_and_tens_of_rounds():
    found = fb.influence(Influence(num_train=20, num_val=10))
    assert len(found.samples) == 60
    assert found.cost["rounds"] < 50
    assert repr(found).startswith("<influence by cg: ")


def test_arguments_that_do_not_fit_are_refused():
    clients = clients_of()
    with pytest.raises(ProblemError, match=r"^clients is None, expected the data of every client"):
        fb.influence(loss, y0={"w": torch.zeros(4)})
    with pytest.raises(ProblemError, match=r"^problem is of type function and y0 of type NoneType, expected a Problem"):
        fb.influence(loss, clients)
    with pytest.raises(SettingError, match=r"^num_removed is -1, expected at least 0\.$"):
        fitted(clients, num_removed=-1)
