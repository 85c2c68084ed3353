"""The discrete Gaussian: its theta function at complex order, and the two finite pairs that enclose it for sampling.

For any sigma the outer pair dominates the mechanism, and the mechanism dominates the inner pair. The outcomes are cut
into cells at integers. The mass strictly inside a cell is moved to its two ends (outer pair) or joined with its left
end (inner pair). Up to a sigma of about 57 (fine: 455) no cell has integers inside, and both pairs are the mechanism's
own except for its far tails. A sum over the integers inside a cell is taken term by term up to 12 terms. A longer sum
uses its Gauss rule, whose nodes are not integers and which is exact for polynomials up to degree 15.
"""

from __future__ import annotations

import itertools
import operator
from typing import ClassVar, NamedTuple

import jax
import numpy as np

from jaxdp.domains import POSITIVE, SMALLEST, field, whole
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.base import Mechanism, record
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number, RealField

# Terms of theta, and the sigma below which the sum itself is used, above which Poisson's dual sum: term 5 is <= e^-63.
_TERMS, _SWITCH = 4, 0.4


@record
class DiscreteGaussian(Mechanism):
    """Discrete Gaussian noise N_Z(0, sigma^2) on a query whose answer is one whole number.

    sigma: > 0, any shape.
    sensitivity: s, bound of the absolute value of one record's contribution, a whole number >= 1, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.DiscreteGaussian(sigma=2.0), delta=1e-5):.4f}")
    2.0113

    Assumes: the answer is a whole number, and the sensitivity holds for every possible record. The noise is drawn anew
    for every release, exactly from this law on the integers. It is one sample, not a sum of samples of several parties.

    Under replace_one two data sets differ by up to 2 s.
    The noise shifted by s and the noise itself are a dominating pair (Zhu, Dong, Wang 2022, section 4.1):
    K(z) = z (z+1) s^2 / (2 sigma^2) + log[theta(z s) / theta(0)], theta(x) = sum_k exp(-(k+x)^2 / (2 sigma^2)).
    """

    sigma: RealField = field(POSITIVE)
    sensitivity: RealField = field(whole(1), default=1)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """Gaussian exponent plus log theta ratio; first reduces Im z modulo 2 pi sigma^2 / s, the period of |exp K|."""
        s, variance = self.sensitivity, self.sigma**2
        c, t = xp.real(z), xp.imag(z)
        period = 2 * xp.pi * variance / s
        turns = xp.round(t / period)
        t = t - period * turns
        whole_part = xp.round(c * s)
        x, y = c * s - whole_part, t * s  # theta(x + 1) = theta(x)
        direct = self.sigma < _SWITCH
        # term k of the sum in use, divided by term 0: exp(-a (k^2 + ratio k) + i k turn)
        ratio, turn = xp.where(direct, 2 * x, y / (xp.pi * variance)), xp.where(direct, -y / variance, 2 * xp.pi * x)
        k = 1.0 + xp.arange(_TERMS)
        a = _decay(self.sigma)
        up, down = (xp.exp(-a * (k**2 + sign * ratio[..., None] * k)) for sign in (1.0, -1.0))
        power = xp.complex(xp.cos(turn), xp.sin(turn))
        powers = xp.stack(list(itertools.accumulate([power] * _TERMS, operator.mul)), axis=-1)
        real = 1 + xp.sum((up + down) * xp.real(powers), axis=-1)
        log_zeroth = xp.where(direct, (y**2 - x**2) / (2 * variance), 0.0) - _log_theta_at_zero(self.sigma)
        exponent = s**2 / (2 * variance)
        if not xp.iscomplexobj(z):
            return c * (c + 1) * exponent + log_zeroth + xp.log(real)
        imag = xp.sum((up - down) * xp.imag(powers), axis=-1)
        log_modulus = (c * (c + 1) - t * t) * exponent + log_zeroth + 0.5 * xp.log(real**2 + imag**2)
        phase = t * (2 * c + 1) * exponent + xp.where(direct, x * turn, 0.0) + xp.arctan2(imag, real)
        return xp.complex(log_modulus, phase + xp.pi * turns * (2 * whole_part + s))

    def log_modulus(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Log of a bound of |exp(K(c + it) - K(c))|, low <= t <= high: a Gaussian at each multiple of the period."""
        s, variance, decay = self.sensitivity, self.sigma**2, _decay(self.sigma)
        period, middle = 2 * xp.pi * variance, 0.5 * s * (low + high)
        apart = xp.abs(middle - period * xp.round(middle / period)) - 0.5 * s * (high - low)
        y = xp.maximum(apart - 1e-12 * xp.abs(middle), 0.0)
        others = xp.log1p(2.2 * xp.exp(xp.minimum(2 * xp.pi * y - decay, 0.0))) - xp.log1p(-2.2 * xp.exp(-decay))
        bound = others - y**2 / (2 * variance) * (1 - 1e-12)
        return xp.where(self.sigma < _SWITCH, 0.0, xp.minimum(bound + 1e-15, 0.0))

    def at_distance(self, distance: Number) -> Mechanism:
        """The same noise with the sensitivity multiplied by ``distance``."""
        return DiscreteGaussian(self.sigma, self.sensitivity * distance)

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses s^2/(2 sigma^2) - s x / sigma^2."""
        variance = self.sigma**2
        return self.sensitivity**2 / (2 * variance), self.sensitivity / variance

    def enclosing_pair(self, inner: bool, fine: bool) -> finite.FinitePair:
        """A pair made by grouping the integers in cells."""
        return (discrete_gaussian_inner_pair if inner else discrete_gaussian_pair)(self.sigma, self.sensitivity, fine)

    def tail_moment(self, order: Number) -> tuple[Number, Number]:
        """For the outcomes beyond 37.5 sigma - 1, because edges are rounded down to integers; as for a Gaussian."""
        s, sigma = xp.asarray(self.sensitivity), xp.asarray(self.sigma)
        mu = s / sigma
        height = 0.5 * order * (order - 1) * mu**2
        start = xp.floor(finite.REACH * sigma - 1 - (order - 1) * s)
        tail = xp.minimum(_log_lattice_tail(xp.maximum(start, 1.0), sigma) - _log_total(sigma), 0.0)
        log_moment = height + xp.where(start >= 1, tail, 0.0) + np.log(2.0)
        return log_moment + 1e-12 * (1 + height), mu * xp.maximum(finite.REACH - 1 / sigma + 0.5 * mu, 0.0)

    def log_middle(self, loss: Array) -> Array:
        """loss / 2 + (sensitivity / sigma)^2 / 8, for an even sensitivity, as it is at distance 2."""
        return 0.5 * loss + (self.sensitivity / self.sigma) ** 2 / 8


def _decay(sigma: Number) -> Number:
    """The a in the terms exp(-a k^2) of theta(0): of the sum itself for small sigma, else of Poisson's dual sum."""
    return xp.where(sigma < _SWITCH, 1 / (2 * sigma**2), 2 * xp.pi**2 * sigma**2)


def _log_theta_at_zero(sigma: Number) -> Array:
    """log theta(0); where the dual sum is used, log theta(0) - log(sigma sqrt(2 pi))."""
    return xp.log1p(2 * xp.sum(xp.exp(-_decay(sigma) * (1.0 + xp.arange(_TERMS)) ** 2)))


def _log_total(sigma: Number) -> Array:
    return _log_theta_at_zero(sigma) + xp.where(sigma < _SWITCH, 0.0, xp.log(sigma) + 0.5 * np.log(2 * np.pi))


_CELLS = (512, 512, 256)  # numbers of (even, dense, far) cells of `gaussian_edges`; with ``fine`` those of the Gaussian
_SLOTS, _NODES, _DEGREE = 12, 8, 12  # terms summed one by one; Gauss nodes; degree of the interpolation in 1/N^2
_RULE_ERROR = 3e-14  # bound of the relative error of the interpolated rule; 1.2e-14 was measured
_FAR = 600.0  # losses in a cell above this are not exponentiated: they would overflow


def _gauss_rule(inverse_square: float) -> tuple[np.ndarray, np.ndarray]:
    """(nodes, weights), in units of N, of the Gauss rule for sums over N integers centred at 0, from 1/N^2.

    The nodes are eigenvalues of the Jacobi matrix of the Gram polynomials, b_k^2 = k^2 (N^2 - k^2) / (4 (4 k^2 - 1)).
    """
    k = np.arange(1, _NODES)
    off_diagonal = np.sqrt(k**2 * (1 - k**2 * inverse_square) / (4 * (4 * k**2 - 1)))
    nodes, vectors = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return nodes, vectors[0] ** 2


# Nodes and weights are analytic in 1/N^2 up to 1/49; Chebyshev interpolation of degree 12 is used up to 1/169.
_LARGEST = 1.0 / (_SLOTS + 1) ** 2
_PLACES = np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))
_RULE = np.linalg.solve(
    np.polynomial.chebyshev.chebvander(_PLACES, _DEGREE),
    np.stack([np.concatenate(_gauss_rule(0.5 * (1 + place) * _LARGEST)) for place in _PLACES]),
)


