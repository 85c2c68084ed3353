"""DP-SGD and one-pass shuffled SGD: clipping, sampling, noise and the accounting that goes with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.training import DPSGD, ClippedSum, ShuffledSGD, batches, noise, poisson_batch

# A few float32 roundings of numbers of size one, and the 1e-5 by which clipped gradients are shorter than clip_norm.
CLIPPED = 3e-5
KEY, DATA_KEY = jax.random.key(1), jax.random.key(2)
X = jnp.asarray(np.random.default_rng(0).normal(size=(50, 3)), jnp.float32)
PARAMS = {"w": jnp.zeros((3,)), "b": jnp.zeros(())}
PER_EXAMPLE = jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), PARAMS)


def loss(params, x):
    return jnp.vdot(params["w"], x) + params["b"]


def make(**changes):
    return DPSGD(**({"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_probability": 0.2} | changes))


def test_the_sum_over_a_sample_is_that_of_its_clipped_gradients_whatever_the_microbatch():
    sgd = make(num_examples=50)
    batch = sgd.batch(4, DATA_KEY, size=50)
    rows = np.asarray(batch.indices)[np.asarray(batch.mask)]
    full = np.concatenate([np.asarray(X), np.ones((50, 1), np.float32)], axis=1)
    length = np.linalg.norm(full, axis=1, keepdims=True)
    expected = (full / np.maximum(length, 1.0))[rows].sum(0)
    for microbatch in (1, 7, 64):
        got = jax.jit(lambda m=microbatch: sgd.clipped_sum(loss, PARAMS, X, 4, DATA_KEY, microbatch=m))()
        np.testing.assert_allclose(got.total["w"], expected[:3], rtol=CLIPPED, atol=CLIPPED)
        np.testing.assert_allclose(got.total["b"], expected[3], rtol=CLIPPED)


def test_no_gradient_is_longer_than_the_clip_norm_even_when_its_square_overflows():
    huge = {"w": jnp.array([[1e30, 1e30, 0.0], [1e-30, 0.0, 0.0]]), "b": jnp.array([1e25, 0.0])}
    tx = make(noise_multiplier=1e-6).optimizer(KEY, learning_rate=1.0)
    updates, _ = tx.update(huge, tx.init(PARAMS), PARAMS)
    assert float(optax.tree.norm(updates)) == pytest.approx(1.0, rel=CLIPPED)
    assert float(optax.tree.norm(updates)) < 1.0 + 1e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_no_finite_gradient_is_too_large_to_be_clipped(compiled):
    """XLA multiplies by reciprocals and flushes those of numbers above 8.5e37 to 0, which could leave norms of 1e30."""
    for size in (1, 3, 1000):
        for clip_norm in (1e-6, 1.0, 1e3):
            rows = jnp.outer(
                jnp.array([1e-44, 1e-38, 1e-20, 1e19, 8e37, 9e37, 1e38, 3.4e38], jnp.float32), jnp.ones(size)
            )
            each = jax.vmap(lambda row, c=clip_norm: noise.clip_and_sum(row[None], jnp.ones(1, bool), c)[0])
            sums = np.asarray((jax.jit(each) if compiled else each)(rows), np.float64)
            norms = np.linalg.norm(sums, axis=1)
            assert (norms <= clip_norm).all() and (norms[3] > 0.9999 * clip_norm)
    x = X.at[0].set(1e38)
    given = make(sampling_probability=1.0).clipped_sum(lambda w, e: jnp.vdot(w, e), jnp.zeros(3), x, 0, DATA_KEY)
    others = make(sampling_probability=1.0).clipped_sum(lambda w, e: jnp.vdot(w, e), jnp.zeros(3), x[1:], 0, DATA_KEY)
    assert np.linalg.norm(given.total - others.total) <= 1 + CLIPPED


def test_a_batch_without_rows_adds_noise_alone():
    none = jax.tree.map(lambda p: jnp.zeros((0, *p.shape)), PARAMS)
    tx = make(noise_multiplier=1e-6).optimizer(KEY, learning_rate=1.0)
    updates, state = tx.update(none, tx.init(PARAMS), PARAMS)
    assert 0 < float(optax.tree.norm(updates)) < 1e-4 and int(state.nonfinite) == 0


@pytest.mark.parametrize("mask", [[1, 2, 0], [1.0, 1.0, 0.0], [True], True], ids=repr)
def test_masks_that_are_not_one_boolean_an_example_are_refused(mask):
    tx = make().optimizer(KEY, learning_rate=1.0)
    grads = jax.tree.map(lambda p: jnp.ones((3, *p.shape)), PARAMS)
    with pytest.raises(ValueError, match=r"mask must be \(3,\) booleans, one for each example"):
        tx.update(grads, tx.init(PARAMS), PARAMS, mask=jnp.asarray(mask))


def test_masked_and_broken_examples_contribute_nothing():
    grads = {"w": jnp.array([[0.5, 0.0, 0.0], [jnp.nan, 0.0, 0.0], [0.0, 0.5, jnp.inf]]), "b": jnp.zeros(3)}
    sgd = make(noise_multiplier=1e-6)
    tx = sgd.optimizer(KEY, learning_rate=1.0)
    mask = jnp.array([True, True, False])
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS, mask=mask)
    np.testing.assert_allclose(updates["w"], [-0.5, 0.0, 0.0], atol=CLIPPED)
    assert int(state.nonfinite) == 1 and int(state.count) == 1


def test_the_divisor_is_fixed_and_public():
    zero = ClippedSum(jax.tree.map(jnp.ones_like, PARAMS), jnp.int32(0))
    whole = make(noise_multiplier=1e-6).optimizer(KEY, learning_rate=0.5)
    mean = make(noise_multiplier=1e-6, num_examples=50).optimizer(KEY, learning_rate=0.5)
    a, _ = whole.update(zero, whole.init(PARAMS), PARAMS)
    b, _ = mean.update(zero, mean.init(PARAMS), PARAMS)
    np.testing.assert_allclose(a["w"], -0.5, rtol=CLIPPED)
    np.testing.assert_allclose(b["w"], -0.05, rtol=CLIPPED)


def test_the_noise_on_the_sum_is_the_multiplier_times_the_clip_norm():
    # 1e6 normal draws: the sample deviation misses by 0.5% with probability below 1e-11
    params = {"w": jnp.zeros(10**6)}
    tx = make(clip_norm=2.0, noise_multiplier=1.5).optimizer(KEY, learning_rate=1.0)
    updates, _ = tx.update(ClippedSum(params, jnp.int32(0)), tx.init(params), params)
    assert float(jnp.std(updates["w"])) == pytest.approx(3.0, rel=5e-3)


@pytest.mark.parametrize(
    ("clip_norm", "noise_multiplier"),
    [
        (np.int8(16), np.int8(16)),
        (jnp.int32(65536), jnp.int32(65536)),
        (1e-10, np.float16(1)),
        (1.0, jnp.bfloat16(1.3)),
    ],
)
def test_settings_that_are_scalars_of_few_bits_are_taken_for_the_numbers_they_are(clip_norm, noise_multiplier):
    """As int8 the product 16 * 16 wraps to 0: no noise, where a standard deviation of 256 is accounted for."""
    sgd = make(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
    shuffled = ShuffledSGD(clip_norm=clip_norm, noise_multiplier=noise_multiplier, num_examples=10)
    zeros, std = jnp.zeros(20_000), float(clip_norm) * float(noise_multiplier)
    for tx, grads in (
        (sgd.privatize(KEY), ClippedSum(zeros, jnp.int32(0))),
        (shuffled.optimizer(KEY, learning_rate=1.0), zeros),
    ):
        drawn = tx.update(grads, tx.init(zeros), zeros)[0]
        assert float(jnp.std(drawn / std)) == pytest.approx(1.0, abs=0.03)


def test_a_state_may_be_donated_and_the_key_remains():
    tx = make().optimizer(KEY, learning_rate=1.0)
    step = jax.jit(lambda state: tx.update(PER_EXAMPLE, state, PARAMS)[1], donate_argnums=0)
    assert int(step(tx.init(PARAMS)).count) == 1 and int(step(tx.init(PARAMS)).count) == 1


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_sum_and_state_may_both_be_donated():
    sgd = make(num_examples=50)
    tx = sgd.privatize(KEY)
    step = jax.jit(lambda total, state: tx.update(total, state, PARAMS), donate_argnums=(0, 1))
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = step(sgd.clipped_sum(loss, PARAMS, X, state.count, DATA_KEY), state)
    assert int(state.count) == 2


def test_any_optimizer_may_follow_the_private_gradient():
    tx = optax.chain(make(num_examples=50).privatize(KEY), optax.adam(0.1))

    def step(carry, t):
        params, state = carry
        grads = make(num_examples=50).clipped_sum(loss, params, X, t, DATA_KEY, microbatch=8)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(lambda: jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), jnp.arange(3)))()
    assert int(state[0].count) == 3 and bool(jnp.all(jnp.isfinite(params["w"])))


def test_a_mean_gradient_that_nobody_clipped_is_refused():
    tx = make().optimizer(KEY, learning_rate=1.0)
    with pytest.raises(ValueError, match="A mean gradient cannot be clipped per example"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    several = ClippedSum(jax.tree.map(lambda p: jnp.zeros((5, *p.shape)), PARAMS), jnp.int32(0))
    with pytest.raises(ValueError, match=r"grads.total must have the shapes of the parameters"):
        tx.update(several, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="per-example gradients with one leading axis"):
        tx.update({"w": jnp.zeros((4, 3)), "b": jnp.zeros(1)}, tx.init(PARAMS), PARAMS)
    shuffled = ShuffledSGD(clip_norm=1.0, noise_multiplier=1.0, num_examples=10).optimizer(KEY, learning_rate=1.0)
    with pytest.raises(ValueError, match="grads must have the shapes of the parameters"):
        shuffled.update(PER_EXAMPLE, shuffled.init(PARAMS), PARAMS)


@pytest.mark.parametrize("params", [PARAMS, jnp.zeros(3)], ids=["dict", "array"])
@pytest.mark.parametrize("rows", [None, (1,), (4,), ()], ids=["sum", "one row", "four rows", "mean"])
@pytest.mark.parametrize("skip", [None, optax.skip_not_finite], ids=["plain", "skipping"])
def test_multi_steps_around_the_private_optimizer_is_refused(params, rows, skip):
    tx = optax.MultiSteps(make().optimizer(KEY, learning_rate=1.0), 2, should_skip_update_fn=skip)
    state = tx.init(params)
    summed = ClippedSum(params, jnp.int32(0))
    grads = summed if rows is None else jax.tree.map(lambda p: jnp.zeros((*rows, *p.shape)), params)
    with pytest.raises(ValueError, match=r"ClippedSum"):
        tx.update(grads, state, params)


def test_multi_steps_after_the_private_gradient_gathers_noisy_gradients():
    private, gathered = make().privatize(KEY), optax.MultiSteps(optax.sgd(1.0), 2)
    state, after = private.init(PARAMS), gathered.init(PARAMS)
    total = jax.tree.map(jnp.zeros_like, PARAMS)
    for _ in range(2):
        noisy, state = private.update(ClippedSum(PARAMS, jnp.int32(0)), state, PARAMS)
        total = jax.tree.map(jnp.add, total, noisy)
        moved, after = gathered.update(noisy, after, PARAMS)
    jax.tree.map(lambda m, t: np.testing.assert_allclose(m, -t / 2, rtol=CLIPPED), moved, total)
    assert int(state.count) == 2  # both noisy gradients are accounted for


def test_poisson_samples_have_the_rate_that_is_accounted_for():
    # 4e6 coins: a deviation of 6 standard errors has probability 2e-9
    draw = jax.jit(jax.vmap(lambda t: poisson_batch(t, DATA_KEY, num_examples=1000, probability=0.05, size=200)))
    batch = draw(jnp.arange(4000))
    total = int(batch.mask.sum())
    assert abs(total - 200_000) < 6 * np.sqrt(4e6 * 0.05 * 0.95)
    counts = np.asarray(batch.mask.sum(1))
    assert counts.std() == pytest.approx(np.sqrt(1000 * 0.05 * 0.95), rel=0.1)
    assert not np.asarray(batch.overflow).any()
    first = np.asarray(batch.indices[0])[np.asarray(batch.mask[0])]
    assert np.unique(first).size == first.size and np.all(np.diff(first) > 0)


def test_a_traced_rate_of_few_bits_samples_no_more():
    for dtype in (jnp.float16, jnp.bfloat16):
        draw = jax.jit(lambda q: poisson_batch(0, KEY, num_examples=1000, probability=q, size=1000).mask.sum())
        assert 0 <= int(draw(dtype(0.01))) < 40 and int(draw(dtype(1.0))) == 1000


def test_a_sample_that_does_not_fit_says_so_and_a_larger_size_gives_the_same_sample():
    small = poisson_batch(3, DATA_KEY, num_examples=100, probability=0.5, size=10)
    large = poisson_batch(3, DATA_KEY, num_examples=100, probability=0.5, size=100)
    assert bool(small.overflow) and not bool(large.overflow)
    np.testing.assert_array_equal(small.indices, large.indices[:10])
    everyone = poisson_batch(0, DATA_KEY, num_examples=100, probability=1.0, size=100)
    nobody = poisson_batch(0, DATA_KEY, num_examples=100, probability=0.0, size=100)
    assert int(everyone.mask.sum()) == 100 and int(nobody.mask.sum()) == 0


def _noise_of_the_second_leaf(key, epoch, size):
    """The noise that `optimizer` adds to the second of two leaves, of this size, at update number ``epoch``."""
    sgd = ShuffledSGD(clip_norm=1.0, noise_multiplier=1.0, num_examples=size)
    params = [jnp.zeros(1), jnp.zeros(size)]
    tx = sgd.optimizer(key, learning_rate=1.0)
    state = tx.init(params)._replace(count=jnp.int32(epoch))
    return -np.asarray(tx.update(params, state, params)[0][1])


def _agreement(key, epoch, size):
    """Correlation between the order of the examples in an epoch and the ranks of noise drawn from the same key."""
    order = batches.reshuffled_batch(epoch, key, num_examples=size, batch_size=size, num_batches=1).indices
    return np.corrcoef(np.argsort(np.argsort(_noise_of_the_second_leaf(key, epoch, size))), np.argsort(order))[0, 1]


def test_an_order_and_noise_of_the_same_key_are_independent(monkeypatch):
    size, epochs = 100, range(20)
    together = [_agreement(KEY, epoch, size) for epoch in epochs]
    # correlations of random orders have standard deviation 1 / sqrt(size - 1); 4.5 of them in 20 trials: p = 1e-4
    assert np.max(np.abs(together)) < 4.5 / np.sqrt(size - 1)
    assert abs(np.mean(together)) < 4.5 / np.sqrt((size - 1) * len(epochs))
    monkeypatch.setattr(batches, "_sample_key", lambda key, epoch: jax.random.fold_in(_key_of_noise(key, epoch), 1))
    assert _agreement(KEY, 3, size) > 0.3  # with a shared key, one of the four draws that noise sums gives the order


def _key_of_noise(key, step):
    return jax.random.fold_in(jax.random.fold_in(key, step), noise._STREAM)


def _coins_of_the_noise_keys(key, step, count, probability):
    """Coins made of the noise keys, one for each of ``count`` leaves."""
    update = _key_of_noise(key, step)
    keys = jax.vmap(lambda leaf: jax.random.key_data(jax.random.fold_in(update, leaf)))(jnp.arange(count))
    return np.bitwise_xor.reduce(np.asarray(keys), axis=1) < np.uint32(probability * 2**32)


def test_a_sample_is_no_function_of_the_keys_of_the_noise(monkeypatch):
    count, probability = 400, 0.5

    def agreeing():
        batch = poisson_batch(7, KEY, num_examples=count, probability=probability, size=count)
        chosen = np.isin(np.arange(count), np.asarray(batch.indices)[np.asarray(batch.mask)])
        return np.mean(chosen == _coins_of_the_noise_keys(KEY, 7, count, probability))

    assert abs(agreeing() - 0.5) < 4.5 * 0.5 / np.sqrt(count)
    monkeypatch.setattr(batches, "_sample_key", _key_of_noise)
    assert agreeing() == 1.0


def test_the_accounting_is_that_of_the_sampled_gaussian():
    sgd = make(sampling_probability=0.01)
    # 1.8282366665165769 is exact for the float64 nearest to 0.01 as sampling probability (tests/data/accounting.json)
    curve = jaxdp.epsilon(sgd.after(np.array([0, 500, 1000])), 1e-5)
    assert curve.shape == (3,) and curve[0] == 0 < curve[1] < curve[2]
    assert 1.8282366665165769 <= curve[2] <= 1.8282366665165769 * (1 + 2e-6)


def test_the_budget_guard_and_the_calibration_end_on_the_safe_side():
    sgd = make(sampling_probability=0.01)
    steps = sgd.steps_within(1.8, 1e-5, max_steps=4000)
    assert jaxdp.epsilon(sgd.after(steps), 1e-5) <= 1.8 < jaxdp.epsilon(sgd.after(steps + 1), 1e-5)
    calibrated = sgd.calibrated(1000, epsilon=1.0, delta=1e-5)
    assert 0.999 <= jaxdp.epsilon(calibrated.after(1000), 1e-5) <= 1.0
    assert make(sampling_probability=0.0).steps_within(0.1, 1e-5) == np.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be"),
        ({"sampling_probability": 1.5}, "sampling_probability must be in"),
        ({"num_examples": 0}, "num_examples must be"),
    ],
)
def test_a_setting_outside_its_range_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="key must be"):
        make().optimizer(None, learning_rate=1.0)
    with pytest.raises(ValueError, match="num_examples must be given"):
        make().batch(0, DATA_KEY, size=3)
    with pytest.raises(ValueError, match="params must be given"):
        tx = make().optimizer(KEY, learning_rate=1.0)
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="steps must be"):
        make().after(-1)
    with pytest.raises(ValueError, match="data must have num_examples = 7 rows"):
        make(num_examples=7).clipped_sum(loss, PARAMS, X, 0, DATA_KEY)


SHUFFLED = ShuffledSGD(clip_norm=1.0, noise_multiplier=4.0, num_examples=20, local_delta=1e-10)


def test_arrays_of_unequal_lengths_are_refused():
    """JAX takes the last row for an index beyond the end: its record would be used again and again."""
    sgd = make(num_examples=50)
    for data in ((X, jnp.ones(20)), (X[:20], jnp.ones(50)), (), (X, jnp.zeros(()))):
        with pytest.raises(ValueError, match="num_examples = 50 rows in every array"):
            sgd.clipped_sum(lambda p, e: loss(p, e[0]) * e[1], PARAMS, data, 0, DATA_KEY)
    for data in ((X, jnp.ones(20)), (X[:0], jnp.ones(0)), (jnp.ones(()), jnp.ones(())), {}):
        with pytest.raises(ValueError, match="data must have equally many rows, at least one, in every array, got"):
            make().clipped_sum(lambda p, e: loss(p, e[0]) * e[1], PARAMS, data, 0, DATA_KEY)
    shuffled = ShuffledSGD(1.0, 8.0, 100)
    with pytest.raises(ValueError, match="num_examples = 100 rows in every array, got"):
        shuffled.gradient(lambda p, e: p * e, jnp.zeros(()), jnp.arange(4.0), 0, KEY)


def test_a_microbatch_is_one_whole_number_of_any_type():
    sums = [make().clipped_sum(loss, PARAMS, X, 0, DATA_KEY, microbatch=m).total for m in (8, 8.0, np.float32(8))]
    jax.tree.map(np.testing.assert_array_equal, *sums)
    for microbatch, said in ((64.5, "a whole number >= 1, got 64.5"), (0, "a whole number >= 1"), ([8], "one number")):
        with pytest.raises(ValueError, match=f"microbatch must be {said}"):
            make().clipped_sum(loss, PARAMS, X, 0, DATA_KEY, microbatch=microbatch)


@pytest.mark.parametrize("sgd", [make(), ShuffledSGD(1.0, 1.0, 10)], ids=["Poisson", "shuffled"])
def test_a_learning_rate_is_positive_and_may_be_traced(sgd):
    grads = ClippedSum(PARAMS, jnp.int32(0)) if isinstance(sgd, DPSGD) else PARAMS

    def updated(rate):
        tx = sgd.optimizer(KEY, learning_rate=rate)
        return tx.update(grads, tx.init(PARAMS), PARAMS)[0]["w"]

    np.testing.assert_allclose(jax.jit(updated)(0.5), updated(0.5), rtol=1e-6)
    with pytest.raises(ValueError, match="learning_rate must be finite and > 0"):
        updated(0.0)


def test_numpy_data_are_taken():
    sums = [make(num_examples=50).clipped_sum(loss, PARAMS, data, 0, DATA_KEY).total for data in (X, np.asarray(X))]
    jax.tree.map(np.testing.assert_array_equal, *sums)


def test_one_pass_visits_everyone_once_in_a_secret_order():
    order = [int(SHUFFLED.batch(t, DATA_KEY).indices[0]) for t in range(20)]
    np.testing.assert_array_equal(np.sort(order), np.arange(20))
    assert order != list(range(20))
    assert not bool(SHUFFLED.batch(20, DATA_KEY).mask[0])


def test_a_shuffled_step_clips_and_adds_its_noise():
    tx = SHUFFLED.optimizer(KEY, learning_rate=0.5)
    grads = SHUFFLED.gradient(loss, PARAMS, X[:20] * 1e3, 0, DATA_KEY)
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    pure, _ = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), tx.init(PARAMS), PARAMS)
    signal = jax.tree.map(lambda a, b: (b - a) / 0.5, updates, pure)
    assert float(optax.tree.norm(signal)) == pytest.approx(1.0, rel=1e-4)
    assert int(state.count) == 1


def test_more_than_one_pass_is_not_covered():
    with pytest.raises(ValueError, match="at most one pass = 20, got 21"):
        SHUFFLED.after(21)
    with pytest.raises(ValueError, match="local_delta must be in"):
        ShuffledSGD(clip_norm=1.0, noise_multiplier=1.0, num_examples=2, local_delta=0.0)


def test_shuffling_one_pass_beats_the_local_guarantee():
    sgd = ShuffledSGD(clip_norm=1.0, noise_multiplier=8.0, num_examples=100_000, local_delta=1e-13)
    local = jaxdp.epsilon(jaxdp.Gaussian(4.0), 1e-13)
    central = jaxdp.epsilon(sgd.after(), 1e-5)
    assert 0 < central < local / 5


def test_the_sum_of_another_step_is_refused():
    sgd = make(num_examples=50)
    tx = sgd.privatize(KEY)

    def updated(step, state):
        made = sgd.clipped_sum(loss, PARAMS, X[:50], step, DATA_KEY, microbatch=8)
        return tx.update(made, state, PARAMS)

    _, after_one = updated(0, tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"step 1, the state's count, got that of step 0: give state.count"):
        updated(0, after_one)
    jitted = jax.jit(updated)
    for step, finite in ((0, False), (1, True), (2, False)):
        noisy, _ = jitted(step, after_one)
        assert all(bool(jnp.isfinite(leaf).all()) == finite for leaf in jax.tree.leaves(noisy))
