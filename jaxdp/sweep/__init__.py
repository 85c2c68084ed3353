"""Evaluation of a function on the product of named axes, tile by tile, into a labelled xarray.Dataset."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import pickle
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax

from jaxdp import validate
from jaxdp.interval import Bounds
from jaxdp.runtime.extras import require
from jaxdp.runtime.fingerprint import fingerprint
from jaxdp.sweep.grid import Grid
from jaxdp.sweep.store import Folder, Memory, alone
from jaxdp.sweep.work import Task, require_versions, versions
from jaxdp.typing import Array, Axis, Number

if TYPE_CHECKING:
    import xarray

# Largest number of unfinished tiles at an executor: several for each worker of a large cluster, few enough to cancel.
_WAITING = 512
_ACCURACY = (
    "certified: upper bounds are never below the truth, and lower bounds (also of false negative rates) never above; "
    "target relative gap 1e-6 in epsilon, wider where double precision cannot reach it"
)
_NOT_AN_EXECUTOR = (
    "executor must follow concurrent.futures (submit returns a concurrent.futures.Future), got {}; "
    "for dask pass Client(...).get_executor()."
)


_Submit: TypeAlias = Callable[[Callable[[Any], Any], Any], concurrent.futures.Future[Any]]


class Executor(Protocol):
    """The interface of an executor: `concurrent.futures.Executor`, or dask's `Client.get_executor()`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> concurrent.futures.Future[Any]:
        """Start the call fn(*args) on a worker, and return its future."""
        ...


def sweep(
    fn: Callable[..., Number | Bounds[Array] | Mapping[str, Number | Bounds[Array]]],
    *,
    batch_size: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    executor: Executor | None = None,
    progress: bool = False,
    path: str | os.PathLike[str] | None = None,
    **axes: Axis,
) -> xarray.Dataset:
    """Values of ``fn`` on the product of named axes, as an xarray.Dataset with one dimension per axis.

    >>> data = jaxdp.sweep(lambda sigma: jaxdp.epsilon(jaxdp.Gaussian(sigma), 1e-6), sigma=[1.0, 2.0, 4.0])
    >>> data.epsilon.values.round(4)
    array([4.8866, 2.2541, 1.0607])

    fn: called with every axis name as a keyword. Numeric axes arrive as arrays of equal shape, one entry per grid point
        of a tile; other axes (strings, None, booleans) arrive as one value per call. Returns an array of the same
        shape, a `Bounds` (variables "lower", "upper"), or a dict of these. A single array is stored under the name of
        fn; for a lambda, under the name of the one jaxdp function (such as epsilon) that it calls, else as "value".
    batch_size: largest number of grid points in one call of fn, default 4096. A call computes one rectangular tile.
        Tiles at the edge are padded, so that all calls have one shape and compile once. batch_size determines the
        peak memory beyond the result.
    devices: JAX devices that compute tiles in parallel, one thread each. Default: the current default device.
    executor: computes the tiles elsewhere, as in `concurrent.futures`: ``submit(fn, *args)`` returns a
        `concurrent.futures.Future`. For a cluster use ``dask.distributed.Client(...).get_executor()``. fn has to be
        picklable for it. A worker with other releases of jaxdp, jax, jaxlib or numpy is an error.
    progress: show a tqdm bar that counts grid points.
    path: a file ending in .nc (netCDF, read into memory) or .zarr (values are read when they are used). Finished tiles
        are kept in ``<path>.parts``: after a kill or a full disk the same call continues from them, and a finished
        file is read instead of recomputed. The file itself appears at the end, in one step. A second sweep to the
        same path waits for the first.
    axes: 1-D sequences (a scalar is an axis of length 1).

    On processors of one kind, the numbers do not depend on devices, executor or interruptions, to the last bit.
    Before a long run fn is called with every axis value, so that an invalid value is rejected at the start (only with
    the extreme values, if the numeric axes together have more than batch_size values). An error in a tile is raised
    with a note that names the tile. The attributes hold versions, accuracy, and the jaxdp functions ("verb"),
    mechanisms and relations that fn used; for shuffled rounds also the bounds and randomizers.

    Raises:
        ValueError: bad axes, a wrong result shape, or a path that holds another computation.
        TypeError: fn accepts single numbers only or cannot be pickled, or executor is not an executor.
        RuntimeError: a worker runs other releases.
        ImportError: xarray is missing; the message names the extra.
    """
    validate.function("fn", fn, "values of the grid's points")
    xarray = require("xarray", "sweep", "sweep")
    if executor is not None and devices is not None:
        raise ValueError("devices must be None where an executor is given: its workers use their own default device.")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(_NOT_AN_EXECUTOR.format(type(executor).__name__))
    grid = Grid.of(axes, batch_size)
    if path is None:
        return _computed(fn, Memory(xarray, grid), grid, executor, devices, progress)
    target = pathlib.Path(path)
    if target.suffix not in (".nc", ".zarr"):
        raise ValueError(f"path must end in .nc or .zarr, got {str(path)!r}.")
    identity = fingerprint(fn, *grid.axes.items(), grid.steps, *versions().items())
    parts = target.with_name(target.name + ".parts")
    with alone(target, parts, require("filelock", "sweep", "sweep").FileLock):
        store = Folder(xarray, grid, target, parts, identity)
        finished = store.finished()
        return finished if finished is not None else _computed(fn, store, grid, executor, devices, progress)


