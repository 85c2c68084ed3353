"""The base class of mechanisms: an immutable record of numbers with one formula, K(z) = log E_P[exp(z L)]."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

from jaxdp import validate
from jaxdp.domains import COMPUTABLE, FINITE, Domain, field
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.finite import FinitePair
from jaxdp.mechanisms.text import as_text, public_name
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number, Relation

RELATIONS = (*typing.get_args(Relation), None)
# Directions: "forward", the pair (P, Q); "reverse", its swap (Q, P); "replace", the symmetric pair of sampling under
# replace_one. The neighbouring relation decides which of these pairs are needed; each is composed on its own.
T = TypeVar("T", bound=type)
M = TypeVar("M", bound="Mechanism")


def not_a_mechanism(value: object) -> TypeError:
    """The error for an argument ``mechanism`` that is not a mechanism."""
    kind, remedy = type(value).__name__, ""
    if isinstance(value, (list, tuple)):
        remedy = " Compose several as jaxdp.compose(*mechanisms)."
    elif isinstance(value, type):
        kind, remedy = f"the class {value.__name__}", " Call it, as in jaxdp.Gaussian(1.0)."
    return TypeError(f"mechanism must be a jaxdp mechanism (such as jaxdp.Gaussian(1.0)), got {kind}.{remedy}")


class UnsupportedMechanismError(ValueError):
    """Raised where no theorem is known for a combination, or where it needs data that the record does not hold.

    >>> try:
    ...     jaxdp.epsilon(jaxdp.LocalRandomizer(1.0), delta=1e-6, relation="add")
    ... except jaxdp.UnsupportedMechanismError as error:
    ...     print(error)
    no theorem is known for LocalRandomizer under relation 'add'; available: 'replace_one'.
    """


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that holds a setting, not a number: part of the pytree's structure, not a leaf.

    Takes the keyword arguments of `dataclasses.field`.
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field, static_field))
def record(cls: T) -> T:
    """Class decorator: frozen dataclass, registered as a pytree whose leaves are the numeric fields.

    A numeric field declares its domain by ``jaxdp.domains.field(domain)``; without a domain its numbers must be finite.
    `Mechanism` says which methods your own record needs. All records of jaxdp use this decorator:

    >>> jax.tree.leaves(jaxdp.repeat(jaxdp.Gaussian(2.0), 10))
    [2.0, 10]
    >>> jax.tree.map(lambda number: 2 * number, jaxdp.Gaussian(2.0))
    Gaussian(noise_multiplier=4.0)
    """
    record_class: Any = cls
    if not hasattr(cls, "__post_init__"):
        record_class.__post_init__ = lists_to_arrays
    record_class = dataclasses.dataclass(frozen=True, eq=False, repr=False)(record_class)
    fields = dataclasses.fields(record_class)
    static = [each.name for each in fields if each.metadata.get("static")]
    data = [each.name for each in fields if each.name not in static]

    def flatten_with_keys(instance: Any) -> tuple[Any, Any]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in data]
        return children, (record_class, *(getattr(instance, name) for name in static))

    def unflatten(aux: Any, children: Any) -> Any:
        return record_class(**dict(zip(data, children, strict=True)), **dict(zip(static, aux[1:], strict=True)))

    # Not `register_dataclass`: in jax up to at least 0.10.1 the tree structures of two dataclasses with equally many
    # leaves compare equal, so jit may run the program that was compiled for one class on the other.
    jax.tree_util.register_pytree_with_keys(record_class, flatten_with_keys, unflatten)
    return record_class


def lists_to_arrays(self: Any) -> None:
    """Replace lists of numbers by arrays, because JAX treats a list as a pytree. The verbs check the values later."""
    for each in dataclasses.fields(self):
        name, value = each.name, getattr(self, each.name)
        if isinstance(value, (list, tuple)) and not any(isinstance(v, Mechanism) for v in value):
            numeric = xp.asarray(value) if validate.is_traced(value) else validate.rectangular(name, value)
            object.__setattr__(self, name, numeric if value != () or "domain" in each.metadata else value)


class Mechanism:
    """Base class of every mechanism; derive from it to define your own mechanism.

    Write a class with the decorator `record`, with your parameters as fields, and one method
    ``log_mgf(self, z)``: the log moment generating function of the privacy loss,

        K(z) = log E_P[exp(z L); L finite],   L = log dP/dQ,

    for a complex array ``z`` and scalar fields (the library maps over batch axes). An example, two Gaussian queries:

    >>> from jaxdp.typing import RealField
    >>> @jaxdp.record
    ... class TwoQueries(jaxdp.Mechanism):
    ...     first: RealField = jaxdp.domains.field(jaxdp.domains.POSITIVE)
    ...     second: RealField = jaxdp.domains.field(jaxdp.domains.POSITIVE, default=1.0)
    ...     symmetric = True
    ...
    ...     def log_mgf(self, z):
    ...         return z * (z + 1) * (self.first**-2 + self.second**-2) / 2
    ...     def at_distance(self, distance):
    ...         return TwoQueries(self.first / distance, self.second / distance)
    >>> print(f"{jaxdp.renyi(TwoQueries(first=2.0), order=4):.4f}")
    2.5000

    (P, Q) must be a dominating pair for "remove"; for "add" the library uses K(-1 - z). If P has mass where Q has none,
    return that mass from ``infinity_mass``. If Q has mass where P has none, return it from ``reverse_infinity_mass``; a
    symmetric pair needs the first method only. If the losses are bounded, define ``max_loss``, and ``min_loss`` if the
    pair is not symmetric: without them no epsilon is known at delta = 0. To allow sampling, define ``finite_pair() ->
    (log_p, log_q)``, the log masses of all outcomes (-inf: no mass). The pair is used for every relation unless you
    define ``at_distance``. Noise that is scaled to the norm bound of one record must define it: neighbours under
    replace_one are two norm bounds apart. The relative error of exp(log_mgf) must be at most ``unit_errors`` times
    2^-53.

    The numbers of a field ``x: RealField = jaxdp.domains.field(jaxdp.domains.POSITIVE)`` must be finite and > 0, the
    numbers of a field without a domain finite. The verbs raise ValueError for a concrete number outside its domain.
    Under a trace they return the vacuous bound for such a row, and ``log_mgf`` receives a harmless number instead. To
    state conditions on several fields together, define ``derived``.

    Two mechanisms are equal, and have equal hashes, when class, static fields, shapes and numbers are equal (a traced
    number equals only itself). Evaluating the repr of a mechanism in jaxdp's namespace gives an equal mechanism.

    Attributes:
        event_ndim: number of trailing axes of each field that belong to one mechanism (default 0); the rest are batch.
        relations: accepted neighbouring relations; the first is the natural one, used for relation=None.
        symmetric: True when (P, Q) and (Q, P) have the same privacy profile.
        fixed_order: True when the guarantee needs records in a fixed order; such a mechanism cannot be sampled.
        exact: False when (P, Q) only dominates the mechanism: a lower bound then needs ``enclosing_records``.
        unit_errors: bound on the relative error of exp(K), in units of 2^-53.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]  # every mechanism is a record
    event_ndim: ClassVar[Mapping[str, int]] = {}
    relations: ClassVar[tuple[Relation, ...]] = ("add_or_remove", "add", "remove", "replace_one")
    symmetric: ClassVar[bool] = False
    fixed_order: ClassVar[bool] = False
    unit_errors: ClassVar[float] = 64.0
    exact: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) of the dominating pair for one parameter point; z may be complex, any shape.

        At a real z where the expectation diverges the value must be inf, or not real, as a logarithm of a negative
        number is: then it is taken as inf.
        """
        raise self._undefined("log_mgf")

    # The methods from here to `offers` are optional; `offers` tells whether a record defines a method.

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the lattice of losses: every loss is offset + k spacing for an integer k."""
        raise self._undefined("lattice")

    def log_modulus(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Log of an upper bound of |exp(K(c + it) - K(c))| for low <= t <= high, every c > 0, and both directions."""
        raise self._undefined("log_modulus")

    def renyi_divergence(self, order: Number) -> Number:
        """Upper bound of the Renyi divergence of the dominating pair at this order, in closed form."""
        raise self._undefined("renyi_divergence")

    def finite_pair(self) -> FinitePair:
        """Log masses of all outcomes, to a few units of 2^-53. Sampling needs them, except for Gaussian noise.

        Where this pair only dominates the mechanism's pair, ``finite_pair_is_exact`` must return False.
        """
        return self.enclosing_pair(inner=False, fine=False)

    def enclosing_pair(self, inner: bool, fine: bool) -> FinitePair:
        """A finite pair that dominates the mechanism's pair; with ``inner`` a pair that the mechanism's pair dominates.

        fine: use more outcomes. Upper bounds of the sampled mechanism use the first pair, lower bounds the inner one.
        """
        raise self._undefined("finite_pair")

    def log_middle(self, loss: Array) -> Array:
        """log(dM/dQ) at a loss, M the law of the noise halfway between P and Q; dM/dQ must be concave in e^loss."""
        raise self._undefined("log_middle")

    def tail_moment(self, order: Number) -> tuple[Number, Number]:
        """(log of a bound of sum p^order q^(1-order), least loss), over the outcomes left out of ``finite_pair``.

        Used for symmetric records. The mass of these outcomes must be below 1e-307 under both laws.
        """
        raise self._undefined("tail_moment")

    def offers(self, name: str) -> bool:
        """Whether the record's class defines this optional method."""
        return getattr(type(self), name) is not getattr(Mechanism, name)

    def _undefined(self, name: str) -> UnsupportedMechanismError:
        return UnsupportedMechanismError(f"{type(self).__name__} does not define {name}.")

    def infinity_mass(self) -> Number:
        """P(L = +infinity)."""
        return 0.0

    def reverse_infinity_mass(self) -> Number:
        """Q(dP/dQ = 0), the mass at infinity of the swapped pair (Q, P)."""
        return self.infinity_mass() if self.symmetric else 0.0

    def max_loss(self) -> Number:
        """Supremum of the finite losses (infinity when unbounded)."""
        return xp.inf

    def min_loss(self) -> Number:
        """Infimum of the finite losses."""
        return -self.max_loss() if self.symmetric else -xp.inf

    def simplified(self) -> Mechanism:
        """An equivalent record in the form that the accountant computes with."""
        return self

    def at_distance(self, distance: Number) -> Mechanism:
        """The mechanism for neighbours whose query answers lie ``distance`` norm bounds of one record apart.

        Records of noise override this. Any other guarantee is stated for the caller's relation, whatever the distance.
        """
        parts = [getattr(self, each.name) for each in dataclasses.fields(self)]
        noise = [type(p).__name__ for p in parts if isinstance(p, Mechanism) and p.offers("at_distance")]
        if noise:
            raise UnsupportedMechanismError(
                f"{type(self).__name__} must define at_distance, because it holds noise that does: {noise[0]}."
            )
        return self

    def under(self, relation: str) -> Mechanism:
        """The record whose dominating pairs hold under the relation. The verbs call this once."""
        return self.at_distance(2.0) if relation == "replace_one" else self

    def masses_at_infinity(self, direction: str) -> tuple[Number, Number]:
        """(mass at infinity of the pair in this direction, mass at infinity of its swap)."""
        masses = self.infinity_mass(), self.reverse_infinity_mass()
        return masses[::-1] if direction == "reverse" and not self.symmetric else masses

    def top_loss(self, direction: str) -> Number:
        """Supremum of the finite losses of the pair in this direction."""
        return -self.min_loss() if direction == "reverse" and not self.symmetric else self.max_loss()

    def is_exact(self, direction: str) -> bool:
        """Whether the pair in this direction is the mechanism's own, not merely a pair that dominates it."""
        return self.exact

    def finite_pair_is_exact(self) -> bool:
        """Whether ``finite_pair`` is the mechanism's own pair; by default not where ``enclosing_pair`` is defined."""
        return self.exact and not self.offers("enclosing_pair")

    def enclosing_records(self, direction: str, fine: bool) -> tuple[Mechanism, Mechanism] | None:
        """For a record that is not exact: (a record that dominates it, a record that it dominates), None if unknown.

        Both have the same pytree structure and keep the batch axes of the fields. fine: enclose more closely, at a
        higher cost.
        """
        return None

    def check_structure(self) -> None:
        """Raise TypeError or ValueError for a field of a wrong type or shape; the values of numbers are not tested.

        The verbs call this, also under a trace.
        """

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """Conditions on several fields: {name: (number computed from the fields, of the batch shape, its domain)}."""
        return {}

    def validate(self) -> None:
        """Raise ValueError for a concrete number outside its domain, in this record or in a mechanism that it holds.

        The verbs make the same checks themselves. Where no field is traced, they also call an override of this method.
        """
        confined(self, overridden=False)

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The directions, that is the dominating pairs, that a relation needs."""
        relation = validate.choice("relation", relation, RELATIONS) or self.relations[0]
        if relation not in self.relations:
            raise UnsupportedMechanismError(
                f"no theorem is known for {type(self).__name__} under relation {relation!r}; "
                f"available: {', '.join(map(repr, self.relations))}."
            )
        if self.symmetric:
            return ("forward",)
        if relation == "replace_one":
            return self.replace_directions()
        return {"remove": ("forward",), "add": ("reverse",), "add_or_remove": ("forward", "reverse")}[relation]

    def same_in_both_orders(self) -> bool:
        """Whether (P, Q) and (Q, P) are known to have the same privacy profile."""
        return self.symmetric

    def replace_directions(self) -> tuple[str, ...]:
        """Directions for replace_one: by default both orders of the pair, which is stated for the caller's relation."""
        return ("forward", "reverse")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mechanism) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))

    def __repr__(self) -> str:
        if not dataclasses.is_dataclass(self):
            return object.__repr__(self)  # the class lacks the decorator `record`
        shown = (f"{each.name}={as_text(getattr(self, each.name))}" for each in dataclasses.fields(self))
        return f"{public_name(type(self))}({', '.join(shown)})"


