"""The tutorials in docs/tutorials run block after block and print the output on the page."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from support.docs import Block, blocks, check_quoted

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'fedbilevel[plot]'")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'fedbilevel[parquet]'")

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
PAGES = ("tensors.md", "modules.md", "folders.md")


def typed(text: str) -> str:
    """Commands of fedbilevel, in this process."""
    said = ""
    for line in text.splitlines():
        program, *words = shlex.split(line)
        assert program == "fedbilevel", line
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        said += done.stdout
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_page_says_what_comes_out(name, tmp_path, monkeypatch):
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    page = (FOLDER / name).read_text()
    found, names = blocks(page), {"__name__": "notebook"}
    assert page.count("```") == 2 * len(found), "a block was not understood"
    for number, (block, after) in enumerate(zip(found, [*found[1:], Block("", "", "")], strict=True)):
        if block.language == "text":
            assert block.text.strip(), "a quotation is empty"
            continue
        said = io.StringIO()
        with redirect_stdout(said):
            if block.language == "python":
                exec(compile(block.text, f"block {number} of {name}", "exec"), names)
            else:
                assert block.language == "bash"
                print(typed(block.text), end="")
        if after.language == "text":
            check_quoted(after.text, said.getvalue())
        else:
            assert said.getvalue() == "", f"the page does not say what this prints:\n{block.text}"
    assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_what_a_reader_has_to_know(name):
    page = (FOLDER / name).read_text()
    for word in (
        "fb.check_hypergradient(",
        "fb.solve(",
        ".history",
        ".ledger",
        ".plot(",
        "record=",
        "fedbilevel report",
    ):
        assert word in page, word
    assert (
        len(
            set(re.findall(r'^    "(\w+)": ', page, re.MULTILINE))
            & {"fedavg", "fedbio", "fedbioacc", "fednest", "fbo_aggitd"}
        )
        == 3
    )
    code = [
        [line for line in block.text.splitlines() if line.strip()]
        for block in blocks(page)
        if block.language == "python"
    ]
    assert max(len(line) for lines in code for line in lines) <= 130
    assert max(map(len, code)) <= 30, "it says 30 lines in the title"


def test_all_tutorials_are_run():
    assert {path.name for path in FOLDER.glob("*.md")} == set(PAGES)
