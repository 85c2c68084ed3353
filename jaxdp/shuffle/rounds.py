"""Finite pairs around one shuffled round, for composition: from certified values of delta on a grid of epsilon.

Upper pair: the piecewise linear function of e^epsilon through upper bounds of delta. Lower pair: one through lower
bounds, lowered by what convexity alone allows delta to lie below a chord. Proofs: notebooks/proofs/shuffle.md, section
11.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bounds import Bounds
from jaxdp.precision import kernel
from jaxdp.shuffle.law import Law
from jaxdp.special import normal_quantiles
from jaxdp.validate import SMALLEST

# Points of each half of a grid's bulk: for composition, for lower bounds, which need not be close, and for one moment.
POINTS, COARSE, MANY = 1200, 400, 2048
_WIDE, _FAR = 64, 96
_LEAST_SPREAD, _LEAST_CAP = 1e-4, 1e-5  # least width of a cell: of the loss's deviation, of its largest value
_REACHES = (1, 2, 4, 8, 16, 32, 64, 1, 2, 4, 8)
_UNITS = 2e-15  # eighteen units of rounding: what a difference of two values may lack, relative to the two


@kernel(static=("points",), working_set=4 * POINTS)
def grids(law: Law, users: Any, depth: Any, order: Any, *, points: int = POINTS) -> Any:
    """Epsilons from 0 to the largest loss, close where a composition of rounds looks.

    depth: nats that each round contributes to -log delta of the composition. order: that of the moment to be computed,
    or 0. Cells are smallest where the loss is, under no tilt and under the one that depth and order ask for, in steps
    that go with the density to the power -1/3.
    """
    live = law.base > 0
    base = jnp.where(live, law.base, 1.0)
    spread = jnp.sqrt(jnp.sum(jnp.where(live, (law.first - law.second) ** 2 / base, 0.0)) / users)
    cap = law.largest_loss()
    cap = jnp.where(jnp.isfinite(cap), cap, 60.0)
    spread = jnp.minimum(spread, cap)
    tilt = jnp.sqrt(2 * depth)
    quantiles, positive = normal_quantiles(points, 3.0), normal_quantiles(2 * points, 3.0)[points:]
    near = jnp.abs(jnp.concatenate([positive, quantiles + tilt, quantiles + tilt / 2]))
    wide = jnp.linspace(0.0, 1.0, _WIDE + 1)[1:-1]
    far = jnp.exp(jnp.linspace(jnp.log(1e-3), 0.0, _FAR + 1))[:-1]
    steps = spread * jnp.concatenate([near, (12.0 + 2 * tilt) * wide])
    inside = jnp.sort(jnp.concatenate([steps, cap * wide, cap * far]))
    # no narrow cells: their slopes would be differences of the bounds' errors
    place, least = jnp.arange(1.0, inside.shape[0] + 1), jnp.minimum(_LEAST_SPREAD * spread, _LEAST_CAP * cap)
    apart = jax.lax.cummax(jnp.maximum(inside - place * least, 0.0)) + place * least
    apart = jnp.minimum(apart, cap - (inside.shape[0] + 1 - place) * least)
    return jnp.concatenate([jnp.zeros(1), apart, cap[None]])


class _Cells(NamedTuple):
    """Widths in e^epsilon of the cells of a grid, 1 for those of none, and which have some."""

    width: Any
    some: Any

    def slope(self, left: Any, right: Any) -> Any:
        """(right - left)/width of every cell."""
        return (right - left) / self.width


def _cells(grid: Any) -> _Cells:
    width = jnp.exp(grid[:-1]) * jnp.expm1(grid[1:] - grid[:-1])
    return _Cells(jnp.where(width > 0, width, 1.0), width > 0)


def _masses(slope: Any, error: Any, sign: float) -> Any:
    """Masses under Q at the right ends of cells from nondecreasing slopes, rounded by the errors of both slopes."""
    following = jnp.append(slope[1:], 0.0)
    return jnp.maximum(following - slope + sign * (error + jnp.append(error[1:], 0.0)), 0.0)


def _below_chords(grid: Any, value: Any) -> Any:
    """Upper bounds of a convex function of e^epsilon, lowered to chords between points further left and right."""
    place = np.arange(grid.shape[0])
    for reach in _REACHES:
        left, right = np.maximum(place - reach, 0), np.minimum(place + reach, place[-1])
        start, end = grid[left], grid[right]
        far, near = jnp.expm1(grid - start), jnp.exp(grid - start) * jnp.expm1(end - grid)
        chord = (value[left] * near + value[right] * far) / jnp.maximum(jnp.expm1(end - start), SMALLEST)
        value = jnp.where((left < place) & (place < right), jnp.minimum(value, chord * (1 + _UNITS)), value)
    return value


@kernel(working_set=16 * POINTS)
def upper_pair(grid: Any, delta: Any) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, mass at infinity) of a symmetric pair whose profile is at least the given values.

    grid: as from `grids`; delta: upper bounds there.
    """
    delta = _below_chords(grid, jax.lax.cummin(delta))
    slope, error = _slopes(grid, delta)
    # Summed from the right, clipped masses only make slopes steeper, and the profile larger.
    mass = jnp.maximum(jnp.append(slope[1:], 0.0) - slope, 0.0) + error + jnp.append(error[1:], 0.0)
    return _symmetric(grid[1:], mass, mass, jnp.minimum(delta[-1], 1.0), up=True)


