r"""Two-point randomized response, shuffled: what no bound for all eps0-DP randomizers can go below.

All users hold 0 against one holding 1, each answers truthfully with probability E0/(E0+1) (Feldman, McMillan, Talwar
2021, Appendix G). Released: the number of ones, P = Bin(n, w), Q = Bin(n-1, w) + Bern(1-w), w = 1/(E0+1). Both
directions have the form of one clone count, with Bin(n-1, w) for Bin(j, 1/2):

    delta = b (k1 - k2 R),  k1 = (E0-E)/(E0+1),  k2 = E-1,  R = tail beyond the threshold / b,

b the probability of the last count on the other side of it (the likelihood ratio is linear in the count, and
x Bin(x;n,w) = n w Bin(x-1;n-1,w)). Proof: notebooks/proofs/shuffle.md, section 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp.interval import Bounds
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log1p_excess, log_binomial_pmf, raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import at_points
from jaxdp.runtime.precision import canary, kernel
from jaxdp.shuffle.closed_form import reports
from jaxdp.shuffle.law import LARGEST_EPS0
from jaxdp.typing import Array, Real

_NODES = 64
_EXPONENT = 38.0
_ROUNDING = 1e-11  # of a log probability whose parameters are exact; 9e-13 measured
_OF_PARAMETERS = 16 * ULP  # relative, of w, 1 - w and their products with the number of users
_TERM_ROUNDING = 2e-12
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(_NODES)


def tail_ratio(x: Any, trials: Any, odds: Any, tightenings: int = 40) -> Any:
    """P[Bin(N, w) >= x]/P[Bin(N, w) = x-1] for x above the mean, odds = w/(1-w); relative error about 1e-12.

    (N-x+1) odds int_0^1 (1-s)^{x-1} (1 + odds s)^{N-x} ds; the exponent is concave and at most -fall s - ones s^2/2.
    Newton from the right finds where it has fallen by 38 nats: the rest is below e^-38 of the integral. Where odds <= 1
    the quadratic bound alone (no tightenings) is close enough.
    """
    ones, zeros = xp.maximum(x - 1.0, 0.0), xp.maximum(trials - x, 0.0)
    fall = ones - zeros * odds  # below 0 where the threshold is the first count above the mean

    def exponent(s: Any) -> Any:
        # ones log(1-s) + zeros log(1 + odds s) with the linear parts, which nearly cancel, taken together:
        # the plain form is off by 1e-9 at n = 1e8.
        falling = xp.optimization_barrier(ones * log1p_excess(-s))
        rising = xp.optimization_barrier(zeros * log1p_excess(odds * s))
        return falling + rising - fall * s

    start = xp.minimum(2.0 * _EXPONENT / (fall + xp.sqrt(fall * fall + 2.0 * _EXPONENT * ones) + 1e-300), 1.0 - 1e-12)

    def newton(_: Any, s: Any) -> Any:
        slope = -ones / (1.0 - s) + zeros * odds / (1.0 + odds * s)
        excess = exponent(s) + _EXPONENT
        following = s - excess / xp.where(slope < 0, slope, -1.0)
        return xp.where((slope < 0) & (excess < 0), xp.clip(following, 0.0, s), s)

    reach = xp.fori_loop(0, tightenings, newton, start)
    reach = xp.where(exponent(start) > -_EXPONENT, xp.where(start >= 1.0 - 2e-12, 1.0, start), reach)
    s = reach * (_POINTS + 1.0) / 2.0
    integral = xp.exact_matmul(xp.exp(exponent(s)), xp.asarray(_WEIGHTS)) * reach / 2.0
    return xp.maximum(trials - x + 1.0, 0.0) * odds * integral


def evaluate(users: Any, eps0: Any, epsilon: Any) -> Evaluation:
    """Bounds of log delta(epsilon) of both directions, on a leading axis: (P, Q) with more ones, then the other."""
    trials = users - 1.0
    small, large = xp.exp(-eps0) / (1.0 + xp.exp(-eps0)), 1.0 / (1.0 + xp.exp(-eps0))
    common = users / -xp.expm1(-2.0 * eps0)
    over = xp.floor(common * xp.exp(epsilon - eps0) * -xp.expm1(-epsilon - eps0)) + 1.0
    under = xp.ceil(common * xp.exp(-eps0 - epsilon) * -xp.expm1(epsilon - eps0)) - 1.0
    over, under = xp.clip(over, 1.0, users), xp.clip(under, 0.0, trials)
    log_mass = xp.stack(
        [log_binomial_pmf(over - 1.0, trials, small, large), log_binomial_pmf(under, trials, small, large)]
    )
    beyond = xp.stack([over, trials - under + 1.0])
    odds = xp.stack([xp.exp(-eps0), xp.exp(eps0)])
    ratio = xp.vmap(tail_ratio, in_axes=(0, None, 0))(beyond, trials, odds)
    gain, loss = -xp.expm1(epsilon - eps0) * large, xp.expm1(epsilon)
    # d log P[Bin(N, w) = k] = (k - N w) (dw/w - d(1-w)/(1-w)), to first order
    rounding = _ROUNDING + _OF_PARAMETERS * xp.abs(xp.stack([over - 1.0, under]) - trials * small)
    slack = _TERM_ROUNDING * (gain + loss * ratio)
    net = xp.maximum(gain - loss * ratio, 0.0)
    upper = xp.minimum(log_mass + xp.log(net + slack) + rounding, 0.0)
    lower = log_mass + xp.log(xp.maximum(net - slack, 0.0)) - rounding
    slope = -xp.exp(xp.minimum(epsilon + log_mass + xp.log(ratio + small) - upper, 600.0))
    return Evaluation(upper, xp.minimum(lower, 0.0), upper, slope)


def _larger(users: Any, eps0: Any, epsilon: Any) -> Evaluation:
    """Of the direction whose delta is the larger one."""
    both = evaluate(users, eps0, epsilon)
    best = xp.argmax(both.upper)
    return Evaluation(*(side[best] for side in both))._replace(lower=xp.max(both.lower))


def _valid(users: Any, eps0: Any, delta: Any) -> Any:
    return (users >= 1) & (users == xp.floor(users)) & (users < xp.inf) & (eps0 >= 0) & (delta >= 0) & (delta <= 1)


@kernel(working_set=4096, large=True, by_numpy=64)
def two_point_directions(users: Any, eps0: Any, epsilon: Any) -> tuple[Bounds, Bounds]:
    """Bounds of log delta(epsilon) of the two directions."""
    inside = _valid(users, eps0, 0.0) & (eps0 <= LARGEST_EPS0) & (epsilon >= 0) & (epsilon < eps0)
    n, local = xp.where(inside, users, 1.0), xp.where(inside, eps0, 1.0)
    seen = evaluate(n, local, xp.where(inside, epsilon, 0.5))
    upper = xp.where(inside, seen.upper, xp.where(epsilon >= eps0, -xp.inf, 0.0))
    lower = xp.where(inside, seen.lower, -xp.inf)
    return Bounds(lower[0], upper[0]), Bounds(lower[1], upper[1])


@kernel(working_set=4096, large=True, bounds=True, by_numpy=64)
def two_point_delta(users: Any, eps0: Any, epsilon: Any) -> Bounds:
    """Bounds of delta(epsilon) of shuffled two-point randomized response, the larger direction."""
    one, other = two_point_directions.point(users, eps0, epsilon)
    return Bounds(*(xp.exp(xp.maximum(*sides)) for sides in zip(one, other, strict=True)))


@kernel(working_set=4096, large=True, bounds=True, by_numpy=64)
def two_point_epsilon(users: Any, eps0: Any, delta: Any) -> Bounds:
    """Bounds of the smallest epsilon with delta(epsilon) <= delta, shuffled two-point randomized response."""
    delta, _ = raised(delta)
    valid = _valid(users, eps0, delta)
    inside = valid & (eps0 > 0) & (eps0 <= LARGEST_EPS0) & (delta > 0) & (delta < 1)
    n, local, log_target = (xp.where(inside, x, y) for x, y in ((users, 1.0), (eps0, 1.0), (xp.log(delta), -1.0)))
    shift = 2.0 * xp.tanh(0.5 * local) / xp.sqrt(2.0 * n * xp.exp(-local))
    start = xp.minimum(shift * xp.sqrt(-2.0 * log_target), 0.9 * local)
    low, high, _ = proved_ends(lambda e: _larger(n, local, e), log_target, start, local, wanted=inside)
    high = xp.where(inside, high, xp.where(valid, xp.where(delta >= 1, 0.0, eps0), xp.inf))
    low = xp.where(inside, low, xp.where(valid & (delta == 0), eps0, 0.0))
    return Bounds(low, high)


def lower_bound_epsilon(eps0: Real, n: Real, delta: Real) -> Array:
    """Lower bound of epsilon at delta that no theorem for all eps0-DP local randomizers can go below.

    The exact epsilon of n shuffled two-point randomized responses (the larger of the two directions).

    Args:
        eps0: local epsilon in nats, >= 0.
        n: number of reports, whole, >= 1.
        delta: in [0, 1].

    Returns:
        Epsilon in nats of the broadcast shape, float64, rounded down by less than 1e-6 relative. Under a trace an
        invalid argument gives 0.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Reference:
        Feldman, McMillan, Talwar 2021, Appendix G.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.lower_bound_epsilon(1.0, 1000, 1e-6):.4f}")
        0.1266

    """
    local, users, target = reports(eps0=eps0, n=n, delta=delta)
    return at_points(two_point_epsilon, users, local, target)[0]


@canary("two-point randomized response, shuffled")
def _canary() -> tuple[Any, Any, float]:
    bounds = two_point_epsilon.run_unchecked(np.array([1e5]), np.array([4.0]), np.array([1e-6]))
    return bounds.upper, np.array([0.084713990685631705]), 1e-9
