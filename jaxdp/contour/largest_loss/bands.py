"""delta and epsilon where a few rare large losses decide delta: one contour for each band of the largest loss.

Near a phase transition no single abscissa suits both the many small losses and the one large loss: the integrand of the
single contour cancels or does not decay. Each outcome gets a label by its size. This splits the law of the sum exactly:

    M(z) = sum_j M_j(z),     M_j = prod C_j^T - prod C_{j-1}^T     (the largest label is j),

where C_j is the moment of a step's outcomes with a label <= j. Each M_j is the transform of a positive measure (band j)
and gets its own abscissa. Proof: notebooks/proofs/contour_certificate.md, section 10. For the remove and replace
directions, and for sampled Gaussians composed with mechanisms that have a formula.
"""

from typing import NamedTuple

import jax

from jaxdp.contour.largest_loss.band import Band, band_contour
from jaxdp.contour.plan import Aliases, Masses, Plan, alias_terms, log_chernoff, plan_part, tail_cut
from jaxdp.contour.spectrum import Sampled, Spectrum
from jaxdp.contour.trapezoid import Contour, Effort, Sums, enclosed, epsilon_edges, relative_to
from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.label import NEVER, WIDTH

_MOST_BUILDS, _CLOSE = 5, 3e-7  # most sets of contours built for one epsilon; relative gap at which no more are built
_SMALL = 1e-9  # least right end of the interval in which epsilon is searched
_START = 0.999  # first tested epsilon, as a share of the known upper bound
_TRIES = 60  # most tested points with one set of contours
_FALL = 60.0  # the last edge u has at most u^2 = (u at the loss eps)^2 + this: larger losses are negligible


class Bands(NamedTuple):
    """Contours and alias terms, stacked over the bands; they do not depend on eps."""

    contours: Contour
    known: Aliases


def label_edges(steps: Sampled, eps: jax.Array, cut: jax.Array, count: int) -> jax.Array:
    """The ``count`` label edges of each step, equally spaced outcomes u >= 2, of shape (stack, count).

    They reach from a loss of 3 % of eps to where the normal density is e^-30 of the density at a loss of eps.
    """
    mu, q = steps.mu, xp.where(steps.rate > 0, steps.rate, 1.0)

    def outcome(loss: jax.Array) -> jax.Array:
        return (xp.log1p(xp.expm1(xp.minimum(loss, 600.0)) / q) + mu * mu / 2) / mu

    spacing = 2.1 * WIDTH
    first = xp.clip(outcome(0.03 * eps), 2.0, xp.maximum(cut - 1 - spacing * count, 2.0))
    full = xp.sqrt(xp.maximum(outcome(eps), 0.0) ** 2 + _FALL)
    last = xp.maximum(xp.minimum(full, cut - 1), first + spacing * (count - 1))
    return first[:, None] + (last - first)[:, None] * xp.linspace(0.0, 1.0, count)


def make_bands(spectrum: Spectrum, cut: jax.Array, eps: jax.Array, log_delta: jax.Array, effort: Effort) -> Bands:
    """The contours for use near eps; errors far below e^log_delta are accepted."""
    parts = [(part.mu, part.rate, part.times) for part in spectrum.sampled]
    steps = Sampled(*(xp.concatenate(x) for x in zip(*parts, strict=True)))
    edges = label_edges(steps, eps, cut, effort.bands).T
    end = xp.full_like(edges[:1], NEVER)

    def between(ends: tuple[jax.Array, jax.Array]) -> Bands:
        low, high = ends
        band = Band(spectrum, steps, low, high, cut, effort.quadrature)
        return one_band(band, *plan_part(band, eps, log_delta), effort)

    return xp.lax_map(between, (xp.concatenate([-end, edges]), xp.concatenate([edges, end])))


def one_band(band: Band, plan: Plan, masses: Masses, effort: Effort) -> Bands:
    """Contour and alias terms of one band."""
    known = alias_terms(plan, masses.upper, xp.min(masses.share), xp.zeros(()), xp.zeros(()))
    return Bands(band_contour(band, plan, effort), known)


