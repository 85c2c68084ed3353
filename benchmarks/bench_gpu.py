"""Large batches on a GPU: points per second, time of the first answer, and a sample compared with the CPU.

Run `python benchmarks/bench_gpu.py` on a machine with one; it writes benchmarks/results/gpu.md (`--out` elsewhere).
`--quick`: few points, printed only, on any platform. Times are wall-clock seconds with the transfers, of the first and
of the third of three calls. A random sample is computed on the CPU too, and the two intervals have to overlap.
"""

import argparse
import importlib.metadata
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxdp


class Case(NamedTuple):
    """A batch of settings. make(indices): mechanism and delta of some. sample: number that the CPU computes, too."""

    name: str
    size: int
    make: Callable[[np.ndarray], tuple[jaxdp.Mechanism, np.ndarray]]
    sample: int = 200
    relation: str | None = None


def drawn(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """eps0 0.1..8, n 1e5..1e9 (few: 1e3..1e5), k 2..1023, delta 1e-12..1e-5, sigma 0.5..10, q 1e-4..0.1, T 1e2..1e5."""
    rng = np.random.default_rng(seed)
    return {
        "eps0": rng.uniform(0.1, 8.0, size),
        "n": np.floor(10.0 ** rng.uniform(5, 9, size)),
        "few": np.floor(10.0 ** rng.uniform(3, 5, size)),
        "k": np.floor(2.0 ** rng.uniform(1, 10, size)),
        "delta": 10.0 ** rng.uniform(-12, -5, size),
        "sigma": 10.0 ** rng.uniform(np.log10(0.5), 1, size),
        "rate": 10.0 ** rng.uniform(-4, -1, size),
        "steps": np.floor(10.0 ** rng.uniform(2, 5, size)),
    }


def cases(largest: int) -> Iterator[Case]:
    """The cases that are measured; their sizes are multiples or fractions of ``largest``."""

    def case(name: str, size: int, build: Callable[[dict[str, np.ndarray]], jaxdp.Mechanism], *rest: Any) -> Case:
        p = drawn(size)

        def make(places: np.ndarray) -> tuple[jaxdp.Mechanism, np.ndarray]:
            chosen = {key: value[places] for key, value in p.items()}
            return build(chosen), chosen["delta"]

        return Case(name, size, make, *rest)

    local = jaxdp.LocalRandomizer
    yield case("Gaussian noise", largest, lambda p: jaxdp.Gaussian(p["sigma"]))
    yield case("shuffling, clones, n 1e5 to 1e9", largest, lambda p: jaxdp.Shuffled(local(p["eps0"]), p["n"], "clones"))
    yield case(
        "shuffled k-RR, k 2 to 1023, n 1e5 to 1e9",
        largest // 10,
        lambda p: jaxdp.Shuffled(jaxdp.RandomizedResponse(p["eps0"], p["k"]), p["n"]),
    )
    yield case(
        "shuffling, clones, n 1e3 to 1e5",
        largest // 100,
        lambda p: jaxdp.Shuffled(local(p["eps0"]), p["few"], "clones"),
    )
    yield case("Laplace noise, 100 times", largest // 100, lambda p: jaxdp.repeat(jaxdp.Laplace(p["sigma"]), 100), 50)
    yield case(
        "shuffling, clones, largest batch", 4 * largest, lambda p: jaxdp.Shuffled(local(p["eps0"]), p["n"], "clones")
    )
    yield case(
        "DP-SGD, one direction",
        largest // 30,
        lambda p: jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(p["sigma"]), p["rate"]), p["steps"]),
        200,
        "remove",
    )


def answer(case: Case, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of epsilon at these settings."""
    mechanism, delta = case.make(places)
    found = jaxdp.epsilon_bounds(mechanism, delta, relation=case.relation)
    return np.asarray(found.lower), np.asarray(found.upper)


def row(case: Case) -> str:
    """A table row. AssertionError where an interval does not overlap that of the CPU."""
    every = np.arange(case.size)
    start = time.perf_counter()
    answer(case, every)
    first = time.perf_counter() - start
    answer(case, every)  # compiles kernels that NumPy answered in the first call
    start = time.perf_counter()
    lower, upper = answer(case, every)
    warm = time.perf_counter() - start
    picks = np.random.default_rng(1).choice(case.size, min(case.sample, case.size), replace=False)
    with jax.default_device(jax.devices("cpu")[0]):
        cpu_lower, cpu_upper = answer(case, picks)
    assert np.all(lower[picks] <= cpu_upper) and np.all(cpu_lower <= upper[picks]), case.name
    apart = np.max(np.abs(upper[picks] - cpu_upper) / np.where(cpu_upper > 0, cpu_upper, 1.0))
    gap = np.percentile((upper - lower) / np.where(upper > 0, upper, 1.0), [50, 99, 100])
    return (
        f"| {case.name} | {case.size:.0e} | {first:.1f} | {case.size / warm:.1e} | "
        + " | ".join(f"{x:.0e}" for x in gap)
        + f" | {apart:.0e} |"
    )


def report(largest: int, only: str) -> Iterator[str]:
    """Lines of the page."""
    device = jax.devices()[0]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    yield "# A GPU"
    yield ""
    yield f"{device.device_kind}, Python {platform.python_version()}, {versions}."
    yield "Wall-clock seconds of one process, transfers included; points a second: of the third call."
    yield "Gap: (upper - lower)/upper of epsilon. Of shuffling, lower bounds are those of data sets, not the theorem's."
    yield "Apart: largest relative difference of upper bounds from the CPU, 200 random settings (Laplace: 50)."
    yield ""
    yield "| epsilon of | points | first call, s | points a second | gap, median | 99% | worst | apart |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases(largest):
        if only in case.name:
            yield row(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few points, printed only")
    parser.add_argument("--points", type=int, default=1_000_000, help="points of the largest batch")
    parser.add_argument("--only", default="", help="part of the names of the cases to run; printed only")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results" / "gpu.md")
    arguments = parser.parse_args()
    if jax.default_backend() == "cpu" and not arguments.quick:
        print("No GPU: nothing is measured. Install jax for your GPU, or say --quick.")
        return
    lines = []
    for line in report(4000 if arguments.quick else arguments.points, arguments.only):
        print(line, flush=True)
        lines.append(line)
    if not (arguments.quick or arguments.only):
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
