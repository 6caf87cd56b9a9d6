"""Startup kits: what is in them, and that it is production mode."""

import json
import re
import shutil
import stat
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from click.testing import CliRunner
from nvflare.collab import CollabCallError

from fedbilevel.cli.main import cli
from fedbilevel.errors import SettingError
from fedbilevel.sites import policy
from fedbilevel.sites.flare import (
    configuration,
    connection,
    job,
    jobs,
    kits,
    processes,
    production,
    progress,
    transport,
)
from fedbilevel.sites.flare.local import LEAD
from website.imports import MODULES, imports

pytestmark = pytest.mark.wait

SITES = ["north", "south", "south-2"]


def load(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    kits.init(folder / "federation.toml", sites=SITES, port=28123, lead="lead@hospital.org")
    return kits.provision(folder / "federation.toml", folder / "out")


def test_every_organisation_gets_a_folder_of_its_own(made):
    out = made["server"].parent
    assert sorted(path.name for path in out.iterdir()) == sorted(["authority", "server", "lead@hospital.org", *SITES])
    assert made == {
        "server": out / "server",
        "lead@hospital.org": out / "lead@hospital.org",
        **{site: out / site for site in SITES},
    }
    for kit in made.values():
        assert (kit / "startup" / "rootCA.pem").read_bytes() == (made["server"] / "startup" / "rootCA.pem").read_bytes()
        assert stat.S_IMODE(kit.stat().st_mode) == 0o700
    assert stat.S_IMODE((out / "authority").stat().st_mode) == 0o700
    assert len({(made[site] / "startup" / "client.key").read_bytes() for site in SITES}) == len(SITES)
    kept = " ".join(path.read_text() for path in (out / "authority").rglob("*") if path.is_file())
    assert (
        kept.count("BEGIN PRIVATE KEY") + kept.count("BEGIN RSA PRIVATE KEY") == 1
    )  # the authority's: nobody else's stays with the one who made the kits


def test_one_port_mutual_tls_and_grpc(made):
    server = load(made["server"] / "startup" / "fed_server.json")["servers"][0]
    assert server["service"] == {"target": "localhost:28123", "scheme": "grpc"}
    assert (server["admin_port"], server["connection_security"]) == (28123, "mtls")
    for site in SITES:
        settings = load(made[site] / "startup" / "fed_client.json")
        assert settings["servers"][0]["service"] == {"target": "localhost:28123", "scheme": "grpc"}
        assert (settings["client"]["fqsn"], settings["client"]["connection_security"]) == (site, "mtls")
    admin = load(made["lead@hospital.org"] / "startup" / "fed_admin.json")["admin"]
    assert (admin["host"], admin["port"], admin["scheme"], admin["connection_security"]) == (
        "localhost",
        28123,
        "grpc",
        "mtls",
    )


@pytest.mark.parametrize("name", ["server", *SITES])
def test_only_installed_classes_of_ours_run_and_logs_stay_small(made, name):
    local = made[name] / "local"
    resources = load(local / "resources.json")
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["class_allow_list"] == production.ALLOWED
    assert not any(name.endswith(".") for name in production.ALLOWED)  # a prefix admits functions, too
    assert resources["allow_log_streaming"] is False
    assert not {"site_log_streamer", "log_receiver"} & {part["id"] for part in resources["components"]}
    logs = load(local / "log_config.json")
    assert logs["loggers"]["nvflare.collab"]["level"] == "WARNING"
    assert "consoleHandler" not in logs["handlers"]
    assert set(logs["loggers"]["root"]["handlers"]) == set(logs["handlers"])


def test_no_code_travels_and_nobody_reads_files_at_a_site(made):
    for site in SITES:
        rights = load(made[site] / "local" / "authorization.json")["permissions"]
        assert set(rights) == {"lead"}
        assert {name for name, who in rights["lead"].items() if who == "any"} == {"submit_job", "manage_job", "view"}
    server = load(made["server"] / "local" / "authorization.json")["permissions"]["lead"]
    assert {name for name, who in server.items() if who == "none"} == {"byoc", "clone_job", "server-predeployed-flwr"}


def test_a_site_has_settings_of_its_own_and_the_others_have_none(made):
    assert policy.read_settings(made["north"] / job.SITE) == policy.SiteSettings()
    uncommented = re.sub(r"(?m)^# (?=\w+ = )", "", (made["north"] / job.SITE / policy.FILE).read_text())
    assert set(tomllib.loads(uncommented)["policy"]) == {one.name for one in fields(policy.Policy)}
    defaults = {
        name: value
        for name, value in tomllib.loads(uncommented)["policy"].items()
        if name not in ("tasks", "algorithms", "max_memory_megabytes", "max_epsilon", "settings")
    }
    assert defaults == {name: getattr(policy.Policy(), name) for name in defaults}  # the file shows the defaults
    assert not (made["server"] / job.SITE).exists()
    assert not (made["lead@hospital.org"] / job.SITE).exists()
    assert kits.sites_of(made["lead@hospital.org"]) == list(SITES)


def test_jobs_are_kept_in_the_kit_also_where_it_is_moved(made, tmp_path):
    def places(kit):
        resources = load(kit / "local" / "resources.json")
        manager = next(part for part in resources["components"] if part["id"] == "job_manager")
        return manager["args"]["uri_root"], resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]

    assert places(made["server"]) == (str(made["server"] / "jobs"), str(made["server"] / "snapshots"))
    moved = tmp_path / "elsewhere"
    shutil.copytree(made["server"], moved)
    production.settle(moved)
    assert places(moved) == (str(moved / "jobs"), str(moved / "snapshots"))
    before = (made["north"] / "local" / "resources.json").read_bytes()
    production.settle(made["north"])
    assert (made["north"] / "local" / "resources.json").read_bytes() == before


