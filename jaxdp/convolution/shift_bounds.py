"""Bounds on the Renyi divergence of a noise sum against its shift, from the divergence of one summand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import discrete_laplace_renyi, laplace_renyi_upper
from jaxdp.convolution.laplace_sum import laplace_sum_rdp
from jaxdp.runtime.formulas import above_one, checked, formula

_UP = 1.0 + 2.0**-49
_DISCRETE_UP = 1.0 + 1e-12  # sums of logarithms of size up to 700
_TINY = 2.3e-308  # what underflows is not 0


def _count(name, value):
    return validate.integer(name, value, 1)


def repeated_noise_bound(renyi: Callable, order: Any, shift: Any, num_summands: Any) -> Any:
    """Upper bound n R_alpha(P + s/n, P) on the Renyi divergence of a sum of n noises against its shift by s.

    Args:
        renyi: (order, shift) -> R_alpha(P + shift, P) of one summand, non-decreasing in the shift, broadcasting.
        order: alpha > 1.
        shift: s >= 0.
        num_summands: n >= 1.

    Assumes:
        P is a law on the real line (every real shift has a meaning); for integer noise use
        `discrete_laplace_bound`. The equal split is the best one when R is convex in the shift.

    Reference:
        Shift reduction of Feldman et al. 2018 applied n times (repeated noise addition, Theorem 1).

    """
    alpha, moved, count = _checked(order, shift, num_summands)
    return count * renyi(alpha, moved / count)


def _share(shift, scale, count=1):
    """shift / (scale n), positive where the shift is."""
    xp: Any = jnp if validate.is_traced(shift, scale, count) else np
    return xp.where(shift > 0, xp.maximum(shift / scale / count, _TINY), 0.0)


@formula(valid=lambda order, ratio, n: (order > 1) & (ratio >= 0) & (n >= 1))
def _laplace(order, ratio, n):
    return n * laplace_renyi_upper(order, ratio)


@formula(valid=lambda order, ratio, n: (order > 1) & (ratio >= 0) & (n >= 1))
def _gaussian(order, ratio, n):
    return jnp.where(ratio > 0, n * jnp.maximum(order * ratio * ratio / 2 * _UP, _TINY), 0.0)


def _checked(order, shift, count):
    return checked(order=(above_one, order), shift=(validate.nonnegative, shift), num_summands=(_count, count))


def laplace_rdp(order: Any, shift: Any, scale: Any) -> Any:
    """R_alpha(Laplace(scale) + shift, Laplace(scale)), rounded up: at most 2e-14 above the exact value, relatively.

    Args:
        order: alpha > 1, up to 1e6 and as close to 1 as doubles go.
        shift: >= 0.
        scale: b > 0.

    Reference:
        Mironov 2017, Corollary 2.

    """
    alpha, moved, b = checked(
        order=(above_one, order), shift=(validate.nonnegative, shift), scale=(validate.positive, scale)
    )
    return _laplace(alpha, _share(moved, b), 1)


def laplace_bound(order: Any, shift: Any, scale: Any, num_summands: Any) -> Any:
    """Upper bound n R_alpha(Laplace(b) + s/n, Laplace(b)) for a sum of n Laplace(b) noises.

    Tends to alpha s^2 / (2 n b^2): twice the exact value `laplace_sum_rdp` for large n, so it is not tight.
    Arguments as `repeated_noise_bound`; scale b > 0.
    """
    (b,) = checked(scale=(validate.positive, scale))
    alpha, moved, count = _checked(order, shift, num_summands)
    return _laplace(alpha, _share(moved, b, count), count)


def gaussian_bound(order: Any, shift: Any, std: Any, num_summands: Any) -> Any:
    """R_alpha = alpha s^2 / (2 n sigma^2) of a sum of n normal noises of standard deviation `std`: tight.

    Arguments as `repeated_noise_bound`; std > 0.
    """
    (sigma,) = checked(std=(validate.positive, std))
    alpha, moved, count = _checked(order, shift, num_summands)
    return _gaussian(alpha, _share(moved, sigma, count), count)


def grouped_laplace_bound(order: Any, shift: Any, scale: Any, num_summands: Any, group_size: int) -> Any:
    """Upper bound k R_alpha(P^{*m} + s/k, P^{*m}) with k = n / m groups and the exact m-fold Laplace term.

    Between `laplace_bound` (m = 1) and the exact value (m = n); pairs alone remove about 80% of the excess.

    Args:
        order: alpha > 1.
        shift: s >= 0.
        scale: b > 0.
        num_summands: n, a multiple of group_size.
        group_size: m >= 1.

    Raises:
        ValueError: n is not a multiple of m.

    Accuracy:
        That of `laplace_sum_rdp`.

    """
    size = int(validate.integer("group_size", group_size, 1))
    count = _count("num_summands", num_summands)
    validate.reject("num_summands", count, count % size != 0, f"a multiple of group_size {size}")
    return repeated_noise_bound(lambda a, s: laplace_sum_rdp(a, s, scale, size), order, shift, count // size)


@formula(valid=lambda order, rate, shift, n: (order > 1) & (n >= 1), working_set=4096)
def _discrete(order, rate, shift, n):
    least = jnp.floor(shift / n)
    more = shift - n * least
    low = discrete_laplace_renyi(order, rate, least)
    high = discrete_laplace_renyi(order, rate, least + 1)
    total = (n - more) * low + jnp.where(more > 0, more * high, 0.0)
    return jnp.where(shift > 0, jnp.maximum(total * _DISCRETE_UP, _TINY), 0.0)


def discrete_laplace_bound(order: Any, shift: Any, scale: Any, num_summands: Any) -> Any:
    """Upper bound on R_alpha for a sum of n discrete Laplace noises against its shift by an integer s.

    The integer shift is split as evenly as integers allow over the n summands, which are composed and added
    up (post-processing): s R(1) for s <= n. Exact for n = 1. The inequality R(P + s, P) <= s R(P + 1, P) for one
    summand, which has been claimed, is false: the divergence is convex in the shift.

    Args:
        order: alpha > 1.
        shift: integer s >= 0, at most 1024 n (infinite beyond).
        scale: P(x) ~ exp(-|x| / scale), > 0.
        num_summands: n >= 1.

    Raises:
        ValueError: a shift that is not a whole number.

    """
    alpha, moved, b, count = checked(
        order=(above_one, order),
        shift=(lambda n, v: validate.integer(n, v, 0), shift),
        scale=(validate.positive, scale),
        num_summands=(_count, num_summands),
    )
    return _discrete(alpha, 1.0 / b if not isinstance(b, np.ndarray) else np.reciprocal(b), moved, count)
