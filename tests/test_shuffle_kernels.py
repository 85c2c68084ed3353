"""Shuffle kernels against exact values: golden cases, exact rationals for small n, independent high precision."""

import functools
import json
import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import jaxdp
from jaxdp.hockey_stick.approximate_local import approximate_delta_upper, approximate_epsilon_upper
from jaxdp.hockey_stick.clones import (
    clones_delta_bounds,
    clones_delta_slopes,
    clones_delta_smooth,
    clones_epsilon_bounds,
    clones_epsilon_upper,
)
from jaxdp.hockey_stick.half_binomial import log_pmf_and_tail_ratio
from jaxdp.hockey_stick.two_point import two_point_delta_bounds, two_point_epsilon_bounds
from jaxdp.precision import compiler_options

GAP = 2e-6  # promised relative excess of epsilon at the default size
LOWER_GAP = 1e-5  # the lower side takes the next left end: about three times the upper side's excess
DELTA_GAP = 2e-9  # windows summed count by count: cut (1e-9) plus rounding
TWO_POINT_GAP = 1e-6  # no blocks: rounding margin times the search tolerance
GOLDEN = json.loads((Path(__file__).parent / "data" / "shuffle.json").read_text())["cases"]
KERNELS = {
    "clones": (
        functools.partial(clones_epsilon_bounds, rate="clones"),
        functools.partial(clones_delta_bounds, rate="clones"),
    ),
    "stronger": (
        functools.partial(clones_epsilon_bounds, rate="stronger"),
        functools.partial(clones_delta_bounds, rate="stronger"),
    ),
    "2rr": (two_point_epsilon_bounds, two_point_delta_bounds),
}


def column(cases, key):
    return np.array([float(case[key]) for case in cases])


def cases_of(family, kind):
    return [case for case in GOLDEN if case["family"] == family and case.get("kind", "eps") == kind]


def test_golden_file_has_every_family_used_here():
    assert {case["family"] for case in GOLDEN} >= {*KERNELS, "krr", "renyi_clones"}
    assert len(cases_of("clones", "eps")) >= 20


@pytest.mark.parametrize("family", KERNELS)
def test_golden_epsilon_is_enclosed_and_the_excess_is_small(family):
    cases = cases_of(family, "eps")
    bounds = KERNELS[family][0](column(cases, "n"), column(cases, "eps0"), column(cases, "delta"))
    exact = column(cases, "eps")
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper - exact <= (TWO_POINT_GAP if family == "2rr" else GAP) * exact).all()
    assert (exact - bounds.lower <= LOWER_GAP * exact).all()


@pytest.mark.parametrize("family", ["clones", "2rr"])
def test_golden_delta_is_enclosed(family):
    cases = cases_of(family, "delta_at_eps")
    bounds = KERNELS[family][1](column(cases, "n"), column(cases, "eps0"), column(cases, "eps"))
    exact = column(cases, "delta")
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper - bounds.lower <= DELTA_GAP * exact).all()


def exact_clones_delta(n, local, central, rate):
    """The pair's hockey-stick divergence by its definition, in rationals."""
    r = 1 / local if rate == "clones" else 2 / (local + 1)
    total, alpha = Fraction(0), local / (local + 1)
    for j in range(n):
        weight = math.comb(n - 1, j) * r**j * (1 - r) ** (n - 1 - j)
        heads = [Fraction(math.comb(j, i), 2**j) if 0 <= i <= j else Fraction(0) for i in range(-1, j + 2)]
        for i in range(j + 2):
            p = alpha * heads[i] + (1 - alpha) * heads[i + 1]
            q = (1 - alpha) * heads[i] + alpha * heads[i + 1]
            total += weight * max(p - central * q, Fraction(0))
    return total


def as_fraction_exp(value):
    with mpmath.workdps(40):
        return Fraction(mpmath.nstr(mpmath.exp(mpmath.mpf(float(value))), 38))


@pytest.mark.parametrize("rate", ["clones", "stronger"])
def test_delta_equals_the_definition_in_exact_rationals(rate):
    rng = np.random.default_rng(3)
    users = np.array([1, 1, 2, 2, 3, 4, 5, 6, 6, 6, 12, 25, 40], float)
    eps0 = np.concatenate([10.0 ** rng.uniform(-3, 1, 12), [15.0]])
    epsilon = eps0 * rng.uniform(0, 1, 13)
    epsilon[::5] = 0.0
    bounds = clones_delta_bounds(users, eps0, epsilon, rate=rate)
    exact = np.array([
        float(exact_clones_delta(int(n), as_fraction_exp(a), as_fraction_exp(b), rate))
        for n, a, b in zip(users, eps0, epsilon, strict=True)
    ])
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper - bounds.lower <= DELTA_GAP * exact).all()