def sum_rule(count: Number) -> tuple[Array, Array]:
    """(nodes, log weights), in `_SLOTS` columns, for a sum over the integers 1..count; no weights if count is 0."""
    count = xp.asarray(count)[..., None]
    k = 1.0 + xp.arange(_SLOTS)
    use_gauss = count > _SLOTS
    safe = xp.where(use_gauss, count, _SLOTS + 1.0)
    x = xp.clip(2 / (safe * safe * _LARGEST) - 1, -1.0, 1.0)
    values = xp.exact_matmul(xp.cos(xp.arange(_DEGREE + 1) * xp.arccos(x)), _RULE)
    filler = xp.zeros((*safe.shape[:-1], _SLOTS - _NODES))
    nodes = xp.concatenate([0.5 * (safe + 1) + safe * values[..., :_NODES], filler + 1.0], axis=-1)
    weights = xp.concatenate([safe * values[..., _NODES:], filler], axis=-1)
    inside = k <= count
    log_ones = xp.where(inside, 0.0, -xp.inf)
    return xp.where(use_gauss, nodes, xp.where(inside, k, 1.0)), xp.where(use_gauss, finite.log_mass(weights), log_ones)


class _Cells(NamedTuple):
    """Cells to the right of the middle s/2, as distances d from it; the loss at d is s d / sigma^2.

    An integer in the middle counts half, because the cells to the left are the mirror image.
    """

    loss: Array  # at each edge
    log_edge: Array  # log mass of Q at each edge; -inf where the edge equals the one before
    above: Array  # loss at each node inside a cell, minus the loss at the cell's left edge
    log_share: Array  # log of the share of each node's mass that goes to the right end: preserves P's and Q's mass
    log_rest: Array  # log of the share that goes to the left end
    log_inside: Array  # log mass of Q at each node inside
    blur: Array  # for each cell, bound of the error of the logarithm of a sum inside it
    log_outside: Array  # log of the mass of either law beyond the last edges on both sides


