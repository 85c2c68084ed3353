"""One-step laws, tilted to an abscissa c, as sums of exponentials; and these sums at many equally spaced points t."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.numerics.complex_logarithms import log_one_plus
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array

_LEAST_RATIO = 1e-100  # replaces a smaller modulus of m(c + it)/m(c)
_RECIPROCALS = (1 / np.arange(20.0, 2.0, -1.0)).astype(complex)  # 1/k in Horner's form of e^z - 1 - z, |z| <= 1
_TABLE_UNITS = 640  # error of the tables and their products, in 2^-53 (notebooks/proofs/contour_certificate.md, 5)
_GOOD = 1e-12  # largest Line.error at which the error of the tilted mean is treated as a shift of the loss


class Line(NamedTuple):
    """One step, tilted to c: m(c + it) / m(c) - 1 = sum weight (exp(i t loss) - 1), Im loss >= 0, t >= 0."""

    log_m: jax.Array  # log m(c)
    weight: jax.Array  # complex (size,)
    loss: jax.Array  # complex (size,)
    error: jax.Array  # relative error of m(c); also error of sum weight exp(i t loss) for every t >= 0
    rule: jax.Array  # error of m(c + it)/m(c) - 1 for exact weights and losses, a bound for every t > 0
    mean_rule: jax.Array  # bound of |Im sum weight loss| for exact weights and losses; the tilted mean of L is real
    drift: jax.Array  # (2, size): |weight| (relative error of weight) |loss|; |weight| (error of loss)


def discrete_log_m(z: Array, loss: Array, log_weight: Array, blur: Array) -> tuple[jax.Array, jax.Array]:
    """(log m(z), its error bound) at real z of finite laws; the last axis of the laws is the atoms.

    blur: error bound of each loss. The error of a log weight is at most blur plus the rounding of itself and the loss.
    """
    log_m, _, _, error = _tilted(z, loss, log_weight, blur)
    return log_m, error


def _tilted(z: Array, loss: Array, log_weight: Array, blur: Array) -> tuple[jax.Array, ...]:
    """(log m(z), weights tilted to z, relative error of each weight, relative error of m(z), which is their mean)."""
    z = xp.asarray(z)[..., None]
    exponents = log_weight + z * loss
    largest = xp.max(exponents, axis=-1, keepdims=True)
    largest = xp.where(xp.isfinite(largest), largest, 0.0)
    log_m = largest + xp.log(sum_in_blocks(xp.exp(exponents - largest))[..., None])
    live = log_weight > -xp.inf
    size = xp.where(live, xp.abs(log_weight) + (1 + xp.abs(z)) * xp.abs(loss) + xp.abs(log_m) + 8, 0.0)
    off = 4 * ULP * size + (1 + xp.abs(z)) * blur
    weight = xp.where(live, xp.exp(exponents - log_m), 0.0)
    error = xp.sum(weight * off, axis=-1) + sum_units(loss.shape[-1]) * ULP
    # The error is of first order: no bound (inf) if the exponent of a weight that may matter is off by more than 1/4.
    unsure = xp.any(live & (off > 0.25) & (exponents - log_m + off > -745.0), axis=-1)
    return log_m[..., 0], weight, off, xp.where(unsure, xp.inf, error)


def discrete_line(c: jax.Array, loss: jax.Array, log_weight: jax.Array, blur: jax.Array) -> Line:
    """A finite law of the loss, tilted to c: exact up to rounding and blur (the error bounds of the losses)."""
    log_m, weight, off, error = _tilted(c, loss, log_weight, blur)
    drift = weight * xp.stack([(2 * off + error) * xp.abs(loss), xp.broadcast_to(blur, loss.shape)])
    drift, rule = xp.where(xp.isfinite(error), drift, 0.0), xp.where(xp.isfinite(error), 0.0, xp.inf)
    return Line(log_m, weight + 0j, loss + 0j, error, rule, xp.zeros_like(log_m), drift)


def ratios_less_one(line: Any, step: jax.Array, count: int, shifted: bool = True) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of m(c + it)/m(c) - 1 = sum weight (exp(i t L) - 1) at t = step (0..count-1), Im L >= 0.

    Computed as i t mean + sum weight (exp(i t L) - 1 - i t L). Nearly all outcomes have a tiny loss, so the second sum
    is of second order in L, as are all errors except that of the mean (`ratio_error`). The nodes are equally spaced,
    t = anchor + offset. With p, x = exp(i t L) - 1 at anchors and offsets, and p', x' = exp(i t L) - 1 - i t L there,
    the second sum is sum weight (p x + x' + p'): two small tables replace count x size exponentials. shifted: whether
    the error of the mean may be treated as a shift of the loss (`ratio_error`).
    """
    inner, outer = split(count)
    w_re, w_im = xp.real(line.weight), xp.imag(line.weight)
    base = _turned_by(step * line.loss)
    low, next_power = _powers(base, inner)
    high, _ = _powers(next_power, outer)
    low = _with_bend(step * xp.arange(inner)[:, None] * line.loss, low)
    high = _with_bend(step * inner * xp.arange(outer)[:, None] * line.loss, high)
    a, b = w_re * high.re - w_im * high.im, w_re * high.im + w_im * high.re
    x, y = low.re.T, low.im.T
    rows, columns = (_weighted(w_re, w_im, part.bend_re, part.bend_im) for part in (high, low))
    re = xp.exact_matmul(a, x) - xp.exact_matmul(b, y) + rows[0][:, None] + columns[0]
    im = xp.exact_matmul(b, x) + xp.exact_matmul(a, y) + rows[1][:, None] + columns[1]
    t, (mean_re, mean_im) = step * xp.arange(count), mean_loss(line, shifted)
    return re.reshape(-1)[:count] - t * mean_im, im.reshape(-1)[:count] + t * mean_re


