"""``jaxdp epsilon | delta | tradeoff``: certified bounds at given points."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxdp
from jaxdp.cli.mechanisms import axes_of, build, cases, chosen, read
from jaxdp.cli.parser import (
    add_command,
    common_options,
    destination,
    from_option,
    mechanism_parsers,
    progress_option,
    refuse_misplaced,
)
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
        command = add_command(commands, verb, text)
        for mechanism in mechanism_parsers(command, required=False):
            _options(mechanism, verb)
            mechanism.set_defaults(run=_of_options)
        _options(command, verb, before=True)
        common_options(command, before=True)
        from_option(command)
        command.set_defaults(run=_of_file, verb=verb)


def _options(parser: argparse.ArgumentParser, verb: str, before: bool = False) -> None:
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


def _of_options(arguments: argparse.Namespace) -> None:
    refuse_misplaced(arguments)
    check_table(arguments.out)
    verb, target = arguments.verb, _TARGETS[arguments.verb]
    axes = axes_of(arguments) | {target: parse_range(target, getattr(arguments, target))}
    points = dict(zip(axes, (a.ravel() for a in np.meshgrid(*axes.values(), indexing="ij")), strict=True))
    evaluate = _verb(verb, arguments.relation, getattr(arguments, "gap", None))
    columns: dict[str, list[Any]] = {name: [] for name in (*axes, *chosen(arguments), *_ROUNDINGS[verb])}
    for case in cases(arguments):
        for piece in pieces(points[target].size, arguments.progress):
            rows = {name: values[piece] for name, values in points.items()}
            found = evaluate(build(arguments.mechanism, rows | case), rows[target])
            named = {name: [value] * rows[target].size for name, value in case.items()}
            for name, values in (rows | named | found).items():
                columns[name].extend(np.asarray(values).tolist())
    print_table(columns, _ROUNDINGS[verb], arguments.json, arguments.out)


def _of_file(arguments: argparse.Namespace) -> None:
    verb, target = arguments.verb, _TARGETS[arguments.verb]
    text = getattr(arguments, destination(target, True))
    if arguments.before_from is None or text is None:
        flag = "--" + target.replace("_", "-")
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json and {flag}; got neither in full.")
    check_table(arguments.before_out)
    mechanism = read(arguments.before_from)
    points = parse_range(target, text).reshape(-1, *[1] * len(batch_shape(mechanism)))
    evaluate = _verb(verb, arguments.before_relation, getattr(arguments, "before_gap", None))
    columns: dict[str, list[Any]] = {name: [] for name in (target, *_ROUNDINGS[verb])}
    for piece in pieces(len(points), arguments.before_progress):
        found = evaluate(mechanism, points[piece])
        shape = next(iter(found.values())).shape
        for name, values in ({target: points[piece]} | found).items():
            columns[name].extend(np.broadcast_to(values, shape).ravel().tolist())
    print_table(columns, _ROUNDINGS[verb], arguments.before_json, arguments.before_out)
