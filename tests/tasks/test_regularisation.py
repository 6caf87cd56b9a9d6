"""The task against plain numpy and closed forms: losses, derivatives, hypergradient blocks, figures.

Also steps that reduce the upper loss and the hypergradient.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.cli.flags import chosen
from fedbilevel.data import locations
from fedbilevel.data.sets.a9a import CHOICES, a9a
from fedbilevel.data.sets.adult import adult
from fedbilevel.data.sets.mixture import mixture
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import DataError, ProblemError, SettingError
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.regularisation import Regularisation
from support.numeric.yardstick import drive, relative

PARAMETRISATIONS = ["exp", "linear"]
parametrisations = pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)


def small(**settings) -> Regularisation:
    return Regularisation(**{"num_train": 30, "num_val": 20, "num_test": 10, **settings})


def population(built) -> Population:
    return Population(built.problem, built.clients, dtype=torch.float64)


def point(num_clients: int = 3, dim: int = 6, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Distinct positive lambda_i, and some y."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.1, 1.0, (num_clients, dim)), rng.standard_normal(dim)


def padded(fields) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with a column of ones for the bias, and labels."""
    x = fields["input"].astype(float)
    return np.hstack([x, np.ones((len(x), 1))]), fields["label"]


def entropy(fields, y: np.ndarray) -> np.ndarray:
    x, label = padded(fields)
    chance = 1 / (1 + np.exp(-x @ y))
    return -np.log(np.where(label == 1, chance, 1 - chance))


