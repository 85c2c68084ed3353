r"""One step of the sampled Gaussian, remove direction, split by a soft label: how large its outcome is.

An outcome u is labelled at most j with probability W_j(u) = 1 / (1 + exp(2 sinh((u - u_j)/0.3))), which is analytic,
falls from 1 to 0 around u_j and has no tail to speak of on either side. The two sums this module takes,

    below   B(z) = int g W_lo A^{z+1},            within  A(z) = int g (W_hi - W_lo) A^{z+1},

are those of `jaxdp.sampled_gaussian.moment` with one more factor under the integral. Error terms and their argument:
notebooks/proofs/contour_certificate.md, section 10.
"""

from typing import NamedTuple

import jax

from jaxdp.numerics.complex_logarithms import log_one_plus
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.decay import HEIGHTS, turn_units
from jaxdp.sampled_gaussian.likelihood_ratio import (
    ROOT_2PI,
    exact_nodes,
    exp_or_inf,
    log_mixture,
    log_mixture_real,
    log_units,
)

WIDTH = 0.3
_TURN = 0.7  # largest angle, in units of the label's width, at which the strip ends
MODULUS = 0.4263  # log 1.5316: |1 + e^zeta| >= max(1, |e^zeta|)/1.5316 up to that angle
_LOW = -10.5
NEVER = 1e4  # an edge no outcome comes near


class Step(NamedTuple):
    """What does not depend on the order: nodes, cells, log g and log A on the axis, along the line and at the ends."""

    rate: jax.Array
    mu: jax.Array
    nodes: jax.Array
    cell: jax.Array
    height: jax.Array  # y: the line runs at Im u = y, the strip ends at 2y
    log_g: jax.Array
    log_a: jax.Array
    log_g_top: jax.Array  # largest in the cell
    log_a_end: jax.Array  # at the cell's right end, where it is largest
    line_g: jax.Array  # complex
    line_a: jax.Array  # complex
    angle: jax.Array  # arg A at the left end of the cell's upper edge: |A^{it}| <= e^{-t angle} there
    ends: jax.Array  # log (g A^{c+1}) at both ends is ends[0] + (c + 1) ends[1]


class Label(NamedTuple):
    """One of the two weights: its logarithm on the axis, along the line (complex), bounded in cells and at the ends."""

    log: jax.Array
    line: jax.Array
    bound: jax.Array
    ends: jax.Array
    edge: jax.Array  # the upper one


class SoftLine(NamedTuple):
    """A labelled step tilted to c, as weights and losses; what `log_ratios` and the tail of the contour need."""

    log_m: jax.Array
    weight: jax.Array
    loss: jax.Array
    error: jax.Array
    rule: jax.Array  # these three as in `jaxdp.numerics.exponential_sums.Line`
    mean_rule: jax.Array
    drift: jax.Array
    log_edge: jax.Array  # |the integrand| along the upper edge, per cell, relative to m(c)
    rest: jax.Array  # the ends and what lies left of the line, relative to m(c)


def make_step(mu: jax.Array, q: jax.Array, cut: jax.Array, size: int) -> Step:
    """The midpoint rule on [-10.5, cut]."""
    low, cell, v = exact_nodes(xp.asarray(_LOW), cut, size)
    left, right = v - 0.5 * cell, v + 0.5 * cell
    y = xp.minimum(0.5 * _TURN * WIDTH, 0.45 * xp.pi / mu)

    def w(u: jax.Array) -> jax.Array:
        return u * mu - mu * mu / 2

    nearest = xp.where((left < 0) & (right > 0), 0.0, xp.minimum(xp.abs(left), xp.abs(right)))
    a_re, a_im = log_mixture(w(v), y * mu * xp.ones_like(v), q)
    _, angle = log_mixture(w(left), 2 * y * mu * xp.ones_like(v), q)
    ends = xp.stack([left[0], right[-1]])
    return Step(
        rate=q,
        mu=mu,
        nodes=v,
        cell=cell,
        height=y,
        log_g=-v * v / 2,
        log_a=log_mixture_real(w(v), q),
        log_g_top=-nearest * nearest / 2,
        log_a_end=log_mixture_real(w(right), q),
        line_g=xp.complex(-(v * v - y * y) / 2, -v * y),
        line_a=xp.complex(a_re, a_im),
        angle=xp.maximum(angle * (1 - 1e-12), 0.0),
        ends=xp.stack([-ends * ends / 2, log_mixture_real(w(ends), q)]),
    )


