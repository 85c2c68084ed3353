"""Sampled mechanisms and finite pairs, compared with closed forms, brute-force convolution and each other."""

import contextlib
import functools
import math

import jax
import mpmath as mp
import numpy as np
import pytest
from exact import gaussian_delta, hockey_stick, laplace_delta
from scipy import stats

import jaxdp
from jaxdp.mechanisms import discrete_gaussian as cells
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.composition import normal_form
from jaxdp.mechanisms.sampled_laws import mixture_log_ratio
from jaxdp.mechanisms.spectrum import spectrum
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.runtime.backend import compiler_options
from jaxdp.sources import base, contour
from jaxdp.sources.simple import law_bounds

# Relative tolerances.
EXACT = 1e-11  # an exact finite law is summed once; the rounding of a few thousand terms is added outward
GRID = 1e-4  # error of the cells of the Gaussian (for deltas above 1e-7) and of Laplace: measured 7e-5 and 1e-6
INVERSION = 1e-6  # gap of the bounds of one pair at which the accountant stops refining
POISSON, FIXED = jaxdp.PoissonSampled, jaxdp.FixedSizeSampled
RATE = 0.1
EPS = np.array([-0.4, 0.0, 0.04, 0.1, 0.15, 0.6, 1.1])


def one_run(mechanism, eps, direction):
    """(lower, upper) bounds of delta of one run, summed over its finite law, without a contour integral."""
    ((record, _),) = normal_form(mechanism, eps.shape)
    return law_bounds(jax.tree_util.tree_map(lambda leaf: leaf[:, 0], record), eps, verb="delta", direction=direction)


def geometric(eps, scale, shift):
    x = np.arange(-400, 400 + shift)
    p, q = (np.tanh(0.5 / scale) * np.exp(-np.abs(x - s) / scale) for s in (shift, 0))
    return hockey_stick(p, q, eps)


def lattice_gaussian(eps, sigma, shift):
    x = np.arange(-60, 60 + shift)
    total = np.exp(-(x**2) / (2 * sigma**2)).sum()
    p, q = (np.exp(-((x - s) ** 2) / (2 * sigma**2)) / total for s in (shift, 0))
    return hockey_stick(p, q, eps)


def response(eps, level, k, lost=0.0):
    masses = np.array([np.exp(level), 1.0, k - 2.0]) / (np.exp(level) + k - 1)
    return lost + (1 - lost) * hockey_stick(masses, masses[[1, 0, 2]], eps)


# name: (mechanism, its exact delta as a function of eps >= 0, relative tolerance)
BASES = {
    "randomized response": (jaxdp.RandomizedResponse(1.0, 4), lambda e: response(e, 1.0, 4), EXACT),
    "pure": (jaxdp.PureDP(0.7), lambda e: response(e, 0.7, 2), EXACT),
    "approximate": (jaxdp.ApproximateDP(0.7, 1e-3), lambda e: response(e, 0.7, 2, 1e-3), EXACT),
    "Laplace": (jaxdp.Laplace(0.8), lambda e: laplace_delta(e, 0.8), GRID),
    "discrete Laplace": (jaxdp.DiscreteLaplace(1.5, 3), lambda e: geometric(e, 1.5, 3), EXACT),
    "discrete Gaussian, odd shift": (jaxdp.DiscreteGaussian(1.5, 3), lambda e: lattice_gaussian(e, 1.5, 3), EXACT),
    "discrete Gaussian, even shift": (jaxdp.DiscreteGaussian(0.4, 2), lambda e: lattice_gaussian(e, 0.4, 2), EXACT),
}


def removed(profile, eps):
    """Exact delta under remove of one sampled run of a symmetric base (notebooks/proofs/profiles.md, section 1)."""
    inner = (np.expm1(eps) + RATE) / RATE
    level = np.log(np.maximum(inner, 1e-300))
    swapped = 1 - inner + inner * profile(-np.minimum(level, 0.0))
    base = np.where(level >= 0, profile(np.maximum(level, 0.0)), swapped)
    return np.where(inner > 0, RATE * base, -np.expm1(eps))


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_one_sampled_run_has_the_published_profile(name, direction):
    base, profile, tolerance = BASES[name]
    _, upper = one_run(POISSON(base, RATE), EPS, direction)
    # the add pair is the remove pair with its two laws exchanged
    exact = removed(profile, EPS) if direction == "forward" else -np.expm1(EPS) + np.exp(EPS) * removed(profile, -EPS)
    assert np.all(upper >= exact - 4e-16)  # ``exact`` is a difference of numbers of size 1
    assert np.all(upper <= exact * (1 + tolerance) + 4e-16)


@pytest.mark.parametrize("name", BASES)
def test_one_fixed_size_run_under_replace_one_has_the_profile_of_proposition_29(name):
    base, profile, tolerance = BASES[name]
    _, upper = one_run(FIXED(base, RATE), EPS, "replace")
    size = np.abs(EPS)
    positive = RATE * profile(np.log1p(np.expm1(size) / RATE))
    exact = np.where(EPS >= 0, positive, -np.expm1(EPS) + np.exp(EPS) * positive)
    assert np.all(upper >= exact - 4e-16)
    assert np.all(upper <= exact * (1 + tolerance) + 4e-16)


@pytest.mark.parametrize("mu", [0.2, 1.0, 5.0])
def test_the_gaussian_grid_under_replace_one_is_never_below_proposition_29(mu):
    eps = np.array([0.0, 0.01, 0.05, 0.2, 0.5])
    for rate in (0.02, 0.3, 1.0):
        exact = rate * gaussian_delta(np.log1p(np.expm1(eps) / rate), mu)
        _, upper = one_run(FIXED(jaxdp.Gaussian(1 / mu), rate), eps, "replace")
        large = exact > 1e-7
        assert np.all(upper >= exact * (1 - 1e-12))
        assert np.all(upper[large] <= exact[large] * (1 + GRID))


