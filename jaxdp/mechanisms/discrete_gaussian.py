"""The discrete Gaussian and its theta function at complex order."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from jaxdp.domains import POSITIVE, field, whole
from jaxdp.mechanisms import finite, lattice_gaussian
from jaxdp.mechanisms.base import Mechanism, record
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Number, RealField

_TERMS = 12
# Below this sigma the direct sum needs few terms, above it the Poisson-dual sum does.
_SWITCH = 0.5


@record
class DiscreteGaussian(Mechanism):
    """Discrete Gaussian noise N_Z(0, sigma^2) on a query with one whole answer.

    sigma: > 0, any shape.
    sensitivity: s, bound of the size of one record's contribution, a whole number >= 1, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.DiscreteGaussian(sigma=2.0), delta=1e-5):.4f}")
    2.0113

    Assumes: the answer is a whole number, and the bound holds for every record that could be there; noise fresh for
    every release, drawn exactly on the integers; one sample, not a sum of those of several parties.

    Under replace_one two data sets differ by 2 s.
    The pair of shifted laws dominates (Zhu, Dong, Wang 2022, section 4.1):
    K(z) = z (z+1) s^2 / (2 sigma^2) + log[theta(z s) / theta(0)], theta(x) = sum_k exp(-(k+x)^2 / (2 sigma^2)).
    """

    sigma: RealField = field(POSITIVE)
    sensitivity: RealField = field(whole(1), default=1)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """The Gaussian exponent plus the theta ratio."""
        s, variance = self.sensitivity, self.sigma**2
        log_ratio = _log_theta(z * s, self.sigma) - xp.real(_log_theta(xp.zeros((), z.dtype), self.sigma))
        return z * (z + 1) * s**2 / (2 * variance) + log_ratio

    def at_distance(self, distance: Number) -> DiscreteGaussian:
        """As many times the shift."""
        return DiscreteGaussian(self.sigma, self.sensitivity * distance)

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses s^2/(2 sigma^2) - s x / sigma^2."""
        variance = self.sigma**2
        return self.sensitivity**2 / (2 * variance), self.sensitivity / variance

    def finite_pair(self) -> finite.FinitePair:
        """A pair on cells of integers that dominates; used when the mechanism is sampled."""
        return lattice_gaussian.discrete_gaussian_pair(self.sigma, self.sensitivity)

    def enclosing_pairs(self, fine: bool) -> tuple[finite.FinitePair, finite.FinitePair]:
        """Pairs on the same cells, the first of which dominates, while the second is dominated."""
        outer, inner = lattice_gaussian.discrete_gaussian_pair, lattice_gaussian.discrete_gaussian_inner_pair
        return outer(self.sigma, self.sensitivity, fine), inner(self.sigma, self.sensitivity, fine)


def _log_theta(x: jax.Array, sigma: Any) -> jax.Array:
    """log theta, up to a constant that depends on sigma only.

    theta(x + 1) = theta(x) and theta(x + 2 pi i sigma^2) = exp(2 pi^2 sigma^2 - 2 pi i x) theta(x): reduce
    both parts first, so that a dozen terms of either sum suffice.
    """
    x = x - xp.round(xp.real(x))
    period = 2 * xp.pi * sigma**2
    turns = xp.round(xp.imag(x) / period)
    base = x - 1j * period * turns if xp.iscomplexobj(x) else x
    factor = 2 * xp.pi**2 * sigma**2 * turns**2 - 2j * xp.pi * turns * base if xp.iscomplexobj(x) else 0.0
    k = xp.arange(-_TERMS, _TERMS + 1)
    direct = -((k + base[..., None]) ** 2) / (2 * sigma**2)
    dual = -2 * xp.pi**2 * sigma**2 * k**2 + 2j * xp.pi * k * base[..., None]
    exponents = xp.where(sigma < _SWITCH, direct, dual)
    shift = xp.stop_gradient(xp.max(xp.real(exponents), axis=-1, keepdims=True))
    total = xp.log(xp.sum(xp.exp(exponents - shift), axis=-1)) + shift[..., 0] + factor
    return total if xp.iscomplexobj(x) else xp.real(total)
