"""Files for the code host and for contributors.

The workflow calls targets that exist, on the Python versions that the package names, with few
rights. The contributing page names files and folders that exist.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from website.imports import ROOMS

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
WORKFLOW = yaml.safe_load((GITHUB / "workflows" / "test.yml").read_text())


def test_the_workflow_may_only_read_the_repository():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not [name for name, job in WORKFLOW["jobs"].items() if "permissions" in job]
    for job in WORKFLOW["jobs"].values():
        [checkout] = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert checkout["with"]["persist-credentials"] is False


def test_the_workflow_uses_official_actions_by_major_version():
    used = {step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step}
    assert used
    assert not [name for name in used if not re.fullmatch(r"actions/[a-z-]+@v\d+", name)]


def test_every_python_version_that_the_package_names_is_tested_with_and_without_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {found[1] for line in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", line))}
    for job in WORKFLOW["jobs"].values():
        versions = job["strategy"]["matrix"]["python"]
        assert all(isinstance(version, str) for version in versions)  # 3.10 as a number is 3.1
        assert named <= set(versions)


def test_the_workflow_calls_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in WORKFLOW["jobs"].items()}
    assert called == {"minimal": ["make smoke"], "full": ["make test"], "release": ["make test-all"]}
    assert {"smoke", "test", "test-all"} <= targets


def test_the_workflow_runs_all_tests_on_tags_of_versions_and_the_fast_tests_elsewhere():
    on = WORKFLOW[True]  # YAML 1.1 reads the key `on` as a boolean
    assert on["push"] == {"branches": ["main"], "tags": ["v*"]}
    assert "pull_request" in on
    tag = "startsWith(github.ref, 'refs/tags/')"
    conditions = {name: job.get("if") for name, job in WORKFLOW["jobs"].items()}
    assert conditions == {"minimal": None, "full": f"${{{{ !{tag} }}}}", "release": f"${{{{ {tag} }}}}"}


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_issue_forms_ask_something_that_must_be_answered(name):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in questions}) == len(questions)
    assert all(part["attributes"]["label"] for part in questions)
    assert any(part.get("validations", {}).get("required") for part in questions)


def test_the_newest_section_of_the_changelog_has_the_four_headings():
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    headings = {line.partition(":")[0] for line in re.findall(r"^### (.+)$", newest, re.MULTILINE)}
    assert headings - {"Before"} == {"Added", "Changed", "Fixed", "Numbers"}


def test_files_that_the_contributing_page_names_exist():
    named = set(re.findall(r"`((?:src|docs|tests|experiments)/[\w./-]+\.\w+|[A-Z_]+\.(?:md|cff))`", CONTRIBUTING))
    assert {"CODE_OF_CONDUCT.md", "CHANGELOG.md", "CITATION.cff", "src/fedbilevel/_version.py"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_tests_that_the_security_page_names_exist():
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) == 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_tree_of_the_contributing_page_lists_the_folders_in_the_order_of_imports():
    tree = re.search(r"```text\nsrc/fedbilevel/\n(.*?)\n\n", CONTRIBUTING, re.DOTALL)
    listed = re.findall(r"^  (\w+)(?:/|\.py) {2,}", tree[1], re.MULTILINE)
    assert listed == [name for name in ROOMS if name not in ("leaves", "root")]
    package = ROOT / "src" / "fedbilevel"
    assert {path.parent.name for path in package.glob("*/__init__.py")} <= set(listed)


def test_the_table_of_the_contributing_page_names_places_that_exist():
    table = re.findall(r"^\| an? .*$", CONTRIBUTING, re.MULTILINE)
    assert len(table) > 10
    named = {word for row in table for word in re.findall(r"`([^`\s]*/[^`\s]*)`", row)}
    places = {word.partition("<")[0].rpartition("/")[0] if "<" in word else word for word in named}
    wrong = [place for place in places if not any((root / place).exists() for root in (ROOT, ROOT / "src/fedbilevel"))]
    assert wrong == []


def test_no_two_files_of_tests_share_a_name():
    """Pytest imports test files by their names alone."""
    files = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in files if files.count(name) > 1}
