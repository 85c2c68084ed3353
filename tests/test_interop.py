"""jaxdp.interop: the translation of every event, and the accountant's interface."""

import math

import numpy as np
import pytest

import jaxdp

pytest.importorskip("dp_accounting")
from dp_accounting import dp_event  # noqa: E402  (after the skip)
from dp_accounting.privacy_accountant import UnsupportedEventError  # noqa: E402

from jaxdp import interop  # noqa: E402

pytestmark = pytest.mark.comparison
R = interop.NeighboringRelation
ADD, REPLACE, SPECIAL = R.ADD_OR_REMOVE_ONE, R.REPLACE_ONE, R.REPLACE_SPECIAL
GAUSSIAN = dp_event.GaussianDpEvent(2.0)


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
        (GAUSSIAN, REPLACE, jaxdp.Gaussian, "noise_multiplier", 1.0),
        (dp_event.LaplaceDpEvent(3.0), ADD, jaxdp.Laplace, "noise_multiplier", 3.0),
        (dp_event.LaplaceDpEvent(3.0), REPLACE, jaxdp.Laplace, "noise_multiplier", 1.5),
        (dp_event.DiscreteLaplaceDpEvent(0.1, 3), ADD, jaxdp.DiscreteLaplace, "scale", 10.0),
        (dp_event.DiscreteLaplaceDpEvent(0.1, 3), REPLACE, jaxdp.DiscreteLaplace, "sensitivity", 6.0),
        (dp_event.RandomizedResponseDpEvent(0.5, 2), REPLACE, jaxdp.RandomizedResponse, "epsilon", math.log(3)),
        (dp_event.RandomizedResponseDpEvent(0.2, 5), REPLACE, jaxdp.RandomizedResponse, "epsilon", math.log(21)),
        (dp_event.SingleEpochTreeAggregationDpEvent(6.0, [8, 7]), SPECIAL, jaxdp.Gaussian, "noise_multiplier", 3.0),
        (dp_event.PoissonSampledDpEvent(0.1, GAUSSIAN), REPLACE, jaxdp.PoissonSampled, "sampling_probability", 0.1),
        (dp_event.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN), REPLACE, jaxdp.FixedSizeSampled,
         "sampling_probability", 0.05),
        (dp_event.NonPrivateDpEvent(), ADD, jaxdp.ApproximateDP, "delta", 1.0),
        (dp_event.GaussianDpEvent(0.0), ADD, jaxdp.ApproximateDP, "delta", 1.0),
        (dp_event.RandomizedResponseDpEvent(0.0, 2), REPLACE, jaxdp.ApproximateDP, "delta", 1.0),
    ],
)
def test_event_becomes_the_mechanism_of_its_own_documentation(event, relation, kind, field, value):
    mechanism = interop.from_dp_event(event, relation)
    assert type(mechanism) is kind
    assert np.isclose(getattr(mechanism, field), value, rtol=1e-15)


def test_noise_of_the_batch_query_is_that_of_the_theorem_for_each_sampler():
    """Poisson: the base under add/remove, also for replace-one. Fixed size: the base under replace-one."""
    poisson = interop.from_dp_event(dp_event.PoissonSampledDpEvent(0.1, GAUSSIAN), REPLACE)
    fixed = interop.from_dp_event(dp_event.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN), ADD)
    assert poisson.mechanism.noise_multiplier == 2.0
    assert fixed.mechanism.noise_multiplier == 1.0


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
        [dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(20.0), 600),
         dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(20.0), 400)])]
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
        (dp_event.RandomizedResponseDpEvent(0.5, 2), SPECIAL),
        (dp_event.SingleEpochTreeAggregationDpEvent(1.0, 4), ADD),
        (dp_event.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN), SPECIAL),
        (dp_event.SampledWithReplacementDpEvent(100, 5, GAUSSIAN), REPLACE),
        (dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(1.0)), ADD),
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


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="DpEvent"):
        interop.from_dp_event("gaussian")
    with pytest.raises(ValueError, match="neighboring_relation"):
        interop.PrivacyAccountant("add")
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        interop.from_dp_event(dp_event.GaussianDpEvent(-1.0))
    with pytest.raises(ValueError, match="count must be"):
        interop.PrivacyAccountant().compose(GAUSSIAN, -1)
