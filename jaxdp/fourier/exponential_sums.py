"""Tilted one-step laws as sums of exponentials, and those sums at many equally spaced points at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.precision import exact_product
from jaxdp.rounding import ULP


class Line(NamedTuple):
    """One step, tilted to c: m(c + it) / m(c) = sum weight exp(i t loss), up to ``error``."""

    log_m: jax.Array  # log m(c)
    weight: jax.Array  # complex (size,)
    loss: jax.Array  # complex (size,)
    error: jax.Array  # relative to m(c), every t >= 0
    tail: jax.Array  # mass of P beyond the cut
    spread: jax.Array  # upper bound of the tilted standard deviation of L
    variation: jax.Array  # total variation of the tilted density of L (inf: not known)
    drift: jax.Array  # sum |weight| times the error of loss, beyond 8 units of 2^-53 of itself


def discrete_log_m(
    z: jax.Array, loss: jax.Array, log_weight: jax.Array, blur: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log m(z) at real z of a finite law, and what it may be off by: the tilted mean of its weights' errors.

    blur: error of each loss. A log weight is off by as much, and rounded at its own size and the loss's.
    """
    exponents = log_weight + z * loss
    log_m = jax.nn.logsumexp(exponents)
    live = log_weight > -jnp.inf
    size = jnp.where(live, jnp.abs(log_weight) + (1 + jnp.abs(z)) * jnp.abs(loss) + jnp.abs(log_m) + 8, 0.0)
    off = 4 * ULP * size + (1 + jnp.abs(z)) * blur
    error = jnp.sum(jnp.where(live, jnp.exp(exponents - log_m) * off, 0.0)) + loss.shape[-1] * ULP
    # of first order: where an exponent is off by so much that a weight may have been lost, nothing is known
    unsure = jnp.any(live & (off > 0.25) & (exponents - log_m + off > -745.0))
    return log_m, jnp.where(unsure, jnp.inf, error)


def discrete_line(c: jax.Array, loss: jax.Array, log_weight: jax.Array, blur: jax.Array) -> Line:
    """A finite law of the loss, tilted to c: exact up to rounding, with atoms that never decay."""
    log_m, error = discrete_log_m(c, loss, log_weight, blur)
    weight = jnp.exp(log_weight + c * loss - log_m)
    mean = jnp.sum(weight * loss)
    spread = jnp.sqrt(jnp.sum(weight * (loss - mean) ** 2) * (1 + 1e-9) + 1e-300)
    nothing = jnp.zeros_like(log_m)
    drift = jnp.sum(weight * blur)
    return Line(log_m, weight + 0j, loss + 0j, error, nothing, spread, jnp.full_like(log_m, jnp.inf), drift)


def ratios(line: Line, start: jax.Array, step: jax.Array, count: int) -> jax.Array:
    """m(c + it)/m(c) at t = start + step (0..count-1), as one complex matrix product.

    The nodes are equally spaced, so exp(i t L) factors into exp(i anchor L) exp(i offset L): two small
    tables of powers instead of count x size exponentials.
    """
    inner, outer = split(count)
    first = jnp.exp(1j * start * line.loss) * line.weight
    a, b = _powers(first, 1j * (step * inner) * line.loss, outer)
    x, y = _powers(jnp.ones_like(first), 1j * step * line.loss, inner)
    # one real product, its sums 2 x size long, for both parts: [a, -b] [x, y]^T above [b, a] [x, y]^T
    left = jnp.concatenate([jnp.concatenate([a, -b], axis=1), jnp.concatenate([b, a], axis=1)])
    both = _in_blocks(left, jnp.concatenate([x, y], axis=1))
    return jax.lax.complex(both[:outer], both[outer:]).reshape(-1)[:count]


