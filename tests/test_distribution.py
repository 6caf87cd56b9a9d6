"""The wheel is complete: it is built, installed elsewhere, and prints the demo of the home page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedbilevel
from fedbilevel.cli.commands import places
from support.docs import check_quoted
from website import quotes

pytestmark = [pytest.mark.wait, pytest.mark.slow]

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of the installed wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    [wheel] = folder.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--target", folder / "there", wheel], check=True, capture_output=True, timeout=120)
    return folder / "there"


@pytest.fixture(scope="module")
def there(installed, tmp_path_factory):
    """Commands of the installed package, in an empty folder."""
    cwd = tmp_path_factory.mktemp("empty")

    def run(*args):
        environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", "COLUMNS": "140"}
        done = subprocess.run(
            [sys.executable, "-m", "fedbilevel", *args],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = cwd
    return run


def test_nothing_is_left_out_of_the_wheel(installed):
    """Every file of the package and every experiment, and nothing else but its description."""
    package = ROOT / "src" / "fedbilevel"
    tracked = subprocess.run(
        ["git", "ls-files", "src/fedbilevel", "experiments"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    wanted = {"fedbilevel/" + name.removeprefix("src/fedbilevel/") for name in tracked if name}
    found = {
        str(path.relative_to(installed))
        for path in installed.rglob("*")
        if path.is_file() and ".dist-info" not in str(path)
    }
    assert package.is_dir()
    assert wanted <= found
    assert not [name for name in found - wanted if name.startswith("fedbilevel/") and "__pycache__" not in name]


def test_the_wheel_says_what_it_is(installed, there):
    [about] = installed.glob("fedbilevel-*.dist-info/METADATA")
    text = about.read_text()
    assert f"\nVersion: {fedbilevel.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert there("--version").strip() == f"fedbilevel, version {fedbilevel.__version__}"


def test_the_wheel_needs_scikit_learn_for_extras_only(installed):
    [about] = installed.glob("fedbilevel-*.dist-info/METADATA")
    needs = re.findall(r"^Requires-Dist: scikit-learn(.*)$", about.read_text(), re.MULTILINE)
    assert {re.sub(r".*; extra == '(\w+)'$", r"\1", line) for line in needs} == {"all", "dev", "libsvm", "reference"}
    assert (installed / "fedbilevel" / "data" / "sets" / "digits.npz").stat().st_size < 50_000


def test_the_version_is_written_in_one_place_of_the_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    place = ROOT / project["tool"]["hatch"]["version"]["path"]
    assigned = [
        path for path in (ROOT / "src").rglob("*.py") if re.search(r"^__version__\s*=", path.read_text(), re.MULTILINE)
    ]
    assert assigned == [place]


def test_the_demo_of_the_wheel_is_that_of_the_home_page(there):
    """The demo of the wheel prints what the home page quotes, up to rounding."""
    said = there("demo", "--out", "runs/demo")
    assert (there.folder / "runs" / "demo" / "report.html").stat().st_size > 100_000
    [quoted] = [one for one in quotes.quoted() if one.page == "index.md"]
    assert quoted.code == "fedbilevel demo --out runs/demo\n"
    check_quoted(quoted.text, said)


def test_experiments_come_with_the_wheel(there):
    assert "aggitd-table2" in there("reproduce")


def test_a_wheel_can_be_read_by_anybody(installed):
    [wheel] = installed.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert not [name for name in archive.namelist() if name.startswith("/") or ".." in name]


def test_the_readme_is_short_and_shows_the_demo_and_an_example():
    """What its blocks print is compared with its quotations among the pages of the documentation."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 86
    demo, example = [one for one in quotes.quoted() if one.page == "../README.md"]
    assert demo.code == "fedbilevel demo --out runs/demo\n"
    assert len(example.code.splitlines()) <= 13
    learned, plain = (float(found) for found in re.findall(r"(\d\.\d+) with", example.text))
    assert learned > plain
    for line in re.findall(r"^    fedbilevel (\S+)", text, re.MULTILINE):
        assert line in places(), line
