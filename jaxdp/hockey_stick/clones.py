r"""Clones pair of the shuffle model: certified delta(eps) and eps(delta) of one shuffled round.

The pair (FMT 2021, Theorem 3.2): J ~ Bin(n-1, r), A ~ Bin(J, 1/2), D ~ Bern(E0/(E0+1));
P = (A+D, J-A+1-D), Q = (A+1-D, J-A+D). `rate` names the clone rate r:
"clones" r = e^-eps0 (published), "stronger" r = 2/(e^eps0+1) (proved in notebooks/proofs/stronger_clones.md).

Kernels (`kernel(...)` batched NumPy, `kernel.point(...)` one traceable point; `rate`, `size` static):

    clones_delta_bounds(num_users, eps0, epsilon, *, rate, size)      -> Bounds of delta
    clones_epsilon_bounds(num_users, eps0, delta, *, rate, size)      -> Bounds of epsilon
    clones_epsilon_upper(num_users, eps0, delta, *, rate, size)       -> upper bound of epsilon alone, cheaper
    clones_delta_smooth(num_users, eps0, epsilon, *, rate, size)      -> an accurate, uncertified delta, which
                                                        jax.jvp/grad differentiate in eps0 and epsilon
    clones_delta_slopes(num_users, eps0, epsilon, *, rate, size)      -> (delta, d/d epsilon, d/d eps0)

Domain: num_users whole >= 1 (float64, up to 1e15), eps0 >= 0, epsilon >= 0, delta in [0, 1]. Invalid values
give the vacuous bound (delta 1, epsilon inf). delta = 0, eps0 = 0 and epsilon >= eps0 are exact.
`size` is the number of blocks of J; a window of at most `size` counts is summed count by count.

Formulas and proofs: notebooks/proofs/clones_kernel.md, sections 1, 3 and 4. E = e^eps, E0 = e^eps0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bounds import Bounds
from jaxdp.hockey_stick import search
from jaxdp.hockey_stick.blocks import Blocks, binomial_blocks
from jaxdp.hockey_stick.half_binomial import log_pmf_and_tail_ratio
from jaxdp.precision import canary, kernel

SIZE = 2048
COARSE_SIZE = 128
SMOOTH_SIZE = 512
_ROUNDING = 1e-11  # relative, of the whole sum, measured (notebooks/proofs/clones_kernel.md, section 4)
_NODES = 20
_COARSE_NODES = 12
# Larger than what is alive (about 24 arrays of SIZE): batches of 8 points stay in cache, 1.3x faster than 512.
_WORKING_SET = 3_000_000
_TERM_ROUNDING = 5e-13  # relative to the two cancelling parts of one term (ibid.)
_LARGEST_EPS0 = 300.0  # beyond it no clone is ever drawn for n <= 1e100 and E0^2 nears overflow


class _Sums(NamedTuple):
    """Per block: log(mass-free binomial term), and the pieces of delta_j = bin * (k1 - k2 R)."""

    log_bin: jax.Array
    tail_ratio: jax.Array
    gain: jax.Array
    loss: jax.Array


def clone_rate(eps0, rate: str):
    """(r, 1 - r), each without cancellation."""
    if rate == "clones":
        return jnp.exp(-eps0), -jnp.expm1(-eps0)
    half = jnp.tanh(0.5 * eps0)
    return 2.0 * jnp.exp(-eps0) / (1.0 + jnp.exp(-eps0)), half


def _terms(count, eps0, epsilon, nodes: int) -> _Sums:
    """delta_j = bin(x-1; j) (k1 - k2 R), x = floor(tau (j+1)) + 1, R = P[Bin(j,1/2) >= x]/bin(x-1; j).

    A rounded 1 - tau can only move x by one where the moved term is zero to rounding; tau itself rounds to 1.
    """
    rest = jnp.exp(-epsilon) * jnp.expm1(epsilon - eps0) / (jnp.expm1(-eps0) * (1.0 + jnp.exp(-epsilon)))
    x = jnp.clip(count + 2.0 - jnp.ceil(rest * (count + 1.0)), 1.0, count + 1.0)
    log_bin, ratio = log_pmf_and_tail_ratio(count, x, nodes=nodes)
    # E0 - E as -E0 expm1(eps - eps0): subtraction loses every digit near eps0.
    gain = -jnp.expm1(epsilon - eps0) / (1.0 + jnp.exp(-eps0))
    return _Sums(log_bin, ratio, gain, jnp.expm1(epsilon))


def _plan(num_users, eps0, log_delta, rate, size) -> Blocks:
    r, complement = clone_rate(eps0, rate)
    return binomial_blocks(num_users - 1.0, r, complement, log_delta, size=size)


def _log_sum(log_weight, factor):
    """log sum e^log_weight factor for factor >= 0, scaled so that nothing under- or overflows."""
    top = jnp.max(jnp.where(factor > 0, log_weight, -jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    return top + jnp.log(jnp.sum(jnp.exp(jnp.minimum(log_weight - top, 0.0)) * factor))


def _log_upper(plan: Blocks, terms: _Sums):
    """Upper: block mass from above times delta at the block's left end, plus everything cut away."""
    net = jnp.maximum(terms.gain - terms.loss * terms.tail_ratio, 0.0)
    slack = _TERM_ROUNDING * (terms.gain + terms.loss * terms.tail_ratio)
    inside = _log_sum(plan.log_upper + terms.log_bin, net + slack) + _ROUNDING
    log_last = jnp.minimum(jnp.log(net[-1] + slack[-1]) + terms.log_bin[-1], 0.0)
    # delta_j <= 1 decreases in j: the low cut counts fully, the high cut at the last left end's delta.
    outside = jnp.logaddexp(plan.log_missed_low, plan.log_missed_high + log_last)
    return jnp.minimum(jnp.logaddexp(inside, outside), 0.0)


