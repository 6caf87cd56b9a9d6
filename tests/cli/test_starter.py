"""`fedbilevel new`: the new project is clean, its script and its tests run, and its task is found.

The task is found through the entry points that an installer would write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedbilevel
from fedbilevel import discovery
from fedbilevel.cli import starter
from fedbilevel.cli.main import cli
from fedbilevel.errors import SettingError
from fedbilevel.tasks.task import Shapes

SOURCE = str(Path(fedbilevel.__file__).parents[1])


def typed(*words, folder):
    """What Python says in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(project, site):
    """Write the files of `pip install -e`: an importable module and its entry points.

    Both are read from the project's own pyproject.toml."""
    content = tomllib.loads((project / "pyproject.toml").read_text())
    info = site / f"{content['project']['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {content['project']['name']}\nVersion: {content['project']['version']}\n"
    )
    groups = content["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in own.items()) for group, own in groups.items())
    )
    (module,) = content["tool"]["setuptools"]["py-modules"]
    (site / f"{module}.py").symlink_to(project / f"{module}.py")
    return site


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    done = CliRunner().invoke(cli, ["new", str(folder / "soil-moisture")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "python soil_moisture.py" in done.output
    return folder / "soil-moisture"


def test_all_files_are_there_and_no_word_of_a_template_is_left(project):
    assert sorted(path.name for path in project.iterdir()) == [
        "README.md",
        "pyproject.toml",
        "run.toml",
        "soil_moisture.py",
        "test_soil_moisture.py",
    ]
    assert not any("$" in path.read_text() for path in project.iterdir())
    assert {
        path.name.removesuffix(".template") for path in (Path(starter.__file__).parent / "starter_files").iterdir()
    } == set(starter.FILES)


def test_it_is_clean(project):
    subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=project, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "."], cwd=project, check=True)


@pytest.mark.slow
def test_its_script_and_its_own_tests_run_without_installing_anything(project):
    """One after the other in a process of their own, which imports torch once."""
    script = "import runpy; runpy.run_path('soil_moisture.py', run_name='__main__')"
    tests = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-W', 'error']))"
    said = typed("-c", f"{script}\n{tests}", folder=project)
    assert "Verdict: all 5 checks passed" in said
    fixed, learnt = (float(line.split()[-1]) for line in said.splitlines() if "test error" in line)
    assert learnt < 1.02 * fixed  # with twelve validation samples per site, learning hardly changes the error
    assert "4 passed" in said


@pytest.fixture
def found(project, tmp_path, monkeypatch):
    """Its task, found by its entry point."""
    assert "soil_moisture" not in discovery.tasks()
    monkeypatch.syspath_prepend(installed(project, tmp_path / "site"))
    yield discovery.task("soil_moisture")
    sys.modules.pop("soil_moisture", None)


def test_its_run_runs_under_its_name(found, project, tmp_path):
    assert found.name() in discovery.tasks()
    words = ["run", "--config", str(project / "run.toml"), "--num-iterations", "3", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["task"] == "soil_moisture"
    assert config["identity"]["algorithm"] == "self_tuned"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 3
    assert "test_error" in rows[-1]


def test_what_it_writes_are_values_that_exist(found, project):
    """Settings in run.toml and those suggested are settings of the task and of algorithms."""
    kind = found
    written = tomllib.loads((project / "run.toml").read_text())
    assert set(written["task"]) <= {"name", *kind.__dataclass_fields__}
    assert "algorithm" not in written
    assert set(kind.suggested) - {"*"} <= set(discovery.algorithms())
    for name in ("fedbio", "fbo_aggitd", "fednest", "fedavg"):
        fields = discovery.algorithm(name).__dataclass_fields__
        discovery.algorithm(name)(**{key: value for key, value in kind.suggestions(name).items() if key in fields})
    built = kind(num_clients=2, num_features=3).build()
    assert kind().problem(Shapes.of(built.clients[0])).x0["x"].shape == (3,)
    sys.modules.pop("soil_moisture", None)


def test_an_empty_folder_is_taken_and_a_path_may_lead_to_it(tmp_path, monkeypatch):
    (tmp_path / "deep" / "tide_2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "tide_2")
    files = starter.new(".")
    assert {path.name for path in files} >= {"tide_2.py", "test_tide_2.py"}
    assert "class Tide2(Task):" in Path("tide_2.py").read_text()


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "2fast",
            "would be the Python module '2fast', which Python cannot import: name it with letters, digits, - and _",
        ),
        ("soil moisture", "'soil moisture', which Python cannot import"),
        ("größe", "'größe', which Python cannot import"),
        ("class", "'class', which Python cannot import"),
        ("-", "'_', which Python cannot import"),
        ("data-cleaning", "'data_cleaning', and 'data_cleaning' is a task of fedbilevel's own: choose another name"),
        ("json", "'json', and there is one already"),
        ("torch", "'torch', and there is one already"),
    ],
)
def test_names_that_cannot_be(tmp_path, name, words):
    with pytest.raises(SettingError) as caught:
        starter.new(tmp_path / name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "tide").mkdir()
    (tmp_path / "tide" / "notes.txt").write_text("mine")
    with pytest.raises(SettingError, match="tide is not empty: name a new one"):
        starter.new(tmp_path / "tide")
    assert [path.name for path in (tmp_path / "tide").iterdir()] == ["notes.txt"]
    (tmp_path / "surge").write_text("mine")
    with pytest.raises(SettingError, match=r"cannot be written into \S+surge \(.+\): name another folder"):
        starter.new(tmp_path / "surge")
    assert (tmp_path / "surge").read_text() == "mine"
