"""Renyi DP of the Poisson-subsampled Gaussian with the far tail cut off, for "remove".

From order about 2 sigma^2 log(1/q) on, the moment is dominated by outcomes so far out that their probability is far
below delta, and the plain conversion is loose. So every step is restricted to the outcomes below a cut. With p =
P(above the cut) per step and T steps,

    delta(eps) <= 1 - (1 - p)^T + [restricted moment]^T e^{-c eps} c^c/(c+1)^(c+1),     c = order - 1,

since the cut changes delta by at most its probability. At whole orders the restricted moment is a finite positive sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.conversions.rdp import log_gain
from jaxdp.domains import NOT_NAN, POSITIVE, SMALLEST, Domain, whole
from jaxdp.numerics import special
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import theorem
from jaxdp.typing import Array, Real

# Terms of the binomial sum, one a count; orders are whole and below this number.
_TERMS = 2048
_ORDERS = np.unique(np.round(np.geomspace(2, _TERMS - 1, 48)))
# Relative error charged to the moment: ten times that of log_binomial_pmf, 1e-12 in the terms that count.
_ERROR = 1e-11
# Shares of delta given to the cut tail. Each gives a valid bound, and the smallest bound is returned.
_SHARES = np.array([1e-6, 1e-3, 1e-2, 1e-1, 0.5])
_ORDER = Domain(
    lambda a: (a >= 2) & (a < _TERMS) & (a % 1 == 0), f"a whole number from 2 to {_TERMS - 1}", harmless=2.0, whole=True
)
_RATE = Domain(lambda q: (q > 0) & (q < 1), "in (0, 1)", harmless=0.5)
_STEP = {"noise_multiplier": POSITIVE, "sampling_probability": _RATE}
_TARGET = Domain(lambda delta: (delta > 0) & (delta <= 1), "in (0, 1]", harmless=0.5)


def _log_moment(order: jax.Array, sigma: jax.Array, q: jax.Array, cut: jax.Array) -> jax.Array:
    """log E_P0[A^order; u <= cut], A = 1 - q + q e^w, for a whole order; u in units of sigma."""
    j = jnp.arange(_TERMS, dtype=jnp.float64)
    pmf = special.log_binomial_pmf(j, order, q, 1 - q)
    shift = j / sigma
    away = shift - cut
    # Where shift > cut, `tilted` and the log tail, both of size j^2 / (2 sigma^2), would cancel; `beyond` is their sum
    # with the squares subtracted exactly.
    far = away > 0
    c = jnp.where(far & (cut > -jnp.inf), cut, 0.0)
    log_mills = jnp.log(special.mills(jnp.where(far, away, 0.0)))
    beyond = shift * (c - 0.5 / sigma) - 0.5 * c * c - special.LOG_SQRT_2PI + log_mills
    tilted = 0.5 * shift * ((j - 1) / sigma)
    inside = tilted + special.log_normal_tail(jnp.where(far, 0.0, away))
    # the derivatives of log mills, and of the log tail for away <= 0, are below 1 in size
    size = shift + jnp.where(far, shift * (jnp.abs(c) + 0.5 / sigma) + 0.5 * c * c + jnp.abs(log_mills), tilted) + 1
    terms = pmf + jnp.where(far, beyond, inside) + 8 * ULP * (size + jnp.abs(pmf))
    value = jax.nn.logsumexp(jnp.where(j <= order, terms, -jnp.inf))
    return jnp.where(cut > -jnp.inf, value + _ERROR + 8 * ULP * jnp.abs(value), -jnp.inf)


def _tail(sigma: jax.Array, q: jax.Array, cut: jax.Array) -> jax.Array:
    """P(u > cut) with the record present: under the mixture of N(0, 1) and N(1/sigma, 1)."""
    away = jnp.exp(special.log_normal_tail(cut))
    shift = cut - 1 / sigma
    # the rounding of 1 / sigma and of the difference counts as often as the argument of the tail is large
    shift = jnp.where(jnp.isfinite(shift), shift - 4 * ULP * (1 / sigma + jnp.abs(shift)), shift)
    mass = ((1 - q) * away + q * jnp.exp(special.log_normal_tail(shift))) * (1 + _ERROR)
    return jnp.where(cut == jnp.inf, 0.0, jnp.maximum(mass, SMALLEST))


@theorem(order=_ORDER, **_STEP, cut=NOT_NAN, working_set=4 * _TERMS)
def cut_renyi(order: Real, noise_multiplier: Real, sampling_probability: Real, cut: Real) -> Array:
    """Renyi curve K(a - 1)/(a - 1) of one subsampled Gaussian step restricted to the outcomes below a cut.

    order: a, whole, 2 to 2047.
    noise_multiplier: sigma > 0, noise over the norm bound of one record's contribution.
    sampling_probability: q in (0, 1).
    cut: in standard deviations of the noise; inf gives the plain Renyi divergence.

    >>> print(f"{jaxdp.conversions.cut_renyi(32, noise_multiplier=1.0, sampling_probability=0.01, cut=6.0):.4f}")
    0.5738

    Returns an upper bound in nats of the broadcast shape, float64; it may be negative. Charged are 1e-11/(a-1) and the
    rounding of the terms, 1e-15 of their size. Raises ValueError.
    """
    value = _log_moment(order, noise_multiplier, sampling_probability, cut) / (order - 1)
    return value + jnp.where(cut > -jnp.inf, 2 * ULP * jnp.abs(value), 0.0)


@theorem(**_STEP, cut=NOT_NAN, vacuous=1.0)
def cut_mass(noise_multiplier: Real, sampling_probability: Real, cut: Real) -> Array:
    """Probability of an outcome above the cut in one subsampled Gaussian step, with the record present.

    noise_multiplier, sampling_probability, cut: as for `cut_renyi`.

    >>> print(f"{jaxdp.conversions.cut_mass(noise_multiplier=1.0, sampling_probability=0.01, cut=6.0):.1e}")
    3.8e-09

    Returns an upper bound in [0, 1] of the broadcast shape, float64. Raises ValueError.
    """
    return jnp.minimum(_tail(noise_multiplier, sampling_probability, cut), 1.0)


@theorem(**_STEP, times=whole(1), delta=_TARGET, working_set=8 * _TERMS)
def cut_renyi_epsilon(noise_multiplier: Real, sampling_probability: Real, times: Real, delta: Real) -> Array:
    """Certified epsilon at delta of `times` Poisson-subsampled Gaussian steps, for "remove", by cut Renyi divergence.

    The smallest over 48 whole orders up to 2047 and five shares of delta for the cut tail. Where no order gains from
    the cut it is, up to that share, the conversion of Canonne, Kamath, Steinke of the plain Renyi curve at whole
    orders. For "add" the plain curve is not loose in this way: use `epsilon_from_rdp`.

    noise_multiplier, sampling_probability: as for `cut_renyi`.
    times: number of steps, whole, >= 1.
    delta: in (0, 1].

    >>> print(f"{jaxdp.conversions.cut_renyi_epsilon(1.0, 0.01, times=1000, delta=1e-6):.4f}")
    2.4176

    Returns an upper bound in nats of the broadcast shape, float64; `jaxdp.epsilon` is tighter. Raises ValueError.
    """
    orders = jnp.asarray(_ORDERS)
    excess = orders - 1

    def at_share(share: jax.Array) -> jax.Array:
        cut = jnp.sqrt(2 * jnp.maximum(jnp.log(times) - jnp.log(delta * share), 0.0)) + 1 / noise_multiplier
        lost = times * _tail(noise_multiplier, sampling_probability, cut)
        room = jnp.where(lost < delta, delta - lost, 1.0) * (1 - 1e-15)
        moment = jax.lax.map(lambda a: _log_moment(a, noise_multiplier, sampling_probability, cut), orders)
        gain, goal = log_gain(excess), jnp.log(room)
        value = times * moment + gain - goal
        size = jnp.abs(times * moment) + jnp.abs(gain) + jnp.abs(goal)
        return jnp.where(lost < delta, jnp.min((value + 1e-14 * size) / excess), jnp.inf)

    return jnp.maximum(jnp.min(jax.lax.map(at_share, jnp.asarray(_SHARES))), 0.0)
