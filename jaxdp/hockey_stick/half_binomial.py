"""Upper tail of Bin(j, 1/2) relative to one of its terms, for many j at once.

    R = P[Bin(j,1/2) >= x] / P[Bin(j,1/2) = x-1] = (j-x+1) int_0^1 (1-s)^{x-1} (1+s)^{j-x} ds

(incomplete beta integral with t = (1-s)/2), integrated by Gauss-Legendre up to where the integrand has
fallen by e^-38. The library betainc is wrong by 3e-3 at j = 5e6 and by 0.3 at 5e7; this rule is good to
3e-14 with 24 nodes. Written as

    (1-s)^{x-1} (1+s)^{j-x} = exp[ ((j-1)/2) log(1-s^2) - a atanh s ],   a = 2x-1-j >= 1,

the nodes may be shared by neighbouring j, so that one entry costs one exponential and no logarithm.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.special import LOG_SQRT_2PI, log_one_plus, stirling_error

_GROUP = 16
_EXPONENT = 38.0


@functools.cache
def _legendre(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return (points + 1.0) / 2.0, weights / 2.0


def log_pmf_and_tail_ratio(count, x, *, nodes: int):
    """(log P[Bin(j,1/2) = x-1], R) for increasing counts j (length divisible by 16) and 1 <= x <= j+1, 2x > j+1.

    Neighbours in groups of 16 share nodes, laid out for the widest integrand of the group; the integrand is a
    polynomial of degree j-1, so small j, where neighbours differ most, are exact.
    """
    return _log_half_pmf(x - 1.0, count), _tail_ratio(count, x, nodes)


def _tail_ratio(count, x, nodes: int):
    points, weights = map(jnp.asarray, _legendre(nodes))
    shape = (count.shape[0] // _GROUP, _GROUP)
    slope = (2.0 * x - 1.0 - count).reshape(shape)
    least_slope = jnp.min(slope, axis=1)
    least_curve = jnp.maximum(count.reshape(shape)[:, 0] - 1.0, 0.0)
    reach = 2.0 * _EXPONENT / (least_slope + jnp.sqrt(least_slope**2 + 2.0 * _EXPONENT * least_curve))
    reach = jnp.minimum(reach, 1.0)
    s = reach[None, :] * points[:, None]
    # Without the barrier the compiler recomputes both logarithms for every count of the group: 3x slower.
    # log(1 - s^2) is multiplied by j: (1 - s)(1 + s) would have lost its digits
    square = jnp.where(s < 0.5, log_one_plus(-s * s), jnp.log((1.0 - s) * (1.0 + s)))
    even, odd = jax.lax.optimization_barrier((0.5 * square, jnp.arctanh(s)))
    curve = (count - 1.0).reshape(shape)

    def add(i, total):
        return total + weights[i] * jnp.exp(even[i, :, None] * curve - odd[i, :, None] * slope)

    # A loop, not twenty copies: the copies ran at the same speed and took seconds to compile at each use.
    total = jax.lax.fori_loop(0, nodes, add, jnp.zeros(shape), unroll=2)
    return (count - x + 1.0) * (total * reach[:, None]).reshape(-1)


def _log_half_pmf(k, j):
    """log P[Bin(j, 1/2) = k] in deviance form, y = (2k - j)/j; absolute error below 1e-12 where it is above -720."""
    y = (2.0 * k - j) / jnp.maximum(j, 1.0)
    inner_k, inner_f = jnp.maximum(k, 1.0), jnp.maximum(j - k, 1.0)
    away = (
        stirling_error(j)
        - stirling_error(inner_k)
        - stirling_error(inner_f)
        - j * _symmetric_deviance(y)
        + 0.5 * jnp.log(jnp.maximum(j, 1.0) / (inner_k * inner_f))
        - LOG_SQRT_2PI
    )
    return jnp.where((k == 0) | (k == j), -j * np.log(2.0), away)


# [(1+y) log(1+y) + (1-y) log(1-y)]/2 = sum_{i>=1} y^{2i} / (2i (2i-1)); 24 terms leave 2e-18 at 1/2. Beyond, where the
# rounding of 1 - y costs 1e-16 j, a value above -720 has j below 5600.
_SERIES = tuple(1.0 / (2 * i * (2 * i - 1)) for i in range(1, 25))


def _symmetric_deviance(y):
    small = jnp.abs(y) < 0.5
    near, far = jnp.where(small, y, 0.0), jnp.clip(jnp.where(small, 0.75, y), -1.0, 1.0)
    square = near * near
    series = jnp.full_like(y, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        series = series * square + coefficient
    plus, minus = 1.0 + far, 1.0 - far
    direct = 0.5 * (_x_log_x(plus) + _x_log_x(minus))
    return jnp.where(small, square * series, direct)


def _x_log_x(x):
    return x * jnp.log(jnp.where(x > 0, x, 1.0))
