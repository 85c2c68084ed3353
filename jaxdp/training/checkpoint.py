"""Checkpoints that never go back: a run resumed at an earlier count would draw the same noise again."""

import pathlib
from typing import Any

import jax
import numpy as np

from jaxdp import validate
from jaxdp.runtime.extras import require
from jaxdp.training.noise import NoisyState, the_state
from jaxdp.typing import Params


class RewoundError(ValueError):
    """The state is older than a state that this run has already reached.

    >>> from jaxdp import training
    >>> issubclass(training.RewoundError, ValueError)
    True
    """


def refuse_rewind(state: NoisyState, furthest: int) -> None:
    """RewoundError if state.count is below ``furthest``, the largest count that this run is known to have reached.

    Key and count determine the noise of a step. If a step is repeated on other data, the difference of the two results
    contains no noise.

    >>> import jax.numpy as jnp
    >>> from jaxdp import training
    >>> state = training.NoisyState(*map(jnp.asarray, (7, [0, 1], 0)))
    >>> training.refuse_rewind(state, 7)
    """
    count = int(np.asarray(the_state(state).count))
    validate.count("furthest", furthest, 0)
    if count < furthest:
        raise RewoundError(
            f"state.count must be at least {furthest}, which this run has reached, got {count}. Resume from the "
            "newest checkpoint, or start a new run with a new key and account for both."
        )


def _require_bare(state: Any) -> None:
    if not isinstance(state, NoisyState):
        raise TypeError(
            f"state must be a NoisyState, got {type(state).__name__}. Of the state of an optax.chain, pass the "
            "NoisyState as state and the other states inside params."
        )


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return sorted(tuple(getattr(leaf, "shape", np.shape(leaf)) or ()) for leaf in jax.tree.leaves(tree))


class Checkpoints:
    """Orbax checkpoints of (parameters, NoisyState) in one directory, numbered by state.count.

    Saving a count below the newest one, or restoring an older checkpoint than the newest, raises RewoundError. A run
    restored from the newest checkpoint continues with its count and key, so with noise not drawn before that
    checkpoint. Steps made after it and lost are repeated with the same noise: with the same data, settings and batches
    per step number they give the same iterates, which is no new release. Keep the directory (created if missing) as
    secret as the data: its key determines the noise. Needs the extra "checkpoint" (orbax-checkpoint).

    >>> import jax.numpy as jnp
    >>> from jaxdp import training
    >>> import tempfile
    >>> state = training.NoisyState(*map(jnp.asarray, (7, [0, 1], 0)))
    >>> checkpoints = training.Checkpoints(tempfile.mkdtemp())
    >>> checkpoints.save({"w": jnp.zeros(3)}, state)
    >>> checkpoints.furthest()
    7
    """

    def __init__(self, directory: str | pathlib.Path):
        self._orbax = require("orbax.checkpoint", "Checkpoints", "checkpoint")
        try:
            self._directory = pathlib.Path(directory).absolute()
            self._directory.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError):
            raise ValueError(f"directory must be a folder, or one that can be made, got {directory!r}.") from None

    def furthest(self) -> int:
        """The largest count saved in the directory, 0 if there is none."""
        return max((int(p.name) for p in self._directory.iterdir() if p.name.isdigit()), default=0)

    def save(self, params: Params, state: NoisyState) -> None:
        """Write a checkpoint with number state.count; RewoundError if a later one exists."""
        _require_bare(state)
        refuse_rewind(state, self.furthest())
        path = self._directory / str(int(np.asarray(state.count)))
        with self._orbax.StandardCheckpointer() as writer:
            writer.save(path, {"params": params, "state": state._asdict()}, force=True)

    def restore(self, params: Params, state: NoisyState, *, count: int | None = None) -> tuple[Params, NoisyState]:
        """(params, state) of the newest checkpoint, with the shapes and dtypes of the arguments.

        state: for example from the optimizer's ``init``; RewoundError if its count is larger than the checkpoint's.
        count: number of the checkpoint; only the newest is allowed. FileNotFoundError if there is none; ValueError if
        its key is not the key of ``state``, or its parameters have another structure or other shapes.
        """
        _require_bare(state)
        newest = self.furthest()
        path = self._directory / str(newest if count is None else count)
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint at {path}. Restore only where furthest() is above 0.")
        wanted = {"params": params, "state": state._asdict()}
        mismatch = ValueError(f"params must have the structure and shapes of those saved at {path}.")
        with self._orbax.StandardCheckpointer() as reader:
            saved = reader.metadata(path)  # compare shapes first: a failed restore prints to standard error
            saved = getattr(saved, "item_metadata", saved)
            if _shapes(getattr(saved, "tree", saved)) != _shapes(wanted):
                raise mismatch
            try:
                found = reader.restore(path, wanted)
            except ValueError as error:
                raise mismatch from error
        restored = NoisyState(**found["state"])
        refuse_rewind(restored, max(newest, int(np.asarray(state.count))))
        if not np.array_equal(np.asarray(restored.key), np.asarray(state.key)):
            raise ValueError("state.key must be the key of the checkpoint, got another. One run has one key.")
        return found["params"], restored
