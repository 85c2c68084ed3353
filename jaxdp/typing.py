"""Types of the public signatures: what verbs and records take and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]] | jax.Array
"""What a verb returns: NumPy float64 (np.float64 where every argument is one number), a JAX array under a trace."""

Real: TypeAlias = float | np.floating[Any] | np.integer[Any] | Array | Sequence[float] | Sequence[Sequence[float]]
"""One real number or an array of them; lists are arrays."""

Complex: TypeAlias = Real | complex | np.complexfloating[Any, Any] | Sequence[complex]
"""One complex number or an array of them."""

Relation: TypeAlias = Literal["add", "remove", "add_or_remove", "replace_one"]
"""How two neighbouring data sets differ: by a record added, removed, either of the two, or replaced."""

Direction: TypeAlias = Literal["forward", "reverse", "replace"]
"""Which dominating pair of a mechanism is meant."""

Bound: TypeAlias = Literal["clones", "stronger", "closed_form", "blanket"]
"""The theorem that bounds a shuffled mechanism."""
