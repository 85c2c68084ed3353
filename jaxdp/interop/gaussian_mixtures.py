"""Gaussian noise around a random shift against Gaussian noise around 0, bounded by a finite law that dominates."""

from typing import ClassVar

import numpy as np

from jaxdp.domains import NONNEGATIVE, PROBABILITY, field
from jaxdp.mechanisms.base import FiniteLaw, record
from jaxdp.mechanisms.finite import GAUSS_NODES, GAUSS_WEIGHTS, Part, at_edges, gauss_error, log_mass
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_expm1
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, ArrayField, Relation

LARGEST_SHIFT = 40.0  # standard deviations; with the cells below, the density falls by at most 2 nats within a cell
MOST_SHIFTS = 32
_INNER_CELLS, _OUTER_CELLS = 16384, 2048
_NEAR, _FAR = 8.0, 37.5  # standard deviations below 0 and above the largest shift; mass beyond _FAR: 5e-308
_TAIL = 1e-290  # upper bound of the mass of P or Q beyond the cells
_NODES, _WEIGHTS = 0.5 + 0.5 * GAUSS_NODES, 0.5 * GAUSS_WEIGHTS


@record
class GaussianMixtures(FiniteLaw):
    """P = sum_i probabilities_i N(shifts_i, 1) against Q = N(0, 1).

    shifts: in [0, 40]. probabilities: they sum to 1.

    Assumes: the releases with and without a record are no easier to tell apart than P and Q; noise as good as real
    noise.

    The likelihood ratio r = P/Q increases with the outcome. The outcomes are cut into cells. The masses of a cell under
    P and under Q are moved to its two ends so that both are preserved; the resulting pair dominates
    (`jaxdp.mechanisms.finite`). There are upper bounds only (docs/limits.md).
    """

    shifts: ArrayField = field(NONNEGATIVE)
    probabilities: ArrayField = field(PROBABILITY)
    event_ndim: ClassVar[dict[str, int]] = {"shifts": 1, "probabilities": 1}
    relations: ClassVar[tuple[Relation, ...]] = ("add_or_remove", "add", "remove")
    exact: ClassVar[bool] = False

    def _edges(self) -> Array:
        """Edges of the cells: equal narrow cells where the mass is, wider cells beyond."""
        largest = xp.max(xp.asarray(self.shifts))
        inner = -_NEAR + (largest + 2 * _NEAR) * xp.arange(_INNER_CELLS) / _INNER_CELLS
        outer = (_FAR - _NEAR) * xp.arange(_OUTER_CELLS) / _OUTER_CELLS
        return xp.concatenate([-_FAR + outer, inner, largest + _NEAR + outer, xp.full(1, largest + _FAR)])

    def part(self, direction: str) -> Part:
        """The law of the loss for the pair or the swapped pair; P and Q have mass below 1e-290 beyond the cells."""
        shifts, log_p, edges = xp.asarray(self.shifts), log_mass(xp.asarray(self.probabilities)), self._edges()
        # at the edges of the cells: the losses, and below the log masses under Q
        parts = log_p + edges[:, None] * shifts - 0.5 * shifts**2
        loss = xp.logsumexp(parts, axis=1)
        left, width = edges[:-1], xp.diff(edges)
        posterior = (parts - loss[:, None])[:-1, None, :]
        ahead = width[:, None] * _NODES
        x = left[:, None] + ahead
        log_density = -0.5 * x * x - 0.5 * np.log(2 * np.pi) + xp.log(width)[:, None] + np.log(_WEIGHTS)
        # an outcome x in the cell [a, b] moves to b with share (r(x) - r(a)) / (r(b) - r(a)), else to a; all terms > 0
        whole = _growth(posterior, shifts, width[:, None])
        to_right = _growth(posterior, shifts, ahead) - whole
        to_left = _growth(posterior + shifts * ahead[..., None], shifts, width[:, None] * (1 - _NODES)) - whole
        log_right, log_left = (xp.logsumexp(log_density + share, axis=1) for share in (to_right, to_left))
        log_q = at_edges(log_left, log_right)
        # errors: rounding of every exponent in the sums above, and of the eight-node quadrature
        size = -log_p + xp.abs(edges[:, None]) * shifts + 0.5 * shifts**2
        size = xp.max(xp.where(log_p > -xp.inf, size, 0.0), axis=1)
        fall = xp.max(width) * (xp.max(xp.abs(edges)) + xp.max(shifts) + 4.0)
        blur = 64 * ULP * (4 + size + 0.5 * edges**2) + 4 * gauss_error(fall)
        loss, log_weight = (-loss, log_q) if direction == "reverse" else (loss, log_q + loss)
        return Part(loss, log_weight, blur, _TAIL, _TAIL)


def _growth(log_weight: Array, shifts: Array, step: Array) -> Array:
    """log sum_i weight_i (exp(shift_i step) - 1), step > 0."""
    exponent = shifts * step[..., None]
    return xp.logsumexp(xp.where(exponent > 0, log_weight + log_expm1(exponent), -xp.inf), axis=-1)
