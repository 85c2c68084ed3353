"""Compositions of two mechanisms of one class, which share a stack: in a batch, with every number traced."""

import jax
import numpy as np
import pytest

import jaxdp

TWO = np.array([1.0, 2.0])
# A mechanism as a function of ``size``, an array of two numbers: a batch of two.
KINDS = {
    "Gaussian": lambda size: jaxdp.Gaussian(size),
    "Laplace": lambda size: jaxdp.Laplace(size),
    "discrete Gaussian": lambda size: jaxdp.DiscreteGaussian(3 * size),
    "discrete Laplace": lambda size: jaxdp.DiscreteLaplace(3 * size, 2),
    "randomized response": lambda size: jaxdp.RandomizedResponse(size, 4),
    "pure": lambda size: jaxdp.PureDP(size),
    "approximate": lambda size: jaxdp.ApproximateDP(size, 1e-8),
    "finite pair": lambda size: jaxdp.DiscretePair(np.stack([0.2 * size, 1 - 0.2 * size], axis=-1), [0.5, 0.5]),
    "noisy iteration": lambda size: jaxdp.NoisyIteration(
        0.9 + 0 * np.outer(size, TWO), np.outer(size, TWO), [1.0, 1.0]
    ),
    "shuffled": lambda size: jaxdp.Shuffled(jaxdp.HadamardResponse(size), 1000),
    "sampled Gaussian": lambda size: jaxdp.PoissonSampled(jaxdp.Gaussian(size), 0.01 * size),
    "sampled Laplace": lambda size: jaxdp.PoissonSampled(jaxdp.Laplace(size), 0.01 * size),
    "sampled iteration": lambda size: jaxdp.PoissonSampled(jaxdp.NoisyIteration([0.9], size[:, None], [1.0]), 0.1),
    "fixed-size Gaussian": lambda size: jaxdp.FixedSizeSampled(jaxdp.Gaussian(size), 0.01),
    "fixed-size response": lambda size: jaxdp.FixedSizeSampled(jaxdp.RandomizedResponse(size, 3), 0.01),
}


def _relations(mechanism):
    for relation in ("add", "remove", "replace_one"):
        try:
            mechanism.directions(relation)
        except jaxdp.UnsupportedMechanismError:
            continue
        yield relation


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "relation"),
    # under replace_one a composition of finite pairs that are not symmetric is refused
    [
        (name, each)
        for name, make in KINDS.items()
        for each in _relations(make(TWO))
        if (name, each) != ("finite pair", "replace_one")
    ],
)
def test_two_different_mechanisms_of_a_kind_can_be_composed_under_a_trace(name, relation):
    both = jaxdp.compose(KINDS[name](TWO), jaxdp.repeat(KINDS[name](1.3 * TWO), 3))
    numbers = jax.tree.map(lambda x: np.asarray(x, np.float64), both)
    with jax.enable_x64(True):
        found = jax.eval_shape(lambda m: jaxdp.epsilon_bounds(m, 1e-6, relation=relation), numbers)
    assert [each.shape for each in found] == [(2,), (2,)]