def mean_loss(line: Any, shifted: bool = True) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of the computed tilted mean sum weight loss; the exact mean is real.

    The imaginary part is set to 0 where the error of the mean is treated as a shift of the loss. It is kept elsewhere,
    because there the error bound by the sum of the weights' errors (`ratio_error`) holds for the whole complex sum.
    """
    real, imag = _weighted(
        xp.real(line.weight), xp.imag(line.weight), xp.real(line.loss)[None], xp.imag(line.loss)[None]
    )
    return real[0], xp.where(_is_good(line), 0.0, imag[0]) if shifted else imag[0]


def _is_good(line: Any) -> jax.Array:
    """Whether the error of the tilted mean is treated as a shift of the loss."""
    return line.error < _GOOD


def _weighted(w_re: jax.Array, w_im: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of sum weight (x + iy) over the last axis."""
    return sum_in_blocks(w_re * x - w_im * y), sum_in_blocks(w_re * y + w_im * x)


def ratio_error(
    line: Any, re: jax.Array, im: jax.Array, step: jax.Array, shifted: bool = True
) -> tuple[jax.Array, jax.Array]:
    """(error, shift) of the ratios 1 + re + i im from `ratios_less_one`.

    For one real number s, |s| <= shift, all ratios are within ``error`` of e^{its} m(c + it)/m(c), with the true m(c):
    the error of the mean acts like a shift of the loss by s and is not charged at each node. If the weights are not
    accurate (`_GOOD`), or ``shifted`` is false, the shift is 0.
    Proof: notebooks/proofs/contour_certificate.md, section 5.
    """
    size, t = line.loss.shape[0], step * xp.arange(re.shape[0])
    modulus = xp.abs(line.loss)
    per_loss = xp.concatenate([line.drift, (xp.abs(line.weight) * modulus)[None]])
    sums, sums_with_loss = xp.sum(per_loss, axis=-1), xp.sum(per_loss * modulus, axis=-1)
    weights, losses, mean_modulus = sums
    mean_units = 1.5 * sum_units(size) + 4
    units = _TABLE_UNITS + 0.75 * (size + 4) + 1.5 * sum_units(size)
    # bounds of the sums of per_loss times min(t |L|, 2), which bounds |e^{itL} - 1|
    by_weight, by_loss, by_table = xp.minimum(t * sums_with_loss[:, None], 2 * sums[:, None])
    rounded = ULP * (units * t * by_table + 32 * (xp.abs(re) + xp.abs(im))) + line.rule
    off_mean = ULP * mean_units * mean_modulus
    mass = xp.sum(xp.abs(line.weight))
    plain = rounded + t * (off_mean + losses) + xp.minimum(t * weights, 2 * line.error * (1 + mass))
    if not shifted:
        return plain, xp.zeros(())
    shift = weights + losses + off_mean
    turn = t * shift  # bound of the angle |ts| by which the shift turns a ratio
    centred = (rounded + t * (line.mean_rule + by_weight + by_loss)) * (1 + turn)
    centred = centred + turn * (xp.abs(re) + xp.abs(im) + 2 * turn)
    centred = xp.minimum(centred, plain + t * (line.mean_rule + shift))
    return xp.where(_is_good(line), centred, plain), xp.where(_is_good(line), shift, 0.0)


