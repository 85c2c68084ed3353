"""delta and epsilon where a few rare large losses rule: one contour for each band of the largest loss.

Next to a phase transition no single tilt serves both the many small losses and the one large one: the integrand of the
plain contour cancels or never dies. Labelling every outcome by its size splits the law of the sum exactly,

    M(z) = sum_j M_j(z),     M_j = prod (B_j + A_j)^T - prod B_j^T     (the largest label is j),

and each M_j, the transform of a positive measure, gets an abscissa of its own (`jaxdp.fourier.labels`; the argument
stands in notebooks/proofs/contour_certificate.md, section 10). Remove direction; sampled Gaussians with anything in
closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.fourier.band_contour import (
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
    tilts_of,
)
from jaxdp.fourier.contour import PLACES, Contour, Effort, Raw, Sums, contour_sum, epsilon_edges, seen
from jaxdp.fourier.plan import conversion, tail_cut
from jaxdp.fourier.spectrum import Spectrum
from jaxdp.roots import Seen, crossing, proved_ends
from jaxdp.rounding import ULP as _ULP
from jaxdp.special import log_expm1

_OUTWARD = 1 + 1e-9
_MOST_PLACES = 5  # times that the contours are made for one epsilon
_ROUNDS = 27  # of a search on the contours of one place


class Bands(NamedTuple):
    """What does not depend on eps, stacked over the bands: tilt and contour of each, and its probabilities."""

    tilts: Tilt
    contours: Contour
    masses: Masses


def _left_alias(masses: Masses, spectrum: Spectrum, c, p, eps: jax.Array, ref: jax.Array):
    """(lower, upper) bound of sum_k e^{-c k p} delta_j(eps - k p), k >= 1, in units of e^ref.

    delta_j(e) is M_j(0) - e^e M_j(-1), plus at most e^e M_j(-1).
    """
    closed = jnp.real(spectrum.closed(jnp.array([0.0, -1.0], jnp.complex128)))
    off = spectrum.closed_units * _ULP + 4 * _ULP * jnp.abs(closed)
    blur = 1e-14 * (1 + (c + 1) * p + jnp.abs(ref) + jnp.abs(eps))
    first = -log_expm1(c * p) - ref
    second = jnp.exp(eps - log_expm1((c + 1) * p) - ref + jnp.minimum(masses.q_upper + closed[1] + off[1], 0.0) + blur)
    lower = jnp.exp(first + masses.p_lower + closed[0] - off[0] - blur) - second
    upper = jnp.exp(first + jnp.minimum(masses.p_upper + closed[0] + off[0], 0.0) + blur)
    return jnp.where(jnp.isnan(lower), 0.0, jnp.maximum(lower, 0.0)), upper * _OUTWARD


def _evaluate(spectrum: Spectrum, bands: Bands, charges: jax.Array, eps: jax.Array, ref: jax.Array) -> Sums:
    tilts, contours, masses = bands
    raw: Raw = jax.vmap(lambda one: Raw(*(x[0] if x.ndim else x for x in contour_sum(one, eps, ref))))(contours)
    plan = contours.plan
    c, p = plan.c, plan.period
    gap = plan.above - c[:, None]
    right = plan.k_above - plan.above * eps + conversion(plan.above)
    right = right - log_expm1(jnp.where(gap > 0, gap * p[:, None], 1e-9))
    right = right + 1e-14 * (jnp.abs(plan.k_above) + plan.above * jnp.abs(eps))
    right = jnp.exp(jnp.min(jnp.where(gap > 0, right, jnp.inf), axis=1) - ref) * _OUTWARD
    left_low, left_high = _left_alias(masses, spectrum, c, p, eps, ref)
    largest = jnp.exp(chernoff(tilts, eps) - ref) * _OUTWARD
    middle = raw.total - left_low
    upper = middle + raw.tail + raw.rounding
    lower = raw.total - left_high - right - raw.tail - raw.rounding
    known = raw.tail + raw.rounding < largest  # otherwise the band's Chernoff bound says more
    upper = jnp.where(known, jnp.fmin(upper, largest), largest)
    lower = jnp.where(jnp.isnan(lower), 0.0, jnp.maximum(lower, 0.0))
    middle = jnp.where(known, middle, 0.0)
    slope = jnp.where(known, raw.slope, 0.0)
    mass = spectrum.infinity * jnp.exp(-ref)
    return Sums(
        (jnp.sum(upper) + mass * (1 + 4 * _ULP) + charges * jnp.exp(-ref)) * (1 + 64 * _ULP),
        jnp.maximum((jnp.sum(lower) + spectrum.infinity_low * jnp.exp(-ref)) * (1 - 64 * _ULP), 0.0),
        jnp.sum(middle) + mass,
        jnp.minimum(jnp.sum(slope), 0.0),
    )


def _bands(spectrum, steps, edges, tilts: Tilt, eps, log_delta, effort: Effort) -> Bands:
    def one(low: jax.Array, high: jax.Array, lowest: jax.Array, tilt: Tilt) -> tuple[Contour, Masses]:
        pieces = make_pieces(steps, low, high, lowest)
        known = masses_of(steps, pieces)
        plan = place(spectrum, steps, pieces, tilt, known, eps, log_delta)
        return build(spectrum, steps, pieces, plan, effort), known

    return Bands(tilts, *over_bands(edges, one, tilts))


def _log_sum(tilts: Tilt, eps: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(chernoff(tilts, eps))


def delta_bounds(spectrum: Spectrum, eps: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta at eps > 0; (0, 1) elsewhere."""
    usable = jnp.isfinite(eps) & (eps > 0)
    e = jnp.where(usable, eps, 1.0)
    loose = tail_cut(spectrum, jnp.asarray(-800.0))

    # delta asks for a cut, and the cut tells delta
    def sharpen(_: int, state: tuple[jax.Array, Tilt, jax.Array]) -> tuple[jax.Array, Tilt, jax.Array]:
        cut = state[0]
        steps = make_steps(spectrum, cut, effort.quadrature)
        tilts = tilts_of(spectrum, steps, label_edges(steps, e, cut, effort.bands), e)
        return jnp.minimum(tail_cut(spectrum, jnp.clip(_log_sum(tilts, e), -800.0, 0.0)), loose), tilts, cut

    none = jnp.zeros(effort.bands + 1)
    _, tilts, cut = jax.lax.fori_loop(0, 2, sharpen, (loose, Tilt(none, none), loose))
    steps = make_steps(spectrum, cut, effort.quadrature)
    edges = label_edges(steps, e, cut, effort.bands)
    ref = jnp.clip(_log_sum(tilts, e), -745.0, 0.0)
    bands = _bands(spectrum, steps, edges, tilts, e, ref, effort)
    sums = _evaluate(spectrum, bands, -jnp.expm1(spectrum.log_kept(cut)), e, ref)
    upper = jnp.where(usable & ~jnp.isnan(sums.upper), jnp.minimum(sums.upper * jnp.exp(ref) + 2.3e-308, 1.0), 1.0)
    return jnp.where(usable, jnp.minimum(sums.lower * jnp.exp(ref), upper), 0.0), upper


