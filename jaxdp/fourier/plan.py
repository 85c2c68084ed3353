"""Where to put the contour: abscissa, step, cut. A recipe; nothing here needs to be right for the bounds to hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.fourier.spectrum import DEAD, Spectrum
from jaxdp.special import log_expm1

_POINTS = 12
_CANCELLATION = 3.0  # nats by which the integrand may exceed its smallest peak
_CUT_NATS = 60.0
_DYING = 5e-4  # in place of DEAD where no contour is put
_ALIAS_TARGET = -27.0  # log of the alias error aimed at, relative to delta


class Plan(NamedTuple):
    """Contour abscissa c, period 2 pi / h of the alias, and the Chernoff data the certificate reuses."""

    c: jax.Array
    period: jax.Array
    cut: jax.Array
    rdp_epsilon: jax.Array  # certified upper bound of epsilon (epsilon plans)
    log_chernoff: jax.Array  # certified upper bound of log delta without masses (delta plans)
    above: jax.Array  # abscissae > c
    k_above: jax.Array
    below: jax.Array  # c'' > 0 standing for -1 - c''
    k_below: jax.Array


def conversion(c: jax.Array) -> jax.Array:
    """c log c - (c+1) log(c+1): the constant of Canonne, Kamath, Steinke 2020, Proposition 12.

    As -c log(1 + 1/c) - log(1 + c): the two products, each of size c log c, would cancel.
    """
    large = c > 1.0
    far = c * jnp.log1p(1 / jnp.where(large, c, 1.0))
    near = c * (jnp.log1p(c) - jnp.log(jnp.maximum(c, 1e-300)))
    return -jnp.where(large, far, near) - jnp.log1p(c)


def grid_min(objective, low, high, rounds=3, points=_POINTS):
    """Minimiser of a quasi-convex function of log c: a grid, zoomed in between the best point's neighbours."""

    def zoom(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = jnp.linspace(ends[0], ends[1], points)
        best = jnp.argmin(objective(jnp.exp(x)))
        return x[jnp.maximum(best - 1, 0)], x[jnp.minimum(best + 1, points - 1)]

    low, high = jax.lax.fori_loop(0, rounds, zoom, (low, high))
    return jnp.exp(0.5 * (low + high))


def _scale(spectrum: Spectrum, cut: jax.Array, size: int) -> jax.Array:
    """Size of the loss's variance, from K at small orders (the smaller wins past a phase transition).

    With mass at infinity K(0) < 0, and only the bend of K tells the variance.
    """
    c = jnp.array([1e-2, 1.0, 0.505])
    k = spectrum.rough(c, cut, size)
    plain = jnp.min(2 * k[:2] / (c[:2] * (c[:2] + 1)))
    bend = (k[1] - 2 * k[2] + k[0]) / 0.495**2
    return jnp.clip(jnp.where(spectrum.infinity > 0, bend, plain), 1e-24, 1e24)


def _widest(spectrum: Spectrum) -> float:
    """How far right of the Gaussian guess, in nats, an abscissa is sought: far where the loss has a supremum."""
    return 26.0 if spectrum.direction == "reverse" else 4.0


def tail_cut(spectrum: Spectrum, log_delta: jax.Array) -> jax.Array:
    """The u beyond which a step's mass is charged like mass at infinity: e^-60 of delta over all steps.

    That much less than needed, because the integrand must have died at the cut, at every abscissa used.
    """
    mu = jnp.zeros(())
    for part in spectrum.sampled:
        mu = jnp.maximum(mu, jnp.max(part.mu))
    return jnp.sqrt(2 * (jnp.maximum(-log_delta, 0.0) + jnp.log(spectrum.step_count()) + _CUT_NATS)) + mu


def plan_epsilon(spectrum: Spectrum, log_delta: jax.Array, size: int) -> Plan:
    """Contour for solving delta(eps) = delta; rdp_epsilon is a certified bound from the real axis alone."""
    cut = tail_cut(spectrum, log_delta)
    center = 0.5 * jnp.log(2 * (1 - log_delta) / _scale(spectrum, cut, size))

    def rdp(c: jax.Array, k: jax.Array) -> jax.Array:
        constant = conversion(c)
        rounding = 1e-14 * (jnp.abs(k) - log_delta + jnp.abs(constant))
        return (k - log_delta + constant + rounding) / c

    def least(low: jax.Array, high: jax.Array, dead: jax.Array) -> jax.Array:
        return grid_min(lambda c: rdp(c, spectrum.rough(c, cut, size, dead)), low, high, rounds=3)

    # an abscissa too far right for a contour may still give the smaller Chernoff bound: the second
    low, high = center - jnp.array([9.0, 4.0]), center + jnp.array([_widest(spectrum), 4.0])
    both = jax.vmap(least)(low, high, jnp.array([DEAD, _DYING]))
    best = both[0]
    eps = jnp.min(rdp(both, spectrum.real(both, cut, size)))
    level = jnp.where(jnp.isfinite(eps), jnp.clip(eps, 0.0, spectrum.top), 1.0)

    def saddle(c: jax.Array) -> jax.Array:
        return spectrum.rough(c, cut, size) - c * level - jnp.log(c) - jnp.log1p(c)

    return _finish(
        spectrum,
        cut,
        level,
        log_delta,
        eps,
        grid_min(saddle, jnp.log(best) - 2.5, jnp.log(best) + 1.0, rounds=2, points=8),
        size,
    )


def plan_delta(spectrum: Spectrum, eps: jax.Array, size: int) -> Plan:
    """Contour for delta at a given eps; log_chernoff is certified."""
    loose = tail_cut(spectrum, jnp.asarray(-800.0))
    variance = _scale(spectrum, loose, size)
    center = jnp.log(jnp.maximum(jnp.abs(eps) / variance, 1 / jnp.sqrt(variance)))
    widest = _widest(spectrum)

    def bound(c: jax.Array, cut: jax.Array, k_of: Callable = spectrum.real) -> jax.Array:
        k, constant = k_of(c, cut, size), conversion(c)
        return k - c * eps + constant + 1e-14 * (jnp.abs(k) + jnp.abs(c * eps) + jnp.abs(constant))

    # the cut depends on delta, delta on the cut: past a phase transition each round gains many digits
    def sharpen(_: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        cut = state[0]
        best = grid_min(lambda c: bound(c, cut, spectrum.rough), center - 9.0, center + widest, rounds=4)
        return tail_cut(spectrum, bound(best[None], cut)[0]), cut, best

    _, cut, best = jax.lax.fori_loop(0, 5, sharpen, (loose, loose, jnp.exp(center)))
    value = bound(best[None], cut)[0]
    guess = jnp.where(jnp.isfinite(value), jnp.minimum(value, 0.0), 0.0)
    return _finish(spectrum, cut, eps, guess, eps, best, size)._replace(log_chernoff=value)


def _finish(spectrum, cut, eps, log_delta, rdp_epsilon, c0, size) -> Plan:
    """Of a few abscissae at and left of c0, the one that allows the largest step without much cancellation."""
    candidates = c0 * jnp.array([0.5, 0.65, 0.75, 0.85, 0.92, 0.97])
    above = c0 * jnp.array([1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0])
    below = c0 * jnp.geomspace(0.01, 10.0, 9)
    k_above, k_below = spectrum.real(above, cut, size), spectrum.real_swapped(below, cut, size)
    k_candidates = spectrum.rough(candidates, cut, size)
    height = k_candidates - candidates * eps - jnp.log(candidates) - jnp.log1p(candidates)
    cancels = height > jnp.min(height) + _CANCELLATION

    def shortest(c: jax.Array) -> jax.Array:
        return _shortest_period(c, eps, log_delta, above, k_above, below, k_below)

    periods = jax.vmap(shortest)(candidates)
    best = jnp.argmin(jnp.where(cancels, jnp.inf, periods))
    return Plan(candidates[best], periods[best], cut, rdp_epsilon, jnp.asarray(jnp.inf), above, k_above, below, k_below)


class AliasBound(NamedTuple):
    """What of `log_alias` does not depend on eps, per abscissa right (above) and left (below) of the contour's."""

    above: jax.Array
    right: jax.Array
    right_size: jax.Array  # of what is rounded in ``right``
    below: jax.Array
    left: jax.Array
    left_size: jax.Array
    plain: jax.Array


def alias_bound(plan: Plan, k_above: jax.Array, k_below: jax.Array) -> AliasBound:
    """For `log_alias`; k_above, k_below: those of the plan, raised by what smoothing adds."""
    c, period = plan.c, plan.period
    gap = plan.above - c
    right = k_above + conversion(plan.above) - log_expm1(jnp.where(gap > 0, gap * period, 1e-9))
    left = k_below + conversion(plan.below) - log_expm1((1 + plan.below + c) * period)
    return AliasBound(
        plan.above,
        jnp.where(gap > 0, right, jnp.inf),
        jnp.abs(k_above),
        1 + plan.below,
        left,
        jnp.abs(k_below),
        -log_expm1((1 + c) * period),
    )


def log_alias(bound: AliasBound, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logs of the certified bounds of the alias terms left of eps (after subtraction) and right of it (MATH 2.2)."""
    away = bound.above * eps
    right = jnp.min(bound.right - away + 1e-15 * (bound.right_size + jnp.abs(away)))
    # e^e delta_QP(-e) <= M(-1-c'') e^{c'' e + e} c''^c''/(c''+1)^(c''+1), summed over e = eps - j period
    toward = bound.below * eps
    left = jnp.min(bound.left + toward + 1e-15 * (bound.left_size + jnp.abs(toward)))
    # c'' -> 0: delta_QP <= 1, which is all there is when the swapped pair has no exponential moment to offer
    return jnp.minimum(left, bound.plain + eps), right


def _shortest_period(c, eps, log_delta, above, k_above, below, k_below):
    """The least period at which both bounds of `log_alias` are at the aim: e^x - 1 >= e^y is x >= softplus(y)."""
    aim = log_delta + _ALIAS_TARGET
    gap = above - c
    right = jax.nn.softplus(k_above - above * eps + conversion(above) - aim) / jnp.where(gap > 0, gap, 1.0)
    right = jnp.min(jnp.where(gap > 0, right, jnp.inf))
    left = jax.nn.softplus(k_below + (1 + below) * eps + conversion(below) - aim) / (1 + below + c)
    plain = jax.nn.softplus(eps - aim) / (1 + c)
    return jnp.clip(jnp.maximum(right, jnp.minimum(jnp.min(left), plain)), jnp.exp(-6.0) / c, jnp.exp(14.0) / c)
