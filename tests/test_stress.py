"""A few random cases of benchmarks/stress.py have no violation, and its check notices a slightly wrong bound."""

import importlib.util
import pathlib

import numpy as np
import pytest

PATH = pathlib.Path(__file__).parent.parent / "benchmarks" / "stress.py"
SPEC = importlib.util.spec_from_file_location("stress", PATH)
stress = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stress)

CHEAP = (stress.gaussian, stress.randomized_response, stress.discrete_laplace, stress.shuffled_responses)


@pytest.mark.parametrize("family", CHEAP, ids=lambda family: family.__name__)
def test_intervals_hold_the_other_route_and_a_wrong_bound_is_noticed(family):
    case = family(np.random.default_rng(3), 40)
    assert case.value.size >= 10 and not stress.violations(case).any()
    too_small = case._replace(bounds=case.bounds._replace(upper=case.value * (1 - 1e-6) - 2 * case.error))
    noticed = stress.violations(too_small)
    assert noticed[case.value > 1e-9].all() and noticed.any()


def test_a_contour_integral_without_certificate_agrees_with_the_certified_one():
    case = stress.laplace(np.random.default_rng(5), 40)
    assert case.value.size >= 3 and not stress.violations(case).any()


def test_two_sources_of_shuffled_bounds_agree():
    case = stress.shuffled_kernels(np.random.default_rng(3), 40)
    assert case.value.size >= 3 and not stress.violations(case).any()


def test_nan_in_a_bound_is_a_violation():
    case = stress.Case(stress.Bounds(np.array([0.1]), np.array([np.nan])), np.array([0.2]), np.array([0.0]))
    assert stress.violations(case).all()
