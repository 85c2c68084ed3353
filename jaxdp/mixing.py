"""Privacy amplification by mixing: a private mechanism followed by a Markov kernel.

The bounds use a mixing coefficient of the kernel (Theorem 1), or the noise that the kernel adds (couplings). Theorem
numbers: Balle, Barthe, Gaboardi, Geumlek 2019, "Privacy amplification by mixing and diffusion mechanisms".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import laplace_log_g_slope, laplace_renyi_upper
from jaxdp.domains import NONNEGATIVE, NONNEGATIVE_OR_INFINITE, POSITIVE, PROBABILITY, SMALLEST
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised, rounded_up
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import ORDER, checked, theorem, unless
from jaxdp.typing import Array, Real

__all__ = [
    "Guarantee", "IteratedLaplace", "coupling_bound", "dobrushin_amplification", "dobrushin_coefficient",
    "doeblin_amplification", "doeblin_coefficient", "gaussian_split", "hockey_stick_amplification",
    "hockey_stick_coefficient", "iterated_gaussian_rdp", "iterated_laplace_pure_epsilon", "iterated_laplace_rdp",
    "local_privacy", "pure_local_epsilon", "required_level", "ultra_mixing_amplification", "ultra_mixing_coefficient",
]  # fmt: skip

_FAR = 700.0  # e^700 is in the range of doubles


class Guarantee(NamedTuple):
    """An (epsilon, delta) guarantee: the result of an amplification theorem.

    epsilon: in nats, >= 0. delta: in [0, 1].

    >>> amplified = jaxdp.mixing.Guarantee(epsilon=1.0, delta=1e-6)
    >>> jaxdp.ApproximateDP(*amplified)  # a mechanism that composes with others
    ApproximateDP(epsilon=1.0, delta=1e-06)
    """

    epsilon: Array
    delta: Array


_ARGUMENTS = {"epsilon": NONNEGATIVE, "delta": PROBABILITY, "gamma": PROBABILITY}
_VACUOUS = Guarantee(np.inf, 1.0)


def _raised(*numbers):
    """The numbers, subnormal ones raised to the smallest normal one: the bounds here increase in every argument."""
    return (raised(number)[0] for number in numbers)


def _times(delta, gamma):
    return xp.minimum(rounded_up(gamma * delta, (gamma > 0) & (delta > 0)), 1.0)


def _mixed_epsilon(epsilon, gamma):
    """log(1 + g (e^eps - 1)); the larger eps itself from eps = 700 on, where e^eps overflows."""
    mixed = xp.log1p(gamma * xp.expm1(xp.minimum(epsilon, _FAR)))
    return rounded_up(xp.where(epsilon < _FAR, mixed, epsilon), (epsilon > 0) & (gamma > 0))


@theorem(**_ARGUMENTS, vacuous=_VACUOUS)
def dobrushin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a gamma-Dobrushin kernel (case 1).

    A kernel K is gamma-Dobrushin if the total variation distance of K(x) and K(x') is at most gamma for all x, x'.

    epsilon, delta: guarantee of the mechanism; epsilon in nats, >= 0, delta in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `dobrushin_coefficient`.

    >>> print("epsilon {:.2f}, delta {:.1e}".format(*jaxdp.mixing.dobrushin_amplification(1.0, 1e-5, 0.5)))
    epsilon 1.00, delta 5.0e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1; its four cases are this function and the next three amplification functions.
    """
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    return Guarantee(epsilon, _times(delta, gamma))