@pytest.mark.parametrize("delta", [1e-40, 1e-150, 1e-300])
def test_deep_targets_agree_with_forty_digit_arithmetic(delta):
    users, eps0 = 400, 1.0
    upper = float(clones_epsilon_upper(np.array([users]), np.array([eps0]), np.array([delta]))[0])
    with mpmath.workdps(40):
        at, below = (mpmath_clones_delta(users, eps0, e) for e in (upper, upper * (1 - 1e-7)))
    assert at <= delta
    assert upper == eps0 or below > delta


def mpmath_clones_delta(n, eps0, epsilon):
    local, central = mpmath.exp(mpmath.mpf(eps0)), mpmath.exp(mpmath.mpf(epsilon))
    r, tau = 1 / local, (local * central - 1) / ((local - 1) * (1 + central))
    total = mpmath.mpf(0)
    for j in range(n):
        x = int(mpmath.floor(tau * (j + 1))) + 1
        if x > j + 1:
            continue
        tail = mpmath.fsum(mpmath.mpf(math.comb(j, i)) for i in range(x, j + 1)) / mpmath.mpf(2) ** j
        value = (local - central) / (local + 1) * mpmath.mpf(math.comb(j, x - 1)) / mpmath.mpf(2) ** j
        total += math.comb(n - 1, j) * r**j * (1 - r) ** (n - 1 - j) * (value - (central - 1) * tail)
    return total


def test_a_delta_below_the_smallest_double_is_not_reported_as_zero():
    far = np.array([1e6]), np.array([1.0]), np.array([0.9])
    assert 0 < clones_delta_bounds(*far).upper < 1e-300
    assert 0 < two_point_delta_bounds(*far).upper < 1e-300


def test_edges_are_exact():
    one = np.ones(1)
    assert clones_epsilon_bounds(one * 1000, one, one * 0) == (1.0, 1.0)
    assert clones_epsilon_bounds(one * 1000, one * 0, one * 1e-9) == (0.0, 0.0)
    assert clones_epsilon_bounds(one * 1000, one, one) == (0.0, 0.0)
    assert clones_delta_bounds(one * 1000, one, one) == (0.0, 0.0)
    assert clones_delta_bounds(one * 1000, one, one * (1 - 1e-9)).upper > 0


@pytest.mark.parametrize("point", [(0.0, 1.0), (2.5, 1.0), (np.nan, 1.0), (10.0, -1.0), (10.0, np.nan), (np.inf, 1.0)])
def test_invalid_points_give_the_vacuous_bound_never_nan(point):
    users, eps0 = (np.array([value]) for value in point)
    assert clones_delta_bounds(users, eps0, np.array([0.1])).upper == 1.0
    assert clones_epsilon_bounds(users, eps0, np.array([0.1])).upper == np.inf
    assert two_point_epsilon_bounds(users, eps0, np.array([0.1])).lower == 0.0


def test_huge_numbers_of_users_and_levels_stay_ordered():
    users = np.array([1e9, 1e10, 1e12, 1e14, 1e15])
    bounds = clones_epsilon_bounds(users, np.full(5, 8.0), np.full(5, 1e-12))
    assert (np.diff(bounds.upper) < 0).all() and (bounds.lower <= bounds.upper).all()
    floor = two_point_epsilon_bounds(users, np.full(5, 8.0), np.full(5, 1e-12)).lower
    stronger = clones_epsilon_bounds(users, np.full(5, 8.0), np.full(5, 1e-12), rate="stronger").upper
    assert (floor <= stronger).all() and (stronger <= bounds.upper).all()


def test_fewer_blocks_stay_on_the_safe_side_and_are_visibly_wider():
    users, eps0, delta = np.array([1e8]), np.array([2.0]), np.array([1e-9])
    fine = clones_epsilon_bounds(users, eps0, delta)
    coarse = clones_epsilon_bounds(users, eps0, delta, size=128)
    assert coarse.lower <= fine.lower <= fine.upper <= coarse.upper
    assert coarse.upper - coarse.lower > 4 * (fine.upper - fine.lower)


