"""The same algorithm source runs between a server without data and sites that exchange bytes: it
has the simulator's trajectory, also after faults."""

import itertools
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from fedbilevel import discovery
from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedBilevelError, PlanError, QuorumError, ScopeError
from fedbilevel.federation.algorithm import ServerAlgorithm
from fedbilevel.problem.problem import Scopes
from fedbilevel.sites.plan import plan_of
from support.numeric.yardstick import fewer
from support.sites.loopback import TRIAL, Loopback, differences, simulated

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.slow]

SCOPES = [Scopes(), Scopes(upper="private"), Scopes(lower="local")]
SETTINGS = {
    "adafbio": {"num_terms": 2},
    "fedbioacc": {"delta": 10.0, "offset": 1e3},
    "clustered_fl": {"tolerance_mean": 10.0, "tolerance_max": 1e-6},
    "commfedbio": {"num_kept": 2},
}
EQUAL_STEPS = ("fedbioacc", "fedbioacc_local", "adafbio", "local_bsgvrm", "self_tuned")


def fits(name: str, scopes: Scopes) -> bool:
    try:
        discovery.algorithm(name)().check_scopes(scopes)
    except ScopeError:
        return False
    return True


SERVER = [name for name, kind in discovery.algorithms().items() if issubclass(kind, ServerAlgorithm)]
NAMED = ("fedbio", "fbo_aggitd", "fedbioacc", "adafbio", "fedbioacc_local")
FITTING = [(name, scopes) for name in SERVER for scopes in SCOPES if fits(name, scopes)]
CASES = [
    (name, scopes, dtype, ())
    for name, scopes in FITTING
    for dtype in ("float64", *(["float32"] if name in NAMED else []))
]
CASES += [(name, scopes, "float64", (2, 1)) for name, scopes in FITTING]
CASES += [
    (name, scopes, "float32", (1, 2, 2)) for name, scopes in FITTING if name in (*NAMED, "commfedbio", "clustered_fl")
]


def quadratic(scopes: Scopes = Scopes(), **more):
    return {"name": "quadratic", "num_clients": 3, **scopes._asdict(), **more}


def rows_of(book):
    return [{name: value for name, value in row.items() if name not in ("seconds", "num_sites")} for row in book]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize(
    ("name", "scopes", "dtype", "hosts"),
    CASES,
    ids=lambda part: part if isinstance(part, str) else "-".join(map(str, part)) or "1-1-1",
)
def test_the_trajectory_and_the_ledger_are_those_of_the_simulator_bit_for_bit(tmp_path, name, scopes, dtype, hosts):
    """Minibatches, cohorts, unequal weights of clients and unequal local steps, under the loop
    strategy, with one client per site or several."""
    fraction = 1.0 if discovery.algorithm(name).needs_everyone else 0.67
    options = {
        "seed": 5,
        "batch_size": 3,
        "dtype": dtype,
        "strategy": "loop",
        "fraction": fraction,
        "schedule_power": 0.3,
    }
    settings = {"name": name, **fewer(discovery.algorithm(name)), **SETTINGS.get(name, {})}
    if "num_local_steps" in settings:
        steps = [2, 1, 3, 1, 2][: sum(hosts) or 3]
        settings["num_local_steps"] = 3 if name in EQUAL_STEPS else steps
    num_iterations = 9 if name == "self_tuned" else 3  # x waits for y, and a diagonal is measured in the eighth
    federation = Loopback(tmp_path, hosts=hosts)
    task = quadratic(scopes, client_weights="by_samples", cross=0.2, num_clients=sum(hosts) or 3)
    plan = federation.plan(settings, task, options=options, num_iterations=num_iterations)
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, about = federation.record.load()
    assert {part: far for part, far in differences(found, wanted).items() if far} == {}
    assert about["iteration"] == num_iterations
    assert int(found["ledger.rounds"]) > 0 or (
        scopes.lower == "local" and name in ("ditto", "fedavg", "fedavg_plus", "fedprox", "pfedme")
    )  # nothing travels
    # a simulation pads clients of unequal sizes and measures them together, so it sums in another order
    for mine, theirs in zip(rows_of(federation.record.rows()), rows_of(result.rows), strict=True):
        assert {part: value for part, value in mine.items()} == pytest.approx(
            {part: theirs[part] for part in mine}, rel=1e-5 if dtype == "float32" else 1e-12
        )


