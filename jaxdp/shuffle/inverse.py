"""Inverses of the clones bound: the local epsilon that a central guarantee allows, the number of users it needs."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, PROBABILITY, whole
from jaxdp.numerics.roots import bisect
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.formulas import batched
from jaxdp.shuffle.bounds import clones_bounds
from jaxdp.typing import Array, Real

_STEPS = 48  # most iterations of the bisection for eps0; 12 more for the number of users
_LARGEST_USERS = 2.0**50


def _within(users, eps0, epsilon, delta, bound):
    """Whether the certified delta(epsilon) is at most delta, by row; only rows undecided by 13 nodes get more nodes."""
    lower, upper = clones_bounds("delta", eps0, users, epsilon, bound, most=0)
    rows = np.flatnonzero((lower <= delta) & (delta < upper))
    if rows.size:
        upper[rows] = clones_bounds("delta", eps0[rows], users[rows], epsilon[rows], bound).upper
    return upper <= delta


def local_epsilon_for(
    central_epsilon: Real, n: Real, delta: Real, *, bound: Literal["clones", "stronger"] = "clones"
) -> Array:
    """Largest local epsilon eps0 found for which n shuffled eps0-DP reports are (central_epsilon, delta)-DP.

    Bisection on the certified delta of the clones pair. That delta increases with eps0 (notebooks/proofs/shuffle.md,
    section 2).

    Args:
        central_epsilon: in nats, >= 0.
        n: number of reports, a whole number >= 1.
        delta: in [0, 1]; 0 gives central_epsilon, 1 gives inf.
        bound: "clones" or "stronger": the dominating pair of the shuffled reports.

    Returns:
        eps0 in nats, float64, of the broadcast shape. The certified delta at this eps0 is at most delta. This eps0 is
        below the largest one that the pair allows by at most 1e-9 relative plus the width of the pair's own bounds.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Assumes:
        Each report is the output of an eps0-DP local randomizer. The reports are in a uniformly random, secret order.

    Reference:
        Feldman, McMillan, Talwar 2021, the question that Theorem 5.2 answers.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.local_epsilon_for(0.5, 1000, 1e-6):.4f}")
        1.9024

    """
    validate.choice("bound", bound, ("clones", "stronger"))
    arguments = validate.all_inside(
        central_epsilon=(NONNEGATIVE, central_epsilon), n=(whole(1), n), delta=(PROBABILITY, delta)
    )

    def solve(epsilon, users, target):
        most = np.minimum(epsilon + np.log(users) + 60.0, np.maximum(epsilon, 300.0))
        with on_host():  # eps0 = central_epsilon always meets the target
            low, _ = bisect(lambda eps0: ~_within(users, eps0, epsilon, target, bound), epsilon, most, _STEPS)
        return np.where(target >= 1.0, np.inf, np.where(target == 0, epsilon, low))

    return batched(solve, *arguments)


def num_users_for(
    central_epsilon: Real, eps0: Real, delta: Real, *, bound: Literal["clones", "stronger"] = "clones"
) -> Array:
    """Smallest number n of users found for which n shuffled eps0-DP reports are (central_epsilon, delta)-DP.

    Bisection over whole numbers on the certified delta of the clones pair. eps0: local epsilon in nats, >= 0. The other
    arguments, the errors and the assumptions are as for `local_epsilon_for`.

    Returns:
        Number of users, float64, of the broadcast shape. The certified delta at this number is at most delta. inf where
        2^50 users are not enough, for example for delta = 0 with central_epsilon < eps0.

    Example:
        >>> from jaxdp import shuffle
        >>> print(shuffle.num_users_for(0.5, 1.0, 1e-6))
        157.0

    """
    validate.choice("bound", bound, ("clones", "stronger"))
    arguments = validate.all_inside(
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
