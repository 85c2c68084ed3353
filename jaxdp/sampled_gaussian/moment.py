r"""Quadrature for the Poisson- or fixed-size-sampled Gaussian: one step, at complex order.

With u = x / sigma, w = u / sigma - 1/(2 sigma^2), A = 1 - q + q e^w and g the standard normal density,

    forward (remove)  m(z) = int g A^{z+1},            L = log A
    reverse (add)     m(z) = int g A^{-z},             L = -log A
    replace           m(z) = int g A(u)^{z+1} A(-u)^{-z},  L = log A(u) - log A(-u).

The integral is taken by the midpoint rule on the line Im u = y (remove, replace) or -y (add), where
|exp(i t L)| <= 1 for every t >= 0: the step need not shrink with t. `error` bounds the rule's error
relative to m(c) for ALL t >= 0; the argument stands in notebooks/proofs/contour_certificate.md.
In the forward and replace directions the line ends at ``cut``: the mass of P beyond it (`tail_mass`) is charged like
mass at infinity, and what remains is an honest, smaller integral. In the forward direction a label
(`jaxdp.sampled_gaussian.label`) may stand as one more factor under the integral.
"""

import jax

from jaxdp.numerics.exponential_sums import Line
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian import add_direction
from jaxdp.sampled_gaussian import label as labels
from jaxdp.sampled_gaussian.label import Label
from jaxdp.sampled_gaussian.likelihood_ratio import (
    HALF_WIDTH,
    ROOT_2PI,
    exact_nodes,
    exp_or_inf,
    gained,
    integrand_and_mixture,
    log_mixture,
    log_mixture_real,
    log_units,
    rough_log_mixture,
)

_OUTSIDE = 1e-20  # what lies outside the line relative to m(c), with a label to what an edge of the strip carries
_DEAD = 1e-15  # what the integrand may still carry at the cut where a contour is put


def interval(c, mu, q, cut, direction: str, label: Label | None = None) -> tuple[jax.Array, jax.Array]:
    """Ends of the line on which everything but 4e-21 of m(c) lives (add: `add_direction.outside`), cut included.

    c: (..., 1), and so the ends. With a label, which does not move with c: everything but 2e-21 of what the strip's
    edges carry.
    """
    if direction == "reverse":
        return add_direction.interval(c, mu, q)
    if label is not None:
        left = -HALF_WIDTH - (mu if direction == "replace" else 0.0)
        low, high = xp.maximum(label.low - labels.REACH, left), xp.minimum(label.high + labels.REACH, cut)
        return xp.minimum(low, high - 1), high
    top = ((2 * c + 1) if direction == "replace" else (c + 1)) * mu
    return xp.full_like(top, -HALF_WIDTH), xp.minimum(top + HALF_WIDTH, cut)


def tail_mass(mu: jax.Array, q: jax.Array, end: jax.Array) -> jax.Array:
    """Upper bound of P(u > end) under (1-q) N(0,1) + q N(mu,1)."""
    return ((1 - q) * xp.ndtr(-end) + q * xp.ndtr(mu - end)) * (1 + 1e-12)


def exponent(v, y, c, mu, q, direction):
    """(real part, phase, loss re, loss im) of the integrand's logarithm at u = v + i y."""
    a_re, a_im = log_mixture(v * mu - mu * mu / 2, y * mu, q)
    re, im = -(v * v - y * y) / 2, -v * y
    if direction == "forward":
        return re + (c + 1) * a_re, im + (c + 1) * a_im, a_re, a_im
    if direction == "reverse":
        return re - c * a_re, im - c * a_im, -a_re, -a_im
    b_re, b_im = log_mixture(-v * mu - mu * mu / 2, -y * mu, q)
    return re + (c + 1) * a_re - c * b_re, im + (c + 1) * a_im - c * b_im, a_re - b_re, a_im - b_im


