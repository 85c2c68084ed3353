"""Composed shuffled rounds: the two finite pairs that enclose one round, and the bounds of their compositions."""

import collections
import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.interval import Bounds
from jaxdp.mechanisms.composition import flat_rows
from jaxdp.runtime import precision
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options
from jaxdp.shuffle import approximate, bounds, law, rounds
from jaxdp.sources import round_laws, shuffling, traced_rounds

ROUNDING = 1e-12  # relative rounding of the sums in this file, of a few thousand products
POINTS = [(1e3, 2.0), (1e5, 1.0), (10, 1.0), (1, 3.0), (3, 0.5), (1e12, 0.1), (100, 20.0), (1e6, 4.0)]
USERS, EPS0 = np.array(POINTS, float).T
LOG_DELTAS = (-14.0, -140.0)


def profile(pair, epsilon):
    """delta of pairs (losses, log weights under P, mass at infinity), one a row, at the epsilons of the same row."""
    losses, logs, infinity = pair
    share = -np.expm1(np.minimum(epsilon[:, :, None] - losses[:, None, :], 0.0))
    return infinity[:, None] + np.sum(np.exp(logs)[:, None, :] * share, axis=2)


def swapped(pair):
    losses, logs, infinity = pair
    return -losses, logs - losses, infinity


def rows_of(mechanism):
    return flat_rows(mechanism, np.shape(mechanism.num_users))


@functools.cache
def grid_of(log_delta):
    """(grid, weights, tilt) for each of POINTS, chosen for ten rounds that together have this log delta."""
    flat = rows_of(jaxdp.Shuffled(jaxdp.LocalRandomizer(EPS0), USERS))
    ones = ((jax.tree_util.tree_map(lambda x: x[:, None], flat), np.full((USERS.size, 1), 10.0)),)
    nothing = np.full(USERS.size, np.nan)
    return round_laws.grids_of(ones, np.full(USERS.size, log_delta), nothing)[0]


def two_point_orders(users, eps0, epsilon):
    """Bounds of log delta of shuffled two-point randomized response: first of one order, then of the other."""
    with jax.enable_x64(True):
        laws = jax.tree_util.tree_map(np.asarray, jax.vmap(law.two_point)(eps0))
    for order in (0, 1):
        one = jax.tree_util.tree_map(lambda a, i=order: a[:, i], laws)
        yield bounds.bounds("log_delta", one, users, epsilon, 1e-9)


def upper_pair(grid, delta):
    with np.errstate(divide="ignore"):
        return rounds.by_rows(rounds.upper_pair, grid, np.log(delta))


def lower_pair(grid, *sides):
    with np.errstate(divide="ignore"):
        return rounds.by_rows(
            rounds.lower_pair, grid, np.ones(len(grid)), *(Bounds(*map(np.log, side)) for side in sides)
        )


@pytest.mark.parametrize("log_delta", LOG_DELTAS)
def test_the_upper_pair_is_nowhere_below_the_round(log_delta):
    grid, *_ = grid_of(log_delta)
    tiled = [np.repeat(x, grid.shape[1]) for x in (EPS0, USERS)]
    truth = bounds.clones_bounds("delta", *tiled, grid.ravel(), "clones", 1e-9)
    lower = truth.lower.reshape(grid.shape)
    made = profile(upper_pair(grid, truth.upper.reshape(grid.shape)), grid)
    assert (made >= lower * (1 - ROUNDING)).all()
    # close to the round, and not only above it, at six of the eight points
    assert (np.sort(made[:, 0] / np.maximum(lower[:, 0], 1e-300))[:6] <= 1 + 1e-3).all()


def test_an_irregular_upper_bound_does_not_bend_the_upper_pair_below_the_truth():
    """Making the slopes monotone from the left would give a pair that is 25% too small here."""
    grid = np.linspace(0.0, 1.0, 900)[None]
    truth = (1 - grid) ** 3 * 0.2
    jitter = 1 + 1e-3 * (np.random.default_rng(0).uniform(size=grid.shape) < 0.05)
    made = profile(upper_pair(grid, truth * jitter), grid)
    assert (made >= truth * (1 - ROUNDING)).all()


