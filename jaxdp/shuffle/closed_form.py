"""Published closed forms: FMT 2021 Theorem 3.1 (any randomizer) and Corollary 4.2 (k-ary randomized response)."""

from __future__ import annotations

from typing import Any

from jaxdp import validate
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import kernel
from jaxdp.shuffle import checks, door


def _guarded(value, condition, eps0, num_users, delta):
    """`value` under the theorem's condition, else eps0, which always holds; inf for invalid arguments."""
    valid = (num_users >= 1) & (eps0 >= 0) & (delta >= 0) & (delta <= 1) & (num_users == xp.floor(num_users))
    answer = xp.where(condition & (delta > 0) & (value < eps0), value, eps0)
    return xp.where(valid, xp.where(delta >= 1, 0.0, answer), xp.inf)


@kernel(working_set=16, by_numpy=4096)
def clones_closed_form_point(eps0, num_users, delta):
    """One point of Theorem 3.1; see `clones_epsilon_closed_form`."""
    positive = xp.where(delta > 0, delta, 0.5)
    condition = eps0 <= xp.log(num_users / (16.0 * xp.log(2.0 / positive)))
    ratio = xp.exp(xp.minimum(eps0, 700.0)) / num_users
    spread = xp.sqrt(ratio * xp.log(4.0 / positive)) + ratio
    value = xp.log1p(xp.tanh(0.5 * eps0) * 8.0 * spread)
    return _guarded(value, condition, eps0, num_users, delta)


@kernel(working_set=16, by_numpy=4096)
def krr_closed_form_point(eps0, num_categories, num_users, delta):
    """One point of Corollary 4.2; see `krr_epsilon_closed_form`."""
    positive = xp.where(delta > 0, delta, 0.5)
    odds = xp.exp(xp.minimum(eps0, 700.0))
    total = odds + num_categories - 1.0
    share = num_categories / ((num_categories + 1.0) * total)
    condition = (share >= 8.0 * xp.log(2.0 / positive) / num_users) & (num_categories >= 2)
    scale = 1.0 / (share * num_users)
    gap = xp.expm1(xp.minimum(eps0, 700.0)) / total
    value = xp.log1p(gap * (4.0 * xp.sqrt(2.0 * xp.log(4.0 / positive) * scale) + 4.0 * scale))
    return _guarded(value, condition, eps0, num_users, delta)


def clones_epsilon_closed_form(eps0: Any, n: Any, delta: Any) -> Any:
    """Central epsilon of n shuffled eps0-DP reports at delta, in closed form.

    eps = log(1 + (E0-1)/(E0+1) 8 (sqrt(E0 log(4/delta)/n) + E0/n)), E0 = e^eps0, if eps0 <= log(n/(16 log(2/delta)));
    otherwise, and wherever the formula exceeds it, eps0 itself.

    Arguments broadcast: eps0 >= 0 in nats, n whole >= 1, delta in [0, 1] (0 gives eps0). Returns float64. ValueError
    names a bad argument. 1.9 to 5.4 times the exact value of `jaxdp.Shuffled` where compared.
    Assumes: the randomizer of a slot depends on earlier outputs only, not on the user.
    Reference: Feldman, McMillan, Talwar 2021, Theorem 3.1.
    """
    return door.run(clones_closed_form_point, checks.target, eps0, n, delta)


def krr_epsilon_closed_form(eps0: Any, k: Any, n: Any, delta: Any) -> Any:
    """Central epsilon of n shuffled k-ary randomized responses of level eps0 at delta, in closed form.

    eps = log(1 + a (4 sqrt(2 log(4/delta)/(y n)) + 4/(y n))), a = (E0-1)/(E0+k-1), y = k/((k+1)(E0+k-1)), if
    y >= 8 log(2/delta)/n; otherwise, and wherever the formula exceeds it, eps0 itself.

    Arguments broadcast: eps0 >= 0, k whole >= 2, n whole >= 1, delta in [0, 1]. Returns float64. The constants are
    not derived anew: on 250 random points where the condition holds (n 30 to 1e9, eps0 0.01 to 10, k 2 to 6e4,
    delta 1e-12 to 0.3) the value was at least 2.07 times the certified bound of the blanket pair.
    Reference: Feldman, McMillan, Talwar 2021, Theorem 4.1 and Corollary 4.2.
    """

    def check(eps0, k, n, delta):
        local, users, target = checks.target(eps0, n, delta)
        kinds = checks.categories(k)
        validate.broadcast(eps0=local, k=kinds, n=users, delta=target)
        return local, kinds, users, target

    return door.run(krr_closed_form_point, check, eps0, k, n, delta)
