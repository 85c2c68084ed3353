"""Errors name what the caller wrote: an argument of the function that was called, and what to do about it."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import conversions, convolution, diffusion, iteration, mixing, shuffle, training
from jaxdp.runtime.backend import compiler_options

MODULES = (shuffle, iteration, mixing, diffusion, convolution, conversions, training)
STATE = training.NoisyState(jnp.int32(5), jnp.zeros(2, jnp.uint32), jnp.int32(0))
LOSS = training.StronglyConvexLoss(1.0, 1.0, 0.1)

# A valid value for every argument of a public function, by its name.
VALID = {
    "allocation": [0.5, 0.5], "bands": 2, "base_delta": lambda e: np.exp(-np.abs(e)), "batch_size": 5,
    "bound": "clones",
    "central_delta": 1e-6, "central_epsilon": 0.5, "clip": False, "clip_norm": 1.0, "contraction": [0.9, 0.9],
    "cover": "points", "cut": 2.0,
    "data_steps": 10, "delta": 1e-6, "delta0": 1e-9, "deltas": [0.1, 0.05, 0.01], "diameter": 3.0, "dimension": 3,
    "distance": 1.0, "distances": [0.0, 1.0], "edge_losses": [-1.0, 0.0, 1.0], "eps0": 1.0, "epsilon": 1.0,
    "epsilons": [0.0, 0.5, 1.0], "exact": False, "factor": [0.9, 0.9], "false_negative_rate": 0.8,
    "false_positive_rate": 0.1, "feature_norm": 1.0, "first_scale": 1.0, "first_std": 1.0, "furthest": 3, "gamma": 0.5,
    "generalized_linear": False, "group_size": 2, "hidden": 0.5, "high": 10.0, "index": 2, "infinity_mass": 0.0,
    "initial_variance": 0.0, "k": 4, "kappa": lambda s: np.exp(-s), "kernel": [[0.6, 0.4], [0.4, 0.6]],
    "key": jax.random.key(0),
    "l2": 0.1, "lam": 0.1, "learning_rate": 0.5, "level": 0.5, "lipschitz": 1.0, "local_delta": 1e-9,
    "log_characteristic": np.exp, "log_p": np.exp, "log_q": np.exp, "loss": LOSS, "loss_cdf": 0.5, "low": -10.0,
    "lower": [0.1, 0.04, 0.01], "method": "cks", "mu": 1.0, "n": 100, "nodes": 64, "noise_multiplier": 1.0,
    "noise_std": 1.0, "norm": 1.0, "num_batches": 2, "num_bins": 4, "num_epochs": 2, "num_examples": 20,
    "num_steps": 4,
    "num_summands": 4, "order": 2.0, "orders": [2.0, 4.0], "p_mass": [0.5, 0.5], "probability": 0.2,
    "projection": np.abs, "published": False, "q_mass": [0.4, 0.6], "radius": 1.0, "randomizer": "generic", "rdp": 0.1,
    "relation": "remove", "remainder": "drop", "renyi": [0.1, 0.2], "renyi_first": np.maximum,
    "renyi_kernel": np.maximum, "reverse": np.exp, "reverse_loss_cdf": 0.4, "reverse_renyi": [0.1, 0.2], "rho": 1.0,
    "rounding": 0.0, "sampling": "poisson", "sampling_probability": 0.1, "scale": 2.0, "second_scale": 1.0,
    "second_std": 1.0, "sensitivity": 1.0, "shift": 1.0, "size": 20, "smoothness": 1.0, "state": STATE, "std": 1.0,
    "step": 3,
    "step_size": 0.5, "steps": 3, "strong_convexity": 0.1, "symmetric": True, "tail": (0.9, 1.0), "term": "sharp",
    "theta": 1.0, "time": 1.0, "times": 10, "truncated_batch_size": 5, "upper": [0.1, 0.05, 0.01], "x": 0.5,
}  # fmt: skip
# Values for functions in which a name means something else.
OTHERWISE = {
    ("DPSGD", "truncated_batch_size"): None,
    ("NoisyProjectedSGD", "order"): "cyclic", ("NoisyProjectedSGD", "radius"): None, ("cyclic_mu", "contraction"): 0.9,
    ("delta_from_tradeoff", "false_positive_rate"): [0.0, 0.5, 1.0], ("full_batch_mu", "contraction"): 0.9,
    ("delta_from_tradeoff", "false_negative_rate"): [1.0, 0.4, 0.0], ("levy_cdf", "step"): 0.1,
    ("levy_delta", "step"): 0.1, ("repeated_noise_bound", "renyi"): np.maximum,
}  # fmt: skip


def functions():
    """Public functions and records of the subject modules; named tuples, which are results, check nothing."""
    for module in MODULES:
        for name, value in sorted(vars(module).items()):
            public = not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__)
            result = isinstance(value, type) and issubclass(value, (tuple, Exception))
            if public and callable(value) and not result and value is not training.Checkpoints:
                yield pytest.param(value, id=f"{module.__name__.removeprefix('jaxdp.')}.{name}")


def arguments_of(function):
    names = inspect.signature(function).parameters
    return {name: OTHERWISE.get((function.__name__, name), VALID[name]) for name in names}


def message_of(function, arguments):
    """The message of the function's error for these arguments; None where it accepts them."""
    try:
        value = function(**arguments)
        if hasattr(value, "validate"):  # a record, which verbs validate
            value.validate()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def names_argument(message, name):
    """Whether the message, before ", got ", names the argument, with an index in it or in a list of names."""
    return re.search(rf"(^|[ ,.]){name}(\[\w+\])?( |,|:)", message.split(", got ")[0]) is not None