def _cells(sigma: Number, s: Number, fine: bool) -> _Cells:
    mu = s / sigma
    offset = 0.5 * s - xp.floor(0.5 * s)  # 1/2 for odd s, else 0
    distance = xp.floor(sigma * finite.gaussian_edges(mu, *(finite.FINE_CELLS if fine else _CELLS))) + offset
    log_total = _log_total(sigma)

    def log_mass(d: Array) -> Array:
        return -0.5 * ((d + s / 2) / sigma) ** 2 - log_total

    new = xp.concatenate([xp.ones(1, bool), xp.diff(distance) > 0])
    log_edge = xp.where(new, log_mass(distance) - xp.where(distance == 0, np.log(2.0), 0.0), -xp.inf)
    width = xp.diff(distance)[:, None]
    nodes, log_weights = sum_rule(xp.maximum(width[:, 0] - 1, 0.0))
    log_inside = log_mass(distance[:-1, None] + nodes) + log_weights
    above, whole = mu * (nodes / sigma), mu * (width / sigma)
    log_rest, log_share = finite.shares(above, whole)
    fall = whole[:, 0] + (width[:, 0] / sigma) * (distance[1:] / sigma + mu / 2)
    blur = xp.where(width[:, 0] - 1 > _SLOTS, finite.gauss_error(fall + whole[:, 0]) + _RULE_ERROR, 0.0)
    far = distance[-1] + 1
    outside = xp.logaddexp(_log_lattice_tail(far - s / 2, sigma), _log_lattice_tail(far + s / 2, sigma))
    loss = mu * (distance / sigma)
    return _Cells(loss, log_edge, above, log_share, log_rest, log_inside, blur, outside - log_total)


