"""The imports of the package, read from its source, so that lazy imports count, too."""

from __future__ import annotations

import ast
from pathlib import Path

import fedbilevel

ROOT = Path(fedbilevel.__file__).parent
ROOMS = (  # a module imports from its own room and from rooms before it
    "leaves", "problem", "data", "oracle", "privacy", "federation", "aggregation", "algorithms", "tasks",
    "detectors", "discovery", "engines", "runs", "cleaning", "personal", "checks", "secure", "sites",
    "peers", "studies", "report", "cli", "root",
)  # fmt: skip


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Absolute dotted names of all imports of the file; `from a import b` is a.b."""
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            found |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def called(node: ast.Call) -> str:
    """The last name of the function in a call."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def room(name: str) -> str:
    """The folder of a dotted name, or its top-level module if ROOMS lists it.

    Other top-level modules import no folder, and are leaves; the package itself is the root.
    """
    parts = name.split(".")
    if len(parts) == 1 or parts[1] == "__main__" or ".".join(parts[:2]) not in MODULES:
        return "root"
    return parts[1] if parts[1] in ROOMS else "leaves"


def module_of(name: str) -> str | None:
    """The module that a dotted name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None
