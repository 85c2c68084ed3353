"""A private mechanism followed by a kernel of which one mixing coefficient is known (Theorem 1); finite kernels.

Theorem numbers: see `jaxdp.mixing`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, NONNEGATIVE_OR_INFINITE, PROBABILITY, SMALLEST
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import theorem
from jaxdp.typing import Array, Real

_UP = 1.0 + 2.0**-48
_DOWN = 1.0 - 2.0**-48


class Guarantee(NamedTuple):
    """An (epsilon, delta) guarantee: the result of an amplification theorem.

    epsilon, delta: in nats, >= 0, and in [0, 1].

    >>> amplified = jaxdp.mixing.Guarantee(epsilon=1.0, delta=1e-6)
    >>> jaxdp.ApproximateDP(*amplified)  # a mechanism that composes with others
    ApproximateDP(epsilon=1.0, delta=1e-06)
    """

    epsilon: Array
    delta: Array


_ARGUMENTS = {"epsilon": NONNEGATIVE, "delta": PROBABILITY, "gamma": PROBABILITY}
_VACUOUS = Guarantee(np.inf, 1.0)


def rounded_up(value, positive):
    """The value rounded up; where the exact value is positive, never 0."""
    return jnp.where(positive, jnp.maximum(value * _UP, SMALLEST), 0.0)


def _raised(*numbers):
    """Positive numbers are at least the smallest normal one, as every bound here increases in them."""
    return (raised(number)[0] for number in numbers)


def _times(delta, gamma):
    return jnp.minimum(rounded_up(gamma * delta, (gamma > 0) & (delta > 0)), 1.0)


def _mixed_epsilon(epsilon, gamma):
    # log(1 + g (e^eps - 1)). The exponential overflows past eps = 709; from 500 on e^eps - 1 rounds to e^eps.
    direct = jnp.log1p(gamma * jnp.expm1(jnp.minimum(epsilon, 500.0)))
    log_gamma = jnp.log(jnp.where(gamma > 0, gamma, 1.0))
    grown = epsilon + log_gamma + 2.0**-51 * (epsilon - log_gamma)  # charge for rounding at the size of the two terms
    large = jnp.where(grown < 30.0, jnp.log1p(jnp.exp(jnp.minimum(grown, 30.0))), grown + jnp.exp(-grown))
    return rounded_up(jnp.where(epsilon < 500.0, direct, large), (epsilon > 0) & (gamma > 0))


@theorem(**_ARGUMENTS, vacuous=_VACUOUS)
def dobrushin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a gamma-Dobrushin kernel.

    A kernel K is gamma-Dobrushin when the total variation distance of K(x) and K(x') is at most gamma for all x, x'.

    epsilon, delta: guarantee of the mechanism; epsilon in nats, >= 0, delta in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `dobrushin_coefficient`.

    >>> print("epsilon {:.2f}, delta {:.1e}".format(*jaxdp.mixing.dobrushin_amplification(1.0, 1e-5, 0.5)))
    epsilon 1.00, delta 5.0e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1, case 1.
    """
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    return Guarantee(epsilon, _times(delta, gamma))