@pytest.mark.parametrize("log_delta", LOG_DELTAS)
def test_the_lower_pair_is_a_law_nowhere_above_the_round(log_delta):
    flat = rows_of(jaxdp.Shuffled(jaxdp.LocalRandomizer(EPS0), USERS))
    grid, weights, tilt = grid_of(log_delta)
    made = round_laws.lower_law_of(flat, grid, weights, tilt)
    sides = list(two_point_orders(*(np.repeat(x, grid.shape[1]) for x in (USERS, EPS0)), grid.ravel()))
    between = grid + np.append(np.diff(grid), np.zeros((len(grid), 1)), axis=1) * 0.37
    inner = list(two_point_orders(*(np.repeat(x, grid.shape[1]) for x in (USERS, EPS0)), between.ravel()))
    assert (np.sum(np.exp(made[1]), axis=1) <= 1 + ROUNDING).all()

    def below(first, second):
        """Rows whose law is nowhere above the round. first, second: places in ``sides`` of the round's two orders."""
        good = np.ones(USERS.size, bool)
        for one, place in ((made, first), (swapped(made), second)):
            for points, truth in ((grid, sides[place]), (between, inner[place])):
                most = np.exp(truth.upper.reshape(grid.shape)) * (1 + ROUNDING) + 1e-300
                good &= (profile(one, points) <= most).all(axis=1)
        return good

    assert (below(0, 1) | below(1, 0)).all()  # either order of the two inputs may be taken
    share = profile(made, grid)[:, 0] / np.exp(sides[0].lower.reshape(grid.shape)[:, 0])
    assert (np.sort(share)[2:] >= 0.98).all()  # close to the round at six of the eight points


def test_a_lower_pair_from_wide_bounds_still_is_a_law_below_the_truth():
    """Lower values may rise with epsilon where the bounds are wide. Taken as they are, they give masses of 1e8."""
    grid = np.linspace(0.0, 1.0, 300)[None]
    truth = (1 - grid) ** 3 * 0.2
    rng = np.random.default_rng(1)
    wide = Bounds(truth * (1 - 0.01 * rng.uniform(size=grid.shape)), truth * (1 + 0.01 * rng.uniform(size=grid.shape)))
    made = lower_pair(grid, wide, wide)
    assert np.sum(np.exp(made[1])) <= 1 + ROUNDING
    assert (profile(made, grid) <= truth * (1 + ROUNDING)).all()


def test_the_lower_pair_needs_its_lowering(monkeypatch):
    """Chords of the exact values lie above the convex profile between grid points, so the pair must be lowered."""
    grid, fine = np.linspace(0.0, 1.0, 12)[None], np.linspace(0.0, 1.0, 400)[None]

    def truth(epsilon):
        return (math.e - np.exp(epsilon)) ** 2 / 16  # convex in e^epsilon, 0 at 1, a slope of -0.2 at 0

    exact = Bounds(truth(grid), truth(grid))
    honest = profile(lower_pair(grid, exact, exact), fine)
    assert (honest <= truth(fine) * (1 + ROUNDING) + 1e-15).all()

    def masses_of_chords(grid, values):
        slope = np.diff(np.exp(values.lower)) / np.diff(np.exp(grid))
        return np.append(slope[1:], 0.0) - slope

    monkeypatch.setattr(rounds, "masses_below", masses_of_chords)
    assert (profile(lower_pair(grid, exact, exact), fine) > truth(fine) * (1 + 1e-6)).any()


def exact_pair(users, local):
    """The clones pair by its definition: (P, Q) for each number of clones and count of ones; local = e^eps0."""
    r, alpha = 1 / local, local / (local + 1)
    pairs = []
    for j in range(users):
        weight = math.comb(users - 1, j) * r**j * (1 - r) ** (users - 1 - j) / 2**j
        heads = [math.comb(j, i) if 0 <= i <= j else 0 for i in range(-1, j + 2)]
        for i in range(j + 2):
            p, q = (weight * (a * heads[i] + (1 - a) * heads[i + 1]) for a in (alpha, 1 - alpha))
            pairs.append((p, q))
    return pairs


def two_point_pair(users, local):
    """(P, Q) for each count of ones: one person holds 1 (P) or 0 (Q), all others 0.

    A report is true with probability local/(local + 1).
    """
    truth, lie = local / (local + 1), 1 / (local + 1)
    others = [math.comb(users - 1, i) * lie**i * truth ** (users - 1 - i) for i in range(users)] + [0, 0]
    pairs = zip([others[-1], *others], others[: users + 1], strict=False)
    return [(truth * before + lie * here, lie * before + truth * here) for before, here in pairs]


def composed_delta(one, times, central):
    one = [(p, q) for p, q in one if p or q]
    composed = [(Fraction(1), Fraction(1))]
    for _ in range(times):
        composed = [(p * s, q * t) for p, q in composed for s, t in one]
    return sum(max(p - central * q, Fraction(0)) for p, q in composed)


