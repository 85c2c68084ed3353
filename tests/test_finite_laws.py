"""Finite laws next to their edges: one or two runs, sampled or not, against exact sums.

The rates are within 1e-12 of 0 and 1, the losses down to 1e-8, epsilon within rounding of an outcome's loss and of the
supremum, delta at the mass at infinity.
"""

import itertools

import mpmath as mp
import numpy as np
import pytest

import jaxdp
from jaxdp import ApproximateDP, DiscreteLaplace, DiscretePair, PoissonSampled, PureDP, RandomizedResponse, accounting
from jaxdp.mechanisms.finite import gaussian_pair
from jaxdp.mechanisms.sampled_laws import sampled_part
from jaxdp.numerics.exponential_sums import discrete_log_m
from jaxdp.runtime.arrays import on_host
from jaxdp.sources import contour

POINTS = 16
DIGITS = 700
TIE = mp.mpf(10) ** -600  # relative difference below which two numbers of DIGITS digits count as equal


def randomized_response(rng):
    local, kinds = 10 ** rng.uniform(-8, 1.5), int(rng.choice([2, 3, 1000]))
    grown = mp.exp(mp.mpf(local))
    total = grown + kinds - 1
    rest = [(kinds - 2) / total]
    return RandomizedResponse(local, kinds), [grown / total, 1 / total, *rest], [1 / total, grown / total, *rest]


def pure(rng):
    local = 10 ** rng.uniform(-8, 1.5)
    high = 1 / (1 + mp.exp(-mp.mpf(local)))
    return PureDP(local), [high, 1 - high], [1 - high, high]


def approximate(rng):
    local, lost = 10 ** rng.uniform(-3, 1.2), float(rng.choice([0.414, 1e-6, 1e-300, rng.uniform()]))
    high, kept = 1 / (1 + mp.exp(-mp.mpf(local))), 1 - mp.mpf(lost)
    nothing, mass = mp.mpf(0), mp.mpf(lost)
    law = [kept * high, kept * (1 - high)]
    return ApproximateDP(local, lost), [*law, mass, nothing], [*law[::-1], nothing, mass]


def pair(rng):
    size = 4
    p = 10 ** rng.uniform(-8, 0, size)
    laws = [p, p * np.exp(rng.normal(size=size) * 10 ** rng.uniform(-7, 0.8))]
    for i, law in enumerate(laws):
        laws[i] = np.floor(law / law.sum() * 2**50) / 2**50  # masses that add up to 1 without rounding
        laws[i][np.argmax(laws[i])] += 1 - laws[i].sum()
    return DiscretePair(*laws), *([mp.mpf(float(x)) for x in law] for law in laws)


def discrete_laplace(rng):
    shift, scale = int(rng.choice([1, 2, 5])), 10 ** rng.uniform(-1.3, 4)
    a = 1 / mp.mpf(scale)
    end, peak = 1 / (1 + mp.exp(-a)), mp.tanh(a / 2)
    q = [end, *(peak * mp.exp(-a * x) for x in range(1, shift)), end * mp.exp(-a * shift)]
    return DiscreteLaplace(scale, shift), q[::-1], q


def exact_delta(p, q, epsilon):
    grown = mp.exp(mp.mpf(float(epsilon)))
    return mp.fsum(a - grown * b for a, b in zip(p, q, strict=True) if a > grown * b * (1 + TIE))


def exact_epsilon(p, q, delta):
    """The smallest epsilon >= 0 whose delta is at most `delta`: delta is linear in e^epsilon between two losses."""
    target = mp.mpf(float(delta))
    if exact_delta(p, q, 0) <= target:
        return mp.mpf(0)
    above, below = mp.fsum(a for a, b in zip(p, q, strict=True) if b == 0), mp.mpf(0)
    if target < above:
        return mp.inf
    outcomes = sorted(((a / b, a, b) for a, b in zip(p, q, strict=True) if a > 0 and b > 0), reverse=True)
    for i, (_, a, b) in enumerate(outcomes):
        above, below = above + a, below + b
        grown = (above - target) / below
        if grown >= (outcomes[i + 1][0] if i + 1 < len(outcomes) else 0):
            return mp.log(grown)
    raise AssertionError("no root")


