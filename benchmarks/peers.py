"""jaxdp beside dp_accounting's PLD and RDP accountants and prv_accountant: epsilon, CPU time, failures.

Run `python benchmarks/peers.py` (needs the extra bench); it writes benchmarks/results/peers.md. `--quick` takes a few
cheap rows and prints only. Every number has a call of its own. A cheap call is repeated, and the later calls are timed.
CPU times are those of all threads of this process; every accountant runs on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import pathlib
import platform
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from dp_accounting import dp_event, rdp
from dp_accounting.pld import PLDAccountant

import jaxdp
from jaxdp import interop

SEED, POINTS = 20261123, 24
LIMIT = 4.0  # CPU seconds an accountant has for one number
CHEAP = 1.0  # CPU seconds up to which a first call counts as a warm-up
TICKS = 0.1  # CPU seconds, at least, of the calls that are averaged: the clock may tick in steps of some milliseconds
RELATION = interop.NeighboringRelation
ADD, REPLACE, SPECIAL = RELATION.ADD_OR_REMOVE_ONE, RELATION.REPLACE_ONE, RELATION.REPLACE_SPECIAL
GAUSSIAN, LAPLACE, SAMPLED = dp_event.GaussianDpEvent, dp_event.LaplaceDpEvent, dp_event.PoissonSampledDpEvent
RESPONSE, MIXTURE = dp_event.RandomizedResponseDpEvent, dp_event.MixtureOfGaussiansDpEvent
NO_EVENT = "no event"


class Row(NamedTuple):
    """One line of the table. events: (event, count) of dp_accounting. prvs: (class, arguments, count), or None.

    mechanism: what jaxdp accounts for; None: the translation of the events.
    """

    name: str
    delta: float
    events: Sequence[tuple[dp_event.DpEvent, int]] = ()
    prvs: Sequence[tuple[str, tuple[float, ...], int]] | None = None
    relation: RELATION = ADD
    mechanism: jaxdp.Mechanism | None = None


class Cell(NamedTuple):
    """What an accountant answered: a number, or a text that says why there is none. seconds: of CPU time."""

    value: float | tuple[float, float] | str
    seconds: float


def dpsgd_row(sigma: float, q: float, steps: int, delta: float) -> Row:
    return Row(
        f"DP-SGD {sigma:.4g}, {q:.3g}, {steps}",
        delta,
        [(SAMPLED(q, GAUSSIAN(sigma)), steps)],
        [("PoissonSubsampledGaussianMechanism", (q, sigma), steps)],
    )


def random_rows(points: int) -> list[Row]:
    """sigma 0.5..10, q 1e-4..0.1, T 1e2..1e5, delta 1e-9..1e-5, log-uniform."""
    low, high = np.log([0.5, 1e-4, 1e2, 1e-9]), np.log([10, 0.1, 1e5, 1e-5])
    drawn = np.exp(np.random.default_rng(SEED).uniform(low, high, (points, 4)))
    return [dpsgd_row(float(s), float(q), round(t), float(d)) for s, q, t, d in drawn]


def other_rows() -> list[Row]:
    """Mechanisms that at least one peer supports, and shuffling and random allocation, which none supports."""
    three = [(GAUSSIAN(5.0), 10), (LAPLACE(10.0), 20), (SAMPLED(0.01, GAUSSIAN(1.0)), 1000)]
    return [
        Row("Gaussian 1", 1e-5, [(GAUSSIAN(1.0), 1)], [("GaussianMechanism", (1.0,), 1)]),
        Row("Gaussian 20, 1000 times", 1e-9, [(GAUSSIAN(20.0), 1000)], [("GaussianMechanism", (20.0,), 1000)]),
        Row("Laplace 2", 1e-6, [(LAPLACE(2.0), 1)], [("LaplaceMechanism", (0.5,), 1)]),
        Row("Laplace 10, 100 times", 1e-6, [(LAPLACE(10.0), 100)], [("LaplaceMechanism", (0.1,), 100)]),
        Row("discrete Laplace 0.2, 50 times", 1e-6, [(dp_event.DiscreteLaplaceDpEvent(0.2, 1), 50)]),
        Row("sampled Laplace 1, 0.01, 1000", 1e-6, [(SAMPLED(0.01, LAPLACE(1.0)), 1000)]),
        Row(
            "Gaussian + Laplace + DP-SGD",
            1e-6,
            three,
            [
                ("GaussianMechanism", (5.0,), 10),
                ("LaplaceMechanism", (0.1,), 20),
                ("PoissonSubsampledGaussianMechanism", (0.01, 1.0), 1000),
            ],
        ),
        Row("randomized response, replace, 20 times", 1e-6, [(RESPONSE(0.5, 4), 20)], relation=REPLACE),
        Row("randomized response, special, once", 1e-6, [(RESPONSE(0.5, 4), 1)], relation=SPECIAL),
        Row("DP-SGD 2, 0.01, 1000, replace", 1e-6, [(SAMPLED(0.01, GAUSSIAN(2.0)), 1000)], relation=REPLACE),
        Row(
            "batches of 100 of 10000, Gaussian 4, 1000, replace",
            1e-6,
            [(dp_event.SampledWithoutReplacementDpEvent(10_000, 100, GAUSSIAN(4.0)), 1000)],
            relation=REPLACE,
        ),
        Row(
            "tree of 1023 steps, Gaussian 10",
            1e-6,
            [(dp_event.SingleEpochTreeAggregationDpEvent(10.0, 1023), 1)],
            relation=SPECIAL,
        ),
        Row("mixture of 0, 1, 2; Gaussian 5; 100 times", 1e-6, [(MIXTURE(5.0, [0, 1, 2], [0.9, 0.09, 0.01]), 100)]),
        Row(
            "batches truncated at 150 of 10000, q 0.01, Gaussian 2, 1000",
            1e-6,
            [(dp_event.TruncatedSubsampledGaussianDpEvent(10_000, 0.01, 150, 2.0), 1000)],
        ),
        Row("zCDP 0.01", 1e-6, [(dp_event.ZCDpEvent(0.01), 1)]),
        Row(
            "shuffled, 1e5 people, local epsilon 1",
            1e-6,
            relation=REPLACE,
            mechanism=jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 100_000),
        ),
        Row("allocation, 100 steps, Gaussian 1", 1e-6, mechanism=jaxdp.RandomAllocation(jaxdp.Gaussian(1.0), 100)),
    ]


def quick_rows() -> list[Row]:
    """One row where all answer, one where none of the peers has an event, one that jaxdp refuses."""
    rows = other_rows()
    return [rows[0], *(row for row in rows if row.name.startswith(("zCDP", "shuffled")))]


def ours(row: Row) -> tuple[float, float]:
    mechanism = row.mechanism
    if mechanism is None:
        parts = [jaxdp.repeat(interop.from_dp_event(event, row.relation), count) for event, count in row.events]
        mechanism = jaxdp.compose(*parts)
    bounds = jaxdp.epsilon_bounds(mechanism, row.delta, relation=interop.relation_name(row.relation))
    return float(bounds.lower), float(bounds.upper)


def by_dp_accounting(accountant: PLDAccountant | rdp.RdpAccountant, row: Row) -> float:
    for event, count in row.events:
        if isinstance(event, RESPONSE):  # its PLD accountant counts a repeated one once
            for _ in range(count):
                accountant.compose(event)
        else:
            accountant.compose(event, count)
    return float(accountant.get_epsilon(row.delta))


def halved(row: Row) -> Row:
    """The row; under replace_one with half the noise of fixed-size batches, which RDP reads relative to two bounds."""
    kind = dp_event.SampledWithoutReplacementDpEvent
    if row.relation is not REPLACE or not any(isinstance(event, kind) for event, _ in row.events):
        return row
    events = [
        (kind(e.source_dataset_size, e.sample_size, GAUSSIAN(e.event.noise_multiplier / 2)), n) for e, n in row.events
    ]
    return row._replace(events=events)


def by_prv(row: Row) -> float:
    import prv_accountant

    prvs = [getattr(prv_accountant, name)(*arguments) for name, arguments, _ in row.prvs]
    counts = [count for *_, count in row.prvs]
    accountant = prv_accountant.PRVAccountant(
        prvs=prvs, max_self_compositions=counts, eps_error=0.01, delta_error=row.delta / 1000
    )
    return float(accountant.compute_epsilon(delta=row.delta, num_self_compositions=counts)[2])


def cell(call: Callable[[], float | tuple[float, float]], limit: float = LIMIT) -> Cell:
    """The answer and its CPU time. After an error, or ``limit`` CPU seconds, the reason takes the answer's place."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"{limit:g} CPU s passed")

    def once() -> Cell:
        start = time.process_time()
        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            value = call()
        except Exception as error:  # the failures of an accountant are part of the comparison
            value = short(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        return Cell(value, time.process_time() - start)

    first = once()
    if isinstance(first.value, str) or first.seconds > CHEAP:
        return first
    seconds = [once().seconds]
    while sum(seconds) < TICKS and len(seconds) < 50:
        seconds.append(once().seconds)
    return Cell(first.value, sum(seconds) / len(seconds))


def short(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    _, bracket, reason = text.partition("Error: [")  # dp_accounting's errors: the event, then the reason in brackets
    text = reason.split("]")[0] if bracket else text
    name = next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_"))
    return f"{name}: {text[:57] + '...' if len(text) > 60 else text}"


def compared(row: Row) -> list[Cell]:
    """The cells of a row: jaxdp, PLD, RDP, prv."""
    nothing = Cell(NO_EVENT, math.nan)
    pld = rdp_ = nothing
    if row.events:
        pld = cell(lambda: by_dp_accounting(PLDAccountant(row.relation), row))
        rdp_ = cell(lambda: by_dp_accounting(rdp.RdpAccountant(neighboring_relation=row.relation), halved(row)))
    prv = nothing if row.prvs is None else cell(lambda: by_prv(row))
    return [cell(lambda: ours(row), 10 * LIMIT), pld, rdp_, prv]


def shown(value: float | tuple[float, float] | str, seconds: float) -> str:
    text = value if isinstance(value, str) else f"{value:.7g}"
    return text if math.isnan(seconds) else f"{text}; {seconds * 1e3:.3g}"


def line(row: Row, cells: list[Cell]) -> str:
    mine = cells[0].value
    pair = ("", mine) if isinstance(mine, str) else (f"{mine[0]:.9g}", f"{mine[1]:.9g}")
    theirs = " | ".join(shown(*one) for one in cells[1:])
    return f"| {row.name} | {row.delta:.2g} | {pair[0]} | {pair[1]}; {cells[0].seconds * 1e3:.3g} | {theirs} |"


def summary(table: list[list[Cell]]) -> list[str]:
    """For each peer, where jaxdp has an answer: answers, excess over jaxdp's upper bound, answers below, CPU time."""
    lines = []
    known = [cells for cells in table if not isinstance(cells[0].value, str)]
    for index, name in enumerate(("dp_accounting PLD", "dp_accounting RDP", "prv_accountant"), 1):
        asked = [cells for cells in known if cells[index].value != NO_EVENT]
        answered = [c for c in asked if not isinstance(c[index].value, str) and math.isfinite(c[index].value)]
        if not answered:
            continue
        excess = np.array([c[index].value / c[0].value[1] - 1 for c in answered])
        ratio = np.array([c[index].seconds / c[0].seconds for c in answered])
        below = sum(c[index].value < c[0].value[0] * (1 - 1e-9) for c in answered)
        lines.append(
            f"* {name}: {len(answered)} of {len(asked)} answered; relative excess over jaxdp's upper bound "
            f"{np.median(excess):.1e} (median; {excess.min():.1e} to {excess.max():.1e}); {below} below jaxdp's lower "
            f"bound; CPU time over jaxdp's {np.median(ratio):.2g} (median; {ratio.min():.2g} to {ratio.max():.2g})."
        )
    gaps = [1 - c[0].value[0] / c[0].value[1] for c in known]
    lines.append(
        f"* jaxdp: {len(known)} of {len(table)} answered; relative gap {np.median(gaps):.1e} (median), at most "
        f"{max(gaps):.1e}; {np.median([c[0].seconds for c in known]) * 1e3:.3g} ms (median)."
    )
    return lines


def section(title: str, rows: list[Row]) -> list[str]:
    table = [compared(row) for row in rows]
    return [
        f"## {title}",
        "",
        "| setting | delta | jaxdp lower | jaxdp upper; ms | PLD; ms | RDP; ms | prv upper; ms |",
        "|---|---|---|---|---|---|---|",
        *(line(row, cells) for row, cells in zip(rows, table, strict=True)),
        "",
        *summary(table),
        "",
    ]


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def header() -> list[str]:
    packages = ("jaxdp-accounting", "jax", "numpy", "dp-accounting", "prv-accountant")
    return [
        "# Peers",
        "",
        f"{platform.machine()}, cpu, {', '.join(map(version, packages))}. Written by benchmarks/peers.py.",
        "",
        "Epsilon; CPU milliseconds of all threads, mean of later calls where the first took less than "
        f"{CHEAP:g} s (0: below",
        "the clock's tick). Peers at their default accuracy (PLD: interval 1e-4; RDP: its default orders; prv:",
        f"eps_error 0.01, delta_error delta / 1000), with {LIMIT:g} CPU s a number (jaxdp: {10 * LIMIT:g}).",
        "prv accounts for remove only, all others for the larger of add and remove unless the setting names",
        "another relation.",
        "jaxdp's bounds are certified; PLD and RDP promise an upper bound, prv one up to delta_error. Randomized",
        "response is composed one by one (the PLD accountant counts a repeated one once). The RDP accountant gets the",
        "noise of fixed-size batches halved: it reads it over two norm bounds.",
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few cheap rows, print only")
    quick = parser.parse_args(arguments).quick
    cell(lambda: ours(dpsgd_row(1.0, 0.01, 100, 1e-5)), 10 * LIMIT)  # not timed: imports and first uses
    parts = (
        [("A few rows", quick_rows())]
        if quick
        else [
            (f"DP-SGD: {POINTS} random settings (seed {SEED}); sigma, q, T", random_rows(POINTS)),
            ("Other mechanisms", other_rows()),
        ]
    )
    lines = header()
    for title, rows in parts:
        lines += section(title, rows)
    print("\n".join(lines))
    if not quick:
        (pathlib.Path(__file__).parent / "results" / "peers.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