def numbers_of(function):
    """Names of the arguments that are numbers, lists of numbers or choices: not functions, flags, keys and states."""
    others = bool, jax.Array, training.NoisyState
    return [n for n, v in arguments_of(function).items() if not callable(v) and not isinstance(v, others)]


def bad_values():
    for function in functions():
        called = function.values[0]
        for name in numbers_of(called):
            whole = isinstance(arguments_of(called)[name], int)
            for bad in ("text", *([0.5, 10**400] if whole else [])):
                yield pytest.param(called, name, bad, id=f"{function.id}-{name}-{str(bad)[:4]}")


@pytest.mark.parametrize("function, name, bad", list(bad_values()))
def test_a_bad_value_is_answered_with_the_name_of_its_argument(function, name, bad):
    message = message_of(function, arguments_of(function) | {name: bad})
    assert message is not None and names_argument(message, name), message


def test_shapes_that_do_not_broadcast_are_named_by_arguments_of_the_function():
    """Where a function takes one number or one list, another message comes first; never one of NumPy or JAX."""
    named = 0
    for function in (each.values[0] for each in functions()):
        arguments = arguments_of(function)
        for number, name in enumerate(numbers_of(function)):
            if isinstance(value := arguments[name], (int, float, list)):
                arguments[name] = np.broadcast_to(np.asarray(value), (2 + number, *np.shape(value)))
        message = message_of(function, arguments)
        assert message is None or not re.search("mismatch|broadcast together|0-dimensional|incompatible", message)
        if message is not None and message.startswith("shapes do not broadcast: "):
            found = re.findall(r"(\S+) \(", message)
            assert len(found) >= 2 and set(found) <= set(arguments), (function, message)
            named += 1
    assert named >= 59


def test_every_valid_value_is_that_of_an_argument():
    names = {name for function in functions() for name in inspect.signature(function.values[0]).parameters}
    assert set(VALID) == names
    assert {(f, n) for f, n in OTHERWISE} <= {
        (function.values[0].__name__, n) for function in functions() for n in arguments_of(function.values[0])
    }


@pytest.mark.parametrize("sgd", [
    training.DPSGD(clip_norm=1.0, noise_multiplier=1.0, sampling_probability=0.1),
    training.NoisyProjectedSGD(loss=LOSS, learning_rate=0.5, noise_std=1.0, batch_size=5, num_examples=20),
    training.ShuffledSGD(clip_norm=1.0, noise_multiplier=4.0, num_examples=20),
], ids=lambda sgd: type(sgd).__name__)  # fmt: skip
def test_a_state_in_place_of_a_count_is_answered_with_the_count(sgd):
    rate = {} if isinstance(sgd, training.NoisyProjectedSGD) else {"learning_rate": 0.5}
    state = sgd.optimizer(jax.random.key(0), **rate).init(jnp.zeros(2))
    for given in (state, (state, ())):
        with pytest.raises(TypeError, match=r"steps must be .*, got the optimizer's state: pass state\.count"):
            sgd.after(given)