@pytest.mark.parametrize("traced", [False, True])
def test_a_loss_of_a_sampled_round_keeps_its_digits_where_a_large_one_meets_a_small_rate(traced):
    q, w = (a.ravel() for a in np.meshgrid(10.0 ** -np.arange(0.0, 200, 7.3), [-3.0, -1e-9, 0.2, 29.0, 41.0, 300, 650]))
    with contextlib.nullcontext() if traced else on_host(), jax.enable_x64(True):
        found = np.asarray((quickly(mixture_log_ratio) if traced else mixture_log_ratio)(w, q))
    with mp.workdps(300):
        exact = [float(mp.log(1 + mp.mpf(b) * mp.expm1(a))) for a, b in zip(w, q, strict=True)]
    np.testing.assert_allclose(found, exact, rtol=24 * ULP, atol=1e-307)


def test_epsilon_of_one_run_inverts_delta_and_brackets_it():
    base = BASES["randomized response"][0]
    ((record, _),) = normal_form(POISSON(base, RATE), (3,))
    record = jax.tree_util.tree_map(lambda leaf: leaf[:, 0], record)
    deltas = np.array([1e-9, 1e-3, 0.02])
    lower, upper = law_bounds(record, deltas, verb="epsilon", direction="forward")
    assert np.all(law_bounds(record, upper, verb="delta", direction="forward")[1] <= deltas)
    assert np.all(upper - lower <= 1e-10)
    below = law_bounds(record, upper * (1 - 1e-9), verb="delta", direction="forward")[0]
    assert np.all(below > deltas)  # so upper is the smallest such epsilon, up to 1e-9


@functools.cache
def quickly(pair):
    return jax.jit(pair, compiler_options=compiler_options("cpu"))


def compiled(pair, *numbers):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return quickly(pair)(*map(float, numbers))


def masses(pair):
    return [np.exp(np.asarray(side)) for side in pair[:2]]


def test_pairs_on_a_grid_keep_both_masses_and_window_pairs_never_lose_any():
    grids = [compiled(finite.gaussian_pair, mu) for mu in (1e-3, 1.0, 20.0)]
    grids += [compiled(finite.laplace_pair, scale) for scale in (0.05, 1.0, 50.0)]
    grids += [compiled(cells.discrete_gaussian_pair, s, k) for s, k in ((0.2, 1), (300.0, 1), (1e4, 7))]
    windows = [compiled(finite.discrete_laplace_pair, 5.0, shift) for shift in (40, 4000)]
    for side in (side for pair in grids for side in masses(pair)):
        assert side.sum() == pytest.approx(1, abs=1e-12)
    for side in (side for pair in windows for side in masses(pair)):
        assert side.sum() >= 1 - 1e-12


INNER = {
    "Laplace": (POISSON(jaxdp.Laplace(0.8), RATE), lambda e: laplace_delta(e, 0.8), "forward"),
    "lattice": (POISSON(jaxdp.DiscreteGaussian(1.5, 3), RATE), lambda e: lattice_gaussian(e, 1.5, 3), "forward"),
    "Gaussian": (FIXED(jaxdp.Gaussian(1.25), RATE), lambda e: gaussian_delta(e, 0.8), "replace"),
}


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("name", INNER)
def test_both_bounds_of_a_sampled_grid_are_around_its_profile_and_close(name, fine):
    mechanism, profile, direction = INNER[name]
    eps = np.array([0.01, 0.04, 0.1, 0.2])
    exact = removed(profile, eps)
    ((record, _),) = normal_form(mechanism, eps.shape)
    above, below = (
        jax.tree_util.tree_map(lambda leaf: leaf[:, 0], side) for side in record.enclosing_records(direction, fine)
    )
    _, upper = law_bounds(above, eps, verb="delta", direction=direction)
    lower, _ = law_bounds(below, eps, verb="delta", direction=direction)
    assert np.all(lower <= exact * (1 + 1e-12)) and np.all(upper >= exact * (1 - 1e-12))
    closeness = GRID / 8 if fine and record.refinable(direction) else GRID
    assert np.all(lower >= exact * (1 - closeness)) and np.all(upper <= exact * (1 + closeness))


def test_a_composition_of_a_sampled_grid_has_close_bounds():
    mechanism = jaxdp.repeat(POISSON(jaxdp.Laplace(0.3), 0.01), 10)
    found = jaxdp.epsilon_bounds(mechanism, 1e-6, relation="remove")  # needs the finer grid: the coarse gap is 2e-6
    assert 0 < found.upper - found.lower <= INVERSION * found.upper


def test_inner_pairs_leave_out_cells_whose_density_the_nodes_do_not_follow():
    for mu in (1e-6, 1e-3, 1.0, 5.0, 20.0, 1e3):
        pairs = (masses(compiled(pair, mu)) for pair in (finite.gaussian_inner_pair, finite.gaussian_pair))
        for side, outer in zip(*pairs, strict=True):
            assert side.sum() <= outer.sum() * (1 + 1e-13)
    assert masses(compiled(finite.gaussian_inner_pair, 1.0))[0].sum() == pytest.approx(1, abs=1e-12)


def test_a_window_that_is_too_small_gives_the_vacuous_bound():
    shifted = one_run(POISSON(jaxdp.DiscreteLaplace(5.0, 4000), 1.0), EPS, "forward")[1]
    assert np.all(shifted == 1)


def test_sampling_with_probability_one_or_zero_is_the_base_or_nothing():
    base, profile, _ = BASES["pure"]
    eps = EPS[EPS >= 0]
    for kind, direction in ((POISSON, "forward"), (POISSON, "reverse"), (FIXED, "replace")):
        assert one_run(kind(base, 1.0), eps, direction)[1] == pytest.approx(profile(eps), abs=1e-13)
        assert np.all(one_run(kind(base, 0.0), eps, direction)[1] <= 1e-12)


# Two asymmetric pairs, one a row. The second has a fourth outcome, of probability 0 under Q: its loss is infinite.
P = np.array([[0.5, 0.3, 0.2, 0.0], [0.5, 0.29, 0.2, 0.01]])
Q = np.array([[0.2, 0.4, 0.4, 0.0], [0.2, 0.4, 0.4, 0.0]])
RUNS = 4


