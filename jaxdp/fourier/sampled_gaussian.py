r"""Quadrature for the Poisson- or fixed-size-sampled Gaussian: one step, at complex order.

With u = x / sigma, w = u / sigma - 1/(2 sigma^2), A = 1 - q + q e^w and g the standard normal density,

    forward (remove)  m(z) = int g A^{z+1},            L = log A
    reverse (add)     m(z) = int g A^{-z},             L = -log A
    replace           m(z) = int g A(u)^{z+1} A(-u)^{-z},  L = log A(u) - log A(-u).

The integral is taken by the midpoint rule on the line Im u = y (remove, replace) or -y (add), where
|exp(i t L)| <= 1 for every t >= 0: the step need not shrink with t. `error` bounds the rule's error
relative to m(c) for ALL t >= 0; the argument stands in notebooks/proofs/contour_certificate.md.
In the forward and replace directions the line ends at ``cut``: the mass of P beyond it is reported as
``tail`` (charged like mass at infinity), and what remains is an honest, smaller integral.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.precision import exact_product

_REACH = 9.5  # half width in standard deviations: 2 Phi_c(9.5) = 2e-21 of m(c) is left out
_DROP = (50.0, 600.0)  # nats below its peak where the line ends in the add direction, if nearer: left, right
_ROOT_2PI = 2.5066282746310002
_ULP = 2.0**-53
_HEIGHTS = np.array([1.0, 0.6, 0.35, 0.2, 0.1, 0.05])
_STRIDE = 4
_HALVINGS = 6
_LARGEST_MU = 9.0  # beyond it the modes of the density of L may lie outside the line


class Line(NamedTuple):
    """One step, tilted to c: m(c + it) / m(c) = sum weight exp(i t loss), up to ``error``."""

    log_m: jax.Array  # log m(c)
    weight: jax.Array  # complex (size,)
    loss: jax.Array  # complex (size,)
    error: jax.Array  # relative to m(c), every t >= 0
    tail: jax.Array  # mass of P beyond the cut
    spread: jax.Array  # upper bound of the tilted standard deviation of L
    variation: jax.Array  # total variation of the tilted density of L (inf: not known)


def _log_mixture(w_re: jax.Array, w_im: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of log(1 - q + q e^w), accurate relative to itself for small q.

    For q > 1/2 the roles are swapped, log A(w; q) = w + log A(-w; 1 - q): 1 + q expm1(w) would cancel.
    """
    flip = q > 0.5
    sign, rate = jnp.where(flip, -1.0, 1.0), jnp.where(flip, 1 - q, q)
    re, im = _log_mixture_small(sign * w_re, sign * w_im, rate)
    return re + jnp.where(flip, w_re, 0.0), im + jnp.where(flip, w_im, 0.0)


