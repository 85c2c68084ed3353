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
from jaxdp.cli.table import check_file, print_table
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.runtime.extras import pieces

_Columns: TypeAlias = dict[str, Any]
_Verb: TypeAlias = Callable[[Any, Any], _Columns]
# verb: (what it is asked at; the columns that it computes, with the side to which each is rounded for display; help)
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
    """The three commands."""
    for verb, (_, _, text) in _VERBS.items():
        add_target_command(commands, verb, text, functools.partial(_options, verb), _bounds)


def _options(verb: str, parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--" + _VERBS[verb][0].replace("_", "-"), required=required, metavar="RANGE")
    parser.add_argument("--out", metavar="FILE.csv", help="write all rows with all their digits")
    if verb != "tradeoff":
        text = "relative distance of the bounds at which more work is not worth it, in (0, 1) (default 1e-6)"
        parser.add_argument("--gap", type=float, metavar="GAP", help=text)
    progress_option(parser)


def _bounds(arguments: argparse.Namespace) -> None:
    target, roundings, _ = _VERBS[arguments.verb]
    require_full(arguments, getattr(arguments, target) is not None, "and --" + target.replace("_", "-"))
    if arguments.out is not None:
        check_file("out", arguments.out, (".csv",))
    points = parse_range(target, getattr(arguments, target))
    asked = {} if getattr(arguments, "gap", None) is None else {"gap": arguments.gap}

    def evaluate(mechanism: Any, points: Any) -> _Columns:
        verbs: dict[str, Any] = {
            "epsilon": jaxdp.epsilon_bounds,
            "delta": jaxdp.delta_bounds,
            "tradeoff": jaxdp.tradeoff,
        }
        found = verbs[arguments.verb](mechanism, points, relation=arguments.relation, **asked)
        return dict(zip(roundings, found if len(roundings) == 2 else (found,), strict=True))

    columns: dict[str, list[Any]] = {}
    for rows in (_of_name if arguments.source is None else _of_file)(arguments, target, points, evaluate):
        for name, values in rows.items():
            columns.setdefault(name, []).extend(np.asarray(values).tolist())
    print_table(columns, roundings, arguments.json, arguments.out)


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
