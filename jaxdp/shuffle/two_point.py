r"""E[(X_1 + ... + X_n)_+] of a law with two outcomes and nothing else: one tail of a binomial, exact to rounding.

Outcome t has X_t > 0 and probability w, the other one X_b < 0. With B ~ Bin(n-1, w), o the least number of reports of
outcome t that makes the sum positive, b = P[B = o-1], R = P[B >= o]/b:

    (1/n) E[(X_1 + ... + X_n)_+] = b (w X_t + R E X).

Two-point randomized response, shuffled, is such a law: what no bound for all eps0-DP randomizers can go below (Feldman,
McMillan, Talwar 2021, Appendix G). Proof: notebooks/proofs/shuffle.md, section 3.
"""

from typing import Any

import numpy as np

from jaxdp.numerics.roots import Evaluation
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log1p_excess, log_binomial_pmf
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import sum_at

_NODES = 32
_EXPONENT = 38.0
ROUNDING_ERROR = 1e-11  # of a log probability whose parameters are exact; 9e-13 measured
PARAMETER_ERROR = 16 * ULP  # relative, of w, 1 - w and their products with the number of users
_TERM_ROUNDING = 2e-12
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(_NODES)


def tail_ratio(x: Any, trials: Any, odds: Any, tightenings: int = 40) -> Any:
    """P[Bin(N, w) >= x]/P[Bin(N, w) = x-1] for x above the mean, odds = w/(1-w); relative error about 1e-12.

    (N-x+1) odds int_0^1 (1-s)^{x-1} (1 + odds s)^{N-x} ds; the exponent is concave and at most -fall s - ones s^2/2.
    Newton from the right, until it moves by a hundredth, finds where it has fallen by 38 nats: the rest is below e^-38
    of the integral. Where odds <= 1 the quadratic bound alone (no tightenings) is close enough.
    x and trials may have any shape; odds is one number.
    """
    x, trials = x[..., None], trials[..., None]
    ones, zeros = xp.maximum(x - 1.0, 0.0), xp.maximum(trials - x, 0.0)
    fall = ones - zeros * odds  # below 0 where the threshold is the first count above the mean

    def exponent(s: Any) -> Any:
        # ones log(1-s) + zeros log(1 + odds s) with the linear parts, which nearly cancel, taken together:
        # the plain form is off by 1e-9 at n = 1e8.
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
    (w, x, velocity), (others, below, its_velocity) = (
        [a[i] for a in (s.mass, s.x, s.velocity)] for i in (top, 1 - top)
    )
    trials = users - 1.0
    least = xp.clip(xp.floor(users * (-below / (x - below))) + 1.0, 1.0, users)
    log_mass = log_binomial_pmf(least - 1.0, trials, w, others)
    ratio = tail_ratio(least, trials, w / others)
    gain, loss = w * x, -s.mean
    # d log P[Bin(N, w) = k] = (k - N w) (dw/w - d(1-w)/(1-w)), to first order
    rounding = ROUNDING_ERROR + PARAMETER_ERROR * xp.abs(least - 1.0 - trials * w)
    slack = _TERM_ROUNDING * (gain + loss * ratio)
    net = xp.maximum(gain - loss * ratio, 0.0)
    scale = s.log_factor + xp.log(users) + log_mass
    upper = scale + xp.log(net + slack) + rounding
    lower = scale + xp.log(xp.maximum(net - slack, 0.0)) - rounding
    fall = w * velocity * (1 + ratio) + others * its_velocity * ratio
    slope = -xp.exp(xp.minimum(scale + xp.log(fall) - upper, 600.0))
    return Evaluation(xp.minimum(upper, 0.0), xp.minimum(lower, 0.0), upper, slope)
