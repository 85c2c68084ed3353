"""Optimal shift allocation along a noisy iteration, by pooling adjacent violators.

The iteration is x_j = Pi(psi_j(x_{j-1}) + N(0, s_j^2 I)). The map psi_j is kappa_j-Lipschitz, and the maps of two
neighbouring runs differ by at most d_j. The noise of step j hides a part a_j of the distance between the two runs at
the cost a_j^2 / s_j^2. The distance not yet hidden is at most z_j = kappa_j z_{j-1} + d_j - a_j, with z_0 = z_T = 0.
The last iterate is mu-GDP, and mu^2 is the total cost. The cheapest allocation is an isotonic regression. Its blocks
are runs of steps with a common slope, and mu^2 is the sum over the blocks of (sum D)^2 / (sum v). D are the distances
d_j and v the variances s_j^2 of the steps, both scaled by the later kappas to the end of the run.

A block is stored as (log D, log v), expressed in the units at some step, its frame: logarithms stay in range where
kappa^(2T) overflows.
"""

import functools
import math

import jax
import numpy as np

from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary
from jaxdp.runtime.precision import kernel, many

# Schedules that NumPy computes together; steps of one schedule that NumPy computes in the time of compiling (1.6 s).
_AT_ONCE, _STEPS_OF_COMPILING = 256, 8000


def _working_set(schedule, *_):
    """A quarter of the 24 numbers per step that a point may hold (three stacks): few are used at a time."""
    return 6 * (schedule.shape[-1] + 1)


def _patience_alone(schedule, *_):
    """Schedules that NumPy computes one by one in the time of compiling."""
    return _STEPS_OF_COMPILING // (schedule.shape[-1] + 1)


def _patience(schedule, *_):
    """Schedules that NumPy computes in the time of compiling: 0.2 ms a step, 2 ms for hundreds of schedules at once."""
    steps = schedule.shape[-1] + 1
    together = min(_AT_ONCE, 20_000 / steps) if many(schedule) else 0
    return int(_STEPS_OF_COMPILING * max(0.1 * together, 1) / steps)


def _unit(numbers):
    """The largest number, or 1 if all are 0: the unit in which squares and their inverses stay in range."""
    largest = xp.stop_gradient(xp.max(numbers))
    return xp.where(largest > 0, largest, 1.0)


def _log_ratio(power, log_d, log_v):
    """log(D^power / v) of a block, its slope (1) or cost (2); inf without noise for a distance, -inf without one."""
    return xp.where(log_d > -xp.inf, power * log_d - log_v, -xp.inf)


def _larger(largest, *logs):
    """The largest of a number and of the absolute values of the finite logarithms."""
    for each in logs:
        largest = xp.maximum(largest, xp.where(xp.isfinite(each), xp.abs(each), 0.0))
    return largest


def _one_move(steps, carry, _):
    """One move: merge the two topmost blocks if their slopes decrease, otherwise add the next step as a block.

    T steps need at most 2 T moves. A block is (log D, log v, log of the product of the kappas since it was pushed,
    first step). A block below the top is changed to the frame of the top only when the two are compared, so a move
    takes constant time.
    """
    log_k, log_s2, log_d = steps
    index, depth, top, below, stack, largest = carry
    below_d, below_v = below[0] + top[2], below[1] + 2 * top[2]
    merges = (depth > 0) & (_log_ratio(1, below_d, below_v) >= _log_ratio(1, top[0], top[1]))
    union = xp.logaddexp(below_d, top[0]), xp.logaddexp(below_v, top[1])
    merged = xp.stack([*union, below[2] + top[2], below[3]])

    here = xp.minimum(index, log_k.shape[0] - 1)
    takes = ~merges & (index < log_k.shape[0])
    scaled = top + log_k[here] * xp.array([1.0, 2.0, 1.0, 0.0])
    fresh = xp.stack([log_d[here], log_s2[here], xp.zeros_like(log_k[here]), here.astype(log_k.dtype)])

    pushes = takes & (top[0] > -xp.inf)  # a top block without distance is the only block, and is dropped
    # Every move first writes (to a spare last row if nothing is pushed) and then reads the next block. In any other
    # order XLA copies the whole stack at every move.
    slot = xp.where(pushes, depth, log_k.shape[0])
    stack = xp.set_at(stack, slot, scaled)
    new_top = xp.where(merges, merged, xp.where(takes, fresh, top))
    depth = xp.where(merges, depth - 1, depth + pushes)
    largest = _larger(largest, new_top[0], new_top[1])
    below = xp.lookup(stack, xp.maximum(depth - 1, 0))
    return (index + takes, depth, new_top, below, stack, largest), None


