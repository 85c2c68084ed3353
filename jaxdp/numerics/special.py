"""Special functions in float64, traceable, each with a stated error.

Every function takes and returns float64 arrays of one shape and must run inside a float64 scope. Where a textbook
formula loses digits, another one is used, and a comment says how many digits would be lost.
"""

import functools
import math
import statistics
from typing import Any

import jax
import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number

_SMALLEST_BITS = int(np.float64(SMALLEST).view(np.int64))
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_FAR = 26.0  # x/sqrt(2) beyond which the Mills ratio is computed by its asymptotic series
_MILLS_SERIES = (1.0, -1.0, 3.0, -15.0, 105.0, -945.0, 10395.0)
_SQRT_2 = math.sqrt(2.0)
_TABLE_END = 16  # Stirling errors below this k are in a table


_STIRLING_TABLE = np.array(
    [0.0, *(math.lgamma(k + 1) - (k + 0.5) * math.log(k) + k - LOG_SQRT_2PI for k in range(1, _TABLE_END))]
)
_STIRLING_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_ATANH_SERIES = tuple(2.0 / (2 * j + 1) for j in range(1, 11))
_SINE_SERIES = tuple((-1) ** i / math.factorial(2 * i + 1) for i in range(9))  # of (sin r)/r in r^2
_VERSINE_SERIES = tuple((-1) ** i / math.factorial(2 * i + 2) for i in range(8))  # of (1 - cos r)/r^2 in r^2
# pi/2 as a sum of three numbers; whole numbers up to 2^20 times the first or second are exact
_QUARTER_TURN = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
_NEAR_ZERO = 0.3  # for |x| below, log(1 + x) = 2 artanh(x/(2 + x)) by series; its next term is < 1e-17 `deviance`(x)


def raised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x with subnormal numbers replaced by the smallest normal number, whether x is subnormal), for x >= 0.

    Compiled arithmetic, including comparisons, treats a subnormal number as 0, so it is found by its bits.
    """
    bits = xp.bits(x)
    subnormal = (bits > 0) & (bits < _SMALLEST_BITS)
    return xp.where(subnormal, SMALLEST, x), subnormal


def rounded_up(value: Array, positive: Array) -> Array:
    """``value``, of a short formula, rounded up by a relative 4e-13; never 0 where the exact value is ``positive``."""
    return xp.where(positive, xp.maximum(value * (1 + 4e-13), SMALLEST), 0.0)


def polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Sum of coefficients[i] x^i by Horner's rule; at least two coefficients."""
    value = coefficients[-1] * x + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value


def sine_and_versine(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sin u, 1 - cos u). Errors are below 2 ULP (1 + |u|), and below 6 ULP relative for |u| < pi/4.

    Measured for each number on a CPU with AVX-512: NumPy's tangent takes 3 ns and its sine and cosine 57; in a program
    the polynomials take 2 to 6 ns, and one sine, for which XLA calls a library, 17.
    """
    if not xp.eager:
        return _sine_and_versine(u)
    tangent = xp.tan(0.5 * u)
    square = tangent * tangent
    share = 2 / (1 + square)
    return tangent * share, square * share


@jax.custom_jvp
def _sine_and_versine(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`sine_and_versine` from Taylor polynomials on |r| <= pi/4, u = r + k pi/2."""
    quarters = xp.round(u * (2 / math.pi))
    rest = u
    for part in _QUARTER_TURN:
        rest = rest - quarters * part
    rest = xp.clip(rest, -0.8, 0.8)  # from |u| = 2^50 on rest is not small; the error is at most 2 then
    square = rest * rest
    sine, versine = rest * polynomial(_SINE_SERIES, square), square * polynomial(_VERSINE_SERIES, square)
    turned = quarters - 4 * xp.floor(0.25 * quarters)  # quarter turns besides whole turns: 0, 1, 2 or 3
    odd, sign = (turned == 1) | (turned == 3), xp.where(turned < 2, 1.0, -1.0)
    whole_sine, cosine = sign * xp.where(odd, 1 - versine, sine), sign * xp.where(odd, -sine, 1 - versine)
    return whole_sine, xp.where(turned == 0, versine, 1 - cosine)


