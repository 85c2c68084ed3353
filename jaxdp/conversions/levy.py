"""Inversion of the characteristic function to the two distribution functions of the loss (Levy, Gil-Pelaez).

The algorithm of Zhu, Dong, Wang 2022, kept for comparison and teaching: NOT certified. The verbs use the contour sum
instead, whose error is bounded from both sides and which does not subtract two numbers near 1 to get a small delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.runtime.precision import x64

LogCharacteristic = Callable[[np.ndarray], Any]
# Points of t per block, so that a long rule does not need a (points x nodes) array at once.
_BLOCK = 4096


def levy_cdf(log_characteristic: LogCharacteristic, x: Any, *, step: float, nodes: int) -> np.ndarray:
    """F(x) = phi(0)/2 - (1/pi) int_0^inf Im[e^{-itx} phi(t)]/t dt by the midpoint rule; an estimate.

    Args:
        log_characteristic: callable, elementwise from t >= 0 (float64) to log phi(t), such as
            ``lambda t: mechanism.log_mgf(1j * t)``; run in a float64 scope.
        x: real, any shape, the shape of the result.
        step: h of t. The midpoint rule repeats the law with period 2 pi/h, so that mass further than
            that from x is misread.
        nodes: number of t; what phi has beyond h nodes is lost.

    Returns:
        Estimate of P(L <= x), half of an atom at x. phi(0) = 1 - P(L = inf) is used, so mass at infinity is kept
        out of F. Absolute accuracy at best 1e-15 sqrt(nodes). Gil-Pelaez 1951; Davies 1973 for the midpoint rule.

    """
    points = validate.real_array("x", x)
    h = float(validate.positive("step", step))
    count = int(validate.integer("nodes", nodes, 1))
    with x64():
        total = np.exp(np.asarray(log_characteristic(np.zeros(1)))).real[0] / 2
        value = np.full(points.shape, total)
        for start in range(0, count, _BLOCK):
            t = (np.arange(start, min(start + _BLOCK, count)) + 0.5) * h
            weight = np.exp(np.asarray(log_characteristic(t))) / t
            turned = np.exp(-1j * points[..., None] * t) * weight
            value = value - (h / np.pi) * turned.imag.sum(-1)
    return value[()]


def levy_delta(
    log_characteristic: LogCharacteristic, reverse: LogCharacteristic, epsilon: Any, *, step: float, nodes: int
) -> np.ndarray:
    """delta(eps) = 1 - F_P(eps) - e^eps F_Q'(-eps) from two inversions; an estimate, absolute accuracy only.

    log_characteristic: of L = log dP/dQ under P. reverse: of log dQ/dP under Q, for a mechanism
    ``lambda t: mechanism.log_mgf(-1 - 1j * t)``. Atoms count half in both, which the formula allows. Other arguments as
    for `levy_cdf`. Zhu, Dong, Wang 2022, Algorithm 1.
    """
    eps = validate.real_array("epsilon", epsilon)
    ahead = levy_cdf(log_characteristic, eps, step=step, nodes=nodes)
    behind = levy_cdf(reverse, -eps, step=step, nodes=nodes)
    return np.clip(1 - ahead - np.exp(eps) * behind, 0.0, 1.0)[()]


def quadrature_log_characteristic(
    log_p: Callable, log_q: Callable, low: float, high: float, *, nodes: int = 256
) -> LogCharacteristic:
    """log phi(t) = log int p(x) e^{it log(p(x)/q(x))} dx by Gauss-Legendre on [low, high]: the inner one of two.

    With `levy_cdf` as the outer quadrature this is the double quadrature of Zhu, Dong, Wang 2022, for mechanisms
    without a closed form. log_p, log_q: elementwise log densities on [low, high]; mass outside is lost. An estimate:
    the rule fails once t times the loss turns more than a few times per node. Returns a callable for `levy_cdf`.
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
