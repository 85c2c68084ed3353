"""Approximate local privacy: from (eps0, delta0)-DP randomizers to a central guarantee (FMT 2021, Theorem 3.8).

The total delta is that of a pair for eps0-DP randomizers plus the additive term A(eps) of `additive_term`. Proof of
the "sharp" term, for both pairs: notebooks/proofs/shuffle.md, section 10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import batched
from jaxdp.typing import Array, Real

_ROUNDS = 8
_ROUNDING = 1e-12
MOST_RAISED, _HALVINGS = 22.0, 7  # by which a local epsilon is raised: e^22 is more than there are people
_SHARES = (0.5, 0.9, 0.9, 0.9)  # of delta, for the additive term of the local epsilons tried
_FLUSHED = 1e-307  # charge for two exponentials that may have underflowed


def additive_term(users: Any, eps0: Any, delta0: Any, epsilon: Any, bound: str, published: bool = False) -> Any:
    """A(eps), "sharp" or "published" (see `approximate_ldp`); infinite where it overflows or is not defined."""
    xp = jnp if validate.is_traced(users, eps0, delta0, epsilon) else np
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


def total_delta(
    central: Any, users: Any, eps0: Any, delta0: Any, epsilon: Any, bound: str, published: bool = False
) -> Any:
    """Upper bound of delta; central: that of the pair for eps0-DP randomizers, at the same epsilon."""
    xp = jnp if validate.is_traced(central, users, eps0, delta0, epsilon) else np
    extra = additive_term(users, eps0, delta0, epsilon, bound, published)
    total = xp.minimum((central + extra) * xp.where(extra > 0, 1.0 + 2 * ULP, 1.0), 1.0)
    return xp.where(epsilon >= eps0, xp.minimum(total, delta0), total)  # one report alone is (eps0, delta0)-DP


def epsilon_upper(central: Callable[[Any], Any], users: Any, eps0: Any, delta0: Any, delta: Any, bound: str) -> Any:
    """Upper bound of the smallest epsilon with total delta <= delta; inf where none is known.

    central: delta -> upper bound of epsilon of the pair for eps0-DP randomizers.
    """

    def extra(epsilon: Any) -> Any:
        return additive_term(users, eps0, delta0, epsilon, bound)

    xp = jnp if validate.is_traced(users, eps0, delta0, delta) else np
    best = least_accepted(central, extra, delta + xp.zeros_like(eps0 * delta))
    at_eps0 = total_delta(0.0, users, eps0, delta0, eps0, bound)
    best = xp.where(at_eps0 <= delta, xp.minimum(best, eps0), best)
    return xp.where(delta >= 1, 0.0, best)


def over_weaker(
    verb: str, best: np.ndarray, central: Callable[..., Any], lost: Callable[..., Any], target: np.ndarray
) -> np.ndarray:
    """A bound of "epsilon" or "delta" (verb), or a better one: a report that is (e, d)-DP is (e + x, d)-DP for x >= 0.

    central: x and a target -> the bound without local deltas; it rises with x. lost: x and epsilon -> the additive
    terms; they fall with x.
    """
    nothing, by_delta = np.zeros(target.shape), verb == "epsilon"
    before = lost(nothing, nothing if by_delta else target)
    if not np.any(before > 0.01 * (target if by_delta else best)):
        return best
    if by_delta:
        at = np.fmin(best, 1.0)
        for share in _SHARES:
            too_much = functools.partial(_exceeds, lost, at, share * target)
            x = _halved(too_much, nothing + MOST_RAISED, 40)
            room = (target - lost(x, at)) * (1 - 2 * ULP)
            found = central(x, np.maximum(room, 0.0))
            taken = (room > 0) & (found <= at)  # the terms at ``found`` are not larger
            best = np.where(taken, np.fmin(best, found), best)
            at = np.fmin(np.where(taken, found * (1 + 1e-9), 2 * found), best)
        return best

    def is_less(x: np.ndarray) -> np.ndarray:
        nonlocal best
        extra = lost(x, target)
        total = np.minimum((central(x, target) + extra) * (1 + 2 * ULP), 1.0)
        best = np.fmin(best, total)
        return extra > 0.9 * total

    with np.errstate(all="ignore"):
        most = np.clip(np.log(before / np.maximum(best - before, 1e-300)), 0.0, MOST_RAISED)
    _halved(is_less, np.nan_to_num(most), _HALVINGS)
    return best


def _exceeds(lost: Callable[..., Any], epsilon: np.ndarray, most: np.ndarray, x: np.ndarray) -> np.ndarray:
    return lost(x, epsilon) > most


def _halved(is_less: Callable[[np.ndarray], np.ndarray], high: np.ndarray, times: int) -> np.ndarray:
    """The upper end of an interval of x around the place from which ``is_less`` is False; high: of the first one."""
    low = np.zeros(high.shape)
    for _ in range(times):
        middle = 0.5 * (low + high)
        less = is_less(middle)
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    return high


def least_accepted(central: Callable[[Any], Any], extra: Callable[[Any], Any], delta: Any, margin: float = 1e-9) -> Any:
    """The smallest e found with central(delta - extra(e)) <= e; inf where there is none.

    extra: epsilon -> what is added to delta there, increasing: the total decreases and then increases with epsilon. The
    first candidate is 0, where it is smallest; each further one is the central value of the one before, and a margin,
    relative: the test would fail by rounding otherwise.
    """

    def body(_: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        tried, best, _ = state
        room = (delta - extra(tried)) * (1 - 2 * ULP)
        found = central(xp.maximum(room, 0.0))
        accepted = (room > 0) & (found <= tried)
        settled = accepted | (room <= 0)
        return xp.where(settled, tried, found * (1 + margin)), xp.where(accepted, xp.fmin(best, tried), best), settled

    traced = validate.is_traced(delta, extra(delta))
    xp = jnp if traced else np
    start = xp.zeros_like(delta)
    state = start, xp.full_like(start, np.inf), start > 0
    if traced:
        return jax.lax.fori_loop(0, _ROUNDS, body, state)[1]
    for i in range(_ROUNDS):
        state = body(i, state)
        if state[2].all():
            break
    return state[1]


def approximate_ldp(
    central_epsilon: Real,
    central_delta: Real,
    eps0: Real,
    delta0: Real,
    n: Real,
    *,
    term: Literal["sharp", "published"] = "sharp",
    bound: Literal["clones", "stronger"] = "clones",
) -> tuple[Array, Array]:
    """Guarantee (epsilon, delta) of n shuffled (eps0, delta0)-DP reports, from a guarantee for eps0-DP ones.

    The total delta is central_delta plus an additive term, with E = e^central_epsilon and E0 = e^eps0:

        "published"  (E+1) (1 + e^-eps0/2) n delta0, as printed; "clones" only: its proof does not cover "stronger"
        "sharp"      (E+1) delta0 [1/(E0+1) + (n-1) kappa], kappa = e^-eps0 (E0+2)/(E0+1), twice kappa for "stronger"

    For central_epsilon >= eps0 the total is at most delta0: one report alone is (eps0, delta0)-DP.

    Args:
        central_epsilon: in nats, >= 0.
        central_delta: in [0, 1]: delta at central_epsilon of n shuffled eps0-DP reports, from the clones pair or
            Theorem 3.1 (bound "clones") or from the stronger pair (bound "stronger").
        eps0: local epsilon in nats, >= 0.
        delta0: local delta, in [0, 1].
        n: number of reports, whole, >= 1.
        term: "sharp" or "published".
        bound: "clones" or "stronger": where central_delta comes from.

    Returns:
        (central_epsilon, total delta), both of the broadcast shape, float64; the total is rounded up, at most 1.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast, term "published" with "stronger".

    Assumes:
        The order of the reports is uniform and secret.

    Reference:
        Feldman, McMillan, Talwar 2021, Theorem 3.8; term "sharp": notebooks/proofs/shuffle.md, section 10, and
        notebooks/proofs/stronger_clones.md.

    Example:
        >>> from jaxdp import shuffle
        >>> epsilon, total = shuffle.approximate_ldp(0.2, 1e-6, eps0=1.0, delta0=1e-12, n=10_000)
        >>> print(f"{epsilon:.1f} {total:.3e}")
        0.2 1.010e-06

    """
    validate.choice("term", term, ("sharp", "published"))
    validate.choice("bound", bound, ("clones", "stronger"))
    if term == "published" and bound == "stronger":
        raise ValueError("term 'published' needs bound='clones': the proof of Theorem 3.8 does not cover 'stronger'.")
    epsilon = validate.nonnegative("central_epsilon", central_epsilon)
    delta, extra = validate.probability("central_delta", central_delta), validate.probability("delta0", delta0)
    local, users = validate.nonnegative("eps0", eps0), validate.integer("n", n, 1)
    validate.broadcast(central_epsilon=epsilon, central_delta=delta, eps0=local, delta0=extra, n=users)

    def total(epsilon, delta, local, extra, users):
        return epsilon.copy(), total_delta(delta, users, local, extra, epsilon, bound, term == "published")

    return batched(total, epsilon, delta, local, extra, users)
