"""Numbers outside their domain: refused by name when concrete, the vacuous bound when traced, for every field."""

import dataclasses
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting, diffusion, training
from jaxdp.domains import POSITIVE, field
from jaxdp.mechanisms.allocation import DirectedLaw
from jaxdp.mechanisms.base import confined
from jaxdp.mechanisms.composition import Composed, Repeated
from jaxdp.mechanisms.gaussian import OfMu
from jaxdp.mechanisms.sampled import Antipodal, EnclosingPair, JointlyConvex
from jaxdp.mechanisms.shuffled import LossLaw
from jaxdp.mechanisms.truncated import TruncatedPoisson
from jaxdp.runtime import backend
from jaxdp.sources.renyi import _WithTail

NAN, INF = np.nan, np.inf
# Outside the domain of every field. 1e-310 is subnormal and 1e308 has a subnormal reciprocal: compiled arithmetic would
# take a subnormal number for 0.
ALWAYS_OUTSIDE = (NAN, -INF, -0.5, 1e-310, 1e308)
JUST_BELOW_0, JUST_ABOVE_1 = -1e-300, np.nextafter(1.0, 2.0)

# Public record: (a valid example, for each of its numbers more values outside the domain, the nearest included).
EXAMPLES = {
    jaxdp.Gaussian: (jaxdp.Gaussian(1.5), {"noise_multiplier": (0.0, INF)}),
    jaxdp.Laplace: (jaxdp.Laplace(1.5), {"noise_multiplier": (0.0, INF)}),
    jaxdp.DiscreteGaussian: (jaxdp.DiscreteGaussian(2.0, 3), {"sigma": (0.0, INF), "sensitivity": (0.0, 2.5, INF)}),
    jaxdp.DiscreteLaplace: (jaxdp.DiscreteLaplace(2.0, 3), {"scale": (0.0, INF), "sensitivity": (0.0, 2.5, INF)}),
    jaxdp.RandomizedResponse: (
        jaxdp.RandomizedResponse(1.0, 4),
        {"epsilon": (JUST_BELOW_0, INF), "num_categories": (1.0, 2.5, INF)},
    ),
    jaxdp.UnaryEncoding: (
        jaxdp.UnaryEncoding(1.0, 4),
        {"epsilon": (JUST_BELOW_0, INF), "num_categories": (1.0, 2.5, INF)},
    ),
    jaxdp.SubsetSelection: (
        jaxdp.SubsetSelection(1.0, 6, 2),
        {"epsilon": (JUST_BELOW_0, INF), "num_categories": (1.0, 2.5, INF), "subset_size": (0.0, 1.5, INF)},
    ),
    jaxdp.LocalHashing: (
        jaxdp.LocalHashing(1.0, 4, 0.25),
        {
            "epsilon": (JUST_BELOW_0, INF),
            "num_buckets": (1.0, 2.5, INF),
            "collision_probability": (JUST_BELOW_0, JUST_ABOVE_1, INF),
        },
    ),
    jaxdp.HadamardResponse: (jaxdp.HadamardResponse(1.0), {"epsilon": (JUST_BELOW_0, INF)}),
    jaxdp.LocalLaplace: (jaxdp.LocalLaplace(1.0), {"epsilon": (JUST_BELOW_0, INF)}),
    jaxdp.PureDP: (jaxdp.PureDP(1.0), {"epsilon": (JUST_BELOW_0, INF)}),
    jaxdp.ApproximateDP: (
        jaxdp.ApproximateDP(1.0, 1e-3),
        {"epsilon": (JUST_BELOW_0, INF), "delta": (JUST_BELOW_0, JUST_ABOVE_1, INF)},
    ),
    jaxdp.LocalRandomizer: (
        jaxdp.LocalRandomizer(1.0, 1e-3),
        {"epsilon": (JUST_BELOW_0, INF), "delta": (JUST_BELOW_0, JUST_ABOVE_1, INF)},
    ),
    jaxdp.DiscretePair: (
        jaxdp.DiscretePair([0.25, 0.75], [0.5, 0.5]),
        {"p": (JUST_BELOW_0, 0.75 + 1e-8, INF), "q": (JUST_BELOW_0, 0.5 - 1e-8, INF)},
    ),
    jaxdp.NoisyIteration: (
        jaxdp.NoisyIteration([0.9, 0.8], [1.0, 1.0], [1.0, 0.5]),
        {name: (JUST_BELOW_0, INF) for name in ("contraction", "noise_std", "shift")},
    ),
    jaxdp.PoissonSampled: (
        jaxdp.PoissonSampled(jaxdp.Gaussian(1.5), 0.25),
        {"sampling_probability": (JUST_BELOW_0, JUST_ABOVE_1, INF)},
    ),
    TruncatedPoisson: (
        TruncatedPoisson(1.5, 0.25, 0.5, 0.5, 0.125, 1e-12),
        {
            "noise_multiplier": (0.0, INF),
            "error": (JUST_BELOW_0, INF),
            **dict.fromkeys(("sampling_probability", "partial", "full", "joins"), (JUST_BELOW_0, JUST_ABOVE_1, INF)),
        },
    ),
    jaxdp.FixedSizeSampled: (
        jaxdp.FixedSizeSampled(jaxdp.Laplace(1.5), 0.25),
        {"sampling_probability": (JUST_BELOW_0, JUST_ABOVE_1, INF)},
    ),
    jaxdp.Shuffled: (
        jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0, 1e-9), 1000),
        {"num_users": (0.0, 1.5, INF)},
    ),
    jaxdp.RandomAllocation: (
        jaxdp.RandomAllocation(jaxdp.Gaussian(1.5), 100, 3),
        {"num_steps": (0.0, 1.5, 2.0, INF), "times": (0.0, 1.5, 101.0, INF)},
    ),
    Repeated: (jaxdp.repeat(jaxdp.Gaussian(1.5), 3), {"times": (-1.0, 2.5, INF)}),
    Composed: (jaxdp.compose(jaxdp.Gaussian(1.5), jaxdp.repeat(jaxdp.Laplace(2.0), 4)), {}),
    diffusion.BrownianMotion: (
        diffusion.BrownianMotion(2.0, 1.0),
        {"time": (0.0, INF), "sensitivity": (0.0, INF)},
    ),
    diffusion.OrnsteinUhlenbeck: (
        diffusion.OrnsteinUhlenbeck(1.0, 2.0, 0.5, 1.0),
        {name: (0.0, INF) for name in ("theta", "rho", "time", "sensitivity")},
    ),
    training.CyclicIteration: (
        training.CyclicIteration([0.9], [1.0], [1.0]),
        {name: (JUST_BELOW_0, INF) for name in ("contraction", "noise_std", "shift")},
    ),
    training.IteratedRelease: (training.IteratedRelease(0.5), {"mu": (JUST_BELOW_0,)}),  # inf is valid: no guarantee
}
# Records that the accountant makes for itself, from checked numbers.
INTERNAL = {Antipodal, EnclosingPair, DirectedLaw, JointlyConvex, LossLaw, OfMu, _WithTail}
# Valid only inside Shuffled: MORE_EXAMPLES has it there.
ONLY_SHUFFLED = {jaxdp.FiniteRandomizer}
NEEDS_AN_EXTRA = {"interop", "plot", "__main__"}


