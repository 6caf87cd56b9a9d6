"""The comparison of a run with y trained at a fixed x."""

import dataclasses
import json
import signal
import warnings

import numpy as np
import pytest
import torch

from fedbilevel import Problem, Scopes, compare, solve
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.problem.draws import Stream
from fedbilevel.report import page_data
from fedbilevel.runs import baseline
from fedbilevel.runs.baseline import Baseline, Point, compared, plain_run, with_unseen
from fedbilevel.studies.compare import FIXED
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic

STEPS = FedBiO(lr_upper=0.05, lr_lower=0.2, lr_system=0.2, num_local_steps=1)


def shifted(shift, *, num=40, tested=False, seed=0, relevant=1.0):
    """Return a problem whose validation targets are those of training plus a shift.

    y is a mean, and x is added to the training targets, so that x = shift is the solution:
    y*(x) = a + relevant * x with the mean a of the training targets.
    """
    draw = np.random.default_rng(seed)
    error = lambda x, y, batch: (batch["b"] - y["m"]) ** 2
    mean_error = {
        "statistics": {"test": lambda x, y, batch: {"error": error(x, y, batch), "n": torch.ones_like(batch["b"])}},
        "metrics": lambda sums: {"test_error": sums["error"] / sums["n"]},
    }
    problem = Problem(
        upper=error,
        lower=lambda x, y, batch: (batch["b"] + relevant * x["c"] - y["m"]) ** 2,
        x0={"c": torch.tensor(0.0)},
        y0={"m": torch.tensor(0.0)},
        **(mean_error if tested else {}),
    )
    make = lambda by: {"b": (by + draw.normal(size=num)).astype(np.float32)}
    roles = {"train": 1.0, "val": 1.0 + shift, **({"test": 1.0 + shift} if tested else {})}
    return problem, [{role: make(by) for role, by in roles.items()} for _ in range(3)]


def test_learning_a_shift_changes_the_test_error_by_its_closed_form():
    """The error at x0 exceeds the variance by the square of the shift."""
    problem, clients = shifted(2.0, tested=True, num=400)
    result = solve(problem, clients, STEPS, num_iterations=150, baseline=True)
    found = result.baseline
    assert found.figure == "test_error"
    assert found.fixed == pytest.approx(1.0 + 2.0**2, rel=0.1)
    assert found.learned == pytest.approx(1.0, rel=0.1)
    assert found.difference == pytest.approx(100 * (found.learned - found.fixed) / found.fixed)
    assert found.low < found.difference < found.high < 0
    assert found.helped
    assert found.sentence.startswith("learning x changed test_error by -8")
    assert found.sentence in repr(result)
    assert found.sentence[1:] in result._repr_html_()


@pytest.mark.parametrize("tested", [True, False])
def test_x_that_starts_at_its_optimum_does_not_help(tested):
    problem, clients = shifted(0.0, tested=tested, num=400)
    found = solve(problem, clients, STEPS, num_iterations=60, baseline=True).baseline
    assert found.figure == ("test_error" if tested else "held_out_loss")
    assert found.learned == pytest.approx(found.fixed, rel=0.05)
    assert not found.helped
    assert found.sentence.startswith("learning x is not shown to help")


def test_costs_of_the_plain_run_are_apart(tmp_path):
    problem, clients = shifted(1.0, tested=True)
    alone = solve(problem, clients, STEPS, num_iterations=20)
    both = solve(problem, clients, STEPS, num_iterations=20, baseline=True, record=tmp_path / "run")
    assert both.ledger == alone.ledger
    assert torch.equal(both.x["c"], alone.x["c"])
    plain = solve(problem, clients, plain_run(), num_rounds=20)
    assert both.baseline.costs == dict(plain.ledger)
    stored = json.loads((tmp_path / "run" / "baseline.json").read_text())
    assert stored["sentence"] == both.baseline.sentence
    assert stored["costs"]["rounds"] == 20
    [run] = page_data.read([tmp_path / "run"])["runs"]
    assert run["notes"] == [f"L{both.baseline.sentence[1:]}."]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["baseline"] is True


