"""Random allocation: leaving out one error term breaks a bound; with all terms the bounds hold."""

import jax
import mpmath
import numpy as np
import pytest

import jaxdp
from jaxdp.allocation import bounds, contour, finite, jumps
from jaxdp.allocation.law import Step
from jaxdp.interval import Bounds
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options
from jaxdp.shuffle import rounds

LARGE = bounds.EFFORTS[1]


def evaluated(steps, noise, epsilon, sign):
    """(lower, upper) of delta from the contour and the jump bounds, by NumPy."""
    with on_host():
        found = bounds.at_own_epsilon(Step(*map(np.float64, (steps, 1 / noise, epsilon, sign))), LARGE)
    return np.exp(found.lower), np.exp(found.upper)


def by_jumps(steps, noise, epsilon, sign):
    """(lower, upper) of delta from sums over one large step, without a contour."""
    with on_host():
        step = Step(*map(np.float64, (steps, 1 / noise, epsilon, sign)))
        found = jumps.bracket(step, jumps.prepare(step), step.epsilon[None])
    return float(found.lower[0]), float(found.upper[0])


def no_moments(log_bound, c, place):
    """In place of `jumps.least_over_tilts`: the log of a Chernoff bound of 0."""
    return np.full(np.broadcast_shapes(log_bound.shape[-1:], place.shape), -np.inf)


# ---- jumps: for each term a setting in which the bound without the term is on the wrong side ----


WITHOUT_CHERNOFF = [(10, 1.0, 0.5, 1.0), (10, 1.0, 0.5, -1.0)]
WITHOUT_SEVERAL = [(2, 1.0, 0.5, 1.0), (100, 0.5, 6.4, 1.0)]
WITHOUT_PARABOLA = (3, 1.0, 1.0, 1.0)


def test_jumps_enclose_where_each_term_is_tested():
    for point in {*WITHOUT_CHERNOFF, *WITHOUT_SEVERAL, WITHOUT_PARABOLA}:
        lower, upper = by_jumps(*point)
        low, high = evaluated(*point)
        assert lower <= high and low <= upper


@pytest.mark.parametrize("point", WITHOUT_CHERNOFF)
def test_without_the_chernoff_bound_of_small_steps_the_upper_jump_bound_fails(monkeypatch, point):
    low, _ = evaluated(*point)
    monkeypatch.setattr(jumps, "least_over_tilts", no_moments)
    assert by_jumps(*point)[1] < low


@pytest.mark.parametrize("point", WITHOUT_SEVERAL)
def test_without_more_than_one_large_step_the_upper_jump_bound_fails(monkeypatch, point):
    low, _ = evaluated(*point)
    monkeypatch.setattr(jumps, "log_several_steps", lambda step, split: -np.inf + 0.0 * split)
    assert by_jumps(*point)[1] < low


def test_without_the_parabola_the_upper_jump_bound_fails(monkeypatch):
    """Without the bound of no large step the upper bound still holds; without the parabola and its tail it fails."""
    point = WITHOUT_PARABOLA
    low, _ = evaluated(*point)
    least = jumps.least_over_tilts
    # The bound of no large step has places of two axes (epsilons first); the bound beyond the parabola has more axes.
    no_small = lambda log_bound, c, place: least(log_bound, c, place) - (np.inf if np.ndim(place) == 2 else 0)  # noqa: E731
    monkeypatch.setattr(jumps, "least_over_tilts", no_small)
    assert by_jumps(*point)[1] >= low
    monkeypatch.setattr(jumps, "least_over_tilts", no_moments)
    monkeypatch.setattr(jumps, "_largest_density", lambda u, s, y: 0.0 * y)
    assert by_jumps(*point)[1] < low


@pytest.mark.parametrize("steps, noise, epsilon", [(10, 1.0, 0.5), (100, 0.3, 1.0)])
def test_lower_jump_bounds_need_the_chance_of_no_large_step(monkeypatch, steps, noise, epsilon):
    """Without the tail of one step in this probability the lower bound of "add" is above the exact delta."""
    point = (steps, noise, epsilon, -1.0)
    _, high = evaluated(*point)
    assert by_jumps(*point)[0] <= high
    tails = jumps.normal_tails
    monkeypatch.setattr(jumps, "normal_tails", lambda x: 0.0 * tails(x))
    assert by_jumps(*point)[0] > high


# ---- steps beyond the cut ----


