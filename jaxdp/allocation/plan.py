"""Choice of cut, split and tilts for an epoch of random allocation (notebooks/proofs/allocation.md, sections 2-4)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp.allocation import jumps, law
from jaxdp.allocation.law import Step
from jaxdp.numerics.special import log_normal_tail
from jaxdp.runtime.arrays import xp

# log of the share of delta that uncounted large steps may contribute, and steps beyond which it grows like T.
_REST, _MANY = math.log(1e-8), 3e4
_GRID = 256  # points of the grid in x
_TILTS = 96  # points of the grid in c
MOST = 4  # largest number of contours
_LOOKS = 4  # estimates of delta; each lowers the top for the next one
_ROOM = 8  # smallest number of grid points between split and top
_FAR = 38.0  # x beyond which the normal law has no mass in float64


class Plan(NamedTuple):
    """Choice of split, top and tilts. The bounds are valid for every choice; a bad one makes them wide.

    x: grid from the first panel to the top. split, top: a step is large if its x lies between them. count: number of
    contours, one each for 0, 1, ..., count - 1 large steps. tilts, low, high: grid of c, and log M(c) of small and of
    large steps on it. rest_tilt: a c for the bound of `count` or more large steps.
    """

    x: Any
    split: Any
    top: Any
    count: Any
    tilts: Any
    low: Any
    high: Any
    rest_tilt: Any


def log_ways(steps: Any) -> Any:
    """log of the binomial coefficients C(steps, k), k = 0, 1, ..., MOST; -inf for k > steps."""
    k = np.arange(float(MOST))
    return xp.concatenate([xp.zeros(1), xp.cumsum(xp.log(xp.maximum(steps - k, 0.0) / (k + 1)))])


def plan(step: Step) -> Plan:
    """The plan of a step, from sums over a uniform grid in x."""
    steps, s, removes = step.steps, step.scale, step.sign > 0
    cut = step.cut()
    theta = 1 + step.threshold()
    c = xp.exp(xp.linspace(xp.log(0.02 / (steps * theta)), xp.log(200 / (xp.minimum(s, 1.0) * theta)), _TILTS))

    def exponents(top: Any) -> tuple[Any, Any]:
        x = xp.linspace(step.left(), top, _GRID)
        return x, c[:, None] * step.value(x) - 0.5 * x * x + xp.log((x[1] - x[0]) / math.sqrt(2 * math.pi))

    single = xp.where(removes, log_normal_tail(cut - s), -xp.inf)

    def lower_top(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        """(-log delta by Chernoff's bound of the steps below the top, a top beyond which that delta has no share)."""
        log_delta = xp.min(steps * law.log_sum(exponents(state[1])[1]) - xp.log(c)) - xp.log(steps) - 2.0
        nats = xp.maximum(-xp.maximum(log_delta, single), 0.0)
        return nats, xp.minimum(cut, xp.sqrt(2 * (nats + 30 + xp.log(steps))) + xp.where(removes, s, 0.0))

    first = xp.minimum(cut, _FAR + xp.where(removes, s, 0.0))
    nats, top = xp.fori_loop(0, _LOOKS, lower_top, (xp.zeros_like(s), first))
    x, exponent = exponents(top)
    most = xp.max(exponent, axis=1, keepdims=True)
    mass = xp.exp(exponent - most)
    above = most + xp.log(xp.cumsum(mass[:, ::-1], axis=1)[:, ::-1])
    cumulative = xp.cumsum(mass, axis=1)
    below = most + xp.where(cumulative > 1e-300, xp.log(cumulative), xp.inf)

    def counted(count: Any, large: Any, others: Any) -> Any:
        """log of the Chernoff bound of the contribution of ``count`` large steps to delta."""
        ways = log_ways(steps)[count] - xp.log(steps)
        return xp.min(ways + (steps - count) * others + count * large - xp.log(c)[:, None], axis=0)

    at_least = xp.stack([counted(k, above, above[:, :1]) for k in range(2, MOST + 1)])
    at_least = xp.minimum(at_least, jumps.log_several_steps(step, x))
    # Where one or two large steps decide, the Chernoff bound of all steps together is far above delta.
    separated = xp.logaddexp(xp.logaddexp(counted(0, above, below), counted(1, above, below)), at_least[0])
    log_delta = xp.minimum(-nats, xp.min(xp.where(xp.log(steps) + log_normal_tail(x) < 0, separated, 0.0)))
    # With many steps their rounding outweighs even a larger share.
    enough = at_least <= log_delta + _REST + xp.log(xp.maximum(steps / _MANY, 1.0))
    # More than T large steps have probability 0, which would make every split acceptable.
    enough = enough & (np.arange(2.0, MOST + 1)[:, None] <= steps)
    count = 2 + xp.argmax(xp.any(enough[:, :-_ROOM], axis=1))
    place = xp.argmax(enough[count - 2])
    low, high = law.log_sum(xp.where(np.arange(_GRID) < place, exponent, -xp.inf)), above[:, place]
    # One contour is enough if large steps hardly change the Chernoff bound.
    large_matter = xp.min(steps * above[:, 0] - xp.log(c)) > xp.min(steps * low - xp.log(c)) + 0.1
    separate = removes & xp.any(enough[:, :-_ROOM]) & large_matter
    return Plan(
        x,
        xp.where(separate, x[place], top),
        top,
        xp.where(separate, count, 1),
        c,
        xp.where(separate, low, above[:, 0]),
        xp.where(separate, high, -xp.inf),
        c[xp.argmin((steps - count) * above[:, 0] + count * high - xp.log(c))],
    )
