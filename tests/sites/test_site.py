"""A site answers messages that its own version knows, refuses all others in one sentence, and logs
what leaves it."""

import json
import threading
import time

import pytest
import torch

from fedbilevel.data.folders import write_folder
from fedbilevel.errors import DataError, PlanError
from fedbilevel.sites import wire
from fedbilevel.sites.policy import SiteSettings, check_data
from fedbilevel.sites.site import Site
from fedbilevel.tasks.quadratic import Quadratic
from support.sites.loopback import TRIAL, Loopback


class Caller:
    """A server that says what a test wants it to say."""

    def __init__(self, folder, settings=TRIAL, algorithm="fedbio", **plan):
        self.folder, self.step, self.calls = folder, 0, 0
        folder.mkdir(exist_ok=True)
        (folder / "site.toml").write_text(settings)
        self.site = Site("site-1", folder)
        options = {"dtype": "float64", "strategy": "loop"}
        self.plan = {
            "name": "trial",
            "sites": ["site-0", "site-1"],
            "task": {"name": "quadratic", "num_clients": 2},
            "algorithm": {"name": algorithm},
            "options": options,
            **plan,
        }

    def say(self, kind, arrays=(), **header):
        self.step += 1
        message = wire.pack({"kind": kind, "run": "trial", "turn": [1, 0, self.step], **header}, arrays)
        return wire.unpack(self.site.handle(message))

    def join(self):
        return self.say("join", plan=self.plan)[0]

    def phase(self, x=4, y=6, u=6, dtype=torch.float64, **header):
        arrays = [torch.ones(size, dtype=dtype) if isinstance(size, int) else size for size in (x, y, u)]
        values = {name: {"array": number} for number, name in enumerate("xyu")}
        self.calls += 1  # a site answers to every call once
        given = {
            "phase": "local_steps",
            "iteration": 1,
            "call": self.calls,
            "values": values,
            "new": [0, 1, 2],
            "live": [0, 1, 2],
            **header,
        }
        return self.say("phase", arrays, **given)

    def left(self):
        return [json.loads(line) for line in (self.folder / "left.jsonl").read_text().splitlines()]


@pytest.fixture
def caller(tmp_path):
    made = Caller(tmp_path / "site")
    assert "error" not in made.join()
    yield made
    made.site.close()


def test_an_answer_and_its_line_in_the_log(caller):
    header, arrays = caller.phase()
    assert header["results"] == {"x": "rows", "y": "rows", "u": "rows"}
    line = caller.left()[-1]
    assert (line["kind"], line["phase"], line["iteration"], line["call"]) == ("phase", "local_steps", 1, 1)
    assert [(one["name"], one["shape"], one["dtype"]) for one in line["arrays"]] == [
        (name, [1, size], "float64") for name, size in (("x", 4), ("y", 6), ("u", 6))
    ]
    assert [one["norm"] for one in line["arrays"]] == pytest.approx(
        [float(array.norm()) for array in arrays], rel=1e-15
    )
    assert abs(line["time"] - time.time()) < 60


def test_the_log_has_every_byte_that_left(caller):
    before = sum(line["bytes"] for line in caller.left())
    message = wire.pack({"kind": "phase", "run": "trial", "turn": [1, 0, 99], "phase": "nothing"})
    answer = caller.site.handle(message)
    assert sum(line["bytes"] for line in caller.left()) == before + len(answer)
    assert caller.left()[-1]["kind"] == "error"


