"""A private mechanism followed by a kernel of which one mixing coefficient is known: Theorem 1.

Theorem numbers: see `jaxdp.mixing`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, NONNEGATIVE_OR_INFINITE, PROBABILITY, SMALLEST
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import theorem
from jaxdp.typing import Array, Real

UP = 1.0 + 2.0**-48
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
    return jnp.where(positive, jnp.maximum(value * UP, SMALLEST), 0.0)


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