@jaxdp.record
class WithoutDomains(jaxdp.Mechanism):
    """A user's own record whose fields state no domain."""

    scale: object
    weights: object
    event_ndim = {"weights": 1}

    def log_mgf(self, z):
        return z * (z + 1) * self.scale * jnp.sum(self.weights)


MORE_EXAMPLES = [
    (jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, 3), 1000), {"num_users": (0.0,)}),
    (jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 1000, "closed_form"), {"num_users": (0.0,)}),
    (jaxdp.Shuffled(jaxdp.FiniteRandomizer([[0.6, 0.4], [0.3, 0.7]]), 1000), {"num_users": (0.0,)}),
    (WithoutDomains(0.1, [0.5, 0.5]), {"scale": (INF,), "weights": (INF,)}),
]
TABLE = [*EXAMPLES.values(), *MORE_EXAMPLES]
NAMES = [str(example).split("(")[0] for example, _ in TABLE]


def every_record():
    """All classes of records in the package, except those that need an extra."""
    for module in pkgutil.walk_packages(jaxdp.__path__, "jaxdp."):
        if not NEEDS_AN_EXTRA.intersection(module.name.split(".")):
            importlib.import_module(module.name)
    found, waiting = set(), [jaxdp.Mechanism]
    while waiting:
        children = waiting.pop().__subclasses__()
        waiting += children
        found |= {cls for cls in children if "__dataclass_fields__" in vars(cls) and cls.__module__[:6] == "jaxdp."}
    return {cls for cls in found if not NEEDS_AN_EXTRA.intersection(cls.__module__.split("."))}


