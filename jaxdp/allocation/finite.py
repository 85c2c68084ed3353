"""Finite pairs around one epoch, for composition: from certified values of delta on a grid of epsilon.

Proofs: notebooks/proofs/allocation.md, section 9, and notebooks/proofs/shuffle.md, section 11.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp.allocation.bounds import EFFORTS, Effort, profile_log_delta
from jaxdp.interval import Bounds
from jaxdp.numerics.special import normal_quantiles
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle import rounds

CELL = 96
Cells = tuple[tuple[int, Effort], ...]  # how many neighbouring epsilons share a contour, at which effort
COARSE: Cells = ((12, EFFORTS[0]),)  # of the first grid
FINE: Cells = ((CELL, EFFORTS[0]), (12, EFFORTS[0]), (12, EFFORTS[0]._replace(panels=192)))
_CLOSE, _MOST_GAP = 1e-4, 0.1  # gaps of log delta: asked for; from which on more contours are no use
_ALONE = 0.3  # share of points where one epoch alone decides, of those where the tilted bulk is
FIRST, POINTS = CELL, 10 * CELL  # of the grid that finds where the mass is, and of the one that is fine there


def first_grid(steps: Any, noise: Any, total: Any, runs: Any) -> Any:
    """Epsilons from 0 to where delta is below what a composition sees.

    total: -log delta of the composition. runs: how many epochs it has.
    """
    s = 1 / noise
    deviation = xp.sqrt(xp.expm1(xp.minimum(s * s, 50.0)) / steps)
    nats = xp.sqrt(2 * (total + 25.0))
    cap = xp.maximum(s * s / 2 + s * nats - xp.log(steps), 0.0) + 1.5 * xp.log1p(nats * deviation)
    deviation = xp.minimum(deviation, 0.25 * cap)
    third = FIRST // 3
    quantiles = xp.abs(normal_quantiles(third, 3.0) + xp.sqrt(2 * total / xp.maximum(runs, 1.0))) * deviation
    # an epsilon that one epoch alone may have: larger losses are as rare as delta
    once = xp.maximum(
        xp.sqrt(2 * total) * (deviation + s) + s * s / 2 - xp.log(steps), 1.2 * xp.sqrt(2 * total) * deviation
    )
    even = xp.minimum(once, cap) * np.linspace(0.0, 1.0, third)
    far = deviation * 0.05 * (cap / (0.05 * deviation)) ** np.linspace(0.0, 1.0, FIRST - 2 * third)
    return xp.minimum(xp.sort(xp.concatenate([quantiles, even, far])), cap)


def fine_grid(first: Any, logs: Any, z: Any, log_end: Any) -> Any:
    """`rounds.refined`, and beyond its end points for the losses of the swap, which may be larger."""
    grid = rounds.refined(first, logs, z, log_end, points=POINTS - CELL, alone=_ALONE)
    end = xp.maximum(grid[-1], 1e-3 * first[-1])
    return xp.concatenate([grid, xp.maximum(end * (first[-1] / end) ** np.linspace(0.0, 1.0, CELL), grid[-1])])


def upper_pair(grid: Any, forward: Any, backward: Any) -> tuple[Any, Any, Any, Any]:
    """(losses, log weights, mass at infinity, that of the swap) from upper bounds of both log profiles on the grid.

    forward: of the pair of this direction; backward: of its swap, whose masses stand at negative losses.
    """
    mass, turned = (rounds.log_upper_masses(grid, logs) for logs in (forward, backward))
    # a hundredth more: what masses rounded up to more than 1 in all could add to it in any composition
    infinity, reverse = (xp.minimum(1.01 * xp.exp(xp.min(each)), 1.0) for each in (forward, backward))
    return *rounds.joined(grid[1:], mass, turned, infinity, 1.0), reverse


def lower_pair(grid: Any, forward: Bounds, backward: Bounds) -> tuple[Any, Any, Any, Any]:
    """The same four, of a pair whose profile is at most that of the epoch, from bounds of both log profiles."""
    mass, turned = rounds.log_lower_masses(grid, forward, backward)
    return *rounds.joined(grid[1:], mass, turned, xp.zeros(()), -1.0), xp.zeros(())


def log_profiles(
    steps: np.ndarray, noise: np.ndarray, sign: float, epsilon: np.ndarray, least: np.ndarray, cells: Cells
) -> Bounds:
    """Bounds of log delta on grids, rows of nondecreasing epsilons >= 0.

    least: log of a delta, for each row, below which bounds need not be close. cells: the first of
    them, and the next where it is not close to each of its epsilons.
    """
    lower, upper = np.full(epsilon.size, -np.inf), np.zeros(epsilon.size)
    todo = np.arange(epsilon.size)
    for (size, effort), following in zip(cells, (*cells[1:], None), strict=True):
        places = todo.reshape(-1, size)
        rows = places[:, 0] // epsilon.shape[1]
        shared = epsilon.ravel()[places]
        found = profile_log_delta(steps[rows], noise[rows], np.full(rows.shape, sign), shared, effort=effort)
        lower[places] = np.fmax(lower[places], found.lower)
        upper[places] = np.fmin(upper[places], found.upper)
        gap = found.upper - found.lower
        wide = (found.upper > least[rows, None]) & ~(gap <= _CLOSE)
        # where a contour is not close to the epsilon that it was made for, more of the same effort are not either
        more = following is not None and following[1] == effort
        todo = places[np.any(wide, axis=1) & ((gap[:, -1 if sign > 0 else 0] <= _MOST_GAP) | (not more))]
        if not todo.size:
            break
    return Bounds(lower.reshape(epsilon.shape), upper.reshape(epsilon.shape))
