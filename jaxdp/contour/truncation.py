"""The contour beyond its last node: a majorant of |M(c + it)| (notebooks/proofs/contour_certificate.md, section 3)."""

import jax

from jaxdp.contour.spectrum import Spectrum, counted
from jaxdp.numerics.exponential_sums import Line
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.decay import log_decay


def log_tail(spectrum: Spectrum, lines: list[Line], fallen: jax.Array, end: jax.Array, mu2: jax.Array) -> jax.Array:
    """log of a bound of step x sum over the nodes t = end + step, end + 2 step, ... of |M(c + it)|/M(c) / t^2.

    M(c) is the computed one. ``end`` is the last node kept. A Gaussian share bounds |M|/M(c) by exp(-mu2 t^2/2), a
    raised line by ``fallen`` (see `log_fallen`); both only fall.
    """
    # the true M(c) against the computed one
    pairs = zip(spectrum.parts, lines, strict=True)
    blur = sum((counted(part, xp.log1p(line.error)) for part, line in pairs), xp.zeros(()))
    return fallen - 0.5 * mu2 * end**2 - xp.log(end) + blur


def log_fallen(spectrum: Spectrum, lines: list[Line], c: jax.Array, cut: jax.Array, end: jax.Array) -> jax.Array:
    """log of a bound of the sampled steps' |M(c + it)|/M(c), t >= end."""
    total = xp.zeros(())
    for part, line in zip(spectrum.sampled, lines, strict=False):
        size = line.weight.shape[-1] // 2
        each = xp.vmap(log_decay, in_axes=(None, 0, 0, None, None, None, 0, None))
        bound = each(c, part.mu, part.rate, cut, spectrum.direction, size, line.log_m, end)
        total = total + counted(part, xp.minimum(bound, 0.0))
    return total
