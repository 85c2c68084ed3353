"""Properties of the contour's bounds: monotone, independent of order, exact at the edges, equal traced or not."""

import re
from fractions import Fraction

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from exact import gaussian_delta_in_digits
from hypothesis import given, settings

import jaxdp
from jaxdp import accounting
from jaxdp.contour import derivative
from jaxdp.interval import Bounds
from jaxdp.mechanisms.composition import normal_form
from jaxdp.runtime.backend import compiler_options
from jaxdp.sources import contour
from jaxdp.sources.base import Route

POINTS = 8
GAP = 1e-6  # promised relative gap of epsilon
STEP = 1e-4  # relative step of finite differences: truncation error 1e-8; a gap of 1e-7 over the step is 1e-3
DERIVATIVE = 5e-3  # relative tolerance of derivatives: a few times this error
SMALL = {"max_examples": 5}
SKEWED = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Laplace(0.7), 0.2), 3)


def solve(sigma, rate, times, delta, relation="remove", gap=1e-6):
    """Bounds of epsilon of sampled-Gaussian points."""
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), times)
    return jaxdp.epsilon_bounds(mechanism, delta, relation=relation, gap=gap)


def falls(bounds):
    """No later point is certainly larger than an earlier one, and no upper bound rises by more than its own gap."""
    certain = np.all(bounds.lower[1:] <= bounds.upper[:-1])
    # clipped, as some points have no lower bound
    gap = np.clip(1 - bounds.lower[1:] / np.where(bounds.upper[1:] > 0, bounds.upper[1:], 1.0), GAP, 0.2)
    return certain and np.all(bounds.upper[1:] * (1 - gap) <= bounds.upper[:-1])


@pytest.mark.slow
@settings(**SMALL)
@given(st.floats(0.6, 5), st.floats(1e-3, 0.3), st.integers(1, 5000), st.floats(1e-12, 1e-3))
def test_epsilon_falls_with_noise_and_delta_and_rises_with_rate_and_count(sigma, rate, times, delta):
    grow = np.geomspace(1, 1.5, 4)
    with pytest.MonkeyPatch.context() as patch:  # three efforts, to save time
        patch.setattr(contour, "BANDED_LADDER", contour.BANDED_LADDER[:3])
        assert falls(solve(sigma * grow, rate, times, delta))
        assert falls(solve(sigma, rate, times, delta * grow**10))
        assert falls(solve(sigma, rate * grow[::-1], times, delta))
        assert falls(solve(sigma, rate, np.round(times * grow[::-1] ** 5), delta))


@settings(**SMALL)
@given(st.floats(0.6, 5), st.floats(1e-3, 0.5), st.integers(1, 1000), st.floats(1e-12, 1e-3))
def test_sampling_half_or_less_is_certified_to_help(sigma, rate, times, delta):
    whole = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.Gaussian(sigma), times), delta)
    assert np.all(solve(sigma, rate, times, delta).upper < whole.lower)


def test_a_rate_of_one_is_the_gaussian_and_a_rate_or_count_of_zero_releases_nothing():
    times = np.array([1, 10, 100, 1000, 5, 5, 0, 0.0])
    rate = np.array([1, 1, 1, 1, 0, 0, 0.1, 1.0])
    bounds = solve(2.0, rate, times, 1e-6)
    whole = jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(2.0), times[:4]), 1e-6)
    np.testing.assert_allclose(bounds.upper[:4], whole, rtol=GAP)
    np.testing.assert_array_equal(bounds.upper[4:], 0.0)


def test_extreme_noise_and_delta_give_valid_numbers(monkeypatch):
    # With hardly any noise no effort gives a lower bound: the cheapest one and one with bands are enough.
    monkeypatch.setattr(contour, "BANDED_LADDER", contour.BANDED_LADDER[:5:4])
    sigma = np.array([1e6, 1e6, 1e-3, 1e-3, 1, 1, 1, 1.0])
    delta = np.array([1e-6, 1e-15, 1e-6, 1e-15, 0, 1, 1e-300, 0.5])
    bounds = solve(sigma, 0.01, 100, delta, gap=1e-2)
    assert not np.isnan([bounds.lower, bounds.upper]).any()
    assert np.all(bounds.lower <= bounds.upper)
    assert bounds.upper[0] < 1e-4
    # 100 rounds with hardly any noise: the loss of one is about 1/(2 sigma^2) = 5e5
    assert np.all(bounds.upper[2:4] > 1e5)
    assert bounds.upper[4] == np.inf
    assert bounds.upper[5] == 0
    assert 30 < bounds.upper[6] < 80  # epsilon is 79.26, most of it from the far tail of one step


