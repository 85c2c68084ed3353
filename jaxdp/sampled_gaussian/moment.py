r"""Moment m(z) of one step of the Poisson- or fixed-size-sampled Gaussian at complex order z, by quadrature.

With u = x / sigma, w = u / sigma - 1/(2 sigma^2), A = 1 - q + q e^w and g the standard normal density,

    forward (remove)  m(z) = int g A^{z+1},            L = log A
    reverse (add)     m(z) = int g A^{-z},             L = -log A
    replace           m(z) = int g A(u)^{z+1} A(-u)^{-z},  L = log A(u) - log A(-u).

The integral is taken by the midpoint rule on the line Im u = y (remove, replace) or -y (add), where |exp(i t L)| <= 1
for every t >= 0, so the step need not shrink as t grows. `Line.error` bounds the error of the rule relative to m(c) for
ALL t >= 0. Proof: notebooks/proofs/contour_certificate.md, section 5.
In the forward and replace directions the line ends at ``cut``. The mass of P beyond the cut (`tail_mass`) is charged
like mass at infinity; the bounds hold for the remaining integral as well (section 6). In these directions the integrand
may have a label (`jaxdp.sampled_gaussian.label`) as one more factor.
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

_OUTSIDE = 1e-20  # bound of the integral outside the line over m(c); with a label, over the integral along an edge
_DEAD = 1e-15  # largest error from the ends of the line, relative to m(c), at which a rough log m(c) is accepted


def interval(c, mu, q, cut, direction: str, label: Label | None = None) -> tuple[jax.Array, jax.Array]:
    """Ends of the line of integration, at most ``cut`` (remove, replace). Outside the line lies at most 4e-21 of m(c).

    In the add direction the share outside is bounded by `add_direction.outside`. With a label the ends do not depend on
    c, and outside lies at most 2e-21 of the integral along the edges of the strip. c and the ends: shape (..., 1).
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
    """At u = v + i y, t = 0: real and imaginary part of log(integrand), real and imaginary part of the loss L."""
    a_re, a_im = log_mixture(v * mu - mu * mu / 2, y * mu, q)
    re, im = -(v * v - y * y) / 2, -v * y
    if direction == "forward":
        return re + (c + 1) * a_re, im + (c + 1) * a_im, a_re, a_im
    if direction == "reverse":
        return re - c * a_re, im - c * a_im, -a_re, -a_im
    b_re, b_im = log_mixture(-v * mu - mu * mu / 2, -y * mu, q)
    return re + (c + 1) * a_re - c * b_re, im + (c + 1) * a_im - c * b_im, a_re - b_re, a_im - b_im


def height(low, high, c, mu, direction: str, label: Label | None = None) -> jax.Array:
    """Height y of the line of integration, half the height of the strip in which the integrand is bounded.

    At Im u = 2y, |A|^{-c} is at most a few times its value on the real axis wherever the integrand is not negligible.
    With a label, Im u = 2y is also the height up to which the bound of the label holds.
    """
    if label is not None:
        return xp.minimum(0.5 * labels.TURN * labels.WIDTH, (0.25 if direction == "replace" else 0.45) * xp.pi / mu)
    if direction == "reverse":
        steep = 1 / xp.sqrt(mu * xp.maximum(-0.5 * (low + high), 1e-9))
        return xp.minimum(xp.minimum(1.0, xp.pi / (6 * mu)), steep)
    top = xp.minimum(1.0, 0.45 * xp.pi / mu)
    return top if direction == "forward" else xp.minimum(top, xp.sqrt(6.0 / xp.maximum(c, 1e-3)) / mu)


def along_edges(at, on_axis, log_a, step, y, lift, c, mu, q, direction, label=None):
    """Upper bounds, in units of m(c) and at t = 0, in the strip |Im u| <= 2y.

    Returned: int |integrand| along an edge of the strip; log |integrand| on the vertical lines at both ends.
    at: the nodes, then both ends. on_axis, log_a: log(integrand/m(c)), without label, and log A at these points.
    lift: increase of log |g| from the real axis to the edge.
    """
    if direction != "reverse" and label is None:
        growth = -c * xp.log(xp.cos(xp.minimum(y * mu, 1.5))) if direction == "replace" else xp.zeros_like(c)
        return xp.exp(lift + growth), on_axis[..., -2:] + growth + lift
    if label is None:
        grown, beyond = on_axis + add_direction.growth(at, log_a, y, c, mu, q) + 6e-14 * c, 0.0  # log A is within 3e-14
        # bounds in the cells [x, x + step] from their left ends x: every node and the lower end of the line
        cells = (grown + 0.5 * gained(at, at + step))[..., :-1]
    else:
        grown, rise = on_axis + labels.log_bound(at - step, at, label) + 6e-14 * (xp.abs(c) + 1), (c + 1) * mu
        if direction == "replace":  # A(-u)^-c: for c >= 0 larger off the axis than on it, for c = -1 falling in u
            log_b = log_mixture_real(-at * mu - mu * mu / 2, q)
            more = add_direction.growth(-at, log_b, y, xp.maximum(c, 0.0), mu, q) * xp.exp(2 * mu * step)
            grown = grown + more + 6e-14 * xp.abs(c) + xp.maximum(-c, 0.0) * mu * step
            rise = rise + xp.abs(c) * mu
        # bounds in the cells [x - step, x] from their right ends x: every node and both ends of the line
        cells, beyond = grown + 0.5 * gained(at, at - step), labels.log_beyond(rise, mu)
    total = xp.sum(exp_or_inf(cells), axis=-1, keepdims=xp.ndim(lift) > 0) * step / ROOT_2PI * xp.exp(lift)
    return total, grown[..., -2:] + lift + beyond