def test_baseline_of_an_algorithm_that_leaves_x_fixed_is_skipped():
    problem, clients = shifted(1.0, tested=True)
    assert solve(problem, clients, FedAvg(), num_iterations=5, baseline=True).baseline is None


@pytest.mark.slow
def test_cleaning_noisy_labels_helps():
    built = DataCleaning(noise=0.4).build()
    method = FedBiO(**{"lr_upper": 100.0, "lr_lower": 0.5, "lr_system": 0.5, **DataCleaning.suggestions("fedbio")})
    found = solve(*built, method, num_iterations=400, measure_every=100, baseline=True).baseline
    assert (found.figure, found.unit) == ("test_accuracy", "points")
    assert found.helped


def test_interval_of_the_bootstrap_covers_the_true_difference():
    """With y = 1 against y = 0, the difference of the means of b * y is the mean of b."""
    problem = Problem(
        upper=lambda x, y, batch: batch["b"] * y["m"],
        lower=lambda x, y, batch: (batch["b"] - y["m"]) ** 2,
        x0={"c": torch.zeros(())},
        y0={"m": torch.zeros(())},
        statistics={"test": lambda x, y, batch: {"v": batch["b"] * y["m"], "n": torch.ones_like(batch["b"])}},
        metrics=lambda sums: {"test_value": sums["v"] / sums["n"]},
    )
    x, means = {"c": torch.zeros(())}, (0.5, -0.2, 1.0)
    covered = []
    for seed in range(150):
        draw = np.random.default_rng(seed)
        some = {role: {"b": np.zeros(1, dtype=np.float32)} for role in ("train", "val")}
        clients = [{**some, "test": {"b": draw.normal(mean, 1 + i, 60)}} for i, mean in enumerate(means)]
        points = [Point(x, {"m": torch.tensor(value)}) for value in (1.0, 0.0)]
        found = compared(problem, clients, *points, {}, seed=seed, dtype=torch.float64)
        assert found.difference == pytest.approx(np.mean([one["test"]["b"].mean() for one in clients]))
        covered.append(found.low <= np.mean(means) <= found.high)
    assert 0.88 <= np.mean(covered) <= 0.99  # 95 %, within 3.5 standard errors
    again = compared(problem, clients, *points, {}, seed=149, dtype=torch.float64)
    assert again == found


@pytest.mark.parametrize(("num_clients", "num"), [(30, 1), (10, 3)])
def test_interval_of_many_clients_with_few_samples_is_as_wide_as_that_of_one_client_with_all(num_clients, num):
    """Resampling within clients of one sample would give an interval without any width."""
    problem, _ = shifted(1.0, tested=True)
    values = np.random.default_rng(0).normal(size=num_clients * num).astype(np.float32)
    some = {role: {"b": np.zeros(1, dtype=np.float32)} for role in ("train", "val")}
    points = [Point({"c": torch.zeros(())}, {"m": torch.tensor(value)}) for value in (1.0, 0.0)]
    widths = []
    for parts in (np.split(values, num_clients), [values]):
        clients = [{**some, "test": {"b": part}} for part in parts]
        found = compared(problem, clients, *points, {}, seed=0, dtype=torch.float64)
        widths.append(found.high - found.low)
    assert widths[0] == pytest.approx(widths[1], rel=0.1)


def test_one_value_has_no_interval_and_does_not_show_that_x_helped():
    problem, clients = shifted(2.0, tested=True)
    one = [{**clients[0], "test": {"b": clients[0]["test"]["b"][:1]}}]
    points = [Point({"c": torch.zeros(())}, {"m": torch.tensor(value)}) for value in (3.0, 1.0)]
    found = compared(problem, one, *points, {}, seed=0, dtype=torch.float64)
    assert (found.low, found.high) == (-np.inf, np.inf)
    assert not found.helped
    assert found.sentence.endswith(", -inf to inf)")


