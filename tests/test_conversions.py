"""jaxdp.conversions: every bound is on the safe side of closed forms, exact rationals and independent routes."""

from fractions import Fraction

import jax
import mpmath as mp
import numpy as np
import pytest
from exact import gaussian_delta, gaussian_delta_in_digits
from scipy.stats import norm

import jaxdp
from jaxdp import conversions as cv
from jaxdp.conversions.profile import cell_bounds

# Outward rounding of the certified functions, with room for SciPy's own error in the reference.
ROUNDING = 1e-11
# Orders below, at and above 1. `curve_at` gives other curves the same length, so that one program serves all.
ORDERS = np.concatenate([[0.5, 0.75, 1.0], 1 + np.geomspace(0.05, 60, 9)])
EPS_GRID = np.linspace(0.0, 10.0, 400)
SMALLEST = np.finfo(float).tiny


def exact_delta(pair, eps):
    """Hockey-stick divergence of the pair's float64 masses at the float64 e^eps, in rationals."""
    a = Fraction(float(np.exp(eps)))
    return float(sum(max(Fraction(float(p)) - a * Fraction(float(q)), 0) for p, q in zip(pair.p, pair.q, strict=True)))


@mp.workdps(50)
def gaussian_truth(eps, mu):
    return gaussian_delta_in_digits(eps, mu)


@mp.workdps(50)
def response_truth(local, eps):
    """The profile of binary randomized response, in 50 digits."""
    a, top = mp.exp(mp.mpf(float(eps))), mp.exp(mp.mpf(local))
    return max(top - a, 0) / (1 + top) + max(1 - top * a, 0) / (1 + top)


@mp.workdps(50)
def discrete_truth(p, q, eps):
    a = mp.exp(mp.mpf(float(eps)))
    return sum(max(mp.mpf(float(x)) - a * mp.mpf(float(y)), 0) for x, y in zip(p, q, strict=True))


def curve_at(orders, renyi):
    """The curve, its last point repeated up to the length of `ORDERS`."""
    more = ORDERS.size - np.size(orders)
    return np.pad(orders, (0, more), "edge"), np.pad(renyi, (0, more), "edge")


def rounded_up(value):
    return float(value) if mp.mpf(float(value)) >= value else float(np.nextafter(float(value), np.inf))


# RDP ------------------------------------------------------------------------------------------------------------


def test_cks_at_the_best_order_is_the_published_multiple_of_the_gaussian_delta():
    # notebooks/proofs/profiles.md, section 3: at mu = 1, eps = 4
    ratio = cv.delta_from_rdp(None, lambda a: a / 2, 4.0) / gaussian_delta(4.0, 1)
    assert abs(ratio - 4.155) < 1e-3


def test_cks_epsilon_is_the_published_one_and_classic_is_never_smaller():
    cks = cv.epsilon_from_rdp(None, lambda a: a / 2, 1e-5)
    classic = cv.epsilon_from_rdp(None, lambda a: a / 2, 1e-5, method="classic")
    assert abs(cks - 4.728387374) < 1e-8
    # closed form of the classic minimum: mu^2/2 + mu sqrt(2 log(1/delta))
    assert abs(classic - (0.5 + np.sqrt(2 * np.log(1e5)))) < 1e-6
    assert classic > cks


@pytest.mark.slow
def test_a_traced_target_that_is_nan_gets_the_vacuous_bound():
    curve = [2.0, 8.0], np.array([0.25, 1.0])
    with jax.enable_x64(True):
        for convert, vacuous in ((cv.optimal_delta_from_rdp, 1.0), (cv.optimal_epsilon_from_rdp, np.inf)):
            assert jax.jit(lambda target, convert=convert: convert(*curve, target))(np.nan) == vacuous
        assert jax.jit(lambda rate: cv.tradeoff_from_rdp(*curve, rate))(np.nan) == 0.0


def test_epsilon_and_delta_conversions_are_inverse_at_a_fixed_order():
    eps = cv.epsilon_from_rdp([3.0], [1.5], [1e-3, 1e-9])
    back = cv.delta_from_rdp([3.0], np.full((2, 1), 1.5), eps)
    np.testing.assert_allclose(back, [1e-3, 1e-9], rtol=1e-11)
    assert (back <= np.array([1e-3, 1e-9]) * (1 + 1e-12)).all()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_for_users")  # without optimisation a row takes half a second
