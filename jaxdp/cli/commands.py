"""``jaxdp epsilon | delta | tradeoff``: certified bounds at given points; ``jaxdp calibrate``; ``jaxdp report``."""

import argparse
import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxdp
from jaxdp.cli import mechanisms, text
from jaxdp.mechanisms.composition import batch_shape, natural_relation
from jaxdp.runtime.extras import pieces

# verb: (target option; computed columns, each with the direction in which it is rounded for display; help)
_VERBS = {
    "epsilon": ("delta", {"lower": "down", "epsilon": "up"}, "certified epsilon at a delta"),
    "delta": ("epsilon", {"lower": "down", "delta": "up"}, "certified delta at an epsilon"),
    "tradeoff": (
        "false_positive_rate",
        {"false_negative_rate": "down"},
        "certified lower bound of the false negative rate at a false positive rate",
    ),
}


def add_parsers(commands: Any) -> None:
    """Adds epsilon, delta, tradeoff, calibrate and report."""
    for verb, (_, _, what) in _VERBS.items():
        options = functools.partial(_bounds_options, verb)
        mechanisms.add_mechanism_command(commands, verb, what, options, _bounds, from_file=True)
    what = "the parameter value that meets a target epsilon and delta"
    mechanisms.add_mechanism_command(commands, "calibrate", what, _calibrate_options, _calibrate, solved_for=True)
    what = "one HTML page on a mechanism, for a privacy review board"
    mechanisms.add_mechanism_command(commands, "report", what, _report_options, _report, table=False, from_file=True)


