"""Choice of the contour, and the Chernoff and alias bounds that hold for every choice.

The contour is the line Re z = c on which e^{K(z) - z eps}/(z (z+1)) is integrated, in steps h; K(z) = log E e^{zL}.
This module chooses c, h and the tail cut. A poor choice makes the bounds wide, never wrong.
The bounds beside the plans of `plan_epsilon` and `plan_delta`, and `log_alias`, are certified.
"""

from typing import Any, NamedTuple

import jax

from jaxdp.contour.spectrum import Spectrum
from jaxdp.numerics.special import log_expm1
from jaxdp.runtime.arrays import xp

_ORDERS = (1e-2, 1.0, 0.505)  # orders z at which K(z) gives an estimate of the variance of the loss
_POINTS = 10  # abscissae in one row of a search table
_TWO_ROWS = (2, _POINTS)
_ZOOMS = 3  # rounds of narrowing the search interval
_SHARPENED = 5  # searches of plan_delta when there is a tail cut; between two searches the cut is fitted to delta again
# Ranges of log c that are searched. _FAR: for the saddle point, relative to the abscissa of the least Chernoff bound
# (the full range only for delta near 1). _NEAR: for the contour, relative to the saddle point.
_FAR = (-2.5, 5.0)
_NEAR = (-0.7, 0.3)
_CANCELLATION = 3.0  # nats by which the integrand at c may exceed the integrand at the saddle point
_CANCELLATION_COST = 0.25  # one nat of cancellation costs as much as this increase of log(period)
_CUT_NATS = 60.0  # the mass beyond the tail cut, over all steps, is e^-60 of delta
_ALIAS_TARGET = -27.0  # log of the intended alias error, relative to delta


class Sides(NamedTuple):
    """Values of K on the real axis, on both sides of the contour, that the alias bounds use."""

    above: jax.Array  # abscissae c' > 0; the bound of the right alias uses those > c
    k_above: jax.Array  # upper bounds of K(c')
    below: jax.Array  # values c'' > 0, each for the abscissa -1 - c''
    k_below: jax.Array  # upper bounds of K(-1 - c'')


class Plan(NamedTuple):
    """The choice of a contour."""

    c: jax.Array  # abscissa
    period: jax.Array  # alias period 2 pi / h
    log_height: jax.Array  # log of the integrand at c, relative to delta; rough
    cut: jax.Array  # outcome beyond which the mass of a step is charged like mass at infinity
    sides: Sides


class Masses(NamedTuple):
    """log M(0) and log M(-1) of a part of a law: upper bounds, and log(lower bound / upper bound) of each M."""

    upper: jax.Array
    share: jax.Array


def conversion(c: jax.Array) -> jax.Array:
    """c log c - (c+1) log(c+1): the constant of Canonne, Kamath, Steinke 2020, Proposition 12.

    Computed as -c log(1 + 1/c) - log(1 + c), because c log c and (c+1) log(c+1) would cancel.
    """
    large = c > 1.0
    far = c * xp.log1p(1 / xp.where(large, c, 1.0))
    near = c * (xp.log1p(c) - xp.log(xp.maximum(c, 1e-300)))
    return -xp.where(large, far, near) - xp.log1p(c)


def log_chernoff(c: jax.Array, k: jax.Array, eps: jax.Array) -> jax.Array:
    """Upper bound of log delta(eps) from an upper bound k of K(c)."""
    constant, away = conversion(c), c * eps
    return k - away + constant + 1e-14 * (xp.abs(k) + xp.abs(away) + xp.abs(constant))


def _variance(infinity: jax.Array, k: jax.Array) -> jax.Array:
    """Rough variance of the loss, from k = K at ``_ORDERS``.

    K(z) is about z(z+1)/2 x variance. The smaller of two estimates is taken: past a phase transition K(1) is too large.
    With mass at infinity K(0) < 0; then the second difference of K gives the variance.
    """
    c = xp.array(_ORDERS)
    plain = xp.min(2 * k[:2] / (c[:2] * (c[:2] + 1)))
    bend = (k[1] - 2 * k[2] + k[0]) / 0.495**2
    return xp.clip(xp.where(infinity > 0, bend, plain), 1e-24, 1e24)


def _widest(spectrum: Spectrum) -> float:
    """Largest log c of the search, relative to the c of a Gaussian with this variance: large for a bounded loss."""
    return 26.0 if spectrum.direction == "reverse" else 4.0