def band_sums(spectrum: Spectrum, bands: Bands, charges: jax.Array, eps: jax.Array, ref: jax.Array) -> Sums:
    """Bounds of e^-ref delta(eps): the sum over all bands. charges: bound of the mass beyond the tail cut."""

    def of_band(contour: Contour, known: Aliases) -> Sums:
        sums, raw = enclosed(contour, known, eps, ref)
        upper, lower, middle, slope = (x[0] for x in sums)
        sides = contour.plan.sides
        chernoff = xp.exp(xp.min(log_chernoff(sides.above, sides.k_above, eps)) - ref) * (1 + 1e-9)
        informative = (raw.tail + raw.rounding)[0] < chernoff  # otherwise only the Chernoff bound of the band is used
        return Sums(
            xp.where(informative, xp.fmin(upper, chernoff), chernoff),
            xp.where(xp.isnan(lower), 0.0, xp.maximum(lower, 0.0)),
            xp.where(informative, middle, 0.0),
            xp.where(informative, slope, 0.0),
        )

    upper, lower, middle, slope = (xp.sum(x) for x in xp.vmap(of_band)(*bands))
    mass = spectrum.infinity * xp.exp(-ref)
    return Sums(
        (upper + mass * (1 + 4 * _ULP) + charges * xp.exp(-ref)) * (1 + 64 * _ULP),
        xp.maximum((lower + spectrum.infinity_low * xp.exp(-ref)) * (1 - 64 * _ULP), 0.0),
        middle + mass,
        xp.minimum(slope, 0.0),
    )


def delta_bounds(spectrum: Spectrum, eps: jax.Array, known: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta at eps > 0; (0, 1) at other eps. known: an upper bound, as close as possible."""
    usable = xp.isfinite(eps) & (eps > 0)
    e, ref = xp.where(usable, eps, 1.0), xp.log(xp.clip(known, SMALLEST, 1.0))
    cut = tail_cut(spectrum, ref)
    sums = band_sums(spectrum, make_bands(spectrum, cut, e, ref, effort), -xp.expm1(spectrum.log_kept(cut)), e, ref)
    upper = xp.where(usable & ~xp.isnan(sums.upper), xp.minimum(sums.upper * xp.exp(ref) + SMALLEST, 1.0), 1.0)
    lower = xp.minimum(sums.lower * xp.exp(ref), upper)
    return xp.where(usable & ~xp.isnan(lower), lower, 0.0), upper


def epsilon_bounds(
    spectrum: Spectrum, delta: jax.Array, known: jax.Array, effort: Effort
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon at delta. known: an upper bound of epsilon; where it is inf, none is found."""
    spare = delta - spectrum.infinity
    inside = (spare > 0) & (delta < 1) & xp.isfinite(known)
    ref = xp.log(xp.where(inside, spare, 0.5))
    cut = tail_cut(spectrum, ref)
    charges = -xp.expm1(spectrum.log_kept(cut))
    target = xp.where(inside, delta, 1.0) * xp.exp(-ref)
    ceiling = xp.maximum(xp.where(inside, known, 1.0), _SMALL)

    # Contours built for one eps are good near this eps only. So they are rebuilt until the root is close to that eps.
    def improve(state):
        root, lower, upper, _, count = state
        bands = make_bands(spectrum, cut, root, ref, effort)

        def at(eps: jax.Array) -> Evaluation:
            return relative_to(target, band_sums(spectrum, bands, charges, eps, ref))

        low, high, better = proved_ends(at, 0.0, _START * ceiling, ceiling, most_tries=_TRIES)
        off = xp.max(bands.contours.plan.c) * xp.abs(better - root)
        return better, xp.maximum(lower, low), xp.minimum(upper, high), off, count + 1

    def far(state) -> jax.Array:
        _, lower, upper, off, count = state
        return (off > 0.5) & ~(upper - lower <= _CLOSE * upper) & (count < _MOST_BUILDS)

    start = ceiling, xp.zeros(()), ceiling, xp.asarray(xp.inf), xp.asarray(0)
    _, lower, upper, _, _ = xp.while_loop(far, improve, start)
    upper, lower = xp.where(inside, upper, xp.inf), xp.where(inside, lower, 0.0)
    return epsilon_edges(spectrum, delta, inside, lower, upper)
