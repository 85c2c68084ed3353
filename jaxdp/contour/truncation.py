"""The contour beyond its last node: a majorant of |M(c + it)| (notebooks/proofs/contour_certificate.md, section 3)."""

import jax

from jaxdp.contour.spectrum import Spectrum
from jaxdp.numerics.exponential_sums import Line, largest_ratios
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.decay import log_decay

_NEGLIGIBLE = 50.0
_LEAST = 64  # covering points of the least effort


def log_tail(
    spectrum: Spectrum,
    lines: list[Line],
    fallen: jax.Array,
    end: jax.Array,
    step: jax.Array,
    mu2: jax.Array,
    cover: int,
) -> jax.Array:
    """log of a bound of step x sum over the nodes t = end + step, end + 2 step, ... of |M(c + it)|/M(c) / t^2.

    M(c) is the computed one. ``end`` is the last node kept.

    Four facts bound |M|/M(c): a Gaussian share gives exp(-mu2 t^2/2); a density of total variation V gives
    (V/t)^T; between two evaluations m(c + it)/m(c) cannot change faster than its tilted deviation; and on a raised
    line it falls for good. The first two rule beyond ``far``, the third (with the first) on ``cover`` intervals
    between end and far; the last is ``fallen`` (see `log_fallen`).
    """
    gaussian_far = xp.where(mu2 > 0, xp.sqrt(2 * _NEGLIGIBLE / xp.where(mu2 > 0, mu2, 1.0)), xp.inf)
    variation, power = _fastest(spectrum, lines)
    far = xp.maximum(xp.minimum(gaussian_far, 2 * variation), end)
    beyond_density = power * (xp.log(variation) - xp.log(far)) - xp.log(far) - xp.log(power + 1)
    beyond_density = xp.where(xp.isfinite(variation) & (far >= variation), beyond_density, -xp.log(far))
    beyond_gaussian = -0.5 * mu2 * far**2 - xp.log(far)
    beyond = xp.where(xp.isfinite(far), xp.minimum(beyond_density, beyond_gaussian), -xp.inf)
    plain = fallen - 0.5 * mu2 * end**2 - xp.log(end)
    if not lines:
        return plain
    near = _covered(spectrum, lines, end, xp.where(xp.isfinite(far), far, end) + step, step, mu2, cover)
    covered = xp.logaddexp(near, beyond)
    # the true M(c) against the computed one
    blur = sum(
        xp.sum(xp.where(part.times > 0, part.times * xp.log1p(line.error), 0.0))
        for part, line in zip(spectrum.parts, lines, strict=True)
    )
    return xp.where(xp.isfinite(far), xp.minimum(covered, plain), plain) + blur


def log_fallen(spectrum: Spectrum, lines: list[Line], c: jax.Array, cut: jax.Array, end: jax.Array) -> jax.Array:
    """log of a bound of the sampled steps' |M(c + it)|/M(c), t >= end; 0 under replace."""
    total = xp.zeros(())
    if spectrum.direction == "replace":
        return total
    for part, line in zip(spectrum.sampled, lines, strict=False):
        size = line.weight.shape[-1] // 2
        each = xp.vmap(log_decay, in_axes=(None, 0, 0, None, None, None, 0, None))
        bound = each(c, part.mu, part.rate, cut, spectrum.direction, size, line.log_m, end)
        total = total + xp.sum(xp.where((part.times > 0) & (bound < 0), part.times * bound, 0.0))
    return total


def _fastest(spectrum: Spectrum, lines: list[Line]) -> tuple[jax.Array, jax.Array]:
    """(V, T) of the sampled mechanism with the largest T, V finite."""
    best_v, best_t = xp.asarray(xp.inf), xp.zeros(())
    for part, line in zip(spectrum.parts, lines, strict=True):
        times = xp.where(xp.isfinite(line.variation), part.times, 0.0)
        i = xp.argmax(times)
        better = times[i] > best_t
        best_v, best_t = xp.where(better, line.variation[i], best_v), xp.where(better, times[i], best_t)
    return best_v, best_t


def _covered(spectrum, lines, end, far, step, mu2, cover):
    """The nodes in (end, far]: a cell of width w holds at most w/step + 1 of them, each below the cell's bound."""
    width = (far - end) / cover
    left = end + width * xp.arange(cover)
    log_abs = -0.5 * mu2 * left**2
    for part, line in zip(spectrum.parts, lines, strict=True):
        sizes = xp.vmap(lambda one: largest_ratios(one, end + 0.5 * width, width, cover))(line)
        largest = sizes + 0.5 * width * line.deviation[:, None]
        bound = xp.log(xp.minimum(largest, 1.0))
        log_abs = log_abs + xp.sum(xp.where(part.times[:, None] > 0, part.times[:, None] * bound, 0.0), axis=0)
    share = xp.log(width + step) - 2 * xp.log(left)
    return xp.logsumexp(log_abs + share)
