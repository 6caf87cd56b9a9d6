"""Example-level privacy in runs: the account of the events, resumes, budgets and refusals."""

import inspect
import math
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from opacus.accountants import RDPAccountant

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ScopeError, SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Cohort, PeerAlgorithm, phase
from fedbilevel.privacy import noisy_oracle
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=3, client_weights="by_samples").build()
OPTIONS = {"dtype": torch.float64, "strategy": "loop"}


def layer(**more):
    return fb.Aggregation(**{"level": "example", "clip": 2.0, "noise": 2.0, "epsilon": 1e4, **more})


def epsilon_of(*history):
    """The accountant's own figure for (noise, rate, times)."""
    account = RDPAccountant()
    account.history = list(history)
    return account.get_epsilon(1e-5)


def fedbio_epsilon(iterations, rate=1.0, steps=2):
    """Per step: (f_x, f_y) and (J u, H u) with common coins, and g_y."""
    return epsilon_of((2.0 / math.sqrt(2), rate, 2 * steps * iterations), (2.0, rate, steps * iterations))


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_epsilon_is_that_of_the_derivatives_that_were_released(rate, capsys):
    run = fb.solve(*BUILT, FedBiO(num_local_steps=2), num_iterations=3, measure_every=1, aggregation=layer(rate=rate))
    wanted = [0.0, *(fedbio_epsilon(num, rate) for num in (1, 2, 3))]
    assert [row["epsilon"] for row in run.rows] == pytest.approx(wanted, rel=1e-9)
    assert f"epsilon will be about {wanted[-1]:.4g} at delta 1e-05 after 3 outer" in capsys.readouterr().err


def test_a_derivative_that_is_used_twice_is_released_once():
    """FBO-AggITD with one local step, N = 2: q, H z, f_y, SVRG of y; then f_x and J p; then x."""
    run = fb.solve(*BUILT, "fbo_aggitd", num_lower_rounds=2, num_iterations=2, aggregation=layer(rate=0.2))
    each = 2 + 2 + 3 + 2 + 2 + 1
    assert run.final["epsilon"] == pytest.approx(epsilon_of((2.0, 0.2, 2 * each)), rel=1e-9)


def test_one_sample_moves_the_row_of_a_client_by_the_step_times_clip_over_its_number(monkeypatch):
    """FedAvg and FedBiO with one local step, without the noise; the example is far beyond the norm."""
    monkeypatch.setattr(noisy_oracle, "ring_noise", lambda shape, sigma, source: torch.zeros(*shape, dtype=torch.int64))
    task = Quadratic(num_clients=3, client_weights="by_samples")
    clients = task.clients()
    for fields in clients[1]["train"].values():
        fields[2] *= 1e4
    gone = [{role: {name: rows.copy() for name, rows in f.items()} for role, f in own.items()} for own in clients]
    for fields in gone[1]["train"].values():
        fields[2] = 0.0
    sizes = [len(own["train"]["c"]) for own in clients]
    for algorithm in (FedAvg(num_local_steps=1, lr_lower=0.1), FedBiO(num_local_steps=1, lr_lower=0.1)):
        new = [
            fb.solve(BUILT[0], some, algorithm, num_iterations=1, aggregation=layer(clip=0.5), **OPTIONS).state.y
            for some in (clients, gone)
        ]
        moved = float(torch.linalg.vector_norm(new[0] - new[1]))
        assert moved == pytest.approx(0.1 * 0.5 / sizes[1] * sizes[1] / sum(sizes), rel=1e-6)


def test_a_resume_continues_the_account_and_pays_for_repeated_iterations(tmp_path):
    folder, more = tmp_path / "run", {"measure_every": 1, "checkpoint_every": 2, "aggregation": layer(rate=0.5)}

    def interrupt(progress):
        if progress.iteration == 3:
            raise RuntimeError("power cut")

    algorithm = FedBiO(num_local_steps=2)
    with pytest.raises(RuntimeError):
        fb.solve(*BUILT, algorithm, num_iterations=4, record=folder, callbacks=[interrupt], **more)
    result = fb.solve(*BUILT, algorithm, num_iterations=4, record=folder, resume=True, **more)
    assert result.final["epsilon"] == pytest.approx(fedbio_epsilon(3 + 2, 0.5), rel=1e-9)
    whole = fb.solve(*BUILT, algorithm, num_iterations=4, **more)  # coins and noise have addresses
    assert torch.equal(result.state.x, whole.state.x)


@pytest.mark.parametrize("scopes", [{}, {"upper": "private", "lower": "local"}], ids=["shared", "kept"])
def test_a_run_stops_at_its_budget(scopes):
    """Derivatives count even if all that is made of them stays at the clients."""
    built = Quadratic(num_clients=3, **scopes).build()
    budget = fedbio_epsilon(2) + 1e-6
    run = fb.solve(*built, FedBiO(num_local_steps=2), num_iterations=5, aggregation=layer(epsilon=budget))
    assert (run.iteration, run.stopped) == (2, "budget")
    assert run.final["epsilon"] == pytest.approx(budget, abs=2e-6)


