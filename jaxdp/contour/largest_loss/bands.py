"""delta and epsilon where a few rare large losses rule: one contour for each band of the largest loss.

Near a phase transition no single tilt serves both the many small losses and the one large loss: the integrand of the
plain contour cancels or does not decay. Labelling every outcome by its size splits the law of the sum exactly,

    M(z) = sum_j M_j(z),     M_j = prod (B_j + A_j)^T - prod B_j^T     (the largest label is j),

and each M_j, the transform of a positive measure, gets an abscissa of its own (`largest_loss.labels`; the argument
stands in notebooks/proofs/contour_certificate.md, section 10). Remove direction; sampled Gaussians with anything in
closed form.
"""

from typing import NamedTuple

import jax

from jaxdp.contour.largest_loss.contour import (
    Masses,
    Tilt,
    build,
    chernoff,
    label_edges,
    make_pieces,
    make_steps,
    masses_of,
    over_bands,
    place,
    tilt_of,
)
from jaxdp.contour.plan import alias_bound, log_alias, tail_cut
from jaxdp.contour.spectrum import Spectrum
from jaxdp.contour.trapezoid import Contour, Effort, Raw, Sums, contour_sum, epsilon_edges, relative_to
from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.numerics.special import log_expm1
from jaxdp.runtime.arrays import xp

_OUTWARD = 1 + 1e-9
_MOST_PLACES = 5  # how often the contours are rebuilt for one epsilon
_SMALL = 1e-9  # a smaller epsilon is not sought
_START = 0.999  # of the known bound of epsilon, where a search begins
_TRIES = 60  # tries of a search on one set of contours


class Bands(NamedTuple):
    """Tilt, contour and probabilities of every band, stacked over the bands; none of them depends on eps."""

    tilts: Tilt
    contours: Contour
    masses: Masses


def _left_alias(masses: Masses, spectrum: Spectrum, c, p, eps: jax.Array, ref: jax.Array):
    """(lower, upper) bound of sum_k e^{-c k p} delta_j(eps - k p), k >= 1, in units of e^ref.

    delta_j(e) is M_j(0) - e^e M_j(-1), plus at most e^e M_j(-1).
    """
    closed = xp.real(spectrum.closed(xp.array([0.0, -1.0], xp.complex128)))
    off = spectrum.closed_units * _ULP + 4 * _ULP * xp.abs(closed)
    blur = 1e-14 * (1 + (c + 1) * p + xp.abs(ref) + xp.abs(eps))
    first = -log_expm1(c * p) - ref
    second = xp.exp(eps - log_expm1((c + 1) * p) - ref + xp.minimum(masses.q_upper + closed[1] + off[1], 0.0) + blur)
    lower = xp.exp(first + masses.p_lower + closed[0] - off[0] - blur) - second
    upper = xp.exp(first + xp.minimum(masses.p_upper + closed[0] + off[0], 0.0) + blur)
    return xp.where(xp.isnan(lower), 0.0, xp.maximum(lower, 0.0)), upper * _OUTWARD


def band_sums(spectrum: Spectrum, bands: Bands, charges: jax.Array, eps: jax.Array, ref: jax.Array) -> Sums:
    """Bounds of e^-ref delta(eps): the sums over the contours of all bands, with their errors."""
    tilts, contours, masses = bands
    raw = xp.vmap(lambda one: Raw(*(x[0] for x in contour_sum(one, eps, ref))))(contours)
    right_of = xp.vmap(lambda plan, shift: log_alias(alias_bound(plan, plan.k_above, plan.k_below), eps, shift)[1])
    right = right_of(contours.plan, contours.shift)
    right = xp.exp(right - ref) * _OUTWARD
    left_low, left_high = _left_alias(masses, spectrum, contours.plan.c, contours.plan.period, eps, ref)
    largest = xp.exp(chernoff(tilts, eps) - ref) * _OUTWARD
    middle = raw.total - left_low
    upper = middle + raw.tail + raw.rounding
    lower = raw.total - left_high - right - raw.tail - raw.rounding
    known = raw.tail + raw.rounding < largest  # otherwise the band's Chernoff bound says more
    upper = xp.where(known, xp.fmin(upper, largest), largest)
    lower = xp.where(xp.isnan(lower), 0.0, xp.maximum(lower, 0.0))
    middle = xp.where(known, middle, 0.0)
    slope = xp.where(known, raw.slope, 0.0)
    mass = spectrum.infinity * xp.exp(-ref)
    return Sums(
        (xp.sum(upper) + mass * (1 + 4 * _ULP) + charges * xp.exp(-ref)) * (1 + 64 * _ULP),
        xp.maximum((xp.sum(lower) + spectrum.infinity_low * xp.exp(-ref)) * (1 - 64 * _ULP), 0.0),
        xp.sum(middle) + mass,
        xp.minimum(xp.sum(slope), 0.0),
    )


