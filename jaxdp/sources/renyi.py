"""Renyi divergence and K(z) of a composed mechanism: sums over its parts."""

from typing import Any

import numpy as np

from jaxdp.contour.spectrum import SWAPPED, Spectrum, counted
from jaxdp.domains import FINITE, field
from jaxdp.mechanisms.allocation import RandomAllocation
from jaxdp.mechanisms.base import FiniteLaw, Mechanism, record
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.finite import Part, log_mass
from jaxdp.mechanisms.gaussian import gaussian_mus, gaussian_renyi
from jaxdp.mechanisms.spectrum import has_finite_law, is_sampled_gaussian, spectrum
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import kernel
from jaxdp.sampled_gaussian.moment import tilted_line
from jaxdp.typing import Number, RealField

_SIZE = 1024
# R is nondecreasing in the order: close to 1, where K(c)/c cancels, a slightly larger order bounds it better.
_NUDGES = (0.0, 1e-4, 1e-2)
_SMALLEST = 1e-5
_ORDERS = np.array([*range(2, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256], float)


@record
class _WithTail(FiniteLaw):
    """A record for one order: in place of mass at infinity an outcome that bounds the moment of what it stands for."""

    law: FiniteLaw
    log_moment: RealField = field(FINITE)

    def part(self, direction: str) -> Part:
        """The law, and one more outcome of loss 0."""
        made, nothing = self.law.part(direction), xp.zeros(1)
        log_weight = xp.concatenate([made.log_weight, xp.asarray(self.log_moment)[None]])
        return Part(xp.concatenate([made.loss, nothing]), log_weight, xp.concatenate([made.blur, nothing]), 0.0, 0.0)

    def top_of(self, part: Part) -> Number:
        """No bound of the outcomes that are not listed."""
        return xp.where(self.log_moment > -xp.inf, xp.inf, super().top_of(part))


def _with_tail(law: Any, order: Any, direction: str) -> Mechanism:
    known = has_finite_law(law, direction)
    tail = xp.vmap(lambda one: one.log_tail(order, direction))(law) if known else None
    return law if tail is None else _WithTail(law, tail)


def _blur(stacks: tuple[Stack, ...], *_: Any) -> float:
    """How much K may differ between a program and NumPy: of small losses it is the logarithm of nearly 1."""
    return 1e-11 * sum(float(np.sum(times)) for _, times in stacks)


def _blur_of_renyi(stacks: tuple[Stack, ...], order: Any) -> float:
    return _blur(stacks) / max(order - 1, _SMALLEST)


@kernel(static=("direction",), working_set=400_000, by_numpy=256, absolute=_blur_of_renyi)
def renyi_kernel(stacks: tuple[Stack, ...], order: Any, *, direction: str) -> Any:
    """Certified upper bound of R_order, order > 1 (inf allowed), of one parameter point."""
    finite = xp.isfinite(order) & (order > 1)
    alpha = xp.where(finite, order, 2.0)
    direct = [(r, t) for r, t in stacks if r.offers("renyi_divergence")]
    c = xp.maximum(alpha - 1, _SMALLEST) + xp.asarray(_NUDGES)
    rest = tuple((_with_tail(r, 1 + c[-1], direction), t) for r, t in stacks if not r.offers("renyi_divergence"))
    total = xp.zeros(())
    for mechanism, times in direct:
        directed = {"direction": direction} if isinstance(mechanism, RandomAllocation) else {}
        values = xp.vmap(lambda r, given=directed: r.renyi_divergence(alpha, **given))(mechanism)
        total = total + xp.sum(xp.where(times > 0, times * values, 0.0))
    total = total * (1 + 1e-12)
    made = spectrum((*direct, *rest), direction)
    if rest:
        total = total + _of_sums(rest, c, alpha, direction)
    total = xp.minimum(total, xp.maximum(made.top, 0.0))
    total = xp.where(made.infinity > 0, xp.inf, total)
    answer = xp.where(finite, total, xp.where(made.infinity > 0, xp.inf, xp.maximum(made.top, 0.0)))
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


def _of_sampled_gaussian(stacks: tuple[Stack, ...], c: Any, order: Any, direction: str) -> Any:
    """Other bounds for sampled Gaussian noise, where the quadrature cannot tell: without sampling, and by remove.

    Under replace_one the second law is at least 1 - q of the middle: the pair's moment is at most (1-q)^(1-order) times
    that for remove.
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
        total = xp.minimum(total, _of_sums(stacks, c, order, "forward") + by_middle)
    return total * (1 + 1e-12)


def _of_sums(stacks: tuple[Stack, ...], c: Any, order: Any, direction: str) -> Any:
    own = xp.min(spectrum(stacks, direction).real(c, xp.asarray(xp.inf), _SIZE) / c)
    return xp.minimum(own, _of_sampled_gaussian(stacks, c, order, direction))


@kernel(static=("direction",), working_set=400_000, by_numpy=256, absolute=_blur)
def log_mgf_kernel(stacks: tuple[Stack, ...], z: Any, *, direction: str) -> Any:
    """K(z) of one parameter point at one complex z (an estimate, 1e-12 relative in exp(K) per step)."""
    made = spectrum(stacks, direction)
    total = made.closed(z)
    for part in made.sampled:
        total = total + _sampled(made, part, z, direction)
    for atoms in made.discrete:
        exponents = atoms.log_weight + z * atoms.loss
        shift = xp.max(xp.real(exponents), axis=-1, keepdims=True)
        values = xp.log(xp.sum(xp.exp(exponents - shift), axis=-1)) + shift[..., 0]
        total = total + counted(atoms, values)
    return total


def _sampled(made: Spectrum, part: Any, z: Any, direction: str) -> Any:
    """T log m(z): the line's abscissa must be >= -1/2, so the left half plane is read off the swapped pair."""

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
