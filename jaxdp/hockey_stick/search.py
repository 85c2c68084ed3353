"""Inversion of a decreasing log delta(eps): an estimate first, then certified steps to the safe side.

A side is a function eps -> `Side`. Nothing here trusts the estimate: the certified
loops accept an epsilon only after evaluating the certified side there, and end on the safe value otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LEAST_DELTA = 2.3e-308
"""Floor of an upper bound of a positive delta: one that underflows must not read 0, which means pure DP."""

_ESTIMATE_STEPS = 40
_CERTIFY_STEPS = 12
_ESTIMATE_TOLERANCE = 1e-4  # of the last Newton step, hence about 1e-8 of the root
_EXCESS = 3e-7  # an accepted eps this close to the root of its own certified curve is not improved


class Side(NamedTuple):
    """log delta and d log delta/d eps (< 0) at one eps."""

    log_delta: jax.Array
    slope: jax.Array


def decreasing_root(side: Callable, log_target, start, cap):
    """Estimate of the eps in [0, cap] with log delta(eps) = log_target (0 or cap where there is none).

    Newton on log delta; where that leaves the bracket, Newton on delta itself, which undershoots near the cap
    where delta falls linearly to 0; bisection last.
    """

    def cond(state):
        low, high, epsilon, step, count = state
        return (count < _ESTIMATE_STEPS) & (jnp.abs(step) > _ESTIMATE_TOLERANCE * jnp.minimum(epsilon, cap - epsilon))

    def body(state):
        low, high, epsilon, _, count = state
        value, slope = side(epsilon)
        residual = value - log_target
        low = jnp.where(residual > 0, epsilon, low)
        high = jnp.where(residual > 0, high, epsilon)
        newton = epsilon - residual / slope
        linear = epsilon + jnp.expm1(-jnp.clip(residual, -30.0, 700.0)) / slope
        bisect = 0.5 * (low + high)
        following = jnp.where(_inside(newton, low, high), newton, jnp.where(_inside(linear, low, high), linear, bisect))
        return low, high, following, following - epsilon, count + 1

    zero = jnp.zeros_like(cap)
    state = (zero, cap, start, jnp.full_like(cap, jnp.inf), jnp.int32(0))
    low, _, epsilon, _, _ = jax.lax.while_loop(cond, body, state)
    # A bracket that never moved off 0 and shrank onto it: delta(0) is below the target.
    return jnp.where((low == 0.0) & (epsilon < 1e-9 * cap), 0.0, epsilon)


def _inside(value, low, high):
    return (value > low) & (value < high)


class Certified(NamedTuple):
    """Certified log delta from above and from below at one eps, and one slope that serves both searches."""

    log_upper: jax.Array
    log_lower: jax.Array
    slope: jax.Array


class _Search(NamedTuple):
    epsilon: jax.Array
    best: jax.Array
    floor: jax.Array
    descending: jax.Array  # the upper side is settled, the lower one is being searched
    done: jax.Array
    tries: jax.Array


def certify(both: Callable, log_target, start, cap, *, with_lower: bool = True):
    """(lower, upper) of the eps with log delta(eps) = log_target, each an eps at which its own curve was evaluated.

    upper: smallest tried eps whose upper log delta is <= log_target, else cap. A first accepted one that
    lies more than a few 1e-7 too high is improved by Newton steps from above. lower: largest tried eps whose
    lower log delta is >= log_target, else 0; not searched for unless `with_lower`. One loop for both sides, because
    each compiled copy of the curve costs seconds. `both(eps, descending)`: once descending only its lower value counts,
    before that its lower value may be -inf.
    """

    def body(state):
        value = both(state.epsilon, state.descending)
        accepted = value.log_upper <= log_target
        best = jnp.where(accepted, jnp.minimum(state.best, state.epsilon), state.best)
        passes = value.log_lower >= log_target
        floor = jnp.where(passes, jnp.maximum(state.floor, state.epsilon), state.floor)
        following, settled = _from_above(state.epsilon, value, log_target, best, accepted, state.tries)
        settled = state.descending | settled | (state.tries >= _CERTIFY_STEPS)
        tries = jnp.where(settled & ~state.descending, 0, state.tries + 1)
        if not with_lower:
            return _Search(following, best, floor, settled, settled, tries)
        descent = _from_below(state.epsilon, value, log_target, tries)
        done = settled & (passes | (descent <= 0) | (state.descending & (tries >= _CERTIFY_STEPS)))
        return _Search(jnp.where(settled, descent, following), best, floor, settled, done, tries)

    no = jnp.zeros_like(start, dtype=bool)
    state = _Search(start, cap, jnp.zeros_like(start), no, no, jnp.int32(0))
    end = jax.lax.while_loop(lambda state: ~state.done, body, state)
    upper = jnp.minimum(end.best, cap)
    return jnp.minimum(end.floor, upper), upper


def _from_above(epsilon, value: Certified, log_target, best, accepted, tries):
    """Next eps of the upper search, and whether it may end here."""
    newton = epsilon - (value.log_upper - log_target) / value.slope
    # From below, Newton lands beyond the root; the nudge, growing with the count, covers kinks and rounding.
    nudge = 1e-12 * 4.0 ** tries.astype(epsilon.dtype)
    raised = newton + nudge * epsilon
    raised = jnp.where(_inside(raised, epsilon, best), raised, 0.5 * (epsilon + best))
    following = jnp.maximum(jnp.where(accepted, newton, raised), 0.0)
    close = accepted & ~(epsilon - following > _EXCESS * epsilon)
    stuck = ~accepted & (best - following <= _EXCESS * best) & (tries >= _CERTIFY_STEPS // 2)
    return following, close | stuck


def _from_below(epsilon, value: Certified, log_target, tries):
    """Next eps of the lower search: Newton with a growing overshoot, geometric where nothing can be certified."""
    growth = 4.0 ** tries.astype(epsilon.dtype)
    residual = jnp.minimum(value.log_lower - log_target, 0.0)
    step = residual / value.slope * (1.0 + 1e-3 * growth) + 1e-13 * epsilon
    # Too close to the cap the lower log delta is -inf: back off from one ulp.
    step = jnp.where(jnp.isfinite(step), step, growth**3 * 1e-15 * epsilon)
    return jnp.maximum(epsilon - step, 0.0)
