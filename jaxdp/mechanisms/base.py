"""What a mechanism is: an immutable record of numbers plus its one formula, K(z)."""

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
# The neighbouring relation decides which dominating pairs must hold; each is composed on its own.
FORWARD, REVERSE, REPLACE = "forward", "reverse", "replace"
T = TypeVar("T", bound=type)
M = TypeVar("M", bound="Mechanism")


class UnsupportedMechanismError(ValueError):
    """No theorem is known for this combination, or it would need data the record does not hold.

    >>> try:
    ...     jaxdp.epsilon(jaxdp.LocalRandomizer(1.0), delta=1e-6, relation="add")
    ... except jaxdp.UnsupportedMechanismError as error:
    ...     print(error)
    no theorem is known for LocalRandomizer under relation 'add'; available: 'replace_one'.
    """


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is configuration, not a number: part of the pytree's structure.

    Keyword arguments as for `dataclasses.field`.
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field, static_field))
def record(cls: T) -> T:
    """Class decorator: frozen dataclass, registered as a pytree whose leaves are the numeric fields.

    A numeric field states its domain as ``jaxdp.domains.field(domain)``; one that does not must be finite. `Mechanism`
    says what else a record of one's own needs. All records of jaxdp are made with this decorator:

    >>> jax.tree.leaves(jaxdp.repeat(jaxdp.Gaussian(2.0), 10))
    [2.0, 10]
    >>> jax.tree.map(lambda number: 2 * number, jaxdp.Gaussian(2.0))
    Gaussian(noise_multiplier=4.0)
    """
    made: Any = cls
    if "__post_init__" not in cls.__dict__:
        made.__post_init__ = lists_to_arrays
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(made)
    fields = dataclasses.fields(made)
    static = [each.name for each in fields if each.metadata.get("static")]
    data = [each.name for each in fields if each.name not in static]

    def flatten_with_keys(instance: Any) -> tuple[Any, Any]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in data]
        return children, (made, *(getattr(instance, name) for name in static))

    def unflatten(kept: Any, children: Any) -> Any:
        return made(**dict(zip(data, children, strict=True)), **dict(zip(static, kept[1:], strict=True)))

    # Not `register_dataclass`: up to jax 0.10.1 at least, the structures of two such classes with equally many leaves
    # compare equal, so that jit may run the program compiled for one class on the other.
    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten)
    return made


def lists_to_arrays(self: Any) -> None:
    """Replace lists of numbers by arrays: a list would be a pytree of its entries. The verbs check the values."""
    for each in dataclasses.fields(self):
        name, value = each.name, getattr(self, each.name)
        if isinstance(value, (list, tuple)) and not any(isinstance(v, Mechanism) for v in value):
            numeric = xp.asarray(value) if validate.is_traced(value) else validate.rectangular(name, value)
            object.__setattr__(self, name, numeric if value != () or "domain" in each.metadata else value)


