"""log delta as a differentiable formula: the contour sum at a frozen plan, without certificates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.fourier.contour import _SMOOTH_EXPONENT, Effort
from jaxdp.fourier.plan import plan_delta
from jaxdp.fourier.spectrum import Spectrum, along_line


def log_delta(make: Callable[[Any], Spectrum], params: Any, eps: jax.Array, effort: Effort) -> jax.Array:
    """log delta(eps) of the spectrum ``make(params)``, differentiable in params and eps.

    The contour (abscissa, step, cut) is chosen at the given values and held fixed: delta does not depend
    on it, so neither does the derivative. A smooth effort differentiates delta of the mechanism composed
    with a Gaussian so small that the contour ends where it has decayed.
    """
    if effort.lattice:
        effort = Effort(effort.nodes, 1, 1, True)
    frozen = jax.lax.stop_gradient((params, eps))
    plan = jax.lax.stop_gradient(plan_delta(make(frozen[0]), frozen[1], effort.quadrature))
    spectrum = make(params)
    c, step = plan.c, 2 * jnp.pi / plan.period
    lines = spectrum.lines(c, plan.cut, effort.quadrature)
    nodes = along_line(spectrum, lines, c, jnp.zeros(()), step, effort.nodes + 1)
    t = step * jnp.arange(effort.nodes + 1)
    extra = jnp.zeros(())
    if effort.smooth:
        end = step * effort.nodes
        extra = jax.lax.stop_gradient(jnp.maximum(2 * _SMOOTH_EXPONENT / end**2 - spectrum.mu2, 0.0))
    log_m = jnp.real(spectrum.closed(jnp.asarray(c, jnp.complex128))) + 0.5 * extra * c * (c + 1)
    for part, line in zip(spectrum.parts, lines, strict=True):
        log_m = log_m + jnp.sum(jnp.where(part.times > 0, part.times * line.log_m, 0.0))
    log_abs = nodes.log_abs - 0.5 * extra * t * t
    angle = nodes.phase + 0.5 * extra * (2 * c + 1) * t - t * eps
    a, b = c * (c + 1) - t * t, t * (2 * c + 1)
    half = jnp.where(t == 0, 0.5, 1.0)
    terms = jnp.exp(log_abs) * half / (a * a + b * b) * (jnp.cos(angle) * a + jnp.sin(angle) * b)
    front = log_m - c * eps + jnp.log(step / jnp.pi)
    reference = jax.lax.stop_gradient(front + jnp.log(jnp.abs(jnp.sum(terms))))
    first = jnp.exp(-reference) / jnp.expm1(jnp.minimum(c * plan.period, 700.0))
    second = jnp.exp(eps - (c + 1) * plan.period - reference) / -jnp.expm1(-(c + 1) * plan.period)
    alias = first * (1 - spectrum.infinity) - second * (1 - spectrum.reverse_infinity)
    total = jnp.exp(front - reference) * jnp.sum(terms) - alias + spectrum.infinity * jnp.exp(-reference)
    return reference + jnp.log(jnp.where(total > 0, total, 1.0))
