"""Tiles per second of one sweep: in this process, on a dask cluster with one worker, and with two.

Run `python benchmarks/bench_sweep.py`; it writes benchmarks/results/sweep.md. All three compute the same grid and must
give the same bits. Every process computes the grid once before it is timed, so that the times exclude compiling.
"""

from __future__ import annotations

import os
import pathlib
import platform
import tempfile
import time

import distributed
import jax
import numpy as np

import jaxdp

RESULTS = pathlib.Path(__file__).parent / "results" / "sweep.md"
TILE = 500
GRID = {
    "noise": np.linspace(1.0, 5.0, 20),
    "rate": np.geomspace(1e-3, 0.1, 20),
    "steps": np.geomspace(100, 1e5, 20).round(),
}
TILES = np.prod([len(axis) for axis in GRID.values()]) // TILE


def dpsgd(noise, rate, steps):
    return jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(noise), rate), steps), 1e-6)


def warm() -> None:
    """Compile the programs that the grid needs, in the calling process."""
    jaxdp.sweep(dpsgd, **GRID, batch_size=TILE)


def measured(executor, path: pathlib.Path):
    """(seconds, dataset) of one sweep into a zarr store."""
    start = time.perf_counter()
    result = jaxdp.sweep(dpsgd, **GRID, batch_size=TILE, executor=executor, path=path)
    return time.perf_counter() - start, result.load()


def on_cluster(workers: int, path: pathlib.Path):
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=":0", worker_dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(warm)
        return measured(client.get_executor(), path)


def main() -> None:
    answers = {}
    with tempfile.TemporaryDirectory() as kept:
        folder = pathlib.Path(kept)
        warm()
        answers["this process"] = measured(None, folder / "alone.zarr")
        for name, workers in (("1 dask worker", 1), ("2 dask workers", 2)):
            answers[name] = on_cluster(workers, folder / f"{workers}.zarr")
    rows = ["| where | seconds | tiles per second | points per second | same bits |", "|---|---|---|---|---|"]
    alone = answers["this process"][1]
    for name, (seconds, result) in answers.items():
        same = bool((result.lower == alone.lower).all() & (result.upper == alone.upper).all())
        rows.append(f"| {name} | {seconds:.1f} | {TILES / seconds:.2f} | {TILES * TILE / seconds:.0f} | {same} |")
        assert same, name
    RESULTS.write_text(
        "# A sweep on one machine and on a cluster of processes\n\n"
        f"Both bounds of epsilon of DP-SGD at delta 1e-6, {TILES} tiles of {TILE} points, written to a zarr store; "
        f"warm, wall clock, {os.cpu_count()} cores, which\none process uses too. jaxdp {jaxdp.__version__}, "
        f"jax {jax.__version__}, numpy {np.__version__}, Python {platform.python_version()}.\n\n"
        + "\n".join(rows)
        + "\n"
    )
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
