"""Mixing coefficients and local privacy of finite kernels.

Theorem numbers: see `jaxdp.mixing`.
"""

from __future__ import annotations

import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE_OR_INFINITE
from jaxdp.mixing.amplification import UP, Guarantee
from jaxdp.numerics.rounding import ULP
from jaxdp.typing import Array, Real

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
    return min(worst * (UP + error), 1.0)


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
    return float(np.clip(np.max((largest - smallest) / largest) * UP + 2 * error, 0.0, 1.0))


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

    Returns epsilon in nats of the shape of gamma, float64, rounded up; inf at gamma = 1. Raises ValueError for gamma
    outside [0, 1].
    """
    value = validate.probability("gamma", gamma)
    with np.errstate(divide="ignore"):
        return (-np.log1p(-value) * UP)[()]
