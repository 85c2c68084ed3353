"""Inversion of the characteristic function to the two distribution functions of the loss (Levy, Gil-Pelaez).

The algorithm of Zhu, Dong, Wang 2022, for comparison and teaching: NOT certified. The verbs use the contour sum
instead, whose error is bounded from both sides, and which does not subtract two numbers near 1 to get a small delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from jaxdp import validate
from jaxdp.runtime.precision import x64
from jaxdp.typing import Array, Complex, Real

LogCharacteristic: TypeAlias = Callable[[np.ndarray], Complex]
LogDensity: TypeAlias = Callable[[np.ndarray], Real]
# Points of t evaluated at once, which limits the (points x nodes) array.
_BLOCK = 4096


def levy_cdf(log_characteristic: LogCharacteristic, x: Real, *, step: float, nodes: int) -> Array:
    """Distribution function F(x) = phi(0)/2 - (1/pi) int_0^inf Im[e^{-itx} phi(t)]/t dt of the loss: an estimate.

    log_characteristic: elementwise from t >= 0 (float64) to log phi(t), such as ``lambda t: mechanism.log_mgf(1j *
        t)``; it is called in a float64 scope.
    x: real, in nats, any shape.
    step: h > 0 of the midpoint rule in t. The rule repeats the law with period 2 pi/h: mass further than that from x is
        counted at the wrong place.
    nodes: number of t, whole, >= 1; the integral beyond h nodes is left out.

    >>> normal = lambda t: 0.5j * t - t**2 / 2  # mean 1/2, variance 1: the loss of Gaussian noise with sigma = 1
    >>> print(f"{jaxdp.conversions.levy_cdf(normal, 0.5, step=0.1, nodes=200):.6f}")
    0.500000

    Returns an estimate of P(L <= x), with half of an atom at x, of the shape of x, float64. phi(0) = 1 - P(L = inf), so
    mass at infinity is not part of F. The absolute accuracy is at best 1e-15 sqrt(nodes). Raises ValueError.
    Reference: Gil-Pelaez 1951; Davies 1973 for the midpoint rule.
    """
    points = validate.real_array("x", x)
    h = float(validate.positive("step", step))
    count = int(validate.integer("nodes", nodes, 1))
    with x64():
        value = np.full(points.shape, np.exp(np.asarray(log_characteristic(np.zeros(1)))).real[0] / 2)
        for start in range(0, count, _BLOCK):
            t = (np.arange(start, min(start + _BLOCK, count)) + 0.5) * h
            weight = np.exp(np.asarray(log_characteristic(t))) / t
            turned = np.exp(-1j * points[..., None] * t) * weight
            value = value - (h / np.pi) * turned.imag.sum(-1)
    return value[()]


def levy_delta(
    log_characteristic: LogCharacteristic, reverse: LogCharacteristic, epsilon: Real, *, step: float, nodes: int
) -> Array:
    """delta(eps) = 1 - F_P(eps) - e^eps F_Q'(-eps) from two inversions of characteristic functions: an estimate.

    log_characteristic: log phi of L = log dP/dQ under P, elementwise from t >= 0.
    reverse: log phi of log dQ/dP under Q; for a mechanism ``lambda t: mechanism.log_mgf(-1 - 1j * t)``.
    epsilon: in nats, real, any shape.
    step, nodes: as for `levy_cdf`.

    >>> normal = lambda t: 0.5j * t - t**2 / 2  # Gaussian noise with sigma = 1: both directions are equal
    >>> print(f"{jaxdp.conversions.levy_delta(normal, normal, 1.0, step=0.1, nodes=200):.6f}")
    0.126937

    Returns an estimate of delta in [0, 1] of the shape of epsilon, float64, with absolute accuracy only. Atoms count
    half in both terms, which the formula allows. Raises ValueError.
    Reference: Zhu, Dong, Wang 2022, Algorithm 1.
    """
    eps = validate.real_array("epsilon", epsilon)
    ahead = levy_cdf(log_characteristic, eps, step=step, nodes=nodes)
    behind = levy_cdf(reverse, -eps, step=step, nodes=nodes)
    return np.clip(1 - ahead - np.exp(eps) * behind, 0.0, 1.0)[()]


def quadrature_log_characteristic(
    log_p: LogDensity, log_q: LogDensity, low: float, high: float, *, nodes: int = 256
) -> LogCharacteristic:
    """Function t -> log phi(t) = log int p(x) e^{it log(p(x)/q(x))} dx by Gauss-Legendre on [low, high]: an estimate.

    With `levy_cdf` it is the double quadrature of Zhu, Dong, Wang 2022, for mechanisms without a closed form.

    log_p, log_q: log densities of P and Q, elementwise on [low, high].
    low, high: finite, low < high; mass outside is lost.
    nodes: number of x, whole, >= 1. The rule fails where t times the loss turns more than a few times per node.

    >>> log_p, log_q = (lambda x, m=m: -((x - m) ** 2) / 2 - np.log(2 * np.pi) / 2 for m in (1.0, 0.0))
    >>> log_phi = jaxdp.conversions.quadrature_log_characteristic(log_p, log_q, -9.0, 10.0)
    >>> print(np.round(log_phi(np.array([1.0])), 6))  # 0.5 i t - t^2 / 2
    [-0.5+0.5j]

    Returns a callable for `levy_cdf` and `levy_delta`. Raises ValueError, also for low >= high.
    """
    edges = validate.real_array("low", low), validate.real_array("high", high)
    if not (np.isfinite(edges).all() and edges[0] < edges[1]):
        raise ValueError(f"low and high must be finite with low < high, got {low!r}, {high!r}.")
    x, weight = np.polynomial.legendre.leggauss(int(validate.integer("nodes", nodes, 1)))
    half = (edges[1] - edges[0]) / 2
    points = edges[0] + half * (x + 1)
    with x64():
        density = np.asarray(log_p(points), np.float64)
        loss = density - np.asarray(log_q(points), np.float64)
    mass = half * weight * np.exp(density)

    def log_characteristic(t: np.ndarray) -> np.ndarray:
        return np.log(np.exp(1j * np.asarray(t)[..., None] * loss) @ mass)

    return log_characteristic
