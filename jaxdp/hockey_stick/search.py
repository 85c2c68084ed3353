"""Inversion of a decreasing log delta(eps): an estimate first, then certified steps to the safe side.

A side is a function eps -> `Side`. Nothing here trusts the estimate: the certified
loops accept an epsilon only after evaluating the certified side there, and end on the safe value otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def certify_above(side: Callable, log_target, start, cap):
    """Smallest tried eps at which the certified upper log delta is <= log_target, else cap.

    A first accepted eps that lies more than a few 1e-7 too high is improved by Newton steps from above.
    """

    def cond(state):
        _, _, done, count = state
        return ~done & (count < _CERTIFY_STEPS)

    def body(state):
        epsilon, best, _, count = state
        value, slope = side(epsilon)
        accepted = value <= log_target
        best = jnp.where(accepted, jnp.minimum(best, epsilon), best)
        newton = epsilon - (value - log_target) / slope
        # From below, Newton lands beyond the root; the nudge, growing with the count, covers kinks and rounding.
        nudge = 1e-12 * 4.0 ** count.astype(epsilon.dtype)
        raised = newton + nudge * epsilon
        raised = jnp.where(_inside(raised, epsilon, best), raised, 0.5 * (epsilon + best))
        following = jnp.maximum(jnp.where(accepted, newton, raised), 0.0)
        settled = accepted & ~(epsilon - following > _EXCESS * epsilon)
        stuck = best - following <= _EXCESS * best
        stuck = ~accepted & stuck & (best < cap)
        return following, best, settled | stuck, count + 1

    state = (start, cap, jnp.zeros_like(start, dtype=bool), jnp.int32(0))
    _, best, _, _ = jax.lax.while_loop(cond, body, state)
    return jnp.minimum(best, cap)


def certify_below(side: Callable, log_target, start):
    """Largest tried eps <= start at which the certified lower log delta is >= log_target, else 0."""

    def cond(state):
        epsilon, nudge, done, count = state
        return ~done & (count < _CERTIFY_STEPS) & (epsilon > 0)

    def body(state):
        epsilon, nudge, _, count = state
        value, slope = side(epsilon)
        done = value >= log_target
        residual = jnp.minimum(value - log_target, 0.0)
        # Too close to the cap nothing can be certified (value -inf): back off geometrically from one ulp.
        step = residual / slope * (1.0 + nudge) + 1e-13 * epsilon
        step = jnp.where(jnp.isfinite(step), step, (nudge / 1e-3) ** 3 * 1e-15 * epsilon)
        return jnp.where(done, epsilon, jnp.maximum(epsilon - step, 0.0)), 4.0 * nudge, done, count + 1

    state = (start, jnp.asarray(1e-3, start.dtype), jnp.zeros_like(start, dtype=bool), jnp.int32(0))
    epsilon, _, done, _ = jax.lax.while_loop(cond, body, state)
    return jnp.where(done, epsilon, 0.0)
