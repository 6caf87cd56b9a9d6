"""The page as a file: no text of a record becomes markup or code, and the page requests nothing."""

import ast
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedbilevel.report
from fedbilevel.cli.main import cli
from fedbilevel.errors import ReportError, SettingError
from fedbilevel.report import page as writing
from fedbilevel.report import page_data, write_report
from support.browser.pages import elements
from support.browser.records import (
    HOSTILE,
    hostile,
    write_run,
)


def test_no_word_of_a_record_becomes_markup_or_code(tmp_path):
    plain = elements(write_report(write_run(tmp_path / "tame"), tmp_path / "tame.html").read_text())
    page = write_report(hostile(tmp_path), title=HOSTILE).read_text()
    found = elements(page)
    assert [tag for tag, _ in found.found] == [tag for tag, _ in plain.found]
    assert len(found.scripts) == 3
    data = json.loads(found.scripts[0])
    assert data["title"] == data["runs"][0]["algorithm"] == HOSTILE
    assert data["runs"][0]["findings"][0]["groups"][0]["name"] == HOSTILE
    assert not re.search("[<>&]", found.scripts[0])


def test_the_page_may_run_its_own_scripts_and_ask_for_nothing(tmp_path):
    page = write_report(write_run(tmp_path / "run")).read_text()
    found = elements(page)
    (policy,) = [
        attributes["content"]
        for tag, attributes in found.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in found.scripts[1:]
    ]
    assert rules["script-src"].split() == hashes
    assert rules["img-src"] == "data: blob:"
    addresses = [
        value
        for _, attributes in found.found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data")
    ]
    assert addresses == ["data:,"]
    first = page.index("Content-Security-Policy")
    assert first < page.index("<style>") < page.index("<script")  # it holds from the start
    assert "connect-src 'self'" in writing.policy(live=True)


def test_the_parts_of_the_page_are_found_where_the_package_is():
    assert {path.name for path in Path(fedbilevel.report.__file__).parent.iterdir()} >= {
        "page.html",
        "page.css",
        *(f"page_{name}.js" for name in writing.SCRIPTS),
    }


@pytest.mark.parametrize(
    "path",
    # tables are for terminals
    sorted(p for p in Path(fedbilevel.report.__file__).parent.glob("*.py") if not p.name.endswith("tables.py")),
    ids=lambda path: path.name,
)
def test_pages_need_no_torch(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    ours = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    ours -= {"fedbilevel.report.watch", "fedbilevel.sites", "fedbilevel.sites.view"}  # by the page of a site's operator
    light = {"fedbilevel._version", "fedbilevel.errors", "fedbilevel.escapes", "fedbilevel.columns"}
    pages = {f"fedbilevel.report.{path.stem}" for path in Path(fedbilevel.report.__file__).parent.glob("*.py")}
    assert ours <= {*light, "fedbilevel.report", *pages, "plotly.offline"} - {
        "fedbilevel.report.tables",
        "fedbilevel.report.cleaning_tables",
    }


def test_the_command_prints_where_the_page_is(tmp_path):
    folder = write_run(tmp_path / "run")
    done = CliRunner().invoke(
        cli, ["report", str(folder), "--target", "f1=0.3", "--title", "My <run>"], catch_exceptions=False
    )
    assert (done.exit_code, done.output.strip()) == (0, str(folder / "report.html"))
    page = elements((folder / "report.html").read_text())
    assert json.loads(page.scripts[0])["target"] == {"metric": "f1", "value": 0.3}
    assert "<title>My &lt;run&gt;</title>" in (folder / "report.html").read_text()
    done = CliRunner().invoke(
        cli, ["report", str(folder), "--out", str(tmp_path / "new" / "page.html")], catch_exceptions=False
    )
    assert done.output.strip() == str(tmp_path / "new" / "page.html")
    assert isinstance(CliRunner().invoke(cli, ["report", str(tmp_path / "none")]).exception, ReportError)
    assert isinstance(CliRunner().invoke(cli, ["report", str(folder), "--target", "f1"]).exception, SettingError)


def test_a_run_from_the_command_line_has_a_whole_page(tmp_path):
    flags = [
        "run",
        "data_cleaning",
        "-a",
        "fedbio",
        "--num-clients",
        "3",
        "--num-iterations",
        "4",
        "--measure-every",
        "1",
    ]
    assert CliRunner().invoke(cli, [*flags, "--out", str(tmp_path / "run")], catch_exceptions=False).exit_code == 0
    found = page_data.read([tmp_path / "run"])
    [run] = found["runs"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run["columns"]["test_accuracy"] == [row["test_accuracy"] for row in rows]
    assert found["diagnostics"] == ["residual", "lower_gradient"]
    assert run["config"]["kind"] == "run.toml"
    for name in ("rounds", "bytes_up", "gy", "hvp"):
        assert sum(phase[name] for phase in run["ledger"]["phases"].values()) == rows[-1][name]
    sizes = found["partitions"][0]["clients"]["sizes"]["train"]
    assert [
        sum(column) for column in zip(*found["partitions"][0]["clients"]["labels"]["train"]["counts"], strict=True)
    ] == sizes
    assert run["state"] == "finished"
    write_report(tmp_path / "run")


def test_a_page_is_never_written_over_a_file_of_a_record(tmp_path):
    run = write_run(tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ReportError, match=r"expected a name that ends in \.html"):
        write_report([run], run / "metrics.jsonl")
    assert (run / "metrics.jsonl").read_bytes() == before