def real_log_m(
    c, mu, q, cut, direction: str, size: int, rough: bool = False, label: Label | None = None
) -> tuple[jax.Array, jax.Array]:
    """log m(c) for real c > 0 by the midpoint rule with ``size`` nodes, and its error bound; inf if no bound is proved.

    c, mu, q, cut have shapes that broadcast. rough: an estimate to a few percent, with the error 0, or inf where the
    integrand is not negligible at the ends of the line. With a label: c >= -1; log m(c) + error is an upper bound for
    every error, log m(c) - error a lower bound for an error < 0.6; if rough, the error is that from the ends alone.
    """
    # a new last axis for the nodes
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
    # Remove and replace need the two ends only separately; in one array with the nodes the compiled loop is slower.
    groups = (v, sides) if direction != "reverse" and label is None else (at,)
    pairs = zip(*(integrand_and_mixture(x, c, mu, q, direction, mixture) for x in groups), strict=True)
    everywhere, log_a = (xp.concatenate(x, axis=-1) for x in pairs)
    log_label = None if label is None else labels.on_axis(v, label)
    inside = everywhere[..., :-2] if label is None else everywhere[..., :-2] + log_label
    top = xp.max(inside, axis=-1, keepdims=True)
    log_m = top + xp.log(xp.sum(xp.exp(inside - top), axis=-1, keepdims=True)) + xp.log(step / ROOT_2PI)
    y = height(low, high, c, mu, direction, label)
    edge, at_ends = along_edges(at, everywhere - log_m, log_a, step, y, 2 * y * y, c, mu, q, direction, label)
    strip = 2 * edge / xp.expm1(xp.minimum(4 * xp.pi * y / step, 600.0))
    ends = xp.sum(exp_or_inf(at_ends), axis=-1, keepdims=True) * (6 * y + 3 * step) / ROOT_2PI
    if rough:
        # inf, so that c is not chosen, where no bound could be proved or the integrand is not negligible at the cut
        off = xp.where((strip < 0.05) & (ends < _DEAD), 0.0, xp.inf) if label is None else xp.log1p(ends)
        return log_m[..., 0], off[..., 0]
    error = strip + ends
    if direction == "reverse":
        error = error + add_direction.outside(at[..., -2:], log_a[..., -2:], c, mu, q, log_m)[..., None]
    power_error = xp.abs(2 * c + 1) * _mean_error(v, inside - top, log_a[..., :-2], mu, q, direction)
    rounding = size * ULP + 1e-14 * (1 + xp.abs(log_m)) + power_error
    if label is not None:  # ``edge`` is relative to the computed m(c)
        error, rounding = error + _OUTSIDE * edge, rounding + ULP * _label_units(v, inside - top, log_label)
        return log_m[..., 0], (xp.log1p(2 * error) + rounding)[..., 0]
    return log_m[..., 0], xp.where(error < 1e-3, 2 * error + rounding, xp.inf)[..., 0]


def _label_units(v, log_weight, log_label) -> jax.Array:
    """Tilted mean of the error of log(label) and of u^2/2 (which may be larger than |log m|), in units of 2^-53."""
    weight = xp.exp(log_weight)
    units = 10 * v * v + 80 * xp.where(weight > 0, xp.abs(log_label), 0.0)
    return xp.sum(weight * units, axis=-1, keepdims=True) / xp.sum(weight, axis=-1, keepdims=True)


def _mean_error(v, log_weight, log_a, mu, q, direction) -> jax.Array:
    """Tilted mean of the error of log A: 3e-14 |log A| (3e-14 if q > 1/2), plus the rounding of w times d log A/dw."""
    size = mu * (xp.maximum(xp.abs(v[..., :1]), xp.abs(v[..., -1:])) + mu)
    if direction == "replace":
        return 3e-14 + 4 * ULP * size * xp.ones_like(q)
    weight, w = xp.exp(log_weight), v * mu - mu * mu / 2
    total = xp.sum(weight, axis=-1, keepdims=True)
    share = xp.exp(xp.minimum(xp.log(xp.where(q > 0, q, 1e-300)) + w - log_a, 0.0))
    mean = xp.minimum(xp.sum(weight * xp.abs(log_a), axis=-1, keepdims=True) / total, 1.0)
    slope = xp.sum(weight * share, axis=-1, keepdims=True) / total
    return 3e-14 * xp.where(q > 0.5, 1.0, mean) + 4 * ULP * size * slope


