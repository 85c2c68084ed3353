"""What a mechanism is: an immutable record of numbers plus its one formula, K(z)."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

RELATIONS = ("add", "remove", "add_or_remove", "replace_one")
# The neighbouring relation decides which dominating pairs must hold; each is composed on its own.
FORWARD, REVERSE, REPLACE = "forward", "reverse", "replace"
T = TypeVar("T", bound=type)


class UnsupportedMechanismError(ValueError):
    """No theorem is known for this combination, or it would need data the record does not hold."""


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is configuration, not a number: part of the pytree's structure."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@typing.dataclass_transform(frozen_default=True)
def record(cls: T) -> T:
    """Class decorator: frozen dataclass, registered as a pytree whose leaves are the numeric fields."""
    made: Any = cls
    if "__post_init__" not in cls.__dict__:
        made.__post_init__ = _lists_to_arrays
    made = dataclasses.dataclass(frozen=True, eq=False)(made)
    fields = dataclasses.fields(made)
    register_by_class(
        made,
        [f.name for f in fields if not f.metadata.get("static")],
        [f.name for f in fields if f.metadata.get("static")],
    )
    return made


def register_by_class(cls: Any, data: list[str], static: list[str]) -> None:
    """Make a dataclass a pytree whose tree structure differs from that of every other class.

    `jax.tree_util.register_dataclass` does not do: up to jax 0.10.1 at least, the structures of two such classes
    with as many leaves compare equal, and jit may then run what it compiled for the one on the other.
    """

    def flatten_with_keys(instance: Any) -> tuple[Any, Any]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in data]
        return children, (cls, *(getattr(instance, name) for name in static))

    def flatten(instance: Any) -> tuple[Any, Any]:
        return [getattr(instance, name) for name in data], (cls, *(getattr(instance, name) for name in static))

    def unflatten(kept: Any, children: Any) -> Any:
        return cls(**dict(zip(data, children, strict=True)), **dict(zip(static, kept[1:], strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def _lists_to_arrays(self: Any) -> None:
    """A list of numbers is an array, not a pytree of its entries. Values are checked by the verbs."""
    for name in (field.name for field in dataclasses.fields(self)):
        value = getattr(self, name)
        if isinstance(value, (list, tuple)) and not any(isinstance(v, Mechanism) for v in value):
            traced = any(isinstance(v, jax.core.Tracer) for v in jax.tree_util.tree_leaves(value))
            numeric = jnp.asarray(value) if traced else np.asarray(value)
            object.__setattr__(self, name, numeric if value != () else value)


class Mechanism:
    """Base class of every mechanism; derive from it to account for one of your own.

    Write a class decorated with `record`, with your parameters as fields, and one method
    ``log_mgf(self, z)``: the log moment generating function of the privacy loss,

        K(z) = log E_P[exp(z L); L finite],   L = log dP/dQ,

    for a complex array ``z`` and scalar fields (no batch axes: the library maps over grids). Take
    (P, Q) dominating for "remove"; "add" is read off as K(-1 - z). If P has mass where Q has none,
    return it from ``infinity_mass``; if Q has mass where P has none, from ``reverse_infinity_mass``.
    A method ``finite_pair() -> (log_p, log_q)`` (log masses over finitely many outcomes, -inf for none) lets
    it be sampled.
    The accountant assumes that ``log_mgf`` is accurate to ``unit_errors`` units of roundoff.

    Attributes:
        event_ndim: trailing axes of a field that belong to one mechanism (default 0 each).
        relations: accepted neighbouring relations, the natural one first.
        symmetric: True when (P, Q) and (Q, P) have the same privacy profile.
        exact: False when K belongs to a pair that only dominates: a lower bound then needs a ``bracket``.
        unit_errors: bound on the relative error of exp(K), in units of 2^-53.
    """

    event_ndim: ClassVar[Mapping[str, int]] = {}
    relations: ClassVar[tuple[str, ...]] = ("add_or_remove", "add", "remove", "replace_one")
    symmetric: ClassVar[bool] = False
    unit_errors: ClassVar[float] = 64.0
    exact: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) of the dominating pair for one parameter point; z may be complex, any shape."""
        raise UnsupportedMechanismError(f"{type(self).__name__} does not define log_mgf.")

    def infinity_mass(self) -> Any:
        """P(L = +infinity)."""
        return 0.0

    def reverse_infinity_mass(self) -> Any:
        """Q(dP = 0), the mass at infinity of the swapped pair."""
        return 0.0

    def max_loss(self) -> Any:
        """Supremum of the finite losses (infinity when unbounded)."""
        return jnp.inf

    def min_loss(self) -> Any:
        """Infimum of the finite losses."""
        return -self.max_loss() if self.symmetric else -jnp.inf

    def simplified(self) -> Mechanism:
        """An equal record that the accountant works on."""
        return self

    def masses_at_infinity(self, direction: str) -> tuple[Any, Any]:
        """Mass at infinity of the pair of a direction, and of its swap."""
        masses = self.infinity_mass(), self.reverse_infinity_mass()
        return masses[::-1] if direction == REVERSE and not self.symmetric else masses

    def top_loss(self, direction: str) -> Any:
        """Supremum of the finite losses of the pair of a direction."""
        return -self.min_loss() if direction == REVERSE and not self.symmetric else self.max_loss()

    def is_exact(self, direction: str) -> bool:
        """False when the pair of this direction only dominates."""
        return self.exact

    def finite_pair_is_exact(self) -> bool:
        """False when ``finite_pair`` only dominates the mechanism's pair."""
        return self.exact

    def bracket(self, fine: bool, reach: Any = None) -> tuple[Mechanism, Mechanism] | None:
        """For a record that is not exact: one that dominates its pair and one that it dominates, if both are known.

        Of concrete fields, with their batch axes; both of one structure. fine: see ``refinable``.
        reach: standard deviations of one run's loss from its mean that matter, None if unknown; any shape that
        broadcasts with the fields. It moves nothing but the distance of the two.
        """
        return None

    def hopeless(self, runs: Any) -> Any:
        """Where a ``bracket`` that is not fine is mostly too wide for the usual gap, of so many runs in all."""
        return np.zeros(np.shape(runs), bool)

    def refinable(self, direction: str) -> bool:
        """Whether a fine ``bracket`` is narrower than one that is not, at a higher cost."""
        return False

    def validate(self) -> None:
        """Check concrete field values; ValueError naming the field. Called by the verbs."""

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The dominating pairs that a relation asks for."""
        if relation is None:
            relation = self.relations[0]
        if relation not in RELATIONS:
            raise ValueError(f"relation must be one of {', '.join(map(repr, RELATIONS))} or None, got {relation!r}.")
        if relation not in self.relations:
            raise UnsupportedMechanismError(
                f"no theorem is known for {type(self).__name__} under relation {relation!r}; "
                f"available: {', '.join(map(repr, self.relations))}."
            )
        if self.symmetric:
            return (FORWARD,)
        if relation == "replace_one":
            return self.replace_directions()
        return {"remove": (FORWARD,), "add": (REVERSE,), "add_or_remove": (FORWARD, REVERSE)}[relation]

    def replace_directions(self) -> tuple[str, ...]:
        """Pairs that cover replace-one; by default the record's pair is stated for the caller's relation."""
        return (FORWARD, REVERSE)


class GaussianMechanism(Mechanism):
    """A mechanism whose trade-off function is exactly (or at least) that of N(mu, 1) against N(0, 1)."""

    symmetric: ClassVar[bool] = True

    def gaussian_mu(self) -> Any:
        """The Gaussian-DP parameter mu of one parameter point."""
        raise UnsupportedMechanismError(f"{type(self).__name__} does not define gaussian_mu.")

    def renyi_divergence(self, order: Any) -> Any:
        """order mu^2 / 2."""
        mu = self.gaussian_mu()
        return order * mu * mu / 2  # in this order: the square of a small mu is 0

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) = z (z + 1) mu^2 / 2 (Zhu, Dong, Wang 2022, Lemma 34)."""
        return z * (z + 1) * (self.gaussian_mu() ** 2 / 2)
