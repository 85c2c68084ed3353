"""Optimal shift allocation along a noisy iteration, by pooling adjacent violators.

The iteration x_j = Pi(psi_j(x_{j-1}) + N(0, s_j^2 I)) against a neighbouring run keeps a distance bound
z_j = kappa_j z_{j-1} + d_j - a_j with z_0 = z_T = 0. Spending a_j at step j costs a_j^2 / s_j^2, and the last
iterate is mu-GDP for mu^2 the total cost. The cheapest allocation is an isotonic regression, so mu^2 is
the sum over its blocks of (sum D)^2 / (sum v), in the units of the end of the run.

A block is kept as (log m, log v): m = D^2 / v does not change when a further step scales the block, so
nothing is lost however often that happens, and log v cannot overflow where kappa^(2T) would.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.precision import canary, kernel

# log of the stand-in for the variance of a noiseless step; a final block this thin is reported as infinite.
_LOG_NO_NOISE = -600.0
_LOG_INFINITE = 450.0
_SMALLEST = 1e-300
_ULP = 2.0**-52


def _log_units(contraction, noise_std, shift):
    """(log kappa, log s^2, log d^2, log of the unit of mu^2): the largest s and the largest d become 1."""
    s_unit = jnp.max(noise_std)
    d_unit = jnp.max(shift)
    s_unit = jnp.where(s_unit > 0, s_unit, 1.0)
    d_unit = jnp.where(d_unit > 0, d_unit, 1.0)
    log_s2 = 2 * jnp.log(noise_std / s_unit)
    log_d2 = 2 * jnp.log(shift / d_unit)
    return jnp.log(contraction), log_s2, log_d2, 2 * (jnp.log(d_unit) - jnp.log(s_unit))


def _merge(log_m1, log_v1, log_m2, log_v2):
    """One block out of two in the same frame: distances add, variances add."""
    log_d = jnp.logaddexp((log_m1 + log_v1) / 2, (log_m2 + log_v2) / 2)
    log_v = jnp.logaddexp(log_v1, log_v2)
    return 2 * log_d - log_v, log_v


def _one_move(steps, carry, _):
    """Merge the top block into the one below, or else take in the next step; at most 2 T moves in all.

    A top block is (log m, log v, log of the kappas seen since it was pushed, first step). Blocks below are
    brought to the frame of the top only when they are met, which makes a step O(1).
    """
    log_k, log_s2, log_d2 = steps
    index, depth, top, below, stack, largest = carry
    log_v_below = below[1] + 2 * top[2]
    merges = (depth > 0) & (below[0] - log_v_below >= top[0] - top[1])
    log_m, log_v = _merge(below[0], log_v_below, top[0], top[1])
    merged = jnp.stack([log_m, log_v, below[2] + top[2], below[3]])

    here = jnp.minimum(index, log_k.shape[0] - 1)
    takes = ~merges & (index < log_k.shape[0])
    kappa, noise, moved = log_k[here], log_s2[here], log_d2[here]
    forgets = kappa == -jnp.inf
    empty = forgets | (top[0] == -jnp.inf)
    only_scales = (noise == -jnp.inf) & (moved == -jnp.inf) & ~forgets
    scaled = top + jnp.where(forgets, 0.0, kappa) * jnp.array([0.0, 2.0, 1.0, 0.0])
    noise = jnp.maximum(noise, _LOG_NO_NOISE)
    fresh = jnp.stack([moved - noise, noise, jnp.zeros_like(noise), here.astype(noise.dtype)])

    pushes = takes & ~empty & ~only_scales
    # Always write, to a spare last row when nothing is pushed, and read the next block after that: in any
    # other order the whole stack is copied at every move.
    slot = jnp.where(pushes, depth, log_k.shape[0])
    stack = stack.at[slot].set(scaled, mode="promise_in_bounds")
    new_top = jnp.where(merges, merged, jnp.where(takes, jnp.where(only_scales, scaled, fresh), top))
    depth = jnp.where(merges, depth - 1, jnp.where(takes & empty, 0, depth + pushes))
    largest = jnp.maximum(largest, jnp.abs(new_top[1]))
    below = stack.at[jnp.maximum(depth - 1, 0)].get(mode="promise_in_bounds")
    return (index + takes, depth, new_top, below, stack, largest), None


def _blocks(log_k, log_s2, log_d2):
    """Final blocks as rows (log m, log v, -, first step), their number, and the largest |log v| met."""
    count = log_k.shape[0]
    top = jnp.array([-jnp.inf, 0.0, 0.0, 0.0], log_k.dtype)
    stack = jnp.zeros((count + 1, 4), log_k.dtype)
    start = (jnp.int32(0), jnp.int32(0), top, top, stack, jnp.zeros((), log_k.dtype))

    def move(carry, x):
        return _one_move((log_k, log_s2, log_d2), carry, x)

    (_, depth, top, _, stack, largest), _ = lax.scan(move, start, None, length=2 * count)
    return stack.at[depth].set(top), depth + 1, largest


def _is_valid(contraction, noise_std, shift):
    finite = jnp.isfinite(contraction) & jnp.isfinite(noise_std) & jnp.isfinite(shift)
    return jnp.all(finite & (contraction >= 0) & (noise_std >= 0) & (shift >= 0))


def _outward(mu2, log_unit, largest, steps, valid):
    """mu^2 in the caller's units, rounded up; infinite when a noiseless step is not hidden, or on bad input."""
    slack = 1.0 + 8 * _ULP * (steps + 8.0) * (4.0 + largest)
    value = jnp.maximum(jnp.exp(jnp.log(mu2) + log_unit), _SMALLEST) * slack
    value = jnp.where(mu2 > 0, value, 0.0)
    finite = (mu2 < jnp.exp(_LOG_INFINITE)) & (value < jnp.inf) & valid
    return jnp.where(finite, value, jnp.inf)


