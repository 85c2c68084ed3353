"""Batches by random allocation and their accounting, rounds of banded noise, and the privacy spent so far."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp import training
from jaxdp.runtime import precision
from jaxdp.training import DPSGD, balls_in_bins_batch, band_rounds, bin_overflow_chance

KEY = jax.random.key(3)


def epoch(number, num_bins, num_examples, size):
    steps = range(number * num_bins, (number + 1) * num_bins)
    return [balls_in_bins_batch(t, KEY, num_examples=num_examples, num_bins=num_bins, size=size) for t in steps]


def test_every_example_is_in_one_bin_of_each_epoch_and_epochs_differ():
    drawn = []
    for number in range(2):
        bins = [np.asarray(b.indices)[np.asarray(b.mask)] for b in epoch(number, 7, 100, 40)]
        assert sorted(np.concatenate(bins)) == list(range(100))
        drawn.append([tuple(b) for b in bins])
    assert drawn[0] != drawn[1]


def test_bins_are_uniform_at_a_significance_of_one_in_a_million():
    sizes = sum(np.array([int(b.mask.sum()) for b in epoch(number, 5, 20_000, 6000)]) for number in range(3))
    assert stats.chisquare(sizes).pvalue > 1e-6


def test_a_bin_that_does_not_fit_is_an_error_with_the_size_that_does_and_a_flag_under_a_trace():
    with pytest.raises(ValueError, match=r"size must be at least \d+ for this epoch.*chance") as error:
        epoch(0, 4, 100, 20)
    fits = int(str(error.value).split("at least ")[1].split()[0])
    batches = epoch(0, 4, 100, fits)
    assert max(int(b.mask.sum()) for b in batches) == fits
    traced = jax.jit(lambda t: balls_in_bins_batch(t, KEY, num_examples=100, num_bins=4, size=20).overflow)
    assert any(bool(traced(jnp.int32(t))) for t in range(4))
    sizes = {"num_examples": 100, "num_bins": 4, "size": 1}
    assert bool(jax.jit(lambda: balls_in_bins_batch(0, KEY, **sizes).overflow)()), "in a program of constants too"
    inside = jax.jit(lambda t: balls_in_bins_batch(t, KEY, num_examples=100, num_bins=4, size=fits).indices)
    assert (np.asarray(inside(jnp.int32(2))) == np.asarray(batches[2].indices)).all()


SIZES = {"num_examples": 10, "batch_size": 5, "num_batches": 2, "num_bins": 2, "size": 8}


@pytest.mark.parametrize(
    ("draw", "names"),
    [
        (lambda **sizes: training.cyclic_batch(1, **sizes), ("num_examples", "batch_size", "num_batches")),
        (lambda **sizes: training.reshuffled_batch(1, KEY, **sizes), ("num_examples", "batch_size", "num_batches")),
        (lambda **sizes: training.poisson_batch(1, KEY, probability=0.5, **sizes), ("num_examples", "size")),
        (lambda **sizes: training.truncated_poisson_batch(1, KEY, probability=0.5, **sizes), ("num_examples", "size")),
        (lambda **sizes: balls_in_bins_batch(1, KEY, **sizes), ("num_examples", "num_bins", "size")),
    ],
)
def test_sizes_are_whole_numbers_of_any_type(draw, names):
    sizes = {name: SIZES[name] for name in names}
    expected, got = draw(**sizes), draw(**{name: float(size) for name, size in sizes.items()})
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert got.indices.dtype == np.int32
    for name in names:
        with pytest.raises(ValueError, match=f"{name} must be one number, got an array"):
            draw(**sizes | {name: [SIZES[name]]})


def test_more_bins_than_are_drawn_uniformly_are_refused():
    with pytest.raises(ValueError, match="num_bins must be at most 65536, got 65537"):
        balls_in_bins_batch(0, KEY, num_examples=10, num_bins=2**16 + 1, size=10)
    assert balls_in_bins_batch(0, KEY, num_examples=10, num_bins=2**16, size=10).indices.shape == (10,)


@pytest.mark.parametrize(("n", "bins", "size"), [(100, 4, 40), (1000, 10, 130), (50, 2, 49), (10, 3, 10), (10, 3, 2)])
def test_the_chance_of_an_overflow_is_not_below_the_union_of_exact_tails(n, bins, size):
    exact = stats.binom.sf(size, n, 1 / bins)
    assert exact <= bin_overflow_chance(n, bins, size) <= 1
    assert bin_overflow_chance(n, bins, n) == 0


def test_allocation_is_accounted_by_epochs_begun():
    sgd = DPSGD(1.0, 1.0, 1 / 100, num_examples=5000, sampling="allocation")
    assert sgd.steps_per_epoch == 100
    one = jaxdp.RandomAllocation(jaxdp.Gaussian(1.0), 100)
    for steps, epochs in ((0, 0), (1, 1), (100, 1), (101, 2)):
        assert sgd.after(steps) == jaxdp.repeat(one, epochs)
    # exact to the digits given: one of KNOWN in test_allocation.py
    np.testing.assert_allclose(jaxdp.epsilon(sgd.after(100), 1e-6, relation="remove"), 0.857985977, rtol=1e-6)


def test_a_clipped_sum_over_an_allocated_epoch_holds_every_example_once():
    sgd = DPSGD(1e3, 1.0, 1 / 5, num_examples=64, sampling="allocation")
    data = jnp.arange(64.0)
    sums = [sgd.clipped_sum(lambda p, x: p * x, jnp.float32(1.0), data, t, KEY, microbatch=8).total for t in range(5)]
    assert float(sum(sums)) == pytest.approx(64 * 63 / 2)


def test_privacy_spent_is_that_of_the_count():
    sgd = DPSGD(1.0, 1.0, 0.01, num_examples=100)
    state = sgd.privatize(KEY).init(jnp.zeros(2))
    assert sgd.privacy_spent(state, 1e-5) == 0.0
    counted = []
    for count in (10, 20, 30):
        after = state._replace(count=jnp.int32(count))
        assert sgd.privacy_spent(after, 1e-5) == jaxdp.epsilon(sgd.after(count), 1e-5)
        counted.append(sgd.privacy_spent(after, 1e-5))
    assert counted == sorted(counted) and counted[0] > 0


def test_privacy_spent_finds_the_state_in_that_of_a_chain():
    sgd = DPSGD(1.0, 1.0, 0.01, num_examples=100)
    state = optax.chain(sgd.privatize(KEY), optax.adam(1e-3)).init(jnp.zeros(2))
    at_ten = (state[0]._replace(count=jnp.int32(10)), *state[1:])
    assert sgd.privacy_spent(at_ten, 1e-5) == sgd.privacy_spent(at_ten[0], 1e-5) > 0
    for wrong, found in ((optax.adam(1e-3).init(jnp.zeros(2)), "none"), ((state, state), "2"), (10, "none")):
        with pytest.raises(TypeError, match=f"state must hold one NoisyState, got {found}"):
            sgd.privacy_spent(wrong, 1e-5)


@pytest.mark.parametrize(("rate", "steps"), [(0.01, 0), (0.0, 10)])
def test_what_releases_nothing_needs_no_other_noise(rate, steps):
    sgd = DPSGD(1.0, 1.0, rate)
    assert sgd.calibrated(steps, epsilon=1.0, delta=1e-5) is sgd
    with pytest.raises(ValueError, match="epsilon must be finite and >= 0, got inf"):
        sgd.calibrated(steps, epsilon=np.inf, delta=1e-5)


@pytest.fixture(scope="module")
def compiled():
    """A list that gets an entry for every program that JAX compiles."""
    names = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: names.append(name) if "backend_compile" in name else None
    )
    return names


@pytest.mark.parametrize(
    "noise", [1.0, lambda t: jnp.where(t < 1500, 2.0, 1.0)], ids=["one number", "a function of the step"]
)
def test_privacy_spent_at_a_new_count_traces_and_compiles_nothing(compiled, noise):
    sgd = DPSGD(1.0, noise, 0.01, num_examples=100)
    state = sgd.privatize(KEY).init(jnp.zeros(2))
    programs = lambda: (len(compiled), sum(kernel.traces for kernel in precision.all_kernels))  # noqa: E731
    sgd.privacy_spent(state._replace(count=jnp.int32(700)), 1e-5)
    before = programs()
    spent = [sgd.privacy_spent(state._replace(count=jnp.int32(t)), 1e-5) for t in (1, 30, 1000, 1400, 1600, 20_000)]
    assert programs() == before and spent == sorted(spent)
    jax.jit(lambda x: x + spent[0])(1.0)
    assert len(compiled) == before[0] + 1, "a compilation would have been noticed"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampling": "shuffled"}, "sampling must be 'poisson', .* or 'allocation', got 'shuffled'.*only lower bounds"),
        ({"sampling": "allocation", "sampling_probability": 0.3}, "sampling_probability must be 1 / "),
        ({"sampling": "allocation", "sampling_probability": 1e-5}, "at most 65536"),
        ({"sampling": "allocation", "sampling_probability": 0.0}, "sampling_probability must be 1 / "),
    ],
)
def test_sampling_that_cannot_be_accounted_for_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        DPSGD(**{"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_probability": 0.1, **given})
    with pytest.raises(ValueError, match="steps_per_epoch needs"):
        _ = DPSGD(1.0, 1.0, 0.1).steps_per_epoch


def test_banded_noise_is_accounted_by_rounds():
    assert [band_rounds(t, b) for t, b in ((0, 3), (1, 3), (9, 3), (10, 3), (10, 1))] == [0, 1, 3, 4, 10]
    for bad in ((-1, 2), (5, 0), (5, 1.5)):
        with pytest.raises((ValueError, TypeError), match="num_steps|bands"):
            band_rounds(*bad)
    assert training.band_rounds is band_rounds
