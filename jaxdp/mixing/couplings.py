"""Noise after noise: Renyi bounds from couplings.

Theorem numbers: see `jaxdp.mixing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import laplace_log_g_slope, laplace_renyi_upper
from jaxdp.domains import NONNEGATIVE, POSITIVE, SMALLEST
from jaxdp.mixing.amplification import rounded_up
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import ORDER, checked, theorem
from jaxdp.typing import Array, Real

_HALVINGS = 80
Divergence: TypeAlias = Callable[[Array, Array], Array]


class IteratedLaplace(NamedTuple):
    """Renyi bound of Laplace noise after Laplace noise, and the split of the shift that gives it.

    rdp: upper bound of the Renyi divergence, in nats.
    first_share: share in [0, 1] of the shift that the first noise hides.

    >>> result = jaxdp.mixing.iterated_laplace_rdp(2.0, 1.0, 1.0, 1.0)
    >>> print(f"{result.rdp:.4f} {result.first_share:.2f}")
    0.4006 0.50
    """

    rdp: Array
    first_share: Array


def coupling_bound(renyi_first: Divergence, renyi_kernel: Divergence, order: Real, shift: Real, hidden: Real) -> Array:
    """Renyi bound R_alpha(P1 + w, P1) + R_alpha(P2 + (shift - w), P2) of noise P2 added after noise P1.

    The translation coupling by w: the first noise P1 hides a part w of the shift, the kernel's noise P2 the rest.

    renyi_first, renyi_kernel: (order, shift) -> R_alpha(P + shift, P) for P = P1 and for P = P2, elementwise.
    order, shift, hidden: alpha > 1, shift >= 0 in the units of the noises, and w in [0, shift].

    >>> laplace = lambda order, shift: jaxdp.convolution.laplace_rdp(order, shift, 1.0)
    >>> print(f"{jaxdp.mixing.coupling_bound(laplace, laplace, order=2.0, shift=1.0, hidden=0.5):.4f}")
    0.4006

    Returns an upper bound in nats of the broadcast shape, if both callables return upper bounds. The sum is not rounded
    up. Raises ValueError, also for hidden above the shift.
    Assumes: both noises are additive and independent of each other and of the data.
    Reference: Theorem 2.
    """
    alpha, total, part = checked(order=(ORDER, order), shift=(NONNEGATIVE, shift), hidden=(NONNEGATIVE, hidden))
    if not validate.is_traced(total, part):
        part, whole = np.broadcast_arrays(part, total)
        validate.reject("hidden", part, part > whole, "at most the shift")
    return renyi_first(alpha, part) + renyi_kernel(alpha, total - part)


@theorem(order=ORDER, shift=NONNEGATIVE, first_std=POSITIVE, second_std=NONNEGATIVE, lipschitz=POSITIVE)
def iterated_gaussian_rdp(
    order: Real, shift: Real, first_std: Real, second_std: Real, *, lipschitz: Real = 1.0
) -> Array:
    """Renyi bound alpha Delta^2 / (2 (s1^2 + s2^2 / L^2)) of Gaussian noise, an L-Lipschitz map, Gaussian noise again.

    order: alpha > 1.
    shift: Delta >= 0, L2 distance of the two values before the first noise.
    first_std, second_std: s1 > 0 and s2 >= 0 per coordinate.
    lipschitz: L > 0 of the map between the two noises; 1 without a map.

    >>> print(f"{jaxdp.mixing.iterated_gaussian_rdp(2.0, 1.0, first_std=1.0, second_std=1.0):.4f}")
    0.5000

    Returns an upper bound in nats of the broadcast shape, float64, rounded up; exact for a linear map of norm L. Raises
    ValueError.
    Reference: Examples 1 and 3. `gaussian_split` gives the coupling that attains it.
    """
    shift, lipschitz = raised(shift)[0], raised(lipschitz)[0]
    # an infinite deviation, or a ratio that underflows, would claim a divergence of 0
    ratio = shift / jnp.minimum(jnp.hypot(first_std, second_std / lipschitz), np.finfo(float).max)
    return rounded_up(order * ratio * ratio / 2, shift > 0)


def gaussian_split(first_std: Real, second_std: Real, *, lipschitz: Real = 1.0) -> Array:
    """Optimal share s1^2 / (s1^2 + s2^2 / L^2) of the shift that the first of two Gaussian noises hides.

    first_std, second_std: s1 > 0 and s2 >= 0.
    lipschitz: L > 0 of the map between the two noises.

    >>> print(f"{jaxdp.mixing.gaussian_split(1.0, 2.0):.2f}")
    0.20

    Returns the share in (0, 1] of the broadcast shape, float64; relative error of a few ulp. Raises ValueError.
    Reference: Example 1.
    """
    first = validate.positive("first_std", first_std)
    second = validate.nonnegative("second_std", second_std) / validate.positive("lipschitz", lipschitz)
    return (first / np.hypot(first, second))[()] ** 2


@theorem(order=ORDER, shift=NONNEGATIVE, first_scale=POSITIVE, second_scale=POSITIVE)
def iterated_laplace_rdp(order: Real, shift: Real, first_scale: Real, second_scale: Real) -> IteratedLaplace:
    """Smallest Renyi bound of Laplace noise after Laplace noise, over all splits of the shift.

    min over t in [0, Delta] of [log g_alpha(t/l1) + log g_alpha((Delta-t)/l2)] / (alpha-1), where
    log g_alpha / (alpha-1) is the Renyi divergence of Laplace noise of scale 1. log g is strictly convex and its slope
    at 0 is 0, so the minimiser is unique; it is found by bisection on the slope. Every t gives a valid bound: an
    inexact split only loosens it.

    order: alpha > 1.
    shift: Delta >= 0, in the units of the scales.
    first_scale, second_scale: l1 > 0 and l2 > 0.

    >>> print(f"{jaxdp.mixing.iterated_laplace_rdp(2.0, 1.0, 1.0, 2.0).rdp:.4f}")
    0.1711

    Returns IteratedLaplace(rdp, first_share) of the broadcast shape, float64. rdp is in nats, rounded up; it increases
    with the order towards Delta/max(l1, l2). Raises ValueError.
    Reference: Example 2.
    """
    shift, _ = raised(shift)

    def steeper(part):
        left = laplace_log_g_slope(order, part / first_scale) / first_scale
        return left >= laplace_log_g_slope(order, (shift - part) / second_scale) / second_scale

    part = 0.5 * sum(bisect(steeper, jnp.zeros_like(shift), shift, _HALVINGS))
    value = laplace_renyi_upper(order, part / first_scale) + laplace_renyi_upper(order, (shift - part) / second_scale)
    limit = first_scale**2 / (first_scale**2 + second_scale**2)
    share = jnp.where(shift > SMALLEST, part / jnp.maximum(shift, SMALLEST), limit)
    return IteratedLaplace(rounded_up(value, shift > 0), share)


def iterated_laplace_pure_epsilon(shift: Real, first_scale: Real, second_scale: Real) -> Array:
    """Smallest epsilon Delta / max(l1, l2) with (epsilon, 0)-DP of Laplace noise after Laplace noise.

    For pure differential privacy the weaker noise gains nothing.

    shift, first_scale, second_scale: as for `iterated_laplace_rdp`.

    >>> print(f"{jaxdp.mixing.iterated_laplace_pure_epsilon(1.0, 1.0, 2.0):.4f}")
    0.5000

    Returns epsilon in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Lemma 3.
    """
    moved = validate.nonnegative("shift", shift)
    scales = validate.positive("first_scale", first_scale), validate.positive("second_scale", second_scale)
    return np.where(moved > 0, np.nextafter(moved / np.maximum(*scales), np.inf), 0.0)[()]
