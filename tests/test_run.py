import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from fedbilevel import Cohort, run
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.averaging import Averaging
from fedbilevel.errors import CheckpointError, NonFiniteError, ScopeError, SettingError
from fedbilevel.network import Network, given
from fedbilevel.record import Record
from fedbilevel.steps import Schedule
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic

NOISY = {"cohort": Cohort(0.5), "batch_size": 8, "checkpoint_every": 3, "measure_every": 2}
AGGITD = FBOAggITD(lr_upper=100.0, lr_lower=0.5, lr_system=0.5, num_lower_rounds=2, num_local_steps=2, estimator="sampled")


@pytest.fixture(scope="module")
def cleaning():
    return DataCleaning(num_clients=4, num_clean=5).build()


def same(first, second):
    flat = lambda value: torch.cat([leaf.reshape(-1) for tree in (value if isinstance(value, list) else [value]) for leaf in tree.values()])
    return torch.equal(flat(first.x), flat(second.x)) and torch.equal(flat(first.y), flat(second.y))


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_bit_identical_in_solution_ledger_and_metrics(tmp_path, cleaning, stop):
    whole = run(AGGITD, *cleaning, num_iterations=6, record=tmp_path / "whole", **NOISY)
    run(AGGITD, *cleaning, num_iterations=stop, record=tmp_path / "half", **NOISY)
    again = run(AGGITD, *cleaning, num_iterations=6, record=tmp_path / "half", resume=True, **NOISY)
    assert same(whole, again)
    assert whole.ledger == again.ledger
    untimed = lambda rows: [{key: value for key, value in row.items() if key != "seconds"} for row in rows if row["iteration"] % 2 == 0]
    assert untimed(whole.rows) == untimed(again.rows)
    assert [json.loads(line) for line in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()] == again.rows


def test_a_crash_between_checkpoints_repeats_the_lost_iterations_and_forgets_their_metrics(tmp_path, cleaning):
    run(AGGITD, *cleaning, num_iterations=3, record=tmp_path / "run", **NOISY)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:  # measured after the checkpoint, then cut off in the middle of a line
        file.write(json.dumps({"iteration": 4, "upper_loss": 123.0}) + "\n" + '{"iteration": 5, "upp')
    again = run(AGGITD, *cleaning, num_iterations=6, record=tmp_path / "run", resume=True, **NOISY)
    assert [row["iteration"] for row in again.rows] == [0, 2, 3, 4, 6]
    assert all(row["upper_loss"] != 123.0 for row in again.rows)


def test_a_record_alone_does_not_change_the_run(tmp_path, cleaning):
    assert same(run(AGGITD, *cleaning, num_iterations=3, **NOISY), run(AGGITD, *cleaning, num_iterations=3, record=tmp_path / "r", **NOISY))


def test_measuring_more_often_does_not_change_the_run(cleaning):
    often = {**NOISY, "measure_every": 1}
    assert same(run(AGGITD, *cleaning, num_iterations=3, **NOISY), run(AGGITD, *cleaning, num_iterations=3, **often))


def test_measurements_may_grow_further_apart_and_a_resumed_run_takes_the_same(tmp_path):
    built, options = Quadratic().build(), {"measure_every": 2, "measure_growth": 0.5, "checkpoint_every": 1}
    whole = run(FedAvg(), *built, num_iterations=40, **options)
    taken = [row["iteration"] for row in whole.rows]
    assert taken == [0, 2, 4, 6, 10, 16, 24, 36, 40]
    run(FedAvg(), *built, num_iterations=17, record=tmp_path / "r", **options)
    resumed = run(FedAvg(), *built, num_iterations=40, record=tmp_path / "r", resume=True, **options)
    assert [row["iteration"] for row in resumed.rows] == sorted({*taken, 17})  # the last of the first part is measured because it was the last


