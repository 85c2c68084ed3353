"""jaxdp.interop: the translation of every event, and the accountant's interface."""

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest

import jaxdp

pytest.importorskip("dp_accounting")
from dp_accounting import dp_event, privacy_accountant_test, rdp  # noqa: E402  (after the skip)
from dp_accounting.pld import PLDAccountant  # noqa: E402
from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: E402
from dp_accounting.privacy_accountant import UnsupportedEventError  # noqa: E402

from jaxdp import interop  # noqa: E402
from jaxdp.mechanisms.truncated import TruncatedPoisson, batch_chances  # noqa: E402

pytestmark = pytest.mark.comparison
R = interop.NeighboringRelation
ADD, REPLACE, SPECIAL = R.ADD_OR_REMOVE_ONE, R.REPLACE_ONE, R.REPLACE_SPECIAL
GAUSSIAN, LAPLACE = dp_event.GaussianDpEvent(2.0), dp_event.LaplaceDpEvent(3.0)
mixture, truncated = dp_event.MixtureOfGaussiansDpEvent, dp_event.TruncatedSubsampledGaussianDpEvent


def delta_of_randomized_response(eps0, count, eps):
    """Exact sum over the number of truthful answers."""
    p = math.exp(eps0) / (1 + math.exp(eps0))
    return sum(
        math.comb(count, j) * max(p**j * (1 - p) ** (count - j) - math.exp(eps) * (1 - p) ** j * p ** (count - j), 0.0)
        for j in range(count + 1)
    )


@pytest.mark.parametrize(
    ("event", "relation", "kind", "field", "value"),
    [
        (GAUSSIAN, ADD, jaxdp.Gaussian, "noise_multiplier", 2.0),
        (GAUSSIAN, SPECIAL, jaxdp.Gaussian, "noise_multiplier", 2.0),
        (GAUSSIAN, REPLACE, jaxdp.Gaussian, "noise_multiplier", 2.0),
        (dp_event.LaplaceDpEvent(3.0), ADD, jaxdp.Laplace, "noise_multiplier", 3.0),
        (dp_event.LaplaceDpEvent(3.0), REPLACE, jaxdp.Laplace, "noise_multiplier", 3.0),
        (dp_event.DiscreteLaplaceDpEvent(0.1, 3), ADD, jaxdp.DiscreteLaplace, "scale", 10.0),
        (dp_event.DiscreteLaplaceDpEvent(0.1, 3), REPLACE, jaxdp.DiscreteLaplace, "sensitivity", 3.0),
        (dp_event.RandomizedResponseDpEvent(0.5, 2), REPLACE, jaxdp.RandomizedResponse, "epsilon", math.log(3)),
        (dp_event.RandomizedResponseDpEvent(0.2, 5), REPLACE, jaxdp.RandomizedResponse, "epsilon", math.log(21)),
        (
            dp_event.SingleEpochTreeAggregationDpEvent(6.0, [8, 7]),
            SPECIAL,
            type(jaxdp.repeat(jaxdp.Gaussian(6.0), 4)),
            "times",
            4,
        ),
        (dp_event.PoissonSampledDpEvent(0.1, GAUSSIAN), REPLACE, jaxdp.PoissonSampled, "sampling_probability", 0.1),
        (
            dp_event.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN),
            REPLACE,
            jaxdp.FixedSizeSampled,
            "sampling_probability",
            0.05,
        ),
        (dp_event.RandomizedResponseDpEvent(0.5, 4), SPECIAL, jaxdp.DiscretePair, "p", [0.625, 0.375]),
        (dp_event.PoissonSampledDpEvent(0.1, LAPLACE), ADD, jaxdp.PoissonSampled, "sampling_probability", 0.1),
        (dp_event.PoissonSampledDpEvent(0.1, LAPLACE), REPLACE, jaxdp.PoissonSampled, "sampling_probability", 0.1),
        (mixture(2.0, [3.0, 0.0, 3.0], [0.1, 0.7, 0.2]), ADD, jaxdp.PoissonSampled, "sampling_probability", 0.3),
        (mixture(2.0, [3.0, 0.0, 1.0], [0.1, 0.7, 0.2]), ADD, interop.GaussianMixtures, "shifts", [0.0, 0.5, 1.5]),
        (truncated(100, 0.1, 100, 2.0), REPLACE, jaxdp.PoissonSampled, "sampling_probability", 0.1),
        (truncated(100, 1.0, 40, 2.0), ADD, TruncatedPoisson, "joins", 0.4),
        (truncated(4, 0.5, 2, 1.0), ADD, TruncatedPoisson, "full", 0.5),
        (truncated(4, 0.5, 2, 1.0), REPLACE, TruncatedPoisson, "sampling_probability", 0.5),
        (truncated(4, 0.5, 2, 0.04), ADD, TruncatedPoisson, "noise_multiplier", 0.04),
        (truncated(10**13, 0.5, 10**12, 1.0), ADD, TruncatedPoisson, "joins", 0.5),
        (truncated(4, 0.5, 2, 0.0), ADD, jaxdp.ApproximateDP, "delta", 1.0),
        (dp_event.NonPrivateDpEvent(), ADD, jaxdp.ApproximateDP, "delta", 1.0),
        (dp_event.GaussianDpEvent(0.0), ADD, jaxdp.ApproximateDP, "delta", 1.0),
        (dp_event.RandomizedResponseDpEvent(0.0, 2), REPLACE, jaxdp.ApproximateDP, "delta", 1.0),
    ],
)
def test_event_becomes_the_mechanism_of_its_own_documentation(event, relation, kind, field, value):
    mechanism = interop.from_dp_event(event, relation)
    assert type(mechanism) is kind
    np.testing.assert_allclose(getattr(mechanism, field), value, rtol=2e-15)


