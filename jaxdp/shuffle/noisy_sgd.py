"""Epsilon of one pass of noisy SGD in random order (Feldman, McMillan, Talwar 2021, Proposition 5.3)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxdp import validate
from jaxdp.closed_forms import gaussian
from jaxdp.domains import OPEN_UNIT, POSITIVE, whole
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import batched
from jaxdp.runtime.precision import kernel, patience
from jaxdp.shuffle.approximate import additive_term, alone, best_epsilon
from jaxdp.shuffle.bounds import clones_bounds
from jaxdp.typing import Array, Real

_SPLITS = 24  # local pairs (eps0, delta0) that are tried
_MU_ERROR = 2.0**-51  # relative error of mu
_LEAST_MU = 1e-300


@kernel(working_set=64, by_numpy=patience(64, 4096), at_once=512)
def _splits(mu, num_users, delta):
    """(eps0 and delta0 to try, epsilon of the Gaussian at delta).

    delta0 is the Gaussian delta at eps0; n delta0 runs from above delta to far below delta.
    """
    least = xp.sqrt(2.0 * xp.log(2.0 / delta)) * 0.8
    most = xp.sqrt(2.0 * xp.log(1e4 * num_users / delta)) + 1.0
    quantiles = xp.linspace(least, most, _SPLITS)
    eps0 = mu * quantiles + 0.5 * mu * mu
    delta0 = xp.vmap(lambda e: gaussian.delta_bounds(mu, e, _MU_ERROR)[1])(eps0)
    return eps0, delta0, gaussian.epsilon_bounds(mu, delta, _MU_ERROR)[1]


def noisy_sgd_one_pass_epsilon(
    noise_std: Real, n: Real, delta: Real, *, lipschitz: Real = 1.0, bound: Literal["clones", "stronger"] = "clones"
) -> Array:
    """Epsilon at delta of one pass of noisy SGD over n examples in a uniformly random order.

    Each step releases the gradient of one example, of norm at most lipschitz, plus N(0, noise_std^2 I). This is a
    Gaussian local randomizer with mu = 2 lipschitz/noise_std. For every eps0 there is a delta0 for which it is
    (eps0, delta0)-DP. The result is the smallest certified epsilon over 24 pairs (eps0, delta0), at most that of the
    Gaussian alone: each example is used once.

    Args:
        noise_std: standard deviation of the noise of one coordinate, > 0, in the units of the gradient.
        n: number of examples, a whole number >= 1.
        delta: in (0, 1).
        lipschitz: bound > 0 of the gradient's norm, in the units of the gradient.
        bound: "clones" or "stronger": the dominating pair of the shuffled reports.

    Returns:
        Upper bound of epsilon in nats, float64, of the broadcast shape.

    Raises:
        ValueError: an argument outside its range, shapes that do not broadcast.

    Assumes:
        The order is uniformly random and secret. All iterates may be released. Neighbours replace one example.

    Reference:
        Feldman, McMillan, Talwar 2021, Proposition 5.3, from Theorem 3.8 with the "sharp" additive term of
        `approximate_ldp`.

    Example:
        >>> from jaxdp import shuffle
        >>> print(f"{shuffle.noisy_sgd_one_pass_epsilon(8.0, 100, 1e-5):.3f}")
        0.817

    """
    validate.choice("bound", bound, ("clones", "stronger"))
    arguments = validate.all_inside(
        noise_std=(POSITIVE, noise_std), lipschitz=(POSITIVE, lipschitz), n=(whole(1), n), delta=(OPEN_UNIT, delta)
    )

    def best(noise, scale, users, target):
        with np.errstate(over="ignore", under="ignore"):
            mu = np.maximum(scale / noise * 2.0, _LEAST_MU)
        eps0, delta0, unshuffled = _splits(mu, users, target)
        every = np.broadcast_arrays(users[:, None], eps0, delta0, target[:, None])
        n, local, extra, aim = (array.reshape(-1) for array in every)
        last_room, answers = np.zeros_like(aim), np.full_like(aim, np.inf)

        def central(_, room):
            changed = (room > 0) & (room != last_room)  # rows whose room did not change keep their answer
            if changed.any():
                last_room[changed] = room[changed]
                answers[changed] = clones_bounds("epsilon", local[changed], n[changed], room[changed], bound).upper
            return answers.copy()

        def lost(_, epsilon):
            return additive_term(n, local, extra, epsilon, bound)

        found = np.fmin(best_epsilon(central, lost, aim, 0.0), alone("epsilon", local, extra, aim))
        return np.fmin(found.reshape(eps0.shape).min(axis=1), unshuffled)

    return batched(best, *arguments)
