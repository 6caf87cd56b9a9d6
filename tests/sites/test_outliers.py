"""Outlying answers, false weights, and the failures that follow: only the site that caused them is
named."""

import math

import pytest
import torch

from fedbilevel.cli.federation import line
from fedbilevel.errors import FedBilevelError, NonFiniteError, QuorumError
from fedbilevel.sites.outliers import Flag, log_norm, outliers, shown
from support.sites.loopback import Loopback, differences

pytestmark = [
    pytest.mark.usefixtures("short_waits"),
    pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"),
    pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning"),
    pytest.mark.slow,
]
CLEANING = {"name": "data_cleaning", "num_clients": 3, "num_clean": 12, "test_share": 0.8}


def scaled(factor, who="site-1", since=2, until=math.inf):
    """A site that sends its arrays times `factor`."""

    def fault(name, header):
        at = header.get("iteration") or 0
        return (lambda answer, arrays: (answer, [array * factor for array in arrays])) if (
            name == who and header["kind"] == "phase" and since <= at < until
        ) else None  # fmt: skip

    return fault


def plan(federation, name="fbo_aggitd", task=CLEANING, **more):
    """Few rounds, minibatches, the type that a run has by default."""
    options = {"seed": 5, "batch_size": 16, "dtype": more.pop("dtype", "float32"), "strategy": "loop"}
    settings = {"num_lower_rounds": 2} if name == "fbo_aggitd" else {}
    return federation.plan(
        {"name": name, **settings, **more.pop("settings", {})},
        task,
        num_classes=10,
        options=options,
        **{"num_iterations": 4, **more},
    )


def serve(federation, *given):
    """Return how a run ends that an attack may have ruined."""
    try:
        return federation.serve(*given)
    except FedBilevelError as error:
        return str(error)


# ---- the score -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norms", "far"),
    [
        ([1.0, 1.01, 1.05], set()),  # agree closely: the floor of the MAD
        ([1.0, 1.0, 5.9], set()),
        ([1.0, 1.0, 6.2], {2}),
        ([1.0, 2.5, 10.0], set()),  # all apart
        ([1.0, 1.0, 1e-9], set()),  # small ones do no harm
        ([0.0, 0.0, 1.0], set()),  # a start at zero
        ([1.0, 1.2, 0.9, 1.1, 40.0, 50.0], {4, 5}),
        ([1.0, 5.9], set()),
        ([1.0, 6.2], {0, 1}),  # of two, either
        ([3.0], set()),
    ],
)
def test_the_score_of_norms(norms, far):
    assert outliers({place: math.log(norm) if norm else -math.inf for place, norm in enumerate(norms)}) == far


def test_rounding_is_not_flagged():
    assert outliers({0: math.log(1e-16), 1: math.log(2e-16), 2: math.log(9e-15)}, least=0.0) == set()


def test_a_norm_that_overflows_has_a_logarithm():
    assert log_norm(torch.full((1, 4), 1e308, dtype=torch.float64)) == pytest.approx(math.log(1e308) + math.log(2.0))
    assert log_norm(torch.zeros(1, 4)) == log_norm(torch.zeros(1, 0)) == -math.inf
    assert shown(math.log(1e308) + 10) == "1e312"
    flag = Flag("steps", 3, "y", math.log(1e38), math.log(2.1), alone=True)
    assert str(flag) == "its answer to steps in outer iteration 3 has y of norm 1e+38, the others at most 2.1"
    assert (
        flag.of("west")
        == "the answer of west to steps in outer iteration 3 has y of norm 1e+38, the others at most 2.1"
    )


# ---- honest runs ---------------------------------------------------------------------------------

HONEST = [(name, CLEANING, {}) for name in ("fbo_aggitd", "fedbio", "simfbo", "fednest", "commfedbio")]
HONEST += [
    (name, {"name": "hyper_representation", "num_clients": 3}, {})
    for name in ("fbo_aggitd", "fedbio", "fedmbo", "shrofbo")
]
HONEST += [
    (name, {"name": "quadratic", "num_clients": 3, "heterogeneity": 3.0}, {})
    for name in ("fedbio", "fednest", "adafbio", "adasimfbo", "commfedbio")
]
UNEQUAL = {"num_local_steps": [1, 3, 10], "lr_upper": 0.01, "lr_lower": 0.05, "lr_system": 0.05}
HONEST += [
    (name, {"name": "quadratic", "num_clients": 3, "heterogeneity": 2.0}, UNEQUAL)
    for name in ("fedbio", "simfbo", "shrofbo")
]


