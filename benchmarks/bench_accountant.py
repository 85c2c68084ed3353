"""The Fourier accountant beside dp_accounting's PLD and prv_accountant: time, compile time and accuracy, in one run.

Run `python benchmarks/bench_accountant.py` (needs dp-accounting and prv-accountant); it writes
benchmarks/results/accountant.md. `--quick` takes small grids and fewer settings and writes nothing. Every jaxdp figure
covers both directions (add and remove). Baselines run at their default accuracy on a sample where the whole would take
minutes, and are scaled up; the table says so.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import pathlib
import platform
import time

import dp_accounting
import jax
import numpy as np
import prv_accountant
from dp_accounting import pld

import jaxdp

# sigma, q, T, delta, exact epsilon (larger of add and remove; to the digits known)
SETTINGS = [
    (1, 0.01, 1000, 1e-5, 1.828236666516577),
    (0.8, 0.004, 10000, 1e-6, 4.028436037608012),
    (4, 0.00033, 10000, 1e-10, 0.0445389544),
    (4, 0.00033, 10000, 1.1e-18, 0.06721361410591918),
    (0.5, 0.001, 100, 1e-5, 2.108645314),
    (2, 0.1, 5000, 1e-8, 27.81331522523487),
    (10, 0.5, 100000, 1e-6, 199.6080550992302),
    (1, 1, 1, 1e-10, 6.547924066864951),
    (0.3, 1e-4, 2000, 1e-7, 13.17532604),
]
PRV_TOO_SLOW = {(10, 0.5, 100000)}  # no answer within 150 s
EXACT_SIGMA = 4.302106465739
EXACT_REMOVE, EXACT_ADD = 19.95598571, 19.95040552  # composition C
NOT_RUN = (math.nan, "not run")
BATCH = 64
GRID_SAMPLE = 5  # points of the grid that the baseline runs


def clock(call):
    """(seconds, value)."""
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def timed(call, repeats=3):
    """(seconds beyond a warm call in the first, best warm seconds, value)."""
    first, value = clock(call)
    warm = min(clock(call)[0] for _ in range(repeats))
    return max(first - warm, 0.0), warm, value


def baseline(call):
    """(seconds, value), the value an error's name when it has none."""
    start = time.perf_counter()
    try:
        value = float(call())
    except Exception as error:  # the failures of the baselines are part of the comparison
        value = type(error).__name__
    return time.perf_counter() - start, value


def sampled(sigma, q, steps):
    return jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), q), steps)


def pld_epsilon(sigma, q, steps, delta, interval=1e-4):
    """dp_accounting's PLD accountant, by default at its default grid (1e-4), both directions."""
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return accountant.get_epsilon(delta)


def prv_epsilon(sigma, q, steps, delta):
    """prv_accountant's upper bound, eps_error 0.01, remove only."""
    mechanism = prv_accountant.PoissonSubsampledGaussianMechanism(noise_multiplier=sigma, sampling_probability=q)
    accountant = prv_accountant.PRVAccountant(
        prvs=mechanism, max_self_compositions=steps, eps_error=0.01, delta_error=delta / 1000
    )
    return accountant.compute_epsilon(delta=delta, num_self_compositions=[steps])[2]


