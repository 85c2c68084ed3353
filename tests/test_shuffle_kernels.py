"""Shuffle kernels against exact values: golden cases, exact rationals for small n, independent high precision."""

import functools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from exact import column, stored
from two_ways import compiled, plainly, row_by_row

import jaxdp
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_binomial_pmf, sine_and_versine
from jaxdp.shuffle import bounds, contour, counts, law, two_point
from jaxdp.sources.shuffling import lower_laws, worst

GAP = 1e-6  # promised relative width of epsilon where counts are summed or n r (1-r) >= 1e4
DELTA_GAP = 1e-8  # relative width of delta where counts are summed: rounding of a few thousand terms
GOLDEN = stored("shuffle")  # 20 digits or more, by ball arithmetic; the file says which pair each family is


def pair(verb, bound):
    """Bounds of the clones pair as a function of users, eps0 and target; relative gap GAP, or DELTA_GAP for delta."""
    gap = DELTA_GAP if verb == "delta" else GAP
    return lambda users, eps0, target: bounds.clones_bounds(verb, eps0, users, target, bound, gap)


def two_point_response(verb):
    """Bounds of shuffled two-point randomized response, the larger of its two orders, as a function like `pair`'s."""
    return lambda users, eps0, target: worst(
        verb, lower_laws(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0, 0 * eps0), users)), users, target, GAP
    )


KERNELS = {
    **{bound: (pair("epsilon", bound), pair("delta", bound)) for bound in ("clones", "stronger")},
    "2rr": (two_point_response("epsilon"), two_point_response("delta")),
}


def cases_of(family, kind):
    return [case for case in GOLDEN if case["family"] == family and case.get("kind", "eps") == kind]


def test_golden_file_has_every_family_used_here():
    assert {case["family"] for case in GOLDEN} >= {*KERNELS, "krr", "renyi_clones"}
    assert len(cases_of("clones", "eps")) >= 20


@pytest.mark.parametrize("run", [plainly, compiled], ids=["NumPy", "program"])
def test_sines_and_versines_have_small_errors(run):
    rng = np.random.default_rng(5)
    angles = np.concatenate([rng.uniform(-top, top, 500) for top in (1e-3, 0.78, 1.3, 50.0, 1e4, 1e8, 1e12)])
    angles = np.append(angles, [0.0, 1e-100, *(np.pi / 4 * np.arange(1, 20))])
    found = run(sine_and_versine, angles)
    with mpmath.workdps(60):
        for u, sine, versine in zip(angles.tolist(), *found, strict=True):
            for value, exact in ((sine, mpmath.sin(u)), (versine, 2 * mpmath.sin(mpmath.mpf(u) / 2) ** 2)):
                error = abs(mpmath.mpf(value) - exact)
                assert error <= 2 * ULP * (1 + abs(u)), u
                assert error <= 6 * ULP * abs(exact) or abs(u) > np.pi / 4, u


@pytest.mark.parametrize("family", KERNELS)
def test_golden_epsilon_is_enclosed_and_the_excess_is_small(family):
    cases = cases_of(family, "eps")
    found = KERNELS[family][0](column(cases, "n"), column(cases, "eps0"), column(cases, "delta"))
    exact = column(cases, "eps")
    assert (found.lower <= exact).all() and (exact <= found.upper).all()
    assert (found.upper - found.lower <= GAP * exact).all()


@pytest.mark.parametrize("family", ["clones", "2rr"])
def test_golden_delta_is_enclosed(family):
    cases = cases_of(family, "delta_at_eps")
    found = KERNELS[family][1](column(cases, "n"), column(cases, "eps0"), column(cases, "eps"))
    exact = column(cases, "delta")
    assert (found.lower <= exact).all() and (exact <= found.upper).all()
    assert (found.upper - found.lower <= DELTA_GAP * exact).all()


