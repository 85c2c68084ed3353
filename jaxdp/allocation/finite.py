"""Finite pairs that enclose one epoch, for composition, from certified values of delta on a grid of epsilon.

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

CELL = 96  # largest number of neighbouring epsilons that share a contour
Cells = tuple[tuple[int, Effort], ...]  # (number of epsilons that share a contour, effort), tried in this order
COARSE: Cells = ((12, EFFORTS[0]),)  # for the first grid
FINE: Cells = ((CELL, EFFORTS[0]), (12, EFFORTS[0]), (12, EFFORTS[0]._replace(panels=192)), (12, EFFORTS[1]))
_CLOSE, _MOST_GAP = 1e-4, 0.1  # gap of log delta that is small enough, and beyond which another contour is no use
_ALONE = 0.3  # points where one epoch alone decides / points where the tilted mass is
FIRST, POINTS = CELL, 10 * CELL  # points of the first grid, which locates the mass, and of the grid that is fine there


def first_grid(steps: Any, noise: Any, total: Any, runs: Any) -> Any:
    """Increasing epsilons from 0 to where the delta of an epoch is negligible in the composition.

    total: -log delta of the composition. runs: number of its epochs.
    """
    s = 1 / noise
    deviation = xp.sqrt(xp.expm1(xp.minimum(s * s, 50.0)) / steps)
    nats = xp.sqrt(2 * (total + 25.0))
    cap = xp.maximum(s * s / 2 + s * nats - xp.log(steps), 0.0) + 1.5 * xp.log1p(nats * deviation)
    deviation = xp.minimum(deviation, 0.25 * cap)
    third = FIRST // 3
    quantiles = xp.abs(normal_quantiles(third, 3.0) + xp.sqrt(2 * total / xp.maximum(runs, 1.0))) * deviation
    # Loss of one epoch that is exceeded about as rarely as delta.
    rare_loss = xp.maximum(
        xp.sqrt(2 * total) * (deviation + s) + s * s / 2 - xp.log(steps), 1.2 * xp.sqrt(2 * total) * deviation
    )
    even = xp.minimum(rare_loss, cap) * np.linspace(0.0, 1.0, third)
    far = deviation * 0.05 * (cap / (0.05 * deviation)) ** np.linspace(0.0, 1.0, FIRST - 2 * third)
    return xp.minimum(xp.sort(xp.concatenate([quantiles, even, far])), cap)


def fine_grid(first: Any, logs: Any, z: Any, log_end: Any) -> Any:
    """The grid `rounds.refined`, continued beyond its end for the losses of the swapped pair, which may be larger."""
    grid = rounds.refined(first, logs, z, log_end, points=POINTS - CELL, alone=_ALONE)
    end = xp.maximum(grid[-1], 1e-3 * first[-1])
    return xp.concatenate([grid, xp.maximum(end * (first[-1] / end) ** np.linspace(0.0, 1.0, CELL), grid[-1])])


def upper_pair(grid: Any, forward: Any, backward: Any) -> tuple[Any, Any, Any, Any]:
    """(losses, log masses, mass at infinity, mass at infinity of the swap) of a finite pair that dominates the epoch.

    forward, backward: upper bounds of log delta on the grid, of the pair and of its swap. The masses of the swap belong
    to negative losses.
    """
    mass, swapped = (rounds.log_upper_masses(grid, logs) for logs in (forward, backward))
    # 1% more: covers finite masses whose rounded sum exceeds 1, in every composition.
    infinity, reverse = (xp.minimum(1.01 * xp.exp(xp.min(side)), 1.0) for side in (forward, backward))
    return *rounds.joined(grid[1:], mass, swapped, infinity, 1.0), reverse


def lower_pair(grid: Any, forward: Bounds, backward: Bounds) -> tuple[Any, Any, Any, Any]:
    """As `upper_pair`, for a finite pair that the epoch dominates. forward, backward: bounds of both log profiles."""
    mass, swapped = rounds.log_lower_masses(grid, forward, backward)
    return *rounds.joined(grid[1:], mass, swapped, xp.zeros(()), -1.0), xp.zeros(())


def log_profiles(
    steps: np.ndarray, noise: np.ndarray, sign: float, epsilon: np.ndarray, least: np.ndarray, cells: Cells
) -> Bounds:
    """Bounds of log delta on grids (rows, points) of epsilons >= 0 that do not decrease along a row.

    least: for each row, the log delta below which bounds need not be close. cells: the first entry is used everywhere,
    each next entry where the bounds are not yet close.
    """
    lower, upper = np.full(epsilon.size, -np.inf), np.zeros(epsilon.size)
    pending, skipped = np.arange(epsilon.size), np.zeros(0, int)
    for (size, effort), next_cell in zip(cells, (*cells[1:], None), strict=True):
        places = pending.reshape(-1, size)
        rows = places[:, 0] // epsilon.shape[1]
        shared = epsilon.ravel()[places]
        found = profile_log_delta(steps[rows], noise[rows], np.full(rows.shape, sign), shared, effort=effort)
        lower[places] = np.fmax(lower[places], found.lower)
        upper[places] = np.fmin(upper[places], found.upper)
        gap = found.upper - found.lower
        wide = (found.upper > least[rows, None]) & ~(gap <= _CLOSE)
        retried = np.any(wide, axis=1)
        pending, poor = places[retried], ~(gap[retried, -1 if sign > 0 else 0] <= _MOST_GAP)
        # If a contour is poor at its own epsilon, further contours of the same effort are poor too: wait for the next.
        same_effort = next_cell is not None and next_cell[1] == effort
        skipped = np.append(skipped, pending[poor & same_effort])
        pending = pending[~(poor & same_effort)].ravel()
        if not same_effort:
            pending, skipped = np.append(pending, skipped), skipped[:0]
        if not pending.size and not skipped.size:
            break
    return Bounds(lower.reshape(epsilon.shape), upper.reshape(epsilon.shape))