def test_private_weights_stay_at_their_sites_and_are_those_of_the_simulator(tmp_path):
    federation = Loopback(tmp_path, 4)
    task = {"name": "data_cleaning", "num_clients": 4, "num_clean": 12, "test_share": 0.8}
    plan = federation.plan({"name": "fbo_aggitd", "num_lower_rounds": 2}, task, num_classes=10)
    federation.serve(plan)
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, _ = federation.record.load()
    assert torch.equal(found["state.y"], wanted["state.y"])
    assert not [name for name in found if name.endswith(".x") or name.startswith(("memory", "kept"))]
    assert set(load_file(federation.record.path / "solution.safetensors")) == {"y.weight", "y.bias"}
    for i, name in enumerate(federation.names):
        own = load_file(tmp_path / name / "runs" / "trial" / "solution.safetensors")
        assert torch.equal(own["x.logit"], result.x[i]["logit"])
        assert bool(own["x.logit"].any())
        sent = [array for line in federation.left(name) for array in line.get("arrays", ())]
        assert {array["name"] for array in sent} <= {"q", "z", "y", "h", "p", "figures"}
        assert all(len(own["x.logit"]) not in array["shape"] for array in sent)


EPISODES = {
    "name": "few_shot_episodes", "num_episodes": 1, "num_queries": 2, "num_held_out": 2, "num_filters": 2,
}  # fmt: skip


def test_random_numbers_of_samples_are_those_of_the_simulator_at_every_site(tmp_path):
    """Batches are whole, so that the episodes that the losses draw are all that the seed decides."""
    federation = Loopback(tmp_path)
    algorithm = {"name": "adasimfbo", "num_local_steps": 2, "lr_upper": 0.02}
    options = {"seed": 5, "dtype": "float64", "strategy": "loop"}
    plan = federation.plan(algorithm, {**EPISODES, "num_clients": 3}, options=options)
    assert plan_of(plan).built_task().build().problem.draws
    assert federation.serve(plan) == "finished"
    result, wanted = simulated(plan, tmp_path / "simulated")
    found, _ = federation.record.load()
    assert {part: far for part, far in differences(found, wanted).items() if far} == {}
    assert federation.record.rows()[-1]["test_accuracy"] == result.final["test_accuracy"]
    other = simulated({**plan, "options": {**options, "seed": 6}}, tmp_path / "other")[1]
    assert not torch.equal(other["state.x"], wanted["state.x"])


# ---- faults --------------------------------------------------------------------------------------