@pytest.mark.parametrize("relation", [ADD, REPLACE, SPECIAL])
def test_one_event_sampled_by_everyone_or_composed_once_is_one_number(relation):
    name, number = interop.relation_name(relation), jaxdp.Gaussian(2.0)
    same = [GAUSSIAN, dp_event.PoissonSampledDpEvent(1.0, GAUSSIAN), dp_event.SelfComposedDpEvent(GAUSSIAN, 1)]
    if relation is REPLACE:
        same.append(dp_event.SampledWithoutReplacementDpEvent(50, 50, GAUSSIAN))
    expected = jaxdp.epsilon(number, 1e-5, relation=name)
    for event in same:
        assert interop.PrivacyAccountant(relation).compose(event).get_epsilon(1e-5) == expected


def test_a_batch_of_all_records_is_refused_where_it_may_grow_with_the_data_set():
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="enlarges the sample"):
        interop.from_dp_event(dp_event.SampledWithoutReplacementDpEvent(50, 50, GAUSSIAN), ADD)


def test_several_gaussians_on_one_batch_are_one_gaussian():
    batch = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(4.0), dp_event.SelfComposedDpEvent(GAUSSIAN, 3)])
    mechanism = interop.from_dp_event(dp_event.PoissonSampledDpEvent(0.1, batch))
    expected = (1 / 16 + 3 / 4) ** -0.5
    assert mechanism.mechanism.noise_multiplier <= expected
    assert np.isclose(mechanism.mechanism.noise_multiplier, expected, rtol=1e-14)


@pytest.mark.parametrize(
    "event",
    [
        dp_event.PoissonSampledDpEvent(0.0, GAUSSIAN),
        dp_event.RandomizedResponseDpEvent(0.0, 1),
        dp_event.NoOpDpEvent(),
        dp_event.ComposedDpEvent([]),
        truncated(4, 0.0, 2, 1.0),
        truncated(4, 0.5, 0, 1.0),
    ],
)
def test_events_that_release_nothing_cost_nothing(event):
    assert interop.PrivacyAccountant(REPLACE).compose(event).mechanism.parts[0].mechanism.parts == ()