def _log_lower(plan: Blocks, terms: _Sums):
    """Lower: block mass from below times delta at the next block's left end (the count itself if single)."""
    net = terms.gain - terms.loss * terms.tail_ratio
    net = jnp.maximum(net - _TERM_ROUNDING * (terms.gain + terms.loss * terms.tail_ratio), 0.0)
    single = plan.width <= 1
    next_net = jnp.concatenate([net[1:], jnp.zeros(1)])
    next_bin = jnp.concatenate([terms.log_bin[1:], jnp.zeros(1)])
    log_bin = jnp.where(single, terms.log_bin, next_bin)
    return _log_sum(plan.log_lower + log_bin, jnp.where(single, net, next_net)) - _ROUNDING


def _slope(log_mass, terms: _Sums, eps0, epsilon, log_delta):
    """d log delta / d eps = -E sum mass bin (R + 1/(E0+1)) / delta."""
    weight = terms.tail_ratio + jnp.exp(-eps0) / (1.0 + jnp.exp(-eps0))
    return -jnp.exp(jnp.minimum(epsilon + _log_sum(log_mass + terms.log_bin, weight) - log_delta, 600.0))


def _interpolation_weights(plan: Blocks):
    """Weights of the left ends in the estimate: each block's mass split between its two ends at its mean."""
    mass = jnp.exp(plan.log_middle)
    share = mass * jnp.where(plan.width > 1, plan.fraction, 0.0)
    return mass - share + jnp.concatenate([jnp.zeros(1), share[:-1]])


def _middle(plan: Blocks, terms: _Sums, eps0, epsilon) -> search.Side:
    log_mass = jnp.log(_interpolation_weights(plan))
    net = jnp.maximum(terms.gain - terms.loss * terms.tail_ratio, 0.0)
    log_delta = _log_sum(log_mass + terms.log_bin, net)
    return search.Side(log_delta, _slope(log_mass, terms, eps0, epsilon, log_delta))


def _prepare(num_users, eps0):
    """(valid, num_users, eps0) with harmless values where invalid, so that no branch makes a NaN."""
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (eps0 >= 0) & (eps0 < jnp.inf)
    valid = valid & (num_users < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0)
    return valid, inside, jnp.where(inside, num_users, 1.0), jnp.where(inside, eps0, 1.0)


