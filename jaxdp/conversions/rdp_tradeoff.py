"""Renyi DP to f-DP, and from there to (epsilon, delta): all orders a > 0 at once, orders a <= 1 included.

A test that rejects with probability x under Q and p under P is post-processing. So the Bernoulli pair (p, x) obeys
R_a(p, x) <= rho_a at every order, and R_a(x, p) <= rho'_a if rho'_a bounds R_a(Q, P). Let p*(x) be the largest p that
all constraints allow. Then the trade-off function is at least 1 - p*(x), and delta <= max_x [p*(x) - e^eps x]. The set
of allowed (p, x) is convex (for a < 1 the divergence is jointly convex, for a > 1 its exponential is). So p* is
concave, and its values on a grid bound the maximum from above (`cell_bounds`).

Zhu, Dong, Wang 2022, Appendix F. Whether another conversion is better at every point is an open question.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.conversions.profile import cell_bounds
from jaxdp.conversions.rdp import delta_at_order, epsilon_at_order, named_scalars, renyi_curve
from jaxdp.domains import NOT_NAN, POSITIVE, PROBABILITY, SMALLEST, Domain
from jaxdp.numerics.roots import Evaluation, bisect, of_delta, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import at_points
from jaxdp.runtime.precision import Kernel, kernel
from jaxdp.typing import Array, Real

# Bisection steps for the logit of p*. The last interval is at most 3.3e-10 wide, which is the relative accuracy of p*.
_HALVINGS = 42
# Cells of the grid of logits of x, and how often the grid is refined around the maximum over x.
_CELLS, _ROUNDS = 40, 8
# Largest |logit| of the grid: expit(-700) is 1e-304. Tests with x beyond the grid are bounded by monotonicity.
_FAR = 700.0
_Pair: TypeAlias = tuple[jax.Array, jax.Array]
# (orders a, upper bounds of R_a(P, Q), upper bounds of R_a(Q, P)), one axis each.
_Curve: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def _log_probabilities(logit: jax.Array) -> _Pair:
    """log expit(logit) and log(1 - expit(logit))."""
    return jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit)


def _violated(order: jax.Array, bound: jax.Array, first: _Pair, second: _Pair, sign: jax.Array) -> jax.Array:
    """Whether R_order(first, second) of two Bernoulli laws, given by log probabilities, exceeds the bound.

    Rounding is charged. With sign = 1, True is certain. With sign = -1, False is certain.
    """
    (f1, f0), (s1, s0) = first, second
    excess = order - 1
    one, zero = order * f1 - excess * s1, order * f0 - excess * s0
    total = jnp.logaddexp(one, zero)
    size = (order + jnp.abs(excess)) * (
        1
        + jnp.maximum(-f1, -s1) * jnp.exp(jnp.minimum(one - total, 0.0))
        + jnp.maximum(-f0, -s0) * jnp.exp(jnp.minimum(zero - total, 0.0))
    )
    p, q = jnp.exp(f1), jnp.exp(f0)
    divergence = p * (f1 - s1) + q * (f0 - s0)
    kl_size = p * jnp.maximum(-f1, -s1) + q * jnp.maximum(-f0, -s0) + jnp.abs(divergence)
    at_one = excess == 0
    value = jnp.where(at_one, divergence, jnp.sign(excess) * total)
    limit = jnp.where(at_one, bound, jnp.abs(excess) * bound)
    slack = 16 * ULP * jnp.where(at_one, kl_size, size + limit)
    return value > limit + sign * slack


def _largest_power(curve: _Curve, logit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(lower, upper) bound of the logit of p*(x) at x = expit(logit)."""
    orders, forward, backward = curve
    x = _log_probabilities(logit)

    def broken(v: jax.Array, sign: jax.Array) -> jax.Array:
        p = _log_probabilities(v)
        ahead = _violated(orders, forward, p, x, sign) & jnp.isfinite(forward)
        behind = _violated(orders, backward, x, p, sign) & jnp.isfinite(backward)
        return jnp.any(ahead | behind)

    start = jnp.full((2,), 1.0) * logit, jnp.full((2,), _FAR + 45.0)
    low, high = bisect(lambda v: jax.vmap(broken)(v, jnp.array([-1.0, 1.0])), *start, _HALVINGS)
    return low[0], high[1]