def _blocks(log_k, log_s2, log_d):
    """The final blocks as rows (log D, log v, unused, first step), their number, and the largest |logarithm| seen."""
    count = log_k.shape[0]
    top = xp.array([-xp.inf, 0.0, 0.0, 0.0], log_k.dtype)
    stack = xp.zeros((count + 1, 4), log_k.dtype)
    start = (xp.zeros((), xp.int32), xp.zeros((), xp.int32), top, top, stack, xp.zeros((), log_k.dtype))
    move = functools.partial(_one_move, (log_k, log_s2, log_d))
    (_, depth, top, _, stack, largest), _ = xp.scan(move, start, None, length=2 * count)
    return xp.set_at(stack, depth, top), depth + 1, largest


def _is_valid(contraction, noise_std, shift):
    finite = xp.isfinite(contraction) & xp.isfinite(noise_std) & xp.isfinite(shift)
    return xp.all(finite & (contraction >= 0) & (noise_std >= 0) & (shift >= 0))


def _units(log_s2, log_d2):
    """Logs of the largest variance and the largest squared distance, in which the others are expressed; 0 for none."""
    return (xp.where(xp.isfinite(largest), largest, 0.0) for largest in (xp.max(log_s2), xp.max(log_d2)))


def _outward(log_mu2, positive, s_unit, d_unit, largest, steps, valid):
    """mu^2 in the caller's units, rounded up; inf if a distance is never hidden by noise, or for invalid input."""
    slack = 1.0 + 16 * ULP * ((steps + 8.0) * (4.0 + largest) + xp.abs(s_unit) + xp.abs(d_unit))
    slack = slack + 16 * ULP * xp.where(log_mu2 > -xp.inf, xp.abs(log_mu2), 0.0)
    value = xp.maximum(xp.exp(log_mu2 + (d_unit - s_unit)), NEXT_TO_ZERO) * slack
    value = xp.where(positive, value, 0.0)  # not mu2 > 0, because a positive optimum may have underflowed
    return xp.where((value < xp.inf) & valid, value, xp.inf)


def _mu2_and_blocks(log_k, log_s2, log_d2, valid):
    """mu^2 of a schedule given by (log kappa, log s^2, log d^2), rounded up, and the final blocks."""
    s_unit, d_unit = _units(log_s2, log_d2)
    stack, number, largest = _blocks(log_k, log_s2 - s_unit, (log_d2 - d_unit) / 2)
    costs = xp.where(xp.arange(stack.shape[0]) < number, _log_ratio(2, stack[:, 0], stack[:, 1]), -xp.inf)
    # A logarithm, because the sum of the costs may underflow or overflow.
    log_mu2 = xp.logsumexp(costs)
    mu2 = _outward(log_mu2, log_mu2 > -xp.inf, s_unit, d_unit, largest, log_k.shape[0], valid)
    return mu2, (stack, number)


def _logs(contraction, noise_std, shift):
    """(log kappa, log s^2, log d^2).

    kappa = 0 erases all earlier distances: they count as 0 and this kappa as 1. Other kappas below 1e-300 are raised to
    it, which can only raise mu.
    """
    erases = contraction == 0
    erasing_from_here = xp.cumsum(xp.where(erases, 1.0, 0.0)[::-1], axis=0)[::-1]
    shift = xp.where(erasing_from_here > erases, 0.0, shift)  # a later step erases this one
    log_k = xp.log(xp.where(erases, 1.0, xp.maximum(contraction, NEXT_TO_ZERO)))
    return log_k, 2 * xp.log(noise_std), 2 * xp.log(shift)


def _solve(contraction, noise_std, shift):
    """(mu^2 rounded up, the final blocks)."""
    return _mu2_and_blocks(*_logs(contraction, noise_std, shift), _is_valid(contraction, noise_std, shift))


