"""Hooks of mkdocs: generated pages, equations, pictures in the theme's colours, and root files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
for place in (ROOT, ROOT / "src"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from mkdocs.structure.files import File, Files  # noqa: E402

import fedbilevel  # noqa: E402
from fedbilevel.aggregation import validity  # noqa: E402
from website import algorithm_pages, curves, leaderboard, mathematics, protections, task_pages, worth_table  # noqa: E402
from website.svg import DARK, LIGHT, variables  # noqa: E402

FROM_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "how-to/write-an-algorithm.md"}
RESULTS = {"experiments/RESULTS.md": "results/experiments.md", "benchmarks/RESULTS.md": "results/benchmarks.md"}
OPENINGS = {
    "experiments/RESULTS.md": "# Experiments\n\n"
    "The tables and figures of the papers, reproduced: `fedbilevel reproduce NAME` runs one of them. "
    "Where a paper prints a number, it is in brackets with the difference.\n\n",
}
TABLE = "<!-- all algorithms -->"
VALID = "<!-- valid combinations -->"


def on_config(config: Any) -> Any:
    """Add pages of all algorithms, and of all tasks of the experiment worth, to the navigation."""
    section = next(part["Algorithms"] for part in config["nav"] if "Algorithms" in part)
    section += ["algorithms/index.md", *({name: f"algorithms/{name}.md"} for name in curves.algorithms())]
    tasks = next(part["Tasks"] for part in config["nav"] if "Tasks" in part)
    tasks += [{name: f"tasks/{name}.md"} for name in task_pages.names()]
    return config


def on_files(files: Files, config: Any) -> Files:
    made = {f"algorithms/{name}.md": algorithm_pages.page(name) for name in curves.algorithms()}
    made["algorithms/index.md"] = algorithm_pages.index()
    made |= {f"tasks/{name}.md": task_pages.page(name) for name in task_pages.names()}
    made["tasks/index.md"] = task_pages.index()
    made |= leaderboard.pages()
    made["reference/api.md"] = api_page()
    made["reference/errors.md"] = errors_page()
    made["stylesheets/colours.css"] = (
        f'[data-md-color-scheme="default"]{{{variables(LIGHT)}}}[data-md-color-scheme="slate"]{{{variables(DARK)}}}'
    )
    for source, target in FROM_ROOT.items():
        made[target] = _moved((ROOT / source).read_text(), target)
    for source, target in RESULTS.items():
        folder = (ROOT / source).parent
        text, pictures = _results((ROOT / source).read_text(), folder)
        made[target] = OPENINGS.get(source, "") + text
        for picture in pictures:
            files.append(File.generated(config, f"results/{folder.name}/{picture}", abs_src_path=str(folder / picture)))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if TABLE in markdown:
        markdown = markdown.replace(TABLE, algorithm_pages.decision_table())
    markdown = worth_table.filled(protections.filled(markdown.replace(VALID, validity.table())))
    return re.sub(r"(?m)^```(\w+) ([\w.-]+)$", r'```\1 title="\2"', markdown)  # a file that the reader creates


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Render equations, and inline our pictures.

    An inlined picture has the colours of the reader's theme; a separate file cannot.
    """

    def inlined(found: re.Match[str]) -> str:
        return algorithm_pages.figure_of((ROOT / "docs" / "pictures" / f"{found[1]}.svg").read_text().strip())

    return mathematics.rendered(re.sub(r'<img [^>]*src="[^"]*pictures/([\w-]+)\.svg"[^>]*>', inlined, html))


def _moved(text: str, target: str) -> str:
    """Turn a file of the root into a page.

    Links to pages are kept. Links to other files are replaced by their text.
    """
    up = "../" * target.count("/")

    def link(found: re.Match[str]) -> str:
        words, where, anchor = found[1], found[2], found[3] or ""
        if re.match(r"\w+:", where) or not where:
            return found[0]
        if where.startswith("docs/"):
            return f"[{words}]({up}{where.removeprefix('docs/')}{anchor})"
        if where in {**FROM_ROOT, **RESULTS}:
            return f"[{words}]({up}{ {**FROM_ROOT, **RESULTS}[where] }{anchor})"
        return words

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, text)


def _results(text: str, folder: Path) -> tuple[str, list[str]]:
    """Move pictures of results into a folder, and remove links to files that are not on the site."""
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    text = re.sub(r"(!\[[^\]]*\])\(([^)]+)\)", lambda found: f"{found[1]}({folder.name}/{found[2]})", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:)[^)#]+\)", r"\1", text), pictures


def api_page() -> str:
    """List every public name in groups; names without a group are at the end."""
    groups = {
        "Run": ["solve", "compare", "guarded", "Guarded", "tune", "write_report", "Result"],
        "Problems": ["Problem", "Scopes", "lora"],
        "Cleaning of labels": ["clean_labels", "Cleaning"],
        "Features and sources": ["select_features", "SelectedFeatures", "mix_sources", "MixedSources", "MixedTexts"],
        "Personalisation": ["personalise", "Personalised"],
        "Influence of samples": ["influence"],
        "Cohorts and networks": ["Cohort", "Stragglers", "Network", "Averaging", "Schedule"],
        "Checks": ["check_problem", "check_hypergradient", "check_algorithm", "check_engine"],
        "Step sizes": ["suggest_steps", "curvature", "projection_radius"],
    }
    known = {name for names in groups.values() for name in names}
    groups["More"] = [name for name in fedbilevel.__all__ if name not in known and name != "FedBilevelError"]
    out = [
        "# The package",
        "Every public name of `import fedbilevel as fb`. "
        "[Errors](errors.md) and [classes to derive from](classes.md) have separate pages.",
    ]
    for title, names in groups.items():
        mine = [name for name in names if name in fedbilevel.__all__]
        out += [f"## {title}", *(f"::: {_home(name)}" for name in mine)] if mine else []
    return "\n\n".join(out) + "\n"


def _home(name: str) -> str:
    """The path of the definition of a public name.

    Documentation tools resolve this path better than an imported name.
    """
    value = getattr(fedbilevel, name)
    return f"{value.__module__}.{name}" if hasattr(value, "__module__") else f"fedbilevel.{name}"


def errors_page() -> str:
    opening = (
        "Every error that a user can cause is a `FedBilevelError`. "
        "Its message is one sentence: the value found, the value expected, and the fix. "
        "The command line prints it without a traceback and exits with 2."
    )
    options = "".join(
        f"      {option}\n"
        for option in ("show_root_heading: false", "show_root_toc_entry: false", "members_order: source")
    )
    return f"# Errors\n\n{opening}\n\n::: fedbilevel.errors\n    options:\n{options}"
