"""Every public docstring has an example, which prints what the docstring says."""

import importlib

import pytest
from examples import examples_of, failures_of

import jaxdp

# Modules whose objects are tested besides those that jaxdp itself exports. A new subject module is added here.
MODULES = ("jaxdp.domains", "jaxdp.plot")
# Raised when a backend returns wrong numbers, which no example can show.
WITHOUT_EXAMPLE = {"BackendError"}


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


EXAMPLES = [example for name, value in public_objects().items() for example in examples_of(value, name)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_prints_what_the_docstring_says(example):
    assert failures_of(example) == ""


def test_every_public_object_has_an_example():
    assert set(public_objects()) - {example.name for example in EXAMPLES} == WITHOUT_EXAMPLE


def test_help_of_shuffled_shows_first_what_a_user_needs():
    text = jaxdp.Shuffled.__doc__
    parts = ["num_users people", "randomizer: ", "num_users: ", ">>> ", "Which bound", "Assumes", "Accuracy"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