def _advantage(curve: _Curve, logit: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x, low, high) at x = expit(logit), with low <= p*(x) - e^eps x <= high."""
    x, not_x = jax.nn.sigmoid(logit), jax.nn.sigmoid(-logit)
    tilt = jnp.exp(eps)

    def gain(v: jax.Array, sign: float) -> jax.Array:
        p, not_p = jax.nn.sigmoid(v), jax.nn.sigmoid(-v)
        near_one = x > 0.5
        value = jnp.where(near_one, -jnp.expm1(eps) + tilt * not_x - not_p, p - tilt * x)
        size = jnp.where(near_one, jnp.abs(jnp.expm1(eps)) + tilt * not_x + not_p, p + tilt * x)
        return value + sign * 16 * ULP * size * (1 + jnp.abs(v) / 16 + jnp.abs(eps))

    low, high = _largest_power(curve, logit)
    return x, gain(low, -1.0), gain(high, 1.0)


def _delta_and_slope(curve: _Curve, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Certified delta at eps, and an estimate of its derivative for Newton's method: -e^eps x at the best x."""

    def refine(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, right, dead, _, _ = state  # dead: the largest upper bound of the cells that were dropped
        grid = left + (right - left) * jnp.linspace(0.0, 1.0, _CELLS + 1)
        x, low, high = jax.vmap(lambda u: _advantage(curve, u, eps))(grid)
        upper = cell_bounds(x, low, high)
        alive = upper >= jnp.maximum(jnp.max(low), 0.0)
        first = jnp.argmax(alive)
        last = _CELLS - 1 - jnp.argmax(alive[::-1])
        dead = jnp.maximum(dead, jnp.max(jnp.where(alive, -jnp.inf, upper)))
        # Keep one more cell on each side: its chord is needed to bound the cell next to it.
        left, right = grid[jnp.maximum(first - 1, 0)], grid[jnp.minimum(last + 2, _CELLS)]
        total = jnp.maximum(dead, jnp.max(jnp.where(alive, upper, -jnp.inf)))
        return left, right, dead, total, x[jnp.argmax(low)]

    far = jnp.asarray(_FAR)
    # Let E = e^eps. Left of the grid p - E x <= p*(expit(-far)); right of it p - E x <= (1 - E) + E (1 - expit(far)).
    left_end = jax.nn.sigmoid(_largest_power(curve, -far)[1])
    falling = -jnp.expm1(eps)
    right_end = falling + 8 * ULP * jnp.abs(falling) + jnp.exp(eps) * jax.nn.sigmoid(-far) * (1 + 16 * ULP)
    start = (-far, far, jnp.maximum(left_end, right_end), jnp.asarray(1.0), jnp.asarray(0.5))
    _, _, _, total, at = jax.lax.fori_loop(0, _ROUNDS, refine, start)
    total = jnp.where(jnp.isnan(total), 1.0, jnp.clip(total, SMALLEST, 1.0))
    return total, -jnp.exp(eps) * at


def _curve(orders: jax.Array, forward: jax.Array, backward: jax.Array, infinity: jax.Array) -> _Curve:
    """The curve of the normalised finite part, p / (1 - d) with d = infinity, against Q.

    The given curve may be that of the finite part itself, of mass 1 - d. Normalising multiplies sum p^a q^(1-a) by
    (1-d)^-a, which is charged to forward at orders >= 1. Normalising does not increase forward at orders below 1, nor
    backward.
    """
    lost = -jnp.log1p(-jnp.minimum(infinity, 1.0))
    more = jnp.where(orders == 1, forward * jnp.expm1(lost) + lost, orders / (orders - 1) * lost) * (1 + 16 * ULP)
    return orders, forward + jnp.where((orders >= 1) & (infinity > 0), more, 0.0), backward


def _valid(curve: _Curve, infinity: jax.Array) -> jax.Array:
    orders, forward, backward = curve
    return (infinity >= 0) & jnp.all((forward >= 0) & (backward >= 0) & (orders > 0))  # False for NaN


@kernel(working_set=20000)
def _delta_kernel(orders, forward, backward, infinity, eps):
    curve = _curve(orders, forward, backward, infinity)
    inside = jnp.isfinite(eps) & (jnp.abs(eps) < _FAR)
    value, _ = _delta_and_slope(curve, jnp.where(inside, eps, 0.0))
    far = jnp.min(delta_at_order(*_above_one(orders, forward), eps, 0.0, 1.0))
    value = jnp.where(eps <= -_FAR, 1.0, jnp.where(eps >= _FAR, far, value))
    good = _valid(curve, infinity) & ~jnp.isnan(eps)
    return jnp.where(good, jnp.minimum(1.0, (raised(infinity)[0] + value) * (1 + 8 * ULP)), 1.0)


def _above_one(orders: jax.Array, forward: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(orders, forward) for the conversions at one order, which need orders > 1: other orders get the bound inf."""
    return jnp.where(orders > 1, orders, 2.0), jnp.where(orders > 1, forward, jnp.inf)


@kernel(working_set=20000)
def _epsilon_kernel(orders, forward, backward, infinity, delta):
    curve = _curve(orders, forward, backward, infinity)
    room = (delta - raised(infinity)[0]) * (1 - 8 * ULP)
    goal = jnp.log(jnp.where(room > 0, room, 0.5))
    start = jnp.min(epsilon_at_order(*_above_one(orders, forward), delta, infinity, 1.0))
    high = jnp.where(start < _FAR, jnp.maximum(start, 1e-12), 1.0)

    def evaluate(eps: jax.Array) -> Evaluation:
        value, slope = _delta_and_slope(curve, eps)
        return of_delta(value, value, -slope)

    _, found, _ = proved_ends(evaluate, goal, 0.5 * high, high)
    found = found * (1 + 8 * ULP) + 4 * ULP
    found = jnp.where(found <= 8 * ULP, 0.0, found)
    found = jnp.where(start < _FAR, jnp.maximum(found, 0.0), start)
    found = jnp.where(room > 0, found, jnp.inf)
    good = _valid(curve, infinity) & ~jnp.isnan(found) & (delta <= 1)
    return jnp.where(good, jnp.where(delta == 1, 0.0, found), jnp.inf)


@kernel(working_set=20000)
def _tradeoff_kernel(orders, forward, backward, infinity, x):
    curve = _curve(orders, forward, backward, infinity)
    inside = (x > 0) & (x < 1)
    safe = jnp.where(inside, x, 0.5)
    # Round x up, because p* increases.
    logit = jnp.log(safe) - jnp.log1p(-safe) + 16 * ULP * (1 + jnp.abs(jnp.log(safe)) + 1 / (1 - safe))
    miss = jax.nn.sigmoid(-_largest_power(curve, jnp.clip(logit, -_FAR, _FAR))[1]) * (1 - 128 * ULP)
    at_zero = jax.nn.sigmoid(-_largest_power(curve, jnp.asarray(-_FAR))[1]) * (1 - 128 * ULP)
    value = jnp.where(inside, miss, jnp.where(x <= 0, at_zero, 0.0))
    return jnp.where(_valid(curve, infinity) & (x >= 0), jnp.maximum(value - raised(infinity)[0], 0.0), 0.0)


def optimal_delta_from_rdp(
    orders: Real, renyi: Real, epsilon: Real, *, reverse_renyi: Real | None = None, infinity_mass: Real = 0.0
) -> Array:
    """Certified delta at epsilon from all orders of a Renyi curve at once, through its trade-off function.

    orders: a > 0, on the last axis. Orders in [1/2, 1] tighten the bound; orders a > 1 are needed for small delta.
    renyi: upper bounds of R_a(P, Q) in nats, orders on the last axis; inf where unknown.
    epsilon: in nats, any real number; broadcasts with the leading axes of renyi.
    reverse_renyi: upper bounds of R_a(Q, P) at the orders. For a symmetric mechanism give renyi again. None: unknown.
        Bounds of R_a(P, Q) instead would make delta too small for asymmetric pairs.
    infinity_mass: upper bound of P(L = inf) in [0, 1], if renyi is the curve of the finite part of the loss L. The
        curve may be normalised or not: log E_P[e^((a-1)L); L < inf] / (a-1), `jaxdp.log_mgf` over a - 1, is not.

    >>> orders = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    >>> curve = [a / 8 for a in orders]  # Gaussian, sigma = 2
    >>> print(f"{jaxdp.conversions.optimal_delta_from_rdp(orders, curve, 2.5, reverse_renyi=curve):.2e}")
    1.35e-06

    Returns delta in [0, 1], float64, of the broadcast shape without the axis of orders: an upper bound of the maximum
    over x (docs/limits.md says how close). Raises ValueError, also for unequal lengths.
    Reference: Zhu, Dong, Wang 2022, Appendix F.
    """
    return _run(_delta_kernel, orders, renyi, reverse_renyi, infinity_mass, epsilon=(NOT_NAN, epsilon))


def optimal_epsilon_from_rdp(
    orders: Real, renyi: Real, delta: Real, *, reverse_renyi: Real | None = None, infinity_mass: Real = 0.0
) -> Array:
    """Certified epsilon >= 0 at delta from all orders of a Renyi curve at once, through its trade-off function.

    delta: in [0, 1]; broadcasts with the leading axes of renyi. Other arguments and the reference: as for
        `optimal_delta_from_rdp`.

    >>> orders = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    >>> curve = [a / 8 for a in orders]  # Gaussian, sigma = 2
    >>> print(f"{jaxdp.conversions.optimal_epsilon_from_rdp(orders, curve, 1e-6, reverse_renyi=curve):.4f}")
    2.5429

    Returns epsilon in nats, float64, of the broadcast shape without the axis of orders: the smallest epsilon tried
    whose certified delta meets the target (to 1e-9 relative); inf where delta does not exceed infinity_mass, or where
    no order above 1 has a finite bound. Raises ValueError.
    """
    return _run(_epsilon_kernel, orders, renyi, reverse_renyi, infinity_mass, delta=(PROBABILITY, delta))


def tradeoff_from_rdp(
    orders: Real,
    renyi: Real,
    false_positive_rate: Real,
    *,
    reverse_renyi: Real | None = None,
    infinity_mass: Real = 0.0,
) -> Array:
    """Certified smallest false negative rate 1 - p*(x) at false positive rate x, from all orders at once.

    false_positive_rate: x in [0, 1], the probability of rejecting under Q; broadcasts with the leading axes of renyi.
        Other arguments and the reference: as for `optimal_delta_from_rdp`.

    >>> orders = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    >>> curve = [a / 8 for a in orders]  # Gaussian, sigma = 2
    >>> print(f"{jaxdp.conversions.tradeoff_from_rdp(orders, curve, 0.1, reverse_renyi=curve):.4f}")
    0.7477

    Returns a lower bound of the trade-off function in [0, 1], float64, of the broadcast shape without the axis of
    orders. Raises ValueError.
    """
    x = (PROBABILITY, false_positive_rate)
    return _run(_tradeoff_kernel, orders, renyi, reverse_renyi, infinity_mass, false_positive_rate=x)


def _run(point: Kernel, orders: Any, renyi: Any, reverse: Any, infinity: Real, **target: tuple[Domain, Real]) -> Array:
    """The kernel at the broadcast of the leading axes. target: delta, epsilon or rate, as name=(domain, value)."""
    orders, forward = renyi_curve(orders, renyi, POSITIVE)
    backward: Any = np.full(np.shape(forward), np.inf)
    if reverse is not None:
        _, backward = renyi_curve(orders, reverse, POSITIVE, "reverse_renyi")
    scalars = named_scalars(target, infinity)
    lead = {"orders": orders, "renyi": forward, "reverse_renyi": backward}
    validate.broadcast(**{name: np.empty(np.shape(a)[:-1]) for name, a in lead.items()}, **scalars)
    goal, mass = scalars.values()
    return at_points(point, *lead.values(), mass, goal, own=(1, 1, 1, 0, 0))
