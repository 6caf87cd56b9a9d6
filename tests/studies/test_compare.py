import json
import math
import statistics

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.errors import SettingError
from fedbilevel.studies.compare import compare
from fedbilevel.studies.comparison import Spread, Target, costs
from fedbilevel.tasks.quadratic import Quadratic


def test_a_target_is_reached_from_the_side_where_the_run_starts():
    rows = [{"iteration": i, "error": error, "accuracy": 1 - error} for i, error in enumerate((0.9, 0.5, 0.2, 0.3))]
    assert Target("error", 0.5).reached(rows)["iteration"] == 1
    assert Target("accuracy", 0.75).reached(rows)["iteration"] == 2
    assert Target("error", 0.1).reached(rows) is None


def test_losses_residuals_and_hypergradients_are_reached_from_above_wherever_they_start():
    """A hypergradient may be small at the start by accident; a non-finite value never counts."""
    values = (math.nan, 0.001, 3.0, 0.05, -math.inf, 0.009)
    rows = [
        {"iteration": i, "hypergradient": value, "my_loss": value, "accuracy": value} for i, value in enumerate(values)
    ]
    assert Target("hypergradient", 0.01).reached(rows)["iteration"] == 1
    assert Target("hypergradient", 0.01).reached(rows[2:])["iteration"] == 5
    assert Target("my_loss", 0.0001).reached(rows) is None
    assert Target("accuracy", 0.01).reached(rows)["iteration"] == 2
    assert Target("accuracy", 0.04).reached(rows[3:])["iteration"] == 5
    assert Target("accuracy", 1.0).reached(rows[:1]) is None


def test_a_target_that_nobody_measures_names_what_to_ask_for():
    row = {"iteration": 0, "rounds": 0, "upper_loss": 1.0}
    with pytest.raises(
        SettingError,
        match=(
            r"no metric named 'hypergradient' in this run: "
            r"ask for stationarity \(--stationarity\), or use one of upper_loss"
        ),
    ):
        Target("hypergradient", 0.1).check(row)
    with pytest.raises(SettingError, match=r"no metric named 'loss' in this run: use one of upper_loss"):
        Target("loss", 0.1).check(row)


@pytest.mark.parametrize("text", ["accuracy", "=3", "accuracy=high", "accuracy=nan", "accuracy="])
def test_a_target_that_is_none_is_refused(text):
    with pytest.raises(SettingError, match="expected METRIC=VALUE"):
        Target.parse(text)


def test_costs_add_up_first_and_second_order_calls():
    row = {"rounds": 1, "megabytes": 2.0, "gy": 3, "gx": 4, "fx": 5, "fy": 6, "hvp": 7, "jvp": 8, "seconds": 9.0}
    assert costs(row) == {"rounds": 1, "megabytes": 2.0, "gradients": 18, "products": 15, "seconds": 9.0}


def test_spread_is_the_sample_deviation():
    assert Spread.of([1.0, 2.0, 4.0]) == (7 / 3, statistics.stdev([1.0, 2.0, 4.0]))
    assert Spread.of([5.0]) == (5.0, 0.0)
    assert [str(value) for value in Spread.of([5.0, math.nan])] == ["nan", "nan"]
    assert [str(value) for value in Spread.of([math.inf, -math.inf])] == ["nan", "nan"]
    assert [str(value) for value in Spread.of([math.inf])] == ["inf", "nan"]


def test_every_algorithm_sees_the_same_data_and_repetitions_see_others(tmp_path):
    algorithms = {"fedbio": FedBiO(lr_upper=0.04, lr_lower=0.2, lr_system=0.2, num_local_steps=1), "fedavg": FedAvg()}
    done = compare(
        Quadratic(num_clients=3),
        algorithms,
        num_iterations={"fedbio": 6, "fedavg": 4},
        repetitions=2,
        seed=9,
        record=tmp_path / "c",
        batch_size=2,
        dtype=torch.float64,
        target=Target("distance", 1.5),
    )
    starts = {(one["algorithm"], one["repetition"]): one["rows"][0]["upper_loss"] for one in done.runs}
    assert starts["fedbio", 0] == starts["fedavg", 0] != starts["fedbio", 1] == starts["fedavg", 1]
    assert [len(one["rows"]) for one in done.runs] == [7, 5, 7, 5]
    by_hand = [one["rows"][-1]["distance"] for one in done.runs if one["algorithm"] == "fedbio"]
    assert done.outcomes[0].final["distance"] == (statistics.fmean(by_hand), statistics.stdev(by_hand))
    saved = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert saved["runs"] == json.loads(json.dumps(done.runs))


def test_plain_values_are_taken_and_the_plan_is_kept(tmp_path):
    """Plain values give the same comparison as dicts, a Target, a Path and ints.

    The plain values are one number for all algorithms, strings for a target and a folder, and numpy
    numbers."""
    methods = {"fedbio": FedBiO(lr_upper=0.04, lr_lower=0.2, lr_system=0.2, num_local_steps=1), "fedavg": FedAvg()}
    plain = compare(
        Quadratic(),
        methods,
        num_iterations=np.int64(4),
        target="upper_loss=3",
        repetitions=np.int64(2),
        seed=np.int64(5),
        record=str(tmp_path / "a"),
    )
    whole = compare(
        Quadratic(),
        methods,
        num_iterations={"fedbio": 4, "fedavg": 4, "other": 9},
        target=Target("upper_loss", 3.0),
        repetitions=2,
        seed=5,
        num_rounds=3,
        record=tmp_path / "b",
    )
    assert plain.target == whole.target == Target("upper_loss", 3.0)
    assert [one["rows"][-1]["iteration"] for one in plain.runs] == [4] * 4
    assert [one["rows"][-1]["iteration"] for one in whole.runs] == [3] * 4
    pick = lambda done: [(one["algorithm"], one["repetition"], one["rows"][1]["upper_loss"]) for one in done.runs]
    assert pick(plain) == pick(whole)
    kept = [json.loads((tmp_path / folder / "comparison.json").read_text()) for folder in "ab"]
    for saved, rounds in zip(kept, (None, 3), strict=True):
        assert (saved["num_iterations"], saved["repetitions"], saved["num_rounds"], saved["seed"]) == (
            {"fedbio": 4, "fedavg": 4},
            2,
            rounds,
            5,
        )


def test_what_was_finished_before_an_interruption_is_on_disk(tmp_path):
    def stop(name, repetition, now):
        if repetition == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(
            Quadratic(),
            {"fedavg": FedAvg()},
            num_iterations={"fedavg": 2},
            repetitions=3,
            record=tmp_path / "c",
            progress=stop,
        )
    assert len(json.loads((tmp_path / "c" / "comparison.json").read_text())["runs"]) == 1