def show(value, exact):
    """A value with its relative excess over the exact one."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.9g} ({value / exact - 1:+.1e})"


def each_in_a_batch(sigma, q, steps, delta):
    """Seconds per epsilon of one setting when BATCH of its like (sigma apart by 1e-9) are asked for in one call."""
    near = sigma * (1 + 1e-9 * np.arange(BATCH))
    _, warm, _ = timed(lambda: jaxdp.epsilon_bounds(sampled(near, q, steps), delta))
    return warm / BATCH


def settings_a(quick):
    """Nine DP-SGD settings in one call."""
    chosen = SETTINGS[:2] if quick else SETTINGS
    sigma, q, steps, delta, exact = (np.array(column, float) for column in zip(*chosen, strict=True))
    compile_time, warm, bounds = timed(lambda: jaxdp.epsilon_bounds(sampled(sigma, q, steps), delta), 9)
    rows = [
        "| sigma, q, T, delta | jaxdp upper (excess) | gap | ms in a batch | PLD (excess), ms | PLD / jaxdp "
        "| prv (excess), ms |",
        "|---|---|---|---|---|---|---|",
    ]
    shared = warm / len(chosen)
    ratios, total = [], 0.0
    for i, (s, rate, count, target, truth) in enumerate(chosen):
        own = each_in_a_batch(s, rate, count, target)
        pld_time, pld_value = baseline(functools.partial(pld_epsilon, s, rate, count, target))
        prv_time, prv_value = NOT_RUN
        if not quick and (s, rate, count) not in PRV_TOO_SLOW:
            prv_time, prv_value = baseline(functools.partial(prv_epsilon, s, rate, count, target))
        total += pld_time
        ratios.append((pld_time / shared, pld_time / own))
        gap = (bounds.upper[i] - bounds.lower[i]) / bounds.upper[i]
        rows.append(
            f"| {s}, {rate}, {count}, {target} | {show(bounds.upper[i], truth)} | {gap:.0e} | {own * 1e3:.2f} "
            f"| {show(pld_value, truth)}, {pld_time * 1e3:.0f} | {ratios[-1][0]:.1f}; {ratios[-1][1]:.0f} "
            f"| {show(prv_value, truth)}, {prv_time * 1e3:.0f} |"
        )
    print("settings A: largest excess", np.max(bounds.upper / exact - 1))
    head = [
        f"All {len(chosen)} settings in one call: {warm * 1e3:.1f} ms warm ({shared * 1e3:.1f} ms each), compile "
        f"{compile_time:.1f} s; PLD {total * 1e3:.0f} ms in all, ratio {total / warm:.0f}.",
        f"Per setting, PLD / jaxdp: with a ninth of that call as jaxdp's time; with its time in a batch of {BATCH} "
        "like it (both directions).",
    ]
    return ["## A. DP-SGD settings", "", *head, "", *rows, "", *([] if quick else finer_pld()), ""]


def finer_pld():
    """PLD on finer grids, for the setting where it is fast and far off."""
    sigma, q, steps, delta, exact = SETTINGS[2]
    cells = []
    for interval in (1e-5, 1e-6, 1e-7):
        seconds, value = baseline(functools.partial(pld_epsilon, sigma, q, steps, delta, interval))
        cells.append(f"{interval}: {show(value, exact)}, {seconds * 1e3:.0f} ms")
    return [f"PLD on finer grids for sigma {sigma}, q {q}, T {steps}, delta {delta}: {'; '.join(cells)}."]


def grid_d(quick):
    """100 noise multipliers x 10 step counts."""
    sigma = np.linspace(0.7, 5, 10 if quick else 100)[:, None]
    steps = np.round(np.logspace(2, 5, 3 if quick else 10))
    compile_time, warm, bounds = timed(lambda: jaxdp.epsilon_bounds(sampled(sigma, 0.01, steps), 1e-6))
    points = bounds.upper.size
    picks = [divmod(int(i), steps.size) for i in np.linspace(0, points - 1, 2 if quick else GRID_SAMPLE)]
    seconds, tighter = [], []
    for i, j in picks:
        used, value = baseline(lambda a=sigma[i, 0], b=int(steps[j]): pld_epsilon(a, 0.01, b, 1e-6))
        seconds.append(used)
        tighter.append(value - bounds.upper[i, j])
    total = np.mean(seconds) * points
    widest = np.max((bounds.upper - bounds.lower) / bounds.upper)
    return [
        f"## Grid: {points} epsilons, both directions (sigma 0.7..5, T 1e2..1e5, q 0.01, delta 1e-6)",
        "",
        f"jaxdp {warm:.2f} s warm ({warm / points * 1e3:.2f} ms a point), compile {compile_time:.1f} s,",
        f"widest relative gap {widest:.1e}.",
        f"dp_accounting PLD {total:.0f} s (scaled from {len(picks)} points); ratio {total / warm:.0f}.",
        f"PLD minus jaxdp at those points: {min(tighter):.1e} to {max(tighter):.1e} (positive: jaxdp tighter).",
        "",
    ]


def calibration(quick):
    """Noise for epsilon 1, delta 1e-6, q 0.01, T 1e4."""

    def ours():
        return jaxdp.calibrate(lambda s: sampled(s, 0.01, 1e4), epsilon=1.0, delta=1e-6, bracket=(1.0, 20.0))

    compile_time, warm, value = timed(ours, 9)

    def theirs():
        return dp_accounting.calibrate_dp_mechanism(
            pld.PLDAccountant,
            lambda s: dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(s)), 10000
            ),
            1.0,
            1e-6,
            dp_accounting.ExplicitBracketInterval(1.0, 20.0),
            tol=1e-6,
        )

    seconds, other = NOT_RUN if quick else baseline(theirs)
    if not quick:  # in turn once more, because the machine's speed drifts
        warm, seconds = min(warm, timed(ours, 9)[1]), min(seconds, baseline(theirs)[0])
    return [
        "## Calibration of sigma (epsilon 1, delta 1e-6, q 0.01, T 1e4)",
        "",
        f"jaxdp {show(float(value), EXACT_SIGMA)} in {warm * 1e3:.1f} ms warm, compile {compile_time:.1f} s;",
        f"dp_accounting PLD {show(other, EXACT_SIGMA)} in {seconds * 1e3:.0f} ms; ratio {seconds / warm:.0f}.",
        "",
    ]


def composition_c(quick):
    """1300 mechanisms: 500 Gaussians, 500 randomized responses, 300 sampled Gaussians."""
    i = np.arange(500)
    p = 0.52 + 0.03 * i / 499
    sigmas = 50 + 50 * i / 499

    def ours():
        parts = [jaxdp.Gaussian(s) for s in sigmas] + [jaxdp.RandomizedResponse(e) for e in np.log(p / (1 - p))]
        whole = jaxdp.compose(*parts, sampled(1.0, 0.01, 300))
        return [jaxdp.epsilon(whole, 1e-6, relation=r) for r in ("remove", "add")]

    def theirs():
        # the distributions one by one: the accountant refuses randomized response beside the others
        loss = pld.privacy_loss_distribution
        parts = [loss.from_gaussian_mechanism(s) for s in sigmas]
        parts += [loss.from_randomized_response(2 * (1 - truth), 2) for truth in p]
        parts.append(loss.from_gaussian_mechanism(1.0, sampling_prob=0.01).self_compose(300))
        return functools.reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(1e-6)

    compile_time, warm, (remove, add) = timed(ours, 3)
    seconds, other = NOT_RUN if quick else baseline(theirs)
    return [
        "## C. 1300 distinct mechanisms, delta 1e-6",
        "",
        f"jaxdp remove {show(float(remove), EXACT_REMOVE)}, add {show(float(add), EXACT_ADD)} in {warm:.2f} s warm, "
        f"compile {compile_time:.1f} s;",
        f"dp_accounting PLD {show(other, EXACT_REMOVE)} in {seconds:.1f} s; ratio {seconds / warm:.0f}.",
        "",
    ]


def gpu_grid(quick):
    """1e5 points on an accelerator, when there is one."""
    if jax.default_backend() == "cpu" or quick:
        return []
    sigma, steps = np.linspace(0.7, 5, 1000)[:, None], np.round(np.logspace(2, 5, 100))
    compile_time, warm, _ = timed(lambda: jaxdp.epsilon(sampled(sigma, 0.01, steps), 1e-6), 1)
    figures = f"{1e5 / warm:.0f} points a second, compile {compile_time:.1f} s."
    return ["## 1e5 points on the accelerator", "", figures, ""]


def header():
    packages = ("jax", "numpy", "dp-accounting", "prv-accountant")
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in packages)
    return [
        "# Fourier accountant",
        "",
        f"{platform.machine()}, {jax.default_backend()}, {versions}. Single runs of the baselines (calibration: the "
        "better of two), best of three to eighteen of jaxdp, compile time apart. Excess: relative to the exact value "
        "(to the digits known: 9 and more).",
        "",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small grids, few baselines, print only")
    parser.add_argument("--only", nargs="*", default=None, help="names of sections, such as settings_a")
    arguments = parser.parse_args()
    lines = header()
    for part in (settings_a, grid_d, calibration, composition_c, gpu_grid):
        if arguments.only is None or part.__name__ in arguments.only:
            section = part(arguments.quick)
            print("\n".join(section), flush=True)
            lines += section
    if not arguments.quick and arguments.only is None:
        target = pathlib.Path(__file__).parent / "results" / "accountant.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
