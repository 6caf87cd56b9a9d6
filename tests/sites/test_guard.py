"""The guard in front of FLARE's own channels, as a table: which messages pass, and which jobs are
admitted."""

import json
import shutil

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from fedbilevel.sites.flare import configuration, guard, jobs, kits

JOB = "32a4a932-10c0-4cbb-958a-c14840b3f356"
PLAN = {"name": "cleaning", "sites": ["north", "west"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    kits.init(folder / "federation.toml", sites=["north", "west"])
    return kits.provision(folder / "federation.toml", folder / "kits")


@pytest.mark.parametrize(
    ("me", "origin", "destination", "shown", "passes"),
    [
        ("server", f"west.{JOB}", f"server.{JOB}", "west", True),
        ("server", "west", "server", "west", True),
        ("server", f"server.{JOB}", f"west.{JOB}", None, True),
        ("server", f"west.{JOB}", "north", "west", False),  # from site to site
        ("server", f"server.{JOB}", "north", "west", False),  # under the server's name
        ("server", f"north.{JOB}", "server", "west", False),  # under another site's name
        ("server", "westward", "server", "west", False),
        ("server", "admin-1", "server", "lead@example.org", True),
        ("server", "server", "server", "lead@example.org", False),
        ("server", "admin-1", "north", "lead@example.org", False),
        ("north", "server", "north", "localhost", True),
        ("north", f"north.{JOB}", "north", None, True),
        ("north", f"west.{JOB}", "north", "localhost", False),  # also where a server passes it on
    ],
)
def test_messages_pass_by_certificate_and_direction(me, origin, destination, shown, passes):
    assert (guard.why_not_forwarded(me, origin, destination, shown) == "") == passes


@pytest.mark.parametrize(
    ("origin", "command", "job", "obeys"),
    [
        ("server", "train.deploy", JOB, True),
        ("server", "scheduler.check_resource", "", True),
        ("server", "sys.shell", "", False),
        ("server", "train.delete_run", JOB, False),
        ("server", "train.deploy", "site", False),  # FLARE makes it a folder of the kit
        ("server", "train.deploy", "../x", False),
        (f"server.{JOB}", "train.deploy", JOB, False),
        (f"west.{JOB}", "train.deploy", JOB, False),
        ("west", "train.notify_job_status", JOB, False),
        (f"north.{JOB}", "train.notify_job_status", JOB, True),
        (f"north.{JOB}", "sys.shell", "", False),
        ("server", "", "", False),
    ],
)
def test_a_site_obeys_its_server_in_what_a_run_needs(origin, command, job, obeys):
    assert (guard.why_not_commanded("north", origin, command, job) == "") == obeys


@pytest.mark.parametrize(
    ("me", "origin", "channel", "answers"),
    [
        (f"north.{JOB}", "north", "client_command", True),
        (f"north.{JOB}", f"server.{JOB}", "client_command", False),
        (f"north.{JOB}", f"west.{JOB}", "collab", False),
        (f"north.{JOB}", f"server.{JOB}", "collab", True),
        (f"server.{JOB}", "server", "server_command", True),
        (f"server.{JOB}", f"west.{JOB}", "server_command", False),
        ("server", f"west.{JOB}", "server_parent_listener", False),
        ("server", "west", "task", True),
        ("server", "admin-1", "hci_channel", True),
        ("north", "server", "hci_channel", False),
        ("north", "server", "multi_process_executor", False),
    ],
)
def test_channels_of_commands_belong_to_a_process_and_its_parent(me, origin, channel, answers):
    assert (guard.why_not_accepted(me, origin, channel) == "") == answers


def test_a_stream_is_judged_by_the_channel_that_it_carries():
    assert guard.why_not_accepted("north", "server", "admin", streamed=True)
    assert guard.why_not_accepted(f"server.{JOB}", f"west.{JOB}", "server_command", "app_command", streamed=True)
    assert guard.why_not_accepted(f"north.{JOB}", f"server.{JOB}", "collab", streamed=True) == ""
    assert guard.why_not_accepted(f"server.{JOB}", f"west.{JOB}", "server_command", "get_task", streamed=True) == ""


def job_of(tmp_path, kit, plan=PLAN, **more):
    packed = configuration.packed(plan)
    return jobs.job_folder(tmp_path, plan, seal=configuration.sealed(kit, packed), **more)


def test_the_jobs_of_submit_are_admitted(made, tmp_path, monkeypatch):
    folder = job_of(tmp_path, made["lead@example.org"])
    for kit, part in (("north", "at_site"), ("server", "at_server")):
        (folder / part / ".__nvfl_sig.json").write_text("{}")
        monkeypatch.chdir(made[kit])
        assert guard.Validator().validate(str(folder / part)) == ("", {})


def changed(folder, change):
    place = folder / "at_site/config/config_fed_client.json"
    place.write_text(json.dumps(change(json.loads(place.read_text()))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda content: {
                **content,
                "components": [*content["components"], {"id": "x", "path": "os.system", "args": {}}],
            },
            "cannot be read",
        ),
        (lambda content: {**content, "task_data_filters": [{"path": "x"}]}, "its configuration is another one"),
        (
            lambda content: {**content, "components": [{**content["components"][0], "path": "os.system"}]},
            "it names os.system",
        ),
        (
            lambda content: {
                **content,
                "components": [{**content["components"][0], "args": {"plan": configuration.packed({"name": "b"})}}],
            },
            "cannot be read",
        ),
        (lambda content: [], "cannot be read"),
    ],
)
def test_attack_by_another_configuration_is_refused(made, tmp_path, monkeypatch, change, says):
    folder = job_of(tmp_path, made["lead@example.org"])
    changed(folder, change)
    monkeypatch.chdir(made["north"])
    assert says in guard.Validator().validate(str(folder / "at_site"))[0]


def test_attack_by_a_plan_that_no_lead_signed_or_by_more_files_is_refused(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made["north"])
    for kit in ("server", "west"):
        assert "PolicyError" in guard.Validator().validate(str(job_of(tmp_path / kit, made[kit]) / "at_site"))[0]
    folder = job_of(tmp_path, made["lead@example.org"])
    (folder / "at_site/config/evil.py").write_text("import os\n")
    assert (
        "it holds config/config_fed_client.json, config/evil.py"
        in guard.Validator().validate(str(folder / "at_site"))[0]
    )
    assert "it holds nothing" in guard.Validator().validate(str(tmp_path / "empty"))[0]


def test_a_kit_without_the_guard_is_not_started(made, tmp_path):
    from fedbilevel.errors import SettingError
    from fedbilevel.sites.flare.processes import Supervised

    kit = tmp_path / "north"
    shutil.copytree(made["north"], kit)
    Supervised(kit)
    place = kit / "local/resources.json"
    content = json.loads(place.read_text())
    for other in (
        {**content, "components": content["components"][1:]},
        {name: value for name, value in content.items() if name != "app_validator"},
    ):
        place.write_text(json.dumps(other))
        with pytest.raises(SettingError, match=r"has no guard in local/resources\.json.*make it anew"):
            Supervised(kit)