def test_a_folder_that_holds_a_run_is_never_overwritten(tmp_path, cleaning):
    run(FedAvg(), *cleaning, num_iterations=1, record=tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already holds a run"):
        run(FedAvg(), *cleaning, num_iterations=2, record=tmp_path / "run")
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
    run(FedAvg(), *Quadratic().build(), num_iterations=1, record=tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 2}) + "\n")  # measured after the checkpoint
    files = {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    built = change.pop("task", Quadratic()).build()
    with pytest.raises(CheckpointError, match=named):
        run(change.pop("algorithm", FedAvg()), *built, num_iterations=2, record=tmp_path / "run", resume=True, **change)
    assert files == {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b"\x80\x04pickle", lambda content: b""])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, damage):
    run(FedAvg(), *Quadratic().build(), num_iterations=1, record=tmp_path / "run")
    place = tmp_path / "run" / "checkpoint.safetensors"
    place.write_bytes(damage(place.read_bytes()))
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is damaged"):
        run(FedAvg(), *Quadratic().build(), num_iterations=2, record=tmp_path / "run", resume=True)


def test_a_missing_checkpoint_is_an_error_that_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        run(FedAvg(), *Quadratic().build(), num_iterations=2, record=tmp_path / "nothing", resume=True)


def test_non_finite_values_name_iteration_phase_and_client_and_keep_the_last_good_checkpoint(tmp_path):
    built = Quadratic().build()
    where = r"client \d+ returned a value of '[xyu]' that is not finite in phase 'local_steps' of outer iteration \d+"
    with pytest.raises(NonFiniteError, match=where + ".*last good checkpoint, of outer iteration"):
        run(FedBiO(lr_upper=3.0, lr_lower=3.0, lr_system=3.0), *built, num_iterations=200, record=tmp_path / "run", checkpoint_every=1)
    tensors, about = Record(tmp_path / "run").load()
    assert about["iteration"] >= 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())


def test_callbacks_see_every_iteration_and_can_stop_the_run(tmp_path):
    seen = []
    result = run(
        FedAvg(),
        *Quadratic().build(),
        num_iterations=50,
        measure_every=4,
        callbacks=[lambda now: seen.append(now.iteration) or now.iteration == 6],
        record=tmp_path / "r",
    )
    assert seen == list(range(1, 7))
    assert (result.stopped, result.iteration, result.rows[-1]["iteration"]) == ("callback", 6, 6)
    assert Record(tmp_path / "r").load()[1]["iteration"] == 6


