"""What a server reads from real messages of each algorithm, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.errors import UnknownNameError
from fedbilevel.studies.kinds import leakage
from fedbilevel.studies.leaks import Server, watch

STEPS = {"lr_lower": 0.7, "lr_system": 0.6, "lr_upper": 0.3, "num_local_steps": 1}
ALGORITHMS = ("fedavg", "fedbio", "adasimfbo", "fbo_aggitd", "penalty")
TASKS = {
    "cleaning": fb.tasks.DataCleaning(num_clients=10, noise=0.3),
    "representation": fb.tasks.HyperRepresentation(num_clients=10, split="iid", num_hidden=30),
}


def made(name, **settings):
    kind = discovery.algorithm(name)
    given = {**STEPS, **settings}
    return kind(**{key: value for key, value in given.items() if key in kind.__dataclass_fields__})


def few(task, num):
    built, rng = task.build(), np.random.default_rng(5)
    return built.problem, [leakage._some(client, num, rng) for client in built.clients]


def look(task, name, num, aggregation=fb.Aggregation(), **settings):
    problem, clients = few(task, num)
    seen = watch(made(name, **settings), problem, clients, aggregation=aggregation, dtype=torch.float64)
    prior = torch.as_tensor(np.concatenate([client["test"]["image"] for client in clients])).double().mean(0)
    return clients, seen, Server(seen, problem, task.l2, prior, torch.Generator().manual_seed(0))


def read(server, role, num, *, scaled=False):
    return server.read(role, 0, num, num_starts=1, num_steps=60, scaled=scaled)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_messages_hold_the_derivatives_of_every_client(name, task):
    problem, clients = few(TASKS[task], 3)
    seen = watch(made(name), problem, clients, aggregation=fb.Aggregation(), dtype=torch.float64)
    truth = derivatives(problem, clients)
    assert set(seen.derivatives) == {
        "gy",
        *(("fy",) if name != "fedavg" else ()),
        *(("fx",) if task == "representation" and name not in ("fedavg", "fbo_aggitd") else ()),
    }
    for one, rows in seen.derivatives.items():
        torch.testing.assert_close(rows, truth[one], rtol=1e-9, atol=1e-9)


def derivatives(problem, clients):
    """By hand: one client at a time, by autograd on the problem's own losses."""
    rows = {"gy": [], "fy": [], "fx": []}
    for client in clients:
        x0 = problem.x0({role: len(client[role]["label"]) for role in client}) if callable(problem.x0) else problem.x0
        x, y = ({k: v.double().requires_grad_() for k, v in tree.items()} for tree in (x0, problem.y0))
        for name, role, loss, leaves in (
            ("gy", "train", problem.lower, y),
            ("fy", "val", problem.upper, y),
            ("fx", "val", problem.upper, x),
        ):
            batch = {key: torch.as_tensor(value) for key, value in client[role].items()}
            batch = {**batch, "image": batch["image"].double(), "index": torch.arange(len(batch["label"]))}
            if problem.features is not None:
                batch["features"] = problem.features(x, batch)
            mean = loss(x, y, batch).mean()
            parts = torch.autograd.grad(mean, [*leaves.values()], allow_unused=True)
            if all(part is not None for part in parts):
                rows[name].append(torch.cat([part.reshape(-1) for part in parts]))
    return {name: torch.stack(some) for name, some in rows.items() if some}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_sample_without_protection_is_read_exactly(name):
    clients, _, server = look(TASKS["cleaning"], name, 1)
    for role in ("train", "val") if name != "fedavg" else ("train",):
        found = read(server, role, 1)
        torch.testing.assert_close(found.images, torch.as_tensor(clients[0][role]["image"]).double(), rtol=0, atol=1e-6)
        assert found.labels.tolist() == clients[0][role]["label"].tolist()


def test_hidden_layers_hide_nothing_of_one_validation_sample():
    clients, _, server = look(TASKS["representation"], "fedbio", 1)
    found = read(server, "val", 1)
    torch.testing.assert_close(found.images, torch.as_tensor(clients[0]["val"]["image"]).double(), rtol=0, atol=1e-6)


def test_clipping_hides_nothing_of_one_sample():
    clients, seen, server = look(TASKS["cleaning"], "fedbio", 1, fb.Aggregation(clip=0.01))
    assert seen.derivatives["gy"].norm(dim=1).max() < 0.02
    found = read(server, "train", 1, scaled=True)
    torch.testing.assert_close(found.images, torch.as_tensor(clients[0]["train"]["image"]).double(), rtol=0, atol=1e-6)
    assert found.labels.tolist() == clients[0]["train"]["label"].tolist()


def test_the_secure_sum_of_ten_clients_of_sixteen_samples_is_not_read():
    clients, seen, server = look(TASKS["cleaning"], "fedbio", 16, fb.Aggregation(secure=True))
    assert len(seen.derivatives["gy"]) == 1  # the server has no row of a client
    images, labels = leakage._truth(clients, "train")
    found = read(server, "train", 160)
    errors = (images[:, None] - found.images[None]).abs().amax(-1).amin(1)
    assert errors.min() > 0.05
    assert found.labels.tolist() == labels.sort().values.tolist()  # but it tells how many samples a class has


def test_a_secure_sum_of_single_samples_is_a_batch_and_is_read_where_labels_differ():
    """The validation sample of each of nine clients is of a class of its own, and the tenth class is absent."""
    task = fb.tasks.DataCleaning(num_clients=9, noise=0.3)
    clients, _, server = look(task, "fedbio", 1, fb.Aggregation(secure=True))
    images, _ = leakage._truth(clients, "val")
    found = read(server, "val", 9)
    assert (images[:, None] - found.images[None]).abs().amax(-1).amin(1).max() < 1e-4


def test_noise_is_in_the_rows_that_the_server_sees():
    layer = fb.Aggregation(clip=1.0, noise=1.0, epsilon=1e9)
    _, seen, _ = look(TASKS["cleaning"], "fedbio", 1, layer)
    plain = look(TASKS["cleaning"], "fedbio", 1, fb.Aggregation(clip=1.0))[1]
    spread = STEPS["lr_lower"] * (seen.derivatives["gy"] - plain.derivatives["gy"]).std()
    assert float(spread) == pytest.approx(1.0 / 10**0.5, rel=0.1)  # each of ten clients adds its part


def test_an_algorithm_with_unknown_messages_is_refused():
    problem, clients = few(TASKS["cleaning"], 1)
    with pytest.raises(UnknownNameError, match="algorithm with known messages"):
        watch(made("fednest"), problem, clients, aggregation=fb.Aggregation())


def test_the_guess_by_labels_alone_sees_no_message():
    row = {"task": {"name": "data_cleaning", "num_clients": 10}, "batch": 4, "guess": True}
    run = lambda **settings: leakage.run(
        {**row, "algorithm": {"name": "fedbio", "num_local_steps": 1, **settings}},
        repetition=1,
        folder=Path(),
        device="cpu",
        say=lambda _: None,
    )
    assert run().figures == run(lr_lower=0.5).figures
    assert 8 < run().figures["psnr"] < 20
    assert run().figures["recovered_val"] < 1
