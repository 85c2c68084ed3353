"""Mechanisms that are Gaussian-DP: one number, mu."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from jaxdp.domains import NONNEGATIVE, SMALLEST, field
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.base import Mechanism, record
from jaxdp.mechanisms.finite import FinitePair
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.typing import Array, Number, RealField


class GaussianMechanism(Mechanism):
    """A mechanism whose trade-off function is exactly (or at least) that of N(mu, 1) against N(0, 1)."""

    symmetric: ClassVar[bool] = True

    def gaussian_mu(self) -> Number:
        """The Gaussian-DP parameter mu of one parameter point."""
        raise self._undefined("gaussian_mu")

    def mu_excess(self, mu: Number) -> Number:
        """How far, relative, ``gaussian_mu`` may be above the truth, other than by 8 units of rounding."""
        return 0.0

    def is_exact(self, direction: str) -> bool:
        """False for a record with a ``mu_excess`` of its own."""
        return type(self).mu_excess is GaussianMechanism.mu_excess

    def enclosing_records(self, direction: str, fine: bool) -> tuple[Mechanism, Mechanism]:
        """Records of the mu computed, and of one that is not above the truth."""
        with on_host():
            mu = xp.vmap(gaussian_mus)(self)
            excess = xp.vmap(xp.vmap(lambda one, mu: xp.asarray(one.mu_excess(mu))))(self, mu)
            return OfMu(mu), OfMu(xp.where((mu > 0) & (excess < 1), mu * (1 - 1e-15 - excess), 0.0))

    def enclosing_pair(self, inner: bool, fine: bool) -> FinitePair:
        """A pair on cells of the outcomes; the inner one is dominated where ``mu_excess`` is 0."""
        return (finite.gaussian_inner_pair if inner else finite.gaussian_pair)(self.gaussian_mu(), fine)

    def tail_moment(self, order: Number) -> tuple[Number, Number]:
        """Beyond 37.5 standard deviations."""
        return finite.gaussian_tail_moment(self.gaussian_mu(), order)

    def renyi_divergence(self, order: Number) -> Number:
        """order mu^2 / 2."""
        return gaussian_renyi(order, self.gaussian_mu())

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) = z (z + 1) mu^2 / 2 (Zhu, Dong, Wang 2022, Lemma 34)."""
        return z * (z + 1) * (self.gaussian_mu() ** 2 / 2)


@record
class OfMu(GaussianMechanism):
    """Gaussian-DP with this mu."""

    mu: RealField = field(NONNEGATIVE)

    def gaussian_mu(self) -> Number:
        """Mu."""
        return self.mu


def gaussian_renyi(order: Number, mu: Number) -> Number:
    """order mu^2 / 2, what underflows rounded up."""
    return xp.where(mu == 0, 0.0, xp.maximum(order * mu * mu / 2, SMALLEST))  # the square of a small mu is 0


def gaussian_mus(stack: Any) -> Array:
    """mu of each member of a stack of Gaussian-DP records at one parameter point."""
    return xp.vmap(lambda one: xp.asarray(one.gaussian_mu()))(stack)
