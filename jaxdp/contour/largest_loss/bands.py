"""delta and epsilon where a few rare large losses rule: one contour for each band of the largest loss.

Near a phase transition no single tilt serves both the many small losses and the one large loss: the integrand of the
plain contour cancels or does not decay. Labelling every outcome by its size splits the law of the sum exactly,

    M(z) = sum_j M_j(z),     M_j = prod C_j^T - prod C_{j-1}^T     (the largest label is j),

C_j the moment of a step's outcomes with a label of at most j. Each M_j, the transform of a positive measure, gets an
abscissa of its own (the argument stands in notebooks/proofs/contour_certificate.md, section 10). Remove direction;
sampled Gaussians with anything in closed form.
"""

from typing import NamedTuple

import jax

from jaxdp.contour.largest_loss.band import Band, band_contour
from jaxdp.contour.plan import Masses, Plan, log_chernoff, plan_part, tail_cut
from jaxdp.contour.spectrum import Sampled, Spectrum
from jaxdp.contour.trapezoid import Aliases, Contour, Effort, Sums, alias_terms, enclosed, epsilon_edges, relative_to
from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.label import NEVER, WIDTH

_MOST_PLACES, _CLOSE = 5, 3e-7  # how often the contours are rebuilt for one epsilon; gap at which they are not
_SMALL = 1e-9  # a smaller epsilon is not sought
_START = 0.999  # of the known bound of epsilon, where a search begins
_TRIES = 60  # tries of a search on one set of contours
_FALL = 60.0  # u^2 may exceed that of a loss of eps by this much; losses beyond are negligible


class Bands(NamedTuple):
    """Contour and alias terms of every band, stacked over the bands; none of them depends on eps."""

    contours: Contour
    known: Aliases


def label_edges(steps: Sampled, eps: jax.Array, cut: jax.Array, count: int) -> jax.Array:
    """Per step the label's edges, equally spaced in u, not below 2.

    From a loss of 3 % of eps to where the density has fallen by e^-30 more than at a loss of eps.
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
    """The contours to be used near eps; errors far below ``log_delta`` do not count."""
    parts = [(part.mu, part.rate, part.times) for part in spectrum.sampled]
    steps = Sampled(*(xp.concatenate(x) for x in zip(*parts, strict=True)))
    edges = label_edges(steps, eps, cut, effort.bands).T
    end = xp.full_like(edges[:1], NEVER)

    def one(ends: tuple[jax.Array, jax.Array]) -> Bands:
        low, high = ends
        band = Band(spectrum, steps, low, high, cut, effort.quadrature)
        return one_band(band, *plan_part(band, eps, log_delta), effort)

    return xp.lax_map(one, (xp.concatenate([-end, edges]), xp.concatenate([edges, end])))


def one_band(band: Band, plan: Plan, masses: Masses, effort: Effort) -> Bands:
    """One band's contour and alias terms."""
    known = alias_terms(plan, masses.upper, xp.min(masses.share), xp.zeros(()), xp.zeros(()))
    return Bands(band_contour(band, plan, effort), known)


def band_sums(spectrum: Spectrum, bands: Bands, charges: jax.Array, eps: jax.Array, ref: jax.Array) -> Sums:
    """Bounds of e^-ref delta(eps): the sums over the contours of all bands, with their errors."""

    def one(contour: Contour, known: Aliases) -> Sums:
        sums, raw = enclosed(contour, known, eps, ref)
        upper, lower, middle, slope = (x[0] for x in sums)
        plan = contour.plan
        largest = xp.exp(xp.min(log_chernoff(plan.above, plan.k_above, eps)) - ref) * (1 + 1e-9)
        told = (raw.tail + raw.rounding)[0] < largest  # otherwise the band's Chernoff bound says more
        return Sums(
            xp.where(told, xp.fmin(upper, largest), largest),
            xp.where(xp.isnan(lower), 0.0, xp.maximum(lower, 0.0)),
            xp.where(told, middle, 0.0),
            xp.where(told, slope, 0.0),
        )

    upper, lower, middle, slope = (xp.sum(x) for x in xp.vmap(one)(*bands))
    mass = spectrum.infinity * xp.exp(-ref)
    return Sums(
        (upper + mass * (1 + 4 * _ULP) + charges * xp.exp(-ref)) * (1 + 64 * _ULP),
        xp.maximum((lower + spectrum.infinity_low * xp.exp(-ref)) * (1 - 64 * _ULP), 0.0),
        middle + mass,
        xp.minimum(slope, 0.0),
    )


def delta_bounds(spectrum: Spectrum, eps: jax.Array, known: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta at eps > 0; (0, 1) elsewhere. known: an upper bound, the closer the better."""
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
    """Certified (lower, upper) epsilon at delta. known: an upper bound; where it is infinite nothing is found."""
    spare = delta - spectrum.infinity
    inside = (spare > 0) & (delta < 1) & xp.isfinite(known)
    ref = xp.log(xp.where(inside, spare, 0.5))
    cut = tail_cut(spectrum, ref)
    charges = -xp.expm1(spectrum.log_kept(cut))
    target = xp.where(inside, delta, 1.0) * xp.exp(-ref)
    ceiling = xp.maximum(xp.where(inside, known, 1.0), _SMALL)

    # Contours built for one eps serve eps near it. They are rebuilt until the root is near the eps they were built for.
    def improve(state):
        _, root, lower, upper, _, count = state
        bands = make_bands(spectrum, cut, root, ref, effort)

        def at(eps: jax.Array) -> Evaluation:
            return relative_to(target, band_sums(spectrum, bands, charges, eps, ref))

        low, high, better = proved_ends(at, 0.0, _START * ceiling, ceiling, most_tries=_TRIES)
        return root, better, xp.maximum(lower, low), xp.minimum(upper, high), xp.max(bands.contours.plan.c), count + 1

    def far(state) -> jax.Array:
        place, root, lower, upper, steepest, count = state
        again = (steepest * xp.abs(root - place) > 0.5) & ~(upper - lower <= _CLOSE * upper)
        return (count < 1) | ((count < _MOST_PLACES) & again)

    nothing = xp.zeros(())
    start = ceiling, ceiling, nothing, ceiling, nothing, xp.asarray(0)
    _, _, lower, upper, _, _ = xp.while_loop(far, improve, start)
    upper, lower = xp.where(inside, upper, xp.inf), xp.where(inside, lower, 0.0)
    return epsilon_edges(spectrum, delta, inside, lower, upper)
