"""The Gaussian's closed form: stored values to the last digits, edges, monotonicity, derivatives."""

from fractions import Fraction

import hypothesis.strategies as st
import jax
import mpmath as mp
import numpy as np
import pytest
from exact import encloses, gaussian_delta_in_digits, stored
from hypothesis import given

import jaxdp
from jaxdp.numerics import special
from jaxdp.runtime.backend import compiler_options
from jaxdp.sources import gaussian as route

CASES = stored("accounting")
GAUSSIAN = [c for c in CASES if c["mechanism"]["type"] == "gaussian"]
CLOSE = 1e-10  # relative gap required of the closed form
STEP = 1e-5  # step of the finite differences: truncation 1e-10, rounding 1e-11
DERIVATIVE = 1e-7  # relative tolerance of derivatives


def golden(unknown):
    """(mechanism, known targets, exact values) of the stored cases in which ``unknown`` was computed."""
    cases = [c for c in GAUSSIAN if c["unknown"] == unknown]
    mechanism = jaxdp.repeat(
        jaxdp.Gaussian(np.array([float(c["mechanism"]["sigma"]) for c in cases])),
        np.array([c["mechanism"]["T"] for c in cases]),
    )
    known = "delta" if unknown == "epsilon" else "epsilon"
    return mechanism, np.array([float(c[known]) for c in cases]), [Fraction(c[unknown]) for c in cases]


@pytest.mark.parametrize("unknown, verb", [("delta", jaxdp.delta_bounds), ("epsilon", jaxdp.epsilon_bounds)])
def test_bounds_enclose_the_stored_values_closely(unknown, verb):
    mechanism, target, exact = golden(unknown)
    bounds = verb(mechanism, target)
    assert all(Fraction(low) <= e <= Fraction(up) for low, e, up in zip(bounds.lower, exact, bounds.upper, strict=True))
    assert np.all(bounds.upper - bounds.lower <= CLOSE * bounds.upper)


@mp.workdps(60)
def test_bounds_enclose_the_formula_from_tiny_to_huge_noise_and_both_signs_of_epsilon():
    sigma = np.array([1e-3, 0.05, 1.0, 30.0, 1e4, 1e6])[:, None]
    epsilon = np.array([-3.0, -1e-3, 0.0, 1e-6, 0.5, 20.0])
    bounds = jaxdp.delta_bounds(jaxdp.Gaussian(sigma), epsilon)
    for row, s in enumerate(sigma[:, 0]):
        for column, e in enumerate(epsilon):
            exact = gaussian_delta_in_digits(e, 1 / mp.mpf(s))
            assert bounds.lower[row, column] <= exact <= bounds.upper[row, column], (s, e)


def test_a_delta_below_the_smallest_double_is_not_reported_as_zero():
    # exact 1.19e-309: a compiler that flushes such numbers to 0 would under-report
    assert jaxdp.delta(jaxdp.Gaussian(1.0), 38.0) >= 1.19e-309
    assert jaxdp.delta(jaxdp.Gaussian(1.0), 60.0) > 0


def test_bounds_enclose_a_delta_that_has_few_digits_in_float64():
    with mp.workdps(60):
        for eps in np.linspace(38.0, 38.57, 40):
            assert encloses(jaxdp.delta_bounds(jaxdp.Gaussian(1.0), eps), gaussian_delta_in_digits(float(eps), 1.0))


def test_epsilon_at_the_edges_of_delta():
    noise = jaxdp.Gaussian(1.0)
    assert jaxdp.epsilon(noise, 0.0) == np.inf
    assert jaxdp.epsilon(noise, 1.0) == 0
    assert jaxdp.epsilon(noise, 0.5) == 0  # above the total variation distance, 0.38
    assert 37 < jaxdp.epsilon(noise, 1e-300) < 38
    assert jaxdp.epsilon(jaxdp.repeat(noise, 0), 0.0) == 0
    assert jaxdp.epsilon(jaxdp.compose(), 0.0) == 0


