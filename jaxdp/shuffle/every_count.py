r"""E[(X_1 + ... + X_n)_+] for few users and any law, from all ways in which the n reports fall on the outcomes.

The users are split into two halves with sums S and S'. P(t) = P[S' > t] and Q(t) = E[S'; S' > t] are running sums over
the sorted values of S'. As E[(S + S')_+] = E[Q(-S) + S P(-S)], time grows with the number of ways of one half only.
Rounding: notebooks/proofs/shuffle.md, section 9.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.roots import Evaluation
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle.contour import evaluation
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import sum_at

MOST_WAYS, MOST_IN_ALL = 60_000, 100_000_000
"""Most ways of the larger half (with more ways nodes are cheaper); most counts in all rows (some seconds)."""
_UNDERFLOW = 1e-300  # upper bound of the sum of all terms that underflow


class Reports(NamedTuple):
    """Number of users, and indices of the outcomes with mass; the index after the last outcome stands for X = 0."""

    users: int
    places: tuple[int, ...]


def ways(users: int, outcomes: int) -> int:
    """Number of ways in which the reports of the larger half of the users fall on ``outcomes`` outcomes."""
    half = users - users // 2
    return math.comb(half + outcomes - 1, half)


@functools.lru_cache(maxsize=32)
def all_counts(users: int, outcomes: int) -> tuple[np.ndarray, np.ndarray]:
    """All counts of reports by outcome, (ways, outcomes), and for each way the log of the number of orders."""
    bars = itertools.combinations(range(users + outcomes - 1), outcomes - 1)
    size = math.comb(users + outcomes - 1, users)
    inner = np.fromiter(itertools.chain.from_iterable(bars), np.int64).reshape(size, outcomes - 1)
    edges = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, users + outcomes - 1)))
    counts = np.diff(edges, axis=1) - 1
    log_factorial = np.array([math.lgamma(k + 1.0) for k in range(users + 1)])
    return counts.astype(float), log_factorial[users] - log_factorial[counts].sum(axis=1)


def evaluate(law: Law, users: Any, epsilon: Any, of: Reports) -> Evaluation:
    """Bounds of log delta(epsilon); of: users and outcomes with mass, static because array sizes depend on them."""
    s = sum_at(law, users, epsilon)
    places = np.array(of.places)
    x, velocity = (xp.append(side, 0.0)[places] for side in (s.x, s.velocity))
    mass = xp.append(s.mass, s.rest)[places]
    log_mass = xp.log(xp.where(mass > 0, mass, NEXT_TO_ZERO))
    halves = [all_counts(of.users // 2, len(places)), all_counts(of.users - of.users // 2, len(places))]
    sizes = [counts.shape[0] for counts, _ in halves]
    chances = [xp.exp(log_orders + xp.exact_matmul(counts, log_mass)) for counts, log_orders in halves]
    velocities = [xp.exact_matmul(counts, velocity) for counts, _ in halves]

    def positive_part(sign: float) -> tuple[Any, Any, Any]:
        """(E[(S + S')_+] with both sums moved by sign times a bound of their rounding, sum of moduli, slope)."""
        first, second = (
            xp.exact_matmul(counts, x) + sign * (len(places) + 8) * ULP * xp.exact_matmul(counts, xp.abs(x))
            for counts, _ in halves
        )
        order = xp.argsort(second)
        second = second[order]
        rows = xp.stack([xp.ones_like(second), second, xp.abs(second), velocities[1][order]]) * chances[1][order]
        beyond = xp.pad(xp.cumsum(rows[:, ::-1], axis=1), ((0, 0), (1, 0)))
        mass, mean, size, motion = beyond[:, sizes[1] - xp.searchsorted(second, -first, side="right")]
        return (
            xp.sum(chances[0] * (mean + first * mass)),
            xp.sum(chances[0] * (size + xp.abs(first) * mass)),
            -xp.sum(chances[0] * (motion + velocities[0] * mass)),
        )

    (upper, size, slope), (lower, _, _) = positive_part(1.0), positive_part(-1.0)
    error = 4 * ULP * size * (sum(sizes) + 100 + 8 * users * (1 + xp.max(xp.abs(log_mass)))) + _UNDERFLOW
    return evaluation(s, xp.zeros(()), upper + error, lower - error, 0.5 * (upper + lower), slope)
