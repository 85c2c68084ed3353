"""Shuffled rounds: accuracy and CPU time of one thread, and a sum by SciPy in the same run.

Run `python benchmarks/bench_shuffle.py`; it writes benchmarks/results/shuffle.md. `--quick`: few points, printed only.
The process keeps to one core, set before jax starts, and time is `time.process_time`: compiler threads count too.
The baselines are what a user would write: the sum over clone counts with scipy.stats.binom, inverted by brentq, over
all counts and over those within ten standard deviations; with `--apple FOLDER`, a checkout of
github.com/apple/ml-shuffling-amplification, also the code of Feldman, McMillan and Talwar.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax  # noqa: E402  # after the core is chosen
import numpy as np  # noqa: E402
import scipy  # noqa: E402
from scipy import optimize, stats  # noqa: E402

import jaxdp  # noqa: E402
from jaxdp.interval import Bounds  # noqa: E402
from jaxdp.runtime import precision  # noqa: E402
from jaxdp.shuffle.bounds import bounds, clones_bounds  # noqa: E402
from jaxdp.sources.shuffling import upper_laws  # noqa: E402

ROOT = pathlib.Path(__file__).parent
GOLDEN = json.loads((ROOT.parent / "tests" / "data" / "shuffle.json").read_text())["cases"]
GAP = 1e-6


class Timed(NamedTuple):
    """CPU seconds of a first call and of a second one, and the answer of the second."""

    first: float
    warm: float
    answer: Any


def timed(call: Callable[[], Any]) -> Timed:
    """Call twice, and time both calls."""
    start = time.process_time()
    call()
    middle = time.process_time()
    answer = call()
    return Timed(middle - start, time.process_time() - middle, answer)


def random_points(size: int, seed: int, users: tuple[float, float]) -> dict[str, np.ndarray]:
    """eps0 0.1..8, delta 1e-12..1e-5, k 2..1023. users: range of log10 n."""
    rng = np.random.default_rng(seed)
    return {
        "eps0": rng.uniform(0.1, 8.0, size),
        "n": np.floor(10.0 ** rng.uniform(*users, size)),
        "delta": 10.0 ** rng.uniform(-12, -5, size),
        "k": np.floor(2.0 ** rng.uniform(1, 10, size)),
    }


def of_theorem(randomizer: Any, n: np.ndarray, delta: np.ndarray) -> Bounds:
    """Bounds of the epsilon of the privacy blanket theorem, of a randomizer with one law, that of its worst inputs."""
    made = jax.tree_util.tree_map(lambda a: a[:, 0], upper_laws(jaxdp.Shuffled(randomizer, n)))
    return bounds("epsilon", made, n, delta, GAP)


def relative(found: Bounds) -> np.ndarray:
    """(upper - lower)/upper, 0 where both are 0."""
    lower, upper = (np.asarray(side) for side in found)
    return (upper - lower) / np.where(upper > 0, upper, 1.0)


def gaps(found: Bounds) -> str:
    """Median, 99% quantile and largest of the relative gaps, as table cells."""
    return " | ".join(f"{x:.0e}" for x in np.percentile(relative(found), [50, 99, 100]))


def clones_row(name: str, p: dict[str, np.ndarray], bound: str) -> tuple[str, float]:
    """(table row of any randomizer, microseconds a point of `clones_bounds`)."""
    one = timed(lambda: clones_bounds("epsilon", p["eps0"], p["n"], p["delta"], bound, GAP))
    mechanism = jaxdp.Shuffled(jaxdp.LocalRandomizer(p["eps0"]), p["n"], bound)
    verb = timed(lambda: jaxdp.epsilon_bounds(mechanism, p["delta"]))
    return row(name, p["n"].size, one, verb), 1e6 * one.warm / p["n"].size


def named_row(name: str, make: Callable[[dict[str, np.ndarray]], Any], p: dict[str, np.ndarray]) -> str:
    """Table row of a named randomizer. make: its record from the points."""
    randomizer = make(p)
    one = timed(lambda: of_theorem(randomizer, p["n"], p["delta"]))
    verb = timed(lambda: jaxdp.epsilon_bounds(jaxdp.Shuffled(randomizer, p["n"]), p["delta"]))
    return row(name, p["n"].size, one, verb)


def row(name: str, size: int, one: Timed, verb: Timed) -> str:
    """Table row: points, microseconds and gaps of the bracket (``one``), microseconds and median gap of the verb."""
    distance = np.median(relative(verb.answer))
    return (
        f"| {name} | {size} | {1e6 * one.warm / size:.0f} | {gaps(one.answer)} | {1e6 * verb.warm / size:.0f} | "
        f"{distance:.0e} |"
    )


NAMED: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "k-RR, k 2 to 1023": lambda p: jaxdp.RandomizedResponse(p["eps0"], p["k"]),
    "OUE, k 2 to 1023": lambda p: jaxdp.UnaryEncoding(p["eps0"], p["k"]),
    "symmetric unary, k 2 to 1023": lambda p: jaxdp.UnaryEncoding(p["eps0"], p["k"], optimized=False),
    "subset selection, k 2 to 1023": lambda p: jaxdp.SubsetSelection(p["eps0"], p["k"]),
    "OLH": lambda p: jaxdp.LocalHashing(p["eps0"], None, 0.0 * p["eps0"]),
    "BLH": lambda p: jaxdp.LocalHashing(p["eps0"], 2.0 + 0.0 * p["eps0"], 0.0 * p["eps0"]),
    "Hadamard": lambda p: jaxdp.HadamardResponse(p["eps0"]),
    "Laplace on [0, 1]": lambda p: jaxdp.LocalLaplace(p["eps0"]),
}


def any_randomizer(size: int) -> Iterator[str]:
    """Table rows: batches of random points and the grid, clones and stronger."""
    large = random_points(size, 0, (5, 9))
    heavy = large["n"] * np.exp(-large["eps0"]) * -np.expm1(-large["eps0"]) >= 1e4
    eps0, n = (a.ravel() for a in np.meshgrid(np.linspace(0.1, 8, 100), np.rint(np.geomspace(1e3, 1e9, 40))))
    grid = {"eps0": eps0, "n": n, "delta": np.full(n.shape, 1e-6)}
    yield clones_row("clones, n 1e5 to 1e9", large, "clones")[0]
    yield clones_row("of these n r (1-r) >= 1e4", {k: v[heavy] for k, v in large.items()}, "clones")[0]
    yield clones_row("stronger, n 1e5 to 1e9", large, "stronger")[0]
    yield clones_row("clones, n 1e3 to 1e5", random_points(size // 8, 2, (3, 5)), "clones")[0]
    yield clones_row("clones, grid 100 eps0 x 40 n, 1e3 to 1e9, delta 1e-6", grid, "clones")[0]


def named(size: int) -> Iterator[str]:
    """Table rows of named randomizers at points where 13 nodes suffice; for k-RR also at all points, and few people."""
    large, small = random_points(size, 0, (5, 9)), random_points(size, 2, (3, 5))
    for name, make in NAMED.items():
        made = upper_laws(jaxdp.Shuffled(make(large), large["n"]))
        apart = np.sum(np.where(made.first != made.second, made.base, 0.0), axis=(1, 2))
        heavy = np.flatnonzero(large["n"] * apart * (1 - apart) >= 1e4)
        heavy = heavy[: 4 if "Laplace" in name else None]
        yield named_row(f"{name}; n 1e5 to 1e9, n r (1-r) >= 1e4", make, {k: v[heavy] for k, v in large.items()})
        if name.startswith("k-RR"):
            yield named_row(f"{name}; n 1e5 to 1e9, all", make, {k: v[:32] for k, v in large.items()})
            yield named_row(f"{name}; n 1e3 to 1e5", make, {k: v[:8] for k, v in small.items()})


def baseline_delta(users: float, eps0: float, epsilon: float, deviations: float) -> float:
    """delta(epsilon) of the clones pair over the counts within so many standard deviations of their mean."""
    local, central, rate = np.exp(eps0), np.exp(epsilon), np.exp(-eps0)
    reach = min(deviations * np.sqrt(users * rate * (1 - rate)), users)
    counts = np.arange(max(0, int(users * rate - reach)), min(int(users), int(users * rate + reach)))
    x = np.floor((local * central - 1) / ((local - 1) * (1 + central)) * (counts + 1)) + 1
    term = (local - central) / (local + 1) * stats.binom.pmf(x - 1, counts, 0.5)
    term = term - (central - 1) * stats.binom.sf(x - 1, counts, 0.5)
    return stats.binom.pmf(counts, users - 1, rate) @ np.maximum(term, 0.0)


def baseline_epsilon(users: float, eps0: float, delta: float, deviations: float = np.inf) -> float:
    """The epsilon at which `baseline_delta` equals delta, by brentq."""

    def excess(epsilon: float) -> float:
        return np.log(baseline_delta(users, eps0, epsilon, deviations) / delta)

    with np.errstate(divide="ignore"):  # delta underflows at the upper end of the bracket
        return optimize.brentq(excess, 0.0, eps0 * (1 - 1e-9), rtol=1e-6)


def apple_epsilon(folder: pathlib.Path, users: int, eps0: float, delta: float) -> float:
    """Epsilon by the code in ``folder`` at its own accuracy: steps of 100 counts, ten halvings from its closed form."""
    sys.path.insert(0, str(folder))
    return importlib.import_module("computeamplification").numericalanalysis(users, eps0, delta, 10, 100, True)


def against_baseline(size: int, apple: pathlib.Path | None) -> list[str]:
    """Lines of a table: the baselines at n = 1e6, and jaxdp for one point alone and in a batch of ``size``."""
    rng = np.random.default_rng(3)
    p = {"eps0": rng.uniform(0.1, 6.0, size), "n": np.full(size, 1e6), "delta": 10.0 ** rng.uniform(-12, -5, size)}
    _, batch = clones_row("", p, "clones")
    single = [np.array([x]) for x in (1.0, 1e6, 1e-6)]
    alone = timed(lambda: clones_bounds("epsilon", *single, "clones", GAP))
    mechanism = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 1e6)
    verb = timed(lambda: jaxdp.epsilon_bounds(mechanism, 1e-6))
    lines = ["| what | CPU seconds a point | times ours in a batch | epsilon |", "|---|---|---|---|"]
    baselines = [
        ("SciPy, all counts", lambda: baseline_epsilon(1e6, 1.0, 1e-6)),
        ("SciPy, counts within 10 standard deviations", lambda: baseline_epsilon(1e6, 1.0, 1e-6, 10.0)),
    ]
    if apple:
        baselines.append(
            ("apple/ml-shuffling-amplification, step 100, 10 halvings", lambda: apple_epsilon(apple, 10**6, 1.0, 1e-6))
        )
    for name, call in baselines:
        start = time.process_time()
        answer = call()
        seconds = time.process_time() - start
        lines.append(f"| {name} | {seconds:.2g} | {seconds / batch * 1e6:.0f} | {answer:.9g} |")
    exact = float(alone.answer.upper[0])
    for name, one, answer in (("certified pair", alone, exact), ("`epsilon_bounds`", verb, verb.answer.upper)):
        lines.append(f"| {name}, one point alone | {one.warm:.2g} | {one.warm / batch * 1e6:.0f} | {answer:.9g} |")
    lines.append(f"| certified pair, batch of {size} (eps0 0.1 to 6) | {batch / 1e6:.2g} | 1 | - |")
    return lines


ROUNDS = [
    ("any randomizer, eps0 1 (clones)", lambda: jaxdp.LocalRandomizer(1.0), 1e6),
    ("k-RR, eps0 1, k 10", lambda: jaxdp.RandomizedResponse(1.0, 10.0), 1e6),
    ("k-RR, eps0 1, k 10", lambda: jaxdp.RandomizedResponse(1.0, 10.0), 1e3),
    ("k-RR, eps0 3, k 3", lambda: jaxdp.RandomizedResponse(3.0, 3.0), 1e4),
    ("OUE, eps0 2, k 100", lambda: jaxdp.UnaryEncoding(2.0, 100.0), 1e5),
]


def compositions(quick: bool) -> Iterator[str]:
    """Rows: ten rounds; seconds of the first batch, ms a point alone and in a batch of 4 deltas, both bounds."""
    for name, make, users in ROUNDS[:1] if quick else ROUNDS:
        composed = jaxdp.repeat(jaxdp.Shuffled(make(), users), 10)
        batch = timed(lambda composed=composed: jaxdp.epsilon_bounds(composed, np.geomspace(1e-9, 1e-5, 4)))
        alone = timed(lambda composed=composed: jaxdp.epsilon_bounds(composed, 1e-6))
        lower, upper = alone.answer
        yield (
            f"| {name} | {users:.0e} | {batch.first:.1f} | {1e3 * alone.warm:.0f} | {1e3 * batch.warm / 4:.0f} | "
            f"{lower:.7g} | {upper:.7g} |"
        )


def renyi(quick: bool) -> Iterator[str]:
    """Rows: Renyi divergence of one round at 16 orders, milliseconds an order alone and together."""
    orders = np.geomspace(1.5, 256, 16)
    for name, make, users in ROUNDS[:1] if quick else ROUNDS[:3]:
        mechanism = jaxdp.Shuffled(make(), users)
        batch = timed(lambda m=mechanism: jaxdp.renyi(m, orders))
        alone = timed(lambda m=mechanism: jaxdp.renyi(m, 16.0))
        yield (
            f"| {name} | {users:.0e} | {batch.first:.1f} | {1e3 * alone.warm:.0f} | {1e3 * batch.warm / 16:.0f} | "
            f"{float(alone.answer):.7g} |"
        )


def golden_gaps() -> Iterator[str]:
    """Rows: family, number of cases, least and largest (upper - exact)/exact."""

    def shuffled(make: Callable[[dict[str, float]], Any], bound: str | None) -> Callable[[dict[str, float]], float]:
        return lambda c: jaxdp.epsilon(jaxdp.Shuffled(make(c), c["n"], bound), c["delta"])

    def local(c: dict[str, float]) -> Any:
        return jaxdp.LocalRandomizer(c["eps0"])

    def divergence(c: dict[str, float]) -> float:
        return float(jaxdp.renyi(jaxdp.Shuffled(local(c), c["n"]), c["alpha"]))

    families: dict[str, tuple[Callable[[dict[str, float]], float], str]] = {
        "clones": (shuffled(local, "clones"), "eps"),
        "stronger": (shuffled(local, "stronger"), "eps"),
        "krr": (shuffled(lambda c: jaxdp.RandomizedResponse(c["eps0"], c["k"]), None), "eps"),
        "renyi_clones": (divergence, "value"),
    }
    for name, (ours, key) in families.items():
        cases = [c for c in GOLDEN if c["family"] == name and "kind" not in c and float(c[key]) > 0]
        numbers = [{k: float(v) for k, v in c.items() if k != "family"} for c in cases]
        exact = np.array([c[key] for c in numbers])
        gap = (np.array([ours(c) for c in numbers]) - exact) / exact
        yield f"| {name} | {len(cases)} | {gap.min():.1e} | {np.median(gap):.1e} | {gap.max():.1e} |"


def first_calls() -> Iterator[str]:
    """Rows: first answers of this process, in this order; later ones share compiled code with earlier ones."""
    krr = jaxdp.Shuffled(jaxdp.RandomizedResponse(2.0, 10.0), 1e6)
    local = jaxdp.Shuffled(jaxdp.LocalRandomizer(2.0), 1e6)
    few = jaxdp.Shuffled(jaxdp.LocalRandomizer(2.0), 1e3)
    calls = {
        "`epsilon_bounds`, any randomizer, n = 1e6 (with the canary)": lambda: jaxdp.epsilon_bounds(local, 1e-6),
        "then n = 1e3": lambda: jaxdp.epsilon_bounds(few, 1e-6),
        "then k-RR, n = 1e6": lambda: jaxdp.epsilon_bounds(krr, 1e-6),
        "then `delta_bounds`, any randomizer": lambda: jaxdp.delta_bounds(local, 0.01),
        "then ten rounds of k-RR": lambda: jaxdp.epsilon_bounds(jaxdp.repeat(krr, 10), 1e-6),
        "then Renyi of k-RR, order 16": lambda: jaxdp.renyi(krr, 16.0),
    }
    for name, call in calls.items():
        start = time.process_time()
        call()
        yield f"| {name} | {time.process_time() - start:.1f} |"


def report(quick: bool, apple: pathlib.Path | None) -> Iterator[str]:
    """The lines of the page, as they are measured."""
    size = 64 if quick else 4096
    columns = (
        "points | bracket, us a point | gap: median | 99% | worst | verb, us a point | verb: median distance |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    yield from [
        "# Shuffle amplification: accuracy and time",
        "",
        f"jax {jax.__version__}, scipy {scipy.__version__}, {platform.machine()}, {jax.default_backend()}, float64. "
        "All times are CPU time of one thread; warm times are those of a second call.",
        "",
        "## First answers",
        "",
        "CPU seconds of a fresh process without imports; NumPy answers a few points, long sums are compiled.",
        "",
        "| call | CPU s |",
        "|---|---|",
    ]
    yield from first_calls()
    precision._COMPILE_AFTER = 0  # from here on every kernel is compiled, so that warm times are those of programs
    yield from [
        "",
        "## One round",
        "",
        "Epsilon at random points: eps0 uniform in 0.1 to 8, n and delta (1e-12 to 1e-5) log-uniform. Bracket: two "
        "certified bounds of one theorem's epsilon, aim 1e-6, and their relative gap. Verb: "
        "`jaxdp.epsilon_bounds`; its lower end is that of a data set, so its distance says how far the theorem may be "
        "from the truth, not how accurate the arithmetic is. Points at which 13 nodes do not suffice (small "
        "n r (1-r), r the mass of the outcomes that tell two inputs apart) take most of the time of a row.",
        "",
        f"| any randomizer | {columns}",
    ]
    yield from any_randomizer(size)
    yield from [
        "",
        f"| named randomizer | {columns}",
    ]
    yield from named(size // 64)
    yield from [
        "",
        "## Against other code",
        "",
        "Clones, n = 1e6, eps0 = 1, delta = 1e-6, brentq to 1e-6. SciPy's numbers are estimates without a certificate.",
        "",
    ]
    yield from against_baseline(size, apple)
    yield from [
        "",
        "## Ten composed rounds",
        "",
        "`epsilon_bounds(repeat(round, 10), 1e-6)`; the batch is 4 deltas, 1e-9 to 1e-5. The lower bound is that of a "
        "data set (all others hold one value; any randomizer: two-point randomized response).",
        "",
        "| round | n | first batch, s | alone, ms | in a batch, ms a point | lower | upper |",
        "|---|---|---|---|---|---|---|",
    ]
    yield from compositions(quick)
    yield from [
        "",
        "## Renyi divergence of one round",
        "",
        "Upper bounds, order 16 alone, and 16 orders from 1.5 to 256 together.",
        "",
        "| round | n | first batch, s | alone, ms | together, ms an order | order 16 |",
        "|---|---|---|---|---|---|",
    ]
    yield from renyi(quick)
    yield from [
        "",
        "## Against exact values",
        "",
        "(upper - exact)/exact of the cases in tests/data/shuffle.json.",
        "",
        "| family | cases | least | median | largest |",
        "|---|---|---|---|---|",
    ]
    yield from () if quick else golden_gaps()
    yield ""


def main() -> None:
    """Print the page, and write it unless --quick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few points and cases, printed and not written")
    parser.add_argument("--apple", type=pathlib.Path, help="a checkout of apple/ml-shuffling-amplification")
    given = parser.parse_args()
    quick, lines = given.quick, []
    for line in report(quick, given.apple):
        print(line, flush=True)
        lines.append(line)
    if not quick:
        (ROOT / "results").mkdir(exist_ok=True)
        (ROOT / "results" / "shuffle.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
