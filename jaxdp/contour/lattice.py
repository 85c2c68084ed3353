r"""The contour sum for losses on a lattice a0 + ell Z: K is periodic along the contour, so one period is a finite sum.

With z_n = c + 2 pi i n/(N ell), n = 0..N-1, b = the first lattice point beyond eps, th = b - eps in (0, ell],

    S_N = (1/N) e^{K(c) - c b} sum_n Re[ (M(z_n)/M(c)) e^{-i t_n b} (A + B e^{-z_n ell}) / D(z_n) ],
    D(z) = (1 - e^{-z ell}) (1 - e^{-(z+1) ell}),
    A = 1 - e^{-th},  B = e^{-th} - e^{-ell},

equals sum_k e^{c p k} delta(eps + p k) over all integers k, p = N ell. There is no truncation error. The terms k != 0
are the alias, bounded as in notebooks/proofs/contour_certificate.md, section 2. A and B are nonnegative, so the two
geometric sums do not cancel.
"""

from typing import Any, NamedTuple

import jax

from jaxdp.contour.plan import Plan
from jaxdp.contour.spectrum import Spectrum, along_line
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.runtime.arrays import xp


class LatticeContour(NamedTuple):
    """The parts of the sum that do not depend on eps; the last four fields are those of `trapezoid.Contour`."""

    plan: Plan
    offset: jax.Array  # a0
    spacing: jax.Array  # ell
    node_t: jax.Array  # imaginary parts of the nodes
    first: tuple[jax.Array, jax.Array]  # real and imaginary node weights that A multiplies
    second: tuple[jax.Array, jax.Array]  # real and imaginary node weights that B multiplies
    errors: jax.Array  # sums over the nodes of |weight| x: relative error of the node; t 2^-53; 2^-53
    log_m_c: jax.Array
    log_m_c_units: jax.Array  # bound of the error of log_m_c, in units of 2^-53
    extra_mu2: Any = (0.0,)
    mixing: Any = 0.0
    log_kept: Any = 0.0
    shift: Any = 0.0


def build_lattice(spectrum: Spectrum, plan: Plan, count: int) -> LatticeContour:
    """Evaluate K at the ``count`` nodes of one period. The period of the alias becomes count x spacing."""
    offset, spacing = spectrum.lattice or (xp.zeros(()), xp.ones(()))
    spacing = xp.where(spacing == 0, 1.0, spacing)  # NaN stays: then nothing is claimed
    c, period = plan.c, count * spacing
    step = 2 * xp.pi / period
    # K at the second half of the period is the complex conjugate of K at the first half
    nodes = along_line(spectrum, [], c, step, count // 2 + 1)
    t = step * xp.arange(count // 2 + 1)
    ends = (xp.arange(t.shape[0]) == 0) | (xp.arange(t.shape[0]) == count // 2)
    fold = xp.where(ends, 1.0, 2.0) / count
    turn = t * spacing
    near_re, near_im = _one_minus_exp(c * spacing, turn)
    far_re, far_im = _one_minus_exp((c + 1) * spacing, turn)
    den_re, den_im = near_re * far_re - near_im * far_im, near_re * far_im + near_im * far_re
    norm = den_re**2 + den_im**2
    size = xp.exp(nodes.log_abs) * fold / norm
    cosine, sine = xp.cos(nodes.phase), xp.sin(nodes.phase)
    real, imag = size * (cosine * den_re + sine * den_im), size * (sine * den_re - cosine * den_im)
    fade = xp.exp(-c * spacing)
    cos_l, sin_l = xp.cos(turn), xp.sin(turn)
    second = (fade * (real * cos_l + imag * sin_l), fade * (imag * cos_l - real * sin_l))
    moduli = xp.exp(nodes.log_abs) * fold / xp.sqrt(norm)
    slack = xp.expm1(xp.minimum(nodes.excess, 600.0))
    own = xp.sum(moduli * (slack + (48 + count / 4 + 2 * xp.abs(nodes.phase)) * _ULP))
    errors = xp.stack([own, xp.sum(moduli * t) * _ULP, xp.sum(moduli) * _ULP])
    log_m_c = xp.real(spectrum.closed(xp.asarray(c, xp.complex128)))
    units = 16 + spectrum.closed_units + 4 * xp.abs(log_m_c)
    plan = plan._replace(period=period)
    return LatticeContour(plan, offset, spacing, t, (real, imag), second, errors, log_m_c, units)


def _one_minus_exp(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of 1 - e^{-(x + iy)} for x > 0, without cancellation."""
    fade = xp.exp(-x)
    return -xp.expm1(-x) + 2 * fade * xp.sin(0.5 * y) ** 2, fade * xp.sin(y)


def lattice_sum(contour: LatticeContour, eps: jax.Array, ref: jax.Array) -> tuple[jax.Array, ...]:
    """(S_N at eps, its slope in eps, truncation error 0, rounding error) in units of e^ref, each of shape (1,)."""
    c, ell = contour.plan.c, contour.spacing
    position = (eps - contour.offset) / ell
    index = xp.floor(position) + 1
    gap = (index - position) * ell
    # not clip: where eps is a loss, gap = ell, and the derivative of clip would be half of the one to the right
    gap = xp.where(gap < 0, 0.0, xp.where(gap > ell, ell, gap))
    beyond = contour.offset + index * ell
    front = xp.exp(contour.log_m_c - c * beyond - ref)
    a, b, inner = -xp.expm1(-gap), xp.exp(-gap) * -xp.expm1(gap - ell), xp.exp(-gap)
    angle = contour.node_t * beyond
    cosine, sine = xp.cos(angle), xp.sin(angle)
    first = xp.sum(contour.first[0] * cosine + contour.first[1] * sine)
    second = xp.sum(contour.second[0] * cosine + contour.second[1] * sine)
    own, moment, mass = contour.errors
    place = xp.abs(contour.offset) + xp.abs(eps) + ell
    # Rounding of gap acts like a change of eps by a few units of ``place``. It changes delta, in units of
    # M(c) e^{-c eps}, by c + 1 times as much.
    head = contour.log_m_c_units + 4 * (xp.abs(contour.log_m_c) + (3 * c + 2) * place + xp.abs(ref)) + 16
    moduli = a + b + 16 * _ULP * place
    rounding = front * (moduli * (own + 8 * place * moment + mass * head) + mass * 16 * place)
    # A wrong index gives delta at an eps at most ``shift`` away: |d delta/d eps| <= P(L > eps) <= M(c) e^{-c eps}.
    shift = 16 * _ULP * place
    rounding = rounding + shift * xp.exp(contour.log_m_c - c * (eps - shift) - ref) * (1 + 2 * head * _ULP)
    slope = front * inner * (second - first)
    return tuple(x[None] for x in (front * (a * first + b * second), slope, xp.zeros_like(front), rounding))