def tilted_line(c, mu, q, cut, direction: str, size: int, label: Label | None = None) -> Line:
    """The law of one step tilted to c > 0, as ``size`` complex weights and losses."""
    low, high = interval(c[None], mu[None], q[None], cut[None], direction, label)
    low, step, v = exact_nodes(low[0], high[0], size)
    high = low + size * step
    at = xp.concatenate([v, xp.stack([low, high])])
    on_axis, log_a = integrand_and_mixture(at, c, mu, q, direction)
    # With y = 8 cells the error from the strip is e^-50. A larger y makes the moduli of the weights and their rounding
    # larger. (With a label y is not reduced: the bound of a label may far exceed the label and does not fall with y.)
    y = height(low, high, c, mu, direction, label)
    y = xp.minimum(y, 8 * step) if label is None else y
    re, phase, loss_re, loss_im = exponent(v, -y if direction == "reverse" else y, c, mu, q, direction)
    label_re, label_im = labels.off_axis(v, y, label) if label else (None, None)
    re, phase = (re + label_re, phase + label_im) if label else (re, phase)
    top = xp.max(re)
    scale = xp.exp(re - top)
    units = 16 + 3 * v * v + xp.abs(phase) + xp.abs(re - top)
    if label is not None:  # where the weight is 0, units and phase may be arbitrarily large
        units, phase = (xp.where(scale > 0, x, 0.0) for x in (units + 80 * xp.abs(label_re) + 16, phase))
    total = xp.sum(scale * xp.cos(phase))
    weight = xp.complex(scale * xp.cos(phase), scale * xp.sin(phase)) / total
    loss = xp.complex(loss_re, loss_im)
    log_m = top + xp.log(total) + xp.log(step / ROOT_2PI)
    edge, at_ends = along_edges(at, on_axis - log_m, log_a, step, y, 2 * y * y, c, mu, q, direction, label)
    strip = (2 + edge) / xp.expm1(xp.minimum(2 * xp.pi * y / step, 600.0))
    outside = _OUTSIDE if label is None else _OUTSIDE * edge
    left, right = exp_or_inf(at_ends) * (6 * y + 3 * step) / ROOT_2PI
    but_left = strip + right  # errors of the rule, relative to m(c), without the left end
    if direction == "reverse":
        but_left = but_left + add_direction.outside(at[-2:], log_a[-2:], c, mu, q, log_m)
    raw = but_left + left
    # bounds of |L|: on average in the strip and outside the line; at the left end of the strip
    largest = 2 * xp.max(xp.abs(loss)) + 12 + 2 * mu
    near = 2 * q * (1 + xp.exp(low * mu - mu * mu / 2))
    leftmost = xp.where((near < 1) & (direction != "replace"), near, largest)
    rule, mean_rule = raw, but_left * largest + left * leftmost
    of_loss, modulus = loss_units(loss, v, mu, q, direction), xp.abs(weight)
    units = units + (c + 1) * of_loss
    raw = raw + ULP * xp.sum(modulus * units)
    # raw is relative to the true m(c), error to the computed one; the conversion holds for raw < 1/4
    error = xp.where((raw < 0.25) & (total > 0), raw * (1 + 2 * raw) + outside, xp.inf)
    rule, mean_rule = 2 * rule * (1 + error) + outside, 2 * mean_rule * (1 + error) + outside * largest
    off = xp.where(xp.isfinite(error), error, 0.0)
    drift = modulus * xp.stack([(2 * ULP * units + off) * xp.abs(loss), (1.01 + off) * ULP * of_loss])
    return Line(log_m, weight, loss, error, rule, mean_rule, drift)


def real_line(c, mu, q, cut, direction: str, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log m(c), weights, losses) of one step tilted to c at ``size`` real outcomes, without error bounds."""
    low, high = interval(c[None], mu[None], q[None], cut[None], direction)
    _, step, v = exact_nodes(low[0], high[0], size)
    on_axis, log_a = integrand_and_mixture(v, c, mu, q, direction)
    log_sum = xp.logsumexp(on_axis)
    loss = -log_a if direction == "reverse" else log_a
    if direction == "replace":
        loss = loss - log_mixture_real(-v * mu - mu * mu / 2, q)
    return log_sum + xp.log(step / ROOT_2PI), xp.exp(on_axis - log_sum), loss


def loss_units(loss, v, mu, q, direction):
    """Error bound of the loss, in units of 2^-53; in the exponent of a weight it counts c times."""
    if direction == "replace":
        return 16 * (xp.abs(loss) + (1 + (q > 0.5)) * mu * (xp.abs(v) + mu))
    return log_units(v, loss if direction == "forward" else -loss, mu, q)
