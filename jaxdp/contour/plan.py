"""Where to put the contour: abscissa, step, cut; and the Chernoff and alias bounds that hold for any such choice.

A poor choice gives wide bounds, never wrong ones. Certified are `Plan.rdp_epsilon`, `Plan.log_chernoff`, `log_alias`.
"""

from typing import Any, NamedTuple

import jax

from jaxdp.contour.spectrum import Spectrum
from jaxdp.numerics.special import log_expm1
from jaxdp.runtime.arrays import xp

_SMALL = (1e-2, 1.0, 0.505)  # orders from which the variance of the loss is estimated
_POINTS = 10  # abscissae in a row
_TWO_ROWS = (2, _POINTS)
_ZOOMS = 3
_SHARPENED = 5  # how often the cut is fitted to the estimate of delta
# Ranges of log c: for the saddle point, around the abscissa of the least Chernoff bound (for delta near 1); for the
# contour, around the saddle point.
_FAR = (-2.5, 5.0)
_NEAR = (-0.7, 0.3)
_CANCELLATION = 3.0  # nats by which the integrand may exceed its smallest peak
_CANCELLATION_COST = 0.25  # weight that trades one nat of cancellation against log(period)
_CUT_NATS = 60.0
_ALIAS_TARGET = -27.0  # log of the alias error aimed at, relative to delta


class Plan(NamedTuple):
    """Contour abscissa c, period 2 pi / h of the alias, and the Chernoff data the certificate reuses."""

    c: jax.Array
    period: jax.Array
    cut: jax.Array
    rdp_epsilon: jax.Array  # certified upper bound of epsilon (epsilon plans)
    log_chernoff: jax.Array  # certified upper bound of log delta without masses (delta plans)
    above: jax.Array  # abscissae > c
    k_above: jax.Array
    below: jax.Array  # c'' > 0 standing for -1 - c''
    k_below: jax.Array


class Masses(NamedTuple):
    """log M(0) and log M(-1) of a part of a law: upper bounds, and the logarithms of the shares that are certain."""

    upper: jax.Array
    share: jax.Array


def conversion(c: jax.Array) -> jax.Array:
    """c log c - (c+1) log(c+1): the constant of Canonne, Kamath, Steinke 2020, Proposition 12.

    As -c log(1 + 1/c) - log(1 + c): the two products, each of size c log c, would cancel.
    """
    large = c > 1.0
    far = c * xp.log1p(1 / xp.where(large, c, 1.0))
    near = c * (xp.log1p(c) - xp.log(xp.maximum(c, 1e-300)))
    return -xp.where(large, far, near) - xp.log1p(c)


def log_chernoff(c: jax.Array, k: jax.Array, eps: jax.Array) -> jax.Array:
    """Upper bound of log delta(eps) from an upper bound k of K(c)."""
    constant, away = conversion(c), c * eps
    return k - away + constant + 1e-14 * (xp.abs(k) + xp.abs(away) + xp.abs(constant))


def _scale(infinity: jax.Array, k: jax.Array) -> jax.Array:
    """Size of the loss's variance, from K at the orders of ``_SMALL`` (the smaller wins past a phase transition).

    With mass at infinity K(0) < 0, and only the bend of K tells the variance.
    """
    c = xp.array(_SMALL)
    plain = xp.min(2 * k[:2] / (c[:2] * (c[:2] + 1)))
    bend = (k[1] - 2 * k[2] + k[0]) / 0.495**2
    return xp.clip(xp.where(infinity > 0, bend, plain), 1e-24, 1e24)


def _widest(spectrum: Spectrum) -> float:
    """Largest log c, relative to the Gaussian guess, at which an abscissa is sought: large for a bounded loss."""
    return 26.0 if spectrum.direction == "reverse" else 4.0


def tail_cut(spectrum: Spectrum, log_delta: jax.Array) -> jax.Array:
    """The outcome u beyond which a step's mass is charged like mass at infinity: e^-60 of delta over all steps.

    The charge could be larger; but the integrand has to be negligible at the cut, at every abscissa in use.
    """
    mu = xp.zeros(())
    for part in spectrum.sampled:
        mu = xp.maximum(mu, xp.max(part.mu))
    return xp.sqrt(2 * (xp.maximum(-log_delta, 0.0) + xp.log(spectrum.step_count()) + _CUT_NATS)) + mu


def _between(ends: jax.Array, points: int) -> jax.Array:
    """Equally spaced points in a row for each column of (low, high)."""
    return ends[0][:, None] + (ends[1] - ends[0])[:, None] * xp.linspace(0.0, 1.0, points)