def discrete_gaussian_pair(sigma: Number, sensitivity: Number, fine: bool = False) -> finite.FinitePair:
    """A finite pair that dominates N_Z(s, sigma^2) against N_Z(0, sigma^2); outcomes beyond 37.5 sigma are split."""
    cells = _cells(sigma, sensitivity, fine)
    right, left = finite.log_sum(cells.log_inside + cells.log_share), finite.log_sum(cells.log_inside + cells.log_rest)
    log_q, nothing = finite.at_edges(left, right, cells.log_edge), xp.zeros(1)
    blur = xp.maximum(xp.concatenate([cells.blur, nothing]), xp.concatenate([nothing, cells.blur]))
    # positive, even where it underflows
    outside = xp.maximum(xp.exp(xp.minimum(cells.log_outside + 1e-12, 0.0)), SMALLEST)
    outside = xp.where(_usable(sigma, sensitivity), outside, 1.0)
    return finite.with_leftover(finite.mirrored(log_q + cells.loss, log_q, cells.loss, blur), outside, outside)


def discrete_gaussian_inner_pair(sigma: Number, sensitivity: Number, fine: bool = False) -> finite.FinitePair:
    """A finite pair that N_Z(s, sigma^2) against N_Z(0, sigma^2) dominates: outcomes joined by cell, without far tails.

    A cell includes its left end. If the density falls too far across a cell for the Gauss nodes, only the end is kept.
    """
    cells = _cells(sigma, sensitivity, fine)
    log_inside = finite.log_sum(cells.log_inside)
    fit = (cells.blur < 2 * _RULE_ERROR) & (xp.max(cells.above, axis=1) < _FAR) & (log_inside > -xp.inf)
    log_inside = xp.where(fit, log_inside, -xp.inf)
    log_q = finite.log_sum(xp.stack([cells.log_edge[:-1], log_inside], axis=1))
    # the cell's mean likelihood ratio divided by the ratio at its left end, minus 1
    share = xp.where(fit[:, None], xp.exp(cells.log_inside - xp.where(fit, log_q, 0.0)[:, None]), 0.0)
    excess = xp.sum(share * xp.expm1(xp.minimum(cells.above, _FAR)), axis=1)
    loss = cells.loss[:-1] + xp.log1p(excess)
    # the rounding of a share grows with the size of the logarithms that it is computed from
    blur = xp.where(fit, cells.blur + 4 * ULP * (16 - xp.where(fit, log_q, 0.0)) * excess, 0.0)
    log_q = xp.concatenate([log_q, cells.log_edge[-1:]])
    log_q = xp.where(_usable(sigma, sensitivity), log_q, -xp.inf)
    loss = xp.concatenate([loss, cells.loss[-1:]])
    return finite.mirrored(log_q + loss, log_q, loss, xp.concatenate([blur, xp.zeros(1)]))


def _usable(sigma: Number, s: Number) -> Array | bool | np.bool:
    """Whether the masses exceed the rounding of their logarithms, and sigma^2 neither underflows nor overflows."""
    return (s < finite.LARGEST_MU * sigma) & (sigma > 1e-150) & (sigma < 1e70)


def _log_lattice_tail(start: Array, sigma: Number) -> Array:
    """Log of a bound of sum_{k >= start} e^{-k^2 / (2 sigma^2)}, start >= 1, by a geometric series."""
    return -0.5 * (start / sigma) ** 2 - xp.log(-xp.expm1(-(start / sigma) / sigma))
