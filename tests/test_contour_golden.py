"""The accountant against tests/data/accounting.json (exact to 22 digits): close bounds enclose every stored case."""

from fractions import Fraction

import numpy as np
import pytest
from exact import stored

import jaxdp
from jaxdp.contour import trapezoid
from jaxdp.mechanisms.composition import normal_form
from jaxdp.runtime.arrays import xp
from jaxdp.sources.base import Known
from jaxdp.sources.contour import COMPARED, Compared, contour_ratio

pytestmark = pytest.mark.as_users_compile

CASES = stored("accounting")
RELATION = {"remove": "remove", "add": "add", "replace": "replace_one", "symmetric": None}
GAP = {"epsilon": 1e-6, "delta": 1e-5}  # relative; promised for epsilon. delta changes faster than epsilon
HETEROGENEOUS = "heterogeneous"


def mechanism(kind, parameters):
    """One batched record for cases of one type; ``parameters``: name -> array."""
    if kind == "poisson_subsampled_gaussian":
        one = jaxdp.PoissonSampled(jaxdp.Gaussian(parameters["sigma"]), parameters["q"])
    elif kind == "gaussian":
        one = jaxdp.Gaussian(parameters["sigma"])
    elif kind == "laplace":
        one = jaxdp.Laplace(parameters["b"])
    elif kind == "randomized_response":
        one = jaxdp.RandomizedResponse(np.log(parameters["p"] / (1 - parameters["p"])))
    elif kind == "discrete_gaussian":
        one = jaxdp.DiscreteGaussian(np.sqrt(parameters["sigma2"]), parameters["sensitivity"])
    else:
        one = jaxdp.DiscreteLaplace(1 / parameters["a"], parameters["sensitivity"])
    return jaxdp.repeat(one, parameters["T"])


def groups():
    """Cases that one call can answer: those of the same type, direction and unknown."""
    found = {}
    for case in CASES:
        kind = case["mechanism"]["type"]
        if kind != HETEROGENEOUS:
            found.setdefault((kind, case["direction"], case["unknown"]), []).append(case)
    return found


def solve(kind, direction, unknown, cases):
    """(bounds, exact values) of a group, in one call."""
    names = [n for n, v in cases[0]["mechanism"].items() if n not in ("type", "pair")]
    parameters = {n: np.array([c["mechanism"][n] for c in cases], float) for n in names}
    known = "delta" if unknown == "epsilon" else "epsilon"
    target = np.array([float(c[known]) for c in cases])
    verb = jaxdp.epsilon_bounds if unknown == "epsilon" else jaxdp.delta_bounds
    bounds = verb(mechanism(kind, parameters), target, relation=RELATION[direction])
    return bounds, [Fraction(c[unknown]) for c in cases]


@pytest.mark.parametrize("group", groups(), ids="-".join)
def test_bounds_enclose_every_stored_value_and_lie_close_together(group):
    cases = groups()[group]
    bounds, exact = solve(*group, cases)
    for case, lower, upper, truth in zip(cases, bounds.lower, bounds.upper, exact, strict=True):
        # parameters of the other mechanisms are rounded functions of the stored numbers: logarithm, reciprocal, root
        slack = Fraction(0) if group[0] in ("poisson_subsampled_gaussian", "gaussian", "laplace") else truth / 10**12
        assert Fraction(lower) <= truth + slack, case["id"]
        assert Fraction(upper) >= truth - slack, case["id"]
        assert upper - lower <= GAP[group[2]] * upper, case["id"]


def compared(effort):
    """For every stored sampled Gaussian: the upper bound of delta by `contour_ratio` over the stored delta."""
    ratios = []
    for (kind, direction, _), cases in groups().items():
        if kind == "poisson_subsampled_gaussian" and direction in ("remove", "add"):
            names = [n for n, v in cases[0]["mechanism"].items() if n not in ("type", "pair")]
            batch = mechanism(kind, {n: np.array([c["mechanism"][n] for c in cases], float) for n in names})
            epsilon, delta = (np.array([float(c[name]) for c in cases]) for name in ("epsilon", "delta"))
            pair = "forward" if direction == "remove" else "reverse"
            stacks = normal_form(batch, epsilon.shape)
            ratios += list(contour_ratio(stacks, epsilon, delta, direction=pair, effort=effort)[1])
    return np.array(ratios)


def test_no_comparison_takes_a_stored_delta_to_be_smaller_than_it_is():
    few, as_used = compared(COMPARED._replace(nodes=2)), compared(COMPARED)
    assert len(as_used) == 33
    assert min(few.min(), as_used.min()) >= 1
    assert np.median(as_used) < 1.01  # most of them are close


def test_a_comparison_without_the_bounds_of_truncation_is_noticed(monkeypatch):
    for name in ("log_tail", "log_fallen"):
        monkeypatch.setattr(trapezoid, name, lambda *a: xp.asarray(-1e4))
    assert compared(COMPARED._replace(nodes=2)).min() < 0.95


def test_a_comparison_counts_the_mass_at_infinity():
    mass, beyond = 1e-3, np.full(2, 50.0)
    lossy = jaxdp.compose(
        jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), 100),
        jaxdp.DiscretePair([1.0, 0.0], [1 - mass, mass]),
    )
    delta = mass * np.array([0.9999, 1.1])
    stacks = normal_form(lossy, beyond.shape)
    _, (too_small, enough) = contour_ratio(stacks, beyond, delta, direction="reverse", effort=COMPARED)
    assert enough < 1 < too_small


