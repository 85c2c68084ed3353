"""The public names of the subject modules: examples, types, unique names, and the place of the argument `order`."""

import collections
import importlib
import inspect

import pytest
from examples import examples_of, failures_of

import jaxdp

MODULES = [importlib.import_module(f"jaxdp.{name}") for name in (
    "shuffle", "iteration", "mixing", "diffusion", "convolution", "conversions", "training", "interop",
)]  # fmt: skip
PUBLIC = [(module, name) for module in MODULES for name in module.__all__]


@pytest.mark.parametrize("module, name", PUBLIC, ids=lambda part: getattr(part, "__name__", part))
def test_the_example_in_the_docstring_prints_what_it_says(module, name):
    examples = examples_of(getattr(module, name), name)
    assert any(example.name == name for example in examples), f"{module.__name__}.{name} has no example"
    assert "".join(map(failures_of, examples)) == ""


def test_a_missing_and_a_wrong_example_are_found():
    def without():
        """One."""

    def wrong():
        """One.

        >>> 1 + 1
        3
        """

    assert examples_of(without, "without") == []
    (example,) = examples_of(wrong, "wrong")
    assert "Expected:\n    3\nGot:\n    2" in failures_of(example)


def signatures_of(value):
    """(name, signature) of a function, or of a class and each public method that it defines."""
    if not (isinstance(value, type) and issubclass(value, Exception)):
        yield value.__name__, inspect.signature(value)
    for name, method in vars(value).items() if isinstance(value, type) and not issubclass(value, tuple) else ():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield f"{value.__name__}.{name}", inspect.signature(method)


def untyped(value):
    """Arguments and results of a public object that have no type, or the type Any."""
    for name, signature in signatures_of(value):
        types = {each.name: each.annotation for each in signature.parameters.values() if each.name != "self"}
        if not isinstance(value, type) or "." in name:
            types["return"] = signature.return_annotation
        yield from (
            f"{name}: {each}" for each, kind in types.items() if kind is inspect.Parameter.empty or "Any" in str(kind)
        )


@pytest.mark.parametrize("module, name", PUBLIC, ids=lambda part: getattr(part, "__name__", part))
def test_every_argument_and_result_has_a_type_other_than_any(module, name):
    assert list(untyped(getattr(module, name))) == []


def test_no_public_name_stands_for_two_things():
    homes = collections.Counter(name for module in (jaxdp, *MODULES) for name in module.__all__)
    assert [name for name, count in homes.items() if count > 1] == []


@pytest.mark.parametrize("module, name", PUBLIC, ids=lambda part: getattr(part, "__name__", part))
def test_the_order_stands_first_or_after_the_divergences_it_is_given_to(module, name):
    names = [each for _, signature in list(signatures_of(getattr(module, name)))[:1] for each in signature.parameters]
    orders = {"order", "orders"} if module.__name__ != "jaxdp.training" else set()  # there it orders examples
    for order in orders & set(names):
        assert set(names[: names.index(order)]) <= {"renyi", "renyi_first", "renyi_kernel"}
