"""The spectrum (K(z), atoms, masses at infinity) of a composed mechanism, from its normal form."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.contour.spectrum import MASS_ROUNDING, Discrete, Sampled, Spectrum
from jaxdp.mechanisms.base import FiniteLaw, Mechanism
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.gaussian import GaussianMechanism, gaussian_mus
from jaxdp.mechanisms.sampled import Sampled as SampledRecord
from jaxdp.numerics.special import log_complement
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array
from jaxdp.validate import is_traced

_NOT_REAL = 1e-6  # K is real on the real axis; a larger imaginary part there means that the expectation diverges


def is_sampled_gaussian(record: Mechanism, direction: str | None = None) -> bool:
    """Whether the record's K needs the quadrature for sampled Gaussian noise (direction None: in some direction)."""
    return isinstance(record, SampledRecord) and record.needs_quadrature(direction)


def has_finite_law(record: Mechanism, direction: str | None = None) -> bool:
    """Whether the record's K is a sum over the atoms of a finite law (direction None: in every direction)."""
    return isinstance(record, FiniteLaw) and not is_sampled_gaussian(record, direction)


def spectrum(stacks: tuple[Stack, ...], direction: str) -> Spectrum:
    """The spectrum of one parameter point (the stacks have no batch axis) in one direction."""
    sampled: list[tuple[Any, Array]] = [(r, t) for r, t in stacks if is_sampled_gaussian(r, direction)]
    closed = [(r, t) for r, t in stacks if not isinstance(r, FiniteLaw)]
    finite = [(r, t) for r, t in stacks if has_finite_law(r, direction)]
    laws = [xp.vmap(lambda member: _law(member, direction))(record) for record, _ in finite]
    masses = [(_masses(record, direction), times) for record, times in closed]
    masses += [(at_infinity, times) for (_, at_infinity, _), (_, times) in zip(laws, finite, strict=True)]
    tops = [_top(record, times, direction) for record, times in sampled + closed]
    tops += [_sum_of_tops(top, times) for (*_, top), (_, times) in zip(laws, finite, strict=True)]
    return Spectrum(
        closed=_closed_sum(closed, direction),
        closed_units=sum((xp.sum(t) * r.unit_errors for r, t in closed), xp.zeros(())),
        mu2=_mu2(closed),
        sampled=tuple(Sampled(gaussian_mus(r.mechanism), r.sampling_probability, t) for r, t in sampled),
        discrete=tuple(Discrete(*_with_mass(atoms), t) for (atoms, *_), (_, t) in zip(laws, finite, strict=True)),
        direction=direction,
        infinity=_composed_mass([(at_infinity[0], times) for at_infinity, times in masses]),
        reverse_infinity=_composed_mass([(at_infinity[1], times) for at_infinity, times in masses]),
        top=sum(tops, xp.zeros(())),
        lattice=_lattice(stacks, direction),
        log_modulus=_log_modulus([(r, t) for r, t in closed if r.offers("log_modulus")]),
        knows_top=all(r.offers(_name_of_top(r, direction)) for r, _ in closed),
        gaussian=not laws and all(isinstance(r, GaussianMechanism) for r, _ in closed),
    )


def _law(record: Any, direction: str) -> tuple[Any, Any, Any]:
    """(atoms, masses at infinity, largest loss) of a record with a finite law; computes the law only once."""
    part = record.part(direction)
    return jax.tree_util.tree_map(lambda x: xp.asarray(x, xp.float64), (part[:3], part[3:], record.top_of(part)))


