"""The mu and epsilon that the training plug-in reports: printed tables, other routes, exact lower limits."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.iteration import gdp_mu
from jaxdp.iteration.isotonic import allocation
from jaxdp.training import IteratedRelease, NoisyProjectedSGD, StronglyConvexLoss, float32_rounding, projected, settings

DELTA = 1e-5
# Relative: the closed form against the step-by-step allocation, each rounded outward by about 1e-11.
ROUTES = 1e-9
# Absolute: the table of reference runs, in notebooks/training.ipynb, prints two decimals.
TABLE = 6e-3


def logistic(l2=0.02):
    return StronglyConvexLoss.logistic_regression(feature_norm=1.0, l2=l2)


def make(**changes):
    settings = {"loss": logistic(), "learning_rate": 1.0, "noise_std": 0.05, "batch_size": 5, "num_examples": 20}
    return NoisyProjectedSGD(**(settings | changes))


def test_counts_are_whole_numbers_of_any_type():
    counts = {"batch_size": 5.0, "num_examples": np.float32(20), "data_steps": np.int8(8)}
    assert repr(make(**counts)) == repr(make(data_steps=8)) and isinstance(make(**counts).data_steps, int)
    for name in counts:
        with pytest.raises(ValueError, match=f"{name} must be one number, got an array"):
            make(**{name: [5]})


def decay(t):
    return 1.0 / (1.0 + 0.05 * t)


@pytest.mark.parametrize(
    ("l2", "rate", "noise", "batch", "n", "epochs", "worst", "first", "composition"),
    [
        (0.02, 1.0, 0.05, 65, 455, 5, 3.16, 1.90, 6.36),
        (0.02, 2.0, 0.05, 65, 455, 100, 3.49, 2.18, 44.42),
        (0.01, 2.0, 0.02, 143, 1437, 10, 3.79, 2.24, 11.32),
        (0.005, 4.0, 0.02, 359, 1437, 200, 3.04, 2.78, 23.88),
    ],
)
def test_reference_runs_give_the_printed_epsilons(l2, rate, noise, batch, n, epochs, worst, first, composition):
    sgd = make(loss=logistic(l2), learning_rate=rate, noise_std=noise, batch_size=batch, num_examples=n)
    steps = epochs * sgd.num_batches
    assert jaxdp.epsilon(sgd.after(steps), DELTA) == pytest.approx(worst, abs=TABLE)
    assert jaxdp.epsilon(sgd.after(steps, example=0), DELTA) == pytest.approx(first, abs=TABLE)
    every_step = jaxdp.Gaussian(noise * batch / 2 / np.sqrt(epochs))
    assert jaxdp.epsilon(every_step, DELTA) == pytest.approx(composition, abs=TABLE)


def test_ten_noise_only_steps_hide_the_last_batch():
    sgd = make(noise_std=0.1, batch_size=15, num_examples=1437, data_steps=95)
    assert jaxdp.epsilon(sgd.after(95), DELTA) == pytest.approx(6.13, abs=TABLE)
    assert jaxdp.epsilon(sgd.after(105), DELTA) == pytest.approx(1.39, abs=TABLE)
    assert jaxdp.epsilon(dataclasses.replace(sgd, data_steps=None).after(105), DELTA) > 6


@pytest.mark.parametrize("learning_rate", [1.0, 2 / 0.27, 1e-3, decay])
@pytest.mark.parametrize("loss", [logistic(), logistic(0.0), StronglyConvexLoss(1.0, 1.0, 1.0)])
def test_every_slot_agrees_with_the_step_by_step_allocation(learning_rate, loss):
    if not callable(learning_rate):
        learning_rate = min(learning_rate, 2 / loss.smoothness)
    for steps, data_steps in itertools.product((5, 23), (None, 7)):
        sgd = make(loss=loss, learning_rate=learning_rate, data_steps=data_steps)
        quick = sgd.after(steps, example=np.arange(0, 20, 5)).mu
        each = [sgd.iteration(steps, example=e) for e in range(0, 20, 5)]
        slow = np.sqrt(allocation(*(np.stack(rows) for rows in zip(*map(jax.tree.leaves, each), strict=True))))
        np.testing.assert_allclose(quick, slow, rtol=ROUTES, atol=1e-140)


def test_a_constant_schedule_written_as_a_function_costs_a_little_more_for_its_rounding():
    constant, written = make(), make(learning_rate=lambda t: 1.0 + 0.0 * t)
    plain, scheduled = (sgd.after(50, example=np.arange(20)).mu for sgd in (constant, written))
    assert np.all((scheduled > plain) & (scheduled < plain * (1 + 3 * settings.SLACK)))


@pytest.mark.parametrize("learning_rate", [1.0, decay])
@pytest.mark.parametrize("steps", [6, 8])
def test_the_reshuffled_bound_covers_every_order(learning_rate, steps):
    sgd = make(learning_rate=learning_rate, order="reshuffled")
    bound = float(sgd.after(steps).mu)
    rows = make(learning_rate=learning_rate).iteration(steps, 0)
    rate = np.array([decay(t) for t in range(steps)]) if callable(learning_rate) else np.ones(steps)
    places = [np.isin(np.arange(steps), [first, 4 + second]) for first in range(4) for second in range(4)]
    shift = np.where(places, 2 * rate / 5, 0.0)
    contraction, noise_std = (np.broadcast_to(a, shift.shape) for a in (rows.contraction, rows.noise_std))
    largest = np.sqrt(allocation(contraction, noise_std, shift).max())
    assert largest <= bound * (1 + ROUTES)
    assert bound <= largest * 1.2
    assert float(sgd.after(steps, example=3).mu) == bound


def test_reshuffling_costs_at_least_as_much_as_the_fixed_order():
    for steps in (1, 4, 5, 7, 40):
        assert make(order="reshuffled").after(steps).mu >= make().after(steps).mu * (1 - ROUTES)


def quadratic_mu(kappa, shift, std):
    """Exact mu of the last iterate for the worst quadratic loss: difference of the means / standard deviation.

    kappa: contraction of a step. shift, std: for each step how far the means move apart, and the noise.
    """
    mean, variance = 0.0, 0.0
    for d, s in zip(shift, std, strict=True):
        mean, variance = kappa * mean + d, kappa**2 * variance + s**2
    return mean / np.sqrt(variance)


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_full_batch_reports_exactly_what_a_quadratic_loss_leaks(steps):
    sgd = make(batch_size=20, loss=StronglyConvexLoss(1.0, 1.0, 1.0), learning_rate=0.25)
    exact = quadratic_mu(0.75, np.full(steps, 0.025), np.full(steps, 0.0125))
    assert exact <= float(sgd.after(steps).mu) <= exact * (1 + ROUTES)


def test_mini_batches_never_report_less_than_a_quadratic_loss_leaks():
    sgd = make(loss=StronglyConvexLoss(1.0, 1.0, 1.0), learning_rate=0.25)
    for steps, slot in itertools.product((4, 9, 30), range(4)):
        shift = np.where(np.arange(steps) % 4 == slot, 0.1, 0.0)
        exact = quadratic_mu(0.75, shift, np.full(steps, 0.0125))
        assert float(sgd.after(steps, example=5 * slot).mu) >= exact


def test_one_number_for_each_of_a_hundred_thousand_people():
    sgd = make(batch_size=100, num_examples=100_000)
    people = sgd.after(250_000, example=jnp.arange(100_000))
    assert people.mu.shape == (100_000,) and people.mu.dtype == np.float64
    assert people.mu.max() == sgd.after(250_000).mu
    assert np.unique(people.mu).size <= 1000


def test_dropped_examples_lose_nothing_and_short_batches_lengthen_the_epoch():
    drop, short = make(num_examples=23), make(num_examples=23, remainder="short")
    assert (drop.num_batches, short.num_batches) == (4, 5)
    assert jaxdp.epsilon(drop.after(40, example=22), DELTA) == 0
    assert jaxdp.epsilon(short.after(40, example=22), DELTA) > 0
    assert short.after(40).mu < drop.after(40).mu


def test_steps_and_examples_broadcast():
    sgd = make()
    grid = sgd.after(np.array([[1], [8], [40]]), example=np.array([0, 19]))
    assert grid.mu.shape == (3, 2)
    assert grid.mu[0, 1] == 0 and grid.mu[1, 0] == sgd.after(8, example=0).mu
    assert jaxdp.epsilon(sgd.after(0), DELTA) == 0


@pytest.mark.parametrize(("l2", "radius"), [(0.0, 0.5), (0.0, 2.0), (0.001, 2.0)])
def test_a_small_ball_gives_a_plateau_without_strong_convexity(l2, radius):
    settings = {"loss": logistic(l2), "batch_size": 10, "noise_std": 0.2, "radius": radius}
    sgd = make(**settings)
    rows = sgd.iteration(400, 19)
    searched = gdp_mu(rows.contraction, rows.noise_std, rows.shift, diameter=2 * radius)
    # `after` is up to 6% larger: it does not try restarts between participations, and it takes a ball 1e-6 larger
    assert searched * (1 - ROUTES) <= sgd.after(400, example=19).mu <= searched * 1.06
    assert sgd.after(400).mu < make(**settings | {"radius": None}).after(400).mu
    plateau = float(jaxdp.epsilon(sgd.after(10**7), DELTA))
    assert sgd.steps_within(plateau * 1.001, DELTA) == np.inf


def test_a_large_ball_changes_nothing():
    assert make(radius=1e6).after(400).mu == make().after(400).mu


def test_rounding_is_charged_to_every_step_also_where_the_example_is_absent():
    error = float32_rounding(dimension=100, radius=3.0)
    exact, charged = make(radius=3.0), make(radius=3.0, rounding=error)
    both_runs = 2 * error / (charged.learning_rate * charged.noise_std)
    assert exact.after(1, example=19).mu == 0 < both_runs <= charged.after(1, example=19).mu < both_runs * (1 + 1e-6)
    assert exact.after(100).mu < charged.after(100).mu < exact.after(100).mu * 1.01


@pytest.mark.parametrize("dimension", [1, 2, 3, 100, 10_000])
def test_an_update_in_float32_is_as_close_as_float32_rounding_says(dimension):
    rng, sgd, worst = np.random.default_rng(dimension), make(radius=1.0), 0.0
    for size in 10.0 ** rng.uniform(-1, 2, 200):
        start, step = rng.normal(size=(2, dimension)).astype(np.float32)
        start /= np.linalg.norm(start) * np.float32(1.0001)
        step *= np.float32(size)
        after = sgd._project(start - np.float32(0.3) * step, None)
        found = start + (np.asarray(after) - start)
        exact = start.astype(float) - float(np.float32(0.3)) * step.astype(float)
        exact *= min(1.0, 1 / np.linalg.norm(exact))
        worst = max(worst, np.linalg.norm(found - exact))
    assert 1e-8 < worst < float32_rounding(dimension, 1.0)


def test_the_float32_step_is_below_the_stated_one_and_the_noise_above():
    for value in (0.1, 0.7, 1 / 3, 2 / 3, 1e-3, 0.5):
        assert (
            np.float64(projected.as_float32(value, -np.inf)) <= value <= np.float64(projected.as_float32(value, np.inf))
        )
    assert projected.as_float32(0.5, np.inf) == 0.5


def test_a_step_at_the_limit_is_not_rounded_into_one_that_expands():
    rate = 2 / 3
    settings = (StronglyConvexLoss(1.0, np.nextafter(2 / rate, 0), 0.0), rate, 0.3, 1, 10)
    taken = float(projected.as_float32(NoisyProjectedSGD(*settings).learning_rate, -np.inf))
    assert taken * settings[0].smoothness <= 2.0


def test_the_budget_guard_names_the_last_step_within_the_budget():
    sgd = make(loss=logistic(0.0), noise_std=0.2)
    steps = sgd.steps_within(8.0, DELTA)
    assert jaxdp.epsilon(sgd.after(steps), DELTA) <= 8.0 < jaxdp.epsilon(sgd.after(steps + 1), DELTA)
    assert sgd.steps_within(1e-3, DELTA) == 0


@pytest.mark.parametrize("order", ["cyclic", "reshuffled"])
def test_the_budget_guard_says_unlimited_only_above_the_plateau(order):
    sgd = make(noise_std=0.3, order=order)
    plateau = float(jaxdp.epsilon(sgd.after(4 * 10**6), DELTA))
    assert sgd.steps_within(plateau * 1.001, DELTA) == np.inf
    assert sgd.steps_within(plateau * 0.99, DELTA) < 1000


def test_the_budget_guard_of_a_schedule_stays_within_its_budget():
    sgd = make(learning_rate=decay, noise_std=0.3)
    steps = sgd.steps_within(6.2, DELTA, max_steps=120)
    assert 0 < steps < 120
    assert jaxdp.epsilon(sgd.after(steps), DELTA) <= 6.2


@pytest.mark.parametrize("noise_std", [0.05, lambda t: 0.05 + 0.001 * t])
def test_calibrated_noise_meets_the_target_and_hardly_more(noise_std):
    sgd = make(noise_std=noise_std).calibrated(100, epsilon=1.0, delta=DELTA)
    epsilon = jaxdp.epsilon(sgd.after(100), DELTA)
    assert 1 - 1e-5 <= epsilon <= 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_std": 0.0}, "noise_std must be"),
        ({"noise_std": -1.0}, "noise_std must be"),
        ({"noise_std": np.nan}, "noise_std must be"),
        ({"noise_std": lambda t: 1.0 - t}, "noise_std must be"),
        ({"learning_rate": 8.0}, r"learning_rate must be in \(0, 2 / smoothness\] = \(0, 7.4"),
        ({"learning_rate": lambda t: 0.1 * t + 1}, "learning_rate must be"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"batch_size": 21}, "batch_size must be at most"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"num_examples": 0}, "num_examples must be"),
        ({"radius": 0.0}, "radius must be"),
        ({"radius": 1.0, "projection": lambda p: p}, "radius and projection"),
        ({"order": "poisson"}, "order must be one of"),
        ({"clip": "yes"}, "clip must be one of False, True"),
        ({"projection": 3}, "projection must be a function"),
        ({"remainder": "pad"}, "remainder must be one of"),
        ({"rounding": -1.0}, "rounding must be"),
        ({"data_steps": -1}, "data_steps must be"),
        ({"clip": True, "loss": StronglyConvexLoss.softmax_regression(1.0, 0.1)}, "clip must be False"),
    ],
)
def test_a_setting_outside_its_range_is_named_at_construction(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


def test_clipping_is_allowed_for_a_generalized_linear_loss():
    assert make(clip=True).clip


def test_bad_queries_are_named():
    sgd = make()
    for steps in (-1, 2.5, np.nan, 2**31 - 1):
        with pytest.raises(ValueError, match="steps must be"):
            sgd.after(steps)
    with pytest.raises(ValueError, match="example must be below num_examples = 20, got 20"):
        sgd.after(3, example=20)
    with pytest.raises(ValueError, match="example must be"):
        sgd.after(3, example=-1)
    with pytest.raises(TypeError, match="steps must be concrete"):
        jax.jit(lambda t: sgd.after(t).mu)(3)
    with pytest.raises(ValueError, match="delta must be in"):
        sgd.steps_within(1.0, 0.0)
    with pytest.raises(ValueError, match="learning_rate must be"):
        make(learning_rate=lambda t: 1.0 + 0.001 * t).after(8000)
    with pytest.raises(TypeError, match="loss must be"):
        make(loss=1.0)
    with pytest.raises(ValueError, match="strong_convexity must be at most"):
        StronglyConvexLoss(1.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="mu must be"):
        jaxdp.epsilon(IteratedRelease(-1.0), DELTA)


def test_asking_leaves_the_x64_flag_alone():
    make(learning_rate=decay).after(40)
    assert not jax.config.jax_enable_x64
    assert jnp.asarray(1.0).dtype == jnp.float32


def last_iterates_apart(gradients, others, steps, sgd):
    """Exact mu of the last iterate for linear losses plus l2: distance of the means / common standard deviation.

    gradients, others: the gradient of each example in the one data set and in the other, in the order of the steps.
    """
    keep = 1 - sgd.learning_rate * sgd.loss.strong_convexity
    means = [0.0, 0.0]
    for t in range(steps):
        means = [
            keep * mean - sgd.learning_rate * of[t % len(of)]
            for mean, of in zip(means, (gradients, others), strict=True)
        ]
    return abs(means[0] - means[1]) / (
        sgd.learning_rate * sgd.noise_std * math.sqrt(sum(keep ** (2 * t) for t in range(steps)))
    )


def test_a_removed_example_moves_all_later_ones_so_only_replace_one_is_accounted():
    loss = StronglyConvexLoss(lipschitz=1.0, smoothness=0.05, strong_convexity=0.05)
    sgd = NoisyProjectedSGD(loss, learning_rate=1.0, noise_std=2.0, batch_size=1, num_examples=40)
    signs = np.repeat([1.0, -1.0], 20)
    steps = 20 * 40
    mu = float(sgd.after(steps).mu)
    assert last_iterates_apart(signs, np.append(-1.0, signs[1:]), steps, sgd) <= mu
    assert last_iterates_apart(signs, signs[1:], steps, sgd) > 2 * mu
    for release in (sgd.after(steps), sgd.iteration(steps)):
        for relation in ("add", "remove", "add_or_remove"):
            with pytest.raises(jaxdp.UnsupportedMechanismError, match="available: 'replace_one'"):
                jaxdp.epsilon(release, DELTA, relation=relation)
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="which needs them in a fixed order"):
            jaxdp.epsilon(jaxdp.FixedSizeSampled(release, 0.9), DELTA)
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="which needs them in a fixed order"):
            jaxdp.epsilon(jaxdp.PoissonSampled(jaxdp.compose(release, jaxdp.Gaussian(1.0)), 0.1), DELTA)
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="give relation 'replace_one'"):
        jaxdp.epsilon(jaxdp.compose(sgd.after(steps), jaxdp.Gaussian(5.0)), DELTA)
