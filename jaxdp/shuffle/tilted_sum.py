"""The sum S = X_1 + ... + X_n at one epsilon, and its tilt e^{cS} dP (notebooks/proofs/shuffle.md, section 6)."""

import math
from typing import Any, NamedTuple

from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_one_plus, polynomial
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle.law import Law

_AGREEING = 64 * ULP  # relative difference between two computations of E X that rounding explains
_LARGEST_EXPONENT = 690.0  # largest c x, so that e^{cx} is finite
_LEAST_SPREAD = 0.02  # least c sigma (sigma of the tilted sum) at which the longest period has small aliases
_LEAST_DEVIATION = 1e-12  # least usable sigma, relative to n E|X| under the tilt
_EXP_SERIES = tuple(2 / math.factorial(i + 2) for i in range(15))  # of 2 (e^u - 1 - u)/u^2


def exp_excess(u: Any) -> Any:
    """e^u - 1 - u with a small relative error."""
    small = xp.abs(u) < 0.5
    near = xp.where(small, u, 0.0)
    return xp.where(small, 0.5 * near * near * polynomial(_EXP_SERIES, near), xp.expm1(u) - u)


class Sum(NamedTuple):
    """The sum S of n reports at one epsilon: delta = e^log_factor E[S_+] + certain.

    x: atoms of X, divided by a scale, the largest |X|. mass: masses of the atoms. velocity: -dx/d epsilon. rest: mass
    of X = 0. mean: E X, scaled. log_factor: log(scale / n). certain: delta of the outcomes with base 0. certain_slope:
    d certain/d epsilon. single: delta for one user, an upper bound for every n. users: n. growth: None, or derivatives
    of mass by a parameter other than epsilon; then velocity and certain_slope are derivatives by that parameter too.
    """

    x: Any
    mass: Any
    velocity: Any
    rest: Any
    mean: Any
    log_factor: Any
    certain: Any
    certain_slope: Any
    single: Any
    users: Any
    growth: Any = None


def sum_at(law: Law, users: Any, epsilon: Any) -> Sum:
    """The sum of ``users`` reports with this law, at one epsilon."""
    odds = xp.exp(epsilon)
    live = law.base > 0
    base = xp.where(live, law.base, 1.0)
    excess = xp.where(
        law.loss > 0, law.first * -xp.expm1(epsilon - law.loss), law.second * odds * xp.expm1(law.loss - epsilon)
    )  # R_x - e^eps R_x', without the subtraction
    gives_away = ~live & (excess > 0)
    x = xp.where(live, excess / base, 0.0)
    scale = xp.stop_gradient(xp.maximum(xp.max(xp.abs(x)), NEXT_TO_ZERO))
    # E X in closed form keeps its digits for many users. Where it differs from the sum over atoms by more than rounding
    # of the sum explains (tables with rounded entries), E X is that sum.
    mean = -xp.expm1(epsilon) - xp.sum(xp.where(live, 0.0, excess))
    parts = xp.where(live, excess, 0.0)
    apart = xp.abs(mean - xp.sum(parts)) > _AGREEING * xp.sum(xp.abs(parts))
    return Sum(
        x / scale,
        xp.where(live, law.base, 0.0),
        xp.where(live, odds * law.second / base, 0.0) / scale,
        law.rest,
        xp.where(apart, xp.sum(parts), mean) / scale,
        xp.log(scale / users),
        xp.sum(xp.where(gives_away, excess, 0.0)),
        -xp.sum(xp.where(gives_away, odds * law.second, 0.0)),
        xp.sum(xp.maximum(excess, 0.0)) * (1 + 1e-14 * x.shape[0]),
        users,
    )


def log_moment(s: Sum, c: Any) -> Any:
    """log E e^{cX} at real c of any shape; E X in closed form enters for small c only, for large c it would cancel."""
    u = c[..., None] * s.x
    total = c * s.mean + xp.sum(s.mass * exp_excess(u), axis=-1)
    close = (total > -0.5) & (xp.abs(c * s.mean) < 1)
    return xp.where(close, log_one_plus(xp.where(close, total, 0.0)), xp.log(s.rest + xp.sum(s.mass * xp.exp(u), -1)))


class Tilt(NamedTuple):
    """The sum tilted to c: log E e^{cX}, tilted masses of the atoms and of X = 0, mean and standard deviation of S."""

    c: Any
    log_moment: Any
    weights: Any
    rest: Any
    mean: Any
    deviation: Any


def _tilt(s: Sum, c: Any) -> Tilt:
    moment, u = log_moment(s, c), c * s.x
    weights, rest = s.mass * xp.exp(u - moment), s.rest * xp.exp(-moment)
    mean = (s.mean + xp.sum(s.mass * s.x * xp.expm1(u))) * xp.exp(-moment)
    variance = xp.sum(weights * (s.x - mean) ** 2) + rest * mean * mean
    return Tilt(c, moment, weights, rest, s.users * mean, xp.sqrt(s.users * variance))


def saddle(s: Sum) -> Tilt:
    """The tilt at the c where e^{K(c)}/c^2 is least: c K'(c) = 2. c is found to 1e-3 relative; bounds hold at any c."""
    square = s.users * xp.sum(s.mass * s.x * s.x)
    drift = -s.users * s.mean
    most = _LARGEST_EXPONENT / xp.maximum(xp.max(s.x), NEXT_TO_ZERO)
    start = xp.minimum((drift + xp.sqrt(drift * drift + 8 * square)) / (2 * square), most)

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        c, _, count = state
        t = _tilt(s, c)
        excess = c * t.mean - 2
        rise = excess / xp.maximum(c * t.mean + (c * t.deviation) ** 2, 0.5)
        rise = xp.clip(rise, -1.5, 1.5)
        return xp.minimum(c * xp.exp(-rise), most), xp.abs(rise), count + 1

    def unfinished(state: tuple[Any, Any, Any]) -> Any:
        return (state[1] > 1e-3) & (state[2] < 60)

    c, _, _ = xp.while_loop(unfinished, step, (start, xp.ones_like(start), xp.zeros((), xp.int32)))
    return _tilt(s, xp.stop_gradient(c))


def wider(s: Sum, t: Tilt) -> Tilt:
    """The tilt with c halved until c sigma >= `_LEAST_SPREAD` or c <= 1; a smaller c leaves weight to rare reports."""

    def spread(c: Any) -> tuple[Any, Any]:
        return c, c * _tilt(s, c).deviation

    def narrow(state: tuple[Any, Any]) -> Any:
        return (state[1] < _LEAST_SPREAD) & (state[0] > 1)

    c, _ = xp.while_loop(narrow, lambda state: spread(0.5 * state[0]), (t.c, t.c * t.deviation))
    return _tilt(s, xp.stop_gradient(c))


def known(s: Sum, t: Tilt) -> Tilt:
    """The tilt, with deviation NaN (no bound) where rounding alone may be as large as the deviation."""
    noise = _LEAST_DEVIATION * s.users * xp.sum(t.weights * xp.abs(s.x))
    return t._replace(deviation=xp.where(t.deviation > noise, t.deviation, xp.nan))