def brute_force(p, q, eps):
    """Exact delta of RUNS composed runs: the sum over every sequence of outcomes."""
    p_all, q_all = p, q
    for _ in range(RUNS - 1):
        p_all, q_all = np.outer(p_all, p).ravel(), np.outer(q_all, q).ravel()
    return hockey_stick(p_all, q_all, eps)


@pytest.mark.parametrize("relation", ["remove", "add"])
def test_composed_sampled_pairs_bracket_the_brute_force_and_add_is_not_remove(relation):
    rate, eps = 0.3, np.array([0.03, 0.2, 0.35])
    mechanism = jaxdp.repeat(POISSON(jaxdp.DiscretePair(P[:, None], Q[:, None]), rate), RUNS)
    lower, upper = jaxdp.delta_bounds(mechanism, eps, relation=relation)
    mixed = (1 - rate) * Q + rate * P
    pairs = {"remove": list(zip(mixed, Q, strict=True)), "add": list(zip(Q, mixed, strict=True))}
    exact = np.stack([brute_force(p, q, eps) for p, q in pairs[relation]])
    other = np.stack([brute_force(p, q, eps) for p, q in pairs["add" if relation == "remove" else "remove"]])
    assert np.all(upper >= exact * (1 - 1e-14))
    assert np.all(lower <= exact * (1 + 1e-14))
    assert upper[0] == pytest.approx(exact[0], rel=INVERSION)
    assert np.all(np.abs(exact - other) > 1e-3 * exact)


def test_propose_test_release_keeps_its_failure_probability_as_mass_at_infinity():
    # With probability ``failure`` the test lets an unstable data set pass. Otherwise the release is 0.5-DP.
    failure, level = 1e-4, 0.5
    high, low = (1 - failure) / (1 + np.exp(-level)), (1 - failure) / (1 + np.exp(level))
    p, q = np.array([high, low, failure, 0.0]), np.array([low, high, 0.0, failure])
    eps = np.array([0.2, 0.5, 3.0])
    released = one_run(jaxdp.DiscretePair(p, q), eps, "forward")[1]
    assert released == pytest.approx(hockey_stick(p, q, eps), rel=EXACT)
    assert released[-1] == pytest.approx(failure, rel=EXACT)
    sampled = one_run(POISSON(jaxdp.DiscretePair(p, q), RATE), eps, "forward")[1]
    assert sampled[-1] == pytest.approx(RATE * failure, rel=EXACT)
    assert one_run(POISSON(jaxdp.DiscretePair(p, q), RATE), eps, "reverse")[1][-1] == 0


def replace_profile(eps, rate, mu):
    """Exact delta of one fixed-size Gaussian run under replace_one: Proposition 29, laws exchanged for eps < 0."""
    size = np.abs(eps)
    positive = rate * gaussian_delta(np.log1p(np.expm1(size) / rate), mu)
    return np.where(eps >= 0, positive, -np.expm1(-size) + np.exp(-size) * positive)


def test_two_fixed_size_gaussian_runs_under_replace_one_are_never_below_the_convolution():
    rate, mu, eps = 0.3, 1.0, np.array([0.1, 1.5])
    u = np.linspace(mu / 2, 12.0, 200_001)
    loss = np.log1p(rate * np.expm1(mu * u - mu**2 / 2))
    under_q = stats.norm.pdf(u) * (u[1] - u[0]) * np.where((u == u[0]) | (u == u[-1]), 0.5, 1.0)
    rest = 1 - (under_q * (np.exp(loss) + 1)).sum()
    exact = [
        (under_q * (np.exp(loss) * replace_profile(e - loss, rate, mu) + replace_profile(e + loss, rate, mu))).sum()
        + rest * replace_profile(e, rate, mu)
        for e in eps
    ]
    twice = jaxdp.repeat(FIXED(jaxdp.Gaussian(2 / mu), rate), 2)  # replaced records differ by two norm bounds
    found = jaxdp.delta_bounds(twice, eps, relation="replace_one", gap=GRID)
    assert np.all(found.upper >= np.array(exact) * (1 - 1e-8))  # the trapezoid's own error
    assert np.all(found.upper <= np.array(exact) * (1 + GRID))
    # No data set attains the dominating pair of two rounds, so lower stays below its delta. One round is attained.
    assert np.all((0.9 * np.array(exact) < found.lower) & (found.lower < 0.96 * np.array(exact)))
    once = jaxdp.repeat(FIXED(jaxdp.Gaussian(2 / mu), rate), 1)
    assert np.all(jaxdp.delta_bounds(once, eps, relation="replace_one").lower > 0)


@pytest.mark.slow
def test_fixed_size_runs_under_replace_one_are_traced_with_a_lower_bound_for_one_round_alone():
    def bounds(times):
        return jaxdp.epsilon_bounds(
            jaxdp.repeat(FIXED(jaxdp.RandomizedResponse(0.66, 3), 0.14), times), 1e-3, relation="replace_one"
        )

    with jax.enable_x64(True):
        traced = jax.jit(bounds)(np.array([1.0, 2.0]))
    eager = bounds([1, 2])
    np.testing.assert_allclose(traced.upper, eager.upper, rtol=1e-6)
    np.testing.assert_allclose(traced.lower, eager.lower * [1, 0], rtol=1e-6)


def test_composed_gaussians_inside_a_sample_are_the_one_gaussian_they_are():
    base = jaxdp.compose(jaxdp.repeat(jaxdp.Gaussian(np.array([4.0, 2.0])), np.array([8, 2])), jaxdp.Gaussian(2.0))
    ((record, _),) = normal_form(POISSON(base, RATE), (2,))
    assert isinstance(record.mechanism, jaxdp.Gaussian)
    assert np.ravel(record.mechanism.noise_multiplier) == pytest.approx(1 / np.sqrt([0.75, 0.75]))


