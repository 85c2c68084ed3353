"""Finite pairs around one shuffled round, for composition: from certified values of delta on a grid of epsilon.

Upper pair: the piecewise linear function of e^epsilon through upper bounds of delta. Lower pair: one through lower bounds,
lowered by what convexity alone allows delta to lie below a chord. Proofs: notebooks/proofs/shuffle.md, section 11.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.bounds import Bounds
from jaxdp.precision import kernel
from jaxdp.shuffle.law import Law
from jaxdp.special import normal_quantiles

POINTS, COARSE = 640, 160  # of each third of the grid's bulk; the second for lower bounds, which need not be close
_WIDE, _FAR = 64, 96
_UNITS = 2e-15  # eighteen units of rounding: what a difference of two values may lack, relative to the two


@kernel(static=("points",), working_set=4 * POINTS)
def grids(law: Law, users: Any, depth: Any, *, points: int = POINTS) -> Any:
    """Epsilons from 0 to the largest loss, close where a composition with tail e^-depth per round's share looks.

    depth: nats that each round contributes to -log delta of the composition. Cells are smallest where the loss is, under
    no tilt and under the one that the sum asks for, in steps that go with the density to the power -1/3.
    """
    live = law.base > 0
    base = jnp.where(live, law.base, 1.0)
    spread = jnp.sqrt(jnp.sum(jnp.where(live, (law.first - law.second) ** 2 / base, 0.0)) / users)
    cap = law.largest_loss()
    cap = jnp.where(jnp.isfinite(cap), cap, 60.0)
    spread = jnp.minimum(spread, cap)
    tilt = jnp.sqrt(2 * depth)
    quantiles = normal_quantiles(points, 3.0)
    near = jnp.abs(jnp.concatenate([quantiles, quantiles + tilt, quantiles + tilt / 2]))
    wide = jnp.linspace(0.0, 1.0, _WIDE + 1)[1:-1]
    far = jnp.exp(jnp.linspace(jnp.log(1e-3), 0.0, _FAR + 1))[:-1]
    steps = spread * jnp.concatenate([near, (12.0 + 2 * tilt) * wide])
    inside = jnp.sort(jnp.minimum(jnp.concatenate([steps, cap * wide, cap * far]), cap * (1 - 1e-9)))
    apart = inside + jnp.arange(1.0, inside.shape[0] + 1) * jnp.minimum(spread * 1e-9, cap * 1e-13)
    return jnp.concatenate([jnp.zeros(1), jnp.minimum(apart, cap * (1 - 1e-12)), cap[None]])


def _slopes(grid: Any, value: Any) -> tuple[Any, Any]:
    """Slopes of the chords in e^epsilon, and what rounding may have taken from or added to each; 0 in empty cells."""
    width = jnp.exp(grid[:-1]) * jnp.expm1(grid[1:] - grid[:-1])
    some = width > 0
    width = jnp.where(some, width, 1.0)
    slope = jnp.where(some, (value[1:] - value[:-1]) / width, 0.0)
    error = jnp.where(some, _UNITS * jnp.abs(slope), 0.0)
    return slope, error


@kernel(working_set=16 * POINTS)
def upper_pair(grid: Any, delta: Any) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, mass at infinity) of a symmetric pair whose profile is at least the given values.

    grid: as from `grids`; delta: upper bounds there, nonincreasing.
    """
    delta = jax.lax.cummin(delta)
    slope, error = _slopes(grid, delta)
    # an empty cell has no slope of its own: the one left of it
    live = grid[1:] > grid[:-1]
    slope = jnp.where(live, slope, -jnp.inf)
    slope = jax.lax.cummax(slope)  # convex from the left ...
    slope = jnp.where(jnp.isfinite(slope), slope, 0.0)
    following = jnp.append(slope[1:], 0.0)
    mass = jnp.maximum(following - slope, 0.0) + error + jnp.append(error[1:], 0.0)
    return _symmetric(grid[1:], mass, mass, jnp.minimum(delta[-1], 1.0), up=True)


def _symmetric(losses: Any, mass: Any, turned: Any, infinity: Any, up: bool) -> tuple[Any, Any, Any]:
    """Masses under Q at positive losses, for the pair and for its swap; what is missing of 1 has loss 0."""
    under_p = mass * jnp.exp(losses)
    rest = 1 - infinity - jnp.sum(under_p) - jnp.sum(turned)
    rest = jnp.maximum(rest + (1e-15 if up else -1e-15) * losses.shape[0], 0.0)
    masses = jnp.concatenate([under_p, turned, rest[None]])
    masses = masses * (1 + (4e-16 if up else -4e-16))
    return (
        jnp.concatenate([losses, -losses, jnp.zeros(1)]),
        jnp.where(masses > 0, jnp.log(jnp.where(masses > 0, masses, 1.0)), -jnp.inf),
        infinity,
    )


def _below(grid: Any, delta: Bounds) -> Any:
    """Masses under Q at the grid's points after the first whose profile is nowhere above the true one."""
    upper = jax.lax.cummin(delta.upper)
    lower = jnp.flip(jax.lax.cummax(jnp.flip(jnp.maximum(delta.lower, 0.0))))  # the truth is nonincreasing
    width = jnp.exp(grid[:-1]) * jnp.expm1(grid[1:] - grid[:-1])
    safe = jnp.where(width > 0, width, 1.0)
    chord = (lower[1:] - lower[:-1]) / safe
    # By convexity the slope in a cell lies between chords left and right of it; outermost: -1 and 0.
    before = jnp.append(-1.0, (lower[1:-1] - upper[:-2]) / safe[:-1])
    after = jnp.append((upper[2:] - lower[1:-1]) / safe[1:], 0.0)
    # how far the corner of the two lines through the chord's ends lies below the chord
    left, right = jnp.maximum(chord - before, 0.0), jnp.maximum(after - chord, 0.0)
    total = jnp.where(left + right > 0, left + right, 1.0)
    deep = jnp.where(width > 0, left * right / total * width, 0.0) + 1e-15 * (upper[:-1] + upper[1:])
    value = jnp.maximum(lower - jnp.maximum(jnp.append(deep, 0.0), jnp.append(0.0, deep)), 0.0)
    slope, error = _slopes(grid, value)
    # convex, and nowhere larger when anchored on the right
    slope = jax.lax.cummax(jnp.where(width > 0, slope, -jnp.inf))
    slope = jnp.where(jnp.isfinite(slope), slope, 0.0)
    return jnp.maximum(jnp.append(slope[1:], 0.0) - slope - error - jnp.append(error[1:], 0.0), 0.0)


@kernel(working_set=16 * POINTS)
def lower_pair(grid: Any, delta: Bounds, turned: Bounds) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, 0) of a pair whose profile is at most that of a pair known by bounds on a grid.

    delta: bounds of its profile; turned: of that of its swap.
    """
    sides = [_below(grid, each) for each in (delta, turned)]
    at_zero = [jnp.sum(mass * jnp.expm1(grid[1:])) for mass in sides]  # equal for a pair
    least = jnp.minimum(*at_zero) * (1 - 1e-12)
    shares = [jnp.where(total > 0, least / jnp.where(total > 0, total, 1.0), 0.0) for total in at_zero]
    one, other = (mass * share for mass, share in zip(sides, shares, strict=True))
    return _symmetric(grid[1:], one, other, jnp.zeros(()), up=False)