def _computed(
    fn: Callable[..., Any],
    store: Memory,
    grid: Grid,
    executor: Executor | None,
    devices: Sequence[jax.Device] | None,
    progress: bool,
) -> Any:
    """The data set, after computing the tiles that the store lacks."""
    todo = store.missing()
    bar = require("tqdm", "sweep", "sweep").tqdm if progress else None
    done = grid.size - sum(map(grid.length, todo))
    task = Task(fn, grid, versions(), uuid.uuid4().hex)
    with contextlib.ExitStack() as stack:
        workers = _workers(executor, devices, stack)
        shown = stack.enter_context(bar(total=grid.size, initial=done, unit="point", unit_scale=True)) if bar else None

        def keep(tile: int, result: Any) -> None:
            store.keep(tile, *result)
            if shown is not None:
                shown.update(grid.length(tile))

        try:
            if grid.numeric and len(todo) > 2 and len(todo) == grid.tiles:
                _each(task.probe, list(grid.probes()), lambda *_: None, *workers)
            # The first tile runs alone: it compiles the programs that the others use.
            for tiles in (todo[:1], todo[1:]):
                _each(task, tiles, keep, *workers)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(store.kept()) from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if executor is None or not re.search("pickle|local object", str(error)):
                raise
            raise TypeError(
                "fn cannot be sent to the executor's workers: define it at the top level of a module, or use an "
                f"executor that sends any function, such as dask's. ({error})"
            ) from error
    attributes = {"version": versions()["jaxdp"], "jax_version": jax.__version__, "accuracy": _ACCURACY}
    return store.finish(attributes)


def _each(
    fn: Callable[[Any], Any], arguments: list[Any], keep: Callable[[Any, Any], None], submit: _Submit, window: int
) -> None:
    """Call keep(argument, fn(argument)) as results come, ``window`` calls at once; an error cancels waiting calls."""
    waiting: dict[concurrent.futures.Future[Any], Any] = {}
    remaining = iter(arguments)
    try:
        while True:
            for argument in itertools.islice(remaining, window - len(waiting)):
                future = submit(fn, argument)
                if not isinstance(future, concurrent.futures.Future):
                    raise TypeError(_NOT_AN_EXECUTOR.format(type(getattr(submit, "__self__", submit)).__name__))
                waiting[future] = argument
            if not waiting:
                return
            finished, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                keep(waiting.pop(future), future.result())
    except BaseException:
        for future in waiting:
            future.cancel()
        raise


def _workers(
    executor: Executor | None, devices: Sequence[jax.Device] | None, stack: contextlib.ExitStack
) -> tuple[_Submit, int]:
    """(submit, number of calls that may be unfinished): on the executor, a thread per device, or this thread."""
    if executor is not None:
        ask_all = getattr(getattr(executor, "_client", None), "run", None)
        if ask_all is not None:  # dask: the releases on all workers are checked before any work
            ask_all(require_versions, versions())
        return executor.submit, _WAITING
    if devices:
        own = iter(devices)  # each thread takes one, and keeps it as its default device
        enter = lambda: jax.default_device(next(own)).__enter__()  # noqa: E731
        threads = concurrent.futures.ThreadPoolExecutor(len(devices), initializer=enter)
        return stack.enter_context(threads).submit, len(devices)
    return _now, 1


def _now(fn: Callable[[Any], Any], argument: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(fn(argument))
    return future
