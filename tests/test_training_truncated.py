"""Poisson samples truncated to a fixed size: bounds against enumeration, the samples, and their use by DPSGD."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import hockey_stick
from scipy import stats

import jaxdp
from jaxdp.mechanisms.truncated import binomial_tail, truncated_poisson
from jaxdp.training import DPSGD, poisson_batch, truncated_poisson_batch, truncation_delta

KEY = jax.random.key(5)
STEP = 2e-3
# Absolute error of sums with this step over functions with kinks: about the square of the step times the slope.
INTEGRAL = 4e-6
NATS = np.array([-2.0, -0.5, 0.0, 0.2, 0.7, 1.5, 3.0])


def sums(contributions, rate, size):
    """Law {sum: probability} of the sum over a Poisson sample truncated to ``size`` records, by enumeration."""
    law = {}
    for sampled in itertools.product((0, 1), repeat=len(contributions)):
        chance = np.prod([rate if taken else 1 - rate for taken in sampled])
        rows = np.flatnonzero(sampled)
        kept = list(itertools.combinations(rows, min(size, rows.size)))
        for subset in kept:
            total = sum(contributions[row] for row in subset)
            law[total] = law.get(total, 0.0) + chance / len(kept)
    return law


GRID = np.arange(-20.0, 20.0, STEP)


@functools.cache
def normal(total, sigma):
    """Masses of the cells of the grid."""
    return STEP * stats.norm.pdf(GRID, total, sigma)


def masses(law, sigma):
    return sum(p * normal(total, sigma) for total, p in law.items())


def neighbours(relation, size):
    for others in itertools.product((-1, 0, 1), repeat=size):
        if relation == "replace_one":
            yield (*others, 1), (*others, -1)
        elif relation == "remove":
            yield (*others, 1), others
        else:
            yield others, (*others, 1)


def sampled(rate, shift, sigma, relation):
    """Masses of the dominating pair of a Poisson-sampled Gaussian whose contributions have norm ``shift``."""
    rest = {0: 1 - rate, shift: rate}
    if relation == "replace_one":
        return masses(rest, sigma), masses({0: 1 - rate, -shift: rate}, sigma)
    pair = masses(rest, sigma), masses({0: 1.0}, sigma)
    return pair if relation == "remove" else pair[::-1]


@pytest.mark.parametrize("relation", ["add", "remove", "replace_one"])
@pytest.mark.parametrize(
    ("others", "rate", "most"), [(1, 0.5, 1), (2, 0.3, 1), (3, 0.6, 2), (3, 0.2, 1), (3, 0.9, 3), (3, 1.0, 2)]
)
def test_the_bound_is_never_below_the_enumerated_truth(relation, others, rate, most):
    sigma = 0.8
    step = jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate)
    exact, fewer = (truncated_poisson(sigma, rate, others, most, fewer) for fewer in (False, True))
    above = NATS >= 0
    nats = NATS[above]
    bound, wider = (jaxdp.delta(each, nats, relation=relation) for each in (exact, fewer))
    for size in range(others + 1):
        worst = np.zeros_like(NATS)
        for first, second in neighbours(relation, size):
            p, q = (masses(sums(data, rate, most), sigma) for data in (first, second))
            worst = np.maximum(worst, hockey_stick(p, q, NATS))
        assert np.all(worst[above] <= wider + INTEGRAL)  # wider holds for every number of records up to ``others``
    assert np.all(worst[above] <= bound + INTEGRAL)
    assert np.all(bound <= wider * (1 + 1e-5))
    short = jaxdp.compose(step, jaxdp.ApproximateDP(0.0, truncation_delta(others, rate, most)))
    assert np.all(bound <= jaxdp.delta(short, nats, relation=relation) * (1 + 1e-5))
    if relation == "remove" and rate < 1:  # the uncut step alone is no bound
        assert np.any(worst[above] > jaxdp.delta(step, nats, relation=relation) + INTEGRAL)
    # the theorem's formula, also at levels below 1, where the verbs do not answer
    chances = [stats.binom.pmf(k, others, rate) for k in range(most, others + 1)]
    full = float(sum(chances))
    joins = sum(c * rate * most / (k + 1) for k, c in enumerate(chances, most)) / full
    kinds = [(1 - full, sampled(rate, 1, sigma, relation)), (full, sampled(joins, 2, sigma, relation))]
    claim = sum(share * hockey_stick(*pair, NATS) for share, pair in kinds)
    assert np.all(worst <= claim + INTEGRAL)
    np.testing.assert_allclose(bound, claim[above], rtol=1e-4, atol=INTEGRAL)


def test_replaced_records_cost_little_more_where_cuts_are_rare_and_stay_finite_where_they_are_not():
    uncut = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), 10_000)
    least = jaxdp.epsilon(uncut, 1e-6, relation="replace_one")
    found = [
        jaxdp.epsilon(jaxdp.repeat(truncated_poisson(1.0, 0.01, 100_000, size), 10_000), 1e-6, relation="replace_one")
        for size in (1200, 1150, 1100, 1050)
    ]
    assert least * (1 - 1e-6) <= found[0] < least * (1 + 1e-4)
    assert np.all(np.diff(found) > 0) and found[2] < 12.3 and found[3] < 19


@pytest.mark.parametrize("relation", ["add", "remove", "replace_one"])
def test_renyi_divergences_of_cut_samples_are_those_of_both_kinds_of_batches(relation):
    step, order = truncated_poisson(2.0, 0.05, 10_000, 550), np.array([1.5, 3.0, 8.0, 16.0])
    kinds = (step.partial, 2.0, 0.05), (step.full, 1.0, step.joins)
    moments = [
        np.log(share)
        + (order - 1) * jaxdp.renyi(jaxdp.PoissonSampled(jaxdp.Gaussian(noise), q), order, relation=relation)
        for share, noise, q in kinds
    ]
    exact = np.logaddexp(*moments) / (order - 1)
    found = jaxdp.renyi(step, order, relation=relation)
    assert np.all(exact * (1 - 1e-9) <= found) and np.all(found <= exact * (1 + 2e-3))


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add", "remove", "replace_one"])
def test_no_lower_bound_is_claimed_of_what_only_dominates(relation):
    rounds_of = jaxdp.repeat(truncated_poisson(1.0, 0.05, 1000, 75), 10)
    bounds = jaxdp.epsilon_bounds(rounds_of, 1e-2, relation=relation)
    assert bounds.lower == 0 < bounds.upper < 10


@pytest.mark.slow
def test_two_steps_are_covered_by_the_composition_of_both():
    sigma, rate, most, others = 1.0, 0.4, 1, (1, -1)
    step = truncated_poisson(sigma, rate, 2, most)
    grid = np.arange(-9.0, 9.0, 2e-2)
    laws = [sums(data, rate, most) for data in ((*others, 1), others)]
    one = [sum(p * stats.norm.pdf(grid, total, sigma) for total, p in law.items()) for law in laws]
    p, q = (np.outer(each, each) for each in one)
    for level in (1.0, 1.5, 3.0):
        truth = np.sum(np.maximum(p - level * q, 0.0)) * 4e-4
        assert truth <= jaxdp.delta(jaxdp.repeat(step, 2), np.log(level), relation="remove") + 1e-9


@pytest.mark.parametrize("n", [1, 2, 7, 100, 5000, 10**6])
def test_the_binomial_tail_is_bounded_from_above_and_closely(n):
    for rate in (1e-6, 0.003, 0.2, 0.5, 0.93):
        deviation = np.sqrt(n * rate * (1 - rate))
        for least in {1, n, *(int(n * rate + k * deviation) + 1 for k in (0, 1, 3, 6, 12))}:
            exact = float(stats.binom.sf(least - 1, n, rate))
            bound = binomial_tail(n, rate, least)
            # scipy's tail is accurate to about 1e-10 here
            assert exact * (1 - 1e-9) <= bound <= 1
            assert bound <= exact * (1 + 1e-9) + 2e-100
    assert binomial_tail(n, 0.3, n + 1) == 0 == binomial_tail(n, 0.0, 1)
    assert binomial_tail(n, 1.0, n) == 1


def test_a_tail_too_small_for_a_number_is_not_zero():
    assert 0 < binomial_tail(10**6, 1e-300, 5) < 1e-99
    assert 0 < truncation_delta(10**6, 1e-300, 5) < 1e-300
    assert truncation_delta(10, 0.5, 11) == 0 == truncation_delta(10, 0.0, 3)
    assert truncation_delta(10, 1.0, 10) == 1


@pytest.mark.thorough
def test_a_cut_sample_is_a_uniform_part_of_the_poisson_sample():
    sizes = {"num_examples": 6, "probability": 0.5}
    draws = jax.vmap(lambda t: truncated_poisson_batch(t, KEY, size=2, **sizes))(jnp.arange(30_000))
    whole = jax.vmap(lambda t: poisson_batch(t, KEY, size=6, **sizes))(jnp.arange(30_000))
    counts = np.asarray(whole.mask.sum(1))
    np.testing.assert_array_equal(draws.mask.sum(1), np.minimum(counts, 2))
    assert not np.asarray(draws.overflow).any()
    pairs = {}
    for number in np.flatnonzero(counts >= 2):
        sampled = tuple(np.asarray(whole.indices[number])[: counts[number]])
        kept = tuple(sorted(np.asarray(draws.indices[number])))
        assert set(kept) <= set(sampled) and len(set(kept)) == 2
        if counts[number] == 4:
            pairs.setdefault(sampled, []).append(sampled.index(kept[0]) * 4 + sampled.index(kept[1]))
    seen = np.bincount(np.concatenate(list(pairs.values())), minlength=16).reshape(4, 4)[np.triu_indices(4, 1)]
    assert stats.chisquare(seen).pvalue > 1e-6


def make(**changes):
    settings = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_probability": 0.01, "num_examples": 10_000}
    return DPSGD(**(settings | {"sampling": "truncated_poisson", "truncated_batch_size": 180} | changes))


def test_a_roomy_batch_costs_next_to_nothing_and_a_narrow_one_is_finite():
    roomy, narrow, poisson = make(), make(truncated_batch_size=130), make(sampling="poisson", truncated_batch_size=None)
    cut, whole, all_but = (
        jaxdp.epsilon(sgd.after(1000), 1e-5, gap=1e-9) for sgd in (roomy, poisson, make(truncated_batch_size=210))
    )
    assert whole <= cut <= whole * (1 + 1e-5)
    assert all_but == pytest.approx(whole, rel=1e-8)
    assert whole < jaxdp.epsilon(narrow.after(1000), 1e-5) < 3.72
    assert jaxdp.delta(narrow.after(1000), 20.0, gap=0.1) < 1000 * truncation_delta(10_000, 0.01, 130)
    assert jaxdp.from_json(jaxdp.to_json(roomy.after(10))) == roomy.after(10)
    assert np.isfinite(jaxdp.epsilon(roomy.after(1000), 1e-5, relation="replace_one"))


def test_budget_and_calibration_take_cut_samples():
    sgd = make()
    steps = sgd.steps_within(1.8, 1e-5, max_steps=4000)
    assert jaxdp.epsilon(sgd.after(steps), 1e-5) <= 1.8 < jaxdp.epsilon(sgd.after(steps + 1), 1e-5)
    assert jaxdp.epsilon(sgd.calibrated(1000, epsilon=1.0, delta=1e-5).after(1000), 1e-5) <= 1.0
    # where most batches are full (90 < 100 expected records), a larger noise still gives a small epsilon
    assert jaxdp.epsilon(make(truncated_batch_size=90, noise_multiplier=4.0).after(1000), 1e-5) < 0.7


@pytest.mark.parametrize("microbatch", [3, 64])
def test_the_sum_is_over_the_batch_that_is_drawn(microbatch):
    sgd = make(clip_norm=1e6, sampling_probability=0.5, num_examples=40, truncated_batch_size=8)
    data = jnp.exp2(jnp.arange(40.0) - 20)
    for step in range(3):
        batch = sgd.batch(step, KEY)
        assert batch.indices.shape == (8,) and bool(batch.mask.all())
        made = sgd.clipped_sum(lambda p, x: p * x, jnp.float32(1.0), data, step, KEY, microbatch=microbatch)
        assert float(made.total) == pytest.approx(float(data[batch.indices].sum()), rel=1e-6)


def test_a_scheduled_probability_is_cut_and_accounted_step_by_step():
    rates = lambda t: jnp.where(t < 50, 0.01, 0.005)  # noqa: E731
    sgd = make(sampling_probability=rates)
    parts = sgd.after(80).parts
    assert [float(part.times) for part in parts] == [30.0, 50.0]
    for part, rate in zip(parts, (0.005, 0.01), strict=True):
        assert part.mechanism == truncated_poisson(1.0, part.mechanism.sampling_probability, 10_000, 180, fewer=True)
        assert part.mechanism.sampling_probability == pytest.approx(rate, rel=1e-6)
    assert jax.jit(lambda t: sgd.batch(t, KEY).mask.sum())(jnp.int32(3)) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"truncated_batch_size": None}, "truncated_batch_size must be given with sampling='truncated_poisson'"),
        ({"sampling": "poisson"}, "truncated_batch_size must be given with .*, and only there, got 180 with 'poisson'"),
        ({"truncated_batch_size": 0}, "truncated_batch_size must be a whole number >= 1"),
        ({"truncated_batch_size": 10_001}, "truncated_batch_size must be at most num_examples = 10000"),
        ({"num_examples": None}, "num_examples must be given"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_size_of_a_batch_is_given_where_nothing_else_fixes_it():
    with pytest.raises(ValueError, match="size must be given, except with sampling='truncated_poisson'.*got 200"):
        make().batch(0, KEY, size=200)
    with pytest.raises(ValueError, match="size must be given, except .*got None with 'poisson'"):
        make(sampling="poisson", truncated_batch_size=None).batch(0, KEY)
    with pytest.raises(ValueError, match="truncated_batch_size must be a whole number"):
        truncation_delta(10, 0.5, 0.5)
