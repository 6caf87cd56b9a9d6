"""deploy/: docker starts the compose file, or its commands run as plain processes; systemd reads
the units."""

import configparser
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

import yaml
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.runs.record import Record
from fedbilevel.sites import policy
from fedbilevel.sites.flare import job, kits
from fedbilevel.sites.flare.local import free_port
from fedbilevel.sites.trial import prepare
from support.sites.real_loopback import HERE
from support.sites.reaper import processes_of, reaped

pytestmark = [pytest.mark.wait, pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "docker-compose.yml"
UNITS = sorted((DEPLOY / "systemd").iterdir())
LEAD, SITES = "lead@example.org", ["north", "south"]
RUN = """
name = "small"
num_iterations = 2
num_classes = 10

[task]
name = "data_cleaning"

[algorithm]
name = "fbo_aggitd"
num_lower_rounds = 1

[options]
batch_size = 64
"""


def services():
    return yaml.safe_load(COMPOSE.read_text())["services"]


def has_docker():
    if shutil.which("docker") is None:
        return False
    asked = [["docker", "info"], ["docker", "compose", "version"]]
    return all(subprocess.run(one, capture_output=True).returncode == 0 for one in asked)


def prepared(folder, host, port):
    """The folders that the compose file mounts, as its README makes them."""
    kits.init(folder / "federation.toml", sites=SITES, host=host, port=port)
    made = kits.provision(folder / "federation.toml", folder / "kits")
    prepare(folder / "data", SITES)
    for site in SITES:
        settings = made[site] / job.SITE / policy.FILE
        settings.write_text(settings.read_text().replace("auto_approve = false", "auto_approve = true"))
    (folder / "runs").mkdir()
    (folder / "runs" / "run.toml").write_text(RUN)
    return made


class Plain:
    """The services of the compose file as processes of this machine, with their volumes where
    `folder` has them."""

    def __init__(self, folder):
        self.folder, self.started, self.ports = folder, {}, {name: str(free_port()) for name in services()}

    def here(self, name, words):
        """The same words with paths of this machine and a port of this service's own."""
        volumes = [volume.removesuffix(":ro").rsplit(":", 1) for volume in services()[name]["volumes"]]
        places = {target: str(self.folder / source) for source, target in volumes}
        found = []
        for word in words:
            target = next((one for one in places if word == one or word.startswith(f"{one}/")), "")
            found.append(places.get(target, "") + word.removeprefix(target).replace("9400", self.ports[name]))
        return found

    def start(self, name):
        command = [sys.executable, "-m", "fedbilevel", *self.here(name, services()[name]["command"])]
        options = {"cwd": self.folder, "env": {**os.environ, **HERE}, "start_new_session": True}
        with (self.folder / f"{name}.txt").open("wb") as said:
            self.started[name] = subprocess.Popen(command, stdout=said, stderr=said, **options)

    def is_healthy(self, name):
        kind, *words = services()[name]["healthcheck"]["test"]
        assert kind == "CMD"
        assert words[0] == "python"
        return subprocess.run([sys.executable, *self.here(name, words[1:])], capture_output=True).returncode == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        for one in self.started.values():
            one.send_signal(signal.SIGTERM)
        for one in self.started.values():
            one.wait(60)


def played_plain(folder):
    made = prepared(folder, "localhost", free_port())
    with reaped(folder), Plain(folder) as plain:
        for name, service in services().items():
            if "profiles" not in service:
                for other in service.get("depends_on", {}):
                    until(lambda other=other: plain.is_healthy(other), folder)
                plain.start(name)
        for name in plain.started:
            until(lambda name=name: plain.is_healthy(name), folder)
        plain.start("lead")
        assert plain.started["lead"].wait(300) == 0, texts(folder)
        assert {name for name, one in plain.started.items() if one.poll() is None} == {"server", *SITES}
        os.killpg(plain.started["north"].pid, signal.SIGSTOP)  # the health check is one: it does not pass by itself
        assert not plain.is_healthy("north")
        os.killpg(plain.started["north"].pid, signal.SIGCONT)
        plain.stop()
        assert processes_of(folder) == []
    return made


def played_docker(folder):
    """As the README says, with the folders of the test in place of those beside the compose file."""
    made = prepared(folder, "server", 8002)
    shutil.copy(COMPOSE, folder / "docker-compose.yml")
    environment = {**os.environ, "FEDBILEVEL_USER": f"{os.getuid()}:{os.getgid()}"}
    compose = ["docker", "compose", "--project-name", folder.name.lower(), "--file", str(folder / "docker-compose.yml")]

    def docker(*words):
        done = subprocess.run([*compose, *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    build = ["docker", "build", "-f", "deploy/Dockerfile", "-t", "fedbilevel", "."]
    subprocess.run(build, cwd=DEPLOY.parent, check=True)
    try:
        docker("up", "--detach", "--no-build", "--wait")
        docker("run", "--rm", "lead")
    finally:
        docker("down", "--volumes")
    return made


def until(condition, folder, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, texts(folder)
        time.sleep(0.2)


def texts(folder):
    return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')}" for path in folder.glob("*.txt"))


def test_the_services_of_the_compose_file_make_a_run(tmp_path):
    made = (played_docker if has_docker() else played_plain)(tmp_path)
    record = Record(made["server"] / job.RUNS / "small")
    assert [row["iteration"] for row in record.rows()][-1] == 2
    assert (made["north"] / job.SITE / "left.jsonl").read_text()


def test_containers_have_no_more_rights_than_they_need():
    assert set(services()) == {"server", *SITES, "lead"}
    for name, service in services().items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].endswith(":0")
        if "profiles" not in service:
            assert service["restart"] == "unless-stopped"
        if name in SITES:
            assert "ports" not in service
            assert service["volumes"] == [f"./kits/{name}:/kit", f"./data/{name}:/data:ro"]


def test_the_image_has_what_the_package_is_built_from(tmp_path):
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert lines.index("USER fedbilevel") < lines.index('ENTRYPOINT ["fedbilevel"]')
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    for name in copied:
        place = DEPLOY.parent / name
        (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    assert len(list((tmp_path / "dist").glob("fedbilevel-*.whl"))) == 1
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied


def unit(path):
    """Sections of a unit; keys may stand there several times, but none of ours does."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(path.read_text())
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_an_existing_command_and_is_confined_to_its_kit(path):
    service = unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/fedbilevel")
    command = [word for word in words if not word.startswith(("/", "-", "$")) and not word.isdigit()]
    shown = CliRunner().invoke(cli, [*command, "--help"])
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in words if word.startswith("--"))
    kit = next(word for word in words if word.startswith("/"))
    assert service["ReadWritePaths"] == kit
    assert (service["NoNewPrivileges"], service["ProtectSystem"], service["Restart"]) == ("yes", "strict", "on-failure")
    assert service["MemoryMax"]
    assert service["User"] != "root"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_finds_no_fault_in_a_unit(path, tmp_path):
    program = shlex.split(unit(path)["Service"]["ExecStart"])[0]
    (tmp_path / path.name).write_text(path.read_text().replace(program, "/bin/true"))
    for name, has_fault in ((path.name.replace("@.", "@north."), False), ("faulty.service", True)):
        if has_fault:  # that it would be found
            (tmp_path / name).write_text((tmp_path / path.name).read_text().replace("MemoryMax=", "MemoryMost="))
        done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True)
        assert (str(tmp_path) in done.stderr) == has_fault, done.stderr