def sampled(rate, p, q):
    share = mp.mpf(rate)
    return [(1 - share) * b + share * a for a, b in zip(p, q, strict=True)], q


def rates(rng, count):
    near = 10 ** rng.uniform(-12, 0, count)
    return np.select([np.arange(count) % 4 == i for i in range(3)], [near, 1 - near, 1.0], rng.uniform(size=count))


def losses(p, q):
    return np.array([float(mp.log(a / b)) for a, b in zip(p, q, strict=True) if a > 0 and b > 0])


# (maker of a mechanism, relation, whether it is sampled, number of runs, whether epsilon is tested besides delta). One
# run is inverted by the same sum as delta, a composition by a contour, which takes a second a point.
GROUPS = [
    (randomized_response, "remove", True, 1, True),
    (pure, "add", True, 1, True),
    (approximate, "add", True, 1, True),
    (pair, "remove", False, 1, True),
    (pair, "add", True, 1, True),
    (discrete_laplace, "remove", True, 1, True),
    (discrete_laplace, "add", False, 1, False),
    (discrete_laplace, "remove", False, 2, False),
    (pair, "add", True, 2, False),
    (approximate, "remove", False, 2, False),
]


@pytest.mark.parametrize(("make", "relation", "is_sampled", "times", "inverted"), GROUPS)
def test_no_bound_is_on_the_wrong_side(make, relation, is_sampled, times, inverted, monkeypatch):
    small = contour.PLAIN_LADDER[0]  # larger efforts take the most time and use no other formula
    monkeypatch.setattr(contour, "PLAIN_LADDER", (small, small._replace(nodes=4096)))
    rng = np.random.default_rng(GROUPS.index((make, relation, is_sampled, times, inverted)))
    with mp.workdps(DIGITS):
        count = POINTS // times
        drawn = [make(rng) for _ in range(count)]
        fields = {f: np.stack([getattr(m, f) for m, _, _ in drawn]) for f in vars(drawn[0][0])}
        mechanism, laws = type(drawn[0][0])(**fields), [(p, q) for _, p, q in drawn]
        if is_sampled:
            rate = rates(rng, count)
            mechanism = PoissonSampled(mechanism, rate)
            laws = [sampled(r, p, q) for r, (p, q) in zip(rate, laws, strict=True)]
        if relation == "add":
            laws = [(q, p) for p, q in laws]
        if times == 2:
            mechanism = jaxdp.repeat(mechanism, 2)
            laws = [tuple([a * b for a, b in itertools.product(law, law)] for law in both) for both in laws]
        levels, targets = zip(*(questions(rng, p, q) for p, q in laws), strict=True)
        verbs = [(jaxdp.delta_bounds, exact_delta, levels), (jaxdp.epsilon_bounds, exact_epsilon, targets)]
        for verb, exact, asked in verbs if inverted else verbs[:1]:
            found = verb(mechanism, np.stack(asked, axis=1), relation=relation)
            for i, (p, q) in enumerate(laws):
                for level, lower, upper in zip(asked[i], found.lower[:, i], found.upper[:, i], strict=True):
                    truth = exact(p, q, level)
                    low, high = mp.mpf(float(lower)), mp.mpf(float(upper))
                    assert low * (1 - TIE) <= truth <= high * (1 + TIE), (drawn[i][0], level, lower, upper)


def questions(rng, p, q):
    """(epsilons next to 0, to the supremum and to outcomes of the loss; deltas at some of these, and random ones)."""
    atoms = losses(p, q)
    shares = np.array([0.0, rng.uniform(), 1 - 10 ** rng.uniform(-14, -1), 1.0, -rng.uniform()])
    some = rng.choice(atoms, 2)
    levels = np.concatenate([atoms.max() * shares, some, np.nextafter(some, -np.inf), np.nextafter(some, np.inf)])
    near = np.array([float(exact_delta(p, q, level)) for level in levels[:4]])
    return levels, np.concatenate([[10 ** rng.uniform(-12, 0), 10 ** rng.uniform(-300, 0), 0.0], near])


