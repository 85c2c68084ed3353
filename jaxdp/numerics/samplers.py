"""Samplers of the noise that the accountant assumes, each with an explicit key and dtype.

What the accountant speaks about is the real-valued law. A float has finitely many values, so continuous noise from
any sampler here leaks through its low-order bits when the noisy value itself is released (Mironov 2012): round the
released value to a fixed grid, or use the integer samplers, whose support is what the accountant assumes.
jax.random is a counter-based generator, not a cryptographic one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdp import validate
from jaxdp.typing import Number

_TABLE_TAIL = 2.0**-70
_LONGEST_TABLE = 2**20


def gaussian(key: jax.Array, std: Number, shape: tuple[int, ...] = (), *, dtype: DTypeLike) -> jax.Array:
    """Samples of N(0, std^2), shape `shape`, in the given floating dtype; std broadcasts."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype)


def laplace(key: jax.Array, scale: Number, shape: tuple[int, ...] = (), *, dtype: DTypeLike) -> jax.Array:
    """Samples of the Laplace law of the given scale (variance 2 scale^2); scale broadcasts.

    The difference of two exponentials: unlike the logarithm of one signed uniform it is fine-grained around 0.
    """
    first, second = jax.random.split(key)
    draw = jax.random.exponential(first, shape, dtype) - jax.random.exponential(second, shape, dtype)
    return draw * jnp.asarray(scale, dtype)


def discrete_laplace(
    key: jax.Array, scale: float, shape: tuple[int, ...] = (), *, dtype: DTypeLike = jnp.int32
) -> jax.Array:
    """Samples of P(x) ~ exp(-|x| / scale) on the integers, by a table of integer thresholds.

    Args:
        key: jax random key.
        scale: concrete number > 0, at most about 1e4.
        shape: of the result.
        dtype: integer dtype of the result.

    Accuracy:
        Probabilities are rounded to multiples of 2^-64 and the tail beyond 2^-70 is dropped: total variation from
        the ideal law at most table length x 2^-64, which belongs into delta.

    """
    b = float(validate.positive("scale", scale))
    half_width = _half_width("scale", b * (-math.log(_TABLE_TAIL)) + 2)
    x = np.arange(-half_width, half_width + 1)
    return _from_table(key, x, np.exp(-np.abs(x) / b), shape, dtype)


def discrete_gaussian(
    key: jax.Array, sigma: float, shape: tuple[int, ...] = (), *, dtype: DTypeLike = jnp.int32
) -> jax.Array:
    """Samples of N_Z(0, sigma^2), P(x) ~ exp(-x^2 / (2 sigma^2)) on the integers, by a table of integer thresholds.

    Args and accuracy as `discrete_laplace`, with sigma at most about 5e4.
    """
    s = float(validate.positive("sigma", sigma))
    half_width = _half_width("sigma", s * math.sqrt(-2 * math.log(_TABLE_TAIL)) + 2)
    x = np.arange(-half_width, half_width + 1)
    return _from_table(key, x, np.exp(-0.5 * (x / s) ** 2), shape, dtype)


def _half_width(name: str, value: float) -> int:
    if 2 * value + 1 > _LONGEST_TABLE:
        entries = f"{2 * value:.3g}"
        raise ValueError(f"{name} must be small enough for a table of {_LONGEST_TABLE} entries, got {entries}.")
    return math.ceil(value)


def _from_table(key, outcomes, weights, shape, dtype):
    """Inverse of the distribution function at 64 random bits, held as two 32-bit words (works with x64 off)."""
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"dtype must be an integer type, got {dtype!r}.")
    high, low = thresholds_of(weights)
    words = jax.random.bits(key, (*shape, 2), jnp.uint32)
    start = jnp.zeros(shape, jnp.int32)
    count = len(outcomes)

    def halve(_, bracket):
        left, right = bracket
        middle = (left + right) // 2
        at_high, at_low = high[middle], low[middle]
        below = (words[..., 0] > at_high) | ((words[..., 0] == at_high) & (words[..., 1] >= at_low))
        return jnp.where(below, middle + 1, left), jnp.where(below, right, middle)

    steps = max(1, (count - 1).bit_length())
    index, _ = jax.lax.fori_loop(0, steps, halve, (start, start + count - 1))
    return jnp.asarray(outcomes, dtype)[index]


def thresholds_of(weights: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """P(X <= x_i) in units of 2^-64 for all but the last outcome, as (high word, low word)."""
    # Whole numbers of Python: float64 sums would lose the tail's digits next to 1.
    exact = [int(w * 2.0**80) for w in weights]
    total, running, cumulative = sum(exact), 0, []
    for value in exact[:-1]:
        running += value
        cumulative.append(min((running << 64) // total, 2**64 - 1))
    high = np.array([c >> 32 for c in cumulative], np.uint32)
    low = np.array([c & 0xFFFFFFFF for c in cumulative], np.uint32)
    return jnp.asarray(high), jnp.asarray(low)


def ornstein_uhlenbeck(key: jax.Array, value: jax.Array, *, theta: Number, rho: Number, time: Number) -> jax.Array:
    """Exact sample at `time` of dX = -theta X dt + sqrt(2) rho dW from X_0 = value, in the dtype of value.

    N(e^{-theta t} value, (rho^2 / theta)(1 - e^{-2 theta t})) per coordinate; no time steps.
    """
    dtype = jnp.asarray(value).dtype
    rate, moment = jnp.asarray(theta, dtype), jnp.asarray(time, dtype)
    std = jnp.asarray(rho, dtype) * jnp.sqrt(-jnp.expm1(-2 * rate * moment) / rate)
    return jnp.exp(-rate * moment) * value + std * jax.random.normal(key, jnp.shape(value), dtype)


def brownian(key: jax.Array, value: jax.Array, *, time: Number) -> jax.Array:
    """Exact sample of N(value, 2 time) per coordinate, in the dtype of value."""
    dtype = jnp.asarray(value).dtype
    return value + jnp.sqrt(2 * jnp.asarray(time, dtype)) * jax.random.normal(key, jnp.shape(value), dtype)
