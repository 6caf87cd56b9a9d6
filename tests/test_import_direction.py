"""Imports run one way: problem -> oracle -> algorithm -> engine -> run. Read from the source, so that lazy imports count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel

ROOT = Path(fedbilevel.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
FRONT = ("engines", "loop", "cli")  # what starts and drives computations


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Dotted names of everything imported anywhere in the file, `from a import b` as a.b, relative imports made absolute."""
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)}
    return found


def reaches(path: Path, *parts: str) -> list[str]:
    """Imports of `path` that lie in one of the named parts of the package."""
    return sorted(name for name in imports(path) if any(f"{name}.".startswith(f"fedbilevel.{part}.") for part in parts))


def below(*parts: str) -> list[Path]:
    return [path for path in MODULES if any(f"{dotted(path)}.".startswith(f"fedbilevel.{part}.") for part in parts)]


def test_the_reader_sees_plain_lazy_relative_and_dynamic_imports(tmp_path, monkeypatch):
    source = "import os\nfrom . import engines\ndef f():\n    from ..run import go\n    importlib.import_module('fedbilevel.cli')\n"
    place = tmp_path / "fedbilevel" / "algorithms" / "new.py"
    place.parent.mkdir(parents=True)
    place.write_text(source)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path / "fedbilevel")
    assert imports(place) == {"os", "fedbilevel.algorithms.engines", "fedbilevel.run.go", "fedbilevel.cli"}
    assert reaches(place, "run", "cli") == ["fedbilevel.cli", "fedbilevel.run.go"]


@pytest.mark.parametrize("path", below("algorithms"), ids=dotted)
def test_an_algorithm_knows_no_engine_no_loop_and_no_task(path):
    assert reaches(path, *FRONT, "tasks", "record", "report", "discovery") == []


@pytest.mark.parametrize("path", below("engines"), ids=dotted)
def test_an_engine_names_no_algorithm_and_no_task(path):
    assert reaches(path, "algorithms", "tasks", "discovery", "loop", "cli") == []


@pytest.mark.parametrize("path", below("engines"), ids=dotted)
def test_an_engine_knows_messages_but_no_site_no_plan_and_no_flare(path):
    assert reaches(path, "flare", "sites.site", "sites.serve", "sites.plan", "sites.policy", "sites.trial") == []


@pytest.mark.parametrize("path", below("algorithms", "tasks", "oracle", "problem", "data", "clients", "federation"), ids=dotted)
def test_what_is_computed_knows_nothing_of_messages(path):
    assert reaches(path, "sites", "flare") == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_one_package_alone_imports_flare_itself(path):
    if not f"{dotted(path)}.".startswith("fedbilevel.flare."):
        assert {name.split(".")[0] for name in imports(path)}.isdisjoint({"nvflare", "psutil"})


def test_flare_is_imported_only_by_those_who_use_it():
    code = "import sys, fedbilevel.cli, fedbilevel.sites.serve, fedbilevel.sites.site; print([name for name in ('nvflare', 'grpc') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_sockets_and_keys_of_peers_import_zeromq(path):
    if dotted(path) not in ("fedbilevel.peers.sockets", "fedbilevel.peers.roster"):
        assert "zmq" not in {name.split(".")[0] for name in imports(path)}


def test_zeromq_is_imported_only_by_those_who_use_it():
    code = "import sys, fedbilevel.cli, fedbilevel.peers.roster; print('zmq' in sys.modules); import fedbilevel.peers.sockets; print('zmq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("path", below("oracle", "problem", "population", "hypergradient", "data", "draws", "settings", "errors", "ledger"), ids=dotted)
def test_mathematics_and_data_know_nothing_of_a_federation(path):
    assert reaches(path, *FRONT, "federation", "clients", "algorithms", "tasks", "discovery") == []


@pytest.mark.parametrize("path", below("data"), ids=dotted)
def test_data_know_no_problem(path):
    assert reaches(path, "problem", "oracle", "population", "hypergradient") == []


@pytest.mark.parametrize("path", below("problem"), ids=dotted)
def test_a_problem_knows_no_oracle(path):
    assert reaches(path, "oracle", "population", "hypergradient") == []


@pytest.mark.parametrize("path", below("federation", "clients"), ids=dotted)
def test_verbs_and_clients_know_no_engine_and_no_algorithm(path):
    assert reaches(path, *FRONT, "algorithms", "tasks", "discovery") == []


@pytest.mark.parametrize("path", below("tasks"), ids=dotted)
def test_a_task_knows_no_algorithm_and_no_engine(path):
    assert reaches(path, *FRONT, "algorithms", "clients", "federation", "discovery") == []


def from_the_root(path: Path) -> list[str]:
    """Imports of `path` that need a complete package root: `fedbilevel` itself, and names that only the root defines."""
    inside = {part.stem for part in ROOT.iterdir()} - {"__init__"}
    found = [name.split(".") for name in imports(path)]
    return sorted(".".join(parts) for parts in found if parts[0] == "fedbilevel" and (len(parts) == 1 or parts[1] not in inside))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import fedbilevel", ["fedbilevel"]),
        ("import fedbilevel as fb", ["fedbilevel"]),
        ("importlib.import_module('fedbilevel')", ["fedbilevel"]),
        ("from fedbilevel import __version__", ["fedbilevel.__version__"]),
        ("from .. import __version__", ["fedbilevel.__version__"]),
        ("from fedbilevel import solve", ["fedbilevel.solve"]),
        ("from fedbilevel import discovery", []),
        ("from fedbilevel._version import __version__", []),
        ("import fedbilevel.errors", []),
    ],
)
def test_imports_of_the_package_root_are_found_in_every_spelling(tmp_path, monkeypatch, line, found):
    place = tmp_path / "fedbilevel" / "sites" / "new.py"
    place.parent.mkdir(parents=True)
    for name in ("_version", "discovery", "errors"):
        (tmp_path / "fedbilevel" / f"{name}.py").touch()
    place.write_text(line)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path / "fedbilevel")
    assert from_the_root(place) == found


def test_nothing_in_the_package_imports_the_package_root_for_the_version():
    others = [path for path in MODULES if path not in (ROOT / "__init__.py", ROOT / "__main__.py")]
    assert {dotted(path): found for path in others if (found := from_the_root(path))} == {}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_nothing_in_the_package_imports_tests(path):
    first = {name.split(".")[0] for name in imports(path)}
    assert first.isdisjoint({"tests", "pytest", "hypothesis", "conftest", "yardstick"})
    assert not any(name.startswith("test_") for name in first)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_says_in_its_name_what_it_holds(path):
    vague = {"utils", "util", "base", "manager", "helpers", "helper", "common", "misc"}
    assert vague.isdisjoint(dotted(path).split("."))


def test_the_package_was_found():
    assert {"fedbilevel.oracle", "fedbilevel.engines.simulation", "fedbilevel.data.clients"} <= {dotted(path) for path in MODULES}
    assert below("algorithms")
    assert below("engines")


HEAVY = ("torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes", "networkx", "rich", "click", "sklearn", "scipy", "pandas", "matplotlib", "plotly")


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
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), *HEAVY], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