@pytest.mark.parametrize("users", [2, 3])
def test_two_and_three_rounds_of_few_users_enclose_the_exact_compositions(users):
    """Upper: delta of the clones pair. Lower: delta of two-point randomized response, one of the local randomizers."""
    local, central = Fraction(math.e), Fraction(13, 10)
    mechanism = jaxdp.Shuffled(jaxdp.LocalRandomizer(math.log(local)), users)
    lower, upper = jaxdp.delta_bounds(jaxdp.repeat(mechanism, np.array([2, 3])), epsilon=math.log(central))
    for place, times in enumerate((2, 3)):
        clones = float(composed_delta(exact_pair(users, local), times, central))
        forward = two_point_pair(users, local)
        turned = [(q, p) for p, q in forward]
        response = float(max(composed_delta(pair, times, central) for pair in (forward, turned)))
        assert clones * (1 - ROUNDING) <= upper[place] <= clones * (1 + 1e-9)
        assert 0.93 * response <= lower[place] <= response * (1 + ROUNDING)


def test_composed_rounds_have_ordered_bounds():
    eps0, users, times = np.array([4.0, 1.0]), np.array([1e5, 1e6]), np.array([100, 10])
    one = jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users)
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(one, times), delta=1e-6)
    assert (0 < lower).all() and (lower < upper).all()
    assert (upper > jaxdp.epsilon(one, delta=1e-6)).all() and (upper < times * eps0).all()
    stronger = jaxdp.epsilon(jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users, "stronger"), times), 1e-6)
    assert (lower <= stronger).all() and (stronger < upper).all()


# (n, eps0, k, epsilon of ten rounds at delta 1e-6). The epsilons have three digits and come from another route.
TEN_ROUNDS = [(1e3, 1.0, 10, 0.275), (1e4, 3.0, 100, 0.305), (1e4, 3.0, 3, 0.753)]


@pytest.mark.parametrize(("users", "eps0", "kinds", "exact"), TEN_ROUNDS)
def test_ten_rounds_of_a_named_randomizer_cost_what_an_exact_sum_says(users, eps0, kinds, exact):
    mechanism = jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, kinds), users)
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(mechanism, 10), delta=1e-6)
    assert exact - 5e-4 <= upper <= exact + 5e-4
    assert exact * (1 - 2e-3) <= lower <= exact + 5e-4 and lower <= upper


@pytest.mark.parametrize(
    "randomizer",
    [
        jaxdp.RandomizedResponse(1.0, 2),
        jaxdp.LocalHashing(1.0, 2, 0.0),
        jaxdp.HadamardResponse(1.0),
        jaxdp.LocalLaplace(1.0),
    ],
    ids=["binary", "hashing", "hadamard", "laplace"],
)
@pytest.mark.thorough
def test_composed_named_randomizers_have_the_lower_bound_of_a_data_set(randomizer):
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.Shuffled(randomizer, 1e4), 10), delta=1e-6)
    assert 0.7 * upper <= lower <= upper


@pytest.mark.parametrize("users", [2, 5])
def test_composed_binary_response_encloses_the_exact_composition(users):
    local, central = Fraction(math.e), Fraction(13, 10)
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.RandomizedResponse(math.log(local), 2), users), 3)
    lower, upper = jaxdp.delta_bounds(rounds_of, epsilon=math.log(central))
    forward = two_point_pair(users, local)
    turned = [(q, p) for p, q in forward]
    exact = float(max(composed_delta(pair, 3, central) for pair in (forward, turned)))
    assert 0.99 * exact <= lower <= exact * (1 + ROUNDING) and exact <= upper


def revealing_rounds(eps0, local_delta, users, times):
    """(P, Q) of ``times`` shuffled rounds of randomized response that reveals the value with probability local_delta.

    One user's bit is replaced; all others hold 1. Reports: 0, 1, "certainly 0", "certainly 1".
    """
    truth = math.exp(eps0) / (math.exp(eps0) + 1)
    zero = np.array([(1 - local_delta) * truth, (1 - local_delta) * (1 - truth), local_delta, 0.0])
    one = zero[[1, 0, 3, 2]]
    laws = collections.defaultdict(lambda: np.zeros(2))
    for outcome in itertools.product(range(4), repeat=users):
        others = math.prod(one[k] for k in outcome[1:])
        laws[tuple(sorted(outcome))] += others * np.array([zero[outcome[0]], one[outcome[0]]])
    single = np.array(list(laws.values())).T
    return functools.reduce(
        lambda all_, _: np.einsum("si,sj->sij", all_, single).reshape(2, -1), range(times - 1), single
    )