def tail_cut(spectrum: Spectrum, log_delta: jax.Array) -> jax.Array:
    """The outcome u beyond which a step's mass is charged like mass at infinity: e^-60 of delta over all steps.

    A larger charge would do no harm, but the integrand must be negligible at the cut for every abscissa in use.
    """
    mu = xp.zeros(())
    for part in spectrum.sampled:
        mu = xp.maximum(mu, xp.max(part.mu))
    return xp.sqrt(2 * (xp.maximum(-log_delta, 0.0) + xp.log(spectrum.step_count()) + _CUT_NATS)) + mu


def _between(ends: jax.Array, points: int) -> jax.Array:
    """One row of equally spaced points for each column (low, high) of ends."""
    return ends[0][:, None] + (ends[1] - ends[0])[:, None] * xp.linspace(0.0, 1.0, points)


def _one_sequence(ends: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Equally spaced points between the two ends, as one sequence in a table of this shape."""
    return xp.linspace(ends[0], ends[1], shape[0] * shape[1]).reshape(shape)


def _near_least(x: jax.Array, k: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least Chernoff bound in row 0 of k = K(e^x); new ends around its abscissa and, in row 1, the saddle point."""
    c = xp.exp(x)
    bound = log_chernoff(c[0], k[0], eps)
    return xp.min(bound), _beside_least(x, xp.stack([bound, _log_integrand(c[1], k[1], eps)]))


def _next_rows(ends: jax.Array, saddle: jax.Array, zooming: jax.Array) -> jax.Array:
    """The next two rows of log c: between the ends while zooming, then both rows around the saddle point."""
    return xp.where(zooming, _between(ends, _POINTS), _one_sequence(saddle + xp.array(_NEAR), _TWO_ROWS))


def _first_points(shape: tuple[int, int]) -> jax.Array:
    """Logarithms of ``_ORDERS``; the last one fills the table."""
    return xp.log(xp.array([*_ORDERS, *[_ORDERS[-1]] * (shape[0] * shape[1] - len(_ORDERS))])).reshape(shape)


def _beside_least(x: jax.Array, value: jax.Array) -> jax.Array:
    """The two neighbours of the smallest value in each row: (low ends, high ends)."""
    best = xp.argmin(value, axis=1)
    low, high = xp.maximum(best - 1, 0), xp.minimum(best + 1, x.shape[1] - 1)
    return xp.stack([xp.take_along_axis(x, at[:, None], 1)[:, 0] for at in (low, high)])


def _log_integrand(c: jax.Array, k: jax.Array, eps: jax.Array) -> jax.Array:
    """log of the integrand's modulus at real z = c; its minimum over c is the saddle point."""
    return k - c * eps - xp.log(c) - xp.log1p(c)


# The body of a planning loop calls K once, because most of the compiled program is K. The round selects the abscissae.
def plan_epsilon(spectrum: Spectrum, log_delta: jax.Array, size: int, ceiling: jax.Array) -> tuple[Plan, jax.Array]:
    """Contour for solving delta(eps) = delta, and a certified upper bound of eps from K on the real axis alone.

    size: quadrature nodes per step. ceiling: a known upper bound of eps; the abscissa is chosen for it where it is
    smaller than the epsilon of the Chernoff bound.

    Rounds: estimate the variance; zoom on the least Chernoff bound; find the saddle point on a coarse and a fine grid.
    """
    cut = tail_cut(spectrum, log_delta)
    shape = (1, _POINTS)
    # For a small delta the range ends early: the epsilon of the Chernoff bound is too large, and near the supremum of
    # the loss the saddle point for this epsilon lies much too far right.
    far = xp.stack([xp.asarray(_FAR[0]), 1 + (_FAR[1] - 1) * xp.exp(3 * xp.minimum(log_delta, 0.0))])

    def rdp(c: jax.Array, k: jax.Array) -> jax.Array:
        constant = conversion(c)
        rounding = 1e-14 * (xp.abs(k) - log_delta + xp.abs(constant))
        return (k - log_delta + constant + rounding) / c

    def level_of(eps: jax.Array) -> jax.Array:
        eps = xp.minimum(eps, ceiling)
        return xp.where(xp.isfinite(eps), xp.clip(eps, 0.0, spectrum.top), 1.0)

    def one_round(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _, _, best, eps = state
        c, zooming = xp.exp(x), i <= _ZOOMS
        k = spectrum.rough(c.ravel(), cut, size).reshape(c.shape)
        bound = rdp(c, k)
        near = _beside_least(x, bound)
        best = xp.where(zooming, 0.5 * (near[0] + near[1]), best)
        eps = xp.where(zooming, xp.min(bound), eps)
        center = 0.5 * xp.log(2 * (1 - log_delta) / _variance(spectrum.infinity, k.ravel()))
        ends = xp.where(i == 0, center + xp.array([[-9.0], [_widest(spectrum)]]), near)
        bottom = xp.lookup(x.ravel(), xp.argmin(_log_integrand(c, k, level_of(eps))))
        row = xp.where(i == _ZOOMS, best[0] + far, bottom + xp.array(_NEAR))
        return xp.where(i < _ZOOMS, _between(ends, _POINTS), _one_sequence(row, shape)), x, k, best, eps

    zeros = xp.zeros(shape)
    start = _first_points(shape), zeros, zeros, xp.zeros(1), xp.zeros(())
    _, x, k, best, rough = xp.fori_loop(0, _ZOOMS + 3, one_round, start)
    candidates, least = xp.exp(x.ravel()), xp.exp(best)
    above = _above(candidates, k.ravel(), level_of(rough))
    k_above, k_least = xp.split(spectrum.real(xp.concatenate([above, least]), cut, size), [above.size])
    eps = rdp(least, k_least)[0]
    sides = Sides(above, k_above, *_below(spectrum, above, cut, size))
    return Plan(*_choose(candidates, k.ravel(), level_of(eps), log_delta, sides), cut, sides), eps


def plan_delta(spectrum: Spectrum, eps: jax.Array, size: int, known: jax.Array) -> tuple[Plan, jax.Array]:
    """Contour for delta at a given eps; a certified upper bound of log delta, without mass at infinity or mass cut.

    known: logarithm of an upper bound of delta. Past a phase transition it is far below the Chernoff bound.

    Rounds: estimate the variance; zoom on the least Chernoff bound and, in a second row, on the saddle point (far right
    of the first where delta is near 1); repeat with the tail cut for this bound; search around the saddle point.
    """
    loose = tail_cut(spectrum, xp.asarray(-800.0))
    # The cut depends on the bound of delta and the bound on the cut. Past a phase transition each repetition lowers the
    # bound by many orders of magnitude.
    is_cut = bool(spectrum.discrete) or (bool(spectrum.sampled) and spectrum.direction != "reverse")
    last = _ZOOMS * (_SHARPENED if is_cut else 1)
    reach = xp.array([-9.0, _widest(spectrum)])

    def one_round(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _, _, cut, around, best = state
        k = spectrum.rough(xp.exp(x).ravel(), cut, size).reshape(x.shape)
        variance = _variance(spectrum.infinity, k.ravel())
        center = xp.log(xp.maximum(xp.abs(eps) / variance, 1 / xp.sqrt(variance)))
        # Search down to c = 1/(1 + eps): with a few rare large losses the saddle point is far left of a Gaussian's.
        ends = xp.minimum(center + reach, xp.append(-xp.log1p(xp.maximum(eps, 0.0)), xp.inf))
        ends = xp.where(eps > 0, ends, center + reach)
        around = xp.where(i == 0, ends, around)
        least, near = _near_least(x, k, eps)
        best = xp.where(i > last, best, 0.5 * (near[0] + near[1]))
        restart = i % _ZOOMS == 0
        cut = xp.where(restart & (i > 0) & (i < last), tail_cut(spectrum, least), cut)
        return _next_rows(xp.where(restart, around[:, None], near), best[1], i < last), x, k, cut, around, best

    zeros = xp.zeros(_TWO_ROWS)
    start = _first_points(_TWO_ROWS), zeros, zeros, loose, reach, xp.zeros(2)
    _, x, k, cut, _, best = xp.fori_loop(0, last + 2, one_round, start)
    candidates, least = xp.exp(x.ravel()), xp.exp(best[:1])
    above = _above(candidates, k.ravel(), eps)
    k_above, k_least = xp.split(spectrum.real(xp.concatenate([above, least]), cut, size), [above.size])
    value = log_chernoff(least, k_least, eps)[0]
    guess = xp.where(xp.isfinite(value), xp.minimum(value, known), known)
    sides = Sides(above, k_above, *_below(spectrum, above, cut, size))
    return Plan(*_choose(candidates, k.ravel(), eps, guess, sides), cut, sides), value


def plan_part(part: Any, eps: jax.Array, log_delta: jax.Array) -> tuple[Plan, Masses]:
    """Contour for delta(eps) of a part of a law, and the part's masses; errors far below e^log_delta are accepted.

    part: a `jaxdp.contour.largest_loss.band.Band`, the part of the law in which the largest loss lies in one band.

    Rounds: zoom on the least Chernoff bound and on the saddle point; search around the saddle point. The last entry of
    ``above`` is the abscissa of the least Chernoff bound.
    """

    def one_round(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _, _, best = state
        k = part.rough(xp.exp(x).ravel()).reshape(x.shape)
        _, near = _near_least(x, k, eps)
        best = xp.where(i > _ZOOMS, best, 0.5 * (near[0] + near[1]))
        return _next_rows(near, best[1], i < _ZOOMS), x, k, best

    ends = xp.minimum(xp.array([[1e-6], [5000.0]]) / eps, part.largest * xp.array([[1e-3], [1.0]]))
    first = _between(xp.log(ends) + xp.zeros(2), _POINTS)
    _, x, k, best = xp.fori_loop(1, _ZOOMS + 2, one_round, (first, first, first, xp.zeros(2)))
    candidates = xp.exp(x.ravel())
    above = xp.append(_above(candidates, k.ravel(), eps), xp.exp(best[0]))
    k_above, masses = bounds_of(part, above)
    sides = Sides(above, k_above, xp.zeros(1), xp.full(1, xp.inf))  # no bound of the swapped pair: K = inf
    return Plan(*_choose(candidates, k.ravel(), eps, log_delta, sides, masses), part.cut, sides), masses


def bounds_of(part: Any, above: jax.Array) -> tuple[jax.Array, Masses]:
    """Upper bounds of K at the abscissae ``above``, and bounds of M(0) and M(-1)."""
    low, high = part.real(xp.append(above, xp.array([0.0, -1.0])))
    return high[:-2], Masses(xp.minimum(high[-2:], 0.0), low[-2:] - high[-2:])


def plan_comparison(spectrum: Spectrum, eps: jax.Array, log_delta: jax.Array, size: int) -> Plan:
    """Contour for deciding whether delta(eps), eps > 0, is at most e^log_delta; without alias bounds.

    The candidates surround the saddle point of the Gaussian mechanism with this epsilon at this delta. The leftmost
    candidate at which the integrand is at most e^(log_delta - 1) is taken, otherwise the one with the least integrand.
    The alias left of eps is at most e^-5 of the given delta, because every delta is at most 1.
    """
    cut = tail_cut(spectrum, log_delta)
    mu = 2 * eps / (xp.sqrt(-2 * log_delta) + xp.sqrt(2 * eps - 2 * log_delta))
    candidates = xp.maximum(eps / mu**2 - 0.5, 0.2) * xp.exp(xp.linspace(-1.5, 1.2, _POINTS))
    height = _log_integrand(candidates, spectrum.rough(candidates, cut, size), eps)
    small = height <= log_delta - 1
    c = candidates[xp.where(xp.any(small), xp.argmax(small), xp.argmin(height))]
    return Plan(c, (5 - log_delta) / c, xp.zeros(()), cut, Sides(*[xp.zeros(1)] * 4))


def _above(candidates: jax.Array, k: jax.Array, eps: jax.Array) -> jax.Array:
    """The saddle point, that is, the candidate with the least integrand, and six abscissae right of it."""
    return candidates[xp.argmin(_log_integrand(candidates, k, eps))] * xp.array([1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0])


def _below(spectrum: Spectrum, above: jax.Array, cut: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Abscissae c'' around the saddle point for the bound of the swapped pair, and upper bounds of K(-1 - c'')."""
    below = above[0] * xp.geomspace(0.01, 10.0, 9)
    return below, spectrum.real_swapped(below, cut, size)


def _choose(
    candidates, k, eps, log_delta, sides: Sides, masses: Masses | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(c, period, log_height) of the candidate abscissa that allows the largest step without much cancellation."""
    height = _log_integrand(candidates, k, eps)
    cancels = ~(height <= xp.min(height) + _CANCELLATION)
    periods = xp.vmap(lambda c: _shortest_period(c, eps, log_delta, sides, masses))(candidates)
    best = xp.argmin(xp.where(cancels, xp.inf, xp.log(periods) + _CANCELLATION_COST * height))
    return candidates[best], periods[best], height[best] - log_delta


class Aliases(NamedTuple):
    """The parts of the alias terms that do not depend on eps; M excludes the masses at infinity."""

    above: jax.Array  # abscissae c'
    right: jax.Array  # logs of the bounds of the right alias, but for the factor e^{-c' eps}
    below: jax.Array  # 1 + c'' for the abscissae -1 - c'' left of the contour
    left: jax.Array  # logs of the bounds of the left remainder, but for the factor e^{(1 + c'') eps}
    log_first: jax.Array  # log of an upper bound of M(0)/(e^{c p} - 1)
    log_second: jax.Array  # log of an upper bound of M(-1)/(e^{(c+1) p} - 1)
    kept: jax.Array  # factor that turns either upper bound into a lower bound
    off: jax.Array  # relative error of both, besides


def alias_terms(plan: Plan, log_masses: jax.Array, log_kept: jax.Array, off: jax.Array, mu2: jax.Array) -> Aliases:
    """The `Aliases` for upper bounds of log M(0), log M(-1) and log(lower/upper bound); mu2: s^2 of the smoothing."""
    c, p, (above, k_above, below, k_below) = plan.c, plan.period, plan.sides
    k_above, k_below = k_above + 0.5 * mu2 * above * (above + 1), k_below + 0.5 * mu2 * below * (below + 1)
    gap = above - c
    right = k_above + 1e-15 * xp.abs(k_above) + conversion(above)
    return Aliases(
        above,
        xp.where(gap > 0, right - log_expm1(xp.where(gap > 0, gap * p, 1e-9)), xp.inf),
        1 + below,
        k_below + 1e-15 * xp.abs(k_below) + conversion(below) - log_expm1((1 + below + c) * p),
        log_masses[0] - log_expm1(c * p),
        log_masses[1] - log_expm1((c + 1) * p),
        xp.exp(log_kept),
        off,
    )


def log_alias(known: Aliases, eps: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logs of certified bounds: of the remainder of the left alias after subtraction, and of the right alias.

    They hold for every number within ``shift`` of eps. Proof: notebooks/proofs/contour_certificate.md, section 2.
    """
    away, toward = known.above * (eps - shift), known.below * (eps + shift)
    right = xp.min(known.right - away + 1e-15 * xp.abs(away))
    # left: e^x delta_QP(-x) <= M(-1-c'') e^{(1 + c'') x} c''^c''/(c''+1)^(c''+1), summed over x = eps - j period
    return xp.min(known.left + toward + 1e-15 * xp.abs(toward)), right


def _shortest_period(c, eps, log_delta, sides: Sides, masses: Masses | None) -> jax.Array:
    """The least period at which both alias terms meet the target; e^x - 1 >= e^y if and only if x >= softplus(y)."""
    aim, (above, k_above, below, k_below) = log_delta + _ALIAS_TARGET, sides
    gap = above - c
    right = xp.softplus(k_above - above * eps + conversion(above) - aim) / xp.where(gap > 0, gap, 1.0)
    right = xp.min(xp.where(gap > 0, right, xp.inf))
    left = xp.softplus(k_below + (1 + below) * eps + conversion(below) - aim) / (1 + below + c)
    # two other bounds of the left alias: delta_QP <= M(-1) after subtraction, delta <= M(0) without
    m0, m1 = (0.0, 0.0) if masses is None else masses.upper
    left = xp.minimum(xp.min(left), xp.softplus(eps + m1 - aim) / (1 + c))
    if masses is not None:  # the subtracted M(0) is uncertain by this share of it
        unknown = xp.log(1e-13 - xp.expm1(xp.minimum(masses.share[0], 0.0)))
        left = xp.maximum(left, xp.softplus(m0 + unknown - aim) / c)
    left = xp.minimum(left, xp.softplus(m0 - aim) / c)
    return xp.clip(xp.maximum(right, left), xp.exp(-6.0) / c, xp.exp(14.0) / c)
