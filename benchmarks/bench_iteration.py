"""Last-iterate accounting: every person of a one-pass run, cyclic participation, and a grid of schedules.

Run `python benchmarks/bench_iteration.py`; it writes benchmarks/results/iteration.md. The baseline of the one-pass run
is the same recursion in plain Python, which does not account for rounding. Times are wall-clock seconds.
"""

from __future__ import annotations

import pathlib
import platform
import time

import jax
import numpy as np

import jaxdp
from jaxdp import iteration
from jaxdp.iteration import isotonic

STEPS = 100_000
DELTA = 1e-5


def baseline_mu(contraction, noise_std, shift):
    """mu of every index, by a loop from the last step backwards: the noise from its own step on hides an index."""
    share, variance, found = 1.0, 0.0, []
    for kappa, noise, moved in zip(contraction[::-1], noise_std[::-1], shift[::-1], strict=True):
        variance += (share * noise) ** 2
        found.append(share * moved / variance**0.5)
        share *= kappa
    return np.array(found[::-1])


def timed(call):
    """(seconds of the first call, best of three warm calls, value)."""
    start = time.perf_counter()
    value = call()
    first = time.perf_counter() - start
    warm = []
    for _ in range(3):
        start = time.perf_counter()
        value = call()
        warm.append(time.perf_counter() - start)
    return first, min(warm), value


def one_pass():
    kappa = np.full(STEPS, 0.999)
    noise, shift = np.ones(STEPS), np.full(STEPS, 0.5)
    first, warm, mu = timed(lambda: iteration.per_index_mu(kappa, noise, shift))
    _, loop, reference = timed(lambda: baseline_mu(kappa.tolist(), noise.tolist(), shift.tolist()))
    large = reference > 1e-100
    return first, warm, loop, np.max(np.abs(mu[large] / reference[large] - 1)), mu


def epsilons(mu):
    """`timed` epsilons of all indices, by the public verb."""
    return timed(lambda: jaxdp.epsilon(jaxdp.Gaussian(1 / mu), DELTA))


def cyclic():
    steps = iteration.cyclic_participation(10_000, STEPS)
    kappa = np.full(STEPS, 0.9999)
    return timed(lambda: iteration.participation_mu(kappa, 1.0, 0.5, steps))


def grid():
    kappa = np.linspace(0.9, 1.0, 200)[:, None, None, None]
    noise = np.geomspace(0.5, 5, 200)[None, :, None, None]
    taken = np.arange(50) < np.arange(1, 51)[:, None]
    before = isotonic.allocation.traces

    def call():
        # Steps beyond the end of a run: identity map, no noise, no shift.
        return iteration.gdp_mu(np.where(taken, kappa, 1.0), noise * taken, 1.0 * taken)

    return *timed(call), isotonic.allocation.traces - before


def main():
    first, warm, loop, gap, mu = one_pass()
    rows = [
        f"| mu of all {STEPS} indices of a one-pass run | {first:.2f} | {warm:.4f} | {loop:.3f} | {gap:.1e} |",
    ]
    eps_first, eps_warm, _ = epsilons(np.maximum(mu, 1e-3))
    task = f"epsilon of all {STEPS} indices (`jaxdp.epsilon`, mu >= 1e-3)"
    rows.append(f"| {task} | {eps_first:.2f} | {eps_warm:.3f} | | |")
    c_first, c_warm, _ = cyclic()
    rows.append(f"| mu of 10000 positions, cyclic, {STEPS} steps | {c_first:.2f} | {c_warm:.3f} | | |")
    g_first, g_warm, mu_grid, traces = grid()
    task = f"grid 200 x 200 x 50 (contraction, noise, steps), compilations: {traces}"
    rows.append(f"| {task} | {g_first:.2f} | {g_warm:.2f} | | |")
    text = "\n".join(
        [
            "# Last-iterate accounting",
            "",
            f"{platform.machine()}, jax {jax.__version__}, {jax.default_backend()}. First call includes compilation.",
            "",
            "| task | first call, s | warm, s | plain Python, s | largest relative difference of mu |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Where we lose: a single schedule of a few dozen steps is faster in plain Python than one kernel call.",
            "",
        ]
    )
    if not np.isfinite(mu_grid).all():
        raise ValueError("the grid holds a value that is not finite.")
    path = pathlib.Path(__file__).parent / "results" / "iteration.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
