"""One band's contour: the law of those outcomes whose largest loss carries one label.

M_j = prod (B_j + A_j)^T - prod B_j^T over the sampled steps, B_j below the band and A_j within it; see `bands`.
Argument: notebooks/proofs/contour_certificate.md, section 10.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.contour.largest_loss import labels
from jaxdp.contour.largest_loss.labels import Label, SoftLine, Step
from jaxdp.contour.plan import Plan, conversion
from jaxdp.contour.spectrum import Nodes, Spectrum
from jaxdp.contour.trapezoid import Contour, Effort, node_weights, table
from jaxdp.numerics.complex_logarithms import log_expm1_complex, log_one_plus
from jaxdp.numerics.exponential_sums import LEAST_RATIO, log_ratios, ratios
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.numerics.special import log_expm1
from jaxdp.runtime.arrays import xp

_ALIAS_TARGET = -27.0  # log of the alias error aimed at, relative to delta
_DEAD = 1e-13  # largest relative size of the integrand at the cut, at the abscissa of a contour
_CANDIDATES = np.array([0.6, 0.75, 0.85, 0.92, 0.96, 0.98])
_ABOVE = np.array([1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0])
_POINTS = 12
_ZOOMS = 4
_COARSER = 5  # times fewer quadrature nodes choose an abscissa than compute with it
_CANCELLATION = 3.0  # nats by which the integrand may exceed its smallest peak
_FALL = 60.0  # u^2 may exceed that of a loss of eps by this much; losses beyond are negligible


class Steps(NamedTuple):
    """All sampled steps in one stack, and their counts."""

    step: Step
    times: jax.Array


class Pieces(NamedTuple):
    """The two labels of a band, per step. The lowest band has nothing below it: ``below`` is not used there."""

    within: Label
    below: Label
    lowest: jax.Array


def make_steps(spectrum: Spectrum, cut: jax.Array, size: int) -> Steps:
    """Per-step data that are the same for all orders and bands."""
    mu = xp.concatenate([part.mu for part in spectrum.sampled])
    rate = xp.concatenate([part.rate for part in spectrum.sampled])
    times = xp.concatenate([part.times for part in spectrum.sampled]).astype(xp.float64)
    return Steps(xp.vmap(lambda m, q: labels.make_step(m, q, cut, size))(mu, rate), times)


def coarsely(steps: Steps, pieces: Pieces) -> tuple[Steps, Pieces]:
    """The middle one of every few nodes, with cells as much wider: an estimate, to choose an abscissa by."""
    size = steps.step.nodes.shape[-1]
    few, pieces = jax.tree_util.tree_map(
        lambda x: x[..., _COARSER // 2 :: _COARSER] if x.shape[-1:] == (size,) else x, (steps, pieces)
    )
    return few._replace(step=few.step._replace(cell=_COARSER * few.step.cell)), pieces


def label_edges(steps: Steps, eps: jax.Array, cut: jax.Array, count: int) -> jax.Array:
    """Per step the label's edges, equally spaced in u, not below 2.

    From a loss of 3 % of eps to where the density has fallen by e^-30 more than at a loss of eps.
    """
    mu, q = steps.step.mu, xp.where(steps.step.rate > 0, steps.step.rate, 1.0)

    def outcome(loss: jax.Array) -> jax.Array:
        return (xp.log1p(xp.expm1(xp.minimum(loss, 600.0)) / q) + mu * mu / 2) / mu

    spacing = 2.1 * labels.WIDTH
    first = xp.clip(outcome(0.03 * eps), 2.0, xp.maximum(cut - 1 - spacing * count, 2.0))
    full = xp.sqrt(xp.maximum(outcome(eps), 0.0) ** 2 + _FALL)
    last = xp.maximum(xp.minimum(full, cut - 1), first + spacing * (count - 1))
    return first[:, None] + (last - first)[:, None] * xp.linspace(0.0, 1.0, count)


def make_pieces(steps: Steps, low: jax.Array, high: jax.Array, lowest: bool | jax.Array = False) -> Pieces:
    """The two labels of the band between the edges ``low`` and ``high`` (one per step); lowest: of all below ``high``.

    One formula for every band, so that it is compiled once.
    """
    flag = xp.asarray(lowest)
    below, all_below, between = xp.vmap(labels.make_labels)(steps.step, low, high)
    chosen = jax.tree_util.tree_map(lambda x, y: xp.where(flag, x, y), all_below, between)
    return Pieces(chosen, below, flag)


def _total(steps: Steps, log_a: jax.Array, log_b: jax.Array, lowest: jax.Array) -> jax.Array:
    """log of prod (B + A)^T - prod B^T (lowest band: of prod A^T) over the steps, the last axis."""
    live, times = steps.times > 0, steps.times
    ratio = xp.where(live, log_a - log_b, -xp.inf)
    lift = _lift(times, ratio)
    both = xp.sum(xp.where(live, times * _log1p_exp(ratio + lift), 0.0), axis=-1)
    under, alone = (xp.sum(xp.where(live, times * x, 0.0), axis=-1) for x in (log_b, log_a))
    return xp.where(lowest, alone, under + log_expm1(both) - lift[..., 0])


def _lift(times: jax.Array, ratio: jax.Array) -> jax.Array:
    """How far tiny ratios are raised: prod (1 + r)^T - 1 is linear there, to 1e-170."""
    size = xp.logsumexp(ratio + xp.log(xp.maximum(times, 1e-300)), axis=-1, keepdims=True)
    return xp.maximum(-400.0 - size, 0.0)


def _log1p_exp(x: jax.Array) -> jax.Array:
    """log(1 + e^x), relative to itself."""
    return xp.where(x > 30, x, xp.log1p(xp.exp(xp.minimum(x, 30.0))))


def log_moment(spectrum: Spectrum, steps: Steps, pieces: Pieces, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(upper bound of log M_j(c), largest share of an end)."""
    closed = xp.real(spectrum.closed(xp.asarray(c, xp.complex128)))
    closed = closed + spectrum.closed_units * _ULP + 4 * _ULP * xp.abs(closed)
    (_, log_a), rest = _step_moments(steps, pieces.within, c)
    (_, log_b), _ = _step_moments(steps, pieces.below, c)
    total = _total(steps, log_a, log_b, pieces.lowest)
    total = total + _total_off(steps, total, log_a, log_b, pieces.lowest)
    total = xp.where(xp.isnan(total), xp.inf, closed + total)
    return total, xp.max(xp.where(steps.times > 0, rest, 0.0))


