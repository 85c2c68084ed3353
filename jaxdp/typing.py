"""Types in public signatures: arguments and results of functions such as `jaxdp.epsilon`, fields of mechanisms."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]] | jax.Array
"""Result of a public function: NumPy float64 (np.float64 if every argument is a scalar), a JAX array under a trace."""

Number: TypeAlias = float | np.floating[Any] | np.integer[Any] | Array
"""A real number or an array of real numbers."""

Real: TypeAlias = Number | Sequence[Number] | Sequence[Sequence[Number]] | Sequence[Sequence[Sequence[Number]]]
"""A real number or an array of real numbers; nested lists become arrays."""

Complex: TypeAlias = Real | complex | np.complexfloating[Any, Any] | Sequence[complex]
"""A complex number or an array of complex numbers."""

Relation: TypeAlias = Literal["add", "remove", "add_or_remove", "replace_one"]
"""How two neighbouring data sets differ: one record is added, is removed, is added or removed, or is replaced."""

Bound: TypeAlias = Literal["clones", "stronger", "closed_form", "blanket"]
"""The theorem used to bound a shuffled mechanism."""

Axis: TypeAlias = Number | str | bool | None | Sequence[Number | str | bool | None]
"""The values of one axis of a sweep."""

Step: TypeAlias = int | np.integer[Any] | jax.Array
"""The number of a training step, from 0; a scalar."""

Params = TypeVar("Params")
"""A pytree of parameters, of any type that jax.tree_util can flatten; gradients have the same structure."""

Example = TypeVar("Example")
"""One example, or a pytree whose arrays hold many examples along one leading axis."""

Loss: TypeAlias = Callable[[Params, Example], ArrayLike]
"""loss(params, example): the loss of one example, a scalar."""


Read = TypeVar("Read", covariant=True)
Written = TypeVar("Written", contravariant=True)


class RecordField(Generic[Read, Written]):
    """A record field: the constructor takes a ``Written``, the attribute is a ``Read``. Lists become arrays."""

    if TYPE_CHECKING:  # fields are not descriptors at run time; this tells type checkers both types

        def __get__(self, record: object, owner: type) -> Read: ...
        def __set__(self, record: object, value: Written) -> None: ...


RealField: TypeAlias = RecordField[Number, Real]
"""A number or an array of numbers."""

ArrayField: TypeAlias = RecordField[Array, Real]
"""An array with axes of its own, for example outcomes or steps."""

OptionalRealField: TypeAlias = RecordField[Number | None, Real | None]
"""A `RealField` that may be None."""
