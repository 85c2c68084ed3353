"""Finite pairs around one shuffled round, for composition: from certified values of delta on a grid of epsilon.

Upper pair: the piecewise linear function of e^epsilon through upper bounds of delta. Lower pair: one through lower
bounds, lowered by what convexity alone allows delta to lie below a chord. Proofs: notebooks/proofs/shuffle.md, section
11.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp.arrays import xp
from jaxdp.bounds import Bounds
from jaxdp.precision import kernel
from jaxdp.shuffle.law import Law
from jaxdp.special import normal_quantiles
from jaxdp.validate import SMALLEST

# Points of each half of a grid's bulk: for composition, for lower bounds, which need not be close, and for one moment.
POINTS, COARSE, MANY = 1200, 200, 2048
_WIDE, _FAR = 64, 96
_LEAST_CELL = 1e-3  # of a round's standard deviation
_UNITS = 2e-15  # eighteen units of rounding: what a difference of two values may lack, relative to the two


@kernel(static=("points",), working_set=4 * POINTS, by_numpy=64)
def grids(law: Law, users: Any, depth: Any, order: Any, *, points: int = POINTS) -> Any:
    """Epsilons from 0 to the largest loss, close where a composition of rounds looks.

    depth: nats that each round contributes to -log delta of the composition. order: that of the moment to be computed,
    or 0. Cells are smallest where the loss is, under no tilt and under the one that depth and order ask for, in steps
    that go with the density to the power -1/3.
    """
    live = law.base > 0
    base = xp.where(live, law.base, 1.0)
    spread = xp.sqrt(xp.sum(xp.where(live, (law.first - law.second) ** 2 / base, 0.0)) / users)
    cap = law.largest_loss()
    cap = xp.where(xp.isfinite(cap), cap, 60.0)
    spread = xp.minimum(spread, cap)
    tilt = xp.minimum(xp.sqrt(2 * depth) + order * spread, cap / spread)
    quantiles = normal_quantiles(points, 3.0)
    near = xp.concatenate([quantiles[points // 2 :], quantiles + tilt])
    wide = xp.linspace(0.0, 1.0, _WIDE + 1)[1:-1]
    far = xp.exp(xp.linspace(xp.log(1e-3), 0.0, _FAR + 1))[:-1]
    steps = xp.concatenate([spread * near, spread * (12.0 + 2 * tilt) * wide, cap * wide, cap * far])
    # points closer than that are one: a slope of a narrow cell is nothing but the errors of its two ends
    least = _LEAST_CELL * spread
    steps = xp.minimum(xp.round(xp.abs(steps) / least) * least, cap * (1 - 1e-4))
    return xp.concatenate([xp.zeros(1), xp.sort(steps), cap[None]])


class _Cells(NamedTuple):
    """Widths in e^epsilon of the cells of a grid, 1 for those of none, and which have some."""

    width: Any
    some: Any

    def slope(self, left: Any, right: Any) -> Any:
        """(right - left)/width of every cell."""
        return (right - left) / self.width


def _cells(grid: Any) -> _Cells:
    width = xp.exp(grid[:-1]) * xp.expm1(grid[1:] - grid[:-1])
    return _Cells(xp.where(width > 0, width, 1.0), width > 0)


def _masses(slope: Any, error: Any, sign: float) -> Any:
    """Masses under Q at the right ends of cells from nondecreasing slopes, rounded by the errors of both slopes."""
    following = xp.append(slope[1:], 0.0)
    return xp.maximum(following - slope + sign * (error + xp.append(error[1:], 0.0)), 0.0)


@kernel(working_set=16 * POINTS, by_numpy=64)
def upper_pair(grid: Any, delta: Any) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, mass at infinity) of a symmetric pair whose profile is at least the given values.

    grid: as from `grids`; delta: upper bounds there.
    """
    delta = xp.cummin(delta)
    cells = _cells(grid)
    slope = cells.slope(delta[:-1], delta[1:])
    # convex and nowhere smaller: seen from the right end, each slope at most those on its right
    slope = xp.cummin(xp.where(cells.some, slope, 0.0), reverse=True)
    mass = _masses(slope, _UNITS * xp.abs(slope), 1.0)
    return _symmetric(grid[1:], mass, mass, xp.minimum(delta[-1], 1.0), up=True)


def _symmetric(losses: Any, mass: Any, turned: Any, infinity: Any, up: bool) -> tuple[Any, Any, Any]:
    """Masses under Q at positive losses, for the pair and for its swap; what is missing of 1 has loss 0."""
    under_p = mass * xp.exp(losses)
    rest = 1 - infinity - xp.sum(under_p) - xp.sum(turned) + (1e-15 if up else -1e-15) * losses.shape[0]
    # more finite mass than 1 - infinity would have to be carried into the composed mass at infinity: give up instead
    infinity = xp.where((rest < 0) & (infinity > 0), 1.0, infinity)
    rest = xp.maximum(rest, 0.0)
    masses = xp.concatenate([under_p, turned, rest[None]])
    logs = xp.log(xp.where(masses > 0, masses, 1.0))
    logs = logs + (4e-16 if up else -4e-16) * (1 + xp.abs(logs))  # units of rounding of the logarithm and of the mass
    return xp.concatenate([losses, -losses, xp.zeros(1)]), xp.where(masses > 0, logs, -xp.inf), infinity


