"""E[(X_1 + ... + X_T)_+] of one epoch of random allocation, certified from both sides.

Steps with x > cut are taken in closed form. Of the others those with x > split are counted: none, one, two or three (a
contour each, at its own tilt), or more (a Chernoff bound). Proofs: notebooks/proofs/allocation.md, sections 2 to 7.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.allocation import jumps, law, tail
from jaxdp.allocation.law import Law, Step
from jaxdp.allocation.plan import MOST, NATS, Plan, least_nodes, log_ways, plan
from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_normal_tail
from jaxdp.runtime.arrays import xp

_ABOVE = np.array([0.05, 0.15, 0.4, 1.0, 2.5, 6.0, 16.0, 40.0])  # tilts, in deviations of the tilted sum
_BELOW = np.array([0.96, 0.88, 0.75, 0.55, 0.3, 0.08, 0.0])  # tilts, in units of the contour's
_NEEDED, _LEAST_SHARE = 40.0, 0.1  # nats of the largest integrand to which the quadrature is to be close
_LEVELS = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0])  # of the last node: where the quadrature's error is bounded
_SLACK = 64 * ULP
_NEAR = np.exp(0.35 * np.arange(-4.0, 5.0))


class Effort(NamedTuple):
    """Static sizes: panels on each side of the split; at most `blocks` times rows * columns nodes of a contour."""

    panels: int
    rows: int
    columns: int
    blocks: int = 1

    @property
    def nodes(self) -> int:
        """The largest number of nodes of a contour."""
        return self.rows * self.columns * self.blocks


class Evaluation(NamedTuple):
    """Bounds of log delta, and an estimate between them."""

    lower: Any
    upper: Any
    estimate: Any


class _Part(NamedTuple):
    """The contour of a fixed number of large steps; an epsilon shifts the sum S, which changes none of these.

    log_total: K(tilt), in whose exponential the others are measured. step, nodes: distance and number of the nodes.
    size, angle: modulus of h/pi F(z)/z^2 at the nodes, halved at the first one, and the angle of F. moduli: the sum of
    size. error: bound of the rounding of the sum over nodes for no shift. turning: its growth with the shift. beyond:
    bound of the nodes left out. points, growths: other tilts, and upper bounds of K there less K(tilt).
    """

    log_total: Any
    tilt: Any
    step: Any
    nodes: Any
    size: Any
    angle: Any
    moduli: Any
    error: Any
    turning: Any
    beyond: Any
    points: Any
    growths: Any


class Contour(NamedTuple):
    """What `prepare` computes for one step; `evaluate` asks it for neighbouring epsilons.

    count: how many of the parts are in use. rest_tilts, rest: Chernoff bounds of more than one large step, in logs.
    """

    step: Step
    cut: Any
    split: Any
    top: Any
    count: Any
    parts: _Part
    rest_tilts: Any
    rest: Any
    jump: jumps.Splits


def _edges(step: Step, made: Plan, c: Any, t: Any, panels: int) -> Any:
    """Edges on both sides of the split, of panels of about equal cost: curvature, tilt and oscillation."""
    x = made.x
    height = c * step.value(x) - 0.5 * x * x
    share = xp.clip(1 + (height - xp.max(height)) / _NEEDED, _LEAST_SHARE, 1.0)  # of the digits that are needed there
    turns = (xp.exp(step.log_ratio(x)) * step.scale) * (c / 4 + t / 10) * share + xp.maximum(0.5, step.scale)
    cost = xp.cumsum(turns)
    limits = xp.stack([made.x[0], made.split, made.top])
    at = xp.interp(limits, x, cost)
    place = np.linspace(0.0, 1.0, panels + 1)
    inner = xp.interp(at[:-1, None] + (at[1:] - at[:-1])[:, None] * place, cost, x)
    return xp.where(place == 0, limits[:-1, None], xp.where(place == 1, limits[1:, None], inner))


def _log_errors(step: Step, panels: Law, c: Any, t: Any) -> Any:
    """logs of what both sums over nodes may be off M(c + it'), |t'| <= t: quadrature, and x left of the panels."""
    missing = law.log_left(step, panels.edges[0, 0], xp.asarray(c))[..., None] + np.array([0.0, -np.inf])
    return xp.logaddexp(law.log_quadrature_errors(step, panels.edges, c, t), missing)


def _moment_bounds(step: Step, panels: Law, c: Any) -> Any:
    """Upper bounds of log M(c) of both intervals, c >= 0; leading axes those of c."""
    slack = ULP * (panels.value.size + 1000 + 2 * xp.abs(c * step.value(panels.edges[1, -1])))[..., None]
    return xp.logaddexp(law.log_moments(panels, c), _log_errors(step, panels, c, xp.zeros(()))) + slack


def _weights(panels: Law, c: Any, log_moments: Any) -> Any:
    shift = xp.where(xp.isfinite(log_moments), log_moments, 0.0)
    return xp.exp(panels.log_mass + c * panels.value - shift[:, None, None])


def _powers(angle: Any, count: int) -> Any:
    """cos and sin of j angle, j = 0 .. count - 1, along a first axis: each from the one before."""
    a, b = xp.cos(angle), xp.sin(angle)

    def turn(z: Any, _: Any) -> tuple[Any, Any]:
        return (z[0] * a - z[1] * b, z[0] * b + z[1] * a), z

    return xp.scan(turn, (xp.ones_like(a), xp.zeros_like(a)), None, length=count)[1]


def _blocks(nodes: Any, effort: Effort) -> Any:
    """Number of blocks that hold so many nodes, or the largest."""
    some = xp.ceil(nodes / (effort.rows * effort.columns) - 1e-6)
    return xp.asarray(xp.clip(xp.where(some > 0, some, 1e9), 1, effort.blocks), np.int32)


def _transform(x: Any, w: Any, h: Any, blocks: Any, effort: Effort) -> Any:
    """Real and imaginary parts of phi(jh) = sum w e^{ijhx}, j = 0, 1, ..., for so many blocks of nodes; 0 beyond.

    e^{ijhx} is a product: of a power for the block, one for the row and one for the column. Matrix products join them.
    """
    rows, columns = effort.rows, effort.columns
    right = xp.concatenate(_powers(h * x, columns)).T
    a, b = _powers(h * columns * x, rows)
    turn = h * (rows * columns) * x
    cosine, sine = xp.cos(turn), xp.sin(turn)

    def block(k: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        made, u, v = state
        both = xp.exact_matmul(xp.concatenate([a * u - b * v, a * v + b * u]), right)
        re = both[:rows, :columns] - both[rows:, columns:]
        im = both[rows:, :columns] + both[:rows, columns:]
        return xp.set_at(made, k, xp.stack([re, im])), u * cosine - v * sine, u * sine + v * cosine

    nothing = xp.zeros((effort.blocks, 2, rows, columns))
    made = xp.fori_loop(0, blocks, block, (nothing, w, 0 * w))[0]
    return xp.moveaxis(made, 1, 0).reshape(2, -1)


def _both_transforms(
    step: Step, panels: Law, powers: Any, c: Any, log_moments: Any, h: Any, last: Any, effort: Effort
) -> tuple[Any, Any, Any]:
    """|phi| at the nodes, its angle and a bound of its error, for both intervals; 1 for one that no step is in."""
    t = h * np.arange(float(effort.nodes))
    w = _weights(panels, c, log_moments)
    x = panels.value
    value, w_flat = x.reshape(2, -1), w.reshape(2, -1)
    one = xp.stack([xp.ones(effort.nodes), xp.zeros(effort.nodes)])
    blocks = _blocks(last / h + 1, effort)

    def add(k: Any, made: Any) -> Any:
        return xp.set_at(made, k, _transform(value[k], w_flat[k], h, blocks, effort))

    re, im = xp.moveaxis(xp.fori_loop(0, xp.where(powers[1] > 0, 2, 1), add, xp.stack([one, one])), 1, 0)
    # of a weight: its exponent and its logarithm's parts; of a power: 8 at each turn; of a sum of n terms: n units
    turns = effort.rows + effort.columns + effort.blocks
    units = 1.5 * w[0].size + 30 + 8 * turns + 4 * xp.abs(c * panels.value) + panels.x**2
    own = ULP * (xp.sum(w * units, axis=(1, 2)) + 4 * xp.abs(xp.where(xp.isfinite(log_moments), log_moments, 0.0)))
    moved = xp.sum(w * (panels.blur + 6 * ULP * xp.abs(panels.value)), axis=(1, 2))
    levels = last * _LEVELS
    missed = xp.exp(_log_errors(step, panels, c, levels) - log_moments).T[:, xp.searchsorted(levels[:-1], t)]
    angle = xp.arctan2(im, re)
    error = own[:, None] + missed + (c + t) * moved[:, None] + 4 * ULP * xp.abs(angle)
    return xp.sqrt(re * re + im * im), angle, error


def _alias(step: Step, growths: Any, points: Any, c: Any, period: Any) -> Any:
    """Bounds of both alias sums in units of e^{K(c)}; growths, rows: K at the points (the last one is 0) minus K(c)."""
    shift = (points - c)[:-1] * period
    each = xp.exp(growths[:, :-1] - shift) / (math.e * points[:-1] * -xp.expm1(-xp.abs(shift)))
    each = xp.where(xp.isnan(each), xp.inf, each)
    right = xp.min(xp.where(shift > 0, each, xp.inf), axis=1)
    right = xp.where((step.sign < 0) & (period >= 2 * step.steps), 0.0, right)  # all of T e^-epsilon and more
    left = xp.min(xp.where(shift < 0, each, xp.inf), axis=1)
    # (S + mP)_+ <= S_+ + mP
    rest = -xp.expm1(-c * period)
    plain = xp.exp(-c * period) / (rest * math.e * c) + period * xp.exp(growths[:, -1] - c * period) / rest**2
    return (right + xp.fmin(left, xp.where(xp.isnan(plain), xp.inf, plain))) * (1 + 1e-9)


def _chernoff(growths: Any, points: Any) -> Any:
    """Bound of E[S_+] in units of e^{K(c)}: x_+ <= e^{px}/(e p)."""
    return xp.exp(xp.min(growths[:, :-1] - 1 - xp.log(points[:-1]), axis=1))


def contour_of(live: Step, made: Plan, large: Any, c: Any, effort: Effort) -> _Part:
    """The contour of exactly ``large`` steps with x between split and top, all others below the split."""
    step = jax.tree_util.tree_map(xp.stop_gradient, live)
    powers = xp.stack([step.steps - large, large])
    ways = log_ways(step.steps)[large]
    found = tail.extremes(step, c)

    def groups(panels: Law) -> tuple[Any, tail.Group]:
        moments = law.log_moments(panels, c)
        usable = xp.where(xp.isfinite(moments), moments, 0.0)
        off = xp.exp(_log_errors(step, panels, c, xp.zeros(())) - usable)
        mass = xp.sum(_weights(panels, c, moments), axis=-1) + off[:, None]
        return moments, xp.vmap(lambda m, e, w: tail.groups(step, c, m, e, w, found))(usable, panels.edges, mass)

    def total(log_moments: Any) -> Any:
        """K: of all steps."""
        return xp.sum(xp.where(powers > 0, powers * log_moments, 0.0), axis=-1) + ways

    def build(t: Any) -> tuple[Law, Any, tail.Group, Any]:
        panels = law.on_panels(step, _edges(step, made, c, t, effort.panels))
        moments, parts = groups(panels)
        return panels, moments, parts, tail.fallen_at(parts, powers, c, NATS)

    # panels for an oscillation that is found with panels for none
    _, (panels, moments, parts, t_wanted) = xp.scan(
        lambda t, _: (lambda made: (made[-1], made))(build(t)), xp.zeros(()), None, length=2
    )
    panels, moments, parts, t_wanted = jax.tree_util.tree_map(lambda a: a[1], (panels, moments, parts, t_wanted))
    log_total = total(moments)
    w = _weights(panels, c, moments)
    mean = xp.sum(w * panels.value, axis=(1, 2))
    deviation = xp.sqrt(xp.sum(powers * xp.sum(w * (panels.value - mean[:, None, None]) ** 2, axis=(1, 2))))
    points = xp.concatenate([c + _ABOVE / deviation, c * _BELOW])
    bounds = total(_moment_bounds(step, panels, points))
    growths = bounds - log_total

    def long_enough(u: Any) -> Any:
        return ~(_alias(step, growths[None], points, c, xp.exp(u))[0] * c > math.exp(-NATS))

    wanted = xp.exp(0.5 * sum(bisect(long_enough, -xp.log(c) - 2.0, -xp.log(c) + 21.0, tail.COARSE)))
    used = xp.stop_gradient(_blocks(t_wanted * wanted / (2 * math.pi) + 1, effort)) * (effort.rows * effort.columns)
    last = t_wanted * xp.minimum(xp.sqrt(2 * math.pi * (used - 1) / (t_wanted * wanted)), 1.1)
    h = last / (used - 1)
    # differentiable in the step's numbers; where nodes and panels lie is not
    step = live
    panels = law.on_panels(step, panels.edges)
    moments = law.log_moments(panels, c)
    log_total = total(moments)
    modulus, angle, error = _both_transforms(step, panels, powers, c, moments, h, last, effort)
    t = h * np.arange(float(effort.nodes))
    power = powers[:, None]

    def log_power(modulus: Any) -> Any:
        return xp.sum(xp.where(power > 0, power * xp.log(xp.maximum(modulus, 1e-300)), 0.0), axis=0)

    log_size, angle = log_power(modulus), xp.sum(power * angle, axis=0)
    half = xp.where(t <= (1 + 1e-9) * last, xp.where(t == 0, 0.5, 1.0) / (c * c + t * t), 0.0) * (h / math.pi)
    size = half * xp.exp(log_size)
    # |a^n - b^n| <= n |a - b| max(a, b)^(n - 1)
    most = modulus + error
    relative = xp.sum(xp.where(power > 0, power * error / most, 0.0), axis=0)
    relative = relative + ULP * (12 + 2 * xp.abs(angle) + 4 * xp.abs(log_size))
    largest = half * xp.exp(log_power(most))
    return _Part(
        log_total=log_total,
        tilt=c,
        step=h,
        nodes=used,
        size=size,
        angle=angle,
        moduli=xp.sum(size),
        error=xp.sum(largest * relative),
        turning=4 * ULP * xp.sum(largest * t),
        beyond=tail.integral(parts, powers, c, last) / math.pi,
        points=points,
        growths=growths,
    )


def beyond_the_cut(step: Step, epsilon: Any, cut: Any) -> tuple[Any, Any]:
    """(value, error) of the part of delta from steps beyond the cut (section 2); "remove" only."""
    odds, excess = xp.exp(epsilon), xp.expm1(epsilon)
    one, none = xp.exp(log_normal_tail(xp.stack([cut - step.scale, cut])))
    log_below = xp.log1p(-xp.minimum(none, 0.5))
    others = -xp.expm1((step.steps - 1) * log_below)
    terms = xp.stack([one + 0 * odds, -odds * none, -others * excess, others * odds * none, -others * one + 0 * odds])
    error = 16 * ULP * (4 + cut * cut + epsilon) * xp.sum(xp.abs(terms), axis=0)
    return tuple(xp.where(step.sign > 0, xp.stack([xp.sum(terms, axis=0), error]), 0.0))


def _dropped(step: Step, cut: Any, top: Any) -> Any:
    """Bound of the part of delta from steps between top and cut, where the panels end before the cut (section 3)."""
    one, none = xp.exp(log_normal_tail(xp.stack([top - step.scale, top])))
    deviation = xp.sqrt(xp.expm1(xp.minimum(step.scale**2, 600.0)))
    removed = one + none * xp.minimum(step.steps, 0.5 * xp.sqrt(step.steps) * deviation)
    return xp.where(top < cut, xp.where(step.sign > 0, removed, step.steps * none) * (1 + 1e-12), 0.0)


def _rest(step: Step, made: Plan, effort: Effort) -> tuple[Any, Any]:
    """Tilts, and logs of bounds at them of E[S_+; at least `count` steps beyond the split]/T (section 3)."""
    panels = law.on_panels(step, _edges(step, made, made.rest_tilt, xp.zeros(()), effort.panels))
    c, count = made.rest_tilt * _NEAR, made.count
    low, high = xp.moveaxis(_moment_bounds(step, panels, c), -1, 0)
    bound = log_ways(step.steps)[count] + (step.steps - count) * xp.logaddexp(low, high) + count * high - 1 - xp.log(c)
    bound = xp.append(bound - xp.log(step.steps) + 64 * ULP * step.steps, jumps.log_several_steps(step, made.split))
    return xp.append(c, 0.0), xp.where(xp.isnan(bound), xp.inf, bound)


def prepare(step: Step, effort: Effort) -> Contour:
    """The contour made for the step's epsilon. `evaluate` asks it for others."""
    still = jax.tree_util.tree_map(xp.stop_gradient, step)
    made = plan(still)
    # Loops in place of branches: a branch of a batch computes both sides for every point.
    nodes, tilts = xp.zeros((MOST, effort.nodes)), xp.zeros((MOST, _ABOVE.size + _BELOW.size))
    each = dict.fromkeys(_Part._fields, xp.zeros(MOST)) | dict.fromkeys(("size", "angle"), nodes)
    empty = _Part(**(each | dict.fromkeys(("points", "growths"), tilts)))

    def add(k: Any, parts: _Part) -> _Part:
        log_moment = log_ways(still.steps)[k] + (still.steps - k) * made.low + xp.where(k > 0, k * made.high, 0.0)
        one = contour_of(step, made, k, least_nodes(still.steps, made.tilts, log_moment)[0], effort)
        return _Part(*(xp.set_at(all_of, k, x) for all_of, x in zip(parts, one, strict=True)))

    parts = xp.fori_loop(0, made.count, add, empty)
    nothing = (xp.ones(_NEAR.size + 1), xp.full(_NEAR.size + 1, -xp.inf))
    # the turn, which is 0, keeps the compiler from moving the computation out of the loop
    rest_tilts, rest = xp.fori_loop(
        0,
        xp.where(made.count > 1, 1, 0),
        lambda turn, _: _rest(still, made._replace(rest_tilt=made.rest_tilt + turn), effort),
        nothing,
    )
    splits = jumps.prepare(still)
    return Contour(step, still.cut(), made.split, made.top, made.count, parts, rest_tilts, rest, splits)


def evaluate(made: Contour, epsilon: Any, effort: Effort) -> Evaluation:
    """Bounds of log delta at an array of epsilons >= 0, and an estimate.

    The bounds are close where epsilon is close to the one that the contour was made for. Where the cut of the contour
    is too small, for larger epsilons of "remove" and smaller ones of "add", they are infinite.
    """
    step, shape = made.step, xp.zeros_like(epsilon)
    still = jax.tree_util.tree_map(xp.stop_gradient, step)
    removes = step.sign > 0
    reached = step.sign * epsilon <= step.sign * step.epsilon
    shift = step.steps * step.sign * xp.exp(step.sign * step.epsilon) * xp.expm1(step.sign * (epsilon - step.epsilon))
    block = effort.rows * effort.columns

    def add(k: Any, sums: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        part = _Part(*(x[k] for x in made.parts))
        c = part.tilt
        sizes, angles = part.size.reshape(-1, block), part.angle.reshape(-1, block)

        def some(j: Any, total: Any) -> Any:
            z = part.step * (block * j + np.arange(float(block)))
            phase = angles[j] - z * shift[:, None]
            each = (c * c - z * z) * xp.cos(phase) + 2 * c * z * xp.sin(phase)
            return total + xp.sum(sizes[j] / (c * c + z * z) * each, axis=1)

        value = xp.fori_loop(0, _blocks(part.nodes, effort), some, shape)
        log_total = part.log_total - c * shift
        off = part.error + part.turning * xp.abs(shift) + part.beyond
        off = off + ULP * (effort.nodes + 16 + 4 * xp.abs(log_total) + 4 * xp.abs(c * shift)) * part.moduli
        growths = part.growths - (part.points - c) * shift[:, None]
        alias = _alias(step, growths, part.points, c, 2 * math.pi / part.step)
        least = xp.maximum(value - off - alias, 0.0)
        unit = xp.exp(log_total + xp.where(removes, 0.0, epsilon) - xp.log(step.steps))
        most = xp.fmin(value + off, _chernoff(growths, part.points))
        new = value, xp.where(xp.isnan(least), 0.0, least), most
        return tuple(total + unit * x for total, x in zip(sums, new, strict=True))

    value, lower, upper = xp.fori_loop(0, made.count, add, (shape,) * 3)
    closed, closed_error = beyond_the_cut(step, epsilon, made.cut)
    estimate = value + closed
    rest = xp.exp(xp.min(made.rest - made.rest_tilts * shift[:, None], axis=1))
    upper = upper + closed + closed_error + rest + _dropped(still, made.cut, made.top)
    lower = lower + closed - closed_error
    sure = (estimate >= lower) & (estimate <= upper) & (upper - lower < 0.2 * upper)
    other = jumps.bracket(still, made.jump, xp.stop_gradient(epsilon))
    lower, upper = xp.fmax(lower, other.lower), xp.fmin(upper, other.upper)
    estimate = xp.where(sure, estimate, xp.sqrt(xp.maximum(lower, 1e-4 * upper)) * xp.sqrt(upper))
    # moved between the closest bounds; its derivatives stay those of the contour
    estimate = estimate + xp.stop_gradient(xp.clip(estimate, lower, upper) - estimate)
    return Evaluation(
        xp.where(reached & (lower > 0), xp.log(xp.where(lower > 0, lower, 1.0)) - _SLACK, -xp.inf),
        xp.where(reached & (upper >= 0), xp.log(xp.maximum(upper, NEXT_TO_ZERO)) + _SLACK, xp.inf),
        xp.where(estimate > 0, xp.log(xp.where(estimate > 0, estimate, 1.0)), -xp.inf),
    )