@pytest.mark.slow
@pytest.mark.parametrize(("users", "times", "local_delta", "bound"), [(3, 2, 1e-3, "clones"), (2, 3, 0.02, "stronger")])
def test_rounds_with_a_local_delta_are_above_the_exact_composition(users, times, local_delta, bound):
    eps0 = 0.7
    p, q = revealing_rounds(eps0, local_delta, users, times)
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0, local_delta), users, bound), times)
    epsilon = np.array([-0.5, 0.4, eps0, 4 * eps0])
    exact = [max(np.maximum(a - math.exp(e) * b, 0).sum() for a, b in ((p, q), (q, p))) for e in epsilon]
    assert exact[-1] > 0  # 4 eps0 exceeds the sum of the local epsilons: without a local delta, delta is 0 there
    lower, upper = jaxdp.delta_bounds(rounds_of, epsilon)
    assert (lower <= exact).all() and (exact <= upper).all() and upper[-1] <= times * local_delta * 1.001


def test_delta_at_a_negative_epsilon_is_at_least_what_every_pair_has():
    epsilon = np.array([-0.5, -5.0])
    one = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 5)
    assert (jaxdp.delta(jaxdp.repeat(one, np.array([[0], [2]])), epsilon) >= -np.expm1(epsilon)).all()
    assert jaxdp.tradeoff(jaxdp.repeat(one, 0), 0.9) <= 0.1
    # the bound by one report alone (without shuffling), the only bound of a round at a negative epsilon
    for eps0, local in ((0.0, 0.0), (1.0, 0.0), (1.0, 1e-3)):
        least = local + (1 - local) * -np.expm1(epsilon)
        assert (approximate.alone("delta", eps0, local, epsilon) >= least).all()
    assert np.isnan(approximate.alone("delta", np.nan, 0.0, 1.0)) and np.isnan(
        approximate.alone("delta", 1.0, 0.0, np.nan)
    )


def test_composed_rounds_that_may_give_a_person_away_do_so_at_an_infinite_epsilon_too():
    one = jaxdp.Shuffled(jaxdp.FiniteRandomizer([[0.5, 0.5, 0.0], [0.5, 0.3, 0.2]]), 5)
    assert (jaxdp.delta(jaxdp.repeat(one, 2), [50.0, np.inf]) >= 0.36).all()
    assert jaxdp.delta(jaxdp.compose(one, jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0), 5)), np.inf) >= 0.2


def test_shuffling_with_a_local_delta_is_never_worse_than_without():
    local, users = jaxdp.LocalRandomizer([0.5, 1.0, 0.5], [1e-3, 1e-6, 0.3]), np.array([[3], [1000], [100_000]])
    for verb, at in ((jaxdp.epsilon, [1e-2, 1e-4, 0.4]), (jaxdp.delta, [0.3, 0.9, 0.1])):
        assert (verb(jaxdp.Shuffled(local, users), at) <= verb(local, at) * (1 + 1e-12)).all()


@pytest.mark.thorough
def test_where_reports_alone_bound_a_round_its_derivative_is_that_of_the_reports():
    def epsilon(local, shuffled):
        return jaxdp.epsilon(shuffled(jaxdp.LocalRandomizer(local, 1e-3)), 1e-2)

    with jax.enable_x64(True):
        slopes = [
            float(jax.grad(lambda e, s=shuffled: epsilon(e, s))(0.5))
            for shuffled in (lambda one: jaxdp.Shuffled(one, 100_000), lambda one: one)
        ]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-6)


def test_a_local_delta_costs_little_where_it_is_small_and_everything_where_it_is_large():
    local = np.array([0.0, 1e-13, 1e-11, 1e-7, 1.0])
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0, local), 10_000), 10)
    lower, upper = jaxdp.epsilon_bounds(rounds_of, delta=1e-5)
    assert upper[0] < upper[1] < upper[0] * 1.001 and upper[1] < upper[2] < upper[0] * 1.02
    alone = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.ApproximateDP(1.0, 1e-7), 10), delta=1e-5)
    assert alone.lower <= upper[3] <= alone.upper * (1 + 1e-6)  # the bound by ten reports without shuffling
    assert upper[4] == np.inf and (0 < lower).all() and (lower <= upper).all()
    assert (jaxdp.epsilon(rounds_of, delta=1.0) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_a_stronger_guarantee_of_the_reports_never_has_the_weaker_answer(times):
    """A (0.5, d)-DP report is also (4, d)-DP, and the additive term at 4 is the smaller one."""
    local = np.array([0.5, 4.0])
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(local, 1e-9), 150_000), times)
    found = jaxdp.epsilon(rounds_of, delta=1.3e-5)
    assert (found[:-1] <= found[1:] * 1.001).all() and found[0] < 0.4
    assert (jaxdp.delta(rounds_of, epsilon=found) < 1.3 * 1.3e-5).all()


