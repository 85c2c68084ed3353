"""Mechanisms as values: equality, hash, pickle, and a repr that evaluates."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import diffusion, training

NAN = np.nan
# Each entry is one mechanism in several equal spellings.
EQUAL = [
    (jaxdp.Gaussian(1), jaxdp.Gaussian(1.0), jaxdp.Gaussian(np.float32(1)), jaxdp.Gaussian(jnp.array(1))),
    (
        jaxdp.Gaussian([1, 2]),
        jaxdp.Gaussian((1.0, 2.0)),
        jaxdp.Gaussian(np.array([1, 2])),
        jaxdp.Gaussian(jnp.ones(2).cumsum()),
    ),
    (jaxdp.Gaussian([[1, 2]]), jaxdp.Gaussian(np.array([[1.0, 2.0]]))),
    (jaxdp.Gaussian([1.0]), jaxdp.Gaussian(np.ones(1))),
    (jaxdp.Gaussian(2.0), jaxdp.Gaussian(2)),
    (jaxdp.Gaussian(NAN), jaxdp.Gaussian(np.float32(NAN))),
    (jaxdp.Gaussian(np.inf), jaxdp.Gaussian(-np.inf * -1)),
    (jaxdp.Gaussian(0.1), jaxdp.Gaussian(np.float64(0.1))),
    (jaxdp.Gaussian(np.float32(0.1)), jaxdp.Gaussian(float(np.float32(0.1)))),
    (jaxdp.Laplace(1.0), jaxdp.Laplace(1)),
    (jaxdp.PureDP(0.0), jaxdp.PureDP(-0.0)),
    (jaxdp.DiscreteGaussian(1 / 3, 2), jaxdp.DiscreteGaussian(sigma=1 / 3, sensitivity=2.0)),
    (jaxdp.DiscreteLaplace(2.0), jaxdp.DiscreteLaplace(2.0, 1)),
    (jaxdp.RandomizedResponse(1.0), jaxdp.RandomizedResponse(1.0, 2)),
    (jaxdp.ApproximateDP(1.0, 0.0), jaxdp.ApproximateDP(1, 0)),
    (jaxdp.LocalRandomizer(1.0), jaxdp.LocalRandomizer(1, 0)),
    (jaxdp.DiscretePair([0.1, 0.9], [0.7, 0.3]), jaxdp.DiscretePair(np.array([0.1, 0.9]), (0.7, 0.3))),
    (jaxdp.NoisyIteration([[0.9]], [[1.0]], [[2]]), jaxdp.NoisyIteration([[0.9]], [[1]], [[2.0]])),
    (jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.1), jaxdp.PoissonSampled(jaxdp.Gaussian(1), 0.1)),
    (jaxdp.FixedSizeSampled(jaxdp.Gaussian(1.0), 0.1), jaxdp.FixedSizeSampled(jaxdp.Gaussian(1), 0.1)),
    (jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 10**6), jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 1e6, None)),
    (jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 10**6, "clones"),),
    (jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 2**53), jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 2.0**53)),
    (
        jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 2**53 + 1),
        jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), np.array(2**53 + 1)),
    ),
    (jaxdp.compose(), jaxdp.compose()),
    (jaxdp.compose(jaxdp.Gaussian(1.0)), jaxdp.compose(jaxdp.Gaussian(1))),
    (
        jaxdp.compose(jaxdp.Gaussian(1.0), jaxdp.repeat(jaxdp.Laplace([2.0, 3.0]), [[4], [5]])),
        jaxdp.compose(jaxdp.Gaussian(1), jaxdp.repeat(jaxdp.Laplace((2, 3)), np.array([[4], [5]]))),
    ),
    (jaxdp.repeat(jaxdp.Gaussian(1.0), 3), jaxdp.repeat(jaxdp.Gaussian(1), 3.0)),
    (jaxdp.repeat(jaxdp.Gaussian(1.0), 1),),
    (diffusion.BrownianMotion(1.0), diffusion.BrownianMotion(1, 1)),
    (diffusion.OrnsteinUhlenbeck(1.0, 2.0, 3.0), diffusion.OrnsteinUhlenbeck(1, 2, 3, 1)),
    (training.IteratedRelease(0.5), training.IteratedRelease(np.array(0.5))),
    (training.IteratedRelease([0.5]), training.IteratedRelease(np.array([0.5]))),
]
ALL = [mechanism for spellings in EQUAL for mechanism in spellings]


def test_mechanisms_are_equal_and_hash_equally_exactly_when_class_shape_and_value_are():
    for place, spellings in enumerate(EQUAL):
        for other, others in enumerate(EQUAL):
            for one in spellings:
                for two in others:
                    assert (one == two) is (place == other), (one, two)
                    assert place != other or hash(one) == hash(two), (one, two)
    assert len(set(ALL)) == len(EQUAL)
    assert jaxdp.Gaussian(1.0) != 1.0 and jaxdp.Gaussian(1.0) != "Gaussian(noise_multiplier=1.0)"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_and_a_pickled_copy_are_equal(again):
    for mechanism in ALL:
        assert again(mechanism) == mechanism and hash(again(mechanism)) == hash(mechanism)


def test_a_repr_evaluates_to_an_equal_mechanism_with_the_names_of_jaxdp():
    names = {name: getattr(jaxdp, name) for name in dir(jaxdp) if name not in ("interop", "plot")}
    for mechanism in ALL:
        assert eval(repr(mechanism), dict(names)) == mechanism, repr(mechanism)


def test_reprs_are_short_where_they_can_be():
    assert repr(jaxdp.Gaussian(np.float64(1.5))) == "Gaussian(noise_multiplier=1.5)"
    mechanism = jaxdp.compose(
        jaxdp.PoissonSampled(jaxdp.Gaussian(np.array([1, 2])), 0.1), jaxdp.repeat(jaxdp.PureDP(1), 3)
    )
    sampled = "PoissonSampled(mechanism=Gaussian(noise_multiplier=[1, 2]), sampling_probability=0.1)"
    assert repr(mechanism) == f"compose({sampled}, repeat(PureDP(epsilon=1), 3))"
    assert repr(diffusion.BrownianMotion(2.0)) == "diffusion.BrownianMotion(time=2.0, sensitivity=1.0)"


@jaxdp.record
class Own(jaxdp.Mechanism):
    """A user's own record."""

    scale: object
    mode: str = "a"