def test_every_record_has_an_example_with_each_of_its_numbers():
    assert every_record() == set(EXAMPLES) | INTERNAL | ONLY_SHUFFLED
    for cls, (example, outside) in EXAMPLES.items():
        assert type(example) is cls
        numbers = {f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")}
        assert numbers - {"mechanism", "randomizer", "parts"} == set(outside)


def rows(example, outside):
    """(leaf, name, invalid number) for each number in the example, those of mechanisms inside it included."""
    for place, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(example)):
        name = path[-1].name
        own = outside[name] if len(path) == 1 else ()
        common = (number for number in ALWAYS_OUTSIDE if number != -0.5 or not isinstance(example, WithoutDomains))
        yield from ((place, name, number) for number in (*common, *own))


def replaced(example, place, number):
    """The example with a number in place of (the last entry of) one of its leaves."""
    leaves, tree = jax.tree_util.tree_flatten(example)
    leaves = [np.array(leaf, np.float64) for leaf in leaves]
    leaves[place][(-1,) * leaves[place].ndim] = number
    return jax.tree_util.tree_unflatten(tree, leaves)


def wrapped(mechanism, example):
    """(name, mechanism) alone and inside each record that accepts ``example``, a valid mechanism of the same class."""
    wraps = {
        "alone": lambda m: m,
        "repeated": lambda m: jaxdp.repeat(m, 3),
        "composed": lambda m: jaxdp.compose(example, m),
        "sampled": lambda m: jaxdp.PoissonSampled(m, 0.25),
        "sampled, fixed size": lambda m: jaxdp.FixedSizeSampled(m, 0.25),
        "shuffled": lambda m: jaxdp.Shuffled(m, 1000),
    }
    for name, wrap in wraps.items():
        try:
            wrap(example).validate()
            wrap(example).directions(None)
        except jaxdp.UnsupportedMechanismError:
            continue
        yield name, wrap(mechanism)


def verbs(mechanism):
    """The answer of every verb, by its name."""
    return {
        "epsilon": jaxdp.epsilon(mechanism, 1e-5),
        "delta": jaxdp.delta(mechanism, 0.5),
        "epsilon_bounds": jaxdp.epsilon_bounds(mechanism, 1e-5),
        "delta_bounds": jaxdp.delta_bounds(mechanism, 0.5),
        "renyi": jaxdp.renyi(mechanism, 3.0),
        "log_mgf": jaxdp.log_mgf(mechanism, 0.5 + 1j),
    }


VACUOUS = {
    "epsilon": INF,
    "delta": 1.0,
    "epsilon_bounds": jaxdp.Bounds(0.0, INF),
    "delta_bounds": jaxdp.Bounds(0.0, 1.0),
    "renyi": INF,
    "log_mgf": complex(INF, 0.0),
}


def assert_vacuous(answers, which):
    for verb, expected in VACUOUS.items():
        for got, side in zip(*map(jax.tree_util.tree_leaves, (answers[verb], expected)), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[which], side, err_msg=verb)


@pytest.mark.parametrize("example, outside", TABLE, ids=NAMES)
def test_a_concrete_number_outside_its_domain_is_refused_by_name(example, outside):
    for place, name, number in rows(example, outside):
        for _, broken in wrapped(replaced(example, place, number), example):
            for verb, target in (("epsilon", 1e-5), ("delta", 0.5), ("epsilon_bounds", 1e-5), ("delta_bounds", 0.5)):
                with pytest.raises(ValueError, match=name):
                    getattr(jaxdp, verb)(broken, target)
            for verb in ("renyi", "log_mgf"):
                with pytest.raises(ValueError, match=name):
                    getattr(jaxdp, verb)(broken, 3.0)