KEEPS = [
    ({"name": "fedbio"}, Scopes()),
    ({"name": "fedbioacc", "num_local_steps": 2, "delta": 10.0, "offset": 1e3}, Scopes(upper="private")),
    ({"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, Scopes()),
    ({"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, Scopes(upper="private")),
    ({"name": "fbo_aggitd", "num_lower_rounds": 2}, Scopes(upper="private")),
    (
        {"name": "fedbioacc_local", "num_local_steps": 2, "num_factors": 1, "delta": 10.0, "offset": 1e3},
        Scopes(lower="local"),
    ),
]
NAMES = [f"{algorithm['name']}-{scopes.lower}-{scopes.upper}" for algorithm, scopes in KEEPS]


def survivors(plan, folder, iteration, first_call, who):
    """The simulator with clients that answer no call from `first_call` of an outer iteration on,
    and on which that iteration leaves no trace."""
    ours = plan_of(plan)

    def drops(now, call):
        return who if now == iteration and call >= first_call else []

    class Forgetful(Simulation):
        def begin(self, now, algorithm=None):
            stores = (self.host.memory, self.host.kept)
            if now == iteration:
                ones = [(store, torch.tensor([one])) for store in stores for one in who]
                self.before = [
                    (store, name, one, store.own(name, one))
                    for store, one in ones
                    for name, has in store.written.items()
                    if has[one]
                ]
            if now == iteration + 1:
                for store, name, one, row in self.before:
                    store.write(name, one, row)
            super().begin(now, algorithm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["fedbilevel.runs.solve"],
            "simulate",
            lambda algorithm, problem, clients, *, network, averaging, **rest: Forgetful(
                algorithm, problem, clients, **rest
            ),
        )
        return simulated(ours.asdict(), folder, drops=drops)[1]


FAULTS = [(case, 1, "silent") for case in range(6)] + [(case, 2, "silent") for case in (1, 4, 5)]
FAULTS += [(case, call, how) for case, call in ((3, 1), (1, 2)) for how in ("deaf", "late", "nan")]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize(
    ("case", "first_call", "how"), FAULTS, ids=[f"{NAMES[case]}-{call}-{how}" for case, call, how in FAULTS]
)
def test_a_mean_is_that_of_the_survivors_and_what_a_site_did_not_finish_leaves_no_trace(
    tmp_path, case, first_call, how
):
    federation, (algorithm, scopes) = Loopback(tmp_path), KEEPS[case]
    plan = federation.plan(algorithm, quadratic(scopes), quorum=2)
    hit = []

    def fault(name, header):
        if name == "site-1" and header["kind"] == "phase" and header["iteration"] == 2 and header["call"] == first_call:
            hit.append(name)
            return how
        return None

    assert federation.serve(plan, fault) == "finished"
    wanted = survivors(plan, tmp_path / "simulated", 2, first_call, [1])
    assert hit == ["site-1"]
    found, _ = federation.record.load()
    state = {part: far for part, far in differences(found, wanted).items() if part.startswith("state.")}
    assert set(state.values()) == {0.0}
    assert "site-1" in federation.diary()[1]["missing"]
    assert ("not finite" if how == "nan" else "no answer within") in federation.diary()[1]["missing"]["site-1"]
    assert set(federation.diary()[1]["sites"]) == {"site-0", "site-2"} | ({"site-1"} if first_call > 1 else set())
    assert [set(line["sites"]) for line in federation.diary()[2:]] == [set(federation.names)] * 2
    assert [line["iteration"] for line in federation.diary()] == [1, 2, 3, 4]
    assert [row["num_sites"] for row in federation.record.rows()] == [3.0, 2.0, 3.0]
    if how == "late":
        assert [answer["error"] for answer in federation.transport.answers_to_late]
        assert all("too late" in answer["error"] for answer in federation.transport.answers_to_late)


# ---- several clients at a site -------------------------------------------------------------------

HOSTED = [
    (case, hosts, call)
    for case in range(6)
    for hosts, call in (((1, 2, 2), 1), ((2, 1, 1), 2))
    if call == 1 or case in (1, 4, 5)
]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize(
    ("case", "hosts", "first_call"), HOSTED, ids=[f"{NAMES[case]}-{call}" for case, _, call in HOSTED]
)
def test_a_site_that_is_missing_takes_all_its_clients_with_it(tmp_path, case, hosts, first_call):
    (algorithm, scopes), federation = KEEPS[case], Loopback(tmp_path, hosts=hosts)
    plan = federation.plan(algorithm, quadratic(scopes, num_clients=sum(hosts)), quorum=2)
    who = list(plan_of(plan).numbers("site-1"))
    at = lambda header: header["kind"] == "phase" and header["iteration"] == 2 and header["call"] == first_call
    assert (
        federation.serve(plan, lambda name, header: "silent" if name == "site-1" and at(header) else None) == "finished"
    )
    found, wanted = federation.record.load()[0], survivors(plan, tmp_path / "simulated", 2, first_call, who)
    assert {far for part, far in differences(found, wanted).items() if part.startswith("state.")} == {0.0}
    assert [set(line["missing"]) for line in federation.diary()] == [set(), {"site-1"}, set(), set()]
    assert [row["num_sites"] for row in federation.record.rows()] == [3.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize(("algorithm", "scopes"), [KEEPS[3], KEEPS[5]], ids=[NAMES[3], NAMES[5]])
def test_a_killed_site_with_several_clients_resumes_from_its_version(tmp_path, algorithm, scopes):
    """Of a cohort only some clients of a site have memory when it is saved."""
    hosts = (3, 2)
    wanted = None
    for place, kills in (("quiet", ()), ("killed", (2, 3, 4))):
        federation, killed = Loopback(tmp_path / place, hosts=hosts), []
        options = {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop", "fraction": 0.4}
        plan = federation.plan(algorithm, quadratic(scopes, num_clients=5), quorum=2, num_iterations=5, options=options)

        def fault(name, header, kills=kills, killed=killed):
            if (
                name == "site-0"
                and header["kind"] == "phase"
                and header["iteration"] in kills
                and header["iteration"] not in killed
            ):
                killed.append(header["iteration"])
                return "killed"
            return None

        assert federation.serve(plan, fault) == "finished"
        found = federation.record.load()[0]
        assert {part for part, value in differences(found, wanted or found).items() if value} <= {
            "ledger.bytes_down",
            "ledger.floats_down",
        }
        wanted = wanted or found
    assert killed
    far = differences(found, simulated(plan, tmp_path / "simulated")[1])
    assert {part for part, value in far.items() if value} <= {"ledger.bytes_down", "ledger.floats_down"}


def test_a_message_goes_once_to_a_site_and_names_the_clients_of_a_cohort(tmp_path):
    federation, asked = Loopback(tmp_path, hosts=(2, 3)), []
    options = {"seed": 5, "batch_size": 3, "dtype": "float64", "strategy": "loop", "fraction": 0.6}
    plan = federation.plan({"name": "fedbio"}, options=options, num_iterations=6)

    def note(name, header):
        if header["kind"] == "phase":
            asked.append((header["iteration"], name, header.get("clients")))

    assert federation.serve(plan, note) == "finished"
    mine = {"site-0": [0, 1], "site-1": [2, 3, 4]}
    assert len({(iteration, name) for iteration, name, _ in asked}) == len(asked)  # one message, whoever is asked
    for iteration in range(1, 7):
        numbers = [number for at, name, clients in asked if at == iteration for number in clients or mine[name]]
        assert len(numbers) == 3
        assert numbers == sorted(numbers)
    assert {len(clients) for _, _, clients in asked if clients} == {1, 2}
    lines = [line for line in federation.left("site-1") if line["kind"] == "phase"]
    assert {tuple(array["shape"]) for line in lines for array in line["arrays"] if array["name"] == "y"} <= {
        (1, 6),
        (2, 6),
        (3, 6),
    }
    assert len(lines) == len([name for _, name, _ in asked if name == "site-1"])  # one line for each answer


def test_private_parts_of_several_clients_are_written_one_by_one(tmp_path):
    federation = Loopback(tmp_path, hosts=(1, 3))
    task = {"name": "data_cleaning", "num_clients": 4, "num_clean": 12, "test_share": 0.8}
    plan = federation.plan({"name": "fbo_aggitd", "num_lower_rounds": 2}, task, num_classes=10)
    federation.serve(plan)
    result, wanted = simulated(plan, tmp_path / "simulated")
    assert torch.equal(federation.record.load()[0]["state.y"], wanted["state.y"])
    own = load_file(tmp_path / "site-1" / "runs" / "trial" / "solution.safetensors")
    assert set(own) == {f"x.client{number}.logit" for number in (1, 2, 3)}
    assert all(torch.equal(own[f"x.client{number}.logit"], result.x[number]["logit"]) for number in (1, 2, 3))
    assert torch.equal(
        load_file(tmp_path / "site-0" / "runs" / "trial" / "solution.safetensors")["x.logit"], result.x[0]["logit"]
    )


def test_a_resumed_run_needs_the_clients_that_it_began_with(tmp_path):
    federation = Loopback(tmp_path, hosts=(2, 1))
    plan = federation.plan({"name": "fedbio"}, num_iterations=2)
    federation.serve(plan)
    with pytest.raises(FedBilevelError, match=r"its hosted is \[2, 1\], here it is \[1, 2\]"):
        federation.serve({**plan, "num_iterations": 4, "clients": {"site-1": 2}})


def test_the_clients_of_one_site_are_one_party_when_norms_are_compared(tmp_path):
    federation = Loopback(tmp_path, hosts=(2, 2))
    odd = lambda answer, arrays: (answer, [torch.cat([array[:1] * -50, array[1:]]) for array in arrays])
    fault = lambda name, header: (
        odd if name == "site-1" and header["kind"] == "phase" and header["iteration"] == 2 else None
    )
    assert federation.serve(federation.plan({"name": "fedbio"}, exclude_outliers=True), fault) == "finished"
    assert set(federation.diary()[1]["flagged"]) == {"site-0", "site-1"}  # with two sites nobody can tell
    assert federation.diary()[1]["missing"] == {}


def longer(header, arrays):
    return header, [torch.cat([array, array], dim=1) for array in arrays]


CRAFTED = {
    "calls beyond counting": lambda header, arrays: ({**header, "calls": {"samples": [10**30]}}, arrays),
    "negative calls": lambda header, arrays: ({**header, "calls": {"gy": [-5]}}, arrays),
    "calls of bytes": lambda header, arrays: ({**header, "calls": {"bytes_up": [5]}}, arrays),
    "calls that are no number": lambda header, arrays: ({**header, "calls": {"gy": [True]}}, arrays),
    "calls of two clients": lambda header, arrays: ({**header, "calls": {"gy": [1, 1]}}, arrays),
    "no calls": lambda header, arrays: ({**header, "calls": None}, arrays),
    "no word about changes": lambda header, arrays: ({**header, "changed": 1}, arrays),
    "no results": lambda header, arrays: ({**header, "results": []}, arrays),
    "longer rows": longer,
    "two rows": lambda header, arrays: (header, [torch.cat([array, array]) for array in arrays]),
    "another type": lambda header, arrays: (header, [array.float() for array in arrays]),
    "a name too many": lambda header, arrays: ({**header, "results": {**header["results"], "z": None}}, arrays),
    "a name too few": lambda header, arrays: (
        {**header, "results": {name: kind for name, kind in header["results"].items() if name != "u"}},
        arrays,
    ),
    "kept, which is not": lambda header, arrays: (
        {**header, "results": dict.fromkeys(header["results"], "kept")},
        arrays,
    ),
    "nothing at all": lambda header, arrays: ({**header, "results": dict.fromkeys(header["results"])}, arrays),
    "sparse, out of bounds": lambda header, arrays: (
        {**header, "results": {**header["results"], "x": {"sparse": 4}}, "order": {"x": 2}},
        [torch.tensor([[9]], dtype=torch.int32), arrays[0][:, :1]],
    ),
    "sparse, as large as memory": lambda header, arrays: (
        {**header, "results": {**header["results"], "x": {"sparse": 10**12}}, "order": {"x": 2}},
        [torch.tensor([[1]], dtype=torch.int32), arrays[0][:, :1]],
    ),
    "an order that is none": lambda header, arrays: ({**header, "order": {"x": 77}}, arrays),
    "noise": lambda header, arrays: b"noise",
    "an error that is no text": lambda header, arrays: ({"error": ["x"] * 3}, []),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_an_invalid_answer_leaves_out_only_its_own_site(tmp_path, what):
    states = []
    for place, how in (("crafted", CRAFTED[what]), ("silent", "silent")):
        federation = Loopback(tmp_path / place)
        fault = lambda name, header, how=how: (
            how if name == "site-0" and header["kind"] == "phase" and header["iteration"] == 2 else None
        )
        assert federation.serve(federation.plan({"name": "fedbio"}, quorum=2, num_iterations=3), fault) == "finished"
        assert set(federation.diary()[1]["missing"]) == {"site-0"}
        assert set(federation.diary()[2]["sites"]) == set(federation.names)
        states.append(federation.record.load()[0])
    assert {part for part, value in differences(*states).items() if value} <= {
        "ledger.bytes_down",
        "ledger.floats_down",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": [0]},
        {"weights": [-3]},
        {"weights": [True]},
        {"weights": None},
        {"weights": [1, 1]},
        {"stored": "x"},
        {"stored": [None]},
    ],
)
def test_a_site_that_introduces_itself_badly_is_named(tmp_path, wrong):
    federation = Loopback(tmp_path)
    craft = lambda header, arrays: ({**header, **wrong}, arrays)
    with pytest.raises(PlanError, match="site-1 did not introduce itself properly"):
        federation.serve(
            federation.plan({"name": "fedbio"}),
            lambda name, header: craft if name == "site-1" and header["kind"] == "join" else None,
        )


class Crash(BaseException):
    """The server's process dies."""


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize("victim", ["server", "site-1", "everybody"])
@pytest.mark.parametrize(("algorithm", "scopes"), [KEEPS[3], KEEPS[5]], ids=[NAMES[3], NAMES[5]])
def test_a_run_killed_at_any_message_resumes_to_the_same_end(tmp_path, algorithm, scopes, victim):
    """Every outer iteration counts, so the quorum is all sites. No outer iteration is lost or
    applied twice."""
    quiet = Loopback(tmp_path / "quiet")
    plan = quiet.plan(algorithm, quadratic(scopes), quorum=3, num_iterations=2)
    seen = itertools.count(1)
    quiet.serve(plan, lambda name, header: next(seen) and None)
    wanted, num_messages = quiet.record.load()[0], next(seen) - 1
    assert num_messages > 15

    for at in range(1, num_messages + 1, 2 if victim == "server" else 5):
        federation, count = Loopback(tmp_path / str(at)), itertools.count(1)

        def fault(name, header, count=count, at=at):
            if next(count) != at:
                return None
            if victim == "site-1":
                return "killed" if name == victim else None
            raise Crash

        try:
            outcome = federation.serve(plan, fault)
        except Crash:
            for name in federation.names if victim == "everybody" else ():
                federation.restart(name)
            outcome = federation.serve(plan)
        assert outcome == "finished"
        found, _ = federation.record.load()
        far = differences(found, wanted)
        assert {part for part, value in far.items() if value} <= {"ledger.bytes_down", "ledger.floats_down"}, (
            at
        )  # arrays that were sent again are paid again
        assert [line["iteration"] for line in federation.diary()] == [1, 2]
        for name in federation.names:
            for version in (tmp_path / "quiet" / name / "runs" / "trial").glob("version-2.safetensors"):
                mine = load_file(tmp_path / str(at) / name / "runs" / "trial" / version.name)
                assert all(torch.equal(mine[part], value) for part, value in load_file(version).items()), at


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_site_that_cannot_save_is_named_in_every_line(tmp_path):
    """The site takes part, but its memory stays unchanged on disk, which must be visible. The line
    is that of the outer iteration that was not saved."""
    federation = Loopback(tmp_path)
    plan = federation.plan(
        {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, quadratic(Scopes(upper="private")), quorum=2
    )
    said = []

    def fault(name, header):
        return (
            (lambda header, arrays: ({"error": "no space"}, []))
            if name == "site-1" and header["kind"] == "commit" and header["version"] > 0
            else None
        )

    assert federation.serve(plan, fault, said.append) == "finished"
    assert [("saving after outer iteration" in line["missing"].get("site-1", "")) for line in federation.diary()] == [
        True,
        True,
        True,
        True,
    ]
    assert [
        re.search(r"saving after outer iteration (\d+)", line["missing"]["site-1"])[1] for line in federation.diary()
    ] == ["1", "2", "3", "4"]
    assert federation.record.load()[0]["sites.version"].tolist() == [4, 0, 4]
    assert "site-1 could not write the private part of the solution" in said[-1]["warning"]
    assert not (tmp_path / "site-1" / "runs" / "trial" / "solution.safetensors").exists()
    said.clear()
    assert federation.serve(plan, say=said.append) == "finished"  # as `resume` does, when all are there
    assert said == []
    assert (tmp_path / "site-1" / "runs" / "trial" / "solution.safetensors").exists()


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
@pytest.mark.parametrize("kind", ["phase", "measure", "commit"])
def test_before_the_first_outer_iteration_all_sites_are_needed_whatever_the_quorum(tmp_path, kind):
    """A site goes back to that state later, so a run that began without it would have no state for
    it."""
    federation, missed = Loopback(tmp_path), []

    def fault(name, header):
        if (
            name == "site-1"
            and header["kind"] == kind
            and header.get("iteration", header.get("version")) == 0
            and not missed
        ):
            missed.append(name)
            return "silent"
        return None

    plan = federation.plan(
        {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, quadratic(Scopes(upper="private")), quorum=2
    )
    assert federation.serve(plan, fault) == "finished"
    assert missed == ["site-1"]
    assert all(line["missing"] == {} for line in federation.diary())
    assert differences(federation.record.load()[0], simulated(plan, tmp_path / "simulated")[1])["state.y"] == 0.0


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_new_process_of_a_site_joins_again_within_the_job(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan(
        {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, quadratic(Scopes(upper="private")), quorum=2
    )
    fault = lambda name, header: (
        "killed" if name == "site-1" and header["kind"] == "phase" and header["iteration"] == 2 else None
    )
    assert federation.serve(plan, fault) == "finished"
    assert [set(line["sites"]) for line in federation.diary()] == [
        set(federation.names),
        {"site-0", "site-2"},
        set(federation.names),
        set(federation.names),
    ]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_on_resume_a_site_that_refuses_is_left_out_and_asked_again(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, num_iterations=2, quorum=2)
    federation.serve(plan)
    federation.restart("site-1")
    settings = tmp_path / "site-1" / "site.toml"
    settings.write_text(TRIAL.replace('loader = "simulated"', 'data = "/not/mounted"'))

    def say(line):
        if line["iteration"] == 3:
            settings.write_text(TRIAL)

    assert federation.serve({**plan, "num_iterations": 5}, say=say) == "finished"
    lines = federation.diary()
    assert "it failed with DataError" in lines[2]["missing"]["site-1"]
    assert [set(line["sites"]) for line in lines[3:]] == [set(federation.names)] * 2


def test_sites_that_did_not_answer_a_ping_are_not_waited_for_to_join(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "fedbio"}, quorum=2)
    asked, dead = [], []

    def fault(name, header):
        if header.get("iteration") == 2 and name != "site-0" and not dead:
            dead.append("site-1")
        if header["kind"] == "join":
            asked.append(name)
        if name == "site-2" and header.get("iteration") == 2 and len(asked) == 3:
            return "silent"
        return "silent" if name in dead else None

    assert federation.serve(plan, fault) == "finished"
    assert asked == [*federation.names, "site-0", "site-2"]


def test_metrics_have_every_row_once_after_a_crash_in_the_first_outer_iteration(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "fedbio"})

    def fault(name, header):
        if header.get("iteration") == 1 and header["kind"] == "phase":
            raise Crash

    with pytest.raises(Crash):
        federation.serve(plan, fault)
    federation.serve(plan)
    assert [row["iteration"] for row in federation.record.rows()] == [0, 2, 4]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_of_a_cohort_the_same_share_must_answer(tmp_path):
    federation = Loopback(tmp_path, 4)
    plan = federation.plan(
        {"name": "fedbio"}, quorum=2, options={"seed": 5, "fraction": 0.5, "dtype": "float64"}, patience=0.05
    )
    gone = lambda name, header: "silent" if name == "site-3" and header.get("iteration", 0) >= 2 else None
    assert federation.serve(plan, gone) == "finished"
    assert any("site-3" in line["missing"] for line in federation.diary())


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_below_the_quorum_the_outer_iteration_waits_and_is_repeated_by_all(tmp_path):
    federation, quiet = Loopback(tmp_path / "a"), Loopback(tmp_path / "b")
    plan = federation.plan(
        {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, quadratic(Scopes(upper="private")), quorum=2
    )
    silent = itertools.count(1)
    fault = lambda name, header: (
        "silent" if name != "site-0" and header.get("iteration") == 3 and next(silent) <= 4 else None
    )
    said = []
    assert federation.serve(plan, fault, said.append) == "finished"
    quiet.serve(plan)
    far = differences(federation.record.load()[0], quiet.record.load()[0])
    assert {part for part, value in far.items() if value} <= {"ledger.bytes_down", "ledger.floats_down"}
    waiting = [line["waiting"] for line in said if "waiting" in line]
    assert len(waiting) == 2
    assert all("1 of the 2 sites" in line and "site-1" in line and "site-2" in line for line in waiting)
    assert [line["iteration"] for line in federation.diary()] == [1, 2, 3, 4]


def test_a_site_that_never_returns_is_named_and_the_run_can_be_resumed(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "fedbio"}, quorum=3, patience=0.05)
    gone = lambda name, header: name == "site-2" and (header.get("iteration") == 2 or header["kind"] == "ping")
    with pytest.raises(QuorumError, match=r"site-2 \(.*no answer within") as caught:
        federation.serve(plan, lambda name, header: "silent" if gone(name, header) else None)
    assert "2 of the 3 sites" in str(caught.value)
    assert federation.serve(plan) == "finished"
    assert differences(federation.record.load()[0], simulated(plan, tmp_path / "s")[1])["state.x"] == 0.0


@pytest.mark.parametrize("how", ["nan", "raise"])
def test_a_run_is_not_repeated_where_sites_answer_with_errors(tmp_path, how, monkeypatch):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "fedbio"}, quorum=2)
    if how == "raise":
        for name in federation.names[1:]:
            monkeypatch.setattr(
                federation.sites[name],
                "_answer",
                lambda header, arrays, old=federation.sites[name]._answer: _raising(header, arrays, old),
            )
    fault = lambda name, header: how if how == "nan" and name != "site-0" and header.get("iteration") == 2 else None
    with pytest.raises(FedBilevelError) as caught:
        federation.serve(plan, fault)
    assert not isinstance(caught.value, QuorumError)
    assert "1 of the 2 sites that are needed" in str(caught.value)
    for name in ("site-1", "site-2"):
        assert f"{name} (local_steps of outer iteration 2: it " in str(caught.value)
    assert "secret" not in str(caught.value)
    assert federation.record.load()[1]["iteration"] == 1


def _raising(header, arrays, old):
    if header.get("iteration") == 2:
        raise RuntimeError("a secret value 0.1234")
    return old(header, arrays)


def test_one_site_that_raises_is_left_out_and_named(tmp_path, monkeypatch):
    federation = Loopback(tmp_path)
    site = federation.sites["site-1"]
    monkeypatch.setattr(site, "_answer", lambda header, arrays, old=site._answer: _raising(header, arrays, old))
    assert federation.serve(federation.plan({"name": "fedbio"}, quorum=2)) == "finished"
    missing = [line["missing"] for line in federation.diary()]
    assert missing[0] == missing[2] == missing[3] == {}
    assert "it failed with RuntimeError; its own log says more" in missing[1]["site-1"]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_run_can_be_stopped_and_resumed(tmp_path):
    federation, quiet = Loopback(tmp_path / "a"), Loopback(tmp_path / "b")
    plan = federation.plan(
        {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, quadratic(Scopes(upper="private"))
    )

    def say(line):
        federation.transport.stopped = line["iteration"] >= 1

    assert federation.serve(plan, say=say) == "stopped"
    assert federation.record.load()[1]["iteration"] == 1
    assert federation.serve(plan) == "finished"
    assert quiet.serve(plan) == "finished"
    assert differences(federation.record.load()[0], quiet.record.load()[0])["state.y"] == 0.0
    assert rows_of(federation.record.rows())[-1]["upper_loss"] == rows_of(quiet.record.rows())[-1]["upper_loss"]
    assert federation.serve({**plan, "num_iterations": 6}) == "finished"  # more of it
    assert [line["iteration"] for line in federation.diary()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_finished_run_is_not_overwritten_by_another_of_its_name(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan(
        {"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, quadratic(Scopes(upper="private"))
    )
    federation.serve(plan)
    federation.folder = tmp_path / "elsewhere"
    with pytest.raises(PlanError, match="site-0 already holds a run named trial"):
        federation.serve(plan)


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_site_that_lost_its_versions_or_changed_its_data_is_left_out_by_name(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "adafbio", "num_local_steps": 2, "num_terms": 2}, num_iterations=2, quorum=2)
    federation.serve(plan)
    for version in (tmp_path / "site-1" / "runs" / "trial").glob("version-*"):
        version.unlink()
    federation.serve({**plan, "num_iterations": 3})
    assert "this site has no version 2 of the run (it has none)" in federation.diary()[2]["missing"]["site-1"]
    assert set(federation.diary()[2]["sites"]) == {"site-0", "site-2"}
    changed = {**plan, "num_iterations": 4, "task": quadratic(data_seed=8)}
    with pytest.raises(FedBilevelError, match="the data of this site are not those that the run began with"):
        federation.serve(changed)


@pytest.mark.parametrize(
    ("theirs", "mend"),
    [
        ("0.0.7", "site-2 has fedbilevel 0.0.7 and the server 0.1.0: upgrade fedbilevel at site-2."),
        ("0.10.0", "site-2 has fedbilevel 0.10.0 and the server 0.1.0: upgrade fedbilevel at the server."),
        ("0.1.0.dev1", "site-2 has fedbilevel 0.1.0.dev1 and the server 0.1.0: install the same version at both."),
        ("nightly", "site-2 has fedbilevel nightly and the server 0.1.0: upgrade fedbilevel at site-2."),
    ],
)
def test_of_two_versions_the_older_side_is_told_to_upgrade(tmp_path, monkeypatch, theirs, mend):
    federation = Loopback(tmp_path)
    for module in ("joining", "session", "consent"):
        monkeypatch.setattr(f"fedbilevel.sites.{module}.__version__", "0.1.0")
    said = []

    def fault(name, header):
        said.extend([header["version"]] if header["kind"] == "join" else [])
        return (
            (lambda answer, arrays: ({**answer, "version": theirs}, arrays))
            if name == "site-2" and header["kind"] == "join"
            else None
        )

    with pytest.raises(PlanError, match=re.escape(mend)):
        federation.serve(federation.plan({"name": "fedbio"}), fault)
    assert said == ["0.1.0"] * 3


def test_a_new_run_needs_all_its_sites_and_says_who_is_not_there(tmp_path):
    federation = Loopback(tmp_path)
    plan = {**federation.plan({"name": "fedbio"}, quorum=1, patience=0.05), "sites": [*federation.names, "site-9"]}
    with pytest.raises(
        QuorumError,
        match=r"3 of the 4 sites that are needed joined the run trial; missing: site-9 \(it is not connected\)",
    ):
        federation.serve(plan)


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_method_that_compares_clients_needs_every_site(tmp_path):
    federation = Loopback(tmp_path)
    plan = federation.plan({"name": "clustered_fl"}, quorum=1, patience=0.05)
    with pytest.raises(QuorumError, match="2 of the 3 sites"):
        federation.serve(
            plan, lambda name, header: "silent" if name == "site-1" and header.get("iteration") == 2 else None
        )


def test_scopes_are_checked_before_anything_is_computed(tmp_path):
    federation = Loopback(tmp_path)
    with pytest.raises(ScopeError, match="fedbio_local cannot solve"):
        federation.serve(federation.plan({"name": "fedbio_local"}))
    assert not federation.record.checkpoint.exists()


def test_memory_is_used_by_the_example_with_faults():
    """Rolling back would mean nothing if nothing were kept."""
    assert AdaFBiO().kept_names(Scopes(upper="private"))


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_diverging_run_between_sites_goes_back_as_the_simulator_does(tmp_path):
    """FedBiO leaves nothing at the sites, so going back concerns the server only."""
    federation = Loopback(tmp_path)
    settings = {"name": "fedbio", "lr_upper": 0.1, "lr_lower": 1.5, "lr_system": 0.3}
    options = {"dtype": "float64", "strategy": "loop"}
    plan = federation.plan(settings, quadratic(), options=options, num_iterations=20, measure_every=1)
    assert federation.serve(plan) == "finished"
    _, wanted = simulated(plan, tmp_path / "simulated")
    found, about = federation.record.load()
    assert about["recovery"]["times"] > 0
    state = [name for name in found if name.startswith("state.")]
    assert all(torch.equal(found[name], wanted[name]) for name in state)


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_diverging_run_whose_sites_keep_values_fails_with_the_reason(tmp_path):
    federation = Loopback(tmp_path)
    settings = {"name": "fedbio", "lr_upper": 0.1, "lr_lower": 1.5, "lr_system": 0.3}
    plan = federation.plan(settings, quadratic(Scopes(upper="private")), num_iterations=20, measure_every=1)
    with pytest.raises(FedBilevelError, match=r"loss rose to .*: use shorter steps\."):
        federation.serve(plan)
    assert (tmp_path / federation.record.path / "end.json").exists()
