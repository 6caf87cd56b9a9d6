"""Tasks and algorithms of other packages are found by entry points.

An invalid one fails when it is used.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.errors import PluginError, UnknownNameError

MODULES = {
    "sepsis": "from dataclasses import dataclass\nfrom fedbilevel.tasks.quadratic import Quadratic\n"
    "@dataclass(frozen=True, kw_only=True)\nclass Sepsis(Quadratic):\n    pass\n",
    "slow": "from dataclasses import dataclass\nfrom fedbilevel.algorithms.fedbio import FedBiO\n"
    "@dataclass(frozen=True, kw_only=True)\nclass Slow(FedBiO):\n    pass\n",
    "broken": "raise RuntimeError('no licence')\n",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A package as an installer leaves it: a folder of modules and its dist-info."""

    def install(name: str = "hospital", tasks=(), algorithms=()) -> None:
        place = tmp_path / name
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("")
        for module, text in MODULES.items():
            (place / name / f"{module}.py").write_text(text)
        info = place / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        groups = {"fedbilevel.tasks": tasks, "fedbilevel.algorithms": algorithms}
        (info / "entry_points.txt").write_text(
            "".join(f"[{group}]\n" + "".join(f"{line}\n" for line in lines) for group, lines in groups.items())
        )
        monkeypatch.syspath_prepend(place)

    yield install
    for module in [name for name in sys.modules if name.split(".")[0] in ("hospital", "clinic")]:
        del sys.modules[module]


def refused(ask, name: str, *words: str) -> None:
    with pytest.raises(PluginError) as caught:
        ask(name)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_module_that_has_one_is_found_under_its_name():
    assert {"quadratic", "data_cleaning"} <= set(discovery.tasks())
    assert "task" not in discovery.tasks()
    assert "initial" not in discovery.tasks()
    for known, ask in ((discovery.tasks(), discovery.task), (discovery.algorithms(), discovery.algorithm)):
        assert all(kind.name() == name and ask(name) is kind for name, kind in known.items())


def test_tasks_and_algorithms_of_an_installed_package_are_found_like_builtin_ones(install):
    ours = discovery.tasks(), discovery.algorithms()
    install(tasks=["sepsis = hospital.sepsis:Sepsis"], algorithms=["slow = hospital.slow:Slow"])
    task, algorithm = discovery.task("sepsis"), discovery.algorithm("slow")
    assert (task.__module__, algorithm.__module__) == ("hospital.sepsis", "hospital.slow")
    assert (task.name(), algorithm.name()) == ("sepsis", "slow")
    assert discovery.tasks() == {**ours[0], "sepsis": task}
    assert discovery.algorithms() == {**ours[1], "slow": algorithm}
    problem, clients = task(num_clients=2).build()
    given = {name: 0.05 for name in ("lr_upper", "lr_lower", "lr_system")}
    mine, theirs = (
        fb.solve(problem, clients, kind(**given), residuals=False, num_iterations=2)
        for kind in (algorithm, discovery.algorithm("fedbio"))
    )
    assert mine.rows[-1]["upper_loss"] == theirs.rows[-1]["upper_loss"]
    assert [field.name for field in dataclasses.fields(algorithm)] == [
        field.name for field in dataclasses.fields(discovery.algorithm("fedbio"))
    ]


def test_an_entry_point_cannot_take_a_name_of_fedbilevel(install):
    ours = discovery.tasks()
    install(tasks=["quadratic = hospital.sepsis:Sepsis"])
    assert discovery.tasks() == ours
    refused(
        discovery.task,
        "quadratic",
        "the package hospital offers hospital.sepsis:Sepsis as 'quadratic', "
        "which is a name of fedbilevel's own: rename",
    )
    assert discovery.task("data_cleaning") is ours["data_cleaning"]


def test_a_plugin_that_cannot_be_imported_raises_only_when_requested(install):
    ours = discovery.tasks()
    install(
        tasks=[
            "broken = hospital.broken:Broken",
            "gone = hospital.sepsis:Gone",
            "nowhere = hospital.nowhere:Task",
            "sepsis = hospital.sepsis:Sepsis",
        ]
    )
    assert set(discovery.tasks()) == {*ours, "sepsis"}
    assert discovery.task("quadratic") is ours["quadratic"]
    refused(
        discovery.task,
        "broken",
        "hospital.broken:Broken as 'broken', which cannot be imported (RuntimeError: no licence): fix or uninstall",
    )
    refused(discovery.task, "gone", "cannot be imported (AttributeError")
    refused(discovery.task, "nowhere", "cannot be imported (ModuleNotFoundError")
    with pytest.raises(UnknownNameError, match="Did you mean 'sepsis'"):
        discovery.task("sepsi")
    with pytest.raises(UnknownNameError, match="no algorithm named 'sepsis'"):
        discovery.algorithm("sepsis")


def test_the_class_must_be_of_its_kind_and_of_its_name(install):
    install(tasks=["slow = hospital.slow:Slow", "text = hospital.sepsis:__name__", "other = hospital.sepsis:Sepsis"])
    assert set(discovery.tasks()).isdisjoint({"slow", "text", "other"})
    refused(
        discovery.task,
        "slow",
        "hospital.slow:Slow as 'slow', which is no class derived from Task: fix that entry point",
    )
    refused(discovery.task, "text", "no class derived from Task")
    refused(
        discovery.task,
        "other",
        "as 'other', but its name() is 'sepsis': name the module or the entry point after the other",
    )


def test_two_packages_with_one_name(install):
    install("hospital", tasks=["sepsis = hospital.sepsis:Sepsis"])
    install("clinic", tasks=["sepsis = clinic.sepsis:Sepsis"])
    assert "sepsis" not in discovery.tasks()
    refused(
        discovery.task,
        "sepsis",
        "the package clinic offers clinic.sepsis:Sepsis",
        "the package hospital offers hospital.sepsis:Sepsis under the same name",
    )


@pytest.mark.parametrize(("package", "found"), [(fb.algorithms, discovery.algorithms()), (fb.tasks, discovery.tasks())])
def test_classes_are_attributes_of_their_package(package, found):
    own = {kind.__name__: kind for kind in found.values() if kind.__module__.startswith("fedbilevel.")}
    assert {name: getattr(package, name) for name in own} == own
    assert {*own} <= {*dir(package)}
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing
