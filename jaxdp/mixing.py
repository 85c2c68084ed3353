"""Privacy amplification by mixing: a private mechanism followed by a Markov kernel.

Theorem numbers are those of Balle, Barthe, Gaboardi, Geumlek 2019 (Privacy amplification by mixing and
diffusion mechanisms).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import laplace_log_g_slope, laplace_renyi_upper
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import above_one, checked, formula

# Entries of a stochastic matrix come from other computations: rows may miss 1 by this much and no more.
_ROW_SUM_ERROR = 1e-9
_HALVINGS = 80
_UP = 1.0 + 2.0**-48
_DOWN = 1.0 - 2.0**-48
_NORMAL = 2.3e-308  # the compiler flushes what is smaller to 0


class ApproximateDP(NamedTuple):
    """An (epsilon, delta) guarantee."""

    epsilon: Any
    delta: Any


class IteratedLaplace(NamedTuple):
    """Renyi divergence of Laplace after Laplace, and the share of the shift that the first noise hides."""

    rdp: Any
    first_share: Any


def _guarantee(epsilon, delta, gamma):
    arguments = checked(
        epsilon=(validate.nonnegative, epsilon),
        delta=(validate.probability, delta),
        gamma=(validate.probability, gamma),
    )
    # every bound grows with each of the three
    return [a if validate.is_traced(a) else np.where(a > 0, np.maximum(a, _NORMAL), 0.0) for a in arguments]


def _charged(value, positive):
    """The value rounded up; a positive one that has underflowed is not 0."""
    return jnp.where(positive, jnp.maximum(value * _UP, _NORMAL), 0.0)


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0), vacuous=1.0)
def _times(epsilon, delta, gamma):
    return jnp.minimum(_charged(gamma * delta, (gamma > 0) & (delta > 0)), 1.0)


@formula(valid=lambda e, g: (g >= 0) & (g <= 1) & (e >= 0))
def _mixed_epsilon(epsilon, gamma):
    # log(1 + g (e^eps - 1)); past eps = 700 the exponential overflows, and e^eps - 1 is e^eps long before
    direct = jnp.log1p(gamma * jnp.expm1(jnp.minimum(epsilon, 500.0)))
    log_gamma = jnp.log(jnp.where(gamma > 0, gamma, 1.0))
    grown = epsilon + log_gamma + 2.0**-51 * (epsilon - log_gamma)  # the sum is rounded at the size of its parts
    large = jnp.where(grown < 30.0, jnp.log1p(jnp.exp(jnp.minimum(grown, 30.0))), grown + jnp.exp(-grown))
    return _charged(jnp.where(epsilon < 500.0, direct, large), (epsilon > 0) & (gamma > 0))


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0) & (d <= 1) & (e >= 0), vacuous=1.0)
def _doeblin_delta(epsilon, delta, gamma):
    # 1 - e^{eps'-eps} (1 - delta) with e^{eps'-eps} = 1 - (1-g)(1 - e^{-eps}): no cancellation for small delta.
    shrink = (1 - gamma) * -jnp.expm1(-epsilon)
    positive = (gamma > 0) & ((delta > 0) | ((epsilon > 0) & (gamma < 1)))
    return jnp.minimum(_charged(gamma * (shrink + (1 - shrink) * delta), positive), 1.0)


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0) & (d <= 1) & (e >= 0), vacuous=1.0)
def _ultra_delta(epsilon, delta, gamma):
    # e^{eps'-eps} as a sum: 1 - (1 - g)(1 - e^{-eps}) loses every digit where both are small
    kept = gamma + (1 - gamma) * jnp.exp(-epsilon)
    return jnp.minimum(_charged(gamma * delta * kept, (gamma > 0) & (delta > 0)), 1.0)


def dobrushin_amplification(epsilon: Any, delta: Any, gamma: Any) -> ApproximateDP:
    """(eps, gamma delta) of a mechanism followed by a gamma-Dobrushin kernel: TV(K(x), K(x')) <= gamma.

    Args:
        epsilon: of the mechanism, >= 0; delta: in [0, 1]; gamma: in [0, 1]. All broadcast.

    Reference:
        Theorem 1, case 1.

    """
    eps, d, g = _guarantee(epsilon, delta, gamma)
    return ApproximateDP(*_same_epsilon(eps, _times(eps, d, g)))


def hockey_stick_amplification(epsilon: Any, delta: Any, gamma: Any, level: Any) -> ApproximateDP:
    """(eps, gamma delta) of a mechanism followed by a (gamma, level)-Dobrushin kernel.

    The kernel satisfies H_{e^level}(K(x), K(x')) <= gamma; the theorem asks for level at most
    `required_level` = log(1 + (e^eps - 1)/delta), since the coefficient decreases in the level.

    Args:
        epsilon: of the mechanism, >= 0; delta: in [0, 1]; gamma: in [0, 1].
        level: at which gamma was computed, >= 0.

    Raises:
        ValueError: level above `required_level`.

    Reference:
        Theorem 1, case 2.

    """
    eps, d, g = _guarantee(epsilon, delta, gamma)
    (at,) = checked(level=(_level, level))
    if validate.is_traced(eps, d, at):
        inside = at <= required_level(eps, d)
        return ApproximateDP(*_same_epsilon(eps, jnp.where(inside, _times(eps, d, g), jnp.minimum(d, 1.0))))
    at, limit = np.broadcast_arrays(at, required_level(eps, d))
    validate.reject("level", at, at > limit, "at most log(1 + (e^eps - 1)/delta)")
    return ApproximateDP(*_same_epsilon(eps, _times(eps, d, g)))


def _level(name, value):
    """A hockey-stick level: >= 0, infinite allowed (the mechanism is pure)."""
    array = validate.real_array(name, value)
    validate.reject(name, array, ~(array >= 0), ">= 0")
    return array


def _same_epsilon(epsilon, delta):
    if validate.is_traced(epsilon, delta):
        return jnp.broadcast_arrays(jnp.asarray(epsilon), delta)
    return tuple(a[()] for a in np.broadcast_arrays(epsilon, delta))


@formula(valid=lambda e, d: (e >= 0) & (d >= 0), vacuous=0.0)
def _required(epsilon, delta):
    grown, share = jnp.expm1(jnp.minimum(epsilon, 500.0)), jnp.where(delta > 0, delta, 1.0)
    ratio = grown / share
    # where the quotient is huge the 1 is lost, and it may overflow
    large = jnp.where(epsilon < 500.0, jnp.log(grown), epsilon) - jnp.log(share)
    # rounded down: no level above the exact one may pass
    return jnp.where(delta > 0, jnp.where(ratio < 1e100, jnp.log1p(ratio), large) * _DOWN, jnp.inf)


def required_level(epsilon: Any, delta: Any) -> Any:
    """Level log(1 + (e^eps - 1)/delta) of Theorem 1, case 2; infinite at delta = 0.

    Args:
        epsilon: >= 0; delta: in [0, 1].

    """
    return _required(*_guarantee(epsilon, delta, 1.0)[:2])


def doeblin_amplification(epsilon: Any, delta: Any, gamma: Any) -> ApproximateDP:
    """(eps', delta') after a gamma-Doeblin kernel: K(x) >= (1 - gamma) omega for one law omega.

    eps' = log(1 + gamma (e^eps - 1)), delta' = gamma (1 - e^{eps'-eps} (1 - delta)). delta' > 0 even at delta = 0.

    Args:
        epsilon: of the mechanism, >= 0; delta: in [0, 1]; gamma: in [0, 1]. All broadcast.

    Reference:
        Theorem 1, case 3.

    """
    eps, d, g = _guarantee(epsilon, delta, gamma)
    return _pair(_mixed_epsilon(eps, g), _doeblin_delta(eps, d, g))


def ultra_mixing_amplification(epsilon: Any, delta: Any, gamma: Any) -> ApproximateDP:
    """(eps', delta') after a gamma-ultra-mixing kernel: dK(x)/dK(x') >= 1 - gamma everywhere.

    eps' = log(1 + gamma (e^eps - 1)), delta' = gamma delta e^{eps'-eps}.

    Args:
        epsilon: of the mechanism, >= 0; delta: in [0, 1]; gamma: in [0, 1]. All broadcast.

    Reference:
        Theorem 1, case 4.

    """
    eps, d, g = _guarantee(epsilon, delta, gamma)
    return _pair(_mixed_epsilon(eps, g), _ultra_delta(eps, d, g))


def _pair(epsilon, delta):
    return ApproximateDP(*_same_epsilon(epsilon, delta))


def _kernel_matrix(kernel: Any) -> tuple[np.ndarray, float]:
    """The stochastic matrix, and the relative error of its entries from the rounding of rescaled rows."""
    matrix = validate.real_array("kernel", kernel)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"kernel must be a matrix with one row per state, got shape {matrix.shape}.")
    validate.reject("kernel", matrix, ~(np.isfinite(matrix) & (matrix >= 0)), "made of probabilities >= 0")
    sums = matrix.sum(axis=1)
    validate.reject("row sum of kernel", sums, np.abs(sums - 1) > _ROW_SUM_ERROR, f"1 within {_ROW_SUM_ERROR}")
    # a row that misses 1 by no more than the rounding of its sum is taken as it is
    exact = np.abs(sums - 1) <= matrix.shape[1] * ULP
    return matrix / np.where(exact, 1.0, sums)[:, None], 0.0 if exact.all() else (matrix.shape[1] + 2) * ULP


def hockey_stick_coefficient(kernel: Any, level: Any) -> np.ndarray:
    """Gamma = max over rows of H_{e^level}(K(x), K(x')), the (gamma, level)-Dobrushin coefficient.

    Args:
        kernel: (m, k) stochastic matrix, K[x] the law of the output at state x.
        level: >= 0, any shape; 0 gives the Dobrushin coefficient; infinite: mass where another row has none.

    Returns:
        gamma in [0, 1] of the shape of level. Time and memory O(m k) per row.

    """
    (matrix, error), levels = _kernel_matrix(kernel), _level("level", level)
    return np.vectorize(lambda value: _largest_hockey_stick(matrix, error, value), otypes=[np.float64])(levels)[()]


def _largest_hockey_stick(matrix, error, level):
    # e^level is within 2 units; what the subtracted row is too large by would be lost from a small difference
    down = (1.0 if level == 0 else 1 - 2.0**-51) * (1 - 2 * error)
    worst = 0.0
    for row in matrix:
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.where(matrix > 0, np.exp(level) * down * matrix, 0.0)
        worst = max(worst, np.maximum(row - scaled, 0.0).sum(axis=1).max())
    return min(worst * (_UP + error), 1.0)


def dobrushin_coefficient(kernel: Any) -> float:
    """Largest total variation distance between two rows of a stochastic matrix."""
    return float(hockey_stick_coefficient(kernel, 0.0))


def doeblin_coefficient(kernel: Any) -> float:
    """Gamma = 1 - sum over outputs of the smallest entry of the column, the best constant for any omega."""
    matrix, _ = _kernel_matrix(kernel)
    return float(np.clip(1.0 - matrix.min(axis=0).sum() + 1e-15 * matrix.shape[1], 0.0, 1.0))


def ultra_mixing_coefficient(kernel: Any) -> float:
    """Gamma = 1 - min over states and outputs of K(x)[y] / K(x')[y]; 1 when supports differ."""
    matrix, error = _kernel_matrix(kernel)
    used = matrix.max(axis=0) > 0
    smallest, largest = matrix[:, used].min(axis=0), matrix[:, used].max(axis=0)
    return float(np.clip(np.max((largest - smallest) / largest) * _UP + 2 * error, 0.0, 1.0))


def local_privacy(kernel: Any, level: Any = 0.0) -> ApproximateDP:
    """The kernel read as a local randomizer: (level, gamma) with gamma = `hockey_stick_coefficient`.

    level = 0 is the Dobrushin reading (0, TV); `pure_local_epsilon` is the ultra-mixing one.
    """
    levels = _level("level", level)
    return ApproximateDP(levels[()], hockey_stick_coefficient(kernel, levels))


def pure_local_epsilon(gamma: Any) -> np.ndarray:
    """Local epsilon log(1/(1 - gamma)) of a gamma-ultra-mixing kernel; infinite at gamma = 1."""
    value = validate.probability("gamma", gamma)
    with np.errstate(divide="ignore"):
        return (-np.log1p(-value) * _UP)[()]


def coupling_bound(renyi_first: Callable, renyi_kernel: Callable, order: Any, shift: Any, hidden: Any) -> Any:
    """Renyi bound R_alpha(P1 + w, P1) + R_alpha(P2 + (shift - w), P2) with the translation coupling by w.

    Theorem 2 for additive noises: the first noise P1 hides a part w of the shift, the kernel (noise P2) the rest.

    Args:
        renyi_first: (order, shift) -> R_alpha(P1 + shift, P1).
        renyi_kernel: (order, shift) -> R_alpha(P2 + shift, P2).
        order: alpha > 1.
        shift: >= 0.
        hidden: w in [0, shift].

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


def iterated_gaussian_rdp(order: Any, shift: Any, first_std: Any, second_std: Any, *, lipschitz: Any = 1.0) -> Any:
    """Alpha Delta^2 / (2 (s1^2 + s2^2 / L^2)): Gaussian noise, an L-Lipschitz map, Gaussian noise again.

    Args:
        order: alpha > 1; shift: Delta >= 0; first_std: s1 > 0; second_std: s2 >= 0.
        lipschitz: L > 0 of the map between the two noises (1: no map).

    Reference:
        Examples 1 and 3. `gaussian_split` gives the coupling that attains it.

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


def gaussian_split(first_std: Any, second_std: Any, *, lipschitz: Any = 1.0) -> np.ndarray:
    """Optimal share s1^2 / (s1^2 + s2^2 / L^2) of the shift that the first noise hides (Example 1)."""
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


def iterated_laplace_rdp(order: Any, shift: Any, first_scale: Any, second_scale: Any) -> IteratedLaplace:
    """Smallest Renyi bound for Laplace noise after Laplace noise over all splits of the shift.

    min over t in [0, Delta] of [log g_alpha(t/l1) + log g_alpha((Delta-t)/l2)] / (alpha-1). The minimiser is unique
    (log g is strictly convex with slope 0 at 0) and found by bisection on the slope; every t gives a valid
    bound, so an inexact split costs tightness only.

    Args:
        order: alpha > 1; shift: Delta >= 0; first_scale: l1 > 0; second_scale: l2 > 0. All broadcast.

    Returns:
        IteratedLaplace(rdp, first_share). rdp lies between Delta/max(l1, l2) at alpha = infinity and 0.

    Reference:
        Example 2.

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


def iterated_laplace_pure_epsilon(shift: Any, first_scale: Any, second_scale: Any) -> np.ndarray:
    """Smallest epsilon Delta / max(l1, l2) with (epsilon, 0)-DP: a second Laplace gains nothing (Lemma 3)."""
    moved = validate.nonnegative("shift", shift)
    scales = validate.positive("first_scale", first_scale), validate.positive("second_scale", second_scale)
    return (moved / np.maximum(*scales))[()]