def _changed(mechanism: M, change: Callable[[Any, Any], Any]) -> M:
    """A copy in which change(field, value) replaces each number, mechanism and None of the numeric fields."""
    numbers = {
        each.name: jax.tree.map(
            functools.partial(change, each),
            getattr(mechanism, each.name),
            is_leaf=lambda value: value is None or isinstance(value, Mechanism),
        )
        for each in dataclasses.fields(mechanism)
        if not each.metadata.get("static")
    }
    return dataclasses.replace(mechanism, **numbers)


def _harmless_outside(rows: Any, mechanism: M) -> M:
    """A copy in which harmless numbers replace the numbers of every row where the mask ``rows`` is False."""

    def harmless(each: Any, value: Any) -> Any:
        if value is None or isinstance(value, Mechanism):
            return value
        mask = xp.reshape(rows, xp.shape(rows) + (1,) * mechanism.event_ndim.get(each.name, 0))
        with jax.numpy_rank_promotion("allow"):
            return xp.where(mask, value, each.metadata.get("domain", FINITE).harmless)

    return _changed(mechanism, harmless)


def _check_class(kind: type[Mechanism]) -> None:
    """TypeError for a class without the decorator, with relations that are text, or that changes a library formula."""
    if "__dataclass_fields__" not in vars(kind):
        remedy = "by which jaxdp finds its numeric fields"
        raise TypeError(f"{kind.__name__} must be decorated with @jaxdp.record, {remedy}.")
    if isinstance(kind.relations, str):
        raise TypeError(f"{kind.__name__}.relations must be a tuple such as ('remove',), got {kind.relations!r}.")
    library = next(each for each in kind.__mro__ if each.__module__.startswith("jaxdp."))
    if library is not kind and "__dataclass_fields__" in vars(library):
        changed = [n for n in ("log_mgf", "finite_pair") if getattr(kind, n) is not getattr(library, n)]
        if changed:
            raise TypeError(
                f"{kind.__name__} changes {changed[0]} of {library.__name__}, whose closed forms do not use it: "
                "derive from jaxdp.Mechanism instead."
            )