def sum_of_rows(params):
    """A number per row that depends on all of its parameters, between 0.4 and 0.6; NaN where one is not finite."""
    flat = [jnp.reshape(leaf, (jnp.shape(leaf)[0], -1)) for leaf in jax.tree_util.tree_leaves(params)]
    total = sum(jnp.sum(leaf, axis=1) for leaf in flat)
    return 0.5 + 0.1 * jnp.tanh(total * 1e-6) + 0.0 * total


@pytest.fixture
def cheap_kernels(monkeypatch):
    """Kernels take seconds to compile: they are replaced by a number that depends on every parameter they would get."""

    class Cheap:
        @staticmethod
        def point(stacks, value, direction):
            return sum_of_rows(jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf)[None], stacks))[0]

    def evaluate(route, verb, target, shape):
        answer = jnp.broadcast_to(sum_of_rows(route.params), (int(np.prod(shape)),)).reshape(shape)
        return answer, answer

    monkeypatch.setattr(accounting, "_evaluate_traced", evaluate)
    monkeypatch.setattr(
        accounting, "traced_moment", lambda moment, direction: lambda s, v: moment.point(s, v, direction=direction)
    )
    monkeypatch.setattr(accounting, "renyi_kernel", Cheap)
    monkeypatch.setattr(accounting, "log_mgf_kernel", Cheap)


SIZE = 64  # rows of every traced call: one size, so that single operations compile once


def batch(example, outside):
    """The example in SIZE rows, the first of which have one number outside its domain each; how many have one."""
    broken = [replaced(example, place, number) for place, _, number in rows(example, outside)]
    assert len(broken) < SIZE
    valid = jax.tree_util.tree_map(lambda leaf: np.asarray(leaf, np.float64), example)
    filled = broken + [valid] * (SIZE - len(broken))
    return jax.tree_util.tree_map(lambda *leaves: jnp.asarray(np.stack(leaves)), *filled), len(broken)


@pytest.mark.parametrize("example, outside", TABLE, ids=NAMES)
@pytest.mark.thorough
def test_a_traced_number_outside_its_domain_is_vacuous_and_its_neighbours_keep_their_values(
    example, outside, cheap_kernels
):
    with jax.enable_x64(True):
        mechanisms, broken = batch(example, outside)
        answers = jax.vmap(lambda m: {name: verbs(one) for name, one in wrapped(m, example)})(mechanisms)
        valid = jax.tree_util.tree_map(lambda leaf: jnp.broadcast_to(leaf[-1:], leaf.shape), mechanisms)
        alone = jax.vmap(lambda m: {name: verbs(one) for name, one in wrapped(m, example)})(valid)
    assert {"alone", "repeated"} <= set(answers)
    for name, answer in answers.items():
        assert_vacuous(answer, slice(broken))
        for got, kept in zip(*map(jax.tree_util.tree_leaves, (answer, alone[name])), strict=True):
            np.testing.assert_array_equal(np.isfinite(got[broken:]), True)
            np.testing.assert_array_equal(got[broken:], kept[broken:])


@pytest.mark.parametrize("example, outside", TABLE, ids=NAMES)
def test_kernels_get_valid_numbers_only_and_derivatives_stop_at_invalid_ones(example, outside):
    def numbers(m):
        return sum(jnp.sum(leaf) for leaf in jax.tree_util.tree_leaves(confined(m)[0]))

    with jax.enable_x64(True):
        mechanisms, broken = batch(example, outside)
        inside, tests = jax.vmap(lambda m: confined(m))(mechanisms)
        slopes = jax.tree_util.tree_leaves(jax.vmap(jax.grad(numbers))(mechanisms))
    usable = np.logical_and.reduce([np.broadcast_to(test, SIZE) for test in tests if test is not True])
    np.testing.assert_array_equal(usable, np.arange(SIZE) >= broken)
    leaves = jax.tree_util.tree_leaves(inside)
    for row in (*range(broken), SIZE - 1):
        one = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(example), [np.asarray(x[row]) for x in leaves])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree_util.tree_leaves(one))
        if row >= broken or not isinstance(one, jaxdp.DiscretePair):  # masses that replace bad ones need not sum to 1
            one.validate()
    for slope in slopes:
        assert np.isfinite(slope).all()
        np.testing.assert_array_equal(slope[broken:], 1.0)


