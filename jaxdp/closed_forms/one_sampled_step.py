"""One step of the sampled Gaussian: delta and epsilon from the Gaussian's privacy profile, without cancellation.

q is the sampling rate, mu = 1/sigma, delta_G the Gaussian's privacy profile. All terms for remove and add are positive:

    remove  delta(eps) = q delta_G(log(1 + (e^eps - 1)/q)),            1 - e^eps where e^eps <= 1 - q
    add     delta(eps) = (1 - e^-g) delta_G(-log((1-q)(e^g - 1)/q)),   g = -log(1-q) - eps,   0 where g <= 0.
    replace delta(eps) = q Phi(mu - u) - e^eps q Phi(-mu - u) - (1-q)(e^eps - 1) Phi(-u), maximal over u, eps >= 0.
            At the maximum A(u) = e^eps A(-u), A(u) = 1 - q + q e^{u mu - mu^2/2}: a quadratic equation for e^{u mu}.

In the add direction g is a difference, inaccurate near the supremum -log(1-q) of the privacy loss. delta increases with
g, so g is moved outward by its error bound.
"""

import jax

from jaxdp.closed_forms import gaussian
from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, of_delta, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_complement, log_expm1, log_normal_tail
from jaxdp.runtime.arrays import xp

_SLACK = 1e-13  # relative, for the rounding of delta
_LOG_4 = 1.3862943611198906
_LARGE = 30.0  # epsilon beyond which the remove direction uses the formula for large epsilon
_CERTAIN = -200.0  # delta >= 1 - e^-200 there: for a smaller epsilon the upper bound is 1