def rate(parametrisation: str, lam: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """r(lambda) and r'(lambda)."""
    return (np.exp(lam), np.exp(lam)) if parametrisation == "exp" else (lam, np.ones_like(lam))


# ---- the problem -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upper", ["private", "shared"])
@parametrisations
def test_problem_and_hypergradient_pass_the_checks_away_from_the_start_too(upper, parametrisation):
    built = small(upper=upper, parametrisation=parametrisation).build()
    assert fb.check_problem(*built, show=False).ok
    lam, _ = point()
    for x in (None, torch.tensor(lam if upper == "private" else lam[0])):
        report = fb.check_hypergradient(
            *built, x=x, estimators=["cg"], step=1e-5, show=False
        )  # y* bends strongly where nothing is regularised
        assert report.ok, str(report)


@parametrisations
def test_losses_and_figures_are_those_of_numpy(parametrisation):
    task = small(parametrisation=parametrisation, l2=0.07)
    built = task.build()
    lam, y = point()
    figures = Simulation(FedAvg(), built.problem, built.clients, dtype=torch.float64).measure(
        torch.tensor(lam), torch.tensor(y)
    )
    decay = 0.5 * ((rate(parametrisation, lam)[0] + 0.07) * y**2).sum(1)
    train = [entropy(client["train"], y).mean() for client in built.clients]
    assert figures["lower_loss"] == pytest.approx(np.mean(train + decay), rel=1e-12)
    assert figures["upper_loss"] == pytest.approx(
        np.mean([entropy(client["val"], y).mean() for client in built.clients]), rel=1e-12
    )


def test_test_figures_are_ratios_of_sums_over_clients_of_unequal_size():
    built = small().build()
    for i, client in enumerate(built.clients):
        client["test"] = {name: value[: (2, 5, 9)[i]] for name, value in client["test"].items()}
    lam, y = point(seed=4)
    fed = Simulation(
        FedAvg(), built.problem, built.clients, dtype=torch.float64, strategy="vmap"
    )  # all clients at once: short ones are padded
    figures = fed.measure(torch.tensor(lam), torch.tensor(y))
    losses = [entropy(client["test"], y) for client in built.clients]
    right = [
        (own < np.log(2)) for own in losses
    ]  # a sample is right where its label has more than half of the probability
    assert right[0][0]  # padding repeats this sample, so it would count
    assert figures["test_loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-12)
    assert figures["test_accuracy"] == pytest.approx(np.concatenate(right).mean(), rel=1e-12)
    assert figures["test_loss"] != pytest.approx(np.mean([own.mean() for own in losses]))
    assert figures["test_accuracy"] != pytest.approx(np.mean([own.mean() for own in right]))


@parametrisations
def test_derivatives_of_the_lower_level_are_those_of_the_closed_form(parametrisation):
    """Compare g_y, H v and J v, with s = sigmoid.

    g_y = mean (s - label) x + (r + l2) y;  H v = mean s (1 - s) x x'v + (r + l2) v;  J v = r' y v.
    """
    built = small(parametrisation=parametrisation, l2=0.07).build()
    pop, (lam, y) = population(built), point()
    v = np.random.default_rng(2).standard_normal(6)
    train = pop.data.batch(torch.arange(3), "train")
    x, ty, tv = torch.tensor(lam), torch.tensor(y), torch.tensor(v)
    jv, hv = pop.oracle.second_order(x, ty, tv, train)
    gy = pop.oracle.lower_grad(x, ty, train)
    r, slope = rate(parametrisation, lam)
    for i, client in enumerate(built.clients):
        inputs, label = padded(client["train"])
        chance = 1 / (1 + np.exp(-inputs @ y))
        np.testing.assert_allclose(gy[i], inputs.T @ (chance - label) / 30 + (r[i] + 0.07) * y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            hv[i], inputs.T @ (chance * (1 - chance) * (inputs @ v)) / 30 + (r[i] + 0.07) * v, rtol=0, atol=1e-12
        )
        np.testing.assert_allclose(jv[i], slope[i] * y * v, rtol=0, atol=1e-12)


def dense_blocks(task: Regularisation, lam: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y* by Newton's method, and -r'(lambda_i) y u with (mean H) u = mean f_y, in plain numpy."""
    clients, y = task.build().clients, np.zeros(lam.shape[1])
    r, slope = rate(task.parametrisation, lam)

    def parts(role: str, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gradients, hessians = [], []
        for client in clients:
            x, label = padded(client[role])
            chance = 1 / (1 + np.exp(-x @ y))
            gradients.append(x.T @ (chance - label) / len(label))
            hessians.append((x.T * (chance * (1 - chance))) @ x / len(label))
        return np.mean(gradients, 0), np.mean(hessians, 0)

    for _ in range(50):
        gradient, hessian = parts("train", y)
        hessian = hessian + np.diag(r.mean(0) + task.l2)
        y = y - np.linalg.solve(hessian, gradient + (r.mean(0) + task.l2) * y)
    hessian = parts("train", y)[1] + np.diag(r.mean(0) + task.l2)
    return y, -slope * y * np.linalg.solve(hessian, parts("val", y)[0])


@pytest.mark.parametrize("start", ["zero", "distinct"])
@parametrisations
def test_hypergradient_blocks_are_those_of_dense_algebra(parametrisation, start):
    task = small(parametrisation=parametrisation)
    lam = point()[0] if start == "distinct" else np.zeros((3, 6))
    y, blocks = dense_blocks(task, lam)
    pop = population(task.build())
    found = lower_solution(pop, torch.tensor(lam))
    assert relative(found, y) < 1e-10
    assert relative(hypergradient(pop, torch.tensor(lam), found, method="exact").value, blocks) < 1e-9


def test_in_the_papers_setting_the_hypergradient_is_the_same_for_every_client():
    task = Regularisation(parametrisation="linear", l2=0.0, bug_compatible=True)
    pop = population(task.build())
    assert float(pop.x0.abs().max()) == 0.0
    y = lower_solution(pop, pop.x0)
    blocks = hypergradient(pop, pop.x0, y, method="exact").value
    assert blocks.shape == (3, 6)
    assert float((blocks - blocks[0]).abs().max()) < 1e-12
    assert float(blocks.abs().max()) > 1e-4  # equal, but not for being zero
    train = pop.data.batch(torch.arange(3), "train")
    gradients = pop.oracle.lower_grad(pop.x0, y, train)
    assert float((gradients - gradients[0]).abs().max()) > 1e-2  # although the clients differ


def test_with_distinct_lambda_under_exp_the_hypergradient_differs_between_clients():
    pop = population(Regularisation().build())
    lam = torch.tensor(point()[0])
    blocks = hypergradient(pop, lam, lower_solution(pop, lam), method="exact").value
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert relative(blocks[i], blocks[j]) > 0.1
        np.testing.assert_allclose(
            blocks[i] / blocks[j], (lam[i] - lam[j]).exp(), rtol=1e-9
        )  # r' of one over r' of the other


def test_a_negative_linear_lambda_may_leave_the_lower_level_without_a_minimum():
    pop = population(small(parametrisation="linear", start=-1.0).build())
    with pytest.raises(ProblemError, match="not strongly convex"):
        lower_solution(pop, pop.x0)


# ---- settings and data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "value"), [({}, -2.0), ({"parametrisation": "linear"}, 0.0), ({"start": 0.5}, 0.5)], ids=str
)
@pytest.mark.parametrize("upper", ["private", "shared"])
def test_the_start_and_the_scope_of_lambda(settings, value, upper):
    built = small(upper=upper, num_clients=4, **settings).build()
    assert built.problem.scopes == ("global", upper)
    x0 = population(built).x0
    assert x0.shape == ((4, 6) if upper == "private" else (6,))
    assert torch.equal(x0, torch.full_like(x0, value))


@pytest.mark.parametrize(
    "settings", [{}, {"bug_compatible": True}, {"dirichlet": 3.0}, {"label_noise": 1.0}, {"data_seed": 5}], ids=str
)
def test_clients_hold_the_mixture_of_the_settings(settings):
    clients = small(num_clients=2, **settings).build().clients
    options = {
        "concentration": settings.get("dirichlet", 0.4),
        "noise": settings.get("label_noise", 0.1),
        "bug_compatible": "bug_compatible" in settings,
    }
    drawn = mixture(
        2, {"train": 30, "val": 20, "test": 10}, np.random.default_rng(settings.get("data_seed", 0)), **options
    )
    assert len(clients) == 2
    for client, own in zip(clients, drawn.clients, strict=True):
        assert list(client) == ["train", "val", "test"]
        for role, samples in own.items():
            assert np.array_equal(client[role]["input"], samples.x)
            assert np.array_equal(client[role]["label"], samples.label)


def test_repetitions_have_other_data():
    one, other = (small().repeated(r).build().clients[0]["train"]["input"] for r in (0, 1))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "wrong", [{"l2": -1.0}, {"dirichlet": 0.0}, {"label_noise": -0.1}, {"num_val": 0}, {"data": "mnist"}], ids=str
)
def test_settings_outside_their_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Regularisation(**wrong)


@pytest.fixture
def census(tmp_path):
    """A tiny a9a in text with distinct rows; the label is the parity of the row's number."""
    for name, num, offset in (("a9a", 40, 1), ("a9a.t", 12, 60)):
        rows = [f"{'+1' if i % 2 else '-1'} {offset + i}:1 123:1\n" for i in range(num)]
        (tmp_path / name).write_text("".join(rows))
    return str(tmp_path)


def rows(clients, role: str) -> list[tuple[int, int]]:
    """(which feature is set besides the last, label) of every sample of a role."""
    pairs = [
        (int(x[:122].argmax()) + 1, int(label))
        for c in clients
        for x, label in zip(c[role]["input"], c[role]["label"], strict=True)
    ]
    assert all(x[122] == 1 for c in clients for x in c[role]["input"])
    return pairs


def test_census_samples_go_to_one_client_and_one_role_each_with_their_labels(census):
    task = Regularisation(data="a9a", data_dir=census, num_clients=4, num_train=6, num_val=3, num_test=2)
    clients = task.build().clients
    assert [[len(client[role]["label"]) for role in ("train", "val", "test")] for client in clients] == [[6, 3, 2]] * 4
    own, tested = rows(clients, "train") + rows(clients, "val"), rows(clients, "test")
    assert len(set(own)) == 4 * 9
    assert len(set(tested)) == 4 * 2
    assert all(1 <= place <= 40 and (place - 1) % 2 == label for place, label in own)
    assert all(60 <= place < 72 and (place - 60) % 2 == label for place, label in tested)
    assert not np.array_equal(clients[0]["train"]["input"], task.repeated(1).build().clients[0]["train"]["input"])


def test_a_quarter_of_w8a_is_for_testing_and_no_sample_is_used_twice(tmp_path):
    rows = "".join(f"{'+1' if i % 2 else '-1'} {i + 1}:1\n" for i in range(40))
    (tmp_path / "w8a").write_text(rows)
    task = Regularisation(data="w8a", data_dir=str(tmp_path), num_clients=2, num_train=10, num_val=5, num_test=5)
    used = [
        (int(x.argmax()), int(label))
        for client in task.build().clients
        for fields in client.values()
        for x, label in zip(fields["input"], fields["label"], strict=True)
    ]
    assert len(set(used)) == 40
    assert all(place % 2 == label for place, label in used)
    with pytest.raises(ProblemError, match="need 12, w8a has 10: use fewer"):
        Regularisation(data="w8a", data_dir=str(tmp_path), num_clients=2, num_train=10, num_val=5, num_test=6).build()


def test_clients_of_adult_are_its_most_common_work_classes(tmp_path):
    kinds = ["Private"] * 12 + ["State-gov"] * 8 + ["?"] * 3
    line = "{age}, {kind}, 77516, Bachelors, 13, Divorced, Sales, Wife, White, Female, 0, 0, 40, Cuba, {label}\n"
    (tmp_path / "adult").mkdir()
    for name, end in (("adult.data", ""), ("adult.test", ".")):
        rows = [
            line.format(age=20 + i, kind=kind, label=("<=50K", ">50K")[i % 2] + end) for i, kind in enumerate(kinds)
        ]
        (tmp_path / "adult" / name).write_text("".join(rows))
    sizes = {"data_dir": str(tmp_path), "num_train": 5, "num_val": 3, "num_test": 9}
    clients = Regularisation(data="adult", num_clients=2, **sizes).build().clients
    names = adult(tmp_path).names
    for client, kind, num_test in zip(clients, ("Private", "State-gov"), (9, 8), strict=True):
        assert [len(client[role]["label"]) for role in ("train", "val", "test")] == [5, 3, num_test]
        assert all((fields["input"][:, names.index(f"workclass={kind}")] == 1).all() for fields in client.values())
        ages = np.concatenate([client[role]["input"][:, 0] for role in ("train", "val")])
        assert len(set(ages.tolist())) == 8
    with pytest.raises(ProblemError, match=r"workclass=\? is one of 3 work classes and has 3 people .*: use fewer"):
        Regularisation(data="adult", num_clients=3, **sizes).build()
    with pytest.raises(ProblemError, match=r"3 work classes .* but 4 clients with 2 samples each were requested"):
        Regularisation(data="adult", num_clients=4, **{**sizes, "num_train": 1, "num_val": 1}).build()


def test_census_splits_are_not_sorted_before_they_are_cut(census):
    """In the order of the file, training would get the first samples and validation the last."""
    places_of = {"train": [], "val": []}
    for seed in range(30):
        clients = (
            Regularisation(
                data="a9a", data_dir=census, num_clients=2, num_train=10, num_val=10, num_test=1, data_seed=seed
            )
            .build()
            .clients
        )
        for role, collected in places_of.items():
            collected += [place for place, _ in rows(clients, role)]
    assert np.mean(places_of["train"]) == pytest.approx(
        20.5, abs=2
    )  # 600 draws with standard deviation 11.5: 4 standard errors
    assert np.mean(places_of["val"]) == pytest.approx(20.5, abs=2)


def test_more_census_samples_than_there_are_is_a_clear_error(census):
    with pytest.raises(ProblemError, match="5 clients with 9 samples each need 45, a9a has 40: use fewer"):
        Regularisation(data="a9a", data_dir=census, num_clients=5, num_train=6, num_val=3, num_test=1).build()
    with pytest.raises(ProblemError, match="2 clients with 7 samples each need 14, a9a has 12"):
        Regularisation(data="a9a", data_dir=census, num_clients=2, num_train=6, num_val=3, num_test=7).build()


def test_census_data_that_are_nowhere_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBILEVEL_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(locations, "CHECKOUT", tmp_path)
    monkeypatch.setattr(locations, "SYSTEM", tmp_path)
    with pytest.raises(DataError, match="put them under"):
        Regularisation(data="a9a").build()


# ---- the suggested steps ---------------------------------------------------------------------------------------------


def census_or_skip() -> None:
    try:
        locations.find_one_of(*CHOICES)
    except DataError as missing:
        pytest.skip(str(missing))


def test_the_real_census_data_make_a_problem_that_passes_the_checks():
    census_or_skip()
    built = Regularisation(data="a9a").build()
    assert fb.check_problem(*built, show=False).ok
    report = fb.check_hypergradient(*built, estimators=["cg"], show=False)
    assert report.ok, str(report)
    train_x, _, test_x, _ = a9a()
    known = {row.tobytes() for row in train_x}
    assert all(row.tobytes() in known for client in built.clients for row in client["val"]["input"])
    known = {row.tobytes() for row in test_x}
    assert all(row.tobytes() in known for client in built.clients for row in client["test"]["input"])


@pytest.mark.parametrize(
    ("name", "data"), [("fedbio", "mixture"), ("fbo_aggitd", "mixture"), ("fednest", "mixture"), ("fedbio", "a9a")]
)
def test_suggested_steps_lower_the_upper_loss_and_the_hypergradient(name, data):
    """Against the best that the initial lambda can do: y*(lambda_0), not y = 0.

    After half of the suggested outer iterations.
    """
    if data == "a9a":
        census_or_skip()
    built = Regularisation(data=data).build()
    pop = population(built)
    algorithm = chosen(discovery.algorithm(name), {}, Regularisation.suggestions(name))
    fed, state = drive(algorithm, built, Regularisation.iterations(name) // 2, dtype=torch.float32)
    start, end = pop.x0, fed.collect(state.x).double()
    first, last = lower_solution(pop, start), lower_solution(pop, end)
    size = lambda x, y: float(torch.linalg.vector_norm(hypergradient(pop, x, y).value))
    assert size(end, last) < 0.5 * size(start, first)
    exact = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
    before, after = exact.measure(start, first), fed.measure(state.x, state.y)
    assert after["upper_loss"] < before["upper_loss"] - 0.05
    assert after["test_loss"] < before["test_loss"] - 0.05
    assert after["test_accuracy"] > before["test_accuracy"]
    assert set(Regularisation.headline) <= set(after)
