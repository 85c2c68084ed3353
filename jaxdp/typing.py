"""Types of the public signatures: what verbs and records take and return."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]] | jax.Array
"""What a verb returns: NumPy float64 (np.float64 where every argument is one number), a JAX array under a trace."""

Number: TypeAlias = float | np.floating[Any] | np.integer[Any] | Array
"""One real number or an array of them."""

Real: TypeAlias = Number | Sequence[Number] | Sequence[Sequence[Number]] | Sequence[Sequence[Sequence[Number]]]
"""One real number or an array of them; lists are arrays."""

Complex: TypeAlias = Real | complex | np.complexfloating[Any, Any] | Sequence[complex]
"""One complex number or an array of them."""

Relation: TypeAlias = Literal["add", "remove", "add_or_remove", "replace_one"]
"""How two neighbouring data sets differ: by a record added, removed, either of the two, or replaced."""

Bound: TypeAlias = Literal["clones", "stronger", "closed_form", "blanket"]
"""The theorem that bounds a shuffled mechanism."""

Axis: TypeAlias = Number | str | bool | None | Sequence[Number | str | bool | None]
"""The values of one axis of a sweep."""

Step: TypeAlias = int | np.integer[Any] | jax.Array
"""The number of a training step, from 0; a scalar."""

Params = TypeVar("Params")
"""A tree of parameters, of any type that jax.tree_util takes apart; gradients are such a tree too."""

Example = TypeVar("Example")
"""One example, or a tree of them with one leading axis."""

Loss: TypeAlias = Callable[[Params, Example], ArrayLike]
"""loss(params, example): a scalar, of one example."""


Read = TypeVar("Read", covariant=True)
Written = TypeVar("Written", contravariant=True)


class RecordField(Generic[Read, Written]):
    """A field of a record is written as one type and reads as another, because a list becomes an array."""

    if TYPE_CHECKING:  # no field of a record is a descriptor; type checkers read the types of one

        def __get__(self, record: object, owner: type) -> Read: ...
        def __set__(self, record: object, value: Written) -> None: ...


RealField: TypeAlias = RecordField[Number, Real]
"""A number or an array of them."""

ArrayField: TypeAlias = RecordField[Array, Real]
"""An array that has axes of its own (outcomes, steps)."""

OptionalRealField: TypeAlias = RecordField[Number | None, Real | None]
"""A `RealField` that may be None."""
