"""One shuffled round: accuracy against exact values beside time, and the rate against a plain SciPy sum.

Run `python benchmarks/bench_shuffle.py` (`--quick` for a smaller grid); it writes benchmarks/results/shuffle.md. The
baseline is what a user would write: the exact sum over all clone counts with scipy.stats.binom, inverted by brentq.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import time

import jax
import numpy as np
import scipy
from scipy import optimize, stats

import jaxdp
from jaxdp.hockey_stick.clones import clones_delta_bounds, clones_epsilon_bounds, clones_epsilon_upper
from jaxdp.hockey_stick.clones_law import USUAL_REACH, clones_law
from jaxdp.hockey_stick.krr import krr_epsilon_bounds
from jaxdp.hockey_stick.two_point import two_point_epsilon_bounds
from jaxdp.renyi.shuffled import clones_renyi_bounds

ROOT = pathlib.Path(__file__).parent
GOLDEN = json.loads((ROOT.parent / "tests" / "data" / "shuffle.json").read_text())["cases"]


def baseline_delta(users, eps0, epsilon):
    """delta(epsilon) of the clones pair, every clone count in one vector; delta_j = k1 bin - k2 tail."""
    local, central = np.exp(eps0), np.exp(epsilon)
    counts = np.arange(int(users))
    x = np.floor((local * central - 1) / ((local - 1) * (1 + central)) * (counts + 1)) + 1
    term = (local - central) / (local + 1) * stats.binom.pmf(x - 1, counts, 0.5)
    term = term - (central - 1) * stats.binom.sf(x - 1, counts, 0.5)
    return stats.binom.pmf(counts, users - 1, np.exp(-eps0)) @ np.maximum(term, 0.0)


def baseline_epsilon(users, eps0, delta):
    """The same inverted."""

    def excess(epsilon):
        return np.log(baseline_delta(users, eps0, epsilon) / delta)

    with np.errstate(divide="ignore"):  # delta underflows at the upper end of the bracket
        return optimize.brentq(excess, 0.0, eps0 * (1 - 1e-9), rtol=1e-6)


def point(kernel, *values, **static):
    """(seconds of the first call, median of 20 warm calls, answer) of one point."""
    arrays = [np.array([float(value)]) for value in values]
    start = time.perf_counter()
    answer = kernel(*arrays, **static)
    first, warm = time.perf_counter() - start, []
    for _ in range(20):
        start = time.perf_counter()
        answer = kernel(*arrays, **static)
        warm.append(time.perf_counter() - start)
    return first, float(np.median(warm)), answer


def points():
    """Rows: quantity, seconds of the first call (compilation, canary included), milliseconds of a warm point."""
    calls = [
        ("clones epsilon, n = 1e4", clones_epsilon_bounds, (1e4, 2.0, 1e-6)),
        ("clones epsilon, n = 1e9", clones_epsilon_bounds, (1e9, 2.0, 1e-6)),
        ("clones delta, n = 1e9", clones_delta_bounds, (1e9, 2.0, 3e-4)),
        ("two-point epsilon, n = 1e9", two_point_epsilon_bounds, (1e9, 2.0, 1e-6)),
        ("k-RR epsilon, n = 1e4, k = 20", krr_epsilon_bounds, (1e4, 4.0, 20, 1e-6)),
        ("k-RR epsilon, n = 1e9, k = 1000", krr_epsilon_bounds, (1e9, 4.0, 1000, 1e-6)),
        ("Renyi of order 16, n = 1e9", clones_renyi_bounds, (1e9, 2.0, 16.0)),
        ("law of the loss, n = 1e9", clones_law, (1e9, 2.0, USUAL_REACH)),
    ]
    rows, seen = [], set()
    for name, kernel, values in calls:
        first, warm, _ = point(kernel, *values)
        shown = "-" if kernel in seen else f"{first:.1f}"
        seen.add(kernel)
        rows.append(f"| {name} | {shown} | {1e3 * warm:.1f} |")
    return rows


def grid(size):
    """Milliseconds per point of a grid of eps0, n and delta, warm."""
    rng = np.random.default_rng(0)
    eps0, delta = rng.uniform(0.1, 10.0, size), 10.0 ** rng.uniform(-12, -6, size)
    users = np.floor(10.0 ** rng.uniform(3, 9, size))
    clones_epsilon_upper(users, eps0, delta)
    start = time.perf_counter()
    clones_epsilon_upper(users, eps0, delta)
    return 1e3 * (time.perf_counter() - start) / size


def against_baseline():
    """(baseline seconds for one epsilon at n = 1e6, its answer, ours)."""
    start = time.perf_counter()
    answer = baseline_epsilon(1e6, 1.0, 1e-6)
    seconds = time.perf_counter() - start
    return seconds, answer, clones_epsilon_upper(*(np.array([x]) for x in (1e6, 1.0, 1e-6)))[0]


ROUNDS = [
    (1e5, 4.0, 100, 1e-6),
    (1e6, 1.0, 1000, 1e-6),
    (1e4, 2.0, 30, 1e-9),
    (200.0, 3.0, 5, 1e-6),
    (1e9, 8.0, 1e4, 1e-9),
]
ORDERS = 1 + np.geomspace(1e-2, 1e3, 60)


def compositions():
    """Rows: users, eps0, rounds, delta, seconds of a warm call, distance of the bounds, the upper one, Renyi's."""
    rows = []
    for users, eps0, rounds, delta in ROUNDS:
        one = jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users)
        composed = jaxdp.repeat(one, rounds)
        jaxdp.epsilon_bounds(composed, delta=delta)
        start = time.perf_counter()
        lower, upper = jaxdp.epsilon_bounds(composed, delta=delta)
        warm = time.perf_counter() - start
        renyi = clones_renyi_bounds(np.full(ORDERS.size, users), np.full(ORDERS.size, eps0), ORDERS).upper
        by_renyi = jaxdp.conversions.epsilon_from_rdp(ORDERS, rounds * renyi, delta)
        rows.append(
            f"| {users:.0e} | {eps0:g} | {rounds:.0f} | {delta:.0e} | {warm:.2f} | {(upper - lower) / upper:.1e} | "
            f"{upper:.7g} | {float(by_renyi):.7g} |"
        )
    return rows


