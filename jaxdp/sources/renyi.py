"""Renyi divergence and K(z) of a composed mechanism, as sums over its parts."""

from typing import Any

import numpy as np

from jaxdp.contour.spectrum import SWAPPED, Spectrum, counted
from jaxdp.domains import FINITE, field
from jaxdp.mechanisms.allocation import RandomAllocation
from jaxdp.mechanisms.base import FiniteLaw, Mechanism, record
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.finite import Part, log_mass, log_sum_exp
from jaxdp.mechanisms.gaussian import gaussian_mus, gaussian_renyi
from jaxdp.mechanisms.shuffled import Shuffled
from jaxdp.mechanisms.spectrum import has_finite_law, is_sampled_gaussian, spectrum
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import platform
from jaxdp.runtime.precision import kernel, many
from jaxdp.sampled_gaussian.moment import tilted_line
from jaxdp.typing import Number, RealField

_SIZE = 1024  # quadrature nodes
# Added to the order. Close to 1, where K(c)/c cancels, R at a slightly larger order is the better bound: R is monotone.
_NUDGES = (0.0, 1e-4, 1e-2)
_SMALLEST = 1e-5  # least c = order - 1 at which K(c)/c is computed
_ORDERS = np.array([*range(2, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256], float)


@record
class _WithTail(FiniteLaw):
    """A finite law for one order: an outcome whose weight bounds the rest of the moment replaces mass at infinity."""

    law: FiniteLaw
    log_moment: RealField = field(FINITE)

    def part(self, direction: str) -> Part:
        """The law and one more outcome, of loss 0 and weight e^log_moment."""
        listed, zero = self.law.part(direction), xp.zeros(1)
        log_weight = xp.concatenate([listed.log_weight, xp.asarray(self.log_moment)[None]])
        return Part(xp.concatenate([listed.loss, zero]), log_weight, xp.concatenate([listed.blur, zero]), 0.0, 0.0)

    def top_of(self, part: Part) -> Number:
        """Infinite where an outcome replaces mass at infinity, because the losses behind that mass are not known."""
        return xp.where(self.log_moment > -xp.inf, xp.inf, super().top_of(part))


def _with_tail(law: Any, order: Any, direction: str) -> Mechanism:
    known = has_finite_law(law, direction)
    tail = xp.vmap(lambda one: one.log_tail(order, direction))(law) if known else None
    return law if tail is None else _WithTail(law, tail)


def _in_closed_form(mechanism: Mechanism, direction: str) -> bool:
    """Whether ``renyi_divergence`` holds in this direction: it describes the pair of "remove", not the swapped pair."""
    known = direction != "reverse" or mechanism.symmetric or isinstance(mechanism, RandomAllocation)
    return known and mechanism.offers("renyi_divergence")


def _blur(stacks: tuple[Stack, ...], *_: Any) -> float:
    """Absolute difference of K allowed between a program and NumPy; small losses make K the log of a number near 1."""
    return 1e-11 * sum(float(np.sum(times)) for _, times in stacks)


def _blur_of_renyi(stacks: tuple[Stack, ...], order: Any) -> float:
    return _blur(stacks) / max(order - 1, _SMALLEST)


def _by_numpy(stacks: tuple[Stack, ...], points: Any, *, direction: str) -> int:
    """Points that NumPy computes before a program is compiled; on a CPU the program of shuffled rounds is no faster."""
    if platform() == "cpu" and any(isinstance(record, Shuffled) for record, _ in stacks):
        return 10**6
    return 2048 if many((stacks, points)) and _at_once(stacks, direction=direction) > 1 else 256


def _at_once(stacks: tuple[Stack, ...], *_: Any, direction: str) -> int:
    """Points that NumPy computes together; alone where the arrays of one point are so large that nothing is gained."""
    large = (isinstance(r, Shuffled | RandomAllocation) or has_finite_law(r, direction) for r, _ in stacks)
    return 1 if any(large) else 64


@kernel(working_set=400_000, by_numpy=_by_numpy, at_once=_at_once, absolute=_blur_of_renyi)
def renyi_kernel(stacks: tuple[Stack, ...], order: Any, *, direction: str) -> Any:
    """Certified upper bound of R_order, order > 1 (inf allowed), of one parameter point."""
    finite = xp.isfinite(order) & (order > 1)
    alpha = xp.where(finite, order, 2.0)
    direct = [(r, t) for r, t in stacks if _in_closed_form(r, direction)]
    c = xp.maximum(alpha - 1, _SMALLEST) + xp.asarray(_NUDGES)
    others = tuple((_with_tail(r, 1 + c[-1], direction), t) for r, t in stacks if not _in_closed_form(r, direction))
    total = xp.zeros(())
    for mechanism, times in direct:
        directed = {"direction": direction} if isinstance(mechanism, RandomAllocation) else {}
        values = xp.vmap(lambda r, given=directed: r.renyi_divergence(alpha, **given))(mechanism)
        total = total + xp.sum(xp.where(times > 0, times * values, 0.0))
    total = total * (1 + 1e-12)
    composed = spectrum((*direct, *others), direction)
    if others:
        total = total + _from_moments(others, c, alpha, direction)
    total = xp.minimum(total, xp.maximum(composed.top, 0.0))
    total = xp.where(composed.infinity > 0, xp.inf, total)
    answer = xp.where(finite, total, xp.where(composed.infinity > 0, xp.inf, xp.maximum(composed.top, 0.0)))
    return xp.where((order > 1) & ~xp.isnan(answer), answer, xp.inf)


def optimal_order(stacks: tuple[Stack, ...], target: Any, *, verb: str, direction: str) -> Any:
    """Upper bound of epsilon, or of log delta, from the Renyi divergences of 24 orders (Canonne, Kamath, Steinke 2020).

    delta <= exp((order - 1) (R - epsilon)) (1 - 1/order)^(order - 1)/order.
    """
    divergence = xp.vmap(lambda order: renyi_kernel.point(stacks, order, direction=direction))(xp.asarray(_ORDERS))
    log_share = (_ORDERS - 1) * np.log1p(-1 / _ORDERS) - np.log(_ORDERS)
    if verb == "delta":
        return xp.min((_ORDERS - 1) * (divergence - target) + log_share) + 1e-12 * (1 + xp.abs(target))
    found = divergence + (log_share - xp.log(target)) / (_ORDERS - 1)
    return xp.maximum(xp.min(found * (1 + 1e-12) + 1e-12), 0.0)


def _without_quadrature(stacks: tuple[Stack, ...], c: Any, order: Any, direction: str) -> Any:
    """Bounds for sampled Gaussian noise where the quadrature fails: without sampling; replace_one also from remove.

    Under replace_one the density of the second law is at least 1 - q times that of P0, the second law for remove. The
    pair's moment is therefore at most (1-q)^(1-order) times the moment of the pair for remove.
    """
    if not all(is_sampled_gaussian(mechanism, direction) for mechanism, _ in stacks):
        return xp.inf
    total = by_middle = xp.zeros(())
    for mechanism, times in stacks:
        sampled: Any = mechanism
        each, q = gaussian_renyi(order, gaussian_mus(sampled.unsampled(direction))), sampled.sampling_probability
        total = total + xp.sum(xp.where(times > 0, times * each, 0.0))
        known = xp.where(q < 1, -times * log_mass(xp.where(q < 1, 1 - q, 1.0)), xp.inf)
        by_middle = by_middle + xp.sum(xp.where(times > 0, known, 0.0))
    if direction == "replace":
        total = xp.minimum(total, _from_moments(stacks, c, order, "forward") + by_middle)
    return total * (1 + 1e-12)


def _from_moments(stacks: tuple[Stack, ...], c: Any, order: Any, direction: str) -> Any:
    by_moment = xp.min(spectrum(stacks, direction).real(c, xp.asarray(xp.inf), _SIZE) / c)
    return xp.minimum(by_moment, _without_quadrature(stacks, c, order, direction))


@kernel(working_set=400_000, by_numpy=_by_numpy, at_once=_at_once, absolute=_blur)
def log_mgf_kernel(stacks: tuple[Stack, ...], z: Any, *, direction: str) -> Any:
    """K(z) of one parameter point at one complex z: an estimate, relative error 1e-12 in exp(K) per step."""
    composed = spectrum(stacks, direction)
    total = composed.closed(z)
    for part in composed.sampled:
        total = total + _sampled(composed, part, z, direction)
    for atoms in composed.discrete:
        total = total + counted(atoms, log_sum_exp(atoms.log_weight + z * atoms.loss))
    return total


def _sampled(composed: Spectrum, part: Any, z: Any, direction: str) -> Any:
    """T log m(z). The line's abscissa must be >= -1/2: further left, the swapped pair is evaluated at -1 - z."""

    def half_plane(w: Any, side: str) -> Any:
        c, t = xp.real(w), xp.imag(w)
        make = xp.vmap(tilted_line, in_axes=(None, 0, 0, None, None, None))
        lines = make(c, part.mu, part.rate, xp.asarray(xp.inf), side, _SIZE)
        ratio = xp.sum(lines.weight * xp.exp(1j * xp.abs(t) * lines.loss), axis=-1)
        value = lines.log_m + xp.log(xp.where(t < 0, xp.conj(ratio), ratio))
        return counted(part, value)

    right = xp.real(z) >= -0.5
    return xp.where(
        right,
        half_plane(xp.where(right, z, 0.0), direction),
        half_plane(xp.where(right, 0.0, -1 - z), SWAPPED[direction]),
    )
