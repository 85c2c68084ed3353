r"""Renyi divergence of the clones pair at any real order, certified.

With m = j + 1 coins of which the larger count is i, s = tanh(eps0/2) (2i - m)/m and L = log((1+s)/(1-s)):

    M(alpha-1) - 1 = E_j E_i (1/2)[(1-s) f(e^L) + (1+s) f(e^-L)],   f(t) = t^alpha - 1 - alpha (t - 1) >= 0.

Every term is positive and of second order in L, so a relative error of the masses stays a relative error of the
divergence, however small it is (the plain sum loses everything below 1e-6). The mean over i falls with j (data
processing): blocks of j are bounded by their two ends. The bracket is convex in i, a sum of perspectives of f:
blocks of i are bounded by their chord and by Jensen's inequality (`majority`).

Kernels (`rate` "clones" or "stronger"; sizes static):

    clones_renyi_bounds(num_users, eps0, order, *, rate, size, inner_size)   -> Bounds of R_order, order > 1
    krr_renyi_upper(num_users, eps0, num_categories, order, *, rate)         -> upper bound for shuffled k-ary RR
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bounds import Bounds
from jaxdp.hockey_stick.blocks import binomial_blocks
from jaxdp.hockey_stick.clones import clone_rate
from jaxdp.precision import canary, kernel
from jaxdp.renyi.majority import majority

SIZE, INNER_SIZE = 320, 160
_LARGEST_EPS0 = 300.0
_MARGIN = 1e-11
_CUT = 30.0  # 1e-13 of the clone counts, the largest ones, move to the last left end
_ROWS = 16  # clone counts treated at once: what fits the cache


def _exp_excess(y):
    """e^y - 1 - y without cancellation near 0."""
    small = jnp.abs(y) < 0.3
    near = jnp.where(small, y, 0.0)
    series = jnp.ones_like(near)
    for i in range(14, 2, -1):
        series = 1.0 + near / i * series
    return jnp.where(small, 0.5 * near * near * series, jnp.expm1(jnp.where(small, 1.0, jnp.minimum(y, 600.0))) - y)


def _log_f(loss, order):
    """Log f(e^loss); the parts of f = h(alpha L) - alpha h(L), h(y) = e^y - 1 - y, cancel by alpha/(alpha-1)."""
    power = order * loss
    direct = jnp.log(jnp.maximum(_exp_excess(power) - order * _exp_excess(loss), 0.0))
    far = power + jnp.log1p(-jnp.minimum((1.0 + order * jnp.expm1(loss)) * jnp.exp(-jnp.minimum(power, 700.0)), 0.5))
    return jnp.where(power > 50.0, far, direct)


def _log_pair_term(heads, coins, eps0, order):
    """Log of (1/2)[(1-s) f(e^L) + (1+s) f(e^-L)] at `heads` of `coins`, heads >= coins/2."""
    small = jnp.exp(-eps0)
    s = jnp.tanh(0.5 * eps0) * (2.0 * heads - coins) / coins
    # 1 - s from the counts: by subtraction it loses the last report's digits at large eps0.
    rest = 2.0 * ((coins - heads) + heads * small) / (coins * (1.0 + small))
    loss = jnp.minimum(jnp.log1p(2.0 * s / rest), eps0)
    logs = _log_f(jnp.stack([loss, -loss]), order) + jnp.log(jnp.stack([rest, 2.0 - rest]))
    return jnp.logaddexp(logs[0], logs[1]) - jnp.log(2.0)


def _group_divergence(coins, eps0, order, inner_size: int):
    """Logs of (upper, lower) of the mean over i for one number of coins; a tie has no divergence."""
    law = majority(coins, order * eps0 + 60.0, size=inner_size)
    heads = jnp.concatenate([law.knots, law.means])
    term = jax.lax.optimization_barrier(_log_pair_term(heads, coins, eps0, order))
    ends, means = term[: inner_size + 1], term[inner_size + 1 :]
    return jax.nn.logsumexp(law.log_chord + ends), jax.nn.logsumexp(law.log_mass + means)


@kernel(static=("rate", "size", "inner_size"), working_set=1_000_000)
def clones_renyi_bounds(
    num_users, eps0, order, *, rate: str = "clones", size: int = SIZE, inner_size: int = INNER_SIZE
) -> Bounds:
    """Certified bounds of the Renyi divergence of the clones pair at a real order > 1."""
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (num_users < jnp.inf)
    valid = valid & (eps0 >= 0) & (order > 1) & (eps0 < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0) & (order < jnp.inf)
    users, local, alpha = (jnp.where(inside, v, d) for v, d in ((num_users, 2.0), (eps0, 1.0), (order, 2.0)))
    log_upper, log_lower = _log_excess(users, local, alpha, rate, size, inner_size)
    # logaddexp(0, x) = log1p(e^x) keeps the digits of a small divergence. Near order 1, f itself cancels.
    margin = _MARGIN + 1e-15 * alpha / (alpha - 1.0)
    upper = jnp.minimum(jnp.logaddexp(0.0, log_upper) * (1.0 + margin) / (alpha - 1.0), local)
    lower = jnp.minimum(jnp.logaddexp(0.0, log_lower) * (1.0 - margin) / (alpha - 1.0), local)
    upper = jnp.where(jnp.isnan(upper), local, upper)  # a failure ends on the bound that always holds
    lower = jnp.where(jnp.isnan(lower), 0.0, jnp.maximum(lower, 0.0))
    upper = jnp.where(inside, upper, jnp.where(valid, eps0, jnp.inf))
    return Bounds(jnp.where(inside, jnp.minimum(lower, upper), 0.0), upper)


def _log_excess(users, eps0, order, rate: str, size: int, inner_size: int):
    """Log of M(order - 1) - 1 from above and from below."""
    r, complement = clone_rate(eps0, rate)
    # The Gaussian of equal variance says how far the divergence itself pulls towards small counts.
    pull = 2.0 * order * (order - 1.0) * jnp.tanh(0.5 * eps0) ** 2 / (users * r)
    plan = binomial_blocks(
        users - 1.0, r, complement, -order * eps0 - 60.0, size=size, tilt=-jnp.minimum(pull, order * eps0), cut=_CUT
    )
    log_upper, log_lower = jax.lax.map(
        lambda count: _group_divergence(count + 1.0, eps0, order, inner_size), plan.left, batch_size=_ROWS
    )
    # Counts above the window go to the last left end, where the divergence is larger.
    mass = plan.log_upper.at[-1].set(jnp.logaddexp(plan.log_upper[-1], plan.log_missed_high))
    above = jnp.logaddexp(jax.nn.logsumexp(mass + log_upper), plan.log_missed_low + _log_f(eps0, order))
    following = jnp.append(log_lower[1:], -jnp.inf)
    return above, jax.nn.logsumexp(plan.log_lower + jnp.where(plan.width > 1, following, log_lower))


@kernel(static=("rate",), working_set=1_000_000)
def krr_renyi_upper(num_users, eps0, num_categories, order, *, rate: str = "clones"):
    """Upper bound of the Renyi divergence of shuffled k-ary randomized response at a real order > 1.

    The clones bound at the randomizer's eps0: valid for every number of categories, tightest for 2.
    """
    good = (num_categories >= 2) & (num_categories == jnp.floor(num_categories))
    return jnp.where(good, clones_renyi_bounds.point(num_users, eps0, order, rate=rate).upper, jnp.inf)


@canary("clones pair, Renyi divergence")
def _canary():
    bounds = clones_renyi_bounds.run_unchecked(*(np.array([x]) for x in (300.0, 2.0, 16.0)))
    return bounds.upper, np.array([0.64570993125113142]), 1e-9
