"""Settings of DP-SGD that are functions of the step: optimizer, batches and accounting use the same values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import cli
from jaxdp.training import DPSGD, ClippedSum, NoisyProjectedSGD, StronglyConvexLoss, noise, settings

KEY = jax.random.key(11)
DELTA = 1e-5
# Relative difference that two routes to the same epsilon may have: the gap of the accountant.
GAP = 1e-6
PARAMS = jnp.zeros(100_000)
NOTHING = ClippedSum(PARAMS, jnp.int32(0))
# With 1e5 normal draws the sample deviation is off by 1% with probability below 1e-5.
SPREAD = 1e-2
# Upper bound of the relative excess of the noise in training over the stated noise.
LARGER = 2 * settings.SLACK
falling = optax.piecewise_constant_schedule(2.0, {10: 0.5})
rising = optax.piecewise_constant_schedule(0.125, {10: 2.0})


def make(**changes):
    return DPSGD(**({"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_probability": 0.25} | changes))


def step_of(sigma, rate):
    return jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate)


def test_the_accounting_composes_every_step_at_its_own_setting():
    sgd = make(noise_multiplier=falling, sampling_probability=rising)
    each = [step_of(float(falling(t)), float(rising(t))) for t in range(24)]
    for steps in (1, 10, 11, 24):
        np.testing.assert_allclose(
            jaxdp.epsilon(sgd.after(steps), DELTA), jaxdp.epsilon(jaxdp.compose(*each[:steps]), DELTA), rtol=GAP
        )
    assert jaxdp.epsilon(sgd.after(0), DELTA) == 0


def test_equal_settings_are_one_term_however_often_they_return():
    sgd = make(noise_multiplier=lambda t: jnp.where(t % 3 == 0, 1.0, 2.0))
    parts = sgd.after(1000).parts
    assert [(p.mechanism.mechanism.noise_multiplier, float(p.times)) for p in parts] == [(1.0, 334.0), (2.0, 666.0)]
    counts = np.array([[0, 1], [7, 1000]])
    many = jaxdp.epsilon(sgd.after(counts), DELTA)
    alone = [[jaxdp.epsilon(sgd.after(int(c)), DELTA) for c in row] for row in counts]
    np.testing.assert_allclose(many, alone, rtol=GAP)


def test_a_constant_written_as_a_function_is_accounted_as_the_constant():
    written = make(noise_multiplier=lambda t: 1.0, sampling_probability=lambda t: 0.25)
    assert written.after(50) == jaxdp.repeat(step_of(1.0, 0.25), 50)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_noise_clip_norm_and_divisor_follow_the_count_of_the_state(compiled):
    clip = optax.piecewise_constant_schedule(3.0, {10: 0.5})
    sgd = make(noise_multiplier=falling, clip_norm=clip, sampling_probability=rising, num_examples=40)
    tx = sgd.privatize(KEY)
    update = jax.jit(tx.update) if compiled else tx.update
    rows = jnp.zeros((2, 100_000)).at[:, 0].set(1e6)
    for count in (0, 9, 10, 11, 30):
        state = tx.init(PARAMS)._replace(count=jnp.int32(count))
        std = float(falling(count)) * float(clip(count))
        divisor = 40 * float(rising(count))
        nothing, _ = update(NOTHING, state, PARAMS)
        assert float(jnp.std(nothing)) * divisor == pytest.approx(std, rel=SPREAD)
        clipped, _ = update(rows, state, PARAMS)
        assert float((clipped - nothing)[0]) * divisor == pytest.approx(2 * float(clip(count)), rel=1e-4)


@pytest.mark.parametrize("multiplier", [0.7, lambda t: 0.7], ids=["number", "schedule"])
def test_noise_is_not_below_the_stated_and_hardly_above(multiplier):
    tx = make(noise_multiplier=multiplier, clip_norm=0.3).privatize(KEY)  # as float32, 0.21 is 3e-8 (relative) less
    state = tx.init(PARAMS)
    normal = noise.normal_like(noise.step_key(state, jax.random.key_impl(KEY)), PARAMS)
    ratio = np.asarray(tx.update(NOTHING, state, PARAMS)[0], np.float64) / (0.7 * 0.3 * np.asarray(normal, np.float64))
    assert 1.0 < ratio.min() and ratio.max() < 1 + LARGER


@pytest.mark.parametrize("compiled", [False, True])
def test_batches_have_the_scheduled_probability_and_never_more(compiled):
    sgd = make(sampling_probability=rising, num_examples=40_000)
    draw = lambda step: sgd.batch(step, KEY, size=40_000).mask.sum()  # noqa: E731
    draw = jax.jit(draw) if compiled else draw
    for step in (3, 9, 10, 25):
        rate = float(rising(step))
        assert abs(int(draw(jnp.int32(step))) - 40_000 * rate) < 5 * np.sqrt(40_000 * rate * (1 - rate))


@pytest.mark.parametrize(("rate", "everyone"), [(0.0, 0), (1.0, 5000), (np.nan, 0), (-0.5, 0), (1.5, 5000)])
def test_a_traced_probability_is_clipped_and_nan_samples_nobody(rate, everyone):
    draw = jax.jit(lambda q: jaxdp.training.poisson_batch(0, KEY, num_examples=5000, probability=q, size=5000).mask)
    assert int(draw(jnp.float32(rate)).sum()) == everyone


def test_a_traced_probability_draws_what_the_same_number_draws():
    sizes = {"num_examples": 1000, "size": 1000}
    for rate in (0.5, 0.1, 1e-3, 2.0**-31):
        number = float(np.float32(rate))
        traced = jax.jit(lambda q: jaxdp.training.poisson_batch(4, KEY, probability=q, **sizes))(jnp.float32(rate))
        given = jaxdp.training.poisson_batch(4, KEY, probability=number, **sizes)
        jax.tree.map(np.testing.assert_array_equal, traced, given)


def test_the_clipped_sum_clips_at_the_norm_of_its_step():
    sgd = make(clip_norm=lambda t: jnp.where(t < 5, 2.0, 0.5), sampling_probability=1.0)
    data = jnp.full((3, 4), 100.0)
    total = jax.jit(lambda t: sgd.clipped_sum(lambda p, x: jnp.vdot(p, x), jnp.zeros(4), data, t, KEY).total)
    assert float(jnp.linalg.norm(total(4))) == pytest.approx(6.0, rel=1e-4)
    assert float(jnp.linalg.norm(total(5))) == pytest.approx(1.5, rel=1e-4)


def test_the_learning_rate_may_be_a_schedule_too():
    sgd = make(noise_multiplier=falling)
    tx = sgd.optimizer(KEY, learning_rate=optax.linear_schedule(1.0, 0.0, 4))
    state = tx.init(PARAMS)._replace(count=jnp.int32(3))
    updates, _ = jax.jit(tx.update)(NOTHING, state, PARAMS)
    mean, _ = sgd.privatize(KEY).update(NOTHING, state, PARAMS)
    np.testing.assert_allclose(updates, -0.25 * mean, rtol=1e-6, atol=1e-6)  # float32 sums of four draws


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": lambda t: 1.0 - 0.01 * t}, r"noise_multiplier must be finite and > 0, got .* step 100\."),
        ({"noise_multiplier": lambda t: jnp.where(t == 7, jnp.nan, 1.0)}, "noise_multiplier must be .*nan.* step 7"),
        ({"clip_norm": lambda t: jnp.where(t == 7, -1.0, 1.0)}, "clip_norm must be .*-1.*step 7"),
        ({"sampling_probability": lambda t: 0.9 + 0.1 * t}, r"sampling_probability must be in \[0, 1\].*step 2"),
        ({"noise_multiplier": lambda t: jnp.ones(3)}, r"noise_multiplier must be .* one number, got shape \(3,\)"),
        ({"noise_multiplier": np.ones(3)}, r"noise_multiplier must be one number.* got .* shape \(3,\).* function"),
        ({"sampling": "allocation", "noise_multiplier": falling}, "must be numbers with sampling='allocation'"),
    ],
)
def test_a_schedule_that_leaves_its_range_is_named_with_the_step(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_schedule_that_jit_cannot_trace_is_one_sentence():
    with pytest.raises(TypeError, match=r"noise_multiplier must be a function .* Use jnp\.where in place of if"):
        make(noise_multiplier=lambda t: 1.0 if t < 10 else 2.0)
    with pytest.raises(TypeError, match="clip_norm must be real"):
        make(clip_norm=lambda t: t > -1)


@pytest.mark.parametrize("name", ["clip_norm", "noise_multiplier", "sampling_probability"])
def test_a_value_outside_beyond_the_checked_steps_is_an_error_in_after_and_nan_in_training(name):
    bad = -0.5 if name != "sampling_probability" else 1.5
    sgd = make(**{name: lambda t: jnp.where(t < 3000, 0.5, bad)})
    assert np.isfinite(jaxdp.epsilon(sgd.after(3000), DELTA))
    with pytest.raises(ValueError, match=f"{name} must be .* step 3000"):
        sgd.after(3001)
    tx = sgd.privatize(KEY)
    for count, leaks in ((2999, True), (3000, False)):
        state = tx.init(PARAMS)._replace(count=jnp.int32(count))
        assert bool(jnp.isfinite(jax.jit(tx.update)(NOTHING, state, PARAMS)[0]).all()) is leaks
        assert not leaks or bool(jnp.isfinite(tx.update(NOTHING, state, PARAMS)[0]).all())


def test_too_many_different_settings_and_too_many_steps_are_refused():
    sgd = make(noise_multiplier=lambda t: 1.0 + 0.001 * t)
    assert jaxdp.epsilon(sgd.after(8), DELTA) > 0
    with pytest.raises(ValueError, match=r"at most 128 different pairs of values in 129 steps, got 129\. Make"):
        sgd.after(129)
    with pytest.raises(ValueError, match=f"steps must be at most {2**24} with noise_multiplier a function"):
        make(noise_multiplier=falling).after(2**24 + 1)


def test_budget_and_calibration_take_schedules():
    sgd = make(noise_multiplier=falling, sampling_probability=0.02)
    steps = sgd.steps_within(1.0, DELTA, max_steps=5000)
    assert 10 < steps < 5000
    assert jaxdp.epsilon(sgd.after(steps), DELTA) <= 1.0 < jaxdp.epsilon(sgd.after(steps + 1), DELTA)
    more = sgd.calibrated(200, epsilon=0.5, delta=DELTA)
    assert 0.5 * (1 - 1e-4) <= jaxdp.epsilon(more.after(200), DELTA) <= 0.5
    assert float(more.noise_multiplier(0)) / float(more.noise_multiplier(50)) == pytest.approx(2.0)


def test_a_scheduled_run_costs_at_least_what_its_best_constant_costs_and_at_most_its_worst():
    sgd = make(noise_multiplier=falling, sampling_probability=0.02)
    best, worst = (dataclasses.replace(sgd, noise_multiplier=sigma) for sigma in (2.0, 1.0))
    low, middle, high = (jaxdp.epsilon(run.after(100), DELTA) for run in (best, sgd, worst))
    assert low < middle < high


def test_phases_compose_survive_json_and_are_accounted_on_the_command_line(tmp_path, capsys):
    first = make(noise_multiplier=2.0, sampling_probability=0.02)
    second = dataclasses.replace(first, noise_multiplier=falling, sampling_probability=0.01)
    plan = jaxdp.compose(first.after(300), second.after(200))
    each = jaxdp.compose(
        jaxdp.repeat(step_of(2.0, 0.02), 300),
        jaxdp.repeat(step_of(2.0, 0.01), 10),
        jaxdp.repeat(step_of(1.0, 0.01), 190),
    )
    epsilon = jaxdp.epsilon(plan, DELTA)
    np.testing.assert_allclose(epsilon, jaxdp.epsilon(each, DELTA), rtol=GAP)
    assert jaxdp.from_json(jaxdp.to_json(plan)) == plan
    file = tmp_path / "plan.json"
    file.write_text(jaxdp.to_json(plan))
    assert cli.main(["epsilon", "--from", str(file), "--delta", str(DELTA)]) == 0
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(epsilon, rel=1e-4)


def test_a_scheduled_projected_step_leaves_room_for_the_error_of_its_schedules_in_a_program():
    """A schedule in a compiled program may differ by `SLACK` from its value on the host, which is accounted for."""
    loss = StronglyConvexLoss(1.0, 2.0, 0.5)
    sgd = NoisyProjectedSGD(loss, lambda t: 0.3 + 0.0 * t, 0.7, batch_size=1, num_examples=4)
    tx, params, zero = sgd.optimizer(KEY), jnp.zeros(1000), jnp.zeros(1000)
    plain = NoisyProjectedSGD(loss, 1.0, 1.0, batch_size=1, num_examples=4).optimizer(KEY)
    moved, draws, far = (
        np.asarray(t.update(g, t.init(params), params)[0], float)
        for t, g in ((tx, zero), (plain, zero), (tx, zero + 1e3))
    )
    step, noise = np.mean(moved - far) / 1e3, np.median(moved / draws)
    accounted = sgd.iteration(1)
    worst = step * (1 - settings.SLACK), noise * (1 - settings.SLACK) ** 2
    assert step * (1 + 0.9 * settings.SLACK) <= accounted.shift[0] / 2
    assert worst[1] >= accounted.noise_std[0]
    assert 1 - worst[0] * 0.5 <= accounted.contraction[0] * (1 + 1e-7)
    assert accounted.contraction[0] < 1 - 0.3 * 0.5 + 1e-5 and noise < 0.3 * 0.7 * (1 + 1e-5)


def test_noise_reaches_as_far_as_deltas_do_and_is_none_that_a_user_draws(monkeypatch):
    """A float32 normal draw ends at 5.42 standard deviations; outputs beyond would reveal that a person took part."""
    key = jax.random.key(3)
    drawn = noise.normal_like(key, jnp.zeros(200_000))
    assert abs(drawn.std() - 1) < 0.01 and abs(drawn.mean()) < 0.01
    assert abs((drawn**4).mean() - 3) < 0.06
    few = noise.normal_like(key, jnp.zeros(4))
    for one in (
        jax.random.fold_in(key, 0),
        *jax.random.split(key, 4),
        *jax.random.split(jax.random.fold_in(key, 0), 4),
    ):
        assert not np.allclose(few, jax.random.normal(one, (4,)), atol=1e-3)
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: jnp.full(shape, 5.22, dtype))
    assert noise.normal_like(key, jnp.zeros(2))[0] > 10