def _rows(parts: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """One dict per row of the given pieces, each a dict of columns. The columns of a piece broadcast."""
    tables = ((part, (column.ravel().tolist() for column in np.broadcast_arrays(*part.values()))) for part in parts)
    return [dict(zip(part, row, strict=True)) for part, columns in tables for row in zip(*columns, strict=True)]


def _bounds_options(verb: str, parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--" + _VERBS[verb][0].replace("_", "-"), required=required, metavar="RANGE")
    parser.add_argument("--out", metavar="FILE.csv", help="write all rows, all digits, to this file; folders are made")
    if verb != "tradeoff":
        gap = "relative gap of the certified bounds at which work stops, in (0, 1) (default 1e-6)"
        parser.add_argument("--gap", type=float, metavar="GAP", help=gap)
    mechanisms.progress_option(parser)


def _bounds(arguments: argparse.Namespace) -> None:
    target, roundings, _ = _VERBS[arguments.verb]
    mechanisms.require_full(arguments, getattr(arguments, target) is not None, "and --" + target.replace("_", "-"))
    if arguments.out is not None:
        text.check_file("--out", arguments.out, (".csv",))
    points = text.parse_range(target, getattr(arguments, target))
    asked = {} if getattr(arguments, "gap", None) is None else {"gap": arguments.gap}
    verbs: dict[str, Any] = {"epsilon": jaxdp.epsilon_bounds, "delta": jaxdp.delta_bounds, "tradeoff": jaxdp.tradeoff}

    def columns(mechanism: Any, at: np.ndarray) -> dict[str, Any]:
        found = verbs[arguments.verb](mechanism, at, relation=arguments.relation, **asked)
        columns = dict(zip(roundings, found if len(roundings) == 2 else (found,), strict=True))
        return {"relation": np.array(arguments.relation or natural_relation(mechanism)), target: at} | columns

    def from_options() -> Iterator[dict[str, Any]]:
        for rows, case in mechanisms.points_of(arguments, mechanisms.axes_of(arguments) | {target: points}):
            others = {name: column for name, column in (rows | case).items() if name != target}
            yield others | columns(mechanisms.build(arguments.mechanism, rows | case), rows[target])

    def from_file() -> Iterator[dict[str, Any]]:
        mechanism = mechanisms.read(arguments.source)
        shape = batch_shape(mechanism)
        if 0 in shape:
            raise ValueError(
                f"--from must be a file with at least one mechanism, got {arguments.source!r}, of shape {shape}."
            )
        index = np.array([",".join(map(str, place)) for place in np.ndindex(shape)]).reshape(shape)
        spread = points.reshape(-1, *[1] * len(shape))
        for piece in pieces(len(points), arguments.progress):
            yield ({"index": index} if shape else {}) | columns(mechanism, spread[piece])

    rows = _rows(from_options() if arguments.source is None else from_file())
    text.print_table(rows, roundings, arguments.json, arguments.out)


def _calibrate_options(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--solve-for", required=required, metavar="OPTION", help="the option to solve for, such as noise-multiplier"
    )
    where = "where to search (default: all numbers > 0, from 1 outward); needed for a probability, such as 0:1"
    parser.add_argument("--bracket", metavar="LOW:HIGH", help=where)
    parser.add_argument("--epsilon", required=required, metavar="RANGE")
    parser.add_argument("--delta", required=required, metavar="RANGE")
    where = "of targets that no value meets: raise an error, or print nan and solve the others (default: raise)"
    parser.add_argument("--unreachable", choices=("raise", "nan"), default="raise", help=where)
    mechanisms.progress_option(parser)


def _calibrate(arguments: argparse.Namespace) -> None:
    def spelled(flag: str) -> str:
        return flag.lstrip("-").replace("-", "_")

    options = mechanisms.MECHANISMS[arguments.mechanism].options
    names = {spelled(flag): option.name for option in options for flag in (option.flag, *option.aliases)}
    wanted = names.get(spelled(arguments.solve_for), "")
    if not wanted:
        known = ", ".join(repr(name.replace("_", "-")) for name in names)
        raise ValueError(f"--solve-for must be one of {known}, got {arguments.solve_for!r}.")
    axes = mechanisms.axes_of(arguments, solved_for=wanted)
    axes |= {name: text.parse_range(name, getattr(arguments, name)) for name in ("epsilon", "delta")}
    bracket = text.parse_pair("--bracket", arguments.bracket, ":", "LOW:HIGH")

    def record_at(fixed: dict[str, Any], value: Any) -> Any:
        return mechanisms.build(arguments.mechanism, fixed | {wanted: value})

    def solved() -> Iterator[dict[str, Any]]:
        for rows, case in mechanisms.points_of(arguments, axes):
            make = functools.partial(record_at, rows | case)
            asked = {"bracket": bracket, "relation": arguments.relation, "unreachable": arguments.unreachable}
            values = jaxdp.calibrate(make, epsilon=rows["epsilon"], delta=rows["delta"], **asked)
            if bracket and np.any(np.isin(values, bracket)):
                print(
                    f"jaxdp: note: where {wanted} is an end of the bracket, every value between its ends meets the "
                    "target: the best one may lie beyond.",
                    file=sys.stderr,
                )
            # all digits: a value rounded for display might miss the target
            shown = [repr(float(value)).removesuffix(".0") for value in values]
            relation = np.array(arguments.relation or natural_relation(make(values)))
            yield rows | case | {"relation": relation, wanted: values if arguments.json else shown}

    text.print_table(_rows(solved()), {}, arguments.json)


def _report_options(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    for name, other in (("delta", "epsilon"), ("epsilon", "delta")):
        where = f"{name} at which {other} is certified; the first one is the headline"
        group.add_argument(f"--{name}", metavar="RANGE", help=where)
    mechanisms.progress_option(parser)
    parser.add_argument("--out", required=required, metavar="FILE.html", help="the page; folders are made")


def _report(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in ("delta", "epsilon") if getattr(arguments, name) is not None}
    complete = arguments.out is not None and len(given) == 1
    mechanisms.require_full(arguments, complete, "with --out FILE.html and --delta or --epsilon")
    text.check_file("--out", arguments.out, (".html", ".htm"))
    page = jaxdp.report(
        mechanisms.single(arguments) if arguments.source is None else mechanisms.read(arguments.source),
        **{name: text.parse_range(name, typed) for name, typed in given.items()},
        relation=arguments.relation,
        progress=arguments.progress,
    )
    pathlib.Path(arguments.out).write_text(page, encoding="utf-8")
    print(f"written: {arguments.out}", file=sys.stderr)
