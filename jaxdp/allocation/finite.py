"""Finite pairs that enclose one epoch, for composition, from certified values of delta on a grid of epsilon.

Proofs: notebooks/proofs/allocation.md, section 9, and notebooks/proofs/shuffle.md, section 11.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp.allocation.bounds import EFFORTS, profile_log_delta
from jaxdp.interval import Bounds
from jaxdp.numerics.special import normal_quantiles
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle import rounds

# Efforts of contours that many epsilons share, tried in this order.
SHARED = (EFFORTS[0]._replace(nats=36.0), *EFFORTS)
# A contour is evaluated for 8 to 512 epsilons, filled up to one of three numbers for which programs are compiled.
_FEWEST, _BATCHES = 8, (32, 128, 512)
_CLOSE = 1e-4  # gap of log delta that is small enough where an epsilon matters most
_LARGEST = 1.0  # largest gap of log delta that counts as close
_ANY = 1e3  # allowed gap from which the bounds of every eighth epsilon are enough
_FAR = 30.0  # nats below the largest tilted delta beyond which a mass does not matter
_ALONE = 0.3  # points where one epoch alone decides / points where the tilted mass is
FIRST, POINTS = 96, 1920  # points of the first grid, which locates the mass, and of the grid that is fine there
_BEYOND = 96  # points of the latter beyond the end of the mass


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
    grid = rounds.refined(first, logs, z, log_end, points=POINTS - _BEYOND, alone=_ALONE)
    end = xp.maximum(grid[-1], 1e-3 * first[-1])
    return xp.concatenate([grid, xp.maximum(end * (first[-1] / end) ** np.linspace(0.0, 1.0, _BEYOND), grid[-1])])


def needed(grid: Any, first: Any, logs: Any, turned: Any, z: Any, log_end: Any) -> tuple[tuple[Any, Any], ...]:
    """(allowed, least) of `log_profiles` on the grid, for the pair and for its swap.

    The gaps grow with the distance, in nats, from where the mass of the pair is, from where it is after a tilt by z,
    and from where one rare large loss makes up the composed delta. logs, turned: estimates on the grid ``first``.
    log_end: as for `rounds.refined`.
    """
    known, swapped = (xp.interp(grid, first, xp.maximum(x, -1e300)) for x in (logs, turned))
    tilted, off = known + z * grid, known - (log_end - rounds.LOG_SHARE)
    weight = xp.maximum(xp.maximum(tilted - xp.max(tilted), known - xp.max(known)), xp.minimum(off, -0.5 * off))
    # Near 0 an error must not change the slope by more than a cell does: or the masses would add up to more than 1.
    following = xp.append(grid[1:], grid[-1])
    near = xp.maximum(0.02 * following * (following - grid) * xp.exp(-2 * known[0]), 1e-9)
    near = xp.where(grid < xp.exp(known[0]), near, xp.inf)
    gaps = (_CLOSE * xp.exp(xp.minimum(-x, 50.0)) for x in (weight, swapped - xp.max(swapped)))
    # A mass far right must stay small after a tilt somewhat larger than z.
    least = xp.minimum(log_end, xp.max(tilted) - _FAR - 2 * z * grid), xp.full_like(grid, log_end)
    return tuple((xp.minimum(gap, near), x) for gap, x in zip(gaps, least, strict=True))


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
    steps: np.ndarray, noise: np.ndarray, sign: float, epsilon: np.ndarray, allowed: np.ndarray, least: np.ndarray
) -> Bounds:
    """Bounds of log delta on grids (rows, points) of epsilons >= 0 that do not decrease along a row.

    allowed, least: for each epsilon, a gap of log delta that is small enough, and a log delta below which every upper
    bound is small enough.

    A contour is made for the epsilon with the largest cut that is left, and evaluated for those that follow; where its
    bounds are close they are final. Its tilts are chosen for the epsilon five eighths of the way to the last. What
    cannot be made close waits for the next effort.
    """
    lower, upper = np.full(epsilon.shape, -np.inf), np.zeros(epsilon.shape)
    place = np.arange(epsilon.shape[1])
    waiting = (allowed < _ANY) | (place[::-1] % _FEWEST == 0)
    allowed = np.minimum(allowed, _LARGEST)
    for effort in SHARED:
        left, waiting, size = waiting, np.zeros(epsilon.shape, bool), _BATCHES[-1]
        while np.any(left):
            rows = np.flatnonzero(np.any(left, axis=1))
            # The epsilons that are left, those with the largest cut first; others fill up rows that have fewer.
            order = np.argsort(~left[rows, :: -int(sign)], axis=1, kind="stable")[:, : _BATCHES[-1]]
            following = rows[:, None], order if sign < 0 else place[-1] - order
            at = rows[:, None], following[1][:, :size]
            live = left[at]
            count = live.shape[1]
            batch = next(x for x in _BATCHES if x >= count)
            start = 5 * (batch - count) // 8
            shared = np.where(live, epsilon[at], epsilon[at][:, :1])
            shared = np.pad(shared, ((0, 0), (start, batch - count - start)), mode="edge")
            # Closed forms take long for many epsilons.
            now = effort._replace(closed=batch < _BATCHES[-1])
            found = profile_log_delta(steps[rows], noise[rows], np.full(rows.shape, sign), shared, effort=now)
            low, high = (side[:, start : start + count] for side in found)
            lower[at] = np.where(live, np.fmax(lower[at], low), lower[at])
            upper[at] = np.where(live, np.fmin(upper[at], high), upper[at])
            close = live & ((upper[at] - lower[at] <= allowed[at]) | (upper[at] <= least[at]))
            left[at] &= ~close
            poor = ~close[:, :1]
            if size == _FEWEST:
                # A contour that is poor at its own epsilon says that many others of this effort are poor, too.
                many = _FEWEST if effort == SHARED[-1] else _BATCHES[-1]
                given_up = left[following] & (np.arange(order.shape[1]) < np.where(poor, many, _FEWEST))
                waiting[following] |= given_up
                left[following] &= ~given_up
            wanted = 0.25 * size if np.any(poor) else 1.5 * np.max(np.sum(close, axis=1))
            size = int(np.clip(2 ** np.ceil(np.log2(wanted)), _FEWEST, _BATCHES[-1]))
    return Bounds(lower, _between_close(epsilon, upper, upper - lower <= allowed))


def _between_close(epsilon: np.ndarray, upper: np.ndarray, close: np.ndarray) -> np.ndarray:
    """The upper bounds, lowered to chords of the close ones: no steep cell may stand between two of these."""
    place = np.arange(epsilon.shape[1])
    left = np.maximum.accumulate(np.where(close, place, -1), axis=1)
    right = np.minimum.accumulate(np.where(close, place, place.size)[:, ::-1], axis=1)[:, ::-1]
    held = (left >= 0) & (right < place.size)
    return rounds.by_rows(rounds.lowered, epsilon, upper, np.where(held, left, place), np.where(held, right, place))