def _log_mixture_small(w_re: jax.Array, w_im: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    large = w_re > 30
    a = jnp.where(large, 0.0, w_re)
    half = jnp.sin(0.5 * w_im)
    re = q * (jnp.expm1(a) * jnp.cos(w_im) - 2 * half * half)
    im = q * jnp.exp(a) * jnp.sin(w_im)
    excess = re * (2 + re) + im * im
    # XLA's log1p is up to 129 ulp off near -0.414 (jax-ml/jax 39707); away from 0 the plain logarithm is not
    near_one = jnp.abs(excess) < 0.25
    log_abs = 0.5 * jnp.where(near_one, jnp.log1p(jnp.where(near_one, excess, 0.0)), jnp.log(1 + excess))
    angle = jnp.arctan2(im, 1 + re)
    safe_q = jnp.where(q > 0, q, 1.0)
    fade = (1 - q) / safe_q * jnp.exp(-jnp.where(large, w_re, 30.0))
    re_far, im_far = fade * jnp.cos(w_im), -fade * jnp.sin(w_im)
    far_abs = jnp.log(safe_q) + w_re + 0.5 * jnp.log1p(re_far * (2 + re_far) + im_far * im_far)
    far_angle = w_im + jnp.arctan2(im_far, 1 + re_far)
    use_far = large & (q > 0)
    return jnp.where(use_far, far_abs, log_abs), jnp.where(use_far, far_angle, angle)


def _log_mixture_real(w: jax.Array, q: jax.Array) -> jax.Array:
    """log(1 - q + q e^w) for real w, to 3e-14 absolute (XLA's log1p is 129 ulp off near -0.414)."""
    flip = q > 0.5
    x, rate = jnp.where(flip, -w, w), jnp.where(flip, 1 - q, q)
    near = jnp.log1p(rate * jnp.expm1(jnp.minimum(x, 700.0)))
    far = jnp.log(jnp.where(rate > 0, rate, 1.0)) + x
    return jnp.where((x > 700.0) & (rate > 0), far, near) + jnp.where(flip, w, 0.0)


def _height(v, c, mu, q, direction):
    """Logarithm of the integrand (without 1/sqrt(2 pi)) at real u = v, t = 0."""
    a = _log_mixture_real(v * mu - mu * mu / 2, q)
    if direction == "forward":
        return -v * v / 2 + (c + 1) * a
    if direction == "reverse":
        return -v * v / 2 - c * a
    return -v * v / 2 + (c + 1) * a - c * _log_mixture_real(-v * mu - mu * mu / 2, q)


def _mode_add(c: jax.Array, mu: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mode of g A^{-c}, bound of its error): the zero of u + c mu s(u), s = q e^w / A.

    It lies between 0 and -c mu, and, as s <= q e^w / (1 - q) there and y e^y = r implies y <= log(1 + r), not below
    -log(1 + c mu^2 q e^{-mu^2/2} / (1 - q)) / mu.
    """
    logit = jnp.log(jnp.where(q > 0, q, 1e-300)) - jnp.log1p(-jnp.minimum(q, 1 - _ULP))
    size = jnp.log(jnp.maximum(c * mu * mu, 1e-300)) + logit - mu * mu / 2
    reach = jnp.minimum(c * mu, jax.nn.softplus(size) / mu * (1 + 1e-12))

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        right = middle + c * mu * jax.nn.sigmoid(middle * mu - mu * mu / 2 + logit) > 0
        return jnp.where(right, low, middle), jnp.where(right, middle, high)

    low, high = jax.lax.fori_loop(0, 10, halve, (-reach, jnp.zeros_like(c)))
    return 0.5 * (low + high), reach * 2.0**-10


def _interval_add(c: jax.Array, mu: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where log(g A^{-c}), concave, has fallen by `_DROP`: within 9.5 of the mode, much nearer if c is large.

    On the right by more, because there |A|^{-c} is much larger off the axis than on it.
    """
    mode, slack = _mode_add(c, mu, q)
    peak = _height(mode, c, mu, q, "reverse")

    def reach(sign: float, drop: float) -> jax.Array:
        def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            near, far = ends
            middle = 0.5 * (near + far)
            dead = _height(mode + sign * middle, c, mu, q, "reverse") < peak - drop
            return jnp.where(dead, near, middle), jnp.where(dead, middle, far)

        return jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(c), _REACH + slack))[1]

    return mode - reach(-1.0, _DROP[0]), mode + reach(1.0, _DROP[1])


def _outside_add(low, high, c, mu, q, log_m):
    """What g A^{-c}, log-concave, carries outside [low, high], relative to m(c): at most its ends over their slopes.

    Also those slopes, left and right, or 0 where an end is on the wrong side of the mode (then the first is inf).
    """
    ends = jnp.stack([low, high])
    w = ends * mu - mu * mu / 2
    share = jnp.exp(jnp.minimum(jnp.log(jnp.where(q > 0, q, 1e-300)) + w - _log_mixture_real(w, q), 0.0))
    slopes = jnp.maximum((-ends - c * mu * share) * jnp.array([1.0, -1.0]) - 1e-9, 0.0)
    value = jnp.exp(jnp.minimum(_height(ends, c, mu, q, "reverse") - log_m, 600.0)) / _ROOT_2PI
    return jnp.sum(jnp.where(slopes > 0, value / jnp.where(slopes > 0, slopes, 1.0), jnp.inf)), slopes