def _solve(contraction, noise_std, shift):
    """(mu^2 rounded up, price of one more unit of distance at each step, log price unit free)."""
    valid = _is_valid(contraction, noise_std, shift)
    log_k, log_s2, log_d2, log_unit = _log_units(contraction, noise_std, shift)
    stack, number, largest = _blocks(log_k, log_s2, log_d2)
    kept = jnp.arange(stack.shape[0]) < number
    total = jnp.sum(jnp.where(kept, jnp.exp(stack[:, 0]), 0.0))
    mu2 = _outward(total, log_unit, largest, log_k.shape[0], valid)
    return mu2, (stack, number, log_k)


def _prices(contraction, noise_std, shift, blocks):
    """lambda_j = a_j / s_j^2, the slope of the block of step j in the frame of step j, and the last steps."""
    stack, number, log_k = blocks
    count = log_k.shape[0]
    first = jnp.where(jnp.arange(count + 1) < number, stack[:, 3], jnp.inf)
    position = jnp.arange(count, dtype=first.dtype)
    block = jnp.searchsorted(first, position, side="right") - 1
    following = jnp.concatenate([first[1:], jnp.array([jnp.inf], first.dtype)])
    frame = jnp.where(jnp.isinf(following), count - 1, following).astype(jnp.int32)
    to_end = jnp.cumsum(log_k[::-1])[::-1] - jnp.where(jnp.isinf(log_k), 0.0, log_k)
    to_end = jnp.where(jnp.isnan(to_end), -jnp.inf, to_end)
    live = (block >= 0) & (stack[block, 0] > -jnp.inf)
    gap = jnp.where(live, to_end, 0.0) - jnp.where(live, to_end[frame[block]], 0.0)
    slope = jnp.exp((stack[block, 0] - stack[block, 1]) / 2 + gap)
    s_unit, d_unit = jnp.max(noise_std), jnp.max(shift)
    unit = jnp.where(s_unit > 0, d_unit / jnp.where(s_unit > 0, s_unit, 1.0) ** 2, 0.0)
    last = position + 1 == following[block]
    return jnp.where(live, slope * unit, 0.0), live & last


def _distances(contraction, noise_std, shift, price, last):
    """z_{j-1} for every j: the distance bound that step j starts from."""

    def step(z, x):
        kappa, d, spent, ends = x
        return jnp.where(ends, 0.0, jnp.maximum(kappa * z + d - spent, 0.0)), z

    spent = price * noise_std**2
    return lax.scan(step, jnp.zeros((), shift.dtype), (contraction, shift, spent, last))[1]


@jax.custom_jvp
def _mu2(contraction, noise_std, shift):
    return _solve(contraction, noise_std, shift)[0]


@_mu2.defjvp
def _mu2_jvp(primals, tangents):
    # Envelope theorem: at the optimum only the direct dependence of the cost and of the constraint counts,
    # and the price of the constraint of step j is 2 lambda_j.
    contraction, noise_std, shift = primals
    mu2, blocks = _solve(*primals)
    price, last = _prices(*primals, blocks)
    before = _distances(*primals, price, last)
    k_dot, s_dot, d_dot = tangents
    change = price * d_dot - price**2 * noise_std * s_dot + price * before * k_dot
    return mu2, 2 * jnp.sum(jnp.where(price > 0, change, 0.0))


def _mu2_of_schedule(contraction, noise_std, shift):
    if shift.shape[0] == 0:
        return jnp.zeros((), shift.dtype)
    return _mu2(contraction, noise_std, shift)


def shift_allocation_mu2(contraction, noise_std, shift):
    """Smallest mu^2 of the last iterate over all shift allocations of one schedule, rounded up.

    Args:
        contraction: (T,) Lipschitz constants kappa_j >= 0 of the maps.
        noise_std: (T,) noise standard deviations s_j >= 0 per coordinate.
        shift: (T,) distances d_j >= 0 between the two maps of step j.

    Returns:
        Scalar mu^2 >= 0; infinite where a noiseless step is never hidden, or where an entry is invalid.
        Above the exact optimum by a relative 8 ulp (T + 8) (4 + max |log v|), v the block variances in units
        of the largest s_j^2; an optimum below 1e-300 is reported as 1e-300.

    One point, traceable in float64, differentiable once in all three arrays (blocks are locally constant, so the
    derivative is that of the closed form). Noise before the first participation is never used.
    Reference: MATH notes in notebooks/proofs/heterogeneous_gdp_iteration.md.
    """
    contraction, noise_std, shift = map(jnp.asarray, (contraction, noise_std, shift))
    return _mu2_of_schedule(contraction, noise_std, shift)


@kernel(working_set=4096)
def allocation(contraction, noise_std, shift):
    """mu^2 of one schedule (see `shift_allocation_mu2`)."""
    return shift_allocation_mu2(contraction, noise_std, shift)


@canary("isotonic.allocation")
def _allocation_canary():
    """Twelve steps with two blocks against 18 exact digits."""
    contraction = [0.968, 0.901, 1.006, 0.810, 0.943, 0.908, 0.903, 0.860, 0.994, 1.031, 0.866, 0.932]
    variance = [0.403, 1.493, 1.4, 1.988, 1.697, 0.784, 0.956, 1.437, 0.338, 1.085, 0.586, 0.499]
    shift = [1.583, 0.646, 1.769, 1.009, 0, 0, 1.0, 0, 0.948, 1.792, 0, 0.517]
    rows = [np.asarray([row]) for row in (contraction, np.sqrt(variance), shift)]
    return allocation.run_unchecked(*rows), 6.3501231478890159994, 1e-11
