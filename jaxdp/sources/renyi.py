"""Renyi divergence and K(z) of a composed mechanism: sums over its parts."""

from typing import Any

import numpy as np

from jaxdp.contour.spectrum import SWAPPED, Spectrum, counted
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.gaussian import gaussian_mus, gaussian_renyi
from jaxdp.mechanisms.spectrum import is_sampled_gaussian, spectrum
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import kernel
from jaxdp.sampled_gaussian.moment import tilted_line

_SIZE = 1024
# R is nondecreasing in the order: close to 1, where K(c)/c cancels, a slightly larger order bounds it better.
_NUDGES = (1.0, 1.0 + 1e-6, 1.0 + 1e-3)
_SMALLEST = 1e-5


def _blur(stacks: tuple[Stack, ...], *_: Any) -> float:
    """How much K may differ between a program and NumPy: of small losses it is the logarithm of nearly 1."""
    return 1e-11 * sum(float(np.sum(times)) for _, times in stacks)


def _blur_of_renyi(stacks: tuple[Stack, ...], order: Any) -> float:
    return _blur(stacks) / max(order - 1, _SMALLEST)


@kernel(static=("direction",), working_set=400_000, by_numpy=256, absolute=_blur_of_renyi)
def renyi_kernel(stacks: tuple[Stack, ...], order: Any, *, direction: str) -> Any:
    """Certified upper bound of R_order, order > 1 (inf allowed), of one parameter point."""
    finite = xp.isfinite(order) & (order > 1)
    alpha = xp.where(finite, order, 2.0)
    direct = [(r, t) for r, t in stacks if r.offers("renyi_divergence")]
    rest = tuple((r, t) for r, t in stacks if not r.offers("renyi_divergence"))
    total = xp.zeros(())
    for record, times in direct:
        values = xp.vmap(lambda r: r.renyi_divergence(alpha))(record)
        total = total + xp.sum(xp.where(times > 0, times * values, 0.0))
    total = total * (1 + 1e-12)
    made = spectrum(stacks, direction)
    if rest:
        other = spectrum(rest, direction)
        c = xp.maximum(alpha - 1, _SMALLEST) * xp.asarray(_NUDGES)
        total = total + xp.minimum(
            xp.min(other.real(c, xp.asarray(xp.inf), _SIZE) / c), _unsampled(rest, alpha, direction)
        )
    total = xp.minimum(total, xp.maximum(made.top, 0.0))
    total = xp.where(made.infinity > 0, xp.inf, total)
    answer = xp.where(finite, total, xp.where(made.infinity > 0, xp.inf, xp.maximum(made.top, 0.0)))
    return xp.where((order > 1) & ~xp.isnan(answer), answer, xp.inf)


def _unsampled(stacks: tuple[Stack, ...], order: Any, direction: str) -> Any:
    """What sampled Gaussian noise would have without sampling, no less: where the quadrature cannot tell."""
    if not all(is_sampled_gaussian(record, direction) for record, _ in stacks):
        return xp.inf
    total = xp.zeros(())
    for record, times in stacks:
        sampled: Any = record
        each = gaussian_renyi(order, gaussian_mus(sampled.unsampled(direction)))
        total = total + xp.sum(xp.where(times > 0, times * each, 0.0))
    return total * (1 + 1e-12)


@kernel(static=("direction",), working_set=400_000, by_numpy=256, absolute=_blur)
def log_mgf_kernel(stacks: tuple[Stack, ...], z: Any, *, direction: str) -> Any:
    """K(z) of one parameter point at one complex z (an estimate, 1e-12 relative in exp(K) per step)."""
    made = spectrum(stacks, direction)
    total = made.closed(z)
    for part in made.sampled:
        total = total + _sampled(made, part, z, direction)
    for atoms in made.discrete:
        exponents = atoms.log_weight + z * atoms.loss
        shift = xp.max(xp.real(exponents), axis=-1, keepdims=True)
        values = xp.log(xp.sum(xp.exp(exponents - shift), axis=-1)) + shift[..., 0]
        total = total + counted(atoms, values)
    return total


def _sampled(made: Spectrum, part: Any, z: Any, direction: str) -> Any:
    """T log m(z): the line's abscissa must be >= -1/2, so the left half plane is read off the swapped pair."""

    def half_plane(w: Any, side: str) -> Any:
        c, t = xp.real(w), xp.imag(w)
        make = xp.vmap(tilted_line, in_axes=(None, 0, 0, None, None, None))
        lines = make(c, part.mu, part.rate, xp.asarray(xp.inf), side, _SIZE)
        ratio = xp.sum(lines.weight * xp.exp(1j * xp.abs(t) * lines.loss), axis=-1)
        value = lines.log_m + xp.log(xp.where(t < 0, xp.conj(ratio), ratio))
        return counted(part, value)

    right = xp.real(z) >= -0.5
    return xp.where(
        right,
        half_plane(xp.where(right, z, 0.0), direction),
        half_plane(xp.where(right, 0.0, -1 - z), SWAPPED[direction]),
    )