def test_a_whole_number_beyond_double_precision_is_one_sentence():
    with pytest.raises(ValueError, match=r"num_users must be at most 1\.8e308, got a whole number beyond that"):
        jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 10**400), 1e-6)
    with pytest.raises(ValueError, match=r"delta must be at most 1\.8e308"):
        jaxdp.epsilon(jaxdp.Gaussian(1.0), [0.1, 10**400])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxdp.epsilon(jaxdp.Gaussian(jaxdp.Gaussian(1.0)), 1e-6), TypeError, "noise_multiplier must be real"),
        (lambda: jaxdp.Gaussian([1, [2]]), ValueError, "noise_multiplier must be a rectangular array"),
        (lambda: jaxdp.epsilon(jaxdp.Gaussian(np.ma.array([1.0], mask=[1])), 1e-6), TypeError, "must be a plain array"),
        (lambda: jaxdp.calibrate(3, epsilon=1.0, delta=1e-6), TypeError, "make_mechanism must be a function"),
        (lambda: jaxdp.sweep(3, delta=1e-6), TypeError, "fn must be a function"),
        (lambda: jaxdp.epsilon(jaxdp.FiniteRandomizer([[0.6, 0.4], [0.4, 0.6]]), 1e-6), ValueError, "must be shuffled"),
        (lambda: jaxdp.epsilon(jaxdp.Gaussian(1.0), 1e-6, gap=np.array([0.1, 0.1])), ValueError, "got array"),
        (lambda: jaxdp.from_json('{"jaxdp": 1, "mechanism": {"class": "Repeated", "mechanism": [1, 2], "times": 3}}'),
         ValueError, 'mechanism must be an object with a "class"'),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_one_sentence(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_bad_value_of_an_array_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"noise_multiplier must be .*, got nan at index \[1, 0\]\."):
        jaxdp.epsilon(jaxdp.Gaussian([[1.0], [np.nan]]), 1e-6)
    with pytest.raises(ValueError, match=r"epsilons must be increasing.*, got 0\.5 at index \[2\]\."):
        jaxdp.conversions.gdp_mu_from_profile([0.0, 1.0, 0.5], [0.1, 0.01, 0.001])


def test_the_advice_to_round_is_given_for_fractions_alone():
    with pytest.raises(ValueError, match=r"whole number >= 1, got 31\.6227\d* at index \[1\]\. Round it\.$"):
        jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), np.logspace(1, 2, 3)), 1e-6)
    for bad in (0.5, np.nan, np.inf, -3.0, [2.5, -1.0]):
        with pytest.raises(ValueError, match=r"n must be a whole number >= 1, got [^ ]*( at index \[0\])?\.$"):
            shuffle.clones_epsilon_closed_form(1.0, bad, 1e-6)


def test_a_mechanism_that_is_no_randomizer_is_answered_with_the_record_for_it():
    with pytest.raises(jaxdp.UnsupportedMechanismError, match=r"got PureDP\. .* use LocalRandomizer\(epsilon, delta\)"):
        jaxdp.epsilon(jaxdp.Shuffled(jaxdp.PureDP(1.0), 100), 1e-6)


@pytest.mark.parametrize(
    ("mechanism", "remedy"),
    [
        ([jaxdp.Gaussian(1.0), jaxdp.Gaussian(2.0)], r"got list\. Compose several as jaxdp\.compose"),
        (jaxdp.Gaussian, r"got the class Gaussian\. Call it"),
        (jaxdp.PoissonSampled([jaxdp.Gaussian(1.0)], 0.1), r"got list\. Compose several"),
    ],
)
def test_what_is_no_mechanism_is_answered_with_what_to_write(mechanism, remedy):
    with pytest.raises(TypeError, match=remedy):
        jaxdp.epsilon(mechanism, 1e-6)