@pytest.mark.parametrize("verb", ["epsilon", "delta"])
def test_the_add_direction_has_the_bound_of_remove_where_it_is_the_smaller_one(verb):
    """The bounds for add_or_remove agree with those for remove and for add."""
    sigma, rate, steps = np.array([0.5, 0.8, 1.0, 2.0, 5.0]), np.array([0.3, 1e-3, 0.01, 0.1, 0.9]), 300
    run = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), steps)
    ask = jaxdp.epsilon_bounds if verb == "epsilon" else jaxdp.delta_bounds
    target = 1e-6 if verb == "epsilon" else jaxdp.epsilon(run, 1e-6, relation="remove")
    remove, add, both = (ask(run, target, relation=relation) for relation in ("remove", "add", "add_or_remove"))
    assert np.array_equal(both.upper, np.maximum(remove.upper, both.lower))
    assert np.all(both.lower <= both.upper) and np.all(add.lower <= both.upper)
    assert np.all(np.maximum(remove.lower, add.lower) <= both.upper)
    stacks = normal_form(run, sigma.shape)
    known = Known(np.zeros(5), np.full(5, np.inf), remove.lower)
    answer = Compared(verb)(stacks, np.broadcast_to(target, 5), known, 1e-6)
    decided = np.isfinite(answer.upper) if verb == "epsilon" else answer.upper < 1
    assert decided.sum() >= 4 and np.all(answer.upper[decided] == remove.lower[decided])
    assert np.all(add.lower[decided] <= remove.lower[decided])


def test_a_comparison_of_what_no_contour_can_sum_is_infinite_or_right():
    """Noise this small hides nothing: ten steps lose 10 log 2 where no record was taken, with a chance of 2^-10.

    A million steps lose more than 600 almost surely; two steps at the rate 1e-9 at most 2e-9.
    """
    sigma, rate, steps = np.array([0.3, 1e-3, 0.5]), np.array([0.9, 0.5, 1e-9]), np.array([1e6, 10.0, 2.0])
    stacks = normal_form(jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), steps), (3,))
    ten = 1 - np.exp(1e-3) / 2**10
    for epsilon, delta, exact in ((1e-3, 1e-300, (1, ten, 0)), (600.0, 0.9, (1, 0, 0)), (30.0, 1e-12, (1, 0, 0))):
        lower, upper = contour_ratio(
            stacks, np.full(3, epsilon), np.full(3, delta), direction="reverse", effort=COMPARED
        )
        assert np.all(lower <= upper) and np.all(np.array(exact) * (1 - 1e-12) <= upper * delta)
        assert upper[2] * delta < 1e-11


def test_a_comparison_with_less_than_the_add_direction_decides_nothing():
    run = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(np.array([0.7, 1.0, 3.0])), 0.02), 500)
    add = jaxdp.epsilon_bounds(run, 1e-6, relation="add")
    known = Known(np.zeros(3), np.full(3, np.inf), add.lower * (1 - 1e-9))
    answer = Compared("epsilon")(normal_form(run, (3,)), np.full(3, 1e-6), known, 1e-6)
    assert np.all(answer.upper == np.inf)


def composition_of_1300():
    """The stored heterogeneous mechanism: 500 Gaussians, 500 randomized responses, 300 sampled Gaussian steps."""
    i = np.arange(500)
    p = 0.52 + 0.03 * i / 499
    gaussians = [jaxdp.Gaussian(s) for s in 50 + 50 * i / 499]
    responses = [jaxdp.RandomizedResponse(e) for e in np.log(p / (1 - p))]
    return jaxdp.compose(*gaussians, *responses, jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), 300))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.thorough
def test_composition_of_1300_different_mechanisms_encloses_the_stored_values(direction):
    cases = [c for c in CASES if c["mechanism"]["type"] == HETEROGENEOUS and c["direction"] == direction]
    assert len(cases) == 3
    epsilon = np.array([c["epsilon"] for c in cases])
    bounds = jaxdp.delta_bounds(composition_of_1300(), epsilon, relation=direction)
    exact = np.array([float(c["delta"]) for c in cases])
    # the 500 response levels are logarithms rounded to doubles; delta moves by about 1e-13 with them
    assert np.all(bounds.lower <= exact * (1 + 1e-11))
    assert np.all(bounds.upper >= exact * (1 - 1e-11))
    assert np.all(bounds.upper - bounds.lower <= GAP["delta"] * bounds.upper)


def test_the_table_of_cases_is_complete():
    assert len(CASES) == 69
    assert {c["mechanism"]["type"] for c in CASES} == {
        "poisson_subsampled_gaussian", "gaussian", "laplace", "randomized_response", "discrete_gaussian",
        "discrete_laplace", HETEROGENEOUS,
    }  # fmt: skip


@pytest.mark.slow
def test_within_a_millionth_of_the_supremum_two_steps_are_enclosed():
    # The deltas agree with quadrature in mpmath over the first step of the closed-form delta of the second, as far as
    # the rounding of these epsilons to float64 lets them.
    sigma, rate = np.array([0.703, 0.23, 0.3425]), np.array([0.595, 0.327, 0.000536])
    exact = np.array([1.8077364227511956, 0.7920198986648186, 0.0010722873986017244])
    delta = np.array([3.3116832312150986354e-106, 1.2039263959360953282e-19, 1.5496654806284173962e-34])
    two = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), 2)
    solved = jaxdp.epsilon_bounds(two, delta, relation="add")
    assert np.all((solved.lower <= exact * (1 + 1e-15)) & (exact * (1 - 1e-15) <= solved.upper))