@_sine_and_versine.defjvp
def _derivatives(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    sine, versine = _sine_and_versine(*primals)
    (along,) = tangents
    return (sine, versine), ((1 - versine) * along, sine * along)


def mills(x: jax.Array) -> jax.Array:
    """Mills ratio Phi_c(x)/density(x) of N(0, 1); relative error 2e-15, for x < 0 2e-15 (1 + x^2)."""
    # JAX's erfcx is 0 between 26.543 and 26.642, because it is e^{x^2} erfc(x) with a subnormal erfc. So beyond 26 the
    # asymptotic series is used; its next term is below 2e-17.
    z = x / _SQRT_2
    far = xp.where(z > _FAR, z, _FAR)
    series = polynomial(_MILLS_SERIES, 0.5 / (far * far)) / (far * math.sqrt(math.pi))
    return math.sqrt(math.pi / 2) * xp.where(z > _FAR, series, xp.erfcx(xp.minimum(z, _FAR)))


def log_normal_tail(x: jax.Array) -> jax.Array:
    """log Phi_c(x), the upper normal tail, for real x. Error at most 1e-15 |log Phi_c(x)|; for x < 0 at most 5e-16."""
    size = xp.where(x > 0, x, xp.minimum(-x, 40.0))  # for x < -40 the result is 0
    tail = -0.5 * size * size - LOG_SQRT_2PI + xp.log(mills(size))
    # For x < 0: Phi_c(x) = 1 - Phi_c(-x), where Phi_c(-x) is the small number.
    return xp.where(x > 0, tail, log_one_plus(-xp.exp(tail)))


@functools.cache
def normal_quantiles(size: int, variance: float) -> np.ndarray:
    """Points whose density is that of N(0, variance): the medians of `size` intervals of equal probability."""
    law = statistics.NormalDist(0.0, math.sqrt(variance))
    return np.array([law.inv_cdf((i + 0.5) / size) for i in range(size)])


def log_one_plus(x: jax.Array) -> jax.Array:
    """log(1 + x), x > -1, to 4 units of 2^-53; XLA's log1p has an error of 241 units near -0.414 (measured)."""
    near = xp.abs(x) < 0.25
    return xp.where(near, xp.log1p(xp.where(near, x, 0.0)), xp.log(xp.where(near, 1.0, 1.0 + x)))


def log_complement(q: Number, p: Number) -> Array:
    """log(1 - q), 0 <= q < 1, given p = 1 - q, to 4 units of 2^-53.

    Computed from q for q < 1/4, else from p. The limit is not 1/2, because XLA's log1p has an error of 241 units near
    -0.414 (measured).
    """
    return xp.where(q < 0.25, xp.log1p(-xp.minimum(q, 0.25)), xp.log(xp.maximum(p, 1e-320)))


def log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - e^x) for x < 0; -inf at 0.

    One formula for x > -log 2 and one for x below, because each loses digits on the other side (measured: an error of
    3.6e-9 at x = -1e-10, all digits at x = -40).
    """
    near = x > -math.log(2.0)
    return xp.where(near, xp.log(-xp.expm1(xp.where(near, x, -1.0))), log_one_plus(-xp.exp(xp.where(near, -1.0, x))))


def log_expm1(x: Array) -> jax.Array:
    """log(e^x - 1), x > 0."""
    large = x > 30  # no clip: its slope at 30 would be a half
    small = xp.log(xp.expm1(xp.where(large, 1.0, xp.maximum(x, 1e-300))))
    return xp.where(large, x + xp.log1p(-xp.exp(-xp.maximum(x, 1.0))), small)


def _excess_terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x v, log(1 + x) - 2 v) for |x| <= 0.3, v = x/(2 + x); since 2 v = x - x v, log(1 + x) - x is second - first."""
    v = x / (2.0 + x)
    return x * v, v * v * v * polynomial(_ATANH_SERIES, v * v)


def deviance(x: jax.Array) -> jax.Array:
    """D(x) = (1 + x) log(1 + x) - x for x >= -1; relative error below 4e-15, no cancellation near 0."""
    small = xp.abs(x) < _NEAR_ZERO
    near = xp.where(small, x, 0.0)
    square, tail = _excess_terms(near)
    # log(ratio), not log1p(x), which is up to 129 ulp off near -0.4 on CPU (jax-ml/jax 39707). Both terms use the
    # rounded 1 + x: this is D at a slightly different x, and D' = log(1 + x) is small. ratio - 1 is exact near 1.
    ratio = 1.0 + xp.where(small, 1.0, x)
    direct = ratio * xp.log(xp.where(ratio > 0, ratio, 1.0)) - (ratio - 1.0)
    return xp.where(small, square + (1.0 + near) * tail, direct)


def log1p_excess(x: jax.Array) -> jax.Array:
    """log(1 + x) - x for x > -1; relative error below 4e-15, no cancellation near 0."""
    small = xp.abs(x) < _NEAR_ZERO
    square, tail = _excess_terms(xp.where(small, x, 0.0))
    ratio = 1.0 + xp.where(small, 1.0, x)
    return xp.where(small, tail - square, xp.log(ratio) - (ratio - 1.0))


def stirling_error(k: jax.Array) -> jax.Array:
    """st(k) = log k! - [(k + 1/2) log k - k + log(2 pi)/2] for whole k >= 1 (0 at k = 0); absolute error 2e-16."""
    large = xp.maximum(k, float(_TABLE_END))
    inverse = 1.0 / large
    series = inverse * polynomial(_STIRLING_SERIES, inverse * inverse)
    index = xp.clip(xp.where(xp.isnan(k), 0.0, k), 0, _TABLE_END - 1).astype(xp.int32)
    return xp.where(k < _TABLE_END, xp.lookup(_STIRLING_TABLE, index), series)


def log_binomial_pmf(k: jax.Array, n: jax.Array, p: Number, q: Number) -> jax.Array:
    """log P[Bin(n, p) = k] for whole k and n (float64, up to 1e15), p > 0 and q = 1 - p > 0; -inf unless 0 <= k <= n.

    Loader's deviance form. Its absolute error is at most 2e-12 where the value is above -700, plus 2^-53 |k - n p| for
    the rounding of n p and n q. Differences of lgamma would have an error of 4e-6 at n = 1e9.
    """
    successes, failures = k, n - k
    mean, rest = xp.maximum(n * p, 1e-300), xp.maximum(n * q, 1e-300)
    inner_k, inner_f = xp.maximum(successes, 1.0), xp.maximum(failures, 1.0)
    away = (
        stirling_error(n)
        - stirling_error(inner_k)
        - stirling_error(inner_f)
        - mean * deviance((inner_k - mean) / mean)
        - rest * deviance((inner_f - rest) / rest)
        + 0.5 * xp.log(xp.maximum(n, 1.0) / (inner_k * inner_f))
        - LOG_SQRT_2PI
    )
    none, every = n * log_complement(p, q), n * log_complement(q, p)
    value = xp.where(failures == 0, every, xp.where(successes == 0, none, away))
    return xp.where((k < 0) | (k > n), -xp.inf, value)
