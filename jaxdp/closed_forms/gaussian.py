"""delta and epsilon of a Gaussian-DP mechanism, certified from both sides.

delta(eps) = Phi_c(x1) - e^eps Phi_c(x2) with x1 = eps/mu - mu/2, x2 = eps/mu + mu/2. It is computed as
density(x1) [Mills(x1) - Mills(x2)], which keeps its digits down to 1e-300; the difference of two tails loses them.
d delta/d eps = -e^eps Phi_c(x2), d delta/d mu = density(x1).
"""

import jax

from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import LOG_SQRT_2PI, log_normal_tail, mills
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Number


def log_delta(mu: jax.Array, eps: jax.Array, mu_error: float = 0.0) -> tuple[jax.Array, ...]:
    """(log delta, its slope in eps, bound of delta's relative error, factor) for 0 < mu < inf and finite eps.

    factor: upper bound of (relative error of delta)/(relative error of mu), for small errors of mu.

    The error has four parts: a few ULP of the functions; the rounding of x1 times the hazard rate; the relative error
    ``mu_error`` of mu times ``factor``; the cancellation of the two Mills ratios, which grows like 1/mu.
    """
    scale = xp.abs(eps) / mu + mu / 2
    x1, x2 = eps / mu - mu / 2, eps / mu + mu / 2
    far = x1 < -5
    y1, y2 = xp.where(far, 0.0, x1), xp.where(far, 1.0, x2)
    m1, m2 = mills(y1), mills(y2)
    gap = xp.maximum(m1 - m2, SMALLEST)
    near_value = -0.5 * y1 * y1 - LOG_SQRT_2PI + xp.log(gap)
    # Left of 0 Mills(x) is nearly sqrt(2 pi) e^{x^2/2}, which multiplies the relative rounding of x by x^2.
    near_error = (8 + 4 * xp.minimum(y1, 0.0) ** 2) * (m1 + m2) / gap
    z1, z2 = xp.where(far, x1, -6.0), xp.where(far, x2, 0.0)
    log_second = eps + log_normal_tail(z2)
    gap_far = -xp.expm1(xp.minimum(log_second, 0.0)) - xp.ndtr(z1)
    gap_far = xp.maximum(gap_far, SMALLEST)
    value = xp.where(far, xp.log(gap_far), near_value)
    # log(e^eps Phi_c(x2)). Outside the far branch it is computed as log(density(x1) Mills(x2)).
    log_minus_slope = xp.where(far, log_second, -0.5 * y1 * y1 - LOG_SQRT_2PI + xp.log(m2))
    cancel = xp.where(far, 8 / gap_far, near_error)
    hazard = xp.where(far, 1e-4, xp.maximum(x1, 0.0) + 1)  # far: density(-5) < 2e-6, delta > 0.2
    error = 2 * ULP * (16 + 4 * hazard * scale + cancel + 4 * xp.abs(xp.where(far, eps, 0.0)))
    # Near eps = 0 delta is about proportional to mu: a factor of at most 1, which the summand 2 covers.
    factor = 2 + 4 * hazard * scale
    return value, -xp.exp(log_minus_slope - value), error + mu_error * factor, factor


