"""k-ary randomized response and Renyi divergence of the shuffle model against exact values."""

import itertools
import json
import math
from pathlib import Path

import jax
import mpmath
import numpy as np
import pytest

from jaxdp.hockey_stick.krr import krr_delta_bounds, krr_delta_smooth, krr_epsilon_bounds
from jaxdp.precision import compiler_options
from jaxdp.renyi.shuffled import clones_renyi_bounds, krr_renyi_upper
from jaxdp.shuffle import krr_epsilon_closed_form

GOLDEN = json.loads((Path(__file__).parent / "data" / "shuffle.json").read_text())["cases"]
KRR_GAP = 1e-4  # blocks of counts, 512 x 48; the worst golden case is 9e-5
KRR_FIT_GAP = 2e-6  # the window fits: only the cut (1e-9) and the search remain
RENYI_GAP = 2e-3  # blocks, 320 x 160; order 256 at n = 10000 is 1.4e-3
RENYI_FIT_GAP = 1e-10  # the window fits: margin 1e-11 and cut 1e-13
EXACT_SUM = 1e-12  # of an exact sum in double arithmetic
SLOPE_GAP = 1e-5  # of a central difference with step 1e-5 and of the estimate itself


def column(cases, key):
    return np.array([float(case[key]) for case in cases])


def one_by_one(kernel, *columns):
    """Single points share the one compilation that the canary made."""
    rows = [kernel(*(np.array([value]) for value in row)) for row in np.broadcast(*columns)]
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def krr_cases():
    cases = [case for case in GOLDEN if case["family"] == "krr"]
    return [column(cases, key) for key in ("n", "eps0", "k", "delta", "eps")]


def test_golden_krr_epsilon_is_enclosed_and_below_the_closed_form():
    users, eps0, kinds, delta, exact = krr_cases()
    lower, upper = one_by_one(krr_epsilon_bounds, users, eps0, kinds, delta)
    assert (lower <= exact).all() and (exact <= upper).all()
    assert (upper - exact <= KRR_GAP * exact).all() and (exact - lower <= KRR_GAP * exact).all()
    fits = kinds == 2
    assert fits.any() and (upper - exact <= KRR_FIT_GAP * exact)[fits].all()
    assert (exact <= krr_epsilon_closed_form(eps0, kinds, users, delta)).all()


def exact_krr_delta(n, local, kinds, central):
    """(1/n) E (u a - v b - (E-1) c)_+ by enumeration of the multinomial law."""
    p, u, v = 1 / (local + kinds - 1), local - central, local * central - 1
    total = 0.0
    for a, b, c in itertools.product(range(n + 1), repeat=3):
        if a + b + c > n or (kinds == 2 and c > 0):
            continue
        ways = math.factorial(n) / math.prod(map(math.factorial, (a, b, c, n - a - b - c)))
        weight = ways * p ** (a + b) * ((kinds - 2) * p) ** c * (1 - kinds * p) ** (n - a - b - c)
        total += weight * max(u * a - v * b - (central - 1) * c, 0.0)
    return total / n


def test_krr_delta_equals_the_enumerated_definition_for_few_users():
    rng = np.random.default_rng(5)
    users, kinds = np.array([1, 2, 3, 4, 5, 6, 6], float), np.array([3, 2, 4, 3, 10, 100, 2], float)
    eps0 = rng.uniform(0.05, 4.0, 7)
    epsilon = eps0 * rng.uniform(0, 1, 7)
    epsilon[3] = 0.0
    bounds = krr_delta_bounds(users, eps0, kinds, epsilon)
    exact = np.array([
        exact_krr_delta(int(n), math.exp(a), int(k), math.exp(e))
        for n, a, k, e in zip(users, eps0, kinds, epsilon, strict=True)
    ])
    assert (bounds.lower <= exact * (1 + EXACT_SUM)).all() and (exact <= bounds.upper * (1 + EXACT_SUM)).all()
    assert (bounds.upper - bounds.lower <= KRR_FIT_GAP * exact).all()


def test_krr_next_to_a_large_eps0_is_enclosed():
    """The threshold of the likelihood ratio is within rounding of all heads from eps0 = 20 on."""
    rng = np.random.default_rng(11)
    points = 24
    users, kinds = rng.integers(1, 6, points), rng.choice([2, 3, 10, 1000], points)
    eps0 = np.concatenate([rng.uniform(10, 60, points - 1), [20.0]])
    epsilon = eps0 * (1 - 10 ** rng.uniform(-12, 0, points))
    with mpmath.workdps(60):
        exact = [
            exact_krr_delta(int(n), mpmath.exp(mpmath.mpf(a)), int(k), mpmath.exp(mpmath.mpf(e)))
            for n, a, k, e in zip(users, eps0, kinds, epsilon, strict=True)
        ]
        found = krr_delta_bounds(users.astype(float), eps0, kinds.astype(float), epsilon)
        for value, lower, upper in zip(exact, found.lower, found.upper, strict=True):
            assert mpmath.mpf(lower) <= value <= mpmath.mpf(upper) <= value * (1 + KRR_FIT_GAP)
        # rounded up, the target belongs to an epsilon just below; rounded down, to one just above
        targets = np.array([float(value) for value in exact])
        found = krr_epsilon_bounds(users.astype(float), eps0, kinds.astype(float), targets)
        assert (found.lower <= epsilon * (1 + EXACT_SUM)).all()
        assert (epsilon <= found.upper * (1 + EXACT_SUM)).all() and (found.upper <= eps0).all()