def test_statistics_without_values_per_sample_are_resampled_by_client():
    problem, clients = shifted(1.0, tested=True)
    each = problem.statistics["test"]
    summed = {"test": lambda x, y, batch: {name: value.sum() for name, value in each(x, y, batch).items()}}
    by_client = Problem(
        upper=problem.upper, lower=problem.lower, x0=problem.x0, y0=problem.y0, statistics=summed,
        metrics=problem.metrics,
    )  # fmt: skip
    points = [Point({"c": torch.zeros(())}, {"m": torch.tensor(value)}) for value in (2.0, 1.0)]
    one, other = (compared(some, clients, *points, {}, seed=0, dtype=torch.float64) for some in (problem, by_client))
    assert (one.learned, one.fixed) == pytest.approx((other.learned, other.fixed))
    assert (one.low, one.high) != (other.low, other.high)


def test_private_x_local_y_and_peers_are_compared_too():
    private = DataCleaning(num_clients=3, num_clean=5).build()
    options = {"num_iterations": 5, "baseline": True}
    assert solve(*private, "fedbio", **options).baseline.figure == "test_accuracy"
    built = Quadratic(num_clients=3).build()
    local = Problem(
        upper=built.problem.upper, lower=built.problem.lower, x0=built.problem.x0, y0=built.problem.y0,
        scopes=Scopes(lower="local"),
    )  # fmt: skip
    assert solve(local, built.clients, "fedbio_local", **options).baseline.figure == "held_out_loss"
    assert solve(*built, Sparkle(), **options).baseline.costs["rounds"] == 5


def test_sentences_have_units_and_signs():
    make = lambda name, unit, low, high: Baseline(name, 0.913, 0.901, 1.2, low, high, unit, {})
    assert make("test_accuracy", "points", 0.4, 2.0).sentence == (
        "learning x changed test_accuracy by +1.2 points (0.4 to 2)"
    )
    assert make("test_accuracy", "points", -0.4, 2.0).sentence == (
        "learning x is not shown to help: test_accuracy 0.913 with it, 0.901 without "
        "(difference +1.2 points, -0.4 to 2)"
    )
    worse = make("test_loss", "%", 0.4, 2.0)  # a loss that rises
    assert not worse.helped
    assert worse.sentence.startswith("learning x made it worse: test_loss")


def test_held_out_samples_follow_the_seed_and_the_number_of_a_client_like_all_draws():
    """The part is that of `Stream.divided`, which the engine uses for its own validation samples."""
    problem, clients = shifted(1.0, num=10)
    apart = with_unseen(problem, clients, seed=3, ids=[2, 0, 1])
    for client, found, number in zip(clients, apart, [2, 0, 1], strict=True):
        kept, out = Stream(3).divided("held_out", number, 10, 0.25)
        assert np.array_equal(found["val"]["b"], client["val"]["b"][kept.numpy()])
        assert np.array_equal(found["held_out"]["b"], client["val"]["b"][out.numpy()])


def test_held_out_samples_are_no_training_samples_where_both_roles_are_the_same():
    problem, _ = shifted(1.0)
    rows = np.arange(12.0)[:, None]
    for val in ({"a": rows}, {"a": rows.copy()}):
        [client] = with_unseen(problem, [{"train": {"a": rows}, "val": val}], 0)
        kept, out = client["train"]["a"][:, 0].tolist(), client["held_out"]["a"][:, 0].tolist()
        assert sorted(kept + out) == list(range(12))
        assert client["val"]["a"][:, 0].tolist() == kept
    [client] = with_unseen(problem, [{"train": {"a": rows + 1}, "val": {"a": rows}}], 0)
    assert len(client["train"]["a"]) == 12  # other samples than those of val


def test_warnings_of_a_problem_are_given_once_in_a_run_with_a_baseline():
    problem, clients = shifted(1.0)
    branching = dataclasses.replace(
        problem, lower=lambda x, y, batch: problem.lower(x, y, batch) * (2.0 if y["m"] > 1e9 else 1.0)
    )
    same = [{"train": client["train"], "val": client["train"]} for client in clients]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert solve(branching, same, STEPS, num_iterations=5, baseline=True).baseline is not None
    assert sum("cannot be evaluated for several clients" in str(one.message) for one in told) == 1
    assert len({str(one.message) for one in told}) == len(told)


