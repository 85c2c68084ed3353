"""Finite pairs around one epoch, for composition: from certified values of delta on a grid of epsilon.

Proofs: notebooks/proofs/allocation.md, section 9, and notebooks/proofs/shuffle.md, section 11.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp.allocation.bounds import EFFORTS, profile_delta
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import normal_quantiles
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import kernel
from jaxdp.shuffle import rounds

CELL = 8  # neighbouring epsilons that share one contour
POINTS = 1200
_CLOSE = 1e-6  # relative distance of the bounds of delta above which a cell is computed with more nodes


@kernel(static=("points",), working_set=4 * POINTS)
def grid(steps: Any, noise: Any, depth: Any, total: Any, *, points: int = POINTS) -> Any:
    """Epsilons from 0 to where delta is below what a composition sees; a multiple of `CELL`, and 0.

    depth: nats that each epoch contributes to -log delta of the composition. total: -log delta of all.
    """
    s = 1 / noise
    spread = xp.sqrt(xp.expm1(xp.minimum(s * s, 50.0)) / steps)
    nats = xp.sqrt(2 * (total + 25.0))
    cap = xp.maximum(s * s / 2 + s * nats - xp.log(steps), 0.0) + 1.5 * xp.log1p(nats * spread)
    spread = xp.minimum(spread, 0.25 * cap)
    tilt = xp.sqrt(2 * depth)
    third = points // 3
    quantiles = xp.abs(normal_quantiles(third, 3.0) + tilt) * spread
    # an epsilon that one epoch alone may have: larger losses are as rare as delta
    once = xp.maximum(xp.sqrt(2 * total) * (spread + s) + s * s / 2 - xp.log(steps), 1.2 * xp.sqrt(2 * total) * spread)
    once = xp.minimum(once, cap)
    even = once * np.linspace(0.0, 1.0, third + 1)[1:]
    far = spread * 0.05 * (cap / (0.05 * spread)) ** np.linspace(0.0, 1.0, points - 2 * third)
    # cells next to 0 hold enough mass for the errors of their ends
    steps_of = xp.maximum(xp.concatenate([quantiles, even, far]), 0.02 * spread)
    return xp.minimum(xp.sort(steps_of), cap)


@kernel(working_set=32 * POINTS)
def directed(grid: Any, forward: Any, backward: Any) -> tuple[Any, Any, Any, Any]:
    """(losses, log weights, mass at infinity, that of the swap) from upper bounds of both profiles on the grid.

    forward: of the pair of this direction; backward: of its swap, whose masses stand at negative losses.
    """
    raised = [xp.log(each) * (1 - 2 * ULP) + 4 * ULP for each in (forward, backward)]  # log of at most 1
    masses = [rounds.log_upper_masses(grid, logs) for logs in raised]
    logs = xp.concatenate([masses[0] + grid[1:], masses[1]])
    logs = logs + xp.where(logs > -xp.inf, 4 * ULP * (1 + xp.abs(logs)), 0.0)
    losses = xp.concatenate([grid[1:], -grid[1:], xp.zeros(1)])
    # a hundredth more: what masses rounded up to more than 1 in all could add to it in any composition
    infinity, reverse = (xp.minimum(1.01 * xp.min(each), 1.0) for each in (forward, backward))
    rest = 1 - infinity - xp.sum(xp.exp(logs)) + 16 * ULP * losses.shape[0]
    # more finite mass than 1 - infinity would have to be carried into the composed mass at infinity: give up instead
    infinity = xp.where((rest < 0) & (infinity > 0), 1.0, infinity)
    rest = xp.where(rest > 0, xp.log(xp.where(rest > 0, rest, 1.0)), -xp.inf)
    return losses, xp.append(logs, rest), infinity, reverse


def profiles(steps: np.ndarray, noise: np.ndarray, sign: float, epsilon: np.ndarray) -> Bounds:
    """Bounds of delta on grids, rows of increasing epsilons that begin with 0."""
    inner = epsilon[:, 1:]
    cells = np.concatenate([inner.reshape(-1, CELL), np.zeros((epsilon.shape[0], CELL))])
    per_row = inner.shape[1] // CELL
    rows = np.concatenate([np.repeat(np.arange(epsilon.shape[0]), per_row), np.arange(epsilon.shape[0])])
    lower, upper = np.zeros(cells.shape), np.ones(cells.shape)
    todo = np.arange(rows.size)
    for effort in EFFORTS[:2]:
        at = rows[todo]
        found = profile_delta(steps[at], noise[at], np.full(at.shape, sign), cells[todo], effort=effort)
        lower[todo] = np.fmax(lower[todo], found.lower)
        upper[todo] = np.fmin(upper[todo], found.upper)
        todo = todo[np.any(upper[todo] - lower[todo] > _CLOSE * upper[todo], axis=1)]
        if not todo.size:
            break
    count = epsilon.shape[0]
    return Bounds(*(np.concatenate([a[-count:, :1], a[:-count].reshape(count, -1)], axis=1) for a in (lower, upper)))