def _cost(block, contraction, noise_std, shift):
    """mu^2 of given blocks: the sum of (sum D)^2 / (sum v). block: the number of each step's block, or 0 for none."""
    # The cost of a block does not depend on its frame: take the one in which its largest scale is 1.
    log_k = xp.cumsum(xp.log(xp.where(contraction > 0, contraction, 1.0)), axis=0)
    frame = jax.ops.segment_min(xp.stop_gradient(log_k), block, block.size + 1)[block]
    scale = xp.exp(frame - log_k)
    s_unit, d_unit = _unit(noise_std), _unit(shift)
    parts = scale * shift / d_unit, (scale * noise_std / s_unit) ** 2
    distance, variance = (jax.ops.segment_sum(part, block, block.size + 1)[1:] for part in parts)
    noisy = variance > 0
    return xp.sum(xp.where(noisy, distance**2 / xp.where(noisy, variance, 1.0), 0.0)) * (d_unit / s_unit) ** 2


def allocation_excess(contraction, noise_std, shift, mu):
    """Bound of the relative excess of mu, the root of `shift_allocation_mu2`; inf if mu or a kappa was raised."""

    def abs_log(x):
        return xp.where(x > 0, xp.abs(xp.log(xp.where(x > 0, x, 1.0))), 0.0)

    steps = shift.shape[-1]
    if steps == 0:
        return xp.zeros_like(mu)
    s_unit, d_unit = _unit(noise_std), _unit(shift)
    apart = 2 * xp.max(abs_log(noise_std / s_unit)) + xp.max(abs_log(shift / d_unit))
    largest = math.log(steps + 1) + 2 * xp.sum(abs_log(contraction)) + apart
    units = abs_log(mu) + 2 * abs_log(d_unit) + 2 * abs_log(s_unit)
    excess = 32 * ULP * ((steps + 8) * (4 + largest) + units)
    exact = (mu > 1.01 * math.sqrt(NEXT_TO_ZERO)) & xp.all((contraction >= NEXT_TO_ZERO) | (contraction == 0))
    return xp.where(exact, excess, xp.where(mu == 0, 0.0, xp.inf))


@jax.custom_jvp
def _mu2(contraction, noise_std, shift):
    return _solve(contraction, noise_std, shift)[0]


@_mu2.defjvp
def _mu2_jvp(primals, tangents):
    # Envelope theorem: the derivative of the optimum is the derivative of the cost with the optimal blocks held fixed.
    mu2, (stack, number) = _solve(*primals)
    first = xp.where(xp.arange(stack.shape[0]) < number, stack[:, 3], xp.inf)
    block = xp.searchsorted(first, xp.arange(stack.shape[0] - 1, dtype=first.dtype), side="right")
    known = _is_valid(*primals) & (mu2 < xp.inf)
    primals = tuple(xp.where(known, x, 0.0) for x in primals)
    return mu2, jax.jvp(functools.partial(_cost, block), primals, tangents)[1]


def shift_allocation_mu2(contraction, noise_std, shift):
    """Smallest mu^2 of the last iterate over all shift allocations of one schedule, rounded up.

    contraction: (T,) Lipschitz constants kappa_j >= 0 of the maps.
    noise_std: (T,) noise standard deviations s_j >= 0 per coordinate.
    shift: (T,) distances d_j >= 0 between the two maps of step j.

    Returns the scalar mu^2 >= 0; inf if a distance is never hidden by noise, or if an entry is invalid. mu^2 exceeds
    the exact optimum by at most 8 ulp (T + 8) (4 + max |log D|, |log v|) relative, over all blocks that were merged, in
    units of the largest d_j and s_j. A positive optimum below 1e-300 is reported as 1e-300. Traceable in float64, and
    differentiable once in all arrays: the blocks are locally constant, so the derivative is that of the cost of fixed
    blocks.
    Reference: notebooks/proofs/heterogeneous_gdp_iteration.md.
    """
    contraction, noise_std, shift = map(xp.asarray, (contraction, noise_std, shift))
    if not shift.shape[0]:
        return xp.zeros((), shift.dtype)
    return _solve(contraction, noise_std, shift)[0] if xp.eager else _mu2(contraction, noise_std, shift)


allocation = kernel(working_set=_working_set, by_numpy=_patience, at_once=_AT_ONCE)(shift_allocation_mu2)


