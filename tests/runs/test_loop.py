import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import types

import numpy
import pytest
import torch
from matplotlib import pyplot

from fedbilevel import Cohort, solve
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.errors import CheckpointError, NonFiniteError, ProblemError, ScopeError, SettingError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network, given
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.callbacks import EarlyStopping
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Progress
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic

NOISY = {"cohort": Cohort(0.5), "batch_size": 8, "checkpoint_every": 3, "measure_every": 2}
AGGITD = FBOAggITD(
    lr_upper=100.0, lr_lower=0.5, lr_system=0.5, num_lower_rounds=2, num_local_steps=2, estimator="sampled"
)


@pytest.fixture(scope="module")
def cleaning():
    return DataCleaning(num_clients=4, num_clean=5).build()


def same(first, second):
    flat = lambda value: torch.cat(
        [leaf.reshape(-1) for tree in (value if isinstance(value, list) else [value]) for leaf in tree.values()]
    )
    return torch.equal(flat(first.x), flat(second.x)) and torch.equal(flat(first.y), flat(second.y))


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_bit_identical_in_solution_ledger_and_metrics(tmp_path, cleaning, stop):
    whole = solve(*cleaning, AGGITD, residuals=False, num_iterations=6, record=tmp_path / "whole", **NOISY)
    solve(*cleaning, AGGITD, residuals=False, num_iterations=stop, record=tmp_path / "half", **NOISY)
    again = solve(*cleaning, AGGITD, residuals=False, num_iterations=6, record=tmp_path / "half", resume=True, **NOISY)
    assert same(whole, again)
    assert whole.ledger == again.ledger
    untimed = lambda rows: [
        {key: value for key, value in row.items() if key != "seconds"} for row in rows if row["iteration"] % 2 == 0
    ]
    assert untimed(whole.rows) == untimed(again.rows)
    assert [json.loads(line) for line in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()] == again.rows


def test_a_crash_between_checkpoints_repeats_the_lost_iterations_and_forgets_their_metrics(tmp_path, cleaning):
    solve(*cleaning, AGGITD, residuals=False, num_iterations=3, record=tmp_path / "run", **NOISY)
    with open(
        tmp_path / "run" / "metrics.jsonl", "a"
    ) as file:  # measured after the checkpoint, then cut off in the middle of a line
        file.write(json.dumps({"iteration": 4, "upper_loss": 123.0}) + "\n" + '{"iteration": 5, "upp')
    again = solve(*cleaning, AGGITD, residuals=False, num_iterations=6, record=tmp_path / "run", resume=True, **NOISY)
    assert [row["iteration"] for row in again.rows] == [0, 2, 3, 4, 6]
    assert all(row["upper_loss"] != 123.0 for row in again.rows)


def test_a_record_alone_does_not_change_the_run(tmp_path, cleaning):
    assert same(
        solve(*cleaning, AGGITD, residuals=False, num_iterations=3, **NOISY),
        solve(*cleaning, AGGITD, residuals=False, num_iterations=3, record=tmp_path / "r", **NOISY),
    )


def test_measuring_more_often_does_not_change_the_run(cleaning):
    often = {**NOISY, "measure_every": 1}
    assert same(
        solve(*cleaning, AGGITD, residuals=False, num_iterations=3, **NOISY),
        solve(*cleaning, AGGITD, residuals=False, num_iterations=3, **often),
    )


def test_measurements_may_grow_further_apart_and_a_resumed_run_takes_the_same(tmp_path):
    built, options = Quadratic().build(), {"measure_every": 2, "measure_growth": 0.5, "checkpoint_every": 1}
    whole = solve(*built, FedAvg(), residuals=False, num_iterations=40, **options)
    taken = [row["iteration"] for row in whole.rows]
    assert taken == [0, 2, 4, 6, 10, 16, 24, 36, 40]
    solve(*built, FedAvg(), residuals=False, num_iterations=17, record=tmp_path / "r", **options)
    resumed = solve(*built, FedAvg(), residuals=False, num_iterations=40, record=tmp_path / "r", resume=True, **options)
    assert [row["iteration"] for row in resumed.rows] == sorted(
        {*taken, 17}
    )  # the last of the first part is measured because it was the last