def test_krr_bound_holds_where_the_variation_ratio_bound_is_too_small():
    # Five reports, all data equal: delta is 0.0178031 to its digits; the published table says 0.0000826.
    users, eps0, kinds, epsilon = np.array([5.0] * 7), np.log(8.0), np.array([4.0] * 7), np.log(7.3)
    upper = krr_delta_bounds(users, np.full(7, eps0), kinds, np.full(7, epsilon)).upper
    assert (upper >= 0.017803).all()


def test_krr_extremes_are_ordered_and_edges_exact():
    users, eps0 = np.array([1e9, 1e9, 1e6, 1e9]), np.array([4.0, 2.0, 1.0, 8.0])
    kinds, delta = np.array([1e3, 1e6, 2.0, 50.0]), np.array([1e-6, 1e-9, 1e-200, 1e-12])
    lower, upper = one_by_one(krr_epsilon_bounds, users, eps0, kinds, delta)
    assert (0 < lower).all() and (lower <= upper).all() and (upper - lower <= 5e-3 * upper).all()
    lower, upper = one_by_one(krr_epsilon_bounds, [10.0, 10.0, 10.0], [1.0, 0.0, 1.0], 3.0, [0.0, 0.1, 1.0])
    assert (lower == [1.0, 0.0, 0.0]).all() and (upper == [1.0, 0.0, 0.0]).all()


@pytest.mark.parametrize("point", [(0.5, 1.0, 3.0), (10.0, np.nan, 3.0), (10.0, 1.0, 1.0), (10.0, 1.0, 2.5)])
def test_invalid_krr_points_give_the_vacuous_bound_never_nan(point):
    assert krr_epsilon_bounds(*(np.array([value]) for value in (*point, 0.1))).upper == np.inf


def test_krr_slopes_agree_with_differences():
    # Every window fits here, so that the values have no jumps of their own.
    step, at = 1e-5, (60.0, 1.0, 3.0, 0.3)
    with jax.enable_x64(True):
        both = jax.jit(
            jax.value_and_grad(krr_delta_smooth.point, argnums=(1, 3)), compiler_options=compiler_options("cpu")
        )
        _, slopes = both(*at)
        for place, slope in zip((1, 3), slopes, strict=True):
            up, down = (both(*(x + sign * step * (i == place) for i, x in enumerate(at)))[0] for sign in (1, -1))
            assert float(slope) == pytest.approx(float(up - down) / (2 * step), rel=SLOPE_GAP)


def test_closed_form_is_above_the_exact_bound_on_random_points():
    rng = np.random.default_rng(1)
    users, kinds = np.floor(10 ** rng.uniform(1.5, 9, 60)), np.floor(2 * 10 ** rng.uniform(0, 4.5, 60))
    eps0, delta = 10 ** rng.uniform(-2, 1, 60), 10 ** rng.uniform(-12, -0.5, 60)
    closed = krr_epsilon_closed_form(eps0, kinds, users, delta)
    holds = closed < eps0
    _, upper = one_by_one(krr_epsilon_bounds, *(item[holds] for item in (users, eps0, kinds, delta)))
    assert holds.sum() >= 20 and (closed[holds] >= upper).all()


def test_golden_renyi_divergence_is_enclosed():
    cases = [case for case in GOLDEN if case["family"] == "renyi_clones"]
    users, eps0, order = (column(cases, key) for key in ("n", "eps0", "alpha"))
    lower, upper = one_by_one(clones_renyi_bounds, users, eps0, order)
    exact = column(cases, "value")
    rounded = np.array([1e-11 if case.get("digits") else 0.0 for case in cases])  # golden values of 11 digits
    assert (lower <= exact * (1 + rounded)).all() and (exact <= upper * (1 + rounded)).all()
    assert (upper - exact <= RENYI_GAP * exact).all() and (exact - lower <= RENYI_GAP * exact).all()
    fits = users <= 300
    assert (upper - exact <= RENYI_FIT_GAP * exact)[fits].all()


def test_renyi_bounds_stay_tight_for_many_users_and_below_eps0():
    users, eps0 = np.array([1e6, 1e9, 1e12, 1e7]), np.array([1.0, 4.0, 8.0, 2.0])
    lower, upper = one_by_one(clones_renyi_bounds, users, eps0, np.array([2.0, 64.0, 1.001, 1000.0]))
    assert (0 < lower).all() and (lower <= upper).all() and (upper - lower <= RENYI_GAP * upper).all()
    lower, upper = one_by_one(clones_renyi_bounds, [1e5, 10.0, 10.0, 10.0], [1.0, 0.0, np.nan, 1.0], [1e5, 2, 2, 0.5])
    assert 0.5 < lower[0] <= upper[0] <= 1.0
    assert upper[1] == 0.0 and (upper[2:] == np.inf).all()


def test_krr_renyi_is_the_clones_bound_and_infinite_for_one_category():
    upper = krr_renyi_upper(np.full(2, 300.0), np.full(2, 2.0), np.array([5.0, 1.0]), np.full(2, 16.0))
    assert upper[0] == pytest.approx(0.64570993125113142, rel=RENYI_FIT_GAP) and upper[1] == np.inf
