"""Published bounds for comparison plots: privacy blanket, Erlingsson et al., Cheu et al., Girgis et al.

Formulas as published (constants partly from the authors' code); use `jaxdp.Shuffled` for guarantees. Where a
theorem's condition fails the answer is eps0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.shuffle import checks, door

_STEPS = 60


def _generic(eps0, epsilon, _):
    local, central = np.exp(eps0), np.exp(epsilon)
    mass = np.exp(-eps0)
    span = (central + 1.0) * (local - mass)
    top = local * -np.expm1(epsilon - 2.0 * eps0)
    moment = local * (central**2 + 1.0) - 2.0 * mass * np.exp(epsilon - 2.0 * eps0)
    return mass, span, top, moment


def _krr(eps0, epsilon, k):
    central = np.exp(epsilon)
    mass = k / (np.exp(eps0) + k - 1.0)
    span = (1.0 - mass) * k * (central + 1.0)
    top = mass * (1.0 - central) + (1.0 - mass) * k
    moment = mass * (2.0 - mass) * (central - 1.0) ** 2 + (1.0 - mass) ** 2 * k * (central**2 + 1.0)
    return mass, span, top, moment


def _laplace(eps0, epsilon, _):
    central, half = np.exp(epsilon), np.exp(eps0 / 2.0)
    mass = 1.0 / half
    span = (central + 1.0) * (half - 1.0 / half)
    top = half * -np.expm1(epsilon - eps0)
    moment = (central**2 + 1.0) / 3.0 * (2.0 * half + np.exp(-eps0)) - 2.0 * central * (2.0 / half - np.exp(-eps0))
    return mass, span, top, moment


_RANDOMIZERS: dict[str, Callable] = {"generic": _generic, "krr": _krr, "laplace": _laplace}


def _hoeffding(eps0, users, epsilon, constants):
    mass, span, _, _ = constants
    gap = np.expm1(epsilon)
    log_power = users * np.log1p(-mass * -np.expm1(-2.0 * gap**2 / span**2))
    return 2.0 * np.log(span) - np.log(4.0 * gap * mass * users) + log_power


def _bennett(eps0, users, epsilon, constants):
    mass, _, top, moment = constants
    ratio = np.expm1(epsilon) * top / moment
    shape = (1.0 + ratio) * np.log1p(ratio) - ratio
    # The expectation over the blanket count is a generating function, so no sum is needed; its term m = 0, not part
    # of the theorem, is left in and makes the value larger.
    log_power = users * np.log1p(-mass * -np.expm1(-shape * moment / top**2))
    return np.log(top) - np.log(np.log1p(ratio) * mass * users) + log_power


def _blanket(log_delta: Callable, eps0, n, delta, randomizer: str, k) -> Any:
    validate.choice("randomizer", randomizer, tuple(_RANDOMIZERS))
    local, users, target = checks.target(eps0, n, delta)
    kinds = checks.categories(2 if k is None else k)
    if randomizer == "krr" and k is None:
        raise ValueError("k must be given for randomizer 'krr': a whole number >= 2.")
    validate.broadcast(eps0=local, n=users, delta=target, k=kinds)

    def solve(local, users, target, kinds):
        low, high = np.zeros_like(local), local.copy()
        with np.errstate(all="ignore"):
            for _ in range(_STEPS):
                middle = 0.5 * (low + high)
                value = log_delta(local, users, middle, _RANDOMIZERS[randomizer](local, middle, kinds))
                good = value <= np.log(target)
                low, high = np.where(good, low, middle), np.where(good, middle, high)
        return np.where(target >= 1, 0.0, high)

    return door.batched(solve, local, users, target, kinds)


def blanket_hoeffding(eps0: Any, n: Any, delta: Any, *, randomizer: str = "generic", k: Any = None) -> Any:
    """Epsilon at delta by the privacy blanket with Hoeffding's inequality; never above eps0.

    randomizer: "generic", "krr" (with k categories) or "laplace" (values in [0, 1]). Arguments broadcast, float64 out.
    Reference: Balle, Bell, Gascon, Nissim 2019.
    """
    return _blanket(_hoeffding, eps0, n, delta, randomizer, k)


def blanket_bennett(eps0: Any, n: Any, delta: Any, *, randomizer: str = "generic", k: Any = None) -> Any:
    """Epsilon at delta by the privacy blanket with Bennett's inequality; never above eps0. See `blanket_hoeffding`."""
    return _blanket(_bennett, eps0, n, delta, randomizer, k)