def height(low, high, c, mu, direction: str, label: Label | None = None) -> jax.Array:
    """Half a strip's height: at its edges |A|^{-c} is a few times what it is on the axis, where the integrand lives.

    With a label the strip ends at the angle at which the label's bound does.
    """
    if label is not None:
        return xp.minimum(0.5 * labels.TURN * labels.WIDTH, (0.25 if direction == "replace" else 0.45) * xp.pi / mu)
    if direction == "reverse":
        steep = 1 / xp.sqrt(mu * xp.maximum(-0.5 * (low + high), 1e-9))
        return xp.minimum(xp.minimum(1.0, xp.pi / (6 * mu)), steep)
    top = xp.minimum(1.0, 0.45 * xp.pi / mu)
    return top if direction == "forward" else xp.minimum(top, xp.sqrt(6.0 / xp.maximum(c, 1e-3)) / mu)


def along_edges(at, on_axis, log_a, step, y, lift, c, mu, q, direction, label=None):
    """(int |integrand at t = 0| along an edge of |Im u| <= 2y, its logarithm in the strip at both ends): bounds.

    on_axis: logarithm of the integrand, but for a label, at the nodes and at both ends ``at``, relative to m(c);
    log_a: log A there. lift: what |g| gains off the axis, in the exponent. In units of m(c).
    """
    if direction == "reverse" or label is not None:
        if label is None:
            grown = on_axis + add_direction.growth(at, log_a, y, c, mu, q) + 6e-14 * c  # log A is within 3e-14
            # the left end of the line is that of its first cell
            cells = (grown + 0.5 * gained(at, at + step))[..., :-1]
        else:
            grown, rise = on_axis + labels.log_bound(at - step, at, label) + 6e-14 * (xp.abs(c) + 1), (c + 1) * mu
            if direction == "replace":  # A(-u)^-c, which off the axis is larger; at c = -1 it falls
                log_b = log_mixture_real(-at * mu - mu * mu / 2, q)
                more = add_direction.growth(-at, log_b, y, xp.maximum(c, 0.0), mu, q) * xp.exp(2 * mu * step)
                grown = grown + more + 6e-14 * xp.abs(c) + xp.maximum(-c, 0.0) * mu * step
                rise = rise + xp.abs(c) * mu
            # the right end of the line is that of its last cell, and there is one more on the left
            cells = grown + 0.5 * gained(at, at - step)
        total = xp.sum(exp_or_inf(cells), axis=-1, keepdims=xp.ndim(lift) > 0)
        total = total * step / ROOT_2PI * xp.exp(lift)
        return total, grown[..., -2:] + lift + (0.0 if label is None else labels.log_beyond(rise, mu))
    growth = -c * xp.log(xp.cos(xp.minimum(y * mu, 1.5))) if direction == "replace" else xp.zeros_like(c)
    return xp.exp(lift + growth), on_axis[..., -2:] + growth + lift


