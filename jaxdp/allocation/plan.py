"""Where an epoch of random allocation is cut and tilted (notebooks/proofs/allocation.md, sections 2 to 4)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp.allocation import jumps, law
from jaxdp.allocation.law import Step
from jaxdp.numerics.special import log_normal_tail
from jaxdp.runtime.arrays import xp

NATS = 20.0  # by which the integrand falls before the last node
_REST, _MANY = math.log(1e-8), 3e4  # of delta: what more large steps than are counted may contribute, to so many steps
_GRID = 256
_TILTS = 96
_PAYS = 1.3  # this many times the nodes justify contours for each number of large steps
MOST = 4  # contours
_LOOKS = 4  # at delta, each with less of the law
_ROOM = 8  # points of the grid between split and top, at least
_FAR = 38.0  # beyond it the normal law has no mass in double precision


class Plan(NamedTuple):
    """Where to cut and to tilt. No bound needs it to be right.

    x: a grid from the first panel to the last. A step is large where x lies between split and top. count: how many
    contours there are, for 0, 1, ... large steps. tilts, low, high: a grid of c, and log M(c) of small and of large
    steps. rest_tilt: a c for the bound of `count` or more large steps.
    """

    x: Any
    split: Any
    top: Any
    count: Any
    tilts: Any
    low: Any
    high: Any
    rest_tilt: Any


def _best(c: Any, log_value: Any) -> Any:
    """The place of the minimum in log c, by a parabola through three points of a grid."""
    i = xp.clip(xp.argmin(log_value), 1, c.shape[0] - 2)
    left, middle, right = (log_value[i + k] for k in (-1, 0, 1))
    bend = left - 2 * middle + right
    move = xp.where(bend > 0, 0.5 * (left - right) / xp.where(bend > 0, bend, 1.0), 0.0)
    return c[i] * xp.exp(xp.clip(move, -1.0, 1.0) * xp.log(c[1] / c[0]))


def least_nodes(steps: Any, c: Any, log_moment: Any) -> tuple[Any, Any]:
    """The tilt that needs the fewest nodes (few nats of cancellation, a short period), and a multiple of their number.

    log_moment: K on the grid. The alias terms are those of Chernoff at every other tilt of the grid.
    """
    height = log_moment - 2 * xp.log(c)
    goal = xp.min(height) - 1
    apart = c[:, None] - c[None, :]
    needed = log_moment - 1 - xp.log(c) - (goal + xp.log(c[xp.argmin(height)])) + NATS
    period = needed[:, None] / xp.where(apart == 0, 1.0, xp.abs(apart))
    right = xp.min(xp.where(apart > 0, period, xp.inf), axis=0)
    left = xp.min(xp.where(apart < 0, period, xp.inf), axis=0)
    loss = height - goal
    nodes = xp.maximum(right, left) * xp.sqrt(NATS + loss)
    allowed = (loss <= 1.2 + xp.maximum(0.0, xp.log(1e6 / steps))) & (c <= c[xp.argmin(height)]) & (nodes > 0)
    nodes = xp.where(allowed, nodes, xp.inf)
    return c[xp.argmin(nodes)], xp.min(nodes)


def log_ways(steps: Any) -> Any:
    """log of the number of ways in which 0, 1, ..., MOST of the steps may be large; -inf for more than there are."""
    k = np.arange(float(MOST))
    return xp.concatenate([xp.zeros(1), xp.cumsum(xp.log(xp.maximum(steps - k, 0.0) / (k + 1)))])


def plan(step: Step) -> Plan:
    """From sums over a plain grid."""
    steps, s, removes = step.steps, step.scale, step.sign > 0
    cut = step.cut()
    theta = 1 + step.threshold()
    c = xp.exp(xp.linspace(xp.log(0.02 / (steps * theta)), xp.log(200 / (xp.minimum(s, 1.0) * theta)), _TILTS))

    def exponents(top: Any) -> tuple[Any, Any]:
        x = xp.linspace(step.left(), top, _GRID)
        return x, c[:, None] * step.value(x) - 0.5 * x * x + xp.log((x[1] - x[0]) / math.sqrt(2 * math.pi))

    single = xp.where(removes, log_normal_tail(cut - s), -xp.inf)

    def see(_: Any, seen: tuple[Any, Any]) -> tuple[Any, Any]:
        """Nats of delta by Chernoff's bound of the steps below a top, and a top for them."""
        log_delta = xp.min(steps * law.log_sum(exponents(seen[1])[1]) - xp.log(c)) - xp.log(steps) - 2.0
        nats = xp.maximum(-xp.maximum(log_delta, single), 0.0)
        return nats, xp.minimum(cut, xp.sqrt(2 * (nats + 30 + xp.log(steps))) + xp.where(removes, s, 0.0))

    first = xp.minimum(cut, _FAR + xp.where(removes, s, 0.0))
    nats, top = xp.fori_loop(0, _LOOKS, see, (xp.zeros_like(s), first))
    x, exponent = exponents(top)
    most = xp.max(exponent, axis=1, keepdims=True)
    mass = xp.exp(exponent - most)
    above = most + xp.log(xp.cumsum(mass[:, ::-1], axis=1)[:, ::-1])
    seen = xp.cumsum(mass, axis=1)
    below = most + xp.where(seen > 1e-300, xp.log(seen), xp.inf)

    def share(count: Any, large: Any, others: Any) -> Any:
        """log of Chernoff's bound of what so many large steps contribute to delta."""
        ways = log_ways(steps)[count] - xp.log(steps)
        return xp.min(ways + (steps - count) * others + count * large - xp.log(c)[:, None], axis=0)

    rests = xp.stack([share(k, above, above[:, :1]) for k in range(2, MOST + 1)])
    rests = xp.minimum(rests, jumps.log_several_steps(step, x))
    # Chernoff's bound of all steps together is far above delta where one or two of them decide
    apart = xp.logaddexp(xp.logaddexp(share(0, above, below), share(1, above, below)), rests[0])
    log_delta = xp.minimum(-nats, xp.min(xp.where(xp.log(steps) + log_normal_tail(x) < 0, apart, 0.0)))
    # the rounding of many steps outweighs a larger share of these
    enough = rests <= log_delta + _REST + xp.log(xp.maximum(steps / _MANY, 1.0))
    # more large steps than there are would be negligible beyond any split
    enough = enough & (np.arange(2.0, MOST + 1)[:, None] <= steps)
    count = 2 + xp.argmax(xp.any(enough[:, :-_ROOM], axis=1))
    place = xp.argmax(enough[count - 2])
    low, high = law.log_sum(xp.where(np.arange(_GRID) < place, exponent, -xp.inf)), above[:, place]
    # One contour is enough where large steps matter neither to its nodes nor to the Chernoff bound.
    (_, nodes), (_, fewest) = (least_nodes(steps, c, steps * each) for each in (above[:, 0], low))
    matter = (nodes > _PAYS * fewest) | (
        xp.min(steps * above[:, 0] - xp.log(c)) > xp.min(steps * low - xp.log(c)) + 0.1
    )
    several = removes & xp.any(enough[:, :-_ROOM]) & matter
    return Plan(
        x,
        xp.where(several, x[place], top),
        top,
        xp.where(several, count, 1),
        c,
        xp.where(several, low, above[:, 0]),
        xp.where(several, high, -xp.inf),
        _best(c, (steps - count) * above[:, 0] + count * high - xp.log(c)),
    )
