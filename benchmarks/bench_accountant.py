"""The Fourier accountant beside dp_accounting's PLD and prv_accountant: time, first answers and accuracy, in one run.

Run `python benchmarks/bench_accountant.py` (needs dp-accounting and prv-accountant); it writes
benchmarks/results/accountant.md. `--quick` takes small grids and fewer settings and writes nothing. Every jaxdp figure
covers both directions (add and remove). The process keeps to one core, set before jax starts, as the baselines use one:
all times are CPU times, compiler threads included. Baselines run at their default accuracy, on a random sample of the
same settings where the whole would take minutes; the table says so.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAXDP_COMPILE_AFTER", "0")  # warm calls run compiled programs; first answers use new processes
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import dp_accounting  # noqa: E402  # after the core is chosen
import jax  # noqa: E402
import numpy as np  # noqa: E402
import prv_accountant  # noqa: E402
from dp_accounting import pld  # noqa: E402

import jaxdp  # noqa: E402

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
EXACT_REMOVE, EXACT_ADD = 19.95598571, 19.95040552  # of `composition_c`
NOT_RUN = (math.nan, "not run")
PLD_IMPORT = "import dp_accounting\nfrom dp_accounting import pld\n"
DPSGD = "jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), 0.01), 1000)"
PLD_DPSGD = (
    "dp_accounting.SelfComposedDpEvent("
    "dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(sigma)), 1000)"
)
# name: (code for jaxdp, code for dp_accounting or "" if it has no equivalent)
FIRST = {
    "Gaussian": ("print(jaxdp.epsilon(jaxdp.Gaussian(1.0), 1e-5))", ""),
    "shuffle, n = 1e6": ("print(jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 10**6), 1e-6))", ""),
    "shuffled k-RR, n = 1e6": (
        "print(jaxdp.epsilon(jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, 10), 10**6), 1e-6))",
        "",
    ),
    "DP-SGD, both directions": (
        f"sigma = 1.0; print(jaxdp.epsilon({DPSGD}, 1e-5))",
        f"sigma = 1.0; a = pld.PLDAccountant(); a.compose({PLD_DPSGD}); print(a.get_epsilon(1e-5))",
    ),
    "calibrate DP-SGD": (
        f"print(jaxdp.calibrate(lambda sigma: {DPSGD}, epsilon=1.0, delta=1e-5, bracket=(0.5, 10.0)))",
        f"print(dp_accounting.calibrate_dp_mechanism(pld.PLDAccountant, lambda sigma: {PLD_DPSGD}, 1.0, 1e-5, "
        "dp_accounting.ExplicitBracketInterval(0.5, 10.0), tol=1e-6))",
    ),
    "1000 random DP-SGD settings, both directions": (
        "import numpy as np; random = np.random.default_rng(0).uniform\n"
        "q, steps, delta = 10 ** random(-4, -1, 1000), np.round(10 ** random(2, 5, 1000)), 10 ** random(-9, -5, 1000)\n"
        "steps = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(random(0.5, 10, 1000)), q), steps)\n"
        "print(jaxdp.epsilon(steps, delta).max())",
        "",
    ),
    "trade-off curve of DP-SGD, 50 rates": (
        f"import numpy as np; sigma = 1.0; print(jaxdp.tradeoff({DPSGD}, np.linspace(0.01, 0.99, 50)))",
        "",
    ),
    "300 distinct mechanisms": (
        "parts = [jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1 + i / 100), 0.01), i) for i in range(1, 301)]\n"
        "print(jaxdp.epsilon(jaxdp.compose(*parts), 1e-6))",
        "",
    ),
    "ten composed shuffled rounds": (
        "rounds = jaxdp.repeat(jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, 10), 10**5), 10)\n"
        "print(jaxdp.epsilon(rounds, 1e-6))",
        "",
    ),
}
BATCH = 64
SAMPLE = 16  # random points of a grid that the baseline runs


def clock(call):
    """(CPU seconds, value)."""
    start = time.process_time()
    value = call()
    return time.process_time() - start, value


def timed(call, repeats=3):
    """(CPU seconds by which the first call exceeds a warm one, CPU seconds of the fastest warm call, value)."""
    first, value = clock(call)
    warm = min(clock(call)[0] for _ in range(repeats))
    return max(first - warm, 0.0), warm, value


def baseline(call):
    """(CPU seconds, value); the value is the name of the exception if the call raises."""

    def guarded():
        try:
            return float(call())
        except Exception as error:  # the failures of the baselines are part of the comparison
            return type(error).__name__

    return clock(guarded)


def processes(code, repeats=3):
    """Least CPU seconds of a new process with an empty home that runs ``code``, everything included."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as home:
            environment = {"PATH": os.environ["PATH"], "HOME": home}
            subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(repeats))


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
    """CPU seconds per epsilon of one setting, in one call for BATCH settings like it (sigma apart by 1e-9)."""
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
    """PLD on finer grids, for a setting where it is fast but far from the exact value."""
    sigma, q, steps, delta, exact = SETTINGS[2]
    cells = []
    for interval in (1e-5, 1e-6, 1e-7):
        seconds, value = baseline(functools.partial(pld_epsilon, sigma, q, steps, delta, interval))
        cells.append(f"{interval}: {show(value, exact)}, {seconds * 1e3:.0f} ms")
    return [f"PLD on finer grids for sigma {sigma}, q {q}, T {steps}, delta {delta}: {'; '.join(cells)}."]


