"""Public constants of a training problem: Lipschitz constants of its gradient steps and of its losses."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, POSITIVE
from jaxdp.runtime.formulas import Rule, checked, theorem
from jaxdp.typing import Array, Real

_UP = 1.0 + 2.0**-50


class LossConstants(NamedTuple):
    """Constants of the loss of one example.

    lipschitz: bound of the gradient norm of the data part (without the penalty).
    smoothness: beta, Lipschitz constant of the gradient.
    strong_convexity: rho in [0, beta].

    >>> constants = jaxdp.iteration.logistic_regression(feature_norm=2.0, l2=0.1)
    >>> print(constants.smoothness)
    1.1
    """

    lipschitz: Array
    smoothness: Array
    strong_convexity: Array


CONVEXITY = Rule(
    "strong_convexity",
    lambda smoothness, strong_convexity, **_: strong_convexity <= smoothness,
    "at most the smoothness",
)
_LARGER = "Larger steps are not contractions."
STEP = Rule(
    "step_size",
    lambda step_size, smoothness, **_: step_size <= 2 / smoothness * (1 + 1e-15),
    "at most 2 / smoothness",
    _LARGER,
)
PUBLISHED_STEP = Rule(
    "step_size",
    lambda step_size, smoothness, strong_convexity, **_: step_size <= 2 / (smoothness + strong_convexity) * (1 + 1e-15),
    "at most 2 / (smoothness + strong_convexity)",
    _LARGER,
)
_ARGUMENTS = {"step_size": POSITIVE, "smoothness": POSITIVE, "strong_convexity": NONNEGATIVE}


def contraction(step_size: Real, smoothness: Real, strong_convexity: Real = 0.0, *, published: bool = False) -> Array:
    """Lipschitz constant kappa of the gradient step w -> w - eta grad f(w).

    The sharp constant is max(|1 - eta rho|, |1 - eta beta|), for eta <= 2 / beta. With published=True it is
    sqrt(1 - 2 eta beta rho / (beta + rho)), for eta <= 2 / (beta + rho): equal at 2 / (beta + rho), larger elsewhere.

    step_size: eta > 0.
    smoothness: beta > 0, Lipschitz constant of grad f on the whole space.
    strong_convexity: rho in [0, beta]; 0 for a convex f.
    published: which of the two constants.

    >>> print(f"{jaxdp.iteration.contraction(step_size=0.5, smoothness=1.0, strong_convexity=0.1):.4f}")
    0.9500

    Returns kappa >= 0 of the broadcast shape, float64, rounded up (by 4 ulp; the published one by 2^-51 under the
    root); exactly 1 for rho = 0. Under a trace an invalid argument gives inf. Raises ValueError, also for rho > beta,
    or eta beyond the range of the theorem.
    Assumes: f is beta-smooth and rho-strongly convex everywhere, not only near the optimum.
    Reference: Published constant: that of Balle, Barthe, Gaboardi, Geumlek 2019, Theorem 5.
    """
    return (_published if published else _contraction)(step_size, smoothness, strong_convexity)


def _sharp(step_size, smoothness, strong_convexity):
    # 1 - 0 is exact: a convex loss has kappa = 1, without the charge for rounding
    flat = (strong_convexity == 0) & (step_size * smoothness <= 2)
    steepest = jnp.maximum(jnp.abs(1 - step_size * strong_convexity), jnp.abs(1 - step_size * smoothness))
    return jnp.where(flat, 1.0, steepest * _UP)


_contraction = theorem(CONVEXITY, STEP, **_ARGUMENTS)(_sharp)


@theorem(CONVEXITY, PUBLISHED_STEP, **_ARGUMENTS)
def _published(step_size, smoothness, strong_convexity):
    total = smoothness + strong_convexity
    # charged is the rounding of the difference, of size 1; the root enlarges it where the difference is small
    square = jnp.maximum(1 - 2 * step_size * smoothness * strong_convexity / total, 0.0) + 2.0**-51
    sharp = _sharp(step_size, smoothness, strong_convexity)
    return jnp.where(strong_convexity == 0, sharp, jnp.maximum(jnp.sqrt(square) * _UP, sharp))


def logistic_regression(feature_norm: Real, l2: Real = 0.0) -> LossConstants:
    """Constants of L2-regularised logistic regression: Lipschitz B, smoothness B^2 / 4 + l2, strong convexity l2.

    The loss of one example is log(1 + exp(-y <w, x>)) + l2 |w|^2 / 2 with y in {-1, 1}. The Lipschitz constant is that
    of the data part: the penalty is the same in both runs, and counts in the contraction only.

    feature_norm: B > 0 with |x| <= B for every example.
    l2: weight of the penalty, >= 0.

    >>> print(*jaxdp.iteration.logistic_regression(feature_norm=1.0, l2=0.1))
    1.0 0.35 0.1

    Assumes: the bias column counts in B and is penalised too (otherwise the strong convexity is 0). Features are scaled
    by public constants only.

    Returns LossConstants of the broadcast shape, float64. Raises ValueError. Traced, it gives constants (inf, inf, 0).
    """
    bound, penalty = _norm_and_penalty(feature_norm, l2)
    return LossConstants(bound, bound**2 / 4 + penalty, penalty)


def softmax_regression(feature_norm: Real, l2: Real = 0.0) -> LossConstants:
    """Constants of L2-regularised softmax regression: Lipschitz sqrt(2) B, smoothness B^2/2 + l2, strong convexity l2.

    They hold for any number of classes: |p - e_y| <= sqrt(2) and diag(p) - p p' <= 1/2 for all probability vectors p.

    feature_norm: B > 0 with |x| <= B for every example.
    l2: weight of the penalty l2 |W|^2 / 2, >= 0.

    >>> print("{:.4f} {:.2f} {:.2f}".format(*jaxdp.iteration.softmax_regression(feature_norm=1.0, l2=0.1)))
    1.4142 0.60 0.10

    Assumes: as `logistic_regression`, and gradients are not clipped: clipping may make the softmax step expand.

    Returns LossConstants of the broadcast shape, float64; the Lipschitz constant is rounded up. Raises ValueError.
    Traced, it gives constants (inf, inf, 0).
    """
    bound, penalty = _norm_and_penalty(feature_norm, l2)
    return LossConstants(2**0.5 * bound * _UP, bound**2 / 2 + penalty, penalty)


def _norm_and_penalty(feature_norm: Real, l2: Real) -> tuple[Array, Array]:
    bound, penalty = checked(feature_norm=(POSITIVE, feature_norm), l2=(NONNEGATIVE, l2))
    if validate.is_traced(bound, penalty):
        inside = (bound > 0) & (penalty >= 0)
        return jnp.where(inside, bound, jnp.inf), jnp.where(inside, penalty, 0.0)
    bound, penalty = np.broadcast_arrays(bound, penalty)
    return bound[()], penalty[()]