@canary("isotonic.allocation")
def _allocation_canary():
    """Twelve steps with two blocks against 18 exact digits."""
    contraction = [0.968, 0.901, 1.006, 0.810, 0.943, 0.908, 0.903, 0.860, 0.994, 1.031, 0.866, 0.932]
    variance = [0.403, 1.493, 1.4, 1.988, 1.697, 0.784, 0.956, 1.437, 0.338, 1.085, 0.586, 0.499]
    shift = [1.583, 0.646, 1.769, 1.009, 0, 0, 1.0, 0, 0.948, 1.792, 0, 0.517]
    rows = [np.asarray([row]) for row in (contraction, np.sqrt(variance), shift)]
    return allocation.run_unchecked(*rows), 6.3501231478890159994, 1e-11


@kernel(working_set=_working_set, by_numpy=_patience, at_once=_AT_ONCE)
def participation_allocation(log_contraction, log_variance, log_shift2):
    """mu^2 of a schedule given by (log kappa, log s^2, log d^2), as `participation_steps` returns them; rounded up."""
    if log_shift2.shape[0] == 0:
        return xp.zeros((), log_shift2.dtype)
    return _mu2_and_blocks(log_contraction, log_variance, log_shift2, xp.asarray(True))[0]


def _follow(first, second):
    """Two successive stretches of noise-only steps as one: (log product of kappas, log noise variance at the end)."""
    (k1, v1), (k2, v2) = first, second
    return k1 + k2, np.logaddexp(v1 + 2 * k2, v2)


def _stretches(log_k, log_v, start, stop):
    """(log kappa, log variance) of the steps start..stop-1, for many stretches of T steps; by doubling, O(T log T)."""
    count = log_k.size
    table = log_k, log_v
    total = np.zeros(start.shape), np.full(start.shape, -np.inf)
    length, position = stop - start, start
    for level in range(int(np.max(length, initial=0)).bit_length()):
        span = 1 << level
        taken = (length >> level) % 2 == 1
        piece = tuple(part[np.minimum(position, count - 1)] for part in table)
        total = tuple(np.where(taken, new, old) for new, old in zip(_follow(total, piece), total, strict=True))
        position = position + np.where(taken, span, 0)
        no_steps = np.zeros(min(span, count)), np.full(min(span, count), -np.inf)
        table = _follow(table, tuple(np.append(part[span:], end) for part, end in zip(table, no_steps, strict=True)))
    return total


def participation_steps(log_contraction, log_noise, log_shift, steps):
    """One step per participation: (log kappa, log s^2, log d^2), each of the shape of `steps`. NumPy arrays in and out.

    log_contraction, log_noise, log_shift: (T,) logarithms of kappa_j, s_j and d_j.
    steps: (n, p); row i holds the increasing zero-based steps at which record i takes part, padded with T.
    A participation and the steps up to the next one form one step, because steps that only add noise always merge into
    the block before them.
    """
    count = log_contraction.size
    following = np.append(steps[:, 1:], np.full((steps.shape[0], 1), count), axis=1)
    real, here = steps < count, np.minimum(steps, count - 1)
    begin = np.minimum(steps + 1, count)
    with np.errstate(invalid="ignore"):  # -inf - (-inf) where there is no noise
        rest = _stretches(log_contraction, 2 * log_noise, begin, np.maximum(following, begin))
        step_k, step_v = _follow((log_contraction[here], 2 * log_noise[here]), rest)
        log_d2 = 2 * log_shift[here] + 2 * rest[0]
    return np.where(real, step_k, 0.0), np.where(real, step_v, -np.inf), np.where(real, log_d2, -np.inf)


@kernel(working_set=_working_set, by_numpy=_patience, at_once=_AT_ONCE)
def single_participation_mu2(contraction, noise_std, shift):
    """mu_i^2 of a record that takes part in step i only, for every step i of one schedule; rounded up.

    mu_i^2 = d_i^2 / S_i with S_i = s_i^2 + S_{i+1} / kappa_{i+1}^2, by one backward scan. All terms are positive, and
    the relative excess is at most 4 ulp (T + 8).
    """
    if shift.shape[0] == 0:
        return shift
    valid = _is_valid(contraction, noise_std, shift)
    # More noise counts as 1e300, and squares or quotients that lose digits as 0. Less noise gives a larger mu^2.
    huge, least, unit = 1e300, 1e-307, _unit(noise_std)

    def step(hidden, x):
        kappa, noise = x
        here = xp.minimum(xp.where(noise**2 > least, noise**2, 0.0) + hidden, huge)
        square = kappa**2
        before = xp.where(square > least, here / xp.where(square > least, square, 1.0), 0.0)
        return xp.where(before > least, xp.minimum(before, huge), 0.0), here

    _, noise = xp.scan(step, xp.zeros((), shift.dtype), (contraction, noise_std / unit), reverse=True)
    moved = xp.where(shift > 0, xp.maximum(shift / unit, 1e-290), 0.0)
    mu2 = (moved / xp.sqrt(noise)) ** 2 * (1.0 + 8 * ULP * (shift.shape[0] + 8.0))
    mu2 = xp.where(shift > 0, xp.maximum(mu2, NEXT_TO_ZERO), 0.0)
    return xp.where(valid, mu2, xp.inf)


