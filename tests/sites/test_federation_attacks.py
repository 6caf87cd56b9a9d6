"""Attacks on a federation with real FLARE processes. Each one succeeded on an earlier version, and
must fail now."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

import torch
from tomlkit import dumps

import fedbilevel
from fedbilevel.errors import FedBilevelError
from fedbilevel.runs.record import Record
from fedbilevel.sites import audit, operator, verification, wire
from fedbilevel.sites.flare import configuration, connection, guard, job, jobs
from fedbilevel.sites.plan import plan_digest, plan_of
from support.sites.driven import Driver, contents, until
from support.sites.loopback import differences, simulated
from support.sites.real_loopback import HERE, federation_of

SITES = ["north", "south", "west"]
STRICT = 'loader = "simulated"\nauto_approve = true\n'  # the default policy
pytestmark = [pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"), pytest.mark.wait, pytest.mark.slow]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with federation_of(tmp_path_factory.mktemp("attacks"), SITES, allow=["support.sites.flare_standins."]) as running:
        for site in SITES:
            settings(running, site, STRICT)
        yield running


def settings(federation, site, text):
    (federation.kits[site] / job.SITE / "site.toml").write_text(text)


def cleaning(name, batch_size=16, **more):
    """Private weights of samples at the sites, as between hospitals."""
    return plan_of({
        "name": name, "sites": SITES, "num_iterations": 2, "measure_every": 100, "num_classes": 10, "deadline": 60.0,
        "task": {"name": "data_cleaning", "num_clients": 3}, "algorithm": {"name": "fbo_aggitd", "num_lower_rounds": 2},
        "options": {"seed": 1, "batch_size": batch_size, "dtype": "float64", "strategy": "loop"}, **more,
    }).asdict()  # fmt: skip


def lines(federation, site, run=None):
    return [line for line in verification.lines(federation.kits[site] / job.SITE) if run is None or line["run"] == run]


def diary(federation, run):
    return [
        json.loads(line)
        for line in (federation.kits["server"] / job.RUNS / run / "sites.jsonl").read_text().splitlines()
    ]


# ---- 1: a site that asks another site ------------------------------------------------------------


@pytest.fixture(scope="module")
def robbed(federation):
    """A run in which west asks north for single samples."""
    plan, told, notices = cleaning("robbed"), [], []
    outcome = federation.watch(
        plan, told.append, notice=notices.append, client="support.sites.flare_standins.ThiefClient"
    )
    return plan, outcome, told, notices


def test_attack_of_a_site_on_another_recovers_nothing(federation, robbed, tmp_path):
    plan, outcome, _, _ = robbed
    assert outcome == "finished"
    loot = json.loads((federation.kits["west"] / job.SITE / "loot.json").read_text())
    assert len(loot["calls"]) == 6
    assert all(got.startswith("failed") for _, _, got in loot["calls"]), loot  # the server does not even pass them on
    result, state = simulated(plan, tmp_path / "simulated")
    answers = [line for line in lines(federation, "north", "robbed") if line["arrays"]]
    assert len(answers) == result.ledger["rounds"] + len(
        result.rows
    )  # rounds and measurements of the run itself, and nothing else
    found = Record(federation.kits["server"] / job.RUNS / "robbed").load()[0]
    assert set(differences(found, state).values()) == {0.0}


def test_attack_by_commands_of_flare_is_refused(federation, robbed):
    """A shell and a deletion at another site, an end of its job, and an end of the run."""
    loot = json.loads((federation.kits["west"] / job.SITE / "loot.json").read_text())
    assert len(loot["commands"]) == 4
    assert "ok" not in loot["commands"]
    assert (federation.kits["south"] / job.SITE / "site.toml").exists()


def test_attack_of_a_site_is_reported_with_its_name_and_the_victim_is_not_blamed(federation, robbed):
    _, _, told, _ = robbed
    assert [line["missing"] for line in diary(federation, "robbed")] == [{}, {}]
    reported = {
        caller
        for line in [*diary(federation, "robbed"), *told]
        for calls in line.get("strangers", {}).values()
        for caller in calls
    }
    assert reported == {"west"}
    assert guard.refused_by(federation.kits["server"])["west"] > 0


def test_attack_by_a_command_of_the_servers_own_job_is_refused(federation):
    assert federation.watch(cleaning("commanding"), server="support.sites.flare_standins.Commanding") == "finished"
    code, payload = json.loads((federation.kits["server"] / job.RUNS / "commanding" / "reply.json").read_text())
    assert code != "ok"
    assert "auto_approve" not in payload


def test_attack_by_code_in_a_job_of_the_lead_is_refused(federation, tmp_path):
    """A module in the configuration, and a component that imports it."""
    plan, proof = cleaning("coded"), tmp_path / "proof"
    folder = jobs.job_folder(tmp_path, plan, seal=configuration.sealed(federation.lead, configuration.packed(plan)))
    (folder / "at_site/config/evil.py").write_text(f"import pathlib; pathlib.Path({str(proof)!r}).touch()\n")
    place = folder / "at_site/config/config_fed_client.json"
    content = json.loads(place.read_text())
    importing = {
        "id": "evil",
        "path": "nvflare.collab.runtime.executor.optional_import",
        "args": {"module": "{JOB_ID}.app_{SITE_NAME}.config.evil"},
    }
    place.write_text(json.dumps({**content, "components": [*content["components"], importing]}))
    with connection.session(federation.lead) as opened:
        number = opened.submit_job(str(folder))
        until(lambda: str(opened.get_job_status(number)).startswith("FINISHED"))
        assert "COMPLETED" not in str(opened.get_job_status(number))
        said = "runs the jobs of `fedbilevel federation submit` only"
        detail = lambda: " ".join(map(str, opened.get_job_meta(number).get("job_deploy_detail") or []))
        until(lambda: said in detail())  # the status may come before the detail
    assert not proof.exists()


# ---- 2: a server or lead that asks for too much --------------------------------------------------


def test_attack_by_batches_of_one_sample_is_refused_by_the_policy(federation):
    with pytest.raises(
        FedBilevelError,
        match=r"north does not join the run single: .* batches of 1 samples: its line 'min_batch' asks for at least 16",
    ):
        federation.watch(cleaning("single", batch_size=1))
    assert not any(line["arrays"] for site in SITES for line in lines(federation, site, "single"))


class Server:
    """A server that does not keep to the rules."""

    def __init__(self, driver, plan):
        self.driver, self.plan, self.step = driver, plan, 0

    def say(self, kind, arrays=(), *, run=None, **header):
        """To north: its answer's header and arrays."""
        self.step += 1
        run = run or self.plan["name"]
        message = wire.pack({"kind": kind, "run": run, "turn": [1, 0, self.step], **header}, arrays)
        return self.send(message)

    def send(self, message):
        answer = self.driver.exchange({"north": message}, deadline=60.0)
        assert not answer["failures"], answer["failures"]
        return wire.unpack(contents(answer)["north"])

    def join(self, plan=None):
        plan = plan or self.plan
        return self.say("join", plan=plan, version=fedbilevel.__version__)[0]

    def phase(self, call, plan=None):
        y = torch.zeros(650, dtype=torch.float64)
        values = {"x": {"kept": "x"}, "y": {"array": 0}, "z": {"value": None}, "t": {"value": 0}, "Q": {"value": 1}}
        asked = {"phase": "aggregate", "iteration": 1, "call": call, "values": values, "new": [0], "live": [0]}
        asked |= {"place": {"x": "start"}} if call == 1 else {}
        return self.say("phase", [y], run=(plan or self.plan)["name"], **asked)


