"""The contour of one band: of the part of the law in which the largest label of a sampled step is j (see `bands`).

M_j = prod C_j^T - prod (C_j - A_j)^T over the sampled steps, where C_j is the moment of the outcomes with a label <= j,
and A_j is the moment of the outcomes with the label j. Proof: notebooks/proofs/contour_certificate.md, section 10.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxdp.contour.plan import Plan
from jaxdp.contour.spectrum import Nodes, Sampled, Spectrum, counted
from jaxdp.contour.trapezoid import Contour, Effort, through
from jaxdp.numerics.complex_logarithms import log_expm1_complex, log_one_plus
from jaxdp.numerics.exponential_sums import log_ratios
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.numerics.special import log1mexp
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.decay import log_decay
from jaxdp.sampled_gaussian.label import NEVER, STEEPEST, Label
from jaxdp.sampled_gaussian.moment import real_log_m, tilted_line

_COARSER = 5  # the search for an abscissa uses this many times fewer quadrature nodes than the bounds


@dataclasses.dataclass(frozen=True)
class Band:
    """K of one band, without the outcomes beyond the tail cut."""

    spectrum: Spectrum
    steps: Sampled
    low: jax.Array  # lower edge of the band for each step, (stack,)
    high: jax.Array  # upper edge
    cut: jax.Array
    size: int  # quadrature nodes per step

    @property
    def labels(self) -> Label:
        """The label of all outcomes up to the band (C) and the label of the band (A), stacked: edges (2, stack)."""
        return Label(xp.stack([xp.full_like(self.low, -NEVER), self.low]), xp.stack([self.high, self.high]))

    @property
    def largest(self) -> jax.Array:
        """The largest abscissa c at which K can be bounded."""
        return 0.49 * STEEPEST / xp.max(self.steps.mu)

    def rough(self, c: jax.Array) -> jax.Array:
        """K(c) to a few percent; inf where the quadrature gives no estimate."""
        return self._bounds(c, max(self.size // _COARSER, 32), True)[1]

    def real(self, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(lower, upper) bound of K(c) for c >= -1."""
        return self._bounds(c, self.size, False)

    def _bounds(self, c: jax.Array, size: int, rough: bool) -> tuple[jax.Array, jax.Array]:
        closed = xp.real(self.spectrum.closed(c.astype(xp.complex128)))
        mu, rate, cut = self.steps.mu, self.steps.rate, self.cut
        log_m, off = real_log_m(c[:, None, None], mu, rate, cut, self.spectrum.direction, size, rough, self.labels)
        log_m = xp.stack([xp.where(off < 0.6, log_m - off, -xp.inf), log_m + off])
        over, ratio = log_m[..., 0, :], xp.where(self.steps.times > 0, log_m[..., 1, :] - log_m[..., 0, :], -xp.inf)
        lift, part = _lifted_part(self.steps, ratio)
        total = closed + counted(self.steps, over) + part - lift
        deepest = xp.max(xp.where(ratio > -xp.inf, xp.abs(ratio), 0.0), axis=-1)
        blur = 1e-14 * (1 + xp.abs(total)) + 1e-15 * (counted(self.steps, xp.abs(over)) + deepest)
        blur = blur + self.spectrum.closed_units * _ULP + 4 * _ULP * xp.abs(closed)
        low, high = total[0] - blur[0], total[1] + blur[1]
        return xp.where(xp.isnan(low), -xp.inf, low), xp.where(xp.isnan(high), xp.inf, high)