def test_sampling_inside_sampling_is_answered_with_the_product_of_the_probabilities():
    inner = jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.1)
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="multiply the probabilities"):
        jaxdp.epsilon(jaxdp.PoissonSampled(inner, 0.1), 1e-6)


def test_a_refused_end_of_a_bracket_is_named():
    with pytest.raises(ValueError, match=r"an end of bracket was refused: noise_multiplier must be .* got 0\.0"):
        jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-5, bracket=(0.0, 10.0))


@pytest.mark.parametrize("bad", [np.nan, -1.0])
@pytest.mark.parametrize(
    "bound",
    [
        lambda bad: convolution.laplace_rdp(2.0, bad, 1.0),
        lambda bad: convolution.laplace_rdp(2.0, 1.0, bad),
        lambda bad: convolution.laplace_bound(2.0, bad, 1.0, 4.0),
        lambda bad: convolution.gaussian_bound(2.0, bad, 1.0, 4.0),
        lambda bad: convolution.gaussian_bound(2.0, 1.0, bad, 4.0),
        lambda bad: convolution.discrete_laplace_bound(2.0, bad, 1.0, 4.0),
        lambda bad: convolution.discrete_laplace_bound(2.0, 1.0, bad, 4.0),
        lambda bad: mixing.dobrushin_amplification(bad, 1e-6, 0.5).epsilon,
        lambda bad: mixing.hockey_stick_amplification(bad, 1e-6, 0.5, 20.0).epsilon,
        lambda bad: mixing.hockey_stick_amplification(1.0, bad, 0.5, 20.0).epsilon,
        lambda bad: conversions.optimal_epsilon_from_rdp([2.0, 4.0], [0.1, 0.2], 1e-5, infinity_mass=bad),
        lambda bad: -jnp.log1p(-conversions.optimal_delta_from_rdp([2.0, 4.0], [0.1, 0.2], 1.0, infinity_mass=bad)),
        lambda bad: 1 / shuffle.lower_bound_epsilon(bad, 100.0, 1e-6),
        lambda bad: conversions.epsilon_from_rdp([2.0, 4.0], [0.1, 0.2], 1e-5, infinity_mass=bad),
        lambda bad: -jnp.log1p(-conversions.delta_from_rdp([2.0, 4.0], [0.1, 0.2], 1.0, infinity_mass=bad)),
        lambda bad: 1 / conversions.tradeoff_from_rdp([2.0, 4.0], [0.1, 0.2], bad),
        lambda bad: 1 / conversions.tradeoff_from_delta(bad, [0.0, 1.0], [0.2, 0.1]),
        lambda bad: iteration.full_batch_mu(0.9, 1.0, bad, 4.0),
        lambda bad: iteration.cyclic_mu(0.9, 1.0, bad, 2.0, 2.0),
        lambda bad: iteration.shifted_rdp_path(bad, contraction=0.9, noise_std=1.0, distance=1.0, num_steps=4.0),
        lambda bad: iteration.shifted_rdp_optimum(2.0, contraction=0.9, noise_std=1.0, distance=bad, num_steps=4.0),
    ],
)
def test_a_traced_number_out_of_range_gives_the_vacuous_bound(bound, bad):
    with jax.enable_x64(True):
        assert jax.jit(bound, compiler_options=compiler_options("cpu"))(bad) == np.inf


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: shuffle.erlingsson_2019(x, 1000, 1e-6), "eps0"),
        (lambda x: shuffle.num_users_for(0.5, x, 1e-6), "eps0"),
        (lambda x: shuffle.approximate_ldp(0.2, x, 1.0, 1e-12, 1000), "central_delta"),
        (lambda x: convolution.laplace_sum_rdp(2.0, x, 1.0, 3), "shift"),
        (lambda x: mixing.pure_local_epsilon(x), "gamma"),
        (lambda x: diffusion.calibrate_ornstein_uhlenbeck(x, 1.0, 1.0, 3), "rdp"),
    ],
)
def test_a_function_of_the_host_says_that_it_cannot_be_traced(function, name):
    for x64 in (True, False):
        with jax.enable_x64(x64), pytest.raises(TypeError, match=f"^{name} must be concrete, got a traced array"):
            jax.jit(function)(0.5)