def test_a_users_own_record_and_a_class_without_the_decorator_are_values_too():
    assert Own(1.0, 2.0) == Own(1, 2) != Own(1.0, 3.0)
    assert eval(repr(Own([1.0, NAN], 2)), {"Own": Own}) == Own([1.0, NAN], 2)

    class Forgotten(jaxdp.Mechanism):
        pass

    one = Forgotten()
    assert one == one and one != Forgotten() and "Forgotten" in repr(one)


def test_traced_numbers_equal_themselves_only():
    def compare(x):
        one = jaxdp.Gaussian(x)
        assert one == jaxdp.Gaussian(x) and hash(one) == hash(jaxdp.Gaussian(x))
        assert one != jaxdp.Gaussian(x + 0) and one != jaxdp.Gaussian(1.0)
        assert "noise_multiplier=" in repr(one)
        return x

    jax.jit(compare)(1.0)


def test_a_compiled_function_is_used_again_for_new_numbers():
    traces = []

    @jax.jit
    def scaled(mechanism):
        traces.append(1)
        return jax.tree_util.tree_map(lambda x: 2 * x, mechanism)

    assert scaled(jaxdp.Gaussian(1.0)) == jaxdp.Gaussian(2.0)
    assert scaled(jaxdp.Gaussian(3.0)) == jaxdp.Gaussian(6.0)
    assert len(traces) == 1
    scaled(jaxdp.Laplace(1.0))
    assert len(traces) == 2


def test_dir_shows_public_names_only():
    subjects = (
        "conversions",
        "convolution",
        "diffusion",
        "domains",
        "interop",
        "iteration",
        "mixing",
        "plot",
        "shuffle",
        "training",
    )
    assert dir(jaxdp) == sorted([*jaxdp.__all__, *subjects, "__version__"])
