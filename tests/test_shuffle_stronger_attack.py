"""Random adaptive mechanisms, enumerated exactly, against the stronger clones bound (proof: notebooks/proofs)."""

import numpy as np

from jaxdp.shuffle.bounds import clones_bounds

CASES = 3000
ROUNDING = 1e-12  # absolute, for an enumerated sum of nine terms of two products each
OUTCOMES = 3


def laws(rng, shape):
    """Random laws for three inputs (last axis: outcome); nearly two-valued ratios, like those of worst randomizers."""
    weights = rng.dirichlet(np.ones(OUTCOMES), shape[:-1])[..., None, :]
    tilt = rng.uniform(0.2, 3.0, (shape[0],) + (1,) * (len(shape)))
    bits = rng.integers(0, 2, (*shape[:-1], 3, OUTCOMES))
    raw = weights * np.exp(tilt * bits)
    return raw / raw.sum(-1, keepdims=True)


def level(law):
    logs = np.log(law)
    return (logs.max(-2) - logs.min(-2)).reshape(len(law), -1).max(1)


def divergence_of_two_users(first, second, central):
    """H_central of shuffled (x0, x2) against (x1, x2). The law of the second report depends on the first report."""

    def joint(x):
        one = first[:, x, :, None] * second[:, :, 2, :]
        two = first[:, 2, :, None] * second[:, :, x, :]
        return 0.5 * (one + two)

    return np.maximum(joint(0) - central[:, None, None] * joint(1), 0.0).sum((1, 2))


def attack(scale):
    """By how much each divergence exceeds the stronger clones bound for the local epsilon scale * eps0."""
    rng = np.random.default_rng(11)
    first, second = laws(rng, (CASES, OUTCOMES)), laws(rng, (CASES, OUTCOMES, OUTCOMES))
    eps0 = np.maximum(level(first), level(second))
    epsilon = eps0 * rng.uniform(0, 1, CASES)
    value = divergence_of_two_users(first, second, np.exp(epsilon))
    bound = clones_bounds("delta", scale * eps0, np.full(CASES, 2.0), epsilon, "stronger").upper
    return value - bound


def test_no_random_adaptive_mechanism_beats_the_stronger_bound():
    assert attack(1.0).max() <= ROUNDING


def test_the_attack_notices_a_bound_for_a_smaller_local_level():
    assert attack(0.5).max() > 0.01
