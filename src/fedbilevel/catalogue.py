"""Names and first lines of algorithms, detectors and tasks, read from their files.

No module is imported, so that commands which only list names do not load torch.
"""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent
_ROOTS = {  # the file and the name of the class that all others of a folder derive from
    "algorithms": ("federation/algorithm.py", "Algorithm"),
    "detectors": ("detectors/detector.py", "Detector"),
    "tasks": ("tasks/task.py", "Task"),
}
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)


def first_lines(kind: str) -> dict[str, str]:
    """Return the first line of every module of algorithms, detectors or tasks, by its name.

    kind: "algorithms", "detectors" or "tasks".
    """
    place, root = _ROOTS[kind]
    texts = {path.stem: path.read_text() for path in sorted((_HERE / kind).glob("*.py"))}
    classes = {name: _classes(text) for name, text in texts.items()}
    derived, before = {root}, 0
    known = [*_classes((_HERE / place).read_text()), *(one for found in classes.values() for one in found)]
    while len(derived) > before:
        before = len(derived)
        derived |= {name for name, parents in known if derived & parents}
    return {
        name: texts[name].removeprefix('"""').split("\n", 1)[0].removesuffix('"""')
        for name, found in classes.items()
        if any(one in derived and one != root for one, _ in found) and not (kind == "detectors" and name[0] == "_")
    }


def _classes(text: str) -> list[tuple[str, set[str]]]:
    """Return the names of the classes of a module, each with the names of its parents."""
    return [(name, set(re.findall(r"\w+", parents))) for name, parents in _CLASS.findall(text)]