def _symmetric(losses: Any, mass: Any, turned: Any, infinity: Any, up: bool) -> tuple[Any, Any, Any]:
    """Masses under Q at positive losses, for the pair and for its swap; what is missing of 1 has loss 0."""
    under_p = mass * jnp.exp(losses)
    rest = 1 - infinity - jnp.sum(under_p) - jnp.sum(turned)
    rest = jnp.maximum(rest + (1e-15 if up else -1e-15) * losses.shape[0], 0.0)
    masses = jnp.concatenate([under_p, turned, rest[None]])
    logs = jnp.log(jnp.where(masses > 0, masses, 1.0))
    logs = logs + (4e-16 if up else -4e-16) * (1 + jnp.abs(logs))  # four units of rounding of the logarithm and its input
    return jnp.concatenate([losses, -losses, jnp.zeros(1)]), jnp.where(masses > 0, logs, -jnp.inf), infinity


def _below(grid: Any, delta: Bounds) -> Any:
    """Masses under Q at the right ends of cells whose profile is nowhere above the true one."""
    upper = jax.lax.cummin(delta.upper)
    lower = jax.lax.cummax(jnp.maximum(delta.lower, 0.0), reverse=True)  # the truth is nonincreasing
    cells = _cells(grid)
    place = jnp.arange(cells.some.shape[0])
    # By convexity the slope in a cell lies between those of the cells left and right of it; outermost: -1 and 0.
    left = jax.lax.cummax(jnp.where(cells.some, place, -1))
    left = jnp.append(-1, left[:-1])
    right = jax.lax.cummin(jnp.where(cells.some, place, place.size), reverse=True)
    right = jnp.append(right[1:], place.size)
    least = jnp.where(left >= 0, cells.slope(upper[:-1], lower[1:])[left], -1.0)
    most = jnp.where(right < place.size, cells.slope(lower[:-1], upper[1:])[jnp.minimum(right, place.size - 1)], 0.0)
    # how far the corner of the two lines through the chord's ends lies below the chord
    chord = cells.slope(lower[:-1], lower[1:])
    falls, rises = jnp.maximum(chord - least, 0.0), jnp.maximum(most - chord, 0.0)
    total = jnp.where(falls + rises > 0, falls + rises, 1.0)
    deep = jnp.where(cells.some, falls * rises / total * cells.width, 0.0) * (1 + 1e-12) + 1e-15 * (
        upper[:-1] + upper[1:]
    )
    value = jnp.maximum(lower - jnp.maximum(jnp.append(deep, 0.0), jnp.append(0.0, deep)), 0.0)
    slope = jnp.minimum(_hull_slopes(grid, value), 0.0)
    error = _UNITS * jnp.abs(slope)
    return jnp.maximum(jnp.append(slope[1:], 0.0) - slope - error - jnp.append(error[1:], 0.0), 0.0)


def _hull_slopes(grid: Any, value: Any) -> Any:
    """Slopes in e^epsilon, cell by cell, of the largest convex function below the values.

    The largest over the points left of the cell of the least slope from there to a point right of it.
    """
    place = np.arange(grid.shape[0])
    later = place[:, None] < place[None, :]
    width = jnp.exp(grid[:, None]) * jnp.expm1(jnp.where(later, grid[None, :] - grid[:, None], 1.0))
    slope = jnp.where(later, (value[None, :] - value[:, None]) / width, jnp.inf)
    least = jax.lax.cummin(slope, axis=1, reverse=True)[:, 1:]
    return jnp.max(jnp.where(place[:, None] <= place[None, :-1], least, -jnp.inf), axis=0)


def _within_one(grid: Any, sides: list[Any]) -> list[Any]:
    """The masses under Q without so many of the smallest losses that the pair's total mass, zero losses aside, is at most 1.

    Under P: sum of mass e^loss at one side's positive losses and of the other side's mass. Less mass, smaller profile.
    """
    total = [jnp.sum(mass) for mass in sides]
    room = (1 - jnp.maximum(*(jnp.sum(mass * jnp.expm1(grid[1:])) for mass in sides))) * (1 - 1e-12)
    share = jnp.minimum(jnp.maximum(room, 0.0) / jnp.maximum(total[0] + total[1], SMALLEST), 1.0)
    larger = [jnp.append(jax.lax.cumsum(mass[::-1])[::-1][1:], 0.0) for mass in sides]
    return [jnp.clip(share * t - b, 0.0, mass) for t, b, mass in zip(total, larger, sides, strict=True)]


@kernel(working_set=2_000_000)
def lower_pair(grid: Any, delta: Bounds, turned: Bounds) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, 0) of a pair whose profile is at most that of a pair known by bounds on a grid.

    delta: bounds of its profile; turned: of that of its swap.
    """
    sides = _within_one(grid, [_below(grid, each) for each in (delta, turned)])
    at_zero = [jnp.sum(mass * jnp.expm1(grid[1:])) for mass in sides]  # equal for a pair
    least = jnp.minimum(*at_zero) * (1 - 1e-12)
    shares = [jnp.where(total > 0, least / jnp.where(total > 0, total, 1.0), 0.0) for total in at_zero]
    one, other = (mass * share for mass, share in zip(sides, shares, strict=True))
    return _symmetric(grid[1:], one, other, jnp.zeros(()), up=False)