def real_log_m(
    c, mu, q, cut, direction: str, size: int, rough: bool = False, label: Label | None = None
) -> tuple[jax.Array, jax.Array]:
    """log m(c), c real, by the midpoint rule, and a bound of its error (inf where ``size`` nodes cannot tell).

    c > 0. c, mu, q, cut: shapes that broadcast. rough: an estimate to a few percent, its error 0, where the integrand
    has died at the ends. With a label c >= -1; log m(c) is bounded from above by any error, from below by one up to
    0.6, and the error of an estimate is what the ends may carry.
    """
    # the last axis is that of the nodes
    rank = max(xp.ndim(x) for x in (c, mu, q, cut, *(label or ())))
    c, mu, q, cut, *edges = (
        xp.reshape(x, (1,) * (rank - xp.ndim(x)) + xp.shape(x) + (1,)) for x in (c, mu, q, cut, *(label or ()))
    )
    label = Label(*edges) if edges else None
    low, step, v = exact_nodes(*interval(c, mu, q, cut, direction, label), size)
    high = low + size * step
    mixture = rough_log_mixture if rough else log_mixture_real
    sides = xp.concatenate([low, high], axis=-1)
    at = xp.concatenate([v, sides], axis=-1)
    # Remove and replace need the two ends only on their own; in one array with the nodes the compiled loop is slower.
    apart = (v, sides) if direction != "reverse" and label is None else (at,)
    both = zip(*(integrand_and_mixture(x, c, mu, q, direction, mixture) for x in apart), strict=True)
    everywhere, log_a = (xp.concatenate(x, axis=-1) for x in both)
    own = None if label is None else labels.on_axis(v, label)
    inside = everywhere[..., :-2] if label is None else everywhere[..., :-2] + own
    top = xp.max(inside, axis=-1, keepdims=True)
    log_m = top + xp.log(xp.sum(xp.exp(inside - top), axis=-1, keepdims=True)) + xp.log(step / ROOT_2PI)
    y = height(low, high, c, mu, direction, label)
    edge, at_ends = along_edges(at, everywhere - log_m, log_a, step, y, 2 * y * y, c, mu, q, direction, label)
    strip = 2 * edge / xp.expm1(xp.minimum(4 * xp.pi * y / step, 600.0))
    ends = xp.sum(exp_or_inf(at_ends), axis=-1, keepdims=True) * (6 * y + 3 * step) / ROOT_2PI
    if rough:
        # where a bound could not be had either, or the integrand has not died at the cut, c is not a place to choose
        off = xp.where((strip < 0.05) & (ends < _DEAD), 0.0, xp.inf) if label is None else xp.log1p(ends)
        return log_m[..., 0], off[..., 0]
    error = strip + ends
    if direction == "reverse":
        error = error + add_direction.outside(at[..., -2:], log_a[..., -2:], c, mu, q, log_m)[..., None]
    terms = xp.abs(2 * c + 1) * _mean_error(v, inside - top, log_a[..., :-2], mu, q, direction)
    rounding = size * ULP + 1e-14 * (1 + xp.abs(log_m)) + terms
    if label is not None:  # the edges are relative to the computed m(c)
        error, rounding = error + _OUTSIDE * edge, rounding + ULP * _label_units(v, inside - top, own)
        return log_m[..., 0], (xp.log1p(2 * error) + rounding)[..., 0]
    return log_m[..., 0], xp.where(error < 1e-3, 2 * error + rounding, xp.inf)[..., 0]


def _label_units(v, log_weight, log_label) -> jax.Array:
    """Tilted mean of the units of 2^-53 by which a label may be off, and u^2/2, which is not of log m's size."""
    weight = xp.exp(log_weight)
    units = 10 * v * v + 80 * xp.where(weight > 0, xp.abs(log_label), 0.0)
    return xp.sum(weight * units, axis=-1, keepdims=True) / xp.sum(weight, axis=-1, keepdims=True)


def _mean_error(v, log_weight, log_a, mu, q, direction) -> jax.Array:
    """Tilted mean of what log A may be off by: 3e-14 of itself (q > 1/2: of 1), and w's rounding times its slope."""
    size = mu * (xp.maximum(xp.abs(v[..., :1]), xp.abs(v[..., -1:])) + mu)
    if direction == "replace":
        return 3e-14 + 4 * ULP * size * xp.ones_like(q)
    weight, w = xp.exp(log_weight), v * mu - mu * mu / 2
    total = xp.sum(weight, axis=-1, keepdims=True)
    share = xp.exp(xp.minimum(xp.log(xp.where(q > 0, q, 1e-300)) + w - log_a, 0.0))
    mean = xp.minimum(xp.sum(weight * xp.abs(log_a), axis=-1, keepdims=True) / total, 1.0)
    turned = xp.sum(weight * share, axis=-1, keepdims=True) / total
    return 3e-14 * xp.where(q > 0.5, 1.0, mean) + 4 * ULP * size * turned


