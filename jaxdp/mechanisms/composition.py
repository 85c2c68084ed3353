"""Composition: `compose`, `repeat`, and the normal form of a composition that the accountant works on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import field, whole
from jaxdp.mechanisms.base import RELATIONS, Mechanism, UnsupportedMechanismError, record
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.mechanisms.text import as_text
from jaxdp.runtime import formulas
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.runtime.backend import x64
from jaxdp.typing import Array, Number, Real, RealField, Relation


@record
class Repeated(Mechanism):
    """A mechanism repeated adaptively; ``times`` counts the runs. Made by `repeat`.

    Assumes: the record and the number of runs are fixed in advance. The query of a run may depend on all that was
    released before; its noise and sampling may not. If the number of runs does, state the largest number allowed.
    """

    mechanism: Mechanism
    times: RealField = field(whole(0), remedy="A mechanism runs a whole number of times.")

    def at_distance(self, distance: Number) -> Mechanism:
        """The mechanism at this distance, repeated equally often."""
        return dataclasses.replace(self, mechanism=self.mechanism.at_distance(distance))

    def under(self, relation: str) -> Mechanism:
        """The mechanism under the relation, repeated equally often."""
        return dataclasses.replace(self, mechanism=self.mechanism.under(relation))

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The directions of the repeated mechanism."""
        return self.mechanism.directions(relation)

    def __repr__(self) -> str:
        return f"repeat({self.mechanism!r}, {as_text(self.times)})"


@record
class Composed(Mechanism):
    """Adaptive composition of different mechanisms. Made by `compose`.

    Assumes: the list of records is fixed in advance. The query of a release may depend on all that was released
    before; its noise and sampling may not.
    """

    parts: tuple[Mechanism, ...]

    def at_distance(self, distance: Number) -> Mechanism:
        """The composition of the parts at this distance."""
        return Composed(tuple(part.at_distance(distance) for part in self.parts))

    def under(self, relation: str) -> Mechanism:
        """The composition of the parts under the relation."""
        return Composed(tuple(part.under(relation) for part in self.parts))

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The directions that at least one part needs; the pair of a symmetric part is the same in every direction."""
        relation = validate.choice("relation", relation, RELATIONS) or natural_relation(self)
        wanted = tuple(dict.fromkeys(direction for part in self.parts for direction in part.directions(relation)))
        asymmetric = [d for d in wanted if d != "forward"]
        if "replace" in asymmetric:
            if len(asymmetric) > 1:
                others = (atom for atom, _ in flatten(self) if "reverse" in atom.directions(relation))
                raise UnsupportedMechanismError(
                    "under replace_one a sampled mechanism must be composed with symmetric pairs only, got "
                    f"{_names(others)}. Use jaxdp.ApproximateDP(epsilon, delta) instead."
                )
            return ("replace",)
        if relation == "add":
            return ("reverse",) if asymmetric else ("forward",)
        return wanted or ("forward",)

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.parts))})"


BOTH_ORDERS = (
    "Use jaxdp.conversions.pair_from_profile(epsilons, deltas, symmetric=True) instead, with deltas for both orders."
)


def _names(mechanisms: Iterable[Mechanism]) -> str:
    return ", ".join(dict.fromkeys(type(each).__name__ for each in mechanisms))


def natural_relation(mechanism: Mechanism) -> Relation:
    """The relation that relation=None stands for; UnsupportedMechanismError if the parts' natural relations differ."""
    if isinstance(mechanism, Repeated):
        return natural_relation(mechanism.mechanism)
    if not isinstance(mechanism, Composed):
        return mechanism.relations[0]
    naturals = {natural_relation(part) for part in mechanism.parts}
    if len(naturals) > 1:
        atoms = [atom for atom, _ in flatten(mechanism)]
        common = [repr(each) for each in RELATIONS if each and all(each in atom.relations for atom in atoms)]
        remedy = f"give relation {' or '.join(common)}" if common else "none is known for all: account for them apart"
        raise UnsupportedMechanismError(
            f"the composed mechanisms have different natural relations ({', '.join(sorted(naturals))}): {remedy}."
        )
    return naturals.pop() if naturals else "add_or_remove"


