"""log delta as a differentiable formula: the contour sum at a frozen plan, without certificates."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.contour.lattice import build_lattice, lattice_sum
from jaxdp.contour.plan import Plan, plan_delta
from jaxdp.contour.spectrum import Spectrum, along_line
from jaxdp.contour.trapezoid import _SMOOTH_EXPONENT, Effort
from jaxdp.runtime.arrays import xp

_LATTICE_NODES = 16384  # a period of 12 deviations for 1e7 rounds of randomized response


def log_delta(make: Callable[[Any], Spectrum], params: Any, eps: jax.Array, effort: Effort) -> jax.Array:
    """log delta(eps) of the spectrum ``make(params)``, differentiable in params and eps.

    The contour (abscissa, step, cut) is chosen at the given values and held fixed: delta does not depend
    on it, so neither does the derivative. A smooth effort differentiates delta of the mechanism composed
    with a Gaussian so small that the contour ends where it has decayed. On a lattice delta has kinks: the derivative is
    the one between them.
    """
    frozen = xp.stop_gradient((params, eps))
    plan = xp.stop_gradient(plan_delta(make(frozen[0]), frozen[1], effort.quadrature))
    spectrum = make(params)
    reference, period, total = (_of_lattice if effort.lattice else _of_line)(spectrum, plan, eps, effort)
    c = plan.c
    first = xp.exp(-reference) / xp.expm1(xp.minimum(c * period, 700.0))
    away = xp.minimum(eps - (c + 1) * period - reference, 600.0)
    second = xp.exp(away) / -xp.expm1(-(c + 1) * period)
    # where e^eps is large this says less than that delta is not below 0
    alias = xp.maximum(first * (1 - spectrum.infinity) - second * (1 - spectrum.reverse_infinity), 0.0)
    total = total - alias + spectrum.infinity * xp.exp(-reference)
    return reference + xp.log(xp.where(total > 0, total, 1.0))


def _of_line(spectrum: Spectrum, plan: Plan, eps: jax.Array, effort: Effort) -> tuple[jax.Array, ...]:
    """(ref, period, the sum over the contour in units of e^ref)."""
    c, step = plan.c, 2 * xp.pi / plan.period
    lines = spectrum.lines(c, plan.cut, effort.quadrature)
    nodes = along_line(spectrum, lines, c, step, effort.nodes + 1)
    t = step * xp.arange(effort.nodes + 1)
    extra = xp.zeros(())
    if effort.smooth:
        end = step * effort.nodes
        extra = xp.stop_gradient(xp.maximum(2 * _SMOOTH_EXPONENT / end**2 - spectrum.mu2, 0.0))
    log_m = xp.real(spectrum.closed(xp.asarray(c, xp.complex128))) + 0.5 * extra * c * (c + 1)
    for part, line in zip(spectrum.parts, lines, strict=True):
        log_m = log_m + xp.sum(xp.where(part.times > 0, part.times * line.log_m, 0.0))
    log_abs = nodes.log_abs - 0.5 * extra * t * t
    angle = nodes.phase + 0.5 * extra * (2 * c + 1) * t - t * eps
    a, b = c * (c + 1) - t * t, t * (2 * c + 1)
    half = xp.where(t == 0, 0.5, 1.0)
    terms = xp.exp(log_abs) * half / (a * a + b * b) * (xp.cos(angle) * a + xp.sin(angle) * b)
    front = log_m - c * eps + xp.log(step / xp.pi)
    reference = xp.stop_gradient(front + xp.log(xp.abs(xp.sum(terms))))
    return reference, plan.period, xp.exp(front - reference) * xp.sum(terms)


def _of_lattice(spectrum: Spectrum, plan: Plan, eps: jax.Array, effort: Effort) -> tuple[jax.Array, ...]:
    """The same where delta has kinks, which no end of a contour tells: the sum over a period has no end."""
    contour = build_lattice(spectrum, plan, max(effort.nodes, _LATTICE_NODES))
    level = contour.log_m_c[0] - plan.c * eps
    value = lattice_sum(contour, eps, level)[0][0]
    reference = xp.stop_gradient(level + xp.log(xp.abs(value)))
    return reference, contour.plan.period, value * xp.exp(level - reference)