def test_delta_of_a_round_with_a_local_delta_hardly_depends_on_other_rows():
    rows = np.array([(0.4090255112277422, 1e-11, 8207.0, 0.0244), (0.4, 1e-12, 3.0, 0.4)])
    deltas = [
        jaxdp.delta(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0, local), users, "stronger"), epsilon)
        for eps0, local, users, epsilon in (rows[0], rows.T)
    ]
    assert deltas[0] == pytest.approx(deltas[1][0], rel=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("users", [1, 610])
def test_beside_another_mechanism_a_local_delta_costs_at_most_what_one_report_alone_does(users):
    """The additive terms may exceed delta, yet epsilon is finite. For one user the report alone is the exact answer."""
    kept = {"relation": "replace_one"}
    shuffled, alone = (
        jaxdp.compose(one, jaxdp.PureDP(0.5), jaxdp.Shuffled(jaxdp.LocalRandomizer(0.2), 2))
        for one in (jaxdp.Shuffled(jaxdp.LocalRandomizer(0.11, 0.2), users), jaxdp.ApproximateDP(0.11, 0.2))
    )
    assert 0.29 < jaxdp.epsilon(shuffled, 0.3, **kept) <= jaxdp.epsilon(alone, 0.3, **kept) * (1 + 1e-4)
    if users == 1:
        assert jaxdp.epsilon_bounds(alone, 0.3, **kept).lower <= jaxdp.epsilon(shuffled, 0.3, **kept)
    assert 0.2 <= jaxdp.delta(shuffled, np.inf, **kept) <= 0.2 * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_rounds_with_a_local_delta_are_answered_at_the_ends_without_a_warning(times):
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(np.array([0.0, 1.0, 20.0]), 1e-3), 50), times)
    assert jaxdp.delta(rounds_of, np.inf) == pytest.approx(1 - (1 - 1e-3) ** times)
    assert (jaxdp.epsilon(rounds_of, 0.0) == np.inf).all() and (jaxdp.epsilon(rounds_of, 1.0) == 0).all()


def test_a_weaker_guarantee_is_not_rounded_below_the_one_that_is_known():
    local = np.array([0.1, 0.9])
    for by in (0.0, 1e-12, 0.3):
        raised = jaxdp.Shuffled(jaxdp.LocalRandomizer(local, 1e-9), 10).weaker(np.full(2, by)).max_loss()
        assert raised.dtype == np.float64 and (raised == local + by).all()


@pytest.mark.thorough
def test_calibration_over_the_local_epsilon_with_a_local_delta_is_monotone():
    def make(local):
        return jaxdp.Shuffled(jaxdp.LocalRandomizer(local, 1.9e-9), 147_018)

    value = jaxdp.calibrate(make, epsilon=0.3, delta=1.28e-5, bracket=(0.1, 8.0))
    assert 4.5 < value < 6 and 0.299 < jaxdp.epsilon(make(value), 1.28e-5) <= 0.3


@pytest.mark.slow
def test_a_closed_form_that_one_report_alone_caps_has_the_derivatives_of_the_cap():
    def epsilon(eps0, delta):
        return jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), 50, bound="closed_form"), delta)

    with jax.enable_x64(True):
        by_eps0, by_delta = jax.grad(epsilon, argnums=(0, 1))(1.0, 1e-2)
    h = 1e-4
    assert float(by_eps0) == pytest.approx((epsilon(1 + h, 1e-2) - epsilon(1 - h, 1e-2)) / (2 * h), rel=1e-6)
    assert float(by_delta) == pytest.approx((epsilon(1.0, 1e-2 + h) - epsilon(1.0, 1e-2 - h)) / (2 * h), rel=1e-4)


@pytest.mark.slow
def test_an_epsilon_that_stays_at_the_local_one_moves_with_it_and_not_with_delta():
    def epsilon(eps0, delta):
        return jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0, 1e-6), 3), delta)

    with jax.enable_x64(True):
        slopes = jax.grad(epsilon, argnums=(0, 1))(1.0, 1e-6)
    assert epsilon(1.0, 1e-6) == 1.0 and np.asarray(slopes).tolist() == [1.0, 0.0]