def test_accountant_composes_gaussians_to_the_closed_form():
    accountant = interop.PrivacyAccountant()
    accountant.compose(dp_event.GaussianDpEvent(20.0), 600).compose(
        dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(20.0), 400)])
    )
    # the Gaussian with mu = sqrt(1000)/20 at delta 1e-6, Balle and Wang 2018, Theorem 8, in 40 digits
    assert np.isclose(accountant.get_epsilon(1e-6), 8.3062250499547282, rtol=1e-9)
    assert np.isclose(accountant.get_delta(8.3062250499547282), 1e-6, rtol=1e-9)
    assert isinstance(accountant.get_epsilon(1e-6), float)
    assert accountant.ledger == dp_event.ComposedDpEvent(
        [
            dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(20.0), 600),
            dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(20.0), 400)]),
        ]
    )


def test_count_of_randomized_response_is_not_forgotten():
    """Defect of dp_accounting 0.6.0's PLD accountant: it counts the event once."""
    accountant = interop.PrivacyAccountant(REPLACE).compose(dp_event.RandomizedResponseDpEvent(0.5, 2), 4)
    exact = delta_of_randomized_response(math.log(3), 4, 1.0)
    assert exact <= accountant.get_delta(1.0) < exact * 1.001
    assert exact > 3 * delta_of_randomized_response(math.log(3), 1, 1.0)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (dp_event.UnsupportedDpEvent(), ADD),
        (dp_event.ZCDpEvent(0.5), ADD),
        (dp_event.RandomizedResponseDpEvent(0.5, 2), ADD),
        (mixture(1.0, [0.0, 1.0], [0.5, 0.5]), REPLACE),
        (mixture(1.0, [0.0, 1.0, 41.0], [0.2, 0.6, 0.2]), ADD),
        (mixture(1.0, list(range(33)), [1 / 33] * 33), ADD),
        (truncated(4, 0.5, 2, 1.0), SPECIAL),
        (dp_event.RepeatAndSelectDpEvent(GAUSSIAN, 2.0, 1.0), ADD),
        (dp_event.SingleEpochTreeAggregationDpEvent(1.0, 4), ADD),
        (dp_event.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN), SPECIAL),
        (dp_event.SampledWithReplacementDpEvent(100, 5, GAUSSIAN), REPLACE),
        (dp_event.PoissonSampledDpEvent(0.1, dp_event.SelfComposedDpEvent(LAPLACE, 2)), ADD),
        (dp_event.PoissonSampledDpEvent(0.1, dp_event.RandomizedResponseDpEvent(0.5, 2)), REPLACE),
        (dp_event.PoissonSampledDpEvent(0.1, mixture(1.0, [1.0], [1.0])), ADD),
    ],
)
def test_what_has_no_pair_is_refused_also_deep_inside_and_leaves_the_ledger_alone(event, relation):
    accountant = interop.PrivacyAccountant(relation)
    nested = dp_event.ComposedDpEvent([GAUSSIAN, dp_event.SelfComposedDpEvent(event, 3)])
    assert not accountant.supports(nested) and accountant.supports(GAUSSIAN)
    with pytest.raises(UnsupportedEventError, match=type(event).__name__):
        accountant.compose(nested)
    with pytest.raises(jaxdp.UnsupportedMechanismError):
        interop.from_dp_event(event, relation)
    assert accountant.mechanism.parts == ()


class TestContract(privacy_accountant_test.PrivacyAccountantTest):
    """dp_accounting's own tests of what every accountant promises, under all three relations."""

    def _make_test_accountants(self):
        return [interop.PrivacyAccountant(relation) for relation in (ADD, REPLACE, SPECIAL)]


def test_what_is_not_private_has_no_epsilon_even_at_delta_one_and_private_events_have():
    accountant = interop.PrivacyAccountant().compose(GAUSSIAN)
    assert accountant.get_epsilon(1.0) == 0
    accountant.compose(dp_event.PoissonSampledDpEvent(0.0, dp_event.GaussianDpEvent(0.0)))
    assert accountant.get_epsilon(1.0) == 0
    assert accountant.compose(dp_event.GaussianDpEvent(0.0)).get_epsilon(1.0) == math.inf


