"""log delta as a differentiable formula: the contour sum with a fixed contour, without certified error bounds."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.contour.lattice import build_lattice, lattice_sum
from jaxdp.contour.plan import Plan, plan_delta
from jaxdp.contour.spectrum import Spectrum, counted
from jaxdp.contour.trapezoid import SMOOTH_EXPONENT, Effort
from jaxdp.numerics.exponential_sums import split
from jaxdp.numerics.special import sine_and_versine
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.moment import real_line

_LATTICE_NODES = 16384  # for 1e7 rounds of randomized response, the period has 12 standard deviations of the loss
_NEAR = 1e-4  # distance of eps below the largest loss up to which other losses may be too few to count
_LEAST_LEFT, _ROUNDED = 1e-30, 1e-9  # of that distance: least value used; most that rounding makes it negative
_RESOLUTION, _LEAST_TOP = 1e-9, 1e-12  # losses nearer to the largest than this part of it, or of the second, are one
# Nodes of `_sampled` beside it: their number, that of one block, and the number in which t grows by the factor e.
_NODES, _BLOCK, _EFOLD = 3072, 256, 256
_RESOLVED = 1.2  # turn of e^{itL} from one outcome to the next, in radians, up to which the outcomes resolve it
_SHARP, _EDGE = 4.0, 5.0  # erfc(_SHARP log(L steps/eps) + _EDGE)/2 of a loss L counts as small: 8e-13 at eps/steps
_CLEAR = 45.0  # nats between delta and the error from the spacing of the nodes
_LEAST = 1e-100  # replaces a smaller modulus of m(c + it)/m(c), so that its logarithm has a derivative


def log_delta(make: Callable[[Any], Spectrum], params: Any, eps: jax.Array, effort: Effort) -> jax.Array:
    """log delta(eps) of the spectrum ``make(params)``, differentiable in params and eps.

    The contour (abscissa, step, cut) is chosen at the given values and held fixed: delta does not depend on it, so
    neither does the derivative. With ``effort.smooth``, delta is that of the mechanism composed with a small Gaussian,
    which makes the integrand decay up to the last node. On a lattice delta has kinks, one at each loss; the derivative
    there is the one to the right. Just below a largest loss with positive mass, rounding leaves no digit of the sum:
    there delta is taken from this mass alone.
    """
    spectrum = make(params)
    near, log_near = (False, 0.0) if spectrum.sampled else _next_to_largest(spectrum, eps)
    eps = xp.where(near, eps - 2 * _NEAR, eps)  # the sum is not used there, but its derivative would be NaN
    frozen = xp.stop_gradient((params, eps))
    plan, _ = xp.stop_gradient(plan_delta(make(frozen[0]), frozen[1], effort.quadrature, xp.zeros(())))
    if spectrum.sampled and spectrum.gaussian:
        return _sampled(spectrum, plan, effort.quadrature, eps)
    level, value, period = (_lattice if effort.lattice else _line)(spectrum, plan, effort, eps)
    c = plan.c
    reference = xp.stop_gradient(level + xp.log(xp.abs(value)))
    first = xp.exp(-reference) / xp.expm1(xp.minimum(c * period, 700.0))
    away = xp.minimum(eps - (c + 1) * period - reference, 600.0)
    second = xp.exp(away) / -xp.expm1(-(c + 1) * period)
    # where e^eps is large the difference may be negative, and 0 is the better estimate of the alias
    alias = xp.maximum(first * (1 - spectrum.infinity) - second * (1 - spectrum.reverse_infinity), 0.0)
    total = value * xp.exp(level - reference) - alias + spectrum.infinity * xp.exp(-reference)
    return xp.where(near, log_near, reference + xp.log(xp.where(total > 0, total, 1.0)))


def _next_to_largest(spectrum: Spectrum, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether eps is close to top, the largest loss, of mass p > 0; log(infinity + p (1 - e^(eps - top))) there."""
    top = xp.where(xp.isfinite(spectrum.top), spectrum.top, 0.0)

    def log_mass(z: jax.Array) -> jax.Array:
        """K(z) - z top. For z to infinity it tends to log p, or to -inf if top has no mass."""
        k = xp.real(spectrum.closed(xp.asarray(z, xp.complex128)))
        for part in spectrum.discrete:
            k = k + counted(part, xp.logsumexp(part.log_weight + z * part.loss, axis=-1))
        return xp.minimum(k - z * top, 0.0)

    left = top - eps
    close = (left > -_ROUNDED) & (left < _NEAR) & (spectrum.top < xp.inf)
    distance = xp.stop_gradient(xp.maximum(left, _RESOLUTION * xp.maximum(top, _LEAST_TOP)))
    z = 1 / xp.where(close, distance, 1.0)
    # Both are log p unless other losses are above eps, or a few times farther from the largest one than eps is.
    log_p, with_others = log_mass(10 * z), log_mass(z)
    near = close & (with_others - log_p < 1e-3)
    left = xp.where(near, left, 1.0)
    # max(left, _LEAST_LEFT), whose slope in left is 1 everywhere
    positive = xp.stop_gradient(xp.maximum(left, _LEAST_LEFT)) + (left - xp.stop_gradient(left))
    log_total = log_p + xp.log(-xp.expm1(-positive))
    infinite = spectrum.infinity > 0
    log_infinity = xp.log(xp.where(infinite, spectrum.infinity, 1.0))
    return near, xp.where(infinite, xp.logaddexp(log_infinity, log_total), log_total)


