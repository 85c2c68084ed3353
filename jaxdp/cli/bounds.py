"""``jaxdp epsilon | delta | tradeoff``: certified bounds at given points."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

import jaxdp
from jaxdp.cli.mechanisms import axes_of, build, points_of, read
from jaxdp.cli.parser import add_target_command, progress_option, require_full
from jaxdp.cli.ranges import parse_range
from jaxdp.cli.table import check_table, print_table
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.runtime.progress import pieces
from jaxdp.typing import Relation

_Columns: TypeAlias = dict[str, Any]
_Verb: TypeAlias = Callable[[Any, Any], _Columns]
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


def _options(verb: str, parser: argparse.ArgumentParser, prefix: str) -> None:
    target = _TARGETS[verb]
    flag = "--" + target.replace("_", "-")
    parser.add_argument(flag, dest=prefix + target, required=not prefix, metavar="RANGE")
    text = "write all rows with all their digits"
    parser.add_argument("--out", dest=prefix + "out", metavar="FILE.csv", help=text)
    if verb != "tradeoff":
        text = "relative distance of the bounds at which more work is not worth it, in (0, 1) (default 1e-6)"
        parser.add_argument("--gap", dest=prefix + "gap", type=float, metavar="GAP", help=text)
    progress_option(parser, prefix)


def _verb(verb: str, relation: Relation | None, gap: float | None) -> _Verb:
    """The function (mechanism, points) -> columns."""

    def columns(mechanism: Any, points: Any) -> dict[str, Any]:
        if verb == "tradeoff":
            return {"false_negative_rate": jaxdp.tradeoff(mechanism, points, relation=relation)}
        asked = {} if gap is None else {"gap": gap}
        bounds_of = jaxdp.epsilon_bounds if verb == "epsilon" else jaxdp.delta_bounds
        return dict(zip(("lower", verb), bounds_of(mechanism, points, relation=relation, **asked), strict=True))

    return columns


def _bounds(arguments: argparse.Namespace) -> None:
    verb, target = arguments.verb, _TARGETS[arguments.verb]
    flag = "--" + target.replace("_", "-")
    require_full(arguments, getattr(arguments, target) is not None, f"and {flag}")
    check_table(arguments.out)
    points = parse_range(target, getattr(arguments, target))
    evaluate = _verb(verb, arguments.relation, getattr(arguments, "gap", None))
    columns: dict[str, list[Any]] = {}
    for rows in (_of_name if arguments.source is None else _of_file)(arguments, target, points, evaluate):
        for name, values in rows.items():
            columns.setdefault(name, []).extend(np.asarray(values).tolist())
    print_table(columns, _ROUNDINGS[verb], arguments.json, arguments.out)


def _of_name(arguments: argparse.Namespace, target: str, points: np.ndarray, evaluate: _Verb) -> Iterator[_Columns]:
    for rows, case in points_of(arguments, axes_of(arguments) | {target: points}):
        names = {name: [value] * len(rows[target]) for name, value in case.items()}
        yield rows | names | evaluate(build(arguments.mechanism, rows | case), rows[target])


def _of_file(arguments: argparse.Namespace, target: str, points: np.ndarray, evaluate: _Verb) -> Iterator[_Columns]:
    mechanism = read(arguments.source)
    points = points.reshape(-1, *[1] * len(batch_shape(mechanism)))
    for piece in pieces(len(points), arguments.progress):
        found = evaluate(mechanism, points[piece])
        shape = next(iter(found.values())).shape
        yield {name: np.broadcast_to(a, shape).ravel() for name, a in ({target: points[piece]} | found).items()}
