"""Start of the command line: help, lists and errors of spelling load no torch, and name everything."""

import inspect
import subprocess
import sys

import click
import pytest

from fedbilevel import catalogue, discovery
from fedbilevel.cli.commands import places
from fedbilevel.cli.flags import first_line
from fedbilevel.cli.main import cli


@pytest.mark.parametrize("kind", ["algorithms", "detectors", "tasks"])
def test_the_catalogue_says_what_the_classes_say(kind):
    found = {name: first_line(one) for name, one in getattr(discovery, kind)().items()}
    assert catalogue.first_lines(kind) == found


def test_every_command_is_found_with_its_own_help():
    for name, place in places().items():
        command = cli.get_command(click.Context(cli), name)
        assert command.name == name
        assert inspect.cleandoc(command.help) == inspect.cleandoc(place.text)
    assert {"list", "completion", "run", "federation", "data"} <= places().keys()


@pytest.mark.parametrize("line", ["--help", "list", "--version", "completion bash", "rnu"])
def test_names_and_help_load_no_torch(line):
    code = f"""
import sys
from fedbilevel.cli.main import main
sys.argv = ["fedbilevel", *{line.split()!r}]
try:
    main()
finally:
    assert not [name for name in ("torch", "scipy", "optuna") if name in sys.modules]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode == (2 if line == "rnu" else 0), done.stderr
    assert ("There is no command named 'rnu'. Did you mean 'run'?" in done.stderr) == (line == "rnu")
