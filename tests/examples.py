"""Examples of docstrings, as two test files run them: of the top level, and of the subject modules."""

import doctest

import jax
import numpy as np

import jaxdp

NAMES = {"__name__": "__main__", "jaxdp": jaxdp, "jax": jax, "np": np}


def examples_of(value, name):
    """The doctests of a public object: of its own docstring, and of the methods that it defines."""
    found = doctest.DocTestFinder().find(value, name, module=False, globs=NAMES)
    return [test for test in found if test.examples]


def failures_of(example):
    """What the runner prints about an example; nothing where it prints what the docstring says."""
    report = []
    doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    return "".join(report)