@pytest.mark.parametrize(
    ("name", "task", "settings"),
    HONEST,
    ids=[f"{task['name']}-{name}-{len(settings)}" for name, task, settings in HONEST],
)
def test_honest_sites_that_differ_are_not_flagged(tmp_path, name, task, settings):
    federation = Loopback(tmp_path)
    assert (
        federation.serve(plan(federation, name, task, settings=settings, num_iterations=12, measure_every=12))
        == "finished"
    )
    assert [line["flagged"] for line in federation.diary()] == [{}] * 12


# ---- dishonest ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e6, -10.0])
@pytest.mark.parametrize("name", ["fbo_aggitd", "fedbio", "fednest", "simfbo"])
def test_a_scaled_answer_is_named_in_the_diary_and_on_the_terminal(tmp_path, name, factor):
    federation, said = Loopback(tmp_path), []
    end = serve(federation, plan(federation, name), scaled(factor), said.append)
    assert end == "finished" or end.startswith("the answer of site-1 to ")
    flagged = [line["flagged"] for line in federation.diary()]
    assert flagged[0] == {}
    assert set(flagged[1]) == {"site-1"}
    assert "in outer iteration 2 has" in flagged[1]["site-1"]
    lines = [progress for progress in said if "iteration" in progress]
    assert flagged == [progress["flagged"] for progress in lines]
    assert f"flagged site-1 ({flagged[1]['site-1']})" in line(lines[1])
    assert [line["missing"] for line in federation.diary()][1] == {}


def test_a_scaled_answer_is_left_out_where_the_run_says_so(tmp_path):
    """The mean is that of the other sites, and the site goes back to its last version."""
    states = []
    for place, fault in (("scaled", scaled(-10.0, since=2, until=3)), ("silent", None)):
        federation = Loopback(tmp_path / place)
        ours = plan(
            federation,
            "adafbio",
            {"name": "quadratic", "num_clients": 3},
            dtype="float64",
            quorum=2,
            exclude_outliers=True,
        )
        fault = fault or (
            lambda name, header: (
                "silent" if name == "site-1" and header.get("iteration") == 2 and header["kind"] == "phase" else None
            )
        )
        assert federation.serve(ours, fault) == "finished"
        assert [set(line["missing"]) for line in federation.diary()] == [set(), {"site-1"}, set(), set()]
        states.append((federation.record.load()[0], federation.diary()[1]))
    assert {part for part, value in differences(states[0][0], states[1][0]).items() if value} <= {
        "ledger.bytes_down",
        "ledger.floats_down",
    }
    diary = states[0][1]
    assert diary["missing"]["site-1"].endswith("so it was left out.")
    assert set(diary["flagged"]) == {"site-1"}
    assert states[1][1]["flagged"] == {}


def test_where_all_sites_are_needed_a_left_out_answer_ends_the_run_with_the_sites_name(tmp_path):
    federation = Loopback(tmp_path)
    with pytest.raises(
        FedBilevelError, match=r"missing: site-1 \(aggregate of outer iteration 2: its answer .* so it was left out"
    ) as caught:
        federation.serve(plan(federation, quorum=3, exclude_outliers=True), scaled(1e6))
    assert not isinstance(caught.value, QuorumError)


def test_two_differing_sites_are_both_flagged_and_none_is_left_out(tmp_path):
    federation = Loopback(tmp_path, 2)
    task = {"name": "quadratic", "num_clients": 2}
    serve(federation, plan(federation, "fedbio", task, exclude_outliers=True), scaled(-10.0))
    flagged = federation.diary()[1]["flagged"]
    assert set(flagged) == {"site-0", "site-1"}
    assert all(
        text.startswith("the two answers to local_steps in outer iteration 2 differ, in ") for text in flagged.values()
    )
    assert all(line["missing"] == {} for line in federation.diary())


# ---- whose fault it is ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fbo_aggitd", "fedbio", "simfbo"])
def test_a_run_that_one_answer_ruined_fails_with_the_name_of_that_site(tmp_path, name):
    federation = Loopback(tmp_path)
    with pytest.raises(
        FedBilevelError,
        match=r"^the answer of site-1 to \w+ in outer iteration 2 has \w+ of norm .*e\+3\d, the others at most",
    ) as caught:
        federation.serve(plan(federation, name), scaled(1e38))
    assert not isinstance(caught.value, QuorumError)
    assert "step sizes" not in str(caught.value)
    assert not any(honest in str(caught.value) for honest in ("site-0", "site-2"))