def golden_gaps():
    """Rows: family, number of cases, smallest and largest (upper - exact)/exact."""
    families = {
        "clones": (clones_epsilon_bounds, ("n", "eps0", "delta"), "eps", {}),
        "stronger": (clones_epsilon_bounds, ("n", "eps0", "delta"), "eps", {"rate": "stronger"}),
        "krr": (krr_epsilon_bounds, ("n", "eps0", "k", "delta"), "eps", {}),
        "renyi_clones": (clones_renyi_bounds, ("n", "eps0", "alpha"), "value", {}),
    }
    rows = []
    for name, (kernel, keys, answer, static) in families.items():
        cases = [c for c in GOLDEN if c["family"] == name and c.get("kind", "eps") == "eps"]
        cases = [c for c in cases if float(c[answer]) > 0]
        exact = np.array([float(c[answer]) for c in cases])
        upper = [kernel(*(np.array([float(c[key])]) for key in keys), **static).upper[0] for c in cases]
        gap = (np.array(upper) - exact) / exact
        rows.append(f"| {name} | {len(cases)} | {gap.min():.1e} | {gap.max():.1e} |")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a grid of 512 points, printed and not written")
    quick = parser.parse_args().quick
    size = 512 if quick else 10_000
    singles, per_point = points(), grid(size)
    seconds, theirs, ours = against_baseline()
    lines = [
        "# Shuffle amplification: accuracy and time",
        "",
        f"jax {jax.__version__}, scipy {scipy.__version__}, {platform.machine()}, {jax.default_backend()}, float64.",
        "",
        "| quantity | first call, s | warm point, ms |",
        "|---|---|---|",
        *singles,
        "",
        f"Grid of {size} points (eps0 0.1 to 10, n 1e3 to 1e9, delta 1e-12 to 1e-6), upper bound of epsilon: "
        f"{per_point:.2f} ms a point.",
        "",
        f"SciPy sum at n = 1e6, one epsilon: {seconds:.1f} s, {seconds * 1e3 / per_point:.0f} times a grid point; "
        f"it gives {theirs:.9g}, ours {ours:.9g}.",
        "",
        "Composed rounds, clones bound: relative distance of both bounds, the upper one, and by Renyi (60 orders).",
        "",
        "| users | eps0 | rounds | delta | warm, s | distance | epsilon | by Renyi |",
        "|---|---|---|---|---|---|---|---|",
        *compositions(),
        "",
        "Golden cases, (upper - exact)/exact:",
        "",
        "| family | cases | least | largest |",
        "|---|---|---|---|",
        *golden_gaps(),
        "",
    ]
    print("\n".join(lines))
    if not quick:
        (ROOT / "results").mkdir(exist_ok=True)
        (ROOT / "results" / "shuffle.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