def interval(c: jax.Array, mu: jax.Array, q: jax.Array, cut: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Ends of the line on which everything but 4e-21 of m(c) lives (add: `_outside_add`), cut included."""
    if direction == "reverse":
        return _interval_add(c, mu, q)
    reach = ((2 * c + 1) if direction == "replace" else (c + 1)) * mu
    return jnp.full_like(reach, -_REACH), jnp.minimum(reach + _REACH, cut)


def tail_mass(mu: jax.Array, q: jax.Array, end: jax.Array) -> jax.Array:
    """Upper bound of P(u > end) under (1-q) N(0,1) + q N(mu,1)."""
    ndtr = jax.scipy.special.ndtr
    return ((1 - q) * ndtr(-end) + q * ndtr(mu - end)) * (1 + 1e-12)


def _exponent(v, y, c, mu, q, direction):
    """(real part, phase, loss re, loss im) of the integrand's logarithm at u = v + i y."""
    a_re, a_im = _log_mixture(v * mu - mu * mu / 2, y * mu, q)
    re, im = -(v * v - y * y) / 2, -v * y
    if direction == "forward":
        return re + (c + 1) * a_re, im + (c + 1) * a_im, a_re, a_im
    if direction == "reverse":
        return re - c * a_re, im - c * a_im, -a_re, -a_im
    b_re, b_im = _log_mixture(-v * mu - mu * mu / 2, -y * mu, q)
    return re + (c + 1) * a_re - c * b_re, im + (c + 1) * a_im - c * b_im, a_re - b_re, a_im - b_im


def _side_error(v, c, mu, q, y, step, log_m, direction):
    """What the vertical end of the strip at v contributes, relative to m(c).

    The line runs in the strip's middle, at distance y from its edges. Along the end |A^{-c}| grows with
    the distance from the real axis, and beyond the line the midpoint kernel falls like e^{-2 pi d/step};
    the logarithm of the product is convex there, so its largest value is at an end.
    """
    sign = -1.0 if direction == "reverse" else 1.0
    on_line, _, _, _ = _exponent(v, sign * y, c, mu, q, direction)
    on_edge, _, _, _ = _exponent(v, sign * 2 * y, c, mu, q, direction)
    on_axis = _height(v, c, mu, q, direction)
    height = jnp.maximum(jnp.maximum(on_line, on_axis), on_edge - 2 * jnp.pi * y / step)
    return jnp.exp(jnp.minimum(height + 2 * y * y - log_m, 50.0)) * (6 * y + 3 * step) / _ROOT_2PI


def _edge_height(v, y, c, mu, q, log_m, direction):
    """Logarithm of the integrand's modulus along Im u = 2y at t = 0, relative to m(c)."""
    height, _, _, _ = _exponent(v, 2 * y, c, mu, q, direction)
    return height - log_m


def _raise(x: jax.Array) -> jax.Array:
    """e^x of a bound: what is out of reach is infinite, not clipped, for a tiny factor may follow."""
    return jnp.where(x < 600, jnp.exp(jnp.minimum(x, 600.0)), jnp.inf)


def _edge_mass(v, y, c, mu, q, step, log_m, direction):
    """Bound of the integral of |integrand at t = 0| along Im u = 2y, relative to m(c).

    Twice (midpoint sum + one largest cell): the integrand's modulus rises and falls once or twice, and its
    peak is at most e^{bend step^2/8} above the grid. Or, reverse with |Im u| mu <= pi/2, where |A| rises with
    Re u: cell by cell, the largest g times |A| at the cell's left end, a node.
    """
    bend = 1 + (c + 1) * mu * mu / (2 * (1 + jnp.cos(jnp.minimum(2 * jnp.abs(y) * mu, 3.0))))
    height = _edge_height(v, y, c, mu, q, log_m, direction)
    scaled = _raise(height) * step / _ROOT_2PI
    humps = 2 * (jnp.sum(scaled) + jnp.max(scaled) * _raise(bend * step * step / 8))
    if direction != "reverse":
        return humps
    first = _edge_height(v[0] - step, y, c, mu, q, log_m, direction) + 0.5 * _raised(v[0] - step, step)
    cells = jnp.sum(scaled * jnp.exp(0.5 * _raised(v, step))) + _raise(first) * step / _ROOT_2PI
    return jnp.where(2 * jnp.abs(y) * mu <= 0.5 * jnp.pi, jnp.minimum(humps, cells * (1 + 1e-9)), humps)


def _raised(left: jax.Array, step: jax.Array) -> jax.Array:
    """u^2 at the left end of a cell less its smallest in the cell: what g's exponent gains, twice over."""
    right = left + step
    smallest = jnp.where((left < 0) & (right > 0), 0.0, jnp.minimum(jnp.abs(left), jnp.abs(right)))
    return left * left - smallest * smallest


def _best_shift(v, c, mu, q, step, log_m, direction):
    """(y, strip error): the line whose strip theorem gives the smallest error, of a few heights."""
    top = jnp.minimum(1.0, 0.45 * jnp.pi / mu)
    if direction == "forward":
        # |A(u + is)| <= A(u): the edge carries at most e^{2 y^2} m(c)
        return top, (1 + jnp.exp(2 * top * top)) / jnp.expm1(jnp.minimum(2 * jnp.pi * top / step, 600.0))
    heights = top * _HEIGHTS
    sign = -1.0 if direction == "reverse" else 1.0
    kernel_weight = 1 / jnp.expm1(jnp.minimum(2 * jnp.pi * heights / step, 600.0))
    # every few nodes tell which height is best; all of them bound its error
    few = v[::_STRIDE]
    scouted = jax.vmap(lambda y: jnp.sum(_raise(_edge_height(few, sign * y, c, mu, q, log_m, direction))))(heights)
    cell = step * (v.shape[0] / few.shape[0]) / _ROOT_2PI
    best = jnp.argmin((2 + 2 * cell * scouted) * kernel_weight)
    edge = _edge_mass(v, sign * heights[best], c, mu, q, step, log_m, direction)
    return heights[best], (2 + edge) * kernel_weight[best]


def real_log_m(
    c: jax.Array, mu: jax.Array, q: jax.Array, cut: jax.Array, direction: str, size: int, rough: float
) -> jax.Array:
    """Upper bound of log m(c), c > 0 real, by the midpoint rule (+inf where ``size`` nodes cannot tell).

    rough: if not 0, an estimate to a few percent instead of a bound, where the ends carry less than this.
    """
    low, high = interval(c, mu, q, cut, direction)
    step = (high - low) / size
    v = low + (jnp.arange(size) + 0.5) * step
    height = _height(v, c, mu, q, direction)
    top = jnp.max(height)
    log_m = top + jnp.log(jnp.sum(jnp.exp(height - top))) + jnp.log(step / _ROOT_2PI)
    at_ends = _height(jnp.stack([low, high]), c, mu, q, direction)
    cell = step / _ROOT_2PI
    if direction == "reverse":
        # strip |Im u| <= 2y: |A|^{-c} grows off the axis, by little where the integrand lives if y is small
        y = jnp.minimum(jnp.minimum(1.0, jnp.pi / (6 * mu)), 1 / jnp.sqrt(mu * jnp.maximum(-0.5 * (low + high), 1e-9)))
        grown = height + 0.5 * _raised(v, step) + _growth(v, y, c, mu, q)
        first = at_ends[0] + 0.5 * _raised(low, step) + _growth(low, y, c, mu, q)
        edge = jnp.sum(_raise(grown - log_m)) + _raise(first - log_m)
        edge = edge * cell * jnp.exp(2 * y * y)
        at_ends = at_ends + _growth(jnp.stack([low, high]), y, c, mu, q)
    else:
        y = jnp.minimum(1.0, 0.45 * jnp.pi / mu)
        growth = jnp.zeros_like(c)
        if direction == "replace":
            y = jnp.minimum(y, jnp.sqrt(6.0 / jnp.maximum(c, 1e-3)) / mu)
            growth = -c * jnp.log(jnp.cos(jnp.minimum(y * mu, 1.5)))
        edge = jnp.exp(2 * y * y + growth)
        at_ends = at_ends + growth
    strip = 2 * edge / jnp.expm1(jnp.minimum(4 * jnp.pi * y / step, 600.0))
    ends = jnp.sum(jnp.exp(jnp.minimum(at_ends - log_m + 2 * y * y, 50.0))) * (6 * y + 3 * step) / _ROOT_2PI
    if rough > 0:
        # where a bound could not be had either, or the integrand has not died at the cut, c is not a place to choose
        return jnp.where((strip < 0.05) & (ends < rough), log_m, jnp.inf)
    error = strip + ends
    if direction == "reverse":
        error = error + _outside_add(low, high, c, mu, q, log_m)[0]
    rounding = 1e-14 * (1 + jnp.abs(log_m)) + 3e-14 * (2 * c + 1) * _mean_loss(v, height - top, mu, q, direction)
    return jnp.where(error < 1e-3, log_m + 2 * error + rounding, jnp.inf)


def _growth(v: jax.Array, y: jax.Array, c: jax.Array, mu: jax.Array, q: jax.Array) -> jax.Array:
    """Bound of -c log(|A(v + is)| / A(v)), |s| <= 2y <= pi/(2 mu): |A|^2 = A^2 - 2 q (1-q) e^w (1 - cos(s mu)).

    With x = 2 q (1-q) e^w (1 - cos)/A^2 <= 1/2, -log(1 - x) <= x (1 + x).
    """
    w = v * mu - mu * mu / 2
    both = jnp.log(jnp.where(q > 0, q, 1e-300)) + jnp.log1p(-jnp.minimum(q, 1 - _ULP)) + w
    x = 2 * jnp.exp(jnp.minimum(both - 2 * _log_mixture_real(w, q), 0.0)) * (1 - jnp.cos(2 * y * mu))
    return 0.5 * c * x * (1 + x) * (1 + 1e-9)


def _mean_loss(v: jax.Array, log_weight: jax.Array, mu: jax.Array, q: jax.Array, direction: str) -> jax.Array:
    """At most 1, the absolute error of log A in units of 3e-14: for q <= 1/2 it is relative, and counts as tilted."""
    if direction == "replace":
        return jnp.ones_like(q)
    weight = jnp.exp(log_weight)
    mean = jnp.sum(weight * jnp.abs(_log_mixture_real(v * mu - mu * mu / 2, q))) / jnp.sum(weight)
    return jnp.where(q > 0.5, 1.0, jnp.minimum(mean, 1.0))


def tilted_line(c: jax.Array, mu: jax.Array, q: jax.Array, cut: jax.Array, direction: str, size: int) -> Line:
    """The step's law tilted to c > 0, as ``size`` complex weights and losses."""
    low, high = interval(c, mu, q, cut, direction)
    step = (high - low) / size
    v = low + (jnp.arange(size) + 0.5) * step
    # log m(c) to a few digits on the real line, enough to weigh the heights
    plain = _height(v, c, mu, q, direction)
    rough = jax.nn.logsumexp(plain) + jnp.log(step / _ROOT_2PI)
    y, strip = _best_shift(v, c, mu, q, step, rough, direction)
    signed = -y if direction == "reverse" else y
    re, phase, loss_re, loss_im = _exponent(v, signed, c, mu, q, direction)
    top = jnp.max(re)
    scale = jnp.exp(re - top)
    total = jnp.sum(scale * jnp.cos(phase))
    weight = jax.lax.complex(scale * jnp.cos(phase), scale * jnp.sin(phase)) / total
    loss = jax.lax.complex(loss_re, loss_im)
    log_m = top + jnp.log(total) + jnp.log(step / _ROOT_2PI)
    ends = _side_error(low, c, mu, q, y, step, log_m, direction) + _side_error(
        high, c, mu, q, y, step, log_m, direction
    )
    uncut_end = interval(c, mu, q, jnp.full_like(cut, jnp.inf), direction)[1]
    tail = jnp.where(high < uncut_end, tail_mass(mu, q, high), 0.0) if direction != "reverse" else jnp.zeros_like(c)
    mean = jnp.sum(weight * loss)
    strip_loss = 20 * (mu * y) ** 2
    variance = jnp.real(jnp.sum(weight * (loss - mean) ** 2))
    raw = strip + ends
    if direction == "reverse":
        beyond, slopes = _outside_add(low, high, c, mu, q, log_m)
        raw = raw + beyond
    units = 16 + 8 * (jnp.abs(phase) + v * v) + 16 * _tilting(loss, v, c, mu, q, direction)
    raw = raw + _ULP * jnp.sum(jnp.abs(weight) * units)
    # relative to the computed m(c); past a quarter the two can no longer be exchanged
    error = jnp.where(raw < 0.25, 2 * raw + 1e-20, jnp.inf)
    reach2 = jnp.sum(jnp.abs(weight) * jnp.abs(loss - mean) ** 2)
    spread = jnp.sqrt(jnp.maximum(variance, 0.0) + 8 * (error + 1e-12) * (4 * reach2 + strip_loss))
    if direction == "reverse":
        spread = jnp.fmin(spread, _spread_add(v, step, slopes, jnp.real(mean), c, mu, q, log_m, error))
        variation = _variation_add(v, step, slopes, c, mu, q, log_m)
    else:
        variation = _variation(v, step, c, mu, q, log_m, direction)
    return Line(log_m, weight, loss, jnp.where(total > 0, error, jnp.inf), tail, spread, variation)


def _tilting(loss, v, c, mu, q, direction):
    """Size of the terms whose sum, times c, stands in a weight's exponent: each is rounded."""
    size = jnp.abs(loss) if direction != "replace" else jnp.abs(loss) + mu * (jnp.abs(v) + mu)
    return (c + 1) * (size + jnp.where(q > 0.5, mu * (jnp.abs(v) + mu), 0.0))


def _spread_add(v, step, slopes, mean, c, mu, q, log_m, error):
    """Upper bound of the deviation of L = -log A around ``mean`` under the law tilted to c, cell by cell.

    Cells [v_k, v_k+1]: A rises, so A^{-c} is largest and L farthest at an end. Outside, g A^{-c} is log-concave and
    falls with the slopes at the ends, while L rises to -log(1 - q) on the left and falls by mu per unit on the right.
    """
    left = jnp.concatenate([v[:1] - step, v])
    log_a = _log_mixture_real(left * mu - mu * mu / 2, q)
    end_a = _log_mixture_real((v[-1] + step) * mu - mu * mu / 2, q)
    ends_a = jnp.append(log_a, end_a)
    far = jnp.square(jnp.abs(ends_a + mean) + 4e-14 * (jnp.abs(ends_a) + jnp.abs(mean)))
    far = jnp.maximum(far[:-1], far[1:])
    f = -0.5 * left * left + 0.5 * _raised(left, step) - c * log_a - log_m
    inside = jnp.sum(jnp.exp(jnp.minimum(f, 600.0)) * far) * step
    ends = jnp.stack([v[0] - 0.5 * step, v[-1] + 0.5 * step])
    beyond = jnp.exp(jnp.minimum(_height(ends, c, mu, q, "reverse") - log_m, 600.0))
    rest = jnp.maximum(far[0], jnp.square(jnp.log1p(-jnp.minimum(q, 1 - _ULP)) + mean))
    fall = jnp.where(slopes > 0, 1 / jnp.where(slopes > 0, slopes, 1.0), jnp.inf)
    outside = beyond[0] * rest * fall[0] + beyond[1] * (2 * far[-1] * fall[1] + 4 * mu * mu * fall[1] ** 3)
    return jnp.sqrt((inside + outside) / _ROOT_2PI * (1 + error) * (1 + 1e-6))


def discrete_line(c: jax.Array, loss: jax.Array, log_weight: jax.Array) -> Line:
    """A finite law of the loss, tilted to c: exact up to rounding, with atoms that never decay."""
    exponents = log_weight + c * loss
    log_m = jax.nn.logsumexp(exponents)
    weight = jnp.exp(exponents - log_m)
    mean = jnp.sum(weight * loss)
    spread = jnp.sqrt(jnp.sum(weight * (loss - mean) ** 2) * (1 + 1e-9) + 1e-300)
    nothing = jnp.zeros_like(log_m)
    # exponents are rounded before exp: their size in ulp is the relative error of a weight
    error = 4 * _ULP * jnp.sum(weight * (jnp.abs(jnp.where(weight > 0, exponents, 0.0)) + 8))
    return Line(log_m, weight + 0j, loss + 0j, error, nothing, spread, jnp.full_like(log_m, jnp.inf))


def _variation(v, step, c, mu, q, log_m, direction):
    """Upper bound of the total variation of the tilted density of L (remove and replace).

    On the grid it is summed; between grid points log f bends by at most ``bend`` per unit squared, which
    bounds what a turning point in a cell can add. Outside the line f only falls (mu < 9).
    """
    log_a = _log_mixture_real(v * mu - mu * mu / 2, q)
    logit = jnp.log(jnp.where(q > 0, q, 1.0)) + v * mu - mu * mu / 2
    slope = logit - log_a  # log s(u), dL/du = mu s
    if direction == "forward":
        log_f, bend = -v * v / 2 + (c + 1) * log_a - slope, 1 + (c + 2) * mu * mu / 4
    else:
        log_b = _log_mixture_real(-v * mu - mu * mu / 2, q)
        other = jnp.log(jnp.where(q > 0, q, 1.0)) - v * mu - mu * mu / 2 - log_b
        log_f = -v * v / 2 + (c + 1) * log_a - c * log_b - jnp.logaddexp(slope, other)
        bend = 1 + (2 * c + 1) * mu * mu / 4 + 2 * mu * mu
    f = jnp.exp(jnp.minimum(log_f - log_m - jnp.log(_ROOT_2PI * mu), 600.0))
    hump = jnp.expm1(jnp.minimum(bend * step * step / 8, 50.0))
    cells = jnp.abs(jnp.diff(f)) + 4 * jnp.maximum(f[1:], f[:-1]) * (1 + hump) * hump
    total = jnp.sum(cells) + (f[0] + f[-1]) * (1 + hump) ** 4
    return jnp.where((q > 0) & (mu < _LARGEST_MU) & jnp.isfinite(total), total * 1.001, jnp.inf)


def _variation_add(v, step, slopes, c, mu, q, log_m):
    """The same for add, where log f = log(g A^{-c} / s) + const is concave for c >= 1: it rises once and falls once.

    Twice the largest f, cell by cell: the largest g times A^{-c}/s at the cell's left end, a node, as both fall. The
    peak is between the nodes when the slope at the left end, that of g A^{-c} less mu (1 - s), is positive. For c < 1
    the curvature is below mu^2/4 - 1, and nothing is claimed unless that is negative too.
    """
    left = jnp.concatenate([v[:1] - step, v])
    w = left * mu - mu * mu / 2
    log_a = _log_mixture_real(w, q)
    slope = jnp.log(jnp.where(q > 0, q, 1.0)) + w - log_a
    peak = jnp.max(-0.5 * left * left + 0.5 * _raised(left, step) - c * log_a - slope)
    peak = jnp.exp(jnp.minimum(peak - log_m - jnp.log(_ROOT_2PI * mu), 600.0))
    single = ((c >= 1) | (mu < 2)) & (slopes[0] > mu) & (slopes[1] > 0)
    return jnp.where((q > 0) & single, 2 * peak * 1.001, jnp.inf)


def ratios(line: Line, start: jax.Array, step: jax.Array, count: int) -> jax.Array:
    """m(c + it)/m(c) at t = start + step (0..count-1), as one complex matrix product.

    The nodes are equally spaced, so exp(i t L) factors into exp(i anchor L) exp(i offset L): two small
    tables of powers instead of count x size exponentials.
    """
    inner, outer = split(count)
    first = jnp.exp(1j * start * line.loss) * line.weight
    a, b = _powers(first, jnp.exp(1j * (step * inner) * line.loss), outer)
    x, y = _powers(jnp.ones_like(first), jnp.exp(1j * step * line.loss), inner)
    # one real product, its sums 2 x size long, for both parts: [a, -b] [x, y]^T above [b, a] [x, y]^T
    left = jnp.concatenate([jnp.concatenate([a, -b], axis=1), jnp.concatenate([b, a], axis=1)])
    both = exact_product(left, jnp.concatenate([x, y], axis=1).T)
    return jax.lax.complex(both[:outer], both[outer:]).reshape(-1)[:count]


def split(count: int) -> tuple[int, int]:
    """(inner, outer), about equal, inner a power of two, inner x outer >= count."""
    inner = 1 << max(0, (max(count - 1, 1).bit_length() + 1) // 2)
    return inner, -(-count // inner)


def rounding_units(size: int, count: int) -> float:
    """Units of 2^-53, relative to sum |weight|, by which `ratios` may be off besides the phases."""
    return 32 + 2 * size + 6 * sum(split(count))


def _powers(first: jax.Array, base: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of first x base^k, k = 0..count-1, shape (count, size).

    A loop, because an unrolled product is fused and computed again for every row.
    """
    base_re, base_im = jnp.real(base), jnp.imag(base)

    def turn(state: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        re, im = state
        return (re * base_re - im * base_im, re * base_im + im * base_re), state

    _, table = jax.lax.scan(turn, (jnp.real(first), jnp.imag(first)), None, length=count)
    return table