def _log_single_report(eps0, epsilon):
    """log of (E0 - E)/(E0 + 1), delta of one report: an upper bound at every n."""
    gap = jnp.where(epsilon < eps0, epsilon - eps0, -1.0)
    return jnp.log(-jnp.expm1(gap)) - jnp.log1p(jnp.exp(-eps0))


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def clones_delta_bounds(num_users, eps0, epsilon, *, rate: str = "clones", size: int = SIZE) -> Bounds:
    """Certified bounds of delta(epsilon) of the clones pair."""
    valid, inside, users, local = _prepare(num_users, eps0)
    central = jnp.where(inside & (epsilon >= 0) & (epsilon < eps0), epsilon, 0.5 * local)
    plan = _guessed_plan(users, local, central, rate, size)
    terms = _terms(plan.left, local, central, _NODES)
    upper, lower = jnp.exp(_log_upper(plan, terms)), jnp.exp(_log_lower(plan, terms))
    large = jnp.exp(_log_single_report(eps0, epsilon)) * (1.0 + _ROUNDING)
    upper = jnp.where(inside, jnp.maximum(upper, search.LEAST_DELTA), jnp.minimum(large, 1.0))
    lower = jnp.where(inside, lower, 0.0)
    upper = jnp.where(epsilon >= eps0, 0.0, upper)
    lower = jnp.where(epsilon >= eps0, 0.0, jnp.minimum(lower, upper))
    good = valid & (epsilon >= 0)
    return Bounds(jnp.where(good, lower, 0.0), jnp.where(good, upper, 1.0))


def _guessed_plan(users, eps0, epsilon, rate, size) -> Blocks:
    """A plan whose window fits delta(epsilon), guessed from a coarse plan with a deep window."""
    coarse = _plan(users, eps0, -60.0, rate, COARSE_SIZE)
    guess = _middle(coarse, _terms(coarse.left, eps0, epsilon, _COARSE_NODES), eps0, epsilon).log_delta
    return _plan(users, eps0, jnp.clip(guess, -700.0, 0.0), rate, size)


def _estimate_epsilon(users, eps0, log_target, rate):
    """Root of the coarse estimate of log delta(eps) = log_target; 0 where delta(0) is already below."""
    plan = _plan(users, eps0, log_target, rate, COARSE_SIZE)
    r, _ = clone_rate(eps0, rate)

    def side(epsilon):
        return _middle(plan, _terms(plan.left, eps0, epsilon, _COARSE_NODES), eps0, epsilon)

    # The Gaussian of equal variance: shift tanh(eps0/2) against a standard deviation sqrt(n r)/2.
    shift = 2.0 * jnp.tanh(0.5 * eps0) / jnp.sqrt(users * r)
    start = shift * jnp.sqrt(-2.0 * log_target)
    return search.decreasing_root(side, log_target, jnp.minimum(start, 0.9 * eps0), eps0)


def _certified(plan: Blocks, eps0, epsilon, with_lower: bool) -> search.Certified:
    terms = _terms(plan.left, eps0, epsilon, _NODES)
    upper = _log_upper(plan, terms)
    lower = _log_lower(plan, terms) if with_lower else jnp.full_like(upper, -jnp.inf)
    return search.Certified(upper, lower, _slope(plan.log_upper, terms, eps0, epsilon, upper))


def _epsilon(num_users, eps0, delta, rate, size, with_lower: bool) -> Bounds:
    valid, inside, users, local = _prepare(num_users, eps0)
    searched = inside & (delta > 0) & (delta < 1)
    log_target = jnp.log(jnp.where(searched, delta, 0.5))
    estimate = _estimate_epsilon(users, local, log_target, rate)
    plan = _plan(users, local, log_target, rate, size)
    lower, upper = search.certify(
        lambda epsilon, _: _certified(plan, local, epsilon, with_lower),
        log_target,
        estimate,
        local,
        with_lower=with_lower,
    )
    upper = jnp.where(searched, upper, jnp.where(delta >= 1, 0.0, eps0))
    exact_cap = (delta == 0) & (num_users < jnp.inf)
    lower = jnp.where(searched, lower, jnp.where(exact_cap, eps0, 0.0))
    good = valid & (delta >= 0) & (delta <= 1)
    return Bounds(jnp.where(good, lower, 0.0), jnp.where(good, upper, jnp.inf))


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def clones_epsilon_bounds(num_users, eps0, delta, *, rate: str = "clones", size: int = SIZE) -> Bounds:
    """Certified bounds of the smallest epsilon with delta(epsilon) <= delta, for the clones pair."""
    return _epsilon(num_users, eps0, delta, rate, size, True)


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def clones_epsilon_upper(num_users, eps0, delta, *, rate: str = "clones", size: int = SIZE):
    """Certified upper bound of the smallest epsilon with delta(epsilon) <= delta, for the clones pair."""
    return _epsilon(num_users, eps0, delta, rate, size, False).upper