def test_epsilon_of_any_sign_and_size_gives_a_valid_delta():
    epsilon = np.array([-np.inf, -30, -1, -1e-9, 0, 1, 5, np.inf])
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), 100)
    bounds = jaxdp.delta_bounds(mechanism, epsilon, relation="remove", gap=1e-2)
    assert bounds.upper[0] == 1
    assert bounds.upper[-1] == 0
    assert np.all(bounds.lower <= bounds.upper)
    assert np.all(np.diff(bounds.upper) <= 0)
    # no mechanism has delta(eps) < 1 - e^eps
    assert np.all(bounds.upper[1:5] >= -np.expm1(epsilon[1:5]))


def test_the_default_relation_is_the_larger_of_add_and_remove():
    sigma = np.linspace(0.7, 4, POINTS)
    sides = [solve(sigma, 0.01, 1000, 1e-6, relation=r).upper for r in ("remove", "add")]
    both = solve(sigma, 0.01, 1000, 1e-6, relation=None)
    np.testing.assert_array_equal(both.upper, np.maximum(*sides))


def test_composing_once_grouping_and_order_change_nothing():
    one = jaxdp.PoissonSampled(jaxdp.Gaussian(np.linspace(1, 2, POINTS)), 0.02)
    alone = jaxdp.epsilon(jaxdp.repeat(one, 100.0), 1e-6, relation="remove")
    halves = jaxdp.compose(jaxdp.repeat(one, 40.0), jaxdp.compose(jaxdp.repeat(one, 60.0)))
    np.testing.assert_array_equal(jaxdp.epsilon(halves, 1e-6, relation="remove"), alone)
    swapped = jaxdp.compose(jaxdp.repeat(one, 60.0), jaxdp.repeat(one, 40.0))
    np.testing.assert_array_equal(jaxdp.epsilon(swapped, 1e-6, relation="remove"), alone)


@pytest.mark.slow
def test_traced_verbs_agree_with_eager_ones_and_differentiate():
    """jit, vmap and grad in one compilation; derivatives against finite differences of the eager bounds."""

    def epsilon(sigma, rate, delta):
        mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), 1000.0)
        return jaxdp.epsilon(mechanism, delta, relation="remove")

    point = np.array([1.2, 0.01, 1e-5])
    with jax.enable_x64(True):
        traced = jax.vmap(jax.value_and_grad(epsilon, (0, 1, 2)), (0, None, None))
        # with XLA's usual optimisation this would only take longer to compile
        arguments = jnp.array([1.2, 1.5]), *point[1:]
        program = jax.jit(traced, compiler_options=compiler_options("cpu")).lower(*arguments)
        value, gradient = program.compile()(*arguments)
    text = program.as_text()
    assert "xf64>" in text and not re.search("tensor<[^>]*(f32|bf16|f16)>", text)
    shifts = np.concatenate([np.diag(STEP * point), -np.diag(STEP * point), np.zeros((1, 3)), [[0.3, 0, 0]]])
    eager = solve(*[(point + shifts)[:, k] for k in (0, 1)], 1000, (point + shifts)[:, 2]).upper
    np.testing.assert_allclose(value, eager[6:], rtol=GAP)
    numeric = (eager[:3] - eager[3:6]) / (2 * STEP * point)
    np.testing.assert_allclose([float(g[0]) for g in gradient], numeric, rtol=DERIVATIVE)


@pytest.mark.slow
def test_a_bare_gradient_has_the_value_of_the_verb_and_differentiates_the_larger_pair_alone(monkeypatch):
    """Outside of jit the numbers are concrete: neither the solver nor the smaller pair is compiled.

    One program differentiates all rows.
    """
    asked, log_delta = [], derivative.log_delta
    monkeypatch.setattr(derivative, "log_delta", lambda *given: asked.append(given) or log_delta(*given))
    contour._traced_points.cache_clear()

    def epsilon(sigma):
        mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), 0.01), 1000.0)
        return jaxdp.epsilon(mechanism, 1e-5)

    sigma = np.array([1.2, 1.5])
    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(lambda s: epsilon(s).sum())(jnp.asarray(sigma))
    assert float(value) == pytest.approx(epsilon(sigma).sum(), rel=GAP)
    numeric = (epsilon(sigma * (1 + STEP)) - epsilon(sigma * (1 - STEP))) / (2 * STEP * sigma)
    np.testing.assert_allclose(slope, numeric, rtol=DERIVATIVE)
    assert len(asked) == 1


