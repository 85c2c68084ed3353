"""K(z) = log E e^{zL} of one composed mechanism, on the real axis and at the nodes of a vertical line Re z = c."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxdp.numerics.exponential_sums import Line, discrete_line, discrete_log_m, log_ratios
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.moment import real_log_m, tail_mass, tilted_line

SWAPPED = {"forward": "reverse", "reverse": "forward", "replace": "replace"}
MASS_ROUNDING = 2.0**-42
"""Relative amount by which a composed mass at infinity is rounded up; it is a sum of up to some hundred logarithms."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A stack of sampled Gaussians; each field has the shape (stack,)."""

    mu: Any  # 1/sigma
    rate: Any  # sampling rate
    times: Any  # number of steps


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A stack of finite laws of the loss L."""

    loss: Any  # (stack, atoms)
    log_weight: Any  # (stack, atoms): log probabilities under P
    blur: Any  # (stack, atoms): bounds of the errors of ``loss``
    times: Any  # (stack,): number of steps with this law

    def kept(self, cut: jax.Array) -> jax.Array:
        """Log weights; -inf for the largest losses, as many as have a mass of at most exp(-cut^2/2) together."""
        order = xp.argsort(-self.loss, axis=-1)
        tail = xp.cumsum(xp.exp(xp.take_along_axis(self.log_weight, order, -1)), axis=-1)
        beyond = tail > xp.exp(-0.5 * cut * cut)
        last = xp.max(xp.where(beyond, xp.take_along_axis(self.loss, order, -1), -xp.inf), axis=-1, keepdims=True)
        return xp.where(self.loss <= last, self.log_weight, -xp.inf)


def counted(part: Sampled | Discrete, x: jax.Array) -> jax.Array:
    """Sum of times * x over the stack, which is the last axis of x; entries with times = 0 do not count."""
    return xp.sum(xp.where(part.times > 0, part.times * x, 0.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """The total K(z) of one parameter point, split into parts by the method of evaluation.

    closed: K of all mechanisms with a formula, all their steps included. closed_units: bound of the relative error of
    exp(closed), in units of 2^-53. mu2: lower bound of the total mu^2 of the Gaussians in ``closed``. sampled: parts
    that need quadrature. discrete: parts that are sums over atoms.
    log_modulus: upper bound of log |exp(closed(c + it) - closed(c))| for t between two numbers; None stands for 0.
    infinity, reverse_infinity: upper bounds of the masses at infinity of the pair and of the swapped pair.
    top: upper bound of the supremum of L. lattice: (offset, spacing) if all finite losses lie in offset + spacing Z.
    """

    closed: Callable[[jax.Array], jax.Array]
    closed_units: Any
    mu2: Any
    sampled: tuple[Sampled, ...]
    discrete: tuple[Discrete, ...]
    direction: str
    infinity: Any
    reverse_infinity: Any
    top: Any
    lattice: tuple[Any, Any] | None = None
    log_modulus: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    knows_top: bool = True  # False: infinite ``top`` may only mean that a record does not say how large its losses are
    gaussian: bool = False  # whether all mechanisms are Gaussians, sampled or not

    @property
    def infinity_low(self) -> Any:
        """Lower bound of the mass at infinity."""
        return xp.where(self.infinity < 1e-307, 0.0, self.infinity * (1 - 2 * MASS_ROUNDING))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The sampled and the discrete parts, in the order of ``lines``."""
        return (*self.sampled, *self.discrete)

    def real(self, c: jax.Array, cut: jax.Array, size: int) -> jax.Array:
        """Upper bound of K(c) for each c > 0 of a vector; inf where the quadrature gives no bound."""
        return self._real(c, c, cut, max(size // 2, 64), self.direction)

    def rough(self, c: jax.Array, cut: jax.Array, size: int) -> jax.Array:
        """K(c) to a few percent, for choosing c; inf where the quadrature gives no estimate."""
        return self._real(c, c, cut, max(size // 8, 32), self.direction, rough=True)

    def real_swapped(self, c: jax.Array, cut: jax.Array, size: int) -> jax.Array:
        """Upper bound of K(-1 - c), which is K of the swapped pair at c > 0. No tail cut: it would make K too small."""
        return self._real(-1 - c, c, xp.full_like(cut, xp.inf), max(size // 2, 64), SWAPPED[self.direction])

    def _real(
        self, z: jax.Array, c: jax.Array, cut: jax.Array, size: int, direction: str, rough: bool = False
    ) -> jax.Array:
        total = xp.real(self.closed(z.astype(xp.complex128)))
        total = total + self.closed_units * _ULP + 4 * _ULP * xp.abs(total)
        for part in self.sampled:
            log_m, off = real_log_m(c[:, None], part.mu, part.rate, cut, direction, size, rough)
            total = total + counted(part, log_m + off)
        for atoms in self.discrete:
            log_m, error = discrete_log_m(z[:, None], atoms.loss, atoms.kept(cut), atoms.blur)
            log_m = log_m + 8 * _ULP * xp.abs(log_m) + error * (1 + 1e-6)
            total = total + counted(atoms, log_m)
        return xp.where(xp.isnan(total), xp.inf, total)

    def lines(self, c: jax.Array, cut: jax.Array, size: int) -> list[Line]:
        """The one-step laws tilted to c: one stacked Line for each entry of ``parts``."""
        make = xp.vmap(tilted_line, in_axes=(None, 0, 0, 0, None, None))
        sampled = [make(c, p.mu, p.rate, xp.broadcast_to(cut, p.mu.shape), self.direction, size) for p in self.sampled]
        law = xp.vmap(discrete_line, in_axes=(None, 0, 0, 0))
        return sampled + [law(c, d.loss, d.kept(cut), d.blur) for d in self.discrete]

    def step_count(self) -> jax.Array:
        """Total number of steps of the sampled and discrete parts, at least 1."""
        total = sum((xp.sum(part.times) for part in self.parts), xp.zeros(()))
        return xp.maximum(total, 1.0)

    def log_kept(self, cut: jax.Array) -> jax.Array:
        """Lower bound of the log of the probability that no step has an outcome beyond the cut."""
        kept = xp.zeros(())
        for atoms in self.discrete:
            dropped = xp.minimum(xp.exp(-0.5 * cut * cut) * 1.001, 0.5)
            kept = kept + counted(atoms, xp.log1p(-dropped))
        if self.direction == "reverse":
            return kept
        for part in self.sampled:
            tail = tail_mass(part.mu, part.rate, xp.broadcast_to(cut, part.mu.shape))
            kept = kept + counted(part, xp.log1p(-xp.minimum(tail, 0.5)))
        return kept


@dataclasses.dataclass(frozen=True)
class Nodes:
    """K(c + it) - K(c) at equally spaced t: real part log_abs, imaginary part phase.

    The relative error of M = e^K is at most e^excess - 1, for the loss L + S: S is an unknown number, the same at all
    nodes, with |S| <= shift.
    """

    log_abs: jax.Array
    excess: jax.Array
    phase: jax.Array
    shift: jax.Array


def along_line(spectrum: Spectrum, lines: list[Line], c: jax.Array, step: jax.Array, count: int) -> Nodes:
    """K(c + it) - K(c) at t = step (0..count-1), with an error bound for each node; K(c) is the true one.

    If m of each step is off by at most e, then M is off by at most prod (|m| + e)^T - prod |m|^T.
    """
    t = step * xp.arange(count)
    z = xp.complex(xp.full_like(t, c), t)
    base = spectrum.closed(xp.asarray(c, xp.complex128))
    value = spectrum.closed(z) - base
    log_abs, phase = xp.real(value), xp.imag(value)
    total_turn = xp.abs(phase)
    excess = (spectrum.closed_units + 4 * (xp.abs(base) + xp.abs(value)) + 16) * _ULP
    shift = xp.zeros(())
    for part, line in zip(spectrum.parts, lines, strict=True):
        log_size, angle, error, shifts = xp.vmap(lambda one: log_ratios(one, step, count))(line)
        times = part.times[:, None]
        shift = shift + xp.sum(xp.where(part.times > 0, part.times * shifts, 0.0))
        log_size, angle, error = (xp.where(times > 0, times * x, 0.0) for x in (log_size, angle, xp.log1p(error)))
        log_abs, phase, total_turn = (
            total + xp.sum(x, axis=0) for total, x in ((log_abs, log_size), (phase, angle), (total_turn, xp.abs(angle)))
        )
        excess = excess + xp.sum(error + 4 * _ULP * xp.abs(log_size), axis=0)
    # `node_weights` charges 2 units of |phase|; the phases of the parts may have a larger sum of moduli
    return Nodes(log_abs, excess + 2 * _ULP * xp.maximum(total_turn - xp.abs(phase), 0.0), phase, shift)
