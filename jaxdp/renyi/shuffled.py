r"""Renyi divergence of the clones pair at any real order, certified, and its loss atoms for composition.

With m = j+1, i ones among m fair coins, P_i = [E0 i + (m-i)]/(E0+1), Q_i its mirror, L_i = log(P_i/Q_i):

    M(alpha-1) - 1 = E_j (2/m) E_{i ~ Bin(m,1/2)} Q_i f(P_i/Q_i),   f(t) = t^alpha - 1 - alpha (t - 1) >= 0.

Every term is positive and of second order in L, so a relative error of the masses stays a relative error of the
divergence, however small it is (the plain sum loses everything below 1e-6). The mean over i decreases in j (data
processing), and Q_i f(P_i/Q_i) is convex in i (perspective of a convex function along a line).

Kernels (`rate` "clones" or "stronger"; sizes static):

    clones_renyi_bounds(num_users, eps0, order, *, rate, size, inner_size)  -> Bounds of R_order, order > 1
    clones_atoms(num_users, eps0, *, rate, size, inner_size, log_delta)     -> Atoms: a finite dominating pair
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.bounds import Bounds
from jaxdp.hockey_stick.blocks import binomial_blocks
from jaxdp.hockey_stick.clones import clone_rate
from jaxdp.precision import kernel

SIZE, INNER_SIZE = 512, 512
_LARGEST_EPS0 = 300.0
_MARGIN = 1e-10


class Atoms(NamedTuple):
    """Privacy losses of a finite pair under P: M(z) = sum exp(log_weights + z losses), no mass at infinity.

    Masses are rounded up and losses rounded up, so the pair dominates the clones pair for all a > 0, also composed.
    """

    losses: jax.Array
    log_weights: jax.Array


def _loss(ones, group, eps0):
    """L = log(P/Q) at `ones` of `group` coins, odd around half: 2 atanh(tanh(eps0/2) (2 i - m)/m), within eps0."""
    y = jnp.clip((2.0 * ones - group) / group, -1.0, 1.0)
    inner = jnp.clip(jnp.tanh(0.5 * eps0) * y, -1.0 + 1e-16, 1.0 - 1e-16)
    return jnp.clip(2.0 * jnp.arctanh(inner), -eps0, eps0)


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


def _group_divergence(count, eps0, order, inner_size):
    """Logs of (upper, lower) of (2/m) E_i Q_i f(P_i/Q_i), m = count + 1, i in blocks."""
    group = count + 1.0
    half = jnp.full_like(group, 0.5)
    cut = -order * eps0 - 60.0
    plan = binomial_blocks(group, half, half, cut, size=inner_size, deep=True)
    left = jnp.minimum(plan.left, group)
    right = jnp.minimum(left + plan.width, group)

    def log_term(ones):
        mirror = ((group - ones) + ones * jnp.exp(-eps0)) / (1.0 + jnp.exp(-eps0))
        return jnp.log(2.0 * mirror / group) + _log_f(_loss(ones, group, eps0), order)

    at_left, at_right = log_term(left), log_term(right)
    fraction = jnp.where(plan.width > 1, plan.fraction, 0.0)
    wide = jnp.where(plan.width > 1, 0.02, 0.0)
    # Chord at the block's mean, the mean's place in the block uncertain by 2 percent of the width.
    up = jnp.clip(fraction + wide * jnp.sign(at_right - at_left), 0.0, 1.0)
    chord = jnp.logaddexp(at_left + jnp.log1p(-up), at_right + jnp.log(up))
    chord = jnp.where(plan.width > 1, chord, at_left)
    upper = jax.nn.logsumexp(plan.log_upper + chord)
    missed = jnp.logaddexp(plan.log_missed_low, plan.log_missed_high)
    upper = jnp.logaddexp(upper, missed + _log_f(eps0, order) + jnp.log(2.0))
    # g falls, then rises: its least value on a block is at an end, unless the block holds the zero at m/2.
    least = jnp.where((left <= 0.5 * group) & (right >= 0.5 * group), -jnp.inf, jnp.minimum(at_left, at_right))
    lower = jax.nn.logsumexp(plan.log_lower + jnp.where(plan.width > 1, least, at_left))
    return upper, lower


@kernel(static=("rate", "size", "inner_size"), working_set=20_000_000)
def clones_renyi_bounds(
    num_users, eps0, order, *, rate: str = "clones", size: int = SIZE, inner_size: int = INNER_SIZE
) -> Bounds:
    """Certified bounds of the Renyi divergence of the clones pair at a real order > 1."""
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (num_users < jnp.inf)
    valid = valid & (eps0 >= 0) & (order > 1) & (eps0 < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0) & (order < jnp.inf)
    users, local, alpha = (jnp.where(inside, v, d) for v, d in ((num_users, 2.0), (eps0, 1.0), (order, 2.0)))
    r, complement = clone_rate(local, rate)
    plan = binomial_blocks(users - 1.0, r, complement, -alpha * local - 60.0, size=size)
    # One group at a time: its inner_size counts are all that is alive.
    log_upper, log_lower = jax.lax.map(lambda count: _group_divergence(count, local, alpha, inner_size), plan.left)
    # Counts above the window go to the last left end, where the divergence is larger.
    mass = plan.log_upper.at[-1].set(jnp.logaddexp(plan.log_upper[-1], plan.log_missed_high))
    above = jnp.logaddexp(jax.nn.logsumexp(mass + log_upper), plan.log_missed_low + _log_f(local, alpha))
    following = jnp.concatenate([log_lower[1:], jnp.full(1, -jnp.inf)])
    below = jax.nn.logsumexp(plan.log_lower + jnp.where(plan.width > 1, following, log_lower))
    upper = jnp.logaddexp(0.0, above) * (1.0 + _MARGIN) / (alpha - 1.0)
    lower = jnp.logaddexp(0.0, below) * (1.0 - _MARGIN) / (alpha - 1.0)
    # logaddexp(0, x) = log1p(e^x) keeps the digits of a small divergence.
    upper, lower = jnp.minimum(upper, local), jnp.minimum(lower, local)
    upper = jnp.where(jnp.isnan(upper), local, upper)  # a failure ends on the bound that always holds
    lower = jnp.where(jnp.isnan(lower), 0.0, lower)
    upper = jnp.where(inside, upper, jnp.where(valid, eps0, jnp.inf))
    return Bounds(jnp.where(inside, lower, 0.0), upper)


@kernel(static=("rate", "size", "inner_size"), working_set=20_000_000)
def clones_atoms(
    num_users, eps0, log_delta, *, rate: str = "clones", size: int = 128, inner_size: int = 128
) -> Atoms:
    """A finite pair that dominates the clones pair for all a > 0: `size` x `inner_size` atoms and one at eps0.

    log_delta: logarithm of the smallest delta per round that matters; mass cut from the windows (below
    1e-9 of it on the sides that can be bad) is put on the loss eps0. Blocks of the clone count go to their left end, blocks
    of ones to the loss of their right end: both only raise every hockey-stick divergence.
    """
    r, complement = clone_rate(eps0, rate)
    plan = binomial_blocks(num_users - 1.0, r, complement, log_delta, size=size)
    mass = plan.log_upper.at[-1].set(jnp.logaddexp(plan.log_upper[-1], plan.log_missed_high))

    def group(count, log_mass):
        coins = count + 1.0
        half = jnp.full_like(coins, 0.5)
        inner = binomial_blocks(coins, half, half, log_delta, size=inner_size, deep=True)
        right = jnp.clip(inner.left + jnp.maximum(inner.width, 1.0) - 1.0, 0.0, coins)
        # P grows with the ones: the block's mass under P is at most the coin mass times P at the right end.
        log_p = jnp.log(2.0 * (right + (coins - right) * jnp.exp(-eps0)) / (coins * (1.0 + jnp.exp(-eps0))))
        cut = jnp.logaddexp(inner.log_missed_low, inner.log_missed_high) + jnp.log(2.0)
        return _loss(right, coins, eps0), log_mass + inner.log_upper + log_p, log_mass + cut

    losses, weights, cut = jax.lax.map(lambda pair: group(*pair), (plan.left, mass))
    rest = jnp.logaddexp(jax.nn.logsumexp(cut), plan.log_missed_low)
    return Atoms(jnp.append(losses.reshape(-1), eps0), jnp.append(weights.reshape(-1), rest))