def test_a_folder_that_holds_a_run_is_never_overwritten(tmp_path, cleaning):
    solve(*cleaning, FedAvg(), residuals=False, num_iterations=1, record=tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already holds a run"):
        solve(*cleaning, FedAvg(), residuals=False, num_iterations=2, record=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"algorithm": FedBiO()}, "algorithm is 'fedavg', here it is 'fedbio'"),
        ({"algorithm": FedAvg(lr_lower=0.2)}, "lr_lower = 0.1, here it is 0.2"),
        ({"seed": 1}, "seed is 0, here it is 1"),
        ({"batch_size": 4}, "batch_size is None, here it is 4"),
        ({"dtype": torch.float64}, "dtype is 'float32', here it is 'float64'"),
        ({"task": Quadratic(dim_lower=3)}, r"its y is"),
        ({"task": Quadratic(data_seed=8)}, "its data is"),
        ({"task": Quadratic(num_clients=2)}, "num_clients is 5, here it is 2"),
        ({"task": Quadratic(bend=0.5)}, "another problem: its losses at a fixed point"),
        ({"schedule": Schedule(power=0.5)}, "schedule"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_the_difference_is_named(tmp_path, change, named):
    solve(*Quadratic().build(), FedAvg(), residuals=False, num_iterations=1, record=tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 2}) + "\n")  # measured after the checkpoint
    files = {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    built = change.pop("task", Quadratic()).build()
    with pytest.raises(CheckpointError, match=named):
        solve(
            *built,
            change.pop("algorithm", FedAvg()),
            residuals=False,
            num_iterations=2,
            record=tmp_path / "run",
            resume=True,
            **change,
        )
    assert files == {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b"\x80\x04pickle", lambda content: b""]
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, damage):
    solve(*Quadratic().build(), FedAvg(), residuals=False, num_iterations=1, record=tmp_path / "run")
    place = tmp_path / "run" / "checkpoint.safetensors"
    place.write_bytes(damage(place.read_bytes()))
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is damaged"):
        solve(*Quadratic().build(), FedAvg(), residuals=False, num_iterations=2, record=tmp_path / "run", resume=True)


def test_a_missing_checkpoint_is_an_error_that_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        solve(
            *Quadratic().build(), FedAvg(), residuals=False, num_iterations=2, record=tmp_path / "nothing", resume=True
        )


def test_non_finite_values_name_iteration_phase_and_client_and_keep_the_last_good_checkpoint(tmp_path):
    built = Quadratic().build()
    where = r"client \d+ returned a value of '[xyu]' that is not finite in phase 'local_steps' of outer iteration \d+"
    with pytest.raises(NonFiniteError, match=where + ".*last good checkpoint, of outer iteration"):
        solve(
            *built,
            FedBiO(lr_upper=3.0, lr_lower=3.0, lr_system=3.0),
            residuals=False,
            num_iterations=200,
            record=tmp_path / "run",
            checkpoint_every=1,
            recover=False,
        )
    tensors, about = Record(tmp_path / "run").load()
    assert about["iteration"] >= 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())