def require_one_order(mechanism: Mechanism) -> None:
    """UnsupportedMechanismError if, under replace_one, two or more releases have a pair that depends on the order.

    A person's value may change from a to b in one release and from b to a in another.
    """
    ordered = []  # the releases whose pair depends on the order, up to 2 for each part
    for atom, times in flatten(mechanism):
        if len(atom.directions("replace_one")) > 1 and not atom.same_in_both_orders():
            runs = 2 if validate.is_traced(times) else int(np.clip(np.max(np.asarray(times), initial=0), 0, 2))
            ordered += [atom] * runs
    if len(ordered) > 1:
        raise UnsupportedMechanismError(
            "several releases under replace_one must have pairs with the same profile in both orders, to the last "
            f"digit, got {_names(ordered)}: a value may change from a to b in one release and from b to a in another. "
            f"{BOTH_ORDERS}"
        )


def compose(*mechanisms: Mechanism) -> Mechanism:
    """The adaptive composition of the mechanisms, in any order; without arguments a mechanism that releases nothing.

    Assumes: the list of records is fixed in advance. The query of a release may depend on all that was released
    before; its noise and sampling may not.

    >>> both = jaxdp.compose(jaxdp.Gaussian(2.0), jaxdp.Laplace(2.0))
    >>> print(f"{jaxdp.epsilon(both, delta=1e-5):.4f}")
    2.4152

    Raises TypeError for an argument that is not a mechanism.
    """
    for mechanism in mechanisms:
        if not isinstance(mechanism, Mechanism):
            raise TypeError(f"compose takes jaxdp mechanisms, got {type(mechanism).__name__}. Pass them as *args.")
    return Composed(tuple(mechanisms))


def repeat(mechanism: Mechanism, times: Real) -> Mechanism:
    """The mechanism composed with itself ``times`` times, adaptively.

    times: whole numbers >= 0, of any shape that broadcasts with the mechanism's fields. If the number of runs depends
        on what was released (early stopping), give the largest number allowed.

    >>> jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(10.0), times=[10, 100]), delta=1e-5).round(4)
    array([1.1994, 4.3772])

    Raises TypeError if ``mechanism`` is not a mechanism.
    """
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"repeat takes a jaxdp mechanism, got {type(mechanism).__name__}.")
    return Repeated(mechanism, times)


def everything(mechanism: Mechanism) -> Iterator[Mechanism]:
    """The mechanism and, recursively, every mechanism that it holds."""
    yield mechanism
    for each in held(mechanism):
        yield from everything(each)


def held(mechanism: Mechanism) -> list[Mechanism]:
    """The mechanisms in the fields of a mechanism."""
    values = [getattr(mechanism, each.name) for each in dataclasses.fields(mechanism)]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in parts if isinstance(part, Mechanism)]


def flatten(mechanism: Mechanism, times: Number = 1) -> list[tuple[Mechanism, Number]]:
    """(mechanism, number of runs) for each part of nested compositions and repetitions."""
    if isinstance(mechanism, Repeated):
        once = isinstance(times, int) and times == 1
        with np.errstate(over="ignore"):  # a product that overflows means infinitely many runs: vacuous bounds
            runs = mechanism.times if once else _numbers(times) * _numbers(mechanism.times)
        return flatten(mechanism.mechanism, runs)
    if isinstance(mechanism, Composed):
        return [pair for part in mechanism.parts for pair in flatten(part, times)]
    with x64() if mechanism.offers("simplified") else contextlib.nullcontext():
        return [(mechanism.simplified(), times)]


def event_dims(mechanism: Mechanism) -> list[int]:
    """For each leaf, in pytree order, the number of trailing axes that belong to one mechanism (event axes)."""
    dims: list[int] = []
    for each in dataclasses.fields(mechanism):
        if each.metadata.get("static"):
            continue
        value = getattr(mechanism, each.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Mechanism):
                dims += event_dims(part)
            else:
                dims += [mechanism.event_ndim.get(each.name, 0)] * len(jax.tree.leaves(part))
    return dims


def batch_shape(mechanism: Mechanism) -> tuple[int, ...]:
    """The shape to which a mechanism's leaves, without their event axes, broadcast."""
    if isinstance(mechanism, Composed):
        shapes = [batch_shape(part) for part in mechanism.parts]
    elif isinstance(mechanism, Repeated):
        shapes = [batch_shape(mechanism.mechanism), np.shape(mechanism.times)]
    else:
        leaves = jax.tree.leaves(mechanism)
        shapes = [np.shape(x)[: np.ndim(x) - n] for x, n in zip(leaves, event_dims(mechanism), strict=True)]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"the parameters of {type(mechanism).__name__} do not broadcast: shapes {shapes}. Add axes of length 1."
        ) from None