def confined(mechanism: M, overridden: bool = True) -> tuple[M, list[Array | bool]]:
    """(the mechanism with traced numbers outside their domains replaced by harmless ones, tests of the given numbers).

    Each test is True, or a boolean array that broadcasts to the batch shape: whether the row's numbers are inside.
    Raises ValueError for a concrete number outside. overridden: whether to call an override of `validate`.
    """
    _check_class(type(mechanism))
    mechanism.check_structure()
    tests: list[Array | bool] = []

    def inside_its_domain(each: Any, value: Any) -> Any:
        if value is None and each.default is None:
            return None
        if isinstance(value, Mechanism) and "domain" not in each.metadata:
            value, inner_tests = confined(value)
            tests.extend(inner_tests)
            return value
        declared, event_axes = each.metadata.get("domain", FINITE), mechanism.event_ndim.get(each.name, 0)
        for domain in (declared, dataclasses.replace(COMPUTABLE, harmless=declared.harmless)):
            value, test = validate.confined(each.name, value, domain)
            tests.append(test if test is True else xp.all(test, axis=tuple(range(-event_axes, 0))))
        return value

    inside = _changed(mechanism, inside_its_domain)
    for name, (value, domain) in inside.derived().items():
        tests.append(validate.confined(name, value, domain)[1])
        if tests[-1] is not True:
            inside = _harmless_outside(tests[-1], inside)
    if validate.is_traced(inside):
        # Concrete numbers stay as they were given: a concrete count of 1 may select a shorter route.
        return jax.tree.map(lambda new, old: new if validate.is_traced(new) else old, inside, mechanism), tests
    if overridden and type(mechanism).validate is not Mechanism.validate:
        mechanism.validate()
    return mechanism, []