def _with_mass(atoms: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The atoms of a stack of laws; of concrete laws, only the atoms that have mass in some law."""
    if is_traced(atoms):
        return atoms
    live = np.any(np.asarray(atoms[1]) > -np.inf, axis=0)
    live[0] = True  # keep one atom where all mass is at infinity
    loss, log_weight, blur = (part[:, live] for part in atoms)
    return loss, log_weight, blur


def _closed_sum(closed: list[Stack], direction: str) -> Callable[[jax.Array], jax.Array]:
    def total(z: jax.Array) -> jax.Array:
        result = xp.zeros(xp.shape(z), xp.complex128)
        for record, times in closed:
            argument = -1 - z if direction == "reverse" and not record.symmetric else z
            values = xp.vmap(lambda r, w=argument: xp.broadcast_to(r.log_mgf(w), xp.shape(w)))(record)
            # Where E_P[exp(z L)] diverges, a formula with logarithms has a finite value, which is not real.
            values = xp.where((xp.imag(z) == 0) & (xp.abs(xp.imag(values)) > _NOT_REAL), xp.inf, values)
            weights = times.reshape(times.shape + (1,) * xp.ndim(z))
            result = result + xp.sum(xp.where(weights > 0, weights * values, 0.0), axis=0)
        return result

    return total


def _log_modulus(known: list[Stack]) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    def total(low: jax.Array, high: jax.Array) -> jax.Array:
        result = xp.zeros_like(low)
        for record, times in known:
            each = xp.vmap(lambda r: xp.broadcast_to(r.log_modulus(low, high), xp.shape(low)))(record)
            result = result + xp.sum(xp.where(times > 0, times, 0.0)[:, None, None] * each, axis=0)
        return result

    return total if known else None


def _mu2(closed: list[Stack]) -> Array:
    total = xp.zeros(())
    for record, times in closed:
        if isinstance(record, GaussianMechanism):
            total = total + xp.sum(xp.where(times > 0, times * gaussian_mus(record) ** 2, 0.0))
    return total * (1 - 1e-14)  # rounded down


def _masses(record: Mechanism, direction: str) -> tuple[Array, Array]:
    return xp.vmap(lambda r: tuple(xp.asarray(mass, xp.float64) for mass in r.masses_at_infinity(direction)))(record)


def _composed_mass(masses: list[tuple[Array, Array]]) -> Array:
    """1 - prod (1 - mass)^times, rounded up; a single mass is returned unchanged, so that delta can equal it."""
    count = single = log_none = xp.zeros(())
    for mass, times in masses:
        live = (times > 0) & (mass > 0)
        safe = xp.where(live, xp.minimum(mass, 1.0), 0.0)
        count, single = count + xp.sum(xp.where(live, times, 0.0)), single + xp.max(xp.where(live, mass, 0.0))
        log_none = log_none + xp.sum(times * log_complement(safe, 1 - safe))
    return xp.where(count <= 1, single, xp.minimum(-xp.expm1(log_none) * (1 + MASS_ROUNDING), 1.0))


def _top(record: Any, times: Array, direction: str) -> Array:
    if is_sampled_gaussian(record, direction):
        rate = xp.where(gaussian_mus(record.mechanism) == 0, 0.0, record.sampling_probability)  # no shift: no loss
        if direction != "reverse":
            return xp.sum(xp.where((rate == 0) | (times == 0), 0.0, xp.inf))
        bounded = xp.where(rate < 1, -xp.log1p(-xp.where(rate < 1, rate, 0.0)), xp.inf)
        # The factor covers XLA's log1p, which is up to 129 ULP off (jax-ml/jax 39707).
        return _sum_of_tops(xp.where(rate == 0, 0.0, bounded), times) * (1 + 1e-13)
    largest = xp.vmap(lambda r: xp.asarray(r.top_loss(direction), xp.float64))(record)
    return _sum_of_tops(largest, times)


def _name_of_top(record: Mechanism, direction: str) -> str:
    return "min_loss" if direction == "reverse" and not record.symmetric else "max_loss"


def _sum_of_tops(largest: Array, times: Array) -> Array:
    bounded = largest < xp.inf  # masks infinity, whose product with `times` has no derivative
    total = xp.where(bounded, times * xp.where(bounded, largest, 0.0), xp.inf)
    return xp.sum(xp.where(times > 0, total, 0.0)) * (1 + 1e-15 * times.shape[-1])


def on_lattice(stacks: tuple[Stack, ...]) -> bool:
    """Whether the stacks are one mechanism (repeated or not) whose losses lie on a lattice."""
    return len(stacks) == 1 and stacks[0][1].shape[-1] == 1 and stacks[0][0].offers("lattice")


def _lattice(stacks: tuple[Stack, ...], direction: str) -> tuple[Array, Array] | None:
    if not on_lattice(stacks):
        return None
    record, times = stacks[0]
    offset, spacing = xp.vmap(lambda r: r.lattice())(record)
    sign = -1.0 if direction == "reverse" and not record.symmetric else 1.0  # the swapped pair has the losses -L
    return sign * times[0] * offset[0], xp.abs(spacing[0])  # a lattice with step -s is one with step s