def test_a_site_that_comes_later_gets_a_kit_of_the_same_authority_and_the_others_keep_theirs(tmp_path):
    toml, out = tmp_path / "federation.toml", tmp_path / "out"
    kits.init(toml, sites=["a"])
    first = kits.provision(toml, out)
    (first["a"] / job.SITE / policy.FILE).write_text('data = "mine"\n')
    contents = lambda kit: {path.relative_to(kit): path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    before = {name: contents(kit) for name, kit in first.items()}
    toml.write_text(toml.read_text() + '\n[[site]]\nname = "b"\norg = "b"\n')
    second = kits.provision(toml, out)
    after = {name: contents(second[name]) for name in first}
    assert after[LEAD].pop(Path(kits.SITES)) == b'["a", "b"]'
    assert before[LEAD].pop(Path(kits.SITES)) == b'["a"]'
    assert after == before
    toml.write_text(toml.read_text().replace("port = 8002", "port = 8003"))
    with pytest.raises(
        SettingError, match=r"are for a server at localhost:8002, .* says localhost:8003: use another folder"
    ):
        kits.provision(toml, out)
    verified = subprocess.run(
        [
            "openssl",
            "verify",
            "-CAfile",
            first["server"] / "startup" / "rootCA.pem",
            second["b"] / "startup" / "client.crt",
        ],
        capture_output=True,
        text=True,
    )
    assert verified.stdout.strip().endswith("OK"), verified.stderr


def test_an_interrupted_provision_leaves_no_half_of_a_kit_and_the_next_one_makes_it(tmp_path, monkeypatch):
    toml, out = tmp_path / "federation.toml", tmp_path / "out"
    kits.init(toml, sites=["a", "b"])
    with monkeypatch.context() as patch:
        settled = production.write_settings

        def interrupted(kit, **how):
            if kit.name == ".b.unfinished":
                raise KeyboardInterrupt
            settled(kit, **how)

        patch.setattr(production, "write_settings", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kits.provision(toml, out)
    assert sorted(path.name for path in out.iterdir()) == [".b.unfinished", "a", "authority", "server"]
    before = (out / "a" / "startup" / "client.key").read_bytes()
    made = kits.provision(toml, out)
    assert sorted(path.name for path in out.iterdir()) == sorted(["authority", *made])
    assert (out / "a" / "startup" / "client.key").read_bytes() == before
    for name, kit in made.items():
        kits.check_whole(kit, {"server": "server", LEAD: "lead"}.get(name, "site"))


def test_a_half_made_kit_of_an_earlier_version_is_named_and_not_started(made, tmp_path):
    shutil.copytree(made["server"].parent, tmp_path / "out")
    shutil.copy(made["server"].parents[1] / "federation.toml", tmp_path)
    refused = lambda *words: str(CliRunner().invoke(cli, ["federation", *map(str, words)]).exception)
    provision = ("provision", tmp_path / "federation.toml", "--out", tmp_path / "out")
    for name, command in (("south", "start-site"), ("server", "start-server")):
        kit = tmp_path / "out" / name
        cut = kit / "local" / "resources.json"
        whole = cut.read_text()
        cut.write_text(whole[: len(whole) // 2])
        sentence = (
            f"the kit {kit} is incomplete (local/resources.json is cut off): "
            "delete the kit folder and run provision again."
        )
        assert refused(*provision) == refused(command, kit) == sentence
        cut.write_text(whole)
        key = next((kit / "startup").glob("*.key"))
        key.rename(kit / "elsewhere")
        sentence = (
            f"the kit {kit} is incomplete (startup/{key.name} is missing): "
            "delete the kit folder and run provision again."
        )
        assert refused(*provision) == refused(command, kit) == sentence
        (kit / "elsewhere").rename(key)
    shutil.rmtree(tmp_path / "out" / "north")
    (tmp_path / "out" / ".north.unfinished").write_text("in the way")
    assert "north cannot be made (" in refused(*provision)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("name = ", "is not TOML"),
        ('name = "f"\nlead = "a@b.org"', "names no site"),
        ('name = "f"\nlead = "a@b.org"\nsite = 3', "one table [[site]] for each site"),
        (
            'name = "f"\nlead = "nobody"\n[[site]]\nname = "a"\norg = "a"',
            "lead in {path} is 'nobody', expected an e-mail address",
        ),
        ('lead = "a@b.org"\n[[site]]\nname = "a"\norg = "a"', "has no name"),
        (
            'name = "f"\nlead = "a@b.org"\n[[site]]\nname = "a b"\norg = "a"',
            "name in [[site]] number 1 of {path} is 'a b'",
        ),
        ('name = "f"\nlead = "a@b.org"\n[[site]]\nname = "a"', "[[site]] number 1 of {path} has no org"),
        ('name = "f"\nlead = "a@b.org"\n[[site]]\nname = "server"\norg = "a"', "is named 'server', which is taken"),
        (
            'name = "f"\nlead = "a@b.org"\n[[site]]\nname = "a"\norg = "a"\n[[site]]\nname = "a"\norg = "b"',
            "names the site 'a' twice",
        ),
        ('name = "f"\nlead = "a@b.org"\n[[site]]\nname = "a"\norg = "a"\ndata = "/x"', "unknown entry 'data'"),
        (
            'name = "f"\nlead = "a@b.org"\n[server]\nport = 70000\n[[site]]\nname = "a"\norg = "a"',
            "port in [server] of {path} is 70000",
        ),
        (
            'name = "f"\nlead = "a@b.org"\n[server]\nhost = "a_b!"\n[[site]]\nname = "a"\norg = "a"',
            "host in [server] of {path} is 'a_b!'",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "federation.toml"
    path.write_text(content)
    with pytest.raises(SettingError) as caught:
        kits.provision(path, tmp_path / "out")
    assert sentence.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_init_writes_a_file_that_provision_reads_and_never_over_another(tmp_path):
    path = tmp_path / "federation.toml"
    done = CliRunner().invoke(
        cli, ["federation", "init", str(path), "--sites", "a,b", "--host", "fed.example.org"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert kits.read(path) == kits.FederationFile(
        "federation", "lead@example.org", "fed.example.org", kits.PORT, {"a": "a", "b": "b"}
    )
    with pytest.raises(SettingError, match="exists"):
        kits.init(path, sites=["c"])
    with pytest.raises(SettingError, match="there is no"):
        kits.read(tmp_path / "other.toml")


def test_a_job_names_installed_classes_and_holds_no_code(tmp_path):
    plan = {"name": "run-1", "sites": ["a", "b", "c"], "quorum": 2, "text": "{name} $HOME {{x}} \u00e4"}
    folder = jobs.job_folder(tmp_path, plan, seal="s")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "at_server/config/config_fed_server.json",
        "at_site/config/config_fed_client.json",
        "meta.json",
    ]
    meta, server, site = (
        load(folder / name)
        for name in ("meta.json", "at_server/config/config_fed_server.json", "at_site/config/config_fed_client.json")
    )
    assert meta["min_clients"] == 2
    assert meta["deploy_map"] == {"at_server": ["server"], "at_site": ["a", "b", "c"]}
    named = [
        server["workflows"][0]["path"],
        server["components"][0]["path"],
        site["executors"][0]["executor"]["path"],
        site["components"][0]["path"],
    ]
    assert all(any(path.startswith(allowed) for allowed in production.ALLOWED) for path in named)
    packed = server["components"][0]["args"]["plan"]
    assert configuration.unpacked(packed) == plan
    assert not set(packed) & set("{}$")  # which FLARE would replace
    assert site["components"][0]["args"] == {
        "plan": packed,
        "seal": "s",
    }  # a site is bound to the plan that was submitted


@pytest.mark.parametrize(
    ("error", "silent", "words"),
    [
        (
            CollabCallError("a", "handle", TimeoutError("function handle timed out after 2.0 seconds")),
            True,
            "a did not answer within 2.0 s.",
        ),
        (
            CollabCallError("a", "handle", "remote call returned rc='target_unreachable'"),
            True,
            "a could not be reached",
        ),
        (
            CollabCallError(
                "a", "handle", "ValueError: patient 4711", cause_type="ValueError", remote_traceback="Traceback: x"
            ),
            False,
            "a failed with ValueError",
        ),
    ],
)
def test_a_failed_call_is_an_error_of_the_site_or_an_unreachable_site(error, silent, words):
    failure = transport.failure_of("a", error, 2.0)
    assert (failure.silent, failure.seconds) == (silent, 2.0)
    assert words in failure.reason
    assert "4711" not in failure.reason


@pytest.mark.parametrize(
    "answer", [None, 3, b"x", {}, {"content": "text"}, {"content": bytearray(b"x")}, {"refusal": 3}, [b"x"]]
)
def test_an_answer_that_is_not_a_message_is_a_failure(answer):
    failure = transport.outcome_of("a", answer, 1.0)
    assert failure == transport.Failure(False, failure.reason, 1.0)
    assert "a answered with something that is no message" in failure.reason


@pytest.mark.parametrize("order", [("asked", "rejoin"), ("rejoin", "asked")])
def test_a_persons_request_to_stop_is_not_overruled(order):
    made = object.__new__(transport.FlareTransport)
    made.stopping = ""
    for why in order:
        made.ask_to_stop(why)
    assert made.stopping == "asked"


def test_valid_answers_are_read_as_replies_and_refusals():
    assert transport.outcome_of("a", {"content": b""}, 1.0) == transport.Reply(b"", 1.0)
    assert transport.outcome_of("a", {"refusal": "no" * 1000}, 1.0) == transport.Failure(False, "no" * 250, 1.0)


def test_progress_is_whole_at_every_moment_and_keeps_the_last(tmp_path):
    (tmp_path / "run").mkdir()
    written = progress.ProgressFile(tmp_path / "run" / job.PROGRESS, "job-1", ["a"])
    read = lambda: load(tmp_path / "run" / job.PROGRESS)
    assert read() == {
        "job": "job-1",
        "sites": ["a"],
        "outcome": "running",
        "why": "",
        "waiting": "",
        "warning": "",
        "result": "",
        "count": 0,
        "latest": [],
    }
    for iteration in range(progress.KEPT + 5):
        written.say({"iteration": iteration})
    assert read()["count"] == progress.KEPT + 5
    assert [one["iteration"] for one in read()["latest"]] == list(range(5, progress.KEPT + 5))
    written.say({"waiting": "for b"})
    assert (read()["waiting"], read()["count"]) == ("for b", progress.KEPT + 5)  # that is no outer iteration
    written.say({"iteration": 99})
    assert read()["waiting"] == ""
    written.end("stopped", "asked")
    assert (read()["outcome"], read()["why"]) == ("stopped", "asked")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [job.PROGRESS]


def test_commands_of_kits(made):
    command = processes.command_of(made["north"])
    assert command[1:4] == ["-u", "-m", "nvflare.private.fed.app.client.client_train"]
    assert str(made["north"]) in command
    assert processes.name_of(made["north"]) == "north"
    assert processes.name_of(made["server"]) == "server"
    assert processes.running(made["north"]) == {}
    with pytest.raises(SettingError, match="not the whole kit of a server or a site"):
        processes.command_of(made["lead@hospital.org"])
    with pytest.raises(SettingError, match="not the kit of a lead"), connection.session(made["north"]):
        pass


def test_only_this_package_imports_flare():
    users = {
        name
        for name, path in MODULES.items()
        if any(one.split(".")[0] in ("nvflare", "psutil") for one in imports(path))
    }
    assert users
    assert all(name.startswith("fedbilevel.sites.flare.") for name in users)


def test_a_path_that_flare_would_divide_is_refused(made, tmp_path):
    moved = tmp_path / "two words"
    shutil.copytree(made["north"], moved)
    with pytest.raises(SettingError, match="move it"):
        processes.Supervised(moved)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["start-server", "north"], "is the kit of the site 'north': use start-site"),
        (["start-site", "server"], "is the kit of the server: use start-server"),
        (["status", "--kit", "north"], "is not the kit of a lead"),
        (["stop", "run", "--kit", "lead@hospital.org"], "no run was submitted"),
    ],
)
def test_the_wrong_kit_is_named(made, monkeypatch, args, sentence):
    monkeypatch.chdir(made["server"].parent)
    done = CliRunner().invoke(cli, ["federation", *args])
    assert isinstance(done.exception, SettingError)
    assert sentence in str(done.exception)


def test_without_flare_every_command_says_how_to_install_it(made, monkeypatch, tmp_path):
    import sys

    for name in [name for name in sys.modules if name.startswith("fedbilevel.sites.flare")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["fedbilevel.sites"], "flare")
    monkeypatch.setitem(sys.modules, "nvflare", None)
    monkeypatch.setitem(sys.modules, "nvflare.collab", None)
    monkeypatch.setitem(sys.modules, "nvflare.apis.fl_exception", None)
    run = tmp_path / "run.toml"
    run.write_text('sites = ["a"]')
    kit = ["--kit", str(made["lead@hospital.org"])]
    calls = [
        ["init"],
        ["provision"],
        ["start-server", str(made["server"])],
        ["start-site", str(made["north"])],
        ["submit", str(run), *kit],
    ]
    calls += [["status", *kit], ["stop", "r", *kit], ["resume", "r", *kit], ["try"]]
    monkeypatch.chdir(tmp_path)
    for args in calls:
        done = CliRunner().invoke(cli, ["federation", *args])
        assert isinstance(done.exception, SettingError), (args, done.output, done.exception)
        assert "pip install 'fedbilevel[federation]'" in str(done.exception)
