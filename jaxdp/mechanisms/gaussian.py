"""Mechanisms that are mu-Gaussian-DP: the number mu describes their privacy."""

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
        """Bound of the relative excess of ``gaussian_mu`` over the true mu, in addition to 8 units of 2^-53."""
        return 0.0

    def is_exact(self, direction: str) -> bool:
        """Whether ``gaussian_mu`` is exact up to rounding: the class does not override ``mu_excess``."""
        return type(self).mu_excess is GaussianMechanism.mu_excess

    def enclosing_records(self, direction: str, fine: bool) -> tuple[Mechanism, Mechanism]:
        """Records with the computed mu, which is an upper bound, and with a mu that is not above the true one."""
        with on_host():
            mu = xp.vmap(gaussian_mus)(self)
            excess = xp.vmap(xp.vmap(lambda member, mu: xp.asarray(member.mu_excess(mu))))(self, mu)
            return OfMu(mu), OfMu(xp.where((mu > 0) & (excess < 1), mu * (1 - 1e-15 - excess), 0.0))

    def enclosing_pair(self, inner: bool, fine: bool) -> FinitePair:
        """A pair made by cutting the outcomes into cells; the inner pair is dominated only if ``mu_excess`` is 0."""
        return (finite.gaussian_inner_pair if inner else finite.gaussian_pair)(self.gaussian_mu(), fine)

    def tail_moment(self, order: Number) -> tuple[Number, Number]:
        """(log of a bound of the moment, least loss) of the outcomes beyond 37.5 standard deviations."""
        return finite.gaussian_tail_moment(self.gaussian_mu(), order)

    def max_loss(self) -> Number:
        """Infinite, but 0 for mu = 0: both laws are the same. ``gaussian_mu`` is 0 only where the true mu is 0."""
        return xp.where(xp.asarray(self.gaussian_mu()) == 0, 0.0, xp.inf)

    def renyi_divergence(self, order: Number) -> Number:
        """order mu^2 / 2, where it is positive at least the smallest normal number."""
        return gaussian_renyi(order, self.gaussian_mu())

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) = z (z + 1) mu^2 / 2 (Zhu, Dong, Wang 2022, Lemma 34)."""
        return z * (z + 1) * (self.gaussian_mu() ** 2 / 2)


@record
class OfMu(GaussianMechanism):
    """A mechanism that is mu-Gaussian-DP for the given mu."""

    mu: RealField = field(NONNEGATIVE)

    def gaussian_mu(self) -> Number:
        """The field mu."""
        return self.mu


def gaussian_renyi(order: Number, mu: Number) -> Number:
    """order mu^2 / 2, where it is positive at least the smallest normal number."""
    return xp.where(mu == 0, 0.0, xp.maximum(order * mu * mu / 2, SMALLEST))  # mu * mu underflows to 0 for small mu


def gaussian_mus(stack: Any) -> Array:
    """The mu of each member of a stack of Gaussian-DP records at one parameter point."""
    return xp.vmap(lambda member: xp.asarray(member.gaussian_mu()))(stack)
