"""Lower bound of every general amplification theorem: shuffled two-point randomized response."""

from __future__ import annotations

from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import at_points
from jaxdp.runtime.precision import kernel
from jaxdp.shuffle.checks import reports
from jaxdp.shuffle.two_point import two_point_epsilon
from jaxdp.typing import Array, Real


@kernel(working_set=4096, by_numpy=64)
def lower_bound_point(eps0, num_users, delta):
    """One point of `lower_bound_epsilon`."""
    return xp.fmax(two_point_epsilon.point(num_users, eps0, delta).lower, 0.0)


def lower_bound_epsilon(eps0: Real, n: Real, delta: Real) -> Array:
    """Lower bound of epsilon at delta that no theorem for all eps0-DP local randomizers can go below.

    The exact epsilon of n shuffled two-point randomized responses (the larger of the two directions).

    Args:
        eps0: local epsilon in nats, >= 0.
        n: number of reports, whole, >= 1.
        delta: in [0, 1].

    Returns:
        Epsilon in nats of the broadcast shape, float64, rounded down by less than 1e-6 relative. Under a trace an
        invalid argument gives 0.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Reference:
        Feldman, McMillan, Talwar 2021, Appendix G.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.lower_bound_epsilon(1.0, 1000, 1e-6):.4f}")
        0.1266

    """
    return at_points(lower_bound_point, *reports(eps0=eps0, n=n, delta=delta))
