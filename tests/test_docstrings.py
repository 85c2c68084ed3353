"""Every public docstring has an example, which prints what the docstring says."""

import doctest
import importlib

import jax
import numpy as np
import pytest

import jaxdp

# Modules whose objects are tested besides those that jaxdp itself exports. A new subject module is added here.
MODULES = ("jaxdp.domains", "jaxdp.plot")
# Raised when a backend returns wrong numbers, which no example can show.
WITHOUT_EXAMPLE = {"BackendError"}
NAMES = {"__name__": "__main__", "jaxdp": jaxdp, "jax": jax, "np": np}


def public_objects():
    """Public functions and classes by name."""
    found = {name: getattr(jaxdp, name) for name in jaxdp.__all__}
    for module in map(importlib.import_module, MODULES):
        own = {
            name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        own = {name: value for name, value in own.items() if callable(value) and not name.startswith("_")}
        found |= {f"{module.__name__.removeprefix('jaxdp.')}.{name}": value for name, value in own.items()}
    return found


def examples():
    """Docstrings with examples of the public objects and of the methods that they define."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name, value in public_objects().items():
        for test in finder.find(value, name, module=False, globs=NAMES):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_prints_what_the_docstring_says(example):
    report = []
    doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert "".join(report) == ""


def test_every_public_object_has_an_example():
    shown = {example.id for example in examples()}
    assert set(public_objects()) - shown == WITHOUT_EXAMPLE


def test_help_of_shuffled_shows_first_what_a_user_needs():
    text = jaxdp.Shuffled.__doc__
    parts = ["num_users people", "randomizer: ", "num_users: ", ">>> ", "Which bound", "Assumes", "Accuracy"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
