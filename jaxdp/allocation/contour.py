"""E[(X_1 + ... + X_T)_+] of one epoch of random allocation, certified from both sides.

X: see `allocation.law`. Steps with x > cut have a closed form. Steps with split < x <= top <= cut are large: zero,
one, two or three large steps have a contour each, with its own tilt c; more large steps have a Chernoff bound. The
transform for k large steps is F(z) = C(T, k) M_low(z)^(T - k) M_high(z)^k, K = log F, where M(z) = E[e^{zX}] over the
interval x <= split or split < x <= top. Proofs: notebooks/proofs/allocation.md, sections 2 to 7.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.allocation import jumps, law, tail
from jaxdp.allocation.law import Law, Step
from jaxdp.allocation.plan import MOST, Plan, log_ways, plan
from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp

# Tilts of Chernoff bounds: c + _ABOVE/(standard deviation of the tilted sum) and c _BELOW, c the tilt of the contour.
_ABOVE = np.array([0.05, 0.15, 0.4, 1.0, 2.5, 6.0, 16.0, 40.0])
_BELOW = np.array([0.96, 0.88, 0.75, 0.55, 0.3, 0.08, 0.0])
# `_edges` weighs tilt and oscillation with 1 - (nats below the largest integrand)/_NEEDED, at least _LEAST_SHARE.
_NEEDED, _LEAST_SHARE = 40.0, 0.1
_LEVELS = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0])  # t of bounds of the quadrature error / t of the last node
_SLACK = 64 * ULP  # rounding of log delta
_NEAR = np.exp(0.35 * np.arange(-4.0, 5.0))  # tilts of the bound of uncounted large steps / tilt of the plan


class Effort(NamedTuple):
    """Static sizes: panels on each side of the split; a contour has at most `blocks` blocks of rows * columns nodes.

    nats: nats by which the integrand falls up to the last node. The more, the more epsilons can share the contour.
    closed: intersect its bounds with those of `jaxdp.allocation.jumps`.
    """

    panels: int
    rows: int
    columns: int
    blocks: int = 1
    nats: float = 20.0
    closed: bool = True

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
    """The contour for a fixed number of large steps. No field depends on the epsilon asked for, which only shifts S.

    S = X_1 + ... + X_T. log_total: K(tilt); size, moduli, error, turning and beyond are in units of e^K(tilt). step,
    nodes: distance h and number of the nodes z = tilt + ijh. size, angle: |h/pi F(z)/z^2|, halved at j = 0, and the
    angle of F(z). moduli: sum of size. error: bound of the rounding of the sum over nodes if S is not shifted. turning:
    increase of this bound per unit of shift. beyond: bound of the sum over the omitted nodes. points, growths: other
    tilts, and upper bounds of K(points) - K(tilt).
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
    """All data of one step from which `evaluate` computes delta at neighbouring epsilons. Made by `prepare`.

    parts: part k, k < count, is the contour of k large steps; later parts are unused. rest: logs of bounds of the
    contribution of `count` or more large steps to delta, each at a tilt of rest_tilts. jump: data of `jumps.bracket`,
    or None without it.
    """

    step: Step
    cut: Any
    split: Any
    top: Any
    count: Any
    parts: _Part
    rest_tilts: Any
    rest: Any
    jump: jumps.Splits | None


def _edges(step: Step, made: Plan, c: Any, t: Any, panels: int) -> Any:
    """Edges on both sides of the split. Panels have about equal shares of curvature, tilt and oscillation."""
    x = made.x
    height = c * step.value(x) - 0.5 * x * x
    share = xp.clip(1 + (height - xp.max(height)) / _NEEDED, _LEAST_SHARE, 1.0)
    density = (xp.exp(step.log_ratio(x)) * step.scale) * (c / 4 + t / 10) * share + xp.maximum(0.5, step.scale)
    cost = xp.cumsum(density)
    limits = xp.stack([made.x[0], made.split, made.top])
    limit_costs = xp.interp(limits, x, cost)
    place = np.linspace(0.0, 1.0, panels + 1)
    inner = xp.interp(limit_costs[:-1, None] + (limit_costs[1:] - limit_costs[:-1])[:, None] * place, cost, x)
    return xp.where(place == 0, limits[:-1, None], xp.where(place == 1, limits[1:, None], inner))


def _log_errors(step: Step, panels: Law, c: Any, t: Any) -> Any:
    """logs of error bounds of M(c + it'), |t'| <= t, for both intervals: quadrature, and x left of the panels."""
    missing = law.log_left(step, panels.edges[0, 0], xp.asarray(c))[..., None] + np.array([0.0, -np.inf])
    return xp.logaddexp(law.log_quadrature_errors(step, panels.edges, c, t), missing)


