"""Adam on the lower level of penalty and FedBiO: in numpy, client by client, and beside torch's own Adam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_adafbio import SCOPES, SMALL
from test_penalty import COEFFICIENTS, offsets, quartic

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.errors import NonFiniteError
from fedbilevel.federation.probing import Found
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.by_hand import Samples, fx, fy, gy
from support.numeric.yardstick import drive

B1, B2, EPS = 0.8, 0.9, 1e-3
STEPS: dict[str, Any] = {"lr_upper": 0.05, "lr_lower": 0.02, "adam_beta1": B1, "adam_beta2": B2, "adam_eps": EPS}
TAUS = (3, 1, 2)
WAYS = ["adam", "server_adam"]
drops = lambda iteration, call: [iteration % 3]


class Moments:
    """Momenta of y and of the offsets, the second moment of y and the number of steps, in numpy."""

    def __init__(self, names: list[str], width: int) -> None:
        self.m = {name: np.zeros(width) for name in names}
        self.s, self.t = np.zeros(width), 0.0

    def step(self, z: dict[str, np.ndarray], q: dict[str, np.ndarray], lr: float) -> dict[str, np.ndarray]:
        self.t += 1
        self.m = {name: B1 * m + (1 - B1) * q[name] for name, m in self.m.items()}
        self.s = B2 * self.s + (1 - B2) * q["y"] ** 2
        root = np.sqrt(self.s / (1 - B2**self.t)) + EPS
        return {name: value - lr * self.m[name] / (1 - B1**self.t) / root for name, value in z.items()}


def points(algorithm: Any, z: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """All y_j, from the y of the run and the offsets."""
    y, d = z["y"], z["d"]
    if algorithm.answer == "penalised":
        ys = {1: y, (0 if algorithm.order == 1 else -1): y + d}
    else:
        ys = {1: y + d, **({0: y} if algorithm.order == 1 else {-1: y - d})}
    return {**ys, **({2: y + z["e_plus"], -2: y + z["e_minus"]} if algorithm.order == 4 else {})}


def directions(algorithm: Any, samples: Samples, i: int, where: Any, x: np.ndarray, z: Any) -> tuple[Any, Any]:
    """The direction of x, and those of y, the offsets or u."""
    draw = lambda role, name: samples.drawn(i, role, name, where)
    if isinstance(algorithm, FedBiO):
        lower, upper = draw("train", "B_g"), draw("val", "B_f")
        hessian, mixed = lower["A"].mean(0), lower["B"].mean(0)
        q = {"y": gy(lower, x, z["y"]), "u": hessian @ z["u"] - fy(upper, x, z["y"])}
        return fx(upper, x, z["y"]) + mixed.T @ z["u"], q
    lower, upper, cross = draw("train", "B_g"), draw("val", "B_f"), draw("train", "B_x")
    lam, dx, dys = algorithm.penalty, 0.0, {}
    for j, y in points(algorithm, z).items():
        c, g = COEFFICIENTS[algorithm.order][j], gy(lower, x, y)
        dx = dx + c * (j * fx(upper, x, y) - lam * cross["B"].mean(0).T @ y)
        dys[j] = (j * fy(upper, x, y) + lam * g) / (abs(j) + lam) if j else g
    return dx, offsets(algorithm, dys)


def by_hand(algorithm: Any, task: Quadratic, num: int, batch_size: int | None) -> dict[str, np.ndarray]:
    samples, m = Samples(task, batch_size=batch_size), task.num_clients
    plain = ["u"] if isinstance(algorithm, FedBiO) else []
    moving = ["y"] if plain else list(offsets(algorithm, dict.fromkeys(COEFFICIENTS[algorithm.order], np.zeros(1))))
    x = [np.zeros(task.dim_upper) for _ in range(m)]
    z = [{name: np.zeros(task.dim_lower) for name in (*moving, *plain)} for _ in range(m)]
    own = [Moments(moving, task.dim_lower) for _ in range(m)]
    local, at_clients = task.lower == "local", algorithm.lower_optimiser == "adam"
    for iteration in range(1, num + 1):
        here = [i for i in range(m) if i not in drops(iteration, 1)]
        before = {name: z[0][name] for name in moving}  # if the lower level is global
        for i in here:
            start = {name: z[i][name] for name in moving}
            for step in range(TAUS[i]):
                dx, q = directions(algorithm, samples, i, (iteration, 1, step), x[i], z[i])
                x[i] = x[i] - algorithm.lr_upper * dx
                z[i].update({name: z[i][name] - 0.1 * q[name] for name in plain})
                old = {name: z[i][name] for name in moving}
                z[i].update(
                    own[i].step(old, q, algorithm.lr_lower)
                    if at_clients
                    else {name: old[name] - algorithm.lr_lower * q[name] for name in moving}
                )
            if local and not at_clients:
                q = {name: (start[name] - z[i][name]) / algorithm.lr_lower for name in moving}
                z[i].update(own[i].step(start, q, algorithm.server_lr))
        mean = lambda values, here=here: np.mean([values[i] for i in here], axis=0)
        if task.upper == "shared":
            x = [mean(x)] * m
        if local:
            continue
        averaged = {name: mean([one[name] for one in z]) for name in z[0]}
        if not at_clients:
            q = {name: (before[name] - averaged[name]) / algorithm.lr_lower for name in moving}
            averaged.update(own[0].step(before, q, algorithm.server_lr))
        else:
            momenta = {name: mean([one.m[name] for one in own]) for name in moving}
            second, count = mean([one.s for one in own]), iteration * max(TAUS)
            for one in own:
                one.m, one.s, one.t = dict(momenta), second, count
        z = [dict(averaged) for _ in range(m)]
    found = {name: np.stack([one[name] for one in z]) for name in z[0]}
    state = own if local or at_clients else own[:1] * m
    found |= {f"m_{name}": np.stack([one.m[name] for one in state]) for name in moving}
    return {
        "x": np.stack(x), **found,
        "s_y": np.stack([one.s for one in state]), "t_y": np.array([[one.t] for one in state]),
    }  # fmt: skip


ALGORITHMS = [
    pytest.param(Penalty, {"order": 1, "penalty": 3.0}, id="order 1"),
    pytest.param(Penalty, {"order": 2, "penalty": 3.0}, id="order 2"),
    pytest.param(Penalty, {"order": 4, "penalty": 3.0, "answer": "penalised"}, id="order 4"),
    pytest.param(FedBiO, {"minibatches": "shared"}, id="fedbio"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
@pytest.mark.parametrize(("kind", "settings"), ALGORITHMS)
def test_three_outer_iterations_by_hand_on_minibatches_with_unequal_work_and_drops(kind, settings, lower, upper, way):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    algorithm = kind(**STEPS, **settings, num_local_steps=TAUS, lower_optimiser=way, server_lr=0.03)
    fed, state = drive(algorithm, task.build(), 3, batch_size=2, drops=drops)
    for name, expected in by_hand(algorithm, task, 3, 2).items():
        found = fed.collect(getattr(state, name)).expand(3, -1)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12, err_msg=name)


def test_one_client_takes_the_steps_of_torch():
    problem, clients = quartic(num=1)
    settings = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "lower_optimiser": "adam"}
    algorithm = FedBiO(lr_upper=1e-30, lr_lower=0.05, num_local_steps=3, **settings)
    _, state = drive(algorithm, Built(problem, clients), 4)
    y = problem.y0["y"].clone().requires_grad_()
    torch_adam = torch.optim.Adam([y], lr=0.05, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(12):
        torch_adam.zero_grad()
        problem.lower(problem.x0, {"y": y}, clients[0]["train"]).mean().backward()
        torch_adam.step()
    torch.testing.assert_close(state.y, y.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", [1, 2, 4])
def test_points_of_the_penalty_differ_by_the_inverse_of_the_weight(order, way):
    """They share the second moment of y; with moments of their own they would differ by the step."""
    built = Quadratic(**SMALL, noise=0.9).build()
    settings = {**STEPS, "lr_upper": 1e-12, "order": order, "num_local_steps": 2, "lower_optimiser": way}
    far = [float(drive(Penalty(**settings, penalty=lam), built, 20, batch_size=1)[1].d.norm()) for lam in (1e3, 1e6)]
    assert far[0] > 1e-6
    assert far[0] / far[1] == pytest.approx(1e3, rel=0.05)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Penalty, FedBiO])
def test_it_reaches_the_lower_solution_where_units_differ_and_plain_steps_do_not(kind, way):
    """Scale the entries of y, so that curvatures differ by 1e4 and a plain step suits one of them."""
    scale = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    built = Quadratic(**SMALL).build()
    problem = built.problem
    scaled = lambda loss: lambda x, y, batch: loss(x, {"y": scale * y["y"]}, batch)
    other = fb.Problem(
        upper=scaled(problem.upper), lower=scaled(problem.lower), x0={"x": torch.zeros(2)}, y0={"y": torch.zeros(3)}
    )
    closed = Quadratic(**SMALL).closed_form()
    target = closed.lower_solution(np.zeros(2))
    settings: dict[str, Any] = {"lr_upper": 1e-12, "num_local_steps": 1, "adam_eps": 1e-8}
    settings |= {"penalty": 1e9} if kind is Penalty else {"lr_system": 1e-12}
    adam = {"lr_lower": 0.01, "server_lr": 0.01, "lower_optimiser": way}
    run = lambda **steps: drive(kind(**settings, **steps), Built(other, built.clients), 600)[1].y * scale
    wrong = lambda y: (np.abs(y.numpy() - target) / np.abs(target)).max()
    assert wrong(run(**adam)) < 0.1
    assert wrong(run(lr_lower=5e-5)) > 0.9
    with pytest.raises(NonFiniteError):
        run(lr_lower=1e-3)  # a longer plain step diverges


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Penalty, FedBiO])
def test_the_contract_of_algorithms(kind, way):
    report = fb.check_algorithm(kind(num_local_steps=2, lower_optimiser=way), show=False)
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("kind", [Penalty, FedBiO])
def test_every_strategy_has_the_same_numbers(kind, strategy):
    algorithm, built = kind(num_local_steps=2, lower_optimiser="adam"), Quadratic(**SMALL).build()
    end = lambda strategy: drive(algorithm, built, 4, batch_size=2, strategy=strategy)[1]
    for name, value in end(strategy)._asdict().items():
        if value is not None:
            torch.testing.assert_close(value, getattr(end("auto"), name), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
@pytest.mark.parametrize(("kind", "order", "rows"), [(Penalty, 1, 2), (Penalty, 2, 2), (Penalty, 4, 4), (FedBiO, 0, 2)])
def test_the_ledger_holds_what_the_docstrings_say(kind, order, rows, lower, upper):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    X, Y = 2 * (upper == "shared"), 3 * (lower == "global")
    points = {"order": order} if order else {}
    for way, more in (("adam", 2 if kind is FedBiO else max(order, 2) + 1), ("server_adam", 0)):
        algorithm = kind(num_local_steps=2, lower_optimiser=way, **points)
        fed, _ = drive(algorithm, task.build(), 3)
        assert fed.ledger.columns["floats_up"].tolist() == [3 * (X + (rows + more) * Y)] * 3
        count = int(way == "adam" and lower == "global")
        assert fed.ledger.columns["floats_down"].tolist() == [3 * (X + (rows + more) * Y + count)] * 3


def test_auto_is_a_share_of_the_movement_of_the_warm_up():
    numbers = dict.fromkeys(Found._fields, 1.0) | {"y": 0.3, "num_clients": 3, "width": 4}
    found = Found(**numbers)  # type: ignore[arg-type]
    adam = Penalty(lower_optimiser="adam", num_local_steps=(2, 3)).auto_steps(found)["lr_lower"]
    assert adam == pytest.approx(0.3 * 0.1 / 3)
    for way in ("sgd", "server_adam"):
        assert Penalty(lower_optimiser=way).auto_steps(found)["lr_lower"] == 1.0
