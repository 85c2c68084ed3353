"""Grids: a function over the product of named axes, chunk by chunk, into a labelled xarray.Dataset."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import importlib
import importlib.metadata
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.interval import Bounds
from jaxdp.runtime import provenance
from jaxdp.runtime.fingerprint import fingerprint
from jaxdp.sweep_store import Folder, Memory

# A chunk long enough to hide the cost of a call, short enough that a kill loses only seconds.
_DEFAULT_BATCH = 4096
_ACCURACY = (
    "certified: an upper bound of epsilon or delta is never below the truth; target relative gap 1e-6 in epsilon, "
    "wider where double precision cannot reach it"
)
# name: (long name, units)
_LABELS = {
    "eps0": ("local epsilon", "nats"),
    "epsilon": ("epsilon", "nats"),
    "delta": ("delta", "1"),
    "delta0": ("local delta", "1"),
    "num_users": ("number of users", "1"),
    "num_categories": ("number of categories", "1"),
    "noise_multiplier": ("noise multiplier (standard deviation or scale over sensitivity)", "1"),
    "sigma": ("noise multiplier (standard deviation over sensitivity)", "1"),
    "sampling_probability": ("sampling probability", "1"),
    "steps": ("number of steps", "1"),
    "num_steps": ("number of steps", "1"),
    "num_examples": ("number of examples", "1"),
    "batch_size": ("batch size", "1"),
    "subset_size": ("subset size", "1"),
    "num_buckets": ("number of hash buckets", "1"),
    "collision_probability": ("collision probability", "1"),
    "scale": ("scale of the noise", "1"),
    "noise_std": ("standard deviation of the noise", "1"),
    "learning_rate": ("learning rate", "1"),
    "clip_norm": ("clipping norm", "1"),
    "lipschitz": ("Lipschitz constant", "1"),
    "smoothness": ("smoothness", "1"),
    "strong_convexity": ("strong convexity", "1"),
    "radius": ("radius", "1"),
    "q": ("sampling probability", "1"),
    "times": ("number of compositions", "1"),
    "order": ("Renyi order", "1"),
    "false_positive_rate": ("false positive rate", "1"),
    "bound": ("amplification theorem", ""),
    "randomizer": ("local randomizer", ""),
    "lower": ("certified lower bound", ""),
    "upper": ("certified upper bound", ""),
    "renyi": ("Renyi divergence", "nats"),
    "tradeoff": ("false negative rate", "1"),
    "value": ("value", ""),
}


def sweep(
    fn: Callable[..., Any],
    *,
    batch_size: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: bool = False,
    path: str | os.PathLike[str] | None = None,
    **axes: Any,
) -> Any:
    """Values of ``fn`` on the product of named axes, as an xarray.Dataset with one dimension per axis.

    fn: called with every axis name as a keyword; numeric axes arrive as arrays of equal shape (one chunk of grid
        points), other axes (strings, None, booleans) one value at a time. Returns an array of the chunk's shape, a
        `Bounds` (variables "lower", "upper"), or a dict of these. A single array is stored under the function's own
        name; from a lambda under the name of the one verb it calls, else "value".
    batch_size: grid points per call of fn; the last chunk is padded, so that all calls have one shape and compile
        once. Peak memory beyond the result is set by it. Default: about 4096, evenly divided.
    devices: jax devices that take chunks in turn, one thread each. Default: the current default device.
    progress: show a tqdm bar counting grid points.
    path: a file ending in .nc (netCDF) or .zarr. Finished chunks are kept in ``<path>.parts`` as they come: the same
        call after a kill or a full disk goes on where it stopped, and a finished file is read instead of recomputed.
        The file itself appears at the end, in one step.
    axes: 1-D sequences (a scalar is an axis of length 1).

    Every axis value is tried once before a long run, so that an invalid one is rejected at the start. An error inside
    a chunk is re-raised with a note naming the chunk; finished chunks stay on disk.
    The attributes hold version, accuracy and, where verbs were called by fn, verb, mechanism and relation; where
    rounds were shuffled, also the bounds and randomizers in use.
    Raises ValueError for bad axes, a wrong result shape, or a path that holds another computation, TypeError for a fn
    that accepts single numbers only, ImportError (naming the extra) without xarray.
    """
    xarray = _require("xarray")
    grid = Grid.of(axes, batch_size)
    store = Memory() if path is None else Folder(pathlib.Path(path), _identity(fn, grid))
    finished = store.finished(xarray)
    if finished is not None:
        return finished
    calls = _run(fn, grid, list(devices or []) or [None], store, _progress_bar(progress, grid))
    made_by = store.remember(provenance.summary(calls))
    dataset = _assemble(xarray, grid, store, made_by.get("verb", ""))
    dataset.attrs.update({"version": _version(), "jax_version": jax.__version__, "accuracy": _ACCURACY} | made_by)
    return store.finish(dataset)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The product of axes, as constant-size chunks: each a choice of the static axes and a range of the others."""

    numeric: dict[str, np.ndarray]
    static: dict[str, list[Any]]
    order: tuple[str, ...]
    batch: int

    @classmethod
    def of(cls, axes: Mapping[str, Any], batch_size: int | None) -> Grid:
        """Axes sorted into numeric and static; ValueError for an axis that is neither."""
        if not axes:
            raise ValueError("axes must name at least one axis, such as eps0=[1, 2, 4], got none.")
        numeric, static = {}, {}
        for name, values in axes.items():
            array = _axis(name, values)
            if array.dtype.kind in "iuf":
                numeric[name] = array
            else:
                static[name] = array.tolist()
        points = math.prod(len(values) for values in numeric.values())
        return cls(numeric, static, tuple(axes), _batch(points, batch_size))

    @property
    def points(self) -> int:
        """Grid points for one choice of the static axes."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the numeric axes."""
        return tuple(len(values) for values in self.numeric.values())

    @property
    def static_shape(self) -> tuple[int, ...]:
        """Lengths of the static axes."""
        return tuple(len(values) for values in self.static.values())

    @property
    def size(self) -> int:
        """Grid points altogether."""
        return self.points * math.prod(self.static_shape)

    @property
    def pieces(self) -> int:
        """Chunks for one choice of the static axes."""
        return -(-self.points // self.batch)

    @property
    def chunks(self) -> int:
        """Number of all chunks."""
        return self.pieces * math.prod(self.static_shape)

    def span(self, chunk: int) -> tuple[int, int, int]:
        """(static choice, first point, last point + 1) of a chunk."""
        choice, piece = divmod(chunk, self.pieces)
        return choice, piece * self.batch, min((piece + 1) * self.batch, self.points)

    def choice(self, choice: int) -> dict[str, Any]:
        """The values of the static axes."""
        where = np.unravel_index(choice, self.static_shape) if self.static else ()
        return {name: values[i] for (name, values), i in zip(self.static.items(), where, strict=True)}

    def arguments(self, chunk: int) -> dict[str, Any]:
        """Keyword arguments of one call, the numeric ones of length ``batch`` (the last point repeated)."""
        choice, start, stop = self.span(chunk)
        flat = np.minimum(np.arange(start, start + self.batch), stop - 1)
        where = np.unravel_index(flat, self.shape) if self.numeric else ()
        values = {name: axis[i] for (name, axis), i in zip(self.numeric.items(), where, strict=True)}
        return values | self.choice(choice)

    def probes(self) -> Iterator[dict[str, Any]]:
        """Calls that see every axis value (or its extremes, where the axis is longer than a chunk) at least once."""
        first: dict[str, Any] = {name: axis[0] for name, axis in self.numeric.items()}
        columns: dict[str, list[Any]] = {name: [] for name in self.numeric}
        for name, axis in self.numeric.items():
            tried = axis if sum(self.shape) <= self.batch else _extremes(axis)
            for other in self.numeric:
                columns[other].extend(tried if other == name else [first[other]] * len(tried))
        size = len(next(iter(columns.values())))
        take: np.ndarray = np.minimum(np.arange(-(-size // self.batch) * self.batch), size - 1)
        for choice in range(math.prod(self.static_shape)):
            for start in range(0, len(take), self.batch):
                part = take[start : start + self.batch]
                yield {n: np.asarray(column)[part] for n, column in columns.items()} | self.choice(choice)


def _axis(name: str, values: Any) -> np.ndarray:
    array = np.atleast_1d(np.asarray(values))
    mixed = array.dtype.kind not in "iufb" or any(isinstance(v, (str, bytes)) for v in np.ravel(values).tolist())
    array = np.atleast_1d(np.asarray(values, dtype=object)) if mixed else array
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"axis {name} must be a number or a non-empty 1-D sequence, got shape {array.shape}.")
    allowed = (str, bytes, bool, type(None), int, float)
    bad = [v for v in array.tolist() if not isinstance(v, allowed)]
    if bad:
        raise ValueError(f"axis {name} must hold real numbers, strings, booleans or None, got {bad[0]!r}.")
    return array


def _extremes(axis: np.ndarray) -> np.ndarray:
    ends = np.array([0, int(np.argmin(axis)), int(np.argmax(axis))])
    return np.concatenate([axis[ends], axis[~np.isfinite(axis)][:1]])


def _batch(points: int, batch_size: int | None) -> int:
    if batch_size is None:
        return -(-points // -(-points // _DEFAULT_BATCH))
    if isinstance(batch_size, bool) or int(batch_size) != batch_size or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number >= 1 or None, got {batch_size!r}.")
    return min(int(batch_size), points)


def _run(fn: Callable, grid: Grid, devices: list[Any], store: Any, advance: Callable[[int], None]) -> list[dict]:
    """Evaluate every chunk that the store lacks; returns the verb calls seen."""
    todo = [chunk for chunk in range(grid.chunks) if not store.has(chunk)]
    advance(grid.size - sum(_length(grid, chunk) for chunk in todo))
    with provenance.observe() as calls:
        if grid.numeric and len(todo) > 2 and len(todo) == grid.chunks:
            with _on(devices[0]):
                for arguments in grid.probes():
                    _evaluate(fn, arguments, grid.batch)
        # the first chunk alone: it compiles, and threads would all compile the same
        alone = 1 if len(devices) > 1 else len(todo)
        _work(fn, grid, devices[0], store, _Queue(todo[:alone]), advance)
        queue = _Queue(todo[alone:])
        with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
            copies = [(contextvars.copy_context(), device) for device in devices]
            futures = [pool.submit(c.run, _work, fn, grid, d, store, queue, advance) for c, d in copies]
        for future in futures:
            future.result()
    return calls


class _Queue:
    """Chunk numbers handed out one at a time to competing threads, until somebody fails."""

    def __init__(self, chunks: list[int]) -> None:
        self.lock = threading.Lock()
        self._chunks = iter(chunks)

    def take(self) -> int | None:
        with self.lock:
            return next(self._chunks, None)

    def close(self) -> None:
        with self.lock:
            self._chunks = iter(())


def _work(fn: Callable, grid: Grid, device: Any, store: Any, queue: _Queue, advance: Callable[[int], None]) -> None:
    while (chunk := queue.take()) is not None:
        try:
            with _on(device):
                store.put(chunk, _chunk(fn, grid, chunk))
        except BaseException as error:
            queue.close()
            _explain(error, grid, chunk)
            raise
        with queue.lock:
            advance(_length(grid, chunk))


def _length(grid: Grid, chunk: int) -> int:
    _, start, stop = grid.span(chunk)
    return stop - start


def _on(device: Any) -> Any:
    return contextlib.nullcontext() if device is None else jax.default_device(device)


def _explain(error: BaseException, grid: Grid, chunk: int) -> None:
    choice, start, stop = grid.span(chunk)
    error.add_note(f"in chunk {chunk} of {grid.chunks}: points {start} to {stop - 1} {grid.choice(choice) or ''}")


def _chunk(fn: Callable, grid: Grid, chunk: int) -> dict[str, np.ndarray]:
    results = _evaluate(fn, grid.arguments(chunk), grid.batch)
    return {name: values[: _length(grid, chunk)] for name, values in results.items()}


def _evaluate(fn: Callable, arguments: dict[str, Any], size: int) -> dict[str, np.ndarray]:
    flat = {}
    try:
        result = fn(**arguments)
    except (TypeError, ValueError) as error:
        if _takes_numbers_only(fn, arguments):
            raise TypeError(
                f"fn must accept arrays, got one that accepts single numbers only: numeric axes arrive as arrays of "
                f"{size} grid points. Use NumPy's functions (np.exp, np.where for if), or wrap it: np.vectorize(fn)."
            ) from error
        raise
    for name, value in _named(fn, result):
        array = np.asarray(value)
        if np.iscomplexobj(array):
            raise ValueError(f"fn must return real values, got {array.dtype} for {name}.")
        if array.shape not in ((), (size,)):
            raise ValueError(f"fn must return one value per grid point, shape ({size},), got {array.shape} for {name}.")
        flat[name] = np.broadcast_to(array, (size,)).astype(np.float64)
    return flat


def _takes_numbers_only(fn: Callable, arguments: dict[str, Any]) -> bool:
    """Whether fn fails at an array of equal grid points and not at one of them as a number."""
    arrays = {name: np.full_like(a, a[0]) for name, a in arguments.items() if isinstance(a, np.ndarray)}
    try:
        fn(**{**arguments, **{name: array[0].item() for name, array in arrays.items()}})
    except Exception:  # whatever it is, the caller has an error of fn to show
        return False
    try:
        fn(**{**arguments, **arrays})
    except (TypeError, ValueError):
        return True
    return False


def _named(fn: Callable, result: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(result, Bounds):
        yield f"{prefix}_lower".lstrip("_"), result.lower
        yield f"{prefix}_upper".lstrip("_"), result.upper
    elif isinstance(result, Mapping):
        for name, value in result.items():
            yield from _named(fn, value, str(name))
    else:
        own = getattr(fn, "__name__", "value")
        yield prefix or (own if own.isidentifier() else "value"), result


def _identity(fn: Callable, grid: Grid) -> str:
    return fingerprint(fn, grid.numeric, grid.static, grid.order, grid.batch, _version(), jax.__version__)


def _version() -> str:
    try:
        return importlib.metadata.version("jaxdp-accounting")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _assemble(xarray: Any, grid: Grid, store: Any, verb: str) -> Any:
    arrays: dict[str, np.ndarray] = {}
    for chunk in range(grid.chunks):
        choice, start, stop = grid.span(chunk)
        for name, values in store.get(chunk).items():
            if name not in arrays:
                arrays[name] = np.full((math.prod(grid.static_shape), grid.points), np.nan)
            arrays[name][choice, start:stop] = values
    if verb in _LABELS and verb not in grid.order and "value" in arrays:
        arrays = {verb if name == "value" else name: values for name, values in arrays.items()}
    dims, shape = (*grid.static, *grid.numeric), grid.static_shape + grid.shape
    data = {name: (dims, values.reshape(shape), _label(_quantity(name, verb))) for name, values in arrays.items()}
    coords = {n: (n, a, _label(n)) for n, a in (grid.numeric | grid.static).items()}
    coords = {n: (d, [str(v) for v in a] if n in grid.static else a, label) for n, (d, a, label) in coords.items()}
    return xarray.Dataset(data, coords).transpose(*grid.order)


def _quantity(name: str, verb: str) -> str:
    """The two sides of a `Bounds` by the verb that gave them: lower of epsilon_bounds is epsilon_lower."""
    quantity = verb.removesuffix("_bounds")
    return f"{quantity}_{name}" if name in ("lower", "upper") and quantity in _LABELS else name


def _label(name: str) -> dict[str, str]:
    base, _, side = name.rpartition("_")
    if side in ("lower", "upper") and base in _LABELS:
        long_name, units = _LABELS[base]
        return {"long_name": f"{long_name}, certified {side} bound", "units": units}
    long_name, units = _LABELS.get(name, (name.replace("_", " "), ""))
    return {"long_name": long_name} | ({"units": units} if units else {})


def _progress_bar(wanted: bool, grid: Grid) -> Callable[[int], None]:
    if not wanted:
        return lambda points: None
    return _require("tqdm").tqdm(total=grid.size, unit="point", unit_scale=True).update


def _require(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'sweep needs {name}: pip install "jaxdp-accounting[sweep]".') from error