def erlingsson_2019(eps0: Any, n: Any, delta: Any) -> Any:
    """Epsilon 12 eps0 sqrt(log(1/delta)/n) for eps0 <= 1/2, n >= 1000, delta <= 0.01, else eps0.

    Arguments broadcast, float64 out. Reference: Erlingsson et al. 2019 (constant from memory of the publication).
    """

    def value(local, users, target):
        holds = (local <= 0.5) & (users >= 1000) & (target <= 0.01) & (target > 0)
        log_term = -np.log(np.where(target > 0, target, 0.5))
        return np.where(holds, np.minimum(12.0 * local * np.sqrt(log_term / users), local), local)

    return door.batched(value, *checks.target(eps0, n, delta))


def cheu_2019(eps0: Any, n: Any, delta: Any) -> Any:
    """Epsilon of shuffled two-point randomized response: sqrt(32 log(4/delta)/w) (1 - w/n), else eps0.

    w = y - sqrt(2 y log(2/delta)), y = 2n/(E0+1), under y >= 14 log(4/delta). Arguments broadcast, float64 out.
    Reference: Cheu, Smith, Ullman, Zeber, Zhilyaev 2019 (constants from memory of the publication).
    """

    def value(local, users, target):
        positive = np.where(target > 0, target, 0.5)
        blanket = 2.0 * users * np.exp(-local) / (1.0 + np.exp(-local))
        holds = (blanket >= 14.0 * np.log(4.0 / positive)) & (target > 0)
        sure = np.where(holds, blanket - np.sqrt(2.0 * blanket * np.log(2.0 / positive)), 1.0)
        value = np.sqrt(32.0 * np.log(4.0 / positive) / sure) * (1.0 - sure / users)
        return np.where(holds, np.minimum(value, local), local)

    return door.batched(value, *checks.target(eps0, n, delta))


def girgis_2021_renyi(order: Any, eps0: Any, n: Any) -> Any:
    """Renyi divergence bound of whole order >= 2 of n shuffled eps0-DP reports, at most eps0.

    Arguments broadcast, float64 out; the sum of the theorem runs over 3..order in one array.
    Reference: Girgis et al. 2021, Theorem 1 (constants from memory of the publication).
    """
    whole = validate.integer("order", order, 2)
    local, users = checks.local_epsilon(eps0), checks.users(n)
    validate.broadcast(order=whole, eps0=local, n=users)
    most = int(whole.max(initial=2))
    log_factorial = np.array([math.lgamma(i + 1) for i in range(most + 1)])
    log_half_gamma = np.array([math.lgamma(i / 2) if i else 0.0 for i in range(most + 1)])

    def value(whole, local, users):
        index = whole.astype(int)
        blocks = np.floor((users - 1.0) * np.exp(-local) / 2.0) + 1.0
        gap = 2.0 * (local + np.log(np.maximum(-np.expm1(-local), 1e-300)))
        second = np.log(whole * (whole - 1.0) / 2.0) + gap - np.log(blocks) - local
        rest = np.exp(np.minimum(local, 700.0)) * 0.0 + local * whole - (users - 1.0) * np.exp(-local) / 8.0
        total = np.logaddexp(np.logaddexp(0.0, second), rest)
        base = 2.0 * (local + np.log(np.maximum(-np.expm1(-2.0 * local), 1e-300))) - math.log(2.0) - np.log(blocks)
        for i in range(3, most + 1):
            binomial = log_factorial[index] - log_factorial[i] - log_factorial[np.maximum(index - i, 0)]
            term = binomial + math.log(i) + log_half_gamma[i] + 0.5 * i * base
            total = np.where(i <= index, np.logaddexp(total, term), total)
        return np.minimum(total / (whole - 1.0), local)

    return door.batched(value, whole, local, users)