@pytest.mark.parametrize(("first", "second", "kept"), [
    (Bounds(2.0, 2.1), Bounds(1.0, 2.0), [0]), (Bounds(1.0, 2.0), Bounds(2.0, 2.1), [1]),
    (Bounds(1.0, 2.0), Bounds(1.0, 2.1), [0, 1]), (Bounds(2.0, 2.0), Bounds(2.0, 2.0), [1]),
    (Bounds(2.0, 2.0), Bounds(1.0, 3.0), [0, 1]),
])  # fmt: skip
def test_of_two_pairs_the_one_that_is_certainly_not_larger_is_left_out(monkeypatch, first, second, kept):
    monkeypatch.setattr(
        accounting, "_evaluate", lambda *_: [tuple(map(np.atleast_1d, each)) for each in (first, second)]
    )
    routes = [Route(np.zeros(1), {}, {"epsilon": place}) for place in range(2)]
    found = accounting._largest(routes, "epsilon", np.zeros(1), (1,))
    assert [route.traced["epsilon"] for route in found] == kept


@pytest.mark.parametrize("bad", [np.nan, -1.0, 1.5])
def test_bad_rates_are_refused_before_anything_compiles(bad):
    with pytest.raises(ValueError, match="sampling_probability"):
        solve(1.0, bad, 10, 1e-6)


def test_epsilon_of_a_lattice_is_found_although_delta_has_kinks():
    # with few runs epsilon is next to the supremum of the loss
    counts = np.array([2.0, 3.0, 10.0, 30.0, 100.0, 1000.0])[:, None]
    bounds = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.RandomizedResponse(np.array([0.05, 0.5, 2.0])), counts), 1e-6)
    assert np.all(bounds.upper - bounds.lower <= 1e-7 * bounds.upper)
    # exact: root of the binomial sum for delta, in 40 digits
    hundred = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.RandomizedResponse(np.log(3.0)), 100), 1e-6)
    assert hundred.lower <= 94.28986789292488 <= hundred.upper <= 94.28986789292488 * (1 + 1e-9)


@mpmath.workdps(40)
def test_delta_left_of_the_bulk_of_the_losses_is_close_and_encloses_the_exact_sum():
    """There the Chernoff bound is smallest at order 0, where no contour is accurate."""
    local, rounds, eps = mpmath.mpf("0.5"), 100, np.array([-1.0, 0.0, 0.5, 20.0])
    chance = 1 / (1 + mpmath.exp(-local))

    def delta(e):
        total = mpmath.mpf(0)
        for k in range(rounds + 1):
            weight = mpmath.binomial(rounds, k) * chance**k * (1 - chance) ** (rounds - k)
            total += weight * max(0, -mpmath.expm1(mpmath.mpf(e) - (2 * k - rounds) * local))
        return total

    bounds = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.RandomizedResponse(0.5, 2), rounds), eps)
    for lower, upper, exact in zip(*bounds, map(delta, eps), strict=True):
        assert mpmath.mpf(lower) <= exact <= mpmath.mpf(upper)
    assert (bounds.upper - bounds.lower <= 1e-9 * bounds.upper).all()
    few = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.Laplace(0.2), 3), eps[:3])
    assert (few.upper - few.lower <= 1e-6 * few.upper).all()


def test_where_the_sum_is_lost_in_rounding_the_root_is_sought_further_left():
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(0.3), 1e-4), 2000)
    effort = contour.SAMPLED_LADDER[2]  # the cheapest effort that suffices
    (lower,), (upper,) = contour.contour_bounds(
        normal_form(mechanism, (1,)),
        np.array([1e-7]),
        np.array([np.inf]),
        verb="epsilon",
        direction="reverse",
        effort=effort,
    )
    assert upper - lower <= 1e-6 * upper
    # exact: a sum in extended precision gives delta(0.159113219955) = 1.00000000022918e-7, at abscissae 120 and 240
    assert lower <= 0.159113219956 and upper >= 0.159113219955