@pytest.mark.parametrize("convert, room", [(cv.epsilon_from_rdp, 1e-8), (cv.optimal_epsilon_from_rdp, 2e-5)])
def test_mass_at_infinity_comes_off_the_budget_and_can_use_it_up(convert, room):
    curve = curve_at([2.0, 8.0], [1.0, 4.0])
    least = convert(*curve, 9e-5)  # room: the optimal conversion also counts that the finite part has mass 1 - 1e-5
    assert least * (1 - 1e-8) <= convert(*curve, 1e-4, infinity_mass=1e-5) <= least * (1 + room)
    assert convert(*curve, 1e-5, infinity_mass=1e-5) == np.inf


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_for_users")
def test_conversions_of_the_finite_part_bound_a_pair_with_mass_at_infinity():
    rng = np.random.default_rng(0)
    orders = 1 + np.geomspace(1e-4, 1.0, ORDERS.size)
    curves, deltas, masses = [], [], np.array([1e-6, 1e-4, 6e-4, 5e-3, 0.1, 0.4])
    for mass in masses:
        p, q = rng.dirichlet(np.ones(6), 2)
        p = np.append(p * (1 - mass), mass)
        curves.append(jaxdp.log_mgf(jaxdp.DiscretePair(p, np.append(q, 0.0)), orders - 1).real / (orders - 1))
        deltas.append(np.maximum(p - np.exp(1.0) * np.append(q, 0.0), 0.0).sum())
    curves, deltas = np.maximum(curves, 0.0), np.array(deltas)
    for method in (cv.delta_from_rdp, cv.optimal_delta_from_rdp):
        assert (method(orders, curves, 1.0, infinity_mass=masses) >= deltas).all()
    assert (cv.optimal_epsilon_from_rdp(orders, curves, deltas, infinity_mass=masses) >= 1 - 1e-9).all()


def test_infinite_curve_and_extreme_targets_give_the_vacuous_or_the_exact_answer_and_no_nan():
    assert cv.epsilon_from_rdp([2.0, 3.0], [np.inf, np.inf], 1e-5) == np.inf
    assert cv.delta_from_rdp([2.0], [np.inf], [1.0, np.inf]).tolist() == [1.0, 1.0]
    assert cv.delta_from_rdp([2.0], [1.0], [-5.0, np.inf]).tolist() == [1.0, 0.0]
    assert cv.epsilon_from_rdp([2.0], [1.0], [0.0, 1.0])[0] == np.inf
    deltas = cv.optimal_delta_from_rdp(ORDERS, ORDERS / 2, [-np.inf, -800.0, -1.0, 0.0, 50.0, 800.0, np.inf])
    assert np.isfinite(deltas).all() and (np.diff(deltas) <= 0).all() and deltas[0] == 1.0 and deltas[-1] == 0.0


def test_delta_too_small_for_a_normal_number_is_not_printed_as_zero():
    eps, curve = [710.0, 2000.0], curve_at([2.0], [1.0])
    for convert in (cv.delta_from_rdp, cv.optimal_delta_from_rdp):
        found = convert(*curve, eps)
        np.testing.assert_allclose(found, SMALLEST, rtol=1e-12)
        assert (found >= SMALLEST).all()
        assert convert(*curve, np.inf, infinity_mass=1e-310) >= 1e-310


def test_optimal_conversion_lies_between_the_exact_delta_and_cks_at_the_same_orders():
    eps = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 10.0])
    both = cv.optimal_delta_from_rdp(ORDERS, ORDERS / 2, eps, reverse_renyi=ORDERS / 2)
    one = cv.optimal_delta_from_rdp(ORDERS, ORDERS / 2, eps)
    above = ORDERS > 1
    cks = cv.delta_from_rdp(ORDERS[above], np.tile(ORDERS[above] / 2, (6, 1)), eps)
    assert (both >= gaussian_delta(eps, 1)).all()
    assert (both <= one * (1 + 1e-6)).all() and (one <= cks * (1 + 1e-6)).all()
    assert both[0] < 0.85 * cks[0]


def test_optimal_conversion_is_not_below_the_two_point_law_that_has_this_curve():
    """The curve of randomized response at all orders: its own pair has this curve, so the bound is not below delta."""
    p = 0.8
    pair = jaxdp.DiscretePair([p, 1 - p], [1 - p, p])
    curve = np.array([cv_renyi(pair, a) for a in ORDERS])
    eps = np.array([0.0, 0.7, 1.2])
    exact = p - np.exp(eps) * (1 - p)
    bound, of_less = (cv.optimal_delta_from_rdp(ORDERS, c, eps, reverse_renyi=c) for c in (curve, 0.999 * curve))
    assert (bound >= exact).all() and (bound <= exact * (1 + 3e-4)).all()
    assert (of_less < exact).all()  # another curve than its own, a thousandth smaller


def cv_renyi(pair, a):
    p, q = pair.p, pair.q
    return np.sum(p * np.log(p / q)) if a == 1 else np.log(np.sum(p**a * q ** (1 - a))) / (a - 1)


def test_reverse_curve_of_an_asymmetric_pair_must_be_its_own():
    """Negative control: with R(P, Q) in place of R(Q, P) the bound is below the exact delta."""
    pair = jaxdp.DiscretePair([0.9, 0.1], [0.99, 0.01])
    swapped = jaxdp.DiscretePair(pair.q, pair.p)
    ahead, back = (np.array([cv_renyi(x, a) for a in ORDERS]) for x in (swapped, pair))
    exact = 0.99 - 0.9
    assert cv.optimal_delta_from_rdp(ORDERS, ahead, 0.0, reverse_renyi=back) >= exact
    assert cv.optimal_delta_from_rdp(ORDERS, ahead, 0.0, reverse_renyi=ahead) < exact


