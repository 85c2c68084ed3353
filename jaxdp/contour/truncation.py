"""Bounds of |M(c + it)|/M(c) beyond the contour's last node (notebooks/proofs/contour_certificate.md, section 3)."""

import jax

from jaxdp.contour.spectrum import Spectrum, counted
from jaxdp.numerics.exponential_sums import Line
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.decay import log_decay

_CELLS = 1024  # intervals into which an octave of t is cut; each interval has one bound


def log_tail(
    spectrum: Spectrum, lines: list[Line], log_modulus: jax.Array, end: jax.Array, mu2: jax.Array
) -> jax.Array:
    """log of a bound of step x sum over the nodes t = end + step, end + 2 step, ... of |M(c + it)|/M(c) / t^2.

    M(c) is the computed value. ``end`` is t of the last node kept. |M(c + it)|/M(c) must be at most
    exp(log_modulus - mu2 t^2/2) at the nodes left out; mu2 is the total mu^2 of the Gaussians in the composition.
    """
    # log of a bound of (true M(c)) / (computed M(c))
    pairs = zip(spectrum.parts, lines, strict=True)
    blur = sum((counted(part, xp.log1p(line.error)) for part, line in pairs), xp.zeros(()))
    return log_modulus - 0.5 * mu2 * end**2 - xp.log(end) + blur


def log_fallen(spectrum: Spectrum, lines: list[Line], c: jax.Array, cut: jax.Array, end: jax.Array) -> jax.Array:
    """log of a bound of |M(c + it)|/M(c) for all t >= end, M being that of the sampled steps alone."""
    total = xp.zeros(())
    for part, line in zip(spectrum.sampled, lines[: len(spectrum.sampled)], strict=True):
        size = line.weight.shape[-1] // 2
        each = xp.vmap(log_decay, in_axes=(None, 0, 0, None, None, None, 0, None))
        bound = each(c, part.mu, part.rate, cut, spectrum.direction, size, line.log_m, end)
        total = total + counted(part, xp.minimum(bound, 0.0))
    return total


def log_held(spectrum: Spectrum, lines: list[Line], end: jax.Array, until: jax.Array) -> jax.Array:
    """log of a bound of |M(c + it)|/M(c) for end <= t <= until, M without the sampled steps; until: a rising array."""
    total = xp.zeros_like(until)
    if spectrum.log_modulus is not None:
        edges = xp.linspace(xp.concatenate([end[None], until[:-1]]), until, _CELLS + 1, axis=-1)
        total = xp.cummax(xp.max(spectrum.log_modulus(edges[:, :-1], edges[:, 1:]), axis=-1))
    for part, line in zip(spectrum.discrete, lines[len(spectrum.sampled) :], strict=True):
        bound = xp.vmap(lambda one: dense_modulus(one, end, until))(line)
        total = total + counted(part, xp.log(xp.minimum(bound, 1.0)).T)
    return total


def dense_modulus(line: Line, end: jax.Array, until: jax.Array) -> jax.Array:
    """Bound of |sum weight e^{it loss}| for end <= t <= until, of a finite law; until: an array of ends.

    Each atom has a cell, which ends halfway to its neighbours. Atoms are replaced by a density, constant in each cell,
    whose transform is at most (total variation)/t. The density is capped at the larger density of the two neighbouring
    cells; the mass above this cap remains an atom. The bound includes the error of the replacement.
    """
    weight, loss = xp.real(line.weight), xp.real(line.loss)
    order = xp.argsort(xp.where(weight > 0, loss, xp.inf))
    weight, loss = weight[order], loss[order]
    follows = xp.concatenate([weight[1:] > 0, xp.zeros(1, bool)])
    gap = xp.where(follows, xp.concatenate([xp.diff(loss), xp.zeros(1)]), 0.0)
    before = xp.concatenate([gap[:1], gap[:-1]])
    after = xp.where(follows, gap, before)
    width, off = 0.5 * (before + after), 0.25 * xp.abs(after - before)
    density = xp.where(width > 0, weight / xp.where(width > 0, width, 1.0), 0.0)
    padded = xp.pad(density, (1, 1))
    density = xp.minimum(density, xp.maximum(padded[:-2], padded[2:]))
    mass = density * width
    variation = xp.sum(xp.abs(xp.diff(xp.pad(density, (1, 1)))))
    replacement = xp.vmap(lambda t: xp.sum(mass * xp.minimum(t * off + (t * width) ** 2 / 24, 2.0)))(until)
    isolated = xp.sum(xp.maximum(weight - mass, 0.0))
    total = isolated + variation / end + replacement + until * xp.sum(line.drift[1]) + line.error
    return total * (1 + 1e-9) + 1e-12
