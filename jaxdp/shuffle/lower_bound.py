"""What no general amplification theorem can go below: shuffled two-point randomized response."""

from __future__ import annotations

from typing import Any

from jaxdp.runtime.precision import kernel
from jaxdp.shuffle import checks, door
from jaxdp.shuffle.two_point import two_point_epsilon


@kernel(working_set=4096, by_numpy=64)
def lower_bound_point(eps0, num_users, delta):
    """One point of `lower_bound_epsilon`."""
    return two_point_epsilon.point(num_users, eps0, delta).lower


def lower_bound_epsilon(eps0: Any, n: Any, delta: Any) -> Any:
    """Lower bound of epsilon at delta that every general bound on n shuffled eps0-DP reports must exceed.

    The exact epsilon of two-point randomized response (larger direction), rounded down by less than 1e-6 relative.
    Arguments broadcast: eps0 >= 0, n whole >= 1, delta in [0, 1]. Returns float64; under a trace an invalid
    value gives 0. Reference: Feldman, McMillan, Talwar 2021, Appendix G.
    """
    return door.run(lower_bound_point, checks.target, eps0, n, delta)