def test_interrupted_plain_run_is_not_compared(monkeypatch):
    problem, clients = shifted(1.0, tested=True)
    plain = baseline.plain_run()

    class Interrupted(type(plain)):
        @classmethod
        def name(cls):
            return "self_tuned"

        def round(self, fed, state):
            signal.raise_signal(signal.SIGINT)
            return super().round(fed, state)

    monkeypatch.setattr("fedbilevel.runs.solve.plain_run", lambda: Interrupted(**plain.asdict()))
    result = solve(problem, clients, STEPS, num_iterations=5, baseline=True)
    assert result.iteration == 5
    assert result.baseline is None


def test_tables_are_divided_for_a_baseline():
    pandas = pytest.importorskip("pandas")
    problem, clients = shifted(1.0)
    tables = [{role: pandas.DataFrame(fields) for role, fields in client.items()} for client in clients]
    one, other = (solve(problem, some, STEPS, num_iterations=5, baseline=True).baseline for some in (clients, tables))
    assert one == other


def test_baseline_without_test_data_is_refused_where_the_upper_loss_reads_numbers_of_samples():
    problem, clients = shifted(1.0)
    numbered = dataclasses.replace(
        problem, upper=lambda x, y, batch: problem.upper(x, y, batch) * (1 + batch["index"] % 2)
    )
    with pytest.raises(SettingError, match=r"baseline=True holds a quarter .* but upper\(\) reads batch\['index'\]"):
        solve(numbered, clients, STEPS, num_iterations=1, baseline=True)
    problem, clients = shifted(1.0, tested=True)
    numbered = dataclasses.replace(problem, upper=numbered.upper)
    assert solve(numbered, clients, STEPS, num_iterations=1, baseline=True).baseline is not None


def test_clients_of_a_wrong_kind_are_refused_as_without_a_baseline():
    problem, clients = shifted(1.0)
    for wrong in (None, clients[0], [None], {"a": clients[0]}):
        with pytest.raises(ProblemError, match="clients"):
            solve(problem, wrong, STEPS, num_iterations=1, baseline=True)


def test_baselines_that_cannot_be_made_are_refused_in_one_sentence():
    problem, clients = shifted(1.0, num=1)
    with pytest.raises(SettingError, match="baseline=True needs data that the run does not use"):
        solve(problem, clients, STEPS, num_iterations=1, baseline=True)
    with pytest.raises(SettingError, match="baseline=True needs all clients in one process"):
        solve(problem, clients, STEPS, num_iterations=1, baseline=True, engine="distributed")
    with pytest.raises(SettingError, match="baseline is 'yes', expected True or False"):
        solve(problem, clients, STEPS, num_iterations=1, baseline="yes")
    with pytest.raises(SettingError, match="baseline is 'yes', expected True, False or None"):
        compare(Quadratic(), ["fedbio"], num_rounds=1, baseline="yes")
    problem, clients = shifted(1.0, tested=True)
    silent = Problem(
        upper=problem.upper, lower=problem.lower, x0=problem.x0, y0=problem.y0, statistics=problem.statistics
    )
    with pytest.raises(SettingError, match=r"metrics\(\) returned none"):
        solve(silent, clients, STEPS, num_iterations=2, baseline=True)


def test_comparison_has_one_baseline_per_repetition_as_a_row():
    task = DataCleaning(num_clients=3, num_clean=5)
    found = compare(task, ["fedbio", "fednest"], num_rounds=6, repetitions=2, rivals=False)
    assert [(one.name, one.num_runs) for one in found.outcomes] == [("fedbio", 2), ("fednest", 2), (FIXED, 2)]
    longest = max(one.total["rounds"].mean for one in found.outcomes[:2])
    assert found.outcomes[2].total["rounds"].mean == longest
    short = {"num_rounds": 2, "repetitions": 1, "rivals": False}
    assert [one.name for one in compare(task, ["fedbio"], **short, baseline=False).outcomes] == ["fedbio"]
    names = [one.name for one in compare(task, ["fedbio", "fedavg"], **short).outcomes]
    assert names == ["fedbio", "fedavg"]  # FedAvg is the plain run


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_comparison_counts_a_failed_run_as_diverged():
    wild = {"wild": FedBiO(lr_upper=50.0, lr_lower=50.0, lr_system=50.0)}
    [outcome] = compare(Quadratic(), wild, num_rounds=60, repetitions=1).outcomes
    assert outcome.num_diverged == 1
