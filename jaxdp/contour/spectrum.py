"""What the inversion needs to know of one composed mechanism: K on the real axis and on vertical lines."""

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
"""By which a composed mass at infinity is rounded up, relative: a sum of up to some hundred logarithms."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A stack of sampled Gaussians: mu = 1/sigma, sampling rate and count, each of shape (stack,)."""

    mu: Any
    rate: Any
    times: Any


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A stack of finite laws of L: losses, log weights, errors of the losses (stack, atoms), counts (stack,)."""

    loss: Any
    log_weight: Any
    blur: Any
    times: Any

    def kept(self, cut: jax.Array) -> jax.Array:
        """Log weights without the largest losses, whose mass per step is at most exp(-cut^2/2)."""
        order = xp.argsort(-self.loss, axis=-1)
        tail = xp.cumsum(xp.exp(xp.take_along_axis(self.log_weight, order, -1)), axis=-1)
        beyond = tail > xp.exp(-0.5 * cut * cut)
        last = xp.max(xp.where(beyond, xp.take_along_axis(self.loss, order, -1), -xp.inf), axis=-1, keepdims=True)
        return xp.where(self.loss <= last, self.log_weight, -xp.inf)


def counted(part: Sampled | Discrete, x: jax.Array) -> jax.Array:
    """Sum over the stack, the last axis of x, each as often as it is run."""
    return xp.sum(xp.where(part.times > 0, part.times * x, 0.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """One point's total K(z), split by how it is evaluated. Built by the records, used by the contour.

    closed: K of everything with a formula, counts included; closed_units: bound on its relative error in
    exp(K), in units of 2^-53. mu2: the exact Gaussian share in ``closed``. sampled: quadrature parts.
    log_modulus: of |exp(closed(c + it) - closed(c))| between two t, the logarithm of a bound; None where it is 0.
    infinity, reverse_infinity: masses at infinity of the pair and of its swap, not less than they are. top: supremum of
    L, not less than it is.
    lattice: (offset, spacing) when every finite loss lies in offset + spacing Z, else None.
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

    @property
    def infinity_low(self) -> Any:
        """The mass at infinity, not more than it is."""
        return xp.where(self.infinity < 1e-307, 0.0, self.infinity * (1 - 2 * MASS_ROUNDING))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The quadrature parts, in the order of ``lines``."""
        return (*self.sampled, *self.discrete)

    def real(self, c: jax.Array, cut: jax.Array, size: int) -> jax.Array:
        """Upper bound of K(c) for each c > 0 of a vector (inf where the quadrature cannot tell)."""
        return self._real(c, c, cut, max(size // 2, 64), self.direction)

    def rough(self, c: jax.Array, cut: jax.Array, size: int) -> jax.Array:
        """K(c) to a few percent, for choosing c (inf where the quadrature cannot tell)."""
        return self._real(c, c, cut, max(size // 8, 32), self.direction, rough=True)

    def real_swapped(self, c: jax.Array, cut: jax.Array, size: int) -> jax.Array:
        """Upper bound of K(-1 - c), the swapped pair's K at c > 0. Uncut: the cut removes mass, a bound may not."""
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
        """The tilted one-step laws at c, one stacked Line per sampled part."""
        make = xp.vmap(tilted_line, in_axes=(None, 0, 0, 0, None, None))
        sampled = [make(c, p.mu, p.rate, xp.broadcast_to(cut, p.mu.shape), self.direction, size) for p in self.sampled]
        law = xp.vmap(discrete_line, in_axes=(None, 0, 0, 0))
        return sampled + [law(c, d.loss, d.kept(cut), d.blur) for d in self.discrete]

    def step_count(self) -> jax.Array:
        """Number of steps with a law of their own, at least 1."""
        total = sum((xp.sum(part.times) for part in self.parts), xp.zeros(()))
        return xp.maximum(total, 1.0)

    def log_kept(self, cut: jax.Array) -> jax.Array:
        """log of the chance that no step falls beyond the cut (lower bound)."""
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
    """K(c + it) - K(c) at equally spaced t: log modulus and phase; excess: M is off by e^excess - 1 of its modulus.

    They are those of a loss that is larger by one and the same number, at most ``shift`` in modulus.
    """

    log_abs: jax.Array
    excess: jax.Array
    phase: jax.Array
    shift: jax.Array


def along_line(spectrum: Spectrum, lines: list[Line], c: jax.Array, step: jax.Array, count: int) -> Nodes:
    """K on the vertical line through c at t = step (0..count-1), relative to the true K(c), with an error per node.

    Each m is off by at most e, so M is off by at most prod (|m| + e)^T - prod |m|^T.
    """
    t = step * xp.arange(count)
    z = xp.complex(xp.full_like(t, c), t)
    base = spectrum.closed(xp.asarray(c, xp.complex128))
    value = spectrum.closed(z) - base
    log_abs, phase = xp.real(value), xp.imag(value)
    turned = xp.abs(phase)
    excess = (spectrum.closed_units + 4 * (xp.abs(base) + xp.abs(value)) + 16) * _ULP
    shift = xp.zeros(())
    for part, line in zip(spectrum.parts, lines, strict=True):
        size, angle, error, moved = xp.vmap(lambda one: log_ratios(one, step, count))(line)
        times = part.times[:, None]
        shift = shift + xp.sum(xp.where(part.times > 0, part.times * moved, 0.0))
        size, angle, error = (xp.where(times > 0, times * x, 0.0) for x in (size, angle, xp.log1p(error)))
        log_abs, phase, turned = (
            total + xp.sum(x, axis=0) for total, x in ((log_abs, size), (phase, angle), (turned, xp.abs(angle)))
        )
        excess = excess + xp.sum(error + 4 * _ULP * xp.abs(size), axis=0)
    # phases of many parts may be larger than their sum, which is what `node_weights` charges
    return Nodes(log_abs, excess + 2 * _ULP * xp.maximum(turned - xp.abs(phase), 0.0), phase, shift)