@pytest.fixture(scope="module")
def bound(federation):
    plan = cleaning("bound")
    yield Server(Driver(federation, plan, server="support.sites.flare_standins.Driven"), plan)
    jobs.stop(federation.lead, "bound")


def test_attack_by_another_plan_than_the_submitted_one_is_refused(federation, bound):
    greedy = {**bound.plan, "options": {**bound.plan["options"], "batch_size": 1}}
    sent, submitted = plan_digest(greedy)[:12], plan_digest(bound.plan)[:12]
    wanted = f"the message has the plan {sent}, but the plan {submitted} was submitted"
    assert wanted in bound.join(greedy)["error"]
    assert "takes no part" in bound.phase(1)[0]["error"]
    assert "error" not in bound.join()


def test_attack_by_a_plan_that_nobody_approved_gets_no_answer(federation, bound):
    place = federation.kits["north"] / job.SITE
    settings(federation, "north", 'loader = "simulated"\n')
    digest = plan_digest(bound.plan)
    (place / operator.APPROVALS).unlink()
    before = len([line for line in lines(federation, "north") if line["arrays"]])
    try:
        for answer in (bound.join(), bound.phase(1)[0]):
            assert (
                f"the plan is not approved there yet: `fedbilevel federation approve {digest[:12]}`" in answer["error"]
                or "takes no part" in answer["error"]
            )
        [request] = [one for one in operator.pending(place) if one["digest"] == digest]
        assert (request["who"], request["run"], request["plan"]) == ("lead@example.org", "bound", bound.plan)
        assert request["leaves"]["rounds_per_iteration"] > 0
        assert len([line for line in lines(federation, "north") if line["arrays"]]) == before
        operator.approve(place, digest[:8], "a test")
        assert "error" not in bound.join()
    finally:
        settings(federation, "north", STRICT)


# ---- 3: a site whose answers ruin the run --------------------------------------------------------