@pytest.mark.parametrize(
    "mechanism, relation, words",
    [
        (POISSON(jaxdp.DiscretePair(P[0], Q[0]), 0.1), "replace_one", "symmetric"),
        (POISSON(jaxdp.LocalRandomizer(1.0), 0.1), "remove", "add_or_remove"),
        (POISSON(jaxdp.repeat(jaxdp.Laplace(1.0), 3), 0.1), "remove", "DiscretePair"),
        (POISSON(jaxdp.repeat(jaxdp.NoisyIteration([0.9], [1.0], [1.0]), 3), 0.1), "remove", "got NoisyIteration"),
        (FIXED(jaxdp.DiscretePair(P[0], Q[0]), 0.1), "replace_one", "symmetric"),
        (
            jaxdp.compose(POISSON(jaxdp.Gaussian(1.0), 0.1), jaxdp.DiscretePair(P[0], Q[0])),
            "replace_one",
            "symmetric pairs only, got DiscretePair",
        ),
    ],
)
def test_combinations_without_a_theorem_are_refused(mechanism, relation, words):
    with pytest.raises(jaxdp.UnsupportedMechanismError, match=words):
        jaxdp.epsilon(mechanism, 1e-5, relation=relation)


def test_the_moments_of_a_finite_pair_accept_any_shape_of_z():
    pair = jaxdp.DiscretePair(P[1], Q[1])
    with on_host():
        grid = pair.log_mgf(np.array([[0.0, 1.0], [2.0, -1.0]]) + 0j)
        single = pair.log_mgf(np.asarray(1.0 + 0j))
    both = P[1] * Q[1] > 0
    exact = np.log(np.sum(P[1][both] ** 2 / Q[1][both]))
    assert np.real(grid)[0, 1] == pytest.approx(exact, rel=1e-12)
    assert np.real(single) == pytest.approx(exact, rel=1e-12)


def test_many_batches_of_a_noisy_iteration_are_those_of_gaussian_noise_at_the_distance_it_states():
    iteration = jaxdp.NoisyIteration([0.9, 0.9], [1.0, 1.0], [1.0, 0.0])
    noise = 1 / jaxdp.iteration.gdp_mu([0.9, 0.9], [1.0, 1.0], [1.0, 0.0])
    for relation in ("remove", "add"):
        found = jaxdp.epsilon_bounds(jaxdp.repeat(FIXED(iteration, 0.01), 1000), 1e-6, relation=relation)
        exact = jaxdp.epsilon(jaxdp.repeat(FIXED(jaxdp.Gaussian(2 * noise), 0.01), 1000), 1e-6, relation=relation)
        assert found.upper == pytest.approx(exact, rel=2e-6) and found.lower == pytest.approx(exact, rel=2e-6)
    replaced = jaxdp.epsilon_bounds(jaxdp.repeat(POISSON(iteration, 0.01), 1000), 1e-6, relation="replace_one")
    assert replaced.lower == pytest.approx(1.06500014, rel=1e-6) and replaced.upper < 1.26  # lower: epsilon of remove


def test_a_poisson_batch_of_pure_dp_costs_at_least_as_much_under_replace_one_as_under_add_or_remove():
    one, many = (jaxdp.repeat(POISSON(jaxdp.PureDP(1.0), 0.01), times) for times in (1, 1000))
    for rounds_of, most in ((one, 1 + 1e-9), (many, 1.21)):
        least = jaxdp.epsilon(rounds_of, 1e-6)
        replaced = jaxdp.epsilon_bounds(rounds_of, 1e-6, relation="replace_one")
        assert least * (1 - 1e-6) <= replaced.lower <= replaced.upper <= least * most


def test_only_pairs_that_are_the_mechanisms_own_claim_a_lower_bound():
    gaussian = FIXED(jaxdp.Gaussian(1.0), 0.1)
    assert gaussian.is_exact("forward")
    assert not gaussian.is_exact("replace")
    assert POISSON(jaxdp.RandomizedResponse(1.0), 0.1).is_exact("forward")
    assert POISSON(jaxdp.DiscreteLaplace(1.0), 0.1).is_exact("forward")
    assert not POISSON(jaxdp.DiscreteLaplace(1.0, 1000), 0.1).is_exact("forward")
    assert not POISSON(jaxdp.Laplace(1.0), 0.1).is_exact("forward")


def exact_single_step(sigma, rate, relation, epsilon):
    """Exact delta of one Poisson-sampled Gaussian step in closed form, with 50 digits."""
    with mp.workdps(50):
        sigma, rate, epsilon = mp.mpf(sigma), mp.mpf(rate), mp.mpf(epsilon)
        if relation == "remove":
            inside = 1 + mp.expm1(epsilon) / rate
            if inside <= 0:
                return -mp.expm1(epsilon)
            at = mp.log(inside)
            return rate * (mp.ncdf(0.5 / sigma - at * sigma) - inside * mp.ncdf(-0.5 / sigma - at * sigma))
        inside = mp.exp(-epsilon) - 1 + rate
        if inside <= 0:
            return mp.mpf(0)
        x = sigma * mp.log(inside / rate) + 1 / (2 * sigma)
        return mp.ncdf(x) - mp.exp(epsilon) * ((1 - rate) * mp.ncdf(x) + rate * mp.ncdf(x - 1 / sigma))


