"""A private mechanism followed by a kernel of which one mixing coefficient is known: Theorem 1.

Theorem numbers are those of Balle, Barthe, Gaboardi, Geumlek 2019, "Privacy amplification by mixing and diffusion
mechanisms".
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import SMALLEST
from jaxdp.runtime.formulas import checked, formula
from jaxdp.typing import Array, Real

_UP = 1.0 + 2.0**-48
_DOWN = 1.0 - 2.0**-48


class Guarantee(NamedTuple):
    """An (epsilon, delta) guarantee: the result of an amplification theorem.

    epsilon: in nats, >= 0.
    delta: in [0, 1].

    >>> import jaxdp
    >>> amplified = jaxdp.mixing.Guarantee(epsilon=1.0, delta=1e-6)
    >>> jaxdp.ApproximateDP(*amplified)  # a mechanism that composes with others
    ApproximateDP(epsilon=1.0, delta=1e-06)
    """

    epsilon: Array
    delta: Array


def _arguments(epsilon, delta, gamma):
    """The three arguments, checked; positive ones are at least the smallest normal number: every bound increases."""
    arguments = checked(
        epsilon=(validate.nonnegative, epsilon),
        delta=(validate.probability, delta),
        gamma=(validate.probability, gamma),
    )
    return [a if validate.is_traced(a) else np.where(a > 0, np.maximum(a, SMALLEST), 0.0) for a in arguments]


def _guarantee(epsilon, delta):
    if validate.is_traced(epsilon, delta):
        known = (jnp.asarray(epsilon) >= 0) & (jnp.asarray(delta) >= 0)
        return Guarantee(*jnp.broadcast_arrays(jnp.where(known, epsilon, jnp.inf), jnp.where(known, delta, 1.0)))
    return Guarantee(*(a[()] for a in np.broadcast_arrays(epsilon, delta)))


def rounded_up(value, positive):
    """The value rounded up; where the exact value is positive, never 0."""
    return jnp.where(positive, jnp.maximum(value * _UP, SMALLEST), 0.0)


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0), vacuous=1.0)
def _times(epsilon, delta, gamma):
    return jnp.minimum(rounded_up(gamma * delta, (gamma > 0) & (delta > 0)), 1.0)


@formula(valid=lambda e, g: (g >= 0) & (g <= 1) & (e >= 0))
def _mixed_epsilon(epsilon, gamma):
    # log(1 + g (e^eps - 1)). The exponential overflows past eps = 709; from 500 on e^eps - 1 rounds to e^eps.
    direct = jnp.log1p(gamma * jnp.expm1(jnp.minimum(epsilon, 500.0)))
    log_gamma = jnp.log(jnp.where(gamma > 0, gamma, 1.0))
    grown = epsilon + log_gamma + 2.0**-51 * (epsilon - log_gamma)  # charge for rounding at the size of the two terms
    large = jnp.where(grown < 30.0, jnp.log1p(jnp.exp(jnp.minimum(grown, 30.0))), grown + jnp.exp(-grown))
    return rounded_up(jnp.where(epsilon < 500.0, direct, large), (epsilon > 0) & (gamma > 0))


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0) & (d <= 1) & (e >= 0), vacuous=1.0)
def _doeblin_delta(epsilon, delta, gamma):
    # 1 - e^{eps'-eps} (1 - delta) with e^{eps'-eps} = 1 - (1-g)(1 - e^{-eps}) keeps the digits of a small delta.
    shrink = (1 - gamma) * -jnp.expm1(-epsilon)
    positive = (gamma > 0) & ((delta > 0) | ((epsilon > 0) & (gamma < 1)))
    return jnp.minimum(rounded_up(gamma * (shrink + (1 - shrink) * delta), positive), 1.0)


@formula(valid=lambda e, d, g: (g >= 0) & (g <= 1) & (d >= 0) & (d <= 1) & (e >= 0), vacuous=1.0)
def _ultra_delta(epsilon, delta, gamma):
    # e^{eps'-eps} = g + (1-g) e^{-eps} as a sum: 1 - (1-g)(1 - e^{-eps}) loses all digits where both are small.
    kept = gamma + (1 - gamma) * jnp.exp(-epsilon)
    return jnp.minimum(rounded_up(gamma * delta * kept, (gamma > 0) & (delta > 0)), 1.0)


def dobrushin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a gamma-Dobrushin kernel.

    A kernel K is gamma-Dobrushin when the total variation distance of K(x) and K(x') is at most gamma for all x, x'.

    epsilon: of the mechanism in nats, >= 0.
    delta: of the mechanism, in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `dobrushin_coefficient`.

    >>> from jaxdp import mixing
    >>> print("epsilon {:.2f}, delta {:.1e}".format(*mixing.dobrushin_amplification(1.0, 1e-5, 0.5)))
    epsilon 1.00, delta 5.0e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1, case 1.
    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    return _guarantee(eps, _times(eps, d, g))


def hockey_stick_amplification(epsilon: Real, delta: Real, gamma: Real, level: Real) -> Guarantee:
    """Guarantee (epsilon, gamma delta) of a mechanism followed by a (gamma, level)-Dobrushin kernel.

    The kernel K satisfies H_{e^level}(K(x), K(x')) <= gamma for all x, x', where H is the hockey-stick divergence.
    The theorem holds for levels up to `required_level` = log(1 + (e^eps - 1)/delta).

    epsilon: of the mechanism in nats, >= 0.
    delta: of the mechanism, in [0, 1].
    gamma: coefficient of the kernel at this level, in [0, 1]; see `hockey_stick_coefficient`.
    level: >= 0, inf allowed. The coefficient decreases in the level.

    >>> from jaxdp import mixing
    >>> print("epsilon {:.2f}, delta {:.1e}".format(*mixing.hockey_stick_amplification(1.0, 1e-5, 0.1, 2.0)))
    epsilon 1.00, delta 1.0e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Under a trace a level above the required one gives
    (epsilon, delta). Raises ValueError, also for a level above the required one.
    Reference: Theorem 1, case 2.
    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    (at,) = checked(level=(checked_level, level))
    if validate.is_traced(eps, d, at):
        inside = at <= required_level(eps, d)
        return _guarantee(eps, jnp.where(inside, _times(eps, d, g), jnp.minimum(d, 1.0)))
    at, limit = np.broadcast_arrays(at, required_level(eps, d))
    validate.reject("level", at, at > limit, "at most log(1 + (e^eps - 1)/delta)")
    return _guarantee(eps, _times(eps, d, g))


def checked_level(name, value):
    """A level of the hockey-stick divergence: >= 0, inf allowed (it belongs to delta = 0)."""
    array = validate.real_array(name, value)
    validate.reject(name, array, ~(array >= 0), ">= 0")
    return array


@formula(valid=lambda e, d: (e >= 0) & (d >= 0), vacuous=0.0)
def _required(epsilon, delta):
    grown, share = jnp.expm1(jnp.minimum(epsilon, 500.0)), jnp.where(delta > 0, delta, 1.0)
    ratio = grown / share
    # log(1 + ratio) is log(ratio) where the ratio is huge, and the ratio may overflow
    large = jnp.where(epsilon < 500.0, jnp.log(grown), epsilon) - jnp.log(share)
    # rounded down, so that no level above the exact limit is accepted
    return jnp.where(delta > 0, jnp.where(ratio < 1e100, jnp.log1p(ratio), large) * _DOWN, jnp.inf)


def required_level(epsilon: Real, delta: Real) -> Array:
    """Largest level log(1 + (e^eps - 1)/delta) at which Theorem 1, case 2, holds; inf at delta = 0.

    epsilon: of the mechanism in nats, >= 0.
    delta: of the mechanism, in [0, 1].

    >>> from jaxdp import mixing
    >>> print(f"{mixing.required_level(1.0, 1e-5):.3f}")
    12.054

    Returns the level of the broadcast shape in nats, float64, rounded down. Raises ValueError.
    """
    return _required(*_arguments(epsilon, delta, 1.0)[:2])


def doeblin_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-Doeblin kernel.

    A kernel K is gamma-Doeblin when K(x) >= (1 - gamma) omega for all x and one law omega. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma (1 - e^{eps'-eps} (1 - delta)), which is > 0 even at delta = 0.

    epsilon: of the mechanism in nats, >= 0.
    delta: of the mechanism, in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `doeblin_coefficient`.

    >>> from jaxdp import mixing
    >>> print("epsilon {:.4f}, delta {:.4f}".format(*mixing.doeblin_amplification(1.0, 1e-5, 0.5)))
    epsilon 0.6201, delta 0.1580

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1, case 3.
    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    return _guarantee(_mixed_epsilon(eps, g), _doeblin_delta(eps, d, g))


def ultra_mixing_amplification(epsilon: Real, delta: Real, gamma: Real) -> Guarantee:
    """Guarantee (eps', delta') of a mechanism followed by a gamma-ultra-mixing kernel.

    A kernel K is gamma-ultra-mixing when dK(x)/dK(x') >= 1 - gamma everywhere, for all x, x'. Then
    eps' = log(1 + gamma (e^eps - 1)) and delta' = gamma delta e^{eps'-eps}.

    epsilon: of the mechanism in nats, >= 0.
    delta: of the mechanism, in [0, 1].
    gamma: coefficient of the kernel, in [0, 1]; see `ultra_mixing_coefficient`.

    >>> from jaxdp import mixing
    >>> print("epsilon {:.4f}, delta {:.2e}".format(*mixing.ultra_mixing_amplification(1.0, 1e-5, 0.5)))
    epsilon 0.6201, delta 3.42e-06

    Returns a Guarantee of the broadcast shape, float64, rounded up. Raises ValueError.
    Reference: Theorem 1, case 4.
    """
    eps, d, g = _arguments(epsilon, delta, gamma)
    return _guarantee(_mixed_epsilon(eps, g), _ultra_delta(eps, d, g))
