"""Published bounds for comparison plots: privacy blanket, Erlingsson et al., Cheu et al., Girgis et al.

The formulas are those of the publications; some constants come from the authors' code. Rounding errors are not added,
so use `jaxdp.Shuffled` for guarantees. Where the condition of a theorem fails the result is eps0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, Domain, whole
from jaxdp.numerics.roots import bisect
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.formulas import batched
from jaxdp.shuffle.closed_form import reports
from jaxdp.typing import Array, Real

_STEPS = 60  # halvings of the interval for epsilon
_GIRGIS_ORDER = Domain(
    lambda x: whole(2).contains(x) & (x <= 1e5),
    "a whole number from 2 to 100,000",
    3.0,
    "The bound has as many terms.",
)

Randomizer: TypeAlias = Literal["generic", "krr", "laplace"]


# Each function returns the blanket's mass, the range (max - min) of X, its maximum and its second moment. The last
# three are scaled as the formulas below expect.
def _generic(eps0, epsilon, _):
    local, central, mass = np.exp(eps0), np.exp(epsilon), np.exp(-eps0)
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


def _hoeffding(users, epsilon, mass, span, _top, _moment):
    gap = np.expm1(epsilon)
    log_power = users * np.log1p(-mass * -np.expm1(-2.0 * gap**2 / span**2))
    return 2.0 * np.log(span) - np.log(4.0 * gap * mass * users) + log_power


def _bennett(users, epsilon, mass, _span, top, moment):
    ratio = np.expm1(epsilon) * top / moment
    shape = (1.0 + ratio) * np.log1p(ratio) - ratio
    # The mean over the number of blanket reports is a generating function in closed form. It includes the term of 0
    # reports, which the theorem leaves out, so the value is a little larger than the theorem's.
    log_power = users * np.log1p(-mass * -np.expm1(-shape * moment / top**2))
    return np.log(top) - np.log(np.log1p(ratio) * mass * users) + log_power


def _blanket(log_delta: Callable, eps0: Real, n: Real, delta: Real, randomizer: str, k: Real | None) -> Array:
    validate.choice("randomizer", randomizer, tuple(_RANDOMIZERS))
    arguments = validate.all_inside(**reports(eps0, n, delta), k=(whole(2), 2 if k is None else k))
    if randomizer == "krr" and k is None:
        raise ValueError("k must be given for randomizer 'krr': a whole number >= 2.")

    def solve(local, users, target, kinds):
        def holds(epsilon):
            return log_delta(users, epsilon, *_RANDOMIZERS[randomizer](local, epsilon, kinds)) <= np.log(target)

        with on_host():
            _, epsilon = bisect(holds, np.zeros_like(local), local, _STEPS)
        return np.where(target >= 1, 0.0, epsilon)

    return batched(solve, *arguments)


def blanket_hoeffding(
    eps0: Real, n: Real, delta: Real, *, randomizer: Randomizer = "generic", k: Real | None = None
) -> Array:
    """Central epsilon at delta of n shuffled reports, by the privacy blanket with Hoeffding's inequality.

    Args:
        eps0: local epsilon in nats, >= 0.
        n: number of reports, a whole number >= 1.
        delta: in [0, 1].
        randomizer: "generic" (any eps0-DP randomizer), "krr" (k-ary randomized response) or "laplace" (a number in
            [0, 1] plus Laplace noise).
        k: number of categories for "krr", a whole number >= 2.

    Returns:
        Epsilon in nats, float64, of the broadcast shape, at most eps0. Rounding errors are not added.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Reference:
        Balle, Bell, Gascon, Nissim 2019.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.blanket_hoeffding(1.0, 10_000, 1e-6):.4f}")
        0.1666

    """
    return _blanket(_hoeffding, eps0, n, delta, randomizer, k)


def blanket_bennett(
    eps0: Real, n: Real, delta: Real, *, randomizer: Randomizer = "generic", k: Real | None = None
) -> Array:
    """Central epsilon at delta of n shuffled reports, by the privacy blanket with Bennett's inequality.

    Arguments, result and errors are as for `blanket_hoeffding`.

    Reference:
        Balle, Bell, Gascon, Nissim 2019.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.blanket_bennett(1.0, 10_000, 1e-6):.4f}")
        0.1662

    """
    return _blanket(_bennett, eps0, n, delta, randomizer, k)


def erlingsson_2019(eps0: Real, n: Real, delta: Real) -> Array:
    """Central epsilon 12 eps0 sqrt(log(1/delta)/n) of n shuffled eps0-DP reports.

    The formula holds for eps0 <= 1/2, n >= 1000, delta <= 0.01; elsewhere the result is eps0.

    Arguments, result and errors are as for `blanket_hoeffding`.

    Reference:
        Erlingsson, Feldman, Mironov, Raghunathan, Talwar, Thakurta 2019. The constant 12 was not checked against the
        printed text.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.erlingsson_2019(0.5, 10_000, 1e-6):.4f}")
        0.2230

    """

    def value(local, users, target):
        holds = (local <= 0.5) & (users >= 1000) & (target <= 0.01) & (target > 0)
        log_term = -np.log(np.where(target > 0, target, 0.5))
        return np.where(holds, np.minimum(12.0 * local * np.sqrt(log_term / users), local), local)

    return batched(value, *validate.all_inside(**reports(eps0, n, delta)))


def cheu_2019(eps0: Real, n: Real, delta: Real) -> Array:
    """Central epsilon sqrt(32 log(4/delta)/w) (1 - w/n) of n shuffled two-point randomized responses.

    w = y - sqrt(2 y log(2/delta)), y = 2n/(e^eps0+1). This holds for y >= 14 log(4/delta); elsewhere the result is
    eps0. Arguments, result and errors are as for `blanket_hoeffding`.

    Reference:
        Cheu, Smith, Ullman, Zeber, Zhilyaev 2019. The constants were not checked against the printed text.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.cheu_2019(2.0, 10_000, 1e-6):.4f}")
        0.3773

    """

    def value(local, users, target):
        positive = np.where(target > 0, target, 0.5)
        blanket = 2.0 * users * np.exp(-local) / (1.0 + np.exp(-local))
        holds = (blanket >= 14.0 * np.log(4.0 / positive)) & (target > 0)
        sure = np.where(holds, blanket - np.sqrt(2.0 * blanket * np.log(2.0 / positive)), 1.0)
        value = np.sqrt(32.0 * np.log(4.0 / positive) / sure) * (1.0 - sure / users)
        return np.where(holds, np.minimum(value, local), local)

    return batched(value, *validate.all_inside(**reports(eps0, n, delta)))


def girgis_2021_renyi(order: Real, eps0: Real, n: Real) -> Array:
    """Upper bound of the Renyi divergence of n shuffled eps0-DP reports at a whole order >= 2.

    Args:
        order: alpha, a whole number from 2 to 100,000. The theorem sums over 3..alpha, so time grows with alpha.
        eps0: local epsilon in nats, >= 0.
        n: number of reports, a whole number >= 1.

    Returns:
        Bound in nats, float64, of the broadcast shape, at most eps0. Rounding errors are not added.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Reference:
        Girgis, Data, Diggavi, Suresh, Kairouz 2021, Theorem 1. The constants were not checked against the printed text.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.girgis_2021_renyi(2, 1.0, 10_000):.2e}")
        5.90e-04

    """
    arguments = validate.all_inside(order=(_GIRGIS_ORDER, order), eps0=(NONNEGATIVE, eps0), n=(whole(1), n))

    def value(alpha, local, users):
        most = int(alpha.max(initial=2))
        log_factorial = np.array([math.lgamma(i + 1) for i in range(most + 1)])
        log_half_gamma = np.array([math.lgamma(i / 2) if i else 0.0 for i in range(most + 1)])
        index = alpha.astype(int)
        blocks = np.floor((users - 1.0) * np.exp(-local) / 2.0) + 1.0
        gap = 2.0 * (local + np.log(np.maximum(-np.expm1(-local), 1e-300)))
        second = np.log(alpha * (alpha - 1.0) / 2.0) + gap - np.log(blocks) - local
        rest = local * alpha - (users - 1.0) * np.exp(-local) / 8.0
        total = np.logaddexp(np.logaddexp(0.0, second), rest)
        base = 2.0 * (local + np.log(np.maximum(-np.expm1(-2.0 * local), 1e-300))) - math.log(2.0) - np.log(blocks)
        for i in range(3, most + 1):
            binomial = log_factorial[index] - log_factorial[i] - log_factorial[np.maximum(index - i, 0)]
            term = binomial + math.log(i) + log_half_gamma[i] + 0.5 * i * base
            total = np.where(i <= index, np.logaddexp(total, term), total)
        return np.minimum(total / (alpha - 1.0), local)

    return batched(value, *arguments)