@pytest.mark.parametrize("relation", ["add", "remove"])
@pytest.mark.thorough
def test_one_step_is_enclosed_next_to_the_supremum_of_its_loss_and_everywhere_else(relation):
    random, points = np.random.default_rng(0), 200
    sigma = 10 ** random.uniform(-1.3, 1.7, points)
    rate = np.where(random.random(points) < 0.5, 10 ** random.uniform(-6, 0, points), random.uniform(0.3, 0.6, points))
    rate[::17] = 1 - 10 ** random.uniform(-9, -1, rate[::17].size)
    top = -np.log1p(-rate)  # the supremum of the loss in the add direction
    epsilon = np.where(
        random.random(points) < 0.6, top * (1 - 10 ** random.uniform(-15, 0, points)), random.uniform(0, 32, points)
    )
    epsilon[::7] = -(10 ** random.uniform(-6, 1, epsilon[::7].size))
    epsilon[1::13] = -top[1::13] * (1 + random.uniform(-1e-9, 1e-9, epsilon[1::13].size))
    mechanism = jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate)
    deltas = jaxdp.delta_bounds(mechanism, epsilon, relation=relation)
    exact = [exact_single_step(*point) for point in zip(sigma, rate, [relation] * points, epsilon, strict=True)]
    for truth, lower, upper in zip(exact, deltas.lower, deltas.upper, strict=True):
        assert mp.mpf(float(lower)) <= truth <= mp.mpf(float(upper))
    asked = np.array([float(truth) for truth in exact])
    live = np.flatnonzero((epsilon > 0) & (asked > 1e-290) & (asked < 1))
    steps = jaxdp.PoissonSampled(jaxdp.Gaussian(sigma[live]), rate[live])
    bounds = jaxdp.epsilon_bounds(steps, asked[live], relation=relation)
    for i, lower, upper in zip(live, bounds.lower, bounds.upper, strict=True):
        assert exact_single_step(sigma[i], rate[i], relation, upper) <= asked[i]
        assert lower == 0 or exact_single_step(sigma[i], rate[i], relation, lower) >= asked[i]
    assert np.mean(bounds.lower > 0) > 0.9


def test_one_replace_one_step_of_the_poisson_sampled_gaussian_is_exact():
    """delta(eps) = P(U > u) - e^eps Q(U > u) at the u where the densities of P and Q differ by e^eps."""
    random, n = np.random.default_rng(5), 240
    sigma, eps = 10 ** random.uniform(-1, 3, n), 10 ** random.uniform(-9, 2.7, n)
    rate = np.where(random.random(n) < 0.2, 1 - 10 ** random.uniform(-12, -0.1, n), 10 ** random.uniform(-9, -0.1, n))
    eps[::3] = (rate / sigma * 10 ** random.uniform(-2, 2, n))[::3]
    eps[:4] = 0
    sigma[4:24] = 10 ** random.uniform(3, 17, 20)  # up to noise so large that u is lost by rounding in float64
    mechanism = POISSON(jaxdp.Gaussian(sigma), rate)
    found = jaxdp.delta_bounds(mechanism, eps, relation="replace_one")
    exact = []
    for s, q, e in zip(sigma, rate, eps, strict=True):
        with mp.workdps(60 + int(1 / s**2)):
            mu, q, grown = 1 / mp.mpf(s), mp.mpf(q), mp.exp(mp.mpf(e))
            m, rest = q * mp.exp(-mu * mu / 2), (1 - q) * (grown - 1)
            u = mp.log((rest + mp.sqrt(rest * rest + 4 * m * m * grown)) / (2 * m)) / mu
            exact.append(q * mp.ncdf(mu - u) - grown * q * mp.ncdf(-mu - u) - rest * mp.ncdf(-u))
    assert all(low <= value <= high for low, value, high in zip(found.lower, exact, found.upper, strict=True))
    likely = found.upper > 1e-20
    assert likely.sum() > 80 and (found.upper - found.lower <= 1e-8 * found.upper)[likely & (sigma < 1e3)].all()
    inside = np.flatnonzero(likely & (found.upper < 0.9))[:20]
    part = POISSON(jaxdp.Gaussian(sigma[inside]), rate[inside])
    least = jaxdp.epsilon_bounds(part, found.upper[inside], relation="replace_one").lower
    most = jaxdp.epsilon_bounds(part, found.lower[inside], relation="replace_one").upper
    assert (least <= eps[inside]).all() and (eps[inside] <= most).all()


def test_two_rarely_sampled_steps_are_the_integral_of_one_step():
    """Usual losses and rare large ones are so far apart that the contour needs a bound of epsilon to start from."""
    step, delta = jaxdp.PoissonSampled(jaxdp.Gaussian(0.7), 1e-5), 1e-10
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(step, 2), delta, relation="remove")
    assert 0 < upper - lower <= 1e-6 * upper
    x = np.linspace(-9.0, 12.0, 8001)
    ratio = 1 + 1e-5 * np.expm1(x / 0.7 - 0.5 / 0.49)
    weight = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi) * (x[1] - x[0]) * ratio

    def exact(epsilon):
        return weight @ jaxdp.delta(step, epsilon - np.log(ratio), relation="remove")

    assert exact(upper * (1 + 1e-6)) < delta < exact(lower * (1 - 1e-6))


@pytest.mark.parametrize("relation", ["remove", "add", "replace_one"])
def test_steps_cost_no_more_than_one_in_which_all_are_sampled_or_none(relation, monkeypatch):
    monkeypatch.setattr(contour, "SAMPLED_LADDER", contour.SAMPLED_LADDER[:-1])  # saves time at some points
    rng = np.random.default_rng(7)
    sigma, rate = rng.uniform(0.5, 3, 6), 10 ** rng.uniform(-4, -0.3, 6)
    steps, delta = np.round(10 ** rng.uniform(0, 2, 6)), 10 ** rng.uniform(-9, -3, 6)
    one = jaxdp.PoissonSampled(jaxdp.Gaussian(sigma / np.sqrt(steps)), -np.expm1(steps * np.log1p(-rate)))
    many = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), steps)
    least = jaxdp.epsilon_bounds(many, delta, relation=relation).lower
    assert (least <= jaxdp.epsilon(one, delta, relation=relation) * (1 + 1e-12)).all()


def test_renyi_divergences_of_large_orders_are_at_most_those_without_sampling():
    order = np.array([512.0, 1024.0, 1e6])
    found = jaxdp.renyi(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), order)
    exact = jaxdp.conversions.cut_renyi(order[:2], 1.0, 0.01, np.inf)
    assert np.all(exact * (1 - 1e-9) <= found[:2]) and np.all(found <= order / 2 * (1 + 1e-9))
    replaced = jaxdp.renyi(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), order, relation="replace_one")
    assert np.all(found * (1 - 1e-9) <= replaced) and np.all(replaced <= 2 * order * (1 + 1e-9))

    # The second law of replace_one is at least 1 - q times the unsampled law, and hardly more where the moment is
    # decided. The two divergences therefore differ by -log(1 - q).
    beside = replaced - found + np.log1p(-0.01)
    assert np.all(np.abs(beside[:2]) < 1e-9 * found[:2])


