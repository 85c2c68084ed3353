"""Renyi divergence and K(z) of a composed mechanism: sums over its parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.fourier.sampled_gaussian import tilted_line
from jaxdp.fourier.spectrum import Spectrum
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.spectrum import spectrum
from jaxdp.precision import kernel

_SIZE = 1024
# R is nondecreasing in the order: close to 1, where K(c)/c cancels, a slightly larger order bounds it better.
_NUDGES = (1.0, 1.0 + 1e-6, 1.0 + 1e-3)
_SMALLEST = 1e-5


def renyi_upper(stacks: tuple[Stack, ...], order: Any, *, direction: str) -> Any:
    """Certified upper bound of R_order, order > 1 (inf allowed), of one parameter point."""
    finite = jnp.isfinite(order) & (order > 1)
    alpha = jnp.where(finite, order, 2.0)
    direct = [(r, t) for r, t in stacks if hasattr(r, "renyi_divergence")]
    rest = tuple((r, t) for r, t in stacks if not hasattr(r, "renyi_divergence"))
    total = jnp.zeros(())
    for record, times in direct:
        values = jax.vmap(lambda r: r.renyi_divergence(alpha))(record)
        total = total + jnp.sum(jnp.where(times > 0, times * values, 0.0))
    total = total * (1 + 1e-12)
    made = spectrum(stacks, direction)
    if rest:
        other = spectrum(rest, direction)
        c = jnp.maximum(alpha - 1, _SMALLEST) * jnp.asarray(_NUDGES)
        total = total + jnp.min(other.real(c, jnp.asarray(jnp.inf), _SIZE) / c)
    total = jnp.minimum(total, jnp.maximum(made.top, 0.0))
    total = jnp.where(made.infinity > 0, jnp.inf, total)
    answer = jnp.where(finite, total, jnp.where(made.infinity > 0, jnp.inf, jnp.maximum(made.top, 0.0)))
    return jnp.where((order > 1) & ~jnp.isnan(answer), answer, jnp.inf)


@kernel(static=("direction",), working_set=400_000)
def renyi_kernel(stacks: tuple[Stack, ...], order: Any, *, direction: str) -> Any:
    """`renyi_upper`, batched."""
    return renyi_upper(stacks, order, direction=direction)


def log_mgf_point(stacks: tuple[Stack, ...], z: Any, *, direction: str) -> Any:
    """K(z) of one parameter point at one complex z (an estimate, 1e-12 relative in exp(K) per step)."""
    made = spectrum(stacks, direction)
    total = made.closed(z)
    for part in made.sampled:
        total = total + _sampled(made, part, z, direction)
    for atoms in made.discrete:
        exponents = atoms.log_weight + z * atoms.loss
        shift = jnp.max(jnp.real(exponents), axis=-1, keepdims=True)
        values = jnp.log(jnp.sum(jnp.exp(exponents - shift), axis=-1)) + shift[..., 0]
        total = total + jnp.sum(jnp.where(atoms.times > 0, atoms.times * values, 0.0))
    return total


def _sampled(made: Spectrum, part: Any, z: Any, direction: str) -> Any:
    """T log m(z): the line's abscissa must be >= -1/2, so the left half plane is read off the swapped pair."""
    swapped = {"forward": "reverse", "reverse": "forward", "replace": "replace"}[direction]

    def half_plane(w: Any, side: str) -> Any:
        c, t = jnp.real(w), jnp.imag(w)
        make = jax.vmap(tilted_line, in_axes=(None, 0, 0, None, None, None))
        lines = make(c, part.mu, part.rate, jnp.asarray(jnp.inf), side, _SIZE)
        ratio = jnp.sum(lines.weight * jnp.exp(1j * jnp.abs(t) * lines.loss), axis=-1)
        value = lines.log_m + jnp.log(jnp.where(t < 0, jnp.conj(ratio), ratio))
        return jnp.sum(jnp.where(part.times > 0, part.times * value, 0.0))

    right = jnp.real(z) >= -0.5
    return jnp.where(
        right, half_plane(jnp.where(right, z, 0.0), direction), half_plane(jnp.where(right, 0.0, -1 - z), swapped)
    )


@kernel(static=("direction",), working_set=400_000)
def log_mgf_kernel(stacks: tuple[Stack, ...], z: Any, *, direction: str) -> Any:
    """`log_mgf_point`, batched."""
    return log_mgf_point(stacks, z, direction=direction)
