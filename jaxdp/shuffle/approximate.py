"""Approximate local privacy: from (eps0, delta0)-DP randomizers to a central guarantee (FMT 2021, Theorem 3.8)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxdp import validate
from jaxdp.runtime.formulas import batched, whole
from jaxdp.shuffle.approximate_local import additive_term
from jaxdp.typing import Array, Real


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
    local, users = validate.nonnegative("eps0", eps0), whole(1)("n", n)
    validate.broadcast(central_epsilon=epsilon, central_delta=delta, eps0=local, delta0=extra, n=users)

    def total(epsilon, delta, local, extra, users):
        taken = additive_term(users, local, extra, epsilon, bound, published=term == "published")
        value = np.fmin(np.where(extra > 0, np.nextafter(delta + taken, np.inf), delta), 1.0)
        return epsilon.copy(), np.where(epsilon >= local, np.minimum(value, extra), value)

    return batched(total, epsilon, delta, local, extra, users)