def log_sum_exp(x):
    return x.max() + np.log(np.exp(x - x.max()).sum())


@pytest.mark.parametrize(
    ("sigma", "shift", "rate"), [(0.4, 1, 0.1), (1.0, 1, 0.01), (1.0, 7, 1e-3), (30.0, 20, 0.6), (200.0, 30, 0.05)]
)
def test_renyi_divergences_of_sampled_discrete_gaussian_noise_count_what_lies_beyond_the_outcomes_listed(
    sigma, shift, rate
):
    order = np.array([1.001, 1.5, 8.0, 40.0, 64.0, 200.0])
    reach = int(45 * sigma + 2 * shift * order[-1])
    x = np.arange(-reach, reach + 1.0)
    total = log_sum_exp(-0.5 * (x / sigma) ** 2)
    middle, up, down, far = (-0.5 * ((x - at) / sigma) ** 2 - total for at in (0, shift, -shift, 2 * shift))

    def sampled(law):
        return np.logaddexp(np.log1p(-rate) + middle, np.log(rate) + law)

    def divergence(one, other):
        return np.array([log_sum_exp(a * one + (1 - a) * other) / (a - 1) for a in order])

    noise = jaxdp.DiscreteGaussian(sigma, shift)
    exact = {
        (POISSON, "remove"): divergence(sampled(up), middle),
        (POISSON, "add"): divergence(middle, sampled(up)),
        (POISSON, "replace_one"): divergence(sampled(up), sampled(down)),
        (FIXED, "remove"): divergence(sampled(far), middle),
    }
    for (kind, relation), value in exact.items():
        found = jaxdp.renyi(kind(noise, rate), order, relation=relation)
        assert np.all(value * (1 - 1e-9) - 1e-13 / (order - 1) <= found), (kind, relation)
        assert np.all(found <= 1.06 * value + 1e-11 / (order - 1)), (kind, relation)


def test_renyi_divergences_next_to_order_one_do_not_exceed_those_of_larger_orders_by_much():
    order = 1 + np.array([1e-12, 1e-5, 1e-3, 0.1])
    gaussian = jaxdp.repeat(POISSON(jaxdp.Gaussian(17.6555), 6.2278e-4), 4)
    for noise in (
        gaussian,
        POISSON(jaxdp.RandomizedResponse(0.016224, 8), 6.2278e-4),
        POISSON(jaxdp.Laplace(1.0), 0.01),
    ):
        found = jaxdp.renyi(noise, order)
        assert np.all(found[:-1] <= 1.01 * found[1:])  # divergences rise with the order


@pytest.mark.slow
def test_renyi_divergences_have_a_derivative_by_the_number_of_rounds():
    """The bound by the largest loss is infinite here, for any number of rounds; it must not spoil the derivative."""
    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(
            lambda times: jaxdp.renyi(jaxdp.repeat(POISSON(jaxdp.Gaussian(1.0), 0.01), times), 8.0)
        )(3.0)
    assert float(slope) == pytest.approx(float(value) / 3)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0])
def test_no_loss_of_sampled_discrete_gaussian_noise_is_the_largest(sigma):
    noise = jaxdp.PoissonSampled(jaxdp.DiscreteGaussian(sigma), 0.01)
    for relation in ("remove", "replace_one"):
        assert jaxdp.epsilon(noise, 0.0, relation=relation) == np.inf
        assert 0 < jaxdp.delta(noise, 1e5, relation=relation) < 1e-300
        assert jaxdp.renyi(noise, np.inf, relation=relation) == np.inf


def test_one_fixed_size_round_under_replace_one_has_the_closed_form_of_remove():
    batch = jaxdp.FixedSizeSampled(jaxdp.Gaussian(1.0), 0.1)
    lower, upper = jaxdp.epsilon_bounds(batch, 1e-6, relation="replace_one")
    exact = jaxdp.epsilon(jaxdp.PoissonSampled(jaxdp.Gaussian(0.5), 0.1), 1e-6, relation="remove")
    assert upper - lower < 1e-10 * upper and upper == pytest.approx(exact, rel=1e-10)


def test_outcomes_without_mass_are_not_summed_and_closer_pairs_serve_only_the_bound_that_is_wanted(monkeypatch):
    """Half of the outcomes of the replace_one pair have no mass and are left out of the sums.

    Composed, the pair has no lower bound, so `epsilon` asks the closer (fine) pairs for the upper bound only.
    """
    rounds_of = jaxdp.repeat(jaxdp.FixedSizeSampled(jaxdp.Gaussian(np.ones(1)), np.full(1, 0.01)), np.full(1, 1000.0))
    one = tuple(jax.tree_util.tree_map(lambda x: x[0], normal_form(rounds_of.under("replace_one"), (1,))))
    with on_host():
        (part,) = spectrum(one, "replace").discrete
        every = xp.vmap(lambda r: r.part("replace")[:3])(one[0][0])
    assert (part.log_weight[:, 1:] > -np.inf).all() and 0.45 < part.loss.size / every[0].size < 0.55
    assert np.exp(part.log_weight).sum() == pytest.approx(np.exp(every[1]).sum(), rel=1e-14)
    asked, call = [], contour._Contour.__call__
    monkeypatch.setattr(contour._Contour, "__call__", lambda *given: asked.append(given[1]) or call(*given))
    upper = jaxdp.epsilon(rounds_of, 1e-6, relation="replace_one", gap=1e-7)
    fine = [len(stacks[0][1]) for stacks in asked if getattr(stacks[0][0].mechanism, "fine", False)]
    assert fine and set(fine) == {1}
    assert jaxdp.epsilon_bounds(rounds_of, 1e-6, relation="replace_one", gap=1e-7).upper == upper