def test_a_delta_far_below_1e_290_is_not_too_small():
    # The second mechanism loses almost nothing. Exact: delta of the Gaussian (mu = 1: two norm bounds over noise 2).
    mechanism = jaxdp.compose(jaxdp.Gaussian(2.0), jaxdp.RandomizedResponse(1e-12))
    for eps in (37.5, 37.65, 37.7):
        with mpmath.workdps(40):
            exact = gaussian_delta_in_digits(eps, 1)
        bounds = jaxdp.delta_bounds(mechanism, eps, relation="replace_one")
        assert float(exact) * (1 - 1e-9) <= bounds.upper <= float(exact) * 1.01
        assert bounds.lower <= float(exact) * (1 + 1e-6)


def test_mass_at_infinity_does_not_hide_the_spread_of_the_loss():
    noisy = jaxdp.compose(jaxdp.Gaussian(50.0), jaxdp.DiscretePair([0.9, 0.1], [1.0, 0.0]))
    assert jaxdp.epsilon(noisy, 0.2, relation="remove") == 0.0


def test_the_precision_a_user_sets_for_matrix_products_is_not_ours():
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.1), 100)
    expected = jaxdp.epsilon_bounds(mechanism, 1e-5, relation="remove")
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert jaxdp.epsilon_bounds(mechanism, 1e-5, relation="remove") == expected


@pytest.mark.parametrize("sigma, q, steps, delta", [(1.43, 1.5e-4, 10, 4.3e-5), (1.38, 3.9e-5, 2, 2.4e-8)])
def test_a_rare_large_loss_does_not_send_epsilon_to_the_bound_without_sampling(sigma, q, steps, delta):
    # one sampled person gives nearly all of the loss: the moments are finite only far from the saddle point
    one = jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), q)
    bounds = jaxdp.epsilon_bounds(jaxdp.repeat(one, steps), delta, relation="remove")
    assert bounds.upper - bounds.lower <= 1e-3 * bounds.upper
    # no less than one step's closed form, no more than basic composition
    assert jaxdp.epsilon(one, delta, relation="remove") * (1 - 1e-9) <= bounds.upper
    assert bounds.lower <= steps * jaxdp.epsilon(one, delta / steps, relation="remove")


def test_a_smaller_gap_asked_for_brings_closer_bounds_of_the_same_number():
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(np.linspace(0.5, 0.6, POINTS)), 1e-2), 100)
    rough, fine = (jaxdp.epsilon_bounds(mechanism, 1e-6, relation="remove", gap=gap) for gap in (0.5, GAP))
    assert (fine.upper - fine.lower < GAP * fine.upper).all()
    assert (rough.upper - rough.lower > GAP * rough.upper).any()
    assert (rough.lower <= fine.lower).all() and (fine.upper <= rough.upper).all()


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-6, np.nan, [1e-6]])
def test_a_gap_is_one_number_between_0_and_1(bad):
    with pytest.raises(ValueError, match="gap must be one number"):
        jaxdp.delta_bounds(jaxdp.Gaussian(1.0), 1.0, gap=bad)


@pytest.mark.parametrize("relation", ["remove", "add"])
def test_half_a_million_steps_of_little_noise_have_close_bounds(relation):
    sigma, q, steps, delta = (0.25, 0.74, 480_000, 3e-4) if relation == "remove" else (0.3, 0.1, 700_000, 1e-10)
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), q), steps)
    bounds = jaxdp.epsilon_bounds(mechanism, delta, relation=relation)
    assert 0 < bounds.upper - bounds.lower < GAP * bounds.upper


@pytest.mark.slow
def test_losses_next_to_their_supremum_are_enclosed_closely():
    """Two steps, add: delta by 50-digit quadrature of the closed one-step delta over the other step's outcome.

    The abscissa is up to e^14 times the guess of a Gaussian law.
    """
    cases = [  # (sigma, rate, epsilon, exact delta)
        (5.92, 0.00026, 0.0005117, "2.4043478380366298e-268"),
        (1.22, 2.86e-05, 3.83e-05, "2.5294855462923771e-7"),
        (2.5, 0.00152, 0.00304, "1.6665275824312675e-147"),
        (0.307, 0.0247, 0.05002, "9.6388486177968178e-11"),
        (16.9, 1.69e-05, 1.888e-05, "1.2284091907428671e-92"),
        (1.0, 0.3, 0.713, "2.0000519692239039e-30"),
        (0.5, 0.9, 4.605, "5.8963807741754691e-17"),
        (0.398, 9.75e-05, 0.00019495, "2.3394849604586759e-11"),
    ]
    sigma, rate, epsilon = (np.array(column) for column in list(zip(*cases, strict=True))[:3])
    two = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), 2)
    bounds = jaxdp.delta_bounds(two, epsilon, relation="add")
    exact = [Fraction(case[3]) for case in cases]
    for lower, upper, value in zip(bounds.lower, bounds.upper, exact, strict=True):
        assert Fraction(lower) <= value <= Fraction(upper)
        assert upper - lower <= 1e-5 * upper
    solved = jaxdp.epsilon_bounds(two, np.array([float(value) for value in exact]), relation="add")
    assert np.all((solved.lower <= epsilon * (1 + 1e-15)) & (epsilon * (1 - 1e-15) <= solved.upper))
    assert np.all(solved.upper - solved.lower <= 1e-6 * solved.upper)


