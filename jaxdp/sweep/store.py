"""Storage for the tiles of a sweep, in memory and on disk; names and units of the variables."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp.mechanisms import provenance
from jaxdp.sweep.grid import Grid

_PLAIN = (
    "batch_size", "collision_probability", "delta", "false_positive_rate", "learning_rate", "num_categories",
    "num_examples", "num_steps", "num_users", "radius", "sampling_probability", "sensitivity", "smoothness",
    "strong_convexity", "subset_size",
)  # fmt: skip
# name of an axis or a variable: (long name, units)
LABELS = {name: (name.replace("num_", "number of ").replace("_", " "), "1") for name in _PLAIN} | {
    "eps0": ("local epsilon", "nats"),
    "epsilon": ("epsilon", "nats"),
    "delta0": ("local delta", "1"),
    "noise_multiplier": ("noise multiplier (over the norm bound of one record)", "1"),
    "sigma": ("noise multiplier (over the norm bound of one record)", "1"),
    "steps": ("number of steps", "1"),
    "epochs": ("number of epochs", "1"),
    "participations": ("participations of a person in an epoch", "1"),
    "num_buckets": ("number of hash buckets", "1"),
    "scale": ("scale of the noise", "1"),
    "noise_std": ("standard deviation of the noise", "1"),
    "clip_norm": ("clipping norm", "1"),
    "lipschitz": ("Lipschitz constant", "1"),
    "q": ("sampling probability", "1"),
    "times": ("number of compositions", "1"),
    "order": ("Renyi order", "1"),
    "bound": ("amplification theorem", ""),
    "randomizer": ("local randomizer", ""),
    "lower": ("certified lower bound", ""),
    "upper": ("certified upper bound", ""),
    "renyi": ("Renyi divergence", "nats"),
    "tradeoff": ("false negative rate", "1"),
    "value": ("value", ""),
}


def label(name: str) -> dict[str, str]:
    """The attributes long_name and units of an axis or variable."""
    base, _, side = name.rpartition("_")
    if side in ("lower", "upper") and base in LABELS:
        long_name, units = LABELS[base]
        return {"long_name": f"{long_name}, certified {side} bound", "units": units}
    long_name, units = LABELS.get(name, (name.replace("_", " "), ""))
    return {"long_name": long_name} | ({"units": units} if units else {})


class Memory:
    """The tiles of a sweep without a path, in memory."""

    def __init__(self, xarray: Any, grid: Grid) -> None:
        self._xarray, self._grid = xarray, grid
        self._arrays: dict[str, np.ndarray] = {}
        self._calls: dict[int, list[dict[str, str]]] = {}

    def missing(self) -> list[int]:
        """The tiles that are not computed yet."""
        return [tile for tile in range(self._grid.tiles) if tile not in self._calls]

    def keep(self, tile: int, values: dict[str, np.ndarray], calls: list[dict[str, str]]) -> None:
        """Store a tile and the verb calls that computed it."""
        if not self._calls:
            self._arrays = {name: np.empty(self._grid.shape) for name in values}
        if set(self._arrays) != set(values):
            found = f"{sorted(values)} beside {sorted(self._arrays)}"
            raise ValueError(f"fn must return the same variables at every grid point, got {found}.")
        for name, array in values.items():
            self._arrays[name][self._grid.region(tile)] = array
        self._calls[tile] = calls

    def finish(self, attributes: dict[str, str]) -> Any:
        """The labelled data set."""
        made_by = provenance.summary([call for _, calls in sorted(self._calls.items()) for call in calls])
        axes, verb, data = self._grid.axes, made_by.get("verb", ""), {}
        quantity = verb.removesuffix("_bounds")
        for name, array in self._arrays.items():
            # a variable without a name of its own gets that of the verb
            final = verb if name == "value" and verb in LABELS and verb not in axes else name
            # "lower" of epsilon_bounds is labelled like "epsilon_lower"
            sided = final in ("lower", "upper") and quantity in LABELS
            data[final] = (tuple(axes), array, label(f"{quantity}_{final}" if sided else final))
        coordinates = {
            name: (name, values if isinstance(values, np.ndarray) else [str(v) for v in values], label(name))
            for name, values in axes.items()
        }
        return self._xarray.Dataset(data, coordinates, attributes | made_by)

    def kept(self) -> str:
        """A sentence for the user who interrupts the sweep: what is kept."""
        return "Nothing is kept; give path= to go on from where a sweep was interrupted."


class Folder(Memory):
    """The tiles of one computation, in memory and on disk: one file per tile in the folder ``parts``.

    identity: the fingerprint of the computation.
    """

    def __init__(self, xarray: Any, grid: Grid, path: pathlib.Path, parts: pathlib.Path, identity: str) -> None:
        super().__init__(xarray, grid)
        self._path, self._parts, self._identity = path, parts, identity

    def finished(self) -> Any:
        """The complete data set of an earlier call. If there is none, read the tiles on disk and return None."""
        if self._path.exists():
            try:
                dataset = self._open()
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{self._path} is not a data set that a sweep wrote ({error}). Choose another path, or remove it."
                ) from None
            self._require_identity(dataset.attrs.get("fingerprint"), self._path)
            return dataset
        for file in self._parts.glob(_TILES):
            try:
                with np.load(io.BytesIO(file.read_bytes())) as saved:
                    values = dict(zip(saved["names"].tolist(), saved["values"], strict=True))
                    calls, identity = json.loads(saved["calls"].item()), saved["fingerprint"].item()
            except Exception:  # of any kind: the file is damaged, and its tile is computed again
                continue
            self._require_identity(identity, self._parts)
            super().keep(int(file.stem), values, calls)
        return None

    def _open(self) -> Any:
        if self._path.suffix == ".zarr":
            return self._xarray.open_dataset(self._path, engine="zarr")
        return self._xarray.load_dataset(self._path)

    def _require_identity(self, identity: Any, where: pathlib.Path) -> None:
        if identity != self._identity:
            raise ValueError(
                f"{where} holds another computation (axes, function, batch_size and versions must all be equal). "
                "Choose another path, or remove it to start again."
            )

    def keep(self, tile: int, values: dict[str, np.ndarray], calls: list[dict[str, str]]) -> None:
        """Store a tile in memory and on disk, in a file that appears complete or not at all."""
        super().keep(tile, values, calls)
        draft = self._parts / f"{tile:08d}.{socket.gethostname()}.{os.getpid()}.draft"
        try:
            with open(draft, "wb") as file:
                names, arrays = list(values), list(values.values())
                np.savez(file, names=names, values=arrays, calls=json.dumps(calls), fingerprint=self._identity)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._parts / f"{tile:08d}.npz")
        finally:
            draft.unlink(missing_ok=True)

    def finish(self, attributes: dict[str, str]) -> Any:
        """The labelled data set, written to its path in one step; the parts are deleted."""
        dataset = super().finish(attributes | {"fingerprint": self._identity})
        draft = self._parts / f"draft{self._path.suffix}"
        if self._path.suffix == ".zarr":
            chunks = {name: {"chunks": self._grid.steps} for name in dataset.data_vars}
            dataset.to_zarr(draft, mode="w", zarr_format=2, encoding=chunks)
        else:
            dataset.to_netcdf(draft)
        os.replace(draft, self._path)
        shutil.rmtree(self._parts, ignore_errors=True)
        return self._open()

    def kept(self) -> str:
        """A sentence for the user who interrupts the sweep: what is kept, and where."""
        lost = sum(map(self._grid.length, self.missing()))
        return (
            f"{self._grid.size - lost:,} of {self._grid.size:,} points are kept in {self._parts}; "
            "the same call goes on from there."
        )


_TILES = "[0-9]*.npz"  # names of the files of finished tiles


@contextlib.contextmanager
def alone(path: pathlib.Path, folder: pathlib.Path, lock: Callable[[str], Any]) -> Iterator[None]:
    """Context in which no other process sweeps to this path; a process that tries to waits.

    folder: the folder of parts. The lock is a file in it, and a finishing process removes the folder. A process that
    was waiting then holds the lock of a removed file; it releases this lock and tries again.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(str(folder / "lock"))
        with contextlib.suppress(FileNotFoundError):
            held.acquire()
        if held.is_locked and ((folder / "lock").exists() or path.exists()):
            break
        held.release()
    try:
        yield
    finally:
        if not any(folder.glob(_TILES)):  # no finished tile: nothing to resume from
            shutil.rmtree(folder, ignore_errors=True)
        held.release()
