"""`fedbilevel new`: a starter project."""

from __future__ import annotations

from pathlib import Path

import click

from fedbilevel.cli import starter


@click.command("new")
@click.argument("project", type=click.Path(path_type=Path))
def new(project: Path) -> None:
    """Make a small, working project in the folder PROJECT: your own task, a run file and tests."""
    files = starter.new(project)
    task = next(path.name for path in files if path.suffix == ".py")
    click.echo(f"Made {project}: {', '.join(path.name for path in files)}")
    click.echo(
        f"Try it:\n  cd {project}\n  python {task}\n  pip install -e .\n  fedbilevel run --config run.toml\n  pytest"
    )