def delta_bounds(mu: jax.Array, q: jax.Array, eps: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta of one step at eps, 0 < q < 1, mu > 0, in any direction (replace: eps >= 0)."""
    return _delta_and_steepness(mu, q, eps, direction)[:2]


_Delta = tuple[jax.Array, jax.Array, jax.Array]  # (lower bound, upper bound, -d delta/d eps)


def _delta_and_steepness(mu: jax.Array, q: jax.Array, eps: jax.Array, direction: str) -> _Delta:
    lower, upper, steep = {"forward": _forward, "reverse": _reverse, "replace": _replace}[direction](mu, q, eps)
    trivial = xp.maximum(-xp.expm1(xp.minimum(eps, 0.0)), 0.0)
    lower = xp.maximum(lower * (1 - _SLACK), trivial * (1 - _SLACK))
    upper = xp.where(eps < _CERTAIN, 1.0, xp.minimum(upper * (1 + _SLACK), 1.0))
    return xp.where(xp.isnan(lower), 0.0, lower), xp.where(xp.isnan(upper), 1.0, upper), steep


def _forward(mu: jax.Array, q: jax.Array, eps: jax.Array) -> _Delta:
    large = eps > _LARGE
    ratio = xp.expm1(xp.where(large, 0.0, eps)) / q
    trivial_only = ratio <= -1 + 1e-12
    near = xp.log1p(xp.where(trivial_only, 0.0, ratio))
    # log(1 + (e^eps - 1)/q) = eps - log q + log(1 - (1-q) e^-eps)
    far = eps - xp.log(q) + xp.log1p(-(1 - q) * xp.exp(-xp.where(large, eps, _LARGE)))
    inner = xp.where(large, far, near)
    # Bound of the error of `inner`; that of `ratio` counts 1/(1 + ratio) = e^-inner times. XLA's log1p is wrong by 241
    # ULP near -0.414.
    shift = 1e-15 * (1 + xp.abs(inner)) + 4e-16 / xp.maximum(xp.exp(xp.minimum(inner, 0.0)), 1e-300)
    shift = shift + xp.where(ratio < -0.25, 3e-14, 0.0)
    trivial = xp.maximum(-xp.expm1(xp.minimum(eps, 0.0)), 0.0)
    lower, upper = q * gaussian.delta_bounds(mu, inner + shift)[0], q * gaussian.delta_bounds(mu, inner - shift)[1]
    # trivial_only: delta = q delta_G(x) <= q (1 - e^x) + q e^x, e^x = 1 + ratio <= 1e-12; below -1 exactly 1 - e^eps.
    excess = xp.where(ratio > -1 - 1e-14, 1.2e-12 * q, 0.0)
    upper = xp.where(ratio < xp.inf, upper, q)  # ratio overflows for a rate below 1e-295
    steep = xp.exp(xp.minimum(eps, 700.0)) * xp.ndtr(-inner / mu - mu / 2)
    return xp.where(trivial_only, trivial, lower), xp.where(trivial_only, trivial + excess, upper) + SMALLEST, steep


def _reverse(mu: jax.Array, q: jax.Array, eps: jax.Array) -> _Delta:
    log_rest, log_q = log_complement(q, 1 - q), xp.log(q)
    gap = -log_rest - xp.maximum(eps, _CERTAIN)
    gap_error = 8 * ULP * (xp.abs(log_rest) + xp.abs(eps))

    def at(g: jax.Array, sign: float) -> _Delta:
        log_grown = log_expm1(g)
        inner = log_q - log_rest - log_grown
        shift = 1e-15 * (2 + xp.abs(log_q) + xp.abs(log_rest) + xp.abs(log_grown))
        lower, upper = gaussian.delta_bounds(mu, inner + sign * shift)
        steep = xp.exp(-g) * upper + xp.exp(xp.minimum(inner, 700.0)) * xp.ndtr(-inner / mu - mu / 2)
        return -xp.expm1(-g) * lower, -xp.expm1(-g) * upper, steep

    (lower, _, _), (_, upper, steep) = at(gap - gap_error, 1.0), at(gap + gap_error, -1.0)
    lower = xp.where((gap - gap_error > 1e-300) & (eps >= _CERTAIN), lower, 0.0)
    return lower, xp.where(gap + gap_error > 0, upper + SMALLEST, 0.0), steep


def _replace(mu: jax.Array, q: jax.Array, eps: jax.Array) -> _Delta:
    eps = xp.maximum(eps, 0.0)
    log_q, log_rest = xp.log(q), log_complement(q, 1 - q)
    log_m = log_q - mu * mu / 2
    log_half = log_rest + xp.where(eps > 0, log_expm1(xp.where(eps > 0, eps, 1.0)), -xp.inf)
    root = 0.5 * xp.logaddexp(2 * log_half, _LOG_4 + 2 * log_m + eps)
    u = (xp.logaddexp(log_half, root) - _LOG_4 / 2 - log_m) / mu
    tails = xp.vmap(log_normal_tail)(xp.stack([u - mu, u + mu, u]))
    logs = tails + xp.stack([log_q, eps + log_q, log_half])
    terms = xp.exp(logs)
    # The sum is stationary in u, so the error of u counts squared. Each term has the rounding of its exponent.
    sizes = 32 + eps + xp.abs(log_q) + xp.abs(log_rest) + mu * mu + xp.abs(xp.where(eps > 0, log_half, 0.0))
    u_error = 8 * ULP * (sizes / mu + xp.abs(u))
    rounded = 8 * ULP * (sizes + xp.max(xp.where(terms > 0, xp.abs(tails), 0.0)) + (xp.abs(u) + mu) ** 2)
    error = xp.sum(terms) * (rounded + (u_error * (1 + xp.abs(u) + mu)) ** 2)
    value = terms[0] - terms[1] - terms[2]
    # 2 * SMALLEST: two terms may have underflowed. If u is not accurate: delta(eps) <= delta(0) = q (2 Phi(mu) - 1).
    sound = u_error * (1 + xp.abs(u) + mu) < 0.1
    upper = xp.where(sound, value + error + SMALLEST, q * xp.minimum(0.798 * mu, 1.0) + SMALLEST)
    return xp.maximum(value - error - 2 * SMALLEST, 0.0), upper, terms[1] + xp.exp(eps + log_rest + tails[2])


def epsilon_bounds(mu: jax.Array, q: jax.Array, delta: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 of one step at 0 < delta < 1."""
    top = -log_complement(q, 1 - q) * (1 + 2e-15) if direction == "reverse" else xp.asarray(xp.inf)
    _, unsampled = gaussian.epsilon_bounds(2 * mu if direction == "replace" else mu, xp.minimum(delta, 0.5))
    high = xp.minimum(unsampled + 1e-12, top)  # sampling never increases epsilon
    high = xp.where(xp.isfinite(high), high, 0.0)

    target = xp.log(delta)

    def evaluate(eps: jax.Array) -> Evaluation:
        return of_delta(*_delta_and_steepness(mu, q, eps, direction))

    # Between `near` and the largest loss of the reverse direction a search cannot separate points.
    near = high * (1 - 1e-13)
    at_ends = xp.vmap(lambda eps: delta_bounds(mu, q, eps, direction))(xp.stack([xp.zeros_like(high), near]))
    is_zero, at_high = at_ends[1][0] <= delta, at_ends[0][1] >= delta
    wanted = ~is_zero & ~at_high
    lower, upper, _ = proved_ends(evaluate, target, 0.5 * high, high, wanted=wanted, close=1e-13, anywhere=True)
    upper = xp.where(xp.isfinite(unsampled), upper, top)
    return xp.where(at_high & ~is_zero, near, lower), xp.where(is_zero, 0.0, upper)