def _step_moments(steps: Steps, label: Label, c: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """((lower, upper), share of the ends) of every step."""
    lower, upper, rest = xp.vmap(lambda s, x: labels.log_moment(s, x, c))(steps.step, label)
    return (lower, upper), rest


def _total_off(steps: Steps, total: jax.Array, log_a: jax.Array, log_b: jax.Array, lowest: jax.Array) -> jax.Array:
    """Rounding of `_total`."""
    logs = 1 + xp.abs(log_a) + xp.where(lowest, 0.0, xp.abs(log_b))
    return 1e-14 * (1 + xp.abs(total)) + 1e-15 * _counted(steps, logs)


class Masses(NamedTuple):
    """Bounds of log M_j(0) = P_j and log M_j(-1) = Q_j, everything in closed form left out."""

    p_lower: jax.Array
    p_upper: jax.Array
    q_upper: jax.Array


def masses_of(steps: Steps, pieces: Pieces) -> Masses:
    """The band's probabilities."""

    def at(c: jax.Array) -> tuple[jax.Array, jax.Array]:
        (low_a, high_a), _ = _step_moments(steps, pieces.within, c)
        (low_b, high_b), _ = _step_moments(steps, pieces.below, c)

        def both(log_a: jax.Array, log_b: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = _total(steps, log_a, log_b, pieces.lowest)
            return total, _total_off(steps, total, log_a, log_b, pieces.lowest)

        totals, off = xp.vmap(both)(xp.stack([low_a, high_a]), xp.stack([low_b, high_b]))
        low, high = totals[0] - off[0], totals[1] + off[1]
        return xp.where(xp.isnan(low), -xp.inf, low), xp.where(xp.isnan(high), xp.inf, high)

    lower, upper = xp.vmap(at)(xp.array([0.0, -1.0]))
    return Masses(lower[0], upper[0], upper[1])


class Tilt(NamedTuple):
    """Abscissa of a band's Chernoff bound, and K there: log delta_j(eps) <= log_m - c eps + conversion(c)."""

    c: jax.Array
    log_m: jax.Array


def chernoff(tilt: Tilt, eps: jax.Array) -> jax.Array:
    """Upper bound of log delta_j(eps)."""
    value = tilt.log_m - tilt.c * eps + conversion(tilt.c)
    return value + 1e-14 * (xp.abs(tilt.log_m) + tilt.c * xp.abs(eps) + xp.abs(conversion(tilt.c)))


def tilt_of(spectrum: Spectrum, steps: Steps, pieces: Pieces, eps: jax.Array) -> Tilt:
    """The abscissa at which the band's Chernoff bound at eps is about smallest."""
    few = coarsely(steps, pieces)

    # a grid, zoomed in between the best point's neighbours; the best of the last
    def zoom(_: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x = xp.linspace(state[0], state[1], _POINTS)
        c = xp.exp(x)
        value, rest = xp.vmap(lambda one: log_moment(spectrum, *few, one))(c)
        best = xp.argmin(xp.where(rest < _DEAD, value - c * eps + conversion(c), xp.inf))
        return x[xp.maximum(best - 1, 0)], x[xp.minimum(best + 1, _POINTS - 1)], c[best]

    *_, c = xp.fori_loop(0, _ZOOMS, zoom, (*_orders(eps), xp.zeros(())))
    return Tilt(c, log_moment(spectrum, steps, pieces, c)[0])


def _orders(eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logarithms of the smallest and the largest abscissa tried."""
    return xp.log(1e-6 / eps), xp.log(5000.0 / eps)


def over_bands(edges: jax.Array, fun: Callable[..., Any]) -> Any:
    """fun(low, high, is it the lowest?) for every band, the lowest first, stacked."""
    low = xp.concatenate([edges[:, :1] - 1, edges], axis=1)
    high = xp.concatenate([edges, xp.full_like(edges[:, :1], labels.NEVER)], axis=1)
    lowest = np.arange(low.shape[1]) == 0
    return xp.lax_map(lambda x: fun(*x), (low.T, high.T, xp.asarray(lowest)))


def place(spectrum, steps, pieces, tilt: Tilt, known: Masses, eps, log_delta) -> Plan:
    """The abscissa, of a few at and left of the saddle's, that allows the largest step without cancellation."""
    factors = xp.array([*_CANDIDATES, *_ABOVE])
    few = coarsely(steps, pieces)

    def saddle(c: jax.Array, k: jax.Array) -> jax.Array:
        return k - c * eps - xp.log(c) - xp.log1p(c)

    # where all of the band lies above eps the Chernoff bound is best at 0, the integrand smallest further right: two
    # zooms; then the candidates and what is right of them
    def one_round(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        c = state[0]
        k = xp.vmap(lambda x: log_moment(spectrum, *few, x)[0])(c)
        near = xp.argmin(saddle(c, k))
        ends = xp.log(c[xp.maximum(near - 1, 0)]), xp.log(c[xp.minimum(near + 1, c.size - 1)])
        best = xp.where(tilt.c * eps < 0.5, xp.exp(0.5 * (ends[0] + ends[1])), tilt.c)
        following = xp.where(i == 0, xp.exp(xp.linspace(*ends, c.size)), best * factors)
        return following, c, k

    first = xp.exp(xp.linspace(*_orders(eps), factors.size))
    _, c, k = xp.fori_loop(0, 3, one_round, (first, first, first))
    (candidates, above), (k_candidates, k_above) = (xp.split(x, [_CANDIDATES.size]) for x in (c, k))
    height = k_candidates - candidates * eps - xp.log(candidates) - xp.log1p(candidates)
    aim = log_delta + _ALIAS_TARGET
    gap = above - candidates[:, None]
    right = xp.softplus(k_above - above * eps + conversion(above) - aim) / xp.where(gap > 0, gap, 1.0)
    right = xp.min(xp.where(gap > 0, right, xp.inf), axis=1)
    left = xp.softplus(-aim) / candidates
    vague = known.p_upper + xp.log(known.p_upper - known.p_lower + 1e-13)
    masses_left = xp.maximum(
        xp.softplus(eps + known.q_upper - aim) / (1 + candidates), xp.softplus(vague - aim) / candidates
    )
    left = xp.minimum(left, xp.where(xp.isnan(masses_left), xp.inf, masses_left))
    period = xp.clip(xp.maximum(right, left), xp.exp(-6.0) / candidates, xp.exp(10.0) / candidates)
    best = xp.argmin(xp.where(height > xp.min(height) + _CANCELLATION, xp.inf, period))
    k_above = xp.vmap(lambda x: log_moment(spectrum, steps, pieces, x)[0])(above)
    nothing = xp.zeros(1)
    return Plan(candidates[best], period[best], nothing[0], nothing[0], nothing[0], above, k_above, nothing, nothing)


class Nodewise(NamedTuple):
    """M_j(c + it)/M_j(c) of the sampled steps at the nodes, and its error."""

    log_m: jax.Array  # log M_j(c)
    log_m_units: jax.Array
    log_abs: jax.Array
    log_raised: jax.Array  # log_abs, raised by the error
    phase: jax.Array
    size: jax.Array  # of the terms whose sum log_abs and phase are: each is rounded
    log_tail: jax.Array


def _counted(steps: Steps, x: jax.Array) -> jax.Array:
    """Sum over the steps (first axis), each as often as it is taken."""
    times = steps.times.reshape(-1, *[1] * (x.ndim - 1))
    return xp.sum(xp.where(times > 0, times * x, 0.0), axis=0)


def _lowest(steps: Steps, within: Label, c: jax.Array, h: jax.Array, effort: Effort) -> Nodewise:
    """prod A^T."""
    end = h * effort.nodes
    line, size, angle, error = _log_ratios(steps, within, c, h, effort.nodes + 1)
    fallen = xp.vmap(lambda step, label, tilted: labels.log_fallen(step, label, c, tilted, end))(
        steps.step, within, line
    )
    fallen = _counted(steps, xp.minimum(fallen, 0.0))
    return Nodewise(
        _counted(steps, line.log_m),
        _counted(steps, 4 * (xp.abs(line.log_m) + 12) + line.error / _ULP),
        _counted(steps, size),
        _counted(steps, size + xp.log1p(error)),
        _counted(steps, angle),
        _counted(steps, xp.abs(size) + xp.abs(angle)),
        fallen - xp.log(end) + _counted(steps, xp.log1p(line.error)),
    )


def _higher(steps: Steps, within: Label, below: Label, c: jax.Array, h: jax.Array, effort: Effort) -> Nodewise:
    """F(B, A) = prod (B + A)^T - prod B^T, whose coefficients are all positive."""
    count, end, live = effort.nodes + 1, h * effort.nodes, steps.times > 0
    line_a = _lines(steps, within, c)
    value_a, error_a = xp.vmap(lambda line: ratios(line, h, count))(line_a)
    size_a = xp.maximum(xp.abs(value_a), LEAST_RATIO)
    line_b, log_b, angle_b, error_b = _log_ratios(steps, below, c, h, count)
    ratio = xp.where(live, line_a.log_m - line_b.log_m, -xp.inf)
    lift = _lift(steps.times, ratio)[0]
    scale = xp.exp(ratio + lift)
    both = _counted(steps, xp.log1p(scale))
    log_both = log_expm1(both)
    share, turn = scale[:, None] * size_a * xp.exp(-log_b), xp.angle(value_a) - angle_b
    grown, swung = log_one_plus(share * xp.cos(turn), share * xp.sin(turn))
    under = _counted(steps, log_b)
    log_abs, phase = log_expm1_complex(_counted(steps, grown), _counted(steps, swung))
    # |F - computed| <= F(|B| + b, |A| + a) - F(|B|, |A|); and what the share's and the powers' logarithms are rounded
    # by, which moves F by its derivative in log A, at most (1 + sum T log(1 + |A/B|)) F
    most = _counted(steps, xp.log1p(share))
    plain = under + log_expm1(most) - log_both
    error_a = (error_a + 2 * LEAST_RATIO) / size_a
    larger = _counted(steps, xp.log1p(share * (1 + error_a) / (1 + error_b)))
    more = xp.maximum(_counted(steps, xp.log1p(error_b)) + log_expm1(larger) - log_expm1(most), 0.0)
    raised = plain + more
    # b is relative to the true B(c), which the computed one stands for in the share
    loudest = 4 * xp.max(xp.where(live, xp.abs(line_a.log_m) + xp.abs(line_b.log_m), 0.0)) + 64
    loudest = loudest + xp.max(xp.where(live, line_b.error, 0.0)) / _ULP
    off = xp.where(more < 1, plain + xp.log(xp.maximum(xp.expm1(xp.minimum(more, 1.0)), 1e-300)), raised)
    off = xp.logaddexp(off, plain + xp.log(_ULP * loudest * (1 + xp.maximum(both, most))))
    # |M_j| <= sum_i T_i |A_i| prod (B + A)^T / (B_i + A_i), B and A at c; A_i alone decays
    fall = xp.vmap(labels.decay, in_axes=(0, 0, None))(steps.step, line_a, end)
    first = xp.log(xp.maximum(steps.times, 1e-300)) + xp.log(scale) - xp.log1p(scale) + xp.log(fall)
    blur = _counted(steps, xp.log1p(line_a.error) + xp.log1p(line_b.error))
    tail = xp.logsumexp(xp.where(live, first, -xp.inf)) + both - log_both
    log_abs = under + log_abs - log_both
    return Nodewise(
        _counted(steps, line_b.log_m) + log_both - lift,
        _counted(steps, 4 * (xp.abs(line_b.log_m) + 12) + line_b.error / _ULP)
        + (1 + both) * loudest
        + 4 * xp.abs(lift),
        log_abs,
        xp.logaddexp(log_abs, off),
        _counted(steps, angle_b) + phase,
        1 + _counted(steps, xp.abs(log_b) + xp.abs(angle_b) + xp.abs(grown) + xp.abs(swung)),
        xp.fmin(tail, 0.0) - xp.log(end) + blur,
    )


def build(spectrum: Spectrum, steps: Steps, pieces: Pieces, plan: Plan, effort: Effort) -> Contour:
    """Evaluate M_j on its contour and bound what is beyond the end."""
    c, h = plan.c, 2 * xp.pi / plan.period
    t = h * xp.arange(effort.nodes + 1)
    base = spectrum.closed(xp.asarray(c, xp.complex128))
    value = spectrum.closed(xp.complex(xp.full_like(t, c), t)) - base
    some = xp.cond(
        pieces.lowest,
        lambda: _lowest(steps, pieces.within, c, h, effort),
        lambda: _higher(steps, pieces.within, pieces.below, c, h, effort),
    )
    units = spectrum.closed_units + 4 * (xp.abs(base) + xp.abs(value)) + 4 * some.size + 32
    log_abs = xp.real(value) + some.log_abs
    log_raised = xp.real(value) + some.log_raised + units * _ULP
    nothing = xp.zeros(())
    nodes = Nodes(log_abs, xp.maximum(log_raised - log_abs, 0.0), xp.imag(value) + some.phase, nothing)
    real, imag, errors = node_weights(nodes, c, t, xp.zeros(1))
    log_m = xp.real(base) + some.log_m
    return Contour(
        plan,
        h,
        table(real),
        table(imag),
        errors,
        some.log_tail - 0.5 * spectrum.mu2 * (h * effort.nodes) ** 2,
        xp.zeros(1),
        nothing,
        log_m[None],
        (16 + 2 * spectrum.closed_units + 4 * xp.abs(log_m) + some.log_m_units)[None],
        nothing,
        nothing,
    )


def _lines(steps: Steps, label: Label, c: jax.Array) -> SoftLine:
    return xp.vmap(lambda s, x: labels.soft_line(s, x, c))(steps.step, label)


def _log_ratios(steps: Steps, label: Label, c, h, count) -> tuple[SoftLine, jax.Array, jax.Array, jax.Array]:
    """(lines, log|m(c + it)/m(c)| at the nodes, angle, error over modulus), the ratio to the true m(c)."""
    lines = _lines(steps, label, c)
    log_abs, angle, error, shift = xp.vmap(lambda line: log_ratios(line, h, count))(lines)
    return lines, log_abs, angle, error + shift[:, None] * h * xp.arange(count) * xp.exp(-log_abs)
