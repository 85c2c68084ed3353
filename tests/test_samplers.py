"""Samplers: the noise is what the accountant assumes. Seeds are fixed; failure probabilities are for a fresh seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp import diffusion
from jaxdp.numerics import samplers

COUNT = 200_000
# Each moment and fit test fails with probability about 1e-6 for a fresh seed (five-sigma normal deviate, p-value 1e-6).
SIGMAS = 5.0
P_VALUE = 1e-6
# Hoeffding: each of two frequencies is within this of its probability except with probability 1e-6.
FREQUENCY = np.sqrt(np.log(2 / 1e-6) / (2 * COUNT))


def standard_error_ok(samples, mean, variance, fourth):
    assert abs(samples.mean() - mean) < SIGMAS * np.sqrt(variance / COUNT)
    spread = np.sqrt((fourth - variance**2) / COUNT)
    assert abs(((samples - mean) ** 2).mean() - variance) < SIGMAS * spread


def lower_bound_on_epsilon(first, second, thresholds, delta=0.0):
    """Largest epsilon that two samples refute, up to the stated probability, over tests X > threshold."""
    best = 0.0
    for t in thresholds:
        high = np.mean(first > t) - FREQUENCY - delta
        low = np.mean(second > t) + FREQUENCY
        best = max(best, np.log(high / low) if high > 0 else 0.0)
    return best


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_dtype_and_shape_are_as_asked(dtype):
    key = jax.random.key(0)
    for draw in (samplers.gaussian, samplers.laplace):
        noise = draw(key, 2.0, (3, 4), dtype=dtype)
        assert noise.dtype == dtype
        assert noise.shape == (3, 4)
    assert samplers.discrete_laplace(key, 2.0, (5,), dtype=jnp.int16).dtype == jnp.int16


def test_the_same_key_gives_the_same_noise_and_another_key_another():
    first, again = (samplers.laplace(jax.random.key(1), 1.0, (8,), dtype=jnp.float32) for _ in range(2))
    other = samplers.laplace(jax.random.key(2), 1.0, (8,), dtype=jnp.float32)
    assert (first == again).all()
    assert (first != other).any()


def test_continuous_samples_follow_their_law():
    key = jax.random.key(3)
    normal = np.asarray(samplers.gaussian(key, 1.5, (COUNT,), dtype=jnp.float32), np.float64)
    standard_error_ok(normal, 0.0, 2.25, 3 * 2.25**2)
    assert stats.kstest(normal, stats.norm(scale=1.5).cdf).pvalue > P_VALUE
    double = np.asarray(samplers.laplace(key, 1.5, (COUNT,), dtype=jnp.float32), np.float64)
    standard_error_ok(double, 0.0, 4.5, 24 * 1.5**4)
    assert stats.kstest(double, stats.laplace(scale=1.5).cdf).pvalue > P_VALUE
    assert stats.kstest(double, stats.laplace(scale=1.6).cdf).pvalue < P_VALUE  # the test can fail


@pytest.mark.parametrize(("draw", "power"), [(samplers.discrete_laplace, 1), (samplers.discrete_gaussian, 2)])
def test_discrete_samples_follow_their_law(draw, power):
    scale = 2.0
    noise = np.asarray(draw(jax.random.key(4), scale, (COUNT,)))
    x = np.arange(-60, 61)
    law = np.exp(-abs(x) / scale) if power == 1 else np.exp(-(x**2) / (2 * scale**2))
    law /= law.sum()
    variance, fourth = (law * x**2).sum(), (law * x**4.0).sum()
    standard_error_ok(noise, 0.0, variance, fourth)
    common = law * COUNT > 20
    seen = np.array([(noise == v).sum() for v in x[common]])
    expected = law[common] * COUNT
    chi2 = ((seen - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(chi2, common.sum()) > P_VALUE


def test_discrete_tables_hold_the_law_to_their_stated_error():
    x = np.arange(-120, 121)
    law = np.exp(-abs(x) / 2.0)
    law /= law.sum()
    high, low = samplers.thresholds_of(np.exp(-abs(x) / 2.0))
    cumulative = np.asarray(high, np.float64) * 2.0**-32 + np.asarray(low, np.float64) * 2.0**-64
    assert np.abs(cumulative - np.cumsum(law)[:-1]).max() < 1e-15


def test_ornstein_uhlenbeck_and_brownian_samples_follow_their_law():
    record = diffusion.OrnsteinUhlenbeck(0.7, 1.3, 0.9)
    moved = np.asarray(record.sample(jax.random.key(5), jnp.full((COUNT,), 2.0, jnp.float32)), np.float64)
    variance = 1.3**2 / 0.7 * -np.expm1(-2 * 0.63)
    standard_error_ok(moved, 2.0 * np.exp(-0.63), variance, 3 * variance**2)
    error = ((moved - 2.0) ** 2).mean()
    assert error == pytest.approx(float(record.mse(2.0, 1)), rel=0.05)
    walked = diffusion.BrownianMotion(0.9).sample(jax.random.key(6), jnp.full((COUNT,), 2.0, jnp.float32))
    standard_error_ok(np.asarray(walked, np.float64), 2.0, 1.8, 3 * 1.8**2)


def test_measured_lower_bound_never_exceeds_the_certified_epsilon():
    # Two Hoeffding bounds at 30 thresholds: wrong with probability at most 6e-5 for a fresh seed.
    keys = jax.random.split(jax.random.key(7), 2)
    thresholds = np.linspace(-3, 3, 30)
    scale = 1.25
    first, second = (np.asarray(samplers.laplace(k, scale, (COUNT,), dtype=jnp.float32)) for k in keys)
    measured = lower_bound_on_epsilon(first + 1.0, second, thresholds)
    assert 0.7 / scale < measured <= 1.0 / scale
    # Half the noise is caught: the measurement would see a sampler that adds too little.
    assert lower_bound_on_epsilon(first / 2 + 1.0, second / 2, thresholds) > 1.0 / scale
    one, two = (np.asarray(samplers.discrete_laplace(k, scale, (COUNT,))) for k in keys)
    assert 0.7 / scale < lower_bound_on_epsilon(one + 1, two, thresholds) <= 1.0 / scale


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: samplers.discrete_laplace(jax.random.key(0), -1.0), ValueError, "scale"),
        (lambda: samplers.discrete_laplace(jax.random.key(0), 1e6), ValueError, "scale"),
        (lambda: samplers.discrete_gaussian(jax.random.key(0), 1.0, dtype=jnp.float32), TypeError, "dtype"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
