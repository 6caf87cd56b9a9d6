"""Problems from torch modules: for both variables, or for one beside tensors."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.problem.modules import BoundModule
from fedbilevel.problem.problem import Problem, Scopes

DIM, CLASSES, WIDTH = 3, 3, 4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def clients(sizes=(4, 7, 5)):
    rng = np.random.default_rng(3)
    samples = lambda n: {
        "a": rng.standard_normal((n, DIM)),
        "b": rng.standard_normal(n),
        "label": rng.integers(0, CLASSES, n),
    }
    return [{"train": samples(n), "val": samples(n - 1)} for n in sizes]


def modules(*noise):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), *noise).double(), nn.Linear(4, 1).double()


def squared(net, head, batch):
    return (batch["weight"] * (head(net(batch["a"]))[:, 0] - batch["b"]) ** 2).sum() + 0.1 * sum(
        (p**2).sum() for p in head.parameters.values()
    )


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.FeatureAlphaDropout(0.2), "x_module.2 uses dropout in training mode"),
        (nn.Sequential(nn.AlphaDropout(0.2)), "x_module.2.0 uses dropout in training mode"),
        (nn.BatchNorm1d(4), "x_module.2 uses batch norm in training mode"),
        (nn.SyncBatchNorm(4), "x_module.2 uses batch norm in training mode"),
    ],
)
def test_noisy_layers_of_a_module_are_refused_by_name(layer, says):
    net, head = modules(layer)
    with pytest.raises(ProblemError) as error:
        Problem.from_modules(net, head, upper=squared, lower=squared)
    assert says in str(error.value)
    with pytest.raises(ProblemError, match="y_module uses dropout"):
        Problem.from_modules(head, nn.AlphaDropout(), upper=squared, lower=squared)


@pytest.mark.parametrize("layer", [nn.Dropout(0.2), nn.BatchNorm1d(4)])
def test_the_same_layers_in_eval_mode_are_allowed(layer):
    net, head = modules(layer)
    population = Population(
        Problem.from_modules(net.eval(), head, upper=squared, lower=squared), clients(), dtype=torch.float64
    )
    batch = population.data.batch(torch.arange(3), "train")
    rows = population.oracle.lower_grad(population.x0, population.y0, batch)
    for i in range(3):
        row = batch.row(i)
        loss = (row["weight"] * (head(net(row["a"]))[:, 0] - row["b"]) ** 2).sum() + 0.1 * sum(
            (p**2).sum() for p in head.parameters()
        )
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(head.parameters()))])
        torch.testing.assert_close(rows[i], expected, rtol=1e-12, atol=1e-12)


def test_a_module_without_parameters_is_refused():
    net, head = modules()
    with pytest.raises(ProblemError, match="y_module has no parameters"):
        Problem.from_modules(net, nn.Tanh(), upper=squared, lower=squared)
    with pytest.raises(ProblemError, match="x_module has no parameters"):
        Problem.from_modules(nn.Tanh(), head, upper=squared, lower=squared)


def test_modules_give_their_parameters_and_are_never_changed():
    net, head = modules()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    population = Population(
        Problem.from_modules(net, head, upper=squared, lower=squared), clients(), dtype=torch.float64
    )
    assert population.layout_x.describe() == {"0.weight": [4, DIM], "0.bias": [4]}
    assert torch.equal(population.x0, torch.cat([p.detach().flatten() for p in net.parameters()]))
    population.oracle.upper_grads(population.x0 + 1, population.y0, population.data.batch(torch.arange(3), "val"))
    population.x0.zero_()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_a_bound_module_computes_with_the_given_parameters():
    net, _ = modules()
    a = torch.ones(2, DIM, dtype=torch.float64)
    weight, bias = torch.full((4, DIM), 0.1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    bound = BoundModule(net, {"0.weight": weight, "0.bias": bias})
    torch.testing.assert_close(bound(a), torch.tanh(a @ weight.T), rtol=1e-14, atol=0)
    assert bound.parameters["0.weight"] is weight


def test_frozen_parameters_stay_and_buffers_follow_the_type():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    net[0].requires_grad_(False)
    data = [{role: {"a": torch.randn(5, 3), "b": torch.randn(5)} for role in ("train", "val")} for _ in range(2)]
    loss = lambda net, head, batch: (
        (batch["weight"] * (head(net(batch["a"]))[:, 0] - batch["b"]) ** 2).sum()
        + (head.parameters["weight"] ** 2).sum()
    )
    made = Problem.from_modules(net, nn.Linear(2, 1, bias=False), upper=loss, lower=loss)
    assert set(made.x0) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    population = Population(made, data, dtype=torch.float64)
    batch = population.data.batch(torch.arange(2), "val")
    assert bool(torch.isfinite(population.oracle.upper_grad_x(population.x0, population.y0, batch)).all())


# ---- a module beside tensors, against the same problem with tensors alone ------------------------------


def squares(tree):
    return sum((leaf**2).sum() for leaf in tree.values())


def losses(scores, penalised, batch):
    return cross_entropy(scores, batch["label"], reduction="none") + 0.1 * penalised


def head_beside_weights(**changes):
    """y is a linear classifier, x a positive weight per feature; as a module for y, and as tensors."""
    torch.manual_seed(1)
    head = nn.Linear(DIM, CLASSES).double()
    x0 = {"scale": torch.linspace(-0.5, 0.5, DIM, dtype=torch.float64), "shift": torch.zeros(1)}
    inputs = lambda x, batch: batch["a"] * x["scale"].exp() + x["shift"]
    counts = lambda scores, batch: {"right": scores.argmax(1) == batch["label"]}
    module = Problem.from_modules(
        y_module=head,
        x0=x0,
        upper=lambda x, head, batch: losses(head(inputs(x, batch)), 0, batch),
        lower=lambda x, head, batch: losses(head(inputs(x, batch)), squares(head.parameters), batch),
        statistics={"val": lambda x, head, batch: counts(head(inputs(x, batch)), batch)},
        metrics=lambda sums: {"right": sums["right"]},
        **changes,
    )
    scores = lambda x, y, batch: inputs(x, batch) @ y["weight"].T + y["bias"]
    tensors = Problem(
        upper=lambda x, y, batch: losses(scores(x, y, batch), 0, batch),
        lower=lambda x, y, batch: losses(scores(x, y, batch), squares(y), batch),
        x0=x0,
        y0={name: value.detach().clone() for name, value in head.named_parameters()},
        statistics={"val": lambda x, y, batch: counts(scores(x, y, batch), batch)},
        metrics=lambda sums: {"right": sums["right"]},
        **changes,
    )
    return module, tensors


def encoder_beside_classifier(*, cached=False, **changes):
    """x is an encoder, y a classifier of its outputs; as a module for x, and as tensors."""
    torch.manual_seed(2)
    encoder = nn.Sequential(nn.Linear(DIM, WIDTH), nn.Tanh()).double()
    y0 = {"w": torch.linspace(-1, 1, WIDTH * CLASSES, dtype=torch.float64).view(WIDTH, CLASSES)}
    encoded = lambda x, batch: torch.tanh(batch["a"] @ x["0.weight"].T + x["0.bias"])
    seen = lambda batch, otherwise: batch["features"] if cached else otherwise()
    by_net = lambda net, y, batch: seen(batch, lambda: net(batch["a"])) @ y["w"]
    by_tensors = lambda x, y, batch: seen(batch, lambda: encoded(x, batch)) @ y["w"]
    module = Problem.from_modules(
        x_module=encoder,
        y0=y0,
        upper=lambda net, y, batch: losses(by_net(net, y, batch), squares(net.parameters), batch),
        lower=lambda net, y, batch: losses(by_net(net, y, batch), squares(y), batch),
        features=(lambda net, batch: net(batch["a"])) if cached else None,
        **changes,
    )
    tensors = Problem(
        upper=lambda x, y, batch: losses(by_tensors(x, y, batch), squares(x), batch),
        lower=lambda x, y, batch: losses(by_tensors(x, y, batch), squares(y), batch),
        x0={name: value.detach().clone() for name, value in encoder.named_parameters()},
        y0=y0,
        features=encoded if cached else None,
        **changes,
    )
    return module, tensors


def logits_per_sample(**changes):
    """x_i is private and has one logit per training sample of client i; y is a module."""
    torch.manual_seed(3)
    head = nn.Linear(DIM, CLASSES).double()
    x0 = lambda sizes: {"logit": torch.linspace(-1, 1, sizes["train"], dtype=torch.float64)}
    trust = lambda x, batch: torch.sigmoid(x["logit"][batch["index"]])
    scores = lambda y, batch: batch["a"] @ y["weight"].T + y["bias"]
    fit = lambda scores, batch: cross_entropy(scores, batch["label"], reduction="none")
    options = {"x0": x0, "scopes": Scopes(upper="private"), **changes}
    module = Problem.from_modules(
        y_module=head,
        upper=lambda x, head, batch: fit(head(batch["a"]), batch),
        lower=lambda x, head, batch: trust(x, batch) * fit(head(batch["a"]), batch) + 0.1 * squares(head.parameters),
        **options,
    )
    tensors = Problem(
        upper=lambda x, y, batch: fit(scores(y, batch), batch),
        lower=lambda x, y, batch: trust(x, batch) * fit(scores(y, batch), batch) + 0.1 * squares(y),
        y0={name: value.detach().clone() for name, value in head.named_parameters()},
        **options,
    )
    return module, tensors


PAIRS = {
    "module for y beside a shared x": head_beside_weights(),
    "module for y beside one x per client": head_beside_weights(scopes=Scopes(upper="private")),
    "module for y beside logits per sample": logits_per_sample(),
    "module for a local y": head_beside_weights(scopes=Scopes(lower="local")),
    "module for x beside tensors": encoder_beside_classifier(),
    "module for x with features": encoder_beside_classifier(cached=True),
    "module for a private x": encoder_beside_classifier(scopes=Scopes(upper="private")),
}


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_module_beside_tensors_has_the_values_and_derivatives_of_tensors_alone(pair, strategy):
    module, tensors = (Population(made, clients(), dtype=torch.float64, strategy=strategy) for made in pair)
    assert torch.equal(module.x0, tensors.x0)
    assert torch.equal(module.y0, tensors.y0)
    rng = torch.Generator().manual_seed(4)
    x, y, v = (
        start + 0.3 * torch.randn(start.shape, generator=rng, dtype=torch.float64)
        for start in (tensors.x0, tensors.y0, tensors.y0)
    )

    def found(population):
        oracle, data = population.oracle, population.data
        train, val = (data.batch(data.positions, role) for role in ("train", "val"))
        fx, fy = oracle.upper_grads(x, y, val)
        return {
            "upper": oracle.evaluate(population.problem.upper, x, y, val),
            "lower": oracle.evaluate(population.problem.lower, x, y, train),
            "f_x": fx,
            "f_y": fy,
            "g_y": oracle.lower_grad(x, y, train),
            "g_x": oracle.lower_grad_x(x, y, train),
            "J v": oracle.jacobian_product(x, y, v, train),
            "H v": oracle.hessian_product(x, y, v, train),
        }

    expected = found(tensors)
    assert all(bool(value.abs().max() > 1e-3) for name, value in expected.items() if name != "f_x")
    torch.testing.assert_close(found(module), expected, **CLOSE)
    assert module.measure(x, y) == pytest.approx(tensors.measure(x, y), rel=1e-12)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_run_with_a_module_beside_tensors_ends_where_tensors_alone_end(pair):
    local = pair[0].scopes.lower == "local"
    algorithm = "fedbio_local" if local else "fedbio"
    ends = [
        fb.solve(made, clients(), algorithm, num_iterations=3, dtype=torch.float64, residuals=False).rows[-1]
        for made in pair
    ]
    for name in ("upper_loss", "lower_loss"):
        assert ends[0][name] == pytest.approx(ends[1][name], rel=1e-9)


def test_a_value_is_a_module_where_a_module_was_given_and_a_dict_elsewhere():
    seen = {}

    def loss(x, head, batch):
        seen["loss"] = (type(x), type(head))
        return (head(batch["a"])[:, 0] - batch["b"]) ** 2 + (x["s"] ** 2).sum() * squares(head.parameters)

    def diagnostics(x, y):
        seen["diagnostics"] = (type(x), type(y))
        return {"size": float(squares(y))}

    made = Problem.from_modules(
        y_module=nn.Linear(DIM, 1), x0={"s": torch.ones(2)}, upper=loss, lower=loss, diagnostics=diagnostics, name="own"
    )
    assert repr(made) == "<Problem own: x (shared) = {s: (2)}, y (global) = {weight: (1, 3), bias: (1)}>"
    fb.solve(made, clients(), "fedbio", num_iterations=1)
    assert seen == {"loss": (dict, BoundModule), "diagnostics": (dict, dict)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "x_module and y_module are both missing, expected a torch.nn.Module for one of them at least"),
        ({"x0": {"s": torch.ones(2)}, "y0": {"w": torch.ones(2)}}, "x_module and y_module are both missing"),
        ({"y_module": nn.Linear(2, 1)}, "x_module and x0 are both missing, expected one of them: give a module"),
        ({"x_module": nn.Linear(2, 1)}, "y_module and y0 are both missing, expected one of them"),
        (
            {"x_module": nn.Linear(2, 1), "y_module": nn.Linear(2, 1), "y0": {"w": torch.ones(2)}},
            "y_module and y0 are both given, expected one of them",
        ),
        (
            {"x_module": nn.Linear(2, 1), "y_module": nn.Linear(2, 1), "x0": {"w": torch.ones(2)}},
            "x_module and x0 are both given, expected one of them",
        ),
        (
            {"y_module": nn.Linear(2, 1), "x0": torch.ones(2)},
            "x0 must be a dict of named tensors with at least one entry, got Tensor",
        ),
        (
            {"y_module": nn.Linear(2, 1), "x0": lambda sizes: {"s": torch.ones(sizes["train"])}},
            "x0 is a function of the client's sizes, which only a private x can be",
        ),
        (
            {"x_module": nn.Linear(2, 1), "y_module": {"w": torch.ones(2)}},
            "y_module is of type dict, expected a torch.nn.Module: give a dict of tensors as y0",
        ),
    ],
)
def test_contradicting_or_missing_variables_are_refused(given, says):
    with pytest.raises(ProblemError) as error:
        Problem.from_modules(**given, upper=squared, lower=squared)
    assert says in str(error.value)
