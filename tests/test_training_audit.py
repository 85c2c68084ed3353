"""An empirical audit: the epsilon that a membership attack on real runs proves stays below the certified one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp.training import NoisyProjectedSGD, StronglyConvexLoss

DELTA = 1e-5
RUNS = 200_000
# Probability with which each of the two exact binomial bounds fails. A test of a correct certificate therefore fails
# with at most twice this probability.
FAILURE = 1e-7

# f(w, x) = (w - x)^2 / 2 with |x| <= 1: data term -w x, regulariser w^2 / 2
LOSS = StronglyConvexLoss(lipschitz=1.0, smoothness=1.0, strong_convexity=1.0)
FULL_BATCH = NoisyProjectedSGD(loss=LOSS, learning_rate=0.25, noise_std=1.5, batch_size=4, num_examples=4, radius=50.0)
CYCLIC = dataclasses.replace(FULL_BATCH, batch_size=2, num_examples=6, noise_std=1.0)


def last_iterates(sgd, record, person, steps, seed):
    """Final parameters of RUNS runs. Every record is 0 except that of ``person``."""
    data = jnp.zeros(sgd.num_examples).at[person].set(record)

    def run(key):
        tx = sgd.optimizer(key)
        params = jnp.zeros(())

        def step(carry, t):
            params, state = carry
            batch = sgd.batch(t)
            grads = sgd.gradient(lambda w, x: -w * x, params, data[batch.indices], batch.mask)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[0][0]

    return np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(seed), RUNS)))


def exact_law(sgd, person, steps):
    """(mean, standard deviation) of the last iterate if the record of ``person`` is 1. For -1 the mean is negated."""
    kappa = 1 - sgd.learning_rate
    mean, variance = 0.0, 0.0
    for t in range(steps):
        visited = person // sgd.batch_size == t % sgd.num_batches
        mean = kappa * mean + visited * sgd.learning_rate / sgd.batch_size
        variance = kappa**2 * variance + (sgd.learning_rate * sgd.noise_std) ** 2
    return mean, np.sqrt(variance)


def proved_epsilon(with_record, without, threshold):
    """Lower bound of epsilon at DELTA from the error rates of a fixed threshold, by Clopper and Pearson's bounds."""
    hits, false_alarms = (int(np.sum(w > threshold)) for w in (with_record, without))
    power = stats.beta.ppf(FAILURE, hits, RUNS - hits + 1)
    level = stats.beta.ppf(1 - FAILURE, false_alarms + 1, RUNS - false_alarms)
    return np.log(max(power - DELTA, 1e-300) / level)


def attack(sgd, person, steps):
    """(epsilon proved, both sets of runs); the threshold, fixed before, lies 3.2 deviations above the mean for -1."""
    mean, deviation = exact_law(sgd, person, steps)
    threshold = -mean + 3.2 * deviation
    pair = [last_iterates(sgd, record, person, steps, seed) for record, seed in ((1.0, 0), (-1.0, 1))]
    return proved_epsilon(*pair, threshold), pair


@pytest.mark.slow
@pytest.mark.parametrize(("sgd", "person", "steps"), [(FULL_BATCH, 0, 10), (CYCLIC, 5, 9), (CYCLIC, 0, 9)])
def test_an_attack_never_proves_more_than_the_certified_epsilon(sgd, person, steps):
    certified = jaxdp.epsilon(sgd.after(steps, example=person), DELTA)
    proved, pair = attack(sgd, person, steps)
    mean, deviation = exact_law(sgd, person, steps)
    # the two normal laws of these runs have means 2 ``mean`` apart
    exact = jaxdp.epsilon(jaxdp.Gaussian(deviation / (2 * mean)), DELTA)
    assert proved <= exact <= certified * (1 + 1e-9)
    assert proved > 0.3 * certified
    # the runs follow the exact law, within 5 standard errors of mean and deviation
    assert abs(pair[0].mean() - mean) < 5 * deviation / np.sqrt(RUNS)
    assert abs(pair[0].std() / deviation - 1) < 5 / np.sqrt(2 * RUNS)


@pytest.mark.slow
def test_the_attack_exposes_a_run_with_half_the_stated_noise():
    certified = jaxdp.epsilon(FULL_BATCH.after(10), DELTA)
    mean, deviation = exact_law(FULL_BATCH, 0, 10)
    cheat = dataclasses.replace(FULL_BATCH, noise_std=FULL_BATCH.noise_std / 2)
    pair = [last_iterates(cheat, record, 0, 10, seed) for record, seed in ((1.0, 0), (-1.0, 1))]
    assert proved_epsilon(*pair, -mean + 3.4 * deviation / 2) > certified