def tilted_line(c, mu, q, cut, direction: str, size: int, label: Label | None = None) -> Line:
    """The step's law tilted to c > 0, as ``size`` complex weights and losses."""
    low, high = interval(c[None], mu[None], q[None], cut[None], direction, label)
    low, step, v = exact_nodes(low[0], high[0], size)
    high = low + size * step
    at = xp.concatenate([v, xp.stack([low, high])])
    on_axis, log_a = integrand_and_mixture(at, c, mu, q, direction)
    # A strip of eight cells leaves e^-50. A wider one makes the weights' moduli larger, and with them their rounding.
    # (A label's bound does not fall with the height, and may be far above the label.)
    y = height(low, high, c, mu, direction, label)
    y = xp.minimum(y, 8 * step) if label is None else y
    re, phase, loss_re, loss_im = exponent(v, -y if direction == "reverse" else y, c, mu, q, direction)
    more, turned = labels.off_axis(v, y, label) if label else (None, None)
    re, phase = (re + more, phase + turned) if label else (re, phase)
    top = xp.max(re)
    scale = xp.exp(re - top)
    units = 16 + 3 * v * v + xp.abs(phase) + xp.abs(re - top)
    if label is not None:  # where the weight is 0 both may be of any size
        units, phase = (xp.where(scale > 0, x, 0.0) for x in (units + 80 * xp.abs(more) + 16, phase))
    total = xp.sum(scale * xp.cos(phase))
    weight = xp.complex(scale * xp.cos(phase), scale * xp.sin(phase)) / total
    loss = xp.complex(loss_re, loss_im)
    log_m = top + xp.log(total) + xp.log(step / ROOT_2PI)
    edge, at_ends = along_edges(at, on_axis - log_m, log_a, step, y, 2 * y * y, c, mu, q, direction, label)
    strip = (2 + edge) / xp.expm1(xp.minimum(2 * xp.pi * y / step, 600.0))
    outside = _OUTSIDE if label is None else _OUTSIDE * edge
    left, right = exp_or_inf(at_ends) * (6 * y + 3 * step) / ROOT_2PI
    rest = strip + right
    if direction == "reverse":
        rest = rest + add_direction.outside(at[-2:], log_a[-2:], c, mu, q, log_m)
    raw = rest + left
    # |L| on the strip's left end, and, on average, anywhere else in the strip or outside the line
    largest = 2 * xp.max(xp.abs(loss)) + 12 + 2 * mu
    near = 2 * q * (1 + xp.exp(low * mu - mu * mu / 2))
    leftmost = xp.where((near < 1) & (direction != "replace"), near, largest)
    rule, mean_rule = raw, rest * largest + left * leftmost
    own, modulus = loss_units(loss, v, mu, q, direction), xp.abs(weight)
    units = units + (c + 1) * own
    raw = raw + ULP * xp.sum(modulus * units)
    # relative to the computed m(c); past a quarter the two can no longer be exchanged
    error = xp.where((raw < 0.25) & (total > 0), raw * (1 + 2 * raw) + outside, xp.inf)
    rule, mean_rule = 2 * rule * (1 + error) + outside, 2 * mean_rule * (1 + error) + outside * largest
    off = xp.where(xp.isfinite(error), error, 0.0)
    drift = modulus * xp.stack([(2 * ULP * units + off) * xp.abs(loss), (1.01 + off) * ULP * own])
    return Line(log_m, weight, loss, error, rule, mean_rule, drift)


def loss_units(loss, v, mu, q, direction):
    """Units of 2^-53 by which the loss may be off, which stands in a weight's exponent times c."""
    if direction == "replace":
        return 16 * (xp.abs(loss) + (1 + (q > 0.5)) * mu * (xp.abs(v) + mu))
    return log_units(v, loss if direction == "forward" else -loss, mu, q)