def test_an_exponent_that_has_lost_its_digits_leaves_nothing_certain():
    half, exact = np.log([0.5, 0.5]), np.zeros(2)
    with on_host():
        errors = [float(discrete_log_m(1.0, np.array([far, 0.0]), half, exact)[1]) for far in (1e3, 1e16)]
        # an outcome of hardly any weight may lose its digits
        unseen = float(discrete_log_m(1.0, np.array([-1e16, 0.0]), half, exact)[1])
    assert errors[0] < 1e-11 and np.isinf(errors[1]) and unseen < 1e-14


@pytest.mark.parametrize("times", [1, 7])
def test_renyi_divergence_of_randomized_response_keeps_its_digits_at_every_size(times):
    random = np.random.default_rng(3)
    local = np.concatenate([10 ** random.uniform(-12, 2.5, 150), [0.0, 1e-160, 6.6e-9, 700.0, 1e5, 1e5]])
    order = 1 + np.concatenate([10 ** random.uniform(-14, 6, 150), [1.0, 1e-9, 1e-6, 3.0, 1e-6, 1e-11]])
    kinds = random.choice([2, 3, 1000], local.size)
    found = jaxdp.renyi(jaxdp.repeat(RandomizedResponse(local, kinds), times), order)
    two = kinds == 2
    np.testing.assert_array_equal(jaxdp.renyi(jaxdp.repeat(PureDP(local[two]), times), order[two]), found[two])
    with mp.workdps(400):
        for value, *numbers, k in zip(found, order, local, kinds, strict=True):
            p, e = map(mp.mpf, numbers)
            exact = times * mp.log1p(mp.expm1(p * e) * -mp.expm1((1 - p) * e) / (mp.exp(e) + int(k) - 1)) / (p - 1)
            assert exact <= mp.mpf(value) <= exact * (1 + mp.mpf(5e-12)) + times * mp.mpf(2.3e-308)


@pytest.mark.parametrize("local", [0.5, 2.0])
def test_the_trade_off_curve_is_followed_to_its_kinks_with_few_deltas(local, monkeypatch):
    tried = []
    real = accounting.delta
    monkeypatch.setattr(
        accounting, "delta", lambda m, eps, **more: (tried.append(np.size(eps)), real(m, eps, **more))[1]
    )
    mechanism, rates = jaxdp.repeat(jaxdp.RandomizedResponse(local), 10), np.array([0.01, 0.1, 0.3, 0.9, 0.9999])
    found = jaxdp.tradeoff(mechanism, rates)
    # The function is concave in e^epsilon, linear between losses, and its pair is its own swap.
    losses, rate = local * np.arange(0.0, 12.0, 2.0), rates[:, None]
    excess = real(mechanism, losses)
    exact = np.maximum(1 - excess - np.exp(losses) * rate, np.exp(-losses) * (1 - rate - excess)).max(axis=1)
    assert np.all(found <= exact * (1 + 1e-9))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-12)
    assert sum(tried) <= rates.size * (33 + 3 + 2 * 12)


def test_the_trade_off_curve_of_a_composition_keeps_the_outcomes_of_its_parts():
    pair = jaxdp.DiscretePair([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], [0.2, 0.3, 0.5])
    found = jaxdp.tradeoff(jaxdp.compose(pair, jaxdp.repeat(pair, 0)), 0.1)
    np.testing.assert_array_equal(found, jaxdp.tradeoff(pair, 0.1))


@pytest.mark.parametrize("outcomes", [3, 20, 1000, 20_000])
def test_mass_cut_off_is_charged_and_the_rounding_of_a_normalisation_is_not(outcomes):
    p = np.random.default_rng(outcomes).uniform(0.5, 1.5, outcomes)
    whole = p / p.sum()
    assert jaxdp.epsilon(DiscretePair(whole, whole[::-1]), delta=0.0) < 2.0
    cut = whole * (1 - 1e-13)
    assert jaxdp.delta(DiscretePair(cut, whole), epsilon=5.0) >= 9e-14
    assert jaxdp.epsilon(DiscretePair(cut, whole), delta=5e-14) == np.inf