def _identity(mechanism: Mechanism) -> tuple[Any, ...]:
    """A hashable key that is equal for equal mechanisms: classes, static fields, and every number with its shape."""
    leaves, structure = jax.tree.flatten(mechanism)
    return structure, *(_exact_value(leaf) for leaf in leaves)


def _exact_value(leaf: Any) -> Any:
    """A hashable value that is equal for arrays of equal shape and numbers (NaN equals NaN), whatever their types."""
    if validate.is_traced(leaf) or isinstance(leaf, Mechanism):  # a mechanism without the decorator `record` is a leaf
        return id(leaf)
    # Python compares numbers exactly, whatever their types.
    return np.shape(leaf), *("nan" if number != number else number for number in np.ravel(leaf).tolist())


class FiniteLaw(Mechanism):
    """A record whose privacy loss takes finitely many values; `part` returns its law in each direction."""

    def part(self, direction: str) -> finite.Part:
        """The law of the loss in one direction, with its masses at infinity."""
        raise self._undefined("part")

    def masses_at_infinity(self, direction: str) -> tuple[Number, Number]:
        """(mass at infinity of the pair in this direction, mass at infinity of its swap)."""
        return self.part(direction)[3:]

    def top_loss(self, direction: str) -> Number:
        """The largest finite loss in this direction, rounded up."""
        return self.top_of(self.part(direction))

    def top_of(self, part: finite.Part) -> Number:
        """The largest finite loss of this law, rounded up."""
        return xp.max(xp.where(part.log_weight > -xp.inf, part.loss + part.blur, -xp.inf))

    def log_tail(self, order: Number, direction: str) -> Number | None:
        """Log of a bound of E_P[e^((order-1) L)] over the outcomes that `part` puts at infinity; None: unknown."""
        return None

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """Log-sum-exp over the finite losses."""
        loss, log_weight = (xp.expand_dims(a, tuple(range(xp.ndim(z)))) for a in self.part("forward")[:2])
        return finite.log_sum_exp(log_weight + xp.asarray(z)[..., None] * loss)