def test_golden_two_point_values_are_the_lower_ends_of_the_public_verbs():
    cases = cases_of("2rr", "eps")
    users, eps0, delta, exact = (column(cases, key) for key in ("n", "eps0", "delta", "eps"))
    for lower in (
        jaxdp.epsilon_bounds(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users), delta).lower,
        jaxdp.shuffle.lower_bound_epsilon(eps0, users, delta),
    ):
        assert (lower <= exact).all() and (exact - lower <= GAP * exact).all()


def exact_clones_delta(n, local, central, rate):
    """delta of the clones or stronger pair by its definition, in rationals; local = e^eps0, central = e^epsilon."""
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
    found = KERNELS[rate][1](users, eps0, epsilon)
    exact = np.array(
        [
            float(exact_clones_delta(int(n), as_fraction_exp(a), as_fraction_exp(b), rate))
            for n, a, b in zip(users, eps0, epsilon, strict=True)
        ]
    )
    assert (found.lower <= exact).all() and (exact <= found.upper).all()
    assert (found.upper - found.lower <= DELTA_GAP * exact).all()


@pytest.mark.parametrize("delta", [1e-40, 1e-150, 1e-300])
def test_deep_targets_agree_with_forty_digit_arithmetic(delta):
    users, eps0 = 400, 1.0
    found = KERNELS["clones"][0](np.array([float(users)]), np.array([eps0]), np.array([delta]))
    upper = float(found.upper[0])
    with mpmath.workdps(40):
        at, below = (mpmath_clones_delta(users, eps0, e) for e in (upper, upper * (1 - 1e-7)))
    assert at <= delta < below


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


ONE = np.ones(1)


def bounds_at(family, verb, *point):
    """[lower, upper] of "epsilon" or "delta" (verb) at one point: users, eps0, target."""
    return [float(side[0]) for side in KERNELS[family][("epsilon", "delta").index(verb)](*(x * ONE for x in point))]


@pytest.mark.parametrize("family", ["clones", "stronger"])
def test_a_delta_below_the_smallest_double_is_not_reported_as_zero(family):
    assert 0 < bounds_at(family, "delta", 1e6, 1.0, 0.9)[1] < 1e-300, "an upper bound of 0 means pure DP"


@pytest.mark.parametrize("family", KERNELS)
def test_edges_are_exact(family):
    assert bounds_at(family, "epsilon", 1000, 1.0, 0.0) == [1.0, 1.0]
    assert bounds_at(family, "epsilon", 1000, 0.0, 1e-9) == [0.0, 0.0]
    assert bounds_at(family, "epsilon", 1000, 1.0, 1.0) == [0.0, 0.0]
    assert bounds_at(family, "delta", 1000, 1.0, 1.0) == [0.0, 0.0]
    assert bounds_at(family, "delta", 1000, 1.0, 1 - 1e-9)[1] > 0


@pytest.mark.parametrize("users", [0.0, 0.5, np.nan])
@pytest.mark.parametrize("family", ["clones", "stronger"])
def test_invalid_numbers_of_users_give_the_vacuous_bound_never_nan(family, users):
    assert bounds_at(family, "delta", users, 1.0, 0.1) == [0.0, 1.0]
    assert bounds_at(family, "epsilon", users, 1.0, 0.1) == [0.0, np.inf]


def test_huge_numbers_of_users_and_levels_stay_ordered():
    users, eps0, delta = np.array([1e9, 1e10, 1e12, 1e14, 1e15]), np.full(5, 8.0), np.full(5, 1e-12)
    low, stronger, clones = (KERNELS[family][0](users, eps0, delta) for family in ("2rr", "stronger", "clones"))
    assert (np.diff(clones.upper) < 0).all() and (clones.lower <= clones.upper).all()
    assert (low.lower <= stronger.upper).all() and (stronger.upper <= clones.upper).all()


def mpmath_log_delta(users, eps0, epsilon):
    with mpmath.workdps(400):  # enough digits for 1 - e^-600
        return mpmath.log(mpmath_clones_delta(users, eps0, epsilon))