def _lifted_part(steps: Sampled, ratio: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(lift, lift + log(1 - prod (1 - A/C)^T)); ratio: log(A/C), -inf for a step that is taken 0 times.

    Where all A/C are below e^-400 they are multiplied by e^lift, against underflow: there 1 - prod (1 - A/C)^T is
    linear in A/C to 1e-170.
    """
    lift = xp.maximum(-400.0 - xp.max(ratio, axis=-1), 0.0)
    return lift, log1mexp(counted(steps, log1mexp(xp.minimum(ratio + lift[..., None], 0.0))))


class _Steps(NamedTuple):
    """One-step moments m, for both labels C and A (first axis) and every step (second axis)."""

    log_m: jax.Array  # computed log m(c)
    error: jax.Array  # relative error of m(c)
    fallen: jax.Array  # log of a bound of |m(c + it)|/(computed m(c)) beyond the last node
    size: jax.Array  # log |m(c + it)/m(c)| at the nodes; m(c) is the true value for C, the computed one for A
    angle: jax.Array  # angle of m(c + it)/m(c)
    off: jax.Array  # error of m(c + it)/m(c) over its modulus


def _steps(band: Band, c: jax.Array, step: jax.Array, nodes: int) -> _Steps:
    cut, direction, size = band.cut, band.spectrum.direction, band.size

    def one_step(mu: jax.Array, rate: jax.Array, label: Label, computed: jax.Array) -> _Steps:
        line = tilted_line(c, mu, rate, cut, direction, size, label)
        fallen = log_decay(c, mu, rate, cut, direction, size, line.log_m, step * nodes, label)
        return _Steps(line.log_m, line.error, fallen, *log_ratios(line, step, nodes + 1, computed)[:3])

    every_step = xp.vmap(xp.vmap(one_step, in_axes=(0, 0, 0, None)), in_axes=(None, None, 0, 0))
    return every_step(band.steps.mu, band.steps.rate, band.labels, xp.array([False, True]))


def _log_error(total: Callable[[jax.Array], jax.Array], share, log_rest, rest_angle, off_c, off_a) -> jax.Array:
    """log of an error bound of prod C^T - prod (C - A)^T, in units of prod |C|^T.

    share: |A/C|; log_rest + i rest_angle: log(1 - A/C); off_c, off_a: errors of C and A in units of |C|. The
    derivatives are T (C - A)^{T-1} in A and T (C^{T-1} - (C - A)^{T-1}) in C. They are bounded by their values at the
    moduli, enlarged by the errors.
    """
    below = xp.exp(log_rest) + off_c + off_a
    over = below + share + off_a
    fall = -xp.log1p((share + off_a) / below)
    others = total(fall) - fall
    error = total((off_a * xp.exp(others) - off_c * xp.expm1(others)) / over)
    rounded = xp.exp(total(fall)) * xp.expm1(16 * _ULP * total(xp.abs(log_rest) + xp.abs(rest_angle)))
    return total(xp.log(over)) + xp.log(error + rounded)


def band_contour(band: Band, plan: Plan, effort: Effort) -> Contour:
    """The `Contour` of M_j: its values at the nodes and a bound of the truncation error."""
    c, step, live = plan.c, 2 * xp.pi / plan.period, band.steps.times > 0
    log_m, error, fallen, log_size, angle, off = _steps(band, c, step, effort.nodes)

    def total(x: jax.Array) -> jax.Array:
        """Sum of times * x over the steps, the first axis of x."""
        return counted(band.steps, x.T)

    # |A/C| at c and at the nodes, times e^lift; the logarithm of prod (1 - A/C)^T - 1
    ratio = xp.where(live, xp.minimum(log_m[1] - log_m[0], 0.0), -xp.inf)
    lift, at_c = _lifted_part(band.steps, ratio)
    share, turn = xp.exp((ratio + lift)[:, None] + log_size[1] - log_size[0]), angle[1] - angle[0]
    log_rest, rest_angle = log_one_plus(-share * xp.cos(turn), -share * xp.sin(turn))
    part, phase = log_expm1_complex(total(log_rest), total(rest_angle))
    noise = _ULP * (128 + 4 * xp.sum(xp.abs(log_m), axis=0))[:, None]
    rounding = noise + _ULP * (8 * lift + 4 * xp.sum(xp.abs(log_size) + xp.abs(angle), axis=0))
    off_a = share * ((1 + off[1]) * (1 + error[0][:, None]) * (1 + rounding) - 1)
    excess = xp.softplus(_log_error(total, share, log_rest, rest_angle, off[0], off_a) - part)

    # |M_j| <= sum_i T_i |A_i| prod max(|C|, |B|)^T / max(|C_i|, |B_i|), B = C - A, and |B| is at most its value at c
    blur = xp.log1p(error)
    fallen = xp.minimum(fallen, 0.0) + blur
    largest = xp.maximum(fallen[0], xp.log(xp.sum(error, axis=0) + noise[:, 0] - xp.expm1(ratio)))
    once = xp.log(xp.maximum(band.steps.times, 1e-300)) + ratio + fallen[1] - largest
    tail = xp.logsumexp(xp.where(live, once, -xp.inf)) + total(largest) + lift - at_c
    end = step * effort.nodes

    spectrum, t = band.spectrum, step * xp.arange(effort.nodes + 1)
    base = spectrum.closed(xp.asarray(c, xp.complex128))
    value = spectrum.closed(xp.complex(xp.full_like(t, c), t)) - base
    log_abs, turned = total(log_size[0]) + part - at_c, total(angle[0])
    sizes = total(xp.abs(log_size[0]) + xp.abs(angle[0])) + xp.abs(part) + xp.abs(at_c)
    units = spectrum.closed_units + 4 * (xp.abs(base) + xp.abs(value)) + 4 * sizes + 64
    nodes = Nodes(
        xp.real(value) + log_abs, excess + units * _ULP, xp.imag(value) + turned + phase + xp.pi, xp.zeros(())
    )
    log_m_c = xp.real(base) + total(log_m[0]) + at_c - lift
    # as in `build_truncated`: at the nodes C is relative to the true C(c), hence error[0]
    units = 16 + 2 * spectrum.closed_units + 4 * (xp.abs(log_m_c) + xp.abs(at_c) + lift)
    units = units + total(4 * (xp.abs(log_m[0]) + 12) + error[0] / _ULP)
    contour = through(plan, nodes, xp.zeros(1), log_m_c[None], units)
    return contour._replace(log_tail=tail - xp.log(end) - 0.5 * spectrum.mu2 * end**2)
