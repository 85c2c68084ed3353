"""The inverse questions: the local epsilon that a central target allows, and the number of users that it needs."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, PROBABILITY, whole
from jaxdp.runtime.formulas import batched, checked
from jaxdp.shuffle.bounds import clones_bounds
from jaxdp.typing import Array, Real

_STEPS = 48
_LARGEST_USERS = 2.0**50


def _within(users, eps0, epsilon, delta, bound):
    """Rows whose certified delta is at most the target; the long sums only where 13 nodes leave that open."""
    lower, upper = clones_bounds("delta", eps0, users, epsilon, bound, most=0)
    rows = np.flatnonzero((lower <= delta) & (delta < upper))
    if rows.size:
        upper[rows] = clones_bounds("delta", eps0[rows], users[rows], epsilon[rows], bound).upper
    return upper <= delta


def local_epsilon_for(
    central_epsilon: Real, n: Real, delta: Real, *, bound: Literal["clones", "stronger"] = "clones"
) -> Array:
    """Largest local epsilon eps0 found whose n shuffled reports are (central_epsilon, delta)-DP.

    Bisection on the certified delta of the clones pair, which increases with eps0 (notebooks/proofs/shuffle.md,
    section 2).

    Args:
        central_epsilon: in nats, >= 0.
        n: number of reports, whole, >= 1.
        delta: in [0, 1]; 0 gives central_epsilon, 1 gives inf.
        bound: "clones" or "stronger": the pair that bounds the shuffled reports.

    Returns:
        eps0 in nats of the broadcast shape, float64. The value returned has passed the certified test. It lies below
        the largest eps0 that this pair allows by at most 1e-9 relative plus the width of the pair's own bounds.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Assumes:
        Each report is the output of an eps0-DP local randomizer; the order of the reports is uniform and secret.

    Reference:
        Feldman, McMillan, Talwar 2021, the question of Theorem 5.2.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.local_epsilon_for(0.5, 1000, 1e-6):.4f}")
        1.9024

    """
    validate.choice("bound", bound, ("clones", "stronger"))
    validate.concrete("every number", central_epsilon, n, delta)
    arguments = checked(central_epsilon=(NONNEGATIVE, central_epsilon), n=(whole(1), n), delta=(PROBABILITY, delta))

    def solve(epsilon, users, target):
        low = epsilon.copy()  # eps0 = central_epsilon always meets the target
        high = np.minimum(epsilon + np.log(users) + 60.0, np.maximum(epsilon, 300.0))
        for _ in range(_STEPS):
            middle = 0.5 * (low + high)
            good = _within(users, middle, epsilon, target, bound)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        return np.where(target >= 1.0, np.inf, np.where(target == 0, epsilon, low))

    return batched(solve, *arguments)


def num_users_for(
    central_epsilon: Real, eps0: Real, delta: Real, *, bound: Literal["clones", "stronger"] = "clones"
) -> Array:
    """Smallest number of users found whose shuffled eps0-DP reports are (central_epsilon, delta)-DP.

    Bisection on whole numbers with the certified delta of the clones pair. eps0: local epsilon in nats, >= 0. The other
    arguments, errors and what is assumed are those of `local_epsilon_for`.

    Returns:
        Number of users of the broadcast shape, float64, which has passed the certified test; inf where 2^50 users are
        not enough (delta = 0 with central_epsilon < eps0).

    Example:
        >>> from jaxdp import shuffle
        >>> print(shuffle.num_users_for(0.5, 1.0, 1e-6))
        157.0

    """
    validate.choice("bound", bound, ("clones", "stronger"))
    validate.concrete("every number", central_epsilon, eps0, delta)
    arguments = checked(
        central_epsilon=(NONNEGATIVE, central_epsilon), eps0=(NONNEGATIVE, eps0), delta=(PROBABILITY, delta)
    )

    def solve(epsilon, local, target):
        low, high = np.zeros_like(epsilon), np.full_like(epsilon, _LARGEST_USERS)
        possible = _within(high, local, epsilon, target, bound)
        for _ in range(_STEPS + 12):
            wide = high > 4.0 * np.maximum(low, 1.0)
            middle = np.maximum(np.floor(np.where(wide, np.sqrt(np.maximum(low, 1.0) * high), 0.5 * (low + high))), 1.0)
            good = _within(middle, local, epsilon, target, bound)
            low, high = np.where(good, low, np.minimum(middle, high - 1)), np.where(good, middle, high)
            if (high - low <= 1).all():
                break
        return np.where(possible, high, np.inf)

    return batched(solve, *arguments)
