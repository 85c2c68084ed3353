"""The inverse questions: the local epsilon a central target allows, and the number of users it needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.shuffle import checks, door
from jaxdp.shuffle.bounds import clones_bounds

_STEPS = 48
_LARGEST_USERS = 2.0**50


def _within(users, eps0, epsilon, delta, bound):
    return clones_bounds("delta", eps0, users, epsilon, bound).upper <= delta


def local_epsilon_for(central_epsilon: Any, n: Any, delta: Any, *, bound: str = "clones") -> Any:
    """Largest eps0 found whose n shuffled reports are (central_epsilon, delta)-DP.

    Theorem 5.2's question, answered by bisection on the exact pair; the answer itself has passed the certified test,
    and the true maximum is at most 1e-9 relative plus the bound's own gap above it. delta = 1 gives inf, delta = 0
    gives central_epsilon. Arguments broadcast: central_epsilon >= 0, n whole >= 1, delta in [0, 1].
    bound: "clones" or "stronger". Reference: Feldman, McMillan, Talwar 2021, Theorem 5.2.
    Delta rises with eps0: notebooks/proofs/shuffle.md, section 2.
    """
    validate.choice("bound", bound, ("clones", "stronger"))
    epsilon = validate.nonnegative("central_epsilon", central_epsilon)
    users, target = checks.users(n), checks.delta(delta)
    validate.broadcast(central_epsilon=epsilon, n=users, delta=target)

    def solve(epsilon, users, target):
        low = epsilon.copy()  # eps0 = central_epsilon is free of charge
        high = np.minimum(epsilon + np.log(users) + 60.0, np.maximum(epsilon, 300.0))
        for _ in range(_STEPS):
            middle = 0.5 * (low + high)
            good = _within(users, middle, epsilon, target, bound)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        return np.where(target >= 1.0, np.inf, np.where(target == 0, epsilon, low))

    return door.batched(solve, epsilon, users, target)


def num_users_for(central_epsilon: Any, eps0: Any, delta: Any, *, bound: str = "clones") -> Any:
    """Smallest number of users found whose shuffled eps0-DP reports are (central_epsilon, delta)-DP, as float64.

    By bisection on whole numbers; the answer has passed the certified test. inf where 2^50 users are not enough
    (delta = 0 with central_epsilon < eps0). Arguments broadcast: central_epsilon >= 0, eps0 >= 0, delta in [0, 1].
    """
    validate.choice("bound", bound, ("clones", "stronger"))
    epsilon = validate.nonnegative("central_epsilon", central_epsilon)
    local, target = checks.local_epsilon(eps0), checks.delta(delta)
    validate.broadcast(central_epsilon=epsilon, eps0=local, delta=target)

    def solve(epsilon, local, target):
        low, high = np.zeros_like(epsilon), np.full_like(epsilon, _LARGEST_USERS)
        reachable = _within(high, local, epsilon, target, bound)
        for _ in range(_STEPS + 12):
            wide = high > 4.0 * np.maximum(low, 1.0)
            middle = np.where(wide, np.floor(np.sqrt(np.maximum(low, 1.0) * high)), np.floor(0.5 * (low + high)))
            middle = np.clip(middle, 1.0, high)
            good = _within(middle, local, epsilon, target, bound)
            low, high = np.where(good, low, np.minimum(middle, high - 1)), np.where(good, middle, high)
            if (high - low <= 1).all():
                break
        return np.where(reachable, high, np.inf)

    return door.batched(solve, epsilon, local, target)
