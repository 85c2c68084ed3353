"""log delta as a differentiable formula: the contour sum at a frozen plan, without certificates."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.contour.lattice import LatticeContour, build_lattice, lattice_sum
from jaxdp.contour.plan import Plan, plan_delta
from jaxdp.contour.spectrum import Spectrum
from jaxdp.contour.trapezoid import SMOOTH_EXPONENT, Contour, Effort, contour_sum, on_line
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
    plan = xp.stop_gradient(plan_delta(make(frozen[0]), frozen[1], effort.quadrature, xp.zeros(())))
    spectrum = make(params)
    contour, add = (_lattice if effort.lattice else _line)(spectrum, plan, effort)
    c, period = plan.c, contour.plan.period
    level = contour.log_m_c[0] - c * eps
    value = add(contour, eps, level)[0][0]
    reference = xp.stop_gradient(level + xp.log(xp.abs(value)))
    first = xp.exp(-reference) / xp.expm1(xp.minimum(c * period, 700.0))
    away = xp.minimum(eps - (c + 1) * period - reference, 600.0)
    second = xp.exp(away) / -xp.expm1(-(c + 1) * period)
    # where e^eps is large this says less than that delta is not below 0
    alias = xp.maximum(first * (1 - spectrum.infinity) - second * (1 - spectrum.reverse_infinity), 0.0)
    total = value * xp.exp(level - reference) - alias + spectrum.infinity * xp.exp(-reference)
    return reference + xp.log(xp.where(total > 0, total, 1.0))


def _line(spectrum: Spectrum, plan: Plan, effort: Effort) -> tuple[Contour, Callable[..., Any]]:
    extra = xp.zeros(1)
    if effort.smooth:
        end = 2 * xp.pi / plan.period * effort.nodes
        extra = xp.stop_gradient(xp.maximum(2 * SMOOTH_EXPONENT / end**2 - spectrum.mu2, 0.0))[None]
    lines = spectrum.lines(plan.c, plan.cut, effort.quadrature)
    return on_line(spectrum, plan, effort.nodes, lines, extra), contour_sum


def _lattice(spectrum: Spectrum, plan: Plan, effort: Effort) -> tuple[LatticeContour, Callable[..., Any]]:
    """Where delta has kinks, which no end of a contour tells: the sum over a period has no end."""
    return build_lattice(spectrum, plan, max(effort.nodes, _LATTICE_NODES)), lattice_sum