def test_a_gap_grows_with_the_distance_from_a_lower_bound_from_elsewhere():
    """A hundredth of the distance, between the gap asked for and 20 times that, or 4e-5; not at all beside inf."""
    apart = np.array([np.inf, 0.0, 0.999, 1.0, 2.0])
    for gap, allowed in ((1e-6, 2e-5), (1e-5, 4e-5), (1e-3, 1e-3)):
        found = base.Asked(gap, apart=apart).allowed(np.full(5, 0.9), np.ones(5))
        assert found == pytest.approx([gap, allowed, max(gap, 1e-5), gap, gap])


NOTHING = jaxdp.Shuffled(jaxdp.RandomizedResponse(1e-9), num_users=1000)


@pytest.mark.parametrize("base", [jaxdp.DiscreteLaplace(1.0), jaxdp.Gaussian(1.0), jaxdp.RandomizedResponse(1.0, 3)])
@pytest.mark.parametrize("beside", [jaxdp.compose(), pytest.param(NOTHING, marks=pytest.mark.thorough)])
def test_rounds_of_fixed_size_batches_under_replace_one_leak_no_less_than_one_data_set(base, beside):
    """The pairs for remove and add are attained (contributions 1 and -1, all others -1): a lower bound.

    The upper bound is larger: the symmetric pair only dominates.
    """
    rounds_of = jaxdp.repeat(jaxdp.FixedSizeSampled(base, 0.05), 100)
    one = jaxdp.epsilon_bounds(rounds_of, 1e-6)
    both = jaxdp.epsilon_bounds(jaxdp.compose(rounds_of, beside), 1e-6, relation="replace_one")
    assert one.lower * (1 - 1e-4) <= both.lower <= one.upper * (1 + 1e-6)
    assert one.upper * 1.02 < both.upper < one.upper * 1.4


@pytest.mark.slow
@pytest.mark.parametrize(
    "sigma, q, x", [(3.405083588576935, 0.00956069866238651, 0.0032677167952102977), (1.3, 0.2, 0.01)]
)
def test_the_trade_off_of_sampled_discrete_noise_is_found_between_dense_kinks(sigma, q, x):
    """Exact: the most powerful test, which takes outcomes in the order of their likelihood ratio."""
    k = np.arange(-int(14 * sigma), int(14 * sigma) + 2)
    base = np.exp(-(k**2) / (2 * sigma**2))
    shifted = np.exp(-((k - 1) ** 2) / (2 * sigma**2))
    without = base / base.sum()
    mixed = (1 - q) * without + q * shifted / shifted.sum()
    for relation, first, second in (("remove", mixed, without), ("add", without, mixed)):
        order = np.argsort(-first / second)
        taken = np.minimum(np.cumsum(second[order]), x) - np.minimum(np.cumsum(second[order]) - second[order], x)
        exact = 1 - np.sum(taken * (first / second)[order])
        noise = jaxdp.PoissonSampled(jaxdp.DiscreteGaussian(sigma), q)
        found = jaxdp.tradeoff(noise, x, relation=relation)
        assert exact - 1e-7 <= found <= exact * (1 + 1e-12)


def discrete_laplace_masses(scale, s, centre):
    """Masses of discrete Laplace noise around ``centre``: outcomes <= 0 (joined), 1, ..., s - 1, >= s (joined)."""
    between = np.tanh(0.5 / scale) * np.exp(-np.abs(np.arange(1, s) - centre) / scale)
    ends = np.exp(-np.array([centre, s - centre]) / scale) / (1 + np.exp(-1 / scale))
    return np.r_[ends[0], between, ends[1]]


@pytest.mark.parametrize("relation", ["remove", "add", "replace_one"])
@pytest.mark.parametrize("scale, sensitivity, q", [(700.0, 514, 0.3), (1500.0, 1800, 0.01), (400.0, 1000, 0.9)])
def test_sampled_discrete_laplace_noise_of_large_sensitivity_is_followed_in_cells(scale, sensitivity, q, relation):
    """The exact delta is the sum over all outcomes."""
    s = 2 * sensitivity if relation == "replace_one" else sensitivity
    far, near = (discrete_laplace_masses(scale, s, centre) for centre in (s, 0))
    middle = discrete_laplace_masses(scale, s, s // 2) if relation == "replace_one" else near
    first, second = (1 - q) * middle + q * far, (1 - q) * middle + q * near
    if relation == "add":
        first, second = second, first
    noise = jaxdp.PoissonSampled(jaxdp.DiscreteLaplace(scale, sensitivity), q)
    for share in (0.1, 0.5, 0.9):
        epsilon = share * np.log(np.max(first / second))
        exact = np.sum(np.maximum(first - np.exp(epsilon) * second, 0.0))
        found = jaxdp.delta_bounds(noise, epsilon, relation=relation)
        assert exact * (1 - 1e-4) <= found.lower <= exact * (1 + 1e-11)
        assert exact * (1 - 1e-11) <= found.upper <= exact * (1 + 1e-4)


def test_a_batch_of_fixed_size_needs_a_pair_that_is_the_same_in_both_orders():
    """One record `a` among 99 records `b`: a batch that loses `a` gains a `b`, and either law may be the wider one."""
    p, q = [0.5, 0.5], [0.01, 0.99]
    for first, second in ((p, q), (q, p)):
        base = jaxdp.DiscretePair(first, second)
        for relation in ("add", "remove", "add_or_remove"):
            with pytest.raises(jaxdp.UnsupportedMechanismError, match="same profile in both orders"):
                jaxdp.epsilon(FIXED(base, 0.01), 1e-5, relation=relation)
        assert jaxdp.epsilon(FIXED(base, 1.0), 1e-5) > 0
    infinite = 8e-10  # mass at infinity in one order: after 10,000 sampled rounds delta is 4e-6 at every epsilon
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="to the last digit"):
        jaxdp.epsilon(FIXED(jaxdp.DiscretePair([0.5, 0.5, 0.0], [0.5, 0.5 - infinite, infinite]), 0.5), 1e-6)
    eps = np.linspace(0.0, 5.0, 101)
    either = np.maximum(*(jaxdp.delta(base, eps, relation=relation) for relation in ("add", "remove")))
    wider = jaxdp.conversions.pair_from_profile(eps, either)
    count = np.arange(101)  # of 100 batches of one record each, those that release the first outcome: binomial
    with_a, without = stats.binom.pmf(count, 100, 0.01 * 0.5 + 0.99 * 0.01), stats.binom.pmf(count, 100, 0.01)
    exact = np.maximum(with_a - math.exp(2.0) * without, 0).sum()
    assert exact > 1e-6 and jaxdp.delta(jaxdp.repeat(FIXED(wider, 0.01), 100), 2.0) >= exact