def _line(spectrum: Spectrum, plan: Plan, effort: Effort, eps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log(M(c) e^{-c eps}), the contour sum divided by M(c) e^{-c eps}, the alias period)."""
    c, step, count = plan.c, 2 * xp.pi / plan.period, effort.nodes + 1
    t = step * xp.arange(count)
    z = xp.complex(xp.full_like(t, c), t)
    base = spectrum.closed(xp.asarray(c, xp.complex128))
    log_m, k = xp.real(base), spectrum.closed(z) - base
    for part, line in zip(spectrum.parts, spectrum.lines(c, plan.cut, effort.quadrature), strict=True):
        ratios = xp.vmap(_ratios, in_axes=(0, 0, None, None))(line.weight, line.loss, step, count)
        k = k + xp.sum(xp.where(part.times[:, None] > 0, part.times[:, None] * xp.log(ratios), 0.0), axis=0)
        log_m = log_m + counted(part, line.log_m)
    if effort.smooth:
        extra = xp.stop_gradient(xp.maximum(2 * SMOOTH_EXPONENT / (step * effort.nodes) ** 2 - spectrum.mu2, 0.0))
        log_m, k = log_m + 0.5 * extra * c * (c + 1), k + 0.5 * extra * xp.complex(-t * t, (2 * c + 1) * t)
    half = xp.where(xp.arange(count) == 0, 0.5, 1.0)
    terms = half * xp.real(xp.exp(k - xp.complex(xp.zeros_like(t), t * eps)) / (z * (z + 1)))
    return log_m - c * eps, xp.sum(terms) * step / xp.pi, plan.period


def _sampled(spectrum: Spectrum, plan: Plan, size: int, eps: jax.Array) -> jax.Array:
    """log delta of sampled Gaussians, alone or composed with Gaussians.

    A few steps at a small rate have many losses near 0 and rare large losses, on scales that differ by up to 1e5.
    Therefore the nodes t grow geometrically. Where neighbouring outcomes are so far apart that they do not resolve
    e^{itL}, its mean is taken as 0. If every step has a loss of at most eps/steps, the total is at most eps and adds
    nothing to delta: with B the part of m from such losses, B^steps is subtracted from M. The rest decays at smaller t.
    """
    c, steps = plan.c, spectrum.step_count()
    base = xp.real(spectrum.closed(xp.asarray(c, xp.complex128)))
    lines = [
        xp.vmap(real_line, in_axes=(None, 0, 0, None, None, None))(c, p.mu, p.rate, plan.cut, spectrum.direction, size)
        for p in spectrum.sampled
    ]
    level = base + sum(counted(p, log_m) for p, (log_m, _, _) in zip(spectrum.sampled, lines, strict=True)) - c * eps
    frozen = xp.stop_gradient(level)
    # the error from the spacing is near e^{-c period}, and delta is about e^level/(c (c + 1)) or less
    period = xp.maximum(plan.period, (_CLEAR + xp.abs(frozen) + 2 * xp.log1p(c)) / c)
    u = (xp.arange(_NODES) / _EFOLD).reshape(-1, _BLOCK)
    step = 2 * xp.pi / period
    nodes = step * _EFOLD * xp.sinh(u), step * xp.cosh(u) * xp.where(u > 0, 1.0, 0.5)
    most = xp.stop_gradient(xp.where((base == 0) & (eps > 0), eps / steps, 0.0))

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        t, width = block
        z = xp.complex(xp.full_like(t, c), t)
        k, small = spectrum.closed(z) - base, xp.zeros_like(z)
        for part, (_, weight, loss) in zip(spectrum.sampled, lines, strict=True):
            ratio, ratio_of_small = xp.vmap(_ratios_of_line, in_axes=(0, 0, None, None))(weight, loss, t, most)
            k, small = k + counted(part, xp.log(ratio).T), small + counted(part, xp.log(ratio_of_small).T)
        terms = (xp.exp(k) - xp.where(most > 0, xp.exp(small), 0.0)) * xp.exp(xp.complex(xp.zeros_like(t), -t * eps))
        return total + xp.sum(width * xp.real(terms / (z * (z + 1)))), None

    value, _ = jax.lax.scan(jax.checkpoint(add), xp.zeros(()), nodes)
    total = value / xp.pi + spectrum.infinity * xp.exp(-frozen)
    return level + xp.log(xp.where(total > 0, total, 1.0))


def _ratios_of_line(weight: jax.Array, loss: jax.Array, t: jax.Array, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """m(c + it)/m(c) of one step, and the part of it from losses up to ``most``; t: (nodes,), weight, loss: (size,)."""
    at = xp.stop_gradient(loss)
    turns = xp.abs(xp.diff(at, append=at[-1:])) / _RESOLVED * t[:, None]
    resolved = 1 / (1 + xp.minimum(turns, 1e30) ** 8)
    share = xp.log(xp.maximum(at, 1e-300) / xp.maximum(most, 1e-300))
    small = weight * xp.where(at > 0, 0.5 * jax.scipy.special.erfc(_SHARP * share + _EDGE), 1.0)
    sine, versine = sine_and_versine(t[:, None] * loss)
    columns = xp.stack([weight, small], axis=1)
    sines, cosines = (xp.exact_matmul(resolved * x, columns).T for x in (sine, 1 - versine))
    ratio, ratio_of_small = xp.complex(cosines, sines)
    return tuple(xp.where(xp.abs(xp.stop_gradient(r)) > _LEAST, r, _LEAST) for r in (ratio, ratio_of_small))


def _ratios(weight: jax.Array, loss: jax.Array, step: jax.Array, count: int) -> jax.Array:
    """m(c + it)/m(c) at t = step (0..count-1) of a one-step law tilted to c; 2 sqrt(count) exponentials per loss.

    Uses e^{a+b} - 1 = x y + x + y with x = e^a - 1 and y = e^b - 1.
    """
    inner, outer = split(count)
    low, high = (
        xp.expm1(1j * (step * places[:, None]) * loss) for places in (xp.arange(inner), inner * xp.arange(outer))
    )
    weighted = weight * high
    less_one = xp.exact_matmul(weighted, low.T) + xp.sum(weighted, axis=1)[:, None] + xp.exact_matmul(low, weight)
    ratios = 1 + less_one.reshape(-1)[:count]
    return xp.where(xp.abs(xp.stop_gradient(ratios)) > _LEAST, ratios, _LEAST)


def _lattice(spectrum: Spectrum, plan: Plan, effort: Effort, eps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same as `_line` for a lattice: the sum over one period, which needs no truncation and no smoothing."""
    contour = build_lattice(spectrum, plan, max(effort.nodes, _LATTICE_NODES))
    level = contour.log_m_c - plan.c * eps
    return level, lattice_sum(contour, eps, level)[0][0], contour.plan.period
