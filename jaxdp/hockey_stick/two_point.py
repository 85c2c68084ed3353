r"""Two-point randomized response, shuffled: the lower bound of every general amplification statement.

All users hold 0 against one holding 1, each answers truthfully with probability E0/(E0+1) (FMT 2021,
Appendix G). Released: the number of ones, P = Bin(n, w), Q = Bin(n-1, w) + Bern(1-w), w = 1/(E0+1).

Kernels:
    two_point_delta_bounds(num_users, eps0, epsilon)     -> Bounds of max(delta_PQ, delta_QP)
    two_point_epsilon_bounds(num_users, eps0, delta)     -> Bounds of its epsilon; `lower` is the figure to quote

Both directions have the form of one clone count, with Bin(n-1, w) for Bin(j, 1/2):

    delta = b (k1 - k2 R),  k1 = (E0-E)/(E0+1),  k2 = E-1,  R = tail beyond the threshold / b,

b the probability of the last count on the other side of it (sum the linear likelihood ratio by
x Bin(x;n,w) = n w Bin(x-1;n-1,w)). Domain and edges as in `clones`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bounds import Bounds
from jaxdp.hockey_stick import search
from jaxdp.precision import canary, exact_product, kernel
from jaxdp.special import log1p_excess, log_binomial_pmf

_NODES = 64
_EXPONENT = 38.0
_ROUNDING = 1e-11
_TERM_ROUNDING = 2e-12
_LARGEST_EPS0 = 300.0
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(_NODES)


def tail_ratio(x, trials, odds):
    """P[Bin(N, w) >= x]/P[Bin(N, w) = x-1] for x above the mean, odds = w/(1-w); relative error about 1e-12.

    (N-x+1) odds int_0^1 (1-s)^{x-1} (1 + odds s)^{N-x} ds; the exponent is concave and decreasing, so Newton
    from the right finds where it has fallen by 38 and the rest is below e^-38 of the integral.
    """
    ones, zeros = jnp.maximum(x - 1.0, 0.0), jnp.maximum(trials - x, 0.0)

    fall = jnp.maximum(ones - zeros * odds, 0.0)

    def exponent(s):
        # ones log(1-s) + zeros log(1 + odds s) with the linear parts, which nearly cancel, taken together:
        # the plain form is off by 1e-9 at n = 1e8.
        falling = jax.lax.optimization_barrier(ones * log1p_excess(-s))
        rising = jax.lax.optimization_barrier(zeros * log1p_excess(odds * s))
        return falling + rising - fall * s

    start = jnp.minimum(2.0 * _EXPONENT / (fall + jnp.sqrt(fall * fall + 2.0 * _EXPONENT * ones) + 1e-300), 1.0 - 1e-12)

    def newton(_, s):
        slope = -ones / (1.0 - s) + zeros * odds / (1.0 + odds * s)
        excess = exponent(s) + _EXPONENT
        following = s - excess / jnp.where(slope < 0, slope, -1.0)
        return jnp.where((slope < 0) & (excess < 0), jnp.clip(following, 0.0, s), s)

    reach = jax.lax.fori_loop(0, 40, newton, start)
    reach = jnp.where(exponent(start) > -_EXPONENT, jnp.where(start >= 1.0 - 2e-12, 1.0, start), reach)
    s = reach * (_POINTS + 1.0) / 2.0
    integral = exact_product(jnp.exp(exponent(s)), jnp.asarray(_WEIGHTS)) * reach / 2.0
    return jnp.maximum(trials - x + 1.0, 0.0) * odds * integral


def _directions(num_users, eps0, epsilon):
    """log b and R of both directions, stacked."""
    trials = num_users - 1.0
    small, large = jnp.exp(-eps0) / (1.0 + jnp.exp(-eps0)), 1.0 / (1.0 + jnp.exp(-eps0))
    common = num_users / -jnp.expm1(-2.0 * eps0)
    over = jnp.floor(common * jnp.exp(epsilon - eps0) * -jnp.expm1(-epsilon - eps0)) + 1.0
    under = jnp.ceil(common * jnp.exp(-eps0 - epsilon) * -jnp.expm1(epsilon - eps0)) - 1.0
    over, under = jnp.clip(over, 1.0, num_users), jnp.clip(under, 0.0, trials)
    log_mass = jnp.stack(
        [log_binomial_pmf(over - 1.0, trials, small, large), log_binomial_pmf(under, trials, small, large)]
    )
    beyond = jnp.stack([over, trials - under + 1.0])
    odds = jnp.stack([jnp.exp(-eps0), jnp.exp(eps0)])
    ratio = jax.vmap(tail_ratio, in_axes=(0, None, 0))(beyond, trials, odds)
    return log_mass, ratio


def _certified(num_users, eps0, epsilon) -> search.Certified:
    """Margins added and taken off; both lower bounds hold, so the larger direction counts on each side."""
    small = jnp.exp(-eps0) / (1.0 + jnp.exp(-eps0))
    log_mass, ratio = _directions(num_users, eps0, epsilon)
    gain, loss = -jnp.expm1(epsilon - eps0) / (1.0 + jnp.exp(-eps0)), jnp.expm1(epsilon)
    slack = _TERM_ROUNDING * (gain + loss * ratio)
    net = jnp.maximum(gain - loss * ratio, 0.0)
    value = log_mass + jnp.log(net + slack) + _ROUNDING
    below = jnp.max(log_mass + jnp.log(jnp.maximum(net - slack, 0.0))) - _ROUNDING
    best = jnp.argmax(value)
    slope = -jnp.exp(jnp.minimum(epsilon + log_mass[best] + jnp.log(ratio[best] + small) - value[best], 600.0))
    return search.Certified(jnp.minimum(value[best], 0.0), jnp.minimum(below, 0.0), slope)


def _prepare(num_users, eps0):
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (num_users < jnp.inf)
    valid = valid & (eps0 >= 0) & (eps0 < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0)
    return valid, inside, jnp.where(inside, num_users, 1.0), jnp.where(inside, eps0, 1.0)


@kernel(working_set=4096)
def two_point_delta_bounds(num_users, eps0, epsilon) -> Bounds:
    """Bounds of delta(epsilon) of shuffled two-point randomized response, the larger direction."""
    valid, inside, users, local = _prepare(num_users, eps0)
    good = valid & (epsilon >= 0)
    inside = inside & good & (epsilon < eps0)
    value = _certified(users, local, jnp.where(inside, epsilon, 0.5 * local))
    upper = jnp.maximum(jnp.exp(value.log_upper), search.LEAST_DELTA)
    upper = jnp.where(inside, upper, jnp.where(good & (epsilon >= eps0), 0.0, 1.0))
    lower = jnp.where(inside, jnp.exp(value.log_lower), 0.0)
    return Bounds(jnp.minimum(lower, upper), upper)


@kernel(working_set=4096)
def two_point_epsilon_bounds(num_users, eps0, delta) -> Bounds:
    """Bounds of the smallest epsilon with delta(epsilon) <= delta, shuffled two-point randomized response."""
    valid, inside, users, local = _prepare(num_users, eps0)
    good = valid & (delta >= 0) & (delta <= 1)
    searched = inside & (delta > 0) & (delta < 1)
    log_target = jnp.log(jnp.where(searched, delta, 0.5))
    shift = 2.0 * jnp.tanh(0.5 * local) / jnp.sqrt(2.0 * users * jnp.exp(-local))
    start = jnp.minimum(shift * jnp.sqrt(-2.0 * log_target), 0.9 * local)

    def side(epsilon):
        value = _certified(users, local, epsilon)
        return search.Side(value.log_upper, value.slope)

    estimate = search.decreasing_root(side, log_target, start, local)
    lower, upper = search.certify(lambda epsilon, _: _certified(users, local, epsilon), log_target, estimate, local)
    upper = jnp.where(searched, upper, jnp.where(delta >= 1, 0.0, eps0))
    lower = jnp.where(searched, lower, jnp.where(delta == 0, eps0, 0.0))
    return Bounds(jnp.where(good, lower, 0.0), jnp.where(good, upper, jnp.inf))


@canary("two-point randomized response, shuffled")
def _canary():
    bounds = two_point_epsilon_bounds.run_unchecked(np.array([1e5]), np.array([4.0]), np.array([1e-6]))
    return bounds.upper, np.array([0.084713990685631705]), 1e-9
