r"""E[(X_1 + ... + X_n)_+] of a law with two outcomes and rest 0, from one binomial tail; exact up to rounding.

Outcome t has X_t > 0 and probability w; the other outcome has X_b < 0. Let B ~ Bin(n-1, w), o the least number of
reports of outcome t that makes the sum positive, b = P[B = o-1], R = P[B >= o]/b. Then

    (1/n) E[(X_1 + ... + X_n)_+] = b (w X_t + R E X).

Shuffled two-point randomized response has such a law. No bound for all eps0-DP randomizers can be below its delta
(Feldman, McMillan, Talwar 2021, Appendix G). Proof: notebooks/proofs/shuffle.md, section 3.
"""

from typing import Any

import numpy as np

from jaxdp.numerics.roots import Evaluation
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log1p_excess, log_binomial_pmf
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import sum_at

_NODES = 32  # of the Gauss-Legendre rule
_EXPONENT = 38.0  # nats; the integral is cut off where the integrand is e^-38 = 3e-17
ROUNDING_ERROR = 1e-11  # absolute error of the log of a binomial probability with exact parameters; 9e-13 measured
PARAMETER_ERROR = 16 * ULP  # relative error of w, 1 - w and their products with the number of users
_TERM_ROUNDING = 2e-12  # relative error of the two terms w X_t and R E X
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(_NODES)


def tail_ratio(x: Any, trials: Any, odds: Any, tightenings: int = 40) -> Any:
    """P[Bin(N, w) >= x]/P[Bin(N, w) = x-1] for x above the mean, odds = w/(1-w); relative error about 1e-12.

    The ratio is (N-x+1) odds int_0^1 (1-s)^{x-1} (1 + odds s)^{N-x} ds. The log of the integrand is concave and at most
    -fall s - ones s^2/2. Beyond the s where it is -38 lies less than e^-38 of the integral. Newton's method finds this
    s from the right, in at most ``tightenings`` steps; it stops when a step is below 1%. For odds <= 1 the zero of the
    quadratic bound (tightenings = 0) is close enough. x and trials (N) may have any shape; odds is a scalar.
    """
    x, trials = x[..., None], trials[..., None]
    ones, zeros = xp.maximum(x - 1.0, 0.0), xp.maximum(trials - x, 0.0)
    fall = ones - zeros * odds  # may be negative where x is the first count above the mean

    def exponent(s: Any) -> Any:
        # ones log(1-s) + zeros log(1 + odds s), with the linear parts combined because they nearly cancel: the plain
        # form is off by 1e-9 at n = 1e8.
        falling = xp.optimization_barrier(ones * log1p_excess(-s))
        rising = xp.optimization_barrier(zeros * log1p_excess(odds * s))
        return falling + rising - fall * s

    start = xp.minimum(2.0 * _EXPONENT / (fall + xp.sqrt(fall * fall + 2.0 * _EXPONENT * ones) + 1e-300), 1.0 - 1e-12)

    def newton(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        s, _, left = state
        slope = -ones / (1.0 - s) + zeros * odds / (1.0 + odds * s)
        excess = exponent(s) + _EXPONENT
        following = xp.clip(s - excess / xp.where(slope < 0, slope, -1.0), 0.0, s)
        following = xp.where((slope < 0) & (excess < 0), following, s)
        return following, s - following, left - 1

    def moves(state: tuple[Any, Any, Any]) -> Any:
        return xp.any(state[1] > 0.01 * xp.minimum(state[0], 1.0 - state[0])) & (state[2] > 0)

    end = start
    if tightenings:
        end, _, _ = xp.while_loop(moves, newton, (start, start, xp.asarray(tightenings)))
    end = xp.where(exponent(start) > -_EXPONENT, xp.where(start >= 1.0 - 2e-12, 1.0, start), end)
    s = end * (_POINTS + 1.0) / 2.0
    integral = xp.exact_matmul(xp.exp(exponent(s)), xp.asarray(_WEIGHTS)) * end[..., 0] / 2.0
    return xp.maximum(trials - x + 1.0, 0.0)[..., 0] * odds * integral


def evaluate(law: Law, users: Any, epsilon: Any) -> Evaluation:
    """Bounds of log delta(epsilon) of a law with two outcomes and rest 0."""
    s = sum_at(law, users, epsilon)
    top = xp.argmax(s.x)
    (w, x, velocity), (one_minus_w, below, velocity_below) = (
        [a[i] for a in (s.mass, s.x, s.velocity)] for i in (top, 1 - top)
    )
    trials = users - 1.0
    least = xp.clip(xp.floor(users * (-below / (x - below))) + 1.0, 1.0, users)
    log_mass = log_binomial_pmf(least - 1.0, trials, w, one_minus_w)
    ratio = tail_ratio(least, trials, w / one_minus_w)
    gain, loss = w * x, -s.mean
    # To first order d log P[Bin(N, w) = k] = (k - N w) (dw/w - d(1-w)/(1-w)).
    rounding = ROUNDING_ERROR + PARAMETER_ERROR * xp.abs(least - 1.0 - trials * w)
    slack = _TERM_ROUNDING * (gain + loss * ratio)
    net = xp.maximum(gain - loss * ratio, 0.0)
    scale = s.log_factor + xp.log(users) + log_mass
    upper = scale + xp.log(net + slack) + rounding
    lower = scale + xp.log(xp.maximum(net - slack, 0.0)) - rounding
    fall = w * velocity * (1 + ratio) + one_minus_w * velocity_below * ratio
    slope = -xp.exp(xp.minimum(scale + xp.log(fall) - upper, 600.0))
    return Evaluation(xp.minimum(upper, 0.0), xp.minimum(lower, 0.0), upper, slope)