def own(event, relation, count, verb, target):
    """(lower, upper) of an event composed ``count`` times."""
    mechanism = jaxdp.repeat(interop.from_dp_event(event, relation), count)
    return verb(mechanism, target, relation=interop.relation_name(relation))


def exact_sum(p, q, count, eps):
    """Hockey-stick divergence of two composed laws of two outcomes: a sum over counts of the first, in 40 digits."""
    with mpmath.workdps(40):
        p, q = ([mpmath.mpf(mass) for mass in law] for law in (p, q))
        return sum(
            mpmath.binomial(count, j)
            * max(p[0] ** j * p[1] ** (count - j) - mpmath.exp(eps) * q[0] ** j * q[1] ** (count - j), 0)
            for j in range(count + 1)
        )


@pytest.mark.parametrize(("noise", "buckets", "count"), [(0.5, 4, 1), (0.5, 4, 7), (0.01, 1000, 3), (0.9, 2, 20)])
def test_randomized_response_against_the_special_record_is_above_its_exact_delta(noise, buckets, count):
    with mpmath.workdps(40):
        share = mpmath.mpf(noise) / buckets
        value, uniform = (1 - noise + share, noise - share), (mpmath.mpf(1) / buckets, 1 - mpmath.mpf(1) / buckets)
        value = (1 - value[1], value[1])
    accountant = interop.PrivacyAccountant(SPECIAL).compose(dp_event.RandomizedResponseDpEvent(noise, buckets), count)
    for eps in (0.0, 0.3, 1.0):
        exact = max(exact_sum(value, uniform, count, eps), exact_sum(uniform, value, count, eps))
        assert exact <= accountant.get_delta(eps) <= exact * (1 + 1e-6)


def test_a_mixture_whose_chances_do_not_sum_to_one_is_rounded_to_the_safe_side():
    exact = interop.from_dp_event(mixture(2.0, [0.0, 3.0], [0.7, 0.3]))
    for chances in ([0.7 - 5e-10, 0.3], [0.7, 0.3 + 5e-10]):
        assert (
            interop.from_dp_event(mixture(2.0, [0.0, 3.0], chances)).sampling_probability > exact.sampling_probability
        )
    assert exact.sampling_probability >= 0.3 and exact.mechanism.noise_multiplier <= 2 / 3
    for sizes, chances in [([0.0, 3.0], [0.7, 0.2]), ([1.0], [0.5, 0.5]), ([], [])]:
        with pytest.raises(ValueError, match="sampling_probs must be as many"):
            interop.from_dp_event(mixture(2.0, sizes, chances))


def mixture_delta(sizes, chances, eps, swapped):
    """Exact delta of a mixture of N(size, 1), sizes ascending, against N(0, 1), or swapped, in 30 digits."""
    with mpmath.workdps(30):
        parts = [(mpmath.mpf(chance), mpmath.mpf(size)) for chance, size in zip(chances, sizes, strict=True)]
        ratio = lambda x: sum(p * mpmath.exp(s * x - s * s / 2) for p, s in parts)  # noqa: E731
        least = sum(p for p, s in parts if s == 0)
        bar = mpmath.exp(-eps if swapped else eps)
        if bar <= least:
            return mpmath.mpf(0)
        at = mpmath.findroot(
            lambda x: mpmath.log(ratio(x) / bar), (-60, 60), solver="bisect", maxsteps=200, verify=False
        )
        if swapped:
            return mpmath.ncdf(at) - mpmath.exp(eps) * sum(p * mpmath.ncdf(at - s) for p, s in parts)
        return sum(p * mpmath.ncdf(s - at) for p, s in parts) - mpmath.exp(eps) * mpmath.ncdf(-at)