def test_delta_at_the_edges_of_epsilon():
    noise = jaxdp.Gaussian(1.0)
    np.testing.assert_array_equal(jaxdp.delta(noise, np.array([-np.inf, np.inf])), [1.0, 0.0])
    assert jaxdp.delta(jaxdp.repeat(noise, 0), 0.0) == 0
    assert jaxdp.delta(jaxdp.repeat(noise, 0), -1.0) == pytest.approx(-np.expm1(-1.0), rel=1e-15)


def test_delta_is_never_below_the_delta_that_no_mechanism_beats():
    epsilon = np.linspace(-5, 0, 41)
    assert np.all(jaxdp.delta(jaxdp.Gaussian(1e5), epsilon) >= -np.expm1(epsilon))


@given(st.floats(0.05, 50), st.floats(1.01, 3), st.floats(1e-12, 0.5))
def test_epsilon_falls_with_noise_and_with_delta(sigma, factor, delta):
    grid = jaxdp.epsilon(jaxdp.Gaussian(np.array([sigma, sigma * factor])), delta)
    assert grid[1] <= grid[0]
    assert jaxdp.epsilon(jaxdp.Gaussian(sigma), min(1.0, delta * factor)) <= grid[0]


@given(st.floats(0.5, 50), st.integers(1, 10**7), st.floats(1e-12, 0.3))
def test_many_small_releases_are_one_large_one(sigma, times, delta):
    many = jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(sigma * np.sqrt(times)), times), delta)
    assert many == pytest.approx(jaxdp.epsilon(jaxdp.Gaussian(sigma), delta), rel=1e-9, abs=1e-12)


def test_delta_inverts_epsilon_on_the_safe_side():
    sigma, delta = np.array([0.3, 1.0, 8.0])[:, None], np.array([1e-12, 1e-5, 1e-2])
    assert np.all(jaxdp.delta_bounds(jaxdp.Gaussian(sigma), jaxdp.epsilon(jaxdp.Gaussian(sigma), delta)).lower <= delta)


def test_traced_verbs_equal_eager_ones_and_differentiate():
    def epsilon(sigma, delta):
        return jaxdp.epsilon(jaxdp.Gaussian(sigma), delta)

    sigma, delta = np.array([0.7, 1.3, 5.0]), 1e-6
    with jax.enable_x64(True):
        solved = jax.vmap(jax.value_and_grad(epsilon, (0, 1)), (0, None))
        traced = jax.jit(solved, compiler_options=compiler_options("cpu"))
        value, (by_sigma, by_delta) = traced(sigma, delta)
    np.testing.assert_allclose(value, epsilon(sigma, delta), rtol=1e-12)
    by_sigma, by_delta = by_sigma[1], by_delta[1]
    numeric = (epsilon(1.3 + STEP, delta) - epsilon(1.3 - STEP, delta)) / (2 * STEP)
    assert float(by_sigma) == pytest.approx(numeric, rel=DERIVATIVE)
    h = STEP * delta
    assert float(by_delta) == pytest.approx((epsilon(1.3, delta + h) - epsilon(1.3, delta - h)) / (2 * h), rel=1e-5)


def test_the_gradient_at_a_number_inside_a_program_is_the_bare_one():
    """Its numbers are concrete, but what is computed from them becomes part of the program."""

    def epsilon(sigma):
        return jaxdp.epsilon(jaxdp.Gaussian(sigma), 1e-6)

    with jax.enable_x64(True):
        bare = float(jax.grad(epsilon)(1.3))
        inside = float(jax.jit(lambda x: x + jax.grad(epsilon)(1.3))(0.0))
    assert bare == pytest.approx((epsilon(1.3 + STEP) - epsilon(1.3 - STEP)) / (2 * STEP), rel=DERIVATIVE)
    assert inside == pytest.approx(bare, rel=1e-12)


def test_a_trace_without_float64_is_refused_in_one_sentence():
    with pytest.raises(RuntimeError, match="float64"):
        jax.jit(lambda s: jaxdp.epsilon(jaxdp.Gaussian(s), 1e-5))(1.0)