def test_without_its_rounding_the_part_beyond_the_cut_is_above_the_truth():
    above = []
    for steps, noise, epsilon in ((2, 0.5, 1.0), (2, 0.5, 6.0), (100, 1.0, 0.5), (2, 20.0, 0.01), (2, 10.0, 0.3)):
        with on_host():
            step = Step(*map(np.float64, (steps, 1 / noise, epsilon, 1.0)))
            cut = float(step.cut())
            value, error = contour.beyond_the_cut(step, np.array([epsilon]), cut)
        exact = closed_in_high_precision(steps, noise, epsilon, cut)
        assert value[0] - error[0] <= exact <= value[0] + error[0]
        above.append(value[0] > exact)
    assert any(above)


def closed_in_high_precision(steps, noise, epsilon, cut):
    """The part of delta of "remove" from steps beyond the cut, in 60 digits."""
    with mpmath.workdps(60):
        s, b, odds = mpmath.mpf(1 / noise), mpmath.mpf(cut), mpmath.exp(mpmath.mpf(epsilon))
        one, none = mpmath.ncdf(s - b), mpmath.ncdf(-b)
        return one - odds * none + (1 - one - odds * (1 - none)) * (1 - (1 - none) ** (steps - 1))


# ---- finite pairs of a composition ----


def profile_of(law, epsilon):
    """delta of a finite pair at epsilon."""
    losses, log_weights, infinity, _ = law
    return np.sum(np.exp(log_weights) * np.maximum(-np.expm1(epsilon - losses), 0.0)) + infinity


def grid_and_profiles(noise=0.8, steps=50.0):
    """A grid of epsilons, and bounds of log delta on it: of "remove", of "add"."""
    grid = np.linspace(0.0, 1.2, 24)
    setting = np.array([steps]), np.array([noise])
    wanted = grid[None], np.zeros((1, grid.size)), np.full((1, grid.size), -np.inf)
    sides = [finite.log_profiles(*setting, sign, *wanted) for sign in (1.0, -1.0)]
    return grid, *(Bounds(side.lower[0], side.upper[0]) for side in sides)


def between(grid):
    return 0.5 * (grid[1:6] + grid[:5])


def truths(points, noise=0.8, steps=50.0):
    return jaxdp.delta_bounds(jaxdp.RandomAllocation(jaxdp.Gaussian(noise), steps), points, relation="remove")


def test_the_lower_pair_lies_below_the_profile_only_when_it_is_lowered(monkeypatch):
    grid, forward, backward = grid_and_profiles()
    points = between(grid)
    truth = truths(points)
    with on_host():
        low = [profile_of(finite.lower_pair(grid, forward, backward), point) for point in points]
    assert np.all(low <= truth.upper)

    def chords(grid, delta):
        value = np.exp(delta.lower)
        slope = rounds.hull_slopes(grid, value)
        return np.maximum(np.append(slope[1:], 0.0) - slope, 0.0)

    monkeypatch.setattr(rounds, "masses_below", chords)
    with on_host():
        chord = [profile_of(finite.lower_pair(grid, forward, backward), point) for point in points]
    assert np.any(chord > truth.upper)


def test_the_upper_pair_needs_its_mass_at_infinity():
    grid, forward, backward = grid_and_profiles()
    with on_host():
        law = finite.upper_pair(grid, forward.upper, backward.upper)
    points = grid[1:-1]
    truth = truths(points)
    assert np.all([profile_of(law, point) for point in points] >= truth.lower)
    assert np.any([profile_of((*law[:2], 0.0, 0.0), point) for point in points] < truth.lower)


# ---- two steps ----


def test_bounds_of_epsilon_of_two_steps_are_close():
    record = jaxdp.RandomAllocation(jaxdp.Gaussian(np.array([0.5, 1.5, 2.0, 7.3, 20.0])), 2)
    for relation in ("add", "remove"):
        found = jaxdp.epsilon_bounds(record, 1e-6, relation=relation)
        assert np.all(found.upper - found.lower < 3e-6 * found.upper)


# ---- traces ----


@pytest.mark.thorough
def test_a_traced_number_of_steps_is_amplified_as_a_known_one():
    with jax.enable_x64(True):

        def epsilon(steps, noise):
            return jaxdp.epsilon(jaxdp.RandomAllocation(jaxdp.Gaussian(noise), steps), 1e-6, relation="remove")

        found = jax.jit(jax.vmap(epsilon), compiler_options=compiler_options("cpu"))(
            np.array([1000.0, 100.0, 0.0, 2.5]), np.array([2.0, 1.0, 1.0, 1.0])
        )
    np.testing.assert_allclose(found[:2], [0.059231457, 0.857985977], rtol=1e-6)  # KNOWN of test_allocation.py
    np.testing.assert_array_equal(found[2:], np.inf)