REFUSED = {
    "an unknown phase": (
        lambda c: c.phase(phase="steal"),
        "fedbio of fedbilevel .* at this site has no phase named 'steal'",
    ),
    "a method that is no phase": (lambda c: c.phase(phase="round"), "has no phase named 'round'"),
    "a phase that is no name": (lambda c: c.phase(phase=3), "has no phase named 3"),
    "a short array": (
        lambda c: c.phase(y=5),
        r"y arrived as torch.float64 of shape \(5,\), expected torch.float64 of length 6",
    ),
    "a matrix": (
        lambda c: c.phase(y=torch.ones(2, 6, dtype=torch.float64)),
        r"y arrived as torch.float64 of shape \(2, 6\)",
    ),
    "another type": (lambda c: c.phase(dtype=torch.float32), "x arrived as torch.float32"),
    "infinity": (
        lambda c: c.phase(u=torch.full((6,), float("inf"), dtype=torch.float64)),
        "u arrived with a value that is not finite",
    ),
    "an array it does not hold": (
        lambda c: c.phase(values={"x": {"array": 7}}),
        "refers to array 7 for x, which this site does not hold",
    ),
    "arrays without numbers": (lambda c: c.phase(new=[0]), "does not name the arrays that it brings"),
    "an undeclared name": (
        lambda c: c.phase(values={"secret": {"array": 0}}),
        "an array named secret, which fedbio does not declare",
    ),
    "too few values": (
        lambda c: c.say("phase", phase="local_steps", iteration=1, call=9, live=[0], values={"x": {"array": 0}}),
        "phase local_steps of this site takes x, y, u, m_y, s_y, t_y, but the message has x",
    ),
    "too many values": (
        lambda c: c.phase(values={**{name: {"array": number} for number, name in enumerate("xyu")}, "z": {"value": 1}}),
        "takes x, y, u, m_y, s_y, t_y, but the message has x",
    ),
    "a strange value": (
        lambda c: c.phase(values={"x": {"code": "print"}}),
        "expected an array, a kept value or a finite number",
    ),
    "a kept value that is not": (
        lambda c: c.phase(values={"x": {"kept": "x"}}),
        "gives 'x' as x, but not both are kept at this site",
    ),
    "arrays for nobody": (lambda c: c.phase(new=[0, 1, 9]), "brings arrays that it does not use"),
    "a flag as a version": (lambda c: c.say("commit", version=True), "asks to save version True"),
    "flags as a turn": (lambda c: c.phase(turn=[True, True, True]), "expected three whole numbers"),
    "an option that is none": (
        lambda c: c.say("join", plan={**c.plan, "options": {"batch_size": {"tran": 3}}}),
        "batch_size names the role 'tran'",
    ),
    "a placement": (lambda c: c.phase(place={"x": "start"}), "asks to place 'x'"),
    "a setting that is no step size": (
        lambda c: c.phase(scaled={"num_local_steps": 100}),
        "a schedule may only scale lr_upper, lr_lower, lr_system",
    ),
    "a step size that is no number": (lambda c: c.phase(scaled={"lr_upper": "big"}), "a message changes 'lr_upper'"),
    "no iteration": (lambda c: c.phase(iteration=None), "does not say in which outer iteration"),
    "another run": (lambda c: c.say("commit", run="other", version=1), "takes no part in the run 'other'"),
    "an unknown kind": (lambda c: c.say("shell"), "a message has kind 'shell'"),
    "a version that is none": (lambda c: c.say("commit", version="../../x"), r"asks to save version '../../x'"),
    "a version it does not have": (lambda c: c.say("load", version=7), r"has no version 7 of the run \(it has none\)"),
    "no turn": (lambda c: c.phase(turn="now"), "expected three whole numbers"),
    "a plan that is none": (lambda c: c.say("join", plan=[]), "is not a table, expected name, task and algorithm"),
    "an unknown algorithm": (
        lambda c: c.say("join", plan={**c.plan, "algorithm": {"name": "fedbioo"}}),
        "Did you mean 'fedbio'",
    ),
    "a plan with a path": (
        lambda c: c.say("join", plan={**c.plan, "name": "../../etc"}),
        "it becomes the name of a folder",
    ),
    "a plan without this site": (
        lambda c: c.say("join", plan={**c.plan, "sites": ["site-0"]}),
        "not among those of the plan",
    ),
    "measuring nothing": (lambda c: c.say("measure", iteration=1), "does not have x and y"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_invalid_message_is_refused_in_one_sentence_and_changes_nothing(caller, what):
    before = caller.phase()[1]
    ask, says = REFUSED[what]
    header, arrays = ask(caller)
    assert set(header) == {"error"}
    assert arrays == []
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(header["error"])
    assert "\n" not in header["error"]
    if not any(
        word in what for word in ("plan", "algorithm", "option", "arrays for")
    ):  # those joined anew, or lost what they held
        again = caller.phase()[1]
        assert all(torch.equal(one, other) for one, other in zip(again, before, strict=True))


@pytest.mark.parametrize("noise", [b"", b"\x80\x04\x95", b"fedbilevel-1\n", b"x" * 1000])
def test_noise_is_answered_with_a_sentence(caller, noise):
    assert set(wire.unpack(caller.site.handle(noise))[0]) == {"error"}


def test_a_message_of_an_earlier_turn_is_refused(caller):
    caller.phase()
    message = {
        "phase": "local_steps",
        "iteration": 1,
        "call": 2,
        "values": {name: {"array": number} for number, name in enumerate("xyu")},
        "live": [0, 1, 2],
    }
    for turn in ([1, 0, 2], [1, 0, 1], [0, 9, 9]):
        assert "so it is too late" in caller.say("phase", **message, turn=turn)[0]["error"]
    assert "error" not in caller.say("phase", **message, turn=[1, 1, 0])[0]


def test_arrays_that_the_server_has_released_are_dropped(caller):
    caller.phase()
    values = {name: {"array": number} for number, name in enumerate("xyu")}
    again = {"phase": "local_steps", "iteration": 1, "call": 2, "values": values}
    assert "error" not in caller.say("phase", **again, live=[0, 1, 2])[0]
    assert "does not hold" in caller.say("phase", **{**again, "call": 3}, live=[1, 2])[0]["error"]


def test_a_site_answers_a_ping_while_it_computes(caller, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        inside.set()
        go_on.wait(10)
        raise RuntimeError

    monkeypatch.setattr(caller.site._session.host, "run_phase", slow)
    thread = threading.Thread(target=caller.phase)
    thread.start()
    inside.wait(10)
    assert wire.unpack(caller.site.handle(wire.pack({"kind": "ping"})))[0]["busy"] is True
    go_on.set()
    thread.join()
    assert wire.unpack(caller.site.handle(wire.pack({"kind": "ping"})))[0]["busy"] is False


# ---- policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ('tasks = ["data_cleaning"]', "policy does not allow quadratic: its line 'tasks' allows data_cleaning"),
        ("algorithms = []", "policy does not allow fedbio: its line 'algorithms' allows none"),
        ("min_samples = 6", "fewer than the 6 training samples"),
    ],
)
def test_a_plan_that_violates_the_policy_is_refused_at_joining(tmp_path, policy, says):
    caller = Caller(tmp_path / "site", f"{TRIAL}{policy}\n")
    assert says in caller.join()["error"]
    assert "takes no part" in caller.phase()[0]["error"]
    caller.site.close()


def test_a_plan_within_the_policy_is_admitted(tmp_path):
    caller = Caller(tmp_path / "site", TRIAL + 'min_samples = 5\ntasks = ["quadratic"]\nalgorithms = ["fedbio"]\n')
    assert "error" not in caller.join()
    caller.site.close()


def test_rounds_stay_counted_after_going_back_and_after_a_restart(tmp_path):
    settings = TRIAL + "max_rounds = 3\n"
    caller = Caller(tmp_path / "site", settings)
    caller.join()
    assert ["error" in caller.phase()[0] for _ in range(2)] == [False, False]
    caller.say("load", version=None)  # going back does not give rounds back
    caller.site.close()
    again = Caller(tmp_path / "site", settings)
    again.join()
    assert "error" not in again.phase()[0]
    assert "allows 3 answers in total over all runs, and they are used up" in again.phase()[0]["error"]
    assert sum(line["kind"] == "phase" for line in again.left()) == 3
    again.site.close()


SECRET = "4815162342"


@pytest.mark.parametrize(
    "settings",
    [
        'data = "/nowhere/SECRET"',
        'loader = "SECRET:load"',
        'data = "SECRET',
        'unknown = "SECRET"',
        'data = "DATA/SECRET"',
    ],
)
def test_errors_reveal_no_paths_settings_or_data(tmp_path, settings):
    folder = tmp_path / SECRET
    clients = Quadratic(num_clients=2).build().clients
    broken = {
        role: {name: value * (float("nan") if name == "c" else 1) for name, value in fields.items()}
        for role, fields in clients[1].items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbilevel.data.folders._checked", lambda *args, **kwargs: None, raising=False)
        try:
            write_folder(folder, broken)
        except ValueError:
            folder.mkdir(exist_ok=True)
            (folder / "train.npz").write_bytes(b"no archive")
    caller = Caller(
        tmp_path / "site", settings.replace("DATA", str(tmp_path)).replace("SECRET", SECRET) + "\nauto_approve = true\n"
    )
    error = caller.join()["error"]
    assert "its own log says more" in error
    assert SECRET not in error
    assert SECRET not in (caller.folder / "left.jsonl").read_text()
    caller.site.close()


# ---- versions ------------------------------------------------------------------------------------


def test_two_versions_are_kept_those_that_the_server_may_ask_for(tmp_path):
    caller = Caller(tmp_path / "site", algorithm="adafbio")
    stored = lambda: caller.site._session.versions.stored()
    caller.join()
    caller.say("load", version=None)
    for version in range(4):
        caller.say("commit", version=version)
        assert stored() == [version - 1, version][version == 0 :]
    caller.say("load", version=2)  # the server never heard of 3
    caller.say("commit", version=4)
    assert stored() == [2, 4]
    caller.site.close()


def test_a_damaged_version_is_refused(tmp_path):
    caller = Caller(tmp_path / "site")
    caller.join()
    caller.say("commit", version=0)
    (caller.folder / "runs" / "trial" / "version-0.safetensors").write_bytes(b"nothing")
    assert "version 0 of the run at this site is damaged" in caller.say("load", version=0)[0]["error"]
    caller.site.close()


def test_two_processes_of_a_site_do_not_share_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbilevel.sites.session._WAIT", 0.1)
    one, two = Caller(tmp_path / "site"), Caller(tmp_path / "site")
    assert "error" not in one.join()
    assert "another process of this site still works on this run" in two.join()["error"]
    one.site.close()
    assert "error" not in two.join()
    two.site.close()


def test_with_a_full_disk_no_answer_leaves_the_site(caller, monkeypatch):
    def full(line):
        raise OSError(28, "No space left")

    monkeypatch.setattr(caller.site.audit, "append", full)
    header, arrays = caller.phase()
    assert header == {"error": "it cannot write to its audit log, so nothing leaves it."}
    assert arrays == []


# ---- own data ------------------------------------------------------------------------------------


def test_sites_with_folders_of_their_own_do_what_the_simulator_does(tmp_path):
    clients = Quadratic(num_clients=3).build().clients
    simulated_sites, own = Loopback(tmp_path / "a"), Loopback(tmp_path / "b")
    for name, client in zip(own.names, clients, strict=True):
        write_folder(tmp_path / "data" / name, client)
        (tmp_path / "b" / name / "site.toml").write_text(
            f'data = "{tmp_path / "data" / name}"\nauto_approve = true\n[policy]\nmin_batch = 1\n'
        )
    for federation in (simulated_sites, own):
        assert (
            federation.serve(federation.plan({"name": "fedbio"}, {"name": "quadratic"} if federation is own else None))
            == "finished"
        )
    one, other = (federation.record.load()[0] for federation in (simulated_sites, own))
    assert all(torch.equal(one[name], other[name]) for name in one)
    Loopback.close_all()


def test_an_environment_variable_sets_the_place_of_the_data(tmp_path, monkeypatch):
    write_folder(tmp_path / "data", Quadratic(num_clients=2).build().clients[1])
    monkeypatch.setenv("FEDBILEVEL_SITE_DATA", str(tmp_path / "data"))
    caller = Caller(tmp_path / "site", 'data = "/nowhere"\nauto_approve = true\n[policy]\nmin_batch = 1\n')
    assert "error" not in caller.join()
    caller.site.close()


def test_a_loader_of_the_sites_own(tmp_path, monkeypatch):
    (tmp_path / "hospital_loader.py").write_text(
        "from fedbilevel.tasks.quadratic import Quadratic\ndef load(path):\n    assert path == 'here'\n"
        "    return Quadratic(num_clients=2).build().clients[1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caller = Caller(
        tmp_path / "site",
        'data = "here"\nloader = "hospital_loader:load"\nauto_approve = true\n[policy]\nmin_batch = 1\n',
    )
    assert "error" not in caller.join()
    caller.site.close()


def test_sites_whose_data_look_different_are_named(tmp_path):
    clients = Quadratic(num_clients=3).build().clients
    federation = Loopback(tmp_path)
    for number, name in enumerate(federation.names):
        own = {role: dict(fields) for role, fields in clients[number].items()}
        if number == 1:
            own["val"]["extra"] = own["val"]["t"]
        if number == 2:
            own["val"] = {
                name: value.astype("float32") for name, value in own["val"].items()
            }  # that is no difference: a run has its own type
        write_folder(tmp_path / "data" / name, own)
        (tmp_path / name / "site.toml").write_text(
            f'data = "{tmp_path / "data" / name}"\nauto_approve = true\n[policy]\nmin_batch = 1\n'
        )
    with pytest.raises(
        PlanError,
        match=r"^site-1 is not like the other sites .* the data of site-0 do not look .* site-1, there is no val/extra",
    ):
        federation.serve(federation.plan({"name": "fedbio"}, {"name": "quadratic"}))
    plan = federation.plan({"name": "fedbio"}, {"name": "quadratic"}, sites=["site-0", "site-2"])
    assert federation.serve(plan) == "finished"
    Loopback.close_all()


def test_a_private_value_cannot_be_sent_under_another_name(tmp_path):
    caller = Caller(tmp_path / "site", task={"name": "quadratic", "num_clients": 2, "upper": "private", "dim_upper": 6})
    caller.join()
    values = {"x": {"kept": "x"}, "y": {"kept": "x"}, "u": {"array": 0}}
    asked = {
        "phase": "local_steps",
        "iteration": 1,
        "call": 1,
        "values": values,
        "new": [0],
        "live": [0],
        "place": {"x": "start"},
    }
    assert (
        "gives 'x' as y, but not both are kept"
        in caller.say("phase", [torch.zeros(6, dtype=torch.float64)], **asked)[0]["error"]
    )
    caller.site.close()


def test_measurements_count_as_rounds(tmp_path):
    caller = Caller(tmp_path / "site", TRIAL + "max_rounds = 2\n")
    caller.join()
    ask = lambda: caller.say(
        "measure",
        [torch.zeros(4, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)],
        iteration=0,
        new=[0, 1],
        live=[0, 1],
        values={"x": {"array": 0}, "y": {"array": 1}},
    )[0]
    assert ["error" in ask() for _ in range(3)] == [False, False, True]
    caller.site.close()


def test_a_torn_line_in_the_log_is_skipped(tmp_path):
    caller = Caller(tmp_path / "site", TRIAL + "max_rounds = 2\n")
    caller.join()
    caller.phase()
    caller.site.close()
    with open(caller.folder / "left.jsonl", "a") as file:
        file.write('{"time": 17')
    again = Caller(tmp_path / "site", TRIAL + "max_rounds = 2\n")
    assert "error" not in again.join()
    assert "error" not in again.phase()[0]
    assert "used up" in again.phase()[0]["error"]
    assert '{"time": 17\n{"n": ' in (caller.folder / "left.jsonl").read_text()
    again.site.close()


def test_an_unexpected_error_is_logged_at_the_site(tmp_path):
    caller = Caller(tmp_path / "site", 'data = "/nowhere/at/all"\nauto_approve = true\n')
    assert caller.join()["error"] == "it failed with DataError; its own log says more."
    assert "/nowhere/at/all" in (caller.folder / "log.txt").read_text()
    caller.site.close()


def test_a_package_that_cannot_be_imported_is_not_quoted(tmp_path, monkeypatch):
    class Broken:
        name, value, dist = "sepsis", "hospital.sepsis:Sepsis", None

        def load(self):
            raise FileNotFoundError("/home/hospital/patients/model.pt")

    monkeypatch.setattr(
        "fedbilevel.discovery._offered", lambda package: [Broken()] if package.__name__.endswith("tasks") else []
    )
    caller = Caller(tmp_path / "site", task={"name": "sepsis"})
    error = caller.join()["error"]
    assert "patients" not in error
    assert "PluginError" in error
    caller.site.close()


def test_a_plan_without_the_number_of_classes_is_refused(tmp_path):
    caller = Caller(tmp_path / "site", task={"name": "data_cleaning", "num_clients": 2})
    assert "num_classes is not given, but labels are classes" in caller.join()["error"]
    caller.site.close()


def test_costs_of_an_abandoned_phase_are_not_charged_to_the_next(caller, monkeypatch):
    wanted = caller.phase()[0]["calls"]
    host = caller.site._session.host

    def breaks(*args, **kwargs):
        host.ledger.charge("gy", torch.tensor([1]), 1000)
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(host, "run_phase", breaks)
        assert "error" in caller.phase()[0]
    caller.say("load", version=None)
    assert caller.phase()[0]["calls"] == wanted


# ---- several clients -----------------------------------------------------------------------------


def hosting(tmp_path, settings, count=2):
    """A site that the plan has host clients 1 and 2 of 3, or as many as that."""
    tmp_path.mkdir(exist_ok=True)
    task = {"name": "quadratic", "num_clients": 1 + count}
    return Caller(tmp_path / "site", settings, task=task, clients={"site-1": count})


@pytest.mark.parametrize("clients", [[], [0], [2, 1], [1, 1], [3], "all", [True], [[1]]])
def test_a_message_about_clients_that_are_not_here_is_refused(tmp_path, clients):
    caller = hosting(tmp_path, TRIAL)
    caller.join()
    assert "expected some of [1, 2], in order" in caller.phase(clients=clients)[0]["error"]
    caller.site.close()


def test_an_answer_has_a_row_and_a_bill_for_each_client_that_was_asked(tmp_path):
    caller = hosting(tmp_path, TRIAL)
    assert caller.join()["weights"] == [1, 1]
    header, arrays = caller.phase()
    assert [tuple(array.shape) for array in arrays] == [(2, 4), (2, 6), (2, 6)]
    one, rows = caller.phase(clients=[2])
    assert all(torch.equal(row[0], array[1]) for row, array in zip(rows, arrays, strict=True))
    assert {name: numbers[1:] for name, numbers in header["calls"].items()} == one["calls"]
    assert [entry["shape"] for entry in caller.left()[-2]["arrays"]] == [[2, 4], [2, 6], [2, 6]]
    caller.site.close()


def test_a_folder_for_each_client_below_the_sites(tmp_path):
    clients = Quadratic(num_clients=3).build().clients
    with pytest.raises(DataError, match=r"there is no train file in .* or one such folder per client"):
        check_data(SiteSettings(), tmp_path / "data")
    for number, name in enumerate(("ann", "bob")):
        write_folder(tmp_path / "data" / name, clients[number + 1])
    (tmp_path / "data" / "notes.txt").write_text("two wards\n")
    check_data(SiteSettings(), tmp_path / "data")
    own = hosting(tmp_path / "own", TRIAL.replace('loader = "simulated"', f'data = "{tmp_path / "data"}"'))
    same = hosting(tmp_path / "same", TRIAL)
    for caller in (own, same):
        assert "error" not in caller.join()
    assert all(torch.equal(one, other) for one, other in zip(own.phase()[1], same.phase()[1], strict=True))
    own.site.close()
    same.site.close()


def test_a_loader_may_give_a_list_of_clients(tmp_path, monkeypatch):
    (tmp_path / "group_loader.py").write_text(
        "from fedbilevel.tasks.quadratic import Quadratic\ndef load(path):\n"
        "    return list(Quadratic(num_clients=3).build().clients[1:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caller = hosting(tmp_path, TRIAL.replace('loader = "simulated"', 'data = "here"\nloader = "group_loader:load"'))
    assert "error" not in caller.join()
    assert len(caller.phase()[1][0]) == 2
    caller.site.close()


@pytest.mark.parametrize(("here", "plan"), [(2, 1), (1, 2), (2, 3)])
def test_a_plan_with_another_number_of_clients_is_refused(tmp_path, here, plan):
    clients = Quadratic(num_clients=3).build().clients
    for number in range(here):
        write_folder(tmp_path / "data" / (f"client{number}" if here > 1 else ""), clients[number])
    caller = hosting(tmp_path, TRIAL.replace('loader = "simulated"', f'data = "{tmp_path / "data"}"'), plan)
    fix = f"set clients = {{site-1 = {here}}} in the run file"
    wanted = f"this site has the data of {here} clients, and the plan expects {plan}: {fix}"
    assert wanted in caller.join()["error"]
    caller.site.close()


def test_clients_of_a_site_whose_data_look_different_are_named(tmp_path, monkeypatch):
    (tmp_path / "odd_loader.py").write_text(
        "from fedbilevel.tasks.quadratic import Quadratic\ndef load(path):\n"
        "    one, two = Quadratic(num_clients=2).build().clients\n"
        "    two = {role: dict(fields) for role, fields in two.items()}\n"
        "    two['val']['extra'] = two['val']['t']\n    return [two, one]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caller = hosting(tmp_path, TRIAL.replace('loader = "simulated"', 'data = "here"\nloader = "odd_loader:load"'))
    assert (
        "the data of its client 2 do not look like those of its client 1: there is no val/extra"
        in caller.join()["error"]
    )
    caller.site.close()


def test_the_policy_holds_for_the_smallest_client(tmp_path):
    caller = hosting(tmp_path, TRIAL + "min_samples = 6\n")  # client 1 has 5 samples, client 2 has 6
    assert "fewer than the 6 training samples" in caller.join()["error"]
    caller.site.close()


def test_a_simulated_task_with_too_few_clients_is_refused(tmp_path):
    caller = Caller(tmp_path / "site", TRIAL, task={"name": "quadratic", "num_clients": 2}, clients={"site-1": 2})
    caller.join()
    assert "the simulated task has 2 clients, this site hosts number 2" in (caller.folder / "log.txt").read_text()
    caller.site.close()
