"""Tilted one-step laws as sums of exponentials, and those sums at many equally spaced points at once."""

import math
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
    drift = xp.sum(weight * xp.stack([(2 * off + error) * xp.abs(loss), blur]), axis=-1)
    return Line(log_m, weight + 0j, loss + 0j, error, xp.zeros_like(log_m), drift)


def ratios_less_one(line: Any, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """m(c + it)/m(c) - 1 = sum weight (exp(i t L) - 1) at t = step (0..count-1): real and imaginary part.

    Im L >= 0. Its error (`ratio_error`) is small where it is small, so that a power of 1e6 of the ratio is as exact as
    the power's logarithm is small. The nodes are equally spaced: with p = exp(i anchor L) - 1, x = exp(i offset L) - 1,
    two small tables instead of count x size exponentials, it is the sum of weight ((1 + p) x + p): matrix products.
    """
    inner, outer = split(count)
    w_re, w_im = xp.real(line.weight), xp.imag(line.weight)
    (x, y), following = _powers_less_one(_turned_less_one(step * line.loss), inner)
    (p, turn), _ = _powers_less_one(following, outer)
    whole = 1 + p
    a, b = w_re * whole - w_im * turn, w_re * turn + w_im * whole
    x, y = x.T, y.T
    re = in_blocks(a, x) - in_blocks(b, y) + sum_in_blocks(w_re * p - w_im * turn)[:, None]
    im = in_blocks(b, x) + in_blocks(a, y) + sum_in_blocks(w_re * turn + w_im * p)[:, None]
    return re.reshape(-1)[:count], im.reshape(-1)[:count]


def less_one_error(line: Any, step: jax.Array, count: int) -> jax.Array:
    """By how much `ratios_less_one` may be off at its nodes by rounding, its weights and losses taken as they are."""
    inner, outer = split(count)
    size = line.loss.shape[0]
    offset = step * (xp.arange(count) % inner)
    t = step * xp.arange(count)
    weight, loss = xp.abs(line.weight), xp.abs(line.loss)
    mass, moved = xp.sum(weight), xp.sum(weight * loss)
    tables = (40 + 5 * (inner * outer - 1).bit_length()) * t * moved
    # of the products of p and x, and of the sum of p alone: |e^{itL} - 1| is at most t |L|, and at most 2
    products = 1.5 * (sum(blocks_of(size)) + 4) * xp.minimum(offset * moved, 2 * mass)
    alone = 1.5 * (sum(short_blocks_of(size)) + 4) * xp.minimum((t - offset) * moved, 2 * mass)
    return ULP * (tables + products + alone)


def ratio_error(line: Any, re: jax.Array, im: jax.Array, step: jax.Array) -> jax.Array:
    """By how much 1 + re + i im, the ratios of `ratios_less_one`, may be off in all, the true m(c) below them."""
    count, mass = re.shape[0], xp.sum(xp.abs(line.weight))
    t = step * xp.arange(count)
    moved = xp.minimum(t * line.drift[0], 2 * line.error * (1 + mass)) + t * line.drift[1]
    return line.rule + moved + less_one_error(line, step, count) + 32 * ULP * (xp.abs(re) + xp.abs(im))


def log_ratios(line: Any, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log(m(c + it)/m(c)) at t = step (0..count-1): real part, angle, and the error of the ratio over its modulus.

    The error is small where the ratio is next to one: a step taken T times counts T times log(ratio), not T roundings.
    """
    re, im = ratios_less_one(line, step, count)
    log_abs, angle = log_one_plus(re, im)
    log_abs = xp.maximum(log_abs, xp.log(LEAST_RATIO))
    error = ratio_error(line, re, im, step) + 2 * LEAST_RATIO
    return log_abs, angle, xp.where(xp.arange(count) > 0, error, 0.0) * xp.exp(-log_abs)


def ratios(line: Any, step: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """m(c + it)/m(c), the computed m(c), at t = step (0..count-1), and its error, which does not fall with t."""
    re, im = ratios_less_one(line, step, count)
    whole = sum_in_blocks(xp.stack([xp.real(line.weight), xp.imag(line.weight)]))
    rounded = ULP * (24 + 1.5 * sum(short_blocks_of(line.loss.shape[0]))) * xp.sum(xp.abs(line.weight))
    error = line.error + rounded + less_one_error(line, step, count) + step * xp.arange(count) * line.drift[1]
    return xp.complex(re + whole[0], im + whole[1]), error


def split(count: int) -> tuple[int, int]:
    """(inner, outer), about equal, inner a power of two, inner x outer >= count."""
    inner = 1 << max(0, (max(count - 1, 1).bit_length() + 1) // 2)
    return inner, -(-count // inner)


def blocks_of(terms: int) -> tuple[int, int]:
    """(terms of a block, blocks) of a sum: it is off by as many units as both together, not by their product."""
    blocks = max(1, min(4, terms // 128))
    return -(-terms // blocks), blocks


def in_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    """The matrix product (..., rows, terms) x (terms, columns), its sums taken as `blocks_of` says."""
    terms, blocks = blocks_of(right.shape[0])
    parts = [slice(i * terms, (i + 1) * terms) for i in range(blocks)]
    return sum(xp.exact_matmul(left[..., part], right[part]) for part in parts)


def short_blocks_of(terms: int) -> tuple[int, int]:
    """The same for `sum_in_blocks`: about as many blocks as terms in a block."""
    size = math.isqrt(max(terms - 1, 0)) + 1
    return size, -(-terms // size)


def sum_in_blocks(rows: jax.Array) -> jax.Array:
    """Sums over the last axis, taken as `short_blocks_of` says."""
    terms, blocks = short_blocks_of(rows.shape[-1])
    padded = xp.pad(rows, ((0, 0), (0, terms * blocks - rows.shape[-1])))
    return xp.sum(xp.sum(padded.reshape(-1, blocks, terms), axis=-1), axis=-1)


Table = tuple[jax.Array, jax.Array]  # real and imaginary part


def _turned_less_one(angle: jax.Array) -> Table:
    """e^{i angle} - 1 of complex angles, without cancellation."""
    less_one, half = xp.expm1(-xp.imag(angle)), 0.5 * xp.real(angle)
    sine, cosine = xp.sin(half), xp.cos(half)
    turned, side = -2 * sine * sine, 2 * sine * cosine  # cos - 1 and sin of the whole angle
    return less_one * (1 + turned) + turned, (1 + less_one) * side


def _times_less_one(one: Table, other: Table) -> Table:
    """(1 + a)(1 + x) - 1 = a x + a + x."""
    (a, b), (x, y) = one, other
    return x * (1 + a) - y * b + a, y * (1 + a) + x * b + b


def _powers_less_one(base: Table, count: int) -> tuple[Table, Table]:
    """(1 + base)^k - 1, k = 0..count-1, shape (count, size), and the power after (count a power of two).

    k = row x inner + column: products of two smaller tables, down to four powers, each the one before times the base.
    """
    if count <= 4:  # a loop, because the compiler would compute the base again for every power
        none = xp.zeros_like(base[0]), xp.zeros_like(base[0])
        following, table = xp.scan(lambda now, _: (_times_less_one(now, base), now), none, None, length=count)
        return table, following
    inner, outer = split(count)
    low, following = _powers_less_one(base, inner)
    high, following = _powers_less_one(following, outer)
    re, im = _times_less_one((high[0][:, None], high[1][:, None]), low)
    return (re.reshape(outer * inner, -1)[:count], im.reshape(outer * inner, -1)[:count]), following
