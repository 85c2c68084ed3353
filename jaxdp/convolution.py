"""Repeated noise addition: the privacy of a value hidden by a sum of independent noises.

Bounds: the Renyi divergence between a sum and the sum shifted, from the divergence of one summand. Exact values: sums
of n <= 1e4 Laplace noises. The density of a sum of n Laplace(1) noises is a mixture of Erlang densities. So density and
upper tail are sums over i < n of P[Poisson(|x|) = i] times a weight. The density's weights are negative binomial
probabilities, the tail's weights are sums of them. All terms are positive and are added in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import discrete_laplace_renyi, laplace_renyi_upper
from jaxdp.domains import NEXT_TO_ZERO, NONNEGATIVE, NOT_NAN, POSITIVE, PROBABILITY, SMALLEST, Domain, whole
from jaxdp.interval import Bounds
from jaxdp.numerics.power_excess import log_power_excess
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import product_error
from jaxdp.numerics.special import LOG_SQRT_2PI, deviance, log_binomial_pmf, raised, stirling_error
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import ORDER, at_points, checked, theorem, unless
from jaxdp.runtime.precision import Kernel, kernel
from jaxdp.typing import Array, Real

__all__ = [
    "discrete_laplace_bound", "gaussian_bound", "grouped_laplace_bound", "laplace_bound", "laplace_rdp",
    "laplace_sum_delta", "laplace_sum_delta_bounds", "laplace_sum_epsilon", "laplace_sum_epsilon_bounds",
    "laplace_sum_log_density", "laplace_sum_rdp", "repeated_noise_bound",
]  # fmt: skip

# Factors that round up: for a few roundings, and for sums of logarithms of size up to 700.
_UP = 1.0 + 2.0**-49
_DISCRETE_UP = 1.0 + 1e-12


def repeated_noise_bound(renyi: Callable[[Array, Array], Array], order: Real, shift: Real, num_summands: Real) -> Array:
    """Upper bound n R_alpha(P + s/n, P) on the Renyi divergence of a sum of n noises of law P against its shift by s.

    renyi: function (order, shift) -> R_alpha(P + shift, P) of one summand, elementwise, non-decreasing in the shift.
    order, shift, num_summands: alpha > 1; s >= 0, in the units of the noise; n, whole, >= 1.

    >>> normal = lambda order, shift: order * shift**2 / 2
    >>> print(jaxdp.convolution.repeated_noise_bound(normal, 2.0, 1.0, 4))
    0.25

    Assumes: P is a law on the real line, where every real shift has a meaning; for integer noise use
    `discrete_laplace_bound`. The equal split is the best split when R is convex in the shift.

    Returns nats of the broadcast shape: an upper bound if renyi returns one, rounded to nearest. Raises ValueError.
    Reference: Feldman, Mironov, Talwar, Thakurta 2018, shift reduction, applied n times.
    """
    alpha, moved, n = checked(order=(ORDER, order), shift=(NONNEGATIVE, shift), num_summands=(whole(1), num_summands))
    return unless(False, n * renyi(alpha, moved / n), np.inf)


def _share(shift, scale, count=1):
    """shift / (scale n), never 0 where the shift is positive."""
    shift, _ = raised(shift)
    # Without the barrier the compiler would divide by scale * count, which may overflow.
    share = xp.optimization_barrier(shift / scale) / count
    return xp.where(shift > 0, xp.maximum(share, SMALLEST), 0.0)


@theorem(order=ORDER, shift=NONNEGATIVE, scale=POSITIVE)
def laplace_rdp(order: Real, shift: Real, scale: Real) -> Array:
    """Renyi divergence R_alpha(Laplace(b) + s, Laplace(b)), rounded up.

    order: alpha > 1, up to 1e6 and as close to 1 as float64 allows.
    shift, scale: s >= 0 and b > 0, in the same units.

    >>> print(f"{jaxdp.convolution.laplace_rdp(2.0, shift=1.0, scale=1.0):.4f}")
    0.6191

    Returns an upper bound in nats, broadcast shape, float64; its relative excess is at most 2e-14. Raises ValueError.
    Reference: Mironov 2017, Corollary 2.
    """
    return laplace_renyi_upper(order, _share(shift, scale))


@theorem(order=ORDER, shift=NONNEGATIVE, scale=POSITIVE, num_summands=whole(1))
def laplace_bound(order: Real, shift: Real, scale: Real, num_summands: Real) -> Array:
    """Upper bound n R_alpha(Laplace(b) + s/n, Laplace(b)) on the Renyi divergence of a sum of n Laplace(b) noises.

    It tends to alpha s^2 / (2 n b^2) for large n, twice the exact value `laplace_sum_rdp`.

    order, shift, scale, num_summands: as for `laplace_rdp`, and n, whole, >= 1.

    >>> print(f"{jaxdp.convolution.laplace_bound(2.0, shift=1.0, scale=1.0, num_summands=4):.4f}")
    0.2263

    Returns an upper bound in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: `repeated_noise_bound` with Mironov 2017, Corollary 2. Why it is not tight:
    notebooks/proofs/laplace_sum_not_tight.md.
    """
    return num_summands * laplace_renyi_upper(order, _share(shift, scale, num_summands))


@theorem(order=ORDER, shift=NONNEGATIVE, std=POSITIVE, num_summands=whole(1))
def gaussian_bound(order: Real, shift: Real, std: Real, num_summands: Real) -> Array:
    """Exact Renyi divergence alpha s^2 / (2 n sigma^2) of a sum of n normal noises against its shift by s.

    order, num_summands: alpha > 1, and n, whole, >= 1.
    shift, std: s >= 0 and the standard deviation sigma > 0 of one summand, in the same units.

    >>> print(f"{jaxdp.convolution.gaussian_bound(2.0, shift=1.0, std=1.0, num_summands=4):.4f}")
    0.2500

    Returns the divergence in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    """
    ratio = _share(shift, std, num_summands)
    return xp.where(ratio > 0, num_summands * xp.maximum(order * ratio * ratio / 2 * _UP, SMALLEST), 0.0)


def grouped_laplace_bound(order: Real, shift: Real, scale: Real, num_summands: Real, group_size: int) -> Array:
    """Renyi bound k R_alpha(P^{*m} + s/k, P^{*m}) of a sum of n Laplace(b) noises in k = n / m groups of m.

    The divergence of a group is `laplace_sum_rdp`. m = 1 gives `laplace_bound`, m = n the exact divergence.

    order, shift, scale: as for `laplace_rdp`.
    num_summands, group_size: n, whole, a multiple of m, and m, whole, 1 to 10000.

    >>> print(f"{jaxdp.convolution.grouped_laplace_bound(2.0, 1.0, 1.0, num_summands=4, group_size=2):.4f}")
    0.1453

    Returns a bound in nats of the broadcast shape, float64, with the relative error of `laplace_sum_rdp`: not
    certified. Raises ValueError, also for n not a multiple of m.
    """
    size = validate.count("group_size", group_size, 1)
    *_, count = validate.all_inside(
        order=(ORDER, order), shift=(NONNEGATIVE, shift), scale=(POSITIVE, scale), num_summands=(whole(1), num_summands)
    )
    validate.reject("num_summands", count, count % size != 0, f"a multiple of group_size {size}")
    return repeated_noise_bound(lambda a, s: laplace_sum_rdp(a, s, scale, size), order, shift, count // size)


@theorem(order=ORDER, shift=whole(0), scale=POSITIVE, num_summands=whole(1), working_set=4096)
def discrete_laplace_bound(order: Real, shift: Real, scale: Real, num_summands: Real) -> Array:
    """Upper bound on the Renyi divergence of a sum of n discrete Laplace noises against its shift by an integer s.

    The shift is split over the n summands as evenly as integers allow. The summands are composed and then added, which
    is post-processing. For s <= n the bound is s R(1); for n = 1 it is exact. The claim R(P + s, P) <= s R(P + 1, P)
    for one summand is false: R is convex in the shift.

    order, num_summands: alpha > 1, and n, whole, >= 1.
    shift, scale: s, whole, >= 0 (the bound is inf above 1024 n), and the scale > 0 of P(x) ~ exp(-|x| / scale).

    >>> print(f"{jaxdp.convolution.discrete_laplace_bound(2.0, shift=1, scale=1.0, num_summands=4):.4f}")
    0.7353

    Returns an upper bound in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    """
    rate, least = 1 / scale, xp.floor(shift / num_summands)
    num_larger = shift - num_summands * least
    low, high = discrete_laplace_renyi(order, rate, least), discrete_laplace_renyi(order, rate, least + 1)
    total = (num_summands - num_larger) * low + xp.where(num_larger > 0, num_larger * high, 0.0)
    return xp.where(shift > 0, xp.maximum(total * _DISCRETE_UP, SMALLEST), 0.0)


LARGEST_SUM = 10_000
_SIZES = (16, 128, 1024, LARGEST_SUM)  # table sizes: a kernel is compiled once for each
# Relative error charged to a tail or density of n summands, times 1 + n / 500. It is ten times the largest difference
# from 40-digit values measured for n = 1, ..., 1e4 up to 20 standard deviations from 0.
_TAIL_ERROR = 1e-13
# Relative error charged in addition per unit of |x|; 9.5e-16 was the largest measured for n <= 1e4 and |x| <= 1e5.
_FAR_ERROR = 3e-15
_HALVINGS = 64
# Nats below its peak at which the integrand of the Renyi divergence is cut off.
_DROP = 80.0
_PANELS, _NODES = 12, 24  # panels in each of three intervals, Gauss nodes in each panel


def _weights(n, size):
    """Logs of the weights of P[Poisson = i], i < size, in the density and in the upper tail; -inf for i >= n."""
    i = xp.arange(size, dtype=xp.result_type(n, 1.0))
    k = n - 1 - i
    half = xp.full_like(i, 0.5)
    log_w = log_binomial_pmf(xp.maximum(k, 0.0), xp.maximum(n - 1 + k, 0.0), half, half) - math.log(2.0)
    log_w = xp.where(k >= 0, log_w, -xp.inf)
    # The tail of Erlang(i + 1) is P[Poisson <= i]: the weight of i in the tail is the sum of all weights from i on.
    return log_w, lax.cumlogsumexp(log_w, reverse=True)


def _log_poisson(x, size):
    """Log P[Poisson(x) = i] for i < size and x >= 0, in the deviance form (no difference of large numbers)."""
    i = xp.arange(size, dtype=x.dtype)
    mean = xp.clip(x, 1e-290, 1e300)  # outside, 1 / mean would overflow or be flushed to 0
    inner = xp.maximum(i, 1.0)
    value = -mean * deviance((inner - mean) / mean) - stirling_error(inner) - 0.5 * xp.log(inner) - LOG_SQRT_2PI
    return xp.where(i > 0, value, -x)


def _log_density(x, weights):
    return xp.logsumexp(_log_poisson(xp.abs(x), weights[0].shape[0]) + weights[0])


def _cut(x, shift, weights):
    """(loss, p, log q) at x >= 0; p = P(X > x - s), q = P(X > x), and delta(loss) = p - e^loss q."""
    poissons = [_log_poisson(xp.abs(at), weights[0].shape[0]) for at in (x - shift, x)]
    # log f and log P(X > .) at |x - s| and at x, of the sum X with density f
    (log_f_shifted, log_p), (log_f, log_q) = ([xp.logsumexp(p + w) for w in weights] for p in poissons)
    return log_f_shifted - log_f, xp.where(x < shift, -xp.expm1(log_p), xp.exp(log_p)), log_q


def _error(n, x, shift):
    """Bound of the relative error of the tails at x and x - shift, and of the absolute error of log densities."""
    return xp.expm1(_TAIL_ERROR * (1.0 + n / 500.0) + _FAR_ERROR * xp.maximum(x, xp.abs(x - shift)))


def _far(n, shift):
    """A point beyond which every tail is below 1e-300."""
    return shift + 800.0 + 45.0 * xp.sqrt(2 * n)


@kernel(working_set=LARGEST_SUM * 8)
def _delta_point(n, smaller, larger, epsilon, *, size):
    """Bounds of delta. smaller, larger: shift / scale, rounded down and rounded up."""
    weights = _weights(n, size)

    def early(x):
        return _cut(x, larger, weights)[0] >= epsilon - 2 * _error(n, x, larger)

    # The exact loss at x is at most epsilon, because the computed loss is at least 2 errors below epsilon.
    x, _ = bisect(early, larger / 2, _far(n, larger), _HALVINGS)
    loss, p, log_q = _cut(x, larger, weights)
    error = _error(n, x, larger)
    scaled = xp.exp(epsilon + log_q)
    # The optimal threshold lies beyond x. It adds at most (e^(epsilon - loss) - 1) p to delta at x.
    missing = xp.expm1(xp.maximum(epsilon - loss, 0.0) + 2 * error) * p
    upper = p - scaled + error * (p + scaled) + missing * (1 + error)
    upper = xp.fmin(upper, p * (1 + error)) + NEXT_TO_ZERO
    # Every threshold gives a lower bound of delta.
    p = _cut(x, smaller, weights)[1]
    lower = p - scaled - 2 * error * (p + scaled) - NEXT_TO_ZERO
    upper = xp.where(xp.isnan(upper), 1.0, xp.clip(upper, 0.0, 1.0))
    lower = xp.where(xp.isnan(lower), 0.0, xp.clip(lower, 0.0, 1.0))
    return xp.where(epsilon < smaller, lower, 0.0), xp.where(epsilon < larger, upper, 0.0)


@kernel(working_set=LARGEST_SUM * 8)
def _epsilon_point(n, smaller, larger, delta, *, size):
    """Bounds of epsilon. smaller, larger: shift / scale, rounded down and rounded up."""
    weights = _weights(n, size)

    def profile(x, shift, sign):
        """(loss, delta at this loss), both moved by their errors, up for sign 1, down for sign -1; NaN on overflow."""
        loss, p, log_q = _cut(x, shift, weights)
        error = _error(n, x, shift)
        scaled = xp.exp(loss + log_q)
        # Three errors: two from the loss, one from the tails. NEXT_TO_ZERO covers tails that underflow.
        return loss + sign * 2 * error, p - scaled + sign * (3 * error * (p + scaled) + NEXT_TO_ZERO)

    def enough(x):
        return profile(x, larger, 1.0)[1] <= delta

    # Both comparisons with NaN are false: the upper end is then not accepted and the lower end is not raised.
    _, upper_place = bisect(enough, larger / 2, _far(n, larger), _HALVINGS)
    lower_place, _ = bisect(lambda x: ~(profile(x, smaller, -1.0)[1] > delta), smaller / 2, _far(n, smaller), _HALVINGS)
    upper = xp.where(enough(upper_place), xp.fmin(profile(upper_place, larger, 1.0)[0], larger), larger)
    lower = xp.clip(profile(lower_place, smaller, -1.0)[0], 0.0, smaller)
    is_zero = enough(larger / 2) | (delta >= 1)
    return xp.where(is_zero | xp.isnan(lower), 0.0, lower), xp.where(is_zero, 0.0, upper)


def _window(order, shift, n, weights):
    """(low, high) outside which f(x - s)^alpha f(x)^(1-alpha) is below e^-80 times its peak."""

    def height(x):
        return order * _log_density(x - shift, weights) + (1 - order) * _log_density(x, weights)

    width = shift + 200.0 + 20.0 * n + 40.0 * xp.sqrt(order * (n * shift + 1.0))

    def narrow(_, bracket):
        a, b = bracket
        left, right = a + (b - a) / 3, b - (b - a) / 3
        higher = height(left) < height(right)
        return xp.where(higher, left, a), xp.where(higher, b, right)

    a, b = xp.fori_loop(0, 80, narrow, (xp.zeros_like(shift), width))
    peak = 0.5 * (a + b)
    cutoff = height(peak) - _DROP
    _, high = bisect(lambda x: height(x) < cutoff, peak, peak + width + 200.0, _HALVINGS)
    low, _ = bisect(lambda x: height(x) > cutoff, peak - width - 200.0, peak, _HALVINGS)
    return low, high


@kernel(working_set=LARGEST_SUM * _NODES * 4)
def _renyi_point(n, shift, order, *, size):
    weights = _weights(n, size)
    low, high = _window(order, shift, n, weights)
    nodes, gauss = (xp.asarray(v) for v in np.polynomial.legendre.leggauss(_NODES))
    # The integrand is not analytic at 0 and at s: panels end there.
    ends = xp.stack([low, xp.clip(0.0, low, high), xp.clip(shift, low, high), high])

    def at(x):
        here = _log_density(x, weights)
        return here + log_power_excess(_log_density(x - shift, weights) - here, order)

    def panel(index):
        segment, part = index // _PANELS, index % _PANELS
        width = (ends[segment + 1] - ends[segment]) / _PANELS
        x = ends[segment] + width * (part + 0.5 * (nodes + 1))
        return xp.lax_map(at, x) + xp.log(xp.maximum(gauss * width / 2, 1e-300))

    log_excess = xp.logsumexp(xp.lax_map(panel, xp.arange(3 * _PANELS)).reshape(-1))
    value = xp.logaddexp(0.0, log_excess) / (order - 1.0)
    # fmin: s / b is an upper bound; at orders beyond 1e20 the quadrature overflows.
    return xp.where(shift > 0, xp.fmin(value, shift), 0.0)


@kernel(working_set=LARGEST_SUM * 4)
def _log_density_point(n, x, *, size):
    return _log_density(x, _weights(n, size))


def _checked(num_summands: Real, **arguments: tuple[Domain, Real]) -> list[np.ndarray]:
    """[num_summands, *arguments] as arrays; arguments: name=(domain, value)."""
    n, *others = validate.all_inside(num_summands=(whole(1), num_summands), **arguments)
    beyond = "For more, laplace_bound bounds the Renyi divergence; jaxdp.conversions.epsilon_from_rdp converts it."
    validate.reject("num_summands", n, n > LARGEST_SUM, f"at most {LARGEST_SUM}", beyond)
    return [n, *others]


def _at_sums(point: Kernel, n: np.ndarray, *arguments: np.ndarray) -> Any:
    """A kernel of this file at the broadcast of the arguments, with tables for the largest number of summands."""
    size = next(s for s in _SIZES if s >= n.max(initial=1.0))
    return at_points(point, n, *arguments, size=size)


def _ratio_bounds(shift, scale):
    """shift / scale rounded down and rounded up; both are the quotient if it is exactly representable."""
    with np.errstate(over="ignore", under="ignore"):
        value = shift / scale
    (top, _), (bottom, _) = np.frexp(shift), np.frexp(scale)
    quotient = top / bottom
    excess = (quotient * bottom - top) + product_error(quotient, bottom)  # quotient times bottom, exactly, minus top
    down = np.where(excess > 0, np.nextafter(value, 0.0), value)
    up = np.where(excess < 0, np.nextafter(value, np.inf), value)
    # Subnormal numbers are rounded outward, because XLA flushes them to 0.
    down, up = np.where(value < 2 * SMALLEST, 0.0, down), np.maximum(up, SMALLEST)
    return np.where(top > 0, np.minimum(down, np.finfo(float).max), 0.0), np.where(top > 0, up, 0.0)


def laplace_sum_log_density(x: Real, scale: Real, num_summands: Real) -> Array:
    """Log density at x of the sum of n independent Laplace(b) noises.

    x, scale, num_summands: x real, b > 0 in the same units, and n, whole, 1 to 10000.

    >>> print(f"{jaxdp.convolution.laplace_sum_log_density(0.0, 1.0, num_summands=2):.4f}")  # log(1/4)
    -1.3863

    Returns the log density, of the broadcast shape, float64; absolute error about 1e-12. Raises ValueError.
    """
    n, place, b = _checked(num_summands, x=(NOT_NAN, x), scale=(POSITIVE, scale))
    with np.errstate(over="ignore", under="ignore"):
        far = np.clip(place / b, -np.finfo(float).max, np.finfo(float).max)
    return _at_sums(_log_density_point, n, far) - np.log(b)


def laplace_sum_rdp(order: Real, shift: Real, scale: Real, num_summands: Real) -> Array:
    """Renyi divergence of a sum of n Laplace(b) noises against its shift by s, by quadrature: not an upper bound.

    order, shift, scale, num_summands: as for `laplace_rdp`, and n, whole, 1 to 10000.

    >>> print(f"{jaxdp.convolution.laplace_sum_rdp(2.0, shift=1.0, scale=1.0, num_summands=4):.4f}")
    0.1283

    Returns the divergence in nats of the broadcast shape, float64, at most s / b. Relative error about 1e-10 in a
    comparison with high precision (n <= 64, alpha <= 8). `laplace_bound` and `laplace_sum_epsilon` are certified.
    Raises ValueError.
    """
    n, alpha, moved, b = _checked(
        num_summands, order=(ORDER, order), shift=(NONNEGATIVE, shift), scale=(POSITIVE, scale)
    )
    with np.errstate(over="ignore", under="ignore"):
        return _at_sums(_renyi_point, n, moved / b, alpha)


def laplace_sum_delta_bounds(epsilon: Real, shift: Real, scale: Real, num_summands: Real) -> Bounds[Array]:
    """Certified bounds on delta(epsilon) of a value hidden by the sum of n Laplace(b) noises.

    The density is log-concave, so the privacy loss is monotone, and delta = P(X > x - s) - e^eps P(X > x) at the point
    x whose loss is eps. delta = 0 for eps >= s / b.

    epsilon: in nats, >= 0.
    shift, scale, num_summands: the sensitivity s >= 0 of the value, b > 0 in the same units, n, whole, 1 to 10000.

    >>> lower, upper = jaxdp.convolution.laplace_sum_delta_bounds(0.5, shift=1.0, scale=1.0, num_summands=4)
    >>> print(f"{lower:.6f} {upper:.6f}")
    0.010252 0.010252

    Returns Bounds of the broadcast shape, float64. Their gap is about 1e-12 (1 + n/500 + s/(30 b)) P(X > x - s). The
    relative gap grows where delta is much smaller than this tail: for shifts far below the standard deviation, and for
    epsilon close to s / b. Raises ValueError.
    Assumes: only the sum is released, not its summands.
    """
    n, level, moved, b = _checked(
        num_summands, epsilon=(NONNEGATIVE, epsilon), shift=(NONNEGATIVE, shift), scale=(POSITIVE, scale)
    )
    return Bounds(*_at_sums(_delta_point, n, *_ratio_bounds(moved, b), level))


def laplace_sum_delta(epsilon: Real, shift: Real, scale: Real, num_summands: Real) -> Array:
    """Upper bound on delta(epsilon) of a value hidden by the sum of n Laplace(b) noises.

    The upper bound of `laplace_sum_delta_bounds`; arguments, shape, errors, accuracy and assumption are given there.

    >>> print(f"{jaxdp.convolution.laplace_sum_delta(0.5, shift=1.0, scale=1.0, num_summands=4):.6f}")
    0.010252
    """
    return laplace_sum_delta_bounds(epsilon, shift, scale, num_summands).upper


def laplace_sum_epsilon_bounds(delta: Real, shift: Real, scale: Real, num_summands: Real) -> Bounds[Array]:
    """Certified bounds on epsilon(delta) of a value hidden by the sum of n Laplace(b) noises.

    delta: in [0, 1]; 0 gives s / b, 1 gives 0.
    shift, scale, num_summands: as for `laplace_sum_delta_bounds`.

    >>> lower, upper = jaxdp.convolution.laplace_sum_epsilon_bounds(0.01, shift=1.0, scale=1.0, num_summands=4)
    >>> print(f"{lower:.6f} {upper:.6f}")
    0.502261 0.502261

    Returns Bounds in nats. Shape, errors and assumption are those of `laplace_sum_delta_bounds`; the gap of its bounds
    on delta causes the gap here.
    """
    n, level, moved, b = _checked(
        num_summands, delta=(PROBABILITY, delta), shift=(NONNEGATIVE, shift), scale=(POSITIVE, scale)
    )
    return Bounds(*_at_sums(_epsilon_point, n, *_ratio_bounds(moved, b), level))


def laplace_sum_epsilon(delta: Real, shift: Real, scale: Real, num_summands: Real) -> Array:
    """Upper bound on epsilon(delta) of a value hidden by the sum of n Laplace(b) noises.

    The upper bound of `laplace_sum_epsilon_bounds`; arguments, shape, errors, accuracy and assumption are given there.

    >>> print(f"{jaxdp.convolution.laplace_sum_epsilon(0.01, shift=1.0, scale=1.0, num_summands=4):.6f}")
    0.502261
    """
    return laplace_sum_epsilon_bounds(delta, shift, scale, num_summands).upper