def _slopes(num_users, eps0, epsilon, rate, size):
    """(delta, d/d epsilon, d/d eps0), uncertified; all zero from epsilon = eps0 on."""
    _, inside, users, local = _prepare(num_users, eps0)
    inside = inside & (epsilon >= 0) & (epsilon < eps0)
    central = jnp.where(inside, epsilon, 0.5 * local)
    plan = _guessed_plan(users, local, central, rate, size)
    terms = _terms(plan.left, local, central, _NODES)
    weight = _interpolation_weights(plan)
    term = jnp.exp(terms.log_bin)
    delta_j = term * jnp.maximum(terms.gain - terms.loss * terms.tail_ratio, 0.0)
    delta = jnp.sum(weight * delta_j)
    small = jnp.exp(-local) / (1.0 + jnp.exp(-local))
    by_epsilon = -jnp.exp(central) * jnp.sum(weight * term * (terms.tail_ratio + small))
    by_eps0 = jnp.sum(weight * term) * (jnp.exp(central - local) + terms.gain * jnp.exp(-local)) / (1 + jnp.exp(-local))
    by_eps0 = by_eps0 + _rate_slope(local, rate) * _covariance(plan, delta_j)
    return tuple(jnp.where(inside, value, 0.0) for value in (delta, by_epsilon, by_eps0))


def _rate_slope(eps0, rate: str):
    """(dr/d eps0)/(r (1 - r)), the factor between d/d eps0 through the count and a covariance with the count."""
    complement = clone_rate(eps0, rate)[1]
    return -1.0 / complement if rate == "clones" else -1.0 / ((1.0 + jnp.exp(-eps0)) * complement)


def _covariance(plan: Blocks, delta_j):
    """Cov(J, delta_J) with delta_J linear inside a block; the mean is subtracted before any product."""
    mass = jnp.exp(plan.log_middle)
    following = jnp.concatenate([delta_j[1:], delta_j[-1:]])
    rise = jnp.where(plan.width > 1, following - delta_j, 0.0)
    fraction = jnp.where(plan.width > 1, plan.fraction, 0.0)
    count = plan.left + fraction * plan.width
    value = delta_j + fraction * rise
    mean_count = jnp.sum(mass * count) / jnp.sum(mass)
    mean_value = jnp.sum(mass * value) / jnp.sum(mass)
    spread = (plan.width * plan.width - 1.0) / 12.0
    within = rise / jnp.maximum(plan.width, 1.0) * spread
    return jnp.sum(mass * ((value - mean_value) * (count - mean_count) + within))


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def clones_delta_slopes(num_users, eps0, epsilon, *, rate: str = "clones", size: int = SMOOTH_SIZE):
    """(delta, d delta/d epsilon, d delta/d eps0) of the clones pair: accurate estimates, not bounds."""
    return _slopes(num_users, eps0, epsilon, rate, size)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _smooth(num_users, eps0, epsilon, rate, size):
    return _slopes(num_users, eps0, epsilon, rate, size)[0]


@_smooth.defjvp
def _smooth_jvp(rate, size, primals, tangents):
    value, by_epsilon, by_eps0 = _slopes(*primals, rate, size)
    return value, by_eps0 * tangents[1] + by_epsilon * tangents[2]


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def clones_delta_smooth(num_users, eps0, epsilon, *, rate: str = "clones", size: int = SMOOTH_SIZE):
    """Accurate, uncertified delta(epsilon) of the clones pair with derivatives in eps0 and epsilon (not num_users)."""
    return _smooth(jnp.asarray(num_users), jnp.asarray(eps0), jnp.asarray(epsilon), rate, size)


@canary("clones pair, one shuffled round")
def _canary():
    """Two exact values: a window summed count by count, and one of blocks; one point a call, as a user's first call."""
    points = ((1e3, 2.0, 1e-9), (1e6, 1.0, 1e-6))
    found = [clones_epsilon_bounds.run_unchecked(*(np.array([x]) for x in point)).upper[0] for point in points]
    return np.array(found), np.array([0.74729331861186035, 0.0043345198029866226]), 5e-6