def test_compositions_of_few_outcomes_are_summed_outcome_by_outcome(monkeypatch):
    """Exact: the law of the total loss, from all sequences of outcomes. No contour is computed."""
    monkeypatch.setattr(contour, "contour_bounds", None)
    parts = [([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 4), ([0.25, 0.75], [0.5, 0.5], 3), ([0.0, 1.0], [1.0, 0.0], 0)]
    lost = ([0.625, 0.36328125, 0.01171875], [0.375, 0.625, 0.0], 2)
    for laws in (parts, [*parts, lost]):
        mechanism = jaxdp.compose(*(jaxdp.repeat(DiscretePair(p, q), times) for p, q, times in laws))
        p = q = np.ones(1)
        for one, other, times in laws:
            for _ in range(times):
                p, q = np.outer(p, one).ravel(), np.outer(q, other).ravel()
        eps = np.array([-1.3, 0.0, 0.7, 3.9, 50.0])
        hockey_sticks = [np.maximum(a - np.exp(eps)[:, None] * b, 0).sum(axis=1) for a, b in ((p, q), (q, p))]
        exact = np.maximum(*hockey_sticks)
        found = jaxdp.delta_bounds(mechanism, eps)
        np.testing.assert_allclose(found, [exact, exact], rtol=1e-11, atol=1e-14)
        assert np.all(found.lower <= exact + 1e-14) and np.all(exact - 1e-14 <= found.upper)
        again = jaxdp.epsilon_bounds(mechanism, exact[2:4])
        np.testing.assert_allclose(again, [eps[2:4], eps[2:4]], rtol=1e-9)


def test_a_tiny_mass_at_infinity_is_not_reported_larger_in_a_sum_over_outcomes():
    for mass in (1e-306, 1e-300, 1e-10):
        once = DiscretePair([0.3, 0.7 - mass, mass], [0.6, 0.4, 0.0])
        lower, upper = jaxdp.delta_bounds(jaxdp.repeat(once, 2), 50.0)
        exact = mass * (2 - mass)
        assert lower <= exact <= upper <= lower * (1 + 1e-12)


@pytest.mark.parametrize("mu, rate", [(0.01, 0.3), (0.4, 1e-4), (0.8, 0.002), (3.0, 1e-9), (3.0, 0.9)])
def test_the_mass_without_loss_is_as_accurate_as_its_blur_says(mu, rate):
    """Fixed-size batches under replace_one: the rest of a law with 16,000 outcomes, against exact sums."""
    with on_host():
        pair = gaussian_pair(mu, fine=True)
        law = sampled_part(pair, rate, "replace")
    with mp.workdps(40):
        up = [i for i in range(pair.loss.size) if pair.loss[i] > 0 and pair.log_p[i] > -np.inf]
        gained = mp.fsum(mp.exp(pair.log_p[i]) * -mp.expm1(-mp.mpf(float(pair.loss[i]))) for i in up)
        same = mp.fsum(mp.exp(pair.log_q[i]) for i in range(pair.loss.size) if pair.loss[i] == 0)
        exact = same + (1 - mp.mpf(rate)) * (gained + mp.mpf(float(pair.only_p)))
        error = abs(mp.expm1(mp.mpf(float(law.log_weight[-1])) - mp.log(exact)))
    assert 0 < law.blur[-1] < 5e-14
    assert error < law.blur[-1]


@pytest.mark.parametrize("z", [0.0, 1.0, 30.0, -31.0])
def test_the_moment_of_a_law_of_many_outcomes_is_as_accurate_as_said(z):
    with on_host():
        law = sampled_part(gaussian_pair(0.5, fine=True), 0.01, "forward")
        found, error = discrete_log_m(z, law.loss, law.log_weight, 0 * law.blur)
    live = np.flatnonzero(law.log_weight > -np.inf)
    with mp.workdps(40):
        exact = mp.log(mp.fsum(mp.exp(mp.mpf(float(law.log_weight[i])) + z * mp.mpf(float(law.loss[i]))) for i in live))
    assert error < 1e-12
    assert abs(float(found - exact)) < error
