"""Tilted one-step laws as sums of exponentials, and those sums at many equally spaced points at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxdp.numerics.complex_logarithms import log_one_plus
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp

LEAST_RATIO = 1e-100  # a smaller modulus is taken for this


class Line(NamedTuple):
    """One step, tilted to c: m(c + it) / m(c) - 1 = sum weight (exp(i t loss) - 1), Im loss >= 0, t >= 0."""

    log_m: jax.Array  # log m(c)
    weight: jax.Array  # complex (size,)
    loss: jax.Array  # complex (size,)
    error: jax.Array  # of m(c), relative to itself; also of sum weight exp(i t loss), every t >= 0
    rule: jax.Array  # of m(c + it)/m(c) - 1 with exact weights and losses: what does not fall with t
    drift: jax.Array  # (2,) sum |weight| times: its relative error and |loss|, the error of loss; both count t times
    spread: jax.Array  # upper bound of the tilted standard deviation of L
    variation: jax.Array  # total variation of the tilted density of L (inf: not known)


def discrete_log_m(
    z: jax.Array, loss: jax.Array, log_weight: jax.Array, blur: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log m(z) at real z of finite laws, and what it may be off by; the laws' last axis is that of the atoms.

    blur: error of each loss. A log weight is off by as much, and rounded at its own size and the loss's.
    """
    log_m, _, _, error = _tilted(z, loss, log_weight, blur)
    return log_m, error