# What `cheap_kernels` does not test: one real kernel of each kind, with its derivatives.
# kind: (ten numbers, valid and invalid in turn, the function).
POSITIVE_OR_NOT = (1.0, NAN, 2.0, -INF, 3.0, -0.5, 4.0, 0.0, 5.0, 1e-310)
REAL = {
    "epsilon of a Gaussian": (POSITIVE_OR_NOT, lambda x: jaxdp.epsilon(jaxdp.Gaussian(x), 1e-5)),
    "delta of a Gaussian": (POSITIVE_OR_NOT, lambda x: jaxdp.delta(jaxdp.Gaussian(x), 1.0)),
    "epsilon of repeated Gaussians": (
        (1.0, 2.5, 2.0, -5.0, 3.0, NAN, 4.0, INF, 0.0, -0.5),
        lambda x: jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(2.0), x), 1e-5),
    ),
    "epsilon at a traced delta": (
        (1e-5, 2.0, 1e-3, NAN, 0.1, -0.5, 1e-9, JUST_ABOVE_1, 1.0, -INF),
        lambda x: jaxdp.epsilon(jaxdp.Gaussian(2.0), x),
    ),
    "Renyi of Laplace": (POSITIVE_OR_NOT, lambda x: jaxdp.renyi(jaxdp.Laplace(x), 3.0)),
    "K of Laplace": (POSITIVE_OR_NOT, lambda x: jnp.real(jaxdp.log_mgf(jaxdp.Laplace(x), 3.0))),
    "epsilon of Laplace": (POSITIVE_OR_NOT, lambda x: jaxdp.epsilon(jaxdp.Laplace(x), 1e-5)),
    "epsilon of an iteration": (
        (1.0, NAN, 0.5, -INF, 0.9, -0.5, 0.1, INF, 0.0, 1e-310),
        lambda x: jaxdp.epsilon(jaxdp.NoisyIteration(jnp.stack([x, x]), [1.0, 1.0], [1.0, 1.0]), 1e-5),
    ),
}
EXACT = {"epsilon of Laplace": lambda x: 1 / x + 2 * np.log1p(-1e-5)}  # the others are compared with the eager verb


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.thorough
def test_real_kernels_answer_the_neighbours_and_every_derivative_is_finite(kind):
    numbers, answer = REAL[kind]
    options = {**(backend.compiler_options("cpu") or {}), "xla_backend_optimization_level": 0}
    with jax.enable_x64(True):
        traced = jax.jit(jax.vmap(jax.value_and_grad(answer))).lower(np.array(numbers))
        values, slopes = map(np.asarray, traced.compile(compiler_options=options)(np.array(numbers)))
    np.testing.assert_array_equal(values[1::2], 1.0 if kind.startswith("delta") else INF)
    assert np.isfinite(slopes).all() and (slopes[1::2] == 0).all()
    truth = [EXACT.get(kind, answer)(number) for number in numbers[::2]]
    np.testing.assert_allclose(values[::2], truth, rtol=2e-6)  # a traced contour has a gap of 1e-6


@pytest.mark.thorough
def test_real_laws_of_shuffled_rounds_answer_the_neighbours():
    def renyi(x):
        return jaxdp.renyi(jaxdp.Shuffled(jaxdp.LocalRandomizer(x), 1000), 3.0)

    numbers = np.array([1.0, NAN, 2.0, -INF, 3.0, -0.5, 4.0, INF, 0.5, 1e-310])
    with jax.enable_x64(True):
        traced = jax.jit(jax.vmap(renyi), compiler_options=backend.compiler_options("cpu"))(numbers)
    np.testing.assert_array_equal(traced[1::2], INF)
    for got, number in zip(traced[::2], numbers[::2], strict=True):
        assert got == pytest.approx(renyi(number), rel=1e-2)  # the traced law has fewer points


TARGETS = {
    "epsilon": (1e-5, (NAN, -INF, -0.5, JUST_ABOVE_1, 2.0)),
    "epsilon_bounds": (1e-5, (NAN, -INF, -0.5, JUST_ABOVE_1, 2.0)),
    "delta": (0.5, (NAN,)),
    "delta_bounds": (0.5, (NAN,)),
    "renyi": (3.0, (NAN, -INF, -0.5, 1.0)),
    "log_mgf": (0.5 + 1j, (NAN, INF, -INF, complex(0, NAN), complex(0, INF))),
}


