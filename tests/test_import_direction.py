"""Imports run one way through the rooms of the package.

Imports are read from the source, so lazy imports count too."""

import subprocess
import sys

import pytest

from website.imports import MODULES, ROOMS, imports, room
from website.walks import COMMANDS, walk

NEVER = {  # edges between rooms in the right direction that are wrong all the same
    ("tasks", "algorithms"),
    ("tasks", "federation"),
    ("engines", "algorithms"),
    ("engines", "tasks"),
    ("engines", "discovery"),
    ("peers", "sites"),
    ("data", "oracle"),
    ("runs", "algorithms"),
    ("sites", "algorithms"),
    ("peers", "algorithms"),
}


def edges() -> set[tuple[str, str]]:
    """(module, name that it imports), within the package."""
    return {
        (name, other)
        for name, path in MODULES.items()
        for other in imports(path)
        if other.split(".")[0] == "fedbilevel"
    }


def others(*names: str) -> dict[str, list[str]]:
    """By module: which of these outside packages it imports."""
    found = {
        name: sorted({other.split(".")[0] for other in imports(path)} & {*names}) for name, path in MODULES.items()
    }
    return {name: some for name, some in found.items() if some}


def test_the_reader_sees_plain_lazy_relative_and_dynamic_imports(tmp_path, monkeypatch):
    source = (
        "import os\nfrom . import engines\n"
        "def f():\n    from ..run import go\n    importlib.import_module('fedbilevel.cli')\n"
    )
    place = tmp_path / "fedbilevel" / "algorithms" / "new.py"
    place.parent.mkdir(parents=True)
    place.write_text(source)
    monkeypatch.setattr("website.imports.ROOT", tmp_path / "fedbilevel")
    assert imports(place) == {"os", "fedbilevel.algorithms.engines", "fedbilevel.run.go", "fedbilevel.cli"}


def test_rooms_are_entered_downwards_only():
    upwards = [(one, other) for one, other in edges() if ROOMS.index(room(other)) > ROOMS.index(room(one))]
    assert upwards == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_walks_through_the_rooms_in_one_direction(command):
    found = walk(COMMANDS[command])
    assert len(found) > 20
    assert [(one, other) for one, other in found if ROOMS.index(other) > ROOMS.index(one)] == []


def test_rooms_that_have_nothing_to_do_with_each_other():
    wrong = [
        (one, other)
        for one, other in edges()
        if (room(one), room(other)) in NEVER and not other.startswith("fedbilevel.discovery")
    ]
    assert wrong == []


def test_an_algorithm_knows_no_task_no_engine_and_no_run():
    wrong = [
        (one, other)
        for one, other in edges()
        if room(one) == "algorithms" and room(other) not in ("leaves", "problem", "oracle", "federation", "algorithms")
    ]
    assert wrong == []


def test_a_run_never_imports_sites_or_peers_and_nothing_imports_the_root():
    assert [(one, other) for one, other in edges() if room(one) == "runs" and room(other) in ("sites", "peers")] == []
    assert [
        (one, other)
        for one, other in edges()
        if room(other) == "root" and one not in ("fedbilevel", "fedbilevel.__main__")
    ] == []


def test_one_package_alone_imports_flare():
    assert all(name.startswith("fedbilevel.sites.flare") for name in others("nvflare", "psutil"))


def test_kits_and_secure_sums_alone_import_cryptography():
    rooms = ("fedbilevel.sites.flare", "fedbilevel.secure")
    assert all(name.startswith(rooms) for name in others("cryptography", "Crypto"))


def test_only_sockets_and_keys_of_peers_import_zeromq():
    assert set(others("zmq")) == {"fedbilevel.peers.sockets", "fedbilevel.peers.roster"}


def test_flare_and_zeromq_are_imported_only_where_they_are_used():
    code = (
        "import sys, fedbilevel.cli.main, fedbilevel.sites.serve, fedbilevel.sites.site, fedbilevel.peers.roster\n"
        "print([name for name in ('nvflare', 'grpc', 'zmq') if name in sys.modules])\n"
        "import fedbilevel.peers.sockets\nprint('zmq' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"]


def test_nothing_in_the_package_imports_tests():
    assert others("tests", "pytest", "hypothesis", "conftest", "yardstick") == {}
    assert not any(other.split(".")[0].startswith("test_") for path in MODULES.values() for other in imports(path))


def test_a_module_says_in_its_name_what_it_holds():
    vague = {"utils", "util", "base", "manager", "helpers", "helper", "common", "misc"}
    assert [name for name in MODULES if vague & {*name.split(".")}] == []


def test_the_package_was_found():
    assert {"fedbilevel.oracle.oracle", "fedbilevel.engines.simulation", "fedbilevel.problem.client_data"} <= {*MODULES}
    assert {room(name) for name in MODULES} == {*ROOMS}


HEAVY = (
    "torch._dynamo",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "networkx",
    "rich",
    "click",
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "plotly",
)


@pytest.mark.slow
def test_a_site_takes_part_in_a_run_without_what_takes_long_to_import(tmp_path):
    code = """
import json, sys
from pathlib import Path
from fedbilevel.sites import policy
from fedbilevel.sites.serve import serve
from fedbilevel.sites.site import Site
from fedbilevel.sites.transport import InProcess
from fedbilevel.sites.trial import prepare
place = Path(sys.argv[1])
plan, data = prepare(place / "data", ["north", "south"])
for name in data:
    (place / name).mkdir()
    (place / name / policy.FILE).write_text(f"data = {json.dumps(str(data[name]))}\\nauto_approve = true\\n")
(place / "server").mkdir()
sites = InProcess({name: Site(name, place / name).handle for name in data})
assert serve({**plan, "num_iterations": 1}, sites, place / "server", lambda line: None) == "finished"
print([name for name in sys.argv[2:] if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *HEAVY], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