# (users, eps0, epsilon): 1, 2, 3 and 60 users, eps0 from 1e-6 to 300, epsilon from 0 to next to eps0
FEW = [
    (n, eps0, share * eps0)
    for n in (1, 2, 3, 60)
    for eps0 in (1e-6, 0.02, 1.0, 7.0, 40.0, 300.0)
    for share in (0.0, 0.1, 0.6, 1 - 1e-6, 1 - 1e-12)
]


def test_few_users_at_every_level_agree_with_high_precision_arithmetic():
    users, eps0, epsilon = np.array(FEW, float).T
    lower, upper = KERNELS["clones"][1](users, eps0, epsilon)
    for i, (n, local, central) in enumerate(FEW):
        exact = mpmath_log_delta(n, local, central)
        below = mpmath.log(mpmath.mpf(lower[i])) if lower[i] > 0 else -mpmath.inf
        assert below <= exact <= mpmath.log(mpmath.mpf(upper[i]))
        assert local >= 40 or upper[i] <= bounds.LEAST_DELTA or upper[i] - lower[i] <= DELTA_GAP * upper[i]


def test_a_sum_over_counts_that_overflows_is_no_small_bound():
    """At eps0 = 40, 21 clones are e^-840 times as likely as none: the sum may be NaN, which is not a bound of 0."""
    users = np.array([10.0, 50, 100, 150, 1000, 1e5])
    for bound in ("clones", "stronger"):
        lower, upper = KERNELS[bound][1](users, np.full(6, 40.0), np.full(6, 24.0))
        alone = -math.expm1(-16.0) / (1 + math.exp(-40.0))
        assert (lower >= alone * (1 - 1e-10)).all() and (upper >= alone * (1 - 1e-10)).all()


def random_points(count, seed=2):
    rng = np.random.default_rng(seed)
    users, eps0 = np.floor(10 ** rng.uniform(0, 9, count)), 10 ** rng.uniform(-2, 1.3, count)
    return users, eps0, 10 ** rng.uniform(-12, -0.5, count)


@pytest.mark.parametrize("bound", ["clones", "stronger"])
@pytest.mark.thorough
def test_the_contour_and_the_counts_overlap_wherever_both_answer(bound):
    users, eps0, delta = random_points(1000)
    few = users * np.exp(-eps0) < 1e5  # the sum over counts takes time proportional to the square root of this
    users, eps0, delta = users[few], eps0[few], delta[few]
    laws = bounds.clones_law(eps0, bound=bound)
    one = bounds._KERNELS["13 nodes"]["epsilon"](laws, users, delta)
    other = bounds._KERNELS["counts"]["epsilon"](
        laws, users, delta, Bounds(np.zeros(users.size), np.full(users.size, np.inf))
    )
    assert few.sum() > 500
    assert (one.lower <= other.upper).all() and (other.lower <= one.upper).all()
    large = users * (1 - laws.rest) * laws.rest > 1e4
    assert large.sum() > 20 and (one.upper - one.lower <= 100 * GAP * one.upper)[large].all()


def test_on_an_accelerator_no_row_waits_for_one_of_much_more_work(monkeypatch):
    rows, terms = np.arange(100, 106), np.array([5e4, 20.0, 90.0, 7e4, 30.0, 1e5])
    assert [some.tolist() for some in bounds._of_equal_work(rows, terms)] == [[101, 104, 102, 100, 103, 105]]
    monkeypatch.setattr(bounds, "platform", lambda: "gpu")
    groups = bounds._of_equal_work(rows, terms)
    assert sorted(np.concatenate(groups)) == rows.tolist() and len(groups) == 3
    assert all(np.ptp(np.log2(terms[some - 100])) < 3 for some in groups)
    assert bounds._of_equal_work(rows[:0], terms[:0])[0].size == 0