def test_optimal_epsilon_meets_its_target_and_a_smaller_one_does_not():
    eps = cv.optimal_epsilon_from_rdp(ORDERS, ORDERS / 2, 1e-5)
    at, below = cv.optimal_delta_from_rdp(ORDERS, ORDERS / 2, [eps, eps * (1 - 1e-6)])
    assert at <= 1e-5 * (1 + 1e-9) < below


def test_tradeoff_from_rdp_is_below_the_gaussian_one_and_above_the_trivial_one():
    x = np.array([0.0, 1e-6, 0.1, 0.5, 1.0])
    bound = cv.tradeoff_from_rdp(ORDERS, ORDERS / 2, x, reverse_renyi=ORDERS / 2)
    exact = norm.cdf(norm.isf(x) - 1)
    assert (bound <= exact).all() and bound[0] > 0.999 and bound[2] > 0.4 and bound[-1] == 0.0


def test_conversions_trace_and_differentiate_with_x64_and_refuse_without():
    def eps(scale):
        return cv.epsilon_from_rdp(ORDERS[3:], scale * ORDERS[3:], 1e-5)

    with pytest.raises(RuntimeError, match="x64"):
        jax.jit(eps)(0.5)
    with jax.enable_x64(True):
        value, slope = jax.jit(jax.value_and_grad(eps))(0.5)
        assert np.isclose(value, eps(0.5), rtol=1e-12)
        assert np.isclose(slope, (eps(0.5 + 1e-6) - eps(0.5 - 1e-6)) / 2e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("convert, target", [(cv.epsilon_from_rdp, 1e-6), (cv.delta_from_rdp, 3.0)])
def test_a_conversion_that_searches_the_orders_of_a_curve_traces_and_differentiates(convert, target):
    def bound(rho, at):
        return convert(None, lambda order: rho * order, at)

    def by_numpy(rho):
        return convert(None, lambda order: rho * np.asarray(order), target)

    with jax.enable_x64(True):
        slopes = jax.grad(bound, argnums=(0, 1))(0.5, target)
        compiled = jax.jit(bound)(0.5, np.array([target, 2 * target]))
        alone = jax.grad(lambda at: convert(None, lambda order: 0.5 * np.log(order), at))(target)
    h = 1e-4 * target
    np.testing.assert_allclose(slopes[0], (by_numpy(0.5 + 1e-5) - by_numpy(0.5 - 1e-5)) / 2e-5, rtol=1e-4)
    np.testing.assert_allclose(slopes[1], (bound(0.5, target + h) - bound(0.5, target - h)) / (2 * h), rtol=1e-4)
    np.testing.assert_allclose(compiled, bound(0.5, np.array([target, 2 * target])), rtol=1e-9)
    assert np.isfinite(alone)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cv.epsilon_from_rdp([1.0], [1.0], 1e-5), "orders must be finite and > 1, got 1.0"),
        (lambda: cv.epsilon_from_rdp([2.0], [np.nan], 1e-5), "renyi must be >= 0"),
        (lambda: cv.epsilon_from_rdp([2.0, 3.0], [1.0], 1e-5), "equally long last axes, one entry per order"),
        (lambda: cv.epsilon_from_rdp([2.0], [1.0], 1.5), "delta must be in"),
        (lambda: cv.epsilon_from_rdp([2.0], [1.0], 0.1, method="best"), "method must be one of"),
        (lambda: cv.delta_from_rdp([2.0], [1.0], np.nan), "epsilon must be a real number"),
        (lambda: cv.pair_from_profile([-1.0], [0.1]), "at least 1 - e"),
        (lambda: cv.pair_from_profile([1.0, -1.0], [0.1, 0.2]), r"got 0.2 at index \[1\]. There epsilon is -1.0"),
        (lambda: cv.pair_from_profile([1.0, 0.0, 1.0], [0.1, 0.1, 0.1]), r"distinct, got 1.0 at index \[2\]"),
        (
            lambda: cv.pair_from_profile([1.0, 0.5, 0.0], [0.3, 0.2, 0.1]),
            r"nonincreasing in epsilon, got 0.3 at index \[0\]",
        ),
        (lambda: cv.pair_from_tradeoff([0.0, 0.9], [1.0, 0.1]), "got 0.0 to 0.9 and the end 0.1"),
        (lambda: cv.gdp_mu_from_profile([1.0, 0.5], [0.1, 0.2]), "increasing"),
        (lambda: cv.cut_renyi(2.5, 1.0, 0.1, 3.0), "whole number"),
        (lambda: cv.grid_pairs([0.9, 0.1], [0.1, 0.9], [-1.0, 0.0, 1.0]), "at the two edges of its cell"),
        (lambda: cv.delta_from_tradeoff(1.0, [0.0, 0.5], [1.0, 0.2]), "from 0 to 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_cell_bounds_hold_for_concave_functions_and_not_beyond():
    """Negative control: a spike inside a cell, which concavity excludes, is above the bound."""
    t = np.array([0.0, 0.4, 0.9, 1.5, 2.0])
    fine = np.linspace(0, 2, 2001)
    cell = np.clip(np.searchsorted(t, fine) - 1, 0, 3)
    for shape in (lambda x: -((x - 1.1) ** 2), lambda x: -np.abs(x - 0.6), np.sqrt):
        with jax.enable_x64(True):
            upper = np.asarray(cell_bounds(t, shape(t), shape(t)))
        assert (shape(fine) <= upper[cell] + 1e-14).all()
    spiky = np.where(np.abs(fine - 1.2) < 0.05, 9.0, 0.0)
    with jax.enable_x64(True):
        assert (spiky > np.asarray(cell_bounds(t, 0 * t, 0 * t))[cell]).any()


# Profiles -------------------------------------------------------------------------------------------------------


def test_pair_from_profile_dominates_at_every_ratio_and_is_close_between_the_points():
    pair = cv.pair_from_profile(EPS_GRID, gaussian_delta(EPS_GRID, 1))
    eps = np.concatenate([-EPS_GRID[::57], EPS_GRID[::57], [0.013, 1.234, 5.4321]])
    bound = np.array([exact_delta(pair, e) for e in eps])
    exact = gaussian_delta(eps, 1)
    assert (bound >= exact).all()
    assert (bound <= exact * 1.01).all()


def test_pair_from_a_bound_that_is_not_convex_uses_its_convex_minorant():
    """The bump at the middle point is above a chord, so it is ignored: no negative mass, sums of 1."""
    eps, delta = np.array([0.0, 1.0, 2.0]), np.array([0.3, 0.29, 0.0])
    pair = cv.pair_from_profile(eps, delta)
    chord = 0.3 * (np.exp(2) - np.exp(1)) / (np.exp(2) - 1)
    assert np.isclose(exact_delta(pair, 1.0), chord, rtol=1e-9)
    assert (pair.p >= 0).all() and (pair.q >= 0).all()
    assert np.isclose(pair.p.sum(), 1, atol=1e-14) and np.isclose(pair.q.sum(), 1, atol=1e-14)


def test_bound_with_a_downward_kink_at_one_is_made_a_true_profile_first():
    """B(a) = (1.1 - a)_+ composed as it stands gives delta(0) = -0.01 after two steps.

    See notebooks/proofs/profiles.md, section 2. Its minorant is pure log(1.1)-DP, whose worst pair is randomized
    response: delta(0) = 0.1 / 2.1.
    """
    pair = cv.pair_from_profile([0.0, np.log(1.1)], [0.1, 0.0])
    assert np.isclose(exact_delta(pair, 0.0), 0.1 / 2.1, rtol=1e-9)
    p, q = np.outer(pair.p, pair.p).ravel(), np.outer(pair.q, pair.q).ravel()
    # exact for two rounds: (r / (1 + r))^2 - (1 / (1 + r))^2 with r = e^eps0 = 1.1
    assert np.isclose(np.maximum(p - q, 0).sum(), (1.1**2 - 1) / 2.1**2, rtol=1e-9)


def test_asymmetric_pair_from_profile_needs_and_uses_the_points_below_one():
    eps = np.linspace(-6, 6, 240)
    q = 0.2

    def remove(e):
        return cv.sampled_delta(lambda x: gaussian_delta(x, 1), e, q, "remove")

    pair = cv.pair_from_profile(eps, remove(eps), symmetric=False)
    for e in (-3.0, -0.2, 0.0, 0.3, 2.0):
        assert remove(e) * (1 - 1e-14) <= exact_delta(pair, e) <= remove(e) * 1.02


@pytest.mark.parametrize("mu", [1e-8, 1e-6, 1.0])
def test_pair_from_profile_dominates_however_small_the_losses_and_from_both_orders(mu):
    grid = np.arange(1, 9) * mu
    pair = cv.pair_from_profile(grid, [rounded_up(gaussian_truth(e, mu)) for e in grid])
    for e in np.concatenate([-grid, grid]):
        truth = gaussian_truth(e, mu)
        for p, q in ((pair.p, pair.q), (pair.q, pair.p)):
            assert truth <= discrete_truth(p, q, e)
        assert discrete_truth(pair.p, pair.q, e) <= truth * (1 + 1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_pair_from_profile_dominates_on_a_grid_whose_spacing_is_near_roundoff(symmetric):
    grid = 1e-3 - 1e-14 * np.arange(40)
    pair = cv.pair_from_profile(grid, [rounded_up(response_truth(1e-3, e)) for e in grid], symmetric=symmetric)
    assert all(response_truth(1e-3, e) <= discrete_truth(pair.p, pair.q, e) for e in grid)


def test_last_point_of_a_profile_is_charged_as_mass_at_infinity():
    pair = cv.pair_from_profile([0.0, 1.0], [0.2, 0.05])
    assert np.isclose(pair.p[pair.q == 0].sum(), 0.05, rtol=1e-9)
    assert cv.renyi_from_profile(2.0, [0.0, 1.0], [0.2, 0.05]) == np.inf
    assert (cv.renyi_from_profile([0.5, 2.0], [0.0], [1.0]) == np.inf).all()


def test_renyi_from_profile_is_above_the_exact_curve_and_close():
    orders = np.array([0.5, 2.0, 4.0])
    eps = np.append(EPS_GRID, 14.0)
    delta = np.append(gaussian_delta(EPS_GRID, 1), 0.0)
    ratio = cv.renyi_from_profile(orders, eps, delta) / (orders / 2)
    assert (ratio >= 1).all() and (ratio < 1.001).all()


def test_swap_twice_is_the_identity_and_the_gaussian_is_its_own_swap():
    assert np.isclose(cv.swapped_delta(-1.0, gaussian_delta(1.0, 1)), gaussian_delta(-1.0, 1), rtol=1e-12)
    assert np.isclose(cv.swapped_delta(0.7, cv.swapped_delta(-0.7, 0.1)), 0.1, rtol=1e-12)


def test_delta_from_cdfs_needs_the_left_limit_at_an_atom():
    """Randomized response at eps = 0.9 log 3 and on its atom; with the right limit the atom's mass is lost."""
    p, atom = 0.75, np.log(3.0)
    assert np.isclose(cv.delta_from_cdfs(0.9 * atom, 1 - p, 1 - p), p - 3**0.9 * (1 - p), rtol=1e-12)
    assert cv.delta_from_cdfs(atom, 1.0, 0.0) < 1e-15
    with_right_limit = cv.delta_from_cdfs(0.0, norm.cdf(-0.5), norm.cdf(-0.5))
    assert np.isclose(with_right_limit, gaussian_delta(0.0, 1), rtol=1e-12)


def test_loss_tail_from_delta_encloses_the_gaussian_tail():
    eps = np.linspace(0, 6, 60)
    delta = gaussian_delta(eps, 1)
    bounds = cv.loss_tail_from_delta(eps, delta, delta)
    exact = norm.sf(eps - 0.5)
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper[1:-1] / bounds.lower[1:-1] < 2).all()


def test_tradeoff_and_profile_enclose_each_other_and_the_gaussian_truth():
    x = np.concatenate([[0], norm.cdf(np.linspace(-7, 7, 500)), [1]])
    f = norm.cdf(norm.isf(x) - 1)
    eps = np.array([-1.0, 0.0, 1.0, 3.0])
    steps, chords = cv.delta_from_tradeoff(eps, x, f), cv.delta_from_tradeoff(eps, x, f, exact=True)
    exact = gaussian_delta(eps, 1)
    for bounds in (steps, chords):
        assert (bounds.lower <= exact * (1 + ROUNDING)).all() and (exact <= bounds.upper * (1 + ROUNDING)).all()
    assert (chords.upper <= steps.upper).all() and (chords.upper / exact < 1.01).all()
    lines = cv.tradeoff_from_delta(x, EPS_GRID, gaussian_delta(EPS_GRID, 1), symmetric=True)
    assert (lines <= f + 1e-15).all() and np.max(f - lines) < 1e-4


def test_chords_hold_where_the_cells_are_as_narrow_as_the_rounding_of_the_values():
    eps = np.array([0.0, 0.05, -0.05])
    for gap in (3.3e-16, 1e-13):
        x = np.array([0.0, 0.1, 1 - gap, 1.0])
        with mp.workdps(50):
            top = mp.exp(mp.mpf(0.1))
            f = [float(max(1 - top * mp.mpf(v), (1 - mp.mpf(v)) / top, 0)) for v in x]
        bounds = cv.delta_from_tradeoff(eps, x, f, exact=True)
        truth = np.array([float(response_truth(0.1, e)) for e in eps])
        assert (truth <= bounds.upper).all() and (bounds.lower <= truth).all()


def test_delta_from_tradeoff_where_e_to_the_epsilon_overflows():
    for exact in (False, True):
        bounds = cv.delta_from_tradeoff([-1e4, 800.0], [0.0, 0.5, 1.0], [0.9, 0.4, 0.0], exact=exact)
        assert bounds.lower[1] <= 0.1 <= bounds.upper[1] and bounds.upper[0] == 1.0


def test_pair_from_tradeoff_is_dominated_and_its_characteristic_function_is_that_of_f():
    x = np.concatenate([[0], norm.cdf(np.linspace(-8, 8, 600)), [1]])
    pair = cv.pair_from_tradeoff(x, norm.cdf(norm.isf(x) - 1))
    assert 0.999 * gaussian_delta(1.0, 1) < exact_delta(pair, 1.0) <= gaussian_delta(1.0, 1)
    phi = np.exp(jaxdp.log_mgf(pair, [0.5j, 1j], relation="remove"))
    expected = np.exp([1j * t * (1j * t + 1) / 2 for t in (0.5, 1.0)])
    np.testing.assert_allclose(phi, expected, atol=1e-3)


# Sampling -------------------------------------------------------------------------------------------------------


def test_sampled_delta_reproduces_the_exact_single_round_values():
    # exact: sigma 0.5, q 0.3, in 40 digits by the closed forms of notebooks/proofs/profiles.md, section 1
    def base(e):
        return gaussian_delta(e, 2.0)

    assert np.isclose(cv.sampled_delta(base, 2.0, 0.3, "remove"), 0.051320182463279575, rtol=ROUNDING)
    assert np.isclose(cv.sampled_delta(base, 0.2, 0.3, "add"), 0.075861118221064761, rtol=ROUNDING)
    assert np.isclose(cv.sampled_delta(base, -1.0, 0.3, "remove"), -np.expm1(-1.0), rtol=1e-14)
    assert (cv.sampled_delta(base, [0.0, 1.0], 0.0, "replace_one") == 0).all()
    assert np.isclose(cv.sampled_delta(base, 1.0, 1.0, "replace_one"), base(1.0), rtol=ROUNDING)


@pytest.mark.parametrize("relation", ["remove", "add", "replace_one"])
def test_sampled_pair_dominates_its_round(relation):
    def base(e):
        return gaussian_delta(e, 1.0)

    eps = np.linspace(-8, 8, 1600) if relation != "replace_one" else EPS_GRID
    pair = cv.sampled_pair(base, eps, 0.2, relation)
    for e in (-1.0, 0.0, 0.1, 1.0, 3.0):
        exact = cv.sampled_delta(base, e, 0.2, relation)
        assert exact * (1 - 1e-12) <= exact_delta(pair, e) <= exact * 1.02 + 1e-12


@pytest.mark.parametrize("relation", ["add", "remove"])
def test_sampled_delta_of_randomized_response_is_not_below_the_truth(relation):
    """Rates up to 1, where rounding destroys 1 - q or e^eps - (1 - q), and down to subnormal ones."""
    q = np.array([1.0, 1 - 2.0**-53, 1 - 2.0**-52, 1 - 1e-14, 0.9, 0.4, 1e-5, 1e-300, 5e-324])[:, None]
    points = [41.976, 36.5531, 35.8634, 59.0, -41.0, 0.0, 1e-9, -1e-9, 0.3, -0.3, 1.0, -2.0, 700.0, -700.0, 800.0]
    q, eps = np.broadcast_arrays(q, points)
    for local in (1.0, 40.0, 60.0):

        def base(e, local=local):
            inside = -np.expm1(np.clip(e - local, -800, 0)) / (1 + np.exp(-local))
            return np.minimum(np.where(e <= -local, -np.expm1(np.minimum(e, 0)), inside) * (1 + 2e-15), 1.0)

        bound = cv.sampled_delta(base, eps, q, relation)
        lost = 1e-13 * np.exp(np.minimum(eps, 600.0)) if relation == "add" else 1e-13
        with mp.workdps(400):
            p1 = [mp.exp(local) / (1 + mp.exp(local)), 1 / (1 + mp.exp(local))]
            for i in np.ndindex(eps.shape):
                rate, a = mp.mpf(q[i]), mp.exp(mp.mpf(eps[i]))
                pairs = [((1 - rate) * x + rate * y, x) for x, y in zip(p1[::-1], p1, strict=True)]
                truth = sum(max(x - a * y, 0) if relation == "remove" else max(y - a * x, 0) for x, y in pairs)
                assert truth <= bound[i] <= truth * (1 + 1e-12) + np.broadcast_to(lost, eps.shape)[i]


# Gaussian DP, cut Renyi -----------------------------------------------------------------------------------------


def test_gdp_mu_of_a_gaussian_profile_is_its_own_and_intervals_cost_more_than_points():
    eps = EPS_GRID[:200]
    points = cv.gdp_mu_from_profile(eps, gaussian_delta(eps, 0.8), cover="points")
    intervals = cv.gdp_mu_from_profile(eps, gaussian_delta(eps, 0.8))
    assert abs(points / 0.8 - 1) < 1e-9
    assert points < intervals < 0.85
    assert cv.gdp_mu_from_profile([0.5], [1.0]) == np.inf and cv.gdp_mu_from_profile([0.5], [0.0]) == 0.0


def test_gdp_mu_is_finite_where_delta_hardly_depends_on_it():
    eps = np.linspace(-3, 5, 60)
    assert cv.gdp_mu_from_profile(eps, jaxdp.delta(jaxdp.Gaussian(1.0), eps), cover="points") == pytest.approx(
        1, rel=1e-6
    )
    for one, delta in ((-2.0, 0.8647), (1.5711648036461954, 0.9991577501841555)):
        mu = cv.gdp_mu_from_profile([one], [delta], cover="points")
        assert gaussian_truth(one, mu * (1 - 1e-9)) < delta <= gaussian_truth(one, mu)


def test_gdp_mu_covers_every_profile_between_the_points():
    eps, delta = np.array([0.0, 0.5, 1.0]), np.array([0.3, 0.2, 0.1])
    mu = cv.gdp_mu_from_profile(eps, delta)
    assert (gaussian_delta(eps[1:], mu) >= delta[:-1] * (1 - ROUNDING)).all()
    assert (gaussian_delta(eps[1:], mu * (1 - 1e-6)) < delta[:-1]).any()


def test_gdp_mu_is_not_zero_for_a_delta_within_the_rounding_of_the_smallest_one():
    eps = np.array([-0.7, -1e-8, -1e-3, -5.0])
    with mp.workdps(50):
        delta = np.array([rounded_up(1 - mp.exp(mp.mpf(e))) for e in eps])
        delta[:2] = 0.5034146962085905, 9.999999950000001e-09
        for e, d, mu in zip(eps, delta, cv.gdp_mu_from_profile(eps[:, None], delta[:, None]), strict=True):
            assert (gaussian_truth(e, mu) if mu > 0 else 1 - mp.exp(mp.mpf(e))) >= mp.mpf(d)


def test_uncut_curve_is_the_binomial_sum_of_the_subsampled_gaussian():
    # order 2: log(1 + q^2 (e^{1/sigma^2} - 1))
    assert np.isclose(cv.cut_renyi(2, 1.0, 0.01, np.inf), np.log1p(1e-4 * np.expm1(1.0)), rtol=1e-6)
    assert cv.cut_renyi(64, 1.0, 0.01, 6.0) < cv.cut_renyi(64, 1.0, 0.01, np.inf)


def test_cut_renyi_charges_the_cancellation_of_large_exponents():
    points = [(2047, 1.0, 0.5, 0.6), (2047, 0.1, 0.5, 5.0), (300, 0.01, 0.9, 150.0), (37, 1e-5, 0.2, 1e5)]
    with mp.workdps(50):
        for (order, *rest), bound in zip(points, cv.cut_renyi(*np.transpose(points)), strict=True):
            sigma, q, cut = map(mp.mpf, rest)
            total, pmf = mp.mpf(0), (1 - q) ** order
            for j in range(order + 1):
                total += pmf * mp.exp(j * (j - 1) / (2 * sigma**2)) * mp.erfc((j / sigma - cut) / mp.sqrt(2)) / 2
                pmf *= mp.mpf(order - j) / (j + 1) * q / (1 - q)
            truth = mp.log(total) / (order - 1)
            # at sigma 0.1 exponents of 2e8 cancel: 32 units of 2^-53 of them, over order - 1, are 3.5e-10
            assert truth <= bound <= truth + 4e-10 + abs(truth) * 1e-9


def test_cut_mass_charges_the_rounding_of_the_shift():
    points = [(1e-6, 0.3, 1000035.0), (1e-5, 0.3, 100035.0), (1.0, 0.5, 30.0), (1.0, 0.5, 40.0)]
    with mp.workdps(50):
        for point, bound in zip(points, cv.cut_mass(*np.transpose(points)), strict=True):
            sigma, q, cut = map(mp.mpf, point)
            truth = ((1 - q) * mp.erfc(cut / mp.sqrt(2)) + q * mp.erfc((cut - 1 / sigma) / mp.sqrt(2))) / 2
            assert truth <= bound <= truth * (1 + 1e-7) + SMALLEST
    assert cv.cut_mass(1.0, 0.5, np.inf) == 0.0


def test_cut_repairs_renyi_beyond_the_phase_transition_and_stays_above_the_truth():
    # notebooks/proofs/contour_certificate.md, section 6: exact 0.0672136, plain RDP 0.1458, cut 0.0693
    eps = cv.cut_renyi_epsilon(4.0, 0.00033, 1e4, 1.1e-18)
    assert 0.067213614105919158 <= eps < 0.0694
    assert np.isclose(cv.cut_mass(4.0, 0.00033, 0.25), norm.sf(0.25), rtol=1e-3)


# Named algorithms -----------------------------------------------------------------------------------------------


def test_levy_inversion_and_double_quadrature_agree_with_the_gaussian_law():
    g = jaxdp.Gaussian(1.0)
    rule = {"step": 0.05, "nodes": 300}
    x = np.array([-1.0, 0.5, 2.0])
    np.testing.assert_allclose(cv.levy_cdf(lambda t: g.log_mgf(1j * t), x, **rule), norm.cdf(x - 0.5), atol=1e-13)
    inner = cv.quadrature_log_characteristic(lambda y: norm.logpdf(y - 1), norm.logpdf, -9.0, 11.0)
    np.testing.assert_allclose(cv.levy_cdf(inner, x, **rule), norm.cdf(x - 0.5), atol=1e-12)
    delta = cv.levy_delta(lambda t: g.log_mgf(1j * t), lambda t: g.log_mgf(-1 - 1j * t), 1.0, **rule)
    assert np.isclose(delta, gaussian_delta(1.0, 1), rtol=1e-11)


def test_levy_inversion_with_too_long_a_step_folds_the_law():
    """Negative control: the period 2 pi/h = 2 is narrower than the law."""
    g = jaxdp.Gaussian(1.0)
    assert abs(cv.levy_cdf(lambda t: g.log_mgf(1j * t), 2.0, step=np.pi, nodes=100) - norm.cdf(1.5)) > 1e-3


@pytest.mark.parametrize("cells", [40, 160])
def test_grid_pairs_enclose_the_truth_also_below_one_and_the_gap_is_of_second_order(cells):
    x = np.concatenate([[-np.inf], np.linspace(-8, 8, cells), [np.inf]])
    centre = np.where(x[:-1] > 0, -1.0, 1.0)  # each mass from the tail in which it does not cancel
    p = np.abs(norm.cdf(centre * (x[1:] - 1)) - norm.cdf(centre * (x[:-1] - 1)))
    q = np.abs(norm.cdf(centre * x[1:]) - norm.cdf(centre * x[:-1]))
    pairs = cv.grid_pairs(p, q, x - 0.5)
    for eps in (-2.0, 0.0, 1.0, 3.0):
        lower, upper = exact_delta(pairs.lower, eps), exact_delta(pairs.upper, eps)
        assert lower <= gaussian_delta(eps, 1) * (1 + ROUNDING)
        assert gaussian_delta(eps, 1) * (1 - ROUNDING) <= upper
        assert upper - lower < 2.0 / cells**2 * 16


def test_profiles_far_out_have_a_number_and_a_derivative():
    with jax.enable_x64(True):
        for function in (
            lambda e: cv.swapped_delta(e, 0.5), lambda e: cv.delta_from_cdfs(e, 0.5, 0.1),
            lambda e: cv.delta_from_cdfs(e, 1.0, 0.0),
        ):  # fmt: skip
            value, slope = jax.value_and_grad(function)(800.0)
            assert float(value) < 1e-15 and float(slope) == 0.0
    assert cv.delta_from_cdfs(np.inf, 0.25, 0.0) == pytest.approx(0.75)
    ends = cv.levy_cdf(lambda t: 0.5j * t - t**2 / 2, [-np.inf, np.inf], step=0.1, nodes=10)
    np.testing.assert_array_equal(ends, [0.0, 1.0])
    assert np.all(cv.swapped_delta([0.3, 1.0, 40.0, 800.0, np.inf], 1.0) == 1.0)
    exact = 1 - mp.exp(40) * (1 - mp.mpf(1 - 2.0**-53 * 4))
    assert cv.swapped_delta(40.0, 1 - 2.0**-53 * 4) == pytest.approx(float(max(exact, 0)), abs=1e-15)
    exact = 1 - mp.exp(30) * (1 - mp.mpf(1 - 1e-14))
    assert cv.swapped_delta(30.0, 1 - 1e-14) == pytest.approx(float(exact), abs=1e-15)


def test_a_profile_down_to_tiny_deltas_gives_a_pair_that_every_verb_takes():
    gaussian, epsilons = jaxdp.Gaussian(5.0), np.linspace(0.0, 8.0, 60)
    deltas = jaxdp.delta(gaussian, epsilons)
    assert deltas[-1] < 1e-300
    pairs = [cv.pair_from_profile(epsilons, deltas)]
    wide = np.linspace(-8.0, 8.0, 121)
    pairs.append(cv.sampled_pair(lambda e: jaxdp.delta(gaussian, e), wide, 0.1, "remove"))
    for pair, exact in zip(pairs, (gaussian, jaxdp.PoissonSampled(gaussian, 0.1)), strict=True):
        upper = jaxdp.delta(pair, 0.1, relation="remove")
        assert jaxdp.delta(exact, 0.1, relation="remove") <= upper < 1
    assert np.isfinite(cv.renyi_from_profile(2.0, [0.0, 0.5, 1.0], [0.3, 1e-308, 0.0]))


@pytest.mark.parametrize("order", [1 + 1e-12, 1 + 1e-6, 1.001, 2.0, 50.0])
@pytest.mark.parametrize("eps", [128.99539789718372, 584.5818773666397])
def test_a_loss_that_is_certain_has_that_renyi_divergence_at_every_order(order, eps):
    """log q + a (log p - log q) cancels: its value does not show how large its rounding is."""
    assert eps <= cv.renyi_from_profile(order, [eps], [0.0], symmetric=False) <= eps * (1 + 1e-12)


def test_a_profile_that_hardly_tells_mu_is_no_fault_of_the_backend(compiled):
    """A program and NumPy differ in the last digits of delta here, and therefore in mu."""
    mu = cv.gdp_mu_from_profile([-1.2733710467513586], [0.7201134808602965])
    assert 0.177 < mu < 0.179


def test_cells_beyond_the_range_of_an_exponential_are_accepted():
    lower, upper = cv.grid_pairs([0.5, 0.5], [1.0, 0.0], [-1.0, 800.0, np.inf])
    assert jaxdp.delta(lower, 1.0) == pytest.approx(0.5) and jaxdp.delta(upper, 1.0) >= 0.5
