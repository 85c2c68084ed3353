"""Central guarantee of shuffled (eps0, delta0)-DP reports (Feldman, McMillan, Talwar 2021, Theorem 3.8).

Delta at eps is the delta of a dominating pair for eps0-DP reports ("clones" or "stronger") plus the additive term
A(eps) of `additive_term`. notebooks/proofs/shuffle.md, section 10, proves the "sharp" term for both pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, PROBABILITY, whole
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.formulas import batched
from jaxdp.typing import Array, Real

_ROUNDING = 1e-12  # relative charge for the rounding of the additive term
_MOST_RAISED = 22.0  # largest x by which a local epsilon is raised; the additive term falls like e^-x, e^-22 = 3e-10
_SHARE = 0.9  # x is raised until the additive terms take at most this share of delta
_ROUNDS, _RAISES, _CLOSE = 8, 5, 0.003  # most iterations for epsilon; for delta; change of x that ends those for delta
_MARGIN = 1e-3  # relative distance of the next candidate epsilon above the central epsilon just found
_FLUSHED = 1e-307  # charge for two exponentials that may have underflowed; least argument of a logarithm


def additive_term(users: Any, eps0: Any, delta0: Any, epsilon: Any, bound: str, published: bool = False) -> Any:
    """Additive term A(epsilon) of `approximate_ldp`, "published" or else "sharp"; inf where it overflows or is NaN."""
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


def alone(verb: str, eps0: Any, delta0: Any, target: Any) -> Any:
    """Upper bound of the quantity named by verb ("epsilon" or "delta") for one (eps0, delta0)-DP report, not shuffled.

    target is the other of the two quantities. The worst (eps0, delta0)-DP pair has the privacy profile
    delta(eps) = delta0 + (1 - delta0) (e^eps0 - e^eps)_+ / (1 + e^eps0) for eps >= -eps0.
    """
    xp = jnp if validate.is_traced(eps0, delta0, target) else np
    if verb == "epsilon":
        share = (target - delta0) / xp.where(delta0 < 1, 1 - delta0, 1.0) * (1 - 8 * ULP)
        left = 1 - xp.clip(share, 0.0, 1.0) * (1 + xp.exp(-eps0))  # e^epsilon / e^eps0
        found = xp.maximum(eps0 + xp.log(xp.maximum(left, _FLUSHED)) + 8 * ULP * (1 + eps0), 0.0)
        found = xp.where(left > 0.5, xp.minimum(found, eps0), found)
        return xp.where(target >= 1, 0.0, xp.where(target >= delta0, found, np.inf))
    # For epsilon < -eps0 the best test accepts every outcome: share = 1 - e^epsilon.
    least = -xp.expm1(xp.minimum(target, 0.0))
    below = xp.where(eps0 == np.inf, -np.inf, xp.minimum(target - xp.where(eps0 == np.inf, 0.0, eps0), 0.0))
    share = xp.maximum(-xp.expm1(below) / (1 + xp.exp(-eps0)), least)
    total = xp.minimum(delta0 * (1 + 4 * ULP) + (1 - delta0) * share * (1 + 16 * ULP), 1.0)
    return xp.where(share <= 0, delta0, total)  # a NaN share gives NaN


def over_weaker(verb: str, central: Callable[..., Any], lost: Callable[..., Any], target: Any) -> Any:
    """Upper bound of the quantity named by verb ("epsilon" or "delta"), from local epsilons that are raised by an x.

    A report that is (e, d)-DP is also (e + x, d)-DP for every x >= 0. Every x gives a valid bound; a good x is searched
    for. target: the other of the two quantities. central: (x, target) -> the bound if all local deltas were 0; it
    rises with x. lost: (x, epsilon) -> what the local deltas add to delta; it falls with x and rises with epsilon.
    """
    return best_epsilon(central, lost, target) if verb == "epsilon" else best_delta(central, lost, target)[0]


def best_epsilon(
    central: Callable[..., Any], lost: Callable[..., Any], delta: Any, most_raised: float = _MOST_RAISED
) -> Any:
    """Smallest e found with central(x, delta - lost(x, e)) <= e for some x in [0, most_raised]; inf if none is found.

    x is the least at which lost(x, e) <= `_SHARE` delta. The next candidate e is the central epsilon of the candidate
    before, times 1 + `_MARGIN`. Without this margin the test could fail by rounding.
    """
    traced = validate.is_traced(delta, lost(np.zeros(np.shape(delta)), delta))
    xp = jnp if traced else np

    def body(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        tried, best, _ = state
        x = _least(traced, lambda y: lost(y, tried) <= _SHARE * delta, xp.zeros_like(delta), most_raised)
        terms = lost(x, tried)
        found = central(x, xp.maximum((delta - terms) * (1 - 2 * ULP), 0.0))
        accepted = (terms <= delta) & (found <= tried)  # found is valid: lost(x, found) <= terms
        # lost goes with (1 + e^epsilon) e^-x: to keep it, x must rise by the log of the ratio of the first factors. The
        # log of the central epsilon rises by about half as much as x.
        rise = xp.where(accepted | (x <= 0), 0.0, 0.5 * (xp.logaddexp(0.0, found) - xp.logaddexp(0.0, tried)))
        following = found * xp.exp(xp.minimum(rise, 1.0)) * (1 + _MARGIN)
        settled = ~(terms <= delta) | (accepted & (tried <= found * (1 + 2 * _MARGIN)))
        return xp.where(settled, tried, following), xp.where(accepted, xp.fmin(best, found), best), settled

    start = xp.zeros_like(delta)
    return _repeated(traced, _ROUNDS, body, (start, start + np.inf, start > 0), lambda state: state[2])[1]


def best_delta(central: Callable[..., Any], lost: Callable[..., Any], epsilon: Any) -> tuple[Any, Any]:
    """(delta, x): the smallest central(x, epsilon) + lost(x, epsilon) found, and the x that gives it."""
    traced = validate.is_traced(epsilon, lost(np.zeros(np.shape(epsilon)), epsilon))
    xp = jnp if traced else np

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        best, raised, x, before, log_before, _ = state
        delta = central(x, epsilon)
        total = xp.minimum((delta + lost(x, epsilon)) * (1 + 2 * ULP), 1.0)
        best, raised = xp.where(total < best, xp.stack([total, x]), xp.stack([best, raised]))
        # Model: -log central(x) goes with e^(-rate x). At first rate = 1, as the variance of the loss grows about like
        # e^x; then it is the slope between the last two x.
        log_now = xp.log(-xp.log(xp.clip(delta, _FLUSHED, 0.99)))
        moved = xp.where(x == before, 1.0, x - before)
        rate = xp.where(x == before, 1.0, xp.clip((log_before - log_now) / moved, 0.3, 3.0))

        def is_small(y: Any) -> Any:  # the sum is least where -lost'(y) = lost(y) becomes smaller than central'(y)
            minus_log = xp.exp(log_now + rate * (x - y))
            return lost(y, epsilon) <= xp.maximum(rate * minus_log, 1.0) * xp.exp(-minus_log)

        following = _least(traced, is_small, xp.zeros_like(epsilon), _MOST_RAISED)
        return best, raised, following, x, log_now, xp.abs(following - x) < _CLOSE

    start = xp.zeros_like(epsilon)
    return _repeated(traced, _RAISES, body, (start + 2.0, *[start] * 4, start > 0), lambda state: state[-1])[:2]


def _repeated(traced: bool, times: int, body: Callable[[Any], Any], state: Any, settled: Callable[[Any], Any]) -> Any:
    """The state after body was applied ``times`` times; with concrete numbers it stops once all rows are settled."""
    if traced:
        return jax.lax.fori_loop(0, times, lambda _, state: body(state), state)
    with np.errstate(all="ignore"):  # bounds may be infinite
        for _ in range(times):
            state = body(state)
            if settled(state).all():
                break
    return state


def _least(traced: bool, holds: Callable[[Any], Any], low: Any, most: float) -> Any:
    """About the smallest y in [low, low + most] with holds(y), which is true at every larger y too; else low + most."""
    with contextlib.nullcontext() if traced else on_host():
        return (jnp if traced else np).where(holds(low), low, bisect(holds, low, low + most, 32)[1])


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
    """Guarantee (epsilon, delta) of n shuffled (eps0, delta0)-DP reports, from a guarantee for eps0-DP reports.

    The total delta is central_delta plus an additive term. With E = e^central_epsilon and E0 = e^eps0 the term is

        "published"  (E+1) (1 + e^-eps0/2) n delta0, as in the paper; its proof covers "clones", but not "stronger"
        "sharp"      (E+1) delta0 [1/(E0+1) + (n-1) kappa], kappa = e^-eps0 (E0+2)/(E0+1), twice kappa for "stronger"

    For central_epsilon >= eps0 the total is at most delta0: one report alone is (eps0, delta0)-DP.

    Args:
        central_epsilon: in nats, >= 0.
        central_delta: in [0, 1]: delta at central_epsilon of n shuffled eps0-DP reports. It comes from the clones pair
            or Theorem 3.1 (bound "clones"), or from the stronger pair (bound "stronger").
        eps0: local epsilon in nats, >= 0.
        delta0: local delta, in [0, 1].
        n: number of reports, a whole number >= 1.
        term: "sharp" or "published".
        bound: "clones" or "stronger": the pair that central_delta was computed from.

    Returns:
        (central_epsilon, total delta), both of the broadcast shape, float64; the total is rounded up, at most 1.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast, term "published" with "stronger".

    Assumes:
        The reports are in a uniformly random order, which is secret.

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
    arguments = validate.all_inside(
        central_epsilon=(NONNEGATIVE, central_epsilon),
        central_delta=(PROBABILITY, central_delta),
        eps0=(NONNEGATIVE, eps0),
        delta0=(PROBABILITY, delta0),
        n=(whole(1), n),
    )

    def total(epsilon, delta, local, extra, users):
        added = additive_term(users, local, extra, epsilon, bound, term == "published")
        both = np.minimum((delta + added) * np.where(added > 0, 1.0 + 2 * ULP, 1.0), 1.0)
        return epsilon.copy(), np.where(epsilon >= local, np.minimum(both, extra), both)

    return batched(total, *arguments)
