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

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.arrays import xp
from jaxdp.bounds import Bounds
from jaxdp.precision import canary, kernel
from jaxdp.shuffle import search
from jaxdp.shuffle.law import LARGEST_EPS0
from jaxdp.special import log1p_excess, log_binomial_pmf, raised

_NODES = 64
_EXPONENT = 38.0
_ROUNDING = 1e-11
_TERM_ROUNDING = 2e-12
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(_NODES)


def tail_ratio(x: Any, trials: Any, odds: Any) -> Any:
    """P[Bin(N, w) >= x]/P[Bin(N, w) = x-1] for x above the mean, odds = w/(1-w); relative error about 1e-12.

    (N-x+1) odds int_0^1 (1-s)^{x-1} (1 + odds s)^{N-x} ds; the exponent is concave and decreasing, so Newton
    from the right finds where it has fallen by 38 and the rest is below e^-38 of the integral.
    """
    ones, zeros = jnp.maximum(x - 1.0, 0.0), jnp.maximum(trials - x, 0.0)

    fall = ones - zeros * odds  # below 0 where the threshold is the first count above the mean

    def exponent(s: Any) -> Any:
        # ones log(1-s) + zeros log(1 + odds s) with the linear parts, which nearly cancel, taken together:
        # the plain form is off by 1e-9 at n = 1e8.
        falling = jax.lax.optimization_barrier(ones * log1p_excess(-s))
        rising = jax.lax.optimization_barrier(zeros * log1p_excess(odds * s))
        return falling + rising - fall * s

    start = jnp.minimum(2.0 * _EXPONENT / (fall + jnp.sqrt(fall * fall + 2.0 * _EXPONENT * ones) + 1e-300), 1.0 - 1e-12)

    def newton(_: Any, s: Any) -> Any:
        slope = -ones / (1.0 - s) + zeros * odds / (1.0 + odds * s)
        excess = exponent(s) + _EXPONENT
        following = s - excess / jnp.where(slope < 0, slope, -1.0)
        return jnp.where((slope < 0) & (excess < 0), jnp.clip(following, 0.0, s), s)

    reach = jax.lax.fori_loop(0, 40, newton, start)
    reach = jnp.where(exponent(start) > -_EXPONENT, jnp.where(start >= 1.0 - 2e-12, 1.0, start), reach)
    s = reach * (_POINTS + 1.0) / 2.0
    integral = xp.exact_matmul(jnp.exp(exponent(s)), jnp.asarray(_WEIGHTS)) * reach / 2.0
    return jnp.maximum(trials - x + 1.0, 0.0) * odds * integral


def evaluate(users: Any, eps0: Any, epsilon: Any) -> search.Evaluation:
    """Bounds of log delta(epsilon) of both directions, on a leading axis: (P, Q) with more ones, then the other."""
    trials = users - 1.0
    small, large = jnp.exp(-eps0) / (1.0 + jnp.exp(-eps0)), 1.0 / (1.0 + jnp.exp(-eps0))
    common = users / -jnp.expm1(-2.0 * eps0)
    over = jnp.floor(common * jnp.exp(epsilon - eps0) * -jnp.expm1(-epsilon - eps0)) + 1.0
    under = jnp.ceil(common * jnp.exp(-eps0 - epsilon) * -jnp.expm1(epsilon - eps0)) - 1.0
    over, under = jnp.clip(over, 1.0, users), jnp.clip(under, 0.0, trials)
    log_mass = jnp.stack(
        [log_binomial_pmf(over - 1.0, trials, small, large), log_binomial_pmf(under, trials, small, large)]
    )
    beyond = jnp.stack([over, trials - under + 1.0])
    odds = jnp.stack([jnp.exp(-eps0), jnp.exp(eps0)])
    ratio = jax.vmap(tail_ratio, in_axes=(0, None, 0))(beyond, trials, odds)
    gain, loss = -jnp.expm1(epsilon - eps0) * large, jnp.expm1(epsilon)
    slack = _TERM_ROUNDING * (gain + loss * ratio)
    net = jnp.maximum(gain - loss * ratio, 0.0)
    upper = jnp.minimum(log_mass + jnp.log(net + slack) + _ROUNDING, 0.0)
    lower = log_mass + jnp.log(jnp.maximum(net - slack, 0.0)) - _ROUNDING
    slope = -jnp.exp(jnp.minimum(epsilon + log_mass + jnp.log(ratio + small) - upper, 600.0))
    return search.Evaluation(upper, jnp.minimum(lower, 0.0), upper, slope)


