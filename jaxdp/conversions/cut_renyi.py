"""Renyi DP of the Poisson-subsampled Gaussian with the far tail cut off, for "remove".

Past order about 2 sigma^2 log(1/q) the moment is ruled by outcomes so far out that their probability is far below
delta, and plain RDP pins there. Restrict every step to the outcomes below a cut: with p = P(above the cut) per step,

    delta(eps) <= 1 - (1 - p)^T + [bulk moment]^T e^{-c eps} c^c/(c+1)^(c+1),     c = order - 1,

since what is cut changes delta by at most its probability. At whole orders the bulk moment is a finite positive sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.conversions.rdp import TINY, _log_gain
from jaxdp.numerics import special
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import checked, formula

# Whole orders 2 .. _TERMS - 1; one term of the binomial sum each.
_TERMS = 2048
_ORDERS = np.unique(np.round(np.geomspace(2, _TERMS - 1, 48)))
# log_binomial_pmf is good to 1e-12 where it matters; the moment is charged ten times that.
_ERROR = 1e-11
# Shares of delta given to the cut tail; each is valid, the best is kept.
_SHARES = np.array([1e-6, 1e-3, 1e-2, 1e-1, 0.5])


def _log_moment(order: Any, sigma: Any, q: Any, cut: Any) -> Any:
    """log E_P0[A^order; u <= cut], A = 1 - q + q e^w, for a whole order; u in units of sigma."""
    j = jnp.arange(_TERMS, dtype=jnp.float64)
    pmf = special.log_binomial_pmf(j, order, q, 1 - q)
    shift = j / sigma
    away = shift - cut
    # right of the cut tilted and tail, of size j^2 / (2 sigma^2), cancel: their squares are subtracted by hand
    far = away > 0
    c = jnp.where(far & (cut > -jnp.inf), cut, 0.0)
    log_mills = jnp.log(special.mills(jnp.where(far, away, 0.0)))
    beyond = shift * (c - 0.5 / sigma) - 0.5 * c * c - special.LOG_SQRT_2PI + log_mills
    tilted = 0.5 * shift * ((j - 1) / sigma)
    inside = tilted + special.log_normal_tail(jnp.where(far, 0.0, away))
    # the slope of log mills, and of the tail on this side, is below 1
    size = shift + jnp.where(far, shift * (jnp.abs(c) + 0.5 / sigma) + 0.5 * c * c + jnp.abs(log_mills), tilted) + 1
    terms = pmf + jnp.where(far, beyond, inside) + 8 * ULP * (size + jnp.abs(pmf))
    value = jax.nn.logsumexp(jnp.where(j <= order, terms, -jnp.inf))
    return jnp.where(cut > -jnp.inf, value + _ERROR + 8 * ULP * jnp.abs(value), -jnp.inf)


def _tail(sigma: Any, q: Any, cut: Any) -> Any:
    """P(u > cut) under the mixture."""
    away = jnp.exp(special.log_normal_tail(cut))
    shift = cut - 1 / sigma
    # 1 / sigma and the difference are rounded, which the tail multiplies by its own argument
    shift = jnp.where(jnp.isfinite(shift), shift - 4 * ULP * (1 / sigma + jnp.abs(shift)), shift)
    mass = ((1 - q) * away + q * jnp.exp(special.log_normal_tail(shift))) * (1 + _ERROR)
    return jnp.where(cut == jnp.inf, 0.0, jnp.maximum(mass, TINY))


def _good(sigma: Any, q: Any) -> Any:
    return (sigma > 0) & (sigma < jnp.inf) & (q > 0) & (q < 1)


@formula(valid=lambda a, s, q, c: _good(s, q) & (a >= 2) & (a < _TERMS) & (a == jnp.floor(a)), working_set=4 * _TERMS)
def _cut_renyi(order, sigma, q, cut):
    value = _log_moment(order, sigma, q, cut) / (order - 1)
    return value + jnp.where(cut > -jnp.inf, 2 * ULP * jnp.abs(value), 0.0)


def cut_renyi(order: Any, noise_multiplier: Any, sampling_probability: Any, cut: Any) -> Any:
    """K_bulk(a - 1)/(a - 1), the Renyi curve of one step restricted to outcomes below the cut; may be negative.

    order: whole, 2 to 2047; noise_multiplier: sigma > 0; sampling_probability: q in (0, 1); cut: in standard
    deviations of the noise (inf: the plain Renyi divergence). All broadcast. Upper bound; charged are
    1e-11/(a-1) and the rounding of the terms, 1e-15 of their size.
    """
    a = order if validate.is_traced(order) else validate.integer("order", order, 2)
    if not validate.is_traced(a):
        validate.reject("order", a, a >= _TERMS, f"below {_TERMS}")
    return _cut_renyi(a, *_parameters(noise_multiplier, sampling_probability), _number("cut", cut))


def cut_mass(noise_multiplier: Any, sampling_probability: Any, cut: Any) -> Any:
    """P(outcome above the cut) of one step, with the record present: an upper bound. Arguments as for `cut_renyi`."""
    return _cut_mass(*_parameters(noise_multiplier, sampling_probability), _number("cut", cut))


@formula(valid=lambda s, q, c: _good(s, q), vacuous=1.0)
def _cut_mass(sigma, q, cut):
    return jnp.minimum(_tail(sigma, q, cut), 1.0)


@formula(valid=lambda s, q, t, d: _good(s, q) & (t >= 1) & (d > 0), working_set=8 * _TERMS)
def _cut_epsilon(sigma, q, times, delta):
    orders = jnp.asarray(_ORDERS)
    excess = orders - 1

    def at_share(share: Any) -> Any:
        cut = jnp.sqrt(2 * jnp.maximum(jnp.log(times) - jnp.log(delta * share), 0.0)) + 1 / sigma
        lost = times * _tail(sigma, q, cut)
        room = jnp.where(lost < delta, delta - lost, 1.0) * (1 - 1e-15)
        moment = jax.lax.map(lambda a: _log_moment(a, sigma, q, cut), orders)
        gain, goal = _log_gain(excess), jnp.log(room)
        value = times * moment + gain - goal
        size = jnp.abs(times * moment) + jnp.abs(gain) + jnp.abs(goal)
        return jnp.where(lost < delta, jnp.min((value + 1e-14 * size) / excess), jnp.inf)

    return jnp.maximum(jnp.min(jax.lax.map(at_share, jnp.asarray(_SHARES))), 0.0)


def cut_renyi_epsilon(noise_multiplier: Any, sampling_probability: Any, times: Any, delta: Any) -> Any:
    """Certified epsilon at delta of ``times`` steps of the Poisson-subsampled Gaussian, "remove", by cut Renyi.

    The smallest over 48 whole orders up to 2047 and five shares of delta for the cut tail; each pair is valid. Where
    no order needs the cut it is the CKS conversion of plain RDP at whole orders, up to the share. "add" has no
    such explosion: use the plain curve there.

    Args:
        noise_multiplier: sigma > 0; sampling_probability: q in (0, 1); times: whole, >= 1; delta: in (0, 1]. Broadcast.

    """
    t = times if validate.is_traced(times) else validate.integer("times", times, 1)
    return _cut_epsilon(*_parameters(noise_multiplier, sampling_probability), t, _open_probability("delta", delta))


def _open_probability(name: str, value: Any) -> Any:
    if validate.is_traced(value):
        return value
    array = validate.probability(name, value)
    validate.reject(name, array, array == 0, "in (0, 1]")
    return array


def _number(name: str, value: Any) -> Any:
    if validate.is_traced(value):
        return value
    array = validate.real_array(name, value)
    validate.reject(name, array, np.isnan(array), "a real number or inf")
    return array


def _parameters(sigma: Any, q: Any) -> list[Any]:
    sigma, q = checked(noise_multiplier=(validate.positive, sigma), sampling_probability=(validate.probability, q))
    if not validate.is_traced(q):
        validate.reject("sampling_probability", q, (q == 0) | (q == 1), "in (0, 1)")
    return [sigma, q]