def _bands(spectrum, steps, edges, eps, log_delta, effort: Effort) -> Bands:
    def one(low: jax.Array, high: jax.Array, lowest: jax.Array) -> tuple[Tilt, Contour, Masses]:
        pieces = make_pieces(steps, low, high, lowest)
        tilt, known = tilt_of(spectrum, steps, pieces, eps), masses_of(steps, pieces)
        plan = place(spectrum, steps, pieces, tilt, known, eps, log_delta)
        return tilt, build(spectrum, steps, pieces, plan, effort), known

    return Bands(*over_bands(edges, one))


def delta_bounds(spectrum: Spectrum, eps: jax.Array, known: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta at eps > 0; (0, 1) elsewhere. known: an upper bound, the closer the better."""
    usable = xp.isfinite(eps) & (eps > 0)
    e, ref = xp.where(usable, eps, 1.0), xp.log(xp.clip(known, SMALLEST, 1.0))
    cut = tail_cut(spectrum, ref)
    steps = make_steps(spectrum, cut, effort.quadrature)
    bands = _bands(spectrum, steps, label_edges(steps, e, cut, effort.bands), e, ref, effort)
    sums = band_sums(spectrum, bands, -xp.expm1(spectrum.log_kept(cut)), e, ref)
    upper = xp.where(usable & ~xp.isnan(sums.upper), xp.minimum(sums.upper * xp.exp(ref) + SMALLEST, 1.0), 1.0)
    lower = xp.minimum(sums.lower * xp.exp(ref), upper)
    return xp.where(usable & ~xp.isnan(lower), lower, 0.0), upper


def epsilon_bounds(
    spectrum: Spectrum, delta: jax.Array, known: jax.Array, effort: Effort
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon at delta. known: an upper bound; where it is infinite nothing is found."""
    spare = delta - spectrum.infinity
    inside = (spare > 0) & (delta < 1) & xp.isfinite(known)
    ref = xp.log(xp.where(inside, spare, 0.5))
    cut = tail_cut(spectrum, ref)
    steps = make_steps(spectrum, cut, effort.quadrature)
    charges = -xp.expm1(spectrum.log_kept(cut))
    target = xp.where(inside, delta, 1.0) * xp.exp(-ref)
    ceiling = xp.maximum(xp.where(inside, known, 1.0), _SMALL)

    # Contours built for one eps serve eps near it. They are rebuilt until the root is near the eps they were built for.
    def improve(state):
        _, root, lower, upper, _, count = state
        bands = _bands(spectrum, steps, label_edges(steps, root, cut, effort.bands), root, ref, effort)

        def at(eps: jax.Array) -> Evaluation:
            return relative_to(target, band_sums(spectrum, bands, charges, eps, ref))

        low, high, better = proved_ends(at, 0.0, _START * ceiling, ceiling, most_tries=_TRIES)
        return root, better, xp.maximum(lower, low), xp.minimum(upper, high), xp.max(bands.tilts.c), count + 1

    def far(state) -> jax.Array:
        place, root, _, _, steepest, count = state
        return (count < 1) | ((count < _MOST_PLACES) & (steepest * xp.abs(root - place) > 0.5))

    nothing = xp.zeros(())
    start = ceiling, ceiling, nothing, ceiling, nothing, xp.asarray(0)
    _, _, lower, upper, _, _ = xp.while_loop(far, improve, start)
    upper, lower = xp.where(inside, upper, xp.inf), xp.where(inside, lower, 0.0)
    return epsilon_edges(spectrum, delta, inside, lower, upper)
