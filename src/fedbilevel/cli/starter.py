"""`fedbilevel new`: a small, working project from the templates in the folder starter_files."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template

from fedbilevel import discovery
from fedbilevel._version import __version__
from fedbilevel.errors import SettingError

FILES = {  # template -> file name in the project
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "run.toml": "run.toml",
    "task.py": "$module.py",
    "test_task.py": "test_$module.py",
}


def new(place: Path | str) -> list[Path]:
    """Make a project in the folder `place`, and return its files.

    The project has the name of the folder. Existing files are not overwritten.
    """
    folder = Path(place)
    words = _words(folder.resolve().name)
    files = {folder / Template(name).substitute(words): _filled(template, words) for template, name in FILES.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SettingError(f"the folder {folder} is not empty: name a new one.")
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise SettingError(
            f"the project cannot be written into {folder} ({error.strerror}): name another folder."
        ) from error
    return list(files)


def _words(project: str) -> dict[str, str]:
    module = project.replace("-", "_")
    what = f"the project would be the Python module {module!r}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", module) or module.endswith("_") or keyword.iskeyword(module):
        raise SettingError(
            f"{what}, which Python cannot import: "
            "name it with letters, digits, - and _, the first a letter, as in soil-moisture."
        )
    if module in discovery.own_tasks():
        raise SettingError(f"{what}, and {module!r} is a task of fedbilevel's own: choose another name.")
    found = importlib.util.find_spec(module)
    if found is not None and found.origin is not None:  # a plain folder has no origin and no effect
        raise SettingError(f"{what}, and there is one already ({found.origin}): choose another name.")
    parts = [part for part in module.split("_") if part]
    return {
        "project": project,
        "module": module,
        "class_name": "".join(part[0].upper() + part[1:] for part in parts),
        "title": " ".join(parts).capitalize(),
        "version": __version__,
    }


def _filled(template: str, words: dict[str, str]) -> str:
    return Template(
        (resources.files("fedbilevel.cli") / "starter_files" / f"{template}.template").read_text(encoding="utf-8")
    ).substitute(words)