def delta_bounds(
    mu: jax.Array, eps: jax.Array, mu_error: float = 0.0, excess: Number = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta at eps (any sign, +-inf) for mu >= 0 (mu = inf: no privacy).

    mu_error: bound of mu's relative error, in both directions. excess: bound of a further relative error by which mu
    may only be too large; it widens the lower bound alone.
    """
    inside = (mu > 0) & xp.isfinite(mu) & xp.isfinite(eps)
    # If x1 is so large that its rounding matters, delta <= Phi_c(x1) <= exp(-x1^2/2) is the only upper bound.
    safe_mu, safe_eps = xp.where(inside, mu, 1.0), xp.where(inside, eps, 0.0)
    x1 = xp.maximum(safe_eps / safe_mu - safe_mu / 2, 0.0) * (1 - 1e-12)
    value, _, error, factor = log_delta(safe_mu, safe_eps, mu_error)
    below = error + excess * factor
    lower, upper = xp.exp(value) * xp.where(below < 0.5, 1 - below, 0.0), xp.exp(value) * (1 + error)
    trivial = xp.maximum(-xp.expm1(xp.where(eps < 0, eps, 0.0)), 0.0)
    # XLA flushes subnormal numbers to zero: an underflow is charged the smallest normal number.
    upper = xp.minimum(xp.maximum(upper + SMALLEST, trivial), 1.0)
    lower = xp.clip(lower, trivial * (1 - 8 * ULP), 1.0)
    known = xp.where(eps == xp.inf, xp.where(mu == xp.inf, 1.0, 0.0), xp.where(mu == 0, trivial * (1 + 4 * ULP), 1.0))
    good = ~(xp.isnan(mu) | xp.isnan(eps) | (mu < 0))
    least = xp.where((mu == xp.inf) & (excess == xp.inf), 0.0, xp.where(mu == 0, known * (1 - 8 * ULP), known))
    lower = xp.where(inside & (error < 1), lower, xp.where(good & ~inside, least, 0.0))
    upper = xp.where(inside & (error < 1), upper, xp.where(good & ~inside, known, 1.0))
    crude = xp.maximum(xp.exp(-0.5 * x1 * x1) + SMALLEST, trivial)
    # delta(eps) <= 1 - e^eps + TV, TV <= mu / sqrt(2 pi): the bound for mu below 1e-15, where the Mills ratios cancel.
    small = trivial * (1 + 8 * ULP) + 0.39895 * safe_mu * (1 + 4 * mu_error) + SMALLEST
    crude = xp.minimum(crude, small)
    return lower, xp.where(inside, xp.minimum(upper, crude), upper)


def epsilon_bounds(
    mu: jax.Array, delta: jax.Array, mu_error: float = 0.0, excess: Number = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 at delta in [0, 1]; delta = 0 gives inf unless mu = 0.

    mu_error, excess: as for `delta_bounds`; excess widens only the lower bound.
    """
    inside = (mu > 0) & xp.isfinite(mu) & (delta > 0) & (delta < 1)
    m, d = xp.where(inside, mu, 1.0), xp.where(inside, delta, 0.5)
    target = xp.log(d)
    # delta(eps) <= Phi_c(x1) <= exp(-x1^2/2): at x1 = sqrt(2 log(1/delta)) epsilon is an upper end. The 1e-3 is for
    # rounding, and for delta close to 1, where x1 is close to 0.
    high = m * (m / 2 + xp.sqrt(-2 * target) + 1e-3) * (1 + 1e-12)
    start = xp.maximum(high - m * 0.5, 0.5 * high)

    def evaluate(eps: jax.Array) -> Evaluation:
        value, slope, error, factor = log_delta(m, eps, mu_error)
        below = 2 * (error + excess * factor)
        return Evaluation(value + 2 * error, xp.where(below < 0.5, value - below, -xp.inf), value, slope)

    is_zero = delta_bounds(m, xp.zeros_like(m), mu_error)[1] <= d
    lower, upper, _ = proved_ends(evaluate, target, start, high, wanted=inside & ~is_zero, close=1e-13, anywhere=True)
    upper = xp.where(is_zero, 0.0, upper)
    known = xp.where((mu == 0) | (delta >= 1), 0.0, xp.inf)
    good = ~(xp.isnan(mu) | xp.isnan(delta) | (mu < 0) | (delta < 0))
    surely = good & ~((mu == xp.inf) & (excess == xp.inf))
    lower = xp.where(inside, lower, xp.where(surely, known, 0.0))
    upper = xp.where(inside, upper, xp.where(good, known, xp.inf))
    return lower, upper


@jax.custom_jvp
def smooth_delta(mu: jax.Array, eps: jax.Array) -> jax.Array:
    """log delta as a differentiable function of mu and eps; the implicit function theorem for epsilon uses it."""
    return log_delta(mu, eps)[0]


@smooth_delta.defjvp
def _smooth_delta_jvp(primals, tangents):
    mu, eps = primals
    value, slope, *_ = log_delta(mu, eps)
    by_mu = xp.exp(-0.5 * (eps / mu - mu / 2) ** 2 - LOG_SQRT_2PI - value)
    return value, by_mu * tangents[0] + slope * tangents[1]
