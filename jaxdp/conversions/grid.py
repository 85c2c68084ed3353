"""Two finite pairs around a continuous one: certified lower and upper bounds from masses on a grid.

Cut the outcomes into cells on which the loss lies between two known values. Merging the outcomes of each cell is
post-processing: the merged pair is dominated by the true one. Splitting the mass of each cell between the two ends of
its loss range, with the same P and Q masses, gives a pair that dominates, since a convex function lies below its chord.
Both hold at every a >= 0, so both pairs compose. The gap is of second order in the cell width.

It takes the place of Algorithm 2 of Zhu, Dong, Wang 2022, whose Theorem 43 bounds the error of another rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp import validate
from jaxdp.mechanisms.basic import DiscretePair
from jaxdp.typing import Real

# Relative distance by which the edge ratios of a cell are moved apart: the rounded masses stay between them.
_WIDEN = 1e-12


class GridPairs(NamedTuple):
    """Two finite pairs around a true one.

    lower: a pair that the true one dominates: its delta is a lower bound.
    upper: a pair that dominates the true one: its delta is an upper bound.

    >>> pairs = jaxdp.conversions.grid_pairs([0.3, 0.7], [0.7, 0.3], [-1.0, 0.0, 1.0])
    >>> print(pairs.lower.p, pairs.upper.p.round(3))
    [0.3 0.7] [0.233 0.067 0.067 0.633]
    """

    lower: DiscretePair
    upper: DiscretePair


def grid_pairs(p_mass: Real, q_mass: Real, edge_losses: Real) -> GridPairs:
    """A dominated and a dominating finite pair, from the masses of cells of known loss range.

    p_mass: P(cell_i), one axis of n cells that cover all outcomes.
    q_mass: Q(cell_i), same length.
    edge_losses: n + 1 increasing values in nats; the loss on cell i lies in [edge_i, edge_{i+1}]. The first may be
        -inf; the last may be inf, which makes part of the last cell mass at infinity.

    >>> pairs = jaxdp.conversions.grid_pairs([0.3, 0.7], [0.7, 0.3], [-1.0, 0.0, 1.0])
    >>> print(f"{jaxdp.delta(pairs.lower, 0.5):.4f} {jaxdp.delta(pairs.upper, 0.5):.4f}")
    0.2054 0.2490

    Returns GridPairs(lower, upper) of DiscretePair. The masses are used as given; their relative error should be small
    against the width of a cell. Raises ValueError, also for shapes other than (n,), (n,), (n + 1,), a cell whose mass
    ratio lies outside its loss range by more than rounding.
    """
    p, q = validate.nonnegative("p_mass", p_mass), validate.nonnegative("q_mass", q_mass)
    edges = validate.real_array("edge_losses", edge_losses)
    if p.ndim != 1 or p.shape != q.shape or edges.shape != (p.size + 1,):
        shapes = f"{p.shape}, {q.shape}, {edges.shape}"
        raise ValueError(f"p_mass, q_mass and edge_losses must have shapes (n,), (n,), (n + 1,), got {shapes}.")
    validate.reject("edge_losses", edges[1:], ~(np.diff(edges) > 0), "increasing")
    low, high = np.exp(edges[:-1]) * (1 - _WIDEN), np.exp(edges[1:]) * (1 + _WIDEN)
    inside = (p >= low * q * (1 - 1e-9)) & ((p <= high * q * (1 + 1e-9)) | np.isinf(high))
    validate.reject("p_mass", p, ~inside, "between the cell's edge ratios times q_mass")
    return GridPairs(DiscretePair(p, q), _spread(p, q, low, high))


def _spread(p: np.ndarray, q: np.ndarray, low: np.ndarray, high: np.ndarray) -> DiscretePair:
    """The pair in which each cell is split into two outcomes of ratio low and high, with its P and Q masses."""
    infinite = np.isinf(high)
    top = np.where(infinite, 1.0, high)
    bottom = np.where(infinite, 0.0, low)
    q_high = np.where(infinite, 0.0, np.clip((p - bottom * q) / (top - bottom), 0.0, q))
    p_high = np.where(infinite, np.maximum(p - low * q, 0.0), top * q_high)
    return DiscretePair(np.concatenate([p - p_high, p_high]).clip(0.0), np.concatenate([q - q_high, q_high]))
