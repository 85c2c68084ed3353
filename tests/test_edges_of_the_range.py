"""Targets at the ends of the float64 range: subnormal delta, infinite epsilon, all of the loss on one side."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from exact import gaussian_delta, gaussian_delta_in_digits

import jaxdp
from jaxdp.domains import SMALLEST
from jaxdp.runtime.backend import compiler_options
from jaxdp.typing import RealField

# (mechanism, exact epsilon at delta 1e-310): roots of the closed form and of the binomial sum in mpmath
BELOW_NORMAL = [
    (jaxdp.Gaussian(1.0), 38.0659927066501518246881861),
    (jaxdp.repeat(jaxdp.RandomizedResponse(0.01), 5000), 26.1371534498247017321613996),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "exact"), BELOW_NORMAL)
def test_a_subnormal_delta_is_not_taken_for_0(mechanism, exact):
    deltas = np.array([0.0, 5e-324, 1e-310, SMALLEST])
    with jax.enable_x64(True):
        solve = jax.vmap(lambda d: jaxdp.epsilon_bounds(mechanism, d))
        traced = jax.jit(solve, compiler_options=compiler_options("cpu"))(deltas)
    for lower, upper in (jaxdp.epsilon_bounds(mechanism, deltas), map(np.asarray, traced)):
        assert lower[2] <= exact <= upper[2]
        assert np.all(lower[1:] <= lower[:-1])
        assert np.isfinite(lower[2])
        assert upper[3] < exact < lower[0]


def test_a_subnormal_delta_does_not_raise_lower_bounds_nor_lower_a_mu():
    """They are those of the smallest normal number."""
    # Exact at `SMALLEST` and at 1e-310: sums over the count of ones of both two-point pairs in mpmath, and bisection.
    smallest, exact = 0.442701466736, 0.444627980313
    assert smallest * (1 - 1e-6) <= jaxdp.shuffle.lower_bound_epsilon(1.0, 10**4, 1e-310) <= exact
    mu = jaxdp.conversions.gdp_mu_from_profile([40.0], [1e-310])
    with mpmath.workdps(40):
        assert 1e-310 <= gaussian_delta_in_digits(40, mu)
        assert gaussian_delta_in_digits(40, mu * (1 - 1e-9)) < SMALLEST


@pytest.mark.parametrize(
    "mechanism",
    [
        jaxdp.ApproximateDP(0.3, 1e-310),
        jaxdp.PureDP(5e-324),
        jaxdp.DiscretePair([1 - 1e-310, 1e-310], [1.0, 0.0]),
        jaxdp.Gaussian(1e308),
        jaxdp.repeat(jaxdp.Laplace([1.0, 4.6e307]), 10),
    ],
)
def test_a_field_that_is_subnormal_or_has_a_subnormal_reciprocal_is_refused(mechanism):
    with pytest.raises(ValueError, match="between 2.2250738585072014e-308 and 4.494e[+]307"):
        jaxdp.delta(mechanism, 1.0)


@mpmath.workdps(40)
def test_at_infinite_epsilon_the_mass_at_infinity_is_enclosed():
    counts = np.array([2, 3, 10, 1000])
    for mass in (1e-9, 1e-5, 0.1):
        bounds = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.ApproximateDP(0.3, mass), counts), np.inf)
        for lower, upper, count in zip(bounds.lower, bounds.upper, counts, strict=True):
            exact = 1 - (1 - mpmath.mpf(mass)) ** int(count)
            assert mpmath.mpf(lower) <= exact <= mpmath.mpf(upper)
            assert upper - lower <= 2e-12 * upper
    far = jaxdp.delta_bounds(jaxdp.compose(jaxdp.Gaussian(1.0), jaxdp.ApproximateDP(0.3, 1e-5)), 1e5)
    assert 1e-5 * (1 - 1e-12) <= far.lower <= 1e-5 <= far.upper
    pair = jaxdp.DiscretePair([0.5, 0.25, 0.125, 0.0625, 0.0625], [0.5, 0.5, 0, 0, 0])
    bounds = jaxdp.delta_bounds(pair, np.inf, relation="remove")
    assert bounds.lower <= 0.25 <= bounds.upper
    assert np.all(jaxdp.delta_bounds(pair, -np.inf, relation="remove") == np.ones(2))


@pytest.mark.parametrize(
    ("base", "rate", "exact"),
    [
        (jaxdp.RandomizedResponse(1.0), 0.0, 0.0),
        (jaxdp.RandomizedResponse(1e-4), 1e-12, 2.00010000333341662e-16),  # 2 log(1 + rate (e^1e-4 - 1))
    ],
)
def test_the_supremum_of_losses_within_their_rounding_is_enclosed(base, rate, exact):
    bounds = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.FixedSizeSampled(base, rate), 2), 0.0, relation="replace_one")
    assert bounds.lower <= exact <= bounds.upper <= exact + 1e-12


NO_SHIFT = jaxdp.NoisyIteration([0.9, 0.0], [1.0, 1.0], [1.0, 0.0])  # the last step erases the shift: mu = 0
NO_RUN = jaxdp.repeat(jaxdp.Gaussian(1.0), 0)


@pytest.mark.parametrize("nothing", [NO_SHIFT, jaxdp.PoissonSampled(NO_RUN, 0.5)])
def test_noise_on_the_same_answer_loses_nothing_at_delta_0(nothing):
    composed = jaxdp.compose(nothing, jaxdp.PureDP(0.5))
    bounds = jaxdp.epsilon_bounds(composed, 0.0, relation="remove")
    assert bounds.lower <= 0.5 <= bounds.upper <= 0.5 + 1e-12
    assert 0.5 <= jaxdp.renyi(composed, np.inf, relation="remove") <= 0.5 + 1e-12


def test_below_the_least_loss_delta_is_what_any_mechanism_has():
    eps = np.array([-72.0, -0.72, -0.1])
    sampled = jaxdp.PoissonSampled(jaxdp.RandomizedResponse(0.0036), 1e-8)
    for mechanism in (jaxdp.repeat(jaxdp.RandomizedResponse(0.001), 3), jaxdp.repeat(sampled, 100)):
        bounds = jaxdp.delta_bounds(mechanism, eps)
        assert np.all(bounds.lower <= -np.expm1(eps))
        assert np.all(-np.expm1(eps) <= bounds.upper)
        assert np.all(bounds.upper - bounds.lower <= 1e-12)


@pytest.mark.parametrize("rounds", [300_000, 10_000_000])
@mpmath.workdps(40)
def test_very_many_rounds_of_randomized_response_enclose_the_exact_sum(rounds):
    """e^epsilon overflows in float64."""
    keep = 1 / (1 + mpmath.exp(-1))
    deviation = float(mpmath.sqrt(rounds * keep * (1 - keep)))
    center = round(float(rounds * keep))
    eps = 2 * center - rounds + np.array([0.3, 6 * deviation])
    bounds = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.RandomizedResponse(1.0), rounds), eps)
    for level, lower, upper in zip(eps, bounds.lower, bounds.upper, strict=True):
        first = int(np.floor((level + rounds) / 2)) + 1
        weight = mpmath.exp(
            mpmath.loggamma(rounds + 1) - mpmath.loggamma(first + 1) - mpmath.loggamma(rounds - first + 1)
            + first * mpmath.log(keep) + (rounds - first) * mpmath.log(1 - keep)
        )  # fmt: skip
        exact = mpmath.mpf(0)
        for k in range(first, first + round(12 * deviation)):
            exact += weight * -mpmath.expm1(mpmath.mpf(level) - (2 * k - rounds))
            weight *= mpmath.e * (rounds - k) / (k + 1)
        assert mpmath.mpf(lower) <= exact <= mpmath.mpf(upper)
        assert upper - lower <= 2e-6 * upper


@mpmath.workdps(40)
@pytest.mark.thorough
def test_the_derivative_on_a_lattice_is_that_between_two_of_its_points():
    rounds, local, target = 50, 0.10472031656855026, 0.2868579332446001

    def epsilon(eps0, delta):
        keep = 1 / (1 + mpmath.exp(-eps0))
        law = [mpmath.binomial(rounds, k) * keep**k * (1 - keep) ** (rounds - k) for k in range(rounds + 1)]

        def excess(e):
            gains = (w * max(0, -mpmath.expm1(e - (2 * k - rounds) * eps0)) for k, w in enumerate(law))
            return mpmath.fsum(gains) - delta

        return mpmath.findroot(excess, (mpmath.mpf("1e-3"), mpmath.mpf("3e-3")), solver="anderson", tol=1e-60)

    def slope(function, at):
        step = at * mpmath.mpf(10) ** -12
        return float((function(at + step) - function(at - step)) / (2 * step))

    exact = (
        slope(lambda x: epsilon(x, mpmath.mpf(target)), mpmath.mpf(local)),
        slope(lambda d: epsilon(mpmath.mpf(local), d), mpmath.mpf(target)),
    )
    with jax.enable_x64(True):
        slopes = jax.grad(
            lambda x, d: jaxdp.epsilon(jaxdp.repeat(jaxdp.RandomizedResponse(x), rounds), d), argnums=(0, 1)
        )
        value = jax.jit(slopes, compiler_options=compiler_options("cpu"))(local, target)
    np.testing.assert_allclose(value, exact, rtol=1e-8)


@pytest.mark.parametrize("base", [jaxdp.Gaussian(1.0), jaxdp.Laplace(1.0), jaxdp.ApproximateDP(1.0, 0.1)])
@pytest.mark.parametrize("relation", ["add", "remove"])
def test_where_nobody_is_sampled_delta_is_that_of_nothing(base, relation):
    nobody = jaxdp.repeat(jaxdp.PoissonSampled(base, 0.0), np.array([1, 3]))
    eps = np.array([[-1.0], [-1e-9], [0.0], [2.0]])
    bounds, exact = jaxdp.delta_bounds(nobody, eps, relation=relation), -np.expm1(np.minimum(eps, 0.0)) * np.ones(2)
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper - bounds.lower <= 1e-14 * exact).all()


@pytest.mark.parametrize(
    "randomizer",
    [
        jaxdp.UnaryEncoding(750.0, 16),
        jaxdp.UnaryEncoding(2000.0, 16, optimized=False),
        pytest.param(jaxdp.LocalLaplace(800.0), marks=pytest.mark.slow),
        pytest.param(jaxdp.LocalLaplace(2000.0), marks=pytest.mark.slow),
        jaxdp.SubsetSelection(1.0, 1e200),
    ],
)
def test_a_law_of_reports_that_overflows_bounds_nothing(randomizer):
    shuffled = jaxdp.Shuffled(randomizer, 1000)
    assert jaxdp.epsilon_bounds(shuffled, 1e-6) == (0.0, np.inf)
    lower, upper = jaxdp.delta_bounds(shuffled, [0.0, 375.0])
    np.testing.assert_array_equal([lower, upper], [[0, 0], [1, 1]])
    local = randomizer.epsilon
    assert local <= jaxdp.renyi(shuffled, 2.0) <= local * (1 + 1e-12)


@jaxdp.record
class OwnResponse(jaxdp.Mechanism):
    """Two-point randomized response as a user may write it: `log_mgf` alone."""

    e: RealField
    symmetric = True

    def log_mgf(self, z):
        return jnp.log((jnp.exp(self.e * (z + 1)) + jnp.exp(-self.e * z)) / (1 + jnp.exp(self.e)))


def test_losses_that_a_record_does_not_state_are_not_taken_to_be_infinite():
    assert jaxdp.epsilon_bounds(OwnResponse(1.0), 0.0) == (0.0, np.inf)
    assert jaxdp.epsilon_bounds(jaxdp.compose(OwnResponse(1.0), jaxdp.Laplace(1.0)), 0.0) == (0.0, np.inf)
    assert jaxdp.epsilon_bounds(jaxdp.Gaussian(1.0), 0.0) == (np.inf, np.inf)


@pytest.mark.slow
def test_squares_of_noise_that_overflow_are_not_taken_for_perfect_privacy():
    noise = jaxdp.Gaussian(1e160)
    kept = jaxdp.RandomAllocation.same_in_every_epoch(noise, 10, 3)
    sampled = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.repeat(noise, 3), 0.5), 5)
    for mechanism in (kept, jaxdp.repeat(kept, 3), sampled):
        assert jaxdp.delta(mechanism, 0.0) > 1e-161
    many = jaxdp.PoissonSampled(jaxdp.repeat(noise, 1e300), 0.5)  # mu is 1e-10: delta is 0.5 mu / sqrt(2 pi)
    assert jaxdp.delta_bounds(many, 0.0) == pytest.approx((1.99456e-11, 1.99492e-11), rel=1e-4, abs=0)
    assert (jaxdp.renyi(jaxdp.Gaussian(1e200), [1.5, 2.0]) > 0).all()
    assert jaxdp.renyi(jaxdp.RandomAllocation(noise, 10), 1e300) >= 5e-22  # order / (2 noise^2 num_steps)


def test_a_mechanism_of_hardly_any_noise_repeated_0_times_changes_nothing():
    step = jaxdp.compose(jaxdp.repeat(jaxdp.Gaussian(1e-170), 0), jaxdp.Gaussian(1.0))
    one, other = (jaxdp.epsilon_bounds(jaxdp.PoissonSampled(base, 0.5), 1e-5) for base in (step, jaxdp.Gaussian(1.0)))
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(("theta", "time"), [(1e200, 1e200), (1e-200, 1e200)])
def test_diffusions_of_any_length_keep_a_trace_of_the_value(theta, time):
    assert jaxdp.delta(jaxdp.diffusion.OrnsteinUhlenbeck(theta, 1.0, time), 0.0) > 0


def test_counts_that_overflow_give_no_lower_bound():
    endless = jaxdp.repeat(jaxdp.repeat(jaxdp.Gaussian(1e200), 1e200), 1e200)  # mu is 1: epsilon is 4.37718
    assert jaxdp.epsilon_bounds(endless, 1e-5).lower <= 4.378
    many = jaxdp.compose(*(jaxdp.repeat(jaxdp.Gaussian(1e154 * (1 + i * 1e-3)), 4e307) for i in range(8)))
    assert jaxdp.epsilon_bounds(many, 1e-5) == pytest.approx((8.683837445, 8.683837446), rel=1e-8)


def test_small_squares_times_large_counts_are_not_flushed_in_a_program(compiled):
    noise = np.append(1e100, np.full(300, 1e154))
    found = jaxdp.epsilon(jaxdp.compose(jaxdp.Gaussian(1.0), jaxdp.repeat(jaxdp.Gaussian(noise), 4e307)), 1e-5)
    np.testing.assert_allclose(found[1:], 5.324785705557, rtol=1e-10)  # one Gaussian with mu = sqrt(1.4)


def test_renyi_divergences_smaller_than_the_rounding_of_k_are_answered_in_large_batches(compiled):
    order = np.linspace(1.001, 1.5, 30)
    for mechanism in (
        jaxdp.PoissonSampled(jaxdp.Gaussian(1000 * np.linspace(1, 2, 30)), 1e-4),
        jaxdp.DiscreteLaplace(1e5 * np.linspace(1, 2, 30)),
    ):
        assert (jaxdp.renyi(mechanism, order) < 1e-9).all()
        assert (np.abs(jaxdp.log_mgf(mechanism, order - 1)) < 1e-9).all()


@pytest.mark.parametrize(
    ("scale", "sensitivity", "delta", "exact"),
    [(1e12, 1e12, 1e-3, 0.997998), (719254241.7868128, 1172202663.0, 0.2010385543295841, 1.18086)],
)
def test_discrete_laplace_noise_of_huge_scale_is_that_of_laplace(scale, sensitivity, delta, exact):
    """``exact`` is the epsilon of Laplace noise, sensitivity / scale + 2 log(1 - delta)."""
    noise = jaxdp.DiscreteLaplace(scale, sensitivity)
    lower, upper = jaxdp.epsilon_bounds(noise, delta)
    assert lower <= exact * (1 + 1e-5) and exact * (1 - 1e-5) <= upper
    z = np.array([0.5, 2.0, 0.1 + 3j])
    np.testing.assert_allclose(jaxdp.log_mgf(noise, z), jaxdp.log_mgf(jaxdp.Laplace(scale / sensitivity), z), rtol=1e-6)


def test_rates_and_steps_at_the_end_of_the_range_have_no_lower_bound_above_the_truth():
    total_variation = gaussian_delta(0.0, 1.0)  # times the rate: delta at 0
    for rate, reach in ((1e-301, np.inf), (1e-295, 1e-9)):  # at the first rate nothing but 0 is proved
        sampled = jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), rate)
        lower, upper = jaxdp.delta_bounds(sampled, 0.0, relation="add")
        assert lower <= total_variation * rate * (1 + 1e-12) and total_variation * rate * (1 - 1e-12) <= upper
        assert upper - lower <= reach * upper
        assert jaxdp.epsilon_bounds(sampled, 0.6 * rate, relation="add").lower == 0
    lower, upper = jaxdp.delta_bounds(jaxdp.RandomAllocation(jaxdp.Gaussian(2.0), 5e14), 1e-3, relation="add")
    assert lower < 1e-6 < upper
    lower, upper = jaxdp.delta_bounds(jaxdp.RandomAllocation(jaxdp.Gaussian(2.0), 1e6), 1e-3, relation="add")
    assert 6.26e-6 < lower <= upper < 6.27e-6


def test_cells_of_laplace_noise_inside_a_randomizer_give_no_lower_bound_of_the_noise():
    # inputs 0 and 1, one of two records: Q = (L(0) + L(1))/2, P = L(0); the integrals are sums over a fine grid
    epsilon, e = 0.3, np.exp(0.3)
    lower, upper = jaxdp.delta_bounds(jaxdp.FixedSizeSampled(jaxdp.LocalLaplace(1.0), 0.5), epsilon)
    grid = np.linspace(-40, 41, 8_100_001)
    p, q = (0.5 * np.exp(-np.abs(grid - x)) for x in (0.0, 1.0))
    exact = np.sum(np.maximum(0.5 * (p + q) - e * p, 0.0)) * (grid[1] - grid[0])
    other = np.sum(np.maximum(p - e * 0.5 * (p + q), 0.0)) * (grid[1] - grid[0])
    assert lower <= max(exact, other) * (1 + 1e-9) and max(exact, other) * (1 - 1e-9) <= upper
    assert upper - lower <= 1e-6 * upper


def test_a_distance_that_underflows_is_not_forgotten():
    schedule = [1.0, 1e300, 1e110], [0.0, 0.0, 1.0], [1e-305, 0.0, 1e10]
    assert 1e105 <= jaxdp.iteration.gdp_mu(*schedule) <= 1e105 * (1 + 1e-9)
    assert jaxdp.delta(jaxdp.NoisyIteration(*schedule), 1e200) == 1
    assert jaxdp.iteration.gdp_mu([1.0, 1e200, 1e200], [0.0, 0.0, 1.0], [1e-200, 0.0, 1e120], diameter=1e300) >= 1e200
    moved = jaxdp.iteration.per_index_mu([1.0, 1e200, 1e200], [1e-200, 1e-200, 1e200], [1e-200, 1.0, 1e120])
    assert moved[0] >= 0.707


def test_a_subnormal_rate_is_not_taken_for_0_by_the_trade_off(compiled):
    rates = np.append(0.5, np.full(300, 1e-310))
    found = jaxdp.tradeoff(jaxdp.Gaussian(1 / 40), rates)[1:]
    with mpmath.workdps(40):  # the curve at the smallest normal number and at 1e-310
        below, exact = (
            mpmath.ncdf(-40 - mpmath.findroot(lambda z, x=x: mpmath.log(mpmath.ncdf(z) / x), -37.6))
            for x in map(mpmath.mpf, (SMALLEST, 1e-310))
        )
    assert all(below * (1 - mpmath.mpf(1e-6)) <= value <= exact for value in found)


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_mu_that_is_rounded_up_gives_no_lower_bound_above_the_truth(steps):
    alone = jaxdp.NoisyIteration(np.ones(steps), np.ones(steps), np.eye(1, steps)[0])
    with mpmath.workdps(40):
        mu = 1 / mpmath.sqrt(steps)
        epsilon = mpmath.mpf(float(2 * mu))
        exact = gaussian_delta_in_digits(epsilon, mu)
    lower, upper = jaxdp.delta_bounds(alone, float(epsilon))
    assert lower <= exact <= upper and upper - lower <= 1e-8 * upper
    nothing = jaxdp.NoisyIteration(np.ones(steps), np.ones(steps), np.zeros(steps))  # must not weaken the lower bound
    lower, upper = jaxdp.epsilon_bounds(jaxdp.compose(nothing, jaxdp.Gaussian(1.0)), 1e-5, relation="remove")
    assert upper - lower <= 1e-9 * upper
    diffused = jaxdp.diffusion.OrnsteinUhlenbeck(1e-100, 1e-50, 1e100)
    with mpmath.workdps(40):
        theta, rho, time = (mpmath.mpf(x) for x in (1e-100, 1e-50, 1e100))
        mu = mpmath.sqrt(theta / mpmath.expm1(2 * theta * time)) / rho
        exact = mpmath.ncdf(mu / 2) - mpmath.ncdf(-mu / 2)
    lower, upper = jaxdp.delta_bounds(diffused, 0.0)
    assert lower <= exact <= upper


def test_one_release_with_laplace_noise_is_the_closed_form():
    assert jaxdp.delta_bounds(jaxdp.Laplace(1.0), 1.0) == (0, 0)
    random = np.random.default_rng(0)
    scale = 10 ** random.uniform(-2, 6, 60)
    shares = np.concatenate([random.uniform(-2, 1.2, 20), 1 - 10 ** random.uniform(-16, -1, 20), np.ones(20)])
    epsilon, delta = shares / scale, -np.expm1(-0.5 / scale) * (1 + random.uniform(-1, 1e-15, 60))
    below, above = jaxdp.delta_bounds(jaxdp.Laplace(scale), epsilon)
    low, high = jaxdp.epsilon_bounds(jaxdp.Laplace(scale), delta)

    def exact_delta(epsilon, largest):
        if epsilon < 0:
            return 1 - mpmath.exp(epsilon) + mpmath.exp(epsilon) * exact_delta(-epsilon, largest)
        return max(-mpmath.expm1((epsilon - largest) / 2), mpmath.mpf(0))

    with mpmath.workdps(60):
        for i, (b, e, d) in enumerate(zip(scale.tolist(), epsilon.tolist(), delta.tolist(), strict=True)):
            exact = exact_delta(mpmath.mpf(e), 1 / mpmath.mpf(b))
            assert below[i] <= exact <= above[i] <= exact * (1 + mpmath.mpf(1e-14))
            exact = max(1 / mpmath.mpf(b) + 2 * mpmath.log1p(-mpmath.mpf(d)), mpmath.mpf(0))
            assert low[i] <= exact <= high[i] <= exact + 4e-15 / b


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 40.0, 100.0, 700.0])
@pytest.mark.parametrize("delta", [0.0, 1e-7, 0.3])
def test_one_run_of_a_guarantee_is_its_closed_form(epsilon, delta):
    """delta(x) = d + (1 - d) (e^eps - e^x)/(e^eps + 1) of the worst case of an (eps, d) guarantee."""
    guarantee = jaxdp.ApproximateDP(epsilon, delta)
    levels = np.array([0.0, 0.3, 0.9, 0.999]) * epsilon
    with mpmath.workdps(40):
        e, d = mpmath.mpf(epsilon), mpmath.mpf(delta)
        truth = [d + (1 - d) * (mpmath.exp(e) - mpmath.exp(mpmath.mpf(x))) / (mpmath.exp(e) + 1) for x in levels]
        for low, high, exact in zip(*jaxdp.delta_bounds(guarantee, levels), truth, strict=True):
            assert mpmath.mpf(float(low)) <= exact <= mpmath.mpf(float(high)) <= exact * (1 + mpmath.mpf(1e-12))
    below, above = (jaxdp.epsilon_bounds(guarantee, float(truth[-1]) * (1 + off)) for off in (-1e-9, 1e-9))
    assert above.lower <= levels[-1] <= below.upper
    for found in (below, above):
        assert 0 <= found.upper - found.lower <= 1e-12 * (1 + epsilon)


RESPONSE = np.e / (np.e + 2)  # probability of the true answer of RandomizedResponse(1, 3)
NEXT_TO_LARGEST = {
    # name: (mechanism of one number, the number, delta, derivatives of epsilon by the number and by delta). The
    # derivatives are closed forms of the largest loss and its mass.
    "Laplace": (jaxdp.Laplace, 0.5, 1e-9, -4.0, -2.0),
    "several rounds": (lambda e: jaxdp.repeat(jaxdp.PureDP(e), 3), 1.0, 1e-12, 3.0, -((1 + np.exp(-1)) ** 3)),
    "delta 0": (lambda e: jaxdp.repeat(jaxdp.PureDP(e), 3), 1.0, 0.0, 3.0, -((1 + np.exp(-1)) ** 3)),
    "small losses": (lambda e: jaxdp.repeat(jaxdp.PureDP(e), 3), 1e-6, 0.0, 3.0, -((1 + np.exp(-1e-6)) ** 3)),
    "many rounds": (lambda e: jaxdp.repeat(jaxdp.PureDP(e), 900), 0.1, 0.0, 900.0, -((1 + np.exp(-0.1)) ** 900)),
    "large losses": (lambda e: jaxdp.repeat(jaxdp.PureDP(e), 2), 8.0, 1e-12, 2.0, -((1 + np.exp(-8)) ** 2)),
    "its own delta": (lambda e: jaxdp.ApproximateDP(e, 1e-4), 1.0, 1e-4, 1.0, -(1 + np.exp(-1)) / (1 - 1e-4)),
    "two mechanisms": (
        lambda e: jaxdp.compose(jaxdp.RandomizedResponse(e, 3), jaxdp.RandomizedResponse(0.7)),
        1.0, 1e-8, 1.0, -(1 + np.exp(-0.7)) / RESPONSE,
    ),
    "sampled": (
        lambda b: jaxdp.PoissonSampled(jaxdp.Laplace(b), 0.1),
        1.0, 1e-8, -0.1 * np.e / (0.9 + 0.1 * np.e), -2 * np.e / (0.9 + 0.1 * np.e),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name.endswith(("rounds", "losses")) else pytest.param(name, marks=pytest.mark.thorough)
        for name in NEXT_TO_LARGEST
    ],
)
def test_derivatives_next_to_the_largest_loss_are_those_of_its_mass(name):
    make, number, small, by_number, by_delta = NEXT_TO_LARGEST[name]
    with jax.enable_x64(True):
        slopes = jax.grad(lambda x, d: jaxdp.epsilon(make(x), d), argnums=(0, 1))(number, small)
    np.testing.assert_allclose(slopes, [by_number, by_delta], rtol=1e-3 if name == "sampled" else 1e-4)


@pytest.mark.slow
def test_where_epsilon_is_a_loss_the_derivative_of_delta_is_the_one_to_the_right():
    """Twenty randomized responses have the loss 0: d delta/d epsilon there is -Q(loss > 0), not half of it."""
    with jax.enable_x64(True):
        mechanism = jaxdp.repeat(jaxdp.RandomizedResponse(0.1), 20)
        slope = float(jax.grad(lambda epsilon: jaxdp.delta(mechanism, epsilon))(0.0))
    lie = 1 / (1 + math.exp(0.1))
    truth = -sum(math.comb(20, k) * lie ** (20 - k) * (1 - lie) ** k for k in range(10))
    assert slope == pytest.approx(truth, rel=1e-6)


@pytest.mark.slow
def test_several_losses_closer_to_the_largest_than_1e_4_all_count_in_the_derivative():
    """Three randomized responses of 1e-5 have the losses 3e-5 and 1e-5 above epsilon = 5e-6."""
    with jax.enable_x64(True):
        mechanism = jaxdp.repeat(jaxdp.RandomizedResponse(1e-5), 3)
        slope = float(jax.grad(lambda epsilon: jaxdp.delta(mechanism, epsilon))(5e-6))
    assert slope == pytest.approx(-0.5, rel=1e-4)


@pytest.mark.thorough
def test_delta_beyond_the_largest_loss_does_not_fall():
    with jax.enable_x64(True):
        slope = jax.grad(lambda epsilon: jaxdp.delta(jaxdp.ApproximateDP(1.0, 1e-3), epsilon))(1.5)
    assert abs(float(slope)) < 1e-100


@pytest.mark.parametrize("epsilon", [740.0, 900.0, 5000.0])
def test_reports_of_a_local_epsilon_whose_exponential_underflows_keep_their_masses(epsilon):
    """A report that only one's own value sends (but for e^-epsilon) has the same probability at every such epsilon."""
    for make, mass in (
        (lambda e: jaxdp.HadamardResponse(e), 0.5),
        (lambda e: jaxdp.UnaryEncoding(e, 4), 0.5),
        (lambda e: jaxdp.UnaryEncoding(e, 4, optimized=False), 1.0),
        (lambda e: jaxdp.SubsetSelection(e, 16, 2), 14 / 15),
        (lambda e: jaxdp.LocalHashing(e, 8, 0.25), 0.75),
    ):
        lower, upper = jaxdp.delta_bounds(make(epsilon), [0.0, 1.0, epsilon - 40.0])
        assert np.all(lower <= mass) and np.all(mass <= upper) and np.all(upper <= mass * (1 + 1e-9))
        assert epsilon - 1 <= jaxdp.epsilon(make(epsilon), 1e-6) <= epsilon
        sampled = jaxdp.delta(jaxdp.FixedSizeSampled(make(epsilon), 0.5), 1.0, relation="replace_one")
        assert mass / 2 <= sampled <= mass / 2 * (1 + 1e-9)