def test_the_order_of_clients_and_cohorts_do_not_change_a_client(capsys):
    problem, clients = BUILT
    ids, more = [2, 0, 1], {"num_iterations": 2, "aggregation": layer(rate=0.5), "cohort": Cohort(0.7), **OPTIONS}
    one = fb.solve(*BUILT, "fedbio", **more)
    other = fb.solve(problem, [clients[i] for i in ids], "fedbio", ids=ids, **more)
    assert torch.equal(one.state.x, other.state.x)


@pytest.mark.parametrize(
    "more", [{"compress": "int8"}, {"robust": "median"}, {"secure": True}, {"clips": {"hv": 5.0, "jv": 0.1}}], ids=str
)
def test_rows_of_noisy_derivatives_may_be_treated_in_any_way(more):
    run = fb.solve(*BUILT, FedBiO(num_local_steps=2), num_iterations=2, aggregation=layer(**more))
    assert run.final["epsilon"] == pytest.approx(fedbio_epsilon(2), rel=1e-9)


SERVED = [name for name, kind in discovery.algorithms().items() if not issubclass(kind, PeerAlgorithm)]


@pytest.mark.parametrize("name", SERVED)
def test_every_algorithm_is_private_or_refused_before_it_runs(name):
    kind = discovery.algorithms()[name]
    words = ("clients.samples(", ".upper_loss(", "batch.fields", "clients.host.data.fields")
    reads = any(word in inspect.getsource(inspect.getmodule(one)) for one in kind.__mro__[:-3] for word in words
                if one.__module__.startswith(("fedbilevel.algorithms", "fedbilevel.detectors")))  # fmt: skip
    assert kind.reads_samples >= reads
    try:
        fed = Simulation(kind(), *BUILT, aggregation=layer(rate=0.5))
        kind().check_scopes(BUILT[0].scopes)
    except ScopeError:
        return
    except SettingError as error:
        assert kind.reads_samples
        assert "only derivatives have noise, so all else would leave without it" in str(error)  # noqa: PT017
        return
    assert not kind.reads_samples
    algorithm = kind()
    with torch.no_grad():
        fed.begin(0)
        state = algorithm.init(fed)
        fed.begin(1, algorithm)
        algorithm.round(fed, state)
    assert fed.account.epsilon() > 0


@dataclass(frozen=True, kw_only=True)
class Sly(FedAvg):
    """An algorithm that reads samples or losses without saying so."""

    what: str = "samples"

    def round(self, fed, state):
        return self.State(state.x, fed.mean(self.peek, x=state.x, y=state.y).y)

    @phase
    def peek(self, clients, x, y):
        if self.what == "samples":
            return {"y": torch.stack([one["c"][0] for one in clients.samples("train")])}
        return {"y": clients.rows(y) + clients.upper_loss(x, y, clients.batch("val", "peek"))}


@pytest.mark.parametrize(("what", "text"), [("samples", "sly reads samples"), ("loss", "asks for 'evaluate'")])
def test_what_is_no_derivative_is_refused_when_it_happens(what, text):
    Sly.name = classmethod(lambda cls: "sly")
    fb.solve(*BUILT, Sly(what=what), num_iterations=1)
    with pytest.raises(SettingError, match=text):
        fb.solve(*BUILT, Sly(what=what), num_iterations=1, aggregation=layer())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"level": "example", "clip": 1.0}, "level is 'example' without noise or clip: give clip, noise and epsilon"),
        ({"rate": 0.5}, r"aggregation\.rate is for examples: set aggregation\.level"),
        ({"clips": {"gy": 1.0}}, r"aggregation\.clips is for examples"),
        ({"level": "example", "clip": 1.0, "noise": 1.0, "epsilon": 1.0, "clips": {"gy": 0}}, r"clips\.gy is 0, expec"),
        (
            {"level": "example", "clip": 1.0, "noise": 1.0, "epsilon": 1.0, "sequences": {"u": {"clip": 1.0}}},
            "derivatives are clipped and rows are not: give aggregation.clips",
        ),
    ],
)
def test_settings_that_do_not_fit_the_level_are_refused(given, text):
    with pytest.raises(SettingError, match=text):
        fb.Aggregation(**given)


def test_other_refusals_of_the_level():
    with pytest.raises(UnknownNameError, match="gz"):
        layer(clips={"gz": 1.0})
    for size in (4, {"train": 4, "val": None}):
        with pytest.raises(SettingError, match=r"each example takes part by a coin: leave out batch_size"):
            fb.solve(*BUILT, "fedbio", num_iterations=1, batch_size=size, aggregation=layer())
    with pytest.raises(SettingError, match="lr_upper is 'auto'"):
        fb.solve(*BUILT, "fedbio", lr_upper="auto", num_iterations=1, aggregation=layer())
