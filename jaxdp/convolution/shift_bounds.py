"""Renyi divergence of a sum of independent noises against its shift, bounded by that of one summand."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import discrete_laplace_renyi, laplace_renyi_upper
from jaxdp.convolution.laplace_sum import laplace_sum_rdp
from jaxdp.domains import NONNEGATIVE, POSITIVE, SMALLEST, whole
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import ORDER, checked, theorem
from jaxdp.typing import Array, Real

_UP = 1.0 + 2.0**-49
# Charge for sums of logarithms of size up to 700.
_DISCRETE_UP = 1.0 + 1e-12


def repeated_noise_bound(renyi: Callable[[Array, Array], Array], order: Real, shift: Real, num_summands: Real) -> Array:
    """Upper bound n R_alpha(P + s/n, P) on the Renyi divergence of a sum of n noises of law P against its shift by s.

    renyi: (order, shift) -> R_alpha(P + shift, P) of one summand, elementwise, non-decreasing in the shift.
    order: alpha > 1.
    shift: s >= 0, in the units of the noise.
    num_summands: n, whole, >= 1.

    >>> normal = lambda order, shift: order * shift**2 / 2
    >>> print(jaxdp.convolution.repeated_noise_bound(normal, 2.0, 1.0, 4))
    0.25

    Assumes: P is a law on the real line, where every real shift has a meaning; for integer noise use
    `discrete_laplace_bound`. The equal split is the best one when R is convex in the shift.

    Returns an upper bound in nats of the broadcast shape, if renyi returns one; rounded to nearest. Raises ValueError.
    Reference: Feldman, Mironov, Talwar, Thakurta 2018, shift reduction, applied n times.
    """
    alpha, moved, n = checked(order=(ORDER, order), shift=(NONNEGATIVE, shift), num_summands=(whole(1), num_summands))
    return n * renyi(alpha, moved / n)


def _share(shift, scale, count=1):
    """shift / (scale n), never 0 where the shift is positive."""
    shift, _ = raised(shift)
    # without the barrier the compiler divides by scale * count, which may overflow
    share = lax.optimization_barrier(shift / scale) / count
    return jnp.where(shift > 0, jnp.maximum(share, SMALLEST), 0.0)


@theorem(order=ORDER, shift=NONNEGATIVE, scale=POSITIVE)
def laplace_rdp(order: Real, shift: Real, scale: Real) -> Array:
    """Renyi divergence R_alpha(Laplace(b) + s, Laplace(b)), rounded up.

    order: alpha > 1, up to 1e6 and as close to 1 as doubles go.
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

    order: alpha > 1.
    shift, scale: s >= 0 and b > 0, in the same units.
    num_summands: n, whole, >= 1.

    >>> print(f"{jaxdp.convolution.laplace_bound(2.0, shift=1.0, scale=1.0, num_summands=4):.4f}")
    0.2263

    Returns an upper bound in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: `repeated_noise_bound` with Mironov 2017, Corollary 2. Why it is not tight:
    notebooks/proofs/laplace_sum_not_tight.md.
    """
    return num_summands * laplace_renyi_upper(order, _share(shift, scale, num_summands))


@theorem(order=ORDER, shift=NONNEGATIVE, std=POSITIVE, num_summands=whole(1))
def gaussian_bound(order: Real, shift: Real, std: Real, num_summands: Real) -> Array:
    """Renyi divergence alpha s^2 / (2 n sigma^2) of a sum of n normal noises against its shift by s: the exact value.

    order: alpha > 1.
    shift: s >= 0, in the units of std.
    std: sigma > 0, standard deviation of one summand.
    num_summands: n, whole, >= 1.

    >>> print(f"{jaxdp.convolution.gaussian_bound(2.0, shift=1.0, std=1.0, num_summands=4):.4f}")
    0.2500

    Returns the divergence in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    """
    ratio = _share(shift, std, num_summands)
    return jnp.where(ratio > 0, num_summands * jnp.maximum(order * ratio * ratio / 2 * _UP, SMALLEST), 0.0)


def grouped_laplace_bound(order: Real, shift: Real, scale: Real, num_summands: Real, group_size: int) -> Array:
    """Renyi bound k R_alpha(P^{*m} + s/k, P^{*m}) of a sum of n Laplace(b) noises in k = n / m groups of m.

    A group's divergence is `laplace_sum_rdp`. The value lies between `laplace_bound` (m = 1) and the exact one (m = n).

    order, shift, scale: as for `laplace_bound`.
    num_summands: n, whole, a multiple of group_size.
    group_size: m, whole, 1 to 10000.

    >>> print(f"{jaxdp.convolution.grouped_laplace_bound(2.0, 1.0, 1.0, num_summands=4, group_size=2):.4f}")
    0.1453

    Returns a bound in nats of the broadcast shape, float64, with the relative error of `laplace_sum_rdp`: not
    certified. Raises ValueError, also for n not a multiple of m.
    """
    size = int(validate.integer("group_size", group_size, 1))
    count = validate.integer("num_summands", num_summands, 1)
    validate.reject("num_summands", count, count % size != 0, f"a multiple of group_size {size}")
    return repeated_noise_bound(lambda a, s: laplace_sum_rdp(a, s, scale, size), order, shift, count // size)


@theorem(order=ORDER, shift=whole(0), scale=POSITIVE, num_summands=whole(1), working_set=4096)
def discrete_laplace_bound(order: Real, shift: Real, scale: Real, num_summands: Real) -> Array:
    """Upper bound on the Renyi divergence of a sum of n discrete Laplace noises against its shift by an integer s.

    The shift is split over the n summands as evenly as integers allow; the summands are composed and then added, which
    is post-processing. For s <= n the bound is s R(1), for n = 1 it is exact. The inequality
    R(P + s, P) <= s R(P + 1, P) for one summand, which has been claimed, is false: R is convex in the shift.

    order: alpha > 1.
    shift: s, whole, >= 0; the bound is inf above 1024 n.
    scale: of P(x) ~ exp(-|x| / scale), > 0.
    num_summands: n, whole, >= 1.

    >>> print(f"{jaxdp.convolution.discrete_laplace_bound(2.0, shift=1, scale=1.0, num_summands=4):.4f}")
    0.7353

    Returns an upper bound in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    """
    rate, least = 1 / scale, jnp.floor(shift / num_summands)
    more = shift - num_summands * least
    low, high = discrete_laplace_renyi(order, rate, least), discrete_laplace_renyi(order, rate, least + 1)
    total = (num_summands - more) * low + jnp.where(more > 0, more * high, 0.0)
    return jnp.where(shift > 0, jnp.maximum(total * _DISCRETE_UP, SMALLEST), 0.0)