def _soft(u: jax.Array, turn: jax.Array, edge: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(zeta, log W, log(1 - W)) at u + i turn, all complex."""
    x, theta = xp.clip((u - edge) / WIDTH, -30.0, 30.0), turn / WIDTH
    re, im = 2 * xp.sinh(x) * xp.cos(theta), 2 * xp.cosh(x) * xp.sin(theta)
    right = re > 0
    small, sign = xp.exp(-xp.abs(re)), xp.where(right, -1.0, 1.0)
    size, angle = log_one_plus(small * xp.cos(im), sign * small * xp.sin(im))
    under = xp.complex(-xp.maximum(re, 0.0) - size, xp.where(right, -im, 0.0) - angle)
    over = xp.complex(xp.minimum(re, 0.0) - size, xp.where(right, 0.0, im) - angle)
    return xp.complex(re, im), under, over


def _zeta(u: jax.Array, edge: jax.Array) -> jax.Array:
    """On the axis: W = 1 / (1 + e^zeta)."""
    return 2 * xp.sinh(xp.clip((u - edge) / WIDTH, -30.0, 30.0))


def _rising(u: jax.Array, edge: jax.Array) -> jax.Array:
    """Bound of log |1 - W| at any angle up to `_TURN`, without the constant; `_falling` is that of log |W|."""
    return xp.minimum(_zeta(u, edge) * xp.cos(_TURN), 0.0)


def _falling(u: jax.Array, edge: jax.Array) -> jax.Array:
    return xp.minimum(-_zeta(u, edge) * xp.cos(_TURN), 0.0)


def make_labels(step: Step, low: jax.Array, high: jax.Array) -> tuple[Label, Label, Label]:
    """The labels W_lo, W_hi and W_hi - W_lo; the edges are at least two widths apart.

    log(W_hi - W_lo) = log(1 - W_lo) + log W_hi + log(1 - e^{zeta_hi - zeta_lo}), without cancellation.
    """
    v, half = step.nodes, 0.5 * step.cell
    ends, edges = xp.stack([v[0] - half, v[-1] + half]), xp.stack([low, high])
    zeta, under, over = xp.vmap(_soft, in_axes=(None, None, 0))(v, step.height, edges)  # each (edge, node)
    fall, swing = xp.exp(xp.minimum(xp.real(zeta[1] - zeta[0]), 0.0)), xp.imag(zeta[1] - zeta[0])
    between = over[0] + under[1] + xp.complex(*log_one_plus(-fall * xp.cos(swing), -fall * xp.sin(swing)))
    axis = _zeta(v, edges[:, None])
    nearer = xp.log1p(-xp.exp(xp.minimum(axis[1] - axis[0], -1e-300)))
    between_on_axis = -xp.softplus(-axis[0]) - xp.softplus(axis[1]) + nearer

    def below(which: int, edge: jax.Array) -> Label:
        bounds = MODULUS + _falling(v - half, edge), MODULUS + _falling(ends, edge)
        return Label(-xp.softplus(axis[which]), under[which], *bounds, edge)

    first, second = below(0, low), below(1, high)
    constant = MODULUS + 0.05
    within = Label(
        between_on_axis,
        between,
        constant + _rising(v + half, low) + second.bound,
        constant + _rising(ends, low) + second.ends,
        high,
    )
    return first, second, within


def _edges(step: Step, label: Label, c: jax.Array, log_m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log of the integrand along the upper edge by cells, ends and outside), relative to m(c)."""
    y = step.height
    log_edge = step.log_g_top + (c + 1) * step.log_a_end + label.bound + 2 * y * y - log_m
    log_edge = log_edge + xp.log(step.cell / ROOT_2PI)
    ends = step.ends[0] + (c + 1) * step.ends[1] + label.ends + 2 * y * y - log_m
    outside = xp.ndtr(_LOW) * 1.001 * xp.exp(xp.minimum(label.ends[0] - log_m, 600.0))
    rest = xp.sum(xp.exp(xp.minimum(ends, 600.0))) * (6 * y + 3 * step.cell) / ROOT_2PI + outside
    return log_edge, rest


def log_moment(step: Step, label: Label, c: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(lower bound, upper bound of log int g label A^{c+1}, share of the ends), c >= -1."""
    size = step.nodes.shape[0]
    exponent = step.log_g + (c + 1) * step.log_a + label.log
    top = xp.max(exponent)
    weight = xp.exp(exponent - top)
    total = xp.sum(weight)
    log_m = top + xp.log(total) + xp.log(step.cell / ROOT_2PI)
    log_edge, rest = _edges(step, label, c, log_m)
    kernel = xp.expm1(xp.minimum(4 * xp.pi * step.height / step.cell, 600.0))
    strip = 2 * exp_or_inf(xp.logsumexp(log_edge)) / kernel
    mixture = 16 * ULP * log_units(step.nodes, step.log_a, step.mu, step.rate) + 2e-14 * xp.abs(step.log_a)
    terms = (c + 1) * mixture + 2e-15 * (xp.abs(step.log_g) + 5 * xp.abs(xp.where(weight > 0, label.log, 0.0)))
    rounding = size * ULP + 2e-14 * (1 + xp.abs(log_m)) + xp.sum(weight * terms) / total
    off = strip + rest
    lower = xp.where(off < 0.5, log_m + xp.log1p(-xp.minimum(off, 0.5)) - rounding, -xp.inf)
    return lower, log_m + xp.log1p(off) + rounding, rest


def soft_line(step: Step, label: Label, c: jax.Array) -> SoftLine:
    """The labelled step along Im u = y."""
    exponent = step.line_g + (c + 1) * step.line_a + label.line
    size, phase = xp.real(exponent), xp.imag(exponent)
    top = xp.max(size)
    scale = xp.exp(size - top)
    phase = xp.where(scale > 0, phase, 0.0)
    total = xp.sum(scale * xp.cos(phase))
    weight = xp.complex(scale * xp.cos(phase), scale * xp.sin(phase)) / total
    log_m = top + xp.log(total) + xp.log(step.cell / ROOT_2PI)
    log_edge, rest = _edges(step, label, c, log_m)
    kernel = xp.expm1(xp.minimum(2 * xp.pi * step.height / step.cell, 600.0))
    strip = (2 + exp_or_inf(xp.logsumexp(log_edge))) / kernel
    mixture = (c + 1) * log_units(step.nodes, step.line_a, step.mu, step.rate)
    others = xp.abs(step.line_g) + 5 * xp.where(scale > 0, xp.abs(label.line), 0.0)
    units = 16 + mixture + 16 * (others + xp.abs(phase))
    size = xp.abs(weight)
    raw = strip + rest + ULP * xp.sum(size * units)
    sound = (total > 0) & (raw < 0.25)
    error = xp.where(sound, 2 * raw + 1e-20, xp.inf)
    # |e^{itL} - 1| <= t |L|; a weight is off by its units, all together by the error of their sum, a loss by its own
    loss = xp.abs(step.line_a)
    own = log_units(step.nodes, step.line_a, step.mu, step.rate)
    drift = size * xp.stack([(2 * ULP * units + xp.where(sound, error, 0.0)) * loss, 2 * ULP * own])
    rule = 2 * (strip + rest) * (1 + error) + 1e-20
    mean_rule = rule * (2 * xp.max(loss) + 12 + 2 * step.mu)
    return SoftLine(log_m, weight, step.line_a, error, rule, mean_rule, drift, log_edge, rest)


def decay(step: Step, line: SoftLine, t: jax.Array) -> jax.Array:
    """Bound of |m(c + it)| / m(c), falling in t: along the upper edge |A^{it}| = e^{-t arg A}."""
    return exp_or_inf(xp.logsumexp(line.log_edge - t * step.angle)) + line.rest


def log_fallen(step: Step, label: Label, c: jax.Array, line: SoftLine, end: jax.Array) -> jax.Array:
    """log of a bound of |m(c + it)| / m(c) for all t >= end under the label W: `decay.log_decay`, with a label."""
    v = step.nodes
    strip = xp.minimum(2 * step.height, 0.45 * xp.pi / step.mu)
    edge = exp_or_inf(xp.logsumexp(line.log_edge))

    def modulus(share: jax.Array) -> jax.Array:
        y = share * strip
        log_a, angle = log_mixture(v * step.mu - step.mu**2 / 2, y * step.mu * xp.ones_like(v), step.rate)
        log_label, turned = xp.real(_soft(v, y, label.edge)[1]), end * xp.maximum(angle, 0.0)
        exponent = step.log_g + 0.5 * y * y + (c + 1) * log_a + log_label - turned - line.log_m
        weight = xp.exp(xp.minimum(exponent, 600.0)) * step.cell / ROOT_2PI
        sizes = xp.abs(step.log_g) + xp.abs(line.log_m) + 5 * xp.where(weight > 0, xp.abs(log_label), 0.0)
        own = (c + 1) * log_units(v, xp.complex(log_a, angle), step.mu, step.rate)
        units = v.shape[0] + 32 + 16 * sizes + turned * turn_units(v, step.mu) + own
        units = units + xp.where(step.rate > 0.5, 4 * end * y * step.mu, 0.0)
        kernel = xp.expm1(xp.minimum(2 * xp.pi * (strip - y) / step.cell, 600.0))
        return xp.sum(weight * exp_or_inf(ULP * units)) + 2 * edge / kernel * (1 + 1e-9)

    each = xp.vmap(modulus)(xp.asarray(HEIGHTS))
    return xp.fmin(xp.log(xp.min(xp.where(xp.isnan(each), xp.inf, each)) + line.rest), 1.0)