def test_new_values_of_the_same_shapes_do_not_recompile(compiled):
    jaxdp.epsilon(jaxdp.Gaussian(np.linspace(1, 2, 5)), 1e-5)
    before = route.gaussian_bounds.traces
    jaxdp.epsilon(jaxdp.Gaussian(np.linspace(3, 4, 5)), 1e-7)
    assert route.gaussian_bounds.traces == before


def test_the_mills_ratio_has_no_hole_where_erfc_is_subnormal():
    places = np.concatenate([np.linspace(36.5, 38.5, 400), np.geomspace(1e-3, 1e6, 200), np.linspace(-5, 5, 100)])
    with jax.enable_x64(True):
        ratios = np.asarray(jax.jit(special.mills)(places))
    with mp.workdps(40):
        exact = [mp.ncdf(-mp.mpf(x)) / mp.npdf(mp.mpf(x)) for x in places]
    units = [abs(mp.mpf(float(r)) / e - 1) / mp.mpf(2) ** -53 / (1 + min(x, 0) ** 2)
             for r, e, x in zip(ratios, exact, places, strict=True)]  # fmt: skip
    assert max(units) < 16


# (sigma, epsilon). First and third: the second Mills ratio is where erfc is subnormal. Second: the difference of two
# nearly equal Mills ratios left of 0.
AWKWARD = [(0.469730890204173, 77.68473449401623), (314303.9403951272, -1.5488021014023964e-05), (0.47, 77.9)]


@pytest.mark.parametrize("sigma, epsilon", AWKWARD)
def test_awkward_places_are_enclosed_closely(sigma, epsilon):
    bounds = jaxdp.delta_bounds(jaxdp.Gaussian(sigma), epsilon)
    with mp.workdps(60):
        assert encloses(bounds, gaussian_delta_in_digits(epsilon, 1 / mp.mpf(sigma)))
    assert bounds.upper - bounds.lower < 1e-7 * bounds.upper


def test_the_tradeoff_curve_is_not_above_its_formula_at_any_false_positive_rate():
    rng = np.random.default_rng(4)
    sigma, rate = 10 ** rng.uniform(-2, 2, 200), 10 ** rng.uniform(-40, 0, 200)
    rate[::4] = 1 - 10 ** rng.uniform(-15, 0, 50)
    found = jaxdp.tradeoff(jaxdp.Gaussian(sigma), rate)
    with mp.workdps(60):
        for s, x, value in zip(sigma, rate, found, strict=True):
            start = -mp.sqrt(2) * mp.erfinv(1 - 2 * mp.mpf(x)) if 1e-6 < x else -mp.sqrt(-2 * mp.log(x))
            quantile = mp.findroot(lambda z, x=x: mp.log(mp.ncdf(z) / x), start)
            exact = mp.ncdf(-quantile - 1 / mp.mpf(s))
            assert value <= exact
            assert value >= exact * (1 - 1e-10) - 2e-15


def test_noise_so_large_that_the_square_of_mu_underflows_still_has_a_loss():
    assert 0 < jaxdp.delta(jaxdp.Gaussian(1e155), 0.0) < 1e-150
    assert 0 < jaxdp.delta(jaxdp.repeat(jaxdp.Gaussian(1e160), 1e12), 0.0) < 1e-149
    assert 0 < jaxdp.epsilon(jaxdp.Gaussian(1e155), 1e-200) < 1e-148
    assert jaxdp.renyi(jaxdp.Gaussian(1e200), 1e300) == pytest.approx(5e-101, rel=1e-9, abs=0)
    bounds = jaxdp.delta_bounds(jaxdp.Gaussian(np.array([1e17, 1e50, 1e155])), -1.0)
    np.testing.assert_allclose(bounds.upper, -np.expm1(-1.0), rtol=1e-15)
    assert (bounds.lower <= -np.expm1(-1.0)).all()


def test_delta_without_a_release_is_rounded_outward():
    eps = np.array([-0.1, -0.2, -0.5, -1.0])
    lower, upper = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.Gaussian(1.0), 0), eps)
    exact = [-mp.expm1(mp.mpf(float(e))) for e in eps]
    assert all(low < true < high for low, true, high in zip(lower, exact, upper, strict=True))