@pytest.mark.thorough
@pytest.mark.parametrize(("eps0", "local"), [(0.9, 1.9e-9), (5.0, 1.9e-9), (0.9, 1e-6)])
def test_the_derivative_of_a_round_with_a_local_delta_is_that_of_its_best_weaker_guarantee(eps0, local):
    def epsilon(numbers):
        return jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(*numbers), 147_018), 1.3e-5)

    with jax.enable_x64(True):
        found = np.array(jax.grad(lambda pair: epsilon(pair))((eps0, local)))
    step = np.diag([1e-3 * eps0, 0.03 * local])
    slopes = [(epsilon((eps0, local) + row) - epsilon((eps0, local) - row)) / (2 * row.sum()) for row in step]
    assert found * (eps0, local) == pytest.approx(np.array(slopes) * (eps0, local), rel=0.1, abs=1e-4)


@pytest.mark.thorough
def test_delta_of_a_traced_round_with_a_local_delta_is_that_of_its_best_weaker_guarantee():
    local, eps = np.array([0.9, 5.0, 0.9]), np.array([0.2, 0.2, 0.9])

    def delta(local, eps):
        return jaxdp.delta(jaxdp.Shuffled(jaxdp.LocalRandomizer(local, 1.9e-9), 147_018), eps)

    with jax.enable_x64(True):
        found, slope = map(np.asarray, jax.jit(jax.vmap(jax.value_and_grad(delta)))(local, eps))
    clean = jaxdp.delta(jaxdp.Shuffled(jaxdp.LocalRandomizer(local), 147_018), eps)
    eager = delta(local, eps)
    assert (found > clean).all() and found == pytest.approx(eager, rel=0.05) and found[2] == eager[2]
    assert slope[0] == 0 and slope[1] == pytest.approx((delta(5.01, 0.2) - delta(4.99, 0.2)) / 0.02, rel=1e-2)


@pytest.mark.thorough
def test_epsilon_of_a_traced_round_with_a_local_delta_is_that_of_its_best_weaker_guarantee():
    guarantees = np.array([0.9, 5.0, 0.9, 1.0]), np.array([1.9e-9, 1.9e-9, 1e-6, 0.0])

    def epsilon(local, extra):
        return jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(local, extra), 147_018), 1.3e-5)

    eager = epsilon(*guarantees)
    with jax.enable_x64(True):
        traced = np.asarray(jax.jit(jax.vmap(epsilon), compiler_options=compiler_options("cpu"))(*guarantees))
    assert eager[0] < 0.14 and traced == pytest.approx(eager, rel=1e-3)


@pytest.mark.thorough
def test_rounds_with_a_local_delta_are_bounded_under_a_trace():
    """Under a trace a share of delta is reserved for the additive terms; there no lower bound is known."""

    def rounds_of(local):
        return jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0, local), 10_000), 10)

    local = np.array([0.0, 1e-12, 1e-8])
    eager = jaxdp.epsilon(rounds_of(local), 1e-5)
    with jax.enable_x64(True):
        lower, upper = (np.asarray(x) for x in jax.jit(lambda d: jaxdp.epsilon_bounds(rounds_of(d), 1e-5))(local))
        by_delta = np.asarray(jax.jit(lambda d: jaxdp.delta(rounds_of(d), 0.15))(local))
    assert (lower <= eager).all() and lower[0] > 0
    assert (upper[:2] > eager[:2] * (1 - 1e-4)).all() and (upper[:2] < eager[:2] * 1.02).all() and upper[2] >= eager[2]
    np.testing.assert_allclose(by_delta[:2], jaxdp.delta(rounds_of(local[:2]), 0.15), rtol=1e-3)
    assert by_delta[2] >= jaxdp.delta(rounds_of(local[2]), 0.15)


def test_a_mass_at_infinity_is_not_cut_off_by_the_largest_losses():
    """Where an infinite loss has positive probability, delta is positive beyond the sum of the finite losses."""
    clean, leaky = (jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0, local), 50) for local in (0.0, 1e-3))
    assert jaxdp.delta(jaxdp.repeat(leaky, 2), epsilon=3.0) >= 1e-3
    assert jaxdp.epsilon(jaxdp.repeat(leaky, 2), delta=1e-9) == np.inf
    with_other = jaxdp.compose(clean, jaxdp.ApproximateDP(0.5, 1e-3))
    assert jaxdp.delta(with_other, epsilon=2.0, relation="replace_one") >= 1e-3
    assert jaxdp.epsilon(with_other, delta=1e-9, relation="replace_one") == np.inf
    assert jaxdp.epsilon(jaxdp.repeat(clean, 2), delta=0.0) == pytest.approx(2.0, rel=1e-11)


