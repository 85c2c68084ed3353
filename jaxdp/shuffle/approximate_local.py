r"""Approximate local privacy: shuffled (eps0, delta0)-DP randomizers (Feldman, McMillan, Talwar 2021, Theorem 3.8).

The total is delta(eps) of a pair for eps0-DP randomizers plus an additive term A(eps), from eps = eps0 on plus
min(A(eps), delta0): one report alone is (eps0, delta0)-DP. This term is sharper than the published one, for both pairs
(notebooks/proofs/shuffle.md, section 10):

    A(eps) = (E+1) delta0 [1/(E0+1) + (n-1) kappa],  kappa = e^-eps0 (E0+2)/(E0+1)  ("stronger": twice that).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp.numerics.rounding import ULP
from jaxdp.shuffle import bounds
from jaxdp.validate import is_traced

_ROUNDS = 8
_ROUNDING = 1e-12
# Charge for two exponentials that may have underflowed.
_FLUSHED = 1e-307


def additive_term(users: Any, eps0: Any, delta0: Any, epsilon: Any, bound: str, published: bool = False) -> Any:
    """A(eps), or the published (E+1)(1 + e^-eps0/2) n delta0; infinite where it overflows or is not defined."""
    xp = jnp if is_traced(users, eps0, delta0, epsilon) else np
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        small = xp.exp(-eps0)
        if published:
            taken, share = 0.0, (1 + 0.5 * small) * users
        else:
            kappa = (1 + 2 * small) / (1 + small) * (1 if bound == "clones" else 2)
            taken, share = eps0, 1 / (1 + small) + (users - 1) * kappa
        # E delta0 / E0 as one exponential: each factor alone may overflow or underflow.
        log_delta0 = xp.log(xp.where(delta0 > 0, delta0, 1.0))
        value = (xp.exp(epsilon - taken + log_delta0) + xp.exp(log_delta0 - taken) + _FLUSHED) * share * (1 + _ROUNDING)
        return xp.where(delta0 > 0, xp.where(xp.isnan(value), np.inf, value), 0.0)


def delta_upper(clean: Any, users: Any, eps0: Any, delta0: Any, epsilon: Any, bound: str) -> Any:
    """Upper bound of delta; clean: that of the pair for eps0-DP randomizers, without delta0."""
    xp = jnp if is_traced(clean, users, eps0, delta0, epsilon) else np
    extra = additive_term(users, eps0, delta0, epsilon, bound)
    extra = xp.where(epsilon >= eps0, xp.minimum(extra, delta0), extra)
    return xp.minimum((clean + extra) * xp.where(extra > 0, 1.0 + 2 * ULP, 1.0), 1.0)


def epsilon_upper(
    clean: Callable[[Any], Any], users: Any, eps0: Any, delta0: Any, delta: Any, bound: str, loop: Callable
) -> Any:
    """Upper bound of the smallest epsilon with total delta <= delta; inf where none is known.

    clean: delta -> upper bound of epsilon of the pair for eps0-DP randomizers. The total delta decreases and then
    increases with epsilon. A candidate e is accepted when clean(delta - A(e)) <= e. The first one is 0, where A is
    smallest; each further one is the clean value of the one before. loop: `xp.fori_loop`, or the same for concrete
    arrays.
    """
    xp = jnp if is_traced(users, eps0, delta0, delta) else np

    def body(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        tried, best = state
        room = delta - additive_term(users, eps0, delta0, tried, bound)
        found = clean(xp.maximum(room, 0.0))
        accepted = (room > 0) & (found <= tried)
        best = xp.where(accepted, xp.minimum(best, tried), best)
        # The next candidate is a little above the clean value: the test would fail by rounding otherwise.
        return xp.where(accepted | (room <= 0), tried, found * (1 + 1e-9)), best

    start = xp.zeros_like(eps0 * delta)
    _, best = loop(0, _ROUNDS, body, (start, xp.full_like(start, np.inf)))
    at_cap = xp.minimum(additive_term(users, eps0, delta0, eps0, bound), delta0)
    best = xp.where(at_cap <= delta, xp.minimum(best, eps0), best)
    return xp.where(delta >= 1, 0.0, best)


def clones_upper(verb: str, users: Any, eps0: Any, local_delta: Any, target: Any, bound: str, gap: float = 1e-6) -> Any:
    """Upper bound of "delta" or "epsilon" (verb) by the clones pair, with the additive term where local_delta > 0."""
    upper = bounds.clones_bounds(verb, eps0, users, target, bound, gap).upper
    rows = np.flatnonzero(local_delta > 0)
    if rows.size:
        n, local, extra, aim = (x[rows] for x in (users, eps0, local_delta, target))
        if verb == "delta":
            upper[rows] = delta_upper(upper[rows], n, local, extra, aim, bound)
        else:
            upper[rows] = epsilon_upper(
                lambda d: bounds.clones_bounds("epsilon", local, n, d, bound, gap).upper,
                n, local, extra, aim, bound, _concrete_loop,
            )  # fmt: skip
    return upper


def _concrete_loop(start: int, stop: int, body: Callable, state: Any) -> Any:
    for i in range(start, stop):
        state = body(i, state)
    return state