def hockey_stick_amplification(epsilon: Real, delta: Real, gamma: Real, level: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a (gamma, level)-Dobrushin kernel (case 2).

    The kernel K satisfies H_{e^level}(K(x), K(x')) <= gamma for all x, x', where H is the hockey-stick divergence.

    epsilon, delta: as for `dobrushin_amplification`.
    gamma: coefficient of the kernel at this level, in [0, 1]; see `hockey_stick_coefficient`.
    level: in nats, from 0 to `required_level`. The coefficient decreases as the level grows.

    >>> print("epsilon {:.2f}, delta {:.1e}".format(*jaxdp.mixing.hockey_stick_amplification(1.0, 1e-5, 0.1, 2.0)))
    epsilon 1.00, delta 1.0e-06

    Returns and raises as `dobrushin_amplification`. A level above `required_level` raises ValueError; under a trace
    the result is then (epsilon, delta).
    """
    guarantee, limit = _hockey_stick(epsilon, delta, gamma, level)
    if not validate.is_traced(limit, level):
        at = np.broadcast_to(np.asarray(level, np.float64), np.shape(limit))
        validate.reject("level", at, at > limit, "at most required_level(epsilon, delta)")
    return guarantee


@theorem(**_ARGUMENTS, level=NONNEGATIVE_OR_INFINITE, vacuous=(_VACUOUS, 0.0))
def _hockey_stick(epsilon, delta, gamma, level):
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    # `required_level` may have been computed by NumPy and this by a program: a few of its 32 ulp of margin are allowed.
    limit = _required(epsilon, delta) * (1 + 8 * ULP)
    return Guarantee(epsilon, xp.where(level <= limit, _times(delta, gamma), delta)), limit


def _required(epsilon, delta):
    # Round down, so that no level above the exact limit is accepted. A ratio that overflows counts as 1e300.
    ratio = xp.expm1(xp.minimum(epsilon, _FAR)) / xp.where(delta > 0, delta, 1.0)
    return xp.where(delta > 0, xp.log1p(xp.minimum(ratio, 1e300)) * (1 - 32 * ULP), xp.inf)


@theorem(epsilon=NONNEGATIVE, delta=PROBABILITY, vacuous=0.0)
def required_level(epsilon: Real, delta: Real) -> Array:
    """The largest level, log(1 + (e^eps - 1)/delta), at which Theorem 1, case 2, holds; inf at delta = 0.

    epsilon, delta: as for `dobrushin_amplification`.

    >>> print(f"{jaxdp.mixing.required_level(1.0, 1e-5):.3f}")
    12.054

    Returns the level of the broadcast shape in nats, float64, rounded down; at most 690 for delta > 0. Raises
    ValueError.
    """
    return _required(*_raised(epsilon, delta))


@theorem(**_ARGUMENTS, vacuous=_VACUOUS)
def doeblin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-Doeblin kernel (case 3).

    A kernel K is gamma-Doeblin if there is a law omega with K(x) >= (1 - gamma) omega for all x. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma (1 - e^{eps'-eps} (1 - delta)), which is > 0 even at delta = 0.
    Arguments, result and errors: as for `dobrushin_amplification`; for gamma see `doeblin_coefficient`.

    >>> print("epsilon {:.4f}, delta {:.4f}".format(*jaxdp.mixing.doeblin_amplification(1.0, 1e-5, 0.5)))
    epsilon 0.6201, delta 0.1580
    """
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    # 1 - e^{eps'-eps} (1 - delta) = s + (1 - s) delta with s = (1-g)(1 - e^{-eps}): a small delta keeps its digits.
    shrink = (1 - gamma) * -xp.expm1(-epsilon)
    positive = (gamma > 0) & xp.where(gamma < 1, (epsilon > 0) | (delta > 0), delta > 0)
    mixed = xp.minimum(rounded_up(gamma * (shrink + (1 - shrink) * delta), positive), 1.0)
    return Guarantee(_mixed_epsilon(epsilon, gamma), mixed)


@theorem(**_ARGUMENTS, vacuous=_VACUOUS)
def ultra_mixing_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-ultra-mixing kernel (case 4).

    A kernel K is gamma-ultra-mixing if dK(x)/dK(x') >= 1 - gamma everywhere, for all x, x'. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma delta e^{eps'-eps}.
    Arguments, result and errors: as for `dobrushin_amplification`; for gamma see `ultra_mixing_coefficient`.

    >>> print("epsilon {:.4f}, delta {:.2e}".format(*jaxdp.mixing.ultra_mixing_amplification(1.0, 1e-5, 0.5)))
    epsilon 0.6201, delta 3.42e-06
    """
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    # e^{eps'-eps} as the sum g + (1-g) e^{-eps}: the form 1 - (1-g)(1 - e^{-eps}) cancels where both terms are small.
    kept = gamma + (1 - gamma) * xp.exp(-epsilon)
    mixed = xp.minimum(rounded_up(gamma * delta * kept, (gamma > 0) & (delta > 0)), 1.0)
    return Guarantee(_mixed_epsilon(epsilon, gamma), mixed)


# Largest |row sum - 1| that is attributed to rounding errors of the given matrix.
_ROW_SUM_ERROR = 1e-9


def _kernel_matrix(kernel: Real) -> tuple[np.ndarray, float]:
    """The stochastic matrix with rows rescaled to sum to 1, and the relative error of its entries from rescaling."""
    matrix = validate.real_array("kernel", kernel)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"kernel must be a matrix with one row per state, got shape {matrix.shape}.")
    validate.reject("kernel", matrix, ~(np.isfinite(matrix) & (matrix >= 0)), "made of probabilities >= 0")
    sums = matrix.sum(axis=1)
    validate.reject("row sum of kernel", sums, np.abs(sums - 1) > _ROW_SUM_ERROR, f"1 within {_ROW_SUM_ERROR}")
    # A row whose sum is 1 up to the rounding error of the summation is not rescaled.
    exact = np.abs(sums - 1) <= matrix.shape[1] * ULP
    return matrix / np.where(exact, 1.0, sums)[:, None], 0.0 if exact.all() else (matrix.shape[1] + 2) * ULP


def hockey_stick_coefficient(kernel: Real, level: Real) -> Array:
    """Coefficient gamma = max over states x, x' of H_{e^level}(K(x), K(x')) of a finite kernel.

    kernel: (m, k) stochastic matrix; row K[x] is the law of the output at state x. Rows sum to 1 within 1e-9.
    level: >= 0 in nats, any shape. 0 gives the Dobrushin coefficient, inf the mass of K(x) on outputs impossible at x'.

    >>> print(f"{jaxdp.mixing.hockey_stick_coefficient([[0.9, 0.1], [0.2, 0.8]], 0.5):.4f}")
    0.6351

    Returns gamma in [0, 1] of the shape of level, float64, rounded up. Time O(m^2 k), memory O(m k). Raises ValueError
    for a kernel that is not a stochastic matrix, a negative level.
    """
    (matrix, error), levels = _kernel_matrix(kernel), validate.inside("level", level, NONNEGATIVE_OR_INFINITE)

    def largest(level: float) -> float:
        # e^level has an error of up to 2 ulp. Round the subtracted row down: the difference may be much smaller.
        down = (1.0 if level == 0 else 1 - 2.0**-51) * (1 - 2 * error)
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.where(matrix > 0, np.exp(level) * down * matrix, 0.0)
        worst = max(np.maximum(row - scaled, 0.0).sum(axis=1).max() for row in matrix)
        return min(worst * (1 + 32 * ULP + error), 1.0)

    return np.vectorize(largest, otypes=[np.float64])(levels)[()]


def dobrushin_coefficient(kernel: Real) -> float:
    """Dobrushin coefficient of a finite kernel: the largest total variation distance between two rows.

    This is `hockey_stick_coefficient` at level 0, with the same kernel, accuracy and errors.

    >>> print(f"{jaxdp.mixing.dobrushin_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
    0.7000
    """
    return float(hockey_stick_coefficient(kernel, 0.0))


def doeblin_coefficient(kernel: Real) -> float:
    """Doeblin coefficient of a finite kernel: 1 minus the sum over outputs of the smallest entry of the column.

    The smallest gamma for which a law omega exists with K(x) >= (1 - gamma) omega for all states x. Kernel, accuracy
    and errors: as for `hockey_stick_coefficient`.

    >>> print(f"{jaxdp.mixing.doeblin_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
    0.7000
    """
    matrix, _ = _kernel_matrix(kernel)
    return float(np.clip(1.0 - matrix.min(axis=0).sum() + 1e-15 * matrix.shape[1], 0.0, 1.0))


def ultra_mixing_coefficient(kernel: Real) -> float:
    """Ultra-mixing coefficient of a finite kernel: 1 minus the smallest ratio K(x)[y] / K(x')[y].

    It is 1 if an output is possible in one state and impossible in another. Kernel, accuracy and errors: as for
    `hockey_stick_coefficient`.

    >>> print(f"{jaxdp.mixing.ultra_mixing_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
    0.8750
    """
    matrix, error = _kernel_matrix(kernel)
    used = matrix.max(axis=0) > 0
    smallest, largest = matrix[:, used].min(axis=0), matrix[:, used].max(axis=0)
    return float(np.clip(np.max((largest - smallest) / largest) * (1 + 32 * ULP) + 2 * error, 0.0, 1.0))


def local_privacy(kernel: Real, level: Real = 0.0) -> Guarantee:
    """Local guarantee (level, gamma) of a finite kernel read as a local randomizer.

    gamma is the delta of the kernel at epsilon = level, by `hockey_stick_coefficient`: arguments, shape, accuracy and
    errors are the same. `pure_local_epsilon` gives the guarantee with delta = 0.

    >>> print("epsilon {:.1f}, delta {:.4f}".format(*jaxdp.mixing.local_privacy([[0.9, 0.1], [0.2, 0.8]], 1.0)))
    epsilon 1.0, delta 0.5282
    """
    levels = validate.inside("level", level, NONNEGATIVE_OR_INFINITE)
    return Guarantee(levels[()], hockey_stick_coefficient(kernel, levels))


def pure_local_epsilon(gamma: Real) -> Array:
    """Local epsilon log(1/(1 - gamma)) of a gamma-ultra-mixing kernel read as a local randomizer.

    gamma: the `ultra_mixing_coefficient`, in [0, 1], any shape.

    >>> print(f"{jaxdp.mixing.pure_local_epsilon(0.875):.4f}")
    2.0794

    Returns epsilon in nats of the shape of gamma, float64, rounded up; inf at 1. Raises ValueError outside [0, 1].
    """
    value = validate.probability("gamma", gamma)
    with np.errstate(divide="ignore"):
        return (-np.log1p(-value) * (1 + 32 * ULP))[()]


_HALVINGS = 80  # bisection steps for the part of the shift that the first noise hides
Divergence: TypeAlias = Callable[[Array, Array], Array]


class IteratedLaplace(NamedTuple):
    """Renyi bound of Laplace noise after Laplace noise, and the split of the shift that attains it.

    rdp: upper bound in nats. first_share: share in [0, 1] of the shift that the first noise hides.

    >>> result = jaxdp.mixing.iterated_laplace_rdp(2.0, 1.0, 1.0, 1.0)
    >>> print(f"{result.rdp:.4f} {result.first_share:.2f}")
    0.4006 0.50
    """

    rdp: Array
    first_share: Array


def coupling_bound(renyi_first: Divergence, renyi_kernel: Divergence, order: Real, shift: Real, hidden: Real) -> Array:
    """Renyi bound R_alpha(P1 + w, P1) + R_alpha(P2 + (shift - w), P2) of noise P2 added after noise P1.

    The coupling is a translation by w: the first noise P1 hides a part w of the shift, the kernel's noise P2 the rest.

    renyi_first, renyi_kernel: (order, shift) -> R_alpha(P + shift, P) for P = P1 and for P = P2, elementwise.
    order: alpha > 1. shift: >= 0, in the units of the noises. hidden: w in [0, shift].

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
    return unless(part > total, renyi_first(alpha, part) + renyi_kernel(alpha, total - part), np.inf)


@theorem(order=ORDER, shift=NONNEGATIVE, first_std=POSITIVE, second_std=NONNEGATIVE, lipschitz=POSITIVE)
def iterated_gaussian_rdp(
    order: Real, shift: Real, first_std: Real, second_std: Real, *, lipschitz: Real = 1.0
) -> Array:
    """Renyi bound alpha Delta^2 / (2 (s1^2 + s2^2 / L^2)) of Gaussian noise, an L-Lipschitz map and Gaussian noise.

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
    # An infinite standard deviation, or an underflow of the ratio, must not give a divergence of 0.
    ratio = shift / xp.minimum(xp.hypot(first_std, second_std / lipschitz), np.finfo(float).max)
    return rounded_up(order * ratio * ratio / 2, shift > 0)


@theorem(first_std=POSITIVE, second_std=NONNEGATIVE, lipschitz=POSITIVE, vacuous=1.0)
def gaussian_split(first_std: Real, second_std: Real, *, lipschitz: Real = 1.0) -> Array:
    """Optimal share s1^2 / (s1^2 + s2^2 / L^2) of the shift that the first of two Gaussian noises hides.

    first_std, second_std, lipschitz: as for `iterated_gaussian_rdp`.

    >>> print(f"{jaxdp.mixing.gaussian_split(1.0, 2.0):.2f}")
    0.20

    Returns the share in (0, 1] of the broadcast shape, float64; relative error of a few ulp. Raises ValueError.
    Reference: Example 1.
    """
    return xp.square(first_std / xp.hypot(first_std, second_std / lipschitz))


@theorem(order=ORDER, shift=NONNEGATIVE, first_scale=POSITIVE, second_scale=POSITIVE)
def iterated_laplace_rdp(order: Real, shift: Real, first_scale: Real, second_scale: Real) -> IteratedLaplace:
    """Smallest Renyi bound of Laplace noise after Laplace noise, over all splits of the shift.

    min over t in [0, Delta] of [log g_alpha(t/l1) + log g_alpha((Delta-t)/l2)] / (alpha-1), where
    log g_alpha / (alpha-1) is the Renyi divergence of Laplace noise of scale 1. log g_alpha is strictly convex with
    slope 0 at 0, so bisection on the slope finds the unique minimiser. Every t gives a valid bound.

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

    part = 0.5 * sum(bisect(steeper, xp.zeros_like(shift), shift, _HALVINGS))
    value = laplace_renyi_upper(order, part / first_scale) + laplace_renyi_upper(order, (shift - part) / second_scale)
    return IteratedLaplace(rounded_up(value, shift > 0), part / xp.maximum(shift, SMALLEST))


@theorem(shift=NONNEGATIVE, first_scale=POSITIVE, second_scale=POSITIVE)
def iterated_laplace_pure_epsilon(shift: Real, first_scale: Real, second_scale: Real) -> Array:
    """Smallest epsilon, Delta / max(l1, l2), for which Laplace noise after Laplace noise is (epsilon, 0)-DP.

    The noise of smaller scale does not improve this guarantee.

    shift, first_scale, second_scale: as for `iterated_laplace_rdp`.

    >>> print(f"{jaxdp.mixing.iterated_laplace_pure_epsilon(1.0, 1.0, 2.0):.4f}")
    0.5000

    Returns epsilon in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Lemma 3.
    """
    shift, _ = raised(shift)
    return rounded_up(shift / xp.maximum(first_scale, second_scale), shift > 0)