class Mechanism:
    """Base class of every mechanism; derive from it to account for one of your own.

    Write a class decorated with `record`, with your parameters as fields, and one method
    ``log_mgf(self, z)``: the log moment generating function of the privacy loss,

        K(z) = log E_P[exp(z L); L finite],   L = log dP/dQ,

    for a complex array ``z`` and scalar fields (no batch axes: the library maps over grids). Two Gaussian queries:

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

    Take (P, Q) dominating for "remove"; "add" is read off as K(-1 - z). If P has mass where Q has none, return it from
    ``infinity_mass``; if Q has mass where P has none, from ``reverse_infinity_mass``, unless the pair is symmetric. A
    method ``finite_pair() -> (log_p, log_q)`` (log masses of all outcomes, -inf for none) allows sampling. The pair
    stands for every relation unless ``at_distance`` says otherwise: noise per norm bound of a record needs it, as
    neighbours under replace_one are two norm bounds apart. exp(log_mgf) must be right to ``unit_errors`` 2^-53,
    relative.

    A field ``x: RealField = jaxdp.domains.field(jaxdp.domains.POSITIVE)`` must be finite and > 0, a field without a
    domain finite. The verbs refuse concrete numbers outside; under a trace such a row has the vacuous bound, and your
    formula sees a harmless number instead. Conditions on several fields: ``derived``.

    Mechanisms are equal, and hash equally, when class, configuration, shapes and numbers are equal (a traced number
    equals itself only). The repr of a mechanism, evaluated in the namespace of jaxdp, is an equal one.

    Attributes:
        event_ndim: by field, how many trailing axes belong to one mechanism (default 0); all other axes are a batch.
        relations: accepted neighbouring relations, the natural one first.
        symmetric: True when (P, Q) and (Q, P) have the same privacy profile.
        fixed_order: True when the guarantee is for records in a fixed order, which a random batch does not have.
        exact: False when K belongs to a pair that only dominates: a lower bound needs ``enclosing_records``.
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
        """K(z) of the dominating pair for one parameter point; z may be complex, any shape."""
        raise self._undefined("log_mgf")

    # The methods up to `offers` are optional: a record defines those it has, and `offers` tells which these are.

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the lattice on which the losses lie."""
        raise self._undefined("lattice")

    def log_modulus(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """log of a bound of |exp(K(c + it) - K(c))| for low <= t <= high and any c > 0, in both directions."""
        raise self._undefined("log_modulus")

    def renyi_divergence(self, order: Number) -> Number:
        """An upper bound of the Renyi divergence of the dominating pair at the order, in closed form."""
        raise self._undefined("renyi_divergence")

    def finite_pair(self) -> FinitePair:
        """A pair of finite laws that dominates the mechanism's pair. A mechanism without one cannot be sampled."""
        return self.enclosing_pair(inner=False, fine=False)

    def enclosing_pair(self, inner: bool, fine: bool) -> FinitePair:
        """A finite pair that dominates the mechanism's own, inner: one that it dominates; fine: of more outcomes.

        Upper bounds of the sampled mechanism are those of the first pair, lower bounds those of the second.
        """
        raise self._undefined("finite_pair")

    def log_middle(self, loss: Array) -> Array:
        """Of additive noise: log of the law halfway between P and Q over Q, by the loss; concave in e^loss."""
        raise self._undefined("log_middle")

    def tail_moment(self, order: Number) -> tuple[Number, Number]:
        """(log of a bound of sum p^order q^(1-order), least loss) of the outcomes that ``finite_pair`` leaves out."""
        raise self._undefined("tail_moment")

    def offers(self, name: str) -> bool:
        """Whether the record has this optional method."""
        return getattr(type(self), name) is not getattr(Mechanism, name)

    def _undefined(self, name: str) -> UnsupportedMechanismError:
        return UnsupportedMechanismError(f"{type(self).__name__} does not define {name}.")

    def infinity_mass(self) -> Number:
        """P(L = +infinity)."""
        return 0.0

    def reverse_infinity_mass(self) -> Number:
        """Q(dP = 0), the mass at infinity of the swapped pair."""
        return self.infinity_mass() if self.symmetric else 0.0

    def max_loss(self) -> Number:
        """Supremum of the finite losses (infinity when unbounded)."""
        return xp.inf

    def min_loss(self) -> Number:
        """Infimum of the finite losses."""
        return -self.max_loss() if self.symmetric else -xp.inf

    def simplified(self) -> Mechanism:
        """An equivalent record of the form that the accountant computes with."""
        return self

    def at_distance(self, distance: Number) -> Mechanism:
        """The mechanism for neighbouring inputs that lie ``distance`` norm bounds of one record's contribution apart.

        Records of noise define it. Any other guarantee is stated for the caller's relation, whatever the distance.
        """
        return self

    def under(self, relation: str) -> Mechanism:
        """The record whose pairs are those of the relation. The verbs apply it once."""
        return self.at_distance(2.0) if relation == "replace_one" else self

    def masses_at_infinity(self, direction: str) -> tuple[Number, Number]:
        """Mass at infinity of the pair of a direction, and of its swap."""
        masses = self.infinity_mass(), self.reverse_infinity_mass()
        return masses[::-1] if direction == REVERSE and not self.symmetric else masses

    def top_loss(self, direction: str) -> Number:
        """Supremum of the finite losses of the pair of a direction."""
        return -self.min_loss() if direction == REVERSE and not self.symmetric else self.max_loss()

    def is_exact(self, direction: str) -> bool:
        """False when the pair of this direction only dominates."""
        return self.exact

    def finite_pair_is_exact(self) -> bool:
        """False when ``finite_pair`` only dominates the mechanism's pair, as where there is an ``enclosing_pair``."""
        return self.exact and not self.offers("enclosing_pair")

    def enclosing_records(self, direction: str, fine: bool) -> tuple[Mechanism, Mechanism] | None:
        """For a record that is not exact: a record that dominates it and one that it dominates, None if unknown.

        Both have the same pytree structure and keep the batch axes of the fields. fine: closer ones, at a higher cost.
        """
        return None

    def check_structure(self) -> None:
        """Raise TypeError or ValueError for fields of a wrong kind or shape; values of numbers are not to be tested.

        The verbs call it, under a trace too.
        """

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """Conditions on several fields: by name, a number computed from them, of the batch shape, and its domain."""
        return {}

    def validate(self) -> None:
        """ValueError for a concrete number outside its domain, in this record or in a mechanism inside it.

        The verbs make these checks. They also call an override, afterwards, where no field is traced.
        """
        confined(self, overridden=False)

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The dominating pairs that a relation asks for."""
        relation = validate.choice("relation", relation, RELATIONS) or self.relations[0]
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

    def same_in_both_orders(self) -> bool:
        """Whether (P, Q) and (Q, P) are known to have the same privacy profile."""
        return self.symmetric

    def replace_directions(self) -> tuple[str, ...]:
        """Pairs that cover replace-one; by default the record's pair is stated for the caller's relation."""
        return (FORWARD, REVERSE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mechanism) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))

    def __repr__(self) -> str:
        if not dataclasses.is_dataclass(self):
            return object.__repr__(self)  # a class that lacks the decorator
        shown = (f"{each.name}={as_text(getattr(self, each.name))}" for each in dataclasses.fields(self))
        return f"{public_name(type(self))}({', '.join(shown)})"


def _changed(mechanism: M, change: Callable[[Any, Any], Any]) -> M:
    """The record with change(field, value) for every number, mechanism and None in its numeric fields."""
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
    """The record with harmless numbers where ``rows`` is False."""

    def harmless(each: Any, value: Any) -> Any:
        if value is None or isinstance(value, Mechanism):
            return value
        own = xp.reshape(rows, xp.shape(rows) + (1,) * mechanism.event_ndim.get(each.name, 0))
        with jax.numpy_rank_promotion("allow"):
            return xp.where(own, value, each.metadata.get("domain", FINITE).harmless)

    return _changed(mechanism, harmless)


def confined(mechanism: M, overridden: bool = True) -> tuple[M, list[Array | bool]]:
    """The mechanism with every traced number moved into its domain, and which rows were inside to begin with.

    The second is a list of tests, each True or a boolean array that broadcasts to the batch shape. A concrete number
    outside its domain is a ValueError. overridden: whether an override of `validate` is called.
    """
    mechanism.check_structure()
    tests: list[Array | bool] = []

    def inside_its_domain(each: Any, value: Any) -> Any:
        if value is None and each.default is None:
            return None
        if isinstance(value, Mechanism) and "domain" not in each.metadata:
            value, some = confined(value)
            tests.extend(some)
            return value
        own, event = each.metadata.get("domain", FINITE), mechanism.event_ndim.get(each.name, 0)
        for domain in (own, dataclasses.replace(COMPUTABLE, harmless=own.harmless)):
            value, test = validate.confined(each.name, value, domain)
            tests.append(test if test is True else xp.all(test, axis=tuple(range(-event, 0))))
        return value

    inside = _changed(mechanism, inside_its_domain)
    for name, (value, domain) in inside.derived().items():
        tests.append(validate.confined(name, value, domain)[1])
        if tests[-1] is not True:
            inside = _harmless_outside(tests[-1], inside)
    if validate.is_traced(inside):
        # a concrete number stays as it was given: a concrete count of 1 may choose a shorter route
        return jax.tree.map(lambda new, old: new if validate.is_traced(new) else old, inside, mechanism), tests
    if overridden and type(mechanism).validate is not Mechanism.validate:
        mechanism.validate()
    return mechanism, []


def _identity(mechanism: Mechanism) -> tuple[Any, ...]:
    """A hashable key, equal for equal mechanisms: classes, configuration, and every number with its shape."""
    leaves, structure = jax.tree.flatten(mechanism)
    return structure, *(_exact_value(leaf) for leaf in leaves)


def _exact_value(leaf: Any) -> Any:
    """A hashable value, equal for arrays of equal shape and numbers (NaN equals NaN), whatever their types."""
    if validate.is_traced(leaf) or isinstance(leaf, Mechanism):  # one without the decorator is a leaf
        return id(leaf)
    # Python compares the numbers exactly, whatever their types
    return np.shape(leaf), *("nan" if number != number else number for number in np.ravel(leaf).tolist())


class FiniteLaw(Mechanism):
    """A record whose loss has a finite law in each direction, `part`."""

    def part(self, direction: str) -> finite.Part:
        """The law of the loss in one direction, with its masses at infinity."""
        raise self._undefined("part")

    def masses_at_infinity(self, direction: str) -> tuple[Number, Number]:
        """Masses at infinity of the pair of a direction and of its swap."""
        return self.part(direction)[3:]

    def top_loss(self, direction: str) -> Number:
        """The largest finite loss of a direction, rounded up."""
        return self.top_of(self.part(direction))

    def top_of(self, part: finite.Part) -> Number:
        """The same, of a law that is known."""
        return xp.max(xp.where(part.log_weight > -xp.inf, part.loss + part.blur, -xp.inf))

    def log_tail(self, order: Number, direction: str) -> Number | None:
        """log of a bound of what outcomes at infinity add to E_P[e^((order - 1) L)]: -inf for none, None if unknown."""
        return None

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """Log-sum-exp over the finite losses."""
        loss, log_weight = (xp.expand_dims(a, tuple(range(xp.ndim(z)))) for a in self.part(FORWARD)[:2])
        return finite.log_sum_exp(log_weight + xp.asarray(z)[..., None] * loss)
