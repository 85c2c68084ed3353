"""The search for both ends of epsilon: both ends it returns are tested points, and uncertain bounds prove nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.contour.trapezoid import Sums, relative_to
from jaxdp.numerics.roots import Evaluation, of_delta, proved_ends

ROOT = 2.0


@pytest.mark.parametrize("error", [1e-10, 1e-3, 0.5])
@pytest.mark.parametrize("reach", [0.02, 1.0, 10.0])
@pytest.mark.parametrize("ceiling", [2.0001, 2.5, 40.0])
def test_both_ends_are_proved_and_as_close_as_the_errors_allow(error, reach, ceiling):
    """The function is 9 (ROOT - x). Its bounds are off by ``error``, and NaN farther than ``reach`` from ROOT."""

    def evaluate(x):
        value = 9 * (ROOT - x)
        near = jnp.abs(x - ROOT) < reach
        return Evaluation(
            jnp.where(near, value + error, jnp.nan),
            jnp.where(near, value - error, jnp.nan),
            jnp.where(near, value, jnp.where(x < ROOT, jnp.inf, -jnp.inf)),
            jnp.full_like(x, -9.0),
        )

    with jax.enable_x64(True):
        found = jax.jit(lambda top: proved_ends(evaluate, 0.0, 0.9 * top, top, most_tries=60))(jnp.asarray(ceiling))
        lower, upper, root = map(float, found)
    assert lower <= ROOT <= upper <= ceiling
    if error / 9 < reach:  # somewhere the sign of the function is proved
        assert upper - lower <= 1.2 * (2 * error / 9) + 1e-10
        assert abs(lower - ROOT) < reach and 9 * (ROOT - lower) > error
        assert upper == ceiling or (abs(upper - ROOT) < reach and 9 * (upper - ROOT) >= error)
    else:
        assert (lower, upper) == (0.0, ceiling)
    assert abs(root - ROOT) < 1e-9


@pytest.mark.parametrize("close", [1e-9, 1e-13])
def test_ends_are_as_close_as_asked_where_the_bounds_are(close):
    def evaluate(x):
        value = jnp.log(3 / x) + 1 / x  # decreasing, far from linear
        return Evaluation(value + 1e-16, value - 1e-16, value, -1 / x - 1 / x**2)

    with jax.enable_x64(True):
        found = jax.jit(lambda end: proved_ends(evaluate, 0.0, 0.1 * end, end, close=close))(jnp.asarray(50.0))
        lower, upper, _ = map(float, found)
    assert 0 < upper - lower <= 4 * close * upper
    assert np.log(3 / lower) + 1 / lower >= 0 >= np.log(3 / upper) + 1 / upper


def test_a_delta_that_rounding_of_the_logarithm_cannot_tell_from_the_target_proves_nothing():
    target = 10.0 ** np.random.default_rng(4).uniform(-300, -1, 2000)
    below, above = np.nextafter(target, 0.0), np.nextafter(target, 1.0)
    assert (np.log(below) == np.log(target)).any()
    with jax.enable_x64(True):
        upper, lower, *_ = map(np.asarray, jax.jit(of_delta)(below, above, target))
    assert (lower < np.log(target)).all() and (upper > np.log(target)).all()


@pytest.mark.parametrize("nothing", [np.nan, 0.0, -1.0])
def test_a_sum_lost_in_rounding_proves_nothing(nothing):
    def signs(upper, lower, middle):
        with jax.enable_x64(True):
            told = relative_to(jnp.asarray(1.0), Sums(*map(jnp.asarray, (upper, lower, middle, -1.0))))
            return bool(told.upper <= 0), bool(told.lower > 0)

    assert signs(nothing, nothing, nothing) == (False, False)
    assert signs(0.9, 0.8, 0.85) == (True, False) and signs(1.2, 1.1, 1.15) == (False, True)