def test_callbacks_see_every_iteration_and_can_stop_the_run(tmp_path):
    seen = []
    result = solve(
        *Quadratic().build(),
        FedAvg(),
        residuals=False,
        num_iterations=50,
        measure_every=4,
        callbacks=[lambda now: seen.append(now.iteration) or now.iteration == 6],
        record=tmp_path / "r",
    )
    assert seen == list(range(1, 7))
    assert (result.stopped, result.iteration, result.rows[-1]["iteration"]) == ("callback", 6, 6)
    assert Record(tmp_path / "r").load()[1]["iteration"] == 6


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_continues_bit_for_bit(tmp_path):
    """In a process of its own, because a signal is for a whole process."""
    script = textwrap.dedent(
        """
        import sys, torch
        torch.set_num_threads(1)
        from fedbilevel import solve
        from fedbilevel.algorithms.fedbio import FedBiO
        from fedbilevel.tasks.quadratic import Quadratic
        result = solve(
            *Quadratic().build(), FedBiO(), num_iterations=100000, batch_size=2, record=sys.argv[1],
            measure_every=1, residuals=False,
        )
        print(result.stopped, result.iteration)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while (
        not (tmp_path / "run" / "metrics.jsonl").exists()
        or len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 5
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Stopping after this outer iteration" in err
    stopped, iteration = out.split()
    assert stopped == "interrupted"
    options = {"batch_size": 2, "measure_every": 1}
    again = solve(
        *Quadratic().build(),
        FedBiO(),
        residuals=False,
        num_iterations=int(iteration) + 2,
        record=tmp_path / "run",
        resume=True,
        **options,
    )
    whole = solve(*Quadratic().build(), FedBiO(), residuals=False, num_iterations=int(iteration) + 2, **options)
    assert same(again, whole)


def test_a_schedule_scales_the_steps_it_should_and_no_others():
    scaled = FBOAggITD(lr_upper=1.0, lr_lower=0.5, lr_system=0.25).scaled(Schedule(power=1.0, offset=0.0)(4))
    assert (scaled.lr_upper, scaled.lr_lower, scaled.lr_system) == (0.25, 0.125, 0.25)


@pytest.mark.slow
def test_a_decaying_schedule_removes_the_drift_of_local_steps():
    options = {"num_iterations": 300, "dtype": torch.float64, "measure_every": 300}
    method = FedBiO(lr_upper=0.05, lr_lower=0.2, lr_system=0.2, num_local_steps=3)
    constant = solve(*Quadratic().build(), method, residuals=False, **options).rows[-1]["distance"]
    falling = solve(
        *Quadratic().build(), method, residuals=False, schedule=Schedule(power=0.7, offset=10.0), **options
    ).rows[-1]["distance"]
    assert constant > 1e-2
    assert falling < 0.35 * constant


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_iterations": -1}, "num_iterations is -1"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"cohort": Cohort(0.0)}, "fraction is 0"),
        ({"resume": True}, "resume needs a record"),
        ({"strategy": "magic"}, "strategy is 'magic'"),
        ({"seed": -4}, "seed must lie between"),
        ({"schedule": Schedule(power=-1)}, "power is -1"),
        ({"cohort": 0.5}, r"cohort is 0.5, expected a Cohort"),
        ({"num_iterations": 2.5}, "num_iterations is 2.5, expected a whole number"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16"),
        ({"measure_growth": 2.0}, "measure_growth is 2.0"),
        ({"sampling": "often"}, "sampling is 'often'"),
    ],
)
def test_bad_settings_get_one_sentence(options, named):
    with pytest.raises(SettingError, match=named):
        solve(*Quadratic().build(), FedAvg(), residuals=False, **{"num_iterations": 1, **options})


def test_whole_numbers_of_numpy_count_as_whole_numbers(tmp_path):
    whole = {"num_iterations": 6, "num_rounds": 4, "measure_every": 2, "checkpoint_every": 3}
    ours, theirs = (
        solve(
            *Quadratic().build(),
            FedAvg(),
            residuals=False,
            record=tmp_path / kind.__name__,
            **{name: kind(value) for name, value in whole.items()},
        )
        for kind in (int, numpy.int64)
    )
    assert ours.iteration == theirs.iteration == 4
    assert [row["iteration"] for row in theirs.rows] == [0, 2, 4]
    plans = [json.loads((tmp_path / kind / "config.json").read_text())["run"] for kind in ("int", "int64")]
    assert plans[0] == plans[1]
    assert {name: plans[1][name] for name in whole} == whole
    for wrong in (True, numpy.True_, numpy.float64(3.0), numpy.int64(-1)):
        with pytest.raises(SettingError, match=r"num_iterations is .*, expected a whole number, at least 0"):
            solve(*Quadratic().build(), FedAvg(), residuals=False, num_iterations=wrong)


def test_the_solution_is_stored_by_the_users_names(tmp_path, cleaning):
    from safetensors.torch import load_file

    result = solve(*cleaning, AGGITD, residuals=False, num_iterations=1, record=tmp_path / "run")
    stored = load_file(tmp_path / "run" / "solution.safetensors")
    assert torch.equal(stored["y.weight"], result.y["weight"])
    assert all(torch.equal(stored[f"x.client{i}.logit"], tree["logit"]) for i, tree in enumerate(result.x))
    assert [len(tree["logit"]) for tree in result.x] == [len(client["train"]["label"]) for client in cleaning.clients]


def test_an_algorithm_may_be_given_by_name_and_scopes_are_checked(cleaning):
    assert solve(*Quadratic().build(), "fedavg", residuals=False, num_iterations=1).iteration == 1
    refuses = type(
        "Refuses", (FedAvg,), {"refuses": {"private": "it has no use for one"}, "__module__": "somewhere.refuses"}
    )
    with pytest.raises(
        ScopeError, match="refuses cannot solve a problem with a private upper variable: it has no use for one"
    ):
        solve(*cleaning, refuses(), residuals=False, num_iterations=1)


def test_fewer_iterations_than_are_done_are_refused_and_nothing_changes(tmp_path):
    solve(*Quadratic().build(), FedAvg(), residuals=False, num_iterations=3, record=tmp_path / "run")
    before = {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    with pytest.raises(SettingError, match=r"num_iterations is 2, but the run in .* has already done 3"):
        solve(*Quadratic().build(), FedAvg(), residuals=False, num_iterations=2, record=tmp_path / "run", resume=True)
    assert before == {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}


def test_a_class_instead_of_an_algorithm_is_a_clear_error():
    with pytest.raises(SettingError, match="or an algorithm with its settings"):
        solve(*Quadratic().build(), FedBiO, residuals=False, num_iterations=1)


# ---- between peers -------------------------------------------------------------------------------

PEERS = {
    "network": Network(kind="random_directed"),
    "averaging": Averaging(num_steps=2, weights="kept"),
    "batch_size": 2,
    "measure_every": 2,
    "checkpoint_every": 3,
}
PUSH = HGP(num_terms=2, num_lower_steps=2, lr_system=0.01, lr_upper=0.01, optimiser="adam")


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_a_resumed_run_between_peers_is_bit_identical_with_its_network_weights_and_ledger(tmp_path, upper):
    built = Quadratic(num_clients=3, upper=upper, client_weights="by_samples").build()
    whole = solve(*built, PUSH, residuals=False, num_iterations=5, record=tmp_path / "whole", **PEERS)
    solve(*built, PUSH, residuals=False, num_iterations=2, record=tmp_path / "half", **PEERS)
    again = solve(*built, PUSH, residuals=False, num_iterations=5, record=tmp_path / "half", resume=True, **PEERS)
    assert same(whole, again)
    assert whole.ledger == again.ledger
    assert [len(value) for value in (whole.x, whole.y)] == [3, 3]  # one point per peer, whoever owns it
    untimed = lambda rows: [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in rows
        if row["iteration"] in (0, 2, 4, 5)
    ]
    assert untimed(whole.rows) == untimed(again.rows)
    (tensors, about), (tensors_again, about_again) = (Record(tmp_path / name).load() for name in ("whole", "half"))
    assert tensors.keys() == tensors_again.keys() >= {"push_weights", "ledger.edges-messages", "state.first", "state.w"}
    assert all(torch.equal(value, tensors_again[name]) for name, value in tensors.items())
    assert (
        about["state"] == about_again["state"] == {"time": {"value": 5 * (2 + 2 * 2 + (2 if upper == "shared" else 0))}}
    )
    assert float((tensors["push_weights"] - tensors["push_weights"].mean()).abs().max()) > 0.05


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"network": Network(kind="random_directed", seed=1)}, "its network is"),
        ({"network": Network(kind="ring")}, "its network is"),
        ({"network": given(3, lambda step: torch.ones(3, 3))}, "its network is"),
        ({"averaging": Averaging(num_steps=3, weights="kept")}, "its averaging is"),
        ({"averaging": Averaging(num_steps=2)}, "its averaging is"),
    ],
)
def test_a_checkpoint_of_another_network_or_averaging_is_refused(tmp_path, change, named):
    built = Quadratic(num_clients=3).build()
    solve(*built, PUSH, residuals=False, num_iterations=1, record=tmp_path / "run", **PEERS)
    files = {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    with pytest.raises(CheckpointError, match=named):
        solve(
            *built, PUSH, residuals=False, num_iterations=2, record=tmp_path / "run", resume=True, **{**PEERS, **change}
        )
    assert files == {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}


def test_a_network_that_was_given_as_a_function_is_recorded_by_its_first_steps(tmp_path):
    built = Quadratic(num_clients=3).build()
    ring, other = given(3, lambda step: torch.eye(3).roll(1, 1)), given(3, lambda step: torch.eye(3).roll(2, 1))
    whole = solve(*built, SGP(num_lower_steps=2), residuals=False, num_iterations=2, network=ring)
    solve(*built, SGP(num_lower_steps=2), residuals=False, num_iterations=1, network=ring, record=tmp_path / "run")
    with pytest.raises(CheckpointError, match="its network is"):
        solve(
            *built,
            SGP(num_lower_steps=2),
            residuals=False,
            num_iterations=2,
            network=other,
            record=tmp_path / "run",
            resume=True,
        )
    assert same(
        whole,
        solve(
            *built,
            SGP(num_lower_steps=2),
            residuals=False,
            num_iterations=2,
            network=ring,
            record=tmp_path / "run",
            resume=True,
        ),
    )


def test_peers_need_no_network_to_be_named_and_then_everybody_hears_everybody():
    result = solve(*Quadratic(num_clients=3).build(), "sgp", residuals=False, num_iterations=2, measure_every=1)
    assert result.ledger["messages"] == 2 * 10 * 3 * 2
    assert [row["disagreement"] < 1e-6 for row in result.rows] == [True] * 3


@pytest.mark.parametrize(
    ("algorithm", "options", "named"),
    [
        (FedAvg(), {"network": Network()}, "fedavg has a server and does not use network: leave network out"),
        (FedAvg(), {"averaging": Averaging()}, "fedavg has a server and does not use averaging: leave averaging out"),
        (
            SGP(),
            {"cohort": Cohort(0.5)},
            "sgp runs between peers without a server and does not use cohort: leave cohort out",
        ),
        (SGP(), {"network": "ring"}, "network is 'ring' and averaging None, expected e.g. Network"),
        (SGP(), {"averaging": 5}, "network is None and averaging 5, expected e.g. Network"),
    ],
)
def test_options_for_the_other_kind_of_algorithm_get_one_sentence_and_leave_no_folder(
    tmp_path, algorithm, options, named
):
    with pytest.raises(SettingError, match=named):
        solve(
            *Quadratic(num_clients=3).build(),
            algorithm,
            residuals=False,
            num_iterations=1,
            record=tmp_path / "run",
            **options,
        )
    assert not (tmp_path / "run").exists()


def test_peers_that_explode_name_the_client_and_the_last_good_checkpoint(tmp_path):
    where = (
        r"client \d has a value of 'y' that is not finite in outer iteration \d+: .*; "
        "the last good checkpoint, of outer iteration"
    )
    with pytest.raises(NonFiniteError, match=where):
        solve(
            *Quadratic(num_clients=3).build(),
            SGP(lr_lower=50.0, num_lower_steps=5),
            residuals=False,
            num_iterations=50,
            record=tmp_path / "run",
            checkpoint_every=1,
            recover=False,
        )
    tensors, _ = Record(tmp_path / "run").load()
    assert bool(torch.isfinite(tensors["state.z"]).all())


def test_a_model_inside_a_loss_does_not_make_peers_remember_every_step():
    """A frozen model whose parameters ask for gradients would keep the graph of the whole run."""
    built, model = Quadratic(num_clients=3).build(), torch.nn.Linear(4, 6)
    lower = built.problem.lower
    problem = dataclasses.replace(
        built.problem, lower=lambda x, y, batch: lower(x, y, batch) + 0.1 * (y["y"] * model(x["x"])).sum()
    )
    state = solve(problem, built.clients, SGP(num_lower_steps=2), residuals=False, num_iterations=2).state
    assert not any(value.requires_grad for value in state)


def test_the_length_of_a_private_x_does_not_change_what_a_run_costs():
    costs = [
        solve(
            *Quadratic(num_clients=3, upper="private", dim_upper=dim).build(),
            PUSH,
            residuals=False,
            num_iterations=2,
            **PEERS,
        ).ledger
        for dim in (2, 6)
    ]
    assert costs[0] == costs[1]
    alone = solve(
        *Quadratic(num_clients=3, upper="private", lower="local").build(),
        PUSH,
        residuals=False,
        num_iterations=2,
        **PEERS,
    )
    assert {alone.ledger[name] for name in ("rounds", "floats_up", "bytes_up", "floats_down")} == {0}


def test_a_run_that_ends_by_rounds_and_one_that_is_gone_on_with_are_the_same(tmp_path, cleaning):
    """FBO-AggITD with a private x needs 2N + 1 = 5 rounds, and a few more in its first iteration.

    The run ends after the first outer iteration that reaches num_rounds."""
    whole = solve(*cleaning, AGGITD, residuals=False, num_rounds=42, record=tmp_path / "whole", checkpoint_every=1)
    assert 42 <= whole.ledger["rounds"] < 47
    assert whole.stopped == "finished"
    assert [row["iteration"] for row in whole.rows] == list(range(whole.iteration + 1))
    solve(*cleaning, AGGITD, residuals=False, num_rounds=18, record=tmp_path / "half", checkpoint_every=1)
    again = solve(*cleaning, AGGITD, residuals=False, num_rounds=42, record=tmp_path / "half", resume=True)
    assert same(whole, again)
    assert again.iteration == whole.iteration
    done = solve(
        *cleaning, AGGITD, residuals=False, num_rounds=42, record=tmp_path / "half", resume=True
    )  # nothing is left to do
    assert (done.iteration, len(done.rows)) == (whole.iteration, len(whole.rows))
    few = solve(*Quadratic().build(), FedBiO(), residuals=False, num_rounds=100)
    assert [row["rounds"] for row in few.rows] == list(range(0, 101, 5))
    both = solve(*Quadratic().build(), FedBiO(), residuals=False, num_rounds=100_000, num_iterations=40)
    assert [row["iteration"] for row in both.rows] == list(range(0, 41, 2))
    for option, sentence in {
        "residuals": ("yes", "residuals is 'yes', expected True or False"),
        "stationarity": (1, "stationarity is 1, expected True or False"),
        "measure_growth": (0.5, "measure_growth needs a first distance"),
        "describe": ({"a": object()}, "describe cannot be written as JSON"),
    }.items():
        with pytest.raises(SettingError, match=sentence[1]):
            solve(*Quadratic().build(), FedBiO(), num_rounds=3, **{option: sentence[0]})


def test_looking_at_residuals_does_not_change_the_run(tmp_path, cleaning):
    plain = solve(
        *cleaning,
        FedBiO(),
        residuals=False,
        num_iterations=4,
        measure_every=1,
        **{name: NOISY[name] for name in ("cohort", "batch_size")},
    )
    looks = {"residuals": True, "stationarity": True}
    looked = solve(
        *cleaning,
        FedBiO(),
        num_iterations=4,
        measure_every=1,
        **looks,
        **{name: NOISY[name] for name in ("cohort", "batch_size")},
    )
    assert same(plain, looked)
    assert plain.ledger == looked.ledger
    assert [
        {
            key: value
            for key, value in row.items()
            if key not in ("seconds", "lower_gradient", "residual", "hypergradient")
        }
        for row in looked.rows
    ] == [{key: value for key, value in row.items() if key != "seconds"} for row in plain.rows]
    assert all(row["residual"] > 0 for row in looked.rows)


@pytest.mark.slow
def test_the_hypergradient_of_any_method_falls_to_zero_and_says_how_far_it_is(tmp_path):
    """The hypergradient is also measured for a method without u.

    Here y is nearly y*(x), so the figure is nearly the closed form at the final x."""
    task = Quadratic(num_clients=4)
    found = solve(
        *task.build(),
        "fbo_aggitd",
        num_iterations=40,
        stationarity=True,
        dtype=torch.float64,
        record=tmp_path,
        num_lower_rounds=30,
        lr_lower=0.2,
        lr_system=0.2,
        lr_upper=0.1,
    )
    wanted = numpy.linalg.norm(task.closed_form().hypergradient(found.x["x"].numpy()))
    assert "residual" not in found.rows[-1]
    assert found.rows[-1]["hypergradient"] == pytest.approx(wanted, rel=0.05)
    assert found.rows[-1]["hypergradient"] < 0.01 * found.rows[1]["hypergradient"]
    assert [row["hypergradient"] for row in Record(tmp_path).rows()] == [row["hypergradient"] for row in found.rows]


def test_what_is_not_finite_is_null_in_the_record_and_nan_in_python(tmp_path):
    book = Record(tmp_path)
    for iteration, value in enumerate((1.0, math.nan, -math.inf)):
        book.add({"iteration": iteration, "loss": value})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [1.0, None, None]
    assert [str(row["loss"]) for row in book.rows()] == ["1.0", "nan", "nan"]
    assert [str(row["loss"]) for row in book.cut_after(1)] == ["1.0", "nan"]
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]


def test_who_looks_longer_or_saves_more_often_is_not_slower(tmp_path, monkeypatch):
    """A clock that stands still but for looks and checkpoints, which seconds do not count."""
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(sys.modules["fedbilevel.runs.loop"], "time", clock)

    def slow(sums):
        clock.now += 100.0
        return {"own": 1.0}

    def save(*given, to=Record.save):
        clock.now += 1000.0
        to(*given)

    monkeypatch.setattr(Record, "save", save)
    problem, clients = Quadratic(num_clients=2).build()
    later = lambda _now: setattr(clock, "now", clock.now + 1.0)
    options = {"num_iterations": 4, "measure_every": 1, "checkpoint_every": 2, "record": tmp_path, "callbacks": [later]}
    found = solve(dataclasses.replace(problem, metrics=slow), clients, FedBiO(), residuals=False, **options)
    assert [row["seconds"] for row in found.rows] == [0, 0, 1, 2, 3]
    assert Record(tmp_path).load()[1]["seconds"] == 4
    again = solve(
        dataclasses.replace(problem, metrics=slow),
        clients,
        FedBiO(),
        residuals=False,
        **{**options, "num_iterations": 6},
        resume=True,
    )
    assert [row["seconds"] for row in again.rows] == [0, 0, 1, 2, 3, 4, 5]


def test_a_record_says_how_its_run_ended_until_it_is_gone_on_with(tmp_path):
    built = Quadratic(num_clients=2).build()
    end = lambda name: json.loads((tmp_path / name / "end.json").read_text())
    solve(*built, FedBiO(), residuals=False, num_iterations=3, record=tmp_path / "a")
    assert end("a") == {"stopped": "finished", "iteration": 3}
    seen = []
    solve(
        *built,
        FedBiO(),
        residuals=False,
        num_iterations=5,
        record=tmp_path / "a",
        resume=True,
        callbacks=[lambda now: seen.append((tmp_path / "a" / "end.json").exists())],
    )
    assert seen == [False, False]
    assert end("a") == {"stopped": "finished", "iteration": 5}
    solve(
        *built,
        FedBiO(),
        residuals=False,
        num_iterations=5,
        record=tmp_path / "b",
        callbacks=[lambda now: now.iteration == 2],
    )
    assert end("b") == {"stopped": "callback", "iteration": 2}
    with pytest.raises(NonFiniteError) as caught:
        solve(*built, FedBiO(lr_lower=1e30), residuals=False, num_iterations=50, record=tmp_path / "c", recover=False)
    assert end("c")["stopped"] == "failed"
    assert str(caught.value).startswith(end("c")["why"].removesuffix("."))
    assert "checkpoint" not in end("c")["why"]

    def spoil(error):
        def callback(_now):
            raise error

        return callback

    with pytest.raises(ZeroDivisionError):
        solve(
            *built,
            FedBiO(),
            residuals=False,
            num_iterations=5,
            record=tmp_path / "d",
            callbacks=[spoil(ZeroDivisionError("of mine"))],
        )
    assert end("d") == {"stopped": "failed", "iteration": 1, "why": "ZeroDivisionError: of mine"}
    with pytest.raises(KeyboardInterrupt):
        solve(
            *built,
            FedBiO(),
            residuals=False,
            num_iterations=5,
            record=tmp_path / "e",
            callbacks=[spoil(KeyboardInterrupt())],
        )
    assert end("e") == {"stopped": "interrupted", "iteration": 1}


@pytest.mark.parametrize("name", ["rounds", "seconds", "iteration", "upper_loss", "samples", "hypergradient"])
def test_a_figure_of_ones_own_cannot_have_the_name_of_a_column(name):
    problem, clients = Quadratic(num_clients=2).build()
    with pytest.raises(
        ProblemError,
        match=(
            rf"metrics\(\) gives a figure named '{name}', "
            "which is the name of a column that every run has: choose another"
        ),
    ):
        solve(
            dataclasses.replace(problem, metrics=lambda sums: {"fine": 1.0, name: 1.0}),
            clients,
            FedBiO(),
            residuals=False,
            num_iterations=1,
        )


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (
            lambda lines: [lines[0], b'{"iteration": 1, "sec', *lines[2:]],
            "line 2 of .*metrics.jsonl is not a measurement",
        ),
        (lambda lines: [lines[0], b"\xff\xfe", *lines[2:]], "line 2 of"),
        (lambda lines: [lines[0].replace(b'"iteration": 0', b'"iteration": null'), *lines[1:]], "line 1 of"),
        (
            lambda lines: [],
            "metrics.jsonl has no measurement up to outer iteration 3: restore it from a copy, or start a new run",
        ),
        (None, "metrics.jsonl has no measurement up to outer iteration 3"),
    ],
    ids=["cut", "not text", "no number", "empty", "gone"],
)
def test_damaged_measurements_are_named_and_left_as_they_are(tmp_path, spoil, named):
    """Only the last line may have been cut off by a crash."""
    built, place = Quadratic(num_clients=2).build(), tmp_path / "metrics.jsonl"
    solve(*built, FedBiO(), residuals=False, num_iterations=3, measure_every=1, record=tmp_path)
    if spoil is None:
        place.unlink()
    else:
        place.write_bytes(b"".join(line + b"\n" for line in spoil(place.read_bytes().splitlines())))
    before = place.read_bytes() if place.exists() else None
    with pytest.raises(CheckpointError, match=named):
        solve(*built, FedBiO(), residuals=False, num_iterations=5, record=tmp_path, resume=True)
    assert (place.read_bytes() if place.exists() else None) == before


def test_early_stopping_knows_that_losses_fall_and_does_not_trust_what_is_not_a_number():
    def stopped(metric, values):
        enough = EarlyStopping(metric, patience=2)
        asked = [enough(Progress(i, 9, i, 0.0, {"iteration": i, metric: value})) for i, value in enumerate(values)]
        return asked.index(True) if any(asked) else None, enough.best[metric]

    assert stopped("upper_loss", [5.0, 4.0, 3.0, 3.5, 3.2, 3.1]) == (4, 3.0)
    assert stopped("accuracy", [5.0, 4.0, 3.0]) == (2, 5.0)
    assert stopped("accuracy", [math.nan, 0.5, 0.6, 0.7]) == (None, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbio", "fedbioacc", "simfbo", "sparkle"])
def test_the_residual_of_a_solution_is_zero_and_of_anything_else_is_not(name):
    steps = {
        "lr_lower": 0.2,
        "lr_system": 0.2,
        "lr_upper": 0.05,
        "num_local_steps": 1,
    }  # with more of them clients drift, and the residual shows it
    settings = steps if name != "sparkle" else {"lr_lower": 0.12, "lr_system": 0.12, "lr_upper": 0.03}
    found = solve(*Quadratic().build(), name, num_rounds=800, dtype=torch.float64, **settings)
    assert found.rows[0]["residual"] == pytest.approx(1)  # u begins at zero
    assert found.rows[-1]["residual"] < 1e-8
    assert found.rows[-1]["lower_gradient"] < 1e-8


def test_a_record_says_who_has_what_and_what_every_phase_cost(tmp_path, cleaning):
    result = solve(*cleaning, AGGITD, residuals=False, num_iterations=2, record=tmp_path)
    clients = json.loads((tmp_path / "clients.json").read_text())
    assert clients["num_clients"] == 4
    for role in ("train", "val", "test"):
        labels = [list(one[role]["label"]) for one in cleaning.clients]
        assert clients["sizes"][role] == [len(own) for own in labels]
        values, counts = clients["labels"][role]["values"], clients["labels"][role]["counts"]
        assert counts == [[own.count(value) for own in labels] for value in values]
        assert {value for own in labels for value in own} == set(values)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger["totals"] == result.ledger
    assert ledger["phases"] == result.ledger.phases
    assert all(sum(ledger["clients"][column]) == result.ledger[column] for column in ledger["clients"])


def test_solve_takes_settings_and_options_by_name(cleaning):
    problem, clients = cleaning
    one = solve(problem, clients, "fedbio", num_iterations=3, lr_upper=2.0, num_local_steps=2, batch_size=8, seed=5)
    other = solve(
        problem,
        clients,
        FedBiO(lr_upper=2.0, num_local_steps=2),
        residuals=False,
        num_iterations=3,
        batch_size=8,
        seed=5,
    )
    assert same(one, other)
    given = solve(
        problem,
        clients,
        FedBiO(lr_upper=2.0, num_local_steps=2),
        num_iterations=3,
        batch_size=8,
        seed=5,
        residuals=False,
    )
    assert same(given, other)
    with pytest.raises(LookupError, match="Did you mean 'lr_upper'"):
        solve(problem, clients, "fedbio", num_iterations=3, lr_uper=2.0)
    with pytest.raises(LookupError, match="Did you mean 'num_rounds'"):
        solve(problem, clients, "fedbio", num_round=3)
    with pytest.raises(SettingError, match="lr_upper would change an algorithm that already has its settings"):
        solve(problem, clients, FedBiO(), num_iterations=3, lr_upper=1.0)
    with pytest.raises(SettingError, match="recover is 3, expected True or False"):
        solve(problem, clients, "fedbio", recover=3)
    with pytest.raises(SettingError, match="or an algorithm with its settings"):
        solve(problem, clients, 3, num_rounds=1)


def test_a_result_tells_what_it_is_and_draws_itself(cleaning, monkeypatch):
    result = solve(*cleaning, "fedbio", num_rounds=40)
    last = result.rows[-1]
    assert repr(result) == (
        f"<fedbio: 40 outer iterations, 40 rounds, {last['megabytes']:.3g} MB; upper_loss {last['upper_loss']:.4g}, "
        f"lower_loss {last['lower_loss']:.4g}, test_accuracy {last['test_accuracy']:.4g}>"
    )
    history = result.history
    assert list(history.index) == [row["iteration"] for row in result.rows]
    assert history["residual"].tolist() == [row["residual"] for row in result.rows]
    figure = result.plot("test_accuracy", against="megabytes")
    [line] = figure.axes[0].lines
    assert line.get_xdata().tolist() == pytest.approx([row["megabytes"] for row in result.rows])
    assert line.get_ydata().tolist() == pytest.approx([row["test_accuracy"] for row in result.rows])
    pyplot.close(figure)
    with pytest.raises(LookupError, match="Did you mean 'test_accuracy'"):
        result.plot("test_acuracy")
    with pytest.raises(LookupError, match="There is no column in the history named '3'"):
        result.plot(3)
    monkeypatch.setattr(sys.modules["fedbilevel.runs.result"], "find_spec", lambda name: None)
    assert result.history is result.rows


def test_findings_that_no_file_can_hold_are_named_and_the_record_stays(tmp_path):
    solve(*Quadratic().build(), FedBiO(), residuals=False, num_iterations=1, record=tmp_path)
    for content in ([{"kind": "ranking", "value": float("nan")}], [{"kind": object()}]):
        with pytest.raises(
            CheckpointError, match="the run is saved, but the findings of its task cannot be written as JSON"
        ):
            Record(tmp_path).write_findings(content)
    assert not (tmp_path / "findings.json").exists()


@pytest.mark.parametrize("recorded", [True, False])
def test_ctrl_c_promises_a_checkpoint_only_where_there_is_one(tmp_path, capsys, recorded):
    def press(progress):
        if progress.iteration == 2:
            signal.raise_signal(signal.SIGINT)

    record = tmp_path / "run" if recorded else None
    result = solve(*Quadratic().build(), FedBiO(), num_iterations=5, record=record, callbacks=[press])
    assert result.stopped == "interrupted"
    said = capsys.readouterr().err
    assert "Ctrl-C again stops at once" in said
    assert ("keeps the last checkpoint" in said) == recorded
