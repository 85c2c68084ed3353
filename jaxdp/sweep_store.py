"""Where the finished chunks of a sweep are kept: in memory, or on disk until the final file can be written."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class Memory:
    """Finished chunks of a sweep without a path."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[str, np.ndarray]] = {}

    def finished(self, xarray: Any) -> Any:
        """None: memory outlives no process."""
        return None

    def has(self, chunk: int) -> bool:
        """Whether the chunk is kept."""
        return chunk in self._parts

    def put(self, chunk: int, values: dict[str, np.ndarray]) -> None:
        """Keep a chunk."""
        self._parts[chunk] = values

    def get(self, chunk: int) -> Mapping[str, np.ndarray]:
        """A kept chunk."""
        return self._parts[chunk]

    def remember(self, made_by: dict[str, str]) -> dict[str, str]:
        """What the chunks were made by: the argument."""
        return made_by

    def finish(self, dataset: Any) -> Any:
        """The dataset itself."""
        return dataset


class Folder:
    """Finished chunks as files beside the final one: written whole or not at all, tied to one computation."""

    def __init__(self, path: pathlib.Path, identity: str) -> None:
        if path.suffix not in (".nc", ".zarr"):
            raise ValueError(f"path must end in .nc or .zarr, got {str(path)!r}.")
        self._path, self._identity = path, identity
        self._parts = path.with_name(path.name + ".parts")

    def finished(self, xarray: Any) -> Any:
        """The complete dataset of an earlier call, or None after preparing the folder."""
        if self._path.exists():
            opened = xarray.open_zarr if self._path.suffix == ".zarr" else xarray.open_dataset
            with opened(self._path) as dataset:
                self._same(dataset.attrs.get("fingerprint"), self._path)
                return dataset.load()
        manifest = self._parts / "manifest.json"
        if manifest.exists():
            self._same(json.loads(manifest.read_text()).get("fingerprint"), self._parts)
        else:
            self._parts.mkdir(parents=True, exist_ok=True)
            _write(manifest, lambda f: f.write(json.dumps({"fingerprint": self._identity}).encode()))
        return None

    def _same(self, identity: Any, where: pathlib.Path) -> None:
        if identity != self._identity:
            raise ValueError(
                f"{where} holds another computation (axes, function, batch_size and versions must all be equal). "
                "Choose another path, or remove it to start again."
            )

    def _file(self, chunk: int) -> pathlib.Path:
        return self._parts / f"{chunk:08d}.npz"

    def has(self, chunk: int) -> bool:
        """Whether the chunk is kept."""
        return self._file(chunk).exists()

    def put(self, chunk: int, values: dict[str, np.ndarray]) -> None:
        """Keep a chunk."""
        _write(self._file(chunk), lambda f: np.savez(f, **values))  # type: ignore[arg-type]

    def get(self, chunk: int) -> Mapping[str, np.ndarray]:
        """A kept chunk."""
        with np.load(self._file(chunk)) as stored:
            return dict(stored)

    def remember(self, made_by: dict[str, str]) -> dict[str, str]:
        """What the chunks were made by: the argument, or that of an earlier call when nothing was left to do."""
        file = self._parts / "provenance.json"
        if made_by:
            _write(file, lambda f: f.write(json.dumps(made_by).encode()))
        return json.loads(file.read_text()) if file.exists() else {}

    def finish(self, dataset: Any) -> Any:
        """Write the final file in one step, then drop the parts."""
        dataset.attrs["fingerprint"] = self._identity
        draft = self._path.with_name(self._path.name + ".draft")
        if self._path.suffix == ".zarr":
            dataset.to_zarr(draft, mode="w", zarr_format=2)
        else:
            dataset.to_netcdf(draft)
        os.replace(draft, self._path)
        shutil.rmtree(self._parts, ignore_errors=True)
        return dataset


def _write(path: pathlib.Path, fill: Callable[[Any], Any]) -> None:
    """A file that appears complete or not at all."""
    draft = path.with_name(f"{path.name}.{threading.get_ident()}.draft")
    try:
        with open(draft, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