def hockey_stick_amplification(epsilon: Real, delta: Real, gamma: Real, level: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a (gamma, level)-Dobrushin kernel.

    The kernel K satisfies H_{e^level}(K(x), K(x')) <= gamma for all x, x', where H is the hockey-stick divergence.
    The theorem holds for levels up to `required_level` = log(1 + (e^eps - 1)/delta).

    epsilon, delta: guarantee of the mechanism; epsilon in nats, >= 0, delta in [0, 1].
    gamma: coefficient of the kernel at this level, in [0, 1]; see `hockey_stick_coefficient`.
    level: >= 0, inf allowed. The coefficient decreases in the level.

    >>> print("epsilon {:.2f}, delta {:.1e}".format(*jaxdp.mixing.hockey_stick_amplification(1.0, 1e-5, 0.1, 2.0)))
    epsilon 1.00, delta 1.0e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Under a trace a level above the required one gives
    (epsilon, delta). Raises ValueError, also for a level above the required one.
    Reference: Theorem 1, case 2.
    """
    guarantee, limit = _hockey_stick(epsilon, delta, gamma, level)
    if not validate.is_traced(limit):
        at = np.broadcast_to(np.asarray(level, np.float64), np.shape(limit))
        validate.reject("level", at, at > limit, "at most log(1 + (e^eps - 1)/delta)")
    return guarantee


@theorem(**_ARGUMENTS, level=NONNEGATIVE_OR_INFINITE, vacuous=(_VACUOUS, 0.0))
def _hockey_stick(epsilon, delta, gamma, level):
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    limit = _required(epsilon, delta)
    return Guarantee(epsilon, jnp.where(level <= limit, _times(delta, gamma), delta)), limit


def _required(epsilon, delta):
    grown, share = jnp.expm1(jnp.minimum(epsilon, 500.0)), jnp.where(delta > 0, delta, 1.0)
    ratio = grown / share
    # log(1 + ratio) is log(ratio) where the ratio is huge, and the ratio may overflow
    large = jnp.where(epsilon < 500.0, jnp.log(grown), epsilon) - jnp.log(share)
    # rounded down, so that no level above the exact limit is accepted
    return jnp.where(delta > 0, jnp.where(ratio < 1e100, jnp.log1p(ratio), large) * _DOWN, jnp.inf)


@theorem(epsilon=NONNEGATIVE, delta=PROBABILITY, vacuous=0.0)
def required_level(epsilon: Real, delta: Real) -> Array:
    """Largest level log(1 + (e^eps - 1)/delta) at which Theorem 1, case 2, holds; inf at delta = 0.

    epsilon, delta: guarantee of the mechanism; epsilon in nats, >= 0, delta in [0, 1].

    >>> print(f"{jaxdp.mixing.required_level(1.0, 1e-5):.3f}")
    12.054

    Returns the level of the broadcast shape in nats, float64, rounded down. Raises ValueError.
    """
    return _required(*_raised(epsilon, delta))


@theorem(**_ARGUMENTS, vacuous=_VACUOUS)
def doeblin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-Doeblin kernel.

    A kernel K is gamma-Doeblin when K(x) >= (1 - gamma) omega for all x and one law omega. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma (1 - e^{eps'-eps} (1 - delta)), which is > 0 even at delta = 0.

    epsilon, delta: guarantee of the mechanism; epsilon in nats, >= 0, delta in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `doeblin_coefficient`.

    >>> print("epsilon {:.4f}, delta {:.4f}".format(*jaxdp.mixing.doeblin_amplification(1.0, 1e-5, 0.5)))
    epsilon 0.6201, delta 0.1580

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1, case 3.
    """
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    # 1 - e^{eps'-eps} (1 - delta) with e^{eps'-eps} = 1 - (1-g)(1 - e^{-eps}) keeps the digits of a small delta.
    shrink = (1 - gamma) * -jnp.expm1(-epsilon)
    positive = (gamma > 0) & ((delta > 0) | ((epsilon > 0) & (gamma < 1)))
    mixed = jnp.minimum(rounded_up(gamma * (shrink + (1 - shrink) * delta), positive), 1.0)
    return Guarantee(_mixed_epsilon(epsilon, gamma), mixed)


@theorem(**_ARGUMENTS, vacuous=_VACUOUS)
def ultra_mixing_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-ultra-mixing kernel.

    A kernel K is gamma-ultra-mixing when dK(x)/dK(x') >= 1 - gamma everywhere, for all x, x'. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma delta e^{eps'-eps}.

    epsilon, delta: guarantee of the mechanism; epsilon in nats, >= 0, delta in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `ultra_mixing_coefficient`.

    >>> print("epsilon {:.4f}, delta {:.2e}".format(*jaxdp.mixing.ultra_mixing_amplification(1.0, 1e-5, 0.5)))
    epsilon 0.6201, delta 3.42e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1, case 4.
    """
    epsilon, delta, gamma = _raised(epsilon, delta, gamma)
    # e^{eps'-eps} = g + (1-g) e^{-eps} as a sum: 1 - (1-g)(1 - e^{-eps}) loses all digits where both are small.
    kept = gamma + (1 - gamma) * jnp.exp(-epsilon)
    mixed = jnp.minimum(rounded_up(gamma * delta * kept, (gamma > 0) & (delta > 0)), 1.0)
    return Guarantee(_mixed_epsilon(epsilon, gamma), mixed)


# Largest distance of a row sum from 1 that is put down to the rounding of whatever computed the matrix.
_ROW_SUM_ERROR = 1e-9


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

    kernel: (m, k) stochastic matrix; row K[x] is the law of the output at state x. Rows sum to 1 within 1e-9.
    level: >= 0 in nats, any shape. 0 gives the Dobrushin coefficient, inf the mass of K(x) where K(x') has none.

    >>> print(f"{jaxdp.mixing.hockey_stick_coefficient([[0.9, 0.1], [0.2, 0.8]], 0.5):.4f}")
    0.6351

    Returns gamma in [0, 1] of the shape of level, float64, rounded up. Time O(m^2 k), memory O(m k). Raises ValueError
    for a kernel that is not a stochastic matrix, a negative level.
    """
    (matrix, error), levels = _kernel_matrix(kernel), validate.inside("level", level, NONNEGATIVE_OR_INFINITE)
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

    kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.

    >>> print(f"{jaxdp.mixing.dobrushin_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
    0.7000

    Returns gamma in [0, 1], rounded up. Raises ValueError for a kernel that is not a stochastic matrix.
    """
    return float(hockey_stick_coefficient(kernel, 0.0))


def doeblin_coefficient(kernel: Real) -> float:
    """Doeblin coefficient of a finite kernel: 1 minus the sum over outputs of the smallest entry of the column.

    It is the smallest gamma with K(x) >= (1 - gamma) omega for all states x and some law omega.

    kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.

    >>> print(f"{jaxdp.mixing.doeblin_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
    0.7000

    Returns gamma in [0, 1], rounded up. Raises ValueError for a kernel that is not a stochastic matrix.
    """
    matrix, _ = _kernel_matrix(kernel)
    return float(np.clip(1.0 - matrix.min(axis=0).sum() + 1e-15 * matrix.shape[1], 0.0, 1.0))


def ultra_mixing_coefficient(kernel: Real) -> float:
    """Ultra-mixing coefficient of a finite kernel: 1 minus the smallest ratio K(x)[y] / K(x')[y].

    kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.

    >>> print(f"{jaxdp.mixing.ultra_mixing_coefficient([[0.9, 0.1], [0.2, 0.8]]):.4f}")
    0.8750

    Returns gamma in [0, 1], rounded up; 1 where an output is possible in one state and not in another. Raises
    ValueError for a kernel that is not a stochastic matrix.
    """
    matrix, error = _kernel_matrix(kernel)
    used = matrix.max(axis=0) > 0
    smallest, largest = matrix[:, used].min(axis=0), matrix[:, used].max(axis=0)
    return float(np.clip(np.max((largest - smallest) / largest) * _UP + 2 * error, 0.0, 1.0))


def local_privacy(kernel: Real, level: Real = 0.0) -> Guarantee:
    """Local guarantee (level, gamma) of a finite kernel read as a local randomizer.

    gamma is `hockey_stick_coefficient` at the level: the delta of the kernel at epsilon = level.

    kernel: (m, k) stochastic matrix, as for `hockey_stick_coefficient`.
    level: >= 0 in nats, any shape.

    >>> print("epsilon {:.1f}, delta {:.4f}".format(*jaxdp.mixing.local_privacy([[0.9, 0.1], [0.2, 0.8]], 1.0)))
    epsilon 1.0, delta 0.5282

    Returns a Guarantee of the shape of level, rounded up. `pure_local_epsilon` gives the guarantee with delta = 0.
    Raises ValueError for a kernel that is not a stochastic matrix, a negative level.
    """
    levels = validate.inside("level", level, NONNEGATIVE_OR_INFINITE)
    return Guarantee(levels[()], hockey_stick_coefficient(kernel, levels))


def pure_local_epsilon(gamma: Real) -> Array:
    """Local epsilon log(1/(1 - gamma)) of a gamma-ultra-mixing kernel read as a local randomizer.

    gamma: `ultra_mixing_coefficient`, in [0, 1], any shape.

    >>> print(f"{jaxdp.mixing.pure_local_epsilon(0.875):.4f}")
    2.0794

    Returns epsilon in nats of the shape of gamma, float64, rounded up; inf at 1. Raises ValueError outside [0, 1].
    """
    value = validate.probability("gamma", gamma)
    with np.errstate(divide="ignore"):
        return (-np.log1p(-value) * _UP)[()]
