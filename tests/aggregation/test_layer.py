"""The layer in a run: dense means, clipping, error feedback, the ledger, resumes and refusals."""

import pytest
import torch

import fedbilevel as fb
from fedbilevel.aggregation.layer import Layer, clipped
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import CheckpointError, NonFiniteError, RangeError, SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=5, client_weights="by_samples").build()
EXACT = {"dtype": torch.float64, "strategy": "loop"}


def engine(aggregation, algorithm=None, built=BUILT, **more):
    return Simulation(algorithm or FedBiO(), *built, **{**EXACT, **more}, aggregation=aggregation)


def go(aggregation, num=5, algorithm=None, **more):
    algorithm = algorithm or FedBiO()
    fed = engine(aggregation, algorithm, **more)
    fed.begin(0)
    state = algorithm.init(fed)
    for iteration in range(1, num + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    return fed, state


def vector(state):
    return torch.cat([state.x, state.y, state.u])


def rows_of_a_round(fed, state):
    """The rows of all clients, their bases and weights, computed beside the engine."""
    sent = {"x": state.x, "y": state.y, "u": state.u}
    rows = fed.host.run_phase("local_steps", sent, fed.host.data.positions, fed.iteration, fed.call + 1)
    return rows, sent, fed.weights_by_place.double()


def test_without_settings_the_layer_gives_the_plain_mean():
    plain, through = (vector(go(one)[1]) for one in (None, fb.Aggregation()))
    assert float((plain - through).abs().max()) < 1e-11
    assert not torch.equal(plain, through)


@pytest.mark.parametrize("aggregation", [None, fb.Aggregation(clip=0.3)], ids=["plain", "clip"])
def test_a_clipped_mean_is_the_mean_of_clipped_differences(aggregation):
    fed, state = go(aggregation, 3)
    fed.begin(4)
    rows, sent, weights = rows_of_a_round(fed, state)
    new = FedBiO().round(fed, state)
    for name, base in sent.items():
        away = rows[name] - base
        if aggregation is not None:
            away = away * (0.3 / away.norm(dim=1, keepdim=True)).clamp(max=1)
        expected = base + (weights[:, None] * away).sum(0) / weights.sum()
        assert float((getattr(new, name) - expected).abs().max()) < 1e-12


def test_a_run_with_the_layer_is_not_resumed_without_it(tmp_path):
    options = {"record": tmp_path / "run", "attack": None}
    fb.solve(*BUILT, "fedbio", num_rounds=2, aggregation=fb.Aggregation(robust="median"), **options)
    with pytest.raises(CheckpointError, match=r"its aggregation is .*median.*, here it is None"):
        fb.solve(*BUILT, "fedbio", num_rounds=4, resume=True, **options)


def test_a_robust_mean_is_that_of_the_differences():
    fed, state = go(fb.Aggregation(robust="median"), 2)
    fed.begin(3)
    rows, sent, _ = rows_of_a_round(fed, state)
    new = FedBiO().round(fed, state)
    for name, base in sent.items():
        median = (rows[name] - base).repeat_interleave(fed.weights_by_place, 0).quantile(0.5, dim=0)
        assert float((getattr(new, name) - base - median).abs().max()) < 1e-14


def test_clipped_rows_are_never_longer_in_float32():
    rows = torch.randn(200, 7, generator=torch.Generator().manual_seed(0)) * 10
    assert float(torch.linalg.vector_norm(clipped(rows, 1.0).double(), dim=1).max()) <= 1.0
    short = torch.full((2, 7), 0.1)
    assert clipped(short, 1.0) is short


def test_a_sequence_has_its_own_settings():
    layer = fb.Aggregation(clip=1e-3, sequences={"u": {"clip": "none"}, "x": {"clip": 2.0}})
    _, state = go(layer, 1)
    start = FedBiO().init(engine(None))
    assert float((state.y - start.y).norm()) <= 1e-3
    assert float((state.u - start.u).norm()) > 1e-3


@pytest.mark.parametrize(
    ("compress", "num_bytes"),
    [(None, 8 * 16), ("int8", 16 + 3 * 8), ("topk:0.5", 12 * 8), ("randk:0.5", 8 * 8), ("powersgd:1", 8 * (4 + 5 + 5))],
)
def test_the_ledger_charges_the_bytes_that_travel(compress, num_bytes):
    """x has 4 entries, y and u have 6."""
    fed, _ = go(fb.Aggregation(compress=compress), 3)
    assert fed.ledger.columns["bytes_up"].tolist() == [3 * num_bytes] * 5


def test_sparse_rows_of_an_algorithm_stay_sparse():
    bills = [go(one, 3, CommFedBiO(num_kept=2))[0].ledger.totals() for one in (None, fb.Aggregation(compress="int8"))]
    sparse = [bill.phases["system_direction"]["bytes_up"] for bill in bills]
    assert sparse[0] == sparse[1] > 0
    assert bills[1]["bytes_up"] < bills[0]["bytes_up"]


def test_what_compression_leaves_is_added_to_the_next_row():
    """The sum of what was sent and what is left is the sum of all differences."""
    fed, state = go(fb.Aggregation(compress="topk:0.2"), 0)
    sent, whole = torch.zeros(5, 6, dtype=torch.float64), torch.zeros(5, 6, dtype=torch.float64)
    encode = fed.layer.encode
    seen = []
    fed.layer.encode = lambda *given, **more: seen.append(encode(*given, **more)) or seen[-1]
    for iteration in range(1, 6):
        fed.begin(iteration)
        rows, bases, _ = rows_of_a_round(fed, state)
        whole += rows["y"] - bases["y"]
        state = FedBiO().round(fed, state)
        sent += seen[-1]["y"].rows
    left = fed.host.feedback.rows["local_steps.y"]
    assert float(left.abs().max()) > 0
    assert float((sent + left - whole).abs().max()) < 1e-13


def test_a_client_that_does_not_answer_keeps_what_is_left():
    drops = lambda iteration, call: {2} if iteration == 4 else ()
    fed, state = go(fb.Aggregation(compress="topk:0.2"), 3, drops=drops)
    before = fed.host.feedback.rows["local_steps.u"].clone()
    fed.begin(4)
    FedBiO().round(fed, state)
    after = fed.host.feedback.rows["local_steps.u"]
    assert torch.equal(before[2], after[2])
    assert bool((before != after).any(1)[[0, 1, 3, 4]].all())


@pytest.mark.parametrize("compress", ["int8", "topk:0.3", "randk:0.5", "powersgd:1"])
@pytest.mark.parametrize("cohort", [Cohort(), Cohort(0.6, replacement=True)], ids=["all", "cohort"])
def test_a_resumed_run_agrees_bit_for_bit(compress, cohort):
    layer, algorithm = fb.Aggregation(clip=5.0, compress=compress), FedBiO()
    whole, end = go(layer, 6, cohort=cohort)
    half, middle = go(layer, 3, cohort=cohort)
    tensors, plain = half.state_dict(middle)
    fresh = engine(layer, cohort=cohort)
    state = fresh.load_state_dict({name: one.clone() for name, one in tensors.items()}, plain, algorithm.State)
    for iteration in range(4, 7):
        fresh.begin(iteration)
        state = algorithm.round(fresh, state)
    assert torch.equal(vector(state), vector(end))
    assert fresh.ledger.totals() == whole.ledger.totals()


def test_a_resume_with_other_settings_is_refused(tmp_path):
    options = {"num_iterations": 2, "record": tmp_path / "run"}
    fb.solve(*BUILT, "fedbio", **options, aggregation=fb.Aggregation(clip=1.0))
    with pytest.raises(CheckpointError, match="aggregation"):
        fb.solve(
            *BUILT, "fedbio", **{**options, "num_iterations": 4}, resume=True, aggregation=fb.Aggregation(clip=2.0)
        )


@pytest.mark.parametrize("layer", [fb.Aggregation(), fb.Aggregation(clip=1.0, compress="topk:0.3"),
                                   fb.Aggregation(robust="geometric")], ids=["sum", "topk", "robust"])  # fmt: skip
def test_the_order_of_clients_does_not_change_a_bit(layer):
    problem, clients = BUILT
    ids = [3, 0, 4, 2, 1]
    one = vector(go(layer)[1])
    other = vector(go(layer, built=(problem, [clients[i] for i in ids]), ids=ids)[1])
    assert torch.equal(one, other)


SLOW = FedBiO(lr_upper=2e-3, lr_lower=0.02, lr_system=0.02, num_local_steps=1)


@pytest.fixture(scope="module")
def uncompressed():
    return vector(go(None, 800, SLOW, strategy="auto")[1])


@pytest.mark.parametrize("compress", ["int8", "topk:0.34", "randk:0.5"])
def test_error_feedback_reaches_the_solution_of_the_run_without_compression(compress, uncompressed):
    layer = fb.Aggregation(compress=compress)
    fed, state = go(layer, 800, SLOW, strategy="auto")
    error = float((vector(state) - uncompressed).norm() / uncompressed.norm())
    fed = engine(layer, SLOW, strategy="auto")
    state = SLOW.init(fed)
    for iteration in range(1, 801):
        fed.begin(iteration)
        fed.host.feedback.clear()
        state = SLOW.round(fed, state)
    without = float((vector(state) - uncompressed).norm() / uncompressed.norm())
    assert error < 0.02
    assert without > 5 * error


class Cancelling:
    """A ring whose masks cancel in the sum, and whose noise is a constant."""

    def __init__(self, noise=0):
        self.noise, self.seen = noise, []

    def noised(self, integers, ids, way, fixed):
        return integers + self.noise

    def masked(self, integers, ids, at):
        drawn = torch.randint(-(2**62), 2**62, integers.shape)
        drawn[-1] = -drawn[:-1].sum(0)
        self.seen.append(integers + drawn)
        return self.seen[-1]

    def unmasked(self, total, at):
        return total


@pytest.mark.parametrize(
    "layer", [fb.Aggregation(clip=2.0), fb.Aggregation(compress="randk:0.5")], ids=["clip", "randk"]
)
def test_masked_integers_give_the_same_means_bit_for_bit(layer):
    fed, algorithm = engine(layer), FedBiO()
    fed.layer = Layer(layer, algorithm, fed.stream, Cancelling())
    state = algorithm.init(fed)
    for iteration in range(1, 6):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    plain, end = go(layer)
    assert torch.equal(vector(state), vector(end))
    assert fed.ledger.columns["bytes_up"].tolist() == plain.ledger.columns["bytes_up"].tolist()  # 8 bytes as float64


def test_noise_is_added_to_weighted_integers():
    layer = fb.Aggregation(fixed_point=40, clip=1.0)
    states = []
    for noise in (0, 2**20):
        fed, algorithm = engine(layer), FedBiO()
        fed.layer = Layer(layer, algorithm, fed.stream, Cancelling(noise))
        start = algorithm.init(fed)
        fed.begin(1)
        states.append(algorithm.round(fed, start))
    moved = states[1].y - states[0].y
    expected = 5 * 2**20 / float(fed.weights.sum()) * 2.0**-39
    assert float((moved - expected).abs().max()) < 1e-12


def test_measurements_are_sums_of_integers():
    figures = [engine(one).measure(torch.ones(4, dtype=torch.float64), torch.ones(6, dtype=torch.float64))
               for one in (None, fb.Aggregation())]  # fmt: skip
    assert figures[0].keys() == figures[1].keys()
    assert all(abs(figures[0][name] - figures[1][name]) < 1e-9 for name in figures[0])


def test_a_row_that_does_not_fit_is_refused_before_it_is_sent():
    with pytest.raises(RangeError, match=r"client 0 has an entry of '\w' in phase 'local_steps' above \S+, the bound"):
        go(fb.Aggregation(bound=1e-6), 2)


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_a_run_that_diverges_returns_to_its_best_state():
    result = fb.solve(*BUILT, "fedbio", num_iterations=40, lr_lower=1e4, aggregation=fb.Aggregation())
    assert result.stopped == "failed"
    assert "far above all that was sent" in result.ending.why
    with pytest.raises(NonFiniteError, match=r"far above all that was sent: the steps are too long"):
        fb.solve(*BUILT, "fedbio", num_iterations=40, lr_lower=1e4, recover=False, aggregation=fb.Aggregation())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"clip": 0.0}, "clip is 0.0, expected a value greater than 0"),
        ({"compress": "topk"}, "compress is 'topk', expected topk:NUMBER with a share above 0"),
        ({"compress": "topk:2"}, "compress is 'topk:2', expected"),
        ({"compress": "int8:4"}, "and int8 has no number"),
        ({"robust": "trimmed:0.5"}, "expected trimmed:NUMBER with a share above 0 and below 0.5"),
        ({"robust": "krum:1.5"}, "expected krum:NUMBER with a whole number"),
        ({"sequences": {"u": 3}}, "aggregation.sequences.u is 3, expected a table"),
        ({"sequences": 3}, "sequences is 3, expected a table or None"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, text):
    with pytest.raises(SettingError, match=text):
        fb.Aggregation(**given)


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match=r"method of aggregation\.compress named 'zip'"):
        fb.Aggregation(compress="zip")
    with pytest.raises(UnknownNameError, match="setting of the sequence u named 'clips'"):
        fb.Aggregation(sequences={"u": {"clips": 1.0}})
    with pytest.raises(SettingError, match=r"aggregation is 3, expected Aggregation\("):
        fb.solve(*BUILT, "fedbio", num_rounds=1, aggregation=3)
