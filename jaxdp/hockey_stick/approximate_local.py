r"""Clones pair under approximate local privacy: every randomizer (eps0, delta0)-DP, certified upper bounds.

The total is delta(eps) of the clones pair plus the additive term (notebooks/proofs/stronger_clones.md, section 7)

    A(eps) = (E+1) delta0 [1/(E0+1) + (n-1) kappa],  kappa = e^-eps0 (E0+2)/(E0+1)  ("stronger": twice that),

and min(A, delta0) from eps = eps0 on: one report alone is (eps0, delta0)-DP. Kernels (`rate`, `size` static):

    approximate_delta_upper(num_users, eps0, delta0, epsilon, *, rate, size)      -> upper bound of delta
    approximate_epsilon_upper(num_users, eps0, delta0, delta, *, rate, size)      -> upper bound of epsilon, or inf
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdp.hockey_stick.clones import SIZE, clones_delta_bounds, clones_epsilon_upper
from jaxdp.precision import kernel
from jaxdp.rounding import ULP

_ROUNDS = 8
_WORKING_SET = 3_000_000
_ROUNDING = 1e-12
_FLUSHED = 1e-307  # what two exponentials lose where they underflow


def additive_term(num_users, eps0, delta0, epsilon, rate: str):
    """A(eps) above; infinite where it overflows or is not defined."""
    small = jnp.exp(-eps0)
    clones = (1.0 + 2.0 * small) / (1.0 + small)
    share = 1.0 / (1.0 + small) + (num_users - 1.0) * (clones if rate == "clones" else 2.0 * clones)
    # E delta0 / E0 as one exponential: each factor alone may overflow or underflow.
    log_delta0 = jnp.log(jnp.where(delta0 > 0, delta0, 1.0))
    grown = jnp.exp(epsilon - eps0 + log_delta0) + jnp.exp(log_delta0 - eps0) + _FLUSHED
    value = grown * share * (1.0 + _ROUNDING)
    return jnp.where(delta0 > 0, jnp.where(jnp.isnan(value), jnp.inf, value), 0.0)


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def approximate_delta_upper(num_users, eps0, delta0, epsilon, *, rate: str = "clones", size: int = SIZE):
    """Certified upper bound of delta(epsilon) with (eps0, delta0)-DP randomizers."""
    clean = clones_delta_bounds.point(num_users, eps0, epsilon, rate=rate, size=size).upper
    extra = additive_term(num_users, eps0, delta0, epsilon, rate)
    extra = jnp.where(epsilon >= eps0, jnp.minimum(extra, delta0), extra)
    total = jnp.minimum((clean + extra) * jnp.where(extra > 0, 1.0 + 2 * ULP, 1.0), 1.0)
    return jnp.where((delta0 >= 0) & (delta0 <= 1) & ~jnp.isnan(total), total, 1.0)


@kernel(static=("rate", "size"), working_set=_WORKING_SET)
def approximate_epsilon_upper(num_users, eps0, delta0, delta, *, rate: str = "clones", size: int = SIZE):
    """Certified upper bound of the smallest epsilon with total delta <= delta; inf where no epsilon is known.

    The total falls and rises again with epsilon. e is accepted when the clean epsilon at target
    delta - A(e) is at most e; e starts at 0, where A is least, and follows that clean epsilon upwards.
    """

    def body(i, state):
        tried, best, exact = state
        # The first round answers delta0 = 0: one more compiled copy of the search would cost seconds.
        room = delta - jnp.where(i == 0, 0.0, additive_term(num_users, eps0, delta0, tried, rate))
        clean = clones_epsilon_upper.point(num_users, eps0, jnp.maximum(room, 0.0), rate=rate, size=size)
        exact = jnp.where(i == 0, clean, exact)
        accepted = (i > 0) & (room > 0) & (clean <= tried)
        best = jnp.where(accepted, jnp.minimum(best, tried), best)
        # A little beyond the clean value, or the next test would fail by rounding.
        following = jnp.where(accepted | (room <= 0), tried, clean * (1.0 + 1e-9))
        return jnp.where(i == 0, 0.0, following), best, exact

    start = jnp.zeros_like(eps0 * delta)
    never = jnp.full_like(start, jnp.inf)
    _, best, exact = jax.lax.fori_loop(0, _ROUNDS + 1, body, (start, never, never))
    at_cap = jnp.minimum(additive_term(num_users, eps0, delta0, eps0, rate), delta0)
    best = jnp.where(at_cap <= delta, jnp.minimum(best, eps0), best)
    best = jnp.where(delta0 == 0, exact, best)
    valid = (delta0 >= 0) & (delta0 <= 1) & jnp.isfinite(exact)
    return jnp.where(valid, jnp.where(delta >= 1, 0.0, best), jnp.inf)