def log_ratios(
    line: Any, step: jax.Array, count: int, computed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """log(m(c + it)/m(c)) at t = step (0..count-1): real part, angle, error of the ratio over its modulus, shift.

    The error is small where the ratio is close to 1; this matters because a step taken T times counts it T times. Error
    and shift are defined in `ratio_error`. computed: if None, a shift is allowed and m(c) is the true value. Otherwise
    there is no shift, and ``computed`` tells whether m(c) is the computed value, for which the errors of the weights do
    not grow with t.
    """
    nodes = xp.arange(count)
    if computed is not None:
        once = xp.where(computed, xp.array([[0.0], [1.0]]), 1.0)
        line = line._replace(rule=xp.where(computed, line.error, line.rule), drift=once * line.drift)
    re, im = ratios_less_one(line, step, count, computed is None)
    error, shift = ratio_error(line, re, im, step, computed is None)
    inexact = nodes > 0
    if computed is not None:
        whole = sum_in_blocks(xp.stack([xp.real(line.weight), xp.imag(line.weight)]))
        rounded = ULP * (24 + 1.5 * sum_units(line.loss.shape[0])) * xp.sum(xp.abs(line.weight))
        off = xp.where(computed, xp.stack([whole[0] - 1, whole[1], rounded]), 0.0)
        re, im, error, inexact = re + off[0], im + off[1], error + off[2], inexact | computed
    log_abs, angle = log_one_plus(re, im)
    log_abs = xp.maximum(log_abs, xp.log(_LEAST_RATIO))
    return log_abs, angle, xp.where(inexact, error + 2 * _LEAST_RATIO, 0.0) * xp.exp(-log_abs), shift


def split(count: int) -> tuple[int, int]:
    """(inner, outer) with inner x outer >= count: about equal, inner a power of two."""
    inner = 1 << (max(count - 1, 1).bit_length() // 2)
    return inner, -(-count // inner)


def sum_units(terms: int) -> int:
    """Bound of the error of `sum_in_blocks`, in units of 2^-53 of the sum of the moduli of its terms.

    A compiled program may take blocks of 32 terms instead, blocks of 32 of these sums and so on.
    """
    size = _block_size(terms)
    return size - (-terms // size) + 32


def _block_size(terms: int) -> int:
    """About sqrt(terms), so that there are about as many blocks as terms in a block."""
    return math.isqrt(max(terms - 1, 0)) + 1


def sum_in_blocks(rows: jax.Array) -> jax.Array:
    """Sums over the last axis, taken in blocks."""
    terms, size = rows.shape[-1], _block_size(rows.shape[-1])
    padded = xp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, -terms % size),))
    return xp.sum(xp.sum(padded.reshape(*rows.shape[:-1], -1, size), axis=-1), axis=-1)


class Turned(NamedTuple):
    """e^{i theta} - 1 (re, im) and e^{i theta} - 1 - i theta (bend_re, bend_im)."""

    re: jax.Array
    im: jax.Array
    bend_re: jax.Array
    bend_im: jax.Array


def _is_small(angle: jax.Array) -> jax.Array:
    return xp.abs(xp.real(angle)) + xp.imag(angle) <= 1


def _turned_by(angle: jax.Array) -> Turned:
    """`Turned` of complex angles, Im >= 0, without cancellation; for large angles only re and im are valid."""
    u, v = xp.real(angle), xp.imag(angle)
    less_one, half = xp.expm1(-v), 0.5 * u
    sine, cosine = xp.sin(half), xp.cos(half)
    turned, side = -2 * sine * sine, 2 * sine * cosine  # cos - 1 and sin of the whole angle
    z = xp.where(_is_small(angle), xp.complex(-v, u), 0.0)  # e^z - 1 - z = (z^2 / 2) (1 + (z / 3) (1 + (z / 4) (...)))
    series, _ = xp.scan(lambda inner, reciprocal: (1 + z * reciprocal * inner, None), xp.ones_like(z), _RECIPROCALS)
    bend = 0.5 * z * z * series
    return Turned(less_one * (1 + turned) + turned, (1 + less_one) * side, xp.real(bend), xp.imag(bend))


def _with_bend(angle: jax.Array, turned: Turned) -> Turned:
    """``turned`` with valid bends for large angles, too: (e^{i theta} - 1) - i theta, which hardly cancels there."""
    small = _is_small(angle)
    re, im = turned.re + xp.imag(angle), turned.im - xp.real(angle)
    return turned._replace(bend_re=xp.where(small, turned.bend_re, re), bend_im=xp.where(small, turned.bend_im, im))


def _times(left: Turned, right: Turned) -> Turned:
    """`Turned` of the sum of both angles a and b: e^{i(a + b)} - 1 = p x + p + x, p = e^{ia} - 1, x = e^{ib} - 1."""
    (p, q, c, d), (x, y, e, f) = left, right
    re, im = p * x - q * y, p * y + q * x
    return Turned(re + p + x, im + q + y, re + c + e, im + d + f)


def _powers(base: Turned, count: int) -> tuple[Turned, Turned]:
    """`Turned` of the angles k theta, k = 0..count-1, of shape (count, size), and of count theta; base: that of theta.

    count is a power of two. With k = row x inner + column, the table is the product of two smaller tables. A table of
    up to four powers multiplies each power by the base.
    """
    if count <= 4:  # a loop, because the compiler would compute the base again for every power
        zero = Turned(*[xp.zeros_like(x) for x in base])
        next_power, table = xp.scan(lambda now, _: (_times(base, now), now), zero, None, length=count)
        return table, next_power
    inner, outer = split(count)
    low, next_power = _powers(base, inner)
    high, next_power = _powers(next_power, outer)
    products = _times(Turned(*[x[:, None] for x in high]), low)
    return Turned(*[x.reshape(outer * inner, -1)[:count] for x in products]), next_power
