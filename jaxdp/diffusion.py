"""Diffusion mechanisms: Brownian motion and the Ornstein-Uhlenbeck process as mechanisms that account and sample.

Theorem numbers: Balle, Barthe, Gaboardi, Geumlek 2019, "Privacy amplification by mixing and diffusion mechanisms".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, POSITIVE, SMALLEST, SMALLEST_MU, field, whole
from jaxdp.mechanisms.base import record
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.arrays import in_float64, xp
from jaxdp.runtime.formulas import LINEAR_ORDER, theorem
from jaxdp.typing import Array, Number, Real, RealField

__all__ = [
    "BrownianMotion", "OUParameters", "OrnsteinUhlenbeck", "Quadrature", "brownian_lambda",
    "calibrate_ornstein_uhlenbeck", "diffusion_lambda", "gaussian_mse", "ornstein_uhlenbeck_beats_gaussian",
    "ornstein_uhlenbeck_lambda", "ornstein_uhlenbeck_mse", "renyi_from_lambda",
]  # fmt: skip

_NODES = 15
_PANELS = 512
# Range of the integration variable u = log(s / t - 1). The integral over the two outermost panels is part of the error
# estimate.
_LOG_RANGE = (-40.0, 60.0)
# A smaller mu is replaced by this one, so that an underflow to mu = 0 never means perfect privacy. For mu below
# SMALLEST_MU no lower bounds of epsilon or delta are given.
_LEAST_MU = 0.99 * SMALLEST_MU


class Quadrature(NamedTuple):
    """An integral (value) and an estimate of its absolute error: difference of two rules plus the two outermost panels.

    >>> integral = jaxdp.diffusion.diffusion_lambda(lambda s: 0.25 / s**2, 1.0)
    >>> print(f"{integral.value:.4f} {integral.error < 1e-6}")
    0.2500 True
    """

    value: Array
    error: Array


class OUParameters(NamedTuple):
    """Parameters of an Ornstein-Uhlenbeck mechanism, its error, and the error of Gaussian noise of equal privacy.

    theta: pull towards 0, > 0. rho: noise level, > 0. time: the time t of the release.
    mse_at_radius: mean squared error for a value of norm R. gaussian_mse: mean squared error of Gaussian noise with the
        same Renyi curve. ratio: mse_at_radius / gaussian_mse.

    >>> found = jaxdp.diffusion.calibrate_ornstein_uhlenbeck(rdp=0.5, sensitivity=1.0, radius=1.0, dimension=10)
    >>> print(f"{found.theta:.3f} {found.rho:.3f} {found.ratio:.3f}")
    2.398 0.141 0.091
    """

    theta: Array
    rho: Array
    time: float
    mse_at_radius: Array
    gaussian_mse: Array
    ratio: Array


def _ou_mu(theta, rho, time, sensitivity):
    """(sensitivity / rho) sqrt(theta) e^{-theta t} / sqrt(1 - e^{-2 theta t}), rounded up, and its relative excess.

    Computed by a sum of logarithms, because a factor may overflow.
    """
    theta, rho, time, sensitivity = xp.broadcast_arrays(*map(xp.asarray, (theta, rho, time, sensitivity)))
    pull = xp.minimum(theta * time, 1e4)  # beyond 1e4, mu is below _LEAST_MU for all values of the other arguments
    # share: log of (1 - e^(-2 theta t)) / (2 theta t), by a series where the quotient is close to 1
    near = pull < 1e-4
    apart = xp.where(near, 1.0, pull)
    share = xp.where(near, pull * (pull / 6 - 1), xp.log(-xp.expm1(-2 * apart)) - xp.log(2 * apart))
    logs = xp.log(sensitivity), -xp.log(rho), -(math.log(2) + xp.log(time)) / 2, -share / 2, -pull
    # Relative rounding error of mu: the errors of the logarithms, of their sum and of theta t.
    slack = 8 * ULP * (16 + sum(map(xp.abs, logs)))
    return xp.maximum(xp.exp(sum(logs)) * (1 + slack), _LEAST_MU), 2 * slack


@record
class BrownianMotion(GaussianMechanism):
    """The value plus Brownian motion run for a time t, N(x, 2 t I): Gaussian noise with mu = sensitivity / sqrt(2 t).

    The Renyi divergence of order alpha is alpha Delta^2 / (4 t), under the relation for which Delta is the sensitivity.

    time: t > 0, any shape.
    sensitivity: Delta > 0 in L2, any shape that broadcasts with time.

    >>> motion = jaxdp.diffusion.BrownianMotion(time=2.0)
    >>> print(f"{jaxdp.epsilon(motion, 1e-6):.4f}")  # as Gaussian noise of standard deviation 2
    2.2541

    Assumes: values of neighbouring data sets are at most the sensitivity apart in L2. Only the state at the time t is
    released. Its noise is ideal, without the flaws of a random number generator or of floating point.

    Reference: Examples 4 and 5.
    """

    time: RealField = field(POSITIVE)
    sensitivity: RealField = field(POSITIVE, default=1.0)

    @in_float64
    def gaussian_mu(self) -> Array:
        """Mu = sensitivity / sqrt(2 time), rounded up, at least 9.9e-151."""
        # Three roundings, and a factor that covers them: mu exceeds the exact one by at most 8 ULP, see `mu_excess`.
        return xp.maximum(self.sensitivity / (2 * xp.sqrt(self.time / 2)) * (1 + 4 * ULP), _LEAST_MU)

    def lam(self) -> Array:
        """Lambda(t) = Delta^2 / (4 t) in nats: the Renyi divergence per unit of order, rounded up."""
        return brownian_lambda(self.time, self.sensitivity)

    def sample(self, key: jax.Array, value: jax.Array) -> jax.Array:
        """One release of `value`, with the dtype and shape of value."""
        dtype = xp.asarray(value).dtype
        return value + xp.sqrt(2 * xp.asarray(self.time, dtype)) * jax.random.normal(key, xp.shape(value), dtype)

    def mse(self, dimension: Real) -> Array:
        """Mean squared error 2 t d of one release of d coordinates."""
        return _brownian_mse(self.time, dimension)


@record
class OrnsteinUhlenbeck(GaussianMechanism):
    """The value moved along dX = -theta X dt + sqrt(2) rho dW for a time t.

    The law at time t is N(e^{-theta t} x, (rho^2 / theta)(1 - e^{-2 theta t}) I): Gaussian noise on a shrunken value,
    with mu^2 = 2 Lambda = theta Delta^2 / (rho^2 (e^{2 theta t} - 1)). The limit theta -> 0 is Gaussian noise of
    variance 2 rho^2 t.

    theta: pull towards 0, > 0, any shape; all four fields broadcast.
    rho: noise level, > 0.
    time: t > 0.
    sensitivity: Delta > 0 in L2.

    >>> mechanism = jaxdp.diffusion.OrnsteinUhlenbeck(theta=1.0, rho=1.0, time=1.0)
    >>> print(f"{jaxdp.epsilon(mechanism, 1e-6):.4f}")
    1.7446

    Assumes: values of neighbouring data sets are at most the sensitivity apart in L2. Only the state at the time t is
    released. Its noise is ideal, without the flaws of a random number generator or of floating point.

    Reference: Corollary 7.
    """

    theta: RealField = field(POSITIVE)
    rho: RealField = field(POSITIVE)
    time: RealField = field(POSITIVE)
    sensitivity: RealField = field(POSITIVE, default=1.0)

    @in_float64
    def gaussian_mu(self) -> Array:
        """Mu = (sensitivity / rho) sqrt(theta / expm1(2 theta time)), rounded up, at least 9.9e-151."""
        return _ou_mu(self.theta, self.rho, self.time, self.sensitivity)[0]

    def mu_excess(self, mu: Number) -> Number:
        """Bound of the relative excess of `gaussian_mu` over the exact mu, from the rounding of the logarithms."""
        return _ou_mu(self.theta, self.rho, self.time, self.sensitivity)[1]

    def lam(self) -> Array:
        """Lambda(t) = theta Delta^2 / (2 rho^2 (e^{2 theta t} - 1)) in nats: Renyi divergence per unit of order."""
        return ornstein_uhlenbeck_lambda(self.theta, self.rho, self.time, self.sensitivity)

    def sample(self, key: jax.Array, value: jax.Array) -> jax.Array:
        """One release of `value` at time t from its exact law (no time steps), with the dtype and shape of value."""
        dtype = xp.asarray(value).dtype
        rate, time, level = (xp.asarray(x, dtype) for x in (self.theta, self.time, self.rho))
        std = level * xp.sqrt(-xp.expm1(-2 * rate * time) / rate)
        return xp.exp(-rate * time) * value + std * jax.random.normal(key, xp.shape(value), dtype)

    def mse(self, norm: Real, dimension: Real) -> Array:
        """Mean squared error of one release of a value with the given L2 norm, see `ornstein_uhlenbeck_mse`."""
        return ornstein_uhlenbeck_mse(self.theta, self.rho, self.time, norm, dimension)


@theorem(time=POSITIVE, dimension=whole(1))
def _brownian_mse(time, dimension):
    return 2 * time * dimension


@theorem(time=POSITIVE, sensitivity=POSITIVE)
def brownian_lambda(time: Real, sensitivity: Real = 1.0) -> Array:
    """Lambda(t) = Delta^2 / (4 t) of Brownian motion: the release is (alpha, alpha Lambda)-RDP for all alpha.

    time: t > 0. sensitivity: Delta > 0 in L2.

    >>> print(f"{jaxdp.diffusion.brownian_lambda(2.0):.4f}")
    0.1250

    Returns Lambda in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Examples 4 and 5.
    """
    return xp.maximum((sensitivity / xp.sqrt(time)) ** 2 / 4 * (1 + 8 * ULP), SMALLEST)


@theorem(theta=POSITIVE, rho=POSITIVE, time=POSITIVE, sensitivity=POSITIVE)
def ornstein_uhlenbeck_lambda(theta: Real, rho: Real, time: Real, sensitivity: Real = 1.0) -> Array:
    """Lambda(t) = theta Delta^2 / (2 rho^2 (e^{2 theta t} - 1)) of the Ornstein-Uhlenbeck mechanism.

    theta: pull towards 0, > 0. rho: noise level, > 0. Other arguments, result and errors: as for `brownian_lambda`.

    >>> print(f"{jaxdp.diffusion.ornstein_uhlenbeck_lambda(1.0, 1.0, 1.0):.4f}")
    0.0783

    Reference: Corollary 7.
    """
    return _ou_mu(theta, rho, time, sensitivity)[0] ** 2 / 2 * (1 + 4 * ULP)


@theorem(theta=POSITIVE, rho=POSITIVE, time=POSITIVE, norm=NONNEGATIVE, dimension=whole(1))
def ornstein_uhlenbeck_mse(theta: Real, rho: Real, time: Real, norm: Real, dimension: Real) -> Array:
    """Mean squared error (1 - e^{-theta t})^2 |f|^2 + (d rho^2 / theta)(1 - e^{-2 theta t}) of one release.

    theta, rho, time: > 0, as for `OrnsteinUhlenbeck`.
    norm: |f| >= 0, L2 norm of the value. dimension: d, whole, >= 1.

    >>> print(f"{jaxdp.diffusion.ornstein_uhlenbeck_mse(1.0, 1.0, 1.0, norm=1.0, dimension=10):.4f}")
    9.0462

    Returns the mean squared error of the broadcast shape, float64. Raises ValueError.
    Reference: Equation (4).
    """
    bias = -xp.expm1(-theta * time) * norm
    return xp.square(bias) + xp.square(rho) * dimension / theta * -xp.expm1(-2 * theta * time)


def gaussian_mse(lam: Real, sensitivity: Real, dimension: Real, *, radius: Real | None = None) -> Array:
    """Mean squared error d s^2 of Gaussian noise with Renyi divergence alpha Lambda, s^2 = Delta^2 / (2 Lambda).

    lam: Lambda > 0 in nats, Renyi divergence per unit of order. sensitivity: Delta > 0 in L2.
    dimension: d, whole, >= 1.
    radius: R > 0 with |f| <= R for all data sets. If given, the release is rescaled by the best constant, and the
        result is the worst-case error d s^2 / (1 + d s^2 / R^2).

    >>> print(jaxdp.diffusion.gaussian_mse(0.5, 1.0, 10))
    10.0

    Returns the mean squared error of the broadcast shape, float64. Raises ValueError.
    """
    # Without a radius: the square of the largest double overflows to inf, so noise / radius^2 is 0.
    return _rescaled_mse(lam, sensitivity, dimension, np.finfo(np.float64).max if radius is None else radius)


@theorem(lam=POSITIVE, sensitivity=POSITIVE, dimension=whole(1), radius=POSITIVE)
def _rescaled_mse(lam, sensitivity, dimension, radius):
    noise = dimension * sensitivity**2 / (2 * lam)
    return noise / (1 + noise / radius**2)


def calibrate_ornstein_uhlenbeck(rdp: Real, sensitivity: Real, radius: Real, dimension: Real) -> OUParameters:
    """Parameters of an (alpha, alpha rdp)-RDP mechanism with 1 + d Delta^2/(2 rdp R^2) times less error than Gaussian.

    theta = log(1 + d Delta^2 / (2 rdp R^2)), rho^2 = theta Delta^2 / (2 rdp (e^{2 theta} - 1)), t = 1.

    rdp, sensitivity, dimension: as lam, sensitivity and dimension of `gaussian_mse`.
    radius: R > 0 with |f| <= R for all data sets.

    >>> found = jaxdp.diffusion.calibrate_ornstein_uhlenbeck(rdp=0.5, sensitivity=1.0, radius=1.0, dimension=10)
    >>> print(f"error {found.mse_at_radius:.3f}, Gaussian {found.gaussian_mse:.3f}")
    error 0.909, Gaussian 10.000

    Returns OUParameters of the broadcast shape, float64. `ratio` is the ratio at |f| = R; for |f| < R the error is
    smaller. The error is below that of Gaussian noise at the time t = 1, but not always at other times, see
    `ornstein_uhlenbeck_beats_gaussian`. Raises ValueError.
    Reference: Theorem 8.
    """
    level, moved, bound, d = validate.all_inside(
        rdp=(POSITIVE, rdp),
        sensitivity=(POSITIVE, sensitivity),
        radius=(POSITIVE, radius),
        dimension=(whole(1), dimension),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        theta = np.log1p(d * moved**2 / (2 * level * bound**2))
        # rounded up: less noise would not be (alpha, alpha rdp)-RDP
        rho = np.sqrt(theta / (2 * level * np.expm1(2 * theta))) * moved * (1 + 8 * ULP)
    level, fit = np.broadcast_arrays(level, (theta > 0) & np.isfinite(theta) & (rho > 0) & np.isfinite(rho))
    validate.reject("rdp", level, ~fit, "such that theta and rho are > 0 and finite in float64")
    error = ornstein_uhlenbeck_mse(theta, rho, 1.0, bound, d)
    noise = gaussian_mse(level, moved, d)
    return OUParameters(theta[()], rho[()], 1.0, error, noise, error / noise)


@theorem(theta=POSITIVE, rho=POSITIVE, radius=POSITIVE, dimension=whole(1), vacuous=False)
def ornstein_uhlenbeck_beats_gaussian(theta: Real, rho: Real, radius: Real, dimension: Real) -> Array:
    """Whether theta R^2 <= 4 d rho^2: if and only if so, the error is at most that of Gaussian noise at every time.

    theta, rho, radius, dimension: as for `OrnsteinUhlenbeck` and `calibrate_ornstein_uhlenbeck`.

    >>> print(jaxdp.diffusion.ornstein_uhlenbeck_beats_gaussian(theta=1.0, rho=1.0, radius=1.0, dimension=10))
    True

    Returns booleans of the broadcast shape. Raises ValueError.
    Reference: Theorem 8.
    """
    return theta * xp.square(radius) <= 4 * dimension * xp.square(rho)


def diffusion_lambda(kappa: Callable[[np.ndarray], np.ndarray], time: Real) -> Quadrature:
    """Lambda(t) = integral over s > t of kappa(s), for a diffusion given by the function kappa; an estimate.

    kappa(s) = sup over neighbours and y of Gamma(log p_s(f(D), y) / p_s(f(D'), y)), with Gamma the carre du champ of
    the diffusion. The release at time t is (alpha, alpha Lambda(t))-RDP for all alpha.

    kappa: elementwise function of an array of s > 0, with values >= 0, integrable at infinity.
    time: t > 0, any shape.

    >>> print(f"{jaxdp.diffusion.diffusion_lambda(lambda s: 0.25 / s**2, 2.0).value:.4f}")  # Brownian motion
    0.1250

    Returns Quadrature(value, error) of the shape of time, value in nats, by Gauss-Legendre in log(s / t - 1). The error
    is an estimate, because kappa is known only at the nodes: check that it is small, and add it to the value. It is far
    too small if kappa decays too slowly (kappa = s^-1.1, t = 1: value 10, error 0.02, estimate 5e-4). Raises ValueError
    if kappa returns a negative or non-finite value or a wrong shape.
    Reference: Theorem 6.
    """
    start = validate.positive("time", time)
    fine, edge = _integral(kappa, start, _PANELS)
    coarse, _ = _integral(kappa, start, _PANELS // 2)
    return Quadrature(fine[()], (np.abs(fine - coarse) + edge + 1e-14 * fine)[()])


def _integral(kappa, start, panels):
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    width = (_LOG_RANGE[1] - _LOG_RANGE[0]) / panels
    u = _LOG_RANGE[0] + width * (np.arange(panels)[:, None] + 0.5 * (nodes + 1))
    # s = t (1 + e^u) makes the range independent of the unit of time.
    growth = np.exp(u)
    s = start[..., None, None] * (1 + growth)
    values = np.asarray(kappa(s), np.float64)
    if values.shape != s.shape:
        raise ValueError(f"kappa must return one value per time, got shape {values.shape} for {s.shape}.")
    validate.reject("kappa(s)", values, ~(np.isfinite(values) & (values >= 0)), "finite and >= 0")
    parts = (values * growth * weights * (width / 2)).sum(axis=-1) * start[..., None]
    return parts.sum(axis=-1), parts[..., 0] + parts[..., -1]


@theorem(order=LINEAR_ORDER, lam=NONNEGATIVE)
def renyi_from_lambda(order: Real, lam: Real) -> Array:
    """Renyi divergence alpha Lambda of a diffusion mechanism at order alpha >= 1.

    order: alpha. lam: Lambda >= 0 in nats, for example of `brownian_lambda` or `ornstein_uhlenbeck_lambda`.

    >>> print(f"{jaxdp.diffusion.renyi_from_lambda(4.0, 0.125):.4f}")
    0.5000

    Returns the divergence in nats of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 6.
    """
    return order * raised(lam)[0] * (1 + 4 * ULP)
