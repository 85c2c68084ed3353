"""``jaxdp epsilon | delta | tradeoff``: certified bounds at given points."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdp
from jaxdp.cli.mechanisms import axes_of, build, points_of
from jaxdp.cli.parser import add_target_command, destination, progress_option
from jaxdp.cli.ranges import parse_range
from jaxdp.cli.table import check_table, print_table
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.runtime.progress import pieces
from jaxdp.typing import Relation

_TARGETS = {"epsilon": "delta", "delta": "epsilon", "tradeoff": "false_positive_rate"}
_ROUNDINGS = {
    "epsilon": {"lower": "down", "epsilon": "up"},
    "delta": {"lower": "down", "delta": "up"},
    "tradeoff": {"false_negative_rate": "down"},
}
"""The columns that a command computes, and to which side each is rounded for display."""


def add_parsers(commands: Any) -> None:
    """The three commands."""
    texts = {
        "epsilon": "certified epsilon at a delta",
        "delta": "certified delta at an epsilon",
        "tradeoff": "certified lower bound of the false negative rate at a false positive rate",
    }
    for verb, text in texts.items():
        add_target_command(commands, verb, text, functools.partial(_options, verb), _bounds)


def _options(verb: str, parser: argparse.ArgumentParser, before: bool) -> None:
    target = _TARGETS[verb]
    flag = "--" + target.replace("_", "-")
    parser.add_argument(flag, dest=destination(target, before), required=not before, metavar="RANGE")
    text = "write all rows with all their digits"
    parser.add_argument("--out", dest=destination("out", before), metavar="FILE.csv", help=text)
    if verb != "tradeoff":
        text = "relative distance of the bounds at which more work is not worth it, in (0, 1) (default 1e-6)"
        parser.add_argument("--gap", dest=destination("gap", before), type=float, metavar="GAP", help=text)
    progress_option(parser, before)


def _verb(verb: str, relation: Relation | None, gap: float | None) -> Callable[[Any, Any], dict[str, Any]]:
    """The function (mechanism, points) -> columns."""

    def columns(mechanism: Any, points: Any) -> dict[str, Any]:
        if verb == "tradeoff":
            return {"false_negative_rate": jaxdp.tradeoff(mechanism, points, relation=relation)}
        asked = {} if gap is None else {"gap": gap}
        bounds_of = jaxdp.epsilon_bounds if verb == "epsilon" else jaxdp.delta_bounds
        return dict(zip(("lower", verb), bounds_of(mechanism, points, relation=relation, **asked), strict=True))

    return columns


def _bounds(arguments: argparse.Namespace, mechanism: Any) -> None:
    verb, target = arguments.verb, _TARGETS[arguments.verb]
    text, table = getattr(arguments, target), arguments.out
    if text is None or (mechanism is None and "mechanism" not in arguments):
        flag = "--" + target.replace("_", "-")
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json and {flag}; got neither in full.")
    check_table(table)
    evaluate = _verb(verb, arguments.relation, getattr(arguments, "gap", None))
    rows = (
        _of_name(arguments, target, evaluate)
        if mechanism is None
        else _of_record(mechanism, arguments, target, evaluate)
    )
    columns: dict[str, list[Any]] = {}
    for piece in rows:
        for name, values in piece.items():
            columns.setdefault(name, []).extend(np.asarray(values).tolist())
    print_table(columns, _ROUNDINGS[verb], arguments.json, table)


def _of_name(arguments: argparse.Namespace, target: str, evaluate: Callable) -> Iterator[dict[str, Any]]:
    axes = axes_of(arguments) | {target: parse_range(target, getattr(arguments, target))}
    for rows, case in points_of(arguments, axes):
        names = {name: [value] * len(rows[target]) for name, value in case.items()}
        yield rows | names | evaluate(build(arguments.mechanism, rows | case), rows[target])


def _of_record(
    mechanism: Any, arguments: argparse.Namespace, target: str, evaluate: Callable
) -> Iterator[dict[str, Any]]:
    points = parse_range(target, getattr(arguments, target)).reshape(-1, *[1] * len(batch_shape(mechanism)))
    for piece in pieces(len(points), arguments.progress):
        found = evaluate(mechanism, points[piece])
        shape = next(iter(found.values())).shape
        yield {name: np.broadcast_to(a, shape).ravel() for name, a in ({target: points[piece]} | found).items()}