def test_ctrl_c_leaves_a_checkpoint_that_continues_bit_for_bit(tmp_path):
    """In a process of its own, because a signal is for a whole process."""
    script = textwrap.dedent(
        """
        import sys, torch
        torch.set_num_threads(1)
        from fedbilevel import run
        from fedbilevel.algorithms.fedbio import FedBiO
        from fedbilevel.tasks.quadratic import Quadratic
        result = run(FedBiO(), *Quadratic().build(), num_iterations=100000, batch_size=2, record=sys.argv[1], measure_every=1)
        print(result.stopped, result.iteration)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 5:
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
    again = run(FedBiO(), *Quadratic().build(), num_iterations=int(iteration) + 2, record=tmp_path / "run", resume=True, **options)
    whole = run(FedBiO(), *Quadratic().build(), num_iterations=int(iteration) + 2, **options)
    assert same(again, whole)


def test_a_schedule_scales_the_steps_it_should_and_no_others():
    scaled = FBOAggITD(lr_upper=1.0, lr_lower=0.5, lr_system=0.25).scaled(Schedule(power=1.0, offset=0.0)(4))
    assert (scaled.lr_upper, scaled.lr_lower, scaled.lr_system) == (0.25, 0.125, 0.25)


def test_a_decaying_schedule_removes_the_drift_of_local_steps():
    options = {"num_iterations": 300, "dtype": torch.float64, "measure_every": 300}
    method = FedBiO(lr_upper=0.05, lr_lower=0.2, lr_system=0.2, num_local_steps=3)
    constant = run(method, *Quadratic().build(), **options).rows[-1]["distance"]
    falling = run(method, *Quadratic().build(), schedule=Schedule(power=0.7, offset=10.0), **options).rows[-1]["distance"]
    assert constant > 1e-2
    assert falling < 0.35 * constant


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_iterations": -1}, "num_iterations is -1"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"cohort": Cohort(0.0)}, "fraction is 0"),
        ({"resume": True}, "resume was asked for without a record"),
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
        run(FedAvg(), *Quadratic().build(), **{"num_iterations": 1, **options})


def test_the_solution_is_stored_by_the_users_names(tmp_path, cleaning):
    from safetensors.torch import load_file

    result = run(AGGITD, *cleaning, num_iterations=1, record=tmp_path / "run")
    stored = load_file(tmp_path / "run" / "solution.safetensors")
    assert torch.equal(stored["y.weight"], result.y["weight"])
    assert all(torch.equal(stored[f"x.client{i}.logit"], tree["logit"]) for i, tree in enumerate(result.x))
    assert [len(tree["logit"]) for tree in result.x] == [len(client["train"]["label"]) for client in cleaning.clients]


def test_an_algorithm_may_be_given_by_name_and_scopes_are_checked(cleaning):
    assert run("fedavg", *Quadratic().build(), num_iterations=1).iteration == 1
    refuses = type("Refuses", (FedAvg,), {"refuses": {"private": "it has no use for one"}, "__module__": "somewhere.refuses"})
    with pytest.raises(ScopeError, match="refuses cannot solve a problem with a private upper variable: it has no use for one"):
        run(refuses(), *cleaning, num_iterations=1)


def test_fewer_iterations_than_are_done_are_refused_and_nothing_changes(tmp_path):
    run(FedAvg(), *Quadratic().build(), num_iterations=3, record=tmp_path / "run")
    before = {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    with pytest.raises(SettingError, match=r"num_iterations is 2, but the run in .* has already done 3"):
        run(FedAvg(), *Quadratic().build(), num_iterations=2, record=tmp_path / "run", resume=True)
    assert before == {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}


def test_a_class_instead_of_an_algorithm_is_a_clear_error():
    with pytest.raises(SettingError, match="expected an algorithm with its settings"):
        run(FedBiO, *Quadratic().build(), num_iterations=1)


# ---- between peers ------------------------------------------------------------------------------------------------------------

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
    built = Quadratic(num_clients=3, upper=upper, weights="by_samples").build()
    whole = run(PUSH, *built, num_iterations=5, record=tmp_path / "whole", **PEERS)
    run(PUSH, *built, num_iterations=2, record=tmp_path / "half", **PEERS)
    again = run(PUSH, *built, num_iterations=5, record=tmp_path / "half", resume=True, **PEERS)
    assert same(whole, again)
    assert whole.ledger == again.ledger
    assert [len(value) for value in (whole.x, whole.y)] == [3, 3]  # one point per peer, whoever owns it
    untimed = lambda rows: [{key: value for key, value in row.items() if key != "seconds"} for row in rows if row["iteration"] in (0, 2, 4, 5)]
    assert untimed(whole.rows) == untimed(again.rows)
    (tensors, about), (tensors_again, about_again) = (Record(tmp_path / name).load() for name in ("whole", "half"))
    assert tensors.keys() == tensors_again.keys() >= {"push_weights", "ledger.edges-messages", "state.first", "state.w"}
    assert all(torch.equal(value, tensors_again[name]) for name, value in tensors.items())
    assert about["state"] == about_again["state"] == {"time": {"value": 5 * (2 + 2 * 2 + (2 if upper == "shared" else 0))}}
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
    run(PUSH, *built, num_iterations=1, record=tmp_path / "run", **PEERS)
    files = {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    with pytest.raises(CheckpointError, match=named):
        run(PUSH, *built, num_iterations=2, record=tmp_path / "run", resume=True, **{**PEERS, **change})
    assert files == {place.name: place.read_bytes() for place in (tmp_path / "run").iterdir()}


def test_a_network_that_was_given_as_a_function_is_recorded_by_its_first_steps(tmp_path):
    built = Quadratic(num_clients=3).build()
    ring, other = given(3, lambda step: torch.eye(3).roll(1, 1)), given(3, lambda step: torch.eye(3).roll(2, 1))
    whole = run(SGP(num_lower_steps=2), *built, num_iterations=2, network=ring)
    run(SGP(num_lower_steps=2), *built, num_iterations=1, network=ring, record=tmp_path / "run")
    with pytest.raises(CheckpointError, match="its network is"):
        run(SGP(num_lower_steps=2), *built, num_iterations=2, network=other, record=tmp_path / "run", resume=True)
    assert same(whole, run(SGP(num_lower_steps=2), *built, num_iterations=2, network=ring, record=tmp_path / "run", resume=True))


def test_peers_need_no_network_to_be_named_and_then_everybody_hears_everybody():
    result = run("sgp", *Quadratic(num_clients=3).build(), num_iterations=2, measure_every=1)
    assert result.ledger["messages"] == 2 * 10 * 3 * 2
    assert [row["disagreement"] < 1e-6 for row in result.rows] == [True] * 3


@pytest.mark.parametrize(
    ("algorithm", "options", "named"),
    [
        (FedAvg(), {"network": Network()}, "fedavg has a server, so network means nothing to it: leave it out"),
        (FedAvg(), {"averaging": Averaging()}, "fedavg has a server, so averaging means nothing to it: leave it out"),
        (SGP(), {"cohort": Cohort(0.5)}, "sgp runs between peers without a server, so cohort means nothing to it: leave it out"),
        (SGP(), {"network": "ring"}, "network is 'ring' and averaging None, expected e.g. Network"),
        (SGP(), {"averaging": 5}, "network is None and averaging 5, expected e.g. Network"),
    ],
)
def test_options_for_the_other_kind_of_algorithm_get_one_sentence_and_leave_no_folder(tmp_path, algorithm, options, named):
    with pytest.raises(SettingError, match=named):
        run(algorithm, *Quadratic(num_clients=3).build(), num_iterations=1, record=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_peers_that_explode_name_the_client_and_the_last_good_checkpoint(tmp_path):
    where = r"client \d has a value of 'y' that is not finite in outer iteration \d+: .* The last good checkpoint, of outer iteration"
    with pytest.raises(NonFiniteError, match=where):
        run(SGP(lr_lower=50.0, num_lower_steps=5), *Quadratic(num_clients=3).build(), num_iterations=50, record=tmp_path / "run", checkpoint_every=1)
    tensors, _ = Record(tmp_path / "run").load()
    assert bool(torch.isfinite(tensors["state.z"]).all())


def test_a_model_inside_a_loss_does_not_make_peers_remember_every_step():
    """A frozen model whose parameters ask for gradients would keep the graph of the whole run."""
    built, model = Quadratic(num_clients=3).build(), torch.nn.Linear(4, 6)
    lower = built.problem.lower
    problem = dataclasses.replace(built.problem, lower=lambda x, y, batch: lower(x, y, batch) + 0.1 * (y["y"] * model(x["x"])).sum())
    state = run(SGP(num_lower_steps=2), problem, built.clients, num_iterations=2).state
    assert not any(value.requires_grad for value in state)


def test_the_length_of_a_private_x_does_not_change_what_a_run_costs():
    costs = [run(PUSH, *Quadratic(num_clients=3, upper="private", dim_upper=dim).build(), num_iterations=2, **PEERS).ledger for dim in (2, 6)]
    assert costs[0] == costs[1]
    alone = run(PUSH, *Quadratic(num_clients=3, upper="private", lower="local").build(), num_iterations=2, **PEERS)
    assert {alone.ledger[name] for name in ("rounds", "floats_up", "bytes_up", "floats_down")} == {0}