def ratios_less_one(line: Any, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """m(c + it)/m(c) - 1 = sum weight (exp(i t L) - 1) at t = step (0..count-1), Im L >= 0: real and imaginary part.

    Its error (`less_one_error`) is small where it is small, so that a power of 1e6 of the ratio is as exact as the
    power's logarithm is small: with p = exp(i anchor L) - 1, x = exp(i offset L) - 1 it is the sum of
    weight (p x + p + x).
    """
    inner, outer = split(count)
    size = line.loss.shape[0]
    w_re, w_im = jnp.real(line.weight), jnp.imag(line.weight)

    def weighted(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w_re * re - w_im * im, w_re * im + w_im * re

    a, b = weighted(*_powers_less_one(1j * (step * inner) * line.loss, outer))
    x, y = _powers_less_one(1j * step * line.loss, inner)
    left = jnp.concatenate([jnp.concatenate([a, -b], axis=1), jnp.concatenate([b, a], axis=1)])
    both = _in_blocks(left, jnp.concatenate([x, y], axis=1))
    alone = _in_blocks(jnp.concatenate([a, b, *weighted(x, y)]), jnp.ones((1, size)))[:, 0]
    down, along = alone[: 2 * outer].reshape(2, outer, 1), alone[2 * outer :].reshape(2, 1, inner)
    total = both.reshape(2, outer, inner) + (down + along)
    return total[0].reshape(-1)[:count], total[1].reshape(-1)[:count]


def less_one_error(line: Any, t: jax.Array) -> jax.Array:
    """By how much `ratios_less_one` may be off at its nodes t by rounding, its weights and losses taken as they are."""
    size, count = line.loss.shape[0], t.shape[0]
    runs = sum(sum(split(part)) for part in split(count))
    blocks = max(sum(_blocks(size)), sum(_blocks(2 * size)))
    mass = jnp.sum(jnp.abs(line.weight))
    moved = t * jnp.sum(jnp.abs(line.weight) * jnp.abs(line.loss))
    small, large = (160 + 4 * blocks + 24 * runs) * moved, (400 + 12 * blocks + 72 * runs) * mass + 4 * moved
    return ULP * jnp.minimum(small, large)


def split(count: int) -> tuple[int, int]:
    """(inner, outer), about equal, inner a power of two, inner x outer >= count."""
    inner = 1 << max(0, (max(count - 1, 1).bit_length() + 1) // 2)
    return inner, -(-count // inner)


def rounding_units(size: int, count: int) -> float:
    """Units of 2^-53, relative to sum |weight|, by which `ratios` may be off besides the phases."""
    return 40 + 1.5 * sum(_blocks(2 * size)) + 6 * sum(sum(split(part)) for part in split(count))


def _blocks(terms: int) -> tuple[int, int]:
    """(terms of a block, blocks) of a sum: it is off by as many units as both together, not by their product."""
    blocks = max(1, min(32, terms // 128)) if terms > 256 else 1
    return -(-terms // blocks), blocks


def _in_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    """left right^T, the sums taken in blocks (the terms are padded with zeros)."""
    terms, blocks = _blocks(left.shape[1])
    if blocks == 1:
        return exact_product(left, right.T)
    padding = ((0, 0), (0, terms * blocks - left.shape[1]))
    left, right = (jnp.pad(x, padding).reshape(-1, blocks, terms) for x in (left, right))
    return jnp.sum(exact_product(jnp.moveaxis(left, 1, 0), jnp.transpose(right, (1, 2, 0))), axis=0)


def _powers(first: jax.Array, exponent: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of first x e^{k exponent}, k = 0..count-1, shape (count, size).

    k = row x inner + column: two short runs of repeated multiplication and one more product, because rounding grows
    with the length of a run.
    """
    inner, outer = split(count)
    a, b = _run(first, jnp.exp(inner * exponent), outer)
    x, y = _run(jnp.ones_like(first), jnp.exp(exponent), inner)
    re = a[:, None] * x - b[:, None] * y
    im = a[:, None] * y + b[:, None] * x
    return re.reshape(outer * inner, -1)[:count], im.reshape(outer * inner, -1)[:count]


def _run(first: jax.Array, base: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The same by repeated multiplication.

    A loop, because an unrolled product is fused and computed again for every row.
    """
    base_re, base_im = jnp.real(base), jnp.imag(base)

    def turn(state: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        re, im = state
        return (re * base_re - im * base_im, re * base_im + im * base_re), state

    _, table = jax.lax.scan(turn, (jnp.real(first), jnp.imag(first)), None, length=count)
    return table


def _powers_less_one(exponent: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of e^{k exponent} - 1, k = 0..count-1: (1 + a)(1 + x) - 1 = a x + a + x."""
    inner, outer = split(count)
    a, b = (part[:, None] for part in _run_less_one(inner * exponent, outer))
    x, y = _run_less_one(exponent, inner)
    re, im = a * x - b * y + (a + x), a * y + b * x + (b + y)
    return re.reshape(outer * inner, -1)[:count], im.reshape(outer * inner, -1)[:count]


def _run_less_one(exponent: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The same step by step."""
    fall, turn = jnp.real(exponent), jnp.imag(exponent)
    half = jnp.sin(0.5 * turn)
    base_re, base_im = jnp.expm1(fall) * jnp.cos(turn) - 2 * half * half, jnp.exp(fall) * jnp.sin(turn)

    def advance(state: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        re, im = state
        return (
            re * base_re - im * base_im + (re + base_re),
            re * base_im + im * base_re + (im + base_im),
        ), state

    nothing = jnp.zeros_like(fall)
    _, table = jax.lax.scan(advance, (nothing, nothing), None, length=count)
    return table