def test_several_releases_under_replace_one_need_a_pair_that_is_the_same_in_both_orders():
    """A value may change from a to b in one release, b to a in another: epsilon at 1e-3 is 2.756, and not 2.06."""
    p, q = np.array([0.81321, 0.00466, 0.18213]), np.array([0.89828, 0.03312, 0.0686])
    pair, given = jaxdp.DiscretePair(p, q), {"relation": "replace_one"}
    crossed = np.outer(p, q), np.outer(q, p)
    assert np.maximum(crossed[0] - math.exp(2.75) * crossed[1], 0).sum() > 1e-3
    for several in (jaxdp.repeat(pair, 2), jaxdp.compose(pair, jaxdp.DiscretePair(q, p)), jaxdp.repeat(pair, [1, 3])):
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="several releases under replace_one"):
            jaxdp.epsilon(several, 1e-3, **given)
    # Orders that differ by less than 1e-9 count too: delta at epsilon 9 is 5.7e-22, and one order alone has 9.5e-25.
    low, high = 1e-3 * 1e-9, 0.9e-9
    near = (
        [1 - low - high * math.exp(-4.0), low, high * math.exp(-4.0)],
        [1 - low * math.exp(-6.0) - high, low * math.exp(-6.0), high],
    )
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="to the last digit"):
        jaxdp.delta(jaxdp.repeat(jaxdp.DiscretePair(*near), 2), 9.0, **given)
    in_any_order = jaxdp.DiscretePair([0.1, 0.2, 0.7], [0.2, 0.1, 0.7])
    assert jaxdp.delta(jaxdp.repeat(in_any_order, 2), 0.1, **given) > 0
    once = jaxdp.compose(pair, jaxdp.repeat(jaxdp.Gaussian(3.0), 5), jaxdp.DiscretePair([0.3, 0.7], [0.7, 0.3]))
    assert jaxdp.epsilon(once, 1e-3, **given) > jaxdp.epsilon(pair, 1e-3, **given)
    eps = np.linspace(0.0, 3.0, 201)
    either = np.maximum(*(jaxdp.delta(pair, eps, relation=relation) for relation in ("add", "remove")))
    wider = jaxdp.repeat(jaxdp.conversions.pair_from_profile(eps, either), 2)
    assert 2.756 <= jaxdp.epsilon(wider, 1e-3, **given) < 2.8


def test_the_lower_bound_of_a_composition_with_fixed_batches_is_at_least_that_of_the_rest():
    rest = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(0.8), 0.1), 20)
    alone = jaxdp.epsilon_bounds(rest, 1e-6, relation="replace_one")
    for fixed in (jaxdp.repeat(FIXED(jaxdp.Gaussian(20.0), 1e-3), 2), jaxdp.repeat(FIXED(jaxdp.Laplace(1.0), 0.1), 0)):
        lower, upper = jaxdp.epsilon_bounds(jaxdp.compose(fixed, rest), 1e-6, relation="replace_one")
        assert alone.lower * (1 - 1e-9) <= lower <= upper <= alone.upper * (1 + 1e-6)


# Steps, rate, noise, derivative of epsilon(1e-6) in the noise: extrapolated differences of epsilons, gap 1e-11.
FEW_STEPS = [
    (1, 0.0001, 0.6, -0.11109131),
    (2, 0.001, 0.6, -4.810792),
    (2, 1e-05, 1.0, -0.00011775875),
    (5, 1e-05, 0.6, -0.0064540921),
    (20, 0.0001, 0.6, -0.70942012),
    (100, 0.01, 2.0, -0.15749392),
]


@pytest.mark.slow
def test_derivatives_of_few_steps_at_small_rates():
    # most losses are near 0, few are large: their scales differ by up to 1e5
    times, rate, noise, exact = np.array(FEW_STEPS).T

    def total(noise):
        steps = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(noise), rate), times)
        return jaxdp.epsilon(steps, 1e-6, relation="remove").sum()

    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.grad(total)(noise), exact, rtol=3e-5)

        everyone, fewer = (jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), q) for q in (1.0, 1 - 1e-4))
        slope = jax.grad(lambda q: jaxdp.epsilon(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), q), 1e-6))(1.0)
        quotient = (jaxdp.epsilon(everyone, 1e-6, gap=1e-9) - jaxdp.epsilon(fewer, 1e-6, gap=1e-9)) / 1e-4
        assert slope == pytest.approx(quotient, rel=1e-3)

        def where_zero(rate):  # delta(0) is 1.5e-4: epsilon is 0 also at rates near 1e-4; the search ends at 3e-17
            steps = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), rate), 10)
            return jaxdp.epsilon(steps, 1e-3, relation="remove")

        assert where_zero(1e-4) == 0 and jax.grad(where_zero)(1e-4) == 0


@pytest.mark.slow
def test_second_derivatives_of_sampled_steps():
    def epsilon(noise):
        steps = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(noise), 0.01), 5)
        return jaxdp.epsilon(steps, 1e-6, relation="remove")

    with jax.enable_x64(True):
        slope = jax.grad(epsilon)
        exact = (float(slope(1.001)) - float(slope(0.999))) / 2e-3
        assert float(jax.grad(slope)(1.0)) == pytest.approx(exact, rel=1e-4)