@pytest.mark.parametrize("module", [counts, contour], ids=["counts", "nodes"])
def test_a_program_with_the_long_steps_of_an_accelerator_answers_as_numpy(monkeypatch, module):
    monkeypatch.setattr(module, "long_arrays_pay", lambda: True)
    sums = {counts: counts.evaluate, contour: functools.partial(contour.evaluate_long, most_nodes=700.0)}

    def run(eps0, users, epsilon):
        return sums[module](law.clones(eps0, "clones"), users, epsilon)

    by_numpy, program = (way(run, 1.5, 3000.0, 0.25) for way in (plainly, compiled))
    assert program.lower <= by_numpy.upper and by_numpy.lower <= program.upper
    assert program.estimate == pytest.approx(by_numpy.estimate, rel=1e-10)


def test_negative_epsilon_is_the_swapped_pair():
    mechanism = jaxdp.Shuffled(jaxdp.LocalRandomizer(np.array([1.0, 2.0, 0.3])), np.array([1000.0, 2.0, 10.0]))
    epsilon = np.array([0.05, 1.0, 0.1])
    ahead, behind = (jaxdp.delta_bounds(mechanism, sign * epsilon) for sign in (1, -1))
    for one, other in zip(ahead, behind, strict=True):
        np.testing.assert_allclose(other, -np.expm1(-epsilon) + np.exp(-epsilon) * one, rtol=1e-14)
    assert (jaxdp.delta(mechanism, -60.0) >= 1 - 1e-15).all() and (jaxdp.delta(mechanism, -60.0) <= 1).all()


@pytest.mark.parametrize("route", ["contour", "counts", "long"])
def test_slopes_in_epsilon_are_those_of_differences(route):
    evaluate = {
        "contour": lambda a, n, e: contour.evaluate(law.clones(a, "clones"), n, e),
        "counts": lambda a, n, e: counts.evaluate(law.clones(a, "clones"), n, e),
        "long": lambda a, n, e: contour.evaluate_long(law.clones(a, "clones"), n, e, 2048.0),
    }[route]
    step = 1e-6
    eps0, users, epsilon = np.full(3, 1.5), np.full(3, 1e5), np.array([0.02, 0.02 - step, 0.02 + step])
    seen = row_by_row(evaluate, eps0, users, epsilon)
    difference = (seen.estimate[2] - seen.estimate[1]) / (2 * step)
    # Loose: only Newton's method uses the slope, no bound rests on it; and curvature adds an error to the difference.
    assert float(seen.slope[0]) == pytest.approx(float(difference), rel=1e-4)


def tail_ratio(count, x):
    """P[Bin(count, 1/2) >= x] / P[Bin(count, 1/2) = x - 1] by its integral, 30 digits."""
    with mpmath.workdps(40):
        slope = 2 * mpmath.mpf(x) - 1 - count
        reach = min(mpmath.mpf(1), 180 / (slope + mpmath.sqrt(slope**2 + 180 * (count - 1))))

        def integrand(s):
            return mpmath.exp((x - 1) * mpmath.log1p(-s) + (count - x) * mpmath.log1p(s))

        return (count - x + 1) * mpmath.quad(integrand, mpmath.linspace(0, reach, 8))


def tail_ratio_of(x, count):
    return two_point.tail_ratio(x, count, 1.0, 0)


@pytest.mark.parametrize("count", [10**4, 10**8, 10**13])
def test_tails_of_many_coins_keep_their_digits(count):
    deviation = math.isqrt(count) // 2
    for deviations in (0, 4, 20):
        x = count // 2 + 2 + deviations * deviation
        ratio = compiled(tail_ratio_of, x, count)
        exact = tail_ratio(count, x)
        assert abs(mpmath.mpf(float(ratio)) / exact - 1) < 2e-13  # the kernel charges 4e-12


def test_one_round_of_trillions_of_users_is_that_of_the_gaussian_it_tends_to():
    users, eps0 = 4e12, 0.05
    mean = users * math.exp(-eps0)
    mu = 2 * math.tanh(eps0 / 2) / math.sqrt(mean)
    for deviations in (1.0, 3.0):
        epsilon = deviations * mu
        lower, upper = KERNELS["clones"][1](np.array([users]), np.array([eps0]), np.array([epsilon]))
        exact = jaxdp.delta(jaxdp.Gaussian(1 / mu), epsilon=epsilon)
        assert abs(lower[0] / exact - 1) < 1e-5 and abs(upper[0] / exact - 1) < 1e-5