def _moment_bounds(step: Step, panels: Law, c: Any) -> Any:
    """Upper bounds of log M(c) of both intervals, c >= 0. Axes: the axes of c, then the interval."""
    slack = ULP * (panels.value.size + 1000 + 2 * xp.abs(c * step.value(panels.edges[1, -1])))[..., None]
    return xp.logaddexp(law.log_moments(panels, c), _log_errors(step, panels, c, xp.zeros(()))) + slack


def _weights(panels: Law, c: Any, log_moments: Any) -> Any:
    shift = xp.where(xp.isfinite(log_moments), log_moments, 0.0)
    return xp.exp(panels.log_mass + c * panels.value - shift[:, None, None])


def _powers(angle: Any, count: int) -> Any:
    """cos and sin of j angle, j = 0, ..., count - 1, along a first axis, by repeated rotation."""
    a, b = xp.cos(angle), xp.sin(angle)

    def turn(z: Any, _: Any) -> tuple[Any, Any]:
        return (z[0] * a - z[1] * b, z[0] * b + z[1] * a), z

    return xp.scan(turn, (xp.ones_like(a), xp.zeros_like(a)), None, length=count)[1]


def _blocks(nodes: Any, effort: Effort) -> Any:
    """Number of blocks that hold ``nodes`` nodes, at most effort.blocks."""
    needed = xp.ceil(nodes / (effort.rows * effort.columns) - 1e-6)
    return xp.asarray(xp.clip(xp.where(needed > 0, needed, 1e9), 1, effort.blocks), np.int32)