@pytest.mark.parametrize(
    ("sizes", "chances"),
    [([0, 1, 2], [0.25, 0.5, 0.25]), ([0, 0.125, 0.25], [0.875, 0.0625, 0.0625]), ([0.5, 1.5], [0.5, 0.5])],
)
@pytest.mark.parametrize("relation", ["remove", "add"])
def test_a_mixture_of_sizes_is_just_above_its_exact_delta(sizes, chances, relation):
    mechanism = interop.from_dp_event(mixture(1.0, sizes[::-1], chances[::-1]))
    for eps in (0.0, 0.05, 1.0):
        exact = mixture_delta(sizes, chances, eps, relation == "add")
        upper = jaxdp.delta(mechanism, eps, relation=relation)
        assert exact <= upper
        assert upper <= exact * (1 + 1e-4) if exact > 1e-20 else upper < 1e-19


def sums_of_a_cut_batch(values, rate, largest):
    """Chances of the sums of a Poisson batch that is cut to ``largest`` records at random, by enumeration."""
    law = {}
    for drawn in itertools.product([False, True], repeat=len(values)):
        batch = [value for value, there in zip(values, drawn, strict=True) if there]
        chance = rate ** len(batch) * (1 - rate) ** (len(values) - len(batch))
        kept = list(itertools.combinations(batch, min(largest, len(batch))))
        for some in kept:
            law[sum(some)] = law.get(sum(some), 0.0) + chance / len(kept)
    return law


@pytest.mark.parametrize("others", [(-1, -1, -1), (0, 0, 0), (1, 1, 1), (-1, 0, 1), (-1, -1, -1, -1, -1)])
@pytest.mark.parametrize(("rate", "largest", "noise"), [(0.5, 2, 1.0), (0.3, 1, 0.5), (0.9, 2, 2.0)])
@pytest.mark.thorough
def test_no_data_set_beats_the_bound_of_truncated_batches(others, rate, largest, noise):
    x = np.linspace(-12 - len(others), 12 + len(others), 20_001)

    def density(values):
        law = sums_of_a_cut_batch(values, rate, largest)
        return sum(c * np.exp(-0.5 * ((x - s) / noise) ** 2) for s, c in law.items()) / (noise * math.sqrt(2 * math.pi))

    without, with_one = density(others), density((*others, 1))
    event = truncated(len(others) + 1, rate, largest, noise)
    accountant = interop.PrivacyAccountant().compose(event)
    for eps in (0.0, 0.5, 1.5):
        bound = accountant.get_delta(eps)
        for p, q in ((with_one, without), (without, with_one)):
            attained = np.sum(np.maximum(p - math.exp(eps) * q, 0)) * (x[1] - x[0])
            assert attained <= bound * (1 + 1e-6)


@pytest.mark.thorough
def test_truncated_batches_cost_no_more_than_dp_accounting_says():
    """dp_accounting takes the pair of REPLACE_ONE where the batch is full: its epsilon is 8% larger here."""
    event = truncated(4, 0.5, 2, 1.0)
    theirs = PLDAccountant().compose(event, 3).get_epsilon(1e-6)
    assert 0.8 * theirs < interop.PrivacyAccountant().compose(event, 3).get_epsilon(1e-6) < theirs


@pytest.mark.thorough
def test_batches_that_are_hardly_ever_cut_are_poisson_batches():
    bounds = [
        interop.PrivacyAccountant().compose(truncated(10_000, 0.01, cut, 2.0), 100).get_epsilon(1e-6)
        for cut in (10_000, 1000, 200)
    ]
    assert bounds[0] <= bounds[1] <= bounds[0] * (1 + 1e-9)
    assert bounds[1] < bounds[2] < bounds[1] * (1 + 1e-5)