def flat_rows(mechanism: Mechanism, shape: tuple[int, ...]) -> Mechanism:
    """The mechanism with every leaf broadcast to the batch shape ``shape``, flattened to one leading axis."""
    leaves, tree = jax.tree.flatten(mechanism)
    rows = (formulas.flat_rows(_numbers(x), n, shape) for x, n in zip(leaves, event_dims(mechanism), strict=True))
    return jax.tree.unflatten(tree, rows)


def _numbers(value: Any) -> Any:
    return value if validate.is_traced(value) else np.asarray(value, np.float64)


def spread_axis(mechanism: Mechanism) -> Mechanism:
    """The mechanism with another batch axis, of length 1, at the end, to broadcast against a grid of targets."""
    shape = batch_shape(mechanism)
    return jax.tree.map(lambda leaf: leaf.reshape((*shape, 1, *leaf.shape[1:])), flat_rows(mechanism, shape))


# A stack: a record with leaves of shape (batch, members, *event), and the number of runs of each, (batch, members).
Stack = tuple[Mechanism, Array]


def normal_form(mechanism: Mechanism, shape: tuple[int, ...]) -> tuple[Stack, ...]:
    """The mechanisms of a composition as stacks: one stack, with numbers of runs, for each class and event shape.

    A thousand different Gaussians thus are one array and one term of the compiled program. Equal concrete records
    become one member, with the sum of their numbers of runs.
    """
    groups: dict[Any, list[tuple[Mechanism, Any]]] = {}
    for atom, times in flatten(mechanism):
        flat, count = flat_rows(atom, shape), formulas.flat_rows(_numbers(times), 0, shape)
        leaves, tree = jax.tree.flatten(flat)
        if not leaves:
            raise TypeError(f"{type(atom).__name__} must have a numeric field, for example one with a default.")
        key = (tree, tuple(x.shape[1:] for x in leaves))
        groups.setdefault(key, []).append((flat, count))
    return tuple(_stack(members) for members in groups.values())


def _stack(members: list[tuple[Mechanism, Any]]) -> Stack:
    if not validate.is_traced(members):
        members = _merge_equal(members)
    array = jnp if validate.is_traced(members) else np
    record_ = jax.tree.map(lambda *leaves: array.stack(leaves, axis=1), *[m for m, _ in members])
    return record_, array.stack([t for _, t in members], axis=1)


def _merge_equal(members: list[tuple[Mechanism, Any]]) -> list[tuple[Mechanism, Any]]:
    merged: dict[bytes, tuple[Mechanism, Any]] = {}
    for record_, times in members:
        key = b"".join(np.ascontiguousarray(x).tobytes() for x in jax.tree.leaves(record_))
        merged[key] = record_, times + (merged[key][1] if key in merged else 0)
    return list(merged.values())


def is_gaussian(mechanism: Mechanism) -> bool:
    """Whether every part is a Gaussian-DP mechanism, so that the composition is Gaussian-DP too."""
    return all(isinstance(atom, GaussianMechanism) for atom, _ in flatten(mechanism))


def as_gaussian(mechanism: Mechanism) -> GaussianMechanism:
    """A Gaussian-DP mechanism unchanged; composed `Gaussian` records as one `Gaussian`: 1/noise_multiplier^2 adds."""
    if isinstance(mechanism, GaussianMechanism):
        return mechanism
    atoms = [(atom, times) for atom, times in flatten(mechanism) if isinstance(atom, Gaussian)]
    others = [atom for atom, _ in flatten(mechanism) if not isinstance(atom, Gaussian)]
    if others:
        raise UnsupportedMechanismError(
            f"a composition that is sampled must consist of jaxdp.Gaussian mechanisms, got {_names(others)}."
        )
    with contextlib.nullcontext() if validate.is_traced(mechanism) else on_host():
        runs = [(xp.asarray(times, xp.float64), xp.asarray(g.noise_multiplier, xp.float64)) for g, times in atoms]
        mus = [xp.where(t > 0, xp.sqrt(xp.where(t > 0, t, 1.0)) / noise, 0.0) for t, noise in runs]
        return Gaussian(1.0 / norm(xp.stack(xp.broadcast_arrays(*mus, 0.0), axis=-1)))  # 0.0, if there are no parts


def norm(numbers: Any) -> Any:
    """The Euclidean norm of nonnegative numbers over the last axis; their squares may overflow or underflow."""
    unit = xp.stop_gradient(xp.max(numbers, axis=-1))
    unit = xp.where((unit > 0) & xp.isfinite(unit), unit, 1.0)
    total = xp.sum((numbers / unit[..., None]) ** 2, axis=-1)
    return xp.where(total == 0, 0.0, unit * xp.sqrt(xp.where(total == 0, 1.0, total)))
