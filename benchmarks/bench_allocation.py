"""Random allocation beside PLD_accounting: first answers, accuracy and time, in one run.

Run `python benchmarks/bench_allocation.py` (needs PLD_accounting, dp-accounting and prv-accountant); it writes
benchmarks/results/allocation.md. `--quick` takes fewer settings and no baseline and writes nothing. All times are CPU
times, of all threads. The baseline runs once for each of the first two settings, at its default accuracy, in both
directions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform

import jax
import numpy as np
from bench_accountant import clock, processes, timed

import jaxdp

ADDITION = "import jax, numpy as np; jax.jit(lambda x: x + 1)(np.float32(1)).block_until_ready()"
ONE = "import jaxdp; print(jaxdp.epsilon(jaxdp.RandomAllocation(jaxdp.Gaussian({}), {}), 1e-6))"
TEN = "import jaxdp; print(jaxdp.epsilon(jaxdp.repeat(jaxdp.RandomAllocation(jaxdp.Gaussian(1.0), 100), 10), 1e-6))"
# T, sigma, exact epsilon under remove at delta 1e-6, to the digits known
SETTINGS = [
    (100, 1.0, "0.857985977"),
    (1000, 2.0, "0.059231457"),
    (1000, 1.0, "0.171728685"),
    (100, 0.5, "6.39364"),
    (10_000, 1.0, "0.045822227"),
]
BATCH = 64
PEERS = 2  # number of settings that the baseline runs; each takes minutes


def allocation(steps, sigma, epochs=1):
    one = jaxdp.RandomAllocation(jaxdp.Gaussian(sigma), steps)
    return one if epochs == 1 else jaxdp.repeat(one, epochs)


def epsilon_bounds(*setting, delta=1e-6, relation=None, repeats=3):
    """(CPU seconds of the first call beyond a warm one, warm CPU seconds, bounds, gap). setting: for `allocation`."""
    first, warm, bounds = timed(lambda: jaxdp.epsilon_bounds(allocation(*setting), delta, relation=relation), repeats)
    return first, warm, bounds, (bounds.upper - bounds.lower) / np.maximum(bounds.upper, 1e-300)


def peer(asked, steps, sigma, epochs=1):
    """Two table cells: the interval of PLD_accounting at its default accuracy, and its CPU seconds; asked: run it."""
    if not asked:
        return "not run | "
    from PLD_accounting import gaussian_allocation_epsilon_range

    setting = {"delta": 1e-6, "sigma": sigma, "num_steps": steps, "num_epochs": epochs}
    seconds, (upper, lower) = clock(lambda: gaussian_allocation_epsilon_range(**setting))
    return f"{lower:.6g} to {upper:.6g} | {seconds:.1f}"


def first_answers(quick):
    addition = processes(ADDITION)
    lines = ["## First answers", "", f"Whole processes; one that compiles one addition takes {addition:.2f} s.", ""]
    lines += ["| first answer of a process | CPU s | additions |", "|---|---|---|"]
    rows = {"100 steps, noise 1": ONE.format(1.0, 100), "1000 steps, noise 2": ONE.format(2.0, 1000)}
    rows["100 steps, noise 1, ten epochs"] = TEN
    for name, code in rows.items():
        seconds = processes(code)
        lines.append(f"| {name}, both directions | {seconds:.2f} | {seconds / addition:.1f} |")
    return [*lines, ""]


def settings(quick):
    """Each setting alone and in a batch of 64 similar ones, both warm; the baseline in the same run."""
    lines = ["## Settings", "", f"delta 1e-6. Remove: alone, and in a batch of {BATCH} with noise up to 1% larger.", ""]
    lines += [
        "| T, sigma | exact | jaxdp upper | gap | ms alone | ms in a batch | PLD_accounting, both directions | s |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for i, (steps, sigma, exact) in enumerate(SETTINGS):
        _, alone, bounds, gap = epsilon_bounds(steps, sigma, relation="remove")
        _, batch, _, _ = epsilon_bounds(steps, sigma * np.linspace(1, 1.01, BATCH), relation="remove")
        lines.append(
            f"| {steps}, {sigma} | {exact} | {bounds.upper:.9g} | {gap:.0e} | {1e3 * alone:.1f} | "
            f"{1e3 * batch / BATCH:.1f} | {peer(i < PEERS and not quick, steps, sigma)} |"
        )
    return [*lines, ""]


def epochs(quick):
    lines = [
        "## Ten epochs, delta 1e-6, both directions",
        "",
        "| T, sigma | jaxdp upper | gap | CPU s |",
        "|---|---|---|---|",
    ]
    for steps, sigma, _ in SETTINGS[: 1 if quick else 4]:
        _, warm, bounds, gap = epsilon_bounds(steps, sigma, 10)
        lines.append(f"| {steps}, {sigma} | {bounds.upper:.6g} | {gap:.0e} | {warm:.2f} |")
    return [*lines, ""]


def random_settings(quick):
    """Random settings over the whole range: time a point, and how wide the intervals are."""
    count = 40 if quick else 330
    rng = np.random.default_rng(5)
    steps = np.round(np.exp(rng.uniform(np.log(2), np.log(1e6), count)))
    sigma = np.exp(rng.uniform(np.log(0.3), np.log(20), count))
    delta = np.exp(rng.uniform(np.log(1e-20), np.log(1e-3), count))
    lines = [f"## {count} random settings (T 2 to 1e6, sigma 0.3 to 20, delta 1e-20 to 1e-3; seed 5)", ""]
    for relation in ("remove", "add"):
        first, warm, _, gap = epsilon_bounds(steps, sigma, delta=delta, relation=relation, repeats=1)
        lines.append(
            f"{relation}: {1e3 * warm / count:.1f} ms a point warm, {first:.0f} s more in the first call; gap median "
            f"{np.median(gap):.0e}, widest {gap.max():.0e}, {np.sum(gap > 1e-6)} above 1e-6.\n"
        )
    return lines


def header():
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "numpy", "PLD_accounting"))
    return [
        "# Random allocation",
        "",
        f"{platform.machine()}, {jax.default_backend()}, {versions}. CPU seconds of all threads.",
        "Best of three of jaxdp, compiled before (but for first answers); single runs of the baseline.",
        "",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer settings, no baseline, print only")
    arguments = parser.parse_args()
    lines = header()
    for part in (first_answers, settings, epochs, random_settings):
        section = part(arguments.quick)
        print("\n".join(section), flush=True)
        lines += section
    if not arguments.quick:
        (pathlib.Path(__file__).parent / "results" / "allocation.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