@pytest.mark.parametrize(("others", "rate", "largest"), [(3, 0.5, 2), (40, 0.3, 20), (40, 0.3, 1), (200, 0.99, 199)])
def test_the_chances_of_a_cut_batch_are_exact_to_their_error(others, rate, largest):
    with mpmath.workdps(40):
        q = mpmath.mpf(rate)
        mass = [mpmath.binomial(others, s) * q**s * (1 - q) ** (others - s) for s in range(others + 1)]
        full = sum(mass[largest:])
        joins = sum(q * largest / (s + 1) * mass[s] for s in range(largest, others + 1)) / full
        *chances, error = batch_chances(others, rate, largest)
        for got, exact in zip(chances, (1 - full, full, joins), strict=True):
            assert abs(got - exact) <= error * exact < 1e-12


def later_event(name, *args):
    """An event that only later releases of dp_accounting have."""
    if not hasattr(dp_event, name):
        pytest.skip(f"the installed dp_accounting has no {name}")
    return getattr(dp_event, name)(*args)


def test_a_discrete_gaussian_is_translated_for_scalars_only():
    event = later_event("DiscreteGaussianDpEvent", 3.0, 2.0, 1)
    assert interop.from_dp_event(event) == jaxdp.DiscreteGaussian(3.0, 2.0)
    assert interop.from_dp_event(type(event)(0.0, 1.0, 1)) == jaxdp.ApproximateDP(0.0, 1.0)
    assert interop.from_dp_event(type(event)(3.0, 0.0, 1)) == jaxdp.compose()
    for dimension in (None, 2):
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="dimension=1"):
            interop.from_dp_event(type(event)(3.0, 1.0, dimension))


def test_a_stated_guarantee_is_its_own_worst_case():
    event = later_event("EpsilonDeltaDpEvent", 0.5, 1e-6)
    assert interop.from_dp_event(event, REPLACE) == jaxdp.ApproximateDP(0.5, 1e-6)
    assert interop.PrivacyAccountant().compose(type(event)(0.5, 1.0)).get_epsilon(1.0) == math.inf


def laplace_pld(relation, **kwargs):
    """dp_accounting has no Laplace pair for REPLACE_ONE: there, the same noise at twice the sensitivity."""
    return pld.from_laplace_mechanism(4.0, sensitivity=2.0 if relation is REPLACE else 1.0, **kwargs)


def discrete_laplace_pld(relation, **kwargs):
    return pld.from_discrete_laplace_mechanism(0.23704, sensitivity=4 if relation is REPLACE else 2, **kwargs)


# How dp_accounting builds the loss distribution of each event.
PLD = {
    "Gaussian": (
        dp_event.GaussianDpEvent(3.0),
        lambda relation, **kwargs: pld.from_gaussian_mechanism(3.0, neighboring_relation=relation, **kwargs),
    ),
    "sampled Gaussian": (
        dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(1.5)),
        lambda relation, **kwargs: pld.from_gaussian_mechanism(
            1.5, sampling_prob=0.2, neighboring_relation=relation, **kwargs
        ),
    ),
    "Laplace": (dp_event.LaplaceDpEvent(4.0), laplace_pld),
    "discrete Laplace": (dp_event.DiscreteLaplaceDpEvent(0.23704, 2), discrete_laplace_pld),
    "sampled Laplace": (
        dp_event.PoissonSampledDpEvent(0.2, dp_event.LaplaceDpEvent(0.5)),
        lambda relation, **kwargs: pld.from_laplace_mechanism(0.5, sampling_prob=0.2, **kwargs),
    ),
    "randomized response": (
        dp_event.RandomizedResponseDpEvent(0.5, 4),
        lambda relation, **kwargs: pld.from_randomized_response(0.5, 4, neighboring_relation=relation, **kwargs),
    ),
    "mixture": (
        mixture(2.0, [0.0, 1.0, 3.0], [0.8, 0.1, 0.1]),
        # coarse: at its usual interval of 1e-4 the optimistic distribution takes a minute
        lambda relation, **kwargs: pld.from_mixture_gaussian_mechanism(
            2.0, [0.0, 1.0, 3.0], [0.8, 0.1, 0.1], value_discretization_interval=5e-3, **kwargs
        ),
    ),
}


EVERY, ABSENT = (ADD, REPLACE, SPECIAL), (ADD, SPECIAL)
RELATIONS = {"sampled Laplace": ABSENT, "randomized response": (REPLACE, SPECIAL), "mixture": (ADD,)}


