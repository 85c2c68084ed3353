"""Two finite pairs around a continuous one: the grid lower and upper bounds, certified by construction.

Cut the outcomes into cells on which the loss lies between two known values. Merging each cell is post-processing: the
merged pair is dominated by the true one. Splitting each cell's mass between the two ends of its loss range, with the
same P and Q masses, spreads the ratio dP/dQ further: that pair dominates (a convex function lies below its chord).
Both hold at every a >= 0, so both compose. The gap is of second order in the cell width.

This plays the part of Algorithm 2 of Zhu, Dong, Wang 2022. Their Theorem 43 bounds the error of another rounding; its
constants are not reproduced here, the bound is the pair itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp import validate
from jaxdp.mechanisms.basic import DiscretePair

# Edges are moved apart by this much relative ratio, so that rounding of the masses cannot leave the cell.
_WIDEN = 1e-12


class GridPairs(NamedTuple):
    """lower: a pair that the true one dominates. upper: a pair that dominates the true one."""

    lower: DiscretePair
    upper: DiscretePair


def grid_pairs(p_mass: Any, q_mass: Any, edge_losses: Any) -> GridPairs:
    """A dominated and a dominating finite pair from the cell masses of a pair with known loss range per cell.

    Args:
        p_mass: P(cell_i), q_mass: Q(cell_i), one axis of n cells that cover all outcomes.
        edge_losses: n + 1 increasing values; the loss on cell i lies in [edge_i, edge_{i+1}]. The first may be -inf,
            the last inf: what lies there becomes mass at infinity.

    Returns:
        GridPairs(lower, upper) of DiscretePair. The masses are used as given; their relative error should
        be small against the width of a cell.

    Raises:
        ValueError: a cell whose mass ratio leaves its range by more than rounding.

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
    """Each cell as two outcomes of ratio low and high with the cell's masses."""
    infinite = np.isinf(high)
    top = np.where(infinite, 1.0, high)
    bottom = np.where(infinite, 0.0, low)
    q_high = np.where(infinite, 0.0, np.clip((p - bottom * q) / (top - bottom), 0.0, q))
    p_high = np.where(infinite, np.maximum(p - low * q, 0.0), top * q_high)
    return DiscretePair(np.concatenate([p - p_high, p_high]).clip(0.0), np.concatenate([q - q_high, q_high]))