def _larger(users: Any, eps0: Any, epsilon: Any) -> search.Evaluation:
    """Of the direction whose delta is the larger one."""
    both = evaluate(users, eps0, epsilon)
    best = jnp.argmax(both.upper)
    seen = search.Evaluation(*(side[best] for side in both))
    return seen._replace(lower=jnp.max(both.lower))


def _inside(users: Any, eps0: Any) -> tuple[Any, Any, Any]:
    valid = (users >= 1) & (users == jnp.floor(users)) & (users < jnp.inf) & (eps0 >= 0) & (eps0 < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= LARGEST_EPS0)
    return inside, jnp.where(inside, users, 1.0), jnp.where(inside, eps0, 1.0)


@kernel(working_set=4096, large=True)
def two_point_directions(users: Any, eps0: Any, epsilon: Any) -> tuple[Bounds, Bounds]:
    """Bounds of log delta(epsilon) of the two directions."""
    inside, n, local = _inside(users, eps0)
    inside = inside & (epsilon >= 0) & (epsilon < eps0)
    seen = evaluate(n, local, jnp.where(inside, epsilon, 0.5 * local))
    upper = jnp.where(inside, seen.upper, jnp.where(epsilon >= eps0, -jnp.inf, 0.0))
    lower = jnp.where(inside, seen.lower, -jnp.inf)
    return Bounds(lower[0], upper[0]), Bounds(lower[1], upper[1])


@kernel(working_set=4096, large=True)
def two_point_delta(users: Any, eps0: Any, epsilon: Any) -> Bounds:
    """Bounds of delta(epsilon) of shuffled two-point randomized response, the larger direction."""
    inside, n, local = _inside(users, eps0)
    inside = inside & (epsilon >= 0) & (epsilon < eps0)
    seen = _larger(n, local, jnp.where(inside, epsilon, 0.5 * local))
    upper = jnp.where(inside, jnp.exp(seen.upper), jnp.where(epsilon >= eps0, 0.0, 1.0))
    return Bounds(jnp.where(inside, jnp.exp(seen.lower), 0.0), upper)


@kernel(working_set=4096, large=True)
def two_point_epsilon(users: Any, eps0: Any, delta: Any) -> Bounds:
    """Bounds of the smallest epsilon with delta(epsilon) <= delta, shuffled two-point randomized response."""
    delta, _ = raised(delta)
    inside, n, local = _inside(users, eps0)
    searched = inside & (delta > 0) & (delta < 1)
    log_target = jnp.log(jnp.where(searched, delta, 0.5))
    shift = 2.0 * jnp.tanh(0.5 * local) / jnp.sqrt(2.0 * n * jnp.exp(-local))
    start = jnp.minimum(shift * jnp.sqrt(-2.0 * log_target), 0.9 * local)
    low, high = search.epsilon_bounds(lambda e: _larger(n, local, e), log_target, start, local, searched)
    high = jnp.where(searched, high, jnp.where(delta >= 1, 0.0, eps0))
    low = jnp.where(searched, low, jnp.where((delta == 0) & (users >= 1), eps0, 0.0))
    return Bounds(jnp.minimum(low, high), high)


@canary("two-point randomized response, shuffled")
def _canary() -> tuple[Any, Any, float]:
    bounds = two_point_epsilon.run_unchecked(np.array([1e5]), np.array([4.0]), np.array([1e-6]))
    return bounds.upper, np.array([0.084713990685631705]), 1e-9