def first_answers(quick):
    """What a person waits for in a new process, as a multiple of one that compiles an addition."""
    unit = processes("import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()")
    rows = ["| first answer of a process | jaxdp, CPU s | additions | dp_accounting, CPU s |", "|---|---|---|---|"]
    for name, (ours, theirs) in FIRST.items():
        seconds = processes("import jaxdp\n" + ours, 1 if quick else 3)
        other = f"{processes(PLD_IMPORT + theirs):.2f}" if theirs and not quick else ""
        rows.append(f"| {name} | {seconds:.2f} | {seconds / unit:.1f} | {other} |")
    head = f"Whole processes, imports included; one that compiles one addition takes {unit:.2f} s."
    return ["## First answers", "", head, "", *rows, ""]


def against_sample(points, warm, bounds, settings):
    """Lines that compare jaxdp on all points with PLD on a random sample, by CPU time. settings: index -> arguments."""
    picks = np.random.default_rng(0).choice(points, SAMPLE, replace=False)
    seconds, apart, unbounded = [], [], 0
    for i in picks:
        used, value = baseline(functools.partial(pld_epsilon, *settings(i)))
        seconds.append(used)
        unbounded += isinstance(value, str) or not math.isfinite(value)
        apart.append(math.inf if isinstance(value, str) else value / bounds.upper.ravel()[i] - 1)
    widest = np.max((bounds.upper - bounds.lower) / bounds.upper)
    return [
        f"jaxdp {warm:.2f} s warm ({warm / points * 1e3:.2f} ms a point), widest relative gap {widest:.1e}.",
        f"dp_accounting PLD {np.mean(seconds) * 1e3:.0f} ms a point (random sample of {SAMPLE}, {unbounded} without a "
        f"number); ratio {np.mean(seconds) * points / warm:.0f}. PLD above jaxdp, relative: {min(apart):.1e} to "
        f"{max(apart):.1e}.",
        "",
    ]


def grid_d(quick):
    """100 noise multipliers x 10 step counts."""
    sigma = np.linspace(0.7, 5, 10 if quick else 100)[:, None]
    steps = np.round(np.logspace(2, 5, 3 if quick else 10))
    _, warm, bounds = timed(lambda: jaxdp.epsilon_bounds(sampled(sigma, 0.01, steps), 1e-6))
    points = bounds.upper.size

    def setting(k):
        i, j = divmod(int(k), steps.size)
        return sigma[i, 0], 0.01, int(steps[j]), 1e-6

    title = f"## Grid: {points} epsilons, both directions (sigma 0.7..5, T 1e2..1e5, q 0.01, delta 1e-6)"
    return [title, "", *against_sample(points, warm, bounds, setting)]


def random_settings(quick):
    """Typical settings: sigma 0.5..10, q 1e-4..0.1, T 1e2..1e5, delta 1e-9..1e-5, log-uniform."""
    random, points = np.random.default_rng(20261123), 64 if quick else 1000
    low, high = np.log([0.5, 1e-4, 1e2, 1e-9]), np.log([10, 0.1, 1e5, 1e-5])
    sigma, q, steps, delta = np.exp(random.uniform(low, high, (points, 4))).T
    steps = np.round(steps)
    _, warm, bounds = timed(lambda: jaxdp.epsilon_bounds(sampled(sigma, q, steps), delta))
    lines = against_sample(points, warm, bounds, lambda i: (sigma[i], q[i], int(steps[i]), delta[i]))
    alone = [
        timed(lambda i=i: jaxdp.epsilon_bounds(sampled(sigma[i], q[i], steps[i]), delta[i]))[1]
        for i in range(0, points, 16)
    ]
    lines.insert(
        -1, f"Every 16th asked for by itself: {np.median(alone) * 1e3:.1f} ms, at most {max(alone) * 1e3:.1f}."
    )
    return [f"## {points} random settings, both directions (seed 20261123)", "", *lines]


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
    if not quick:  # both once more, in turn, because the speed of a machine drifts
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
        # composes the distributions directly: the accountant refuses randomized response beside the others
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


def header():
    packages = ("jax", "numpy", "dp-accounting", "prv-accountant")
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in packages)
    return [
        "# Fourier accountant",
        "",
        f"{platform.machine()}, {jax.default_backend()}, {versions}. CPU seconds on one core. Single runs of the",
        "baselines (calibration: the better of two), best of three to eighteen of jaxdp, compiled before. Excess:",
        "relative to the exact value (to the digits known: 9 and more).",
        "",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small grids, few baselines, print only")
    parser.add_argument("--only", nargs="*", default=None, help="names of sections, such as settings_a")
    arguments = parser.parse_args()
    lines = header()
    for part in (first_answers, settings_a, grid_d, random_settings, calibration, composition_c):
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