def test_an_overflowing_mean_names_the_site_whose_answer_caused_it(tmp_path):
    federation = Loopback(tmp_path)
    ours = plan(
        federation,
        "fedbio",
        {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"},
        dtype="float64",
        max_weight=4,
    )
    huge = lambda name, header: (
        (lambda answer, arrays: (answer, [torch.full_like(array, 1.7e308) for array in arrays]))
        if name == "site-1" and header["kind"] == "phase" and header["iteration"] == 2
        else None
    )
    with pytest.raises(
        NonFiniteError,
        match=r"^the answer of site-1 to local_steps in outer iteration 2 has x of norm 1e309, the others at most",
    ) as caught:
        federation.serve(ours, huge)
    assert "the last good checkpoint, of outer iteration 1" in str(caught.value)


def test_where_all_answers_are_huge_the_error_names_the_step_sizes(tmp_path):
    federation = Loopback(tmp_path)
    ours = plan(
        federation, "fedbio", {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"}, dtype="float64"
    )
    huge = lambda answer, arrays: (answer, [torch.full_like(array, 1.7e308) for array in arrays])
    with pytest.raises(
        NonFiniteError,
        match=r"the mean of the sites' '\w' overflows in outer iteration 2: "
        "the steps are too long; lower the step sizes",
    ):
        federation.serve(
            ours, lambda name, header: huge if header["kind"] == "phase" and header["iteration"] == 2 else None
        )


def test_an_honest_site_that_fails_long_after_a_flag_is_named_itself(tmp_path):
    federation = Loopback(tmp_path)
    ours = plan(
        federation, "fedbio", {"name": "quadratic", "num_clients": 3}, dtype="float64", quorum=3, num_iterations=6
    )
    odd = scaled(-10.0, since=1, until=2)

    def fault(name, header):
        return "nan" if name == "site-2" and header.get("iteration") == 4 else odd(name, header)

    with pytest.raises(
        FedBilevelError,
        match=r"2 of the 3 sites that are needed .* site-2 \(.*"
        r"site-1 was flagged in 1 of 4 outer iterations, last in 1\.$",
    ):
        federation.serve(ours, fault)
    assert set(federation.diary()[0]["flagged"]) == {"site-1"}


# ---- weights -------------------------------------------------------------------------------------


def boasting(weight):
    def fault(name, header):
        if name != "site-1" or header["kind"] not in ("join", "measure"):
            return None
        if header["kind"] == "join":
            return lambda answer, arrays: ({**answer, "weights": [weight]}, arrays)
        return lambda answer, arrays: (
            answer,
            [torch.cat([arrays[0][:, :2], arrays[0].new_full((1, 1), float(weight)), arrays[0][:, 3:]], dim=1)],
        )

    return fault


@pytest.mark.parametrize(
    ("more", "most"), [({}, 50), ({"max_weight": 7}, 7)], ids=["10 times the others", "of the plan"]
)
def test_a_false_weight_is_capped_and_reported(tmp_path, more, most):
    federation, said = Loopback(tmp_path), []
    task = {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"}  # 4, 5 and 6 samples
    ours = plan(federation, "fedbio", task, dtype="float64", **more)
    assert federation.serve(ours, boasting(2**39), said.append) == "finished"
    tensors, _ = federation.record.load()
    assert tensors["sites.weight"].tolist() == [4, most, 6]
    assert federation.record.read_config()["max_weight"]["site-1"] == most
    text = f"it states a weight of {2**39}, and counts with {most}: set max_weight if that is too little"
    assert [line["capped"] for line in federation.diary()] == [{"site-1": text}, {}, {}, {}]
    assert f"capped site-1 ({text})" in line(said[0])
    losses = [row["upper_loss"] for row in federation.record.rows()]
    assert federation.serve({**ours, "num_iterations": 6}) == "finished"  # what was agreed at first stays
    assert federation.record.load()[0]["sites.weight"].tolist() == [4, most, 6]
    assert federation.record.read_config()["max_weight"]["site-1"] == most
    assert [row["upper_loss"] for row in federation.record.rows()][: len(losses)] == losses


def test_a_measurement_counts_with_the_weights_of_the_means(tmp_path):
    rows = []
    for place, fault in (
        ("boasts", lambda name, header: boasting(2**39)(name, header) if header["kind"] == "measure" else None),
        ("quiet", lambda *_: None),
    ):
        federation = Loopback(tmp_path / place)
        federation.serve(
            plan(
                federation,
                "fedbio",
                {"name": "quadratic", "num_clients": 3, "client_weights": "by_samples"},
                dtype="float64",
            ),
            fault,
        )
        rows.append([row["upper_loss"] for row in federation.record.rows()])
    assert rows[0] == rows[1]