@pytest.mark.parametrize(("users", "z"), [(1e5, 200.0), (1e3, 40.0)])
@pytest.mark.thorough
def test_the_slope_of_a_traced_rounds_moment_is_that_of_differences(users, z):
    """Composed rounds are differentiated through these finite pairs. Compiling the verb itself would take longer."""
    local, step = 1.0, 1e-3

    @functools.partial(jax.jit, compiler_options=compiler_options("cpu"))
    def log_moment(eps0):
        """Log moment at z of the pair of one round, and its derivative by eps0."""
        record = jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, 10.0), users)
        nan = jnp.asarray(jnp.nan)
        made, moved, _ = traced_rounds.traced_law_of(record, jnp.asarray(10.0), jnp.asarray(-14.0), nan, slopes=True)
        terms = made.log_weights + z * made.losses
        return jax.nn.logsumexp(terms), jnp.sum(jax.nn.softmax(terms) * moved[0][0])

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        (_, slope), (above, _), (below, _) = (map(float, log_moment(x)) for x in (local, local + step, local - step))
    np.testing.assert_allclose(slope, (above - below) / (2 * step), rtol=1e-3)


@pytest.mark.thorough
def test_traced_composed_rounds_of_a_small_group_are_near_the_eager_ones():
    """With the 13 nodes of one sum alone, epsilon would be 8.9 in place of 0.275, without a slope."""

    def bounds_of(x):
        return jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.Shuffled(jaxdp.RandomizedResponse(x, 10), 1e3), 10), 1e-6)

    def upper_and_lower(x):
        found = bounds_of(x)
        return found.upper, found.lower

    with jax.enable_x64(True):
        run = jax.jit(jax.value_and_grad(upper_and_lower, has_aux=True), compiler_options=compiler_options("cpu"))
        (upper, lower), slope = jax.tree_util.tree_map(float, run(1.0))
    eager = bounds_of(1.0)
    assert upper == pytest.approx(eager.upper, rel=1e-3) and lower == pytest.approx(eager.lower, rel=1e-3)
    assert lower <= eager.upper and eager.lower <= upper
    assert slope == pytest.approx((bounds_of(1.001).upper - bounds_of(0.999).upper) / 2e-3, rel=3e-3)


CLOSED_FORM_ROUNDS = [(2.0, 1e5, 2), (2.0, 1e5, 100), (0.5, 1e3, 5), (1.0, 1e8, 10), (4.0, 1e6, 3)]


@pytest.mark.parametrize(("eps0", "users", "times"), CLOSED_FORM_ROUNDS)
def test_composed_rounds_by_the_closed_form_cost_less_than_their_sum_and_not_less_than_clones(eps0, users, times):
    closed, clones = (jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users, bound) for bound in ("closed_form", "clones"))
    found = jaxdp.epsilon(jaxdp.repeat(closed, times), 1e-6)
    assert jaxdp.epsilon(jaxdp.repeat(clones, times), 1e-6) <= found
    assert found < 0.95 * times * jaxdp.epsilon(closed, 1e-6 / times)
    beside = jaxdp.compose(closed, jaxdp.Gaussian(10.0))
    added = jaxdp.epsilon(closed, 5e-7) + jaxdp.epsilon(jaxdp.Gaussian(10.0), 5e-7, relation="replace_one")
    assert jaxdp.epsilon(beside, 1e-6, relation="replace_one") < added


def test_a_closed_form_that_says_nothing_leaves_what_the_reports_guarantee():
    few = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 10, "closed_form")
    assert jaxdp.epsilon(jaxdp.repeat(few, 3), 0.0) == pytest.approx(3.0, rel=1e-9)
    beside = jaxdp.compose(few, jaxdp.Laplace(2.0))
    assert jaxdp.epsilon(beside, 0.0, relation="replace_one") == pytest.approx(2.0, rel=1e-9)
    assert jaxdp.renyi(few, 100.0) <= 1.0 + 1e-9
    huge = jaxdp.Shuffled(jaxdp.LocalRandomizer(700.0), 100, "closed_form")
    assert jaxdp.renyi(huge, 2.0) == pytest.approx(700.0, rel=1e-9)