def epsilon_bounds(spectrum: Spectrum, delta: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon at delta; (0, inf) where nothing is found."""
    spare = delta - spectrum.infinity
    inside = (spare > 0) & (delta < 1)
    ref = jnp.log(jnp.where(inside, spare, 0.5))
    cut = tail_cut(spectrum, ref)
    steps = make_steps(spectrum, cut, effort.quadrature)
    charges = -jnp.expm1(spectrum.log_kept(cut))
    target = jnp.where(inside, delta, 1.0) * jnp.exp(-ref)
    aim = jnp.log(jnp.where(inside, spare, 0.5) * (1 - 1e-9))

    # the Chernoff bounds' sum, certified: it leaves 1e-9 of delta for the mass cut away
    def rough(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        e = jnp.exp(x)
        tilts = tilts_of(spectrum, steps, label_edges(steps, e, cut, effort.bands), e)
        parts = chernoff(tilts, e)
        total = jax.nn.logsumexp(parts)
        return total - aim, -e * jnp.sum(jnp.exp(parts - total) * tilts.c)

    low, high = np.log(1e-9), np.log(1e6)
    _, ceiling = crossing(rough, jnp.asarray(low), jnp.asarray(high), jnp.asarray(0.0), rtol=1e-3, max_steps=40)
    sound = (ceiling < high) & (charges <= 1e-10 * jnp.exp(ref))
    ceiling = jnp.exp(ceiling) * (1 + 1e-12)

    def bands_at(e: jax.Array) -> Bands:
        edges = label_edges(steps, e, cut, effort.bands)
        return _bands(spectrum, steps, edges, tilts_of(spectrum, steps, edges, e), e, ref, effort)

    # contours made for one eps serve others near it: they are made again until the root is near the place they are for
    def improve(state):
        _, root, lower, upper, _, count = state
        bands = bands_at(root)

        def look(eps: jax.Array) -> Seen:
            return seen(jax.vmap(lambda e: _evaluate(spectrum, bands, charges, e, ref))(eps), target)

        low, high, better = proved_ends(look, ceiling, ceiling * PLACES, max_rounds=_ROUNDS)
        return root, better, jnp.maximum(lower, low), jnp.minimum(upper, high), jnp.max(bands.tilts.c), count + 1

    def far(state) -> jax.Array:
        place, root, _, _, steepest, count = state
        return (count < 2) | ((count < _MOST_PLACES) & (steepest * jnp.abs(root - place) > 0.5))

    nothing = jnp.zeros(())
    start = ceiling, ceiling, nothing, ceiling, nothing, jnp.asarray(0)
    _, _, lower, upper, _, _ = jax.lax.while_loop(far, improve, start)
    upper, lower = jnp.where(sound, upper, jnp.inf), jnp.where(sound, lower, 0.0)
    return epsilon_edges(spectrum, delta, inside, lower, upper)
