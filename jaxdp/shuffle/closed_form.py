"""Closed forms of Feldman, McMillan, Talwar 2021: Theorem 3.1 (any randomizer), Corollary 4.2 (k-ary response)."""

from __future__ import annotations

from jaxdp.domains import NONNEGATIVE, PROBABILITY, SMALLEST, Domain, whole
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import at_points, checked
from jaxdp.runtime.precision import kernel
from jaxdp.shuffle.bounds import least_epsilon
from jaxdp.typing import Array, Real


def reports(eps0: Real, n: Real, delta: Real) -> dict[str, tuple[Domain, Real]]:
    """The arguments of a theorem on shuffled reports, with the domain of each."""
    return {"eps0": (NONNEGATIVE, eps0), "n": (whole(1), n), "delta": (PROBABILITY, delta)}


def _guarded(value, condition, eps0, num_users, delta):
    """The smaller of value and eps0 where the theorem's condition holds, else eps0; inf for invalid arguments."""
    valid = (num_users >= 1) & (eps0 >= 0) & (delta >= 0) & (delta <= 1) & (num_users == xp.floor(num_users))
    answer = xp.where(condition & (delta > 0) & (value < eps0), value, eps0)
    return xp.where(valid, xp.where(delta >= 1, 0.0, answer), xp.inf)


@kernel(working_set=16, by_numpy=2**20, at_once=4096)
def clones_closed_form_point(eps0, num_users, delta):
    """Epsilon at one point by Theorem 3.1; see `clones_epsilon_closed_form`."""
    positive = xp.where(delta > 0, delta, 0.5)
    condition = eps0 <= xp.log(num_users / (16.0 * xp.log(2.0 / positive)))
    ratio = xp.exp(xp.minimum(eps0, 700.0)) / num_users
    term = xp.sqrt(ratio * xp.log(4.0 / positive)) + ratio
    value = xp.log1p(xp.tanh(0.5 * eps0) * 8.0 * term)
    return _guarded(value, condition, eps0, num_users, delta)


def clones_closed_form_log_delta(eps0, num_users, epsilon):
    """Log of the least delta at which the formula of Theorem 3.1 is <= epsilon < eps0 and its condition holds."""
    odds = xp.exp(xp.minimum(eps0, 700.0))
    root = xp.expm1(epsilon) / (8.0 * xp.tanh(0.5 * eps0)) - odds / num_users
    root = xp.where(root > 0, root, 0.0)
    log_delta = xp.maximum(xp.log(4.0) - root * root * num_users / odds, xp.log(2.0) - num_users / (16.0 * odds))
    return xp.minimum(log_delta + 1e-12 * (1.0 + xp.abs(log_delta)), 0.0)


@kernel(working_set=16, by_numpy=2**20, at_once=4096)
def clones_closed_form_delta(eps0, num_users, epsilon):
    """Upper bound of delta at epsilon >= 0 by Theorem 3.1."""
    delta = xp.maximum(xp.exp(clones_closed_form_log_delta(eps0, num_users, epsilon)), SMALLEST)
    inside = (num_users >= 1) & (epsilon >= 0) & (epsilon < eps0) & ~xp.isnan(delta)
    return xp.where(inside, delta, xp.where((num_users >= 1) & (epsilon >= eps0) & (eps0 >= 0), 0.0, 1.0))


@kernel(working_set=16, by_numpy=2**20, at_once=4096)
def krr_closed_form_point(eps0, num_categories, num_users, delta):
    """Epsilon at one point by Corollary 4.2; see `krr_epsilon_closed_form`."""
    positive = xp.where(delta > 0, delta, 0.5)
    odds = xp.exp(xp.minimum(eps0, 700.0))
    total = odds + num_categories - 1.0
    share = num_categories / ((num_categories + 1.0) * total)
    condition = share >= 8.0 * xp.log(2.0 / positive) / num_users
    scale = 1.0 / (share * num_users)
    gap = xp.expm1(xp.minimum(eps0, 700.0)) / total
    value = xp.log1p(gap * (4.0 * xp.sqrt(2.0 * xp.log(4.0 / positive) * scale) + 4.0 * scale))
    return xp.where(num_categories >= 2, _guarded(value, condition, eps0, num_users, delta), xp.inf)


def clones_epsilon_closed_form(eps0: Real, n: Real, delta: Real) -> Array:
    """Central epsilon at delta of n shuffled eps0-DP reports, in closed form.

    eps = log(1 + (E0-1)/(E0+1) 8 (sqrt(E0 log(4/delta)/n) + E0/n)), E0 = e^eps0, if eps0 <= log(n/(16 log(2/delta))).
    Where this condition fails, or the formula exceeds eps0, the result is eps0.

    Args:
        eps0: local epsilon in nats, >= 0.
        n: number of reports, a whole number >= 1.
        delta: in [0, 1]; 0 gives eps0, 1 gives 0.

    Returns:
        Epsilon in nats, float64, of the broadcast shape: 1.9 to 5.4 times the exact value of `jaxdp.Shuffled` where
        compared. Rounding errors are not added. Under a trace an invalid argument gives inf.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Assumes:
        The randomizer of a report depends on earlier outputs only, not on the user. The order is uniform and secret.

    Reference:
        Feldman, McMillan, Talwar 2021, Theorem 3.1.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.clones_epsilon_closed_form(1.0, 10_000, 1e-6):.4f}")
        0.2140

    """
    return at_points(clones_closed_form_point, *checked(**reports(eps0, n, delta)))


def krr_epsilon_closed_form(eps0: Real, k: Real, n: Real, delta: Real) -> Array:
    """Central epsilon at delta of n shuffled k-ary randomized responses with local epsilon eps0, in closed form.

    eps = log(1 + a (4 sqrt(2 log(4/delta)/(y n)) + 4/(y n))), a = (E0-1)/(E0+k-1), y = k/((k+1)(E0+k-1)), E0 = e^eps0,
    if y >= 8 log(2/delta)/n. Where this condition fails, or the formula exceeds eps0, the result is eps0.

    k: number of categories, a whole number >= 2. The other arguments, the result and the errors are as for
    `clones_epsilon_closed_form`. jaxdp does not prove the published constants again. On 250 random points where the
    condition holds (n 30 to 1e9, eps0 0.01 to 10, k 2 to 6e4, delta 1e-12 to 0.3) the value was at least 2.07 times the
    certified bound of the blanket pair.

    Assumes:
        The reports are in a uniformly random, secret order.

    Reference:
        Feldman, McMillan, Talwar 2021, Theorem 4.1 and Corollary 4.2.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.krr_epsilon_closed_form(1.0, 16, 10_000, 1e-6):.4f}")
        0.0894

    """
    local, users, target, kinds = checked(**reports(eps0, n, delta), k=(whole(2), k))
    return at_points(krr_closed_form_point, local, kinds, users, target)


def lower_bound_epsilon(eps0: Real, n: Real, delta: Real) -> Array:
    """Lower bound of every epsilon at delta that a theorem for all eps0-DP local randomizers can give.

    It is the exact epsilon of n shuffled two-point randomized responses (the larger of the two orders of x and x'),
    rounded down by less than 1e-6 relative. Arguments and errors are as for `clones_epsilon_closed_form`. Under a trace
    an invalid argument gives 0.

    Reference:
        Feldman, McMillan, Talwar 2021, Appendix G.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.lower_bound_epsilon(1.0, 1000, 1e-6):.4f}")
        0.1266

    """
    return at_points(least_epsilon, *checked(**reports(eps0, n, delta)))