def test_bounds_that_are_one_at_small_epsilons_are_lowered_to_a_line_above_every_pair():
    rng = np.random.default_rng(3)
    for _ in range(100):
        size, end = int(rng.integers(2, 6)), 10 ** rng.uniform(-3, 1.5)
        p, q = rng.dirichlet(np.full(size, rng.choice([0.3, 3.0])), 2)
        if rng.uniform() < 0.3:  # randomized response, for which the line is exact
            p = np.array([1.0, math.exp(-rng.uniform(0, end))]) / (1 + math.exp(-end))
            p[1] = 1 - p[0]
            q = p[::-1]
        grid = end * np.linspace(0.0, 1.0, 50)
        truth = [np.maximum(a - np.exp(grid)[:, None] * b, 0.0).sum(axis=1) for a, b in ((p, q), (q, p))]
        truth = np.maximum(*truth)
        unknown = grid < rng.uniform(0, end)
        with np.errstate(divide="ignore"), on_host():
            found = rounds.of_both_orders(grid, np.where(unknown, 0.0, np.log(truth)))
        assert np.all(np.exp(found) >= truth - 2e-15)  # rounding of ``truth``
        assert np.all(found <= 0)


@pytest.mark.thorough
def test_traced_composed_rounds_by_the_closed_form_cost_the_sum_of_their_largest_losses():
    def verb(x):
        return jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(x), 1e4, "closed_form"), 3), 1e-6)

    with jax.enable_x64(True):
        traced = jax.jit(verb, compiler_options=compiler_options("cpu"))(1.0)
    eager = verb(1.0)
    assert 2.9999 < float(traced.upper) < 3.0 and eager.upper < 0.6
    assert 0.9 * eager.lower <= float(traced.lower) <= eager.upper


@pytest.mark.parametrize("times", [1, 3])
def test_an_upper_bound_alone_asks_no_data_set_for_a_lower_one(monkeypatch, times):
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, 3.0), 1e5), times)
    with precision.expecting(1):  # NumPy computes everything, so the numbers agree to the last bit
        both = jaxdp.epsilon_bounds(rounds_of, 1e-6), jaxdp.delta_bounds(rounds_of, 0.03)

        def refuse(*_):
            raise AssertionError("a lower bound was asked for")

        for module in (shuffling, round_laws):
            monkeypatch.setattr(module, "lower_laws", refuse)
        assert (jaxdp.epsilon(rounds_of, 1e-6), jaxdp.delta(rounds_of, 0.03)) == tuple(found.upper for found in both)
        with pytest.raises(AssertionError, match="asked for"):
            jaxdp.epsilon_bounds(rounds_of, 1e-6)
    assert all(found.lower > 0 for found in both)


def test_a_row_without_local_delta_has_a_finite_epsilon_at_delta_0_beside_a_row_with_one():
    local = jaxdp.LocalRandomizer(1.0, np.array([0.0, 1e-12]))
    found = jaxdp.epsilon(jaxdp.compose(jaxdp.Shuffled(local, 1000), jaxdp.Laplace(2.0)), 0.0, relation="replace_one")
    assert found[0] == pytest.approx(2.0, rel=1e-9) and found[0] >= 2.0 and found[1] == np.inf


@pytest.mark.slow
def test_rounds_of_a_table_with_rare_reports_have_close_bounds():
    """A coarse treatment of rare reports gives lower bounds of 0 from two rounds on, and 18.5 above for twenty."""
    table = [[0.395, 0.592, 0.0117, 0.0013], [0.152, 0.452, 0.187, 0.209], [0.232, 0.498, 0.2699, 1e-4]]
    one = jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), 1000)
    found = jaxdp.epsilon_bounds(jaxdp.repeat(one, np.array([2, 20])), 1e-6)
    assert np.all(found.lower > 0.9 * found.upper) and np.all(found.upper < [3.7, 17.5])


@pytest.mark.slow
def test_a_round_whose_law_has_hardly_an_outcome_without_loss_composes():
    """Its upper law has a total mass above 1, which cannot be combined with mass at infinity."""
    rounds = jaxdp.repeat(jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, [2, 3]), 300), 5)
    _, upper = jaxdp.epsilon_bounds(rounds, 1e-6)
    assert 0.669 < upper[0] < 0.670 and 0.588 < upper[1] < 0.589  # and not 5, the sum of the local epsilons
    assert (jaxdp.delta(rounds, upper * (1 - 1e-3)) < 1.02e-6).all()


def test_rounds_that_do_not_happen_lose_nothing_at_an_infinite_epsilon():
    rounds_of = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0, 0.5), 10), [0, 2])
    assert jaxdp.delta(rounds_of, np.inf) == pytest.approx([0.0, 0.75])  # a warning would be an error