def _absorb_to_the_right(block, depth, stack):
    """Merge a new first block with the blocks after it until the slopes increase.

    block: (log D, log v). The rows of the stack are (log D, log v, log of the scale since the row was pushed, log of
    the cost of this and all later blocks). Returns (merged block, number of blocks after it, log of the scale from the
    next block's frame, log of the cost of all blocks).
    """

    def next_of(state):
        _, position, scale = state
        row = xp.lookup(stack, xp.maximum(position - 1, 0))
        return (row[0] + scale, row[1] + 2 * scale), row[2]

    def violates(state):
        return (state[1] > 0) & (_log_ratio(1, *state[0]) >= _log_ratio(1, *next_of(state)[0]))

    def absorb(state):
        following, scale = next_of(state)
        return xp.logaddexp(state[0], xp.stack(following)), state[1] - 1, state[2] + scale

    merged, depth, scale = xp.while_loop(violates, absorb, (block, depth, xp.zeros((), block.dtype)))
    rest = xp.where(depth > 0, stack[xp.maximum(depth - 1, 0), 3], -xp.inf)
    return merged, depth, scale, xp.logaddexp(_log_ratio(2, *merged), rest)


def _prepend(log_reset, carry, x):
    """Add a step before the later steps. Update log mu^2 without restarts (plain) and the smallest with one (best)."""
    depth, stack, best, _, largest = carry
    log_k, log_v, log_d = x
    jump = xp.logaddexp(log_d, log_reset + log_k)
    _, _, _, restarted = _absorb_to_the_right(xp.stack([jump, log_v]), depth, stack)
    merged, lower, scale, plain = _absorb_to_the_right(xp.stack([log_d, log_v]), depth, stack)
    # Change to the frame of the step before this one: all later distances are divided by kappa.
    row = xp.stack([merged[0] - log_k, merged[1] - 2 * log_k, scale - log_k, plain])
    stack = xp.set_at(stack, lower, row)
    return (lower + 1, stack, xp.minimum(best, restarted), plain, _larger(largest, row[0], row[1])), None


@kernel(working_set=_working_set, by_numpy=_patience_alone)
def restarted_mu2(contraction, noise_std, shift, diameter):
    """Smallest mu^2 of one schedule whose iterates stay in a set of the given diameter; rounded up.

    The two runs are never further apart than the diameter, so the allocation may start at any step k from z = diameter.
    One pass from the last step to the first finds the minimum over k. Accuracy as for `shift_allocation_mu2`.
    Traceable; not differentiable in reverse mode. Takes 0.1 s at T = 1e4, 13 s at 1e5: blocks are copied at each step.
    """
    count = shift.shape[0]
    if count == 0:
        return xp.zeros((), shift.dtype)
    valid = _is_valid(contraction, noise_std, shift) & (diameter >= 0)
    log_k, log_s2, log_d2 = _logs(contraction, noise_std, shift)
    log_reset = xp.log(diameter)
    s_unit, d_unit = _units(log_s2, xp.append(log_d2, 2 * log_reset))
    zero = xp.zeros((), shift.dtype)
    start = (xp.zeros((), xp.int32), xp.zeros((count, 4), shift.dtype), zero + xp.inf, zero - xp.inf, zero)
    prepend = functools.partial(_prepend, log_reset - d_unit / 2)
    steps = log_k, log_s2 - s_unit, (log_d2 - d_unit) / 2
    (_, _, best, plain, largest), _ = xp.scan(prepend, start, steps, reverse=True)
    return _outward(xp.minimum(best, plain), xp.any(shift > 0), s_unit, d_unit, largest, count, valid)