SLOPE_GAP = 1e-6  # promised accuracy of the derivatives
NUMBER = 60


def test_slopes_agree_with_high_precision_differences():
    eps0, epsilon = 1.5, 0.4
    _, by_epsilon, by_eps0 = clones_delta_slopes(np.array([NUMBER]), np.array([eps0]), np.array([epsilon]))
    with mpmath.workdps(40):
        exact_epsilon = mpmath.diff(lambda e: mpmath_clones_delta(NUMBER, eps0, e), epsilon, h=mpmath.mpf(10) ** -12)
        exact_eps0 = mpmath.diff(lambda e: mpmath_clones_delta(NUMBER, e, epsilon), eps0, h=mpmath.mpf(10) ** -12)
    assert float(by_epsilon[0]) == pytest.approx(float(exact_epsilon), rel=SLOPE_GAP)
    assert float(by_eps0[0]) == pytest.approx(float(exact_eps0), rel=SLOPE_GAP)


def test_smooth_delta_differentiates_under_a_trace():
    with jax.enable_x64(True):
        slopes = jax.jit(jax.grad(clones_delta_smooth.point, argnums=(1, 2)), compiler_options=compiler_options("cpu"))
        by_eps0, by_epsilon = slopes(1e5, 4.0, 0.1)
    _, slope_epsilon, slope_eps0 = clones_delta_slopes(np.array([1e5]), np.array([4.0]), np.array([0.1]))
    assert float(by_eps0) == pytest.approx(slope_eps0[0], rel=1e-12)  # same numbers, other compilation
    assert float(by_epsilon) == pytest.approx(slope_epsilon[0], rel=1e-12)


def test_approximate_epsilon_passes_its_own_total():
    users, eps0, delta = np.full(4, 1e5), np.full(4, 4.0), np.full(4, 1e-6)
    delta0 = np.array([0.0, 1e-14, 1e-13, 1e-12])
    epsilon = approximate_epsilon_upper(users, eps0, delta0, delta)
    assert (approximate_delta_upper(users, eps0, delta0, epsilon) <= delta).all()
    assert (np.diff(epsilon) > 0).all()
    assert approximate_epsilon_upper(users[:1], eps0[:1], np.array([1e-5]), delta[:1]) == np.inf


def tail_ratio(count, x):
    """P[Bin(count, 1/2) >= x] / P[Bin(count, 1/2) = x - 1] by its integral, 30 digits."""
    with mpmath.workdps(40):
        slope = 2 * mpmath.mpf(x) - 1 - count
        reach = min(mpmath.mpf(1), 180 / (slope + mpmath.sqrt(slope**2 + 180 * (count - 1))))

        def integrand(s):
            return mpmath.exp((x - 1) * mpmath.log1p(-s) + (count - x) * mpmath.log1p(s))

        return (count - x + 1) * mpmath.quad(integrand, mpmath.linspace(0, reach, 8))


@pytest.mark.parametrize("count", [10**4, 10**7, 10**10, 10**13])
def test_tails_of_many_coins_keep_their_digits(count):
    deviation = math.isqrt(count) // 2
    for deviations in (0, 4, 20):
        x = count // 2 + 2 + deviations * deviation
        with jax.enable_x64(True):
            _, ratio = log_pmf_and_tail_ratio(jnp.full(16, float(count)), jnp.full(16, float(x)), nodes=20)
        exact = tail_ratio(count, x)
        assert abs(mpmath.mpf(float(ratio[0])) / exact - 1) < 2e-13  # 5e-13 is what a term is charged


def test_one_round_of_trillions_of_users_is_that_of_the_gaussian_it_tends_to():
    users, eps0 = 4e12, 0.05
    mean = users * math.exp(-eps0)
    mu = 2 * math.tanh(eps0 / 2) / math.sqrt(mean)
    for deviations in (1.0, 3.0):
        epsilon = deviations * mu
        lower, upper = clones_delta_bounds(np.array([users]), np.array([eps0]), np.array([epsilon]))
        exact = jaxdp.delta(jaxdp.Gaussian(1 / mu), epsilon=epsilon)
        assert abs(lower[0] / exact - 1) < 1e-5 and abs(upper[0] / exact - 1) < 1e-5