def test_attack_by_scaled_answers_is_named_and_excluded(federation, tmp_path):
    """The run ends like one without west in the outer iterations in which its answers were
    multiplied."""
    factors = {2: 1e6, 3: -10.0, 4: 1e38}
    (federation.kits["west"] / job.SITE / "factors.json").write_text(json.dumps(factors))
    task = {"name": "hyper_representation", "num_clients": 3, "num_hidden": 20}
    plan = cleaning(
        "scaled",
        num_iterations=5,
        exclude_outliers=True,
        quorum=2,
        task=task,
        algorithm={"name": "fedbio", "num_local_steps": 2},
    )
    told = []
    assert federation.watch(plan, told.append, client="support.sites.flare_standins.ScalingClient") == "finished"
    for line in [*diary(federation, "scaled"), *told]:
        named = {site for site in SITES if site in line.get("flagged", {})}
        assert named == ({"west"} if line["iteration"] in factors else set()), line
        assert set(line["missing"]) == named
    assert Record(federation.kits["server"] / job.RUNS / "scaled").rows()[-1]["upper_loss"] < 2.5


# ---- 4: a plan that uses a site up ---------------------------------------------------------------


@pytest.fixture(scope="module")
def unbound(federation):
    """Sites that take part in every plan of a job, so that one job can try many. The budget allows
    4 more answers and 4 more runs."""
    used = audit.AuditLog(federation.kits["north"] / job.SITE).rounds
    held = len(list((federation.kits["north"] / job.SITE / "runs").glob("*")))
    limits = f"max_rounds = {used + 4}\nmax_runs = {held + 4}\nmax_memory_megabytes = 2000\n"
    limits += "[policy.settings]\nnum_hidden = [1, 1000000]\n"
    settings(federation, "north", f"{STRICT}[policy]\n{limits}")
    plan = cleaning("unbound")
    yield Server(
        Driver(
            federation,
            plan,
            server="support.sites.flare_standins.Driven",
            client="support.sites.flare_standins.SeveralClient",
        ),
        plan,
    )
    settings(federation, "north", STRICT)
    jobs.stop(federation.lead, "unbound")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_classes": 2_000_000},
            "does not allow num_classes = 2000000: its line 'num_classes' in [policy.settings] allows 2 to 1000",
        ),
        (
            {"algorithm": {"name": "fbo_aggitd", "num_local_steps": 10_000_000}},
            "does not allow num_local_steps = 10000000",
        ),
        (
            {"algorithm": {"name": "fbo_aggitd", "num_lower_rounds": 10_000_000}},
            "does not allow num_lower_rounds = 10000000",
        ),
        ({"num_iterations": 10_000_000}, "does not allow num_iterations = 10000000"),
        (
            {"task": {"name": "data_cleaning", "num_clients": 3, "model": "mlp", "num_hidden": 900_000}},
            "raise the line 'max_memory_megabytes' of its policy",
        ),
    ],
)
def test_attack_by_a_plan_that_uses_up_a_site_is_refused(unbound, changes, says):
    assert says in unbound.join(plan_of({**unbound.plan, **changes}).asdict())["error"]


def test_attack_on_the_budget_by_another_run_name_is_refused(federation, unbound):
    """max_rounds counts the answers of all runs of a kit."""
    outcomes = []
    for name in ("first", "second", "third"):
        plan = {**unbound.plan, "name": name}
        assert "error" not in unbound.join(plan)
        outcomes += [unbound.phase(call, plan)[0].get("error", "answered") for call in (1, 2)]
    assert outcomes[:4] == ["answered"] * 4
    assert all("and they are used up: raise its line 'max_rounds' there" in text for text in outcomes[4:])
    assert "the line 'max_runs' of its policy" in unbound.join({**unbound.plan, "name": "fourth"})["error"]


def test_attack_by_garbage_is_refused_and_leaves_few_bytes(federation, unbound):
    place = federation.kits["north"] / job.SITE
    size = lambda: sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    before, garbage = size(), b"fedbilevel-1\n" + b"\xff" * 100_000
    for _ in range(20):
        assert "error" in unbound.send(garbage)[0]
    assert size() - before < 20 * 1000
    assert verification.verify(place).ok


# ---- 5: words that a terminal would obey ---------------------------------------------------------


def test_attack_by_escape_sequences_does_not_reach_the_terminal_of_the_lead(federation, tmp_path):
    code = (
        "import sys; from fedbilevel.sites.flare import follow; from fedbilevel.cli.main import main; "
        "watch = follow.watch;"
        "follow.watch = lambda *a, **k: watch(*a, **{**k, 'client': 'support.sites.flare_standins.EscapingClient'});"
        "main()"
    )
    plan = {name: value for name, value in cleaning("escapes").items() if value is not None}
    (tmp_path / "run.toml").write_text(
        dumps(
            json.loads(json.dumps(plan, default=str))
            | {"task": _without_none(plan["task"]), "algorithm": _without_none(plan["algorithm"])}
        )
    )
    command = [
        sys.executable,
        "-c",
        code,
        "federation",
        "submit",
        str(tmp_path / "run.toml"),
        "--kit",
        str(federation.lead),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **HERE})
    said = done.stdout + done.stderr
    assert "west does not join the run escapes: no \\x1b]0;pwned" in said
    assert not any((ord(letter) < 32 and letter != "\n") or ord(letter) in (0x7F, 0x202E) for letter in said)


def _without_none(table):
    return {name: value for name, value in table.items() if value is not None}