def _one_row(ends: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """shape[0] x shape[1] equally spaced points between the two ends."""
    return xp.linspace(ends[0], ends[1], shape[0] * shape[1]).reshape(shape)


def _near_least(x: jax.Array, k: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least Chernoff bound in the first row of k = K(e^x), and the points beside it and beside the saddle point."""
    c = xp.exp(x)
    bound = log_chernoff(c[0], k[0], eps)
    return xp.min(bound), _beside_least(x, xp.stack([bound, _saddle(c[1], k[1], eps)]))


def _following(ends: jax.Array, saddle: jax.Array, zooming: jax.Array) -> jax.Array:
    """The next two rows: between the ends; at last both rows around the saddle point."""
    return xp.where(zooming, _between(ends, _POINTS), _one_row(saddle + xp.array(_NEAR), _TWO_ROWS))


def _first_points(shape: tuple[int, int]) -> jax.Array:
    """Logarithms of ``_SMALL``; the rest of the table repeats the last of them."""
    return xp.log(xp.array([*_SMALL, *[_SMALL[-1]] * (shape[0] * shape[1] - len(_SMALL))])).reshape(shape)


def _beside_least(x: jax.Array, value: jax.Array) -> jax.Array:
    """The neighbours of each row's best point: (low ends, high ends)."""
    best = xp.argmin(value, axis=1)
    low, high = xp.maximum(best - 1, 0), xp.minimum(best + 1, x.shape[1] - 1)
    return xp.stack([xp.take_along_axis(x, at[:, None], 1)[:, 0] for at in (low, high)])


def _saddle(c: jax.Array, k: jax.Array, eps: jax.Array) -> jax.Array:
    """log of the integrand's modulus on the real axis."""
    return k - c * eps - xp.log(c) - xp.log1p(c)


# Each planning loop evaluates K at one place in the program, because K is most of what is compiled. The number of the
# round decides at which abscissae.
def plan_epsilon(spectrum: Spectrum, log_delta: jax.Array, size: int, ceiling: jax.Array) -> Plan:
    """Contour for solving delta(eps) = delta; rdp_epsilon is a certified bound from the real axis alone.

    ceiling: a known upper bound of eps. It moves the abscissa where it is far below the Chernoff bound's epsilon.

    Rounds: estimate the variance; zoom on the least Chernoff bound; find the saddle point, coarse and fine.
    """
    cut = tail_cut(spectrum, log_delta)
    shape = (1, _POINTS)
    # The Chernoff bound's epsilon is too large; near the supremum of the loss its saddle point lies much too far right.
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
        center = 0.5 * xp.log(2 * (1 - log_delta) / _scale(spectrum.infinity, k.ravel()))
        ends = xp.where(i == 0, center + xp.array([[-9.0], [_widest(spectrum)]]), near)
        bottom = x.ravel()[xp.argmin(_saddle(c, k, level_of(eps)))]
        row = xp.where(i == _ZOOMS, best[0] + far, bottom + xp.array(_NEAR))
        return xp.where(i < _ZOOMS, _between(ends, _POINTS), _one_row(row, shape)), x, k, best, eps

    nothing = xp.zeros(shape)
    start = _first_points(shape), nothing, nothing, xp.zeros(1), xp.zeros(())
    _, x, k, best, rough = xp.fori_loop(0, _ZOOMS + 3, one_round, start)
    candidates, least = xp.exp(x.ravel()), xp.exp(best)
    above = _above(candidates, k.ravel(), level_of(rough))
    k_above, k_least = xp.split(spectrum.real(xp.concatenate([above, least]), cut, size), [above.size])
    eps = rdp(least, k_least)[0]
    below = _below(spectrum, above, cut, size)
    plan = _finish(cut, level_of(eps), log_delta, candidates, k.ravel(), above, k_above, *below)
    return plan._replace(rdp_epsilon=eps)


def plan_delta(spectrum: Spectrum, eps: jax.Array, size: int, known: jax.Array) -> Plan:
    """Contour for delta at a given eps; log_chernoff is certified.

    known: logarithm of an upper bound of delta. Past a phase transition it is far below the Chernoff bound.

    Rounds: estimate the variance; zoom on the least Chernoff bound and, in a second row, on the saddle point, which is
    far right of it where delta is near 1; repeat with the cut that the bound asks for; search around the saddle point.
    """
    loose = tail_cut(spectrum, xp.asarray(-800.0))
    # The cut depends on delta and delta on the cut. Past a phase transition each repetition gains many digits.
    is_cut = bool(spectrum.discrete) or (bool(spectrum.sampled) and spectrum.direction != "reverse")
    last = _ZOOMS * (_SHARPENED if is_cut else 1)
    reach = xp.array([-9.0, _widest(spectrum)])

    def one_round(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _, _, cut, around, best = state
        k = spectrum.rough(xp.exp(x).ravel(), cut, size).reshape(x.shape)
        variance = _scale(spectrum.infinity, k.ravel())
        first = xp.log(xp.maximum(xp.abs(eps) / variance, 1 / xp.sqrt(variance)))
        # (where a few rare losses are large the saddle point lies far left of a Gaussian's)
        ends = xp.minimum(first + reach, xp.append(-xp.log1p(xp.maximum(eps, 0.0)), xp.inf))
        ends = xp.where(eps > 0, ends, first + reach)
        around = xp.where(i == 0, ends, around)
        least, near = _near_least(x, k, eps)
        best = xp.where(i > last, best, 0.5 * (near[0] + near[1]))
        again = i % _ZOOMS == 0
        cut = xp.where(again & (i > 0) & (i < last), tail_cut(spectrum, least), cut)
        return _following(xp.where(again, around[:, None], near), best[1], i < last), x, k, cut, around, best

    nothing = xp.zeros(_TWO_ROWS)
    start = _first_points(_TWO_ROWS), nothing, nothing, loose, reach, xp.zeros(2)
    _, x, k, cut, _, best = xp.fori_loop(0, last + 2, one_round, start)
    candidates, least = xp.exp(x.ravel()), xp.exp(best[:1])
    above = _above(candidates, k.ravel(), eps)
    k_above, k_least = xp.split(spectrum.real(xp.concatenate([above, least]), cut, size), [above.size])
    value = log_chernoff(least, k_least, eps)[0]
    guess = xp.where(xp.isfinite(value), xp.minimum(value, known), known)
    below = _below(spectrum, above, cut, size)
    plan = _finish(cut, eps, guess, candidates, k.ravel(), above, k_above, *below)
    return plan._replace(rdp_epsilon=eps, log_chernoff=value)


def plan_part(part: Any, eps: jax.Array, log_delta: jax.Array) -> tuple[Plan, Masses]:
    """Contour for the delta at eps of a part of a law, errors far below ``log_delta`` not counting; and its masses.

    part: a `jaxdp.contour.largest_loss.band.Band`, the outcomes whose largest loss lies in one band.

    Rounds: zoom on the least Chernoff bound and on the saddle point; search around the saddle point. The least Chernoff
    bound's abscissa is the last of ``above``.
    """

    def one_round(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _, _, best = state
        k = part.rough(xp.exp(x).ravel()).reshape(x.shape)
        _, near = _near_least(x, k, eps)
        best = xp.where(i > _ZOOMS, best, 0.5 * (near[0] + near[1]))
        return _following(near, best[1], i < _ZOOMS), x, k, best

    ends = xp.minimum(xp.array([[1e-6], [5000.0]]) / eps, part.largest * xp.array([[1e-3], [1.0]]))
    first = _between(xp.log(ends) + xp.zeros(2), _POINTS)
    _, x, k, best = xp.fori_loop(1, _ZOOMS + 2, one_round, (first, first, first, xp.zeros(2)))
    candidates = xp.exp(x.ravel())
    above = xp.append(_above(candidates, k.ravel(), eps), xp.exp(best[0]))
    k_above, masses = bounds_of(part, above)
    none = xp.zeros(1)
    plan = _finish(part.cut, eps, log_delta, candidates, k.ravel(), above, k_above, none, none + xp.inf, masses)
    return plan, masses


def bounds_of(part: Any, above: jax.Array) -> tuple[jax.Array, Masses]:
    """Upper bounds of K at the abscissae, and the masses."""
    low, high = part.real(xp.append(above, xp.array([0.0, -1.0])))
    return high[:-2], Masses(xp.minimum(high[-2:], 0.0), low[-2:] - high[-2:])


def plan_comparison(spectrum: Spectrum, eps: jax.Array, log_delta: jax.Array, size: int) -> Plan:
    """Contour for the question whether delta(eps), eps > 0, is at most a given one; without alias bounds.

    The abscissa is the leftmost of a row at which the integrand is as small as that already, else the saddle point.
    The row stands around the abscissa of the Gaussian mechanism with this epsilon at this delta. The alias left of eps
    is at most e^-5 of the given delta, because a delta is at most 1.
    """
    cut = tail_cut(spectrum, log_delta)
    mu = 2 * eps / (xp.sqrt(-2 * log_delta) + xp.sqrt(2 * eps - 2 * log_delta))
    candidates = xp.maximum(eps / mu**2 - 0.5, 0.2) * xp.exp(xp.linspace(-1.5, 1.2, _POINTS))
    height = _saddle(candidates, spectrum.rough(candidates, cut, size), eps)
    small = height <= log_delta - 1
    c = candidates[xp.where(xp.any(small), xp.argmax(small), xp.argmin(height))]
    none = xp.zeros(1)
    return Plan(c, (5 - log_delta) / c, cut, eps, log_delta, none, none, none, none)


def _above(candidates: jax.Array, k: jax.Array, eps: jax.Array) -> jax.Array:
    """The saddle point and some abscissae right of it."""
    return candidates[xp.argmin(_saddle(candidates, k, eps))] * xp.array([1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0])


def _below(spectrum: Spectrum, above: jax.Array, cut: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Abscissae c'' of the swapped pair's bound, around the saddle point, and K(-1 - c'') there."""
    below = above[0] * xp.geomspace(0.01, 10.0, 9)
    return below, spectrum.real_swapped(below, cut, size)


def _finish(cut, eps, log_delta, candidates, k_candidates, above, k_above, below, k_below, masses=None) -> Plan:
    """The plan with that abscissa near the saddle point which allows the largest step without much cancellation."""
    height = _saddle(candidates, k_candidates, eps)
    cancels = ~(height <= xp.min(height) + _CANCELLATION)

    def shortest(c: jax.Array) -> jax.Array:
        return _shortest_period(c, eps, log_delta, above, k_above, below, k_below, masses)

    periods = xp.vmap(shortest)(candidates)
    best = xp.argmin(xp.where(cancels, xp.inf, xp.log(periods) + _CANCELLATION_COST * height))
    never = xp.asarray(xp.inf)
    return Plan(candidates[best], periods[best], cut, never, never, above, k_above, below, k_below)


class AliasBound(NamedTuple):
    """The parts of `log_alias` that do not depend on eps; above, below: abscissae right and left of the contour."""

    above: jax.Array
    right: jax.Array
    below: jax.Array
    left: jax.Array


def alias_bound(plan: Plan, k_above: jax.Array, k_below: jax.Array) -> AliasBound:
    """The bound at a plan. k_above, k_below: the plan's values of K plus those of the smoothing."""
    c, period = plan.c, plan.period
    gap = plan.above - c
    right = k_above + 1e-15 * xp.abs(k_above) + conversion(plan.above)
    right = xp.where(gap > 0, right - log_expm1(xp.where(gap > 0, gap * period, 1e-9)), xp.inf)
    left = k_below + 1e-15 * xp.abs(k_below) + conversion(plan.below) - log_expm1((1 + plan.below + c) * period)
    return AliasBound(plan.above, right, 1 + plan.below, left)


def log_alias(bound: AliasBound, eps: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logs of the certified bounds of the alias terms left of eps (after subtraction) and right of it.

    They hold for every number within ``shift`` of eps.
    Proof: notebooks/proofs/contour_certificate.md, section 2.
    """
    away, toward = bound.above * (eps - shift), bound.below * (eps + shift)
    right = xp.min(bound.right - away + 1e-15 * xp.abs(away))
    # e^e delta_QP(-e) <= M(-1-c'') e^{c'' e + e} c''^c''/(c''+1)^(c''+1), summed over e = eps - j period
    return xp.min(bound.left + toward + 1e-15 * xp.abs(toward)), right


def _shortest_period(c, eps, log_delta, above, k_above, below, k_below, masses: Masses | None):
    """The least period at which the alias terms of both sides meet the target: e^x - 1 >= e^y is x >= softplus(y)."""
    aim = log_delta + _ALIAS_TARGET
    gap = above - c
    right = xp.softplus(k_above - above * eps + conversion(above) - aim) / xp.where(gap > 0, gap, 1.0)
    right = xp.min(xp.where(gap > 0, right, xp.inf))
    left = xp.softplus(k_below + (1 + below) * eps + conversion(below) - aim) / (1 + below + c)
    # delta_QP <= M(-1), and delta <= M(0)
    m0, m1 = (0.0, 0.0) if masses is None else masses.upper
    left = xp.minimum(xp.min(left), xp.softplus(eps + m1 - aim) / (1 + c))
    if masses is not None:  # what is subtracted is known but for a share
        unknown = xp.log(1e-13 - xp.expm1(xp.minimum(masses.share[0], 0.0)))
        left = xp.maximum(left, xp.softplus(m0 + unknown - aim) / c)
    left = xp.minimum(left, xp.softplus(m0 - aim) / c)
    return xp.clip(xp.maximum(right, left), xp.exp(-6.0) / c, xp.exp(14.0) / c)