def _tilted(
    z: jax.Array, loss: jax.Array, log_weight: jax.Array, blur: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """log m(z), the weights tilted to z, the relative error of each, and their mean: the error of m(z)."""
    z = xp.asarray(z)[..., None]
    exponents = log_weight + z * loss
    log_m = xp.logsumexp(exponents, axis=-1, keepdims=True)
    live = log_weight > -xp.inf
    size = xp.where(live, xp.abs(log_weight) + (1 + xp.abs(z)) * xp.abs(loss) + xp.abs(log_m) + 8, 0.0)
    off = 4 * ULP * size + (1 + xp.abs(z)) * blur
    weight = xp.where(live, xp.exp(exponents - log_m), 0.0)
    error = xp.sum(weight * off, axis=-1) + loss.shape[-1] * ULP
    # of first order: where an exponent is off by so much that a weight may have been lost, nothing is known
    unsure = xp.any(live & (off > 0.25) & (exponents - log_m + off > -745.0), axis=-1)
    return log_m[..., 0], weight, off, xp.where(unsure, xp.inf, error)


def discrete_line(c: jax.Array, loss: jax.Array, log_weight: jax.Array, blur: jax.Array) -> Line:
    """A finite law of the loss, tilted to c: exact up to rounding, with atoms that never decay."""
    log_m, weight, off, error = _tilted(c, loss, log_weight, blur)
    mean = xp.sum(weight * loss)
    spread = xp.sqrt(xp.sum(weight * (loss - mean) ** 2) * (1 + 1e-9) + 1e-300)
    drift = xp.sum(weight * xp.stack([(2 * off + error) * xp.abs(loss), blur]), axis=-1)
    nothing = xp.zeros_like(log_m)
    return Line(log_m, weight + 0j, loss + 0j, error, nothing, drift, spread, xp.full_like(log_m, xp.inf))


def ratios_less_one(line: Any, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """m(c + it)/m(c) - 1 = sum weight (exp(i t L) - 1) at t = step (0..count-1), Im L >= 0: real and imaginary part.

    Its error (`less_one_error`) is small where it is small, so that a power of 1e6 of the ratio is as exact as the
    power's logarithm is small. The nodes are equally spaced: with p = exp(i anchor L) - 1, x = exp(i offset L) - 1,
    two small tables instead of count x size exponentials, it is the sum of weight ((1 + p) x + p), one matrix product.
    """
    inner, outer = split(count)
    w_re, w_im = xp.real(line.weight), xp.imag(line.weight)
    p, turn = _powers_less_one(1j * (step * inner) * line.loss, outer)
    x, y = _powers_less_one(1j * step * line.loss, inner)
    whole = 1 + p
    a, b = w_re * whole - w_im * turn, w_re * turn + w_im * whole
    # one real product, its sums 2 x size long, for both parts: [a, -b] [x, y]^T above [b, a] [x, y]^T
    left = xp.concatenate([xp.concatenate([a, -b], axis=1), xp.concatenate([b, a], axis=1)])
    along = in_blocks(left, xp.concatenate([x, y], axis=1).T)
    down = sum_in_blocks(xp.concatenate([w_re * p - w_im * turn, w_re * turn + w_im * p]))
    total = (along + down[:, None]).reshape(2, -1)
    return total[0, :count], total[1, :count]


def ratios(line: Any, start: jax.Array, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """m(c + it)/m(c) at t = start + step (0..count-1), start >= 0, relative to the computed m(c), and its error."""
    turned = line._replace(weight=line.weight * xp.exp(1j * start * line.loss))
    re, im = ratios_less_one(turned, step, count)
    size, away = line.loss.shape[0], step * xp.arange(count)
    parts = xp.stack([xp.real(turned.weight), xp.imag(turned.weight)])
    first = sum_in_blocks(parts)
    mass, moved = xp.sum(xp.abs(line.weight)), xp.sum(xp.abs(line.weight) * xp.abs(line.loss))
    rounded = ULP * ((24 + 1.5 * sum(blocks_of(size))) * mass + 8 * start * moved) + less_one_error(line, away)
    return xp.complex(re + first[0], im + first[1]), line.error + rounded + (start + away) * line.drift[1]


def less_one_error(line: Any, t: jax.Array) -> jax.Array:
    """By how much `ratios_less_one` may be off at its nodes t by rounding, its weights and losses taken as they are."""
    size = line.loss.shape[0]
    both, alone = sum(blocks_of(2 * size)), sum(blocks_of(size))
    weight, loss = xp.abs(line.weight), xp.abs(line.loss)
    mass, moved = xp.sum(weight), t * xp.sum(weight * loss)
    small = 1.5 * (both + 4) * moved + 40 * moved
    return ULP * xp.minimum(small, (400 + 4 * (both + alone)) * mass + 4 * moved)


def log_ratios(line: Any, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log(m(c + it)/m(c)) at t = step (0..count-1): real part, angle, and the error of the ratio over its modulus.

    The error is small where the ratio is next to one: a step taken T times counts T times log(ratio), not T roundings.
    """
    re, im = ratios_less_one(line, step, count)
    t = step * xp.arange(count)
    log_abs, angle = log_one_plus(re, im)
    log_abs = xp.maximum(log_abs, xp.log(LEAST_RATIO))
    mass = xp.sum(xp.abs(line.weight))
    # |e^{itL} - 1| is at most t |L|, and at most 2
    moved = xp.minimum(t * line.drift[0], 2 * line.error * (1 + mass)) + t * line.drift[1]
    rounded = less_one_error(line, t) + 32 * ULP * (xp.abs(re) + xp.abs(im))
    error = line.rule + 2 * LEAST_RATIO + moved + rounded
    return log_abs, angle, xp.where(t > 0, error, 0.0) * xp.exp(-log_abs)


def split(count: int) -> tuple[int, int]:
    """(inner, outer), about equal, inner a power of two, inner x outer >= count."""
    inner = 1 << max(0, (max(count - 1, 1).bit_length() + 1) // 2)
    return inner, -(-count // inner)


def blocks_of(terms: int) -> tuple[int, int]:
    """(terms of a block, blocks) of a sum: it is off by as many units as both together, not by their product."""
    blocks = max(1, min(16, terms // 32))
    return -(-terms // blocks), blocks


def in_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    """The matrix product (..., rows, terms) x (terms, columns), its sums taken as `blocks_of` says, padded with 0."""
    size = right.shape[0]
    terms, blocks = blocks_of(size)
    missing = terms * blocks - size
    if missing:
        left = xp.concatenate([left, xp.zeros((*left.shape[:-1], missing))], axis=-1)
        right = xp.concatenate([right, xp.zeros((missing, right.shape[1]))])
    left = left.reshape(*left.shape[:-1], blocks, terms)
    right = right.reshape(blocks, terms, right.shape[1])
    return xp.sum(xp.exact_einsum("...rbt,btc->b...rc", left, right), axis=0)


def sum_in_blocks(rows: jax.Array) -> jax.Array:
    """Sums over the last axis, taken as `blocks_of` says."""
    terms, blocks = blocks_of(rows.shape[-1])
    padded = xp.pad(rows, ((0, 0), (0, terms * blocks - rows.shape[-1])))
    return xp.sum(xp.sum(padded.reshape(-1, blocks, terms), axis=-1), axis=-1)


def _powers_less_one(exponent: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of e^{k exponent} - 1, k = 0..count-1, shape (count, size).

    k = row x inner + column, two small tables: (1 + a)(1 + x) - 1 = a x + a + x.
    """
    inner, outer = split(count)
    a, b = (part[:, None] for part in _multiples_less_one(inner * exponent, outer))
    x, y = _multiples_less_one(exponent, inner)
    re, im = a * x - b * y + (a + x), a * y + b * x + (b + y)
    return re.reshape(outer * inner, -1)[:count], im.reshape(outer * inner, -1)[:count]


def _multiples_less_one(exponent: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The same, each from its own exponent, without cancellation.

    A loop, because the compiler would fuse the table into what is made of it and compute it again for every row.
    """

    def turn(k: jax.Array, _: None) -> tuple[Any, Any]:
        less_one, half = xp.expm1(k * xp.real(exponent)), 0.5 * k * xp.imag(exponent)
        sine, cosine = xp.sin(half), xp.cos(half)
        turned, side = -2 * sine * sine, 2 * sine * cosine  # cos - 1 and sin of the whole angle
        return k + 1, (less_one * (1 + turned) + turned, (1 + less_one) * side)

    _, table = xp.scan(turn, xp.zeros(()), None, length=count)
    return table
