"""Tilted one-step laws as sums of exponentials, and those sums at many equally spaced points at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.fourier.mixture import ULP
from jaxdp.precision import exact_product


class Line(NamedTuple):
    """One step, tilted to c: m(c + it) / m(c) = sum weight exp(i t loss), up to ``error``."""

    log_m: jax.Array  # log m(c)
    weight: jax.Array  # complex (size,)
    loss: jax.Array  # complex (size,)
    error: jax.Array  # relative to m(c), every t >= 0
    tail: jax.Array  # mass of P beyond the cut
    spread: jax.Array  # upper bound of the tilted standard deviation of L
    variation: jax.Array  # total variation of the tilted density of L (inf: not known)


def discrete_line(c: jax.Array, loss: jax.Array, log_weight: jax.Array) -> Line:
    """A finite law of the loss, tilted to c: exact up to rounding, with atoms that never decay."""
    exponents = log_weight + c * loss
    log_m = jax.nn.logsumexp(exponents)
    weight = jnp.exp(exponents - log_m)
    mean = jnp.sum(weight * loss)
    spread = jnp.sqrt(jnp.sum(weight * (loss - mean) ** 2) * (1 + 1e-9) + 1e-300)
    nothing = jnp.zeros_like(log_m)
    # exponents are rounded before exp: their size in ulp is the relative error of a weight
    error = 4 * ULP * jnp.sum(weight * (jnp.abs(jnp.where(weight > 0, exponents, 0.0)) + 8))
    return Line(log_m, weight + 0j, loss + 0j, error, nothing, spread, jnp.full_like(log_m, jnp.inf))


def ratios(line: Line, start: jax.Array, step: jax.Array, count: int) -> jax.Array:
    """m(c + it)/m(c) at t = start + step (0..count-1), as one complex matrix product.

    The nodes are equally spaced, so exp(i t L) factors into exp(i anchor L) exp(i offset L): two small
    tables of powers instead of count x size exponentials.
    """
    inner, outer = split(count)
    first = jnp.exp(1j * start * line.loss) * line.weight
    a, b = _powers(first, jnp.exp(1j * (step * inner) * line.loss), outer)
    x, y = _powers(jnp.ones_like(first), jnp.exp(1j * step * line.loss), inner)
    # one real product, its sums 2 x size long, for both parts: [a, -b] [x, y]^T above [b, a] [x, y]^T
    left = jnp.concatenate([jnp.concatenate([a, -b], axis=1), jnp.concatenate([b, a], axis=1)])
    both = exact_product(left, jnp.concatenate([x, y], axis=1).T)
    return jax.lax.complex(both[:outer], both[outer:]).reshape(-1)[:count]


def split(count: int) -> tuple[int, int]:
    """(inner, outer), about equal, inner a power of two, inner x outer >= count."""
    inner = 1 << max(0, (max(count - 1, 1).bit_length() + 1) // 2)
    return inner, -(-count // inner)


def rounding_units(size: int, count: int) -> float:
    """Units of 2^-53, relative to sum |weight|, by which `ratios` may be off besides the phases."""
    return 32 + 2 * size + 6 * sum(split(count))


def _powers(first: jax.Array, base: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of first x base^k, k = 0..count-1, shape (count, size).

    A loop, because an unrolled product is fused and computed again for every row.
    """
    base_re, base_im = jnp.real(base), jnp.imag(base)

    def turn(state: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        re, im = state
        return (re * base_re - im * base_im, re * base_im + im * base_re), state

    _, table = jax.lax.scan(turn, (jnp.real(first), jnp.imag(first)), None, length=count)
    return table