@pytest.mark.parametrize(
    ("name", "relation"),
    [(name, relation) for name in PLD for relation in RELATIONS.get(name, EVERY)],
    ids=lambda part: getattr(part, "name", part),
)
def test_numbers_lie_between_the_optimistic_and_the_pessimistic_ones_of_dp_accounting(name, relation):
    event, make = PLD[name]
    count, delta = 5, 1e-5
    low, high = (
        make(relation, pessimistic_estimate=side).self_compose(count).get_epsilon_for_delta(delta)
        for side in (False, True)
    )
    lower, upper = own(event, relation, count, jaxdp.epsilon_bounds, delta)
    assert 0.99 * high < low < high  # the comparison is not empty
    assert low * (1 - 1e-9) <= upper and lower <= high * (1 + 1e-9)
    # a mixture has no lower bound, and therefore a rougher gap
    assert upper <= high * (1 + (2e-5 if name == "mixture" else 1e-6))


@pytest.mark.parametrize(("batch", "count"), [(5, 30), (40, 1)])
@pytest.mark.thorough
def test_a_fixed_size_batch_is_within_dp_accountings_renyi_bound_at_half_the_noise(batch, count):
    """dp_accounting's RDP accountant divides noise by the relation's sensitivity, two norm bounds for REPLACE_ONE."""
    event = dp_event.SampledWithoutReplacementDpEvent(100, batch, dp_event.GaussianDpEvent(4.0))
    theirs = rdp.RdpAccountant(neighboring_relation=REPLACE).compose(
        dp_event.SampledWithoutReplacementDpEvent(100, batch, dp_event.GaussianDpEvent(2.0)), count
    )
    bounds = own(event, REPLACE, count, jaxdp.epsilon_bounds, 1e-5)
    assert 0.3 * theirs.get_epsilon(1e-5) < bounds.upper <= theirs.get_epsilon(1e-5)


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="DpEvent"):
        interop.from_dp_event("gaussian")
    with pytest.raises(ValueError, match="neighboring_relation"):
        interop.PrivacyAccountant("add")
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        interop.from_dp_event(dp_event.GaussianDpEvent(-1.0))
    with pytest.raises(ValueError, match=r"sampling_probs must be as many as .* got \[0.5\] for \[1.0\]"):
        interop.from_dp_event(mixture(1.0, 1.0, 0.5))


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_an_error(count):
    with pytest.raises(ValueError, match="count`? must be"):
        interop.PrivacyAccountant().compose(GAUSSIAN, count)


def test_sampled_noise_whose_square_overflows_is_some_noise():
    one = dp_event.GaussianDpEvent(1e170)
    for event, sigma in ((one, 1e170), (dp_event.ComposedDpEvent([one, one]), 1e170 / np.sqrt(2))):
        translated = interop.from_dp_event(dp_event.PoissonSampledDpEvent(0.5, event))
        assert translated.mechanism.noise_multiplier == pytest.approx(sigma, rel=1e-14)
        assert jaxdp.delta(translated, 0.0) > 0


def test_randomized_response_is_not_rounded_below_its_local_epsilon():
    for p in np.random.default_rng(0).uniform(0, 1, 200):
        translated = interop.from_dp_event(
            dp_event.RandomizedResponseDpEvent(p, 7), interop.NeighboringRelation.REPLACE_ONE
        )
        with mpmath.workdps(40):
            assert mpmath.mpf(translated.epsilon) >= mpmath.log(1 + 7 * (1 - mpmath.mpf(p)) / mpmath.mpf(p))


def test_the_scale_of_discrete_noise_is_not_rounded_up():
    for rate in np.random.default_rng(1).uniform(0, 3, 200):
        translated = interop.from_dp_event(dp_event.DiscreteLaplaceDpEvent(rate, 3))
        assert 0 <= 1 - Fraction(translated.scale) * Fraction(rate) < 3e-16