def test_log_probabilities_of_binomials_are_as_accurate_as_is_charged():
    """At p = 1/2, where n p is exact. If log(1 + x) lost digits just beyond its series, the error would be 1.4e-11."""
    rng = np.random.default_rng(3)
    users = np.floor(10 ** rng.uniform(1, 6.5, 400))
    counts = np.clip(np.round(users / 2 + rng.uniform(-37, 37, 400) * np.sqrt(users) / 2), 0, users)
    log_mass = compiled(log_binomial_pmf, counts, users, 0.5, 0.5)
    with mpmath.workdps(40):
        exact = [
            mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1) - n * mpmath.log(2)
            for n, k in zip(map(mpmath.mpf, users), map(mpmath.mpf, counts), strict=True)
        ]
        error = [abs(float(mpmath.mpf(float(a)) - b)) for a, b in zip(log_mass, exact, strict=True)]
    assert np.max(np.where(log_mass > -700, error, 0.0)) < 2e-12


def test_two_point_bounds_charge_the_rounding_of_the_parameters():
    """Around 1e15 users, 20 deviations out, the rounding of w alone moves log P[Bin(N, w) = k] by 4e-8."""
    rng = np.random.default_rng(4)
    users, local = np.floor(10 ** rng.uniform(3, 15, 300)), rng.uniform(0.1, 5.0, 300)
    rare = np.exp(-local) / (1 + np.exp(-local))
    counts = np.floor(users * rare + rng.uniform(-20, 20, 300) * np.sqrt(users * rare * (1 - rare)))
    counts = np.clip(counts, 1, users - 1)
    log_mass = compiled(log_binomial_pmf, counts, users, rare, 1 / (1 + np.exp(-local)))
    with mpmath.workdps(50):
        exact = [
            mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1)
            - n * mpmath.log1p(mpmath.exp(-e)) - k * e
            for n, k, e in zip(*(map(mpmath.mpf, column) for column in (users, counts, local)), strict=True)
        ]  # fmt: skip
        error = np.array([abs(float(mpmath.mpf(float(a)) - b)) for a, b in zip(log_mass, exact, strict=True)])
    charged = two_point.ROUNDING_ERROR + two_point.PARAMETER_ERROR * np.abs(counts - users * rare)
    assert (error <= charged).all() and error.max() > 1e-9


def exact_two_point(users, local, epsilon):
    """delta of shuffled two-point randomized response in 60 digits: all others hold one value; the larger order."""
    with mpmath.workdps(60):
        local, odds = mpmath.mpf(local), mpmath.exp(mpmath.mpf(epsilon))
        small = 1 / (mpmath.exp(local) + 1)

        def chance(n, k):
            return mpmath.binomial(n, k) * small**k * (1 - small) ** (n - k) if 0 <= k <= n else mpmath.mpf(0)

        one = [chance(users, k) for k in range(users + 1)]
        other = [chance(users - 1, k) * small + chance(users - 1, k - 1) * (1 - small) for k in range(users + 1)]
        orders = ((one, other), (other, one))
        return max(sum(max(0, p - odds * q) for p, q in zip(*order, strict=True)) for order in orders)


def test_next_to_the_local_epsilon_few_users_have_no_delta_below_the_truth():
    """There the tilt is up to 1e14 times as large as elsewhere, and the moments must keep their digits."""
    shares = [0.0, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12, 1 - 1e-15]
    cases = [(n, e, e * share) for n in (1, 2, 5, 17) for e in (1e-6, 1e-3, 1.0, 8.0, 30.0) for share in shares]
    users, local, epsilon = map(np.array, zip(*cases, strict=True))
    found = jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.RandomizedResponse(local, 2), users), epsilon)
    for case, lower, upper in zip(cases, *found, strict=True):
        assert mpmath.mpf(lower) <= exact_two_point(*case) <= mpmath.mpf(upper), case