def _below(grid: Any, delta: Bounds) -> Any:
    """Masses under Q at the right ends of cells whose profile is nowhere above the true one."""
    upper = xp.cummin(delta.upper)
    lower = xp.cummax(xp.maximum(delta.lower, 0.0), reverse=True)  # the truth is nonincreasing
    cells = _cells(grid)
    place = xp.arange(cells.some.shape[0])
    # By convexity the slope in a cell lies between those of the cells left and right of it; outermost: -1 and 0.
    left = xp.cummax(xp.where(cells.some, place, -1))
    left = xp.append(-1, left[:-1])
    right = xp.cummin(xp.where(cells.some, place, place.size), reverse=True)
    right = xp.append(right[1:], place.size)
    least = xp.where(left >= 0, cells.slope(upper[:-1], lower[1:])[left], -1.0)
    most = xp.where(right < place.size, cells.slope(lower[:-1], upper[1:])[xp.minimum(right, place.size - 1)], 0.0)
    # how far the corner of the two lines through the chord's ends lies below the chord
    chord = cells.slope(lower[:-1], lower[1:])
    falls, rises = xp.maximum(chord - least, 0.0), xp.maximum(most - chord, 0.0)
    total = xp.where(falls + rises > 0, falls + rises, 1.0)
    deep = xp.where(cells.some, falls * rises / total * cells.width, 0.0) * (1 + 1e-12) + 1e-15 * (
        upper[:-1] + upper[1:]
    )
    value = lower - xp.maximum(xp.append(deep, 0.0), xp.append(0.0, deep))
    # Next to a value below 0 the profile may be 0 in all of a cell, where a chord to a value raised to 0 is not.
    value = xp.where(xp.append(value[1:] < 0, False), 0.0, xp.maximum(value, 0.0))
    slope = xp.minimum(_hull_slopes(grid, value), 0.0)
    return _masses(slope, _UNITS * xp.abs(slope), -1.0)


def _hull_slopes(grid: Any, value: Any) -> Any:
    """Slopes in e^epsilon, cell by cell, of the largest convex function below the values.

    The largest over the points left of the cell of the least slope from there to a point right of it.
    """
    place = np.arange(grid.shape[0])
    width = xp.exp(grid[:, None]) * xp.expm1(xp.maximum(grid[None, :] - grid[:, None], 0.0))
    apart = (place[:, None] < place[None, :]) & (width > 0)
    slope = xp.where(apart, (value[None, :] - value[:, None]) / xp.where(apart, width, 1.0), xp.inf)
    least = xp.cummin(slope, axis=1, reverse=True)[:, 1:]
    return xp.max(xp.where(place[:, None] <= place[None, :-1], least, -xp.inf), axis=0)


def _within_one(grid: Any, sides: list[Any]) -> list[Any]:
    """The masses under Q without so many of the smallest losses that a law of total mass 1 has them.

    Under P: the sum of mass e^loss of one side and of the mass of the other. Less mass is a smaller profile.
    """
    total = [xp.sum(mass) for mass in sides]
    room = (1 - xp.maximum(*(xp.sum(mass * xp.expm1(grid[1:])) for mass in sides))) * (1 - 1e-12)
    share = xp.minimum(xp.maximum(room, 0.0) / xp.maximum(total[0] + total[1], SMALLEST), 1.0)
    larger = [xp.append(xp.cumsum(mass[::-1])[-2::-1], 0.0) for mass in sides]
    return [xp.clip(share * t - b, 0.0, mass) for t, b, mass in zip(total, larger, sides, strict=True)]


@kernel(working_set=1_000_000, costly=lambda: True, by_numpy=16)
def lower_pair(grid: Any, delta: Bounds, turned: Bounds) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, 0) of a pair whose profile is at most that of a pair known by bounds on a grid.

    delta: bounds of its profile; turned: of that of its swap.
    """
    sides = _within_one(grid, [_below(grid, each) for each in (delta, turned)])
    at_zero = [xp.sum(mass * xp.expm1(grid[1:])) for mass in sides]  # equal for a pair
    least = xp.minimum(*at_zero) * (1 - 1e-12)
    shares = [xp.where(total > 0, least / xp.where(total > 0, total, 1.0), 0.0) for total in at_zero]
    one, other = (mass * share for mass, share in zip(sides, shares, strict=True))
    return _symmetric(grid[1:], one, other, xp.zeros(()), up=False)
