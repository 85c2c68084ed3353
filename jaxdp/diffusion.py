"""Diffusion mechanisms: Brownian motion and Ornstein-Uhlenbeck as records that account and sample.

Theorem numbers are those of Balle, Barthe, Gaboardi, Geumlek 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp import validate
from jaxdp.domains import POSITIVE, field
from jaxdp.mechanisms.base import GaussianMechanism, record
from jaxdp.numerics import samplers
from jaxdp.runtime.formulas import at_least_one, checked, formula

_NODES = 15
_PANELS = 512
# Integration variable u = log(s - t) over this range: the neglected pieces are tested by the error estimate.
_LOG_RANGE = (-40.0, 60.0)
# A smaller mu is answered as this one: 0 would claim perfect privacy. No lower bound is given from 1e-150 down.
_SMALLEST_MU = 0.99e-150
_SMALLEST_LAMBDA = 2.3e-308
_UP = 1.0 + 2.0**-49  # a dozen roundings
_LOG_UP = 1.0 + 1e-12  # a sum of logarithms, each below 1500


class Quadrature(NamedTuple):
    """An integral and an estimate of its absolute error (difference of two rules, not a certificate)."""

    value: Any
    error: Any


class OUParameters(NamedTuple):
    """Parameters of an Ornstein-Uhlenbeck mechanism at time 1, and its error relative to Gaussian noise."""

    theta: Any
    rho: Any
    time: Any
    mse_at_radius: Any
    gaussian_mse: Any
    ratio: Any


def _product_error(a, b):
    """a * b minus its rounded value, from parts of half the digits each."""
    high, other = (lax.reduce_precision(v, 11, 25) for v in (a, b))
    low, rest = a - high, b - other
    error = ((high * other - a * b) + (high * rest + low * other)) + low * rest
    return lax.stop_gradient(jnp.where(jnp.isfinite(error), error, 0.0))


def _ou_mu(theta, rho, time, sensitivity):
    """(sensitivity / rho) sqrt(theta) e^{-theta t} / sqrt(1 - e^{-2 theta t}), rounded up; e^{2 theta t} overflows."""
    theta, rho, time, sensitivity = jnp.broadcast_arrays(*map(jnp.asarray, (theta, rho, time, sensitivity)))
    pull = theta * time
    spread = -jnp.expm1(-2 * pull)
    half = jnp.exp(-0.5 * pull)
    parts = sensitivity / rho, sensitivity / rho * half, half * jnp.sqrt(theta / spread)
    # The rounding of theta t is seen magnified in its exponential.
    direct = parts[1] * parts[2] * (1 - _product_error(theta, time)) * _UP
    log_mu = jnp.log(sensitivity) - jnp.log(rho) + 0.5 * (jnp.log(theta) - jnp.log(spread)) - pull
    far = jnp.exp(log_mu) * _LOG_UP  # where a factor alone leaves the range
    normal = (spread > 1e-290) & (pull < 1e3)
    for part in parts:
        normal = normal & (part > 1e-290) & (part < 1e290)
    return jnp.maximum(jnp.where(normal, direct, far), _SMALLEST_MU)


@record
class BrownianMotion(GaussianMechanism):
    """The value plus Brownian motion run for a time t: N(x, 2 t I); mu = sensitivity / sqrt(2 t).

    time: t > 0. sensitivity: Delta > 0 in L2. Any shape, they broadcast. Renyi divergence alpha Delta^2 / (4 t)
    (Examples 4 and 5), for the neighbouring relation that Delta belongs to.
    """

    time: Any = field(POSITIVE)
    sensitivity: Any = field(POSITIVE, default=1.0)

    def gaussian_mu(self) -> Any:
        """Mu = sensitivity / sqrt(2 time), at least 1e-150."""
        return jnp.maximum(self.sensitivity / jnp.sqrt(self.time) * (math.sqrt(0.5) * _UP), _SMALLEST_MU)

    def lam(self) -> Any:
        """Lambda(t) = Delta^2 / (4 t), the Renyi divergence per unit of order."""
        return brownian_lambda(self.time, self.sensitivity)

    def sample(self, key: jax.Array, value: jax.Array) -> jax.Array:
        """One release of `value`, in its dtype."""
        return samplers.brownian(key, value, time=self.time)

    def mse(self, dimension: Any) -> Any:
        """Mean squared error 2 t d of one release of d coordinates."""
        return 2 * np.asarray(self.time) * dimension


@record
class OrnsteinUhlenbeck(GaussianMechanism):
    """The value moved along dX = -theta X dt + sqrt(2) rho dW for a time t.

    The law at time t is N(e^{-theta t} x, (rho^2 / theta)(1 - e^{-2 theta t}) I), so
    mu^2 = 2 Lambda = theta Delta^2 / (rho^2 (e^{2 theta t} - 1)) exactly (Corollary 7).

    theta: > 0, pull towards 0. rho: > 0, noise level. time: t > 0. sensitivity: Delta > 0 in L2. They broadcast.
    theta -> 0 is Gaussian noise of variance 2 rho^2 t.
    """

    theta: Any = field(POSITIVE)
    rho: Any = field(POSITIVE)
    time: Any = field(POSITIVE)
    sensitivity: Any = field(POSITIVE, default=1.0)

    def gaussian_mu(self) -> Any:
        """Mu = (sensitivity / rho) sqrt(theta / expm1(2 theta time)), at least 1e-150."""
        return _ou_mu(self.theta, self.rho, self.time, self.sensitivity)

    def lam(self) -> Any:
        """Lambda(t) = theta Delta^2 / (2 rho^2 (e^{2 theta t} - 1)), the Renyi divergence per unit of order."""
        return ornstein_uhlenbeck_lambda(self.theta, self.rho, self.time, self.sensitivity)

    def sample(self, key: jax.Array, value: jax.Array) -> jax.Array:
        """One release of `value`, exact in law, in the dtype of value."""
        return samplers.ornstein_uhlenbeck(key, value, theta=self.theta, rho=self.rho, time=self.time)

    def mse(self, norm: Any, dimension: Any) -> Any:
        """Mean squared error of one release, see `ornstein_uhlenbeck_mse`."""
        return ornstein_uhlenbeck_mse(self.theta, self.rho, self.time, norm, dimension)


def _positive(**values):
    return checked(**{name: (validate.positive, value) for name, value in values.items()})


@formula(valid=lambda t, d: (t > 0) & (d > 0))
def _brownian_lambda(time, sensitivity):
    return jnp.maximum((sensitivity / jnp.sqrt(time)) ** 2 / 4 * _UP, _SMALLEST_LAMBDA)


def brownian_lambda(time: Any, sensitivity: Any = 1.0) -> Any:
    """Lambda(t) = Delta^2 / (4 t) of Brownian motion: the release is (alpha, alpha Lambda)-RDP for all alpha.

    Args:
        time: t > 0; sensitivity: Delta > 0.

    """
    return _brownian_lambda(*_positive(time=time, sensitivity=sensitivity))


@formula(valid=lambda th, rho, t, d: (th > 0) & (rho > 0) & (t > 0) & (d > 0))
def _ou_lambda(theta, rho, time, sensitivity):
    return _ou_mu(theta, rho, time, sensitivity) ** 2 / 2 * _UP


def ornstein_uhlenbeck_lambda(theta: Any, rho: Any, time: Any, sensitivity: Any = 1.0) -> Any:
    """Lambda(t) = theta Delta^2 / (2 rho^2 (e^{2 theta t} - 1)) of the Ornstein-Uhlenbeck mechanism (Corollary 7).

    Args:
        theta: > 0; rho: > 0; time: > 0; sensitivity: Delta > 0. All broadcast.

    """
    return _ou_lambda(*_positive(theta=theta, rho=rho, time=time, sensitivity=sensitivity))


@formula(valid=lambda th, rho, t, norm, d: (th > 0) & (rho > 0) & (t > 0) & (norm >= 0) & (d >= 1))
def _ou_mse(theta, rho, time, norm, dimension):
    bias = -jnp.expm1(-theta * time) * norm
    return bias**2 + dimension * rho**2 / theta * -jnp.expm1(-2 * theta * time)


def ornstein_uhlenbeck_mse(theta: Any, rho: Any, time: Any, norm: Any, dimension: Any) -> Any:
    """Mean squared error (1 - e^{-theta t})^2 |f|^2 + (d rho^2 / theta)(1 - e^{-2 theta t}).

    Args:
        theta: > 0; rho: > 0; time: > 0.
        norm: |f| >= 0, L2 norm of the value.
        dimension: d >= 1.

    Reference:
        Equation (4).

    """
    return _ou_mse(
        *_positive(theta=theta, rho=rho, time=time),
        *checked(norm=(validate.nonnegative, norm), dimension=(lambda n, v: validate.integer(n, v, 1), dimension)),
    )


def gaussian_mse(lam: Any, sensitivity: Any, dimension: Any, *, radius: Any = None) -> np.ndarray:
    """Mean squared error d s^2 of Gaussian noise with the same privacy, s^2 = Delta^2 / (2 Lambda).

    Args:
        lam: Lambda > 0, Renyi divergence per unit of order.
        sensitivity: Delta > 0.
        dimension: d >= 1.
        radius: R with |f| <= R: the worst-case error d s^2 / (1 + d s^2 / R^2) of the optimally rescaled release.

    """
    level, moved = _positive(lam=lam, sensitivity=sensitivity)
    noise = validate.integer("dimension", dimension, 1) * moved**2 / (2 * level)
    if radius is None:
        return noise[()]
    return (noise / (1 + noise / validate.positive("radius", radius) ** 2))[()]


def calibrate_ornstein_uhlenbeck(rdp: Any, sensitivity: Any, radius: Any, dimension: Any) -> OUParameters:
    """Parameters with (alpha, alpha rdp)-RDP whose error is a factor 1 + d Delta^2/(2 rdp R^2) below Gaussian noise.

    theta = log(1 + d Delta^2 / (2 rdp R^2)), rho^2 = theta Delta^2 / (2 rdp (e^{2 theta} - 1)), t = 1.

    Args:
        rdp: Renyi divergence per unit of order, > 0.
        sensitivity: Delta > 0.
        radius: R > 0, bound on |f| over all data sets.
        dimension: d >= 1.

    Returns:
        OUParameters; ``ratio`` is attained at |f| = R, smaller errors hold inside.

    Reference:
        Theorem 8. Better than Gaussian noise at this time t = 1; the condition for all times,
        `ornstein_uhlenbeck_beats_gaussian`, may fail for these parameters.

    """
    level, moved, bound = _positive(rdp=rdp, sensitivity=sensitivity, radius=radius)
    d = validate.integer("dimension", dimension, 1)
    theta = np.log1p(d * moved**2 / (2 * level * bound**2))
    rho = np.sqrt(theta / (2 * level * np.expm1(2 * theta))) * moved
    error = ornstein_uhlenbeck_mse(theta, rho, 1.0, bound, d)
    noise = gaussian_mse(level, moved, d)
    return OUParameters(theta[()], rho[()], 1.0, error, noise, error / noise)


def ornstein_uhlenbeck_beats_gaussian(theta: Any, rho: Any, radius: Any, dimension: Any) -> np.ndarray:
    """Condition theta R^2 <= 4 d rho^2 of Theorem 8: error at most that of Gaussian noise at every time.

    The condition is necessary as well as sufficient.
    """
    rate, noise, bound = _positive(theta=theta, rho=rho, radius=radius)
    return rate * bound**2 <= 4 * validate.integer("dimension", dimension, 1) * noise**2


def diffusion_lambda(kappa: Callable[[np.ndarray], np.ndarray], time: Any) -> Quadrature:
    """Lambda(t) = integral over s > t of kappa(s) for a user-given kappa, with an estimate of its error.

    kappa(s) = sup over neighbours and y of Gamma(log p_s(f(D), y) / p_s(f(D'), y)); then the release at time t is
    (alpha, alpha Lambda(t))-RDP (Theorem 6).

    Args:
        kappa: vectorised function of s > 0, >= 0, integrable at infinity.
        time: t > 0, any shape.

    Returns:
        Quadrature(value, error) of the shape of time. Gauss-Legendre in log(s - t); error is the difference
        to a rule of half the panels plus the outermost panels. An estimate: kappa is a black box, so add it to the
        value and check that it is small.

    Raises:
        ValueError: kappa returns a negative or non-finite value or a wrong shape.

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


def renyi_from_lambda(order: Any, lam: Any) -> np.ndarray:
    """Renyi divergence alpha Lambda at order alpha >= 1 (Theorem 6)."""
    return (at_least_one("order", order) * validate.nonnegative("lam", lam))[()]