def _transform(x: Any, w: Any, h: Any, blocks: Any, effort: Effort) -> Any:
    """Real and imaginary parts of phi(jh) = sum w e^{ijhx}, j = 0, 1, ..., for the first ``blocks`` blocks.

    Beyond them it is 1, where its angle has a derivative.

    e^{ijhx} is the product of a power for the block, a power for the row and a power for the column of j. Matrix
    products sum over x.
    """
    rows, columns = effort.rows, effort.columns
    right = xp.concatenate(_powers(h * x, columns)).T
    a, b = _powers(h * columns * x, rows)
    angle = h * (rows * columns) * x
    cosine, sine = xp.cos(angle), xp.sin(angle)

    def block(k: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        values, u, v = state
        product = xp.exact_matmul(xp.concatenate([a * u - b * v, a * v + b * u]), right)
        re = product[:rows, :columns] - product[rows:, columns:]
        im = product[rows:, :columns] + product[:rows, columns:]
        return xp.set_at(values, k, xp.stack([re, im])), u * cosine - v * sine, u * sine + v * cosine

    ones = xp.ones((effort.blocks, rows, columns))
    values = xp.fori_loop(0, blocks, block, (xp.stack([ones, 0 * ones], axis=1), w, 0 * w))[0]
    return xp.moveaxis(values, 1, 0).reshape(2, -1)


def _both_transforms(
    step: Step, panels: Law, powers: Any, c: Any, log_moments: Any, h: Any, last: Any, effort: Effort
) -> tuple[Any, Any, Any]:
    """(|phi|, angle of phi, bound of its error) at the nodes for both intervals; phi = 1 for an interval of power 0."""
    t = h * np.arange(float(effort.nodes))
    w = _weights(panels, c, log_moments)
    x = panels.value
    value, w_flat = x.reshape(2, -1), w.reshape(2, -1)
    ones = xp.stack([xp.ones(effort.nodes), xp.zeros(effort.nodes)])
    blocks = _blocks(last / h + 1, effort)

    def add(k: Any, done: Any) -> Any:
        return xp.set_at(done, k, _transform(value[k], w_flat[k], h, blocks, effort))

    re, im = xp.moveaxis(xp.fori_loop(0, xp.where(powers[1] > 0, 2, 1), add, xp.stack([ones, ones])), 1, 0)
    # Rounding, in ULP (section 7): 1.5 n for a sum of n terms, 8 per rotation in a power, the exponent of a weight.
    turns = effort.rows + effort.columns + effort.blocks
    units = 1.5 * w[0].size + 30 + 8 * turns + 4 * xp.abs(c * panels.value) + panels.x**2
    rounding = ULP * (xp.sum(w * units, axis=(1, 2)) + 4 * xp.abs(xp.where(xp.isfinite(log_moments), log_moments, 0.0)))
    value_error = xp.sum(w * (panels.blur + 6 * ULP * xp.abs(panels.value)), axis=(1, 2))
    levels = last * _LEVELS
    quadrature = xp.exp(_log_errors(step, panels, c, levels) - log_moments).T[:, xp.searchsorted(levels[:-1], t)]
    angle = xp.arctan2(im, re)
    error = rounding[:, None] + quadrature + (c + t) * value_error[:, None] + 4 * ULP * xp.abs(angle)
    return xp.sqrt(re * re + im * im), angle, error


def _alias(growths: Any, points: Any, c: Any, period: Any) -> Any:
    """Bound of both alias sums in units of e^{K(c)}. growths: rows of K(points) - K(c), where points[-1] = 0."""
    shift = (points - c)[:-1] * period
    chernoff = xp.exp(growths[:, :-1] - shift) / (math.e * points[:-1] * -xp.expm1(-xp.abs(shift)))
    chernoff = xp.where(xp.isnan(chernoff), xp.inf, chernoff)
    right = xp.min(xp.where(shift > 0, chernoff, xp.inf), axis=1)
    left = xp.min(xp.where(shift < 0, chernoff, xp.inf), axis=1)
    # (S + m period)_+ <= S_+ + m period
    gap = -xp.expm1(-c * period)
    plain = xp.exp(-c * period) / (gap * math.e * c) + period * xp.exp(growths[:, -1] - c * period) / gap**2
    return (right + xp.fmin(left, xp.where(xp.isnan(plain), xp.inf, plain))) * (1 + 1e-9)


def _chernoff(growths: Any, points: Any) -> Any:
    """Upper bound of E[S_+] in units of e^{K(c)}, from x_+ <= e^{px}/(e p) at the points p."""
    return xp.exp(xp.min(growths[:, :-1] - 1 - xp.log(points[:-1]), axis=1))


def contour_of(live: Step, made: Plan, large: Any, c: Any, effort: Effort) -> _Part:
    """The contour for exactly ``large`` steps with x between split and top and all others below the split."""
    step = jax.tree_util.tree_map(xp.stop_gradient, live)
    powers = xp.stack([step.steps - large, large])
    log_count = log_ways(step.steps)[large]
    extremes = tail.extremes(step, c)

    def groups(panels: Law) -> tuple[Any, tail.Group]:
        moments = law.log_moments(panels, c)
        usable = xp.where(xp.isfinite(moments), moments, 0.0)
        error_mass = xp.exp(_log_errors(step, panels, c, xp.zeros(())) - usable)
        mass = xp.sum(_weights(panels, c, moments), axis=-1) + error_mass[:, None]
        return moments, xp.vmap(lambda m, e, w: tail.groups(step, c, m, e, w, extremes))(usable, panels.edges, mass)

    def total(log_moments: Any) -> Any:
        """K of all steps together."""
        return xp.sum(xp.where(powers > 0, powers * log_moments, 0.0), axis=-1) + log_count

    def build(t: Any) -> tuple[Law, Any, tail.Group, Any]:
        panels = law.on_panels(step, _edges(step, made, c, t, effort.panels))
        moments, parts = groups(panels)
        return panels, moments, parts, tail.fallen_at(parts, powers, c, effort.nats)

    # Panels for t = 0 tell the t of the last node; then panels are made for the oscillation at this t.
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
        return ~(_alias(growths[None], points, c, xp.exp(u))[0] * c > math.exp(-effort.nats))

    period = xp.exp(0.5 * sum(bisect(long_enough, -xp.log(c) - 2.0, -xp.log(c) + 21.0, tail.COARSE)))
    nodes = xp.stop_gradient(_blocks(t_wanted * period / (2 * math.pi) + 1, effort)) * (effort.rows * effort.columns)
    last = t_wanted * xp.minimum(xp.sqrt(2 * math.pi * (nodes - 1) / (t_wanted * period)), 1.1)
    h = last / (nodes - 1)
    # All that follows is differentiable in the numbers of the step; the places of nodes and panels are constants.
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
    scale = xp.where(t <= (1 + 1e-9) * last, xp.where(t == 0, 0.5, 1.0) / (c * c + t * t), 0.0) * (h / math.pi)
    size = scale * xp.exp(log_size)
    # |a^n - b^n| <= n |a - b| max(a, b)^(n - 1)
    most = modulus + error
    relative = xp.sum(xp.where(power > 0, power * error / most, 0.0), axis=0)
    relative = relative + ULP * (12 + 2 * xp.abs(angle) + 4 * xp.abs(log_size))
    largest = scale * xp.exp(log_power(most))
    return _Part(
        log_total=log_total,
        tilt=c,
        step=h,
        nodes=nodes,
        size=size,
        angle=angle,
        moduli=xp.sum(size),
        error=xp.sum(largest * relative),
        turning=16 * ULP * xp.sum(largest * t),
        beyond=tail.integral(parts, powers, c, last) / math.pi,
        points=points,
        growths=growths,
    )


def beyond_the_cut(step: Step, epsilon: Any, cut: Any) -> tuple[Any, Any]:
    """(value, error) of the contribution of steps beyond the cut to delta (section 2); 0 for "add"."""
    odds, excess = xp.exp(epsilon), xp.expm1(epsilon)
    p, q = jumps.normal_tails(xp.stack([cut - step.scale, cut]))  # P[x > cut]: the person's step, another step
    log_below = xp.log1p(-xp.minimum(q, 0.5))
    others = -xp.expm1((step.steps - 1) * log_below)
    terms = xp.stack([p + 0 * odds, -odds * q, -others * excess, others * odds * q, -others * p + 0 * odds])
    error = 16 * ULP * (4 + cut * cut + epsilon) * xp.sum(xp.abs(terms), axis=0)
    return tuple(xp.where(step.sign > 0, xp.stack([xp.sum(terms, axis=0), error]), 0.0))


def _dropped(step: Step, cut: Any, top: Any) -> Any:
    """Bound of the contribution of steps between top and cut to delta, if the panels end below the cut (section 3)."""
    p, q = jumps.normal_tails(xp.stack([top - step.scale, top]))
    removed = p + q * jumps.excess(step)
    return xp.where(top < cut, xp.where(step.sign > 0, removed, step.steps * q) * (1 + 1e-12), 0.0)


def _rest(step: Step, made: Plan, effort: Effort) -> tuple[Any, Any]:
    """(tilts, logs of bounds of E[S_+; at least made.count steps beyond the split]/T at them) (section 3)."""
    panels = law.on_panels(step, _edges(step, made, made.rest_tilt, xp.zeros(()), effort.panels))
    c, count = made.rest_tilt * _NEAR, made.count
    low, high = xp.moveaxis(_moment_bounds(step, panels, c), -1, 0)
    bound = log_ways(step.steps)[count] + (step.steps - count) * xp.logaddexp(low, high) + count * high - 1 - xp.log(c)
    bound = xp.append(bound - xp.log(step.steps) + 64 * ULP * step.steps, jumps.log_several_steps(step, made.split))
    return xp.append(c, 0.0), xp.where(xp.isnan(bound), xp.inf, bound)


def shift_to(step: Step, epsilon: Any) -> Any:
    """By how much S is larger at the step's own epsilon than at this one."""
    return step.steps * step.sign * xp.exp(step.sign * step.epsilon) * xp.expm1(step.sign * (epsilon - step.epsilon))


def prepare(step: Step, effort: Effort, center: Any = None) -> Contour:
    """The contour made for the step's epsilon, from which `evaluate` computes delta at other epsilons too.

    center: the epsilon for which the tilts are chosen, if not the step's own.
    """
    still = jax.tree_util.tree_map(xp.stop_gradient, step)
    made = plan(still)
    shift = 0.0 if center is None else shift_to(still, center)
    # Loops replace branches: in a batch, a branch would compute both sides for every point.
    nodes, tilts = xp.zeros((MOST, effort.nodes)), xp.zeros((MOST, _ABOVE.size + _BELOW.size))
    each = dict.fromkeys(_Part._fields, xp.zeros(MOST)) | dict.fromkeys(("size", "angle"), nodes)
    empty = _Part(**(each | dict.fromkeys(("points", "growths"), tilts)))

    def add(k: Any, parts: _Part) -> _Part:
        log_moment = log_ways(still.steps)[k] + (still.steps - k) * made.low + xp.where(k > 0, k * made.high, 0.0)
        saddle = made.tilts[xp.argmin(log_moment - shift * made.tilts - 2 * xp.log(made.tilts))]
        part = contour_of(step, made, k, saddle, effort)
        return _Part(*(xp.set_at(all_of, k, x) for all_of, x in zip(parts, part, strict=True)))

    parts = xp.fori_loop(0, made.count, add, empty)
    nothing = (xp.ones(_NEAR.size + 1), xp.full(_NEAR.size + 1, -xp.inf))
    # Adding the loop index, which is 0, keeps the compiler from moving the computation out of the loop.
    rest_tilts, rest = xp.fori_loop(
        0,
        xp.where(made.count > 1, 1, 0),
        lambda index, _: _rest(still, made._replace(rest_tilt=made.rest_tilt + index), effort),
        nothing,
    )
    splits = jumps.prepare(still) if effort.closed else None
    return Contour(step, still.cut(), made.split, made.top, made.count, parts, rest_tilts, rest, splits)


def evaluate(made: Contour, epsilon: Any, effort: Effort) -> Evaluation:
    """Bounds of log delta at an array of epsilons >= 0, and an estimate.

    The bounds are close if epsilon is close to the contour's own epsilon. If the cut of the contour is too small for an
    epsilon (larger than the contour's own for "remove", smaller for "add"), the bounds are infinite.
    """
    step, zero = made.step, xp.zeros_like(epsilon)
    still = jax.tree_util.tree_map(xp.stop_gradient, step)
    removes = step.sign > 0
    inside = step.sign * epsilon <= step.sign * step.epsilon
    shift = shift_to(step, epsilon)
    columns = effort.columns

    def add(k: Any, sums: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        part = _Part(*(x[k] for x in made.parts))
        c, t = part.tilt, part.step * np.arange(float(effort.nodes))
        a, b = (c * c - t * t) / (c * c + t * t), 2 * c * t / (c * c + t * t)
        cosine, sine = part.size * xp.cos(part.angle), part.size * xp.sin(part.angle)
        real, imag = (x.reshape(-1, columns) for x in (a * cosine + b * sine, a * sine - b * cosine))
        # e^{-it shift} is the product of a power for the row and a power for the column of the node.
        column, row = shift[:, None] * t[:columns], shift[:, None] * t[::columns]
        waves = xp.stack([xp.cos(column), xp.sin(column)]).reshape(-1, columns).T
        real, imag = (xp.exact_matmul(x, waves).reshape(-1, 2, shift.shape[0]) for x in (real, imag))
        value = xp.sum((real[:, 0] + imag[:, 1]).T * xp.cos(row) + (imag[:, 0] - real[:, 1]).T * xp.sin(row), axis=1)
        log_total = part.log_total - c * shift
        error = part.error + part.turning * xp.abs(shift) + part.beyond
        error = error + ULP * (effort.nodes + 48 + 4 * xp.abs(log_total) + 16 * xp.abs(c * shift)) * part.moduli
        growths = part.growths - (part.points - c) * shift[:, None]
        alias = _alias(growths, part.points, c, 2 * math.pi / part.step)
        low = xp.maximum(value - error - alias, 0.0)
        unit = xp.exp(log_total + xp.where(removes, 0.0, epsilon) - xp.log(step.steps))
        high = xp.fmin(value + error, _chernoff(growths, part.points))
        new = value, xp.where(xp.isnan(low), 0.0, low), high
        return tuple(total + unit * x for total, x in zip(sums, new, strict=True))

    value, lower, upper = xp.fori_loop(0, made.count, add, (zero,) * 3)
    closed, closed_error = beyond_the_cut(step, epsilon, made.cut)
    estimate = value + closed
    rest = xp.exp(xp.min(made.rest - made.rest_tilts * shift[:, None], axis=1))
    upper = upper + closed + closed_error + rest + _dropped(still, made.cut, made.top)
    lower = lower + closed - closed_error
    reliable = (estimate >= lower) & (estimate <= upper) & (upper - lower < 0.2 * upper)
    if made.jump is not None:
        simple = jumps.bracket(still, made.jump, xp.stop_gradient(epsilon))
        lower, upper = xp.fmax(lower, simple.lower), xp.fmin(upper, simple.upper)
    estimate = xp.where(reliable, estimate, xp.sqrt(xp.maximum(lower, 1e-4 * upper)) * xp.sqrt(upper))
    # The value is moved between the bounds; the derivatives stay those of the contour.
    estimate = estimate + xp.stop_gradient(xp.clip(estimate, lower, upper) - estimate)
    return Evaluation(
        xp.where(inside & (lower > 0), xp.log(xp.where(lower > 0, lower, 1.0)) - _SLACK, -xp.inf),
        xp.where(inside & (upper >= 0), xp.log(xp.maximum(upper, NEXT_TO_ZERO)) + _SLACK, xp.inf),
        xp.where(estimate > 0, xp.log(xp.where(estimate > 0, estimate, 1.0)), -xp.inf),
    )