@pytest.mark.parametrize("verb", TARGETS)
def test_a_traced_target_outside_its_domain_is_vacuous(verb, cheap_kernels):
    valid, outside = TARGETS[verb]
    with jax.enable_x64(True):
        answers = jax.vmap(lambda t: getattr(jaxdp, verb)(jaxdp.Gaussian(1.5), t))(np.array([*outside, valid]))
    for got, side in zip(map(np.asarray, jax.tree_util.tree_leaves(answers)), np.ravel(VACUOUS[verb]), strict=True):
        np.testing.assert_array_equal(got[:-1], side)
        assert np.isfinite(got[-1])


def test_numbers_of_less_precision_and_whole_numbers_are_taken_as_they_are(cheap_kernels):
    """A compiled conversion would take a subnormal float32 for 0, although it is a normal float64."""
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.bfloat16):
            rates = jnp.asarray(np.array([1e-40, 0.0, 0.25]).astype(dtype))
            sampled = jax.vmap(lambda q: jaxdp.epsilon(jaxdp.PoissonSampled(jaxdp.Gaussian(1.5), q), 1e-5))(rates)
            np.testing.assert_array_equal(np.isfinite(sampled), [False, True, True])
        repeated = jax.vmap(lambda t: jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(1.5), t), 1e-5))(jnp.arange(-1, 2))
        np.testing.assert_array_equal(np.isfinite(repeated), [False, True, True])
        for wrong in (jnp.array([True]), jnp.array([1.0 + 0j])):
            with pytest.raises(TypeError, match="noise_multiplier"):
                jax.vmap(lambda x: jaxdp.epsilon(jaxdp.Gaussian(x), 1e-5))(wrong)


def test_a_concrete_number_beside_a_traced_one_stays_what_it_was():
    def check(x):
        once = confined(jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(x), 1000), 1))[0]
        assert type(once.times) is int and type(once.mechanism.num_users) is int
        return x

    with jax.enable_x64(True):
        jax.jit(check)(1.0)


def test_concrete_numbers_and_shapes_are_refused_beside_traced_ones():
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="sampling_probability must be in"):
            jax.vmap(lambda s: jaxdp.epsilon(jaxdp.PoissonSampled(jaxdp.Gaussian(s), 1.5), 1e-5))(jnp.ones(2))
        with pytest.raises(ValueError, match="same number of outcomes"):
            jax.vmap(lambda p: jaxdp.epsilon(jaxdp.DiscretePair(p, [0.5, 0.5]), 1e-5))(jnp.ones((2, 3)) / 3)
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="LocalRandomizer"):
            jax.vmap(lambda s: jaxdp.epsilon(jaxdp.Shuffled(jaxdp.Gaussian(s), 10), 1e-5))(jnp.ones(2))


@jaxdp.record
class WithChecks(jaxdp.Mechanism):
    """A user's own record with a domain and a check of its own."""

    scale: object = field(POSITIVE, remedy="Buy a larger one.")
    power: object = 1.0

    def log_mgf(self, z):
        return z * (z + 1) * self.scale**self.power

    def validate(self):
        super().validate()
        if self.scale > 100 * self.power:
            raise ValueError("scale is out of proportion.")


def test_a_users_domains_and_checks_are_asked_wherever_the_record_is(cheap_kernels):
    for wrap in (lambda m: m, lambda m: jaxdp.repeat(m, 2), lambda m: jaxdp.compose(jaxdp.Gaussian(1.0), m)):
        with pytest.raises(ValueError, match=r"scale must be finite and > 0, got -1.0. Buy a larger one."):
            jaxdp.renyi(wrap(WithChecks(-1.0)), 2.0)
        with pytest.raises(ValueError, match="power must be finite, got inf"):
            jaxdp.renyi(wrap(WithChecks(1.0, INF)), 2.0)
        with pytest.raises(ValueError, match="out of proportion"):
            jaxdp.renyi(wrap(WithChecks(101.0)), 2.0)
        with jax.enable_x64(True):
            traced = jax.vmap(lambda s, w=wrap: jaxdp.renyi(w(WithChecks(s)), 2.0))(np.array([101.0, -1.0]))
        np.testing.assert_array_equal(np.isfinite(traced), [True, False])