def test_rare_samples_have_close_bounds_of_delta_at_a_negative_epsilon():
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.49), 9.6e-6), 99)
    lower, upper = jaxdp.delta_bounds(mechanism, -1.27, relation="replace_one")
    assert -np.expm1(-1.27) * (1 - 1e-15) <= lower <= upper <= lower * (1 + GAP)


@pytest.mark.parametrize("relation", ["remove", "add", "replace_one"])
def test_delta_at_a_negative_epsilon_is_that_of_the_swapped_pair(relation):
    """100 steps at a rate of 1e-6 are worth next to nothing: delta is hardly above 1 - e^epsilon. It was 0.9999996."""
    epsilons = np.array([-700.0, -5.0, -0.5, -1e-3])
    bounds = jaxdp.delta_bounds(
        jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 1e-6), 100), epsilons, relation=relation
    )
    least = -np.expm1(epsilons)
    assert (bounds.lower >= least * (1 - 1e-14)).all() and (bounds.upper <= np.minimum(least * (1 + 1e-6), 1.0)).all()
    swapped = {"remove": "add", "add": "remove", "replace_one": "replace_one"}[relation]
    mirrored = jaxdp.delta_bounds(SKEWED, -epsilons, relation=swapped)
    bounds = jaxdp.delta_bounds(SKEWED, epsilons, relation=relation)
    np.testing.assert_allclose(bounds.upper, least + np.exp(epsilons) * mirrored.upper, rtol=1e-6)
    assert (bounds.lower <= least + np.exp(epsilons) * mirrored.upper).all()


@pytest.mark.parametrize(("sigma", "rate", "false_positive_rate"), [(0.5, 0.3, 0.9), (0.4, 0.5, 0.7)])
def test_the_trade_off_of_add_is_followed_as_far_down_as_its_losses_reach(sigma, rate, false_positive_rate):
    """Exact: the best test of N(0) against the mixture rejects by a threshold of the outcome."""
    threshold = mpmath.findroot(
        lambda t: (
            1 - ((1 - rate) * mpmath.ncdf(t / sigma) + rate * mpmath.ncdf((t - 1) / sigma)) - (1 - false_positive_rate)
        ),
        0.5,
    )
    exact = float(1 - mpmath.ncdf(threshold / sigma))
    sampled = jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate)
    found = jaxdp.tradeoff(sampled, false_positive_rate, relation="add")
    assert exact * (1 - 1e-5) <= found <= exact


def test_the_trade_off_of_sampled_laplace_noise_is_sought_at_the_kink_of_its_least_loss():
    """No loss is below the least one: the best test rejects all outcomes but a share of those with the least loss."""
    rate, least = 0.1, np.log(0.9 + 0.1 * np.exp(-2.0))
    found = jaxdp.tradeoff(jaxdp.PoissonSampled(jaxdp.Laplace(0.5), rate), [0.7, 0.9], relation="remove")
    exact = np.exp(least) * np.array([0.3, 0.1])
    assert np.all(exact * (1 - 1e-5) <= found) and np.all(found <= exact * (1 + 1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("other", [jaxdp.Laplace(2.0), jaxdp.DiscreteGaussian(3.0)])
def test_derivatives_are_right_where_no_loss_is_the_largest(other):
    def epsilon(sigma):
        return jaxdp.epsilon(jaxdp.compose(jaxdp.Gaussian(sigma), other), 1e-6)

    near = epsilon(np.array([2.9999, 3.0001]))
    with jax.enable_x64(True):
        assert jax.grad(epsilon)(3.0) == pytest.approx((near[1] - near[0]) / 2e-4, rel=1e-4)
