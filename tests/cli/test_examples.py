"""Every example in a docstring runs and prints what it says, and everything public has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import fedbilevel

MODULES = [
    "fedbilevel",
    *(
        found.name
        for found in pkgutil.walk_packages(fedbilevel.__path__, "fedbilevel.")
        if not found.name.endswith("__main__")
    ),
]
WITHOUT = {
    "FedBilevelError",
    "Guarded",
    "MixedSources",
    "MixedTexts",
    "Progress",
    "Result",
    "SelectedFeatures",
    "tasks",
}  # an error, values that callbacks and functions return, which the examples of these functions show, and a namespace


def examples(name):
    return [test for test in doctest.DocTestFinder(recurse=True).find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if ".flare" not in name and examples(name)])
def test_examples_print_what_they_say(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(name):
        said = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)


def test_everything_public_has_an_example():
    missing = [
        name
        for name in fedbilevel.__all__
        if name not in WITHOUT and ">>>" not in (inspect.getdoc(getattr(fedbilevel, name)) or "")
    ]
    assert not missing
