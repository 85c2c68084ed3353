"""Approximate local privacy: from (eps0, delta0)-DP randomizers to a central guarantee (FMT 2021, Theorem 3.8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.shuffle import checks, door
from jaxdp.shuffle.approximate_local import additive_term


def approximate_ldp(
    central_epsilon: Any,
    central_delta: Any,
    eps0: Any,
    delta0: Any,
    n: Any,
    *,
    term: str = "sharp",
    bound: str = "clones",
) -> tuple[Any, Any]:
    """(epsilon, total delta) of n shuffled (eps0, delta0)-DP reports, from a pair that holds for eps0-DP ones.

    central_epsilon, central_delta: a guarantee from the clones pair or Theorem 3.1 at eps0 (`bound="clones"`), or from
    the stronger pair (`bound="stronger"`). The total is central_delta plus
    term "published": (E+1)(1 + e^-eps0/2) n delta0, the theorem as printed (clones only: its proof does not
    reach the stronger pair); term "sharp": (E+1) delta0 [1/(E0+1) + (n-1) kappa], kappa = e^-eps0 (E0+2)/(E0+1),
    doubled for "stronger" (proof: notebooks/proofs/stronger_clones.md). At most 1; for epsilon >= eps0 at most
    delta0, by post-processing of the one report that changes.

    All arguments broadcast; float64 out; ValueError names a bad argument.
    """
    validate.choice("term", term, ("sharp", "published"))
    validate.choice("bound", bound, ("clones", "stronger"))
    if term == "published" and bound == "stronger":
        raise ValueError("term 'published' needs bound='clones': the proof of Theorem 3.8 does not cover 'stronger'.")
    epsilon = validate.nonnegative("central_epsilon", central_epsilon)
    delta, extra = checks.delta(central_delta, "central_delta"), checks.delta(delta0, "delta0")
    local, users = checks.local_epsilon(eps0), checks.users(n)
    validate.broadcast(central_epsilon=epsilon, central_delta=delta, eps0=local, delta0=extra, n=users)

    def total(epsilon, delta, local, extra, users):
        taken = additive_term(users, local, extra, epsilon, bound, published=term == "published")
        value = np.fmin(np.where(extra > 0, np.nextafter(delta + taken, np.inf), delta), 1.0)
        return epsilon.copy(), np.where(epsilon >= local, np.minimum(value, extra), value)

    return door.batched(total, epsilon, delta, local, extra, users)
