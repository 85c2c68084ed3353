"""Privacy amplification by mixing: a private mechanism followed by a Markov kernel.

Theorem numbers are those of Balle, Barthe, Gaboardi, Geumlek 2019, "Privacy amplification by mixing and diffusion
mechanisms".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import laplace_log_g_slope, laplace_renyi_upper
from jaxdp.domains import SMALLEST
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import above_one, checked, formula
from jaxdp.typing import Array, Real

__all__ = [
    "Guarantee",
    "IteratedLaplace",
    "coupling_bound",
    "dobrushin_amplification",
    "dobrushin_coefficient",
    "doeblin_amplification",
    "doeblin_coefficient",
    "gaussian_split",
    "hockey_stick_amplification",
    "hockey_stick_coefficient",
    "iterated_gaussian_rdp",
    "iterated_laplace_pure_epsilon",
    "iterated_laplace_rdp",
    "local_privacy",
    "pure_local_epsilon",
    "required_level",
    "ultra_mixing_amplification",
    "ultra_mixing_coefficient",
]

# Largest distance of a row sum from 1 that is put down to the rounding of whatever computed the matrix.
_ROW_SUM_ERROR = 1e-9
_HALVINGS = 80
_UP = 1.0 + 2.0**-48
_DOWN = 1.0 - 2.0**-48


class Guarantee(NamedTuple):
    """An (epsilon, delta) guarantee: the result of an amplification theorem.

    Attributes:
        epsilon: in nats, >= 0.
        delta: in [0, 1].

    Example:
        >>> import jaxdp
        >>> amplified = jaxdp.mixing.Guarantee(epsilon=1.0, delta=1e-6)
        >>> jaxdp.ApproximateDP(*amplified)  # a mechanism that composes with others
        ApproximateDP(epsilon=1.0, delta=1e-06)

    """

    epsilon: Array
    delta: Array


class IteratedLaplace(NamedTuple):
    """Renyi bound of Laplace noise after Laplace noise, and the split of the shift that gives it.

    Attributes:
        rdp: upper bound of the Renyi divergence, in nats.
        first_share: share in [0, 1] of the shift that the first noise hides.

    Example:
        >>> from jaxdp import mixing
        >>> result = mixing.iterated_laplace_rdp(2.0, 1.0, 1.0, 1.0)
        >>> print(f"{result.rdp:.4f} {result.first_share:.2f}")
        0.4006 0.50

    """

    rdp: Array
    first_share: Array


def _arguments(epsilon, delta, gamma):
    """The three arguments, checked; positive ones are at least the smallest normal number: every bound increases."""
    arguments = checked(
        epsilon=(validate.nonnegative, epsilon),
        delta=(validate.probability, delta),
        gamma=(validate.probability, gamma),
    )
    return [a if validate.is_traced(a) else np.where(a > 0, np.maximum(a, SMALLEST), 0.0) for a in arguments]


def _guarantee(epsilon, delta):
    if validate.is_traced(epsilon, delta):
        return Guarantee(*jnp.broadcast_arrays(jnp.asarray(epsilon), delta))
    return Guarantee(*(a[()] for a in np.broadcast_arrays(epsilon, delta)))


def _charged(value, positive):
    """The value rounded up; where the exact value is positive, never 0."""
    return jnp.where(positive, jnp.maximum(value * _UP, SMALLEST), 0.0)


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0), vacuous=1.0)
def _times(epsilon, delta, gamma):
    return jnp.minimum(_charged(gamma * delta, (gamma > 0) & (delta > 0)), 1.0)


@formula(valid=lambda e, g: (g >= 0) & (g <= 1) & (e >= 0))
def _mixed_epsilon(epsilon, gamma):
    # log(1 + g (e^eps - 1)). The exponential overflows past eps = 709; from 500 on e^eps - 1 rounds to e^eps.
    direct = jnp.log1p(gamma * jnp.expm1(jnp.minimum(epsilon, 500.0)))
    log_gamma = jnp.log(jnp.where(gamma > 0, gamma, 1.0))
    grown = epsilon + log_gamma + 2.0**-51 * (epsilon - log_gamma)  # charge for rounding at the size of the two terms
    large = jnp.where(grown < 30.0, jnp.log1p(jnp.exp(jnp.minimum(grown, 30.0))), grown + jnp.exp(-grown))
    return _charged(jnp.where(epsilon < 500.0, direct, large), (epsilon > 0) & (gamma > 0))


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0) & (d <= 1) & (e >= 0), vacuous=1.0)
def _doeblin_delta(epsilon, delta, gamma):
    # 1 - e^{eps'-eps} (1 - delta) with e^{eps'-eps} = 1 - (1-g)(1 - e^{-eps}) keeps the digits of a small delta.
    shrink = (1 - gamma) * -jnp.expm1(-epsilon)
    positive = (gamma > 0) & ((delta > 0) | ((epsilon > 0) & (gamma < 1)))
    return jnp.minimum(_charged(gamma * (shrink + (1 - shrink) * delta), positive), 1.0)


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0) & (d <= 1) & (e >= 0), vacuous=1.0)
def _ultra_delta(epsilon, delta, gamma):
    # e^{eps'-eps} = g + (1-g) e^{-eps} as a sum: 1 - (1-g)(1 - e^{-eps}) loses all digits where both are small.
    kept = gamma + (1 - gamma) * jnp.exp(-epsilon)
    return jnp.minimum(_charged(gamma * delta * kept, (gamma > 0) & (delta > 0)), 1.0)


def dobrushin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a gamma-Dobrushin kernel.

    A kernel K is gamma-Dobrushin when the total variation distance of K(x) and K(x') is at most gamma for all x, x'.

    Args:
        epsilon: of the mechanism in nats, >= 0.
        delta: of the mechanism, in [0, 1].
        gamma: coefficient of the kernel, in [0, 1]; see `dobrushin_coefficient`.

    Returns:
        Guarantee of the broadcast shape, float64, rounded up.

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Theorem 1, case 1.

    Example:
        >>> from jaxdp import mixing
        >>> print("epsilon {:.2f}, delta {:.1e}".format(*mixing.dobrushin_amplification(1.0, 1e-5, 0.5)))
        epsilon 1.00, delta 5.0e-06

    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    return _guarantee(eps, _times(eps, d, g))


def hockey_stick_amplification(epsilon: Real, delta: Real, gamma: Real, level: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a (gamma, level)-Dobrushin kernel.

    The kernel K satisfies H_{e^level}(K(x), K(x')) <= gamma for all x, x', where H is the hockey-stick divergence.
    The theorem holds for levels up to `required_level` = log(1 + (e^eps - 1)/delta).

    Args:
        epsilon: of the mechanism in nats, >= 0.
        delta: of the mechanism, in [0, 1].
        gamma: coefficient of the kernel at this level, in [0, 1]; see `hockey_stick_coefficient`.
        level: >= 0, inf allowed. The coefficient decreases in the level.

    Returns:
        Guarantee of the broadcast shape, float64, rounded up. Under a trace a level above the required one gives
        (epsilon, delta).

    Raises:
        ValueError: an argument outside its range, or a level above the required one.

    Reference:
        Theorem 1, case 2.

    Example:
        >>> from jaxdp import mixing
        >>> print("epsilon {:.2f}, delta {:.1e}".format(*mixing.hockey_stick_amplification(1.0, 1e-5, 0.1, 2.0)))
        epsilon 1.00, delta 1.0e-06

    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    (at,) = checked(level=(_level, level))
    if validate.is_traced(eps, d, at):
        inside = at <= required_level(eps, d)
        return _guarantee(eps, jnp.where(inside, _times(eps, d, g), jnp.minimum(d, 1.0)))
    at, limit = np.broadcast_arrays(at, required_level(eps, d))
    validate.reject("level", at, at > limit, "at most log(1 + (e^eps - 1)/delta)")
    return _guarantee(eps, _times(eps, d, g))


def _level(name, value):
    """A level of the hockey-stick divergence: >= 0, inf allowed (it belongs to delta = 0)."""
    array = validate.real_array(name, value)
    validate.reject(name, array, ~(array >= 0), ">= 0")
    return array


@formula(valid=lambda e, d: (e >= 0) & (d >= 0), vacuous=0.0)
def _required(epsilon, delta):
    grown, share = jnp.expm1(jnp.minimum(epsilon, 500.0)), jnp.where(delta > 0, delta, 1.0)
    ratio = grown / share
    # log(1 + ratio) is log(ratio) where the ratio is huge, and the ratio may overflow
    large = jnp.where(epsilon < 500.0, jnp.log(grown), epsilon) - jnp.log(share)
    # rounded down, so that no level above the exact limit is accepted
    return jnp.where(delta > 0, jnp.where(ratio < 1e100, jnp.log1p(ratio), large) * _DOWN, jnp.inf)


def required_level(epsilon: Real, delta: Real) -> Array:
    """Largest level log(1 + (e^eps - 1)/delta) at which Theorem 1, case 2, holds; inf at delta = 0.

    Args:
        epsilon: of the mechanism in nats, >= 0.
        delta: of the mechanism, in [0, 1].

    Returns:
        Level of the broadcast shape in nats, float64, rounded down.

    Raises:
        ValueError: an argument outside its range.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.required_level(1.0, 1e-5):.3f}")
        12.054

    """
    return _required(*_arguments(epsilon, delta, 1.0)[:2])


def doeblin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-Doeblin kernel.

    A kernel K is gamma-Doeblin when K(x) >= (1 - gamma) omega for all x and one law omega. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma (1 - e^{eps'-eps} (1 - delta)), which is > 0 even at delta = 0.

    Args:
        epsilon: of the mechanism in nats, >= 0.
        delta: of the mechanism, in [0, 1].
        gamma: coefficient of the kernel, in [0, 1]; see `doeblin_coefficient`.

    Returns:
        Guarantee of the broadcast shape, float64, rounded up.

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Theorem 1, case 3.

    Example:
        >>> from jaxdp import mixing
        >>> print("epsilon {:.4f}, delta {:.4f}".format(*mixing.doeblin_amplification(1.0, 1e-5, 0.5)))
        epsilon 0.6201, delta 0.1580

    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    return _guarantee(_mixed_epsilon(eps, g), _doeblin_delta(eps, d, g))


def ultra_mixing_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-ultra-mixing kernel.

    A kernel K is gamma-ultra-mixing when dK(x)/dK(x') >= 1 - gamma everywhere, for all x, x'. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma delta e^{eps'-eps}.

    Args:
        epsilon: of the mechanism in nats, >= 0.
        delta: of the mechanism, in [0, 1].
        gamma: coefficient of the kernel, in [0, 1]; see `ultra_mixing_coefficient`.

    Returns:
        Guarantee of the broadcast shape, float64, rounded up.

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Theorem 1, case 4.

    Example:
        >>> from jaxdp import mixing
        >>> print("epsilon {:.4f}, delta {:.2e}".format(*mixing.ultra_mixing_amplification(1.0, 1e-5, 0.5)))
        epsilon 0.6201, delta 3.42e-06

    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    return _guarantee(_mixed_epsilon(eps, g), _ultra_delta(eps, d, g))


def _kernel_matrix(kernel: Real) -> tuple[np.ndarray, float]:
    """The stochastic matrix with rows rescaled to sum 1, and the relative error of an entry that this causes."""
    matrix = validate.real_array("kernel", kernel)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"kernel must be a matrix with one row per state, got shape {matrix.shape}.")
    validate.reject("kernel", matrix, ~(np.isfinite(matrix) & (matrix >= 0)), "made of probabilities >= 0")
    sums = matrix.sum(axis=1)
    validate.reject("row sum of kernel", sums, np.abs(sums - 1) > _ROW_SUM_ERROR, f"1 within {_ROW_SUM_ERROR}")
    # a row whose sum is 1 up to the rounding of the sum itself is not rescaled
    exact = np.abs(sums - 1) <= matrix.shape[1] * ULP
    return matrix / np.where(exact, 1.0, sums)[:, None], 0.0 if exact.all() else (matrix.shape[1] + 2) * ULP


def hockey_stick_coefficient(kernel: Real, level: Real) -> Array:
    """Coefficient gamma = max over states x, x' of H_{e^level}(K(x), K(x')) of a finite kernel.

    Args:
        kernel: (m, k) stochastic matrix; row K[x] is the law of the output at state x. Rows sum to 1 within 1e-9.
        level: >= 0 in nats, any shape. 0 gives the Dobrushin coefficient, inf the mass of K(x) where K(x') has none.

    Returns:
        gamma in [0, 1] of the shape of level, float64, rounded up. Time O(m^2 k), memory O(m k).

    Raises:
        ValueError: a kernel that is not a stochastic matrix, a negative level.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.hockey_stick_coefficient([[0.9, 0.1], [0.2, 0.8]], 0.5):.4f}")
        0.6351

    """
    (matrix, error), levels = _kernel_matrix(kernel), _level("level", level)
    return np.vectorize(lambda value: _largest_hockey_stick(matrix, error, value), otypes=[np.float64])(levels)[()]


def _largest_hockey_stick(matrix, error, level):
    # e^level is rounded by up to 2 ulp. The subtracted row must not be too large: the difference may be small.
    down = (1.0 if level == 0 else 1 - 2.0**-51) * (1 - 2 * error)
    worst = 0.0
    for row in matrix:
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.where(matrix > 0, np.exp(level) * down * matrix, 0.0)
        worst = max(worst, np.maximum(row - scaled, 0.0).sum(axis=1).max())
    return min(worst * (_UP + error), 1.0)


def dobrushin_coefficient(kernel: Real) -> float:
    """Dobrushin coefficient of a finite kernel: the largest total variation distance between two rows.

    Args:
        kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.

    Returns:
        gamma in [0, 1], rounded up.

    Raises:
        ValueError: a kernel that is not a stochastic matrix.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.dobrushin_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
        0.7000

    """
    return float(hockey_stick_coefficient(kernel, 0.0))


def doeblin_coefficient(kernel: Real) -> float:
    """Doeblin coefficient of a finite kernel: 1 minus the sum over outputs of the smallest entry of the column.

    It is the smallest gamma with K(x) >= (1 - gamma) omega for all states x and some law omega.

    Args:
        kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.

    Returns:
        gamma in [0, 1], rounded up.

    Raises:
        ValueError: a kernel that is not a stochastic matrix.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.doeblin_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
        0.7000

    """
    matrix, _ = _kernel_matrix(kernel)
    return float(np.clip(1.0 - matrix.min(axis=0).sum() + 1e-15 * matrix.shape[1], 0.0, 1.0))


def ultra_mixing_coefficient(kernel: Real) -> float:
    """Ultra-mixing coefficient of a finite kernel: 1 minus the smallest ratio K(x)[y] / K(x')[y].

    Args:
        kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.

    Returns:
        gamma in [0, 1], rounded up; 1 where an output is possible in one state and not in another.

    Raises:
        ValueError: a kernel that is not a stochastic matrix.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.ultra_mixing_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
        0.8750

    """
    matrix, error = _kernel_matrix(kernel)
    used = matrix.max(axis=0) > 0
    smallest, largest = matrix[:, used].min(axis=0), matrix[:, used].max(axis=0)
    return float(np.clip(np.max((largest - smallest) / largest) * _UP + 2 * error, 0.0, 1.0))


def local_privacy(kernel: Real, level: Real = 0.0) -> Guarantee:
    """Local guarantee (level, gamma) of a finite kernel read as a local randomizer.

    gamma is `hockey_stick_coefficient` at the level: the delta of the kernel at epsilon = level.

    Args:
        kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.
        level: >= 0 in nats, any shape.

    Returns:
        Guarantee of the shape of level, rounded up. `pure_local_epsilon` gives the guarantee with delta = 0.

    Raises:
        ValueError: a kernel that is not a stochastic matrix, a negative level.

    Example:
        >>> from jaxdp import mixing
        >>> print("epsilon {:.1f}, delta {:.4f}".format(*mixing.local_privacy([[0.9, 0.1], [0.2, 0.8]], 1.0)))
        epsilon 1.0, delta 0.5282

    """
    levels = _level("level", level)
    return Guarantee(levels[()], hockey_stick_coefficient(kernel, levels))


def pure_local_epsilon(gamma: Real) -> Array:
    """Local epsilon log(1/(1 - gamma)) of a gamma-ultra-mixing kernel read as a local randomizer.

    Args:
        gamma: `ultra_mixing_coefficient`, in [0, 1], any shape.

    Returns:
        Epsilon in nats of the shape of gamma, float64, rounded up; inf at gamma = 1.

    Raises:
        ValueError: gamma outside [0, 1].

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.pure_local_epsilon(0.875):.4f}")
        2.0794

    """
    value = validate.probability("gamma", gamma)
    with np.errstate(divide="ignore"):
        return (-np.log1p(-value) * _UP)[()]


def coupling_bound(
    renyi_first: Callable[[Array, Array], Array],
    renyi_kernel: Callable[[Array, Array], Array],
    order: Real,
    shift: Real,
    hidden: Real,
) -> Array:
    """Renyi bound R_alpha(P1 + w, P1) + R_alpha(P2 + (shift - w), P2) of noise P2 added after noise P1.

    The translation coupling by w: the first noise P1 hides a part w of the shift, the kernel's noise P2 the rest.

    Args:
        renyi_first: (order, shift) -> R_alpha(P1 + shift, P1), elementwise.
        renyi_kernel: (order, shift) -> R_alpha(P2 + shift, P2), elementwise.
        order: alpha > 1.
        shift: >= 0, in the units of the noises.
        hidden: w in [0, shift].

    Returns:
        Upper bound in nats of the broadcast shape, if both callables return upper bounds. The sum is not rounded up.

    Raises:
        ValueError: an argument outside its range, hidden above the shift.

    Assumes:
        Both noises are additive and independent of each other and of the data.

    Reference:
        Theorem 2.

    Example:
        >>> from jaxdp import convolution, mixing
        >>> laplace = lambda order, shift: convolution.laplace_rdp(order, shift, 1.0)
        >>> print(f"{mixing.coupling_bound(laplace, laplace, order=2.0, shift=1.0, hidden=0.5):.4f}")
        0.4006

    """
    alpha, total, part = checked(
        order=(above_one, order), shift=(validate.nonnegative, shift), hidden=(validate.nonnegative, hidden)
    )
    if not validate.is_traced(total, part):
        part, whole = np.broadcast_arrays(part, total)
        validate.reject("hidden", part, part > whole, "at most the shift")
    return renyi_first(alpha, part) + renyi_kernel(alpha, total - part)


@formula(valid=lambda a, d, s1, s2, lip: (a >= 1) & (d >= 0) & (s1 > 0) & (s2 >= 0) & (lip > 0))
def _iterated_gaussian(order, shift, first, second, lipschitz):
    ratio = shift / jnp.hypot(first, second / lipschitz)
    return _charged(order * ratio * ratio / 2, shift > 0)


def iterated_gaussian_rdp(
    order: Real, shift: Real, first_std: Real, second_std: Real, *, lipschitz: Real = 1.0
) -> Array:
    """Renyi bound alpha Delta^2 / (2 (s1^2 + s2^2 / L^2)) of Gaussian noise, an L-Lipschitz map, Gaussian noise again.

    Args:
        order: alpha > 1.
        shift: Delta >= 0, L2 distance of the two values before the first noise.
        first_std: s1 > 0 per coordinate.
        second_std: s2 >= 0 per coordinate.
        lipschitz: L > 0 of the map between the two noises; 1 without a map.

    Returns:
        Upper bound in nats of the broadcast shape, float64, rounded up; exact for a linear map that stretches by L.

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Examples 1 and 3. `gaussian_split` gives the coupling that attains it.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.iterated_gaussian_rdp(2.0, 1.0, first_std=1.0, second_std=1.0):.4f}")
        0.5000

    """
    return _iterated_gaussian(
        *checked(
            order=(above_one, order),
            shift=(validate.nonnegative, shift),
            first_std=(validate.positive, first_std),
            second_std=(validate.nonnegative, second_std),
            lipschitz=(validate.positive, lipschitz),
        )
    )


def gaussian_split(first_std: Real, second_std: Real, *, lipschitz: Real = 1.0) -> Array:
    """Optimal share s1^2 / (s1^2 + s2^2 / L^2) of the shift that the first of two Gaussian noises hides.

    Args:
        first_std: s1 > 0.
        second_std: s2 >= 0.
        lipschitz: L > 0 of the map between the two noises.

    Returns:
        Share in (0, 1] of the broadcast shape, float64; relative error of a few ulp.

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Example 1.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.gaussian_split(1.0, 2.0):.2f}")
        0.20

    """
    first = validate.positive("first_std", first_std)
    second = validate.nonnegative("second_std", second_std) / validate.positive("lipschitz", lipschitz)
    return (first / np.hypot(first, second))[()] ** 2


@formula(valid=lambda a, d, b1, b2: (a > 1) & (d >= 0) & (b1 > 0) & (b2 > 0))
def _iterated_laplace(order, shift, first, second):
    def steeper(part):
        left = laplace_log_g_slope(order, part / first) / first
        return left >= laplace_log_g_slope(order, (shift - part) / second) / second

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        over = steeper(middle)
        return jnp.where(over, low, middle), jnp.where(over, middle, high)

    low, high = lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(shift), shift))
    part = 0.5 * (low + high)
    value = laplace_renyi_upper(order, part / first) + laplace_renyi_upper(order, (shift - part) / second)
    limit = first**2 / (first**2 + second**2)
    share = jnp.where(shift > 0, part / jnp.where(shift > 0, shift, 1.0), limit)
    return _charged(value, shift > 0), share


def iterated_laplace_rdp(order: Real, shift: Real, first_scale: Real, second_scale: Real) -> IteratedLaplace:
    """Smallest Renyi bound of Laplace noise after Laplace noise, over all splits of the shift.

    min over t in [0, Delta] of [log g_alpha(t/l1) + log g_alpha((Delta-t)/l2)] / (alpha-1), where
    log g_alpha / (alpha-1) is the Renyi divergence of Laplace noise of scale 1. log g is strictly convex and its slope
    at 0 is 0, so the minimiser is unique; it is found by bisection on the slope. Every t gives a valid bound: an
    inexact split only loosens it.

    Args:
        order: alpha > 1.
        shift: Delta >= 0, in the units of the scales.
        first_scale: l1 > 0.
        second_scale: l2 > 0.

    Returns:
        IteratedLaplace(rdp, first_share) of the broadcast shape, float64. rdp is in nats, rounded up; it increases with
        the order towards Delta/max(l1, l2).

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Example 2.

    Example:
        >>> from jaxdp import mixing
        >>> print(f"{mixing.iterated_laplace_rdp(2.0, 1.0, 1.0, 2.0).rdp:.4f}")
        0.1711

    """
    return IteratedLaplace(
        *_iterated_laplace(
            *checked(
                order=(above_one, order),
                shift=(validate.nonnegative, shift),
                first_scale=(validate.positive, first_scale),
                second_scale=(validate.positive, second_scale),
            )
        )
    )


def iterated_laplace_pure_epsilon(shift: Real, first_scale: Real, second_scale: Real) -> Array:
    """Smallest epsilon Delta / max(l1, l2) with (epsilon, 0)-DP of Laplace noise after Laplace noise.

    For pure differential privacy the weaker noise gains nothing.

    Args:
        shift: Delta >= 0.
        first_scale: l1 > 0.
        second_scale: l2 > 0.

    Returns:
        Epsilon in nats of the broadcast shape, float64, rounded to nearest.

    Raises:
        ValueError: an argument outside its range.

    Reference:
        Lemma 3.

    Example:
        >>> from jaxdp import mixing
        >>> print(mixing.iterated_laplace_pure_epsilon(1.0, 1.0, 2.0))
        0.5

    """
    moved = validate.nonnegative("shift", shift)
    scales = validate.positive("first_scale", first_scale), validate.positive("second_scale", second_scale)
    return (moved / np.maximum(*scales))[()]
